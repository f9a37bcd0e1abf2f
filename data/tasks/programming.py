"""Programming problems with unit tests, in the forms of DeepCoder's data.

The program is the last fenced block after the last `</think>`. A test gives it its standard input
and compares what it writes. Each test is a run of its own in the sandbox (sandbox.py). Outputs are
compared outside, so the wanted ones never enter the process that runs the program.
"""

import json
import math
import re

from data import Problem, after_thinking, sandbox

INSTRUCTION = (
    "Write a Python program that reads the input from standard input and writes the answer to"
    " standard output."
    " Put the whole program in one fenced block:\n```python\n# your program\n```"
)
MOST_TESTS = 15  # of a problem; the longest inputs count, as in DeepCoder
LONGEST_TEST = 200_000  # characters; longer tests are left out, unless all are longer
SECONDS = 10.0  # of CPU time, the most for one test; less if the verifier's time is nearly over

# This runs in the sandbox: the program as `__main__`.
RUNNER = """
import sys, types
module = types.ModuleType("__main__")
runner, sys.modules["__main__"] = sys.modules["__main__"], module  # where pickle looks for classes
names = vars(module)
exec("from typing import *; from collections import *; from itertools import *\\n"
     "from functools import *; from heapq import *; from bisect import *\\n"
     "import collections, itertools, functools, heapq, bisect\\n"
     "import math, random, re, string, sys, typing", names)
exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), names)
"""


def problem(text: str, tests, instruction: str | None = None) -> Problem:
    """The prompt for a problem, and its tests in one form. Raises ValueError for tests in a form
    that is not known."""
    cases = read_tests(tests)
    usual = [case for case in cases if characters(case) <= LONGEST_TEST]
    usual = usual or [min(cases, key=characters)]
    longest = sorted(usual, key=lambda case: characters(case[0]), reverse=True)[:MOST_TESTS]
    return Problem(worded(text, instruction), json.dumps(longest), task="data.tasks.programming")


def worded(text: str, instruction: str | None = None) -> str:
    """A problem as the model gets it: INSTRUCTION stands behind it, and then the other one."""
    return f"{text.strip()}\n\n{INSTRUCTION}\n\n{instruction or ''}".strip()


def characters(value) -> int:
    """The length of a value as JSON."""
    return len(json.dumps(value))


def read_tests(tests) -> list[tuple[str, str]]:
    """Pairs of an input and the output that is right. ValueError if there are none.

    Known forms, as JSON text or as lists and dicts. Each is a configuration of
    DeepCoder-Preview-Dataset:

        taco            {"inputs": [...], "outputs": [...]}
        primeintellect  [{"type": "stdin_stdout", "input": ..., "output": ...}, ...]
        lcbv5           [{"testtype": "stdin", "input": ..., "output": ..., "metadata": ...}, ...]
        codeforces      [{"input": ..., "output": ...}, ...]

    Tests that call a function, of the first three, are refused.
    """
    try:
        tests = parsed(tests)
        if isinstance(tests, dict):
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            tests = [{**tests, "input": given, "output": wanted} for given, wanted in pairs]
        first, *others = map(read_test, tests)
    except Exception as error:  # of many kinds: anything may stand there
        raise ValueError(
            f"the tests have no form that is known, or call a function: {error!r}"
        ) from None
    return [first, *others]


def parsed(value):
    """A value of JSON, which may be given as text."""
    return json.loads(value) if isinstance(value, str) else value


def read_test(test: dict) -> tuple[str, str]:
    """The input of a test, and the output that is right."""
    metadata, kind = parsed(test.get("metadata") or {}), test.get("testtype", test.get("type"))
    calls = test.get("fn_name") or metadata.get("func_name")
    if calls or kind in ("functional", "function_call"):
        raise ValueError("a program that reads its standard input is wanted")
    return as_text(test["input"]), as_text(test["output"])


def as_text(value) -> str:
    """Standard input or output: a text, or a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def score(problem: Problem, completion: str) -> bool:
    """Whether the program, the last fenced block after the thinking, passes all tests."""
    time_left = sandbox.time_of_verdict()  # for all tests
    sandbox.require_sandbox()  # which takes time too
    fenced = r"^```[^\n`]*\n(.*?)^```"
    blocks = re.findall(fenced, after_thinking(completion), flags=re.MULTILINE | re.DOTALL)
    if not blocks:
        return False
    tests = json.loads(problem.answer)
    return all(passes(blocks[-1], given, wanted, time_left()) for given, wanted in tests)


def passes(program: str, given: str, wanted: str, seconds: float) -> bool:
    """One test: whether the program ends in time, with status 0, and its output is the wanted one.
    seconds: of CPU time that are left."""
    stdin = given.encode(errors="surrogatepass")
    longest = 10_000 + 4 * characters(wanted)
    output = sandbox.run(["-c", RUNNER], stdin, min(SECONDS, seconds), longest, source=program)
    return output is not None and same_text(output.decode(errors="replace"), wanted)


def same_text(written: str, wanted: str) -> bool:
    """Whether two texts have the same words on the same lines. Blank lines at the end do not
    count."""
    words, wanted_words = (
        re.findall(r"\S+|\n", "\n".join(text.rstrip().splitlines())) for text in (written, wanted)
    )
    return len(words) == len(wanted_words) and all(map(same_word, words, wanted_words))


def same_word(written: str, wanted: str) -> bool:
    """Whether two words are the same. Decimal fractions may differ by rounding."""
    number = r"[+-]?\d{1,40}(\.\d{1,40})?([eE][+-]?\d{1,3})?"
    if "." in wanted and re.fullmatch(number, wanted) and re.fullmatch(number, written):
        return math.isclose(float(written), float(wanted), rel_tol=1e-6, abs_tol=1e-9)
    return written == wanted
