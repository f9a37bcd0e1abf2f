"""What a run says on the screen, above its progress bar."""

import os
import sys
import threading

from tqdm import tqdm

# One process alone writes to the screen. For tqdm's own lock, which is for several, Python would
# start one more process.
tqdm.set_lock(threading.RLock())
_warned = set()  # what was warned about


def say(text: str) -> None:
    """Print above the progress bar."""
    tqdm.write(text, file=sys.stderr)


def warn(about: str, text: str) -> bool:
    """Print a warning, once for each `about` in this process. Returns whether it was printed."""
    if about in _warned:
        return False
    _warned.add(about)
    say(f"warning: {text}")
    return True


class Progress:
    """A progress bar of steps. In a file, or on a terminal without cursor or size, it is at most
    fifty lines."""

    def __init__(self, about: str, total: int, done: int = 0):
        self.about, self.total, self.fiftieth = about, total, 50 * done // total
        size = os.get_terminal_size(sys.stderr.fileno()) if sys.stderr.isatty() else (0, 0)
        plain = 0 in size or os.environ.get("TERM") == "dumb"  # docker exec -t: 0 rows
        # A line that is too long loses its end, so what matters stands first.
        shape = "{n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}"
        self.bar = tqdm(
            total=total, initial=done, dynamic_ncols=True, bar_format=shape, disable=plain
        )

    def show(self, done: int, text: str) -> None:
        """Move to this step, and put the text beside the bar."""
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(done - self.bar.n)
        fiftieth = 50 * done // self.total
        if self.bar.disable and fiftieth > self.fiftieth:
            self.fiftieth = fiftieth
            say(f"{self.about}: step {done} of {self.total}, {text}")

    def close(self) -> None:
        self.bar.close()
