"""The progress of a run on a terminal, and where there is none."""

import io

import pytest

from core.screen import Progress


@pytest.mark.parametrize("about", ["1 xterm 24", "1 dumb 24", "1 xterm 0", "0 xterm 24"])
def test_a_terminal_without_cursor_or_size_and_a_file_get_lines(monkeypatch, about):
    is_terminal, term, rows = about.split()
    file = io.StringIO()
    file.isatty, file.fileno = lambda: int(is_terminal), lambda: 2
    monkeypatch.setattr("sys.stderr", file)
    monkeypatch.setattr("os.get_terminal_size", lambda _: (80, int(rows)))
    monkeypatch.setenv("TERM", term)
    progress = Progress("training", 200, 8)
    for step in range(9, 201):
        progress.show(step, "pass rate 0.912")
    progress.show(200, "")
    progress.close()
    said = file.getvalue()
    if about == "1 xterm 24":  # a bar
        assert "\r" in said and "training: step" not in said
        return
    steps = range(12, 201, 4)
    assert said == "".join(f"training: step {n} of 200, pass rate 0.912\n" for n in steps)
