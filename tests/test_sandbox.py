"""The sandbox: hostile programs, one table of them for each line of what docs/data.md says that a
program cannot do."""

import contextlib
import ctypes
import os
import platform
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

from data import sandbox
from data.tasks import programming
from data.verify import Verdict, VerifierPool

IN_AND_OUT = programming.problem(
    "Add.", [{"type": "stdin_stdout", "input": "41 1\n", "output": "42\n"}]
)
CALLED = programming.problem("Add.", {"inputs": [[41, 1]], "outputs": [[42]], "fn_name": "add"})
DOCS = Path(__file__).parent.parent / "docs" / "data.md"


def block(program: str) -> str:
    return f"Thinking.</think>Here it is:\n```python\n{program}\n```\nThat is all."


def test_this_machine_enforces_everything():
    """The hostile programs below prove nothing where the sandbox has gaps: then this says so
    first."""
    assert sandbox.missing() == []


# --- hostile programs -----------------------------------------------------------------------------

START = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def answer(result): print(42 if result != -1 else 0)  # right when a system call has succeeded
"""
ACROSS_THE_TREE = """
import glob
paths = ["/proc/self/mem", "/proc/self/environ", "/etc/passwd", SECRET]
for name in ("mem", "environ", "cmdline", "fd/*"):
    paths += glob.glob(f"/proc/[0-9]*/{name}")
for path in paths:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError:
        continue
    print(42)  # whatever could be read, the verdict would be right
    break
"""
SIGNAL_OF_A_SOCKET = """
import fcntl, socket, struct
a, b = socket.socketpair()
fcntl.ioctl(a, 0x8901, struct.pack("i", VICTIM))  # FIOSETOWN
fcntl.fcntl(a, fcntl.F_SETSIG, 9)
fcntl.fcntl(a, fcntl.F_SETFL, fcntl.fcntl(a, fcntl.F_GETFL) | os.O_ASYNC)
b.send(b"x")
print(42)
"""
THREADS = """
import _thread, threading, time
threading.stack_size(1 << 16)
for _ in range(2500): _thread.start_new_thread(time.sleep, (1000,))
time.sleep(0.5)
print(42, flush=True)
os._exit(0)
"""
CALL_OF_32_BITS = """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, getpid; int 0x80; ret
answer(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))())
"""

CANNOT = {  # what a program cannot do, as docs/data.md has it: programs that print 42 if they can
    "open a file, but Python's own, those below `/usr` and `/lib`, its source and its input": {
        "a file outside": "open(SECRET).read()\nprint(42)",
        "a folder": "os.listdir(os.path.dirname(SECRET))\nprint(42)",
        "a link to the outside": "os.symlink(SECRET, 'x')\nprint(open('x').read() and 42)",
    },
    "write, make, rename or remove a file, even a temporary one": {
        "in its folder": "open('x', 'w').write('x')\nprint(42)",
        "outside": "open(SECRET, 'a').write('x')\nprint(42)",
        "its tests": "open('stdin', 'w').write('x')\nprint(42)",
        "its program": "os.rename('program.py', 'x')\nprint(42)",
        "remove": "os.remove(SECRET)\nprint(42)",
        "rename": "answer(libc.rename(SECRET.encode(), b'other'))",
        "truncate": "answer(libc.truncate(SECRET.encode(), 0))",
        "a folder": "os.mkdir('x')\nprint(42)",
        "a link": "os.link(SECRET, 'x')\nprint(42)",
        "a temporary file": "import tempfile\ntempfile.TemporaryFile()\nprint(42)",
        "in memory": "answer(libc.memfd_create(b'x', 0))",
        "in secret memory": "answer(libc.syscall(447, 0))",
    },
    "change the mode, owner, date or attributes of a file, lock it or watch it": {
        "mode": "answer(libc.chmod(SECRET.encode(), 0o777))",
        "mode of its input": "answer(libc.fchmod(0, 0o777))",
        "owner": "answer(libc.chown(SECRET.encode(), os.getuid(), os.getgid()))",
        "date": "os.utime('program.py')\nprint(42)",
        "attributes": "import fcntl\nfcntl.ioctl(open('program.py'), 0x40086602, b'\\x80' +"
        " bytes(7))\nprint(42)",
        "lease": "answer(libc.fcntl(os.open('program.py', 0), 1024, 1))",
        "lock": "answer(libc.flock(0, 2))",
        "watch": "answer(libc.inotify_init1(0))",
        "watch everything": "answer(libc.fanotify_init(0x200, 0))",
        "signal at a change": "answer(libc.fcntl(os.open('.', 0), 1026, 2))",
    },
    "start a process": {
        "fork": "answer(libc.fork())",
        "bomb": "while True: os.fork()",
        "vfork": "answer(libc.syscall(58, 0x4111, 0, 0, 0, 0))",
        "clone": "answer(libc.syscall(56, 17, 0, 0, 0, 0))",
        "clone3": "answer(libc.syscall(435, (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17), 64))",
        "daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        import time\n"
        "        time.sleep(1000)\nprint(42)",
        "shell": "assert os.system('true') == 0\nprint(42)",
        "subprocess": "import subprocess\nsubprocess.run(['true'], check=True)\nprint(42)",
        "namespace": "answer(libc.unshare(0x10000000))",
    },
    "use the network, or any socket that leads out of it": {
        "connect": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)\nprint(42)",
        "by name": "import urllib.request\nurllib.request.urlopen(f'http://localhost:{PORT}')\n"
        "print(42)",
        "internet": "answer(libc.socket(2, 1, 0))",
        "local": "answer(libc.socket(1, 1, 0))",
        "pair of datagram sockets": "import socket\na, b = socket.socketpair(socket.AF_UNIX,"
        " socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', SOCKET)\nprint(42)",
        "message with an address": "import socket\na, b = socket.socketpair(1, 2)\n"
        "a.sendmsg([b'x'], [], 0, SOCKET)\nprint(42)",
        "io_uring": "answer(libc.syscall(425, 8, (ctypes.c_char * 256)()))",
    },
    "send a signal": {
        "to its parent": "import signal\nos.kill(os.getppid(), signal.SIGKILL)\nprint(42)",
        "to its group": "import signal\nos.killpg(0, signal.SIGKILL)\nprint(42)",
        "to everything": "import signal\nos.kill(-1, signal.SIGKILL)\nprint(42)",
        "through a socket": SIGNAL_OF_A_SOCKET,
        "through standard output": "answer(libc.fcntl(1, 8, VICTIM))",
        "to a thread": "answer(libc.syscall(234, VICTIM, VICTIM, 0))",
    },
    "trace, read or change another process, or ask the kernel for its group, times or limits": {
        "look everywhere": ACROSS_THE_TREE,
        "trace": "answer(libc.ptrace(16, VICTIM, 0, 0))",
        "group": "answer(libc.getpgid(VICTIM))",
        "session": "answer(libc.getsid(VICTIM))",
        "cores": "answer(libc.sched_getaffinity(VICTIM, 128, (ctypes.c_char * 128)()))",
        "time": "answer(libc.clock_gettime(~VICTIM << 3 | 2, (ctypes.c_long * 2)()))",
        "lock that it holds": "import time\nword = ctypes.c_uint(VICTIM)\n"
        "soon = (ctypes.c_long * 2)(int(time.time()) + 1)\n"
        "libc.syscall(202, ctypes.byref(word), 6, 0, soon, 0, 0)\n"
        # no such process, or in vain: so it lives
        "answer(-(ctypes.get_errno() not in (3, 110)))",
        "limits": "answer(libc.prlimit(VICTIM, 0, 0, (ctypes.c_long * 2)()))",
        "priority": "answer(libc.setpriority(0, VICTIM, 19))",
        "its own tie to the verifier": "answer(libc.prctl(1, 0))",
    },
    "share memory, semaphores or queues, or remove those of others": {
        "new memory": "answer(libc.shmget(0, 100, 0o1600))",
        "memory": "libc.shmat.restype = ctypes.c_long\nanswer(libc.shmat(SHARED[0], 0, 0))",
        "memory's end": "answer(libc.shmctl(SHARED[0], 0, 0))",
        "semaphores": "answer(libc.semop(SHARED[1], (ctypes.c_short * 3)(0, 1, 0), 1))",
        "semaphores' end": "answer(libc.semctl(SHARED[1], 0, 0))",
        "send": "answer(libc.msgsnd(SHARED[2], (ctypes.c_long * 2)(1, 1), 8, 2048))",
        "receive": "answer(libc.msgrcv(SHARED[2], (ctypes.c_long * 9)(), 64, 0, 2048))",
        "queue's end": "answer(libc.msgctl(SHARED[2], 0, 0))",
        "named queue's end": "answer(libc.mq_unlink(QUEUE))",
    },
    "go on after its time, or have more than its memory, its output or 64 open files": {
        "forks without end": "while True:\n    try: os.fork()\n    except OSError: pass",
        "that ignores signals": "import signal\nfor s in (1, 2, 3, 15, 24): signal.signal(s,"
        " signal.SIG_IGN)\nwhile True: pass",
        "sleep": "import time\ntime.sleep(1000)",
        "without standard output": "import time\nos.close(1)\ntime.sleep(1000)",
        "threads": THREADS,
        "threads without end": "import threading, time\nwhile True:"
        " threading.Thread(target=time.sleep, args=(1000,)).start()",
        "memory": "x = []\nwhile True: x.append(bytearray(10**7))",
        "memory at once": "x = bytearray(10**12)\nprint(42)",
        "huge exponent": "print(9**9**9)",
        "output": "while True: print('4' * 10**6)",
        "output, then the answer": "print('x' * 10**7)\nprint(42)",
        "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "deep nesting": "print(" + "(" * 10**5 + "42" + ")" * 10**5 + ")",
        "thousands of files": "files = [open('program.py') for _ in range(5000)]\nprint(42)",
    },
    "see the environment, the outputs that are wanted, or the verifier": {
        "environment": "assert [name for name in os.environ if 'SECRET' in name]\nprint(42)",
        "exit": "import sys\nsys.exit(0)\nprint(42)",
        "exit for good": "os._exit(0)",
        "closed standard output": "os.close(1)\nos.write(1, b'42')",
        "crash": "print(42, flush=True)\nctypes.string_at(0)",
        "output that is no text": "import sys\nsys.stdout.buffer.write(bytes(range(256)))",
        "not a program": "this is not Python",
        "a system call of 32 bits": CALL_OF_32_BITS,
    },
}
ONE_BY_ONE = list(CANNOT)[-2:]  # what these programs do would end others in the same process
CALLED_PROGRAMS = {  # the last of these for programs that define a function
    "exit before the call": "import sys\nsys.exit(0)",
    "a result of its own": "os.write(3, b'{\"returned\": 41}')\nos._exit(0)",
    "an object that equals everything": "class E:\n    def __eq__(self, o): return True\n"
    "    __hash__ = None\ndef add(a, b): return E()",
    "an int that equals everything": "class E(int):\n    def __eq__(self, o): return True\n"
    "def add(a, b): return E(7)",
    "an array that equals everything": "class E:\n    def tolist(self): return self\n"
    "def add(a, b): return E()",
    "another json": "import json\njson.dumps = lambda *x, **y: 'true'\ndef add(a, b): return 1",
    "other builtins": "import builtins\nbuiltins.all = builtins.any = builtins.bool = lambda *x:"
    " True\n"
    "builtins.isinstance = lambda *x: True\ndef add(a, b): return 0",
    "the answer in its own memory": "import gc, sys\ndef add(a, b):\n"
    "    frame, found = sys._getframe(), []\n    while frame:\n"
    "        found += [v for v in {**frame.f_globals, **frame.f_locals}.values() if v == 42 and"
    " type(v) is int]\n"
    "        frame = frame.f_back\n    return found[0]",
    "the answer in its folder": "def add(a, b):\n    for name in os.listdir('.'):\n"
    "        if name != 'program.py' and '42' in open(name).read(): return 42",
    "a giant result": "def add(a, b): return 'x' * 10**8",
    "a deep result": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "no function": "def sub(a, b): return 42",
    "an exception": "def add(a, b): raise ValueError(42)",
}


def test_the_docs_say_what_is_tried_here():
    rows = (
        DOCS.read_text()
        .partition("| a program cannot | by |\n|---|---|\n")[2]
        .partition("\n\n")[0]
        .splitlines()
    )
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(CANNOT)


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """What programs try to reach, by the names under which they know it. It is as it was
    afterwards."""
    monkeypatch.setenv("SECRET_TOKEN", "42")
    secret, libc = tmp_path / "secret", ctypes.CDLL(None, use_errno=True)
    secret.write_text("42")
    shared = [libc.shmget(0, 100, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600)]
    libc.msgsnd(shared[2], (ctypes.c_long * 2)(1, 1), 8, 0)
    queue = f"/test-{os.getpid()}".encode()
    with (
        subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL) as victim,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(str(tmp_path / "socket"))
        os.close(libc.mq_open(queue, os.O_CREAT | os.O_RDWR, 0o600, None))
        yield {
            "SECRET": str(secret),
            "PORT": server.getsockname()[1],
            "SOCKET": str(tmp_path / "socket"),
            "VICTIM": victim.pid,
            "SHARED": shared,
            "QUEUE": queue,
        }
        # Of its parent, which may have been started with `nice`.
        priority = os.getpriority(os.PRIO_PROCESS, 0)
        harmed = [victim.poll(), os.getpriority(os.PRIO_PROCESS, victim.pid)] != [None, priority]
        victim.kill()
        removed = [
            libc.shmctl(shared[0], 0, 0),
            libc.semctl(shared[1], 0, 0),
            libc.msgctl(shared[2], 0, 0),
        ]
        assert not harmed and [*removed, libc.mq_unlink(queue)] == [0, 0, 0, 0]
        for stranger in (server, datagrams):
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.accept() if stranger is server else stranger.recv(1)
    assert secret.read_text() == "42" and secret.stat().st_mode & 0o777 == 0o644


def group(programs: dict[str, str], start: str) -> str:
    """A program that tries all of these, and prints the names of those that are refused."""
    return f"""
for name, program in {programs!r}.items():
    printed = []
    try:
        exec({start!r} + program, {{"print": printed.append}})
    except BaseException:
        pass
    if 42 not in printed:
        print(name)
"""


def test_hostile_programs_are_wrong_and_harm_nothing(outside, tmp_path, monkeypatch):
    """Each has a right program behind it. What the kernel refuses at once is tried in groups."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    start = START + "\n".join(f"{name} = {value!r}" for name, value in outside.items()) + "\n"
    tried = []  # name, problem, program, whether it is right
    for row, programs in CANNOT.items():
        if row in ONE_BY_ONE:
            tried += [
                (f"{row}: {name}", IN_AND_OUT, start + program, False)
                for name, program in programs.items()
            ]
        else:
            all_refused = programming.problem(
                "Try.", [{"input": "", "output": "\n".join(programs)}]
            )
            tried.append((row, all_refused, group(programs, start), True))
    tried += [(name, CALLED, start + program, False) for name, program in CALLED_PROGRAMS.items()]
    with VerifierPool(4, time_limit=2, memory_gib=0.5) as pool:
        for name, problem, program, _ in tried:
            right = "print(42)" if problem is not CALLED else "def add(a, b): return a + b"
            pool.submit([(name, problem, block(program))])
            pool.submit(
                [(f"after {name}", CALLED if problem is CALLED else IN_AND_OUT, block(right))]
            )
        verdicts = dict(wait_for_all(pool))
    assert len(verdicts) == 2 * len(tried)
    for name, _, _, right in tried:
        assert verdicts[name].correct is right and verdicts[f"after {name}"].correct, name
    failures = {name: verdict for name, verdict in verdicts.items() if verdict.failure is not None}
    assert failures == {}, "the sandbox bears them; no verifier had to be replaced"
    assert list((tmp_path / "temporary").iterdir()) == [], "files were left"
    assert programs_below(tmp_path) == [], "processes were left"


@pytest.mark.parametrize("row", [row for row in CANNOT if row not in ONE_BY_ONE])
def test_a_call_on_a_hostile_text_can_do_no_more_than_a_program(row, outside):
    """Here the text is run by `exec` in a fork of this process, as a careless verifier does it."""
    start = START + "\n".join(f"{name} = {value!r}" for name, value in outside.items()) + "\n"

    def names_of_the_refused() -> list[str]:
        names = []
        exec(group(CANNOT[row], start), {"print": names.append})
        return names

    assert sandbox.call(names_of_the_refused, seconds=30) == [*CANNOT[row]]


def test_a_call_starts_nothing_and_ends_in_time():
    def start_thread() -> str:
        threading.Thread(target=print).start()
        return "started"

    with pytest.raises(sandbox.RaisedInside, match="can't start new thread"):
        sandbox.call(start_thread, 5)
    with pytest.raises(sandbox.RaisedInside, match="PermissionError"):
        sandbox.call(lambda: os.execv("/bin/true", ["true"]), 5)
    began = time.monotonic()
    for endless in (lambda: time.sleep(60), lambda: "x" * 10**6, lambda: os._exit(0), object):
        with pytest.raises(TimeoutError):
            sandbox.call(endless, 0.5)
    assert time.monotonic() - began < 30
    assert sandbox.call(lambda: {"of": [1, 2.5, None]}, 5) == {"of": [1, 2.5, None]}


def test_what_a_call_changes_is_gone_with_it():
    def take_over() -> float:
        programming.score = lambda *_: True
        return 1.0

    before = programming.score
    assert sandbox.call(take_over, 5) == 1.0 and programming.score is before


def test_a_null_device_that_is_a_file_is_said(monkeypatch, tmp_path):
    (tmp_path / "null").write_text("")
    monkeypatch.setattr(os, "devnull", str(tmp_path / "null"))
    sandbox.require_sandbox.cache_clear()
    with pytest.raises(ValueError, match="null is no device any more"):
        sandbox.require_sandbox()


def wait_for_all(pool: VerifierPool, seconds: float = 200) -> list:
    verdicts, deadline = [], time.monotonic() + seconds
    while pool.unfinished:
        verdicts += pool.results()
        assert time.monotonic() < deadline, f"{pool.unfinished} verdicts are missing"
        time.sleep(0.01)
    return verdicts


def programs_below(folder: Path) -> list[str]:
    """The processes that stand in a folder below this one, as programs do, which cannot leave
    theirs."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd").startswith(f"{folder}/"):
                pids.append(pid)
    return pids


@pytest.mark.skipif(
    sandbox.landlock_version() < 6, reason="even in CI: Landlock wants Linux 6.12 for this"
)
def test_landlock_alone_keeps_signals_and_abstract_sockets_inside(monkeypatch):
    monkeypatch.setattr(sandbox, "seccomp_filter", lambda: None)
    name = f"\0test-{os.getpid()}"
    program = f"""
import os, signal, socket
for call in (lambda: os.kill({os.getpid()}, 0),
             lambda: socket.socket(socket.AF_UNIX).connect({name!r}),
             lambda: os.kill(os.getpid(), 0)):
    try: call()
    except PermissionError: print("refused")
    else: print("done")
"""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        output = sandbox.run(["-c", program], b"", seconds=60, longest_output=100)
    assert output.split() == [b"refused", b"refused", b"done"]


def test_no_number_of_a_system_call_stands_twice():
    numbers = [*sandbox.ALLOWED.values(), *(number for number, _ in sandbox.CHECKED.values())]
    assert len(numbers) == len(set(numbers))


def test_a_program_dies_with_its_verifier(tmp_path, monkeypatch):
    """kill -9 of a worker in the middle of a test ends the program too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with VerifierPool(1, time_limit=60, memory_gib=1) as pool:
        pool.submit(
            [
                ("slow", IN_AND_OUT, block("while True: pass")),
                ("right", IN_AND_OUT, block("print(42)")),
            ]
        )
        deadline = time.monotonic() + 30
        while not programs_below(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (program,) = programs_below(tmp_path)
        parent = int(Path(f"/proc/{program}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(parent, signal.SIGKILL)
        verdicts = dict(wait_for_all(pool))
        assert verdicts["slow"].failure == "died" and verdicts["right"].correct
        while programs_below(tmp_path):
            assert time.monotonic() < deadline + 30
            time.sleep(0.01)


def test_tests_that_take_too_long_together_are_wrong_not_a_failure():
    slow = programming.problem("Wait.", [{"input": str(i), "output": "1"} for i in range(15)])
    with VerifierPool(1, time_limit=4, memory_gib=1) as pool:
        pool.submit([("slow", slow, block("for _ in range(10**7): pass\nprint(1)"))])
        assert dict(wait_for_all(pool))["slow"] == Verdict(0.0)


# --- what a machine lacks -------------------------------------------------------------------------


def test_a_sandbox_that_cannot_run_python_is_an_error_not_a_verdict(monkeypatch):
    sandbox.require_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "READABLE", ("/dev/null",))
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sandbox.sys, name, "/nowhere")
    with pytest.raises(ValueError, match="programs cannot be judged here"):
        programming.score(IN_AND_OUT, block("print(42)"))


@pytest.mark.parametrize("gap", ["no Landlock", "no seccomp"])
def test_what_cannot_be_enforced_is_said(monkeypatch, gap):
    if gap == "no Landlock":
        monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    else:
        sandbox.seccomp_filter.cache_clear()
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    try:
        assert [text.split(" (")[0].split(":")[0] for text in sandbox.missing()] == [gap]
        assert programming.score(IN_AND_OUT, block("print(42)")), "and programs are still judged"
    finally:
        sandbox.seccomp_filter.cache_clear()
