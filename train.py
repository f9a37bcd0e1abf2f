"""Train a language model with the ScaleRL recipe, and see its curve.

    python train.py                                            # the default task, on two CPU cores
    python train.py --recipe base --seed 1                     # another recipe of the study
    python train.py --leave-out fp32_logits                    # ScaleRL but for one axis
    python train.py --loss gspo --advantage-norm none          # any part on its own
    python train.py --generators 6 --trainers 2                # on eight GPUs
    python train.py --plan --model Qwen/Qwen3-0.6B             # what a run would take, before anything is started
    python train.py --resume runs/NAME                         # go on after a crash, a Ctrl-C or the end (--steps 300)

The algorithm is `train`, at the end of this file: a loop of optimizer steps, the same on every rank of the trainer.

    problems (data/) -> the feed hands their prompts out to the generators (generate.py), at most k steps ahead
      -> groups of finished rollouts come back, are judged by their task (data/)
      -> a batch of groups gets advantages and token weights, and is trained on (loss.py)
      -> the new parameters go to the generators at once, which go on with what they have begun
      -> every few steps held-out problems are sampled with the parameters of that step alone
      -> at the end the sigmoid of the paper is fitted to those pass rates (fit_curve.py)

Rank 0 of the trainer is this process. Each generator is a process of its own, and so is each other rank. Every wait
ends when the other side is dead or silent. Every few steps a checkpoint is written, from which --resume goes on.
Version v of the parameters is what v optimizer steps have made; step s trains version s and makes s + 1.

Dimensions: P prompts in a batch, G completions per prompt, R = P x G rollouts, B sequences in a micro-batch, T tokens
of a sequence, N any number of tokens.
"""

import contextlib
import dataclasses
import math
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the seconds of imports below without a traceback

from curve.flags import in_words, run_command
from machinery.settings import TrainCommand, parse

if __name__ == "__main__":
    with in_words():  # --help, and wrong flags, are answered before most of these seconds
        parse(sys.argv[1:], TrainCommand, description=__doc__)

import torch
import transformers
from transformers import PreTrainedModel

import loss
import view
from curve.fit import fit_sigmoid
from curve.forecast import levelled_off, outlook
from curve.plots import plot_runs
from curve.report import describe, report
from data.load import load_data
from generate import check_decoding, generator_process
from machinery.engine import check_split, engine_settings
from machinery.feed import Feed, Prompts
from machinery.files import lock_folder, whole_folder
from machinery.kept import kept_rows
from machinery.model import (
    check_length,
    first_learning_rate,
    load_model,
    load_tokenizer,
    make_decoding,
    matmul_parameters,
    model_path,
    render_all,
)
from machinery.plan import plan
from machinery.processes import Stop, end_children
from machinery.record import (
    Compute,
    Record,
    checkpoint_of,
    checkpoints,
    new_folder,
    read_state,
    step_of,
    write_checkpoint,
    write_config,
)
from machinery.rollouts import Batch, SharedParameters
from machinery.screen import say
from machinery.settings import Settings, cpu_threads, devices_here, devices_paid
from machinery.track import check_tracker
from machinery.trainer import (
    Totals,
    end_ranks,
    everyone,
    gather,
    make_policy,
    micro_batches,
    numerics_mismatch,
    read_moments,
    start_other_ranks,
    update_size,
    wait_for_ranks,
    whole,
)

# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status: 0; 1 after a failure; 130 after Ctrl-C, 143 after SIGTERM. ValueError or
    OSError, before any process is started, if the flags, the data or the model cannot be used."""
    transformers.utils.logging.disable_progress_bar()
    command = parse(arguments, TrainCommand, description=__doc__)
    if command.plan:
        print(plan(command))
        return 0
    settings, start, model, parameters, head = prepare(command.of_the_run())
    head.stop.listen()
    at_once = False

    def hint() -> str:
        if not checkpoints(head.folder):
            return ""
        return f"; python train.py --resume {head.folder} goes on from the last checkpoint"

    try:
        start_other_ranks(settings, train, (settings, start, parameters), hint)
        train(0, settings, start, parameters, model, head)
        end_ranks()
        if head.record.validations:
            finish(head)
        elif settings.resume is None:  # nothing has happened yet: the name stays free
            shutil.rmtree(head.folder)
    except KeyboardInterrupt:
        at_once = True
    except torch.OutOfMemoryError as error:
        advice = "lower --tokens-per-micro-batch or --slots, or add --gradient-checkpointing or --trainers"
        head.error = f"{str(error).partition('. ')[0]}: {advice}"
    except OSError as error:
        head.error = f"the run's folder cannot be written: {error}"
    except Exception as error:  # a mistake of the program: with its traceback
        raise RuntimeError(f"the run has failed, as said above{hint()}") from error
    finally:
        head.feed.close()
    if not head.over():
        return 0
    said = f"error: {head.failure}" if head.failure else f"stopped {'at once' if at_once else f'by {head.stop.name}'}"
    print(f"\n{said}{hint()}", file=sys.stderr)
    return 1 if head.failure else 128 + head.stop.number


# --- before the first step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """What every rank starts from."""

    step: int  # optimizer steps made
    model: str  # folder or hub name
    moments: Path | None  # the optimizer's, in a checkpoint


@dataclass
class Head:
    """What only rank 0 has: where its groups come from, where results go, and why the run ends."""

    folder: Path
    lock: TextIO  # of the folder, held as long as it lives
    feed: Feed
    record: Record
    stop: Stop
    error: str = ""  # what went wrong in this process

    @property
    def failure(self) -> str:
        """What went wrong, anywhere in the run; '' if nothing did."""
        return self.error or self.feed.failure or self.record.failure

    def over(self) -> bool:
        """Whether the run ends early: the user has stopped it, or something failed."""
        return self.stop.asked() or bool(self.failure)

    def wants_validation(self, step: int) -> bool:
        """Whether a validation is due at this step and has not been made yet."""
        due = step % self.record.settings.validation_every == 0 or step == self.record.settings.steps
        return due and self.record.last_validation < step and not self.over()

    def levelled_off(self, step: int) -> bool:
        """Whether --stop-when-gain-below ends the run here, at a validation. With several sources, the curves of all
        must have levelled off."""
        least = self.record.settings.stop_when_gain_below
        if not least or self.record.last_validation < step:
            return False
        return all(levelled_off(series.x, series.y, least) for series in self.record.series())

    def why_ended(self, step: int) -> str:
        """Why a run is over that was neither stopped nor failed."""
        if step >= self.record.settings.steps:
            return "All steps are made"
        if self.feed.exhausted:
            return f"Every prompt has been retired (pass rate >= {loss.RETIRE_AT})"
        least = self.record.settings.stop_when_gain_below
        return f"Twice the compute would surely raise the pass rate by less than {least} (--stop-when-gain-below)"


def prepare(settings: Settings) -> tuple[Settings, Start, PreTrainedModel, SharedParameters, Head]:
    """Check everything that can be checked before a process is started, and make the run's folder or open it again. The
    settings come back with the learning rate that suits the model, if they have none. ValueError or OSError if the
    flags, the data or the model cannot be used."""
    # 1. problems
    check_tracker(settings.track)
    sources = load_data(
        settings.data, settings.train_prompts, settings.validation_problems, instruction=settings.instruction
    )
    for source in sources:
        for note in source.notes:
            say(f"{source.name}: {note}")
    prompts_there = sum(len(source.train) for source in sources)
    if settings.groups_per_step > prompts_there:
        raise ValueError(
            f"a step takes {settings.groups_per_step} prompts, but there are {prompts_there} to train on"
            f" (--train-prompts {settings.train_prompts}): lower --prompts-per-step"
        )

    fewest = min(len(source.train) for source in sources)
    if settings.recipe.least_prompts > fewest:
        raise ValueError(f"--least-prompts is {settings.recipe.least_prompts}; a source has {fewest} prompts in all")

    # 2. the folder, and the checkpoint to go on from
    folder = settings.resume or new_folder(settings)
    lock = state = None
    path = model_path(settings.model)
    start = Start(0, path, None)
    tokenizer = load_tokenizer(path)
    if settings.resume:
        lock = lock_folder(folder)
        if chosen := checkpoint_of(folder, settings.from_step):
            state = read_state(chosen)
            if state["step"] >= settings.steps and (folder / "model").is_dir():
                raise ValueError(f"{folder} is finished, at step {state['step']}; give a larger --steps to go on")
            start = Start(state["step"], str(chosen / "model"), chosen / "optimizer.safetensors")

    # 3. the model, and how it is sampled
    recipe = settings.recipe
    decoding = make_decoding(tokenizer, settings, recipe.length_control, recipe.fp32_logits)
    texts = [problem.prompt for source in sources for problem in source.train + source.validation]
    prompts = Prompts(sources, render_all(tokenizer, texts, settings), tokenizer, decoding)
    model = load_model(start.model, torch.device("cpu"), torch.float32)
    check_length(model, decoding)
    if settings.learning_rate is None:
        settings = dataclasses.replace(settings, learning_rate=first_learning_rate(model.num_parameters()))
        say(f"The learning rate is {settings.learning_rate}, for {model.num_parameters():,} parameters.")
    generators, trainers = devices_here(settings)
    one_gpu = bool({*generators[0]} & {*trainers})  # one GPU does both
    # Engines are made of the run's first model, which stays; their parameters come from the trainer.
    engines = [engine_settings(settings, own, path, decoding, one_gpu) for own in generators]
    check_split(engines[0].engine, settings.tensor_parallel, model.config.num_attention_heads)
    if engines[0].engine == "torch":
        check_decoding(model, settings.model)

    # 4. what the run will write
    if settings.defaults != "toy":
        say(f"The settings start from --defaults {settings.defaults}; config.json has them all.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock or lock_folder(folder)
    write_config(folder, settings)
    parameters, stop = SharedParameters(model, len(trainers)), Stop()
    feed = Feed(settings, prompts, engines, parameters, generator_process, stop.asked)
    compute = Compute(devices_paid(generators, trainers), matmul_parameters(model))
    record = Record(settings, folder, compute, feed)
    if settings.resume:
        say(f"{folder}: going on from step {start.step}")
        for later in [path for path in checkpoints(folder) if step_of(path) > start.step]:
            shutil.rmtree(later)
    if state is not None:
        feed.restore(state)
    record.restore(state)
    return settings, start, model, parameters, Head(folder, lock, feed, record, stop)


# --- after the last step ----------------------------------------------------------------------------------------------


def finish(head: Head) -> None:
    """Leave everything that a run leaves behind, and print its end."""
    newest, record = checkpoints(head.folder)[-1], head.record
    with whole_folder(head.folder / "model") as folder:
        shutil.copytree(newest / "model", folder, dirs_exist_ok=True)
    fitted, curves = [], []
    for series in record.series():
        try:
            fit = fit_sigmoid(series.x, series.y, num_examples=series.num_examples)
        except ValueError as error:
            curves.append(f"curve       no fit: {error}")
            continue
        fitted.append((series, fit))
        curves.append(describe(series, fit, report(series, fit)))
    if fitted:
        plot_runs(head.folder / "curve.png", fitted)
    if (head.folder / "rollouts.jsonl").exists():
        try:
            view.write_page(head.folder)
        except ValueError as error:  # a page is no reason to call a run failed
            say(f"no page: {error}")
    print(record.summary(curves))


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(
    rank: int,
    settings: Settings,
    start: Start,
    parameters: SharedParameters,
    model: PreTrainedModel | None = None,
    head: Head | None = None,
) -> None:
    """All steps, from the first validation to the last checkpoint. Every rank runs this. Rank 0 alone has a head, and
    the model that `prepare` has loaded. All ranks call `everyone`, and it returns the value of rank 0."""
    s, r = settings, settings.recipe
    trainers = devices_here(s)[1]
    ranks, device = len(trainers), torch.device(trainers[rank])
    torch.set_num_threads(cpu_threads(s))
    policy = make_policy(s, model or load_model(start.model, torch.device("cpu"), torch.float32), device)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=s.learning_rate,
        betas=s.adam_betas,
        eps=s.adam_eps,
        weight_decay=s.weight_decay,
        fused=device.type == "cuda",  # otherwise it takes 4 bytes a parameter more there, and is slower
    )
    if start.moments:
        read_moments(policy, optimizer, start.moments)
    if device.type == "cuda":
        parameters.pin()
    step, saved = start.step, start.step if start.moments else -1

    def publish(step: int) -> float:
        """Give the parameters of this step to the generators: every rank writes its shard, and waits until all have, so
        that the version is complete before anything is sampled with it. Returns the seconds that it took."""
        began = time.monotonic()
        if parameters.version < step:
            parameters.write(policy.model.named_parameters(), step, rank)
            wait_for_ranks()
        return time.monotonic() - began

    def validate(step: int) -> None:
        """Measure the pass rate of the held-out problems with the parameters of this step; at step 0 it is R0."""
        with head.record.pause() if head else contextlib.nullcontext():
            publish(step)  # PPO-off-policy-k publishes after every k-th step only
            groups = head.feed.validate(step) if head else None
            rollouts = [rollout for group in groups or () for rollout in group.rollouts.values()]
            some = everyone(rollouts[:: max(1, len(rollouts) // 64)])  # enough to compare both sides' numerics
            if not some:  # the run is over
                return
            mismatch = numerics_mismatch(policy, some, s)
        if head:
            head.record.log_validation(step, groups, mismatch)
            head.record.outlooks = [outlook(series) for series in head.record.series()]

    def save(step: int) -> None:
        """Write a checkpoint of this step. Tensors are gathered from all ranks."""
        gathered = gather(policy, optimizer)
        if head:
            feed, record = head.feed, head.record
            state, tokenizer = {"step": step, **feed.state(), **record.state()}, feed.prompts.tokenizer
            keep = s.keep_checkpoints, record.before_fall
            write_checkpoint(head.folder, policy.model, tokenizer, *gathered, state, *keep)

    publish(step)
    if head:
        head.feed.start()
        head.record.begin(step)
        head.stop.can_save = True
    if everyone(head and head.wants_validation(step)):
        validate(step)
    while step < s.steps and not everyone(head and (head.over() or head.levelled_off(step))):
        # 1. whole groups, none of their tokens more than k steps old
        waiting = time.monotonic()
        groups = everyone(head.feed.batch(step) if head else None)
        if groups is None:  # every prompt is retired, or the run is over
            break
        waited, batch = time.monotonic() - waiting, Batch(groups, step)
        oldest = batch.ages_N.max()
        assert oldest <= loss.most_off_policy(r.asynchrony), f"a token of step {step} is {oldest} steps old"

        # 2. what each completion is worth
        rewards_PG = loss.rewards(
            batch.scores_PG,
            batch.lengths_PG,
            r.length_control,
            max_length=s.thinking_budget[1] + s.answer_budget,
            penalty_length=s.answer_budget,
        )
        counted_PG = loss.counted_samples(rewards_PG, batch.usable_PG, r.zero_variance_filter)
        advantages_PG = loss.advantages(rewards_PG, batch.usable_PG, counted_PG, r.advantage_norm)
        weights_PG = loss.token_weights(batch.lengths_PG, counted_PG, r.aggregation)
        advantages_R, weights_R = advantages_PG.flatten().to(device), weights_PG.flatten().to(device)
        counted = counted_PG.flatten().nonzero().flatten().tolist()

        # 3. one optimizer step: this rank's share of the micro-batches
        totals = Totals(step, kept_rows(s, step + 1, groups))
        for m in micro_batches(batch.rollouts, counted, s.tokens_per_micro_batch, device):
            logprobs_BT, entropies_N = policy(m, r.fp32_logits)
            value, sums = loss.policy_loss(
                r, logprobs_BT, m.generator_logprobs_BT, m.sampled_BT, advantages_R[m.rows_B], weights_R[m.rows_B]
            )
            (value * ranks).backward()  # FSDP averages gradients over the ranks; the weights want their sum
            totals.add(m, value.detach(), sums, logprobs_BT.detach(), entropies_N)
        totals.over_ranks()
        norm = 0.0
        if counted:
            norm = whole(torch.nn.utils.clip_grad_norm_(policy.parameters(), s.clip_gradient)).item()
        finite = math.isfinite(totals.sums["loss"]) and math.isfinite(norm)
        learning_rate = s.learning_rate * min(1.0, (step + 1) / max(1, s.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        stepped = bool(counted and finite)  # one NaN that is stepped on stays in the parameters for good
        if stepped:
            optimizer.step()
        optimizer.zero_grad()
        updated = update_size(optimizer) if stepped else 0.0
        step += 1

        # 4. the generators go on with the new parameters
        copying = publish(step) if loss.publishes_after(r.asynchrony, step - 1) else 0.0

        # 5. measure, write down
        if head:
            head.feed.retire(groups)
            columns = {"skipped": int(not finite), "gradient_norm": norm, "learning_rate": learning_rate}
            columns |= {"update_size": updated, "groups_counted": int(counted_PG.any(1).sum())}
            columns |= {"reward_mean": rewards_PG.mean().item(), "parameters_seconds": copying}
            zero_variance_P = loss.zero_variance(rewards_PG, batch.usable_PG)
            columns["zero_variance_fraction"] = zero_variance_P.float().mean().item()
            head.record.log_step(step, batch, totals, columns, waited)
            head.record.keep_rollouts(step, batch, rewards_PG, advantages_PG, weights_PG, totals)
        if everyone(head and head.wants_validation(step)):
            validate(step)
        if step % s.checkpoint_every == 0:
            save(step)
            saved = step
        if head:
            head.record.show(step)
    if everyone(head and head.record.last_validation < step and not head.over()):
        validate(step)
    if head:
        head.record.end(step, "" if head.over() else head.why_ended(step))
    if saved < step and everyone(head and head.record.last_validation >= 0):
        save(step)


if __name__ == "__main__":
    try:
        run_command(main)
    finally:
        end_children()
