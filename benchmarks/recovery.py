"""What faults cost: each is put into real runs of tiny steps; lost is the time until training is
further than it was.

python benchmarks/recovery.py --kills 10 --repeats 1
"""

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
from common import make_parser  # it puts tests/ on the path
from faults import (
    HANGS,
    RAISES,
    RealRun,
    check_log,
    faulty_engine,
    faulty_loss,
    faulty_reward,
    last_step,
    log,
    project,
)

FAULTS = {
    "exception in the engine": dict(core__torch_engine=faulty_engine(fault=RAISES)),
    "engine hangs (--wait-timeout 20)": dict(core__torch_engine=faulty_engine(fault=HANGS)),
    "reward raises": dict(data__tasks__arithmetic=faulty_reward(fault=RAISES)),
    "reward hangs (--verifier-time-limit 2)": dict(
        data__tasks__arithmetic=faulty_reward(fault=HANGS)
    ),
    "loss is not a number": dict(loss=faulty_loss(call=4)),
}


def kill_at_random(folder: Path, kills: int, seed: int) -> list[tuple[str, float]]:
    """Kill the trainer, generators and verifiers of a run at random moments, again and again;
    resume it whenever it was the trainer. Returns which process was killed, and the seconds until
    training had gone on."""
    rng, lost = random.Random(seed), []
    flags = "--steps 100000 --max-restarts 1000 --validation-every 4 --validation-problems 32"
    run = RealRun(folder, *flags.split())
    while len(lost) < kills:
        before = max(last_step(run.folder), 0)
        run.until_step(before + 1)
        time.sleep(rng.random())
        # A trainer takes long to start, so it is killed less often.
        (victim,) = rng.choices(["trainer", "generator", "verifier"], [1, 2, 2])
        if victim == "trainer":
            pids = [run.process.pid]
        else:
            pids = run.children() if victim == "generator" else run.verifiers()
        if not pids:
            continue  # it is just being replaced
        killed, reached = time.monotonic(), last_step(run.folder)
        run.kill(rng.choice(pids))
        if victim == "trainer":
            assert run.end() == -signal.SIGKILL
            run = RealRun(folder, "--resume", f"runs/{run.folder.name}")
        run.until_step(reached + 1)
        lost.append((victim, time.monotonic() - killed))
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.text()[-3000:]
    steps = last_step(run.folder)
    check_log(run.folder, steps, validation_every=4, finished=False)  # the log of one unbroken run
    rates = [line["pass_rate"] for line in log(run.folder, "validation")]
    learned = f"pass rate {rates[0]:.2f} before, {rates[-1]:.2f} after"
    print(f"\n{steps} steps in spite of {kills} kills; {learned}")
    return lost


def run_with(fault: dict[str, str]) -> list[float]:
    """Seconds of the longest pause between two steps of a run, above the median; none if it did not
    recover."""
    flags = "--steps 20 --validation-every 100 --wait-timeout 20 --verifier-time-limit 2"
    with tempfile.TemporaryDirectory() as folder:
        run = RealRun(project(Path(folder), **fault), *flags.split())
        if run.end() != 0:
            print(f"not recovered from:\n{run.text()[-2000:]}")
            return []
        pauses = np.diff([line["wall_seconds"] for line in log(run.folder, "train")])
        return [max(pauses) - np.median(pauses)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kill -9 at random moments")
    parser.add_argument("--repeats", type=int, default=3, help="runs with each of the other faults")
    options = parser.parse_args()
    lost: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for victim, duration in kill_at_random(Path(folder), options.kills, seed=1):
            lost.setdefault(f"kill -9 of the {victim}", []).append(duration)
    injected = {name: len(durations) for name, durations in lost.items()}
    for name, fault in FAULTS.items():
        injected[name], lost[name] = options.repeats, []
        for _ in range(options.repeats):
            lost[name] += run_with(fault)
    print(f"\n{'fault':40} injected   recovered   seconds lost: median   most\n")
    for name, durations in sorted(lost.items()):
        most = max(durations, default=float("nan"))
        median = np.median(durations or [float("nan")])
        print(f"{name:40} {injected[name]:8} {len(durations):11} {median:22.1f} {most:6.1f}")


if __name__ == "__main__":
    main()
