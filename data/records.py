"""Records of JSONL, JSON, CSV and Parquet files, from a path or from the Hugging Face hub; and the
problem in each."""

import csv
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data import Problem
from data.tasks import mathematics, programming

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
LIKELY_COLUMNS = {  # guessed in this order
    "problem": ("problem", "question", "prompt", "query"),
    "tests": ("tests", "test_cases"),
    "answer": ("answer", "final_answer", "ground_truth", "target", "solution"),
    "solution": ("solution",),
}


def find_files(place: str, subsets: tuple[str, ...] = (), split: str = "train") -> list[Path]:
    """The files of records at a place: a file, a folder, or a data set of the hub, which is
    downloaded or taken from its cache. In a folder or data set, only files below the folders
    `subsets` count, if any are named, and only files whose path says `split`, if any path does.
    Raises ValueError if none is left, or if the hub cannot be reached."""
    path = Path(place).expanduser()
    if path.is_file():
        return [path]
    root = path if path.is_dir() else download(place, subsets)
    words = {}  # of the path of each file
    for file in sorted(
        file for file in root.rglob("*") if file.suffix in FORMATS and file.is_file()
    ):
        below_root = file.relative_to(root)
        if below_root.parts[0][0] != "." and (not subsets or below_root.parts[0] in subsets):
            words[file] = set(re.split("[^a-z0-9]+", str(below_root).lower()))
    says_split = {"train", "validation", "test"} & set().union(*words.values())
    files = [file for file in words if split in words[file] or not says_split]
    if not files:
        below = f" below {', '.join(subsets)}" if subsets else ""
        raise ValueError(
            f"{place} has no file of records{below} for {split}: {', '.join(FORMATS)} are looked for"
        )
    return files


def download(name: str, subsets: tuple[str, ...]) -> Path:
    """The folder of a data set of the hub. Raises ValueError if it is not there or the hub cannot
    be reached."""
    import huggingface_hub

    folders = [f"{subset}/" for subset in subsets] or [""]
    patterns = [
        f"{folder}*{suffix}" for folder in folders for suffix in FORMATS
    ]  # * also matches folders
    try:
        return Path(
            huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns)
        )
    except Exception as error:  # of many libraries: the hub's, HTTP's, the file system's
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(
            f"the data set {name} could not be had from the hub: {reason:.200}. If the hub is out of reach, download"
            " the data set elsewhere and give its folder instead of its name, or set HF_HOME to a cache that holds it"
        ) from None


def read_records(path: Path) -> Iterator[tuple[str, dict]]:
    """Each record of a file with its place ("my.jsonl, line 3"). ValueError if one cannot be read,
    or there is none."""
    readers = {".jsonl": read_json, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet}
    if path.suffix not in readers:
        raise ValueError(
            f"{path} is not a file of records; the endings known are {', '.join(FORMATS)}"
        )
    place = None
    for place, record in readers[path.suffix](path):
        if not isinstance(record, dict):
            raise ValueError(
                f"{path}, {place}: a record must be an object with named columns, not {record!r:.60}"
            )
        yield f"{path}, {place}", record
    if place is None:
        raise ValueError(f"{path} holds no record")


def read_json(path: Path) -> Iterator[tuple[str, dict]]:
    """JSON, a list of records; or JSONL, a record a line."""
    is_jsonl = path.suffix == ".jsonl"
    with open(path, "rb") as file:
        for number, data in enumerate(file if is_jsonl else [file.read()], start=1):
            if is_jsonl and not data.strip():
                continue
            try:
                value = json.loads(data.rstrip().decode())
            except (ValueError, RecursionError) as error:
                line = (
                    number
                    + getattr(error, "lineno", 1)
                    - 1
                    + data[: getattr(error, "start", 0)].count(b"\n")
                )
                reason = getattr(error, "msg", error)
                raise ValueError(f"{path}, line {line} is not JSON in UTF-8: {reason}") from None
            if is_jsonl:
                yield f"line {number}", value
            elif not isinstance(value, list):
                raise ValueError(f"{path} holds no list of records, but a {type(value).__name__}")
            else:
                yield from (
                    (f"record {number}", record) for number, record in enumerate(value, start=1)
                )


def read_csv(path: Path) -> Iterator[tuple[str, dict]]:
    """CSV. The separator is the one of comma, semicolon and tab that the first line has most
    often."""
    csv.field_size_limit(2**30)
    with open(path, "rb") as file:
        header = file.readline().decode(errors="replace")
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(
            file, delimiter=max(",;\t", key=header.count), strict=True, restkey=""
        )
        try:
            for record in reader:
                if record.get(""):
                    raise ValueError(f"{path}, line {reader.line_num}: more cells than columns")
                yield f"line {reader.line_num}", record
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(
                f"{path}, after line {reader.line_num} is not CSV in UTF-8: {error}"
            ) from None


def read_parquet(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow.parquet

    left = 2**28 + 200 * path.stat().st_size  # bytes of rows: a file holds once what comes often
    try:
        numbers = itertools.count(1)
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64):
            columns = [
                c.dictionary_decode() if isinstance(c, pyarrow.DictionaryArray) else c
                for c in batch.columns
            ]
            left -= sum(column.nbytes for column in columns)
            if left < 0 or any(" dictionary<" in str(column.type) for column in columns):
                raise ValueError(
                    "its rows are more than 200 times as large as the file, or have lists of categories"
                )
            records = pyarrow.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
            yield from ((f"record {number}", record) for record, number in zip(records, numbers))
    except Exception as error:  # of many kinds, by what the columns hold
        raise ValueError(f"{path} is no Parquet file that can be read: {error}") from None


def choose_columns(
    place: str, record: dict, options: dict, wanted: str = "answer"
) -> tuple[dict[str, str], str]:
    """The columns of the problem, and of the tests, the answer or the worked solution. The options
    name them, or they are guessed, and a note says so. ValueError for a missing column."""
    columns, missing, known = {}, [], f"the columns are {', '.join(record)}"
    for key in ("problem", "tests", wanted):
        if (key == "tests" and "answer" in options) or (key == "answer" and "tests" in columns):
            continue
        likely = (options[key],) if key in options else LIKELY_COLUMNS[key]
        present = [column for column in likely if column in record]
        if present:
            columns[key] = present[0]
        elif key in options:
            raise ValueError(f"{place}: there is no column {options[key]!r}; {known}")
        elif key != "tests":
            missing.append(key)
    if missing:
        how = f"add {''.join(f',{key}=COLUMN' for key in missing)} to the argument of --data"
        raise ValueError(
            f"{place}: which column is the {', and which the '.join(missing)}? {known}; {how}"
        )
    guesses = [f"{key}={column}" for key, column in columns.items() if key not in options]
    return (
        columns,
        f"columns guessed: {', '.join(guesses)}; for others add ,NAME=COLUMN" if guesses else "",
    )


def make_problem(record: dict, columns: dict[str, str], instruction: str | None = None) -> Problem:
    """The problem of a record. Raises ValueError if a column is empty, or if its form is not
    known."""
    values = {key: record.get(column) for key, column in columns.items()}
    for key, value in values.items():
        if value is None or value == [] or (isinstance(value, str) and not value.strip()):
            raise ValueError(f"nothing stands in column {columns[key]!r}")
        if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
            raise ValueError(f"column {columns[key]!r} holds half of a character, a lone surrogate")
        if key in ("problem", "solution") and not isinstance(value, str):
            raise ValueError(f"column {columns[key]!r} holds no text but {value!r:.60}")
    if "tests" in values:
        problem = programming.problem(
            values["problem"], values["tests"], record.get("starter_code") or ""
        )
        problem = (
            problem
            if instruction is None
            else replace(problem, prompt=f"{problem.prompt}\n\n{instruction}")
        )
    elif "answer" in values:
        problem = mathematics.problem(values["problem"], text_of(values["answer"]), instruction)
    else:
        problem = Problem(
            mathematics.worded(values["problem"], instruction), "", mathematics.__name__
        )
    return replace(problem, answer=values["solution"]) if "solution" in values else problem


def text_of(answer) -> str:
    """The text of an answer, which may be a text, a number, or a list of one of these. ValueError
    for all others."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if type(answer) not in (str, int, float) or str(answer) in ("nan", "inf", "-inf"):
        raise ValueError(f"an answer is a text or a number, not {answer!r:.60}")
    return str(answer)
