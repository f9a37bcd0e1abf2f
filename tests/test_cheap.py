"""What a constant, or a copy of the problem, wins: it is named, and costs seconds at most."""

import time

import pytest

from data import Problem, cheap
from data.tasks import arithmetic
from data.verify import VerifierPool

TASK = """
import time

def score(problem, completion):
    if problem.metadata.get("hangs") and completion != problem.answer:
        time.sleep(600)
    if problem.metadata.get("raises"):
        raise KeyError(problem.answer)
    return completion == problem.answer
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A problem of a task that compares texts; verifiers find its module by PYTHONPATH."""
    (tmp_path / "words_task.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda prompt, answer, **metadata: Problem(prompt, answer, "words_task", metadata)


def lines_of(problems: list[Problem]) -> list[str]:
    with VerifierPool(1, time_limit=60, memory_gib=1) as pool:
        return cheap.warnings("mine", problems, pool)


def test_the_default_task_has_no_cheap_answer():
    assert lines_of(arithmetic.problems("train", 200)) == []


def test_constants_and_copies_are_named_with_their_share(task):
    problems = [task(f"Is {i} odd?\n\nSay yes or no.", "yes") for i in range(30)]
    problems += [task(f"Say {i} again", str(i)) for i in range(100, 110)]
    problems += [task("Say the last word: word\n\nNothing else.", "word") for _ in range(10)]
    said = lines_of(problems)
    assert [line.partition(";")[0] for line in said] == [
        "mine: the cheap answer 'yes' is right for 0.60 of 50 problems"
    ]
    # The answer that most problems have is tried too.
    colours = ["blue", "blue", "red", "green"] * 10
    said = lines_of([task(f"What colour has {i}?", colour) for i, colour in enumerate(colours)])
    assert [line.partition(";")[0] for line in said] == [
        "mine: the cheap answer 'blue' is right for 0.50 of 40 problems"
    ]
    alike = [task(f"Say w{i}\n\nNothing else.", f"w{i}") for i in range(20)]
    (line,) = lines_of(alike)
    assert line.startswith(
        "mine: the cheap answer the question's last word is right for 1.00 of 20"
    )


def test_a_task_that_raises_on_its_reference_is_refused_with_its_traceback(task):
    with pytest.raises(ValueError, match="words_task.score cannot judge its own reference.* 'no'"):
        lines_of([task("?", "no", raises=True)])
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        lines_of([Problem("?", "no", "nowhere")])


def test_a_task_that_takes_for_ever_does_not_keep_the_run_from_starting(task, monkeypatch):
    monkeypatch.setattr(cheap, "SECONDS", 0.5)
    began = time.monotonic()
    assert lines_of([task("?", "no", hangs=True)] * 200) == []
    assert time.monotonic() - began < 30
