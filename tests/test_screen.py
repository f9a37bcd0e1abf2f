"""What a run says of its progress."""

from types import SimpleNamespace

import core.screen


def test_progress_is_a_line_every_ten_seconds(monkeypatch, capsys):
    clock = iter(range(1000))
    monkeypatch.setattr(core.screen, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = core.screen.Progress("training: step", 40)
    for step in range(1, 41):
        progress.show(step, "batch 0.5", "off-policy 1.0")
    said = "".join(f"training: step {n} of 40, batch 0.5, off-policy 1.0\n" for n in (11, 22, 33))
    assert capsys.readouterr().err == said
