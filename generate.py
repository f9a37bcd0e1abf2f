"""The generator: prompts go in, completions with their log-probabilities come out.

    python generate.py --model runs/NAME/model --prompt "4729+8153="      # print a completion
    python generate.py --model runs/NAME/model --evaluate                 # mean@16, pass@k on held-out problems
    python generate.py --model Qwen/Qwen3-0.6B --evaluate --data aime24 --device cuda:0

In training, `train.py` starts `generator_process` on each generator device. It is sent `Work` through a queue, keeps
its engine busy with it, and sends back `Report`s with finished rollouts. The newest parameters lie in shared memory:
between two steps of the engine they are taken over at once, and sequences in flight go on with them over the keys
and values that older parameters left in the cache (PipelineRL; sec. 3.1, A.11 of the paper). So every token carries
the version of the parameters that sampled it, and the log-probability that it was sampled with.

An engine is anything with these calls: `TorchEngine`, for a bare machine and for reading, or `VllmEngine`, for a GPU.

    add(requests)               queue completions to sample
    step() -> list[Rollout]     one decoding step for everything in flight; the rollouts that ended with it
    update(parameters)          take over the newest parameters, between two steps
    sample_alone(requests)      the rollouts of these, step by step, with the parameters in use; what is in flight
                                stands still until the last step
    unfinished                  how many requests have not come back yet
    version                     the version of the parameters in use

Dimensions: S slots of the engine, n <= S of them live, T positions, V vocabulary.
"""

import importlib.util
import json
import math
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import transformers
import tyro
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache

import loss as scalerl
from data import Problem, load_evaluation
from data.evaluation import pass_at_k
from data.verify import Verdict, VerifierPool

# --- what crosses the queues --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One completion that is wanted."""

    group: int  # number of the group, unique in the run: the completions of one prompt at one visit
    index: int  # place within the group
    prompt: list[int]  # token ids, chat template included
    thinking_budget: int  # sampled tokens after which thinking is interrupted
    seed: tuple[int, ...]  # of the noise: the same request is sampled alike in any slot of any generator


@dataclass(frozen=True)
class Rollout:
    """One completion as it was sampled. Arrays have one entry per completion token, EOS and forced tokens included."""

    request: Request
    tokens: np.ndarray  # int32 [T]: token ids
    sampled: np.ndarray  # bool [T]: False where the token was forced
    logprobs: np.ndarray  # float32 [T]: log pi_gen when the token was sampled; 0, without meaning, where forced
    versions: np.ndarray  # int32 [T]: version of the parameters in use
    interrupted: bool  # thinking reached its budget and got the phrase
    truncated: bool  # reached the token limit without ending


@dataclass(frozen=True)
class Work:
    """Trainer to generator."""

    requests: list[Request] = field(default_factory=list)
    validation: bool = False  # sample these alone, with the newest parameters, before anything else goes on
    stop: bool = False  # end the process


@dataclass(frozen=True)
class Report:
    """Generator to trainer, at least every few seconds. The counters say what has come since the last report,
    validation left out."""

    generator: int
    rollouts: list[Rollout] = field(default_factory=list)
    validation: bool = False  # what these rollouts are for
    busy_seconds: float = 0.0  # in the engine; the rest of the time is spent waiting for work
    sampled_tokens: int = 0
    slots: int | None = None  # of the engine; in the first report, which says that it is ready
    error: str | None = None  # a traceback, or a sentence for the user: the generator has ended


class SharedParameters:
    """The newest parameters of the trainer, in shared memory, float32. Each of the trainer's ranks writes its shard,
    any number of generators read.

    A queue would deliver the oldest first, and live tensors are read half-updated. Here a rank says which version it
    has begun to write and which it has written; a reader that met a change copies again. Nobody holds a lock, so nobody
    can die with it.
    """

    def __init__(self, model: PreTrainedModel, ranks: int = 1):
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.head_name = head_name(model)
        self.flat = torch.empty(sum(shape.numel() for shape in self.shapes.values())).share_memory_()
        self.begun_R = torch.full((ranks,), -1).share_memory_()  # int64: versions
        self.written_R = torch.full((ranks,), -1).share_memory_()

    def views(self) -> dict[str, Tensor]:
        pieces = self.flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces)}

    @property
    def version(self) -> int:
        """The newest version that has been complete, though a newer one may be half written over it; -1: none yet."""
        return int(self.written_R.min())

    def holds(self, version: int) -> bool:
        """Whether this version is complete and nobody has begun to write over it."""
        return bool((self.written_R == version).all() and (self.begun_R == version).all())

    @torch.no_grad()
    def write(self, parameters: Iterable[tuple[str, Tensor]], version: int, rank: int = 0) -> None:
        """Write the part that this rank of the trainer has: of sharded parameters its rows, of others all."""
        self.begun_R[rank] = version
        views = self.views()
        for name, parameter in parameters:
            if isinstance(parameter, DTensor):  # FSDP has cut it along its first dimension, as chunk does
                for part in views[name].chunk(len(self.begun_R))[rank : rank + 1]:  # none, where rows are few
                    part.copy_(parameter.to_local())
            else:
                views[name].copy_(parameter)
        self.written_R[rank] = version

    def read(self, take: Callable[[], None], timeout: float = 60.0) -> int:
        """Have `take` copy the views, again until it has met one complete version, the newest; returns its number.
        TimeoutError if that did not happen within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            version = self.version
            if version >= 0 and self.holds(version):
                take()
                if self.holds(version):
                    return version
            time.sleep(0.001)
        raise TimeoutError(f"no complete version of the parameters within {timeout:.0f} s: has the trainer died?")

    def pin(self) -> None:
        """Lock the memory for this process: copies to and from its GPU then run at the full speed of the bus."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.flat.data_ptr(), self.flat.nbytes, 0))

    @torch.no_grad()
    def read_into(self, model: PreTrainedModel, timeout: float = 60.0) -> int:
        """`read` into a model. One whose head is not tied, though the trainer's is, gets the tied weight."""
        views = self.views()

        def take() -> None:
            for name, parameter in model.named_parameters():
                parameter.copy_(views[name if name in views else self.head_name])

        return self.read(take, timeout)


# --- the model and its tokens -------------------------------------------------------------------------------------


def head_name(model: PreTrainedModel) -> str:
    """The name, among the model's parameters, of the LM head's weight (that of the embedding when they are tied)."""
    head = model.get_output_embeddings().weight
    return next(name for name, parameter in model.named_parameters() if parameter is head)


def check_device(name: str) -> torch.device:
    """The device called `name`. ValueError if there is none on this machine."""
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.empty(1, device=device)
        elif (device.index or 0) >= torch.cuda.device_count():  # asked so that this process takes no memory there
            raise RuntimeError("CUDA has no such device")
    except (RuntimeError, AssertionError) as error:
        here = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise ValueError(
            f"there is no device {name!r} here; there are: {', '.join(here)} ({str(error).splitlines()[0]})"
        ) from None
    return device


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. ValueError, in one sentence, if it cannot be loaded."""
    folder = Path(path)
    if not folder.exists() and (folder.is_absolute() or Path(folder.parts[0]).is_dir()):
        raise ValueError(f"--model {path}: there is no such folder")  # and no hub needs to be asked
    if folder.is_dir() and not (folder / "tokenizer_config.json").exists():
        inside = f"; did you mean {folder / 'model'}?" if (folder / "model").is_dir() else ""
        raise ValueError(f"--model {path}: the folder holds no model{inside}")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # whatever a broken folder or an unreachable hub makes the library raise
        raise ValueError(f"--model {path}: {_why_not_loaded(path, 'tokenizer', error)}") from error


def load_model(path: str, device: torch.device, dtype: torch.dtype, fp32_head: bool = False) -> PreTrainedModel:
    """A causal LM from a folder or by hub name; ValueError, in one sentence, if it cannot be loaded or used here.

    With fp32_head the weight of the LM head is kept in fp32 beside a trunk in `dtype` (and is no longer tied).
    """
    try:
        # Reading the parts of a plain matmul and softmax is fastest for one query a row on a CPU.
        attention = "eager" if device.type == "cpu" else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention)
        if fp32_head and dtype != torch.float32:
            exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).get_output_embeddings().weight
            model.get_output_embeddings().weight = torch.nn.Parameter(exact.detach().clone())
    except Exception as error:
        raise ValueError(f"--model {path}: {_why_not_loaded(path, 'model', error)}") from error
    config = model.config
    unusual = [
        name
        for name in ("final_logit_softcapping", "logits_scaling", "logit_scale")
        if getattr(config, name, None) not in (None, 1, 1.0)
    ]
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        unusual.append("a bias in the LM head")
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"} or getattr(config, "sliding_window", None):
        unusual.append("layers that are not full attention")
    if unusual:
        raise ValueError(f"--model {path}: models with {', '.join(unusual)} are not supported")
    return model.to(device).eval()


def check_length(model: PreTrainedModel, decoding: "Decoding") -> None:
    """ValueError if the budgets together are longer than what the model can hold."""
    budget, limit = decoding.prompt_budget + decoding.completion_budget, model.config.max_position_embeddings
    if budget > limit:
        raise ValueError(
            f"the budgets for prompt, thinking, interruption and answer add up to {budget} tokens; the model holds"
            f" {limit}: lower --thinking-budget or --prompt-budget, or take a larger --model (small budgets in"
            " train.py: --defaults toy)"
        )


def _why_not_loaded(path: str, what: str, error: Exception) -> str:
    if Path(path).is_dir():
        return f"the {what} in this folder could not be loaded ({type(error).__name__}: {str(error).splitlines()[0]})"
    return (
        f"there is no such folder, and no {what} of this name could be had from the model hub"
        f" ({type(error).__name__}): check the name and the network, or download it elsewhere and give its folder"
    )


def render(tokenizer: PreTrainedTokenizerBase, prompt: str, thinking: bool = True) -> list[int]:
    """Token ids of a user's turn in the model's chat template, ready for the model to go on. thinking: what the
    template is told as `enable_thinking`, which those of models without such a choice ignore."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt).input_ids
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, enable_thinking=thinking, return_dict=True
    )["input_ids"]


def end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a completion: the tokenizer's EOS and those of the model's generation_config.json, since chat models
    often have two, of a turn and of a text. ValueError if there is none."""
    try:
        configured = GenerationConfig.from_pretrained(tokenizer.name_or_path).eos_token_id
    except OSError:  # the model has no such file
        configured = None
    configured = configured if isinstance(configured, list) else [configured]
    ids = {token for token in (tokenizer.eos_token_id, *configured) if token is not None}
    if not ids:
        raise ValueError(
            f"--model {tokenizer.name_or_path}: neither its tokenizer nor its generation_config.json has an EOS token,"
            " so no completion could end"
        )
    return tuple(sorted(ids))


@dataclass(frozen=True)
class Decoding:
    """What all completions of a run have in common."""

    eos: tuple[int, ...]  # ids that end a completion
    end_of_thinking: int  # id of </think>; -1: the model has none, and nothing is interrupted
    thinks: bool  # False: the prompt ends with thinking closed, so that all is answer
    phrase: tuple[int, ...]  # ids of the interruption phrase
    prompt_budget: int  # tokens
    thinking_budget: int  # sampled tokens, the most that a request may have
    answer_budget: int  # sampled tokens
    length_control: str  # as in loss.Recipe
    fp32_logits: bool  # as in loss.Recipe

    @property
    def completion_budget(self) -> int:
        """The most tokens that a completion can have, forced ones included."""
        forced = len(self.phrase) if self.length_control == "interruption" else 0
        return self.thinking_budget + forced + self.answer_budget


def make_decoding(
    tokenizer: PreTrainedTokenizerBase,
    recipe: scalerl.Recipe,
    prompt_budget: int,
    thinking_budget: int,
    answer_budget: int,
    end_of_thinking: str = "</think>",
    phrase: str = scalerl.INTERRUPTION_PHRASE,
    thinking: bool = True,
) -> Decoding:
    """The run's `Decoding` for the tokenizer's model, in ids. ValueError if a budget or a marker cannot be."""
    if prompt_budget < 1 or answer_budget < 1 or thinking_budget < 0:
        raise ValueError(
            "budgets are in tokens: --prompt-budget and --answer-budget at least 1, --thinking-budget at least 0;"
            f" they are {prompt_budget}, {answer_budget} and {thinking_budget}"
        )
    marker = tokenizer(end_of_thinking, add_special_tokens=False).input_ids
    phrase_ids = tokenizer(phrase, add_special_tokens=False).input_ids
    if recipe.length_control == "interruption":
        if len(marker) != 1:
            raise ValueError(
                f"--end-of-thinking {end_of_thinking!r} is {len(marker)} tokens of this model; an interruption wants"
                " exactly one (--length-control penalty wants none)"
            )
        if marker[0] not in phrase_ids:
            raise ValueError(
                f"--interruption-phrase {phrase!r} does not close thinking: it must hold {end_of_thinking}"
            )
    marker_id = marker[0] if len(marker) == 1 else -1
    example = render(tokenizer, "", thinking)
    last = max((i for i, token in enumerate(example) if token == marker_id), default=None)
    closed = last is not None and not tokenizer.decode(example[last + 1 :]).strip()
    return Decoding(
        eos=end_tokens(tokenizer),
        end_of_thinking=marker_id,
        thinks=not closed,
        phrase=tuple(phrase_ids),
        prompt_budget=prompt_budget,
        thinking_budget=thinking_budget,
        answer_budget=answer_budget,
        length_control=recipe.length_control,
        fp32_logits=recipe.fp32_logits,
    )


def completion_text(tokenizer: PreTrainedTokenizerBase, decoding: Decoding, rollout: Rollout) -> str:
    """What a task judges: the completion without its EOS, forced tokens included. Whatever marks the end of thinking
    for this model, tasks read `</think>`."""
    ids = rollout.tokens.tolist()
    text = tokenizer.decode(ids[:-1] if ids[-1] in decoding.eos else ids)
    if decoding.end_of_thinking < 0:
        return text
    return text.replace(tokenizer.decode([decoding.end_of_thinking]), "</think>")


def marked_text(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> str:
    """The completion with its end, forced tokens in [[ ]]."""
    text, start = "", 0
    for end in range(1, len(rollout.tokens) + 1):
        if end == len(rollout.tokens) or rollout.sampled[end] != rollout.sampled[start]:
            piece = tokenizer.decode(rollout.tokens[start:end].tolist())
            text, start = text + (piece if rollout.sampled[start] else f"[[{piece}]]"), end
    return text


# --- the engine for reading ---------------------------------------------------------------------------------------


def check_requests(requests: list[Request], decoding: Decoding) -> None:
    """ValueError for a request beyond the budgets that the engine was made for."""
    for request in requests:
        if not 1 <= len(request.prompt) <= decoding.prompt_budget:
            raise ValueError(f"a prompt has {len(request.prompt)} tokens; the budget is {decoding.prompt_budget}")
        if request.thinking_budget > decoding.thinking_budget:
            raise ValueError(
                f"a request has a thinking budget of {request.thinking_budget} tokens;"
                f" the engine was made for {decoding.thinking_budget}"
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


class SlotCache(Cache):
    """Keys and values of S sequences at positions of their own, over a stock transformers model.

    The first n slots take part in a step; each writes at its own position and sees its own past, which the mask
    given to the model cuts out of the positions returned.
    """

    def __init__(self, slots: int, length: int):
        super().__init__(layers=[])
        self.slots, self.length = slots, length
        self.keys: list[Tensor] = []  # per layer [S, heads, T, head size], made at the first prompt
        self.values: list[Tensor] = []

    def fill(self, rows: list[int], source: DynamicCache, source_rows: list[int]) -> None:
        """Copy the prompts' keys and values, as a plain forward left them, to slots."""
        if not self.keys:
            for layer in source.layers:
                heads, size = layer.keys.shape[1], layer.keys.shape[3]
                self.keys.append(layer.keys.new_zeros(self.slots, heads, self.length, size))
                self.values.append(layer.values.new_zeros(self.slots, heads, self.length, size))
        for i, layer in enumerate(source.layers):
            width = layer.keys.shape[2]
            self.keys[i][rows, :, :width] = layer.keys[source_rows]
            self.values[i][rows, :, :width] = layer.values[source_rows]

    def move(self, to: list[int], rows: list[int], width: int) -> None:
        for stored in (*self.keys, *self.values):
            stored[to, :, :width] = stored[rows, :, :width]

    def place(self, positions_n: Tensor, longest: int) -> int:
        """Say where the first n slots write next; returns how many positions the model will be given.

        From half of the cache on that is all of it: a matmul over a slice copies it first, which costs more than
        the masked rest.
        """
        self.positions_n, self.rows_n = positions_n, torch.arange(len(positions_n), device=positions_n.device)
        self.width = self.length if 2 * longest > self.length else longest
        return self.width

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[self.rows_n, :, self.positions_n] = key_states[:, :, 0]
        values[self.rows_n, :, self.positions_n] = value_states[:, :, 0]
        n = len(self.positions_n)
        return keys[:n, :, : self.width], values[:n, :, : self.width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are given explicitly


class TorchEngine:
    """Continuous batching over slots of a preallocated KV cache, for any transformers causal LM.

    The live sequences are always the first n slots: when one ends, the last live one takes its slot, and when enough
    slots are free, waiting requests are admitted behind them. Their prompts are run once per prompt, however many
    completions are wanted of it, and always with the newest parameters: what is in the cache of sequences in flight
    stays, nothing old is used for a new one.
    """

    def __init__(self, model: PreTrainedModel, decoding: Decoding, slots: int):
        self.model, self.decoding, self.slots = model, decoding, slots
        self.device = model.device
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.requests: list[Request] = []  # of the live slots
        completion = decoding.completion_budget
        self.cache = SlotCache(slots, decoding.prompt_budget + completion)
        # Bookkeeping is on the CPU, one row a slot; only the model's forward and the sampling are on the device.
        self.last_token = np.zeros(slots, np.int64)  # to be fed next
        self.position = np.zeros(slots, np.int64)  # where it goes
        self.count = np.zeros(slots, np.int64)  # completion tokens so far
        self.sampled = np.zeros(slots, np.int64)  # of them sampled
        self.closed_at = np.zeros(slots, np.int64)  # sampled tokens when thinking ended, -1 while it goes on
        self.thinking_budget = np.zeros(slots, np.int64)
        self.phrase_at = np.zeros(slots, np.int64)  # next token of the phrase to force, -1: none
        self.interrupted = np.zeros(slots, bool)
        self.noise = np.zeros((slots, decoding.thinking_budget + decoding.answer_budget))  # uniform, one per sample
        self.tokens = np.zeros((slots, completion), np.int32)
        self.logprobs = np.zeros((slots, completion), np.float32)
        self.versions = np.zeros((slots, completion), np.int32)
        self.was_sampled = np.zeros((slots, completion), bool)
        # All of the above, for moving a sequence to another slot.
        self._rows = [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.requests)

    def add(self, requests: list[Request]) -> None:
        check_requests(requests, self.decoding)
        self.waiting.extend(requests)

    def update(self, parameters: SharedParameters) -> None:
        self.version = parameters.read_into(self.model)

    def sample_alone(self, requests: list[Request]) -> Iterator[list[Rollout]]:
        alone = TorchEngine(self.model, self.decoding, self.slots)  # the same model, slots of its own
        alone.version = self.version
        alone.add(requests)
        while alone.unfinished:
            yield alone.step()

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        self._admit()
        n = len(self.requests)
        if n == 0:
            return []
        sampled_tokens, logprobs = self._sample(n)

        forced = self.phrase_at[:n] >= 0
        phrase = np.array(self.decoding.phrase + (0,))
        tokens = np.where(forced, phrase[self.phrase_at[:n]], sampled_tokens)
        rows, at = np.arange(n), self.count[:n]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = np.where(forced, 0.0, logprobs)
        self.versions[rows, at] = self.version
        self.was_sampled[rows, at] = ~forced
        self.last_token[:n] = tokens
        self.count[:n] += 1
        self.position[:n] += 1
        self.sampled[:n] += ~forced
        self.phrase_at[:n] += forced
        self.phrase_at[:n][self.phrase_at[:n] == len(self.decoding.phrase)] = -1

        ended = ~forced & np.isin(tokens, self.decoding.eos)
        closes = ~forced & (self.closed_at[:n] < 0) & (tokens == self.decoding.end_of_thinking)
        self.closed_at[:n][closes] = self.sampled[:n][closes]
        truncated = self._control_length(np.flatnonzero(~ended))
        return self._release(ended | truncated, truncated)

    def _sample(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """One token for each live slot and its log-probability: temperature 1, the whole distribution."""
        inputs = torch.from_numpy(np.stack([self.last_token[:n], self.position[:n]])).to(self.device)
        width = self.cache.place(inputs[1], longest=int(self.position[:n].max()) + 1)
        unseen_nT = torch.arange(width, device=self.device) > inputs[1][:, None]
        mask = torch.zeros(n, 1, 1, width, dtype=self.model.dtype, device=self.device)
        mask.masked_fill_(unseen_nT[:, None, None], torch.finfo(self.model.dtype).min)
        hidden_nD = self.model.base_model(
            input_ids=inputs[0][:, None],
            position_ids=inputs[1][:, None],
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state[:, 0]
        head_VD = self.model.get_output_embeddings().weight
        logprobs_nV = torch.log_softmax(scalerl.head_logits(hidden_nD, head_VD, self.decoding.fp32_logits), -1)
        # Inverse transform sampling: the first token at which the cumulative probability passes the noise.
        cumulative_nV = logprobs_nV.double().exp().cumsum(-1)
        noise_n = torch.from_numpy(self.noise[np.arange(n), self.sampled[:n]]).to(self.device)
        tokens_n1 = torch.searchsorted(cumulative_nV, noise_n[:, None] * cumulative_nV[:, -1:], right=True)
        logprobs_n1 = logprobs_nV.gather(-1, tokens_n1)
        return tokens_n1[:, 0].cpu().numpy(), logprobs_n1[:, 0].cpu().numpy()

    def _control_length(self, rows: np.ndarray) -> np.ndarray:
        """Begin the interruptions that are due among these slots; returns which live slots are truncated."""
        interrupt, truncate = scalerl.length_control(
            self.decoding.length_control,
            self.sampled[rows],
            self.closed_at[rows],
            self.thinking_budget[rows],
            self.decoding.answer_budget,
        )
        self.closed_at[rows[interrupt]] = self.sampled[rows[interrupt]]
        self.phrase_at[rows[interrupt]] = 0
        self.interrupted[rows[interrupt]] = True
        truncated = np.zeros(len(self.requests), bool)
        truncated[rows[truncate]] = True
        return truncated

    def _admit(self) -> None:
        """Give free slots to waiting requests, a few at a time: a forward over prompts costs as much as a step."""
        live = len(self.requests)
        count = min(self.slots - live, len(self.waiting))
        if count == 0 or (live > 0 and self.slots - live < self.slots / 16):
            return
        admitted = [self.waiting.popleft() for _ in range(count)]
        rows = np.arange(live, live + count)
        prompts: dict[tuple[int, ...], list[int]] = {}  # the slots of each distinct prompt
        for row, request in zip(rows, admitted):
            prompts.setdefault(tuple(request.prompt), []).append(int(row))
            noise = np.random.default_rng(request.seed)
            self.noise[row] = noise.random(self.noise.shape[1])
            self.last_token[row] = request.prompt[-1]
            self.position[row] = len(request.prompt) - 1
            self.thinking_budget[row] = request.thinking_budget
        self._prefill(prompts)
        self.requests += admitted
        self.count[rows] = self.sampled[rows] = 0
        self.closed_at[rows], self.phrase_at[rows] = -1 if self.decoding.thinks else 0, -1
        self.interrupted[rows] = False
        self._control_length(rows)  # a thinking budget of 0 is used up already

    def _prefill(self, prompts: dict[tuple[int, ...], list[int]], tokens_at_once: int = 16384) -> None:
        """Keys and values of all prompt tokens but the last, which the next step feeds like any other."""
        longest_first = sorted(prompts, key=len, reverse=True)
        while longest_first:
            width = max(len(longest_first[0]) - 1, 1)
            batch = longest_first[: max(1, tokens_at_once // width)]
            longest_first = longest_first[len(batch) :]
            # Padding is on the right, where a causal model never looks; what it leaves in the cache is overwritten.
            ids = torch.tensor([(list(ids[:-1]) + [0] * width)[:width] for ids in batch], device=self.device)
            cache = DynamicCache()
            self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            source_rows = [i for i, ids in enumerate(batch) for _ in prompts[ids]]
            self.cache.fill([row for ids in batch for row in prompts[ids]], cache, source_rows)

    def _release(self, finished: np.ndarray, truncated: np.ndarray) -> list[Rollout]:
        """Take the finished completions out of their slots and close the gaps with the last live ones."""
        done, n = np.flatnonzero(finished), len(self.requests)
        rollouts = [
            Rollout(
                request=self.requests[row],
                tokens=self.tokens[row, : self.count[row]].copy(),
                sampled=self.was_sampled[row, : self.count[row]].copy(),
                logprobs=self.logprobs[row, : self.count[row]].copy(),
                versions=self.versions[row, : self.count[row]].copy(),
                interrupted=bool(self.interrupted[row]),
                truncated=bool(truncated[row]),
            )
            for row in done
        ]
        left = n - len(done)
        gaps = done[done < left]
        movers = np.flatnonzero(~finished[left:]) + left
        if len(gaps):
            for array in self._rows:
                array[gaps] = array[movers]
            self.cache.move(gaps.tolist(), movers.tolist(), int(self.position[gaps].max()))
            for gap, mover in zip(gaps, movers):
                self.requests[gap] = self.requests[mover]
        del self.requests[left:]
        return rollouts


# --- the engine for a GPU -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratorSettings:
    """What is needed to make an engine."""

    model: str
    devices: tuple[str, ...]  # more than one: the model is split over them (vLLM's tensor parallelism)
    dtype: str
    threads: int  # CPU threads of this process
    slots: int  # 0: as many as fit
    decoding: Decoding
    engine: Literal["torch", "vllm"] = "torch"
    memory: float = 0.9  # with 0 slots: the share of its devices that weights and cache may take
    most_slots: int = 512  # with 0 slots: at most this many


class NoEngine(ValueError):
    """An engine cannot be had with these settings on this machine; the message is a sentence for the user."""


def check_memory(share: float | None, slots: int) -> None:
    """ValueError for a --generator-memory that cannot be, or that nothing would read."""
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--generator-memory is a share, above 0 and at most 1, not {share}")
    if share is not None and slots:
        raise ValueError(f"--generator-memory goes with --slots 0, not with --slots {slots}")


def slots_that_fit(settings: GeneratorSettings, device: str, reserve: float) -> int:
    """How many slots have room, of the full length that a sequence can have, in the generator's share of the device,
    beside its weights; at most `most_slots`. reserve: sequences that the cache must hold for each slot. ValueError if
    there is no room for one."""
    try:
        config = AutoConfig.from_pretrained(settings.model)
        with torch.device("meta"):
            numbers = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:
        raise ValueError(f"--model {settings.model}: {_why_not_loaded(settings.model, 'config', error)}") from error
    decoding, text, width = settings.decoding, config.get_text_config(), getattr(torch, settings.dtype).itemsize
    devices = len(settings.devices)
    head = text.vocab_size * text.hidden_size * 4  # in fp32, beside the trunk
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    length = decoding.prompt_budget + decoding.completion_budget
    sequence = 2 * text.num_hidden_layers * math.ceil(heads / devices) * size * length * width
    free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.device(device).type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    weights = (numbers * width + head) / devices
    slots = min(int((min(settings.memory * total, free) - weights) / (reserve * sequence)), settings.most_slots)
    if slots < 1:
        raise NoEngine(
            f"the share of a generator, {settings.memory:.3g} (--generator-memory) of the {total / 2**30:.1f} GiB of"
            f" {settings.devices[0]}, {free / 2**30:.1f} of them free, has no room for its weights"
            f" ({weights / 2**30:.3g} GiB) and a sequence of {length} tokens ({reserve * sequence / 2**30:.3g}): raise"
            " it, lower --thinking-budget, or split the model over several devices (--engine vllm, --tensor-parallel)"
        )
    return slots


@dataclass
class Sequence:
    """A completion that `VllmEngine` has begun, as far as it has come."""

    request: Request
    salt: str  # of its blocks in the prefix cache: the version it began with
    closed_at: int  # `count` when thinking ended, -1 while it goes on
    tokens: list[int] = field(default_factory=list)  # the next four are those of `Rollout`
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    count: int = 0  # sampled tokens
    interrupted: bool = False


class VllmEngine:
    """The same calls over vLLM, which is made in this process and driven step by step.

    What vLLM does by itself is continuous batching, the paged cache and the sampling, at temperature 1 from the whole
    distribution. The rest is decided here, between two of its steps: who is let in, when thinking is interrupted, which
    blocks of its prefix cache a request may hit. So the version of a token is the version in use at the step that
    returned it, and nothing runs ahead of that (async_scheduling is off).

    Parameters come out of the same shared memory as for `TorchEngine`, and only from there: each worker copies its
    part, cast and sharded, to its device. vLLM's own weight transfer would have the trainer wait for the generators:
    NCCL's broadcast is a collective that both sides must enter, CUDA IPC lends out the trainer's live parameters,
    which the next optimizer step must not touch before all have copied. Here the trainer writes and goes on.
    """

    def __init__(self, settings: GeneratorSettings):
        _prepare_environment(settings.devices, settings.threads)
        on_cpu = torch.device(settings.devices[0]).type == "cpu"
        device = "cpu" if on_cpu else "cuda:0"  # the first that is seen now
        slots = settings.slots or slots_that_fit(settings, device, reserve=1.3)
        self.decoding, self.slots = settings.decoding, slots
        length = self.decoding.prompt_budget + self.decoding.completion_budget
        block_size = 32 if on_cpu else 16  # tokens
        self.blocks_each = math.ceil(length / block_size)
        # Room for all slots at full length, so that vLLM never drops a sequence's keys and values to recompute them
        # later; a quarter more is what `sample_alone` has for sure; one block is never used.
        blocks = (slots + slots // 4 + 1) * self.blocks_each + 1
        # All that vLLM is given can begin in the very next step, so that nothing waits inside of it while parameters
        # change: new prompts of so many tokens, and a token, or an interruption, of every sequence in flight.
        self.prompt_tokens = max(8192, length)
        tokens_per_step = self.prompt_tokens + slots * (1 + block_size + len(self.decoding.phrase))
        try:
            from vllm import EngineArgs, LLMEngine, SamplingParams
            from vllm.sampling_params import RequestOutputKind
        except ImportError as error:
            raise NoEngine(f"--engine vllm: vLLM cannot be imported ({_reason(error)}); {INSTALL_VLLM}") from error
        head_dtype = "float32" if self.decoding.fp32_logits else "bfloat16"
        cache = f"the keys and values of {slots} slots of {length} tokens"
        try:
            arguments = EngineArgs(
                model=settings.model,
                load_format="dummy",  # `update` brings the parameters
                skip_tokenizer_init=True,
                generation_config="vllm",  # no top-k, top-p or penalty out of the model's folder
                # The head is computed as by loss.head_logits, from a weight of its own, in a dtype of its own.
                hf_overrides={"tie_word_embeddings": False, "head_dtype": head_dtype},
                dtype=settings.dtype,
                tensor_parallel_size=len(settings.devices),
                enforce_eager=on_cpu,
                max_model_len=length,
                max_num_seqs=2 * slots,  # those in flight and those of `sample_alone`
                max_num_batched_tokens=tokens_per_step,
                block_size=block_size,
                num_gpu_blocks_override=blocks,
                # With the size of the cache given (below), this is only how much of a GPU must be free at the start,
                # and the trainer may have taken most of it. What does not fit then runs out of memory.
                gpu_memory_utilization=0.01,
                enable_prefix_caching=True,
                async_scheduling=False,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
            )
            config = arguments.create_engine_config()
            model, parallel = config.model_config, config.parallel_config
            if on_cpu:
                _check_head_size(model.get_head_size())
            per_token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
            config.cache_config.kv_cache_memory_bytes = blocks * block_size * per_token * model.dtype.itemsize
            cache += f" ({config.cache_config.kv_cache_memory_bytes / 2**30:.2f} GiB a device)"
            self.engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        except Exception as error:  # whatever it is that this model, these settings and this machine make vLLM raise
            reason = _reason(error)
            if "memory" in reason.lower():
                reason = f"{cache} do not fit beside the model: lower --slots or --thinking-budget ({reason})"
            raise NoEngine(f"--engine vllm: {reason}") from error
        if head_dtype == "float32" and settings.dtype != "float32":
            self.engine.collective_rpc(_keep_head_in_fp32)
        self.parameters: SharedParameters | None = None  # those that the workers have been given
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.sequences: dict[str, Sequence] = {}  # in flight, by vLLM's name for their present piece
        self.due: list[str] = []  # of them, those whose thinking is to be interrupted
        self.pieces = 0  # requests that vLLM has been given so far
        self.at_once = slots
        self.sampling = lambda seed, max_tokens: SamplingParams(
            temperature=1.0,
            seed=seed,
            logprobs=0,
            max_tokens=max_tokens,
            stop_token_ids=list(self.decoding.eos),
            ignore_eos=True,  # the ids above are all that ends a completion
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.sequences)

    def add(self, requests: list[Request]) -> None:
        check_requests(requests, self.decoding)
        self.waiting.extend(requests)

    def update(self, parameters: SharedParameters) -> None:
        if parameters is not self.parameters:  # a handle can be opened once, so each worker has one of its own
            workers = self.engine.vllm_config.parallel_config.world_size
            handles = [bytes(ForkingPickler.dumps(parameters)) for _ in range(workers)]
            self.engine.collective_rpc(_open_parameters, args=(handles,))
            self.parameters = parameters
        self.version = parameters.read(lambda: self.engine.collective_rpc(_reload_parameters))

    def sample_alone(self, requests: list[Request]) -> Iterator[list[Rollout]]:
        # vLLM's scheduler runs what is in its list `running`, and keeps the blocks of whatever it does not run.
        scheduler = self.engine.engine_core.engine_core.scheduler
        held = scheduler.running, self.waiting, self.sequences, self.due
        scheduler.running, self.waiting, self.sequences, self.due = [], deque(), {}, []
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.at_once = min(self.slots, free // self.blocks_each)
        self.add(requests)
        while self.unfinished:
            yield self.step()
        scheduler.running, self.waiting, self.sequences, self.due = held
        self.at_once = self.slots

    def step(self) -> list[Rollout]:
        self._interrupt()
        self._admit()
        outputs = self.engine.step()
        sequences = [self.sequences[output.request_id] for output in outputs]
        ended = np.zeros(len(outputs), bool)
        for row, (output, sequence) in enumerate(zip(outputs, sequences)):
            (piece,) = output.outputs
            (token,), (candidates,) = piece.token_ids, piece.logprobs
            sequence.tokens.append(token)
            sequence.sampled.append(True)
            sequence.logprobs.append(candidates[token].logprob)
            sequence.versions.append(self.version)
            sequence.count += 1
            if token == self.decoding.end_of_thinking and sequence.closed_at < 0:
                sequence.closed_at = sequence.count
            ended[row] = token in self.decoding.eos
        interrupt, truncate = scalerl.length_control(
            self.decoding.length_control,
            np.array([sequence.count for sequence in sequences]),
            np.array([sequence.closed_at for sequence in sequences]),
            np.array([sequence.request.thinking_budget for sequence in sequences]),
            self.decoding.answer_budget,
        )
        truncate &= ~ended
        self.engine.abort_request([outputs[row].request_id for row in np.flatnonzero(truncate)])
        self.due = [outputs[row].request_id for row in np.flatnonzero(interrupt & ~ended)]
        rollouts = []
        for row in np.flatnonzero(ended | truncate):
            sequence = self.sequences.pop(outputs[row].request_id)
            rollouts.append(
                Rollout(
                    request=sequence.request,
                    tokens=np.array(sequence.tokens, np.int32),
                    sampled=np.array(sequence.sampled),
                    logprobs=np.array(sequence.logprobs, np.float32),
                    versions=np.array(sequence.versions, np.int32),
                    interrupted=sequence.interrupted,
                    truncated=bool(truncate[row]),
                )
            )
        return rollouts

    def _interrupt(self) -> None:
        """Take the sequences that are due out of vLLM and put them back with the phrase appended.

        With the salt it began with, such a request hits the full blocks that it has just left, keys and values of older
        parameters among them: it goes on over its own past. What did not fill a block (up to 31 tokens on a CPU, 15 on
        a GPU) is computed again, with the newest parameters.
        """
        self.engine.abort_request(self.due)
        for name in self.due:
            self._force_phrase(self.sequences.pop(name))
        self.due = []

    def _force_phrase(self, sequence: Sequence) -> None:
        phrase = list(self.decoding.phrase)
        sequence.tokens += phrase
        sequence.sampled += [False] * len(phrase)
        sequence.logprobs += [0.0] * len(phrase)
        sequence.versions += [self.version] * len(phrase)
        sequence.closed_at, sequence.interrupted = sequence.count, True
        self._submit(sequence, max_tokens=self.decoding.answer_budget)

    def _admit(self) -> None:
        """Begin waiting requests while there are slots for them and their prompts fit into this step."""
        tokens = self.prompt_tokens
        while self.waiting and len(self.sequences) < self.at_once and tokens >= len(self.waiting[0].prompt):
            request = self.waiting.popleft()
            tokens -= len(request.prompt)
            thinks = self.decoding.thinks
            sequence = Sequence(request, salt=f"version {self.version}", closed_at=-1 if thinks else 0)
            if self.decoding.length_control == "interruption" and request.thinking_budget == 0 and thinks:
                self._force_phrase(sequence)
            else:
                self._submit(sequence, max_tokens=request.thinking_budget + self.decoding.answer_budget)

    def _submit(self, sequence: Sequence, max_tokens: int) -> None:
        name, self.pieces = str(self.pieces), self.pieces + 1
        ids = sequence.request.prompt + sequence.tokens
        # Noise of its own for each piece: the same seed again would give the answer the noise of the thinking.
        seed = int(np.random.default_rng((*sequence.request.seed, len(sequence.tokens))).integers(2**62))
        prompt = {"prompt_token_ids": ids, "cache_salt": sequence.salt}
        self.engine.add_request(name, prompt, self.sampling(seed, max_tokens))
        self.sequences[name] = sequence


# What runs in vLLM's worker: this process or, with several devices, one for each.


def _open_parameters(worker, handles: list[bytes]) -> None:
    worker.shared_parameters = pickle.loads(handles[worker.rank])
    if worker.device.type == "cuda":
        worker.shared_parameters.pin()


def _reload_parameters(worker) -> None:
    worker.reload_weights(weights_iterator=_checkpoint(worker.shared_parameters))
    for layer in worker.get_model().modules():
        # vLLM 0.32 brings experts into the layout of its CPU kernel when they are first loaded, and then never again.
        if type(layer).__name__ == "RoutedExperts" and layer.w13_weight.device.type == "cpu":
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _checkpoint(parameters: SharedParameters) -> Iterator[tuple[str, Tensor]]:
    """The parameters as a checkpoint has them, which is what vLLM reads."""
    yield from parameters.views().items()
    if parameters.head_name != "lm_head.weight":
        yield "lm_head.weight", parameters.views()[parameters.head_name]


def _keep_head_in_fp32(worker) -> None:
    """vLLM's head_dtype is that of the arithmetic: the head's weight stays in the trunk's dtype, rounded to bf16. The
    trainer's is not (a head in fp32 on one side only is worse than none), so here it gets a weight in fp32."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead):
            weight = torch.nn.Parameter(module.weight.float(), requires_grad=False)
            vars(weight).update(vars(module.weight))  # how it is loaded and sharded
            module.weight = weight
            with weight.device:
                record_metadata_for_reloading(module)
        if isinstance(module, LogitsProcessor):
            module._apply_head = lambda head, hidden_ND, bias: torch.nn.functional.linear(
                hidden_ND.float(), head.weight, bias
            )


# Whether and how vLLM can be had.

INSTALL_VLLM = "`pip install -r requirements-vllm.txt` brings it; --engine torch needs none"


def choose_engine(engine: str, device: str) -> str:
    """torch or vllm, for auto too: vLLM where there is one and the device is a GPU. ValueError if vLLM is missing."""
    installed = importlib.util.find_spec("vllm") is not None
    if engine == "vllm" and not installed:
        raise ValueError(f"--engine vllm: vLLM is not installed; {INSTALL_VLLM}")
    if engine == "auto":
        return "vllm" if installed and device.startswith("cuda") else "torch"
    return engine


def check_tensor_parallel(engine: str, devices: int, model: PreTrainedModel) -> None:
    """ValueError if the model cannot be split over so many devices."""
    if devices > 1 and engine != "vllm":
        raise ValueError(f"only vLLM splits a model over several devices, and the engine is {engine} (--engine)")
    heads = model.config.num_attention_heads
    if heads % devices:
        raise ValueError(f"a model with {heads} attention heads cannot be split over {devices} devices")


def _prepare_environment(devices: tuple[str, ...], threads: int) -> None:
    """What vLLM reads from the environment, before it is imported. What the user has set stays."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in this process, to be driven step by step
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if torch.device(devices[0]).type == "cpu":
        # Nothing is compiled, and threads are not pinned to cores that the trainer may be on.
        wanted |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    else:  # vLLM takes the first devices that it sees
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(i) for i in range(torch.cuda.device_count())]
        wanted_indices = [torch.device(device).index or 0 for device in devices]
        if max(wanted_indices) >= len(names):
            raise ValueError(f"there is no device {', '.join(devices)} here; there are {len(names)} CUDA devices")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[i] for i in wanted_indices)
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _check_head_size(size: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise ValueError(f"on a CPU it takes heads of {', '.join(map(str, sizes))}; this model's have {size}")


def _reason(error: Exception) -> str:
    """The sentence in an error of vLLM: of a validation error, which has several lines, the part that was written."""
    text = str(error).strip() or type(error).__name__
    return text.partition("Value error, ")[2].partition(" [type=")[0] or text.splitlines()[0]


def make_engine(settings: GeneratorSettings):
    """The engine, ready for its first `update`. ValueError, in one sentence, if it cannot be had."""
    if settings.slots < 0:
        raise ValueError(f"--slots is {settings.slots}; it must be at least 1, or 0 for as many as fit")
    torch.set_num_threads(settings.threads)
    if settings.engine == "vllm":
        return VllmEngine(settings)
    device, dtype = check_device(settings.devices[0]), getattr(torch, settings.dtype)
    slots = settings.slots or slots_that_fit(settings, settings.devices[0], reserve=2.0)  # `sample_alone` has as many
    model = load_model(settings.model, device, dtype, fp32_head=settings.decoding.fp32_logits)
    return TorchEngine(model, settings.decoding, slots)


# --- the process --------------------------------------------------------------------------------------------------


def generator_process(
    number: int, settings: GeneratorSettings, parameters: SharedParameters, work: queue.Queue, reports: queue.Queue
) -> None:
    """Sample what comes through `work`, with the newest parameters, until told to stop. Any exception is sent to the
    trainer, with its traceback unless it is `NoEngine` or memory is full; when the trainer dies, the process ends."""
    for number_of_signal in (signal.SIGINT, signal.SIGTERM):  # these reach whole process groups; the trainer decides
        signal.signal(number_of_signal, signal.SIG_IGN)
    threading.Thread(target=end_with_the_trainer, daemon=True).start()
    work._writer.close()  # only the trainer writes here: when it dies in the middle of a message, reading ends
    try:
        _generate(number, settings, parameters, work, reports)
    except BaseException as error:
        text = str(error) if isinstance(error, NoEngine) else traceback.format_exc()
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            text = out_of_memory(error)
        reports.put(Report(number, error=text))
        raise SystemExit(1) from None


def out_of_memory(error: BaseException) -> str:
    """What the user is told of it."""
    return f"out of memory ({str(error).partition('. ')[0]}): lower --slots, or take as many as fit (--slots 0)"


def end_with_the_trainer() -> None:
    """Wherever the main thread is, in a long step or waiting for parameters, it has nobody left to work for."""
    multiprocessing.parent_process().join()
    os._exit(1)


HEARTBEAT = 5.0  # seconds between two reports at most, while steps of the engine are shorter


def _generate(number, settings, parameters, work, reports):
    transformers.utils.logging.disable_progress_bar()
    engine = make_engine(settings)
    if isinstance(engine, TorchEngine) and engine.device.type == "cuda":  # the workers of vLLM do it themselves
        parameters.pin()
    engine.update(parameters)
    reports.put(Report(number, slots=engine.slots))
    busy, reported = 0.0, time.monotonic()

    def report(rollouts: list[Rollout], validation: bool) -> None:
        nonlocal busy, reported
        if rollouts or time.monotonic() - reported > HEARTBEAT:
            sampled_tokens = 0 if validation else sum(int(rollout.sampled.sum()) for rollout in rollouts)
            reports.put(Report(number, rollouts, validation, busy, sampled_tokens))
            busy, reported = 0.0, time.monotonic()

    while True:
        message = _next_work(work, wait=engine.unfinished == 0)
        if message is not None and message.stop:
            return
        if message is not None and message.validation:
            engine.update(parameters)
            for rollouts in engine.sample_alone(message.requests):
                report(rollouts, validation=True)
            continue
        if message is not None:
            engine.add(message.requests)
            continue  # take all the work there is, and only then look for parameters: they are at least as new
        started = time.monotonic()
        if parameters.version > engine.version:
            engine.update(parameters)
        rollouts = engine.step()
        busy += time.monotonic() - started
        report(rollouts, validation=False)


def _next_work(work: queue.Queue, wait: bool) -> Work | None:
    """The next message; None if there is none now or, when waiting, within a second (then look round and wait on)."""
    try:
        return work.get(timeout=1.0) if wait else work.get_nowait()
    except queue.Empty:
        return None
    except EOFError:  # the trainer has died
        return Work(stop=True)


# --- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """Print completions of a model, or its pass rate on problems that it was not trained on."""

    model: str = "data/arithmetic_base"  # folder or hub name of a transformers causal LM
    prompt: str | None = None  # print completions of this
    evaluate: bool = False  # print mean@samples and pass@k, with 95 % intervals over problems
    data: tuple[str, ...] = ("arithmetic",)  # tasks, data sets by name, files: each is evaluated
    problems: int = 128  # the most of each
    samples: int | None = None  # completions of each; 16 with --evaluate, 1 with --prompt
    log: Path | None = None  # a JSONL file that figures are added to; of a checkpoint with its step and compute
    prompt_budget: int | None = None  # tokens; the budgets are by default what --data trains with in train.py
    thinking_budget: int | None = None  # sampled tokens until thinking is interrupted
    answer_budget: int | None = None  # sampled tokens
    length_control: Literal["interruption", "penalty"] = "interruption"  # the next two are for the interruption
    end_of_thinking: str = "</think>"  # one token of the model
    interruption_phrase: str = scalerl.INTERRUPTION_PHRASE  # forced when thinking reaches its budget
    thinking: bool = True  # what the chat template is told as enable_thinking
    engine: Literal["auto", "torch", "vllm"] = "auto"  # auto: vLLM where there is one and the device is a GPU
    device: tuple[str, ...] = ("cpu",)  # several: vLLM splits the model over them
    slots: int = 0  # sequences decoded at once; 0: as many as fit and are asked for
    generator_memory: float | None = None  # with --slots 0: share of the device; by default .9 of a GPU, .5 of a CPU
    verifiers: int = 2  # processes that judge completions
    verifier_time_limit: float = 30.0  # seconds for one completion
    verifier_memory: float = 4.0  # GiB that a verifier may take
    seed: int = 0


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status: 0, or 2 for wrong settings."""
    transformers.utils.logging.disable_progress_bar()
    command = tyro.cli(Command, args=arguments, description=__doc__)
    try:
        if bool(command.prompt) == command.evaluate:
            raise ValueError("say either --prompt TEXT or --evaluate")
        for name in ("problems", "samples", "verifiers"):
            if getattr(command, name) is not None and getattr(command, name) < 1:
                raise ValueError(f"--{name} is {getattr(command, name)}; it must be at least 1")
        check_memory(command.generator_memory, command.slots)
        _run(command)
    except (MemoryError, torch.OutOfMemoryError) as error:
        print(f"error: {out_of_memory(error)}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(command: Command) -> None:
    sources = []
    for data in command.data if command.evaluate else ():
        sources.append(load_evaluation(data, command.problems))
        for note in sources[-1].notes:
            print(f"{data}: {note}", file=sys.stderr)
    kind, tokenizer = choose_engine(command.engine, command.device[0]), load_tokenizer(command.model)
    papers = (scalerl.PROMPT_BUDGET, scalerl.THINKING_BUDGET[1], scalerl.ANSWER_BUDGET)
    usual = (64, 58, 9) if set(command.data) == {"arithmetic"} else papers
    named = (command.prompt_budget, command.thinking_budget, command.answer_budget)
    decoding = make_decoding(
        tokenizer,
        scalerl.Recipe(length_control=command.length_control),
        *(default if budget is None else budget for budget, default in zip(named, usual)),
        command.end_of_thinking,
        command.interruption_phrase,
        command.thinking,
    )
    samples = command.samples or (1 if command.prompt else 16)
    on_cpu = command.device[0].startswith("cpu")
    settings = GeneratorSettings(
        command.model,
        command.device,
        "float32" if on_cpu else "bfloat16",
        torch.get_num_threads(),
        command.slots,
        decoding,
        kind,
        memory=command.generator_memory or (0.5 if on_cpu else 0.9),
        most_slots=min(GeneratorSettings.most_slots, samples * max([1, *(len(s.validation) for s in sources)])),
    )
    engine = make_engine(settings) if kind == "torch" else None
    model = engine.model if engine else load_model(command.model, torch.device("cpu"), torch.float32)
    check_length(model, decoding)
    check_tensor_parallel(kind, len(command.device), model)
    if engine is None:  # vLLM is made without parameters
        parameters = SharedParameters(model)
        parameters.write(model.named_parameters(), version=0)
        engine = make_engine(settings)
        engine.update(parameters)

    def sample(problems: list[Problem]) -> list[Rollout]:
        requests = []
        for i, problem in enumerate(problems):
            ids = render(tokenizer, problem.prompt, command.thinking)
            requests += [Request(i, j, ids, decoding.thinking_budget, (command.seed, i, j)) for j in range(samples)]
        return sample_all(engine, requests, progress=command.evaluate)

    if command.prompt:
        for rollout in sample([Problem(command.prompt, "")]):
            print(command.prompt + marked_text(tokenizer, rollout))
    for source in sources:
        rollouts = sample(source.validation)
        texts = [completion_text(tokenizer, decoding, rollout) for rollout in rollouts]
        with VerifierPool(command.verifiers, command.verifier_time_limit, command.verifier_memory) as pool:
            verdicts = judge_all(pool, source.validation, rollouts, texts)
        figures = evaluation_figures(rollouts, verdicts, samples)
        print(f"{source.name}: {len(source.validation)} problems, {samples} completions of each")
        for name in (name.removesuffix("_low") for name in figures if name.endswith("_low")):
            value, low, high = (figures[column] for column in (name, f"{name}_low", f"{name}_high"))
            shown = f"mean@{samples}" if name == "pass_rate" else name
            print(f"  {shown:9} {value:.3f}   95 % [{low:.3f}, {high:.3f}]")
        print(
            f"  length    {figures['length_mean']:.1f} sampled tokens (95th percentile"
            f" {figures['length_95th_percent']}); interrupted {figures['interrupted']:.3f},"
            f" truncated {figures['truncated']:.3f}, without a verdict {figures['verifier_failures']}"
        )
        if command.log is not None:
            with open(command.log, "a") as file:
                about = {"data": source.name, "model": command.model, **checkpoint_compute(Path(command.model))}
                file.write(json.dumps({**about, **figures}) + "\n")


def judge_all(
    pool: VerifierPool, problems: list[Problem], rollouts: list[Rollout], texts: list[str]
) -> list[Verdict]:
    """A verdict on each rollout, in order. One that was cut off is wrong."""
    verdicts = {i: Verdict(False) for i, rollout in enumerate(rollouts) if rollout.truncated}
    pool.submit([(i, problems[r.request.group], texts[i]) for i, r in enumerate(rollouts) if i not in verdicts])
    with tqdm(total=pool.unfinished, desc="judging", unit="completion", leave=False, disable=None) as bar:
        while pool.unfinished:
            judged = dict(pool.results())
            verdicts |= judged
            bar.update(len(judged))
            time.sleep(0.002)
    return [verdicts[i] for i in range(len(rollouts))]


def evaluation_figures(rollouts: list[Rollout], verdicts: list[Verdict], samples: int) -> dict[str, float | str]:
    """What --evaluate prints and logs, of `samples` completions of each problem: pass_rate is mean@samples."""
    correct_PN = np.array([verdict.correct for verdict in verdicts]).reshape(-1, samples)
    lengths = [int(rollout.sampled.sum()) for rollout in rollouts]
    figures = {"num_examples": len(rollouts), "problems": len(correct_PN)}
    for k in sorted({1, *(2**i for i in range(2, 10, 2) if 2**i < samples), samples}):
        value, low, high = pass_at_k(correct_PN, k)
        name = "pass_rate" if k == 1 else f"pass@{k}"
        figures |= {name: round(value, 4), f"{name}_low": round(low, 4), f"{name}_high": round(high, 4)}
    return figures | {
        "length_mean": round(float(np.mean(lengths)), 1),
        "length_95th_percent": int(np.percentile(lengths, 95)),
        "interrupted": round(float(np.mean([rollout.interrupted for rollout in rollouts])), 4),
        "truncated": round(float(np.mean([rollout.truncated for rollout in rollouts])), 4),
        "verifier_failures": sum(verdict.failure is not None for verdict in verdicts),
    }


def checkpoint_compute(model: Path) -> dict:
    """Step and compute of a checkpoint's model folder, as train.py writes them down; nothing for other folders."""
    state = model.parent / "state.json"
    if not state.exists():
        return {}
    stored = json.loads(state.read_text())
    compute = stored["compute"]
    return {
        "step": stored["step"],
        "compute_device_hours": compute["device_seconds"] / 3600,
        "compute_tokens": compute["tokens"],
        "compute_flops": compute["flops"],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
