"""Put the logs of all runs of a study into one small file, as they are published.

    python -m tools.pack runs/loo docs/study/loo                                      # writes docs/study/loo/runs.jsonl
    python -m tools.pack runs/mine docs/study/mine --train kl_estimate entropy        # and these columns of each step
    python -m tools.study tables docs/study/loo                                            # its tables and figures

Each line of runs.jsonl is a line of the log of a run, with the name of the run in front. What fits
and tables need is kept: of validations the pass rates, the compute, and how completions ended;
warnings; how the run ended. Lines of training are left out, unless --train names columns of them,
whose numbers then have six digits.
"""

import argparse
import json
import re
from pathlib import Path

from curve.files import write_whole
from machinery.files import json_lines, six_digits

KEPT = {
    "validation": "step|pass_rate.*|num_examples|compute_.*|completion_length|interrupted_fraction|truncated_fraction",
    "warning": "step|about|text",
    "end": "step|reason",
}


def packed(log: Path, train_columns: list[str]) -> list[str]:
    """The lines of runs.jsonl that hold this log, which is RUN/log.jsonl."""
    kept = KEPT | (
        {"train": "|".join(["step", *map(re.escape, train_columns)])} if train_columns else {}
    )
    lines = []
    for _, line in json_lines(log):
        if (kind := line["kind"]) in kept:
            values = {name: value for name, value in line.items() if re.fullmatch(kept[kind], name)}
            if kind == "train":
                values = {
                    name: six_digits(v) if isinstance(v, float) else v for name, v in values.items()
                }
            lines.append(json.dumps({"run": log.parent.name, "kind": kind, **values}) + "\n")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "study", type=Path, help="the folder of the study, with RUN/log.jsonl for each run"
    )
    parser.add_argument("target", type=Path, help="the folder that gets runs.jsonl")
    parser.add_argument(
        "--train", nargs="+", default=[], metavar="COLUMN", help="columns of training that are kept"
    )
    options = parser.parse_args()
    logs = sorted(options.study.glob("*/log.jsonl"))
    if not logs:
        parser.error(
            f"{options.study}: no RUN/log.jsonl in this folder: name the folder of a study"
        )
    options.target.mkdir(parents=True, exist_ok=True)
    write_whole(
        options.target / "runs.jsonl",
        "".join(line for log in logs for line in packed(log, options.train)),
    )
    print(f"{options.target / 'runs.jsonl'}: {len(logs)} runs")


if __name__ == "__main__":
    main()
