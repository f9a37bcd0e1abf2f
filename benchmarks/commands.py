"""What a user waits for: --help and a fit beside their bare imports, and the default run with its
memory.

python benchmarks/commands.py --rounds 5
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import ROOT, peak_memory, run_python, seconds

from data.verify import children

TRAIN, FIT = str(ROOT / "train.py"), [str(ROOT / "fit_curve.py"), "runs/default/log.jsonl"]
FITTING = "numpy, scipy.special"
COMMANDS = {  # a command, and its bare imports
    "train.py --help": ([TRAIN, "--help"], "torch"),
    "fit_curve.py LOG": (FIT, FITTING),
    "fit_curve.py LOG --plot": ([*FIT, "--plot", "x.png"], f"{FITTING}, matplotlib.pyplot"),
}


def default_run(folder: str, flags: list[str]) -> None:
    """Print how long the default run takes, and what memory its processes have at their peaks."""
    start, peaks = time.perf_counter(), {}
    command = [sys.executable, TRAIN, "--name", "default", *flags]
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    while run.poll() is None:
        for process in [run.pid, *children(run.pid)]:
            with contextlib.suppress(OSError, IndexError):  # it has ended
                peaks[process] = peak_memory(process)
        time.sleep(1)
    duration = time.perf_counter() - start
    print(f"\npython train.py: {duration:.0f} s; GiB that its processes had at their peaks:")
    print(", ".join(f"{peak:.2f}" for peak in sorted(peaks.values(), reverse=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of the run, if not as by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        default_run(folder, ["--steps", str(options.steps)] if options.steps else [])
        print(f"\nseconds, median of {options.rounds} rounds\n")
        print("command                   seconds   of its imports")
        run = lambda *arguments: seconds(lambda: run_python(Path(folder), *arguments))
        for name, (command, imports) in COMMANDS.items():
            durations = []
            for _ in range(options.rounds):
                durations.append([run(*command), run("-c", f"import {imports}")])
            whole, bare = np.median(durations, axis=0)
            ratio = f"{whole / bare:.2f} x"
            print(f"{name:25} {whole:7.2f} {bare:8.2f} ({imports}): {ratio}", flush=True)


if __name__ == "__main__":
    main()
