"""The model and its optimizer on the trainer's devices: on one device, or shared by several ranks
through FSDP2. On a GPU it is tried first what fits."""

import dataclasses
import functools
import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
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

from core.policy import Policy, micro_batches
from core.rollouts import Rollout, given_rollout
from core.screen import say
from core.settings import Settings, devices_here, trunk_dtype
from machinery.ranks import from_all_ranks, outcomes, rank_and_ranks, wait_for_ranks

# --- the policy -----------------------------------------------------------------------------------


def make_policy(settings: Settings, model: PreTrainedModel, device: torch.device) -> Policy:
    """The policy that this rank trains. model: on the CPU, with parameters in fp32, since bf16
    would swallow small updates.

    A single rank in fp32 has the whole model. If there are several ranks, if the trunk computes in
    bf16, or with --offload, FSDP shards it (`shard`): it is never whole on one device then."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        model.set_attn_implementation("fused")
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


# --- what fits ------------------------------------------------------------------------------------

MOST_TOKENS = 32_768  # of a micro-batch; with more a GPU is no faster
LEFT_FOR_GENERATOR = 0.4  # of a GPU that a trainer shares with it


def policy_that_fits(
    asked: Settings,
    load: Callable[[], PreTrainedModel],
    device: torch.device,
    make_optimizer: Callable[[Settings, Policy], torch.optim.Optimizer],
    longest: int,
) -> tuple[Settings, Policy, torch.optim.Optimizer]:
    """The settings with those of `choices` that fit first, the policy, and its optimizer, which has
    made no step. On a CPU nothing is tried.

    load: the model, on the CPU. longest: tokens of a sequence. All ranks try the same shapes, and
    go on alike. torch.OutOfMemoryError if nothing fits, or if one rank fails alone.
    """
    refused, on_gpu = [], device.type == "cuda"
    if on_gpu and str(device) in sum(devices_here(asked)[0], ()):
        left = asked.generator_memory or LEFT_FOR_GENERATOR
        torch.cuda.set_per_process_memory_fraction(1 - left, device)
    for settings, words in choices(asked, device, longest):
        model = load()
        wait_for_ranks()
        try:
            policy = make_policy(settings, model, device)
            optimizer = make_optimizer(settings, policy)
            if on_gpu:
                try_largest_step(settings, policy, optimizer, longest)
            outcome = "fits"
        except torch.OutOfMemoryError:
            policy = optimizer = None  # after a failure half of the model may be gathered
            outcome = "out of memory"
        model = None
        if not on_gpu:
            return settings, policy, optimizer
        of_ranks = outcomes(outcome, asked.wait_timeout)
        if len({*of_ranks}) > 1:
            alone = of_ranks.index("out of memory")
            raise torch.OutOfMemoryError(f"rank {alone} of the trainer alone has too little memory")
        if outcome == "fits":
            if rank_and_ranks()[0] == 0:
                too_large = f"; too large were {', '.join(refused)}" * bool(refused)
                say(f"{words}: the largest micro-batch fits {device}{too_large}")
            torch.cuda.set_per_process_memory_fraction(1.0, device)
            return settings, policy, optimizer
        refused.append(words)
        gc.collect()  # a layer that is computed again refers to itself
        torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(f"{device} is too small for {asked.model} with {refused[-1]}")


def choices(asked: Settings, device: torch.device, longest: int) -> Iterator[tuple[Settings, str]]:
    """The settings with values for what no flag gives, and these in words; the fastest first. On a
    GPU checkpointing comes before smaller micro-batches: it costs a third at most, and 4,096 tokens
    instead of 32,768 cost two thirds of the speed (docs/measured.md). A micro-batch holds at least
    one sequence. No gradient depends on any of these."""
    again, tokens = [False], [Settings.tokens_per_micro_batch]
    if device.type == "cuda":
        again, halvings = [False, True], max(0, math.ceil(math.log2(MOST_TOKENS / longest)))
        tokens = [MOST_TOKENS >> i for i in range(halvings + 1)]
    if asked.gradient_checkpointing is not None:
        again = [asked.gradient_checkpointing]
    if asked.tokens_per_micro_batch is not None:
        tokens = [asked.tokens_per_micro_batch]
    pairs = [(each, tokens[0]) for each in again] + [(again[-1], each) for each in tokens[1:]]
    for gradient_checkpointing, most in pairs:
        settings = dataclasses.replace(
            asked,
            gradient_checkpointing=gradient_checkpointing,
            tokens_per_micro_batch=most,
            # A layer that is computed again would add its keys twice to the cache of its prompt.
            share_prompts=asked.share_prompts and not gradient_checkpointing,
        )
        no = "" if gradient_checkpointing else "no-"
        yield settings, f"--{no}gradient-checkpointing --tokens-per-micro-batch {most}"


def try_largest_step(
    settings: Settings, policy: Policy, optimizer: torch.optim.Optimizer, longest: int
) -> None:
    """A forward and a backward over the largest micro-batch, with the gradients and the optimizer's
    moments in memory, as they are from the first step on. The parameters stay as they are."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # until the loop sets it
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # As many positions as a micro-batch may have, in sequences that are about as long as can be; on
    # a GPU widths are multiples of 64.
    most = max(settings.tokens_per_micro_batch, longest)
    width = most // math.ceil(most / longest) // 64 * 64
    length = min(longest, max(64, width) + 1)
    rollouts = [given_rollout([0], [0] * (length - 1))] * (most // (length - 1))
    rows = list(range(len(rollouts)))
    largest = next(micro_batches(rollouts, rows, most, policy.device, 0, 1))
    logprobs_BT, _ = policy(largest, settings.recipe.fp32_logits)
    logprobs_BT.sum().backward()
    optimizer.zero_grad()
    optimizer.state.clear()


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
    """Give the optimizer the moments of a checkpoint, sharded if the parameters are. The optimizer
    brings each to its device: AdamW counts its steps on the CPU, unless it is fused."""
    names = {parameter: name for name, parameter in policy.model.named_parameters()}
    of_parameter = defaultdict(dict)
    for place, value in safetensors.torch.load_file(path).items():
        name, _, moment = place.rpartition("/")
        of_parameter[name][moment] = value
    state = {}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(own):
        state[number] = of_parameter[names[parameter]]
        for moment, value in state[number].items():
            if isinstance(parameter, DTensor) and value.shape == parameter.shape:
                mesh, placements = parameter.device_mesh, parameter.placements
                state[number][moment] = distribute_tensor(value, mesh, placements)
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
