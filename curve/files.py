"""Files that are written whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A path to write a file at. At the end of the block that file replaces `target`; if the block
    raises, `target` stays as it was. OSError if it cannot be written."""
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(target: Path, text: str) -> None:
    with whole_file(target) as partial:
        partial.write_text(text, encoding="utf-8")
