"""The report on one run, as numbers and in words: its fit, and what that predicts beside the baselines to beat."""

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats is slow to import

from curve.columns import Series
from curve.fit import Fit, fit_sigmoid, power_law, with_interval

FORECASTERS = ("sigmoid", "power_law", "last_value")  # the sigmoid, and its baselines


def forecasts(fit: Fit, C) -> dict[str, float]:
    """The mean pass rate over compute C, an array or a number, by forecaster."""
    values = fit.predict(C), power_law(C, *fit.power_law), fit.y[-1]
    return {name: float(np.mean(value)) for name, value in zip(FORECASTERS, values)}


def held_out(x, y, r0: str | float = "first", fit_to: float | None = None, fit_from=0.0) -> dict:
    """The mean of the last three points (`came`), and its forecasts from the points with compute <= fit_to, by default
    half of the last compute. `interval` is the 95 % interval of the curve, widened by the scatter of three points. The
    arguments are as in `fit_sigmoid`. ValueError if the early points cannot be fitted."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    fit_to = float(x[-1] / 2 if fit_to is None else fit_to)
    early = fit_sigmoid(x, y, r0, fit_from, fit_to)
    last = slice(max(len(x) - 3, np.sum(x <= fit_to)), None)
    forecast, n = forecasts(early, x[last]), len(x[last])
    curve = forecast["sigmoid"]
    low, high = early.interval_of(np.full((1, n), 1 / n), x[last])
    scatter = stdtrit(len(early.x) - 3, 0.975) * early.rms / np.sqrt(n)
    ends = curve - np.hypot(curve - low[0], scatter), curve + np.hypot(high[0] - curve, scatter)
    measured = {"fit_to": fit_to, "n_points": len(early.x), "came": float(y[last].mean())}
    return measured | forecast | {"interval": np.clip(ends, 0, 1).tolist()}


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
    if fit.r0 == "first" and fit.R0 != series.y[0]:
        source = f"fitted: the first point, {series.y[0]:.3f}, is further off the curve than chance explains"
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


def outlook(series: Series) -> str:
    """Where a run is going, in a few words for its progress bar; "" if there are too few points to say."""
    if len(series.x) <= 6:
        return ""
    try:
        fit = fit_sigmoid(series.x, series.y)
    except ValueError:  # nothing has moved yet
        return ""
    low, high = fit.interval["A"]
    if not fit.identified:
        return "collapsed" if fit.collapsed else f"A > {low:.2f}"
    gain = fit.predict(2 * fit.C_max) - fit.predict(fit.C_max)
    return f"A {fit.A:.2f} [{low:.2f}, {high:.2f}], 2x compute {gain:+.2f}"
