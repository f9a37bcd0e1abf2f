"""Read the log of any RL framework as curves: pass rate over compute.

    read_log("runs/NAME")                          # the folder of a run of ours
    read_log("docs/study/loo/scalerl-seed0")       # a run in the runs.jsonl of a study
    read_log("wandb.csv", y="all", percent=True)   # one curve for each run in the table

The content of a file tells its format, and its name does not matter. A format makes rows of the file, one after the
other, so that a large file streams. Then curve/columns.py chooses the columns of compute and pass rate.
"""

import csv
import gzip
import io
import itertools
import json
import os
import re
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from curve.columns import Series, Table, read_curves

Row = tuple[int, dict]  # the line in the file (-3: the third record of a document), and the values by column

# The log of a folder is the first of these: ours, TRL's, prime-rl's, that of TRL's last checkpoint, TensorBoard's.
LOG_NAMES = ("log.jsonl", "trainer_state.json", "metrics.jsonl", "checkpoint-*/trainer_state.json",
             "events.out.tfevents*")  # fmt: skip
RUNS = "runs.jsonl"  # the logs of all runs of a study in one file

# Files that are no log: how they begin, what they are, what to do.
REFUSED = (
    (rb"PK\x03\x04|\xd0\xcf\x11\xe0", "a spreadsheet or an archive", "save it as CSV"),
    (rb"PAR1|ARROW1|\x89HDF|\x93NUMPY|SQLite format", "a binary table", "write it as CSV with named columns"),
    (rb"\x80[\x02-\x05]", "a pickle, which could run a program of its own", "write it as JSON lines"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|<svg|RIFF|%PDF", "a picture or a PDF", "fit the log that it was made from"),
    (rb":W&B", "W&B's own file", "export the run as CSV or JSON lines"),
    (rb"BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd|\x1f\x8b", "compressed twice, or not by gzip", "unpack it"),
    (rb"\s*<(!DOCTYPE|html|\?xml)", "a web page", "download the log itself"),
    (rb"version https://git-lfs", "a pointer of git-lfs", "run git lfs pull"),
)

# Names with numbers, as console logs print them: 'reward': 0.5 or reward=0.5.
_NUMBER = r"(?:\w+(?:\.\w+)*\()?'?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?+%?|nan|[-+]?inf)"  # also np.float64(0.5)
QUOTED = re.compile(rf"['\"]([^'\"]{{1,200}})['\"]\s*:\s*{_NUMBER}", re.I)
PLAIN = re.compile(rf"(?<![^\s,;|(\[{{])([A-Za-z_][^\s=:,;|()\[\]{{}}'\"]*+)\s*[=:]\s*{_NUMBER}(?![\w.:/])", re.I)
# Console logs: how the part of a line with pairs begins, and how a pair looks. The first with any pair is taken.
CONSOLES = (
    (re.compile(r"\bstep:\d+ - "), PLAIN),  # verl
    (re.compile(""), QUOTED),  # TRL, transformers, Unsloth
    (re.compile(""), PLAIN),  # prime-rl and others
)
# What else a line says: its step, and whether it is from training or from a validation.
COUNTED = re.compile(r"\b(step|iteration|episode|update|epoch)\s*[=:#]?\s*\[?(\d+)(?![\d.]*%)", re.I)
KIND = re.compile(r"(?<![\w/.-])(train|training|eval|evaluation|val|valid|validation|test)(?![\w/.-])", re.I)
LONGEST_LINE = 100_000  # letters of a line of a console log that are read


def read_log(
    path: str | os.PathLike, x: str | None = None, y: str | None = None, percent: bool = False, where: str | None = None
) -> list[Series]:
    """The curves in a log: one, or one for each column that y names.

    path: a file, "-" for standard input, the folder of a run, or FILE:COLUMN. x, y: the columns of compute and pass
    rate, guessed if None; y may be several names with commas, or "all", and each is a curve. percent: whether the pass
    rate is in percent. where: which records, as COLUMN=VALUE with commas. The notes of a Series say how it was read.
    Raises ValueError with file and line if the log holds no such curve, and OSError if the file cannot be read.
    """
    text, column = os.fspath(path), None
    if ":" in text and not os.path.exists(text) and os.path.exists(text.rpartition(":")[0]):
        text, _, column = text.rpartition(":")
    log = _log_of(Path(text))
    of_a_folder = any(log.absolute().match(pattern) for pattern in LOG_NAMES)
    name = "standard input" if text == "-" else log.absolute().parent.name if of_a_folder else log.name
    return read_curves(read_table(log), column or name, x, column or y, where, percent)


def read_table(log: Path) -> Table:
    """The table of a log. ValueError, with the line, if no format fits, and OSError if the file cannot be read."""
    notes = []  # what was left out
    try:
        with _open(log) as binary:
            return Table(str(log), _rows(binary, log, notes), notes)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{log}: the gzip file is cut off or broken: copy it again") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{log}: nested too deeply, or too large: write one small object a line") from None


# --- from a path to rows --------------------------------------------------------------------------------------------


def _log_of(path: Path) -> Path:
    """The log in this folder, or log.jsonl in it if it is the folder of a run in a RUNS file. A file is its own log."""
    if not path.is_dir():
        is_run = not path.exists() and (path.parent / RUNS).exists()
        return path / "log.jsonl" if is_run else path
    for pattern in LOG_NAMES:
        logs = sorted(path.glob(pattern), key=lambda log: (len(str(log)), log))
        if len(logs) > 1 and not pattern.startswith("checkpoint"):
            raise ValueError(f"{path}: several logs in this folder: name one, such as {logs[-1]}")
        if logs:
            return logs[-1]
    raise ValueError(f"{path}: no {' and no '.join(LOG_NAMES)} in this folder: name the file of the log")


def runs_in(study: Path) -> dict[str, bytes]:
    """By name the logs in study/runs.jsonl. Its lines are {"run": "NAME", ...}, where ... is a line of a log.jsonl."""
    runs = defaultdict(bytes)
    for line in (study / RUNS).read_bytes().splitlines(keepends=True):
        run, _, rest = line.removeprefix(b'{"run": "').partition(b'", ')
        runs[run.decode()] += b"{" + rest
    return dict(runs)


def _open(log: Path) -> BinaryIO:
    """The bytes of a log, unpacked, which can be read again and again."""
    run, study = log.parent.name, log.parent.parent
    if log.name == "log.jsonl" and not log.parent.exists() and (study / RUNS).exists():
        runs = runs_in(study)
        if run not in runs:
            raise ValueError(f"{study / RUNS}: no run {run!r}: it has {', '.join(runs)}")
        return io.BytesIO(runs[run])
    binary = sys.stdin.buffer if str(log) == "-" else open(log, "rb")
    if binary is sys.stdin.buffer or not binary.seekable():
        binary = io.BytesIO(binary.read())
    is_packed = binary.read(2) == b"\x1f\x8b"
    binary.seek(0)
    return gzip.open(binary) if is_packed else binary


def _rows(binary: BinaryIO, file: Path, notes: list[str]) -> Iterable[Row]:
    """The rows of a file. Its first bytes and its first two lines tell its format."""
    head = binary.read(4096)
    binary.seek(0)
    if b"brain.Event:" in head[:64]:
        return _event_rows(binary, file)
    for beginning, kind, advice in REFUSED:
        if re.match(beginning, head, re.I):
            raise ValueError(f"{file} is no log but {kind}: {advice}")
    encoding = "utf-16" if head.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    letters = head.decode(encoding, "replace")
    if 4 * len(re.findall("[\0-\x08\x0e-\x1a\ufffd]", letters)) > len(letters):
        raise ValueError(f"{file} is binary, and no kind of log that is known: write it as JSON lines or CSV")

    text = io.TextIOWrapper(binary, encoding, errors="replace")
    lines = [line for _, line in itertools.islice(_lines(text), 2)]
    if not lines:
        raise ValueError(f"{file}: the file is empty: the run has logged nothing yet")
    first, second = (lines + [""])[:2]
    if second and re.fullmatch(r'\s*\{\s*(".*)?\}\s*', first):
        return _json_lines(text, file, notes)
    if re.match(r'\s*[\[{]\s*([\[\]{}"]|$)', first):
        return _json_document(text, file)
    if not _is_table(first[:LONGEST_LINE], second[:LONGEST_LINE]):
        for start, pair in CONSOLES:
            rows = partial(_console_lines, text, start, pair)
            if next(rows(), None):
                return rows()
    return _table_lines(text, file)


def _lines(text: TextIO) -> Iterator[tuple[int, str]]:
    """The lines of a text from its start that are not empty, numbered from 1."""
    text.seek(0)
    return ((i, line) for i, line in enumerate(text, 1) if not line.isspace())


# --- JSON: ours, verl, prime-rl, tinker, OpenRLHF, W&B's history; transformers' trainer_state.json ------------------


def _object(pairs: list[tuple]) -> dict:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {name!r} occurs twice: rename one")
    return values


_parse = json.JSONDecoder(parse_int=float, object_pairs_hook=_object).decode  # float: an integer may have any length


def _json_lines(text: TextIO, file: Path, notes: list[str]) -> Iterator[Row]:
    for i, line in _lines(text):
        try:
            yield i, _flat(_parse(line))
        except (json.JSONDecodeError, AttributeError):  # a list has no items
            if not line.endswith("\n"):  # a run is writing it, or was cut off
                notes.append(f"line {i} is cut off, and left out")
                return
            start = line[:40].strip()
            raise ValueError(f"{file}, line {i}: no valid JSON object: {start!r}: mend or remove it") from None
        except ValueError as error:
            raise ValueError(f"{file}, line {i}: {error}") from None


def _json_document(text: TextIO, file: Path) -> Iterator[Row]:
    """The rows of one JSON document: a list of records, or an object that holds one, or a single record."""
    text.seek(0)
    try:
        records = _parse(text.read())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {error.lineno}: no valid JSON from here: cut off, or mistyped") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if isinstance(records, dict):
        lists = [
            value for value in records.values() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        records = records.get("log_history", lists[0] if len(lists) == 1 else [records])
    if not (isinstance(records, list) and records and all(isinstance(record, dict) for record in records)):
        raise ValueError(f"{file}: JSON without records: expected a list of objects, or an object a line")
    return ((-i, _flat(record)) for i, record in enumerate(records, 1))


def _flat(record: dict, prefix: str = "") -> dict:
    """The numbers and texts of a record; those of a record in it as eval/acc, but `data` and `metrics` add no name."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, prefix if name in ("data", "metrics") else f"{prefix}{name}/")
        elif not isinstance(value, list):
            flat[prefix + name] = value
    return flat


# --- console logs ---------------------------------------------------------------------------------------------------


def _console_lines(text: TextIO, start: re.Pattern, pair: re.Pattern) -> Iterator[Row]:
    """The rows of the lines that hold pairs, with the step and the kind that stand beside them."""
    initial = {}  # verl prints its first validation with all digits, and in the next line with three
    for i, line in _lines(text):
        line = line[:LONGEST_LINE]
        begin = start.search(line)
        if "Initial validation metrics" in line:
            initial = dict(QUOTED.findall(line))
        elif begin and (pairs := pair.findall(line := line[begin.start() :])):
            values = {}
            for name, value in pairs:
                if values.setdefault(name, value) != value:  # two values of one name: it is not clear which is meant
                    values[f"{name} (again)"] = value
            rest = pair.sub(" ", line)
            values = {name.lower(): value for name, value in COUNTED.findall(rest)} | values | initial
            values |= {"kind": kind[1].lower()} if (kind := KIND.search(rest)) else {}
            yield i, {re.sub("^test_score", "val/test_score", name): value for name, value in values.items()}
            initial = {}


# --- tables: W&B, MLflow, spreadsheets ------------------------------------------------------------------------------


def _delimiter(header: str) -> str:
    return max(",\t;|", key=header.count)


def _is_table(first: str, second: str) -> bool:
    """Whether the second line has as many cells as the first, and a number in one of them, and the first no pairs."""
    delimiter = _delimiter(first)
    number = re.compile(r'[\s"]*([-+]?[\d.,]+(e[-+]?\d+)?[\s%"]*)?', re.I)
    same = 0 < first.count(delimiter) == second.count(delimiter)
    return same and any(map(number.fullmatch, second.split(delimiter))) and not PLAIN.search(first)


def _table_lines(text: TextIO, file: Path) -> Iterator[Row]:
    """The rows under a line of column names."""
    delimiter = _delimiter(next(_lines(text))[1])
    text.seek(0)
    table, header = csv.reader(text, delimiter=delimiter, skipinitialspace=True), []
    try:
        for cells in table:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            if not header:
                header = cells
                if re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", header[0], re.I):
                    raise ValueError("a number where column names are expected: add a line like x,y")
                _object([(name, None) for name in header if name])  # or it raises
                continue
            if len(cells) > len(header):
                raise ValueError(f"{len(cells)} values under {len(header)} names: mend the line")
            if delimiter == ";":  # decimal commas
                cells = [re.sub(r"^([-+]?\d*),(\d+ ?%?)$", r"\1.\2", cell) for cell in cells]
            yield table.line_num, dict(zip(header, cells))
    except csv.Error as error:
        message = f"neither JSON nor a table ({error}): write one object a line"
        raise ValueError(f"{file}, line {table.line_num}: {message}") from None
    except ValueError as error:
        raise ValueError(f"{file}, line {table.line_num}: {error}") from None


# --- TensorBoard ----------------------------------------------------------------------------------------------------


def _event_rows(binary: BinaryIO, file: Path) -> Iterator[Row]:
    """The scalars of TensorBoard's events: a row for each step."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(f"{file} holds TensorBoard's events: pip install tensorboard, which reads them") from None
    rows = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the file may be packed, or a pipe
        copy = Path(folder) / "events"
        copy.write_bytes(binary.read())
        for event in EventFileLoader(str(copy)).Load():
            for value in event.summary.value:
                number = make_ndarray(value.tensor)
                if number.size == 1 and number.dtype.kind == "f":
                    rows.setdefault(event.step, {"step": event.step})[value.tag] = float(number.item())
    if not rows:
        raise ValueError(f"{file} holds events and no scalars: name the file that holds the curves")
    return ((-i, rows[step]) for i, step in enumerate(sorted(rows), 1))
