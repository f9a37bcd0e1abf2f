"""rollouts.jsonl: what is kept of a run, and that it is what the run has computed."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from steps import CPU, FIRST, batch_of_groups, settings, train_on

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
    return [
        line for _, line in json_lines(folder / "rollouts.jsonl") if kind in (None, line["kind"])
    ]


def spread(runs):
    return [value for value, times in runs for _ in range(times)]


# --- the text of tokens ---------------------------------------------------------------------------


def test_texts_of_tokens_joined_are_the_decoded_text_though_a_character_is_several_tokens(
    chat_models,
):
    tokenizer = load_tokenizer(chat_models["qwen3"])
    alone = lambda token: tokenizer.decode([token])
    ids = tokenizer("né 日🙂</think>", add_special_tokens=False).input_ids
    texts = token_texts(tokenizer, alone, ids)
    assert texts == ["n", "", "é", " ", "", "", "日", "", "", "", "🙂", "</think>"]
    rng = np.random.default_rng(0)
    for _ in range(50):  # most of it is no text at all
        ids = rng.integers(len(tokenizer), size=40).tolist()
        texts = token_texts(tokenizer, alone, ids)
        assert len(texts) == 40 and "".join(texts) == tokenizer.decode(ids)


# --- a step ---------------------------------------------------------------------------------------


def test_what_is_kept_of_a_step_is_what_the_step_has_computed(models, tmp_path):
    """All numbers against loss.py and a plain forward of the model, one completion at a time."""
    groups = batch_of_groups()
    groups[1].verdicts[3] = Verdict(0.0, "time limit", "30 s")
    groups[2].verdicts = {i: Verdict(1.0) for i in range(4)}  # of zero variance, and solved
    groups[2].problem = dataclasses.replace(groups[2].problem, answer="1" * 5000)
    train_on(settings(rollouts_kept=3, weight_decay=0.0), models["llama"], [groups], tmp_path)
    kept_lines, model = lines_of(tmp_path, "group"), load_model(models["llama"], CPU, torch.float32)
    assert [(line["step"], line["group"], line["retired"]) for line in kept_lines] == [
        (FIRST + 1, 0, False), (FIRST + 1, 1, False), (FIRST + 1, 2, True)
    ]  # fmt: skip
    assert [line["answer"] for line in kept_lines] == ["1", "2", "1" * 2000]
    scores_PG = torch.tensor(
        [[group.verdicts[i].score for i in range(4)] for group in groups], dtype=torch.float32
    )
    rewards_PG, usable_PG = 2 * scores_PG - 1, torch.ones(3, 4, dtype=torch.bool)
    usable_PG[0, 3] = usable_PG[1, 3] = False  # truncated, and without a verdict
    counted_PG = loss.counted_samples(rewards_PG, usable_PG, True)
    advantages_PG = loss.advantages(rewards_PG, usable_PG, counted_PG, "batch")
    lengths_PG = torch.tensor(
        [[int(group.rollouts[i].sampled.sum()) for i in range(4)] for group in groups]
    )
    weights_PG = loss.token_weights(lengths_PG, counted_PG, "prompt")
    fates = [[completion["became"] for completion in line["completions"]] for line in kept_lines]
    assert fates == [
        ["trained"] * 3 + ["truncated"],
        ["trained"] * 3 + ["no verdict"],
        ["zero variance"] * 4,
    ]
    assert kept_lines[1]["completions"][3]["verdict"] == "time limit"
    for p, line in enumerate(kept_lines):
        assert line["mean_reward"] == pytest.approx(rewards_PG[p][usable_PG[p]].mean().item())
        assert (
            line["pass_rate"] == groups[p].pass_rate
            and line["prompt_ids"] == groups[p].requests[0].prompt_ids
        )
        for i, completion in enumerate(line["completions"]):
            rollout = groups[p].rollouts[i]
            assert completion["ids"] == rollout.tokens.tolist()
            assert spread(completion["sampled"]) == rollout.sampled.tolist()
            assert spread(completion["versions"]) == rollout.versions.tolist()
            assert (
                completion["reward"] == rewards_PG[p, i] and completion["score"] == scores_PG[p, i]
            )
            assert completion["advantage"] == pytest.approx(advantages_PG[p, i].item(), rel=1e-5)
            assert completion["weight"] == pytest.approx(weights_PG[p, i].item(), rel=1e-5)
            recorded = [value for value in completion["generator_logprobs"] if value is not None]
            np.testing.assert_allclose(recorded, rollout.logprobs[rollout.sampled], rtol=1e-5)
            assert ("trainer_logprobs" in completion) == bool(counted_PG[p, i])
            if not counted_PG[p, i]:
                continue
            prompt = line["prompt_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + completion["ids"]])).logits[
                    0, len(prompt) - 1 : -1
                ]
            logprobs = torch.log_softmax(logits, -1)
            wanted = logprobs.gather(-1, torch.tensor(completion["ids"])[:, None])[:, 0]
            for name, values in (
                ("trainer_logprobs", wanted),
                ("entropies", -(logprobs.exp() * logprobs).sum(-1)),
            ):
                assert [value is None for value in completion[name]] == (~rollout.sampled).tolist()
                known = [value for value in completion[name] if value is not None]
                np.testing.assert_allclose(known, values[rollout.sampled], atol=1e-4)


def test_of_a_validation_six_problems_are_kept_from_the_shortest_to_the_longest(tmp_path):
    kept_rollouts, prompts = writer(tmp_path, rollouts_kept=1), []
    kept_rollouts._line = lambda kind, step, group: (
        prompts.append(len(group.problem.prompt)) or {"kind": kind}
    )
    problems = [SimpleNamespace(prompt="?" * n) for n in (*range(40, 20, -1), *range(20))]
    kept_rollouts.add_validation(
        0, [SimpleNamespace(source=0, problem=problem) for problem in problems]
    )
    assert prompts == [0, 7, 15, 24, 32, 40]


def test_validations_keep_the_same_problems_and_times_every_step(models, tmp_path):
    chosen = settings(steps=2, validation_every=1, rollouts_kept=2)
    train_on(chosen, models["llama"], [batch_of_groups(), batch_of_groups(1)], tmp_path)
    validations = [(line["step"], line["group"]) for line in lines_of(tmp_path, "validation")]
    assert validations == [(FIRST + step, problem) for step in (0, 1, 2) for problem in (0, 1, 2)]
    assert all(
        "reward" not in its
        for line in lines_of(tmp_path, "validation")
        for its in line["completions"]
    )
    times = lines_of(tmp_path, "times")
    assert [line["step"] for line in times] == [FIRST + 1, FIRST + 2]
    assert all(0 <= line["waited"][0] <= line["waited"][1] for line in times)


def test_with_none_kept_nothing_is_written_or_gathered(models, tmp_path):
    chosen = settings(steps=1, validation_every=1, rollouts_kept=0)
    train_on(chosen, models["llama"], [batch_of_groups()], tmp_path)
    assert not (tmp_path / "rollouts.jsonl").exists()
    assert kept_rows(chosen, FIRST + 1, batch_of_groups()) == set() and Totals(FIRST).tokens == {}


def test_which_steps_and_groups_are_kept():
    chosen = dataclasses.replace(settings(), steps=160, rollouts_kept=3, completions_per_prompt=2)
    groups = [None] * 32
    assert [step for step in range(1, 17) if kept_groups(chosen, step, groups)] == [4, 8, 12, 16]
    assert kept_groups(chosen, 4, groups) == [0, 10, 21]
    assert kept_rows(chosen, 4, groups) == {0, 1, 20, 21, 42, 43}
    assert kept_groups(chosen, 4, groups[:2]) == [0, 1]  # all there are
    assert kept_groups(dataclasses.replace(chosen, steps=9), 3, groups) == [
        0,
        10,
        21,
    ]  # every step of a short run


def test_what_is_not_finite_and_what_was_forced_is_null():
    sampled = np.array([True, False, True, True])
    assert at_sampled([-0.5, float("nan"), float("-inf")], sampled) == [-0.5, None, None, None]
    assert run_lengths(sampled) == [[True, 1], [False, 1], [True, 2]]


# --- the file -------------------------------------------------------------------------------------


def writer(folder, **changes):
    """A writer whose groups are lines of a hundred bytes."""
    one_source = [SimpleNamespace(name="one")]
    kept_rollouts = KeptRollouts(
        folder, dataclasses.replace(settings(), **changes), None, one_source
    )
    kept_rollouts._line = lambda kind, step, group: {"kind": kind, "step": step, "text": "x" * 100}
    return kept_rollouts


def steps_of(folder):
    return [(line["kind"], line["step"]) for line in lines_of(folder)]


def test_a_resumed_run_drops_later_lines_and_half_a_line(tmp_path):
    kept_rollouts = writer(tmp_path, rollouts_kept=1)
    kept_rollouts.run_began = 0.5
    for step in (0, 1, 2):
        kept_rollouts.add_validation(
            step, [SimpleNamespace(source=0, problem=SimpleNamespace(prompt="?"))]
        )
        kept_rollouts.add_times(step, (0.0, 1.0), [(0, 1.0, 2.0, None), (0, 2.0, 3.0, step)])
    append_whole(tmp_path / "rollouts.jsonl", '{"kind": "valid')
    assert drop_later(tmp_path / "rollouts.jsonl", 1) == lines_of(tmp_path)
    assert steps_of(tmp_path) == [("validation", 0), ("times", 0), ("validation", 1), ("times", 1)]
    assert lines_of(tmp_path)[1]["generators"] == [[0, 0.5, 1.5, None], [0, 1.5, 2.5, 0]]
    assert drop_later(tmp_path / "rollouts.jsonl", -1) == steps_of(tmp_path) == []


def test_a_file_that_is_full_gets_no_more_and_a_warning_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kept, "MOST_BYTES", 2500)
    kept_rollouts = writer(tmp_path, rollouts_kept=1)
    for step in range(50):
        kept_rollouts.add_validation(
            step, [SimpleNamespace(source=0, problem=SimpleNamespace(prompt="?"))]
        )
    left = steps_of(tmp_path)
    assert 10 < len(left) < 25 and left == [("validation", step) for step in range(len(left))]
    assert capsys.readouterr().err.count("no more rollouts are kept") == 1
