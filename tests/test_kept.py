"""rollouts.jsonl: what is kept of a run, and that it is what the run has computed."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from steps import FIRST, batch_of_groups, settings, train_on

import loss
from core import screen
from core.model import load_model, load_tokenizer
from core.rollouts import Batch
from data.verify import Verdict
from machinery import kept
from machinery.folder import append_whole, drop_later, json_lines
from machinery.kept import (
    KeptRollouts,
    kept_groups,
    kept_rows,
    token_texts,
)
from machinery.measures import Totals


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


def expected_worth(groups):
    """What each completion is worth, by loss.py."""
    batch, chosen = Batch(groups, FIRST), settings()
    parts = batch.scores_PG, batch.lengths_PG, batch.usable_PG
    return loss.worth(chosen.recipe, *parts, chosen.thinking_budget[1], chosen.answer_budget)


def test_what_is_kept_is_how_it_was_sampled_what_it_was_worth_and_what_became_of_it(
    models, tmp_path
):
    """Of groups, completions and tokens; by a plain forward of the model, one at a time."""
    groups, model = groups_of_every_fate(), load_model(models["llama"])
    worth = expected_worth(groups)
    train_on(settings(rollouts_kept=3), models["llama"], [groups], tmp_path)
    kept_lines = lines_of(tmp_path, "group")
    found = [(line["step"], line["group"], line["retired"]) for line in kept_lines]
    assert found == [(FIRST + 1, 0, False), (FIRST + 1, 1, False), (FIRST + 1, 2, True)]
    assert [line["answer"] for line in kept_lines] == ["1", "2", "1" * 2000]
    assert [
        [completion["became"] for completion in line["completions"]] for line in kept_lines
    ] == [
        ["trained"] * 3 + ["truncated"],
        ["trained"] * 3 + ["no verdict"],
        ["zero variance"] * 4,
    ]
    for p, (line, group) in enumerate(zip(kept_lines, groups)):
        prompt = group.requests[0].prompt_ids
        assert (line["prompt_ids"], line["pass_rate"]) == (prompt, group.pass_rate)
        for i, completion in enumerate(line["completions"]):
            r, verdict = group.rollouts[i], group.verdicts[i]
            assert completion["ids"] == r.tokens.tolist()
            assert spread(completion["sampled"]) == r.sampled.tolist()
            assert spread(completion["versions"]) == r.versions.tolist()
            assert completion["score"] == verdict.score
            assert verdict.failure in (None, completion["verdict"])
            of_tokens = {"generator_logprobs": r.logprobs}
            if worth.counted_PG[p, i]:
                ids = torch.tensor([prompt + completion["ids"]])
                with torch.no_grad():
                    logprobs = torch.log_softmax(model(input_ids=ids).logits[0], -1)
                logprobs = logprobs[len(prompt) - 1 : -1]
                chosen = ids[0, len(prompt) :, None]
                of_tokens["trainer_logprobs"] = logprobs.gather(-1, chosen)[:, 0]
                of_tokens["entropies"] = -(logprobs.exp() * logprobs).sum(-1)
            assert {"trainer_logprobs", "entropies"} & {*completion} <= {*of_tokens}
            for name, values in of_tokens.items():
                assert [value is None for value in completion[name]] == (~r.sampled).tolist()
                known = [value for value in completion[name] if value is not None]
                np.testing.assert_allclose(known, values[r.sampled], atol=1e-4)
            for name in ("reward", "advantage", "weight"):
                value = getattr(worth, f"{name}s_PG")[p, i].item()
                assert completion[name] == pytest.approx(value, rel=1e-5)


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


def test_a_file_that_is_full_gets_no_more_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(screen, "_warned", set())
    monkeypatch.setattr(kept, "MOST_BYTES", 1000)
    for first in (0, 20):  # the second goes on after a resumption
        kept_rollouts = writer(tmp_path, rollouts_kept=1)
        for step in range(first, first + 20):
            kept_rollouts.add_validation(step, [of_problem("?")])
    steps = [step for _, step in steps_of(tmp_path)]
    assert steps == [*range(len(steps))] and 4 < len(steps) < 20
    assert capsys.readouterr().err.count(f"full: from step {len(steps)} on it gets nothing") == 1
