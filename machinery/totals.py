"""What a step measures on its sampled tokens, for the log: sums over micro-batches, and then over
ranks."""

import collections

from torch import Tensor

from core.policy import MicroBatch
from machinery.ranks import from_all_ranks


class Totals:
    """Sums over the sampled tokens that a step has trained on; of kept rollouts (kept.py) the
    values of each token."""

    def __init__(self, step: int, kept_rows: set[int] = frozenset()):
        self.step = step  # the version of the parameters that are trained
        self.sums: dict[str, float] = collections.defaultdict(float)
        self.ratio_max = 0.0
        self.kept_rows = kept_rows  # which rollouts of the batch are kept
        self.tokens: dict[
            int, dict[str, list[float]]
        ] = {}  # by kept row, if it was trained on: values of its tokens

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
        new_sums = {"loss": value, "entropy": entropies_N.sum(), **sums}
        self.ratio_max = max(self.ratio_max, new_sums.pop("ratio_max").item())
        self.sums["tokens"] += len(entropies_N)
        self.sums["fed"] += m.fed
        self.sums["pairs"] += m.pairs
        ages_N = self.step - m.versions_BT[m.sampled_BT]
        log_ratios_N = (logprobs_BT - m.generator_logprobs_BT)[m.sampled_BT].abs()
        for age in ages_N.unique().tolist():
            of_age_N = log_ratios_N[ages_N == age]
            new_sums[f"log_ratio_age_{age}"] = of_age_N.sum()
            self.sums[f"tokens_age_{age}"] += len(of_age_N)
        for name, tensor in new_sums.items():
            self.sums[name] += tensor.item()
        lengths = m.sampled_BT.sum(1).tolist()
        values = zip(logprobs_BT[m.sampled_BT].split(lengths), entropies_N.split(lengths))
        for row, (logprobs_T, entropies_T) in zip(m.rows_B.tolist(), values):
            if row in self.kept_rows:
                self.tokens[row] = {
                    "trainer_logprobs": logprobs_T.tolist(),
                    "entropies": entropies_T.tolist(),
                }

    def over_ranks(self) -> None:
        """Add up the totals of all ranks. After this call all ranks have the same."""
        every_sums, every_max, every_tokens = zip(
            *from_all_ranks((self.sums, self.ratio_max, self.tokens))
        )
        names = {name for sums in every_sums for name in sums}
        self.sums |= {name: sum(sums[name] for sums in every_sums) for name in sorted(names)}
        self.ratio_max = max(every_max)
        self.tokens = {row: values for tokens in every_tokens for row, values in tokens.items()}

    def columns(self) -> dict:
        """Columns of the log: the loss, and means over the tokens. A mean is None if no token was
        trained on."""
        sums, tokens = self.sums, self.sums["tokens"]
        names = {
            "ratio_mean": "ratio",
            "clipped_fraction": "clipped",
            "kl_estimate": "kl",
            "entropy": "entropy",
        }
        means = {column: sums[name] / tokens if tokens else None for column, name in names.items()}
        means["effective_sample_size"] = (
            sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]) if tokens else None
        )
        ages = [name.removeprefix("log_ratio") for name in sums if name.startswith("log_ratio")]
        means |= {f"log_ratio{age}": sums[f"log_ratio{age}"] / sums[f"tokens{age}"] for age in ages}
        return {"loss": sums["loss"], "ratio_max": self.ratio_max if tokens else None, **means}
