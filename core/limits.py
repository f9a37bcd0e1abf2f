"""What a stranger's file may take of this machine, and how its errors become one sentence."""

import contextlib
import functools
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path

SECONDS = 30  # of a processor; a tokenizer of 262,000 tokens takes 4, in GGUF some 15
MEMORY = 2**31  # bytes of address space, beside what this process has


@contextlib.contextmanager
def in_one_sentence(model: str, wrong: str = "it could not be loaded") -> Iterator[None]:
    """ValueError, in one sentence, for whatever a library raises in this block about the files of a
    model."""
    try:
        yield
    except Exception as error:
        kind, text = type(error).__name__, str(error).strip() or "no reason given"
        raise ValueError(f"--model {model}: {wrong} ({kind}: {text.splitlines()[0]})") from error


def refuse_odd_files(folder: Path) -> None:
    """ValueError, naming the first, for a pipe or a device in a folder: it may never end."""
    for path in folder.glob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is no regular file: remove it")


def in_a_child(function: Callable) -> Callable:
    """The function, computed by a fork of this process: a file's program or regular expression may
    compute for ever where no signal interrupts it. The first argument is a tokenizer, or the name
    or file of a model. ValueError if the function raises it, dies, or takes more than the
    limits."""

    @functools.wraps(function)
    def limited(of_a_model, *arguments, **options):
        ours, theirs = Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            _answer(theirs, lambda: function(of_a_model, *arguments, **options))
        theirs.close()
        model = getattr(of_a_model, "name_or_path", of_a_model)
        much = f"{SECONDS} seconds or {MEMORY / 2**30:.0f} GiB"
        reason = f"--model {model}: reading its files fails, or takes over {much}"
        value = None
        try:
            with contextlib.suppress(EOFError):
                # One that waits for something takes no time of a processor.
                if ours.poll(4 * SECONDS):
                    value, reason = ours.recv()
        finally:
            ours.close()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if reason:
            raise ValueError(reason)
        return value

    return limited


def _answer(channel, function: Callable) -> None:
    """What the child does: limit itself, call the function, send its value and a reason to raise,
    and end."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a library's own last words
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        # Not on Linux, or a lower limit holds already.
        with contextlib.suppress(OSError, ValueError):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, most))
        try:
            channel.send((function(), ""))
        except ValueError as error:
            channel.send((None, str(error)))
    finally:
        os._exit(0)  # whatever has happened, it must not go on as the process that it was
