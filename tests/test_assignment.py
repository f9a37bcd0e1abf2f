"""The assignment of the lessons: our own code gets all points, the stubs none, and each typical
mistake loses the points of its function and of no other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.lessons.assignment import grader
from docs.lessons.assignment.cases import OPEN
from docs.lessons.assignment.teacher.hidden import hidden_cases

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "lessons" / "assignment"
ALL = {name: None for name in grader.POINTS}  # nothing is wrong
LONG = 600  # seconds for a function: this machine may be busy

# --- a hand-in that is made of our own code -------------------------------------------------------

# Grading does not let a hand-in import loss.py. So the text of our files is in this one.
CALLS = """
import math, numpy as np, torch

paper, numerics = type(math)("paper"), type(math)("numerics")
exec(LOSS, paper.__dict__)
exec(LEAST_SQUARES, numerics.__dict__)

def zero_variance(rewards_PG, usable_PG):
    return paper.zero_variance(rewards_PG, usable_PG)

def advantages(rewards_PG, counted_PG, norm):
    return paper.advantages(rewards_PG, counted_PG, counted_PG, norm)

def token_weights(lengths_PG, counted_PG, aggregation):
    return paper.token_weights(lengths_PG, counted_PG, aggregation)

def cispo(logprobs_BT, generator_logprobs_BT, sampled_BT, advantages_B, eps_max):
    recipe = paper.Recipe(loss="cispo", eps_max=eps_max)
    given = generator_logprobs_BT, sampled_BT, advantages_B
    return paper.token_terms(recipe, logprobs_BT, *given)[0]

def clipped(logprobs_BT, generator_logprobs_BT, sampled_BT, advantages_B, eps_low, eps_high):
    recipe = paper.Recipe(loss="dapo", eps_low=eps_low, eps_high=eps_high)
    of_tokens = generator_logprobs_BT, sampled_BT
    return paper.token_terms(recipe, logprobs_BT, *of_tokens, advantages_B)[0]

def sequence_ratio(logprobs_BT, generator_logprobs_BT, sampled_BT):
    log_rho_BT = torch.where(sampled_BT, logprobs_BT - generator_logprobs_BT, 0.0)
    return paper.sequence_log_ratios(log_rho_BT, sampled_BT)[:, 0].exp()

def interrupt_or_truncate(sampled, closed_at, *budgets, **named):
    given = np.array(sampled), np.array(closed_at), *budgets
    return paper.interrupt_or_truncate("interruption", *given, **named)

def choose_batch(done, unfinished, version, k, prompts):
    return paper.choose_batch(done, unfinished, version, f"pipeline-{k}", prompts)

def sample_in_flight(newest, sample, prompt, end, budget):
    tokens, logprobs, versions = [], [], []
    while len(tokens) < budget and end not in tokens:
        version, parameters = newest()
        token, logprob = sample(parameters, prompt + tokens)
        tokens.append(token)
        logprobs.append(logprob)
        versions.append(version)
    return tokens, logprobs, versions

def fit_sigmoid(compute_n, pass_rate_n):
    R0 = pass_rate_n[0]
    theta, _ = numerics.variable_projection(compute_n[1:], pass_rate_n[1:], R0)
    return theta[0], np.exp(theta[1]), np.exp(theta[2])
"""
OURS = {
    "calls": CALLS,
    "loss": (ROOT / "loss.py").read_text(),
    "least_squares": (ROOT / "curve" / "least_squares.py").read_text(),
}

# The function, the mistake, and the change of our code that makes it.
MISTAKES = [
    (
        "zero_variance",
        "a standard deviation is compared with 0",
        "return paper.zero_variance(rewards_PG, usable_PG)",
        "pairs = zip(rewards_PG, usable_PG)\n"
        "    return torch.stack([r[u].std(correction=0).nan_to_num() == 0 for r, u in pairs])",
    ),
    (
        "zero_variance",
        "truncated completions count",
        "paper.zero_variance(rewards_PG, usable_PG)",
        "paper.zero_variance(rewards_PG, usable_PG | True)",
    ),
    (
        "advantages",
        "the sum of squares is divided by n - 1",
        "(centred_PG.square().sum() / counted_PG.sum())",
        "(centred_PG.square().sum() / (counted_PG.sum() - 1))",
    ),
    (
        "advantages",
        "the norm of the batch is that of the group",
        '"batch": std_of_batch',
        '"batch": std_of_prompt',
    ),
    (
        "advantages",
        "truncated completions are in the mean",
        "(rewards_PG, counted_PG, counted_PG, norm)",
        "(rewards_PG, counted_PG | True, counted_PG, norm)",
    ),
    (
        "token_weights",
        "prompts that are filtered out are in the denominator",
        "(lengths_P1 > 0).sum() * lengths_P1",
        "len(lengths_P1) * lengths_P1",
    ),
    (
        "token_weights",
        "the tokens of truncated completions are in the denominator",
        "lengths_PG = torch.where(counted_PG, lengths_PG, 0)",
        "lengths_PG = lengths_PG",
    ),
    (
        "token_weights",
        "the mean over samples is that over tokens",
        '"sample": tokens_of_samples',
        '"sample": tokens_of_batch',
    ),
    (
        "cispo",
        "a gradient flows through the ratio",
        "self.log_rho_BT.detach().exp()",
        "self.log_rho_BT.exp()",
    ),
    (
        "cispo",
        "a capped token loses its gradient",
        "* inputs.logprobs_BT\n    return terms_BT, rho_BT > inputs.eps_max",
        "* torch.where(rho_BT > inputs.eps_max, inputs.logprobs_BT.detach(), inputs.logprobs_BT)\n"
        "    return terms_BT, rho_BT > inputs.eps_max",
    ),
    (
        "cispo",
        "the ratio is capped from below, too",
        "rho_BT.clamp(max=inputs.eps_max)",
        "rho_BT.clamp(1 / inputs.eps_max, inputs.eps_max)",
    ),
    (
        "cispo",
        "forced tokens have a term",
        "given = generator_logprobs_BT, sampled_BT, advantages_B",
        "given = generator_logprobs_BT, sampled_BT | True, advantages_B",
    ),
    (
        "clipped",
        "the clip without the minimum",
        "cut_BT = torch.where(inputs.advantages_B1 >= 0, from_above_BT, from_below_BT)",
        "cut_BT = from_above_BT.clamp(min=math.log(1 - inputs.eps_low))",
    ),
    (
        "clipped",
        "the two bounds are exchanged",
        "eps_low=eps_low, eps_high=eps_high",
        "eps_low=eps_high, eps_high=eps_low",
    ),
    (
        "clipped",
        "exp comes before the cut",
        "return cut_BT.exp() * inputs.advantages_B1, clipped_BT",
        "rho, A = inputs.log_rho_BT.exp(), inputs.advantages_B1\n"
        "    cut = rho.clamp(1 - inputs.eps_low, 1 + inputs.eps_high)\n"
        "    return torch.minimum(rho * A, cut * A), clipped_BT",
    ),
    (
        "clipped",
        "forced tokens have a term",
        "of_tokens = generator_logprobs_BT, sampled_BT",
        "of_tokens = generator_logprobs_BT, sampled_BT | True",
    ),
    (
        "sequence_ratio",
        "the sum of the logarithms, without the mean",
        " / sampled_BT.sum(1, keepdim=True).clamp(min=1)",
        "",
    ),
    (
        "sequence_ratio",
        "the mean is over forced tokens, too",
        "sampled_BT.sum(1, keepdim=True).clamp(min=1)",
        "sampled_BT.shape[1]",
    ),
    (
        "sequence_ratio",
        "the mean of the ratios",
        "paper.sequence_log_ratios(log_rho_BT, sampled_BT)[:, 0].exp()",
        "torch.where(sampled_BT, log_rho_BT.exp(), 0).sum(1) / sampled_BT.sum(1).clamp(min=1)",
    ),
    (
        "interrupt_or_truncate",
        "thinking gets one token more than its budget",
        "(sampled >= thinking_budget)",
        "(sampled > thinking_budget)",
    ),
    (
        "interrupt_or_truncate",
        "the budget of the answer is not counted from the end of thinking",
        "(sampled - closed_at >= answer_budget)",
        "(sampled >= thinking_budget + answer_budget)",
    ),
    (
        "choose_batch",
        "the newest groups first",
        "key=lambda i: done[i]",
        "key=lambda i: -done[i]",
    ),
    (
        "choose_batch",
        "it never waits for an old group",
        "if trained_version > group_version + k:",
        "if False:",
    ),
    (
        "choose_batch",
        "a group may be one step older",
        "if trained_version > group_version + k:",
        "if trained_version > group_version + k + 1:",
    ),
    (
        "choose_batch",
        "finished groups that stay behind take no place",
        "sorted([done[i] for i in left] + unfinished)",
        "sorted(unfinished)",
    ),
    (
        "sample_in_flight",
        "the parameters of the first token are kept",
        "while len(tokens) < budget and end not in tokens:\n        version, parameters = newest()",
        "version, parameters = newest()\n    while len(tokens) < budget and end not in tokens:",
    ),
    (
        "sample_in_flight",
        "the version is asked for a second time",
        "versions.append(version)",
        "versions.append(newest()[0])",
    ),
    (
        "sample_in_flight",
        "all tokens get the last version",
        "return tokens, logprobs, versions",
        "return tokens, logprobs, [version] * len(tokens)",
    ),
    (
        "sample_in_flight",
        "the policy does not see the prompt",
        "sample(parameters, prompt + tokens)",
        "sample(parameters, tokens)",
    ),
    ("fit_sigmoid", "R0 is fitted, too", "R0 = pass_rate_n[0]", "R0 = None"),
    ("fit_sigmoid", "R0 is 0", "R0 = pass_rate_n[0]", "R0 = 0.0"),
    (
        "fit_sigmoid",
        "A has no bound",
        "if not 0 <= curves[0, 0] <= 1:",
        "if False:",
    ),
    (
        "fit_sigmoid",
        "the grid's curve is not polished",
        "return polish(x, y, theta[best], R0 is None)",
        "return theta[best], 0",
    ),
]


def hand_in(folder: Path, old: str = "", new: str = "") -> Path:
    """A file with our code, in which a text that is there once is replaced by another."""
    texts = OURS
    if old:
        assert sum(text.count(old) for text in OURS.values()) == 1, old
        texts = {name: text.replace(old, new) for name, text in OURS.items()}
    path = folder / f"{len([*folder.iterdir()])}.py"
    sources = f"LOSS = {texts['loss']!r}\nLEAST_SQUARES = {texts['least_squares']!r}\n"
    path.write_text(sources + texts["calls"])
    return path


def faults(verdicts: dict[str, grader.Verdict]) -> dict[str, str | None]:
    """What is wrong with each function, in one line, or None."""
    return {
        name: verdict.fault and " ".join(verdict.fault.split())
        for name, verdict in verdicts.items()
    }


# --- points ---------------------------------------------------------------------------------------


def test_there_are_a_hundred_points_and_ten_functions_with_cases():
    names = [*grader.POINTS]
    assert sum(grader.POINTS.values()) == 100 and len(names) == 10
    assert [*OPEN] == names and {*hidden_cases("a")} == {*names}


@pytest.mark.parametrize("seed", [None, "a", "b"])
def test_our_own_code_gets_all_points_and_the_stubs_get_none(seed, tmp_path):
    cases = hidden_cases(seed) if seed else OPEN
    ours, stubs = grader.grade([hand_in(tmp_path), FOLDER / "stubs.py"], cases, LONG)
    assert faults(ours) == ALL
    assert {*faults(stubs).values()} == {"It is not written yet."}


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """What is wrong with the functions of each hand-in that has a mistake."""
    folder = tmp_path_factory.mktemp("mistakes")
    hand_ins = [hand_in(folder, old, new) for _, _, old, new in MISTAKES]
    graded = grader.grade(hand_ins, OPEN, LONG)
    return {row[:2]: faults(verdicts) for row, verdicts in zip(MISTAKES, graded)}


@pytest.mark.slow
@pytest.mark.parametrize("row", MISTAKES, ids=[f"{row[0]}: {row[1]}" for row in MISTAKES])
def test_a_mistake_loses_the_points_of_its_function_and_of_no_other(row, mistaken):
    function, mistake, _, _ = row
    found = mistaken[function, mistake]
    assert found[function] is not None
    assert found | {function: None} == ALL


def test_each_function_has_two_mistakes_or_more():
    named = [row[0] for row in MISTAKES]
    assert all(named.count(name) >= 2 for name in grader.POINTS)


# --- hand-ins that are broken, or hostile ---------------------------------------------------------

BROKEN = """
def zero_variance(rewards_PG, usable_PG):
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass

def advantages(rewards_PG, counted_PG, norm):
    return rewards_PG / counted_PG.nothing

def token_weights(lengths_PG, counted_PG, aggregation):
    return lengths_PG.double()

def cispo(logprobs_BT, *others, **named):
    return logprobs_BT[0]

def clipped(logprobs_BT, *others, **named):
    return logprobs_BT.detach().numpy()

def sequence_ratio(*given, **named):
    return __import__("os")._exit(0)

def interrupt_or_truncate(*given, **named):
    print("the arguments", named)
    return 0, 0

def choose_batch(*given, **named):
    import torch
    torch.set_default_dtype(torch.float64)
    torch.sum = None
    raise SystemExit(0)

def sample_in_flight(*given, **named):
    return __import__("loss")

def fit_sigmoid(compute_n, pass_rate_n):
    return float("nan"), None
"""
SAID = {
    "zero_variance": "It did not end within 1 seconds.",
    "advantages": "It raised AttributeError in line ... 'Tensor' object has no attribute 'nothing'",
    "token_weights": "the dtype is float64, and must be float32",
    "cispo": "the shape is [3], and must be [1, 3]",
    "clipped": "it returned an array of numpy, and must return a tensor",
    "sequence_ratio": "Its process ended before it returned anything.",
    "interrupt_or_truncate": "it returned [0, 0], and must return [False, False]",
    "choose_batch": "It raised SystemExit",
    "sample_in_flight": "It raised ModuleNotFoundError in line ... No module named 'loss'",
    "fit_sigmoid": "it returned [nan, None], and must return three numbers",
}


def broken(folder: Path, name: str) -> Path:
    """A hand-in with our code, of which one function is broken."""
    (text,) = re.findall(rf"(?ms)^def {name}\(.*?\n(?=\n|\Z)", BROKEN)
    path = hand_in(folder)
    path.write_text(f"{path.read_text()}\n{text}")
    return path


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The verdicts on the hand-in in which this function is broken, by the name of the function."""
    folder = tmp_path_factory.mktemp("broken")
    loops, *others = SAID
    graded = grader.grade([broken(folder, name) for name in others], OPEN, LONG)
    path, rest = broken(folder, loops), {name: OPEN[name] for name in others}
    (stopped,) = grader.grade([path], {loops: OPEN[loops]}, seconds=1)
    (right,) = grader.grade([path], rest, LONG)
    return dict(zip(others, graded)) | {loops: stopped | right}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_a_function_that_is_broken_gets_a_sentence_and_loses_its_points_alone(name, graded):
    found = faults(graded[name])
    for part in SAID[name].split(" ... "):
        assert part in found[name]
    assert found | {name: None} == ALL
    if name == "interrupt_or_truncate":
        assert "the arguments {'sampled': 3" in graded[name][name].printed


@pytest.mark.parametrize(
    "text, said",
    [
        ("import math, loss as other", "Line 2 imports loss. A hand-in may import"),
        ("def f():\n    from curve.fit import fit_sigmoid", "Line 3 imports curve.fit."),
        ("from . import stubs", "Line 2 imports .."),
        ("def f(:", "Python cannot read the file"),
    ],
)
def test_a_file_that_cannot_be_graded_gets_a_sentence_and_no_points(text, said, tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(f"import torch\n{text}\n")
    (verdicts,) = grader.grade([path], OPEN)
    assert all(said in fault for fault in faults(verdicts).values())


# --- the commands of the page ---------------------------------------------------------------------


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """python -m pytest in a process of its own."""
    command = [sys.executable, "-m", "pytest", *arguments]
    environment = os.environ | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_students_command_prints_the_points_of_each_function_and_the_total(tmp_path):
    path, ours = tmp_path / "recipe.py", hand_in(tmp_path).read_text()
    path.write_text(ours + BROKEN[BROKEN.index("def cispo") : BROKEN.index("def clipped")])
    result = run("docs/lessons/assignment", HAND_IN=str(path))
    table = result.stdout[result.stdout.index(" points ") :]
    assert "cispo                     0 of  10\n" in table
    assert "clipped                  10 of  10\n" in table
    assert "total                    90 of 100\n" in table
    assert "the shape is [3], and must be [1, 3]" in result.stdout and result.returncode == 1


@pytest.mark.slow
def test_the_teachers_command_grades_hidden_cases_and_k_chooses_functions(tmp_path):
    hidden = "docs/lessons/assignment/teacher/hidden.py"
    result = run(hidden, "-k", "advantages or cispo", HAND_IN=str(hand_in(tmp_path)), SEED="b")
    assert "total                    20 of  20\n" in result.stdout and result.returncode == 0


def test_a_hand_in_that_is_not_there_is_named(tmp_path):
    result = run("docs/lessons/assignment", HAND_IN=str(tmp_path / "none.py"))
    assert f"There is no file {tmp_path / 'none.py'}: cp docs/" in result.stdout + result.stderr
    assert result.returncode == 1


# --- the page -------------------------------------------------------------------------------------


def test_the_page_has_the_points_of_each_function_and_its_stub():
    page = (FOLDER / "README.md").read_text()
    rows = re.findall(r"(?m)^\| \d+ \| \[`(\w+)`\]\(stubs\.py\) \| (\d+) \|", page)
    assert {name: int(points) for name, points in rows} == grader.POINTS
