"""The open cases: each is computed by hand, and a student may read all of them. The cases of
teacher/hidden.py are drawn at random, and compared with loss.py."""

import math
from pathlib import Path

import numpy as np
import torch

from curve.fit import sigmoid
from curve.least_squares import variable_projection
from curve.logs import read_log
from docs.lessons.assignment.grader import Case, difference_with_gradient

ROOT = Path(__file__).parents[3]


def floats(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def bools(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def ints(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


# --- which completions count, and how much --------------------------------------------------------


def groups(name, rewards_PG, usable_PG, expected_P) -> Case:
    arguments = {"rewards_PG": rewards_PG, "usable_PG": usable_PG}
    return Case(name, arguments, torch.tensor(expected_P, dtype=torch.bool))


ZERO_VARIANCE = [
    groups(
        "all right, some right, all wrong",
        floats([1, 1, 1], [1, -1, 1], [-1, -1, -1]),
        bools([1, 1, 1], [1, 1, 1], [1, 1, 1]),
        [1, 0, 1],
    ),
    groups(
        "the completion that differs is truncated",
        floats([1, -1, 1], [1, -1, -1]),
        bools([1, 0, 1], [1, 1, 0]),
        [1, 0],
    ),
    groups("all completions are truncated", floats([1, -1]), bools([0, 0]), [1]),
    groups(
        "rewards that a float cannot hold exactly",
        floats([0.7] * 7, [0.7] * 6 + [0.7001]),
        bools([1] * 7, [1] * 7),
        [1, 0],
    ),
]


def advantage(name, norm, rewards_PG, counted_PG, expected_PG) -> Case:
    arguments = {"rewards_PG": rewards_PG, "counted_PG": counted_PG, "norm": norm}
    return Case(name, arguments, expected_PG)


# The batch of lesson 2. Its centred rewards are -.5, -.5, 1.5, -.5 and 1, -1, -1, 1: the sum of
# their squares is 3 + 4.
LESSON_2 = floats([-1, -1, 1, -1], [1, -1, -1, 1])
CENTRED = floats([-0.5, -0.5, 1.5, -0.5], [1, -1, -1, 1])
# The same, but the last completion of the first group is truncated, and a third group is filtered
# out. The centred rewards of the first group are -2/3, -2/3 and 4/3: the sum of their squares is
# 24/9.
WITH_TRUNCATED = floats([-1, -1, 1, 1], [1, -1, -1, 1], [1, 1, 1, 1])
COUNTED = bools([1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0])
CENTRED_3 = floats([-2 / 3, -2 / 3, 4 / 3, 0], [1, -1, -1, 1], [0, 0, 0, 0])

ADVANTAGES = [
    advantage("lesson 2", "none", LESSON_2, LESSON_2 < 2, CENTRED),
    advantage(
        "lesson 2", "prompt", LESSON_2, LESSON_2 < 2,
        CENTRED / floats([math.sqrt(3 / 4)], [1]),
    ),
    advantage("lesson 2", "batch", LESSON_2, LESSON_2 < 2, CENTRED / math.sqrt(7 / 8)),
    advantage("not all are counted", "none", WITH_TRUNCATED, COUNTED, CENTRED_3),
    advantage(
        "not all are counted", "prompt", WITH_TRUNCATED, COUNTED,
        CENTRED_3 / floats([math.sqrt(24 / 9 / 3)], [1], [1]),
    ),
    advantage(
        "not all are counted", "batch", WITH_TRUNCATED, COUNTED,
        CENTRED_3 / math.sqrt((24 / 9 + 4) / 7),
    ),
    *[
        advantage("none is counted", norm, LESSON_2, LESSON_2 > 2, 0 * LESSON_2)
        for norm in ("none", "prompt", "batch")
    ],
]  # fmt: skip


def weights(name, lengths_PG, counted_PG, **expected) -> list[Case]:
    arguments = {"lengths_PG": lengths_PG, "counted_PG": counted_PG}
    return [
        Case(name, arguments | {"aggregation": aggregation}, expected_PG)
        for aggregation, expected_PG in expected.items()
    ]


TOKEN_WEIGHTS = [
    *weights(
        "all are counted",
        ints([10, 40], [20, 10]),
        bools([1, 1], [1, 1]),
        sample=1 / floats([4 * 10, 4 * 40], [4 * 20, 4 * 10]),
        prompt=1 / floats([2 * 50, 2 * 50], [2 * 30, 2 * 30]),
        token=1 / floats([80, 80], [80, 80]),
    ),
    *weights(
        "one completion is not counted",
        ints([10, 40, 50], [20, 10, 5]),
        bools([1, 1, 0], [1, 1, 1]),
        sample=bools([1, 1, 0], [1, 1, 1]) / floats([50, 200, 1], [100, 50, 25]),
        prompt=bools([1, 1, 0], [1, 1, 1]) / floats([100, 100, 1], [70, 70, 70]),
        token=bools([1, 1, 0], [1, 1, 1]) / floats([85, 85, 1], [85, 85, 85]),
    ),
    *weights(
        "a group is filtered out",
        ints([10, 40], [20, 10]),
        bools([1, 1], [0, 0]),
        sample=floats([1 / 20, 1 / 80], [0, 0]),
        prompt=floats([1 / 50, 1 / 50], [0, 0]),
        token=floats([1 / 50, 1 / 50], [0, 0]),
    ),
    *weights(
        "none is counted",
        ints([10, 40]),
        bools([0, 0]),
        sample=floats([0, 0]),
        prompt=floats([0, 0]),
        token=floats([0, 0]),
    ),
]

# --- losses ---------------------------------------------------------------------------------------
# Each case has the log-probabilities of the trainer, the logarithms of the ratios, and, for the
# sampled tokens, the terms and their derivatives.

E125 = math.exp(1.25)  # 3.49
E4 = math.exp(4)  # 54.6


def tokens(name, logprobs_BT, log_rho_BT, sampled_BT, expected, gradient_BT, **others) -> Case:
    arguments = {
        "logprobs_BT": logprobs_BT,
        "generator_logprobs_BT": logprobs_BT - log_rho_BT,
        "sampled_BT": sampled_BT,
    }
    pair = (expected, gradient_BT)
    return Case(name, arguments | others, pair, "logprobs_BT", difference_with_gradient)


CISPO = [
    tokens(
        "the ratios 1, 3.49 and 54.6, with A = 2; the cap is 5",
        floats([-0.5, -2, -1]),
        floats([0, 1.25, 4]),
        bools([1, 1, 1]),
        floats([2 * -0.5, E125 * 2 * -2, 5 * 2 * -1]),
        floats([2, 2 * E125, 2 * 5]),
        advantages_B=torch.tensor([2.0]),
        eps_max=5.0,
    ),
    tokens(
        "the ratios 1 / 3.49 and 1 / 54.6, with A = -1 and A = 1",
        floats([-3, -6], [-3, -6]),
        floats([-1.25, -4], [-1.25, -4]),
        bools([1, 1], [1, 1]),
        floats([3 / E125, 6 / E4], [-3 / E125, -6 / E4]),
        floats([-1 / E125, -1 / E4], [1 / E125, 1 / E4]),
        advantages_B=torch.tensor([-1.0, 1.0]),
        eps_max=5.0,
    ),
    tokens(
        "the token in the middle is forced",
        floats([-0.5, -9, -1]),
        floats([0, -9, 0]),
        bools([1, 0, 1]),
        floats([-0.5, 0, -1]),
        floats([1, 0, 1]),
        advantages_B=torch.tensor([1.0]),
        eps_max=4.0,
    ),
]
DAPO = {"eps_low": 0.2, "eps_high": 0.26}
LOG_RATIOS = [math.log(1.1), math.log(1.5), math.log(0.9), math.log(0.5)]
CLIPPED = [
    tokens(
        "the ratios 1.1, 1.5, .9 and .5, with A = 2",
        floats([-1, -1, -1, -1]),
        floats(LOG_RATIOS),
        bools([1, 1, 1, 1]),
        floats([2.2, 2.52, 1.8, 1]),
        floats([2.2, 0, 1.8, 1]),
        advantages_B=torch.tensor([2.0]),
        **DAPO,
    ),
    tokens(
        "the ratios 1.1, 1.5, .9 and .5, with A = -2",
        floats([-1, -1, -1, -1]),
        floats(LOG_RATIOS),
        bools([1, 1, 1, 1]),
        floats([-2.2, -3, -1.8, -1.6]),
        floats([-2.2, -3, -1.8, 0]),
        advantages_B=torch.tensor([-2.0]),
        **DAPO,
    ),
    tokens(
        "the token in the middle is forced",
        floats([-1, -9, -1]),
        floats([0, -9, 0]),
        bools([1, 0, 1]),
        floats([1, 0, 1]),
        floats([1, 0, 1]),
        advantages_B=torch.tensor([1.0]),
        **DAPO,
    ),
    tokens(
        "log pi_train - log pi_gen is 200, with A = 1",
        floats([-0.1, -1]),
        floats([200, 0]),
        bools([1, 1]),
        floats([1.26, 1]),
        floats([0, 1]),
        advantages_B=torch.tensor([1.0]),
        **DAPO,
    ),
]
E02 = math.exp(0.2)  # 1.22
SEQUENCE_RATIO = [
    tokens(
        "the mean of .1, .2 and .3 is .2; the mean of 1 and -1 is 0",
        floats([-1, -1, -1], [-1, -2, -3]),
        floats([0.1, 0.2, 0.3], [1, -1, 0]),
        bools([1, 1, 1], [1, 1, 1]),
        torch.tensor([E02, 1]),
        floats([E02 / 3] * 3, [1 / 3] * 3),
    ),
    tokens(
        "forced tokens in one completion, and nothing else in the other",
        floats([-1, -9, -1, -9], [-9, -9, -9, -9]),
        floats([0.1, -9, 0.3, -9], [-9, -9, -9, -9]),
        bools([1, 0, 1, 0], [0, 0, 0, 0]),
        torch.tensor([E02, 1]),
        floats([E02 / 2, 0, E02 / 2, 0], [0] * 4),
    ),
]

# --- generators -----------------------------------------------------------------------------------


def budget(name, sampled, closed_at, *expected) -> Case:
    arguments = {"sampled": sampled, "closed_at": closed_at}
    return Case(name, arguments | {"thinking_budget": 4, "answer_budget": 2}, expected)


INTERRUPT_OR_TRUNCATE = [
    budget("it thinks, and has a token left", 3, -1, False, False),
    budget("it has used its thinking budget", 4, -1, True, False),
    budget("its thinking has just ended", 4, 4, False, False),
    budget("it answers, and has a token left", 5, 4, False, False),
    budget("it has used its answer budget", 6, 4, False, True),
    budget("its thinking ended early; it has an answer token left", 2, 1, False, False),
    budget("its thinking ended early; it has used its answer budget", 3, 1, False, True),
    budget("its first token ended its thinking", 1, 1, False, False),
]


def batch(name, done, unfinished, version, k, prompts, expected) -> Case:
    arguments = {"done": done, "unfinished": unfinished}
    return Case(name, arguments | {"version": version, "k": k, "prompts": prompts}, expected)


CHOOSE_BATCH = [
    batch("too few are finished", [3], [3, 3], 3, 8, 2, None),
    batch("the oldest come first", [5, 3, 4, 3], [], 5, 4, 2, [1, 3]),
    batch("the oldest come first", [5, 4, 3], [5], 5, 4, 3, [2, 1, 0]),
    batch("version 4 is left for the group of version 2", [3], [2], 3, 2, 1, [0]),
    batch("the group of version 2 would be too old for version 5", [3], [2], 4, 2, 1, None),
    batch("two groups wait, a step for each: the second is too old", [1, 2, 2], [], 3, 2, 1, None),
    batch("two groups wait, and one step is enough for both", [1, 1, 2], [2], 3, 2, 2, [0, 1]),
    batch("a finished group takes the place before an unfinished one", [2, 3], [3], 4, 2, 1, None),
    batch("k is 0, and nothing is left behind", [3, 3], [], 3, 0, 2, [0, 1]),
    batch("k is 0, and a group would be left behind", [3, 3], [3], 3, 0, 2, None),
]


def in_flight(name, updates, budget, ends_at, versions) -> Case:
    """A completion after a prompt of two tokens. What newest() and sample() return, and what the
    arguments `updates` and `ends_at` mean, says `pretended_generator` in child.py."""
    arguments = {"prompt": [1, 2], "end": 7, "budget": budget}
    sampled = [10 * version + 2 + i for i, version in enumerate(versions)]
    logprobs = [-version - (2 + i) / 100 for i, version in enumerate(versions)]
    if ends_at is not None:
        sampled[ends_at - 2] = 7
    arguments |= {"updates": updates, "ends_at": ends_at}
    return Case(name, arguments, (sampled, logprobs, versions))


SAMPLE_IN_FLIGHT = [
    in_flight("no new parameters come", [3], 4, None, [3, 3, 3, 3]),
    in_flight("new parameters come before the third and the fourth token", [3, 3, 4, 6], 4, None,
              [3, 3, 4, 6]),
    in_flight("the third token ends it", [3, 4, 5, 6, 7], 10, 4, [3, 4, 5]),
    in_flight("the budget is one token", [3, 4], 1, None, [3]),
]  # fmt: skip

# --- the curve of a run ---------------------------------------------------------------------------


def worse_than_the_best(expected, returned) -> str | None:
    """A sentence about a fitted curve that is not that of least squares. expected: compute, pass
    rate and the least sum of squares; returned: (A, B, C_mid)."""
    compute_n, pass_rate_n, least = expected
    numbers = isinstance(returned, list) and len(returned) == 3
    if not numbers or not all(isinstance(number, int | float) for number in returned):
        return f"it returned {returned}, and must return three numbers"
    A, B, C_mid = returned
    text = f"A = {A:.4g}, B = {B:.4g}, C_mid = {C_mid:.4g}"
    if not -1e-6 <= A <= 1 + 1e-6:
        return f"{text}: A is not between 0 and 1"
    if not (B > 0 and C_mid > 0):
        return f"{text}: B and C_mid must be above 0"
    curve_n = sigmoid(compute_n["array"][1:], A, B, C_mid, pass_rate_n["array"][0])
    squares = float(((curve_n - pass_rate_n["array"][1:]) ** 2).sum())
    if not squares <= 1.02 * least + 1e-6:  # nor NaN
        return f"{text} has a sum of squares of {squares:.6f}, and the least is {least:.6f}"
    return None


def curve(name, compute_n, pass_rate_n) -> Case:
    """The least sum of squares is that of fit_curve.py."""
    compute_n, pass_rate_n = np.array(compute_n, float), np.array(pass_rate_n, float)
    _, least = variable_projection(compute_n[1:], pass_rate_n[1:], float(pass_rate_n[0]))
    arguments = {"compute_n": compute_n, "pass_rate_n": pass_rate_n}
    return Case(name, arguments, (compute_n, pass_rate_n, least), fault=worse_than_the_best)


def published(run: str) -> tuple[np.ndarray, np.ndarray]:
    """Compute and pass rate of a published run of docs/study/thinking."""
    (series,) = read_log(str(ROOT / "docs" / "study" / "thinking" / run))
    return series.x, series.y


STEPS = np.arange(0, 13) * 1e11
FIT_SIGMOID = [
    curve("A = .8, B = 2, C_mid = 2e11, R0 = .1", STEPS, sigmoid(STEPS, 0.8, 2, 2e11, 0.1)),
    curve(
        "the first point lies too high",
        STEPS,
        np.append(0.25, sigmoid(STEPS[1:], 0.8, 2, 2e11, 0.1)),
    ),
    curve(
        "a straight rise: without a bound A would be above 1",
        STEPS,
        np.linspace(0.1, 0.9, 13),
    ),
    curve("the run of lesson 1", *published("thinking-46-seed0")),
]

OPEN = {
    "zero_variance": ZERO_VARIANCE,
    "advantages": ADVANTAGES,
    "token_weights": TOKEN_WEIGHTS,
    "cispo": CISPO,
    "clipped": CLIPPED,
    "sequence_ratio": SEQUENCE_RATIO,
    "interrupt_or_truncate": INTERRUPT_OR_TRUNCATE,
    "choose_batch": CHOOSE_BATCH,
    "sample_in_flight": SAMPLE_IN_FLIGHT,
    "fit_sigmoid": FIT_SIGMOID,
}
