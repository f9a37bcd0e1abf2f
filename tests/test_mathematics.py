r"""Mathematics: what counts as the answer, the table of pairs (answers.py), and hostile answers."""

import random
import time

import pytest
from answers import PAIRS, TASKS

from data import spelling
from data.spelling import Rule
from data.tasks import mathematics
from data.tasks.mathematics import equal, last_boxed, problem, score
from data.verify import VerifierPool

ALONE = [*vars(spelling).values(), *vars(mathematics).values()]  # rules that are in no table
RULES = [*spelling.RULES, *(rule for rule in ALONE if isinstance(rule, Rule))]


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_each_rule_takes_one_of_its_examples_and_leaves_the_other(rule):
    example, _, wanted = rule.takes.partition(" → ")
    assert rule.apply(example) == wanted != example
    assert rule.apply(rule.leaves) == rule.leaves


@pytest.mark.parametrize("category", PAIRS)
def test_the_verdicts_on_pairs_are_those_of_the_table(category):
    for wanted, given, right, why in PAIRS[category]:
        assert equal(wanted, given) is right, f"{given!r:.200} for {wanted!r}: {why}"


def test_each_wanted_answer_is_right_as_it_stands():
    for answer in {wanted for pairs in PAIRS.values() for wanted, *_ in pairs}:
        assert score(problem("What?", answer), rf"</think>So it is $\boxed{{{answer}}}$."), answer


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
        instruction = "Please reason step by step, and put your final answer within \\boxed{}."
        assert made.prompt == f"What is it?\n\n{instruction}"
        assert score(made, f"</think>\\boxed{{{answer}}}"), column
    for column in ("#### ", r"\boxed{}", "word " * 300):
        with pytest.raises(ValueError, match="empty|long text"):
            problem("What?", column)
    asks = r"What? Use \boxed{}."
    assert problem(asks, "1").prompt == asks, "it is not asked for again"


@pytest.mark.parametrize("text, wanted, right, wrong", TASKS)
def test_an_answer_has_the_form_that_the_problem_asks_for(text, wanted, right, wrong):
    for answer in [wanted, *right, *wrong]:
        verdict = score(problem(text, wanted), rf"</think>\boxed{{{answer}}}")
        assert verdict is (answer not in wrong), answer
        assert equal(wanted, answer, text) or answer in wrong, "in another form"


def test_the_wanted_answer_may_stand_in_the_problem():
    for wanted in ("x^0", r"\frac64", "x>2"):
        text = r"Simplify $x^0$, then $\frac{6}{4}$, and $2 < x$."
        assert score(problem(text, wanted), rf"\boxed{{{wanted}}}")


def test_hostile_answers_cost_nobody_a_verdict():
    """Expressions that would keep a computer algebra system busy for ever, or blow a stack, are
    wrong at once."""
    hostile = [
        (problem("What?", wanted), f"</think>\\boxed{{{answer}}}", right)
        for wanted, answer, right, _ in PAIRS["expressions made to hang"]
    ]
    usual = [
        (problem("What?", "17"), r"</think>\boxed{17}", True),
        (problem("What?", "17"), r"</think>\boxed{18}", False),
    ]
    items = 2 * hostile + 20 * usual
    random.Random(0).shuffle(items)
    with VerifierPool(2, time_limit=5, memory_gib=2) as pool:
        pool.submit([(i, problem, text) for i, (problem, text, _) in enumerate(items)])
        verdicts, deadline = {}, time.monotonic() + 200
        while pool.unfinished:
            verdicts.update(pool.results())
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for i, (_, text, right) in enumerate(items):
        assert verdicts[i].correct == right and verdicts[i].failure is None, (text, verdicts[i])


def test_a_loop_of_units_is_judged_at_once():
    """A model that repeats itself: a pattern once tried each way to read each unit."""
    asked = problem("?", "5")
    loops = ["hours " * 160, "dollar/" * 140, "miles per hour " * 60, "a" * 900, "m " * 400]
    answers = [rf"</think>\boxed{{5 {loop}{end}}}" for loop in loops for end in "<!7"]
    with VerifierPool(1, time_limit=10, memory_gib=2) as pool:
        verdicts = [
            verdict for _, verdict in pool.judge([(answer, asked, answer) for answer in answers])
        ]
    assert [verdict.failure for verdict in verdicts] == [None] * len(answers)
    assert not any(verdict.score for verdict in verdicts)
