"""Running a hostile Python program: standard input to standard output, and nothing else.

A program may compute, within limits of time, memory and output. Linux refuses it the rest, with no privileges and no
helper program, by two mechanisms that it cannot take off again:

    Landlock   no file can be opened but Python's own; none can be written, made or removed, not even a temporary one
    seccomp    no process, socket, signal, ptrace or shared memory; no chmod, chown or limits of other processes

A process that cannot fork leaves no descendants: killing it is killing all of it. Where a mechanism is missing,
`missing()` says what that costs, and train.py and generate.py print it.
"""

import contextlib
import ctypes
import os
import platform
import resource
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

NUMBER_OF_FILES = 64
PR_SET_PDEATHSIG, PR_GET_SECCOMP, PR_SET_SECCOMP = 1, 21, 22  # prctl(2)
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38


@dataclass(frozen=True)
class Outcome:
    """What a program did."""

    output: bytes  # its standard output; cut short unless `end` is "exit"
    end: Literal["exit", "time", "output"]  # by itself, or killed for exceeding its time or the length of its output
    status: int  # exit status, negative for a signal


def run(arguments: list[str], folder: Path, stdin: bytes, seconds: float, longest_output: int) -> Outcome:
    """Run `python -I -B ARGUMENTS` confined, in `folder`, which it can read. Address space is limited as it is for
    this process; the environment is empty; standard error is thrown away."""
    (folder / "stdin").write_bytes(stdin)  # a file: no pipe to be filled while another is emptied
    with open(folder / "stdin", "rb") as source, landlock_ruleset(str(folder)) as ruleset:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", *arguments],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            start_new_session=True,
            preexec_fn=confinement(ruleset, seconds),
        )
    try:
        output, end = read_output(process, time.monotonic() + seconds, longest_output)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        status = process.wait()
    return Outcome(output, end, status)


def read_output(process: subprocess.Popen, deadline: float, longest: int) -> tuple[bytes, str]:
    """What the process writes until it ends, at most until the deadline and at most `longest` bytes; and how it ended.
    Closing its standard output is not ending."""
    chunks, length, is_open = [], 0, True
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while is_open or process.poll() is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return b"".join(chunks), "time"
            if not is_open:
                time.sleep(min(0.002, remaining))
            elif selector.select(remaining):
                chunks.append(os.read(process.stdout.fileno(), 1 << 16))
                length += len(chunks[-1])
                if length > longest:
                    return b"".join(chunks), "output"
                if not chunks[-1]:
                    is_open = False
                    selector.unregister(process.stdout)
    return b"".join(chunks), "exit"


@lru_cache
def check() -> None:
    """ValueError when Python itself does not run in the sandbox: then every program would be called wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = run(["-c", "import json; print(6 * 7)"], Path(folder), b"", seconds=60, longest_output=100)
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"programs cannot be judged here, the sandbox cannot be entered: {error}") from None
    if outcome.output.strip() != b"42":
        raise ValueError(
            f"programs cannot be judged here: in the sandbox, Python ended with status {outcome.status} and said"
            f" {outcome.output!r:.80}. It can read {sys.prefix}, {sys.base_prefix} and {', '.join(READABLE[:3])} only"
        )


def missing() -> list[str]:
    """What this machine cannot enforce, in words; empty where everything is enforced."""
    gaps = []
    if landlock_version() == 0:
        gaps.append("no Landlock (Linux 5.13 or newer has it): a program can read and change the files of this user")
    if seccomp_filter() is None:
        gaps.append("no seccomp: a program can use the network, start processes that outlive it, and send signals")
    return gaps


# --- confinement ----------------------------------------------------------------------------------------------------


def confinement(ruleset: int | None, seconds: float):
    """A function that confines the process that calls it: run between fork and exec, so it only makes system calls."""
    libc, program, parent = ctypes.CDLL(None, use_errno=True), seccomp_filter(), os.getpid()

    def enter() -> None:
        for limit, value in (
            (resource.RLIMIT_CPU, int(seconds) + 2),
            (resource.RLIMIT_FSIZE, 0),  # pipes are no files
            (resource.RLIMIT_NOFILE, NUMBER_OF_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        if sys.platform != "linux":
            return
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it has died meanwhile
        for capability in range(64):  # of root; others have none
            libc.prctl(PR_CAPBSET_DROP, capability)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if ruleset is not None and libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
            raise OSError("Landlock refuses")  # Popen raises, and nothing is run
        if program is not None and libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) != 0:
            raise OSError("seccomp refuses")

    return enter


# Landlock (landlock(7)): a ruleset names the kinds of access that are refused unless a rule allows them beneath a path.

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
ALL_ACCESS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}  # by version; from 5: 16 bits
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/urandom")


def landlock_version() -> int:
    """The version that the kernel has; 0: none."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1))


@contextlib.contextmanager
def landlock_ruleset(folder: str):
    """File descriptor of a ruleset: Python and `folder` can be read, and nothing else. None without Landlock."""
    version = landlock_version()
    if version == 0:
        yield None
        return
    libc = ctypes.CDLL(None, use_errno=True)
    handled = ctypes.create_string_buffer(struct.pack("=Q", ALL_ACCESS.get(version, (1 << 16) - 1)), 8)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, handled, 8, 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock refuses a ruleset")
    python = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    for path in (*READABLE, *python, folder):
        if not os.path.exists(path):
            continue
        access = EXECUTE | READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, descriptor), 12)
        added = libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0)
        os.close(descriptor)
        if added != 0:
            raise OSError(ctypes.get_errno(), f"Landlock refuses a rule for {path}")
    try:
        yield ruleset
    finally:
        os.close(ruleset)


# seccomp (seccomp(2)): a filter in classic BPF looks at the number and the first arguments of each system call.

REFUSED = {  # by name, the numbers on x86-64 and on arm64; None: there is no such call
    "fork": (57, None), "vfork": (58, None), "unshare": (272, 97), "setns": (308, 268),
    "socket": (41, 198), "io_uring_setup": (425, 425),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "migrate_pages": (256, 238), "move_pages": (279, 239), "prctl": (157, 167),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "memfd_create": (319, 279), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
}  # fmt: skip
CLONE, CLONE3, PRLIMIT, FCNTL = (56, 220), (435, 435), (302, 261), (72, 25)
CLONE_THREAD, F_SETOWN, F_SETOWN_EX = 0x10000, 8, 15
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, which number of the two
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, NO_SUCH_CALL, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS


class SeccompFilter(ctypes.Structure):
    """struct sock_fprog: how many instructions of 8 bytes, and where."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


@lru_cache
def seccomp_filter() -> SeccompFilter | None:
    """The filter; None where there is no seccomp or the numbers of the system calls are not known here."""
    if sys.platform != "linux" or platform.machine() not in MACHINES or ctypes.CDLL(None).prctl(PR_GET_SECCOMP) < 0:
        return None
    architecture, column = MACHINES[platform.machine()]
    number, argument = 0, lambda i: 16 + 8 * i  # where they stand in what the filter looks at
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, number)]
    code += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE)]  # x86-64's second table
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            code += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE)]
    code += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, NO_SUCH_CALL)]  # then the C library uses clone
    code += [(EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, argument(0))]  # threads are fine, processes are not
    code += [(ANY_BIT, 1, 0, CLONE_THREAD), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code += [(EQUAL, 0, 4, PRLIMIT[column]), (LOAD, 0, 0, argument(0))]  # its own limits are, those of others are not
    code += [(EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code += [(EQUAL, 0, 5, FCNTL[column]), (LOAD, 0, 0, argument(1))]  # signals for another process by a pipe
    code += [(EQUAL, 2, 0, F_SETOWN), (EQUAL, 1, 0, F_SETOWN_EX), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    code += [(RETURN, 0, 0, ALLOW)]
    return SeccompFilter(len(code), b"".join(struct.pack("=HBBI", *instruction) for instruction in code))
