"""What the shells of all engines share: verdicts, the worth of completions, and the run that goes
on here."""

import functools
import json
import threading
from pathlib import Path

import torch
from torch import Tensor

import loss
from core.decoding import completion_texts, make_decoding
from core.model import load_tokenizer
from core.rollouts import given_rollout
from core.settings import read_settings
from data import Problem
from data.verify import VerifierPool

FOLDER = Path(__file__).resolve().parent
SETTINGS = read_settings(FOLDER)  # of the run that was exported
RECIPE = SETTINGS.recipe
TOKENIZER = load_tokenizer(str(FOLDER / "model"))
DECODING = make_decoding(TOKENIZER, SETTINGS, RECIPE.length_control, RECIPE.fp32_logits)
# The score of a completion that was truncated or has no verdict; all others are in [0, 1].
UNUSABLE = -1.0
LOCK = threading.Lock()  # a pool of verifiers is for one thread


@functools.cache
def verifiers() -> VerifierPool:
    """The verifiers of this process, started at the first call."""
    return VerifierPool(*SETTINGS.verifier_limits)


def has_ended(completion_ids: list[int]) -> bool:
    return bool(completion_ids) and completion_ids[-1] in DECODING.eos


def scores(
    problems: list[str], prompt_ids: list[list[int]], completion_ids: list[list[int]]
) -> list[float]:
    """The score of each completion, or UNUSABLE. problems: each a Problem of data/, as JSON."""
    made = [Problem(**json.loads(problem)) for problem in problems]
    # The texts as a task judges them. A completion that was aborted is empty.
    pairs = zip(prompt_ids, completion_ids)
    rollouts = [given_rollout(prompt, ids or DECODING.eos) for prompt, ids in pairs]
    texts = completion_texts(TOKENIZER, DECODING, rollouts)
    to_judge = zip(range(len(made)), made, texts)
    with LOCK:
        verdicts = dict(verifiers().judge([*to_judge]))
    found = []
    for i, ids in enumerate(completion_ids):
        usable = has_ended(ids) and verdicts[i].failure is None
        found.append(verdicts[i].score if usable else UNUSABLE)
    return found


def worth(scores_PG: Tensor, lengths_PG: Tensor) -> loss.Worth:
    """What each completion in the whole batch of an optimizer step is worth, as in train.py.
    scores_PG: as `scores` has them; lengths_PG: sampled tokens."""
    budgets = SETTINGS.thinking_budget[1], SETTINGS.answer_budget
    return loss.worth(RECIPE, scores_PG, lengths_PG, scores_PG >= 0, *budgets)


def sum_of_terms(
    logprobs_BT: Tensor, generator_BT: Tensor, sampled_BT: Tensor, advantages_BT: Tensor
) -> Tensor:
    """The loss with a weight of 1 for each token, for engines that weigh tokens by themselves.
    advantages_BT: the same for all sampled tokens of a completion."""
    advantages_B = advantages_BT.where(sampled_BT, 0).sum(1) / sampled_BT.sum(1).clamp(min=1)
    ones_B = torch.ones_like(advantages_B)
    return loss.policy_loss(RECIPE, logprobs_BT, generator_BT, sampled_BT, advantages_B, ones_B)[0]
