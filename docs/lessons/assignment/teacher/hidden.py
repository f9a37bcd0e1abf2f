"""The hidden cases: drawn at random, and compared with loss.py and curve/.

SEED=a-word HAND_IN=FILE python -m pytest docs/lessons/assignment/teacher/hidden.py
"""

import os
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import loss
from curve.fit import sigmoid
from docs.lessons.assignment import cases, grader
from docs.lessons.assignment.grader import Case, difference_with_gradient

EACH = 20  # random calls of each function, or more

# --- which completions count, and how much --------------------------------------------------------


def random_batch(draw: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, lengths and usable completions [P, G]. Many groups have no variance, and some have
    no usable completion."""
    torch.manual_seed(draw.getrandbits(32))
    P = draw.randint(1, 5)
    G = draw.randint(2, 8)
    pass_rate_P = torch.tensor(draw.choices([0.0, 0.5, 0.8, 1.0], k=P))
    ended_P = torch.tensor(draw.choices([0.0, 0.7, 1.0], [1, 3, 3], k=P))
    right_PG = torch.rand(P, G) < pass_rate_P[:, None]
    usable_PG = torch.rand(P, G) < ended_P[:, None]
    penalty_PG = draw.choice([0.0, 0.3]) * torch.rand(P, G)
    rewards_PG = torch.where(right_PG, 1 - penalty_PG, -1.0)
    lengths_PG = torch.randint(1, 60, (P, G))
    return rewards_PG, lengths_PG, usable_PG


def zero_variance(draw: random.Random) -> Iterator[Case]:
    for _ in range(EACH):
        rewards_PG, _, usable_PG = random_batch(draw)
        given = {"rewards_PG": rewards_PG, "usable_PG": usable_PG}
        yield Case("random", given, loss.zero_variance(rewards_PG, usable_PG))
    for size in (3, 6, 7, 8, 16):
        rewards_PG = torch.rand(10, 1).expand(10, size)
        usable_PG = torch.ones(10, size).bool()
        given = {"rewards_PG": rewards_PG, "usable_PG": usable_PG}
        yield Case(f"{size} equal rewards", given, torch.ones(10).bool())


def advantages(draw: random.Random) -> Iterator[Case]:
    for _ in range(EACH):
        rewards_PG, _, usable_PG = random_batch(draw)
        counted_PG = loss.counted_samples(rewards_PG, usable_PG, zero_variance_filter=True)
        given = {"rewards_PG": rewards_PG, "counted_PG": counted_PG}
        for norm in ("none", "prompt", "batch"):
            expected_PG = loss.advantages(rewards_PG, usable_PG, counted_PG, norm)
            yield Case("random", given | {"norm": norm}, expected_PG)


def token_weights(draw: random.Random) -> Iterator[Case]:
    for _ in range(EACH):
        _, lengths_PG, counted_PG = random_batch(draw)
        given = {"lengths_PG": lengths_PG, "counted_PG": counted_PG}
        for name in ("sample", "prompt", "token"):
            expected_PG = loss.token_weights(lengths_PG, counted_PG, name)
            yield Case("random", given | {"aggregation": name}, expected_PG)


# --- losses ---------------------------------------------------------------------------------------


def random_tokens(draw: random.Random) -> dict[str, Tensor]:
    """The first three arguments of a loss. At a forced token log pi_gen is 0."""
    torch.manual_seed(draw.getrandbits(32))
    shape = draw.randint(1, 4), draw.randint(2, 9)
    logprobs_BT = -3 * torch.rand(shape)
    log_rho_BT = draw.choice([0.0, 0.3, 2.0]) * torch.randn(shape)
    sampled_BT = torch.rand(shape) < 0.8
    generator_BT = torch.where(sampled_BT, logprobs_BT - log_rho_BT, 0.0)
    names = "logprobs_BT", "generator_logprobs_BT", "sampled_BT"
    return dict(zip(names, (logprobs_BT, generator_BT, sampled_BT)))


def with_gradient(function: Callable, arguments: dict) -> Case:
    """A case that must have the value and the gradient of this function."""
    at_BT = arguments["logprobs_BT"].clone().requires_grad_()
    value = function(**arguments | {"logprobs_BT": at_BT})
    value.sum().backward()
    expected = value.detach(), at_BT.grad
    return Case("random", arguments, expected, "logprobs_BT", difference_with_gradient)


def terms(name: str) -> Callable:
    """The terms of the loss of this name, as a function with the arguments of a stub."""

    def of_loss(
        logprobs_BT, generator_logprobs_BT, sampled_BT, advantages_B, **constants: float
    ) -> Tensor:
        recipe = loss.Recipe(loss=name, **constants)
        given = logprobs_BT, generator_logprobs_BT, sampled_BT, advantages_B
        return loss.token_terms(recipe, *given)[0]

    return of_loss


def cispo(draw: random.Random) -> Iterator[Case]:
    for _ in range(EACH):
        given = random_tokens(draw)
        given["advantages_B"] = torch.randn(len(given["sampled_BT"]))
        given["eps_max"] = draw.choice([2.0, 4.0, 8.0])
        yield with_gradient(terms("cispo"), given)


def clipped(draw: random.Random) -> Iterator[Case]:
    for _ in range(EACH):
        given = random_tokens(draw)
        given["advantages_B"] = torch.randn(len(given["sampled_BT"]))
        given["eps_low"] = draw.uniform(0.1, 0.3)
        given["eps_high"] = draw.uniform(0.1, 0.4)
        yield with_gradient(terms("dapo"), given)
        # The same, but all ratios are infinite in float32, and A > 0.
        generator_BT = given["logprobs_BT"] - 200
        advantages_B = given["advantages_B"].abs()
        infinite = {"generator_logprobs_BT": generator_BT, "advantages_B": advantages_B}
        yield with_gradient(terms("dapo"), given | infinite)


def sequence_ratio(draw: random.Random) -> Iterator[Case]:
    def of_gspo(logprobs_BT, generator_logprobs_BT, sampled_BT) -> Tensor:
        log_rho_BT = torch.where(sampled_BT, logprobs_BT - generator_logprobs_BT, 0.0)
        return loss.sequence_log_ratios(log_rho_BT, sampled_BT)[:, 0].exp()

    for _ in range(EACH):
        yield with_gradient(of_gspo, random_tokens(draw))


# --- generators -----------------------------------------------------------------------------------


def interrupt_or_truncate(draw: random.Random) -> Iterator[Case]:
    for _ in range(5 * EACH):
        sampled = draw.randint(1, 18)
        given = {
            "sampled": sampled,
            "closed_at": draw.choice([-1, draw.randint(1, sampled)]),
            "thinking_budget": draw.randint(1, 12),
            "answer_budget": draw.randint(1, 6),
        }
        arrays = map(np.array, given.values())
        expected = loss.interrupt_or_truncate("interruption", *arrays)
        yield Case("random", given, tuple(map(bool, expected)))


def choose_batch(draw: random.Random) -> Iterator[Case]:
    for _ in range(10 * EACH):
        version = draw.randint(8, 20)
        k = draw.randint(0, 6)
        prompts = draw.randint(1, 4)
        # More young groups than old ones.
        ages = [min(draw.randint(0, k), draw.randint(0, k)) for _ in range(k + 4)]
        under_way = [version - age for age in ages]
        finished = draw.randint(0, len(under_way))
        done, unfinished = under_way[:finished], under_way[finished:]
        expected = loss.choose_batch(done, unfinished, version, f"pipeline-{k}", prompts)
        others = {"version": version, "k": k, "prompts": prompts}
        yield cases.batch("random", done, unfinished, expected, **others)


def sample_in_flight(draw: random.Random) -> Iterator[Case]:
    for _ in range(EACH):
        budget = draw.randint(1, 9)
        length = draw.randint(1, budget)
        updates = sorted(draw.choices(range(3, 12), k=9))
        # Without a token that ends it, the completion has the whole budget.
        yield cases.in_flight("random", updates, updates[:budget], budget)
        ends_at = 2 + length - 1
        yield cases.in_flight("random", updates, updates[:length], budget, ends_at)


# --- the curve of a run ---------------------------------------------------------------------------


def fit_sigmoid(draw: random.Random) -> Iterator[Case]:
    """Simulated runs with noise, and two published ones. If A is 1.1, the best A is 1."""
    for number in range(EACH):
        A = 1.1 if number % 4 == 0 else draw.uniform(0.5, 1)
        last = 10 ** draw.uniform(9, 21)
        C_mid = last * draw.uniform(0.3, 0.5)
        compute_n = np.linspace(0, last, draw.randint(12, 25))
        exact_n = sigmoid(compute_n, A, draw.uniform(1.2, 2), C_mid, draw.uniform(0, 0.2))
        noise_n = np.array([draw.gauss(0, 0.01) for _ in compute_n])
        yield cases.curve("simulated", compute_n, np.clip(exact_n + noise_n, 0, 1))
    for run in ("thinking-46-seed1", "thinking-36-seed0"):
        yield cases.curve(run, *cases.published(run))


# --- grading --------------------------------------------------------------------------------------

DRAWN_BY = {
    "zero_variance": zero_variance,
    "advantages": advantages,
    "token_weights": token_weights,
    "cispo": cispo,
    "clipped": clipped,
    "sequence_ratio": sequence_ratio,
    "interrupt_or_truncate": interrupt_or_truncate,
    "choose_batch": choose_batch,
    "sample_in_flight": sample_in_flight,
    "fit_sigmoid": fit_sigmoid,
}


def hidden_cases(seed: str) -> dict[str, list[Case]]:
    """The cases of each function. Another seed draws others."""
    return {name: [*function(random.Random(seed))] for name, function in DRAWN_BY.items()}


@pytest.fixture(scope="session")
def verdicts(hand_in, chosen):
    hidden = hidden_cases(os.environ.get("SEED", ""))
    return grader.grade([hand_in], {name: hidden[name] for name in chosen})[0]


@pytest.mark.parametrize("name", grader.POINTS)
def test_hidden_points(name, verdicts, give_points):
    give_points(name, verdicts[name])
