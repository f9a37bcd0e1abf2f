"""Carry a run over to an engine that spans nodes: TRL, verl or prime-rl.

    python -m tools.export runs/NAME --to trl --out FOLDER     # goes on from the last checkpoint
    python -m tools.export runs/NAME --to verl --out FOLDER --from-the-start    # the same recipe,
                                                               # from the run's first model

FOLDER can be copied to any machine. It holds the model, the problems, the log so far, the engine's
configuration, a README.md with the commands, and thin shells at the engine's extension points
(tools/elsewhere/). They call copies of loss.py and data/, so that the arithmetic and the verdicts
stay ours. docs/elsewhere.md says which engine is for whom.
"""

import json
import re
import shutil
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Literal

from core.decoding import make_decoding
from core.model import ROOT, load_model, load_tokenizer, model_path
from core.settings import Settings, read_settings
from curve.flags import flag, option, read_flags, run_command
from data import Problem
from loss import most_off_policy
from machinery.checkpoints import checkpoint_of, read_state
from machinery.files import json_lines, whole_folder
from machinery.run import read_sources

TEMPLATES = ROOT / "tools" / "elsewhere"


@dataclass(frozen=True)
class Options:
    """What is carried over, and where to."""

    run: Path = option(help="the folder of a run")
    to: Literal["trl", "verl", "prime-rl"] = "trl"
    out: Path = option(Path("exported"), "a new folder")
    from_the_start: bool = option(
        False, "the run's recipe from its first model, not from its last checkpoint"
    )
    steps: int = option(
        0,
        "optimizer steps there; 0: those that the run has left, or as many again if it is finished",
    )


def warnings_of(engine: str, settings: Settings) -> list[str]:
    """A sentence for each part of this run that the engine does not carry over."""
    values = asdict(settings) | asdict(settings.recipe)
    tables = tomllib.loads((TEMPLATES / "not_carried.toml").read_text())
    return [
        f"{flag(part)} {values[part]}; there: {text}"
        for part, (carried, text) in (tables["all"] | tables[engine]).items()
        if not re.fullmatch(carried, str(values[part]))
    ]


def values_of(settings: Settings, steps: int, longest: int) -> dict[str, str]:
    """What the templates are filled with: all settings, and what engines count otherwise. longest:
    tokens of a prompt and its completion."""
    recipe = settings.recipe
    beta1, beta2 = settings.adam_betas
    age = most_off_policy(recipe.asynchrony)
    values = asdict(settings) | asdict(recipe)
    values |= {
        "steps": steps,
        "groups": settings.groups_per_step,
        "completions": settings.groups_per_step * settings.completions_per_prompt,
        "longest": longest,
        "longest_completion": longest - settings.prompt_budget,
        "micro_batch": max(settings.tokens_per_micro_batch, longest),
        "beta1": beta1,
        "beta2": beta2,
        "age": age,
        "versions": age + 1,
        "head_dtype": "float32" if recipe.fp32_logits else "model",
        "fp32_head": bool(recipe.fp32_logits),
    }
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
    }


def row_of(problem: Problem, system: str | None) -> dict:
    """A line of train.jsonl or validation.jsonl: the prompt, the problem as JSON, and both as verl
    reads them."""
    text = json.dumps(asdict(problem))
    messages = [{"role": "user", "content": problem.prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {
        "prompt": problem.prompt,
        "problem": text,
        "messages": messages,
        "data_source": "scalerl",
        "reward_model": {"ground_truth": text},
    }


def refuse_broken_weights(folder: Path) -> None:
    """ValueError if a model cannot be loaded, or if a weight is not finite."""
    model = load_model(str(folder))
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise ValueError(f"{folder}: {name} is not finite; move the checkpoint away")


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status 0; ValueError or OSError, in one sentence, if the run
    cannot be exported."""
    options = read_flags(Options, arguments, description=__doc__)
    if options.out.exists():
        raise ValueError(f"--out {options.out} exists; choose another folder, or move it away")
    if options.steps < 0:
        raise ValueError(f"--steps is {options.steps}; it must be at least 0")

    # The run: its settings, and the step and the model to go on from.
    settings = read_settings(options.run)
    checkpoint = None if options.from_the_start else checkpoint_of(options.run, None)
    if checkpoint:
        step, model = read_state(checkpoint)["step"], checkpoint / "model"
        refuse_broken_weights(model)
    else:
        step, model = 0, Path(model_path(settings.model))

    # What the templates are filled with.
    steps = options.steps or max(0, settings.steps - step) or settings.steps
    decoding = make_decoding(load_tokenizer(str(model)), settings, settings.recipe.length_control)
    warnings = warnings_of(options.to, settings)
    values = values_of(settings, steps, decoding.longest) | {
        "run": options.run,
        "step": step,
        "warnings": "\n".join(f"- {text}" for text in warnings) or "Nothing.",
    }
    sources = read_sources(settings)

    with whole_folder(options.out) as folder:
        # The run so far.
        shutil.copytree(model, folder / "model")
        shutil.copy(options.run / "config.json", folder)
        log = json_lines(options.run / "log.jsonl")
        (folder / "log.jsonl").write_text(
            "".join(text for text, line in log if line["step"] <= step)
        )

        # Our loss and our verdicts, with all that they import.
        for file in ("loss.py", "requirements.txt"):
            shutil.copy(ROOT / file, folder)
        no_code = shutil.ignore_patterns("__pycache__", "*_base", "examples")
        for package in ("core", "curve", "data", "machinery"):
            shutil.copytree(ROOT / package, folder / package, ignore=no_code)

        # The problems, and the shells of the engine with the values of this run.
        for part in ("train", "validation"):
            with open(folder / f"{part}.jsonl", "w") as file:
                for source in sources:
                    for problem in getattr(source, part):
                        file.write(json.dumps(row_of(problem, settings.system)) + "\n")
        for template in (TEMPLATES / "scalerl.py", *(TEMPLATES / options.to).glob("*.*")):
            (folder / template.name).write_text(Template(template.read_text()).substitute(values))

    for text in warnings:
        print(f"! {text}")
    print(f"{options.out}/README.md says what carries over, and how to start")
    return 0


if __name__ == "__main__":
    run_command(main)
