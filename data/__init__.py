"""Tasks: where problems come from and how a completion is judged.

A task is a module of this folder with two functions:

    problems(split, number, seed) -> list[Problem]     split is "train" or "validation"; the two never overlap
    score(problem, completion)    -> bool              completion is the sampled text, forced tokens included
"""

import importlib
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem: what the user says to the model, and what a right completion must arrive at."""

    prompt: str  # the user's turn, before the model's chat template
    answer: str  # the reference that `score` compares with
    task: str = "data.arithmetic"  # the module whose `score` judges it


def load_task(name: str):
    """The task module called `name`. Raises ValueError, naming the tasks there are, for any other name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in names:
        raise ValueError(f"no task is called {name!r}; the tasks in data/ are: {', '.join(names)}")
    return importlib.import_module(f"data.{name}")
