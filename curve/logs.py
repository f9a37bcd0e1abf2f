"""Read the log of any RL framework as curves: pass rate over compute.

    read_log("runs/NAME")                          # the folder of a run of ours
    read_log("docs/study/loo/scalerl-seed0")       # a run in the runs.jsonl of a study
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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from curve.columns import Reading, Series, Table, read_curves

Row = tuple[
    int, dict
]  # the line in the file (-3: the third record of a document), and the values by column

# The log of a folder is the first of these: ours, TRL's, prime-rl's, W&B's, RLlib's and
# Stable-Baselines', and the one in TRL's last checkpoint.
LOG_NAMES = ("log.jsonl", "trainer_state.json", "metrics.jsonl", "wandb-history.jsonl", "progress.csv",
             "checkpoint-*/trainer_state.json")  # fmt: skip
LONGEST_LINE = 50_000_000  # characters. A longer line is read in pieces
RUNS = "runs.jsonl"  # the logs of all runs of a study in one file
# The sampled tokens of one step, where tools/export.py has taken a run: in TRL, verl and prime-rl.
TOKENS_OF_STEP = ("tokens_of_step", "actor/tokens_of_step", "progress/output_tokens")

# Names with numbers, as console logs print them: 'reward': 0.5 or reward=0.5.
# also np.float64(0.5)
_NUMBER = r"(?:\w+(?:\.\w+)*\()?'?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?+%?|nan|[-+]?inf)"
QUOTED = re.compile(rf"['\"]([^'\"]{{1,200}})['\"]\s*:\s*{_NUMBER}", re.I)
PLAIN = re.compile(
    rf"(?<![^\s,;|(\[{{])([A-Za-z_][^\s=:,;|()\[\]{{}}'\"]*+)\s*[=:]\s*{_NUMBER}(?![\w.:/])", re.I
)
# Console logs: how the part of a line with pairs begins, and how a pair looks. The first with any
# pair is taken.
CONSOLES = (
    (re.compile(r"\bstep:\d+ - "), PLAIN),  # verl
    (re.compile(""), QUOTED),  # TRL, transformers, Unsloth
    (re.compile(""), PLAIN),  # prime-rl and others
)
# What else a line says: its step, and whether it is from training or from a validation.
COUNTED = re.compile(
    r"\b(step|iteration|episode|update|epoch)\s*[=:#]?\s*\[?(\d+)(?![\d.]*%)", re.I
)
KIND = re.compile(
    r"(?<![\w/.-])(train|training|eval|evaluation|val|valid|validation|test)(?![\w/.-])", re.I
)
BOX_LINE = re.compile(r"\| *[^|\s]+ *\| *[^|\s]* *\|\s*")  # | name | value |
CELL = re.compile(r'[\s"]*[-+]?[\d.,]+(e[-+]?\d+)?[\s%"]*', re.I)  # a number in a table
parse_json = json.JSONDecoder(parse_int=float).decode  # float: an integer may have any length


def read_log(path: str | os.PathLike, table: Table | None = None, **choices) -> list[Series]:
    """The curves in a log: one, or one for each column that `y` names.

    path: a file, "-" for standard input, the folder of a run, or FILE:COLUMN. table: of this log,
    if it has been read. choices: the fields of `Reading`. ValueError, with file and line, if there
    is no curve.
    """
    text, column = os.fspath(path), None
    if ":" in text and not os.path.exists(text) and os.path.exists(text.rpartition(":")[0]):
        text, _, column = text.rpartition(":")
        choices["y"] = column
    log = _log_in(Path(text))
    of_a_folder = any(log.absolute().match(pattern) for pattern in LOG_NAMES)
    name = (
        "standard input" if text == "-" else log.absolute().parent.name if of_a_folder else log.name
    )
    try:
        return read_curves(table or read_table(log), column or name, Reading(**choices))
    except ValueError as error:
        raise ValueError(f"{log}: {error}") from None


def read_joined(logs: Sequence[str], **choices) -> list[Series]:
    """The curve of one run in two logs: ours, then the log of the engine that tools/export.py took it to.
    Compute is sampled tokens: those of the second log come after all of ours. choices: the fields
    of `Reading` for the second log. ValueError if there are not two logs, or if the second has no
    point after its start."""
    if len(logs) != 2:
        raise ValueError(f"--join takes two logs, ours and then the engine's, not {len(logs)}")
    table = read_table(_log_in(Path(logs[0])))
    if "compute_tokens" not in table.columns:
        raise ValueError(
            f"{logs[0]}: this is no log of ours; --join takes ours first, and then the engine's"
        )
    before = np.nanmax(table.numbers("compute_tokens"))  # to the end, not the last point
    (ours,) = read_log(logs[0], table, x="compute_tokens", y="pass_rate")
    log = _log_in(Path(logs[1]))
    table = read_table(log)
    of_step = next((name for name in TOKENS_OF_STEP if name in table.columns), None)
    if of_step is None:
        raise ValueError(
            f"{log}: no column says how many tokens a step has sampled ({', '.join(TOKENS_OF_STEP)})"
        )
    table.columns["tokens"] = (
        np.arange(len(table.lines)),
        np.cumsum(np.nan_to_num(table.numbers(of_step))),
    )
    table.names.append("tokens")
    (theirs,) = read_log(log, table, **choices | {"x": choices["x"] or "tokens"})
    later = theirs.x > 0  # at 0 it measures the model that ours ended with
    if not later.any():
        raise ValueError(f"{log}: no pass rate after its start, so there is nothing to join")
    notes = (*ours.notes, f"joined with {later.sum()} points of {log}", *theirs.notes)
    x, y = np.append(ours.x, before + theirs.x[later]), np.append(ours.y, theirs.y[later])
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


def _log_in(folder: Path) -> Path:
    """The log in a folder; any other path is that of a log."""
    if not folder.is_dir():
        return folder
    for pattern in LOG_NAMES:
        logs = sorted(
            filter(Path.is_file, folder.glob(pattern)), key=lambda log: (len(str(log)), log)
        )
        if logs:
            return logs[-1]
    raise ValueError(
        f"{folder}: no {' and no '.join(LOG_NAMES)} in this folder: name the file of the log"
    )


def packed_runs(study: Path) -> dict[str, bytes]:
    """The logs in study/runs.jsonl, by run. Its lines are {"run": "NAME", ...} with a line of a
    log.jsonl for `...`."""
    runs = defaultdict(bytes)
    for line in (study / RUNS).read_bytes().splitlines(keepends=True):
        run, _, fields = line.removeprefix(b'{"run": "').partition(b'", ')
        runs[run.decode()] += b"{" + fields
    return dict(runs)


def runs_of_study(folder: Path) -> list[tuple[str, Path]]:
    """(variant, run folder) of each run of a study: of each VARIANT-seedN/log.jsonl, or of each run
    in its runs.jsonl (tools/pack.py). They come in natural order, but `scalerl` first."""
    names = {path.parent.name for path in folder.glob("*/log.jsonl")}
    if (folder / RUNS).exists():
        names |= set(packed_runs(folder))
    runs = [
        (match[1], folder / match[0])
        for name in names
        if (match := re.fullmatch(r"(.+)-seed\d+", name))
    ]
    pieces = lambda name: [
        int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)
    ]
    return sorted(runs, key=lambda run: (run[0] != "scalerl", pieces(run[1].name)))


def _open(log: Path) -> io.BufferedIOBase:
    """The bytes of a log, which can be read again and again. A run may lie in the RUNS file of its
    study."""
    folder = log.parent if log.name == "log.jsonl" else log
    if not folder.exists() and (folder.parent / RUNS).exists():
        runs = packed_runs(folder.parent)
        if folder.name not in runs:
            raise ValueError(f"no such run in {RUNS}, which has {', '.join(runs)}")
        return io.BytesIO(runs[folder.name])
    binary = sys.stdin.buffer if str(log) == "-" else open(log, "rb")
    return binary if binary.seekable() else io.BytesIO(binary.read())


def _rows(binary: io.BufferedIOBase, notes: list[str]) -> Iterable[Row]:
    """The rows of a file. Its first bytes and its first two lines tell its format."""
    head = binary.read(4096)
    binary.seek(0)
    if b"brain.Event:" in head[:64]:
        raise ValueError(
            "TensorBoard's events are not read: download the scalar in TensorBoard as CSV, and name that"
        )
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    letters = head.decode(encoding, "replace")
    if 10 * len(re.findall("[\0-\x08\x0e-\x1a\ufffd]", letters)) > len(letters):
        raise ValueError("this is no text: write the log as CSV or JSON lines")

    text = io.TextIOWrapper(binary, encoding, errors="replace")
    lines = _lines(text)
    first, second = (next(lines, (0, ""))[1] for _ in range(2))
    if not first:
        raise ValueError("the file is empty: the run has logged nothing yet")
    if re.match(r'\s*[\[{]\s*([\[\]{}"]|$)', first):
        if second and re.fullmatch(r"\s*\{.*\}\s*", first):
            return _json_lines(text, notes)
        text.seek(0)
        document = parse_json(
            text.read()
        )  # a list of records, trainer_state.json, or a single record
        records = (
            document.get("log_history", [document]) if isinstance(document, dict) else document
        )
        return (
            (-i, _flat(record)) for i, record in enumerate(records, 1) if isinstance(record, dict)
        )
    if len(first) == LONGEST_LINE:
        raise ValueError(
            f"the first line has more than {LONGEST_LINE:,} characters: this is no log"
        )
    if any(BOX_LINE.fullmatch(line) for _, line in itertools.islice(_lines(text), 100)):
        raise ValueError(
            "boxes on a console are not read: let the run write progress.csv, and name that"
        )
    delimiter = max(",\t;|", key=first.count)
    is_table = 0 < first.count(delimiter) == second.count(delimiter)
    if not (is_table and any(map(CELL.fullmatch, second.split(delimiter)))):
        for start, pair in CONSOLES:
            if next(_console_lines(text, start, pair), None):
                return _console_lines(text, start, pair)
    return _table_lines(text, delimiter)


def _lines(text: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    """The lines of a text from its start that are neither empty nor comments, numbered from 1."""
    text.seek(0)
    numbered = enumerate(iter(partial(text.readline, LONGEST_LINE), ""), 1)
    return ((i, line) for i, line in numbered if not line.isspace() and not line.startswith("#"))


def _json_lines(text: io.TextIOWrapper, notes: list[str]) -> Iterator[Row]:
    for i, line in _lines(text):
        try:
            yield i, _flat(parse_json(line))
        except (json.JSONDecodeError, AttributeError):  # a list has no items
            if not line.endswith("\n"):  # a run is writing it, or was cut off
                notes.append(f"line {i} is cut off, and left out")
                return
            raise ValueError(
                f"line {i}: no valid JSON object: {line[:40].strip()!r}: mend or remove it"
            ) from None


def _flat(record: dict, prefix: str = "") -> dict:
    """The numbers and texts of a record. A record in it adds its name, as in eval/acc, unless it is
    data or metrics."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, prefix if name in ("data", "metrics") else f"{prefix}{name}/")
        elif not isinstance(value, list):
            flat[prefix + name] = value
    return flat


def _console_lines(text: io.TextIOWrapper, start: re.Pattern, pair: re.Pattern) -> Iterator[Row]:
    """The rows of the lines that hold pairs, with the step and the kind that stand beside them."""
    for i, line in _lines(text):
        begin = start.search(line)
        if begin and (pairs := pair.findall(line := line[begin.start() : 100_000])):
            outside = pair.sub(" ", line)
            values = {name.lower(): value for name, value in COUNTED.findall(outside)}
            values |= {"kind": kind[1].lower()} if (kind := KIND.search(outside)) else {}
            row = {}
            for name, value in pairs:
                name = re.sub("^test_score", "val/test_score", name)  # verl's first validation
                if (
                    row.setdefault(name, value) != value
                ):  # two values of one name: it is not clear which is meant
                    row[f"{name} (again)"] = value
            yield i, values | row


def _table_lines(text: io.TextIOWrapper, delimiter: str) -> Iterator[Row]:
    skipped = next(_lines(text))[0] - 1  # comments, as in Stable-Baselines' monitor
    text.seek(0)
    table = csv.reader(
        itertools.islice(text, skipped, None), delimiter=delimiter, skipinitialspace=True
    )
    header = next(table)
    names = [name for name in header if name]
    if any(map(CELL.fullmatch, names[:1])) or len(set(names)) < len(names):
        raise ValueError(
            "line 1: a number or a name twice where column names are expected: write a line like x,y"
        )
    for cells in table:
        if len(cells) > len(header):
            raise ValueError(
                f"line {skipped + table.line_num}: more values than the {len(names)} names: mend the line"
            )
        if delimiter == ";":  # decimal commas
            cells = [re.sub(r"^([-+]?\d*),(\d+ ?%?)$", r"\1.\2", cell) for cell in cells]
        yield skipped + table.line_num, dict(zip(header, cells))
