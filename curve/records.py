"""The rows in a log of any kind: numbers and texts, by the names of columns.

A log is JSON lines, a JSON document, a table with a line of names, the console of verl or of
Hugging Face's trainers, or TensorBoard's events. Its content tells which.
"""

import csv
import json
import re
from collections import defaultdict
from pathlib import Path

from curve.files import read_text

# A record in a console, and a name and a value in it: of verl, in boxes (Stable-Baselines, OpenAI's
# baselines), and of Hugging Face.
CONSOLES = {
    r"\bstep:\d+ - .*": r"(?i)([^\s:]+):(?:\w+(?:\.\w+)*\()?(-?[\d.]+(?:e[-+]?\d+)?|nan)",
    r"(?m)(?:^\|.*\|\s*\n)+": r"\| *(\S+) *\| *(\S+) *\|",
    r"(?m)(?:^|[\r ])(\{'.*\})\s*$": r"'([^']+)': '?([^,'}]+)",
}
NO_VALUE = "|na|n/a|#n/a|null|none|nan|-".split("|")


def records_in(log: Path, notes: list[str]) -> list[dict]:
    """The records in a log: a file, "-" for standard input, or a folder with TensorBoard's events.

    notes: gets sentences about lines that are left out. ValueError, csv.Error or RecursionError if
    the log cannot be read, ImportError without TensorBoard's package, OSError without the file.
    """
    if log.is_dir() or "tfevents" in log.name:
        return event_records(log)
    text = re.sub(r"(?m)^#.*\n", "", read_text(log)).lstrip("\n")
    if not text.strip():
        raise ValueError("the file is empty: the run has logged nothing yet")
    if text.count("\ufffd") > len(text) / 100:
        raise ValueError("the file is no text")
    if re.match(r"[\s\0]*[{\[](?!')", text):  # a console has {'
        return json_records(text, notes)
    text = text.replace(" test_score", " val/test_score")  # verl's first validation
    for record, pair in CONSOLES.items():
        if found := re.findall(record, text):
            return [dict(re.findall(pair, line)) for line in found]
    return table_records(text.split("\n"))


def json_records(text: str, notes: list[str]) -> list[dict]:
    """The records in lines, in a list, or in the lists of an object, such as a trainer_state.json.

    Two lines, and one in a hundred, may be broken: a full disk leaves zero bytes, and a run may be
    writing the last one. The name of a list may say that its records are validations. Lists of
    numbers are columns, and those of one length a table. An object without lists is a record.
    """
    try:
        document = json.loads(text)
    except ValueError:
        document = []
        for number, line in enumerate(text.split("\n"), 1):
            try:
                document += [json.loads(line)] if line.strip() else []
            except ValueError:
                notes.append(f"! line {number} is no JSON, and left out: {line[:40]!r}")
    if len(notes) > 2 + len(document) / 100:
        raise ValueError(notes[0][2:])
    lists = document if isinstance(document, dict) else {"": document}
    records = defaultdict(dict)
    for name, values in lists.items():
        for i, value in enumerate(values if isinstance(values, list) else ()):
            if isinstance(value, dict):
                records[name, i] = {"kind": name} | value
            else:
                records[len(values), i][name] = value
    return [*records.values()] or [lists]


def table_records(lines: list[str]) -> list[dict]:
    """The rows of a table, without a last one that a run is writing."""
    delimiter = max(",\t;", key=lines[0].count)
    table = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    records = [*table]
    names = [*filter(None, table.fieldnames)]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(
            "neither JSON, nor a console of verl or Hugging Face, nor a table whose first line "
            f"names its columns, each once, like x,y: {lines[0][:40].strip()!r}"
        )
    if records and lines[-1] and None in records[-1].values():
        records.pop()
    for record in records:
        if None in record:
            raise ValueError(f"more values than columns (decimal commas?): {[*record.values()]}")
    return records


def event_records(path: Path) -> list[dict]:
    """The scalars in a file of events, or in all files of a folder: one record for each step, in
    order. What a later file has counts: a resumed run has made it again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    steps = defaultdict(dict)
    for tag in events.Tags()["scalars"]:
        for scalar in events.Scalars(tag):
            steps[scalar.step][tag] = scalar.value
    return [{"step": step} | row for step, row in sorted(steps.items())]


def row_of(record: dict, prefix: str = "") -> dict[str, float | str]:
    """The numbers and texts of a record. A record in it adds its name, as in eval/acc."""
    row = {}
    for name, value in record.items():
        if isinstance(value, dict):
            row |= row_of(value, "" if name in ("data", "metrics") else f"{prefix}{name}/")
        elif (found := value_of(value)) is not None:
            row[prefix + name] = found
    return row


def value_of(value) -> float | str | None:
    """A number, a text, or None for no value. True is 1, and 20 % is .2."""
    text = str(value).strip()
    if text.lower() in NO_VALUE:
        return None
    number = {"true": "1", "false": "0"}.get(text.lower(), text)
    try:
        return float(number.rstrip("% ")) / (100 if "%" in number else 1)
    except ValueError:
        return text
