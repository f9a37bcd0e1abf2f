"""What a fit predicts for more compute, beside the baselines that it has to beat."""

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats is slow to import

from curve.columns import Series
from curve.fit import Fit, fit_sigmoid, power_law

FORECASTERS = ("sigmoid", "power_law", "last_value")  # the sigmoid, and its baselines


def forecasts(fit: Fit, C) -> dict[str, float]:
    """The mean pass rate over compute C, an array or a number, by forecaster."""
    values = fit.predict(C), power_law(C, *fit.power_law), fit.y[-1]
    return {name: float(np.mean(value)) for name, value in zip(FORECASTERS, values)}


def held_out(x, y, r0: str | float = "first", fit_to: float | None = None, fit_from=0.0) -> dict:
    """The mean of the last three points (`came`), and its forecasts from the points with compute <=
    fit_to, by default half of the last compute. `interval` is the 95 % interval of the curve,
    widened by the scatter of three points. The arguments are as in `fit_sigmoid`. ValueError if the
    early points cannot be fitted."""
    x = np.asarray(x, float)
    y = np.asarray(y, float)
    if fit_to is None:
        fit_to = x[-1] / 2
    # The early points are fitted, and the last three are forecast, if they come later.
    early = fit_sigmoid(x, y, r0, fit_from, fit_to)
    first = max(len(x) - 3, np.sum(x <= fit_to))
    later = x[first:]
    n = len(later)

    # The interval of the mean of the curve, and the scatter of the mean of n points.
    forecast = forecasts(early, later)
    curve = forecast["sigmoid"]
    (low,), (high,) = early.interval_of(np.full((1, n), 1 / n), later)
    scatter = stdtrit(len(early.x) - 3, 0.975) * early.rms / np.sqrt(n)
    ends = curve - np.hypot(curve - low, scatter), curve + np.hypot(high - curve, scatter)
    return {
        "fit_to": float(fit_to),
        "n_points": len(early.x),
        "came": float(y[first:].mean()),
        **forecast,
        "interval": np.clip(ends, 0, 1).tolist(),
    }


def outlook(series: Series) -> str:
    """Where a run is going, in a few words for its progress bar; "" if there are too few points to
    say."""
    if len(series.x) <= 6:
        return ""
    try:
        fit = fit_sigmoid(series.x, series.y)
    except ValueError:  # nothing has moved yet
        return ""
    if fit.collapsed:
        return "collapsed"
    low, high = fit.interval["A"]
    if not fit.identified:
        return f"A > {low:.2f}"
    gain = fit.predict(2 * fit.C_max) - fit.predict(fit.C_max)
    return f"A {fit.A:.2f} [{low:.2f}, {high:.2f}], 2x compute {gain:+.2f}"
