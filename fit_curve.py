"""Fit the ScaleRL curve to the log of any RL run, and say how far to trust it.

    python fit_curve.py runs/NAME                                          # our own run folder
    python fit_curve.py log.csv --x gpu_hours --y pass_rate --predict 1e5 --plot fit.png
    python fit_curve.py seed0.csv seed1.csv seed2.csv --seeds              # several seeds of one setting
    python fit_curve.py --compare base=b0.csv,b1.csv scalerl=s0.csv,s1.csv --plot compare.png
    python fit_curve.py --compare runs/STUDY                               # tables and figures of a study

The curve (Khatri et al., arXiv 2510.13786, sec. 2.1) is a sigmoid in log compute,

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

with A the asymptote, B the exponent (efficiency), C_mid the compute at half of the gain, and R0 the pass rate
before training. The method, in the order of this file:

1. Least squares by variable projection: for given B and C_mid the curve is linear in A, so a small grid over
   (B, log C_mid) with A in closed form finds the valley, and Levenberg-Marquardt walks to its bottom. The
   published grid search is here too (`--method paper`).
2. 95 % intervals by profile likelihood over A, widened because neighbouring validations are correlated.
3. What the data does not carry is not reported: a run that has barely passed its midpoint has no asymptote.
4. Beside every forecast stand the two baselines that it has to beat: a power law, and "the last value stays".
"""

import argparse
import csv
import difflib
import io
import json
import os
import re
import signal
import sys
import warnings
from dataclasses import dataclass, field, replace
from itertools import combinations, cycle
from pathlib import Path

import numpy as np
from scipy.special import chdtri, stdtrit  # quantiles of chi^2 and Student's t; scipy.stats is slow to import

LEAST_REACH = 1.5  # C_max / C_mid below which no asymptote is reported, ...
SAFE_REACH = 2.0  # ... and below which it comes with a warning
MARGIN = 0.02  # asymptotes closer than this are not told apart (paper, sec. 2.1, A.8)
B_RANGE = 0.05, 30.0
LEAST_TO_STOP = 10  # points before a curve can be found to have levelled off

# ---------------------------------------------------------------------------------------------- the curves


def sigmoid(C, A, B, C_mid, R0):
    """Pass rate at compute C, of C's shape (paper, sec. 2.1): R0 at 0, halfway at C_mid, A in the limit."""
    with np.errstate(divide="ignore", over="ignore"):
        return R0 + (A - R0) / (1 + (C_mid / np.asarray(C, float)) ** B)


def power_law(C, A, D, B):
    """Pass rate at compute C > 0, of C's shape (paper, A.4): the baseline, a curve without a midpoint."""
    return A - D / np.asarray(C, float) ** B


# ------------------------------------------------------------------------------------------- least squares
# Inside, a curve is theta = (A, log B, log C_mid, R0): logarithms keep B and C_mid positive and well scaled.


def natural(theta):
    """(A, B, C_mid, R0) of one theta (4,)."""
    return theta[0], np.exp(theta[1]), np.exp(theta[2]), theta[3]


def log_compute(x):
    """log x, with compute 0 put far to the left, where every curve is at R0."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(x), -1e4)


def gain_reached(log_x, log_B, log_mid):
    """1 / (1 + (C_mid / C)^B), the part of the gain reached, from logarithms; the arguments broadcast."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-np.exp(log_B) * (log_x - log_mid)))


def curve_and_gradient(log_x, theta):
    """The curves theta (k, 4) at log compute (n,): values (k, n) and their derivatives by theta (k, 4, n)."""
    A, log_B, log_mid, R0 = theta.T[:, :, None]
    g = gain_reached(log_x, log_B, log_mid)
    slope = (A - R0) * np.exp(log_B) * g * (1 - g)  # dR / d log C
    return R0 + (A - R0) * g, np.stack([g, slope * (log_x - log_mid), -slope, 1 - g], axis=1)


def limits(x):
    """Lowest and highest theta searched: C_mid from 1/20 of the first to 1000 times the last compute."""
    first, last = x[x > 0][[0, -1]]
    return (np.array([-np.inf, np.log(B_RANGE[0]), np.log(first / 20), 0.0]),
            np.array([np.inf, np.log(B_RANGE[1]), np.log(last * 1000), 1.0]))


def levenberg_marquardt(x, y, theta, free, steps=50):
    """Least squares from k starting curves at once: theta (k, 4), of which only the columns in `free` move.

    Returns the curves (k, 4), their sums of squared residuals (k,) and J'J (k, len(free), len(free)).
    """
    log_x, theta, (low, high) = log_compute(x), theta.copy(), limits(x)

    def evaluate(theta):
        value, J = curve_and_gradient(log_x, theta)
        J, residual = J[:, free], value - y
        return (residual**2).sum(1), (J @ residual[:, :, None])[:, :, 0], J @ J.transpose(0, 2, 1)

    sse, gradient, JJ = evaluate(theta)
    damping, active, identity = np.full(len(theta), 1e-3), np.arange(len(theta)), np.eye(len(free))
    for _ in range(steps):
        damped = JJ[active] * (1 + damping[active, None, None] * identity) + 1e-14 * identity
        trial = theta[active]
        trial[:, free] -= np.linalg.solve(damped, gradient[active, :, None])[:, :, 0]
        trial = np.clip(trial, low, high)
        new = evaluate(trial)
        better = new[0] < sse[active]
        done = (np.abs(trial - theta[active]).max(1) < 1e-6) | (damping[active] > 1e6)
        damping[active] *= np.where(better, 0.1, 10)
        for old, its_new in zip((theta, sse, gradient, JJ), (trial, *new)):
            old[active[better]] = its_new[better]
        active = active[~done]
        if not len(active):
            break
    return theta, sse, JJ


def starting_grid(x):
    """A grid over the valley: log B, log C_mid (m,), and the part of the gain each reaches at x (m, n)."""
    first, last = np.log(x[x > 0][[0, -1]])
    grid = np.meshgrid(np.linspace(-1.9, 2.7, 18), np.linspace(first - 1, last + 4, 28))
    log_B, log_mid = map(np.ravel, grid)
    return log_B, log_mid, gain_reached(log_compute(x), log_B[:, None], log_mid[:, None])


def variable_projection(x, y, R0):
    """The sigmoid of least squares with A in [0, 1]: theta (4,) and its sum of squared residuals.

    x (n,) increasing, positive but for an optional leading 0; y (n,); R0 a number, or None to fit it too.
    """
    log_B, log_mid, g = starting_grid(x)
    if R0 is None:  # y = R0 + gain * g is a straight line in g, ...
        centred = g - g.mean(1, keepdims=True)
        gain = centred @ y / ((centred**2).sum(1) + 1e-300)
        base = y.mean() - gain * g.mean(1)
    else:  # ... here through a known point
        gain = g @ (y - R0) / ((g**2).sum(1) + 1e-300)
        base = np.full(len(gain), R0)
    A = np.clip(base + gain, 0, 1)
    i = ((base[:, None] + (A - base)[:, None] * g - y) ** 2).sum(1).argmin()
    return polish(x, y, np.array([A[i], log_B[i], log_mid[i], base[i]]), R0 is None)


def polish(x, y, theta, R0_free):
    """The least-squares curve (4,) with A in [0, 1] downhill from theta (4,), and its squared error."""
    others = [1, 2] + [3] * R0_free
    theta, sse, _ = levenberg_marquardt(x, y, theta[None], [0] + others)
    if not 0 <= theta[0, 0] <= 1:  # then the best curve has A on its bound
        theta[:, 0] = np.clip(theta[:, 0], 0, 1)
        theta, sse, _ = levenberg_marquardt(x, y, theta, others)
    return theta[0], sse[0]


PAPER_A = np.linspace(0.450, 0.800, 71)
PAPER_C_MID = np.linspace(100, 40000, 100)  # GPU-hours


def paper_grid(x, y, R0):
    """The paper's procedure to the letter (A.4): for each A and C_mid of the grid B by SciPy, then the lowest
    squared error. Arguments and results as in `variable_projection`, R0 a number."""
    from scipy.optimize import curve_fit

    if R0 is None or x[-1] < PAPER_C_MID[0] or x[0] > PAPER_C_MID[-1]:
        raise ValueError("the published grid needs an R0 that is not free, and compute in GPU-hours: its "
                         f"C_mid go from {PAPER_C_MID[0]:g} to {PAPER_C_MID[-1]:g}")
    best, theta = np.inf, None
    with warnings.catch_warnings():  # SciPy's remarks on pairs that are far off
        warnings.simplefilter("ignore")
        for A in PAPER_A:
            for C_mid in PAPER_C_MID:
                try:
                    (B,), _ = curve_fit(lambda C, B: R0 + (A - R0) / (1 + (C_mid / C) ** B), x, y)
                except RuntimeError:  # no convergence from this pair
                    continue
                sse = ((sigmoid(x, A, B, C_mid, R0) - y) ** 2).sum()
                if sse < best and B > 0:
                    best, theta = sse, np.array([A, np.log(B), np.log(C_mid), R0])
    if theta is None:
        raise ValueError("the published grid holds no rising curve for this data: use --method varpro")
    return theta, best


def fit_power_law(x, y):
    """(A, D, B) of least squares with A <= 1 (paper, A.4); x (n,) > 0, y (n,). Only B has to be searched."""
    log_B, scale = np.linspace(np.log(1e-3), np.log(10), 200), x[-1]
    for _ in range(4):  # each round looks closer around the best B of the round before
        z = (x / scale) ** -np.exp(log_B)[:, None]
        centred = z - z.mean(1, keepdims=True)
        D = -centred @ y / ((centred**2).sum(1) + 1e-300)
        A = y.mean() + D * z.mean(1)
        D = np.where(A > 1, z @ (1 - y) / (z**2).sum(1), D)
        A = np.minimum(A, 1)
        i = ((A[:, None] - D[:, None] * z - y) ** 2).sum(1).argmin()
        B = np.exp(log_B[i])
        log_B = np.linspace(log_B[max(i - 1, 0)], log_B[min(i + 1, len(log_B) - 1)], 30)
    return float(A[i]), float(D[i] * scale**B), float(B)


# ----------------------------------------------------------------------------------------------- intervals


def lag_one_correlation(residual, parameters):
    """Correlation of neighbouring residuals (n,), and the same corrected for its bias.

    A smooth curve soaks up slow noise, so residuals look less correlated than the noise is, by about
    p (1 + 3 r) / n for p parameters: p times the bias that Kendall (1954) gives for a fitted mean.
    """
    n, p = len(residual), parameters
    raw = residual[1:] @ residual[:-1] / max(residual @ residual, 1e-300)
    return float(raw), float(np.clip((n * raw + p) / max(n - 3 * p, n / 2), 0, 0.9))


def allowed_excess(sse, n, parameters, correlation):
    """How far above the least squared error a curve may lie and still be in the 95 % interval.

    s^2 t^2 is the profile-likelihood bound for independent noise; (1 + r) / (1 - r) is how much more the mean
    of noise with neighbour correlation r varies. Without that factor such intervals hold the truth much less
    than 95 % of the time (`python tests/benchmark.py fit` shows it).
    """
    degrees = n - parameters
    return max(sse / degrees, 1e-18) * stdtrit(degrees, 0.975) ** 2 * (1 + correlation) / (1 - correlation)


@dataclass(frozen=True)
class Profile:
    """The best curves at fixed A, across the 95 % interval of A. The other intervals are read off these:
    exact along A, where the problem bends, and quadratic across it, where it hardly does."""

    theta: np.ndarray  # (k, 4)
    slack: np.ndarray  # (k,) the squared error that each may still add
    spread: np.ndarray  # (k, f, f) the inverse of J'J in the free columns of theta
    free: list

    def interval(self, value, gradient):
        """(low, high) of a function of the curve, from its values (k, ...) and gradients (k, ..., f) here."""
        variance = np.einsum("k...i,kij,k...j->k...", gradient, self.spread, gradient)
        half = np.sqrt(np.maximum(self.slack.reshape((-1,) + (1,) * (value.ndim - 1)) * variance, 0))
        return (value - half).min(0), (value + half).max(0)


def inverse(matrices):
    return np.linalg.pinv(matrices, rcond=1e-12, hermitian=True)


def profile_over_A(x, y, theta, sse, excess, R0_free):
    """The 95 % intervals {name: (low, high)} of A, B, C_mid and a free R0, and the Profile behind them: the
    curves whose squared error is at most `excess` above sse, that of the best curve theta (4,)."""
    free = [1, 2] + [3] * R0_free
    spread = inverse(levenberg_marquardt(x, y, theta[None], [0] + free, steps=0)[2][0])
    step = np.sqrt(spread[0, 0] * excess) + 1e-9  # where the end would be if the valley were straight

    log_B, log_mid, g = starting_grid(x)
    projection, norm = g @ (y - theta[3]), (g**2).sum(1)

    def best_at(A):
        gain = (A - theta[3])[:, None]
        i = (gain**2 * norm - 2 * gain * projection).argmin(1)  # squared error on the grid, less a constant
        start = np.stack([A, log_B[i], log_mid[i], np.full(len(A), theta[3])], axis=1)
        return levenberg_marquardt(x, y, start, free, steps=12)

    def root(A):  # nearly linear in A on either side of the best: good to interpolate
        return np.sqrt(np.maximum(best_at(A)[1] - sse, 0))

    low, high = (theta[3], 1) if theta[0] > theta[3] else (0, theta[3])  # a rising curve keeps rising
    ends, limit = [], np.sqrt(excess)
    for side, bound in ((-1, low), (1, high)):
        stride = side * min(step, abs(bound - theta[0]) / 8)
        A = theta[0] + stride * np.array([0, 0.5, 0.8, 1, 1.2, 1.6, 2.3, 4])
        distance = root(A)
        if distance.max() <= limit:  # a long tail: look all the way to the bound
            tail = A[-1] + (bound - A[-1]) * np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1])
            A, distance = np.append(A, tail), np.append(distance, root(tail))
        beyond = np.flatnonzero(distance > limit)[:1]
        ends += [np.interp(limit, distance[i - 1 : i + 1], A[i - 1 : i + 1]) for i in beyond] or [bound]
    curves, sse_at, JJ = best_at(np.append(np.linspace(*ends, 14), theta[0]))
    profile = Profile(curves, np.maximum(sse + excess - sse_at, 0), inverse(JJ), free)
    interval = {"A": (float(ends[0]), float(ends[1]))}
    for i, column in enumerate(free):
        unit = np.broadcast_to(np.eye(len(free))[i], (len(curves), len(free)))
        low, high = np.clip(profile.interval(curves[:, column], unit), *(end[column] for end in limits(x)))
        name, scale = {1: ("B", np.exp), 2: ("C_mid", np.exp), 3: ("R0", float)}[column]
        interval[name] = float(scale(low)), float(scale(high))
    return interval, profile


# --------------------------------------------------------------------------------------------------- a fit


@dataclass(frozen=True)
class Fit:
    """A fitted curve and what is known about it. x, y (n,) are the points fitted.

    `interval` maps A, B, C_mid, R0 to 95 % (low, high). `identified` says whether the data carries A, and
    with it B and C_mid: if not, these three only describe the line drawn, and A is known to exceed its low.
    """

    A: float
    B: float
    C_mid: float
    R0: float
    rms: float  # of the residuals, per degree of freedom
    interval: dict
    sse: float  # sum of squared residuals
    lag_1: float  # correlation of neighbouring residuals (a first point that gives R0 counts as one), ...
    correlation: float  # ... and the same corrected for bias: what widens the intervals
    noise: float | None  # binomial standard deviation of one validation, if num_examples is known
    r0: str | float  # where R0 comes from: "first", "free" or its value
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    profile: Profile = field(repr=False)
    identified: bool = True
    no_ceiling: bool = False  # the data passes the middle of its rise, but A is on its bound 1
    fell: bool = False  # the pass rate came down from its peak, which no sigmoid does
    warnings: list = field(default_factory=list)

    @property
    def comparable(self):
        """Whether the data carries B and C_mid once A is held."""
        return self.identified or self.no_ceiling

    @property
    def C_max(self):
        """The last compute fitted."""
        return float(self.x[-1])

    @property
    def reach(self):
        """C_max / C_mid: how far the data goes past the middle of the rise."""
        return self.C_max / self.C_mid

    def predict(self, C):
        """The fitted curve at compute C, of C's shape."""
        return sigmoid(C, self.A, self.B, self.C_mid, self.R0)

    def interval_of(self, weights, C):
        """95 % interval (low, high), each (k,), of the sums weights (k, n) @ R(C) over the curve at compute C (n,)."""
        value, gradient = curve_and_gradient(log_compute(np.asarray(C, float)), self.profile.theta)
        gradient = gradient[:, self.profile.free].transpose(0, 2, 1)
        return self.profile.interval(value @ np.transpose(weights), weights @ gradient)

    def band(self, C):
        """95 % interval (low, high) of the curve, not of single validations, at compute C; of C's shape."""
        C = np.asarray(C, float)
        return tuple(np.clip(end, 0, 1).reshape(C.shape) for end in self.interval_of(np.eye(C.size), C.ravel()))

    def gain(self, factor=2.0):
        """What more compute would buy: the curve at `factor` times C_max less the curve there, and its 95 % interval:
        (gain, low, high)."""
        C = self.C_max * np.array([1, factor])
        low, high = self.interval_of(np.array([[-1, 1]]), C)
        return float(np.diff(self.predict(C))[0]), float(low[0]), float(high[0])


def fit(x, y, r0=None, fit_from=0.0, fit_to=np.inf, method="varpro", num_examples=None):
    """Fit the sigmoid to compute x (n,), increasing, and pass rate y (n,) in [0, 1]; returns a Fit.

    r0: None or "first" (the first point is the pass rate before training: it gives R0 and is not fitted; its
    x may be 0), "free" (fitted), or the value. Points with fit_from <= x <= fit_to are fitted. method:
    "varpro", or "paper" for the published grid. num_examples: answers in one validation, for the binomial
    noise. Raises ValueError when the data cannot be fitted.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    check(x, y, lambda i: f"point {i + 1}")
    r0 = "first" if r0 is None else r0
    R0 = None if r0 == "free" else float(y[0] if r0 == "first" else r0)
    if R0 is not None and not 0 <= R0 <= 1:
        raise ValueError(f"R0 = {R0:g} is no pass rate, which lies in [0, 1]")
    keep, total, first_x = (x >= fit_from) & (x <= fit_to), len(x), x[0]
    if R0 is not None and (r0 == "first" or x[0] == 0):  # at compute 0 every curve is at R0: nothing to fit
        keep[0] = False
    x, y = x[keep], y[keep]
    n, parameters = len(x), 3 + (R0 is None)
    if n <= parameters:
        raise ValueError(f"only {n} of {total} points are left to fit {parameters} parameters (a first point "
                         f"that gives R0 is none of them): at least {parameters + 1} are needed")
    if np.ptp(y) == 0:
        raise ValueError(f"the pass rate is {y[0]:g} at all {n} points: a constant has no curve to fit")

    theta, sse = paper_grid(x, y, R0) if method == "paper" else variable_projection(x, y, R0)
    # The paper holds R0 at the first validation. That is a measurement as noisy as the others, so for the
    # intervals it counts as a point at compute 0, and R0 is free.
    x_all, y_all = (np.append(0, x), np.append(R0, y)) if r0 == "first" else (x, y)
    best, least = polish(x_all, y_all, theta, r0 in ("first", "free"))
    lag_1, correlation = lag_one_correlation(sigmoid(x_all, *natural(best)) - y_all, parameters)
    excess = allowed_excess(least, len(x), parameters, correlation)
    interval, profile = profile_over_A(x_all, y_all, best, least, excess, r0 in ("first", "free"))
    interval.setdefault("R0", (R0, R0))
    rms = float(np.sqrt(sse / (n - parameters)))
    noise = float(np.sqrt(np.mean(y * (1 - y)) / num_examples)) if num_examples else None
    fitted = Fit(*map(float, natural(theta)), rms, interval, float(sse), lag_1, correlation, noise, r0, x, y,
                 profile)
    verdict = judge(fitted)
    remarks = verdict["warnings"]
    if r0 == "first" and first_x > 0:
        remarks.append(f"R0 = {R0:.3f} is the first point, at x = {first_x:.4g}, not before training: "
                       "say --r0 if you know better")
    if method == "paper":
        remarks += judge_grid(fitted)
    return replace(fitted, **verdict)


def levelled_off(x, y, least_gain):
    """Whether twice the compute would surely buy less than `least_gain`: the 95 % interval of the gain ends below it,
    A being identified, at the last point and also at the one before, since asking at each point errs more often."""
    if len(x) < LEAST_TO_STOP:
        return False
    try:
        fits = [fit(x[:end], y[:end]) for end in (len(x) - 1, len(x))]
    except ValueError:  # nothing has moved yet
        return False
    return all(f.identified and f.gain()[2] < least_gain for f in fits)


def check(x, y, where):
    """Raise ValueError, naming where(i) for point i, unless x and y are a curve of compute and pass rates."""
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x and y must be two lists of the same length, got shapes {x.shape} and {y.shape}")
    if len(x) < 2:
        raise ValueError(f"{where(0) + ': ' if len(x) else ''}{len(x)} point(s): a curve needs at least 5")
    for i in range(len(x)):
        if not (np.isfinite(x[i]) and np.isfinite(y[i])):
            raise ValueError(f"{where(i)}: x = {x[i]:g}, y = {y[i]:g}: not finite; remove the line")
        if x[i] < 0 or (x[i] == 0 and i > 0):
            raise ValueError(f"{where(i)}: x = {x[i]:g}: compute is positive, or 0 at the first point")
        if i > 0 and x[i] <= x[i - 1]:
            raise ValueError(f"{where(i)}: x = {x[i]:g} after {x[i - 1]:g}: x must increase; sort the log, "
                             "and keep one of the points that a resumed run repeats")
    bad = np.flatnonzero((y < 0) | (y > 1))
    if len(bad):
        percent = y.min() >= 0 and 1.5 < y.max() <= 100
        advice = "if it is in percent, say --percent" if percent else "name another column with --y"
        raise ValueError(f"{where(bad[0])}: y = {y[bad[0]]:g} is no pass rate, not in [0, 1]: {advice}")


def judge(f):
    """Of a Fit, as keywords of one: identified, no_ceiling and fell, and warnings, what to know first."""
    n, (low, high), said = len(f.x), f.interval["A"], []
    level = np.convolve(f.y, np.ones(3) / 3, "valid")  # means of three neighbours
    peak, end, peak_x = level.max(), level[-1], f.x[level.argmax() + 1]
    jump = np.median(np.abs(np.diff(f.y))) / 0.954  # standard deviation of one point, blind to slow movement
    fell = f"the pass rate fell from {peak:.3f} around x = {peak_x:.4g} to {end:.3f}, and a sigmoid cannot"
    if peak - end > max(0.5 * (peak - min(f.R0, end)), 4 * jump):
        said.append(f"collapse: {fell}, so this fit means nothing: try --fit-to {peak_x:.4g}")
        return dict(identified=False, no_ceiling=False, fell=True, warnings=said)
    identified = no_ceiling = False
    if f.A - f.R0 < 2 * f.rms:
        said.append(f"no rise above R0 = {f.R0:.3f} that stands out of the scatter ({f.rms:.3f})")
    elif f.reach < LEAST_REACH:
        said.append(f"A is not identified: the data ends at {f.reach:.2g} C_mid, below {LEAST_REACH}; all it "
                    f"says is A > {low:.3f}")
    elif f.A > 0.9999 and low < 0.95:
        no_ceiling = True
        said.append(f"A is on its bound 1: the data shows no ceiling, only A > {low:.3f}")
    elif high - low > abs(f.A - f.R0):
        said.append(f"A is not identified: its interval [{low:.3f}, {high:.3f}] is wider than the whole gain")
    else:
        identified = True
        if f.reach < SAFE_REACH:
            said.append(f"the data ends at {f.reach:.2g} C_mid, below {SAFE_REACH:g}: each point moves A")
    declined = peak - end > max(0.2 * (peak - f.R0), 4 * jump)
    if declined:
        said.append(f"decline: {fell}, so A lies below the peak")
    late = f.x >= f.C_max / 4
    if late.sum() >= 6:
        (slope, _), covariance = np.polyfit(np.log(f.x[late]), f.y[late], 1, cov=True)
        error = np.sqrt(covariance[0, 0] * (1 + f.correlation) / (1 - f.correlation))
        if slope < 2 * error and slope * np.log(f.C_max / f.x[late][0]) < MARGIN / 2:
            said.append(f"flat: no gain to be seen since x = {f.x[late][0]:.4g} ({late.sum()} points): "
                        "the run has reached its asymptote or stalled")
    if f.x[0] > f.C_mid:
        said.append("half of the gain came before the first fitted point: B and C_mid lean on R0 alone")
    if n < 6:
        said.append(f"only {n} points: the intervals lean on {n - 3} degree(s) of freedom")
    if not B_RANGE[0] * 1.01 < f.B < B_RANGE[1] / 1.01:
        said.append(f"B is on its bound {f.B:.3g}: the rise is a step between points, or has no shape yet")
    if f.correlation > 0.6 and n > 10:
        said.append(f"the residuals drift (neighbours correlate by {f.correlation:.2f}, corrected for bias): "
                    "the curve misses a slow movement")
    if f.noise is not None and f.rms > 2 * f.noise:
        said.append(f"the scatter ({f.rms:.4f}) is more than twice the noise of a validation "
                    f"({f.noise:.4f}): the run is less smooth than a sigmoid")
    if f.noise is not None and f.A - f.R0 < 4 * f.noise:
        said.append(f"the gain is below 4 times the noise of a validation ({f.noise:.4f}): use more examples")
    return dict(identified=identified, no_ceiling=no_ceiling, fell=declined, warnings=said)


def judge_grid(f):
    """Warnings for a Fit by the published grid: a result on its edge, and the steps it snaps to."""
    step, on_edge = PAPER_C_MID[1] - PAPER_C_MID[0], []
    for name, value, grid in (("A", f.A, PAPER_A), ("C_mid", f.C_mid, PAPER_C_MID)):
        if np.isclose(value, grid[[0, -1]]).any():
            on_edge.append(f"{name} = {value:.4g} is on the edge of the published grid: look beyond it")
    snap = f"the published grid snaps: C_mid to steps of {step:.0f} ({step / f.C_mid:.0%} of it), A to .005"
    return [*on_edge, snap]


def held_out(x, y, r0=None, fit_to=None, fit_from=0.0):
    """Fit the points with compute <= fit_to, by default half of the last, and forecast the mean of the last three.

    x, y, r0, fit_from as in `fit`. Returns a dict: fit_to, n_points, came (that mean), its forecasts sigmoid,
    power_law and last_value, and interval, where `came` lies with 95 % if the sigmoid holds: that of the curve, widened
    by the scatter of three points around it. Raises ValueError when the first part cannot be fitted.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    fit_to = x[-1] / 2 if fit_to is None else fit_to
    early = fit(x, y, r0, fit_from, fit_to)
    last = np.arange(len(x)) >= max(len(x) - 3, np.sum(x <= fit_to))
    law = fit_power_law(early.x[early.x > 0], early.y[early.x > 0])
    curve, n = float(early.predict(x[last]).mean()), last.sum()
    low, high = (float(end[0]) for end in early.interval_of(np.full((1, n), 1 / n), x[last]))
    scatter = stdtrit(len(early.x) - 3, 0.975) * early.rms / np.sqrt(n)
    interval = [max(0.0, float(curve - np.hypot(curve - low, scatter))),
                min(1.0, float(curve + np.hypot(high - curve, scatter)))]
    return {"fit_to": float(fit_to), "n_points": len(early.x), "came": float(y[last].mean()),
            "sigmoid": curve, "interval": interval, "power_law": float(power_law(x[last], *law).mean()),
            "last_value": float(early.y[-1])}


# --------------------------------------------------------------------------------------- seeds and settings
# An estimate is (mean, standard error, degrees of freedom).


def estimate(values, errors, degrees):
    """The estimate of a setting: from the spread of its seeds, or from the fit of its only run."""
    if len(values) == 1:
        return values[0], errors[0], degrees[0]
    return np.mean(values), np.std(values, ddof=1) / np.sqrt(len(values)), len(values) - 1


def seeds(fits):
    """The setting behind several seeds, each fitted alone: {name: (mean, low, high)} with 95 % t-intervals,
    or None when a seed does not identify A."""
    if len(fits) < 2:
        raise ValueError("--seeds needs the logs of two runs or more")
    if not all(f.identified for f in fits):
        return None
    result = {}
    for name in ("A", "B", "C_mid", "R0"):
        mean, error, degrees = estimate([getattr(f, name) for f in fits], None, None)
        half = stdtrit(degrees, 0.975) * error
        result[name] = tuple(map(float, (mean, mean - half, mean + half)))
    return result


def difference(one, other):
    """one - other of two settings, each (values, errors, degrees) with an entry a seed, and the half-width of its
    95 % interval. Seeds of both are taken to scatter alike (Student): two or three seeds do not show a scatter of
    their own. A setting of one run has the error of its fit (Welch)."""
    (a, error_a, degrees_a), (b, error_b, degrees_b) = estimate(*one), estimate(*other)
    n, m = len(one[0]), len(other[0])
    if n > 1 and m > 1:
        degrees = n + m - 2
        variance = (n * np.var(one[0]) + m * np.var(other[0])) / degrees * (1 / n + 1 / m)
    else:
        variance = error_a**2 + error_b**2 + 1e-300
        degrees = max(1, variance**2 / (error_a**4 / degrees_a + error_b**4 / degrees_b + 1e-300))
    return float(a - b), float(stdtrit(degrees, 0.975) * np.sqrt(variance))


def efficiency_at(f, A):
    """log B and log C_mid of a Fit's points with the asymptote held at A (paper, A.8): values (2,), standard
    errors (2,), the latter widened for correlation as the intervals are."""
    n = len(f.x)
    start = np.array([[A, np.log(f.B), np.log(f.C_mid), f.R0]])
    theta, sse, JJ = levenberg_marquardt(f.x, f.y, start, [1, 2])
    variance = allowed_excess(sse[0], n, 2, f.correlation) / stdtrit(n - 2, 0.975) ** 2
    return theta[0, 1:3], np.sqrt(variance * np.diag(inverse(JJ[0])))


def standing(fits):
    """Of several seeds those whose pass rate did not fall, if there are any. A sigmoid has nothing to say of the
    others, which are counted and left out."""
    return [f for f in fits if not f.fell] or fits


def compare(names, groups):
    """The paper's comparison (A.8) of two settings: names, and for each a list of Fits, one a seed, of which those that
    are not `standing` are left out.

    Asymptotes first: told apart if further apart than the margin and than their errors, wherever in its interval the
    A of a run is that shows no ceiling below 1. If not, B and C_mid again with A held at the mean over all runs, and
    at .02 above and below, since the answer must not hang on it. Returns a dict with the numbers and the verdict in
    words.
    """
    result = {"settings": list(names), "A": None, "A_difference": None, "efficiency": []}
    every, groups = groups, [standing(fits) for fits in groups]
    fell = "".join(f"; {len(all_) - len(fits)} of {len(all_)} runs of {name} fell, and are left out"
                   for name, all_, fits in zip(names, every, groups) if len(all_) > len(fits))
    lost = [name for name, fits in zip(names, groups) if not all(f.identified for f in fits)]
    if not all(f.comparable for fits in groups for f in fits):
        return result | {"verdict": "no difference that this data shows: it does not identify A of "
                                    + " and ".join(lost) + fell}

    def ceiling(fits, end):  # of a run without a ceiling, this end of its interval
        degrees = [len(f.x) - 3 for f in fits]
        widths = np.array([np.diff(f.interval["A"])[0] for f in fits])
        A = [f.A if f.identified else f.interval["A"][end] for f in fits]
        return A, widths / 2 / stdtrit(degrees, 0.975), degrees

    least, most = sorted(difference(*map(ceiling, groups, ends)) for ends in ((0, 1), (1, 0)))
    gap, error = least if least[0] > 0 else most  # where all runs show a ceiling, both are the same
    if not lost:
        result["A"] = [float(np.mean([f.A for f in fits])) for fits in groups]
        result["A_difference"] = [gap, gap - error, gap + error]
    if least[0] * most[0] > 0 and abs(gap) >= MARGIN and abs(gap) > error:
        higher, lower = names if gap > 0 else names[::-1]
        return result | {"verdict": f"{higher} raises the ceiling: its A lies {'at least ' * bool(lost)}{abs(gap):.3f} "
                                    f"+- {error:.3f} above that of {lower}{fell}"}
    numbers = f"the ceilings differ by {gap:+.3f} +- {error:.3f}"
    if lost:
        numbers = f"not all runs of {' and '.join(lost)} show a ceiling, and no other lies surely below it"

    common, told = float(np.mean([f.A for fits in groups for f in fits])), []
    for A in (common, common - MARGIN, min(common + MARGIN, 1.0)):
        at_A = {"A": A}
        for i, name in enumerate(("B", "C_mid")):
            both = []
            for fits in groups:
                values, errors = np.transpose([efficiency_at(f, A) for f in fits], (1, 2, 0))[:, i]
                both.append((values, errors, [len(f.x) - 2 for f in fits]))
            ratio, half = difference(*both)
            at_A[name] = [float(np.exp(np.mean(values))) for values, *_ in both]
            at_A[f"{name}_ratio"] = [float(np.exp(r)) for r in (ratio, ratio - half, ratio + half)]
            told.append(np.sign(ratio) * (abs(ratio) > half))
        result["efficiency"].append(at_A)
    steeper, later = (told[i] if len(set(told[i::2])) == 1 else 0 for i in (0, 1))
    winner = names[0] if (steeper or -later) > 0 else names[1]
    if steeper * later > 0:
        verdict = f"{winner} rises more steeply but later: neither is more efficient all along"
    else:
        verdict = f"{winner} is more efficient" if steeper or later else "no difference that this data shows"
    numbers += f"; with A held at {common:.3f}"
    for name in ("B", "C_mid"):
        (one, two), ratio = result["efficiency"][0][name], result["efficiency"][0][f"{name}_ratio"]
        numbers += f", {name} {one:.4g} and {two:.4g}, ratio {ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]"
    return result | {"verdict": f"{verdict} ({numbers}{fell})"}


# ------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Series:
    """The curve of one run: compute x (n,), pass rate y (n,) and the names of their columns; num_examples is
    the mean number of answers in a validation; notes say what the reader chose."""

    name: str
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    x_name: str = "x"
    y_name: str = "y"
    num_examples: float | None = None
    notes: tuple = ()


# Column names in use, best first; matched in full, ignoring case.
X_NAMES = (r"(compute_?)?(flops|flos)", r".*(gpu|device|accelerator)[ _-]?hours.*", r"compute.*",
           r"((num|total|cumulative|sampled)_)?tokens|num_input_tokens_seen",
           r"(wall_?)?(seconds|time|clock|hours)",
           r"(.*/)?_?(global_)?step|iteration", r"relative time.*|_runtime", r"epoch", r"x")
Y_NAMES = (r"pass_rate", r".*pass.?rate.*", r"val-core/.*mean@\d+", r"eval.*avg@\d+",
           r"val.*(acc|reward|score|mean@|pass@).*", r"eval.*(acc|reward|score|pass).*",
           r"test.*(acc|reward|score|pass).*",
           r"(.*[/_ ])?(acc|accuracy)([/_ @].*)?", r"(critic/)?(rewards?|score)(/mean)?", r"y")
NO_MEAN = r".*(__|[/_])(min|max|std)(@.*)?"  # columns that stand beside a mean: W&B, verl
LOG_NAMES = ("log.jsonl", "trainer_state.json", "metrics.jsonl")  # ours, transformers' and TRL's, prime-rl's
VERL_STEP = re.compile(r"\bstep:(\d+) - ")
VERL_VALUE = re.compile(r"([^\s:]+):(?:np\.\w+\()?([-+]?(?:[\d.]+(?:e[-+]?\d+)?|nan|inf))", re.I)


def read_log(path, x=None, y=None, percent=False):
    """The curves in a log: a list of Series, several for a wide W&B export with one column a run.

    path: a run folder, or a CSV, JSONL, trainer_state.json, or verl's or prime-rl's log, told by its content. x, y:
    column names, guessed when None (Series.notes says so). percent: y is divided by 100. Raises ValueError
    naming file and line, OSError when the file cannot be read.
    """
    file = path = os.fspath(path)
    if os.path.isdir(path):
        file = next((f for f in (os.path.join(path, name) for name in LOG_NAMES) if os.path.exists(f)), None)
        if file is None:
            raise ValueError(f"{path}: no {' and no '.join(LOG_NAMES)} in this folder")
    with open(file, "rb") as handle:
        text = handle.read().decode("utf-8-sig", errors="replace")
    try:
        rows, notes = read_rows(text, file)
    except csv.Error as error:
        raise ValueError(f"{file}: neither JSON nor a table: {error}") from None
    if not rows:
        raise ValueError(f"{file}: column names and no data")
    if any(row.get("kind") == "validation" for _, row in rows):
        rows = [(where, row) for where, row in rows if row.get("kind") == "validation"]
        notes.append("validation lines only")
    columns = list(dict.fromkeys(key for _, row in rows for key in row))
    path = os.path.abspath(path)
    name = os.path.basename(os.path.dirname(path) if os.path.basename(path) in LOG_NAMES else path)

    runs = {c: c.split(" - ", 1) for c in columns if " - " in c and not re.fullmatch(NO_MEAN, c, re.I)}
    if not runs or y in columns:
        return [read_series(rows, columns, file, name, x, y, percent, notes)]
    metrics = list(dict.fromkeys(metric for _, metric in runs.values()))  # W&B: "run - metric"
    metric = y or (metrics[0] if len(metrics) == 1 else guess(metrics, Y_NAMES))
    if metric not in metrics:
        raise ValueError(f"{file}: which metric is the pass rate? name it with --y of: {', '.join(metrics)}")
    return [read_series(rows, columns, file, run, x, column, percent, notes)
            for column, (run, its_metric) in runs.items() if its_metric == metric]


def read_rows(text, file):
    """([(where, {column: value})], notes) of a log's text; the format is told by the content."""
    if not text.strip():
        raise ValueError(f"{file}: the file is empty")
    lines = text.split("\n")  # not splitlines(): stray bytes in console logs would count as line ends
    if text.lstrip()[0] in "{[":
        return read_json(text, lines, file)
    if VERL_STEP.search(text):
        found = [(i, line, VERL_STEP.search(line)) for i, line in enumerate(lines, 1)]
        return [(f"{file}, line {i}", {"step": step[1]} | dict(VERL_VALUE.findall(line[step.end() :])))
                for i, line, step in found if step], []
    table = csv.reader(io.StringIO(text), delimiter=max(",\t;", key=lines[0].count))
    header, rows = [column.strip() for column in next(table)], []
    if any(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", column, re.I) for column in header):
        raise ValueError(f"{file}, line 1: a number where column names are expected: add a line like x,y")
    for row in table:
        if len(row) > len(header):
            raise ValueError(f"{file}, line {table.line_num}: {len(row)} values under {len(header)} names")
        rows.append((f"{file}, line {table.line_num}", dict(zip(header, (value.strip() for value in row)))))
    return rows, []


def read_json(text, lines, file):
    """The rows of a JSON document with a list of records (trainer_state.json's log_history), or of JSONL."""
    try:
        whole = json.loads(text)
    except ValueError:
        rows = []
        for i, line in enumerate(lines, 1):
            try:
                record = json.loads(line) if line.strip() else {}
            except ValueError:
                if i == len(lines) and rows:  # no newline at its end: a run is writing it, or was cut off
                    return rows, [f"line {i} is cut off, and left out"]
                raise ValueError(f"{file}, line {i}: no valid JSON: {line[:40]!r}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{file}, line {i}: no object with named columns: {line[:40]!r}")
            if isinstance(record.get("data"), dict):  # verl: {"step": 1, "data": {...}}
                record = {"step": record.get("step"), **record["data"]}
            rows.append((f"{file}, line {i}", record))
        return rows, []
    records = whole.get("log_history", [whole]) if isinstance(whole, dict) else whole
    if not (isinstance(records, list) and all(isinstance(record, dict) for record in records)):
        raise ValueError(f"{file}: JSON without records: expected log_history, or an object a line")
    return [(f"{file}, record {i}", record) for i, record in enumerate(records, 1)], []


def guess(columns, patterns, usable=lambda column: True):
    """The first usable column that a pattern matches, best pattern first, or None."""
    return next((column for pattern in patterns for column in columns if re.fullmatch(pattern, column, re.I)
                 and not re.fullmatch(NO_MEAN, column, re.I) and usable(column)), None)


def read_series(rows, columns, file, name, x, y, percent, notes):
    """One Series of rows [(where, {column: value})], with x and y as in `read_log`."""
    for flag, column in (("--x", x), ("--y", y)):
        if column is not None and column not in columns:
            near = difflib.get_close_matches(column, columns, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{file}: no column {column!r}{hint}; {flag} can name: {', '.join(columns)}")

    def shared(*names):  # the rows in which all of these columns have a value
        return [(where, row) for where, row in rows if all(row.get(n) not in (None, "") for n in names)]

    guessed = [flag for flag, column in (("--x", x), ("--y", y)) if column is None]
    y = y or guess(columns, Y_NAMES, lambda c: c != x and shared(c))

    def usable(column):
        try:
            values = [float(row[column]) for _, row in shared(*({column, y} - {None}))]
        except (TypeError, ValueError):  # dates
            return False
        return column != y and values and not ("time" in column and values[0] > 1e9)  # Unix time: prime-rl, W&B

    x = x or guess(columns, X_NAMES, usable)
    if x and not y and len(columns) == 2:
        y = columns[columns[0] == x]
    if not (x and y):
        raise ValueError(f"{file}: which column is the {'pass rate' if x else 'compute'}? name it with "
                         f"{'--y' if x else '--x'} of: {', '.join(columns)}")
    if not shared(x, y):
        raise ValueError(f"{file}: no line has a value of {x!r} and of {y!r}")
    if guessed:
        others = [c for c in columns if c not in (x, y) and not re.fullmatch(NO_MEAN, c, re.I)]
        notes = [*notes, f"{x!r} is taken as compute and {y!r} as pass rate"
                 + (f"; {' and '.join(guessed)} can name others: {', '.join(others)}" if others else "")]

    def values(column, *beside):
        return np.array([number(row[column], where, column) for where, row in shared(x, y, *beside)])

    compute, pass_rate = values(x), values(y) / (100 if percent else 1)
    check(compute, pass_rate, lambda i: shared(x, y)[i][0])
    examples = values("num_examples", "num_examples")
    examples = float(examples.mean()) if len(examples) else None
    return Series(name, compute, pass_rate, x, y, examples, tuple(notes))


def number(value, where, column):
    """A value of a log as a float."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: {column} = {str(value)[:40]!r} is not a number") from None


# -------------------------------------------------------------------------------------- results as text, JSON


def report(series, f, predict=(), fit_from=0.0):
    """All that is known about one run, as --json writes it: numbers that the data does not carry are None."""
    law = fit_power_law(f.x[f.x > 0], f.y[f.x > 0])
    forecast = [{"x": float(C), "sigmoid": float(f.predict(C)), "interval": [float(end) for end in f.band(C)],
                 "power_law": float(power_law(C, *law)), "last_value": float(f.y[-1])}
                for C in [*predict, 2 * f.C_max]]
    try:  # with --fit-to the points beyond are the ones held out
        half = held_out(series.x, series.y, f.r0, f.C_max if f.C_max < series.x[-1] else None, fit_from)
    except ValueError as error:
        half = {"error": str(error)}
    carried = {name: getattr(f, name) if f.identified else None for name in ("A", "B", "C_mid")}
    return {"name": series.name, **carried, "R0": f.R0, "identified": f.identified,
            "interval": {name: list(ends) for name, ends in f.interval.items()}, "C_max_over_C_mid": f.reach,
            "sse": f.sse, "rms": f.rms, "lag_1": f.lag_1, "noise": f.noise, "n_points": len(f.x),
            "x": series.x_name, "y": series.y_name, "points": np.stack([series.x, series.y], 1).tolist(),
            "fit_window": [float(f.x[0]), f.C_max], "forecast": forecast,
            "baselines": {"power_law": dict(zip(("A", "D", "B"), law)), "held_out": half},
            "warnings": list(f.warnings)}


def describe(series, f, result):
    """The report of one run as text."""
    source = {"first": "the first point, before training", "free": "fitted"}.get(f.r0, "given")
    meaning = {"A": "asymptote", "B": "exponent", "C_mid": f"{series.x_name} at half the gain", "R0": source}
    lines = [f"{series.name}: {len(f.x)} of {len(series.x)} points fitted, {series.x_name} {f.x[0]:.4g} to "
             f"{f.C_max:.4g}", *(f"  {note}" for note in series.notes)]
    for name, text in meaning.items():
        low, high = f.interval[name]
        value = "not identified" if result[name] is None else f"{result[name]:.4g}"
        lines.append(f"  {name:6}{value:>15}   95 % [{low:.4g}, {high:.4g}]   {text}")
    noise = f"; noise of a validation {f.noise:.4f}" if f.noise else ""
    lines.append(f"  C_max/C_mid {f.reach:.2g}; residuals: rms {f.rms:.4f}, correlation of neighbours "
                 f"{f.lag_1:.2f}{noise}")
    for at in result["forecast"]:
        low, high = at["interval"]
        lines.append(f"  forecast at {at['x']:.4g}: {at['sigmoid']:.3f} [{low:.3f}, {high:.3f}] "
                     f"(power law {at['power_law']:.3f}, last value {at['last_value']:.3f})")
    held = result["baselines"]["held_out"]
    if "error" in held:
        lines.append(f"  no held-out test: {held['error']}")
    else:
        forecasts = ", ".join(f"{name.replace('_', ' ')} {held[name]:.3f} ({held[name] - held['came']:+.3f})"
                              for name in ("sigmoid", "power_law", "last_value"))
        lines.append(f"  held out, fitted up to {held['fit_to']:.4g}: {held['came']:.3f} came; {forecasts}")
    return "\n".join(lines + [f"  ! {warning}" for warning in f.warnings])


def asymptote_of(fits):
    """A of a setting as text: with its 95 % interval if all its seeds identify it, otherwise seed by seed."""
    every, fits = fits, standing(fits)
    fell = f"; {len(every) - len(fits)} of {len(every)} fell" * (len(every) > len(fits))
    if all(f.identified for f in fits):
        return spread(*(seeds(fits)["A"] if len(fits) > 1 else (fits[0].A, *fits[0].interval["A"]))) + fell
    if all(f.comparable for f in fits):
        return ", ".join(map(own_asymptote, fits)) + fell
    lost = sum(not f.identified for f in fits)
    return "not identified" + f" by {lost} of {len(fits)} runs" * (len(fits) > 1) + fell


def own_asymptote(f):
    """A of a run without its interval, or what it exceeds."""
    return f"{f.A:.3f}" if f.identified else f"> {f.interval['A'][0]:.3f}"


def spread(value, low, high, form=".3f"):
    """A value with its 95 % interval, as text."""
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def table(header, rows):
    """A Markdown table of strings."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def write_whole(path, write):
    """Write a file whole or not at all: write(temporary path) beside it, then rename."""
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"{path}: there is no such folder to write to")
    temporary = f"{path}.{os.getpid()}.part"
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


# --------------------------------------------------------------------------------------------------- plots

MARKERS = "os^Dv"  # of the first seed, the second, ...


def new_figure(panels):
    """A figure and its panels, at most three beside each other."""
    from matplotlib.figure import Figure  # here, so that importing this file stays fast; pyplot is not needed

    rows = -(-panels // 3)
    figure = Figure(figsize=(8 if panels == 1 else 13, max(5, 3.6 * rows)), layout="constrained")
    return figure, figure.subplots(rows, -(-panels // rows), squeeze=False).flatten()


def save_figure(path, figure):
    write_whole(os.fspath(path), lambda temporary: figure.savefig(temporary, format="png", dpi=110))


def draw_run(axes, series, f, color, details, predict=(), marker="o"):
    """Points, curve, band, and the forecast to 4 times the last compute or to the last of `predict`; with details,
    all explained."""
    fitted, shown = np.isin(series.x, f.x), series.x > 0

    def label(text):
        return text if details else None

    for points, fill, text in ((shown & fitted, color, "points fitted"), (shown & ~fitted, "w", "left out")):
        if points.any():
            axes.plot(series.x[points], series.y[points], marker, ms=4, color=color, mfc=fill, label=label(text))
    end = max(4 * f.C_max, 1.2 * series.x[-1], *(1.2 * C for C in predict))
    past, future = np.geomspace(f.x[f.x > 0][0] / 1.5, f.C_max, 100), np.geomspace(f.C_max, end, 50)
    name = "fitted curve" if details else f"{series.name}: A {asymptote_of([f])}"
    axes.plot(past, f.predict(past), color=color, label=name)
    axes.plot(future, f.predict(future), "--", color=color, label=label("forecast"))
    both = np.append(past, future)
    axes.fill_between(both, *f.band(both), color=color, alpha=0.18, lw=0, label=label("95 % interval"))
    if not details:
        return
    axes.axvspan(f.C_max, end, color="0.5", alpha=0.1, lw=0, label="beyond the data fitted")
    low, high = f.interval["A"]
    if f.identified:
        axes.axhline(f.A, color="C3", lw=1, label=f"asymptote A {f.A:.3f} [{low:.3f}, {high:.3f}]")
        axes.axvline(f.C_mid, color="C2", lw=1, ls="-.", label=f"C_mid {f.C_mid:.3g}: half of the gain")
    else:
        axes.axhline(low, color="C3", lw=1, ls="--", label=f"A not identified: above {low:.3f}")
    axes.axhline(f.R0, color="0.45", lw=1, ls=":", label=f"R0 {f.R0:.3f}: before training")


def finish(axes, series, title):
    axes.set(xscale="log", xlabel=f"compute: {series.x_name} (log)", ylabel=f"pass rate: {series.y_name}")
    axes.set_title(title, fontsize=10, wrap=True)
    axes.tick_params(axis="x", which="minor", labelsize=6)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def plot_runs(path_png, pairs, title=None, predict=()):
    """Draw [(Series, Fit)] into one PNG: a single run in detail, several as curves side by side."""
    figure, (axes,) = new_figure(1)
    for i, (series, f) in enumerate(pairs):
        draw_run(axes, series, f, f"C{i % 10}", details=len(pairs) == 1, predict=predict)
    series, f = pairs[0]
    alone = series.name if f.identified else f"{series.name}\n{f.warnings[0]}"
    finish(axes, series, title or (alone if len(pairs) == 1 else "points, fitted curves, forecasts (dashed)"))
    save_figure(path_png, figure)


def plot_run(path_png, series, fit, title=None):
    """Draw one Series and its Fit into a PNG, written whole or not at all."""
    plot_runs(path_png, [(series, fit)], title)


def draw_setting(axes, setting, pairs, color):
    """The points of all seeds, each with a marker of its own, and the mean of their curves with its 95 %
    t-interval; of a single run its curve and band. A forecast only where every seed identifies A."""
    fits = standing([f for _, f in pairs])
    for (series, _), marker in zip(pairs, cycle(MARKERS)):
        axes.plot(series.x[series.x > 0], series.y[series.x > 0], marker, ms=3.5, color=color, alpha=0.45, mew=0)
    start, end = min(f.x[f.x > 0][0] for f in fits), min(f.C_max for f in fits)
    carried = all(f.identified for f in fits)
    axes.plot([], [], color=color, label=f"{setting}: A {asymptote_of([f for _, f in pairs])}")
    for C, style in ((np.geomspace(start, end, 100), "-"), (np.geomspace(end, 2 * end, 50), "--"))[: 1 + carried]:
        curves = np.array([f.predict(C) for f in fits])
        low, high = fits[0].band(C)
        if len(fits) > 1:
            half = stdtrit(len(fits) - 1, 0.975) * curves.std(0, ddof=1) / np.sqrt(len(fits))
            low, high = curves.mean(0) - half, curves.mean(0) + half
        axes.plot(C, curves.mean(0), style, color=color)
        axes.fill_between(C, np.maximum(low, 0), np.minimum(high, 1), color=color, alpha=0.12, lw=0)


def plot_compare(path_png, settings, comparisons):
    """Draw settings {name: [(Series, Fit)]} into a PNG: the curves, and for those whose ceilings are not told apart
    the line log F(R) = B log C (A.8)."""
    figure, (left, right) = new_figure(2)
    alike = {name for c in comparisons if c["efficiency"] for name in c["settings"]}
    fits_of = {name: standing([f for _, f in settings[name]]) for name in alike}
    common = np.mean([f.A for fits in fits_of.values() for f in fits] or np.nan)
    for i, (setting, pairs) in enumerate(settings.items()):
        color = f"C{i % 10}"
        draw_setting(left, setting, pairs, color)
        if setting not in alike:
            continue
        for f, marker in zip(fits_of[setting], cycle(MARKERS)):
            inside = (f.y > f.R0) & (f.y < common)
            F = ((f.y - f.R0) / (common - f.y))[inside]
            right.plot(f.x[inside], F, marker, ms=3.5, color=color, alpha=0.45, mew=0)
        log_B, log_mid = np.mean([efficiency_at(f, common)[0] for f in fits_of[setting]], axis=0)
        right.plot(pairs[0][1].x, (pairs[0][1].x / np.exp(log_mid)) ** np.exp(log_B), color=color,
                   label=f"{setting}: slope B {np.exp(log_B):.2f}, C_mid {np.exp(log_mid):.3g}")
    series = next(iter(settings.values()))[0][0]
    finish(left, series, "points (a marker for each seed), mean of the fitted curves, forecasts (dashed)")
    told = f"efficiency, with A held at {common:.3f}: the slope is B, height 1 is at C_mid"
    finish(right, series, told if alike else "no two ceilings are alike: efficiency cannot be compared")
    right.axhline(1, color="0.45", lw=1, ls=":")
    right.set(yscale="log", ylabel="gain reached / gain left, (R - R0) / (A - R)")
    if len(comparisons) < 4:
        figure.suptitle("\n".join(f"{' and '.join(c['settings'])}: {c['verdict'].split(' (')[0]}"
                                  for c in comparisons), fontsize=11)
    save_figure(path_png, figure)


def plot_seeds(path_png, settings):
    """Draw settings {name: [(Series, Fit)]} into a PNG, a panel each: every seed with its own curve (Fig. 8a)."""
    figure, panels = new_figure(len(settings))
    for axes, (setting, pairs) in zip(panels, settings.items()):
        for i, ((series, f), marker) in enumerate(zip(pairs, cycle(MARKERS))):
            own = replace(series, name=series.name.removeprefix(f"{setting}-"))
            draw_run(axes, own, f, f"C{i % 10}", details=False, marker=marker)
        finish(axes, pairs[0][0], setting)
        axes.set_ylim(0, 1)
    for axes in panels[len(settings) :]:
        axes.remove()
    save_figure(path_png, figure)


# ------------------------------------------------------------------------------------------------- a study

COSTS = {"compute_flops": "FLOPs", "compute_tokens": "sampled tokens", "compute_device_hours": "device-hours"}


def study_runs(folder):
    """[(setting, run folder)] of a study of train.py, which is every SETTING-seedN/log.jsonl, in natural order, but
    first `scalerl`, if there is one: the others are compared with the first. Empty if the folder is no study."""
    runs = [(match[1], path.parent) for path in Path(folder).glob("*/log.jsonl")
            if (match := re.fullmatch(r"(.+)-seed\d+", path.parent.name))]

    def order(run):
        return run[0] != "scalerl", [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", run[1].name)]

    return sorted(runs, key=order)


def settings_table(settings, comparisons):
    """The leave-one-out table (Fig. 7): each setting beside the first."""
    reference, rows = next(iter(settings)), []
    for setting, c in zip(settings, [None, *comparisons]):
        every = [f for _, f in settings[setting]]
        fits = standing(every)
        mean = dict.fromkeys(("B", "C_mid"), "-")
        if all(f.identified for f in fits):
            mean = {name: f"{np.mean([getattr(f, name) for f in fits]):.3g}" for name in mean}
        row = [setting, str(len(every)), asymptote_of(every), mean["B"], mean["C_mid"]]
        at = c["efficiency"][0] if c and c["efficiency"] else None
        row += [spread(*c["A_difference"], "+.3f") if c and c["A"] else "-"]
        row += [f"{at['B'][0]:.2f}, {at['B'][1]:.2f}" if at else "-"]
        row += [spread(*at[f"{name}_ratio"], ".2f") if at else "-" for name in ("B", "C_mid")]
        rows.append([*row, re.split(" \\(|: its", c["verdict"])[0] if c else "(the others are compared with it)"])
    return table(["setting", "runs", "A", "B", "C_mid", f"A less that of {reference}",
                  f"B at common A, and that of {reference}", "ratio of B", "ratio of C_mid", "verdict"], rows)


def forecast_table(reports):
    """Each run fitted on the first half of its compute, against what came; then the sizes of the errors."""
    rows, held = [], []
    for report in reports:
        half = report["baselines"]["held_out"]
        if "error" in half:
            rows.append([report["name"], "-", "-", half["error"], *["-"] * 4])
            continue
        low, high = half["interval"]
        errors = [half[name] - half["came"] for name in ("sigmoid", "power_law", "last_value")]
        held.append((*np.abs(errors), low <= half["came"] <= high))
        rows.append([report["name"], f"{half['fit_to']:.3g}", f"{half['came']:.3f}", spread(half["sigmoid"], low, high),
                     "yes" if held[-1][3] else "no", *(f"{error:+.3f}" for error in errors)])
    text = table(["run", "fitted up to", "came", "sigmoid", "inside", "error of the sigmoid", "of the power law",
                  "of the last value"], rows)
    if held:
        middle = "sigmoid {:.3f}, power law {:.3f}, last value {:.3f}".format(*np.median(held, axis=0)[:3])
        text += (f"\n\nMedian error: {middle}. {sum(h[3] for h in held)} of {len(held)} came inside their 95 % "
                 "interval (that of the curve, widened by the scatter of the last three points, whose mean came).")
    return text


def seeds_table(settings):
    """A of every seed, and the error margin that follows (Fig. 8a)."""
    most = max(len(pairs) for pairs in settings.values())
    rows, squares, degrees = [], 0.0, 0
    for setting, pairs in settings.items():
        A = [f.A for _, f in pairs if f.identified and not f.fell]
        own = ["fell" if f.fell else own_asymptote(f) for _, f in pairs]
        rows.append([setting, *own, *["-"] * (most - len(own)), f"{np.ptp(A) / 2:.3f}" if len(A) > 1 else "-"])
        if len(A) > 1:
            squares, degrees = squares + len(A) * np.var(A), degrees + len(A) - 1
    text = table(["A of", *(f"run {i + 1}" for i in range(most)), "half of the range"], rows)
    if degrees:
        s, t = np.sqrt(squares / degrees), stdtrit(degrees, 0.975)
        low, high = s * np.sqrt(degrees / chdtri(degrees, [0.025, 0.975]))
        text += (f"\n\nStandard deviation of A between the seeds of a setting: {spread(s, low, high, '.4f')}, from "
                 f"{degrees} degrees of freedom. So A of one run lies within {t * s:.3f} of that of its setting, and "
                 f"two settings of {most} runs are told apart from {t * s * np.sqrt(2 / most):.3f} on (95 %).")
    return text


def runs_table(folder, settings):
    """Every run with its fit and what it has cost."""
    rows = []
    for series, f in (pair for pairs in settings.values() for pair in pairs):
        last = {}
        for _, row in read_rows(Path(folder, series.name, "log.jsonl").read_text(), series.name)[0]:
            last |= {key: number(value, series.name, key) for key, value in row.items() if key.startswith("compute_")}
        fitted = [spread(getattr(f, name), *f.interval[name], form) if f.identified else "-"
                  for name, form in (("A", ".3f"), ("B", ".2f"), ("C_mid", ".3g"))]
        rows.append([series.name, f"{series.y[0]:.3f}", f"{series.y[-1]:.3f}", *fitted, f"{f.reach:.1f}",
                     f"{f.rms:.4f}", *(f"{last[key]:.3g}" if key in last else "-" for key in COSTS),
                     "; ".join(re.split(r":| \(", warning)[0] for warning in f.warnings) or "-"])
    return table(["run", "before", "after", "A", "B", "C_mid", "C_max/C_mid", "rms", *COSTS.values(), "warnings"], rows)


def study_tables(folder, settings, unfit, comparisons, reports):
    """All tables of a study as Markdown: settings {name: [(Series, Fit)]}, and why some runs have no fit."""
    compute = next(iter(settings.values()))[0][0].x_name
    sections = {"Settings": settings_table(settings, comparisons),
                "Forecasts from the first half of the compute": forecast_table(reports),
                "Seeds": seeds_table(settings), "Runs": runs_table(folder, settings)}
    head = f"Compute is {compute}. In brackets, 95 % intervals: of a setting by t over its seeds, of a run by its fit."
    return "\n\n".join([head, *(f"### {title}\n\n{text}" for title, text in sections.items()),
                        *(f"Not fitted: {reason}" for reason in unfit)]) + "\n"


# --------------------------------------------------------------------------------------------- the command


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """Refuse with exit status 2, naming the nearest flag in place of an unknown one."""
        unknown = re.search(r"unrecognized arguments: (-[^\s=]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1, 0.3) if unknown else []
        self.exit(2, f"{self.prog}: error: {message}{f'; did you mean {near[0]}?' if near else ''}\n")


def R0_option(text):
    try:
        return text if text in ("first", "free") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor first nor free") from None


def command_line(argv):
    parser = Parser("fit_curve.py", description="Fit the ScaleRL curve to RL logs.", allow_abbrev=False)
    add = parser.add_argument
    add("logs", nargs="+", metavar="LOG", help="run folder, CSV, JSONL, trainer_state.json or verl log; with "
        "--compare a setting, [NAME=]LOG[,LOG...]: its seeds joined by commas")
    add("--x", metavar="COLUMN", help="the column of compute (default: guessed, and said)")
    add("--y", metavar="COLUMN", help="the column of the pass rate (default: guessed, and said)")
    add("--percent", action="store_true", help="the pass rate is in percent")
    add("--fit-from", type=float, default=0.0, metavar="X", help="leave out the points before this compute")
    add("--fit-to", type=float, default=np.inf, metavar="X", help="leave out the points after this compute")
    add("--r0", type=R0_option, default="first", metavar="VALUE|first|free",
        help="pass rate before training: a value, the first point, or fitted (default: first)")
    add("--predict", type=float, nargs="+", default=[], metavar="X", help="forecast at these computes")
    add("--method", choices=("varpro", "paper"), default="varpro", help="least squares or the published grid")
    add("--seeds", action="store_true", help="the logs are seeds of one setting")
    add("--compare", action="store_true", help="the logs are settings to compare, or the one folder of a study, where "
        "tables.md, compare.png and seeds.png are written")
    add("--json", metavar="OUT", help="write all results to this file")
    add("--plot", metavar="OUT.png", help="draw the curves into this file")
    options = parser.parse_intermixed_args(argv)  # logs may stand before and after the options
    if options.seeds and options.compare:
        parser.error("--seeds pools all logs, --compare sets them against each other: choose one; with "
                     "--compare, seeds are joined by commas")
    if not all(C > 0 for C in options.predict):
        parser.error("--predict: compute must be positive")
    return options


def named_logs(options):
    """[(setting, path)] of the logs named; "" is the setting of a run of its own."""
    logs = []
    for argument in options.logs:
        setting, paths = "", [argument]
        if options.compare and not os.path.exists(argument):
            setting, paths = re.fullmatch(r"(?:([^=,/]+)=)?(.*)", argument).groups()
            setting, paths = setting or ("" if "," not in paths else paths), paths.split(",")
        logs += [("all" if options.seeds else setting, path) for path in paths]
    return logs


def read_settings(logs, options):
    """Of logs [(setting, path)], {setting: [(Series, Fit)]}, and why the others cannot be fitted."""
    settings, unfit = {}, []
    for setting, path in logs:
        for series in read_log(path, options.x, options.y, options.percent):
            try:
                f = fit(series.x, series.y, options.r0, options.fit_from, options.fit_to, options.method,
                        series.num_examples)
            except ValueError as error:
                run = "" if series.name in os.fspath(path) else f"{series.name}: "
                unfit.append(f"{path}: {run}{error}")
                continue
            own = series.name if series.name not in settings else f"{path}: {series.name}"
            settings.setdefault(setting or own, []).append((series, f))
    return settings, unfit


def main(argv=None):
    options = command_line(argv)
    try:
        study = study_runs(options.logs[0]) if options.compare and len(options.logs) == 1 else []
        settings, unfit = read_settings(study or named_logs(options), options)
        if unfit and not (study and settings):  # a study goes on without them
            raise ValueError(unfit[0])
        pairs = [pair for group in settings.values() for pair in group]
        results = {"runs": [report(series, f, options.predict, options.fit_from) for series, f in pairs]}
        text = [describe(series, f, result) for (series, f), result in zip(pairs, results["runs"])]
        if options.seeds:
            results["seeds"] = seeds([f for _, f in pairs])
            pooled = [f"{name} {mean:.4g} [{low:.4g}, {high:.4g}]"
                      for name, (mean, low, high) in (results["seeds"] or {}).items()]
            text.append(f"{len(pairs)} seeds, mean and 95 % t-interval: {', '.join(pooled)}" if pooled else
                        f"{len(pairs)} seeds: not all identify A, so there is none for the setting")
        if options.compare:
            if len(settings) < 2 and not study:
                raise ValueError("--compare needs two settings or more, or the folder of a study, in which is "
                                 "SETTING-seedN/log.jsonl")
            fits = {name: [f for _, f in group] for name, group in settings.items()}
            first, *others = fits  # of a study, all others are compared with the first
            two_by_two = [(other, first) for other in others] if study else combinations(fits, 2)
            results["comparisons"] = [compare(two, [fits[n] for n in two]) for two in two_by_two]
            text += [f"{' and '.join(c['settings'])}: {c['verdict']}" for c in results["comparisons"]]
        if study:
            folder = Path(options.logs[0])
            text = [study_tables(folder, settings, unfit, results["comparisons"], results["runs"])]
            write_whole(folder / "tables.md", lambda temporary: Path(temporary).write_text(text[0]))
            plot_compare(folder / "compare.png", settings, results["comparisons"])
            plot_seeds(folder / "seeds.png", settings)
        if options.plot and options.compare:
            plot_compare(options.plot, settings, results["comparisons"])
        elif options.plot:
            plot_runs(options.plot, pairs, predict=options.predict)
        if options.json:
            text_json = json.dumps(results, indent=1, allow_nan=False)
            write_whole(options.json, lambda temporary: Path(temporary).write_text(text_json + "\n"))
    except (OSError, ValueError) as error:
        what = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"fit_curve.py: error: {what}", file=sys.stderr)
        return 2
    print("\n\n".join(text))
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `fit_curve.py .. | head` ends quietly
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
