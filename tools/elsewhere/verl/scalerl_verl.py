"""Loss, advantages and rewards of loss.py and data/ at verl's extension points:
VERL_USE_EXTERNAL_MODULES names it."""

import asyncio

import scalerl
import torch
from torch import Tensor
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.core_algos import register_adv_est, register_policy_loss


class Verdicts(RewardManagerBase):
    """verl's reward manager: the score of one completion. A validation reads `acc`."""

    def __init__(self, config, tokenizer, compute_score, **_):
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data: DataProto) -> dict:
        item = data[-1]
        prompts, responses, attention = (
            item.batch[name] for name in ("prompts", "responses", "attention_mask")
        )
        of_prompt, of_response = attention.bool().split([len(prompts), len(responses)])
        problem = item.non_tensor_batch["reward_model"]["ground_truth"]
        ids = [prompts[of_prompt].tolist()], [responses[of_response].tolist()]
        (score,) = await asyncio.to_thread(scalerl.scores, [problem], *ids)
        return {"reward_score": score, "reward_extra_info": {"acc": float(score == 1)}}


@register_adv_est("scalerl")
def advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index, **_
) -> tuple[Tensor, Tensor]:
    """Advantage times token weight of each token, [B, T], twice. verl's own means cannot average
    over prompts, but each term of ours is proportional to its advantage, so the loss can be a plain
    sum. index: the group of each row."""
    groups: dict[object, list[int]] = {}
    for row, group in enumerate(index):
        groups.setdefault(group, []).append(row)
    rows = [torch.tensor(of_group) for of_group in groups.values()]
    rows_PG = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    lengths_B, scores_B = response_mask.sum(1).long(), token_level_rewards.sum(1)
    missing_PG = (rows_PG < 0) | (lengths_B == 0)[rows_PG]  # members that verl has lost
    scores_PG = scores_B[rows_PG].masked_fill(missing_PG, scalerl.UNUSABLE)
    worth = scalerl.worth(scores_PG, lengths_B[rows_PG])
    weighted_B = torch.zeros_like(scores_B)
    weighted_PG = worth.advantages_PG * worth.weights_PG
    weighted_B[rows_PG[~missing_PG]] = weighted_PG[~missing_PG]
    weighted_BT = weighted_B[:, None] * response_mask
    return weighted_BT, weighted_BT


@register_policy_loss("scalerl")
def policy_loss(old_log_prob, log_prob, advantages, response_mask, config, **_):
    """(loss, metrics): the sum of our terms. verl averages over its dp_size processes, so the sum
    is multiplied by it. old_log_prob: log pi_gen, by rollout_correction.bypass_mode."""
    value = scalerl.sum_of_terms(log_prob, old_log_prob, response_mask.bool(), advantages)
    step = config.global_batch_info
    return value * step["dp_size"], {"actor/tokens_of_step": step["batch_num_tokens"]}
