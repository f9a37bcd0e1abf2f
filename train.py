"""Train a language model with the ScaleRL recipe, and see its curve.

    python train.py                                      # the default task, on two CPU cores
    python train.py --recipe base --seed 1               # another recipe of the study
    python train.py --leave-out fp32_logits              # ScaleRL but for one axis
    python train.py --loss gspo --advantage-norm none    # any part on its own
    python train.py --generators 6 --trainers 2          # on eight GPUs
    python train.py --resume runs/NAME                   # go on after a crash, a Ctrl-C or the end

The algorithm is `train`, at the end of this file: a loop of optimizer steps, the same on every rank
of the trainer.

    problems (data/) -> the feed hands their prompts out to the generators, at most k steps ahead
      -> groups of finished rollouts come back, and their task judges them (data/)
      -> a batch of groups gets advantages and token weights, and is trained on (loss.py)
      -> the new parameters go to the generators at once, which go on with what they have begun
      -> every few steps held-out problems are sampled with the parameters of that step alone
      -> at the end the paper's sigmoid is fitted to those pass rates (curve/)

Rank 0 of the trainer is this process. Each generator is a process of its own, and so is each other
rank. A generator or a verifier that dies or is silent is replaced. If a rank dies, the run ends.
Every few steps a checkpoint is written, and --resume goes on from it.

Steps and versions of the parameters are counted together, here and in the log. Version 0 is the
model that RL starts from. Step s trains version s - 1 and makes version s. If it is skipped,
version s is the same as version s - 1. A validation or a checkpoint of step s is of version s.

Dimensions: P prompts in a batch, G completions per prompt, R = P x G rollouts, B sequences in a
micro-batch, T tokens of a sequence, N any number of tokens.
"""

import contextlib
import math
import multiprocessing.forkserver
import os
import signal
import sys
import time
from pathlib import Path

# During the seconds of imports Ctrl-C ends the process, and leaves no traceback.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from core.processes import signals_deferred
from core.screen import say
from core.settings import Settings, devices_here, parse, read_sources
from curve.flags import errors_as_sentences, run_command

# The flags and the data are read before the slow imports, so that --help and what is wrong with
# them are answered fast.
if __name__ == "__main__":
    with errors_as_sentences():
        command = parse(sys.argv[1:], Settings, description=__doc__)
        say("reading the data, the libraries and the model")
        sources = read_sources(command)
    if not command.one_process and "cpu" in devices_here(command)[1]:
        # A process imports what generators need, while this one still imports its own. Generators
        # on CPUs are forked from it, and so start at once. It imports from the folder it starts in.
        multiprocessing.set_forkserver_preload(["core.generators"])
        with contextlib.chdir(Path(__file__).parent), signals_deferred():
            multiprocessing.forkserver.ensure_running()
    # Other processes take no module from the folder that the user stands in.
    os.environ["PYTHONSAFEPATH"] = "1"

import torch

import loss
from core.lora import merged
from core.policy import Policy, micro_batches
from core.rollouts import Batch, SharedParameters
from core.settings import cpu_threads
from data.load import Source
from machinery.kept import kept_rows
from machinery.measures import Totals
from machinery.ranks import end_children, from_rank_0, other_ranks, wait_for_ranks
from machinery.run import Run, open_run
from machinery.trainer import (
    Start,
    gathered,
    loss_scale,
    next_scale,
    policy_that_fits,
    read_moments,
)
from tools import view


def main(settings: Settings, sources: list[Source] | None = None) -> int:
    """The command. Returns the exit status: 0; 1 after a failure; 130 after Ctrl-C, 143 after
    SIGTERM. sources: of --data, if they are read already. ValueError or OSError, before any process
    is started, if the flags, the data or the model cannot be used."""
    # Everything that can be checked is checked here, before a process is started.
    run = open_run(settings, sources)
    with run.until_its_end():
        # The other ranks call `train` in processes of their own; here is rank 0.
        with other_ranks(run.settings, train, (run.start,), run.leave_no_name):
            train(0, run.start, run)
        run.leave_results(view.write_page)
    return run.exit_status()


def make_optimizer(settings: Settings, policy: Policy) -> torch.optim.Optimizer:
    """The optimizer, here alone. Those of torch.optim without a closure train, and go on from a
    checkpoint; where FSDP shards, those that treat each number alone."""
    return torch.optim.AdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        # On a GPU AdamW is fused: otherwise it takes 4 bytes a parameter more, and is slower.
        fused=policy.device.type == "cuda",
    )


# --- the loop -------------------------------------------------------------------------------------


def train(rank: int, start: Start, run: Run | None = None) -> None:
    """All steps, from the first validation to the last checkpoint. Every rank runs this.
    `from_rank_0` lets rank 0 alone use the generators and the log, and gives all ranks its answer.
    In `validate` and `save` all take part. run: that of rank 0, from `open_run`."""
    parameters = start.parameters
    run = run or Run(start)
    recipe = start.settings.recipe
    trainers = devices_here(start.settings)[1]
    ranks, device = len(trainers), torch.device(trainers[rank])
    torch.set_num_threads(cpu_threads(start.settings))

    # With several ranks, or in 16 bits, the model is sharded by FSDP: each rank keeps its part of
    # the parameters, in fp32. A layer is gathered while it is called, in 16 bits if it has so few.
    # On a GPU the largest micro-batch is tried, and settings that are not given follow from that.
    settings, policy, optimizer = policy_that_fits(start, device, make_optimizer)
    if start.checkpoint:
        read_moments(optimizer, start.checkpoint / "optimizer.safetensors")
    scale = loss_scale(settings, device, start.checkpoint)
    if device.type == "cuda":
        parameters.pin()

    # The generators start with the parameters of the first version. A validation before the first
    # step measures R0, where the curve begins.
    version = start.step
    publish(policy, parameters, version, rank)
    from_rank_0(run.begin, version)
    if from_rank_0(run.wants_validation, version):
        run.validate(version, policy, settings)

    # No groups: every prompt is retired, all steps are made, or something else ends the run.
    while groups := from_rank_0(run.batch, version):
        # 1. A batch of whole groups. All ranks get the same one. None of its tokens is more than k
        # steps old, which is asserted here, at the last place before they are used.
        step = version + 1
        batch = Batch(groups, version)
        oldest = batch.ages_N.max()
        assert oldest <= loss.most_off_policy(recipe.asynchrony), (
            f"a token of step {step} is {oldest} steps old"
        )

        # 2. The credit of each completion. Advantages and token weights are fixed for the whole
        # batch, so the gradient does not depend on how the batch is cut below.
        credit = loss.credit(
            recipe,
            batch.scores_PG,
            batch.lengths_PG,
            batch.usable_PG,
            settings.thinking_budget[1],
            settings.answer_budget,
        )
        advantages_R = credit.advantages_PG.flatten().to(device)
        weights_R = credit.weights_PG.flatten().to(device)
        counted_rows = credit.counted_PG.flatten().nonzero().flatten().tolist()

        # 3. The gradient. It adds up over this rank's micro-batches and over the ranks. FSDP
        # divides by the number of ranks, but our weights need the sum.
        totals = Totals(kept_rows(settings, step))
        for micro_batch in micro_batches(
            batch.rollouts,
            counted_rows,
            settings.tokens_per_micro_batch,
            device,
            rank,
            ranks,
            settings.share_prompts,
        ):
            logprobs_BT, entropies_N = policy(micro_batch, recipe.fp32_logits)
            policy_loss, sums = loss.policy_loss(
                recipe,
                logprobs_BT,
                micro_batch.generator_logprobs_BT,
                micro_batch.sampled_BT,
                advantages_R[micro_batch.rows_B],
                weights_R[micro_batch.rows_B],
            )
            (policy_loss * ranks * scale).backward()
            totals.add(micro_batch, policy_loss, sums, logprobs_BT, entropies_N)
        totals.over_ranks()  # all ranks get the sums of all, and decide alike whether to step

        # 4. The optimizer step. Without a counted group there is no gradient, and its norm is 0. A
        # NaN that is stepped on would stay in the parameters for good. If the loss scale of float16
        # makes a gradient overflow, it is halved.
        if scale > 1:
            for parameter in policy.parameters():
                if parameter.grad is not None:
                    parameter.grad /= scale
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.clip_gradient)
        gradient_norm = gathered(norm).item()
        finite = math.isfinite(totals.sums["loss"]) and math.isfinite(gradient_norm)
        overflow = not finite and math.isfinite(totals.sums["loss"]) and scale > 1
        learning_rate = settings.learning_rate * min(1.0, step / max(1, settings.warmup_steps))
        for parameter_group in optimizer.param_groups:
            parameter_group["lr"] = learning_rate
        if counted_rows and finite:
            optimizer.step()
        optimizer.zero_grad()
        scale = next_scale(scale, overflow, step)

        # 5. The generators get the new version, and go on with what they have begun.
        version = step
        copying_seconds = 0.0
        if loss.publishes(recipe.asynchrony, version):
            copying_seconds = publish(policy, parameters, version, rank)

        # 6. The prompts that the batch has solved are in no later epoch. What has happened is
        # written down.
        from_rank_0(
            run.finish_step,
            step,
            batch,
            totals,
            credit,
            {
                "skipped": int(not finite and not overflow),
                "rescaled": int(overflow),
                "loss_scale": scale,
                "gradient_norm": gradient_norm,
                "learning_rate": learning_rate,
                "groups_counted": int(credit.counted_PG.any(1).sum()),
                "parameters_seconds": copying_seconds,
            },
        )

        # 7. Validate and save, now and then. A validation is of this version alone, so the
        # generators get it first, even if `publishes` has kept it back.
        if from_rank_0(run.wants_validation, version):
            publish(policy, parameters, version, rank)
            run.validate(version, policy, settings)
        if step % settings.checkpoint_every == 0:
            run.save(version, policy, optimizer, scale)

    # The run ends with a checkpoint of the last version.
    if from_rank_0(run.end, version):
        run.save(version, policy, optimizer, scale)


def publish(policy: Policy, parameters: SharedParameters, version: int, rank: int) -> float:
    """Give the parameters of this version to the generators, unless they have them. Each rank
    writes its shard and waits until all have written, so the version is complete before anything is
    sampled with it. Returns the seconds that it took."""
    began = time.monotonic()
    if parameters.version < version:
        parameters.write(merged(policy.model), version, rank)
        wait_for_ranks()
    return time.monotonic() - began


if __name__ == "__main__":
    try:
        run_command(lambda command: main(command, sources), command)
    finally:
        end_children()
