"""What Python and numpy do for the tokens of a step of the paper's size: CPU seconds by stage, on
made-up rollouts.

python benchmarks/bookkeeping.py
python benchmarks/bookkeeping.py --length 1400    # completions of a tenth of the length
"""

import pickle
import time
from collections.abc import Callable

import numpy as np
import torch
from common import ROOT, make_parser
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
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["<eos>", "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
    tokenizer.train([str(path) for path in pages], trainer)
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
    parser = make_parser(__doc__)
    parser.add_argument("--length", type=int, default=14_000, help="tokens of a completion")
    length = parser.parse_args().length
    step = f"{PROMPTS} x {COMPLETIONS} rollouts of {length:,} tokens"
    print(f"\nCPU seconds for a step of {step}, by stage\n")
    tokenizer, rng = byte_tokenizer(), np.random.default_rng(0)
    decoding = make_decoding(tokenizer, Settings(**PRESETS["paper"]))
    groups = []
    for number in range(PROMPTS):
        rollouts = []
        for i, tokens in enumerate(rng.integers(3, len(tokenizer), (COMPLETIONS, length))):
            rollouts.append(rollout(number, i, [3] * 200, tokens))
        groups.append(make_group(number, rollouts, [True, False] * (COMPLETIONS // 2)))
    rollouts = [rollout for group in groups for rollout in group.rollouts.values()]

    steps = min(2000, length)
    slots, tokens = np.arange(SLOTS), np.full(SLOTS, 3)
    books = Completions(SLOTS, decoding)
    for slot in slots:
        books.begin(slot, Request(0, slot, [3], 12_288, (0,)))

    def keep_books() -> None:
        for _ in range(steps):
            books.append(slots, tokens, np.zeros(SLOTS), 0)

    name = f"generators: books, {SLOTS} in flight (from {steps:,} tokens of each)"
    stage(name, keep_books, times=len(rollouts) * length / SLOTS / steps)
    pickled = lambda: [pickle.dumps(Report([rollout])) for rollout in rollouts]
    reports = stage("generators: pickled reports", pickled)
    unpickled = lambda: [pickle.loads(report) for report in reports]
    stage("rank 0: unpickled reports", unpickled)
    texts = lambda: completion_texts(tokenizer, decoding, rollouts)
    stage("rank 0: texts for the verifiers, on all cores", texts)
    stage("rank 0: the batch, handed to other ranks", lambda: pickle.loads(pickle.dumps(groups)))
    batch = stage("each rank: the batch", lambda: Batch(groups, 50))
    every, device = list(range(len(rollouts))), torch.device("cpu")
    pieces = lambda: [0 for _ in micro_batches(rollouts, every, 32_768, device, 0, 1)]
    stage("one rank: micro-batches", pieces)
    judged = [pair for group in groups for pair in group.judged()]
    compute = Compute(1, 1, 1)

    def log() -> None:
        completion_columns(judged)
        compute.add(batch, 1, 1)
        batch.ages_N.mean()

    stage("rank 0: the log", log)


if __name__ == "__main__":
    main()
