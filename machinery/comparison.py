"""Several runs of one setting, and the paper's comparison of two settings (Khatri et al., arXiv 2510.13786, A.8).

A run is its Fit (fit_curve.py), a setting the list of the Fits of its seeds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t

Fit = Any  # fit_curve.Fit

MARGIN = 0.02  # asymptotes closer than this are not told apart (sec. 2.1, A.8)


def standing(fits: list[Fit]) -> list[Fit]:
    """The seeds of a setting that count: those whose pass rate did not fall, which no sigmoid describes. If all fell,
    all of them."""
    return [f for f in fits if not f.fell] or fits


def seeds(fits: list[Fit]) -> dict[str, tuple[float, float, float]] | None:
    """The setting behind several seeds, each fitted alone: by name (mean, low, high) with 95 % t-intervals. None when a
    seed does not identify A."""
    if len(fits) < 2:
        raise ValueError("--seeds needs the logs of two runs or more")
    if not all(f.identified for f in fits):
        return None
    result = {}
    for name in ("A", "B", "C_mid", "R0"):
        values = [getattr(f, name) for f in fits]
        half = stdtrit(len(fits) - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(len(fits))
        result[name] = tuple(float(np.mean(values) + shift) for shift in (0, -half, half))
    return result


def asymptote_of(fits: list[Fit]) -> str:
    """A of a setting as text: with its 95 % interval if all its seeds identify it, otherwise seed by seed."""
    counted = standing(fits)
    fell = f"; {len(fits) - len(counted)} of {len(fits)} fell" if len(fits) > len(counted) else ""
    if len(counted) == 1:
        return counted[0].asymptote + fell
    if pooled := seeds(counted):
        return with_interval(*pooled["A"]) + fell
    if all(f.comparable for f in counted):
        return ", ".join(f"{f.A:.3f}" if f.identified else f.asymptote for f in counted) + fell
    return f"not identified by {sum(not f.identified for f in counted)} of {len(counted)} runs{fell}"


def with_interval(value: float, low: float, high: float, form: str = ".3f") -> str:
    """A value with its 95 % interval, as text."""
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


# --- two settings: a quantity of a setting is (values, halves of their 95 % intervals), each with an entry a seed -----


def difference(one: tuple, other: tuple) -> tuple[float, float]:
    """The mean of one setting less that of another, and how large it must be to tell them apart, at 95 %.

    The 95 % intervals of the two means by the fits alone must not touch: that asks for more than chance does where both
    are exact, and those of short runs are not. With several seeds it must also be more than their scatter explains,
    which is taken to be alike in both (Student): two or three seeds do not show a scatter of their own.
    """
    (values, halves), (other_values, other_halves) = one, other
    n, m = len(values), len(other_values)
    needed = np.linalg.norm(halves) / n + np.linalg.norm(other_halves) / m
    if n + m > 2:
        variance = (n * np.var(values) + m * np.var(other_values)) / (n + m - 2) * (1 / n + 1 / m)
        needed = max(needed, stdtrit(n + m - 2, 0.975) * np.sqrt(variance))
    return float(np.mean(values) - np.mean(other_values)), float(needed)


def compare(names: Sequence[str], groups: Sequence[list[Fit]]) -> dict:
    """The paper's comparison of two settings, by name, each with a list of Fits, one a seed: the numbers, and the
    verdict in words.

    Asymptotes come first. They are told apart if they are further apart than the margin and than their errors. The A of
    a run that shows no ceiling below 1 may be anywhere in its interval; then they must be told apart wherever it is.
    If they are not, B and C_mid are fitted again with A held at the mean of all runs, and at .02 above and below, since
    the answer must not hang on it. Runs that are not `standing` are left out.
    """
    counted = [standing(fits) for fits in groups]
    fell = "".join(
        f"; {len(fits) - len(its)} of {len(fits)} runs of {name} fell, and are left out"
        for name, fits, its in zip(names, groups, counted)
        if len(fits) > len(its)
    )
    lost = " and ".join(name for name, fits in zip(names, counted) if not all(f.identified for f in fits))
    result = {"settings": list(names), "A": None, "A_difference": None, "efficiency": []}
    if not all(f.comparable for fits in counted for f in fits):
        return result | {"verdict": f"no difference that this data shows: it does not identify A of {lost}{fell}"}

    def ceilings(fits: list[Fit], end: int) -> tuple:  # of a run without a ceiling, this end of its interval
        ends = np.array([f.interval["A"][end] for f in fits])
        A = np.array([f.A if f.identified else its_end for f, its_end in zip(fits, ends)])
        return A, np.abs(A - ends)

    # An interval of A is longer above than below: what counts is the side on which the other setting lies.
    least, most = (difference(ceilings(counted[0], end), ceilings(counted[1], 1 - end)) for end in (0, 1))
    gap, error = least if least[0] > 0 else most  # where all runs show a ceiling, the two gaps are the same
    if not lost:
        result["A"] = [float(np.mean([f.A for f in fits])) for fits in counted]
        result["A_difference"] = [gap, gap - least[1], gap + most[1]]
    if least[0] * most[0] > 0 and abs(gap) >= MARGIN and abs(gap) > error:
        higher, lower = names if gap > 0 else names[::-1]
        its = f"its A lies {'at least ' if lost else ''}{abs(gap):.3f} +- {error:.3f} above that of {lower}"
        return result | {"verdict": f"{higher} raises the ceiling: {its}{fell}"}

    common = float(np.mean([f.A for fits in counted for f in fits]))
    tried = [efficiency(counted, A) for A in (common, common - MARGIN, min(common + MARGIN, 1.0))]
    result["efficiency"] = tried
    steeper, later = (agreed([at[name] for at in tried]) for name in ("B_ratio", "C_mid_ratio"))
    winner = names[0] if (steeper or -later) > 0 else names[1]
    if steeper * later > 0:
        verdict = f"{winner} rises more steeply but later: neither is more efficient all along"
    else:
        verdict = f"{winner} is more efficient" if steeper or later else "no difference that this data shows"
    numbers = f"the ceilings differ by {gap:+.3f} +- {error:.3f}"
    if lost:
        numbers = f"not all runs of {lost} show a ceiling, and no other lies surely below it"
    numbers += f"; with A held at {common:.3f}"
    for name in ("B", "C_mid"):
        (one, two), ratio = tried[0][name], tried[0][f"{name}_ratio"]
        numbers += f", {name} {one:.4g} and {two:.4g}, ratio {with_interval(*ratio, '.2f')}"
    return result | {"verdict": f"{verdict} ({numbers}{fell})"}


def efficiency(groups: Sequence[list[Fit]], A: float) -> dict:
    """B and C_mid of two settings with the asymptote held at A: both geometric means, and (ratio, low, high)."""
    result = {"A": A}
    held = [[f.efficiency_at(A) for f in fits] for fits in groups]
    halves = [[errors * stdtrit(len(f.x) - 2, 0.975) for f, (_, errors) in zip(*its)] for its in zip(groups, held)]
    for i, name in enumerate(("B", "C_mid")):
        logs = [[values[i] for values, _ in runs] for runs in held]
        ratio, half = difference(*((its_logs, [half[i] for half in its]) for its_logs, its in zip(logs, halves)))
        result[name] = [float(np.exp(np.mean(its_logs))) for its_logs in logs]
        result[f"{name}_ratio"] = [float(np.exp(r)) for r in (ratio, ratio - half, ratio + half)]
    return result


def agreed(ratios: list[tuple[float, float, float]]) -> int:
    """Whether these (ratio, low, high) are all surely above 1 (returns 1), or all surely below (-1). Otherwise 0."""
    told = {int(low > 1) - int(high < 1) for _, low, high in ratios}
    return told.pop() if len(told) == 1 else 0
