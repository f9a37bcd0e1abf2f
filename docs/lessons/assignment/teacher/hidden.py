"""The hidden cases: drawn at random, and compared with loss.py and curve/.

SEED=a-word HAND_IN=their.py python -m pytest docs/lessons/assignment/teacher/hidden.py
"""

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

import loss
from curve.fit import sigmoid
from docs.lessons.assignment import cases, grader
from docs.lessons.assignment.grader import Case, difference_with_gradient

SEED = os.environ.get("SEED", "0")
EACH = 20  # random cases of each kind


def batch_of_verdicts(draw: random.Random) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, lengths and usable completions [P, G] of a random batch. Many groups have no
    variance, and some have no usable completion."""
    torch.manual_seed(draw.getrandbits(32))
    P, G = draw.randint(1, 5), draw.randint(2, 8)
    rates_P1 = torch.tensor(draw.choices([0.0, 0.5, 0.8, 1.0], k=P))[:, None]
    right_PG = torch.rand(P, G) < rates_P1
    penalties_PG = draw.choice([0.0, 0.3]) * torch.rand(P, G)
    rewards_PG = torch.where(right_PG, 1 - penalties_PG, -1.0)
    usable_PG = (
        torch.rand(P, G) < torch.tensor(draw.choices([0.0, 0.7, 1.0], [1, 3, 3], k=P))[:, None]
    )
    return rewards_PG, torch.randint(1, 60, (P, G)), usable_PG


def of_batches(draw: random.Random) -> dict[str, list[Case]]:
    """Cases of the functions that say which completions count, and how much."""
    found = {"zero_variance": [], "advantages": [], "token_weights": []}
    for number in range(EACH):
        rewards_PG, lengths_PG, usable_PG = batch_of_verdicts(draw)
        given = {"rewards_PG": rewards_PG, "usable_PG": usable_PG}
        without_P = loss.zero_variance(rewards_PG, usable_PG)
        found["zero_variance"].append(Case(f"random {number}", given, without_P))

        counted_PG = loss.counted_samples(rewards_PG, usable_PG, zero_variance_filter=True)
        for norm in ("none", "prompt", "batch"):
            given = {"rewards_PG": rewards_PG, "counted_PG": counted_PG, "norm": norm}
            expected_PG = loss.advantages(rewards_PG, counted_PG, counted_PG, norm)
            found["advantages"].append(Case(f"random {number}", given, expected_PG))
        for name in loss.AGGREGATIONS:
            given = {"lengths_PG": lengths_PG, "counted_PG": counted_PG, "aggregation": name}
            expected_PG = loss.token_weights(lengths_PG, counted_PG, name)
            found["token_weights"].append(Case(f"random {number}", given, expected_PG))
    for size in (3, 6, 7, 8, 16):
        rewards_PG = torch.tensor([[draw.uniform(-1, 1)] * size for _ in range(10)])
        usable_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
        given = {"rewards_PG": rewards_PG, "usable_PG": usable_PG}
        expected_P = torch.ones(10, dtype=torch.bool)
        name = f"ten groups of {size} equal rewards"
        found["zero_variance"].append(Case(name, given, expected_P))
    return found


def random_tokens(draw: random.Random) -> dict[str, torch.Tensor]:
    """The arguments of a loss that belong to tokens. At a forced token log pi_gen is 0."""
    torch.manual_seed(draw.getrandbits(32))
    B, T = draw.randint(1, 4), draw.randint(2, 9)
    logprobs_BT = -3 * torch.rand(B, T)
    log_rho_BT = draw.choice([0.0, 0.3, 2.0]) * torch.randn(B, T)
    sampled_BT = torch.rand(B, T) < 0.8
    return {
        "logprobs_BT": logprobs_BT,
        "generator_logprobs_BT": torch.where(sampled_BT, logprobs_BT - log_rho_BT, 0.0),
        "sampled_BT": sampled_BT,
    }


# The functions of the stubs, by loss.py.


def cispo(
    logprobs_BT, generator_logprobs_BT, sampled_BT, advantages_B, eps_max: float
) -> torch.Tensor:
    recipe = loss.Recipe(loss="cispo", eps_max=eps_max)
    given = generator_logprobs_BT, sampled_BT, advantages_B
    return loss.token_terms(recipe, logprobs_BT, *given)[0]


def clipped(
    logprobs_BT, generator_logprobs_BT, sampled_BT, advantages_B, eps_low: float, eps_high: float
) -> torch.Tensor:
    recipe = loss.Recipe(loss="dapo", eps_low=eps_low, eps_high=eps_high)
    given = generator_logprobs_BT, sampled_BT, advantages_B
    return loss.token_terms(recipe, logprobs_BT, *given)[0]


def sequence_ratio(logprobs_BT, generator_logprobs_BT, sampled_BT) -> torch.Tensor:
    log_rho_BT = torch.where(sampled_BT, logprobs_BT - generator_logprobs_BT, 0.0)
    return loss.sequence_log_ratios(log_rho_BT, sampled_BT)[:, 0].exp()


def with_gradient(name: str, function: Callable, arguments: dict) -> Case:
    """A case that must have the value and the gradient of this function."""
    at_BT = arguments["logprobs_BT"].clone().requires_grad_()
    value = function(**arguments | {"logprobs_BT": at_BT})
    value.sum().backward()
    expected = value.detach(), at_BT.grad
    return Case(name, arguments, expected, "logprobs_BT", difference_with_gradient)


def of_losses(draw: random.Random) -> dict[str, list[Case]]:
    """Cases of the functions of tokens."""
    found = {"cispo": [], "clipped": [], "sequence_ratio": []}
    for number in range(EACH):
        name, tokens = f"random {number}", random_tokens(draw)
        found["sequence_ratio"].append(with_gradient(name, sequence_ratio, tokens))
        tokens = tokens | {"advantages_B": torch.randn(len(tokens["sampled_BT"]))}
        cap = {"eps_max": draw.choice([2.0, 4.0, 8.0])}
        found["cispo"].append(with_gradient(name, cispo, tokens | cap))
        bounds = {"eps_low": draw.uniform(0.1, 0.3), "eps_high": draw.uniform(0.1, 0.4)}
        found["clipped"].append(with_gradient(name, clipped, tokens | bounds))
    return found


def of_generators(draw: random.Random) -> dict[str, list[Case]]:
    """Cases of the functions that a generator needs, or the trainer to know what to train."""
    found = {"interrupt_or_truncate": [], "choose_batch": [], "sample_in_flight": []}
    for _ in range(5 * EACH):
        budgets = {"thinking_budget": draw.randint(1, 12), "answer_budget": draw.randint(1, 6)}
        sampled = draw.randint(1, 18)
        closed_at = draw.choice([-1, draw.randint(1, sampled)])
        given = {"sampled": sampled, "closed_at": closed_at} | budgets
        arrays = {name: np.array(value) for name, value in given.items()}
        expected = tuple(map(bool, loss.interrupt_or_truncate("interruption", **arrays)))
        found["interrupt_or_truncate"].append(Case("random", given, expected))

        version, k, prompts = draw.randint(8, 20), draw.randint(0, 6), draw.randint(1, 4)
        under_way = [version - min(draw.randint(0, k), draw.randint(0, k)) for _ in range(k + 4)]
        cut = draw.randint(0, len(under_way))
        given = {"done": under_way[:cut], "unfinished": under_way[cut:], "version": version}
        expected = loss.choose_batch(*given.values(), f"pipeline-{k}", prompts)
        found["choose_batch"].append(Case("random", given | {"k": k, "prompts": prompts}, expected))
    for number in range(EACH):
        updates = sorted(draw.choices(range(3, 12), k=draw.randint(1, 9)))
        budget = draw.randint(1, 9)
        ends_at = draw.choice([None, 2 + draw.randint(0, budget - 1)])
        length = budget if ends_at is None else ends_at - 1
        versions = (updates + 9 * updates[-1:])[:length]
        case = cases.in_flight(f"random {number}", updates, budget, ends_at, versions)
        found["sample_in_flight"].append(case)
    return found


def of_curves(draw: random.Random) -> dict[str, list[Case]]:
    """Simulated runs with noise, and two published ones."""
    found = []
    for number in range(EACH):
        last = 10 ** draw.uniform(9, 21)
        compute_n = np.linspace(0, last, draw.randint(12, 25))
        A, B, C_mid = draw.uniform(0.5, 1), draw.uniform(1.2, 3), last * draw.uniform(0.1, 0.4)
        exact_n = sigmoid(compute_n, A, B, C_mid, draw.uniform(0, 0.2))
        noise_n = [draw.gauss(0, 0.01) for _ in compute_n]
        pass_rate_n = np.clip(exact_n + noise_n, 0, 1)
        found.append(cases.curve(f"simulated {number}", compute_n, pass_rate_n))
    for run in ("thinking-46-seed1", "thinking-36-seed0"):
        found.append(cases.curve(run, *cases.published(run)))
    return {"fit_sigmoid": found}


def hidden_cases(seed: str) -> dict[str, list[Case]]:
    """The cases of each function. Another seed draws others."""
    draw = random.Random(seed)
    return of_batches(draw) | of_losses(draw) | of_generators(draw) | of_curves(draw)


@pytest.fixture(scope="session")
def verdicts(hand_in, chosen):
    hidden = hidden_cases(SEED)
    return grader.grade([hand_in], {name: hidden[name] for name in chosen})[0]


@pytest.mark.parametrize("name", grader.POINTS)
def test_hidden_points(name, verdicts, give_points):
    give_points(name, verdicts[name])
