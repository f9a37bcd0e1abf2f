"""ScaleRL in one file: every part of the recipe of "The Art of Scaling Reinforcement Learning
Compute for LLMs" (Khatri et al. 2025, arXiv 2510.13786), each as a small pure function, in the
order in which a rollout meets them.

    1. Recipe             the parts and their values; the recipes of the study; leave-one-out
    2. Asynchrony         how far the generators may run ahead, and which groups are trained next
    3. Length control     forced interruption, or a length penalty
    4. Logits             the head in fp32; log-probabilities of the sampled tokens, in chunks
    5. Which samples      truncation, zero-variance filtering, No-Positive-Resampling
    6. Advantages         four norms
    7. Losses             cispo, dapo, grpo, gspo, and newer ones: one term per token
    8. Aggregation        one weight per token, fixed for the whole batch
    9. What train.py calls: `credit` for a batch, `policy_loss` for each of its micro-batches

Dimensions: P prompts in a batch, G completions per prompt (a group), B sequences in a micro-batch,
T tokens, N = any number of tokens, D hidden size, V vocabulary. `rewards_PG` is a tensor of shape
[P, G]. The policy chose the "sampled" tokens; "forced" tokens (the phrase of an interruption) are
context only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# --- 1. The recipe (sec. 4, A.16) -----------------------------------------------------------------

Axis = Literal[
    "asynchrony", "loss", "aggregation", "advantage_norm", "fp32_logits", "zero_variance_filter",
    "no_positive_resampling", "length_control",
]  # fmt: skip


LengthControl = Literal["interruption", "penalty"]


def part(default, help: str, **others):
    """A field of `Recipe`. help: what --help says of its flag. others: `names`, a function that
    returns the table of its values; `least`, its least value, if that is not above 0."""
    return field(default=default, metadata={"help": help, **others})


@dataclass(frozen=True)
class Recipe:
    """The parts of an RL recipe; the defaults are ScaleRL."""

    recipe: str = part("scalerl", "the recipe to start from", names=lambda: RECIPES)
    leave_out: Axis | None = part(
        None, "this axis of ScaleRL goes back to its `base` value (length_control: to the penalty)"
    )
    asynchrony: str = part(
        "pipeline-8", "pipeline-K: PipelineRL, at most K steps off-policy; ppo-K: PPO-off-policy"
    )
    loss: str = part("cispo", "the term of each token", names=lambda: LOSSES)
    aggregation: str = part("prompt", "what is averaged first", names=lambda: AGGREGATIONS)
    advantage_norm: str = part(
        "batch", "what the centred rewards are divided by", names=lambda: NORMS
    )
    mask_sequences: bool = part(
        False, "leave out wrong completions that have become unlikely (DeepSeek-V3.2)"
    )
    fp32_logits: bool | Literal["split"] = part(
        True,
        "LM head in fp32 on both sides; split: by matmuls in bf16; off: in 16 bits",
    )
    zero_variance_filter: bool = part(True, "drop groups whose rewards are all equal")
    positive_resampling: bool = part(
        False, "a prompt comes again also after it was solved with a pass rate >= 0.9"
    )
    least_prompts: int = part(
        0,
        "with fewer left than this, all solved prompts come again (not in the paper); 0: never",
        least=0,
    )
    length_control: LengthControl = part("interruption", "cut thinking short, or pay for length")
    eps_max: float | None = part(
        None,
        "cap of the ratio; by default cispo 5 (4, 5 and 8 did the same in the paper; 2 is TIS)",
    )
    eps_low: float | None = part(
        None, "lower clip; by default dapo 0.2, grpo 0.2, gspo 0.004", least=0
    )
    eps_high: float | None = part(None, "upper clip; by default dapo 0.26, grpo 0.2, gspo 0.005")
    batch_factor: float = part(
        1.0, "prompts a step, as a multiple of --prompts-per-step (80 instead of 48 is 1.667)"
    )


_BASE = Recipe(
    recipe="base",
    asynchrony="ppo-8",
    loss="dapo",
    aggregation="sample",
    advantage_norm="prompt",
    fp32_logits=False,
    zero_variance_filter=False,
    positive_resampling=True,
)
# Recipes that filter without ScaleRL's other parts had 80 prompts a batch, not 48 (A.16).
_FILTERED = replace(_BASE, aggregation="prompt", zero_variance_filter=True, batch_factor=80 / 48)

RECIPES = {
    "scalerl": Recipe(),
    "base": _BASE,
    "grpo": replace(_BASE, recipe="grpo", loss="grpo"),
    "dapo": replace(_FILTERED, recipe="dapo"),
    "magistral": replace(
        _FILTERED, recipe="magistral", asynchrony="pipeline-8", advantage_norm="batch"
    ),
    "minimax": replace(_FILTERED, recipe="minimax", loss="cispo", fp32_logits=True),
}


def leave_one_out(axis: Axis) -> Recipe:
    """ScaleRL with one axis back at its `base` value (sec. 4); length control goes to the length
    penalty."""
    name = axis.removeprefix("no_")  # No-Positive-Resampling is a field that is off
    value = "penalty" if axis == "length_control" else getattr(_BASE, name)
    return replace(RECIPES["scalerl"], leave_out=axis, **{name: value})


# --- 2. Asynchrony (sec. 3.1, A.11) ---------------------------------------------------------------
# Version 0 of the parameters is the model that RL starts from. Step s trains version s - 1 and
# makes version s, also if the step is skipped. The log counts in the same way. If version v has
# sampled a token, and version w is trained on it, the token is w - v steps off-policy. In this
# section `version` is the version that is trained next. The version of a group is the one at which
# the group was handed out: none of its tokens is older.


def parse_asynchrony(asynchrony: str) -> tuple[str, int]:
    """("pipeline", k) or ("ppo", k). ValueError for anything else."""
    kind, _, k = asynchrony.partition("-")
    if kind not in ("pipeline", "ppo") or not k.isdecimal() or (kind == "ppo" and int(k) == 0):
        raise ValueError(
            f"--asynchrony is {asynchrony!r}; valid are pipeline-K (K >= 0) and ppo-K (K >= 1),"
            " for example pipeline-8"
        )
    return kind, int(k)


def most_off_policy(asynchrony: str) -> int:
    """The most optimizer steps that may lie between sampling a token and training on it.
    PipelineRL-k: k. PPO-off-policy-k: k - 1. There one version samples the batches of k steps: the
    first of these steps trains that version, and the last one is k - 1 steps later."""
    kind, k = parse_asynchrony(asynchrony)
    return k if kind == "pipeline" else k - 1


def groups_ahead(asynchrony: str, prompts: int, version: int) -> int:
    """How many groups may be under way (handed out, not yet trained on) at this version. A batch
    has `prompts` groups.

    PipelineRL-k: (k + 1) x prompts. Of the finished groups the oldest are trained first, and
    `choose_batch` waits for a group that would get too old. So version + k is the last that is
    trained on a group of this version. PPO-off-policy-k: k x prompts, handed out together at every
    k-th version. A run that was stopped between two of these versions, and resumed, hands out only
    the groups of the steps that are left.
    """
    kind, k = parse_asynchrony(asynchrony)
    if kind == "pipeline":
        return (k + 1) * prompts
    return (k - version % k) * prompts


def choose_batch(
    done: list[int], unfinished: list[int], version: int, asynchrony: str, prompts: int
) -> list[int] | None:
    """Which finished groups to train this version on, as indices into `done`. None: wait until more
    are finished.

    done, unfinished: for each group under way, the version at which it was handed out. `prompts`
    groups make a batch.

    PPO-off-policy-k waits until everything that was handed out is finished. PipelineRL-k takes the
    oldest finished groups. It waits if a group that stays behind would be too old in its turn:
    version v + k is the last that may be trained on a group of version v. So no group is ever
    trained too late: each time it was left behind, this check had shown that its own turn comes in
    time. For example with k = 2 and one group in a batch:

        group   handed out at version   last version that may be trained on it
        A       2                       4
        B       3                       5
        C       3                       5

    Version 3 is to be trained, B is finished and A is not: B is taken, since there is still version
    4 for A. Then version 4 is to be trained, C is finished and A is not: the batch waits, since A
    would be too old for version 5. The wait cannot last for ever: the generator can finish A
    without the trainer.
    """
    kind, k = parse_asynchrony(asynchrony)
    oldest_first = sorted(range(len(done)), key=lambda i: done[i])
    batch, left = oldest_first[:prompts], oldest_first[prompts:]
    if len(batch) < prompts:
        return None
    if kind == "ppo":
        return None if unfinished else batch
    # The groups that stay behind make the next batches, the oldest first.
    for place, group_version in enumerate(sorted([done[i] for i in left] + unfinished)):
        trained_version = version + 1 + place // prompts
        if trained_version > group_version + k:
            return None
    return batch


def publishes(asynchrony: str, version: int) -> bool:
    """Whether the parameters of this version go to the generators: every version, or with PPO every
    k-th. A validation publishes its own version too."""
    kind, k = parse_asynchrony(asynchrony)
    return kind == "pipeline" or version % k == 0


# --- 3. Length control (sec. 2, A.10) -------------------------------------------------------------

# What `--defaults paper` starts from, in tokens (A.3); the thinking budget of each completion is
# drawn from its range.
PROMPT_BUDGET, THINKING_BUDGET, ANSWER_BUDGET = 2048, (10_240, 12_288), 2048
INTERRUPTION_PHRASE = (
    "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
)


def interrupt_or_truncate(length_control: str, sampled, closed_at, thinking_budget, answer_budget):
    """Whether a completion is interrupted or truncated now: (interrupt, truncate), each bool.

    sampled: tokens sampled so far. closed_at: how many there were when thinking ended, by
    `</think>` or by an interruption; negative while thinking goes on. Both are integer arrays
    of one shape; a budget is one too, or a number. For a completion that has its EOS the answer
    means nothing.

    interruption: if thinking reaches its budget, the phrase is appended. Its tokens are forced:
    they are context, and have no ratio, no weight and no place in the length. The answer has a
    budget of its own, counted from the end of thinking, so that late thinking still has room to
    answer. penalty: nothing is forced; the two budgets are one.
    """
    if length_control != "interruption":
        never = sampled < 0
        return never, sampled >= thinking_budget + answer_budget
    thinks = closed_at < 0
    interrupt = thinks & (sampled >= thinking_budget)
    truncate = ~thinks & (sampled - closed_at >= answer_budget)
    return interrupt, truncate


def rewards(
    scores_PG: Tensor, lengths_PG: Tensor, length_control: str, max_length: int, penalty_length: int
) -> Tensor:
    """r = 2 score - 1: +1 if correct, -1 if wrong (A.3). With the length penalty (sec. 2) a correct
    completion also gets

        clip((L_max - |y|) / L_cache - 1, -1, 0)

    which is 0 up to L_max - L_cache tokens and -1 at L_max. It is multiplied by the score, so a
    wrong completion gets none. scores_PG: float32, 0 is wrong and 1 is correct; lengths_PG: |y|,
    sampled tokens; max_length: L_max; penalty_length: L_cache. Returns float32 [P, G].
    """
    rewards_PG = 2 * scores_PG - 1
    if length_control == "penalty":
        penalty_PG = ((max_length - lengths_PG) / penalty_length - 1).clamp(-1, 0)
        rewards_PG = rewards_PG + scores_PG * penalty_PG
    return rewards_PG


# --- 4. Logits (sec. 3.2) -------------------------------------------------------------------------


class Head(NamedTuple):
    """The last part of a model. Most have the weight alone."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    cap: float | None = None  # no logit is beyond it


def head_logits(hidden_ND: Tensor, head: Head, fp32: bool | str) -> Tensor:
    """Logits [N, V], float32:

        z = scale (hidden weight^T + bias)      and with a cap  cap tanh(z / cap)

    With fp32 the matmul itself is done in fp32, with the present fp32 weights of the head: a stored
    copy would be out of date after the next update. Casting after a bf16 matmul is useless, since
    the precision is lost by then. "split" is `SplitMatmul`. Without fp32 the matmul alone is in
    bf16, or in fp16 if the trunk is. The rest and the softmax are in fp32."""
    low = torch.float16 if hidden_ND.dtype == torch.float16 else torch.bfloat16
    dtype = torch.float32 if fp32 else low
    if fp32 == "split":
        logits_NV = SplitMatmul.apply(hidden_ND, head.weight_VD)
    else:
        logits_NV = F.linear(hidden_ND.to(dtype), head.weight_VD.to(dtype)).float()
    if head.bias_V is not None:
        logits_NV = logits_NV + head.bias_V.to(dtype)
    if head.scale != 1:
        logits_NV = logits_NV * head.scale
    return logits_NV if head.cap is None else head.cap * torch.tanh(logits_NV / head.cap)


class SplitMatmul(torch.autograd.Function):
    """left @ right.T, nearly as in fp32, by matmuls in bf16, for a GPU's tensor cores. A matrix in
    fp32 is the sum of a large one and a small one in bf16, but for 2^-17 of each number. The
    product of two small ones is left out."""

    @staticmethod
    def forward(ctx, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        parts_of_right, product = in_bf16(right), 0.0
        for number, part in enumerate(in_bf16(left)):
            # Without the product of two small ones.
            for other in parts_of_right[: 2 - number]:
                product += matmul_in_fp32(part, other)
        return product

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        gradient_of_left = SplitMatmul.apply(gradient, right.T)
        return gradient_of_left.to(left.dtype), SplitMatmul.apply(gradient.T, left.T)


def in_bf16(x: Tensor) -> list[Tensor]:
    """The large part of a matrix in bf16; then the small part, unless the matrix is in bf16."""
    if x.dtype == torch.bfloat16:
        return [x]
    large = x.bfloat16()
    return [large, (x - large).bfloat16()]


def matmul_in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """left @ right.T of two matrices in bf16, summed in fp32. A CPU multiplies the same numbers in
    fp32."""
    if left.is_cuda:
        return torch.mm(left, right.T, out_dtype=torch.float32)
    return left.float() @ right.float().T


LOGITS = 2**29  # bytes of a chunk: logits, softmax and gradient, in fp32


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits exist at a time: as many as have LOGITS bytes, but 128 to 2,048."""
    return min(max(128, LOGITS // (3 * 4 * vocabulary)), 2048)


def _chunk_logprobs(
    hidden_ND: Tensor, head: Head, targets_N: Tensor, fp32: bool | str
) -> tuple[Tensor, Tensor]:
    logprobs_NV = torch.log_softmax(head_logits(hidden_ND, head, fp32), dim=-1)
    logprobs_N = logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    return logprobs_N, -(logprobs_NV.detach().exp() * logprobs_NV.detach()).sum(-1)


def sampled_logprobs(
    hidden_ND: Tensor, head: Head, targets_N: Tensor, fp32: bool | str
) -> tuple[Tensor, Tensor]:
    """log pi_train of the target tokens [N] (differentiable), and the policy's entropy there [N],
    in nats.

    hidden_ND: the output of the trunk (the model without its head) at the positions that predict
    targets_N. The logits exist for `chunk_tokens` tokens at a time only: with a vocabulary of
    150,000 the fp32 logits of a whole batch would fill the memory before anything else. The
    backward computes them again, but not the entropy, which comes last.
    """
    chunk = chunk_tokens(len(head.weight_VD))
    pieces = [
        checkpoint(_chunk_logprobs, hidden, head, targets, fp32, use_reentrant=False)
        for hidden, targets in zip(hidden_ND.split(chunk), targets_N.split(chunk))
    ]
    logprobs, entropies = zip(*pieces)
    return torch.cat(logprobs), torch.cat(entropies)


# --- 5. Which samples count (sec. 3.2, A.15) ------------------------------------------------------
# A completion is usable if it has ended by itself, within its token limit, and has a verdict. One
# that is not usable (usable_PG is False) is no member of its group: it is in no mean, no standard
# deviation and no loss.

TRUNCATED_TOO_OFTEN = 0.10  # a run warns: in the study 10 to 15 % came before most instabilities
RETIRE_AT = 0.9  # No-Positive-Resampling


def retires(pass_rate: float) -> bool:
    """No-Positive-Resampling: whether a prompt with this pass rate at a visit is removed from all
    later epochs.

    The pass rate is over all completions of the visit. One that was truncated, or that got no
    verdict, counts as not solved here, although the advantages leave it out. To see a solved prompt
    again costs little; an unsolved prompt that is retired is lost for good. Groups of a retired
    prompt that are under way already are trained.
    """
    return pass_rate >= RETIRE_AT


def zero_variance(rewards_PG: Tensor, usable_PG: Tensor) -> Tensor:
    """[P] bool: groups whose usable rewards are all equal, or that have none. Decided by maximum
    and minimum: the standard deviation of equal rewards may be 1e-8 instead of 0, and dividing by
    it would give huge advantages."""
    highest_P = rewards_PG.masked_fill(~usable_PG, -torch.inf).amax(1)
    lowest_P = rewards_PG.masked_fill(~usable_PG, torch.inf).amin(1)
    return highest_P <= lowest_P


def counted_samples(rewards_PG: Tensor, usable_PG: Tensor, zero_variance_filter: bool) -> Tensor:
    """[P, G] bool: the effective batch, the completions that the denominators count. The filter
    takes groups of zero variance out, and nothing is sampled in their place. Without it they stay
    in, with zero advantage."""
    filtered_P = zero_variance(rewards_PG, usable_PG) & zero_variance_filter
    return usable_PG & ~filtered_P[:, None]


# --- 6. Advantages (sec. 2, 3.2) ------------------------------------------------------------------
# A norm gets three tensors: the centred rewards [P, G], which are 0 for a completion that does not
# count; whether each completion counts [P, G]; and the mean reward of each group [P, 1]. It returns
# what the centred rewards are divided by.


def std_of_prompt(centred_PG, counted_PG, means_P1) -> Tensor:
    """[P, 1]: std_j r_j within each group. The mean of the centred rewards is 0."""
    members_P1 = counted_PG.sum(1, keepdim=True).clamp(min=1)
    return (centred_PG.square().sum(1, keepdim=True) / members_P1).sqrt()


def std_of_batch(centred_PG, counted_PG, means_P1) -> Tensor:
    """[]: the standard deviation of the centred rewards over the effective batch. Their mean is
    0."""
    return (centred_PG.square().sum() / counted_PG.sum()).sqrt()


def mean_of_prompt(centred_PG, counted_PG, means_P1) -> Tensor:
    """[P, 1]: twice the mean score of each group, since the rewards are +1 and -1 for scores of 1
    and 0."""
    return means_P1 + 1


NORMS = {"prompt": std_of_prompt, "batch": std_of_batch, "none": None, "mean": mean_of_prompt}


def advantages(
    rewards_PG: Tensor, usable_PG: Tensor, counted_PG: Tensor, norm: str, eps: float = 1e-6
) -> Tensor:
    """A_i = r_i - mean_j r_j within the group, then by NORMS

        prompt (GRPO)      A_i / (std_j r_j + eps)       within the group
        batch  (ScaleRL)   A_i / (std A + eps)           over the effective batch (counted_PG)
        none   (Dr. GRPO)  A_i
        mean   (MaxRL)     A_i / (mean_j r_j + 1 + eps)  that is (s_i - mean s) / mean s of the
                                                         scores s (arXiv 2602.02710)

    Zero outside the effective batch and in groups without variance.
    """
    members_P1 = usable_PG.sum(1, keepdim=True).clamp(min=1)
    means_P1 = torch.where(usable_PG, rewards_PG, 0.0).sum(1, keepdim=True) / members_P1
    varied_PG = counted_PG & ~zero_variance(rewards_PG, usable_PG)[:, None]
    centred_PG = torch.where(varied_PG, rewards_PG - means_P1, 0.0)
    if NORMS[norm] is None or not counted_PG.any():
        return centred_PG
    return centred_PG / (NORMS[norm](centred_PG, counted_PG, means_P1) + eps)


# --- 7. Losses (sec. 3.2, A.2, A.17) --------------------------------------------------------------


@dataclass(frozen=True)
class LossInputs:
    """What the term of a loss is computed from, for the tokens of a micro-batch."""

    logprobs_BT: Tensor  # log pi_train; gradients flow through it
    log_rho_BT: Tensor  # log pi_train - log pi_gen, and 0 at forced tokens; gradients flow here too
    advantages_B1: Tensor  # of the completion, for all its tokens
    sampled_BT: Tensor  # bool: sampled, not forced
    # The constants that the loss has in LOSSES; None: it has no such constant.
    eps_max: float | None = None
    eps_low: float | None = None
    eps_high: float | None = None

    @property
    def sg_rho_BT(self) -> Tensor:
        """The ratio as a constant: no gradient flows through it."""
        return self.log_rho_BT.detach().exp()


class Loss(NamedTuple):
    """What is maximised for each token, a function of its ratio rho = pi_train / pi_gen."""

    # Returns the term [B, T], and a bool [B, T]: whether a clip decided it.
    term: Callable[[LossInputs], tuple[Tensor, Tensor]]
    formula: str  # what `term` computes; tools/view.py puts numbers into it
    constants: dict[str, float] = {}  # in the formula; a field of Recipe with this name comes first


def cispo(inputs: LossInputs):
    """sg(min(rho, eps_max)) A log pi_train; no gradient flows through sg. A capped token keeps its
    gradient, with the factor eps_max. The log counts it as clipped, whatever its A."""
    rho_BT = inputs.sg_rho_BT
    terms_BT = rho_BT.clamp(max=inputs.eps_max) * inputs.advantages_B1 * inputs.logprobs_BT
    return terms_BT, rho_BT > inputs.eps_max


def clipped_ratio(inputs: LossInputs):
    """min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A): rho cut from above where A >= 0, from
    below where A < 0. Where A is 0 nothing counts as clipped."""
    # The cut comes before exp. Otherwise exp overflows above 88, and the branch that is not used
    # gives a NaN gradient.
    from_above_BT = inputs.log_rho_BT.clamp(max=math.log(1 + inputs.eps_high))
    from_below_BT = inputs.log_rho_BT.clamp(min=math.log(1 - inputs.eps_low))
    cut_BT = torch.where(inputs.advantages_B1 >= 0, from_above_BT, from_below_BT)
    clipped_BT = (cut_BT != inputs.log_rho_BT) & (inputs.advantages_B1 != 0)
    return cut_BT.exp() * inputs.advantages_B1, clipped_BT


def sequence_log_ratios(log_rho_BT: Tensor, sampled_BT: Tensor) -> Tensor:
    """[B, 1]: mean_t log rho_t over the sampled tokens; at forced ones log rho is 0."""
    return log_rho_BT.sum(1, keepdim=True) / sampled_BT.sum(1, keepdim=True).clamp(min=1)


def clipped_sequence(inputs: LossInputs):
    """min(s A, clip(s, 1 - eps_low, 1 + eps_high) A): one ratio for a sequence, s = exp(mean_t log
    rho_t)."""
    log_s_B1 = sequence_log_ratios(inputs.log_rho_BT, inputs.sampled_BT)
    log_s_BT = log_s_B1.expand_as(inputs.log_rho_BT)
    return clipped_ratio(replace(inputs, log_rho_BT=log_s_BT))


# Newer than the paper, with the constants of their authors.
ICEPOP_RANGE = (0.5, 5.0)
SAPO_TAU = (1.0, 1.05)  # where A > 0, and elsewhere
DPPO_DELTA, DPPO_CAP = 0.2, 20.0
MASK_DELTA = 0.5  # nats


def icepop(inputs: LossInputs):
    """sg(rho if 0.5 <= rho <= 5 else 0) A log pi_train: a token outside is left out (arXiv
    2510.18855)."""
    low, high = ICEPOP_RANGE
    rho_BT = inputs.sg_rho_BT
    left_out_BT = (rho_BT < low) | (rho_BT > high)
    kept_BT = rho_BT.masked_fill(left_out_BT, 0.0)
    return kept_BT * inputs.advantages_B1 * inputs.logprobs_BT, left_out_BT


def sapo(inputs: LossInputs):
    """(4 / tau) sigmoid(tau (rho - 1)) A with tau = 1 if A > 0, else 1.05: a soft clip (arXiv
    2511.20347)."""
    tau_B1 = torch.where(inputs.advantages_B1 > 0, *SAPO_TAU)
    # exp overflows above 88; the gradient is 0 long before.
    rho_BT = inputs.log_rho_BT.clamp(max=80).exp()
    terms_BT = 4 / tau_B1 * torch.sigmoid(tau_B1 * (rho_BT - 1)) * inputs.advantages_B1
    return terms_BT, torch.zeros_like(inputs.sampled_BT)


def dppo(inputs: LossInputs):
    """sg(min(rho, 20)) A log pi_train if (pi_train - pi_gen) sign(A) <= 0.2, else 0: a token is
    left out if its probability has already moved by more than 0.2 in the direction in which A
    pushes it (arXiv 2602.04879)."""
    pi_train_BT = inputs.logprobs_BT.detach().exp()
    pi_gen_BT = (inputs.logprobs_BT - inputs.log_rho_BT).detach().exp()
    left_out_BT = (pi_train_BT - pi_gen_BT) * inputs.advantages_B1.sign() > DPPO_DELTA
    kept_BT = inputs.sg_rho_BT.clamp(max=DPPO_CAP).masked_fill(left_out_BT, 0.0)
    return kept_BT * inputs.advantages_B1 * inputs.logprobs_BT, left_out_BT


# fmt: off
LOSSES = {
    "cispo": Loss(cispo, "sg(min(rho, eps_max)) A log pi_train", {"eps_max": 5.0}),
    "dapo": Loss(clipped_ratio, "min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)",
                 {"eps_low": 0.2, "eps_high": 0.26}),
    "grpo": Loss(clipped_ratio, "min(rho A, clip(rho, 1 - eps_low, 1 + eps_high) A)",
                 {"eps_low": 0.2, "eps_high": 0.2}),
    "gspo": Loss(clipped_sequence, "min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)",
                 {"eps_low": 4e-3, "eps_high": 5e-3}),
    "icepop": Loss(icepop, "sg(rho if 0.5 <= rho <= 5 else 0) A log pi_train"),
    "sapo": Loss(sapo, "(4 / tau) sigmoid(tau (rho - 1)) A with tau = 1 if A > 0, else 1.05"),
    "dppo": Loss(dppo,
                 "sg(min(rho, 20)) A log pi_train if (pi_train - pi_gen) sign(A) <= 0.2, else 0"),
}
# fmt: on


def constants(recipe: Recipe) -> dict[str, float]:
    """The constants in the formula of this recipe's loss: the recipe's own, or else those that
    LOSSES has."""
    values = dict(LOSSES[recipe.loss].constants)
    for name in values:
        if getattr(recipe, name) is not None:
            values[name] = getattr(recipe, name)
    return values


def unlikely_sequences(advantages_B1: Tensor, log_rho_BT: Tensor, sampled_BT: Tensor) -> Tensor:
    """[B, 1] bool, for `mask_sequences`: A < 0 and mean_t(log pi_gen - log pi_train) > 0.5
    (DeepSeek-V3.2, arXiv 2512.02556)."""
    fall_B1 = -sequence_log_ratios(log_rho_BT.detach(), sampled_BT)
    return (advantages_B1 < 0) & (fall_B1 > MASK_DELTA)


def token_terms(
    recipe: Recipe,
    logprobs_BT: Tensor,
    generator_logprobs_BT: Tensor,
    sampled_BT: Tensor,
    advantages_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What is maximised, per token, by the function that LOSSES has for this recipe.

    logprobs_BT: log pi_train, differentiable; generator_logprobs_BT: log pi_gen, as recorded when
    the token was sampled. Returns terms_BT, the log rho_BT of each token, and clipped_BT (bool:
    where the clip decides), all [B, T]. A forced token has no ratio: its log rho and its term are
    0.
    """
    log_rho_BT = torch.where(sampled_BT, logprobs_BT - generator_logprobs_BT, 0.0)
    advantages_B1 = advantages_B[:, None]
    inputs = LossInputs(logprobs_BT, log_rho_BT, advantages_B1, sampled_BT, **constants(recipe))
    terms_BT, clipped_BT = LOSSES[recipe.loss].term(inputs)
    counts_BT = sampled_BT
    if recipe.mask_sequences:
        counts_BT = sampled_BT & ~unlikely_sequences(advantages_B1, log_rho_BT, sampled_BT)
    return torch.where(counts_BT, terms_BT, 0.0), log_rho_BT.detach(), clipped_BT & sampled_BT


# --- 8. Aggregation (sec. 3.2, A.2) ---------------------------------------------------------------


def tokens_of_samples(lengths_PG: Tensor, counted_PG: Tensor) -> Tensor:
    """[P, G]: completions x |y_i|."""
    return counted_PG.sum() * lengths_PG


def tokens_of_prompts(lengths_PG: Tensor, counted_PG: Tensor) -> Tensor:
    """[P, 1]: prompts x sum_j |y_j|."""
    lengths_P1 = lengths_PG.sum(1, keepdim=True)
    return (lengths_P1 > 0).sum() * lengths_P1


def tokens_of_batch(lengths_PG: Tensor, counted_PG: Tensor) -> Tensor:
    """[]: the sum of all |y|."""
    return lengths_PG.sum()


# What 1 is divided by: the quotient is the weight of each token of a completion.
AGGREGATIONS = {"sample": tokens_of_samples, "prompt": tokens_of_prompts, "token": tokens_of_batch}


def token_weights(lengths_PG: Tensor, counted_PG: Tensor, aggregation: str) -> Tensor:
    """The weight of each sampled token of a completion, [P, G]; summed over all sampled tokens of
    the batch it is 1. By AGGREGATIONS

        sample (GRPO)           1 / (completions |y_i|)    each completion's mean, then their mean
        prompt (ScaleRL, DAPO)  1 / (prompts sum_j |y_j|)  each prompt's mean over its tokens, then
                                                           the mean over prompts
        token                   1 / (sum of all |y|)

    lengths_PG: |y|, sampled tokens. The weights are fixed once the whole batch is known, so the
    gradient is the same however the batch is cut into micro-batches or spread over devices. All
    zero when nothing counts.
    """
    lengths_PG = torch.where(counted_PG, lengths_PG, 0)
    denominators_PG = AGGREGATIONS[aggregation](lengths_PG, counted_PG)
    return torch.where(lengths_PG > 0, 1.0 / denominators_PG.clamp(min=1), 0.0)


# --- 9. What train.py calls -----------------------------------------------------------------------


class Credit(NamedTuple):
    """Credit assignment: what each completion of a batch gets, [P, G] each."""

    rewards_PG: Tensor
    counted_PG: Tensor  # bool: the effective batch
    advantages_PG: Tensor
    weights_PG: Tensor  # of each sampled token


def credit(
    recipe: Recipe,
    scores_PG: Tensor,
    lengths_PG: Tensor,
    usable_PG: Tensor,
    thinking_budget: int,
    answer_budget: int,
) -> Credit:
    """Parts 3, 5, 6 and 8, once for the whole batch of an optimizer step.

    scores_PG: float32 verdicts, 0 is wrong and 1 is correct; lengths_PG: sampled tokens; usable_PG:
    see part 5. thinking_budget: the largest in the batch. With the length penalty a completion has
    the tokens of both budgets, and the last `answer_budget` of them cost reward.
    """
    max_length = thinking_budget + answer_budget
    rewards_PG = rewards(scores_PG, lengths_PG, recipe.length_control, max_length, answer_budget)
    counted_PG = counted_samples(rewards_PG, usable_PG, recipe.zero_variance_filter)
    advantages_PG = advantages(rewards_PG, usable_PG, counted_PG, recipe.advantage_norm)
    weights_PG = token_weights(lengths_PG, counted_PG, recipe.aggregation)
    return Credit(rewards_PG, counted_PG, advantages_PG, weights_PG)


def policy_loss(
    recipe: Recipe,
    logprobs_BT: Tensor,
    generator_logprobs_BT: Tensor,
    sampled_BT: Tensor,
    advantages_B: Tensor,
    weights_B: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss = -sum_{i,t} w_i term_{i,t} over the sampled tokens of a micro-batch; micro-batches add
    up to the batch.

    No KL term, no entropy bonus, no value model. Also returns sums over this micro-batch's sampled
    tokens, for the log: the ratio rho of each token, whatever the loss; its square; its maximum;
    the clipped tokens; and the estimate rho - 1 - log rho of KL(pi_gen || pi_train).
    """
    terms_BT, log_rho_BT, clipped_BT = token_terms(
        recipe, logprobs_BT, generator_logprobs_BT, sampled_BT, advantages_B
    )
    loss = -(weights_B[:, None] * terms_BT).sum()
    log_rho_N = log_rho_BT[sampled_BT]
    rho_N = log_rho_N.exp()
    sums = {
        "ratio": rho_N.sum(),
        "ratio_squared": rho_N.square().sum(),
        "ratio_max": rho_N.max() if len(rho_N) else rho_N.sum(),
        "clipped": clipped_BT.sum(),
        "kl": (rho_N - 1 - log_rho_N).sum(),
    }
    return loss, sums
