"""The verifier pool: one verdict for every completion, whatever a score does to its process."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from data import Problem
from data.tasks import arithmetic
from data.verify import Verdict, VerifierPool, children, no_verdict_at_all

ROOT = Path(__file__).parent.parent

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
    "busy": lambda _: busy(0.8), "recursion": lambda x: actions["recursion"](x),
    "memory": lambda _: [bytearray(1 << 24) for _ in range(10**6)],
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "kill the guard": lambda _: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
    "kill the group": lambda _: os.killpg(0, signal.SIGKILL),
    "crash": lambda _: __import__("ctypes").string_at(0),
    "neither": lambda _: "yes", "giant reply": lambda _: write_on_every_pipe(b"x" * 10**6),
    "malformed reply": lambda _: write_on_every_pipe(b"\\0\\0\\0\\3{]}"),
    "close everything": lambda _: os.closerange(0, 64), "read": lambda _: sys.stdin.read() == "",
    "look for torch": lambda _: not {"torch", "transformers"} & set(sys.modules),
    "detach, then right": lambda marker: detached(marker) or True,
    "detach, then hang": lambda marker: detached(marker) or time.sleep(600),
    "detach, then die": lambda marker: detached(marker) or os._exit(3), "last words": last_words,
}
'''


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A problem whose score does what the completion says; verifiers find its module by
    PYTHONPATH."""
    (tmp_path / "hostile_task.py").write_text(HOSTILE_TASK)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield lambda completion, answer="": (Problem("", answer, "hostile_task"), completion)
    assert list((tmp_path / "temporary").iterdir()) == [], "temporary files were left"


def judge(pool: VerifierPool, items: list, seconds: float = 60) -> dict:
    """All verdicts, by the items' numbers."""
    pool.submit([(i, *item) for i, item in enumerate(items)])
    verdicts, deadline = [], time.monotonic() + seconds
    while pool.unfinished:
        verdicts += pool.results()
        assert time.monotonic() < deadline, f"only {len(verdicts)} of {len(items)} verdicts came"
        time.sleep(0.005)
    assert sorted(key for key, _ in verdicts) == list(range(len(items))), "one verdict each"
    return dict(verdicts)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children_of(parent: int) -> set[int]:
    """The processes that this one has started, zombies too."""
    pids = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                pids.add(int(stat.parent.name))
    return pids


def wait_until(condition, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def test_the_default_task_is_judged_as_it_judges_itself():
    problems, rng = arithmetic.problems("train", 300), random.Random(0)
    items = []
    for problem in problems:
        items += [
            (problem, "1+1</think>" + rng.choice([problem.answer, problem.answer + "1", ""]))
            for _ in range(10)
        ]
    with VerifierPool(2, time_limit=10, memory_gib=4) as pool:
        assert pool.results() == [] and pool.unfinished == 0
        verdicts = judge(pool, items)
    assert [verdicts[i].correct for i in range(len(items))] == [
        arithmetic.score(*item) for item in items
    ]
    assert all(verdict.failure is None for verdict in verdicts.values())
    assert 500 < sum(verdict.correct for verdict in verdicts.values()) < 2000


FAILURES = {  # what the completion has the score do: the failure, and what its detail says
    "raise": (None, f'hostile_task.py", line {HOSTILE_TASK.split("1 / 0")[0].count(chr(10)) + 1},'),
    "exit": (None, "SystemExit"),
    "recursion": (None, "RecursionError"),
    "neither": (None, "hostile_task.score returned 'yes', not True, False or a number"),
    "too much": (None, "hostile_task.score returned 1.5, not True, False or a number from 0 to 1"),
    "no number": (None, "score returned nan, not"),
    "no such action": (None, "KeyError"),
    "os._exit": ("died", "exit 0"),
    "kill": ("died", "signal 9"),
    "kill the guard": ("died", "signal 9"),
    "kill the group": ("died", "signal 9"),
    "crash": ("died", "signal 11"),
    "close everything": ("died", ""),
    "giant reply": ("died", "bytes"),
    "malformed reply": ("died", "its reply is not one"),
    "memory": ("memory", ""),
    "loop": ("time limit", ""),  # of CPU time
    "sleep": ("time limit", ""),  # of the clock
}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_failure_costs_its_own_completion_only_and_is_named(task, workers):
    """Every kind of failure in one pool. One worker meets them one by one, with other completions
    between them; two meet each kind twice, in any order."""
    if workers == 1:
        texts = [text for failure in FAILURES for text in ("right", "wrong", failure)] + [
            "right",
            "wrong",
        ]
    else:
        texts = [*FAILURES, *FAILURES, *["right", "wrong"] * 10]
        random.Random(0).shuffle(texts)
    with VerifierPool(workers, time_limit=1, memory_gib=0.25) as pool:
        verdicts = judge(pool, [task(text) for text in texts])
    got = [verdicts[i] for i in range(len(texts))]
    assert [verdict.score for verdict in got] == [text == "right" for text in texts]
    for text, verdict in zip(texts, got):
        failure, detail = FAILURES.get(text, (None, ""))
        assert detail or not verdict.detail or failure, (text, verdict)
        assert verdict.raised is (text in FAILURES and failure is None), (text, verdict)
        assert (
            verdict.failure == failure and detail in verdict.detail and len(verdict.detail) <= 2000
        ), (text, verdict)


def test_a_score_reads_nothing_prints_to_nobody_and_is_without_torch(task, capfd):
    with VerifierPool(1, time_limit=10, memory_gib=1) as pool:
        verdicts = judge(pool, [task("read"), task("right"), task("look for torch")])
    assert all(verdict.correct for verdict in verdicts.values())
    assert capfd.readouterr() == ("", "")


def test_a_score_may_be_a_number(task):
    kinds = ("one", "a float", "numpy.bool_", "numpy.float32", "two thirds", "wrong")
    with VerifierPool(1, time_limit=20, memory_gib=4) as pool:
        verdicts = judge(pool, [task(what) for what in kinds])
    assert [verdicts[i].score for i in range(6)] == [1, 1, 1, 1, 2 / 3, 0], verdicts
    assert [verdicts[i].correct for i in range(6)] == [True] * 4 + [False] * 2


def test_waiting_for_the_processor_costs_nothing(task):
    """As on a busy machine. The CPU time of one completion is not that of the next."""
    busy = task("busy")
    with VerifierPool(1, time_limit=2, memory_gib=1) as pool:
        verdicts = judge(pool, [task("wait"), busy, busy, busy, busy])
    assert all(verdict.correct for verdict in verdicts.values()), verdicts


def test_none_of_several_completions_with_a_verdict_is_said_with_the_first_reason():
    failed = Verdict(0.0, "error", "KeyError: 1 (mine.py, line 2)")
    assert no_verdict_at_all([failed, Verdict(0.0)]) == no_verdict_at_all([]) == ""
    said = no_verdict_at_all([failed, Verdict(0.0, "died")])
    assert (
        said
        == "none of 2 completions got a verdict; the first, error: KeyError: 1 (mine.py, line 2)"
    )


def test_a_task_that_is_not_there_is_an_error_of_each_completion():
    with VerifierPool(1, time_limit=10, memory_gib=1) as pool:
        verdicts = judge(pool, [(Problem("", "", "no_such_task"), "")] * 3)
    error = Verdict(0.0, "error", "ModuleNotFoundError: No module named 'no_such_task'")
    assert list(verdicts.values()) == [error] * 3


def test_giant_and_odd_completions_arrive_whole(task):
    odd = "\x00\ud800 \u2028 " + "π" * 10
    problem = Problem("", "x" * 5_000_000, "data.tasks.arithmetic")
    with VerifierPool(2, time_limit=60, memory_gib=2) as pool:
        odd_problem = Problem("", odd, "data.tasks.arithmetic")
        verdicts = judge(
            pool,
            [
                (problem, "</think>" + problem.answer),
                (problem, odd),
                (odd_problem, "</think>" + odd),
            ],
        )
    assert [verdicts[i].correct for i in range(3)] == [True, False, True]


def test_what_a_score_leaves_behind_dies_with_its_worker(task, tmp_path):
    markers = [tmp_path / name for name in ("right", "hang", "die")]
    with VerifierPool(3, time_limit=3, memory_gib=2) as pool:
        judge(pool, [task(f"detach, then {marker.name}", str(marker)) for marker in markers])
    assert not any(is_running(int(marker.read_text())) for marker in markers)


def test_closing_ends_workers_in_the_middle_of_their_work(task, tmp_path):
    marker = tmp_path / "pid"
    before = children_of(os.getpid())
    pool = VerifierPool(2, time_limit=600, memory_gib=2)
    pool.submit([(0, *task("detach, then hang", str(marker))), (1, *task("sleep"))])
    assert wait_until(lambda: marker.exists() and marker.read_text())
    assert len(children_of(os.getpid()) - before) == 2
    pool.close()
    assert children_of(os.getpid()) <= before, "no zombie is left"
    assert not is_running(int(marker.read_text()))
    pool.close()  # again does no harm
    with pytest.raises(RuntimeError, match="closed"):
        pool.results()


OTHER_ENDS_OF_THE_OWNER = [(signal.SIGKILL, True), (signal.SIGTERM, False), (signal.SIGTERM, True)]
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
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the README promises this for Linux")
@pytest.mark.parametrize(
    "by, stopped",
    [
        (signal.SIGKILL, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_ENDS_OF_THE_OWNER),
    ],
)
def test_nothing_outlives_the_owner_of_the_pool(task, tmp_path, by, stopped):
    marker = tmp_path / "pid"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(marker)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path / "temporary"),
            "PYTHONPATH": f"{ROOT}:{tmp_path}",
        },
        start_new_session=True,
    )
    assert owner.stdout.readline() == b"ready\n"
    guards = children_of(owner.pid)
    assert len(guards) == 2 and is_running(int(marker.read_text()))
    if stopped:  # as a hostile score can do to its guard
        for pid in guards:
            os.kill(pid, signal.SIGSTOP)
        assert wait_until(
            lambda: all("T (stopped)" in Path(f"/proc/{pid}/status").read_text() for pid in guards)
        )
    owner.send_signal(by)
    owner.wait()
    owner.stdout.close()
    assert wait_until(
        lambda: not any(is_running(pid) for pid in [*guards, int(marker.read_text())])
    )
    assert wait_until(lambda: not any((tmp_path / "temporary").iterdir()))


def test_a_verifier_finds_its_modules_whatever_python_is_told(monkeypatch):
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    problem = Problem("1+1=", "2", arithmetic.__name__)
    with VerifierPool(1, 10.0, 4.0) as pool:
        ((_, verdict),) = pool.judge([(0, problem, "1+1=2</think>2")])
    assert verdict.failure is None


@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_a_stopped_verifier_is_noticed_at_the_time_limit():
    """And not only after the minutes that an import may take."""
    problem = Problem("1+1=", "2", arithmetic.__name__)
    with VerifierPool(1, 1.0, 4.0) as pool:
        ((_, verdict),) = pool.judge([(0, problem, "1+1=2</think>2")])
        assert verdict.failure is None
        guard = pool._verifiers[0].process.pid
        (worker,) = children(guard)
        for process in (worker, guard):
            os.kill(process, signal.SIGSTOP)
        verdicts = [verdict for _, verdict in pool.judge([(1, problem, "2"), (2, problem, "2")])]
    assert [verdict.failure for verdict in verdicts] == ["time limit", None]
    assert verdicts[0].detail == ""  # nothing was to be imported
