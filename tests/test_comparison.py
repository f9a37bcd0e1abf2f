"""curve/comparison.py and the verdicts of curve/fit.py: nothing is claimed that an interval
denies."""

from dataclasses import replace

import numpy as np
import pytest
from curves import curve, fit_of
from fit import HALF, seeds_of
from programs import rows

from curve import comparison
from curve.comparison import asymptote_of, compare, efficiency_between, fit_together
from curve.report import variants_table


def compared(one, two):
    return compare(("one", "two"), (one, two))


def with_A(fit, A, low, high):
    return replace(fit, A=A, interval=fit.interval | {"A": (low, high)})


# --- verdicts -------------------------------------------------------------------------------------

# Runs of two variants, the kind of the verdict, and words of it.
VERDICTS = """
A=0.75 | A=0.65 | ceiling | one raises the ceiling
A=0.65 | A=0.75 | ceiling | two raises the ceiling
B=1.2, noise=0.002 | B=2.8, noise=0.002 | efficiency | two is more efficient
C_mid=60 | C_mid=110 | efficiency | one is more efficient
 | A=0.71 | none | no difference that this data shows
last=100 | | unknown | does not identify A of one
C_mid=110, EARLY | C_mid=70, EARLY | same compute | two is ahead at compute 100: this data does
C_mid=70, EARLY | C_mid=70, last=2 | unknown | does not identify A of one and two
"""
OF_THREE_SEEDS = """
C_mid=110, B=2.8, noise=0.002 | B=1.2, noise=0.002 | steeper but later | one rises
A=0.685, C_mid=60, LONG | LONG | efficiency | one is more efficient
 | B=2.1 | ceiling or efficiency | two is ahead
"""


def fits(seeds, run):
    """The fits of these seeds of a run as a table has it."""
    run = run.replace("EARLY", "last=100, noise=0.005").replace("LONG", "last=3000, noise=0.002")
    return [fit_of(seed=seed, **curve(run)) for seed in seeds]


@pytest.mark.parametrize("seeds", [([0], [7]), ([0, 1, 2], [3, 4, 5])])
def test_verdicts(seeds):
    for *runs, kind, words in rows(VERDICTS) + rows(OF_THREE_SEEDS) * (len(seeds[0]) == 3):
        result = compared(*map(fits, seeds, runs))
        assert result.kind == kind, words
        assert words in result.verdict
        assert bool(result.efficiency) == (kind not in ("ceiling", "same compute", "unknown"))
        assert bool(result.numbers) == (kind != "unknown")


def test_runs_that_show_no_ceiling_are_compared_in_efficiency_alone():
    """As they are when all end near 1; runs that end before their middle are not compared."""
    run = "n=21, last=300, B=1.5, R0=0.1, noise=0.02, "
    slow, quick, low = (fits(range(8), run + own) for own in ("A=1", "A=1, C_mid=60", "A=0.8"))
    assert any(fit.no_ceiling for fit in slow)
    result = compared(slow, quick)
    assert (result.kind, result.winner, result.A_difference) == ("efficiency", "two", None)
    assert "not all runs of one" in result.sentence
    assert result.efficiency["C_mid_ratio"][0] == pytest.approx(100 / 60, rel=0.1)
    assert compared(slow, low).sentence.startswith("one raises the ceiling (its A lies at least")


def test_runs_that_fell_are_counted_and_left_out_of_a_comparison():
    whole = fits(range(2), "A=0.8, R0=0.1")
    (fallen,) = fits([2], "A=0.8, R0=0.1, fall=(500, 0.5)")
    other = fits(range(3, 6), "A=0.8, R0=0.1, C_mid=60")
    result = compared([*whole, fallen], other)
    assert result.efficiency == compared(whole, other).efficiency
    assert result.verdict == "two is more efficient"
    assert compared([fallen], other).verdict == "no curve describes one, which fell"
    assert asymptote_of([*whole, fallen]) == f"{asymptote_of(whole)}; 1 of 3 fell"
    (row,) = variants_table({"fallen": [fallen]}, (), 550.0)
    assert (row["A"]["text"], row["forecast at 550"]) == ("not identified; it fell", None)


# --- ceilings -------------------------------------------------------------------------------------


def test_a_ceiling_is_not_raised_against_its_own_interval():
    """A run that ends at .67 had A .985 [.838, 1], and was put .130 +- .083 above one at .855."""
    fit = fit_of()
    slow = with_A(fit, 0.985, 0.838, 1.0)
    quick = with_A(fit, 0.855, 0.850, 0.861)
    result = compared([slow], [quick])
    assert "ceiling" not in (result.kind, compared([quick], [slow]).kind)
    # The low end of the gap uses the low half of the first and the high half of the second.
    t = 3.287455  # 6 degrees of freedom, three intervals at once
    scatter = 0.01 * np.sqrt(2)
    below = np.hypot(np.hypot(0.147, 0.006) / 1.959964, scatter)
    above = np.hypot(np.hypot(0.015, 0.005) / 1.959964, scatter)
    expected = (0.130, 0.130 - t * below, 0.130 + t * above)
    assert result.A_difference == pytest.approx(expected, abs=1e-5)
    # A ceiling below the whole interval, of a run that ends lower.
    capped = replace(with_A(fit, 0.70, 0.695, 0.71), y=fit.y - 0.15)
    lead = "its A lies 0.285 [0.034, 0.339] above that of two"
    assert compared([slow], [capped]).sentence == f"one raises the ceiling ({lead})"


def test_a_height_counts_only_if_the_points_bear_it_out():
    one, two = fits([0], "C_mid=110, EARLY"), fits([7], "C_mid=70, EARLY")
    lower = [replace(fit, y=fit.y - 0.06) for fit in two]  # the points differ by .4 of the gap
    assert "its curve lies 0.100 [0.030, 0.170] above" in compared(one, two).sentence
    assert compared(one, lower).kind == "unknown"


def test_a_ceiling_is_not_raised_if_the_last_values_deny_it():
    """Two runs with 8 prompts a step ended as high as those with 32 and 64, at .97, above their
    fitted A of .957 and .941."""
    fit = fit_of()
    lower = with_A(fit, 0.6, 0.59, 0.61)
    denied = compared([fit], [lower])
    _, low, _ = denied.A_difference
    assert low > 0  # by the fits alone its ceiling is surely higher
    assert denied.kind != "ceiling"
    assert "which the last values do not bear out" in denied.sentence
    # Ends that are apart in the same way do not deny it.
    borne_out = replace(lower, y=fit.y - 0.1)
    assert compared([fit], [borne_out]).kind == "ceiling"


def test_an_asymptote_on_its_bound_is_printed_as_a_bound():
    fit = fit_of()
    top = with_A(fit, 1.0, 0.98, 1.0)
    higher = with_A(fit, 1.0, 0.99, 1.0)
    below = with_A(fit, 0.985, 0.975, 0.996)
    assert asymptote_of([top, higher]) == "> 0.980, > 0.990"
    assert asymptote_of([top]) == "1.000 [0.980, 1.000]"
    assert asymptote_of([top, below]) == "0.992 [0.897, 1.000]"


# --- many draws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_scatter_of_seeds_is_no_difference(seeds):
    """Of 30 pairs that are alike, half were told apart with one run each; and a slow short run was
    said to have another ceiling. A true difference is still found. `benchmarks/fit.py` has the
    rates."""
    random = np.random.default_rng(0)
    of = lambda noise, *difference: seeds_of(random, seeds, HALF, noise, (*difference, None))
    claims = raised = found = 0
    for _ in range(30):
        first = of(0.005, 0, 1, 40, 6)
        claims += compared(first, of(0.005, 0, 1, 40, 6)).winner is not None
        found += compared(first, of(0.005, 0, 0.6, 40, 10)).winner == "two"
        raised += compared(first, of(0.01, 0, 2, 20, 2.5)).kind == "ceiling"
    assert claims <= 3
    assert raised <= 5
    assert found >= 27


# --- the scatter of seeds -------------------------------------------------------------------------


def test_three_seeds_show_how_much_seeds_scatter(monkeypatch):
    """Their scatter counts more than the default, which counts as half a degree of freedom."""
    t = 3.714783  # 4.5 degrees of freedom, three intervals at once
    fit = fit_of()
    seeds = [with_A(fit, A, A - 0.005, A + 0.005) for A in (0.68, 0.70, 0.72)]
    expected = 0.01**2 + (0.005 / 1.959964) ** 2
    seen = 2 * 3 * np.var([0.68, 0.70, 0.72]) / expected
    half = t * np.sqrt((0.5 + seen) / 4.5 * expected * 2 / 3)
    assert compared(seeds, seeds).A_difference == pytest.approx((0, -half, half), abs=1e-5)

    alike = [fit] * 3
    small = fits(range(3), "A=0.4, noise=0.002")
    wider = compared(small, small).efficiency["B_ratio"]  # with a small gain B follows A
    monkeypatch.setattr(comparison, "SCATTER_OF_A", 0.0)
    assert np.ptp(wider) > 1.2 * np.ptp(compared(small, small).efficiency["B_ratio"])
    ratios = compared(alike, alike).efficiency
    assert ratios["A"] == pytest.approx(fit.A)
    for name, scatter in (("B_ratio", 0.02), ("C_mid_ratio", 0.05)):
        half = t * np.sqrt(scatter**2 * 0.5 / 4.5 * 2 / 3)
        assert np.log(ratios[name]) == pytest.approx((0, -half, half), abs=1e-5)


def test_an_asymptote_held_above_1_is_held_at_1():
    """No fit has an A above 1, so a step from .98 to 1.02 moves it by .02 only."""
    groups = [fits(range(3), f"A=0.99, C_mid={C}") for C in (60.0, 80.0)]
    held = [(1.0, 1.0), (0.98, 0.98)]
    beyond = efficiency_between(groups, [*held, (1.02, 1.02)])
    at_1 = efficiency_between(groups, held)
    for name in ("B_ratio", "C_mid_ratio"):
        assert beyond[name] == pytest.approx(at_1[name])


def test_seeds_that_do_not_all_identify_A_get_one_A():
    """Runs to two thirds of their gain do so together, each with its C_mid. A quarter of the gain
    says nothing, however many seeds there are; and all of it needs none."""
    alone = [fit_of(seed=seed, last=last) for seed, last in enumerate((150.0, 160.0, 250.0))]
    together = fit_together(alone)
    first = together[0]
    low, high = first.interval["A"]
    assert not all(fit.identified for fit in alone)
    assert first.A == pytest.approx(0.7, abs=0.03) and low < 0.7 < high
    assert high - low < min(np.ptp(fit.interval["A"]) for fit in alone)
    assert len({fit.A for fit in together}) == 1 and len({fit.C_mid for fit in together}) == 3
    assert asymptote_of(together) == f"{first.A:.3f} [{low:.3f}, {high:.3f}] of all seeds together"
    for last in (60.0, 600.0):
        alone = fits(range(3), f"last={last}")
        assert fit_together(alone) is alone
