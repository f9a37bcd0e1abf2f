"""What a step measures on its sampled tokens, for the log: sums over the micro-batches of a rank,
and then over all ranks."""

import math
from collections import Counter

from torch import Tensor

from core.policy import MicroBatch
from machinery.ranks import from_all_ranks


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
        """Columns of the log: the loss, and means over the tokens. If no token was trained on, the
        means are NaN, for which the log has null."""
        sums = self.sums
        tokens = sums["tokens"] or math.nan
        columns = {
            "loss": sums["loss"] + 0.0,  # no int, and no -0.0
            "ratio_max": self.ratio_max if sums["tokens"] else None,
            "ratio_mean": sums["ratio"] / tokens,
            "clipped_fraction": sums["clipped"] / tokens,
            "kl_estimate": sums["kl"] / tokens,
            "entropy": sums["entropy"] / tokens,
            "effective_sample_size": sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]),
        }
        for name in sorted(sums):
            if name.startswith("log_ratio"):
                columns[name] = sums[name] / sums[name.replace("log_ratio", "tokens")]
        return columns
