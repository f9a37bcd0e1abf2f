"""Figures of an evaluation: mean@N and pass@k of the completions of held-out problems, with their intervals."""

import math

import numpy as np

Z = 1.959964  # of the normal distribution, for 95 %


def pass_at_k(scores_PN: np.ndarray, k: int) -> tuple[float, float, float]:
    """The chance that at least one of k completions of a problem is correct, and its 95 % interval.

    scores_PN: N completions of each of P problems, 1 where correct and 0 where not; a truncated completion, or one
    without a verdict, has 0. Of each problem the unbiased estimate 1 - C(N - c, k) / C(N, k) with c correct ones (Chen
    et al. 2021, arXiv 2107.03374), written as the mean of the best score over all choices of k, which is that where
    scores lie between; pass@1 is mean@N. The interval is over problems, as if they were drawn at random: Wilson's, for
    the number of trials that the scatter between problems is worth, counted with one problem more that failed and one
    that was solved. It stays within [0, 1]. Raises ValueError for k above N, and for nothing to judge.
    """
    problems, samples = scores_PN.shape
    if problems == 0 or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} wants at least one problem and {k} completions of each, not {problems} x {samples}")
    best_N = [math.comb(i, k - 1) / math.comb(samples, k) for i in range(samples)]  # share of choices whose best is i
    value_P = np.sort(scores_PN, axis=1) @ best_N
    mean = float(value_P.mean())
    with_two_P = np.append(value_P, [0.0, 1.0])  # so that there is a scatter where all problems are alike
    trials = problems * with_two_P.mean() * (1 - with_two_P.mean()) / with_two_P.var(ddof=1)
    middle = (mean + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z * math.sqrt(mean * (1 - mean) / trials + Z**2 / (4 * trials**2)) / (1 + Z**2 / trials)
    return mean, max(0.0, float(middle - half)), min(1.0, float(middle + half))
