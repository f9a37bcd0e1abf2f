"""Every setting with its meaning, type and default; how flags become settings; which settings are
refused.

The value of a setting comes from the first of these that has one (`starting_values`):

    1. its flag
    2. a run: with --resume RUN all that it has; of a model that generate.py samples, OF_ITS_RUN
    3. the recipe that --recipe or --leave-out names: the parts in which it is not ScaleRL
    4. the preset of --defaults, or the one that suits --data. A GPU changes it
    5. the field in this file or in loss.Recipe
"""

import importlib.util
import json
import math
import os
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch

import loss
from core.screen import say, warn
from curve.flags import fill, flag, option, read_flags
from data.load import Source, load_data, parse_spec
from loss import Recipe

LONGEST_FOLDER = 70  # bytes: the path of a socket has 107, of which Python's names take 32
ROOT = Path(__file__).resolve().parent.parent  # the folder of the scripts and of the shipped model


# What --defaults sets. Else a setting has the default of its field: `toy`, which suits the
# arithmetic task on two CPU cores, has no others. `paper` is what the paper trained with (sec. 2,
# A.3). It does not say steps, clip_gradient, slots, tokens_per_micro_batch, gradient_checkpointing
# and verifiers: these are ours. `small` is for models of 1M to 600M parameters on one device
# (docs/data.md): all budgets fit 2,048 positions. `short` is for such models if they answer in a
# few words, without </think> (docs/real_model.md).
PRESETS = {
    "auto": {},
    "toy": {},
    "paper": dict(
        prompt_budget=loss.PROMPT_BUDGET,
        thinking_budget=loss.THINKING_BUDGET,
        answer_budget=loss.ANSWER_BUDGET,
        slots=256,
        verifiers=8,
        steps=1000,
        train_prompts=None,
        prompts_per_step=48,
        learning_rate=5e-7,
        warmup_steps=100,
        clip_gradient=1.0,
        validation_every=100,
        validation_problems=1000,
        tokens_per_micro_batch=32_768,
        gradient_checkpointing=True,
    ),
    "small": dict(
        prompt_budget=512,
        thinking_budget=(768, 1024),
        answer_budget=256,
        slots=128,
        verifiers=2,
        steps=400,
        train_prompts=None,
        prompts_per_step=16,
        learning_rate=None,
        clip_gradient=1.0,
        validation_every=20,
        validation_problems=64,
    ),
    "short": dict(
        prompt_budget=192,
        thinking_budget=(24, 24),
        answer_budget=8,
        length_control="penalty",
        asynchrony="pipeline-2",
        slots=96,
        steps=60,
        prompts_per_step=16,
        learning_rate=None,
        warmup_steps=5,
        clip_gradient=1.0,
        validation_every=6,
        validation_samples=2,
        keep_checkpoints=1,
    ),
}


@dataclass(frozen=True)
class Sampling:
    """What train.py and generate.py have in common: the model, the data, how completions are
    sampled and judged."""

    model: str = option("data/arithmetic_base", "folder or hub name of a transformers causal LM")
    data: tuple[str, ...] = option(
        ("arithmetic",), "tasks, data sets by name, files; with weights: polaris:3 deepcoder:1"
    )
    defaults: str = option(
        "auto",
        "For flags not given, as `--defaults paper --help` shows; auto: toy for arithmetic, short"
        " for gym, else paper.",
        names=lambda: PRESETS,
    )
    seed: int = option(
        0,
        "of prompt order, thinking budgets and sampling; only ppo-K and pipeline-0 repeat"
        " themselves exactly",
        least=0,
    )

    prompt_budget: int = option(16, "tokens, chat template included")
    thinking_budget: tuple[int, int] = option(
        (54, 58),
        "sampled tokens until thinking is interrupted, drawn from this range",
    )
    answer_budget: int = option(
        9,
        "sampled tokens after </think> or the interruption",
    )
    end_of_thinking: str = option("</think>", "one token of the model")
    interruption_phrase: str = option(
        loss.INTERRUPTION_PHRASE, "forced when thinking reaches its budget"
    )
    instruction: str | None = option(
        None, "said after each problem of a file; by default in mathematics: box the answer"
    )
    system: str | None = option(
        None, "a system prompt, before the user's turn; '' leaves out that of the data"
    )
    thinking: bool = option(True, "enable_thinking, for the chat template")

    engine: Literal["auto", "torch", "vllm"] = option(
        "auto", "auto: vLLM if it is installed and there is a GPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "of the trunk; auto: float32 on a CPU, bfloat16 on a GPU, or float16 if it has no bfloat16",
    )
    slots: int | None = option(
        512,
        "sequences that a generator decodes at once; on a GPU fewer, if they do not fit",
    )
    generator_memory: float | None = option(
        None, "share of a GPU that vLLM takes; by default what is free, .9 at most"
    )
    vllm_options: str = option(
        "{}", """more of vLLM's EngineArgs, in JSON: {"enforce_eager": true} compiles nothing"""
    )
    threads: int = option(
        0,
        "CPU threads of each process; 0: the cores, shared evenly by those that compute at once"
        " (with more, all become far slower)",
        least=0,
    )
    verifiers: int = option(1, "processes that judge completions")
    verifier_time_limit: float = option(
        30.0,
        "seconds of CPU time for one completion, or four times as many of the clock; then its"
        " verifier is killed and replaced",
    )
    verifier_memory: float = option(4.0, "GiB that a verifier may take")

    @property
    def verifier_limits(self) -> tuple[int, float, float]:
        """What a VerifierPool is made of: verifiers, seconds, GiB."""
        return self.verifiers, self.verifier_time_limit, self.verifier_memory


@dataclass(frozen=True)
class Settings(Sampling):
    """A training run. The defaults suit the arithmetic task on two CPU cores."""

    recipe: Recipe = Recipe()
    name: str | None = option(
        None,
        "the run's folder is runs/NAME, or NAME if it begins with a /, as on another disk; by"
        " default recipe, changed parts, seed, and a number",
    )
    resume: Path | None = option(
        None,
        "folder of a run to go on with; --model and --data may have other paths, and a flag that"
        " would make it another run is refused",
    )
    from_step: int | None = option(
        None, "of the checkpoint to resume from, later ones are removed; None: the newest", least=0
    )

    steps: int = option(160, "optimizer steps")
    train_prompts: int | None = option(4000, "of each source, visited in epochs; None: all")
    prompts_per_step: int = option(32, "groups in a batch")
    completions_per_prompt: int = option(16, "size of a group", least=2)
    learning_rate: float | None = option(2e-4, "None: .075 / sqrt(parameters)")
    warmup_steps: int = option(10, "linear", least=0)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = option(1e-15, "tiny, so that small gradients are not swallowed (A.3)")
    weight_decay: float = option(0.01, least=0)
    clip_gradient: float = option(0.3, "norm")

    validation_every: int = option(8, "steps")
    validation_problems: int = option(128, "held out, the same each time")
    validation_samples: int = option(16, "completions of each: the pass rate is mean@this")
    stop_when_gain_below: float = option(
        0.0,
        "end when twice the compute would gain less pass rate, by its forecast; 0: never",
        least=0,
    )
    checkpoint_every: int = option(20, "steps; also at the end, and on a signal")
    keep_checkpoints: int = option(2, "the newest, and the one of the best validation")
    track: Literal["tensorboard", "wandb", "trackio"] | None = option(
        None, "a tracker, if installed, gets what the log gets"
    )
    rollouts_kept: int = option(
        2,
        "groups of every n-th step, for tools/view.py, and 6 problems of a validation, or more;"
        " 0: none",
        least=0,
    )

    generators: int = option(
        0,
        "processes that sample, each on a GPU; 0: one, or all GPUs left by trainers",
        least=0,
    )
    trainers: int = option(
        0,
        "processes that split the model by FSDP, each on a GPU; 0: one, or a fifth of the GPUs",
        least=0,
    )
    one_process: bool = option(
        False,
        "generator and verifiers work in the trainer's process, by turns, with --asynchrony ppo-1:"
        " breakpoint() works anywhere",
    )
    tokens_per_micro_batch: int | None = option(
        4096,
        "in a forward, padding included; on a GPU 32768, or fewer if they do not fit",
    )
    share_prompts: bool = option(
        True, "the trainer computes a prompt once in a micro-batch that holds some sequences"
    )
    gradient_checkpointing: bool | None = option(
        False,
        "layers are computed again in the backward: less memory; on a GPU only if it is needed",
    )
    lora_rank: int = option(
        0,
        "train adapters of this rank on the linear layers, and nothing else: less memory; a rate"
        " that is not given is 10 times as high, with the preset toy 2.5; 0: all parameters",
        least=0,
    )
    wait_timeout: float = option(
        600.0, "seconds without a word until a generator is replaced, or a rank ends the run"
    )
    max_restarts: int = option(3, "generators replaced in a run until it gives up", least=0)

    @property
    def groups_per_step(self) -> int:
        """Groups in a batch, with the recipe's factor."""
        return round(self.prompts_per_step * self.recipe.batch_factor)


@dataclass(frozen=True)
class GenerateCommand(Sampling):
    """Print completions of a model, or its pass rate on problems that it was not trained on."""

    prompt: str | None = option(None, "print completions of this")
    evaluate: bool = option(
        False, "print mean@samples and pass@k, with 95 % intervals over problems"
    )
    problems: int = option(128, "the most of each data set")
    samples: int | None = option(None, "completions of each; 16 with --evaluate, 1 with --prompt")
    temperature: float = option(
        1.0, "of sampling, 1 as in training; 0 takes the likeliest token", least=0
    )
    length_control: loss.LengthControl = option("interruption", "penalty: nothing is interrupted")
    log: Path | None = option(
        None,
        "a JSONL file that figures are added to; of a checkpoint with its step and compute, which"
        " are 0 if no run has made the model; LOG.problems.jsonl gets those of each problem",
    )


# On a GPU a preset has none of these, and a run tries what fits (machinery/trainer.py).
BY_MEMORY = ("slots", "gradient_checkpointing", "tokens_per_micro_batch")

# A resumed run may change these: when it ends, how often it writes, devices and what they hold,
# patience, where the model is (its checksum decides), and --least-prompts, if it has run out of
# prompts.
MAY_CHANGE = set(
    """model resume from_step steps validation_every checkpoint_every keep_checkpoints track engine
    generators trainers one_process slots generator_memory vllm_options
    tokens_per_micro_batch gradient_checkpointing share_prompts threads verifiers wait_timeout
    max_restarts rollouts_kept least_prompts stop_when_gain_below""".split()
)

# Settings that runs of before have in their config.json.
GONE = {"offload", "tensor_parallel", "max_length"}

# generate.py takes these from the run that made its model.
OF_ITS_RUN = """data defaults prompt_budget thinking_budget answer_budget length_control
    end_of_thinking interruption_phrase thinking instruction system slots verifiers
    verifier_time_limit verifier_memory""".split()


# --- devices --------------------------------------------------------------------------------------


def devices_here(settings: Settings) -> tuple[list[str], list[str]]:
    """The device of each generator and of each trainer on this machine. ValueError if it has too
    few GPUs.

    Without a GPU all are CPU processes. One GPU does both, and --one-process uses one only. Of
    several, generators have the first and trainers the last; one in five trains by default, as in
    the paper.
    """
    gpus, generators, trainers = torch.cuda.device_count(), settings.generators, settings.trainers
    if settings.one_process:
        gpus = min(gpus, 1)
    if gpus == 0:
        return ["cpu"] * (generators or 1), ["cpu"] * (trainers or 1)
    if gpus == 1 and generators <= 1 and trainers <= 1:
        return ["cuda:0"], ["cuda:0"]
    trainers = trainers or max(1, min(gpus // 5, gpus - generators))
    generators = generators or max(1, gpus - trainers)
    wanted = generators + trainers
    refuse(
        wanted > gpus,
        f"--generators {generators} and --trainers {trainers} want {wanted} GPUs; there are {gpus}"
        " (CUDA_VISIBLE_DEVICES)",
    )
    names = [f"cuda:{i}" for i in range(gpus)]
    return names[:generators], names[-trainers:]


def cpu_threads(settings: Sampling) -> int:
    """CPU threads of a process: --threads, or the cores divided by the processes that compute at
    once. With PPO-off-policy-k and PipelineRL-0 generators and trainers take turns."""
    computing = [1]
    if isinstance(settings, Settings):
        computing = [*map(len, devices_here(settings))]
        kind, k = loss.parse_asynchrony(settings.recipe.asynchrony)
        if kind == "ppo" or k == 0:
            computing = [max(computing)]
    return settings.threads or max(1, cores_here() // sum(computing))


QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container on Linux: "MICROSECONDS PERIOD"


def cores_here() -> int:
    """Cores that this process may use, by its affinity and by the quota of its container."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count()
    cores = len(os.sched_getaffinity(0))
    most, period = QUOTA.read_text().split() if QUOTA.exists() else ("max", "")
    return cores if most == "max" else min(cores, int(most) // int(period))


def trunk_dtype(settings: Sampling, device: str) -> torch.dtype:
    """The dtype that the trunk of the model computes in on this device."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    if device == "cpu":
        return torch.float32
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bf16 else torch.float16


# --- from the command line ------------------------------------------------------------------------


def parse(arguments: list[str], kind: type = Settings, description: str | None = None):
    """The settings, of type `kind`, that the flags say. `--help` prints the help and exits.
    ValueError, in one sentence, for flags and values that are impossible."""
    settings = read_flags(kind, arguments, starting_values, description)
    if kind is Settings and settings.resume:
        settings = resumed(read_settings(settings.resume), settings)
    refuse_impossible(settings)
    return settings


def starting_values(chosen: Sampling) -> dict:
    """The values that settings have without their flags, by name: numbers 2 to 4 of the list at the
    top of this file. Those of the recipe are among them. chosen: what the flags say, with the
    defaults of the fields. ValueError for --defaults that a run overrides."""
    is_run = isinstance(chosen, Settings)
    run = chosen.resume if is_run else run_of(chosen.model)
    if run:
        stored = with_recipe(read_settings(run))
        if is_run:
            return stored
        refuse(
            chosen.defaults not in ("auto", stored["defaults"]),
            f"--defaults {chosen.defaults} does nothing here: data, budgets and the like are those"
            f" of the run that made the model, {run}, unless their flags are given",
        )
        return {name: stored[name] for name in OF_ITS_RUN}

    defaults = chosen.defaults
    if defaults == "auto":
        tasks = {parse_spec(argument).task for argument in chosen.data}
        defaults = "toy" if tasks == {"arithmetic"} else "short" if tasks == {"gym"} else "paper"
    preset = PRESETS[defaults] | {"defaults": defaults}  # config.json says which
    by_memory = dict.fromkeys(BY_MEMORY if torch.cuda.device_count() else ())
    recipe = Recipe()
    if is_run:
        recipe, axis = loss.RECIPES[chosen.recipe.recipe], chosen.recipe.leave_out
        recipe = loss.leave_one_out(axis) if axis else recipe
    of_recipe = dict(vars(recipe).items() - vars(Recipe()).items())
    values = preset | by_memory | of_recipe  # and then the flags, in `read_flags`
    rate = values.get("learning_rate", Settings.learning_rate)
    if is_run and rate:
        values["learning_rate"] = float(f"{rate_factor(chosen.lora_rank, defaults) * rate:.6g}")
    return values


def rate_factor(lora_rank: int, defaults: str) -> float:
    """How many times as high a learning rate is that no flag gives: with adapters it is higher, and
    more so in a larger model, where the best rate of all parameters is far lower and that of
    adapters is not (docs/findings.md)."""
    if not lora_rank:
        return 1.0
    return 2.5 if defaults == "toy" else 10.0


def with_recipe(settings: Settings) -> dict:
    """All values by name, those of the recipe among them."""
    return vars(settings) | vars(settings.recipe)


def run_of(model: str) -> Path | None:
    """The folder of the run that made a model, which is RUN/model or RUN/checkpoints/STEP/model.
    None: no run has made it."""
    path = Path(os.path.abspath(model_path(model)))  # without "..", and links stay as they are
    for folder in path.parents[:3] if path.is_dir() else ():
        if (folder / "log.jsonl").exists() and (folder / "config.json").exists():
            return folder
    return None


def read_settings(folder: Path) -> Settings:
    """The settings of the run in this folder. ValueError if there is none."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        values = stored | stored["recipe"]
        if "no_positive_resampling" in values:  # its name in runs of before
            values["positive_resampling"] = not values.pop("no_positive_resampling")
        for name in GONE & values.keys():
            warn(name, f"{folder}: {name} is no setting any more, and is left out")
            del values[name]
        settings = fill(Settings, values)
        unknown = values.keys() - with_recipe(settings).keys() - {"versions"}
        refuse(unknown, f"there is no setting {', '.join(unknown)}")
        return settings
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder}: the folder holds no run of this program ({error!r})") from None


# --- model and data -------------------------------------------------------------------------------


def model_path(name: str) -> str:
    """Where --model NAME is: a folder, seen from the working directory or from the scripts, or else
    a name on the hub. ValueError for what is neither, and for the folder of a run or of a
    checkpoint, which holds models."""
    path = next((path for path in (Path(name), ROOT / name) if path.is_dir()), Path(name))
    no_name = name.count("/") > 1  # of the hub
    refuse(no_name and not path.is_dir(), f"--model {name}: there is no such folder")
    other = (path / "model").is_dir() and not [*path.glob("tokenizer*")]
    refuse(other, f"--model {name}: did you mean {path}/model?")
    return str(path)


def read_sources(settings: Settings) -> list[Source]:
    """The problems of a run, by source. ValueError if they cannot be read."""
    sources = load_data(
        settings.data, settings.train_prompts, settings.validation_problems, settings.instruction
    )
    say_notes(sources)
    return sources


def say_notes(sources: list[Source]) -> None:
    """Print what was guessed and left out."""
    for source in sources:
        for note in source.notes:
            say(f"{source.name}: {note}")


def refuse_few_problems(settings: Settings, sources: list[Source]) -> None:
    """ValueError if there are too few problems for a step, or for --least-prompts."""
    smallest = min(len(source.train) for source in sources)
    refuse(
        settings.recipe.least_prompts >= smallest,
        f"--least-prompts is {settings.recipe.least_prompts}, and a source has {smallest} to train"
        " on: with so many no solved prompt would ever be left out",
    )
    prompts = sum(len(source.train) for source in sources)
    refuse(
        settings.groups_per_step > prompts,
        f"a step takes {settings.groups_per_step} prompts, but there are {prompts} to train on:"
        f" --prompts-per-step {int(prompts / settings.recipe.batch_factor)} would take no more",
    )


# --- what is refused ------------------------------------------------------------------------------


def refuse(broken: object, sentence: str) -> None:
    """ValueError with this sentence if a rule is broken."""
    if broken:
        raise ValueError(sentence)


def refuse_impossible(settings: Sampling) -> None:
    """ValueError, naming the flag, for values that are impossible and for values that nothing would
    read: first of what all commands have, then of what only train.py has."""
    refuse_small_numbers(settings)
    low, high = settings.thinking_budget
    refuse(
        not 0 <= low <= high,
        f"--thinking-budget is a range LOW HIGH with 0 <= LOW <= HIGH, not {low} {high}",
    )
    refuse(
        (settings.generator_memory or 0) > 1,
        f"--generator-memory is a share, at most 1, not {settings.generator_memory}",
    )
    try:
        is_object = isinstance(json.loads(settings.vllm_options), dict)
    except ValueError:
        is_object = False
    refuse(not is_object, '--vllm-options is an object in JSON, such as {"enforce_eager": true}')
    if not isinstance(settings, Settings):
        return

    refuse_impossible_recipe(settings.recipe)
    refuse(
        not all(0 <= beta < 1 for beta in settings.adam_betas),
        f"--adam-betas are {settings.adam_betas}; each must be at least 0 and below 1",
    )
    refuse(
        not settings.groups_per_step,
        f"--batch-factor {settings.recipe.batch_factor} of --prompts-per-step"
        f" {settings.prompts_per_step} leaves no prompt for a step",
    )
    refuse(
        settings.one_process and (settings.trainers > 1 or settings.engine == "vllm"),
        "--one-process goes with --trainers 1 and --engine torch",
    )
    refuse(
        settings.track and not importlib.util.find_spec(settings.track),
        f"--track {settings.track}: it is not installed; `pip install {settings.track}` brings it",
    )
    on_cpus = "cpu" in devices_here(settings)[1] and not settings.one_process
    temporary = tempfile.gettempdir()
    refuse(
        on_cpus and len(os.fsencode(temporary)) > LONGEST_FOLDER,
        f"the sockets of processes are in TMPDIR, {temporary}, and their paths would be too long:"
        " TMPDIR=/tmp python train.py is short enough",
    )


def refuse_impossible_recipe(recipe: Recipe) -> None:
    """As `refuse_impossible`, of what only a recipe has."""
    refuse_small_numbers(recipe)
    loss.parse_asynchrony(recipe.asynchrony)
    refuse(
        recipe.leave_out and recipe.recipe != "scalerl",
        f"--leave-out takes an axis out of scalerl; it cannot go with --recipe {recipe.recipe}",
    )
    reads = loss.LOSSES[recipe.loss].constants
    constants = [each.constants for each in loss.LOSSES.values()]
    for name in sorted(set().union(*constants)):
        refuse(
            name not in reads and getattr(recipe, name) != getattr(Recipe, name),
            f"{flag(name)} does nothing with --loss {recipe.loss}, which reads"
            f" {' and '.join(map(flag, reads)) or 'no clip'}",
        )
    refuse(
        recipe.least_prompts and recipe.positive_resampling,
        "--least-prompts does nothing with --positive-resampling: no prompt is retired",
    )
    refuse(
        (recipe.eps_low or 0) >= 1,
        f"--eps-low is {recipe.eps_low}; it must be at least 0 and below 1",
    )


def refuse_small_numbers(part: Sampling | Recipe) -> None:
    """ValueError for a number below the `least` of its field: 1 for a whole number, above 0 for
    another, if the field does not say; and for one that is not finite."""
    for field in fields(part):
        value = getattr(part, field.name)
        if type(value) in (int, float):
            least = field.metadata.get("least", 1 if type(value) is int else None)
            enough, wanted = value > 0, "above 0"
            if least is not None:
                enough, wanted = value >= least, f"at least {least}"
            enough = enough and math.isfinite(value)
            refuse(not enough, f"{flag(field.name)} is {value}; it must be finite and {wanted}")


def not_in_checksum(data: tuple[str, ...]) -> list[tuple]:
    """What a checksum of the problems does not know of --data: weights, tasks, and the names of
    several curves."""
    specs = [*map(parse_spec, data)]
    names = [Path(spec.name).name if len(specs) > 1 else "" for spec in specs]
    return [(name, spec.weight, spec.options.get("task", "")) for name, spec in zip(names, specs)]


def resumed(before: Settings, now: Settings) -> Settings:
    """The settings that a resumed run goes on with. ValueError, naming the flags, if it would not
    be the same run."""
    # None: the rate follows from the model's size, and the run has found it.
    now = replace(now, learning_rate=now.learning_rate or before.learning_rate)
    old, new = (with_recipe(each) | {"data": not_in_checksum(each.data)} for each in (before, now))
    changed = [
        f"{flag(name)} (was {old[name]}, now {new[name]})"
        for name in old
        if old[name] != new[name] and name not in MAY_CHANGE
    ]
    refuse(
        changed, f"--resume goes on with the same run. These cannot change: {', '.join(changed)}"
    )
    return now
