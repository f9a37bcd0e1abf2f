"""What stands around the loop of train.py. `open_run` checks everything before a process starts.
`Run` has the loop's calls, and ends the run: with its results, with the processes, and with the
reason if something failed."""

import contextlib
import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from transformers import PreTrainedModel

import loss
from core.decoding import make_decoding, render_all, unwritable
from core.devices import devices_here
from core.engine import engine_settings, refuse_split
from core.feed import Feed, Prompts
from core.generators import generator_process
from core.model import (
    first_learning_rate,
    load_model,
    load_tokenizer,
    model_path,
    refuse_too_long,
)
from core.policy import Policy
from core.rollouts import Batch, Group, Rollout, SharedParameters
from core.screen import say
from core.settings import Settings
from core.torch_engine import refuse_wrong_over_slots
from curve.fit import fit_sigmoid
from curve.plots import plot_variants
from curve.report import describe, report
from data.load import Source, load_data
from machinery.checkpoints import (
    checkpoint_of,
    checkpoints,
    read_state,
    remove_old_checkpoints,
    step_of,
    write_checkpoint,
)
from machinery.compute import Compute, attention_width, matmul_parameters
from machinery.files import whole_folder
from machinery.folder import lock_folder, new_folder, write_config
from machinery.processes import Stop
from machinery.ranks import everyone, give_way_to_a_dead_rank
from machinery.record import Record
from machinery.totals import Totals
from machinery.track import refuse_missing_tracker
from machinery.trainer import gather, numerics_mismatch
from machinery.warnings import few_groups_count

COMPARED = 64  # completions of a validation whose log-probabilities trainer and generator compare


@dataclass(frozen=True)
class Start:
    """What every rank starts from."""

    step: int  # optimizer steps made
    model: str  # folder or hub name
    moments: Path | None  # of the optimizer, in a checkpoint


def open_run(
    settings: Settings,
) -> tuple[Settings, Start, PreTrainedModel, SharedParameters, "Run"]:
    """Check everything that can be checked before a process is started, and make the run's folder
    or open it again.

    Returns the settings
    (with a learning rate that suits the model, if they had none), what every rank starts from, the
    model on the CPU in fp32, the shared parameters (empty), and rank 0's Run. ValueError or OSError
    if the flags, the data or the model cannot be used."""
    refuse_missing_tracker(settings.track)
    sources = read_sources(settings)
    folder, lock, start, state = find_start(settings)
    path = model_path(settings.model)
    tokenizer = load_tokenizer(path)
    decoding = make_decoding(
        tokenizer, settings, settings.recipe.length_control, settings.recipe.fp32_logits
    )
    texts = [problem.prompt for source in sources for problem in source.train + source.validation]
    if settings.model == Settings.model and (
        lost := unwritable(tokenizer, "".join({*"".join(texts)}))
    ):
        raise ValueError(lost[0].removeprefix("! "))
    prompts = Prompts(sources, render_all(tokenizer, texts, settings), tokenizer, decoding)
    model = load_model(start.model, torch.device("cpu"), torch.float32)
    refuse_too_long(model, decoding)
    if settings.learning_rate is None:
        settings = dataclasses.replace(
            settings, learning_rate=first_learning_rate(model.num_parameters())
        )
        say(
            f"The learning rate is {settings.learning_rate}, for {model.num_parameters():,} parameters."
        )
    generators, trainers = devices_here(settings)
    one_gpu = bool({*generators[0]} & {*trainers})  # it samples and trains
    # Engines are made of the run's first model, which stays where it is; their parameters come from
    # the trainer.
    engines = [
        engine_settings(settings, devices, path, decoding, one_gpu) for devices in generators
    ]
    refuse_split(engines[0].engine, settings.tensor_parallel, model.config.num_attention_heads)
    twice = "with --gradient-checkpointing a layer would add its keys twice to their cache"
    not_shared = twice if settings.gradient_checkpointing else ""
    if engines[0].engine == "torch" or (settings.share_prompts and not not_shared):
        try:
            refuse_wrong_over_slots(model, settings.model)
        except ValueError as error:
            if engines[0].engine == "torch":
                raise
            not_shared = str(error)
    if settings.share_prompts and not_shared:
        say(f"Prompts are not shared: {not_shared}.")
        settings = dataclasses.replace(settings, share_prompts=False)

    parameters, stop = SharedParameters(model, len(trainers)), Stop()
    feed = Feed(settings, prompts, engines, parameters, generator_process, stop.asked, state)
    if state is not None and state.get("data") != feed.data:
        raise ValueError(
            f"--resume {folder}: the problems of --data {' '.join(settings.data)} are not those that its checkpoint was"
            f" made with: put the old data back, or train its model in a new run: --model {start.model}"
        )
    if settings.defaults != "toy":
        say(f"The settings start from --defaults {settings.defaults}; config.json has them all.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock or lock_folder(folder)
    write_config(folder, settings)
    if settings.resume:
        say(f"{folder}: going on from step {start.step}")
        for later in [path for path in checkpoints(folder) if step_of(path) > start.step]:
            shutil.rmtree(later)
    names = [*sum(generators, ()), *trainers]
    devices = names.count("cpu") + len(
        {*names} - {"cpu"}
    )  # each CPU process is one; a GPU that does both is one
    compute = Compute(devices, matmul_parameters(model), attention_width(model))
    record = Record(settings, folder, compute, feed, state)
    return settings, start, model, parameters, Run(settings, folder, lock, feed, record, stop)


def read_sources(settings: Settings) -> list[Source]:
    """The problems of the run, by source. ValueError if they are too few for a step."""
    sources = load_data(
        settings.data, settings.train_prompts, settings.validation_problems, settings.instruction
    )
    for source in sources:
        for note in source.notes:
            say(f"{source.name}: {note}")
    prompts = sum(len(source.train) for source in sources)
    if settings.groups_per_step > prompts:
        raise ValueError(
            f"a step takes {settings.groups_per_step} prompts, but there are {prompts} to train on"
            f" (--train-prompts {settings.train_prompts}): lower --prompts-per-step"
        )
    return sources


def find_start(settings: Settings) -> tuple[Path, TextIO | None, Start, dict | None]:
    """The folder of the run and its start. Of a run that --resume names also the folder's lock and,
    if there is a checkpoint to go on from, its state. ValueError if another process uses the
    folder, or if the run is finished."""
    folder, lock, checkpoint = settings.resume, None, None
    if folder:
        lock, checkpoint = lock_folder(folder), checkpoint_of(folder, settings.from_step)
    if checkpoint is None:
        return (
            folder or new_folder(settings),
            lock,
            Start(0, model_path(settings.model), None),
            None,
        )
    state = read_state(checkpoint)
    if state["step"] >= settings.steps and (folder / "model").is_dir():
        raise ValueError(
            f"{folder} is finished, at step {state['step']}; give a larger --steps to go on"
        )
    return (
        folder,
        lock,
        Start(state["step"], str(checkpoint / "model"), checkpoint / "optimizer.safetensors"),
        state,
    )


class Run:
    """What only rank 0 has: where its groups come from, where results go, and why the run ends.

    The methods of the first half are the loop's calls. Each returns the same on all ranks: the
    other ranks have an `OtherRank`, whose calls wait for the answer of this one.
    """

    def __init__(
        self, settings: Settings, folder: Path, lock: TextIO, feed: Feed, record: Record, stop: Stop
    ):
        self.settings, self.folder, self.feed, self.record, self.stop = (
            settings,
            folder,
            feed,
            record,
            stop,
        )
        self.lock = lock  # of the folder; it is held as long as this object lives
        self.error = ""  # what went wrong in this process
        self.stopped_at_once = False  # by a second Ctrl-C

    def begin(self, step: int) -> None:
        """Start the generators, and the clock of training."""
        self.feed.start()
        self.record.begin(step)

    def goes_on(self, step: int) -> bool:
        """Whether another step is made."""
        return everyone(step < self.settings.steps and not self.over())

    def batch(self, step: int) -> list[Group] | None:
        """The groups to train on at this step. None if every prompt is retired, or if the run
        ends."""
        began = time.monotonic()
        groups = everyone(self.feed.batch(step))  # whole groups of rollouts go to all ranks
        self.record.waited = began, time.monotonic()
        return groups

    def wants_validation(self, step: int, at_the_end: bool = False) -> bool:
        """Whether a validation is due at this step and has not been made yet."""
        due = (
            at_the_end or step % self.settings.validation_every == 0 or step == self.settings.steps
        )
        return everyone(due and self.record.last_validation < step and not self.over())

    def validate(self, step: int, policy: Policy) -> None:
        """Measure the pass rate of the held-out problems with the parameters of this step; at step
        0 it is R0. All ranks compare the log-probabilities of some of these completions with the
        generator's."""
        with self.record.pause():
            groups = self.feed.validate(step) or []
            rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
            # The other ranks get these completions, to compute their share of them.
            compared = everyone(rollouts[:: max(1, len(rollouts) // COMPARED)])
            if not compared:  # the run ends
                return
            mismatch = numerics_mismatch(policy, compared, self.settings)
        self.record.log_validation(step, groups, mismatch)

    def log_step(self, step: int, batch: Batch, totals: Totals, worth: dict, figures: dict) -> None:
        """Retire what is solved, and write down what has happened. worth: of each completion its
        reward, advantage and weight, [P, G] each. figures: further columns of the log."""
        self.feed.retire(batch.groups)
        self.record.log_step(step, batch, totals, worth, figures)

    def save(self, step: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Write a checkpoint of this step. Parameters and moments are gathered from all ranks."""
        parameters, moments = gather(policy, optimizer)
        state = {"step": step, **self.feed.state(), **self.record.state()}
        tokenizer = self.feed.prompts.tokenizer
        write_checkpoint(self.folder, policy.model, tokenizer, parameters, moments, state)
        before_fall = self.record.checkpoint_before_fall()
        remove_old_checkpoints(self.folder, self.settings.keep_checkpoints, before_fall)

    def end(self, step: int) -> bool:
        """Stop the clock of training, and log why a run is over. Returns whether a checkpoint is
        missing."""
        retired = f"Every prompt has been retired (pass rate >= {loss.RETIRE_AT})"
        reason = "All steps are made" if step >= self.settings.steps else retired
        self.record.end(step, "" if self.over() else reason)
        saved = any(step_of(checkpoint) == step for checkpoint in checkpoints(self.folder))
        return everyone(self.record.last_validation >= 0 and not saved)

    # Why it ends

    @property
    def failure(self) -> str:
        """What went wrong, anywhere in the run; '' if nothing did."""
        return self.error or self.feed.failure or self.record.failure

    def over(self) -> bool:
        """Whether the run ends early: the user has stopped it, or something failed."""
        return self.stop.asked() or bool(self.failure)

    # After the loop

    @contextlib.contextmanager
    def until_its_end(self) -> Iterator[None]:
        """Note what goes wrong in this block, and end all processes after it. RuntimeError after
        any other error."""
        self.stop.listen()
        try:
            yield
        except KeyboardInterrupt:
            self.stopped_at_once = True
        except torch.OutOfMemoryError as error:
            advice = "lower --tokens-per-micro-batch or --slots, or add --gradient-checkpointing or --trainers"
            self.error = f"{str(error).partition('. ')[0]}: {advice}"
        except OSError as error:
            self.error = f"the run's folder cannot be written: {error}"
        except Exception as error:
            give_way_to_a_dead_rank()
            raise RuntimeError(f"the run has failed, as said above{self.hint()}") from error
        finally:
            self.feed.close()

    def hint(self) -> str:
        """How to go on, to be put behind an error; '' as long as there is no checkpoint."""
        if not checkpoints(self.folder):
            return ""
        return f"; python train.py --resume {self.folder} goes on from the last checkpoint"

    def exit_status(self) -> int:
        """The exit status of the command. A run that ended early says why."""
        if not self.over():
            return 0
        if self.failure:
            print(f"\nerror: {self.failure}{self.hint()}", file=sys.stderr)
            return 1
        how = "at once" if self.stopped_at_once else f"by {self.stop.name}"
        print(f"\nstopped {how}{self.hint()}", file=sys.stderr)
        return 128 + self.stop.number

    def leave_results(self, write_page: Callable[[Path], object]) -> None:
        """Leave model/, curve.png and the page of rollouts, and print the end. If not even the
        first validation was made, the folder of a new run is removed, so that its name stays
        free."""
        if not self.record.validations:
            if self.settings.resume is None:
                shutil.rmtree(self.folder)
            return
        with whole_folder(self.folder / "model") as folder:
            shutil.copytree(checkpoints(self.folder)[-1] / "model", folder, dirs_exist_ok=True)
        fitted, lines = [], []
        for source, series in zip(self.record.sources, self.record.series()):
            of_source = f" of {source.name}" if len(self.record.sources) > 1 else ""
            lines.append(
                f"pass rate   {series.y[0]:.3f} before, {series.y[-1]:.3f} after {self.record.last_validation} steps"
                f" (mean@{self.settings.validation_samples} of {len(source.validation)} held-out problems{of_source})"
            )
            try:
                fit = fit_sigmoid(series.x, series.y, num_examples=series.num_examples)
            except ValueError as error:
                lines.append(f"curve       no fit: {error}")
                continue
            fitted.append((series, fit))
            lines.append(describe(series, fit, report(series, fit)))
        if few_groups_count(self.record.last_steps, self.settings.groups_per_step):
            lines.append(
                "! hardly any group counted at the end: a curve that is flat there may be that of a shortcut"
            )
        if fitted:
            plot_variants(self.folder / "curve.png", {run[0].name: [run] for run in fitted})
        if (self.folder / "rollouts.jsonl").exists():
            try:
                write_page(self.folder)
            except ValueError as error:  # a page is no reason to call a run failed
                say(f"no page: {error}")
        spent, step = (
            self.record.compute.columns(),
            (self.record.last_steps or [{"step": 0}])[-1]["step"],
        )
        files = sorted(path.name + "/" * path.is_dir() for path in self.folder.iterdir())
        lines += [
            f"compute     {step} steps, {spent['compute_device_hours']:.3f} device-hours,"
            f" {spent['compute_tokens'] / 1e6:.2f} M sampled tokens, {spent['compute_flops']:.2e} FLOPs;"
            f" {time.monotonic() - self.record.began:.0f} s with start and validation",
            f"idle        {self.record.rates.idle()}",
            f"files       {self.folder}/: {' '.join(files)}",
        ]
        if "rollouts.html" in files:
            lines.append(f"next        open {self.folder}/rollouts.html in a browser")
        print("\n".join(lines))


class OtherRank:
    """The loop's calls on any other rank: they get rank 0's answer, and take part in what all ranks
    do together."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def answer(self, *_, **__):
        """What the same call returns on rank 0."""
        return everyone(None)

    goes_on = batch = wants_validation = end = answer

    def nothing(self, *_) -> None:
        """Rank 0 alone starts the generators and writes the log."""

    begin = log_step = nothing

    def validate(self, _, policy: Policy) -> None:
        compared: list[Rollout] = everyone(None)
        if compared:
            numerics_mismatch(policy, compared, self.settings)

    def save(self, _, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        gather(policy, optimizer)
