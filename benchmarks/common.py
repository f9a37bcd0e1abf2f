"""What several benchmarks share: runs of train.py, random models, what is sampled and trained on, a
clock.

Whoever imports this finds the project's modules, and those of tests/.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def make_parser(about: str) -> argparse.ArgumentParser:
    """A parser of flags whose help begins with this text, line by line."""
    lines = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=lines)


def seconds(work: Callable) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_memory(process: int | str = "self") -> float:
    """GiB that a process had at its peak so far. (ru_maxrss would count the process that has
    started it.)"""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


def run_python(folder: Path, *arguments, **options) -> str:
    """What a Python command prints in this folder. RuntimeError, with its last lines, if it fails.

    options: those of subprocess.run.
    """
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-20:]))
    return done.stdout


def run_training(folder: Path, name: str, *flags, **options) -> tuple[list[dict], list[dict]]:
    """Run train.py in this folder: the lines of the steps and of the validations in its log."""
    run_python(folder, ROOT / "train.py", "--name", name, *flags, **options)
    log = [json.loads(line) for line in open(folder / "runs" / name / "log.jsonl")]
    steps = [line for line in log if line["kind"] == "train"]
    validations = [line for line in log if line["kind"] == "validation"]
    return steps, validations


def training_seconds(line: dict, devices: int = 2) -> float:
    """Wall seconds of training up to this line of a log, without start-up and validations."""
    return 3600 * line["compute_device_hours"] / devices


def run_trl(
    folder: Path, model: str, prompts: list, score: Callable, **config
) -> list[tuple[float, int]]:
    """Train with TRL's GRPOTrainer and CISPO on this CPU, 16 completions of a prompt. Returns for
    each step its time and the tokens sampled until then. ImportError without trl.

    prompts: texts, or lists of messages. score: of a prompt and a completion, as TRL has them, from
    0 to 1. config: more of GRPOConfig, among it how many completions are in a forward
    (per_device_train_batch_size), how many forwards make a step (gradient_accumulation_steps), and
    the longest completion in tokens (max_completion_length).
    """
    import datasets
    import trl

    calls = []

    def reward(prompts, completions, completion_ids, **_):
        sampled = sum(len(ids) for ids in completion_ids)
        before = calls[-1][1] if calls else 0
        calls.append((time.perf_counter(), before + sampled))
        return [2.0 * score(*pair) - 1 for pair in zip(prompts, completions)]

    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        num_generations=16,
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
        **config,
    )
    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    trl.GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=rows).train()
    return calls


class Size(NamedTuple):
    """The shape of a random Llama with attention heads of 64."""

    hidden: int
    mlp: int  # width
    layers: int
    vocabulary: int


SIZES = {
    "25.7M": Size(512, 1408, 8, 30),
    "134M": Size(768, 2048, 12, 32_000),
    "374M": Size(1024, 2816, 24, 32_000),
}


def random_model(folder: Path, size: Size) -> str:
    """Save a Llama with random weights and the default task's tokenizer; returns the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from docs.make_base import make_tokenizer

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def groups_of(tokens: int, length: int) -> list:
    """Groups of four random sequences, half of them right: so many tokens in all. Of the `length`
    tokens of a sequence 16 are prompt."""
    from steps import make_group, rollout

    rng, groups = np.random.default_rng(0), []
    for number in range(tokens // length // 4):
        completions = [rng.integers(18, size=length - 16) for _ in range(4)]
        rollouts = [rollout(number, i, [1] * 16, tokens) for i, tokens in enumerate(completions)]
        groups.append(make_group(number, rollouts, [True, True, False, False]))
    return groups
