"""How long a run takes at the least, for `train.py --plan`: the FLOPs of a step by part, and the
time that each part takes on a GPU of a named kind if nothing but its data sheet holds it up."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from core.devices import trunk_dtype
from core.rollouts import tokens_and_pairs
from core.settings import TrainCommand
from machinery.compute import attention_width, matmul_parameters
from machinery.memory import Needs, Shape


@dataclass(frozen=True)
class Kind:
    """What the maker's data sheet says of a GPU, without sparsity."""

    bf16: float  # TFLOP/s of matmuls in bf16, summed in fp32, on tensor cores
    fp32: float  # TFLOP/s in fp32, without tensor cores
    bandwidth: float  # TB/s of its memory


KINDS = {
    # NVIDIA's data sheets of H200, H100 (SXM and PCIe), A100 80 GB (SXM), L40S, L4 and A10.
    "H200": Kind(989, 67, 4.8),
    "H100": Kind(989, 67, 3.35),
    "H100-PCIe": Kind(756, 51, 2.0),
    "A100": Kind(312, 19.5, 2.039),
    "L40S": Kind(362, 91.6, 0.864),
    "L4": Kind(121, 30.3, 0.3),
    "A10": Kind(125, 31.2, 0.6),
    # NVIDIA's white papers of the architectures: Blackwell, Ada, Ampere GA102.
    "RTX-5090": Kind(209.5, 104.8, 1.792),
    "RTX-4090": Kind(165.2, 82.6, 1.008),
    "RTX-4080": Kind(97.5, 48.7, 0.717),
    "RTX-3090": Kind(71, 35.6, 0.936),
    "A6000": Kind(154.8, 38.7, 0.768),
}
# For comparison: what others publish of their trainers.
THEIRS = (
    "theirs, not ours: prime-rl publishes 11.9k trained tokens/s for Qwen3-0.6B at 16k tokens on"
    " one H100 (MFU 11 %), and 3.7k on one A6000"
)


def kind_of(name: str) -> Kind:
    """ValueError, with the names that are known, for any other."""
    if name not in KINDS:
        raise ValueError(f"--gpu-kind {name} is not known; known are {', '.join(KINDS)}")
    return KINDS[name]


def step_flops(
    command: TrainCommand, model: PreTrainedModel, prompt: int, completion: int
) -> dict[str, float]:
    """FLOPs of an optimizer step by part, if each prompt and completion has so many tokens, and no
    group is filtered out. Counted as compute_flops in the log: 2 for a number that a token or a
    pair is multiplied with, and 4 more in the backward; nothing for what is computed again."""
    groups, size = command.groups_per_step, command.completions_per_prompt
    head, width = model.get_output_embeddings().weight.numel(), attention_width(model)
    parameters = matmul_parameters(model)
    prompt_tokens, prompt_pairs = tokens_and_pairs([(prompt, 0)])
    tokens, pairs = tokens_and_pairs([(completion, prompt)])
    copies = 1 if command.share_prompts and not command.gradient_checkpointing else size
    fed = groups * (copies * prompt_tokens + size * tokens)
    fed_pairs = groups * (copies * prompt_pairs + size * pairs)
    return {
        "prompts": 2 * groups * (parameters * prompt_tokens + width * prompt_pairs),
        "sampling": 2 * groups * size * (parameters * tokens + width * pairs),
        "trunk": 6 * (parameters - head) * fed,
        "head": 6 * head * groups * size * tokens,
        "attention": 6 * width * fed_pairs,
    }


def least_seconds(
    command: TrainCommand, need: Needs, shape: Shape, flops: dict[str, float], completion: int
) -> dict[str, float]:
    """The seconds that each part takes on all its devices together, at full speed. A token that is
    sampled also reads the weights, with the other slots, and half of its sequence's cache."""
    kind = kind_of(command.gpu_kind)
    in_bf16 = trunk_dtype(command, need.trainers[0]) == torch.bfloat16
    trunk_rate = (kind.bf16 if in_bf16 else kind.fp32) * 1e12
    head_rates = {True: kind.fp32, "split": kind.bf16 / 2, False: kind.bf16}
    head_rate = head_rates[command.recipe.fp32_logits] * 1e12
    samplers = sum(map(len, need.generators))

    sampled = command.groups_per_step * command.completions_per_prompt * completion
    cache_of_a_token = 2 * shape.layers * shape.cached
    bytes_of_a_token = need.generator["weights"] / command.slots + completion / 2 * cache_of_a_token
    reading = sampled * bytes_of_a_token / (kind.bandwidth * 1e12)
    trainers = len(need.trainers)
    return {
        "prompts": flops["prompts"] / trunk_rate / samplers,
        "sampling": max(flops["sampling"] / trunk_rate, reading) / samplers,
        "trunk": flops["trunk"] / trunk_rate / trainers,
        "head": flops["head"] / head_rate / trainers,
        "attention": flops["attention"] / trunk_rate / trainers,
    }


def time_rows(
    command: TrainCommand, need: Needs, model: PreTrainedModel, shape: Shape
) -> list[tuple[str, str, str]]:
    """Rows of a name, a figure and words: FLOPs of a step by part; with --gpu-kind the least time
    of each part, and the least hours of the run."""
    prompt = command.prompt_budget
    completion = need.length - prompt
    flops = step_flops(command, model, prompt, completion)
    rows = [("a step at full length", "FLOPs", f"{sum(flops.values()):.2e} in all")]
    seconds = {}
    if command.gpu_kind:
        seconds = least_seconds(command, need, shape, flops, completion)
    for name, count in flops.items():
        least = f"at least {seconds[name]:,.3g} s on {command.gpu_kind}" if seconds else ""
        rows.append((f"  {name}", f"{count:.2e}", least))
    if not seconds:
        return rows

    # Both sides work at the same time, unless they share a device.
    sampling = seconds["prompts"] + seconds["sampling"]
    training = sum(seconds.values()) - sampling
    shared = {*need.trainers} & {name for names in need.generators for name in names}
    step = sampling + training if shared else max(sampling, training)
    hours = f"at least {command.steps * step / 3600:,.3g}"
    rows.append(("hours", "", f"{hours} for {command.steps} steps, without validations"))
    return [*rows, ("", "", THEIRS)]
