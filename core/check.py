"""Whether a model computes here what it computes in transformers. It is tried with each model that
is loaded, before anything is written: no list of families would be complete.

Dimensions: T tokens, N sampled tokens of two completions, V vocabulary.
"""

import contextlib
import importlib.util
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import loss
from core.engine import Decoding
from core.model import head_of, in_one_sentence, recurrent
from core.policy import Policy, micro_batches
from core.rollouts import Request, given_rollout
from core.torch_engine import TorchEngine

IDS = [*range(6)]  # tokens that every model has
# How far back a token may see, by the names that configs have for it; and how far while we look, so
# that six tokens show it.
REACHES, REACH = ("sliding_window", "attention_chunk_size"), 3
KERNELS = (
    "fla",
    "causal_conv1d",
    "mamba_ssm",
)  # for GPUs; transformers takes them if they are here


@torch.no_grad()
def refuse_wrong_logprobs(
    model: PreTrainedModel, name: str, over_slots: bool, share_prompts: bool
) -> None:
    """ValueError if this model, on the CPU in fp32, does not give tokens the log-probabilities here
    that its own forward in transformers gives them: in the trainer, without and with shared prompts
    if these are wanted, and over the slots of `TorchEngine` if that is. So no model trains with a
    cache, a mask, positions or a head that is not known here."""
    kernels = [each for each in KERNELS if recurrent(model) and importlib.util.find_spec(each)]
    fails = "it cannot be tried on a CPU"
    if kernels:
        fails += f", which has no kernels of {' and '.join(kernels)}: uninstall these"
    with small_reach(model):
        with in_one_sentence(name, fails):
            model.set_attn_implementation("eager")  # which every model has
            true_TV = model(input_ids=torch.tensor([IDS])).logits[0].float().log_softmax(-1)
            model.set_attn_implementation("grouped")
        prompts = (2, 3)  # tokens
        true_N = torch.cat([true_TV[range(n - 1, len(IDS) - 1), IDS[n:]] for n in prompts])
        with in_one_sentence(name, "it cannot be trained"):
            refuse_other(logprobs_in_trainer(model, prompts, False), true_N)
        if share_prompts:
            with in_one_sentence(name, "--no-share-prompts is needed"):
                refuse_other(logprobs_in_trainer(model, prompts, True), true_N)
        if over_slots:
            wrong = "it cannot be sampled token by token over slots of a cache"
            with in_one_sentence(name, f"{wrong}; --engine vllm may know it"):
                refuse_other(logprobs_over_slots(model), true_TV[[-1, -2]])


@contextlib.contextmanager
def small_reach(model: PreTrainedModel) -> Iterator[None]:
    """In this block a token of the model sees few others, if it does not see all."""
    config = model.config.get_text_config()
    before = {name: getattr(config, name) for name in REACHES if getattr(config, name, None)}
    try:
        for name in before:
            setattr(config, name, REACH)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
        model.set_attn_implementation("grouped")


def refuse_other(found: Tensor, true: Tensor) -> None:
    """ValueError if these log-probabilities are not the true ones, up to rounding."""
    error = (found - true).norm() / true.norm()
    if not error < 1e-3:  # nor NaN
        raise ValueError(f"its log-probabilities are off by {error:.1%}")


def logprobs_over_slots(model: PreTrainedModel) -> Tensor:
    """[2, V]: after all tokens, and after all but the last, in two slots of an engine. It reads
    prompts first, and then three tokens one by one."""
    engine = TorchEngine(model, Decoding(eos=(), prompt_budget=4, answer_budget=3), slots=2)
    engine.add([Request(0, i, IDS[: 4 - i], 0, (0,)) for i in range(2)])
    engine._admit()
    for i in (4, 5):
        engine._hidden()
        engine._append(np.arange(2), np.array([IDS[i], IDS[i - 1]]), np.zeros(2))
    return loss.head_logits(engine._hidden(), head_of(model), True).log_softmax(-1)


def logprobs_in_trainer(model: PreTrainedModel, prompts: tuple[int, ...], share: bool) -> Tensor:
    """[N]: of the tokens after prompts of so many tokens, as the trainer computes them."""
    rollouts = [given_rollout(IDS[:n], IDS[n:]) for n in prompts]
    (m,) = micro_batches(rollouts, [0, 1], 100, model.device, 0, 1, share)
    logprobs_BT, _ = Policy(model)(m, True)
    return logprobs_BT[m.sampled_BT]
