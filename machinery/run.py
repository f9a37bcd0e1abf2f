"""What stands around the loop of train.py. `open_run` checks everything before a process starts.
`Run` answers the loop, and ends the run: with its results, with its processes, and with the reason
if something failed."""

import contextlib
import dataclasses
import inspect
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import safetensors.torch
import torch
from transformers import PreTrainedModel

import loss
from core import lora
from core.attention import attention_on_gpu, recurrent
from core.check import refuse_unfit
from core.engine import EngineSettings, engine_settings
from core.feed import Feed, Prompts
from core.generators import GeneratorFailed
from core.model import checksum, first_learning_rate, load_model, load_tokenizer
from core.policy import Policy
from core.rollouts import Batch, Group, Rollout, SharedParameters
from core.screen import Progress, say, warn
from core.settings import (
    Settings,
    devices_here,
    model_path,
    rate_factor,
    read_settings,
    read_sources,
    refuse,
    refuse_few_problems,
)
from core.text import make_decoding, prompt_ids, refuse_prompts, token_ids
from curve.fit import fit_series
from curve.forecast import levelled_off
from curve.plots import plot_variants
from curve.report import describe, report
from data.load import Source
from data.tasks import mathematics
from machinery.folder import (
    checkpoint_of,
    checkpoints,
    finished,
    lines_of_log,
    lock_folder,
    new_folder,
    read_state,
    remove_checkpoints,
    step_of,
    whole_folder,
    write_config,
)
from machinery.measures import Compute, Totals, attention_widths, matmul_parameters
from machinery.ranks import RankSilent, Stop, from_rank_0, rank_and_ranks
from machinery.record import Record, fall
from machinery.trainer import Start, gather, numerics_mismatch

# Trainer and generator compare log-probabilities of at most so many completions of a validation.
COMPARED = 64


# --- how a run is opened --------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a run goes on, or begins."""

    folder: Path
    lock: TextIO | None  # a new folder is not there yet
    checkpoint: Path | None
    state: dict  # of that checkpoint, or {}


class Ready(NamedTuple):
    """A model that can be trained, and what suits it."""

    model: PreTrainedModel  # on the CPU, in fp32
    path: str
    weights: int  # the checksum of the run's first model
    prompts: Prompts
    settings: Settings
    engines: list[EngineSettings]  # of each generator


class Roles(NamedTuple):
    """Who does what."""

    start: Start  # for the trainer's ranks
    feed: Feed  # for the generators
    stop: Stop
    compute: Compute


def open_run(asked: Settings, sources: list[Source] | None = None) -> "Run":
    """Check everything that can be checked before a process is started, and make the run's folder
    or open it again. Returns rank 0's Run. sources: those of --data, if they are read already.
    ValueError or OSError if the flags, the data or the model cannot be used."""
    place = where_it_goes_on(asked)
    ready = ready_to_train(asked, sources or read_sources(asked), place)
    roles = who_does_what(ready, place)

    # Only now is anything written.
    folder, lock, _, state = place
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock or lock_folder(folder)
    write_config(folder, dataclasses.replace(asked, learning_rate=ready.settings.learning_rate))
    step = roles.start.step
    if asked.resume:
        say(f"{folder}: going on from step {step}")
    later = [each for each in checkpoints(folder) if step_of(each) > step]  # they come again
    remove_checkpoints(folder, later[::-1])
    record = Record(folder, roles.compute, roles.feed, state)
    return Run(roles.start, record, roles.stop, lock)


def where_it_goes_on(asked: Settings) -> Place:
    """The folder of the run, locked if it is there, and the checkpoint to go on from. ValueError if
    the run is finished, or if nobody can go on with what is there."""
    folder = asked.resume or new_folder(asked)
    # Before its checkpoint is chosen: a process that ends may still write a newer one.
    lock = lock_folder(folder) if asked.resume else None
    checkpoint = checkpoint_of(folder, asked.from_step)
    refuse(
        asked.resume and asked.from_step is None and finished(folder, asked),
        f"{folder} is finished: a larger --steps goes on, or another --stop-when-gain-below or"
        " --least-prompts, if that has ended it",
    )
    state = read_state(folder, checkpoint) if checkpoint else {}
    refuse(
        not state and any(line["kind"] == "train" for line in lines_of_log(folder)),
        f"{folder} has steps in its log, and no checkpoint to go on from: put one back into"
        f" {folder}/checkpoints, or move the folder away and begin again",
    )
    return Place(folder, lock, checkpoint, state)


def ready_to_train(asked: Settings, sources: list[Source], place: Place) -> Ready:
    """The newest model of the run, its prompts, its settings. ValueError if they do not go
    together."""
    # Engines are made of the run's first model, which stays where it is; their parameters come from
    # the trainer. Adapters stand beside its weights.
    path = model_path(asked.model)
    model = load_model(path)
    weights = checksum(model)
    if place.checkpoint and not asked.lora_rank:
        del model  # two might not fit
        path = f"{place.checkpoint}/model"
        model = load_model(path)
    prompts = make_prompts(asked, model, sources)
    settings = settings_of_the_run(asked, model)
    generators, _ = devices_here(settings)
    engines = [engine_settings(settings, each, prompts.decoding) for each in generators]
    refuse_unfit(model, engines[0], settings.share_prompts)
    return Ready(model, path, weights, prompts, settings, engines)


def who_does_what(ready: Ready, place: Place) -> Roles:
    """What the ranks start from, and who feeds them. ValueError if problems or weights are not
    those that the checkpoint was made with."""
    model, path, weights, prompts, settings, engines = ready
    folder, _, checkpoint, state = place
    parameters, stop = SharedParameters(model, len(devices_here(settings)[1])), Stop()
    feed = Feed(settings, prompts, engines, parameters, stop.asked, state)
    compute = compute_of(settings, model)
    known = state.get("weights")
    same = known in (None, weights)
    if state and known is None:  # of before: there is no checksum, and the name decides
        same = read_settings(folder).model == settings.model
    refuse(
        not same or feed.data != state.get("data", feed.data),
        f"--resume {folder}: the problems of --data {' '.join(settings.data)}, or the weights of"
        f" --model {settings.model}, are not those that its checkpoint was made with: put the old"
        f" ones back, or train its model in a new run: --model {checkpoint}/model",
    )
    if settings.lora_rank:
        compute.adapters = lora.add_adapters(model, settings, checkpoint)
    step, longest = state.get("step", 0), prompts.decoding.longest
    start = Start(settings, step, path, weights, checkpoint, parameters, longest)
    return Roles(start, feed, stop, compute)


def compute_of(settings: Settings, model: PreTrainedModel) -> Compute:
    """What training costs on these devices, before it has begun."""
    generators, trainers = devices_here(settings)
    devices = [*generators, *trainers]
    if settings.one_process or "cpu" not in devices:
        devices = {*devices}  # a GPU that does both is one
    return Compute(len(devices), matmul_parameters(model), attention_widths(model))


def settings_of_the_run(asked: Settings, model: PreTrainedModel) -> Settings:
    """The settings with a learning rate that suits the model, if they have none; without shared
    prompts, if the model forbids them; and with what --one-process wants."""
    changes = {}
    if asked.one_process:  # generator and trainer wait for each other
        asynchrony = asked.recipe.asynchrony
        if asynchrony != "ppo-1":
            say(
                f"The run trains with --asynchrony ppo-1, not {asynchrony}, because of"
                " --one-process."
            )
        changes["recipe"] = dataclasses.replace(asked.recipe, asynchrony="ppo-1")
        changes["engine"] = "torch"
    if asked.learning_rate is None:
        parameters = model.num_parameters(only_trainable=True)
        rate = first_learning_rate(parameters, rate_factor(asked.lora_rank, asked.defaults))
        changes["learning_rate"] = rate
        say(f"The learning rate is {rate}, for a model of {parameters:,} parameters.")
    why_not = ""
    if "position_ids" not in inspect.signature(model.get_decoder().forward).parameters:
        why_not = "takes the place in the cache for the position"
    elif recurrent(model):
        why_not = "has states, which padding behind a prompt would change"
    if asked.share_prompts and why_not:
        say(f"Prompts are not shared: this model {why_not}.")
        changes["share_prompts"] = False
    if "cpu" not in devices_here(asked)[1] and attention_on_gpu(model) == "grouped":
        say(
            "Attention takes memory by the square of the length: no fused kernel has the cap or the"
            " sinks that this model's has."
        )
    return dataclasses.replace(asked, **changes)


def make_prompts(settings: Settings, model: PreTrainedModel, sources: list[Source]) -> Prompts:
    """The prompts of these sources for the model. The first is shown as the model gets it, with its
    answer. ValueError if the prompts do not suit the model."""
    tokenizer, recipe = load_tokenizer(model_path(settings.model)), settings.recipe
    problems = [problem for source in sources for problem in source.train + source.validation]
    decoding = make_decoding(
        tokenizer, settings, recipe.length_control, fp32_logits=recipe.fp32_logits
    )
    refuse_few_problems(settings, sources)
    first = problems[0]
    ids = prompt_ids(tokenizer, first, settings)
    refuse_prompts(tokenizer, problems, settings, model)
    ends = " or ".join(repr(tokenizer.decode([token])) for token in decoding.eos)
    say(f"The first prompt, as the model gets it: {tokenizer.decode(ids)!r}")
    answer = f"Its answer is {first.answer!r:.200}"
    if first.task == mathematics.__name__:
        reply = rf"\boxed{{{first.answer}}}"
        refuse(
            tokenizer.unk_token_id in token_ids(tokenizer, reply),
            f"--model {settings.model}: its tokenizer has no tokens for a part of the answer"
            f" {reply!r:.200}",
        )
        answer += f", and it would have to come as {reply!r:.200}"
    say(f"{answer}.")
    say(f"A completion ends with {ends}, or after {decoding.longest_completion} tokens.")
    return Prompts(sources, tokenizer, decoding)


# --- the run --------------------------------------------------------------------------------------


def some_rollouts(groups: list[Group]) -> list[Rollout]:
    """COMPARED completions of these groups, or all if they are fewer."""
    rollouts = [rollout for group in groups for rollout, _ in group.judged()]
    return rollouts[:: -(-len(rollouts) // COMPARED) or 1]


@dataclasses.dataclass
class Run:
    """Where the groups of the loop come from, where results go, and why the run ends. Rank 0 has
    all of it. Other ranks have the start alone, for the calls that all ranks take part in."""

    start: Start
    record: Record | None = None
    stop: Stop | None = None
    lock: TextIO | None = None  # of the folder; it is held as long as this object lives
    error: str = ""  # what went wrong in this process
    reason: str = ""  # why it came to its end; '' if it was stopped or has failed

    def __post_init__(self):
        self.settings, record = self.start.settings, self.record
        self.feed, self.folder = record and record.feed, record and record.folder

    # In which all ranks take part

    def validate(self, version: int, policy: Policy, settings: Settings) -> None:
        """Measure the pass rate of the held-out problems with this version of the parameters; that
        of version 0 is R0. All ranks compare the log-probabilities of some of these completions
        with the generator's."""
        with self.record.pause() if self.record else contextlib.nullcontext():
            groups = self.feed and self.feed.validate(version)
            compared = from_rank_0(some_rollouts, groups or [])
            if not compared:  # the run ends
                return
            mismatch = numerics_mismatch(policy, compared, settings)
        if self.record:
            self.record.log_validation(version, groups, mismatch)

    def save(
        self, version: int, policy: Policy, optimizer: torch.optim.Optimizer, scale: float
    ) -> None:
        """Write a checkpoint of this version, whose files do not depend on the number of ranks.
        Parameters and moments come from all ranks. OSError if it cannot be written; all earlier
        ones are still there then."""
        parameters, adapters, moments = gather(policy, optimizer)
        if not self.record:
            return
        state = {"step": version, "weights": self.start.weights, "loss_scale": scale}
        state |= self.feed.state() | self.record.state()
        with whole_folder(self.folder / "checkpoints" / f"step-{version:06d}") as checkpoint:
            policy.model.save_pretrained(checkpoint / "model", state_dict=parameters)
            self.feed.prompts.tokenizer.save_pretrained(checkpoint / "model")
            safetensors.torch.save_file(moments, checkpoint / "optimizer.safetensors")
            if adapters:
                safetensors.torch.save_file(adapters, checkpoint / "adapters.safetensors")
            (checkpoint / "state.json").write_text(json.dumps(state))
        # The newest are kept, and the one of the best validation: the pass rate may fall.
        _, best = fall(self.record.validations, self.folder)
        old = checkpoints(self.folder)[: -self.settings.keep_checkpoints]
        remove_checkpoints(self.folder, [each for each in old if each != best])

    # Which rank 0 answers

    def begin(self, version: int) -> None:
        """Start the generators, say who has which devices, and start the clock of training and the
        progress bar."""
        self.feed.start()
        generators = [
            f"{engine.device} with {generator.slots} slots"
            for engine, generator in zip(self.feed.engines, self.feed.generators)
        ]
        trainers = devices_here(self.settings)[1]
        say(f"devices: generators {', '.join(generators)}; trainers {', '.join(trainers)}")
        self.record.compute.started = time.monotonic()
        self.record.progress = Progress("training", self.settings.steps, version)

    def batch(self, version: int) -> list[Group] | None:
        """The groups to train this version of the parameters on. None if the run ends."""
        if self.over() or self._comes_to_its_end(version):
            return None
        began = time.monotonic()
        groups = self.feed.batch(version)
        self.record.waited = began, time.monotonic()
        return groups

    def wants_validation(self, version: int) -> bool:
        """Whether a validation of this version is due and has not been made yet. It is due now and
        then, and at the end."""
        settings, feed = self.settings, self.feed
        regular = version % settings.validation_every == 0
        groups_left = len(feed.under_way) + len(feed.to_repeat)
        more = groups_left >= settings.groups_per_step or any(each.left for each in feed.orders)
        due = regular or version == settings.steps or not more
        return due and self.record.last_validation < version and not self.over()

    def finish_step(
        self, step: int, batch: Batch, totals: Totals, credit: loss.Credit, figures: dict
    ) -> None:
        """No-Positive-Resampling: the prompts that the batch has solved do not come again. And
        write down what has happened. figures: further columns of the log."""
        self.feed.retire(batch.groups)
        self.record.log_step(step, batch, totals, credit, figures)

    def end(self, version: int) -> bool:
        """Stop the clock of training, and note why the run is over, if it came to its end. Returns
        whether a checkpoint is missing."""
        self.record.compute.ended = time.monotonic()
        self.record.progress.close()
        if not self.over():
            retired = f"Every prompt has been retired (pass rate >= {loss.RETIRE_AT})"
            self.reason = self._comes_to_its_end(version) or retired
            if version < self.settings.steps:
                say(f"{self.reason}: training ends.")
        saved = version in map(step_of, checkpoints(self.folder))
        return version > self.start.step and not saved

    # Why it ends

    @property
    def failure(self) -> str:
        """What went wrong first, anywhere in the run; '' if nothing did."""
        return self.feed.failure or self.record.failure or self.error

    def over(self) -> bool:
        """Whether the run ends early: the user has stopped it, or something failed."""
        return self.stop.asked() or bool(self.failure)

    def _comes_to_its_end(self, version: int) -> str:
        """Why no further step is due; '' if one is. --stop-when-gain-below looks at the curves of
        all sources."""
        if version >= self.settings.steps:
            return "All steps are made"
        least = self.settings.stop_when_gain_below
        if least and self.record.last_validation == version:
            if all(levelled_off(series, least) for series in self.record.series()):
                return f"Twice the compute would gain less than {least} (--stop-when-gain-below)"
        return ""

    # After the loop

    @contextlib.contextmanager
    def until_its_end(self) -> Iterator[None]:
        """Note what goes wrong in this block, and end all processes after it. RuntimeError after an
        error that no sentence is known for: the traceback says it."""
        with self.stop.listening(self.leave_no_name):
            try:
                yield
            except (GeneratorFailed, RankSilent) as error:
                self.error = str(error)
            except torch.OutOfMemoryError as error:
                self.error = (
                    f"{str(error).partition('. ')[0]}: lower --slots or --tokens-per-micro-batch,"
                    " add --gradient-checkpointing, --trainers or --lora-rank, or take a smaller"
                    " --model"
                )
            except Exception as error:
                # With --one-process it may come out of a task, whose traceback is wanted.
                elsewhere = isinstance(error, ConnectionError | TimeoutError)
                if isinstance(error, OSError) and not (elsewhere or self.settings.one_process):
                    self.error = f"a file cannot be read or written: {error}"
                    return
                _, ranks = rank_and_ranks()
                if ranks > 1:
                    time.sleep(2.0)  # if another one has died, this process ends meanwhile
                raise RuntimeError(f"the run has failed, as said above{self.hint()}") from error
            finally:
                self.feed.close()
                self.leave_no_name()

    def leave_no_name(self) -> str:
        """Remove the folder of a new run that has measured nothing. Returns the `hint`."""
        if not (self.record.validations or checkpoints(self.folder) or self.settings.resume):
            shutil.rmtree(self.folder, ignore_errors=True)  # a thread may have done it
        return self.hint()

    def hint(self) -> str:
        """How to go on, to be put behind an error; '' as long as there is no checkpoint."""
        if not checkpoints(self.folder):
            return ""
        return f"; python train.py --resume {self.folder} goes on from the last checkpoint"

    def exit_status(self) -> int:
        """The exit status of the command. A run that ended early says why."""
        if self.failure:
            print(f"\nerror: {self.failure}{self.hint()}", file=sys.stderr)
            return 1
        if not self.stop.asked():
            return 0
        signalled = signal.Signals(self.stop.number)
        how = "by Ctrl-C" if signalled == signal.SIGINT else f"by {signalled.name}"
        print(f"\nstopped {how}{self.hint()}", file=sys.stderr)
        return 128 + self.stop.number

    def leave_results(self, write_page: Callable) -> None:
        """Leave model/, the last line of the log if the run came to its end, curve.png and the page
        of rollouts, and print the end; nothing without a validation."""
        record = self.record
        if not record.validations:
            return
        if saved := checkpoints(self.folder):  # a run that ended early may have none
            with whole_folder(self.folder / "model") as folder:
                shutil.copytree(saved[-1] / "model", folder, dirs_exist_ok=True)
        steps = record.steps[-1]["step"] if record.steps else 0
        if self.reason:
            record.log.add({"kind": "end", "step": steps, "reason": self.reason})
        fitted = self._fit_curves()
        spent = record.compute.columns()
        print(
            f"compute     {steps} steps, {spent['compute_device_hours']:.3f} device-hours,"
            f" {spent['compute_tokens']:,} sampled tokens,"
            f" {spent['compute_flops']:.2e} FLOPs;"
            f" {time.monotonic() - record.log.began:.0f} s with start and validation"
        )
        print(f"files       {self.folder}/ (docs/log.md explains them)")
        try:
            if fitted:
                plot_variants(self.folder / "curve.png", fitted)
            if record.rollouts.path.exists():
                print(f"next        open {write_page(self.folder)} in a browser")
        except Exception as error:  # of whatever kind: the run has not failed
            warn("results", f"curve.png or rollouts.html cannot be made ({error!r:.200})")

    def _fit_curves(self) -> dict:
        """Fit the curve of each source, and print what was found. Returns a list with the fit of
        each by its name, for those that have one."""
        fitted, samples = {}, self.settings.validation_samples
        for source, series in zip(self.record.sources, self.record.series()):
            of_source = f" of {source.name}" if len(self.record.sources) > 1 else ""
            print(
                f"pass rate   {series.y[0]:.3f} before, {series.y[-1]:.3f} after"
                f" {self.record.last_validation} steps (mean@{samples} of"
                f" {len(source.validation)} held-out problems{of_source})"
            )
            try:
                fit = fit_series(series)
            except ValueError as error:
                print(f"curve       no fit: {error}")
                continue
            fitted[series.name] = [fit]
            print(describe(fit, report(fit)))
        return fitted
