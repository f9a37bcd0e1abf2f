"""Draw fitted runs: one in detail, several side by side, settings against each other, the seeds of each setting.

A run comes as a pair: its Series (machinery/columns.py) and its Fit (fit_curve.py). The suffix of the file is its
format (FORMATS). A figure is written whole or not at all. `title` replaces its own title, `width` is in inches.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t

from curve.columns import Series
from curve.comparison import asymptote_of, standing
from curve.files import whole_file

Fit = Any  # fit_curve.Fit
Run = tuple[Series, Fit]

MARKERS = "os^Dv"  # of the first seed, the second, ...
FORMATS = (".png", ".pdf", ".svg")
# Of the columns of our own logs.
COMPUTE_UNITS = {"compute_flops": "FLOPs", "compute_tokens": "sampled tokens", "compute_device_hours": "device-hours"}
MOST_BARS = 200  # points; of more, error bars would be a second band


def plot_runs(
    path: Path,
    runs: Sequence[Run],
    predict: Sequence[float] = (),
    *,
    title: str | None = None,
    width: float = 8,
    power_law: bool = False,
    early: Sequence[Fit | None] = (),
) -> None:
    """Draw runs: a single one in detail, several as curves; forecasts reach to the last of `predict`. power_law: with
    the power law of each run. early: with what these fits, one of the first part of each run, said of the rest."""
    figure, (axes,) = _new_figure(1, width)
    alone = len(runs) == 1
    for i, (series, f) in enumerate(runs):
        _draw_run(axes, series, f, f"C{i % 10}", details=alone, predict=predict)
        if power_law:
            C, (A, D, B) = np.geomspace(f.x[f.x > 0][0], _end(series, f, predict), 100), f.power_law
            label = "power law" if alone else "_power law"
            axes.plot(C, A - D / C**B, ":", color="C1" if alone else f"C{i % 10}", label=label)
    for i, ((series, _), f) in enumerate(zip(runs, early)):
        if f is None:
            continue
        C = np.geomspace(f.C_max, series.x[-1], 50)
        color, label = ("C4", f"forecast from the points up to {f.C_max:.3g}") if alone else (f"C{i % 10}", "_early")
        axes.plot(C, f.predict(C), "-.", color=color, label=label)
        axes.fill_between(C, *f.band(C), color=color, alpha=0.25, lw=0)
    series, f = runs[0]
    own = series.name if f.identified else f"{series.name}\n{f.warnings[0]}"
    own = own if alone else "points, fitted curves, forecasts (dashed)"
    _finish(axes, [series for series, _ in runs], own if title is None else title)
    _save(path, figure)


def plot_compare(
    path: Path, settings: dict[str, list[Run]], comparisons: list[dict], title: str | None = None, width: float = 13
) -> None:
    """Draw settings by name: their curves, and for those whose ceilings are not told apart the line whose slope is the
    efficiency, log F(R) = B log C (A.8). comparisons: what `compare` says of two settings each."""
    alike = {name for c in comparisons if c["efficiency"] for name in c["settings"]}
    figure, panels = _new_figure(2 if alike else 1, width if alike else min(width, 8))
    counted = {name: standing([f for _, f in runs]) for name, runs in settings.items()}
    common = float(np.mean([f.A for name in alike for f in counted[name]] or np.nan))
    for i, (setting, runs) in enumerate(settings.items()):
        _draw_setting(panels[0], setting, runs, counted[setting], f"C{i % 10}")
        if setting in alike:
            _draw_efficiency(panels[1], setting, counted[setting], common, f"C{i % 10}")
    every = [series for runs in settings.values() for series, _ in runs]
    _finish(panels[0], every, "points (a marker for each seed), mean of the fitted curves, forecasts (dashed)")
    if alike:
        _finish(panels[1], every, f"efficiency, with A held at {common:.3f}: the slope is B, height 1 is at C_mid")
        panels[1].axhline(1, color="0.45", lw=1, ls=":")
        panels[1].set(yscale="log", ylabel="gain reached / gain left,\n(R - R0) / (A - R)")
    verdicts = [f"{' and '.join(c['settings'])}: {c['verdict'].split(' (')[0]}" for c in comparisons]
    figure.suptitle(
        "\n".join(verdicts if len(verdicts) < 4 else ()) if title is None else title, fontsize=11, wrap=True
    )
    _save(path, figure)


def plot_seeds(path: Path, settings: dict[str, list[Run]]) -> None:
    """Draw settings by name, a panel each: every seed with its own curve (Fig. 8a)."""
    figure, panels = _new_figure(len(settings), 8 if len(settings) == 1 else 13)
    for axes, (setting, runs) in zip(panels, settings.items()):
        for i, ((series, f), marker) in enumerate(zip(runs, cycle(MARKERS))):
            seed = replace(series, name=series.name.removeprefix(f"{setting}-"))
            _draw_run(axes, seed, f, f"C{i % 10}", marker=marker)
        _finish(axes, [series for series, _ in runs], setting)
        axes.set_ylim(0, 1)
    for axes in panels[len(settings) :]:
        axes.remove()
    _save(path, figure)


# --- what stands on a panel ---------------------------------------------------------------------------------------


def _end(series: Series, f: Fit, predict: Sequence[float]) -> float:
    """The compute at which the curve of a run ends on its panel."""
    return max(4 * f.C_max, 1.2 * series.x[-1], *(1.2 * C for C in predict))


def _draw_run(axes, series: Series, f: Fit, color: str, details=False, predict=(), marker="o") -> None:
    """Points, curve, band, and the forecast to 4 times the last compute or to the last of `predict`; with details,
    all of it explained."""
    hidden = "" if details else "_"  # the legend leaves out what begins so
    fitted, shown = np.isin(series.x, f.x), series.x > 0
    for points, fill, text in ((shown & fitted, color, "points fitted"), (shown & ~fitted, "w", "left out")):
        if points.any():
            axes.plot(series.x[points], series.y[points], marker, ms=4, color=color, mfc=fill, label=hidden + text)
    if series.num_examples and shown.sum() <= MOST_BARS:
        x, y = series.x[shown], series.y[shown]
        half = 1.96 * np.sqrt(y * (1 - y) / series.num_examples)
        text = f"{hidden}95 % of {series.num_examples:.0f} answers"
        axes.errorbar(x, y, half, fmt="none", ecolor=color, elinewidth=0.7, alpha=0.6, label=text)
    end = _end(series, f, predict)
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
    """The points of all seeds, each with a marker of its own, and the mean of the curves `fits`. Its band is a 95 %
    t-interval; of two seeds it lies between their curves, since two bound no mean, and of one it is the curve's own. A
    forecast only where every seed identifies A."""
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
        low, high = fits[0].band(C) if len(fits) == 1 else (curves.min(0), curves.max(0))
        if len(fits) > 2:
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


def _new_figure(panels: int, width: float):
    """A figure and its panels, at most three beside each other."""
    from matplotlib.figure import Figure  # here, so that a fit without a plot starts fast

    rows = -(-panels // 3)
    columns = -(-panels // rows)
    figure = Figure(figsize=(width, 1), layout="constrained")  # the legends decide the height
    return figure, figure.subplots(rows, columns, squeeze=False).flatten()


def _finish(axes, series: Sequence[Series], title: str) -> None:
    """Labels, and the legend below the panel, where it covers no curve."""
    from matplotlib.transforms import ScaledTranslation

    x_names, y_names = {its.x_name.lower() for its in series}, {its.y_name for its in series}
    compute = "" if len(x_names) > 1 else f" ({COMPUTE_UNITS.get(series[0].x_name, series[0].x_name)})"
    pass_rate = "" if len(y_names) > 1 or y_names == {"pass_rate"} else f" ({series[0].y_name})"
    axes.set(xlabel=f"compute{compute}", ylabel=f"pass rate{pass_rate}", xscale="log")
    figure, grid = axes.figure, axes.get_subplotspec().get_gridspec()
    width, texts = figure.get_figwidth() / grid.ncols, axes.get_legend_handles_labels()[1]
    wrapped = [textwrap.fill(line, int(12 * width - 8)) for line in title.split("\n")]
    axes.set_title("\n".join(wrapped), fontsize=10)
    axes.tick_params(axis="x", which="minor", labelsize=6)
    axes.grid(alpha=0.25)
    columns = max((n for n in range(1, len(texts) + 1) if _legend_width(texts, n) < width - 0.2), default=1)
    height = min(4.4, max(2.4, 0.6 * width)) + 0.17 * (-(-len(texts) // columns) + len(wrapped))
    figure.set_figheight(max(figure.get_figheight(), grid.nrows * height))
    if texts:
        below = axes.transAxes + ScaledTranslation(-0.55, -0.5, figure.dpi_scale_trans)  # inches
        axes.legend(fontsize=8, ncols=columns, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below)


def _legend_width(texts: list[str], columns: int) -> float:
    """About how many inches a legend takes."""
    return sum(0.55 + 0.06 * max(map(len, part)) for part in np.array_split(texts, columns))


def _save(path: Path, figure) -> None:
    from matplotlib import rc_context

    with whole_file(path) as partial, rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):  # text stays text
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=110)
