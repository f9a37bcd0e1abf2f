"""Draw fitted runs: one in detail, several side by side, settings against each other, the seeds of each setting.

A run comes as a pair: its Series (machinery/logs.py) and its Fit (fit_curve.py). Every figure is a PNG, written whole
or not at all.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t

from machinery.comparison import asymptote_of, standing
from machinery.files import whole_file
from machinery.logs import Series

Fit = Any  # fit_curve.Fit
Run = tuple[Series, Fit]

MARKERS = "os^Dv"  # of the first seed, the second, ...


def plot_runs(path: Path, runs: Sequence[Run], predict: Sequence[float] = ()) -> None:
    """Draw runs into a PNG: a single one in detail, several as curves; forecasts reach to the last of `predict`."""
    figure, (axes,) = _new_figure(1)
    alone = len(runs) == 1
    for i, (series, f) in enumerate(runs):
        _draw_run(axes, series, f, f"C{i % 10}", details=alone, predict=predict)
    series, f = runs[0]
    own = series.name if f.identified else f"{series.name}\n{f.warnings[0]}"
    _finish(axes, series, own if alone else "points, fitted curves, forecasts (dashed)")
    _save(path, figure)


def plot_compare(path: Path, settings: dict[str, list[Run]], comparisons: list[dict]) -> None:
    """Draw settings by name: their curves, and for those whose ceilings are not told apart the line whose slope is the
    efficiency, log F(R) = B log C (A.8). comparisons: what `compare` says of two settings each."""
    figure, (left, right) = _new_figure(2)
    alike = {name for c in comparisons if c["efficiency"] for name in c["settings"]}
    counted = {name: standing([f for _, f in runs]) for name, runs in settings.items()}
    common = float(np.mean([f.A for name in alike for f in counted[name]] or np.nan))
    for i, (setting, runs) in enumerate(settings.items()):
        _draw_setting(left, setting, runs, counted[setting], f"C{i % 10}")
        if setting in alike:
            _draw_efficiency(right, setting, counted[setting], common, f"C{i % 10}")
    series = next(iter(settings.values()))[0][0]
    _finish(left, series, "points (a marker for each seed), mean of the fitted curves, forecasts (dashed)")
    told = f"efficiency, with A held at {common:.3f}: the slope is B, height 1 is at C_mid"
    _finish(right, series, told if alike else "no two ceilings are alike: efficiency cannot be compared")
    right.axhline(1, color="0.45", lw=1, ls=":")
    right.set(yscale="log", ylabel="gain reached / gain left, (R - R0) / (A - R)")
    if len(comparisons) < 4:
        verdicts = [f"{' and '.join(c['settings'])}: {c['verdict'].split(' (')[0]}" for c in comparisons]
        figure.suptitle("\n".join(verdicts), fontsize=11)
    _save(path, figure)


def plot_seeds(path: Path, settings: dict[str, list[Run]]) -> None:
    """Draw settings by name into a PNG, a panel each: every seed with its own curve (Fig. 8a)."""
    figure, panels = _new_figure(len(settings))
    for axes, (setting, runs) in zip(panels, settings.items()):
        for i, ((series, f), marker) in enumerate(zip(runs, cycle(MARKERS))):
            seed = replace(series, name=series.name.removeprefix(f"{setting}-"))
            _draw_run(axes, seed, f, f"C{i % 10}", marker=marker)
        _finish(axes, runs[0][0], setting)
        axes.set_ylim(0, 1)
    for axes in panels[len(settings) :]:
        axes.remove()
    _save(path, figure)


# --- what stands on a panel ---------------------------------------------------------------------------------------


def _draw_run(axes, series: Series, f: Fit, color: str, details=False, predict=(), marker="o") -> None:
    """Points, curve, band, and the forecast to 4 times the last compute or to the last of `predict`; with details,
    all of it explained."""
    hidden = "" if details else "_"  # the legend leaves out what begins so
    fitted, shown = np.isin(series.x, f.x), series.x > 0
    for points, fill, text in ((shown & fitted, color, "points fitted"), (shown & ~fitted, "w", "left out")):
        if points.any():
            axes.plot(series.x[points], series.y[points], marker, ms=4, color=color, mfc=fill, label=hidden + text)
    end = max(4 * f.C_max, 1.2 * series.x[-1], *(1.2 * C for C in predict))
    past, future = np.geomspace(f.x[f.x > 0][0] / 1.5, f.C_max, 100), np.geomspace(f.C_max, end, 50)
    both = np.append(past, future)
    name = f"{series.name}: {'collapsed' if f.collapsed else f'A {f.asymptote}'}"
    axes.plot(past, f.predict(past), color=color, label="fitted curve" if details else name)
    if f.collapsed:  # then there is nothing to expect
        return
    axes.plot(future, f.predict(future), "--", color=color, label=f"{hidden}forecast")
    axes.fill_between(both, *f.band(both), color=color, alpha=0.18, lw=0, label=f"{hidden}95 % interval")
    if not details:
        return
    axes.axvspan(f.C_max, end, color="0.5", alpha=0.1, lw=0, label="beyond the data fitted")
    if f.identified:
        axes.axhline(f.A, color="C3", lw=1, label=f"asymptote A {f.asymptote}")
        axes.axvline(f.C_mid, color="C2", lw=1, ls="-.", label=f"C_mid {f.C_mid:.3g}: half of the gain")
    else:
        low = f.interval["A"][0]
        axes.axhline(low, color="C3", lw=1, ls="--", label=f"A not identified: above {low:.3f}")
    axes.axhline(f.R0, color="0.45", lw=1, ls=":", label=f"R0 {f.R0:.3f}: before training")


def _draw_setting(axes, setting: str, runs: list[Run], fits: list[Fit], color: str) -> None:
    """The points of all seeds, each with a marker of its own, and the mean of the curves `fits` with its 95 %
    t-interval; of a single curve its band. A forecast only where every seed identifies A."""
    for (series, _), marker in zip(runs, cycle(MARKERS)):
        later = series.x > 0
        axes.plot(series.x[later], series.y[later], marker, ms=3.5, color=color, alpha=0.45, mew=0)
    axes.plot([], [], color=color, label=f"{setting}: A {asymptote_of([f for _, f in runs])}")
    start, end = min(f.x[f.x > 0][0] for f in fits), min(f.C_max for f in fits)
    parts = [(np.geomspace(start, end, 100), "-")]
    if all(f.identified for f in fits):
        parts.append((np.geomspace(end, 2 * end, 50), "--"))
    for C, style in parts:
        curves = np.array([f.predict(C) for f in fits])
        low, high = fits[0].band(C)
        if len(fits) > 1:
            half = stdtrit(len(fits) - 1, 0.975) * curves.std(0, ddof=1) / np.sqrt(len(fits))
            low, high = curves.mean(0) - half, curves.mean(0) + half
        axes.plot(C, curves.mean(0), style, color=color)
        if not any(f.collapsed for f in fits):
            axes.fill_between(C, np.maximum(low, 0), np.minimum(high, 1), color=color, alpha=0.12, lw=0)


def _draw_efficiency(axes, setting: str, fits: list[Fit], A: float, color: str) -> None:
    """The points of all seeds as F(R) = (R - R0) / (A - R), with A held, and the line (C / C_mid)^B through them."""
    for f, marker in zip(fits, cycle(MARKERS)):
        inside = (f.y > f.R0) & (f.y < A)
        x, y = f.x[inside], f.y[inside]
        axes.plot(x, (y - f.R0) / (A - y), marker, ms=3.5, color=color, alpha=0.45, mew=0)
    B, C_mid = np.exp(np.mean([f.efficiency_at(A)[0] for f in fits], axis=0))
    x = fits[0].x
    axes.plot(x, (x / C_mid) ** B, color=color, label=f"{setting}: slope B {B:.2f}, C_mid {C_mid:.3g}")


# --- figures ------------------------------------------------------------------------------------------------------


def _new_figure(panels: int):
    """A figure and its panels, at most three beside each other."""
    from matplotlib.figure import Figure  # here, so that a fit without a plot starts fast

    rows = -(-panels // 3)
    figure = Figure(figsize=(8 if panels == 1 else 13, max(5, 3.6 * rows)), layout="constrained")
    return figure, figure.subplots(rows, -(-panels // rows), squeeze=False).flatten()


def _finish(axes, series: Series, title: str) -> None:
    axes.set(xscale="log", xlabel=f"compute: {series.x_name} (log)", ylabel=f"pass rate: {series.y_name}")
    axes.set_title(title, fontsize=10, wrap=True)
    axes.tick_params(axis="x", which="minor", labelsize=6)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _save(path: Path, figure) -> None:
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=110)
