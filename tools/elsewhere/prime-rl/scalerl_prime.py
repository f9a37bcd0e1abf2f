"""Loss, problems and rewards of loss.py and data/ at prime-rl's extension points: a custom loss and
a taskset."""

import asyncio
import json
from collections.abc import Iterator

import scalerl
import verifiers.v1 as vf

__all__ = ["ScaleRLTaskset"]


class ScaleRLData(vf.TaskData):
    problem: str  # a Problem of data/, as JSON


class ScaleRLTask(vf.Task[ScaleRLData]):
    @vf.reward
    async def score(self, trace: vf.Trace) -> float:
        """The score of the sampled text, in [0, 1]; 0 if it was truncated or has no verdict."""
        prompt, completion = [], []
        for node in trace.nodes:
            for token, sampled in zip(node.token_ids, node.mask):
                (completion if sampled else prompt).append(token)
        given = [self.data.problem], [prompt], [completion]
        (score,) = await asyncio.to_thread(scalerl.scores, *given)
        return max(0.0, score)


class ScaleRLConfig(vf.TasksetConfig):
    split: str = "train"  # or validation


class ScaleRLTaskset(vf.Taskset[ScaleRLTask, ScaleRLConfig]):
    def load(self) -> Iterator[ScaleRLTask]:
        for line in (scalerl.FOLDER / f"{self.config.split}.jsonl").read_text().splitlines():
            row, system = json.loads(line), scalerl.SETTINGS.system
            data = ScaleRLData(prompt=row["prompt"], problem=row["problem"], system_prompt=system)
            yield ScaleRLTask(data)


def policy_loss(inputs):
    """The loss of one sequence, a sum over its sampled tokens; prime-rl divides by the sampled
    tokens of the batch. Its rewards are scores s and ours 2 s - 1, so the centred reward is
    doubled."""
    from prime_rl.trainer.rl.loss import LossOutputs

    tensors = (
        inputs.trainer_logprobs,
        inputs.inference_logprobs,
        inputs.loss_mask,
        2 * inputs.advantages,
    )
    return LossOutputs(scalerl.sum_of_terms(*(tensor[None] for tensor in tensors)), {})
