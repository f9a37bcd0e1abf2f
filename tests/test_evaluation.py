"""pass@k and its interval."""

from itertools import combinations

import numpy as np
import pytest

from machinery.evaluation import pass_at_k


def test_pass_at_k_is_the_mean_over_all_choices_of_k_completions():
    graded_PN = np.random.default_rng(0).random((20, 7))
    for scores_PN in (graded_PN < np.linspace(0, 1, 20)[:, None], graded_PN):
        for k in range(1, 8):
            by_hand = np.mean(
                [
                    [row[list(chosen)].max() for chosen in combinations(range(7), k)]
                    for row in scores_PN
                ]
            )
            assert pass_at_k(scores_PN, k)[0] == pytest.approx(by_hand)
        assert pass_at_k(scores_PN, 1)[0] == pytest.approx(scores_PN.mean()), "pass@1 is mean@N"


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Problems of Beta(a, b) difficulty, 16 completions each; the truth for k is 1 - E (1 -
    p)^k."""
    for problems, a, b in ((30, 1, 1), (200, 0.2, 0.6), (30, 0.05, 2), (200, 2, 0.05)):
        rng, runs, k = np.random.default_rng(0), 1000, 4
        truth = 1 - np.mean((1 - rng.beta(a, b, 10**6)) ** k)
        held = 0
        for _ in range(runs):
            p_P = rng.beta(a, b, problems)
            _, low, high = pass_at_k(rng.random((problems, 16)) < p_P[:, None], k)
            held += low <= truth <= high
        assert 0.935 <= held / runs <= 0.995, (problems, a, b)


def test_the_interval_has_a_width_where_all_problems_are_alike():
    for shape, mean in (((30, 8), 0.0), ((30, 8), 1.0), ((1, 1), 1.0)):
        value, low, high = pass_at_k(np.full(shape, mean == 1), 1)
        assert value == mean and 0 <= low <= mean <= high <= 1 and high - low > 0.05
    few, many = (pass_at_k(np.tile([True, False], (problems, 4)), 1) for problems in (10, 1000))
    assert few[0] == many[0] == 0.5 and few[2] - few[1] > 0.2 > 0.01 > many[2] - many[1] > 0
