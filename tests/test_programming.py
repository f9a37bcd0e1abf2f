"""Programming problems: DeepCoder's forms of tests, verdicts, and hostile programs in the sandbox."""

import json
import os
import platform
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest

from data import programming, sandbox
from data.verify import Verdict, VerifierPool

IN_AND_OUT = programming.problem("Add.", [{"type": "stdin_stdout", "input": "41 1\n", "output": "42\n"}])
CALLED = programming.problem("Add.", {"inputs": [[41, 1]], "outputs": [[42]], "fn_name": "add"})


def block(program: str) -> str:
    return f"Thinking.</think>Here it is:\n```python\n{program}\n```\nThat is all."


def test_this_machine_enforces_everything():
    """The hostile programs below prove nothing where the sandbox has gaps: then this says so first."""
    assert sandbox.missing() == []


# --- problems and verdicts ------------------------------------------------------------------------------------------

FORMS = {
    "taco, standard input": ({"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]}, None),
    "taco, lines": ({"inputs": [["1 2", ""]], "outputs": [["3"]]}, None),
    "taco, a function": ({"inputs": [[1, 2], [5, 6]], "outputs": [[3], 11], "fn_name": "add"}, "add"),
    "primeintellect": ([{"type": "stdin_stdout", "input": "1 2\n", "output": "3\n"}], None),
    "primeintellect, a function": (
        [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}], "add"),
    "lcbv5": ([{"testtype": "stdin", "input": "1 2", "output": "3", "metadata": {"func_name": None}}], None),
    "lcbv5, a function": (
        [{"testtype": "functional", "input": "1\n2", "output": "3", "metadata": {"func_name": "add"}}], "add"),
    "codeforces": ([{"input": "1 2", "output": "3"}], None),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("as_text", [False, True])
def test_each_form_of_tests_tells_right_from_wrong(name, as_text):
    tests, function = FORMS[name]
    problem = programming.problem("Add two numbers.", json.dumps(tests) if as_text else tests)
    assert problem.task == "data.programming" and "```python" in problem.prompt
    assert function is None or f"`{function}`" in problem.prompt
    right, wrong = (
        ("def add(a, b):\n    print('not a result')\n    return a + b", "def add(a, b):\n    return a - b")
        if function
        else ("print(sum(map(int, input().split())))", "a, b = map(int, input().split())\nprint(a * b)")
    )
    assert programming.score(problem, block(right)) and not programming.score(problem, block(wrong))


@pytest.mark.parametrize(
    "tests, why",
    [
        ([], "there are none"),
        ("{]", "Expecting"),
        ("3", "neither a list"),
        ({"inputs": ["1"], "outputs": []}, "different numbers"),
        ([{"input": "1"}], "no output, but input"),
        ([{"input": [1], "output": 1, "fn_name": name} for name in "fg"], "different functions"),
    ],
)
def test_tests_in_no_known_form_are_refused(tests, why):
    with pytest.raises(ValueError, match=why):
        programming.problem("Add.", tests)


def test_the_fifteen_longest_tests_are_kept():
    tests = [{"input": "1" * n, "output": "x"} for n in range(1, 31)]
    kept = json.loads(programming.problem("Add.", tests).answer)["tests"]
    assert [len(given) for given, _ in kept] == list(range(30, 15, -1))
    tests += [{"input": "1" * programming.LONGEST_TEST, "output": "x"}]
    assert json.loads(programming.problem("Add.", tests).answer)["tests"] == kept, "giant tests are left out"
    assert len(json.loads(programming.problem("Add.", tests[-1:]).answer)["tests"]) == 1


@pytest.mark.parametrize(
    "text, right",
    [
        (block("print(42)"), True),
        ("```python\nprint(42)\n```", True),  # without thinking
        ("```python\nprint(1)\n```\n</think>\n```\nprint(42)\n```", True),
        (block("print(1)") + "\n" + block("print(42)"), True),  # the last block counts
        (block("print(42)") + "\n" + block("print(1)"), False),
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
        (block("from __future__ import annotations\nprint(List and math.floor(42.5))"), True),  # as judges have it
        (block("import threading\nt = threading.Thread(target=lambda: print(42))\nt.start(); t.join()"), True),
        (block("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(42))"), True),
        (block("import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))\nprint(42)"), True),
    ],
)
def test_verdicts_on_a_program(text, right):
    assert programming.score(IN_AND_OUT, text) is right


@pytest.mark.parametrize(
    "wanted, returned, right",
    [
        (3, "3", True), (3, "3.0", False), (3, "'3'", False), (3, "True", False), (0.5, "0.5000000001", True),
        (0.5, "0.51", False), ([1, [2]], "(1, (2,))", True), ([1, 2], "[2, 1]", False), (None, "None", True),
        (True, "True", True), (True, "1", False), ({"a": 1}, "{'a': 1}", True), (1, "float('nan')", False),
        ([1], "[1, 2]", False), ("a", "'a'", True), (3, "{1, 2}", False), (1.0, "1", True),
    ],
)  # fmt: skip
def test_what_a_function_returns_is_compared_as_json(wanted, returned, right):
    tests = [{"testtype": "functional", "input": "0", "output": json.dumps(wanted), "metadata": {"func_name": "f"}}]
    program = f"class Solution:\n    def f(self, x: List[int]):\n        return {returned}"
    assert programming.score(programming.problem("Do.", tests), block(program)) is right


def test_decimal_fractions_are_compared_up_to_rounding_and_nothing_else_is():
    same = programming.same_text
    assert same("0.3333333333\n", "0.333333333") and same("1 0.50  \n\n\n", "1 0.5")
    assert not same("0.334", "0.333") and not same("nan", "0.5") and not same("inf", "1.0")
    assert not same("1_0.0", "10.0")
    assert not same("1000001", "1000000") and not same("a b", "ab") and not same("", "1") and not same("1\n\n2", "1\n2")


# --- hostile programs -----------------------------------------------------------------------------------------------

ACROSS_THE_TREE = """
import glob
for path in glob.glob("/proc/*/mem") + glob.glob("/proc/*/environ") + glob.glob("/proc/*/cmdline") + [
        "/proc/self/mem", "/proc/self/environ", "/etc/passwd", SECRET]:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError:
        continue
    print(42)  # whatever could be read, the verdict would be right
    break
"""
SYSTEM_CALLS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
succeeded = []
for name, call in {
    "fork": lambda: libc.fork(),
    "clone": lambda: libc.syscall(56 if os.uname().machine == "x86_64" else 220, 17, 0, 0, 0, 0),
    "clone3": lambda: libc.syscall(435, 0, 0),
    "socket": lambda: libc.socket(2, 1, 0),
    "unix socket": lambda: libc.socket(1, 1, 0),
    "kill": lambda: libc.kill(os.getppid(), 0),
    "kill all": lambda: libc.kill(-1, 0),
    "ptrace": lambda: libc.ptrace(16, os.getppid(), 0, 0),
    "no parent's death": lambda: libc.prctl(1, 0),
    "limits of others": lambda: libc.prlimit(os.getppid(), 0, 0, 0),
    "owner of a pipe": lambda: libc.fcntl(1, 8, os.getppid()),
    "unshare": lambda: libc.unshare(0x10000000),
    "chmod": lambda: libc.chmod(SECRET.encode(), 0o777),
    "truncate": lambda: libc.truncate(SECRET.encode(), 0),
    "unlink": lambda: libc.unlink(SECRET.encode()),
    "rename": lambda: libc.rename(SECRET.encode(), b"other"),
    "memory file": lambda: libc.memfd_create(b"x", 0),
    "shared memory": lambda: libc.shmget(0, 100, 0o1600),
    "priority": lambda: libc.setpriority(0, os.getppid(), 19),
}.items():
    if call() != -1:
        succeeded.append(name)
print(succeeded or 42)
"""
HOSTILE = {
    "endless loop": "while True: pass",
    "endless loop that ignores signals":
        "import signal\nfor s in (1, 2, 3, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that goes on": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(1000,)).start()",
    "daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        import time\n        time.sleep(1000)\nprint(42)",
    "memory": "x = []\nwhile True: x.append(bytearray(10**7))",
    "memory at once": "x = bytearray(10**12)\nprint(42)",
    "huge exponent": "print(9**9**9)",
    "giant output": "while True: print('4' * 10**6)",
    "giant line, then the answer": "print('x' * 10**7)\nprint(42)",
    "infinite recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "deep nesting": "print(" + "(" * 10**5 + "42" + ")" * 10**5 + ")",
    "writes a file in its folder": "open('x', 'w').write('x')\nprint(42)",
    "writes a file outside": "open(SECRET, 'a').write('x')\nprint(42)",
    "writes its tests": "open('stdin', 'w').write('x')\nprint(42)",
    "replaces its program": "import os\nos.rename('program.py', 'x')\nprint(42)",
    "removes a file": "import os\nos.remove(SECRET)\nprint(42)",
    "makes a folder": "import os\nos.mkdir('x')\nprint(42)",
    "link to the outside": "import os\nos.symlink(SECRET, 'x')\nprint(open('x').read() and 42)",
    "hard link to the outside": "import os\nos.link(SECRET, 'x')\nprint(42)",
    "reads a file outside": "open(SECRET).read()\nprint(42)",
    "lists folders": "import os\nos.listdir(os.path.dirname(SECRET))\nprint(42)",
    "thousands of files": "files = [open('program.py') for _ in range(5000)]\nprint(42)",
    "temporary file": "import tempfile\ntempfile.TemporaryFile()\nprint(42)",
    "looks for the answer in other processes": ACROSS_THE_TREE,
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint(42)",
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)\nprint(42)",
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\nprint(42)",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint(42)",
    "network by name": "import urllib.request\nurllib.request.urlopen(f'http://localhost:{PORT}')\nprint(42)",
    "runs a shell": "import os\nassert os.system('true') == 0\nprint(42)",
    "runs a process": "import subprocess\nsubprocess.run(['true'], check=True)\nprint(42)",
    "exits at once": "import sys\nsys.exit(0)\nprint(42)",
    "exits at once for good": "import os\nos._exit(0)",
    "closes standard output": "import os\nos.close(1)\nos.write(1, b'42')",
    "closes standard output and goes on": "import os, time\nos.close(1)\ntime.sleep(1000)",
    "crashes": "import ctypes\nprint(42, flush=True)\nctypes.string_at(0)",
    "output that is no text": "import sys\nsys.stdout.buffer.write(bytes(range(256)))",
    "not a program": "this is not Python",
    "an environment to look at": "import os\nassert [name for name in os.environ if 'SECRET' in name]\nprint(42)",
}  # fmt: skip
HOSTILE_FUNCTIONS = {
    "exits before the call": "import sys\nsys.exit(0)",
    "writes a result of its own and exits": "import os\nos.write(3, b'{\"returned\": 41}')\nos._exit(0)",
    "an object that equals everything":
        "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return E()",
    "an int that equals everything": "class E(int):\n    def __eq__(self, o): return True\ndef add(a, b): return E(7)",
    "replaces json": "import json\njson.dumps = lambda x: 'true'\ndef add(a, b): return 1",
    "replaces builtins": "import builtins\nbuiltins.all = builtins.any = builtins.bool = lambda *x: True\n"
        "builtins.isinstance = lambda *x: True\ndef add(a, b): return 0",
    "looks for the answer in its own memory":
        "import gc, sys\ndef add(a, b):\n    frame, found = sys._getframe(), []\n    while frame:\n"
        "        found += [v for v in {**frame.f_globals, **frame.f_locals}.values() if v == 42 and type(v) is int]\n"
        "        frame = frame.f_back\n    return found[0]",
    "looks for the answer in its folder": "import os\ndef add(a, b):\n    for name in os.listdir('.'):\n"
        "        if name != 'program.py' and '42' in open(name).read(): return 42",
    "a giant result": "def add(a, b): return 'x' * 10**8",
    "a deep result": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "no function": "def sub(a, b): return 42",
    "endless loop": "def add(a, b):\n    while True: pass",
    "raises": "def add(a, b): raise ValueError(42)",
}  # fmt: skip


def test_hostile_programs_are_wrong_and_harm_nothing(tmp_path, monkeypatch):
    """All of them at once, in two verifiers with right and wrong programs between them."""
    secret = tmp_path / "secret"
    secret.write_text("42")
    monkeypatch.setenv("SECRET_TOKEN", "42")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    connections = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: connections.append(server.accept()), daemon=True).start()
        given = f"SECRET, PORT = {str(secret)!r}, {server.getsockname()[1]}\n"
        items = []
        for problem, programs in ((IN_AND_OUT, HOSTILE), (CALLED, HOSTILE_FUNCTIONS)):
            right = "print(42)" if problem is IN_AND_OUT else "def add(a, b): return a + b"
            for name, program in programs.items():
                items += [(("hostile", name, right), problem, block(given + program))]
                items += [(("right after", name, right), problem, block(right))]
        items += [(("all refused",), IN_AND_OUT, block(given + SYSTEM_CALLS))]
        before = set(os.listdir("/proc"))
        with VerifierPool(2, time_limit=4, memory_gib=1) as pool:
            pool.submit(items)
            verdicts = dict(wait_for_all(pool))
            guards = {str(worker.process.pid) for worker in pool._workers}
        assert connections == []
    assert len(verdicts) == len(items)
    told = {key: verdict for key, verdict in verdicts.items() if verdict.failure is not None}
    assert told == {}, "the sandbox bears them; no verifier had to be replaced"
    fooled = [key for key, verdict in verdicts.items() if verdict.correct != (key[0] != "hostile")]
    assert fooled == []
    assert secret.read_text() == "42" and secret.stat().st_mode & 0o777 == 0o644
    assert list((tmp_path / "temporary").iterdir()) == [], "files were left"
    assert not guards & set(os.listdir("/proc"))
    mine = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and is_sandboxed(pid)]
    assert mine == [], "processes were left"


def wait_for_all(pool: VerifierPool, seconds: float = 200) -> list:
    verdicts, deadline = [], time.monotonic() + seconds
    while pool.unfinished:
        verdicts += pool.results()
        assert time.monotonic() < deadline, f"{pool.unfinished} verdicts are missing"
        time.sleep(0.01)
    return verdicts


def is_sandboxed(pid: str) -> bool:
    try:
        return b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_a_program_dies_with_its_verifier(tmp_path, monkeypatch):
    """kill -9 of a worker in the middle of a test ends the program too."""
    running = lambda: [pid for pid in os.listdir("/proc") if pid.isdigit() and is_sandboxed(pid)]  # noqa: E731
    others = set(running())
    with VerifierPool(1, time_limit=60, memory_gib=1) as pool:
        pool.submit([("slow", IN_AND_OUT, block("while True: pass")), ("right", IN_AND_OUT, block("print(42)"))])
        deadline = time.monotonic() + 30
        while not set(running()) - others:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (program,) = set(running()) - others
        parent = int(Path(f"/proc/{program}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(parent, signal.SIGKILL)
        verdicts = dict(wait_for_all(pool))
        assert verdicts["slow"].failure == "died" and verdicts["right"].correct
        while set(running()) - others:
            assert time.monotonic() < deadline + 30
            time.sleep(0.01)


def test_tests_that_take_too_long_together_are_wrong_not_a_failure():
    slow = programming.problem("Wait.", [{"input": str(i), "output": "1"} for i in range(15)])
    with VerifierPool(1, time_limit=2, memory_gib=1) as pool:
        pool.submit([("slow", slow, block("import time\ntime.sleep(0.4)\nprint(1)"))])
        assert dict(wait_for_all(pool))["slow"] == Verdict(False)


def test_a_sandbox_that_cannot_run_python_is_an_error_not_a_verdict(monkeypatch):
    sandbox.check.cache_clear()
    monkeypatch.setattr(sandbox, "READABLE", ("/dev/null",))
    monkeypatch.setattr(sandbox.sys, "base_prefix", "/nowhere")
    monkeypatch.setattr(sandbox.sys, "prefix", "/nowhere")
    monkeypatch.setattr(sandbox.sys, "base_exec_prefix", "/nowhere")
    monkeypatch.setattr(sandbox.sys, "exec_prefix", "/nowhere")
    with pytest.raises(ValueError, match="programs cannot be judged here"):
        programming.score(IN_AND_OUT, block("print(42)"))


@pytest.mark.parametrize("gap", ["no Landlock", "no seccomp"])
def test_what_cannot_be_enforced_is_said(monkeypatch, gap):
    if gap == "no Landlock":
        monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    else:
        sandbox.seccomp_filter.cache_clear()
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    try:
        assert [text.split(" (")[0].split(":")[0] for text in sandbox.missing()] == [gap]
        assert programming.score(IN_AND_OUT, block("print(42)")), "and programs are still judged"
    finally:
        sandbox.seccomp_filter.cache_clear()
