"""curve/least_squares.py: no curve is too plain to be fitted, and every estimate lies inside its
interval."""

import numpy as np
import pytest

from curve.fit import fit_sigmoid, sigmoid

X = np.linspace(0, 600, 13)
# Shapes that fit almost exactly, or are at their end at once.
PLAIN = {
    "step": sigmoid(X, 0.5, 20, 60, 0.3),
    "saturated at once": [0.2, 0.99] + [1.0] * 11,
    "saturated at the second point": [0.2, 0.5] + [0.8] * 11,
    "fell at once": [0.8, 0.5] + [0.2] * 11,
    "a line": 0.2 + 0.0008 * X,
    "two levels": [0.2] + [0.8, 0.81] * 6,
}


def require_estimates_inside(fit, case):
    for name, (low, high) in fit.interval.items():
        assert low <= getattr(fit, name) <= high, (name, case)
    C = fit.C_max * np.array([0.5, 1, 2, 10])
    low, high = fit.band(C)
    curve = fit.predict(C)
    assert np.allclose(np.clip(curve, low, high), curve, rtol=0, atol=1e-9), case


@pytest.mark.parametrize("r0", ["first", "free"])
def test_plain_curves_are_fitted(r0):
    for shape, y in PLAIN.items():
        fit = fit_sigmoid(X, y, r0)
        assert np.abs(fit.predict(fit.x) - fit.y).max() < 0.06, shape
        require_estimates_inside(fit, shape)


def test_random_curves_are_fitted():
    """Exact, rounded and noisy ones, steep and flat, that rise or fall, over any compute: 30 of
    each kind."""
    random = np.random.default_rng(0)
    for i in range(90):
        last = 10 ** random.uniform(0, 16)
        x = np.append(0, np.geomspace(last / 100, last, random.integers(6, 50)))
        A, R0, log_B, late = random.uniform([0, 0, -1, -2.5], [1, 1, 3, 0.5])
        exact = sigmoid(x, A, np.exp(log_B), last * 10**late, R0)
        noisy = np.clip(exact + 0.02 * random.standard_normal(len(x)), 0, 1)
        y = (exact, np.round(exact, 2), noisy)[i % 3]
        if np.ptp(y[1:]) > 0:
            require_estimates_inside(fit_sigmoid(x, y), i)
            # No curve is nearer to the points, so the true one is not either.
            assert fit_sigmoid(x, y, "free").squares <= np.square(y - exact).sum() + 1e-9, i


def test_a_first_point_off_the_curve_does_not_give_R0():
    """R0 was reported as .4156, with an interval that began above it."""
    x = np.append(0, np.geomspace(1, 600, 40))
    y = sigmoid(x, 0.8, 1.8, 100, 0.5) + 0.005 * np.random.default_rng(0).standard_normal(41)
    y[0] = 0.4156
    fit = fit_sigmoid(x, y)
    assert fit.R0 == pytest.approx(0.5, abs=0.01)
    assert fit.interval["R0"][0] > 0.4156
    assert not fit.warnings
