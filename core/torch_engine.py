"""The engine that can be read: continuous batching over a stock transformers model.

Dimensions: S slots of the engine, n <= S of them live, T positions, D hidden size, V vocabulary.
"""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

import loss
from core.attention import masks, most_positions, padded, recurrent
from core.engine import Decoding, Engine, NoEngine
from core.model import head_of
from core.rollouts import Request, Rollout, SharedParameters

PROMPT_TOKENS_AT_ONCE = 16_384  # of prompts, in a forward


class SlotCache(Cache):
    """Keys and values of S sequences at positions of their own, over a stock transformers model;
    and the states of its recurrent layers.

    The first n slots take part in a step. Each writes at its own position. `update` returns more
    positions than a slot has written; the mask that the model is given hides the others.
    """

    def __init__(self, slots: int, positions: int):
        super().__init__(layers=[])
        self.slots, self.positions = slots, positions
        # All made at the first prompt, by the number of a layer and a name.
        self.stored = {}  # keys and values: [S, heads, T, head size]
        self.states = {}  # [S, ...]; a layer may have several of a name

    def fill(self, slots_n: Tensor, source: DynamicCache, rows_n: Tensor) -> None:
        """Copy to slots what a plain forward over prompts left in rows of `source`."""
        stored, states = parts_of_cache(source)
        for place, part in stored.items():
            if place not in self.stored:  # keys and values may differ in size
                shape = self.slots, part.shape[1], self.positions, part.shape[3]
                self.stored[place] = part.new_zeros(shape)
            self.stored[place][slots_n, :, : part.shape[2]] = part[rows_n]
        for place, part in states.items():
            if place not in self.states:
                self.states[place] = part.new_zeros(self.slots, *part.shape[1:])
            self.states[place][slots_n] = part[rows_n]
        if states and not self.layers:
            self.layers = source.layers  # their methods update the states; keys are stored here
            for layer, name in stored:
                setattr(self.layers[layer], name, torch.empty(0))

    def move(self, to_n: Tensor, slots_n: Tensor) -> None:
        """Copy what these slots have written over others."""
        for stored in self.stored.values():
            stored[to_n, :, : self.width] = stored[slots_n, :, : self.width]
        for state in self.states.values():
            state[to_n] = state[slots_n]

    def place(self, positions_n: Tensor, width: int) -> None:
        """Set the positions at which the first n slots write next, and how many positions the model
        is given: `width` at least.

        If that is more than half of a slot, the model gets whole slots. A CPU reads contiguous
        memory several times faster, and that saves more than the masked positions cost.
        """
        self.positions_n = positions_n
        self.slots_n = torch.arange(len(positions_n), device=positions_n.device)
        self.width = self.positions if 2 * width > self.positions else width
        for (layer, name, number), state in self.states.items():  # written in place
            getattr(self.layers[layer], name)[number] = state[: len(positions_n)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__):
        """Called by a layer: store the keys and values of this step, return all that the live slots
        have."""
        stored = self.stored[layer_idx, "keys"], self.stored[layer_idx, "values"]
        for part, new in zip(stored, (key_states, value_states)):
            part[self.slots_n, :, self.positions_n] = new[:, :, 0]
        return [part[: len(self.slots_n), :, : self.width] for part in stored]


def parts_of_cache(cache: DynamicCache) -> tuple[dict, dict]:
    """Keys and values by (layer, name), and states of recurrent layers by (layer, name, number)."""
    stored, states = {}, {}
    for i, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is not None:
            stored |= {(i, "keys"): layer.keys, (i, "values"): layer.values}
        for name in ("conv_states", "recurrent_states"):
            for number, state in getattr(layer, name, {}).items():
                if state is not None:
                    states[i, name, number] = state
    return stored, states


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
        self.recurrent = recurrent(model)

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
        positions_n1 = positions_n[:, None]
        places_1T = torch.arange(self.cache.width, device=self.device)[None]
        output = self.model.get_decoder()(
            input_ids=tokens_n[:, None],
            position_ids=positions_n1,
            attention_mask=masks(self.model, positions_n1, places_1T, self.model.dtype),
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
            tokens_n1.clamp_(max=logits_nV.shape[1] - 1)  # beyond it in NaN
        logprobs_n = logprobs_nV.gather(-1, tokens_n1)[:, 0].cpu().numpy()
        if not np.isfinite(logprobs_n).all():
            raise NoEngine(
                "the model's log-probabilities are not finite. If they have overflowed in float16,"
                " --dtype float32 has room for them"
            )
        return tokens_n1[:, 0].cpu().numpy(), logprobs_n

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
        """Compute keys, values and states of these prompts once, and copy them to their slots."""
        at_once, batches = max(1, PROMPT_TOKENS_AT_ONCE // self.decoding.prompt_budget), []
        for prompt in sorted(prompts, key=len, reverse=True):
            fits = batches and len(batches[-1]) < at_once
            # A state would take padding in: such a model gets prompts of one length together.
            if not fits or (self.recurrent and len(prompt) < len(batches[-1][0])):
                batches.append([])
            batches[-1].append(prompt)
        # With a config a cache has places for states. It also drops keys behind a window then, and
        # with padding that would be the wrong ones.
        config = self.model.config if self.recurrent else None
        for batch in batches:
            # Padding is on the right, where a causal model never looks; its keys and values are
            # overwritten. It does not pass the model's positions.
            width = max(len(batch[0]), 1)
            if not self.recurrent:
                width = min(padded(width, self.device), most_positions(self.model))
            ids = [prompt + (0,) * (width - len(prompt)) for prompt in batch]
            input_ids, cache = torch.tensor(ids, device=self.device), DynamicCache(config=config)
            self.model.get_decoder()(input_ids=input_ids, past_key_values=cache, use_cache=True)
            if not batch[0]:  # all that was fed is padding
                for state in parts_of_cache(cache)[1].values():
                    state.zero_()
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
