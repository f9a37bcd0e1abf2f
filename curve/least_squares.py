"""The numerics under curve/fit.py: the sigmoid and the power law of least squares.

Here a sigmoid is theta = (A, log B, log C_mid, R0). The logarithms keep B and C_mid positive, and
give all four about the same size. The compute `x` increases, and only its first value may be 0.

Dimensions: n points of a run, m values of compute, k curves.
"""

import numpy as np

Array = np.ndarray

B_RANGE = 0.05, 30.0


def curve_and_gradient(C: Array, theta) -> tuple[Array, Array]:
    """The curve theta (4,) at compute C (m,), and its derivatives by theta (m, 4). Another form of
    curve is written here, and nowhere else (sec. 2.1, A.4)."""
    A, log_B, log_mid, R0 = theta
    with np.errstate(divide="ignore", over="ignore"):
        log_C = np.maximum(np.log(C), -1e4)  # compute 0 is far to the left: every curve is at R0
        z = np.exp(log_B) * (log_C - log_mid)
        part = 1 / (1 + np.exp(-z))  # of the gain from R0 to A: 1 / (1 + (C_mid / C)^B)
    slope = (A - R0) * part * (1 - part)  # dR / dz
    gradient = np.stack([part, slope * z, -slope * np.exp(log_B), 1 - part], -1)
    return R0 + (A - R0) * part, gradient


def limits(x: Array) -> Array:
    """Lowest and highest theta, (2, 4): C_mid from 1/20 of the first to 1000 times the last
    compute."""
    first, last = x[x > 0][[0, -1]]
    ranges = (0, 1), np.log(B_RANGE), np.log([first / 20, last * 1000]), (0, 1)
    return np.transpose(ranges)


def best_of_grid(x: Array, y: Array, held: dict[int, float]) -> Array:
    """A curve theta (4,) near the one of least squares. With B and C_mid held, a curve is linear in
    A and R0, and the best of these have a closed form. So a grid over B and C_mid finds the right
    valley."""
    first, last = np.log(x[x > 0][[0, -1]])
    grid = np.meshgrid(np.linspace(-1.9, 2.7, 18), np.linspace(first - 1, last + 4, 28))
    log_B, log_mid = np.reshape(grid, (2, -1, 1))
    part, _ = curve_and_gradient(x, (1.0, log_B, log_mid, 0.0))
    J = np.stack([part, 1 - part], 1)  # (k, 2, n): the derivatives by A and R0
    # What is held is drawn to its value by a strong spring.
    springs = np.array([1e9 if column in held else 1e-12 for column in (0, 3)])
    values = np.array([held.get(column, 0.0) for column in (0, 3)])
    pull = (J @ y + springs * values)[:, :, None]
    heights = np.linalg.solve(J @ J.swapaxes(1, 2) + np.diag(springs), pull).clip(0, 1)
    best = np.square((J * heights).sum(1) - y).sum(1).argmin()
    A, R0 = heights[best, :, 0]
    return np.array([A, log_B[best, 0], log_mid[best, 0], R0])


def least_squares(x: Array, y: Array, held: dict[int, float], start=None) -> tuple[Array, float]:
    """The curve theta (4,) of least squares through y (n,) at compute x (n,), and its squared error
    (A.4). held: columns of theta with their values. start: a curve nearby, if one is known."""
    from scipy import optimize  # here, since its import takes as long as all others

    theta = best_of_grid(x, y, held) if start is None else np.array(start)
    for column, value in held.items():
        theta[column] = value
    free = [column for column in range(4) if column not in held]
    low, high = limits(x)[:, free]

    def at(values):
        theta[free] = values
        return curve_and_gradient(x, theta)

    found = optimize.least_squares(
        lambda values: at(values)[0] - y,
        np.clip(theta[free], low, high),
        lambda values: at(values)[1][:, free],
        (low, high),
        x_scale="jac",
        **dict.fromkeys(("ftol", "xtol", "gtol"), 1e-12),
    )
    theta[free] = found.x
    return theta, 2 * found.cost


def fit_power_law(x: Array, y: Array) -> tuple[float, float, float]:
    """(A, D, B) of the power law of least squares with A <= 1; x (n,) > 0. For each B it is a line:
    B is searched."""
    from scipy import optimize

    scale = x[-1]

    def line(log_B):
        z = (x / scale) ** -np.exp(log_B)
        slope, A = np.polyfit(z, y, 1)
        if A > 1:  # a line that would end above 1 ends at 1
            A, slope = 1, z @ (y - 1) / (z @ z)
        return A, slope, np.square(A + slope * z - y).sum()

    found = optimize.minimize_scalar(
        lambda log_B: line(log_B)[2], bounds=np.log([1e-3, 10]), method="bounded"
    )
    A, slope, _ = line(found.x)
    B = np.exp(found.x)
    return A, -slope * scale**B, B
