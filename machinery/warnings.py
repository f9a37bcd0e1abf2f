"""Warnings of what often comes before a run goes wrong. docs/findings.md says how each was
found."""

import math
from pathlib import Path

import loss
from machinery.folder import step_of

REMEMBERED = 10  # training lines that `step_warnings` looks at
MOST_SKIPPED = 5  # steps in a row that were not finite; then the run ends
# The share of the groups of a batch. If no more count in REMEMBERED steps, steps are mostly noise.
FEW_GROUPS = 0.25
FLAT_STEPS = 5  # steps in a row without any variance in the rewards
# KL of a step, divided by the entropy. Above this in two of three steps, most runs fell soon after.
DRIFT = 2.0
# Nats: an on-policy ratio that is off by 5 % on average is more than numerics.
MISMATCH_TOO_LARGE = 0.05


def step_warnings(
    lines: list[dict], prompts_left: int, of_prompts: int, groups_per_step: int, samples: Path
) -> dict[str, str]:
    """The warnings after a step, by what they are about. lines: the last training lines of the log,
    at most REMEMBERED. prompts_left: prompts that are not retired. of_prompts: all prompts of the
    smallest source. samples: the file that shows completions."""
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
            " (docs/your_own.md: imitate first), or its answers are not found in what it writes;"
            f" near 1 they are too easy. {samples} shows completions with their verdicts"
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
