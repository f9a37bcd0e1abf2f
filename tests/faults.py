"""Real runs, and what is done to them: tests of whole runs and benchmarks/gpu.py share it."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from machinery.folder import json_lines

ROOT = Path(__file__).parent.parent
# What belongs to the project, by name: a user's environment, runs and models may lie beside it.
ROOMS = "benchmarks core curve data docs machinery tests tools".split()
SOURCES = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
TINY = """
    --prompts-per-step 4 --completions-per-prompt 4 --validation-problems 6
    --validation-samples 2 --slots 32 --checkpoint-every 2 --threads 1
"""

# Columns of a log that do not depend on the machine's speed.
COMPUTED = """
    kind step loss gradient_norm pass_rate ratio_max compute_tokens compute_flops epoch
    off_policyness_max prompts_retired completion_length mismatch_max
""".split()


def python(*command, folder=ROOT, **variables):
    """A command of Python, from its start to its end, with these environment variables besides. It
    hears yes, if it asks."""
    environment = os.environ | variables
    given = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *command], input="y\n", **given)


def project(folder, **faults):
    """A copy of the project, with Python text at the end of modules (or in new ones):
    core__feed="..."."""
    for script in ROOT.glob("*.py"):
        shutil.copy(script, folder)
    left_out = shutil.ignore_patterns("examples", "__pycache__")
    for package in ("core", "curve", "data", "machinery", "tools"):
        shutil.copytree(ROOT / package, folder / package, ignore=left_out)
    for module, text in faults.items():
        path = folder / module.replace("__", "/")
        with open(path.with_suffix(".py"), "a") as file:
            file.write("\n" + text)
    return folder


def apply(page, folder):
    """Make the changes to files of a project that a page of docs/ shows as diffs, each with the
    name of its file, but those that the project has already."""
    text_of_page = (ROOT / "docs" / page).read_text()
    for name, change in re.findall(r"(?s)```diff\n@@ (\S+) @@\n(.*?)```", text_of_page):
        file = folder / name
        old = "".join(re.findall(r"(?m)^[- ](.*\n)", change))
        new = "".join(re.findall(r"(?m)^[+ ](.*\n)", change))
        added = "".join(re.findall(r"(?m)^\+(.*\n)", change))
        text = file.read_text()
        if added not in text:
            assert text.count(old) == 1, f"{file} has not exactly once:\n{old}"
            file.write_text(text.replace(old, new))


def as_from_a_terminal():
    """A run gets every signal, whatever another test has blocked, and it ends with the tests."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when its parent dies


def wait_until(condition, said=str, seconds=60):
    """Wait until condition() holds. AssertionError, with what said() is, if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


class RealRun:
    """`python train.py FLAGS` in a process of its own, which stands in `folder`. The folder's own
    train.py is run if it has one (`project`)."""

    def __init__(self, folder, flags, name="run"):
        own = folder / "train.py"
        script = own if own.exists() else ROOT / "train.py"
        self.folder, self.output = folder / "runs" / name, folder / f"{name}.txt"
        self.shared_memory: set[int] = set()  # inodes of what its processes were seen to use
        start = "" if "--resume" in flags else f"--name {name} {TINY}"
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, script, *f"{start} {flags}".split()],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=as_from_a_terminal,
            )

    def text(self):
        return self.output.read_text()

    def ended(self):
        return self.process.poll() is not None

    def processes(self, text=""):
        """Ids of the living processes that the trainer's has started, all of its session, if their
        command lines hold this text."""
        ids = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                command = (entry / "cmdline").read_text()  # empty if it has just ended
                if command and text in command and os.getsid(int(entry.name)) == self.process.pid:
                    ids.append(int(entry.name))
        return sorted({*ids} - {self.process.pid})

    def children(self):
        """Process ids of the trainer's other ranks and then of the generators, in the order of
        their start."""
        forked = self.processes("multiprocessing.forkserver")
        generators = forked[1:]  # the first is what they are forked from
        return self.processes("spawn_main") + generators

    def look_at_shared_memory(self):
        for process in [self.process.pid, *self.processes()]:
            with contextlib.suppress(OSError):  # it has ended
                maps = Path(f"/proc/{process}/maps").read_text()
                self.shared_memory |= {*map(int, re.findall(r"(\d+) +/dev/shm/", maps))}

    def until(self, condition):
        """Wait until condition() holds. AssertionError with the output if it never does or the run
        ends first."""
        wait_until(lambda: condition() or self.ended(), self.text, 300)
        assert condition(), f"ended with {self.process.returncode}:\n{self.text()}"

    def until_step(self, step):
        self.until(lambda: last_step(self.folder) >= step)

    def end(self, seconds=600):
        """Wait until the run has ended, with all its processes and its shared memory; the exit
        status."""

        def has_ended():
            self.look_at_shared_memory()
            return self.ended()

        wait_until(has_ended, self.text, seconds)
        # Python's resource tracker removes what dead processes have left, a moment after their end.
        in_memory = lambda: {file.inode() for file in os.scandir("/dev/shm")}
        left = lambda: {*self.processes()} | (self.shared_memory & in_memory())
        wait_until(lambda: not left(), left)
        return self.process.returncode

    def end_well(self):
        """Wait until it has ended, and nothing was wrong."""
        assert self.end() == 0, self.text()[-3000:]

    def kill(self, process=None):
        """kill -9 of one of its processes; by default the trainer."""
        self.look_at_shared_memory()
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(process or self.process.pid, signal.SIGKILL)


def log(folder, kind=None):
    """The whole lines of a log, which another process may be writing; all or those of a kind."""
    lines = json_lines(folder / "log.jsonl")
    return [line for line in lines if kind in (None, line["kind"])]


def last_step(folder):
    """The newest step in a log; -1 if there is none yet."""
    if not (folder / "log.jsonl").exists():
        return -1
    return max((line["step"] for line in log(folder, "train")), default=-1)


def check_log(folder, steps, validation_every):
    """Assert that no step and no validation is missing or repeated, and that compute never goes
    back."""
    due = sorted({*range(0, steps + 1, validation_every), steps})
    for kind, expected in (("train", list(range(1, steps + 1))), ("validation", due)):
        lines = log(folder, kind)
        assert [line["step"] for line in lines] == expected
        for key in ("compute_device_hours", "compute_tokens", "compute_flops", "wall_seconds"):
            values = [line[key] for line in lines]
            assert values == sorted(values)
