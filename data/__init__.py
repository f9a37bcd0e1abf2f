"""Data: where problems come from, which of them are held out, and how a completion is judged.

A task is a module of this folder with `score`. One that makes its own problems has `problems` too:

    problems(split, number, seed) -> list[Problem]     split is "train" or "validation"; the two never overlap
    score(problem, completion)    -> bool              or a number from 0 to 1; completion is the text, forced tokens
                                                       included, from `<think>` on where the prompt ends with it

`number` is --train-prompts (100,000 without it) or --validation-problems; a task that has fewer returns what it has.

`score` runs in a process that may be killed (verify.py). The other tasks, mathematics and programming, make a Problem
of each record of a file; `load_data` takes files, data sets of the hub and tasks alike:

    arithmetic                    a task that makes its own problems
    polaris, gsm8k, deepcoder     data sets that are known here (KNOWN)
    my.jsonl, folder, owner/name  records of your own: JSONL, JSON, CSV or Parquet; columns are guessed, or named
    polaris:3 deepcoder:1         several, with weights
    my.csv:2,problem=q,answer=a   with options (OPTIONS)
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem: what the user says to the model, and what a right completion must arrive at."""

    prompt: str  # the user's turn, before the model's chat template
    answer: str  # the reference that `score` compares with
    task: str  # the module whose `score` judges it, for example data.arithmetic


def after_thinking(completion: str) -> str:
    """What follows the last `</think>`: nothing where thinking was opened and not closed, all where there was none."""
    answer = completion.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer
