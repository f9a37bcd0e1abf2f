"""What a stranger's file may take of this process, and how its errors become one sentence."""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_one_sentence(
    model: str, wrong: str = "it could not be loaded", limited: bool = False
) -> Iterator[None]:
    """ValueError, in one sentence, for whatever a library raises in this block about the files of a
    model. limited: also if the block, of the main thread, takes more than ten seconds, or on Linux
    more than a GiB of memory."""

    def too_late(*_):
        raise RuntimeError("it takes more than ten seconds")

    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if limited:
            signal.signal(signal.SIGALRM, too_late)
            signal.alarm(10)
            # Not on Linux, or a lower limit holds already.
            with contextlib.suppress(OSError, ValueError):
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
        yield
    except Exception as error:
        kind, text = type(error).__name__, str(error).strip() or "no reason given"
        raise ValueError(f"--model {model}: {wrong} ({kind}: {text.splitlines()[0]})") from error
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
