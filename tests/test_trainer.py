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
from core.model import load_model, load_tokenizer, put_on_device
from core.policy import Policy, micro_batches
from core.rollouts import Request, SharedParameters
from core.settings import Settings
from core.torch_engine import TorchEngine
from data.verify import Verdict
from machinery import ranks as ranks_module
from machinery import trainer
from machinery.checkpoints import checkpoints
from machinery.files import json_lines
from machinery.run import Start
from machinery.warnings import step_warnings

EXACT = dict(clip_gradient=math.inf)  # gradients as they are


# --- one step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "aggregation, name", [("sample", "cispo"), ("prompt", "gspo"), ("token", "dapo")]
)
def test_pitfall_5_the_gradient_of_a_step_does_not_depend_on_the_micro_batches(
    models, tmp_path, aggregation, name
):
    """Cut in any way, computed again in the backward or not."""
    recipe = loss.Recipe(aggregation=aggregation, loss=name)
    expected = None
    for tokens, again in ((10_000, False), (60, False), (1, False), (60, True)):
        chosen = settings(
            recipe=recipe, tokens_per_micro_batch=tokens, gradient_checkpointing=again, **EXACT
        )
        folder = tmp_path / f"{tokens}-{again}"
        _, (gradient,) = train_on(chosen, models["qwen3"], [batch_of_groups()], folder)
        (line,) = lines(folder, "train")
        expected = expected or (line, gradient)
        assert line["loss"] == pytest.approx(expected[0]["loss"], abs=1e-5)
        for parameter, values in expected[1].items():
            torch.testing.assert_close(gradient[parameter], values, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["cispo", "dapo", "gspo"])
def test_a_step_matches_a_plain_reference_one_completion_at_a_time(models, tmp_path, name):
    """The loss, and its gradient, of the whole step from single unpadded sequences and sums over
    single tokens."""
    groups = batch_of_groups()
    _, (gradient,) = train_on(
        settings(recipe=loss.Recipe(loss=name), **EXACT), models["llama"], [groups], tmp_path
    )
    model = load_model(models["llama"], CPU, torch.float32)
    total, kept = 0.0, []
    for group in groups:
        pairs = [(group.verdicts[i].correct, group.rollouts[i]) for i in range(4)]
        members = [(1.0 if correct else -1.0, r) for correct, r in pairs if not r.truncated]
        mean = sum(reward for reward, _ in members) / len(members)
        if len({reward for reward, _ in members}) > 1:
            kept.append([(reward - mean, r) for reward, r in members])
    everything = [advantage for group in kept for advantage, _ in group]
    std = (sum(a * a for a in everything) / len(everything)) ** 0.5
    for group in kept:
        tokens = sum(int(r.sampled.sum()) for _, r in group)
        for advantage, r in group:
            prompt = len(r.request.prompt_ids)
            ids = torch.tensor([r.request.prompt_ids + r.tokens.tolist()])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0], -1)[prompt - 1 : -1]
            logprobs = logprobs.gather(-1, ids[0, prompt:, None])[:, 0][r.sampled]
            ratios = (logprobs - torch.tensor(r.logprobs[r.sampled])).exp()
            scaled = advantage / std
            if name == "cispo":
                terms = ratios.clamp(max=5).detach() * scaled * logprobs
            else:
                low, high = loss.LOSSES[name].clip
                if name == "gspo":
                    ratios = ratios.log().mean().exp().expand(len(ratios))
                terms = torch.minimum(ratios * scaled, ratios.clamp(1 - low, 1 + high) * scaled)
            total = total - terms.sum() / tokens / len(kept)
    total.backward()
    assert lines(tmp_path, "train")[0]["loss"] == pytest.approx(total.item(), rel=1e-4)
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(gradient[parameter_name], parameter.grad, atol=1e-5, rtol=1e-3)


def test_the_log_says_how_far_the_batch_is_from_the_policy_and_how_far_a_step_goes(
    models, tmp_path
):
    """Ratios and ages token by token from single sequences, and parameters from before and
    after."""
    groups = batch_of_groups()
    groups[1].verdicts = {i: Verdict(True) for i in range(4)}  # does not count
    for group in groups:
        for i, r in group.rollouts.items():
            ages = (
                np.arange(len(r.tokens)) // 4 * (i != 2)
            )  # a completion goes on while parameters change
            group.rollouts[i] = dataclasses.replace(r, versions=(FIRST - ages).astype(np.int32))
    train_on(
        settings(weight_decay=0.0, tokens_per_micro_batch=60), models["llama"], [groups], tmp_path
    )
    before, by_age = load_model(models["llama"], CPU, torch.float32), collections.defaultdict(list)
    for r in [
        r for group in (groups[0], groups[2]) for r in group.rollouts.values() if not r.truncated
    ]:
        logits = before(input_ids=torch.tensor([r.request.prompt_ids + r.tokens.tolist()])).logits[
            0
        ]
        logprobs = torch.log_softmax(logits, -1)[len(r.request.prompt_ids) - 1 : -1]
        for t in r.sampled.nonzero()[0]:
            by_age[FIRST - r.versions[t]].append(
                logprobs[t, r.tokens[t]].item() - r.logprobs[t].item()
            )
    (line,) = lines(tmp_path, "train")
    rho = np.exp(np.concatenate([*by_age.values()]))
    assert line["effective_sample_size"] == pytest.approx(
        rho.sum() ** 2 / len(rho) / (rho**2).sum(), rel=1e-4
    )
    assert {f"log_ratio_age_{age}" for age in by_age} == {
        name for name in line if name.startswith("log_ratio")
    }
    for age, log_ratios in by_age.items():
        assert line[f"log_ratio_age_{age}"] == pytest.approx(np.abs(log_ratios).mean(), rel=1e-4)
    pairs = [(stored(tmp_path)[name], values) for name, values in before.named_parameters()]
    moved, there = (
        sum((a - b).square().sum() for a, b in pairs),
        sum(a.square().sum() for a, _ in pairs),
    )
    assert line["update_size"] == pytest.approx((moved / there).sqrt().item(), rel=1e-3)
    assert line["groups_counted"] == 2 and line["zero_variance_fraction"] == pytest.approx(1 / 3)


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
            if change == "forced":
                logprobs = np.where(r.sampled, r.logprobs, -50).astype(np.float32)
                group.rollouts[i] = dataclasses.replace(r, logprobs=logprobs)
            elif r.truncated if change == "truncated" else group.verdicts[i].failure:
                group.rollouts[i] = dataclasses.replace(
                    r, tokens=(r.tokens + 1) % 18, logprobs=r.logprobs - 3
                )
                group.verdicts[i] = dataclasses.replace(
                    group.verdicts[i], score=1 - group.verdicts[i].score
                )
    found = [
        train_on(settings(), models["llama"], [groups], tmp_path / name)[1][0]
        for name, groups in (("before", before), ("after", after))
    ]
    one, other = (lines(tmp_path / name, "train")[0] for name in ("before", "after"))
    assert one["loss"] == other["loss"] and one["loss"] != 0
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name])


def test_a_batch_without_any_variance_changes_nothing(models, tmp_path):
    groups = batch_of_groups()
    for group in groups:
        group.verdicts = {i: Verdict(True) for i in range(4)}
    _, gradients = train_on(settings(), models["llama"], [groups], tmp_path)
    (line,) = lines(tmp_path, "train")
    assert gradients == [] and line["loss"] == 0 and line["zero_variance_fraction"] == 1
    assert (
        line["entropy"] is None
        and line["skipped"] == line["groups_counted"] == line["update_size"] == 0
    )
    before = load_model(models["llama"], CPU, torch.float32)
    assert all(
        torch.equal(stored(tmp_path)[name], values) for name, values in before.named_parameters()
    )


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
    assert (
        said.count("in each of the last 5 steps all completions of a prompt got the same reward")
        == 1
    )
    assert (
        "The pass rate of this step is 0.00: near 0 the problems are too hard" in said
        and "samples.txt" in said
    )


def test_graded_scores_are_rewards_in_between(models, tmp_path):
    """A half is worth half of a right answer in the reward; the pass rate counts right ones alone.
    A group of halves has no variance."""
    groups = batch_of_groups()
    for group, scores in zip(
        groups, ((1.0, 0.5, 0.0, 0.5), (0.5, 0.5, 0.5, 0.5), (0.25, 0.0, 0.25, 0.0))
    ):
        group.verdicts = {i: Verdict(score) for i, score in enumerate(scores)}
    train_on(settings(), models["llama"], [groups], tmp_path)
    (line,) = lines(tmp_path, "train")
    assert line["pass_rate"] == pytest.approx(1 / 12) and line["reward_mean"] == pytest.approx(
        2 * 4.5 / 12 - 1
    )
    assert line["zero_variance_fraction"] == pytest.approx(1 / 3) and line["loss"] != 0


def test_a_warning_comes_when_few_groups_count_for_ten_steps_unless_most_problems_are_solved():
    line = {"step": 9, "truncated_fraction": 0, "kl_estimate": 0, "entropy": 1, "zero_variance_fraction": 0.75,
            "skipped": 0, "pass_rate": 0.4, "groups_counted": 2}  # fmt: skip
    about = lambda lines: [*step_warnings(lines, 100, 8, Path("samples.txt"))]
    assert about([line] * 9) == [] and about([line] * 10) == ["few groups"]
    for change in ({"groups_counted": 3}, {"pass_rate": 0.95}):
        assert about([line] * 5 + [line | change] + [line] * 4) == []


@pytest.mark.parametrize("asynchrony, oldest", [("pipeline-8", 8), ("pipeline-0", 0), ("ppo-3", 2)])
def test_the_age_of_every_token_is_asserted_where_a_batch_is_trained(
    models, tmp_path, asynchrony, oldest
):
    """One token that is too old ends the run, wherever the mistake was made."""
    chosen = settings(recipe=loss.Recipe(asynchrony=asynchrony))
    for age in (oldest, oldest + 1):
        groups = batch_of_groups()
        groups[1].rollouts[3].versions[-1] = FIRST - age
        if age > oldest:
            with pytest.raises(AssertionError, match=f"a token of step {FIRST} is {age} steps old"):
                train_on(chosen, models["llama"], [groups], tmp_path / str(age))
            assert lines(tmp_path / str(age), "train") == []
        else:
            train_on(chosen, models["llama"], [groups], tmp_path / str(age))
            (line,) = lines(tmp_path / str(age), "train")
            sampled = sum(int(r.sampled.sum()) for group in groups for r in group.rollouts.values())
            assert line["off_policyness_max"] == age
            assert line["off_policyness_mean"] == pytest.approx(age / sampled)


# --- steps that are not finite --------------------------------------------------------------------


def spoil(monkeypatch, bad_calls):
    """Make the loss of some micro-batches not finite."""
    policy_loss, calls = loss.policy_loss, []

    def spoilt(*arguments):
        value, sums = policy_loss(*arguments)
        calls.append(1)
        return value * (math.nan if len(calls) in bad_calls else 1), sums

    monkeypatch.setattr(loss, "policy_loss", spoilt)
    monkeypatch.setattr(screen, "_warned", set())


def test_a_step_that_is_not_finite_is_skipped_and_said_once(models, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, bad_calls={2, 3})
    batches = [batch_of_groups(seed) for seed in range(4)]
    run, gradients = train_on(settings(steps=4), models["llama"], batches, tmp_path)
    assert [line["skipped"] for line in lines(tmp_path, "train")] == [0, 1, 1, 0]
    assert [line["loss"] is None for line in lines(tmp_path, "train")] == [False, True, True, False]
    assert len(gradients) == 2 and not run.failure
    assert all(torch.isfinite(values).all() for values in stored(tmp_path).values())
    said = capsys.readouterr().err
    assert (
        said.count("is not finite") == 1
        and f"the loss or the gradient of step {FIRST + 2} is not finite" in said
    )


def test_steps_that_are_never_finite_end_the_run_with_a_checkpoint(
    models, tmp_path, monkeypatch, capsys
):
    spoil(monkeypatch, bad_calls=range(2, 100))
    chosen = settings(steps=20, validation_every=1)
    run, gradients = train_on(
        chosen, models["llama"], [batch_of_groups() for _ in range(20)], tmp_path
    )
    steps = lines(tmp_path, "train")
    assert [line["skipped"] for line in steps] == [0] + [1] * 5 and len(gradients) == 1
    assert (
        "is not finite. So were the 4 steps before it" in run.failure
        and lines(tmp_path, "end") == []
    )
    assert checkpoints(tmp_path)[-1].name == f"step-{steps[-1]['step']:06d}"
    assert all(torch.isfinite(values).all() for values in stored(tmp_path).values())


# --- micro-batches --------------------------------------------------------------------------------


def all_micro_batches(rollouts, tokens, rank=0, ranks=1):
    return list(micro_batches(rollouts, list(range(len(rollouts))), tokens, CPU, rank, ranks))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe"])
def test_pitfall_11_sequences_of_a_micro_batch_have_the_logprobs_of_sequences_on_their_own(
    models, kind
):
    policy = Policy(load_model(models[kind], CPU, torch.float32))
    rollouts = [r for group in batch_of_groups() for r in group.rollouts.values()]
    (batch,) = all_micro_batches(rollouts, 10_000)
    together, _ = policy(batch, True)
    for row, which in enumerate(batch.rows_B.tolist()):
        (alone,) = all_micro_batches([rollouts[which]], 10_000)
        logprobs, _ = policy(alone, True)
        torch.testing.assert_close(
            together[row][batch.sampled_BT[row]], logprobs[alone.sampled_BT], atol=1e-5, rtol=0
        )
        # The negative control: the same sequence after two tokens of padding on the left is another
        # one.
        shifted = torch.nn.functional.pad(alone.inputs_BT, (2, 0))
        with torch.no_grad():
            left = torch.log_softmax(policy.model(input_ids=shifted).logits[:, 2:], -1)
        left = left.gather(-1, alone.targets_BT[..., None])[..., 0][alone.sampled_BT]
        assert (left - logprobs[alone.sampled_BT]).abs().max() > 1e-3


def groups_with_long_prompts(number=4, seed=0):
    """Groups with prompts of 12 to 20 tokens, two of one prompt, and completions of 1 to 9."""
    rng, groups = np.random.default_rng(seed), []
    prompts = [rng.integers(18, size=n).tolist() for n in rng.integers(12, 20, size=number - 1)]
    for i, prompt in enumerate([prompts[0], *prompts]):
        members = [
            rollout(i, j, prompt, rng.integers(18, size=1 + (i + 3 * j) % 9)) for j in range(4)
        ]
        groups.append(make_group(i, members, [True, False, False, i > 1]))
    return groups


@pytest.mark.parametrize("tokens", [10_000, 90])
@pytest.mark.parametrize(
    "kind", ["llama-grouped-tied", "qwen3", "qwen3-moe", "deepseek-v3", "glm4-moe-lite"]
)
def test_shared_prompts_give_the_same_logprobs_and_gradients(models, kind, tokens):
    """With part groups too, and with the attentions of CPUs and of GPUs. Fewer tokens are fed."""
    rollouts = [r for group in groups_with_long_prompts() for r in group.rollouts.values()]
    fed = []
    for share, attention in ((False, "eager"), (True, "eager"), (True, "grouped"), (True, "sdpa")):
        model = load_model(models[kind], CPU, torch.float32)
        model.set_attn_implementation(attention)
        logprobs, weights = (
            {},
            torch.rand(len(rollouts), 40, generator=torch.Generator().manual_seed(0)),
        )
        batches = list(
            micro_batches(rollouts, list(range(len(rollouts))), tokens, CPU, 0, 1, share)
        )
        for m in batches:
            assert (m.prompts_PL is not None) == share
            logprobs_BT, _ = Policy(model)(m, True)
            for i, row in enumerate(m.rows_B.tolist()):
                logprobs[row] = logprobs_BT[i, m.sampled_BT[i]]
        sum(
            (logprobs[row] * weights[row, : len(logprobs[row])]).sum() for row in logprobs
        ).backward()
        fed.append(sum(m.fed for m in batches))
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        if not share:
            expected = logprobs, gradients
        for row, values in expected[0].items():
            torch.testing.assert_close(logprobs[row], values, atol=1e-5, rtol=0)
        for name, values in expected[1].items():
            torch.testing.assert_close(
                gradients[name], values, atol=1e-5 * values.abs().max().item(), rtol=1e-4
            )
    assert fed[1] == fed[2] == fed[3] < 0.7 * fed[0]


def test_prompts_are_shared_only_if_fewer_positions_are_fed():
    """Not if completions of unlike length would have to be padded for it; and sequences of like
    length may be of several prompts."""

    def are_shared(prompt, lengths, tokens):
        rollouts = [rollout(0, i, prompt, [1] * length) for i, length in enumerate(lengths)]
        return {
            m.prompts_PL is not None
            for m in micro_batches(rollouts, [*range(len(rollouts))], tokens, CPU, 0, 1, True)
        }

    assert are_shared([1] * 30, [10] * 4, 10_000) == {True}
    assert are_shared([1] * 2, [100, 90, 80, 10], 100) == {False}  # one in each micro-batch
    assert are_shared([1] * 30, [100, 90, 80, 10], 100) == {False}


def test_micro_batches_keep_to_their_budget():
    rollouts = [rollout(0, i, [1, 2], list(range(3, 5 + i))) for i in range(9)]
    batches = all_micro_batches(rollouts, 30)
    assert sorted(row for batch in batches for row in batch.rows_B.tolist()) == list(range(9))
    taken = [[len(rollouts[row].tokens) + 1 for row in batch.rows_B.tolist()] for batch in batches]
    size = lambda lengths: len(lengths) * max(lengths)
    assert all(size(lengths) <= 30 for lengths in taken)
    assert all(size([*lengths, following[0]]) > 30 for lengths, following in zip(taken, taken[1:]))
    assert [batch.rows_B.tolist() for batch in all_micro_batches(rollouts, 1)] == [
        [i] for i in range(8, -1, -1)
    ]


def test_on_a_gpu_micro_batches_are_a_multiple_of_64_wide_and_compute_the_same(models, monkeypatch):
    """Of 200 lengths there are few widths, and their budget holds with what is added. Two sequences
    of 16,384 tokens, the most that the paper's settings have, fit into 32,768. (Made for a GPU, on
    a CPU.)"""

    def for_a_gpu(rollouts, tokens):
        made = torch.tensor
        with monkeypatch.context() as patch:
            patch.setattr(torch, "tensor", lambda array, device: made(array))
            return list(
                micro_batches(
                    rollouts, list(range(len(rollouts))), tokens, torch.device("cuda"), 0, 1
                )
            )

    some = [rollout(0, i, [1, 2], np.arange(3 + i) % 18) for i in range(200)]
    batches = for_a_gpu(some, 1024)
    assert {batch.inputs_BT.shape[1] for batch in batches} == {64, 128, 192, 256}
    assert all(batch.inputs_BT.numel() <= 1024 for batch in batches)
    (batch,) = for_a_gpu([rollout(0, i, [1] * 2048, [2] * 14_336) for i in range(2)], 32_768)
    assert batch.inputs_BT.shape == (2, 16_384)
    policy = Policy(load_model(models["llama"], CPU, torch.float32))
    alone = {
        batch.rows_B.item(): policy(batch, True)[0][batch.sampled_BT]
        for batch in all_micro_batches(some[:9], 1)
    }
    (batch,) = for_a_gpu(some[:9], 1024)
    logprobs_BT, _ = policy(batch, True)
    for row, which in enumerate(batch.rows_B.tolist()):
        torch.testing.assert_close(
            logprobs_BT[row][batch.sampled_BT[row]], alone[which], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("ranks", [2, 3])
def test_micro_batches_are_even_over_the_ranks(ranks):
    """All ranks have the same number of them, within the limit, and nearly the same to do; every
    row is on one rank."""
    rng = np.random.default_rng(0)
    rollouts = [
        rollout(0, i, [1, 2], rng.integers(18, size=n))
        for i, n in enumerate(rng.integers(30, 80, size=100))
    ]
    for tokens in (1, 700, 4000, 10_000):
        found = [all_micro_batches(rollouts, tokens, rank, ranks) for rank in range(ranks)]
        assert len({len(batches) for batches in found}) == 1
        real = [[batch for batch in batches if batch.sampled_BT.any()] for batches in found]
        rows = [row for batches in real for batch in batches for row in batch.rows_B.tolist()]
        assert sorted(rows) == list(range(100))
        sizes = [[batch.inputs_BT.numel() for batch in batches] for batches in real]
        assert all(size <= tokens or tokens == 1 for size in sum(sizes, []))
        work = [sum(size) for size in sizes]
        assert max(work) < 1.12 * min(work)
        if (
            tokens == 1
            # 100 single rows: where they are not even, the last ranks get one that counts for
            # nothing
        ):
            sentinels = [len(all_) - len(own) for all_, own in zip(found, real)]
            assert sentinels == {2: [0, 0], 3: [0, 1, 1]}[ranks]


def test_pitfall_10_lengths_and_not_padding_ids_say_what_counts():
    """EOS with the id that also pads (0 here) keeps its place in the loss; padding gets none."""
    rollouts = [rollout(0, 0, [1, 2], [3, 4, 0]), rollout(0, 1, [1, 2], [3, 4, 5, 6, 7, 0])]
    (batch,) = all_micro_batches(rollouts, 100)
    assert batch.sampled_BT.sum(1).tolist() == [6, 3]
    assert batch.targets_BT[batch.sampled_BT].tolist() == [3, 4, 5, 6, 7, 0, 3, 4, 0]


def test_pitfall_9_the_trained_tokens_are_the_sampled_ids():
    rollouts = [r for group in batch_of_groups() for r in group.rollouts.values()]
    seen = {}
    for batch in all_micro_batches(rollouts, 40):
        for row, which in enumerate(batch.rows_B.tolist()):
            mask = batch.sampled_BT[row]
            seen[which] = (
                batch.targets_BT[row][mask].tolist(),
                batch.generator_logprobs_BT[row][mask].tolist(),
            )
            prompt = rollouts[which].request.prompt_ids
            assert batch.inputs_BT[row][: len(prompt)].tolist() == prompt
    for which, r in enumerate(rollouts):
        assert seen[which] == (r.tokens[r.sampled].tolist(), r.logprobs[r.sampled].tolist())


class LargestTensor(TorchDispatchMode):
    """Numbers in the largest tensor that is made meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.numbers = max(
            [self.numbers, *(t.numel() for t in tree_leaves(made) if isinstance(t, torch.Tensor))]
        )
        return made


@pytest.mark.slow
def test_nothing_of_a_long_sequence_is_quadratic_in_its_length(models, tmp_path, monkeypatch):
    """A step of training and a few of the engine, with the attention that GPUs have. With the one
    that CPUs have there is a mask, and a score, for each pair of positions: the negative
    control."""

    def as_on_a_gpu(*arguments):
        model = load_model(*arguments)
        model.set_attn_implementation("sdpa")
        return model

    def step(folder, length):
        group = [rollout(0, i, [1] * 16, np.arange(length - 16 - i) % 18) for i in range(2)]
        with LargestTensor() as largest:
            train_on(
                settings(gradient_checkpointing=True),
                models["qwen3"],
                [[make_group(0, group, [1, 0])]],
                folder,
            )
        return largest.numbers

    if not torch.cuda.is_available():
        assert step(tmp_path / "a", 1024) > 1000**2
    monkeypatch.setattr(steps, "load_model", as_on_a_gpu)
    most, length = (
        100,
        8192,
    )  # numbers for each position: more than any part of these models is wide
    assert step(tmp_path / "b", length) < most * length

    model, tokenizer = (
        as_on_a_gpu(models["qwen3"], CPU, torch.float32),
        load_tokenizer(models["qwen3"]),
    )
    engine = TorchEngine(model, make_decoding(tokenizer, Settings(prompt_budget=length)), 1)
    with LargestTensor() as largest:
        engine.add([Request(0, 0, [1] * length, 9, (0,))])
        for _ in range(3):
            engine.step()
    assert engine.in_flight and largest.numbers < most * length


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
    found = {
        name: train_on(
            settings(**EXACT, **changes), models["llama"], [batch_of_groups()], tmp_path / name
        )[1][0]
        for name, changes in variants.items()
    }
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
    recipe, budgets = (
        loss.Recipe(fp32_logits=fp32_logits),
        dict(thinking_budget=(30, 30), answer_budget=6),
    )
    chosen = settings(recipe=recipe, dtype="bfloat16", **budgets)
    tokenizer = load_tokenizer(models[kind])
    policy = trainer.make_policy(chosen, load_model(models[kind], CPU, torch.float32), CPU)
    wanted = [Request(0, i, [1, 2, 3], 30, (0, i)) for i in range(16)]

    def mismatch(head_of_generator):
        model = put_on_device(
            load_model(models[kind], CPU, torch.float32), CPU, torch.bfloat16, head_of_generator
        )
        decoding = make_decoding(tokenizer, chosen, fp32_logits=head_of_generator)
        rollouts = sample_all(TorchEngine(model, decoding, 16), wanted)
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
    found = {}
    for share in (False, True):
        chosen, folder = settings(share_prompts=share, **EXACT, **changes), tmp_path / str(share)
        _, (gradient,) = train_on(chosen, models["qwen3"], [groups_with_long_prompts()[1:]], folder)
        found[share] = *lines(folder, "train"), gradient
    assert found[True][0]["loss"] == pytest.approx(found[False][0]["loss"], abs=1e-5)
    if (
        not torch.cuda.is_available()
    ):  # there short prompts are shorter than what widths are rounded to
        assert found[True][0]["compute_flops"] < 0.8 * found[False][0]["compute_flops"]
    for name, values in found[False][1].items():
        torch.testing.assert_close(found[True][1][name], values, atol=1e-5, rtol=1e-4)


# --- several ranks --------------------------------------------------------------------------------

# Tied heads and experts, more micro-batches than ranks and fewer. (In bf16 a row is rounded
# otherwise beside others.)
CASES = {
    "tied": ("llama-grouped-tied", dict(tokens_per_micro_batch=1)),
    "gspo": (
        "qwen3",
        dict(
            tokens_per_micro_batch=60, gradient_checkpointing=True, recipe=loss.Recipe(loss="gspo")
        ),
    ),
    "experts": ("qwen3-moe", dict(tokens_per_micro_batch=10_000)),
    "bf16": ("llama", dict(tokens_per_micro_batch=1, dtype="bfloat16")),
    "shared prompts": ("qwen3", dict(tokens_per_micro_batch=120)),
}


def case(name, ranks=1):
    """Settings of two steps, and the batches."""
    make_batch = (
        partial(groups_with_long_prompts, 3) if name == "shared prompts" else batch_of_groups
    )
    return settings(steps=2, trainers=ranks, **CASES[name][1]), [
        make_batch(seed=0),
        make_batch(seed=1),
    ]


def one_of(rank, ranks, meeting_place, models, folder, shared):
    """A process that is this rank in all of these cases, one after the other."""
    ranks_module.join_ranks(rank, ["cpu"] * ranks, dist.FileStore(meeting_place, ranks))
    for name, parameters in shared.items():
        chosen, batches = case(name, ranks)
        train_rank(rank, chosen, models[CASES[name][0]], batches, folder / name, parameters)
    dist.destroy_process_group()
    os._exit(0)


def on_ranks(ranks, cases, models, folder):
    """Run these cases on so many ranks; the parameters that generators would get, by case."""
    shared = {
        name: SharedParameters(load_model(models[CASES[name][0]], CPU, torch.float32), ranks)
        for name in cases
    }
    multiprocessing.spawn(
        one_of, (ranks, str(folder / "meet"), models, folder, shared), nprocs=ranks
    )
    return shared


def same_course(ours, theirs, rel=1e-4, but=()):
    """Assert that two runs were the same, by their logs: all but what tells of time, and columns
    with these words."""
    for kind in ("train", "validation"):
        assert len(lines(ours, kind)) == len(lines(theirs, kind)) > 0
        for one, other in zip(lines(ours, kind), lines(theirs, kind)):
            assert one.keys() == other.keys()
            for name in one:
                if not any(
                    word in name
                    for word in ("kind", "seconds", "hours", "idle", "per_second", *but)
                ):
                    assert other[name] == pytest.approx(one[name], rel=rel, abs=1e-5), name
    logprobs = [
        [completion.get("trainer_logprobs") for _, line in json_lines(folder / "rollouts.jsonl")
         for completion in line.get("completions", ())] for folder in (ours, theirs)
    ]  # fmt: skip
    assert [*map(bool, logprobs[0])] == [*map(bool, logprobs[1])] and sum(
        map(bool, logprobs[0])
    ) > 8
    for one, other in zip(*map(partial(filter, None), logprobs)):
        assert [value and pytest.approx(value, rel=1e-3, abs=1e-4) for value in one] == other


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
        chosen, batches = case(name)
        train_on(chosen, models[CASES[name][0]], batches, one)
        losses = [line["loss"] for line in lines(one, "train")]
        assert losses[0] != losses[1] and lines(one, "train")[0]["gradient_norm"] > 0
        numbers, others = stored(one), stored(several)
        assert numbers.keys() == others.keys()
        assert all(
            others[key].dtype == torch.float32 and others[key].shape == numbers[key].shape
            for key in numbers
        )
        if name == "bf16":  # the forward is the same to the bit, or nearly
            first, other = lines(one, "train")[0], lines(several, "train")[0]
            assert other["loss"] == pytest.approx(first["loss"], rel=1e-4)
            assert other["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-2)
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


def test_adamw_is_fused_on_a_gpu_and_goes_on_from_the_moments_of_any_checkpoint(
    models, tmp_path, monkeypatch, group_of_one
):
    """There it counts its steps on the GPU. What is fused computes the same, over shards too (tried
    on a CPU)."""
    adamw, given, folder = torch.optim.AdamW, [], tmp_path / "plain"
    chosen, batches = settings(steps=2, dtype="bfloat16"), [batch_of_groups(0), batch_of_groups(1)]
    train_on(chosen, models["llama"], batches, folder)
    moments = checkpoints(folder)[-1] / "optimizer.safetensors"

    class Seen(Exception):
        pass

    def seen(*_, **options):
        given.append(options["fused"])
        raise Seen

    monkeypatch.setattr(torch.optim, "AdamW", seen)
    monkeypatch.setattr(train, "make_policy", lambda settings, model, device: Policy(model))
    model = load_model(models["llama"], CPU, torch.float32)
    for device in ("cpu", "cuda:1"):
        monkeypatch.setattr(train, "devices_here", lambda _, device=device: ([], [device]))
        with pytest.raises(Seen):
            train.train(0, Start(settings(), FIRST, models["llama"], None, None))
    assert given == [False, True]

    policy = Policy(model.to("meta"))
    for fused, where in ((True, "meta"), (False, "cpu")):
        optimizer = SimpleNamespace(defaults={"fused": fused}, state=collections.defaultdict(dict))
        trainer.read_moments(policy, optimizer, moments)
        found = optimizer.state[model.lm_head.weight]
        assert found["step"].device.type == where and found["exp_avg"].device.type == "meta"

    monkeypatch.undo()
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda *a, **options: adamw(*a, **{**options, "fused": True})
    )
    train_on(chosen, models["llama"], batches, tmp_path / "fused")
    same_course(folder, tmp_path / "fused", rel=1e-5)
    for key, values in stored(folder).items():
        torch.testing.assert_close(stored(tmp_path / "fused")[key], values, rtol=1e-5, atol=1e-7)


def test_a_version_is_complete_when_every_rank_has_written_its_part(models):
    model = load_model(models["llama"], CPU, torch.float32)
    shared = SharedParameters(model, ranks=2)
    shared.write(model.named_parameters(), 1, rank=0)
    assert shared.version == -1 and not shared.holds(1)
    shared.write(model.named_parameters(), 1, rank=1)
    assert shared.version == 1 and shared.holds(1)
    shared.begun_R[1] = 2
    assert shared.version == 1 and not shared.holds(1) and not shared.holds(2)
