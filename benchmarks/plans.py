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
from tools.plan import QWEN3, Needs, Shape, longest

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
        arguments = f"--plan --data polaris --gpu-memory 80 {flags}".split()
        command = parse([*arguments, "--model", str(folder / name)], TrainCommand)
        model = load_shapes(command.model)
        need = Needs(command, Shape(model), longest(command, model))
        trainer, generator, sequences = need.trainer, need.generator, need.sequences
        states = GiB(*(trainer[part] for part in ("parameters", "gradients", "moments")))
        lines.append(
            f"| {name.split('/')[1]} | `{flags}` | {states} | {GiB(trainer['activations'])} |"
            f" {GiB(trainer['logits'])} | {GiB(*trainer.values())} | {GiB(generator['weights'])} |"
            f" {GiB(generator['keys and values'])} | {sequences:.0f}, {2 * sequences:.0f} |"
            f" {'yes' if need.fits else 'no'} |"
        )
    return lines


def traced() -> list[str]:
    """The lines of a table: the peak of a step beside the plan, without the process, in GiB."""
    lines = [
        "| model | trainers | gradient checkpointing | traced | planned |",
        "|---|---|---|---|---|",
    ]
    for name, trainers, checkpointing in TRACED:
        config = json.dumps(MODELS[name])
        command = [ROOT / "tests" / "traced.py", config, "--trainers", str(trainers)]
        if checkpointing:
            command.append("--checkpointing")
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'pretended'}"}
        found = json.loads(subprocess.check_output([sys.executable, *command], env=environment))
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
    if parser.parse_args().traced:
        print(*traced(), sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_models(Path(folder))
        print(*table(Path(folder)), "", sep="\n")
        train.main(parse(SHOWN.split(), TrainCommand))


if __name__ == "__main__":
    main()
