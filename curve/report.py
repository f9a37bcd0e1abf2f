"""The report on one run, as numbers and in words."""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from curve.columns import Series
from curve.fit import Fit, with_interval
from curve.forecast import FORECASTERS, forecasts, held_out


def report(series: Series, fit: Fit, predict: Sequence[float] = ()) -> dict:
    """All that is known about one run, as --json writes it. A, B and C_mid are None if A is not identified."""
    try:  # with --fit-to, the points beyond it are held out
        test = held_out(series.x, series.y, fit.r0, fit.C_max if fit.C_max < series.x[-1] else None, fit.x[0])
    except ValueError as error:
        test = {"error": str(error)}
    computes = [*predict, 2 * fit.C_max]
    return {
        "name": series.name,
        **{name: getattr(fit, name) if fit.identified else None for name in ("A", "B", "C_mid")},
        **{name: getattr(fit, name) for name in ("R0", "identified", "interval", "rms", "lag_1", "noise")},
        "warnings": [asdict(warning) for warning in fit.warnings],
        "C_max_over_C_mid": fit.reach,
        "gain_made": fit.gain_made,
        "sse": fit.squares,
        "n_points": len(fit.x),
        "x": series.x_name,
        "y": series.y_name,
        "points": np.stack([series.x, series.y], 1).tolist(),
        "fit_window": [float(fit.x[0]), fit.C_max],
        "forecast": [forecasts(fit, C) | {"x": C, "interval": np.ravel(fit.band(C)).tolist()} for C in computes],
        "baselines": {"power_law": dict(zip("ADB", fit.power_law)), "held_out": test},
    }


def describe(series: Series, fit: Fit, report: dict) -> str:
    """The report of one run in words, without its name."""
    first = "the first point, " + (f"at {series.x[0]:.4g}: --r0 can say better" if series.x[0] else "before training")
    source = {"first": first, "free": "fitted"}.get(fit.r0, "given")
    source = "fitted" if fit.r0 == "first" and fit.R0 != series.y[0] else source
    meaning = {"A": "asymptote", "B": "exponent", "C_mid": f"{series.x_name} at half the gain", "R0": source}
    window = f"{series.x_name} {fit.x[0]:.4g} to {fit.C_max:.4g}"
    lines = [f"curve       {len(fit.x)} of {len(series.x)} points fitted, {window}", *(f"  {n}" for n in series.notes)]
    for name, text in meaning.items():
        low, high = fit.interval[name]
        value = "not identified" if report[name] is None else f"{report[name]:.4g}"
        lines.append(f"  {name:6}{value:>15}   95 % [{low:.4g}, {high:.4g}]   {text}")
    residuals = f"rms {fit.rms:.4f}, correlation of neighbours {fit.lag_1:.2f}"
    noise = f"; noise of a validation {fit.noise:.4f}" if fit.noise else ""
    lines.append(f"  C_max/C_mid {fit.reach:.2g} ({100 * fit.gain_made:.0f} % of gain); residuals: {residuals}{noise}")
    for forecast in report["forecast"]:
        curve = with_interval(forecast["sigmoid"], *forecast["interval"])
        baselines = f"power law {forecast['power_law']:.3f}, last value {forecast['last_value']:.3f}"
        lines.append(f"  forecast at {forecast['x']:.4g}: {curve} ({baselines})")
    test = report["baselines"]["held_out"]
    if "error" in test:
        lines.append(f"  no held-out test: {test['error']}")
    else:
        came = test["came"]
        errors = [f"{name.replace('_', ' ')} {test[name]:.3f} ({test[name] - came:+.3f})" for name in FORECASTERS]
        lines.append(f"  held out, fitted up to {test['fit_to']:.4g}: {came:.3f} came; {', '.join(errors)}")
    return "\n".join(lines + [f"  ! {warning}" for warning in fit.warnings])
