"""Records of JSONL, JSON, CSV and Parquet files, from a path or from the Hugging Face hub; and the
problem in each."""

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
# What stands in a cell without a value, as text and in lower case.
EMPTY = ["", "[]", *"nan none null n/a #n/a <na> ?".split()]
FORMATS = (".jsonl", ".json", ".csv", ".parquet")


def download(name: str, subsets: list[str]) -> Path:
    """The folder of a data set of the hub, with the files below these folders.
    Raises ValueError if it is not there or the hub cannot be reached."""
    import huggingface_hub

    # * matches / too
    patterns = [str(Path(subset, f"*{suffix}")) for subset in subsets for suffix in FORMATS]
    try:
        return Path(
            huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns)
        )
    except Exception as error:  # of many libraries: the hub's, HTTP's, the file system's
        reason = f"{type(error).__name__} {error}".splitlines()[0]
        raise ValueError(
            f"the data set {name} could not be downloaded from the hub: {reason:.200}. If the hub "
            "is out of reach, download the data set elsewhere and give its folder instead of its "
            "name, or set HF_HOME to a cache that holds it"
        ) from None


# --- records --------------------------------------------------------------------------------------


def read_records(path: Path) -> Iterator[tuple[str, dict]]:
    """Each record of a file with its place ("my.jsonl, line 3"). ValueError if one cannot be read,
    or there is none."""
    if path.suffix not in FORMATS:
        raise ValueError(
            f"{path} is not a file of records; the endings known are {', '.join(FORMATS)}"
        )
    reader = {".csv": read_csv, ".parquet": read_parquet}.get(path.suffix, read_json)
    last = "its start"
    try:
        for place, record in reader(path):
            if not isinstance(record, dict):
                raise ValueError(f"{place} holds {record!r:.60}, no object with named columns")
            last = place
            yield f"{path}, {place}", record
    except Exception as error:  # of many kinds: of the encoding, of JSON, CSV or Parquet
        raise ValueError(f"{path}, after {last}: no record in UTF-8, but {error}") from None
    if last == "its start":
        raise ValueError(f"{path} holds no record: put one problem on each line, or in each row")


def read_json(path: Path) -> Iterator[tuple[str, object]]:
    """A record a line, or a list of records."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json":
        for number, record in enumerate(json.loads(text), start=1):
            yield f"record {number}", record
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"line {number}", json.loads(line)


def read_csv(path: Path) -> Iterator[tuple[str, dict]]:
    """CSV. The separator is the one of comma, semicolon and tab that the first line has most
    often."""
    csv.field_size_limit(2**30)
    text = path.read_text(encoding="utf-8-sig")
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    for record in reader:
        if None in record:
            raise ValueError(
                f"line {reader.line_num} has more cells than columns: put quotes around a text that"
                f" holds {separator!r}"
            )
        yield f"line {reader.line_num}", record


def read_parquet(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow.parquet

    number = 0
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64):
        for record in batch.to_pylist():
            number += 1
            yield f"record {number}", record


# --- problems -------------------------------------------------------------------------------------


def choose_columns(
    place: str, record: dict, options: dict, wanted: str = "answer"
) -> dict[str, str]:
    """The columns of the problem, and of the tests, the answer or the worked solution. The options
    name them, or they are guessed. ValueError for a missing column."""
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
    return columns


def make_problem(record: dict, columns: dict[str, str], instruction: str | None) -> Problem:
    """The problem of a record. Raises ValueError if a column is empty, or if its form is not
    known."""
    values = {key: record.get(column) for key, column in columns.items()}
    for key, value in values.items():
        if str(value).strip().casefold() in EMPTY:
            raise ValueError(
                f"column {columns[key]!r} is empty or holds {value!r}, which is no {key}: fill it"
                " in, or remove the record"
            )
        if key in ("problem", "solution") and not isinstance(value, str):
            raise ValueError(f"column {columns[key]!r} holds no text but {value!r:.60}")
    text = values["problem"]
    text.encode()  # ValueError for half of a character, a lone surrogate
    if "tests" in values:
        starter_code = record.get("starter_code") or ""
        problem = programming.problem(text, values["tests"], starter_code, instruction)
    elif "answer" in values:
        problem = mathematics.problem(text, text_of(values["answer"]), instruction)
    else:
        problem = Problem(mathematics.worded(text, instruction), "", mathematics.__name__)
    return replace(problem, answer=values.get("solution", problem.answer), text=text)


def text_of(answer) -> str:
    """The text of an answer, which may be a text, a number, or a list of one of these. ValueError
    for all others. A decimal is the one that was stored, if a program wrote all digits of its 64
    bits: 0.3 for 0.30000000000000004, and 1.3 for 1.2999999523162842, which had 32 bits before."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if type(answer) not in (str, int, float):
        raise ValueError(f"an answer is a text or a number, not {answer!r:.60}")
    text = str(answer)
    if len(text) < 17 or not re.fullmatch(r"-?\d+\.\d+", text) or str(float(text)) != text:
        return text
    value, narrow = float(text), numpy.float32(text)
    return str(narrow) if float(narrow) == value else repr(float(f"{value:.15g}"))
