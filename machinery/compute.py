"""What training has cost: FLOPs, sampled tokens and device-hours (sec. 2.1 of the paper)."""

import time
from dataclasses import dataclass

from transformers import PreTrainedModel

from machinery.rollouts import Group


def matmul_parameters(model: PreTrainedModel) -> int:
    """How many parameters a token is multiplied with. The embedding table counts only if it is also the head. In a
    mixture of experts, only the experts of one token count."""
    config, embedding, head = model.config, model.get_input_embeddings().weight, model.get_output_embeddings().weight
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    used = getattr(config, "num_experts_per_tok", None) or 1
    total = 0
    for name, parameter in model.named_parameters():
        if parameter is not embedding or embedding is head:
            total += parameter.numel() * used // experts if ".experts." in name else parameter.numel()
    return total


def flops(parameters: int, generated: float, trained: float) -> float:
    """FLOPs of generated and trained tokens, without attention: 2 x parameters a token forward, 4 x backward."""
    return 2 * parameters * generated + 6 * parameters * trained


@dataclass
class Compute:
    """What training has cost so far. Start-up and validation are left out (sec. 2.1)."""

    devices: int  # of generators and trainers: each CPU process is one; a GPU that does both is one
    parameters: int  # `matmul_parameters`
    tokens: int = 0  # sampled tokens of the groups that were trained on
    flops: float = 0.0
    device_seconds: float = 0.0  # before this process; and of generators that sample for training in a validation
    started: float | None = None  # clock reading at the first step
    paused: float = 0.0  # seconds of validation since then
    ended: float | None = None  # clock reading when training was over

    @property
    def seconds(self) -> float:
        """Seconds of training, in this process."""
        now = self.ended or time.monotonic()
        return now - (self.started or now) - self.paused

    def add(self, groups: list[Group], fed: int) -> None:
        """Count a batch. All of it was generated, each prompt once for its group. fed: the tokens that the trainer's
        trunk was fed, which are none of filtered groups."""
        rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
        self.tokens += sum(int(rollout.sampled.sum()) for rollout in rollouts)
        completions = sum(len(rollout.tokens) for rollout in rollouts)
        prompts = sum(len(group.requests[0].prompt_ids) for group in groups)
        self.flops += flops(self.parameters, completions + prompts, fed)

    def columns(self) -> dict:
        """The three measures, as columns of the log."""
        return {
            "compute_device_hours": (self.device_seconds + self.seconds * self.devices) / 3600,
            "compute_tokens": self.tokens,
            "compute_flops": self.flops,
        }
