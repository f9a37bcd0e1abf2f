"""How much the seeds of a variant scatter: the error margin of A (Fig. 8a), and what a comparison expects by default.

    python benchmarks/seeds.py

From the published logs (docs/study). A variant counts if it has two runs or more that did not fall, and all show a
ceiling or end near 1. B and C_mid are taken with A held at the mean of the variant, in the logarithm.
"""

import common
import numpy as np
from scipy.special import chdtri, stdtrit

from curve.comparison import standing
from fit_curve import Fitting, fit_logs
from study import runs_of_study


def pooled(groups: list[np.ndarray]) -> tuple[float, int]:
    """The standard deviation within groups of values, and its degrees of freedom."""
    degrees = sum(len(values) - 1 for values in groups)
    return np.sqrt(sum(len(values) * np.var(values) for values in groups) / degrees) if degrees else np.nan, degrees


def line(name: str, variants: list[list]) -> None:
    """Print the scatter of A, log B and log C_mid over these variants, each a list of Fits."""
    A = [np.array([fit.A for fit in fits]) for fits in variants if all(fit.identified for fit in fits)]
    held = [np.array([fit.efficiency_at(np.mean([f.A for f in fits]))[0] for fit in fits]) for fits in variants]
    (s, degrees), scatter = pooled(A), [pooled([logs[:, i] for logs in held])[0] for i in (0, 1)]
    low, high = s * np.sqrt(degrees / chdtri(degrees, [0.025, 0.975]))  # all NaN if no variant shows a ceiling
    print(
        f"{name:32}{len(variants):8}{sum(map(len, variants)):6}    {s:.3f} [{low:.3f}, {high:.3f}]"
        f"{stdtrit(degrees, 0.975) * s:8.3f}{scatter[0]:8.3f}{scatter[1]:11.3f}"
    )


def main() -> None:
    studies = {}
    for folder in sorted((common.ROOT / "docs" / "study").iterdir()):
        variants, _ = fit_logs(runs_of_study(folder), Fitting())
        counted = [standing([fit for _, fit in runs]) for runs in variants.values()]
        studies[folder.name] = [fits for fits in counted if len(fits) > 1 and all(fit.comparable for fit in fits)]
    every = [fits for variants in studies.values() for fits in variants]
    gain = lambda fits: np.mean([fit.A - fit.R0 for fit in fits])
    print(f"{'runs':32}variants  runs  A, if all identify it  margin   log B  log C_mid")
    line("all", every)
    line("gain below .7", [fits for fits in every if gain(fits) < 0.7])
    line("gain above .7", [fits for fits in every if gain(fits) >= 0.7])
    for name, variants in studies.items():
        line(name, variants)


if __name__ == "__main__":
    main()
