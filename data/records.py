"""Records of JSONL, JSON, CSV, Parquet and Arrow files, from a path or from the Hugging Face hub.
What a column holds has a name of its own, as reward_model.ground_truth and messages.system."""

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

# The ends of names, and what is counted in such a file.
FORMATS = {
    ".jsonl": "line",
    ".json": "record",
    ".csv": "line",
    ".parquet": "record",
    ".arrow": "record",  # as save_to_disk of `datasets` writes them
}
ROLES = {"human": "user", "gpt": "assistant"}


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


def read_records(path: Path) -> Iterator[tuple[str, dict]]:
    """Each record of a file with its place ("my.jsonl, line 3"). ValueError if one cannot be read,
    or there is none."""
    if path.suffix not in FORMATS:
        raise ValueError(
            f"{path} is not a file of records; the endings known are {', '.join(FORMATS)}"
        )
    last = "its start"
    try:
        for number, record in numbered_records(path):
            place = f"{FORMATS[path.suffix]} {number}"
            if not isinstance(record, dict):
                raise ValueError(f"{place} holds {record!r:.60}, no object with named columns")
            last = place
            yield f"{path}, {place}", flat(record)
    except Exception as error:  # of many kinds: of the encoding, of JSON, CSV or Parquet
        raise ValueError(f"{path}, after {last}: no {path.suffix} in UTF-8: {error}") from None
    if last == "its start":
        raise ValueError(f"{path} holds no record: put one problem on each line, or in each row")


def numbered_records(path: Path) -> Iterator[tuple[int, object]]:
    """What a file holds, with the numbers of lines or of records."""
    if path.suffix in (".parquet", ".arrow"):
        import pyarrow.parquet

        if path.suffix == ".arrow":
            batches = pyarrow.ipc.open_stream(path.open("rb"))
        else:
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=64)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
        return
    text = path.read_text("utf-8-sig")
    lines = text.split("\n")
    if path.suffix == ".jsonl" or path.suffix == ".json" and "}\n{" in text:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, json.loads(line)
    elif path.suffix == ".json":
        yield from enumerate(json.loads(text), 1)
    else:
        csv.field_size_limit(2**30)
        # The one that the first line has most often.
        separator = max(",;\t", key=lines[0].count)
        reader = csv.DictReader(io.StringIO(text), delimiter=separator, strict=True)
        names = reader.fieldnames or []
        if len({*names}) < len(names):
            raise ValueError("line 1 has two columns of one name: rename one")
        for record in reader:
            if None in record:
                raise ValueError(
                    f"line {reader.line_num} has more cells than columns: put quotes around a text"
                    f" that holds {separator!r}"
                )
            yield reader.line_num, record


def flat(record: dict) -> dict:
    """A record with what its columns hold, beside them."""
    columns = {}
    for name, value in record.items():
        columns[name], parts = opened(value)
        columns |= {f"{name}.{part}": inner for part, inner in flat(parts).items()}
    return columns


def opened(value) -> tuple[object, dict]:
    """A value, read if it is the text of a list or an object, and what it holds by name. Messages
    are what the user says, and hold what each role says: a text, if it is one turn."""
    if isinstance(value, str) and value[:2] in ('["', "[{", '{"'):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    said = {}
    for turn in value if isinstance(value, list) else ():
        match turn:
            case {"role": role, "content": [{"text": text}] | text} | {"from": role, "value": text}:
                role = ROLES.get(role, role)
                said[role] = [said[role], text] if role in said else text
    if said:
        return said.get("user", said.get("assistant")), said
    return value, value if isinstance(value, dict) else {}
