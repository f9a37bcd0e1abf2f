"""Read the log of any RL framework as curves: pass rate over compute.

    read_log("runs/NAME")                                  # the folder of a run of ours
    read_log("wandb.csv", y="all", percent=True)           # one curve for each run in the table

The content tells the format, never the name: TensorBoard's events, JSON lines, one JSON document, a console log, or a
table with named columns. Each may be gzipped. A file becomes rows, one after the other, so that a large file streams.
The columns of compute and pass rate are then chosen in machinery/columns.py.
"""

import contextlib
import csv
import gzip
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from curve.columns import Series, Table, read_curves

Row = tuple[int, dict]  # the line of a row (-3: the third record of a document), and its values by column

# What is read in a folder, the first that there is: ours, transformers' and TRL's, prime-rl's, TensorBoard's.
LOG_NAMES = ("log.jsonl", "trainer_state.json", "metrics.jsonl", "checkpoint-*/trainer_state.json",
             "events.out.tfevents*")  # fmt: skip
RUNS = "runs.jsonl"  # in the folder of a study: the lines of its runs' logs, each with its "run"

# Files that are no log, by their first bytes.
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

# What the lines of console logs hold: pairs of a name and a number, the step, and what was measured.
_NUMBER = r"(?:\w+(?:\.\w+)*\()?'?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?+%?|nan|[-+]?inf)"
QUOTED = re.compile(rf"['\"]([^'\"]{{1,200}})['\"]\s*:\s*{_NUMBER}", re.I)  # 'reward': 0.5
PLAIN = re.compile(  # reward=0.5
    rf"(?<![^\s,;|(\[{{])([A-Za-z_][^\s=:,;|()\[\]{{}}'\"]*+)\s*[=:]\s*{_NUMBER}(?![\w.:/])", re.I
)
CONSOLES = ((r"\bstep:\d+ - ", PLAIN), ("", QUOTED), ("", PLAIN))  # where pairs begin, and how they look; verl is first
COUNTED = re.compile(r"\b(step|iteration|episode|update|epoch)\s*[=:#]?\s*\[?(\d+)(?![\d.]*%)", re.I)
KIND = re.compile(r"(?<![\w/.-])(train|training|eval|evaluation|val|valid|validation|test)(?![\w/.-])", re.I)
LONGEST_LINE = 100_000  # letters of a line of a console log; what comes after is no metric


def read_log(
    path: str | os.PathLike, x: str | None = None, y: str | None = None, percent: bool = False, where: str | None = None
) -> list[Series]:
    """The curves in a log: one, or one for each column that y names.

    path: a file, "-" for standard input, the folder of a run, or FILE:COLUMN. x, y: the columns of compute and pass
    rate; where None, they are guessed. y may be several names with commas, or "all"; each is a curve. where: which
    records, as COLUMN=VALUE with commas. percent: the pass rate is in percent. The notes of a Series say how it was
    read. Raises ValueError with file and line for what is no curve, and OSError for a file that cannot be read.
    """
    text, column = os.fspath(path), None
    if ":" in text and not os.path.exists(text) and os.path.exists(text.rpartition(":")[0]):
        text, _, column = text.rpartition(":")
    file = _log_of(Path(text))
    whole = file.absolute()
    name = whole.parent.name if any(whole.match(pattern) for pattern in LOG_NAMES) else whole.name
    name = column or ("standard input" if text == "-" else name)
    return read_curves(read_table(file), name, x, column or y, where, percent)


def _log_of(path: Path) -> Path:
    """The log that a path names: the path itself, or the log in this folder, which may lie in the RUNS of a study."""
    if path.is_dir():
        return _log_in(path)
    if not path.exists() and (path.parent / RUNS).exists():
        return path / "log.jsonl"
    return path


def runs_in(study: Path) -> dict[str, bytes]:
    """By name the logs of all runs in study/runs.jsonl: the bytes of each log.jsonl. ValueError for any other file.

    runs.jsonl holds the lines of these logs, each with the name of its run in front: {"run": "NAME", ...}.
    """
    runs = {}
    for i, line in enumerate((study / RUNS).read_bytes().splitlines(keepends=True), 1):
        first_key = re.match(rb'\{"run": "([^"\\]+)", ', line)
        if not first_key:
            raise ValueError(f'{study / RUNS}, line {i}: expected {{"run": "NAME", ...}}, a line of log.jsonl after it')
        runs.setdefault(first_key[1].decode(), []).append(b"{" + line[first_key.end() :])
    return {name: b"".join(lines) for name, lines in runs.items()}


def _log_in(folder: Path) -> Path:
    """The log in the folder of a run; of several checkpoints the last. ValueError if there is none, or several."""
    for pattern in LOG_NAMES:
        found = sorted(folder.glob(pattern), key=lambda path: (len(str(path)), path))
        if len(found) > 1 and not pattern.startswith("checkpoint"):
            raise ValueError(f"{folder}: several logs in this folder: name one, such as {found[-1]}")
        if found:
            return found[-1]
    raise ValueError(f"{folder}: no {' and no '.join(LOG_NAMES)} in this folder: name the file of the log")


# --- from a file to rows ------------------------------------------------------------------------------------------


def read_table(file: Path) -> Table:
    """The table of a log. ValueError, with the line, if it is of no known format, and OSError if it cannot be read."""
    notes = []  # what is left out
    try:
        with _opened(file) as binary:
            return Table(str(file), _rows(binary, file, notes), notes)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{file}: the gzip file is cut off or broken: copy it again") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{file}: nested too deeply, or too large: write one small object a line") from None


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked, from which one can read again and again."""
    with contextlib.ExitStack() as stack:
        if str(file) == "-":
            binary = sys.stdin.buffer
        elif file.name == "log.jsonl" and not file.parent.exists() and (file.parent.parent / RUNS).exists():
            runs = runs_in(file.parent.parent)
            if file.parent.name not in runs:
                raise ValueError(f"{file.parent.parent / RUNS}: no run {file.parent.name!r}: it has {', '.join(runs)}")
            binary = io.BytesIO(runs[file.parent.name])
        else:
            binary = stack.enter_context(open(file, "rb"))
        if not binary.seekable():  # a pipe
            pipe, binary = binary, stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(pipe, binary)
            binary.seek(0)
        packed = binary.read(2) == b"\x1f\x8b"
        binary.seek(0)
        yield stack.enter_context(gzip.open(binary)) if packed else binary


def _rows(binary: BinaryIO, file: Path, notes: list[str]) -> Iterator[Row]:
    """The rows in these bytes, by the first format that knows them."""
    head = binary.read(4096)
    binary.seek(0)
    if b"brain.Event:" in head[:64]:
        return _event_rows(binary, file)
    for magic, what, advice in REFUSED:
        if re.match(magic, head, re.I):
            raise ValueError(f"{file} is no log but {what}: {advice}")
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
        return _document_rows(text, file)
    if not _looks_like_a_table(first[:LONGEST_LINE], second[:LONGEST_LINE]):
        for start, pair in CONSOLES:
            rows = partial(_console_rows, text, re.compile(start), pair)
            if next(rows(), None):
                return rows()
    return _table_rows(text, file)


def _lines(text: TextIO) -> Iterator[Row]:
    """The lines of a text from its start, numbered from 1; empty ones are left out."""
    text.seek(0)
    return ((i, line) for i, line in enumerate(text, 1) if not line.isspace())


# --- JSON -----------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple]) -> dict:
    """A JSON object. ValueError if a name occurs twice."""
    if len(values := dict(pairs)) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} occurs twice: rename one")
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


def _document_rows(text: TextIO, file: Path) -> Iterator[Row]:
    """The rows of one JSON document: a list of records, or an object that holds one, or a single record."""
    text.seek(0)
    try:
        records = _parse(text.read())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {error.lineno}: no valid JSON from here: cut off, or mistyped") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if isinstance(records, dict):
        lists = [its for its in records.values() if isinstance(its, list) and its and isinstance(its[0], dict)]
        records = records.get("log_history", lists[0] if len(lists) == 1 else [records])
    if not (isinstance(records, list) and records and all(isinstance(record, dict) for record in records)):
        raise ValueError(f"{file}: JSON without records: expected a list of objects, or an object a line")
    return ((-i, _flat(record)) for i, record in enumerate(records, 1))


def _flat(record: dict, prefix: str = "") -> dict:
    """The numbers and texts of a record, those of records in it under eval/acc; `data` and `metrics` add no name."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, prefix if name in ("data", "metrics") else f"{prefix}{name}/")
        elif not isinstance(value, list):
            flat[prefix + name] = value
    return flat


# --- console logs ---------------------------------------------------------------------------------------------------


def _console_rows(text: TextIO, start: re.Pattern, pair: re.Pattern) -> Iterator[Row]:
    """The rows of lines with pairs such as 'reward': 0.5 or reward=0.5, with the step and the kind beside them."""
    initial = {}  # verl prints its first validation with all digits, and in the next line with three
    for i, line in _lines(text):
        begin = start.search(line := line[:LONGEST_LINE])
        if "Initial validation metrics" in line:
            initial = dict(QUOTED.findall(line))
        elif begin and (found := pair.findall(line := line[begin.start() :])):
            values = {}
            for name, value in found:
                if values.setdefault(name, value) != value:  # two of one name: then it is not clear which is meant
                    values[f"{name} (again)"] = value
            rest = pair.sub(" ", line)
            values = {name.lower(): value for name, value in COUNTED.findall(rest)} | values | initial
            values |= {"kind": kind[1].lower()} if (kind := KIND.search(rest)) else {}
            yield i, {re.sub("^test_score", "val/test_score", name): value for name, value in values.items()}
            initial = {}


# --- tables ---------------------------------------------------------------------------------------------------------


def _delimiter(header: str) -> str:
    return max(",\t;|", key=header.count)


def _looks_like_a_table(first: str, second: str) -> bool:
    """Whether a second line has as many cells as the first, and a number in one; and the first no pairs."""
    letter = _delimiter(first)
    number = re.compile(r'[\s"]*([-+]?[\d.,]+(e[-+]?\d+)?[\s%"]*)?', re.I)
    same = 0 < first.count(letter) == second.count(letter)
    return same and any(map(number.fullmatch, second.split(letter))) and not PLAIN.search(first)


def _table_rows(text: TextIO, file: Path) -> Iterator[Row]:
    """The rows of a table, its columns parted by commas, tabs, semicolons or bars."""
    letter = _delimiter(next(_lines(text))[1])
    text.seek(0)
    table, header = csv.reader(text, delimiter=letter, skipinitialspace=True), None
    try:
        for cells in table:
            cells = [cell.strip() for cell in cells]
            place = f"{file}, line {table.line_num}"
            if not any(cells):
                continue
            if header is None:
                header = cells
                if re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", header[0], re.I):
                    raise ValueError(f"{place}: a number where column names are expected: add a line like x,y")
                ((name, count),) = Counter(filter(None, header)).most_common(1)
                if count > 1:
                    raise ValueError(f"{place}: the name {name!r} occurs twice: rename one")
                continue
            if len(cells) > len(header):
                raise ValueError(f"{place}: {len(cells)} values under {len(header)} names: mend the line")
            if letter == ";":
                cells = [re.sub(r"^([-+]?\d*),(\d+ ?%?)$", r"\1.\2", cell) for cell in cells]
            yield table.line_num, dict(zip(header, cells))
    except csv.Error as error:
        place = f"{file}, line {table.line_num}"
        raise ValueError(f"{place}: neither JSON nor a table ({error}): write one object a line") from None


# --- TensorBoard ----------------------------------------------------------------------------------------------------


def _event_rows(binary: BinaryIO, file: Path) -> Iterator[Row]:
    """The scalars of TensorBoard's events: a row for each step."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(f"{file} holds TensorBoard's events: pip install tensorboard, which reads them") from None
    rows = {}
    with tempfile.NamedTemporaryFile() as copy:  # of what was unpacked, or came by a pipe
        shutil.copyfileobj(binary, copy)
        copy.flush()
        for event in EventFileLoader(copy.name).Load():
            for value in event.summary.value:
                number = make_ndarray(value.tensor)
                if number.size == 1 and number.dtype.kind == "f":
                    rows.setdefault(event.step, {"step": event.step})[value.tag] = float(number.item())
    if not rows:
        raise ValueError(f"{file} holds events and no scalars: name the file that holds the curves")
    return ((-i, rows[step]) for i, step in enumerate(sorted(rows), 1))
