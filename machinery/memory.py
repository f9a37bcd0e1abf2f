"""How much memory a run needs on each of its devices, and which settings suit this memory.

All of it is arithmetic on the settings and the model's config.json. docs/node.md compares it with
what PyTorch traces, and docs/measured.md with measurements. `choose` is called by a run
(machinery/run.py) and by `train.py --plan` (tools/plan.py), so both get the same settings.
"""

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import loss
from core.devices import devices_here, trunk_dtype
from core.engine import EngineSettings, choose_engine
from core.settings import BY_MEMORY, PRESETS, Settings, TrainCommand
from core.torch_engine import PROMPT_TOKENS_AT_ONCE
from core.vllm_engine import CPU_CACHE, UNMEASURED
from curve.flags import flag
from machinery.compute import head_size
from machinery.trainer import layers_and_rest

MARGIN = 1.25  # how far the arithmetic may be off
FITS, MAY_FIT, TOO_MUCH = "fits", "fits, if the plan is not too low", "DOES NOT FIT"
PROCESS = 0.5 * 2**30  # bytes of Python and its libraries; on a GPU of CUDA's context
# The most bytes that a CPU's allocator keeps between a trainer's tensors of many sizes.
FRAGMENTS = 0.3 * 2**30

# Bytes of a parameter that wait in the CPU's memory with --offload: it, its gradient, two moments.
OFFLOADED = 4 * 4
ON_ITS_WAY = 4  # bytes of a parameter's copy for the generators, in the CPU's memory too

QWEN3 = {  # the models that `largest` tries, in this order
    "8B": dict(
        hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32
    ),
    "4B": dict(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
    ),
    "1.7B": dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
    ),
    "0.6B": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16
    ),
}


class Shape:
    """The sizes that a model's memory depends on. A width is how many numbers a token has in one
    layer."""

    def __init__(self, model: PreTrainedModel):
        config = model.config
        layers, _ = layers_and_rest(model)
        head = model.get_output_embeddings().weight
        get = lambda name: getattr(config, name, None)
        self.parameters = count_parameters(model)
        self.layers = len(layers)
        self.layer = max(map(count_parameters, layers))  # parameters of the largest layer
        self.table = head.numel()  # parameters of the head, and of the embedding
        self.tied = head is model.get_input_embeddings().weight  # embedding and head are one
        self.heads = config.num_attention_heads
        self.vocabulary = config.vocab_size
        self.hidden = config.hidden_size
        self.query = self.heads * head_size(model)  # width of all heads' queries
        keys = (get("num_key_value_heads") or self.heads) * head_size(model)
        self.cached = 2 * keys  # width of keys and values
        # Width of the queries and keys that are normed, if each head has a norm.
        norms = any(name.endswith("q_norm.weight") for name, _ in layers[0].named_parameters())
        self.normed = self.query + keys if norms else 0
        # Latent attention caches what keys and values are computed from.
        if get("kv_lora_rank"):
            self.cached = config.kv_lora_rank + config.qk_rope_head_dim
        # Width inside the feed-forward part; in a mixture, of the experts that a token is sent to.
        experts = (get("num_experts_per_tok") or 0) * (get("moe_intermediate_size") or 0)
        self.mlp = max(get("intermediate_size") or 4 * self.hidden, experts)


def count_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def trainer_bytes(
    shape: Shape,
    settings: Settings,
    ranks: int,
    tokens: int,
    length: int,
    dtype: torch.dtype,
    device: str,
) -> dict[str, float]:
    """Bytes of each rank of the trainer at its peak, in the backward, by cause. tokens: of a
    micro-batch, in sequences of `length` tokens. With --offload on a GPU the shards are in the
    CPU's memory."""
    on_cpu, width = device == "cpu", dtype.itemsize
    of_weights, table = 4 * shape.parameters / ranks, 4 * shape.table
    of_shards = 0 if settings.offload and not on_cpu else of_weights

    # What the backward needs of one layer. Attention on a CPU makes scores of all pairs of
    # positions. With checkpointing only a layer's input is kept, and one layer at a time is
    # computed again.
    widths = 8 * shape.hidden + 4 * shape.query + 3 * shape.normed + 4 * shape.mlp
    if on_cpu:
        widths += shape.heads * length
    layer = kept = tokens * width * widths
    again = 0
    if settings.gradient_checkpointing:
        kept, again = tokens * width * shape.hidden, layer

    # Of a chunk of logits: they, their softmax and their gradient. FSDP gathers the head in fp32,
    # and keeps it and its gradient.
    logits = 3 * 4 * min(tokens, loss.chunk_tokens(shape.vocabulary)) * shape.vocabulary
    sharded = ranks > 1 or dtype != torch.float32 or settings.offload
    gathered = 2 * table if sharded else 0

    if on_cpu:
        gathered += 2 * width * shape.layer + table * (not shape.tied) if sharded else 0
        activations, passing = shape.layers * kept + again, 0
        fragments = min(FRAGMENTS, activations + 2 * of_weights)
    else:
        # The peak is in the backward of the head, where the gradient of a chunk is added to that of
        # the others; or in the backward of a layer, with the gradients in its feed-forward part.
        # FSDP then holds two gathered layers, and the gradient of one layer three times: in bf16,
        # in fp32, and this rank's part in fp32.
        in_head = table + max(table, logits) + 5 * tokens * width * shape.hidden
        in_layer = again + 3 * tokens * width * shape.mlp
        if sharded:
            in_layer += (3 * width + 4 + 4 / ranks) * shape.layer
        activations, passing = shape.layers * kept, max(in_head, in_layer) - logits
        fragments = 0
    return {
        "parameters": of_shards,
        "gradients": of_shards,
        "moments": 2 * of_shards,
        "gathered by FSDP": gathered,
        "activations": activations,
        "logits": logits,
        "in passing": passing,
        "process": PROCESS + fragments,
    }


def generator_bytes(
    shape: Shape,
    engine: str,
    slots: int,
    length: int,
    prompts: int,
    dtype: torch.dtype,
    share: float,
) -> dict[str, float]:
    """Bytes of a generator, on all its devices together, by cause. slots: the most sequences at
    once; length: tokens of each; prompts: tokens of a prompt. share: the bytes that vLLM takes. It
    gives all that its weights and its steps leave of them to the keys and values."""
    width = dtype.itemsize
    fp32_head = 4 * shape.table if width < 4 else 0
    parts = {"weights": shape.parameters * width + fp32_head, "process": PROCESS}
    if engine == "vllm":
        step_tokens = max(8192, length) + slots  # of its largest step
        in_a_step = step_tokens * 2 * shape.mlp * width + 12 * slots * shape.vocabulary
        parts["in passing"] = in_a_step + UNMEASURED * shape.table - fp32_head
        left = share + PROCESS - sum(parts.values())  # CUDA is not in the share
        return parts | {"keys and values": max(0.0, left)}
    token_bytes = shape.layers * shape.cached * width  # in the cache
    prompt_tokens = min(PROMPT_TOKENS_AT_ONCE, slots * prompts)
    parts["in passing"] = slots * shape.vocabulary * (4 + 4 + 8 + 8) + prompt_tokens * token_bytes
    return parts | {"keys and values": slots * length * token_bytes}


class Needs:
    """The bytes that each device needs, for sequences of at most `length` tokens. ValueError for
    too few devices."""

    def __init__(self, settings: Settings, shape: Shape, length: int):
        self.settings, self.length = settings, length
        self.generators, self.trainers = devices_here(settings)
        first, last = self.generators[0], self.trainers[0]
        total, free = memory_of_a_device(settings, last)
        dtype = trunk_dtype(settings, last)

        # A trainer: its largest micro-batch is one sequence at least, and at most its part of the
        # batch.
        completions = settings.groups_per_step * settings.completions_per_prompt
        of_a_rank = math.ceil(completions / len(self.trainers)) * length
        self.tokens = max(length, min(settings.tokens_per_micro_batch, of_a_rank))
        self.trainer = trainer_bytes(
            shape, settings, len(self.trainers), self.tokens, length, dtype, last
        )

        # A generator.
        self.engine = engine_of(settings, first[0])
        share = CPU_CACHE
        if first[0] != "cpu":
            # Beside a trainer `candidates` has chosen vLLM's share.
            share = (settings.generator_memory or EngineSettings.memory) * total * len(first)
        self.generator = generator_bytes(
            shape, self.engine, settings.slots, length, settings.prompt_budget, dtype, share
        )
        cache_of_a_sequence = shape.layers * shape.cached * dtype.itemsize * length
        # of full length, in a generator
        self.sequences = self.generator["keys and values"] / cache_of_a_sequence
        missing = max(0, 1 - self.sequences) * cache_of_a_sequence

        # By device the bytes planned, the bytes free, and whether it fits. Only the arithmetic
        # may be off: vLLM keeps to its share.
        self.devices = {}
        sampling_devices = sum(self.generators, ())
        of_a_device = (sum(self.generator.values()) + missing) / len(first)
        for device in dict.fromkeys([*sampling_devices, *self.trainers]):
            trains = self.trainers.count(device) * sum(self.trainer.values())
            samples = sampling_devices.count(device) * of_a_device
            at_most = MARGIN * trains + (1 if self.engine == "vllm" else MARGIN) * samples
            verdict = FITS if at_most <= free else MAY_FIT
            if trains + samples > free or (samples and missing):
                verdict = TOO_MUCH
            self.devices[device] = trains + samples, free, verdict
        if settings.offload and last != "cpu" and not is_elsewhere(settings):
            there = memory_of_this_cpu()
            waiting = (OFFLOADED + ON_ITS_WAY) * shape.parameters
            self.devices["cpu"] = waiting, there, FITS if waiting <= there else TOO_MUCH

    @property
    def verdict(self) -> str:
        """That of the device where it is worst."""
        verdicts = [verdict for *_, verdict in self.devices.values()]
        return max(verdicts, key=[FITS, MAY_FIT, TOO_MUCH].index)

    @property
    def fullest(self) -> tuple[str, float, float]:
        """The device with the least room to spare; the bytes planned and available there."""
        name = max(self.devices, key=lambda name: self.devices[name][0] / self.devices[name][1])
        planned, available, _ = self.devices[name]
        return name, planned, available


def is_elsewhere(settings: Settings) -> bool:
    """Whether this is a plan for the GPUs of another machine."""
    return isinstance(settings, TrainCommand) and bool(settings.gpus)


def engine_of(settings: Settings, device: str) -> str:
    """torch or vllm. Another machine, that --plan asks about, is assumed to have vLLM."""
    elsewhere = is_elsewhere(settings) and settings.engine != "torch"
    return "vllm" if elsewhere else choose_engine(settings.engine, device)


def memory_of_a_device(settings: Settings, device: str) -> tuple[float, float]:
    """Bytes of a GPU, in all and free of other programs, or of this machine if `device` is its CPU.
    ValueError if nothing says so."""
    said = settings.gpu_memory if isinstance(settings, TrainCommand) else None
    if device == "cpu":
        if said is not None:
            raise ValueError("--gpu-memory is of a machine with GPUs: say how many by --gpus")
        return memory_of_this_cpu(), memory_of_this_cpu()
    if said is not None:
        return said * 1e9, said * 1e9
    if not torch.cuda.is_available():
        raise ValueError("--gpus wants --gpu-memory too: there is no GPU here to ask")
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def memory_of_this_cpu() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def GiB(size: float) -> str:
    return f"{size / 2**30:,.1f}" if size >= 2**26 else f"{size / 2**30:.1g}"


# --- settings that suit the memory ----------------------------------------------------------------


class DoesNotFit(ValueError):
    """Nothing that may be chosen fits. The message is a sentence for the user; `settings` need
    least memory."""

    def __init__(self, message: str, settings: Settings):
        super().__init__(message)
        self.settings = settings


def choose(settings: Settings, shape: Shape, length: int) -> tuple[Settings, str]:
    """The settings, with a value for each of BY_MEMORY that no flag has given, and the reason for
    these values; '' if there was no choice. `DoesNotFit` if no choice fits."""
    fastest, *others = candidates(settings)
    if not others:
        return fastest, ""
    need = first_that_fits(settings, shape, length)
    if need is None:
        raise DoesNotFit(what_would_fit(settings, shape, length), others[-1])
    device, planned, available = need.fullest
    reason = (
        f"{chosen_flags(settings, need)} for the {GiB(available)} GiB of {device}:"
        f" {GiB(planned)} are planned"
    )
    if need.settings != fastest:
        first = Needs(fastest, shape, length)
        reason += f", and {GiB(first.fullest[1])} with {chosen_flags(settings, first)}"
    return need.settings, reason


def candidates(settings: Settings) -> Iterator[Settings]:
    """The settings with values for those of BY_MEMORY that are None. The fastest come first: what
    costs least time is given up first. On a GPU these are tokens of a micro-batch, then what
    checkpointing computes again, then slots, then vLLM's share beside a trainer. Checkpointing
    costs a third at most, and 4,096 tokens instead of 32,768 cost two thirds of the speed
    (docs/measured.md): so it comes before the smallest micro-batches. On a CPU each has its
    default."""
    generators, trainers = devices_here(settings)
    values = {name: [getattr(Settings, name)] for name in BY_MEMORY}
    if trainers[0] != "cpu":
        slots = PRESETS.get(settings.defaults, {}).get("slots", Settings.slots)
        values["slots"] = [slots // part for part in (1, 2, 4, 8, 16) if slots // part >= 8]
        values["gradient_checkpointing"] = [False, True]
        values["tokens_per_micro_batch"] = [32_768, 16_384, 8192, 4096, 2048]
        vllm = engine_of(settings, generators[0][0]) == "vllm"
        if vllm and not {*generators[0]}.isdisjoint(trainers):
            values["generator_memory"] = [0.4, 0.3, 0.2, 0.15, 0.1]
    for name in BY_MEMORY:
        if getattr(settings, name) is not None:
            values[name] = [getattr(settings, name)]
    both_open = len(values["gradient_checkpointing"]) * len(values["tokens_per_micro_batch"]) > 5
    for combination in itertools.product(*values.values()):
        tried = replace(settings, **dict(zip(values, combination)))
        small = tried.tokens_per_micro_batch < 8192 and not tried.gradient_checkpointing
        if not (small and both_open):
            yield tried


def first_that_fits(settings: Settings, shape: Shape, length: int) -> Needs | None:
    """The fastest candidate that fits with a quarter to spare, or else with nothing to spare."""
    may_fit = None
    for tried in candidates(settings):
        need = Needs(tried, shape, length)
        if need.verdict == FITS:
            return need
        if need.verdict == MAY_FIT:
            may_fit = may_fit or need
    return may_fit


def what_would_fit(settings: Settings, shape: Shape, length: int) -> str:
    """By how much the run is too large, and the first change that helps."""
    *_, smallest = candidates(settings)
    least = Needs(smallest, shape, length)
    device, planned, available = least.fullest
    too_large = (
        f"{settings.model} does not fit: {device} has {GiB(available)} GiB, and"
        f" {GiB(planned)} are planned with {chosen_flags(settings, least)},"
        f" {GiB(planned - available)} too many"
    )
    changes = []
    for part in (0.75, 0.5):
        fewer = int(part * length)
        how = f"prompts and completions of at most {fewer:,} tokens, not {length:,},"
        changes.append((how, settings, fewer))
    most_trainers = settings.gpus_here() - settings.tensor_parallel
    for trainers in range(len(least.trainers) + 1, most_trainers + 1):
        more = replace(settings, generators=0, trainers=trainers)
        changes.append((f"--trainers {trainers}", more, length))
    changes.append(("--offload", replace(settings, offload=True), length))
    for how, changed, tokens in changes:
        need = first_that_fits(changed, shape, tokens)
        if need:
            return f"{too_large}; {how} would fit: {GiB(need.fullest[1])}"
    for offload in (settings.offload, True):
        found = largest(replace(settings, offload=offload), length)
        if found:
            name, need = found
            also = " with --offload" * offload
            return f"{too_large}; a smaller model, {name}{also}, would fit: {GiB(need.fullest[1])}"
    return f"{too_large}; no smaller model that we know would fit"


def largest(settings: Settings, length: int) -> tuple[str, Needs] | None:
    """The largest Qwen3 whose training fits on these GPUs with a quarter to spare, on the fewest
    trainers."""
    for size, sizes in QWEN3.items():
        tied = size != "8B"
        config = Qwen3Config(**sizes, num_key_value_heads=8, tie_word_embeddings=tied)
        with torch.device("meta"):
            shape = Shape(Qwen3ForCausalLM(config))
        most_trainers = settings.gpus_here() - settings.tensor_parallel
        for trainers in range(1, max(1, most_trainers) + 1):
            tried = replace(settings, generators=0, trainers=trainers)
            need = first_that_fits(tried, shape, length)
            if need and need.verdict == FITS:
                return f"Qwen3-{size}", need
    return None


def chosen_flags(settings: Settings, need: Needs) -> str:
    """The flags of what was chosen, of all that `settings` leave open."""
    words = []
    for name in BY_MEMORY:
        value = getattr(need.settings, name)
        if getattr(settings, name) is not None or value is None:
            continue
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        else:
            words.append(f"{flag(name)} {value}")
    return " ".join(words)
