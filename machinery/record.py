"""STAND-IN for the record, from train.py."""

import json
import sys
from pathlib import Path

from tqdm import tqdm


def last_line(folder: Path) -> dict:
    """The newest line in the log of a run, which may be writing it; {} if there is none."""
    try:
        lines = (folder / "log.jsonl").read_text().split("\n")[:-1]
    except OSError:
        lines = []
    return json.loads(lines[-1]) if lines else {}


def say(text: str) -> None:
    """Print above the progress bar."""
    tqdm.write(text, file=sys.stderr)
