"""Train a language model with the ScaleRL recipe, and see its curve.

    python train.py                                            # the default task, on two CPU cores
    python train.py --recipe base --seed 1                     # another recipe of the study
    python train.py --leave-out fp32_logits                    # ScaleRL but for one axis
    python train.py --loss gspo --advantage-norm none          # any part on its own
    python train.py --trainer-device cuda:0 --generator-devices cuda:1 cuda:2

What happens, in the order of this file:

    problems (data/) -> prompts handed out to the generators (generate.py), at most k steps ahead
      -> groups of finished rollouts come back, are judged by their task (data/)
      -> a batch of groups gets advantages and token weights, and is trained on (loss.py)
      -> the new parameters go to the generators at once, which go on with what they have begun
      -> every few steps held-out problems are sampled with the parameters of that step alone
      -> at the end the sigmoid of the paper is fitted to those pass rates (fit_curve.py)

The trainer is this process; each generator is a process of its own, with two queues: Work goes, Reports come.
Version v of the parameters is what v optimizer steps have made; step s trains version s and makes s + 1.

Dimensions: P prompts in a batch, G completions per prompt, B sequences in a micro-batch, T tokens, N tokens.
"""

import argparse
import dataclasses
import json
import os
import platform
import queue
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
import transformers
import tyro
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import fit_curve
import generate
import loss as scalerl
from data import Problem, load_task
from generate import Decoding, Report, Request, Rollout, SharedParameters, Work

# --- settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Train a language model with the ScaleRL recipe. The defaults suit the arithmetic task on two CPU cores."""

    recipe: tyro.conf.OmitArgPrefixes[scalerl.Recipe] = scalerl.Recipe()
    model: str = "data/arithmetic_base"  # folder or hub name of a transformers causal LM
    data: str = "arithmetic"  # task: a module of data/
    name: str | None = None  # the run's folder is runs/NAME; by default recipe, changed parts and seed, numbered if taken
    seed: int = 0  # of prompt order, thinking budgets and sampling; only ppo-1 and pipeline-0 repeat themselves exactly

    steps: int = 160  # optimizer steps
    train_prompts: int = 4000  # distinct prompts, visited in epochs
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

    validation_every: int = 8  # steps
    validation_problems: int = 128  # held out, the same each time
    validation_samples: int = 16  # completions of each: the pass rate is mean@this

    engine: Literal["auto", "torch", "vllm"] = "auto"  # of the generators; auto: vLLM where there is one and a GPU
    tensor_parallel: int = 1  # devices of one generator, which vLLM splits the model over
    generator_devices: tuple[str, ...] = ("cpu",)  # one generator process each, or each --tensor-parallel in a row
    trainer_device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the trunk; auto: bfloat16 on a GPU, float32 on a CPU
    slots: int = 512  # sequences that a generator decodes at once
    tokens_per_micro_batch: int = 4096  # padded tokens in one forward and backward
    threads: int = 0  # CPU threads of each process; 0: the cores, shared evenly
    wait_timeout: float = 600.0  # seconds without a word from any generator until the run gives up

    @property
    def prompts(self) -> int:
        """Groups in a batch, with the recipe's factor."""
        return round(self.prompts_per_step * self.recipe.batch_factor)


def parse_settings(arguments: list[str]) -> Settings:
    """Settings from command-line flags. --recipe and --leave-out set the parts that the other flags then change."""
    start = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    start.add_argument("--recipe", default="scalerl")
    start.add_argument("--leave-out", "--leave_out", default=None)
    chosen, _ = start.parse_known_args(arguments)
    recipe = scalerl.RECIPES.get(chosen.recipe, scalerl.Recipe())  # tyro refuses an unknown name below
    if chosen.leave_out in scalerl.Axis.__args__:
        if chosen.recipe != "scalerl":
            raise ValueError(f"--leave-out takes an axis out of scalerl; it cannot go with --recipe {chosen.recipe}")
        recipe = scalerl.leave_one_out(chosen.leave_out)
    return tyro.cli(Settings, args=arguments, default=Settings(recipe=recipe), description=__doc__)


def check_settings(settings: Settings) -> None:
    """ValueError, naming the flag, for values that cannot be."""
    scalerl.parse_asynchrony(settings.recipe.asynchrony)
    least = dict(
        steps=1, prompts_per_step=1, completions_per_prompt=2, train_prompts=1, warmup_steps=0, validation_every=1,
        validation_problems=1, validation_samples=1, slots=1, tokens_per_micro_batch=1, threads=0, tensor_parallel=1,
    )  # fmt: skip
    for name, minimum in least.items():
        if getattr(settings, name) < minimum:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is {getattr(settings, name)}; it must be at least {minimum}")
    for name in ("learning_rate", "adam_eps", "clip_gradient", "wait_timeout"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(settings, name)}; it must be above 0")
    if not 0 <= settings.thinking_budget[0] <= settings.thinking_budget[1]:
        raise ValueError(f"--thinking-budget is a range LOW HIGH with 0 <= LOW <= HIGH, not {settings.thinking_budget}")
    if not settings.generator_devices:
        raise ValueError("--generator-devices names no device; at least one is needed")
    if len(settings.generator_devices) % settings.tensor_parallel:
        raise ValueError(
            f"--generator-devices names {len(settings.generator_devices)} devices, which cannot be dealt out"
            f" {settings.tensor_parallel} to a generator (--tensor-parallel)"
        )
    if settings.prompts > settings.train_prompts:
        raise ValueError(f"a step takes {settings.prompts} prompts, but --train-prompts is {settings.train_prompts}")


def run_folder(settings: Settings) -> Path:
    """The folder of this run, not made yet. ValueError if it holds something."""
    if settings.name is not None:
        folder = Path("runs") / settings.name
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
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
        self.pass_rates: dict[int, float] = {}  # of each prompt at its last visit
        self.retired: set[int] = set()

    def shuffled(self) -> np.ndarray:
        """All prompts in the order of this epoch."""
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.number)

    def next(self) -> int | None:
        """The index of the next prompt; None when every prompt has been retired."""
        while len(self.retired) < self.number:
            while self.cursor < self.number:
                prompt = int(self.order[self.cursor])
                self.cursor += 1
                if prompt not in self.retired:
                    return prompt
            self.epoch, self.cursor = self.epoch + 1, 0
            self.order = self.shuffled()
        return None

    def record(self, prompt: int, pass_rate: float) -> None:
        self.pass_rates[prompt] = pass_rate
        if self.no_positive_resampling and scalerl.retires(pass_rate):
            self.retired.add(prompt)


@dataclass
class Group:
    """The completions of one prompt at one visit, from when it is handed out until it is trained on."""

    number: int  # unique in the run, in the order of handing out
    prompt: int  # index of the training problem
    version: int  # of the parameters when it was handed out: none of its tokens is older
    generator: int
    rollouts: list[Rollout] = field(default_factory=list)  # as they come back
    correct: list[bool] = field(default_factory=list)  # the task's verdict on each


# --- generators ---------------------------------------------------------------------------------------------------


class GeneratorFailed(Exception):
    """A generator has ended by itself: the message holds its traceback, signal or exit status."""


@dataclass
class Generator:
    """The trainer's side of one generator process."""

    number: int
    device: str
    process: multiprocessing.Process
    work: multiprocessing.Queue
    reports: multiprocessing.Queue
    groups: int = 0  # handed out to it and not finished
    last: Report | None = None  # newest counters


def start_generators(settings: Settings, decoding: Decoding, parameters: SharedParameters) -> list[Generator]:
    """Start a process for each generator device and wait until all are ready."""
    context = multiprocessing.get_context("spawn")
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the trainer, from the first moment
    generators = []
    each = settings.tensor_parallel
    for number in range(len(settings.generator_devices) // each):
        devices = settings.generator_devices[number * each : (number + 1) * each]
        device, dtype = ",".join(devices), trunk_dtype(settings, devices[0])
        engine = generate.choose_engine(settings.engine, devices[0])
        work, reports = context.Queue(), context.Queue()
        own = generate.GeneratorSettings(
            settings.model, devices, dtype, cpu_threads(settings), settings.slots, decoding, engine
        )
        process = context.Process(
            target=generate.generator_process,
            args=(number, own, parameters, work, reports),
            name=f"generator {number} on {device}",
            daemon=each == 1,  # a daemon may have no processes of its own, which vLLM has for several devices
        )
        process.start()
        # Only the generator writes here, so when it dies in the middle of a message the reader meets an end of file
        # instead of waiting for the rest for ever.
        reports._writer.close()
        generators.append(Generator(number, device, process, work, reports))
    signal.signal(signal.SIGINT, handler)
    while any(generator.last is None for generator in generators):
        wait_for_reports(generators, settings.wait_timeout)
    return generators


def take_reports(generators: list[Generator]) -> list[Report]:
    """All reports there are now. GeneratorFailed if a generator has died."""
    reports = []
    for generator in generators:
        alive = generator.process.is_alive()  # asked first, so that what it sent before it died is still read
        while True:
            try:
                report = generator.reports.get_nowait()
            except queue.Empty:
                break
            except EOFError:
                generator.process.join()
                alive = False
                break
            if report.error is not None:
                raise GeneratorFailed(f"{generator.process.name} failed:\n{report.error}")
            generator.last = report
            reports.append(report)
        if not alive:
            code = generator.process.exitcode
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            raise GeneratorFailed(f"{generator.process.name} ended {how}, without a word")
    return reports


def wait_for_reports(generators: list[Generator], timeout: float) -> list[Report]:
    """At least one report. TimeoutError after `timeout` seconds of silence; GeneratorFailed if one has died."""
    deadline = time.monotonic() + timeout
    while not (reports := take_reports(generators)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no generator has sent anything for {timeout:.0f} s (--wait-timeout), though all live")
        time.sleep(0.002)
    return reports


def stop_generators(generators: list[Generator], timeout: float = 5.0) -> None:
    """Ask all to end; end those that do not within `timeout` seconds."""
    for generator in generators:
        generator.work.put(Work(stop=True))
    deadline = time.monotonic() + timeout
    for generator in generators:
        generator.process.join(max(0.0, deadline - time.monotonic()))
        if generator.process.is_alive():
            generator.process.kill()
            generator.process.join()
        for end in (generator.work, generator.reports):
            end.cancel_join_thread()
            end.close()


def cpu_threads(settings: Settings) -> int:
    processes = len(settings.generator_devices) + 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return settings.threads or max(1, cores // processes)


def trunk_dtype(settings: Settings, device: str) -> str:
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device.startswith("cpu") else "bfloat16"


# --- one optimizer step -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """Sequences padded on the right, where a causal model never looks. Frames are shifted: entry t of the tensors
    [B, T] belongs to the target token t + 1 of the sequence, prompt included."""

    inputs_BT: Tensor  # int64: tokens fed
    targets_BT: Tensor  # int64: tokens predicted
    sampled_BT: Tensor  # bool: the target was sampled (not prompt, not forced, not padding)
    generator_logprobs_BT: Tensor  # float32: log pi_gen of the target, recorded when it was sampled
    rows_B: Tensor  # int64: which of the batch's rollouts each sequence is


def micro_batches(rollouts: list[Rollout], tokens: int, device: torch.device) -> list[MicroBatch]:
    """Cut rollouts into micro-batches of at most `tokens` padded tokens (or one sequence), similar lengths together."""
    lengths = [len(rollout.request.prompt) + len(rollout.tokens) for rollout in rollouts]
    longest_first = sorted(range(len(rollouts)), key=lambda row: -lengths[row])
    batches = []
    while longest_first:
        width = lengths[longest_first[0]]
        rows, longest_first = longest_first[: max(1, tokens // width)], longest_first[max(1, tokens // width) :]
        ids = np.zeros((len(rows), width), np.int64)
        sampled = np.zeros((len(rows), width), bool)
        logprobs = np.zeros((len(rows), width), np.float32)
        for i, rollout in enumerate(rollouts[row] for row in rows):
            prompt, end = len(rollout.request.prompt), lengths[rows[i]]
            ids[i, :prompt] = rollout.request.prompt
            ids[i, prompt:end] = rollout.tokens
            sampled[i, prompt:end] = rollout.sampled
            logprobs[i, prompt:end] = rollout.logprobs
        ids_BL, sampled_BL, logprobs_BL = (torch.from_numpy(array).to(device) for array in (ids, sampled, logprobs))
        batches.append(
            MicroBatch(
                inputs_BT=ids_BL[:, :-1],
                targets_BT=ids_BL[:, 1:],
                sampled_BT=sampled_BL[:, 1:],
                generator_logprobs_BT=logprobs_BL[:, 1:],
                rows_B=torch.tensor(rows, device=device),
            )
        )
    return batches


def policy_logprobs(
    model: PreTrainedModel, batch: MicroBatch, settings: Settings
) -> tuple[Tensor, Tensor]:
    """log pi_train of the sampled targets [B, T] (0 elsewhere; differentiable) and the entropies there [N].

    The parameters are fp32; a trunk in bf16 computes with a bf16 copy of them, as the generator does.
    """
    trunk, dtype = model.base_model, getattr(torch, trunk_dtype(settings, str(model.device)))
    parameters = {name: parameter.to(dtype) for name, parameter in trunk.named_parameters()}
    inputs = dict(input_ids=batch.inputs_BT, use_cache=False)
    hidden_BTD = torch.func.functional_call(trunk, parameters, kwargs=inputs).last_hidden_state
    logprobs_N, entropies_N = scalerl.sampled_logprobs(
        hidden_BTD[batch.sampled_BT],
        model.get_output_embeddings().weight,
        batch.targets_BT[batch.sampled_BT],
        settings.recipe.fp32_logits,
    )
    logprobs_BT = torch.zeros(batch.sampled_BT.shape, device=logprobs_N.device)
    return logprobs_BT.masked_scatter(batch.sampled_BT, logprobs_N), entropies_N


def train_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, groups: list[Group], step: int, settings: Settings
) -> dict:
    """One optimizer step on a batch of groups; returns the step's metrics, as they are logged."""
    recipe, device = settings.recipe, model.device
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    shape = (len(groups), settings.completions_per_prompt)
    correct_PG = torch.tensor([group.correct for group in groups])
    lengths_PG = torch.tensor([int(rollout.sampled.sum()) for rollout in rollouts]).view(shape)
    usable_PG = ~torch.tensor([rollout.truncated for rollout in rollouts]).view(shape)
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
    totals = {"loss": 0.0, "entropy": 0.0, "ratio": 0.0, "clipped": 0.0, "kl": 0.0}
    ratio_max, tokens = None, 0
    for batch in micro_batches([rollouts[i] for i in counted], settings.tokens_per_micro_batch, device):
        rows_B = counted.to(device)[batch.rows_B]
        logprobs_BT, entropies_N = policy_logprobs(model, batch, settings)
        loss, sums = scalerl.policy_loss(
            recipe, logprobs_BT, batch.generator_logprobs_BT, batch.sampled_BT, advantages_N[rows_B], weights_N[rows_B]
        )
        loss.backward()
        ratio_max = max(ratio_max or 0.0, sums.pop("ratio_max").item())
        for name, value in {"loss": loss, "entropy": entropies_N.sum(), **sums}.items():
            totals[name] += value.item()
        tokens += int(batch.sampled_BT.sum())
    gradient_norm = 0.0
    if tokens:
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_gradient).item()
        optimizer.step()
        optimizer.zero_grad()

    ages = step - np.concatenate([rollout.versions[rollout.sampled] for rollout in rollouts])
    per_token = {name: totals[name] / tokens if tokens else None for name in ("entropy", "ratio", "clipped", "kl")}
    return {
        "pass_rate": correct_PG.float().mean().item(),
        "loss": totals["loss"],
        "gradient_norm": gradient_norm,
        "learning_rate": optimizer.param_groups[0]["lr"],
        "reward_mean": rewards_PG.mean().item(),
        "off_policyness_mean": float(ages.mean()),
        "off_policyness_max": int(ages.max()),
        "ratio_mean": per_token["ratio"],
        "ratio_max": ratio_max,
        "clipped_fraction": per_token["clipped"],
        "kl_estimate": per_token["kl"],
        "entropy": per_token["entropy"],
        "completion_length": lengths_PG.float().mean().item(),
        "interrupted_fraction": float(np.mean([rollout.interrupted for rollout in rollouts])),
        "truncated_fraction": float(np.mean([rollout.truncated for rollout in rollouts])),
        "zero_variance_fraction": scalerl.zero_variance(rewards_PG, usable_PG).float().mean().item(),
        "trained_tokens": tokens,
    }


@torch.no_grad()
def numerics_mismatch(model: PreTrainedModel, rollouts: list[Rollout], settings: Settings) -> dict[str, float]:
    """Mean and maximum of |log pi_train - log pi_gen| over tokens of rollouts that the model's present parameters
    sampled from first to last: what the ratio is off by although the policy is the same (sec. 3.2, fp32 logits)."""
    differences = []
    for batch in micro_batches(rollouts, settings.tokens_per_micro_batch, model.device):
        logprobs_BT, _ = policy_logprobs(model, batch, settings)
        differences.append((logprobs_BT - batch.generator_logprobs_BT)[batch.sampled_BT].abs())
    differences_N = torch.cat(differences)
    return {"mismatch_mean": differences_N.mean().item(), "mismatch_max": differences_N.max().item()}


# --- compute ------------------------------------------------------------------------------------------------------


@dataclass
class Compute:
    """What training has cost so far, start-up and validation left out (sec. 2.1)."""

    devices: int  # generators and trainer
    parameters: int  # that take part in a token's forward: all but the embedding table
    tokens: int = 0  # sampled, of the groups trained on
    flops: float = 0.0  # 2 x parameters a token forward, 4 x backward; attention over the past left out
    started: float = 0.0  # clock reading at the first step
    paused: float = 0.0  # seconds of validation since then

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started - self.paused

    def add(self, groups: list[Group], trained_tokens: int) -> int:
        """Count a batch: generation of all of it, training of the part that was not filtered out, of which
        trained_tokens is the number of sampled tokens. Returns that number for the whole batch."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
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
            "compute_device_hours": self.seconds * self.devices / 3600,
            "compute_tokens": self.tokens,
            "compute_flops": self.flops,
        }


def matmul_parameters(model: PreTrainedModel) -> int:
    """Parameters that a token is multiplied with: all but the embedding table, unless that is the head too."""
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if embedding is head else total - embedding.numel()


# --- the run ------------------------------------------------------------------------------------------------------


SAMPLED_PROBLEMS = 6  # validation problems shown in samples.txt


class Run:
    """One training run: what is under way, and the loop that moves it on."""

    def __init__(self, settings: Settings, folder: Path, model, tokenizer, decoding: Decoding, task):
        self.settings, self.folder = settings, folder
        self.model, self.tokenizer, self.decoding, self.task = model, tokenizer, decoding, task
        self.problems = task.problems("train", settings.train_prompts)
        self.held_out = task.problems("validation", settings.validation_problems)
        self.prompt_ids: dict[Problem, list[int]] = {}  # with the chat template
        self.order = PromptOrder(len(self.problems), settings.seed, settings.recipe.no_positive_resampling)
        self.under_way: dict[int, Group] = {}  # handed out, not trained on, by number
        self.handed_out = 0
        self.validation_rollouts: list[Rollout] = []
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.adam_betas,
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
        )
        self.compute = Compute(len(settings.generator_devices) + 1, matmul_parameters(model))
        self.validations: list[dict] = []  # the validation lines of the log
        self.samples: dict[int, list[Rollout]] = {}  # of the first and the last validation, by step
        self.began = time.monotonic()
        self.forecast = ""  # for the progress bar, once there is one
        self.warned = False

    def render_prompts(self) -> None:
        """Token ids of all prompts. ValueError for one that is longer than its budget."""
        for problem in self.problems + self.held_out:
            self.prompt_ids[problem] = generate.render(self.tokenizer, problem.prompt)
            length = len(self.prompt_ids[problem])
            if length > self.settings.prompt_budget:
                raise ValueError(
                    f"the prompt {problem.prompt[:60]!r} has {length} tokens with the chat template; --prompt-budget is"
                    f" {self.settings.prompt_budget}"
                )

    def train(self) -> None:
        """All steps, from the first validation to the last."""
        settings, asynchrony = self.settings, self.settings.recipe.asynchrony
        self.parameters = SharedParameters(self.model)
        self.parameters.write(self.model, version=0)
        self.generators = start_generators(settings, self.decoding, self.parameters)
        try:
            self.validate(step=0)
            self.compute.started = time.monotonic()
            self.last_rates = self.counters()
            with tqdm(total=settings.steps, desc="training", unit="step", dynamic_ncols=True) as bar:
                for step in range(settings.steps):
                    self.hand_out(step)
                    waiting = time.monotonic()
                    groups = self.collect(step)
                    waited = time.monotonic() - waiting
                    if groups is None:
                        bar.write(f"Every prompt has been retired (pass rate >= {scalerl.RETIRE_AT}): training ends.")
                        break
                    metrics = train_step(self.model, self.optimizer, groups, step, settings)
                    for group in groups:
                        self.order.record(group.prompt, sum(group.correct) / len(group.correct))
                    if scalerl.publishes_after(asynchrony, step):
                        self.parameters.write(self.model, version=step + 1)
                    if metrics["truncated_fraction"] > scalerl.TRUNCATED_TOO_OFTEN and not self.warned:
                        self.warned = True
                        bar.write(
                            f"warning: {metrics['truncated_fraction']:.0%} of the completions of step {step + 1} reached"
                            " their token limit without ending, and are left out; instabilities often follow above"
                            f" {scalerl.TRUNCATED_TOO_OFTEN:.0%}: raise --answer-budget or --thinking-budget"
                        )
                    batch_tokens = self.compute.add(groups, metrics.pop("trained_tokens"))
                    self.log({"kind": "train", "step": step + 1, **metrics, **self.rates(waited, batch_tokens)})
                    if (step + 1) % settings.validation_every == 0 or step + 1 == settings.steps:
                        self.validate(step + 1)
                    bar.update()
                    bar.set_postfix_str(
                        f"pass rate {self.validations[-1]['pass_rate']:.3f}"
                        f", off-policy {metrics['off_policyness_mean']:.1f}, {self.speeds}{self.forecast}"
                    )
            if self.validations[-1]["step"] < step:
                self.validate(step)
        finally:
            stop_generators(self.generators)

    # Handing out and collecting

    def hand_out(self, step: int) -> None:
        """Give prompts to the generators, as far ahead as the recipe allows and the generators can use."""
        settings, asynchrony = self.settings, self.settings.recipe.asynchrony
        kind, _ = scalerl.parse_asynchrony(asynchrony)
        if kind == "ppo" and self.under_way:
            return
        ahead = scalerl.groups_ahead(asynchrony, settings.prompts)
        # What a generator cannot begin before it hears from us again would only grow old in its queue.
        useful = settings.slots // settings.completions_per_prompt + settings.prompts // len(self.generators) + 1
        requests: list[list[Request]] = [[] for _ in self.generators]
        while len(self.under_way) < ahead:
            generator = min(self.generators, key=lambda generator: generator.groups)
            if kind == "pipeline" and generator.groups >= useful:
                break
            prompt = self.order.next()
            if prompt is None:
                break
            number = self.handed_out
            self.handed_out += 1
            generator.groups += 1
            self.under_way[number] = Group(number, prompt, step, generator.number)
            requests[generator.number] += self.requests(
                self.problems[prompt], number, settings.completions_per_prompt, seed=(settings.seed, 0, number)
            )
        for generator, wanted in zip(self.generators, requests):
            if wanted:
                generator.work.put(Work(wanted))

    def requests(self, problem: Problem, group: int, completions: int, seed: tuple[int, ...]) -> list[Request]:
        """Requests for the completions of one problem, each with its own thinking budget and noise."""
        low, high = self.settings.thinking_budget
        if self.decoding.length_control == "penalty":
            low = high
        budgets = np.random.default_rng(seed).integers(low, high, size=completions, endpoint=True)
        prompt = self.prompt_ids[problem]
        return [Request(group, i, prompt, int(budget), (*seed, i)) for i, budget in enumerate(budgets)]

    def receive(self, reports: list[Report]) -> None:
        """Put rollouts in their groups, judged by the task."""
        for report in reports:
            if report.validation:
                self.validation_rollouts += report.rollouts
                continue
            for rollout in report.rollouts:
                group = self.under_way[rollout.request.group]
                group.rollouts.append(rollout)
                group.correct.append(self.is_correct(self.problems[group.prompt], rollout))
                if len(group.rollouts) == self.settings.completions_per_prompt:
                    order = sorted(range(len(group.rollouts)), key=lambda i: group.rollouts[i].request.index)
                    group.rollouts = [group.rollouts[i] for i in order]
                    group.correct = [group.correct[i] for i in order]
                    self.generators[group.generator].groups -= 1

    def is_correct(self, problem: Problem, rollout: Rollout) -> bool:
        return generate.is_correct(self.task, self.tokenizer, self.decoding, problem, rollout)

    def collect(self, step: int) -> list[Group] | None:
        """Wait until the recipe has a batch for this step, and take it; None if there will never be one."""
        self.receive(take_reports(self.generators))
        while True:
            complete = self.settings.completions_per_prompt
            done = [group for group in self.under_way.values() if len(group.rollouts) == complete]
            unfinished = [group for group in self.under_way.values() if len(group.rollouts) < complete]
            batch = scalerl.choose_batch(
                [group.version for group in done],
                [group.version for group in unfinished],
                step,
                self.settings.recipe.asynchrony,
                self.settings.prompts,
            )
            if batch is not None:
                return [self.under_way.pop(done[i].number) for i in batch]
            if not unfinished:
                return None
            self.receive(wait_for_reports(self.generators, self.settings.wait_timeout))
            self.hand_out(step)

    # Validation, and what is written down

    def validate(self, step: int) -> None:
        """Sample the held-out problems with the parameters of this step alone; training waits, its clock stands."""
        paused = time.monotonic()
        compute = self.compute.columns() if step else dict.fromkeys(self.compute.columns(), 0)
        if self.parameters.version < step:  # PPO-off-policy publishes every k-th version only
            self.parameters.write(self.model, version=step)
        samples = self.settings.validation_samples
        requests = [
            request
            for i, problem in enumerate(self.held_out)
            for request in self.requests(problem, i, samples, seed=(self.settings.seed, 1, step, i))
        ]
        for i, generator in enumerate(self.generators):
            generator.work.put(Work(requests[i :: len(self.generators)], validation=True))
        while len(self.validation_rollouts) < len(requests):
            self.receive(wait_for_reports(self.generators, self.settings.wait_timeout))
        rollouts = sorted(self.validation_rollouts, key=lambda r: (r.request.group, r.request.index))
        self.validation_rollouts = []
        line = {
            "kind": "validation",
            "step": step,
            "pass_rate": float(np.mean([self.is_correct(self.held_out[r.request.group], r) for r in rollouts])),
            "num_examples": len(rollouts),
            "completion_length": float(np.mean([r.sampled.sum() for r in rollouts])),
            "interrupted_fraction": float(np.mean([r.interrupted for r in rollouts])),
            "truncated_fraction": float(np.mean([r.truncated for r in rollouts])),
            **numerics_mismatch(self.model, rollouts[:: max(1, len(rollouts) // 64)], self.settings),
            **compute,
        }
        shown = rollouts[: SAMPLED_PROBLEMS * samples]
        self.samples = {**dict(list(self.samples.items())[:1]), step: shown}  # the first and this one
        self.validations.append(line)
        self.log(line)
        self.refresh_forecast()
        self.compute.paused += time.monotonic() - paused if step else 0.0

    def log(self, line: dict) -> None:
        """Add a line to log.jsonl, on disk at once."""
        line["wall_seconds"] = time.monotonic() - self.began
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def counters(self) -> dict:
        """The training clock and the generators' counters now."""
        last = [generator.last for generator in self.generators]
        return {
            "seconds": self.compute.seconds,
            "busy": sum(report.busy_seconds for report in last),
            "tokens": sum(report.sampled_tokens for report in last),
        }

    def rates(self, waited: float, batch_tokens: int) -> dict:
        """Log columns of what has happened since they were last asked for, validation left out; batch_tokens: sampled
        tokens of the batch trained on, filtered groups included."""
        now = self.counters()
        change = {name: value - self.last_rates[name] for name, value in now.items()}
        self.last_rates = now
        working = max(change["seconds"] - waited, 1e-9)
        busy = change["busy"] / len(self.generators)
        sampled_per_second = change["tokens"] / busy if busy else None
        self.speeds = f"tokens/s {sampled_per_second or 0:,.0f} sampled {batch_tokens / working:,.0f} trained"
        return {
            "trainer_idle_fraction": waited / change["seconds"],
            "generator_idle_fraction": max(0.0, 1 - busy / change["seconds"]),
            "generator_tokens_per_second": sampled_per_second,
            "trainer_tokens_per_second": batch_tokens / working,
            "prompts_retired": len(self.order.retired),
            "epoch": self.order.epoch,
            **self.compute.columns(),
        }

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute (FLOPs, which no other load on the machine disturbs) and pass rate of all validations so far."""
        return (
            np.array([line["compute_flops"] for line in self.validations]),
            np.array([line["pass_rate"] for line in self.validations]),
        )

    def fit(self) -> fit_curve.Fit | None:
        """The sigmoid through the validations so far; None while there are too few or nothing has moved."""
        try:
            return fit_curve.fit(*self.curve(), num_examples=self.validations[-1]["num_examples"])
        except ValueError:
            return None

    def refresh_forecast(self) -> None:
        fit = self.fit() if len(self.validations) > 6 else None
        if fit is None:
            return
        low, high = fit.interval["A"]
        self.forecast = f", A {fit.A:.2f} [{low:.2f}, {high:.2f}]" if fit.identified else f", A > {low:.2f}"

    def save_model(self) -> None:
        """The newest parameters, as a folder that transformers and generate.py load; whole or not at all."""
        target, partial = self.folder / "model", self.folder / "model.partial"
        shutil.rmtree(partial, ignore_errors=True)
        self.model.save_pretrained(partial)
        self.tokenizer.save_pretrained(partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    def save_samples(self, samples: int = 2) -> None:
        """samples.txt: the same validation problems at the first and at the last validation."""
        text = "Forced tokens stand in [[ ]]. Of each problem the first completions of a validation, not picked.\n"
        for i, problem in enumerate(self.held_out[:SAMPLED_PROBLEMS]):
            text += f"\n=== {problem.prompt}   (answer: {problem.answer})\n"
            for step, rollouts in self.samples.items():
                for rollout in [r for r in rollouts if r.request.group == i][:samples]:
                    verdict = "right" if self.is_correct(problem, rollout) else "wrong"
                    text += f"step {step:4d}  {verdict}{', truncated' if rollout.truncated else ''}:  "
                    text += generate.marked_text(self.tokenizer, rollout) + "\n"
        write_whole(self.folder / "samples.txt", text)

    def summary(self) -> str:
        """The screen at the end."""
        first, last = self.validations[0], self.validations[-1]
        mean_at = f"mean@{self.settings.validation_samples} of {len(self.held_out)} held-out problems"
        lines = [
            f"pass rate   {first['pass_rate']:.3f} before, {last['pass_rate']:.3f} after {last['step']} steps ({mean_at})",
            f"compute     {last['compute_device_hours']:.3f} device-hours, {last['compute_tokens'] / 1e6:.2f} M sampled"
            f" tokens, {last['compute_flops']:.2e} FLOPs; {time.monotonic() - self.began:.0f} s with start and validation",
        ]
        fit = self.fit()
        if fit is None:
            lines.append("curve       too few validations for a fit")
        else:
            a, b, c = (fit.interval[name] for name in ("A", "B", "C_mid"))
            lines += [
                f"curve       A {fit.A:.3f} [{a[0]:.3f}, {a[1]:.3f}]   B {fit.B:.2f} [{b[0]:.2f}, {b[1]:.2f}]   "
                f"C_mid {fit.C_mid:.2e} [{c[0]:.2e}, {c[1]:.2e}] FLOPs",
                f"            C_max/C_mid {fit.reach:.1f}, residual rms {fit.rms:.4f}; intervals are 95 %",
            ]
            lines += [f"            {warning}" for warning in fit.warnings]
            try:
                held_out = fit_curve.held_out(*self.curve())
                lines.append(
                    f"forecast    from the first half of the compute {held_out['sigmoid']:.3f}; came"
                    f" {held_out['came']:.3f} (power law {held_out['power_law']:.3f}, last value"
                    f" {held_out['last_value']:.3f})"
                )
            except ValueError as error:
                lines.append(f"forecast    none from the first half: {error}")
        files = sorted(path.name + "/" * path.is_dir() for path in self.folder.iterdir())
        lines.append(f"files       {self.folder}/: {' '.join(files)}")
        return "\n".join(lines)

    def save_curve(self) -> None:
        """curve.png, if there is a fit."""
        fit = self.fit()
        if fit is not None:
            fit_curve.plot_run(self.folder / "curve.png", fit_curve.read_log(self.folder)[0], fit)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def prepare(settings: Settings) -> Run:
    """Check everything that can be checked before a process is started, and make the run's folder."""
    check_settings(settings)
    task = load_task(settings.data)
    folder = run_folder(settings)
    for device in (*settings.generator_devices, settings.trainer_device):
        generate.check_device(device)
    tokenizer = generate.load_tokenizer(settings.model)
    decoding = generate.make_decoding(
        tokenizer,
        settings.recipe,
        settings.prompt_budget,
        settings.thinking_budget[1],
        settings.answer_budget,
        settings.end_of_thinking,
        settings.interruption_phrase,
    )
    # The trainer's parameters are fp32 whatever the trunk computes in: bf16 would swallow small updates.
    model = generate.load_model(settings.model, torch.device(settings.trainer_device), torch.float32)
    generate.check_length(model, decoding)
    engine = generate.choose_engine(settings.engine, settings.generator_devices[0])
    generate.check_tensor_parallel(engine, settings.tensor_parallel, model)
    run = Run(settings, folder, model, tokenizer, decoding, task)
    run.render_prompts()
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    write_whole(folder / "config.json", json.dumps({**dataclasses.asdict(settings), "versions": versions}, indent=2) + "\n")
    return run


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status: 0, 1 after a failure, 2 for wrong settings, 130 after Ctrl-C."""
    transformers.utils.logging.disable_progress_bar()
    try:
        settings = parse_settings(arguments)
        run = prepare(settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        return 130
    torch.set_num_threads(cpu_threads(settings))
    status = 0
    try:
        run.train()
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        status = 130
    except (GeneratorFailed, TimeoutError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        status = 1
    if not run.validations:  # nothing has happened yet: the name stays free
        shutil.rmtree(run.folder)
        return status
    run.save_model()
    run.save_samples()
    run.save_curve()
    print(run.summary())
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
