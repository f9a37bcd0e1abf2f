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


# --- two settings: a quantity of a setting is (values, errors, degrees of freedom), each with an entry a seed --------


def difference(one: tuple, other: tuple) -> tuple[float, float]:
    """The mean of one setting less that of another, and the half-width of its 95 % interval.

    Seeds of both are taken to scatter alike (Student): two or three seeds do not show a scatter of their own. If one
    setting has a single run, each has an error of its own (Welch): that of its seeds, or of the fit of its only run.
    """
    n, m = len(one[0]), len(other[0])
    if n > 1 and m > 1:
        degrees = n + m - 2
        variance = (n * np.var(one[0]) + m * np.var(other[0])) / degrees * (1 / n + 1 / m)
    else:
        (a, degrees_a), (b, degrees_b) = (
            (np.var(values, ddof=1) / len(values), len(values) - 1) if len(values) > 1 else (errors[0] ** 2, degrees[0])
            for values, errors, degrees in (one, other)
        )
        variance = a + b + 1e-300
        degrees = max(1, variance**2 / (a**2 / degrees_a + b**2 / degrees_b + 1e-300))
    return float(np.mean(one[0]) - np.mean(other[0])), float(stdtrit(degrees, 0.975) * np.sqrt(variance))


def compare(names: Sequence[str], groups: Sequence[list[Fit]]) -> dict:
    """The paper's comparison of two settings, by name, each with a list of Fits, one a seed: the numbers, and the
    verdict in words.

    Asymptotes come first. They are told apart if they are further apart than the margin, than the scatter of the seeds
    explains, and than their intervals reach towards each other: an interval of A is longer above than below. The A of a
    run that shows no ceiling below 1 may be anywhere in its interval; then they must be told apart wherever it is.
    If they are not, B and C_mid are fitted again with A held at the mean of all runs, and at .02 above and below, since
    the answer must not hang on it. Runs that are not `standing` are left out.
    """
    counted = [standing(fits) for fits in groups]
    fell = "".join(
        f"; {len(fits) - len(its)} of {len(fits)} runs of {name} fell, and are left out"
        for name, fits, its in zip(names, groups, counted)
        if len(fits) > len(its)
    )
    result = {"settings": list(names), "A": None, "A_difference": None, "efficiency": []}
    unknown = " and ".join(name for name, fits in zip(names, counted) if not all(f.comparable for f in fits))
    if unknown:
        return result | {"verdict": f"no difference that this data shows: it does not identify A of {unknown}{fell}"}
    lost = " and ".join(name for name, fits in zip(names, counted) if not all(f.identified for f in fits))

    def gap_of_ceilings(end: int) -> tuple[float, float]:
        """The first A less the second, and how large it must be to tell them apart, where the first runs reach to this
        end of their intervals and the second to the other. A run without a ceiling has its A there."""
        settings, apart = [], 0.0
        for fits, at in zip(counted, (end, 1 - end)):
            ends = np.array([f.interval["A"][at] for f in fits])
            A = [f.A if f.identified else its_end for f, its_end in zip(fits, ends)]
            halves, degrees = np.abs(A - ends), [len(f.x) - 3 for f in fits]
            settings.append((A, halves / stdtrit(degrees, 0.975), degrees))
            apart += np.linalg.norm(halves) / len(fits)  # the half of the interval of their mean, by the fits alone
        gap, error = difference(*settings)
        return gap, float(max(error, apart))

    (least, below), (most, above) = gap_of_ceilings(0), gap_of_ceilings(1)  # one gap where all runs show a ceiling
    gap, low, high = (least if least > 0 else most), least - below, most + above
    if not lost:
        result["A"] = [float(np.mean([f.A for f in fits])) for fits in counted]
        result["A_difference"] = [gap, low, high]
    if abs(gap) >= MARGIN and (low > 0 or high < 0):
        higher, lower = names if gap > 0 else names[::-1]
        its = with_interval(*(gap, low, high) if gap > 0 else (-gap, -high, -low))
        its = f"at least {max(low, -high):.3f}" if lost else its
        return result | {"verdict": f"{higher} raises the ceiling: its A lies {its} above that of {lower}{fell}"}

    common = float(np.mean([f.A for fits in counted for f in fits]))
    tried = [efficiency(counted, A) for A in (common, common - MARGIN, min(common + MARGIN, 1.0))]
    result["efficiency"] = tried
    steeper, later = (agreed([at[name] for at in tried]) for name in ("B_ratio", "C_mid_ratio"))
    winner = names[0] if (steeper or -later) > 0 else names[1]
    if steeper * later > 0:
        verdict = f"{winner} rises more steeply but later: neither is more efficient all along"
    else:
        verdict = f"{winner} is more efficient" if steeper or later else "no difference that this data shows"
    numbers = f"the ceilings differ by {with_interval(gap, low, high, '+.3f')}"
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
    degrees = [[len(f.x) - 2 for f in fits] for fits in groups]
    for i, name in enumerate(("B", "C_mid")):
        logs = [[values[i] for values, _ in runs] for runs in held]
        errors = [[its_errors[i] for _, its_errors in runs] for runs in held]
        ratio, half = difference(*zip(logs, errors, degrees))
        result[name] = [float(np.exp(np.mean(its_logs))) for its_logs in logs]
        result[f"{name}_ratio"] = [float(np.exp(r)) for r in (ratio, ratio - half, ratio + half)]
    return result


def agreed(ratios: list[tuple[float, float, float]]) -> int:
    """Whether these (ratio, low, high) are all surely above 1 (returns 1), or all surely below (-1). Otherwise 0."""
    told = {int(low > 1) - int(high < 1) for _, low, high in ratios}
    return told.pop() if len(told) == 1 else 0
