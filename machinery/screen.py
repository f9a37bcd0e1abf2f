"""What a run says on the screen, above its progress bar."""

import sys

from tqdm import tqdm

_warned: set[str] = set()


def say(text: str) -> None:
    """Print above the progress bar."""
    tqdm.write(text, file=sys.stderr)


def warn(about: str, text: str) -> None:
    """Say it, the first time in this process."""
    if about not in _warned:
        _warned.add(about)
        say(f"warning: {text}")
