"""Draw fitted runs: one in detail, or variants against each other.

The suffix of the file is its format: .png, .pdf, .svg, or another of matplotlib. A figure is
written whole or not at all.
"""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from curve.comparison import Comparison, asymptote_of
from curve.files import whole_file
from curve.fit import Fit, FittedRun
from curve.forecast import each
from curve.logs import Series, beyond_0

# What the columns of our own logs count.
COMPUTE_UNITS = {
    "compute_flops": "FLOPs",
    "compute_tokens": "sampled tokens",
    "compute_device_hours": "device-hours",
}


LABEL_WIDTH = 110  # characters in a line of the legend


def plot_variants(
    path: Path,
    variants: dict[str, list[FittedRun]],
    comparisons: Sequence[Comparison] = (),
    predict: Sequence[float] = (),
) -> None:
    """Draw the curves of variants, and beside their names the verdicts. A single run is drawn in
    detail, with a forecast to the last compute of `predict`. ValueError if matplotlib is
    missing."""
    try:
        from matplotlib.figure import Figure  # here, so that a fit without a plot starts fast
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None
    axes = Figure(figsize=(8, 1), layout="constrained").subplots()  # the legend decides the height
    runs = [run for runs in variants.values() for run in runs]
    how = ""
    if len(runs) == 1:
        series, fit = runs[0]
        _draw_run(axes, series, fit, predict)
        title = shown(series.name)
        if not fit.identified:
            title += f"\n{fit.warnings[0]}"
    else:
        verdicts = {comparison.variants[0]: f"; {comparison.verdict}" for comparison in comparisons}
        for i, (name, seeds) in enumerate(variants.items()):
            text = f"{name}: A {asymptote_of([fit for _, fit in seeds])}{verdicts.get(name, '')}"
            label = shown(textwrap.fill(text, LABEL_WIDTH))
            _draw_variant(axes, label, seeds, f"C{i}")
        title = f"Pass rate over compute ({len(runs)} runs)"
        how = (
            "points of all seeds, mean of the fitted curves, forecasts (dashed); at the left edge:"
            " before training;\ntriangle: a run that fell, which is in no mean"
        )
    _write(path, axes, [series for series, _ in runs], title, how)


def shown(name: str) -> str:
    """A name as a label. For matplotlib $ would begin a formula, and _ would hide the label."""
    return re.sub("^_", " _", name.replace("$", r"\$"))


def _draw_run(axes, series: Series, fit: Fit, predict: Sequence[float]) -> None:
    """Points, curve, band, and a forecast to 4 times the last compute or the last `predict`."""
    _draw_points(axes, series, fit)

    # The curve goes on as a forecast, and the band covers both.
    end = max(4 * fit.C_max, 1.2 * series.x[-1], *(1.2 * C for C in predict))
    past = np.geomspace(fit.C_min / 1.5, fit.C_max, 100)
    axes.plot(past, fit.predict(past), color="C0", label="fitted curve")
    if fit.collapsed:  # then there is no forecast
        return
    future = np.geomspace(fit.C_max, end, 50)
    later = each(fit, future)
    axes.plot(future, later.value, "--", color="C0", label="forecast")
    low, high = fit.band(past)
    axes.fill_between(
        np.append(past, future),
        np.append(low, later.low),
        np.append(high, later.high),
        color="C0",
        alpha=0.18,
        lw=0,
        label="95 % interval",
    )

    # The parameters that are lines, as far as the data shows them.
    if fit.identified:
        axes.axhline(fit.A, color="C3", lw=1, label=f"asymptote A {fit.asymptote}")
        text = f"C_mid {fit.C_mid:.3g}: half of the gain"
        axes.axvline(fit.C_mid, color="C2", lw=1, ls="-.", label=text)
    else:
        low, _ = fit.interval["A"]
        text = f"A not identified: above {low:.3f}"
        axes.axhline(low, color="C3", lw=1, ls="--", label=text)
    axes.axhline(
        fit.R0,
        color="0.45",
        lw=1,
        ls=":",
        label=f"R0 {fit.R0:.3f}: before training",
    )


def _draw_points(axes, series: Series, fit: Fit) -> None:
    """The points of a run, with error bars if the number of answers is known."""
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


def _draw_variant(axes, label: str, runs: list[FittedRun], color: str) -> None:
    """The points of all seeds, and the mean curve of those that stand. Its band lies between the
    curves of the seeds; the band of a single seed is its 95 % interval, if it identifies A. The
    forecast is drawn only if every seed stands and identifies A. No sigmoid falls: if a seed fell,
    a line joins its points."""
    for series, fit in runs:
        x, y = beyond_0(series)
        axes.plot(x, y, "o", ms=3.5, color=color, alpha=0.45, mew=0)
        if series.x[0] == 0:
            at_edge = axes.get_yaxis_transform()  # x is a part of the axes' width
            axes.plot(0, series.y[0], ">", ms=7, color=color, transform=at_edge, clip_on=False)
        if fit.fell:
            axes.plot(x, y, color=color, lw=0.8, alpha=0.7)
            axes.plot(x[-1], y[-1], "v", ms=6, color=color)
    axes.plot([], [], color=color, label=label)

    fits = [fit for _, fit in runs if not fit.fell]
    if not fits:
        return
    end = min(fit.C_max for fit in fits)
    parts = {"-": np.geomspace(min(fit.C_min for fit in fits), end, 100)}
    identified = all(fit.identified for fit in fits)
    if identified and len(fits) == len(runs):
        parts["--"] = np.geomspace(end, 2 * end, 50)
    for style, C in parts.items():
        curves = np.array([fit.predict(C) for fit in fits])
        axes.plot(C, curves.mean(0), style, color=color)
        if identified or len(fits) > 1:
            band = fits[0].band(C) if len(fits) == 1 else (curves.min(0), curves.max(0))
            axes.fill_between(C, *band, color=color, alpha=0.12, lw=0)


def _write(path: Path, axes, runs: Sequence[Series], title: str, how: str) -> None:
    """Write the figure, in the format that the suffix of its file names, with labels, a title, and
    the legend below the axes, where it covers no curve. how: what is drawn, above the legend."""
    from matplotlib import rc_context
    from matplotlib.ticker import LogLocator

    # An axis has the name of a column if all runs have it.
    x_name, *other_x = {run.x_name.lower() for run in runs}
    y_name, *other_y = {run.y_name for run in runs}
    unit = "" if other_x else f" ({COMPUTE_UNITS.get(x_name, x_name)})"
    rate = "" if other_y else f" ({y_name})"
    axes.set(xlabel=f"compute{unit}", ylabel=f"pass rate{rate}", xscale="log")
    axes.set_title(title, fontsize=10, wrap=True)
    # As the report prints compute. Over less than two decades more ticks have a number.
    low, high = axes.get_xlim()
    if high < 100 * low:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.grid(alpha=0.25)

    # Short labels stand in two columns. The figure is as high as they need.
    _, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels)) < 60 else 1
    in_labels = sum(label.count("\n") + 1 for label in labels)
    lines = (title + how).count("\n") + in_labels / columns
    where = {"loc": "upper left", "bbox_to_anchor": (0, -0.15), "alignment": "left"}
    axes.legend(fontsize=8, ncols=columns, title=how, title_fontsize=8, **where)
    axes.figure.set_figheight(4.4 + 0.2 * lines)  # inches
    axes.figure.draw_without_rendering()  # so that the layout makes room for all of the legend
    text_stays_text = rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"})
    with whole_file(path) as partial, text_stays_text:
        axes.figure.savefig(partial, format=path.suffix[1:].lower(), dpi=110)
