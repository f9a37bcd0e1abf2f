"""Fit the ScaleRL curve to the log of any RL run, and say how far to trust it.

    python fit_curve.py runs/NAME                                  # our own run folder
    python fit_curve.py log.csv --x gpu_hours --y pass_rate --predict 1e5 --plot fit.png
    python fit_curve.py seed0.csv seed1.csv seed2.csv --seeds      # one setting, several seeds
    python fit_curve.py --compare base=b0.csv,b1.csv scalerl=s0.csv,s1.csv --plot compare.png

The curve (Khatri et al., arXiv 2510.13786, sec. 2.1) is a sigmoid in log compute,

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

with A the asymptote, B the efficiency exponent, C_mid the compute at half of the gain, and R0 the pass rate before
training. The method, in the order of this file:

1. Least squares by variable projection: for given B and C_mid the curve is linear in A, so a small grid over
   (B, log C_mid) with A in closed form finds the valley, and Levenberg-Marquardt walks to its bottom. The published
   grid search (`--method paper`) is here too.
2. Intervals by profile likelihood over A, widened because neighbouring validations are correlated.
3. What the data does not carry is not reported: a run that has barely passed its midpoint has no asymptote yet.
4. Beside every forecast stand the two baselines it has to beat: a power law and "the last value stays".
"""

import argparse
import csv
import difflib
import io
import json
import os
import re
import sys
import warnings
from dataclasses import dataclass, field

import numpy as np
from scipy.special import stdtrit  # the quantile of Student's t; scipy.stats takes three times as long to import

LEAST_REACH = 1.5  # C_max / C_mid below which no asymptote is reported, ...
SAFE_REACH = 2.0  # ... and below which it comes with a warning
MARGIN = 0.02  # asymptotes closer than this are not told apart (paper, sec. 2.1 and A.8)
B_RANGE = 0.05, 30.0


# ---------------------------------------------------------------------------------------------- the curves


def sigmoid(C, A, B, C_mid, R0):
    """Pass rate at compute C, of C's shape (paper, sec. 2.1): R0 at C = 0, halfway at C_mid, towards A for large C."""
    with np.errstate(divide="ignore", over="ignore"):
        return R0 + (A - R0) / (1 + (C_mid / np.asarray(C, float)) ** B)


def power_law(C, A, D, B):
    """Pass rate at compute C, of C's shape (paper, A.4): A - D / C^B, the baseline without a midpoint."""
    return A - D / np.asarray(C, float) ** B


def rise(log_x, log_B, log_mid):
    """The part of the gain reached, 1 / (1 + (C_mid / C)^B), in logarithms; the arguments broadcast."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-np.exp(log_B) * (log_x - log_mid)))


# ------------------------------------------------------------------------------------------- least squares
# Inside, a curve is theta = (A, log B, log C_mid, R0): logarithms keep B and C_mid positive and well scaled.


def variable_projection(x, y, R0):
    """The sigmoid of least squares with A in [0, 1].

    x (n,) increasing, positive but for an optional leading 0; y (n,); R0 a number, or None to fit it too.
    Returns theta (4,) and its sum of squared residuals.
    """
    with np.errstate(divide="ignore"):
        log_x = np.log(x)
    first, last = log_x[np.isfinite(log_x)][[0, -1]]
    grid = np.meshgrid(np.linspace(np.log(0.15), np.log(15), 24), np.linspace(first - 1, last + 4, 32))
    log_B, log_mid = grid[0].reshape(-1, 1), grid[1].reshape(-1, 1)
    g = rise(log_x, log_B, log_mid)  # (24 * 32, n)
    # y = R0 + gain * g is linear: a line through R0, or with a free intercept
    if R0 is None:
        centred = g - g.mean(1, keepdims=True)
        gain = centred @ y / ((centred**2).sum(1) + 1e-300)
        base = y.mean() - gain * g.mean(1)
    else:
        gain = g @ (y - R0) / ((g**2).sum(1) + 1e-300)
        base = np.full(len(gain), R0)
    A = np.clip(base + gain, 0, 1)
    best = ((base[:, None] + (A - base)[:, None] * g - y) ** 2).sum(1).argmin()
    theta = np.array([[A[best], log_B[best, 0], log_mid[best, 0], base[best]]])
    free = [0, 1, 2] if R0 is not None else [0, 1, 2, 3]
    theta, sse, _ = levenberg_marquardt(log_x, y, theta, free)
    if not 0 <= theta[0, 0] <= 1:  # a pass rate cannot be: the best curve then has A on its bound
        theta[:, 0] = np.clip(theta[:, 0], 0, 1)
        theta, sse, _ = levenberg_marquardt(log_x, y, theta, free[1:])
    return theta[0], sse[0]


def levenberg_marquardt(log_x, y, theta, free, steps=50):
    """Least squares from k starting curves at once: theta (k, 4), of which only the columns in `free` move.

    Returns the curves (k, 4), their sums of squared residuals (k,) and J'J (k, len(free), len(free)).
    """
    first, last = log_x[np.isfinite(log_x)][[0, -1]]
    low = np.array([-np.inf, np.log(B_RANGE[0]), first - 3, -np.inf])
    high = np.array([np.inf, np.log(B_RANGE[1]), last + 7, np.inf])
    log_x = np.maximum(log_x, -1e4)  # compute 0: far to the left, where the curve is flat at R0

    def evaluate(theta):
        A, log_B, log_mid, R0 = theta.T[:, :, None]
        g = rise(log_x, log_B, log_mid)
        slope = (A - R0) * np.exp(log_B) * g * (1 - g)  # dR / d log C
        # dR/dA, dR/d log B, dR/d log C_mid, dR/dR0
        J = np.stack([g, slope * (log_x - log_mid), -slope, 1 - g], axis=1)[:, free]
        residual = R0 + (A - R0) * g - y
        return (residual**2).sum(1), (J @ residual[:, :, None])[:, :, 0], J @ J.transpose(0, 2, 1)

    sse, gradient, JJ = evaluate(theta)
    damping, identity = np.full(len(theta), 1e-3), np.eye(len(free))
    for _ in range(steps):
        damped = JJ * (1 + damping[:, None, None] * identity) + 1e-14 * identity
        trial = theta.copy()
        trial[:, free] -= np.linalg.solve(damped, gradient[:, :, None])[:, :, 0]
        trial = np.clip(trial, low, high)
        new = evaluate(trial)
        better = new[0] < sse
        done = (np.abs(trial - theta).max(1) < 1e-7) | (damping > 1e6)
        theta = np.where(better[:, None], trial, theta)
        sse = np.where(better, new[0], sse)
        gradient = np.where(better[:, None], new[1], gradient)
        JJ = np.where(better[:, None, None], new[2], JJ)
        damping = np.where(better, damping / 10, damping * 10)
        if done.all():
            break
    return theta, sse, JJ


PAPER_A = np.linspace(0.450, 0.800, 71)
PAPER_C_MID = np.linspace(100, 40000, 100)


def paper_grid(x, y, R0):
    """The paper's procedure to the letter (A.4): B by SciPy for each A and C_mid of the grid, lowest squared error.

    Arguments and results as in `variable_projection`; x is in GPU-hours, R0 a number.
    """
    from scipy.optimize import curve_fit

    best = np.inf, None
    for A in PAPER_A:
        for C_mid in PAPER_C_MID:
            try:
                with warnings.catch_warnings():  # SciPy's remarks on pairs that are far off
                    warnings.simplefilter("ignore")
                    (B,), _ = curve_fit(lambda C, B: R0 + (A - R0) / (1 + (C_mid / C) ** B), x, y)
            except RuntimeError:  # no convergence from this pair
                continue
            sse = ((sigmoid(x, A, B, C_mid, R0) - y) ** 2).sum()
            if sse < best[0] and B > 0:
                best = sse, np.array([A, np.log(B), np.log(C_mid), R0])
    if best[1] is None:
        raise ValueError("the published grid holds no rising curve for this data: use --method varpro")
    return best[1], best[0]


def fit_power_law(x, y):
    """(A, D, B) of least squares with A <= 1 (paper, A.4). x (n,) > 0, y (n,). A and D are linear: only B is searched."""
    log_B, scale = np.linspace(np.log(1e-3), np.log(10), 200), x[-1]
    for _ in range(4):  # each round looks closer, around the best B of the round before
        z = (x / scale) ** -np.exp(log_B)[:, None]
        centred = z - z.mean(1, keepdims=True)
        D = -centred @ y / ((centred**2).sum(1) + 1e-300)
        A = y.mean() + D * z.mean(1)
        D = np.where(A > 1, z @ (1 - y) / (z**2).sum(1), D)
        A = np.minimum(A, 1)
        i = ((A[:, None] - D[:, None] * z - y) ** 2).sum(1).argmin()
        best = A[i], D[i] * scale ** np.exp(log_B[i]), np.exp(log_B[i])
        log_B = np.linspace(log_B[max(i - 1, 0)], log_B[min(i + 1, len(log_B) - 1)], 30)
    return best


# ----------------------------------------------------------------------------------------------- intervals


def lag_one_correlation(residual, parameters):
    """Correlation of neighbouring residuals, and the same corrected for its bias.

    A smooth curve soaks up slow noise, so residuals look less correlated than the noise is: by about
    (p + 3 p r) / n for p fitted parameters, p times Kendall's bias for a fitted mean.
    """
    n, p = len(residual), parameters
    raw = residual[1:] @ residual[:-1] / max(residual @ residual, 1e-300)
    corrected = (n * raw + p) / (n - 3 * p) if n > 3 * p + 1 else 0.9
    return raw, np.clip(corrected, 0, 0.9)


def allowance(sse, n, parameters, correlation):
    """How much more than the least squared error a curve may have and still be in the 95 % interval.

    s^2 t^2 is the profile-likelihood bound for independent noise; (1+r)/(1-r) is how much more the mean of noise
    with neighbour correlation r varies. Without it such intervals hold the truth 50-85 % of the time, not 95 %.
    """
    degrees = n - parameters
    return max(sse / degrees, 1e-18) * stdtrit(degrees, 0.975) ** 2 * (1 + correlation) / (1 - correlation)


@dataclass(frozen=True)
class Profile:
    """The best curves at fixed A, across the 95 % interval of A: theta (k, 4), the squared error each may still add
    (k,), and the inverse of J'J (k, f, f) for the `free` columns. The other intervals are read off these: exact
    along A, where the problem bends, and quadratic across, where it hardly does."""

    theta: np.ndarray
    slack: np.ndarray
    spread: np.ndarray
    free: list

    def interval(self, value, gradient):
        """(low, high) of a function of the curve: value (k,) and gradient (k, f) at the curves of the profile."""
        half = np.sqrt(self.slack * np.einsum("ki,kij,kj->k", gradient, self.spread, gradient))
        return float((value - half).min()), float((value + half).max())


def profile_over_A(x, y, theta, sse, extra, R0_free):
    """(low, high) of A, between 0 and 1, and the Profile: where the squared error is within `extra` of the least."""
    with np.errstate(divide="ignore"):
        log_x = np.log(x)
    free = [1, 2, 3] if R0_free else [1, 2]
    JJ = levenberg_marquardt(log_x, y, theta[None], [0] + free, steps=0)[2][0]
    spread = np.linalg.pinv(JJ, rcond=1e-12, hermitian=True)
    wald = np.sqrt(spread[0, 0] * extra) + 1e-9

    def best_at(A):
        start = np.tile(theta, (len(A), 1))
        start[:, 0] = A  # the others start where the tangent of the valley points
        start[:, free] += np.clip((A - theta[0])[:, None] * spread[0, 1:] / (spread[0, 0] + 1e-300), -2, 2)
        return levenberg_marquardt(log_x, y, start, free, steps=25)

    steps = wald * np.array([0.3, 0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5, 9, 20])
    A = np.clip(np.concatenate([theta[0] - steps, [0], theta[0] + steps, [1]]), 0, 1)
    root = np.sqrt(np.maximum(best_at(A)[1] - sse, 0))  # nearly linear in A: good to interpolate
    ends = []
    for side, bound in ((slice(0, 12), 0.0), (slice(12, 24), 1.0)):
        A_side, root_side = np.append(theta[0], A[side]), np.append(0, root[side])
        over = np.flatnonzero(root_side > np.sqrt(extra))
        i = over[0] if len(over) else None
        ends.append(bound if i is None else
                    float(np.interp(np.sqrt(extra), root_side[i - 1 : i + 1], A_side[i - 1 : i + 1])))
    curves, sse_at, JJ = best_at(np.append(np.linspace(*ends, 20), theta[0]))
    slack = np.maximum(sse + extra - sse_at, 0)
    return tuple(ends), Profile(curves, slack, np.linalg.pinv(JJ, rcond=1e-12, hermitian=True), free)


# --------------------------------------------------------------------------------------------------- a fit


@dataclass(frozen=True)
class Fit:
    """A fitted curve and what is known about it. x, y are the points fitted (m,).

    `interval` maps A, B, C_mid, R0 to 95 % (low, high). `identified` says whether the data carries A (and with it
    B and C_mid): if not, A, B and C_mid only describe the fitted line, and of A the lower bound is what is known.
    """

    A: float
    B: float
    C_mid: float
    R0: float
    rms: float
    interval: dict
    warnings: list
    identified: bool
    sse: float
    lag_1: float  # correlation of neighbouring residuals
    correlation: float  # the same, corrected for bias: what widens the intervals
    noise: float | None  # binomial standard deviation of one validation, where num_examples is known
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    R0_from: str = "first"
    profile: Profile = field(repr=False, default=None)

    @property
    def C_max(self):
        return float(self.x[-1])

    @property
    def reach(self):
        """C_max / C_mid: how far the data goes past the middle of the rise."""
        return self.C_max / self.C_mid

    def predict(self, C):
        """The fitted curve at compute C, of C's shape."""
        return sigmoid(C, self.A, self.B, self.C_mid, self.R0)

    def band(self, C):
        """95 % interval (low, high) of the curve at compute C, each of C's shape. A validation scatters around it."""
        log_C = np.log(np.maximum(np.asarray(C, float), 1e-300))
        low, high = np.empty(log_C.shape), np.empty(log_C.shape)
        A, log_B, log_mid, R0 = self.profile.theta.T
        for i, c in np.ndenumerate(log_C):
            g = rise(c, log_B, log_mid)
            slope = (A - R0) * np.exp(log_B) * g * (1 - g)
            gradient = np.stack([g, slope * (c - log_mid), -slope, 1 - g], axis=1)[:, self.profile.free]
            low[i], high[i] = self.profile.interval(R0 + (A - R0) * g, gradient)
        return np.clip(low, 0, 1), np.clip(high, 0, 1)


def fit(x, y, r0=None, fit_from=0.0, fit_to=np.inf, method="varpro", num_examples=None):
    """Fit the sigmoid to compute x (n,) and pass rate y (n,), both increasing in time.

    r0: None or "first" (the first point is the pass rate before training; it gives R0 and is not fitted), "free"
    (fitted), or the value. Points with fit_from <= x <= fit_to are fitted. method: "varpro", or "paper" for the
    published grid. num_examples: answers per validation, for the binomial noise. Raises ValueError when the data
    cannot be fitted. Returns a Fit.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    check(x, y, lambda i: f"point {i + 1}")
    R0, start = (None if r0 == "free" else float(y[0]) if r0 in (None, "first") else float(r0)), 0
    if r0 in (None, "first"):
        start = 1
    elif R0 is not None and x[0] == 0:
        start = 1  # R0 is given, and log 0 is undefined
    keep = (np.arange(len(x)) >= start) & (x >= fit_from) & (x <= fit_to)
    fit_x, fit_y = x[keep], y[keep]
    n, parameters = len(fit_x), 3 + (R0 is None)
    if n <= parameters:
        raise ValueError(f"{n} point{'s' * (n != 1)} to fit between {fit_from:g} and {fit_to:g}, and the curve has "
                         f"{parameters} parameters: at least {parameters + 1} points are needed")
    if np.ptp(fit_y) == 0:
        raise ValueError(f"the pass rate is {fit_y[0]:g} at all {n} points: a constant has no curve to fit")

    theta, sse = variable_projection(fit_x, fit_y, R0)
    raw, correlation = lag_one_correlation(sigmoid(fit_x, theta[0], *np.exp(theta[1:3]), theta[3]) - fit_y, parameters)
    extra = allowance(sse, n, parameters, correlation)
    A_interval, profile = profile_over_A(fit_x, fit_y, theta, sse, extra, R0 is None)
    unit = np.eye(len(profile.free)) [:, None] * np.ones((1, len(profile.theta), 1))
    interval = {"A": A_interval}
    for i, name in enumerate(("B", "C_mid")):
        interval[name] = tuple(float(v) for v in np.exp(profile.interval(profile.theta[:, i + 1], unit[i])))
    noise = None if num_examples is None else float(np.sqrt(np.mean(fit_y * (1 - fit_y)) / num_examples))
    if R0 is None:
        interval["R0"] = profile.interval(profile.theta[:, 3], unit[2])
    elif r0 in (None, "first"):  # one validation, with the noise of one validation
        sd = np.sqrt(R0 * (1 - R0) / num_examples) if num_examples else np.sqrt(sse / (n - parameters))
        interval["R0"] = (max(R0 - 1.96 * sd, 0.0), min(R0 + 1.96 * sd, 1.0))
    else:
        interval["R0"] = (R0, R0)
    if method == "paper":
        if R0 is None:
            raise ValueError("the published grid needs R0: give a number or 'first', not 'free'")
        theta, sse = paper_grid(fit_x, fit_y, R0)
    A, B, C_mid, R0 = float(theta[0]), float(np.exp(theta[1])), float(np.exp(theta[2])), float(theta[3])
    identified, warnings = judge(x, y, fit_x, fit_y, A, B, C_mid, R0, sse, interval, correlation, noise, r0)
    if method == "paper":
        warnings += judge_grid(A, C_mid, interval)
    return Fit(A, B, C_mid, R0, float(np.sqrt(sse / (n - parameters))), interval, warnings, identified, float(sse),
               float(raw), float(correlation), noise, fit_x, fit_y, str(r0 or "first"), profile)


def check(x, y, where):
    """Raise ValueError, with where(i) of the offending point, unless x and y are a curve that can be fitted."""
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x and y must be two lists of the same length, got shapes {x.shape} and {y.shape}")
    if len(x) < 2:
        raise ValueError(f"{len(x)} point{'s' * (len(x) != 1)}: a curve needs at least 5")
    for i in range(len(x)):
        if not (np.isfinite(x[i]) and np.isfinite(y[i])):
            raise ValueError(f"{where(i)}: x = {x[i]:g}, y = {y[i]:g} is not a finite number: remove the line")
        if x[i] < 0 or (x[i] == 0 and i > 0):
            raise ValueError(f"{where(i)}: x = {x[i]:g}: compute is positive (0 only at the first point, before training)")
        if i and x[i] <= x[i - 1]:
            raise ValueError(f"{where(i)}: x = {x[i]:g} comes after {x[i - 1]:g}: x must increase; a resumed run "
                             "repeats points, keep one of each")
    bad = np.flatnonzero((y < 0) | (y > 1))
    if len(bad):
        percent = y.min() >= 0 and 1.5 < y.max() <= 100
        raise ValueError(f"{where(bad[0])}: y = {y[bad[0]]:g} is no pass rate, which lies in [0, 1]: "
                         + ("if it is in percent, say --percent" if percent else "name the right column with --y"))


def judge(x, y, fit_x, fit_y, A, B, C_mid, R0, sse, interval, correlation, noise, r0):
    """(identified, warnings): whether the data carries an asymptote, and everything a reader should know first."""
    n, warnings = len(fit_x), []
    low, high = interval["A"]
    reach, rms = fit_x[-1] / C_mid, np.sqrt(sse / n)
    identified = reach >= LEAST_REACH
    if reach < LEAST_REACH:
        warnings.append(f"A is not identified: the data ends at {reach:.2g} C_mid, less than {LEAST_REACH}; "
                        f"what it says is A > {low:.3f}")
    elif reach < SAFE_REACH:
        warnings.append(f"the data ends at {reach:.2g} C_mid: below {SAFE_REACH:g} the asymptote moves with every point")
    if A > 0.9999 and low < 0.95:
        identified = False
        warnings.append(f"A is on its bound 1: the data gives no ceiling, only A > {low:.3f}")
    elif identified and high - low > abs(A - R0):
        identified = False
        warnings.append(f"A is not identified: its interval [{low:.3f}, {high:.3f}] is wider than the gain itself")
    window = y[(x >= fit_x[0]) & (x <= fit_x[-1])]
    level = np.convolve(window, np.ones(3) / 3, "valid")  # of three neighbours
    jump = np.median(np.abs(np.diff(window))) / 0.954  # standard deviation of one point, blind to slow movement
    peak, fall = level.argmax(), level.max() - level[-1]
    if fall > max(0.2 * (level.max() - R0), 4 * jump):
        collapse = fall > 0.5 * abs(level.max() - min(R0, level[-1]))
        identified = identified and not collapse
        warnings.append(
            f"{'collapse' if collapse else 'decline'}: the pass rate fell from {level.max():.3f} around "
            f"x = {fit_x[peak + 1]:.4g} to {level[-1]:.3f} at the end; a sigmoid cannot fall, so "
            + (f"this fit means nothing: try --fit-to {fit_x[peak + 1]:.4g}" if collapse else "A lies below the peak"))
    if A <= R0 or abs(A - R0) < 2 * rms:
        identified = False
        warnings.append(f"no rise above R0 = {R0:.3f} that stands out of the noise ({rms:.3f})")
    late = fit_x >= fit_x[-1] / 4
    if late.sum() >= 6:
        slope, error = line(np.log(fit_x[late]), fit_y[late])
        if abs(slope) < 2 * error * np.sqrt((1 + correlation) / (1 - correlation)):
            warnings.append(f"flat: no gain since x = {fit_x[late][0]:.4g} ({late.sum()} points): the run stands at its "
                            "asymptote or has stalled; more compute alone bought nothing")
    if fit_x[0] > C_mid:
        warnings.append(f"more than half of the rise came before the first fitted point: C_mid and B lean on R0 alone")
    if r0 in (None, "first") and x[0] > 0:
        warnings.append(f"R0 = {R0:.3f} is the first point, at x = {x[0]:.4g}, not before training: give --r0 if you know")
    if n < 6:
        warnings.append(f"only {n} points: the intervals lean on {n - 3} degree{'s' * (n > 4)} of freedom")
    if not B_RANGE[0] * 1.01 < B < B_RANGE[1] / 1.01:
        warnings.append(f"B is on its bound {B:.3g}: the rise is a step, or has no shape yet")
    if correlation > 0.6 and n > 10:
        warnings.append(f"residuals drift (correlation of neighbours {correlation:.2f}): the curve misses a slow movement")
    if noise is not None and rms > 2 * noise:
        warnings.append(f"residuals ({rms:.4f}) are more than twice the noise of a validation ({noise:.4f}): the run is "
                        "less smooth than this curve")
    if noise is not None and abs(A - R0) < 4 * noise:
        warnings.append(f"the gain is within four times the noise of one validation ({noise:.4f}): use more examples")
    return bool(identified), warnings


def line(x, y):
    """Slope of least squares and its standard error."""
    x = x - x.mean()
    slope = x @ y / (x @ x)
    residual = y - y.mean() - slope * x
    return slope, np.sqrt(residual @ residual / (len(x) - 2) / (x @ x))


def judge_grid(A, C_mid, interval):
    """Warnings about the published grid: a result on its edge, or between its points."""
    warnings, step = [], PAPER_C_MID[1] - PAPER_C_MID[0]
    if A in PAPER_A[[0, -1]]:
        warnings.append(f"A = {A:.3f} is on the edge of the published grid")
    if min(abs(C_mid - PAPER_C_MID[[0, -1]])) < 1:
        warnings.append(f"C_mid = {C_mid:.0f} is on the edge of the published grid")
    low, high = interval["C_mid"]
    warnings.append(f"C_mid snaps to the published grid, in steps of {step:.0f} ({step / C_mid:.0%} of C_mid), A to .005")
    return warnings


def held_out(x, y, r0=None, fraction=0.5):
    """Fit the part with compute <= fraction of the last, forecast the end (the mean of the last three points).

    Returns a dict: fit_to, n_points, x (mean compute of the last points), came, and the forecasts sigmoid, power_law,
    last_value. Raises ValueError when the first part cannot be fitted.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    early = fit(x, y, r0, fit_to=fraction * x[-1])
    last = slice(max(len(x) - 3, int((x <= fraction * x[-1]).sum())), None)
    return {"fit_to": float(fraction * x[-1]), "n_points": len(early.x), "x": float(x[last].mean()),
            "came": float(y[last].mean()), "sigmoid": float(early.predict(x[last]).mean()),
            "power_law": float(power_law(x[last], *fit_power_law(early.x[early.x > 0], early.y[early.x > 0])).mean()),
            "last_value": float(early.y[-1]), "identified": early.identified}


# ------------------------------------------------------------------------------------------ seeds, settings


def over_seeds(values):
    """Mean of one value a seed and its 95 % t-interval (low, high); values (k,), k >= 2."""
    values = np.asarray(values, float)
    half = stdtrit(len(values) - 1, 0.975) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), (float(values.mean() - half), float(values.mean() + half))


def estimate(values, errors, degrees):
    """(mean, standard error, degrees of freedom) of a setting: the spread of its seeds, or of its one run's fit."""
    if len(values) > 1:
        return np.mean(values), np.std(values, ddof=1) / np.sqrt(len(values)), len(values) - 1
    return values[0], errors[0], degrees[0]


def difference(one, other):
    """one - other of two estimates, and the 95 % half-width of that difference (Welch)."""
    (a, error_a, degrees_a), (b, error_b, degrees_b) = one, other
    variance = error_a**2 + error_b**2
    degrees = variance**2 / (error_a**4 / degrees_a + error_b**4 / degrees_b + 1e-300)
    return a - b, stdtrit(max(degrees, 1), 0.975) * np.sqrt(variance)


def efficiency_at(fitted, A):
    """(log B, its standard error, log C_mid, its standard error) of a run's curve with the asymptote held at A
    (paper, A.8); the errors are widened for correlation as the intervals are."""
    theta = np.array([[A, np.log(fitted.B), np.log(fitted.C_mid), fitted.R0]])
    theta, sse, JJ = levenberg_marquardt(np.log(fitted.x), fitted.y, theta, [1, 2])
    widened = allowance(sse[0], len(fitted.x), 2, fitted.correlation) / stdtrit(len(fitted.x) - 2, 0.975) ** 2
    errors = np.sqrt(widened * np.diag(np.linalg.inv(JJ[0])))
    return theta[0, 1], errors[0], theta[0, 2], errors[1]


def compare(name_one, one, name_two, two):
    """The paper's comparison of two settings (A.8), each a list of Fits (one a seed).

    Asymptotes first: told apart only if further apart than the margin and than their errors. Else B again with A held
    at the mean over all the runs, and at that +- .02, for the answer must not hang on it. Returns a dict with both and
    a verdict in words.
    """
    result = {"settings": [name_one, name_two], "A": None, "difference": None, "common_A": None, "efficiency": []}
    lost = [name for name, fits in ((name_one, one), (name_two, two)) if not all(f.identified for f in fits)]
    if lost:
        return result | {"verdict": f"no difference that this data shows: A is not identified for {' and '.join(lost)}"}

    def ceiling(fits):
        errors = [(f.interval["A"][1] - f.interval["A"][0]) / 2 / stdtrit(len(f.x) - 3, 0.975) for f in fits]
        return estimate([f.A for f in fits], errors, [len(f.x) - 3 for f in fits])

    gap, error = difference(ceiling(one), ceiling(two))
    result |= {"A": [float(ceiling(one)[0]), float(ceiling(two)[0])], "difference": [gap, gap - error, gap + error]}
    if abs(gap) >= MARGIN and abs(gap) > error:
        higher, lower = (name_one, name_two) if gap > 0 else (name_two, name_one)
        return result | {"verdict": f"{higher} raises the ceiling: A is {abs(gap):.3f} +- {error:.3f} above {lower}"}

    common = float(np.mean([f.A for f in one + two]))
    told = []
    for A in (common - MARGIN, common, common + MARGIN):
        at = [[efficiency_at(f, A) for f in fits] for fits in (one, two)]
        degrees = [[len(f.x) - 2 for f in fits] for fits in (one, two)]
        B, mid = ([estimate([e[i] for e in a], [e[i + 1] for e in a], d) for a, d in zip(at, degrees)] for i in (0, 2))
        (B_gap, B_error), (mid_gap, mid_error) = difference(*B), difference(*mid)
        result["efficiency"].append({"A": A, "B": [float(np.exp(b[0])) for b in B], "B_ratio": [
            float(np.exp(B_gap + s * B_error)) for s in (0, -1, 1)], "C_mid": [float(np.exp(m[0])) for m in mid],
            "C_mid_ratio": [float(np.exp(mid_gap + s * mid_error)) for s in (0, -1, 1)]})
        told.append((np.sign(B_gap) * (abs(B_gap) > B_error), -np.sign(mid_gap) * (abs(mid_gap) > mid_error)))
    steeper, sooner = (votes[0] if len(set(votes)) == 1 else 0 for votes in zip(*told))
    middle = result["efficiency"][1]
    words = f"at the common A = {common:.3f}, B {middle['B'][0]:.2f} against {middle['B'][1]:.2f}, " \
            f"C_mid {middle['C_mid'][0]:.4g} against {middle['C_mid'][1]:.4g}"
    if steeper * sooner < 0:
        verdict = f"{(name_two, name_one)[steeper > 0]} is steeper but reaches the middle later: no overall winner"
    elif steeper or sooner:
        verdict = f"{(name_two, name_one)[steeper + sooner > 0]} is more efficient"
    else:
        verdict = "no difference that this data shows"
    return result | {"common_A": common, "verdict": f"{verdict} ({words}; ceilings within {max(MARGIN, error):.3f})"}


# ------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Series:
    """One run's curve: compute x (n,), pass rate y (n,), the columns' names, and where each point was read."""

    name: str
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    x_name: str = "x"
    y_name: str = "y"
    num_examples: float | None = None
    notes: tuple = ()


# Column names in use, best first; each is matched in full, ignoring case.
X_NAMES = [r"(compute_?)?(flops|flos)", r".*(gpu|device|accelerator)[ _-]?hours.*", r"compute.*",
           r"((num|total|cumulative|sampled)_)?tokens|num_input_tokens_seen", r"(wall_?)?(seconds|time|clock|hours)",
           r"relative time.*|_runtime", r"(.*/)?_?(global_)?step|iteration", r"epoch", r"x"]
Y_NAMES = [r"pass_rate", r".*pass.?rate.*", r"val.*(acc|reward|score|mean@|pass@).*", r"eval.*(acc|reward|score|pass).*",
           r"test.*(acc|reward|score|pass).*", r"(.*[/_ ])?(acc|accuracy)([/_ @].*)?", r"(critic/)?(rewards?|score)(/mean)?",
           r"y"]
NOT_A_MEAN = re.compile(r".*(__min|__max|[/_]std|[/_]min|[/_]max|[/_]std@\d+)$", re.I)


def read_log(path, x=None, y=None, percent=False):
    """The curves in a log: a list of Series (several for a wide CSV with one column a run).

    path: a run folder, or a CSV, JSONL, trainer_state.json or verl console log, told by its content. x, y: column
    names, guessed when None (the guess is in Series.notes). percent: divide y by 100. Raises ValueError naming file
    and line, OSError when the file cannot be read.
    """
    path = os.fspath(path)
    file = path
    if os.path.isdir(path):
        found = [name for name in ("log.jsonl", "trainer_state.json") if os.path.exists(os.path.join(path, name))]
        if not found:
            raise ValueError(f"{path}: no log.jsonl and no trainer_state.json in this folder")
        file = os.path.join(path, found[0])
    with open(file, "rb") as handle:
        text = handle.read().decode("utf-8", errors="replace")
    rows, notes = read_rows(text, file)
    if any(row.get("kind") == "validation" for _, row in rows):
        rows = [(where, row) for where, row in rows if row.get("kind") == "validation"]
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    name = os.path.basename(os.path.normpath(path))
    runs = {c: c.split(" - ", 1) for c in columns if " - " in c and not NOT_A_MEAN.match(c)}
    if runs and y not in columns:  # a wide W&B export: "run - metric", one column a run
        metrics = list(dict.fromkeys(metric for _, metric in runs.values()))
        metric = y or (metrics[0] if len(metrics) == 1 else guess(metrics, Y_NAMES, lambda c: True))
        wanted = {column: run for column, (run, m) in runs.items() if m == metric}
        if not wanted:
            raise ValueError(f"{file}: which metric? name one with --y; there are: {', '.join(metrics)}")
    else:
        wanted = {y: name}
    return [series(rows, columns, file, name, x, column, percent, notes) for column, name in wanted.items()]


def series(rows, columns, file, name, x, y, percent, notes):
    """One Series out of rows [(where, {column: value})]; x and y are column names or None."""
    for flag, column in (("--x", x), ("--y", y)):
        if column is not None and column not in columns:
            near = difflib.get_close_matches(column, columns, 1)
            raise ValueError(f"{file}: no column {column!r}{f', did you mean {near[0]!r}' if near else ''}; name one with "
                             f"{flag} of: {', '.join(columns)}")
    filled = lambda column: {where for where, row in rows if row.get(column) not in (None, "")}  # noqa: E731
    chosen = []
    if x is None:  # a guess is good only where both columns have values
        known = filled(y) if y else None
        x = guess(columns, X_NAMES, lambda c: len(filled(c) & known) > 1 if known else len(filled(c)) > 1)
        chosen.append(f"x: {x}")
    if y is None and x is not None:
        y = guess(columns, Y_NAMES, lambda c: c != x and len(filled(c) & filled(x)) > 1)
        others = [c for c in columns if c != x]
        y = others[0] if y is None and len(others) == 1 else y
        chosen.append(f"y: {y}")
    if x is None or y is None:
        raise ValueError(f"{file}: which column is the {'compute' if x is None else 'pass rate'}? name it with "
                         f"{'--x' if x is None else '--y'} of: {', '.join(columns)}")
    places, points, examples = [], [], []
    for where, row in rows:
        if row.get(x) in (None, "") or row.get(y) in (None, ""):
            continue
        places.append(where)
        points.append([number(row[column], where, column) for column in (x, y)])
        if row.get("num_examples"):
            examples.append(number(row["num_examples"], where, "num_examples"))
    if not points:
        raise ValueError(f"{file}: no line has both {x!r} and {y!r}")
    data = np.array(points)
    data[:, 1] /= 100 if percent else 1
    check(data[:, 0], data[:, 1], lambda i: places[i])
    notes = notes + ([f"{', '.join(chosen)} (guessed: --x and --y name others of: {', '.join(columns)})"] if chosen else [])
    return Series(name, data[:, 0], data[:, 1], x, y, float(np.mean(examples)) if examples else None, tuple(notes))


def guess(columns, patterns, usable):
    """The first usable column that a pattern matches, best pattern first; None if there is none."""
    for pattern in patterns:
        for column in columns:
            if re.fullmatch(pattern, column, re.I) and not NOT_A_MEAN.match(column) and usable(column):
                return column
    return None


def number(value, where, column):
    """A log's value as a float; ValueError, saying where, for text."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {column} = {str(value)[:40]!r} is not a number") from None


VERL_STEP = re.compile(r"\bstep:(\d+) - ")
VERL_VALUE = re.compile(r"([^\s:]+):(?:np\.\w+\()?([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))", re.I)


def read_rows(text, file):
    """([(where, {column: value})], notes) of a log's text; the format is told by the content."""
    if not text.strip():
        raise ValueError(f"{file}: the file is empty")
    lines, start = text.splitlines(), text.lstrip()[0]
    if start in "{[":
        try:
            whole = json.loads(text)
        except ValueError:
            whole = None
        whole = whole.get("log_history", [whole]) if isinstance(whole, dict) else whole
        if whole is not None:
            if not (isinstance(whole, list) and all(isinstance(row, dict) for row in whole)):
                raise ValueError(f"{file}: JSON without a list of records (log_history, or one object a line)")
            return [(f"{file}, entry {i}", row) for i, row in enumerate(whole, 1)], []
        rows = []
        for i, record in enumerate(lines, 1):
            try:
                if record.strip():
                    rows.append((f"{file}, line {i}", json.loads(record)))
            except ValueError:
                if i == len(lines) and rows and not text.endswith("\n"):  # the run is writing it, or was cut off
                    return rows, [f"line {i} is cut off and left out"]
                raise ValueError(f"{file}, line {i}: not valid JSON: {record[:40]!r}") from None
            if rows and not isinstance(rows[-1][1], dict):
                raise ValueError(f"{file}, line {i}: not an object with named columns: {record[:40]!r}")
        return rows, []
    if VERL_STEP.search(text):
        rows = []
        for i, record in enumerate(lines, 1):
            if match := VERL_STEP.search(record):
                rows.append((f"{file}, line {i}", {"step": match[1]} | dict(VERL_VALUE.findall(record[match.end():]))))
        return rows, []
    delimiter = max(",\t;", key=lines[0].count)
    table = csv.reader(io.StringIO(text.lstrip("\ufeff")), delimiter=delimiter)
    header = [column.strip() for column in next(table)]
    if any(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", column, re.I) for column in header):
        raise ValueError(f"{file}, line 1: a number where column names are expected: add a header such as compute,pass_rate")
    rows = []
    for row in table:
        if len(row) > len(header):
            raise ValueError(f"{file}, line {table.line_num}: {len(row)} fields under {len(header)} column names")
        if row:
            rows.append((f"{file}, line {table.line_num}", dict(zip(header, (value.strip() for value in row)))))
    if not rows:
        raise ValueError(f"{file}: a header and no data")
    return rows, []


# ----------------------------------------------------------------------------------------- words and files


def report(run, fitted, r0="first", predict=()):
    """Everything known about one run, as the dict that --json writes: numbers the data does not carry are None."""
    x_last = fitted.C_max
    trusted = {name: getattr(fitted, name) if fitted.identified else None for name in ("A", "B", "C_mid")}
    baseline = fit_power_law(fitted.x[fitted.x > 0], fitted.y[fitted.x > 0])
    forecast = []
    for C in [*predict, 2 * x_last]:
        low, high = fitted.band(C)
        forecast.append({"x": float(C), "sigmoid": float(fitted.predict(C)), "interval": [float(low), float(high)],
                         "power_law": float(power_law(C, *baseline)), "last_value": float(fitted.y[-1])})
    try:
        half = held_out(run.x[run.x <= x_last], run.y[run.x <= x_last], r0)
    except ValueError as error:
        half = {"error": str(error)}
    return {"name": run.name, **trusted, "R0": fitted.R0, "identified": fitted.identified,
            "interval": {name: list(ends) for name, ends in fitted.interval.items()}, "sse": fitted.sse,
            "rms": fitted.rms, "lag_1": fitted.lag_1, "noise": fitted.noise, "n_points": len(fitted.x),
            "C_max_over_C_mid": fitted.reach, "x": run.x_name, "y": run.y_name,
            "points": np.stack([run.x, run.y], 1).tolist(), "fit_window": [float(fitted.x[0]), x_last],
            "forecast": forecast, "baselines": {"power_law": dict(zip("ADB", map(float, baseline))), "held_out": half},
            "warnings": fitted.warnings}


def words(run, result):
    """The report of one run as text."""
    meaning = {"A": "asymptote", "B": "exponent", "C_mid": f"{run.x_name} at half of the gain", "R0": "before training"}
    lines = [f"{run.name}: {result['n_points']} of {len(run.x)} points fitted, "
             f"{run.x_name} {result['fit_window'][0]:.4g} to {result['fit_window'][1]:.4g}"]
    lines += [f"  {note}" for note in run.notes]
    for name, text in meaning.items():
        low, high = result["interval"][name]
        value = "not identified" if result[name] is None else f"{result[name]:.4g}"
        lines.append(f"  {name:6}{value:>15}   95 % [{low:.4g}, {high:.4g}]   {text}")
    lines.append(f"  C_max/C_mid {result['C_max_over_C_mid']:.2g}, residual rms {result['rms']:.4f}, neighbours' "
                 f"correlation {result['lag_1']:.2f}")
    for f in result["forecast"]:
        lines.append(f"  forecast at {f['x']:.4g}: {f['sigmoid']:.3f} [{f['interval'][0]:.3f}, {f['interval'][1]:.3f}]"
                     f"   (power law {f['power_law']:.3f}, last value {f['last_value']:.3f})")
    half = result["baselines"]["held_out"]
    if "error" in half:
        lines.append(f"  held out: the first half of the compute cannot be fitted ({half['error']})")
    else:
        errors = ", ".join(f"{name.replace('_', ' ')} {half[name]:.3f} (off by {half[name] - half['came']:+.3f})"
                           for name in ("sigmoid", "power_law", "last_value"))
        lines.append(f"  held out: from x <= {half['fit_to']:.4g}, the end was {errors}; came {half['came']:.3f}")
    return "\n".join(lines + [f"  ! {warning}" for warning in result["warnings"]])


def write_whole(path, write):
    """Write a file whole or not at all: write(temporary path) beside it, then rename."""
    temporary = f"{path}.{os.getpid()}.part"
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def draw_run(axes, series, fitted, color="C0", details=True):
    """One run: points, curve with band, forecast to 4x the last compute, and with details the asymptote and R0."""
    fits_x = np.isin(series.x, fitted.x)
    shown = series.x > 0
    axes.plot(series.x[shown & fits_x], series.y[shown & fits_x], "o", ms=4, color=color,
              label="validations fitted" if details else None)
    if (shown & ~fits_x).any():
        axes.plot(series.x[shown & ~fits_x], series.y[shown & ~fits_x], "o", ms=4, mfc="none", color=color,
                  label="left out of the fit" if details else None)
    first = series.x[shown][0]
    past, future = np.geomspace(first / 1.5, fitted.C_max, 120), np.geomspace(fitted.C_max, 4 * fitted.C_max, 60)
    everything = np.append(past, future)
    label = f"A {fitted.A:.3f}" if fitted.identified else "A not identified"
    axes.plot(past, fitted.predict(past), color=color,
              label="fitted curve" if details else f"{series.name}: {label}")
    axes.plot(future, fitted.predict(future), "--", color=color, label="forecast" if details else None)
    axes.fill_between(everything, *fitted.band(everything), color=color, alpha=0.18, lw=0,
                      label="95 % interval of the curve" if details else None)
    if details:
        axes.axvspan(fitted.C_max, 4 * fitted.C_max, color="0.5", alpha=0.08, lw=0)
        axes.axhline(fitted.R0, color="0.5", ls=":", lw=1, label=f"R0 {fitted.R0:.3f}, before training")
        if fitted.identified:
            low, high = fitted.interval["A"]
            axes.axhline(fitted.A, color="C3", lw=1, label=f"asymptote A {fitted.A:.3f} [{low:.3f}, {high:.3f}]")
            axes.axvline(fitted.C_mid, color="C2", lw=1, ls="-.", label=f"C_mid {fitted.C_mid:.3g}: half of the gain")
        else:
            axes.axhline(fitted.interval["A"][0], color="C3", lw=1, ls="--",
                         label=f"A not identified: above {fitted.interval['A'][0]:.3f}")


def save_figure(path, figure):
    """Write a matplotlib figure as PNG, whole or not at all."""
    write_whole(path, lambda temporary: figure.savefig(temporary, format="png", dpi=110))


def new_figure(panels, width):
    from matplotlib.figure import Figure  # here, so that importing this file stays fast; pyplot is not needed

    figure = Figure(figsize=(width, 5), layout="constrained")
    return figure, figure.subplots(1, panels)


def plot_runs(path_png, pairs, title=None):
    """Draw [(Series, Fit)] into one PNG: one run in detail, several as curves to compare."""
    figure, axes = new_figure(1, 8)
    for i, (series, fitted) in enumerate(pairs):
        draw_run(axes, series, fitted, f"C{i % 10}", details=len(pairs) == 1)
    finish(axes, pairs[0][0], title or pairs[0][0].name)
    save_figure(path_png, figure)


def plot_run(path_png, series, fit, title=None):
    """Draw one run and its Fit into a PNG, written whole or not at all."""
    plot_runs(path_png, [(series, fit)], title)


def finish(axes, series, title):
    axes.set(xscale="log", xlabel=f"compute: {series.x_name} (log scale)", ylabel=f"pass rate: {series.y_name}", title=title)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def plot_compare(path_png, settings, results):
    """Draw settings {name: [(Series, Fit)]}: the curves, and at a common asymptote the line log F(R) = B log C."""
    figure, (left, right) = new_figure(2, 13)
    common = np.mean([f.A for pairs in settings.values() for _, f in pairs])
    for i, (name, pairs) in enumerate(settings.items()):
        for j, (series, fitted) in enumerate(pairs):
            draw_run(left, series, fitted, f"C{i}", details=False)
            log_B, _, log_mid, _ = efficiency_at(fitted, common)
            inside = (fitted.y > fitted.R0) & (fitted.y < common) & (fitted.x > 0)
            x, y = fitted.x[inside], fitted.y[inside]
            right.plot(x, (y - fitted.R0) / (common - y), "o", ms=4, color=f"C{i}")
            right.plot(x, np.exp(np.exp(log_B) * (np.log(x) - log_mid)), color=f"C{i}",
                       label=f"{series.name}: slope B {np.exp(log_B):.2f}, C_mid {np.exp(log_mid):.3g}")
    finish(left, pairs[0][0], "\n".join(r["verdict"].split(" (")[0] for r in results)[:300])
    finish(right, pairs[0][0], f"efficiency: with A held at {common:.3f}, slope is B, height 1 is C_mid")
    right.axhline(1, color="0.5", lw=1)
    right.set(yscale="log", ylabel="gain reached / gain left, (R - R0) / (A - R)")
    save_figure(path_png, figure)


# --------------------------------------------------------------------------------------------- the command


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know, with the nearest flag that it does."""

    def error(self, message):
        flag = re.search(r"unrecognized arguments: (-\S+)", message)
        near = difflib.get_close_matches(flag[1], self._option_string_actions, 1, 0.3) if flag else []
        sys.exit(fail(f"{message}" + (f"; did you mean {near[0]}?" if near else "")))


def fail(message):
    print(f"fit_curve.py: error: {message}", file=sys.stderr)
    return 2


def arguments(argv):
    parser = Parser(prog="fit_curve.py", description="Fit the ScaleRL curve to logs of RL runs.", allow_abbrev=False)
    parser.add_argument("logs", nargs="+", metavar="LOG", help="run folder, CSV, JSONL, trainer_state.json or verl "
                        "console log; with --compare one setting each: [NAME=]LOG[,LOG...], its seeds joined by commas")
    parser.add_argument("--x", metavar="COLUMN", help="the column of compute")
    parser.add_argument("--y", metavar="COLUMN", help="the column of the pass rate")
    parser.add_argument("--percent", action="store_true", help="y is in percent")
    parser.add_argument("--fit-from", type=float, default=0.0, metavar="X", help="fit from this compute on")
    parser.add_argument("--fit-to", type=float, default=np.inf, metavar="X", help="fit up to this compute")
    parser.add_argument("--r0", type=R0_value, default="first", metavar="VALUE|first|free", help="R0, the pass rate "
                        "before training: a value, the first point, or fitted (default: first)")
    parser.add_argument("--predict", type=float, nargs="+", default=[], metavar="X", help="forecast at these x")
    parser.add_argument("--method", choices=("varpro", "paper"), default="varpro", help="paper: the published grid")
    parser.add_argument("--seeds", action="store_true", help="the logs are seeds of one setting")
    parser.add_argument("--compare", action="store_true", help="each log is a setting: compare them")
    parser.add_argument("--json", metavar="OUT", help="write everything as JSON")
    parser.add_argument("--plot", metavar="OUT.png", help="draw the curve")
    options = parser.parse_args(argv)
    if options.seeds and options.compare:
        parser.error("--seeds pools all logs, --compare sets them against each other: choose one "
                     "(seeds within --compare are joined by commas)")
    return options


def R0_value(text):
    return text if text in ("first", "free") else float(text)


R0_value.__name__ = "R0: a number, first or free"  # argparse shows it


def settings_of(options):
    """{setting name: [(Series, Fit)]} as the command names them."""
    settings = {}
    for argument in options.logs:
        name, _, paths = argument.rpartition("=") if options.compare else ("", "", argument)
        for path in paths.split(",") if options.compare else [paths]:
            for series in read_log(path, options.x, options.y, options.percent):
                try:
                    fitted = fit(series.x, series.y, options.r0, options.fit_from, options.fit_to, options.method,
                                 series.num_examples)
                except ValueError as error:
                    raise ValueError(f"{series.name}: {error}") from None
                key = "all" if options.seeds else name or (paths if "," in paths else f"{path}: {series.name}")
                settings.setdefault(key, []).append((series, fitted))
    return settings


def main(argv=None):
    options = arguments(argv)
    try:
        settings = settings_of(options)
        pairs = [pair for group in settings.values() for pair in group]
        output, text = {"runs": []}, []
        for series, fitted in pairs:
            output["runs"].append(report(series, fitted, options.r0, options.predict))
            text.append(words(series, output["runs"][-1]))
        if options.seeds:
            output["seeds"], line = pooled([f for _, f in pairs])
            text.append(line)
        if options.compare:
            if len(settings) < 2:
                raise ValueError("--compare needs two settings or more")
            names = list(settings)
            output["comparisons"] = [compare(a, [f for _, f in settings[a]], b, [f for _, f in settings[b]])
                                     for i, a in enumerate(names) for b in names[i + 1 :]]
            text += [f"{' against '.join(c['settings'])}: {c['verdict']}" for c in output["comparisons"]]
        if options.plot and options.compare:
            plot_compare(options.plot, settings, output["comparisons"])
        elif options.plot:
            plot_runs(options.plot, pairs)
        if options.json:
            def dump(path):
                with open(path, "w") as handle:
                    json.dump(output, handle, indent=1, allow_nan=False)

            write_whole(options.json, dump)
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        return fail(error)
    print("\n\n".join(text))
    return 0


def pooled(fits):
    """Seeds of one setting: each was fitted, the t-interval is over their values. Returns a dict and a line of text."""
    if len(fits) < 2:
        raise ValueError("--seeds needs two runs or more")
    lost = sum(not f.identified for f in fits)
    if lost:
        return {"A": None}, f"{len(fits)} seeds: {lost} do not identify A, so there is none for the setting"
    values = {name: over_seeds([getattr(f, name) for f in fits]) for name in ("A", "B", "C_mid", "R0")}
    return ({name: {"mean": mean, "interval": list(ends)} for name, (mean, ends) in values.items()},
            f"{len(fits)} seeds, mean and 95 % t-interval: " + ", ".join(
                f"{name} {mean:.4g} [{low:.4g}, {high:.4g}]" for name, (mean, (low, high)) in values.items()))


if __name__ == "__main__":
    sys.exit(main())
