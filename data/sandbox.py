"""The sandbox: what a model writes may compute here, and do nothing else.

    run     a hostile Python program, from standard input to standard output, in its own process
    call    a function of ours on a hostile text, in a fork of this process

Both may compute within limits of time, memory and output. Linux refuses them the rest, without
privileges and without a helper program, by two mechanisms that they cannot take off again:

    Landlock   no file can be opened but Python's own; none can be written, made or removed, not
               even a temporary one
    seccomp    only the system calls with which Python reads, computes and writes (CALLS); all
               others fail

A process that cannot fork leaves no descendants: killing it is killing all of it. Its threads need
memory, which is limited: with 4 GiB some 390 of usual size can start. If this machine
lacks a mechanism, `missing()` says what that costs, and train.py and generate.py print it.
"""

import contextlib
import ctypes
import json
import math
import os
import platform
import re
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

NUMBER_OF_FILES = 64
LONGEST_REPLY = 1 << 16  # bytes of what a call returns
SECONDS = 10.0  # of CPU time for a verdict, if the verifiers do not say how long they have
# of that time: an answer that takes too long to judge is wrong, no failure
SHARE_OF_TIME = 0.9
PATIENCE = 4  # seconds of the clock for one of CPU time: others may use the machine
PR_SET_PDEATHSIG, PR_GET_SECCOMP, PR_SET_SECCOMP = 1, 21, 22  # prctl(2)
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
CAPABILITIES_HEADER = struct.pack("=Ii", 0x20080522, 0)  # capset(2): the version, this process
NO_CAPABILITIES = bytes(24)


def time_of_verdict() -> Callable[[], float]:
    """A function that says how many seconds of CPU time a `score` that begins now has left for
    processes of the sandbox. They have PATIENCE times as many seconds of the clock."""
    seconds = SHARE_OF_TIME * float(os.environ.get("SCORE_SECONDS", SECONDS))
    end, latest = cpu_of_children() + seconds, time.monotonic() + PATIENCE * seconds
    return lambda: max(0.0, min(end - cpu_of_children(), (latest - time.monotonic()) / PATIENCE))


def cpu_of_children() -> float:
    """Seconds of CPU time of the processes that this one has started and waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(
    arguments: list[str], stdin: bytes, seconds: float, longest_output: int, source: str = ""
) -> bytes | None:
    """Run `python -sPB ARGUMENTS` confined, in a folder of its own, where it can read `source` as
    program.py. Returns its standard output; None if it did not end by itself within so many seconds
    of CPU time, and PATIENCE times as many of the clock, with status 0 and with at most so many
    bytes. Address space is limited as it is for this process; the environment has nothing of this
    one; standard error is thrown away."""
    # Otherwise numpy starts a thread for each core.
    environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

    def become_python() -> None:
        os.dup2(os.open("stdin", os.O_RDONLY), 0)
        os.execve(sys.executable, [sys.executable, "-sPB", *arguments], environment)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(source, encoding="utf-8", errors="surrogatepass")
        Path(folder, "stdin").write_bytes(stdin)  # a file, since a full pipe would block
        return confined(become_python, folder, seconds, longest_output)


def call(function: Callable[[], object], seconds: float):
    """What function() returns, as JSON can hold it. A fork of this process computes it, confined as
    a program is; besides, it can start no thread and no program. It sees what this process has in
    its memory and can change its own copy only, so nothing that it does reaches the next call.

    Raises TimeoutError if it has not returned in time (as for `run`), died, or returned too much;
    and `RaisedInside` if function() has raised. Address space is limited as for this process.
    """

    def answer() -> None:
        reply, returned, raised = os.dup(1), None, ""
        os.dup2(2, 1)  # what is printed is lost
        try:
            returned = function()
        except Exception:
            raised = traceback.format_exc()
        os.write(reply, json.dumps([returned, raised]).encode())

    output = confined(answer, READABLE[0], seconds, LONGEST_REPLY, "clone", "execve")
    try:
        returned, raised = json.loads(output)
    except (ValueError, TypeError, RecursionError):
        raise TimeoutError("it did not end in time, or it died") from None
    if raised:
        raise RaisedInside(str(raised))
    return returned


def confined(
    function: Callable[[], None], folder: str, seconds: float, longest: int, *refused: str
) -> bytes | None:
    """What function() writes to standard output in a fork of this process, which is confined to
    Python's files and `folder`, without the system calls of these names; None as for `run`."""
    began, deadline = cpu_of_children(), time.monotonic() + PATIENCE * seconds
    program, parent, (ours, theirs) = seccomp_filter(*refused), os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor, file in enumerate((nowhere, theirs, nowhere)):
                os.dup2(file, descriptor)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what is open here stays with the parent
            os.chdir(folder)
            confine(parent, folder, seconds, program)
            function()
            status = 0
        finally:
            os._exit(status)  # whatever has happened, it must not go on as the process that it was
    os.close(theirs)
    try:
        output = read(ours, deadline, longest)
        has_ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while output is not None and not os.waitid(os.P_PID, child, has_ended):
            if time.monotonic() > deadline:
                break  # it is killed: that is no status 0
            time.sleep(0.001)
    finally:
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)  # what it has started, where there is no seccomp
    return output if status == 0 and cpu_of_children() - began <= seconds else None


def read(channel: int, deadline: float, longest: int) -> bytes | None:
    """What comes through the channel until the other end is closed; None if that is later than the
    deadline, or more than `longest` bytes."""
    output, poll = b"", select.poll()
    poll.register(channel, select.POLLIN)
    while len(output) <= longest and poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        data = os.read(channel, 1 << 16)
        if not data:
            return output
        output += data
    return None


class RaisedInside(Exception):
    """What the function of a `call` has raised; the message is its traceback."""


@lru_cache
def require_sandbox() -> None:
    """Raises ValueError if Python itself does not run in the sandbox: then every program would be
    called wrong."""
    if sys.platform != "linux":
        raise ValueError("programs are judged on Linux only: elsewhere nothing would confine them")
    if run(["-c", "import json; print(6 * 7)"], b"", 60, longest_output=100) != b"42\n":
        raise ValueError(
            "programs cannot be judged here: Python fails in the sandbox, which can read"
            f" {sys.prefix}, {sys.base_prefix} and {', '.join(READABLE[:3])} only"
        )


@lru_cache
def confines() -> bool:
    """Whether this machine has both mechanisms, so that a `call` can do nothing but compute."""
    return sys.platform == "linux" and not missing()


def missing() -> list[str]:
    """What this machine cannot enforce, in words; empty if it enforces everything."""
    gaps = []
    if landlock_version() == 0:
        gaps.append(
            "no Landlock (Linux 5.13 or newer has it): a program can read and change the files of"
            " this user"
        )
    if seccomp_filter() is None:
        gaps.append(
            "no seccomp (Linux on x86-64 has it): a program can use the network, processes and"
            " signals"
        )
    return gaps


# --- confinement ----------------------------------------------------------------------------------


def confine(parent: int, folder: str, seconds: float, program: "SeccompFilter | None") -> None:
    """From now on this process can only compute. It dies with its parent."""
    libc = ctypes.CDLL(None)
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds),
        resource.RLIMIT_FSIZE: 0,  # pipes are no files
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: NUMBER_OF_FILES,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has died meanwhile
    for capability in range(64):  # of root; others have none
        libc.prctl(PR_CAPBSET_DROP, capability)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.capset(CAPABILITIES_HEADER, NO_CAPABILITIES)
    version = landlock_version()
    if version > 0:
        restrict_files(libc, version, folder)
    if program and libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) != 0:
        raise OSError("seccomp refuses")


# Landlock (landlock(7)): a ruleset names kinds of access. They are refused, unless a rule allows
# them below a path.

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
ABSTRACT_SOCKETS, SIGNALS = 1 << 0, 1 << 1  # from version 6: only to processes under the same rules
ALL_ACCESS = (0x1FFF, 0x3FFF, 0x7FFF, 0x7FFF, 0xFFFF)  # of versions 1, 2, 3, 4, and 5 and newer
READABLE = (
    "/usr /lib /lib64 /etc/ld.so.cache /etc/localtime /dev/null /dev/zero /dev/urandom".split()
)


def landlock_version() -> int:
    """The version that the kernel has; 0: none."""
    return max(0, ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1))


def restrict_files(libc: ctypes.CDLL, version: int, folder: str) -> None:
    """From now on this process can read Python and `folder`, and no other file."""
    files = ALL_ACCESS[min(version, 5) - 1]
    scoped = ABSTRACT_SOCKETS | SIGNALS if version >= 6 else 0
    handled = struct.pack("=QQQ", files, 0, scoped)  # the second is the network: seccomp has it
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, handled, len(handled), 0)
    python = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    for path in filter(os.path.exists, (*READABLE, *python, folder)):
        access = EXECUTE | READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
        below = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access, below)
        if libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0) != 0:
            raise OSError("Landlock refuses a rule")  # and nothing is run
        os.close(below)
    if libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError("Landlock refuses")
    os.close(ruleset)


# seccomp (seccomp(2)): a filter in classic BPF looks at the number and the first arguments of each
# system call. The numbers are those of x86-64. On other machines there is no filter.


# What is allowed: a name and a number; and with some values of an argument only, the argument's
# place and these values.
TABLE = """
    read 0  readv 19  pread64 17  write 1  writev 20  lseek 8  open 2  openat 257  close 3
    close_range 436  dup 32  dup2 33  dup3 292  getdents64 217  getcwd 79  stat 4  lstat 6  fstat 5
    newfstatat 262  statx 332  access 21  faccessat 269  faccessat2 439  readlink 89  readlinkat 267

    poll 7  ppoll 271  select 23  pselect6 270  epoll_create1 291  epoll_ctl 233  epoll_wait 232
    epoll_pwait 281  recvfrom 45

    brk 12  mmap 9  munmap 11  mprotect 10  mremap 25  madvise 28

    execve 59  exit 60  exit_group 231  set_tid_address 218  set_robust_list 273  rseq 334
    sched_yield 24  rt_sigaction 13  rt_sigprocmask 14  rt_sigreturn 15  sigaltstack 131
    restart_syscall 219  alarm 37  setitimer 38

    time 201  gettimeofday 96  nanosleep 35  times 100  getrusage 98  sysinfo 99  uname 63
    getrandom 318  getpid 39  gettid 186  getuid 102  geteuid 107  getgid 104  getegid 108

    fcntl 72 at 1: 0 1 2 3 1030  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
    # TCGETS, TCGETS2, TIOCGWINSZ: is it a terminal, how large; FIOCLEX, FIONCLEX, FIONBIO.
    ioctl 16 at 1: 0x5401 0x802C542A 0x5413 0x5451 0x5450 0x5421
    clone 56 at 0: 0x3D0F00 0x7D0F00  # what glibc and musl start a thread with
    clone3 435 at 0:  # a filter cannot see its flags
    futex 202 at 1: 0 1 128 129 131 9 137 265 393  # FUTEX_LOCK_PI, 6, names a process
    prlimit64 302 at 0: 0  # of this process
    sched_getaffinity 204 at 0: 0  # of this process
    # Larger clocks are the processor time of another process.
    clock_gettime 228 at 0: 0 1 2 3 4 5 6 7 8 9 10 11
    clock_getres 229 at 0: 0 1 2 3 4 5 6 7 8 9 10 11
    clock_nanosleep 230 at 0: 0 1 2 3 4 5 6 7 8 9 10 11
    arch_prctl 158 at 0: 0x1002  # ARCH_SET_FS: where a thread has its variables
    # asyncio wakes itself through a pair of sockets. Streams know each other only; datagrams would
    # reach other sockets.
    socketpair 53 at 0: 1
    socketpair 53 at 1: 0x80001
    sendto 44 at 5: 0  # to no address
"""
# By name: the number, and the allowed values by the argument's place.
CALLS = {}
for name, number, place, values in re.findall(r"([a-z]\w*) (\d+)(?: at (\d):([^#\n]*))?", TABLE):
    _, checks = CALLS.setdefault(name, (int(number), {}))
    if place:
        checks[int(place)] = [int(value, 0) for value in values.split()]
# Refused as if the kernel lacked them: the C library does without.
NOT_THERE = ("clone3", "sched_getaffinity")

X86_64 = 0xC000003E  # AUDIT_ARCH_X86_64
# Places in struct seccomp_data; an argument has 8 bytes.
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # operations
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, NO_SUCH_CALL = 0x00050001, 0x00050026  # EPERM, ENOSYS


class SeccompFilter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]  # struct sock_fprog


@lru_cache
def seccomp_filter(*refused: str) -> SeccompFilter | None:
    """The filter, which refuses also the system calls of these names; None if there is no seccomp
    here, or if the numbers of the system calls are not known."""
    if platform.machine() != "x86_64" or ctypes.CDLL(None).prctl(PR_GET_SECCOMP) < 0:
        return None
    code = [(LOAD, ARCHITECTURE_AT), (EQUAL, X86_64, 1), (RETURN, KILL), (LOAD, NUMBER_AT)]
    for name, (number, arguments) in CALLS.items():
        if name in refused:
            continue
        check = []
        for position, values in arguments.items():
            check.append((LOAD, ARGUMENTS_AT + 8 * position))
            # One of the values skips the others and the refusal.
            check += [(EQUAL, value, len(values) - i) for i, value in enumerate(values)]
            check.append((RETURN, NO_SUCH_CALL if name in NOT_THERE else REFUSE))
        code += [(EQUAL, number, 0, len(check) + 1), *check, (RETURN, ALLOW)]
    code.append((RETURN, REFUSE))
    # Each instruction: operation, how many are skipped if it is equal and if not, number.
    packed = [struct.pack("=HBBI", step[0], *(*step[2:], 0, 0)[:2], step[1]) for step in code]
    return SeccompFilter(len(packed), b"".join(packed))
