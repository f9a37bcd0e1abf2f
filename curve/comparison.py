"""Several runs of one variant, and the comparison of two variants (after Khatri et al., arXiv
2510.13786, A.8).

A variant is whatever is compared: a recipe, or a value of a setting. It comes as the list of the
Fits of its seeds.

A claim must exceed the scatter of seeds. A variant with one run shows none, and two or three runs
show little. So a default is weighed against the seeds that are there, as if it came from
DEFAULT_WEIGHT more of them (a moderated t-test; Smyth 2004, doi 10.2202/1544-6115.1027).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats is slow to import

from curve.fit import LEAST_GAIN_MADE, MARGIN, Fit, FittedRun, with_interval

SEED_SCATTER = (
    0.01,
    0.05,
)  # standard deviations between seeds: of A, and of log B and log C_mid (docs/measured.md)
DEFAULT_WEIGHT = 6  # the degrees of freedom that the default counts as
QUANTILE = 1 - 0.05 / 6  # so the three intervals, of A, B and C_mid, hold together with 95 %


def standing(fits: list[Fit]) -> list[Fit]:
    """The seeds that count: a seed whose pass rate fell does not, since no sigmoid falls. If all
    fell, all count."""
    return [fit for fit in fits if not fit.fell] or fits


def fit_together(runs: list[FittedRun]) -> list[FittedRun]:
    """The seeds of a variant. If not all that stand identify A, they get one A: that at which the
    sum of their squared errors is least, while each has its own B, C_mid and R0. As for a single
    run, this A counts only if it is not on its bound, if its interval is narrower than the gain,
    and if enough of the gain is made (`python benchmarks/seeds.py`).
    """
    fits = [fit for _, fit in runs if not fit.fell]
    if len(fits) < 2 or all(fit.identified for fit in fits):
        return runs
    low, high = zip(*(fit.interval["A"] for fit in fits))
    A = np.linspace(min(low), max(high), 201)
    squares = sum(fit.held_at(A)[1] for fit in fits)
    allowed = squares.min() + np.mean(
        [fit.profile.left.max() for fit in fits]
    )  # at the best curve all is left
    one, ends = A[squares.argmin()], A[squares <= allowed][[0, -1]]
    pooled, made = [], []
    for series, fit in runs:
        if not fit.fell:
            B, C_mid, R0 = fit.held_at([one])[0][0, 1:]
            found = {
                "A": one,
                "B": np.exp(B),
                "C_mid": np.exp(C_mid),
                "R0": R0,
                "interval": fit.interval | {"A": ends},
            }
            fit = replace(fit, **found, identified=True, together=True)
            made.append(fit.gain_made)
        pooled.append((series, fit))
    gain = one - np.mean([fit.R0 for fit in fits])
    enough = (
        np.mean(made) >= LEAST_GAIN_MADE
        and min(made) >= 0.5
        and np.ptp(ends) < gain
        and one < 0.9999
    )
    return pooled if enough else runs


def mean_of(values: Sequence, interval: Sequence) -> tuple:
    """(mean, low, high) of the values of seeds, with the 95 % t-interval. A single one has the
    interval of its fit."""
    mean, n = np.mean(values), len(values)
    if n == 1:
        return mean, *interval
    half = stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(n)
    return mean, mean - half, mean + half


def asymptote_of(fits: list[Fit]) -> str:
    """A of a variant as text: the mean with a 95 % t-interval if all its seeds identify A,
    otherwise seed by seed."""
    counted = standing(fits)
    fell = f"; {len(fits) - len(counted)} of {len(fits)} fell" if len(fits) > len(counted) else ""
    if len(counted) == 1 or counted[0].together:
        return counted[0].asymptote + fell
    if all(fit.identified for fit in counted):
        return (
            with_interval(
                *np.clip(mean_of([fit.A for fit in counted], counted[0].interval["A"]), 0, 1)
            )
            + fell
        )
    if all(fit.comparable for fit in counted):
        return (
            ", ".join(f"{fit.A:.3f}" if fit.identified else fit.asymptote for fit in counted) + fell
        )
    return f"not identified by {sum(not fit.identified for fit in counted)} of {len(counted)} runs{fell}"


@dataclass(frozen=True)
class Comparison:
    """What is known of two variants beside each other. All intervals in it hold together with 95
    %."""

    variants: tuple[str, str]  # names
    # none: no difference is shown; unknown: a ceiling is not identified, so nothing is compared
    kind: Literal[
        "ceiling",
        "efficiency",
        "ceiling or efficiency",
        "steeper but later",
        "quicker but lower",
        "none",
        "unknown",
    ]
    winner: str | None  # the variant that the verdict names
    verdict: str  # in a few words
    numbers: str  # the reasons for the verdict, in words
    A_difference: tuple[float, float, float] | None = (
        None  # (gap, low, high), if all runs identify A
    )
    efficiency: dict | None = None  # of `efficiency_between`, if ceilings are not told apart

    @property
    def sentence(self) -> str:
        return f"{self.verdict} ({self.numbers})" if self.numbers else self.verdict


def compare_with_first(
    variants: dict[str, list[FittedRun]], scatter: tuple[float, float]
) -> list[Comparison]:
    """The comparison of each variant with the first, which is the second of its pair."""
    fits = {variant: [fit for _, fit in runs] for variant, runs in variants.items()}
    first, *others = fits
    return [compare((other, first), (fits[other], fits[first]), scatter) for other in others]


def compare(
    variants: tuple[str, str],
    groups: Sequence[list[Fit]],
    scatter: tuple[float, float] = SEED_SCATTER,
) -> Comparison:
    """The comparison of two variants: their names, and the list of Fits of each. `standing` Fits
    count. scatter: the standard deviation between seeds, of A, and of log B and log C_mid.

    Asymptotes come first: they differ if the interval of their difference is beyond 0, and the
    difference is at least MARGIN. Otherwise B and C_mid are fitted again with A held at the mean of
    all runs, .02 below it and .02 above it. A difference counts if it is sure at all three. It is
    one of efficiency if it is also sure between the most unequal ceilings that the data allows;
    otherwise the ceilings may make it.
    """
    counted = [standing(fits) for fits in groups]
    unknown = [
        variant
        for variant, fits in zip(variants, counted)
        if not all(fit.comparable for fit in fits)
    ]
    if unknown:
        verdict = (
            f"no difference that this data shows: it does not identify A of {' and '.join(unknown)}"
        )
        return Comparison(variants, "unknown", None, verdict, "")

    no_ceiling = [
        variant
        for variant, fits in zip(variants, counted)
        if not all(fit.identified for fit in fits)
    ]
    gap, low, high = difference_of_ceilings(*counted, scatter[0])
    A_difference, higher = None if no_ceiling else (gap, low, high), beyond(0, (gap, low, high))
    if higher and abs(gap) >= MARGIN:
        winner, loser = variants[::higher]
        above = with_interval(abs(gap), *sorted((higher * low, higher * high)))
        above = f"at least {max(low, -high):.3f}" if no_ceiling else above
        verdict, numbers = (
            f"{winner} raises the ceiling",
            f"its A lies {above} above that of {loser}",
        )
        return Comparison(variants, "ceiling", winner, verdict, numbers, A_difference)

    A = float(np.mean([fit.A for fits in counted for fit in fits]))
    at = efficiency_at(
        [(A, A), (A - MARGIN, A - MARGIN), (A + MARGIN, A + MARGIN)], counted, scatter
    )
    unequal = efficiency_at([(A + gap / 2, A - gap / 2) for gap in (low, high)], counted, scatter)
    steeper, sooner = signs = beyond(1, at["B_ratio"]), -beyond(1, at["C_mid_ratio"])
    still = beyond(1, unequal["B_ratio"]), -beyond(1, unequal["C_mid_ratio"])
    winner = variants[0] if (steeper or sooner) > 0 else variants[1]
    if not any(signs):
        kind, winner, verdict = "none", None, "no difference that this data shows"
    elif steeper == -sooner:
        kind = "steeper but later"
        verdict = f"{winner} rises more steeply but later: neither is more efficient all along"
    elif not any(sign and sign == other for sign, other in zip(signs, still)):
        kind, verdict = (
            "ceiling or efficiency",
            f"{winner} is ahead in ceiling or efficiency: this data cannot tell",
        )
    elif higher == -(steeper or sooner):
        kind, verdict = "quicker but lower", f"{winner} is more efficient, but its ceiling is lower"
    else:
        kind, verdict = "efficiency", f"{winner} is more efficient"

    numbers = f"the ceilings differ by {with_interval(gap, low, high, '+.3f')}"
    numbers += f", and less than {MARGIN} does not count" if higher else ""
    if no_ceiling:
        numbers = f"not all runs of {' and '.join(no_ceiling)} show a ceiling, and no other lies surely below it"
    numbers += f"; with A held at {A:.3f}"
    for name in ("B", "C_mid"):
        ratio = with_interval(*at[f"{name}_ratio"], ".2f")
        numbers += ", {} {:.4g} and {:.4g}, ratio {}".format(name, *at[name], ratio)
    if min(map(len, counted)) < 3 and kind in ("none", "ceiling or efficiency"):
        shrink = half_interval(3, 3) / half_interval(*map(len, counted))
        _, least, most = at["C_mid_ratio"]
        needed = max(MARGIN, shrink * (high - low) / 2), (most / least) ** (shrink / 2)
        numbers += "; three seeds of each would show ceilings {:.3f} apart, or a C_mid ratio of {:.2f}".format(
            *needed
        )
    return Comparison(variants, kind, winner, verdict, numbers, A_difference, at)


def beyond(value: float, interval: tuple[float, float, float]) -> int:
    """1 if all of an interval (middle, low, high) lies above a value, -1 if all lies below it,
    otherwise 0."""
    _, low, high = interval
    return int(low > value) - int(high < value)


def difference_of_ceilings(
    first: list[Fit], second: list[Fit], scatter: float
) -> tuple[float, float, float]:
    """The mean A of the first variant minus the mean A of the second, with its interval: (gap, low,
    high).

    The interval of a run's A is longer above A than below. So the low end uses the lower halves of
    the first variant's intervals and the upper halves of the second's, and the high end uses the
    opposite halves. A run without a ceiling has no A: the end of its interval replaces A, and the
    smaller of the two gaps is returned.
    """

    def gap_and_half(
        ends: tuple[int, int],
    ) -> tuple[float, float]:  # ends: 0 for the low one, 1 for the high one
        sides = []
        for fits, end in zip((first, second), ends):
            fits = (
                fits[:1] if fits[0].together else fits
            )  # they have one A, which counts as that of one run
            bounds = np.array([fit.interval["A"][end] for fit in fits])
            A = np.array([fit.A if fit.identified else bound for fit, bound in zip(fits, bounds)])
            sides.append((A, np.abs(A - bounds) / stdtrit(np.inf, 0.975)))
        return difference(*sides, scatter)

    (least, below), (most, above) = (
        gap_and_half((0, 1)),
        gap_and_half((1, 0)),
    )  # one gap if all show a ceiling
    return (least if least > 0 else most), least - below, most + above


def difference(first: tuple, second: tuple, scatter: float) -> tuple[float, float]:
    """The difference of the means of two variants, and half of its interval. A variant is two
    arrays over its seeds: values, and the standard errors of their fits. We expect that seeds vary
    by the scatter and by these errors. What they show may be `factor` times as much, which counts
    for both variants, since so few seeds show little."""
    n, m = (len(values) for values, _ in (first, second))
    expected = [scatter**2 + np.mean(np.square(errors)) for _, errors in (first, second)]
    seen = n * np.var(first[0]) / expected[0] + m * np.var(second[0]) / expected[1]
    factor = (DEFAULT_WEIGHT + seen) / (DEFAULT_WEIGHT + n + m - 2)
    half = half_interval(n, m, *(factor * variance for variance in expected))
    return float(np.mean(first[0]) - np.mean(second[0])), half


def half_interval(n: int, m: int, first: float = 1.0, second: float = 1.0) -> float:
    """Half the interval of the difference of two means, over n and m seeds whose variances are
    `first` and `second`."""
    return float(stdtrit(DEFAULT_WEIGHT + n + m - 2, QUANTILE) * np.sqrt(first / n + second / m))


def efficiency_at(
    held: Sequence[tuple[float, float]], groups: Sequence[list[Fit]], scatter: tuple
) -> dict:
    """B and C_mid of two variants whose asymptotes are held at a pair of values. "B" and "C_mid":
    the geometric means over the seeds of each, at the first pair. "B_ratio" and "C_mid_ratio": the
    ratio of the first variant to the second there, and the lowest and the highest end of its
    intervals at all pairs: (ratio, low, high).

    scatter: as in `compare`. The A of seeds scatters, so with A held their B and C_mid scatter too,
    as far as they follow the held A. The errors of the fits count only for a variant with one or
    two runs: with A held they are too wide, and three show how runs vary."""
    few, sides = min(map(len, groups)) < 3, []
    for A, fits in zip(
        np.transpose(held), groups
    ):  # logs and errors: [pairs, seeds, 2], of B and C_mid
        logs, errors = np.array(
            [[fit.efficiency_at(value) for fit in fits] for value in A]
        ).transpose(2, 0, 1, 3)
        sides.append((logs, np.hypot(few * errors, scatter[0] * np.ptp(logs, 0) / np.ptp(A))))
    found = {"A": held[0][0]}
    for i, name in enumerate(("B", "C_mid")):
        found[name] = tuple(float(np.exp(logs[0, :, i].mean())) for logs, _ in sides)
        pairs = [
            [(logs[k, :, i], errors[k, :, i]) for logs, errors in sides] for k in range(len(held))
        ]
        middle, half = np.transpose([difference(*pair, scatter[1]) for pair in pairs])
        found[f"{name}_ratio"] = tuple(
            map(float, np.exp([middle[0], min(middle - half), max(middle + half)]))
        )
    return found
