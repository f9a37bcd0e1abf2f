"""Train a language model with the ScaleRL recipe, and see its curve.

    python train.py                                            # the default task, on two CPU cores
    python train.py --recipe base --seed 1                     # another recipe of the study
    python train.py --leave-out fp32_logits                    # ScaleRL but for one axis
    python train.py --loss gspo --advantage-norm none          # any part on its own
    python train.py --generators 6 --trainers 2                # on eight GPUs
    python train.py --plan --model Qwen/Qwen3-0.6B             # what a run would take, before anything is started
    python train.py --resume runs/NAME                         # go on after a crash, a Ctrl-C or the end (--steps 300)

The algorithm is `train`, at the end of this file: a loop of optimizer steps, the same on every rank
of the trainer.

    problems (data/) -> the feed hands their prompts out to the generators (generate.py), at most k steps ahead
      -> groups of finished rollouts come back, and their task judges them (data/)
      -> a batch of groups gets advantages and token weights, and is trained on (loss.py, core/policy.py)
      -> the new parameters go to the generators at once, which go on with the completions that they have begun
      -> every few steps held-out problems are sampled with the parameters of that step alone
      -> at the end the paper's sigmoid is fitted to those pass rates (curve/)

Rank 0 of the trainer is this process. Each generator is a process of its own, and so is each other
rank. A generator or a verifier that dies or is silent is replaced. If a rank dies, the run ends.
Every few steps a checkpoint is written, and --resume goes on from it.

`step` counts the passes of the loop made so far, and is the version of the parameters too: the loop
trains the parameters of version `step` and makes those of version `step + 1`. They are the same if
the step is skipped.

Dimensions: P prompts in a batch, G completions per prompt, R = P x G rollouts, B sequences in a
micro-batch, T tokens of a sequence, N any number of tokens.
"""

import math
import signal
import sys
import time

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # Ctrl-C during the seconds of imports leaves no traceback

from core.screen import say
from core.settings import TrainCommand, parse
from curve.flags import errors_as_sentences, run_command
from machinery.processes import import_for_generators

if __name__ == "__main__":
    with (
        errors_as_sentences()
    ):  # before the slow imports, so that --help and wrong flags are answered fast
        command = parse(sys.argv[1:], TrainCommand, description=__doc__)
    say("reading the libraries, the data and the model")
    if not (command.plan or command.one_process or command.gpus_here()):
        import_for_generators()

import torch
import transformers

import loss
from core.devices import cpu_threads, devices_here
from core.policy import Policy, micro_batches
from core.rollouts import Batch, SharedParameters
from machinery.kept import kept_rows
from machinery.processes import end_children
from machinery.ranks import other_ranks, wait_for_ranks
from machinery.run import OtherRank, Run, Start, open_run
from machinery.totals import Totals
from machinery.trainer import gathered, make_policy, read_moments, update_size
from tools import view
from tools.plan import plan


def main(command: TrainCommand) -> int:
    """The command. Returns the exit status: 0; 1 after a failure; 130 after Ctrl-C, 143 after
    SIGTERM. ValueError or OSError, before any process is started, if the flags, the data or the
    model cannot be used."""
    transformers.utils.logging.disable_progress_bar()
    if command.plan:
        print(plan(command))
        return 0
    run = open_run(command.of_the_run())
    with run.until_its_end():
        with other_ranks(run.settings, train, (run.start,), run.hint):
            train(0, run.start, run)
        run.leave_results(view.write_page)
    return run.exit_status()


# --- the loop -------------------------------------------------------------------------------------


def train(rank: int, start: Start, run: Run | None = None) -> None:
    """All steps, from the first validation to the last checkpoint. Every rank runs this. Rank 0 has
    the `Run`, with the generators, the log and the model that `open_run` has loaded. Another rank
    has an `OtherRank` with the same calls: it gets rank 0's answers, and loads the model itself."""
    s, r, parameters = start.settings, start.settings.recipe, start.parameters
    run = run or OtherRank(start)
    trainers = devices_here(s)[1]
    ranks, device = len(trainers), torch.device(trainers[rank])
    torch.set_num_threads(cpu_threads(s))
    # With several ranks, or in bf16, FSDP shards the model: it keeps fp32 and computes in bf16.
    policy = make_policy(s, run.model, device)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=s.learning_rate,
        betas=s.adam_betas,
        eps=s.adam_eps,
        weight_decay=s.weight_decay,
        fused=device.type
        == "cuda",  # otherwise it takes 4 bytes a parameter more there, and is slower
    )
    if start.moments:
        read_moments(policy, optimizer, start.moments)
    if device.type == "cuda":
        parameters.pin()
    step = start.step

    publish(policy, parameters, step, rank)
    run.begin(step)
    if run.wants_validation(step):
        run.validate(step, policy)
    while run.goes_on(step):
        # 1. whole groups, none of their tokens more than k steps old
        groups = run.batch(step)
        if groups is None:  # every prompt is retired, or the run ends
            break
        batch = Batch(groups, step)
        oldest = batch.ages_N.max()
        assert oldest <= loss.most_off_policy(r.asynchrony), (
            f"a token of step {step} is {oldest} steps old"
        )

        # 2. what each completion is worth; advantages and token weights are fixed for the whole batch
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
        advantages_R, weights_R = (
            advantages_PG.flatten().to(device),
            weights_PG.flatten().to(device),
        )
        counted_rows = counted_PG.flatten().nonzero().flatten().tolist()

        # 3. one optimizer step: gradients add up over this rank's micro-batches, and over the ranks
        totals = Totals(step, kept_rows(s, step + 1, groups))  # the log calls this update step + 1
        for m in micro_batches(
            batch.rollouts,
            counted_rows,
            s.tokens_per_micro_batch,
            device,
            rank,
            ranks,
            s.share_prompts,
        ):
            logprobs_BT, entropies_N = policy(m, r.fp32_logits)
            value, sums = loss.policy_loss(
                r,
                logprobs_BT,
                m.generator_logprobs_BT,
                m.sampled_BT,
                advantages_R[m.rows_B],
                weights_R[m.rows_B],
            )
            (
                value * ranks
            ).backward()  # FSDP divides by the number of ranks, but our weights need the sum
            totals.add(m, value.detach(), sums, logprobs_BT.detach(), entropies_N)
        totals.over_ranks()  # all ranks get the sums of all, and decide alike whether to step
        norm = 0.0
        if counted_rows:
            norm = gathered(
                torch.nn.utils.clip_grad_norm_(policy.parameters(), s.clip_gradient)
            ).item()
        finite = math.isfinite(totals.sums["loss"]) and math.isfinite(norm)
        learning_rate = s.learning_rate * min(1.0, (step + 1) / max(1, s.warmup_steps))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        stepped = (
            bool(counted_rows) and finite
        )  # a NaN that is stepped on stays in the parameters for good
        if stepped:
            optimizer.step()
        optimizer.zero_grad()
        moved = update_size(optimizer) if stepped else 0.0

        # 4. the generators go on with the new parameters
        step += 1
        copying = (
            publish(policy, parameters, step, rank) if loss.publishes(r.asynchrony, step) else 0.0
        )

        # 5. retire solved prompts, write down what has happened, validate, save
        run.retire(groups)
        run.log_step(
            step,
            batch,
            totals,
            {"reward": rewards_PG, "advantage": advantages_PG, "weight": weights_PG},
            {
                "skipped": int(not finite),
                "gradient_norm": norm,
                "learning_rate": learning_rate,
                "update_size": moved,
                "groups_counted": int(counted_PG.any(1).sum()),
                "parameters_seconds": copying,
            },
        )
        if run.wants_validation(step):
            publish(policy, parameters, step, rank)
            run.validate(step, policy)
        if step % s.checkpoint_every == 0:
            run.save(step, policy, optimizer)
    if run.wants_validation(step, at_the_end=True):
        publish(policy, parameters, step, rank)
        run.validate(step, policy)
    if run.end(step):
        run.save(step, policy, optimizer)


def publish(policy: Policy, parameters: SharedParameters, version: int, rank: int) -> float:
    """Give the parameters of this version to the generators, unless they have them. Each rank
    writes its shard and waits until all have written, so the version is complete before anything is
    sampled with it. Returns the seconds that it took."""
    began = time.monotonic()
    if parameters.version < version:
        parameters.write(policy.model.named_parameters(), version, rank)
        wait_for_ranks()
    return time.monotonic() - began


if __name__ == "__main__":
    try:
        run_command(main, command)
    finally:
        end_children()
