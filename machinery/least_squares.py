"""The sigmoid of least squares, and the region of curves that fit about as well: the numerics under fit_curve.py.

    1. Descent             downhill from many curves at once
    2. Best curves         the best sigmoid, the same by the paper's grid search, the best power law
    3. The 95 % region     from which the interval of anything that depends on the curve is read off

Here a curve is theta = (A, log B, log C_mid, R0): logarithms keep B and C_mid positive, and all four of about the same
size. `free` are the columns of theta that may move. The compute `x` increases, and is positive but for an optional 0
at its start.

Dimensions: n points of a run, k curves, f free parameters.
"""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Interval = tuple[float, float]  # (low, high), 95 %

B_RANGE = 0.05, 30.0
PAPER_A = np.linspace(0.450, 0.800, 71)  # the published grid, ...
PAPER_C_MID = np.linspace(100, 40000, 100)  # ... whose compute is in GPU-hours

# --- 1. Descent ---------------------------------------------------------------------------------------------------


def log_compute(x: Array) -> Array:
    """log x, with compute 0 put far to the left, where every curve is at R0."""
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(x), -1e4)


def gain_reached(log_x: Array, log_B: Array, log_mid: Array) -> Array:
    """1 / (1 + (C_mid / C)^B), the part of the gain from R0 to A that is reached; the arguments broadcast."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-np.exp(log_B) * (log_x - log_mid)))


def curve_and_gradient(log_x: Array, theta: Array) -> tuple[Array, Array]:
    """The curves theta (k, 4) at log compute (n,): values (k, n), and their derivatives by theta (k, 4, n)."""
    A, log_B, log_mid, R0 = theta.T[:, :, None]
    g = gain_reached(log_x, log_B, log_mid)
    slope = (A - R0) * np.exp(log_B) * g * (1 - g)  # dR / d log C
    return R0 + (A - R0) * g, np.stack([g, slope * (log_x - log_mid), -slope, 1 - g], axis=1)


def limits(x: Array) -> tuple[Array, Array]:
    """Lowest and highest theta searched: C_mid from 1/20 of the first to 1000 times the last compute."""
    first, last = x[x > 0][[0, -1]]
    low = np.array([-np.inf, np.log(B_RANGE[0]), np.log(first / 20), 0.0])
    return low, np.array([np.inf, np.log(B_RANGE[1]), np.log(last * 1000), 1.0])


def descend(x: Array, y: Array, theta: Array, free: list[int], steps: int = 50) -> tuple[Array, Array, Array]:
    """The curves of least squares downhill from k curves theta (k, 4), by Levenberg-Marquardt, all k at once.

    Returns the curves (k, 4), their squared errors (k,), and J'J (k, f, f), half of the curvature of the squared error
    in the free parameters. With steps=0 nothing moves. (scipy.optimize.least_squares finds the same curves one at a
    time: for the forty curves behind an interval it takes ten times as long.)
    """
    log_x, theta, (low, high) = log_compute(x), theta.copy(), limits(x)

    def evaluate(theta):
        value, J = curve_and_gradient(log_x, theta)
        J, residual = J[:, free], value - y
        return (residual**2).sum(1), (J @ residual[:, :, None])[:, :, 0], J @ J.transpose(0, 2, 1)

    squares, gradient, JJ = evaluate(theta)
    damping, identity = np.full(len(theta), 1e-3), np.eye(len(free))
    for _ in range(steps):
        damped = JJ * (1 + damping[:, None, None] * identity) + 1e-14 * identity
        trial = theta.copy()
        trial[:, free] -= np.linalg.solve(damped, gradient[:, :, None])[:, :, 0]
        trial[:, free] = np.clip(trial[:, free], low[free], high[free])
        new = evaluate(trial)
        better = new[0] < squares
        settled = (np.abs(trial - theta).max(1) < 1e-6) | (damping > 1e6)
        damping *= np.where(better, 0.1, 10)
        for old, its_new in zip((theta, squares, gradient, JJ), (trial, *new)):
            old[better] = its_new[better]
        if settled.all():
            break
    return theta, squares, JJ


# --- 2. Best curves (A.4) -----------------------------------------------------------------------------------------


def starting_grid(x: Array) -> tuple[Array, Array, Array]:
    """504 pairs of log B and log C_mid, each (504,), and the part of the gain that each reaches at x (504, n)."""
    first, last = np.log(x[x > 0][[0, -1]])
    grid = np.meshgrid(np.linspace(-1.9, 2.7, 18), np.linspace(first - 1, last + 4, 28))
    log_B, log_mid = map(np.ravel, grid)
    return log_B, log_mid, gain_reached(log_compute(x), log_B[:, None], log_mid[:, None])


def variable_projection(x: Array, y: Array, R0: float | None) -> tuple[Array, float]:
    """The sigmoid of least squares with A in [0, 1]: theta (4,) and its squared error. R0 None is fitted, too.

    For given B and C_mid the curve is linear in A and R0, so these have a closed form: the best of a grid over B and
    C_mid lies in the right valley, and `polish` walks to its bottom.
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


def polish(x: Array, y: Array, theta: Array, R0_free: bool) -> tuple[Array, float]:
    """The curve of least squares with A in [0, 1] downhill from theta (4,), and its squared error."""
    others = [1, 2, 3] if R0_free else [1, 2]
    curves, squares, _ = descend(x, y, theta[None], [0, *others])
    if not 0 <= curves[0, 0] <= 1:  # then the best curve has A on its bound
        curves[:, 0] = np.clip(curves[:, 0], 0, 1)
        curves, squares, _ = descend(x, y, curves, others)
    return curves[0], squares[0]


def paper_grid(x: Array, y: Array, R0: float | None) -> tuple[Array, float]:
    """The paper's own procedure: for each A and C_mid of its grid the B of least squares, then the best of all.

    As `variable_projection`, but R0 must be given, and compute must be in GPU-hours.
    """
    if R0 is None or x[-1] < PAPER_C_MID[0] or x[0] > PAPER_C_MID[-1]:
        raise ValueError(
            "the published grid needs an R0 that is not free, and compute in GPU-hours: its C_mid go from"
            f" {PAPER_C_MID[0]:g} to {PAPER_C_MID[-1]:g}"
        )
    A, log_mid = map(np.ravel, np.meshgrid(PAPER_A, np.log(PAPER_C_MID)))
    start = np.stack([A, np.zeros_like(A), log_mid, np.full_like(A, R0)], axis=1)
    curves, squares, _ = descend(x, y, start, [1])
    i = squares.argmin()
    return curves[i], squares[i]


def remarks_on_the_grid(A: float, C_mid: float) -> list[str]:
    """What to know of a fit by the published grid: a result on its edge, and the steps that it snaps to."""
    step, said = PAPER_C_MID[1] - PAPER_C_MID[0], []
    for name, value, grid in (("A", A, PAPER_A), ("C_mid", C_mid, PAPER_C_MID)):
        if np.isclose(value, grid[[0, -1]]).any():
            said.append(f"{name} = {value:.4g} is on the edge of the published grid: look beyond it")
    return [*said, f"the published grid snaps: C_mid to steps of {step:.0f} ({step / C_mid:.0%} of it), A to .005"]


def fit_power_law(x: Array, y: Array) -> tuple[float, float, float]:
    """(A, D, B) of the power law of least squares with A <= 1; x (n,) > 0, y (n,). Only B has to be searched."""
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


# --- 3. The 95 % region -------------------------------------------------------------------------------------------


def inverse(matrices: Array) -> Array:
    return np.linalg.pinv(matrices, rcond=1e-12, hermitian=True)


@dataclass(frozen=True)
class Profile:
    """The 95 % region of curves, from which every interval is read off: those whose squared error is at most a given
    excess above the least. It is long in A and thin across, so it is kept as k curves along A. Each is the best with
    its A, and around each lies an ellipse of curves whose squared error uses up what is left of the excess."""

    theta: Array  # (k, 4) the best curves with A held at values across its interval
    left: Array  # (k,) what each leaves of the excess
    inverse_JJ: Array  # (k, f, f) the shape of the ellipse, in the free parameters
    free: list[int]

    def interval(self, value: Array, gradient: Array) -> tuple[Array, Array]:
        """(low, high) of any function of a curve, from its value (k, ...) at each of these curves and its gradient
        (k, ..., f) by their free parameters: the lowest and the highest point of all ellipses."""
        variance = np.einsum("k...i,kij,k...j->k...", gradient, self.inverse_JJ, gradient)
        left = self.left.reshape(-1, *[1] * (value.ndim - 1))
        half = np.sqrt(np.maximum(left * variance, 0))
        return (value - half).min(0), (value + half).max(0)


def profile_over_A(
    x: Array, y: Array, theta: Array, least: float, excess: float, R0_free: bool
) -> tuple[dict[str, Interval], Profile]:
    """The 95 % intervals of A, B, C_mid and a free R0, by name, and the Profile behind them: the region of curves whose
    squared error is at most `excess` above `least`, which is that of the best curve theta (4,)."""
    best_A, R0, free = theta[0], theta[3], [1, 2, 3] if R0_free else [1, 2]
    log_B, log_mid, g = starting_grid(x)
    projection, norm = g @ (y - R0), (g**2).sum(1)

    def best_at(A: Array) -> tuple[Array, Array, Array]:
        gain = (A - R0)[:, None]
        i = (gain**2 * norm - 2 * gain * projection).argmin(1)  # squared error on the grid, less a constant
        start = np.stack([A, log_B[i], log_mid[i], np.full(len(A), R0)], axis=1)
        return descend(x, y, start, free, steps=12)

    # The ends of A: where the root of the excess, nearly linear in A on either side, crosses its limit. The steps are
    # those of a straight valley, then ever longer ones up to the bound of a curve that still rises (or still falls).
    straight = np.sqrt(inverse(descend(x, y, theta[None], [0, *free], steps=0)[2][0])[0, 0] * excess) + 1e-9
    bounds, ends = (R0, 1.0) if best_A > R0 else (0.0, R0), []
    for side, bound in zip((-1, 1), bounds):
        room = abs(bound - best_A)
        near = min(straight, room / 8) * np.array([0, 0.5, 0.8, 1, 1.2, 1.6, 2.3, 4])
        far = near[-1] + (room - near[-1]) * np.array([0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1])
        A = best_A + side * np.append(near, far)
        distance = np.sqrt(np.maximum(best_at(A)[1] - least, 0))
        beyond = np.flatnonzero(distance > np.sqrt(excess))[:1]  # empty: every A up to the bound is allowed
        ends += [np.interp(np.sqrt(excess), distance[i - 1 : i + 1], A[i - 1 : i + 1]) for i in beyond] or [bound]

    curves, squares, JJ = best_at(np.append(np.linspace(*ends, 14), best_A))
    profile = Profile(curves, np.maximum(least + excess - squares, 0), inverse(JJ), free)
    interval = {"A": (float(ends[0]), float(ends[1]))}
    for i, (name, scale) in enumerate([("B", np.exp), ("C_mid", np.exp), ("R0", float)][: len(free)]):
        itself = np.broadcast_to(np.eye(len(free))[i], (len(curves), len(free)))
        low, high = np.clip(profile.interval(curves[:, free[i]], itself), *(end[free[i]] for end in limits(x)))
        interval[name] = float(scale(low)), float(scale(high))
    return interval, profile
