"""Generators on CPUs are forked from one process (train.py). This is its first import."""

import signal

# Ctrl-C and SIGTERM reach whole groups of processes: the trainer handles them.
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
