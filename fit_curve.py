"""Fit the ScaleRL curve to the log of any RL run, and say how far to trust it.

    python fit_curve.py runs/NAME                                          # a run of ours
    python fit_curve.py log.csv --x gpu_hours --y pass_rate --predict 1e5 --plot fit.png
    python fit_curve.py seed0.csv seed1.csv seed2.csv --seeds              # several seeds of one setting
    python fit_curve.py --compare base=b0.csv,b1.csv scalerl=s0.csv,s1.csv --plot compare.png

The curve (Khatri et al., arXiv 2510.13786, sec. 2.1) is a sigmoid in log compute,

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

with A the asymptote, B the exponent (efficiency), C_mid the compute at half of the gain, and R0 the pass rate before
training. What the data does not carry is not reported: a run that has barely passed its midpoint has no asymptote.

How the best curve and the ends of the intervals are found is in machinery/least_squares.py; the pooling of seeds and
the comparison of settings (A.8) in machinery/comparison.py; the reading of logs in machinery/logs.py. Dimensions: n
points of a run.
"""

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

from curve.columns import Series
from curve.comparison import compare, seeds, with_interval
from curve.files import write_whole
from curve.fit import Fit, fit_sigmoid
from curve.flags import read_flags, run_command
from curve.forecast import first_half
from curve.logs import read_log
from curve.plots import FORMATS, plot_compare, plot_runs
from curve.report import describe, report

# --- the command --------------------------------------------------------------------------------------------------

Runs = list[tuple[Series, Fit]]  # of one setting


@dataclass(frozen=True)
class Fitting:
    """How logs are read and fitted."""

    x: str | None = None  # the column of compute; by default guessed, and said
    y: str | None = None  # the column of the pass rate, or several with commas, or all; by default guessed, and said
    where: str | None = None  # only the records with COLUMN=VALUE; several with commas
    percent: bool = False  # the pass rate is in percent
    fit_from: float = 0.0  # leave out the points before this compute
    fit_to: float = float("inf")  # leave out the points after this compute
    r0: Literal["first", "free"] | float = "first"  # pass rate before training: the first point, fitted, or this value
    method: Literal["varpro", "paper"] = "varpro"  # least squares, or the published grid
    predict: tuple[float, ...] = ()  # forecast at these computes
    json: Path | None = None  # write all results to this file


@dataclass(frozen=True, kw_only=True)
class Options(Fitting):
    """What the command takes: its logs, how to fit them, and what to make of them."""

    logs: tuple[str, ...]  # LOG, FILE:COLUMN or -; with --compare settings, [NAME=]LOG[,LOG...]: seeds with commas
    seeds: bool = False  # the logs are seeds of one setting
    compare: bool = False  # the logs are settings, which are compared two by two
    plot: Path | None = None  # draw the curves into this file: .png, .pdf or .svg
    title: str | None = None  # of the picture
    label: str | None = None  # names of the runs, with commas, instead of those of their files
    width: float | None = None  # of the picture, in inches
    power_law: bool = False  # the picture has the power law, too
    held_out: bool = False  # the picture has the forecast of the later points from the first half of the compute


def first_commands() -> str:
    """Three commands that work from the present folder, for those who come without a log."""
    script, simulated, run, one, other = (
        os.path.relpath(Path(__file__).parent / name)
        for name in ("fit_curve.py", "data/examples/simulated.csv", "docs/study/loo/scalerl-seed0/log.jsonl",
                     "docs/study/recipes/dapo-seed2", "docs/study/recipes/grpo-seed2")
    )  # fmt: skip
    return f"""These commands work at once:

  python {script} {simulated} --predict 1e16
  python {script} {run} --plot fit.png
  python {script} --compare {one} {other}

then: python {script} YOUR_LOG. `--help` has all flags. numpy, scipy and matplotlib are all that must be installed."""


def read_options(arguments: list[str]) -> Options:
    """The options of the command; logs may stand before and after the flags. ValueError for what cannot be."""
    options = read_flags(Options, arguments, description=f"{__doc__}\n{first_commands()}")
    if not options.logs:
        raise ValueError("no log is named; for example: python fit_curve.py data/examples/simulated.csv")
    if options.seeds and options.compare:
        raise ValueError("choose one: --seeds of one setting, or --compare, where commas join the seeds of a setting")
    if not all(C > 0 for C in options.predict):
        raise ValueError("--predict: compute must be positive")
    for target in (options.plot, options.json):
        if target is not None and not target.parent.is_dir():
            raise ValueError(f"{target}: there is no such folder to write to")
    if options.plot and options.plot.suffix.lower() not in FORMATS:
        raise ValueError(f"--plot {options.plot}: the name must end in {', '.join(FORMATS)}")
    if options.width is not None and not 2 <= options.width <= 40:
        raise ValueError(f"--width {options.width:g}: expected 2 to 40 inches")
    if options.label and options.compare:
        raise ValueError("--label names runs; the settings of --compare are named by NAME=LOG")
    return options


def named_logs(options: Options) -> list[tuple[str, str]]:
    """(setting, path) of each log named; "" is the setting of a run of its own."""
    logs = []
    for argument in options.logs:
        setting, paths = "", [argument]
        if options.compare and not Path(argument).exists():
            name, text = re.fullmatch(r"(?:([^=,/]+)=)?(.*)", argument).groups()
            setting, paths = name or (text if "," in text else ""), text.split(",")
        logs += [(setting, path) for path in paths]
    return logs


def fit_logs(logs: Sequence[tuple[str, str | Path]], fitting: Fitting) -> tuple[dict[str, Runs], list[str]]:
    """By setting the fitted runs of these logs, (setting, path) each; and why the others cannot be fitted."""
    settings, unfit = {}, []
    how = fitting.r0, fitting.fit_from, fitting.fit_to, fitting.method
    for setting, path in logs:
        for series in read_log(path, fitting.x, fitting.y, fitting.percent, fitting.where):
            try:
                f = fit_sigmoid(series.x, series.y, *how, series.num_examples)
            except ValueError as error:
                run = "" if series.name in str(path) else f"{series.name}: "
                unfit.append(f"{path}: {run}{error}")
                continue
            own = series.name if series.name not in settings else f"{path}: {series.name}"
            settings.setdefault(setting or own, []).append((series, f))
    return settings, unfit


def write_json(path: Path, results: dict) -> None:
    write_whole(path, json.dumps(results, indent=1, allow_nan=False) + "\n")


def main(arguments: list[str]) -> int:
    if not arguments:
        print(first_commands())
        return 0
    options = read_options(arguments)
    settings, unfit = fit_logs(named_logs(options), options)
    if unfit and not (options.compare and len(settings) > 1):
        raise ValueError(unfit[0])
    runs = [run for its_runs in settings.values() for run in its_runs]
    if options.label:
        names = options.label.split(",")
        if len(names) != len(runs):
            raise ValueError(f"--label has {len(names)} names for {len(runs)} runs")
        runs = [(replace(series, name=name), f) for name, (series, f) in zip(names, runs)]
    results = {"runs": [report(*run, options.predict) for run in runs]}
    text = [f"{run[0].name}\n{describe(*run, its)}" for run, its in zip(runs, results["runs"])]
    if options.seeds:
        pooled = results["seeds"] = seeds([f for _, f in runs])
        said = "not all identify A, so there is none for the setting"
        if pooled:
            means = ", ".join(f"{name} {with_interval(*its, '.4g')}" for name, its in pooled.items())
            said = f"mean and 95 % t-interval: {means}"
        text.append(f"{len(runs)} seeds: {said}")
    if options.compare:
        if len(settings) < 2:
            raise ValueError("--compare needs two settings; for a folder of runs: python study.py tables FOLDER")
        fits = {name: [f for _, f in its_runs] for name, its_runs in settings.items()}
        results["comparisons"] = [compare(two, [fits[name] for name in two]) for two in combinations(fits, 2)]
        text += [f"{' and '.join(c['settings'])}: {c['verdict']}" for c in results["comparisons"]]
        text += [f"left out, since it cannot be fitted: {reason}" for reason in unfit]
        results["left_out"] = unfit
    look = {"title": options.title} | ({"width": options.width} if options.width else {})
    if options.plot and options.compare:
        plot_compare(options.plot, settings, results["comparisons"], **look)
    elif options.plot:
        early = [first_half(*run) for run in runs] if options.held_out else []
        plot_runs(options.plot, runs, options.predict, power_law=options.power_law, early=early, **look)
    if options.json:
        write_json(options.json, results)
    print("\n\n".join(text))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `fit_curve.py .. | head` ends quietly
    run_command(main)
