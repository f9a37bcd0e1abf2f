"""How much the seeds of a variant scatter, and how often an A of all seeds together is right.

    python benchmarks/seeds.py

The scatter is the error margin of A (Fig. 8a), and what a comparison expects by default. It is that
of the published logs (docs/study). A variant counts if it has two runs or more that did not fall,
and all show a ceiling or end near 1. B and C_mid are taken with A held at the mean of the variant,
in the logarithm. So their scatter holds what the scatter of A does to them, which a comparison
adds. "Beside" is the rest.
"""

import common
import numpy as np
from fit import simulate
from scipy.special import chdtri, stdtrit

from curve.columns import Series
from curve.comparison import SEED_SCATTER, fit_together, standing
from curve.fit import MARGIN, fit_sigmoid
from curve.logs import runs_of_study
from fit_curve import Options, fit_logs


def pooled(groups: list[np.ndarray]) -> tuple[float, int]:
    """The standard deviation within groups of values, and its degrees of freedom."""
    degrees = sum(len(values) - 1 for values in groups)
    if not degrees:
        return np.nan, 0
    squares = sum(len(values) * np.var(values) for values in groups)
    return np.sqrt(squares / degrees), degrees


def line(name: str, variants: list[list]) -> None:
    """Print the scatter of A, log B and log C_mid over these variants, each a list of Fits."""
    ceilings = []
    all_logs = []  # of each variant: log B and log C_mid of its seeds, with A held at its mean
    of_A = 0.0  # how much of their variance the scatter of A makes, times the degrees of freedom
    for fits in variants:
        A = [fit.A for fit in fits]
        if all(fit.identified for fit in fits):
            ceilings.append(A)
        middle = np.mean(A)
        held = np.array([middle, middle - MARGIN, middle + MARGIN])
        logs = np.array([fit.efficiency_at(held)[0] for fit in fits])
        all_logs.append(logs[:, 0])
        # As a comparison does it: by how much B and C_mid change with the held A.
        change = np.ptp(logs, 1) / np.ptp(held)
        of_A += (len(fits) - 1) * np.square(SEED_SCATTER[0] * change).mean(0)

    # All of A is NaN if no variant shows a ceiling.
    s, degrees = pooled(ceilings)
    low, high = s * np.sqrt(degrees / chdtri(degrees, [0.025, 0.975]))
    margin = stdtrit(degrees, 0.975) * s
    print(
        f"{name:20}{len(variants):8}{sum(map(len, variants)):6}    "
        f"{len(ceilings):3}{sum(map(len, ceilings)):6}    {s:.3f} [{low:.3f}, {high:.3f}]"
        f"{margin:8.3f}",
        end="",
    )
    for i in range(2):
        scatter, degrees = pooled([logs[:, i] for logs in all_logs])
        beside = np.sqrt(max(0, scatter**2 - of_A[i] / degrees))
        print(f"{scatter:11.3f}{beside:8.3f}", end="")
    print()


def together(draws: int = 900) -> None:
    """Print how often the interval of an A that all seeds share holds the mean A of the variant."""
    print(
        f"\nSeeds fitted together, of {draws} simulated variants: A from .4 to .95, R0 .2 below or "
        "lower, B .8 to 3,\n"
        "2, 3 or 5 seeds that scatter by .0075 in A and 5 % in B and C_mid, 12, 20 or 40 points up "
        "to 50 to 97 % of\n"
        "the gain, noise .003 to .03, correlation 0 or .4\n"
    )
    random = np.random.default_rng(0)
    rows = []
    alone = 0
    for _ in range(draws):
        # A variant.
        A, made = random.uniform((0.4, 0.5), (0.95, 0.97))
        points = random.choice([12, 20, 40])
        seeds = random.choice([2, 3, 5])
        R0 = random.uniform(0, A - 0.2)
        B, noise = np.exp(random.uniform(np.log([0.8, 0.003]), np.log([3, 0.03])))
        reach = (made / (1 - made)) ** (1 / B)
        correlation = random.choice([0, 0.4])
        # Its seeds.
        runs = []
        for scatter, *logs in random.standard_normal((seeds, 3)) * (0.0075, 0.05, 0.05):
            scale_B, scale = np.exp(logs)
            truth = {"A": A + scatter, "B": B * scale_B, "C_mid": scale, "R0": R0}
            x, y = simulate(random, points, reach / scale, noise, correlation, truth)
            runs.append((Series("", x, y), fit_sigmoid(x, y)))
        pooled = [fit for _, fit in fit_together(runs) if fit.together]
        alone += all(fit.identified for _, fit in runs)
        if pooled:
            low, high = pooled[0].interval["A"]
            rows.append((low <= A <= high, abs(pooled[0].A - A) / (A - R0), high - low))
    held, error, width = np.array(rows).T
    print(
        f"all seeds identify A in {alone}; together they do in {len(rows)} others. There the "
        f"interval holds A in {100 * held.mean():.0f} %, its median width is "
        f"{np.median(width):.3f}, the median error {np.median(error):.3f} of the gain, and that of "
        f"nine in ten is below {np.quantile(error, 0.9):.3f}"
    )


def gain(fits: list) -> float:
    return np.mean([fit.A - fit.R0 for fit in fits])


def main() -> None:
    studies = {}
    for folder in sorted((common.ROOT / "docs" / "study").iterdir()):
        variants, _ = fit_logs(runs_of_study(folder), Options(()))
        counted = [standing([fit for _, fit in runs]) for runs in variants.values()]
        several = [fits for fits in counted if len(fits) > 1]
        comparable = [fits for fits in several if all(fit.comparable for fit in fits)]
        studies[folder.name] = comparable
    # Some runs were copied into several studies. There they count, and here once.
    distinct = {}
    for variants in studies.values():
        for fits in variants:
            distinct.setdefault(tuple(fits[0].x), fits)
    every = [*distinct.values()]
    print(
        f"{'runs':20}variants  runs  with A  runs  A  {'':16}margin      log B  beside  log C_mid  "
        "beside"
    )
    line("all", every)
    line("gain below .7", [fits for fits in every if gain(fits) < 0.7])
    line("gain above .7", [fits for fits in every if gain(fits) >= 0.7])
    for name, variants in studies.items():
        line(name, variants)
    together()


if __name__ == "__main__":
    main()
