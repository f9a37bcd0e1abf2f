"""How far the fit can be trusted, by simulated runs, and how fast it is.

    python benchmarks/fit.py                             # 400 runs a line
    python benchmarks/fit.py --draws 50                  # quicker and rougher
    python benchmarks/fit.py --parts verdicts --seed 1   # one part, on other runs

The parts of it: how often the intervals hold the truth, how often a verdict is wrong, what the
scatter of seeds does to verdicts, who is ahead if A is not identified, which runs identify A, and
the speed of a fit.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from unittest import mock

import common
import numpy as np

from curve import comparison, least_squares
from curve.comparison import DEFAULT_WEIGHT, PART_OF_B, SEED_SCATTER, Comparison, compare
from curve.fit import LEAST_GAIN_MADE, MOST_SCATTER, Fit, allowed_excess, fit_sigmoid, sigmoid
from curve.forecast import held_out

TRUTH = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.40}  # ScaleRL, table 1 of the paper


def simulate(
    random, points: int, reach: float, noise: float, correlation: float = 0.0, truth: dict = TRUTH
):
    """Compute and pass rates, both [points + 1], of a run with the curve `truth`: from no compute
    to `reach` times C_mid. The noise of neighbours correlates: AR(1) with this standard deviation.
    The first point gives R0."""
    x = np.linspace(0, reach * truth["C_mid"], points + 1)
    shocks = random.standard_normal(points + 1)
    drift = shocks.copy()
    # The drift of a point is partly that of the point before.
    for i in range(1, points + 1):
        drift[i] = correlation * drift[i - 1] + np.sqrt(1 - correlation**2) * shocks[i]
    return x, np.clip(sigmoid(x, **truth) + noise * drift, 0, 1)


def plain_interval(x, y):
    """The interval of A by profile likelihood alone: neighbours taken as independent, R0 as
    known."""
    theta, squares = least_squares.variable_projection(x[1:], y[1:], y[0])
    excess = allowed_excess(squares, len(x) - 4, correlation=0.0)
    return least_squares.profile_over_A(x[1:], y[1:], theta, theta, excess, R0_free=False)[0]["A"]


def holds(interval, value) -> bool:
    return interval[0] <= value <= interval[1]


def coverage(draws: int, seed: int) -> None:
    """Print how often each interval holds the truth, for runs of more or fewer points, whose noise
    correlates more or less."""
    print(
        f"\nHow often do 95 % intervals hold the truth? Percent of {draws} simulated runs; noise "
        ".01,\n"
        "C_max/C_mid 4, forecast at twice the last compute, held-out test (what came).\n"
        "Width: median width of the interval of A. r: mean correlation of neighbouring residuals, "
        "raw and corrected\n\n"
        "points  correlation   A without correction     A     B  C_mid  forecast  held out   width"
        "         r  corrected"
    )
    for points, correlation in itertools.product((20, 40, 75), (0.0, 0.3, 0.6, 0.8)):
        random = np.random.default_rng(seed)
        held = []
        figures = []
        for _ in range(draws):
            x, y = simulate(random, points, 4, 0.01, correlation)
            fit = fit_sigmoid(x, y)
            test = held_out(x, y)
            later = 2 * x[-1]

            # Each interval, and the value that it should hold.
            intervals = [
                (plain_interval(x, y), TRUTH["A"]),
                (fit.interval["A"], TRUTH["A"]),
                (fit.interval["B"], TRUTH["B"]),
                (fit.interval["C_mid"], TRUTH["C_mid"]),
                (fit.band(later), sigmoid(later, **TRUTH)),
                (test["interval"], test["came"]),
            ]
            held.append([holds(interval, value) for interval, value in intervals])

            low, high = fit.interval["A"]
            figures.append((high - low, fit.lag_1, fit.correlation))

        plain, A, B, C_mid, forecast, test = 100 * np.mean(held, axis=0)
        width, _, _ = np.median(figures, axis=0)
        _, raw, corrected = np.mean(figures, axis=0)
        print(
            f"{points:6}{correlation:13.1f}{plain:23.0f}{A:6.0f}{B:6.0f}{C_mid:7.0f}{forecast:10.0f}"
            f"{test:10.0f}{width:8.3f}{raw:10.2f}{corrected:11.2f}",
            flush=True,
        )


# How the other variant of a pair differs: A is higher, C_mid is later by this factor, and the run
# has so many points up to so many C_mid.
OTHERS = {
    "alike": (0, 1, 40, 6),
    "A + .05": (0.05, 1, 40, 6),
    "C_mid x 1.5": (0, 1.5, 40, 6),
    "slow": (0, 2, 16, 2),
}
HALF = {"A": 0.7, "B": 1.8, "C_mid": 100.0, "R0": 0.2}


def verdicts(draws: int, seed: int) -> None:
    """Print how often a verdict is right or wrong, for variants that are alike and for variants
    that differ in one way."""
    print(
        f"\nHow often is a verdict wrong? Percent of {draws} runs in pairs of variants. 40 points "
        "up to 6 C_mid;\n"
        "the paper's curve of ScaleRL (gain .21), or A .7, B 1.8, R0 .2 (gain .5). Seeds scatter "
        "by .0075 in A and\n"
        "5 % in C_mid. The other variant is alike; or its A is .05 higher; or its C_mid 1.5 times "
        "as late; or it is\n"
        "alike but slow and short (C_mid doubled, 16 points up to 2 C_mid). `either`: ceiling or "
        "efficiency;\n"
        "`mixed`: steeper but later, or quicker but lower; `height`: A is not identified, but one "
        "is ahead at the\n"
        "same compute; `unknown`: nor that\n\n"
        "gain  noise  the other run   seeds   pairs   right winner   wrong   ceiling"
        "   efficiency   either   mixed   height   unknown"
    )
    noises = [(TRUTH, 0.003), (TRUTH, 0.005), (TRUTH, 0.01)]
    noises += [(HALF, 0.005), (HALF, 0.01), (HALF, 0.02)]
    for truth, noise in noises:
        # The runs of the first variant, and those of each other one.
        random = np.random.default_rng(seed)
        first = seeds_of(random, draws, truth, noise, OTHERS["alike"])
        pools = {}
        for other, difference in OTHERS.items():
            pools[other] = seeds_of(random, draws, truth, noise, difference)

        # One, two or three seeds of the first variant beside as many of the other.
        for (other, second), seeds in itertools.product(pools.items(), (1, 2, 3)):
            pairs = []
            for i in range(0, draws - seeds + 1, seeds):
                chosen = slice(i, i + seeds)
                pairs.append(compare(("first", "other"), (first[chosen], second[chosen])))

            cells = verdict_cells(pairs, other)
            gain = truth["A"] - truth["R0"]
            line = f"{gain:4.2f}{noise:7.3f}  {other:13}{seeds:8}{len(pairs):8}"
            for cell, width in zip(cells, (15, 8, 10, 13, 9, 8, 9, 10)):
                line += f"{cell:{width}.1f}"
            print(line, flush=True)


def seeds_of(
    random, draws: int, truth: dict, noise: float, difference: tuple, scatter=(0.0075, 0, 0.05)
) -> list[Fit]:
    """The Fits of the seeds of a variant. difference: as in OTHERS. scatter: between them, of A, of
    log B and of log C_mid."""
    more_A, later, points, reach = difference
    fits = []
    for in_A, in_B, in_mid in random.standard_normal((draws, 3)) * scatter:
        middle = later * truth["C_mid"]
        C_mid = middle * np.exp(in_mid)
        of_seed = {"A": truth["A"] + more_A + in_A, "B": truth["B"] * np.exp(in_B), "C_mid": C_mid}
        run = simulate(random, points, reach * middle / C_mid, noise, 0, truth | of_seed)
        fits.append(fit_sigmoid(*run))
    return fits


def verdict_cells(pairs: list[Comparison], other: str) -> list[float]:
    """In percent of the pairs: the right winner, a wrong claim, and the kinds of verdicts."""
    right = {"A + .05": "other", "C_mid x 1.5": "first", "slow": "first"}.get(other)
    rows = []
    for pair in pairs:
        # The slow variant is less efficient, and behind at the same compute. Its ceiling is alike.
        named = pair.winner == right and not (other == "slow" and pair.kind == "ceiling")
        rows.append([
            bool(pair.winner) and named,
            bool(pair.winner) and not named,
            pair.kind == "ceiling",
            pair.kind == "efficiency",
            pair.kind == "ceiling or efficiency",
            " but " in pair.kind,
            pair.kind == "same compute",
            pair.kind == "unknown",
        ])  # fmt: skip
    return list(100 * np.mean(rows, axis=0))


# Before 2026-11-23 the default counted as much beside three seeds as beside one, the scatter of log
# B held what the scatter of A does to it, and last values were not asked.
BEFORE = {"WEIGHT_BESIDE_THREE": DEFAULT_WEIGHT, "PART_OF_B": 1, "borne_out": lambda *_: True}


def scatter(draws: int, seed: int) -> None:
    """Print how often each rule gives a verdict, if seeds scatter as expected and twice as much."""
    pairs = draws // 3
    print(
        f"\nWhat does the scatter of seeds do to verdicts? Percent of {pairs} pairs of variants, "
        "by the rule of before\n"
        "and of now. A .7, B 1.8, R0 .2, up to 6 C_mid. Seeds scatter by the default, of A, log B "
        "and log C_mid, or by\n"
        "twice that. `creeps`: the other variant has the same ceiling, but a seventh of its gain "
        "comes late, with B 1\n"
        "around four times C_mid, so a sigmoid ends below its points\n\n"
        "points  noise  scatter  the other run  verdict           1 seed        2 seeds"
        "        3 seeds"
    )
    rows = {"alike": "any", "twice": "any", "A + .05": "right", "C_mid x 1.5": "right"}
    rows["creeps"] = "ceiling"
    for points, noise in ((40, 0.02), (20, 0.01)):
        for row, counted in rows.items():
            # The runs of both variants.
            random = np.random.default_rng(seed)
            times = 2 if row == "twice" else 1
            of_A, of_mid = SEED_SCATTER
            spread = times * np.array([of_A, PART_OF_B * of_mid, of_mid])
            pools = []
            for name in ("alike", row if row in OTHERS else "alike"):
                difference = (*OTHERS[name][:2], points, 6)
                pools.append(seeds_of(random, draws, HALF, noise, difference, spread))
            if row == "creeps":
                pools[1] = [creeping(random, points, noise, fit) for fit in pools[1]]

            # How many verdicts the rule of before gives, and the rule of now.
            other = "alike" if row == "twice" else row
            line = f"{points:6}{noise:7.2f}{times:8}x  {other:15}{counted:9}"
            for seeds in (1, 2, 3):
                before, now = (
                    percent(pools, seeds, pairs, rule, row, counted) for rule in (BEFORE, {})
                )
                line += f"{before:10.1f} ->{now:5.1f}"
            print(line, flush=True)


def heights(draws: int, seed: int) -> None:
    """Print how often the right variant is ahead at the same compute, if the runs are too
    short for A."""
    pairs = draws // 3
    print(
        f"\nWho is ahead at the same compute, if A is not identified? Percent of {pairs} pairs of "
        "variants that end\n"
        "at 1.2 C_mid of the first, with 16 points. A .95, B 1.3, R0 .25. Seeds scatter by the "
        "default, of A and\n"
        "log C_mid, or by twice that\n\n"
        "noise  scatter  the other run  verdict    1 seed   2 seeds   3 seeds"
    )
    truth = {"A": 0.95, "B": 1.3, "C_mid": 100.0, "R0": 0.25}
    for noise, times, later in itertools.product((0.013, 0.03), (1, 2), (1, 1.5)):
        random = np.random.default_rng(seed)
        spread = times * np.array([SEED_SCATTER[0], 0, SEED_SCATTER[1]])
        first, other = (
            seeds_of(random, draws, truth, noise, (0, each, 16, 1.2 / each), spread)
            for each in (1, later)
        )

        row, counted = ("alike", "any") if later == 1 else ("C_mid x 1.5", "right")
        line = f"{noise:5.3f}{times:8}x  {row:15}{counted:8}"
        for seeds in (1, 2, 3):
            line += f"{percent([first, other], seeds, pairs, {}, row, counted):10.1f}"
        print(line, flush=True)


def creeping(random, points: int, noise: float, fit: Fit) -> Fit:
    """The fit of a run of which a seventh of the gain comes slowly and late. fit: of a seed with
    this scatter, whose curve is the quick part."""
    x = np.append(0, fit.x)
    quick = sigmoid(x, HALF["A"], 3.0, fit.C_mid, HALF["R0"])
    slow = sigmoid(x, HALF["A"], 1.0, 4 * fit.C_mid, HALF["R0"])
    shocks = random.standard_normal(points + 1)
    return fit_sigmoid(x, np.clip(6 / 7 * quick + slow / 7 + noise * shocks, 0, 1))


def percent(
    pools: list[list[Fit]], seeds: int, pairs: int, rule: dict, row: str, counted: str
) -> float:
    """The percentage of pairs whose verdict is counted: any winner, the right one, or a ceiling.
    rule: the names of curve/comparison.py that are replaced."""
    right = {"A + .05": "other", "C_mid x 1.5": "first"}.get(row)
    hits = 0
    with mock.patch.dict(vars(comparison), rule):
        for i in range(0, pairs * seeds, seeds):
            result = compare(("first", "other"), [pool[i : i + seeds] for pool in pools])
            is_counted = {
                "any": result.winner is not None,
                "right": right and result.winner == right,
                "ceiling": result.kind == "ceiling",
            }
            hits += bool(is_counted[counted])
    return 100 * hits / pairs


def identification(draws: int, seed: int) -> None:
    """Print how often the interval of A is right, by the part of the gain that a run has made and
    by the scatter of its points."""
    runs = 15 * draws
    print(
        f"\nWhich part of the gain must a run show? {runs} simulated runs: A from .4 to .95, R0 .2 "
        "below it at\n"
        "least, B from .6 to 3, noise .003 to .03, correlation 0, .3 or .6, 20, 40 or 75 points, "
        ".35 to .99 of the\n"
        "gain made. Left out: intervals wider than the gain, no ceiling below 1, no rise\n"
    )
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(runs):
        # A run of a random recipe, and its fit.
        A = random.uniform(0.4, 0.95)
        made = random.uniform(0.35, 0.99)
        points = random.choice([20, 40, 75])
        B, noise = np.exp(random.uniform(np.log([0.6, 0.003]), np.log([3, 0.03])))
        truth = {"A": A, "B": B, "C_mid": 1.0, "R0": random.uniform(0, A - 0.2)}
        reach = (made / (1 - made)) ** (1 / B)
        correlation = random.choice([0, 0.3, 0.6])
        fit = fit_sigmoid(*simulate(random, points, reach, noise, correlation, truth))

        # What is right in it, if the fit claims to know A at all.
        low, high = fit.interval["A"]
        gain = fit.A - fit.R0
        if high - low < gain and fit.A < 0.9999 and gain > 2 * fit.rms and not fit.fell:
            scatter = fit.rms / np.sqrt(points) / gain
            error = abs(fit.A - A) / (A - truth["R0"])
            rows.append((fit.gain_made, scatter, fit.identified, low <= A, low <= A <= high, error))

    # Which runs belong to which line of the table.
    made, scatter, identified, above, inside, error = np.array(rows).T
    calm = scatter <= MOST_SCATTER
    lines = {}
    for a in np.arange(4, 10) / 10:
        lines[f"gain made {a} to {a + 0.1:.1f}"] = calm & (made >= a) & (made < a + 0.1)
    for a, b in itertools.pairwise((0, 0.003, 0.006, 0.01, 0.02, 0.1)):
        lines[f"scatter {a} to {b}"] = (made >= LEAST_GAIN_MADE) & (scatter > a) & (scatter <= b)
    lines["identified"] = identified > 0

    print(
        "of the gain             runs   A inside   A above its low end   "
        "error of A, of the gain: median   95 %"
    )
    for name, chosen in lines.items():
        if chosen.any():
            shares = f"{100 * inside[chosen].mean():9.1f} %{100 * above[chosen].mean():20.1f} %"
            errors = f"{np.median(error[chosen]):32.3f}{np.quantile(error[chosen], 0.95):7.2f}"
            print(f"{name:19}{chosen.sum():9}{shares}{errors}", flush=True)


def speed(_draws: int, seed: int) -> None:
    """Print the milliseconds of a fit, without and with its intervals."""
    x, y = simulate(np.random.default_rng(seed), 75, 6, 0.01)
    R0 = y[0]
    later_x = x[1:]
    later_y = y[1:]
    fit_alone = partial(least_squares.variable_projection, later_x, later_y, R0)
    fast = median_milliseconds(fit_alone)
    whole = median_milliseconds(lambda: fit_sigmoid(x, y))
    _, squares = fit_alone()
    print(
        f"\nSpeed, 75 points, medians: the fit {fast:.2f} ms, residual {squares:.6f}\n"
        f"with intervals and warnings {whole:.2f} ms"
    )


def median_milliseconds(work: Callable) -> float:
    return 1e3 * np.median([common.seconds(work) for _ in range(200)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=400, help="simulated runs a line")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated runs")
    measured = (coverage, verdicts, scatter, heights, identification, speed)
    parts = {part.__name__: part for part in measured}
    help = "what to simulate"
    parser.add_argument("--parts", nargs="+", choices=parts, default=[*parts], help=help)
    options = parser.parse_args()
    for name in options.parts:
        parts[name](options.draws, options.seed)


if __name__ == "__main__":
    main()
