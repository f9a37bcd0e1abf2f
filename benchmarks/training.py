"""Training on the default task: three kinds of asynchrony, and TRL's GRPOTrainer on the same two
cores.

    python benchmarks/training.py --seeds 0 1 2    # a quarter of an hour a seed

The comparison with TRL needs `pip install trl`.
"""

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
    for before, after in zip(validations, validations[1:]):
        if after["pass_rate"] >= pass_rate:
            start, end = training_seconds(before), training_seconds(after)
            part = (pass_rate - before["pass_rate"]) / (after["pass_rate"] - before["pass_rate"])
            return start + part * (end - start)
    return float("inf")


def compare_asynchrony(seed: int, steps: int, folder: Path) -> list[float]:
    """Print the time to the pass rate, and how long each side waited until then. Returns the
    sampled tokens/s of the run with PipelineRL, over 20 steps and over all."""
    speeds = {}
    for asynchrony in ("pipeline-8", "ppo-8", "ppo-1"):
        flags = f"--asynchrony {asynchrony} --seed {seed} --steps {steps} --validation-every 8"
        lines, validations = run_training(folder, f"{asynchrony}-{seed}", *flags.split())
        duration = seconds_to(validations, TARGET)
        until = [line for line in lines if training_seconds(line) <= duration] or lines[:1]
        weights = np.diff([0.0] + [training_seconds(line) for line in until])
        print(f"seed {seed} {asynchrony:11} {duration:8.1f} s", end="")
        for side in ("trainer", "generator"):
            idle = [line[f"{side}_idle_fraction"] for line in until]
            print(f"   {side} waits {np.average(idle, weights=weights):.2f}", end="")
        print(f"   at most {max(line['off_policyness_max'] for line in until)} steps off")
        ends = lines[min(20, steps) - 1], lines[-1]
        speeds[asynchrony] = [line["compute_tokens"] / training_seconds(line) for line in ends]
    return speeds["pipeline-8"]


def run_trl(seed: int, steps: int, folder: Path) -> list[float]:
    """The sampled tokens/s of TRL's GRPOTrainer with CISPO, over 20 steps and over all: the same
    model, prompts, steps of 32 x 16 completions and cores. ImportError without trl."""
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
        beta=0.0,
        loss_type="cispo",
        epsilon_high=5.0,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
        shuffle_dataset=True,
    )
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in problems])
    model = str(BASE_MODEL)
    trl.GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=rows).train()
    start, first = calls[0]
    ends = calls[min(20, steps) - 1], calls[steps - 1]
    return [(tokens - first) / (end - start) for end, tokens in ends]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for seed in given.seeds:
            ours = compare_asynchrony(seed, given.steps, Path(folder))
            theirs = run_trl(seed, given.steps, Path(folder))
            for steps, *speeds in zip((20, given.steps), ours, theirs):
                print(f"seed {seed} {steps} steps: tokens/s of train.py and of TRL", *speeds)


if __name__ == "__main__":
    main()
