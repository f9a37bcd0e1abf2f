"""Some rollouts of a run, token by token, with what the loss made of them: rollouts.jsonl.

A line is a group that was trained on, a problem of a validation, or the times of a step.
docs/log.md explains every key. Nothing that is trained depends on the file. tools/view.py
makes a page of it.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

import loss
from core.feed import Prompts
from core.rollouts import Batch, Group, Rollout
from core.screen import warn
from core.settings import Settings
from data.verify import Verdict
from machinery.folder import append_line, six_digits
from machinery.measures import Totals

KEPT_STEPS = 40  # of a run, about
KEPT_PROBLEMS = 6  # of each source, at a validation
MOST_BYTES = 64 * 2**20  # of the file
LONGEST_ANSWER = 2000  # characters; the answer of a programming problem holds all its tests
LONGEST_CHARACTER = 64  # tokens; if so many make no character, more will not
IN_WORDS = {0: "wrong", 1: "right"}  # a verdict

# --- which rollouts -------------------------------------------------------------------------------


def kept_rows(settings: Settings, step: int) -> set[int]:
    """The rows of the batch that hold the completions of the groups that are kept: of
    --rollouts-kept groups, from the oldest to the newest. Most steps of a long run keep none."""
    if step % max(1, settings.steps // KEPT_STEPS):
        return set()
    kept = spread(settings.rollouts_kept, settings.groups_per_step)
    size = settings.completions_per_prompt
    return {p * size + i for p in kept for i in range(size)}


def spread(number: int, of: int) -> list[int]:
    """So many of the indices below `of`, evenly from the first to the last; all if they are
    fewer."""
    return np.linspace(0, of - 1, min(number, of)).astype(int).tolist()


# --- in words and numbers -------------------------------------------------------------------------


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text of each token; joined, these are the decoded text. If several tokens make one
    character, the last one has it, and the others have ''."""
    # ids[:shown] have their texts. ids[start:shown] are decoded again, as context.
    texts, start, shown = [], 0, 0
    for end in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[start:end])
        texts.append("")
        if not now.endswith("\ufffd") or end == len(ids) or end - shown == LONGEST_CHARACTER:
            texts[-1] = now[len(tokenizer.decode(ids[start:shown])) :]
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


# --- the file -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptRollouts:
    """Writes rollouts.jsonl of a run, unless --rollouts-kept is 0."""

    path: Path
    settings: Settings
    prompts: Prompts
    run_began: float  # the clock reading that all times count from

    def add_times(self, step: int, waited: tuple, events: list[tuple]) -> None:
        """Add the times of a step: `waited`, between which the trainer waited for groups, and the
        generators' events."""
        waited = [self._seconds(clock) for clock in waited]
        generators = [
            [generator, self._seconds(began), self._seconds(ended), version]
            for generator, began, ended, version in events
        ]
        self._add({"kind": "times", "step": step, "waited": waited, "generators": generators})

    def add_batch(self, step: int, batch: Batch, credit: loss.Credit, totals: Totals) -> None:
        """Add the groups of a step that are kept, with what `totals` has of their tokens."""
        may_retire = not self.settings.recipe.positive_resampling
        for p, (group, usable_G) in enumerate(zip(batch.groups, batch.usable_PG)):
            first_row = p * len(usable_G)
            if first_row not in totals.kept_rows:
                continue
            line = self._line("group", step, group)
            rewards = credit.rewards_PG[p][usable_G]
            line["mean_reward"] = rewards.mean().item() if len(rewards) else None
            line["retired"] = may_retire and loss.retires(group.pass_rate)
            for i, completion in enumerate(line["completions"]):
                fate = "trained" if credit.counted_PG[p, i] else "filtered"
                if not usable_G[i]:
                    fate = "truncated" if completion["truncated"] else "no verdict"
                completion["became"] = fate
                for name in ("reward", "advantage", "weight"):
                    completion[name] = six_digits(getattr(credit, f"{name}s_PG")[p, i].item())
                for name, values in totals.tokens.get(first_row + i, {}).items():
                    completion[name] = at_sampled(values, group.rollouts[i].sampled)
            self._add(line)

    def add_validation(self, step: int, groups: list[Group]) -> None:
        """Add KEPT_PROBLEMS of each source, or --rollouts-kept if it is more, from the shortest
        prompt to the longest: the same ones at every validation."""
        kept = self.settings.rollouts_kept
        most = kept and max(KEPT_PROBLEMS, kept)
        by_length = sorted(groups, key=lambda group: len(group.problem.prompt))
        for source in range(len(self.prompts.sources)):
            own = [group for group in by_length if group.source == source]
            for i in spread(most, len(own)):
                self._add(self._line("validation", step, own[i]))

    def _line(self, kind: str, step: int, group: Group) -> dict:
        prompt = group.requests[0].prompt_ids
        return {
            "kind": kind,
            "step": step,
            "group": group.number,
            "source": self.prompts.sources[group.source].name,
            "prompt": self.prompts.tokenizer.decode(prompt),
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
            "texts": token_texts(self.prompts.tokenizer, ids),
            "sampled": run_lengths(sampled),
            "versions": run_lengths(rollout.versions),
            "generator_logprobs": at_sampled(rollout.logprobs[sampled], sampled),
            "began": self._seconds(rollout.began),
            "ended": self._seconds(rollout.ended),
            "interrupted": rollout.interrupted,
            "truncated": rollout.truncated,
            "score": verdict.score,
            "verdict": verdict.failure or IN_WORDS.get(verdict.score, f"{verdict.score:.2f}"),
            "detail": verdict.detail,
        }

    def _seconds(self, clock: float) -> float:
        return round(clock - self.run_began, 3)

    def _add(self, line: dict) -> None:
        """Add a line, unless nothing is kept. A file that is as long as it may be gets no more."""
        full = self.path.exists() and self.path.stat().st_size > MOST_BYTES
        if full:
            warn("rollouts", f"{self.path} is full: from step {line['step']} on it gets nothing")
        elif self.settings.rollouts_kept:
            append_line(self.path, line)
