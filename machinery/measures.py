"""What a step has measured on its tokens, and what training has cost (sec. 2.1 of the paper)."""

import math
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
from torch import Tensor, no_grad
from torch.nn import Embedding
from transformers import PreTrainedModel

from core.attention import config_value, windows
from core.policy import MicroBatch, Parts
from core.rollouts import Batch
from machinery.ranks import from_all_ranks

# The columns of some sums over tokens.
NAMES = {
    "ratio": "ratio_mean",
    "clipped": "clipped_fraction",
    "kl": "kl_estimate",
    "entropy": "entropy",
}
NO_COLUMN = ("loss", "ratio_squared")  # sums without a mean

# --- what a step measures on its tokens -----------------------------------------------------------


class Totals:
    """Sums over the sampled tokens that a step has trained on. Of kept rollouts (kept.py) also the
    values of each token."""

    def __init__(self, kept_rows: set[int] = frozenset()):
        self.kept_rows = kept_rows  # which rollouts of the batch are kept
        self.sums = Counter()  # ints and floats, by name
        self.count = 0  # of the tokens
        self.ratio_max = 0.0
        self.parts = []  # what the trunk was fed, as in `MicroBatch`
        # By the row of a rollout that is kept and was trained on: lists of a value of each token.
        self.tokens = {}

    @no_grad()
    def add(
        self, m: MicroBatch, value: Tensor, sums: dict, logprobs_BT: Tensor, entropies_N: Tensor
    ) -> None:
        """Add a micro-batch: its loss and the sums that loss.policy_loss returns, log pi_train, and
        the entropies."""
        if not len(entropies_N):  # an idle rank has a micro-batch without sampled tokens
            return
        added = {name: tensor.item() for name, tensor in sums.items()}
        self.ratio_max = max(self.ratio_max, added.pop("ratio_max"))
        self.sums.update(added | {"loss": value.item(), "entropy": entropies_N.sum().item()})
        self.count += len(entropies_N)
        self.parts += m.parts

        # The values of each token, if its rollout is kept.
        lengths = m.sampled_BT.sum(1).tolist()
        of_each = (each.split(lengths) for each in (logprobs_BT[m.sampled_BT], entropies_N))
        of_rows = zip(m.rows_B.tolist(), *of_each)
        for row, logprobs_T, entropies_T in of_rows:
            if row in self.kept_rows:
                self.tokens[row] = {
                    "trainer_logprobs": logprobs_T.tolist(),
                    "entropies": entropies_T.tolist(),
                }

    def over_ranks(self) -> None:
        """Add up the totals of all ranks, which all call this. After it all have the same, so all
        decide alike whether the step is skipped."""
        of_all, *others = from_all_ranks(self)
        for other in others:
            of_all.sums.update(other.sums)
            of_all.count += other.count
            of_all.parts += other.parts
            of_all.ratio_max = max(of_all.ratio_max, other.ratio_max)
            of_all.tokens |= other.tokens
        vars(self).update(vars(of_all))

    def columns(self) -> dict:
        """Columns of the log: the loss, and means over the tokens. What loss.policy_loss sums under
        a name that is not known here has its mean under that name. If no token was trained on, the
        means are NaN, for which the log has null."""
        sums, count = self.sums, self.count or math.nan
        columns = {"loss": sums["loss"] + 0.0}  # no int, and no -0.0
        columns["ratio_max"] = self.ratio_max if self.count else None
        columns["effective_sample_size"] = sums["ratio"] ** 2 / (count * sums["ratio_squared"])
        for name in sorted({*sums, *NAMES} - {*NO_COLUMN}):
            columns[NAMES.get(name, name)] = sums[name] / count
        return columns


# --- what a token costs ---------------------------------------------------------------------------


def matmul_parameters(model: PreTrainedModel) -> int:
    """How many parameters a token is multiplied with. An embedding table counts only if it is also
    the head. In a mixture of experts, only the experts of one token count."""
    tables = {each.weight for each in model.modules() if isinstance(each, Embedding)}
    tables -= {model.get_output_embeddings().weight}
    experts = config_value(model, 1, "num_experts", "num_local_experts", "n_routed_experts")
    used = config_value(model, 1, "num_experts_per_tok", "top_k_experts")
    total = 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in tables:
            numbers = parameter.numel()
            total += numbers * used // experts if ".experts." in name else numbers
    return total


def attention_widths(model: PreTrainedModel) -> dict[int | None, int]:
    """How many numbers a pair of positions is multiplied with, a token's and one that it attends
    to: the keys and the values of all heads, in all layers with this window (`windows`)."""
    config, of_layers, widths = model.config.get_text_config(), windows(model), Counter()
    layers = [*getattr(config, "per_layer_config", ())]  # Gemma 4 has heads of two sizes
    if len(layers) != len(of_layers):
        layers = [config] * len(of_layers)
    for window, layer in zip(of_layers, layers):
        entry = lambda name, usual, layer=layer: getattr(layer, name, None) or usual
        usual = layer.hidden_size // layer.num_attention_heads
        keys = entry("qk_head_dim", entry("head_dim", usual))
        widths[window] += layer.num_attention_heads * (keys + entry("v_head_dim", keys))
    return widths


def pairs(parts: Parts, window: int | None) -> int:
    """How many pairs there are of a token and one that it attends to, itself among them, in these
    parts."""
    total = 0
    for n, before in parts:
        places = np.arange(before, before + n) + 1
        total += int(np.minimum(places, window or before + n).sum())
    return total


# --- what training costs --------------------------------------------------------------------------


@dataclass
class Compute:
    """What training has cost so far. Start-up and validation are left out (sec. 2.1)."""

    devices: int  # of generators and trainers: each CPU process is one; a GPU that does both is one
    parameters: int  # `matmul_parameters`
    attention: dict[int | None, int]  # `attention_widths`
    adapters: int = 0  # parameters of --lora-rank; 0: all others are trained
    tokens: int = 0  # sampled tokens of the groups that were trained on
    flops: float = 0.0
    # Of earlier processes; and of generators that sample for training during a validation.
    device_seconds: float = 0.0
    # Clock reading at the first step; a validation puts it off by the seconds that it takes.
    started: float | None = None
    ended: float | None = None  # clock reading when training was over

    @property
    def seconds(self) -> float:
        """Seconds of training, in this process."""
        now = self.ended or time.monotonic()
        return now - (self.started or now)

    def add(self, batch: Batch, fed: Parts) -> None:
        """Count a batch. All of it was generated, each prompt once for its group. fed: the parts of
        sequences that the trainer's trunk was fed; filtered groups have none. In a forward a token
        or a pair takes 2 FLOPs for each number that it is multiplied with. A backward takes twice
        as many, so the trainer's tokens count three times; twice where a parameter is frozen, since
        nothing computes its gradient."""
        generated = [(len(group.requests[0].prompt_ids), 0) for group in batch.groups]
        for rollout in batch.rollouts:
            generated.append((len(rollout.tokens), len(rollout.request.prompt_ids)))
        self.tokens += int(batch.lengths_PG.sum())
        tokens_generated, tokens_fed = (sum(n for n, _ in parts) for parts in (generated, fed))
        numbers = self.parameters * (tokens_generated + (2 if self.adapters else 3) * tokens_fed)
        numbers += 3 * self.adapters * tokens_fed
        for window, width in self.attention.items():
            numbers += width * (pairs(generated, window) + 3 * pairs(fed, window))
        self.flops += 2 * numbers

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
