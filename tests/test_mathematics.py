r"""Mathematics: what counts as the answer, two tables of answers with their verdicts (answers.tsv,
answers_to_problems.tsv), and hostile answers."""

import random
from pathlib import Path

import pytest

from data.tasks import mathematics
from data.tasks.mathematics import equal, last_boxed, problem, score
from data.verify import VerifierPool


def table(name: str) -> list[list[str]]:
    """The rows of a table beside this file: a verdict, the wanted answer, the given one, and why or
    to which problem."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").split("\n")[1:-1]
    return [line.split("\t") for line in lines if not line.startswith("# ")]


PAIRS, TO_PROBLEMS = table("answers.tsv"), table("answers_to_problems.tsv")
BOMBS = [  # wrong for 19, and at once
    "(" * 300 + "17" + ")" * 300,
    "{" * 400 + "17" + "}" * 400,
    r"\sqrt{" * 200 + "17" + "}" * 200,
    r"\frac{1}{" * 150 + "17" + "}" * 150,
    "17" + "+0" * 400,
    "-" * 900 + "19",
    "1/" * 450 + "1",
    "x^" * 300 + "x",
    "1,234" * 190,
    ",".join("1" * 490),
    "a " * 490,
    "(" * 499 + ")" * 499,
    *(sign * 480 for sign in ["((", '""', "$$", "||", r"\\", "__", "**", "{}"]),
    r"\frac" * 190,
    "9^{6000}/7^{7000}+" * 50 + "1=19",
    "(" + r"\cdot".join(f"{n}^{{9999}}" for n in range(2, 80)) + ")=19",
    "+".join(f"1/{n}^{{1500}}" for n in range(2, 80)) + "=19",
    "1" * 5000,
    r"\{" + ",".join(map(str, range(100))) + r"\}",
    " ",
    "\ud800",  # half a character of UTF-16
    "19\ud800",
]


def test_the_verdicts_are_those_of_the_tables():
    for verdict, wanted, given, why in PAIRS:
        assert equal(wanted, given) is (verdict == "right"), f"{given} for {wanted}: {why}"
    for bomb in BOMBS:
        assert not equal("19", bomb), bomb[:80]
    assert not equal("1,2,3,x", "x^x+" * 240 + "x")
    for spaced in (r"\,5\ ", "\u200b5"):
        assert equal("5", spaced)


def test_each_wanted_answer_is_right_as_it_stands():
    for answer in {wanted for _, wanted, _, _ in PAIRS}:
        assert score(problem("What?", answer), rf"</think>So it is $\boxed{{{answer}}}$."), answer


def test_an_answer_has_the_form_that_the_problem_asks_for():
    for verdict, wanted, given, text in TO_PROBLEMS:
        right = score(problem(text, wanted), rf"</think>\boxed{{{given}}}")
        assert right is (verdict == "right"), f"{given} for {wanted}: {text}"
        assert equal(wanted, given, text) or not right


COMPLETIONS = [  # to a problem whose answer is 17
    (r"So</think>The answer is \boxed{17}.", True),
    (r"\boxed{17}", True),  # of a model that does not think
    (r"\boxed{17}</think>So it is 17.", False),  # a box in the thinking is no answer
    (r"\boxed{18}</think>\boxed{17}", True),
    (r"</think>\boxed{18}</think>\boxed{17}", True),
    (r"</think>\boxed{17}</think>\boxed{18}", False),
    (r"</think>\boxed{17}</think>", False),
    (r"</think>\boxed{17} or \boxed{18}", False),  # several boxes: the last
    (r"</think>\boxed{16} \boxed{18} \boxed{17}", True),
    (r"</think>\boxed{17} \boxed{", False),  # the last is not closed
    (r"</think>\boxed{\boxed{17}}", True),
    (r"</think>\boxed{18, \boxed{17}}", False),  # the outer box counts
    (r"</think>\boxed{\boxed{18} \boxed{17}}", False),
    (r"<think>So</think>\boxed{17}", True),
    (r"<think>So \boxed{17}", False),  # thinking that was never closed
    (r"<think>So</think>\boxed{18}<think>\boxed{17}", False),
    ("</think>\\boxed{17\ud800}", False),  # half a character of UTF-16
    ("\ud800</think>\ud800\\boxed{17}\ud800", True),
    (r"</think>\boxed{\text{So } 17}", False),
    (r"</think>\boxed 17 is it", True),
    (r"</think>$\boxed17$", True),
    (r"</think>\fbox{17}", True),
    (r"</think>\boxed{}", False),
    (r"</think>\boxed", False),
    (r"</think>17", False),
    (r"</think>#### 17", False),
    ("", False),
]


def test_only_the_last_box_after_the_thinking_counts():
    for completion, right in COMPLETIONS:
        assert score(problem("What?", "17"), completion) is right, repr(completion)


def test_braces_of_a_box_are_balanced_and_escaped_ones_are_none():
    assert last_boxed(r"\boxed{\{1,\frac{2}{3}\}} {}") == r"\{1,\frac{2}{3}\}"
    assert last_boxed(r"\boxed{\left\{x\right.}") == r"\left\{x\right."
    assert last_boxed(r"\boxed {5}") == "5" and last_boxed("boxed{5}") is None
    assert last_boxed(r"\boxed{a\\}") == r"a\\"  # a line break, then the end
    assert last_boxed(r"\boxed{" * 20_000) is None


def test_only_the_end_of_a_very_long_text_is_read(monkeypatch):
    read = []
    monkeypatch.setattr(mathematics, "last_boxed", lambda text: read.append(text))
    score(problem("What?", "17"), "{" * 3_000_000 + r"\boxed{17}")
    assert len(read[-1]) == mathematics.LONGEST_TEXT and read[-1].endswith(r"\boxed{17}")


def test_the_answer_is_found_in_a_worked_solution():
    for column, answer in [
        ("She has 3 + 4 = <<3+4=7>>7.\n#### 7", "7"),  # GSM8K
        (r"We see $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),  # MATH
        (r"First \boxed{1}, hence $\boxed 2$", "2"),
        (" 204 ", "204"),
    ]:
        made = problem("What is it?", column)
        assert made.answer == answer and made.task == "data.tasks.mathematics"
        assert made.prompt == f"What is it?\n\n{mathematics.INSTRUCTION}"
        assert score(made, f"</think>\\boxed{{{answer}}}"), column
    for column in ("#### ", r"\boxed{}", "word " * 300):
        with pytest.raises(ValueError, match="empty|long text"):
            problem("What?", column)
    asks = r"What? Use \boxed{}."
    assert problem(asks, "1").prompt == asks, "it is not asked for again"


def test_the_wanted_answer_may_stand_in_the_problem():
    for wanted in ("x^0", r"\frac64", "x>2"):
        text = r"Simplify $x^0$, then $\frac{6}{4}$, and $2 < x$."
        assert score(problem(text, wanted), rf"\boxed{{{wanted}}}")


def test_hostile_answers_cost_nobody_a_verdict():
    """Expressions that would keep a computer algebra system busy for ever, or blow a stack, are
    wrong at once. So are loops of units: a pattern once tried each way to read each."""
    loops = ["hours " * 160, "dollar/" * 140, "miles per hour " * 60, "a" * 900, "m " * 400]
    hostile = [*BOMBS, *(f"5 {loop}{end}" for loop in loops for end in "<!7")]
    hostile += [given for _, _, given, why in PAIRS if why == "too large"]
    items = [
        (problem("What?", "19"), rf"</think>\boxed{{{text}}}") for text in hostile + ["19"] * 9
    ]
    random.Random(0).shuffle(items)
    with VerifierPool(2, time_limit=5, memory_gib=2) as pool:
        verdicts = dict(pool.judge([(i, *item) for i, item in enumerate(items)], seconds=200))
    assert len(verdicts) == len(items)
    for i, (_, text) in enumerate(items):
        right = text == r"</think>\boxed{19}"
        assert (verdicts[i].correct, verdicts[i].failure) == (right, None), text[:80]
