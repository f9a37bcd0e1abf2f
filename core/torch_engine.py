"""The engine that can be read: continuous batching over a stock transformers model.

Dimensions: S slots of the engine, n <= S of them live, T positions, D hidden size, V vocabulary.
"""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import loss
from core.engine import Decoding, Engine
from core.model import head_of, in_one_sentence, padded
from core.rollouts import Request, Rollout, SharedParameters

PROMPT_TOKENS_AT_ONCE = 16_384  # of prompts, in a forward


class SlotCache(Cache):
    """Keys and values of S sequences at positions of their own, over a stock transformers model.

    The first n slots take part in a step. Each writes at its own position. `update` returns more
    positions than a slot has written; the mask that the model is given hides the others.
    """

    def __init__(self, slots: int, positions: int):
        super().__init__(layers=[])
        self.slots, self.positions = slots, positions
        # The keys of a layer, then its values, then those of the next layer: [S, heads, T, head
        # size] each, made at the first prompt.
        self.stored: list[Tensor] = []

    def fill(self, slots_n: Tensor, source: DynamicCache, rows_n: Tensor) -> None:
        """Copy the prompts' keys and values, as a plain forward left them in rows of `source`, to
        slots."""
        given = [part for layer in source.layers for part in (layer.keys, layer.values)]
        if not self.stored:
            # Keys and values may differ in size.
            self.stored = [
                part.new_zeros(self.slots, part.shape[1], self.positions, part.shape[3])
                for part in given
            ]
        for stored, part in zip(self.stored, given):
            stored[slots_n, :, : part.shape[2]] = part[rows_n]

    def move(self, to_n: Tensor, slots_n: Tensor) -> None:
        """Copy what these slots have written over others."""
        for stored in self.stored:
            stored[to_n, :, : self.width] = stored[slots_n, :, : self.width]

    def place(self, positions_n: Tensor, width: int) -> None:
        """Set the positions at which the first n slots write next, and how many positions the model
        is given: `width` at least.

        If that is more than half of a slot, the model gets whole slots. A CPU reads contiguous
        memory several times faster, and that saves more than the masked positions cost.
        """
        self.positions_n = positions_n
        self.slots_n = torch.arange(len(positions_n), device=positions_n.device)
        self.width = self.positions if 2 * width > self.positions else width

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__):
        """Called by a layer: store the keys and values of this step, return all that the live slots
        have."""
        stored = self.stored[2 * layer_idx : 2 * layer_idx + 2]
        for part, new in zip(stored, (key_states, value_states)):
            part[self.slots_n, :, self.positions_n] = new[:, :, 0]
        return [part[: len(self.slots_n), :, : self.width] for part in stored]


class TorchEngine(Engine):
    """Continuous batching over slots of a preallocated KV cache, for any transformers causal LM.

    The live completions are always the first n slots: when one ends, the last live one takes its
    slot, and when enough slots are free, waiting requests are admitted behind them. A prompt is run
    once for those admitted together, and always with the newest parameters. Completions in flight
    keep their cache; a new one never uses anything old.
    """

    def __init__(self, model: PreTrainedModel, decoding: Decoding, slots: int):
        super().__init__(slots, decoding)
        self.model, self.device = model, model.device
        # What is known of a slot is on the CPU; only the model's forward and the sampling are on
        # the device. The noise is uniform, a number for each token that is sampled.
        self.noise = np.zeros((slots, decoding.thinking_budget + decoding.answer_budget))
        self.cache = SlotCache(slots, padded(decoding.longest, self.device))

    def update(self, parameters: SharedParameters) -> None:
        self.version = parameters.read_into(self.model)

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        self._admit()
        if not self.live.any():
            return []
        tokens, logprobs = self._sample(self._hidden())
        rollouts = self._append(np.flatnonzero(self.live), tokens, logprobs)
        self._close_gaps()
        return rollouts

    def _hidden(self) -> Tensor:
        """The last hidden states of the live slots' newest tokens, [n, D] in the dtype of the
        trunk."""
        progress = self.progress[self.live]
        tokens = progress["prompt_tokens"] + progress["num_tokens"]
        inputs = np.stack([progress["last_token"], tokens - 1])  # one copy to the device
        tokens_n, positions_n = torch.from_numpy(inputs).to(self.device)
        self.cache.place(positions_n, padded(int(tokens.max()), self.device))
        unseen_nT = torch.arange(self.cache.width, device=self.device) > positions_n[:, None]
        dtype = self.model.dtype
        mask_nT = torch.where(unseen_nT, torch.finfo(dtype).min, 0.0).to(dtype)
        output = self.model.base_model(
            input_ids=tokens_n[:, None],
            position_ids=positions_n[:, None],
            attention_mask=mask_nT[:, None, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.last_hidden_state[:, 0]

    def _sample(self, hidden_nD: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """One token for each live slot and its log-probability, from the whole distribution."""
        head = head_of(self.model)
        logits_nV = loss.head_logits(hidden_nD, head, self.decoding.fp32_logits)
        temperature = self.decoding.temperature
        logprobs_nV = torch.log_softmax(logits_nV / (temperature or 1.0), -1)
        if temperature == 0:
            tokens_n1 = logprobs_nV.argmax(-1, keepdim=True)
        else:
            # Inverse transform sampling: the first token at which the cumulative probability passes
            # the noise.
            noise = self.noise[self.live, self.progress["num_sampled"][self.live]]
            noise_n1 = torch.from_numpy(noise).to(self.device)[:, None]
            cumulative_nV = logprobs_nV.double().exp().cumsum(-1)
            total_n1 = cumulative_nV[:, -1:]  # 1, up to rounding
            tokens_n1 = torch.searchsorted(cumulative_nV, noise_n1 * total_n1, right=True)
        logprobs_n1 = logprobs_nV.gather(-1, tokens_n1)
        return tokens_n1[:, 0].cpu().numpy(), logprobs_n1[:, 0].cpu().numpy()

    def _admit(self) -> None:
        """Give free slots to waiting requests, if a sixteenth of the slots is free: a forward over
        prompts costs as much as a step."""
        free = np.flatnonzero(~self.live)
        if self.live.any() and len(free) < self.slots / 16:
            return
        prompts = defaultdict(list)  # slots by prompt
        for slot in free[: len(self.waiting)]:
            request = self.waiting.pop(0)
            self._begin(slot, request)
            # The next step reads the last token, like any other.
            prompts[tuple(request.prompt_ids[:-1])].append(slot)
            np.random.default_rng(request.seed).random(out=self.noise[slot])
        self._prefill(prompts)

    def _prefill(self, prompts: dict[tuple[int, ...], list[int]]) -> None:
        """Compute keys and values of these prompts once, and copy them to their slots."""
        longest_first = sorted(prompts, key=len, reverse=True)
        at_once = max(1, PROMPT_TOKENS_AT_ONCE // self.decoding.prompt_budget)
        for start in range(0, len(prompts), at_once):
            batch = longest_first[start : start + at_once]
            # Padding is on the right, where a causal model never looks; its keys and values are
            # overwritten.
            width = padded(max(len(batch[0]), 1), self.device)
            ids = [prompt + (0,) * (width - len(prompt)) for prompt in batch]
            input_ids, cache = torch.tensor(ids, device=self.device), DynamicCache()
            self.model.base_model(input_ids=input_ids, past_key_values=cache, use_cache=True)
            copies = [(slot, row) for row, prompt in enumerate(batch) for slot in prompts[prompt]]
            slots_n, rows_n = torch.tensor(copies, device=self.device).T
            self.cache.fill(slots_n, cache, rows_n)

    def _close_gaps(self) -> None:
        """Move the last live completions to the slots of those that have ended."""
        left = self.live.sum()
        gaps = np.flatnonzero(~self.live[:left])
        movers = left + np.flatnonzero(self.live[left:])
        if len(gaps):
            for array in (self.live, self.requests, self.progress, self.written, self.noise):
                array[gaps] = array[movers]
            self.live[left:] = False
            to_n, slots_n = torch.from_numpy(np.stack([gaps, movers])).to(self.device)
            self.cache.move(to_n, slots_n)


@torch.inference_mode()
def engine_that_fits(model: PreTrainedModel, decoding: Decoding, slots: int) -> TorchEngine:
    """An engine with so many slots, or with a half, a quarter and so on of them: as many as its
    device has memory for. torch.OutOfMemoryError if none fits."""
    vocabulary = model.config.get_text_config().vocab_size
    while True:
        engine = TorchEngine(model, decoding, slots)
        try:
            # All the memory that it can ever need: long prompts that all differ, then a step at the
            # end of the longest completions. Nothing of it is kept.
            prompts = [[i % vocabulary] * decoding.prompt_budget for i in range(slots)]
            engine.add([Request(0, 0, prompt, 0, (0,)) for prompt in prompts])
            engine._admit()
            engine.progress["num_tokens"] = decoding.longest_completion
            engine._sample(engine._hidden())
            engine.live[:] = False
            return engine
        except torch.OutOfMemoryError:
            if slots == 1:
                raise
        del engine
        torch.cuda.empty_cache()
        slots //= 2


@torch.inference_mode()
def refuse_wrong_over_slots(model: PreTrainedModel, name: str) -> None:
    """ValueError if this model, on the CPU in fp32, does not compute the same token by token over
    slots as in one forward: one without a cache of keys and values, with attention that our mask
    does not reach, or with positions of another kind."""
    # The model sees six tokens at once, and then through an engine: these, and a shorter prompt.
    ids = list(range(6))
    wrong = "it cannot be sampled token by token over slots of a cache; --engine vllm may know it"
    with in_one_sentence(name, wrong):
        model.set_attn_implementation("eager")  # which every model has
        plain_D = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        model.set_attn_implementation("grouped")
        engine = TorchEngine(model, Decoding(eos=(), prompt_budget=6, answer_budget=1), slots=2)
        engine.add([Request(0, 0, ids, 0, (0,)), Request(0, 1, ids[:-1], 0, (0,))])
        engine._admit()
        error = (engine._hidden()[0] - plain_D).norm() / plain_D.norm()
        if not error < 1e-3:  # nor NaN
            raise ValueError(f"its hidden state is off by {error:.1%}")
