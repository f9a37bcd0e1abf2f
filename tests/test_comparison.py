"""curve/comparison.py and the verdicts of curve/fit.py: nothing is claimed that an interval
denies."""

import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

import fit_curve
from curve import comparison, plots
from curve.comparison import (
    asymptote_of,
    compare,
    efficiency_between,
    fit_together,
)
from curve.fit import fit_sigmoid, sigmoid
from curve.forecast import outlook
from curve.logs import Series
from curve.report import variants_table


def run_of(random, A=0.7, B=1.8, C_mid=100.0, R0=0.2, n=41, last=600.0, noise=0.01):
    """A simulated run with independent noise: x (n,) from 0, y (n,)."""
    x = np.linspace(0, last, n)
    y = sigmoid(x, A, B, C_mid, R0) + noise * random.standard_normal(n)
    return x, np.clip(y, 0, 1)


def fit_of(random, **curve):
    return fit_sigmoid(*run_of(random, **curve))


def series_and_fit(random, **curve):
    x, y = run_of(random, **curve)
    return Series("", x, y), fit_sigmoid(x, y)


def with_A(fit, A, low, high):
    return replace(fit, A=A, interval=fit.interval | {"A": (low, high)})


def width_of(interval):
    _, low, high = interval
    return high - low


# --- ceilings -------------------------------------------------------------------------------------


def test_a_ceiling_is_not_raised_against_its_own_interval():
    """A run that ends at .67 had A .985 [.838, 1], and was put .130 +- .083 above one at .855."""
    fit = fit_of(np.random.default_rng(0))
    slow = with_A(fit, 0.985, 0.838, 1.0)
    quick = with_A(fit, 0.855, 0.850, 0.861)
    for fits in ([slow], [quick]), ([quick], [slow]):
        assert compare(("one", "two"), fits).kind != "ceiling"

    # The low end of the gap uses the low half of the first and the high half of the second.
    t = 3.287455  # 6 degrees of freedom, three intervals at once
    scatter = 0.01 * np.sqrt(2)
    below = t * np.hypot(np.hypot(0.147, 0.006) / 1.959964, scatter)
    above = t * np.hypot(np.hypot(0.015, 0.005) / 1.959964, scatter)
    difference = compare(("slow", "quick"), ([slow], [quick])).A_difference
    assert difference == pytest.approx((0.130, 0.130 - below, 0.130 + above), abs=1e-5)

    # A ceiling below the whole interval, of a run that ends lower.
    capped = replace(with_A(fit, 0.70, 0.695, 0.71), y=fit.y - 0.15)
    sentence = compare(("slow", "capped"), ([slow], [capped])).sentence
    lead = "its A lies 0.285 [0.034, 0.339] above that of capped"
    assert sentence == f"slow raises the ceiling ({lead})"


def test_a_ceiling_is_not_raised_if_the_last_values_deny_it():
    """Two runs with 8 prompts a step ended as high as those with 32 and 64, at .97, above their
    fitted A of .957 and .941."""
    fit = fit_of(np.random.default_rng(0))
    lower = with_A(fit, 0.6, 0.59, 0.61)
    denied = compare(("one", "two"), ([fit], [lower]))
    _, low, _ = denied.A_difference
    assert low > 0  # by the fits alone its ceiling is surely higher
    assert denied.kind not in ("ceiling", "quicker but lower")
    assert "which the last values do not bear out" in denied.sentence
    # Ends that are apart in the same way do not deny it.
    borne_out = replace(lower, y=fit.y - 0.1)
    assert compare(("one", "two"), ([fit], [borne_out])).kind == "ceiling"


def test_an_asymptote_on_its_bound_is_printed_as_a_bound():
    fit = fit_of(np.random.default_rng(0))
    top = with_A(fit, 1.0, 0.98, 1.0)
    higher = with_A(fit, 1.0, 0.99, 1.0)
    assert asymptote_of([top, higher]) == "> 0.980, > 0.990"
    assert asymptote_of([top]) == "1.000 [0.980, 1.000]"
    below = with_A(fit, 0.985, 0.975, 0.996)
    assert asymptote_of([top, below]).startswith("0.992 [")
    no_ceiling = replace(with_A(fit, 1.0, 0.9, 1.0), identified=False, no_ceiling=True)
    assert asymptote_of([top, below, no_ceiling]) == "> 0.980, 0.985, > 0.900"


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_one_ceiling_is_seldom_taken_for_two(seeds):
    """40 pairs with one ceiling, of which one is slow and short: at 5 %, more than 6 have a chance
    below 1 %. The rates of `benchmarks/fit.py` are in docs/measured.md."""
    random = np.random.default_rng(0)
    raised = 0
    for _ in range(40):
        quick = [fit_of(random) for _ in range(seeds)]
        slow = [fit_of(random, C_mid=200.0, n=21, last=500.0) for _ in range(seeds)]
        if compare(("quick", "slow"), (quick, slow)).kind == "ceiling":
            raised += 1
    assert raised <= 6


def seeds_of(random, number, noise, A=0.7, C_mid=100.0):
    """Runs of one variant whose seeds scatter as they do in published studies."""
    fits = []
    for _ in range(number):
        seed_A = A + 0.0075 * random.standard_normal()
        seed_C_mid = C_mid * np.exp(0.05 * random.standard_normal())
        fits.append(fit_of(random, A=seed_A, C_mid=seed_C_mid, noise=noise))
    return fits


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_scatter_of_seeds_is_no_difference(seeds):
    """Of 30 pairs that are alike, half were told apart with one run each. A true difference is
    still found."""
    random = np.random.default_rng(0)

    def variants(C_mid):
        return [seeds_of(random, seeds, 0.005, C_mid=C_mid) for _ in range(30)]

    def winners(others):
        return [compare(("one", "two"), pair).winner for pair in zip(first, others)]

    first = variants(100.0)
    alike = variants(100.0)
    quick = variants(60.0)
    claims = winners(alike)
    assert len(claims) - claims.count(None) <= 3
    assert winners(quick).count("two") >= 27


@pytest.fixture
def without_scatter(monkeypatch):
    """Seeds are expected to be alike, but for C_mid if it is named."""

    def set_scatter(of_C_mid=0.0, of_A=0.0):
        monkeypatch.setattr(comparison, "SCATTER_OF_A", of_A)
        monkeypatch.setattr(comparison, "SCATTER_OF", {"B": 0.4 * of_C_mid, "C_mid": of_C_mid})

    return set_scatter


def test_the_expected_scatter_decides_as_long_as_seeds_do_not(without_scatter):
    random = np.random.default_rng(0)
    one = [fit_of(random, C_mid=80.0, noise=0.004)]
    two = [fit_of(random, C_mid=100.0, noise=0.004)]
    result = compare(("one", "two"), (one, two))
    assert result.kind == "none"
    assert result.efficiency["C_mid_ratio"][2] > 1

    # Three seeds that scatter more than expected.
    apart = [replace(one[0], A=A) for A in (0.70, 0.75, 0.80)]
    as_expected = compare(("one", "two"), (one * 3, two * 3)).A_difference
    wider = compare(("one", "two"), (apart, two * 3)).A_difference
    assert width_of(wider) > 1.5 * width_of(as_expected)

    # With a small gain B follows A.
    small = [fit_of(random, A=0.4, noise=0.002) for _ in range(3)]
    wider = compare(("one", "two"), (small, small)).efficiency["B_ratio"]
    without_scatter(0.05)
    without = compare(("one", "two"), (small, small)).efficiency["B_ratio"]
    assert width_of(wider) > 1.2 * width_of(without)
    without_scatter()
    assert compare(("one", "two"), (one, two)).winner == "one"


def test_three_seeds_show_how_much_seeds_scatter(without_scatter):
    """Their scatter counts more than the default, which counts as half a degree of freedom; that of
    B is .4 of that of C_mid, beside what the scatter of A does to it."""
    t = 3.714783  # 4.5 degrees of freedom, three intervals at once
    fit = fit_of(np.random.default_rng(0))
    seeds = [with_A(fit, A, A - 0.005, A + 0.005) for A in (0.68, 0.70, 0.72)]
    expected = 0.01**2 + (0.005 / 1.959964) ** 2
    seen = 2 * 3 * np.var([0.68, 0.70, 0.72]) / expected
    half = t * np.sqrt((0.5 + seen) / 4.5 * expected * 2 / 3)
    result = compare(("one", "two"), (seeds, seeds))
    assert result.A_difference == pytest.approx((0, -half, half), abs=1e-5)

    alike = [fit] * 3
    without_scatter(0.05)
    ratios = compare(("one", "two"), (alike, alike)).efficiency
    for name, scatter in (("B_ratio", 0.02), ("C_mid_ratio", 0.05)):
        half = t * np.sqrt(scatter**2 * 0.5 / 4.5 * 2 / 3)
        assert np.log(ratios[name]) == pytest.approx((0, -half, half), abs=1e-5)


def test_a_verdict_is_what_its_intervals_say():
    """Over pairs of all kinds: no winner with an interval that holds no difference, and none that
    ends surely lower."""
    random = np.random.default_rng(1)
    kinds = set()
    for i in range(24):
        other = dict(A=0.7 + 0.03 * (i % 4), C_mid=100.0 * 1.3 ** (i % 3))
        seeds = 1 + i % 2
        pair = [seeds_of(random, seeds, 0.02), seeds_of(random, seeds, 0.02, **other)]
        result = compare(("one", "two"), pair)
        kinds.add(result.kind)
        if result.efficiency is None:
            continue
        excluded = []
        for name in ("B_ratio", "C_mid_ratio"):
            _, low, high = result.efficiency[name]
            excluded.append(not low <= 1 <= high)
        assert any(excluded) == (result.kind != "none")
        if result.kind == "efficiency":
            _, low, high = result.A_difference
            assert (high if result.winner == "one" else -low) >= 0
    assert {"ceiling or efficiency", "none"} <= kinds


def test_seeds_that_do_not_all_identify_A_get_one_A():
    """Three runs to two thirds of their gain: none or one identifies A, and together they do, each
    with its C_mid."""
    random = np.random.default_rng(0)
    errors, widths, inside = [], [], 0
    for _ in range(8):
        runs = [series_and_fit(random, last=last) for last in (150.0, 160.0, 250.0)]
        alone = [fit for _, fit in runs]
        pooled = [fit for _, fit in fit_together(runs)]
        first = pooled[0]
        if not first.together:
            continue
        low, high = first.interval["A"]
        inside += low <= 0.7 <= high
        errors.append(abs(first.A - 0.7))
        widths.append((high - low) / min(np.ptp(fit.interval["A"]) for fit in alone))
        assert len({fit.A for fit in pooled}) == 1 and len({fit.C_mid for fit in pooled}) > 1
        interval = f"{first.A:.3f} [{low:.3f}, {high:.3f}]"
        assert asymptote_of(pooled) == f"{interval} of all seeds together"
        other = [fit_of(random, A=0.5) for _ in range(3)]
        assert "does not identify A of one" in compare(("one", "two"), (alone, other)).verdict
        assert compare(("one", "two"), (pooled, other)).winner == "one"
    assert inside >= len(errors) - 1 >= 3
    assert np.median(errors) < 0.03 and np.median(widths) < 1
    # A quarter of the gain says nothing, however many seeds there are; and all of it needs none.
    for last in (60.0, 600.0):
        runs = [series_and_fit(random, last=last) for _ in range(3)]
        assert fit_together(runs) == runs


def test_a_run_that_cannot_be_fitted_is_named_and_left_out(capsys, tmp_path):
    """A seed of a variant, or a variant by itself: the verdict is that of the others."""
    random = np.random.default_rng(0)
    curves = {name: run_of(random, A=A) for name, A in (("a0", 0.7), ("a1", 0.7), ("b", 0.5))}
    curves["bad"] = curves["b"][0], np.full(41, 0.3)
    for name, (x, y) in curves.items():
        rows = "".join(f"{C},{R}\n" for C, R in zip(x, y))
        (tmp_path / f"{name}.csv").write_text("gpu_hours,pass_rate\n" + rows)
    said = []
    for a, *others in (("a0", "bad=DIR/bad"), ("a0,DIR/bad",), ("a0",)):
        arguments = [f"a=DIR/{a},DIR/a1", "b=DIR/b", *others]
        arguments = [each.replace("DIR/", f"{tmp_path}/") for each in arguments]
        fit_curve.main(["--compare", *(re.sub(r"(,|$)", r".csv\1", each) for each in arguments)])
        said.append(capsys.readouterr().out.strip().split("\n\n"))
    *_, verdict = said[-1]
    assert "a raises the ceiling" in verdict
    for *_, same, left_out in said[:2]:
        assert same == verdict
        assert left_out.startswith("left out, since it gives no curve: ")
        assert "bad.csv: pass_rate: the pass rate is 0.3" in left_out


# --- what a run shows -----------------------------------------------------------------------------


def test_the_part_of_the_gain_made_decides_whether_A_is_identified():
    """At 3 C_mid a curve with B = .6 has made 66 % of its gain; at 1.45 C_mid one with B = 3 has
    made 75 %."""
    shallow = fit_of(np.random.default_rng(0), B=0.6, last=300.0, noise=0.001)
    assert shallow.gain_made == pytest.approx(0.66, abs=0.02)
    assert shallow.reach > 2.5
    assert not shallow.identified
    text = shallow.warnings[0].text
    assert f"only {100 * shallow.gain_made:.0f} % of the gain" in text
    assert "A > 0.6" in text

    steep = fit_of(np.random.default_rng(0), B=3.0, last=145.0, noise=0.001)
    assert steep.gain_made == pytest.approx(0.75, abs=0.02)
    assert steep.reach < 1.5
    assert steep.identified
    assert "each point moves A" in steep.warnings[0].text
    made = steep.predict(steep.C_max) - steep.R0
    assert steep.gain_made == pytest.approx(made / (steep.A - steep.R0))

    noisy = fit_of(np.random.default_rng(0), n=21, noise=0.06)
    assert noisy.gain_made > 0.7
    assert not noisy.identified
    assert "20 points with a scatter of 0.0" in noisy.warnings[0].text
    assert fit_of(np.random.default_rng(0), n=161, noise=0.06).identified


def test_a_collapse_draws_nothing_that_it_does_not_show():
    x, y = run_of(np.random.default_rng(0))
    fallen = Series("run", x, np.where(x > 400, 0.0, y))
    fit = fit_sigmoid(fallen.x, fallen.y)
    assert fit.collapsed and fit.fell and not fit.identified
    assert outlook(fallen) == "collapsed"
    for draw in (
        lambda axes: plots._draw_run(axes, fallen, fit, ()),
        lambda axes: plots._draw_variant(axes, "variant", [(fallen, fit)], "C0"),
    ):
        axes = Figure().subplots()
        draw(axes)
        labels = " ".join(str(line.get_label()) for line in axes.lines)
        assert not axes.collections
        assert not any(word in labels for word in ("asymptote", "above", "forecast"))


def test_an_asymptote_held_above_1_is_held_at_1():
    """No fit has an A above 1, so a step from .98 to 1.02 moves it by .02 only."""
    random = np.random.default_rng(0)
    groups = [[fit_of(random, A=0.99, C_mid=C) for _ in range(3)] for C in (60.0, 80.0)]
    low, high = 0.98, 1.02
    beyond, at_1 = (
        efficiency_between(groups, [(1.0, 1.0), (low, low), (top, top)]) for top in (high, 1.0)
    )
    assert beyond["B_ratio"] == pytest.approx(at_1["B_ratio"])
    assert beyond["C_mid_ratio"] == pytest.approx(at_1["C_mid_ratio"])


def test_a_variant_whose_runs_all_fell_says_so():
    x, y = run_of(np.random.default_rng(2), A=0.8)
    y = np.where(x > 500, 0.6, y)
    fit = fit_sigmoid(x, y)
    assert fit.fell and not fit.collapsed
    (row,) = variants_table({"low": [(Series("low", x, y), fit)]}, (), 550.0)
    assert row["A"].endswith("; it fell")
    assert row["forecast at 550"] == "-"
