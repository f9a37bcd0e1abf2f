"""curve/comparison.py and the verdicts of curve/fit.py: nothing is claimed that an interval
denies."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

import fit_curve
from curve import plots
from curve.columns import Series
from curve.comparison import asymptote_of, compare, fit_together
from curve.fit import fit_sigmoid, sigmoid
from curve.flags import run_command
from curve.forecast import outlook


def run_of(random, A=0.7, B=1.8, C_mid=100.0, R0=0.2, n=41, last=600.0, noise=0.01):
    """A simulated run with independent noise: x (n,) from 0, y (n,)."""
    x = np.linspace(0, last, n)
    return x, np.clip(sigmoid(x, A, B, C_mid, R0) + noise * random.standard_normal(n), 0, 1)


def with_A(f, A, low, high):
    return replace(f, A=A, interval=f.interval | {"A": (low, high)})


# --- ceilings -------------------------------------------------------------------------------------


def test_a_ceiling_is_not_raised_against_its_own_interval():
    """A run that ends at .67 had A .985 [.838, 1], and was put .130 +- .083 above one at .855."""
    f = fit_sigmoid(*run_of(np.random.default_rng(0)))
    slow, quick = with_A(f, 0.985, 0.838, 1.0), with_A(f, 0.855, 0.850, 0.861)
    for fits in ([slow], [quick]), ([quick], [slow]):
        assert compare(("one", "two"), fits).kind != "ceiling"
    gap, low, high = compare(("slow", "quick"), ([slow], [quick])).A_difference
    errors = [
        np.hypot(np.hypot(*facing) / 1.959964, 0.01 * np.sqrt(2))
        for facing in ((0.147, 0.006), (0.015, 0.005))
    ]
    t = 3.287455  # 6 degrees of freedom, three intervals at once
    assert (gap, low, high) == pytest.approx(
        (0.130, 0.130 - t * errors[0], 0.130 + t * errors[1]), abs=1e-5
    )
    capped = with_A(f, 0.70, 0.695, 0.71)  # below the whole interval
    sentence = compare(("slow", "capped"), ([slow], [capped])).sentence
    assert (
        sentence == "slow raises the ceiling (its A lies 0.285 [0.034, 0.339] above that of capped)"
    )


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_one_ceiling_is_seldom_taken_for_two(seeds):
    """40 pairs with one ceiling, of which one is slow and short: at 5 %, more than 6 have a chance
    below 1 %. The rates of `benchmarks/fit.py` are in docs/measured.md."""
    random, raised = np.random.default_rng(0), 0
    for _ in range(40):
        quick = [fit_sigmoid(*run_of(random)) for _ in range(seeds)]
        slow = [fit_sigmoid(*run_of(random, C_mid=200.0, n=21, last=500.0)) for _ in range(seeds)]
        raised += compare(("quick", "slow"), (quick, slow)).kind == "ceiling"
    assert raised <= 6


def seeds_of(random, number, noise, A=0.7, C_mid=100.0):
    """Runs of one variant whose seeds scatter as they do in published studies."""
    scattered = (
        (A + 0.0075 * random.standard_normal(), C_mid * np.exp(0.05 * random.standard_normal()))
        for _ in range(number)
    )
    return [fit_sigmoid(*run_of(random, A=A, C_mid=C_mid, noise=noise)) for A, C_mid in scattered]


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_scatter_of_seeds_is_no_difference(seeds):
    """Of 30 pairs that are alike, half were told apart with one run each. A true difference is
    still found."""
    random = np.random.default_rng(0)
    first, second, quick = (
        [seeds_of(random, seeds, 0.005, C_mid=C_mid) for _ in range(30)]
        for C_mid in (100.0, 100.0, 60.0)
    )
    claims = [compare(("one", "two"), pair).winner for pair in zip(first, second)]
    assert len(claims) - claims.count(None) <= 3
    assert [compare(("one", "two"), pair).winner for pair in zip(first, quick)].count("two") >= 27


def test_the_expected_scatter_decides_as_long_as_seeds_do_not():
    random = np.random.default_rng(0)
    one, two = ([fit_sigmoid(*run_of(random, C_mid=C_mid, noise=0.004))] for C_mid in (80.0, 100.0))
    assert compare(("one", "two"), (one, two), (0.0, 0.0)).winner == "one"
    result = compare(("one", "two"), (one, two))
    assert result.kind == "none" and result.efficiency["C_mid_ratio"][2] > 1
    assert "three seeds of each would show ceilings 0.0" in result.sentence
    alike = [
        replace(fit, A=A) for fit, A in zip(one * 3, (0.70, 0.75, 0.80))
    ]  # they scatter more than expected
    widths = [
        np.ptp(compare(("one", "two"), (fits, two * 3)).A_difference[1:])
        for fits in (one * 3, alike)
    ]
    assert widths[1] > 1.5 * widths[0]
    small = [
        fit_sigmoid(*run_of(random, A=0.4, noise=0.002)) for _ in range(3)
    ]  # with a small gain B follows A
    widths = [
        np.ptp(compare(("one", "two"), (small, small), scatter).efficiency["B_ratio"][1:])
        for scatter in ((0.0, 0.05), (0.01, 0.05))
    ]
    assert widths[1] > 1.2 * widths[0]


def test_a_verdict_is_what_its_intervals_say():
    """Over pairs of all kinds: no winner with an interval that holds no difference, and none that
    ends surely lower."""
    random, kinds = np.random.default_rng(1), set()
    for i in range(24):
        other = dict(A=0.7 + 0.03 * (i % 4), C_mid=100.0 * 1.3 ** (i % 3))
        pair = [seeds_of(random, 1 + i % 2, 0.02, **curve) for curve in ({}, other)]
        result = compare(("one", "two"), pair)
        kinds.add(result.kind)
        if result.efficiency is None:
            continue
        excluded = [
            not low <= 1 <= high
            for _, low, high in (result.efficiency[f"{name}_ratio"] for name in ("B", "C_mid"))
        ]
        assert any(excluded) == (result.kind != "none")
        if result.kind == "efficiency":
            _, low, high = result.A_difference
            assert (high if result.winner == "one" else -low) >= 0
    assert {"ceiling or efficiency", "none"} <= kinds


def test_seeds_that_do_not_all_identify_A_get_one_A():
    """Three runs to two thirds of their gain: none or one identifies A, and together they do, each
    with its C_mid."""
    random, errors, widths, inside = np.random.default_rng(0), [], [], 0
    for _ in range(8):
        runs = [
            (Series("", *(run := run_of(random, last=last))), fit_sigmoid(*run))
            for last in (150.0, 160.0, 250.0)
        ]
        pooled = [fit for _, fit in fit_together(runs)]
        if not pooled[0].together:
            continue
        low, high = pooled[0].interval["A"]
        inside += low <= 0.7 <= high
        errors.append(abs(pooled[0].A - 0.7))
        widths.append((high - low) / min(np.ptp(fit.interval["A"]) for _, fit in runs))
        assert len({fit.A for fit in pooled}) == 1 < len({fit.C_mid for fit in pooled})
        assert (
            asymptote_of(pooled)
            == f"{pooled[0].A:.3f} [{low:.3f}, {high:.3f}] of all seeds together"
        )
        other = [fit_sigmoid(*run_of(random, A=0.5)) for _ in range(3)]
        assert compare(("one", "two"), ([fit for _, fit in runs], other)).kind == "unknown"
        assert compare(("one", "two"), (pooled, other)).winner == "one"
    assert (
        len(errors) >= 4
        and inside >= len(errors) - 1
        and np.median(errors) < 0.03
        and np.median(widths) < 1
    )
    early = [(Series("", *(run := run_of(random, last=60.0))), fit_sigmoid(*run)) for _ in range(3)]
    assert (
        fit_together(early) == early
    )  # a quarter of the gain says nothing, however many seeds there are
    alone = [(Series("", *(run := run_of(random))), fit_sigmoid(*run)) for _ in range(3)]
    assert fit_together(alone) == alone and all(fit.identified for _, fit in alone)


def test_a_run_that_cannot_be_fitted_is_named_and_left_out(capsys, tmp_path):
    random = np.random.default_rng(0)
    curves = {
        "a0": run_of(random),
        "a1": run_of(random),
        "b0": run_of(random, A=0.5),
        "b1": run_of(random, A=0.5),
    }
    curves["bad"] = curves["a0"][0], np.full(41, 0.3)
    for name, (x, y) in curves.items():
        rows = "".join(f"{C!r},{R!r}\n" for C, R in zip(x.tolist(), y.tolist()))
        (tmp_path / f"{name}.csv").write_text("gpu_hours,pass_rate\n" + rows)

    def command(*arguments):
        with pytest.raises(SystemExit) as stop:
            run_command(
                fit_curve.main, [argument.replace("DIR", str(tmp_path)) for argument in arguments]
            )
        return stop.value.code, *capsys.readouterr()

    pair = "a=DIR/a0.csv,DIR/a1.csv", "b=DIR/b0.csv,DIR/b1.csv"
    status, without, _ = command("--compare", *pair)
    assert status == 0 and "a raises the ceiling" in without
    for with_bad in ((f"{pair[0]},DIR/bad.csv", pair[1]), (*pair, "bad=DIR/bad.csv")):
        status, text, _ = command("--compare", *with_bad)
        verdict, left_out = text.strip().split("\n\n")[-2:]
        assert status == 0 and verdict == without.strip().split("\n\n")[-1]
        assert (
            left_out.startswith("left out, since it gives no curve: ")
            and "bad.csv: the pass rate is 0.3" in left_out
        )
    status, text, error = command("--compare", "bad=DIR/bad.csv")  # nothing is left
    assert status == 2 and "bad.csv: the pass rate is 0.3" in error and not text


# --- what a run shows -----------------------------------------------------------------------------


def test_the_part_of_the_gain_made_decides_whether_A_is_identified():
    """At 3 C_mid a curve with B = .6 has made 66 % of its gain; at 1.45 C_mid one with B = 3 has
    made 75 %."""
    shallow = fit_sigmoid(*run_of(np.random.default_rng(0), B=0.6, last=300.0, noise=0.001))
    assert (
        shallow.gain_made == pytest.approx(0.66, abs=0.02)
        and shallow.reach > 2.5
        and not shallow.identified
    )
    text = shallow.warnings[0].text
    assert f"only {100 * shallow.gain_made:.0f} % of the gain" in text and "A > 0.6" in text
    steep = fit_sigmoid(*run_of(np.random.default_rng(0), B=3.0, last=145.0, noise=0.001))
    assert (
        steep.gain_made == pytest.approx(0.75, abs=0.02) and steep.reach < 1.5 and steep.identified
    )
    assert "each point moves A" in steep.warnings[0].text
    noisy = fit_sigmoid(*run_of(np.random.default_rng(0), n=21, noise=0.06))
    assert (
        noisy.gain_made > 0.7
        and not noisy.identified
        and "20 points with a scatter of 0.0" in noisy.warnings[0].text
    )
    assert fit_sigmoid(*run_of(np.random.default_rng(0), n=161, noise=0.06)).identified
    assert steep.gain_made == pytest.approx(
        (steep.predict(steep.C_max) - steep.R0) / (steep.A - steep.R0)
    )


def test_a_collapse_draws_nothing_that_it_does_not_show():
    x, y = run_of(np.random.default_rng(0))
    fallen = Series("run", x, np.where(x > 400, 0.0, y))
    f = fit_sigmoid(fallen.x, fallen.y)
    assert f.collapsed and f.fell and not f.identified and outlook(fallen) == "collapsed"
    axes = Figure().subplots()
    plots._draw_run(axes, fallen, f, ())
    labels = " ".join(str(artist.get_label()) for artist in (*axes.lines, *axes.collections))
    assert not axes.collections
    assert not any(word in labels for word in ("asymptote", "interval", "above", "forecast"))
    axes = Figure().subplots()
    plots._draw_variant(axes, "variant", [(fallen, f)], "C0")
    assert not axes.collections
