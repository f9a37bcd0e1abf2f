"""What a fit predicts for more compute, beside the baselines that it has to beat.

The sigmoid alone misses far if the points do not bend as a sigmoid does. So the forecast is the
median of three curves: the sigmoid, the power law, and a damped trend. If the points do bend, or
identify A, it is the sigmoid (`benchmarks/public_runs.py`, docs/fitting.md).

Dimensions: m values of compute, k weighted sums of a curve at these.
"""

from collections.abc import Iterator

import numpy as np

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


def forecast(fit: Fit, C: Array, weights: Array) -> tuple[Array, ...]:
    """The forecast of weights (k, m) @ pass rate at compute C (m,) > 0, the low and the high end of
    its 95 % interval, and the forecasts of the sigmoid and of the power law, (k,) each."""
    x, y = beyond_0(fit)
    law = fit.power_law
    of_law, of_sigmoid = np.square([power_law(x, *law) - y, fit.predict(x) - y]).sum(1)
    bends = bool(of_law > BENT * of_sigmoid)

    curves = np.array([fit.predict(C), power_law(C, *law), damped_trend(fit, C)]) @ weights.T
    sigmoid, law, _ = curves
    value = sigmoid if bends or fit.identified else np.median(curves, axis=0)

    # The interval of the sigmoid around the forecast, and wider if the curves disagree.
    low, high = fit.interval_of(weights, C)
    doubt = np.hypot(DOUBT[bends] * np.ptp(curves, axis=0), LEAST_DOUBT)
    low = value - np.hypot(sigmoid - low, doubt)
    high = value + np.hypot(high - sigmoid, doubt)
    return value, np.clip(low, 0, 1), np.clip(high, 0, 1), sigmoid, law


def each(fit: Fit, C: Array) -> tuple[Array, Array, Array]:
    """The forecast of the pass rate at each compute C (m,), and the two ends of its interval."""
    return forecast(fit, C, np.eye(len(C)))[:3]


def forecasts(fit: Fit, C, scatter: float = 0.0) -> dict:
    """The mean pass rate over compute C, an array or a number, by forecaster, and the 95 %
    "interval" of the forecast. Up to the last point the forecast is the curve. scatter: of
    validations, which widens the interval."""
    C = np.atleast_1d(C)
    mean = forecast(fit, C, np.full((1, len(C)), 1 / len(C)))
    value, low, high, sigmoid, law = np.ravel(mean)
    if C[0] <= fit.C_max:
        value, low, high = fit.predict(C[0]), *fit.band(C[0])
    ends = value - np.hypot(value - low, scatter), value + np.hypot(high - value, scatter)
    values = dict(zip(FORECASTERS, (value, sigmoid, law, fit.y[-1])))
    return values | {"interval": [*np.clip(ends, 0, 1)]}


# --- 2. Is it worth going on? ---------------------------------------------------------------------

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
    elif high < LITTLE:
        sentence = f"going on: {text}, less than {LITTLE}: hardly worth it"
    elif low < LITTLE:
        sentence = f"going on: {text}: this data cannot tell whether it is {LITTLE}"
    else:
        sentence = f"going on: {text}: worth it"
    return {"gain": gain, "interval": [low, high], "sentence": sentence}


def levelled_off(series: Series, least_gain: float) -> bool:
    """Whether twice the compute would surely gain less than this, by the intervals of the forecasts
    at the last two points. Never if there are fewer than LEAST_TO_STOP points before the last, or
    if nothing has risen yet, or if the pass rate has come down."""
    if len(series.x) <= LEAST_TO_STOP:
        return False
    for end in (-1, None):
        try:
            fit = fit_sigmoid(series.x[:end], series.y[:end])
        except ValueError:  # nothing has moved yet
            return False
        if fit.fell or NO_RISE in [warning.kind for warning in fit.warnings]:
            return False
        if gain_of_twice(fit)["interval"][1] >= least_gain:
            return False
    return True


# --- 3. The record of a forecast ------------------------------------------------------------------

CUTS = 0.25, 0.5, 0.75  # of the last compute


def early_fits(fit: Fit) -> Iterator[Fit]:
    """The fits of the first parts of a run, up to each of CUTS; of a fit that leaves out the last
    points (--fit-to), itself."""
    x, y = fit.series.x, fit.series.y
    if fit.C_max < x[-1]:
        yield fit
        return
    for cut in CUTS:
        try:
            yield fit_sigmoid(x, y, fit.r0, fit.x[0], cut * x[-1])
        except ValueError:  # too few points, or nothing has moved yet
            continue


def tested(early: Fit, x: Array, y: Array) -> dict:
    """The mean of the last three points of a run (`came`), or of those after the `early` fit, and
    its forecasts. `interval` is that of the forecast, widened by the scatter of these points;
    `missed_by` the forecast minus what came."""
    first = max(len(x) - 3, np.sum(x <= early.C_max))
    later, came = x[first:], y[first:].mean()
    found = forecasts(early, later, early.scatter / np.sqrt(len(later)))
    return {
        "fit_to": early.C_max,
        "n_points": len(early.x),
        "came": came,
        "missed_by": found["forecast"] - came,
        "A": early.A if early.identified else None,
        **found,
    }
