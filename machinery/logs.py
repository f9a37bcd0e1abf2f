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
BESIDE_A_MEAN = re.compile(r".*(__|[/_])(min|max|std)(@.*)?", re.I)  # in W&B and verl; never taken by themselves


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
    file = Path(path)
    if file.is_dir():
        file = next((file / name for name in LOG_NAMES if (file / name).exists()), None)
        if file is None:
            raise ValueError(f"{path}: no {' and no '.join(LOG_NAMES)} in this folder")
    rows, notes = read_rows(file)
    rows = [(place, {c: value for c, value in values.items() if value not in (None, "")}) for place, values in rows]
    if any(values.get("kind") == "validation" for _, values in rows):  # ours has lines of training beside them
        rows = [(place, values) for place, values in rows if values.get("kind") == "validation"]
        notes = [*notes, "validation lines only"]
    columns = list(dict.fromkeys(column for _, values in rows for column in values))
    if not columns:
        raise ValueError(f"{file}: column names and no data")
    whole = file.absolute()
    name = whole.parent.name if whole.name in LOG_NAMES else whole.name

    # W&B names the columns of a table of several runs "run - metric".
    runs = {c: c.split(" - ", 1) for c in columns if " - " in c and not BESIDE_A_MEAN.fullmatch(c)}
    if not runs or y in columns:
        return [_read_series(rows, columns, file, name, x, y, percent, notes)]
    metrics = list(dict.fromkeys(metric for _, metric in runs.values()))
    y = _choose("--y", y, metrics, _pass_rates(metrics), file)
    return [
        _read_series(rows, columns, file, run, x, column, percent, notes)
        for column, (run, metric) in runs.items()
        if metric == y
    ]


def check_curve(x: np.ndarray, y: np.ndarray, places: list[str]) -> None:
    """Raise ValueError, naming the place of a point, unless x is compute that increases and y the pass rate there."""
    if x.shape != y.shape or x.ndim != 1 or not len(x):
        raise ValueError(f"x and y must be two lists of the same length, got shapes {x.shape} and {y.shape}")
    advice = "if it is in percent, say --percent" if 1.5 < y.max() <= 100 else "name another column with --y"
    for i, place in enumerate(places):
        if not np.isfinite(x[i] + y[i]):
            raise ValueError(f"{place}: x = {x[i]:g}, y = {y[i]:g}: not finite; remove the line")
        if x[i] < 0 or (x[i] == 0 and i > 0):
            raise ValueError(f"{place}: x = {x[i]:g}: compute is positive, or 0 at the first point")
        if i > 0 and x[i] <= x[i - 1]:
            rule = "x must increase; sort the log, and keep one of the points that a resumed run repeats"
            raise ValueError(f"{place}: x = {x[i]:g} after {x[i - 1]:g}: {rule}")
        if not 0 <= y[i] <= 1:
            raise ValueError(f"{place}: y = {y[i]:g} is no pass rate, not in [0, 1]: {advice}")


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
    return (_verl_rows if VERL_STEP.search(text) else _table_rows)(text, file), []


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
    try:
        (_, header), *rows = [(table.line_num, [value.strip() for value in row]) for row in table]
    except csv.Error as error:
        raise ValueError(f"{file}: neither JSON nor a table: {error}") from None
    if any(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", column, re.I) for column in header):
        raise ValueError(f"{file}, line 1: a number where column names are expected: add a line like x,y")
    for line, row in rows:
        if len(row) > len(header):
            raise ValueError(f"{file}, line {line}: {len(row)} values under {len(header)} names")
    return [(f"{file}, line {line}", dict(zip(header, row))) for line, row in rows]


# --- from rows to curves ------------------------------------------------------------------------------------------


def _by_name(columns: list[str], patterns: tuple[str, ...]) -> list[str]:
    """The columns that a pattern matches, best pattern first."""
    return [column for pattern in patterns for column in columns if re.fullmatch(pattern, column, re.I)]


def _pass_rates(columns: list[str]) -> list[str]:
    """The columns that may be the pass rate, best first: by their names, or the only one that no compute is named."""
    rest = [column for column in columns if column not in _by_name(columns, COMPUTE_NAMES)]
    return _by_name(columns, PASS_RATE_NAMES) or (rest if len(rest) == 1 else [])


def _choose(flag: str, named: str | None, columns: list[str], guesses: list[str], file: Path) -> str:
    """The column that is named, or else the first guess. ValueError if there is none."""
    if named in columns or (named is None and guesses):
        return named or guesses[0]
    if named is None:
        meaning = {"--x": "compute", "--y": "pass rate"}[flag]
        raise ValueError(f"{file}: which column is the {meaning}? name it with {flag} of: {', '.join(columns)}")
    near = difflib.get_close_matches(named, columns, 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{file}: no column {named!r} with values{hint}; {flag} can name: {', '.join(columns)}")


def _read_series(rows: list[Row], columns: list[str], file: Path, name: str, x, y, percent: bool, notes) -> Series:
    """One curve of the rows; x, y and percent are as in `read_log`."""

    def numbers(column: str) -> np.ndarray:
        return np.array([read_number(values[column], place, column) for place, values in rows if column in values])

    def counts_compute(column: str) -> bool:
        try:
            values = numbers(column)
        except ValueError:  # a date
            return False
        return len(values) > 0 and not ("time" in column and values[0] > 1e9)  # Unix time, of prime-rl and W&B

    guessed = " and ".join(flag for flag, column in (("--x", x), ("--y", y)) if column is None)
    usable = [column for column in columns if not BESIDE_A_MEAN.fullmatch(column)]
    y = _choose("--y", y, columns, _pass_rates([column for column in usable if column != x]), file)
    rows = [row for row in rows if y in row[1]]
    computes = [column for column in _by_name(usable, COMPUTE_NAMES) if column != y and counts_compute(column)]
    x = _choose("--x", x, columns, computes, file)
    rows = [row for row in rows if x in row[1]]
    if not rows:
        raise ValueError(f"{file}: no line has a value of {x!r} and of {y!r}")
    if guessed:
        others = ", ".join(column for column in usable if column not in (x, y))
        note = f"{x!r} is taken as compute and {y!r} as pass rate"
        notes = [*notes, f"{note}; {guessed} can name others: {others}" if others else note]
    compute, pass_rate, examples = numbers(x), numbers(y) / (100 if percent else 1), numbers("num_examples")
    check_curve(compute, pass_rate, [place for place, _ in rows])
    return Series(name, compute, pass_rate, x, y, float(examples.mean()) if len(examples) else None, tuple(notes))
