"""Read the log of any RL framework as curves: pass rate over compute.

    read_log("runs/NAME")                                    # the folder of a run of ours
    read_log("wandb.csv", y="val/accuracy", percent=True)    # one curve for each run in the table

The format is told by the content: JSON lines (ours, verl's, prime-rl's), the trainer_state.json of transformers and
TRL, verl's console log, or a table with named columns (W&B, CSV). Each becomes rows, and each row remembers its place
in the file. Then the columns of compute and pass rate are chosen by name, and what they hold is checked.
"""

import csv
import difflib
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Row = tuple[str, dict]  # the place of a row ("log.csv, line 3"), and its values by column

LOG_NAMES = ("log.jsonl", "trainer_state.json", "metrics.jsonl")  # ours, transformers' and TRL's, prime-rl's
VERL_STEP = re.compile(r"\bstep:(\d+) - ")
VERL_VALUE = re.compile(r"([^\s:]+):(?:np\.\w+\()?([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))", re.I)

# Names of columns in use, best first; a name is matched in full, ignoring case.
COMPUTE_NAMES = (r"(compute_?)?(flops|flos)", r".*(gpu|device|accelerator)[ _-]?hours.*", r"compute.*",
                 r"((num|total|cumulative|sampled)_)?tokens|num_input_tokens_seen",
                 r"(wall_?)?(seconds|time|clock|hours)", r"(.*/)?_?(global_)?step|iteration",
                 r"relative time.*|_runtime", r"epoch", r"x")  # fmt: skip
PASS_RATE_NAMES = (r"pass_rate", r".*pass.?rate.*", r"val-core/.*mean@\d+", r"eval.*avg@\d+",
                   r"val.*(acc|reward|score|mean@|pass@).*", r"eval.*(acc|reward|score|pass).*",
                   r"test.*(acc|reward|score|pass).*", r"(.*[/_ ])?(acc|accuracy)([/_ @].*)?",
                   r"(critic/)?(rewards?|score)(/mean)?", r"y")  # fmt: skip
BESIDE_A_MEAN = r".*(__|[/_])(min|max|std)(@.*)?"  # columns of W&B and verl that are never taken by themselves


@dataclass(frozen=True)
class Series:
    """The curve of one run: its pass rate y (n,) in [0, 1] at compute x (n,), which increases."""

    name: str
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    x_name: str = "x"  # the columns that they come from
    y_name: str = "y"
    num_examples: float | None = None  # mean number of answers in a validation
    notes: tuple[str, ...] = ()  # what the reader has chosen by itself


def read_log(
    path: str | os.PathLike, x: str | None = None, y: str | None = None, percent: bool = False
) -> list[Series]:
    """The curves in a log, which is a file or the folder of a run: one, or one for each run of a wide W&B table.

    x, y: the columns of compute and pass rate; where None, they are guessed, and the notes of the Series say so.
    percent: the pass rate is in percent. Raises ValueError with file and line for what is no curve, and OSError for a
    file that cannot be read.
    """
    path = file = Path(path)
    if path.is_dir():
        found = [path / name for name in LOG_NAMES if (path / name).exists()]
        if not found:
            raise ValueError(f"{path}: no {' and no '.join(LOG_NAMES)} in this folder")
        file = found[0]
    rows, notes = read_rows(file)
    if not rows:
        raise ValueError(f"{file}: column names and no data")
    if any(values.get("kind") == "validation" for _, values in rows):  # ours has lines of training beside them
        rows = [(place, values) for place, values in rows if values.get("kind") == "validation"]
        notes = [*notes, "validation lines only"]
    columns = list(dict.fromkeys(column for _, values in rows for column in values))
    absolute = path.absolute()
    name = absolute.parent.name if absolute.name in LOG_NAMES else absolute.name

    # W&B names the columns of a table of several runs "run - metric".
    runs = {c: c.split(" - ", 1) for c in columns if " - " in c and not re.fullmatch(BESIDE_A_MEAN, c, re.I)}
    if not runs or y in columns:
        return [_read_series(rows, columns, file, name, x, y, percent, notes)]
    metrics = list(dict.fromkeys(metric for _, metric in runs.values()))
    metric = y or (metrics[0] if len(metrics) == 1 else _guess(metrics, PASS_RATE_NAMES))
    if metric not in metrics:
        raise ValueError(f"{file}: which metric is the pass rate? name it with --y of: {', '.join(metrics)}")
    return [
        _read_series(rows, columns, file, run, x, column, percent, notes)
        for column, (run, its_metric) in runs.items()
        if its_metric == metric
    ]


def check_curve(x: np.ndarray, y: np.ndarray, place: Callable[[int], str]) -> None:
    """Raise ValueError, naming place(i) for point i, unless x is compute that increases and y a pass rate there."""
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x and y must be two lists of the same length, got shapes {x.shape} and {y.shape}")
    if len(x) < 2:
        raise ValueError(f"{f'{place(0)}: ' * len(x)}{len(x)} point(s): a curve needs at least 5")
    for i in range(len(x)):
        if not (np.isfinite(x[i]) and np.isfinite(y[i])):
            raise ValueError(f"{place(i)}: x = {x[i]:g}, y = {y[i]:g}: not finite; remove the line")
        if x[i] < 0 or (x[i] == 0 and i > 0):
            raise ValueError(f"{place(i)}: x = {x[i]:g}: compute is positive, or 0 at the first point")
        if i > 0 and x[i] <= x[i - 1]:
            raise ValueError(
                f"{place(i)}: x = {x[i]:g} after {x[i - 1]:g}: x must increase; sort the log, and keep one of the"
                " points that a resumed run repeats"
            )
    bad = np.flatnonzero((y < 0) | (y > 1))
    if len(bad):
        percent = y.min() >= 0 and 1.5 < y.max() <= 100
        advice = "if it is in percent, say --percent" if percent else "name another column with --y"
        raise ValueError(f"{place(bad[0])}: y = {y[bad[0]]:g} is no pass rate, not in [0, 1]: {advice}")


def read_number(value, place: str, column: str) -> float:
    """A value of a log as a number. ValueError, with its place, if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{place}: {column} = {str(value)[:40]!r} is not a number") from None


# --- from a file to rows ------------------------------------------------------------------------------------------


def read_rows(file: Path) -> tuple[list[Row], list[str]]:
    """The rows of a log, and notes on what was left out. ValueError if it is of no known format."""
    text = file.read_bytes().decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise ValueError(f"{file}: the file is empty")
    if text.lstrip()[0] in "{[":
        return _json_rows(text, file)
    if VERL_STEP.search(text):
        return _verl_rows(text, file), []
    try:
        return _table_rows(text, file), []
    except csv.Error as error:
        raise ValueError(f"{file}: neither JSON nor a table: {error}") from None


def _json_rows(text: str, file: Path) -> tuple[list[Row], list[str]]:
    """The rows of JSON lines, or of one document with a list of records (trainer_state.json)."""
    try:
        whole = json.loads(text)
    except ValueError:
        return _json_lines(text.split("\n"), file)
    records = whole.get("log_history", [whole]) if isinstance(whole, dict) else whole
    if not (isinstance(records, list) and all(isinstance(record, dict) for record in records)):
        raise ValueError(f"{file}: JSON without records: expected log_history, or an object a line")
    return [(f"{file}, record {i}", record) for i, record in enumerate(records, 1)], []


def _json_lines(lines: list[str], file: Path) -> tuple[list[Row], list[str]]:
    rows = []
    for i, line in enumerate(lines, 1):
        try:
            record = json.loads(line) if line.strip() else {}
        except ValueError:
            if i == len(lines) and rows:  # no newline at its end: a run is writing it, or was cut off
                return rows, [f"line {i} is cut off, and left out"]
            raise ValueError(f"{file}, line {i}: no valid JSON: {line[:40]!r}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {i}: no object with named columns: {line[:40]!r}")
        if isinstance(record.get("data"), dict):  # verl: {"step": 1, "data": {...}}
            record = {"step": record.get("step"), **record["data"]}
        rows.append((f"{file}, line {i}", record))
    return rows, []


def _verl_rows(text: str, file: Path) -> list[Row]:
    """The rows of verl's console log: those lines that hold `step:3 - name:value - ...`."""
    rows = []
    for i, line in enumerate(text.split("\n"), 1):  # splitlines() would take stray bytes for the ends of lines
        if step := VERL_STEP.search(line):
            rows.append((f"{file}, line {i}", {"step": step[1]} | dict(VERL_VALUE.findall(line[step.end() :]))))
    return rows


def _table_rows(text: str, file: Path) -> list[Row]:
    """The rows of a table, its columns parted by commas, tabs or semicolons."""
    table = csv.reader(io.StringIO(text), delimiter=max(",\t;", key=text.partition("\n")[0].count))
    header, rows = [column.strip() for column in next(table)], []
    if any(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", column, re.I) for column in header):
        raise ValueError(f"{file}, line 1: a number where column names are expected: add a line like x,y")
    for row in table:
        if len(row) > len(header):
            raise ValueError(f"{file}, line {table.line_num}: {len(row)} values under {len(header)} names")
        rows.append((f"{file}, line {table.line_num}", dict(zip(header, (value.strip() for value in row)))))
    return rows


# --- from rows to curves ------------------------------------------------------------------------------------------


def _with_values(rows: list[Row], *columns: str) -> list[Row]:
    """Those rows in which all these columns have a value."""
    return [row for row in rows if all(row[1].get(column) not in (None, "") for column in columns)]


def _guess(columns: list[str], patterns: tuple[str, ...], usable=lambda column: True) -> str | None:
    """The first usable column that a pattern matches, best pattern first; None if there is none."""
    for pattern in patterns:
        for column in columns:
            a_mean = not re.fullmatch(BESIDE_A_MEAN, column, re.I)
            if a_mean and re.fullmatch(pattern, column, re.I) and usable(column):
                return column
    return None


def _choose_columns(rows: list[Row], columns: list[str], file: Path, x: str | None, y: str | None) -> tuple[str, str]:
    """The columns of compute and pass rate: those named, and a guess for what is None. ValueError without one."""
    for flag, column in (("--x", x), ("--y", y)):
        if column is not None and column not in columns:
            near = difflib.get_close_matches(column, columns, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{file}: no column {column!r}{hint}; {flag} can name: {', '.join(columns)}")
    y = y or _guess(columns, PASS_RATE_NAMES, lambda column: column != x and _with_values(rows, column))

    def counts_compute(column: str) -> bool:
        try:
            values = [float(row[column]) for _, row in _with_values(rows, column, *([y] if y else []))]
        except (TypeError, ValueError):  # a date
            return False
        unix_time = "time" in column and values and values[0] > 1e9  # prime-rl, W&B
        return bool(column != y and values and not unix_time)

    x = x or _guess(columns, COMPUTE_NAMES, counts_compute)
    if x and not y and len(columns) == 2:
        y = columns[columns[0] == x]
    if not (x and y):
        raise ValueError(
            f"{file}: which column is the {'pass rate' if x else 'compute'}? name it with"
            f" {'--y' if x else '--x'} of: {', '.join(columns)}"
        )
    return x, y


def _read_series(rows: list[Row], columns: list[str], file: Path, name: str, x, y, percent: bool, notes) -> Series:
    """One curve of the rows; x, y and percent are as in `read_log`."""
    guessed = [flag for flag, column in (("--x", x), ("--y", y)) if column is None]
    x, y = _choose_columns(rows, columns, file, x, y)
    rows = _with_values(rows, x, y)
    if not rows:
        raise ValueError(f"{file}: no line has a value of {x!r} and of {y!r}")
    if guessed:
        others = [c for c in columns if c not in (x, y) and not re.fullmatch(BESIDE_A_MEAN, c, re.I)]
        note = f"{x!r} is taken as compute and {y!r} as pass rate"
        notes = [*notes, note + (f"; {' and '.join(guessed)} can name others: {', '.join(others)}" if others else "")]

    def numbers(column: str) -> np.ndarray:
        return np.array([read_number(row[column], place, column) for place, row in _with_values(rows, column)])

    compute, pass_rate, examples = numbers(x), numbers(y) / (100 if percent else 1), numbers("num_examples")
    check_curve(compute, pass_rate, lambda i: rows[i][0])
    num_examples = float(examples.mean()) if len(examples) else None
    return Series(name, compute, pass_rate, x, y, num_examples, tuple(notes))
