"""What a fit predicts for more compute, beside the baselines that it has to beat.

The sigmoid alone misses far if the points do not bend as a sigmoid does. So the forecast is the
median of three curves: the sigmoid, the power law, and a damped trend. If the points do bend, it is
the sigmoid (`benchmarks/public_runs.py`, docs/fitting.md).

Dimensions: m values of compute, k weighted sums of a curve at these.
"""

import numpy as np
from scipy.special import stdtrit  # quantiles of Student's t; scipy.stats is slow to import

from curve.fit import NO_RISE, Fit, beyond_0, fit_sigmoid, power_law
from curve.least_squares import Array
from curve.logs import Series

FORECASTERS = ("forecast", "sigmoid", "power_law", "last_value")  # the last is a baseline
# The points bend if the power law's squared error is more than this many times the sigmoid's.
BENT = 2
# The part of the spread of the three curves that widens the interval, if the points bend or not,
# and what widens it always. On public runs 90 to 97 % then come inside.
DOUBT = {True: 0.5, False: 1.5}
LEAST_DOUBT = 0.01
LEAST_FOR_TREND = 6  # points; with fewer the trend is the last value
LEAST_TO_STOP = 10  # points before the last; with fewer no run counts as levelled off

# --- 1. The forecast ------------------------------------------------------------------------------


def damped_trend(fit: Fit, C: Array) -> Array:
    """The mean pass rate of the last sixth of the points, with half of the slope in log compute of
    the later half; at compute C (m,)."""
    x, y = beyond_0(fit)
    x = np.log(x)
    n = len(x)
    if n < LEAST_FOR_TREND:
        return np.full(len(C), fit.y[-1])
    slope, _ = np.polyfit(x[n // 2 :], y[n // 2 :], 1)
    last = slice(-(n // 6), None)
    return np.clip(y[last].mean() + slope / 2 * (np.log(C) - x[last].mean()), 0, 1)


def forecast(fit: Fit, C: Array, weights: Array, scatter: float = 0.0) -> tuple[Array, ...]:
    """The forecast of weights (k, m) @ pass rate at compute C (m,) > 0, the low and the high end of
    its 95 % interval, and the forecasts of the sigmoid and of the power law, (k,) each. scatter: of
    single validations, which widens the interval."""
    x, y = beyond_0(fit)
    law = fit.power_law
    of_law, of_sigmoid = np.square([power_law(x, *law) - y, fit.predict(x) - y]).sum(1)
    bends = bool(of_law > BENT * of_sigmoid)

    curves = np.array([fit.predict(C), power_law(C, *law), damped_trend(fit, C)]) @ weights.T
    sigmoid, law, _ = curves
    value = sigmoid if bends else np.median(curves, axis=0)

    # The interval of the sigmoid around the forecast, and wider if the curves disagree.
    low, high = fit.interval_of(weights, C)
    doubt = np.hypot(DOUBT[bends] * np.ptp(curves, axis=0), np.hypot(LEAST_DOUBT, scatter))
    low = value - np.hypot(sigmoid - low, doubt)
    high = value + np.hypot(high - sigmoid, doubt)
    return value, np.clip(low, 0, 1), np.clip(high, 0, 1), sigmoid, law


def each(fit: Fit, C: Array) -> tuple[Array, Array, Array]:
    """The forecast of the pass rate at each compute C (m,), and the two ends of its interval."""
    return forecast(fit, C, np.eye(len(C)))[:3]


def forecasts(fit: Fit, C, scatter: float = 0.0) -> dict:
    """The mean pass rate over compute C, an array or a number, by forecaster, and the 95 %
    "interval" of the forecast. Up to the last point the forecast is the curve."""
    C = np.atleast_1d(C)
    mean = forecast(fit, C, np.full((1, len(C)), 1 / len(C)), scatter)
    value, low, high, sigmoid, law = np.ravel(mean)
    values = value, sigmoid, law, fit.y[-1]
    found = dict(zip(FORECASTERS, values)) | {"interval": [low, high]}
    if C[0] <= fit.C_max:
        found |= {"forecast": fit.predict(C[0]), "interval": [*fit.band(C[0])]}
    return found


# --- 2. Is it worth going on? ---------------------------------------------------------------------

FURTHEST = 10  # times the last compute: no forecast beyond it is worth reading
LITTLE = 0.02  # a gain that is hardly worth twice the compute


def gain_of_twice(fit: Fit) -> dict:
    """What twice the compute would gain over the mean of the last three points: "gain", "interval",
    and a "sentence"."""
    later = forecasts(fit, 2 * fit.C_max)
    gain, low, high = np.array([later["forecast"], *later["interval"]]) - fit.end
    text = (
        f"twice the compute would gain {gain:+.3f} [{low:+.3f}, {high:+.3f}]"
        " over the last three points"
    )
    if fit.fell:
        sentence = f"going on: {text} at best, since this run fell, and no forecast foresees a fall"
    elif round(gain, 3) < LITTLE:  # as it is printed
        sentence = f"going on: {text}, less than {LITTLE}: hardly worth it"
    else:
        sentence = f"going on: {text}: worth it"
    return {"gain": gain, "interval": [low, high], "sentence": sentence}


def reached_at(fit: Fit, pass_rate: float) -> dict:
    """The compute at which the forecast reaches a pass rate: "x", its "interval", and a "sentence".
    An end that lies beyond FURTHEST times the last compute is None."""
    C = np.geomspace(fit.C_max, FURTHEST * fit.C_max, 400)
    x, high, low = (next(iter(C[curve >= pass_rate]), None) for curve in each(fit, C))
    beyond = f"within {FURTHEST} times the compute"
    compute, rates = fit.points  # the one before training too
    if rates.max() >= pass_rate and (x == fit.C_max or fit.fell):
        x = low = high = compute[rates >= pass_rate][0]
        sentence = f"{pass_rate:g} is reached already, first at {x:.4g}"
    elif low is None:
        sentence = f"{pass_rate:g} is not reached {beyond}"
    else:
        when = f"at {x:.4g}" if x else f"perhaps not {beyond}"
        last = f"{high:.4g}" if high else f"not {beyond}"
        sentence = f"{pass_rate:g} is reached {when}; 95 %: from {low:.4g} to {last}"
    return {"x": x, "interval": [low, high], "pass_rate": pass_rate, "sentence": sentence}


def levelled_off(series: Series, least_gain: float) -> bool:
    """Whether twice the compute would gain less than this, by the forecasts at the last two points.
    Never if there are fewer than LEAST_TO_STOP points before the last, or if nothing has risen yet,
    or if the pass rate has come down."""
    if len(series.x) <= LEAST_TO_STOP:
        return False
    for end in (-1, None):
        try:
            fit = fit_sigmoid(series.x[:end], series.y[:end])
        except ValueError:  # nothing has moved yet
            return False
        if fit.fell or NO_RISE in [warning.kind for warning in fit.warnings]:
            return False
        if gain_of_twice(fit)["gain"] >= least_gain:
            return False
    return True


# --- 3. A test of the forecast --------------------------------------------------------------------


def held_out(
    x: Array, y: Array, r0: str | float = "first", fit_to: float | None = None, fit_from=0.0
) -> dict:
    """The mean of the last three points (`came`), and its forecasts from the points with compute <=
    fit_to, by default half of the last compute. `interval` is the 95 % interval of the forecast,
    widened by the scatter of three points. The arguments are as in `fit_sigmoid`. ValueError if the
    early points cannot be fitted."""
    fit_to = fit_to or x[-1] / 2
    # The early points are fitted, and the last three are forecast, if they come later.
    early = fit_sigmoid(x, y, r0, fit_from, fit_to)
    first = max(len(x) - 3, np.sum(x <= fit_to))
    later = x[first:]
    scatter = stdtrit(early.degrees, 0.975) * early.rms / np.sqrt(len(later))
    return {
        "fit_to": fit_to,
        "n_points": len(early.x),
        "came": y[first:].mean(),
        **forecasts(early, later, scatter),
    }
