"""What the process imports first that generators are forked from (`import_for_generators` in
processes.py)."""

import signal

for number in (
    signal.SIGINT,
    signal.SIGTERM,
):  # they reach whole groups of processes: the trainer handles them
    signal.signal(number, signal.SIG_IGN)
