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
from programs import CALLED, IN_AND_OUT, block, read_programs

from data import sandbox
from data.tasks import programming
from data.verify import Verdict, VerifierPool

DOCS = Path(__file__).parent.parent / "docs" / "data.md"


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
# What a program cannot do, as docs/data.md has it: programs that print 42 if they can. The last of
# these, for programs that define a function, is in a group of its own.
CANNOT = read_programs("hostile_programs.txt")
CALLED_PROGRAMS = CANNOT.pop("of a function that adds")
ONE_BY_ONE = list(CANNOT)[-2:]  # what these programs do would end others in the same process


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
    numbers = [number for number, _ in sandbox.CALLS.values()]
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
