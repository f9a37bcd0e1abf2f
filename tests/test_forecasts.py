"""The picture and the table of what a run's beginning foretold."""

from pathlib import Path

import numpy as np
import pytest

from curve.columns import Series
from docs import forecasts

ROOT = Path(__file__).parent.parent
SEEDS = [f"docs/study/loo/scalerl-seed{seed}" for seed in (0, 1)]


def test_a_run_that_is_a_sigmoid_is_foretold_and_one_that_falls_is_not():
    x = np.arange(0, 41.0)
    y = 0.1 + 0.8 / (1 + (8 / np.maximum(x, 1e-9)) ** 2)
    fallen = np.where(x > 30, 0.2, y)
    quarter, half, most = forecasts.table_of([Series("kept", x, y)])
    assert [row[1] for row in (quarter, half, most)] == list(forecasts.PARTS)
    assert float(half[2]) == pytest.approx(y[-3:].mean(), abs=0.002)
    assert half[-1] == f"{y[-3:].mean():.3f}" and "missed" not in half[3]
    assert half[6] == f"{y[20]:.3f}", "the last value that was fitted"
    assert "missed" in forecasts.table_of([Series("fallen", x, fallen)])[1][3]


def test_a_part_with_too_few_points_says_so():
    x = np.array([0, 1, 2, 3, 4, 6, 8.0])
    first, *_ = forecasts.table_of([Series("short", x, x / 10)])
    assert "at least 4 are needed" in first[2] and len(first) == len(forecasts.HEAD)


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert forecasts.main([*SEEDS, "--plot", str(tmp_path / "picture.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 * len(SEEDS) and {line.count("|") for line in lines} == {9}
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_filled_points_of_the_first_half_and_hollow_ones_after_it():
    x = np.arange(0, 41.0)
    (axes,) = forecasts.picture_of([Series("run", x, x / 50)]).axes
    points = [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]
    filled, hollow = sorted(points, key=lambda line: line.get_markerfacecolor() == "w")
    assert filled.get_xdata().max() == 20 and hollow.get_xdata().min() == 21
    assert filled.get_xdata().min() == 0, "the pass rate before training"
