"""Simulated runs for the tests of curve/."""

import numpy as np

from curve.fit import fit_sigmoid, sigmoid


def run_of(
    A=0.7, B=1.8, C_mid=100.0, R0=0.2, n=41, last=600.0, noise=0.01, seed=0, correlation=0.0,
    fall=(np.inf, 0.0),
):  # fmt: skip
    """A run: x (n,) from 0, y (n,) with AR(1) noise of this standard deviation. seed: a number or a
    Generator. fall: the compute at which it falls, and to which pass rate."""
    random = np.random.default_rng(seed)
    x = np.linspace(0, last, n)
    shocks = random.standard_normal(n)
    for i in range(1, n):
        shocks[i] = correlation * shocks[i - 1] + np.sqrt(1 - correlation**2) * shocks[i]
    y = sigmoid(x, A, B, C_mid, R0) + noise * shocks
    after, low = fall
    return x, np.clip(np.where(x > after, low, y), 0, 1)


def curve(text):
    """What a cell of a table says of a run, such as A=0.9, n=61."""
    return eval(f"dict({text})")


def fit_of(**curve):
    return fit_sigmoid(*run_of(**curve))
