"""What both engines share: their calls, their settings, the queue, and the completions in their
slots.

A slot is a place for one completion while it is sampled.
"""

import importlib.util
import time
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

import loss
from core.rollouts import Request, Rollout
from core.settings import (
    PRESETS,
    Sampling,
    Settings,
    cpu_threads,
    model_path,
    refuse,
    trunk_dtype,
)


@dataclass(frozen=True)
class Decoding:
    """What all completions of a run have in common."""

    eos: tuple[int, ...]  # ids that end a completion
    prompt_budget: int  # tokens
    answer_budget: int  # sampled tokens
    thinking_budget: int = 0  # sampled tokens, the most that a request may have
    end_of_thinking: int = -1  # id of </think>; -1 if the model has none: nothing is interrupted
    thinks: bool = True  # False if the prompt closes thinking: then all is answer
    phrase: tuple[int, ...] = ()  # ids of the interruption phrase
    length_control: str = "penalty"  # as in loss.Recipe
    fp32_logits: bool | str = True  # as in loss.Recipe
    temperature: float = 1.0  # of training; generate.py takes others, 0 is the likeliest token

    @property
    def longest_completion(self) -> int:
        """The most tokens that a completion can have, forced ones included."""
        forced = len(self.phrase) if self.length_control == "interruption" else 0
        return self.thinking_budget + forced + self.answer_budget

    @property
    def longest(self) -> int:
        """The most tokens that a prompt and its completion can have."""
        return self.prompt_budget + self.longest_completion


# --- an engine ------------------------------------------------------------------------------------


class Engine:
    """An engine samples many completions at once. `TorchEngine` (torch_engine.py) is short enough
    to study, and needs only torch; `VllmEngine` (vllm_engine.py) is for GPUs. Here is what they
    share: the queue, and how far the completion in each slot has come. Each has two calls of its
    own:

        update(parameters)   take over the newest SharedParameters, between two steps; completions
                             in flight go on with them
        step()               let requests into free slots, add a token to each completion in flight,
                             and return the rollouts of those that have ended

    The policy chooses a token, unless thinking was interrupted and the phrase is not complete: then
    the next token is forced.
    """

    def __init__(self, slots: int, decoding: Decoding):
        self.slots, self.decoding = slots, decoding  # slots: completions in flight at most
        self.version = 0  # of the parameters in use
        self.waiting = []  # requests without a slot
        # Token ids; -1 stands after the last one, since the policy chooses again there.
        self.phrase = np.array([*decoding.phrase, -1])

        self.live = np.zeros(slots, bool)  # whether there is a completion in the slot
        self.requests = np.full(slots, None)  # objects: the Request in each slot
        fields = [
            ("prompt_tokens", int),
            ("num_tokens", int),  # of the completion so far
            ("num_sampled", int),  # sampled ones; the others were forced
            ("last_token", int),  # the model reads it next
            ("closed_at", int),  # sampled tokens when thinking ended, -1 while it goes on
            ("thinking_budget", int),
            ("phrase_place", int),  # of the next token in `phrase`; if none is forced, its end
            ("began", float),  # time.monotonic()
        ]
        self.progress = np.zeros(slots, fields)
        # As in Rollout. Each step writes to each slot, so what belongs to a token lies together.
        fields = [
            ("tokens", np.int32),
            ("logprobs", np.float32),
            ("versions", np.int32),
            ("sampled", bool),
        ]
        self.written = np.zeros((slots, decoding.longest_completion), fields)

    def add(self, requests: list[Request]) -> None:
        """Queue completions to sample; those for a validation go before the others."""
        self.waiting += requests
        self.waiting.sort(key=lambda request: not request.validation)  # else in their order

    @property
    def in_flight(self) -> list[Request]:
        """The requests that are being sampled."""
        return self.requests[self.live].tolist()

    @property
    def unfinished(self) -> int:
        """How many requests have not come back yet."""
        return len(self.waiting) + len(self.in_flight)

    # Completions in their slots

    def _begin(self, slot: int, request: Request) -> None:
        """Put a request into a slot. With a thinking budget of 0 its thinking is interrupted at
        once."""
        self.live[slot], self.requests[slot] = True, request
        self.progress[slot] = (  # the fields in their order
            len(request.prompt_ids),
            0,  # tokens of the completion
            0,  # sampled ones
            request.prompt_ids[-1],
            -1 if self.decoding.thinks else 0,
            request.thinking_budget,
            len(self.decoding.phrase),
            time.monotonic(),
        )
        self._interrupt_or_truncate(np.array([slot]))

    def _forced_tokens(self, slots: np.ndarray) -> np.ndarray:
        """The token that each of these slots [n] must take next, or -1 if the policy chooses it;
        int64 [n]."""
        return self.phrase[self.progress["phrase_place"][slots]]

    def _append(self, slots: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray) -> list[Rollout]:
        """Add a token to each of these slots [n]: this one, which the policy has chosen, or the
        forced one. Returns the completions that have ended. Their slots are free then."""
        progress, forced = self.progress, self._forced_tokens(slots)
        sampled = forced < 0
        tokens = np.where(sampled, tokens, forced)
        new = np.zeros(len(slots), self.written.dtype)
        new["tokens"], new["sampled"], new["versions"] = tokens, sampled, self.version
        new["logprobs"] = np.where(sampled, logprobs, 0.0)
        self.written[slots, progress["num_tokens"][slots]] = new
        progress["num_tokens"][slots] += 1
        progress["num_sampled"][slots] += sampled
        progress["phrase_place"][slots] += ~sampled
        progress["last_token"][slots] = tokens
        # EOS ends a completion. (np.isin takes three times as long.)
        ended = sampled & (tokens[:, None] == self.decoding.eos).any(1)
        # The first end of thinking closes it.
        thinks = progress["closed_at"][slots] < 0
        closed = slots[sampled & thinks & (tokens == self.decoding.end_of_thinking)]
        progress["closed_at"][closed] = progress["num_sampled"][closed]
        truncated = ~ended & self._interrupt_or_truncate(slots)
        over = ended | truncated
        self.live[slots] = ~over
        return [self._rollout(slots[i], bool(truncated[i])) for i in np.flatnonzero(over)]

    def _interrupt_or_truncate(self, slots: np.ndarray) -> np.ndarray:
        """Interrupt thinking that has reached its budget, by forcing the phrase. Returns a mask of
        truncated slots."""
        progress = self.progress[slots]
        interrupt, truncate = loss.interrupt_or_truncate(
            self.decoding.length_control,
            progress["num_sampled"],
            progress["closed_at"],
            progress["thinking_budget"],
            self.decoding.answer_budget,
        )
        interrupted = slots[interrupt]
        self.progress["closed_at"][interrupted] = progress["num_sampled"][interrupt]
        self.progress["phrase_place"][interrupted] = 0
        return truncate

    def _rollout(self, slot: int, truncated: bool) -> Rollout:
        """The completion in a slot, which has ended."""
        progress = self.progress[slot]
        written = self.written[slot, : progress["num_tokens"]]
        arrays = {name: written[name].copy() for name in written.dtype.names}
        return Rollout(
            request=self.requests[slot],
            **arrays,
            interrupted=not arrays["sampled"].all(),  # the phrase is all that is ever forced
            truncated=truncated,
            began=float(progress["began"]),
            ended=time.monotonic(),
        )


# --- requests -------------------------------------------------------------------------------------


def make_requests(
    group: int,
    prompt_ids: list[int],
    completions: int,
    thinking_budget: tuple[int, int],
    decoding: Decoding,
    seed: tuple[int, ...],
    validation: bool = False,
) -> list[Request]:
    """Requests for the completions of one prompt. Each has its own noise, and its own thinking
    budget in this range. Without interruptions all have the largest budget."""
    low, high = thinking_budget
    if decoding.length_control != "interruption":
        low = high
    # numpy ignores zeros at the end of a seed. The 1 makes the budgets' seed differ from every seed
    # of noise.
    rng = np.random.default_rng((*seed, 0, 0, 1))
    budgets = rng.integers(low, high, size=completions, endpoint=True)
    return [
        Request(group, i, prompt_ids, int(budget), (*seed, i), validation)
        for i, budget in enumerate(budgets)
    ]


def sample_all(engine: Engine, requests: list[Request]) -> list[Rollout]:
    """The rollouts of these requests, in their order, all sampled with the present parameters. A
    terminal shows how far it is."""
    engine.add(requests)
    by_seed = {}
    with tqdm(
        desc="sampling", total=len(requests), unit="completion", leave=False, disable=None
    ) as bar:
        while engine.unfinished:
            for rollout in engine.step():
                by_seed[rollout.request.seed] = rollout
                bar.update()
    return [by_seed[request.seed] for request in requests]


# --- which engine, and its settings ---------------------------------------------------------------


@dataclass(frozen=True)
class EngineSettings:
    """All that an engine is made from."""

    model: str  # folder or hub name
    device: str
    dtype: torch.dtype  # of the trunk
    threads: int  # CPU threads of this process
    slots: int  # completions in flight at once
    decoding: Decoding
    engine: str = "torch"  # or vllm
    # Share of the GPU that vLLM takes for weights and cache. None: what is free when it starts.
    memory: float | None = None
    vllm_options: str = "{}"  # more of vLLM's EngineArgs, in JSON
    may_halve: bool = False  # whether TorchEngine may have fewer slots, if these do not fit


def engine_settings(settings: Sampling, device: str, decoding: Decoding) -> EngineSettings:
    """The settings of an engine on this device. For --engine auto it is vLLM if that is installed
    and the device is a GPU. ValueError if vLLM is wanted and missing."""
    engine, on_cpu = settings.engine, device == "cpu"
    installed = importlib.util.find_spec("vllm")
    if engine == "auto":
        engine = "vllm" if installed and not on_cpu else "torch"
    refuse(
        engine == "vllm" and not installed,
        "--engine vllm: vLLM is not installed; `pip install -r requirements-vllm.txt` brings it;"
        " --engine torch does not need it",
    )
    return EngineSettings(
        model=model_path(settings.model),
        device=device,
        dtype=trunk_dtype(settings, device),
        threads=cpu_threads(settings),
        slots=settings.slots or PRESETS[settings.defaults].get("slots", Settings.slots),
        decoding=decoding,
        engine=engine,
        memory=settings.generator_memory,
        vllm_options=settings.vllm_options,
        may_halve=settings.slots is None and not on_cpu,
    )


class NoEngine(ValueError):
    """No engine runs with these settings on this machine. The message is a sentence for the
    user."""
