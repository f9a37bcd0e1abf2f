"""What both engines share: their settings, the queue before their slots, and the books of what they have in flight.

An engine is anything with these calls: `TorchEngine` (generate.py), for a bare machine and for reading, or `VllmEngine`
(machinery/vllm_engine.py), for a GPU.

    add(requests)               queue completions to sample; those for a validation go before the others
    step() -> list[Rollout]     one decoding step for everything in flight; the rollouts that ended with it
    update(parameters)          take over the newest parameters, between two steps
    in_flight                   the requests that are being sampled
    slots                       how many completions can be in flight
    unfinished                  how many requests have not come back yet
    version                     the version of the parameters in use
"""

import importlib.util
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

import loss
from machinery.model import Decoding
from machinery.rollouts import Request, Rollout
from machinery.settings import Sampling, cpu_threads, trunk_dtype

INSTALL_VLLM = "`pip install -r requirements-vllm.txt` brings it; --engine torch needs none"


@dataclass(frozen=True)
class EngineSettings:
    """What is needed to make an engine."""

    model: str  # folder or hub name
    devices: tuple[str, ...]  # more than one: the model is split over them (vLLM's tensor parallelism)
    dtype: str  # of the trunk
    threads: int  # CPU threads of this process
    slots: int  # completions in flight at once
    decoding: Decoding
    engine: str = "torch"  # or vllm
    memory: float = 0.9  # share of each GPU that vLLM takes for weights and cache


def engine_settings(
    settings: Sampling, devices: tuple[str, ...], model: str, decoding: Decoding, shared: bool = False
) -> EngineSettings:
    """What an engine on these devices is made of. shared: a trainer has the GPU too."""
    return EngineSettings(
        model=model,
        devices=devices,
        dtype=str(trunk_dtype(settings, devices[0])).removeprefix("torch."),
        threads=cpu_threads(settings),
        slots=settings.slots,
        decoding=decoding,
        engine=choose_engine(settings.engine, devices[0]),
        memory=settings.generator_memory or (0.4 if shared else 0.9),
    )


class NoEngine(ValueError):
    """An engine cannot be had with these settings on this machine; the message is a sentence for the user."""


def choose_engine(engine: str, device: str) -> str:
    """torch or vllm, for auto too: vLLM where it is installed and the device is a GPU. ValueError if it is missing."""
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise ValueError(f"--engine vllm: vLLM is not installed; {INSTALL_VLLM}")
    if engine == "auto":
        return "vllm" if installed and device.startswith("cuda") else "torch"
    return engine


def check_split(engine: str, devices: int, heads: int) -> None:
    """ValueError if a model with so many attention heads cannot be split over so many devices."""
    if devices > 1 and engine != "vllm":
        raise ValueError(f"only vLLM splits a model over several GPUs (--tensor-parallel), and the engine is {engine}")
    if heads % devices:
        raise ValueError(
            f"a model with {heads} attention heads cannot be split over {devices} GPUs (--tensor-parallel)"
        )


# --- the queue and the books ----------------------------------------------------------------------------------------


def make_requests(
    group: int,
    prompt: list[int],
    completions: int,
    thinking_budget: tuple[int, int],
    decoding: Decoding,
    seed: tuple[int, ...],
    validation: bool = False,
) -> list[Request]:
    """Requests for the completions of one prompt, each with noise and a thinking budget of its own."""
    low, high = thinking_budget if decoding.length_control == "interruption" else (decoding.thinking_budget,) * 2
    # numpy ignores zeros at the end of a seed. The 1 keeps the seed of the budgets apart from that of any noise.
    budgets = np.random.default_rng((*seed, 0, 0, 1)).integers(low, high, size=completions, endpoint=True)
    return [Request(group, i, prompt, int(budget), (*seed, i), validation) for i, budget in enumerate(budgets)]


def queue_up(waiting: deque[Request], requests: list[Request], decoding: Decoding) -> None:
    """Put requests in the queue of an engine, those for a validation before all others. ValueError for one beyond the
    budgets that the engine was made for."""
    for request in requests:
        if not 1 <= len(request.prompt) <= decoding.prompt_budget:
            raise ValueError(f"a prompt has {len(request.prompt)} tokens; the budget is {decoding.prompt_budget}")
        if request.thinking_budget > decoding.thinking_budget:
            raise ValueError(
                f"a request has a thinking budget of {request.thinking_budget} tokens; the engine was made for"
                f" {decoding.thinking_budget}"
            )
    waiting.extendleft(request for request in reversed(requests) if request.validation)
    waiting.extend(request for request in requests if not request.validation)


class Completions:
    """The completions that an engine has in flight, a row each: their tokens so far, and what their lengths ask for."""

    def __init__(self, rows: int, decoding: Decoding):
        self.decoding = decoding
        self.requests: list[Request | None] = [None] * rows
        fields = [
            ("num_tokens", np.int64),  # so far
            ("num_sampled", np.int64),  # of them; the others were forced
            ("closed_at", np.int64),  # sampled tokens when thinking ended, -1 while it goes on
            ("thinking_budget", np.int64),
            ("interrupted", bool),
            ("began", np.float64),  # clock reading
        ]
        self.books = np.zeros(rows, np.dtype(fields, align=True))
        # As in Rollout. Each step writes to each row, so what belongs to a token lies together.
        fields = [("tokens", np.int32), ("sampled", bool), ("logprobs", np.float32), ("versions", np.int32)]
        self.written = np.zeros((rows, decoding.longest_completion), np.dtype(fields, align=True))

    def begin(self, row: int, request: Request) -> bool:
        """Put a request into a row. Returns whether its thinking is interrupted at once, by a budget of 0."""
        self.requests[row] = request
        self.books[row] = np.zeros((), self.books.dtype)
        self.books["closed_at"][row] = -1 if self.decoding.thinks else 0
        self.books["thinking_budget"][row] = request.thinking_budget
        self.books["began"][row] = time.monotonic()
        if request.thinking_budget > 0:
            return False
        interrupt, _ = self._interrupt_or_truncate(np.array([row]))
        return bool(interrupt[0])

    def append(self, rows, tokens, logprobs, sampled, version: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Add a token to each of these rows [n]; sampled: False where it was forced. Returns three bool arrays [n]:
        which completions have ended, whose thinking is now to be interrupted, which are truncated."""
        book, new = self.books, np.zeros(len(rows), self.written.dtype)
        new["tokens"], new["sampled"], new["versions"] = tokens, sampled, version
        new["logprobs"] = np.where(sampled, logprobs, 0.0)
        at = book["num_tokens"][rows]
        self.written[rows, at] = new
        book["num_tokens"][rows] = at + 1
        book["num_sampled"][rows] += sampled
        ended = sampled & (tokens[:, None] == self.decoding.eos).any(1)  # np.isin takes three times as long
        closes = rows[sampled & (book["closed_at"][rows] < 0) & (tokens == self.decoding.end_of_thinking)]
        book["closed_at"][closes] = book["num_sampled"][closes]
        interrupt, truncate = np.zeros_like(ended), np.zeros_like(ended)
        interrupt[~ended], truncate[~ended] = self._interrupt_or_truncate(rows[~ended])
        return ended, interrupt, truncate

    def _interrupt_or_truncate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Decide whose thinking is interrupted now, and who is truncated: bool arrays over these rows. The books learn
        of an interruption."""
        interrupt, truncate = loss.interrupt_or_truncate(
            self.decoding.length_control,
            self.books["num_sampled"][rows],
            self.books["closed_at"][rows],
            self.books["thinking_budget"][rows],
            self.decoding.answer_budget,
        )
        self.books["closed_at"][rows[interrupt]] = self.books["num_sampled"][rows[interrupt]]
        self.books["interrupted"][rows[interrupt]] = True
        return interrupt, truncate

    def move(self, to: np.ndarray, rows: np.ndarray) -> None:
        """Copy rows over others."""
        self.books[to] = self.books[rows]
        self.written[to] = self.written[rows]
        for old, new in zip(rows, to):
            self.requests[new] = self.requests[old]

    def rollout(self, row: int, truncated: bool) -> Rollout:
        """What has come of a row."""
        written = self.written[row, : self.books["num_tokens"][row]]
        arrays = {name: written[name].copy() for name in written.dtype.names}
        return Rollout(
            request=self.requests[row],
            **arrays,
            interrupted=bool(self.books["interrupted"][row]),
            truncated=truncated,
            began=float(self.books["began"][row]),
            ended=time.monotonic(),
        )


def sample_all(engine, requests: list[Request], progress: bool = False) -> list[Rollout]:
    """Sample these requests, with the parameters as they are, until all have ended; in the order of the requests."""
    engine.add(requests)
    rollouts = {}
    with tqdm(total=len(requests), desc="sampling", unit="completion", leave=False, disable=not progress) as bar:
        while engine.unfinished:
            for rollout in engine.step():
                rollouts[(rollout.request.group, rollout.request.index)] = rollout
                bar.update()
    return [rollouts[(request.group, request.index)] for request in requests]
