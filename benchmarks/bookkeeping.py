"""What Python and numpy do for the tokens of a step of the paper's size: CPU seconds by stage, on
made-up rollouts.

python benchmarks/bookkeeping.py
python benchmarks/bookkeeping.py --length 1400    # completions of a tenth of the length
"""

import argparse
import pickle
import time
from collections.abc import Callable

import numpy as np
import torch
from common import ROOT
from steps import make_group, rollout
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from core.decoding import completion_texts, make_decoding
from core.engine import Completions
from core.policy import micro_batches
from core.rollouts import Batch, Report, Request
from core.settings import PRESETS, Settings
from machinery.compute import Compute
from machinery.evaluation import completion_columns

PROMPTS, COMPLETIONS, SLOTS = 48, 16, 256


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the kind that most models have, trained on the texts of this project."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        special_tokens=["<eos>", "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train(
        [str(path) for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])], trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def stage(name: str, work: Callable, times: float = 1.0):
    """Print the CPU seconds of all threads, the least of three measurements. Returns what the work
    returns."""
    durations = []
    for _ in range(3):
        start = time.process_time()
        result = work()
        durations.append(time.process_time() - start)
    print(f"{name:65}{times * min(durations):8.2f}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=14_000, help="tokens of a completion")
    length = parser.parse_args().length
    print(
        f"\nCPU seconds for a step of {PROMPTS} x {COMPLETIONS} rollouts of {length:,} tokens, by stage\n"
    )
    tokenizer, rng = byte_tokenizer(), np.random.default_rng(0)
    decoding = make_decoding(tokenizer, Settings(**PRESETS["paper"]))
    groups = []
    for number in range(PROMPTS):
        tokens = rng.integers(3, len(tokenizer), (COMPLETIONS, length))
        rollouts = [
            rollout(number, i, [3] * 200, completion) for i, completion in enumerate(tokens)
        ]
        groups.append(make_group(number, rollouts, [True, False] * (COMPLETIONS // 2)))
    rollouts = [rollout for group in groups for rollout in group.rollouts.values()]

    steps = min(2000, length)
    slots, tokens = np.arange(SLOTS), np.full(SLOTS, 3)
    books = Completions(SLOTS, decoding)
    for slot in slots:
        books.begin(slot, Request(0, slot, [3], 12_288, (0,)))
    stage(
        f"generators: books, {SLOTS} in flight (from {steps:,} tokens of each)",
        lambda: [books.append(slots, tokens, np.zeros(SLOTS), 0) for _ in range(steps)],
        times=len(rollouts) * length / SLOTS / steps,
    )
    reports = stage(
        "generators: pickled reports",
        lambda: [pickle.dumps(Report([rollout])) for rollout in rollouts],
    )
    stage("rank 0: unpickled reports", lambda: [pickle.loads(report) for report in reports])
    stage(
        "rank 0: texts for the verifiers, on all cores",
        lambda: completion_texts(tokenizer, decoding, rollouts),
    )
    stage("rank 0: the batch, handed to other ranks", lambda: pickle.loads(pickle.dumps(groups)))
    batch = stage("each rank: the batch", lambda: Batch(groups, 50))
    every, device = list(range(len(rollouts))), torch.device("cpu")
    stage(
        "one rank: micro-batches",
        lambda: [0 for _ in micro_batches(rollouts, every, 32_768, device, 0, 1)],
    )
    judged = [pair for group in groups for pair in group.judged()]
    count = Compute(1, 1, 1).add
    stage(
        "rank 0: the log",
        lambda: (completion_columns(judged), count(batch, 1, 1), batch.ages_N.mean()),
    )


if __name__ == "__main__":
    main()
