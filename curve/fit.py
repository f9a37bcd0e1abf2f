"""The fit of one run: the sigmoid of least squares, 95 % intervals, and warnings about what the
data does not show.

fit_curve.py has the equation and the meaning of A, B, C_mid and R0; curve/least_squares.py has the
numerics. Here, too, a curve is theta = (A, log B, log C_mid, R0).

Dimensions: n points of a run, m values of compute, k weighted sums of the curve at these.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.special import chdtri, stdtrit  # chi squared and t; scipy.stats is slow to import

from curve.least_squares import (
    B_RANGE,
    Array,
    curve_and_gradient,
    fit_power_law,
    least_squares,
    limits,
)
from curve.logs import Series

Interval = tuple[float, float]  # (low, high), 95 %

SIDES = np.array([-1, 1])  # below and above
BOUND = 0.9999  # an A above this has risen to the bound of 1
NORMAL = stdtrit(np.inf, 0.975)  # standard errors in half of a 95 % interval
MARGIN = 0.02  # asymptotes closer than this are not told apart (sec. 2.1, A.8)

# --- 1. The curves (sec. 2.1, A.4) ----------------------------------------------------------------


def sigmoid(C, A: float, B: float, C_mid: float, R0: float) -> Array:
    """Pass rate at compute C, of C's shape: R0 at 0, halfway at C_mid, A in the limit."""
    return curve_and_gradient(np.asarray(C, float), (A, np.log(B), np.log(C_mid), R0))[0]


def power_law(C, A: float, D: float, B: float) -> Array:
    """Pass rate at compute C > 0, of C's shape: the baseline, a curve without a midpoint."""
    return A - D / np.asarray(C) ** B


# --- 2. A fit -------------------------------------------------------------------------------------
# R0 is held at the first validation, as in the paper. But that validation is as noisy as the
# others, and may lie far off their curve. So each run is fitted again, with R0 free and the first
# validation as one more point. If the first fit is not in the 95 % region of the second, the second
# counts. Comparisons, in which A is held, are made as the second fit.


@dataclass(frozen=True)
class FitWarning:
    """Something that the data does not show, or that makes the fit doubtful."""

    kind: str  # in a few words, for a table
    text: str  # the numbers, and what follows from them

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Fit:
    """A fitted curve, and what is known about it. If A is not identified, A, B and C_mid only
    describe the line that is drawn, and A is only known to exceed the low end of its interval."""

    A: float
    B: float
    C_mid: float
    R0: float
    interval: dict[str, Interval]  # 95 %, of A, B, C_mid and R0
    squares: float  # sum of the squared residuals
    rms: float  # of the residuals, per degree of freedom
    lag_1: float  # correlation of neighbouring residuals
    correlation: float  # lag_1 corrected for bias; it widens the intervals
    r0: str | float  # where R0 comes from: "first", "free" or its value
    degrees: int  # of freedom: points minus fitted parameters
    x: Array = field(repr=False)  # (n,) the points fitted
    y: Array = field(repr=False)
    points: tuple[Array, Array] = field(repr=False)  # x and y of the second fit
    held: dict[int, float] = field(repr=False)  # column of theta and value: {3: R0} if not fitted
    # (2, 4, 4) of theta, for smaller and for larger A: an interval is +- the root
    covariance: Array = field(repr=False)
    series: Series | None = field(default=None, repr=False)  # of `fit_series`
    # binomial standard deviation of one validation, if the number of answers is known
    noise: float | None = None
    warnings: list[FitWarning] = field(default_factory=list)  # the most important first
    identified: bool = False  # whether the data determines A, and with it B and C_mid
    no_ceiling: bool = False  # the data passes the middle of its rise, but A is on its bound 1
    fell: bool = False  # the pass rate came down from its peak, which no sigmoid does
    collapsed: bool = False  # it came down so far that the fit means nothing
    together: bool = False  # A and its interval are of all seeds (comparison.fit_together)

    @property
    def comparable(self) -> bool:
        """Whether the data determines B and C_mid once A is held."""
        return self.identified or self.no_ceiling

    @property
    def C_min(self) -> float:
        """The first compute above 0 that is fitted."""
        return beyond_0(self)[0][0]

    @property
    def C_max(self) -> float:
        """The last compute that is fitted."""
        return self.x[-1]

    @property
    def end(self) -> float:
        """The mean of the last three points."""
        return self.y[-3:].mean()

    @property
    def reach(self) -> float:
        """How far the data goes past the middle of the rise."""
        return self.C_max / self.C_mid

    @property
    def scatter(self) -> float:
        """Half of the 95 % interval of a single validation around its curve."""
        return stdtrit(self.degrees, 0.975) * self.rms

    @property
    def gain_made(self) -> float:
        """The part of the gain that the data shows, (R(C_max) - R0) / (A - R0)."""
        return sigmoid(self.C_max, 1, self.B, self.C_mid, 0)

    @cached_property
    def power_law(self) -> tuple[float, float, float]:
        """(A, D, B) of the power law through the same points."""
        return fit_power_law(*beyond_0(self))

    def predict(self, C) -> Array:
        """The fitted curve at compute C, of C's shape."""
        return sigmoid(C, self.A, self.B, self.C_mid, self.R0)

    def describes(self, C: float) -> bool:
        """Whether compute C lies between the points of a run that did not fall."""
        return self.C_min <= C <= self.C_max and not self.fell

    def points_at(self, C: float) -> float:
        """Where the points lie at a compute that the fit describes: the curve, moved by the mean
        residual of the last three points up to there."""
        x, y = beyond_0(self)
        residuals = (y - self.predict(x))[x <= C]
        return self.predict(C) + residuals[-3:].mean()

    @property
    def theta(self) -> tuple[float, ...]:
        return self.A, np.log(self.B), np.log(self.C_mid), self.R0

    def interval_of(self, weights: Array, C: Array) -> tuple[Array, Array]:
        """95 % intervals (low, high), each (k,), of k sums of the curve at compute C (m,): weights
        (k, m) @ R(C)."""
        value, gradient = curve_and_gradient(C, self.theta)
        below, above = half_widths(weights @ gradient, self.covariance)
        return weights @ value - below, weights @ value + above

    def band(self, C) -> Array:
        """95 % interval [low, high] of the curve, not of single validations, at compute C; each of
        C's shape."""
        C = np.asarray(C, float)
        interval = self.interval_of(np.eye(C.size), C.ravel())
        return np.clip(interval, 0, 1).reshape(2, *C.shape)

    @property
    def given(self) -> dict[int, float]:
        """What the second fit holds."""
        return {} if self.r0 == "first" else self.held

    def held_at(self, A: float) -> tuple[Array, float]:
        """The second fit with the asymptote held at A <= 1: theta (4,), and its squared error."""
        return least_squares(*self.points, self.given | {0: min(A, 1)}, self.theta)

    def efficiency_at(self, A: Sequence[float]) -> tuple[Array, Array]:
        """log B and log C_mid (k, 2) with the asymptote held at A (k,) <= 1 (A.8), and their
        standard errors (k, 2), widened for correlation as the intervals are."""
        found = []
        for each in A:
            theta, squares = self.held_at(each)
            excess = allowed_excess(squares, self.degrees + 1, self.correlation)
            variances = excess * spread(self.points[0], theta, {0, *self.given}).diagonal()
            found.append((theta[1:3], np.sqrt(variances[1:3]) / NORMAL))
        return np.swapaxes(found, 0, 1)


def spread(x: Array, theta: Array, held: Collection[int]) -> Array:
    """The covariance of theta (4, 4) if each point has the variance 1 (the delta method). held: the
    columns that are not fitted."""
    _, J = curve_and_gradient(x, theta)
    free = [column for column in range(4) if column not in held]
    covariance = np.zeros((4, 4))
    JJ = J[:, free].T @ J[:, free]
    covariance[np.ix_(free, free)] = np.linalg.pinv(JJ, rcond=1e-12, hermitian=True)
    return covariance


def half_widths(J: Array, covariance: Array) -> Array:
    """The lower and the upper halves (2, k) of the 95 % intervals of k quantities with derivatives
    J (k, 4) by theta. One that falls with A is small where A is large."""
    half = np.sqrt(np.einsum("ki,sij,kj->sk", J, covariance, J).clip(0))
    return np.where(J @ covariance[0, 0] < 0, half[::-1], half)


Variants = dict[str, list[Fit]]  # by name, the seeds of each


def beyond_0(points: Series | Fit) -> tuple[Array, Array]:
    """x and y of the points with compute above 0, which has a logarithm."""
    later = points.x > 0
    return points.x[later], points.y[later]


def with_interval(value: float, low: float, high: float, form: str = ".3f") -> str:
    """A value with its 95 % interval, as text."""
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def check_curve(x: Array, y: Array) -> None:
    """ValueError, naming the first wrong point, unless compute x (n,) increases from 0 or more, and
    pass rates y (n,) are in [0, 1]."""
    wrong = {
        "not finite: remove the line": ~np.isfinite(x + y),
        "compute must increase, and is never below 0: name another column with --x, the steps of a "
        "resumed run, or sort the log": np.diff(x, prepend=-1e-300) <= 0,
        "a pass rate lies in [0, 1]: name another column with --y, or say with --range what a "
        "wrong and a right answer give": (y < 0) | (y > 1),
    }
    for message, broken in wrong.items():
        if broken.any():
            i = broken.argmax()
            raise ValueError(f"x = {x[i]:g}, y = {y[i]:g}: {message}")


def fit_sigmoid(x, y, r0: str | float = "first", fit_from=0.0, fit_to=np.inf) -> Fit:
    """The sigmoid of least squares through compute x (n,), increasing, and pass rate y (n,) in [0,
    1].

    r0: "first" (the first point is the pass rate before training; it gives R0, and its x may be 0),
    "free" (fitted), or the value. Points with fit_from <= x <= fit_to are fitted. ValueError if
    there is no curve to fit.
    """
    x = np.asarray(x, float)
    y = np.asarray(y, float)
    check_curve(x, y)
    first, R0 = x[0], {"first": y[0], "free": None}.get(r0, r0)
    if R0 is not None and not 0 <= R0 <= 1:
        raise ValueError(f"R0 = {R0:g} is no pass rate, which lies in [0, 1]")

    # The points that are fitted. One that gives R0 is not, nor one at compute 0 if R0 is given:
    # every curve goes through it.
    window = (x >= fit_from) & (x <= fit_to)
    fitted = window.copy()
    if r0 == "first" or (R0 is not None and x[0] == 0):
        fitted[0] = False
    x, y = x[fitted], y[fitted]
    held = {} if R0 is None else {3: R0}
    parameters = 4 - len(held)
    degrees = len(x) - parameters
    if degrees < 1:
        found = f"{len(x)} of {len(window)} points are fitted"
        raise ValueError(f"{found}, and a fit needs {parameters + 1}")
    if np.ptp(y) == 0:
        found = f"the pass rate is {y[0]:g} at all {len(y)} points"
        raise ValueError(f"{found}: a constant has no curve to fit")

    theta, squares = least_squares(x, y, held)
    points, second, least, off = (x, y), theta, squares, 0.0
    if r0 == "first":  # one point and one parameter more, so as many degrees of freedom
        points = np.append(first, x), np.append(R0, y)
        second, least = least_squares(*points, {})
        off = curve_and_gradient(first, theta)[0] - R0
    residuals = points[1] - curve_and_gradient(points[0], second)[0]
    lag_1, correlation = lag_one_correlation(residuals, parameters)
    excess = allowed_excess(least, degrees, correlation)
    if squares + off**2 > least + excess:
        (x, y), theta, squares, held = points, second, least, {}

    A, B, C_mid, R0 = np.where([0, 1, 1, 0], np.exp(theta), theta)
    fit = Fit(
        A=A,
        B=B,
        C_mid=C_mid,
        R0=R0,
        interval={},
        squares=squares,
        rms=np.sqrt(squares / degrees),
        lag_1=lag_1,
        correlation=correlation,
        r0=r0,
        degrees=degrees,
        x=x,
        y=y,
        points=points,
        held=held,
        covariance=np.zeros((2, 4, 4)),
    )
    return judge(with_intervals(fit, excess))


def with_intervals(fit: Fit, excess: float) -> Fit:
    """The Fit with the covariance and the intervals of its curve: curves fit about as well if their
    squared error is at most `excess` above the least. The delta method takes it for a square of the
    distance. For A, whose interval is longer above than below, its true growth counts."""
    theta = np.array(fit.theta)
    covariance = excess * spread(fit.x, theta, fit.held)
    straight = np.sqrt(covariance[0, 0])
    stretch = np.ones(2)
    for _ in range(2):
        A = np.clip(fit.A + SIDES * stretch * straight, 0, 1)
        squares = [least_squares(fit.x, fit.y, fit.held | {0: one}, theta)[1] for one in A]
        growth = np.maximum(np.array(squares) - fit.squares, 1e-9 * excess)
        stretch = np.abs(A - fit.A) / straight * np.sqrt(excess / growth)

    if fit.r0 == "first" and fit.held:  # R0 has the error of a point, and moves the other columns
        _, J = curve_and_gradient(fit.x, theta)
        moved = -covariance / excess @ J.T @ J[:, 3]
        moved[3] = 1
        covariance += excess * np.outer(moved, moved)
    of_A = covariance[0]
    stretch = np.minimum(stretch, np.array([fit.A, 1 - fit.A]) / np.sqrt(of_A[0]))
    covariance = covariance + np.multiply.outer(stretch**2 - 1, np.outer(of_A, of_A) / of_A[0])
    ends = theta + SIDES[:, None] * half_widths(np.eye(4), covariance)
    ends = np.clip(ends, *limits(fit.x))
    ends[:, 1:3] = np.exp(ends[:, 1:3])
    interval = dict(zip(("A", "B", "C_mid", "R0"), zip(*ends)))
    return replace(fit, covariance=covariance, interval=interval)


def fit_series(series: Series, *how) -> Fit:
    """The fit of a run, which keeps its Series. how: r0, fit_from and fit_to of `fit_sigmoid`."""
    fit = fit_sigmoid(series.x, series.y, *how)
    if not series.num_examples:
        return replace(fit, series=series)
    noise = np.sqrt(np.mean(fit.y * (1 - fit.y)) / series.num_examples)
    warnings = fit.warnings
    # By chance they are as large once in 200 runs.
    if not fit.collapsed and fit.rms > noise * np.sqrt(chdtri(fit.degrees, 0.005) / fit.degrees):
        text = (
            f"residuals of {fit.rms:.4f}, but the noise of a validation is {noise:.4f}: the pass"
            " rate moves for other reasons, or not as a sigmoid"
        )
        warnings = [*warnings, FitWarning("scatter", text)]
    return replace(fit, series=series, noise=noise, warnings=warnings)


def lag_one_correlation(residual: Array, p: int) -> tuple[float, float]:
    """Correlation of neighbouring residuals (n,), and the same corrected for its bias. The fitted
    curve follows slow noise, so residuals are less correlated than the noise, by about p (1 + 3 r)
    / n for p parameters: p times the bias that Kendall (1954) gives for a fitted mean."""
    n = len(residual)
    raw = residual[1:] @ residual[:-1] / max(residual @ residual, 1e-300)
    return raw, np.clip((n * raw + p) / max(n - 3 * p, n / 2), 0, 0.9)


def allowed_excess(squares: Array, degrees: int, correlation: float) -> Array:
    """A curve is in the 95 % interval if its squared error exceeds the least one by at most this.
    For independent noise the profile-likelihood bound is s^2 t^2: s^2 is the error per degree of
    freedom, t Student's 97.5 % quantile. A correlation r of neighbours makes the variance of their
    mean (1 + r) / (1 - r) times as large (`python benchmarks/fit.py`). degrees: points minus fitted
    parameters."""
    variance = np.maximum(squares / degrees, 1e-12)  # no pass rate is known to better than 1e-6
    independent = variance * stdtrit(degrees, 0.975) ** 2
    return independent * (1 + correlation) / (1 - correlation)


# --- 3. Verdicts: what the data does not show -----------------------------------------------------

# Limits by simulation, `python benchmarks/fit.py`: within them the interval of A holds it.
LEAST_GAIN_MADE = 0.7  # below this part of the gain no asymptote is reported
SAFE_GAIN_MADE = 0.8  # below this part it comes with a warning
# rms / sqrt(points), as a part of the gain: with more, an unfinished rise can look finished
MOST_SCATTER = 0.01
# kinds of warnings that decide
UNKNOWN = "A is not identified"
NO_CEILING = "A is on its bound 1"
SHORT = "short"
NO_RISE = "no rise"


def judge(fit: Fit) -> Fit:
    """The Fit with its verdicts (the fields from `identified` on) and with all warnings."""
    fall = about_fall(fit)
    if fall and fall.kind == "collapse":
        return replace(fit, fell=True, collapsed=True, warnings=[fall])
    doubt = doubt_about_A(fit)
    kind = doubt.kind if doubt else SHORT
    identified = kind == SHORT
    warnings = [*filter(None, (doubt, fall))]
    if fit.degrees < 3:
        text = f"only {len(fit.x)} points: degrees of freedom for the intervals: {fit.degrees}"
        warnings.append(FitWarning("few points", text))
    low, high = B_RANGE
    if identified and not low * 1.01 < fit.B < high / 1.01:
        text = f"B = {fit.B:.3g}: the rise is a step between points"
        warnings.append(FitWarning("B is on its bound", text))
    return replace(
        fit,
        identified=identified,
        no_ceiling=kind == NO_CEILING,
        fell=bool(fall),
        warnings=warnings,
    )


def about_fall(fit: Fit) -> FitWarning | None:
    """A warning if the pass rate came down: "collapse" if it lost more than half of its rise, or
    "decline" if it lost more than a fifth."""
    level = np.convolve(fit.y, np.ones(3) / 3, "valid")  # means of three neighbours
    peak = level.max()
    end = level[-1]
    peak_x = fit.x[level.argmax() + 1]
    # The standard deviation of one point, in which slow movement does not count.
    jump = np.median(np.abs(np.diff(fit.y))) / 0.954
    if peak - end > max(0.5 * (peak - min(fit.R0, end)), 4 * jump):
        kind, follows = "collapse", ", so this fit means nothing"
    elif peak - end > max(0.2 * (peak - fit.R0), 4 * jump):
        kind, follows = "decline", ""
    else:
        return None
    fall = f"the pass rate fell from {peak:.3f} around x = {peak_x:.4g} to {end:.3f}"
    advice = "too few points lie before it to fit them"
    if (fit.x <= peak_x).sum() > 4:
        advice = f"try --fit-to {peak_x:.4g}"
    return FitWarning(kind, f"{fall}, and a sigmoid cannot{follows}: {advice}")


def doubt_about_A(fit: Fit) -> FitWarning | None:
    """Why A is not identified, or, if it is SHORT, may be wrong although it is. The first reason
    counts."""
    n = len(fit.x)
    gain = fit.A - fit.R0
    low, high = fit.interval["A"]
    made = f"only {int(100 * fit.gain_made)} % of the gain is made, less than"
    if gain < 2 * fit.rms:
        rise = f"nothing above R0 = {fit.R0:.3f}"
        return FitWarning(NO_RISE, f"{rise} stands out of the scatter ({fit.rms:.3f})")
    if fit.gain_made < LEAST_GAIN_MADE:
        least = f"{100 * LEAST_GAIN_MADE:.0f} %"
        return FitWarning(UNKNOWN, f"{made} {least}: the data shows only A > {low:.3f}")
    if fit.A > BOUND and low < 0.95:
        return FitWarning(NO_CEILING, f"the data shows no ceiling, only A > {low:.3f}")
    if fit.rms / np.sqrt(n) > MOST_SCATTER * gain:
        points = f"{n} points with a scatter of {fit.rms:.3f}"
        return FitWarning(UNKNOWN, f"{points} are too few for this gain")
    if high - low > abs(gain):
        interval = f"[{low:.3f}, {high:.3f}]"
        return FitWarning(UNKNOWN, f"its interval {interval} is wider than the whole gain")
    if fit.gain_made < SAFE_GAIN_MADE:
        return FitWarning(SHORT, f"{made} {100 * SAFE_GAIN_MADE:.0f} %: each point moves A")
    return None
