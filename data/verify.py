"""The verifiers: processes of their own that judge completions, because what a model writes is hostile.

    with VerifierPool(workers=2, time_limit=10.0, memory_gib=4.0) as pool:
        pool.submit([(key, problem, completion), ...])      # at once
        for key, verdict in pool.results(): ...             # what there is by now; never blocks

A verifier is two processes: a guard, `python -m data.verify`, and the worker that it forks, which imports the task's
module (no torch) and calls `score`. A thread of the pool hands out completions, measures their time, and has a worker
that hangs or dies replaced. That costs the one completion it was at, which is counted as a failure and never taken for
wrong in silence; those that waited behind it go to another worker.

The guard adopts whatever the worker leaves behind, detached or not (Linux: subreaper), and kills it when the worker
ends or is ended, or when the process that owns the pool dies in any way. Messages are JSON with a length in front:
nothing that a worker sends is ever unpickled.
"""

import contextlib
import ctypes
import dataclasses
import importlib
import json
import os
import queue
import resource
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data import Problem

Failure = Literal["time limit", "memory", "error", "died"]

IMPORT_LIMIT = 120.0  # seconds for a worker to start and import a task's module
AHEAD = 32  # completions a worker is given at once while it answers each within QUICK seconds; else one
QUICK = 0.02
LONGEST_REPLY = 1 << 16  # bytes; a worker that sends more is ended
DETAIL = 500  # characters of an error that are kept
HEADER = struct.Struct(">I")  # length of the JSON that follows

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


@dataclass(frozen=True)
class Verdict:
    """What became of one completion."""

    score: float  # from 0 for a wrong one to 1 for a right one, as its task says; 0 where there is no verdict
    failure: Failure | None = None  # why there is no verdict
    detail: str = ""  # of a failure: the error with its place, the signal or the exit status

    @property
    def correct(self) -> bool:
        """Whether it is wholly right."""
        return self.score == 1

    @property
    def reason(self) -> str:
        """Why there is no verdict, in words."""
        return f"{self.failure}: {self.detail}" if self.detail else str(self.failure)


def no_verdict_at_all(verdicts: list[Verdict]) -> str:
    """What to say when there is no verdict on any of these completions; '' when there is one, or no completion."""
    if not verdicts or any(verdict.failure is None for verdict in verdicts):
        return ""
    return f"none of {len(verdicts)} completions got a verdict; the first, {verdicts[0].reason}"


def frame(message) -> bytes:
    data = json.dumps(message).encode()
    return HEADER.pack(len(data)) + data


# --- the pool, in the process that trains ---------------------------------------------------------------------------


@dataclass
class Item:
    """One completion to be judged."""

    key: Hashable
    task: str
    message: bytes  # framed, as a worker reads it


@dataclass(eq=False)
class Worker:
    """The pool's side of one verifier."""

    process: subprocess.Popen
    folder: str  # its temporary files
    items: deque[Item] = field(default_factory=deque)  # handed to it and not answered; it is at the first
    outbox: bytearray = field(default_factory=bytearray)  # not written yet
    inbox: bytearray = field(default_factory=bytearray)  # read, and not whole
    loaded: set[str] = field(default_factory=set)  # tasks that it has imported
    clock: float = 0.0  # when it began the first item, as far as is known here
    ahead: int = 1  # items it may have
    spent: bool = False  # it has run out of memory, said so, and ends

    def deadline(self, time_limit: float) -> float:
        return self.clock + (time_limit if self.items[0].task in self.loaded else IMPORT_LIMIT)


class BadReply(Exception):
    """A worker has sent what no worker sends."""


class VerifierPool:
    """Processes that judge completions. `submit`, `results` and `unfinished` are for one thread."""

    def __init__(self, workers: int, time_limit: float, memory_gib: float):
        """time_limit: seconds, memory_gib: GiB of address space, both for one completion."""
        if workers < 1 or not time_limit > 0 or not memory_gib > 0:
            raise ValueError(f"a pool of {workers} verifiers, {time_limit} s and {memory_gib} GiB: all must be above 0")
        self.time_limit, self.memory_gib = time_limit, memory_gib
        self.unfinished = 0  # submitted, and not returned by results()
        self._submitted: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[tuple[Hashable, Verdict]] = queue.SimpleQueue()
        self._folder = tempfile.mkdtemp(prefix="verifiers-")
        self._closing, self._crash = False, ""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._supervise, args=(workers,), name="verifiers", daemon=True)
        self._thread.start()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def submit(self, items: list[tuple[Hashable, Problem, str]]) -> None:
        """Completions to be judged; their keys come back with the verdicts. Returns at once."""
        for key, problem, completion in items:
            message = frame({"problem": dataclasses.asdict(problem), "completion": completion})
            self._submitted.put(Item(key, problem.task, message))
        self.unfinished += len(items)
        self._wake()

    def results(self) -> list[tuple[Hashable, Verdict]]:
        """The verdicts there are now, each once, in the order in which they were reached."""
        verdicts = []
        with contextlib.suppress(queue.Empty):
            while True:
                verdicts.append(self._verdicts.get_nowait())
        self.unfinished -= len(verdicts)
        if not verdicts and not self._thread.is_alive():
            raise RuntimeError(f"the verifiers are closed, or their thread has failed:\n{self._crash}")
        return verdicts

    def close(self) -> None:
        """End all verifiers and everything that they have started. Verdicts not taken by now are lost."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it will wake
            os.write(self._wake_write, b"!")

    # What follows runs in the pool's thread.

    def _supervise(self, number: int) -> None:
        """Hand out, take in, replace; until the pool is closed."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._waiting: deque[Item] = deque()  # submitted, and with no worker
        self._workers: list[Worker] = []
        try:
            self._workers = [self._start() for _ in range(number)]
            while not self._closing:
                self._hand_out()
                self._wait()
                for worker in list(self._workers):
                    self._attend(worker)
        except Exception:
            self._crash = traceback.format_exc()
        finally:
            for worker in self._workers:
                worker.process.send_signal(signal.SIGTERM)  # all at once; below they are waited for
            for worker in self._workers:
                self._end(worker)
            self._selector.close()
            remove(self._folder)

    def _start(self) -> Worker:
        folder = tempfile.mkdtemp(dir=self._folder)
        root = Path(__file__).parent.parent
        environment = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        environment |= {"TMPDIR": folder, "SCORE_SECONDS": str(self.time_limit)}
        process = subprocess.Popen(
            [sys.executable, "-m", "data.verify", str(os.getpid()), folder, str(self.memory_gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=root,
            env={**os.environ, **environment},
            process_group=0,  # no Ctrl-C; one that is stopped goes on when its parent dies, and ends (exit(3))
            bufsize=0,
        )
        worker = Worker(process, folder)
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ)
        return worker

    def _hand_out(self) -> None:
        """Give each worker as much as it may have, the idle ones first, and begin to write it to them."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.append(self._submitted.get_nowait())
        share = -(-len(self._waiting) // len(self._workers))  # a small batch is for all of them
        for worker in sorted(self._workers, key=lambda worker: len(worker.items)):
            for _ in range(min(share, len(self._waiting), worker.ahead - len(worker.items))):
                item = self._waiting.popleft()
                if not worker.items:
                    worker.clock = time.monotonic()
                worker.items.append(item)
                worker.outbox += item.message
            self._write(worker)

    def _write(self, worker: Worker) -> None:
        """As much as the pipe takes; the rest when it is empty again."""
        pipe = worker.process.stdin
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # of a dead one, the reading side will tell
            while worker.outbox:
                del worker.outbox[: os.write(pipe.fileno(), worker.outbox)]
        watched = pipe in self._selector.get_map()
        if worker.outbox and not watched:
            self._selector.register(pipe, selectors.EVENT_WRITE)
        elif watched and not worker.outbox:
            self._selector.unregister(pipe)

    def _wait(self) -> None:
        """Until a worker has written or can read, something was submitted, or a time limit is reached."""
        deadlines = [worker.deadline(self.time_limit) for worker in self._workers if worker.items]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        for ready, _ in self._selector.select(timeout):
            if ready.fileobj == self._wake_read:
                os.read(self._wake_read, 1 << 16)
        time.sleep(0.001)  # so that many answers cost one awakening

    def _attend(self, worker: Worker) -> None:
        """Take what a worker has answered; replace it when it has failed at the first of its items."""
        failure, detail = None, ""
        try:
            ended = self._read(worker)
        except BadReply as error:
            ended, failure, detail = True, "died", str(error)
        if not ended and worker.items and time.monotonic() >= worker.deadline(self.time_limit):
            ended, failure, task = True, "time limit", worker.items[0].task
            detail = "" if task in worker.loaded else f"importing {task} took {IMPORT_LIMIT:.0f} s"
        if not ended:
            return
        status = self._end(worker)
        self._workers.remove(worker)
        if failure is None and not worker.spent:
            failure = "died"
            detail = f"signal {-status if status < 0 else status - 128}" if not 0 <= status <= 128 else f"exit {status}"
        if worker.items and failure is not None:
            self._verdicts.put((worker.items.popleft().key, Verdict(0.0, failure, detail)))
        self._waiting.extendleft(reversed(worker.items))
        self._workers.append(self._start())

    def _read(self, worker: Worker) -> bool:
        """Take all whole messages; whether the worker has ended."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            while not ended:
                data = os.read(worker.process.stdout.fileno(), 1 << 16)
                worker.inbox += data
                ended = not data
                if len(worker.inbox) > LONGEST_REPLY + (1 << 16):
                    break
        answers = 0
        while len(worker.inbox) >= HEADER.size:
            (length,) = HEADER.unpack_from(worker.inbox)
            if length > LONGEST_REPLY:
                raise BadReply(f"its reply has {length} bytes")
            if len(worker.inbox) < HEADER.size + length:
                break
            data = bytes(worker.inbox[HEADER.size : HEADER.size + length])
            del worker.inbox[: HEADER.size + length]
            answers += self._take(worker, data)
        if answers:
            now = time.monotonic()
            worker.ahead = AHEAD if now - worker.clock < QUICK * answers else 1
            worker.clock = now
        return ended

    def _take(self, worker: Worker, data: bytes) -> int:
        """One message: a task has been imported (0 answers), or the verdict on the first item (1 answer)."""
        try:
            reply = json.loads(data)
            if not worker.items:
                raise ValueError("nothing was asked")
            if "loaded" in reply:
                worker.loaded.add(str(reply["loaded"]))
                worker.clock = time.monotonic()
                return 0
            score, failure, detail = reply["score"], reply["failure"], reply["detail"]
            known = failure in (None, "memory", "error") and type(score) is float and 0 <= score <= 1
            if not known or (score and failure):
                raise ValueError("no verdict")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadReply(f"its reply is not one: {error!r}"[:DETAIL]) from None
        worker.spent = failure == "memory"
        self._verdicts.put((worker.items.popleft().key, Verdict(score, failure, str(detail)[:DETAIL])))
        return 1

    def _end(self, worker: Worker) -> int:
        """Kill a worker with all that it has started, and remove its files. Returns the exit status."""
        process = worker.process
        for pipe in (process.stdin, process.stdout):
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            pipe.close()
        process.send_signal(signal.SIGTERM)  # the guard kills the rest
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()  # its worker goes with it
            process.wait()
        remove(worker.folder)
        return process.returncode


def remove(folder: str) -> None:
    """Remove a folder that hostile hands may have filled: unreadable folders, or a path too deep to recurse into."""
    if not os.path.lexists(folder):
        return
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwx", folder], stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)


# --- the verifier, a process of its own -----------------------------------------------------------------------------


def die_with(parent: int, by: signal.Signals) -> bool:
    """Linux: have this process sent a signal when the thread that started it ends. Whether it has not ended yet."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    return os.getppid() == parent


def guard(parent: int, folder: str, memory_gib: float) -> int:
    """Fork the worker, wait for its end or for the parent's word or death, kill all that is left, remove its files.
    Returns the worker's exit status, 128 and more for a signal."""
    news = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP}  # a child has ended; the parent's word; the parent's death
    signal.pthread_sigmask(signal.SIG_BLOCK, news)  # taken by sigwait: no handler can come in between
    status, arrived = None, signal.SIGCHLD
    if die_with(parent, by=signal.SIGHUP):
        worker = fork_worker(memory_gib)
    else:
        arrived = signal.SIGHUP
    while status is None and arrived == signal.SIGCHLD:
        arrived = signal.sigwait(news)
        status = reap(worker)
    kill_children()
    remove(folder)
    if arrived == signal.SIGCHLD:  # the pool reads this end of file, and answers if it lives
        os.close(0)
        os.close(1)
        arrived = signal.sigwait(news - {signal.SIGCHLD})
    if arrived == signal.SIGHUP:  # the last of a dead pool's verifiers removes what is left of it
        with contextlib.suppress(OSError):
            os.rmdir(Path(folder).parent)
    return status or 0


def fork_worker(memory_gib: float) -> int:
    """Start the worker. What it leaves behind becomes a child of this process. Returns its process id."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard_pid = os.getpid()
    worker = os.fork()
    if worker == 0:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if die_with(guard_pid, by=signal.SIGKILL):
                work(memory_gib)
                os._exit(0)
        finally:
            os._exit(1)  # whatever it was, this is not the guard
    return worker


def reap(worker: int) -> int | None:
    """Take note of the children that have ended, adopted orphans among them, until there are none or it is the worker.
    Returns the worker's exit status, 128 and more for a signal; None while it runs."""
    child = -1
    while child not in (0, worker):
        child, code = os.waitpid(-1, os.WNOHANG)
    if child == 0:
        return None
    code = os.waitstatus_to_exitcode(code)
    return 128 - code if code < 0 else code


def kill_children() -> None:
    """Kill the children of this process until there are none; what they leave behind becomes a child."""
    while True:
        for child in children(os.getpid()):
            os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children(pid: int) -> list[int]:
    """Process ids of the children of `pid`."""
    listing = Path(f"/proc/{pid}/task/{pid}/children")
    if listing.exists():
        return [int(child) for child in listing.read_text().split()]
    pairs = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True).stdout.split()
    return [int(child) for child, parent in zip(pairs[::2], pairs[1::2]) if int(parent) == pid]


def work(memory_gib: float) -> None:
    """Judge what comes on standard input until it ends. Tasks can print and read what they like: their standard input
    and output are /dev/null."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_gib * 2**30),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    loaded: set[str] = set()

    def reply(**message) -> None:
        replies.write(frame(message))
        replies.flush()

    while len(header := requests.read(HEADER.size)) == HEADER.size:
        failure, detail, score = None, "", 0.0
        try:
            request = json.loads(requests.read(HEADER.unpack(header)[0]))
            problem = Problem(**request["problem"])
            task = importlib.import_module(problem.task)
            if problem.task not in loaded:
                loaded.add(problem.task)
                reply(loaded=problem.task)
            given = task.score(problem, request["completion"])
            if type(given).__module__ == "numpy" and hasattr(given, "item"):
                given = given.item()
            if type(given) not in (bool, int, float) or not 0 <= given <= 1:
                raise TypeError(f"{problem.task}.score returned {given!r:.80}, not True, False or a number from 0 to 1")
            score = float(given)
        except MemoryError:
            failure = "memory"
        except BaseException as error:  # SystemExit too
            failure, detail = "error", in_words(error, problem.task)[:DETAIL]
        reply(score=score, failure=failure, detail=detail)
        if failure == "memory":  # what is left of it is too little for the next
            return


def in_words(error: BaseException, task: str) -> str:
    """The error, and the file and line of the task where it was raised, or from where what raised it was called."""
    said = traceback.format_exception_only(error)[-1].strip()
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(task.replace(".", "/") + ".py")]
    return f"{said} ({own[-1].filename}, line {own[-1].lineno})" if own else said


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
