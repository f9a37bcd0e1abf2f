"""What a run says on the screen, above its progress bar."""

import os
import sys

from tqdm import tqdm

_warned: set[str] = set()


def say(text: str) -> None:
    """Print above the progress bar."""
    tqdm.write(text, file=sys.stderr)


def warn(about: str, text: str) -> bool:
    """Say it, the first time in this process. Returns whether it was said."""
    first = about not in _warned
    if first:
        _warned.add(about)
        say(f"warning: {text}")
    return first


class Progress:
    """A progress bar of steps. Where it cannot move, in a file or on a terminal that only writes on (TERM=dumb), it is
    a line now and then, fifty in all."""

    def __init__(self, about: str, total: int, done: int = 0):
        self.about, self.total, self.said = about, total, done
        plain = not sys.stderr.isatty() or os.environ.get("TERM") == "dumb"
        # Where the line is too long the end is cut off: what matters stands first.
        shape = "{n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}"
        self.bar = tqdm(total=total, initial=done, dynamic_ncols=True, bar_format=shape, disable=plain)

    def show(self, done: int, text: str) -> None:
        """Move to this step; text: what is to stand beside it."""
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(done - self.bar.n)
        if self.bar.disable and (done >= self.said + max(1, self.total // 50) or done == self.total > self.said):
            self.said = done
            say(f"{self.about}: step {done} of {self.total}, {text}")

    def close(self) -> None:
        """Leave the bar as it is."""
        self.bar.close()
