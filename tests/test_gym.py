"""--data gym:FAMILY, on the real package."""

import json

import pytest
from steps import run_train

from data import Problem
from data.load import load_data, load_evaluation, task_of
from data.tasks import gym
from data.verify import VerifierPool

pytest.importorskip("reasoning_gym")


def test_splits_do_not_overlap_and_the_problems_that_repeat_are_left_out_and_counted():
    (source,) = load_data(["gym:word_sorting:2,max_words=3"], 200, 50)
    assert (source.name, source.weight, len(source.train), len(source.validation)) == (
        "gym:word_sorting",
        2,
        200,
        50,
    )
    assert (
        not {p.prompt for p in source.train} & {p.prompt for p in source.validation}
        and source.notes == []
    )
    assert all(problem.answer.count(",") == 2 for problem in source.train)  # three words
    (source,) = load_data(["gym:products,max_digits=1"], 300, 50)
    left = {p.prompt for p in source.train} | {p.prompt for p in source.validation}
    assert len(left) == len(source.train) + len(source.validation) <= 100  # 0 * 0 to 9 * 9
    assert "of 300 problems for train repeat another, and were left out" in source.notes[0]
    assert task_of("gym:products,max_digits=1") == "data.tasks.gym"


def test_the_instruction_and_the_metadata_reach_the_verdict():
    source = load_evaluation(
        "gym:number_filtering,max_decimals=0", 5, instruction="Answer in <answer></answer>."
    )
    problem = source.validation[0]
    assert problem.prompt.endswith("Answer in <answer></answer>.")
    assert gym.problems("train", 1, 0, "products")[0].prompt.endswith(gym.INSTRUCTION)
    texts = [problem.answer, f" <think>7</think>\n{problem.answer}\n", f"It is <answer>{problem.answer}</answer>.",
             f"It is {problem.answer}.", "<answer>7</answer>"]  # fmt: skip
    assert [gym.score(problem, text) for text in texts] == [1, 1, 1, 0, 0]
    assert json.loads(json.dumps(problem.metadata)) == problem.metadata


def test_the_verifier_has_the_options_too():
    """A word ladder is judged by the words of the lengths that were asked for."""
    problems = gym.problems("train", 8, 0, "word_ladder", min_word_length="3", max_word_length="5")
    assert [gym.score(problem, problem.answer) for problem in problems] == [1] * 8


def test_a_part_of_the_answer_does_not_count():
    (problem,) = gym.problems("train", 1, 0, "word_sorting", min_words="2", max_words="2")
    first, second = problem.answer.split(", ")
    text = f"{second}, {first}"
    entry = {
        "question": problem.prompt,
        "answer": problem.answer,
        "metadata": problem.metadata["entry"],
    }
    assert (
        0 < gym.verifier("word_sorting", json.dumps(problem.metadata["options"]))(text, entry) < 1
    )
    assert gym.score(problem, text) == 0 and gym.score(problem, problem.answer) == 1


@pytest.mark.parametrize("argument, message", [
    ("gym:nosuch", "has no family 'nosuch'; it has ab, "), ("gym", "has no family ''"),
    ("gym:products,digits=1", "products does not take {'digits': '1'}: .*unexpected keyword argument 'digits'"),
    ("gym:products,graded=true", "products does not take {'graded'"), ("gym:products,seed=1", "seed is no option"),
    ("gym:products,max_digits=many", "products does not take"), ("gym:arc_agi", "cannot be judged from their text"),
])  # fmt: skip
def test_what_cannot_be_had_is_named(argument, message):
    with pytest.raises(ValueError, match=message):
        load_data([argument], 5, 5)


def test_it_is_judged_in_the_verifiers_and_a_family_that_raises_is_a_failure_of_its_own():
    problems = gym.problems("train", 2, 0, "gcd")
    gone = {"family": "gone", "options": {}, "entry": {}}
    problems.append(Problem("?", "1", gym.__name__, gone))
    with VerifierPool(1, 60.0, 4.0) as pool:
        pool.submit([(i, problem, problem.answer) for i, problem in enumerate(problems)])
        verdicts = {}
        while pool.unfinished:
            verdicts |= dict(pool.results())
    assert [verdicts[i].correct for i in range(3)] == [True, True, False]
    assert verdicts[2].failure == "error" and "gone" in verdicts[2].detail


@pytest.mark.slow
def test_a_run_of_a_small_model_on_two_families(tmp_path, monkeypatch, chat_models):
    monkeypatch.chdir(tmp_path)
    run_train([
        "--model", chat_models["qwen3"], "--data", "gym:products:2", "gym:gcd", "--defaults", "toy", "--prompt-budget",
        "200", "--thinking-budget", "4", "4", "--answer-budget", "4", "--length-control", "penalty", "--steps", "2",
        "--prompts-per-step", "6", "--completions-per-prompt", "4", "--train-prompts", "30", "--validation-problems",
        "4", "--validation-samples", "2", "--name", "gym",
    ])  # fmt: skip
    lines = [
        json.loads(line) for line in (tmp_path / "runs/gym/log.jsonl").read_text().splitlines()
    ]
    assert {"pass_rate/gym:products", "pass_rate/gym:gcd"} <= lines[0].keys()
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    assert all(line.get("verifier_failures", 0) == 0 for line in lines)
