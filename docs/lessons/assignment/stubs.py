"""Ten functions of ScaleRL for you to write. README.md, beside this file, says how to begin.

The end of a name says the shape: P prompts in a batch, G completions of each prompt (a group), B
completions, T tokens of a completion, n points of a curve. So `rewards_PG` has the shape [P, G].
Numbers are float32, yes and no are bool. "Sec." and "A." are sections and appendices of the
paper, arXiv 2510.13786.

Keep the names and the arguments. Each function stands alone: none needs another one.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

# --- Which completions count, and how much --------------------------------------------------------


def zero_variance(rewards_PG: Tensor, usable_PG: Tensor) -> Tensor:
    """1. Which groups have no variance? They teach nothing (sec. 3.2, A.15). Returns bool [P].

        True for prompt p if  max_i r_pi = min_i r_pi,  over the usable completions i of p

    rewards_PG: float32, r. usable_PG: bool. A completion that was truncated is not usable: its
    reward does not matter. A group without any usable completion has no variance: True.

    Rounding makes the standard deviation of equal rewards 1e-8, and not 0.
    """
    raise NotImplementedError


def advantages(rewards_PG: Tensor, counted_PG: Tensor, norm: str) -> Tensor:
    """2. How much better is a completion than its group (sec. 2, 3.2)? Returns float32 [P, G].

        c_pi = r_pi - mean_j r_pj                 j: the counted completions of prompt p

        A_pi = c_pi                               if norm is "none"     (Dr. GRPO)
        A_pi = c_pi / (s_p + 1e-6)                if norm is "prompt"   (GRPO)
        A_pi = c_pi / (s + 1e-6)                  if norm is "batch"    (ScaleRL)

        s_p = sqrt(mean_j c_pj^2)                 j: the counted completions of prompt p
        s   = sqrt(mean_qj c_qj^2)                q, j: all counted completions of the batch

    rewards_PG: float32, r. counted_PG: bool. A completion that is not counted has A = 0, and its
    reward changes nothing. If no completion of a group, or of the whole batch, is counted, all of
    its A are 0, and not NaN.
    """
    raise NotImplementedError


def token_weights(lengths_PG: Tensor, counted_PG: Tensor, aggregation: str) -> Tensor:
    """3. What is the weight of one token in the loss (sec. 3.2, A.2)? Returns float32 [P, G]: the
    weight of each token of completion i of prompt p.

        w_pi = 1 / (N |y_pi|)                     if aggregation is "sample"   (GRPO)
        w_pi = 1 / (M sum_j |y_pj|)               if aggregation is "prompt"   (ScaleRL, DAPO)
        w_pi = 1 / (sum_qj |y_qj|)                if aggregation is "token"

    |y| is the number of sampled tokens. N is the number of counted completions in the batch. M is
    the number of prompts that have a counted completion. All sums are over counted completions: j
    over those of prompt p, and q, j over those of the batch.

    lengths_PG: int64, |y|; it is at least 1. counted_PG: bool. A completion that is not counted has
    w = 0. If none is counted, all w are 0, and not NaN. Otherwise sum_pi w_pi |y_pi| = 1.
    """
    raise NotImplementedError


# --- Losses ---------------------------------------------------------------------------------------
# The next three functions have the same first three arguments:
#
#   logprobs_BT            float32, log pi_train: what the trainer says of each token. The gradient
#                          flows through it, and it is graded too.
#   generator_logprobs_BT  float32, log pi_gen: what the generator said when it sampled the token.
#   sampled_BT             bool. False for a forced token, which the policy did not choose. What
#                          stands there in the other arguments means nothing.
#
# rho_bt = exp(log pi_train - log pi_gen) is the ratio of a sampled token.


def cispo(
    logprobs_BT: Tensor,
    generator_logprobs_BT: Tensor,
    sampled_BT: Tensor,
    advantages_B: Tensor,
    eps_max: float,
) -> Tensor:
    """4. The term of each token in CISPO, which training makes larger (sec. 3.2). Returns float32
    [B, T].

        term_bt = sg(min(rho_bt, eps_max)) A_b log pi_train      if the token was sampled
        term_bt = 0                                              if it was forced

    sg is the stop-gradient: its argument is used as a number, and no gradient flows through it.
    So the derivative of a sampled token's term by its log pi_train is min(rho_bt, eps_max) A_b,
    also if the ratio is above eps_max. advantages_B: float32, A: one number for each completion.
    """
    raise NotImplementedError


def clipped(
    logprobs_BT: Tensor,
    generator_logprobs_BT: Tensor,
    sampled_BT: Tensor,
    advantages_B: Tensor,
    eps_low: float,
    eps_high: float,
) -> Tensor:
    """5. The term of each token in GRPO and DAPO, which training makes larger (sec. 3.2, A.2).
    Returns float32 [B, T].

        term_bt = min(rho_bt A_b, clip(rho_bt, 1 - eps_low, 1 + eps_high) A_b)   if sampled
        term_bt = 0                                                              if forced

    clip(x, low, high) is x, but at least low and at most high. Here the gradient flows through rho.
    If the clip decides, the gradient is 0. advantages_B: float32, A.

    log pi_train - log pi_gen can be 200. If A > 0, the clip decides there: the term is finite, and
    its gradient is 0. But in float32 exp(200) is infinite, and in the backward pass infinity times
    0 is NaN. This happens even in the branch of torch.where or torch.minimum that is not used. So
    limit the logarithm first, on the side on which the clip can decide, and take exp last.
    """
    raise NotImplementedError


def sequence_ratio(
    logprobs_BT: Tensor, generator_logprobs_BT: Tensor, sampled_BT: Tensor
) -> Tensor:
    """6. GSPO's ratio of a whole completion (sec. 3.2). Returns float32 [B], with its gradient.

        s_b = exp( (1 / |y_b|) sum_t (log pi_train - log pi_gen) )      t: the sampled tokens of b

    |y_b| is the number of sampled tokens of completion b. If it has none, s_b = 1.
    """
    raise NotImplementedError


# --- Generators -----------------------------------------------------------------------------------


def interrupt_or_truncate(
    sampled: int, closed_at: int, thinking_budget: int, answer_budget: int
) -> tuple[bool, bool]:
    """7. Must a completion be interrupted or truncated now (sec. 2, A.10)? Returns two bools:
    (interrupt, truncate). The question comes after each token.

    A completion thinks first, and then answers. Each of the two has a budget of its own, and a
    completion may use all of it.

        interrupt   if it still thinks, and has sampled thinking_budget tokens or more
        truncate    if it answers, and has sampled answer_budget tokens or more since its thinking
                    ended

    sampled: how many tokens it has sampled so far. closed_at: how many it had sampled when its
    thinking ended, or -1 if it still thinks. Thinking may end early, by itself.
    """
    raise NotImplementedError


def choose_batch(
    done: list[int], unfinished: list[int], version: int, k: int, prompts: int
) -> list[int] | None:
    """8. Which finished groups are trained next, in PipelineRL-k (sec. 3.1, A.11)? Returns a list
    of `prompts` indices into `done`, or None: the trainer must wait.

    Version `version` of the parameters is trained now. The trainer makes one step at a time, and
    each step trains the next version on `prompts` groups. A group that was handed out at version v
    may be trained by the versions v to v + k, and not later.

        1. If fewer than `prompts` groups are finished: None.
        2. The batch is the `prompts` oldest finished groups, the oldest first. Of two groups of the
           same version, the one with the smaller index comes first.
        3. All other groups, finished or not, must wait for later steps. Suppose that they are
           trained with the oldest first: the first `prompts` of them by version + 1, the next
           `prompts` by version + 2, and so on. If one of them would be too old then: None.

    done: the version at which each finished group was handed out. unfinished: the same, for the
    groups that are still being sampled.
    """
    raise NotImplementedError


def sample_in_flight(
    newest: Callable, sample: Callable, prompt: list[int], end: int, budget: int
) -> tuple[list[int], list[float], list[int]]:
    """9. Sample one completion, while the trainer goes on making new parameters: PipelineRL's
    in-flight update (sec. 3.1). Returns three lists with one entry for each sampled token:
    (tokens, logprobs, versions).

        for each token t:  (v, theta) = the newest parameters when t is sampled
                           y_t and log pi_gen(y_t) come from pi_theta( . | prompt, y_1 ... y_t-1)

    newest() returns (version, parameters). Each call may return a newer version than the call
    before, so call it exactly once before each token. sample(parameters, tokens) returns (token,
    log-probability): the next token after the list `tokens`, which has the prompt and all that was
    sampled so far.

    New parameters do not begin the completion again: its earlier tokens stay, and so do the
    log-probabilities and versions that they were sampled with. Sampling stops after the token
    `end`, which is part of the completion, or after `budget` tokens (at least 1).
    """
    raise NotImplementedError


# --- The curve of a run ---------------------------------------------------------------------------


def fit_sigmoid(compute_n: np.ndarray, pass_rate_n: np.ndarray) -> tuple[float, float, float]:
    """10. The sigmoid of least squares through the validations of a run (sec. 2.1, A.4). Returns
    three floats: (A, B, C_mid).

        R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

        A, B and C_mid make  sum_i (R(C_i) - R_i)^2  as small as possible, with 0 <= A <= 1

    compute_n: float64, C, increasing; the first is 0. pass_rate_n: float64, R. The first point is
    the pass rate before training. It gives R0, and is not in the sum. There are at least 6 points,
    and the pass rate rises. B is between 0.3 and 10, and C_mid is between C_1 / 10 and 10 C_n: C_1
    is the first compute above 0, and C_n the last.

    A sum that is at most 2 % above the least one is good enough. C_mid may be 1e11, and B is about
    2: search for log C_mid. If a search ends in the wrong place, begin it from several places.
    """
    raise NotImplementedError
