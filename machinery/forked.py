"""What the process imports first that generators are forked from (`import_for_generators` in processes.py)."""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it reaches whole groups of processes: the trainer handles it
