"""Whether a model computes here what it computes in transformers. train.py and generate.py try it
with their model before anything is written, since no list of families would be complete. It is
tried on the CPU: a GPU's kernels are not.

Dimensions: T tokens, N sampled tokens of two completions, V vocabulary.
"""

import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

import loss
from core.attention import most_positions, recurrent
from core.engine import Decoding, EngineSettings
from core.model import head_of, in_one_sentence, refuse_too_long, refuse_unknown
from core.policy import Policy, micro_batches
from core.rollouts import Request, given_rollout
from core.settings import refuse
from core.torch_engine import TorchEngine

IDS = [*range(6)]  # tokens that every model has
WINDOW = 3  # in place of wider ones while we look, so that six tokens show them


def refuse_unfit(model: PreTrainedModel, engine: EngineSettings, share_prompts: bool) -> None:
    """ValueError if this model, on the CPU in fp32, does not suit this engine, its budgets and the
    tokens that end or interrupt a completion, or the trainer."""
    refuse_too_long(model, engine.decoding.longest)
    refuse_unknown(model, engine.decoding.phrase + engine.decoding.eos)
    refuse_wrong_logprobs(model, engine.model, engine.engine == "torch", share_prompts)
    if engine.dtype == torch.float16:
        refuse_overflow(model)


@torch.no_grad()
def refuse_wrong_logprobs(
    model: PreTrainedModel, name: str, over_slots: bool, share_prompts: bool
) -> None:
    """ValueError if this model, on the CPU in fp32, does not give tokens the log-probabilities here
    that its own forward in transformers gives them: in the trainer, without and with shared prompts
    if these are wanted, and over the slots of `TorchEngine` if that is. So no model trains with a
    cache, a mask, positions or a head that is not known here."""
    fails = "it cannot be tried on a CPU"
    if recurrent(model):  # transformers takes their kernels, which are for GPUs
        fails += "; if fla, causal_conv1d or mamba_ssm is installed, uninstall it"
    ways = {"it cannot be trained": functools.partial(in_trainer, share=False)}
    if share_prompts:
        ways["--no-share-prompts is needed"] = functools.partial(in_trainer, share=True)
    if over_slots:
        wrong = "it cannot be sampled token by token over slots of a cache"
        ways[f"{wrong}; --engine vllm may know it"] = over_slots_of_an_engine
    narrowed = windows_of(model)
    try:
        for part, window, _ in narrowed:
            setattr(part, window, WINDOW)
        with in_one_sentence(name, fails):
            model.set_attn_implementation("eager")  # which every model has
            true_TV = model(input_ids=torch.tensor([IDS])).logits[0].float().log_softmax(-1)
        model.set_attn_implementation("grouped")
        for wrong, way in ways.items():
            with in_one_sentence(name, wrong):
                found, true = way(model, true_TV)
                error = (found - true).norm() / true.norm()
                if not error < 1e-3:  # nor NaN
                    raise ValueError(f"its log-probabilities are off by {error:.1%}")
    finally:
        for part, window, width in narrowed:
            setattr(part, window, width)
        model.set_attn_implementation("grouped")


@torch.no_grad()
def refuse_overflow(model: PreTrainedModel) -> None:
    """ValueError if float16 has no room for what the modules of this model, on the CPU in fp32, get
    and give at some tokens."""
    seen, most = [], torch.finfo(torch.float16).max
    size = lambda each: each.abs().max() if torch.is_tensor(each) and each.numel() else 0.0
    look = lambda _, inputs, output: seen.append(max(map(size, (*inputs, output))))
    with register_module_forward_hook(look):
        model.get_decoder()(input_ids=torch.tensor([IDS]))
    refuse(
        max(seen) > most,
        f"--dtype float16 ends at {most:,.0f}, and the model computes {max(seen):,.0f} between its"
        " layers: take --dtype float32",
    )


def windows_of(model: PreTrainedModel) -> list[tuple[object, str, int]]:
    """Every window that can hide a token, of whatever kind: what has it, its name and its width."""
    most = most_positions(model)
    return [
        (part, name, width)
        for part in (model.config.get_text_config(), *model.modules())
        for name, width in vars(part).items()
        if name.endswith(("window", "window_size")) and type(width) is int and WINDOW < width < most
    ]


def in_trainer(model: PreTrainedModel, true_TV: Tensor, share: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens after two prompts, and the true ones, [N]."""
    prompts = (2, 3)  # tokens
    rollouts = [given_rollout(IDS[:n], IDS[n:]) for n in prompts]
    (m,) = micro_batches(rollouts, [0, 1], 100, model.device, 0, 1, share)
    logprobs_BT, _ = Policy(model)(m, True)
    next_T = true_TV[IDS[:-1], IDS[1:]]  # position t has token t
    return logprobs_BT[m.sampled_BT], torch.cat([next_T[n - 1 :] for n in prompts])


def over_slots_of_an_engine(model: PreTrainedModel, true_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities after all tokens, and after all but the last, in two slots of an engine,
    which reads prompts first and then three tokens one by one; and the true ones, [2, V]."""
    engine = TorchEngine(model, Decoding(eos=(), prompt_budget=4, answer_budget=3), slots=2)
    engine.add([Request(0, i, IDS[: 4 - i], 0, (0,)) for i in range(2)])
    engine._admit()
    for i in (4, 5):
        engine._hidden()
        engine._append(np.arange(2), np.array([IDS[i], IDS[i - 1]]), np.zeros(2))
    logits_2V = loss.head_logits(engine._hidden(), head_of(model), True)
    return logits_2V.log_softmax(-1), true_TV[[-1, -2]]
