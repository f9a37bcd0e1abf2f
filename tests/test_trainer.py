"""Optimizer steps: batches and micro-batches, gradients against a plain reference, one rank against
several."""

import collections
import dataclasses
import math
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import steps
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from steps import (
    CPU,
    FIRST,
    batch_of_groups,
    lines,
    make_group,
    rollout,
    settings,
    stored,
    train_on,
    train_rank,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import loss
import train
from core import screen
from core.decoding import make_decoding
from core.engine import sample_all
from core.model import load_model, load_tokenizer, put_on_device, use_wide_products
from core.policy import Policy, micro_batches
from core.rollouts import Request, SharedParameters
from core.settings import Settings
from core.torch_engine import TorchEngine
from data.verify import Verdict
from machinery import ranks as ranks_module
from machinery import trainer
from machinery.files import json_lines
from machinery.folder import checkpoints
from machinery.run import Start
from machinery.warnings import step_warnings

EXACT = dict(clip_gradient=math.inf)  # gradients as they are


def assert_same_gradients(found, expected, rtol):
    """Assert that the gradients of all parameters are these."""
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, atol=1e-5, rtol=rtol)


def all_rollouts(groups):
    return [rollout for group in groups for rollout in group.rollouts.values()]


def plain_logprobs(model, rollout):
    """log pi of all tokens of a completion [T], from a plain forward of one unpadded sequence."""
    prompt = len(rollout.request.prompt_ids)
    ids = torch.tensor([rollout.request.prompt_ids + rollout.tokens.tolist()])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0], -1)[prompt - 1 : -1]
    return logprobs.gather(-1, ids[0, prompt:, None])[:, 0]


# --- one step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "aggregation, name", [("sample", "cispo"), ("prompt", "gspo"), ("token", "dapo")]
)
def test_pitfall_5_the_gradient_of_a_step_does_not_depend_on_the_micro_batches(
    models, tmp_path, aggregation, name
):
    """Cut in any way, computed again in the backward or not."""
    recipe = loss.Recipe(aggregation=aggregation, loss=name)
    losses, gradients = [], []
    for tokens, again in ((10_000, False), (60, False), (1, False), (60, True)):
        chosen = settings(
            recipe=recipe, tokens_per_micro_batch=tokens, gradient_checkpointing=again, **EXACT
        )
        folder = tmp_path / f"{tokens}-{again}"
        _, (gradient,) = train_on(chosen, models["qwen3"], [batch_of_groups()], folder)
        (line,) = lines(folder, "train")
        losses.append(line["loss"])
        gradients.append(gradient)
        assert losses[-1] == pytest.approx(losses[0], abs=1e-5)
        assert_same_gradients(gradients[-1], gradients[0], rtol=1e-4)


def centred_rewards(group):
    """Reward minus mean of each completion of a group that is not truncated, with the completion;
    [] if all have the same."""
    members = []
    for i, r in group.rollouts.items():
        if not r.truncated:
            members.append((1.0 if group.verdicts[i].correct else -1.0, r))
    rewards = [reward for reward, _ in members]
    mean = sum(rewards) / len(rewards)
    return [(reward - mean, r) for reward, r in members] if len({*rewards}) > 1 else []


def terms_by_hand(name, ratios, advantage, logprobs):
    """The term of each token of a completion, from its importance ratios."""
    if name == "cispo":
        return ratios.clamp(max=5).detach() * advantage * logprobs
    low, high = loss.LOSSES[name].constants.values()
    if name == "gspo":
        ratios = ratios.log().mean().exp().expand(len(ratios))
    return torch.minimum(ratios * advantage, ratios.clamp(1 - low, 1 + high) * advantage)


@pytest.mark.parametrize("name", ["cispo", "dapo", "gspo"])
def test_a_step_matches_a_plain_reference_one_completion_at_a_time(models, tmp_path, name):
    """The loss, and its gradient, of the whole step from single unpadded sequences and sums over
    single tokens."""
    groups = batch_of_groups()
    chosen = settings(recipe=loss.Recipe(loss=name), **EXACT)
    _, (gradient,) = train_on(chosen, models["llama"], [groups], tmp_path)

    model = load_model(models["llama"])
    counted = [group for group in map(centred_rewards, groups) if group]
    advantages = [advantage for group in counted for advantage, _ in group]
    std = (sum(a * a for a in advantages) / len(advantages)) ** 0.5
    total = 0.0
    for group in counted:
        tokens = sum(int(r.sampled.sum()) for _, r in group)
        for advantage, r in group:
            logprobs = plain_logprobs(model, r)[r.sampled]
            ratios = (logprobs - torch.tensor(r.logprobs[r.sampled])).exp()
            terms = terms_by_hand(name, ratios, advantage / std, logprobs)
            total = total - terms.sum() / tokens / len(counted)
    total.backward()
    assert lines(tmp_path, "train")[0]["loss"] == pytest.approx(total.item(), rel=1e-4)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_gradients(gradient, expected, rtol=1e-3)


def test_the_log_says_how_far_the_batch_is_from_the_policy_and_how_far_a_step_goes(
    models, tmp_path
):
    """Ratios and ages token by token from single sequences, and parameters from before and
    after."""
    groups = batch_of_groups()
    groups[1].verdicts = {i: Verdict(True) for i in range(4)}  # does not count
    for group in groups:
        for i, r in group.rollouts.items():
            # A completion goes on while parameters change, but for one in each group.
            ages = np.zeros(len(r.tokens)) if i == 2 else np.arange(len(r.tokens)) // 4
            group.rollouts[i] = dataclasses.replace(r, versions=(FIRST - ages).astype(np.int32))
    chosen = settings(weight_decay=0.0, tokens_per_micro_batch=60)
    train_on(chosen, models["llama"], [groups], tmp_path)
    (line,) = lines(tmp_path, "train")
    assert line["groups_counted"] == 2
    assert line["zero_variance_fraction"] == pytest.approx(1 / 3)

    before, by_age = load_model(models["llama"]), collections.defaultdict(list)
    for r in all_rollouts([groups[0], groups[2]]):
        if not r.truncated:
            log_ratios = plain_logprobs(before, r).detach() - torch.tensor(r.logprobs)
            for t in r.sampled.nonzero()[0]:
                by_age[FIRST - r.versions[t]].append(log_ratios[t].item())
    rho = np.exp(np.concatenate([*by_age.values()]))
    effective = rho.sum() ** 2 / len(rho) / (rho**2).sum()
    assert line["effective_sample_size"] == pytest.approx(effective, rel=1e-4)
    ages = {name for name in line if name.startswith("log_ratio")}
    assert ages == {f"log_ratio_age_{age}" for age in by_age}
    for age, log_ratios in by_age.items():
        mean = np.abs(log_ratios).mean()
        assert line[f"log_ratio_age_{age}"] == pytest.approx(mean, rel=1e-4)

    after, moved, there = stored(tmp_path), 0.0, 0.0
    for name, values in before.named_parameters():
        moved += (after[name] - values).square().sum().item()
        there += after[name].square().sum().item()
    assert line["update_size"] == pytest.approx((moved / there) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("change", ["forced", "truncated", "without a verdict"])
def test_forced_tokens_truncated_samples_and_those_without_a_verdict_are_out_of_the_loss(
    models, tmp_path, change
):
    """What the generator recorded there, and for the latter two the whole completion, changes
    nothing."""
    before, after = batch_of_groups(), batch_of_groups()
    if change == "without a verdict":
        for groups in (before, after):
            groups[2].verdicts[1] = Verdict(False, "time limit")
    for group in after:
        for i, r in group.rollouts.items():
            verdict = group.verdicts[i]
            left_out = r.truncated if change == "truncated" else verdict.failure
            if change == "forced":
                logprobs = np.where(r.sampled, r.logprobs, -50).astype(np.float32)
                group.rollouts[i] = dataclasses.replace(r, logprobs=logprobs)
            elif left_out:
                others = {"tokens": (r.tokens + 1) % 18, "logprobs": r.logprobs - 3}
                group.rollouts[i] = dataclasses.replace(r, **others)
                group.verdicts[i] = dataclasses.replace(verdict, score=1 - verdict.score)
    _, (one,) = train_on(settings(), models["llama"], [before], tmp_path / "before")
    _, (other,) = train_on(settings(), models["llama"], [after], tmp_path / "after")
    (line,), (other_line,) = lines(tmp_path / "before", "train"), lines(tmp_path / "after", "train")
    assert line["loss"] == other_line["loss"] != 0
    for name, gradient in one.items():
        assert torch.equal(gradient, other[name])


def test_a_batch_without_any_variance_changes_nothing(models, tmp_path):
    groups = batch_of_groups()
    for group in groups:
        group.verdicts = {i: Verdict(True) for i in range(4)}
    _, gradients = train_on(settings(), models["llama"], [groups], tmp_path)
    (line,) = lines(tmp_path, "train")
    assert gradients == []
    assert line["loss"] == 0
    assert line["zero_variance_fraction"] == 1
    assert line["entropy"] is None
    assert line["skipped"] == line["groups_counted"] == line["update_size"] == 0
    before, after = load_model(models["llama"]), stored(tmp_path)
    for name, values in before.named_parameters():
        assert torch.equal(after[name], values)


def test_steps_without_any_variance_one_after_the_other_are_said_once(
    models, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(screen, "_warned", set())
    flat, varied = batch_of_groups(), batch_of_groups(1)
    for group in flat:
        group.verdicts = {i: Verdict(0.0) for i in range(4)}
    train_on(settings(steps=8), models["llama"], [flat] * 4 + [varied] + [flat] * 3, tmp_path / "a")
    assert "nothing to learn from" not in capsys.readouterr().err
    train_on(settings(steps=8), models["llama"], [flat] * 8, tmp_path / "b")
    said = capsys.readouterr().err
    assert said.count("last 5 steps all completions of a prompt got the same reward") == 1
    assert "The pass rate of this step is 0.00: near 0 the problems are too hard" in said
    assert "samples.txt" in said


def test_graded_scores_are_rewards_in_between(models, tmp_path):
    """A half is worth half of a right answer in the reward; the pass rate counts right ones alone.
    A group of halves has no variance."""
    groups = batch_of_groups()
    scores_PG = [[1.0, 0.5, 0.0, 0.5], [0.5, 0.5, 0.5, 0.5], [0.25, 0.0, 0.25, 0.0]]
    for group, scores_G in zip(groups, scores_PG):
        group.verdicts = {i: Verdict(score) for i, score in enumerate(scores_G)}
    train_on(settings(), models["llama"], [groups], tmp_path)
    (line,) = lines(tmp_path, "train")
    assert line["pass_rate"] == pytest.approx(1 / 12)
    assert line["reward_mean"] == pytest.approx(2 * 4.5 / 12 - 1)
    assert line["zero_variance_fraction"] == pytest.approx(1 / 3)
    assert line["loss"] != 0


def test_a_warning_comes_when_few_groups_count_for_ten_steps_unless_most_problems_are_solved():
    line = {
        "step": 9,
        "truncated_fraction": 0,
        "kl_estimate": 0,
        "entropy": 1,
        "zero_variance_fraction": 0.75,
        "skipped": 0,
        "pass_rate": 0.4,
        "groups_counted": 2,
    }

    def about(lines):
        return [*step_warnings(lines, 100, 200, 8, Path("samples.txt"))]

    assert about([line] * 9) == []
    assert about([line] * 10) == ["few groups"]
    for change in ({"groups_counted": 3}, {"pass_rate": 0.95}):
        assert about([line] * 5 + [line | change] + [line] * 4) == []


@pytest.mark.parametrize("asynchrony, oldest", [("pipeline-8", 8), ("pipeline-0", 0), ("ppo-3", 2)])
def test_the_age_of_every_token_is_asserted_where_a_batch_is_trained(
    models, tmp_path, asynchrony, oldest
):
    """One token that is too old ends the run, wherever the mistake was made."""
    chosen = settings(recipe=loss.Recipe(asynchrony=asynchrony))
    groups = batch_of_groups()
    groups[1].rollouts[3].versions[-1] = FIRST - oldest
    train_on(chosen, models["llama"], [groups], tmp_path / "oldest")
    (line,) = lines(tmp_path / "oldest", "train")
    sampled = sum(int(r.sampled.sum()) for r in all_rollouts(groups))
    assert line["off_policyness_max"] == oldest
    assert line["off_policyness_mean"] == pytest.approx(oldest / sampled)

    groups[1].rollouts[3].versions[-1] -= 1
    said = f"a token of step {FIRST + 1} is {oldest + 1} steps old"
    with pytest.raises(AssertionError, match=said):
        train_on(chosen, models["llama"], [groups], tmp_path / "too old")
    assert lines(tmp_path / "too old", "train") == []


# --- steps that are not finite --------------------------------------------------------------------


def spoil(monkeypatch, bad_calls):
    """Make the loss of some micro-batches not finite."""
    policy_loss, calls = loss.policy_loss, []

    def spoilt(*arguments):
        value, sums = policy_loss(*arguments)
        calls.append(1)
        factor = math.nan if len(calls) in bad_calls else 1
        return value * factor, sums

    monkeypatch.setattr(loss, "policy_loss", spoilt)
    monkeypatch.setattr(screen, "_warned", set())


def test_a_step_that_is_not_finite_is_skipped_and_said_once(models, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, bad_calls={2, 3})
    batches = [batch_of_groups(seed) for seed in range(4)]
    run, gradients = train_on(settings(steps=4), models["llama"], batches, tmp_path)
    logged = lines(tmp_path, "train")
    assert [line["skipped"] for line in logged] == [0, 1, 1, 0]
    assert [line["loss"] is None for line in logged] == [False, True, True, False]
    assert len(gradients) == 2
    assert not run.failure
    assert all(torch.isfinite(values).all() for values in stored(tmp_path).values())
    said = capsys.readouterr().err
    assert said.count("is not finite") == 1
    assert f"the loss or the gradient of step {FIRST + 2} is not finite" in said


def test_steps_that_are_never_finite_end_the_run_with_a_checkpoint(
    models, tmp_path, monkeypatch, capsys
):
    spoil(monkeypatch, bad_calls=range(2, 100))
    chosen = settings(steps=20, validation_every=1)
    batches = [batch_of_groups() for _ in range(20)]
    run, gradients = train_on(chosen, models["llama"], batches, tmp_path)
    logged = lines(tmp_path, "train")
    assert [line["skipped"] for line in logged] == [0] + [1] * 5
    assert len(gradients) == 1
    assert "is not finite. So were the 4 steps before it" in run.failure
    assert lines(tmp_path, "end") == []
    assert checkpoints(tmp_path)[-1].name == f"step-{logged[-1]['step']:06d}"
    assert all(torch.isfinite(values).all() for values in stored(tmp_path).values())


# --- micro-batches --------------------------------------------------------------------------------


def all_micro_batches(rollouts, tokens, rank=0, ranks=1, share=False, device=CPU):
    rows = list(range(len(rollouts)))
    return list(micro_batches(rollouts, rows, tokens, device, rank, ranks, share))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_pitfall_11_sequences_of_a_micro_batch_have_the_logprobs_of_sequences_on_their_own(
    models, kind
):
    policy = Policy(load_model(models[kind]))
    rollouts = all_rollouts(batch_of_groups())
    (batch,) = all_micro_batches(rollouts, 10_000)
    together, _ = policy(batch, True)
    for row, which in enumerate(batch.rows_B.tolist()):
        (alone,) = all_micro_batches([rollouts[which]], 10_000)
        logprobs_BT, _ = policy(alone, True)
        logprobs_N = logprobs_BT[alone.sampled_BT]
        in_batch_N = together[row][batch.sampled_BT[row]]
        torch.testing.assert_close(in_batch_N, logprobs_N, atol=1e-5, rtol=0)
        # The negative control: the same sequence after two tokens of padding on the left is another
        # one.
        shifted = torch.nn.functional.pad(alone.inputs_BT, (2, 0))
        with torch.no_grad():
            left = torch.log_softmax(policy.model(input_ids=shifted).logits[:, 2:], -1)
        left_BT = left.gather(-1, alone.targets_BT[..., None])[..., 0]
        assert (left_BT[alone.sampled_BT] - logprobs_N).abs().max() > 1e-3


def groups_with_long_prompts(number=4, seed=0):
    """Groups with prompts of 12 to 20 tokens, two of one prompt, and completions of 1 to 9."""
    rng, groups = np.random.default_rng(seed), []
    prompts = [rng.integers(18, size=n).tolist() for n in rng.integers(12, 20, size=number - 1)]
    for i, prompt in enumerate([prompts[0], *prompts]):
        lengths = [1 + (i + 3 * j) % 9 for j in range(4)]
        members = [rollout(i, j, prompt, rng.integers(18, size=n)) for j, n in enumerate(lengths)]
        groups.append(make_group(i, members, [True, False, False, i > 1]))
    return groups


@pytest.mark.parametrize("tokens", [10_000, 90])
@pytest.mark.parametrize(
    "kind", ["llama-grouped-tied", "qwen3", "qwen3-moe", "deepseek-v3", "glm4-moe-lite"]
)
def test_shared_prompts_give_the_same_logprobs_and_gradients(models, kind, tokens):
    """With part groups too, and with the attentions of CPUs and of GPUs. Fewer tokens are fed."""
    rollouts = all_rollouts(groups_with_long_prompts())
    weights = torch.rand(len(rollouts), 40, generator=torch.Generator().manual_seed(0))

    def logprobs_and_gradients(share, attention):
        """Also the number of tokens that were fed. The loss is a weighted sum of log pi."""
        model = load_model(models[kind])
        model.set_attn_implementation(attention)
        logprobs, total, fed = {}, 0.0, 0
        for m in all_micro_batches(rollouts, tokens, share=share):
            assert (m.prompts_PL is not None) == share
            logprobs_BT, _ = Policy(model)(m, True)
            fed += m.fed
            for i, row in enumerate(m.rows_B.tolist()):
                logprobs[row] = logprobs_BT[i, m.sampled_BT[i]]
                total = total + (logprobs[row] * weights[row, : len(logprobs[row])]).sum()
        total.backward()
        return logprobs, {name: p.grad for name, p in model.named_parameters()}, fed

    logprobs, gradients, fed = logprobs_and_gradients(False, "eager")
    fed_shared = []
    for attention in ("eager", "grouped", "sdpa"):
        found, found_gradients, n = logprobs_and_gradients(True, attention)
        fed_shared.append(n)
        for row, values in logprobs.items():
            torch.testing.assert_close(found[row], values, atol=1e-5, rtol=0)
        for name, values in gradients.items():
            atol = 1e-5 * values.abs().max().item()
            torch.testing.assert_close(found_gradients[name], values, atol=atol, rtol=1e-4)
    assert fed_shared == [fed_shared[0]] * 3
    assert fed_shared[0] < 0.7 * fed


def test_prompts_are_shared_only_if_fewer_positions_are_fed():
    """Not if completions of unlike length would have to be padded for it; and sequences of like
    length may be of several prompts."""

    def are_shared(prompt, lengths, tokens):
        rollouts = [rollout(0, i, prompt, [1] * length) for i, length in enumerate(lengths)]
        batches = all_micro_batches(rollouts, tokens, share=True)
        return {m.prompts_PL is not None for m in batches}

    assert are_shared([1] * 30, [10] * 4, 10_000) == {True}
    assert are_shared([1] * 2, [100, 90, 80, 10], 100) == {False}  # one in each micro-batch
    assert are_shared([1] * 30, [100, 90, 80, 10], 100) == {False}


def test_micro_batches_keep_to_their_budget():
    rollouts = [rollout(0, i, [1, 2], list(range(3, 5 + i))) for i in range(9)]
    batches = [batch.rows_B.tolist() for batch in all_micro_batches(rollouts, 30)]
    assert sorted(sum(batches, [])) == list(range(9))

    def positions(rows):
        return len(rows) * max(len(rollouts[row].tokens) + 1 for row in rows)

    assert all(positions(rows) <= 30 for rows in batches)
    for rows, following in zip(batches, batches[1:]):
        assert positions([*rows, following[0]]) > 30
    one_each = [batch.rows_B.tolist() for batch in all_micro_batches(rollouts, 1)]
    assert one_each == [[i] for i in range(8, -1, -1)]


def test_on_a_gpu_micro_batches_are_a_multiple_of_64_wide_and_compute_the_same(models, monkeypatch):
    """Of 200 lengths there are few widths, and their budget holds with what is added. Two sequences
    of 16,384 tokens, the most that the paper's settings have, fit into 32,768. (Made for a GPU, on
    a CPU.)"""

    def for_a_gpu(rollouts, tokens):
        made = torch.tensor
        with monkeypatch.context() as patch:
            patch.setattr(torch, "tensor", lambda array, device: made(array))
            return all_micro_batches(rollouts, tokens, device=torch.device("cuda"))

    some = [rollout(0, i, [1, 2], np.arange(3 + i) % 18) for i in range(200)]
    batches = for_a_gpu(some, 1024)
    assert {batch.inputs_BT.shape[1] for batch in batches} == {64, 128, 192, 256}
    assert all(batch.inputs_BT.numel() <= 1024 for batch in batches)
    longest = [rollout(0, i, [1] * 2048, [2] * 14_336) for i in range(2)]
    (batch,) = for_a_gpu(longest, 32_768)
    assert batch.inputs_BT.shape == (2, 16_384)

    policy, alone = Policy(load_model(models["llama"])), {}
    for batch in all_micro_batches(some[:9], 1):
        logprobs_BT, _ = policy(batch, True)
        alone[batch.rows_B.item()] = logprobs_BT[batch.sampled_BT]
    (batch,) = for_a_gpu(some[:9], 1024)
    logprobs_BT, _ = policy(batch, True)
    for row, which in enumerate(batch.rows_B.tolist()):
        logprobs_N = logprobs_BT[row][batch.sampled_BT[row]]
        torch.testing.assert_close(logprobs_N, alone[which], atol=1e-5, rtol=0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_micro_batches_are_even_over_the_ranks(ranks):
    """All ranks have the same number of them, within the limit, and nearly the same to do; every
    row is on one rank."""
    rng = np.random.default_rng(0)
    lengths = enumerate(rng.integers(30, 80, size=100))
    rollouts = [rollout(0, i, [1, 2], rng.integers(18, size=n)) for i, n in lengths]
    for tokens in (1, 700, 4000, 10_000):
        found = [all_micro_batches(rollouts, tokens, rank, ranks) for rank in range(ranks)]
        assert len({len(batches) for batches in found}) == 1
        rows, work, added = [], [], []
        for batches in found:
            real = [batch for batch in batches if batch.sampled_BT.any()]
            sizes = [batch.inputs_BT.numel() for batch in real]
            assert all(size <= tokens or tokens == 1 for size in sizes)
            rows += [row for batch in real for row in batch.rows_B.tolist()]
            work.append(sum(sizes))
            added.append(len(batches) - len(real))
        assert sorted(rows) == list(range(100))
        assert max(work) < 1.12 * min(work)
        if tokens == 1:  # 100 rows, one each: where they are not even, the last ranks get one more
            assert added == {2: [0, 0], 3: [0, 1, 1]}[ranks]  # that counts for nothing


def test_pitfall_10_lengths_and_not_padding_ids_say_what_counts():
    """EOS with the id that also pads (0 here) keeps its place in the loss; padding gets none."""
    rollouts = [rollout(0, 0, [1, 2], [3, 4, 0]), rollout(0, 1, [1, 2], [3, 4, 5, 6, 7, 0])]
    (batch,) = all_micro_batches(rollouts, 100)
    assert batch.sampled_BT.sum(1).tolist() == [6, 3]
    assert batch.targets_BT[batch.sampled_BT].tolist() == [3, 4, 5, 6, 7, 0, 3, 4, 0]


def test_pitfall_9_the_trained_tokens_are_the_sampled_ids():
    rollouts = all_rollouts(batch_of_groups())
    seen = []
    for batch in all_micro_batches(rollouts, 40):
        for row, which in enumerate(batch.rows_B.tolist()):
            sampled, r = batch.sampled_BT[row], rollouts[which]
            logprobs = batch.generator_logprobs_BT[row][sampled]
            prompt = r.request.prompt_ids
            assert batch.inputs_BT[row][: len(prompt)].tolist() == prompt
            assert batch.targets_BT[row][sampled].tolist() == r.tokens[r.sampled].tolist()
            assert logprobs.tolist() == r.logprobs[r.sampled].tolist()
            seen.append(which)
    assert sorted(seen) == list(range(len(rollouts)))


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that is made meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.numbers = max(self.numbers, leaf.numel())
        return made


@pytest.mark.slow
def test_nothing_of_a_long_sequence_is_quadratic_in_its_length(models, tmp_path, monkeypatch):
    """A step of training and a few of the engine, with the attention that GPUs have. With the one
    that CPUs have there is a mask, and a score, for each pair of positions: the negative
    control."""

    def as_on_a_gpu(folder):
        model = load_model(folder)
        model.set_attn_implementation("sdpa")
        return model

    def step(folder, length):
        members = [rollout(0, i, [1] * 16, np.arange(length - 16 - i) % 18) for i in range(2)]
        batch, chosen = [make_group(0, members, [1, 0])], settings(gradient_checkpointing=True)
        with LargestTensor() as largest:
            train_on(chosen, models["qwen3"], [batch], folder)
        return largest.numbers

    if not torch.cuda.is_available():
        assert step(tmp_path / "a", 1024) > 1000**2
    monkeypatch.setattr(steps, "load_model", as_on_a_gpu)
    length = 8192
    most = 100 * length  # no part of these models is wider than 100 numbers for each position
    assert step(tmp_path / "b", length) < most

    model = as_on_a_gpu(models["qwen3"])
    decoding = make_decoding(load_tokenizer(models["qwen3"]), Settings(prompt_budget=length))
    engine = TorchEngine(model, decoding, 1)
    with LargestTensor() as largest:
        engine.add([Request(0, 0, [1] * length, 9, (0,))])
        for _ in range(3):
            engine.step()
    assert engine.in_flight
    assert largest.numbers < most


# --- bf16 -----------------------------------------------------------------------------------------


def test_gradients_of_a_bf16_trunk_are_those_of_the_fp32_parameters(models, tmp_path, group_of_one):
    """They come back in fp32, close to those of fp32 arithmetic, and the same when layers are
    computed again."""
    variants = {
        "exact": {"dtype": "float32"},
        "plain": {"dtype": "bfloat16", "share_prompts": False},
        "shared": {"dtype": "bfloat16"},
        "again": {"dtype": "bfloat16", "gradient_checkpointing": True},
    }
    found = {}
    for name, changes in variants.items():
        chosen = settings(**EXACT, **changes)
        _, (found[name],) = train_on(chosen, models["llama"], [batch_of_groups()], tmp_path / name)
    for name, gradient in found["exact"].items():
        assert found["plain"][name].dtype == torch.float32
        torch.testing.assert_close(found["plain"][name], found["again"][name])
        for bf16 in ("plain", "shared"):
            assert 0 < (found[bf16][name] - gradient).norm() < 0.2 * gradient.norm()
    assert all(values.dtype == torch.float32 for values in stored(tmp_path / "plain").values())


@pytest.mark.parametrize("fp32_logits", [True, "split", False])
@pytest.mark.parametrize("kind", ["llama", "llama-grouped-tied"])
def test_pitfall_3_generator_and_trainer_agree_with_fp32_logits_on_both_sides(
    models, group_of_one, kind, fp32_logits
):
    """On-policy mismatch of a bf16 trunk, through the same code on both sides; fp32 heads leave
    less of it."""
    recipe = loss.Recipe(fp32_logits=fp32_logits)
    chosen = settings(recipe=recipe, dtype="bfloat16", thinking_budget=(30, 30), answer_budget=6)
    tokenizer = load_tokenizer(models[kind])
    policy = trainer.make_policy(chosen, load_model(models[kind]), CPU)
    wanted = [Request(0, i, [1, 2, 3], 30, (0, i)) for i in range(16)]

    def mismatch(head):
        """With this kind of head in the generator."""
        model = load_model(models[kind])
        model = put_on_device(model, CPU, torch.bfloat16, head)
        engine = TorchEngine(model, make_decoding(tokenizer, chosen, fp32_logits=head), 16)
        rollouts = sample_all(engine, wanted)
        return trainer.numerics_mismatch(policy, rollouts, chosen)["mismatch_mean"]

    assert mismatch(fp32_logits) < mismatch(not fp32_logits)  # one-sided is worse, whichever side
    assert mismatch(fp32_logits) < 0.1


def test_a_generator_with_other_parameters_is_noticed(models, tmp_path, monkeypatch, capsys):
    """The mismatch on on-policy tokens is far above what numerics do; said once. (What these
    completions say of their log-probabilities is made up.)"""
    monkeypatch.setattr(screen, "_warned", set())
    batches = [batch_of_groups(), batch_of_groups(1)]
    train_on(settings(steps=2, validation_every=1), models["llama"], batches, tmp_path)
    assert all(line["mismatch_mean"] > 0.05 for line in lines(tmp_path, "validation"))
    assert len(lines(tmp_path, "validation")) == 3
    assert capsys.readouterr().err.count("generator and trainer differ") == 1


@pytest.mark.parametrize(
    "changes", [dict(recipe=loss.Recipe(loss="gspo")), dict(recipe=loss.RECIPES["base"]), {}]
)
def test_a_step_with_shared_prompts_is_the_step_without(models, tmp_path, changes):
    """Loss and gradient of the whole step; compute says what was fed."""

    def line_and_gradient(share):
        chosen, folder = settings(share_prompts=share, **EXACT, **changes), tmp_path / str(share)
        _, (gradient,) = train_on(chosen, models["qwen3"], [groups_with_long_prompts()[1:]], folder)
        (line,) = lines(folder, "train")
        return line, gradient

    (line, gradient), (shared_line, shared_gradient) = map(line_and_gradient, (False, True))
    assert shared_line["loss"] == pytest.approx(line["loss"], abs=1e-5)
    # On a GPU short prompts are shorter than what widths are rounded to.
    if not torch.cuda.is_available():
        assert shared_line["compute_flops"] < 0.8 * line["compute_flops"]
    assert_same_gradients(shared_gradient, gradient, rtol=1e-4)


# --- several ranks --------------------------------------------------------------------------------

# Tied heads and experts, more micro-batches than ranks and fewer. (In bf16 a row is rounded
# otherwise beside others.)
CASES = {
    "tied": ("llama-grouped-tied", dict(tokens_per_micro_batch=1)),
    "gspo": (
        "qwen3",
        dict(
            tokens_per_micro_batch=60,
            gradient_checkpointing=True,
            recipe=loss.Recipe(loss="gspo"),
        ),
    ),
    "experts": ("qwen3-moe", dict(tokens_per_micro_batch=10_000)),
    "bf16": ("llama", dict(tokens_per_micro_batch=1, dtype="bfloat16")),
    "shared prompts": ("qwen3", dict(tokens_per_micro_batch=120)),
    "offload": ("llama-grouped-tied", dict(tokens_per_micro_batch=1)),
}


def case(name, ranks=1):
    """The kind of model, settings of two steps, and the batches."""
    kind, changes = CASES[name]
    make_batch = batch_of_groups
    if name == "shared prompts":
        make_batch = partial(groups_with_long_prompts, 3)
    batches = [make_batch(seed=0), make_batch(seed=1)]
    return kind, settings(steps=2, trainers=ranks, **changes), batches


def one_of(rank, ranks, meeting_place, models, folder, shared):
    """A process that is this rank in all of these cases, one after the other."""
    ranks_module.join_ranks(rank, ["cpu"] * ranks, dist.FileStore(meeting_place, ranks))
    for name, parameters in shared.items():
        kind, chosen, batches = case(name, ranks)
        chosen = dataclasses.replace(chosen, offload=name == "offload")
        train_rank(rank, chosen, models[kind], batches, folder / name, parameters)
    dist.destroy_process_group()
    os._exit(0)


def on_ranks(ranks, cases, models, folder):
    """Run these cases on so many ranks; the parameters that generators would get, by case."""
    shared = {}
    for name in cases:
        kind, _, _ = case(name)
        model = load_model(models[kind])
        shared[name] = SharedParameters(model, ranks)
    arguments = (ranks, str(folder / "meet"), models, folder, shared)
    multiprocessing.spawn(one_of, arguments, nprocs=ranks)
    return shared


def trainer_logprobs(folder):
    """Of each kept completion, in order; None if it was not trained on."""
    found = []
    for _, line in json_lines(folder / "rollouts.jsonl"):
        for completion in line.get("completions", ()):
            found.append(completion.get("trainer_logprobs"))
    return found


def same_course(ours, theirs, rel=1e-4, but=()):
    """Assert that two runs were the same, by their logs: all but what tells of time, and columns
    with these words."""
    left_out = ("kind", "seconds", "hours", "idle", "per_second", *but)
    for kind in ("train", "validation"):
        assert len(lines(ours, kind)) == len(lines(theirs, kind)) > 0
        for one, other in zip(lines(ours, kind), lines(theirs, kind)):
            assert one.keys() == other.keys()
            for name in one:
                if not any(word in name for word in left_out):
                    assert other[name] == pytest.approx(one[name], rel=rel, abs=1e-5), name

    logprobs, others = trainer_logprobs(ours), trainer_logprobs(theirs)
    assert len(logprobs) == len(others)
    assert len([*filter(None, logprobs)]) > 8
    for one, other in zip(logprobs, others):
        assert bool(one) == bool(other)
        if one:
            assert [value and pytest.approx(value, rel=1e-3, abs=1e-4) for value in one] == other


def assert_same_bf16_forward(ours, theirs):
    """Assert that the forward of the first step is the same to the bit, or nearly."""
    one, other = lines(ours, "train")[0], lines(theirs, "train")[0]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-2)


@pytest.mark.parametrize(
    "ranks, cases", [(2, ["tied"]), pytest.param(3, [*CASES], marks=pytest.mark.slow)]
)
def test_pitfall_5_losses_and_gradients_are_the_same_with_one_and_several_ranks(
    models, tmp_path, request, ranks, cases
):
    """All that is logged, the mismatch too, and the checkpoint; the first moments are the gradients
    (times 1 - beta). What the generators get is what the checkpoint has."""
    (tmp_path / "several").mkdir()
    shared = on_ranks(ranks, cases, models, tmp_path / "several")
    for name in cases:
        one, several = tmp_path / "one" / name, tmp_path / "several" / name
        if name == "bf16":
            request.getfixturevalue("group_of_one")
        kind, chosen, batches = case(name)
        train_on(chosen, models[kind], batches, one)
        first, second = lines(one, "train")
        assert first["loss"] != second["loss"]
        assert first["gradient_norm"] > 0

        numbers, others = stored(one), stored(several)
        assert numbers.keys() == others.keys()
        for key, values in numbers.items():
            assert others[key].dtype == torch.float32
            assert others[key].shape == values.shape
        if name == "bf16":
            assert_same_bf16_forward(one, several)
        else:
            # A prompt is fed once for each micro-batch, so FLOPs depend on how a batch is cut.
            same_course(one, several, but=["flops"] if name == "shared prompts" else [])
            for key, values in numbers.items():
                if key.endswith("/exp_avg"):
                    assert (values - others[key]).abs().max() < 1e-5, key
        assert shared[name].holds(FIRST + 2)
        for key, view in shared[name].views().items():
            assert torch.equal(view, others[key])


def set_and_wait(rank):
    """As NCCL does, but not gloo, at the first collective of a GPU."""
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=9))
    store.set(f"of rank {rank}", "")
    store.wait([f"of rank {other}" for other in range(dist.get_world_size())])


@pytest.mark.parametrize("changes", [dict(dtype="bfloat16"), dict(trainers=2)])
def test_the_store_of_the_ranks_is_there_until_they_end(changes):
    with ranks_module.other_ranks(settings(**changes), set_and_wait, (), None):
        set_and_wait(0)
    assert not dist.is_initialized()


def test_a_rank_takes_its_gpu_before_anything_else(monkeypatch):
    """Whatever asks for no GPU in particular, nccl's threads among it, would otherwise be on the
    first."""
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(device))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: calls.append("group"))
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    ranks_module.join_ranks(1, ["cuda:6", "cuda:7"], None)
    assert calls == ["cuda:7", "group", "barrier"]


def test_adamw_is_fused_on_a_gpu(models, monkeypatch):
    given = []

    class Seen(Exception):
        pass

    def seen(*_, **options):
        given.append(options["fused"])
        raise Seen

    monkeypatch.setattr(torch.optim, "AdamW", seen)
    monkeypatch.setattr(train, "make_policy", lambda settings, model, device: Policy(model))
    for device in ("cpu", "cuda:1"):
        monkeypatch.setattr(train, "devices_here", lambda _, device=device: ([], [device]))
        with pytest.raises(Seen):
            train.train(0, Start(settings(), FIRST, models["llama"], None, None))
    assert given == [False, True]


@pytest.mark.parametrize("fused, where", [(True, "meta"), (False, "cpu")])
def test_adamw_goes_on_from_the_moments_of_any_checkpoint(
    models, tmp_path, group_of_one, fused, where
):
    """On a GPU the fused AdamW counts its steps there."""
    chosen = settings(dtype="bfloat16")
    train_on(chosen, models["llama"], [batch_of_groups()], tmp_path)
    policy = Policy(load_model(models["llama"]).to("meta"))
    optimizer = SimpleNamespace(defaults={"fused": fused}, state=collections.defaultdict(dict))
    moments = checkpoints(tmp_path)[-1] / "optimizer.safetensors"
    trainer.read_moments(policy, optimizer, moments)
    found = optimizer.state[policy.model.lm_head.weight]
    assert found["step"].device.type == where
    assert found["exp_avg"].device.type == "meta"


def test_fused_adamw_computes_the_same_over_shards_too(models, tmp_path, monkeypatch, group_of_one):
    """Tried on a CPU."""
    adamw, plain, fused = torch.optim.AdamW, tmp_path / "plain", tmp_path / "fused"
    chosen, batches = settings(steps=2, dtype="bfloat16"), [batch_of_groups(0), batch_of_groups(1)]
    train_on(chosen, models["llama"], batches, plain)
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *a, **options: adamw(*a, **options | {"fused": True})
    )
    train_on(chosen, models["llama"], batches, fused)
    same_course(plain, fused, rel=1e-5)
    expected, found = stored(plain), stored(fused)
    for key, values in expected.items():
        torch.testing.assert_close(found[key], values, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_that_wait_elsewhere_are_trained_alike(models, tmp_path, monkeypatch, dtype):
    """On one device, by FSDP's own way of waiting; the checkpoint and what is logged too."""
    batches = [batch_of_groups(0), batch_of_groups(1)]
    waiting, sharded = [], trainer.fully_shard

    def seen(part, offload_policy, **others):
        waiting.append(type(offload_policy).__name__)
        return sharded(part, offload_policy=offload_policy, **others)

    monkeypatch.setattr(trainer, "fully_shard", seen)
    for offload in (False, True):
        chosen = settings(
            steps=2, validation_every=1, dtype=dtype, offload=offload, tokens_per_micro_batch=60
        )
        with ranks_module.other_ranks(chosen, None, (), None):
            train_on(chosen, models["llama"], batches, tmp_path / str(offload))
    same_course(tmp_path / "False", tmp_path / "True")
    assert waiting.count("CPUOffloadPolicy") == 5  # embedding, two layers, norm, all else
    expected, found = stored(tmp_path / "False"), stored(tmp_path / "True")
    for key, values in expected.items():
        torch.testing.assert_close(found[key], values, rtol=1e-4, atol=1e-5)


def test_a_version_is_complete_when_every_rank_has_written_its_part(models):
    model = load_model(models["llama"])
    shared = SharedParameters(model, ranks=2)
    shared.write(model.named_parameters(), 1, rank=0)
    assert shared.version == -1
    assert not shared.holds(1)
    shared.write(model.named_parameters(), 1, rank=1)
    assert shared.version == 1
    assert shared.holds(1)
    shared.begun_W[1] = 2
    assert shared.version == 1
    assert not shared.holds(1)
    assert not shared.holds(2)


@pytest.fixture
def precision():
    """What torch allows fp32 products to be; as it was before, after the test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.get_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def wide(hidden_size):
    config = SimpleNamespace(hidden_size=hidden_size)
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config)


def test_only_a_wide_model_on_the_cpu_leaves_mkl(precision):
    use_wide_products(wide(64), CPU)
    use_wide_products(wide(576), torch.device("cuda:0"))  # "medium" would be TF32 there
    assert precision() == "highest"


def test_products_of_a_wide_model_stay_fp32(precision, monkeypatch):
    use_wide_products(wide(576), CPU)
    torch.manual_seed(0)
    left, right = torch.randn(64, 576), torch.randn(576, 64)
    exact = (left.double() @ right.double()).float()
    torch.testing.assert_close(left @ right, exact, rtol=1e-5, atol=1e-4)  # bf16: .1

    # A CPU that computes "medium" in bf16.
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, _: a.bfloat16().float())
    use_wide_products(wide(576), CPU)
    assert precision() == "highest"
