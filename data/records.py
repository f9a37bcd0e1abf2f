"""Records of JSONL, JSON, CSV and Parquet files, from a path or from the Hugging Face hub, each with its place."""

import csv
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

FORMATS = (".jsonl", ".json", ".csv", ".parquet")
LEAST_SUSPECT, MOST_UNPACKED = 2**30, 200  # bytes; a larger Parquet file unpacks to at most so many times its size


def read_records(path: Path) -> Iterator[tuple[str, dict]]:
    """Each record of a file with its place ("my.jsonl, line 3"). Raises ValueError, with the place, for what cannot be
    read, and for a file with no record."""
    readers = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path} is not a file of records; the endings known are {', '.join(FORMATS)}")
    number = 0
    for number, (place, record) in enumerate(readers[path.suffix](path), start=1):
        if not isinstance(record, dict):
            raise ValueError(f"{path}, {place}: a record must be an object with named columns, not {record!r:.60}")
        yield f"{path}, {place}", record
    if number == 0:
        raise ValueError(f"{path} holds no record")


def read_jsonl(path: Path) -> Iterator[tuple[str, dict]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number} is not UTF-8: {error.reason}") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from None


def read_json(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        records = json.loads(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line} is not UTF-8: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(records, list):
        raise ValueError(f"{path} holds no list of records, but a {type(records).__name__}")
    for number, record in enumerate(records, start=1):
        yield f"record {number}", record


def read_csv(path: Path) -> Iterator[tuple[str, dict]]:
    limit = csv.field_size_limit(1 << 30)  # of the whole process, so it is put back
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True, restkey="")
        try:
            for record in reader:
                if "" in record and record[""]:
                    raise ValueError(f"{path}, line {reader.line_num}: more cells than columns")
                yield f"line {reader.line_num}", record
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, after line {reader.line_num} is not UTF-8: {error.reason}") from None
        except csv.Error as error:
            raise ValueError(f"{path}, after line {reader.line_num} is not CSV: {error}") from None
        finally:
            csv.field_size_limit(limit)


def read_parquet(path: Path) -> Iterator[tuple[str, dict]]:
    import pyarrow
    import pyarrow.parquet

    limit, number, unpacked = max(LEAST_SUSPECT, MOST_UNPACKED * path.stat().st_size), 0, 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
        if sum(group.total_byte_size for group in groups) > limit:
            raise ValueError(f"{path} is refused: it would unpack to more than {limit / 2**30:.0f} GiB")
        for batch in file.iter_batches(batch_size=64):
            unpacked += batch.nbytes  # a text that is stored once and meant many times is not in the sum above
            if unpacked > limit:
                raise ValueError(f"{path}, record {number + 1}: so far it has unpacked to {unpacked / 2**30:.0f} GiB")
            for record in batch.to_pylist():
                number += 1
                yield f"record {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None


def find_files(place: str, subsets: tuple[str, ...] = (), split: str = "train") -> list[Path]:
    """The files of records at a place: a file, a folder, or a data set of the hub, which is downloaded or taken from
    its cache. Of a folder or data set: those below the folders `subsets`, if any are named, and those whose path says
    `split`, if any does. Raises ValueError when there are none, and when the hub cannot be reached."""
    path = Path(place).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir() and (not re.fullmatch(r"[\w.-]+/[\w.-]+", place) or path.suffix in FORMATS):
        raise ValueError(f"{place} is no file, no folder, and no name of a data set on the hub (OWNER/NAME)")
    root = path if path.is_dir() else download(place, subsets)
    files = sorted(file for file in root.rglob("*") if file.suffix in FORMATS and file.is_file())
    files = [file for file in files if not file.relative_to(root).as_posix().startswith(".")]
    if subsets:
        files = [file for file in files if file.relative_to(root).parts[0] in subsets]
    says = {file: set(re.split(r"[^a-z0-9]+", file.relative_to(root).as_posix().lower())) for file in files}
    if any({"train", "validation", "test"} & words for words in says.values()):
        files = [file for file in files if split in says[file]]
    if not files:
        below = f" below {', '.join(subsets)}" if subsets else ""
        raise ValueError(f"{place} has no file of records{below} for {split}: {', '.join(FORMATS)} are looked for")
    return files


def download(name: str, subsets: tuple[str, ...]) -> Path:
    """The folder of a data set of the hub. Raises ValueError when it is not there or the hub cannot be reached."""
    import huggingface_hub

    folders = [f"{subset}/" for subset in subsets] or [""]
    patterns = [f"{folder}*{suffix}" for folder in folders for suffix in FORMATS]  # * is for folders too
    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except Exception as error:  # of many libraries: the hub's, HTTP's, the file system's
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(
            f"the data set {name} could not be had from the hub{offline}: {reason:.200}. Where the hub is out of reach,"
            " download the data set elsewhere and give its folder or file instead of the name, or set HF_HOME to a"
            " cache that holds it"
        ) from None
