"""The verifier pool: one verdict for every completion, whatever a score does to its process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import ROOT, wait_until
from programs import judge, rows

from data import Problem
from data.tasks import arithmetic
from data.verify import Verdict, VerifierPool, children

HOSTILE_TASK = '''
import os, signal, subprocess, sys, tempfile, time
from pathlib import Path

def score(problem, completion):
    print("to standard output: " + "x" * 1000, flush=True)
    return actions[completion](problem.answer)

def detached(marker):
    """A process in a session of its own whose parents are gone; it writes its id to the marker."""
    program = f"import os; os.setsid(); os.fork() and os._exit(0);" \\
              f"open({marker!r}, 'w').write(str(os.getpid())); import time; time.sleep(600)"
    subprocess.run([sys.executable, "-c", program])
    while not Path(marker).exists() or not Path(marker).read_text():
        time.sleep(0.01)

def write_on_every_pipe(data):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, data)
        except OSError:
            pass

def stop_ignored():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass

def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return True

def last_words(marker):
    Path(tempfile.mkdtemp(), "left behind").write_text("x")
    detached(marker)
    return True

def of_numpy(name):
    import numpy
    return getattr(numpy, name)(1)

actions = {
    "right": lambda _: True, "wrong": lambda _: False, "one": lambda _: 1, "a float": lambda _: 1.0,
    "numpy.bool_": lambda _: of_numpy("bool_"), "numpy.float32": lambda _: of_numpy("float32"),
    "two thirds": lambda _: 2 / 3, "too much": lambda _: 1.5,
    "no number": lambda _: float("nan"), "raise": lambda _: 1 / 0, "exit": lambda _: sys.exit(0),
    "os._exit": lambda _: os._exit(0), "loop": lambda _: stop_ignored(),
    "sleep": lambda _: time.sleep(600), "wait": lambda _: time.sleep(2.3) or True,
    "busy": lambda _: busy(0.4), "recursion": lambda x: actions["recursion"](x),
    "memory": lambda _: [bytearray(1 << 24) for _ in range(10**6)],
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "kill the guard": lambda _: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
    "kill the group": lambda _: os.killpg(0, signal.SIGKILL),
    "crash": lambda _: __import__("ctypes").string_at(0),
    "neither": lambda _: "yes", "giant reply": lambda _: write_on_every_pipe(b"x" * 10**6),
    "reply of 2": lambda _: write_on_every_pipe(b'[2, null, ""]\\n'),
    "malformed reply": lambda _: write_on_every_pipe(b"\\0\\0\\0\\3{]}"),
    "close everything": lambda _: os.closerange(0, 64), "read": lambda _: sys.stdin.read() == "",
    "look for torch": lambda _: not {"torch", "transformers"} & set(sys.modules),
    "detach": lambda marker: detached(marker) or True, "last words": last_words,
    "detach and hang": lambda marker: detached(marker) or time.sleep(600),
    "detach and die": lambda marker: detached(marker) or os._exit(3),
    "full disk": lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"),
}
'''


@pytest.fixture
def task(tmp_path, temporary, monkeypatch):
    """A problem whose score does what the completion says; verifiers find its module by
    PYTHONPATH."""
    (tmp_path / "hostile_task.py").write_text(HOSTILE_TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda completion, answer="": (Problem("", answer, "hostile_task"), completion)


def state(pid: int) -> str:
    """The letter of a process's state; Z, as of a zombie, if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_running(marker: Path) -> bool:
    """Whether the process runs whose id is in this file."""
    return state(int(marker.read_text())) != "Z"


# What the completion has the score do, the score, the failure, and what its detail says.
VERDICTS = """
right            | 1    | None       |
wrong            | 0    | None       |
raise            | 0    | None       | hostile_task.py", line LINE,
exit             | 0    | None       | SystemExit
recursion        | 0    | None       | RecursionError
neither          | 0    | None       | hostile_task.score returned 'yes', not True, False
too much         | 0    | None       | score returned 1.5, not True, False or a number from 0 to 1
no number        | 0    | None       | score returned nan, not
no such action   | 0    | None       | KeyError
os._exit         | 0    | died       | exit 0
kill             | 0    | died       | signal 9
one              | 1    | None       |
kill the guard   | 0    | died       | signal 9
kill the group   | 0    | died       | signal 9
crash            | 0    | died       | signal 11
read             | 1    | None       |
close everything | 0    | died       |
giant reply      | 0    | died       | bytes
a float          | 1    | None       |
reply of 2       | 0    | died       | its reply is not one
malformed reply  | 0    | died       | its reply is not one
memory           | 0    | memory     |
look for torch   | 1    | None       |
loop             | 0    | time limit |
sleep            | 0    | time limit |
two thirds       | 0.67 | None       |
full disk        | 0    | error      | No space left on device
detach and hang  | 0    | time limit |
detach and die   | 0    | died       | exit 3
detach           | 1    | None       |
wait             | 1    | None       |
busy             | 1    | None       |
busy             | 1    | None       |
busy             | 1    | None       |
busy             | 1    | None       |
busy             | 1    | None       |
busy             | 1    | None       |
busy             | 1    | None       |
busy             | 1    | None       |
numpy.bool_      | 1    | None       |
numpy.float32    | 1    | None       |
""".replace("LINE", str(HOSTILE_TASK.split("1 / 0")[0].count("\n") + 1))


def test_a_failure_costs_its_own_completion_only_and_is_named(task, tmp_path, capfd):
    """Every kind of failure in one worker, one by one, with other completions between them. Nothing
    is printed, and nothing runs on. What waits, as for a busy processor, costs nothing, and the CPU
    time of one completion is not that of the next."""
    table = rows(VERDICTS)
    tried = [row for failure in table for row in (*table[:2], failure)]
    with VerifierPool(1, time_limit=2, memory_gib=0.5) as pool:
        verdicts = judge(pool, [task(text, str(tmp_path / text)) for text, *_ in tried])
    markers = [*tmp_path.glob("detach*")]
    assert len(markers) == 3 and not any(map(is_running, markers))
    for (text, score, failure, detail), verdict in zip(tried, verdicts):
        assert verdict.score == pytest.approx(float(score), abs=0.005), (text, verdict)
        assert verdict.correct is (score == "1") and len(verdict.detail) <= 2000, (text, verdict)
        assert str(verdict.failure) == failure and detail in verdict.detail, (text, verdict)
        assert verdict.raised is (failure == "None" and detail != ""), (text, verdict)
    assert capfd.readouterr() == ("", "")


def test_completions_that_are_giant_or_odd_and_tasks_that_cannot_judge():
    """A task is not there, or it is not ready for this problem."""
    texts = "x" * 5_000_000, "\x00\ud800 \u2028 " + "π" * 10
    items = [
        (Problem("", answer, arithmetic.__name__), f"</think>{said}")
        for answer in texts
        for said in texts
    ]
    items += [(Problem("", "", name), "") for name in 2 * ["no_such_task", "data.tasks.gym"]]
    with VerifierPool(2, time_limit=60, memory_gib=2) as pool:
        verdicts = judge(pool, items)
    assert [verdict.score for verdict in verdicts] == [1, 0, 0, 1, 0, 0, 0, 0]
    reasons = [
        "error: ModuleNotFoundError: No module named 'no_such_task'",
        "error: KeyError: 'family'",
    ]
    assert [verdict.reason for verdict in verdicts] == 4 * ["None"] + 2 * reasons


def test_closing_ends_workers_in_the_middle_of_their_work(task, tmp_path):
    marker = tmp_path / "pid"
    pool = VerifierPool(2, time_limit=600, memory_gib=2)
    pool.submit([(0, *task("detach and hang", str(marker))), (1, *task("sleep"))])
    wait_until(lambda: marker.exists() and marker.read_text())
    pool.close()
    assert not is_running(marker)
    with pytest.raises(RuntimeError, match="closed"):
        pool.results()


OWNER = """
import sys, tempfile, time
from data import Problem
from data.verify import VerifierPool
pool = VerifierPool(2, 600, 2)
problem = Problem("", sys.argv[1], "hostile_task")
pool.submit([(i, problem, "last words") for i in range(2)])  # both have started
while pool.unfinished:
    pool.results()
pool.submit([(1, Problem("", "", "hostile_task"), "loop")])
assert not {"torch", "transformers"} & set(sys.modules)
print(*[verifier.process.pid for verifier in pool._verifiers.values()], flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_outlives_the_owner_of_the_pool(task, tmp_path, temporary, stopped):
    marker = tmp_path / "pid"
    paths = {"TMPDIR": str(temporary), "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(marker)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | paths,
        start_new_session=True,
    ) as owner:
        guards = [*map(int, owner.stdout.readline().split())]
        assert len(guards) == 2 and is_running(marker)
        if stopped:  # as a hostile score can do to its guard
            for pid in guards:
                os.kill(pid, signal.SIGSTOP)
            wait_until(lambda: all(state(pid) == "T" for pid in guards))
        owner.kill()
    wait_until(lambda: {*map(state, guards)} == {"Z"} and not is_running(marker))
    wait_until(lambda: not any(temporary.iterdir()))


def test_a_stopped_verifier_is_noticed_at_the_time_limit(monkeypatch):
    """And not only after the minutes that an import may take. It finds its modules whatever Python
    is told."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    item = (Problem("1+1=", "2", arithmetic.__name__), "1+1=2</think>2")
    with VerifierPool(1, 1.0, 4.0) as pool:
        assert judge(pool, [item]) == [Verdict(1.0)]
        guard = pool._verifiers[0].process.pid
        for process in (*children(guard), guard):
            os.kill(process, signal.SIGSTOP)
        assert judge(pool, [item, item]) == [Verdict(0.0, "time limit"), Verdict(1.0)]
