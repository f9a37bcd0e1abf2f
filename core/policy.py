"""From rollouts to log pi: micro-batches of padded sequences, and the forward of the policy over
them.

    rollouts of a batch
      -> micro_batches   sequences of like length together, padded on the right, shifted by one
      -> Policy          the trunk, then the head where a sampled token is predicted
      -> log pi_train, entropy

A prompt is the same for all completions of its group. So the trunk may be fed each prompt of a
micro-batch once; the completions are fed after that, and attend to the prompt's keys and values.
Without `shared_micro_batch` and what is beside it, everything else would be the same, and slower.

Dimensions as in loss.py: B sequences in a micro-batch, T positions, N sampled tokens, D hidden
size. And P distinct prompts in a micro-batch, L positions of a prompt that is shared, K positions
that a completion may attend to.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import loss
from core.attention import masks, most_positions, padded
from core.model import head_of
from core.rollouts import Rollout

# --- micro-batches --------------------------------------------------------------------------------


Parts = list[tuple[int, int]]  # parts of sequences: their tokens, and the tokens before them


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch. A model that is fed token t predicts token t + 1. So column t of
    inputs_BT is token t, and column t of the three after it is about token t + 1. Token 0 is the
    first of the prompt.

    If prompts are shared, column 0 is the last token of the prompt. It is fed with the prompt in
    prompts_PL, and only the columns after it are fed then.
    """

    inputs_BT: Tensor  # int64: the token that is fed
    targets_BT: Tensor  # int64: the token that is predicted
    sampled_BT: Tensor  # bool: the target was sampled (it is no prompt, not forced, no padding)
    generator_logprobs_BT: Tensor  # float32: log pi_gen of the target, recorded when it was sampled
    rows_B: Tensor  # int64: the place of each sequence among the rollouts of the batch
    parts: Parts  # what the trunk is fed
    # Only if prompts are shared: each distinct prompt is fed once.
    prompts_PL: Tensor | None = None  # int64: whole prompts, padded on the right
    prompt_B: Tensor | None = None  # int64: which of these prompts each sequence has
    prompt_tokens_B: Tensor | None = None  # int64: tokens of that prompt, without padding


def micro_batches(
    rollouts: list[Rollout],
    rows: list[int],
    tokens: int,
    device: torch.device,
    rank: int,
    ranks: int,
    share_prompts: bool,
) -> Iterator[MicroBatch]:
    """The micro-batches of one rank: its share of these rows of the rollouts. Each has at most
    `tokens` positions, padding included, or a single sequence.

    Sequences of like length come together. With share_prompts a micro-batch of several sequences
    feeds each prompt once. If it holds fewer sequences than there are prompts, all sequences of a
    prompt come together instead.

    FSDP wants all ranks to call the model together, so all ranks get the same number of
    micro-batches. A rank with fewer gets the shortest sequence again, with no token marked as
    sampled: it adds nothing to the loss.
    """
    longest_first = sorted(rows, key=lambda row: -rollouts[row].total_tokens)
    together, width, make = [[row] for row in longest_first], plain_width, micro_batch
    if share_prompts and (by_prompt := rows_to_share(rollouts, longest_first, tokens, device)):
        together, width, make = by_prompt, shared_width, shared_micro_batch
    widths_R2 = np.array([width(rollout, device) for rollout in rollouts])
    cuts = [cut(widths_R2, sum(together[i::ranks], []), tokens) for i in range(ranks)]
    for of_ranks in zip_longest(*cuts):
        chosen = of_ranks[rank] or longest_first[-1:]
        m = make([rollouts[row] for row in chosen], chosen, widths_R2[chosen].max(0), device)
        if of_ranks[rank] is None:
            m.sampled_BT.fill_(False)
        yield m


def plain_width(rollout: Rollout, device: torch.device) -> tuple[int, int]:
    """The widths L and T that a rollout wants, `padded`: 0 of prompts, and all tokens but the
    last."""
    return 0, padded(rollout.total_tokens - 1, device)


def cut(widths_R2: np.ndarray, rows: list[int], tokens: int) -> list[list[int]]:
    """The rows of each micro-batch, in this order. A row is added while rows x (L + T) <= `tokens`;
    there is at least one. So a prompt counts for each of its rows, and sharing takes no more
    memory."""
    batches, widest = [], 0  # L and T of the last micro-batch
    for row in rows:
        widest = np.maximum(widest, widths_R2[row])
        if not batches or (len(batches[-1]) + 1) * widest.sum() > tokens:
            batches.append([])
            widest = widths_R2[row]
        batches[-1].append(row)
    return batches


def micro_batch(
    rollouts: list[Rollout], rows: list[int], widths: np.ndarray, device: torch.device
) -> MicroBatch:
    """The tensors of these rollouts, T wide; rows: their places in the batch. Padding is on the
    right, where a causal model never looks."""
    _, T = widths
    dtypes = {"tokens": np.int64, "sampled": bool, "logprobs": np.float32}
    columns = {name: np.zeros((len(rows), T + 1), dtype) for name, dtype in dtypes.items()}
    for i, rollout in enumerate(rollouts):
        start = len(rollout.request.prompt_ids)  # of the completion
        columns["tokens"][i, :start] = rollout.request.prompt_ids
        for name, column in columns.items():
            column[i, start : rollout.total_tokens] = getattr(rollout, name)
    tensor = functools.partial(torch.tensor, device=device)
    of_targets = {name: tensor(column[:, 1:]) for name, column in columns.items()}
    return MicroBatch(
        inputs_BT=tensor(columns["tokens"][:, :-1]),
        targets_BT=of_targets["tokens"],
        sampled_BT=of_targets["sampled"],
        generator_logprobs_BT=of_targets["logprobs"],
        rows_B=tensor(rows),
        parts=[(rollout.total_tokens - 1, 0) for rollout in rollouts],
    )


# --- prompts that are shared ----------------------------------------------------------------------


def rows_to_share(
    rollouts: list[Rollout], rows: list[int], tokens: int, device: torch.device
) -> list[list[int]]:
    """These rows, in this order, with those together that should share a prompt; none if about
    two of them, with their prompts, do not fit into a micro-batch."""
    of_prompts = defaultdict(list)
    for row in rows:
        of_prompts[tuple(rollouts[row].request.prompt_ids)].append(row)
    positions = sum(sum(shared_width(rollouts[row], device)) for row in rows)
    sequences = tokens * len(rows) / max(1, positions)  # of a micro-batch, about
    if sequences < 2:
        return []
    return [*of_prompts.values()] if sequences < len(of_prompts) else [[row] for row in rows]


def shared_width(rollout: Rollout, device: torch.device) -> tuple[int, int]:
    """The widths L and T that a rollout wants, `padded`: its prompt; and the last token of that,
    with all tokens of the completion but the last."""
    # At least 1 of these: all ranks feed something.
    after = padded(max(1, len(rollout.tokens) - 1), device)
    return padded(len(rollout.request.prompt_ids), device), 1 + after


def shared_micro_batch(
    rollouts: list[Rollout], rows: list[int], widths: np.ndarray, device: torch.device
) -> MicroBatch:
    """As `micro_batch`, with each prompt once. The padding after it lies before the completions, so
    `Policy` masks it."""
    prompts = [tuple(rollout.request.prompt_ids) for rollout in rollouts]
    distinct, tensor = [*dict.fromkeys(prompts)], functools.partial(torch.tensor, device=device)
    parts = [(len(prompt), 0) for prompt in distinct]
    parts += [(len(rollout.tokens) - 1, len(p)) for rollout, p in zip(rollouts, prompts)]
    last = lambda request: replace(request, prompt_ids=request.prompt_ids[-1:])
    after = [replace(rollout, request=last(rollout.request)) for rollout in rollouts]
    return replace(
        micro_batch(after, rows, widths, device),
        parts=parts,
        prompts_PL=tensor([prompt + (0,) * (widths[0] - len(prompt)) for prompt in distinct]),
        prompt_B=tensor([distinct.index(prompt) for prompt in prompts]),
        prompt_tokens_B=tensor([len(prompt) for prompt in prompts]),
    )


# --- the policy -----------------------------------------------------------------------------------


class Policy(torch.nn.Module):
    """A causal LM as the trainer calls it. It is a module, because FSDP gathers parameters when a
    module is called."""

    def __init__(self, model: PreTrainedModel, device: torch.device | None = None):
        """device: where it computes, if the model's parameters wait on another one."""
        super().__init__()
        self.model = model
        self.device = device or model.device
        self.positions = most_positions(model)  # a GPU's padding may pass them, and no token

    def forward(self, m: MicroBatch, fp32_logits: bool | str) -> tuple[Tensor, Tensor]:
        """log pi_train of the sampled targets [B, T] (differentiable; 0 at all other places), and
        the policy's entropy at the sampled targets [N], in nats. Both are float32."""
        if m.prompts_PL is None:
            hidden_BTD = self.trunk(m.inputs_BT[:, : self.positions], use_cache=False)
        else:
            hidden_BTD = self.hidden_after_prompts(m)
        head = head_of(self.model)
        hidden_ND = hidden_BTD[m.sampled_BT[:, : hidden_BTD.shape[1]]]
        targets_N = m.targets_BT[m.sampled_BT]
        logprobs_N, entropies_N = loss.sampled_logprobs(hidden_ND, head, targets_N, fp32_logits)
        logprobs_BT = torch.zeros(m.sampled_BT.shape, device=logprobs_N.device)
        return logprobs_BT.masked_scatter(m.sampled_BT, logprobs_N), entropies_N

    def trunk(self, inputs: Tensor, **options) -> Tensor:
        """The last hidden states of the model without its head, [..., D]."""
        return self.model.get_decoder()(input_ids=inputs, **options).last_hidden_state

    def hidden_after_prompts(self, m: MicroBatch) -> Tensor:
        """The hidden states [B, T, D] of all inputs, each prompt computed once: first the prompts,
        then the completions over their keys and values. Gradients of the copies of a prompt's keys
        and values add up."""
        # The prompts. The cache then has their keys and values, for each sequence those of its own.
        cache = DynamicCache()
        prompts_PL = m.prompts_PL[:, : self.positions]
        prompts_PLD = self.trunk(prompts_PL, past_key_values=cache, use_cache=True)
        cache.batch_select_indices(m.prompt_B)

        # The completions. Each attends to its prompt without the padding, and to itself. Positions
        # go on from the end of the prompt.
        L, T = prompts_PL.shape[1], m.inputs_BT.shape[1]
        places_K = torch.arange(L + T, device=m.inputs_BT.device)
        prompt_tokens_B1 = m.prompt_tokens_B[:, None]
        positions_BT = prompt_tokens_B1 + places_K[: T - 1]
        prompts_BL = torch.where(places_K[:L] < prompt_tokens_B1, places_K[:L], L + T)
        keys_BK = torch.cat([prompts_BL, positions_BT], 1)  # padding comes later than all tokens
        rest_BTD = self.trunk(
            m.inputs_BT[:, 1:],
            past_key_values=cache,
            position_ids=positions_BT.clamp(max=self.positions - 1),
            attention_mask=masks(self.model, positions_BT, keys_BK, prompts_PLD.dtype),
        )
        last_B1D = prompts_PLD[m.prompt_B, m.prompt_tokens_B - 1][:, None]
        return torch.cat([last_B1D, rest_BTD], 1)
