"""fit_curve.py: the curve, its intervals, what it refuses to say, and every kind of log."""

import csv
import dataclasses
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

import fit_curve
from curve import least_squares, plots
from curve.columns import Reading, Series
from curve.comparison import asymptote_of, compare
from curve.fit import allowed_excess, fit_sigmoid, sigmoid
from curve.flags import flag, run_command
from curve.forecast import (
    damped_trend,
    forecasts,
    gain_of_twice,
    held_out,
    levelled_off,
    outlook,
    reached_at,
)
from curve.least_squares import fit_power_law
from curve.report import describe, report

SCRIPT = Path(fit_curve.__file__)
# Table 1 of the paper: C_mid in GPU-hours, B, A; and R0, about .40 for the 8B model and .51 for
# Scout
TABLE_1 = {
    "ScaleRL": (2542, 1.92, 0.610, 0.40),
    "32k": (11272, 1.89, 0.645, 0.40),
    "8 generations": (2542, 2.44, 0.585, 0.40),
    "24 generations": (3054, 2.22, 0.590, 0.40),
    "32 generations": (2936, 2.07, 0.595, 0.40),
    "Scout": (4242, 1.65, 0.710, 0.51),
    "batch 512": (2818, 1.77, 0.605, 0.40),
    "batch 2048": (10909, 1.70, 0.645, 0.40),
    "math": (2896, 2.05, 0.595, 0.40),
    "code": (1675, 1.09, 0.615, 0.40),
}
EARLY_X = np.linspace(1500, 50000, 60)


def run_of(
    A=0.7, B=1.8, C_mid=100.0, R0=0.2, n=41, last=600.0, noise=0.01, seed=0, correlation=0.0
):
    """A simulated run: x (n,) from 0, y (n,) with AR(1) noise."""
    random = np.random.default_rng(seed)
    x = np.linspace(0, last, n)
    shocks = random.standard_normal(n)
    for i in range(1, n):
        shocks[i] = correlation * shocks[i - 1] + np.sqrt(1 - correlation**2) * shocks[i]
    y = sigmoid(x, A, B, C_mid, R0) + noise * shocks
    return x, np.clip(y, 0, 1)


def fit_of(**curve):
    return fit_sigmoid(*run_of(**curve))


def write_csv(path, x, y, header="compute_flops,pass_rate"):
    lines = [header]
    for C, R in zip(x, y):
        lines.append(f"{float(C)!r},{float(R)!r}")
    path.write_text("\n".join(lines) + "\n")
    return path


def width_of(interval):
    low, high = interval
    return high - low


def kinds(fit):
    return [warning.kind for warning in fit.warnings]


@pytest.fixture
def command(capsys):
    """Runs the command in this process: returns exit status, output and errors."""

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            run_command(fit_curve.main, [str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    return run


# --- the curve ------------------------------------------------------------------------------------


def test_recovers_the_published_parameters():
    for run, (C_mid, B, A, R0) in TABLE_1.items():
        x = np.linspace(0, 6 * C_mid, 40)
        fit = fit_sigmoid(x, sigmoid(x, A, B, C_mid, R0))
        found = [fit.A, fit.B, fit.C_mid, fit.R0]
        assert np.allclose(found, [A, B, C_mid, R0], rtol=1e-4), run
        assert fit.identified, run
        assert abs(fit.reach - 6) < 0.01, run
        assert width_of(fit.interval["A"]) < 1e-4, run


def test_least_squares_reaches_the_bottom_of_the_valley():
    """Against SciPy from many starts, with R0 known and free."""
    from scipy.optimize import least_squares

    for seed in range(6):
        x, y = run_of(noise=0.02, seed=seed, last=300 + 100 * seed)
        for r0, given in (("first", [y[0]]), ("free", [])):
            fit = fit_sigmoid(x, y, r0)

            def residual(theta, fit=fit, given=given):
                A, log_B, log_mid, R0 = (*theta, *given)
                return sigmoid(fit.x, A, np.exp(log_B), np.exp(log_mid), R0) - fit.y

            costs = []
            for B, C_mid in itertools.product((0.7, 2, 5), (50, 150, 400)):
                start = [0.7, np.log(B), np.log(C_mid)]
                if r0 == "free":
                    start.append(0.2)
                costs.append(least_squares(residual, start).cost)
            best = 2 * min(costs)
            assert fit.squares <= best * (1 + 1e-6) or fit.A == 1


def test_fit_window_and_source_of_R0():
    x, y = run_of()
    fit = fit_sigmoid(x, y, fit_from=100, fit_to=400)
    assert fit.x[0] >= 100
    assert fit.C_max <= 400
    assert fit.R0 == y[0]

    given = fit_sigmoid(x, y, 0.25)
    assert given.R0 == 0.25
    assert given.interval["R0"] == (0.25, 0.25)

    free = fit_sigmoid(x, y, "free")
    assert len(free.x) == len(x)
    assert free.interval["R0"][0] < 0.2 < free.interval["R0"][1]
    assert free.R0 != y[0]

    late = Series("late", x[1:], y[1:])
    fit = fit_sigmoid(late.x, late.y)
    text = describe(late, fit, report(late, fit))
    assert "the first point, at 15: --r0 can say better" in text


def test_the_window_hardly_moves_A_of_the_sigmoid_but_that_of_the_power_law():
    """The paper's window experiment (A.5), on its own 100k-hour curve."""
    C_mid, B, A, R0 = TABLE_1["batch 2048"]
    y = sigmoid(EARLY_X, A, B, C_mid, R0)
    laws = []
    for start in (1500, 5000):
        window = EARLY_X >= start
        A_of_law, _, _ = fit_power_law(EARLY_X[window], y[window])
        laws.append(A_of_law)
        fit = fit_sigmoid(EARLY_X, y, R0, fit_from=start)
        assert fit.A == pytest.approx(A, abs=1e-3)
    # The paper has 1.0 and .74.
    assert 0.95 < laws[0] <= 1
    assert 0.69 < laws[1] < 0.78


# --- the intervals --------------------------------------------------------------------------------


def test_ends_of_the_interval_of_A_are_where_the_profile_crosses():
    """Against SciPy: with A held at an end, the squared error is the least plus the allowed
    excess."""
    from scipy.optimize import least_squares

    x, y = run_of(noise=0.015)
    fit = fit_sigmoid(x, y, 0.2)
    excess = allowed_excess(fit.squares, len(fit.x) - 3, fit.correlation)
    for end in fit.interval["A"]:

        def residual(logs, end=end):
            return sigmoid(fit.x, end, *np.exp(logs), 0.2) - fit.y

        best = 2 * least_squares(residual, np.log([fit.B, fit.C_mid])).cost
        assert (best - fit.squares) / excess == pytest.approx(1, rel=0.03)


def test_intervals_hold_the_truth_over_many_draws():
    """The simulation of benchmarks/fit.py in small: correlated neighbours, noisy R0. At 95 %, fewer
    than 33 of 40 hold the truth less than once in 1,000."""
    truth = {"A": 0.7, "B": 1.8, "C_mid": 100.0}
    hits = []
    for seed in range(40):
        x, y = run_of(seed=seed, correlation=0.4, n=61, last=500)
        fit = fit_sigmoid(x, y)
        intervals = [(fit.interval[name], value) for name, value in truth.items()]
        intervals.append((fit.band(1000), sigmoid(1000, **truth, R0=0.2)))

        # The interval of A without the correction for correlated neighbours.
        theta, squares = least_squares.variable_projection(fit.x, fit.y, y[0])
        excess = allowed_excess(squares, len(fit.x) - 3, correlation=0.0)
        plain, _ = least_squares.profile_over_A(fit.x, fit.y, theta, theta, excess, False)
        intervals.append((plain["A"], truth["A"]))
        hits.append([low <= value <= high for (low, high), value in intervals])
    A, B, C_mid, forecast, plain = np.sum(hits, axis=0)
    assert min(A, B, C_mid, forecast) >= 33, hits
    assert plain <= A - 3  # without the correction the interval is too narrow


# --- what the data does not carry -----------------------------------------------------------------


def test_a_run_short_of_its_midpoint_has_no_asymptote(command, tmp_path):
    x, y = run_of(last=90, n=31)
    fit = fit_sigmoid(x, y)
    assert not fit.identified
    assert kinds(fit)[0] == "A is not identified"
    assert fit.interval["A"][0] < 0.7

    path = write_csv(tmp_path / "early.csv", x, y)
    out = tmp_path / "early.json"
    status, text, _ = command(path, "--json", out)
    (run,) = json.loads(out.read_text())["runs"]
    assert status == 0
    assert run["A"] is None
    assert run["B"] is None
    assert "not identified" in text
    assert run["interval"]["A"][0] < 0.7
    assert run["warnings"][0]["kind"] == "A is not identified"


def test_what_the_data_does_not_carry_is_a_warning():
    x, y = run_of(n=60)
    steps = np.linspace(0, 175, 60)
    scatter = 0.01 * np.random.default_rng(0).standard_normal(60)
    cases = {  # by kind the run that has this warning
        "collapse": (x, np.where(x > 400, 0.0, y)),
        "decline": (x, np.where(x > 500, y - 0.15, y)),
        "no rise": (x, 0.3 + scatter),
        "short": (steps, sigmoid(steps, 0.7, 1.8, 100, 0.2)),
        "few points": run_of(n=6),
    }
    for kind, curve in cases.items():
        fit = fit_sigmoid(*curve)
        assert kind in kinds(fit), kind
        assert fit.identified or kind != "short"
        assert not fit.identified or kind not in ("collapse", "no rise")
    for quiet in (run_of(noise=0.003), run_of(n=61, noise=0.005)):
        assert not kinds(fit_sigmoid(*quiet, num_examples=1000))

    fit = fit_sigmoid(*cases["collapse"])
    assert not fit.identified
    assert kinds(fit)[0] == "collapse"
    assert "--fit-to" in fit.warnings[0].text
    assert "collapse" not in kinds(fit_sigmoid(*cases["collapse"], fit_to=400))

    bound = np.linspace(0, 400, 41)
    beyond_1 = sigmoid(bound, 1.15, 1.5, 200, 0.2)
    assert fit_sigmoid(bound, np.minimum(beyond_1, 1.0)).A == 1

    noise = fit_sigmoid(x, y, num_examples=1000).noise
    variance = np.mean(y[1:] * (1 - y[1:])) / 1000
    assert noise == pytest.approx(np.sqrt(variance))


def test_held_out_reports_three_forecasts_and_what_came():
    x, y = run_of(noise=0.002)
    test = held_out(x, y)
    came = test["came"]
    assert test["fit_to"] == 300
    assert came == pytest.approx(y[-3:].mean())
    assert abs(test["sigmoid"] - came) < 0.01
    assert abs(test["last_value"] - came) > 0.01
    assert test["last_value"] == y[x <= 300][-1]
    with pytest.raises(ValueError, match="points are left"):
        held_out(*run_of(n=8))


def test_the_outlook_while_a_run_goes_on():
    """The gain is the one that the report has, and that ends a run. Here the last points are low by
    chance, so the sigmoid alone would gain less."""
    x, y = run_of(A=0.9, last=600.0)
    y[-3:] -= 0.02
    fit = fit_sigmoid(x, y)
    low, high = fit.interval["A"]
    gain = gain_of_twice(fit)["gain"]
    assert gain > fit.predict(1200.0) - fit.predict(600.0) + 0.01
    words = f"A {fit.A:.2f} [{low:.2f}, {high:.2f}], 2x compute {gain:+.2f}"
    assert outlook(Series("run", x, y)) == words

    early = fit_sigmoid(x[:9], y[:9])
    low, _ = early.interval["A"]
    assert not early.identified
    assert outlook(Series("run", x[:9], y[:9])) == f"A > {low:.2f}"

    assert outlook(Series("run", x[:6], y[:6])) == ""
    constant = np.full(41, 0.3)
    assert outlook(Series("run", x, constant)) == ""


# --- comparisons ----------------------------------------------------------------------------------


def group(seeds=(0,), **curve):
    return [fit_of(seed=seed, **curve) for seed in seeds]


def test_verdicts():
    flat = dict(B=1.2, noise=0.002)
    steep = dict(B=2.8, noise=0.002)
    quick = dict(C_mid=60.0)
    slow = dict(C_mid=110.0)
    early = dict(C_mid=70.0, last=100.0, noise=0.005)
    cases = [
        (dict(A=0.75), dict(A=0.65), "ceiling", "one", "one raises the ceiling"),
        (dict(A=0.65), dict(A=0.75), "ceiling", "two", "two raises the ceiling"),
        (flat, steep, "efficiency", "two", "two is more efficient"),
        (quick, slow, "efficiency", "one", "one is more efficient"),
        (dict(A=0.7), dict(A=0.71), "none", None, "no difference that this data shows"),
        (dict(last=100.0), dict(), "unknown", None, "does not identify A of one"),
        (early | slow, early, "same compute", "two", "two is ahead at compute 100: this data does"),
        (early, early | dict(last=2.0), "unknown", None, "does not identify A of one and two"),
    ]
    pairs = [([0], [7]), (range(2), range(2, 4)), (range(3), range(3, 6))]
    for one, two, kind, winner, words in cases:
        for seeds in pairs:
            groups = group(seeds[0], **one), group(seeds[1], **two)
            result = compare(("one", "two"), groups)
            assert (result.kind, result.winner) == (kind, winner), (words, seeds)
            assert words in result.verdict
            assert result.sentence.startswith(result.verdict)
            assert bool(result.efficiency) == (kind in ("efficiency", "none"))
            assert bool(result.numbers) == (kind != "unknown")


def test_runs_that_show_no_ceiling_are_compared_in_efficiency_alone():
    """As they are when all end near 1; runs that end before their middle are not compared at
    all."""

    shape = dict(B=1.5, R0=0.1, noise=0.02)

    def fits(C_mid, last=300.0):
        return group(range(8), A=1.0, C_mid=C_mid, n=21, last=last, **shape)

    slow = fits(100.0)
    lost = [fit for fit in slow if not fit.identified]
    assert lost
    for fit in lost:
        assert fit.comparable
        assert fit.A == pytest.approx(1.0, abs=1e-4)
    result = compare(["slow", "quick"], [slow, fits(60.0)])
    assert result.kind == "efficiency"
    assert result.winner == "quick"
    assert "not all runs of slow" in result.sentence
    assert result.A_difference is None
    ratio, _, _ = result.efficiency["C_mid_ratio"]
    assert ratio == pytest.approx(100 / 60, rel=0.1)

    capped = group(range(3), A=0.8, C_mid=100.0, **shape)
    result = compare(["slow", "capped"], [slow, capped])
    assert result.sentence.startswith("slow raises the ceiling (its A lies at least")
    assert not result.efficiency

    early = fits(100.0, last=80.0)
    assert not all(fit.comparable for fit in early)
    result = compare(["early", "slow"], [early, slow])
    # The sentence does not name slow, which could be compared.
    assert result.sentence.endswith("does not identify A of early")


def test_runs_that_fell_are_counted_and_left_out_of_a_comparison():
    curve = dict(A=0.8, B=1.8, C_mid=100.0, R0=0.1)
    whole = group(range(2), **curve)
    x, y = run_of(**curve, seed=2)
    fallen = fit_sigmoid(x, np.where(x > 500, 0.5, y))
    assert fallen.fell
    assert not any(fit.fell for fit in whole)

    other = group(range(3, 6), **curve | {"C_mid": 60.0})
    result = compare(("one", "two"), ([*whole, fallen], other))
    without = compare(("one", "two"), (whole, other))
    assert result.efficiency == without.efficiency
    assert result.verdict == "two is more efficient"
    assert asymptote_of([*whole, fallen]) == f"{asymptote_of(whole)}; 1 of 3 fell"
    assert asymptote_of([fallen]) == f"{fallen.asymptote}; it fell"


def test_seeds_are_fitted_alone_and_pooled_by_t(command, tmp_path):
    paths = [write_csv(tmp_path / f"s{s}.csv", *run_of(seed=s)) for s in range(4)]
    one = f"mine={','.join(map(str, paths))}"
    status, text, _ = command("--compare", one, "--json", tmp_path / "o.json")
    results = json.loads((tmp_path / "o.json").read_text())
    A = np.array([run["A"] for run in results["runs"]])
    half = 3.182446 * A.std(ddof=1) / 2  # t of 3 degrees of freedom
    asymptote = f"{A.mean():.3f} [{A.mean() - half:.3f}, {A.mean() + half:.3f}]"
    (row,) = results["variants"]
    assert status == 0
    assert row["runs"] == "4"
    assert row["A"] == asymptote
    assert not results["comparisons"]
    assert "Read: pass_rate over compute_flops." in text
    assert f"| mine    | 4    | {asymptote}" in text

    near_1 = asymptote_of(group(range(2), A=0.99, C_mid=50.0, noise=0.02))
    assert near_1.endswith(", 1.000]")  # a t-interval of two would go far beyond


def test_compare_command_with_seeds_names_and_plot(drawn, command, tmp_path):
    for s in range(2):
        write_csv(tmp_path / f"a{s}.csv", *run_of(seed=s))
        write_csv(tmp_path / f"b{s}.csv", *run_of(A=0.55, seed=s + 5))
    plot = tmp_path / "c.png"
    out = tmp_path / "c.json"
    new = f"new={tmp_path}/a0.csv,{tmp_path}/a1.csv"
    old = f"old={tmp_path}/b0.csv,{tmp_path}/b1.csv"
    status, text, _ = command("--compare", new, old, "--plot", plot, "--json", out)
    assert status == 0
    assert "new raises the ceiling" in text
    assert plot.read_bytes()[:4] == b"\x89PNG"
    (pair,) = json.loads(out.read_text())["comparisons"]
    assert pair["variants"] == ["old", "new"]
    assert pair["kind"] == "ceiling"
    assert pair["winner"] == "new"

    # The picture says what is decided, and the pass rates before training are at its left edge.
    (axes,) = drawn[0].axes
    assert axes.get_title() == "Pass rate over compute: new and old (4 runs)"
    how = axes.get_legend().get_title().get_text()
    assert how.endswith("at the left edge: before training")
    before = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == ">"]
    assert before == pytest.approx([0.2] * 4, abs=0.02)
    of_new, of_old = (text.get_text() for text in axes.get_legend().texts)
    assert not of_new.endswith("; new raises the ceiling")
    assert of_old.endswith("; new raises the ceiling")

    # The bands lie between the curves of the seeds: a t-interval of two would open and close like a
    # bow tie.
    for band in axes.collections:
        x, y = band.get_paths()[0].vertices.T
        for C in x[1:-1]:
            assert np.ptp(y[x == C]) < 0.05


def test_at_most_six_curves_have_a_colour_and_the_others_are_named_at_the_side(
    drawn, command, tmp_path
):
    """The eighth differs from the first, so it has a colour before others that do not."""
    names = []
    for i in range(8):
        paths = [tmp_path / f"{i}-{seed}.csv" for seed in range(3)]
        for seed, path in enumerate(paths):
            write_csv(path, *run_of(A=0.55 if i == 7 else 0.7, seed=10 * i + seed))
        names.append(f"v{i}={','.join(map(str, paths))}")
    status, _, _ = command("--compare", *names, "--plot", tmp_path / "c.png")
    assert status == 0
    (axes,) = drawn[0].axes
    assert axes.get_title() == "Pass rate over compute: v0 and 7 others (24 runs)"
    colours = {}
    for line in axes.get_legend().get_lines():
        colours.setdefault(line.get_color(), []).append(line.get_label()[:2])
    assert colours.pop(plots.GREY) == ["v5", "v6"]
    assert [*colours.values()] == [["v0"], ["v1"], ["v2"], ["v3"], ["v4"], ["v7"]]
    at_side = axes.texts
    assert {text.get_text() for text in at_side} == {"v5", "v6"}
    low, high = sorted((Text.get_window_extent(text) for text in at_side), key=lambda box: box.y0)
    assert low.y1 <= high.y0 and min(low.x0, high.x0) > axes.get_window_extent().x1


@pytest.mark.parametrize("first, last", [(2e13, 4.5e13), (3e10, 8e11), (1e10, 1e14), (70, 95)])
def test_an_axis_of_compute_has_one_format_of_its_numbers(drawn, command, tmp_path, first, last):
    x = np.geomspace(first, last, 12)
    log = write_csv(tmp_path / "log.csv", x, sigmoid(x, 0.7, 1.8, np.median(x), 0.1))
    status, _, _ = command(log, log, "--plot", tmp_path / "c.png")
    assert status == 0
    (axes,) = drawn[0].axes
    drawn[0].canvas.draw()
    low, high = axes.get_xlim()
    places, labels = axes.get_xticks(), axes.get_xticklabels()
    shown = [text.get_text() for C, text in zip(places, labels) if low <= C <= high]
    assert len(shown) >= 2
    assert [f"{float(text):g}" for text in shown] == shown
    assert not any(text.get_text() for text in axes.get_xticklabels(minor=True))


def test_a_fall_is_drawn_as_a_fall(drawn, command, tmp_path):
    """A seed that fell: its points, joined from the peak on, and no forecast of the variant. If
    all fell, there is no curve."""
    x, y = run_of(n=21)
    fallen = y.copy()
    fallen[-5:] = [0.5, 0.4, 0.3, 0.2, 0.2]
    stands = write_csv(tmp_path / "stands.csv", x, y)
    fell = write_csv(tmp_path / "fell.csv", x, fallen)
    arguments = ["--compare", f"some={stands},{fell}", f"all={fell}"]
    status, _, _ = command(*arguments, "--plot", tmp_path / "c.png")
    assert status == 0
    (axes,) = drawn[0].axes
    lines = {
        color: [line for line in axes.lines if line.get_color() == color] for color in ("C0", "C1")
    }
    for color, joined in (("C0", fallen[fallen.argmax() :]), ("C1", fallen[1:])):
        ends = [line for line in lines[color] if line.get_marker() == "v"]
        assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in ends] == [(x[-1], 0.2)]
        thin = [line.get_ydata() for line in lines[color] if line.get_linewidth() < 1]
        assert any(np.array_equal(each, joined) for each in thin)
    assert not any(line.get_linestyle() == "--" for line in axes.lines)
    curves = [line for line in lines["C1"] if len(line.get_xdata()) == 100]
    assert not curves
    assert "triangle: a run that fell" in axes.get_legend().get_title().get_text()


def test_one_table_of_many_runs(command, tmp_path):
    """Nine runs of three variants, of which one does not identify A: a row each, printed and in
    three formats."""
    curves = {"a_1": dict(A=0.75), "b": dict(A=0.65), "c": dict(A=0.75, last=90.0)}
    names = []
    for name, curve in curves.items():
        paths = []
        for seed in range(3):
            path = tmp_path / f"{name}{seed}.csv"
            write_csv(path, *run_of(**curve, seed=seed))
            paths.append(str(path))
        names.append(f"{name}={','.join(paths)}")
    arguments = ["--compare", *names, "--predict", 1000]
    files = [tmp_path / f"table.{suffix}" for suffix in ("md", "csv", "tex")]
    for file in files:
        status, text, _ = command(*arguments, "--table", file)
        assert status == 0
        assert text.count("\n") == 7
    _, verbose, _ = command(*arguments, "--verbose")
    assert verbose.count("points fitted") == 9
    assert "b and a_1: a_1 raises the ceiling (its A lies" in verbose

    # Markdown has the table that is printed.
    _, _, after = files[0].read_text().partition("### Variants\n\n")
    table, _, _ = after.partition("\n\n### Runs\n\n")
    assert text.endswith(f"{table}\n")
    assert table in verbose

    # CSV has the means over the seeds with their t-intervals.
    heads, first, second, third = csv.reader(files[1].read_text().splitlines())
    assert heads[:7] == ["variant", "runs", "A", "B", "C_mid", "last value", "forecast at 1000"]
    fits = group(range(3), A=0.75)
    forecasts = np.array([fit.predict(1000) for fit in fits])
    mean = forecasts.mean()
    half = 4.302653 / np.sqrt(3) * forecasts.std(ddof=1)  # t of 2
    assert first[6] == f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"
    log_mid = np.mean([np.log(fit.C_mid) for fit in fits])
    assert first[4].startswith(f"{np.exp(log_mid):.3g} [")
    assert second[-1] == "a_1 raises the ceiling"
    assert third[2:5] == ["not identified by 3 of 3 runs", "-", "-"]

    # LaTeX has a tabular.
    lines = files[2].read_text().splitlines()
    assert lines[0] == r"\begin{tabular}{llllllllll}"
    assert lines[-1] == r"\end{tabular}"
    assert lines[2].startswith(r"a\_1 & 3 & ")
    for line in lines[1:-1]:
        assert line.count(" & ") == 9

    status, text, error = command(*arguments, "--table", tmp_path / "table.xls")
    assert status == 2
    assert "table.xls: a table is written as .md, .csv or .tex" in error
    assert not text


def test_unfinished_runs_are_compared_at_a_compute_that_all_have_passed(command, tmp_path):
    # Nothing shows A before the middle of the rise. Yet at the same compute one is higher.
    names = []
    for name, C_mid in (("quick", 300), ("slow", 500)):
        paths = [
            write_csv(tmp_path / f"{name}-{seed}.csv", *run_of(n=30, C_mid=C_mid, seed=seed))
            for seed in range(3)
        ]
        names.append(f"{name}={','.join(map(str, paths))}")
    table = tmp_path / "table.csv"
    arguments = ["--compare", *names, "--fit-to", 250, "--table", table]
    heights = {}
    for C in (200, 400):
        status, _, _ = command(*arguments, "--predict", C)
        assert status == 0
        rows = list(csv.DictReader(table.open()))
        assert [row["A"][:14] for row in rows] == ["not identified"] * 2
        assert float(rows[0]["last value"]) < 0.5  # of the points that are fitted
        heights[C] = [row[f"forecast at {C}"] for row in rows]
    quick, slow = [float(height.split()[0]) for height in heights[200]]
    assert quick > slow + 0.05
    assert rows[1]["verdict"].startswith("quick is ahead at compute 248: this data does not ident")
    assert heights[400] == ["-", "-"]


def test_a_height_counts_only_if_the_points_bear_it_out(command, tmp_path):
    """The runs of `came_down` lose less than a fifth of their rise at the end, so they count as
    standing. Their curves end above those of the others, and their points below."""
    x = np.arange(41) * 5.0
    late = 0.1 + 0.69 / (1 + 60 / np.maximum(x, 1e-9)) + np.where(x > 170, 0.08, 0)
    for fall, verdict in ((0, "came_down is ahead at compute"), (0.135, "no difference")):
        quick = sigmoid(x, 0.8, 2.5, 25, 0.1) - np.where(x > 170, fall, 0)
        names = {"came_down": [], "late": []}
        for seed in range(3):
            noise = 0.012 * np.sin(np.arange(41) * (2.1 + 0.3 * seed) + seed)
            for (name, paths), y in zip(names.items(), (quick + noise, late - noise)):
                paths.append(str(write_csv(tmp_path / f"{name}{seed}.csv", x, y)))
        variants = [f"{name}={','.join(paths)}" for name, paths in names.items()]
        _, output, _ = command("--compare", *variants)
        assert output.splitlines()[-1].startswith(f"late and came_down: {verdict}"), output


def test_what_a_comparison_cannot_know_is_finite(command, tmp_path):
    """With tiny gains A is held below R0, and no ratio is known. Without any scatter the seeds
    alone decide."""
    out = tmp_path / "out.json"
    tiny = [
        write_csv(tmp_path / f"tiny{i}.csv", *run_of(A=0.06, R0=R0, C_mid=C, noise=5e-4, seed=i))
        for i, (R0, C) in enumerate([(0.04, 100), (0.02, 150)])
    ]
    status, output, _ = command("--compare", *tiny, "--json", out)
    assert status == 0 and "inf" not in output and "no difference" in output

    names = []
    for name, C_mid in (("quick", 100), ("slow", 150)):
        paths = [
            str(write_csv(tmp_path / f"{name}{seed}.csv", *run_of(C_mid=C_mid, seed=seed)))
            for seed in range(3)
        ]
        names.append(f"{name}={','.join(paths)}")
    status, output, _ = command("--compare", *names, "--seed-scatter", 0, 0, "--json", out)
    assert status == 0 and "nan" not in output and "quick is more efficient" in output


def test_different_columns_of_compute_are_warned_of(command, tmp_path):
    paths = [
        write_csv(tmp_path / f"{x_name}.csv", *run_of(), f"{x_name},pass_rate")
        for x_name in ("compute_flops", "step")
    ]
    _, output, _ = command("--compare", *paths)
    assert "! compute is compute_flops and step: the comparison says nothing" in output
    _, output, _ = command("--compare", paths[0], paths[0])
    assert "!" not in output


def test_names_may_hold_what_means_something_elsewhere(drawn, command, tmp_path):
    """$ begins a formula in matplotlib, _ hides a label, and | ends a cell of a table."""
    names = ["_first.csv", "a|$b_$.csv"]
    paths = [write_csv(tmp_path / name, *run_of(seed=i)) for i, name in enumerate(names)]
    status, output, _ = command("--compare", *paths, "--plot", tmp_path / "p.png")
    assert status == 0
    assert r"| a\|$b_$.csv " in output
    labels = [text.get_text() for text in drawn[0].axes[0].get_legend().texts]
    assert len(labels) == 2 and labels[0].startswith(" _first.csv")


def test_the_table_has_the_forecast_of_the_run(command, tmp_path):
    """One rule for both: these points do not bend, so it is not the sigmoid."""
    path = write_csv(tmp_path / "run.csv", *run_of(B=1.0, noise=0.02, n=20, last=3000))
    table = tmp_path / "table.csv"
    out = tmp_path / "out.json"
    command(path, "--predict", 2e4, "--table", table, "--json", out)
    (row,) = csv.DictReader(table.open())
    (run,) = json.loads(out.read_text())["runs"]
    (found,) = (each for each in run["forecast"] if each["x"] == 2e4)
    low, high = found["interval"]
    assert found["forecast"] != pytest.approx(found["sigmoid"], abs=0.002)
    assert row["forecast at 2e+04"] == f"{found['forecast']:.3f} [{low:.3f}, {high:.3f}]"


def test_json_may_go_through_a_pipe(tmp_path):
    path = write_csv(tmp_path / "run.csv", *run_of())
    command_line = [sys.executable, SCRIPT, path, "--json", "/dev/stdout"]
    done = subprocess.run(command_line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results, _ = json.JSONDecoder().raw_decode(done.stdout)
    assert results["runs"][0]["name"] == "run.csv"


# --- reading: test_logs.py has the kinds of logs --------------------------------------------------


def test_how_a_log_was_read_is_said_and_columns_can_be_named(command, tmp_path):
    x, y = run_of(n=20)
    path = tmp_path / "two.csv"
    rows = "".join(f"{i},{a},{b},{b / 2}\n" for i, (a, b) in enumerate(zip(x, y)))
    path.write_text("step,gpu_hours,accuracy,other\n" + rows)
    status, text, _ = command(path)
    said = "  read: x = gpu_hours, y = accuracy, 20 points\n"
    assert status == 0
    assert text.startswith("two.csv\ncurve       19 of 20 points fitted, gpu_hours ")
    assert said in text

    series = Series("two.csv", x, y)
    fit = fit_sigmoid(x, y)
    described = describe(series, fit, report(series, fit))
    assert described.startswith("curve ")  # train.py has said whose it is
    assert "two.csv" not in described

    out = tmp_path / "out.json"
    status, text, _ = command(path, "--x", "step", "--y", "accuracy,other", "--json", out)
    runs = json.loads(out.read_text())["runs"]
    assert status == 0
    assert text.count("  read: x = step, y = ") == 2
    assert [run["name"] for run in runs] == ["accuracy", "other"]
    assert runs[0]["points"][3] == [3, y[3]]


def test_bad_arguments_are_refused(command, tmp_path):
    log = write_csv(tmp_path / "log.csv", *run_of())
    cases = [
        ([], "no log is named"),
        (["missing.csv"], "No such file or directory: 'missing.csv'"),
        (["--compare"], "no log is named"),
        (["--compare", "a=", "b={log}"], "'a=' names no log"),
        (["{log}", "--predict", "1e400"], "must be positive and finite"),
        (["{log}", "--seed-scatter", "-1", "0"], "--seed-scatter: two standard deviations"),
        (["{log}", "--x", "flop"], "no column 'flop'"),
        (["{log}", "--y", "pass_rat"], "did you mean 'pass_rate'"),
        (["{log}", "--predikt", "3"], "did you mean --predict?"),
        (["{log}", "--r0", "second"], "--r0: 'second' is not one of first, free, a number"),
        (["{log}", "--r0", "-1"], "R0 = -1"),
        (["{log}", "--predict", "-3"], "must be positive"),
        (["{log}", "--fit-from", "1e9"], "only 0 of 41 points"),
        (["{log}", "--plot", "no/such/folder.png"], "No such file"),
        (["{log}", "--plot", "picture.xyz"], "'xyz' is not supported (supported formats: "),
    ]
    for arguments, words in cases:
        status, text, error = command(*(argument.format(log=log) for argument in arguments))
        case = (arguments, error)
        assert status == 2, case
        assert words in error, case
        assert error.count("\n") == 1, case
        assert not text, case


# --- the whole command ----------------------------------------------------------------------------


def test_command_writes_json_and_plot(command, tmp_path):
    x, y = run_of()
    path = write_csv(tmp_path / "log.csv", x, y)
    out = tmp_path / "out.json"
    plot = tmp_path / "out.png"
    how = ["--predict", 1000, "--fit-to", 500]
    status, text, _ = command(path, *how, "--json", out, "--plot", plot)
    (run,) = json.loads(out.read_text())["runs"]
    assert status == 0
    assert plot.read_bytes()[:4] == b"\x89PNG"
    wanted = "name A B C_mid R0 interval sse n_points x y fit_window forecast baselines warnings"
    assert {*wanted.split()} <= {*run}
    _, end = run["fit_window"]
    first, second = run["forecast"]
    assert first["x"] == 1000
    assert second["x"] == 2 * end
    low, high = first["interval"]
    assert low < sigmoid(1000, 0.7, 1.8, 100, 0.2) < high
    test = run["baselines"]["held_out"]  # the points after --fit-to
    assert test["fit_to"] == pytest.approx(end)
    assert f"{run['A']:.4g}" in text
    assert "power law" in text
    assert "last value" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv", "out.json", "out.png"]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written."""
    figures = []
    write = plots._write

    def write_and_keep(path, axes, *rest):
        figures.append(axes.figure)
        write(path, axes, *rest)

    monkeypatch.setattr(plots, "_write", write_and_keep)
    return figures


# The records of a step, from its pass rate and its tokens, as each engine logs them.


def of_trl(pass_rate, tokens):
    return [{"tokens_of_step": tokens}, {"eval_pass_rate": pass_rate}]


def of_verl(pass_rate, tokens):
    data = {
        "val-core/scalerl/acc/mean@16": pass_rate,
        "actor/tokens_of_step": tokens,
        "perf/total_num_tokens": 999,
    }
    return [{"data": data}]


def of_prime_rl(pass_rate, tokens):
    return [
        {"progress/output_tokens": tokens, "progress/total_tokens": 99},
        {"eval/held-out/all/agent/avg@16": pass_rate},
    ]


THEIRS = {
    "trainer_state.json": of_trl,
    "verl.jsonl": of_verl,
    "metrics.jsonl": of_prime_rl,
}


def write_records(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize("name", THEIRS)
def test_two_logs_of_a_run_are_joined(name, command, tmp_path):
    """Ours has trained up to 700 tokens, and measured up to 600. Theirs measures that model again,
    then trains on."""
    ours = []
    for i in range(0, 7, 2):
        pass_rate = 0.1 + i / 50
        ours.append({"kind": "validation", "pass_rate": pass_rate, "compute_tokens": 100 * i})
    ours.append({"kind": "train", "pass_rate": 0.9, "compute_tokens": 700})
    write_records(tmp_path / "log.jsonl", ours)

    theirs = []
    for i in range(5):
        records = THEIRS[name](0.3 + i / 20, 50 if i else None)
        theirs += [{"step": i} | record for record in records]
    if name == "trainer_state.json":
        theirs = [{"log_history": theirs}]
    log = tmp_path / name
    write_records(log, theirs)

    out = tmp_path / "fit.json"
    status, text, errors = command("--join", tmp_path, log, "--json", out)
    assert status == 0, errors
    assert "joined with 4 points of" in text, errors
    (fitted,) = json.loads(out.read_text())["runs"]
    x, y = zip(*fitted["points"])
    assert x == (0, 200, 400, 600, 750, 800, 850, 900)
    assert y == pytest.approx([0.1, 0.14, 0.18, 0.22, 0.35, 0.4, 0.45, 0.5])

    _, _, errors = command("--join", tmp_path)
    assert "takes two logs, ours and then the engine's, not 1" in errors
    _, _, errors = command("--join", log, tmp_path)
    assert "this is no log of ours" in errors
    log.write_text('{"step": 0, "actor/tokens_of_step": 0, "val/acc": 0.5}\n')
    _, _, errors = command("--join", tmp_path, log)
    assert "no pass rate after its start" in errors


def test_pictures(drawn, command, tmp_path):
    """The suffix is the format, a log is drawn with its error bars, and several share the names of
    their axes."""
    x, y = run_of()
    _, z = run_of(A=0.55, seed=5)
    log = tmp_path / "log.csv"
    other = write_csv(tmp_path / "other.csv", x, y, "tokens,acc")
    rows = "".join(f"{a},{b},{c},500\n" for a, b, c in zip(x, y, z))
    log.write_text(f"step,new,old,num_examples\n{rows}")
    new = f"{log}:new"
    pictures = {
        "p.png": ([new], b"\x89PNG", "compute (step)"),
        "p.PDF": ([log, "--y", "new,old"], b"%PDF", "compute (step)"),
        "p.svg": ([new, other], b"<?xml", "compute"),
        "alike.png": (["--compare", f"a={new}", f"b={other}"], b"\x89PNG", "compute"),
        "apart.png": (["--compare", f"a={new}", f"b={log}:old"], b"\x89PNG", "compute (step)"),
    }
    for name, (arguments, magic, label) in pictures.items():
        path = tmp_path / name
        status, _, _ = command(*arguments, "--plot", path)
        assert status == 0, name
        assert path.read_bytes().startswith(magic), name
        assert drawn[-1].axes[0].get_xlabel() == label, name

    (axes,) = drawn[0].axes
    (bars,) = (bars for bars in axes.containers if bars.get_label() == "95 % of 500 answers")
    (_, low), (_, high) = bars[2][0].get_segments()[10]
    variance = y[11] * (1 - y[11]) / 500
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(variance))
    # The legend covers no curve.
    legend = axes.get_legend().get_window_extent()
    assert legend.y1 < axes.xaxis.label.get_window_extent().y0
    assert "A 0.7" in (tmp_path / "p.svg").read_text()  # text stays text


def test_the_diagnosis_shows_what_A_rests_on(monkeypatch, tmp_path):
    x, y = run_of(n=21)
    fit = fit_sigmoid(x, y)
    figures = []
    monkeypatch.setattr(plots, "save", lambda _, figure: figures.append(figure))
    plots.plot_diagnosis(tmp_path / "d.png", Series("run", x, y), fit)

    profile, residuals, windows = figures[0].axes
    A, growth = profile.lines[0].get_data()
    assert np.interp(fit.interval["A"], A, growth) == pytest.approx([1, 1], abs=0.02)
    assert growth.min() == 0
    assert residuals.lines[0].get_ydata() == pytest.approx(fit.y - fit.predict(fit.x))
    points = [line.get_data() for line in windows.lines if line.get_marker() == "o"]
    # The first and the last are fits to the whole run.
    assert points[0] == ([x[1]], [fit.A])
    assert points[-1] == ([x[-1]], [fit.A])
    early = fit_sigmoid(x, y, fit_to=x[10])
    assert ([x[10]], [early.A]) in points


def test_importing_is_light():
    command = [sys.executable, "-c", "import sys, fit_curve; print(*sys.modules)"]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True)
    modules = set(done.stdout.split())
    assert not modules & {"torch", "matplotlib", "scipy.stats", "scipy.optimize"}
    assert "numpy" in modules


def test_the_commands_of_the_help_work_with_numpy_scipy_and_matplotlib_alone(tmp_path):
    """With all else that is in requirements.txt hidden."""
    required = re.findall(r"(?m)^[\w-]+", (SCRIPT.parent / "requirements.txt").read_text())
    hidden = {name.replace("-", "_") for name in required} - {"numpy", "scipy", "matplotlib"}
    assert {"transformers", "torch"} <= hidden
    assert len(hidden) == len(required) - 3
    for name in ("fit_curve.py", "curve", "data", "docs"):
        (tmp_path / name).symlink_to(SCRIPT.with_name(name))
    hide = f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n"
    (tmp_path / "sitecustomize.py").write_text(hide)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    assert "ModuleNotFoundError" in run("-c", "import torch").stderr
    help = run(SCRIPT, "--help")
    assert help.returncode == 0
    commands = re.findall(r"(?m)^    python ([^#\n]+)", help.stdout)
    assert len(commands) > 3
    for line in commands[:3]:  # the others are of files that are not there
        done = run(*shlex.split(line))
        assert done.returncode == 0, done.stderr
        assert " A " in done.stdout, done.stderr
    assert (tmp_path / "fit.png").read_bytes()[:4] == b"\x89PNG"
    fields = [*dataclasses.fields(fit_curve.Options), *dataclasses.fields(Reading)]
    flags = {flag(field.name) for field in fields} - {"--logs", "--reading"}
    assert flags <= set(re.findall(r"(?m)^  (--[\w-]+)", help.stdout))


# What Windows lacks: modules, and what only the os and signal of Unix have. Files are not in UTF-8
# there unless a program says so, which is an error here.
AS_ON_WINDOWS = """
import os, signal, sys, warnings
for name in "fcntl resource pwd grp termios tty pty".split():
    sys.modules[name] = None
for name in "fork getuid geteuid getpgid killpg setsid mkfifo sched_getaffinity O_NOFOLLOW".split():
    delattr(os, name)
for name in "SIGKILL SIGHUP SIGALRM alarm setitimer".split():
    delattr(signal, name)
ours = r"(curve|data|fit_curve|__main__)\\b"
warnings.filterwarnings("ignore", category=EncodingWarning)
warnings.filterwarnings("error", category=EncodingWarning, module=ours)
"""


def test_it_runs_without_what_windows_lacks(tmp_path):
    """All that it reads and writes: a published study, a table, JSON, pictures, standard input."""
    for name in ("fit_curve.py", "curve", "data", "docs"):
        (tmp_path / name).symlink_to(SCRIPT.with_name(name))
    (tmp_path / "sitecustomize.py").write_text(AS_ON_WINDOWS)
    of_windows = {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONIOENCODING": "cp1252"}

    def run(*arguments, **others):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | of_windows | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            encoding="cp1252",
            **others,
        )

    assert "ModuleNotFoundError" in run("-c", "import fcntl").stderr
    example = "data/examples/simulated.csv"
    of_a_run = ("--json", "a.json", "--plot", "a.png", "--diagnose", "d.svg", "--predict", "1e16")
    table = ("--table", "b.md", "--plot", "b.pdf", "--verbose")
    log = (SCRIPT.with_name("data") / "examples" / "simulated.csv").read_text()
    for arguments, others in (
        ((example, *of_a_run), {}),
        (("--compare", "docs/study/length", *table), {}),
        (("--table", "c.tex", "--compare", f"a={example}", f"b={example}"), {}),
        (("-",), {"input": log}),
        (("--help",), {}),
    ):
        done = run("fit_curve.py", *arguments, **others)
        assert (done.returncode, done.stderr) == (0, ""), arguments
    written = {path.name for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()}
    assert written >= {"a.json", "a.png", "d.svg", "b.md", "b.pdf", "c.tex"}
    refused = run("fit_curve.py", "nothing.csv")
    assert refused.returncode == 2 and refused.stderr.startswith("error: ")


def test_a_reader_of_the_output_that_ends_is_no_error():
    """`python fit_curve.py LOG | head -1`"""
    run = subprocess.Popen(
        [sys.executable, SCRIPT, "data/examples/simulated.csv"],
        cwd=SCRIPT.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run.stdout.close()
    assert run.wait() == 141 and run.stderr.read() == ""


def test_a_folder_of_runs_is_compared(tmp_path, command):
    for name, C_mid in (("quick", 100), ("slow", 300)):
        (tmp_path / name).mkdir()
        write_csv(tmp_path / name / "progress.csv", *run_of(C_mid=C_mid, last=1500))
    status, output, _ = command(tmp_path)
    assert status == 0
    assert "quick is more efficient" in output

    # Runs of a study with another beside them: none is lost.
    for name in ("scalerl-seed0", "scalerl-seed0-2", "other"):
        lines = [
            json.dumps({"kind": "validation", "compute_flops": C, "pass_rate": R})
            for C, R in zip(*run_of())
        ]
        (tmp_path / "study" / name).mkdir(parents=True)
        (tmp_path / "study" / name / "log.jsonl").write_text("\n".join(lines))
    _, output, _ = command(tmp_path / "study")
    rows = [line.split()[1] for line in output.splitlines() if line.startswith("|")]
    assert rows[2:] == ["scalerl", "other", "scalerl-seed0-2"]
    # With --fit-to, the forecasts of its table are not from half of the run.
    path = tmp_path / "runs.md"
    for flags, heading in ((), "forecast from half"), (("--fit-to", 400), "forecast held out"):
        command(tmp_path / "study", "--table", path, *flags)
        assert heading in path.read_text(), flags

    # Two studies may have variants of one name.
    shutil.copytree(tmp_path / "study", tmp_path / "again")
    _, output, _ = command("--compare", f"{tmp_path}/study/", tmp_path / "again")
    rows = [line.split()[1] for line in output.splitlines() if line.startswith("|")]
    assert rows[2::3] == [f"{tmp_path}/study/scalerl", f"{tmp_path}/again/scalerl"]


def test_columns_of_one_log_are_no_seeds_of_each_other(tmp_path, command):
    for name, last in (("one", 0.9), ("two", 0.8)):
        rows = [f"{s},{0.2 + 0.7 * s / (s + 3):.3f},{last - 0.6 / (s + 1):.3f}" for s in range(12)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["step,val/a,val/b", *rows]) + "\n")
    logs = f"base={tmp_path}/one.csv,{tmp_path}/two.csv"
    _, output, _ = command("--compare", logs, "--y", "val/a,val/b")
    rows = [line.split("|")[1:3] for line in output.splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in row] for row in rows[2:]] == [
        ["base: val/a", "2"],
        ["base: val/b", "2"],
    ]


def test_two_logs_of_one_name_have_two_headings(tmp_path, command):
    logs = []
    for i in range(2):
        (tmp_path / f"{i}").mkdir()
        logs.append(write_csv(tmp_path / f"{i}" / "log.csv", *run_of(seed=i)))
    _, output, _ = command(*logs)
    headings = [paragraph.partition("\n")[0] for paragraph in output.split("\n\n")]
    assert headings == ["log.csv", f"{logs[1]}: log.csv"]
    # A variant may have the name of another log.
    other = write_csv(tmp_path / "other.csv", *run_of(seed=1))
    command("--compare", f"log.csv={other}", logs[1], "--table", tmp_path / "t.csv")
    variants = [line.partition(",")[0] for line in (tmp_path / "t.csv").read_text().splitlines()]
    assert variants == ["variant", "log.csv", f"{logs[1]}: log.csv"]


def test_too_few_validations_name_the_column_that_has_more(tmp_path, command):
    lines = [{"step": s, "critic/score/mean": 0.3} for s in range(300)]
    lines[200]["val/acc"] = 0.4
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)) + "\n")
    status, _, error = command(tmp_path / "log")
    assert status == 2
    assert "val/acc has 1 points, and critic/score/mean has 300: --y critic/score/mean" in error


def test_more_efficient_is_said_with_where_it_began_lower(tmp_path, command):
    low = write_csv(tmp_path / "low.csv", *run_of(R0=0.04, C_mid=60, B=2.5))
    high = write_csv(tmp_path / "high.csv", *run_of(R0=0.5, C_mid=200, B=1.5, seed=1, last=3000))
    _, output, _ = command("--compare", high, low)
    assert "low.csv is more efficient, but began lower: it was behind until" in output

    short = write_csv(tmp_path / "short.csv", *run_of(A=0.9, R0=0.7, B=1.9, last=180, noise=1e-3))
    steep = write_csv(
        tmp_path / "steep.csv", *run_of(A=0.9, R0=0.05, B=4, last=1000, noise=2e-3, seed=1)
    )
    _, output, _ = command("--compare", short, steep)
    assert "steep.csv is more efficient, but began lower: it was behind all along" in output


# --- the forecast, and whether it is worth going on ---


def test_the_forecast_is_the_sigmoid_if_the_points_bend_and_else_a_median():
    fit = fit_of(noise=0.002)
    found = forecasts(fit, 1200.0)
    assert found["forecast"] == found["sigmoid"] == pytest.approx(float(fit.predict(1200.0)))
    x = np.linspace(10, 600, 30)
    fit = fit_sigmoid(x, 0.5 + 0.05 * np.log10(x) + 0.01 * np.sin(7 * x))
    found = forecasts(fit, 1200.0)
    three = [found["sigmoid"], found["power_law"], damped_trend(fit, np.array([1200.0]))[0]]
    assert found["forecast"] == pytest.approx(np.median(three))
    low, high = found["interval"]
    assert low < min(three) and max(three) < high


def test_the_damped_trend_has_half_of_the_slope_of_the_later_half():
    x = np.geomspace(1, 1000, 24)
    fit = fit_sigmoid(x, 0.2 + 0.1 * np.log10(x))
    level = 0.2 + 0.1 * np.log10(x[-3:]).mean()
    step = 5 - np.log10(x[-3:]).mean()
    assert damped_trend(fit, np.array([1e5]))[0] == pytest.approx(level + 0.05 * step)


def test_the_compute_for_a_pass_rate(tmp_path, command):
    x, y = run_of(A=0.9, last=300.0, noise=0.003)
    fit = fit_sigmoid(x, y)
    for pass_rate in (0.82, 0.85):
        found = reached_at(fit, pass_rate)
        low, high = found["interval"]
        truth = 100 * ((pass_rate - 0.2) / (0.9 - pass_rate)) ** (1 / 1.8)
        assert found["x"] == pytest.approx(truth, rel=0.15)
        assert low <= truth and (high is None or truth <= high)
    assert "not reached within 10 times" in reached_at(fit, 0.999)["sentence"]
    already = reached_at(fit, 0.5)
    assert "is reached already" in already["sentence"] and already["x"] <= 300
    assert "first at 0" in reached_at(fit, 0.15)["sentence"]  # before training
    fell = fit_sigmoid(x, np.where(x > 250, 0.3, y))
    assert fell.fell and "0.7 is reached already" in reached_at(fell, 0.7)["sentence"]

    path = write_csv(tmp_path / "run.csv", x, y)
    _, output, _ = command(path, "--reach", 0.82, "--json", tmp_path / "out.json")
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert run["reach"]["sentence"] in output and run["going_on"]["sentence"] in output
    for value, flags in ((1.2, ()), (0, ()), (0.5, ("--compare", path))):
        status, _, error = command(path, *flags, "--reach", value)
        assert status == 2 and "--reach" in error


def test_a_run_that_has_levelled_off_is_told_from_one_that_may_still_climb():
    x, y = run_of(A=0.9, B=2.0, R0=0.1, n=31, last=3000.0)
    assert levelled_off(Series("run", x, y), 0.02)
    assert not levelled_off(Series("run", x, y), 0.0001)
    climbing = {
        "slow": dict(A=0.9, B=1.0, C_mid=300.0),
        "nothing has risen": dict(A=0.1, noise=0.008),
        "too few": dict(A=0.9, C_mid=30.0, n=9),
    }
    for name, curve in climbing.items():
        x, y = run_of(**dict(R0=0.1, n=31, last=1000.0) | curve)
        assert not levelled_off(Series("run", x, y), 0.02), name
    x, y = run_of(A=0.9, last=3000.0)
    y[-8:] = 0.2
    assert not levelled_off(Series("run", x, y), 0.02)


def test_a_joined_log_with_several_columns_asks_for_one(tmp_path, command):
    ours = [{"kind": "validation", "pass_rate": 0.1, "compute_tokens": 100 * i} for i in range(4)]
    write_records(tmp_path / "log.jsonl", ours)
    theirs = [
        {"step": i, "tokens_of_step": 50, "val/a": 0.3 + i / 20, "val/b": 0.2} for i in range(5)
    ]
    write_records(tmp_path / "other.jsonl", theirs)
    logs = ("--join", tmp_path, tmp_path / "other.jsonl")
    _, _, errors = command(*logs, "--y", "val/a,val/b")
    assert "has 2 curves: name the column of one with --y" in errors
    _, _, errors = command(*logs, "--y", "val/a", "--fit-to", 250)
    assert f"{tmp_path} and {tmp_path}/other.jsonl: only 2 of" in errors


def test_a_prediction_inside_the_run_is_the_height_of_its_curve(tmp_path, command):
    log = write_csv(tmp_path / "log.csv", *run_of(B=0.9, C_mid=400.0))
    command(log, "--predict", 300, "--json", tmp_path / "o.json")
    results = json.loads((tmp_path / "o.json").read_text())
    inside, _ = results["runs"][0]["forecast"]
    fit = fit_of(B=0.9, C_mid=400.0)
    assert inside["forecast"] == pytest.approx(fit.predict(300.0))
    assert inside["interval"] == pytest.approx(fit.band(300.0))


def test_the_degrees_of_freedom_are_points_minus_parameters():
    x, y = run_of(n=7)
    assert [fit_sigmoid(x, y, r0).degrees for r0 in ("first", "free", 0.2)] == [3, 3, 3]
    few = fit_sigmoid(x[1:6], y[1:6], "free")
    assert any("rest on 1 degree of freedom" in str(warning) for warning in few.warnings)


def test_a_diagnosis_stays_within_the_points_that_are_fitted(tmp_path, command, monkeypatch):
    windows = []

    def fit_sigmoid_seen(x, y, r0, *window):
        windows.append(window)
        return fit_sigmoid(x, y, r0, *window)

    monkeypatch.setattr(plots, "fit_sigmoid", fit_sigmoid_seen)
    log = write_csv(tmp_path / "log.csv", *run_of())
    command(log, "--fit-from", 60, "--fit-to", 400, "--diagnose", tmp_path / "d.png")
    assert min(low for low, _ in windows) >= 60
    assert max(high for _, high in windows) <= 400
