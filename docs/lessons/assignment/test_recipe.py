"""The tests of your ten functions: python -m pytest docs/lessons/assignment

Each calls one function with random arguments, and compares what it returns with what ours returns.
Most of ours are in loss.py. `RECIPE=FILE` names another file than recipe.py beside the folder of
the repository.
"""

import os
import random
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import loss
from curve.fit import fit_sigmoid, sigmoid

BESIDE = Path(__file__).parents[4] / "recipe.py"


@pytest.fixture(scope="session")
def recipe():
    """Your functions, by name."""
    return SimpleNamespace(**runpy.run_path(os.environ.get("RECIPE", BESIDE)))


class Ours:
    """The ten functions by ours, with the arguments of the stubs."""

    zero_variance = staticmethod(loss.zero_variance)
    token_weights = staticmethod(loss.token_weights)

    def advantages(rewards_PG, counted_PG, norm):
        return loss.advantages(rewards_PG, counted_PG, counted_PG, norm)

    def cispo(logprobs_BT, generator_BT, sampled_BT, advantages_B, eps_max):
        given = logprobs_BT, generator_BT, sampled_BT, advantages_B
        return loss.token_terms(loss.Recipe(loss="cispo", eps_max=eps_max), *given)[0]

    def clipped(logprobs_BT, generator_BT, sampled_BT, advantages_B, low, high):
        given = logprobs_BT, generator_BT, sampled_BT, advantages_B
        return loss.token_terms(loss.Recipe(loss="dapo", eps_low=low, eps_high=high), *given)[0]

    def sequence_ratio(logprobs_BT, generator_BT, sampled_BT):
        log_rho_BT = torch.where(sampled_BT, logprobs_BT - generator_BT, 0.0)
        return loss.sequence_log_ratios(log_rho_BT, sampled_BT)[:, 0].exp()

    def interrupt_or_truncate(*given):
        arrays = map(np.array, given)
        return tuple(map(bool, loss.interrupt_or_truncate("interruption", *arrays)))

    def choose_batch(done, unfinished, version, k, prompts):
        return loss.choose_batch(done, unfinished, version, f"pipeline-{k}", prompts)

    def sample_in_flight(newest, sample, prompt, end, budget):
        tokens, logprobs, versions = [], [], []
        while len(tokens) < budget and end not in tokens:
            version, parameters = newest()
            token, logprob = sample(parameters, prompt + tokens)
            tokens.append(token)
            logprobs.append(logprob)
            versions.append(version)
        return tokens, logprobs, versions

    def fit_sigmoid(compute_n, pass_rate_n):
        fit = fit_sigmoid(compute_n, pass_rate_n)
        return fit.A, fit.B, fit.C_mid


def draws(number: int) -> Iterator[random.Random]:
    """Random numbers, which are the same at each call of a test."""
    for seed in range(number):
        torch.manual_seed(seed)
        yield random.Random(seed)


def agree(ours: Tensor, yours: Tensor) -> None:
    """The same values, up to rounding, with the same shape and type."""
    assert_close(yours, ours, rtol=1e-4, atol=1e-6)


# --- Which completions count, and how much --------------------------------------------------------


def random_batch(draw: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, lengths and usable completions [P, G]. Many groups have no variance, and some have
    no usable completion."""
    P, G = draw.randint(1, 5), draw.randint(2, 8)
    pass_rate_P = torch.tensor(draw.choices([0.0, 0.5, 0.8, 1.0], k=P))
    ended_P = torch.tensor(draw.choices([0.0, 0.7, 1.0], [1, 3, 3], k=P))
    right_PG = torch.rand(P, G) < pass_rate_P[:, None]
    usable_PG = torch.rand(P, G) < ended_P[:, None]
    late_PG = draw.choice([0.0, 0.3]) * torch.rand(P, G)
    rewards_PG = torch.where(right_PG, 1 - late_PG, -1.0)
    return rewards_PG, torch.randint(1, 60, (P, G)), usable_PG


def test_zero_variance(recipe):
    for draw in draws(40):
        rewards_PG, _, usable_PG = random_batch(draw)
        equal_PG = torch.rand(9, 1).expand(9, draw.randint(2, 16))
        for given in ((rewards_PG, usable_PG), (equal_PG, torch.ones_like(equal_PG).bool())):
            agree(Ours.zero_variance(*given), recipe.zero_variance(*given))


def test_advantages(recipe):
    for draw in draws(40):
        rewards_PG, _, usable_PG = random_batch(draw)
        counted_PG = usable_PG & ~loss.zero_variance(rewards_PG, usable_PG)[:, None]
        for norm in ("none", "prompt", "batch"):
            given = rewards_PG, counted_PG, norm
            agree(Ours.advantages(*given), recipe.advantages(*given))


def test_token_weights(recipe):
    for draw in draws(40):
        _, lengths_PG, counted_PG = random_batch(draw)
        for aggregation in ("sample", "prompt", "token"):
            given = lengths_PG, counted_PG, aggregation
            agree(Ours.token_weights(*given), recipe.token_weights(*given))


# --- Losses ---------------------------------------------------------------------------------------


def random_tokens(draw: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """log pi_train, log pi_gen and the sampled tokens [B, T]. At a forced token log pi_gen is 0."""
    shape = draw.randint(1, 4), draw.randint(2, 9)
    logprobs_BT = -3 * torch.rand(shape)
    log_rho_BT = draw.choice([0.0, 0.3, 2.0]) * torch.randn(shape)
    sampled_BT = torch.rand(shape) < 0.8
    return logprobs_BT, torch.where(sampled_BT, logprobs_BT - log_rho_BT, 0.0), sampled_BT


def agree_in_gradients(ours: Callable, yours: Callable, logprobs_BT: Tensor, *given) -> None:
    """The same values, and the same gradients of their sum by log pi_train."""
    found = []
    for function in (ours, yours):
        at_BT = logprobs_BT.clone().requires_grad_()
        value = function(at_BT, *given)
        value.sum().backward()
        found.append((value.detach(), at_BT.grad))
    for of_ours, of_yours in zip(*found):
        agree(of_ours, of_yours)


def test_cispo(recipe):
    for draw in draws(40):
        tokens = random_tokens(draw)
        advantages_B, eps_max = torch.randn(len(tokens[0])), draw.choice([2.0, 4.0, 8.0])
        agree_in_gradients(Ours.cispo, recipe.cispo, *tokens, advantages_B, eps_max)


def test_clipped(recipe):
    """With every second draw all ratios are infinite in float32, and A > 0."""
    for number, draw in enumerate(draws(80)):
        logprobs_BT, generator_BT, sampled_BT = random_tokens(draw)
        advantages_B = torch.randn(len(logprobs_BT))
        if number % 2:
            generator_BT, advantages_B = logprobs_BT - 200, advantages_B.abs()
        bounds = draw.uniform(0.1, 0.3), draw.uniform(0.3, 0.5)
        given = logprobs_BT, generator_BT, sampled_BT, advantages_B, *bounds
        agree_in_gradients(Ours.clipped, recipe.clipped, *given)


def test_sequence_ratio(recipe):
    for draw in draws(40):
        agree_in_gradients(Ours.sequence_ratio, recipe.sequence_ratio, *random_tokens(draw))


# --- Generators -----------------------------------------------------------------------------------


def test_interrupt_or_truncate(recipe):
    for draw in draws(400):
        sampled = draw.randint(1, 18)
        closed_at = draw.choice([-1, draw.randint(1, sampled)])
        given = sampled, closed_at, draw.randint(1, 12), draw.randint(1, 6)
        assert recipe.interrupt_or_truncate(*given) == Ours.interrupt_or_truncate(*given), given


def test_choose_batch(recipe):
    for draw in draws(400):
        version, k, prompts = draw.randint(8, 20), draw.randint(0, 6), draw.randint(1, 4)
        # More young groups than old ones.
        ages = [min(draw.randint(0, k), draw.randint(0, k)) for _ in range(k + 4)]
        under_way = [version - age for age in ages]
        finished = draw.randint(0, len(under_way))
        given = under_way[:finished], under_way[finished:], version, k, prompts
        assert recipe.choose_batch(*given) == Ours.choose_batch(*given), given


def newest_of(versions: list[int]) -> Callable:
    """newest(), which returns these versions, one at a call, and then 100. The parameters are the
    version."""
    later = iter(versions)

    def newest():
        version = next(later, 100)
        return version, version

    return newest


def test_sample_in_flight(recipe):
    """The token after n tokens is 10 x version + n, and its log-probability is -version."""

    def sample(version, tokens):
        return 10 * version + len(tokens), -float(version)

    for draw in draws(40):
        length = draw.randint(1, 9)
        versions = sorted(draw.choices(range(3, 12), k=length))
        end = 10 * versions[-1] + 2 + length - 1  # the last token
        for given in (([1, 2], end, 10), ([1, 2], -1, length)):  # by the end, by the budget
            newest = newest_of([*versions, 99])
            yours = recipe.sample_in_flight(newest, sample, *given)
            assert tuple(yours) == Ours.sample_in_flight(newest_of(versions), sample, *given)
            assert newest() == (99, 99), "newest() was not called once for each token"


# --- The curve of a run ---------------------------------------------------------------------------


def test_fit_sigmoid(recipe):
    """Simulated runs with noise. If the true A is 1.1, the best A is 1."""
    for draw in draws(12):
        last = 10 ** draw.uniform(9, 21)
        true = (
            draw.choice([0.6, 0.8, 0.95, 1.1]),
            draw.uniform(1.2, 2),
            last * draw.uniform(0.3, 0.5),
        )
        compute_n = np.linspace(0, last, draw.randint(12, 25))
        exact_n = sigmoid(compute_n, *true, draw.uniform(0, 0.2))
        pass_rate_n = np.clip(exact_n + [draw.gauss(0, 0.01) for _ in compute_n], 0, 1)
        squares = []
        for A, B, C_mid in (found.fit_sigmoid(compute_n, pass_rate_n) for found in (Ours, recipe)):
            assert -1e-6 <= A <= 1 + 1e-6 and B > 0 and C_mid > 0
            residuals = sigmoid(compute_n[1:], A, B, C_mid, pass_rate_n[0]) - pass_rate_n[1:]
            squares.append(np.square(residuals).sum())
        assert squares[1] <= 1.02 * squares[0] + 1e-6
