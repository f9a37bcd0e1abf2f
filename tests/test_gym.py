"""--data gym:FAMILY, on the real package."""

import contextlib
import dataclasses
import json

import pytest
from steps import run_train

from data import Problem, sandbox
from data.load import load_data, load_evaluation, task_of
from data.tasks import gym
from data.verify import VerifierPool

pytest.importorskip("reasoning_gym")


def test_splits_do_not_overlap_and_a_family_with_too_few_problems_says_so():
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
    texts = {p.text for p in source.train + source.validation}
    number = len(source.train)
    assert len(texts) == number + len(source.validation) <= 100  # 0 * 0 to 9 * 9
    assert source.notes[0] == f"300 problems for train were asked for, and there are {number}"
    assert task_of("gym:products,max_digits=1") == "data.tasks.gym"


def test_the_instruction_and_the_metadata_reach_the_verdict():
    source = load_evaluation(
        "gym:number_filtering,max_decimals=0", 5, instruction="Answer in <answer></answer>."
    )
    problem = source.validation[0]
    assert problem.prompt.endswith("Answer in <answer></answer>.")
    assert gym.problems("train", 1, 0, "products")[0].prompt.endswith(gym.INSTRUCTION)
    texts = [
        problem.answer,
        f" <think>7</think>\n{problem.answer}\n",
        f"It is <answer>{problem.answer}</answer>.",
        f"It is {problem.answer}.",
        "<answer>7</answer>",
    ]
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


@pytest.mark.parametrize(
    "argument, message",
    [
        ("gym:nosuch", "has no family 'nosuch'; it has ab, "),
        ("gym", "reasoning-gym wants a family, as in gym:word_sorting; it has ab, "),
        (
            "gym:products,digits=1",
            "products does not take {'digits': '1'}: .*unexpected keyword argument 'digits'",
        ),
        ("gym:products,graded=true", "products does not take {'graded'"),
        ("gym:products,seed=1", "seed is no option"),
        ("gym:products,max_digits=many", "products does not take"),
        ("gym:arc_agi", "cannot be judged from their text"),
    ],
)
def test_what_cannot_be_had_is_named(argument, message):
    with pytest.raises(ValueError, match=message):
        load_data([argument], 5, 5)


def test_it_is_judged_in_the_verifiers_and_a_family_that_is_gone_is_a_failure():
    problems = gym.problems("train", 2, 0, "gcd")
    gone = {"family": "gone", "options": {}, "entry": {}}
    problems.append(Problem("?", "1", gym.__name__, gone))
    with VerifierPool(1, 60.0, 4.0) as pool:
        items = [(i, problem, problem.answer) for i, problem in enumerate(problems)]
        verdicts = dict(pool.judge(items))
    assert [verdicts[i].correct for i in range(3)] == [True, True, False]
    assert verdicts[2].failure == "error" and "'gone' not registered" in verdicts[2].detail


@pytest.mark.slow
def test_a_run_of_a_small_model_on_two_families(tmp_path, monkeypatch, chat_models):
    monkeypatch.chdir(tmp_path)
    run_train(
        [
            "--model",
            chat_models["qwen3"],
            "--data",
            "gym:products:2",
            "gym:gcd",
            "--defaults",
            "toy",
            "--prompt-budget",
            "200",
            "--thinking-budget",
            "4",
            "4",
            "--answer-budget",
            "4",
            "--length-control",
            "penalty",
            "--steps",
            "2",
            "--prompts-per-step",
            "6",
            "--completions-per-prompt",
            "4",
            "--train-prompts",
            "30",
            "--validation-problems",
            "4",
            "--validation-samples",
            "2",
            "--name",
            "gym",
        ]
    )
    lines = [
        json.loads(line) for line in (tmp_path / "runs/gym/log.jsonl").read_text().splitlines()
    ]
    assert {"pass_rate/gym:products", "pass_rate/gym:gcd"} <= lines[0].keys()
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2]
    assert all(line.get("verifier_failures", 0) == 0 for line in lines)


# --- what a model writes is never run, and a constant never wins ----------------------------------


def effects(file: str) -> list[str]:
    """Answers that leave a file behind, if anybody runs them: as Python, in a list, after a sum."""
    run = f"__import__('pathlib').Path({file!r}).touch()"
    return [run, f"[{run}]", f"[[{run}]]", f"1+1 if {run} else 2", f"x*{run}"]


def test_the_families_that_run_answers_are_known(tmp_path):
    """The package's own verifiers, outside of the sandbox, in the version that is installed."""
    running = {"composite"}  # it asks the verifiers of others
    for family in gym.reasoning_gym().factory.DATASETS:
        try:
            (problem,) = gym.problems("train", 1, 0, family)
        except ValueError:  # refused: arc_agi, rearc, composite
            continue
        judge = gym.verifier(family, "{}")
        left = tmp_path / family
        for text in effects(str(left)):
            with contextlib.suppress(Exception):
                judge(text, gym.entry_of(problem))
        if left.exists():
            running.add(family)
    assert running == {*gym.RUN_ANSWERS}


@pytest.mark.parametrize("checked", [True, False])
def test_no_answer_is_run(checked, tmp_path, monkeypatch):
    """Neither with the check of what an answer may look like, nor by the sandbox alone."""
    left = tmp_path / "left"
    takes_over = "__import__('sys').modules['data.tasks.mathematics'].__dict__.update(score=print)"
    texts = [*effects(str(left)), takes_over, f"[{takes_over}]"]
    sums = Problem("", "4", "data.tasks.mathematics")
    items = []
    for family in {*gym.RUN_ANSWERS} - {"composite"}:
        (problem,) = gym.problems("train", 1, 0, family)
        items += [((family, text), problem, f"</think>{text}") for text in texts]
        items += [((family, "reference"), problem, problem.answer)]
        items += [((family, "5"), sums, r"\boxed{5}"), ((family, "4"), sums, r"\boxed{4}")]
    # A verifier imports this module in a process of its own.
    (tmp_path / "unchecked.py").write_text(
        "from data.tasks import gym\ngym.ALLOWED_ANSWERS.clear()\nscore = gym.score\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if not checked:
        items = [
            (
                key,
                dataclasses.replace(problem, task=problem.task.replace(gym.__name__, "unchecked")),
                text,
            )
            for key, problem, text in items
        ]
    with VerifierPool(1, 20, 4) as pool:
        verdicts = dict(pool.judge(items))
    assert not left.exists()
    assert all(verdict.failure is None for verdict in verdicts.values())
    right = {key for key, verdict in verdicts.items() if verdict.correct}
    assert right == {key for key in verdicts if key[1] in ("reference", "4")}


def test_an_answer_that_takes_for_ever_to_judge_is_wrong(monkeypatch):
    monkeypatch.setenv("SCORE_SECONDS", "1")
    (problem,) = gym.problems("train", 1, 0, "countdown")
    assert gym.score(problem, "9**9**9**9") is False
    assert gym.score(problem, problem.answer) is True


def test_without_the_sandbox_the_families_that_run_answers_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(sandbox, "confines", lambda: False)
    with pytest.raises(ValueError, match="countdown runs what the model writes as code"):
        gym.problems("train", 1, 0, "countdown")
    (problem,) = gym.problems("train", 1, 0, "word_sorting")
    assert gym.score(problem, problem.answer)


INTEGRALS = ["Integral({integrand}, {variable})", "Integral({integrand})"]
WRONG = {  # of what a problem holds, in braces
    "complex_arithmetic": ["nan", "inf", "nan+nanj"],
    "puzzle24": ["6+6+6+6", "24", "24.5", "{numbers[0]}**{numbers[1]}"],
    "countdown": ["{target}", "{target}.0", "nan"],
    "game_of_life_halting": ["any", "yes", "0"],
    "coin_flip": ["0", "0.", ".0", "0.0", "{answer}1", "1.01"],
    "simple_integration": INTEGRALS,
    "intermediate_integration": INTEGRALS,
    "gsm_symbolic": ["-{answer}", "{answer} or 17"],
    "word_sorting": ["{answer}, zzz"],
    "number_sorting": ["[NaN, NaN, NaN]", "[" + "NaN, " * 9 + "NaN]"],
}


@pytest.mark.parametrize("family", WRONG)
def test_a_constant_or_the_problem_itself_never_wins(family):
    problems = gym.problems("train", 25, 0, family)
    right = sum(gym.score(problem, problem.answer) for problem in problems)
    assert right >= (15 if family == "intermediate_integration" else 25)
    for problem in problems:
        values = {"integrand": "", "variable": "", "answer": problem.answer}
        wrong = [text.format(**values | problem.metadata["entry"]) for text in WRONG[family]]
        assert not any(gym.score(problem, text) for text in wrong if text != problem.answer)


@pytest.mark.parametrize("numbers, target, text, right", [
    ([9, 9, 3, 8], 24, "(9*9-8)/3", False),  # 24.33
    ([3, 8, 3, 8], 24, "8/(3-8/3)", True),  # only exact fractions say so
    ([10, 8, 5, 6], 24, "8*5//10*6", False),
    ([1, 5, 3, 9], 24, "3*5.1+9", False),
    ([66, 98, 54, 34, 6], 164, "(66+98)+54**-34/6", False),
    ([4, 6], 24, "6*4", True), ([4, 6], 2, "-4+6", True), ([4, 0], 4, "4/0", False),
    ([4, 6], 24, "6*4*1", False), ([4, 6], 24, "٦*٤", False), ([4, 6], 24, "6*4)", False),
])  # fmt: skip
def test_a_sum_makes_its_target_exactly(numbers, target, text, right):
    entry = {"metadata": {"numbers": numbers, "target": target}}
    assert gym.makes_the_target(text, entry) is right


@pytest.mark.parametrize("answer, text, right", [
    ("0.2734375", "0.2734375", True), ("0.2734375", "0.27", True), ("0.2734375", "0.2734", True),
    ("0.2734375", "35/128", True), ("0.2734375", "0.3", False), ("0.5", "0.505", False),
    ("0.5", "+1/2", True), ("1.0", "1.01", False), ("3.051757812e-05", "3.051757812E-05", True),
    ("3.051757812e-05", "0", False), ("0.5", "1/0", False), ("0.5", "0." + "5" * 99, False),
])  # fmt: skip
def test_a_probability_may_be_rounded(answer, text, right):
    assert gym.is_the_probability(text, {"answer": answer}) is right


def test_a_check_takes_no_longer_for_a_long_answer():
    """A pattern with two ways to take a dot took 18 s for 79 characters."""
    entry = {"answer": "X**2/2 + C", "metadata": {}}
    assert not gym.is_formula("1.1" * 3000 + "!", entry) and gym.is_formula("1.1*X + .5", entry)
    (problem,) = gym.problems("train", 1, 0, "simple_integration")
    assert gym.score(problem, "1 " * 10**6) is False


def test_a_verifier_that_raises_on_an_answer_says_wrong():
    (problem,) = gym.problems("train", 1, 0, "prime_factorization")
    text = "two times three"
    with VerifierPool(1, 60.0, 4.0) as pool:
        verdicts = dict(pool.judge([("wrong", problem, text), ("right", problem, problem.answer)]))
    assert verdicts["right"].correct
    assert verdicts["wrong"].failure is None and not verdicts["wrong"].correct
    assert "Traceback" in verdicts["wrong"].detail and "ValueError" in verdicts["wrong"].detail


def plan_of(problem: Problem) -> list[dict]:
    """A plan that brings each box of a boxnet problem to its target, along two straight lines."""
    place_of = {}
    for square, items in problem.metadata["entry"]["initial_state"].items():
        place_of |= {item: tuple(map(float, square.split("_"))) for item in items}
    plan = []
    for box in filter(lambda item: item.startswith("box_"), place_of):
        target = box.replace("box_", "target_")
        (row, column), (to_row, to_column) = place_of[box], place_of[target]
        while (row, column) != (to_row, to_column):
            agent = f"Agent[{row}, {column}]"
            if row != to_row:
                row += 1 if to_row > row else -1
            else:
                column += 1 if to_column > column else -1
            plan.append({agent: f"move({box}, square[{row}, {column}])"})
        plan.append({f"Agent[{row}, {column}]": f"move({box}, {target})"})
    return plan


def test_a_plan_with_moves_that_are_impossible_is_wrong():
    for problem in gym.problems("train", 6, 0, "boxnet"):
        plan = plan_of(problem)
        assert gym.score(problem, json.dumps(plan))
        nothing = {"Agent[9.5, 9.5]": "move(box_red, square[9.5, 8.5])"}
        assert not gym.score(problem, json.dumps([nothing, *plan]))
        assert not gym.score(problem, json.dumps([*plan, plan[-1]]))
    for text in (
        "",
        "7",
        "[7]",
        "[[]]",
        "{}",
        "[" * 3000,
        '[{"a": 7}]',
        '[{"Agent[1]": "move(a, b)"}]',
    ):
        assert not gym.score(problem, text), text
