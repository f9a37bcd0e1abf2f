"""Fit the ScaleRL curve to the log of any RL run, and say how far to trust it.

    python fit_curve.py data/examples/simulated.csv --predict 1e16 --plot fit.png
    python fit_curve.py docs/study/loo/scalerl-seed0.jsonl          # a run of ours; also runs/NAME
    python fit_curve.py --compare docs/study/loo                    # the runs of a study
    python fit_curve.py --compare base=b0.csv,b1.csv scalerl=s0.csv,s1.csv --x gpu_hours --y acc

The pass rate R after compute C is a sigmoid in log C (Khatri et al., arXiv 2510.13786, sec. 2.1):

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)      the same:  (R - R0) / (A - R) = (C / C_mid)^B

    A      asymptote: the pass rate that unlimited compute would approach
    B      exponent, or efficiency: how steeply the gain from R0 to A comes around C_mid
    C_mid  the compute at which half of the gain is made
    R0     the pass rate before training

What happens, in this order:

    1. read       two columns of a log become the points of a curve (curve/logs.py)
    2. fit        A, B and C_mid of least squares, with R0 held at the first point (curve/fit.py)
    3. intervals  of the curves that fit about as well; wider if neighbours correlate
                  (curve/fit.py)
    4. judge      what the data does not show is not reported, such as an asymptote after half a
                  rise (curve/fit.py)
    5. forecast   at more compute, beside a power law and the last value; and from the first half
                  (curve/forecast.py)
    6. compare    each variant with the first: ceilings, then efficiency (A.8; curve/comparison.py)
    7. report     in words and as a table (curve/report.py), as a picture (curve/plots.py), as JSON

docs/fitting.md says how to read what comes out.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Literal

from curve.comparison import compare_with_first, fit_together
from curve.files import write_whole
from curve.fit import Variants, fit_series
from curve.flags import option, read_flags, run_command
from curve.logs import Reading, log_in, natural_order, read_log
from curve.plots import plot_variants
from curve.report import caption, describe, markdown, report, variants_table


@dataclass(frozen=True)
class Options:
    """How logs are fitted and compared."""

    logs: tuple[str, ...] = option(
        help="LOG or -; with --compare variants, [NAME=]LOG[,LOG...]: seeds with "
        "commas; or the folder of a study"
    )
    reading: Reading = Reading()
    fit_from: float = option(0.0, "leave out the points before this compute")
    fit_to: float = option(float("inf"), "leave out the points after this compute")
    r0: Literal["first", "free"] | float = option(
        "first", "pass rate before training: the first point, fitted, or this value"
    )
    predict: tuple[float, ...] = option((), "forecast at these computes; the table has the first")
    compare: bool = option(False, "the logs are variants, and each is compared with the first")
    json: Path | None = option(None, "write all results to this file")
    plot: Path | None = option(None, "draw the curves into this file: .png, .pdf or .svg")


def runs_of_study(folder: Path) -> list[tuple[str, Path]]:
    """(variant, log) of the runs in a folder that has no log itself: of each folder in it that has
    one, and of each VARIANT-seedN.jsonl. They come in natural order, but `scalerl` first. The
    variant of a name without a seed is ""."""
    if not os.path.isdir(folder) or log_in(folder):  # a list of logs may be too long for a path
        return []
    logs = [*filter(log_in, folder.glob("*/")), *folder.glob("*-seed*.jsonl")]
    logs.sort(key=lambda log: (not log.name.startswith("scalerl-seed"), natural_order(log)))
    return [(re.fullmatch(r"(.*)-seed\d+(\.jsonl)?|.*", log.name)[1] or "", log) for log in logs]


def named_logs(options: Options) -> list[tuple[str, str | Path]]:
    """(variant, log) of each log; the variant is "" if the log has none."""
    logs = []
    for argument in options.logs:
        study = runs_of_study(Path(argument))
        name, text = re.fullmatch(r"(?:([^=,/]+)=)?(.*)", argument).groups()
        paths = text.split(",")
        if study and len(options.logs) > 1:
            # The same variant of two studies may not be the same: each has its folder in its name.
            logs += [(name and str(Path(argument) / name), log) for name, log in study]
        elif study or os.path.exists(argument):
            logs += study or [("", argument)]
        elif "" in paths:
            raise ValueError(f"{argument!r} names no log: write NAME=LOG,LOG")
        else:  # seeds without a name have their text as one
            logs += [(name or (text if paths[1:] else ""), path) for path in paths]
    return logs


def fit_logs(
    logs: Sequence[tuple[str, str | Path]], options: Options
) -> tuple[Variants, list[str]]:
    """The fitted runs of these logs, (variant, log) each, by variant; and the reasons why others
    cannot be fitted. A run whose variant is "" is a variant by itself."""
    how = (options.r0, options.fit_from, options.fit_to)
    variants = {}
    seen = set()  # names of curves
    unfit = []
    for variant, path in logs:
        try:
            curves = read_log(path, **vars(options.reading))
        except (ValueError, OSError) as error:
            unfit.append(str(error))
            continue
        names = {series.name for series in curves}  # the seeds in a log have one name
        for series in curves:
            # Columns of one log are not seeds of each other.
            name = f"{variant}: {series.name}" if variant and len(names) > 1 else variant
            if series.name in seen:
                series = replace(series, name=f"{path}: {series.name}")
            try:
                fit = fit_series(series, *how)
            except ValueError as error:
                unfit.append(f"{path}: {series.y_name}: {error}")
                continue
            variants.setdefault(name or series.name, []).append(fit)
        seen |= names
    return variants, unfit


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status 0; ValueError or OSError, in one sentence, for wrong
    options or logs."""
    options = read_flags(Options, arguments, description=__doc__)
    # A folder of runs is compared.
    if len(options.logs) == 1 and runs_of_study(Path(options.logs[0])):
        options = replace(options, compare=True)
    if not all(0 < C < float("inf") for C in options.predict):
        raise ValueError("--predict: compute must be positive and finite")

    # Every run is fitted alone. The seeds of a variant may then share one A.
    variants, unfit = fit_logs(named_logs(options), options)
    if not variants:
        raise ValueError("; and ".join(unfit))
    fits = sum(variants.values(), [])
    reports = [report(fit, options.predict) for fit in fits]
    variants = {variant: fit_together(seeds) for variant, seeds in variants.items()}
    comparisons = compare_with_first(variants) if options.compare else []
    rows = variants_table(variants, comparisons, *options.predict[:1])

    # In words: the runs, or the table of the variants with the reasons for a single verdict.
    paragraphs = [
        f"{fit.series.name}\n{describe(fit, numbers)}" for fit, numbers in zip(fits, reports)
    ]
    if options.compare:
        paragraphs = [f"{caption(fits)}\n\n{markdown(rows)}"]
    if len(comparisons) == 1:
        paragraphs.append(f"{' and '.join(comparisons[0].variants)}: {comparisons[0].sentence}")
    paragraphs += [f"left out, since it gives no curve: {reason}" for reason in unfit]

    # Into files. If one cannot be written, nothing is printed.
    if options.plot:
        plot_variants(options.plot, variants, comparisons, options.predict)
    if options.json:
        results = {"runs": reports, "variants": rows, "comparisons": comparisons, "left_out": unfit}
        # Warnings and comparisons; a curve of one's own may give numbers of numpy.
        known = lambda part: asdict(part) if is_dataclass(part) else part.item()
        text = json.dumps(results, indent=1, allow_nan=False, default=known)
        write_whole(options.json, text + "\n")
    print("\n\n".join(paragraphs))
    return 0


def command() -> None:
    """What `python fit_curve.py` runs, and `fit-curve` after `pip install .`."""
    run_command(main)


if __name__ == "__main__":
    command()
