"""From rollouts to log pi: micro-batches of padded sequences, and the forward of the policy over them.

    rollouts of a batch -> micro_batches: sequences of like length together, padded on the right, shifted by one
                        -> Policy: trunk, then the head where a sampled token is predicted -> log pi_train, entropy

Dimensions as in loss.py: B sequences in a micro-batch, T positions, N sampled tokens, D hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import loss
from machinery.rollouts import Rollout

# --- micro-batches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch. A model that is fed token t predicts token t + 1. So column t of the inputs is token
    t, and column t of all other tensors [B, T] is about token t + 1."""

    inputs_BT: Tensor  # int64: the token that is fed
    targets_BT: Tensor  # int64: the token that is predicted
    sampled_BT: Tensor  # bool: the target was sampled (it is no prompt, not forced, no padding)
    generator_logprobs_BT: Tensor  # float32: log pi_gen of the target, recorded when it was sampled
    versions_BT: Tensor  # int64: version of the parameters that sampled the target
    rows_B: Tensor  # int64: the place of each sequence among the rollouts of the batch


def micro_batches(
    rollouts: list[Rollout], rows: list[int], tokens: int, device: torch.device, rank: int, ranks: int
) -> Iterator[MicroBatch]:
    """The micro-batches of one rank: its share of these rows of the rollouts. Each has at most `tokens` positions,
    padding included, or a single sequence. Sequences of like length come together.

    FSDP wants all ranks to call the model together, so all ranks get the same number of micro-batches. A rank with
    fewer gets the shortest sequence again, with no token marked as sampled: it adds nothing to the loss.
    """
    longest_first = sorted(rows, key=lambda row: -rollouts[row].length)
    shares = [cut(rollouts, longest_first[i::ranks], tokens, device) for i in range(ranks)]  # dealt out like cards
    for i in range(max(map(len, shares))):
        if i < len(shares[rank]):
            yield micro_batch(rollouts, shares[rank][i], device)
        else:
            idle = micro_batch(rollouts, longest_first[-1:], device)
            idle.sampled_BT.fill_(False)
            yield idle


def cut(rollouts: list[Rollout], longest_first: list[int], tokens: int, device: torch.device) -> list[list[int]]:
    """The rows of each micro-batch: as many as have rows x (width of the longest) <= `tokens`, but at least one."""
    batches: list[list[int]] = []
    for row in longest_first:
        if not batches or (len(batches[-1]) + 1) * width(rollouts[batches[-1][0]], device) > tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def width(rollout: Rollout, device: torch.device) -> int:
    """How many positions the trunk is fed: all tokens but the last. On a GPU this is rounded up to a multiple of 64:
    attention there (cuDNN's) plans about 30 ms for each new shape, and nearly every length is new."""
    fed = rollout.length - 1
    return -(-fed // 64) * 64 if device.type == "cuda" else fed


def micro_batch(rollouts: list[Rollout], rows: list[int], device: torch.device) -> MicroBatch:
    """The tensors of these rows of the rollouts. Padding is on the right, where a causal model never looks."""
    ids = np.zeros((len(rows), max(width(rollouts[row], device) for row in rows) + 1), np.int64)
    sampled, logprobs, versions = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32), np.zeros_like(ids)
    for i, rollout in enumerate(rollouts[row] for row in rows):
        start, end = len(rollout.request.prompt_ids), rollout.length  # of the completion
        ids[i, :start] = rollout.request.prompt_ids
        ids[i, start:end] = rollout.tokens
        sampled[i, start:end] = rollout.sampled
        logprobs[i, start:end] = rollout.logprobs
        versions[i, start:end] = rollout.versions
    shifted = (ids[:, :-1], ids[:, 1:], sampled[:, 1:], logprobs[:, 1:], versions[:, 1:], np.array(rows))
    return MicroBatch(*(torch.tensor(array, device=device) for array in shifted))


# --- the policy -----------------------------------------------------------------------------------------------------


class Policy(torch.nn.Module):
    """A causal LM as the trainer calls it. It is a module, because FSDP gathers parameters when a module is called."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, m: MicroBatch, fp32_logits: bool) -> tuple[Tensor, Tensor]:
        """log pi_train of the sampled targets [B, T] (differentiable; 0 at all other places), and the policy's entropy
        at the sampled targets [N], in nats. Both are float32."""
        hidden_BTD = self.model.base_model(input_ids=m.inputs_BT, use_cache=False).last_hidden_state
        logprobs_N, entropies_N = loss.sampled_logprobs(
            hidden_BTD[m.sampled_BT],
            self.model.get_output_embeddings().weight,
            m.targets_BT[m.sampled_BT],
            fp32_logits,
        )
        logprobs_BT = torch.zeros(m.sampled_BT.shape, device=logprobs_N.device)
        return logprobs_BT.masked_scatter(m.sampled_BT, logprobs_N), entropies_N
