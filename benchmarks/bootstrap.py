"""Do the intervals of A agree with a bootstrap? It knows nothing of profiles, of t or of
correlation.

    python benchmarks/bootstrap.py

A bootstrap of residuals: the curve of least squares plus residuals that are drawn with replacement,
one by one, or in blocks of four neighbours, which keeps most of their correlation. Each such run is
fitted, with R0 free. The interval of A goes from the 2.5 % to the 97.5 % quantile of what comes
out.
"""

import itertools

import common
import numpy as np
from fit import TRUTH, holds, simulate

from curve import least_squares
from curve.fit import Fit, fit_sigmoid
from curve.logs import runs_of_study
from fit_curve import Options, fit_logs

RESAMPLES = 150


def bootstrap(random, fit: Fit, block: int) -> tuple[float, float]:
    """The 95 % interval of A. block: how many neighbouring residuals are drawn at once."""
    x, y = fit.points
    curve = least_squares.curve_and_gradient(x, fit.profile.theta[-2:-1])[0][0]
    residuals = y - curve
    A = []
    for _ in range(RESAMPLES):
        # Enough blocks for all points; a block that goes beyond the end goes on at the start.
        starts = random.integers(len(x), size=-(-len(x) // block))
        drawn = (starts[:, None] + np.arange(block)).ravel()[: len(x)] % len(x)
        A.append(least_squares.variable_projection(x, curve + residuals[drawn], None)[0][0])
    return tuple(np.quantile(A, [0.025, 0.975]))


def width(interval) -> float:
    return interval[1] - interval[0]


def simulated(runs: int = 60) -> None:
    print(
        f"How often {runs} intervals hold A, in percent, and their median width. "
        "Noise .01, C_max/C_mid 4\n\n"
        "points  correlation    profile  width    one by one  width    blocks of 4  width"
    )
    for points, correlation in itertools.product((20, 40), (0.0, 0.6)):
        random = np.random.default_rng(0)
        cells = []
        for _ in range(runs):
            fit = fit_sigmoid(*simulate(random, points, 4, 0.01, correlation))
            intervals = fit.interval["A"], bootstrap(random, fit, 1), bootstrap(random, fit, 4)
            cells.append([(holds(interval, TRUTH["A"]), width(interval)) for interval in intervals])
        held = np.mean(cells, axis=0)[:, 0]
        widths = np.median(cells, axis=0)[:, 1]
        line = f"{points:6}{correlation:13.1f}"
        for share, width_of_A, letters in zip(held, widths, (11, 14, 15)):
            line += f"{100 * share:{letters}.0f}{width_of_A:7.3f}"
        print(line, flush=True)


def published() -> None:
    random = np.random.default_rng(0)
    ratios = []
    for name in ("loo", "recipes", "losses", "thinking"):
        variants, _ = fit_logs(runs_of_study(common.ROOT / "docs" / "study" / name), Options(()))
        for _, fit in itertools.chain(*variants.values()):
            interval = fit.interval["A"]
            cut_off = interval[1] >= 0.999  # at 1
            if fit.identified and not fit.fell and not cut_off:
                widths = [width(bootstrap(random, fit, block)) for block in (1, 4)]
                ratios.append([each / width(interval) for each in widths])
    low, middle, high = np.quantile(ratios, [0.1, 0.5, 0.9], axis=0)
    print(
        f"\nWidth beside that of the profile, {len(ratios)} published runs "
        "(median, and 80 % of them):"
    )
    for i, kind in enumerate(("one by one", "blocks of 4")):
        print(f"{kind:12} {middle[i]:.2f} ({low[i]:.2f} to {high[i]:.2f})")


if __name__ == "__main__":
    simulated()
    published()
