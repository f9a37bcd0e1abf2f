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
from curve.forecast import each

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
        figure = Figure(figsize=(9, 6))
        axes = figure.subplots()
        if len(fits) == 1:
            _draw_run(axes, fits[0], predict)
            legend = {"ncols": 2}
        else:
            _draw_variants(axes, variants, comparisons)
            legend = {
                "title": "points of all seeds, and their curves, to twice the compute (dashed)"
            }
        # The axes have names, and compute is printed as in the report.
        x_label = _axis_label("compute", {fit.series.x_name for fit in fits})
        y_label = _axis_label("pass rate", {fit.series.y_name for fit in fits})
        axes.set(xlabel=x_label, ylabel=y_label, xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        low, high = axes.get_xlim()
        if high < 100 * low:  # over less than two decades more ticks have a number
            axes.xaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.grid(alpha=0.25)
        # The legend stands below, where it covers no curve.
        below = {"loc": "upper left", "bbox_to_anchor": (0.1, 0), "alignment": "left"}
        figure.legend(fontsize=8, title_fontsize=8, **below, **legend)
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=110, bbox_inches="tight")


def _draw_run(axes, fit: Fit, predict: Sequence[float]) -> None:
    """Points, curve, band, and a forecast to 4 times the last compute or the last `predict`."""
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
    axes.plot(past, fit.predict(past), "C0", label="fitted curve")
    if fit.collapsed:  # then there is no forecast, and no parameter means anything
        return
    future = np.geomspace(fit.C_max, max(4 * fit.C_max, series.x[-1], *predict), 50)
    later, *ends = each(fit, future)
    axes.plot(future, later, "C0", ls="--", label="forecast")
    axes.fill_between(past, *fit.band(past), color="C0", alpha=0.15, lw=0, label="95 % intervals")
    axes.fill_between(future, *ends, color="C0", alpha=0.15, lw=0)

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


def _draw_variants(axes, variants: Variants, comparisons: Sequence[Comparison]) -> None:
    """Each variant in a colour of its own. The legend says what is drawn."""
    verdicts = {comparison.variants[0]: f"; {comparison.verdict}" for comparison in comparisons}
    for i, (name, seeds) in enumerate(variants.items()):
        # The space is for names that begin with _: matplotlib would hide the label.
        text = f" {name}: A {asymptote_of(seeds)}{verdicts.get(name, '')}"
        axes.plot([], [], color=f"C{i}", label=textwrap.fill(text, LABEL_WIDTH))
        for fit in seeds:
            _draw_seed(axes, fit, f"C{i}")
    title = (
        f"Pass rate over compute: {len(variants)} variants, {sum(map(len, variants.values()))} runs"
    )
    axes.set_title(title, fontsize=10)


def _draw_seed(axes, fit: Fit, color: str) -> None:
    """Points and curve of a run. The curve goes on to twice the compute if A is identified. No
    sigmoid falls: if the run fell, a line joins its points."""
    x, y = beyond_0(fit.series)
    axes.plot(x, y, "o", ms=3.5, color=color, alpha=0.45, mew=0)
    if fit.fell:
        axes.plot(x, y, color=color, lw=0.8)
        return
    parts = {"-": (fit.C_min, fit.C_max)}
    if fit.identified:
        parts["--"] = fit.C_max, 2 * fit.C_max
    for style, ends in parts.items():
        C = np.geomspace(*ends, 100)
        axes.plot(C, fit.predict(C), color=color, lw=1, ls=style)


def _axis_label(quantity: str, columns: set[str]) -> str:
    """The quantity on an axis, and in brackets the column, if all runs have the same."""
    column, *others = columns
    says_more = column != "pass_rate" and not others
    return f"{quantity} ({COMPUTE_UNITS.get(column, column)})" if says_more else quantity
