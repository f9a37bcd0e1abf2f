"""Read the log of any RL framework as curves: pass rate over compute.

    read_log("runs/NAME")                          # the folder of a run of ours
    read_log("docs/study/loo/scalerl-seed0.jsonl") # the log of a run as it is published
    read_log("wandb.csv", y="all", percent=True)   # one curve for each run in the table

The content of a file tells its format, and its name does not matter. A format makes rows of the
file, one after the other, so that a large file streams. Then curve/columns.py chooses the columns
of compute and pass rate.
"""

import csv
import dataclasses
import io
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from curve.columns import Reading, Series, Table, beyond_0, read_curves

# The line in the file (-3: the third record of a document), and the values by column.
Row = tuple[int, dict]
Rows = Iterator[Row]

# The log of a folder is the first of these.
LOG_NAMES = (
    "log.jsonl",  # ours
    "trainer_state.json",  # TRL
    "metrics.jsonl",  # prime-rl
    "wandb-history.jsonl",  # W&B
    "progress.csv",  # RLlib and Stable-Baselines
    "checkpoint-*/trainer_state.json",  # TRL's last checkpoint
    "events.out.tfevents.*",  # TensorBoard
)
LONGEST_LINE = 50_000_000  # characters. A longer line is read in pieces
csv.field_size_limit(LONGEST_LINE)
RUN_OF_STUDY = re.compile(r"(.+)-seed\d+")
# The sampled tokens of one step, where tools/export.py has taken a run: in TRL, verl and prime-rl.
TOKENS_OF_STEP = ("tokens_of_step", "actor/tokens_of_step", "progress/output_tokens")

# --- 1. How lines look ----------------------------------------------------------------------------

# Names with numbers, as console logs print them: 'reward': 0.5 or reward=0.5. A number can be
# wrapped, as in np.float64(0.5).
_NAME = r"(?<![^\s,;|(\[{])([A-Za-z_][^\s=:,;|()\[\]{}'\"]*+)"
_NUMBER = r"(?:\w+(?:\.\w+)*\()?'?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?+%?|nan|[-+]?inf)"
QUOTED = re.compile(rf"['\"]([^'\"]{{1,200}})['\"]\s*:\s*{_NUMBER}", re.I)
PLAIN = re.compile(rf"{_NAME}\s*[=:]\s*{_NUMBER}(?![\w.:/]|,\d{{3}}(?!\d))", re.I)  # 1,000: none
# Console logs: how the part of a line with pairs begins, and how a pair looks. Verl's is taken if
# it has any pair, otherwise the one with the most: a model's text may hold pairs too.
VERL = re.compile(r"\bstep:\d+ - "), PLAIN
CONSOLES = (
    (re.compile(""), QUOTED),  # TRL, transformers, Unsloth
    (re.compile(""), PLAIN),  # prime-rl and others
)
# What else a line says: its step, and whether it is from training or from a validation.
COUNTED = re.compile(
    r"\b(step|iteration|episode|update|epoch|batch)(?: batch)?\s*[=:#]?\s*\[?(\d++)"
    r"(?![\d.]*%|[.,]\d|[a-z])",  # no percentage, no 1.5, no 1,000 and no 1k
    re.I,
)
_KINDS = "train|training|eval|evaluation|val|valid|validation|test"
KIND = re.compile(rf"(?<![\w/.-])({_KINDS})(?![\w/.-])", re.I)
BOX_LINE = re.compile(r"\| *[^|\s]+ *\| *[^|\s]* *\|\s*")  # | name | value |
CELL = re.compile(r'[\s"]*[-+]?[\d.,]+(e[-+]?\d+)?[\s%"]*', re.I)  # a number in a table


def _record(pairs: list[tuple]) -> dict:
    """A record of these names and values. ValueError if a name has two."""
    record = {}
    for name, value in pairs:
        if name in record:
            raise ValueError(f"{name!r} is there twice: remove one")
        record[name] = value
    return record


# float: an integer may have any length
parse_json = json.JSONDecoder(parse_int=float, object_pairs_hook=_record).decode


# --- 2. From a path to a curve --------------------------------------------------------------------


def read_log(path: str | os.PathLike, table: Table | None = None, **choices) -> list[Series]:
    """The curves in a log: one, or one for each column that `y` names.

    path: a file, "-" for standard input, the folder of a run, or FILE:COLUMN. table: of this log,
    if it has been read. choices: the fields of `Reading`. ValueError, with file and line, if there
    is no curve.
    """
    text = os.fspath(path)
    column = None
    # FILE:COLUMN, unless a file has this name.
    file, _, last = text.rpartition(":")
    if file and not Path(text).exists() and Path(file).exists():
        if choices.get("y"):
            raise ValueError(f"{text} names a column, and --y {choices['y']} another: give one")
        text = file
        column = last
        choices["y"] = column
    # A folder gives its name to the run, and so does the published log of a study's run.
    log = _log_in(Path(text))
    name = log.name
    if log.suffix == ".jsonl" and RUN_OF_STUDY.fullmatch(log.stem):
        name = log.stem
    elif text == "-":
        name = "standard input"
    elif any(log.absolute().match(pattern) for pattern in LOG_NAMES):
        name = log.absolute().parent.name
    try:
        return read_curves(table or read_table(log), column or name, Reading(**choices))
    except ValueError as error:
        raise ValueError(f"{log}: {error}") from None


def read_joined(logs: Sequence[str], **choices) -> list[Series]:
    """The curve of one run in two logs: ours, then the log of the engine to which tools/export.py
    took the run. Compute is sampled tokens: those of the second log come after all of ours.
    choices: the fields of `Reading` for the second log. ValueError if there are not two logs, or if
    the second has no point after its start."""
    if len(logs) != 2:
        raise ValueError(f"--join takes two logs, ours and then the engine's, not {len(logs)}")

    # Our log, with the tokens that it had sampled at its end.
    table = read_table(_log_in(Path(logs[0])))
    if "compute_tokens" not in table.columns:
        raise ValueError(
            f"{logs[0]}: this is no log of ours; --join takes ours first, and then the engine's"
        )
    before = np.nanmax(table.numbers("compute_tokens"))  # to the end, not the last point
    (ours,) = read_log(logs[0], table, x="compute_tokens", y="pass_rate")

    # Compute of theirs is the sum of the tokens of each step.
    log = _log_in(Path(logs[1]))
    table = read_table(log)
    of_step = next(filter(table.columns.__contains__, TOKENS_OF_STEP), None)
    if of_step is None:
        names = ", ".join(TOKENS_OF_STEP)
        raise ValueError(f"{log}: no column says how many tokens a step has sampled ({names})")
    choices["x"] = choices.get("x") or of_step
    curves = read_log(log, table, **choices)
    if len(curves) > 1:
        raise ValueError(f"--join: {log} has {len(curves)} curves: name the column of one with --y")
    (theirs,) = curves

    # Their points come after ours.
    x, y = beyond_0(theirs)  # at 0 it measures the model that ours ended with
    if not len(x):
        raise ValueError(f"{log}: no pass rate after its start, so there is nothing to join")
    notes = (*ours.notes, f"joined with {len(x)} points of {log}", *theirs.notes)
    x = np.append(ours.x, before + x)
    y = np.append(ours.y, y)
    return [dataclasses.replace(ours, x=x, y=y, notes=notes)]


def read_table(log: Path) -> Table:
    """The table of a log. ValueError, with the line, if no format fits, and OSError if the file
    cannot be read."""
    notes = []  # what was left out
    try:
        with _open(log) as binary:
            return Table(_rows(binary, notes), notes)
    except (json.JSONDecodeError, csv.Error, RecursionError) as error:
        raise ValueError(
            f"broken, cut off or nested too deeply ({error}): mend it, or write JSON lines"
        ) from None


# --- 3. Where a log lies --------------------------------------------------------------------------


def _log_in(folder: Path) -> Path:
    """The log in a folder; any other path is that of a log."""
    if not folder.is_dir():
        return folder
    logs = _logs_in(folder)
    if logs:
        return max(logs, key=lambda log: (len(str(log)), log))  # checkpoint-100 is after -90
    names = " and no ".join(LOG_NAMES)
    raise ValueError(f"{folder}: no {names} in this folder: name the file of the log")


def _logs_in(folder: Path) -> list[Path]:
    """The files in a folder that have the first of LOG_NAMES that any has."""
    found = ([path for path in folder.glob(name) if path.is_file()] for name in LOG_NAMES)
    return next(filter(None, found), [])


def runs_of_study(folder: Path) -> list[tuple[str, Path]]:
    """(variant, path) of each run of a study: of each VARIANT-seedN/log.jsonl, or of each published
    VARIANT-seedN.jsonl. They come in natural order, but `scalerl` first. In another folder without
    a log of its own, each folder that has one is a variant."""
    paths = {path.parent.name: path.parent for path in folder.glob("*/log.jsonl")}
    published = {path.stem: path for path in folder.glob("*.jsonl")}
    paths |= {name: path for name, path in published.items() if RUN_OF_STUDY.fullmatch(name)}
    runs = []
    for name in sorted(paths, key=_natural_order):
        match = RUN_OF_STUDY.fullmatch(name)
        runs.append((match[1] if match else "", paths[name]))
    if not any(variant for variant, _ in runs):  # no study
        inner = [] if _logs_in(folder) else sorted(folder.glob("*/"))
        runs = [("", each) for each in inner if _logs_in(each)]
    return sorted(runs, key=lambda run: run[0] != "scalerl")


def _natural_order(name: str) -> list:
    """The parts of a name, in which numbers are numbers: K8 comes before K16."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _open(log: Path) -> io.BufferedIOBase:
    """The bytes of a log, which can be read again and again."""
    binary = sys.stdin.buffer if str(log) == "-" else open(log, "rb")
    return binary if binary.seekable() else io.BytesIO(binary.read())


# --- 4. Formats -----------------------------------------------------------------------------------


def _rows(binary: io.BufferedIOBase, notes: list[str]) -> Rows:
    """The rows of a file. Its first bytes and its first two lines tell its format."""
    # What is no text is refused.
    head = binary.read(4096)
    binary.seek(0)
    if b"brain.Event:" in head[:64]:
        return _events(binary)
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    letters = head.decode(encoding, "replace")
    strange = re.findall("[\0-\x08\x0e-\x1a\ufffd]", letters)
    if 10 * len(strange) > len(letters):
        raise ValueError("this is no text: write the log as CSV or JSON lines")

    # JSON begins with a bracket. If the first line is a whole record, more of them follow, one a
    # line; otherwise the file is one document.
    text = io.TextIOWrapper(binary, encoding, errors="replace")
    lines = _lines(text)
    _, first = next(lines, (0, ""))
    _, second = next(lines, (0, ""))
    if not first:
        raise ValueError("the file is empty: the run has logged nothing yet")
    if re.match(r'\s*[\[{]\s*([\[\]{}"]|$)', first):
        is_record = re.fullmatch(r"\s*\{.*\}\s*", first)
        return _json_lines(text, notes) if second and is_record else _json_document(text)
    if len(first) == LONGEST_LINE:
        raise ValueError(
            f"the first line has more than {LONGEST_LINE:,} characters: this is no log"
        )
    if any(BOX_LINE.fullmatch(line) for _, line in itertools.islice(_lines(text), 100)):
        raise ValueError(
            "boxes on a console are not read: let the run write progress.csv, and name that"
        )

    # A table has a number in its second line. What looks like neither a table nor a console is read
    # as a table, whose errors are the plainest.
    delimiter = max(",\t;|", key=first.count)
    names, cells = (_cells(line, delimiter) for line in (first, second))
    is_table = 1 < len(names) == len(cells)
    if not (is_table and any(map(CELL.fullmatch, cells))):
        form = _console_form(text)
        if form:
            return _console_lines(text, *form)
    return _table_lines(text, delimiter, notes)


def _cells(line: str, delimiter: str) -> list[str]:
    """The cells of a line of a table. A quoted cell may hold delimiters, as W&B's do."""
    return next(csv.reader([line], delimiter=delimiter, skipinitialspace=True), [])


def _events(binary: io.BufferedIOBase) -> Rows:
    """The scalars in a file of TensorBoard, one a row. ValueError if its package is missing."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(
            "TensorBoard's events are read by its own package: pip install tensorboard, or download"
            " the scalar in TensorBoard as CSV"
        ) from None
    if not isinstance(getattr(binary, "name", None), str) or binary.name == "<stdin>":
        raise ValueError("TensorBoard's events are read out of a file, not from a pipe: name it")
    for i, event in enumerate(EventFileLoader(binary.name).Load(), 1):
        for scalar in event.summary.value:
            value = make_ndarray(scalar.tensor) if scalar.HasField("tensor") else np.array("")
            if value.size == 1 and value.dtype.kind == "f":
                yield -i, {"step": event.step, scalar.tag: value.item()}


def _lines(text: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    """The lines of a text from its start that are neither empty nor comments, numbered from 1."""
    text.seek(0)
    numbered = enumerate(iter(partial(text.readline, LONGEST_LINE), ""), 1)
    return ((i, line) for i, line in numbered if not line.isspace() and not line.startswith("#"))


def _json_lines(text: io.TextIOWrapper, notes: list[str]) -> Rows:
    for i, line in _lines(text):
        try:
            yield i, _flat(parse_json(line))
        except (json.JSONDecodeError, AttributeError):  # a list has no items
            if not line.endswith("\n"):  # a run is writing it, or was cut off
                notes.append(f"line {i} is cut off, and left out")
                return
            start = line[:40].strip()
            raise ValueError(
                f"line {i}: no valid JSON object: {start!r}: mend or remove it"
            ) from None
        except ValueError as error:
            raise ValueError(f"line {i}: {error}") from None


def _json_document(text: io.TextIOWrapper) -> Rows:
    """The rows of a list of records, of the lists of records in an object such as a
    trainer_state.json, or of a single record."""
    text.seek(0)
    document = parse_json(text.read())
    lists = {"": document}
    if isinstance(document, dict):
        lists = {name: value for name, value in document.items() if _is_of_records(value)}
        lists = lists or {"": [document]}
    # The name of a list may say that its records are validations.
    records = [(name, record) for name, records in lists.items() for record in records]
    for i, (name, record) in enumerate(records, 1):
        if isinstance(record, dict):
            yield -i, {"kind": name} | _flat(record)


def _is_of_records(value) -> bool:
    """Whether a value of JSON is a list of objects."""
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def _flat(record: dict, prefix: str = "") -> dict:
    """The numbers and texts of a record. A record in it adds its name, as in eval/acc, unless it is
    data or metrics whose names are not taken."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            named = f"{prefix}{name}/"
            inner = _flat(value, prefix if name in ("data", "metrics") else named)
            if inner.keys() & {*flat, *(prefix + each for each in record)}:
                inner = _flat(value, named)
            flat |= inner
        elif not isinstance(value, list):
            flat[prefix + name] = value
    return flat


def _console_form(text: io.TextIOWrapper) -> tuple[re.Pattern, re.Pattern] | None:
    """How the lines of a console log look; None if no line holds a pair."""
    if next(_console_lines(text, *VERL), None):
        return VERL
    pairs = {form: sum(len(row) for _, row in _console_lines(text, *form)) for form in CONSOLES}
    best = max(pairs, key=pairs.get)
    return best if pairs[best] else None


def _console_lines(text: io.TextIOWrapper, start: re.Pattern, pair: re.Pattern) -> Rows:
    """The rows of the lines that hold pairs, with the step and the kind that stand beside them."""
    for i, line in _lines(text):
        begin = start.search(line)
        line = line[begin.start() : 100_000] if begin else ""
        pairs = pair.findall(line)
        if not pairs:
            continue
        outside = pair.sub(" ", line)
        row = {name.lower(): value for name, value in COUNTED.findall(outside)}
        kind = KIND.search(outside)
        if kind:
            row["kind"] = kind[1].lower()
        said = {}
        for name, value in pairs:
            name = re.sub("^test_score", "val/test_score", name)  # verl's first validation
            # Two values of one name: it is not clear which is meant.
            if said.setdefault(name, value) != value:
                said[f"{name} (again)"] = value
        yield i, row | said


def _table_lines(text: io.TextIOWrapper, delimiter: str, notes: list[str]) -> Rows:
    first, line = next(_lines(text))
    skipped = first - 1  # comments, as in Stable-Baselines' monitor
    text.seek(0)
    names_in_line = len(_cells(line, delimiter))
    lines = enumerate(itertools.islice(text, skipped, None), first)
    lines = _without_cut_line(lines, names_in_line, delimiter, notes)
    table = csv.reader(lines, delimiter=delimiter, skipinitialspace=True)
    header = next(table)
    names = [name for name in header if name]
    if any(map(CELL.fullmatch, names[:1])) or len(set(names)) < len(names):
        raise ValueError(
            f"line {first}: a number or a name twice where column names are expected: write a line"
            " like x,y"
        )
    for cells in table:
        line = skipped + table.line_num
        if len(cells) > len(header):
            raise ValueError(f"line {line}: more values than the {len(names)} names: mend the line")
        has_points = any(re.fullmatch(r"\s*[-+]?\d*\.\d+\s*", cell) for cell in cells)
        if delimiter == ";" and not has_points:  # decimal commas
            cells = [re.sub(r"^([-+]?\d*),(\d+ ?%?)$", r"\1.\2", cell) for cell in cells]
        yield line, dict(zip(header, cells))


def _without_cut_line(
    numbered: Iterator[tuple[int, str]], names: int, delimiter: str, notes: list[str]
) -> Iterator[str]:
    """The lines of a table without a last one that was cut off: it has no end, and fewer cells than
    there are names."""
    for i, line in numbered:
        if not line.endswith("\n") and len(_cells(line, delimiter)) < names:
            notes.append(f"line {i} is cut off, and left out")
            return
        yield line
