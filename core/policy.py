"""From rollouts to log pi: micro-batches of padded sequences, and the forward of the policy over
them.

    rollouts of a batch -> micro_batches: sequences of like length together, padded on the right, shifted by one
                        -> Policy: trunk, then the head where a sampled token is predicted -> log pi_train, entropy

A prompt is the same for all completions of its group. If it pays, a micro-batch holds groups, and
the trunk is fed each prompt once; the completions are fed after that, and attend to the prompt's
keys and values.

Dimensions as in loss.py: B sequences in a micro-batch, T positions, N sampled tokens, D hidden
size. And P distinct prompts in a micro-batch, L positions of a shared prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import loss
from core.rollouts import Rollout, tokens_and_pairs

# --- micro-batches --------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch. A model that is fed token t predicts token t + 1. So column t of
    the inputs is token t, and column t of the next four is about token t + 1. Token 0 is the first
    of the prompt. With shared prompts column 0 is the last token of the prompt. It is fed with the
    prompt in prompts_PL, and only the columns after it are fed then."""

    inputs_BT: Tensor  # int64: the token that is fed
    targets_BT: Tensor  # int64: the token that is predicted
    sampled_BT: Tensor  # bool: the target was sampled (it is no prompt, not forced, no padding)
    generator_logprobs_BT: Tensor  # float32: log pi_gen of the target, recorded when it was sampled
    versions_BT: Tensor  # int64: version of the parameters that sampled the target
    rows_B: Tensor  # int64: the place of each sequence among the rollouts of the batch
    fed: int  # tokens that the trunk is fed, without padding
    pairs: int  # of a token that is fed and one that it attends to
    # Only with shared prompts: each distinct prompt is fed once.
    prompts_PL: Tensor | None = None  # int64: whole prompts, padded on the right
    prompt_B: Tensor | None = None  # int64: the prompt of each sequence
    prompt_tokens_B: Tensor | None = None  # int64: of that prompt, without padding


def micro_batches(
    rollouts: list[Rollout], rows: list[int], tokens: int, device: torch.device, rank: int, ranks: int,
    share_prompts: bool = False,
) -> Iterator[MicroBatch]:  # fmt: skip
    """The micro-batches of one rank: its share of these rows of the rollouts. Each has at most
    `tokens` positions, padding included, or a single sequence.

    Sequences of like length come together. With share_prompts two other plans are made, in which
    prompts are shared: one in the same order, and one with all rows of a prompt together. The plan
    that feeds the fewest positions is used.

    FSDP wants all ranks to call the model together, so all ranks get the same number of
    micro-batches, and all share prompts or none does. A rank with fewer gets the shortest sequence
    again, with no token marked as sampled: it adds nothing to the loss.
    """
    singles = [[row] for row in sorted(rows, key=lambda row: -rollouts[row].total_tokens)]
    plans = [(False, cut(rollouts, singles, tokens, device, ranks, shared=False))]
    if share_prompts:
        of_a_prompt: dict[tuple[int, ...], list[int]] = {}
        for (row,) in singles:
            of_a_prompt.setdefault(tuple(rollouts[row].request.prompt_ids), []).append(row)
        for together in (singles, [*of_a_prompt.values()]):
            plans.append((True, cut(rollouts, together, tokens, device, ranks, shared=True)))
    shared, cuts = min(plans, key=lambda plan: most_fed(rollouts, *plan, device))
    for i in range(max(map(len, cuts))):
        if i < len(cuts[rank]):
            yield micro_batch(rollouts, cuts[rank][i], device, shared)
        else:
            idle = micro_batch(
                rollouts, [min(rows, key=lambda row: rollouts[row].total_tokens)], device, shared
            )
            idle.sampled_BT.fill_(False)
            yield idle


def cut(
    rollouts: list[Rollout],
    together: list[list[int]],
    tokens: int,
    device: torch.device,
    ranks: int,
    shared: bool,
) -> list[list[list[int]]]:
    """For each rank, the rows of each micro-batch. Rank i gets every ranks-th list of rows in
    `together`. Rows are added to a micro-batch while rows x (L + T) <= `tokens`; it has at least
    one. So a prompt counts for each of its rows, and sharing takes no more memory."""
    cuts: list[list[list[int]]] = [[] for _ in range(ranks)]
    for i, batches in enumerate(cuts):
        widest = (0, 0)
        for row in sum(together[i::ranks], []):
            of_row = widths(rollouts[row], device, shared)
            widest = tuple(map(max, widest, of_row))
            if not batches or (len(batches[-1]) + 1) * sum(widest) > tokens:
                batches.append([])
                widest = of_row
            batches[-1].append(row)
    return cuts


def most_fed(
    rollouts: list[Rollout], shared: bool, cuts: list[list[list[int]]], device: torch.device
) -> int:
    """How many positions the rank that has most to do feeds to the trunk, padding included. The
    others wait for it."""
    fed = [0] * len(cuts)
    for i, batches in enumerate(cuts):
        for rows in batches:
            L, T = map(max, zip(*(widths(rollouts[row], device, shared) for row in rows)))
            prompts = {tuple(rollouts[row].request.prompt_ids) for row in rows} if shared else ()
            fed[i] += len(rows) * (T - shared) + len(prompts) * L
    return max(fed)


def widths(rollout: Rollout, device: torch.device, shared: bool) -> tuple[int, int]:
    """The widths L and T that this rollout wants. T: all tokens but the last, or with a shared
    prompt its last token and all of the completion but the last. On a GPU they are rounded up to a
    multiple of 64: attention there (cuDNN's) plans about 30 ms for each new shape, and nearly every
    length is new."""
    of_prompt, fed = 0, rollout.total_tokens - 1
    if shared:
        of_prompt, fed = (
            len(rollout.request.prompt_ids),
            max(1, len(rollout.tokens) - 1),
        )  # 1: all ranks feed something
    multiple = 64 if device.type == "cuda" else 1
    return -(-of_prompt // multiple) * multiple, -(
        -fed // multiple
    ) * multiple + shared  # and the prompt's last token


def micro_batch(
    rollouts: list[Rollout], rows: list[int], device: torch.device, shared: bool = False
) -> MicroBatch:
    """The tensors of these rows of the rollouts. Padding is on the right, where a causal model
    never looks; from the padding of shared prompts `Policy` hides it."""
    L, T = map(max, zip(*(widths(rollouts[row], device, shared) for row in rows)))
    ids = np.zeros((len(rows), T + 1), np.int64)
    sampled, logprobs, versions = (
        np.zeros(ids.shape, bool),
        np.zeros(ids.shape, np.float32),
        np.zeros_like(ids),
    )
    for i, rollout in enumerate(rollouts[row] for row in rows):
        start = 1 if shared else len(rollout.request.prompt_ids)  # of the completion
        end = start + len(rollout.tokens)
        ids[i, :start] = rollout.request.prompt_ids[-start:]
        ids[i, start:end] = rollout.tokens
        sampled[i, start:end] = rollout.sampled
        logprobs[i, start:end] = rollout.logprobs
        versions[i, start:end] = rollout.versions
    to_device = lambda *arrays: [torch.tensor(array, device=device) for array in arrays]
    m = to_device(
        ids[:, :-1], ids[:, 1:], sampled[:, 1:], logprobs[:, 1:], versions[:, 1:], np.array(rows)
    )
    if not shared:
        return MicroBatch(
            *m, *tokens_and_pairs([(rollouts[row].total_tokens - 1, 0) for row in rows])
        )
    prompts = [tuple(rollouts[row].request.prompt_ids) for row in rows]
    place = {
        prompt: p for p, prompt in enumerate(dict.fromkeys(prompts))
    }  # of each distinct prompt
    prompts_PL = np.array([prompt + (0,) * (L - len(prompt)) for prompt in place])
    prompt_B, prompt_tokens_B = (
        [place[prompt] for prompt in prompts],
        [len(prompt) for prompt in prompts],
    )
    parts = [(len(prompt), 0) for prompt in place]
    parts += [(len(rollouts[row].tokens) - 1, length) for row, length in zip(rows, prompt_tokens_B)]
    return MicroBatch(
        *m,
        *tokens_and_pairs(parts),
        *to_device(prompts_PL, np.array(prompt_B), np.array(prompt_tokens_B)),
    )


# --- the policy -----------------------------------------------------------------------------------


class Policy(torch.nn.Module):
    """A causal LM as the trainer calls it. It is a module, because FSDP gathers parameters when a
    module is called."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, m: MicroBatch, fp32_logits: bool | str) -> tuple[Tensor, Tensor]:
        """log pi_train of the sampled targets [B, T] (differentiable; 0 at all other places), and
        the policy's entropy at the sampled targets [N], in nats. Both are float32."""
        shared = m.prompts_PL is not None
        hidden_BTD = (
            self.hidden_after_prompts(m) if shared else self.trunk(m.inputs_BT, use_cache=False)
        )
        logprobs_N, entropies_N = loss.sampled_logprobs(
            hidden_BTD[m.sampled_BT],
            self.model.get_output_embeddings().weight,
            m.targets_BT[m.sampled_BT],
            fp32_logits,
        )
        logprobs_BT = torch.zeros(m.sampled_BT.shape, device=logprobs_N.device)
        return logprobs_BT.masked_scatter(m.sampled_BT, logprobs_N), entropies_N

    def trunk(self, inputs: Tensor, **options) -> Tensor:
        """The last hidden states of the model without its head, [..., D]."""
        return self.model.base_model(input_ids=inputs, **options).last_hidden_state

    def hidden_after_prompts(self, m: MicroBatch) -> Tensor:
        """The hidden states [B, T, D] of all inputs, each prompt computed once: first the prompts,
        then the completions over their keys and values. Gradients of the copies of a prompt's keys
        and values add up."""
        L, T = m.prompts_PL.shape[1], m.inputs_BT.shape[1]
        cache = DynamicCache()
        prompts_PLD = self.trunk(m.prompts_PL, past_key_values=cache, use_cache=True)
        cache.batch_select_indices(m.prompt_B)
        limit = getattr(self.model.config, "max_position_embeddings", None) or L + T
        prompt_tokens_B1, places_K = (
            m.prompt_tokens_B[:, None],
            torch.arange(L + T - 1, device=m.inputs_BT.device),
        )
        rest_BTD = self.trunk(
            m.inputs_BT[:, 1:],
            past_key_values=cache,
            position_ids=(prompt_tokens_B1 + places_K[: T - 1]).clamp(
                max=limit - 1
            ),  # only padding lies beyond
            attention_mask=(places_K < prompt_tokens_B1)
            | (places_K >= L),  # [B, K]: no padding of a prompt
        )
        last_B1D = prompts_PLD[m.prompt_B, m.prompt_tokens_B - 1][:, None]
        return torch.cat([last_B1D, rest_BTD], 1)
