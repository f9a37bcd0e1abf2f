"""What training has cost (sec. 2.1 of the paper), who waits for whom, and how many tokens a second
are handled."""

import time
from dataclasses import dataclass

from transformers import PreTrainedModel

from core.feed import Feed
from core.rollouts import Group, tokens_and_pairs


def matmul_parameters(model: PreTrainedModel) -> int:
    """How many parameters a token is multiplied with. The embedding table counts only if it is also
    the head. In a mixture of experts, only the experts of one token count."""
    config, embedding, head = (
        model.config,
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
    )
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    used = getattr(config, "num_experts_per_tok", None) or 1
    total = 0
    for name, parameter in model.named_parameters():
        if parameter is not embedding or embedding is head:
            total += (
                parameter.numel() * used // experts if ".experts." in name else parameter.numel()
            )
    return total


def attention_width(model: PreTrainedModel) -> int:
    """How many numbers a pair of positions is multiplied with, a token's and one that it attends
    to: the keys and the values of all heads, in all layers."""
    config, keys = model.config, head_size(model)
    values = getattr(config, "v_head_dim", None) or keys
    return config.num_hidden_layers * config.num_attention_heads * (keys + values)


def head_size(model: PreTrainedModel) -> int:
    """The size of a head of queries."""
    get, heads = lambda name: getattr(model.config, name, None), model.config.num_attention_heads
    return get("qk_head_dim") or get("head_dim") or model.config.hidden_size // heads


@dataclass
class Compute:
    """What training has cost so far. Start-up and validation are left out (sec. 2.1)."""

    devices: int  # of generators and trainers: each CPU process is one; a GPU that does both is one
    parameters: int  # `matmul_parameters`
    attention: int  # `attention_width`
    tokens: int = 0  # sampled tokens of the groups that were trained on
    flops: float = 0.0
    device_seconds: float = (
        0.0  # of earlier processes; and of generators that sample for training in a validation
    )
    started: float | None = None  # clock reading at the first step
    paused: float = 0.0  # seconds of validation since then
    ended: float | None = None  # clock reading when training was over

    @property
    def seconds(self) -> float:
        """Seconds of training, in this process."""
        now = self.ended or time.monotonic()
        return now - (self.started or now) - self.paused

    def add(self, groups: list[Group], fed: int, pairs: int) -> None:
        """Count a batch. All of it was generated, each prompt once for its group. fed, pairs: the
        tokens that the trainer's trunk was fed, and their pairs; filtered groups have none. A token
        or a pair takes 2 FLOPs for each number that it is multiplied with, and twice as many more
        in the backward."""
        rollouts = [rollout for group in groups for rollout in group.rollouts.values()]
        self.tokens += sum(int(rollout.sampled.sum()) for rollout in rollouts)
        parts = [(len(group.requests[0].prompt_ids), 0) for group in groups]
        parts += [(len(rollout.tokens), len(rollout.request.prompt_ids)) for rollout in rollouts]
        tokens, sampling_pairs = tokens_and_pairs(parts)
        self.flops += 2 * self.parameters * (tokens + 3 * fed) + 2 * self.attention * (
            sampling_pairs + 3 * pairs
        )

    def restore(self, columns: dict) -> None:
        """Go on from these columns, which a checkpoint holds."""
        self.device_seconds = columns["compute_device_hours"] * 3600
        self.tokens, self.flops = columns["compute_tokens"], columns["compute_flops"]

    def columns(self) -> dict:
        """The three measures, as columns of the log."""
        return {
            "compute_device_hours": (self.device_seconds + self.seconds * self.devices) / 3600,
            "compute_tokens": self.tokens,
            "compute_flops": self.flops,
        }


class Rates:
    """Counts from one training line of the log to the next, without the time of validations."""

    def __init__(self, compute: Compute, feed: Feed):
        self.compute, self.feed = compute, feed
        self.seconds = 0.0  # of training, at the last line
        self.waited = 0.0  # seconds that the trainer has waited for groups, in this process
        self.generated = 0.0  # seconds that a generator was busy on average, in this process
        self.unlogged_busy = 0.0  # the part of `generated` that no line of the log has counted yet

    def columns(self, batch_tokens: int, waited: float) -> dict:
        """Log columns of what has happened since the last line. batch_tokens: sampled tokens of the
        batch that was trained on, filtered groups included. waited: seconds that the trainer has
        waited for it."""
        now, generators = self.compute.seconds, len(self.feed.engines)
        seconds, self.seconds = now - self.seconds, now
        busy, tokens = self.feed.busy_seconds, self.feed.sampled_tokens
        self.feed.busy_seconds, self.feed.sampled_tokens = 0.0, 0
        self.waited += waited
        # A report may cover more time than this line does. The next line counts what is left.
        self.generated += busy / generators
        self.unlogged_busy += busy / generators
        logged = min(self.unlogged_busy, seconds)
        self.unlogged_busy -= logged
        return {
            "trainer_idle_fraction": waited / seconds,
            "generator_idle_fraction": 1 - logged / seconds,
            "generator_tokens_per_second": generators * tokens / busy if busy else None,
            "trainer_tokens_per_second": batch_tokens / max(seconds - waited, 1e-9),
        }

    def idle(self) -> str:
        """How long trainer and generators have waited so far, as shares of the time of training."""
        seconds = max(self.compute.seconds, 1e-9)
        generators = max(0.0, 1 - self.generated / seconds)
        return f"trainer {self.waited / seconds:.2f}, generators {generators:.2f} of the time"
