"""Training on the default task: three kinds of asynchrony, and TRL's GRPOTrainer on the same cores.

    python benchmarks/training.py --seeds 0 1 2    # a quarter of an hour a seed

The comparison with TRL needs `pip install trl`; without it that part says so.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from common import make_parser, run_training, run_trl, training_seconds

from data.tasks import arithmetic
from docs.make_base import BASE_MODEL


def seconds_to(validations: list[dict], pass_rate: float) -> float:
    """Seconds of training to a pass rate, in proportion between two validations; inf if it was not
    reached."""
    for before, after in zip(validations, validations[1:]):
        if after["pass_rate"] >= pass_rate:
            start, end = training_seconds(before), training_seconds(after)
            part = (pass_rate - before["pass_rate"]) / (after["pass_rate"] - before["pass_rate"])
            return start + part * (end - start)
    return float("inf")


def compare_asynchrony(
    seeds: list[int], steps: int, target: float, folder: Path
) -> list[list[dict]]:
    """Print the time to a pass rate and how long each side waited until then. Returns the steps of
    the runs with PipelineRL."""
    print(f"\nseconds of training to a pass rate of {target:.2f}, and idle fractions until then\n")
    columns = "seconds   ratio   trainer idle   generator idle   off-policyness mean, max"
    print(f"seed  asynchrony    {columns}")
    pipeline_runs, figures = [], {}
    for seed in seeds:
        for asynchrony in ("pipeline-8", "ppo-8", "ppo-1"):
            flags = ["--asynchrony", asynchrony, "--seed", seed]
            flags += ["--steps", steps, "--validation-every", 8]
            lines, validations = run_training(folder, f"{asynchrony}-{seed}", *flags)
            duration = seconds_to(validations, target)
            if asynchrony == "pipeline-8":
                pipeline_runs.append(lines)
                of_pipeline = duration
            until = [line for line in lines if training_seconds(line) <= duration] or lines[:1]
            weights = np.diff([0.0] + [training_seconds(line) for line in until])
            row = [duration, duration / of_pipeline]
            for side in ("trainer", "generator"):
                idle = [line[f"{side}_idle_fraction"] for line in until]
                row.append(np.average(idle, weights=weights))
            figures.setdefault(asynchrony, []).append(row)
            age = np.mean([line["off_policyness_mean"] for line in until])
            oldest = max(line["off_policyness_max"] for line in until)
            print(f"{seed:4}  {table_row(asynchrony, row)} {age:17.1f}, {oldest}", flush=True)
    for asynchrony, rows in figures.items():
        print("median", table_row(asynchrony, np.median(rows, axis=0)), flush=True)
    return pipeline_runs


def table_row(asynchrony: str, row) -> str:
    duration, ratio, trainer, generator = row
    return f"{asynchrony:11} {duration:8.1f} {ratio:7.2f} {trainer:14.2f} {generator:16.2f}"


def compare_with_trl(
    seeds: list[int], runs: list[list[dict]], lengths: list[int], folder: Path
) -> None:
    """Print the speed of our runs and of TRL's GRPOTrainer: same model, prompts, completions and
    cores.

    lengths: over how many of the first steps.
    """
    try:
        import trl
    except ImportError as error:
        print(f"\nTRL is left out: {error}; `pip install trl` brings it")
        return
    torch.set_num_threads(2)
    problems = {}
    for problem in arithmetic.problems("train", 4000):
        problems[problem.prompt + "<think>"] = problem
    score = lambda prompt, completion: arithmetic.score(problems[prompt], completion)
    batch = {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 4}
    config = {"max_completion_length": 58 + 9, "max_steps": max(lengths), "learning_rate": 2e-4}
    print("\nsampled tokens/s of training end to end, two cores, steps of 32 x 16 completions\n")
    print(f"seed   steps   train.py (PipelineRL-8)   TRL {trl.__version__} GRPOTrainer   ratio")
    ratios = {steps: [] for steps in lengths}
    for seed, lines in zip(seeds, runs):
        calls = run_trl(folder, str(BASE_MODEL), [*problems], score, seed=seed, **batch, **config)
        for steps in lengths:
            (start, first), (end, last) = calls[0], calls[steps - 1]
            ours = lines[steps - 1]["compute_tokens"] / training_seconds(lines[steps - 1])
            theirs = (last - first) / (end - start)
            ratio = ours / theirs
            ratios[steps].append(ratio)
            print(f"{seed:4} {steps:7} {ours:25,.0f} {theirs:24,.0f} {ratio:7.2f}", flush=True)
    for steps, of_seeds in ratios.items():
        print(f"median {steps:5} {np.median(of_seeds):58.2f}", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    to = "pass rate to which the time is measured"
    parser.add_argument("--target", type=float, default=0.8, help=to)
    over = "steps that TRL is compared over"
    parser.add_argument("--trl-steps", type=int, nargs="+", default=[20, 100], help=over)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = compare_asynchrony(options.seeds, options.steps, options.target, Path(folder))
        compare_with_trl(options.seeds, runs, options.trl_steps, Path(folder))


if __name__ == "__main__":
    main()
