"""What a step has measured on its tokens, what training has cost (sec. 2.1 of the paper), who waits
for whom, and how many tokens a second are handled."""

import math
import time
from collections import Counter
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from core.feed import Feed
from core.policy import MicroBatch
from core.rollouts import Batch, tokens_and_pairs
from machinery.ranks import from_all_ranks

# The columns of some sums over tokens, and sums that have no column of their own.
NAMES = {
    "ratio": "ratio_mean",
    "clipped": "clipped_fraction",
    "kl": "kl_estimate",
    "entropy": "entropy",
}
COUNTS = ("loss", "ratio_squared", "fed", "pairs")
MEASURED = 10  # steps, after which the time that is left is known

# --- what a step measures on its tokens -----------------------------------------------------------


class Totals:
    """Sums over the sampled tokens that a step has trained on. Of kept rollouts (kept.py) also the
    values of each token."""

    def __init__(self, version: int, kept_rows: set[int] = frozenset()):
        self.version = version  # of the parameters that are trained
        self.kept_rows = kept_rows  # which rollouts of the batch are kept
        self.sums = Counter()  # ints and floats, by name
        self.ratio_max = 0.0
        # By the row of a rollout that is kept and was trained on: lists of a value of each token.
        self.tokens = {}

    def add(
        self,
        m: MicroBatch,
        value: Tensor,
        sums: dict[str, Tensor],
        logprobs_BT: Tensor,
        entropies_N: Tensor,
    ) -> None:
        """Add a micro-batch: its loss and the sums that loss.policy_loss returns, log pi_train, and
        the entropies."""
        if not len(entropies_N):  # an idle rank has a micro-batch without sampled tokens
            return
        added = {name: tensor.item() for name, tensor in sums.items()}
        self.ratio_max = max(self.ratio_max, added.pop("ratio_max"))
        added |= {"loss": value.item(), "entropy": entropies_N.sum().item()}
        added |= {"tokens": len(entropies_N), "fed": m.fed, "pairs": m.pairs}
        # How far the policy has moved, by how many steps old a token is.
        logprobs_N = logprobs_BT[m.sampled_BT]
        log_ratios_N = (logprobs_N - m.generator_logprobs_BT[m.sampled_BT]).abs()
        ages_N = self.version - m.versions_BT[m.sampled_BT]
        for age in ages_N.unique().tolist():
            of_age_N = log_ratios_N[ages_N == age]
            added[f"tokens_age_{age}"] = len(of_age_N)
            added[f"log_ratio_age_{age}"] = of_age_N.sum().item()
        self.sums.update(added)

        # The values of each token, if its rollout is kept.
        lengths = m.sampled_BT.sum(1).tolist()
        of_rows = zip(m.rows_B.tolist(), logprobs_N.split(lengths), entropies_N.split(lengths))
        for row, logprobs_T, entropies_T in of_rows:
            if row in self.kept_rows:
                self.tokens[row] = {
                    "trainer_logprobs": logprobs_T.tolist(),
                    "entropies": entropies_T.tolist(),
                }

    def over_ranks(self) -> None:
        """Add up the totals of all ranks, which all call this. After it all have the same, so all
        decide alike whether the step is skipped."""
        totals = from_all_ranks((self.sums, self.ratio_max, self.tokens))
        self.sums = Counter()
        for sums, ratio_max, tokens in totals:
            self.sums.update(sums)
            self.ratio_max = max(self.ratio_max, ratio_max)
            self.tokens |= tokens

    def columns(self) -> dict:
        """Columns of the log: the loss, and means over the tokens. What loss.policy_loss sums under
        a name that is not known here has its mean under that name. If no token was trained on, the
        means are NaN, for which the log has null."""
        sums, tokens = self.sums, self.sums["tokens"] or math.nan
        columns = {"loss": sums["loss"] + 0.0}  # no int, and no -0.0
        columns["ratio_max"] = self.ratio_max if sums["tokens"] else None
        columns["effective_sample_size"] = sums["ratio"] ** 2 / (tokens * sums["ratio_squared"])
        for name in sorted({*sums, *NAMES}):
            if name.startswith("log_ratio"):
                columns[name] = sums[name] / sums[name.replace("log_ratio", "tokens")]
            elif name not in COUNTS and not name.startswith("tokens"):
                columns[NAMES.get(name, name)] = sums[name] / tokens
        return columns


# --- what a token costs ---------------------------------------------------------------------------


def matmul_parameters(model: PreTrainedModel) -> int:
    """How many parameters a token is multiplied with. The embedding table counts only if it is also
    the head. In a mixture of experts, only the experts of one token count."""
    embedding = model.get_input_embeddings().weight
    is_head = embedding is model.get_output_embeddings().weight
    experts = first_of(model, "num_experts", "num_local_experts", "n_routed_experts") or 1
    used = first_of(model, "num_experts_per_tok") or 1
    total = 0
    for name, parameter in model.named_parameters():
        numbers = parameter.numel()
        if ".experts." in name:
            numbers = numbers * used // experts
        if parameter is not embedding or is_head:
            total += numbers
    return total


def attention_width(model: PreTrainedModel) -> int:
    """How many numbers a pair of positions is multiplied with, a token's and one that it attends
    to: the keys and the values of all heads, in all layers."""
    config, keys = model.config, head_size(model)
    values = first_of(model, "v_head_dim") or keys
    return config.num_hidden_layers * config.num_attention_heads * (keys + values)


def head_size(model: PreTrainedModel) -> int:
    """The size of a head of queries."""
    usual = model.config.hidden_size // model.config.num_attention_heads
    return first_of(model, "qk_head_dim", "head_dim") or usual


def first_of(model: PreTrainedModel, *names: str) -> int | None:
    """The first of these entries that the model's config has, and that is not 0; else None."""
    values = [getattr(model.config, name, None) for name in names]
    return next(filter(None, values), None)


# --- what training costs --------------------------------------------------------------------------


@dataclass
class Compute:
    """What training has cost so far. Start-up and validation are left out (sec. 2.1)."""

    devices: int  # of generators and trainers: each CPU process is one; a GPU that does both is one
    parameters: int  # `matmul_parameters`
    attention: int  # `attention_width`
    tokens: int = 0  # sampled tokens of the groups that were trained on
    flops: float = 0.0
    # Of earlier processes; and of generators that sample for training during a validation.
    device_seconds: float = 0.0
    started: float | None = None  # clock reading at the first step
    paused: float = 0.0  # seconds of validation since then
    ended: float | None = None  # clock reading when training was over

    @property
    def seconds(self) -> float:
        """Seconds of training, in this process."""
        now = self.ended or time.monotonic()
        return now - (self.started or now) - self.paused

    def add(self, batch: Batch, fed: int, pairs: int) -> None:
        """Count a batch. All of it was generated, each prompt once for its group. fed, pairs: the
        tokens that the trainer's trunk was fed, and their pairs; filtered groups have none. A token
        or a pair takes 2 FLOPs for each number that it is multiplied with, and the backward takes
        4 more."""
        parts = [(len(group.requests[0].prompt_ids), 0) for group in batch.groups]
        for rollout in batch.rollouts:
            parts.append((len(rollout.tokens), len(rollout.request.prompt_ids)))
        generated, generated_pairs = tokens_and_pairs(parts)
        self.tokens += int(batch.lengths_PG.sum())
        of_tokens = self.parameters * (generated + 3 * fed)
        of_pairs = self.attention * (generated_pairs + 3 * pairs)
        self.flops += 2 * (of_tokens + of_pairs)

    def restore(self, columns: dict) -> None:
        """Go on from these columns, which a checkpoint holds."""
        self.device_seconds = columns["compute_device_hours"] * 3600
        self.tokens = columns["compute_tokens"]
        self.flops = columns["compute_flops"]

    def columns(self) -> dict:
        """The three measures, as columns of the log."""
        return {
            "compute_device_hours": (self.device_seconds + self.seconds * self.devices) / 3600,
            "compute_tokens": self.tokens,
            "compute_flops": self.flops,
        }


def time_left(first: dict, now: dict, steps: int) -> str:
    """How long the run still takes, in words, if it goes on as from the log's first validation to
    this training line, validations included; '' if these are fewer than MEASURED steps."""
    made = now["step"] - first["step"]
    if made < MEASURED:
        return ""
    hours = (now["wall_seconds"] - first["wall_seconds"]) / made * (steps - now["step"]) / 3600
    return f"{hours:.1f} hours left" if hours >= 1 else f"{60 * hours:.0f} minutes left"


# --- who waits ------------------------------------------------------------------------------------


@dataclass
class Rates:
    """Counts from one training line of the log to the next, without the time of validations."""

    compute: Compute
    feed: Feed
    seconds: float = 0.0  # of training, at the last line
    waited: float = 0.0  # seconds that the trainer has waited for groups, in this process
    generated: float = 0.0  # seconds that a generator was busy on average, in this process
    unlogged_busy: float = 0.0  # the part of `generated` that no line of the log has counted yet

    def columns(self, batch_tokens: int, waited: float) -> dict:
        """Log columns of what has happened since the last line. batch_tokens: sampled tokens of the
        batch that was trained on, filtered groups included. waited: seconds that the trainer has
        waited for it."""
        now, generators = self.compute.seconds, len(self.feed.engines)
        seconds, self.seconds = now - self.seconds, now
        self.waited += waited
        busy, tokens = self.feed.busy_seconds, self.feed.sampled_tokens
        self.feed.busy_seconds, self.feed.sampled_tokens = 0.0, 0
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
