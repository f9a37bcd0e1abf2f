"""What a run says on the screen."""

import sys
import time

SAY_EVERY = 10.0  # seconds between two lines of a Progress
_warned = set()  # what was warned about


def say(text: str) -> None:
    """Print a line for the user. Standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def warn(about: str, text: str) -> bool:
    """Print a warning, once for each `about` in this process. Returns whether it was printed."""
    if about in _warned:
        return False
    _warned.add(about)
    say(f"warning: {text}")
    return True


class Progress:
    """Says now and then how far something is."""

    def __init__(self, about: str, total: int):
        self.about, self.total, self.said = about, total, time.monotonic()

    def show(self, done: int, *words: str) -> None:
        """Print a line, with these words in it, unless another one has just come."""
        now = time.monotonic()
        if now - self.said > SAY_EVERY:
            self.said = now
            say(", ".join([f"{self.about} {done} of {self.total}", *words]))
