"""Memory that processes have at their peaks on a CPU, in GiB, each case in processes of its own.

logits: what fp32 logits of a vocabulary of 150,000 add, in chunks and at once
plan: a trainer and a generator beside what `train.py --plan` says

python benchmarks/memory.py logits
python benchmarks/memory.py plan
"""

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from common import SIZES, groups_of, make_parser, peak_memory, random_model
from steps import settings, train_rank

import loss
from core.decoding import make_decoding
from core.engine import EngineSettings, sample_all
from core.generators import make_engine
from core.model import load_model, load_shapes, load_tokenizer
from core.rollouts import Request, SharedParameters
from core.settings import Sampling, Settings
from machinery.ranks import join_ranks
from machinery.record import Record
from tools.plan import Shape, generator_bytes, trainer_bytes

VOCABULARY = 150_000


def measure(function: Callable, *arguments, processes: int = 1) -> float:
    """What function(rank, queue, *arguments) puts into the queue, in so many new processes."""
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(function, (queue, *arguments), processes)
    return queue.get()


# --- logits ---------------------------------------------------------------------------------------


def logits(_, queue, tokens: int, chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 1024, requires_grad=True)
    head = torch.randn(VOCABULARY, 1024, requires_grad=True)
    targets = torch.randint(VOCABULARY, (tokens,))
    head.grad, hidden.grad = torch.zeros_like(head), torch.zeros_like(hidden)
    before = peak_memory()
    logprobs, _ = loss.sampled_logprobs(hidden, head, targets, fp32=True, chunk=chunk)
    logprobs.sum().backward()
    queue.put(peak_memory() - before)


def measure_logits(numbers: list[int]) -> None:
    what = f"vocabulary {VOCABULARY:,}, hidden size 1,024, forward and backward"
    print(f"\nGiB added by fp32 logits, {what}\n")
    print("tokens   chunks of 2048   at once   ratio   logits alone, once")
    for tokens in numbers:
        chunked, at_once = measure(logits, tokens, 2048), float("nan")
        try:
            at_once = measure(logits, tokens, tokens)
        except multiprocessing.ProcessExitedException:
            print("out of memory:")
        alone, ratio = 4 * tokens * VOCABULARY / 2**30, at_once / chunked
        figures = f"{chunked:16.2f} {at_once:9.2f} {ratio:7.2f} {alone:20.2f}"
        print(f"{tokens:6} {figures}", flush=True)


# --- beside the plan ------------------------------------------------------------------------------


def train(rank: int, queue, name: str, chosen: Settings, parameters, folder: Path) -> None:
    """Two steps of a rank; rank 0 has its peak without its part of the buffer of parameters."""
    ranks = chosen.trainers
    if ranks > 1:
        join_ranks(rank, ["cpu"] * ranks, dist.FileStore(str(folder / "meeting-place"), ranks))
    peaks, Record.log_step = [], lambda *_: peaks.append(peak_memory())
    tokens = ranks * chosen.tokens_per_micro_batch  # so that each rank has a micro-batch
    batches = [groups_of(tokens, 256) for _ in range(2)]
    train_rank(rank, chosen, name, batches, folder / "run", parameters)
    if rank == 0:
        queue.put(peaks[-1] - parameters.flat.nbytes / ranks / 2**30)
    if ranks > 1:
        dist.destroy_process_group()
        os._exit(0)


def sample(_, queue, name: str, slots: int) -> None:
    """A generator's slots, all filled to the full length."""
    budgets = Sampling(thinking_budget=(200, 200), answer_budget=24)
    decoding = make_decoding(load_tokenizer(name), budgets)
    decoding = dataclasses.replace(decoding, eos=())
    engine = make_engine(EngineSettings(name, ("cpu",), "float32", 1, slots, decoding))
    sample_all(engine, [Request(i, 0, [1] * 16, 200, (i,)) for i in range(slots)])
    queue.put(peak_memory())


# The size of the model, ranks, tokens of a micro-batch, whether with gradient checkpointing.
TRAINERS = [
    ("25.7M", 1, 2048, False),
    ("25.7M", 1, 2048, True),
    ("134M", 1, 2048, False),
    ("134M", 1, 2048, True),
    ("134M", 1, 4096, True),
    ("134M", 2, 2048, True),
]


def print_row(case: str, measured: float, parts: dict[str, float]) -> None:
    planned = sum(parts.values()) / 2**30
    print(f"| {case} | {measured:.2f} | {planned:.2f} | {planned / measured:.2f} |", flush=True)


def measure_plan() -> None:
    print("\nGiB of a process on a CPU, fp32, at its peak, beside what train.py --plan says\n")
    print("| parameters | of | with | measured | planned | planned / measured |")
    print("|---|---|---|---|---|---|")
    fp32 = torch.float32
    with tempfile.TemporaryDirectory() as name:
        models = {size: random_model(Path(name) / size, SIZES[size]) for size in ("25.7M", "134M")}
        shapes = {size: Shape(load_shapes(model)) for size, model in models.items()}
        for size, ranks, tokens, checkpointing in TRAINERS:
            chosen = settings(
                steps=2,
                trainers=ranks,
                tokens_per_micro_batch=tokens,
                gradient_checkpointing=checkpointing,
            )
            parameters = SharedParameters(load_model(models[size]), ranks)
            with tempfile.TemporaryDirectory() as folder:
                arguments = (models[size], chosen, parameters, Path(folder))
                measured = measure(train, *arguments, processes=ranks)
            parts = trainer_bytes(shapes[size], chosen, ranks, tokens, 256, fp32, "cpu")
            process = "a trainer" if ranks == 1 else f"one of {ranks} trainers"
            how = ", checkpointing" if checkpointing else ""
            print_row(f"{size} | {process} | {tokens:,} tokens{how}", measured, parts)
        for size, slots in (("25.7M", 64), ("134M", 16)):
            parts = generator_bytes(shapes[size], "torch", slots, 242, 16, fp32, 0)
            measured = measure(sample, models[size], slots)
            print_row(f"{size} | a generator | {slots} slots of 242 tokens", measured, parts)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=["logits", "plan"])
    about = "logits: of how many tokens"
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192], help=about)
    options = parser.parse_args()
    if options.part == "logits":
        measure_logits(options.tokens)
    else:
        measure_plan()


if __name__ == "__main__":
    main()
