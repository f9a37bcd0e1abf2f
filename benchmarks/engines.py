"""Both engines against transformers' `generate`: sampled tokens/s with two sizes of model, on one
thread. vLLM is measured where it is installed.

    python benchmarks/engines.py
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import make_parser
from conftest import save_random
from transformers import LlamaConfig

from core.engine import EngineSettings, sample_all
from core.generators import make_engine
from core.model import load_model, load_tokenizer
from core.rollouts import Request, SharedParameters
from core.settings import Settings
from core.text import make_decoding, prompt_ids
from core.torch_engine import TorchEngine
from data.tasks import arithmetic
from docs.make_base import BASE_MODEL, make_tokenizer

HAS_VLLM = importlib.util.find_spec("vllm") is not None
LARGER = LlamaConfig(
    vocab_size=30,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
)


def samplers(folder: str, prompts: int, slots: int) -> dict[str, Callable[[], int]]:
    """Ways to sample 16 completions of each prompt, with the same budgets and slots. Each returns
    how many tokens it has sampled."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(folder)
    tokenizer.padding_side = "left"
    model = load_model(folder)
    # With the attention that transformers chooses.
    reference = type(model).from_pretrained(folder, trust_remote_code=False)
    settings = Settings()
    decoding = make_decoding(tokenizer, settings)
    requests, texts = [], []
    for i, problem in enumerate(arithmetic.problems("train", prompts)):
        ids = prompt_ids(tokenizer, problem, settings)
        requests += [Request(i, j, ids, 58, (i, j)) for j in range(16)]
        texts += [problem.prompt + "<think>"] * 16

    def of_engine(engine) -> int:
        return sum(int(rollout.sampled.sum()) for rollout in sample_all(engine, requests))

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

    ways = {
        "transformers generate": transformers_generate,
        "torch engine": lambda: of_engine(TorchEngine(model, decoding, slots)),
    }
    if HAS_VLLM:
        made = EngineSettings(folder, "cpu", torch.float32, 1, slots, decoding, "vllm")
        vllm = make_engine(made)
        parameters = SharedParameters(model)
        parameters.write(model.named_parameters(), 0)
        vllm.update(parameters)
        ways["vLLM engine"] = lambda: of_engine(vllm)
    return ways


def rates(ways: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Sampled tokens/s of each way: the median of so many rounds, in which they take turns."""
    measured = {name: [] for name in ways}
    for _ in range(rounds):
        for name, sample in ways.items():
            start = time.perf_counter()
            tokens = sample()
            measured[name].append(tokens / (time.perf_counter() - start))
    return {name: float(np.median(values)) for name, values in measured.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        larger = save_random(LARGER, Path(folder) / "larger", make_tokenizer())
        for model, prompts, slots in ((str(BASE_MODEL), 128, 512), (larger, 16, 64)):
            medians = rates(samplers(model, prompts, slots), rounds)
            for way, rate in medians.items():
                ratio = rate / medians["transformers generate"]
                print(f"{Path(model).name:16} {way:22} {rate:10,.0f} {ratio:7.2f}")


if __name__ == "__main__":
    main()
