"""Both engines against transformers' `generate`: sampled tokens/s with two sizes of model, on one
thread.

    python benchmarks/engines.py

vLLM is measured where it is installed, also while a trainer on the other core hands over its
parameters. That trainer learns at a rate of nothing, so that the work stays the same. All groups of
the larger model, which is random, are filtered out: its trainer only hands over parameters.
"""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import (
    SIZES,
    make_parser,
    random_model,
    run_training,
    seconds,
    training_seconds,
)

from core.decoding import make_decoding, render
from core.engine import EngineSettings, sample_all
from core.generators import make_engine
from core.model import load_model, load_tokenizer
from core.rollouts import Request, SharedParameters
from core.settings import Settings
from core.torch_engine import TorchEngine
from data.tasks import arithmetic
from docs.make_base import BASE_MODEL

HAS_VLLM = importlib.util.find_spec("vllm") is not None


class Case(NamedTuple):
    """What is sampled, and a run of train.py beside it."""

    model: str  # its folder
    prompts: int  # with 16 completions each
    slots: int
    prompts_per_step: int
    steps: int


def sampled_tokens(rollouts) -> int:
    return sum(int(rollout.sampled.sum()) for rollout in rollouts)


def samplers(folder: str, prompts: int, slots: int) -> tuple[int, dict[str, Callable[[], int]]]:
    """The number of parameters, and ways to sample 16 completions of each prompt: with the same
    prompts, budgets and slots. Each way returns how many tokens it has sampled."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side = "left"
    model = load_model(folder)
    reference = type(model).from_pretrained(folder)  # with the attention that transformers chooses
    decoding = make_decoding(tokenizer, Settings())
    requests, texts = [], []
    for i, problem in enumerate(arithmetic.problems("train", prompts)):
        ids = render(tokenizer, problem.prompt)
        requests += [Request(i, j, ids, 58, (i, j)) for j in range(16)]
        texts += [problem.prompt + "<think>"] * 16

    def torch_engine() -> int:
        return sampled_tokens(sample_all(TorchEngine(model, decoding, slots), requests))

    def transformers_generate() -> int:
        tokens = 0
        for start in range(0, len(texts), slots):
            inputs = tokenizer(texts[start : start + slots], return_tensors="pt", padding=True)
            options = dict(do_sample=True, top_k=0, max_new_tokens=58 + 9)
            with torch.no_grad():
                sequences = reference.generate(**inputs, **options)
            completions = sequences[:, inputs["input_ids"].shape[1] :]
            tokens += int((completions != tokenizer.pad_token_id).sum())
        return tokens

    ways = {"torch engine": torch_engine, "transformers generate": transformers_generate}
    if not HAS_VLLM:
        return model.num_parameters(), ways
    vllm = make_engine(EngineSettings(folder, ("cpu",), "float32", 1, slots, decoding, "vllm"))
    parameters = SharedParameters(model)
    parameters.write(model.named_parameters(), 0)
    vllm.update(parameters)

    def vllm_bare() -> int:
        """vLLM without interruptions and without our books; as many sequences at once as there are
        slots."""
        from vllm import SamplingParams

        waiting, tokens, running = list(range(len(requests))), 0, 0
        while waiting or running:
            while waiting and running < slots:
                i = waiting.pop()
                prompt = {"prompt_token_ids": requests[i].prompt, "cache_salt": "bare"}
                sampling = SamplingParams(
                    seed=i,
                    logprobs=0,
                    max_tokens=58 + 9,
                    stop_token_ids=list(decoding.eos),
                    detokenize=False,
                )
                vllm.engine.add_request(f"bare {i}", prompt, sampling)
                running += 1
            outputs = vllm.engine.step()
            tokens += len(outputs)
            running -= sum(output.finished for output in outputs)
        return tokens

    ways |= {
        "vLLM engine": lambda: sampled_tokens(sample_all(vllm, requests)),
        "vLLM bare": vllm_bare,
    }
    return model.num_parameters(), ways


def rates(ways: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Sampled tokens/s of each way: the median of so many rounds, in which they take turns."""
    measured = {name: [] for name in ways}
    for _ in range(rounds):
        for name, sample in ways.items():
            tokens = []
            duration = seconds(lambda: tokens.append(sample()))
            measured[name].append(tokens[0] / duration)
    return {name: float(np.median(values)) for name, values in measured.items()}


def rate_while_training(folder: Path, case: Case) -> float:
    """Tokens/s of the vLLM engine in a run, while it is busy."""
    always = "--engine vllm --threads 1 --learning-rate 1e-12 --validation-problems 4".split()
    flags = ["--model", case.model, "--slots", case.slots, "--steps", case.steps]
    flags += ["--prompts-per-step", case.prompts_per_step]
    lines, _ = run_training(folder, f"slots-{case.slots}", *always, *flags)
    first = 5  # the steps before it fill the slots
    durations = np.diff([training_seconds(line) for line in lines])[first - 1 :]
    busy = durations * [1 - line["generator_idle_fraction"] for line in lines[first:]]
    rates_N = [line["generator_tokens_per_second"] or 0.0 for line in lines[first:]]
    return np.average(rates_N, weights=busy)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    median = f"median of {rounds} rounds"
    print(f"\nsampled tokens/s, fp32, one thread, {median}, and their ratio to `generate`\n")
    with tempfile.TemporaryDirectory() as folder:
        random = random_model(Path(folder) / "random", SIZES["25.7M"])
        for case in (Case(str(BASE_MODEL), 128, 512, 32, 40), Case(random, 16, 64, 4, 24)):
            parameters, ways = samplers(case.model, case.prompts, case.slots)
            medians = rates(ways, rounds)
            if HAS_VLLM:
                medians["vLLM while training"] = rate_while_training(Path(folder), case)
            for name, rate in medians.items():
                of_bare = f"   {rate / medians['vLLM bare']:.0%} of bare" if "vLLM" in name else ""
                ratio = f"{rate / medians['transformers generate']:7.2f}{of_bare}"
                print(f"{parameters / 1e6:6.2f}M  {name:22} {rate:10,.0f} {ratio}", flush=True)


if __name__ == "__main__":
    main()
