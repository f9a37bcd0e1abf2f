"""Programming problems: DeepCoder's forms of tests, verdicts, and honest programs in the
sandbox."""

import json

import pytest
from programs import CALLED, IN_AND_OUT, block, read_programs, require_verdicts

from data.tasks import programming

# --- problems and verdicts ------------------------------------------------------------------------

# Of taco, primeintellect, lcbv5 and codeforces.
FORMS = r"""
{"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}
{"inputs": [["1 2", ""]], "outputs": [["3"]]}
{"inputs": [[1, 2], [5, 6]], "outputs": [[3], 11], "fn_name": "add"}
[{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}]
[{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}]
[{"testtype": "stdin", "input": "1 2", "output": "3", "metadata": {"func_name": null}}]
[{"testtype": "functional", "input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}]
[{"input": "1 2 \ud800", "output": "3"}]
"""


def test_each_form_of_tests_tells_right_from_wrong():
    for tests in FORMS.strip().split("\n"):
        program = "a, b, *_ = input().split()\nprint(int(a) {} int(b))"
        if "add" in tests:
            program = "def add(a, b):\n    print('not a result')\n    return a {} b"
        problem = programming.problem("Add two numbers.", tests)
        assert problem == programming.problem("Add two numbers.", json.loads(tests)), tests
        assert problem.task == "data.tasks.programming" and "```python" in problem.prompt
        assert ("`add`" in problem.prompt) is ("add" in tests), tests
        for sign in "+*":
            right = programming.score(problem, block(program.format(sign)))
            assert right is (sign == "+"), tests


# The last two call different functions.
NO_FORMS = """
[]
{]
3
{"inputs": ["1"], "outputs": []}
[{"input": "1"}]
[{"input": [1], "output": 1, "fn_name": "f"}, {"input": [1], "output": 1, "fn_name": "g"}]
[{"input": [1], "output": 1, "fn_name": "f"}, {"input": "1", "output": "1"}]
"""


def test_tests_in_no_known_form_are_refused():
    for tests in NO_FORMS.strip().split("\n"):
        with pytest.raises(ValueError, match="no form"):
            programming.problem("Add.", tests)


def test_the_fifteen_longest_tests_are_kept():
    giant = programming.LONGEST_TEST
    usual = [*range(30, 0, -1)]
    for lengths, kept in ((usual, usual[:15]), ([giant, *usual], usual[:15]), ([giant], [giant])):
        tests = [{"input": "1" * length, "output": "x"} for length in sorted(lengths)]
        answer = json.loads(programming.problem("Add.", tests).answer)
        assert [len(given) for given, _ in answer["tests"]] == kept


# [ ] stand around a program in its block behind the thinking.
COMPLETIONS = r"""
right | [print(42)]
right | ```python⏎print(42)⏎```
right | ```python⏎print(1)⏎```⏎</think>⏎```⏎print(42)⏎```
right | [print(1)]⏎[print(42)]
wrong | [print(42)]⏎[print(1)]
wrong | <think>It is⏎```python⏎print(42)⏎```
right | <think>Hm</think>```python⏎print(42)⏎```
wrong | ```python⏎print(42)⏎```</think>That was it.
wrong | print(42)
wrong | ```python⏎print(42)
wrong |
right | [import sys; sys.stdin.read(); print('42\n\n')]
right | [print(42); raise SystemExit(0)]
wrong | [print(42); raise SystemExit(3)]
wrong | [print(42, 42)]
wrong | [print('42\n42')]
wrong | [print(42.0)]
wrong | [print(4); print(2)]
right | [from __future__ import annotations⏎print(List and math.floor(42.5))]
wrong | [x = '�'⏎print(42)]
wrong | [import os⏎os.write(1, '\ud800'.encode(errors='surrogatepass'))]
"""


def test_verdicts_on_a_program():
    start, end = block("⏎").split("⏎")
    table = COMPLETIONS.replace("[", start.replace("\n", "⏎")).replace("]", end.replace("\n", "⏎"))
    require_verdicts(table.replace("�", "\ud800"), lambda text: programming.score(IN_AND_OUT, text))


# The verdict, what the function returns, and what is wanted, in JSON.
RETURNED = r"""
right | 3 | 3
wrong | 3.0 | 3
wrong | '3' | 3
wrong | True | 3
right | 0.5000000001 | 0.5
wrong | 0.51 | 0.5
right | (1, (2,)) | [1, [2]]
wrong | [2, 1] | [1, 2]
right | None | null
right | True | true
wrong | 1 | true
right | {'a': 1} | {"a": 1}
wrong | float('nan') | 1
wrong | [1, 2] | [1]
right | 'a' | "a"
wrong | {1, 2} | 3
right | 1 | 1.0
wrong | 10**400 | 0.5
wrong | [-10**400] | [0.5]
wrong | 10**5000 | 0.5
wrong | '\ud800' | "a"
wrong | 'a' | "\ud800"
right | '\ud800' | "\ud800"
"""


def test_what_a_function_returns_is_compared_as_json():
    def score(returned, wanted):
        test = {"testtype": "functional", "input": "0", "output": wanted, "fn_name": "f"}
        program = f"class Solution:\n    def f(self, x: List[int]):\n        return {returned}"
        return programming.score(programming.problem("Do.", [test]), block(program))

    require_verdicts(RETURNED, score)


# The verdict, what is written, and what is wanted.
TEXTS = r"""
right | 0.3333333333⏎ | 0.333333333
right | 1 0.50  ⏎⏎⏎ | 1 0.5
wrong | 0.334 | 0.333
wrong | nan | 0.5
wrong | inf | 1.0
wrong | 1_0.0 | 10.0
wrong | 1000001 | 1000000
wrong | a b | ab
wrong | | 1
wrong | 1⏎⏎2 | 1⏎2
"""


def test_decimal_fractions_are_compared_up_to_rounding_and_nothing_else_is():
    require_verdicts(TEXTS, programming.same_text)


# Of a verdict within .9 seconds: the number of tests, and what the program does in each.
SLOW = """
right | 1 | time.sleep(1.2)
wrong | 1 | time.sleep(60)
wrong | 1 | busy(0.98)
right | 3 | busy(0.1)
wrong | 3 | busy(0.5)
"""
PROGRAM = """
import time
def busy(seconds):
    while time.process_time() < seconds: pass
{}
print(42)
"""


def test_cpu_time_decides_and_the_clock_is_a_wider_limit(monkeypatch):
    """One that sleeps waits, as on a busy machine."""
    monkeypatch.setenv("SCORE_SECONDS", "1")
    of_tests = lambda number: programming.problem("Do.", number * [{"input": "", "output": "42"}])
    require_verdicts(
        SLOW,
        lambda number, call: programming.score(of_tests(int(number)), block(PROGRAM.format(call))),
    )


# --- honest programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("group, programs", read_programs("honest_programs.txt").items())
def test_honest_programs_are_right(group, programs):
    """They read 41 and 1 and write 42, or they add."""
    problem = CALLED if "functions" in group else IN_AND_OUT
    texts = {name: block(program) for name, program in programs.items()}
    assert [name for name in texts if not programming.score(problem, texts[name])] == []
