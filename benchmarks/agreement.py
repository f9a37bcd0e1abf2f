"""How far the verdicts of data/tasks/mathematics.py agree with those of Math-Verify: pip install
math-verify==0.9.0

    python benchmarks/agreement.py outputs.jsonl

The lines of the file have "gold" and "answer", and perhaps "problem" and "label". The answer is
what stands in the box. A label is the verdict of others: true or false. The table has one line for
each file. With --list it is followed by all pairs on which the two do not agree.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from data import Problem
from data.tasks.mathematics import equal, score

SECONDS = 60  # of Math-Verify for a text; its own 5 are too few on a machine that is busy
HEAD = """\
| file | pairs | both right | both wrong | only ours right | only theirs right | agree |
|---|---|---|---|---|---|---|"""


def ours(row: dict) -> bool:
    """Our verdict; without the problem a copy of it is not noticed."""
    if "problem" not in row:
        return equal(row["gold"], row["answer"])
    return score(Problem(row["problem"], row["gold"], "mathematics"), rf"\boxed{{{row['answer']}}}")


def theirs(row: dict) -> bool:
    """The verdict of Math-Verify on the same two texts, each in a box."""
    from math_verify import parse, verify

    gold, answer = (
        parse(rf"\boxed{{{row[key]}}}", parsing_timeout=SECONDS) for key in ("gold", "answer")
    )
    return verify(gold, answer, timeout_seconds=SECONDS)


def labelled(row: dict) -> bool:
    return bool(row["label"])


def line(name: str, pairs: list[tuple[bool, bool]]) -> str:
    """A line of the table, for (verdict, other verdict) of each pair."""
    both_right, both_wrong = pairs.count((True, True)), pairs.count((False, False))
    ours_right, theirs_right = pairs.count((True, False)), pairs.count((False, True))
    agree = (both_right + both_wrong) / len(pairs)
    counts = f"{both_right} | {both_wrong} | {ours_right} | {theirs_right}"
    return f"| {name} | {len(pairs):,} | {counts} | {agree:.1%} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument(
        "--against",
        choices=("math-verify", "label"),
        default="math-verify",
        help="whose verdict it is",
    )
    parser.add_argument(
        "--list", action="store_true", help="print the pairs on which they do not agree"
    )
    flags = parser.parse_args(arguments)
    others = theirs if flags.against == "math-verify" else labelled
    print(HEAD)
    for file in flags.files:
        rows = [json.loads(text) for text in file.read_text().splitlines() if text.strip()]
        pairs = [(ours(row), others(row)) for row in rows]
        print(line(file.stem, pairs))
        for row, (our, other) in zip(rows, pairs):
            if flags.list and our != other:
                shown = {"ours": our, flags.against: other} | row
                print(json.dumps(shown, ensure_ascii=False), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
