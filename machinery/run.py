"""What stands around the loop of train.py. `open_run` checks everything before a process starts.
`Run` answers the loop, and ends the run: with its results, with its processes, and with the reason
if something failed."""

import contextlib
import dataclasses
import inspect
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
from core.engine import engine_settings
from core.feed import Feed, Prompts
from core.generators import GeneratorFailed
from core.model import (
    first_learning_rate,
    load_model,
    load_tokenizer,
    make_decoding,
    refuse_prompts,
    refuse_too_long,
    render,
)
from core.policy import Policy
from core.rollouts import Batch, Group, Rollout, SharedParameters
from core.screen import say
from core.settings import Settings, devices_here, model_path, read_sources, refuse_few_problems
from core.torch_engine import refuse_wrong_over_slots
from curve.fit import fit_sigmoid
from curve.forecast import levelled_off
from curve.plots import plot_variants
from curve.report import describe, report
from data.load import Source
from data.verify import VerifierPool
from machinery.folder import (
    checkpoint_of,
    checkpoints,
    last_line,
    lock_folder,
    make_folder,
    new_folder,
    read_state,
    step_of,
    whole_folder,
    write_checkpoint,
    write_config,
)
from machinery.measures import Compute, Totals, attention_width, matmul_parameters
from machinery.ranks import Stop, from_rank_0, give_way_to_a_dead_rank
from machinery.record import Record, few_groups_count, refuse_missing_tracker
from machinery.trainer import gather, numerics_mismatch

SHARED_MEMORY = Path("/dev/shm")  # where Linux has what processes share
COMPARED = 64  # completions of a validation whose log-probabilities trainer and generator compare


@dataclass(frozen=True)
class Start:
    """What every rank starts from."""

    settings: Settings
    step: int  # optimizer steps made
    model: str  # folder or hub name
    moments: Path | None  # of the optimizer, in a checkpoint
    parameters: SharedParameters  # nothing is written there yet
    longest: int  # tokens of a prompt and its completion, at most


# --- how a run is opened --------------------------------------------------------------------------


def open_run(asked: Settings, sources: list[Source] | None = None) -> "Run":
    """Check everything that can be checked before a process is started, and make the run's folder
    or open it again. Returns rank 0's Run. sources: those of --data, if they are read already.

    The settings of the run are in its `start` (`settings_of_the_run`). ValueError or OSError if the
    flags, the data or the model cannot be used.
    """
    # The data, and where the run goes on.
    refuse_missing_tracker(asked.track)
    sources = sources or read_sources(asked)
    folder, lock, checkpoint = find_folder(asked)
    first_model = newest_model = model_path(asked.model)
    step, moments, state = 0, None, None
    if checkpoint is not None:
        state = read_state(checkpoint)
        step, moments = state["step"], checkpoint / "optimizer.safetensors"
        newest_model = str(checkpoint / "model")
        refuse_finished(folder, step, asked)

    # The model and its prompts. Engines are made of the run's first model, which stays where it is;
    # their parameters come from the trainer.
    model = load_model(newest_model)
    prompts = make_prompts(asked, first_model, model, sources)
    odd = refusals(lambda: refuse_wrong_over_slots(model, asked.model))
    settings = settings_of_the_run(asked, model, odd)
    generators, trainers = devices_here(settings)
    engines = [
        engine_settings(settings, devices, first_model, prompts.decoding) for devices in generators
    ]
    if odd and engines[0].engine == "torch":
        raise ValueError(odd[0])

    # Who does what.
    refuse_small_shared_memory(4 * model.num_parameters())
    parameters = SharedParameters(model, len(trainers))
    stop = Stop()
    feed = Feed(settings, prompts, engines, parameters, stop.asked, state)
    if state is not None and state["data"] != feed.data:
        raise ValueError(
            f"--resume {folder}: the problems of --data {' '.join(asked.data)} are not those that"
            " its checkpoint was made with: put the old data back, or train its model in a new run:"
            f" --model {newest_model}"
        )
    if not (asked.resume or asked.one_process):
        refuse_raising_tasks(asked, sources)

    # Only now is anything written.
    folder = make_folder(folder, settings)
    lock = lock or lock_folder(folder)
    write_config(folder, asked, learning_rate=settings.learning_rate)
    if settings.defaults != "toy":
        say(f"The settings start from --defaults {settings.defaults}; config.json has them all.")
    if settings.resume:
        say(f"{folder}: going on from step {step}")
        for checkpoint in checkpoints(folder):
            if step_of(checkpoint) > step:  # it comes again
                shutil.rmtree(checkpoint)
    devices = [*sum(generators, ()), *trainers]
    alone = settings.one_process or "cpu" not in devices  # a GPU that does both is one
    number = len({*devices}) if alone else len(devices)
    compute = Compute(number, matmul_parameters(model), attention_width(model))
    record = Record(settings, folder, compute, feed, state)
    start = Start(settings, step, newest_model, moments, parameters, prompts.decoding.longest)
    return Run(start, model, feed, record, stop, lock)


def settings_of_the_run(asked: Settings, model: PreTrainedModel, odd: list[str]) -> Settings:
    """The settings with a learning rate that suits the model, if they have none; without shared
    prompts, if something forbids them; and with what --one-process wants. odd: why the model cannot
    be computed over a cache, if so."""
    changes = {}
    if asked.one_process:  # generator and trainer wait for each other
        asynchrony = asked.recipe.asynchrony
        if asynchrony != "ppo-1":
            why = "because of --one-process"
            say(f"The run trains with --asynchrony ppo-1, not {asynchrony}, {why}.")
        changes["recipe"] = dataclasses.replace(asked.recipe, asynchrony="ppo-1")
        changes["engine"] = "torch"
    if asked.learning_rate is None:
        parameters = model.num_parameters()
        changes["learning_rate"] = rate = first_learning_rate(parameters)
        say(f"The learning rate is {rate}, for {parameters:,} parameters.")
    reasons = odd
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        reasons = ["this model takes the place in the cache for the position"]
    if asked.gradient_checkpointing:
        reasons = ["with --gradient-checkpointing a layer would add its keys twice to their cache"]
    if asked.share_prompts and reasons:
        say(f"Prompts are not shared: {reasons[0]}.")
        changes["share_prompts"] = False
    return dataclasses.replace(asked, **changes)


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


def make_prompts(
    settings: Settings, path: str, model: PreTrainedModel, sources: list[Source]
) -> Prompts:
    """The prompts of these sources for the model, whose tokenizer lies at `path`. The first is
    shown as the model gets it. ValueError if it cannot read them; it says all that is wrong with
    the prompts and the budgets."""
    tokenizer = load_tokenizer(path)
    recipe = settings.recipe
    texts = [problem.prompt for source in sources for problem in source.train + source.validation]
    decoding = []

    def fit_budgets() -> None:
        made = make_decoding(tokenizer, settings, recipe.length_control, recipe.fp32_logits)
        decoding.append(made)
        refuse_too_long(model, made)

    wrong = refusals(
        lambda: refuse_few_problems(settings, sources),
        fit_budgets,
        lambda: refuse_prompts(tokenizer, texts, settings),
    )
    if wrong:
        raise ValueError(". Also: ".join(wrong))
    ids = render(tokenizer, texts[0], settings.thinking, settings.system)
    ends = " or ".join(repr(tokenizer.decode([token])) for token in decoding[0].eos)
    say(f"The first prompt, as the model gets it: {tokenizer.decode(ids)!r}")
    say(f"A completion ends with {ends}, or after {decoding[0].longest_completion} tokens.")
    return Prompts(sources, tokenizer, decoding[0])


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


def refusals(*checks: Callable[[], None]) -> list[str]:
    """What these checks refuse, each in a sentence."""
    sentences = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            sentences.append(str(error))
    return sentences


# --- the run --------------------------------------------------------------------------------------


class Run:
    """Where the groups of the loop come from, where results go, and why the run ends. Rank 0 has
    all of it. Other ranks have the start alone, for the calls that all ranks take part in."""

    def __init__(
        self,
        start: Start,
        model: PreTrainedModel | None = None,
        feed: Feed | None = None,
        record: Record | None = None,
        stop: Stop | None = None,
        lock: TextIO | None = None,
    ):
        """model: of the start, on the CPU in fp32. lock: of the folder; it is held as long as this
        object lives."""
        self.start, self.settings, self.model = start, start.settings, model
        self.feed, self.record, self.stop, self.lock = feed, record, stop, lock
        self.folder = record and record.folder
        self.error = ""  # what went wrong in this process
        self.stopped_at_once = False  # by a second Ctrl-C

    # In which all ranks take part

    def take_model(self) -> PreTrainedModel:
        """The model of the start, on the CPU in fp32: another one at each call."""
        model, self.model = self.model or load_model(self.start.model), None
        return model

    def validate(self, version: int, policy: Policy, settings: Settings) -> None:
        """Measure the pass rate of the held-out problems with this version of the parameters; that
        of version 0 is R0. All ranks compare the log-probabilities of some of these completions
        with the generator's."""
        with self.record.pause() if self.record else contextlib.nullcontext():
            compared = from_rank_0(self._sample_held_out, version)
            if not compared:  # the run ends
                return
            mismatch = numerics_mismatch(policy, compared, settings)
        if self.record:
            self.record.log_validation(version, self.held_out, mismatch)

    def save(self, version: int, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        """Write a checkpoint of this version. Parameters and moments come from all ranks."""
        parameters, moments = gather(policy, optimizer)
        if self.record is None:
            return
        state = {"step": version, **self.feed.state(), **self.record.state()}
        tokenizer = self.feed.prompts.tokenizer
        write_checkpoint(self.folder, policy.model, tokenizer, parameters, moments, state)
        before_fall = self.record.checkpoint_before_fall()
        # The newest are kept, and the one from before a fall.
        for old in checkpoints(self.folder)[: -self.settings.keep_checkpoints]:
            if old != before_fall:
                shutil.rmtree(old)

    # Which rank 0 answers

    def begin(self, version: int) -> None:
        """Start the generators, and the clock of training."""
        self.feed.start()
        self.record.begin(version)

    def goes_on(self, version: int) -> bool:
        """Whether another step is made."""
        done = version >= self.settings.steps
        return not (done or self.over() or self.has_levelled_off(version))

    def batch(self, version: int) -> list[Group] | None:
        """The groups to train this version of the parameters on. None if every prompt is retired,
        or if the run ends."""
        began = time.monotonic()
        groups = self.feed.batch(version)
        self.record.waited = began, time.monotonic()
        return groups

    def wants_validation(self, version: int, at_the_end: bool = False) -> bool:
        """Whether a validation of this version is due and has not been made yet."""
        regular = version % self.settings.validation_every == 0
        due = regular or at_the_end or version == self.settings.steps
        return due and self.record.last_validation < version and not self.over()

    def retire(self, groups: list[Group]) -> None:
        """No-Positive-Resampling: the prompts that these groups have solved do not come again."""
        self.feed.retire(groups)

    def log_step(
        self, step: int, batch: Batch, totals: Totals, worth: loss.Worth, figures: dict
    ) -> None:
        """Write down what has happened. figures: further columns of the log."""
        self.record.log_step(step, batch, totals, worth, figures)

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
        return not saved and not of_no_use

    def _sample_held_out(self, version: int) -> list[Rollout]:
        """Some of the completions of a validation."""
        self.held_out = self.feed.validate(version) or []
        rollouts = [rollout for group in self.held_out for rollout in group.rollouts.values()]
        return rollouts[:: max(1, len(rollouts) // COMPARED)]

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
                f"{str(error).partition('. ')[0]}: lower --slots or --tokens-per-micro-batch, add"
                " --gradient-checkpointing, --trainers or --offload, or take a smaller --model"
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
