"""What a fit says if compute is counted in FLOPs, in sampled tokens or in device-hours.

    python benchmarks/axes.py

Of each published study (docs/study), and of all of them (a run that stands in several counts once):
the runs that did not fall. How many of them identify A, over each measure of compute. The median A
of those that identify it over all three, beside the median of their ends (means of the last three
validations). The size of the residuals over tokens and over device-hours, divided by that over
FLOPs, in the median.

At the end: the sigmoid through the validations of the first half of the tokens, over each measure,
and how far it misses the end of the run.
"""

import common
import numpy as np

from curve.columns import Reading, Series
from curve.fit import Fit, fit_sigmoid
from curve.logs import runs_of_study
from fit_curve import Options, fit_logs

MEASURES = ("compute_flops", "compute_tokens", "compute_device_hours")
FLOPS, TOKENS, HOURS = range(3)
LEAST_POINTS = 6  # that are fitted of a half

Run = list[tuple[Series, Fit]]  # the points of a run with their Fit, over each of MEASURES


def runs_of(folder) -> list[Run]:
    """The runs of a study that did not fall."""
    over = []  # each of MEASURES: points and Fit by the name of the run
    for measure in MEASURES:
        variants, _ = fit_logs(runs_of_study(folder), Options((), Reading(x=measure)))
        fitted = [run for of_variant in variants.values() for run in of_variant]
        over.append({series.name: (series, fit) for series, fit in fitted})
    runs = [[of_measure[name] for of_measure in over] for name in over[TOKENS]]
    return [run for run in runs if not any(fit.fell for _, fit in run)]


def line(name: str, runs: list[Run]) -> None:
    """Print a line of the table."""
    fits = [[fit for _, fit in run] for run in runs]
    identified = np.array([[fit.identified for fit in of_run] for of_run in fits])
    rms = np.array([[fit.rms for fit in of_run] for of_run in fits])
    by_all = [of_run for of_run in fits if all(fit.identified for fit in of_run)]

    # How many identify A, and what A is. Only runs that identify it over all measures can be
    # compared.
    cells = [*identified.sum(0), len(by_all)]
    if by_all:
        A = np.array([[fit.A for fit in of_run] for of_run in by_all])
        ends = [of_run[FLOPS].end for of_run in by_all]
        middles = [*np.median(A, 0), np.median(ends)]
        cells += [f"{value:.3f}" for value in middles]
    else:
        cells += ["-"] * 4
    # How well the sigmoid fits, beside its fit over FLOPs.
    for measure in (TOKENS, HOURS):
        ratio = np.median(rms[:, measure] / rms[:, FLOPS])
        cells.append(f"{ratio:.2f}")

    print(f"{name:12}{len(runs):5}" + "".join(f"{cell:>8}" for cell in cells))


def from_the_same_points(runs: list[Run]) -> None:
    """Print how far the sigmoid of the first half misses the end, over each measure."""
    errors = []
    for run in runs:
        tokens = run[TOKENS][0].x
        half = np.sum(tokens <= tokens[-1] / 2)
        if half < LEAST_POINTS + 1:  # the first gives R0
            continue
        # The points are the same over each measure, and so is the end. Only the axis differs.
        fits = [fit_sigmoid(series.x[:half], series.y[:half]) for series, _ in run]
        foretold = [fit.predict(series.x[-3:]).mean() for fit, (series, _) in zip(fits, run)]
        errors.append(np.array(foretold) - run[FLOPS][1].end)
    errors = np.array(errors)
    median = np.median(np.abs(errors), 0)
    rms = np.sqrt(np.square(errors).mean(0))
    print(f"\nThe end of {len(errors)} runs from the same points, the first half of the tokens:")
    for i, measure in enumerate(MEASURES):
        print(f"{measure:22} median error {median[i]:.4f}, root mean square {rms[i]:.4f}")


def main() -> None:
    print(f"{'':17}{'identify A':>24}{'':8}{'A':>24}{'':8}{'residuals':>16}")
    heads = "FLOPs tokens hours by-all FLOPs tokens hours end tokens hours".split()
    print(f"{'study':12}{'runs':>5}" + "".join(f"{head:>8}" for head in heads))

    # Runs that were copied into several studies have the same tokens at each validation.
    distinct = {}
    for folder in sorted((common.ROOT / "docs" / "study").iterdir()):
        runs = runs_of(folder)
        line(folder.name, runs)
        distinct |= {tuple(run[TOKENS][0].x): run for run in runs}
    every = list(distinct.values())
    line("all", every)
    from_the_same_points(every)


if __name__ == "__main__":
    main()
