"""The progress of a run on a terminal, and where there is none."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import sys
import termios
import time

import pytest

from core.screen import Progress

FIRST_WORDS = "pass rate 0.912, A 0.95 [0.93, 0.97], 2x compute +0.01"
TEXT = f"{FIRST_WORDS}, off-policy 3.4, tokens/s 43,000 sampled 41,000 trained"


@pytest.fixture
def terminal():
    """A terminal of 80 columns to be standard error, and a function that waits until this has been
    written to it, and returns all."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.set_blocking(master, False)

    def written(wanted: str) -> str:
        text, deadline = b"", time.monotonic() + 20  # the kernel hands it over a little later
        while wanted not in text.decode(errors="ignore") and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                text += os.read(master, 1 << 16)
            time.sleep(0.01)
        return text.decode()

    with os.fdopen(slave, "w", buffering=1) as file:
        yield file, written
    os.close(master)


@pytest.mark.parametrize("term, rows", [("dumb", 24), ("xterm", 0)])
def test_a_terminal_without_cursor_or_size_and_a_file_get_lines(terminal, monkeypatch, term, rows):
    file, written = terminal
    fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 80, 0, 0))
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("TERM", term)
    Progress("training", 3).show(3, TEXT)
    end_of_line = "\r\n"  # as a terminal has it
    assert written("\n") == f"training: step 3 of 3, {TEXT}{end_of_line}"

    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    progress = Progress("training", 200, 8)
    for step in range(9, 201):
        progress.show(step, "")
    progress.show(200, "")
    progress.close()
    steps = [int(line.split()[2]) for line in file.getvalue().splitlines()]
    assert steps == list(range(12, 201, 4))
    assert "\r" not in file.getvalue()
