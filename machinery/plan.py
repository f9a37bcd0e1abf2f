"""What a run would take, before anything is started or written: `python train.py --plan`.

Memory of each device, tokens, FLOPs, disk and hours, from the settings and the model's config.json alone. It is
arithmetic, compared with what was measured on CPUs in docs/measured.md. What it says fits has a quarter to spare.
"""

import contextlib
import itertools
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

import loss
from curve.flags import flag
from data.load import KNOWN, files_of, parse_spec, task_names
from machinery.compute import flops, matmul_parameters
from machinery.engine import check_split, choose_engine, engine_settings
from machinery.files import json_lines
from machinery.model import check_length, load_shapes, load_tokenizer, make_decoding, model_path
from machinery.settings import TrainCommand, devices_here, devices_paid, gpus_here, trunk_dtype
from machinery.trainer import layers_and_rest
from machinery.vllm_engine import CPU_CACHE

Row = tuple[str, str, str]  # of the table: name, figure, words
MARGIN = 1.25  # what the arithmetic may be off by
PROCESS = 0.5 * 2**30  # bytes of Python and its libraries; on a GPU of CUDA's context
FRAGMENTS = 0.3 * 2**30  # bytes that a CPU's allocator keeps, at most, between tensors of many sizes in a trainer
FLOPS = {"cpu": 1e10, "cuda": 2e13}  # a second of a device, where no speed is given: as the default run has; a guess


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a model's memory depends on. Widths are numbers of a token in one layer."""

    parameters: int
    layer: int  # parameters of the largest layer
    table: int  # parameters of the embedding, and of the head
    tied: bool  # embedding and head are one
    layers: int
    heads: int
    vocabulary: int
    hidden: int
    query: int  # width of all heads' queries
    cached: int  # width of keys and values, or of what they are computed from
    mlp: int  # width inside of the feed-forward part; of a mixture, of the experts that a token is sent to

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Shape":
        config, head = model.config, model.get_output_embeddings().weight
        get = lambda name: getattr(config, name, None)
        layers, heads = layers_and_rest(model)[0], config.num_attention_heads
        size = get("qk_head_dim") or get("head_dim") or config.hidden_size // heads
        experts = (get("num_experts_per_tok") or 0) * (get("moe_intermediate_size") or 0)
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            layer=max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers),
            table=head.numel(),
            tied=head is model.get_input_embeddings().weight,
            layers=len(layers),
            heads=heads,
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            query=heads * size,
            cached=(get("kv_lora_rank") and get("kv_lora_rank") + get("qk_rope_head_dim"))
            or 2 * (get("num_key_value_heads") or heads) * size,
            mlp=max(get("intermediate_size") or 4 * config.hidden_size, experts),
        )


def trainer_bytes(
    shape: Shape, ranks: int, tokens: int, length: int, dtype: torch.dtype, device: str, checkpointing: bool
) -> dict[str, float]:
    """What each rank of the trainer has at its peak, in the backward, by cause. tokens: of a micro-batch, in sequences
    of `length` tokens. The fp32 head and embedding are whole while in use, and so is the head's gradient."""
    width, kind = dtype.itemsize, torch.device(device).type
    shared = ranks > 1 or dtype != torch.float32  # by FSDP
    of_a_layer = tokens * width * (8 * shape.hidden + 4 * shape.query + 4 * shape.mlp)
    if kind == "cpu":  # the attention there makes scores of all pairs of positions
        of_a_layer += tokens * width * shape.heads * length
    kept = tokens * width * shape.hidden if checkpointing else of_a_layer  # of each layer, for the backward
    tables, activations = 2 if shape.tied else 3, shape.layers * kept + checkpointing * of_a_layer
    fragments = min(FRAGMENTS, activations + 8 * shape.parameters / ranks) if kind == "cpu" else 0
    return {
        "parameters": 4 * shape.parameters / ranks,
        "gradients": 4 * shape.parameters / ranks,
        "moments": 8 * shape.parameters / ranks,
        "gathered by FSDP": shared * (2 * width * shape.layer + 4 * tables * shape.table),
        "activations": activations,
        "logits": 3 * 4 * min(tokens, loss.CHUNK) * shape.vocabulary,  # of a chunk: they, softmax, gradient
        "process": PROCESS + fragments,
    }


def generator_bytes(
    shape: Shape, engine: str, slots: int, length: int, prompts: int, dtype: torch.dtype, share: float
) -> dict[str, float]:
    """What a generator has, on all its devices together, by cause. slots: sequences at once, of `length` tokens, with
    prompts of so many; share: the bytes that vLLM may take. The cache of vLLM has what the rest leaves of them."""
    width = dtype.itemsize
    a_token = shape.layers * shape.cached * width
    fp32_head = 4 * shape.table if width < 4 else 0
    parts = {"weights": shape.parameters * width + fp32_head, "process": PROCESS}
    if engine == "vllm":
        step = max(8192, length) + slots  # tokens of its largest step
        parts["in passing"] = step * 2 * shape.mlp * width + 12 * slots * shape.vocabulary
        return parts | {"keys and values": max(0.0, share - sum(parts.values()))}
    together = min(16_384, slots * prompts)  # tokens of prompts computed at once
    parts["in passing"] = slots * shape.vocabulary * (4 + 4 + 8 + 8) + together * a_token
    return parts | {"keys and values": slots * length * a_token}


# --- who needs what ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """Which device needs what. Bytes."""

    generators: list[tuple[str, ...]]
    trainers: list[str]
    engine: str
    trainer: dict[str, float]  # by cause
    generator: dict[str, float]
    sequences: float  # of full length, that the cache of a generator holds
    devices: dict[str, tuple[float, float, str]]  # of each: planned, there, whether it fits


def needs(command: TrainCommand, shape: Shape, length: int) -> Needs:
    """Who needs what with these settings, for sequences of at most `length` tokens. ValueError if the devices are too
    few."""
    generators, trainers = devices_here(command)
    own, last, there = generators[0], trainers[0], memory_of_a_device(command, trainers[0])
    shared = bool({*own} & {*trainers})
    made = engine_settings(replace(command, engine="torch"), own, command.model, None, shared)
    elsewhere = command.gpus and command.engine != "torch"  # another machine has vLLM
    engine = "vllm" if elsewhere else choose_engine(command.engine, own[0])
    share = CPU_CACHE if own[0] == "cpu" else made.memory * there * len(own)
    tokens, dtype = max(command.tokens_per_micro_batch, length), trunk_dtype(command, last)
    trainer = trainer_bytes(shape, len(trainers), tokens, length, dtype, last, command.gradient_checkpointing)
    generator = generator_bytes(shape, engine, made.slots, length, command.prompt_budget, dtype, share)
    sequences = generator["keys and values"] / (shape.layers * shape.cached * dtype.itemsize * length)
    devices = {}
    for device in dict.fromkeys([*sum(generators, ()), *trainers]):
        trains = trainers.count(device) * sum(trainer.values())
        samples = sum(each.count(device) for each in generators) * sum(generator.values()) / len(own)
        surely = MARGIN * trains + (1 if engine == "vllm" else MARGIN) * samples  # vLLM keeps to its share
        fits = "fits" if surely <= there else "fits, if the plan is not too low"
        too_much = trains + samples > there or (samples and sequences < 1)
        devices[device] = trains + samples, there, "DOES NOT FIT" if too_much else fits
    return Needs(generators, trainers, engine, trainer, generator, sequences, devices)


def memory_of_a_device(command: TrainCommand, device: str) -> float:
    """Bytes that a GPU has, or this machine where `device` is its CPU. ValueError if nothing says so."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if command.gpu_memory is None and not torch.cuda.is_available():
        raise ValueError("--gpus wants --gpu-memory too: there is no GPU here to ask")
    return command.gpu_memory * 1e9 if command.gpu_memory else torch.cuda.get_device_properties(0).total_memory


def helps(command: TrainCommand, shape: Shape, length: int) -> str:
    """The fewest flags with which everything fits, with MARGIN."""
    trials = {
        "gradient_checkpointing": [True],
        "tokens_per_micro_batch": [tokens for tokens in (16_384, 8192, 4096, 2048, 1024, 256) if tokens >= length],
        "slots": [command.slots // 2**i for i in range(1, 9) if command.slots >= 2**i],
        "generator_memory": [0.9, 0.6, 0.4, 0.3, 0.2, 0.1],
        "trainers": range(2, gpus_here(command)),
        "tensor_parallel": [size for size in (2, 4, 8) if shape.heads % size == 0],
    }
    for number in (1, 2, 3):
        for names in itertools.combinations(trials, number):
            for values in itertools.product(*(trials[name] for name in names)):
                with contextlib.suppress(ValueError):  # more devices than there are
                    need = needs(replace(command, **dict(zip(names, values))), shape, length)
                    if all(verdict == "fits" for *_, verdict in need.devices.values()):
                        said = [flag(name) + f" {value}" * (value is not True) for name, value in zip(names, values)]
                        return " ".join(said)
    return "no three flags are enough: take a smaller --model, smaller budgets, or more memory"


# --- work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Earlier:
    """What the log of a run tells of others like it; without one, what is assumed."""

    completion: float | None = None  # sampled tokens, mean; None: half of what is allowed
    trained: float = 1.0  # share of the groups that are trained on
    flops: float | None = None  # a second of a device; None: FLOPS


def earlier_run(folder: Path) -> Earlier:
    """The run in this folder. ValueError if it has made no step."""
    try:
        steps = [line for _, line in json_lines(folder / "log.jsonl") if line["kind"] == "train"]
        return Earlier(
            float(np.mean([line["completion_length"] for line in steps])),
            1 - float(np.mean([line["zero_variance_fraction"] for line in steps])),
            steps[-1]["compute_flops"] / steps[-1]["compute_device_hours"] / 3600,
        )
    except (OSError, LookupError, ValueError):
        raise ValueError(f"--plan {folder}: it holds no run that has made a step") from None


def work(command: TrainCommand, need: Needs, parameters: int, length: int) -> list[Row]:
    """Tokens, FLOPs and hours of the run; parameters: those that a token is multiplied with."""
    earlier = Earlier() if command.plan is True else earlier_run(command.plan)
    completion = earlier.completion or (length - command.prompt_budget) / 2
    groups = command.steps * command.groups_per_step
    completions = groups * command.completions_per_prompt
    validations = 1 + -(-command.steps // command.validation_every)
    validated = validations * len(command.data) * command.validation_problems * command.validation_samples
    prompt = command.prompt_budget / 2
    generated = completions * completion + groups * prompt
    total = flops(parameters, generated, completions * (completion + prompt) * earlier.trained)
    validation_flops = flops(parameters, validated * completion, 0)
    devices, kind = devices_paid(need.generators, need.trainers), torch.device(need.trainers[0]).type
    speed = earlier.flops or FLOPS[kind]
    seconds, how = (total + validation_flops) / speed / devices, f"with {devices} devices at {speed:.1e} FLOPs/s"
    how += f", as in {command.plan}" if earlier.flops else ", a guess: --plan runs/NAME takes the speed of that run"
    if command.plan_tokens_per_second:
        seconds = (completions + validated) * completion / command.plan_tokens_per_second
        how = "at --plan-tokens-per-second"
    said_of_groups = f"{earlier.trained:.0%} of the groups are trained on"
    said = f"completions of {completion:,.0f} tokens" + (", half of the most" if earlier.completion is None else "")
    return [
        ("sampled tokens", f"{completions * completion:.2e}", f"{completions:,} {said}"),
        (
            "  for validations",
            f"{validated * completion:.2e}",
            f"{validations} of {validated // validations:,} completions",
        ),
        ("FLOPs", f"{total:.2e}", f"{said_of_groups}; attention over the past left out"),
        ("hours", f"{seconds / 3600:,.{0 if seconds > 36_000 else 3}f}", how),
    ]


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(command: TrainCommand) -> str:
    """The plan, as it is printed. ValueError, in one sentence, for settings that cannot be."""
    if command.gpu_memory is not None and gpus_here(command) == 0:
        raise ValueError("--gpu-memory is of a machine with GPUs: say how many by --gpus")
    for spec in map(parse_spec, command.data):
        if spec.name not in {*KNOWN, *task_names()} and "/" not in spec.name:
            files_of(spec, "train")  # there is such a file
    model = load_shapes(command.model)
    shape, length = Shape.of(model), longest(command, model)
    need = needs(command, shape, length)
    check_split(need.engine, command.tensor_parallel, shape.heads)
    size = f"{command.model}: {shape.parameters:,} parameters"
    rows: list[Row] = [("model", "", f"{size}; a prompt and its completion have at most {length:,} tokens")]

    # 1. who does what, and what that takes
    tokens = max(command.tokens_per_micro_batch, length)
    room = f"{need.sequences:,.0f} sequences of full length"
    notes = {
        "activations": f"{tokens:,} tokens" + ", gradient checkpointing" * command.gradient_checkpointing,
        "gathered by FSDP": "the fp32 head, the embedding, two layers",
        "keys and values": f"{room}, {2 * need.sequences:,.0f} of half; --slots {command.slots}",
        "process": "Python and its libraries" if need.trainers[0] == "cpu" else "CUDA itself",
    }
    for who, devices, parts in (
        ("a trainer", [(device,) for device in need.trainers], need.trainer),
        (f"a generator ({need.engine})", need.generators, need.generator),
    ):
        rows.append((who, "GiB", f"{len(devices)}: {' '.join(','.join(own) for own in devices)}"))
        rows += [(f"  {name}", GiB(bytes), notes.get(name, "")) for name, bytes in parts.items() if bytes]
        rows.append(("  sum", GiB(sum(parts.values())), ""))

    # 2. beside what there is
    rows.append(("what there is", "GiB", "planned"))
    for found in dict.fromkeys(need.devices.values()):
        alike = [device for device, its in need.devices.items() if its == found]
        name = f"  {alike[0]}" + (f" to {alike[-1]}" if alike[1:] else "")
        rows.append((name, GiB(found[1]), f"{GiB(found[0])}: {found[2]}"))
    buffer, checkpoint = 4 * shape.parameters, 12 * shape.parameters
    disk, keep = (command.keep_checkpoints + 1) * checkpoint + buffer, command.keep_checkpoints
    for name, place, size, help, what in (
        ("/dev/shm", "/dev/shm", buffer, "a container wants more", "the parameters on their way"),
        ("disk", ".", disk, "--keep-checkpoints", f"{keep} checkpoints of {GiB(checkpoint)}, one in the making, model"),
    ):
        room = shutil.disk_usage(place).free if command.gpus is None and Path(place).exists() else None
        verdict = "" if room is None else ": fits" if size < room else f": DOES NOT FIT ({help})"
        rows.append((f"  {name}", "" if room is None else GiB(room), f"{GiB(size)}{verdict}; {what}"))
    if any(verdict != "fits" for *_, verdict in need.devices.values()):
        rows.append(("what would help", "", helps(command, shape, length)))
    rows += work(command, need, matmul_parameters(model), length)
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"{name:{first}}  {figure:>{second}}  {words}".rstrip() for name, figure, words in rows]
    return "\n".join(
        [*lines, "Nothing was started. Memory may be off by a quarter: what is said to fit has that much room."]
    )


def longest(command: TrainCommand, model: PreTrainedModel) -> int:
    """The most tokens that a prompt and its completion can have. ValueError, where there is a tokenizer to tell, for
    markers or budgets that this model cannot have."""
    folder = Path(command.model)
    if (folder / "config.json").exists() and not (folder / "tokenizer_config.json").exists():
        return command.prompt_budget + command.thinking_budget[1] + command.answer_budget  # and a few for the phrase
    tokenizer = load_tokenizer(model_path(command.model))
    decoding = make_decoding(tokenizer, command, command.recipe.length_control, command.recipe.fp32_logits)
    check_length(model, decoding)
    return decoding.longest


def GiB(bytes: float) -> str:
    """A size as the plan says it."""
    return f"{bytes / 2**30:,.1f}" if bytes >= 2**26 else f"{bytes / 2**30:.1g}"
