"""Several runs of one variant, and the comparison of two variants (after Khatri et al., arXiv
2510.13786, A.8).

A variant is whatever is compared: a recipe, or a value of a setting. It comes as the list of the
Fits of its seeds.

A claim must exceed the scatter of seeds. A variant with one run shows none, and two or three runs
show little. So a default is weighed against the seeds that are there, as if it came from more of
them (a moderated t-test; Smyth 2004, doi 10.2202/1544-6115.1027).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats is slow to import

from curve.fit import (
    BOUND,
    LEAST_GAIN_MADE,
    MARGIN,
    NORMAL,
    Fit,
    Variants,
    allowed_excess,
    spread,
    with_interval,
)

# Standard deviations between seeds (docs/measured.md): of A, and of the logarithms of B and C_mid,
# beside what the scatter of A does to them.
SCATTER_OF_A = 0.01
SCATTER_OF = {"B": 0.02, "C_mid": 0.05}
# The degrees of freedom that this default counts as. Three runs of each variant show how runs vary,
# so there it counts less: seeds that scatter twice as much are then no difference either
# (docs/fitting.md).
DEFAULT_WEIGHT = 6
WEIGHT_BESIDE_THREE = 0.5
QUANTILE = 1 - 0.05 / 6  # so the three intervals, of A, B and C_mid, hold together with 95 %
LEAST_VARIANCE = 1e-12  # is added to each variance, so that 0 divides nothing
MOST_LOG_RATIO = 14.0  # of B or C_mid; an end of an interval beyond it says nothing

# --- 1. The seeds of a variant --------------------------------------------------------------------


def standing(fits: list[Fit]) -> list[Fit]:
    """The seeds that count: a seed whose pass rate fell does not, since no sigmoid falls. If all
    fell, all count."""
    return [fit for fit in fits if not fit.fell] or fits


def fit_together(seeds: list[Fit]) -> list[Fit]:
    """The seeds of a variant. If some that stand do not identify A, all that stand get one A. It is
    the A at which the sum of their squared errors is least; each has its own B, C_mid and R0. As
    for a single run, this A counts only if it is not on its bound, if its interval is narrower than
    the gain, and if enough of the gain is made (docs/measured.md). Otherwise the seeds come back as
    they are.
    """
    fits = [fit for fit in seeds if not fit.fell]
    if len(fits) < 2 or all(fit.identified for fit in fits):
        return seeds

    from scipy.optimize import minimize_scalar  # here, since its import takes as long as all others

    squares = lambda A: sum(fit.held_at(A)[1] for fit in fits)
    ends = [fit.interval["A"] for fit in fits]
    A = minimize_scalar(squares, bounds=(np.min(ends), np.max(ends)), method="bounded").x
    sharing = [with_A(fit, A) for fit in fits]
    # What the seeds show of A adds up.
    known = sum(1 / spread(fit.points[0], fit.theta, fit.given)[0, 0] for fit in sharing)
    excess = np.mean([allowed_excess(fit.squares, fit.degrees, fit.correlation) for fit in fits])
    half = np.sqrt(excess / known)
    interval = tuple(np.clip([A - half, A + half], 0, 1))

    made = [fit.gain_made for fit in sharing]
    gain = A - np.mean([fit.R0 for fit in fits])
    enough_made = np.mean(made) >= LEAST_GAIN_MADE and min(made) >= 0.5
    if not enough_made or np.ptp(interval) >= gain or A > BOUND:
        return seeds
    interval_of = lambda fit: fit.interval | {"A": interval}
    together = iter(replace(fit, interval=interval_of(fit)) for fit in sharing)
    return [fit if fit.fell else next(together) for fit in seeds]


def with_A(fit: Fit, A: float) -> Fit:
    """A seed with the A of all seeds."""
    (A, log_B, log_mid, R0), _ = fit.held_at(A)
    B, C_mid = np.exp([log_B, log_mid])
    return replace(fit, A=A, B=B, C_mid=C_mid, R0=R0, identified=True, together=True)


def mean_of(values: Sequence, interval: Sequence) -> tuple:
    """(mean, low, high) of the values of seeds, with the 95 % t-interval. A single value has the
    interval of its fit, which is given."""
    mean = np.mean(values)
    n = len(values)
    if n == 1:
        return mean, *interval
    half = stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / np.sqrt(n)
    return mean, mean - half, mean + half


def estimate_of_A(fits: list[Fit]) -> tuple | None:
    """A of a variant, (mean, low, high) with a 95 % t-interval, or with that of all seeds together;
    None if a seed that counts does not identify it, or if all have risen to the bound of 1."""
    counted = standing(fits)
    A = [fit.A for fit in counted]
    own = counted[0].interval["A"]
    if counted[0].together:
        return A[0], *own
    if all(fit.identified for fit in counted) and (len(A) == 1 or min(A) <= BOUND):
        return tuple(np.clip(mean_of(A, own), 0, 1))
    return None


def asymptote_of(fits: list[Fit]) -> str:
    """A of a variant as text, seed by seed if there is no estimate of all. A seed that has risen to
    the bound of 1 only shows what A exceeds."""
    counted = standing(fits)
    unknown = sum(not fit.identified for fit in counted)
    estimate = estimate_of_A(fits)
    if estimate:
        together = " of all seeds together" if counted[0].together else ""
        text = with_interval(*estimate) + together
    elif all(fit.comparable for fit in counted):
        text = ", ".join(
            f"> {fit.interval['A'][0]:.3f}" if fit.A > BOUND else f"{fit.A:.3f}" for fit in counted
        )
    elif len(counted) == 1:
        text = "not identified"
    else:
        text = f"not identified by {unknown} of {len(counted)} runs"
    fell = sum(fit.fell for fit in fits)
    if fell:
        text += "; it fell" if len(fits) == 1 else f"; {fell} of {len(fits)} fell"
    return text


# --- 2. Differences of two variants ---------------------------------------------------------------

Groups = Sequence[list[Fit]]  # the Fits of two variants
Estimate = tuple[float, float, float]  # (value, low, high)
Seeds = tuple[np.ndarray, np.ndarray]  # values (..., n) of the n seeds of a variant, their errors


def difference(first: Seeds, second: Seeds, scatter: float) -> tuple:
    """The difference of the means of two variants, and half of its interval. We expect that seeds
    vary by the scatter and by the errors of their fits. What they show may be more or
    less. That counts for both variants, since so few seeds show little."""
    variance = seen = 0.0
    numbers = []
    for values, errors in (first, second):
        n = values.shape[-1]
        expected = scatter**2 + LEAST_VARIANCE + np.square(errors).mean(-1)
        variance += expected / n
        seen += n * values.var(-1) / expected
        numbers.append(n)
    weight = WEIGHT_BESIDE_THREE if min(numbers) >= 3 else DEFAULT_WEIGHT
    degrees = weight + sum(numbers) - 2
    half = stdtrit(degrees, QUANTILE) * np.sqrt(variance * (weight + seen) / degrees)
    return first[0].mean(-1) - second[0].mean(-1), half


def difference_of_ceilings(first: list[Fit], second: list[Fit]) -> Estimate:
    """The mean A of the first variant minus the mean A of the second, with its interval.

    The interval of a run's A is longer above A than below. So the low end uses the lower halves of
    the first variant's intervals and the upper halves of the second's, and the high end uses the
    opposite halves. A run without a ceiling has no A: the end of its interval replaces A, and the
    smaller of the two gaps is returned if they have one sign. If all runs show a ceiling, there is
    one gap.
    """
    least, below = difference(asymptotes(first, 0), asymptotes(second, 1), SCATTER_OF_A)
    most, above = difference(asymptotes(first, 1), asymptotes(second, 0), SCATTER_OF_A)
    return least if least > 0 else most, least - below, most + above


def asymptotes(fits: list[Fit], end: int) -> Seeds:
    """A of each seed with its standard error, as one end of the interval has it: 0 for the low end,
    1 for the high end. Seeds that share one A count as one."""
    if fits[0].together:
        fits = fits[:1]
    ends = np.array([fit.interval["A"][end] for fit in fits])
    A = np.where([fit.identified for fit in fits], [fit.A for fit in fits], ends)
    return A, np.abs(A - ends) / NORMAL


def difference_at(C: float, first: list[Fit], second: list[Fit]) -> Estimate:
    """The mean height of the first variant's curves at compute C minus that of the second's, with
    its interval. Seeds scatter in A, and in C_mid, which moves a curve that rises at C."""
    sides = []
    moved = []
    later = C * np.exp(SCATTER_OF["C_mid"])
    for fits in (first, second):
        heights = np.array([fit.predict([C, later]) for fit in fits])
        errors = np.ptp([fit.band(C) for fit in fits], axis=1) / 2 / NORMAL
        sides.append((heights[:, 0], errors))
        moved += [*np.diff(heights)]
    gap, half = difference(*sides, np.hypot(SCATTER_OF_A, np.mean(moved)))
    return gap, gap - half, gap + half


def efficiency_between(groups: Groups, held: Sequence[tuple[float, float]]) -> dict:
    """B and C_mid of two variants whose asymptotes are held at each of these pairs of values.

    "A": the first value. "B" and "C_mid": the geometric means over the seeds of each variant, at
    the first pair. "B_ratio" and "C_mid_ratio", Estimates: the ratio of the first variant to the
    second at the first pair, and the lowest and the highest end of its intervals at all pairs.

    Seeds scatter in A. With one A held for all of them, a seed whose own A is another one gets
    another B and C_mid, and this scatter is added to that of B and C_mid. The errors of the fits
    count only if a variant has one or two runs: with A held they are too wide, and three runs show
    how runs vary."""
    sides = []  # of each variant: values and errors (2, pairs, seeds), of log B and log C_mid
    three_of_each = min(map(len, groups)) >= 3
    for fits, A in zip(groups, np.transpose(held)):
        found = np.array([fit.efficiency_at(A) for fit in fits])
        logs, errors = found.transpose(1, 3, 2, 0)
        moved = np.ptp(np.minimum(A, 1))  # no fit has an A above 1
        by_A = SCATTER_OF_A * np.ptp(logs, 1, keepdims=True) / max(moved, 1e-9)
        sides.append((logs, by_A if three_of_each else np.hypot(errors, by_A)))

    efficiency = {"A": held[0][0]}
    for i, name in enumerate(SCATTER_OF):
        efficiency[name] = tuple(np.exp(logs[i, 0].mean()) for logs, _ in sides)
        pair = [(logs[i], errors[i]) for logs, errors in sides]
        middle, half = difference(*pair, SCATTER_OF[name])
        log_ratio = middle[0], min(middle - half), max(middle + half)
        ratio = np.exp(np.clip(log_ratio, -MOST_LOG_RATIO, MOST_LOG_RATIO))
        efficiency[f"{name}_ratio"] = tuple(ratio)
    return efficiency


# --- 3. Which variant is ahead --------------------------------------------------------------------

VERDICTS = {
    "ceiling": "{winner} raises the ceiling",
    "efficiency": "{winner} is more efficient",
    "ceiling or efficiency": "{winner} is ahead in ceiling or efficiency: this data cannot tell",
    "steeper but later": (
        "{winner} rises more steeply but later: neither is more efficient all along"
    ),
    "none": "no difference that this data shows",
    "same compute": (
        "{winner} is ahead at compute {C:.3g}: this data does not identify A of {unknown}"
    ),
    "unknown": "no difference that this data shows: it does not identify A of {unknown}",
    "fell": "no curve describes {fallen}, which fell",
}


@dataclass(frozen=True)
class Comparison:
    """What is known of two variants beside each other. All intervals in it hold together with 95
    %."""

    variants: tuple[str, str]  # names
    kind: str  # a key of VERDICTS; the last three if a run is not `comparable`
    winner: str | None  # the variant that the verdict names
    verdict: str  # in a few words
    numbers: str = ""  # the reasons for the verdict, in words
    A_difference: Estimate | None = None  # of `difference_of_ceilings`, if all runs identify A
    efficiency: dict | None = None  # of `efficiency_between`, if ceilings are not told apart

    @property
    def sentence(self) -> str:
        return f"{self.verdict} ({self.numbers})" if self.numbers else self.verdict


def compare_with_first(variants: Variants) -> list[Comparison]:
    """The comparison of each variant with the first, which is the second of its pair."""
    first, *others = variants
    return [compare((other, first), (variants[other], variants[first])) for other in others]


def compare(variants: tuple[str, str], groups: Groups) -> Comparison:
    """The comparison of two variants: their names, and the list of Fits of each. `standing` Fits
    count."""
    groups = [standing(fits) for fits in groups]
    with_any = lambda wanted: " and ".join(
        variant for variant, fits in zip(variants, groups) if any(map(wanted, fits))
    )
    unknown = with_any(lambda fit: not fit.comparable)
    no_ceiling, fallen = with_any(lambda fit: not fit.identified), with_any(lambda fit: fit.fell)
    C = min(fit.C_max for fits in groups for fit in fits)
    efficiency = None
    if unknown and fallen:
        kind, ahead, gap = "fell", 0, None
    elif unknown:
        kind, ahead, gap = decide_by_heights(groups, C)
    else:
        gap = difference_of_ceilings(*groups)
        kind, ahead, efficiency = decide(groups, gap)
    winner, other = variants[::ahead] if ahead else (None, None)
    verdict = VERDICTS[kind].format(winner=winner, C=C, unknown=unknown, fallen=fallen)

    numbers = ""
    if efficiency:
        numbers = reasons(gap, efficiency, no_ceiling)
    elif ahead:
        low, value, high = sorted(ahead * np.array(gap))
        only_low = no_ceiling and not unknown
        lead = f"at least {low:.3f}" if only_low else with_interval(value, low, high)
        numbers = f"its {'curve' if unknown else 'A'} lies {lead} above that of {other}"
    ceilings = None if no_ceiling else gap
    return Comparison(variants, kind, winner, verdict, numbers, ceilings, efficiency)


def decide(groups: Groups, ceilings: Estimate) -> tuple[str, int, dict | None]:
    """What two variants show, each a list of the Fits that count: the kind of the verdict (a key of
    VERDICTS); 1 if it speaks for the first variant, -1 for the second, 0 for neither; and B and
    C_mid of both (`efficiency_between`) if the ceilings do not decide.

    ceilings: their difference, of `difference_of_ceilings`.

    Asymptotes come first: they differ if the interval of their difference is beyond 0, if the last
    values bear that out, and if the difference is at least MARGIN. Otherwise B and C_mid are fitted
    again with A held at the mean of all runs, .02 below it and .02 above it (but at most at 1). A
    difference counts if it is sure at all three. It is one of efficiency if it is also sure between
    the most unequal ceilings that the data allows; otherwise the ceilings may make it.
    """
    gap, low, high = ceilings
    higher = surely_higher(ceilings, groups, lambda fit: fit.end)
    if higher and abs(gap) >= MARGIN:
        return "ceiling", higher, None

    A = np.mean([fit.A for fits in groups for fit in fits])
    efficiency = efficiency_between(groups, [(A + off, A + off) for off in (0, -MARGIN, MARGIN)])
    unequal = [(A + end / 2, A - end / 2) for end in (low, high)]
    steeper, sooner = leads(efficiency)
    ahead = steeper or sooner
    still = leads(efficiency_between(groups, unequal))
    sure = [one for one, again in zip((steeper, sooner), still) if one == again]
    if not ahead:
        kind = "none"
    elif steeper == -sooner:
        kind = "steeper but later"
    elif ahead not in sure:
        kind = "ceiling or efficiency"
    else:
        kind = "efficiency"
    return kind, ahead, efficiency


def decide_by_heights(groups: Groups, C: float) -> tuple[str, int, Estimate | None]:
    """As `decide`, if the data does not identify A of all runs: only their curves are compared, at
    compute C, the last that all runs have reached. Returns the difference of their heights, too."""
    if not all(fit.describes(C) for fits in groups for fit in fits):
        return "unknown", 0, None
    gap = difference_at(C, *groups)
    ahead = surely_higher(gap, groups, lambda fit: fit.points_at(C))
    if abs(gap[0]) < MARGIN:
        ahead = 0
    return "same compute" if ahead else "unknown", ahead, gap


def beyond(value: float, interval: Estimate) -> int:
    """1 if all of an interval lies above a value, -1 if all lies below it, otherwise 0."""
    _, low, high = interval
    return int(low > value) - int(high < value)


def leads(efficiency: dict) -> tuple[int, int]:
    """Which variant surely rises more steeply, and which has surely the lower C_mid: 1 for the
    first, -1 for the second, 0 for neither."""
    return beyond(1, efficiency["B_ratio"]), -beyond(1, efficiency["C_mid_ratio"])


def surely_higher(gap: Estimate, groups: Groups, seen: Callable) -> int:
    """`beyond` 0 of the gap between the fits of two variants, but 0 if the points do not bear it
    out. They do if what is seen of the runs differs by half of it or more, in the same direction.
    Ends of flat curves do, unless a fit misses the end of its run."""
    first, second = (np.mean([seen(fit) for fit in fits]) for fits in groups)
    borne_out = (first - second) * np.sign(gap[0]) >= abs(gap[0]) / 2
    return beyond(0, gap) if borne_out else 0


def reasons(ceilings: Estimate, efficiency: dict, no_ceiling: str) -> str:
    """The reasons for a verdict that ceilings do not decide. no_ceiling: the variants in which not
    all runs show one."""
    gap, _, _ = ceilings
    numbers = f"the ceilings differ by {with_interval(*ceilings, '+.3f')}"
    if no_ceiling:
        numbers = f"not all runs of {no_ceiling} show a ceiling"
    elif beyond(0, ceilings):
        denied = ", which the last values do not bear out"
        numbers += denied if abs(gap) >= MARGIN else f", and less than {MARGIN} does not count"
    numbers += f"; with A held at {efficiency['A']:.3f}"
    for name in SCATTER_OF:
        first, second = efficiency[name]
        ratio = with_interval(*efficiency[f"{name}_ratio"], ".2f")
        numbers += f", {name} {first:.4g} and {second:.4g}, ratio {ratio}"
    return numbers
