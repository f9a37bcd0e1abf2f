"""The model on the trainer's devices: one rank, or several that share it by FSDP2.

Every rank runs the same loop (train.py) and gets the same groups; here are the parts of it in which ranks differ. Rank
0 is the process that the user has started. Dimensions as in loss.py.
"""

import collections
import functools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import loss
from machinery.processes import belong_to_the_run, ending
from machinery.rollouts import Rollout
from machinery.settings import Settings, devices_here, trunk_dtype

# --- micro-batches ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Sequences as the trunk is fed them, and their targets: entry t of the tensors [B, T] belongs to the target token
    t + 1 of the sequence, prompt included. They are padded on the right, where a causal model never looks."""

    inputs_BT: Tensor  # int64: tokens fed
    targets_BT: Tensor  # int64: tokens predicted
    sampled_BT: Tensor  # bool: the target was sampled (not prompt, not forced, not padding)
    generator_logprobs_BT: Tensor  # float32: log pi_gen of the target, recorded when it was sampled
    versions_BT: Tensor  # int64: version of the parameters that the target was sampled with
    rows_B: Tensor  # int64: which of the batch's rollouts each sequence is


def micro_batches(rollouts: list[Rollout], rows: list[int], tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """This rank's share of these rows of the rollouts, in micro-batches of at most `tokens` tokens each, padding
    included (or one sequence), similar lengths together.

    All ranks have the same number of them, since FSDP wants all to call the model together. A rank with fewer gets
    sentinels: micro-batches in which nothing was sampled, so that they count for nothing.
    """
    rank, ranks = rank_and_ranks()
    longest_first = sorted(rows, key=lambda row: -sequence_length(rollouts[row]))
    shares = [cut(rollouts, longest_first[i::ranks], tokens, device) for i in range(ranks)]  # dealt out, like cards
    for i in range(max(map(len, shares))):
        if i < len(shares[rank]):
            yield micro_batch(rollouts, shares[rank][i], device)
        else:
            sentinel = micro_batch(rollouts, longest_first[-1:], device)
            sentinel.sampled_BT.fill_(False)
            yield sentinel


def sequence_length(rollout: Rollout) -> int:
    """Tokens of prompt and completion."""
    return len(rollout.request.prompt) + len(rollout.tokens)


def width(rollout: Rollout, device: torch.device) -> int:
    """Positions that the trunk is fed for it: all tokens but the last. On a GPU rounded up to a multiple of 64, since
    attention there (cuDNN's) takes about 30 ms to plan for a shape that is new, and lengths are nearly all new."""
    fed = sequence_length(rollout) - 1
    return -(-fed // 64) * 64 if device.type == "cuda" else fed


def cut(rollouts: list[Rollout], longest_first: list[int], tokens: int, device: torch.device) -> list[list[int]]:
    """Which rows make a micro-batch: as many as fit into `tokens`, each as wide as the first; or one."""
    batches: list[list[int]] = []
    for row in longest_first:
        if not batches or (len(batches[-1]) + 1) * width(rollouts[batches[-1][0]], device) > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def micro_batch(rollouts: list[Rollout], rows: list[int], device: torch.device) -> MicroBatch:
    """The tensors of these rows of the rollouts."""
    ids = np.zeros((len(rows), max(width(rollouts[row], device) for row in rows) + 1), np.int64)
    sampled, logprobs, versions = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32), np.zeros_like(ids)
    for i, rollout in enumerate(rollouts[row] for row in rows):
        prompt, end = len(rollout.request.prompt), sequence_length(rollout)
        ids[i, :prompt] = rollout.request.prompt
        ids[i, prompt:end] = rollout.tokens
        sampled[i, prompt:end] = rollout.sampled
        logprobs[i, prompt:end] = rollout.logprobs
        versions[i, prompt:end] = rollout.versions
    shifted = (ids[:, :-1], ids[:, 1:], sampled[:, 1:], logprobs[:, 1:], versions[:, 1:], np.array(rows))
    return MicroBatch(*(torch.tensor(array, device=device) for array in shifted))


class Totals:
    """Sums over the sampled tokens that a step has trained on; of the rows that are kept, each such token."""

    def __init__(self, step: int, kept_rows: set[int] = frozenset()):
        self.step = step
        self.sums: dict[str, float] = collections.defaultdict(float)
        self.ratio_max = 0.0
        self.kept_rows = kept_rows
        self.tokens: dict[int, dict[str, list[float]]] = {}  # by row; none of a row that was not trained on

    def add(
        self, m: MicroBatch, value: Tensor, sums: dict[str, Tensor], logprobs_BT: Tensor, entropies_N: Tensor
    ) -> None:
        """Add a micro-batch: its loss, what loss.policy_loss says of it, log pi_train, and the entropy at its sampled
        tokens."""
        here = {"loss": value, "entropy": entropies_N.sum(), **sums}
        self.ratio_max = max(self.ratio_max, here.pop("ratio_max").item())
        self.sums["tokens"] += len(entropies_N)
        ages_N = self.step - m.versions_BT[m.sampled_BT]
        log_ratios_N = (logprobs_BT - m.generator_logprobs_BT)[m.sampled_BT].abs()
        for age in ages_N.unique().tolist():
            of_age_N = log_ratios_N[ages_N == age]
            here[f"log_ratio_age_{age}"] = of_age_N.sum()
            self.sums[f"tokens_age_{age}"] += len(of_age_N)
        for name, tensor in here.items():
            self.sums[name] += tensor.item()
        self._keep(m, logprobs_BT, entropies_N)

    def _keep(self, m: MicroBatch, logprobs_BT: Tensor, entropies_N: Tensor) -> None:
        """Keep what the policy says of the sampled tokens in this micro-batch that are of kept rows."""
        if not self.kept_rows:
            return
        entropies_BT = torch.zeros_like(logprobs_BT).masked_scatter(m.sampled_BT, entropies_N)
        for i, row in enumerate(m.rows_B.tolist()):
            at_T = m.sampled_BT[i]
            if row in self.kept_rows and at_T.any():  # nothing is sampled in a sentinel
                columns = {"trainer_logprobs": logprobs_BT[i, at_T], "entropies": entropies_BT[i, at_T]}
                self.tokens[row] = {name: values_N.tolist() for name, values_N in columns.items()}

    def over_ranks(self) -> None:
        """Bring together what all ranks have; each then has the same."""
        everything = from_all_ranks((self.sums, self.ratio_max, self.tokens))
        names = {name for sums, _, _ in everything for name in sums}
        self.sums |= {name: sum(sums[name] for sums, _, _ in everything) for name in sorted(names)}
        self.ratio_max = max(ratio_max for _, ratio_max, _ in everything)
        self.tokens = {row: its for _, _, tokens in everything for row, its in tokens.items()}

    def columns(self) -> dict:
        """As they are logged: the loss, and means over the tokens, which are None where there were none."""
        sums, tokens = self.sums, self.sums["tokens"]
        names = {"ratio_mean": "ratio", "clipped_fraction": "clipped", "kl_estimate": "kl", "entropy": "entropy"}
        means = {column: sums[name] / tokens if tokens else None for column, name in names.items()}
        means["effective_sample_size"] = sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if tokens else None
        ages = [name.removeprefix("log_ratio") for name in sums if name.startswith("log_ratio")]
        means |= {f"log_ratio{age}": sums[f"log_ratio{age}"] / sums[f"tokens{age}"] for age in ages}
        return {"loss": sums["loss"], "ratio_max": self.ratio_max if tokens else None, **means}


# --- the policy -----------------------------------------------------------------------------------------------------


class Policy(torch.nn.Module):
    """A causal LM as the trainer calls it. A module, because FSDP gathers parameters when a module is called."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, fp32_logits: bool) -> tuple[Tensor, Tensor]:
        """log pi_train of the sampled targets [B, T] (0 elsewhere; differentiable) and the entropies there [N]."""
        hidden_BTD = self.model.base_model(input_ids=batch.inputs_BT, use_cache=False).last_hidden_state
        logprobs_N, entropies_N = loss.sampled_logprobs(
            hidden_BTD[batch.sampled_BT],
            self.model.get_output_embeddings().weight,
            batch.targets_BT[batch.sampled_BT],
            fp32_logits,
        )
        logprobs_BT = torch.zeros(batch.sampled_BT.shape, device=logprobs_N.device)
        return logprobs_BT.masked_scatter(batch.sampled_BT, logprobs_N), entropies_N


def make_policy(settings: Settings, model: PreTrainedModel, device: torch.device) -> Policy:
    """The policy that this rank trains, of a model on the CPU with parameters in fp32: bf16 would swallow small
    updates. What is to be sharded is not put on one device first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        model.set_attn_implementation("sdpa")
    if not dist.is_initialized():
        model.to(device)
    for layer in layers_and_rest(model)[0]:
        if settings.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)  # micro-batches have any length
        if settings.gradient_checkpointing:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    policy, dtype = Policy(model), trunk_dtype(settings, str(device))
    if dist.is_initialized():
        shard(policy, device.type, dtype)
    return policy


def layers_and_rest(model: PreTrainedModel) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The layers of the trunk, and what else it has: embedding, norm."""
    children = list(model.base_model.children())
    layers = [layer for child in children if isinstance(child, torch.nn.ModuleList) for layer in child]
    return layers, [child for child in children if not isinstance(child, torch.nn.ModuleList)]


def shard(policy: Policy, device_type: str, dtype: torch.dtype) -> None:
    """FSDP2 over all ranks, also over one: each part of the trunk is gathered when it is called, in `dtype`, and let go
    of after; the gradients are summed in fp32. The head, and an embedding tied to it, are fp32."""
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    head = policy.model.get_output_embeddings().weight
    layers, rest = layers_and_rest(policy.model)
    for part in [*layers, *rest]:
        own = list(part.parameters())
        if own and all(parameter is not head for parameter in own):
            fully_shard(part, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh)


@torch.no_grad()
def numerics_mismatch(policy: Policy, rollouts: list[Rollout], settings: Settings) -> dict[str, float]:
    """Mean and maximum of |log pi_train - log pi_gen| over tokens of rollouts that the model's present parameters
    sampled from first to last: what the ratio is off by although the policy is the same (sec. 3.2, fp32 logits)."""
    total, largest, tokens = 0.0, 0.0, 0
    rows = list(range(len(rollouts)))
    for batch in micro_batches(rollouts, rows, settings.tokens_per_micro_batch, policy.model.device):
        logprobs_BT, _ = policy(batch, settings.recipe.fp32_logits)
        differences_N = (logprobs_BT - batch.generator_logprobs_BT)[batch.sampled_BT].abs()
        if len(differences_N):
            total += differences_N.sum().item()
            largest = max(largest, differences_N.max().item())
            tokens += len(differences_N)
    if isinstance(policy, FSDPModule):
        policy.reshard()  # as a backward would; until then the head's parameter is another object
    totals, maxima, counted = zip(*from_all_ranks((total, largest, tokens)))
    return {"mismatch_mean": sum(totals) / sum(counted), "mismatch_max": max(maxima)}


@torch.no_grad()
def update_size(optimizer: torch.optim.AdamW) -> float:
    """The norm of AdamW's last update, without weight decay, divided by that of the parameters that it has changed. It
    is computed from the moments, since a copy of the parameters from before the step would take memory."""
    (group,), updated, there = optimizer.param_groups, [], []
    beta1, beta2 = group["betas"]
    for parameter, state in optimizer.state.items():
        first = state["exp_avg"] / (1 - beta1 ** state["step"])
        second = state["exp_avg_sq"] / (1 - beta2 ** state["step"])
        updated.append((group["lr"] * first / (second.sqrt() + group["eps"])).square().sum())
        there.append(parameter.square().sum())
    return (whole(sum(updated)) / whole(sum(there))).sqrt().item()


# --- whole tensors, for checkpoints ---------------------------------------------------------------------------------


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP has sharded, gathered; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather(policy: Policy, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On rank 0 all parameters and all moments of the optimizer, whole, by name; elsewhere nothing is kept."""
    parameters, moments, (rank, ranks) = {}, {}, rank_and_ranks()
    for name, parameter in policy.model.named_parameters():
        tensors = {name: parameter.detach()}
        tensors |= {f"{name}/{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
        for key, value in tensors.items():
            value = whole(value)
            if rank == 0:
                (parameters if key == name else moments)[key] = value.cpu() if ranks > 1 else value
    return parameters, moments


def read_moments(policy: Policy, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Give the optimizer the moments that a checkpoint has, in shards if the parameters are."""
    parameters = dict(policy.model.named_parameters())
    for place, value in safetensors.torch.load_file(path).items():
        name, _, key = place.rpartition("/")
        parameter = parameters[name]
        if key != "step" or optimizer.defaults["fused"]:  # which counts its steps where the parameter is
            value = value.to(parameter.device)
        if key != "step" and isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        optimizer.state[parameter][key] = value


# --- ranks ----------------------------------------------------------------------------------------------------------


def rank_and_ranks() -> tuple[int, int]:
    """Which of the trainer's processes this is, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def everyone(value):
    """What rank 0 has called this with, on every rank."""
    if rank_and_ranks()[1] > 1:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        value = box[0]
    return value


def from_all_ranks(value) -> list:
    """What each rank has called this with, in the order of the ranks."""
    values = [value] * rank_and_ranks()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def wait_for_ranks() -> None:
    """Go on when all ranks have come here."""
    from_all_ranks(None)


def join_ranks(rank: int, devices: list[str], meeting_place: str) -> None:
    """Make this process one of the trainer's. They meet at a file, so no port is taken for it."""
    if devices[rank].startswith("cuda"):
        torch.cuda.set_device(devices[rank])  # first of all: what asks for no GPU in particular would be on the first
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if devices[rank].startswith("cuda") else "gloo",
        store=dist.FileStore(meeting_place, len(devices)),
        rank=rank,
        world_size=len(devices),
        timeout=timedelta(days=30),  # rank 0 may wait long for generators; that a rank has died is seen by `_watch`
    )
    dist.barrier()


def start_other_ranks(settings: Settings, train: Callable, arguments: tuple, hint: Callable[[], str]) -> None:
    """Start the trainer's other ranks, each a process that calls train(rank, *arguments), and make this one rank 0.

    When one of them fails, all end, with its traceback and what `hint` says then. A rank alone needs no group of ranks
    in fp32; in bf16 it has one, since it is FSDP that computes in bf16 from parameters in fp32.
    """
    devices = devices_here(settings)[1]
    if len(devices) == 1 and trunk_dtype(settings, devices[0]) == torch.float32:
        return
    with tempfile.TemporaryDirectory(prefix="trainers-") as folder:
        meeting_place = os.path.join(folder, "meeting-place")
        if len(devices) > 1:
            others = multiprocessing.spawn(
                _other_rank, (devices, meeting_place, train, arguments), len(devices) - 1, join=False, daemon=True
            )
            threading.Thread(target=_watch, args=(others, hint), daemon=True).start()
        join_ranks(0, devices, meeting_place)


def _other_rank(number: int, devices: list[str], meeting_place: str, train: Callable, arguments: tuple) -> None:
    belong_to_the_run()
    transformers.utils.logging.disable_progress_bar()
    join_ranks(number + 1, devices, meeting_place)
    train(number + 1, *arguments)
    end_ranks()
    os._exit(0)  # at once: while Python takes itself apart, one of gloo's threads may still run and abort the process


def end_ranks() -> None:
    """Let go of the other ranks, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _watch(others, hint: Callable[[], str]) -> None:
    """End this process, and so all that belong to it, when another rank has failed: the main thread may wait for that
    rank in a collective, for ever."""
    try:
        while not others.join():
            pass
    except Exception as error:
        if ending.is_set() and isinstance(error, multiprocessing.ProcessExitedException):
            return  # this process has ended it
        time.sleep(0.1)
        print(f"\nerror: a process of the trainer has failed, and the run ends{hint()}\n{error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
