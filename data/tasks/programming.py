"""Programming problems with unit tests, in the forms of DeepCoder's data.

The program is the last fenced block after the last `</think>`. A test gives it its standard input
and compares what it writes, or calls one function and compares what that returns. Each test is a
run of its own in the sandbox (sandbox.py). Outputs are compared outside, so the wanted ones never
enter the process that runs the program.
"""

import json
import math
import re

from data import Problem, after_thinking, sandbox

STDIN_INSTRUCTION = (
    "Write a Python program that reads the input from standard input and writes the answer to"
    " standard output."
    " Put the whole program in one fenced block:\n```python\n# your program\n```"
)
CALL_INSTRUCTION = (
    "Write a Python function `{name}`. Put your whole code in one fenced block:"
    "\n```python\n{start}\n```"
)
MOST_TESTS = 15  # of a problem; the longest inputs count, as in DeepCoder
LONGEST_TEST = 200_000  # characters; longer tests are left out, unless all are longer
SECONDS = 10.0  # of CPU time, the most for one test; less if the verifier's time is nearly over

# This runs in the sandbox: the program as `__main__`, or the function that an argument names; its
# result is JSON.
RUNNER = """
import json, os, sys, types
module = types.ModuleType("__main__" if len(sys.argv) == 1 else "program")
runner, sys.modules["__main__"] = sys.modules["__main__"], module
sys.modules[module.__name__] = module  # where pickle looks for its classes
names = vars(module)
exec("from typing import *; from collections import *; from itertools import *\\n"
     "from functools import *; from heapq import *; from bisect import *\\n"
     "import collections, itertools, functools, heapq, bisect\\n"
     "import math, random, re, string, sys, typing", names)
program = compile(open("program.py", encoding="utf-8").read(), "program.py", "exec")
if len(sys.argv) == 1:
    exec(program, names)
else:
    results = os.dup(1)
    os.dup2(2, 1)  # what the program prints is no result, and is lost
    arguments = json.load(sys.stdin)
    exec(program, names)
    owner = names["Solution"]() if "Solution" in names else None
    function = getattr(owner, sys.argv[1], None) or names[sys.argv[1]]
    result = {"returned": function(*arguments)}
    data = json.dumps(result, default=lambda x: x.tolist()).encode()  # numbers and arrays of numpy
    os.write(results, data)
"""


def problem(text: str, tests, starter_code: str = "", instruction: str | None = None) -> Problem:
    """The prompt for a problem, and its tests in one form. Raises ValueError for tests in a form
    that is not known."""
    function, cases = read_tests(tests)
    usual = [case for case in cases if characters(case) <= LONGEST_TEST]
    usual = usual or [min(cases, key=characters)]
    longest = sorted(usual, key=lambda case: characters(case[0]), reverse=True)[:MOST_TESTS]
    wanted = STDIN_INSTRUCTION
    if function:
        start = starter_code or f"def {function}(...):"
        wanted = CALL_INSTRUCTION.format(name=function, start=start)
    answer = json.dumps({"function": function, "tests": longest})
    return Problem(worded(text, instruction, wanted), answer, task="data.tasks.programming")


def worded(text: str, instruction: str | None = None, wanted: str = STDIN_INSTRUCTION) -> str:
    """A problem as the model gets it: what is wanted stands behind it, and then the instruction."""
    return f"{text.strip()}\n\n{wanted}\n\n{instruction or ''}".strip()


def characters(value) -> int:
    """The length of a value as JSON."""
    return len(json.dumps(value))


def read_tests(tests) -> tuple[str | None, list]:
    """The function to be called (None: standard input to output) and pairs of an input and the
    outputs that are right.

    Known forms, as JSON text or as lists and dicts. Each is a configuration of
    DeepCoder-Preview-Dataset:

        taco            {"inputs": [...], "outputs": [...], "fn_name": optional}
        primeintellect  [{"type": "stdin_stdout" or "function_call", "input": ..., "output": ...,
                          "fn_name": ...}, ...]
        lcbv5           [{"testtype": "stdin" or "functional", "input": lines of JSON,
                          "output": JSON, "metadata": {"func_name": ...}}, ...]
        codeforces      [{"input": ..., "output": ...}, ...]
    """
    try:
        tests = parsed(tests)
        if isinstance(tests, dict):
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            tests = [{**tests, "input": given, "output": wanted} for given, wanted in pairs]
        names, given, right = zip(*map(read_test, tests))
        (name,) = {*names}
    except Exception as error:  # of many kinds: anything may stand there
        raise ValueError(
            f"the tests have no form that is known, or call different functions: {error!r}"
        ) from None
    return name, [*zip(given, right)]


def parsed(value):
    """A value of JSON, which may be given as text."""
    return json.loads(value) if isinstance(value, str) else value


def read_test(test: dict) -> tuple[str | None, object, list]:
    """The function that a test calls, or None; its input; and the outputs that are right."""
    given, wanted, metadata = test["input"], test["output"], parsed(test.get("metadata") or {})
    name = test.get("fn_name") or metadata.get("func_name")
    if not name:
        if test.get("testtype", test.get("type")) in ("functional", "function_call"):
            raise ValueError("it calls a function, and does not name it")
        return None, as_text(given), [as_text(wanted)]
    if test.get("testtype") == "functional":
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        return name, arguments, [json.loads(wanted)]
    # [5] stands for 5, or for itself.
    alone = wanted if isinstance(wanted, list) and len(wanted) == 1 else []
    return name, parsed(given), [wanted, *alone]


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
    answer = json.loads(problem.answer)
    return all(
        passes(blocks[-1], answer["function"], given, wanted, time_left())
        for given, wanted in answer["tests"]
    )


def passes(program: str, function: str | None, given, wanted: list, seconds: float) -> bool:
    """One test: whether the program ends in time, with status 0, and its output is one of those
    wanted. seconds: of CPU time that are left."""
    arguments = ["-c", RUNNER] + ([function] if function else [])
    stdin = (json.dumps(given) if function else given).encode(errors="surrogatepass")
    longest = 10_000 + 4 * max(map(characters, wanted))
    output = sandbox.run(arguments, stdin, min(SECONDS, seconds), longest, source=program)
    if output is None:
        return False
    text = output.decode(errors="replace")
    if not function:
        return any(same_text(text, output) for output in wanted)
    try:
        returned = json.loads(text)["returned"]
        return any(same_value(returned, output) for output in wanted)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return False


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


def same_value(returned, wanted) -> bool:
    """Whether two values of JSON are the same. Fractions may differ by rounding."""
    if type(wanted) is float and type(returned) in (int, float):
        return math.isclose(returned, wanted, rel_tol=1e-6, abs_tol=1e-9)
    if type(returned) is not type(wanted):
        return False
    if type(wanted) is list:
        return len(returned) == len(wanted) and all(map(same_value, returned, wanted))
    return returned == wanted
