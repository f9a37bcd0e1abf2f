"""Cheap answers: what a model is given for an answer that it did not think about.

A task is measured before a run: how many of its problems does a constant solve, or a piece of the
problem copied? A pass rate below that says little about the model.
"""

import re
from collections import Counter

from data import Problem
from data.tasks import mathematics
from data.verify import VerifierPool

CONSTANTS = ["", *"0 1 2 3 4 5 6 7 8 9 yes no true false nan Yes No True False".split()]
MOST_PROBLEMS = 200
MANY = 0.2  # a cheap answer that is right for more than this share is named
SECONDS = 5.0  # for all of it; then what has been judged is enough
FEWEST = 10  # verdicts on an answer, before anything is said of it


def cheap_answers(problem: Problem, usual: str) -> dict[str, str]:
    """The text of each cheap answer to this problem, by what it is called. usual: the answer that
    most problems have."""
    answers = {repr(text): text for text in (*CONSTANTS, usual)}
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


def warnings(name: str, problems: list[Problem], pool: VerifierPool) -> list[str]:
    """A line for each cheap answer that solves more than MANY of the problems of this source.
    ValueError if their task raises on its own reference: it would call everything wrong. The pool
    may have work left, and is to be closed."""
    if not problems:
        return []
    first = problems[0]
    ((_, verdict),) = pool.judge([("", first, as_completion(first, first.answer))])
    if verdict.raised or verdict.failure == "error":
        said = f"{first.task}.score cannot judge its own reference answer {first.answer!r:.80}"
        raise ValueError(f"{said}:\n{verdict.detail.strip()}")

    # How many problems each answer solves, and for how many it was judged.
    answers = Counter(problem.answer for problem in problems)
    usual, number = answers.most_common(1)[0]
    if number == 1:  # each problem has its own
        usual = ""
    items = [
        (answer, problem, as_completion(problem, text))
        for problem in problems[:MOST_PROBLEMS]
        for answer, text in cheap_answers(problem, usual).items()
    ]
    right, judged = Counter(), Counter()
    for answer, verdict in pool.judge(items, SECONDS):
        judged[answer] += 1
        right[answer] += verdict.correct
    return [
        f"{name}: the cheap answer {answer} is right for {count / judged[answer]:.2f} of"
        f" {judged[answer]} problems; a pass rate near that, also R0, says little"
        for answer, count in right.most_common()
        if judged[answer] >= FEWEST and count > MANY * judged[answer]
    ]
