"""What a step's arithmetic takes: the first batch is sampled, then trained on, forward and
backward, in one process on one thread.

    python benchmarks/step.py                               # of the default task
    python benchmarks/step.py --model MODEL --data DATA     # or with other flags of train.py

Times are of the CPU, so that other programs disturb them less. Beside them stands how long the
machine takes for the products with weights and nothing else: the limit.
"""

import sys
import time
from collections.abc import Callable

import common  # noqa: F401  (finds the project's modules)
import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import loss
from core.decoding import make_decoding, render
from core.engine import make_requests, sample_all
from core.model import load_model, load_tokenizer, model_path
from core.policy import micro_batches
from core.settings import Settings, parse
from core.torch_engine import TorchEngine
from data.load import load_data
from machinery.trainer import make_policy

MICRO_BATCH = Settings.tokens_per_micro_batch
KINDS = {"aten::mm": "products with weights", "aten::bmm": "products of attention"}
ALL_ELSE = "all else: elementwise, copies, softmax, calls"


def cpu_seconds(work: Callable) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def first_requests(settings: Settings, tokenizer, decoding) -> list:
    """Requests for the first batch of this data."""
    (source,) = load_data(settings.data, settings.prompts_per_step, 16)
    requests = []
    for group, problem in enumerate(source.train):
        ids = render(tokenizer, problem.prompt)
        completions, budget = settings.completions_per_prompt, settings.thinking_budget
        requests += make_requests(group, ids, completions, budget, decoding, (group,))
    return requests


def shares(work: Callable) -> dict[str, float]:
    """The share of CPU time that each kind of work has in a call, the largest first."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    took = {}
    for event in profiler.key_averages():
        kind = KINDS.get(event.key, ALL_ELSE)
        took[kind] = took.get(kind, 0.0) + event.self_cpu_time_total
    most_first = sorted(took.items(), key=lambda item: -item[1])
    return {kind: value / sum(took.values()) for kind, value in most_first}


def main(arguments: list[str], repeats: int = 3) -> None:
    torch.set_num_threads(1)
    settings = parse(arguments)
    recipe, path = settings.recipe, model_path(settings.model)
    model, tokenizer = load_model(path), load_tokenizer(path)
    decoding = make_decoding(tokenizer, settings, recipe.length_control, recipe.fp32_logits)
    policy = make_policy(settings, model, torch.device("cpu"))
    requests = first_requests(settings, tokenizer, decoding)
    rollouts = []

    def sample() -> None:
        engine = TorchEngine(model, decoding, settings.slots or Settings.slots)
        rollouts[:] = sample_all(engine, requests)

    def step() -> None:
        rows = list(range(len(rollouts)))
        ones = torch.ones(len(rollouts))
        share = settings.share_prompts
        for m in micro_batches(rollouts, rows, MICRO_BATCH, model.device, 0, 1, share):
            logprobs_BT, _ = policy(m, recipe.fp32_logits)
            policy_loss, _ = loss.policy_loss(
                recipe,
                logprobs_BT,
                m.generator_logprobs_BT,
                m.sampled_BT,
                ones[m.rows_B],  # any advantages and weights: the arithmetic is the same
                ones[m.rows_B],
            )
            policy_loss.backward()

    sample()
    with FlopCounterMode(display=False) as counter:
        step()
    flops = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    config = model.config
    left = torch.randn(MICRO_BATCH, config.hidden_size)
    right = torch.randn(config.hidden_size, config.intermediate_size)
    product = left @ right

    def products() -> None:
        for _ in range(flops // (2 * left.numel() * right.shape[1])):  # as many FLOPs
            torch.mm(left, right, out=product)

    took = [[cpu_seconds(work) for work in (sample, step, products)] for _ in range(repeats)]
    sampling, whole, bare = np.median(took, axis=0)
    sampled = sum(int(rollout.sampled.sum()) for rollout in rollouts)
    print(f"\nsampling {len(rollouts)} completions, {sampled:,} tokens: {sampling:.2f} s of CPU")
    print(f"forward and backward: {whole:.2f} s")
    products_took = f"{flops / 1e9:,.1f} GFLOPs: {bare:.2f} s; ratio {whole / bare:.2f}"
    print(f"the same products with weights alone, {products_took}")
    for name, work in (("sampling", sample), ("forward and backward", step)):
        print(f"\n{name}")
        for kind, share in shares(work).items():
            print(f"  {kind:46} {share:5.2f} of the time")


if __name__ == "__main__":
    main(sys.argv[1:])
