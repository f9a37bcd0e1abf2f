"""Records of JSONL, JSON, CSV and Parquet files, from a path or from the Hugging Face hub; and the
problem in each."""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy

from data import Problem
from data.tasks import mathematics, programming

LIKELY_COLUMNS = {  # guessed in this order
    "problem": "problem question prompt query".split(),
    "tests": "tests test_cases".split(),
    "answer": "answer final_answer ground_truth target solution".split(),
    "solution": ["solution"],
}
# What spreadsheets and programs write into a cell without an answer, in any case.
EMPTY_MARKERS = "nan none null n/a #n/a <na> ?".split()
Records = Iterator[tuple[str, dict]]  # each record with its place in a file
# Words in the path of a file, and the part of the data that they say.
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(
    "validation valid val dev".split(), "validation"
)

# --- files ----------------------------------------------------------------------------------------


def find_files(place: str, subsets: tuple[str, ...]) -> dict[str, list[Path]]:
    """The files of records at a place, by part (train, test, validation): a file, a folder, or a
    data set of the hub, which is downloaded or taken from its cache. The words of a file's path say
    its part; if no path says one, all are for train. In a folder or data set, only files below the
    folders `subsets` count, if any are named. Raises ValueError if none is left, or if the hub
    cannot be reached."""
    path = Path(place).expanduser()
    if path.is_file():
        return {"train": [path], "test": [], "validation": []}
    root = path if path.is_dir() else download(place, subsets)
    parts, files = {"train": [], "test": [], "validation": []}, []
    for file in sorted(root.rglob("*")):
        below_root = file.relative_to(root)
        folder = below_root.parts[0]
        is_wanted = folder[0] != "." and (not subsets or folder in subsets)
        if is_wanted and file.suffix in FORMATS and file.is_file():
            files.append(file)
            words = re.split("[^a-z0-9]+", str(below_root).lower())
            for part in {SPLITS[word] for word in words if word in SPLITS}:
                parts[part].append(file)
    if not files:
        below = f" below {', '.join(subsets)}" if subsets else ""
        raise ValueError(
            f"{place} has no file of records{below}: {', '.join(FORMATS)} are looked for"
        )
    if not any(parts.values()):
        parts["train"] = files
    return parts


def download(name: str, subsets: tuple[str, ...]) -> Path:
    """The folder of a data set of the hub. Raises ValueError if it is not there or the hub cannot
    be reached."""
    import huggingface_hub

    folders = [f"{subset}/" for subset in subsets] or [""]
    patterns = [f"{folder}*{suffix}" for folder in folders for suffix in FORMATS]  # * matches /
    try:
        folder = huggingface_hub.snapshot_download(
            name, repo_type="dataset", allow_patterns=patterns
        )
    except Exception as error:  # of many libraries: the hub's, HTTP's, the file system's
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(
            f"the data set {name} could not be downloaded from the hub: {reason:.200}. If the hub "
            "is out of reach, download the data set elsewhere and give its folder instead of its "
            "name, or set HF_HOME to a cache that holds it"
        ) from None
    return Path(folder)


# --- records --------------------------------------------------------------------------------------


def read_records(path: Path) -> Records:
    """Each record of a file with its place ("my.jsonl, line 3"). ValueError if one cannot be read,
    or there is none."""
    if path.suffix not in READERS:
        raise ValueError(
            f"{path} is not a file of records; the endings known are {', '.join(FORMATS)}"
        )
    place = None
    for place, record in READERS[path.suffix](path):
        if not isinstance(record, dict):
            raise ValueError(
                f"{path}, {place}: a record must be an object with named columns, "
                f"not {record!r:.60}"
            )
        yield f"{path}, {place}", record
    if place is None:
        raise ValueError(f"{path} holds no record: put one problem on each line, or in each row")


def read_text(path: Path) -> str:
    """The text of a file in UTF-8 or UTF-16. ValueError, with the line, for another encoding."""
    data = path.read_bytes()
    encoding = "utf-8-sig"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    elif b"\0" in data[:2]:  # of the first letter one half
        encoding = "utf-16-be" if data[0] == 0 else "utf-16-le"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line} is not in {encoding.removesuffix('-sig').upper()}, but perhaps in"
            " Latin-1 (Windows-1252): save the file in UTF-8"
        ) from None


def read_jsonl(path: Path) -> Records:
    """A record a line."""
    for number, line in enumerate(io.StringIO(read_text(path)), start=1):
        if line.strip():
            yield f"line {number}", parse_json(path, line, number)


def read_json(path: Path) -> Records:
    """A list of records."""
    records = parse_json(path, read_text(path))
    if not isinstance(records, list):
        raise ValueError(
            f"{path} holds no list of records, but a {type(records).__name__}: "
            "write [{...}, ...], or a record a line in a .jsonl file"
        )
    for number, record in enumerate(records, start=1):
        yield f"record {number}", record


def parse_json(path: Path, text: str, first_line: int = 1):
    """The value of a text that begins at this line of a file. ValueError, with the line, if it is
    not JSON."""
    try:
        return json.loads(text.rstrip(), object_pairs_hook=record_of)
    except json.JSONDecodeError as error:
        lines_before, reason = error.lineno - 1, error.msg
    except (ValueError, RecursionError) as error:  # a number is too long, lists are too deep
        lines_before, reason = 0, error
    raise ValueError(f"{path}, line {first_line + lines_before} is not JSON: {reason}")


def record_of(pairs: list[tuple]) -> dict:
    """A record of these names and values. ValueError if a name is there twice."""
    record = {}
    for name, value in pairs:
        if name in record:
            raise ValueError(f"{name!r} is there twice")
        record[name] = value
    return record


def read_csv(path: Path) -> Records:
    """CSV. The separator is the one of comma, semicolon and tab that the first line has most
    often."""
    csv.field_size_limit(2**30)
    text = read_text(path)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = [*filter(None, reader.fieldnames or ())]
        if len({*names}) < len(names):
            twice = max(names, key=names.count)
            raise ValueError(f"{path}, line 1: two columns are named {twice!r}: rename one")
        for record in reader:
            if None in record:
                raise ValueError(
                    f"{path}, line {reader.line_num}: more cells than columns: "
                    f"put quotes around a text that holds {separator!r}"
                )
            yield f"line {reader.line_num}", record
    except csv.Error as error:
        raise ValueError(f"{path}, after line {reader.line_num} is not CSV: {error}") from None


def read_parquet(path: Path) -> Records:
    """Parquet. A number of 16 or 32 bits is the shortest decimal that gives it."""
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        record_of([(name, "") for name in file.schema_arrow.names])
        narrow = {
            column.name: column.type.to_pandas_dtype()
            for column in file.schema_arrow
            if column.type in (pyarrow.float16(), pyarrow.float32())
        }
        number = 0
        for batch in file.iter_batches(batch_size=64):
            for record in batch.to_pylist():
                for name, width in narrow.items():
                    if record[name] is not None:
                        record[name] = float(str(width(record[name])))
                number += 1
                yield f"record {number}", record
    except Exception as error:  # of many kinds, by what the columns hold
        raise ValueError(f"{path} is no Parquet file that can be read: {error}") from None


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet}
FORMATS = tuple(READERS)

# --- problems -------------------------------------------------------------------------------------


def choose_columns(
    place: str, record: dict, options: dict, wanted: str = "answer"
) -> tuple[dict[str, str], str]:
    """The columns of the problem, and of the tests, the answer or the worked solution. The options
    name them, or they are guessed, and a note says so. ValueError for a missing column."""
    columns = {}
    for key in ("problem", "tests", wanted):
        if (key == "tests" and "answer" in options) or (key == "answer" and "tests" in columns):
            continue  # a problem has tests or an answer
        likely = [options[key]] if key in options else LIKELY_COLUMNS[key]
        present = [column for column in likely if column in record]
        if present:
            columns[key] = present[0]
        elif key in options or key != "tests":
            raise ValueError(
                f"{place}: no column {' or '.join(likely)} holds the {key}; the columns are"
                f" {', '.join(record)}: add ,{key}=COLUMN to the argument of --data"
            )
    guesses = [f"{key}={column}" for key, column in columns.items() if key not in options]
    note = f"columns guessed: {', '.join(guesses)}; for others add ,NAME=COLUMN" if guesses else ""
    return columns, note


def make_problem(record: dict, columns: dict[str, str], instruction: str | None) -> Problem:
    """The problem of a record. Raises ValueError if a column is empty, or if its form is not
    known."""
    values = {key: record.get(column) for key, column in columns.items()}
    for key, value in values.items():
        check_value(key, columns[key], value)
    text = values["problem"]
    if "tests" in values:
        problem = programming.problem(text, values["tests"], record.get("starter_code") or "")
        if instruction is not None:
            problem = replace(problem, prompt=f"{problem.prompt}\n\n{instruction}")
    elif "answer" in values:
        answer = text_of(values["answer"])
        if "####" not in answer:
            check_boxes(answer)
        problem = mathematics.problem(text, answer, instruction)
    else:
        problem = Problem(mathematics.worded(text, instruction), "", mathematics.__name__)
    return replace(problem, answer=values.get("solution", problem.answer), text=text)


def check_value(key: str, column: str, value) -> None:
    """ValueError if a column cannot hold this value."""
    is_text = isinstance(value, str)
    if value is None or value == [] or (is_text and not value.strip()):
        raise ValueError(f"column {column!r} is empty: fill it in, or remove the record")
    if is_text and key == "answer" and value.strip().casefold() in EMPTY_MARKERS:
        raise ValueError(
            f"column {column!r} holds {value!r}, as programs write an empty cell: fill it in, or"
            " remove the record"
        )
    if is_text and re.search("[\ud800-\udfff]", value):
        raise ValueError(f"column {column!r} holds half of a character, a lone surrogate")
    if key in ("problem", "solution") and not is_text:
        raise ValueError(f"column {column!r} holds no text but {value!r:.60}")


def check_boxes(answer: str) -> None:
    """ValueError if a box of a reference answer does not close, or if its boxes differ."""
    boxes = re.split(r"(?=\\(?:boxed|fbox))", answer)[1:]
    contents = {mathematics.last_boxed(box) for box in boxes}
    if None in contents:
        raise ValueError("the answer has a box that does not close")
    if len(contents) > 1:
        raise ValueError("the answer has several boxes: keep the one that is meant")


def text_of(answer) -> str:
    """The text of an answer, which may be a text, a number, or a list of one of these. ValueError
    for all others."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if type(answer) not in (str, int, float) or str(answer) in ("nan", "inf", "-inf"):
        raise ValueError(f"an answer is a text or a number, not {answer!r:.60}")
    return shortest(str(answer))


def shortest(answer: str) -> str:
    """The decimal that was stored as this one, if a program wrote all digits of a number with 64
    bits: 0.3 for 0.30000000000000004, and 1.3 for 1.2999999523162842, which had 32 bits before."""
    digits = re.sub(r"e.*|\D", "", answer).lstrip("0")
    if len(digits) < 15 or not re.fullmatch(r"-?\d+\.\d+(e[-+]\d+)?", answer):
        return answer
    value = float(answer)
    if repr(value) != answer:
        return answer
    with numpy.errstate(over="ignore"):
        narrow = numpy.float32(value)
    return str(narrow) if narrow == value else repr(float(f"{value:.15g}"))
