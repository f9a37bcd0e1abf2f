"""Draw fitted runs: one in detail, or variants against each other.

The suffix of the file is its format: .png, .pdf, .svg, or another of matplotlib. A figure is
written whole or not at all.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from curve.comparison import Comparison, asymptote_of
from curve.files import whole_file
from curve.fit import Fit, Variants, beyond_0, with_interval
from curve.forecast import each, early_fits
from curve.least_squares import Array

# What the columns of our own logs count.
COMPUTE_UNITS = {
    "compute_flops": "FLOPs",
    "compute_tokens": "sampled tokens",
    "compute_device_hours": "device-hours",
}
LABEL_WIDTH = 110  # characters in a line of the legend


def plot_variants(
    path: Path,
    variants: Variants,
    comparisons: Sequence[Comparison] = (),
    predict: Sequence[float] = (),
) -> None:
    """Draw the curves of variants, and beside their names the verdicts. A single run is drawn in
    detail, with a forecast to the last compute of `predict`. ValueError if matplotlib is
    missing."""
    try:
        from matplotlib import rc_context  # here, so that a fit without a plot starts fast
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None
    fits = sum(variants.values(), [])
    # Text stays text in a PDF or SVG, and $ in a name begins no formula.
    as_text = {"pdf.fonttype": 42, "svg.fonttype": "none", "text.parse_math": False}
    with rc_context(as_text), whole_file(path) as partial:
        if len(fits) == 1:
            figure = Figure(figsize=(9, 6))
            axes, strip = figure.subplots(2, sharex=True, height_ratios=(5, 1))
            _draw_run(axes, fits[0], predict)
            _draw_residuals(strip, fits[0])
            _label_axes(axes, strip, fits)
            _add_legend(axes, strip, ncols=2)
        else:
            figure = Figure(figsize=(9, 4.8))
            axes = figure.subplots()
            _draw_variants(axes, variants, comparisons)
            _label_axes(axes, axes, fits)
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=110, bbox_inches="tight")


def _draw_run(axes, fit: Fit, predict: Sequence[float]) -> None:
    """Points, curve, band, a forecast to 4 times the last compute or the last `predict`, and the
    forecasts from early parts of the run to its end."""
    series = fit.series
    title = series.name if fit.identified else f"{series.name}\n{fit.warnings[0]}"
    axes.set_title(title, fontsize=10, wrap=True)
    # The axis of compute is logarithmic, so a point at 0 has no place on it.
    x, y = beyond_0(series)
    fitted = np.isin(x, fit.x)
    for points, fill, text in ((fitted, "C0", "points fitted"), (~fitted, "w", "left out")):
        if points.any():
            axes.plot(x[points], y[points], "o", ms=4, color="C0", mfc=fill, label=text)
    if series.num_examples:
        half = 1.96 * np.sqrt(y * (1 - y) / series.num_examples)
        text = f"95 % of {series.num_examples:.0f} answers"
        axes.errorbar(x, y, half, fmt="none", ecolor="C0", elinewidth=0.7, label=text)

    past = np.geomspace(fit.C_min / 1.5, fit.C_max, 100)
    if fit.collapsed:  # then there is no forecast, and no parameter means anything
        axes.plot(past, fit.predict(past), label="fitted curve")
        return
    curve = fit.predict(past), *fit.band(past)
    _draw_curve(axes, past, *curve, "C0", label="fitted curve, 95 % interval")
    future = np.geomspace(fit.C_max, max(4 * fit.C_max, series.x[-1], *predict), 50)
    later = each(fit, future)
    _draw_curve(axes, future, *later, "C0", ls="--", label="forecast, 95 % interval")

    for early in early_fits(fit) if fit.C_max == series.x[-1] else ():
        C = np.geomspace(early.C_max, series.x[-1], 50)
        axes.plot(C, each(early, C)[0], color="0.5", lw=0.9)
    axes.plot([], [], color="0.5", lw=0.9, label="forecasts from earlier points")

    # The parameters that are lines, as far as the data shows them.
    if fit.identified:
        text = f"asymptote A {with_interval(fit.A, *fit.interval['A'])}"
        axes.axhline(fit.A, color="C3", lw=1, label=text)
        text = f"C_mid {fit.C_mid:.3g}: half of the gain"
        axes.axvline(fit.C_mid, color="C2", lw=1, ls="-.", label=text)
    else:
        low, _ = fit.interval["A"]
        axes.axhline(low, color="C3", lw=1, ls="--", label=f"A not identified: above {low:.3f}")
    text = f"R0 {fit.R0:.3f}: before training"
    axes.axhline(fit.R0, color="0.45", lw=1, ls=":", label=text)


def _draw_residuals(axes, fit: Fit) -> None:
    """The points minus the curve; in grey, where 95 % of single validations lie around it."""
    x, y = beyond_0(fit.series)
    axes.axhspan(-fit.scatter, fit.scatter, color="0.9")
    axes.plot(x, y - fit.predict(x), "o", ms=3, color="C0")
    axes.axhline(0, color="C0", lw=1)
    axes.set_ylabel("residual")


def _draw_variants(axes, variants: Variants, comparisons: Sequence[Comparison]) -> None:
    """Each variant in a colour of its own. The legend says what is drawn."""
    fits = sum(variants.values(), [])
    verdicts = {comparison.variants[0]: f"; {comparison.verdict}" for comparison in comparisons}
    for i, (name, seeds) in reversed([*enumerate(variants.items())]):  # the first lies on top
        # The space is for names that begin with _: matplotlib would hide the label.
        text = f" {name}: A {asymptote_of(seeds)}{verdicts.get(name, '')}"
        _draw_variant(axes, textwrap.fill(text, LABEL_WIDTH), seeds, f"C{i}")
    first, *others = variants
    named = variants if len(others) < 2 else (first, f"{len(others)} others")
    title = f"Pass rate over compute: {' and '.join(named)} ({len(fits)} runs)"
    axes.set_title(title, fontsize=10, wrap=True)
    how = "points of all seeds, and the mean of their curves, to twice the compute (dashed);\nband:"
    how += " from the lowest curve of a seed to the highest, of a single run its 95 % interval"
    if any(fit.series.x[0] == 0 for fit in fits):
        how += "; at the left edge: before training"
    if any(fit.fell for fit in fits):
        how += ";\ntriangle: a run that fell, which is in no mean"
    _add_legend(axes, axes, title=how, reverse=True)


def _draw_variant(axes, label: str, seeds: list[Fit], color: str) -> None:
    """The points of all seeds, and the mean curve of those that stand. Its band lies between the
    curves of the seeds; the band of a single seed is its 95 % interval, if it identifies A. It goes
    on to twice the compute only if every seed stands and identifies A. No sigmoid falls: if a seed
    fell, a line joins its points."""
    axes.plot([], [], color=color, label=label)
    points = {"color": color, "alpha": 0.45, "mew": 0}
    at_edge = {"transform": axes.get_yaxis_transform(), "clip_on": False}
    for fit in seeds:
        x, y = beyond_0(fit.series)
        axes.plot(x, y, "o", ms=3.5, **points)
        if fit.series.x[0] == 0:
            axes.plot(0, fit.series.y[0], ">", ms=7, **at_edge, **points)
        if fit.fell:
            axes.plot(x, y, color=color, lw=0.8, alpha=0.7)
            axes.plot(x[-1], y[-1], "v", ms=6, color=color)

    fits = [fit for fit in seeds if not fit.fell]
    if not fits:
        return
    end = min(fit.C_max for fit in fits)
    parts = {"-": np.geomspace(min(fit.C_min for fit in fits), end, 100)}
    identified = all(fit.identified for fit in fits)
    if identified and len(fits) == len(seeds):
        parts["--"] = np.geomspace(end, 2 * end, 50)
    for style, C in parts.items():
        curves = np.array([fit.predict(C) for fit in fits])
        is_single = identified and len(fits) == 1
        band = fits[0].band(C) if is_single else (curves.min(0), curves.max(0))
        _draw_curve(axes, C, curves.mean(0), *band, color, ls=style)


def _draw_curve(axes, C: Array, value: Array, low: Array, high: Array, color: str, **line) -> None:
    """A curve and its band at compute C, each (n,)."""
    axes.plot(C, value, color=color, **line)
    axes.fill_between(C, low, high, color=color, alpha=0.15, lw=0)


def _axis_label(quantity: str, columns: set[str]) -> str:
    """The quantity on an axis, and in brackets the column, if all runs have the same."""
    column, *others = columns
    says_more = column != "pass_rate" and not others
    return f"{quantity} ({COMPUTE_UNITS.get(column, column)})" if says_more else quantity


def _label_axes(axes, lowest, fits: list[Fit]) -> None:
    """Name the axes, and print compute as the report does. lowest: the axes that name it."""
    lowest.set_xlabel(_axis_label("compute", {fit.series.x_name for fit in fits}))
    y_label = _axis_label("pass rate", {fit.series.y_name for fit in fits})
    axes.set(ylabel=y_label, xscale="log")
    low, high = axes.get_xlim()
    if high < 100 * low:  # over less than two decades more ticks have a number
        axes.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.grid(alpha=0.25)


def _add_legend(axes, lowest, **how) -> None:
    """The legend of some axes stands below the lowest ones, where it covers no curve."""
    where = {"loc": "upper left", "alignment": "left", "bbox_transform": lowest.transAxes}
    where["bbox_to_anchor"] = 0, -0.15 if lowest is axes else -0.6
    axes.legend(fontsize=8, title_fontsize=8, **where, **how)
