"""What a step's arithmetic takes: forward and backward of the first batch of the default task,
alone on one thread.

    python benchmarks/step.py

Beside it how long the machine takes for the products with weights and nothing else: the limit.
"""

import numpy as np
import torch
from common import default_requests, seconds

import loss
from core.decoding import make_decoding
from core.engine import sample_all
from core.model import load_model, load_tokenizer
from core.policy import micro_batches
from core.settings import Settings
from core.torch_engine import TorchEngine
from docs.make_base import BASE_MODEL
from machinery.compute import matmul_parameters
from machinery.trainer import make_policy


def main(repeats: int = 5) -> None:
    torch.set_num_threads(1)
    settings, recipe, device = Settings(), loss.Recipe(), torch.device("cpu")
    model = load_model(str(BASE_MODEL)).to(device)
    tokenizer = load_tokenizer(str(BASE_MODEL))
    engine = TorchEngine(model, make_decoding(tokenizer, settings), settings.slots)
    rollouts = sample_all(engine, default_requests(tokenizer, settings.prompts_per_step))
    policy, ones = make_policy(settings, model, device), torch.ones(len(rollouts))

    def step() -> None:
        rows, tokens = list(range(len(rollouts))), settings.tokens_per_micro_batch
        for m in micro_batches(rollouts, rows, tokens, device, 0, 1):
            logprobs_BT, _ = policy(m, recipe.fp32_logits)
            # Any advantages and weights: the arithmetic is the same.
            given = (m.generator_logprobs_BT, m.sampled_BT, ones[m.rows_B], ones[m.rows_B])
            policy_loss, _ = loss.policy_loss(recipe, logprobs_BT, *given)
            policy_loss.backward()

    tokens, config = sum(rollout.total_tokens for rollout in rollouts), model.config
    flops = 6 * tokens * matmul_parameters(model)
    left = torch.randn(settings.tokens_per_micro_batch, config.hidden_size)
    right = torch.randn(config.hidden_size, config.intermediate_size)
    product = left @ right

    def products() -> None:
        for _ in range(flops // (2 * left.numel() * right.shape[1])):  # as many FLOPs
            torch.mm(left, right, out=product)

    step()  # warms up
    whole, bare = np.median([(seconds(step), seconds(products)) for _ in range(repeats)], axis=0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    kinds = {"aten::mm": "products with weights", "aten::bmm": "products of attention"}
    microseconds = {}
    for event in profile.key_averages():
        kind = kinds.get(event.key, "all else: elementwise, copies, softmax, calls")
        microseconds[kind] = microseconds.get(kind, 0.0) + event.self_cpu_time_total
    work = f"{len(rollouts)} completions, {tokens:,} tokens"
    print(f"\nforward and backward of {work}: {whole:.2f} s")
    products_took = f"{flops / 1e9:.1f} GFLOPs: {bare:.2f} s; ratio {whole / bare:.2f}"
    print(f"the same products with weights alone, {products_took}\n")
    for kind, value in sorted(microseconds.items(), key=lambda item: -item[1]):
        print(f"{kind:46} {value / sum(microseconds.values()):5.2f} of the time")


if __name__ == "__main__":
    main()
