"""What the shells of all engines share: verdicts, the worth of completions, and the run that goes
on here."""

import functools
import json
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import loss
from core.decoding import completion_texts, make_decoding
from core.model import load_tokenizer
from core.rollouts import Request, Rollout
from core.settings import read_settings
from data import Problem
from data.verify import VerifierPool

FOLDER = Path(__file__).resolve().parent
SETTINGS = read_settings(FOLDER)  # of the run that was exported
RECIPE = SETTINGS.recipe
TOKENIZER = load_tokenizer(str(FOLDER / "model"))
DECODING = make_decoding(TOKENIZER, SETTINGS, RECIPE.length_control, RECIPE.fp32_logits)
UNUSABLE = (
    -1.0
)  # the score of a completion that was truncated or has no verdict; all others are in [0, 1]
# The verifiers of this process, started at the first call.
verifiers = functools.cache(
    lambda: VerifierPool(SETTINGS.verifiers, SETTINGS.verifier_time_limit, SETTINGS.verifier_memory)
)
LOCK = threading.Lock()  # a pool of verifiers is for one thread


def has_ended(completion_ids: list[int]) -> bool:
    return bool(completion_ids) and completion_ids[-1] in DECODING.eos


def scores(
    problems: list[str], prompt_ids: list[list[int]], completion_ids: list[list[int]]
) -> list[float]:
    """The score of each completion, or UNUSABLE. problems: each a Problem of data/, as JSON."""
    none, verdicts = np.zeros(0), {}
    rollouts = [
        Rollout(
            Request(0, 0, prompt, 0, ()),
            np.array(ids or DECODING.eos),
            none,
            none,
            none,
            False,
            False,
        )
        for prompt, ids in zip(prompt_ids, completion_ids)  # one that was aborted is empty
    ]
    texts = completion_texts(TOKENIZER, DECODING, rollouts)
    with LOCK:
        verifiers().submit(
            [(i, Problem(**json.loads(problem)), texts[i]) for i, problem in enumerate(problems)]
        )
        while verifiers().unfinished:
            verdicts |= dict(verifiers().results())
            time.sleep(0.002)
    usable = [
        has_ended(ids) and verdicts[i].failure is None for i, ids in enumerate(completion_ids)
    ]
    return [verdicts[i].score if usable[i] else UNUSABLE for i in range(len(problems))]


def worth(scores_PG: Tensor, lengths_PG: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and token weights, [P, G] each, of the whole batch of an optimizer step, as in
    train.py. scores_PG: as `scores` has them; lengths_PG: sampled tokens."""
    usable_PG = scores_PG >= 0
    longest = SETTINGS.thinking_budget[1] + SETTINGS.answer_budget
    rewards_PG = loss.rewards(
        scores_PG, lengths_PG, RECIPE.length_control, longest, SETTINGS.answer_budget
    )
    counted_PG = loss.counted_samples(rewards_PG, usable_PG, RECIPE.zero_variance_filter)
    advantages_PG = loss.advantages(rewards_PG, usable_PG, counted_PG, RECIPE.advantage_norm)
    return advantages_PG, loss.token_weights(lengths_PG, counted_PG, RECIPE.aggregation)


def sum_of_terms(
    logprobs_BT: Tensor, generator_BT: Tensor, sampled_BT: Tensor, advantages_BT: Tensor
) -> Tensor:
    """The loss with a weight of 1 for each token, for engines that weigh tokens by themselves.
    advantages_BT: the same for all sampled tokens of a completion."""
    advantages_B = advantages_BT.where(sampled_BT, 0).sum(1) / sampled_BT.sum(1).clamp(min=1)
    ones_B = torch.ones_like(advantages_B)
    return loss.policy_loss(RECIPE, logprobs_BT, generator_BT, sampled_BT, advantages_B, ones_B)[0]
