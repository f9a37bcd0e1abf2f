"""Files that are written whole or not at all, and texts that are read in two encodings."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write a file at. At the end of the block that file replaces `target`; if the block
    raises, `target` stays as it was. A link is followed. What is there and is no regular file, such
    as /dev/null or a pipe, is written to and not replaced. OSError if it cannot be written."""
    if target.exists() and not target.is_file():
        yield target
        return
    target = Path(os.path.realpath(target))
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(target: Path, text: str) -> None:
    """Write this text into a file, in UTF-8, as `whole_file` does."""
    with whole_file(target) as partial:
        partial.write_text(text, encoding="utf-8")


def read_text(path: Path) -> str:
    """The text of a file, or of standard input if the path is "-". It is in UTF-8, or in UTF-16 as
    some programs of Windows write it. What cannot be decoded becomes a question mark."""
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    return data.decode(encoding, "replace")
