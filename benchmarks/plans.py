"""What `train.py --plan` says of real models: the table of docs/node.md, and the plan that it
shows.

    python benchmarks/plans.py
    python benchmarks/plans.py --traced    # the plan beside the memory that torch traces, as
                                           # tests/traced.py does
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT  # noqa: F401  (it puts the project on the path)

import train
from core.model import load_shapes
from core.settings import TrainCommand, parse
from machinery.memory import (
    FITS,
    QWEN3,
    DoesNotFit,
    Needs,
    Shape,
    choose,
    chosen_flags,
)
from tools.plan import longest

# What is in the config.json of real models; nothing of them is downloaded.
QWEN = dict(vocab_size=151_936, max_position_embeddings=40_960)
QWEN_3 = dict(model_type="qwen3", num_key_value_heads=8, head_dim=128, **QWEN)
MODELS = {
    f"Qwen/Qwen3-{size}": dict(tie_word_embeddings=size != "8B", **QWEN_3, **sizes)
    for size, sizes in QWEN3.items()
}
MODELS["Qwen/Qwen2.5-1.5B"] = dict(
    model_type="qwen2",
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    **QWEN,
)
MODELS["HuggingFaceTB/SmolLM2-135M"] = dict(
    model_type="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    vocab_size=49_152,
    max_position_embeddings=8192,
)
# Cards that people have, in GB, and what it takes on them, for completions of 1,024 tokens.
CARDS = [
    ("Qwen/Qwen3-0.6B", 24, ""),
    ("Qwen/Qwen3-1.7B", 24, "--offload"),
    ("Qwen/Qwen3-0.6B", 16, "--offload"),
    ("HuggingFaceTB/SmolLM2-135M", 8, ""),
    ("Qwen/Qwen3-4B", 48, "--offload"),
    ("Qwen/Qwen3-8B", 80, "--offload"),
]
OF_CARDS = "--plan --data gsm8k --defaults small --max-length 1024 --gpus 1"
ROWS = [
    ("Qwen/Qwen3-0.6B", "--gpus 1"),
    ("Qwen/Qwen3-0.6B", "--gpus 8"),
    ("Qwen/Qwen2.5-1.5B", "--gpus 1"),
    ("Qwen/Qwen2.5-1.5B", "--gpus 8"),
    ("Qwen/Qwen3-8B", "--gpus 8"),
    ("Qwen/Qwen3-8B", "--gpus 8 --trainers 4"),
    ("Qwen/Qwen3-8B", "--gpus 8 --trainers 4 --engine torch --slots 16"),
]
TRACED = [  # model, trainers, gradient checkpointing
    ("Qwen/Qwen3-0.6B", 1, True),
    ("Qwen/Qwen3-1.7B", 1, True),
    ("Qwen/Qwen3-4B", 2, True),
    ("Qwen/Qwen3-8B", 4, True),
    ("Qwen/Qwen3-0.6B", 1, False),
]
# The plan that docs/node.md shows.
SHOWN = "--plan --model Qwen/Qwen3-8B --data polaris --gpus 8 --gpu-memory 80"


def make_models(folder: Path) -> None:
    """Write folders that --model finds by the names of these models when it is called in `folder`.
    Each has a config.json and nothing else."""
    for name, config in MODELS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def chosen(folder: Path, name: str, flags: str) -> tuple[Needs, str]:
    """What a run of this model needs with these flags, and the flags that its memory chooses."""
    asked = parse([*flags.split(), "--model", str(folder / name)], TrainCommand)
    model = load_shapes(asked.model)
    shape, length = Shape(model), longest(asked, model)
    try:
        settings, _ = choose(asked, shape, length)
    except DoesNotFit as error:
        settings = error.settings
    need = Needs(settings, shape, length)
    return need, chosen_flags(asked, need)


def table(folder: Path) -> list[str]:
    """The lines of the table, in GiB, of the models in `folder`."""
    GiB = lambda *sizes: f"{sum(sizes) / 2**30:.1f}"
    of_trainer = "a trainer: weights, gradients, moments | activations | logits | all of it"
    of_generator = "a generator: weights | cache | sequences of full length, of half"
    lines = [
        f"| model | flags | {of_trainer} | {of_generator} | fits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, flags in ROWS:
        need, _ = chosen(folder, name, f"--plan --data polaris --gpu-memory 80 {flags}")
        trainer, generator, sequences = need.trainer, need.generator, need.sequences
        states = GiB(*(trainer[part] for part in ("parameters", "gradients", "moments")))
        lines.append(
            f"| {name.split('/')[1]} | `{flags}` | {states} | {GiB(trainer['activations'])} |"
            f" {GiB(trainer['logits'])} | {GiB(*trainer.values())} | {GiB(generator['weights'])} |"
            f" {GiB(generator['keys and values'])} | {sequences:.0f}, {2 * sequences:.0f} |"
            f" {'yes' if need.verdict == FITS else 'no'} |"
        )
    return lines


def of_cards(folder: Path, traced: dict[tuple, float]) -> list[str]:
    """The lines of the table of CARDS, in GiB. traced: bytes, of those that were traced."""
    lines = [
        "| model | GPU | flags | chosen for its memory | a trainer's step: traced | planned |"
        " both sides planned | of | fits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, memory, flags in CARDS:
        need, words = chosen(folder, name, f"{OF_CARDS} --gpu-memory {memory} {flags}")
        _, planned, available = need.fullest
        sizes = [sum(need.trainer.values()) - need.trainer["process"], planned, available]
        step, both, there = (f"{size / 2**30:.1f}" for size in sizes)
        found = traced.get((name, memory))
        shown = f"{found / 2**30:.1f}" if found else ""
        lines.append(
            f"| {name.split('/')[1]} | {memory} GB | {f'`{flags}`' if flags else 'none'} |"
            f" `{words}` | {shown} | {step} | {both} | {there} | {need.verdict} |"
        )
    return lines


def trace_of(need: Needs) -> list[str]:
    """The arguments of tests/traced.py for the step of a trainer of these needs."""
    settings, length = need.settings, need.length
    sequences = max(1, need.tokens // length)
    flags = ["--sequences", str(sequences), "--tokens", str(length)]
    flags += ["--trainers", str(len(need.trainers))]
    flags += ["--checkpointing"] * settings.gradient_checkpointing
    return flags + ["--offload"] * settings.offload


def trace(name: str, flags: list[str]) -> dict[str, float]:
    """What tests/traced.py finds of this model with these flags: bytes traced and planned."""
    command = [sys.executable, ROOT / "tests" / "traced.py", json.dumps(MODELS[name]), *flags]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'pretended'}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return json.loads(subprocess.check_output(command, env=environment))


def traced() -> list[str]:
    """The lines of a table: the peak of a step beside the plan, without the process, in GiB."""
    lines = [
        "| model | trainers | gradient checkpointing | traced | planned |",
        "|---|---|---|---|---|",
    ]
    for name, trainers, checkpointing in TRACED:
        flags = ["--trainers", str(trainers), *["--checkpointing"] * checkpointing]
        found = trace(name, flags)
        how = "yes" if checkpointing else "no"
        sizes = [f"{found[kind] / 2**30:.1f}" for kind in ("traced", "planned")]
        lines.append(f"| {name.split('/')[1]} | {trainers} | {how} | {sizes[0]} | {sizes[1]} |")
        print(lines[-1], file=sys.stderr)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traced", action="store_true")
    is_traced = parser.parse_args().traced
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_models(Path(folder))
        if is_traced:
            found = {}
            for name, memory, flags in CARDS:
                need, _ = chosen(Path(folder), name, f"{OF_CARDS} --gpu-memory {memory} {flags}")
                found[name, memory] = trace(name, trace_of(need))["traced"]
            print(*of_cards(Path(folder), found), "", *traced(), sep="\n")
            return
        print(*table(Path(folder)), "", sep="\n")
        train.main(parse(SHOWN.split(), TrainCommand))


if __name__ == "__main__":
    main()
