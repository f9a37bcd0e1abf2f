"""The log of a run, on rank 0: runs/NAME/log.jsonl, one flat object a line. docs/log.md explains
every column.

With each line more is written: some rollouts (machinery/kept.py), the progress bar, a tracker. And
it is warned of what often comes before a run goes wrong; docs/findings.md says how each was found.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import loss
from core.feed import Feed
from core.rollouts import Batch, Group
from core.screen import Progress, say, warn
from core.settings import Settings, devices_here
from curve.forecast import outlook
from curve.logs import Series
from machinery.evaluation import completion_columns, graded
from machinery.folder import append_whole, checkpoints, drop_later, step_of
from machinery.kept import KeptRollouts
from machinery.measures import Compute, Rates, Totals, time_left

REMEMBERED = 10  # training lines that `step_warnings` looks at
MOST_SKIPPED = 5  # steps in a row that were not finite; then the run ends
# The share of the groups of a batch. If no more count in REMEMBERED steps, steps are mostly noise.
FEW_GROUPS = 0.25
FLAT_STEPS = 5  # steps in a row without any variance in the rewards
# KL of a step, divided by the entropy. Above this in two of three steps, most runs fell soon after.
DRIFT = 2.0
# Nats: an on-policy ratio that is off by 5 % on average is more than numerics.
MISMATCH_TOO_LARGE = 0.05


class Record:
    """Writes the log of a run, and knows what its lines have said."""

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        compute: Compute,
        feed: Feed,
        state: dict | None = None,
    ):
        """state: of a checkpoint to go on from. The files lose the lines of later steps, which will
        come again."""
        self.settings, self.folder, self.compute, self.feed = settings, folder, compute, feed
        self.sources = feed.prompts.sources
        self.rollouts = KeptRollouts(folder, settings, feed.prompts.tokenizer, self.sources)
        self.tracker = Tracker(settings.track, folder, dataclasses.asdict(settings))
        self.rates = Rates(compute, feed)
        state = state or {"step": -1, "wall_seconds": 0.0, "compute": compute.columns()}
        compute.restore(state["compute"])
        self.began = self.rollouts.run_began = time.monotonic() - state["wall_seconds"]
        self.path = folder / "log.jsonl"
        self.path.touch()
        lines = drop_later(self.path, state["step"])
        drop_later(self.rollouts.path, state["step"])
        self.validations = [line for line in lines if line["kind"] == "validation"]
        self.last_steps = [line for line in lines if line["kind"] == "train"][-REMEMBERED:]
        # Clock readings between which the trainer waited for the last batch.
        self.waited = (0.0, 0.0)
        self.progress = None  # the progress bar, as soon as training begins
        self.outlooks = []  # where the curve of each source is going, in words for the bar
        self.failure = ""  # why the run cannot go on

    @property
    def last_validation(self) -> int:
        """The step of the last validation; -1 if there has been none."""
        return self.validations[-1]["step"] if self.validations else -1

    def state(self) -> dict:
        """All that a new Record goes on from, for a checkpoint; run.py adds the step."""
        return {"compute": self.compute.columns(), "wall_seconds": time.monotonic() - self.began}

    def log(self, line: dict) -> None:
        """Add a line to log.jsonl, at once. JSON has no NaN and no infinity: they become null."""
        line["wall_seconds"] = time.monotonic() - self.began
        written = {}
        for column, value in line.items():
            not_finite = isinstance(value, float) and not math.isfinite(value)
            written[column] = None if not_finite else value
        append_whole(self.path, json.dumps(written) + "\n")
        self.tracker.log(written)

    def warn(self, step: int, texts: dict[str, str]) -> None:
        """Say each warning on the screen and in the log, the first time in this process."""
        for about, text in texts.items():
            if warn(about, text):
                self.log({"kind": "warning", "step": step, "about": about, "text": text})

    # Training

    def begin(self, step: int) -> None:
        """Say who has which devices, and start the clock of training and the progress bar."""
        generators = ", ".join(name for engine in self.feed.engines for name in engine.devices)
        slots = ", ".join(str(generator.slots) for generator in self.feed.generators)
        trainers = ", ".join(devices_here(self.settings)[1])
        say(f"devices: generators {generators} with {slots} slots; trainers {trainers}")
        self.compute.started = time.monotonic()
        self.progress = Progress("training", self.settings.steps, step)

    def log_step(
        self, step: int, batch: Batch, totals: Totals, worth: loss.Worth, figures: dict
    ) -> None:
        """Log a step: what it has computed, its completions, and what has happened since the line
        before. figures: further columns."""
        orders = self.feed.orders
        began, ended = self.waited
        self.compute.add(batch, totals.sums["fed"], totals.sums["pairs"])
        zero_variance_P = loss.zero_variance(worth.rewards_PG, batch.usable_PG)
        line = {
            "kind": "train",
            "step": step,
            "pass_rate": (batch.scores_PG == 1).float().mean().item(),
            "reward_mean": worth.rewards_PG.mean().item(),
            "zero_variance_fraction": zero_variance_P.float().mean().item(),
            **figures,
            **totals.columns(),
            "off_policyness_mean": float(batch.ages_N.mean()),
            "off_policyness_max": int(batch.ages_N.max()),
            **completion_columns(batch.judged),
            "groups_waiting": sum(group.finished for group in self.feed.under_way.values()),
            "prompts_retired": sum(len(order.retired) for order in orders),
            "epoch": min(order.epoch for order in orders),
            **self.rates.columns(int(batch.lengths_PG.sum()), ended - began),
            **self.compute.columns(),
        }
        self.log(line)
        self.rollouts.add_times(step, self.waited, self.feed.events)
        self.rollouts.add_batch(step, batch, worth, totals.tokens)
        self.feed.events = []

        self.last_steps = [*self.last_steps, line][-REMEMBERED:]
        prompts_left = sum(order.left for order in orders)
        of_prompts = min(order.number for order in orders)
        groups = self.settings.groups_per_step
        warnings = step_warnings(self.last_steps, prompts_left, of_prompts, groups)
        self.warn(step, warnings)
        self.failure = step_failure(self.last_steps)
        self.show(step)

    def show(self, step: int) -> None:
        """Move the progress bar."""
        words = []
        if self.validations:
            rates = [f"{series.y[-1]:.3f}" for series in self.series()]
            if len(rates) > 1:
                rates = [f"{source.name} {rate}" for source, rate in zip(self.sources, rates)]
            words.append(f"last validation {', '.join(rates)}")
            if "score_mean" in self.validations[-1]:
                words.append(f"score {self.validations[-1]['score_mean']:.3f}")
        words += self.outlooks
        if self.last_steps:
            first, now = self.last_steps[0], self.last_steps[-1]
            words.append(f"batch {now['pass_rate']:.3f}")
            words.append(f"{now['groups_counted']} of {self.settings.groups_per_step} groups count")
            words.append(f"off-policy {now['off_policyness_mean']:.1f}")
            if now is not first:
                hours = now["compute_device_hours"] - first["compute_device_hours"]
                seconds = 3600 * hours / self.compute.devices / (now["step"] - first["step"])
                digits = 0 if seconds > 10 else 1
                words.append(f"{seconds:.{digits}f} s a step")
            if self.validations:
                words.append(time_left(self.validations[0], now, self.settings.steps))
        self.progress.show(step, ", ".join(filter(None, words)))

    def end(self, step: int, reason: str) -> None:
        """Stop the clock of training. The log gets the reason why the run is over, if it came to
        its end."""
        self.compute.ended = time.monotonic()
        self.progress.close()
        if reason:
            self.log({"kind": "end", "step": step, "reason": reason})
            if step < self.settings.steps:
                say(f"{reason}: training ends.")

    # Validations

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock of training during a validation. The time in which generators go on
        sampling for training is added to the compute. The rates of the steps leave it out."""
        began, busy, tokens = time.monotonic(), self.feed.busy_seconds, self.feed.sampled_tokens
        yield
        sampling = self.feed.busy_seconds - busy
        self.compute.device_seconds += sampling * self.settings.tensor_parallel
        self.compute.paused += time.monotonic() - began
        self.feed.busy_seconds, self.feed.sampled_tokens = busy, tokens

    def log_validation(self, step: int, groups: list[Group], mismatch: dict[str, float]) -> None:
        """Log a validation. The validation of step 0 gives R0, at compute 0."""
        compute = self.compute.columns()
        if step == 0:
            compute = dict.fromkeys(compute, 0)
        judged = [pair for group in groups for pair in group.judged()]
        line = {
            "kind": "validation",
            "step": step,
            **self._pass_rates(groups),
            **completion_columns(judged),
            **mismatch,
            **compute,
        }
        self.rollouts.add_validation(step, groups)
        self.validations.append(line)
        self.log(line)
        warnings = validation_warnings(self.validations, self.checkpoint_before_fall())
        self.warn(step, warnings)
        if step == 0:
            # Both sides hold the model that RL starts from: nothing but a fault can part them.
            self.failure = warnings.get("mismatch", "")
        self.outlooks = [outlook(series) for series in self.series()]
        self.show(step)

    def checkpoint_before_fall(self) -> Path | None:
        """If the pass rate has fallen, the newest checkpoint that is not after the run's best
        validation."""
        peak = fell_from(self.validations)
        if not peak:
            return None
        before = [each for each in checkpoints(self.folder) if step_of(each) <= peak["step"]]
        return max(before, key=step_of, default=None)

    def _pass_rates(self, groups: list[Group]) -> dict:
        """Mean pass rate of a validation, and the share of the problems that any completion solves.
        From the first one on in which a task gives a score between 0 and 1, also the mean
        score."""
        means = self._means("pass_rate", groups) | self._means("pass_at_n", groups)
        verdicts = [verdict for group in groups for _, verdict in group.judged()]
        logged_before = self.validations and "score_mean" in self.validations[-1]
        if logged_before or graded(verdicts):
            means |= self._means("score_mean", groups)
        return {"pass_rate": means.pop("pass_rate"), "num_examples": len(verdicts), **means}

    def _means(self, name: str, groups: list[Group]) -> dict:
        """The mean of this attribute of groups: of all sources with their weights, and also of each
        if there are several."""
        means = {}
        for i, source in enumerate(self.sources):
            of_source = [getattr(group, name) for group in groups if group.source == i]
            means[f"{name}/{source.name}"] = float(np.mean(of_source))
        weights = [source.weight for source in self.sources]
        of_all = {name: float(np.average([*means.values()], weights=weights))}
        return of_all | means if len(means) > 1 else of_all

    def series(self) -> list[Series]:
        """The curve of each source so far. Compute is FLOPs, which no other load on the machine
        disturbs."""
        x = np.array([line["compute_flops"] for line in self.validations])
        curves = []
        for source in self.sources:
            name, column = self.folder.name, "pass_rate"
            if len(self.sources) > 1:
                name, column = source.name, f"pass_rate/{source.name}"
            y = np.array([line[column] for line in self.validations])
            num_examples = len(source.validation) * self.settings.validation_samples
            curves.append(Series(name, x, y, "compute_flops", column, num_examples))
        return curves


# --- warnings -------------------------------------------------------------------------------------


def step_warnings(
    lines: list[dict], prompts_left: int, of_prompts: int, groups_per_step: int
) -> dict[str, str]:
    """The warnings after a step, by what they are about. lines: the last training lines of the log,
    at most REMEMBERED. prompts_left: prompts that are not retired. of_prompts: all prompts of the
    smallest source."""
    now, warnings = lines[-1], {}
    if now["truncated_fraction"] > loss.TRUNCATED_TOO_OFTEN:
        warnings["truncation"] = (
            f"{now['truncated_fraction']:.0%} of the completions of step {now['step']} reached"
            " their token limit without ending, and are left out; instabilities often follow above"
            f" {loss.TRUNCATED_TOO_OFTEN:.0%}: raise --answer-budget or --thinking-budget"
        )
    if sum(map(has_drifted, lines[-3:])) >= 2:
        warnings["drift"] = (
            "in two of the last three steps the policy was further from the one that had sampled"
            f" the batch than {DRIFT:g} times its entropy (kl_estimate in the log); the pass rate"
            " often falls soon after: the learning rate is likely too high"
        )
    if prompts_left < groups_per_step:
        warnings["few prompts"] = (
            f"{prompts_left} prompts are left that are not solved, fewer than the"
            f" {groups_per_step} that a step takes, so each step trains on the same ones again and"
            " again; runs often fall from here on. --least-prompts"
            f" {min(10 * groups_per_step, of_prompts // 2)} has the solved ones come again in time"
        )
    if in_a_row(lines, FLAT_STEPS, lambda line: line["zero_variance_fraction"] == 1):
        warnings["flat"] = (
            f"in each of the last {FLAT_STEPS} steps all completions of a prompt got the same"
            " reward: there is nothing to learn from. The pass rate of this step is"
            f" {now['pass_rate']:.2f}: near 0 the problems are too hard for the model"
            " (docs/data.md: imitate first), or its answers are not found in what it writes;"
            " near 1 they are too easy. `python -m tools.view` shows completions and verdicts"
        )
    elif few_groups_count(lines, groups_per_step):
        warnings["few groups"] = (
            f"in each of the last {REMEMBERED} steps at most {FEW_GROUPS:.0%} of the groups"
            " counted: all completions of the others got the same reward, so few prompts decide"
            " where a step goes. More --prompts-per-step, larger groups (--completions-per-prompt),"
            " or data that are solved now and then help; a smaller K of --asynchrony too, if the"
            " policy moves fast"
        )
    if now["skipped"]:
        skipped = "The step is skipped, and counted as `skipped` in the log"
        warnings["not finite"] = f"{not_finite(now)}. {skipped}"
    return warnings


def has_drifted(line: dict) -> bool:
    """Whether the policy of this step was far from the one that had sampled the batch. A step in
    which nothing was trained on has no KL and no entropy, and is no drift."""
    return (line["kl_estimate"] or 0) > DRIFT * (line["entropy"] or math.inf)


def few_groups_count(lines: list[dict], groups_per_step: int) -> bool:
    """Whether hardly any group of the last steps counted, although the problems are not solved."""

    def few_count(line: dict) -> bool:
        few = line["groups_counted"] <= FEW_GROUPS * groups_per_step
        return few and line["pass_rate"] < loss.RETIRE_AT

    return in_a_row(lines, REMEMBERED, few_count)


def step_failure(lines: list[dict]) -> str:
    """Why the run cannot go on after the last of these training lines; '' if it can."""
    if not in_a_row(lines, MOST_SKIPPED, lambda line: line["skipped"]):
        return ""
    return (
        f"{not_finite(lines[-1])}. So were the {MOST_SKIPPED - 1} steps before it, and the"
        " parameters stay as they were: try a new run with a lower --learning-rate, or with --dtype"
        " float32; its --model may be that of an earlier checkpoint"
    )


def validation_warnings(validations: list[dict], checkpoint: Path | None) -> dict[str, str]:
    """The warnings after a validation, by what they are about. validations: all validation lines of
    the log. checkpoint: the newest one from before a fall, if there is one."""
    now, warnings = validations[-1], {}
    if not now["mismatch_mean"] <= MISMATCH_TOO_LARGE:  # nor NaN
        warnings["mismatch"] = (
            f"generator and trainer differ by {now['mismatch_mean']:.3f} nats a token, with the"
            " same parameters; the importance ratios measure that and not the policy: keep"
            " --fp32-logits, or try --dtype float32 or --no-share-prompts"
        )
    peak = fell_from(validations)
    if peak is not None:
        warnings["fall"] = (
            f"the pass rate has fallen from {peak['pass_rate']:.3f} at step {peak['step']}"
            f" to {now['pass_rate']:.3f} at step {now['step']}"
        )
        if checkpoint is not None:
            run = checkpoint.parent.parent
            command = f"python train.py --resume {run} --from-step {step_of(checkpoint)}"
            warnings["fall"] += f"; once the run is stopped, {command} goes on from before the fall"
    return warnings


def fell_from(validations: list[dict]) -> dict | None:
    """The best validation, if the pass rate has fallen since: by more than a fifth of the gain, and
    by more than chance. Otherwise None."""
    if not validations:
        return None
    first, last = validations[0], validations[-1]
    best = max(validations, key=lambda line: line["pass_rate"])
    gain, fall = best["pass_rate"] - first["pass_rate"], best["pass_rate"] - last["pass_rate"]
    chance = 4 * math.sqrt(0.5 / last["num_examples"])  # 4 standard errors of a difference
    return best if fall > max(0.2 * gain, chance) else None


def in_a_row(lines: list[dict], number: int, holds) -> bool:
    """Whether there are so many lines, and this holds for each of the last ones."""
    return len(lines) >= number and all(map(holds, lines[-number:]))


def not_finite(line: dict) -> str:
    """What is said of a step that was skipped."""
    return f"the loss or the gradient of step {line['step']} is not finite"


# --- trackers -------------------------------------------------------------------------------------


def refuse_missing_tracker(name: str | None) -> None:
    """ValueError if the tracker of --track is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise ValueError(f"--track {name}: it is not installed; `pip install {name}` brings it")


@dataclass
class Tracker:
    """Sends numbers to a tracker. When that fails, it warns once and sends nothing more, and the
    run goes on."""

    name: str | None
    folder: Path
    config: dict
    # From the first line on: tensorboard's writer, or the module of wandb or trackio.
    tracker: object = None

    def log(self, line: dict) -> None:
        """Send the numbers of a line of log.jsonl, as train/loss or validation/pass_rate."""
        if self.name is None:
            return
        numbers = {}
        for key, value in line.items():
            if type(value) in (int, float):
                numbers[f"{line['kind']}/{key}"] = value
        try:
            self.tracker = self.tracker or self._start()
            if self.name == "tensorboard":
                for name, value in numbers.items():
                    self.tracker.add_scalar(name, value, line["step"])
                self.tracker.flush()
            else:
                self.tracker.log(numbers, step=line["step"])
        except Exception as error:  # of whatever kind: the run is worth more than its tracker
            words = f"{type(error).__name__}: {error}"
            warn("tracker", f"--track {self.name} has failed, and gets nothing more ({words})")
            self.name = None

    def _start(self):
        if self.name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(self.folder / "tensorboard")
        module = importlib.import_module(self.name)  # wandb, or trackio, which has the same calls
        module.init(project="scalerl", name=self.folder.name, config=self.config)
        return module
