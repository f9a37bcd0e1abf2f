"""What a run would take, before anything is started or written: `python train.py --plan`.

All of it is arithmetic on the settings and the model's config.json (machinery/memory.py).
"""

from pathlib import Path

from transformers import PreTrainedModel

from core.decoding import make_decoding
from core.engine import refuse_split
from core.model import load_shapes, load_tokenizer, model_path, refuse_too_long
from core.settings import TrainCommand
from machinery.compute import time_left
from machinery.files import json_lines
from machinery.memory import (
    FITS,
    OFFLOADED,
    ON_ITS_WAY,
    QWEN3,
    TOO_MUCH,
    DoesNotFit,
    GiB,
    Needs,
    Shape,
    choose,
    chosen_flags,
    largest,
)
from tools.hours import kind_of, time_rows


def plan(command: TrainCommand) -> str:
    """The text of the plan. ValueError, in one sentence, for settings that cannot be."""
    if command.gpu_kind:
        kind_of(command.gpu_kind)
        if not command.gpus_here():
            raise ValueError("--gpu-kind is of a machine with GPUs: say how many by --gpus")
    model = load_shapes(command.model)
    shape, length = Shape(model), longest(command, model)
    asked = command
    try:
        command, reason = choose(asked, shape, length)
    except DoesNotFit as error:
        command, reason = error.settings, str(error)
    need = Needs(command, shape, length)
    refuse_split(need.engine, command.tensor_parallel, shape.heads)
    size = f"{command.model}: {shape.parameters:,} parameters"
    rows = [("model", "", f"{size}; a prompt and its completion have at most {length:,} tokens")]
    rows += memory_rows(command, need, shape.parameters)
    if reason:
        rows.append(("chosen" if need.verdict != TOO_MUCH else "nothing fits", "", reason))
    rows += time_rows(command, need, model, shape)
    if command.resume:
        rows += measured_rows(command)
    if command.gpus_here():
        rows.append(("largest that fits", "", largest_in_words(asked, length)))
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


def measured_rows(command: TrainCommand) -> list[tuple[str, str, str]]:
    """A row with the time that is left of the run that --resume names, if its log can say it."""
    path = command.resume / "log.jsonl"
    lines = [line for _, line in json_lines(path)] if path.exists() else []
    validations = [line for line in lines if line["kind"] == "validation"]
    steps = [line for line in lines if line["kind"] == "train"]
    if not (validations and steps):
        return []
    left = time_left(validations[0], steps[-1], command.steps)
    measured = f"{left}, as measured up to step {steps[-1]['step']}"
    return [("this run", "", measured)] if left else []


def largest_in_words(command: TrainCommand, length: int) -> str:
    """The largest Qwen3 that fits, and the flags for it; the others are those of the run."""
    found = largest(command, length)
    if found is None:
        return f"none of {', '.join(f'Qwen3-{size}' for size in reversed(QWEN3))}"
    name, need = found
    trainers = f"--trainers {need.settings.trainers}"
    return f"{name}: --model Qwen/{name} {trainers} {chosen_flags(command, need)}".rstrip()


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
        "gathered by FSDP": "the fp32 head and its gradient",
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
    if need.verdict != FITS:
        flags = (
            "--trainers --tokens-per-micro-batch --gradient-checkpointing"
            " --slots --generator-memory --tensor-parallel"
        )
        rows.append(("  lowered by", "", flags))

    if command.offload:
        waiting = GiB(OFFLOADED * parameters)
        rows.append(("  CPU", "", f"{waiting}; parameters, gradients and moments, --offload"))

    # A parameter has 4 bytes on its way to generators and in the model, 12 in a checkpoint.
    buffer, checkpoint = ON_ITS_WAY * parameters, 12 * parameters
    keep = command.keep_checkpoints
    rows.append(("  /dev/shm", "", f"{GiB(buffer)}; the parameters on their way"))
    checkpoints = f"{keep} checkpoints of {GiB(checkpoint)}, one in the making, model"
    rows.append(("  disk", "", f"{GiB((keep + 1) * checkpoint + buffer)}; {checkpoints}"))
    return rows
