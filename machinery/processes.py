"""What generators on CPUs are forked from, how the user ends a run, and how its processes end."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import signal
import threading
import time
from pathlib import Path

from core.screen import say

ending = threading.Event()  # set when this process ends its children itself


def import_for_generators() -> None:
    """Start a process that imports what generators need, while this one still imports its own.
    Generators on CPUs are forked from it, and so start at once."""
    multiprocessing.set_forkserver_preload(["core.forked", "core.generators"])
    # It imports from the folder that it starts in.
    with contextlib.chdir(Path(__file__).parent.parent):
        multiprocessing.forkserver.ensure_running()


def end_children() -> None:
    """Kill all child processes. They ignore the SIGTERM that Python sends at its end, and it would
    wait for ever."""
    ending.set()
    for child in multiprocessing.active_children():
        child.kill()


class Stop:
    """Ctrl-C or SIGTERM: the first ends the run when it can be saved, the second ends it at once. A
    signal within a second is the same one: `timeout` and job schedulers signal a process and then
    its group."""

    def __init__(self):
        self.number, self.at = 0, 0.0  # of the signal; clock reading when it came

    @property
    def name(self) -> str:
        """The signal, as the user knows it."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name

    def asked(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self.number > 0

    def listen(self) -> None:
        """Handle the signals from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _) -> None:
        if not self.asked():
            self.number, self.at = number, time.monotonic()
            say(
                "Stopping after this step, with a checkpoint if training has begun. Once more stops"
                " at once, without."
            )
        elif time.monotonic() - self.at > 1.0:
            raise KeyboardInterrupt
