"""Programming problems: DeepCoder's forms of tests, verdicts, and honest programs in the
sandbox."""

import json

import pytest
from programs import CALLED, IN_AND_OUT, block, read_programs

from data.tasks import programming

# --- problems and verdicts ------------------------------------------------------------------------

FORMS = {
    "taco, standard input": ({"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}, None),
    "taco, lines": ({"inputs": [["1 2", ""]], "outputs": [["3"]]}, None),
    "taco, a function": (
        {"inputs": [[1, 2], [5, 6]], "outputs": [[3], 11], "fn_name": "add"},
        "add",
    ),
    "primeintellect": ([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}], None),
    "primeintellect, a function": (
        [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
        "add",
    ),
    "lcbv5": (
        [{"testtype": "stdin", "input": "1 2", "output": "3", "metadata": {"func_name": None}}],
        None,
    ),
    "lcbv5, a function": (
        [
            {
                "testtype": "functional",
                "input": "1\n2",
                "output": "3",
                "metadata": {"func_name": "add"},
            }
        ],
        "add",
    ),
    "codeforces": ([{"input": "1 2", "output": "3"}], None),
}


def test_each_form_of_tests_tells_right_from_wrong():
    for name, (tests, function) in FORMS.items():
        right = "print(sum(map(int, input().split())))"
        wrong = "a, b = map(int, input().split())\nprint(a * b)"
        if function:
            right = f"def {function}(a, b):\n    print('not a result')\n    return a + b"
            wrong = f"def {function}(a, b):\n    return a - b"
        problem = programming.problem("Add two numbers.", tests)
        assert problem == programming.problem("Add two numbers.", json.dumps(tests)), name
        assert problem.task == "data.tasks.programming" and "```python" in problem.prompt
        assert function is None or f"`{function}`" in problem.prompt, name
        assert programming.score(problem, block(right)) and not programming.score(
            problem, block(wrong)
        ), name


def test_tests_in_no_known_form_are_refused():
    different = [{"input": [1], "output": 1, "fn_name": name} for name in "fg"]
    for tests in ([], "{]", "3", {"inputs": ["1"], "outputs": []}, [{"input": "1"}], different):
        with pytest.raises(ValueError, match="no form that is known, or call different functions"):
            programming.problem("Add.", tests)


def test_the_fifteen_longest_tests_are_kept():
    tests = [{"input": "1" * n, "output": "x"} for n in range(1, 31)]
    kept = json.loads(programming.problem("Add.", tests).answer)["tests"]
    assert [len(given) for given, _ in kept] == list(range(30, 15, -1))
    tests += [{"input": "1" * programming.LONGEST_TEST, "output": "x"}]
    assert json.loads(programming.problem("Add.", tests).answer)["tests"] == kept, (
        "giant tests are left out"
    )
    assert len(json.loads(programming.problem("Add.", tests[-1:]).answer)["tests"]) == 1


COMPLETIONS = [  # and whether they are right
    (block("print(42)"), True),
    ("```python\nprint(42)\n```", True),  # without thinking
    ("```python\nprint(1)\n```\n</think>\n```\nprint(42)\n```", True),
    (block("print(1)") + "\n" + block("print(42)"), True),  # the last block counts
    (block("print(42)") + "\n" + block("print(1)"), False),
    ("<think>It is\n```python\nprint(42)\n```", False),  # thinking that was never closed
    ("<think>Hm</think>```python\nprint(42)\n```", True),
    ("```python\nprint(42)\n```</think>That was it.", False),  # only what comes after the thinking
    ("print(42)", False),
    ("```python\nprint(42)", False),  # not closed
    ("", False),
    (block("import sys; sys.stdin.read(); print('42\\n\\n')"), True),
    (block("print(42); raise SystemExit(0)"), True),
    (block("print(42); raise SystemExit(3)"), False),
    (block("print(42, 42)"), False),
    (block("print('42\\n42')"), False),
    (block("print(42.0)"), False),
    (block("print(4); print(2)"), False),
    # as judges have it
    (block("from __future__ import annotations\nprint(List and math.floor(42.5))"), True),
    (block("x = '\ud800'\nprint(42)"), False),  # a lone surrogate
    (block("import os\nos.write(1, '\\ud800'.encode(errors='surrogatepass'))"), False),
]


def test_verdicts_on_a_program():
    for text, right in COMPLETIONS:
        assert programming.score(IN_AND_OUT, text) is right, repr(text)


RETURNED = [  # the wanted value, what the function returns, whether it is right
    (3, "3", True),
    (3, "3.0", False),
    (3, "'3'", False),
    (3, "True", False),
    (0.5, "0.5000000001", True),
    (0.5, "0.51", False),
    ([1, [2]], "(1, (2,))", True),
    ([1, 2], "[2, 1]", False),
    (None, "None", True),
    (True, "True", True),
    (True, "1", False),
    ({"a": 1}, "{'a': 1}", True),
    (1, "float('nan')", False),
    ([1], "[1, 2]", False),
    ("a", "'a'", True),
    (3, "{1, 2}", False),
    (1.0, "1", True),
    # too large for a float
    (0.5, "10**400", False),
    ([0.5], "[-10**400]", False),
    (0.5, "10**5000", False),
    ("a", "'\\ud800'", False),
    ("\ud800", "'a'", False),
    ("\ud800", "'\\ud800'", True),
]


def test_what_a_function_returns_is_compared_as_json():
    for wanted, returned, right in RETURNED:
        test = {
            "testtype": "functional",
            "input": "0",
            "output": json.dumps(wanted),
            "metadata": {"func_name": "f"},
        }
        program = f"class Solution:\n    def f(self, x: List[int]):\n        return {returned}"
        assert programming.score(programming.problem("Do.", [test]), block(program)) is right, (
            wanted,
            returned,
        )


def test_decimal_fractions_are_compared_up_to_rounding_and_nothing_else_is():
    same = programming.same_text
    assert same("0.3333333333\n", "0.333333333") and same("1 0.50  \n\n\n", "1 0.5")
    assert not same("0.334", "0.333") and not same("nan", "0.5") and not same("inf", "1.0")
    assert not same("1_0.0", "10.0")
    assert (
        not same("1000001", "1000000")
        and not same("a b", "ab")
        and not same("", "1")
        and not same("1\n\n2", "1\n2")
    )


def test_a_lone_surrogate_in_a_test_makes_no_error():
    for given, wanted in (("\ud800", "42"), ("1", "a\udc80b")):
        problem = programming.problem("Do.", [{"input": given, "output": wanted}])
        assert programming.score(problem, block("input()\nprint(42)")) is (wanted == "42")


BUSY = "import time\nwhile time.process_time() < {seconds}: pass\nprint(42)"
TIMES = [  # of a verdict within .9 seconds: the number of tests, the program, whether it is right
    (1, "import time\ntime.sleep(1.2)\nprint(42)", True),  # waits, as on a busy machine
    (1, "import time\ntime.sleep(60)\nprint(42)", False),
    (1, BUSY.format(seconds=0.98), False),
    (3, BUSY.format(seconds=0.2), True),
    (3, BUSY.format(seconds=0.5), False),
]


def test_cpu_time_decides_and_the_clock_is_a_wider_limit(monkeypatch):
    monkeypatch.setenv("SCORE_SECONDS", "1")
    for number_of_tests, program, right in TIMES:
        problem = programming.problem("Do.", number_of_tests * [{"input": "", "output": "42"}])
        assert programming.score(problem, block(program)) is right, program


# --- honest programs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "group, programs", read_programs("honest_programs.txt").items(), ids=["run", "called", "numpy"]
)
def test_honest_programs_are_right(group, programs):
    """They read 41 and 1 and write 42, or they add."""
    problem = CALLED if "functions" in group else IN_AND_OUT
    texts = {name: block(program) for name, program in programs.items()}
    assert [name for name in texts if not programming.score(problem, texts[name])] == []
