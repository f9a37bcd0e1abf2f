"""Training on the default task: three kinds of asynchrony, and TRL's GRPOTrainer on the same two
cores. Or what it costs that another process keeps one core busy.

    python benchmarks/training.py --seeds 0 1 2    # a quarter of an hour a seed
    python benchmarks/training.py --busy --steps 8
    GOMP_SPINCOUNT=300000 python benchmarks/training.py --busy --steps 8    # waiting threads spin

The comparison with TRL needs `pip install trl`.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from common import make_parser, run_training, training_seconds

from data.tasks import arithmetic
from docs.make_base import BASE_MODEL

TARGET = 0.8  # the pass rate to which the time is measured


def seconds_to(validations: list[dict], pass_rate: float) -> float:
    """Seconds of training to a pass rate, in proportion between two validations; inf if it was not
    reached."""
    best_so_far = np.maximum.accumulate([line["pass_rate"] for line in validations])
    times = [training_seconds(line) for line in validations]
    return float(np.interp(pass_rate, best_so_far, times, right=np.inf))


def compare_asynchrony(seed: int, steps: int, folder: Path) -> float:
    """Print the time to the pass rate, and how long each side waited until then. Returns the
    sampled tokens/s of the run with PipelineRL."""
    speeds = {}
    for asynchrony in ("pipeline-8", "ppo-8", "ppo-1"):
        flags = f"--asynchrony {asynchrony} --seed {seed} --steps {steps} --validation-every 8"
        lines, validations = run_training(folder, f"{asynchrony}-{seed}", *flags.split())
        duration = seconds_to(validations, TARGET)
        until = [line for line in lines if training_seconds(line) <= duration] or lines[:1]
        weights = np.diff([0.0] + [training_seconds(line) for line in until])
        print(f"seed {seed} {asynchrony}: {duration:.1f} s; trainer and generator waited")
        for side in ("trainer", "generator"):
            print(np.average([line[f"{side}_idle_fraction"] for line in until], weights=weights))
        speeds[asynchrony] = lines[-1]["compute_tokens"] / training_seconds(lines[-1])
    return speeds["pipeline-8"]


def run_trl(seed: int, steps: int, folder: Path) -> float:
    """The sampled tokens/s of TRL's GRPOTrainer with CISPO: the same model, prompts, steps of 32 x
    16 completions and cores. ImportError without trl."""
    import datasets
    import trl

    torch.set_num_threads(2)
    problems = {}
    for problem in arithmetic.problems("train", 4000):
        problems[problem.prompt + "<think>"] = problem
    calls = []

    def reward(prompts, completions, completion_ids, **_):
        sampled = sum(len(ids) for ids in completion_ids)
        before = calls[-1][1] if calls else 0
        calls.append((time.perf_counter(), before + sampled))
        judged = zip(prompts, completions)
        return [2.0 * arithmetic.score(problems[prompt], text) - 1 for prompt, text in judged]

    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        num_generations=16,
        per_device_train_batch_size=128,
        gradient_accumulation_steps=4,
        max_completion_length=58 + 9,
        max_steps=steps,
        learning_rate=2e-4,
        seed=seed,
        loss_type="cispo",
        epsilon_high=5.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
    )
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in problems])
    model = str(BASE_MODEL)
    trl.GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=rows).train()
    (start, first), (end, last) = calls[0], calls[-1]
    return (last - first) / (end - start)


def beside_a_busy_core(seed: int, steps: int, folder: Path) -> None:
    """Print the seconds of a run whose processes take turns and have all cores, alone and beside a
    process that never waits, and their ratio."""
    flags = f"--asynchrony ppo-1 --seed {seed} --steps {steps} --validation-problems 8".split()
    seconds = []
    for beside in ("pass", "while True: pass"):
        with subprocess.Popen([sys.executable, "-c", beside]) as other:
            lines, _ = run_training(folder, f"{len(beside)}-{seed}", *flags)
            other.kill()
        seconds.append(training_seconds(lines[-1]))
    alone, busy = seconds
    print(f"seed {seed}: {alone:.1f} s alone, {busy:.1f} s beside a busy core: {busy / alone:.1f}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--busy", action="store_true", help="beside a busy core, and nothing else")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            if given.busy:
                beside_a_busy_core(seed, given.steps, Path(folder))
                continue
            ours = compare_asynchrony(seed, given.steps, Path(folder))
            theirs = run_trl(seed, given.steps, Path(folder))
            print(f"seed {seed}: tokens/s of train.py and of TRL", ours, theirs)


if __name__ == "__main__":
    main()
