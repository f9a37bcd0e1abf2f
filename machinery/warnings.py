"""Warnings of what often comes before a run goes wrong. docs/findings.md says how each was
found."""

import math
from pathlib import Path

import loss
from machinery.checkpoints import step_of

REMEMBERED = 10  # training lines that `step_warnings` looks at
MOST_SKIPPED = 5  # steps in a row that were not finite; then the run ends
# the share of the groups of a batch; if no more count in REMEMBERED steps, steps are mostly noise
FEW_GROUPS = 0.25
FLAT_STEPS = 5  # steps in a row without any variance in the rewards
# KL of a step, divided by the entropy: above this in two of three steps, most runs fell soon after
DRIFT = 2.0
MISMATCH_TOO_LARGE = (
    0.05  # nats: an on-policy ratio that is off by 5 % on average is more than numerics
)


def step_warnings(
    lines: list[dict], prompts_left: int, groups_per_step: int, samples: Path
) -> dict[str, str]:
    """The warnings after a step, by what they are about. lines: the last training lines of the log,
    at most REMEMBERED. prompts_left: prompts that are not retired. samples: the file that shows
    completions."""
    now, step, warnings = lines[-1], lines[-1]["step"], {}
    if now["truncated_fraction"] > loss.TRUNCATED_TOO_OFTEN:
        warnings["truncation"] = (
            f"{now['truncated_fraction']:.0%} of the completions of step {step} reached their token limit without"
            f" ending, and are left out; instabilities often follow above {loss.TRUNCATED_TOO_OFTEN:.0%}: raise"
            " --answer-budget or --thinking-budget"
        )
    if (
        sum(
            (line["kl_estimate"] or 0) > DRIFT * (line["entropy"] or math.inf)
            for line in lines[-3:]
        )
        >= 2
    ):
        warnings["drift"] = (
            "in two of the last three steps the policy was further from the one that had sampled the batch than"
            f" {DRIFT:g} times its entropy (kl_estimate in the log); the pass rate often falls soon after: the"
            " learning rate is likely too high"
        )
    if prompts_left < groups_per_step:
        warnings["few prompts"] = (
            f"{prompts_left} prompts are left that are not solved, fewer than the {groups_per_step} that a step takes,"
            " so each step trains on the same ones again and again; runs often fall from here on. --least-prompts"
            f" {10 * groups_per_step} has the solved ones come again in time"
        )
    if in_a_row(lines, FLAT_STEPS, lambda line: line["zero_variance_fraction"] == 1):
        warnings["flat"] = (
            f"in each of the last {FLAT_STEPS} steps all completions of a prompt got the same reward: there is nothing"
            f" to learn from. The pass rate of this step is {now['pass_rate']:.2f}: near 0 the problems are too hard"
            " for the model (docs/your_own.md: imitate first), or its answers are not found in what it writes; near 1"
            " they are too easy."
            f" {samples} shows completions with their verdicts"
        )
    elif few_groups_count(lines, groups_per_step):
        warnings["few groups"] = (
            f"in each of the last {REMEMBERED} steps at most {FEW_GROUPS:.0%} of the groups counted: all completions of"
            " the others got the same reward, so few prompts decide where a step goes. More --prompts-per-step, larger"
            " groups (--completions-per-prompt), or data that are solved now and then help; a smaller K of --asynchrony"
            " too, if the policy moves fast"
        )
    if now["skipped"]:
        warnings["not finite"] = (
            f"{not_finite(step)}. The step is skipped, and counted as `skipped` in the log"
        )
    return warnings


def few_groups_count(lines: list[dict], groups_per_step: int) -> bool:
    """Whether hardly any group of the last steps counted, although the problems are not solved."""
    few = lambda line: (
        line["groups_counted"] <= FEW_GROUPS * groups_per_step
        and line["pass_rate"] < loss.RETIRE_AT
    )
    return in_a_row(lines, REMEMBERED, few)


def step_failure(lines: list[dict]) -> str:
    """Why the run cannot go on after the last of these training lines; '' if it can."""
    if not in_a_row(lines, MOST_SKIPPED, lambda line: line["skipped"]):
        return ""
    return (
        f"{not_finite(lines[-1]['step'])}. So were the {MOST_SKIPPED - 1} steps before it, and the parameters stay as"
        " they were: try a lower --learning-rate, or --dtype float32, from an earlier checkpoint"
    )


def validation_warnings(validations: list[dict], checkpoint: Path | None) -> dict[str, str]:
    """The same after a validation, from all validation lines of the log. checkpoint: the newest one
    from before a fall, if there is one."""
    now, warnings = validations[-1], {}
    if now["mismatch_mean"] > MISMATCH_TOO_LARGE:
        warnings["mismatch"] = (
            f"generator and trainer differ by {now['mismatch_mean']:.3f} nats a token, with the same parameters; the"
            " importance ratios measure that and not the policy: keep --fp32-logits, or try --dtype float32"
        )
    if peak := fell_from(validations):
        warnings["fall"] = (
            f"the pass rate has fallen from {peak['pass_rate']:.3f} at step {peak['step']} to {now['pass_rate']:.3f} at"
            f" step {now['step']}"
        )
        if checkpoint is not None:
            command = f"python train.py --resume {checkpoint.parent.parent} --from-step {step_of(checkpoint)}"
            warnings["fall"] += f"; once the run is stopped, {command} goes on from before the fall"
    return warnings


def fell_from(validations: list[dict]) -> dict | None:
    """The best validation, if the last lies below it by more than a fifth of the gain and than
    chance; else None."""
    if not validations:
        return None
    first, last = validations[0], validations[-1]
    best = max(validations, key=lambda line: line["pass_rate"])
    chance = 4 * math.sqrt(0.5 / last["num_examples"])  # 4 standard errors of a difference
    least = max(0.2 * (best["pass_rate"] - first["pass_rate"]), chance)
    return best if best["pass_rate"] - last["pass_rate"] > least else None


def in_a_row(lines: list[dict], number: int, holds) -> bool:
    return len(lines) >= number and all(holds(line) for line in lines[-number:])


def not_finite(step: int) -> str:
    return f"the loss or the gradient of step {step} is not finite"
