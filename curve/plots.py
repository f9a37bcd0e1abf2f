"""Draw fitted runs: one in detail, or variants against each other.

The suffix of the file is its format: .png, .pdf, .svg, or another of matplotlib. A figure is
written whole or not at all.
"""

import contextlib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from curve.columns import Series, beyond_0
from curve.comparison import Comparison, asymptote_of
from curve.files import whole_file
from curve.fit import Fit, FittedRun, fit_sigmoid
from curve.forecast import each

# What the columns of our own logs count.
COMPUTE_UNITS = {
    "compute_flops": "FLOPs",
    "compute_tokens": "sampled tokens",
    "compute_device_hours": "device-hours",
}


MOST_COLOURS = 6  # curves that are told apart by their colour
LABEL_WIDTH = 110  # characters in a line of the legend
GREY = "0.6"


def new_figure(width: float, height: float):
    """An empty figure of this size, in inches. ValueError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # here, so that a fit without a plot starts fast
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def plot_variants(
    path: Path,
    variants: dict[str, list[FittedRun]],
    comparisons: Sequence[Comparison] = (),
    predict: Sequence[float] = (),
) -> None:
    """Draw the curves of variants, and beside their names the verdicts. At most MOST_COLOURS have a
    colour; the others are grey, with their names at the side. A single run is drawn in detail, with
    a forecast to the last compute of `predict`."""
    runs = [run for runs in variants.values() for run in runs]
    axes = new_figure(8, 1).subplots()  # the legend decides the height
    if len(runs) == 1:
        series, fit = runs[0]
        _draw_run(axes, series, fit, predict)
        title = shown(series.name)
        if not fit.identified:
            title += f"\n{fit.warnings[0]}"
        how = ""
    else:
        verdicts = {comparison.variants[0]: f"; {comparison.verdict}" for comparison in comparisons}
        ends_of_grey = {}
        for name, color in _colours(variants, comparisons).items():
            asymptote = asymptote_of([fit for _, fit in variants[name]])
            text = f"{name}: A {asymptote}{verdicts.get(name, '')}"
            label = shown(textwrap.fill(text, LABEL_WIDTH))
            end = _draw_variant(axes, label, variants[name], color)
            if color == GREY:
                ends_of_grey[name] = end
        _name_at_side(axes, ends_of_grey)
        first, *others = variants
        named = [first, *others] if len(others) < 2 else [first, f"{len(others)} others"]
        title = f"Pass rate over compute: {' and '.join(map(shown, named))} ({len(runs)} runs)"
        how = "points of all seeds, mean of the fitted curves, forecasts (dashed)"
        if any(series.x[0] == 0 for series, _ in runs):
            how += "; at the left edge: before training"
        if any(fit.fell for _, fit in runs):
            how += (
                ";\nthin lines: the runs of a variant with falls;"
                " triangle: a run that fell, which is in no mean"
            )
    _write(path, axes, [series for series, _ in runs], title, how)


def shown(name: str) -> str:
    """A name as a label. For matplotlib $ would begin a formula, and _ would hide the label."""
    return re.sub("^_", " _", name.replace("$", r"\$"))


def _colours(
    variants: dict[str, list[FittedRun]], comparisons: Sequence[Comparison]
) -> dict[str, str]:
    """The colour of each variant. If there are too few colours, the first variant has one, then
    those that differ from it; the others are grey, and come last."""
    differ = {comparison.variants[0] for comparison in comparisons if comparison.winner}
    first, *others = variants
    most_important_first = [first, *sorted(others, key=lambda name: name not in differ)]
    chosen = most_important_first[:MOST_COLOURS]
    in_colour = [name for name in variants if name in chosen]
    colours = {name: f"C{i}" for i, name in enumerate(in_colour)}
    return colours | dict.fromkeys(most_important_first[MOST_COLOURS:], GREY)


def plot_diagnosis(path: Path, series: Series, fit: Fit) -> None:
    """Draw what A of a run rests on: the squared error with A held, the residuals, and A of fits to
    a part of it."""
    figure = new_figure(15, 4.4)
    profile, residuals, windows = figure.subplots(1, 3)

    # The growth of the squared error on both sides of the interval of A.
    low, high = fit.interval["A"]
    A = np.linspace(max(1.5 * low - 0.5 * high, 0), min(1.5 * high - 0.5 * low, 1), 100)
    squares = fit.held_at(A)[1]
    profile.plot(A, (squares - squares.min()) / fit.profile.left.max())
    profile.axvspan(low, high, alpha=0.15)
    title = "growth of the squared error with A held\n(1: the end of the 95 % interval)"
    profile.set(title=title, xlabel="A")

    # If the residuals drift, the sigmoid is not the shape of this run.
    residuals.plot(fit.x, fit.y - fit.predict(fit.x), "o-", ms=4, lw=0.6)
    residuals.axhspan(-fit.rms, fit.rms, alpha=0.15)
    title = f"{shown(series.name)}: pass rate minus curve\n(band: rms {fit.rms:.4f})"
    residuals.set(title=title, xlabel=series.x_name)

    # If A follows the window, it rests on a few points.
    every = max(len(fit.x) // 25, 1)
    for C in fit.x[::every]:
        for color, window in (("C0", (fit.x[0], C)), ("C1", (C, fit.C_max))):
            with contextlib.suppress(ValueError):  # too few points
                part = fit_sigmoid(series.x, series.y, fit.r0, *window)
                fill = color if part.identified else "w"
                windows.plot([C, C], part.interval["A"], color, lw=0.8)
                windows.plot(C, part.A, "o", ms=5, color=color, mfc=fill)
    title = "A of the points up to here (blue), from here on\n(orange); hollow: not identified"
    windows.set(title=title, xlabel=series.x_name)
    save(path, figure)


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
            axes.plot(
                x[points],
                y[points],
                "o",
                ms=4,
                color="C0",
                mfc=fill,
                label=text,
            )
    if series.num_examples:
        half = 1.96 * np.sqrt(y * (1 - y) / series.num_examples)
        text = f"95 % of {series.num_examples:.0f} answers"
        axes.errorbar(
            x,
            y,
            half,
            fmt="none",
            ecolor="C0",
            elinewidth=0.7,
            alpha=0.6,
            label=text,
        )


def _draw_variant(axes, label: str, runs: list[FittedRun], color: str) -> tuple[float, float]:
    """The points of all seeds, and the mean curve of those that stand. Its band lies between the
    curves of the seeds; the band of a single seed is its 95 % interval, if it identifies A. The
    forecast is drawn only if every seed stands and identifies A. No sigmoid falls: if a seed fell,
    a line joins the points of each seed from its highest point on, or if all seeds fell, from its
    first. Returns the compute and the pass rate at which the variant ends."""
    fits = [fit for _, fit in runs if not fit.fell]
    one_fell = len(fits) < len(runs)
    layer = {GREY: 1.5, "C0": 2.5}.get(color, 2)  # grey lies below, and the first variant on top
    for series, fit in runs:
        x, y = beyond_0(series)
        points = {"color": color, "alpha": 0.45, "mew": 0, "zorder": layer}
        axes.plot(x, y, "o", ms=3.5, **points)
        if series.x[0] == 0:
            at_edge = axes.get_yaxis_transform()  # x is a part of the axes' width
            axes.plot(0, series.y[0], ">", ms=7, transform=at_edge, clip_on=False, **points)
        if one_fell:
            peak = y.argmax() if fits else 0
            axes.plot(x[peak:], y[peak:], color=color, lw=0.8, alpha=0.7, zorder=layer)
        if fit.fell:
            axes.plot(x[-1], y[-1], "v", ms=6, color=color, zorder=layer)
    axes.plot([], [], color=color, label=label)

    if not fits:
        return x[-1], y[-1]
    start = min(fit.C_min for fit in fits)
    end = min(fit.C_max for fit in fits)
    parts = {"-": np.geomspace(start, end, 100)}
    identified = all(fit.identified for fit in fits)
    if identified and not one_fell:
        parts["--"] = np.geomspace(end, 2 * end, 50)
    for style, C in parts.items():
        curves = np.array([fit.predict(C) for fit in fits])
        mean = curves.mean(0)
        axes.plot(C, mean, style, color=color, zorder=layer)
        if color != GREY and (identified or len(fits) > 1):
            band = fits[0].band(C) if len(fits) == 1 else (curves.min(0), curves.max(0))
            axes.fill_between(C, *band, color=color, alpha=0.12, lw=0)
    return C[-1], mean[-1]


def _name_at_side(axes, ends: dict[str, tuple[float, float]]) -> None:
    """Write names on the right of the axes, each with a line to the end of its curve. From the
    highest down, they keep a distance."""
    low, high = axes.get_ylim()
    free = 1.0  # the height, as a part of the axes, under which there is room
    for name, (C, rate) in sorted(ends.items(), key=lambda end: -end[1][1]):
        free = min(free, (rate - low) / (high - low))
        axes.annotate(
            shown(name),
            (C, rate),
            xytext=(1.02, free),
            textcoords="axes fraction",
            arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.6, "relpos": (0, 0.5)},
            annotation_clip=False,
            va="center",
            fontsize=8,
        )
        free -= 0.05


def _write(path: Path, axes, runs: Sequence[Series], title: str, how: str) -> None:
    """Write the figure, with labels, a title, and the legend below the axes, where it covers no
    curve. how: what is drawn, above the legend."""
    from matplotlib.ticker import LogLocator

    # An axis has the name of a column if all runs have it.
    x_names = {run.x_name.lower() for run in runs}
    y_names = {run.y_name for run in runs}
    compute = "compute"
    pass_rate = "pass rate"
    if len(x_names) == 1:
        x_name = runs[0].x_name
        compute += f" ({COMPUTE_UNITS.get(x_name, x_name)})"
    if len(y_names) == 1 and y_names != {"pass_rate"}:
        pass_rate += f" ({runs[0].y_name})"
    axes.set(xlabel=compute, ylabel=pass_rate, xscale="log")
    axes.set_title(title, fontsize=10, wrap=True)
    # As the report prints compute, and faster than 10 with an exponent. Over less than two decades
    # there are more ticks with a number, all in one format.
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
    axes.legend(
        fontsize=8,
        ncols=columns,
        loc="upper left",
        bbox_to_anchor=(0, -0.15),
        title=how,
        title_fontsize=8,
        alignment="left",
    )
    axes.figure.set_figheight(4.4 + 0.2 * lines)  # inches
    axes.figure.draw_without_rendering()  # so that the layout makes room for all of the legend
    save(path, axes.figure)


def save(path: Path, figure) -> None:
    """Write a figure, in the format that the suffix of its file names."""
    from matplotlib import rc_context

    text_stays_text = rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"})
    with whole_file(path) as partial, text_stays_text:
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=110)
