"""What it saves to compute a prompt once for its group: forward and backward of the trainer, and
the engine, on a real model with prompts and completions of given lengths. One thread.

    python benchmarks/prompts.py MODEL        # a folder, for example one that tools.unpack has made

Beside the engine stands `generate` of transformers, which computes the prompt for each completion.
"""

import dataclasses
import sys

import numpy as np
import torch
from common import seconds

from core.decoding import make_decoding
from core.engine import make_requests, sample_all
from core.model import load_model, load_tokenizer
from core.policy import Policy, micro_batches
from core.rollouts import Request, Rollout
from core.settings import Sampling
from core.torch_engine import TorchEngine

# Tokens of a prompt and of a completion, and prompts, with 16 completions each.
SHAPES = {"short": (46, 8, 2), "as GSM8K": (120, 60, 1)}
CPU = torch.device("cpu")


def made_up(prompt: int, completion: int, prompts: int) -> list[Rollout]:
    """Groups of 16 rollouts of random tokens."""
    rng = np.random.default_rng(0)
    versions, logprobs = np.zeros(completion, np.int32), np.zeros(completion, np.float32)
    sampled = np.ones(completion, bool)
    rollouts = []
    for group in range(prompts):
        ids = rng.integers(5, 1000, size=prompt).tolist()
        for i in range(16):
            request = Request(group, i, ids, completion, (group, i))
            tokens = rng.integers(5, 1000, size=completion).astype(np.int32)
            rollouts.append(Rollout(request, tokens, sampled, logprobs, versions, False, False))
    return rollouts


def train(policy: Policy, rollouts: list[Rollout], share: bool) -> None:
    for m in micro_batches(rollouts, [*range(len(rollouts))], 4096, CPU, 0, 1, share):
        logprobs_BT, _ = policy(m, True)
        logprobs_BT.sum().backward()
    policy.zero_grad()


def main(folder: str, repeats: int = 3) -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    reference = type(model).from_pretrained(folder)  # with the attention that transformers chooses
    print(f"{folder}: {model.num_parameters():,} parameters; medians of {repeats}, in turn\n")
    training = "training, seconds: each   once   ratio"
    sampling = "tokens/s: generate   engine"
    print(f"prompt + completion      {training}      {sampling}   ratio")
    for name, (prompt, completion, prompts) in SHAPES.items():
        rollouts = made_up(prompt, completion, prompts)
        policy = Policy(model)

        settings = Sampling(prompt_budget=prompt, thinking_budget=(0, 0), answer_budget=completion)
        # No completion ends before its budget.
        decoding = dataclasses.replace(make_decoding(tokenizer, settings, "penalty"), eos=(-1,))

        ids = torch.tensor([rollout.request.prompt_ids for rollout in rollouts])

        def engine() -> None:
            requests = []
            # A prompt's completions are one group.
            for group in range(prompts):
                prompt_ids = ids[16 * group].tolist()
                requests += make_requests(group, prompt_ids, 16, (0, 0), decoding, (group,))
            sample_all(TorchEngine(model, decoding, len(rollouts)), requests)

        def generate() -> None:
            length = {"max_new_tokens": completion, "min_new_tokens": completion}
            seen = torch.ones_like(ids)
            with torch.inference_mode():
                reference.generate(ids, attention_mask=seen, do_sample=True, top_k=0, **length)

        def unshared() -> None:
            train(policy, rollouts, share=False)

        def shared() -> None:
            train(policy, rollouts, share=True)

        # In turn: so a change of the machine's speed meets all of them.
        work = (unshared, shared, generate, engine)

        took = [[seconds(one) for one in work] for _ in range(repeats)]
        each, once, theirs, ours = np.median(took, axis=0)

        # A row of the table.
        tokens = completion * len(rollouts)
        shape = f"{name} ({prompt} + {completion})"
        speeds = f"{tokens / theirs:9.1f} {tokens / ours:8.1f} {theirs / ours:7.2f}"
        times = f"{each:24.2f} {once:6.2f} {each / once:7.2f}"
        print(f"{shape:24} {times} {'':16} {speeds}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
