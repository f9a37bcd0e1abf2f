"""What several benchmarks share. Whoever imports this finds the project's modules, and those of
tests/."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def make_parser(about: str) -> argparse.ArgumentParser:
    """A parser of flags whose help begins with this text, line by line."""
    lines = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=lines)


def run_training(folder: Path, name: str, *flags) -> tuple[list[dict], list[dict]]:
    """Run train.py in this folder: the lines of the steps and of the validations in its log."""
    command = [sys.executable, ROOT / "train.py", "--name", name, *flags]
    subprocess.run([*map(str, command)], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in open(folder / "runs" / name / "log.jsonl")]
    steps = [line for line in lines if line["kind"] == "train"]
    validations = [line for line in lines if line["kind"] == "validation"]
    return steps, validations


def training_seconds(line: dict) -> float:
    """Wall seconds of training up to this line of a log, without start-up and validations, with one
    generator and one trainer."""
    return 3600 * line["compute_device_hours"] / 2
