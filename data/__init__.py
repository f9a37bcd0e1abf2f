"""Data: where problems come from, and how a completion is judged.

A task is a module of data/tasks/ that judges completions. Of these functions it must have the
first:

    score(problem, completion) -> bool
        or a number from 0 to 1. The completion is its whole text, with the forced tokens. It starts
        with `<think>` if the prompt ends with it.
    problems(split, number, seed) -> list[Problem]
        `split` is "train" or "validation"; the two never overlap. `number` is how many are wanted,
        and a task may have fewer.
    worded(text, instruction) -> str
        What the model gets of a problem's text (generate.py --prompt).

These are the tasks:

    arithmetic   makes its own problems: additions, the default of train.py
    mathematics  a final answer in \\boxed{}, for records of files; spelling.py and expressions.py
                 read it
    gym          makes problems of reasoning-gym, a package with a hundred families and their
                 verifiers
    programming  a program that must pass tests, for records of files; sandbox.py runs it

The other files serve all tasks. load.py makes problems of what --data says, and holds some out;
records.py reads files and data sets of the hub; verify.py calls `score` in a process that may hang
or crash without harm.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """One problem: what the user says to the model, and what a right completion must arrive at."""

    prompt: str  # the user's turn, before the model's chat template
    answer: str  # the reference that `score` compares with
    task: str  # the module whose `score` judges it, for example data.tasks.arithmetic
    # what else `score` needs, as JSON can hold it
    metadata: dict = field(default_factory=dict, hash=False)


def after_thinking(completion: str) -> str:
    """The text after the last `</think>`: nothing if thinking is open at the end, all of it if
    there is no thinking."""
    answer = completion.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer
