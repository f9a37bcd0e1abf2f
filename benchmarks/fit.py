"""How far the fit can be trusted, by simulated runs: how often the intervals hold the truth, how
often a verdict is wrong, and which runs identify A.

    python benchmarks/fit.py                  # 400 runs a line
    python benchmarks/fit.py verdicts 50      # one part; quicker and rougher
"""

import itertools
import sys

import common  # noqa: F401
import numpy as np
from curves import run_of

from curve.comparison import compare
from curve.fit import MOST_SCATTER, Fit, fit_sigmoid, sigmoid
from curve.forecast import tested
from curve.report import markdown

TRUTH = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.40}  # ScaleRL, table 1 of the paper
HALF = {"A": 0.7, "B": 1.8, "C_mid": 100.0, "R0": 0.2}
# How the other variant of a pair differs: A is higher, C_mid is later by this factor, and the run
# has so many points up to so many C_mid. Then which variant is right.
OTHERS = {
    "alike": (0, 1, 40, 6, None),
    "A + .05": (0.05, 1, 40, 6, "other"),
    "C_mid x 1.5": (0, 1.5, 40, 6, "first"),
    "slow": (0, 2, 16, 2, "first"),
}


def intervals_that_hold(draws: int, points: int, correlation: float) -> np.ndarray:
    """Whether the 95 % intervals of runs hold the truth, (draws, 5) of bool: A, B, C_mid, the curve
    at twice the compute, and the end that the first half forecasts. Noise .01, up to 4 C_mid."""
    random = np.random.default_rng(0)
    held = []
    for _ in range(draws):
        how = dict(n=points + 1, last=4 * TRUTH["C_mid"], correlation=correlation)
        x, y = run_of(**TRUTH, **how, seed=random)
        fit = fit_sigmoid(x, y)
        test = tested(fit_sigmoid(x, y, fit_to=x[-1] / 2), x, y)
        intervals = [(fit.interval[name], TRUTH[name]) for name in ("A", "B", "C_mid")]
        intervals.append((fit.band(2 * x[-1]), sigmoid(2 * x[-1], **TRUTH)))
        intervals.append((test["interval"], test["came"]))
        held.append([low <= value <= high for (low, high), value in intervals])
    return np.array(held)


def coverage(draws: int) -> list[dict]:
    """Percent of the runs whose 95 % intervals hold the truth: noise .01, up to 4 C_mid."""
    rows = []
    for points, correlation in itertools.product((20, 40, 75), (0.0, 0.3, 0.6, 0.8)):
        held = intervals_that_hold(draws, points, correlation)
        named = zip(("A", "B", "C_mid", "forecast", "held out"), 100 * np.mean(held, axis=0))
        rows.append({"points": points, "correlation": correlation} | dict(named))
    return rows


def seeds_of(random, draws: int, truth: dict, noise: float, difference: tuple) -> list[Fit]:
    """The Fits of the seeds of a variant, which scatter by .0075 in A and by 5 % in C_mid.
    difference: as in OTHERS."""
    more_A, later, points, reach, _ = difference
    fits = []
    for in_A, in_mid in random.standard_normal((draws, 2)) * (0.0075, 0.05):
        middle = later * truth["C_mid"]
        of_seed = truth | {"A": truth["A"] + more_A + in_A, "C_mid": middle * np.exp(in_mid)}
        how = dict(n=points + 1, last=reach * middle, noise=noise, seed=random)
        fits.append(fit_sigmoid(*run_of(**of_seed, **how)))
    return fits


def verdicts(draws: int) -> list[dict]:
    """Percent of pairs of variants with a right and with a wrong winner. The slow variant is
    behind, and its ceiling is alike."""
    rows = []
    for truth, noise in ((TRUTH, 0.005), (TRUTH, 0.01), (HALF, 0.01), (HALF, 0.02)):
        random = np.random.default_rng(0)
        first = seeds_of(random, draws, truth, noise, OTHERS["alike"])
        for other, difference in OTHERS.items():
            second = seeds_of(random, draws, truth, noise, difference)
            for seeds in (1, 2, 3):
                right = wrong = 0
                pairs = draws // seeds
                for i in range(0, pairs * seeds, seeds):
                    groups = first[i : i + seeds], second[i : i + seeds]
                    result = compare(("first", "other"), groups)
                    is_right = result.winner == difference[-1]
                    if other == "slow" and result.kind == "ceiling":
                        is_right = False
                    right += bool(result.winner) and is_right
                    wrong += bool(result.winner) and not is_right
                named = {"gain": truth["A"] - truth["R0"], "noise": noise, "other": other}
                shares = {"right": 100 * right / pairs, "wrong": 100 * wrong / pairs}
                rows.append(named | {"seeds": seeds} | shares)
    return rows


def identification(draws: int) -> list[dict]:
    """How often the interval of A is right, by the part of the gain that a run has made; of runs
    of all kinds whose points scatter little."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(15 * draws):
        A, made = random.uniform((0.4, 0.35), (0.95, 0.99))
        points = random.choice([20, 40, 75])
        B, noise = np.exp(random.uniform(np.log([0.6, 0.003]), np.log([3, 0.03])))
        truth = {"A": A, "B": B, "C_mid": 1.0, "R0": random.uniform(0, A - 0.2)}
        reach = (made / (1 - made)) ** (1 / B)
        correlation = random.choice([0, 0.3, 0.6])
        how = dict(n=points + 1, last=reach, noise=noise, correlation=correlation)
        fit = fit_sigmoid(*run_of(**truth, **how, seed=random))
        low, high = fit.interval["A"]
        scatter = fit.rms / np.sqrt(points)
        if scatter < MOST_SCATTER * (fit.A - fit.R0) and not fit.fell:
            found.append((fit.gain_made, fit.identified, low <= A <= high))
    made, identified, inside = np.array(found).T
    rows = []
    for low in np.arange(4, 10) / 10:
        chosen = (made >= low) & (made < low + 0.1)
        shares = [100 * share[chosen].mean() for share in (identified, inside)]
        row = {"gain made from": low, "runs": chosen.sum()}
        rows.append(row | dict(zip(("identified", "A inside"), shares)))
    return rows


def main() -> None:
    parts = {part.__name__: part for part in (coverage, verdicts, identification)}
    name, draws = [*sys.argv[1:], *["all", 400][len(sys.argv) - 1 :]]
    for part in parts.values() if name == "all" else [parts[name]]:
        rows = part(int(draws))
        cells = [
            {
                name: f"{value:.4g}" if not isinstance(value, str) else value
                for name, value in row.items()
            }
            for row in rows
        ]
        print(f"\n{part.__doc__}\n\n{markdown(cells)}", flush=True)


if __name__ == "__main__":
    main()
