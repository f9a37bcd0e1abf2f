"""All that is known about one run, as numbers and in words."""

from collections.abc import Sequence

import numpy as np

from curve.columns import Series
from curve.comparison import with_interval
from curve.fit import Fit
from curve.forecast import FORECASTERS, forecasts, held_out


def report(series: Series, f: Fit, predict: Sequence[float] = ()) -> dict:
    """All that is known about one run, as --json writes it; numbers that the data does not carry are None."""
    try:  # with --fit-to the points beyond are the ones held out
        half = held_out(series.x, series.y, f.r0, f.C_max if f.C_max < series.x[-1] else None, f.x[0])
    except ValueError as error:
        half = {"error": str(error)}
    computes = [*predict, 2 * f.C_max]
    plain = "R0", "identified", "interval", "rms", "lag_1", "noise", "warnings"
    return {
        "name": series.name,
        **{name: getattr(f, name) if f.identified else None for name in ("A", "B", "C_mid")},
        **{name: getattr(f, name) for name in plain},
        "C_max_over_C_mid": f.reach,
        "gain_made": f.gain_made,
        "sse": f.squares,
        "n_points": len(f.x),
        "x": series.x_name,
        "y": series.y_name,
        "points": np.stack([series.x, series.y], 1).tolist(),
        "fit_window": [float(f.x[0]), f.C_max],
        "forecast": [forecasts(f, C) | {"x": C, "interval": np.ravel(f.band(C)).tolist()} for C in computes],
        "baselines": {"power_law": dict(zip("ADB", f.power_law)), "held_out": half},
    }


def describe(series: Series, f: Fit, report: dict) -> str:
    """The report of one run in words, without its name."""
    asked = {"first": "the first point, before training", "free": "fitted"}.get(f.r0, "given")
    source = asked if f.r0 != "first" or f.R0 == series.y[0] else "fitted"
    meaning = {"A": "asymptote", "B": "exponent", "C_mid": f"{series.x_name} at half the gain", "R0": source}
    window = f"{series.x_name} {f.x[0]:.4g} to {f.C_max:.4g}"
    lines = [f"curve       {len(f.x)} of {len(series.x)} points fitted, {window}"]
    lines += [f"  {note}" for note in series.notes]
    for name, text in meaning.items():
        low, high = f.interval[name]
        value = "not identified" if report[name] is None else f"{report[name]:.4g}"
        lines.append(f"  {name:6}{value:>15}   95 % [{low:.4g}, {high:.4g}]   {text}")
    residuals = f"rms {f.rms:.4f}, correlation of neighbours {f.lag_1:.2f}"
    noise = f"; noise of a validation {f.noise:.4f}" if f.noise else ""
    lines.append(f"  C_max/C_mid {f.reach:.2g} ({100 * f.gain_made:.0f} % of gain); residuals: {residuals}{noise}")
    for at in report["forecast"]:
        curve = with_interval(at["sigmoid"], *at["interval"])
        baselines = f"power law {at['power_law']:.3f}, last value {at['last_value']:.3f}"
        lines.append(f"  forecast at {at['x']:.4g}: {curve} ({baselines})")
    held = report["baselines"]["held_out"]
    if "error" in held:
        lines.append(f"  no held-out test: {held['error']}")
    else:
        came = held["came"]
        errors = [f"{name.replace('_', ' ')} {held[name]:.3f} ({held[name] - came:+.3f})" for name in FORECASTERS]
        lines.append(f"  held out, fitted up to {held['fit_to']:.4g}: {came:.3f} came; {', '.join(errors)}")
    return "\n".join(lines + [f"  ! {warning}" for warning in f.warnings])
