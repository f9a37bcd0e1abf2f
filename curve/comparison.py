"""Several runs of one variant, and the paper's comparison of two variants (Khatri et al., arXiv 2510.13786, A.8).

A variant is whatever is compared: a recipe, or a value of a setting. It comes as the list of the Fits of its seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats is slow to import

from curve.fit import MARGIN, Fit, with_interval


def standing(fits: list[Fit]) -> list[Fit]:
    """The seeds that count: a seed whose pass rate fell does not, since no sigmoid falls. If all fell, all count."""
    return [fit for fit in fits if not fit.fell] or fits


def asymptote_of(fits: list[Fit]) -> str:
    """A of a variant as text: the mean with a 95 % t-interval if all its seeds identify A, otherwise seed by seed."""
    counted = standing(fits)
    fell = f"; {len(fits) - len(counted)} of {len(fits)} fell" if len(fits) > len(counted) else ""
    if len(counted) == 1:
        return counted[0].asymptote + fell
    if all(fit.identified for fit in counted):
        A = [fit.A for fit in counted]
        half = stdtrit(len(A) - 1, 0.975) * np.std(A, ddof=1) / np.sqrt(len(A))
        return with_interval(np.mean(A), np.mean(A) - half, np.mean(A) + half) + fell
    if all(fit.comparable for fit in counted):
        return ", ".join(f"{fit.A:.3f}" if fit.identified else fit.asymptote for fit in counted) + fell
    return f"not identified by {sum(not fit.identified for fit in counted)} of {len(counted)} runs{fell}"


@dataclass(frozen=True)
class Comparison:
    """What is known of two variants beside each other."""

    variants: tuple[str, str]  # names
    # none: no difference is shown; unknown: a ceiling is not identified, so nothing is compared
    kind: Literal["ceiling", "efficiency", "steeper but later", "none", "unknown"]
    winner: str | None  # the variant that the verdict names
    verdict: str  # in a few words
    numbers: str  # the reasons for the verdict, in words
    fell: dict[str, str]  # by variant: how many runs fell and are left out, such as "1 of 3"
    A_difference: tuple[float, float, float] | None = None  # (gap, low, high), if all runs identify A
    efficiency: tuple[dict, ...] = ()  # of `efficiency_at`, at three A, if ceilings are not told apart

    @property
    def sentence(self) -> str:
        """The verdict with the numbers, and with the runs that are left out."""
        fell = [f"{number} runs of {variant} fell, and are left out" for variant, number in self.fell.items()]
        reasons = "; ".join(filter(None, [self.numbers, *fell]))
        return f"{self.verdict} ({reasons})" if reasons else self.verdict


def compare(variants: tuple[str, str], groups: Sequence[list[Fit]]) -> Comparison:
    """The paper's comparison of two variants: their names, and the list of Fits of each. `standing` Fits count.

    Asymptotes come first. Their difference must exceed the margin, the scatter of the seeds, and the intervals of the
    fits. If a run shows no ceiling below 1, this must hold for every A in its interval. Otherwise B and C_mid are
    fitted again with A held at the mean of all runs, .02 below it and .02 above it. A difference counts if it is sure
    at all three values.
    """
    counted, fell = [standing(fits) for fits in groups], {}
    for variant, fits, kept in zip(variants, groups, counted):
        if len(fits) > len(kept):
            fell[variant] = f"{len(fits) - len(kept)} of {len(fits)}"
    unknown = [variant for variant, fits in zip(variants, counted) if not all(fit.comparable for fit in fits)]
    if unknown:
        verdict = f"no difference that this data shows: it does not identify A of {' and '.join(unknown)}"
        return Comparison(variants, "unknown", None, verdict, "", fell)

    no_ceiling = [variant for variant, fits in zip(variants, counted) if not all(fit.identified for fit in fits)]
    gap, low, high = difference_of_ceilings(*counted)
    A_difference = None if no_ceiling else (gap, low, high)
    if abs(gap) >= MARGIN and (low > 0 or high < 0):
        higher, lower = variants if gap > 0 else variants[::-1]
        above = with_interval(*(gap, low, high) if gap > 0 else (-gap, -high, -low))
        above = f"at least {max(low, -high):.3f}" if no_ceiling else above
        verdict, numbers = f"{higher} raises the ceiling", f"its A lies {above} above that of {lower}"
        return Comparison(variants, "ceiling", higher, verdict, numbers, fell, A_difference)

    common = float(np.mean([fit.A for fits in counted for fit in fits]))
    held = tuple(efficiency_at(A, *counted) for A in (common, common - MARGIN, min(common + MARGIN, 1.0)))
    steeper, later = (surely_above_1([at[ratio] for at in held]) for ratio in ("B_ratio", "C_mid_ratio"))
    winner = variants[0] if (steeper or -later) > 0 else variants[1]
    if not steeper and not later:
        kind, winner, verdict = "none", None, "no difference that this data shows"
    elif steeper * later > 0:
        verdict = f"{winner} rises more steeply but later: neither is more efficient all along"
        kind = "steeper but later"
    else:
        kind, verdict = "efficiency", f"{winner} is more efficient"
    numbers = f"the ceilings differ by {with_interval(gap, low, high, '+.3f')}"
    if no_ceiling:
        numbers = f"not all runs of {' and '.join(no_ceiling)} show a ceiling, and no other lies surely below it"
    numbers += f"; with A held at {common:.3f}"
    for name in ("B", "C_mid"):
        ratio = with_interval(*held[0][f"{name}_ratio"], ".2f")
        numbers += ", {} {:.4g} and {:.4g}, ratio {}".format(name, *held[0][name], ratio)
    return Comparison(variants, kind, winner, verdict, numbers, fell, A_difference, held)


def surely_above_1(ratios: list[tuple[float, float, float]]) -> int:
    """1 if all these ratios, (ratio, low, high) each, are surely above 1, -1 if all are surely below, otherwise 0."""
    return int(all(low > 1 for _, low, _ in ratios)) - int(all(high < 1 for _, _, high in ratios))


def difference_of_ceilings(first: list[Fit], second: list[Fit]) -> tuple[float, float, float]:
    """The mean A of the first variant minus the mean A of the second, with its 95 % interval: (gap, low, high).

    The interval of a run's A is longer above A than below. So the low end uses the lower halves of the first variant's
    intervals and the upper halves of the second's, and the high end uses the opposite halves. A run without a ceiling
    has no A: the end of its interval replaces A, and the smaller of the two gaps is returned.
    """

    def gap_and_reach(ends: tuple[int, int]) -> tuple[float, float]:  # ends: 0 for the low one, 1 for the high one
        quantities, reach = [], 0.0
        for fits, end in zip((first, second), ends):
            bounds = np.array([fit.interval["A"][end] for fit in fits])
            A = [fit.A if fit.identified else bound for fit, bound in zip(fits, bounds)]
            halves, degrees = np.abs(A - bounds), [len(fit.x) - 3 for fit in fits]
            quantities.append((A, halves / stdtrit(degrees, 0.975), degrees))
            reach += np.linalg.norm(halves) / len(fits)  # half the interval of the mean of A, from the fits alone
        gap, half = difference(*quantities)
        return gap, float(max(half, reach))

    (least, below), (most, above) = gap_and_reach((0, 1)), gap_and_reach((1, 0))  # one gap if all show a ceiling
    return (least if least > 0 else most), least - below, most + above


def difference(first: tuple, second: tuple) -> tuple[float, float]:
    """The difference of the means of two variants, and half of its 95 % interval. A variant is three lists over its
    seeds: values, errors, degrees of freedom. We assume that both scatter alike (Student), since two or three seeds
    show little. If one has a single run, each has its own error (Welch): from its seeds, or from its only fit."""
    n, m = len(first[0]), len(second[0])
    if n > 1 and m > 1:
        degrees = n + m - 2
        variance = (n * np.var(first[0]) + m * np.var(second[0])) / degrees * (1 / n + 1 / m)
    else:
        (a, degrees_a), (b, degrees_b) = (
            (np.var(values, ddof=1) / len(values), len(values) - 1) if len(values) > 1 else (errors[0] ** 2, degrees[0])
            for values, errors, degrees in (first, second)
        )
        variance = a + b + 1e-300
        degrees = max(1, variance**2 / (a**2 / degrees_a + b**2 / degrees_b + 1e-300))
    return float(np.mean(first[0]) - np.mean(second[0])), float(stdtrit(degrees, 0.975) * np.sqrt(variance))


def efficiency_at(A: float, *groups: list[Fit]) -> dict:
    """B and C_mid of two variants with both asymptotes held at A: for "B" and for "C_mid" the geometric means over the
    seeds of each, and for "B_ratio" and "C_mid_ratio" the ratio of the first variant to the second with its 95 %
    interval, (ratio, low, high)."""
    held = [[fit.efficiency_at(A) for fit in fits] for fits in groups]
    degrees = [[len(fit.x) - 2 for fit in fits] for fits in groups]
    found = {"A": A}
    for i, name in enumerate(("B", "C_mid")):  # the order of `Fit.efficiency_at`
        logs = [[values[i] for values, _ in fits] for fits in held]
        errors = [[errors[i] for _, errors in fits] for fits in held]
        ratio, half = difference(*zip(logs, errors, degrees))
        found[name] = tuple(float(np.exp(np.mean(values))) for values in logs)
        found[f"{name}_ratio"] = tuple(float(np.exp(log)) for log in (ratio, ratio - half, ratio + half))
    return found
