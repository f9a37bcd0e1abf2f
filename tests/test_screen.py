"""The progress of a run on a terminal, and where there is none."""

import io
import os
import sys

import pytest

from core.screen import Progress


@pytest.mark.parametrize(
    "is_terminal, term, rows, is_bar",
    [(True, "xterm", 24, True), (True, "dumb", 24, False), (True, "xterm", 0, False),
     (False, "xterm", 24, False)],
)  # fmt: skip
def test_a_terminal_without_cursor_or_size_and_a_file_get_lines(
    monkeypatch, is_terminal, term, rows, is_bar
):
    file = io.StringIO()
    file.isatty, file.fileno = lambda: is_terminal, lambda: 2
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: (80, rows))
    monkeypatch.setenv("TERM", term)
    progress = Progress("training", 200, 8)
    for step in range(9, 201):
        progress.show(step, "pass rate 0.912")
    progress.show(200, "")
    progress.close()
    said = file.getvalue()
    assert ("\r" in said) == is_bar
    lines = [f"training: step {step} of 200, pass rate 0.912\n" for step in range(12, 201, 4)]
    assert ("training: step" not in said) if is_bar else said == "".join(lines)
