"""The model and its optimizer on the trainer's devices: on one device, or shared by several ranks
through FSDP2."""

import functools
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module, ModuleList
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from core.devices import trunk_dtype
from core.model import use_wide_products
from core.policy import Policy, micro_batches
from core.rollouts import Rollout
from core.settings import Settings
from machinery.ranks import from_all_ranks, rank_and_ranks

# --- the policy -----------------------------------------------------------------------------------


def make_policy(settings: Settings, model: PreTrainedModel, device: torch.device) -> Policy:
    """The policy that this rank trains. model: on the CPU, with parameters in fp32, since bf16
    would swallow small updates.

    A single rank in fp32 has the whole model. If there are several ranks, if the trunk computes in
    bf16, or with --offload, FSDP shards it (`shard`): it is never whole on one device then."""
    use_wide_products(model, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        model.set_attn_implementation("sdpa")
    if settings.gradient_checkpointing:
        layers, _ = layers_and_rest(model)
        for layer in layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    policy = Policy(model, device)
    if dist.is_initialized():
        shard(policy, device.type, trunk_dtype(settings, str(device)), settings.offload)
    else:
        model.to(device)
    return policy


def layers_and_rest(model: PreTrainedModel) -> tuple[list[Module], list[Module]]:
    """The layers of the trunk, and its other parts: embedding, norm."""
    layers, rest = [], []
    for child in model.base_model.children():
        if isinstance(child, ModuleList):
            layers.extend(child)
        else:
            rest.append(child)
    return layers, rest


def shard(policy: Policy, device_type: str, dtype: torch.dtype, offload: bool) -> None:
    """FSDP2 over all ranks, also if there is only one. A part of the trunk is gathered in `dtype`
    when it is called, and freed after that; gradients are summed in fp32. The head, and an
    embedding tied to it, stay in fp32.

    offload: the shards, their gradients and so the moments wait in the CPU's memory. A part is
    copied to the device when it is gathered, and the optimizer steps on the CPU."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    cast_to = None if dtype == torch.float32 else dtype
    precision = MixedPrecisionPolicy(param_dtype=cast_to, reduce_dtype=torch.float32)
    # Pinned memory is for copies to a GPU.
    waiting = CPUOffloadPolicy(pin_memory=device_type == "cuda") if offload else OffloadPolicy()
    head = policy.model.get_output_embeddings().weight
    layers, rest = layers_and_rest(policy.model)
    for part in layers + rest:
        parameters = list(part.parameters())
        if parameters and all(parameter is not head for parameter in parameters):
            fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=waiting)
    fully_shard(policy, mesh=mesh, offload_policy=waiting)


# --- what is measured -----------------------------------------------------------------------------


@torch.no_grad()
def numerics_mismatch(
    policy: Policy, rollouts: list[Rollout], settings: Settings
) -> dict[str, float]:
    """Mean and maximum of |log pi_train - log pi_gen| over the sampled tokens of these rollouts, in
    nats. The present parameters sampled all of them, so pi_train and pi_gen are the same policy,
    and the difference is numerics alone (sec. 3.2, fp32 logits). Every rank calls this with the
    same rollouts, computes its share of them, and gets the figures of all."""
    differences = []
    rank, ranks = rank_and_ranks()
    rows, tokens = list(range(len(rollouts))), settings.tokens_per_micro_batch
    device, share = policy.device, settings.share_prompts
    for m in micro_batches(rollouts, rows, tokens, device, rank, ranks, share):
        logprobs_BT, _ = policy(m, settings.recipe.fp32_logits)
        differences.append((logprobs_BT - m.generator_logprobs_BT)[m.sampled_BT].abs().cpu())
    if isinstance(policy, FSDPModule):
        policy.reshard()  # a backward does this; until then the head's parameter is another object
    differences_N = torch.cat(from_all_ranks(torch.cat(differences)))
    return {
        "mismatch_mean": differences_N.mean().item(),
        "mismatch_max": differences_N.max().item(),
    }


@torch.no_grad()
def update_size(optimizer: torch.optim.AdamW) -> float:
    """The norm of AdamW's last update, without weight decay, divided by the norm of the parameters.
    It is computed from the moments, because a copy of the parameters from before the step would
    take memory."""
    (group,) = optimizer.param_groups
    beta1, beta2 = group["betas"]
    updates, parameters = [], []
    for parameter, state in optimizer.state.items():
        first = state["exp_avg"] / (1 - beta1 ** state["step"])
        second = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
        update = group["lr"] * first / (second.sqrt() + group["eps"])
        updates.append(update.square().sum())
        parameters.append(parameter.square().sum())
    return (gathered(sum(updates)) / gathered(sum(parameters))).sqrt().item()


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, also if FSDP has sharded it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- to and from a checkpoint ---------------------------------------------------------------------


def gather(
    policy: Policy, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All parameters, by name, and all moments of the optimizer, by NAME/MOMENT. Every rank calls
    this; rank 0 gets the tensors, and the others get none."""
    sharded = {}
    for name, parameter in policy.model.named_parameters():
        sharded[name] = parameter.detach()
        for moment, value in optimizer.state.get(parameter, {}).items():
            sharded[f"{name}/{moment}"] = value
    rank, ranks = rank_and_ranks()
    parameters, moments = {}, {}
    for name, tensor in sharded.items():
        tensor = gathered(tensor)  # on all ranks together
        if rank == 0:
            kind = moments if "/" in name else parameters
            kind[name] = tensor.cpu() if ranks > 1 else tensor
    return parameters, moments


def read_moments(policy: Policy, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Give the optimizer the moments of a checkpoint, sharded if the parameters are."""
    parameters = dict(policy.model.named_parameters())
    for place, value in safetensors.torch.load_file(path).items():
        name, _, moment = place.rpartition("/")
        parameter = parameters[name]
        if moment != "step" and isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        # AdamW counts its steps on the CPU; the fused one counts them where the parameters are.
        if moment != "step" or optimizer.defaults["fused"]:
            value = value.to(parameter.device)
        optimizer.state[parameter][moment] = value
