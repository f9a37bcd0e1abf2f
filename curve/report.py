"""What is said of fitted runs: numbers and words for each, and a table of variants.

A row of a table is a dict with a text for each column, and all rows of a table have the same
columns.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from curve.columns import Series
from curve.comparison import Comparison, asymptote_of, mean_of, standing
from curve.files import write_whole
from curve.fit import Fit, FittedRun, with_interval
from curve.forecast import FORECASTERS, forecasts, held_out

Row = dict[str, str]


def report(series: Series, fit: Fit, predict: Sequence[float] = ()) -> dict:
    """All that is known about one run, as --json writes it. A, B and C_mid are None if A is not
    identified."""
    try:  # with --fit-to, the points beyond it are held out
        test = held_out(
            series.x, series.y, fit.r0, fit.C_max if fit.C_max < series.x[-1] else None, fit.x[0]
        )
    except ValueError as error:
        test = {"error": str(error)}
    computes = [*predict, 2 * fit.C_max]
    return {
        "name": series.name,
        **{name: getattr(fit, name) if fit.identified else None for name in ("A", "B", "C_mid")},
        **{
            name: getattr(fit, name)
            for name in ("R0", "identified", "interval", "rms", "lag_1", "noise")
        },
        "warnings": [asdict(warning) for warning in fit.warnings],
        "C_max_over_C_mid": fit.reach,
        "gain_made": fit.gain_made,
        "sse": fit.squares,
        "n_points": len(fit.x),
        "x": series.x_name,
        "y": series.y_name,
        "points": np.stack([series.x, series.y], 1).tolist(),
        "fit_window": [float(fit.x[0]), fit.C_max],
        "forecast": [
            forecasts(fit, C) | {"x": C, "interval": np.ravel(fit.band(C)).tolist()}
            for C in computes
        ],
        "baselines": {"power_law": dict(zip("ADB", fit.power_law)), "held_out": test},
    }


def describe(series: Series, fit: Fit, report: dict) -> str:
    """The report of one run in words, without its name."""
    first = "the first point, " + (
        f"at {series.x[0]:.4g}: --r0 can say better" if series.x[0] else "before training"
    )
    source = {"first": first, "free": "fitted"}.get(fit.r0, "given")
    if fit.r0 == "first" and fit.R0 != series.y[0]:
        source = f"fitted: the first point, {series.y[0]:.3f}, is further off the curve than chance explains"
    meaning = {
        "A": "asymptote",
        "B": "exponent",
        "C_mid": f"{series.x_name} at half the gain",
        "R0": source,
    }
    window = f"{series.x_name} {fit.x[0]:.4g} to {fit.C_max:.4g}"
    lines = [
        f"curve       {len(fit.x)} of {len(series.x)} points fitted, {window}",
        *(f"  {n}" for n in series.notes),
    ]
    for name, text in meaning.items():
        low, high = fit.interval[name]
        value = "not identified" if report[name] is None else f"{report[name]:.4g}"
        lines.append(f"  {name:6}{value:>15}   95 % [{low:.4g}, {high:.4g}]   {text}")
    residuals = f"rms {fit.rms:.4f}, correlation of neighbours {fit.lag_1:.2f}"
    noise = f"; noise of a validation {fit.noise:.4f}" if fit.noise else ""
    lines.append(
        f"  C_max/C_mid {fit.reach:.2g} ({100 * fit.gain_made:.0f} % of gain); residuals: {residuals}{noise}"
    )
    for forecast in report["forecast"]:
        curve = with_interval(forecast["sigmoid"], *forecast["interval"])
        baselines = (
            f"power law {forecast['power_law']:.3f}, last value {forecast['last_value']:.3f}"
        )
        lines.append(f"  forecast at {forecast['x']:.4g}: {curve} ({baselines})")
    test = report["baselines"]["held_out"]
    if "error" in test:
        lines.append(f"  no held-out test: {test['error']}")
    else:
        came = test["came"]
        errors = [
            f"{name.replace('_', ' ')} {test[name]:.3f} ({test[name] - came:+.3f})"
            for name in FORECASTERS
        ]
        lines.append(
            f"  held out, fitted up to {test['fit_to']:.4g}: {came:.3f} came; {', '.join(errors)}"
        )
    return "\n".join(lines + [f"  ! {warning}" for warning in fit.warnings])


def variants_table(
    variants: dict[str, list[FittedRun]],
    comparisons: Sequence[Comparison] = (),
    C: float | None = None,
) -> list[Row]:
    """A row for each variant, with the verdict of its comparison. A, B, C_mid and the forecast at
    compute C (by default twice the last of all runs) are those of the `standing` Fits. "-" stands
    for what a seed does not identify by itself. An interval is over the seeds; that of a single run
    is of its fit."""
    C = C or 2 * max(fit.C_max for runs in variants.values() for _, fit in runs)
    compared = {comparison.variants[0]: comparison for comparison in comparisons}
    rows = []
    for variant, runs in variants.items():
        fits = [fit for _, fit in runs]
        row = {"variant": variant, "runs": str(len(fits)), "A": asymptote_of(fits)}
        fits = standing(fits)
        known = all(fit.identified and not fit.together for fit in fits)
        for name, form in {"B": ".2f", "C_mid": ".3g"}.items():
            logs = mean_of(
                np.log([getattr(fit, name) for fit in fits]), np.log(fits[0].interval[name])
            )
            row[name] = with_interval(*np.exp(logs), form) if known else "-"
        row["last value"] = f"{np.mean([series.y[-1] for series, _ in runs]):.3f}"
        forecast = mean_of([fit.predict(C) for fit in fits], fits[0].band(C))
        row[f"forecast at {C:.4g}"] = with_interval(*np.clip(forecast, 0, 1)) if known else "-"
        if compared:
            comparison = compared.get(variant)
            held = comparison.efficiency if comparison else None
            for name in ("B", "C_mid"):
                row[f"ratio of {name}"] = (
                    with_interval(*held[f"{name}_ratio"], ".2f") if held else "-"
                )
            row["verdict"] = (
                comparison.verdict if comparison else "(the others are compared with it)"
            )
        rows.append(row)
    return rows


def caption(runs: Sequence[FittedRun]) -> str:
    """What the tables of these runs are about: columns, intervals, and what was warned of when the
    logs were read."""
    columns = dict.fromkeys(f"{series.y_name} over {series.x_name}" for series, _ in runs)
    warnings = dict.fromkeys(
        note for series, _ in runs for note in series.notes if note.startswith("!")
    )
    text = f"Read: {', '.join(columns)}. In brackets, 95 % intervals: of a variant by its seeds, of a run by its fit."
    return "\n".join([text, *warnings])


def runs_table(runs: Sequence[FittedRun]) -> str:
    """Each run with its fit, the forecast from its first half beside what came, and the kinds of
    its warnings. Below it the median errors of the forecasts."""
    rows, errors, inside = [], [], 0
    for row, (series, fit) in zip(variants_table({i: [run] for i, run in enumerate(runs)}), runs):
        del row["variant"], row["runs"]
        row = {"run": series.name, "before": f"{series.y[0]:.3f}"} | row
        row |= {
            "C_max": f"{fit.C_max:.3g}",
            "C_max/C_mid": f"{fit.reach:.1f}",
            "rms": f"{fit.rms:.4f}",
        }
        row |= {"forecast from half": "-", "came": "-"}
        test = report(series, fit)["baselines"]["held_out"]
        if "error" not in test:
            row["forecast from half"] = with_interval(test["sigmoid"], *test["interval"])
            row["came"] = f"{test['came']:.3f}"
            errors.append([abs(test[name] - test["came"]) for name in FORECASTERS])
            inside += test["interval"][0] <= test["came"] <= test["interval"][1]
        rows.append(row | {"warnings": "; ".join(warning.kind for warning in fit.warnings) or "-"})
    if not errors:
        return markdown(rows)
    medians = "sigmoid {:.3f}, power law {:.3f}, last value {:.3f}".format(
        *np.median(errors, axis=0)
    )
    came = f"{inside} of {len(errors)} came inside their 95 % interval."
    return f"{markdown(rows)}\n\nMedian error of the forecasts from half of the compute: {medians}. {came}"


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table that can also be read as it is."""
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def write_table(
    path: Path, rows: Sequence[Row], runs: Sequence[FittedRun], left_out: Sequence[str]
) -> None:
    """Write a table of variants as CSV, as a tabular of LaTeX, or as Markdown with the table of
    their runs and what was left out: by the suffix. ValueError if it is another one."""
    lines = [[*rows[0]], *([*row.values()] for row in rows)]
    if path.suffix == ".md":
        tables = ["### Variants", markdown(rows), "### Runs", runs_table(runs)]
        text = "\n\n".join([caption(runs), *tables, *left_out])
    elif path.suffix == ".csv":
        csv.writer(table := io.StringIO(), lineterminator="\n").writerows(lines)
        text = table.getvalue().strip()
    elif path.suffix == ".tex":
        escaped = str.maketrans(
            {character: rf"\{character}" for character in "&%$#_{}"} | {">": "$>$"}
        )
        body = [" & ".join(cell.translate(escaped) for cell in line) + r" \\" for line in lines]
        text = "\n".join([rf"\begin{{tabular}}{{{'l' * len(rows[0])}}}", *body, r"\end{tabular}"])
    else:
        raise ValueError(f"{path}: a table is written as .md, .csv or .tex")
    write_whole(path, text + "\n")
