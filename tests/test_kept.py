"""rollouts.jsonl: what is kept of a run, and that it is what the run has computed."""

import dataclasses

import numpy as np
import pytest
from faults import log
from steps import (
    FIRST,
    GivenGroups,
    batch_of_groups,
    credit_of,
    groups_of_every_fate,
    policy_of,
    settings,
)

from core.model import load_model, load_tokenizer
from core.rollouts import Batch
from core.settings import read_settings
from data import Problem
from machinery import kept
from machinery.folder import json_lines
from machinery.kept import KeptRollouts, kept_rows, token_texts


def lines_of(folder, kind):
    """The lines of this kind in rollouts.jsonl."""
    return [line for line in json_lines(folder / "rollouts.jsonl") if line["kind"] == kind]


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


FATES = [["trained"] * 3 + ["truncated"], ["trained"] * 3 + ["no verdict"], ["filtered"] * 4]


def test_what_is_kept_and_logged_is_how_it_was_sampled_what_it_was_worth_and_what_became_of_it(
    llama, golden_run
):
    """Of the groups, completions and tokens of the first step, by the model's forward over one
    completion at a time. The same problems are kept at all validations."""
    groups, model = groups_of_every_fate(), load_model(llama).requires_grad_(False)
    batch = Batch(groups, FIRST)
    credit = credit_of(read_settings(golden_run), batch)
    names = "step group retired answer pass_rate prompt_ids".split()
    lines = lines_of(golden_run, "group")[:3]
    assert [[line[name] for name in names] for line in lines] == [
        [FIRST + 1, i, i == 2, answer, group.pass_rate, group.requests[0].prompt_ids]
        for i, (group, answer) in enumerate(zip(groups, ("1", "2", "1" * 2000)))
    ]
    assert [[each["became"] for each in line["completions"]] for line in lines] == FATES
    completions, counted = sum((line["completions"] for line in lines), []), []
    for row, (completion, (r, verdict)) in enumerate(zip(completions, batch.judged)):
        assert verdict.failure in (None, completion["verdict"])
        policy, tokens_T = policy_of(r, model)
        log_pi_T = policy.log_prob(tokens_T)
        of_tokens = {"generator_logprobs": r.logprobs}
        if completion["became"] == "trained":
            of_tokens |= {"trainer_logprobs": log_pi_T, "entropies": policy.entropy()}
            log_rho_T = log_pi_T.numpy() - r.logprobs
            counted += log_rho_T[r.sampled].tolist()
        assert ("entropies" in completion) == ("entropies" in of_tokens)
        for name in ("sampled", "versions"):
            completion[name] = np.repeat(*zip(*completion[name]))
        expected = {"ids": r.tokens, "sampled": r.sampled, "versions": r.versions}
        expected |= {name: np.where(r.sampled, each, np.nan) for name, each in of_tokens.items()}
        for name in ("reward", "advantage", "weight"):
            expected[name] = getattr(credit, f"{name}s_PG").flatten()[row]
        for name, values in (expected | {"score": verdict.score}).items():
            found = np.array(completion[name], float)  # None becomes NaN
            np.testing.assert_allclose(found, values, rtol=1e-3, atol=1e-5)

    of_all = [FIRST - r.versions[r.sampled] for r in batch.rollouts]
    log_rho = np.array(counted)
    rho = np.exp(log_rho)
    expected = {
        "groups_counted": 2,
        "zero_variance_fraction": 1 / 3,
        "off_policyness_max": 3,
        "off_policyness_mean": np.concatenate(of_all).mean(),
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max(),
        "kl_estimate": (rho - 1 - log_rho).mean(),
        "effective_sample_size": rho.sum() ** 2 / len(rho) / (rho**2).sum(),
    }
    line, _ = log(golden_run, "train")
    assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-3)

    validations = lines_of(golden_run, "validation")
    found = [(line["step"] - FIRST, line["group"]) for line in validations]
    assert found == [(step, problem) for step in (0, 1, 2) for problem in (0, 1, 2)]
    assert not any("reward" in each for line in validations for each in line["completions"])


def test_about_forty_steps_are_kept_of_each_the_oldest_and_the_newest_groups():
    chosen = settings(110, rollouts_kept=3, prompts_per_step=32, completions_per_prompt=2)
    assert [step for step in range(1, 17) if kept_rows(chosen, step)] == [4, 8, 12, 16]
    assert kept_rows(chosen, 4) == {0, 1, 30, 31, 62, 63}
    few = dataclasses.replace(chosen, prompts_per_step=2, steps=9)
    assert kept_rows(few, 3) == {0, 1, 2, 3}  # all


# --- the file -------------------------------------------------------------------------------------


def test_times_count_from_the_beginning_and_six_problems_are_kept_until_the_file_is_full(
    llama, tmp_path, monkeypatch, capsys
):
    """Of a run that began at .5 seconds; problems from the shortest to the longest."""
    prompts = GivenGroups(settings(), [], None, llama).prompts
    writer = KeptRollouts(tmp_path / "rollouts.jsonl", settings(rollouts_kept=1), prompts, 0.5)
    writer.add_times(3, (1.0, 2.0), [(0, 1.0, 2.0, None), (0, 2.0, 3.0, 7)])
    times = {"kind": "times", "step": 3, "waited": [0.5, 1.5]}
    times["generators"] = [[0, 0.5, 1.5, None], [0, 1.5, 2.5, 7]]
    assert lines_of(tmp_path, "times") == [times]
    groups, (any_group, *_) = [], batch_of_groups()
    for length in [*range(20, 40), *range(20)]:
        problem = Problem("?" * length, "", "")
        groups.append(dataclasses.replace(any_group, number=length, problem=problem))
    writer.add_validation(0, groups)
    lengths = [line["group"] for line in lines_of(tmp_path, "validation")]
    assert lengths == [0, 7, 15, 23, 31, 39]
    monkeypatch.setattr(kept, "MOST_BYTES", 1)
    for step in (4, 5):
        writer.add_times(step, (1.0, 2.0), [])
    assert lines_of(tmp_path, "times") == [times]
    assert capsys.readouterr().err.count("full: from step 4 on it gets nothing") == 1
