"""How well a run's beginning foretold its end: one picture of some runs, and a table.

    python -m docs.forecasts docs/study/real/scalerl-seed0 docs/study/real/scalerl-seed1 \\
        docs/study/real/scalerl-seed2 --plot docs/pictures/forecast.png

The picture has the points of the first half of each run (filled), the sigmoid that is fitted to
them, the forecast with its interval, and the points that came afterwards (hollow). The table says
what the four rules of curve/forecast.py made of a quarter, of a half and of three quarters.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from curve.columns import Series
from curve.fit import fit_sigmoid, power_law
from curve.flags import option, read_flags, run_command
from curve.forecast import FORECASTERS, each, held_out
from curve.logs import read_log
from curve.plots import COMPUTE_UNITS, save
from curve.report import markdown

PARTS = {"a quarter": 1 / 4, "a half": 1 / 2, "three quarters": 3 / 4}  # of the compute
HEAD = ("run", "from", "forecast", "95 %", "sigmoid", "power law", "last value", "what came")


@dataclass(frozen=True)
class Command:
    """Draw and tabulate what parts of these runs foretold."""

    logs: tuple[str, ...] = option(help="one run each, as fit_curve.py takes it")
    plot: Path | None = option(None, "draw into this file: .png, .pdf or .svg")


def table_of(runs: list[Series]) -> list[tuple]:
    """Rows of HEAD: each forecast of the mean of the run's last three points, by the part of the
    run that it is made from."""
    rows = []
    for series in runs:
        for words, part in PARTS.items():
            try:
                test = held_out(series.x, series.y, fit_to=part * series.x[-1])
            except ValueError as error:
                rows.append((series.name, words, str(error), *["-"] * 5))
                continue
            figures = [f"{test[name]:.3f}" for name in FORECASTERS]
            low, high = test["interval"]
            interval = f"{low:.3f} to {high:.3f}" + " (missed)" * (not low <= test["came"] <= high)
            rows.append(
                (series.name, words, figures[0], interval, *figures[1:], f"{test['came']:.3f}")
            )
    return rows


def draw(axes, series: Series, color: str, label: str) -> None:
    """One run: what its first half foretold, and what came."""
    half, end = series.x[-1] / 2, series.x[-1]
    early = series.x <= half
    for points, fill in ((early, color), (~early, "w")):
        axes.plot(series.x[points], series.y[points], "o", color=color, mfc=fill, ms=5)

    try:
        fit = fit_sigmoid(series.x, series.y, fit_to=half)
    except ValueError as error:
        raise ValueError(f"{series.name}, first half: {error}") from None
    past = np.linspace(end / 1000, half, 200)
    axes.plot(past, fit.predict(past), color=color, label=label)
    future = np.linspace(half, end, 50)
    later = each(fit, future)
    axes.plot(future, later.value, "--", color=color)
    axes.fill_between(future, later.low, later.high, color=color, alpha=0.13, lw=0)
    axes.plot(future, power_law(future, *fit.power_law), ":", color=color, lw=1)
    axes.plot(future, np.full(len(future), fit.y[-1]), "-.", color=color, lw=0.8)


def picture_of(runs: list[Series]):
    """All runs in one figure of matplotlib."""
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axes = figure.subplots()
    for number, series in enumerate(runs):
        draw(axes, series, f"C{number}", series.name)
    middle = np.mean([series.x[-1] / 2 for series in runs])
    axes.axvline(middle, color="0.5", lw=0.8)
    axes.annotate(" half of the compute", (middle, 0.45), xycoords=("data", "axes fraction"))
    for style, name in (("--", "forecast, 95 %"), (":", "power law"), ("-.", "last value")):
        axes.plot([], [], style, color="0.3", lw=1, label=name)
    for fill, name in (("0.3", "fitted"), ("w", "came afterwards")):
        axes.plot([], [], "o", color="0.3", mfc=fill, ms=5, label=name)
    unit = COMPUTE_UNITS.get(runs[0].x_name, runs[0].x_name)
    axes.set(xlabel=f"compute ({unit})", ylabel="held-out pass rate", ylim=(0, 1), xlim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, ncols=2, loc="lower right")
    return figure


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError or OSError if a log gives no curve."""
    command = read_flags(Command, arguments, description=__doc__)
    if not command.logs:
        raise ValueError("no log is named: python -m docs.forecasts LOG ...")
    runs = [series for log in command.logs for series in read_log(log)]
    print(markdown([dict(zip(HEAD, row)) for row in table_of(runs)]))
    if command.plot:
        save(command.plot, picture_of(runs))
    return 0


if __name__ == "__main__":
    run_command(main)
