"""What a run would take, before anything is started or written: `python train.py --plan`.

All of it is arithmetic on the settings and the model's config.json. docs/measured.md compares it
with measurements on CPUs. If the plan says that something fits, a quarter of the memory is to
spare.
"""

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
from core.settings import TrainCommand
from core.vllm_engine import CPU_CACHE, UNMEASURED
from machinery.compute import head_size
from machinery.trainer import layers_and_rest

MARGIN = 1.25  # how far the arithmetic may be off
PROCESS = 0.5 * 2**30  # bytes of Python and its libraries; on a GPU of CUDA's context
FRAGMENTS = (
    0.3 * 2**30
)  # the most bytes that a CPU's allocator keeps between a trainer's tensors of many sizes

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
        config, head, layers = (
            model.config,
            model.get_output_embeddings().weight,
            layers_and_rest(model)[0],
        )
        get = lambda name: getattr(config, name, None)
        count = lambda module: sum(parameter.numel() for parameter in module.parameters())
        self.parameters, self.layers = count(model), len(layers)
        self.layer, self.table = (
            max(map(count, layers)),
            head.numel(),
        )  # parameters of the largest layer; of the head
        self.tied = head is model.get_input_embeddings().weight  # embedding and head are one
        self.heads, self.vocabulary, self.hidden = (
            config.num_attention_heads,
            config.vocab_size,
            config.hidden_size,
        )
        self.query = self.heads * head_size(model)  # width of all heads' queries
        self.cached = (
            2 * (get("num_key_value_heads") or self.heads) * head_size(model)
        )  # width of keys and values
        norms = any(name.endswith("q_norm.weight") for name, _ in layers[0].named_parameters())
        self.normed = norms * (
            self.query + self.cached // 2
        )  # width of queries and keys, if each head has a norm
        if get("kv_lora_rank"):  # or the width of what they are computed from
            self.cached = config.kv_lora_rank + config.qk_rope_head_dim
        # Width inside the feed-forward part; in a mixture, of the experts that a token is sent to.
        experts = (get("num_experts_per_tok") or 0) * (get("moe_intermediate_size") or 0)
        self.mlp = max(get("intermediate_size") or 4 * self.hidden, experts)


def trainer_bytes(
    shape: Shape,
    ranks: int,
    tokens: int,
    length: int,
    dtype: torch.dtype,
    device: str,
    checkpointing: bool,
) -> dict[str, float]:
    """Bytes of each rank of the trainer at its peak, in the backward, by cause. tokens: of a
    micro-batch, in sequences of `length` tokens. The fp32 head and embedding are gathered while in
    use, and so is the head's gradient."""
    width, kind = dtype.itemsize, torch.device(device).type
    uses_fsdp, tables = ranks > 1 or dtype != torch.float32, 2 if shape.tied else 3
    one_layer = (
        tokens * width * (8 * shape.hidden + 4 * shape.query + 3 * shape.normed + 4 * shape.mlp)
    )
    if kind == "cpu":  # the attention there makes scores of all pairs of positions
        one_layer += tokens * width * shape.heads * length
    kept = (
        tokens * width * shape.hidden if checkpointing else one_layer
    )  # of each layer, for the backward
    logits = (
        3 * 4 * min(tokens, loss.CHUNK) * shape.vocabulary
    )  # of a chunk: logits, softmax, gradient
    again = (
        checkpointing * one_layer
    )  # on a GPU a layer that is computed again takes the room that logits have left
    activations = shape.layers * kept + (again if kind == "cpu" else max(0, again - logits))
    fragments = min(FRAGMENTS, activations + 8 * shape.parameters / ranks) if kind == "cpu" else 0
    return {
        "parameters": 4 * shape.parameters / ranks,
        "gradients": 4 * shape.parameters / ranks,
        "moments": 8 * shape.parameters / ranks,
        "gathered by FSDP": uses_fsdp * (2 * width * shape.layer + 4 * tables * shape.table),
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
    """Bytes of a generator, on all its devices together, by cause. slots: sequences at once, of
    `length` tokens, with prompts of `prompts` tokens; share: the bytes that vLLM may take, whose
    rest is its cache."""
    width, fp32_head = dtype.itemsize, 4 * shape.table if dtype.itemsize < 4 else 0
    token_bytes = shape.layers * shape.cached * width  # in the cache
    parts = {"weights": shape.parameters * width + fp32_head, "process": PROCESS}
    if engine == "vllm":
        step_tokens = max(8192, length) + slots  # of its largest step
        parts["in passing"] = step_tokens * 2 * shape.mlp * width + 12 * slots * shape.vocabulary
        parts["in passing"] += UNMEASURED * shape.table - fp32_head
        return parts | {
            "keys and values": max(0.0, share + PROCESS - sum(parts.values()))
        }  # CUDA is not in the share
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
        shared = bool({*first} & {*self.trainers})
        settings = engine_settings(
            replace(command, engine="torch"), first, command.model, None, shared
        )
        elsewhere = (
            command.gpus and command.engine != "torch"
        )  # another machine is assumed to have vLLM
        self.engine = "vllm" if elsewhere else choose_engine(command.engine, first[0])
        share = CPU_CACHE if first[0] == "cpu" else settings.memory * available * len(first)
        checkpointing = command.gradient_checkpointing
        of_a_rank = (
            -(-command.groups_per_step * command.completions_per_prompt // len(self.trainers))
            * length
        )
        self.tokens = max(
            length, min(command.tokens_per_micro_batch, of_a_rank)
        )  # of the largest micro-batch
        self.trainer = trainer_bytes(
            shape, len(self.trainers), self.tokens, length, dtype, last, checkpointing
        )
        self.generator = generator_bytes(
            shape, self.engine, command.slots, length, command.prompt_budget, dtype, share
        )
        cache_of_a_sequence = shape.layers * shape.cached * dtype.itemsize * length
        self.sequences = (
            self.generator["keys and values"] / cache_of_a_sequence
        )  # of full length, in a generator
        self.devices: dict[
            str, tuple[float, float, str]
        ] = {}  # planned, available, whether it fits
        for device in dict.fromkeys([*sum(self.generators, ()), *self.trainers]):
            trains = self.trainers.count(device) * sum(self.trainer.values())
            samples = (
                sum(names.count(device) for names in self.generators)
                * sum(self.generator.values())
                / len(first)
            )
            at_most = (
                MARGIN * trains + (1 if self.engine == "vllm" else MARGIN) * samples
            )  # vLLM keeps to its share
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
    if command.gpu_memory is None and not torch.cuda.is_available():
        raise ValueError("--gpus wants --gpu-memory too: there is no GPU here to ask")
    return (
        command.gpu_memory * 1e9
        if command.gpu_memory
        else torch.cuda.get_device_properties(0).total_memory
    )


def plan(command: TrainCommand) -> str:
    """The text of the plan. ValueError, in one sentence, for settings that cannot be."""
    model = load_shapes(command.model)
    shape, length = Shape(model), longest(command, model)
    need = Needs(command, shape, length)
    refuse_split(need.engine, command.tensor_parallel, shape.heads)
    size = f"{command.model}: {shape.parameters:,} parameters"
    model_row = ("model", "", f"{size}; a prompt and its completion have at most {length:,} tokens")
    rows = [model_row, *memory_rows(command, need, shape.parameters)]
    rows += [("largest that fits", "", largest(command, length))] if command.gpus_here() else []
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [
        f"{name:{first}}  {figure:>{second}}  {words}".rstrip() for name, figure, words in rows
    ]
    last = "Nothing was started. Memory may be off by a quarter: what is said to fit has that much room."
    return "\n".join([*lines, last])


def largest(command: TrainCommand, length: int) -> str:
    """The largest Qwen3 whose training fits on these GPUs, and the flags for it; the others are
    those of the run."""
    for size, sizes in QWEN3.items():
        with torch.device("meta"):
            model = Qwen3ForCausalLM(
                Qwen3Config(**sizes, num_key_value_heads=8, tie_word_embeddings=size != "8B")
            )
        for trainers in range(1, max(2, command.gpus_here() - command.tensor_parallel + 1)):
            tried = replace(command, generators=0, trainers=trainers, gradient_checkpointing=True)
            if Needs(tried, Shape(model), length).fits:
                return f"Qwen3-{size}: --model Qwen/Qwen3-{size} --trainers {trainers} --gradient-checkpointing"
    return "none of Qwen3-0.6B to 8B"


def longest(command: TrainCommand, model: PreTrainedModel) -> int:
    """The most tokens that a prompt and its completion can have. If there is a tokenizer to ask,
    ValueError for markers or budgets that this model cannot have."""
    folder = Path(command.model)
    if (folder / "config.json").exists() and not (folder / "tokenizer_config.json").exists():
        return (
            command.prompt_budget + command.thinking_budget[1] + command.answer_budget
        )  # and a few for the phrase
    decoding = make_decoding(
        load_tokenizer(model_path(command.model)), command, command.recipe.length_control
    )
    refuse_too_long(model, decoding)
    return decoding.longest


def memory_rows(command: TrainCommand, need: Needs, parameters: int) -> list[tuple[str, str, str]]:
    """Rows of a name, a figure and words: who works on which device, memory needed and available,
    room for files."""
    notes = {
        "activations": f"{need.tokens:,} tokens"
        + ", gradient checkpointing" * command.gradient_checkpointing,
        "gathered by FSDP": "the fp32 head, the embedding, two layers",
        "keys and values": f"{need.sequences:,.0f} sequences of full length, {2 * need.sequences:,.0f} of half;"
        f" --slots {command.slots}",
        "process": "Python and its libraries" if need.trainers[0] == "cpu" else "CUDA itself",
    }
    rows, generators = [], [",".join(names) for names in need.generators]
    for who, devices, parts in (
        ("a trainer", need.trainers, need.trainer), (f"a generator ({need.engine})", generators, need.generator)
    ):  # fmt: skip
        rows.append((who, "GiB", f"{len(devices)}: {' '.join(devices)}"))
        rows += [
            (f"  {name}", GiB(size), notes.get(name, "")) for name, size in parts.items() if size
        ]
        rows.append(("  sum", GiB(sum(parts.values())), ""))
    rows.append(("what there is", "GiB", "planned"))
    for planned, available, verdict in dict.fromkeys(need.devices.values()):
        alike = [
            name for name, device in need.devices.items() if device == (planned, available, verdict)
        ]
        name = f"  {alike[0]}" + (f" to {alike[-1]}" if alike[1:] else "")
        rows.append((name, GiB(available), f"{GiB(planned)}: {verdict}"))
    if not need.fits:
        flags = "--trainers --tokens-per-micro-batch --gradient-checkpointing"
        rows.append(("  lowered by", "", f"{flags} --slots --generator-memory --tensor-parallel"))
    buffer, checkpoint, keep = 4 * parameters, 12 * parameters, command.keep_checkpoints
    checkpoints = f"{keep} checkpoints of {GiB(checkpoint)}, one in the making, model"
    rows.append(("  /dev/shm", "", f"{GiB(buffer)}; the parameters on their way"))
    return [*rows, ("  disk", "", f"{GiB((keep + 1) * checkpoint + buffer)}; {checkpoints}")]


def GiB(size: float) -> str:
    return f"{size / 2**30:,.1f}" if size >= 2**26 else f"{size / 2**30:.1g}"
