"""fit_curve.py: the curve, its intervals, what it refuses to say, and every kind of log."""

import csv
import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fit_curve
from curve import least_squares, plots
from curve.columns import Reading, Series
from curve.comparison import asymptote_of, compare
from curve.fit import allowed_excess, fit_sigmoid, sigmoid
from curve.flags import flag, run_command
from curve.forecast import held_out, outlook
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
    random, x = np.random.default_rng(seed), np.linspace(0, last, n)
    shocks = random.standard_normal(n)
    for i in range(1, n):
        shocks[i] = correlation * shocks[i - 1] + np.sqrt(1 - correlation**2) * shocks[i]
    return x, np.clip(sigmoid(x, A, B, C_mid, R0) + noise * shocks, 0, 1)


def write_csv(path, x, y, header="compute_flops,pass_rate"):
    path.write_text(
        "\n".join([header, *(f"{float(a)!r},{float(b)!r}" for a, b in zip(x, y))]) + "\n"
    )
    return path


def kinds(fit):
    return [warning.kind for warning in fit.warnings]


def command(*arguments, capsys):
    """Exit status, output and errors of the command, run in this process."""
    with pytest.raises(SystemExit) as stop:
        run_command(fit_curve.main, [str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


# --- the curve ------------------------------------------------------------------------------------


def test_recovers_the_published_parameters():
    for run, (C_mid, B, A, R0) in TABLE_1.items():
        x = np.linspace(0, 6 * C_mid, 40)
        fit = fit_sigmoid(x, sigmoid(x, A, B, C_mid, R0))
        assert np.allclose([fit.A, fit.B, fit.C_mid, fit.R0], [A, B, C_mid, R0], rtol=1e-4), run
        assert fit.identified and abs(fit.reach - 6) < 0.01, run
        assert fit.interval["A"][1] - fit.interval["A"][0] < 1e-4, run


def test_least_squares_reaches_the_bottom_of_the_valley():
    """Against SciPy from many starts, with R0 known and free."""
    from scipy.optimize import least_squares

    for seed in range(6):
        x, y = run_of(noise=0.02, seed=seed, last=300 + 100 * seed)
        for r0, others in (("first", 3), ("free", 4)):
            f = fit_sigmoid(x, y, r0)

            def residual(p, f=f, others=others, y=y):
                return (
                    sigmoid(f.x, p[0], np.exp(p[1]), np.exp(p[2]), p[3] if others == 4 else y[0])
                    - f.y
                )

            best = min(
                least_squares(residual, [0.7, np.log(B), np.log(mid), 0.2][:others]).cost * 2
                for B in (0.7, 2, 5)
                for mid in (50, 150, 400)
            )
            assert f.squares <= best * (1 + 1e-6) or f.A == 1


def test_fit_window_and_source_of_R0():
    x, y = run_of()
    f = fit_sigmoid(x, y, fit_from=100, fit_to=400)
    assert f.x[0] >= 100 and f.C_max <= 400 and f.R0 == y[0]
    assert fit_sigmoid(x, y, 0.25).R0 == 0.25 and fit_sigmoid(x, y, 0.25).interval["R0"] == (
        0.25,
        0.25,
    )
    free = fit_sigmoid(x, y, "free")
    assert (
        len(free.x) == len(x)
        and free.interval["R0"][0] < 0.2 < free.interval["R0"][1]
        and free.R0 != y[0]
    )
    late = Series("late", x[1:], y[1:]), fit_sigmoid(x[1:], y[1:])
    assert "the first point, at 15: --r0 can say better" in describe(*late, report(*late))


def test_the_window_hardly_moves_A_of_the_sigmoid_but_that_of_the_power_law():
    """The paper's window experiment (A.5), on its own 100k-hour curve."""
    C_mid, B, A, R0 = TABLE_1["batch 2048"]
    y = sigmoid(EARLY_X, A, B, C_mid, R0)
    laws = [
        fit_power_law(EARLY_X[EARLY_X >= start], y[EARLY_X >= start])[0] for start in (1500, 5000)
    ]
    curves = [fit_sigmoid(EARLY_X, y, R0, fit_from=start).A for start in (1500, 5000)]
    assert 0.95 < laws[0] <= 1 and 0.69 < laws[1] < 0.78  # the paper: 1.0 and .74
    assert np.allclose(curves, A, atol=1e-3)


# --- the intervals --------------------------------------------------------------------------------


def test_ends_of_the_interval_of_A_are_where_the_profile_crosses():
    """Against SciPy: with A held at an end, the squared error is the least plus the allowed
    excess."""
    from scipy.optimize import least_squares

    x, y = run_of(noise=0.015)
    f = fit_sigmoid(x, y, 0.2)
    excess = allowed_excess(f.squares, len(f.x) - 3, f.correlation)
    for end in f.interval["A"]:
        solution = least_squares(
            lambda p, end=end: sigmoid(f.x, end, *np.exp(p), 0.2) - f.y, np.log([f.B, f.C_mid])
        )
        best = 2 * solution.cost
        assert (best - f.squares) / excess == pytest.approx(1, rel=0.03)


def test_intervals_hold_the_truth_over_many_draws():
    """The simulation of benchmarks/fit.py in small: correlated neighbours, noisy R0. At 95 %, fewer
    than 33 of 40 hold the truth less than once in 1,000."""
    truth, hits = {"A": 0.7, "B": 1.8, "C_mid": 100.0}, []
    for seed in range(40):
        x, y = run_of(seed=seed, correlation=0.4, n=61, last=500)
        f = fit_sigmoid(x, y)
        theta, squares = least_squares.variable_projection(f.x, f.y, y[0])
        independent = allowed_excess(squares, len(f.x) - 3, correlation=0.0)
        plain = least_squares.profile_over_A(f.x, f.y, theta, theta, independent, False)[0]["A"]
        low, high = f.band(1000)
        hits.append(
            [f.interval[k][0] <= v <= f.interval[k][1] for k, v in truth.items()]
            + [low <= sigmoid(1000, 0.7, 1.8, 100, 0.2) <= high, plain[0] <= 0.7 <= plain[1]]
        )
    A, B, C_mid, forecast, plain = np.sum(hits, axis=0)
    assert min(A, B, C_mid, forecast) >= 33, hits
    assert plain <= A - 3  # without the correction the interval is too narrow


# --- what the data does not carry -----------------------------------------------------------------


def test_a_run_short_of_its_midpoint_has_no_asymptote(capsys, tmp_path):
    x, y = run_of(last=90, n=31)
    f = fit_sigmoid(x, y)
    assert not f.identified and kinds(f)[0] == "A is not identified" and f.interval["A"][0] < 0.7
    path, out = write_csv(tmp_path / "early.csv", x, y), tmp_path / "early.json"
    status, text, _ = command(path, "--json", out, capsys=capsys)
    run = json.loads(out.read_text())["runs"][0]
    assert status == 0 and run["A"] is None and run["B"] is None and "not identified" in text
    assert run["interval"]["A"][0] < 0.7 and run["warnings"][0]["kind"] == "A is not identified"


def test_what_the_data_does_not_carry_is_a_warning():
    (x, y), steps = run_of(n=60), np.linspace(0, 175, 60)
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
    f = fit_sigmoid(*cases["collapse"])
    assert not f.identified and kinds(f)[0] == "collapse" and "--fit-to" in f.warnings[0].text
    assert "collapse" not in kinds(fit_sigmoid(*cases["collapse"], fit_to=400))
    bound = np.linspace(0, 400, 41)
    assert fit_sigmoid(bound, np.minimum(sigmoid(bound, 1.15, 1.5, 200, 0.2), 1.0)).A == 1
    noise = fit_sigmoid(x, y, num_examples=1000).noise
    assert noise == pytest.approx(np.sqrt(np.mean(y[1:] * (1 - y[1:])) / 1000))


def test_held_out_reports_three_forecasts_and_what_came():
    x, y = run_of(noise=0.002)
    h = held_out(x, y)
    assert h["fit_to"] == 300 and h["came"] == pytest.approx(y[-3:].mean())
    assert abs(h["sigmoid"] - h["came"]) < 0.01 < abs(h["last_value"] - h["came"])
    assert h["last_value"] == y[x <= 300][-1]
    with pytest.raises(ValueError, match="points are left"):
        held_out(*run_of(n=8))


def test_the_outlook_while_a_run_goes_on():
    x, y = run_of(A=0.9, last=600.0)
    f = fit_sigmoid(x, y)
    low, high = f.interval["A"]
    words = f"A {f.A:.2f} [{low:.2f}, {high:.2f}], 2x compute {f.predict(1200.0) - f.predict(600.0):+.2f}"
    assert outlook(Series("run", x, y)) == words
    early = fit_sigmoid(x[:9], y[:9])
    assert (
        not early.identified
        and outlook(Series("run", x[:9], y[:9])) == f"A > {early.interval['A'][0]:.2f}"
    )
    assert outlook(Series("run", x[:6], y[:6])) == outlook(Series("run", x, np.full(41, 0.3))) == ""


# --- comparisons ----------------------------------------------------------------------------------


def group(seeds=(0,), **curve):
    return [fit_sigmoid(*run_of(seed=s, **curve)) for s in seeds]


def test_verdicts():
    cases = [
        (dict(A=0.75), dict(A=0.65), "ceiling", "one", "one raises the ceiling"),
        (dict(A=0.65), dict(A=0.75), "ceiling", "two", "two raises the ceiling"),
        (
            dict(B=1.2, noise=0.002),
            dict(B=2.8, noise=0.002),
            "efficiency",
            "two",
            "two is more efficient",
        ),
        (dict(C_mid=60.0), dict(C_mid=110.0), "efficiency", "one", "one is more efficient"),
        (dict(A=0.7), dict(A=0.71), "none", None, "no difference that this data shows"),
        (dict(last=100.0), dict(), "unknown", None, "does not identify A of one"),
    ]
    for one, two, kind, winner, words in cases:
        for seeds in ([0], [7]), (range(2), range(2, 4)), (range(3), range(3, 6)):
            result = compare(("one", "two"), (group(seeds[0], **one), group(seeds[1], **two)))
            assert (result.kind, result.winner) == (kind, winner), (words, seeds)
            assert words in result.verdict and result.sentence.startswith(result.verdict)
            assert bool(result.efficiency) == (kind in ("efficiency", "none"))


def test_runs_that_show_no_ceiling_are_compared_in_efficiency_alone():
    """As they are when all end near 1; runs that end before their middle are not compared at
    all."""

    def fits(C_mid, last=300.0):
        runs = [
            run_of(A=1.0, B=1.5, C_mid=C_mid, R0=0.1, n=21, last=last, noise=0.02, seed=seed)
            for seed in range(8)
        ]
        return [fit_sigmoid(*run) for run in runs]

    slow = fits(100.0)
    lost = [f for f in slow if not f.identified]
    assert lost and all(f.comparable and f.A == pytest.approx(1.0, abs=1e-4) for f in lost)
    result = compare(["slow", "quick"], [slow, fits(60.0)])
    assert (
        result.kind == "efficiency"
        and result.winner == "quick"
        and "not all runs of slow" in result.sentence
    )
    assert result.A_difference is None and result.efficiency["C_mid_ratio"][0] == pytest.approx(
        100 / 60, rel=0.1
    )
    capped = [
        fit_sigmoid(*run_of(A=0.8, B=1.5, C_mid=100.0, R0=0.1, noise=0.02, seed=seed))
        for seed in range(3)
    ]
    result = compare(["slow", "capped"], [slow, capped])
    assert (
        result.sentence.startswith("slow raises the ceiling (its A lies at least")
        and not result.efficiency
    )
    early = fits(100.0, last=80.0)
    assert not all(f.comparable for f in early)
    result = compare(["early", "slow"], [early, slow])
    assert result.sentence.endswith(
        "does not identify A of early"
    )  # and not of slow, which could be compared


def test_runs_that_fell_are_counted_and_left_out_of_a_comparison():
    curve = dict(A=0.8, B=1.8, C_mid=100.0, R0=0.1)
    whole = [fit_sigmoid(*run_of(**curve, seed=seed)) for seed in range(2)]
    x, y = run_of(**curve, seed=2)
    fallen = fit_sigmoid(x, np.where(x > 500, 0.5, y))
    assert fallen.fell and not any(f.fell for f in whole)
    other = [fit_sigmoid(*run_of(**curve | {"C_mid": 60.0}, seed=seed)) for seed in range(3, 6)]
    result, without = (compare(("one", "two"), (fits, other)) for fits in ([*whole, fallen], whole))
    assert result.efficiency == without.efficiency and result.verdict == "two is more efficient"
    assert asymptote_of([*whole, fallen]) == asymptote_of(whole) + "; 1 of 3 fell"
    assert asymptote_of([fallen]) == fallen.asymptote


def test_seeds_are_fitted_alone_and_pooled_by_t(capsys, tmp_path):
    paths = [write_csv(tmp_path / f"s{s}.csv", *run_of(seed=s)) for s in range(4)]
    one = f"mine={','.join(map(str, paths))}"
    status, text, _ = command("--compare", one, "--json", tmp_path / "o.json", capsys=capsys)
    results = json.loads((tmp_path / "o.json").read_text())
    A = np.array([run["A"] for run in results["runs"]])
    half = 3.182446 * A.std(ddof=1) / 2  # t of 3 degrees of freedom
    asymptote = f"{A.mean():.3f} [{A.mean() - half:.3f}, {A.mean() + half:.3f}]"
    (row,) = results["variants"]
    assert (
        status == 0 and (row["runs"], row["A"]) == ("4", asymptote) and not results["comparisons"]
    )
    near_1 = asymptote_of(group(range(2), A=0.99, C_mid=50.0, noise=0.02))
    assert near_1.endswith(", 1.000]")  # a t-interval of two would go far beyond
    assert (
        "Read: pass_rate over compute_flops." in text
        and " ".join(["| mine    | 4    |", asymptote]) in text
    )


def test_compare_command_with_seeds_names_and_plot(drawn, capsys, tmp_path):
    for s in range(2):
        write_csv(tmp_path / f"a{s}.csv", *run_of(seed=s))
        write_csv(tmp_path / f"b{s}.csv", *run_of(A=0.55, seed=s + 5))
    plot, out = tmp_path / "c.png", tmp_path / "c.json"
    new, old = (f"{tmp_path}/{letter}0.csv,{tmp_path}/{letter}1.csv" for letter in "ab")
    status, text, _ = command(
        "--compare", f"new={new}", f"old={old}", "--plot", plot, "--json", out, capsys=capsys
    )
    assert status == 0 and "new raises the ceiling" in text and plot.read_bytes()[:4] == b"\x89PNG"
    (pair,) = json.loads(out.read_text())["comparisons"]
    assert pair["variants"] == ["old", "new"] and (pair["kind"], pair["winner"]) == (
        "ceiling",
        "new",
    )
    axes = drawn[0].axes[0]  # it says what is decided, and which points are not drawn
    assert axes.get_title().startswith("points of all seeds (but 4 at compute 0)")
    assert [
        text.get_text().endswith("; new raises the ceiling") for text in axes.get_legend().texts
    ] == [False, True]
    # The bands lie between the curves of the seeds: a t-interval of two would open and close like a
    # bow tie.
    for band in drawn[0].axes[0].collections:
        low_and_high = band.get_paths()[0].vertices
        assert all(
            np.ptp(low_and_high[low_and_high[:, 0] == x, 1]) < 0.05 for x in low_and_high[1:-1, 0]
        )


def test_one_table_of_many_runs(capsys, tmp_path):
    """Nine runs of three variants, of which one does not identify A: a row each, printed and in
    three formats."""
    curves = {"a_1": dict(A=0.75), "b": dict(A=0.65), "c": dict(A=0.75, last=90.0)}
    names = [
        f"{name}="
        + ",".join(
            str(write_csv(tmp_path / f"{name}{s}.csv", *run_of(**curve, seed=s))) for s in range(3)
        )
        for name, curve in curves.items()
    ]
    arguments = ["--compare", *names, "--predict", 1000]
    files = [tmp_path / f"table.{suffix}" for suffix in ("md", "csv", "tex")]
    for file in files:
        status, text, _ = command(*arguments, "--table", file, capsys=capsys)
        assert status == 0 and text.count("\n") == 7
    table, verbose = files[0].read_text(), command(*arguments, "--verbose", capsys=capsys)[1]
    table = table.partition("### Variants\n\n")[2].partition("\n\n### Runs\n\n")[0]
    assert text.endswith(f"{table}\n") and table in verbose
    assert (
        verbose.count("points fitted") == 9
        and "b and a_1: a_1 raises the ceiling (its A lies" in verbose
    )
    heads, (first, second, third) = (
        (rows := [*csv.reader(files[1].read_text().splitlines())])[0],
        rows[1:],
    )
    assert heads[:7] == ["variant", "runs", "A", "B", "C_mid", "last value", "forecast at 1000"]
    fits = [fit_sigmoid(*run_of(A=0.75, seed=s)) for s in range(3)]
    half = (
        4.302653
        / np.sqrt(3)
        * np.std([forecast := np.array([f.predict(1000) for f in fits])], ddof=1)
    )  # t of 2
    assert (
        first[6]
        == f"{forecast.mean():.3f} [{forecast.mean() - half:.3f}, {forecast.mean() + half:.3f}]"
    )
    assert first[4].startswith(f"{np.exp(np.mean(np.log([f.C_mid for f in fits]))):.3g} [")
    assert second[-1] == "a_1 raises the ceiling" and third[2:5] == [
        "not identified by 3 of 3 runs",
        "-",
        "-",
    ]
    lines = files[2].read_text().splitlines()
    assert lines[0] == r"\begin{tabular}{llllllllll}" and lines[-1] == r"\end{tabular}"
    assert lines[2].startswith(r"a\_1 & 3 & ") and all(
        line.count(" & ") == 9 for line in lines[1:-1]
    )
    status, text, error = command(*arguments, "--table", tmp_path / "table.xls", capsys=capsys)
    assert (
        status == 2 and "table.xls: a table is written as .md, .csv or .tex" in error and not text
    )


# --- reading: test_logs.py has the kinds of logs --------------------------------------------------


def test_how_a_log_was_read_is_said_and_columns_can_be_named(capsys, tmp_path):
    x, y = run_of(n=20)
    path = tmp_path / "two.csv"
    rows = "".join(f"{i},{a},{b},{b / 2}\n" for i, (a, b) in enumerate(zip(x, y)))
    path.write_text("step,gpu_hours,accuracy,other\n" + rows)
    status, text, _ = command(path, capsys=capsys)
    said = "  read: x = gpu_hours, y = accuracy, 20 points\n"
    assert (
        status == 0
        and text.startswith("two.csv\ncurve       19 of 20 points fitted, gpu_hours ")
        and said in text
    )
    described = describe(*(its := (Series("two.csv", x, y), fit_sigmoid(x, y))), report(*its))
    assert (
        described.startswith("curve ") and "two.csv" not in described
    )  # train.py has said whose it is
    status, text, _ = command(
        path, "--x", "step", "--y", "accuracy,other", "--json", tmp_path / "o", capsys=capsys
    )
    runs = json.loads((tmp_path / "o").read_text())["runs"]
    assert status == 0 and text.count("  read: x = step, y = ") == 2
    assert [run["name"] for run in runs] == ["accuracy", "other"] and runs[0]["points"][3] == [
        3,
        y[3],
    ]


def test_bad_arguments_are_refused(capsys, tmp_path):
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
        status, text, error = command(
            *(argument.format(log=log) for argument in arguments), capsys=capsys
        )
        assert status == 2 and words in error and error.count("\n") == 1 and not text, (
            arguments,
            error,
        )


# --- the whole command ----------------------------------------------------------------------------


def test_command_writes_json_and_plot(capsys, tmp_path):
    x, y = run_of()
    path, out, plot = (
        write_csv(tmp_path / "log.csv", x, y),
        tmp_path / "out.json",
        tmp_path / "out.png",
    )
    status, text, _ = command(
        path, "--predict", 1000, "--fit-to", 500, "--json", out, "--plot", plot, capsys=capsys
    )
    (run,) = json.loads(out.read_text())["runs"]
    assert status == 0 and plot.read_bytes()[:4] == b"\x89PNG"
    wanted = "name A B C_mid R0 interval sse n_points x y fit_window forecast baselines warnings"
    assert {*wanted.split()} <= {*run}
    assert [f["x"] for f in run["forecast"]] == [1000, 2 * run["fit_window"][1]]
    low, high = run["forecast"][0]["interval"]
    assert low < sigmoid(1000, 0.7, 1.8, 100, 0.2) < high
    assert run["baselines"]["held_out"]["fit_to"] == pytest.approx(
        run["fit_window"][1]
    )  # the rest held out
    assert f"{run['A']:.4g}" in text and "power law" in text and "last value" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.csv", "out.json", "out.png"]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are written."""
    figures, write = [], plots._write
    monkeypatch.setattr(
        plots,
        "_write",
        lambda path, axes, *rest: figures.append(axes.figure) or write(path, axes, *rest),
    )
    return figures


THEIRS = {  # of a pass rate and the tokens of a step, as each engine logs them
    "trainer_state.json": lambda r, tokens: [{"tokens_of_step": tokens}, {"eval_pass_rate": r}],
    "verl.jsonl": lambda r, tokens: [{"data": {"val-core/scalerl/acc/mean@16": r, "actor/tokens_of_step": tokens,
                                               "perf/total_num_tokens": 999}}],
    "metrics.jsonl": lambda r, tokens: [{"progress/output_tokens": tokens, "progress/total_tokens": 99},
                                        {"eval/held-out/all/agent/avg@16": r}],
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_two_logs_of_a_run_are_joined(name, capsys, tmp_path):
    """Ours has trained up to 700 tokens, and measured up to 600. Theirs measures that model again,
    then trains on."""
    ours = [
        {"kind": "validation", "pass_rate": 0.1 + i / 50, "compute_tokens": 100 * i}
        for i in range(0, 7, 2)
    ]
    ours.append({"kind": "train", "pass_rate": 0.9, "compute_tokens": 700})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ours))
    theirs = [
        {"step": i} | line
        for i in range(5)
        for line in THEIRS[name](0.3 + i / 20, 50 if i else None)
    ]
    text = "\n".join(map(json.dumps, theirs)) + "\n"
    (tmp_path / name).write_text(
        json.dumps({"log_history": theirs}) if name == "trainer_state.json" else text
    )
    logs = ["--join", tmp_path, tmp_path / name]
    status, out, errors = command(*logs, "--json", tmp_path / "fit.json", capsys=capsys)
    assert status == 0 and "joined with 4 points of" in out, errors
    (fitted,) = json.loads((tmp_path / "fit.json").read_text())["runs"]
    x, y = zip(*fitted["points"])
    assert x == (0, 200, 400, 600, 750, 800, 850, 900)
    assert y == pytest.approx([0.1, 0.14, 0.18, 0.22, 0.35, 0.4, 0.45, 0.5])
    assert (
        "takes two logs, ours and then the engine's, not 1" in command(*logs[:2], capsys=capsys)[2]
    )
    assert "this is no log of ours" in command("--join", *logs[:0:-1], capsys=capsys)[2]
    (tmp_path / name).write_text('{"step": 0, "actor/tokens_of_step": 0, "val/acc": 0.5}\n')
    assert "no pass rate after its start" in command(*logs, capsys=capsys)[2]


def test_pictures(drawn, capsys, tmp_path):
    """The suffix is the format, a log is drawn with its error bars, and several share the names of
    their axes."""
    (x, y), (_, z) = run_of(), run_of(A=0.55, seed=5)
    log, other = tmp_path / "log.csv", write_csv(tmp_path / "other.csv", x, y, "tokens,acc")
    log.write_text(
        "step,new,old,num_examples\n" + "".join(f"{a},{b},{c},500\n" for a, b, c in zip(x, y, z))
    )
    pictures = {
        "p.png": ([f"{log}:new"], b"\x89PNG", "compute (step)"),
        "p.PDF": ([log, "--y", "new,old"], b"%PDF", "compute (step)"),
        "p.svg": ([f"{log}:new", other], b"<?xml", "compute"),
        "alike.png": (["--compare", f"a={log}:new", f"b={other}"], b"\x89PNG", "compute"),
        "apart.png": (["--compare", f"a={log}:new", f"b={log}:old"], b"\x89PNG", "compute (step)"),
    }
    for name, (arguments, magic, label) in pictures.items():
        assert command(*arguments, "--plot", tmp_path / name, capsys=capsys)[0] == 0, name
        assert (tmp_path / name).read_bytes().startswith(magic), name
        assert drawn[-1].axes[0].get_xlabel() == label, name
    axes = drawn[0].axes[0]
    (bars,) = (bars for bars in axes.containers if bars.get_label() == "95 % of 500 answers")
    (_, low), (_, high) = bars[2][0].get_segments()[10]
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(y[11] * (1 - y[11]) / 500))
    assert (
        axes.get_legend().get_window_extent().y1 < axes.xaxis.label.get_window_extent().y0
    )  # it covers no curve
    assert "A 0.7" in (tmp_path / "p.svg").read_text()  # text stays text


def test_the_diagnosis_shows_what_A_rests_on(monkeypatch, tmp_path):
    x, y = run_of(n=21)
    fit, figures = fit_sigmoid(x, y), []
    monkeypatch.setattr(plots, "_save", lambda _, figure: figures.append(figure))
    plots.plot_diagnosis(tmp_path / "d.png", Series("run", x, y), fit)
    profile, residuals, windows = figures[0].axes
    A, growth = profile.lines[0].get_data()
    assert (
        np.interp(fit.interval["A"], A, growth) == pytest.approx([1, 1], abs=0.02)
        and growth.min() == 0
    )
    assert residuals.lines[0].get_ydata() == pytest.approx(fit.y - fit.predict(fit.x))
    points = [line.get_data() for line in windows.lines if line.get_marker() == "o"]
    assert points[0] == ([x[1]], [fit.A]) and points[-1] == (
        [x[-1]],
        [fit.A],
    )  # both are fits to the whole run
    assert ([x[10]], [fit_sigmoid(x, y, fit_to=x[10]).A]) in points


def test_importing_is_light():
    code = "import sys, fit_curve; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, text=True
    )
    assert not {"torch", "matplotlib", "scipy.stats", "scipy.optimize"} & set(done.stdout.split())
    assert "numpy" in done.stdout


def test_the_commands_of_the_help_work_with_numpy_scipy_and_matplotlib_alone(tmp_path):
    """With all else that is in requirements.txt hidden."""
    required = re.findall(r"(?m)^[\w-]+", (SCRIPT.parent / "requirements.txt").read_text())
    hidden = {name.replace("-", "_") for name in required} - {"numpy", "scipy", "matplotlib"}
    assert {"transformers", "torch"} <= hidden and len(hidden) == len(required) - 3
    for name in ("fit_curve.py", "curve", "data", "docs"):
        (tmp_path / name).symlink_to(SCRIPT.with_name(name))
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\n"
    )

    def run(*arguments):
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    assert "ModuleNotFoundError" in run("-c", "import torch").stderr
    help = run(SCRIPT, "--help")
    assert help.returncode == 0
    commands = re.findall(r"(?m)^    python ([^#\n]+)", help.stdout)[
        :3
    ]  # the others are of files that are not there
    assert len(commands) == 3
    for line in commands:
        done = run(*shlex.split(line))
        assert done.returncode == 0 and " A " in done.stdout, done.stderr
    assert (tmp_path / "fit.png").read_bytes()[:4] == b"\x89PNG"
    fields = [*dataclasses.fields(fit_curve.Options), *dataclasses.fields(Reading)]
    flags = {flag(field.name) for field in fields} - {"--logs", "--reading"}
    assert flags <= set(re.findall(r"(?m)^  (--[\w-]+)", help.stdout))
