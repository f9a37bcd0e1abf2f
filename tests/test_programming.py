"""Programming problems: DeepCoder's forms of tests, verdicts, and honest programs in the
sandbox."""

import json

import pytest

from data.tasks import programming

IN_AND_OUT = programming.problem(
    "Add.", [{"type": "stdin_stdout", "input": "41 1\n", "output": "42\n"}]
)
CALLED = programming.problem("Add.", {"inputs": [[41, 1]], "outputs": [[42]], "fn_name": "add"})


def block(program: str) -> str:
    return f"Thinking.</think>Here it is:\n```python\n{program}\n```\nThat is all."


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
    for tests, why in [
        ([], "there are none"),
        ("{]", "Expecting"),
        ("3", "neither a list"),
        ({"inputs": ["1"], "outputs": []}, "different numbers"),
        ([{"input": "1"}], "no output, but input"),
        ([{"input": [1], "output": 1, "fn_name": name} for name in "fg"], "different functions"),
    ]:
        with pytest.raises(ValueError, match=why):
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

HONEST = {  # each reads 41 and 1, and writes 42
    "input()": "print(sum(map(int, input().split())))",
    "input() until the end": "total = 0\ntry:\n    while True: total += sum(map(int,"
    " input().split()))\n"
    "except EOFError: print(total)",
    "input = sys.stdin.readline": "import sys\ninput = sys.stdin.readline\n"
    "print(sum(map(int, input().split())))",
    "sys.stdin.read()": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "sys.stdin.buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "for line in sys.stdin": "import sys\n"
    "for line in sys.stdin: print(sum(map(int, line.split())))",
    "sys.stdin.readlines()": "import sys\n"
    "print(sum(int(word) for line in sys.stdin.readlines() for word in line.split()))",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "open('/dev/stdin')": "print(sum(map(int, open('/dev/stdin').read().split())))",
    "fileinput": "import fileinput\nfor line in fileinput.input(): print(sum(map(int,"
    " line.split())))",
    "os.read": "import os\nprint(sum(map(int, os.read(0, 10**6).split())))",
    "os.read of all there is": "import io, os\nlines = io.BytesIO(os.read(0,"
    " os.fstat(0).st_size))\n"
    "print(sum(map(int, lines.readline().split())))",
    "a mapping of standard input": "import mmap\nwith mmap.mmap(0, 0, access=mmap.ACCESS_READ) as"
    " text:\n"
    "    print(sum(map(int, text.readline().split())))",
    "csv of standard input": "import csv, sys\nfor row in csv.reader(sys.stdin, delimiter=' '):"
    " print(sum(map(int, row)))",
    "selects standard input": "import select, sys\nassert select.select([sys.stdin], [], [],"
    " 1)[0]\n"
    "print(sum(map(int, sys.stdin.readline().split())))",
    "print without end": "print(4, end='')\nprint(2, end='')",
    "print with flush": "print(42, flush=True)",
    "sys.stdout.write": "import sys\nsys.stdout.write('42')",
    "sys.stdout.buffer": "import sys\nsys.stdout.buffer.write(b'42\\n')\nsys.stdout.flush()",
    "os.write": "import os\nos.write(1, b'42\\n')",
    "print to standard error too": "import sys\nprint('reading', file=sys.stderr)\nprint(42)",
    "open('/dev/stdout')": "with open('/dev/stdout', 'w') as file: file.write('42')",
    "a buffer written at exit": "import atexit, io, os, sys\nsys.stdout = io.StringIO()\n"
    "atexit.register(lambda: os.write(1, sys.stdout.getvalue().encode()))\nprint(42)",
    "redirected output": "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as"
    " text: print(42)\n"
    "print(text.getvalue())",
    "exit()": "print(42)\nexit()",
    "sys.exit()": "import sys\nprint(42)\nsys.exit(0)",
    "os._exit(0)": "import os\nprint(42, flush=True)\nos._exit(0)",
    "main()": "def main():\n    a, b = map(int, input().split())\n    print(a + b)\n"
    "if __name__ == '__main__':\n    main()",
    "a class": "class Adder:\n    def __init__(self): self.a, self.b = map(int, input().split())\n"
    "    def run(self): return self.a + self.b\nprint(Adder().run())",
    "import __main__": "import __main__\nx = 42\nprint(__main__.x)",
    "pickles its own classes": "import pickle\nclass Pair:\n    def __init__(self, a, b): self.a,"
    " self.b = a, b\n"
    "pair = pickle.loads(pickle.dumps(Pair(41, 1)))\nprint(pair.a + pair.b)",
    "copies its own objects": "import copy\nclass Pair: a, b = 41, 1\n"
    "pair = copy.deepcopy(Pair())\n"
    "print(pair.a + pair.b)",
    "dataclasses": "from __future__ import annotations\nfrom dataclasses import dataclass, field\n"
    "@dataclass(order=True)\nclass Item:\n    a: int\n"
    "    rest: list[int] = field(default_factory=list)\n"
    "print(max(Item(41), Item(42)).a)",
    "enumerations and named tuples": "import enum\nfrom typing import NamedTuple\n"
    "class Way(enum.IntEnum):\n    UP = 41\n"
    "class Point(NamedTuple):\n    x: int\n    y: int = 1\nprint(sum(Point(Way.UP)))",
    "names that judges import": "print(sum(accumulate([1])) + bisect_left([1], 2) +"
    " int(math.sqrt(1600)))",
    "recursion": "import sys\nsys.setrecursionlimit(10**6)\n"
    "def depth(n): return n and 1 + depth(n - 1)\n"
    "print(depth(4200) // 100)",
    "recursion in a thread with a large stack": "import sys, threading\n"
    "sys.setrecursionlimit(10**6)\n"
    "threading.stack_size(1 << 27)\ndef depth(n): return n and 1 + depth(n - 1)\n"
    "t = threading.Thread(target=lambda: print(depth(42000) // 1000))\nt.start()\nt.join()",
    "a larger stack": "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 <<"
    " 20))\nprint(42)",
    "lru_cache": "@lru_cache(maxsize=None)\ndef f(n): return n if n < 2 else f(n - 1) + f(n - 2)\n"
    "print(f(9) + 8)",
    "generators": "def numbers():\n    yield from map(int, input().split())\nprint(sum(numbers()))",
    "threads": "import threading\nfound = []\n"
    "threads = [threading.Thread(target=found.append, args=(i,)) for i in range(42)]\n"
    "for thread in threads: thread.start()\n"
    "for thread in threads: thread.join()\nprint(len(found))",
    "threads of concurrent.futures": "from concurrent.futures import ThreadPoolExecutor\n"
    "with ThreadPoolExecutor(8) as pool: print(sum(pool.map(int, input().split())))",
    "queues, locks and timers": "import queue, threading\nq, lock = queue.Queue(),"
    " threading.Lock()\n"
    "threading.Timer(0.01, q.put, (42,)).start()\nwith lock: print(q.get(timeout=5))",
    "asyncio.run": "import asyncio\nasync def add(a, b):\n    await asyncio.sleep(0.001)\n"
    "    return a + b\n"
    "async def main(): return sum(await asyncio.gather(add(20, 1), add(20, 1)))\n"
    "print(asyncio.run(main()))",
    "asyncio with threads": "import asyncio\nasync def main(): return await"
    " asyncio.to_thread(input)\n"
    "print(sum(map(int, asyncio.run(main()).split())))",
    "asyncio with a timeout": "import asyncio\nasync def main():\n"
    "    try: await asyncio.wait_for(asyncio.sleep(9), 0.01)\n    except TimeoutError: print(42)\n"
    "asyncio.run(main())",
    "time": "import time\nstart = time.time(), time.perf_counter(), time.process_time()\n"
    "time.sleep(0.001)\n"
    "print(42 if time.time() >= start[0] else 0)",
    "dates": "import datetime, time, zoneinfo\nday = datetime.date(2020, 2, 10) +"
    " datetime.timedelta(days=2)\n"
    "time.localtime(), datetime.datetime.now().astimezone()\nprint(day.day + 30)",
    "random numbers": "import random, secrets, uuid\nrandom.seed(1)\n"
    "secrets.token_hex(), uuid.uuid4(), uuid.uuid1()\n"
    "random.shuffle(numbers := [40, 2])\nprint(sum(numbers))",
    "an alarm": "import signal, time\ndef late(*_): raise TimeoutError\n"
    "signal.signal(signal.SIGALRM, late)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
    "try: time.sleep(9)\nexcept TimeoutError: print(42)",
    "exact numbers": "from decimal import Decimal\nfrom fractions import Fraction\n"
    "print(int(Decimal('41.5') + Decimal(1) / 2) * Fraction(2, 2))",
    "large numbers": "import sys\nsys.set_int_max_str_digits(0)\n"
    "print(len(str(7 ** 49)) + pow(7, 10**18, 7))",
    "much memory": "blocks = [bytearray(10**7) for _ in range(10)]\ndel blocks\n"
    "table = [[0] * 1000 for _ in range(1000)]\nprint(len(table) - 958)",
    "compressed and hashed": "import base64, bz2, hashlib, lzma, struct, zlib\n"
    "data = b''.join(f(b'x' * 99) for f in (zlib.compress, bz2.compress, lzma.compress,"
    " base64.b64encode))\n"
    "print(struct.calcsize('i') * 10 + 2 if hashlib.sha256(data).digest() else hashlib.md5(data))",
    "much of the standard library": "import abc, argparse, ast, calendar, cmath, cProfile, csv,"
    " ctypes, dis, doctest, email, gc, graphlib, html\n"
    "import inspect, io, locale, logging, multiprocessing, numbers, operator, pathlib, platform,"
    " pprint\n"
    "import sched, selectors, shutil, socket, sqlite3, ssl, statistics, subprocess, tempfile,"
    " textwrap, timeit\n"
    "import traceback, tracemalloc, types, unicodedata, unittest, urllib.request, warnings,"
    " weakref, xml.dom\n"
    "platform.machine(), shutil.get_terminal_size(), gc.collect(), timeit.timeit(number=1)\n"
    "print(*sqlite3.connect(':memory:').execute('select 42').fetchone())",
    "asks for its process": "import os, sys\nos.getpid(), os.getcwd(), os.cpu_count(), os.times(),"
    " os.path.exists('x')\n"
    "print(42 if not sys.stdin.isatty() else 0)",
    "its own source": "print(42 if '42' in open('program.py').read() else 0)",
}
HONEST_FUNCTIONS = {  # the same, called
    "a function": "def add(a, b): return a + b",
    "a class": "class Solution:\n    def add(self, a: int, b: int) -> int: return a + b",
    "a class with a memory": "class Solution:\n    def __init__(self): self.seen = {}\n"
    "    def add(self, a, b):\n        self.seen[a] = b\n"
    "        return sum(self.seen.items(), ())[0] + b",
    "recursion": "def add(a, b): return a if b == 0 else add(a + 1, b - 1)",
    "a cache": "@cache\ndef add(a, b): return a + b",
    "a lambda": "add = lambda a, b: a + b",
    "a program that runs by itself too": "def add(a, b): return a + b\n"
    "if __name__ == '__main__': print(add(*input()))",
    "a dataclass": "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass Pair:\n"
    "    a: int\n    b: int\ndef add(a, b): return sum(vars(Pair(a, b)).values())",
    "import __main__": "import __main__\nx = 1\ndef add(a, b): return a + __main__.x",
    "pickles its own classes": "import pickle\nclass Pair: pass\ndef add(a, b):\n"
    "    pair = Pair()\n    pair.sum = a + b\n"
    "    return pickle.loads(pickle.dumps(pair)).sum",
    "threads": "from concurrent.futures import ThreadPoolExecutor\ndef add(a, b):\n"
    "    with ThreadPoolExecutor() as pool: return sum(pool.map(int, (a, b)))",
    "asyncio.run": "import asyncio\nasync def later(x):\n    await asyncio.sleep(0.001)\n"
    "    return x\n"
    "async def both(*xs): return await asyncio.gather(*map(later, xs))\n"
    "def add(a, b): return sum(asyncio.run(both(a, b)))",
}
HONEST_WITH_NUMPY = {
    "an integer": "import numpy as np\ndef add(a, b): return np.int64(a) + b",
    "a sum": "import numpy as np\ndef add(a, b): return np.array([a, b]).sum()",
    "an inverse": "import numpy as np\n"
    "def add(a, b): return np.linalg.inv(np.eye(300) / (a + b))[0, 0].round().astype(int)",
}


@pytest.mark.parametrize(
    "table", [HONEST, HONEST_FUNCTIONS, HONEST_WITH_NUMPY], ids=["run", "called", "numpy"]
)
def test_honest_programs_are_right(table):
    problem = IN_AND_OUT if table is HONEST else CALLED
    wrong = [
        name for name, program in table.items() if not programming.score(problem, block(program))
    ]
    assert wrong == []
