"""Cheap answers: what a model is given for an answer that it did not think about.

A task is measured before a run: how many of its problems does a constant solve, or a piece of the
problem copied? A pass rate below that says little about the model.
"""

import re
import time
from collections import Counter

from data import Problem
from data.tasks import mathematics
from data.verify import VerifierPool

CONSTANTS = ["", *map(str, range(10)), "yes", "no", "true", "false", "nan"]
CONSTANTS += ["Yes", "No", "True", "False"]
MOST_PROBLEMS = 200
MANY = 0.2  # a cheap answer that is right for more than this share is named
SECONDS = 5.0  # for all of it; then what has been judged is enough
FEWEST = 10  # verdicts on an answer, before anything is said of it


def cheap_answers(problem: Problem) -> dict[str, str]:
    """The text of each cheap answer to this problem, by what it is called."""
    answers = {repr(text): text for text in CONSTANTS}
    whole = problem.prompt
    question = whole.rpartition("\n\n")[0] or whole  # an instruction may stand behind it
    for text, its in ((whole, "the prompt's"), (question, "the question's")):
        words, numbers = text.split(), re.findall(r"-?\d+(?:\.\d+)?", text)
        answers |= {
            f"{its} text": text,
            f"{its} last line": text.rpartition("\n")[2],
            f"{its} last word": words[-1].strip(".?!") if words else "",
            f"{its} last number": numbers[-1] if numbers else "",
            f"{its} numbers": " ".join(numbers),
        }
    return answers


def as_completion(problem: Problem, answer: str) -> str:
    """The answer in the form that its task looks for."""
    return rf"\boxed{{{answer}}}" if problem.task == mathematics.__name__ else answer


def refuse_raising(problem: Problem, pool: VerifierPool) -> None:
    """ValueError if the task of this problem raises on its own reference: it would call everything
    wrong."""
    ((_, verdict),) = pool.judge([("", problem, as_completion(problem, problem.answer))])
    if verdict.raised or verdict.failure == "error":
        said = f"{problem.task}.score cannot judge its own reference answer {problem.answer!r:.80}"
        raise ValueError(f"{said}:\n{verdict.detail.strip()}")


def right_answers(problems: list[Problem], pool: VerifierPool) -> tuple[Counter, Counter]:
    """How many problems each cheap answer solves, and for how many it was judged: for MOST_PROBLEMS
    at most, and for fewer if that takes more than SECONDS. Then the pool has work left, and is to
    be closed."""
    pool.submit(
        [
            (name, problem, as_completion(problem, answer))
            for problem in problems[:MOST_PROBLEMS]
            for name, answer in cheap_answers(problem).items()
        ]
    )
    right, judged, deadline = Counter(), Counter(), time.monotonic() + SECONDS
    while pool.unfinished and time.monotonic() < deadline:
        for name, verdict in pool.results():
            judged[name] += 1
            right[name] += verdict.correct
        time.sleep(0.002)
    return right, judged


def warnings(name: str, problems: list[Problem], pool: VerifierPool) -> list[str]:
    """A line for each cheap answer that solves more than MANY of the problems of this source.
    ValueError if their task cannot judge its own reference. The pool is to be closed then."""
    if not problems:
        return []
    refuse_raising(problems[0], pool)
    right, judged = right_answers(problems, pool)
    return [
        f"{name}: the cheap answer {answer} is right for {count / judged[answer]:.2f} of"
        f" {judged[answer]} problems; a pass rate near that, also R0, says little"
        for answer, count in right.most_common()
        if judged[answer] >= FEWEST and count > MANY * judged[answer]
    ]
