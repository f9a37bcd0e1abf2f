"""How processes of a run begin, and how the user ends them."""

import multiprocessing
import os
import signal
import threading
import time

from machinery.screen import say

ending = threading.Event()  # set when this process ends its children itself


def end_children() -> None:
    """Kill all processes that this one has started. They ignore SIGTERM, which Python sends them at its end, and it
    would wait for them for ever."""
    ending.set()
    for child in multiprocessing.active_children():
        child.kill()


class Stop:
    """Ctrl-C or SIGTERM: the first ends the run where it can be saved, the second at once. What comes within a second
    is the same one: `timeout` and job schedulers signal a process and then its group."""

    def __init__(self):
        self.number, self.at = 0, 0.0  # of the signal; clock reading when it came
        self.can_save = False  # whether there is something to save: training has begun

    @property
    def name(self) -> str:
        """What the user calls the signal."""
        return "Ctrl-C" if self.number == signal.SIGINT else signal.Signals(self.number).name

    def asked(self) -> bool:
        """Whether the run is to end."""
        return self.number > 0

    def listen(self) -> None:
        """Heed the signals from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _) -> None:
        if not self.asked():
            self.number, self.at = number, time.monotonic()
            saved = "Stopping after this step, with a checkpoint. Once more stops at once, without."
            say(saved if self.can_save else "Stopping. Once more stops at once.")
        elif time.monotonic() - self.at > 1.0:
            raise KeyboardInterrupt


def belong_to_the_run() -> None:
    """What each process does first that the trainer has started: it ends when the trainer dies, wherever its main
    thread is; and it leaves Ctrl-C and SIGTERM, which reach whole groups of processes, to the trainer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
