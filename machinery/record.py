"""The log of a run, on rank 0: runs/NAME/log.jsonl, one flat object a line. docs/log.md explains
every column.

With each line more is written: some rollouts (machinery/kept.py), samples.txt, the progress bar, a
tracker.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import loss
from core.decoding import marked_text
from core.devices import devices_here
from core.feed import Feed
from core.rollouts import Batch, Group
from core.screen import Progress, say, warn
from core.settings import Settings
from curve.columns import Series
from curve.files import write_whole
from curve.forecast import outlook
from machinery.compute import Compute, Rates, time_left
from machinery.evaluation import completion_columns, graded
from machinery.files import append_whole, drop_later
from machinery.folder import checkpoints, step_of
from machinery.kept import KeptRollouts, verdict_in_words
from machinery.totals import Totals
from machinery.track import Tracker
from machinery.warnings import (
    REMEMBERED,
    fell_from,
    step_failure,
    step_warnings,
    validation_warnings,
)

# What samples.txt shows: problems of each source, and completions of each problem.
SAMPLED_PROBLEMS = 6
SAMPLES_SHOWN = 2


def indented(text: str) -> str:
    """A text whose later lines cannot be taken for a heading of samples.txt."""
    return text.replace("\n", "\n  ")


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
        samples = self.folder / "samples.txt"
        groups = self.settings.groups_per_step
        warnings = step_warnings(self.last_steps, prompts_left, of_prompts, groups, samples)
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
        self._write_samples(step, groups)
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

    def _write_samples(self, step: int, groups: list[Group]) -> None:
        """Write samples.txt: completions of the same problems at the first validation and at this
        one."""
        samples = f"\n=== step {step}\n"
        for source in range(len(self.sources)):
            of_source = [group for group in groups if group.source == source]
            for group in of_source[:SAMPLED_PROBLEMS]:
                problem = f"{group.problem.prompt}   (answer: {group.problem.answer})"
                samples += f"\n{indented(problem)}\n"
                for rollout, verdict in group.judged()[:SAMPLES_SHOWN]:
                    truncated = ", truncated" if rollout.truncated else ""
                    text = marked_text(self.feed.prompts.tokenizer, rollout)
                    verdict_said = f"{verdict_in_words(verdict)}{truncated}"
                    samples += f"  {verdict_said}:  {indented(text)}\n"
        path = self.folder / "samples.txt"
        before = "Forced tokens stand in [[ ]]. The first completions of each problem.\n"
        if step and path.exists():
            before = path.read_text()
        title_and_first = before.split("\n=== ")[:2]
        write_whole(path, "\n=== ".join(title_and_first) + samples)

    def _pass_rates(self, groups: list[Group]) -> dict:
        """Mean pass rate of a validation. From the first one on in which a task gives a score
        between 0 and 1, also the mean score."""
        means = self._means("pass_rate", groups)
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
