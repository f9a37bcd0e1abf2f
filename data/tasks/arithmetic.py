"""The default task: addition of two numbers, with the carries written down.

    prompt       4729+8153=<think>
    completion   9+3+0=12;2+5+1=08;7+1+0=08;4+8+0=12</think>12882<eos>

A `;` stands between steps. Each step adds two digits and the carry, from the right, and writes two
digits: the new carry and the sum's digit. One wrong step spoils the rest, so the pass rate falls
steeply with the number of digits, and chance is ~0 from three digits on. A policy improves by
making each step reliable, as in real reasoning traces. docs/make_base.py makes the model that RL
starts from (`data/arithmetic_base/`, shipped).
"""

import random

from data import Problem, is_held_out

MAX_DIGITS = 6


def draw(rng: random.Random, digits: int, held_out: bool) -> tuple[int, int]:
    """Two numbers of `digits` digits each, out of the tenth that is held out for validation, or out
    of the others."""
    while True:
        a, b = (rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(2))
        if is_held_out(f"{a}+{b}") == held_out:
            return a, b


def problems(
    split: str, number: int, seed: int = 0, max_digits: int | str = MAX_DIGITS
) -> list[Problem]:
    """`number` distinct problems, at most 100,000; lengths 1 to `max_digits` in turn (those of one
    digit run out first). ValueError for a `max_digits` that is no number of digits."""
    if not str(max_digits).isdecimal() or int(max_digits) == 0:
        raise ValueError(f"arithmetic has numbers of 1 digit or more, not max_digits={max_digits}")
    most = int(max_digits)
    number = min(number, 100_000)
    rng = random.Random(f"{split} {seed}")
    distinct = {}  # the keys are in order
    for i in range(100 * number):
        if len(distinct) == number:
            break
        pair = draw(rng, i % most + 1, held_out=split == "validation")
        distinct[pair] = None
    return [
        Problem(prompt=f"{a}+{b}=", answer=str(a + b), task="data.tasks.arithmetic")
        for a, b in distinct
    ]


def score(problem: Problem, completion: str) -> bool:
    """Whether there is exactly one `</think>`, and the sum, digit for digit, follows it."""
    parts = completion.split("</think>")
    return len(parts) == 2 and parts[1] == problem.answer
