r"""Mathematics: what counts as the answer, a table of pairs with the verdict wanted, and hostile answers."""

import random
import time

import pytest

from data import mathematics
from data.mathematics import equal, last_boxed, problem, score
from data.verify import VerifierPool

EQUAL = [  # reference, answer
    # fractions, decimals, powers, constants
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\frac12", r"\dfrac{2}{4}"), ("3.5", r"\frac72"),
    ("0.50", "1/2"), (r"\frac{3}{2}", r"1\frac{1}{2}"), ("1024", "2^{10}"),
    ("1267650600228229401496703205376", "2^{100}"),
    (r"\sqrt{50}", r"5\sqrt{2}"), (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), ("2+3i", "3i+2"), ("120", "5!"),
    (r"\binom{5}{2}", "10"), (r"\log_2 8", "3"), ("0", "-0"), ("5", "05"), ("5", "5.0"),
    (r"\frac{1}{3}", "0.333333333"),
    ("1:2", r"\frac{1}{2}"), (r"|{-3}|", "3"), (r"2\pi", r"\pi \cdot 2"), ("0.1+0.2", "0.3"),
    # thousands, money, units, degrees
    ("10000", "10,000"), ("10000", r"10\,000"), ("10000", "10{,}000"), (r"\$1,250", "1250"), ("1250", r"\$1,250.00"),
    ("25", r"25 \text{ cm}^2"), (r"14\text{ dollars}", "14"), (r"5 \text{ cm}", "5 cm"), (r"90^\circ", "90"),
    # percent
    (r"25\%", "0.25"), (r"25\%", "25"), ("0.03", r"3\%"), (r"25\%", r"\frac14"),
    # sets, lists, pairs, intervals, inequalities, matrices
    (r"\{1,2\}", r"\{2,1\}"), ("2,3,5", r"\{5,3,2\}"), ("1,2", "2, 1"), (r"\pm 2", r"\{-2, 2\}"),
    ("6,7", r"6\text{ or }7"),
    (r"\left(1,2\right)", "(1, 2)"), (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
    ("[2,3)", r"\left[2, 3\right)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty)\cup(-\infty,2)"), (r"(2,\infty)", "x>2"), ("x>2", r"(2,\infty)"),
    ("[1,2]", r"1\le x\le 2"), (r"x \in [1,2]", "[1,2]"), (r"\emptyset", r"\{\}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    # algebra, equations
    ("x^2+2x+1", "(x+1)^2"), (r"\frac{a}{b}", "a/b"), ("1", r"\sin^2x+\cos^2x"), ("5", "x=5"), ("x=5", "5"),
    ("y=2x+1", "2x+1"), ("y=3x", "3x - y=0"), ("5", "2+3=5"),
    # words and choices
    (r"\text{Yes}", "yes"), (r"\text{(C)}", "C"), ("C", r"\textbf{(C)}"), (r"\text{Evelyn}", "Evelyn"),
    (r"\text{no solution}", "No solution"), ("12:30", "12:30"),
    # LaTeX noise
    ("7", "7."), ("7", "$7$"), ("7", r"\,7\ "), ("7", "{7}"), ("7", r"\boxed{7}"), (r"\frac{3}{4}", r"\tfrac{3}{4}"),
]  # fmt: skip
NOT_EQUAL = [
    ("5", "-5"), ("5", "6"), ("1000000", "1000001"), ("2^{100}", "2^{100}+1"), (r"\pi", "3.14"), (r"\frac13", "0.333"),
    ("0.333", "1/3"), ("7", "7.0000001"), ("5", r"\infty"), (r"\infty", r"-\infty"), ("0", r"\frac{0}{0}"),
    ("12", r"1\,2"),
    ("10000", "(10,000)"), (r"1 \text{ hour}", r"60\text{ minutes}"), (r"25\%", "2.5"), ("1:2", "2:1"),
    ("12:30", "12:45"),
    ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(-1,1]", "[-1,1)"), ("(1,2)", r"\{1,2\}"), (r"\{1,2\}", "(1,2)"),
    ("2,3", "2,3,5"), ("2,3,5", "2,3"), (r"\pm 2", "2"), ("[1,2]", "1<x<2"), (r"(2,\infty)", "x<2"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\4&3\end{pmatrix}"),
    ("a+b", "b+c"), ("k", "5k"), ("2", "2x"), (r"\sin x", r"\cos x"), ("A", "B"), (r"\text{east}", "west"),
    ("3", "three"),
    # adversarial: several answers at once, or none
    ("17", "17, 18"), ("17", "17 or 18"), ("17", r"\text{17 or 18}"), ("17", r"17 \vee 18"), ("17", r"n \ge 17"),
    ("17", "16 < 17"), ("17", "x"), ("17", ""), ("17", " "), ("17", "?"), ("17", r"\text{the answer}"),
    ("17", "1" * 5000),
    ("5", "__import__('os').system('x')"), ("5", r"\input{/etc/passwd}"), ("17", r"x=17,y=3"), ("17", "18=18"),
    ("17", r"\{" + ",".join(map(str, range(100))) + r"\}"), ("17", r"\boxed{"), ("17", "{" * 500 + "17"),
]  # fmt: skip


@pytest.mark.parametrize("reference, answer", EQUAL)
def test_equal(reference, answer):
    assert equal(reference, answer)


@pytest.mark.parametrize("reference, answer", NOT_EQUAL)
def test_not_equal(reference, answer):
    assert not equal(reference, answer)


@pytest.mark.parametrize(
    "completion, right",
    [
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
        (r"</think>\boxed{\text{So } 17}", False),
        (r"</think>\boxed 17 is it", True),
        (r"</think>$\boxed17$", True),
        (r"</think>\fbox{17}", True),
        (r"</think>\boxed{}", False),
        (r"</think>\boxed", False),
        (r"</think>17", False),
        (r"</think>#### 17", False),
        ("", False),
    ],
)
def test_only_the_last_box_after_the_thinking_counts(completion, right):
    assert score(problem("What?", "17"), completion) is right


def test_braces_of_a_box_are_balanced_and_escaped_ones_are_none():
    assert last_boxed(r"\boxed{\{1,\frac{2}{3}\}} {}") == r"\{1,\frac{2}{3}\}"
    assert last_boxed(r"\boxed{\left\{x\right.}") == r"\left\{x\right."
    assert last_boxed(r"\boxed {5}") == "5" and last_boxed("boxed{5}") is None
    assert last_boxed(r"\boxed{a\\}") == r"a\\"  # a line break, then the end
    assert last_boxed(r"\boxed{" * 20_000) is None


@pytest.mark.parametrize(
    "column, answer",
    [
        ("She has 3 + 4 = <<3+4=7>>7.\n#### 7", "7"),  # GSM8K
        (r"We see $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),  # MATH
        (r"First \boxed{1}, hence $\boxed 2$", "2"),
        (" 204 ", "204"),
    ],
)
def test_the_answer_is_found_in_a_worked_solution(column, answer):
    made = problem("What is it?", column)
    assert made.answer == answer and made.task == "data.mathematics"
    assert made.prompt == "What is it?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert score(made, f"</think>\\boxed{{{answer}}}")


@pytest.mark.parametrize("column", ["#### ", r"\boxed{}", "word " * 300])
def test_a_solution_without_an_answer_is_refused(column):
    with pytest.raises(ValueError, match="empty|long text"):
        problem("What?", column)


def test_a_prompt_that_asks_for_a_box_is_not_asked_again():
    assert problem(r"What? Use \boxed{}.", "1").prompt == r"What? Use \boxed{}."


BOMBS = [
    "(10^{10^{10}})!", "9^{9^{9^{9}}}", r"\binom{10^{9}}{5\cdot 10^8}", r"\sum_{n=1}^{10^{12}} \frac{1}{n}",
    r"\prod_{n=1}^{10^{9}} n", r"\int_0^\infty \sin(x^{x^x}) dx", "(" * 300 + "17" + ")" * 300,
    "{" * 400 + "17" + "}" * 400,
    r"\sqrt{" * 200 + "17" + "}" * 200, "(x+1)^{10000}", "((((2)!)!)!)!" + "!" * 5, r"10^{10^{8}} \bmod 7",
    r"\lim_{x\to 0} x^{x^{x^{x}}}", "17" + "+0" * 400, r"\frac{1}{" * 150 + "17" + "}" * 150,
]  # fmt: skip


def test_hostile_answers_cost_nobody_else_a_verdict():
    """Answers that keep SymPy busy or blow its stack; what cannot be judged is a counted failure and never right."""
    honest = [
        (problem("What?", "17"), r"</think>\boxed{17}", True),
        (problem("What?", "17"), r"</think>\boxed{18}", False),
    ]
    hostile = [(problem("What?", "19"), f"</think>\\boxed{{{bomb}}}", False) for bomb in BOMBS]
    items = hostile + honest * len(hostile)
    random.Random(0).shuffle(items)
    with VerifierPool(2, time_limit=3, memory_gib=2) as pool:
        pool.submit([(i, problem, text) for i, (problem, text, _) in enumerate(items)])
        verdicts, deadline = {}, time.monotonic() + 200
        while pool.unfinished:
            verdicts.update(pool.results())
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for i, (judged, text, right) in enumerate(items):
        assert verdicts[i].correct == right, text
        assert verdicts[i].failure is None or judged.answer == "19", (text, verdicts[i])
    failures = [verdict.failure for verdict in verdicts.values() if verdict.failure]
    assert "time limit" in failures, "one of the bombs goes off"


def test_no_alarm_is_set():
    """Math-Verify's own time limits work in a main thread only: they are off."""
    import signal

    before = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert equal(r"\frac{1}{7}", r"\frac{2}{14}")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900 and signal.getsignal(signal.SIGALRM) is before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert mathematics.parsed(r"\frac{1}{7}")
