"""STAND-IN for the settings, from train.py."""

import argparse
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

import loss
from machinery.flags import read_flags


@dataclass(frozen=True)
class Settings:
    """Train a language model with the ScaleRL recipe. The defaults suit the arithmetic task on two CPU cores."""

    recipe: tyro.conf.OmitArgPrefixes[loss.Recipe] = loss.Recipe()
    model: str = "data/arithmetic_base"  # folder or hub name of a transformers causal LM
    data: tuple[str, ...] = ("arithmetic",)  # tasks, data sets by name, files; with weights: polaris:3 deepcoder:1
    name: str | None = None  # the run's folder is runs/NAME; by default recipe, changed parts, seed, and a number
    resume: Path | None = None  # folder of a run to go on with; the other flags then change what may be changed
    seed: int = 0  # of prompt order, thinking budgets and sampling; only ppo-1 and pipeline-0 repeat themselves exactly

    # What the other flags start from. auto: for arithmetic what suits it (toy), for other --data the paper's settings.
    defaults: Literal["auto", "toy", "paper"] = "auto"
    steps: int = 160  # optimizer steps
    train_prompts: int | None = 4000  # distinct prompts of each source, visited in epochs; None: all there are
    prompts_per_step: int = 32  # groups in a batch
    completions_per_prompt: int = 16  # size of a group
    learning_rate: float = 2e-4  # constant after the warm-up
    warmup_steps: int = 10  # linear
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-15  # tiny, so that small gradients are not swallowed (A.3)
    weight_decay: float = 0.01
    clip_gradient: float = 0.3  # norm

    prompt_budget: int = 16  # tokens
    thinking_budget: tuple[int, int] = (54, 58)  # sampled tokens, drawn per completion from this range, ends included
    answer_budget: int = 9  # sampled tokens after </think> or the interruption; with thinking it makes L_max
    end_of_thinking: str = "</think>"  # one token of the model
    interruption_phrase: str = loss.INTERRUPTION_PHRASE  # forced when thinking reaches its budget
    thinking: bool = True  # what the chat template is told as enable_thinking

    validation_every: int = 8  # steps
    validation_problems: int = 128  # held out, the same each time
    validation_samples: int = 16  # completions of each: the pass rate is mean@this
    stop_when_gain_below: float = 0.0  # end when twice the compute surely buys less pass rate (95 %); 0: never

    checkpoint_every: int = 20  # steps; also at the end, on Ctrl-C and on SIGTERM
    keep_checkpoints: int = 2  # the newest

    engine: Literal["auto", "torch", "vllm"] = "auto"  # of the generators; auto: vLLM where there is one and a GPU
    tensor_parallel: int = 1  # devices of one generator, which vLLM splits the model over
    # One generator process each (or each --tensor-parallel in a row): cpu, cpu:2 (two processes), cuda:0, cuda:0-5,
    # cuda:6,7. auto: four fifths of the GPUs; one GPU does both; without a GPU, the CPU.
    generators: int = 0  # processes that sample
    trainers: int = 0  # processes that train
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the trunk; auto: bfloat16 on a GPU, float32 on a CPU
    slots: int = 512  # sequences that a generator decodes at once; 0: as many of full length as fit, at most 512
    generator_memory: float | None = None  # with --slots 0: share of its device; by default .9, or .4 beside a trainer
    tokens_per_micro_batch: int = 4096  # tokens in one forward and backward, padding included
    pack: bool = False  # sequences end to end instead of padded rows of similar lengths
    compile: bool = False  # the trainer's layers, by torch.compile: faster once it is done, which may take a minute
    gradient_checkpointing: bool = False  # layers keep their input only and are computed again in the backward
    threads: int = 0  # CPU threads of each process; 0: the cores, shared evenly
    verifiers: int = 1  # processes that judge completions
    verifier_time_limit: float = 30.0  # seconds for one completion; then its verifier is killed and replaced
    verifier_memory: float = 4.0  # GiB that a verifier may take
    wait_timeout: float = 600.0  # seconds without a word from a generator until it is killed and replaced
    max_restarts: int = 3  # generators replaced in a run until it gives up

    @property
    def prompts(self) -> int:
        """Groups in a batch, with the recipe's factor."""
        return round(self.prompts_per_step * self.recipe.batch_factor)


# For real models, what the paper trained with (sec. 2, A.3) ...
PAPER = {
    "prompts_per_step": 48,
    "learning_rate": 5e-7,
    "warmup_steps": 100,
    "prompt_budget": loss.PROMPT_BUDGET,
    "thinking_budget": loss.THINKING_BUDGET,
    "answer_budget": loss.ANSWER_BUDGET,
    "train_prompts": None,
    "validation_every": 100,
    "validation_problems": 1000,
    # ... and what it leaves open.
    "steps": 1000,
    "clip_gradient": 1.0,
    "slots": 0,
    "tokens_per_micro_batch": 16_384,
    "gradient_checkpointing": True,
    "verifiers": 8,
}


def parse(arguments: list[str]) -> Settings:
    """Settings from command-line flags. --recipe, --leave-out and --defaults (or --data, which decides them) set what
    the other flags then change; with --resume that is the run's own settings."""
    start = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    start.add_argument("--recipe", default="scalerl")
    start.add_argument("--leave-out", "--leave_out", default=None)
    start.add_argument("--resume", default=None)
    start.add_argument("--data", default=[], nargs="+")
    start.add_argument("--defaults", default="auto")
    chosen, _ = start.parse_known_args(arguments)
    if chosen.resume is not None:
        before = read_settings(Path(chosen.resume))
        settings = read_flags(Settings, arguments, before)
        refuse_changes(before, settings)
        return settings
    recipe = loss.RECIPES.get(chosen.recipe, loss.Recipe())  # tyro refuses an unknown name below
    if chosen.leave_out in loss.Axis.__args__:
        if chosen.recipe != "scalerl":
            raise ValueError(f"--leave-out takes an axis out of scalerl; it cannot go with --recipe {chosen.recipe}")
        recipe = loss.leave_one_out(chosen.leave_out)
    defaults = chosen.defaults
    if defaults == "auto":
        defaults = "paper" if {*chosen.data} - {"arithmetic"} else "toy"
    default = Settings(recipe=recipe, defaults=defaults, **(PAPER if defaults == "paper" else {}))
    settings = read_flags(Settings, arguments, default)
    return dataclasses.replace(settings, defaults=defaults)  # never auto, so that config.json says which


def read_settings(folder: Path) -> Settings:
    """The settings of the run in this folder. ValueError if there is none."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        recipe = loss.Recipe(**stored.pop("recipe"))
        stored.pop("versions")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
        known = {part.name for part in dataclasses.fields(Settings)}
        return Settings(recipe=recipe, **{name: value for name, value in values.items() if name in known})
    except OSError as error:
        raise ValueError(f"--resume {folder}: the folder holds no run ({error.strerror}: {error.filename})") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--resume {folder}: its config.json is not one of this program ({error})") from None


# What says where and how often, but not what is computed. All else is the run itself.
MAY_CHANGE = {
    "resume", "steps", "validation_every", "checkpoint_every", "keep_checkpoints", "engine", "tensor_parallel",
    "generators", "trainers", "slots", "generator_memory", "tokens_per_micro_batch", "pack",
    "gradient_checkpointing", "compile", "threads", "verifiers", "wait_timeout", "max_restarts", "stop_when_gain_below",
}  # fmt: skip


def refuse_changes(before: Settings, now: Settings) -> None:
    """ValueError, naming the flags, if a resumed run would not be the same run."""
    flat = lambda settings: {**vars(settings), **vars(settings.recipe), "recipe": settings.recipe.recipe}  # noqa: E731
    old, new = flat(before), flat(now)
    changed = [
        f"--{name.replace('_', '-')} (was {old[name]}, now {new[name]})"
        for name in old
        if old[name] != new[name] and name not in MAY_CHANGE
    ]
    if changed:
        raise ValueError(
            f"--resume goes on with the same run, in which these cannot change: {', '.join(changed)}; those that can:"
            f" {', '.join('--' + name.replace('_', '-') for name in sorted(MAY_CHANGE - {'resume'}))}"
        )


def check(settings: Settings) -> None:
    """ValueError, naming the flag, for values that cannot be."""
    loss.parse_asynchrony(settings.recipe.asynchrony)
    least = dict(
        steps=1, prompts_per_step=1, completions_per_prompt=2, train_prompts=1, warmup_steps=0, validation_every=1,
        validation_problems=1, validation_samples=1, slots=0, tokens_per_micro_batch=1, threads=0, tensor_parallel=1,
        checkpoint_every=1, keep_checkpoints=1, verifiers=1, max_restarts=0, stop_when_gain_below=0,
    )  # fmt: skip
    for name, minimum in least.items():
        if getattr(settings, name) is not None and getattr(settings, name) < minimum:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is {getattr(settings, name)}; it must be at least {minimum}")
    positive = ("learning_rate", "adam_eps", "clip_gradient", "wait_timeout", "verifier_time_limit", "verifier_memory")
    for name in positive:
        if not getattr(settings, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(settings, name)}; it must be above 0")
    if not 0 <= settings.thinking_budget[0] <= settings.thinking_budget[1]:
        raise ValueError(f"--thinking-budget is a range LOW HIGH with 0 <= LOW <= HIGH, not {settings.thinking_budget}")


def cpu_threads(settings: Settings) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return settings.threads or max(1, cores // 2)
