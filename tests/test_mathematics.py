r"""Mathematics: what counts as the answer, a table of answers with their verdicts (answers.tsv),
and hostile answers."""

import re
from pathlib import Path

from programs import judge, require_verdicts

from data.tasks.mathematics import last_boxed, problem, score
from data.verify import VerifierPool

# A verdict, the wanted answer, the given one, why, and perhaps to which problem.
LINES = Path(__file__).with_name("answers.tsv").read_text(encoding="utf-8").split("\n")[1:-1]
ANSWERS = [line.split("\t") for line in LINES if not line.startswith("# ")]
# Wrong for 19, and at once. «3 ab» is ababab.
BOMBS = r"""
«300 (»17«300 )»
«400 {»17«400 }»
«200 \sqrt{»17«200 }»
«150 \frac{1}{»17«150 }»
17«400 +0»
«900 -»19
«450 1/»1
«300 x^»x
«190 1,234»
«490 1,»1
«490 a »
«499 (»«499 )»
«480 ((»
«480 ""»
«480 $$»
«480 ||»
«480 \\»
«480 __»
«480 **»
«480 {}»
«190 \frac»
«50 9^{6000}/7^{7000}+»1=19
(2^{9999}«32 \cdot 3^{9999}\cdot 7^{9998}»)=19
1«40 +1/7^{1500}+1/3^{1500}»=19
«5000 1»
\{«99 1,»2\}
5 «160 hours »<
5 «160 hours »7
5 «140 dollar/»!
5 «140 dollar/»7
5 «60 miles per hour »<
5 «60 miles per hour »7
5 «900 a»!
5 «400 m »<
5 «400 m »7
«1000 ﷺ»
«500 ½\pm »
«330 \lfloor»
"""
BOMBS = re.sub("«([0-9]+) (.*?)»", lambda part: part[2] * int(part[1]), BOMBS).split("\n")[1:-1]
BOMBS += [" ", "\ud800", "19\ud800"]  # half a character of UTF-16


def test_the_verdicts_are_those_of_the_table_and_each_wanted_answer_is_right():
    for verdict, wanted, given, why, *text in ANSWERS:
        right = score(problem("".join(text) or "What?", wanted), rf"</think>\boxed{{{given}}}")
        assert right is (verdict == "right"), f"{given} for {wanted}: {why}"
        assert score(problem("What?", wanted), rf"</think>So it is $\boxed{{{wanted}}}$."), wanted


COMPLETIONS = r"""
right | So</think>The answer is \boxed{17}.
right | \boxed{17}
wrong | \boxed{17}</think>So it is 17.
right | \boxed{18}</think>\boxed{17}
right | </think>\boxed{18}</think>\boxed{17}
wrong | </think>\boxed{17}</think>\boxed{18}
wrong | </think>\boxed{17}</think>
wrong | </think>\boxed{17} or \boxed{18}
right | </think>\boxed{16} \boxed{18} \boxed{17}
wrong | </think>\boxed{17} \boxed{
right | </think>\boxed{\boxed{17}}
wrong | </think>\boxed{18, \boxed{17}}
wrong | </think>\boxed{\boxed{18} \boxed{17}}
right | <think>So</think>\boxed{17}
wrong | <think>So \boxed{17}
wrong | <think>So</think>\boxed{18}<think>\boxed{17}
wrong | </think>\boxed{17\ud800}
right | \ud800</think>\ud800\boxed{17}\ud800
wrong | </think>\boxed{\text{So } 17}
right | </think>\boxed 17 is it
right | </think>$\boxed17$
right | </think>\fbox{17}
wrong | </think>\boxed{}
wrong | </think>\boxed
wrong | </think>17
wrong | </think>#### 17
right | </think>{FAR\boxed{17}
wrong | </think>\boxed{17}FAR
wrong |
"""  # to a problem whose answer is 17


def test_only_the_last_box_after_the_thinking_counts():
    """In the last 200,000 characters: no more are read."""
    table = COMPLETIONS.replace(r"\ud800", "\ud800").replace("FAR", "{" * 200_000)
    require_verdicts(table, lambda text: score(problem("What?", "17"), text))


def test_braces_of_a_box_are_balanced_and_escaped_ones_are_none():
    assert last_boxed(r"\boxed{\{1,\frac{2}{3}\}} {}") == r"\{1,\frac{2}{3}\}"
    assert last_boxed(r"\boxed{\left\{x\right.}") == r"\left\{x\right."
    assert last_boxed(r"\boxed {5}") == "5" and last_boxed("boxed{5}") is None
    assert last_boxed(r"\boxed{a\\}") == r"a\\"  # a line break, then the end
    assert last_boxed(r"\boxed{" * 20_000) is None
    asks = r"What? Use \boxed{}."
    assert problem(asks, "1").prompt == asks, "it is not asked for again"


def test_hostile_answers_cost_nobody_a_verdict():
    """Expressions that would keep a computer algebra system busy for ever, or blow a stack, are
    wrong at once. So are loops of units: a pattern once tried each way to read each."""
    texts = [*BOMBS, *(row[2] for row in ANSWERS if row[3] == "too large"), *["19"] * 9]
    nineteen = problem("What?", "19")
    with VerifierPool(2, time_limit=5, memory_gib=2) as pool:
        verdicts = judge(pool, [(nineteen, rf"</think>\boxed{{{text}}}") for text in texts])
    for text, verdict in zip(texts, verdicts):
        assert (verdict.correct, verdict.failure) == (text == "19", None), text[:80]
