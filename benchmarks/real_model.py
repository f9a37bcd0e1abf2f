"""Sampled tokens a second of training a real model end to end: train.py beside TRL's GRPOTrainer,
on the same prompts, batches and two cores.

    python benchmarks/real_model.py MODEL     # a folder, as `python -m tools.unpack` makes it

It takes a quarter of an hour.

`pip install reasoning-gym trl` brings what it needs. Each completion goes on to the budget or to
its end; no group is filtered out, so that both train on all that was sampled.
"""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from common import run_training, run_trl, training_seconds

from core.decoding import render
from core.model import load_tokenizer
from data.load import load_data
from data.tasks import gym

# Data, tokens of a completion, prompts a step; with 16 completions each.
SHAPES = [("gym:chain_sum,min_terms=2,max_terms=2", 8, 4), ("gym:gsm_symbolic", 60, 2)]


def ours(model: str, data: str, tokens: int, prompts: int, steps: int, folder: Path) -> float:
    """Tokens a second of train.py, from the second step on."""
    half = tokens // 2
    flags = (
        f"--defaults small --train-prompts 400 --prompts-per-step {prompts} --steps {steps}"
        " --asynchrony pipeline-2 --length-control penalty --no-zero-variance-filter"
        f" --prompt-budget 320 --thinking-budget {half} {half} --answer-budget {half}"
        " --validation-every 1000 --validation-problems 4 --validation-samples 1"
        f" --slots {16 * prompts} --verifiers 1"
    )
    run = f"ours-{tokens}"
    lines, _ = run_training(folder, run, "--model", model, "--data", data, *flags.split())
    first, last = lines[0], lines[-1]
    seconds = training_seconds(last) - training_seconds(first)
    return (last["compute_tokens"] - first["compute_tokens"]) / seconds


def theirs(
    model: str, data: str, tokens: int, prompts: int, steps: int, folder: Path
) -> tuple[float, float]:
    """Tokens a second of TRL's GRPOTrainer, from the second step on, and the mean tokens of a
    prompt."""
    (source,) = load_data([data], 400, 16)
    problems = {problem.prompt: problem for problem in source.train}
    tokenizer = load_tokenizer(model)

    def score(prompt, completion):
        return gym.score(problems[prompt[-1]["content"]], completion[0]["content"])

    messages = [[{"role": "user", "content": prompt}] for prompt in problems]
    batch = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": prompts}
    config = {"max_completion_length": tokens, "max_steps": steps, "learning_rate": 6.5e-6}
    calls = run_trl(folder, model, messages, score, seed=0, **batch, **config)
    (start, first), (end, last) = calls[0], calls[-1]
    lengths = [len(render(tokenizer, prompt)) for prompt in problems]
    return (last - first) / (end - start), sum(lengths) / len(lengths)


def main(model: str) -> None:
    torch.set_num_threads(2)
    what = f"sampled tokens/s of training, TRL {version('trl')}"
    print(f"{model}, 16 completions of each prompt; {what}\n")
    print("completion   prompt   prompts a step   train.py   TRL   ratio")
    for data, tokens, prompts in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            mine = ours(model, data, tokens, prompts, 8, Path(folder))
            other, prompt = theirs(model, data, tokens, prompts, 3, Path(folder))
        speeds = f"{mine:10.1f} {other:5.1f} {mine / other:7.2f}"
        print(f"{tokens:10} {prompt:8.0f} {prompts:16} {speeds}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
