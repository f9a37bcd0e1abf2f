"""The sandbox: hostile programs, one table of them for each line of what docs/data.md says that a
program cannot do."""

import contextlib
import ctypes
import os
import re
import select
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from faults import ROOT
from programs import CALLED, IN_AND_OUT, block, read_programs

from data import sandbox
from data.tasks import programming
from data.verify import Verdict, VerifierPool

DOCS = ROOT / "docs" / "data.md"


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
    table = DOCS.read_text().partition("| a program cannot | by |\n|---|---|\n")[2]
    assert re.findall(r"(?m)^\| (.*?) \|", table.partition("\n\n")[0]) == [*CANNOT]


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """The beginning of programs, with what they try to reach by its names. It is as it was
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
        names = f"""
SECRET, PORT, SOCKET = {str(secret)!r}, {server.getsockname()[1]}, {str(tmp_path / "socket")!r}
VICTIM, SHARED, QUEUE = {victim.pid}, {shared}, {queue!r}
"""
        yield START + names
        assert victim.poll() is None
        victim.kill()
        controls = libc.shmctl, libc.semctl, libc.msgctl
        removed = [remove(i, 0, 0) for remove, i in zip(controls, shared)]
        assert [*removed, libc.mq_unlink(queue)] == [0] * 4
        assert select.select([server, datagrams], [], [], 0)[0] == [], "something was sent"
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


def test_hostile_programs_are_wrong_and_harm_nothing(outside, tmp_path, temporary):
    """Each has a right program behind it. What the kernel refuses at once is tried in groups."""
    tried = {name: (CALLED, outside + program) for name, program in CALLED_PROGRAMS.items()}
    for row, programs in CANNOT.items():
        if row in ONE_BY_ONE:
            for name, program in programs.items():
                tried[f"{row}: {name}"] = IN_AND_OUT, outside + program
        else:  # they are right if all are refused
            test = {"input": "", "output": "\n".join(programs)}
            tried[row] = programming.problem("Try.", [test]), group(programs, outside)
    honest = block("print(42)")
    with VerifierPool(4, time_limit=2, memory_gib=0.5) as pool:
        for name, (problem, program) in tried.items():
            pool.submit([(name, problem, block(program)), (f"after {name}", IN_AND_OUT, honest)])
        verdicts = dict(pool.judge([]))
    right = {*CANNOT} - {*ONE_BY_ONE} | {f"after {name}" for name in tried}
    # The sandbox bears them; no verifier had to be replaced.
    assert verdicts == {name: Verdict(float(name in right)) for name in right | tried.keys()}
    assert programs_below(tmp_path) == [], "processes were left"


@pytest.mark.parametrize("row", [row for row in CANNOT if row not in ONE_BY_ONE])
def test_a_call_on_a_hostile_text_can_do_no_more_than_a_program(row, outside):
    """Here the text is run by `exec` in a fork of this process, as a careless verifier does it."""

    def names_of_the_refused() -> list[str]:
        names = []
        exec(group(CANNOT[row], outside), {"print": names.append})
        return names

    assert sandbox.call(names_of_the_refused, seconds=30) == [*CANNOT[row]]


def test_a_call_starts_nothing_changes_nothing_and_ends_in_time():
    def take_over() -> dict:
        programming.score = lambda *_: True
        os.write(1, b"this is lost")
        return {"of": [1, 2.5, None]}

    run = lambda: sandbox.run(["-c", "print(hash('a'))"], b"", seconds=60, longest_output=100)
    assert run() == run() is not None, "the order of a set follows from hashes"
    before, began = programming.score, time.monotonic()
    assert sandbox.call(take_over, 5) == {"of": [1, 2.5, None]} and programming.score is before
    for start, error in (
        (threading.Thread(target=print).start, "can't start new thread"),
        (lambda: os.execv("/bin/true", ["true"]), "PermissionError"),
    ):
        with pytest.raises(sandbox.RaisedInside, match=error):
            sandbox.call(start, 5)
    for endless in (lambda: time.sleep(60), lambda: "x" * 10**6, lambda: os._exit(0), object):
        with pytest.raises(TimeoutError):
            sandbox.call(endless, 0.5)
    assert time.monotonic() - began < 30


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


# --- what a machine lacks -------------------------------------------------------------------------


def test_a_sandbox_that_cannot_run_python_is_an_error_not_a_verdict(monkeypatch):
    sandbox.require_sandbox.cache_clear()
    monkeypatch.setattr(sandbox, "READABLE", ["/dev"])
    for name in ("prefix", "exec_prefix", "base_prefix", "base_exec_prefix"):
        monkeypatch.setattr(sandbox.sys, name, "/nowhere")
    with pytest.raises(ValueError, match="programs cannot be judged here"):
        programming.score(IN_AND_OUT, block("print(42)"))


@pytest.mark.parametrize(
    "gap, name, lack", [("Landlock", "landlock_version", 0), ("seccomp", "seccomp_filter", None)]
)
def test_what_cannot_be_enforced_is_said(monkeypatch, gap, name, lack):
    monkeypatch.setattr(sandbox, name, lambda *_: lack)
    (said,) = sandbox.missing()
    assert said.startswith(f"no {gap} (")
    assert programming.score(IN_AND_OUT, block("print(42)")), "and programs are still judged"
