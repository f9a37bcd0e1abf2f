"""All that a run writes down, on rank 0: the screen, the log with what it has cost, samples, checkpoints.

runs/NAME/ holds config.json, log.jsonl (one flat object a line), rollouts.jsonl and the page that is made of it,
samples.txt, curve.png, model/, lock, and checkpoints/step-000020/ with model/ (fp32, a folder that transformers loads),
optimizer.safetensors and state.json. These formats hold data and no code; all files are written whole or not at all.
"""

import contextlib
import dataclasses
import json
import math
import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import loss
from curve.files import write_whole
from curve.logs import Series
from data.load import parse_spec
from machinery.feed import Feed
from machinery.files import append_whole, json_lines, whole_folder
from machinery.kept import KeptRollouts, in_words
from machinery.model import marked_text
from machinery.rollouts import Batch, Group
from machinery.screen import Progress, say, warn
from machinery.settings import Settings, devices_here
from machinery.track import Tracker
from machinery.trainer import Totals

MOST_SKIPPED_IN_A_ROW = 5  # steps that were not finite, until the run ends
FLAT_STEPS = 5  # steps without any variance in a row, until the run warns
DRIFT = 2.0  # KL of a step, in entropies: in two of three steps it came before most falls (docs/study.md)
SAMPLED_PROBLEMS, SAMPLES_SHOWN = 6, 2  # validation problems of a source in samples.txt, completions of each
MISMATCH_TOO_LARGE = 0.05  # nats: an on-policy ratio that is off by 5 % on average is more than numerics

# --- the run's folder -------------------------------------------------------------------------------------------------


def new_folder(settings: Settings) -> Path:
    """The folder of a new run, not made yet. ValueError if the one that is named holds something."""
    if settings.name is not None:
        folder = Path("runs") / settings.name
        if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - {"lock"}):
            raise ValueError(f"{folder} holds another run; choose another --name, or move it away")
        return folder
    recipe = settings.recipe
    start = loss.leave_one_out(recipe.leave_out) if recipe.leave_out else loss.RECIPES[recipe.recipe]
    name = f"{recipe.recipe}-without-{recipe.leave_out}" if recipe.leave_out else recipe.recipe
    for part in dataclasses.fields(recipe):
        if getattr(recipe, part.name) != getattr(start, part.name):
            name += f"-{part.name}-{getattr(recipe, part.name)}"
    usual = Settings()
    if settings.data != usual.data:
        name += "-" + "-".join(Path(parse_spec(source).name).stem for source in settings.data)
    if settings.model != usual.model:
        name += f"-{Path(settings.model).name}"
    name += f"-seed{settings.seed}"
    candidates = [Path("runs") / name, *(Path("runs") / f"{name}-{i}" for i in range(2, 10_000))]
    return next(folder for folder in candidates if not folder.exists())


def write_config(folder: Path, settings: Settings) -> None:
    """Write config.json: all settings, and the versions of what they were run with."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["python"] = platform.python_version()
    stored = dataclasses.asdict(dataclasses.replace(settings, resume=None, from_step=None))
    write_whole(folder / "config.json", json.dumps({**stored, "versions": versions}, indent=2) + "\n")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted((folder / "checkpoints").glob("step-*[0-9]"), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that had been made."""
    return int(checkpoint.name[len("step-") :])


def checkpoint_of(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of a run to go on from: of this step, or the newest; None if there is none at all. ValueError if
    there is none of this step."""
    found = {step_of(checkpoint): checkpoint for checkpoint in checkpoints(folder)}
    if step is not None and step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise ValueError(f"--from-step is {step}; the checkpoints of {folder} are of steps {there}")
    return found.get(max(found, default=0) if step is None else step)


def write_checkpoint(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parameters: dict[str, Tensor],
    moments: dict[str, Tensor],
    state: dict,
    keep: int,
    precious: Path | None = None,
) -> None:
    """Add the checkpoint of state["step"] and remove all but the newest `keep`, and the precious one. It is the same
    whatever the number of ranks. OSError if it cannot be written; then the ones before are as they were."""
    with whole_folder(folder / "checkpoints" / f"step-{state['step']:06d}") as checkpoint:
        try:
            model.save_pretrained(checkpoint / "model", state_dict=parameters)
            safetensors.torch.save_file(moments, checkpoint / "optimizer.safetensors")
        except safetensors.SafetensorError as error:  # a full disk, in its words
            raise OSError(f"{checkpoint}: {error}") from error
        tokenizer.save_pretrained(checkpoint / "model")
        (checkpoint / "state.json").write_text(json.dumps(state))
    for old in checkpoints(folder)[:-keep]:
        if old != precious:
            shutil.rmtree(old)


def read_state(checkpoint: Path) -> dict:
    """What a checkpoint says of feed and record. ValueError, naming it, if it is damaged."""
    try:
        with safetensors.safe_open(checkpoint / "optimizer.safetensors", "pt"):
            return json.loads((checkpoint / "state.json").read_text())
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{checkpoint} is damaged ({error}); move it away to go on from the one before") from None


# --- compute ----------------------------------------------------------------------------------------------------------


def flops(parameters: int, generated: float, trained: float) -> float:
    """Of so many tokens generated, and trained on: 2 x parameters forward, 4 x backward, attention left out."""
    return 2 * parameters * generated + 6 * parameters * trained


@dataclass
class Compute:
    """What training has cost so far, start-up and validation left out (sec. 2.1)."""

    devices: int  # of generators and trainers, CPU processes counted each; a GPU that does both is one
    parameters: int  # that take part in a token's forward: all but the embedding table
    tokens: int = 0  # sampled, of the groups trained on
    flops: float = 0.0
    device_seconds: float = 0.0  # before this process began, and of rollouts for training during validations
    started: float | None = None  # clock reading at the first step
    paused: float = 0.0  # seconds of validation since then
    ended: float | None = None  # clock reading when training was over

    @property
    def seconds(self) -> float:
        """Seconds of training, in this process."""
        now = self.ended or time.monotonic()
        return now - (self.started or now) - self.paused

    def add(self, groups: list[Group], trained_tokens: int) -> None:
        """Count a batch: generation of all of it, training of the part that was not filtered out, of which
        trained_tokens is the number of sampled tokens."""
        rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
        batch_tokens = sum(int(rollout.sampled.sum()) for rollout in rollouts)
        self.tokens += batch_tokens
        completions = sum(len(rollout.tokens) for rollout in rollouts)
        prompts_once = sum(len(group.requests[0].prompt) for group in groups)
        prompts_each = sum(len(rollout.request.prompt) for rollout in rollouts)
        generated = completions + prompts_once
        trained = (completions + prompts_each) * trained_tokens / batch_tokens
        self.flops += flops(self.parameters, generated, trained)

    def columns(self) -> dict:
        """The three measures side by side, as they are logged."""
        return {
            "compute_device_hours": (self.device_seconds + self.seconds * self.devices) / 3600,
            "compute_tokens": self.tokens,
            "compute_flops": self.flops,
        }


def completion_columns(groups: list[Group]) -> dict:
    """Log columns of completions, of a batch or of a validation."""
    judged = [pair for group in groups for pair in group.judged()]
    return {
        "completion_length": float(np.mean([rollout.sampled.sum() for rollout, _ in judged])),
        "interrupted_fraction": float(np.mean([rollout.interrupted for rollout, _ in judged])),
        "truncated_fraction": float(np.mean([rollout.truncated for rollout, _ in judged])),
        "verifier_failures": sum(verdict.failure is not None for _, verdict in judged),
    }


# --- the record -------------------------------------------------------------------------------------------------------


class Record:
    """The log of a run, with all that its lines are made of."""

    def __init__(self, settings: Settings, folder: Path, compute: Compute, feed: Feed):
        self.settings, self.folder, self.compute, self.feed = settings, folder, compute, feed
        self.sources = feed.prompts.sources
        self.rollouts = KeptRollouts(folder, settings, feed.prompts.tokenizer, self.sources)
        self.began = time.monotonic()
        self.validations: list[dict] = []  # the validation lines of the log
        self.waited = 0.0  # seconds of training that the trainer has waited for groups, in this process
        self.generated = 0.0  # seconds of training that a generator was busy, in this process
        self.unlogged_busy = 0.0  # seconds of a generator that no line of the log has counted yet
        self.last = {"seconds": 0.0, "busy": 0.0, "tokens": 0}  # of `_counters`, at the last line
        self.progress: Progress | None = None
        self.outlooks: list[str] = []  # where the curve of each source is going, in words for the bar
        self.speeds, self.off_policyness = "", 0.0  # of the last step, for the bar
        self.skipped_in_a_row = 0  # steps that were not finite
        self.flat_in_a_row = 0  # steps in which every group was of zero variance
        self.drifted: list[bool] = []  # the last three steps: whether the policy was far from what had sampled
        self.failure = ""  # why the run cannot go on
        self.tracker = Tracker(settings.track, folder, dataclasses.asdict(settings))

    @property
    def last_validation(self) -> int:
        """The step of the last validation; -1: there has been none."""
        return self.validations[-1]["step"] if self.validations else -1

    def state(self) -> dict:
        """All that `restore` needs, for a checkpoint."""
        seconds = self.compute.columns()["compute_device_hours"] * 3600
        compute = {"tokens": self.compute.tokens, "flops": self.compute.flops, "device_seconds": seconds}
        return {"compute": compute, "wall_seconds": time.monotonic() - self.began}

    def restore(self, state: dict | None) -> None:
        """Go on from a checkpoint, or from the beginning without one. What the log tells of later steps is dropped:
        they will come again."""
        log, kept = self.folder / "log.jsonl", []
        if state is not None:
            self.compute = dataclasses.replace(self.compute, **state["compute"])
            self.began = time.monotonic() - state["wall_seconds"]
            before = [(text, line) for text, line in json_lines(log) if line["step"] <= state["step"]]
            kept = [text for text, line in before if line["kind"] != "end"]
            self.validations = [line for _, line in before if line["kind"] == "validation"]
        write_whole(log, "".join(kept))
        self.rollouts.restore(state and state["step"])

    @property
    def fell_from(self) -> dict | None:
        """The validation with the highest pass rate, if the last one lies far below it: by more than a fifth of the
        gain, and more than chance. Otherwise None."""
        if not self.validations:
            return None
        first, last = self.validations[0], self.validations[-1]
        best = max(self.validations, key=lambda line: line["pass_rate"])
        chance = 4 * math.sqrt(0.5 / last["num_examples"])  # 4 standard errors of a difference
        least = max(0.2 * (best["pass_rate"] - first["pass_rate"]), chance)
        return best if best["pass_rate"] - last["pass_rate"] > least else None

    @property
    def before_fall(self) -> Path | None:
        """If the run has fallen, the newest checkpoint that is not after its best validation."""
        peak = self.fell_from
        earlier = [path for path in checkpoints(self.folder) if peak and step_of(path) <= peak["step"]]
        return earlier[-1] if earlier else None

    def warn(self, about: str, step: int, text: str) -> None:
        """Say it on the screen and in the log, the first time in this process."""
        if warn(about, text):
            self.log({"kind": "warning", "step": step, "about": about, "text": text})

    def log(self, line: dict) -> None:
        """Add a line to log.jsonl, at once. JSON has no NaN and no infinity: they become null."""
        line["wall_seconds"] = time.monotonic() - self.began
        line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        append_whole(self.folder / "log.jsonl", json.dumps(line) + "\n")
        self.tracker.log(line)

    # Training

    def begin(self, step: int) -> None:
        """Start the clock of training, and the progress bar. Before, say who has which devices."""
        feed = self.feed
        devices = [device for engine in feed.engines for device in engine.devices]
        slots = ", ".join(str(generator.slots) for generator in feed.generators)
        trainers = devices_here(self.settings)[1]
        say(f"devices: generators {', '.join(devices)} with {slots} slots; trainers {', '.join(trainers)}")
        self.compute.started = time.monotonic()
        self.progress = Progress("training", self.settings.steps, step)

    def log_step(self, step: int, batch: Batch, totals: Totals, columns: dict, waited: float) -> None:
        """Log a step: what it has computed, its completions, and what has happened since the line before. waited:
        seconds that the trainer has waited for the groups. Warns of what often comes before a collapse."""
        self.compute.add(batch.groups, int(totals.sums["tokens"]))
        line = {
            "kind": "train",
            "step": step,
            "pass_rate": batch.scores_PG.mean().item(),
            **columns,
            **totals.columns(),
            "off_policyness_mean": float(batch.ages_N.mean()),
            "off_policyness_max": int(batch.ages_N.max()),
            **completion_columns(batch.groups),
            **self._rates(int(batch.lengths_PG.sum()), waited),
            **self.compute.columns(),
        }
        self.log(line)
        events, self.feed.events = self.feed.events, []
        self.rollouts.add_times(step, (batch.came - waited, batch.came), events, self.began)
        self.off_policyness = line["off_policyness_mean"]
        if line["truncated_fraction"] > loss.TRUNCATED_TOO_OFTEN:
            self.warn(
                "truncation",
                step,
                f"{line['truncated_fraction']:.0%} of the completions of step {step} reached their token limit without"
                " ending, and are left out; instabilities often follow above"
                f" {loss.TRUNCATED_TOO_OFTEN:.0%}: raise --answer-budget or --thinking-budget",
            )
        self.drifted = [*self.drifted[-2:], (line["kl_estimate"] or 0) > DRIFT * (line["entropy"] or math.inf)]
        if sum(self.drifted) >= 2:
            self.warn(
                "drift",
                step,
                "in two of the last three steps the policy was further from the one that had sampled the batch than"
                f" {DRIFT:g} times its entropy (kl_estimate in the log); the pass rate often falls soon after: the"
                " learning rate is likely too high",
            )
        left, wanted = sum(order.left for order in self.feed.orders), self.settings.groups_per_step
        if left < wanted:
            self.warn(
                "few prompts",
                step,
                f"{left} prompts are left that are not solved, fewer than the {wanted} that a step takes, so each step"
                " trains on the same ones again and again; runs often fall from here on. --least-prompts"
                f" {10 * wanted} has the solved ones come again in time",
            )
        self.flat_in_a_row = self.flat_in_a_row + 1 if line["zero_variance_fraction"] == 1 else 0
        if self.flat_in_a_row == FLAT_STEPS:
            self.warn(
                "flat",
                step,
                f"in each of the last {FLAT_STEPS} steps all completions of a prompt got the same reward: there is"
                f" nothing to learn from. The pass rate of this step is {line['pass_rate']:.2f}: near 0 the problems"
                " are too hard for the model, or its answers are not found in what it writes; near 1 they are too easy."
                f" {self.folder / 'samples.txt'} shows completions with their verdicts",
            )
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if line["skipped"] else 0
        if self.skipped_in_a_row:
            found = f"the loss or the gradient of step {step} is not finite"
            self.warn("not finite", step, f"{found}. The step is skipped, and counted as `skipped` in the log")
            if self.skipped_in_a_row == MOST_SKIPPED_IN_A_ROW:
                self.failure = (
                    f"{found}. So were the {MOST_SKIPPED_IN_A_ROW - 1} steps before it, and the parameters stay as they"
                    " were: try a lower --learning-rate, or --dtype float32, from an earlier checkpoint"
                )

    def keep_rollouts(
        self, step: int, batch: Batch, rewards_PG: Tensor, advantages_PG: Tensor, weights_PG: Tensor, totals: Totals
    ) -> None:
        """Add some groups of a step to rollouts.jsonl, with what was made of them."""
        worth = {"reward": rewards_PG, "advantage": advantages_PG, "weight": weights_PG}
        self.rollouts.add_batch(step, batch, worth, totals.tokens, self.began)

    def show(self, step: int) -> None:
        """Move the progress bar."""
        rate = [f"pass rate {self.validations[-1]['pass_rate']:.3f}"] if self.validations else []
        age = f"off-policy {self.off_policyness:.1f}"
        self.progress.show(step, ", ".join([*rate, *filter(None, self.outlooks), age, self.speeds]))

    def end(self, step: int, reason: str) -> None:
        """Stop the clock of training. The log gets the reason why the run is over, if it came to its end."""
        self.compute.ended = time.monotonic()
        if self.progress is not None:
            self.progress.close()
        if reason:
            self.log({"kind": "end", "step": step, "reason": reason})
            if step < self.settings.steps:
                say(f"{reason}: training ends.")

    def _counters(self) -> dict:
        return {"seconds": self.compute.seconds, "busy": self.feed.busy_seconds, "tokens": self.feed.sampled_tokens}

    def _rates(self, batch_tokens: int, waited: float) -> dict:
        """Log columns of what has happened since the line before, validation left out; batch_tokens: sampled tokens of
        the batch trained on, filtered groups included."""
        now, generators = self._counters(), self.feed.engines
        change = {name: value - self.last[name] for name, value in now.items()}
        self.last = now
        self.waited += waited
        # A report may be of a longer time than this line is of: the rest is counted in the next line.
        self.generated += change["busy"] / len(generators)
        self.unlogged_busy += change["busy"] / len(generators)
        busy = min(self.unlogged_busy, change["seconds"])
        self.unlogged_busy -= busy
        sampled_per_second = len(generators) * change["tokens"] / change["busy"] if change["busy"] else None
        trained_per_second = batch_tokens / max(change["seconds"] - waited, 1e-9)
        self.speeds = f"tokens/s {sampled_per_second or 0:,.0f} sampled {trained_per_second:,.0f} trained"
        return {
            "groups_waiting": sum(group.finished for group in self.feed.under_way.values()),
            "trainer_idle_fraction": waited / change["seconds"],
            "generator_idle_fraction": 1 - busy / change["seconds"],
            "generator_tokens_per_second": sampled_per_second,
            "trainer_tokens_per_second": trained_per_second,
            "prompts_retired": sum(len(order.retired) for order in self.feed.orders),
            "epoch": min(order.epoch for order in self.feed.orders),
        }

    # Validations

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Have the clock of training stand, for a validation. What the generators do meanwhile for training counts as
        compute, so that it is not free."""
        began, busy = time.monotonic(), self.feed.busy_seconds
        yield
        devices = self.settings.tensor_parallel
        self.compute.device_seconds += (self.feed.busy_seconds - busy) * devices
        self.compute.paused += time.monotonic() - began
        self.last |= {"busy": self.feed.busy_seconds, "tokens": self.feed.sampled_tokens}

    def log_validation(self, step: int, groups: list[Group], mismatch: dict[str, float]) -> None:
        """Log a validation. That of step 0 gives R0, at compute 0."""
        compute = self.compute.columns()
        line = {
            "kind": "validation",
            "step": step,
            **self._pass_rates(groups),
            **completion_columns(groups),
            **mismatch,
            **(compute if step else dict.fromkeys(compute, 0)),
        }
        if line["mismatch_mean"] > MISMATCH_TOO_LARGE:
            self.warn(
                "mismatch",
                step,
                f"generator and trainer differ by {line['mismatch_mean']:.3f} nats a token, with the same parameters;"
                " the importance ratios measure that and not the policy: keep --fp32-logits, or try --dtype float32",
            )
        self._write_samples(step, groups)
        self.rollouts.add_validation(step, groups, self.began)
        self.validations.append(line)
        self.log(line)
        if peak := self.fell_from:
            text = f"the pass rate has fallen from {peak['pass_rate']:.3f} at step {peak['step']}"
            text += f" to {line['pass_rate']:.3f} at step {step}"
            if checkpoint := self.before_fall:
                command = f"python train.py --resume {self.folder} --from-step {step_of(checkpoint)}"
                text += f"; once the run is stopped, {command} goes on from before the fall"
            self.warn("fall", step, text)

    def _write_samples(self, step: int, groups: list[Group]) -> None:
        """Write samples.txt: completions of the same problems at the first validation and at this one."""
        here = f"\n=== step {step}\n"
        for source in range(len(self.sources)):
            for group in [group for group in groups if group.source == source][:SAMPLED_PROBLEMS]:
                here += f"\n{group.problem.prompt}   (answer: {group.problem.answer})\n"
                for rollout, verdict in group.judged()[:SAMPLES_SHOWN]:
                    judged, text = in_words(verdict), marked_text(self.feed.prompts.tokenizer, rollout)
                    here += f"  {judged}{', truncated' if rollout.truncated else ''}:  {text}\n"
        path = self.folder / "samples.txt"
        title = "Forced tokens stand in [[ ]]. The first completions of each problem.\n"
        before = path.read_text() if step and path.exists() else title
        write_whole(path, "\n=== ".join(before.split("\n=== ")[:2]) + here)  # the first validation and this one

    def _pass_rates(self, groups: list[Group]) -> dict:
        """Mean pass rate of a validation: of each source, and of all with their weights."""
        rates = [
            float(np.mean([group.pass_rate for group in groups if group.source == source]))
            for source in range(len(self.sources))
        ]
        columns = {
            "pass_rate": float(np.average(rates, weights=[source.weight for source in self.sources])),
            "num_examples": sum(len(group.requests) for group in groups),
        }
        if len(self.sources) > 1:
            columns |= {f"pass_rate/{source.name}": rate for source, rate in zip(self.sources, rates)}
        return columns

    def series(self) -> list[Series]:
        """The curve of each source so far. Compute is FLOPs, which no other load on the machine disturbs."""
        columns = [f"pass_rate/{source.name}" for source in self.sources] if len(self.sources) > 1 else ["pass_rate"]
        x = np.array([line["compute_flops"] for line in self.validations])
        return [
            Series(
                name=source.name if len(self.sources) > 1 else self.folder.name,
                x=x,
                y=np.array([line[column] for line in self.validations]),
                x_name="compute_flops",
                y_name=column,
                num_examples=len(source.validation) * self.settings.validation_samples,
            )
            for source, column in zip(self.sources, columns)
        ]

    # The end

    def idle(self) -> str:
        """Who has waited how long so far, as a share of the time of training."""
        seconds = max(self.compute.seconds, 1e-9)
        generators = max(0.0, 1 - self.generated / seconds)
        return f"trainer {self.waited / seconds:.2f}, generators {generators:.2f} of the time"

    def summary(self, curves: list[str]) -> str:
        """The screen at the end; curves: what is known about the curve of each source."""
        last, lines = self.validations[-1], []
        for source, series, curve in zip(self.sources, self.series(), curves):
            lines.append(
                f"pass rate   {series.y[0]:.3f} before, {series.y[-1]:.3f} after {last['step']} steps"
                f" (mean@{self.settings.validation_samples} of {len(source.validation)} held-out problems"
                + (f" of {source.name})" if len(self.sources) > 1 else ")")
            )
            lines.append(curve)
        lines.append(
            f"compute     {last['compute_device_hours']:.3f} device-hours, {last['compute_tokens'] / 1e6:.2f} M sampled"
            f" tokens, {last['compute_flops']:.2e} FLOPs; {time.monotonic() - self.began:.0f} s with start and"
            " validation"
        )
        lines.append(f"idle        {self.idle()}")
        files = sorted(path.name + "/" * path.is_dir() for path in self.folder.iterdir())
        lines.append(f"files       {self.folder}/: {' '.join(files)}")
        return "\n".join(lines)
