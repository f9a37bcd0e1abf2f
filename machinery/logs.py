"""Read the log of any RL framework as curves: pass rate over compute.

    read_log("runs/NAME")                                    # the folder of a run of ours
    read_log("wandb.csv", y="val/accuracy", percent=True)    # one curve for each run in the table

The format is told by the content, never by the name: JSON lines (ours, verl's, prime-rl's), a JSON document with a list
of records (trainer_state.json), a console log (verl's, TRL's, lines of key=value), a table with named columns,
TensorBoard's events, Parquet; each may be gzipped. It becomes rows, one after the other, so that a large file streams.
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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, TextIO

from machinery.columns import Series, Table, read_curves

Row = tuple[int, dict]  # the line of a row (-3: the third record of a document), and its values by column

# What is read in a folder, the first that there is: ours, transformers' and TRL's, prime-rl's, Stable-Baselines3's,
# TensorBoard's.
LOG_NAMES = ("log.jsonl", "trainer_state.json", "metrics.jsonl", "progress.csv", "checkpoint-*/trainer_state.json",
             "events.out.tfevents*")  # fmt: skip

# By their first bytes, files that hold no log, or hold it in a way that only their own program reads.
REFUSED = (
    (rb"PK\x03\x04", "a spreadsheet or another zip archive", "save it as CSV"),
    (rb"\xd0\xcf\x11\xe0", "a spreadsheet of an old kind", "save it as CSV"),
    (rb"\x80[\x02-\x05]", "a pickle, which could run a program of its own", "write it as JSON lines"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8|<svg|RIFF", "a picture", "fit the log that it was drawn from"),
    (rb"%PDF", "a PDF", "fit the log that it was made from"),
    (rb"SQLite format", "a database", "export its metrics as CSV"),
    (rb":W&B", "W&B's own file", "export the run as CSV or JSON lines"),
    (rb"\x93NUMPY", "an array of numpy", "write it as CSV with named columns"),
    (rb"\x89HDF|ARROW1", "a table in a binary format", "write it as CSV or Parquet"),
    (rb"BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd", "compressed, and not by gzip", "unpack it"),
    (rb"\s*<(!DOCTYPE|html|\?xml)", "a web page", "download the log itself"),
    (rb"version https://git-lfs", "a pointer of git-lfs", "run git lfs pull"),
    (rb"\x1f\x8b", "gzip within gzip", "unpack it once"),
)

_NUMBER = r"(?:\w+(?:\.\w+)*\()?'?([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?+%?|nan|[-+]?inf)"
VERL_STEP = re.compile(r"\bstep:(\d+) - ")
VERL_VALUE = re.compile(rf"(?<!\S)([^\s:]++):{_NUMBER}", re.I)
QUOTED = re.compile(rf"['\"]([^'\"]{{1,200}})['\"]\s*:\s*{_NUMBER}", re.I)  # 'reward': 0.5
PLAIN = re.compile(rf"(?<![\w./@-])([A-Za-z_][\w./@-]*+)\s*[=:]\s*{_NUMBER}(?![\w.:/])", re.I)  # reward=0.5
COUNTED = re.compile(r"\b(step|iter(?:ation)?|episode|update|epoch|rollout|eval)\s*[=:#]?\s*\[?(\d+)(?![\d.]*%)", re.I)
KIND = re.compile(r"(?<![\w/.-])(train|training|eval|evaluation|val|valid|validation|test)(?![\w/.-])", re.I)
LONGEST_LINE = 100_000  # letters of a line of a console log; what comes after is no metric


def read_log(
    path: str | os.PathLike,
    x: str | None = None,
    y: str | None = None,
    percent: bool = False,
    where: str | None = None,
) -> list[Series]:
    """The curves in a log: one, or one for each run of a wide table.

    path: a file, "-" for standard input, the folder of a run, or FILE:COLUMN. x, y: the columns of compute and pass
    rate; where None, they are guessed. y may be several names with commas, or "all"; each is a curve. where: which
    records, as COLUMN=VALUE with commas. percent: the pass rate is in percent. The notes of a Series say how it was
    read. Raises ValueError with file and line for what is no curve, and OSError for a file that cannot be read.
    """
    text, column = os.fspath(path), None
    if not os.path.exists(text):
        ends = [i for i, letter in enumerate(text) if letter == ":" and os.path.exists(text[:i])]
        text, column = (text[: ends[-1]], text[ends[-1] + 1 :]) if ends else (text, None)
    file, notes = _log_in(Path(text)) if os.path.isdir(text) else Path(text), []
    whole = file.absolute()
    name = whole.parent.name if any(whole.match(pattern) for pattern in LOG_NAMES) else whole.name
    name = column or ("standard input" if text == "-" else name)
    return read_curves(Table(str(file), read_rows(file, notes), notes), name, x, column or y, where, percent)


def read_number(value, place: str, column: str) -> float:
    """A value of a log as a number. ValueError, with its place, if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{place}: {column} = {str(value)[:40]!r} is not a number") from None


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


def read_rows(file: Path, notes: list[str]) -> Iterator[Row]:
    """The rows of a log one after the other; what was left out is appended to `notes`. ValueError, with the line, if it
    is of no known format, and OSError if it cannot be read."""
    try:
        with _opened(file) as binary:
            for line, values in _rows(binary, file, notes):
                if "value" in values:  # one metric a row, as MLflow has it
                    name = next((values[name] for name in ("key", "metric", "tag") if name in values), "value")
                    values[str(name)] = values.pop("value")
                yield line, values
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{file}: the gzip file is cut off or broken: copy it again") from None
    except RecursionError:
        raise ValueError(f"{file}: JSON nested too deeply for a log: write one flat object a line") from None
    except MemoryError:
        raise ValueError(f"{file}: too large for this machine's memory: write one small object a line") from None


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked, from which one can read again and again."""
    with contextlib.ExitStack() as stack:
        binary = sys.stdin.buffer if str(file) == "-" else stack.enter_context(open(file, "rb"))
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
    for magic, what, advice in REFUSED:
        if re.match(magic, head, re.I | re.S):
            raise ValueError(f"{file} is no log but {what}: {advice}")
    binary.seek(0)
    if b"brain.Event:" in head[:64]:
        return _event_rows(file)
    if head.startswith(b"PAR1"):
        return _parquet_rows(binary, file)
    zeros = head[1::2].count(0), head[::2].count(0)
    wide = max(zeros) > len(head) / 8  # every second byte is 0: UTF-16
    if sum(byte < 32 and byte not in b"\t\n\r\x0c\x1b" for byte in head) - wide * max(zeros) > len(head) / 10:
        raise ValueError(f"{file} is binary, and no kind of log that is known: write it as JSON lines or CSV")
    encoding = "utf-8-sig" if not wide else "utf-16-le" if zeros[0] > zeros[1] else "utf-16-be"
    text = io.TextIOWrapper(binary, encoding, errors="replace")
    start = "".join(line[:100_000] for _, line in itertools.islice(_lines(text), 2)).lstrip()
    if not start:
        raise ValueError(f"{file}: the file is empty: the run has logged nothing yet")
    if re.match(r'\{\s*(["}]|$)|\[\s*([]{["]|$|[-\d.e]+\s*[],]\s*([-\d]|$))', start):
        return _json_rows(text, file, notes)
    table = _looks_like_a_table(start)
    for rows in (_verl_rows,) if table else (_verl_rows, partial(_pair_rows, QUOTED), partial(_pair_rows, PLAIN)):
        if next(rows(text), None):
            return rows(text)
    return _table_rows(text, file)


def _lines(text: TextIO) -> Iterator[tuple[int, str]]:
    """The lines of a text from its start, numbered from 1; empty ones are left out."""
    text.seek(0)
    lines = ((i, line.lstrip("\ufeff")) for i, line in enumerate(text, 1))
    return ((i, line) for i, line in lines if not line.isspace() and line)


# --- JSON -----------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple]) -> dict:
    """A JSON object. ValueError if a name occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice: rename one")
    return values


_parse = json.JSONDecoder(parse_int=float, object_pairs_hook=_object).decode  # float: an integer may have any length


def _json_rows(text: TextIO, file: Path, notes: list[str]) -> Iterator[Row]:
    """The rows of JSON lines, or of one document."""
    lines = _lines(text)
    (_, first), second = next(lines), next(lines, None)
    try:
        if second and isinstance(_parse(first), dict):
            return _json_lines(text, file, notes)
    except ValueError:
        pass
    return _document_rows(text, file)


def _json_lines(text: TextIO, file: Path, notes: list[str]) -> Iterator[Row]:
    for i, line in _lines(text):
        try:
            record = _parse(line)
        except json.JSONDecodeError:
            if not line.endswith("\n"):  # a run is writing it, or was cut off
                notes.append(f"line {i} is cut off, and left out")
                return
            raise ValueError(f"{file}, line {i}: no valid JSON: {line[:40].strip()!r}: mend or remove it") from None
        except ValueError as error:
            raise ValueError(f"{file}, line {i}: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{file}, line {i}: no object with named columns: {line[:40].strip()!r}: remove it")
        yield i, _flat(record)


def _document_rows(text: TextIO, file: Path) -> Iterator[Row]:
    """The rows of one JSON document: its list of records, or its lists of equal length."""
    text.seek(0)
    try:
        whole = _parse(text.read().lstrip("\ufeff"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {error.lineno}: no valid JSON from here: cut off, or mistyped") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    records = whole
    if isinstance(whole, dict):
        lists = {name: its for name, its in whole.items() if isinstance(its, list) and its}
        of_records = [its for its in lists.values() if all(isinstance(record, dict) for record in its)]
        if len(of_records) == 1 or "log_history" in whole:
            records = whole.get("log_history", *of_records)
        elif len({len(its) for its in lists.values()}) == 1:
            records = [dict(zip(lists, values)) for values in zip(*lists.values())]
        elif not lists:
            records = [whole]
    if not (isinstance(records, list) and records and all(isinstance(record, dict) for record in records)):
        raise ValueError(f"{file}: JSON without records: expected a list of objects, or an object a line")
    return ((-i, _flat(record)) for i, record in enumerate(records, 1))


def _flat(record: dict, prefix: str = "", depth: int = 4) -> dict:
    """The numbers and texts of a record, those of records in it under eval/acc; `data` and `metrics` add no name."""
    flat = {}
    for name, value in record.items():
        if isinstance(value, dict):
            own = prefix if name in ("data", "metrics") else f"{prefix}{name}/"
            flat |= _flat(value, own, depth - 1) if depth else {}
        elif not isinstance(value, list):
            flat[prefix + name] = value
    return flat


# --- console logs ---------------------------------------------------------------------------------------------------


def _verl_rows(text: TextIO) -> Iterator[Row]:
    """The rows of verl's console log: those lines that hold `step:3 - name:value - ...`. What its first validation has
    measured belongs to the step after which it is printed, with more digits."""
    initial = {}
    for i, line in _lines(text):
        if "Initial validation metrics" in line:
            initial = dict(QUOTED.findall(line))
        elif step := VERL_STEP.search(line):
            values = {"step": step[1], **dict(VERL_VALUE.findall(line[step.end() :])), **initial}
            yield i, {re.sub("^test_score", "val/test_score", name): value for name, value in values.items()}
            initial = {}


def _pair_rows(pattern: re.Pattern, text: TextIO) -> Iterator[Row]:
    """The rows of lines with pairs such as 'reward': 0.5 or reward=0.5, with the step and the kind before them."""
    for i, line in _lines(text):
        line = line[:LONGEST_LINE]
        if found := pattern.findall(line):
            values = {}
            for name, value in found:
                if values.setdefault(name, value) != value:  # two of one name: then it is not clear which is meant
                    values[f"{name} (again)"] = value
            before = line[: line.index(found[0][0])]
            for name, value in COUNTED.findall(pattern.sub(" ", line) if pattern is PLAIN else before):
                values.setdefault(name.lower() if name.lower() not in ("rollout", "eval") else "step", value)
            if kind := KIND.search(before):
                values.setdefault("kind", kind[1].lower())
            yield i, values


# --- tables ---------------------------------------------------------------------------------------------------------


def _delimiter(header: str) -> str:
    return max(",\t;| ", key=lambda letter: (header.count(letter) > 0 and letter != " ", header.count(letter)))


def _looks_like_a_table(start: str) -> bool:
    """Whether a second line has as many cells as the first, and a number in one; and the first no pairs."""
    first, _, rest = start.partition("\n")
    second = rest.partition("\n")[0]
    letter = _delimiter(first)
    cells = second.split(letter)
    numbers = [cell for cell in cells if re.fullmatch(r'[\s"]*[-+]?[\d.,]+(e[-+]?\d+)?[\s%"]*|', cell, re.I)]
    return 0 < first.count(letter) == second.count(letter) and bool(numbers) and not PLAIN.search(first)


def _table_rows(text: TextIO, file: Path) -> Iterator[Row]:
    """The rows of a table, its columns parted by commas, tabs, semicolons, bars or spaces."""
    letter = _delimiter(next(_lines(text))[1])
    text.seek(0)
    table, header = csv.reader(text, delimiter=letter, skipinitialspace=True), None
    try:
        for cells in table:
            cells = [cell.strip() for cell in cells]
            if not any(cells):
                continue
            place = f"{file}, line {table.line_num}"
            if header is None:
                header = [name.lstrip("\ufeff") for name in cells]
                if re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", header[0], re.I):
                    raise ValueError(f"{place}: a number where column names are expected: add a line like x,y")
                if twice := [name for name in header if name and header.count(name) > 1]:
                    raise ValueError(f"{place}: the name {twice[0]!r} occurs twice: rename one")
                continue
            if len(cells) > len(header):
                raise ValueError(f"{place}: {len(cells)} values under {len(header)} names: mend the line")
            if letter == ";":
                cells = [re.sub(r"^([-+]?\d*),(\d+ ?%?)$", r"\1.\2", cell) for cell in cells]
            yield table.line_num, dict(zip(header, cells))
    except csv.Error as error:
        place = f"{file}, line {table.line_num}"
        raise ValueError(f"{place}: neither JSON nor a table ({error}): write one object a line") from None


# --- files that a library reads -------------------------------------------------------------------------------------


def _event_rows(file: Path) -> Iterator[Row]:
    """The scalars of TensorBoard's events: a row for each step, with the seconds since the first."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(f"{file} holds TensorBoard's events: pip install tensorboard, which reads them") from None
    events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    rows, start = {}, None
    for tag in events.Tags()["scalars"] + events.Tags()["tensors"]:
        scalar = tag in events.Tags()["scalars"]
        for event in events.Scalars(tag) if scalar else events.Tensors(tag):
            start = event.wall_time if start is None else start
            row = rows.setdefault(event.step, {"step": event.step, "relative_time": event.wall_time - start})
            value = event.value if scalar else make_ndarray(event.tensor_proto)
            if scalar or (value.size == 1 and value.dtype.kind == "f"):
                row[tag] = float(value)
    if not rows:
        raise ValueError(f"{file} holds events and no scalars: name the file that holds the curves")
    return ((-i, rows[step]) for i, step in enumerate(sorted(rows), 1))


def _parquet_rows(binary: BinaryIO, file: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(f"{file} is Parquet: pip install pyarrow, which reads it") from None
    try:
        rows = (row for batch in parquet.ParquetFile(binary).iter_batches() for row in batch.to_pylist())
        yield from enumerate(map(_flat, rows), 1)
    except (ArrowException, OSError):
        raise ValueError(f"{file}: the Parquet file is cut off or broken: copy it again") from None
