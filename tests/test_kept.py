"""rollouts.jsonl: what is kept of a run, and that it is what the run has computed."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from steps import FIRST, batch_of_groups, lines, settings, train_on

import loss
from core import screen
from core.model import load_model, load_tokenizer
from core.rollouts import Batch
from data.verify import Verdict
from machinery import kept
from machinery.folder import json_lines
from machinery.kept import (
    KeptRollouts,
    kept_rows,
    token_texts,
)


def lines_of(folder, kind=None):
    """The lines of rollouts.jsonl, by default of every kind."""
    found = json_lines(folder / "rollouts.jsonl")
    return [line for line in found if kind in (None, line["kind"])]


def spread(runs):
    """The values that `run_lengths` has counted."""
    return [value for value, times in runs for _ in range(times)]


# --- the text of tokens ---------------------------------------------------------------------------


def test_texts_of_tokens_joined_are_the_decoded_text_though_a_character_is_several_tokens(
    chat_models,
):
    tokenizer = load_tokenizer(chat_models["qwen3"])
    ids = tokenizer("né 日🙂</think>", add_special_tokens=False).input_ids
    texts = token_texts(tokenizer, ids)
    assert texts == ["n", "", "é", " ", "", "", "日", "", "", "", "🙂", "</think>"]
    rng = np.random.default_rng(0)
    for _ in range(50):  # most of it is no text at all
        ids = rng.integers(len(tokenizer), size=40).tolist()
        texts = token_texts(tokenizer, ids)
        assert len(texts) == 40
        assert "".join(texts) == tokenizer.decode(ids)


# --- a step ---------------------------------------------------------------------------------------


def groups_of_every_fate():
    """Three groups: one with a truncated completion, one with a completion that has no verdict, and
    one that is solved, of zero variance and with a long answer. Parameters change while a
    completion is sampled."""
    groups = batch_of_groups()
    groups[1].verdicts[3] = Verdict(0.0, "time limit", "30 s")
    groups[2].verdicts = dict.fromkeys(range(4), Verdict(1.0))
    groups[2].problem = dataclasses.replace(groups[2].problem, answer="1" * 5000)
    for group in groups:
        for i, r in group.rollouts.items():
            versions = FIRST - np.arange(len(r.tokens)) // 4
            group.rollouts[i] = dataclasses.replace(r, versions=versions)
    return groups


FATES = [["trained"] * 3 + ["truncated"], ["trained"] * 3 + ["no verdict"], ["zero variance"] * 4]


def test_what_is_kept_and_logged_is_how_it_was_sampled_what_it_was_worth_and_what_became_of_it(
    models, tmp_path
):
    """Of groups, completions and tokens; by a plain forward of the model, one at a time."""
    groups, model, chosen = groups_of_every_fate(), load_model(models["llama"]), settings()
    batch = Batch(groups, FIRST)
    parts = batch.scores_PG, batch.lengths_PG, batch.usable_PG
    worth = loss.worth(chosen.recipe, *parts, chosen.thinking_budget[1], chosen.answer_budget)
    train_on(settings(rollouts_kept=3), models["llama"], [groups], tmp_path)
    kept_lines, of_tokens = lines_of(tmp_path, "group"), []
    found = [(line["step"], line["group"], line["retired"]) for line in kept_lines]
    assert found == [(FIRST + 1, 0, False), (FIRST + 1, 1, False), (FIRST + 1, 2, True)]
    assert [line["answer"] for line in kept_lines] == ["1", "2", "1" * 2000]
    assert [[each["became"] for each in line["completions"]] for line in kept_lines] == FATES
    for p, (line, group) in enumerate(zip(kept_lines, groups)):
        prompt = group.requests[0].prompt_ids
        assert (line["prompt_ids"], line["pass_rate"]) == (prompt, group.pass_rate)
        for i, (completion, (r, verdict)) in enumerate(zip(line["completions"], group.judged())):
            assert completion["ids"] == r.tokens.tolist()
            assert spread(completion["sampled"]) == r.sampled.tolist()
            assert spread(completion["versions"]) == r.versions.tolist()
            assert completion["score"] == verdict.score
            assert verdict.failure in (None, completion["verdict"])
            expected = {"generator_logprobs": r.logprobs}
            if worth.counted_PG[p, i]:
                ids = torch.tensor([prompt + completion["ids"]])
                with torch.no_grad():
                    logprobs = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                expected["trainer_logprobs"] = logprobs.gather(-1, ids[0, len(prompt) :, None])[
                    :, 0
                ]
                expected["entropies"] = -(logprobs.exp() * logprobs).sum(-1)
                columns = FIRST - r.versions, expected["trainer_logprobs"] - r.logprobs
                of_tokens += zip(*(column[r.sampled] for column in columns))
            assert {"trainer_logprobs", "entropies"} & {*completion} <= {*expected}
            for name, values in expected.items():
                found = np.array(completion[name], float)  # None becomes NaN
                wanted = np.where(r.sampled, values, np.nan)
                np.testing.assert_allclose(found, wanted, atol=1e-4)
            for name in ("reward", "advantage", "weight"):
                value = getattr(worth, f"{name}s_PG")[p, i].item()
                assert completion[name] == pytest.approx(value, rel=1e-5)

    ages, log_rho = np.array(of_tokens).T
    rho = np.exp(log_rho)
    expected = {
        "groups_counted": 2,
        "zero_variance_fraction": 1 / 3,
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max(),
        "clipped_fraction": (rho > loss.Recipe.eps_max).mean(),
        "kl_estimate": (rho - 1 - log_rho).mean(),
        "effective_sample_size": rho.sum() ** 2 / len(rho) / (rho**2).sum(),
    }
    for age in range(4):
        expected[f"log_ratio_age_{age}"] = np.abs(log_rho[ages == age]).mean()
    (line,) = lines(tmp_path, "train")
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert {name for name in line if "age_" in name} <= {*expected}


def test_validations_keep_the_same_problems_and_times_every_step(models, tmp_path):
    chosen = settings(steps=2, validation_every=1, rollouts_kept=2)
    train_on(chosen, models["llama"], [batch_of_groups(), batch_of_groups(1)], tmp_path / "two")
    validations = lines_of(tmp_path / "two", "validation")
    found = [(line["step"], line["group"]) for line in validations]
    assert found == [(FIRST + step, problem) for step in (0, 1, 2) for problem in (0, 1, 2)]
    assert not any("reward" in each for line in validations for each in line["completions"])
    times = lines_of(tmp_path / "two", "times")
    assert [line["step"] for line in times] == [FIRST + 1, FIRST + 2]
    assert all(0 <= line["waited"][0] <= line["waited"][1] for line in times)
    kept_rollouts = writer(tmp_path)
    kept_rollouts.run_began = 0.5
    kept_rollouts.add_times(3, (1.0, 2.0), [(0, 1.0, 2.0, None), (0, 2.0, 3.0, 7)])
    (line,) = lines_of(tmp_path)
    assert (line["step"], line["waited"]) == (3, [0.5, 1.5])
    assert line["generators"] == [[0, 0.5, 1.5, None], [0, 1.5, 2.5, 7]]

    none = dataclasses.replace(chosen, rollouts_kept=0)
    train_on(none, models["llama"], [batch_of_groups(), batch_of_groups(1)], tmp_path / "none")
    assert not (tmp_path / "none" / "rollouts.jsonl").exists()


def test_which_steps_and_groups_are_kept():
    chosen = dataclasses.replace(settings(), steps=160, rollouts_kept=3, completions_per_prompt=2)
    groups = [None] * 32
    assert [step for step in range(1, 17) if kept_rows(chosen, step, groups)] == [4, 8, 12, 16]
    assert kept_rows(chosen, 4, groups) == {0, 1, 30, 31, 62, 63}
    assert kept_rows(chosen, 4, groups[:2]) == {0, 1, 2, 3}  # all there are
    short = dataclasses.replace(chosen, steps=9)
    assert kept_rows(short, 3, groups) == kept_rows(chosen, 4, groups)


# --- the file -------------------------------------------------------------------------------------


def writer(folder):
    """A writer whose lines have the length of a prompt and a hundred bytes more."""
    chosen = dataclasses.replace(settings(), rollouts_kept=1)
    kept_rollouts = KeptRollouts(folder, chosen, None, [SimpleNamespace(name="one")])

    def line(kind, step, group):
        length = len(group.problem.prompt)
        return {"kind": kind, "step": step, "length": length, "text": "x" * 100}

    kept_rollouts._line = line
    return kept_rollouts


def of_problem(prompt):
    """A group of a problem with this prompt."""
    return SimpleNamespace(source=0, problem=SimpleNamespace(prompt=prompt))


def test_of_a_validation_six_problems_are_kept_from_the_shortest_to_the_longest(tmp_path):
    lengths = [*range(40, 20, -1), *range(20)]
    writer(tmp_path).add_validation(0, [of_problem("?" * length) for length in lengths])
    assert [line["length"] for line in lines_of(tmp_path)] == [0, 7, 15, 24, 32, 40]


def test_a_file_that_is_full_gets_no_more_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(screen, "_warned", set())
    monkeypatch.setattr(kept, "MOST_BYTES", 1000)
    for first in (0, 20):  # the second goes on after a resumption
        kept_rollouts = writer(tmp_path)
        for step in range(first, first + 20):
            kept_rollouts.add_validation(step, [of_problem("?")])
    steps = [line["step"] for line in lines_of(tmp_path)]
    assert steps == [*range(len(steps))] and 4 < len(steps) < 20
    assert capsys.readouterr().err.count(f"full: from step {len(steps)} on it gets nothing") == 1
