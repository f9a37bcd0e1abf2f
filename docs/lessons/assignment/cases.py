"""The open cases. A student may read all of them. What is right is computed by hand; only the best
curve of a run is that of curve/. The cases of teacher/hidden.py are drawn at random."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from curve.fit import sigmoid
from curve.least_squares import variable_projection
from curve.logs import read_log
from docs.lessons.assignment.grader import Case, describe, difference_with_gradient

ROOT = Path(__file__).parents[3]


def floats(text: str) -> torch.Tensor:
    """A matrix, float32: "1 2/3; 4 5" has two rows."""
    rows = [row.split() for row in text.split(";")]
    return torch.tensor([[float(Fraction(number)) for number in row] for row in rows])


def bools(text: str) -> torch.Tensor:
    """The same with 0 and 1, bool."""
    return floats(text).bool()


# --- which completions count, and how much --------------------------------------------------------


def groups(name: str, rewards: str, usable: str, without_variance: str) -> Case:
    arguments = {"rewards_PG": floats(rewards), "usable_PG": bools(usable)}
    return Case(name, arguments, bools(without_variance)[0])


ZERO_VARIANCE = [
    groups(
        "all right, some right, all wrong",
        "1 1 1; 1 -1 1; -1 -1 -1",
        "1 1 1; 1 1 1; 1 1 1",
        "1 0 1",
    ),
    groups(
        "in the first group, the completion that differs is truncated",
        "1 -1 1; 1 -1 -1",
        "1 0 1; 1 1 0",
        "1 0",
    ),
    groups("all completions are truncated", "1 -1", "0 0", "1"),
    groups(
        "a number that float32 does not hold exactly",
        ".7 .7 .7 .7 .7 .7 .7; .7 .7 .7 .7 .7 .7 .7001",
        "1 1 1 1 1 1 1; 1 1 1 1 1 1 1",
        "1 0",
    ),
]


def advantages(name: str, rewards: str, counted: str, **expected: torch.Tensor) -> list[Case]:
    """A case for each norm."""
    given = {"rewards_PG": floats(rewards), "counted_PG": bools(counted)}
    return [Case(name, given | {"norm": norm}, values) for norm, values in expected.items()]


# The batch of lesson 2. The sum of the squares of its centred rewards is 3 + 4. In the second
# batch the last completion of the first group is truncated, and a third group is filtered out:
# the sum is 24/9 + 4.
CENTRED = floats("-.5 -.5 1.5 -.5; 1 -1 -1 1")
CENTRED_2 = floats("-2/3 -2/3 4/3 0; 1 -1 -1 1; 0 0 0 0")
NOTHING = floats("0 0 0 0")

ADVANTAGES = [
    *advantages(
        "lesson 2",
        "-1 -1 1 -1; 1 -1 -1 1",
        "1 1 1 1; 1 1 1 1",
        none=CENTRED,
        prompt=CENTRED / floats("3/4; 1").sqrt(),
        batch=CENTRED / math.sqrt(7 / 8),
    ),
    *advantages(
        "a completion and a group are not counted",
        "-1 -1 1 1; 1 -1 -1 1; 1 1 1 1",
        "1 1 1 0; 1 1 1 1; 0 0 0 0",
        none=CENTRED_2,
        prompt=CENTRED_2 / floats("24/27; 1; 1").sqrt(),
        batch=CENTRED_2 / math.sqrt((24 / 9 + 4) / 7),
    ),
    *advantages(
        "none is counted", "1 1 -1 1", "0 0 0 0", none=NOTHING, prompt=NOTHING, batch=NOTHING
    ),
]


def weights(name: str, lengths: str, counted: str, **expected: str) -> list[Case]:
    """A case for each mean."""
    given = {"lengths_PG": floats(lengths).long(), "counted_PG": bools(counted)}
    return [
        Case(name, given | {"aggregation": aggregation}, floats(values))
        for aggregation, values in expected.items()
    ]


TOKEN_WEIGHTS = [
    *weights(
        "all are counted",
        "10 40; 20 10",
        "1 1; 1 1",
        sample="1/40 1/160; 1/80 1/40",
        prompt="1/100 1/100; 1/60 1/60",
        token="1/80 1/80; 1/80 1/80",
    ),
    *weights(
        "one completion is not counted",
        "10 40 50; 20 10 5",
        "1 1 0; 1 1 1",
        sample="1/50 1/200 0; 1/100 1/50 1/25",
        prompt="1/100 1/100 0; 1/70 1/70 1/70",
        token="1/85 1/85 0; 1/85 1/85 1/85",
    ),
    *weights(
        "a group is filtered out",
        "10 40; 20 10",
        "1 1; 0 0",
        sample="1/20 1/80; 0 0",
        prompt="1/50 1/50; 0 0",
        token="1/50 1/50; 0 0",
    ),
    *weights("none is counted", "10 40", "0 0", sample="0 0", prompt="0 0", token="0 0"),
]

# --- losses ---------------------------------------------------------------------------------------


def tokens(
    name: str, logprobs: str, ratios: str, sampled: str, expected: str, gradient: str, **others
) -> Case:
    """A case with these log pi_train, and these ratios rho. expected: what the function returns,
    and its gradient."""
    rows = [[math.log(Fraction(number)) for number in row.split()] for row in ratios.split(";")]
    logprobs_BT = floats(logprobs)
    arguments = {
        "logprobs_BT": logprobs_BT,
        "generator_logprobs_BT": logprobs_BT - torch.tensor(rows),
        "sampled_BT": bools(sampled),
    }
    value = floats(expected)
    if not others:  # a ratio for each completion
        value = value[0]
    pair = value, floats(gradient)
    return Case(name, arguments | others, pair, "logprobs_BT", difference_with_gradient)


CISPO = [
    tokens(
        "the ratios 1, 3 and 50, with A = 2; the cap is 5",
        "-.5 -2 -1",
        "1 3 50",
        "1 1 1",
        "-1 -12 -10",
        "2 6 10",
        advantages_B=torch.tensor([2.0]),
        eps_max=5.0,
    ),
    tokens(
        "the ratios 1/3 and 1/50, with A = -1 and A = 1",
        "-3 -5; -3 -5",
        "1/3 1/50; 1/3 1/50",
        "1 1; 1 1",
        "1 1/10; -1 -1/10",
        "-1/3 -1/50; 1/3 1/50",
        advantages_B=torch.tensor([-1.0, 1.0]),
        eps_max=5.0,
    ),
    tokens(
        "the token in the middle is forced",
        "-.5 -9 -1",
        "1 1/99 1",
        "1 0 1",
        "-.5 0 -1",
        "1 0 1",
        advantages_B=torch.tensor([1.0]),
        eps_max=4.0,
    ),
]
DAPO = {"eps_low": 0.2, "eps_high": 0.26}
CLIPPED = [
    tokens(
        "the ratios 1.1, 1.5, .9 and .5, with A = 2",
        "-1 -1 -1 -1",
        "1.1 1.5 .9 .5",
        "1 1 1 1",
        "2.2 2.52 1.8 1",
        "2.2 0 1.8 1",
        advantages_B=torch.tensor([2.0]),
        **DAPO,
    ),
    tokens(
        "the ratios 1.1, 1.5, .9 and .5, with A = -2",
        "-1 -1 -1 -1",
        "1.1 1.5 .9 .5",
        "1 1 1 1",
        "-2.2 -3 -1.8 -1.6",
        "-2.2 -3 -1.8 0",
        advantages_B=torch.tensor([-2.0]),
        **DAPO,
    ),
    tokens(
        "the token in the middle is forced",
        "-1 -9 -1",
        "1 1/99 1",
        "1 0 1",
        "1 0 1",
        "1 0 1",
        advantages_B=torch.tensor([1.0]),
        **DAPO,
    ),
    tokens(
        "the ratio 1e86 of the first token is infinite in float32, with A = 1",
        "-1 -1",
        "1e86 1",
        "1 1",
        "1.26 1",
        "0 1",
        advantages_B=torch.tensor([1.0]),
        **DAPO,
    ),
]
SEQUENCE_RATIO = [
    tokens(
        "the ratios 1, 2 and 4, whose logarithms have the mean log 2; then 1/2, 2 and 1",
        "-1 -1 -1; -1 -2 -3",
        "1 2 4; 1/2 2 1",
        "1 1 1; 1 1 1",
        "2 1",
        "2/3 2/3 2/3; 1/3 1/3 1/3",
    ),
    tokens(
        "forced tokens in the first completion, and nothing else in the second",
        "-1 -9 -1 -9; -9 -9 -9 -9",
        "1 1/99 4 1/99; 1/99 1/99 1/99 1/99",
        "1 0 1 0; 0 0 0 0",
        "2 1",
        "1 0 1 0; 0 0 0 0",
    ),
]

# --- generators -----------------------------------------------------------------------------------


def budget(name: str, sampled: int, closed_at: int, *expected: bool) -> Case:
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


def batch(name: str, done: list, unfinished: list, expected: list | None, **others: int) -> Case:
    return Case(name, {"done": done, "unfinished": unfinished} | others, expected)


CHOOSE_BATCH = [
    batch("too few are finished", [3], [3, 3], None, version=3, k=8, prompts=2),
    batch("the oldest come first", [5, 3, 4, 3], [], [1, 3], version=5, k=4, prompts=2),
    batch("the oldest come first", [5, 4, 3], [5], [2, 1, 0], version=5, k=4, prompts=3),
    batch(
        "the group of version 2 can still be trained by version 4",
        [3], [2], [0], version=3, k=2, prompts=1,
    ),
    batch(
        "the group of version 2 cannot be trained by version 5",
        [3], [2], None, version=4, k=2, prompts=1,
    ),
    batch(
        "two groups stay behind, with a step for each: the second is too old then",
        [1, 2, 2], [], None, version=3, k=2, prompts=1,
    ),
    batch(
        "two groups stay behind, and one step trains both",
        [1, 1, 2], [2], [0, 1], version=3, k=2, prompts=2,
    ),
    batch(
        "a finished group and another one stay behind: one of them is too old then",
        [2, 3], [3], None, version=4, k=2, prompts=1,
    ),
    batch("k is 0, and no group stays behind", [3, 3], [], [0, 1], version=3, k=0, prompts=2),
    batch("k is 0, and a group stays behind", [3, 3], [3], None, version=3, k=0, prompts=2),
]  # fmt: skip


def in_flight(
    name: str, updates: list[int], versions: list[int], budget: int, ends_at: int | None = None
) -> Case:
    """A completion after a prompt of two tokens, whose tokens must have these versions. child.py
    says what `updates` and `ends_at` mean (`pretended_generator`)."""
    arguments = {"prompt": [1, 2], "end": 7, "budget": budget}
    arguments |= {"updates": updates, "ends_at": ends_at}
    before = range(2, 2 + len(versions))  # the tokens before each token
    sampled = [10 * version + n for version, n in zip(versions, before)]
    logprobs = [-version - n / 100 for version, n in zip(versions, before)]
    if ends_at is not None:
        sampled[-1] = 7
    return Case(name, arguments, (sampled, logprobs, versions))


SAMPLE_IN_FLIGHT = [
    in_flight("no new parameters come", [3], [3, 3, 3, 3], budget=4),
    in_flight(
        "new parameters come before the third and before the fourth token",
        [3, 3, 4, 6],
        [3, 3, 4, 6],
        budget=4,
    ),
    in_flight("the third token ends it", [3, 4, 5, 6, 7], [3, 4, 5], budget=10, ends_at=4),
    in_flight("the budget is one token", [3, 4], [3], budget=1),
]

# --- the curve of a run ---------------------------------------------------------------------------


def worse_than_the_best(expected, returned) -> str | None:
    """A sentence about a fitted curve that is not that of least squares. expected: compute, pass
    rate and the least sum of squares; returned: (A, B, C_mid)."""
    compute_n, pass_rate_n, least = expected
    numbers = isinstance(returned, list) and len(returned) == 3
    if not numbers or not all(isinstance(number, int | float) for number in returned):
        return f"it returned {describe(returned)}, and must return three numbers"
    A, B, C_mid = returned
    text = f"A = {A:.4g}, B = {B:.4g}, C_mid = {C_mid:.4g}"
    if not -1e-6 <= A <= 1 + 1e-6:
        return f"{text}: A is not between 0 and 1"
    if not (B > 0 and C_mid > 0):
        return f"{text}: B and C_mid must be above 0"
    x, y = compute_n["array"], np.array(pass_rate_n["array"])
    residual = sigmoid(x[1:], A, B, C_mid, y[0]) - y[1:]
    squares = float(residual @ residual)
    if not squares <= 1.02 * least + 1e-6:  # nor NaN
        return f"{text} has a sum of squares of {squares:.6f}, and the least is {least:.6f}"
    return None


def curve(name: str, compute_n: np.ndarray, pass_rate_n: np.ndarray) -> Case:
    """The least sum of squares is that of fit_curve.py."""
    _, least = variable_projection(compute_n[1:], pass_rate_n[1:], float(pass_rate_n[0]))
    arguments = {"compute_n": compute_n, "pass_rate_n": pass_rate_n}
    return Case(name, arguments, (compute_n, pass_rate_n, least), fault=worse_than_the_best)


def published(run: str) -> tuple[np.ndarray, np.ndarray]:
    """Compute and pass rate of a published run of docs/study/thinking."""
    (series,) = read_log(str(ROOT / "docs" / "study" / "thinking" / run))
    return series.x, series.y


COMPUTE = np.arange(13) * 1e11
EXACT = sigmoid(COMPUTE, A=0.8, B=2, C_mid=2e11, R0=0.1)
FIRST_TOO_HIGH = np.append(0.25, EXACT[1:])
STRAIGHT = np.linspace(0.1, 0.9, 13)
FIT_SIGMOID = [
    curve("A = .8, B = 2, C_mid = 2e11, R0 = .1", COMPUTE, EXACT),
    curve("the same, but the first point lies too high", COMPUTE, FIRST_TOO_HIGH),
    curve("a straight rise: without a bound A would be above 1", COMPUTE, STRAIGHT),
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
