"""pass@k and its interval."""

from itertools import combinations

import numpy as np
import pytest

from core.rollouts import given_rollout
from data.load import Source
from data.verify import Verdict
from machinery.evaluation import evaluation_figures, pass_at_k, report_evaluation


def test_pass_at_k_is_the_mean_over_all_choices_of_k_completions():
    """Of scores of 0, in between, and of 1."""
    scores_PN = np.random.default_rng(0).uniform(-1, 2, (20, 7)).clip(0, 1)
    for k in range(1, 8):
        choices = [combinations(scores_N, k) for scores_N in scores_PN.tolist()]
        by_hand = np.mean([[*map(max, of_problem)] for of_problem in choices])
        assert pass_at_k(scores_PN, k)[0] == pytest.approx(by_hand)


@pytest.mark.parametrize(
    "problems, a, b", [(30, 1, 1), (200, 0.2, 0.6), (30, 0.05, 2), (200, 2, 0.05)]
)
def test_the_interval_holds_the_truth_as_often_as_it_says(problems, a, b):
    """Problems of Beta(a, b) difficulty, 16 completions each; the truth for k is 1 - E (1 -
    p)^k."""
    rng, runs, k, held = np.random.default_rng(0), 1000, 4, 0
    truth = 1 - np.mean((1 - rng.beta(a, b, 10**6)) ** k)
    for _ in range(runs):
        scores_PN = rng.random((problems, 16)) < rng.beta(a, b, (problems, 1))
        _, low, high = pass_at_k(scores_PN, k)
        held += low <= truth <= high
    assert 0.935 <= held / runs <= 0.995


@pytest.mark.parametrize("shape, mean", [((30, 8), 0), ((30, 8), 1), ((1, 1), 1)])
def test_the_interval_has_a_width_where_all_problems_are_alike(shape, mean):
    value, low, high = pass_at_k(np.full(shape, mean), 1)
    assert value == mean and 0 <= low <= mean <= high <= 1 and high - low > 0.05


def test_an_evaluation_of_graded_scores_has_their_mean_too(capsys):
    rollouts = [given_rollout([1], [2, 3])] * 4
    figures = evaluation_figures(rollouts, [*map(Verdict, (0.5, 0.25, 0, 0.25))], samples=2)
    assert figures["pass_rate"] == 0 and figures["score_mean"] == 0.25
    assert figures["score_mean_low"] < 0.25 < figures["score_mean_high"]
    report_evaluation(Source("words", 1.0, [], []), figures, 2)
    assert "\n  score     0.250   95 % [0." in capsys.readouterr().out
    right_or_wrong = evaluation_figures(rollouts, [*map(Verdict, (1, 0, True, False))], 4)
    assert right_or_wrong["pass@4"] == 1 and "score_mean" not in right_or_wrong
