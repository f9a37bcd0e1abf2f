"""The verifiers: processes of their own that judge completions, because what a model writes is
hostile.

    with VerifierPool(workers=2, time_limit=10.0, memory_gib=4.0) as pool:
        pool.submit([(key, problem, completion), ...])      # at once
        for key, verdict in pool.results(): ...             # what there is by now; never blocks

A verifier is two processes: a guard, `python -m data.verify`, and the worker that it forks. The
worker imports the task's module (no torch) and calls `score`. A thread of the pool sends it one
completion after the other, waits for the verdict, and starts another verifier if this one hangs or
dies. That costs one completion, which is counted as a failure and not as wrong.

The guard adopts whatever the worker leaves behind, detached or not (Linux: subreaper), and kills it
when the worker ends, or the process that owns the pool. A task may start processes without the
sandbox, and where that has no seccomp a program can leave its group.

A message is a line of JSON: nothing that a worker sends is ever unpickled.
"""

import contextlib
import ctypes
import errno
import importlib
import json
import math
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from data import Problem
from data.sandbox import PATIENCE, PR_SET_PDEATHSIG, RaisedInside

IMPORT_LIMIT = 120.0  # seconds for a worker to start, read a completion, and import its task
LONGEST_REPLY = 1 << 16  # bytes of a line, about; a worker that sends more is ended
DETAIL = 500  # characters of a reason that are kept
TRACEBACK = 2000  # characters of the end of a traceback that are kept

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
# The numbers of errors that no completion has made: a full disk, too many files or processes.
OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN)

Items = list[tuple[Hashable, Problem, str]]  # keys, problems and completions


@dataclass(frozen=True)
class Verdict:
    """What became of one completion."""

    # As its task says: 1 if it is right, less if it is wrong or right in part; 0 without a verdict.
    score: float
    # Why there is no verdict: time limit, memory, error or died. A task that raises on a text is no
    # failure: the text is wrong. But a full disk is one.
    failure: str | None = None
    # Of a failure: the error, the signal or the exit status. Without one: the traceback, if the
    # task has raised.
    detail: str = ""

    @property
    def correct(self) -> bool:
        """Whether it counts as solved. The pass rate is the share of these; the reward is made of
        the score."""
        return self.score == 1

    @property
    def raised(self) -> bool:
        """Whether the task has raised on this text: then it is wrong, and `detail` says why."""
        return not self.failure and self.detail != ""

    @property
    def reason(self) -> str:
        """Why there is no verdict."""
        return f"{self.failure}: {self.detail}" if self.detail else str(self.failure)


Judged = list[tuple[Hashable, Verdict]]  # keys, and the verdicts on their completions


def no_verdict_at_all(verdicts: list[Verdict]) -> str:
    """A sentence if none of these completions has a verdict; '' if one has, or if there are no
    completions."""
    if not verdicts or not all(verdict.failure for verdict in verdicts):
        return ""
    return f"none of {len(verdicts)} completions got a verdict; the first, {verdicts[0].reason}"


# --- the pool, in the process that trains ---------------------------------------------------------


class VerifierPool(contextlib.AbstractContextManager):
    """Processes that judge completions. `submit`, `results` and `unfinished` are for one thread."""

    def __init__(self, workers: int, time_limit: float, memory_gib: float):
        """For one completion, all above 0: time_limit, seconds of CPU time, and PATIENCE times as
        many of the clock; memory_gib, GiB of address space."""
        self.time_limit, self.memory_gib = time_limit, memory_gib
        self.unfinished = 0  # submitted, and not returned by results()
        self._waiting = queue.SimpleQueue()  # keys, tasks and lines of JSON
        self._verdicts = queue.SimpleQueue()  # keys and verdicts
        self._verifiers = {}  # by number of a thread its latest Verifier
        self._closing, self._crash = False, ""
        self._threads = [
            threading.Thread(target=self._serve, args=[i], daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, items: Items) -> None:
        """Completions to be judged; their keys come back with the verdicts. Returns at once."""
        self.unfinished += len(items)
        for key, problem, completion in items:
            line = json.dumps([asdict(problem), completion]).encode() + b"\n"
            self._waiting.put((key, problem.task, line))

    def results(self) -> Judged:
        """The verdicts there are now, each once, in the order in which they were reached."""
        if self._crash or self._closing:
            raise RuntimeError(
                f"the verifiers are closed, or a thread of theirs has failed:\n{self._crash}"
            )
        verdicts = [self._verdicts.get_nowait() for _ in range(self._verdicts.qsize())]
        self.unfinished -= len(verdicts)
        return verdicts

    def judge(self, items: Items) -> Iterator:
        """Submit these completions, and yield each key with its verdict as it comes, until all have
        one."""
        self.submit(items)
        while self.unfinished:
            yield from self.results()
            time.sleep(0.002)

    def close(self, *_) -> None:
        """End all verifiers and everything that they have started. Verdicts not taken by now are
        lost."""
        self._closing = True
        for _ in self._threads:
            self._waiting.put(("", "", b""))  # wakes a thread that waits for a completion
        for verifier in list(self._verifiers.values()):
            verifier.process.terminate()  # wakes a thread that waits for a verdict
        for thread in self._threads:
            thread.join()

    __exit__ = close

    def _serve(self, number: int) -> None:
        """What a thread of the pool does: it has a verifier, and another one when that has failed,
        until the close."""
        try:
            while not self._closing:
                verifier = self._verifiers[number] = Verifier(self.time_limit, self.memory_gib)
                failure = None
                while failure in (None, "error"):
                    key, task, line = self._waiting.get()
                    if self._closing:
                        break
                    verdict = verifier.judge(task, line)
                    failure = verdict.failure
                    self._verdicts.put((key, verdict))
                verifier.end()
        except Exception:
            self._crash = traceback.format_exc()


class Verifier:
    """The pool's side of one verifier: its process, and the socket to it."""

    def __init__(self, time_limit: float, memory_gib: float):
        self.time_limit = time_limit
        self.folder = tempfile.mkdtemp(prefix="verifier-")  # its temporary files
        self.socket, theirs = socket.socketpair()
        self.inbox = b""  # read, and not a whole message
        self.imported = set()  # names of tasks
        environment = {
            "TMPDIR": self.folder,
            "SCORE_SECONDS": str(time_limit),
            "PYTHONSAFEPATH": "",  # it takes `data` from the folder that it starts in
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        arguments = [str(os.getpid()), self.folder, str(memory_gib)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "data.verify", *arguments],
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parent.parent,
                env=os.environ | environment,
                # No Ctrl-C; one that is stopped goes on when its parent dies, and ends (exit(3)).
                process_group=0,
            )

    def judge(self, task: str, line: bytes) -> Verdict:
        """The verdict on a completion of this task. Waits for it, at most for PATIENCE time limits,
        and before that for IMPORT_LIMIT seconds if the task is not imported yet. With a failure
        other than "error" this verifier is of no use any more."""
        to_begin = PATIENCE * self.time_limit if task in self.imported else IMPORT_LIMIT
        try:
            self.socket.settimeout(to_begin)
            self.socket.sendall(line)
            reply = self._reply(to_begin)
            if reply == "begins":
                self.imported.add(task)
                reply = self._reply(PATIENCE * self.time_limit)
            score, failure, detail = reply
            if failure not in (None, "memory", "error") or not 0 <= score <= 1:
                raise ValueError("no verdict")
            return Verdict(score, failure, str(detail)[-TRACEBACK:])
        except TimeoutError:
            return Verdict(0.0, "time limit")
        except (EOFError, OSError):
            status = self.end()
            ended_by = max(-status, status - 128)  # a signal, if it is above 0
            if ended_by == signal.SIGXCPU:
                return Verdict(0.0, "time limit")
            return Verdict(0.0, "died", f"signal {ended_by}" if ended_by > 0 else f"exit {status}")
        except (ValueError, TypeError, RecursionError) as error:
            return Verdict(0.0, "died", f"its reply is not one: {error!r}"[:DETAIL])

    def _reply(self, seconds: float):
        """Its next message, whatever it is. Raises TimeoutError if it takes longer, EOFError if the
        worker has ended, and ValueError if no worker sends this."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.inbox:
            if len(self.inbox) > LONGEST_REPLY:
                raise ValueError(f"it has {len(self.inbox)} bytes")
            self.socket.settimeout(max(1e-6, deadline - time.monotonic()))
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self.inbox += data
        line, _, self.inbox = self.inbox.partition(b"\n")
        return json.loads(line)

    def end(self) -> int:
        """Kill the worker with all that it has started, and remove its files. Returns the exit
        status."""
        self.socket.close()
        self.process.terminate()  # the guard kills the rest
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its worker goes with it
            self.process.wait()
        remove(self.folder)
        return self.process.returncode


def remove(folder: str) -> None:
    """Remove a folder that hostile hands may have filled: unreadable folders, or a path too deep
    for Python."""
    if os.path.lexists(folder):
        for command in ("chmod -R u+rwx", "rm -rf"):
            subprocess.run([*command.split(), folder], stderr=subprocess.DEVNULL)


# --- the verifier of --one-process ----------------------------------------------------------------


class VerifierHere:
    """A verifier with the calls of a `VerifierPool`, and without processes and limits. What a
    task's `score` raises goes up to the user."""

    def __init__(self, _workers: int, time_limit: float, _memory_gib: float):
        os.environ["SCORE_SECONDS"] = str(time_limit)  # tasks that run programs read it
        self.judged = []  # keys with their verdicts, not taken yet

    def submit(self, items: Items) -> None:
        for key, problem, completion in items:
            task = importlib.import_module(problem.task)
            try:
                verdict = Verdict(score_of(task, problem, completion))
            except RaisedInside as error:  # in the sandbox: the completion is wrong
                verdict = Verdict(0.0, detail=str(error))
            self.judged.append((key, verdict))

    def results(self) -> Judged:
        judged, self.judged = self.judged, []
        return judged

    def close(self) -> None:
        """No process is to end."""


# --- the verifier, a process of its own -----------------------------------------------------------


def guard(parent: int, folder: str, memory_gib: float) -> int:
    """Start the worker and wait until it ends, until the parent wants it to end, or until the
    parent dies. Then kill all that is left and remove its files. Returns the worker's exit status,
    128 and more for a signal."""
    # A child has ended; the parent wants the end; the parent has died. They are blocked, and taken
    # by sigwait: no handler can come in between.
    news = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, news)
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    # What the worker leaves behind becomes a child of this process.
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGHUP)  # when the thread that started this process ends
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGHUP)
    guard_pid, worker = os.getpid(), os.fork()
    if worker == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == guard_pid:
                work(memory_gib)
                os._exit(0)
        finally:
            os._exit(1)  # whatever has happened, the worker must not go on as a guard
    child = status = 0
    while child != worker and signal.sigwait(news) == signal.SIGCHLD:
        child = -1
        while child not in (0, worker):  # adopted ones too
            child, status = os.waitpid(-1, os.WNOHANG)
    if child != worker:
        os.kill(worker, signal.SIGKILL)
    # Until there are none: what they leave behind becomes a child too.
    with contextlib.suppress(ChildProcessError):
        while True:
            for descendant in children(os.getpid()):
                os.kill(descendant, signal.SIGKILL)
            os.waitpid(-1, 0)
    remove(folder)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`. On Linux: elsewhere none are found."""
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    return [*map(int, listing.read_text().split())] if listing.exists() else []


def work(memory_gib: float) -> None:
    """Judge what comes on standard input, until it ends. Each completion is answered by "begins"
    and by its verdict."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)  # a task may print and read what it likes
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_gib * 2**30),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most_cpu = resource.getrlimit(resource.RLIMIT_CPU)[1]
    for line in requests:
        fields, completion = json.loads(line)
        problem = Problem(**fields)
        try:
            task = importlib.import_module(problem.task)
            if hasattr(task, "get_ready"):  # what takes long, before the clock starts
                task.get_ready(problem)
        except BaseException as error:
            verdict = 0.0, "error", f"{type(error).__name__}: {error}"[:DETAIL]
        else:
            print(json.dumps("begins"), file=replies, flush=True)
            seconds = time.process_time() + float(os.environ["SCORE_SECONDS"])
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), most_cpu))  # SIGXCPU
            verdict = judgement(task, problem, completion)
            resource.setrlimit(resource.RLIMIT_CPU, (most_cpu, most_cpu))
        print(json.dumps(verdict), file=replies, flush=True)
        if verdict[1] == "memory":  # there may be too little left for the next one
            return


def score_of(task: ModuleType, problem: Problem, completion: str) -> float:
    """The score of a completion. Raises TypeError if it is none, or what the task raises."""
    value = task.score(problem, completion)
    if not hasattr(value, "__float__") or not 0 <= float(value) <= 1:  # numpy's numbers have it
        raise TypeError(
            f"{problem.task}.score returned {value!r:.80}, not True, False or a number from 0 to 1"
        )
    return float(value)


def judgement(task: ModuleType, problem: Problem, completion: str) -> tuple[float, str | None, str]:
    """Score, failure and detail of a completion, as in `Verdict`. If the task raises, or returns no
    score, the completion is wrong, unless the machine lacks something."""
    try:
        return score_of(task, problem, completion), None, ""
    except MemoryError:
        return 0.0, "memory", ""
    except BaseException as error:  # SystemExit too
        if getattr(error, "errno", None) in OF_THE_MACHINE:
            return 0.0, "error", repr(error)[:DETAIL]
        return 0.0, None, traceback.format_exc()[-TRACEBACK:]


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
