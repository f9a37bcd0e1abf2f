"""Some rollouts of a run, token by token, with what the loss made of them: rollouts.jsonl.

A line is a group that was trained on, a problem of a validation, or the times of a step.
docs/log.md explains every key. Nothing that is trained depends on the file. tools/view.py
makes a page of it.
"""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

import loss
from core.rollouts import Batch, Group, Rollout
from core.screen import warn
from core.settings import Settings
from data.load import Source
from data.verify import Verdict
from machinery.folder import append_whole, six_digits

KEPT_STEPS = 40  # of a run, about
KEPT_PROBLEMS = 6  # of each source, at a validation
MOST_BYTES = 64 * 2**20  # of the file
LONGEST_ANSWER = 2000  # characters; the answer of a programming problem holds all its tests
LONGEST_CHARACTER = 64  # tokens; if so many make no character, more will not

# --- which rollouts -------------------------------------------------------------------------------


def kept_groups(settings: Settings, step: int, groups: list[Group]) -> list[int]:
    """Which groups of the batch of this step are kept, as indices: --rollouts-kept of them, spread
    evenly from the oldest to the newest. Most steps of a long run keep none."""
    is_kept = step % steps_apart(settings) == 0
    number = min(settings.rollouts_kept, len(groups)) if is_kept else 0
    return [i * len(groups) // number for i in range(number)]


def steps_apart(settings: Settings) -> int:
    """How many steps apart groups are kept."""
    return max(1, settings.steps // KEPT_STEPS)


def kept_rows(settings: Settings, step: int, groups: list[Group]) -> set[int]:
    """The rows of the batch that hold the completions of the kept groups."""
    size = settings.completions_per_prompt
    return {p * size + i for p in kept_groups(settings, step, groups) for i in range(size)}


# --- in words and numbers -------------------------------------------------------------------------


def token_texts(
    tokenizer: PreTrainedTokenizerBase, text_of: Callable[[int], str], ids: list[int]
) -> list[str]:
    """The text of each token; joined, these are the decoded text. If several tokens make one
    character, the last one has it, and the others have ''. text_of: decodes one token."""
    texts = [text_of(token) for token in ids]
    if "".join(texts) == tokenizer.decode(ids):
        return texts
    # ids[:shown] have their texts. ids[start:shown] are decoded again, as context.
    texts, start, shown = [], 0, 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:shown])
        now = tokenizer.decode(ids[start:end])
        incomplete = now.endswith("\ufffd") and end < len(ids) and end - shown < LONGEST_CHARACTER
        if incomplete:
            texts.append("")
        else:
            texts.append(now[len(before) :])
            start, shown = shown, end
    return texts


def run_lengths(values: np.ndarray) -> list[list]:
    """[[value, how often in a row], ...]"""
    return [[value, len(list(same))] for value, same in itertools.groupby(values.tolist())]


def at_sampled(values: np.ndarray, sampled: np.ndarray) -> list[float | None]:
    """The values of sampled tokens, with six digits; None for forced tokens and for values that are
    not finite."""
    at_all = np.full(len(sampled), np.nan)
    at_all[sampled] = values
    return [six_digits(value) for value in at_all]


def verdict_in_words(verdict: Verdict) -> str:
    """Right, wrong, a score in between, or the kind of failure."""
    return verdict.failure or {0: "wrong", 1: "right"}.get(verdict.score, f"{verdict.score:.2f}")


# --- the file -------------------------------------------------------------------------------------


class KeptRollouts:
    """rollouts.jsonl of a run, unless --rollouts-kept is 0."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        tokenizer: PreTrainedTokenizerBase,
        sources: list[Source],
    ):
        self.path = folder / "rollouts.jsonl"
        self.settings, self.tokenizer, self.sources = settings, tokenizer, sources
        self.full = False  # it has its MOST_BYTES
        self.run_began = 0.0  # clock reading that all times count from; the record says it
        self.text_of = functools.lru_cache(2**16)(lambda token: tokenizer.decode([token]))

    def add_times(self, step: int, waited: tuple[float, float], events: list[tuple]) -> None:
        """Add the times of a step: `waited`, between which the trainer waited for groups, and the
        generators' events."""
        if self.settings.rollouts_kept:
            waited = [self._seconds(clock) for clock in waited]
            generators = [
                [generator, self._seconds(start), self._seconds(end), version]
                for generator, start, end, version in events
            ]
            line = {"kind": "times", "step": step, "waited": waited, "generators": generators}
            self._add([line])

    def add_batch(self, step: int, batch: Batch, worth: loss.Worth, tokens: dict) -> None:
        """Add the groups of a step that are kept. tokens: of each row trained on, the trainer's
        log-probabilities and the entropies at its sampled tokens."""
        lines = []
        worths = {
            "reward": worth.rewards_PG,
            "advantage": worth.advantages_PG,
            "weight": worth.weights_PG,
        }
        filtered_P = loss.zero_variance(worth.rewards_PG, batch.usable_PG)
        for p in kept_groups(self.settings, step, batch.groups):
            group, usable_G = batch.groups[p], batch.usable_PG[p]
            rewards = worth.rewards_PG[p][usable_G]
            solved = loss.retires(group.pass_rate)
            line = self._line("group", step, group)
            line["mean_reward"] = rewards.mean().item() if len(rewards) else None
            line["retired"] = self.settings.recipe.no_positive_resampling and solved
            for i, completion in enumerate(line["completions"]):
                if usable_G[i]:
                    completion["became"] = "zero variance" if filtered_P[p] else "trained"
                else:
                    completion["became"] = "truncated" if completion["truncated"] else "no verdict"
                for name, values_PG in worths.items():
                    completion[name] = six_digits(values_PG[p, i].item())
                for name, values in tokens.get(p * len(usable_G) + i, {}).items():
                    completion[name] = at_sampled(values, group.rollouts[i].sampled)
            lines.append(line)
        self._add(lines)

    def add_validation(self, step: int, groups: list[Group]) -> None:
        """Add KEPT_PROBLEMS of each source, or --rollouts-kept if it is more, from the shortest
        prompt to the longest: the same ones at every validation."""
        if not self.settings.rollouts_kept:
            return
        most = max(KEPT_PROBLEMS, self.settings.rollouts_kept)
        lines = []
        for source in range(len(self.sources)):
            own = [group for group in groups if group.source == source]
            own.sort(key=lambda group: len(group.problem.prompt))
            number, longest = min(most, len(own)), len(own) - 1
            kept = [own[i * longest // max(1, number - 1)] for i in range(number)]
            lines += [self._line("validation", step, group) for group in kept]
        self._add(lines)

    def _line(self, kind: str, step: int, group: Group) -> dict:
        prompt = group.requests[0].prompt_ids
        return {
            "kind": kind,
            "step": step,
            "group": group.number,
            "source": self.sources[group.source].name,
            "prompt": self.tokenizer.decode(prompt),
            "prompt_ids": prompt,
            "answer": group.problem.answer[:LONGEST_ANSWER],
            "generator": group.generator,
            "handed_out": group.version,
            "pass_rate": group.pass_rate,
            "completions": [self._completion(*judged) for judged in group.judged()],
        }

    def _completion(self, rollout: Rollout, verdict: Verdict) -> dict:
        ids, sampled = rollout.tokens.tolist(), rollout.sampled
        return {
            "ids": ids,
            "texts": token_texts(self.tokenizer, self.text_of, ids),
            "sampled": run_lengths(sampled),
            "versions": run_lengths(rollout.versions),
            "generator_logprobs": at_sampled(rollout.logprobs[sampled], sampled),
            "began": self._seconds(rollout.began),
            "ended": self._seconds(rollout.ended),
            "interrupted": rollout.interrupted,
            "truncated": rollout.truncated,
            "score": float(verdict.score),
            "verdict": verdict_in_words(verdict),
            "detail": verdict.detail,
        }

    def _seconds(self, clock: float) -> float:
        return round(clock - self.run_began, 3)

    def _add(self, lines: list[dict]) -> None:
        """Add the lines of a step. A file that is as long as it may be gets no more."""
        for line in lines:
            text = json.dumps(line, separators=(",", ":")) + "\n"
            size = self.path.stat().st_size if self.path.exists() else 0
            if size + len(text) > MOST_BYTES:
                self.full = True
                step = line["step"]
                warn("rollouts", f"{self.path} is full: from step {step} on it gets nothing")
            if not self.full:
                append_whole(self.path, text)
