"""The log of a run, on rank 0: runs/NAME/log.jsonl, one flat object a line. docs/log.md explains
every column.

With each line more is written: some rollouts (machinery/kept.py), the progress bar, a tracker. And
it is warned of what often comes before a run goes wrong; docs/findings.md says how each was found.
"""

import contextlib
import dataclasses
import importlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import loss
from core.feed import Feed
from core.rollouts import Batch, Group
from core.screen import warn
from core.settings import Settings
from curve.logs import Series
from data.load import Source
from machinery.evaluation import completion_columns
from machinery.folder import append_line, checkpoints, drop_later, step_of
from machinery.kept import KeptRollouts
from machinery.measures import Compute, Totals

REMEMBERED = 10  # training lines that `warnings` looks at
MOST_SKIPPED = 5  # steps in a row that were not finite; then the run ends
ALIKE = 0.75  # the share of groups without variance; with more in REMEMBERED steps, few teach
# KL of a step, divided by the entropy. Above this in two of three steps, most runs fell soon after.
DRIFT = 2.0
# Nats: an on-policy ratio that is off by 5 % on average is more than numerics.
MISMATCH_TOO_LARGE = 0.05


# --- the file and the tracker ---------------------------------------------------------------------


class Log:
    """Adds lines to log.jsonl of a run, and sends their numbers to the tracker of --track."""

    def __init__(self, folder: Path, settings: Settings, began: float):
        """began: clock reading when the run began."""
        self.folder, self.settings, self.began = folder, settings, began
        self.path = folder / "log.jsonl"
        self.path.touch()
        self.tracker = settings.track
        self.send = None  # to the tracker, from the first line on

    def add(self, line: dict) -> None:
        """Add a line, with its time. JSON has no NaN and no infinity: they become null. A tracker
        gets its numbers as train/loss or validation/pass_rate. One that fails gets nothing more,
        and the run goes on."""
        line["wall_seconds"] = time.monotonic() - self.began
        written = json.loads(json.dumps(line), parse_constant=lambda _: None)
        append_line(self.path, written)
        if not self.tracker:
            return
        numbers = {
            f"{line['kind']}/{key}": value
            for key, value in written.items()
            if type(value) in (int, float)
        }
        try:
            self.send = self.send or start_tracker(self.settings, self.folder)
            self.send(numbers, step=line["step"])
        except Exception as error:  # of whatever kind: the run is worth more than its tracker
            warn("tracker", f"--track {self.tracker} has failed, and gets nothing more ({error!r})")
            self.tracker = None


def start_tracker(settings: Settings, folder: Path) -> Callable:
    """What sends a dict of numbers, and their step, to the tracker of --track."""
    if settings.track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(folder / "tensorboard")

        def send(numbers, step):
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return send
    module = importlib.import_module(settings.track)  # wandb, or trackio, which has the same calls
    module.init(project="scalerl", name=folder.name, config=dataclasses.asdict(settings))
    return module.log


# --- what rank 0 remembers ------------------------------------------------------------------------


class Record:
    """Makes the lines of a run's log, and knows what they have said."""

    def __init__(self, folder: Path, compute: Compute, feed: Feed, state: dict | None = None):
        """state: of a checkpoint to go on from. The files lose the lines of later steps, which will
        come again."""
        self.folder, self.compute, self.feed = folder, compute, feed
        self.settings, self.sources = feed.settings, feed.prompts.sources
        state = state or {"step": -1, "wall_seconds": 0.0, "compute": compute.columns()}
        compute.restore(state["compute"])
        began = time.monotonic() - state["wall_seconds"]
        self.log = Log(folder, self.settings, began)
        self.rollouts = KeptRollouts(folder / "rollouts.jsonl", self.settings, feed.prompts, began)
        drop_later(self.rollouts.path, state["step"])
        lines = drop_later(self.log.path, state["step"])
        self.validations = [line for line in lines if line["kind"] == "validation"]
        self.steps = [line for line in lines if line["kind"] == "train"][-REMEMBERED:]
        # Clock readings between which the trainer waited for the last batch.
        self.waited = (0.0, 0.0)
        self.seconds = 0.0  # of training in this process, until the last line
        self.late = 0.0  # seconds of a generator's work that no line has counted yet
        self.progress = None  # a progress bar, as soon as training begins
        self.failure = ""  # why the run cannot go on

    @property
    def last_validation(self) -> int:
        """The step of the last validation; -1 if there has been none."""
        return self.validations[-1]["step"] if self.validations else -1

    def state(self) -> dict:
        """All that a new Record goes on from, for a checkpoint; run.py adds the step."""
        return {
            "compute": self.compute.columns(),
            "wall_seconds": time.monotonic() - self.log.began,
        }

    def series(self) -> list[Series]:
        """The curve of each source so far. Compute is FLOPs, which no other load on the machine
        disturbs."""
        x = np.array([line["compute_flops"] for line in self.validations])
        curves = []
        for source in self.sources:
            column = f"pass_rate/{source.name}" if len(self.sources) > 1 else "pass_rate"
            y = np.array([line[column] for line in self.validations])
            num_examples = len(source.validation) * self.settings.validation_samples
            curves.append(Series(source.name, x, y, "compute_flops", column, num_examples))
        return curves

    def log_step(
        self, step: int, batch: Batch, totals: Totals, credit: loss.Credit, figures: dict
    ) -> None:
        """Log a step: what it has computed, its completions, and what has happened since the line
        before. figures: further columns."""
        feed = self.feed
        self.compute.add(batch, totals.parts)
        zero_variance_P = loss.zero_variance(credit.rewards_PG, batch.usable_PG)
        line = {
            "kind": "train",
            "step": step,
            "pass_rate": (batch.scores_PG == 1).float().mean().item(),
            "reward_mean": credit.rewards_PG.mean().item(),
            "zero_variance_fraction": zero_variance_P.float().mean().item(),
            **figures,
            **totals.columns(),
            "off_policyness_mean": float(batch.ages_N.mean()),
            "off_policyness_max": int(batch.ages_N.max()),
            **completion_columns(batch.judged),
            "prompts_retired": sum(len(order.retired) for order in feed.orders),
            "epoch": min(order.epoch for order in feed.orders),
            **self._rates(batch),
            **self.compute.columns(),
        }
        self.log.add(line)
        self.rollouts.add_times(step, self.waited, feed.events)
        self.rollouts.add_batch(step, batch, credit, totals)
        feed.events = []

        self.steps = [*self.steps, line][-REMEMBERED:]
        prompts_left = sum(order.left for order in feed.orders)
        texts = warnings(self.steps, prompts_left, self.settings.groups_per_step)
        self.failure = texts.pop("failure", "")
        self._show(step, texts)

    def log_validation(self, step: int, groups: list[Group], mismatch: dict) -> None:
        """Log a validation. The validation of step 0 gives R0, at compute 0."""
        compute, apart = self.compute.columns(), differ(mismatch["mismatch_mean"])
        if step == 0:
            compute = dict.fromkeys(compute, 0)
            # Both sides hold the model that RL starts from: nothing but a fault can part them.
            self.failure = apart
        judged = [pair for group in groups for pair in group.judged()]
        line = {
            "kind": "validation",
            "step": step,
            "num_examples": len(judged),
            **pass_rates(groups, self.sources),
            **completion_columns(judged),
            **mismatch,
            **compute,
        }
        self.rollouts.add_validation(step, groups)
        self.validations.append(line)
        self.log.add(line)
        fallen, _ = fall(self.validations, self.folder)
        self._show(step, {"mismatch": apart, "fall": fallen})

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock of training during a validation. The time in which generators go on
        sampling for training is added to the compute. The rates of the steps leave it out."""
        feed, compute = self.feed, self.compute
        began, busy, tokens = time.monotonic(), feed.busy_seconds, feed.sampled_tokens
        yield
        compute.device_seconds += feed.busy_seconds - busy
        compute.started += time.monotonic() - began
        feed.busy_seconds, feed.sampled_tokens = busy, tokens

    def _rates(self, batch: Batch) -> dict:
        """Columns of who has waited for whom since the line before, and of the tokens handled in a
        second: for the trainer the sampled tokens of this batch, filtered groups included."""
        feed, generators, (began, ended) = self.feed, len(self.feed.engines), self.waited
        seconds, waited = self.compute.seconds - self.seconds, ended - began
        self.seconds += seconds
        busy, tokens = feed.busy_seconds, feed.sampled_tokens
        feed.busy_seconds, feed.sampled_tokens = 0.0, 0
        # A report may cover more time than has gone by since the line before: what is too much
        # counts in the next line.
        worked = self.late + busy / generators
        self.late = max(0.0, worked - seconds)
        return {
            "trainer_idle_fraction": waited / seconds,
            "generator_idle_fraction": 1 - (worked - self.late) / seconds,
            "generator_tokens_per_second": generators * tokens / busy if busy else None,
            "trainer_tokens_per_second": int(batch.lengths_PG.sum()) / max(seconds - waited, 1e-9),
        }

    def _show(self, step: int, texts: dict) -> None:
        """Say each warning that has a text on the screen and in the log, the first time in this
        process. And move the progress bar."""
        for about, text in texts.items():
            if text and warn(about, text):
                self.log.add({"kind": "warning", "step": step, "about": about, "text": text})
        words = []
        if self.validations:
            words = [f"last validation {self.validations[-1]['pass_rate']:.3f}"]
        if self.steps:
            now = self.steps[-1]
            seconds = now["wall_seconds"] / now["step"]  # with validations and their like
            left = seconds * (self.settings.steps - now["step"]) / 60
            words += [
                f"batch {now['pass_rate']:.3f}",
                f"{now['groups_counted']} of {self.settings.groups_per_step} groups count",
                f"off-policy {now['off_policyness_mean']:.1f}",
                f"{seconds:.1f} s a step, {left:.0f} minutes left",
            ]
        self.progress.show(step, ", ".join(words))


# --- columns --------------------------------------------------------------------------------------


def pass_rates(groups: list[Group], sources: list[Source]) -> dict:
    """Columns: mean pass rate and mean score of a validation, and the share of the problems that
    any completion solves. Of several sources the means by weight, and those of each."""
    means, weights = {}, [source.weight for source in sources]
    for name in ("pass_rate", "pass_at_n", "score_mean"):
        of_each = {}
        for i, source in enumerate(sources):
            values = [getattr(group, name) for group in groups if group.source == i]
            of_each[f"{name}/{source.name}"] = float(np.mean(values))
        means[name] = float(np.average([*of_each.values()], weights=weights))
        means |= of_each if len(of_each) > 1 else {}
    return means


# --- warnings -------------------------------------------------------------------------------------


def warnings(lines: list[dict], prompts_left: int, groups_per_step: int) -> dict:
    """The warnings after a step, by what they are about; "failure" is why the run cannot go on.
    lines: the last training lines of the log, at most REMEMBERED. prompts_left: prompts that are
    not retired."""
    now, texts = lines[-1], {}
    skipped = [line["skipped"] for line in lines]
    few = [
        line["zero_variance_fraction"] >= ALIKE and line["pass_rate"] < loss.RETIRE_AT
        for line in lines
    ]
    # A step in which nothing was trained on has no KL and no entropy, and is no drift.
    far = [(each["kl_estimate"] or 0) > DRIFT * (each["entropy"] or math.inf) for each in lines]
    if now["truncated_fraction"] > loss.TRUNCATED_TOO_OFTEN:
        texts["truncation"] = (
            f"{now['truncated_fraction']:.0%} of the completions of step {now['step']} reached"
            " their token limit without ending, and are left out; instabilities often follow above"
            f" {loss.TRUNCATED_TOO_OFTEN:.0%}: raise --answer-budget or --thinking-budget"
        )
    if sum(far[-3:]) >= 2:
        texts["drift"] = (
            "in two of the last three steps the policy was further from the one that had sampled"
            f" the batch than {DRIFT:g} times its entropy (kl_estimate in the log); the pass rate"
            " often falls soon after: the learning rate is likely too high"
        )
    if prompts_left < groups_per_step:
        texts["few prompts"] = (
            f"{prompts_left} prompts are left that are not solved, fewer than the"
            f" {groups_per_step} that a step takes, so each step trains on the same ones again and"
            " again; runs often fall from here on. With --least-prompts N solved ones come again"
        )
    if sum(few) == REMEMBERED:
        texts["few groups"] = (
            f"in each of the last {REMEMBERED} steps {ALIKE:.0%} of the groups or more had equal"
            " rewards, so few prompts decide where a step goes, or none. The pass rate of this step"
            f" is {now['pass_rate']:.2f}: near 0 the problems are too hard for the model"
            " (docs/data.md: imitate first), or its answers are not found in what it writes"
            " (`python -m tools.view` shows it). Otherwise more --prompts-per-step, larger groups"
            " (--completions-per-prompt), or data that are solved now and then help; a smaller K of"
            " --asynchrony too, if the policy moves fast"
        )
    if now["skipped"]:
        texts["not finite"] = (
            f"the loss or the gradient of step {now['step']} is not finite. The step is skipped,"
            " and counted as `skipped` in the log"
        )
    if sum(skipped[-MOST_SKIPPED:]) == MOST_SKIPPED:
        texts["failure"] = (
            f"the loss or the gradient of each of the last {MOST_SKIPPED} steps is not finite, and"
            " the parameters stay as they were: try a new run with a lower --learning-rate, or with"
            " --dtype float32; its --model may be that of an earlier checkpoint"
        )
    return texts


def differ(mismatch: float) -> str:
    """A warning, if generator and trainer give a token different probabilities; otherwise ''.
    mismatch: nats a token."""
    if mismatch <= MISMATCH_TOO_LARGE:
        return ""
    return (
        f"generator and trainer differ by {mismatch:.3f} nats a token, with the same parameters;"
        " the importance ratios measure that and not the policy: keep --fp32-logits, or try"
        " --engine torch, --dtype float32 or --no-share-prompts"
    )


def fall(validations: list[dict], folder: Path) -> tuple[str, Path | None]:
    """A warning, if the pass rate has fallen since the best validation by more than a fifth of the
    gain and by more than chance; and the newest checkpoint of the run that is not after the best
    validation. '' and None for what there is not."""
    if not validations:
        return "", None
    curve = [line["pass_rate"] for line in validations]
    peak, now = validations[np.argmax(curve)], validations[-1]
    before = [each for each in checkpoints(folder) if step_of(each) <= peak["step"]]
    best = before[-1] if before else None
    chance = 4 * math.sqrt(0.5 / now["num_examples"])  # 4 standard errors of a difference
    if max(curve) - curve[-1] <= max(0.2 * (max(curve) - curve[0]), chance):
        return "", best
    text = (
        f"the pass rate has fallen from {peak['pass_rate']:.3f} at step {peak['step']}"
        f" to {now['pass_rate']:.3f} at step {now['step']}"
    )
    if best:
        text += (
            f"; once the run is stopped, --resume {folder} --from-step {step_of(best)}"
            " goes on from before the fall"
        )
    return text, best
