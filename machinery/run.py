"""What stands around the loop of train.py. `open_run` checks everything before a process starts.
`Run` has the loop's calls, and ends the run: with its results, with its processes, and with the
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
from core.decoding import make_decoding, refuse_unfit_prompts, rendered, unwritable
from core.devices import devices_here
from core.engine import EngineSettings, engine_settings, refuse_split
from core.feed import Feed, Prompts, Workers
from core.generators import GeneratorFailed
from core.model import (
    attention_heads,
    first_learning_rate,
    load_model,
    load_tokenizer,
    model_path,
    refuse_too_long,
)
from core.one_process import GeneratorHere, VerifierHere
from core.policy import Policy, error_of_sharing
from core.rollouts import Batch, Group, SharedParameters
from core.screen import say
from core.settings import BY_MEMORY, Settings
from core.torch_engine import refuse_wrong_over_slots
from curve.fit import fit_sigmoid
from curve.forecast import levelled_off
from curve.plots import plot_variants
from curve.report import describe, report
from data.load import Source, load_data
from data.verify import VerifierPool
from machinery.checkpoints import checkpoint_of, read_state, write_checkpoint
from machinery.compute import Compute, attention_width, matmul_parameters
from machinery.files import last_line, whole_folder
from machinery.folder import (
    checkpoints,
    lock_folder,
    make_folder,
    new_folder,
    step_of,
    write_config,
)
from machinery.memory import Shape, choose
from machinery.processes import Stop
from machinery.ranks import from_rank_0, give_way_to_a_dead_rank
from machinery.record import Record
from machinery.totals import Totals
from machinery.track import refuse_missing_tracker
from machinery.trainer import gather, numerics_mismatch
from machinery.warnings import few_groups_count

SHARED_MEMORY = Path("/dev/shm")  # where Linux has what processes share
# Nats in fp32. Models that share prompts rightly are off by 1e-5 at most.
MOST_ERROR_OF_SHARING = 1e-3
COMPARED = 64  # completions of a validation whose log-probabilities trainer and generator compare


@dataclass(frozen=True)
class Start:
    """What every rank starts from."""

    settings: Settings
    step: int  # optimizer steps made
    model: str  # folder or hub name
    moments: Path | None  # of the optimizer, in a checkpoint
    parameters: SharedParameters  # nothing is written there yet


# --- how a run is opened --------------------------------------------------------------------------


def open_run(settings: Settings) -> "Run":
    """Check everything that can be checked before a process is started, and make the run's folder
    or open it again. Returns rank 0's Run.

    The settings of the run are in its `start`: with a learning rate that suits the model, if they
    had none, and without shared prompts, if the model or another setting forbids them. ValueError
    or OSError if the flags, the data or the model cannot be used.
    """
    # The data, and where the run goes on.
    refuse_missing_tracker(settings.track)
    sources = read_sources(settings)
    folder, lock, checkpoint = find_folder(settings)
    first_model = newest_model = model_path(settings.model)
    step, moments, state = 0, None, None
    if checkpoint is not None:
        state = read_state(checkpoint)
        step, moments = state["step"], checkpoint / "optimizer.safetensors"
        newest_model = str(checkpoint / "model")
        refuse_finished(folder, step, settings)

    asked = settings
    if settings.one_process:
        settings = by_turns(settings)

    # The model and its prompts. Engines are made of the run's first model, which stays where it is;
    # their parameters come from the trainer.
    prompts = make_prompts(settings, first_model, sources)
    model = load_model(newest_model)
    refuse_too_long(model, prompts.decoding)
    settings = with_learning_rate(settings, model)
    settings, chosen = with_what_suits_the_memory(settings, model, prompts)
    engines = engines_of(settings, first_model, prompts)
    refuse_split(engines[0].engine, settings.tensor_parallel, attention_heads(model))
    settings = with_prompts_shared_if_possible(settings, model, engines[0].engine)

    # Who does what.
    _, trainers = devices_here(settings)
    refuse_small_shared_memory(4 * model.num_parameters())
    parameters = SharedParameters(model, len(trainers))
    stop = Stop()
    workers = Workers(engines, parameters)
    if settings.one_process:
        workers = Workers(engines, parameters, GeneratorHere, VerifierHere)
    feed = Feed(settings, prompts, workers, stop.asked, state)
    if state is not None:
        refuse_other_problems(state, feed, newest_model)
    if settings.defaults != "toy":
        say(f"The settings start from --defaults {settings.defaults}; config.json has them all.")

    say_first_prompt(settings, prompts)
    if not (settings.resume or settings.one_process):
        refuse_raising_tasks(settings, sources)

    # Only now is anything written.
    folder = make_folder(folder, settings)
    lock = lock or lock_folder(folder)
    # The recipe and the engine are stored as the user asked for them: a resume without
    # --one-process goes on with these.
    stored = dataclasses.replace(settings, recipe=asked.recipe, engine=asked.engine)
    write_config(folder, stored, chosen)
    if settings.resume:
        say(f"{folder}: going on from step {step}")
        remove_checkpoints_after(step, folder)
    compute = Compute(number_of_devices(settings), matmul_parameters(model), attention_width(model))
    record = Record(settings, folder, compute, feed, state)
    start = Start(settings, step, newest_model, moments, parameters)
    return Run(start, model, feed, record, stop, lock)


def refuse_finished(folder: Path, step: int, settings: Settings) -> None:
    """ValueError if the run has made all its steps, with its last validation and its model."""
    if step < settings.steps:
        return
    if last_line(folder).get("kind") == "end" and (folder / "model").is_dir():
        raise ValueError(f"{folder} is finished, at step {step}; give a larger --steps to go on")


def refuse_small_shared_memory(needed: int) -> None:
    """ValueError if /dev/shm cannot hold so many bytes. Writing there would end in a bus error."""
    if SHARED_MEMORY.exists():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < needed:
            raise ValueError(
                f"the parameters take {needed / 1e6:,.0f} MB of {SHARED_MEMORY}, which has"
                f" {free / 1e6:,.0f} MB left: make it larger (Docker: --shm-size), or remove what"
                " dead runs have left there (torch_*)"
            )


def refuse_other_problems(state: dict, feed: Feed, model: str) -> None:
    """ValueError if the problems of the feed are not those that the checkpoint was made with.
    state: of the checkpoint."""
    settings = feed.settings
    if state["data"] != feed.data:
        raise ValueError(
            f"--resume {settings.resume}: the problems of --data {' '.join(settings.data)} are not"
            " those that its checkpoint was made with: put the old data back, or train its model in"
            f" a new run: --model {model}"
        )


def remove_checkpoints_after(step: int, folder: Path) -> None:
    """Remove the checkpoints of later steps, which come again."""
    for checkpoint in checkpoints(folder):
        if step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)


def by_turns(settings: Settings) -> Settings:
    """The settings as --one-process wants them: generator and trainer wait for each other."""
    asynchrony = settings.recipe.asynchrony
    if asynchrony != "ppo-1":
        say(f"The run trains with --asynchrony ppo-1, not {asynchrony}, because of --one-process.")
    recipe = dataclasses.replace(settings.recipe, asynchrony="ppo-1")
    return dataclasses.replace(settings, recipe=recipe, engine="torch")


def read_sources(settings: Settings) -> list[Source]:
    """The problems of the run, by source. ValueError if they are too few for a step, or for
    --least-prompts."""
    sources = load_data(
        settings.data, settings.train_prompts, settings.validation_problems, settings.instruction
    )
    for source in sources:
        for note in source.notes:
            say(f"{source.name}: {note}")
    smallest = min(len(source.train) for source in sources)
    if settings.recipe.least_prompts >= smallest:
        raise ValueError(
            f"--least-prompts is {settings.recipe.least_prompts}, and a source has {smallest} to"
            " train on: with so many no solved prompt would ever be left out"
        )
    prompts = sum(len(source.train) for source in sources)
    if settings.groups_per_step > prompts:
        raise ValueError(
            f"a step takes {settings.groups_per_step} prompts, but there are {prompts} to train on:"
            f" --prompts-per-step {int(prompts / settings.recipe.batch_factor)} would take no more"
        )
    return sources


def refuse_raising_tasks(settings: Settings, sources: list[Source]) -> None:
    """ValueError if a task raises on its own reference answer: it would call everything wrong."""
    for source in sources:
        problem = source.train[0]
        with VerifierPool(*settings.verifier_limits) as pool:
            ((_, verdict),) = pool.judge([("", problem, problem.answer)])
        if verdict.raised or verdict.failure == "error":
            raise ValueError(
                f"{problem.task}.score cannot judge its own reference answer"
                f" {problem.answer!r:.80}:\n{verdict.detail.strip()}"
            )


def find_folder(settings: Settings) -> tuple[Path, TextIO | None, Path | None]:
    """The folder of the run. If --resume names it, also its lock, and the checkpoint to go on from
    if there is one. ValueError if another process uses the folder, or if it has lost its log."""
    folder = settings.resume
    if folder is None:
        return new_folder(settings), None, None
    lock, checkpoint = lock_folder(folder), checkpoint_of(folder, settings.from_step)
    if checkpoint is not None and not (folder / "log.jsonl").exists():
        raise ValueError(
            f"{folder}/log.jsonl is gone, and with it R0 and the curve: put it back, or train the"
            f" model in a new run: --model {checkpoint / 'model'}"
        )
    return folder, lock, checkpoint


def make_prompts(settings: Settings, model: str, sources: list[Source]) -> Prompts:
    """The prompts of these sources for the model. ValueError if it cannot read them."""
    tokenizer = load_tokenizer(model)
    recipe = settings.recipe
    decoding = make_decoding(tokenizer, settings, recipe.length_control, recipe.fp32_logits)
    texts = [problem.prompt for source in sources for problem in source.train + source.validation]
    if settings.model == Settings.model:
        characters = {character for text in texts for character in text}
        lost = unwritable(tokenizer, "".join(characters))
        if lost:
            raise ValueError(lost[0].removeprefix("! "))
    refuse_unfit_prompts(tokenizer, texts, settings)
    return Prompts(sources, tokenizer, decoding)


def say_first_prompt(settings: Settings, prompts: Prompts) -> None:
    """Print the first prompt as the model gets it, and what ends a completion."""
    tokenizer, decoding = prompts.tokenizer, prompts.decoding
    (ids,) = rendered(tokenizer, [prompts.sources[0].train[0].prompt], settings)
    ends = " or ".join(repr(tokenizer.decode([token])) for token in decoding.eos)
    say(f"The first prompt, as the model gets it: {tokenizer.decode(ids)!r}")
    say(f"A completion ends with {ends}, or after {decoding.longest_completion} tokens.")


def with_learning_rate(settings: Settings, model: PreTrainedModel) -> Settings:
    """The settings with a learning rate that suits the model, if they have none."""
    if settings.learning_rate is not None:
        return settings
    parameters = model.num_parameters()
    rate = first_learning_rate(parameters)
    say(f"The learning rate is {rate}, for {parameters:,} parameters.")
    return dataclasses.replace(settings, learning_rate=rate)


def with_what_suits_the_memory(
    asked: Settings, model: PreTrainedModel, prompts: Prompts
) -> tuple[Settings, dict | None]:
    """The settings with what the memory of the devices chooses, and what config.json says of it:
    names and reason; None if nothing was left to choose. `DoesNotFit` if no choice fits."""
    settings, reason = choose(asked, Shape(model), prompts.decoding.longest)
    if not reason:
        return settings, None
    say(reason)
    names = [name for name in BY_MEMORY if getattr(asked, name) is None]
    return settings, {"settings": names, "reason": reason}


def engines_of(settings: Settings, model: str, prompts: Prompts) -> list[EngineSettings]:
    """The settings of each generator's engine."""
    generators, trainers = devices_here(settings)
    beside_trainer = not set(trainers).isdisjoint(generators[0])
    return [
        engine_settings(settings, devices, model, prompts.decoding, beside_trainer)
        for devices in generators
    ]


def with_prompts_shared_if_possible(
    settings: Settings, model: PreTrainedModel, engine: str
) -> Settings:
    """The settings without --share-prompts, if something forbids it. ValueError if the model cannot
    be sampled by `TorchEngine`, and this is the engine."""
    reason = ""
    if settings.gradient_checkpointing:
        reason = "with --gradient-checkpointing a layer would add its keys twice to their cache"
    # The trainer shares prompts over the same kind of cache that TorchEngine samples with.
    if engine == "torch" or (settings.share_prompts and not reason):
        try:
            refuse_wrong_over_slots(model, settings.model)
        except ValueError as error:
            if engine == "torch":
                raise
            reason = str(error)
    if settings.share_prompts and not reason:
        error = error_of_sharing(model)
        if not error < MOST_ERROR_OF_SHARING:  # nor NaN
            reason = f"this model's log-probabilities would be off by up to {error:.2g} nats"
    if not settings.share_prompts or not reason:
        return settings
    say(f"Prompts are not shared: {reason}.")
    return dataclasses.replace(settings, share_prompts=False)


def number_of_devices(settings: Settings) -> int:
    """Devices of generators and trainers. Each CPU process is one; a GPU that does both is one."""
    if settings.one_process:
        return 1
    generators, trainers = devices_here(settings)
    names = [*sum(generators, ()), *trainers]
    return len(names) if "cpu" in names else len({*names})


# --- the run --------------------------------------------------------------------------------------


class Run:
    """What only rank 0 has: where its groups come from, where results go, and why the run ends.

    The methods of the first half are the loop's calls. Each returns the same on all ranks: the
    other ranks have an `OtherRank`, whose calls wait for the answer of this one.
    """

    def __init__(
        self,
        start: Start,
        model: PreTrainedModel,
        feed: Feed,
        record: Record,
        stop: Stop,
        lock: TextIO | None,
    ):
        """model: of the start, on the CPU in fp32. lock: of the folder; it is held as long as this
        object lives."""
        self.start, self.settings, self.model = start, start.settings, model
        self.feed, self.record, self.stop, self.lock = feed, record, stop, lock
        self.folder = record.folder
        self.error = ""  # what went wrong in this process
        self.stopped_at_once = False  # by a second Ctrl-C

    def begin(self, version: int) -> None:
        """Start the generators, and the clock of training."""
        self.feed.start()
        self.record.begin(version)

    def goes_on(self, version: int) -> bool:
        """Whether another step is made."""
        done = version >= self.settings.steps
        return from_rank_0(not (done or self.over() or self.has_levelled_off(version)))

    def batch(self, version: int) -> list[Group] | None:
        """The groups to train this version of the parameters on. None if every prompt is retired,
        or if the run ends."""
        began = time.monotonic()
        groups = from_rank_0(self.feed.batch(version))  # whole groups of rollouts go to all ranks
        self.record.waited = began, time.monotonic()
        return groups

    def wants_validation(self, version: int, at_the_end: bool = False) -> bool:
        """Whether a validation of this version is due and has not been made yet."""
        regular = version % self.settings.validation_every == 0
        due = regular or at_the_end or version == self.settings.steps
        return from_rank_0(due and self.record.last_validation < version and not self.over())

    def validate(self, version: int, policy: Policy) -> None:
        """Measure the pass rate of the held-out problems with this version of the parameters; that
        of version 0 is R0. All ranks compare the log-probabilities of some of these completions
        with the generator's."""
        with self.record.pause():
            groups = self.feed.validate(version) or []
            rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
            every_nth = max(1, len(rollouts) // COMPARED)
            # The other ranks get these completions, to compute their share of them.
            compared = from_rank_0(rollouts[::every_nth])
            if not compared:  # the run ends
                return
            mismatch = numerics_mismatch(policy, compared, self.settings)
        self.record.log_validation(version, groups, mismatch)

    def retire(self, groups: list[Group]) -> None:
        """No-Positive-Resampling: the prompts that these groups have solved do not come again."""
        self.feed.retire(groups)

    def log_step(
        self, step: int, batch: Batch, totals: Totals, worth: loss.Worth, figures: dict
    ) -> None:
        """Write down what has happened. figures: further columns of the log."""
        self.record.log_step(step, batch, totals, worth, figures)

    def save(self, version: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Write a checkpoint of this version. Parameters and moments come from all ranks."""
        parameters, moments = gather(policy, optimizer)
        state = {"step": version, **self.feed.state(), **self.record.state()}
        tokenizer = self.feed.prompts.tokenizer
        write_checkpoint(self.folder, policy.model, tokenizer, parameters, moments, state)
        before_fall = self.record.checkpoint_before_fall()
        # The newest are kept, and the one from before a fall.
        for old in checkpoints(self.folder)[: -self.settings.keep_checkpoints]:
            if old != before_fall:
                shutil.rmtree(old)

    def end(self, version: int) -> bool:
        """Stop the clock of training, and log why a run is over. Returns whether a checkpoint is
        missing."""
        reason = f"Every prompt has been retired (pass rate >= {loss.RETIRE_AT})"
        if version >= self.settings.steps:
            reason = "All steps are made"
        elif self.has_levelled_off(version):
            least = self.settings.stop_when_gain_below
            reason = f"Twice the compute would gain less than {least} (--stop-when-gain-below)"
        if self.over():
            reason = ""
        self.record.end(version, reason)
        saved = any(step_of(checkpoint) == version for checkpoint in checkpoints(self.folder))
        # Without a checkpoint a resumed run looks again whether generator and trainer agree.
        of_no_use = self.record.last_validation < 0 or (version == 0 and self.record.failure)
        return from_rank_0(not saved and not of_no_use)

    # Why it ends

    @property
    def failure(self) -> str:
        """What went wrong, anywhere in the run; '' if nothing did."""
        return self.error or self.feed.failure or self.record.failure

    def over(self) -> bool:
        """Whether the run ends early: the user has stopped it, or something failed."""
        return self.stop.asked() or bool(self.failure)

    def has_levelled_off(self, step: int) -> bool:
        """Whether --stop-when-gain-below ends the run here: by the curves of all sources."""
        least = self.settings.stop_when_gain_below
        if not least or self.record.last_validation < step:
            return False
        return all(levelled_off(series, least) for series in self.record.series())

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
        except Exception as error:
            self.error = self._in_a_sentence(error)
            if not self.error:
                give_way_to_a_dead_rank()
                self._free_the_name()
                raise RuntimeError(f"the run has failed, as said above{self.hint()}") from error
        finally:
            self.feed.close()

    def _in_a_sentence(self, error: Exception) -> str:
        """What went wrong, if it is known; else '', and the traceback says it. With --one-process
        it may come out of a task, whose traceback is wanted."""
        if isinstance(error, torch.OutOfMemoryError):
            return (
                f"{str(error).partition('. ')[0]}: lower --tokens-per-micro-batch or --slots, or"
                " add --gradient-checkpointing or --trainers"
            )
        if isinstance(error, GeneratorFailed):
            return str(error)
        of_a_file = isinstance(error, OSError) and not isinstance(
            error, ConnectionError | TimeoutError
        )
        if of_a_file and not self.settings.one_process:
            return f"the run's folder cannot be written: {error}"
        return ""

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
        """Leave model/, curve.png and the page of rollouts, and print the end."""
        if self.record.validations:
            try:
                self._write_results(write_page)
            except OSError as error:  # the first failure is the one to say
                self.error = self.failure or self._in_a_sentence(error) or str(error)
        self._free_the_name()

    def _free_the_name(self) -> None:
        """Remove the folder of a new run that has not even made its first validation."""
        made = self.record.validations or checkpoints(self.folder)
        if not made and self.settings.resume is None:
            shutil.rmtree(self.folder)

    def _write_results(self, write_page: Callable[[Path], object]) -> None:
        if saved := checkpoints(self.folder):  # a run that ended early may have none
            with whole_folder(self.folder / "model") as folder:
                shutil.copytree(saved[-1] / "model", folder, dirs_exist_ok=True)
        lines = self._fit_curves()
        if (self.folder / "rollouts.jsonl").exists():
            try:
                write_page(self.folder)
            except ValueError as error:  # a page is no reason to call a run failed
                say(f"no page: {error}")
        print("\n".join(lines + self._costs_and_files()))

    def _fit_curves(self) -> list[str]:
        """Fit the curve of each source, and draw them in curve.png. Returns what is printed."""
        fitted, lines = {}, []
        for source, series in zip(self.record.sources, self.record.series()):
            of_source = f" of {source.name}" if len(self.record.sources) > 1 else ""
            lines.append(
                f"pass rate   {series.y[0]:.3f} before, {series.y[-1]:.3f} after"
                f" {self.record.last_validation} steps (mean@{self.settings.validation_samples} of"
                f" {len(source.validation)} held-out problems{of_source})"
            )
            try:
                fit = fit_sigmoid(series.x, series.y, num_examples=series.num_examples)
            except ValueError as error:
                lines.append(f"curve       no fit: {error}")
                continue
            fitted[series.name] = [(series, fit)]
            lines.append(describe(series, fit, report(series, fit)))
        last = self.record.validations[-1]
        if "score_mean" in last:
            lines.append(f"mean score  {last['score_mean']:.3f} after; a pass is a score of 1")
        if few_groups_count(self.record.last_steps, self.settings.groups_per_step):
            lines.append(
                "! hardly any group counted at the end: a curve that is flat there may be that of a"
                " shortcut"
            )
        if fitted:
            plot_variants(self.folder / "curve.png", fitted)
        return lines

    def _costs_and_files(self) -> list[str]:
        """What is printed last."""
        spent = self.record.compute.columns()
        steps = self.record.last_steps[-1]["step"] if self.record.last_steps else 0
        seconds = time.monotonic() - self.record.began
        files = sorted(path.name + "/" * path.is_dir() for path in self.folder.iterdir())
        lines = [
            f"compute     {steps} steps, {spent['compute_device_hours']:.3f} device-hours,"
            f" {spent['compute_tokens'] / 1e6:.2f} M sampled tokens,"
            f" {spent['compute_flops']:.2e} FLOPs; {seconds:.0f} s with start and validation",
            f"idle        {self.record.rates.idle()}",
            f"files       {self.folder}/: {' '.join(files)}",
        ]
        if "rollouts.html" in files:
            lines.append(f"next        open {self.folder}/rollouts.html in a browser")
        return lines


class OtherRank:
    """The loop's calls on any other rank: they get rank 0's answer, and take part in what all ranks
    do together."""

    def __init__(self, start: Start):
        self.settings = start.settings
        self.model = load_model(start.model)

    def begin(self, *_) -> None:
        """Rank 0 alone starts the generators."""

    def goes_on(self, *_) -> bool:
        return from_rank_0(None)

    def batch(self, *_) -> list[Group] | None:
        return from_rank_0(None)

    def wants_validation(self, *_, **__) -> bool:
        return from_rank_0(None)

    def validate(self, _, policy: Policy) -> None:
        compared = from_rank_0(None)  # rollouts
        if compared:
            numerics_mismatch(policy, compared, self.settings)

    def retire(self, *_) -> None:
        """Rank 0 alone hands prompts out."""

    def log_step(self, *_) -> None:
        """Rank 0 alone writes the log."""

    def save(self, _, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        gather(policy, optimizer)

    def end(self, *_) -> bool:
        return from_rank_0(None)
