"""The numerics under curve/fit.py: the sigmoid of least squares, and the region of curves that fit
about as well.

Here a curve is theta = (A, log B, log C_mid, R0). The logarithms keep B and C_mid positive, and
give all four about the same size. `free` lists the columns of theta that may move. The compute `x`
increases, and only its first value may be 0. If R0 is None, it is fitted too.

Dimensions: n points of a run, k curves, f free parameters.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

Array = np.ndarray
Interval = tuple[float, float]  # (low, high), 95 %

B_RANGE = 0.05, 30.0

# --- the curve (sec. 2.1, A.4) --------------------------------------------------------------------
# Another form of curve is written here, and nowhere else.


def reached(log_C: Array, B: Array, log_mid: Array) -> Array:
    """The part of the gain from R0 to A that is reached at compute C: 0 at 0, half at C_mid, 1 in
    the limit. 1 / (1 + (C_mid / C)^B), by logarithms."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-B * (log_C - log_mid)))


def curve_and_gradient(x: Array, theta: Array) -> tuple[Array, Array]:
    """The curves theta (k, 4) at compute (n,): values (k, n), and their derivatives by theta (k, 4,
    n)."""
    # Each parameter is (k, 1), so that it meets all n points.
    A, log_B, log_mid, R0 = theta.T[:, :, None]
    B = np.exp(log_B)
    with np.errstate(divide="ignore"):
        log_C = np.maximum(np.log(x), -1e4)  # compute 0 is far to the left: every curve is at R0
    part = reached(log_C, B, log_mid)
    slope = (A - R0) * B * part * (1 - part)  # dR / d log C
    gradient = np.stack([part, slope * (log_C - log_mid), -slope, 1 - part], axis=1)
    return R0 + (A - R0) * part, gradient


# --- descent: downhill from many curves at once ---------------------------------------------------


def limits(x: Array) -> Array:
    """Lowest and highest theta searched, (2, 4): C_mid from 1/20 of the first to 1000 times the
    last compute."""
    first, last = x[x > 0][[0, -1]]
    ranges = [
        (-np.inf, np.inf),
        np.log(B_RANGE),
        (np.log(first / 20), np.log(last * 1000)),
        (0.0, 1.0),
    ]
    return np.transpose(ranges)


def descend(
    x: Array, y: Array, theta: Array, free: list[int], steps: int = 50
) -> tuple[Array, Array, Array]:
    """Levenberg-Marquardt from k curves theta (k, 4), all at once: SciPy fits one at a time, which
    takes ten times as long. Returns the curves of least squares (k, 4), their squared errors (k,),
    and J'J (k, f, f), half of the curvature of the squared error in the free parameters. With
    steps=0 no curve moves."""
    low, high = limits(x)[:, free]
    theta = theta.copy()

    def evaluate(theta):
        """Squared errors (k,), half of their gradient (k, f, 1), and J'J (k, f, f)."""
        value, J = curve_and_gradient(x, theta)
        J = J[:, free]
        residual = value - y
        return (residual**2).sum(1), J @ residual[:, :, None], J @ J.transpose(0, 2, 1)

    state = evaluate(theta)
    damping = np.full(len(theta), 1e-3)
    identity = np.eye(len(free))
    for _ in range(steps):
        # A step from each curve. The more it is damped, the shorter it is.
        squares, gradient, JJ = state
        damped = JJ * (1 + damping[:, None, None] * identity) + 1e-14 * identity
        step = np.linalg.solve(damped, gradient)[:, :, 0]
        trial = theta.copy()
        trial[:, free] = np.clip(trial[:, free] - step, low, high)
        settled = (np.abs(trial - theta).max(1) < 1e-6) | (damping > 1e6)

        # Only the curves that come to fit better move.
        tried = evaluate(trial)
        better = tried[0] < squares
        damping *= np.where(better, 0.1, 10)
        for old, new in zip((theta, *state), (trial, *tried)):
            old[better] = new[better]
        if settled.all():
            break
    return theta, state[0], state[2]


# --- best curves (A.4) ----------------------------------------------------------------------------


def starting_grid(x: Array, *more: Array) -> tuple[Array, Array]:
    """Curves (504, 4) from 0 to 1, one for each pair of 18 B and 28 C_mid, and more curves (4,);
    and the parts (504, n) of their gains that are reached."""
    first, last = np.log(x[x > 0][[0, -1]])
    log_B = np.linspace(-1.9, 2.7, 18)
    log_mid = np.linspace(first - 1, last + 4, 28)
    columns = [1.0], log_B, log_mid, [0.0]
    theta = np.stack(np.meshgrid(*columns, indexing="ij"), -1).reshape(-1, 4)
    theta = np.vstack([theta, *more])
    _, gradient = curve_and_gradient(x, theta)
    return theta, gradient[:, 0]


def lines(z: Array, y: Array, base: float | None = None) -> tuple[Array, Array]:
    """(base, slope), each (k,), of the lines of least squares y (n,) = base + slope z (k, n). A
    given base is kept."""
    # A point on each line.
    z0, y0 = np.zeros(len(z)), base
    if base is None:
        z0, y0 = z.mean(1), y.mean()
    centred = z - z0[:, None]
    slope = centred @ (y - y0) / ((centred**2).sum(1) + 1e-300)
    return y0 - slope * z0, slope


def best_of_grid(x: Array, y: Array, R0: float | None) -> Array:
    """A curve (4,) near the one of least squares, with A in [0, 1]. With B and C_mid held, the
    curve is a straight line in the part of the gain that is reached, and the best line has a closed
    form. So a grid over B and C_mid finds the right valley, and `polish` walks to its bottom."""
    theta, part = starting_grid(x)
    base, gain = lines(part, y, R0)
    theta[:, 0] = np.clip(base + gain, 0, 1)
    theta[:, 3] = base
    value, _ = curve_and_gradient(x, theta)
    return theta[((value - y) ** 2).sum(1).argmin()]


def polish(x: Array, y: Array, theta: Array, free: list[int]) -> tuple[Array, float]:
    """The curve of least squares (4,) with A in [0, 1], downhill from theta (4,), and its squared
    error. free: the columns that may move beside A."""
    curves, squares, _ = descend(x, y, theta[None], [0, *free])
    if not 0 <= curves[0, 0] <= 1:  # then the best curve has A on its bound
        curves[:, 0] = np.clip(curves[:, 0], 0, 1)
        curves, squares, _ = descend(x, y, curves, free)
    return curves[0], squares[0]


def fit_power_law(x: Array, y: Array) -> tuple[float, float, float]:
    """(A, D, B) of the power law of least squares with A <= 1; x (n,) > 0. For each B it is a line:
    B is searched."""
    log_B = np.linspace(np.log(1e-3), np.log(10), 200)
    scale = x[-1]
    # Each round looks closer around the best B of the round before.
    for _ in range(4):
        z = (x / scale) ** -np.exp(log_B)[:, None]
        A, slope = lines(z, y)
        # A line that would end above 1 ends at 1.
        _, slope_to_1 = lines(z, y, base=1.0)
        slope = np.where(A > 1, slope_to_1, slope)
        A = np.minimum(A, 1)
        value = A[:, None] + slope[:, None] * z
        i = ((value - y) ** 2).sum(1).argmin()
        B = np.exp(log_B[i])
        around = np.clip([i - 1, i + 1], 0, len(log_B) - 1)
        log_B = np.linspace(*log_B[around], 30)
    return A[i], -slope[i] * scale**B, B


# --- the 95 % region ------------------------------------------------------------------------------


inverse = partial(np.linalg.pinv, rcond=1e-12, hermitian=True)


@dataclass(frozen=True)
class Profile:
    """The 95 % region: all curves whose squared error is at most `excess` above the least. Every
    interval is read off it.

    The region is long in A and thin across. So k values of A are kept, and for each of them the
    best curve with this A. Its squared error is above the least, but by less than the excess. So
    curves around it with the same A are in the region, too. They fill an ellipse in the other
    parameters: at its rim all of the excess is used.
    """

    # (k, 4): the best curves with A held at values across its interval, and last the one reported
    theta: Array
    left: Array  # (k,) the part of the excess that the curve itself does not use
    inverse_JJ: Array  # (k, f, f) the shape of the ellipse, in the free parameters
    free: list[int]  # all but A

    def interval(self, value: Array, gradient: Array) -> tuple[Array, Array]:
        """(low, high), each (m,), of m functions of a curve: the lowest and the highest value over
        all ellipses. value (k, m): the functions at each of the k curves. gradient (k, m, f): their
        derivatives by the free parameters."""
        variance = np.einsum("kmi,kij,kmj->km", gradient, self.inverse_JJ, gradient)
        half = np.sqrt(np.maximum(self.left[:, None] * variance, 0))
        return (value - half).min(0), (value + half).max(0)


def best_with(A: Array, x: Array, y: Array, best: Array, free: list[int]) -> tuple[Array, Array]:
    """The best curves (k, 4) with these A (k,), and their squared errors (k,). Each descends from a
    curve of the grid, or from the best curve (4,) of all."""
    grid, part = starting_grid(x, best)
    best_R0 = best[3]
    gain = (A - best_R0)[:, None]
    # Less what is the same for all.
    squares = gain**2 * (part**2).sum(1) - 2 * gain * (part @ (y - best_R0))
    start = grid[squares.argmin(1)]
    start[:, 0] = A
    start[:, 3] = best_R0
    return descend(x, y, start, free, steps=12)[:2]


def distances(straight: float, room: float) -> Array:
    """Fifteen distances (15,) from the best A, where an end of its interval is looked for: around
    `straight`, and beyond it up to `room`, where the bound is."""
    near = min(straight, room / 8) * np.array([0, 0.5, 0.8, 1, 1.2, 1.6, 2.3, 4])
    far = near[-1] + (room - near[-1]) * np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1])
    return np.append(near, far)


def crossing(A: Array, growth: Array, excess: float, bound: float) -> float:
    """The A at which the squared error has grown by `excess`, between two of these A (k,) with
    their growth (k,); the bound if it never has. The root of the growth is about proportional to
    the distance from the first A, which is the best."""
    root, limit = np.sqrt(np.maximum(growth, 0)), np.sqrt(excess)
    beyond = np.flatnonzero(root > limit)
    if not beyond.size:
        return bound
    around = slice(beyond[0] - 1, beyond[0] + 1)  # the first is never beyond
    return np.interp(limit, root[around], A[around])


def profile_over_A(
    x: Array, y: Array, best: Array, estimate: Array, excess: float, free: list[int]
) -> tuple[dict[str, Interval], Profile]:
    """The 95 % intervals of A, B, C_mid and a free R0, by name, and the Profile behind them.

    A moves away from the best curve to both sides, and at each A the other parameters are fitted
    again. On each side the interval of A ends when the squared error has grown by `excess`, or at a
    bound: 0, 1, or R0, at which the curve would turn over. If the error grew with the square of the
    distance, it would end at the distance `straight`.

    best: the curve (4,) of least squares. estimate: the curve (4,) that is reported; if its A lies
    further out, the interval ends there. free: the columns that may move beside A.
    """
    _, (least,), (JJ,) = descend(x, y, best[None], [0, *free], steps=0)
    straight = np.sqrt(inverse(JJ)[0, 0] * excess) + 1e-9
    best_A, best_R0 = best[[0, 3]]
    bounds = (best_R0, 1.0) if best_A > best_R0 else (0.0, best_R0)
    ends = []
    for side, bound in zip((-1, 1), bounds):
        A = best_A + side * distances(straight, abs(bound - best_A))
        _, squares = best_with(A, x, y, best, free)
        ends.append(crossing(A, squares - least, excess, bound))

    # The curves of the profile. The estimate has no ellipse of its own.
    curves, _ = best_with(np.linspace(*ends, 14), x, y, best, free)
    curves = np.vstack([curves, best, estimate])
    _, squares, JJ = descend(x, y, curves, free, steps=0)
    left = np.maximum(least + excess - squares, 0)
    left[-1] = 0
    profile = Profile(curves, left, inverse(JJ), free)

    # The intervals. The interval of A holds the A that is reported. The gradient of a parameter, by
    # the parameters, is 1 for itself.
    gradient = np.tile(np.eye(len(free)), (len(curves), 1, 1))
    interval = profile.interval(curves[:, free], gradient)
    others = np.clip(interval, *limits(x)[:, free])
    others[:, :2] = np.exp(others[:, :2])  # of log B and log C_mid
    intervals = {"A": (min(*ends, estimate[0]), max(*ends, estimate[0]))}
    return intervals | dict(zip(("B", "C_mid", "R0"), map(tuple, others.T))), profile
