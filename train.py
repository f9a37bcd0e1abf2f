"""Train a language model with the ScaleRL recipe, and see its curve.

    python train.py                                            # the default task, on two CPU cores
    python train.py --recipe base --seed 1                     # another recipe of the study
    python train.py --leave-out fp32_logits                    # ScaleRL but for one axis
    python train.py --loss gspo --advantage-norm none          # any part on its own
    python train.py --generator-devices cuda:0-5 --trainer-devices cuda:6,7
    python train.py --resume runs/NAME                         # go on after a crash, a Ctrl-C or the end (--steps 300)
    python train.py --study loo --seeds 0 1 2 --jobs 2         # many runs, tables, figures (--study loo --help)

What happens, in the order of this file:

    problems (data/) -> prompts handed out to the generators (generate.py), at most k steps ahead
      -> groups of finished rollouts come back, are judged by their task (data/)
      -> a batch of groups gets advantages and token weights, and is trained on (loss.py)
      -> the new parameters go to the generators at once, which go on with what they have begun
      -> every few steps held-out problems are sampled with the parameters of that step alone
      -> at the end the sigmoid of the paper is fitted to those pass rates (fit_curve.py)

The trainer is this process; each generator is a process of its own, with two queues: Work goes, Reports come. One
that dies is replaced and given its work again; every wait ends when the other side is dead or silent. Every few steps
a checkpoint is written, whole or not at all, from which --resume goes on. With several trainer devices, each of the
others has a process too, which holds its shard of everything and makes the same calls (`Trainer`).
Version v of the parameters is what v optimizer steps have made; step s trains version s and makes s + 1.

Dimensions: P prompts in a batch, G completions per prompt, B sequences in a micro-batch, T tokens, N tokens.
"""

import argparse
import bisect
import contextlib
import dataclasses
import difflib
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_end
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.utils.checkpoint
import transformers
import tyro
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import fit_curve
import generate
import loss as scalerl
from data import Problem, Source, load_data, next_source
from machinery.logs import read_log
from machinery.plots import plot_runs
from data.verify import Verdict, VerifierPool, die_with
from generate import Decoding, Report, Request, Rollout, SharedParameters, Work

# --- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Train a language model with the ScaleRL recipe. The defaults suit the arithmetic task on two CPU cores."""

    recipe: tyro.conf.OmitArgPrefixes[scalerl.Recipe] = scalerl.Recipe()
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
    interruption_phrase: str = scalerl.INTERRUPTION_PHRASE  # forced when thinking reaches its budget
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
    generator_devices: tuple[str, ...] = ("auto",)
    trainer_devices: tuple[str, ...] = ("auto",)  # named likewise; one process each, which share the model by FSDP
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

    @property
    def generators(self) -> list[tuple[str, ...]]:
        """The devices of each generator."""
        devices, each = split_devices(self, torch.cuda.device_count())[0], self.tensor_parallel
        return [tuple(devices[i : i + each]) for i in range(0, len(devices), each)]

    @property
    def trainers(self) -> list[str]:
        """The device of each rank of the trainer."""
        return split_devices(self, torch.cuda.device_count())[1]


def list_devices(names: tuple[str, ...]) -> list[str]:
    """Single devices: cpu:2 is the CPU twice, cuda:0-2 and cuda:0,1,2 are three. ValueError for what is neither."""
    devices = []
    for name in names:
        kind, _, numbers = name.partition(":")
        if kind == "cpu" and re.fullmatch(r"[1-9]\d*|", numbers):
            devices += ["cpu"] * int(numbers or 1)
        elif kind == "cuda" and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*|", numbers):
            for part in (numbers or "0").split(","):
                first, _, last = part.partition("-")
                if int(last or first) < int(first):
                    raise ValueError(f"{name!r} is a range that goes backwards")
                devices += [f"cuda:{i}" for i in range(int(first), int(last or first) + 1)]
        else:
            raise ValueError(
                f"{name!r} is no device; devices are cpu, cpu:2 (two processes), cuda:0-5, cuda:6,7, each after a space"
            )
    return devices


def split_devices(settings: Settings, gpus: int) -> tuple[list[str], list[str]]:
    """Devices of generators and trainers. auto takes those that the other side has not named; the paper has one
    trainer for four generators. ValueError, naming the flag, for what is no device."""
    named = {"--generator-devices": settings.generator_devices, "--trainer-devices": settings.trainer_devices}
    for flag, names in named.items():
        try:
            named[flag] = None if "auto" in names else list_devices(names)
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None
    generators, trainers = named.values()
    free = [f"cuda:{i}" for i in range(gpus) if f"cuda:{i}" not in (generators or []) + (trainers or [])]
    if generators is None and trainers is None and len(free) > 1:
        number = max(1, len(free) // 5)
        return free[:-number], free[-number:]
    shared = free or ["cuda:0" if gpus else "cpu"]
    return generators or shared, trainers or shared[-1:]


# For real models, what the paper trained with (sec. 2, A.3) ...
PAPER = {
    "prompts_per_step": 48,
    "learning_rate": 5e-7,
    "warmup_steps": 100,
    "prompt_budget": scalerl.PROMPT_BUDGET,
    "thinking_budget": scalerl.THINKING_BUDGET,
    "answer_budget": scalerl.ANSWER_BUDGET,
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


def parse_settings(arguments: list[str]) -> Settings:
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
        settings = tyro.cli(Settings, args=arguments, default=before, description=__doc__)
        refuse_changes(before, settings)
        return settings
    recipe = scalerl.RECIPES.get(chosen.recipe, scalerl.Recipe())  # tyro refuses an unknown name below
    if chosen.leave_out in scalerl.Axis.__args__:
        if chosen.recipe != "scalerl":
            raise ValueError(f"--leave-out takes an axis out of scalerl; it cannot go with --recipe {chosen.recipe}")
        recipe = scalerl.leave_one_out(chosen.leave_out)
    defaults = chosen.defaults
    if defaults == "auto":
        defaults = "paper" if {*chosen.data} - {"arithmetic"} else "toy"
    default = Settings(recipe=recipe, defaults=defaults, **(PAPER if defaults == "paper" else {}))
    settings = tyro.cli(Settings, args=arguments, default=default, description=__doc__)
    return dataclasses.replace(settings, defaults=defaults)  # never auto, so that config.json says which


def read_settings(folder: Path) -> Settings:
    """The settings of the run in this folder. ValueError if there is none."""
    try:
        stored = json.loads((folder / "config.json").read_text())
        recipe = scalerl.Recipe(**stored.pop("recipe"))
        stored.pop("versions")
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
        return Settings(recipe=recipe, **values)
    except OSError as error:
        raise ValueError(f"--resume {folder}: the folder holds no run ({error.strerror}: {error.filename})") from None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--resume {folder}: its config.json is not one of this program ({error})") from None


# What says where and how often, but not what is computed. All else is the run itself.
MAY_CHANGE = {
    "resume", "steps", "validation_every", "checkpoint_every", "keep_checkpoints", "engine", "tensor_parallel",
    "generator_devices", "trainer_devices", "slots", "generator_memory", "tokens_per_micro_batch", "pack",
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


def check_settings(settings: Settings) -> None:
    """ValueError, naming the flag, for values that cannot be."""
    scalerl.parse_asynchrony(settings.recipe.asynchrony)
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
    generate.check_memory(settings.generator_memory, settings.slots)
    if not settings.generator_devices or not settings.trainer_devices:
        raise ValueError("--generator-devices and --trainer-devices each want at least one device")
    for device in (*(device for devices in settings.generators for device in devices), *settings.trainers):
        generate.check_device(device)
    if len(settings.generators[-1]) != settings.tensor_parallel:
        raise ValueError(
            f"--tensor-parallel {settings.tensor_parallel} wants as many --generator-devices for each generator, or a"
            f" multiple of it; they are {sum(map(len, settings.generators))}"
        )
    if len({torch.device(device).type for device in settings.trainers}) > 1:
        raise ValueError(f"--trainer-devices must be of one kind, not {', '.join(settings.trainers)}")


def run_folder(settings: Settings) -> Path:
    """The folder of this run, not made yet. ValueError if it holds something."""
    if settings.name is not None:
        folder = Path("runs") / settings.name
        if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {"lock"}):
            raise ValueError(f"{folder} holds another run; choose another --name, or move it away")
        return folder
    recipe = settings.recipe
    start = scalerl.leave_one_out(recipe.leave_out) if recipe.leave_out else scalerl.RECIPES[recipe.recipe]
    name = f"{recipe.recipe}-without-{recipe.leave_out}" if recipe.leave_out else recipe.recipe
    for part in dataclasses.fields(recipe):
        if getattr(recipe, part.name) != getattr(start, part.name):
            name += f"-{part.name}-{getattr(recipe, part.name)}"
    name += f"-seed{settings.seed}"
    candidates = [Path("runs") / name, *(Path("runs") / f"{name}-{i}" for i in range(2, 10_000))]
    return next(folder for folder in candidates if not folder.exists())


# --- prompts ------------------------------------------------------------------------------------------------------


class PromptOrder:
    """Which prompt comes next: epochs in an order shuffled anew, without the prompts that were retired."""

    def __init__(self, number: int, seed: int, no_positive_resampling: bool):
        self.number, self.seed, self.no_positive_resampling = number, seed, no_positive_resampling
        self.epoch, self.cursor = 0, 0
        self.order = self.shuffled()
        self.retired: set[int] = set()
        self.pass_rates: dict[int, float] = {}  # of each prompt at its last visit

    def shuffled(self) -> np.ndarray:
        """All prompts in the order of this epoch."""
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.number)

    @property
    def exhausted(self) -> bool:
        """Whether every prompt has been retired."""
        return len(self.retired) == self.number

    def next(self) -> int:
        """The index of the next prompt, which there must be."""
        while True:
            while self.cursor < self.number:
                prompt = int(self.order[self.cursor])
                self.cursor += 1
                if prompt not in self.retired:
                    return prompt
            self.epoch, self.cursor = self.epoch + 1, 0
            self.order = self.shuffled()

    def record(self, prompt: int, pass_rate: float) -> None:
        self.pass_rates[prompt] = pass_rate
        if self.no_positive_resampling and scalerl.retires(pass_rate):
            self.retired.add(prompt)


    def state(self) -> dict:
        """All that `restore` needs, for a checkpoint; the order follows from seed and epoch."""
        return {"epoch": self.epoch, "cursor": self.cursor, "pass_rates": list(self.pass_rates.items())}

    def restore(self, state: dict) -> None:
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self.order = self.shuffled()
        for prompt, pass_rate in state["pass_rates"]:
            self.record(prompt, pass_rate)


@dataclass
class Group:
    """The completions of one prompt at one visit, from when it is handed out until it is trained on."""

    number: int  # unique in the run, in the order of handing out; of a validation, the place in it
    source: int  # index of the source of its problem
    prompt: int  # index of the problem in it
    version: int  # of the parameters when it was handed out: none of its tokens is older
    generator: int
    requests: list[Request]
    rollouts: dict[int, Rollout] = field(default_factory=dict)  # by their index, as they come back
    verdicts: dict[int, Verdict] = field(default_factory=dict)  # on each, as they come from the verifiers

    @property
    def finished(self) -> bool:
        return len(self.verdicts) == len(self.requests)


# --- generators ---------------------------------------------------------------------------------------------------


class GeneratorFailed(Exception):
    """A generator has ended by itself, or is silent: the message holds its traceback, signal or exit status."""


@dataclass
class Generator:
    """The trainer's side of one generator process."""

    number: int
    process: multiprocessing.Process
    work: multiprocessing.Queue
    reports: multiprocessing.Queue
    heard: float  # clock reading when its last report came, or it was started
    slots: int = 0  # of its engine; 0 until it has reported that it is ready
    groups: int = 0  # handed out to it and not finished


def start_generator(number: int, settings: Settings, decoding: Decoding, parameters: SharedParameters) -> Generator:
    """Start the process of one generator device. Its first report says that it is ready."""
    context = multiprocessing.get_context("spawn")
    work, reports = context.Queue(), context.Queue()
    devices = settings.generators[number]
    own = generate.GeneratorSettings(
        settings.model,
        devices,
        trunk_dtype(settings, devices[0]),
        cpu_threads(settings),
        settings.slots,
        decoding,
        generate.choose_engine(settings.engine, devices[0]),
        generator_memory(settings, devices[0]),
    )
    process = context.Process(
        target=generate.generator_process,
        args=(number, own, parameters, work, reports),
        name=f"generator {number} on {','.join(devices)}",
        daemon=len(devices) == 1,  # a daemon may have no processes of its own, which vLLM has for several devices
    )
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the trainer, from the start
    process.start()
    signal.signal(signal.SIGINT, handler)
    # Each end of a pipe is open in one process only, so that when the other side dies, in the middle of a message
    # too, reading meets an end of file and writing an error, instead of waiting for ever.
    reports._writer.close()
    work._reader.close()
    work._ignore_epipe = True
    return Generator(number, process, work, reports, heard=time.monotonic())


def take_reports(generator: Generator, timeout: float) -> list[Report]:
    """The reports there are now, perhaps none. GeneratorFailed if the generator has died, or if it has not sent
    anything for `timeout` seconds, though it should every few."""
    reports = []
    alive = generator.process.is_alive()  # asked first, so that what it sent before it died is still read
    while True:
        try:
            reports.append(generator.reports.get_nowait())
        except queue.Empty:
            break
        except EOFError:
            generator.process.join()
            alive = False
            break
        generator.heard, generator.slots = time.monotonic(), reports[-1].slots or generator.slots
        if reports[-1].error is not None:
            raise GeneratorFailed(f"{generator.process.name} failed:\n{reports[-1].error}")
    if reports:
        return reports  # if it has died since, the next call says so
    if not alive:
        code = generator.process.exitcode
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        raise GeneratorFailed(f"{generator.process.name} ended {how}, without a word")
    if time.monotonic() - generator.heard > timeout:
        raise GeneratorFailed(f"{generator.process.name} has been silent for {timeout:.0f} s (--wait-timeout)")
    return reports


def discard(generator: Generator) -> None:
    """Kill what is left of a generator and let go of its queues."""
    generator.process.kill()
    generator.process.join()
    for end in (generator.work, generator.reports):
        end.cancel_join_thread()
        end.close()


def stop_generators(generators: list[Generator], timeout: float = 5.0) -> None:
    """Ask all to end; kill those that do not within `timeout` seconds."""
    for generator in generators:
        generator.work.put(Work(stop=True))
    deadline = time.monotonic() + timeout
    for generator in generators:
        generator.process.join(max(0.0, deadline - time.monotonic()))
        discard(generator)


def cpu_threads(settings: Settings) -> int:
    processes = len(settings.generators) + len(settings.trainers)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return settings.threads or max(1, cores // processes)


def generator_memory(settings: Settings, device: str) -> float:
    """The share of its device's memory that a generator may take."""
    beside = [devices for devices in settings.generators if device in devices]
    share = settings.generator_memory or (0.4 if device in settings.trainers else 0.9)
    return share / len(beside)


def trunk_dtype(settings: Settings, device: str) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device.startswith("cpu") else "bfloat16"


# --- one optimizer step -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Sequences as the trunk is fed them, and their targets. Frames are shifted: entry t of the tensors [B, T] belongs
    to the target token t + 1 of the sequence, prompt included; they are padded on the right. The inputs are either
    the same frames (R = B rows), where a causal model never looks at the padding, or packed: one row (R = 1) of
    sequences end to end, which attention keeps apart by their positions starting anew."""

    inputs_RT: Tensor  # int64: tokens fed
    positions_RT: Tensor  # int64: of each in its sequence
    predicts_RT: Tensor  # bool: the target of this input was sampled; in the order of sampled_BT
    targets_BT: Tensor  # int64: tokens predicted
    sampled_BT: Tensor  # bool: the target was sampled (not prompt, not forced, not padding)
    generator_logprobs_BT: Tensor  # float32: log pi_gen of the target, recorded when it was sampled
    rows_B: Tensor  # int64: which of the batch's rollouts each sequence is


def cut(lengths: list[int], tokens: int, pack: bool) -> list[list[int]]:
    """Which sequences make a micro-batch: at most `tokens` tokens (or one sequence), padding included where there is
    some, similar lengths together."""
    batches, used = [], 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        used += lengths[row] if pack or not batches else lengths[batches[-1][0]]
        if not batches or used > tokens:
            batches.append([])
            used = lengths[row]
        batches[-1].append(row)
    return batches


def cut_evenly(lengths: list[int], tokens: int, pack: bool, ranks: int) -> list[list[int]]:
    """Micro-batches for as few rounds of all ranks as `tokens` allows, and none much larger than that takes: the ranks
    wait for the slowest."""
    number = math.ceil(len(cut(lengths, tokens, pack)) / ranks) * ranks
    few_enough = lambda limit: len(cut(lengths, limit, pack)) <= number  # noqa: E731
    return cut(lengths, 1 + bisect.bisect_left(range(1, tokens), True, key=few_enough), pack)


def own_micro_batches(
    rollouts: list[Rollout], tokens: int, device: torch.device, pack: bool
) -> Iterator[tuple[MicroBatch, bool]]:
    """This rank's micro-batches of these rollouts, of at most `tokens` tokens each (or one sequence). They are as many
    as every other rank has, since FSDP wants all to call the model together; False marks a stand-in, which counts for
    nothing."""
    rank, ranks = rank_and_ranks()
    lengths = [len(rollout.request.prompt) + len(rollout.tokens) for rollout in rollouts]
    cuts = cut_evenly(lengths, tokens, pack, ranks)
    for place in range(rank, math.ceil(len(cuts) / ranks) * ranks, ranks):
        counts = place < len(cuts)
        yield micro_batch(rollouts, cuts[place] if counts else cuts[0], device, pack), counts


def micro_batch(rollouts: list[Rollout], rows: list[int], device: torch.device, pack: bool) -> MicroBatch:
    """The tensors of these rows of the rollouts."""
    ends = np.array([len(rollouts[row].request.prompt) + len(rollouts[row].tokens) for row in rows])
    ids = np.zeros((len(rows), max(ends)), np.int64)
    sampled, logprobs = np.zeros(ids.shape, bool), np.zeros(ids.shape, np.float32)
    for i, rollout in enumerate(rollouts[row] for row in rows):
        prompt = len(rollout.request.prompt)
        ids[i, :prompt] = rollout.request.prompt
        ids[i, prompt : ends[i]] = rollout.tokens
        sampled[i, prompt : ends[i]] = rollout.sampled
        logprobs[i, prompt : ends[i]] = rollout.logprobs
    positions = np.broadcast_to(np.arange(max(ends) - 1), ids[:, 1:].shape)
    real = positions < ends[:, None] - 1
    feed = (lambda array: array[real][None]) if pack else (lambda array: array)
    tensors = dict(
        inputs_RT=feed(ids[:, :-1]),
        positions_RT=feed(positions),
        predicts_RT=feed(sampled[:, 1:]),
        targets_BT=ids[:, 1:],
        sampled_BT=sampled[:, 1:],
        generator_logprobs_BT=logprobs[:, 1:],
        rows_B=np.array(rows),
    )
    return MicroBatch(**{name: torch.tensor(array, device=device) for name, array in tensors.items()})


def trunk_parts(model: PreTrainedModel) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The trunk's layers, and what else it has: embedding, norm."""
    children = list(model.base_model.children())
    layers = [layer for child in children if isinstance(child, torch.nn.ModuleList) for layer in child]
    return layers, [child for child in children if not isinstance(child, torch.nn.ModuleList)]


def compute_in(model: PreTrainedModel, dtype: torch.dtype, gradient_checkpointing: bool) -> None:
    """Have each part of the trunk (embedding, layers, norm) compute with a copy of its fp32 parameters in `dtype`, as
    the generator does. With gradient checkpointing a layer keeps its input only and is computed again in the backward,
    the copy too."""
    layers, rest = trunk_parts(model)
    for part in rest if dtype != torch.float32 else []:
        part.forward = _forward_in(part, part.forward, dtype, again_in_backward=False)
    for layer in layers if dtype != torch.float32 or gradient_checkpointing else []:
        layer.forward = _forward_in(layer, layer.forward, dtype, again_in_backward=gradient_checkpointing)


def _forward_in(part: torch.nn.Module, forward: Callable, dtype: torch.dtype, again_in_backward: bool) -> Callable:
    def in_dtype(*arguments, **keywords):
        parameters = {name: parameter.to(dtype) for name, parameter in part.named_parameters()}
        part.forward, outer = forward, part.forward
        try:
            return torch.func.functional_call(part, parameters, arguments, keywords)
        finally:
            part.forward = outer

    if again_in_backward:
        return functools.partial(torch.utils.checkpoint.checkpoint, in_dtype, use_reentrant=False)
    return in_dtype


class Policy(torch.nn.Module):
    """A causal LM as the trainer calls it. A module, because FSDP gathers parameters when a module is called."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, fp32_logits: bool) -> tuple[Tensor, Tensor]:
        """log pi_train of the sampled targets [B, T] (0 elsewhere; differentiable) and the entropies there [N]."""
        hidden_RTD = self.model.base_model(
            input_ids=batch.inputs_RT, position_ids=batch.positions_RT, use_cache=False
        ).last_hidden_state
        logprobs_N, entropies_N = scalerl.sampled_logprobs(
            hidden_RTD[batch.predicts_RT],
            self.model.get_output_embeddings().weight,
            batch.targets_BT[batch.sampled_BT],
            fp32_logits,
        )
        logprobs_BT = torch.zeros(batch.sampled_BT.shape, device=logprobs_N.device)
        return logprobs_BT.masked_scatter(batch.sampled_BT, logprobs_N), entropies_N


def rank_and_ranks() -> tuple[int, int]:
    """Which of the trainer's processes this is, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP has sharded, gathered; any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def from_all_ranks(value) -> list:
    """What each rank has called this with, in the order of the ranks."""
    values = [value] * rank_and_ranks()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def train_step(
    policy: Policy, optimizer: torch.optim.Optimizer, groups: list[Group], step: int, settings: Settings
) -> dict:
    """One optimizer step on a batch of groups; returns the step's metrics, as they are logged. With several ranks each
    gets the whole batch, so that all weights are those of the batch, and takes its share of the micro-batches."""
    recipe, device, (_, ranks) = settings.recipe, policy.model.device, rank_and_ranks()
    places = [(group, index) for group in groups for index in range(settings.completions_per_prompt)]
    rollouts = [group.rollouts[index] for group, index in places]
    verdicts = [group.verdicts[index] for group, index in places]
    shape = (len(groups), settings.completions_per_prompt)
    correct_PG = torch.tensor([verdict.correct for verdict in verdicts]).view(shape)
    lengths_PG = torch.tensor([int(rollout.sampled.sum()) for rollout in rollouts]).view(shape)
    judged = [verdict.failure is None and not rollout.truncated for verdict, rollout in zip(verdicts, rollouts)]
    usable_PG = torch.tensor(judged).view(shape)
    rewards_PG = scalerl.rewards(
        correct_PG,
        lengths_PG,
        recipe.length_control,
        max_length=settings.thinking_budget[1] + settings.answer_budget,
        penalty_length=settings.answer_budget,
    )
    counted_PG = scalerl.counted_samples(rewards_PG, usable_PG, recipe.zero_variance_filter)
    advantages_N = scalerl.advantages(rewards_PG, usable_PG, counted_PG, recipe.advantage_norm).flatten().to(device)
    weights_N = scalerl.token_weights(lengths_PG, counted_PG, recipe.aggregation).flatten().to(device)
    counted = counted_PG.flatten().nonzero().flatten()

    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * min(1.0, (step + 1) / max(1, settings.warmup_steps))
    totals = dict.fromkeys(("loss", "entropy", "ratio", "clipped", "kl", "tokens"), 0.0)
    ratio_max = 0.0
    counted_rollouts = [rollouts[i] for i in counted]
    batches = own_micro_batches(counted_rollouts, settings.tokens_per_micro_batch, device, settings.pack)
    for batch, counts in batches:
        rows_B = counted.to(device)[batch.rows_B]
        logprobs_BT, entropies_N = policy(batch, recipe.fp32_logits)
        loss, sums = scalerl.policy_loss(
            recipe, logprobs_BT, batch.generator_logprobs_BT, batch.sampled_BT, advantages_N[rows_B], weights_N[rows_B]
        )
        # FSDP averages gradients over the ranks; the weights are those of the whole batch, so the sum is wanted.
        (loss * ranks if counts else 0 * loss).backward()
        if counts:
            ratio_max = max(ratio_max, sums.pop("ratio_max").item())
            for name, value in {"loss": loss, "entropy": entropies_N.sum(), **sums}.items():
                totals[name] += value.item()
            totals["tokens"] += int(batch.sampled_BT.sum())
    everyone = from_all_ranks((totals, ratio_max))
    totals = {name: sum(own[name] for own, _ in everyone) for name in totals}
    ratio_max = max(own for _, own in everyone)
    tokens, gradient_norm = int(totals["tokens"]), 0.0
    if tokens:
        gradient_norm = whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.clip_gradient)).item()
    finite = math.isfinite(totals["loss"]) and math.isfinite(gradient_norm)
    if tokens and finite:  # one NaN that is stepped on stays in the parameters for good
        optimizer.step()
    optimizer.zero_grad()

    ages = step - np.concatenate([rollout.versions[rollout.sampled] for rollout in rollouts])
    per_token = {name: totals[name] / tokens if tokens else None for name in ("entropy", "ratio", "clipped", "kl")}
    return {
        "pass_rate": correct_PG.float().mean().item(),
        "skipped": int(not finite),
        "loss": totals["loss"],
        "gradient_norm": gradient_norm,
        "learning_rate": optimizer.param_groups[0]["lr"],
        "reward_mean": rewards_PG.mean().item(),
        "off_policyness_mean": float(ages.mean()),
        "off_policyness_max": int(ages.max()),
        "ratio_mean": per_token["ratio"],
        "ratio_max": ratio_max if tokens else None,
        "clipped_fraction": per_token["clipped"],
        "kl_estimate": per_token["kl"],
        "entropy": per_token["entropy"],
        **completion_columns(rollouts, verdicts),
        "zero_variance_fraction": scalerl.zero_variance(rewards_PG, usable_PG).float().mean().item(),
        "trained_tokens": tokens,
    }


def completion_columns(rollouts: list[Rollout], verdicts: list[Verdict]) -> dict:
    """Log columns of completions, of a batch or of a validation."""
    return {
        "completion_length": float(np.mean([rollout.sampled.sum() for rollout in rollouts])),
        "interrupted_fraction": float(np.mean([rollout.interrupted for rollout in rollouts])),
        "truncated_fraction": float(np.mean([rollout.truncated for rollout in rollouts])),
        "verifier_failures": sum(verdict.failure is not None for verdict in verdicts),
    }


@torch.no_grad()
def numerics_mismatch(policy: Policy, rollouts: list[Rollout], settings: Settings) -> dict[str, float]:
    """Mean and maximum of |log pi_train - log pi_gen| over tokens of rollouts that the model's present parameters
    sampled from first to last: what the ratio is off by although the policy is the same (sec. 3.2, fp32 logits)."""
    total, largest, tokens = 0.0, 0.0, 0
    batches = own_micro_batches(rollouts, settings.tokens_per_micro_batch, policy.model.device, settings.pack)
    for batch, counts in batches:
        logprobs_BT, _ = policy(batch, settings.recipe.fp32_logits)
        if counts:
            differences_N = (logprobs_BT - batch.generator_logprobs_BT)[batch.sampled_BT].abs()
            total += differences_N.sum().item()
            largest = max(largest, differences_N.max().item())
            tokens += len(differences_N)
    totals, maxima, counted = zip(*from_all_ranks((total, largest, tokens)))
    return {"mismatch_mean": sum(totals) / sum(counted), "mismatch_max": max(maxima)}


# --- the trainer, on one device or several ------------------------------------------------------------------------


class TrainerFailed(Exception):
    """One of the trainer's processes has died."""


class Trainer:
    """The policy, its optimizer, and what is done to them. With several devices each has a process with one of these,
    which holds a shard of the parameters (FSDP2); `together` has all make the same call."""

    def __init__(
        self,
        settings: Settings,
        model: PreTrainedModel,
        rank: int,
        shared: SharedParameters,
        moments: Path | None = None,
    ):
        """model: with fp32 parameters, whatever the trunk computes in: bf16 would swallow small updates. shared: where
        `publish` writes them. moments: the optimizer's, of the checkpoint that a run goes on from."""
        self.settings, self.model, self.policy = settings, model, Policy(model)
        self.followers: list[multiprocessing.Process] = []
        dtype = getattr(torch, trunk_dtype(settings, settings.trainers[rank]))
        for layer in trunk_parts(model)[0] if settings.compile else []:
            layer.forward = torch.compile(layer.forward, dynamic=True)  # micro-batches have any length
        if len(settings.trainers) == 1:
            compute_in(model, dtype, settings.gradient_checkpointing)
        else:
            shard(self.policy, torch.device(settings.trainers[rank]).type, dtype, settings.gradient_checkpointing)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
        )
        if moments is not None:
            self.read_moments(moments)
        self.shared, self.version = shared, -1  # the version published last
        self.parameters = list(model.named_parameters())  # listed now: while FSDP has gathered a layer, it has others
        self.copier, self.copying = ThreadPoolExecutor(1), Future()
        self.copying.set_result(None)  # nothing to wait for yet
        self.copy_seconds, self.waited_seconds = 0.0, 0.0  # of the last copy; for copies, all in all
        self.optimizer.register_step_pre_hook(lambda *_: self.published())
        self.stream = None
        if settings.trainers[rank].startswith("cuda"):
            self.stream = torch.cuda.Stream()
            shared.pin()

    def together(self, name: str, *arguments):
        """Call a method on all ranks; returns what it returns here. TrainerFailed if one of them has died."""
        if not self.followers:
            return getattr(self, name)(*arguments)
        try:
            dist.broadcast_object_list([(name, arguments)], src=0, device=torch.device("cpu"))
            return getattr(self, name)(*arguments)
        except RuntimeError as error:  # gloo says so at once; where a collective would wait, `watch` ends the process
            time.sleep(1.0)  # an exit status comes a little later than the end of a connection
            dead = [follower for follower in self.followers if follower.exitcode is not None]
            if dead:
                raise TrainerFailed(f"{dead[0].name} ended with status {dead[0].exitcode}") from error
            raise

    def follow(self) -> None:
        """What a rank other than 0 does: the calls that rank 0 makes, until told to stop."""
        while True:
            message = [None]
            dist.broadcast_object_list(message, src=0, device=torch.device("cpu"))
            name, arguments = message[0]
            if name == "stop":
                return
            getattr(self, name)(*arguments)

    def stop(self) -> None:
        """End the other ranks."""
        if self.followers:
            dist.broadcast_object_list([("stop", ())], src=0, device=torch.device("cpu"))
            dist.destroy_process_group()
            for follower in self.followers:
                follower.join(10.0)

    def step(self, groups: list[Group], step: int) -> dict:
        return train_step(self.policy, self.optimizer, groups, step, self.settings)

    def mismatch(self, rollouts: list[Rollout]) -> dict[str, float]:
        mismatch = numerics_mismatch(self.policy, rollouts, self.settings)
        if isinstance(self.policy, FSDPModule):
            self.policy.reshard()  # as a backward would; until then the head's parameter is another object
        return mismatch

    def publish(self, version: int) -> None:
        """Begin to give this version of the parameters to the generators: every rank copies its shard into shared
        memory, beside the next step, whose forward and backward only read them. Before the optimizer changes them, it
        waits for the copy (`published`)."""
        self.published()
        self.version = version
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # the optimizer may still be at work
        self.copying = self.copier.submit(self._copy, version)

    def _copy(self, version: int) -> None:
        started = time.monotonic()
        with torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext():
            self.shared.write(self.parameters, version, rank_and_ranks()[0])
        self.copy_seconds = time.monotonic() - started

    def published(self) -> None:
        """Wait until this rank has copied what it began to publish."""
        started = time.monotonic()
        self.copying.result()
        self.waited_seconds += time.monotonic() - started

    def gather(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """On rank 0 all parameters and all moments of the optimizer, whole, by name; elsewhere nothing is kept."""
        parameters, moments, keep = {}, {}, rank_and_ranks()[0] == 0
        for name, parameter in self.model.named_parameters():
            tensors = {name: parameter.detach()}
            tensors |= {f"{name}/{key}": value for key, value in self.optimizer.state.get(parameter, {}).items()}
            for key, value in tensors.items():
                value = whole(value)
                if keep:
                    (parameters if key == name else moments)[key] = value.cpu() if self.followers else value
        return parameters, moments

    def read_moments(self, path: Path) -> None:
        """Give the optimizer the moments that a checkpoint has, in shards if the parameters are."""
        parameters = dict(self.model.named_parameters())
        for place, value in safetensors.torch.load_file(path).items():
            name, _, key = place.rpartition("/")
            parameter = parameters[name]
            if key != "step":
                value = value.to(parameter.device)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            self.optimizer.state[parameter][key] = value


def shard(policy: Policy, device_type: str, dtype: torch.dtype, gradient_checkpointing: bool) -> None:
    """FSDP2 over all ranks: each part of the trunk is gathered when it is called, in `dtype`, and let go of after; the
    gradients are summed in fp32. The head, and an embedding tied to it, are fp32."""
    model, mesh = policy.model, init_device_mesh(device_type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    head = model.get_output_embeddings().weight
    layers, rest = trunk_parts(model)
    for layer in layers:
        if gradient_checkpointing:
            layer.forward = functools.partial(torch.utils.checkpoint.checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    for part in rest:
        own = list(part.parameters())
        if own and all(parameter is not head for parameter in own):
            fully_shard(part, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh)


def join_ranks(settings: Settings, rank: int, meeting_place: str) -> None:
    """Make this process one of the trainer's. They meet at a file, so no port is taken for it."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if settings.trainers[rank].startswith("cuda") else "gloo",
        store=dist.FileStore(meeting_place, len(settings.trainers)),
        rank=rank,
        world_size=len(settings.trainers),
        timeout=timedelta(days=30),  # the trainer may wait long for generators; who has died is noticed otherwise
    )
    dist.barrier()


def load_for_trainer(settings: Settings, source: str, rank: int) -> PreTrainedModel:
    """The model that a rank starts from, in fp32. What is to be sharded is not put on one device first."""
    device = torch.device(settings.trainers[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = generate.load_model(source, device if len(settings.trainers) == 1 else torch.device("cpu"), torch.float32)
    if device.type == "cuda":
        model.set_attn_implementation("sdpa")
    return model


def trainer_process(
    rank: int,
    settings: Settings,
    source: str,
    shared: SharedParameters,
    moments: Path | None,
    meeting_place: str,
) -> None:
    """A rank of the trainer other than 0."""
    for number in (signal.SIGINT, signal.SIGTERM):  # these reach whole process groups; rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=generate.end_with_the_trainer, daemon=True).start()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(cpu_threads(settings))
    model = load_for_trainer(settings, source, rank)
    join_ranks(settings, rank, meeting_place)
    Trainer(settings, model, rank, shared, moments).follow()
    leave_ranks()


def leave_ranks() -> None:
    """End this process of the trainer. At once: where Python takes itself apart, one of gloo's threads may still run,
    and the process would be aborted."""
    dist.destroy_process_group()
    os._exit(0)


def start_trainer(settings: Settings, model: PreTrainedModel, source: str, moments: Path | None) -> Trainer:
    """The trainer of this process, with those of the other ranks behind it. model: loaded from source."""
    followers, ranks = [], len(settings.trainers)
    shared = SharedParameters(model, ranks)
    if ranks > 1:
        folder = tempfile.mkdtemp(prefix="trainers-")
        meeting_place = os.path.join(folder, "meeting-place")
        context = multiprocessing.get_context("spawn")
        for rank in range(1, ranks):
            arguments = (rank, settings, source, shared, moments, meeting_place)
            name = f"trainer {rank} on {settings.trainers[rank]}"
            followers.append(context.Process(target=trainer_process, args=arguments, name=name, daemon=True))
            followers[-1].start()
        threading.Thread(target=watch, args=(followers,), daemon=True).start()
        join_ranks(settings, 0, meeting_place)
        shutil.rmtree(folder)  # all have met
    trainer = Trainer(settings, model, 0, shared, moments)
    trainer.followers = followers
    return trainer


def watch(followers: list[multiprocessing.Process], grace: float = 10.0) -> None:
    """End this process, and with it all others, when a rank has died and the main thread has not noticed in `grace`
    seconds, because it waits for that rank in a collective."""
    wait_for_end([follower.sentinel for follower in followers])
    time.sleep(grace)
    if dist.is_initialized():  # the run goes on as if nothing had happened
        print("\nerror: a process of the trainer has died, and the others wait for it: the run ends", file=sys.stderr)
        os._exit(1)


# --- compute ------------------------------------------------------------------------------------------------------


@dataclass
class Compute:
    """What training has cost so far, start-up and validation left out (sec. 2.1)."""

    devices: int  # of generators and trainers, CPU processes counted each
    parameters: int  # that take part in a token's forward: all but the embedding table
    tokens: int = 0  # sampled, of the groups trained on
    flops: float = 0.0  # 2 x parameters a token forward, 4 x backward; attention over the past left out
    device_seconds: float = 0.0  # of the run before it was resumed
    started: float = 0.0  # clock reading at the first step
    paused: float = 0.0  # seconds of validation since then
    ended: float | None = None  # clock reading when training was over

    @property
    def seconds(self) -> float:
        """Of training, in this process."""
        return (self.ended or time.monotonic()) - self.started - self.paused

    @contextlib.contextmanager
    def pause(self):
        """What is done within is not training."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.paused += time.monotonic() - began

    def add(self, groups: list[Group], trained_tokens: int) -> int:
        """Count a batch: generation of all of it, training of the part that was not filtered out, of which
        trained_tokens is the number of sampled tokens. Returns that number for the whole batch."""
        rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
        batch_tokens = sum(int(rollout.sampled.sum()) for rollout in rollouts)
        self.tokens += batch_tokens
        completions = sum(len(rollout.tokens) for rollout in rollouts)
        prompts_once = sum(len(group.rollouts[0].request.prompt) for group in groups)
        prompts_each = sum(len(rollout.request.prompt) for rollout in rollouts)
        generated = completions + prompts_once
        trained = (completions + prompts_each) * trained_tokens / batch_tokens
        self.flops += 2 * self.parameters * generated + 6 * self.parameters * trained
        return batch_tokens

    def columns(self) -> dict:
        return {
            "compute_device_hours": (self.device_seconds + self.seconds * self.devices) / 3600,
            "compute_tokens": self.tokens,
            "compute_flops": self.flops,
        }


def matmul_parameters(model: PreTrainedModel) -> int:
    """Parameters that a token is multiplied with: all but the embedding table, unless that is the head too, and of a
    mixture of experts those of the experts that a token is sent to."""
    config, embedding, head = model.config, model.get_input_embeddings().weight, model.get_output_embeddings().weight
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    used = getattr(config, "num_experts_per_tok", None) or 1
    total = 0
    for name, parameter in model.named_parameters():
        if parameter is not embedding or embedding is head:
            total += parameter.numel() * used // experts if ".experts." in name else parameter.numel()
    return total


# --- files: whole or not at all -----------------------------------------------------------------------------------
# A checkpoint, runs/NAME/checkpoints/step-000020/, holds model/ (fp32, a folder that transformers loads),
# optimizer.safetensors, state.json, and checksums.json over all of these. Both formats hold data and no code.


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


@contextlib.contextmanager
def whole_folder(target: Path):
    """A folder to write into, which takes the place of `target` once all of it is on disk. OSError if it cannot."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in filter(Path.is_file, partial.rglob("*")):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except safetensors.SafetensorError as error:  # a full disk, in its words
        raise OSError(f"{partial}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of all files in the folder but checksums.json, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "checksums.json")
    digests = {}
    for path in files:
        with open(path, "rb") as file:
            digests[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def checkpoint_folders(run_folder: Path) -> list[Path]:
    """Of a run, the oldest first."""
    return sorted((run_folder / "checkpoints").glob("step-*[0-9]"), key=lambda folder: int(folder.name[len("step-") :]))


def write_checkpoint(run_folder: Path, trainer: Trainer, tokenizer, state: dict, keep: int) -> None:
    """Add the checkpoint of state["step"] and remove all but the newest `keep`. It is the same whatever the number of
    ranks. OSError if it cannot be written; then the ones before are as they were."""
    parameters, moments = trainer.together("gather")
    with whole_folder(run_folder / "checkpoints" / f"step-{state['step']:06d}") as folder:
        trainer.model.save_pretrained(folder / "model", state_dict=parameters)
        tokenizer.save_pretrained(folder / "model")
        safetensors.torch.save_file(moments, folder / "optimizer.safetensors")
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "checksums.json").write_text(json.dumps(checksums(folder), indent=2))
    for old in checkpoint_folders(run_folder)[:-keep]:
        shutil.rmtree(old)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The newest whole checkpoint; a damaged one is named on screen and passed over. None if there has been none yet,
    ValueError if all are damaged."""
    folders = checkpoint_folders(run_folder)
    for folder in reversed(folders):
        try:
            expected, found = json.loads((folder / "checksums.json").read_text()), checksums(folder)
            damaged = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        except (OSError, ValueError):
            damaged = ["checksums.json"]
        if not damaged:
            return folder
        print(f"warning: the checkpoint {folder} is damaged ({', '.join(damaged)}); passed over", file=sys.stderr)
    if folders:
        raise ValueError(f"--resume {run_folder}: no checkpoint of this run is whole")
    return None


def lock_folder(folder: Path) -> TextIO:
    """The run's lock, held until the file is closed or the process ends, however that happens. ValueError if another
    process holds it."""
    file = open(folder / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(f"{folder} is in use by process {file.read().strip()}; wait for it or stop it") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


# --- the run ------------------------------------------------------------------------------------------------------


SAMPLED_PROBLEMS, SAMPLES_SHOWN = 6, 2  # validation problems in samples.txt, completions of each
STEPS_TO_JUDGE_THE_SPLIT = 10
MOST_SKIPPED_IN_A_ROW = 5  # steps that were not finite, until the run ends
MISMATCH_TOO_LARGE = 0.05  # nats: an on-policy ratio that is off by 5 % on average is more than numerics


class Stopped(Exception):
    """Ctrl-C or SIGTERM, met at a place where the run can be saved."""


class NotFinite(Exception):
    """The loss or gradient was not finite in several steps in a row."""


class Run:
    """One training run: what is under way, and the loop that moves it on."""

    def __init__(self, settings: Settings, folder: Path, tokenizer, decoding: Decoding, sources: list[Source]):
        self.settings, self.folder = settings, folder
        self.tokenizer, self.decoding, self.sources = tokenizer, decoding, sources
        self.prompt_ids: dict[Problem, list[int]] = {}  # with the chat template
        self.orders = [
            PromptOrder(len(source.train), settings.seed, settings.recipe.no_positive_resampling) for source in sources
        ]
        self.step = 0  # optimizer steps made, and so the version of the parameters
        self.under_way: dict[int, Group] = {}  # handed out, not trained on, by number
        self.validating: dict[int, Group] = {}  # the same of a validation
        self.handed_out = [0] * len(sources)  # groups of each source
        self.to_repeat: deque[tuple[int, int, int]] = deque()  # number, source and prompt of groups lost at a stop
        names = [*sum(settings.generators, ()), *settings.trainers]
        self.compute = Compute(names.count("cpu") + len({*names} - {"cpu"}), 0)  # a GPU that does both is one
        self.busy_seconds, self.sampled_tokens = 0.0, 0  # of all generators, in this process
        self.unlogged_busy = 0.0  # seconds of a generator that no line of the log has counted yet
        self.waited = 0.0  # seconds of training that the trainer has waited, in this process
        self.validations: list[dict] = []  # the validation lines of the log
        self.samples: dict[int, list[list[str]]] = {}  # of the first and the last validation, by step and problem
        self.saved_step = -1  # of the newest checkpoint
        self.first_step = 0  # that this process has begun with
        self.restarts = 0  # generators replaced
        self.skipped_in_a_row = 0
        self.began = time.monotonic()
        self.forecast = ""  # for the progress bar, once there is one
        self.why_ended = "All steps are made"  # for the log, unless something else ends the run
        self.warned: set[str] = set()
        self.stopped_by: signal.Signals | None = None
        self.stopped_at = 0.0  # clock reading then

    def take(self, trainer: Trainer) -> None:
        """The trainer comes last, when all else has been checked."""
        self.trainer, self.parameters = trainer, trainer.shared
        self.compute.parameters = matmul_parameters(trainer.model)

    # Checkpoints

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self.saved_step == self.step:
            return
        state = {
            "step": self.step,
            "orders": [order.state() for order in self.orders],
            # What is under way is sampled again, with the parameters of then. Every random draw of the run follows
            # from the seed and a group's number, an epoch or a step, so there is no other random state.
            "handed_out": self.handed_out,
            "to_repeat": [(g.number, g.source, g.prompt) for g in self.under_way.values()] + list(self.to_repeat),
            "compute": {
                "tokens": self.compute.tokens,
                "flops": self.compute.flops,
                "device_seconds": self.compute.columns()["compute_device_hours"] * 3600,
            },
            "wall_seconds": time.monotonic() - self.began,
            "samples": list(self.samples.items()),
        }
        keep = self.settings.keep_checkpoints
        write_checkpoint(self.folder, self.trainer, self.tokenizer, state, keep)
        self.saved_step = self.step

    def restore(self, checkpoint: Path | None) -> None:
        """Go on from a checkpoint, whose parameters and moments the trainer has, or from the beginning without one.
        What the log tells of later steps is dropped: they will come again."""
        log, kept = self.folder / "log.jsonl", []
        if checkpoint is not None:
            state = json.loads((checkpoint / "state.json").read_text())
            self.step = self.saved_step = state["step"]
            for order, stored in zip(self.orders, state["orders"]):
                order.restore(stored)
            self.handed_out = state["handed_out"]
            self.to_repeat = deque(tuple(group) for group in state["to_repeat"])
            self.compute = dataclasses.replace(self.compute, **state["compute"])
            self.began = time.monotonic() - state["wall_seconds"]
            self.samples = {step: shown for step, shown in state["samples"]}
            kept = [line for line in log.read_text().splitlines() if line.endswith("}")]  # the last may be cut short
            kept = [line for line in kept if json.loads(line)["step"] <= self.step and '"kind": "end"' not in line]
            self.validations = [line for line in map(json.loads, kept) if line["kind"] == "validation"]
            self.refresh_forecast()
        write_whole(log, "".join(line + "\n" for line in kept))
        print(f"{self.folder}: going on from step {self.step}", file=sys.stderr)

    def render_prompts(self) -> None:
        """Token ids of all prompts. ValueError for one that is longer than its budget, and for a chat template that
        makes the same of two."""
        for problem in [problem for source in self.sources for problem in source.train + source.validation]:
            self.prompt_ids[problem] = generate.render(self.tokenizer, problem.prompt, self.settings.thinking)
            length = len(self.prompt_ids[problem])
            if length > self.settings.prompt_budget:
                raise ValueError(
                    f"the prompt {problem.prompt[:60]!r} has {length} tokens with the chat template; --prompt-budget is"
                    f" {self.settings.prompt_budget}"
                )

        texts: dict[tuple[int, ...], str] = {}
        for problem, ids in self.prompt_ids.items():
            if texts.setdefault(tuple(ids), problem.prompt) != problem.prompt:
                raise ValueError(
                    f"--model {self.settings.model}: its chat template drops the prompt: {problem.prompt[:40]!r} and"
                    f" {texts[tuple(ids)][:40]!r} become the same {len(ids)} tokens"
                )

    def train(self) -> None:
        """All steps, from the first validation to the last."""
        settings = self.settings
        self.trainer.together("publish", self.step)
        self.generators: list[Generator] = []
        self.verifiers = VerifierPool(settings.verifiers, settings.verifier_time_limit, settings.verifier_memory)
        try:
            for number in range(len(settings.generators)):
                self.generators.append(start_generator(number, settings, self.decoding, self.parameters))
            while not all(generator.slots for generator in self.generators):
                self.stop_if_asked()
                self.look()
                time.sleep(0.002)
            say(self.split())
            self.compute.started, self.first_step = time.monotonic(), self.step
            if self.validation_due() and not (self.validations and self.validations[-1]["step"] == self.step):
                self.validate()
            self.last_rates = self.counters()
            with tqdm(total=settings.steps, initial=self.step, desc="training", unit="step", dynamic_ncols=True) as bar:
                while self.step < settings.steps and self.train_once(bar):
                    pass
            if self.validations[-1]["step"] < self.step:
                self.validate()
            self.log({"kind": "end", "step": self.step, "reason": self.why_ended})
        finally:
            self.compute.ended = time.monotonic()
            stop_generators(self.generators)
            self.verifiers.close()

    def train_once(self, bar: tqdm) -> bool:
        """One step with all that belongs to it; False if there is nothing left to train on."""
        settings, step = self.settings, self.step
        self.stop_if_asked()
        self.hand_out()
        waiting = time.monotonic()
        groups = self.collect()
        waited = time.monotonic() - waiting
        if groups is None:
            self.why_ended = f"Every prompt has been retired (pass rate >= {scalerl.RETIRE_AT})"
            say(f"{self.why_ended}: training ends.")
            return False
        metrics = self.trainer.together("step", groups, step)
        for group in groups:
            correct = [verdict.correct for verdict in group.verdicts.values()]
            self.orders[group.source].record(group.prompt, sum(correct) / len(correct))
        self.step += 1
        if scalerl.publishes_after(settings.recipe.asynchrony, step):
            self.trainer.together("publish", self.step)
        batch_tokens = self.compute.add(groups, metrics.pop("trained_tokens"))
        self.log({"kind": "train", "step": self.step, **metrics, **self.rates(waited, batch_tokens)})
        self.look_at_numbers(groups, metrics)
        if self.step - self.first_step == STEPS_TO_JUDGE_THE_SPLIT:
            say(f"idle in the first {STEPS_TO_JUDGE_THE_SPLIT} steps: {self.balance()}")
        if self.validation_due():
            self.validate()
        if self.step % settings.checkpoint_every == 0:
            self.save()
        bar.update()
        bar.set_postfix_str(
            f"pass rate {self.validations[-1]['pass_rate']:.3f}{self.forecast}"
            f", off-policy {metrics['off_policyness_mean']:.1f}, {self.speeds}"
        )
        return not self.levelled_off()

    def look_at_numbers(self, groups: list[Group], metrics: dict) -> None:
        """Warn of what often comes before a collapse; NotFinite when there is nothing to go on with."""
        if metrics["truncated_fraction"] > scalerl.TRUNCATED_TOO_OFTEN:
            self.warn(
                "truncation",
                f"{metrics['truncated_fraction']:.0%} of the completions of step {self.step} reached their token limit"
                " without ending, and are left out; instabilities often follow above"
                f" {scalerl.TRUNCATED_TOO_OFTEN:.0%}: raise --answer-budget or --thinking-budget",
            )
        if not metrics["skipped"]:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        batch = self.folder / "not_finite_batch.json"
        write_whole(batch, json.dumps([group_as_json(group) for group in groups]))
        found = f"the loss or the gradient of step {self.step} is not finite; its batch is in {batch}"
        self.warn("not finite", f"{found}. The step is skipped, and counted as `skipped` in the log")
        if self.skipped_in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise NotFinite(
                f"{found}. So were the {MOST_SKIPPED_IN_A_ROW - 1} steps before it, and the parameters stay as they"
                " were: try a lower --learning-rate, or --dtype float32, from an earlier checkpoint"
            )

    # Being told to stop, and warning

    def on_signal(self, number: int, _) -> None:
        """Ctrl-C or SIGTERM: the first is heeded where the run can be saved, the second at once. What comes within a
        second is the same one: `timeout` and job schedulers signal a process and then its group."""
        if self.stopped_by is not None:
            if time.monotonic() - self.stopped_at > 1.0:
                raise KeyboardInterrupt
            return
        self.stopped_by, self.stopped_at = signal.Signals(number), time.monotonic()
        say("Stopping after this step, with a checkpoint. Once more stops at once, without.")

    def stop_if_asked(self) -> None:
        if self.stopped_by is not None:
            raise Stopped("Ctrl-C" if self.stopped_by == signal.SIGINT else self.stopped_by.name)

    def warn(self, about: str, text: str) -> None:
        """Say it the first time."""
        if about not in self.warned:
            self.warned.add(about)
            say(f"warning: {text}")

    # Handing out and collecting

    def hand_out(self) -> None:
        """Give prompts to the generators, as far ahead as the recipe allows and the generators can use."""
        settings, asynchrony = self.settings, self.settings.recipe.asynchrony
        kind, _ = scalerl.parse_asynchrony(asynchrony)
        if kind == "ppo" and self.under_way:
            return
        ahead = functools.partial(scalerl.groups_ahead, asynchrony, settings.prompts, self.step)
        if kind == "ppo" or len(self.under_way) >= ahead(self.parameters.version):
            self.wait_for_parameters()  # the newest may allow more; PPO samples with no others
        version = self.parameters.version  # what is handed out now is sampled with no older one
        # What a generator cannot begin before it hears from us again would only grow old in its queue.
        each = settings.prompts // len(self.generators) + 1
        wanted: list[list[Request]] = [[] for _ in self.generators]
        while len(self.under_way) < ahead(version):
            generator = min(self.generators, key=lambda generator: generator.groups / generator.slots)
            if kind == "pipeline" and generator.groups >= generator.slots // settings.completions_per_prompt + each:
                break
            following = self.next_group()
            if following is None:
                break
            number, source, prompt = following
            problem, seed = self.sources[source].train[prompt], (settings.seed, 0, number)
            requests = self.requests(problem, number, settings.completions_per_prompt, seed)
            self.under_way[number] = Group(number, source, prompt, version, generator.number, requests)
            wanted[generator.number] += requests
            generator.groups += 1
        for generator, requests in zip(self.generators, wanted):
            if requests:
                generator.work.put(Work(requests))

    def wait_for_parameters(self, timeout: float = 60.0) -> None:
        """Until the generators can have the version that was published last. TrainerFailed after `timeout` seconds;
        a rank that has died ends the run sooner (`watch`)."""
        self.trainer.published()
        deadline = time.monotonic() + timeout
        while self.parameters.version < self.trainer.version:  # another rank is slower
            if time.monotonic() > deadline:
                raise TrainerFailed(f"a process of the trainer has not written its parameters within {timeout:.0f} s")
            time.sleep(0.0005)

    def next_group(self) -> tuple[int, int, int] | None:
        """Number, source and prompt of the next group: first those that a stop of the run has lost. None: no prompt is
        left in any source."""
        if self.to_repeat:
            return self.to_repeat.popleft()
        weights = [0.0 if order.exhausted else source.weight for order, source in zip(self.orders, self.sources)]
        if not any(weights):
            return None
        source = next_source(weights, self.handed_out)
        number = sum(self.handed_out)
        self.handed_out[source] += 1
        return number, source, self.orders[source].next()

    def requests(self, problem: Problem, group: int, completions: int, seed: tuple[int, ...]) -> list[Request]:
        """Requests for the completions of one problem, each with its own thinking budget and noise."""
        low, high = self.settings.thinking_budget
        if self.decoding.length_control == "penalty":
            low = high
        budgets = np.random.default_rng(seed).integers(low, high, size=completions, endpoint=True)
        prompt = self.prompt_ids[problem]
        return [Request(group, i, prompt, int(budget), (*seed, i)) for i, budget in enumerate(budgets)]

    def look(self) -> bool:
        """Take in what has come from generators and verifiers, and replace generators that have failed. Whether
        anything has come."""
        came = False
        for generator in list(self.generators):
            try:
                reports = take_reports(generator, self.settings.wait_timeout)
            except GeneratorFailed as failure:
                self.replace(generator, failure)
                continue
            for report in reports:
                self.receive(report)
            came |= bool(reports)
        for (validation, number, index), verdict in self.verifiers.results():
            group = (self.validating if validation else self.under_way)[number]
            group.verdicts[index] = verdict
            came = True
            if verdict.failure is not None:
                self.warn(
                    "verifier",
                    f"no verdict on a completion ({verdict.failure}); it is left out, and counted as"
                    " `verifier_failures` in the log",
                )
        return came

    def wait(self) -> None:
        """Until something has come. It does, or the run ends: a silent generator is replaced after --wait-timeout, a
        verifier after --verifier-time-limit."""
        while not self.look():
            self.stop_if_asked()
            time.sleep(0.002)

    def receive(self, report: Report) -> None:
        """Put rollouts in their groups, and give them to the verifiers. One that was cut off needs no verdict."""
        self.busy_seconds += report.busy_seconds
        self.sampled_tokens += report.sampled_tokens
        to_judge = []
        for rollout in report.rollouts:
            number, index = rollout.request.group, rollout.request.index
            group = (self.validating if report.validation else self.under_way)[number]
            group.rollouts[index] = rollout
            if len(group.rollouts) == len(group.requests):
                self.generators[group.generator].groups -= 1
            if rollout.truncated:
                group.verdicts[index] = Verdict(False, None)
            else:
                source = self.sources[group.source]
                problem = (source.validation if report.validation else source.train)[group.prompt]
                text = generate.completion_text(self.tokenizer, self.decoding, rollout)
                to_judge.append(((report.validation, number, index), problem, text))
        self.verifiers.submit(to_judge)

    def replace(self, generator: Generator, failure: GeneratorFailed) -> None:
        """Start another generator in place of one that has failed, and give it what that had not finished. Raises the
        failure when that has happened too often, or before the run has begun: then it would fail again."""
        if self.restarts == self.settings.max_restarts or not self.validations and not generator.slots:
            raise failure
        self.restarts += 1
        say(f"warning: {failure}\nIt is replaced ({self.restarts} of --max-restarts {self.settings.max_restarts}).")
        discard(generator)
        new = start_generator(generator.number, self.settings, self.decoding, self.parameters)
        new.groups, new.slots = generator.groups, generator.slots
        self.generators[generator.number] = new
        for validation, groups in ((True, self.validating), (False, self.under_way)):
            lost = [group for group in groups.values() if group.generator == generator.number]
            requests = [r for group in lost for r in group.requests if r.index not in group.rollouts]
            if requests:
                new.work.put(Work(requests, validation))

    def collect(self) -> list[Group] | None:
        """Wait until the recipe has a batch for this step, and take it; None if there will never be one."""
        self.look()
        while True:
            done = [group for group in self.under_way.values() if group.finished]
            unfinished = [group for group in self.under_way.values() if not group.finished]
            batch = scalerl.choose_batch(
                [group.version for group in done],
                [group.version for group in unfinished],
                self.step,
                self.settings.recipe.asynchrony,
                self.settings.prompts,
            )
            if batch is not None:
                return [self.under_way.pop(done[i].number) for i in batch]
            if not unfinished:
                return None
            self.wait()
            self.hand_out()

    # Validation, and what is written down

    def validation_due(self) -> bool:
        return self.step % self.settings.validation_every == 0 or self.step == self.settings.steps

    def validate(self) -> None:
        """A validation; training waits, its clock stands."""
        with self.compute.pause():
            self.measure_pass_rate()

    def measure_pass_rate(self) -> None:
        """Sample the held-out problems with the parameters of this step alone, and log what comes of it."""
        step, samples = self.step, self.settings.validation_samples
        compute = self.compute.columns() if step else dict.fromkeys(self.compute.columns(), 0)
        if self.trainer.version < step:  # PPO-off-policy publishes every k-th version only
            self.trainer.together("publish", step)
        self.wait_for_parameters()
        held_out = [(s, p) for s, source in enumerate(self.sources) for p in range(len(source.validation))]
        for i, (source, prompt) in enumerate(held_out):
            generator = self.generators[i % len(self.generators)]
            problem, seed = self.sources[source].validation[prompt], (self.settings.seed, 1, step, i)
            requests = self.requests(problem, i, samples, seed)
            self.validating[i] = Group(i, source, prompt, step, generator.number, requests)
            generator.groups += 1
        for generator in self.generators:
            own = [group for group in self.validating.values() if group.generator == generator.number]
            generator.work.put(Work([request for group in own for request in group.requests], validation=True))
        while not all(group.finished for group in self.validating.values()):
            self.wait()
        groups = list(self.validating.values())
        self.validating = {}
        rollouts = [group.rollouts[i] for group in groups for i in range(samples)]
        verdicts = [group.verdicts[i] for group in groups for i in range(samples)]
        line = {
            "kind": "validation",
            "step": step,
            **self.pass_rates(groups),
            **completion_columns(rollouts, verdicts),
            **self.trainer.together("mismatch", rollouts[:: max(1, len(rollouts) // 64)]),
            **compute,
        }
        if line["mismatch_mean"] > MISMATCH_TOO_LARGE:
            self.warn(
                "mismatch",
                f"generator and trainer differ by {line['mismatch_mean']:.3f} nats a token, with the same parameters;"
                " the importance ratios measure that and not the policy: keep --fp32-logits, or try --dtype float32",
            )
        of_each = [[g for g in groups if g.source == s][:SAMPLED_PROBLEMS] for s in range(len(self.sources))]
        shown = [[self.shown(g, i) for i in range(min(samples, SAMPLES_SHOWN))] for some in of_each for g in some]
        self.samples = {**dict(list(self.samples.items())[:1]), step: shown}  # the first and this one
        self.validations.append(line)
        self.log(line)
        self.refresh_forecast()

    def pass_rates(self, groups: list[Group]) -> dict:
        """Mean pass rate of a validation: of each source, and of all with their weights."""
        correct = [[] for _ in self.sources]
        for group in groups:
            correct[group.source] += [verdict.correct for verdict in group.verdicts.values()]
        rates = [float(np.mean(values)) for values in correct]
        columns = {
            "pass_rate": float(np.average(rates, weights=[source.weight for source in self.sources])),
            "num_examples": sum(map(len, correct)),
        }
        if len(self.sources) > 1:
            columns |= {f"pass_rate/{source.name}": rate for source, rate in zip(self.sources, rates)}
        return columns

    def shown(self, group: Group, index: int) -> str:
        """A completion of a validation as samples.txt shows it."""
        rollout, verdict = group.rollouts[index], group.verdicts[index]
        judged = verdict.failure or ("right" if verdict.correct else "wrong")
        return f"{judged}{', truncated' if rollout.truncated else ''}:  {generate.marked_text(self.tokenizer, rollout)}"

    def log(self, line: dict) -> None:
        """Add a line to log.jsonl, on disk at once. JSON has no NaN and no infinity: they become null."""
        line["wall_seconds"] = time.monotonic() - self.began
        line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with open(self.folder / "log.jsonl", "ab") as file:
            end = file.tell()
            try:
                file.write((json.dumps(line) + "\n").encode())
                file.flush()
            except OSError:
                os.truncate(file.fileno(), end)  # half a line helps nobody
                raise

    def counters(self) -> dict:
        """The training clock, the generators' counters, the waiting for copies now."""
        return {
            "seconds": self.compute.seconds,
            "busy": self.busy_seconds,
            "tokens": self.sampled_tokens,
            "waited": self.trainer.waited_seconds,
        }

    def rates(self, waited: float, batch_tokens: int) -> dict:
        """Log columns of what has happened since they were last asked for, validation left out; batch_tokens: sampled
        tokens of the batch trained on, filtered groups included."""
        now = self.counters()
        change = {name: value - self.last_rates[name] for name, value in now.items()}
        self.last_rates = now
        working = max(change["seconds"] - waited, 1e-9)
        # Reports come now and then, and may be of a longer time than this line: the rest is for the next.
        self.unlogged_busy += change["busy"] / len(self.generators)
        busy = min(self.unlogged_busy, change["seconds"])
        self.unlogged_busy -= busy
        self.waited += waited
        sampled_per_second = len(self.generators) * change["tokens"] / change["busy"] if change["busy"] else None
        self.speeds = f"tokens/s {sampled_per_second or 0:,.0f} sampled {batch_tokens / working:,.0f} trained"
        return {
            "groups_waiting": sum(group.finished for group in self.under_way.values()),
            "parameters_seconds": self.trainer.copy_seconds,
            "parameters_waited_seconds": change["waited"],
            "parameters_bytes": self.parameters.flat.nbytes,
            "trainer_idle_fraction": waited / change["seconds"],
            "generator_idle_fraction": 1 - busy / change["seconds"],
            "generator_tokens_per_second": sampled_per_second,
            "trainer_tokens_per_second": batch_tokens / working,
            "prompts_retired": sum(len(order.retired) for order in self.orders),
            "epoch": min(order.epoch for order in self.orders),
            **self.compute.columns(),
        }

    @property
    def columns(self) -> list[str]:
        """The columns of the log that have a curve of their own: one for each source."""
        return ["pass_rate"] if len(self.sources) == 1 else [f"pass_rate/{source.name}" for source in self.sources]

    def curve(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Compute (FLOPs, which no other load on the machine disturbs) and pass rate of all validations so far."""
        return (
            np.array([line["compute_flops"] for line in self.validations]),
            np.array([line[column] for line in self.validations]),
        )

    def fit(self, column: str) -> fit_curve.Fit | None:
        """The sigmoid through the validations so far; None while there are too few or nothing has moved."""
        source = self.sources[self.columns.index(column)]
        num_examples = len(source.validation) * self.settings.validation_samples
        try:
            return fit_curve.fit(*self.curve(column), num_examples=num_examples)
        except ValueError:
            return None

    def refresh_forecast(self) -> None:
        self.forecast = ""
        for column in self.columns if len(self.validations) > 6 else []:
            fit = self.fit(column)
            if fit is not None:
                low, high = fit.interval["A"]
                self.forecast += f", A{column.removeprefix('pass_rate')} "
                self.forecast += f"{fit.A:.2f} [{low:.2f}, {high:.2f}]" if fit.identified else f"> {low:.2f}"
                self.forecast += f"; twice the compute buys {fit.gain()[0]:+.2f}" if fit.identified else ""

    def levelled_off(self) -> bool:
        """Whether --stop-when-gain-below ends the run here, at a validation; of several sources all must say so."""
        least = self.settings.stop_when_gain_below
        if not least or self.validations[-1]["step"] < self.step:
            return False
        if not all(fit_curve.levelled_off(*self.curve(column), least) for column in self.columns):
            return False
        self.why_ended = f"Twice the compute would surely buy less than {least} (--stop-when-gain-below)"
        say(f"{self.why_ended}: training ends.")
        return True

    def finish(self) -> None:
        """Leave everything that a run leaves behind, and print its end."""
        self.save()
        newest = self.folder / "checkpoints" / f"step-{self.step:06d}" / "model"
        with whole_folder(self.folder / "model") as folder:
            shutil.copytree(newest, folder, dirs_exist_ok=True)
        self.save_samples()
        self.save_curve()
        print(self.summary())

    def save_samples(self) -> None:
        """samples.txt: the same validation problems at the first and at the last validation."""
        text = "Forced tokens stand in [[ ]]. Of each problem the first completions of a validation, not picked.\n"
        problems = [problem for source in self.sources for problem in source.validation[:SAMPLED_PROBLEMS]]
        for i, problem in enumerate(problems):
            text += f"\n=== {problem.prompt}   (answer: {problem.answer})\n"
            for step, shown in self.samples.items():
                text += "".join(f"step {step:4d}  {completion}\n" for completion in shown[i])
        write_whole(self.folder / "samples.txt", text)

    def last_checkpoint(self) -> str:
        """What is left to go on from."""
        if self.saved_step < 0:
            return "there is no checkpoint yet"
        return f"the last checkpoint is of step {self.saved_step}: python train.py --resume {self.folder}"

    def summary(self) -> str:
        """The screen at the end."""
        last, lines = self.validations[-1], []
        for source, column in zip(self.sources, self.columns):
            x, y = self.curve(column)
            mean_at = f"mean@{self.settings.validation_samples} of {len(source.validation)} held-out problems"
            if len(self.sources) > 1:
                lines.append(f"-- {source.name}")
            lines.append(f"pass rate   {y[0]:.3f} before, {y[-1]:.3f} after {last['step']} steps ({mean_at})")
            fit = self.fit(column)
            if fit is None:
                lines.append("curve       too few validations for a fit")
                continue
            a, b, c = (fit.interval[name] for name in ("A", "B", "C_mid"))
            lines += [
                f"curve       A {fit.A:.3f} [{a[0]:.3f}, {a[1]:.3f}]   B {fit.B:.2f} [{b[0]:.2f}, {b[1]:.2f}]   "
                f"C_mid {fit.C_mid:.2e} [{c[0]:.2e}, {c[1]:.2e}] FLOPs",
                f"            C_max/C_mid {fit.reach:.1f}, residual rms {fit.rms:.4f}; intervals are 95 %",
            ]
            lines += [f"            {warning}" for warning in fit.warnings]
            try:
                held_out = fit_curve.held_out(x, y)
                lines.append(
                    f"forecast    from the first half of the compute {held_out['sigmoid']:.3f}; came"
                    f" {held_out['came']:.3f} (power law {held_out['power_law']:.3f}, last value"
                    f" {held_out['last_value']:.3f})"
                )
            except ValueError as error:
                lines.append(f"forecast    none from the first half: {error}")
        lines.append(
            f"compute     {last['compute_device_hours']:.3f} device-hours, {last['compute_tokens'] / 1e6:.2f} M sampled"
            f" tokens, {last['compute_flops']:.2e} FLOPs; {time.monotonic() - self.began:.0f} s with start and"
            " validation"
        )
        lines.append(f"idle        {self.balance()}")
        files = sorted(path.name + "/" * path.is_dir() for path in self.folder.iterdir())
        lines.append(f"files       {self.folder}/: {' '.join(files)}")
        return "\n".join(lines)

    def split(self) -> str:
        """Who has which devices, and why."""
        generators, trainers = sum(self.settings.generators, ()), self.settings.trainers
        by_itself = ["auto" in names for names in (self.settings.generator_devices, self.settings.trainer_devices)]
        if not any(by_itself):
            why = "as named"
        elif {*generators} & {*trainers}:
            why = "one does both"
        elif all(by_itself):
            why = "one in five trains, rounded down, as in the paper; to be judged by who waits"
        else:
            why = "what the other side has not named"
        slots = ", ".join(str(generator.slots) for generator in self.generators)
        return f"devices: generators {', '.join(generators)} with {slots} slots; trainer {', '.join(trainers)} ({why})"

    def balance(self) -> str:
        """Who has waited for whom so far, and which split of the devices that speaks for."""
        settings, seconds = self.settings, max(self.compute.seconds, 1e-9)
        generators, trainers = sum(map(len, settings.generators)), len(settings.trainers)
        devices = generators + trainers
        generating = min(1.0, self.busy_seconds / len(settings.generators) / seconds)
        training = max(0.0, 1 - self.waited / seconds)
        each = seconds / max(1, self.step - self.first_step)
        text = (
            f"trainer {1 - training:.2f}, generators {1 - generating:.2f} of the time"
            f" (a step trains for {training * each:.2f} s and samples for {generating * each:.2f} s)"
        )
        if scalerl.parse_asynchrony(settings.recipe.asynchrony)[0] == "ppo":
            return f"{text}; the two take turns"
        if devices == 2 or self.compute.devices < devices:  # there is no other split
            return text
        work = trainers * training + generators * generating
        best = min(max(1, round(devices * trainers * training / max(work, 1e-9))), devices - 1)
        if best == trainers:
            return f"{text}; no other split of {devices} devices balances them better"
        return f"{text}; {devices - best} generator and {best} trainer devices would balance them better"

    def save_curve(self) -> None:
        """curve.png, if there is a fit."""
        fits = {column: fit for column in self.columns if (fit := self.fit(column)) is not None}
        pairs = [(read_log(self.folder, y=column)[0], fit) for column, fit in fits.items()]
        if len(pairs) == 1:
            plot_runs(self.folder / "curve.png", pairs)
        elif pairs:
            pairs = [(dataclasses.replace(series, name=series.y_name), fit) for series, fit in pairs]
            plot_runs(self.folder / "curve.png", pairs)


def say(text: str) -> None:
    """Print above the progress bar."""
    tqdm.write(text, file=sys.stderr)


def group_as_json(group: Group) -> dict:
    """A group in numbers, for inspection."""
    completions = [
        {
            "tokens": rollout.tokens.tolist(),
            "sampled": rollout.sampled.tolist(),
            "generator_logprobs": [float(value) if np.isfinite(value) else str(value) for value in rollout.logprobs],
            "versions": rollout.versions.tolist(),
            "correct": group.verdicts[index].correct,
        }
        for index, rollout in sorted(group.rollouts.items())
    ]
    return {"prompt": group.requests[0].prompt, "completions": completions}


def prepare(settings: Settings) -> Run:
    """Check everything that can be checked before a process is started, make the run's folder or open it again."""
    check_settings(settings)
    sources = load_data(settings.data, settings.train_prompts, settings.validation_problems)
    for source in sources:
        for note in source.notes:
            print(f"{source.name}: {note}", file=sys.stderr)
    if settings.prompts > sum(len(source.train) for source in sources):
        raise ValueError(
            f"a step takes {settings.prompts} prompts, but there are {sum(len(s.train) for s in sources)} to train on"
            f" (--train-prompts {settings.train_prompts}): lower --prompts-per-step"
        )
    folder = settings.resume or run_folder(settings)
    lock = lock_folder(folder) if settings.resume else None
    checkpoint = newest_checkpoint(folder) if settings.resume else None
    tokenizer = generate.load_tokenizer(settings.model)
    decoding = generate.make_decoding(
        tokenizer,
        settings.recipe,
        settings.prompt_budget,
        settings.thinking_budget[1],
        settings.answer_budget,
        settings.end_of_thinking,
        settings.interruption_phrase,
        settings.thinking,
    )
    source = str(checkpoint / "model") if checkpoint else settings.model
    model = load_for_trainer(settings, source, rank=0)
    generate.check_length(model, decoding)
    for devices in settings.generators:
        generate.check_tensor_parallel(generate.choose_engine(settings.engine, devices[0]), len(devices), model)
    if settings.defaults == "paper":
        print("The settings start from the paper's (--defaults paper); config.json has them all.", file=sys.stderr)
    run = Run(settings, folder, tokenizer, decoding, sources)
    run.render_prompts()
    folder.mkdir(parents=True, exist_ok=True)
    run.lock = lock or lock_folder(folder)
    run.take(start_trainer(settings, model, source, checkpoint / "optimizer.safetensors" if checkpoint else None))
    if settings.resume:
        run.restore(checkpoint)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["python"] = platform.python_version()
    stored = dataclasses.asdict(dataclasses.replace(settings, resume=None))
    write_whole(folder / "config.json", json.dumps({**stored, "versions": versions}, indent=2) + "\n")
    return run


# --- a study: many runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """Train several settings over seeds, each run in a process of its own, and make the tables and figures of them
    all (fit_curve.py --compare). Every other flag of train.py applies to each run. What is finished is not trained
    again, and what was interrupted goes on: after a Ctrl-C or a failure give the same command again."""

    study: str  # loo, recipes, asynchrony, or a JSON file of settings: {"NAME": {"learning_rate": 4e-4, ...}, ...}
    seeds: tuple[int, ...] = (0, 1, 2)  # each setting is trained with each
    jobs: int = 1  # runs at once, which share the cores
    name: str | None = None  # the folder is runs/NAME, with a folder SETTING-seedN a run; by default named as the study


# What each setting of a study changes: fields of Settings or of its Recipe.
STUDIES = {
    "loo": {"scalerl": {}, **{f"without-{axis}": {"leave_out": axis} for axis in scalerl.Axis.__args__}},
    "recipes": {recipe: {"recipe": recipe} for recipe in scalerl.RECIPES},
    "asynchrony": {
        value: {"asynchrony": value}
        for value in ("pipeline-1", "pipeline-4", "pipeline-8", "pipeline-16", "ppo-1", "ppo-8")
    },
}


def read_study(study: str) -> dict[str, dict]:
    """What each setting of a study changes. ValueError, naming setting and field, if it is not a study."""
    if study in STUDIES:
        return STUDIES[study]
    try:
        changes = json.loads(Path(study).read_text())
    except OSError as error:
        raise ValueError(f"--study {study}: neither {', '.join(STUDIES)} nor a file ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"--study {study}: the file is not JSON: {error}") from None
    if not (isinstance(changes, dict) and changes and all(isinstance(values, dict) for values in changes.values())):
        raise ValueError(f'--study {study}: the file must hold {{"NAME": {{"field": value, ...}}, ...}}')
    known = {part.name for settings in (Settings, scalerl.Recipe) for part in dataclasses.fields(settings)}
    known -= {"name", "seed", "resume"}  # which the study itself sets
    for setting, values in changes.items():
        if not re.fullmatch(r"[\w.+-]+", setting):
            raise ValueError(f"--study {study}: {setting!r} cannot name a folder: letters, digits, _ . + - only")
        for name in values.keys() - known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it can set {', '.join(sorted(known))}"
            raise ValueError(f"--study {study}: {setting} sets {name!r}, which a study cannot; {hint}")
    return changes


def flags(values: dict) -> list[str]:
    """The command-line flags that set these fields."""
    arguments = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return arguments


def plan_study(study: Study, common: list[str]) -> dict[Path, tuple[Settings, list[str]]]:
    """The runs of a study, first all settings with the first seed: by folder their settings, and the flags of
    train.py that give them. ValueError, before anything is started, if one cannot be or is another run already."""
    for flag in ("--seed", "--resume"):
        if any(argument.split("=")[0] == flag for argument in common):
            raise ValueError(f"{flag} is for one run: a study has --seeds, and goes on by itself")
    if study.jobs < 1 or not study.seeds:
        raise ValueError("--jobs must be at least 1, and --seeds must name one seed at least")
    name, settings, arguments = study.name or Path(study.study).stem, {}, {}
    for setting, changes in read_study(study.study).items():
        arguments[setting] = ["--keep-checkpoints", "1", *common, *flags(changes)]
        try:
            settings[setting] = parse_settings(arguments[setting])
            check_settings(settings[setting])
        except ValueError as error:
            raise ValueError(f"setting {setting!r} of --study {study.study}: {error}") from None
        except SystemExit:  # the parser has said what is wrong
            print(f"error: that was the setting {setting!r} of --study {study.study}", file=sys.stderr)
            raise
    alike = {}  # setting by what it trains
    for setting, its in settings.items():
        key = repr(dataclasses.replace(its, recipe=dataclasses.replace(its.recipe, recipe="scalerl", leave_out=None)))
        if alike.setdefault(key, setting) != setting:
            raise ValueError(f"--study {study.study}: {alike[key]!r} and {setting!r} would be the same runs twice")
    runs = {}
    for seed in study.seeds:
        for setting in settings:
            run = dataclasses.replace(settings[setting], name=f"{name}/{setting}-seed{seed}", seed=seed)
            folder = Path("runs") / run.name
            if (folder / "config.json").exists():
                try:
                    refuse_changes(read_settings(folder), run)
                except ValueError as error:
                    raise ValueError(f"{folder} holds another run; choose another --name. {error}") from None
            threads = run.threads or max(1, cpu_threads(run) // study.jobs)
            own = ["--name", run.name, "--seed", str(seed), "--threads", str(threads)]
            runs[folder] = run, arguments[setting] + own
    return runs


def last_line(folder: Path) -> dict:
    """The newest line in the log of a run, which may be writing it; {} if there is none."""
    try:
        lines = (folder / "log.jsonl").read_text().split("\n")[:-1]
    except OSError:
        lines = []
    return json.loads(lines[-1]) if lines else {}


def finished(folder: Path, settings: Settings) -> bool:
    """Whether the run in this folder has come to its end, and would have with these settings."""
    if last_line(folder).get("kind") != "end":
        return False
    before = read_settings(folder)
    return (before.steps, before.stop_when_gain_below) == (settings.steps, settings.stop_when_gain_below)


def start_run(folder: Path, arguments: list[str]) -> subprocess.Popen:
    """A run of a study in a process of its own, which goes on if it was interrupted; its output is in FOLDER.txt.
    Signals of the terminal do not reach it; when the study dies, it stops as if by Ctrl-C."""
    resume = ["--resume", str(folder)] if (folder / "config.json").exists() else []
    with open(f"{folder}.txt", "a") as output:
        return subprocess.Popen(
            [sys.executable, __file__, *arguments, *resume],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TQDM_DISABLE": "1"},
            start_new_session=True,
            preexec_fn=functools.partial(die_with, os.getpid(), signal.SIGINT),
        )


def run_study(arguments: list[str]) -> int:
    """The command of a study. Returns the exit status: 0; 1 if a run failed; 130 after Ctrl-C, 143 after SIGTERM."""
    study, common = tyro.cli(Study, args=arguments, return_unknown_args=True)
    runs = plan_study(study, common)
    folder = next(iter(runs)).parent
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)  # held until this function ends
    done = {path for path, (settings, _) in runs.items() if finished(path, settings)}
    waiting = [path for path in runs if path not in done]
    running: dict[Path, subprocess.Popen] = {}
    failed: dict[Path, int] = {}  # exit status
    asked: list[int] = []  # signals to stop, each of which is passed on once
    told = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))

    def steps_made() -> int:  # a run that has ended has no more to make, whatever ended it
        return sum(
            settings.steps if path in done or path in failed else min(last_line(path).get("step", 0), settings.steps)
            for path, (settings, _) in runs.items()
        )

    total = sum(settings.steps for settings, _ in runs.values())
    with tqdm(total=total, initial=steps_made(), desc=folder.name, unit="step", dynamic_ncols=True) as bar:
        while running or (waiting and not asked):
            while waiting and not asked and len(running) < study.jobs:
                path = waiting.pop(0)
                running[path] = start_run(path, runs[path][1])
            for number in asked[told:]:
                told += 1
                say("Stopping the runs, each with a checkpoint." if told == 1 else "Stopping the runs at once.")
                for process in running.values():
                    process.send_signal(number)
            time.sleep(0.5)
            for path in [path for path, process in running.items() if process.poll() is not None]:
                status = running.pop(path).returncode
                if status == 0:
                    done.add(path)
                elif not asked:
                    failed[path] = status
                    say(f"{path} failed with status {status}; its output is in {path}.txt")
            bar.n = steps_made()
            bar.set_postfix_str(
                f"{len(done)} of {len(runs)} runs done" + f", {len(failed)} failed" * bool(failed)
                + f"; now {', '.join(path.name for path in running)}" * bool(running)
            )
    lock.close()
    if asked:
        print(f"\nstopped by {signal.Signals(asked[0]).name}; the same command goes on", file=sys.stderr)
        return 128 + asked[0]
    unmade = fit_curve.main(["--compare", str(folder)])
    for path, status in failed.items():
        last = Path(f"{path}.txt").read_text().strip().rpartition("\n")[2]
        print(f"error: {path} failed with status {status}: {last} ({path}.txt has all)", file=sys.stderr)
    return 1 if failed or unmade else 0


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status: 0; 1 after a failure; 2 for wrong settings; 130 after Ctrl-C, 143 after
    SIGTERM."""
    transformers.utils.logging.disable_progress_bar()
    try:
        if any(argument.split("=")[0] == "--study" for argument in arguments):
            return run_study(arguments)
        settings = parse_settings(arguments)
        run = prepare(settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: the run's folder cannot be written: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        return 130
    torch.set_num_threads(cpu_threads(settings))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, run.on_signal)
    status, trainer_lives = 0, True
    try:
        try:
            run.train()
        except Stopped as stopped:
            print(f"\nstopped by {stopped}", file=sys.stderr)
            status = 128 + run.stopped_by
        except (GeneratorFailed, NotFinite) as error:
            print(f"\nerror: {error}", file=sys.stderr)
            status = 1
        if run.validations:
            run.finish()
            if status:
                print(run.last_checkpoint(), file=sys.stderr)
        elif settings.resume is None:  # nothing has happened yet: the name stays free
            shutil.rmtree(run.folder)
    except KeyboardInterrupt:
        print(f"\nstopped at once; {run.last_checkpoint()}", file=sys.stderr)
        status, trainer_lives = 128 + run.stopped_by, False
    except TrainerFailed as error:
        print(f"\nerror: {error}; {run.last_checkpoint()}", file=sys.stderr)
        status, trainer_lives = 1, False
    except torch.OutOfMemoryError as error:
        text = str(error).partition(". ")[0]
        advice = "lower --tokens-per-micro-batch, or add --gradient-checkpointing or --trainer-devices"
        if {*settings.trainers} & {*sum(settings.generators, ())}:
            advice += ", or lower --slots or --generator-memory, which this device has to hold too"
        print(f"\nerror: {text}: {advice}; {run.last_checkpoint()}", file=sys.stderr)
        status, trainer_lives = 1, False
    except OSError as error:
        print(f"\nerror: the run's folder cannot be written: {error}; {run.last_checkpoint()}", file=sys.stderr)
        status = 1
    if trainer_lives:
        run.trainer.stop()
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:  # whatever has happened: these processes do not heed SIGTERM, which Python would send them and then wait
        for child in multiprocessing.active_children():
            child.kill()
