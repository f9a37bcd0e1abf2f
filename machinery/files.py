"""Lines of JSON, and lines and folders that are written whole or not at all."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import safetensors

from curve.files import write_whole


def append_whole(target: Path, text: str) -> None:
    """Add a text to a file, at once. OSError if it cannot be written; then the file is as it
    was."""
    left = text.encode()
    with open(target, "ab", buffering=0) as file:  # after an error, a buffer would be written again
        end = file.tell()
        try:
            while left:
                written = file.write(left)
                left = left[written:]
        except OSError:
            file.truncate(end)  # half a line helps nobody
            raise


def six_digits(value: float) -> float | None:
    """A number rounded to six digits; None if it is not finite, since JSON has no such numbers."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def json_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """The lines of a file with one JSON object in each: as text, and as object. The last line is
    left out if it is cut off or still being written. ValueError for a broken line; it names the
    file and the line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                text, record = line.decode(), json.loads(line)
                record["kind"], record["step"]
            except (ValueError, TypeError, KeyError, RecursionError):
                broken = "this is no line that a run has written: remove it"
                raise ValueError(f"{path}, line {number}: {broken}") from None
            yield text, record


def drop_later(path: Path, step: int) -> list[dict]:
    """Drop the lines of all steps after this one, since they come again, and the line of the end.
    Returns the lines that are left; [] if there is no file. ValueError as in `json_lines`."""
    if not path.exists():
        return []
    texts, left = "", []
    for text, line in json_lines(path):
        if line["step"] <= step and line["kind"] != "end":
            texts += text
            left.append(line)
    write_whole(path, texts)
    return left


def last_line(folder: Path) -> dict:
    """The newest line in the log of a run, which may be writing it; {} if there is none. ValueError
    for a broken line; it names the file and the line."""
    log = folder / "log.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    try:
        return json.loads(lines[-1]) if lines else {}
    except ValueError:
        raise ValueError(f"{log}, line {len(lines)}: this is no JSON: remove it") from None


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into. It replaces `target` once all of it is on disk. OSError if it
    cannot."""
    target = Path(os.path.realpath(target))  # a link stays, and the folder behind it is replaced
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in filter(Path.is_file, partial.rglob("*")):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except safetensors.SafetensorError as error:  # its way to report a full disk
        raise OSError(f"{target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
