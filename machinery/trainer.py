"""The model and its optimizer on the trainer's devices: on one device, or shared by several ranks
through FSDP2. On a GPU it is tried first what fits."""

import dataclasses
import functools
import gc
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Module, ModuleList
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from core.attention import attention_on_gpu, padded
from core.lora import adapters, add_adapters, merged
from core.model import load_model
from core.policy import Policy, micro_batches
from core.rollouts import Rollout, SharedParameters, given_rollout
from core.screen import say
from core.settings import Settings, devices_here, trunk_dtype
from machinery.ranks import (
    from_all_ranks,
    from_rank_0,
    rank_and_ranks,
    refuse_alone,
    wait_for_ranks,
)


@dataclass(frozen=True)
class Start:
    """What every rank starts from."""

    settings: Settings
    step: int  # optimizer steps made
    model: str  # folder or hub name
    weights: int  # the checksum of the run's first model, for checkpoints
    checkpoint: Path | None  # has the optimizer's moments, and adapters
    parameters: SharedParameters  # nothing is written there yet
    longest: int  # tokens of a prompt and its completion, at most


# --- the policy -----------------------------------------------------------------------------------


def make_policy(settings: Settings, model: PreTrainedModel, device: torch.device) -> Policy:
    """The policy that this rank trains. model: on the CPU, with parameters in fp32, since bf16
    would swallow small updates.

    A single rank in fp32 has the whole model. If there are several ranks, or if the trunk computes
    in 16 bits, FSDP shards it (`shard`): it is never whole on one device then."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        model.set_attn_implementation(attention_on_gpu(model))
    if settings.gradient_checkpointing:
        for part in parts_of(model):
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
    policy = Policy(model, device)
    if dist.is_initialized():
        shard(policy, settings)
    else:
        model.to(device)
    return policy


def parts_of(model: PreTrainedModel) -> Iterator[Module]:
    """The parts of the trunk: its layers, its embedding, its norm."""
    for child in model.get_decoder().children():
        yield from child if isinstance(child, ModuleList) else [child]


def shard(policy: Policy, settings: Settings) -> None:
    """FSDP2 over all ranks, also if there is only one. A part of the trunk is gathered in its dtype
    when it is called, and freed after that; gradients are summed in fp32. What a layer gets is not
    cast: some families rotate in fp32. The head, and an embedding tied to it, stay in fp32. What
    --lora-rank freezes is kept in the trunk's dtype: it gets no update that could be too small for
    it."""
    kind = policy.device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    dtype = trunk_dtype(settings, kind)
    precision = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    head = policy.model.get_output_embeddings().weight
    for part in parts_of(policy.model):
        parameters = list(part.parameters())
        if parameters and all(parameter is not head for parameter in parameters):
            for parameter in parameters:
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)
            fully_shard(part, mesh=mesh, mp_policy=precision)
    for other in policy.model.base_model.children():  # it reads pictures, and is never called
        if policy.model.get_decoder() not in (other, policy.model.base_model):
            fully_shard(other, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    # The embedding may be in fp32; what comes after it, and the mask, are not.
    embedding = policy.model.get_input_embeddings()
    embedding.register_forward_hook(lambda _, __, output: output.to(dtype))


# --- what fits ------------------------------------------------------------------------------------

MOST_TOKENS = 32_768  # of a micro-batch; with more a GPU is no faster
LEFT_FOR_GENERATOR = 0.4  # of a GPU that a trainer shares with it


def policy_that_fits(
    start: Start, device: torch.device, make_optimizer: Callable
) -> tuple[Settings, Policy, torch.optim.Optimizer]:
    """The settings with those of `choices` that fit first, the policy, and its optimizer, which has
    made no step. On a CPU nothing is tried.

    All ranks try the same shapes, and go on alike. torch.OutOfMemoryError if nothing fits, or if
    one rank fails alone.
    """
    asked, longest = start.settings, start.longest
    on_gpu = device.type == "cuda"
    if on_gpu and str(device) in devices_here(asked)[0]:
        left = asked.generator_memory or LEFT_FOR_GENERATOR
        torch.cuda.set_per_process_memory_fraction(1 - left, device)
    for settings, words in choices(asked, longest):
        model = load_model(start.model)
        if asked.lora_rank:
            add_adapters(model, asked, start.checkpoint)
        wait_for_ranks()
        try:
            policy = make_policy(settings, model, device)
            optimizer = make_optimizer(settings, policy)
            if not on_gpu:
                return settings, policy, optimizer
            try_largest_step(settings, policy, optimizer, longest)
        except torch.OutOfMemoryError:
            policy = optimizer = model = None  # half of the model may be gathered
        # Before the collective is over in which another one may wait for this one.
        patience = asked.wait_timeout / 2
        refuse_alone("it fits" if policy else "out of memory", patience)
        if policy:
            from_rank_0(say, f"{words}: the largest micro-batch fits {device}")
            torch.cuda.set_per_process_memory_fraction(1.0, device)
            return settings, policy, optimizer
        gc.collect()  # a layer that is computed again refers to itself
        torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(f"{device} is too small for {asked.model} with {words}")


def choices(asked: Settings, longest: int) -> Iterator[tuple[Settings, str]]:
    """The settings with values for what no flag gives, and these in words; the fastest first.
    Checkpointing comes before smaller micro-batches: it costs a third at most, and 4,096 tokens
    instead of 32,768 cost two thirds of the speed of a GPU (docs/measured.md). A micro-batch holds
    at least one sequence. No gradient depends on any of these."""
    again, tokens = asked.gradient_checkpointing, asked.tokens_per_micro_batch or MOST_TOKENS
    tries = [(each, tokens) for each in ([False, True] if again is None else [again])]
    while asked.tokens_per_micro_batch is None and tokens > longest:
        tokens //= 2
        tries.append((tries[-1][0], tokens))
    for again, tokens in tries:
        settings = dataclasses.replace(
            asked,
            gradient_checkpointing=again,
            tokens_per_micro_batch=tokens,
            # A layer that is computed again would add its keys twice to the cache of its prompt.
            share_prompts=asked.share_prompts and not again,
        )
        no = "" if again else "no-"
        yield settings, f"--{no}gradient-checkpointing --tokens-per-micro-batch {tokens}"


def try_largest_step(
    settings: Settings, policy: Policy, optimizer: torch.optim.Optimizer, longest: int
) -> None:
    """A forward and a backward over the largest micro-batch, with the gradients and the optimizer's
    moments in memory, as they are from the first step on. The parameters stay as they are."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # until the loop sets it
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # As many positions as a micro-batch may have, in sequences that are about as long as can be; on
    # a GPU widths are multiples of 64.
    most = max(settings.tokens_per_micro_batch, longest)
    width = max(64, most // math.ceil(most / longest) // 64 * 64)
    share = settings.share_prompts and most > longest  # a single sequence shares nothing
    room = 2 * padded(1, policy.device) * share  # its prompt is fed too
    completion = [0] * max(1, min(longest - 1, width) - room)
    rows = list(range(most // len(completion)))  # `micro_batches` takes as many as fit
    # All prompts may differ: then each is fed for one row.
    vocabulary = policy.model.config.get_text_config().vocab_size
    rollouts = [given_rollout([row % vocabulary], completion) for row in rows]
    largest = next(micro_batches(rollouts, rows, most, policy.device, 0, 1, share))
    logprobs_BT, _ = policy(largest, settings.recipe.fp32_logits)
    logprobs_BT.sum().backward()
    optimizer.zero_grad()
    optimizer.state.clear()


# --- float16 --------------------------------------------------------------------------------------


FIRST_SCALE = 2.0**16


def loss_scale(settings: Settings, device: torch.device, checkpoint: Path | None) -> float:
    """What a run multiplies its loss with at first, or at a checkpoint, and divides its gradients
    by: in float16 small ones would be 0 (Micikevicius et al. 2018). It is 1 in other dtypes."""
    if trunk_dtype(settings, device.type) != torch.float16:
        return 1.0
    stored = json.loads((checkpoint / "state.json").read_text()) if checkpoint else {}
    return stored.get("loss_scale", FIRST_SCALE)


def next_scale(scale: float, overflow: bool, step: int) -> float:
    """The scale after this step: half of it if the gradient has overflowed, and twice as much every
    1,000 steps, unless it is 1."""
    if overflow:
        return scale / 2
    return scale if scale == 1 or step % 1000 else 2 * scale


# --- what is measured -----------------------------------------------------------------------------


@torch.no_grad()
def numerics_mismatch(policy: Policy, rollouts: list[Rollout], settings: Settings) -> dict:
    """Mean and maximum of |log pi_train - log pi_gen| over the sampled tokens of these rollouts, in
    nats. The present parameters sampled all of them, so pi_train and pi_gen are the same policy,
    and the difference is numerics alone (sec. 3.2, fp32 logits). Every rank calls this with the
    same rollouts, computes its share of them, and gets the figures of all."""
    differences, rows = [], list(range(len(rollouts)))
    tokens, share = settings.tokens_per_micro_batch, settings.share_prompts
    for m in micro_batches(rollouts, rows, tokens, policy.device, *rank_and_ranks(), share):
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


def gather(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple[dict, dict, dict]:
    """All parameters and kept buffers by name, `merged`; those of adapters; and all moments of the
    optimizer, by NUMBER/MOMENT with the number that the optimizer gives a parameter; on the CPU.
    Every rank calls this; rank 0 gets the tensors, and the others get None in their places."""
    rank, _ = rank_and_ranks()

    def at_rank_0(tensor):
        whole = gathered(tensor.detach())  # on all ranks together
        return whole.cpu() if rank == 0 else None

    parameters = {name: at_rank_0(each) for name, each in merged(policy.model)}
    low_rank = {name: at_rank_0(each) for name, each in adapters(policy.model)}
    moments = {
        f"{number}/{moment}": at_rank_0(value)
        for number, of_parameter in optimizer.state_dict()["state"].items()
        for moment, value in of_parameter.items()
    }
    return parameters, low_rank, moments


def read_moments(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Give the optimizer the moments of a checkpoint, sharded if the parameters are. The optimizer
    brings each to its device: AdamW counts its steps on the CPU, unless it is fused."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = defaultdict(dict)
    for place, value in safetensors.torch.load_file(path).items():
        number, moment = place.split("/")
        parameter = own[int(number)]
        if isinstance(parameter, DTensor) and value.shape == parameter.shape:
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        state[int(number)][moment] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
