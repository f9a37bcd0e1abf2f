"""What is said of fitted runs: numbers and words for each, and a table of variants.

A row of a table is a dict with a value for each column, and all rows of a table have the same
columns. A value is a text, a number, (value, low, high), or None; A of a variant has a text beside
its numbers.
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from curve.comparison import Comparison, asymptote_of, estimate_of_A, mean_of, standing
from curve.fit import Fit, Variants, with_interval
from curve.forecast import (
    FORECASTERS,
    early_fits,
    forecasts,
    gain_of_twice,
    tested,
)

Row = dict[str, str | float | tuple | dict | None]
# How numbers are printed, if not with three decimals.
FORMS = {"B": ".2f", "C_mid": ".3g", "ratio of B": ".2f", "ratio of C_mid": ".2f"}
# What --json has of a Fit as it is.
FIGURES = "A B C_mid R0 identified interval rms lag_1 noise warnings gain_made".split()


# --- 1. One run -----------------------------------------------------------------------------------


def report(fit: Fit, predict: Sequence[float] = ()) -> dict:
    """All that is known about one run, as --json writes it. A, B and C_mid are None if A is not
    identified."""
    series = fit.series
    record = [tested(early, series.x, series.y) for early in early_fits(fit)]
    numbers = {name: getattr(fit, name) for name in FIGURES}
    if not fit.identified:
        numbers |= dict.fromkeys(("A", "B", "C_mid"))
    return numbers | {
        "name": series.name,
        "C_max_over_C_mid": fit.reach,
        "sse": fit.squares,
        "n_points": len(fit.x),
        "x": series.x_name,
        "y": series.y_name,
        "points": np.stack([series.x, series.y], 1).tolist(),
        "fit_window": [fit.x[0], fit.C_max],
        "forecast": [
            forecasts(fit, C) | {"x": C, "validation": forecasts(fit, C, fit.scatter)["interval"]}
            for C in (*predict, 2 * fit.C_max)
        ],
        "going_on": gain_of_twice(fit),
        "baselines": {"power_law": dict(zip("ADB", fit.power_law))},
        "record": record,
    }


def source_of_R0(fit: Fit) -> str:
    """Where R0 comes from, in words."""
    x, y = fit.series.x[0], fit.series.y[0]
    if fit.r0 != "first":
        return "fitted" if fit.r0 == "free" else "given"
    if fit.R0 != y:
        return f"fitted: the first point, {y:.3f}, is further off the curve than chance explains"
    where = f"at {x:.4g}: --r0 can say better" if x else "before training"
    return f"the first point, {where}"


def describe(fit: Fit, report: dict) -> str:
    """The report of one run in words, without its name."""
    series = fit.series
    window = f"{series.x_name} {fit.x[0]:.4g} to {fit.C_max:.4g}"
    lines = [f"curve       {len(fit.x)} of {len(series.x)} points fitted, {window}"]
    lines += [f"  {note}" for note in series.notes]
    # The four parameters with their intervals.
    meaning = {
        "A": "asymptote",
        "B": "exponent",
        "C_mid": f"{series.x_name} at half the gain",
        "R0": source_of_R0(fit),
    }
    for name, text in meaning.items():
        low, high = fit.interval[name]
        value = "not identified" if report[name] is None else f"{report[name]:.4g}"
        lines.append(f"  {name:6}{value:>15}   95 % [{low:.4g}, {high:.4g}]   {text}")
    # How far the run goes, and how the points lie around the curve.
    shown = f"C_max/C_mid {fit.reach:.2g} ({int(100 * fit.gain_made)} % of gain)"
    residuals = f"rms {fit.rms:.4f}, correlation of neighbours {fit.lag_1:.2f}"
    noise = f"; noise of a validation {fit.noise:.4f}" if fit.noise else ""
    lines.append(f"  {shown}; residuals: {residuals}{noise}")

    # Forecasts, and the test of those from the first half.
    for forecast in report["forecast"] if not fit.collapsed else ():
        value = with_interval(forecast["forecast"], *forecast["interval"])
        others = [f"{name.replace('_', ' ')} {forecast[name]:.3f}" for name in FORECASTERS[1:]]
        single = "{:.3f}, {:.3f}".format(*forecast["validation"])
        lines.append(
            f"  forecast at {forecast['x']:.4g}: {value}, a single validation [{single}]"
            f" ({', '.join(others)})"
        )
    if not fit.collapsed:
        lines.append(f"  {report['going_on']['sentence']}")
    record = report["record"]
    rows = [
        {
            "held out, fitted up to": f"{test['fit_to']:.4g}",
            "forecast": (test["forecast"], *test["interval"]),
            "came": test["came"],
            "error": f"{test['missed_by']:+.3f}",
            **{
                name.replace("_", " "): f"{test[name] - test['came']:+.3f}"
                for name in FORECASTERS[1:]
            },
            "A": test["A"],
        }
        for test in record
    ]
    table = markdown(rows).splitlines() if rows else ["no held-out test: too few points"]
    lines += [f"  {line}" for line in table]
    lines += [f"  ! {warning}" for warning in fit.warnings]
    return "\n".join(lines)


# --- 2. Tables ------------------------------------------------------------------------------------


def variants_table(
    variants: Variants, comparisons: Sequence[Comparison] = (), C: float | None = None
) -> list[Row]:
    """A row for each variant, with the verdict of its comparison. A, B, C_mid and the forecast at
    compute C (by default twice the last of all runs) are those of the `standing` Fits. None stands
    in the place of B, C_mid and the forecast if a seed alone does not identify A; but a compute
    that all curves describe is no forecast. An interval is over the seeds, and the forecast's at
    least as wide as those of their fits; that of a single run is of its fit."""
    C = C or 2 * max(fit.C_max for fit in sum(variants.values(), []))
    rows = []
    # The first variant is compared with none.
    for (variant, seeds), comparison in zip_longest(variants.items(), [None, *comparisons]):
        A = {"estimate": estimate_of_A(seeds), "text": asymptote_of(seeds)}
        row = {"variant": variant, "runs": len(seeds), "A": A}
        # The mean of the seeds, if each of them has its own curve.
        fits = standing(seeds)
        known = all(fit.identified and not (fit.together or fit.fell) for fit in fits)
        for name in ("B", "C_mid"):
            logs = np.log([getattr(fit, name) for fit in fits])
            mean = np.exp(mean_of(logs, np.log(fits[0].interval[name])))
            row[name] = tuple(mean) if known else None
        row["last value"] = np.mean([fit.y[-1] for fit in seeds])
        forecast = None
        if known or all(fit.describes(C) and not fit.together for fit in fits):
            found = [forecasts(fit, C) for fit in fits]
            # The seeds share the doubt of the sigmoid, so it is as wide as that of a run at least.
            own = np.mean([one["interval"] for one in found], axis=0)
            mean, *over_seeds = mean_of([one["forecast"] for one in found], own)
            ends = np.sort([*own, *over_seeds])[[0, -1]]
            forecast = tuple(np.clip([mean, *ends], 0, 1))
        row[f"forecast at {C:.4g}"] = forecast
        rows.append(row)
        if not comparisons:
            continue

        # A verdict on ceilings has no ratios.
        held = comparison and comparison.efficiency
        for name in ("B", "C_mid"):
            ratio = f"{name}_ratio"
            row[f"ratio of {name}"] = held[ratio] if held else None
        others = "(the others are compared with it)"
        row["verdict"] = comparison.verdict if comparison else others
    return rows


def caption(fits: Sequence[Fit]) -> str:
    """What the tables of these runs are about: columns, intervals, and what was warned of when the
    logs were read."""
    runs = [fit.series for fit in fits]
    columns = dict.fromkeys(f"{series.y_name} over {series.x_name}" for series in runs)
    notes = [note for series in runs for note in series.notes if note.startswith("!")]
    x_names = dict.fromkeys(series.x_name.lower() for series in runs)
    if len(x_names) > 1:
        notes.append(
            f"! compute is {' and '.join(x_names)}: the comparison says nothing unless these count"
            " the same; --x can name one column for all"
        )
    intervals = (
        "In brackets, 95 % intervals: of a variant by its seeds (its forecast by their fits too),"
        " of a run by its fit."
    )
    return "\n".join([f"Read: {', '.join(columns)}. {intervals}", *dict.fromkeys(notes)])


def as_text(column: str, value) -> str:
    """The cell of a table."""
    form = FORMS.get(column, ".3f")
    if isinstance(value, tuple):
        value = with_interval(*value, form)
    elif isinstance(value, dict):
        value = value["text"]
    elif isinstance(value, float):
        value = f"{value:{form}}"
    return "-" if value is None else str(value).replace("|", r"\|")


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table that can also be read as it is."""
    lines = [[*rows[0]], *([as_text(*cell) for cell in row.items()] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)
