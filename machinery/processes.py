"""What generators on CPUs are forked from, where a run has its temporary files, how the user ends a
run, and how its processes end."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import threading
import time
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TextIO

from core.screen import say
from data.verify import remove
from machinery.folder import lock_folder

ending = threading.Event()  # set when this process ends its children itself


def import_for_generators() -> None:
    """Start a process that imports what generators need, while this one still imports its own.
    Generators on CPUs are forked from it, and so start at once."""
    multiprocessing.set_forkserver_preload(["core.forked", "core.generators"])
    # It imports from the folder that it starts in.
    with contextlib.chdir(Path(__file__).parent.parent):
        multiprocessing.forkserver.ensure_running()


def use_temporary_folder() -> TextIO:
    """From now on this process makes its temporary files in a new folder, which is removed at its
    end. It is locked until the returned file closes. Those of dead runs, which nobody locks, are
    removed now."""
    parent = Path(tempfile.gettempdir())
    for left in parent.glob("scalerl-*"):
        with contextlib.suppress(OSError, ValueError):  # of another user; of a living run
            is_run = (left / "config.json").exists()  # whose folder stands beside them
            if left.stat().st_uid == os.getuid() and (left / "lock").is_file() and not is_run:
                lock_folder(left).close()
                remove(str(left))
    new = Path(tempfile.mkdtemp(prefix=".scalerl-"))
    lock = lock_folder(new)
    # Only now it has the name that other runs look for.
    tempfile.tempdir = str(new.rename(parent / new.name[1:]))
    # Python removes its own files there at priority -100.
    Finalize(None, remove, [tempfile.tempdir], exitpriority=-200)
    return lock


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
