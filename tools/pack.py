"""Put the logs of all runs of a study into one small file, as they are published.

    python -m tools.pack runs/loo docs/study/loo      # writes docs/study/loo/runs.jsonl
    python -m tools.pack runs/mine docs/study/mine --train kl_estimate entropy    # keeps these
                                                      # columns of each training step too
    python -m tools.study tables docs/study/loo       # the tables and figures of the packed logs

Each line of runs.jsonl is a line of the log of a run, with the name of the run in front. What fits
and tables need is kept: of validations the pass rates, the compute, and how completions ended;
warnings; how the run ended. Lines of training are left out, unless --train names columns of them,
whose numbers then have six digits.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from curve.files import write_whole
from curve.flags import option, read_flags, run_command
from machinery.files import json_lines, six_digits

# The columns that are kept of a line, by its kind: regular expressions.
KEPT = {
    "validation": "step|pass_rate.*|num_examples|compute_.*"
    "|completion_length|interrupted_fraction|truncated_fraction",
    "warning": "step|about|text",
    "end": "step|reason",
}


@dataclass(frozen=True)
class Pack:
    study: Path = option(help="the folder of the study, with RUN/log.jsonl for each run")
    target: Path = option(help="the folder that gets runs.jsonl")
    train: tuple[str, ...] = option((), "columns of training that are kept")


def packed(log: Path, train_columns: tuple[str, ...]) -> list[str]:
    """The lines of runs.jsonl that hold this log, which is RUN/log.jsonl."""
    kept = dict(KEPT)
    if train_columns:
        kept["train"] = "|".join(["step", *map(re.escape, train_columns)])
    lines = []
    for _, line in json_lines(log):
        kind = line["kind"]
        if kind not in kept:
            continue
        packed_line = {"run": log.parent.name, "kind": kind}
        for name, value in line.items():
            if re.fullmatch(kept[kind], name):
                rounded = kind == "train" and isinstance(value, float)
                packed_line[name] = six_digits(value) if rounded else value
        lines.append(json.dumps(packed_line) + "\n")
    return lines


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError or OSError, in one sentence, for a folder without logs."""
    options = read_flags(Pack, arguments, description=__doc__)
    logs = sorted(options.study.glob("*/log.jsonl"))
    if not logs:
        raise ValueError(
            f"{options.study}: no RUN/log.jsonl in this folder: name the folder of a study"
        )
    options.target.mkdir(parents=True, exist_ok=True)
    lines = [line for log in logs for line in packed(log, options.train)]
    for column in options.train:
        if not any(f'"{column}": ' in line for line in lines):
            raise ValueError(f"--train {column}: no training step of {options.study} has it")
    write_whole(options.target / "runs.jsonl", "".join(lines))
    print(f"{options.target / 'runs.jsonl'}: {len(logs)} runs")
    return 0


if __name__ == "__main__":
    run_command(main)
