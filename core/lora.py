"""LoRA: the model is frozen, and an adapter on each linear layer of its trunk is trained. A layer
that gave W x then gives

    W x + s B A x,    s = ALPHA / rank

All others see one model with the weights W + s B A (`merged`): generators, checkpoints, exports.
Layers, alpha and the first values are those of "LoRA Without Regret" (Thinking Machines 2025).

Dimensions: R the rank, I inputs of a layer, O its outputs.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Conv1d, Embedding, Linear, Module, Parameter
from transformers import PreTrainedModel

from core.rollouts import kept_buffers
from core.settings import Settings, refuse

ALPHA = 32


def add_adapters(model: PreTrainedModel, settings: Settings, checkpoint: Path | None = None) -> int:
    """Freeze a model in fp32 on the CPU, and put adapters on its trunk: those of a checkpoint, or
    new ones, which change nothing yet. With one seed they are the same on every rank of the
    trainer. Returns how many parameters they have. ValueError if a matrix would not learn, or if so
    high a rank saves nothing; OSError if those of the checkpoint cannot be read."""
    rank = settings.lora_rank
    layers = linear_layers(model.get_decoder())
    sizes = [(layer.in_features, layer.out_features) for layer in layers]
    parameters = rank * sum(map(sum, sizes))
    refuse(
        parameters >= sum(map(math.prod, sizes)),
        f"--lora-rank {rank} makes adapters as large as the layers that they stand beside: take a"
        " lower rank, or 0, which trains all parameters",
    )
    model.requires_grad_(False)
    rng = torch.Generator().manual_seed(settings.seed)
    for layer, (inputs, outputs) in zip(layers, sizes):
        bound = 1 / math.sqrt(inputs)
        a_RI = torch.empty(rank, inputs).uniform_(-bound, bound, generator=rng)
        layer.lora_a_RI = Parameter(a_RI)
        layer.lora_b_OR = Parameter(torch.zeros(outputs, rank))
        layer.register_forward_hook(add_low_rank)
    if checkpoint:
        stored = safetensors.torch.load_file(checkpoint / "adapters.safetensors")
        for name, parameter in adapters(model):
            parameter.data.copy_(stored[name])
    return parameters


def linear_layers(trunk: Module) -> list[Linear]:
    """The linear layers of the trunk. ValueError if it has other matrices, such as the experts of a
    layer in one tensor: they would not learn. Embeddings, and the convolutions over a few tokens of
    recurrent layers, stay as they are."""
    for name, module in trunk.named_modules():
        has_matrices = any(each.dim() > 1 for each in module.parameters(recurse=False))
        refuse(
            has_matrices and not isinstance(module, Linear | Embedding | Conv1d),
            f"--lora-rank: the matrices of {name} would not learn, since it is no linear layer:"
            " --lora-rank 0 trains all parameters",
        )
    return [module for module in trunk.modules() if isinstance(module, Linear)]


def add_low_rank(layer: Linear, inputs: tuple[Tensor], outputs: Tensor) -> Tensor:
    """A forward hook: W x becomes W x + s B A x. FSDP gathers A and B in the dtype of W."""
    scale = ALPHA / len(layer.lora_a_RI)
    return outputs + scale * F.linear(F.linear(inputs[0], layer.lora_a_RI), layer.lora_b_OR)


@torch.no_grad()
def merged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The parameters in fp32 by name, as those of a model without adapters: W + s B A; then the
    `kept_buffers`. They are sharded as W is, so all ranks call this together."""
    low_rank = dict(adapters(model))
    for name, parameter in model.named_parameters():
        layer = name.removesuffix("weight")
        if f"{layer}lora_b_OR" in low_rank:
            a_RI, b_OR = low_rank[f"{layer}lora_a_RI"], low_rank[f"{layer}lora_b_OR"]
            parameter = parameter.float() + ALPHA / len(a_RI) * (b_OR @ a_RI)
        if name not in low_rank:
            yield name, parameter.float()
    yield from kept_buffers(model)


def adapters(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the adapters by name; none if all parameters are trained."""
    return ((name, each) for name, each in model.named_parameters() if ".lora_" in name)
