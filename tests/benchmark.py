"""Measurements that are too slow for the tests, each against its alternative in the same run on the same cores.

    python tests/benchmark.py                      # the default task: asynchrony, engine, idle time, against TRL
    python tests/benchmark.py --seeds 0 1 2        # the same over several seeds (four minutes each)

The comparison with TRL needs `pip install trl`, for this benchmark only; without it that part says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


# --- the default task ---------------------------------------------------------------------------------------------


def train(folder: Path, name: str, *flags: str) -> list[dict]:
    """Run train.py in a folder, return the lines of its log."""
    command = [sys.executable, str(ROOT / "train.py"), "--name", name, *flags]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return [json.loads(line) for line in open(folder / "runs" / name / "log.jsonl")]


def seconds_of_training(line: dict, devices: int = 2) -> float:
    """Wall seconds of training, start-up and validation left out."""
    return 3600 * line["compute_device_hours"] / devices


def seconds_to(log: list[dict], pass_rate: float) -> float:
    """Seconds of training to a pass rate: between two validations, in proportion. inf if it was not reached."""
    validations = [line for line in log if line["kind"] == "validation"]
    for before, after in zip(validations, validations[1:]):
        if after["pass_rate"] >= pass_rate:
            start, end = seconds_of_training(before), seconds_of_training(after)
            part = (pass_rate - before["pass_rate"]) / (after["pass_rate"] - before["pass_rate"])
            return start + part * (end - start)
    return float("inf")


def asynchrony(seeds: list[int], target: float, folder: Path) -> list[dict]:
    """(a) time to a pass rate and (c) idle fractions; returns the log of the first PipelineRL run."""
    print(f"\n(a) seconds of training to a pass rate of {target:.2f}, and (c) idle fractions until then\n")
    print("seed  asynchrony    seconds   ratio   trainer idle   generator idle   off-policyness mean, max")
    first = None
    for seed in seeds:
        pipeline = None
        for kind in ("pipeline-8", "ppo-8", "ppo-1"):
            log = train(folder, f"{kind}-{seed}", "--asynchrony", kind, "--seed", str(seed), "--steps", "80",
                        "--validation-every", "8")  # fmt: skip
            first = first or log
            seconds = seconds_to(log, target)
            pipeline = pipeline or seconds
            steps = [line for line in log if line["kind"] == "train" and seconds_of_training(line) <= seconds]
            mean = lambda key: np.mean([line[key] for line in steps])  # noqa: E731
            print(f"{seed:4}  {kind:12} {seconds:8.1f} {seconds / pipeline:7.2f} {mean('trainer_idle_fraction'):14.2f}"
                  f" {mean('generator_idle_fraction'):16.2f} {mean('off_policyness_mean'):17.1f},"
                  f" {max(line['off_policyness_max'] for line in steps)}", flush=True)  # fmt: skip
    return first


def engine(rounds: int = 4) -> None:
    """(b) the engine against transformers' generate: the same model, prompts, budgets and one thread."""
    import torch

    import generate
    from data import arithmetic
    from loss import Recipe

    torch.set_num_threads(1)
    tokenizer = generate.load_tokenizer(arithmetic.BASE_MODEL)
    tokenizer.padding_side = "left"
    model = generate.load_model(arithmetic.BASE_MODEL, torch.device("cpu"), torch.float32)
    reference = type(model).from_pretrained(arithmetic.BASE_MODEL)  # with the attention that transformers chooses
    decoding = generate.make_decoding(tokenizer, Recipe(), 16, 58, 9)
    problems = arithmetic.problems("train", 128)
    requests = [
        generate.Request(i, j, generate.render(tokenizer, problem.prompt), 58, (i, j))
        for i, problem in enumerate(problems)
        for j in range(16)
    ]
    texts = [problem.prompt + "<think>" for problem in problems for _ in range(16)]

    def ours() -> int:
        rollouts = generate.sample_all(generate.TorchEngine(model, decoding, 512), requests)
        return sum(int(rollout.sampled.sum()) for rollout in rollouts)

    def theirs() -> int:
        tokens = 0
        for start in range(0, len(texts), 512):
            inputs = tokenizer(texts[start : start + 512], return_tensors="pt", padding=True)
            with torch.no_grad():
                out = reference.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=58 + 9)
            completions = out[:, inputs["input_ids"].shape[1] :]
            tokens += int((completions != tokenizer.pad_token_id).sum())
        return tokens

    rates = {"engine": [], "generate": []}
    for _ in range(rounds):
        for name, sample in (("engine", ours), ("generate", theirs)):
            start = time.perf_counter()
            tokens = sample()
            rates[name].append(tokens / (time.perf_counter() - start))
    medians = {name: float(np.median(values)) for name, values in rates.items()}
    print(f"\n(b) sampled tokens/s, one thread, {len(requests)} completions, 512 at once, median of {rounds} rounds\n")
    print(f"engine of generate.py (with log-probabilities) {medians['engine']:10,.0f}")
    print(f"transformers generate (tokens only)            {medians['generate']:10,.0f}")
    print(f"ratio                                          {medians['engine'] / medians['generate']:10.2f}", flush=True)


def against_trl(log: list[dict], steps: int, folder: Path) -> None:
    """(d) end-to-end training against TRL's GRPOTrainer: same model, prompts, completions and cores."""
    try:
        import datasets
        import trl
    except ImportError as error:
        print(f"\n(d) left out: {error}; `pip install trl` brings it")
        return
    import torch

    from data import arithmetic
    from loss import Recipe  # noqa: F401  (the defaults of train.py are compared)

    torch.set_num_threads(2)
    problems = arithmetic.problems("train", 4000)
    answers = {problem.prompt + "<think>": problem for problem in problems}
    calls = []  # (time, sampled tokens so far)

    def reward(prompts, completions, completion_ids, **_):
        tokens = sum(len(ids) for ids in completion_ids)
        calls.append((time.perf_counter(), tokens + (calls[-1][1] if calls else 0)))
        return [1.0 if arithmetic.score(answers[p], c) else -1.0 for p, c in zip(prompts, completions)]

    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=128, gradient_accumulation_steps=4,
        num_generations=16, max_completion_length=58 + 9, max_steps=steps, learning_rate=6e-4, beta=0.0,
        loss_type="cispo", epsilon_high=5.0, temperature=1.0, use_cpu=True, bf16=False, gradient_checkpointing=False,
        report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1000, shuffle_dataset=True,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=arithmetic.BASE_MODEL, reward_funcs=reward, args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in answers]),
    )  # fmt: skip
    trainer.train()
    (start, first), (end, last) = calls[0], calls[-1]
    theirs = (last - first) / (end - start)
    line = [line for line in log if line["kind"] == "train"][steps - 1]
    ours = line["compute_tokens"] / seconds_of_training(line)
    print(f"\n(d) sampled tokens/s of training end to end, two cores, first {steps} steps of 32 x 16 completions\n")
    print(f"train.py (PipelineRL-8)                 {ours:10,.0f}")
    print(f"TRL {trl.__version__} GRPOTrainer                {theirs:10,.0f}")
    print(f"ratio                                   {ours / theirs:10.2f}", flush=True)


def benchmark_training(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").symlink_to(ROOT / "data")
        log = asynchrony(options.seeds, options.target, Path(folder))
        os.chdir(folder)  # the shipped model is found by its relative path here too
        engine()
        against_trl(log, options.trl_steps, Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--target", type=float, default=0.8, help="pass rate that (a) waits for")
    parser.add_argument("--trl-steps", type=int, default=10)
    benchmark_training(parser.parse_args())


if __name__ == "__main__":
    main()
