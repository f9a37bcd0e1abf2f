"""What the processes of a run have in common: how they wait, which signals they ignore, and that
they end with the trainer. It is imported before torch, which reads OMP_WAIT_POLICY once."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

# Ctrl-C, and what job schedulers send, or a terminal that is closed. They reach whole groups of
# processes: the trainer handles them.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# A thread of OpenMP that waits for another one sleeps. If it spins, as it does by default, and the
# other one waits for a core, both are lost (docs/measured.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Signals that come in this block are handled at its end. A process that is started in it gets
    none before `belong_to_the_run`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # when it starts, it unblocks some
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def belong_to_the_run() -> None:
    """A process that the trainer has started calls this first. It then ignores SIGNALS, and ends
    when the trainer dies, even if its main thread is busy."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
