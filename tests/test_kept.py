"""rollouts.jsonl: what is kept of a run, and that it is what the run has computed."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from steps import FIRST, batch_of_groups, settings, train_on

import loss
from core.model import load_model, load_tokenizer
from data.verify import Verdict
from machinery import kept
from machinery.files import append_whole, drop_later, json_lines
from machinery.kept import (
    KeptRollouts,
    at_sampled,
    kept_groups,
    kept_rows,
    run_lengths,
    token_texts,
)
from machinery.totals import Totals


def lines_of(folder, kind=None):
    """The lines of rollouts.jsonl, by default of every kind."""
    found = [line for _, line in json_lines(folder / "rollouts.jsonl")]
    return [line for line in found if kind in (None, line["kind"])]


def spread(runs):
    """The values that `run_lengths` has counted."""
    return [value for value, times in runs for _ in range(times)]


# --- the text of tokens ---------------------------------------------------------------------------


def test_texts_of_tokens_joined_are_the_decoded_text_though_a_character_is_several_tokens(
    chat_models,
):
    tokenizer = load_tokenizer(chat_models["qwen3"])

    def text_of(token):
        return tokenizer.decode([token])

    ids = tokenizer("né 日🙂</think>", add_special_tokens=False).input_ids
    texts = token_texts(tokenizer, text_of, ids)
    assert texts == ["n", "", "é", " ", "", "", "日", "", "", "", "🙂", "</think>"]
    rng = np.random.default_rng(0)
    for _ in range(50):  # most of it is no text at all
        ids = rng.integers(len(tokenizer), size=40).tolist()
        texts = token_texts(tokenizer, text_of, ids)
        assert len(texts) == 40
        assert "".join(texts) == tokenizer.decode(ids)


# --- a step ---------------------------------------------------------------------------------------


def groups_of_every_fate():
    """Three groups: one with a truncated completion, one with a completion that has no verdict, and
    one that is solved, of zero variance and with a long answer."""
    groups = batch_of_groups()
    groups[1].verdicts[3] = Verdict(0.0, "time limit", "30 s")
    groups[2].verdicts = {i: Verdict(1.0) for i in range(4)}
    groups[2].problem = dataclasses.replace(groups[2].problem, answer="1" * 5000)
    return groups


def worth_of(groups):
    """What each completion is worth, by loss.py, and whether it is usable."""
    scores = [[group.verdicts[i].score for i in range(4)] for group in groups]
    lengths = [[int(group.rollouts[i].sampled.sum()) for i in range(4)] for group in groups]
    rewards_PG = 2 * torch.tensor(scores, dtype=torch.float32) - 1
    usable_PG = torch.ones(3, 4, dtype=torch.bool)
    usable_PG[0, 3] = False  # truncated
    usable_PG[1, 3] = False  # without a verdict
    counted_PG = loss.counted_samples(rewards_PG, usable_PG, True)
    advantages_PG = loss.advantages(rewards_PG, usable_PG, counted_PG, "batch")
    weights_PG = loss.token_weights(torch.tensor(lengths), counted_PG, "prompt")
    return loss.Worth(rewards_PG, counted_PG, advantages_PG, weights_PG), usable_PG


@pytest.fixture
def step(models, tmp_path):
    """The groups of a step, and their lines."""
    groups = groups_of_every_fate()
    train_on(settings(rollouts_kept=3, weight_decay=0.0), models["llama"], [groups], tmp_path)
    return groups, lines_of(tmp_path, "group")


def test_what_is_kept_of_a_group_is_what_became_of_it(step):
    groups, kept_lines = step
    worth, usable_PG = worth_of(groups)
    found = [(line["step"], line["group"], line["retired"]) for line in kept_lines]
    assert found == [(FIRST + 1, 0, False), (FIRST + 1, 1, False), (FIRST + 1, 2, True)]
    assert [line["answer"] for line in kept_lines] == ["1", "2", "1" * 2000]
    for p, (line, group) in enumerate(zip(kept_lines, groups)):
        rewards = worth.rewards_PG[p][usable_PG[p]]
        assert line["mean_reward"] == pytest.approx(rewards.mean().item())
        assert line["pass_rate"] == group.pass_rate
        assert line["prompt_ids"] == group.requests[0].prompt_ids
    fates = [[completion["became"] for completion in line["completions"]] for line in kept_lines]
    assert fates == [
        ["trained"] * 3 + ["truncated"],
        ["trained"] * 3 + ["no verdict"],
        ["zero variance"] * 4,
    ]
    assert kept_lines[1]["completions"][3]["verdict"] == "time limit"


def test_what_is_kept_of_a_completion_is_how_it_was_sampled_and_what_it_was_worth(step):
    groups, kept_lines = step
    worth, _ = worth_of(groups)
    for p, line in enumerate(kept_lines):
        for i, completion in enumerate(line["completions"]):
            rollout = groups[p].rollouts[i]
            assert completion["ids"] == rollout.tokens.tolist()
            assert spread(completion["sampled"]) == rollout.sampled.tolist()
            assert spread(completion["versions"]) == rollout.versions.tolist()
            recorded = [value for value in completion["generator_logprobs"] if value is not None]
            np.testing.assert_allclose(recorded, rollout.logprobs[rollout.sampled], rtol=1e-5)
            assert completion["score"] == groups[p].verdicts[i].score
            assert completion["reward"] == worth.rewards_PG[p, i]
            advantage, weight = worth.advantages_PG[p, i].item(), worth.weights_PG[p, i].item()
            assert completion["advantage"] == pytest.approx(advantage, rel=1e-5)
            assert completion["weight"] == pytest.approx(weight, rel=1e-5)


def test_what_is_kept_of_a_token_is_what_a_plain_forward_gives(models, step):
    """A plain forward of the model, one completion at a time."""
    groups, kept_lines = step
    model = load_model(models["llama"])
    worth, _ = worth_of(groups)
    for p, line in enumerate(kept_lines):
        for i, completion in enumerate(line["completions"]):
            assert ("trainer_logprobs" in completion) == bool(worth.counted_PG[p, i])
            if not worth.counted_PG[p, i]:
                continue
            prompt, ids = line["prompt_ids"], torch.tensor(completion["ids"])
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + completion["ids"]])).logits[0]
            logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
            expected = {
                "trainer_logprobs": logprobs.gather(-1, ids[:, None])[:, 0],
                "entropies": -(logprobs.exp() * logprobs).sum(-1),
            }
            sampled = groups[p].rollouts[i].sampled
            for name, values in expected.items():
                assert [value is None for value in completion[name]] == (~sampled).tolist()
                known = [value for value in completion[name] if value is not None]
                np.testing.assert_allclose(known, values[sampled], atol=1e-4)


def test_validations_keep_the_same_problems_and_times_every_step(models, tmp_path):
    chosen = settings(steps=2, validation_every=1, rollouts_kept=2)
    train_on(chosen, models["llama"], [batch_of_groups(), batch_of_groups(1)], tmp_path)
    validations = lines_of(tmp_path, "validation")
    found = [(line["step"], line["group"]) for line in validations]
    assert found == [(FIRST + step, problem) for step in (0, 1, 2) for problem in (0, 1, 2)]
    completions = [completion for line in validations for completion in line["completions"]]
    assert not any("reward" in completion for completion in completions)
    times = lines_of(tmp_path, "times")
    assert [line["step"] for line in times] == [FIRST + 1, FIRST + 2]
    assert all(0 <= line["waited"][0] <= line["waited"][1] for line in times)


def test_with_none_kept_nothing_is_written_or_gathered(models, tmp_path):
    chosen = settings(steps=1, validation_every=1, rollouts_kept=0)
    train_on(chosen, models["llama"], [batch_of_groups()], tmp_path)
    assert not (tmp_path / "rollouts.jsonl").exists()
    assert kept_rows(chosen, FIRST + 1, batch_of_groups()) == set()
    assert Totals(FIRST).tokens == {}


def test_which_steps_and_groups_are_kept():
    chosen = dataclasses.replace(settings(), steps=160, rollouts_kept=3, completions_per_prompt=2)
    groups = [None] * 32
    assert [step for step in range(1, 17) if kept_groups(chosen, step, groups)] == [4, 8, 12, 16]
    assert kept_groups(chosen, 4, groups) == [0, 10, 21]
    assert kept_rows(chosen, 4, groups) == {0, 1, 20, 21, 42, 43}
    assert kept_groups(chosen, 4, groups[:2]) == [0, 1]  # all there are
    every_step = dataclasses.replace(chosen, steps=9)  # of a short run
    assert kept_groups(every_step, 3, groups) == [0, 10, 21]


def test_what_is_not_finite_and_what_was_forced_is_null():
    sampled = np.array([True, False, True, True])
    values = [-0.5, float("nan"), float("-inf")]
    assert at_sampled(values, sampled) == [-0.5, None, None, None]
    assert run_lengths(sampled) == [[True, 1], [False, 1], [True, 2]]


# --- the file -------------------------------------------------------------------------------------


def writer(folder, **changes):
    """A writer whose groups are lines of a hundred bytes, or as long as their prompts."""
    chosen = dataclasses.replace(settings(), **changes)
    one_source = [SimpleNamespace(name="one")]
    kept_rollouts = KeptRollouts(folder, chosen, None, one_source)

    def line(kind, step, group):
        return {"kind": kind, "step": step, "text": "x" * max(100, len(group.problem.prompt))}

    kept_rollouts._line = line
    return kept_rollouts


def of_problem(prompt):
    """A group of a problem with this prompt."""
    return SimpleNamespace(source=0, problem=SimpleNamespace(prompt=prompt))


def steps_of(folder):
    return [(line["kind"], line["step"]) for line in lines_of(folder)]


def test_of_a_validation_six_problems_are_kept_from_the_shortest_to_the_longest(tmp_path):
    kept_rollouts, lengths = writer(tmp_path, rollouts_kept=1), []

    def line(kind, step, group):
        lengths.append(len(group.problem.prompt))
        return {"kind": kind, "step": step}

    kept_rollouts._line = line
    all_lengths = [*range(40, 20, -1), *range(20)]
    kept_rollouts.add_validation(0, [of_problem("?" * length) for length in all_lengths])
    assert lengths == [0, 7, 15, 24, 32, 40]


def test_a_resumed_run_drops_later_lines_and_half_a_line(tmp_path):
    kept_rollouts = writer(tmp_path, rollouts_kept=1)
    kept_rollouts.run_began = 0.5
    for step in (0, 1, 2):
        kept_rollouts.add_validation(step, [of_problem("?")])
        kept_rollouts.add_times(step, (0.0, 1.0), [(0, 1.0, 2.0, None), (0, 2.0, 3.0, step)])
    append_whole(tmp_path / "rollouts.jsonl", '{"kind": "valid')
    assert drop_later(tmp_path / "rollouts.jsonl", 1) == lines_of(tmp_path)
    assert steps_of(tmp_path) == [("validation", 0), ("times", 0), ("validation", 1), ("times", 1)]
    assert lines_of(tmp_path)[1]["generators"] == [[0, 0.5, 1.5, None], [0, 1.5, 2.5, 0]]
    assert drop_later(tmp_path / "rollouts.jsonl", -1) == steps_of(tmp_path) == []


def test_a_file_that_is_full_spans_the_whole_run_also_after_a_resumption(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST_BYTES", 10_000)
    flags = dict(rollouts_kept=1, steps=200, validation_every=1)
    kept_rollouts = writer(tmp_path, **flags)
    for step in range(200):
        if step == 120:
            kept_rollouts = writer(tmp_path, **flags)
        kept_rollouts.add_validation(step, [of_problem("?")])
    left = [step for _, step in steps_of(tmp_path)]
    apart = {later - earlier for earlier, later in zip(left, left[1:])}
    assert left[0] == 0 and left[-1] > 180 and len(apart) == 1
    assert 5_000 < (tmp_path / "rollouts.jsonl").stat().st_size <= 10_000


def test_a_long_step_has_its_share_of_the_file_and_at_least_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "MOST_BYTES", 10_000)
    kept_rollouts = writer(tmp_path, rollouts_kept=1)
    kept_rollouts.add_validation(0, [of_problem("?") for _ in range(6)])
    kept_rollouts.add_validation(8, [of_problem("?" * 2_000) for _ in range(6)])
    steps = [step for _, step in steps_of(tmp_path)]
    assert 1 < steps.count(0) < 6 and steps.count(8) == 1
