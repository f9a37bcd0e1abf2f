"""--data gym:FAMILY, on the real package."""

import json
from dataclasses import replace

import pytest
from programs import judge, require_verdicts

from data import Problem
from data.load import load_data, load_evaluation
from data.sandbox import RaisedInside
from data.tasks import gym
from data.verify import VerifierPool

pytest.importorskip("reasoning_gym")


def test_a_family_is_split_and_ends_when_it_has_no_more():
    (source,) = load_data(["gym:word_sequence_reversal:2,min_words=3,max_words=3"], 200, 50)
    problems = source.train + source.validation
    assert source.name == "gym:word_sequence_reversal" and source.notes == []
    assert len({problem.text for problem in problems}) == 250
    assert all(problem.answer.count(",") == 2 for problem in problems)
    assert len(gym.problems("train", 300, 0, "products", max_digits="1")) <= 100  # 0*0 to 9*9


# Completions of a problem whose answer is A.
COMPLETIONS = """
right | A
right |  <think>7</think>⏎A⏎
right | It is <answer>A</answer>.
wrong | It is A.
wrong | <answer>7</answer>
wrong | LONG
wrong | A or 7
"""  # for the last one the package gives a part


def test_the_instruction_and_the_metadata_reach_the_verdict():
    instruction = "Answer in <answer></answer>."
    source = load_evaluation("gym:number_filtering,max_decimals=0", 5, instruction=instruction)
    problem = source.validation[0]
    assert problem.prompt.endswith(instruction)
    assert json.loads(json.dumps(problem.metadata)) == problem.metadata
    table = COMPLETIONS.replace("A", problem.answer).replace("LONG", "1 " * 10**6)
    require_verdicts(table, lambda text: gym.score(problem, text))
    (product,) = gym.problems("train", 1, 0, "prime_factorization")
    assert product.prompt.endswith(gym.INSTRUCTION)
    with pytest.raises(RaisedInside, match="ValueError"):  # the package's own, which is wrong
        gym.score(product, "two times three")


# --- what a model writes is never run, and a constant never wins ----------------------------------


def test_no_answer_is_run(tmp_path, monkeypatch):
    """Not even where the package's own verifier judges in the sandbox, and would run it."""
    left = tmp_path / "left"
    run = f"__import__('pathlib').Path({str(left)!r}).touch()"
    takes_over = "__import__('sys').modules['data.tasks.mathematics'].__dict__.update(score=print)"
    wrong = [run, f"[{run}]", f"[[{run}]]", f"1+1 if {run} else 2", f"x*{run}", "9**9**9**9"]
    wrong += [takes_over, f"[{takes_over}]"]
    (tmp_path / "unchecked.py").write_text(
        "from data.tasks import gym\ngym.OWN_VERIFIERS.clear()\nscore = gym.score\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # a verifier imports it
    sums = Problem("", "4", "data.tasks.mathematics")
    (ours,) = gym.problems("train", 1, 0, "countdown")
    tried = []
    for problem in (ours, replace(ours, task="unchecked")):
        tried += [(problem, text) for text in (*wrong, problem.answer)]
        tried += [(sums, rf"\boxed{{{text}}}") for text in "54"]
    with VerifierPool(1, 10, 4) as pool:
        verdicts = judge(pool, tried)
    assert not left.exists()
    right = [text for (_, text), verdict in zip(tried, verdicts) if verdict.correct]
    assert right == 2 * [ours.answer, r"\boxed{4}"]


SUMS = """
right | 3 8 3 8 | 24 | 8/(3-8/3) | only exact fractions say so
right | 4 6 | 24 | 6*4 |
right | 4 6 | 2 | -4+6 |
wrong | 9 9 3 8 | 24 | (9*9-8)/3 | 24.33
wrong | 10 8 5 6 | 24 | 8*5//10*6 |
wrong | 1 5 3 9 | 24 | 3*5.1+9 |
wrong | 66 98 54 | 164 | (66+98)+54**-34 |
wrong | 4 0 | 4 | 4/0 |
wrong | 4 6 | 24 | 6*4*1 |
wrong | 4 6 | 24 | ٦*٤ |
wrong | 4 6 | 24 | 6*4) |
wrong | 6 6 5 3 | 24 | 6+6+6+6 |
wrong | 4 6 | 24 | 24 |
wrong | 4 6 | 24 | nan |
"""


def test_a_sum_makes_its_target_exactly():
    def makes(numbers, target, text, _):
        metadata = {"numbers": [*map(int, numbers.split())], "target": int(target)}
        return gym.makes_the_target(text, {"metadata": metadata})

    require_verdicts(SUMS, makes)
