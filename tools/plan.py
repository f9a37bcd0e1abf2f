"""What a run would take, before anything is started or written: `python train.py --plan`.

All of it is arithmetic on the settings and the model's config.json. docs/measured.md compares it
with measurements on CPUs. If the plan says that something fits, a quarter of the memory is to
spare.
"""

import math
import os
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import loss
from core.decoding import make_decoding
from core.devices import devices_here, trunk_dtype
from core.engine import choose_engine, engine_settings, refuse_split
from core.model import load_shapes, load_tokenizer, model_path, refuse_too_long
from core.settings import Settings, TrainCommand
from core.vllm_engine import CPU_CACHE, UNMEASURED
from machinery.compute import head_size
from machinery.trainer import layers_and_rest

MARGIN = 1.25  # how far the arithmetic may be off
PROCESS = 0.5 * 2**30  # bytes of Python and its libraries; on a GPU of CUDA's context
# The most bytes that a CPU's allocator keeps between a trainer's tensors of many sizes.
FRAGMENTS = 0.3 * 2**30

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
    micro-batch, in sequences of `length` tokens. The fp32 head and embedding are gathered while in
    use, and so is the head's gradient. With --offload on a GPU the shards are in the CPU's memory.
    """
    on_cpu = device == "cpu"
    checkpointing = settings.gradient_checkpointing
    width = dtype.itemsize
    of_weights = 4 * shape.parameters / ranks

    # What the backward needs of one layer. Attention on a CPU makes scores of all pairs of
    # positions. With checkpointing only a layer's input is kept, and one layer at a time is
    # computed again.
    widths = 8 * shape.hidden + 4 * shape.query + 3 * shape.normed + 4 * shape.mlp
    if on_cpu:
        widths += shape.heads * length
    layer = tokens * width * widths
    kept = tokens * width * shape.hidden if checkpointing else layer
    again = layer if checkpointing else 0

    # Of a chunk: logits, softmax, gradient. On a GPU a layer that is computed again takes the room
    # that they have left.
    logits = 3 * 4 * min(tokens, loss.chunk_tokens(shape.vocabulary)) * shape.vocabulary
    activations = shape.layers * kept + (again if on_cpu else max(0, again - logits))
    fragments = min(FRAGMENTS, activations + 2 * of_weights) if on_cpu else 0

    gathered = 0
    if ranks > 1 or dtype != torch.float32 or settings.offload:
        tables = 2 if shape.tied else 3
        gathered = 2 * width * shape.layer + 4 * tables * shape.table
    of_shards = 0 if settings.offload and not on_cpu else of_weights
    return {
        "parameters": of_shards,
        "gradients": of_shards,
        "moments": 2 * of_shards,
        "gathered by FSDP": gathered,
        "activations": activations,
        "logits": logits,
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
    prompt_tokens = min(16_384, slots * prompts)  # computed at once
    parts["in passing"] = slots * shape.vocabulary * (4 + 4 + 8 + 8) + prompt_tokens * token_bytes
    return parts | {"keys and values": slots * length * token_bytes}


class Needs:
    """The bytes that each device needs, for sequences of at most `length` tokens. ValueError for
    too few devices."""

    def __init__(self, command: TrainCommand, shape: Shape, length: int):
        self.generators, self.trainers = devices_here(command)
        first, last = self.generators[0], self.trainers[0]
        available, dtype = memory_of_a_device(command, last), trunk_dtype(command, last)

        # A trainer: its largest micro-batch is one sequence at least, and at most its part of the
        # batch.
        completions = command.groups_per_step * command.completions_per_prompt
        of_a_rank = math.ceil(completions / len(self.trainers)) * length
        self.tokens = max(length, min(command.tokens_per_micro_batch, of_a_rank))
        self.trainer = trainer_bytes(
            shape, command, len(self.trainers), self.tokens, length, dtype, last
        )

        # A generator. Another machine is assumed to have vLLM.
        elsewhere = command.gpus and command.engine != "torch"
        self.engine = "vllm" if elsewhere else choose_engine(command.engine, first[0])
        beside_a_trainer = not {*first}.isdisjoint(self.trainers)
        with_torch = replace(command, engine="torch")
        settings = engine_settings(with_torch, first, command.model, None, beside_a_trainer)
        share = CPU_CACHE if first[0] == "cpu" else settings.memory * available * len(first)
        self.generator = generator_bytes(
            shape, self.engine, command.slots, length, command.prompt_budget, dtype, share
        )
        cache_of_a_sequence = shape.layers * shape.cached * dtype.itemsize * length
        # of full length, in a generator
        self.sequences = self.generator["keys and values"] / cache_of_a_sequence

        # By device the bytes planned, the bytes available, and whether it fits. Only the arithmetic
        # may be off: vLLM keeps to its share.
        self.devices = {}
        sampling_devices = [name for names in self.generators for name in names]
        for device in dict.fromkeys([*sampling_devices, *self.trainers]):
            trains = self.trainers.count(device) * sum(self.trainer.values())
            samples = sampling_devices.count(device) * sum(self.generator.values()) / len(first)
            at_most = MARGIN * trains + (1 if self.engine == "vllm" else MARGIN) * samples
            verdict = "fits" if at_most <= available else "fits, if the plan is not too low"
            if trains + samples > available or (samples and self.sequences < 1):
                verdict = "DOES NOT FIT"
            self.devices[device] = trains + samples, available, verdict
        self.fits = all(verdict == "fits" for *_, verdict in self.devices.values())


def memory_of_a_device(command: TrainCommand, device: str) -> float:
    """Bytes of a GPU, or of this machine if `device` is its CPU. ValueError if nothing says so."""
    if device == "cpu":
        if command.gpu_memory is not None:
            raise ValueError("--gpu-memory is of a machine with GPUs: say how many by --gpus")
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if command.gpu_memory is not None:
        return command.gpu_memory * 1e9
    if not torch.cuda.is_available():
        raise ValueError("--gpus wants --gpu-memory too: there is no GPU here to ask")
    return torch.cuda.get_device_properties(0).total_memory


def plan(command: TrainCommand) -> str:
    """The text of the plan. ValueError, in one sentence, for settings that cannot be."""
    model = load_shapes(command.model)
    shape, length = Shape(model), longest(command, model)
    need = Needs(command, shape, length)
    refuse_split(need.engine, command.tensor_parallel, shape.heads)
    size = f"{command.model}: {shape.parameters:,} parameters"
    rows = [("model", "", f"{size}; a prompt and its completion have at most {length:,} tokens")]
    rows += memory_rows(command, need, shape.parameters)
    if command.gpus_here():
        rows.append(("largest that fits", "", largest(command, length)))
    name_width, figure_width = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [
        f"{name:{name_width}}  {figure:>{figure_width}}  {words}".rstrip()
        for name, figure, words in rows
    ]
    lines.append(
        "Nothing was started. Memory may be off by a quarter:"
        " what is said to fit has that much room."
    )
    return "\n".join(lines)


def largest(command: TrainCommand, length: int) -> str:
    """The largest Qwen3 whose training fits on these GPUs, and the flags for it; the others are
    those of the run."""
    for size, sizes in QWEN3.items():
        name, tied = f"Qwen3-{size}", size != "8B"
        config = Qwen3Config(**sizes, num_key_value_heads=8, tie_word_embeddings=tied)
        with torch.device("meta"):
            shape = Shape(Qwen3ForCausalLM(config))
        most_trainers = command.gpus_here() - command.tensor_parallel
        for trainers in range(1, max(1, most_trainers) + 1):
            tried = replace(command, generators=0, trainers=trainers, gradient_checkpointing=True)
            if Needs(tried, shape, length).fits:
                return f"{name}: --model Qwen/{name} --trainers {trainers} --gradient-checkpointing"
    return "none of Qwen3-0.6B to 8B"


def longest(command: TrainCommand, model: PreTrainedModel) -> int:
    """The most tokens that a prompt and its completion can have. If there is a tokenizer to ask,
    ValueError for markers or budgets that this model cannot have."""
    folder = Path(command.model)
    if (folder / "config.json").exists() and not (folder / "tokenizer_config.json").exists():
        # The phrase of an interruption takes a few tokens more.
        return command.prompt_budget + command.thinking_budget[1] + command.answer_budget
    tokenizer = load_tokenizer(model_path(command.model))
    decoding = make_decoding(tokenizer, command, command.recipe.length_control)
    refuse_too_long(model, decoding)
    return decoding.longest


def memory_rows(command: TrainCommand, need: Needs, parameters: int) -> list[tuple[str, str, str]]:
    """Rows of a name, a figure and words: who works on which device, memory needed and available,
    room for files."""
    full, half = f"{need.sequences:,.0f} sequences of full length", f"{2 * need.sequences:,.0f}"
    checkpointing = ", gradient checkpointing" if command.gradient_checkpointing else ""
    notes = {
        "activations": f"{need.tokens:,} tokens{checkpointing}",
        "gathered by FSDP": "the fp32 head, the embedding, two layers",
        "keys and values": f"{full}, {half} of half; --slots {command.slots}",
        "process": "Python and its libraries" if need.trainers[0] == "cpu" else "CUDA itself",
    }
    rows = []
    generators = [",".join(names) for names in need.generators]
    for who, devices, parts in (
        ("a trainer", need.trainers, need.trainer),
        (f"a generator ({need.engine})", generators, need.generator),
    ):
        rows.append((who, "GiB", f"{len(devices)}: {' '.join(devices)}"))
        for name, size in parts.items():
            if size:
                rows.append((f"  {name}", GiB(size), notes.get(name, "")))
        rows.append(("  sum", GiB(sum(parts.values())), ""))

    # Devices that are alike share a row.
    rows.append(("what there is", "GiB", "planned"))
    for alike in dict.fromkeys(need.devices.values()):
        names = [name for name, device in need.devices.items() if device == alike]
        name = f"{names[0]} to {names[-1]}" if len(names) > 1 else names[0]
        planned, available, verdict = alike
        rows.append((f"  {name}", GiB(available), f"{GiB(planned)}: {verdict}"))
    if not need.fits:
        flags = (
            "--trainers --tokens-per-micro-batch --gradient-checkpointing"
            " --slots --generator-memory --tensor-parallel"
        )
        rows.append(("  lowered by", "", flags))

    if command.offload:
        waiting = GiB(16 * parameters)
        rows.append(("  CPU", "", f"{waiting}; parameters, gradients and moments, --offload"))

    # A parameter has 4 bytes on its way to generators and in the model, 12 in a checkpoint.
    buffer, checkpoint, keep = 4 * parameters, 12 * parameters, command.keep_checkpoints
    rows.append(("  /dev/shm", "", f"{GiB(buffer)}; the parameters on their way"))
    checkpoints = f"{keep} checkpoints of {GiB(checkpoint)}, one in the making, model"
    rows.append(("  disk", "", f"{GiB((keep + 1) * checkpoint + buffer)}; {checkpoints}"))
    return rows


def GiB(size: float) -> str:
    return f"{size / 2**30:,.1f}" if size >= 2**26 else f"{size / 2**30:.1g}"
