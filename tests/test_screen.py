"""The progress of a run on a terminal, and where there is none."""

import io
import os
import sys

import pytest

from core.screen import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 2


@pytest.mark.parametrize(
    "term, rows, is_bar", [("xterm", 24, True), ("dumb", 24, False), ("xterm", 0, False)]
)
def test_a_terminal_without_cursor_or_size_and_a_file_get_lines(monkeypatch, term, rows, is_bar):
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((80, rows)))
    monkeypatch.setenv("TERM", term)
    for file in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", file)
        progress = Progress("training", 200, 8)
        for step in range(9, 201):
            progress.show(step, "pass rate 0.912")
        progress.show(200, "")
        progress.close()
        said = file.getvalue()
        if is_bar and file.isatty():
            assert "\r" in said and "training: step" not in said
        else:
            lines = [
                f"training: step {step} of 200, pass rate 0.912\n" for step in range(12, 201, 4)
            ]
            assert said == "".join(lines)
