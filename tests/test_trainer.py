"""Optimizer steps: batches and micro-batches, gradients against a plain reference, one rank against
several."""

import collections
import dataclasses
import math
import os
import warnings
from datetime import timedelta
from functools import partial

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
from core.engine import sample_all
from core.model import load_model, load_tokenizer, make_decoding, put_on_device
from core.policy import Policy, micro_batches
from core.rollouts import Request, SharedParameters
from core.settings import Settings
from core.torch_engine import TorchEngine, engine_that_fits
from data.verify import Verdict
from machinery import ranks as ranks_module
from machinery import trainer
from machinery.folder import checkpoints, json_lines

EXACT = dict(clip_gradient=math.inf)  # gradients as they are


def all_rollouts(groups):
    return [rollout for group in groups for rollout in group.rollouts.values()]


def plain_logprobs(model, rollout):
    """log pi of all tokens of a completion [T], from a plain forward of one unpadded sequence."""
    prompt = len(rollout.request.prompt_ids)
    ids = torch.tensor([rollout.request.prompt_ids + rollout.tokens.tolist()])
    logprobs = torch.log_softmax(model(input_ids=ids).logits[0], -1)[prompt - 1 : -1]
    return logprobs.gather(-1, ids[0, prompt:, None])[:, 0]


# --- one step -------------------------------------------------------------------------------------


def centred_rewards(group):
    """Reward minus mean of each completion of a group that has a verdict and is not truncated, with
    the completion; [] if all have the same."""
    members = []
    for i, r in group.rollouts.items():
        if not r.truncated and group.verdicts[i].failure is None:
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


def loss_by_hand(model, groups, name, aggregation):
    """The loss of a step, from single unpadded sequences and sums over single tokens."""
    counted = [group for group in map(centred_rewards, groups) if group]
    advantages = [advantage for group in counted for advantage, _ in group]
    std = (sum(a * a for a in advantages) / len(advantages)) ** 0.5
    of_batch, total = sum(int(r.sampled.sum()) for group in counted for _, r in group), 0.0
    for group in counted:
        of_group = sum(int(r.sampled.sum()) for _, r in group)
        for advantage, r in group:
            logprobs = plain_logprobs(model, r)[r.sampled]
            ratios = (logprobs - torch.tensor(r.logprobs[r.sampled])).exp()
            terms = terms_by_hand(name, ratios, advantage / std, logprobs)
            tokens = {
                "sample": len(advantages) * len(terms),
                "prompt": len(counted) * of_group,
                "token": of_batch,
            }
            total = total - terms.sum() / tokens[aggregation]
    return total


KINDS = ["llama", "llama-grouped-tied", "qwen3", "qwen3-moe", "deepseek-v3", "glm4-moe-lite"]


@pytest.mark.parametrize("number, kind", [*enumerate(KINDS)])
def test_pitfalls_5_and_11_a_step_is_that_of_single_completions_however_it_is_cut(
    models, tmp_path, number, kind
):
    """Loss and gradient of random groups, with forced tokens, truncated ones and one without a
    verdict; with any budget, layers computed again or not, prompts shared or not."""
    rng, model = np.random.default_rng(number), load_model(models[kind])
    recipe = loss.Recipe(
        aggregation=["sample", "prompt", "token"][number % 3],
        loss=["cispo", "gspo", "dapo", "dapo"][number % 4],
    )
    make = batch_of_groups if number % 2 else groups_with_long_prompts
    groups = make(seed=number)
    groups[-1].verdicts[1] = Verdict(False, "time limit")
    expected = loss_by_hand(model, groups, recipe.loss, recipe.aggregation)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for trial, share in enumerate((False, True, True)):
        chosen = settings(
            recipe=recipe,
            tokens_per_micro_batch=int(rng.choice([1, 60, 90, 10_000])),
            gradient_checkpointing=not share,
            share_prompts=share,
            **EXACT,
        )
        folder = tmp_path / str(trial)
        _, (found,) = train_on(chosen, models[kind], [groups], folder)
        (line,) = lines(folder, "train")
        assert line["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
        for name, values in gradients.items():
            atol = 1e-5 * max(1.0, values.abs().max().item())
            torch.testing.assert_close(found[name], values, atol=atol, rtol=1e-3)


def test_the_log_says_how_far_the_batch_is_from_the_policy(models, tmp_path):
    """Ratios and ages token by token from single sequences."""
    groups = batch_of_groups()
    groups[1].verdicts = {i: Verdict(True) for i in range(4)}  # does not count
    for group in groups:
        for i, r in group.rollouts.items():
            # A completion goes on while parameters change, but for one in each group.
            ages = np.zeros(len(r.tokens)) if i == 2 else np.arange(len(r.tokens)) // 4
            group.rollouts[i] = dataclasses.replace(r, versions=(FIRST - ages).astype(np.int32))
    train_on(settings(tokens_per_micro_batch=60), models["llama"], [groups], tmp_path)
    (line,) = lines(tmp_path, "train")
    assert line["groups_counted"] == 2
    assert line["zero_variance_fraction"] == pytest.approx(1 / 3)

    before, by_age = load_model(models["llama"]), collections.defaultdict(list)
    for r in all_rollouts([groups[0], groups[2]]):
        if not r.truncated:
            log_ratios = plain_logprobs(before, r).detach() - torch.tensor(r.logprobs)
            for t in r.sampled.nonzero()[0]:
                by_age[FIRST - r.versions[t]].append(log_ratios[t].item())
    log_rho = np.concatenate([*by_age.values()])
    rho = np.exp(log_rho)
    expected = {
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max(),
        "clipped_fraction": (rho > loss.Recipe.eps_max).mean(),
        "kl_estimate": (rho - 1 - log_rho).mean(),
        "effective_sample_size": rho.sum() ** 2 / len(rho) / (rho**2).sum(),
    }
    for age, log_ratios in by_age.items():
        expected[f"log_ratio_age_{age}"] = np.abs(log_ratios).mean()
    for name, value in expected.items():
        assert line[name] == pytest.approx(value, rel=1e-3), name
    assert {name for name in line if "age_" in name} <= {*expected}


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
    assert line["skipped"] == line["groups_counted"] == 0
    before, after = load_model(models["llama"]), stored(tmp_path)
    for name, values in before.named_parameters():
        assert torch.equal(after[name], values)


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


def test_a_step_that_is_not_finite_is_skipped_and_said_once_and_five_end_the_run(
    models, tmp_path, monkeypatch, capsys
):
    """With a checkpoint, and with parameters that are finite."""
    spoil(monkeypatch, bad_calls={2, 3, *range(5, 100)})
    batches = [batch_of_groups(seed % 4) for seed in range(20)]
    chosen = settings(steps=20, validation_every=1)
    run, gradients = train_on(chosen, models["llama"], batches, tmp_path)
    logged = lines(tmp_path, "train")
    assert [line["skipped"] for line in logged] == [0, 1, 1, 0] + [1] * 5
    assert [line["loss"] is None for line in logged] == [bool(line["skipped"]) for line in logged]
    assert len(gradients) == 2
    assert "is not finite. So were the 4 steps before it" in run.failure
    assert f"gradient of step {FIRST + 2} is not finite" in capsys.readouterr().err
    assert len(lines(tmp_path, "warning")) == len(
        {each["about"] for each in lines(tmp_path, "warning")}
    )
    assert checkpoints(tmp_path)[-1].name == f"step-{logged[-1]['step']:06d}"
    assert all(torch.isfinite(values).all() for values in stored(tmp_path).values())


# --- micro-batches --------------------------------------------------------------------------------


def all_micro_batches(rollouts, tokens, rank=0, ranks=1, share=False, device=CPU):
    rows = list(range(len(rollouts)))
    return list(micro_batches(rollouts, rows, tokens, device, rank, ranks, share))


def groups_with_long_prompts(number=4, seed=0):
    """Groups with prompts of 12 to 20 tokens, two of one prompt, and completions of 1 to 9."""
    rng, groups = np.random.default_rng(seed), []
    prompts = [rng.integers(18, size=n).tolist() for n in rng.integers(12, 20, size=number - 1)]
    for i, prompt in enumerate([prompts[0], *prompts]):
        lengths = [1 + (i + 3 * j) % 9 for j in range(4)]
        members = [rollout(i, j, prompt, rng.integers(18, size=n)) for j, n in enumerate(lengths)]
        groups.append(make_group(i, members, [True, False, False, i > 1]))
    return groups


@pytest.mark.parametrize(
    "ranks, device, share", [(1, "cpu", True), (3, "cpu", False), (2, "cuda", False)]
)
def test_pitfalls_9_and_10_micro_batches_hold_the_sampled_tokens_within_their_budget(
    monkeypatch, ranks, device, share
):
    """Random completions, whose padding has the id of EOS. Every row is at one rank; all ranks have
    the same number of micro-batches; on a GPU, widths are multiples of 64. (Made for a GPU, on a
    CPU.)"""
    made, rng = torch.tensor, np.random.default_rng(ranks)
    monkeypatch.setattr(torch, "tensor", lambda array, device=None: made(array))
    for tokens in (1, 300, 4000, 20_000):
        rollouts = []
        for i, n in enumerate(rng.integers(3, 200, size=60)):
            completion, sampled = rng.integers(3, size=n), rng.random(n) < 0.9
            rollouts.append(rollout(0, i, [1 + i % 3] * (1 + i % 5), completion, sampled))
        found = [
            all_micro_batches(rollouts, tokens, rank, ranks, share, torch.device(device))
            for rank in range(ranks)
        ]
        assert len({len(batches) for batches in found}) == 1
        real = [m for batches in found for m in batches if m.sampled_BT.any()]
        assert sorted(row for m in real for row in m.rows_B.tolist()) == list(range(60))
        for m in real:
            prompts = 0 if m.prompts_PL is None else m.prompts_PL.shape[1]
            B, T = m.inputs_BT.shape
            assert B == 1 or B * (T + prompts) <= tokens + B
            assert device == "cpu" or T % 64 == 0
            for i, row in enumerate(m.rows_B.tolist()):
                r, sampled_T = rollouts[row], m.sampled_BT[i]
                prompt = r.request.prompt_ids[-1:] if prompts else r.request.prompt_ids
                assert m.inputs_BT[i, : len(prompt)].tolist() == prompt
                assert m.targets_BT[i][sampled_T].tolist() == r.tokens[r.sampled].tolist()
                logprobs = m.generator_logprobs_BT[i][sampled_T].tolist()
                assert logprobs == r.logprobs[r.sampled].tolist()
        if tokens > 1:  # the ranks have about the same to do, and no micro-batch is left half full
            work = [sum(m.inputs_BT.numel() for m in batches) for batches in found]
            assert max(work) < 1.3 * min(work)
            assert sum(work) > 0.5 * tokens * (len(real) - ranks)


def test_prompts_are_shared_if_a_micro_batch_holds_several_sequences():
    """Those of a prompt come together if it holds fewer than there are prompts; else those of like
    length do."""
    rollouts = [rollout(g, i, [g] * 30, [1] * (5 + 7 * i)) for i in range(3) for g in range(4)]
    for tokens, prompts in ((10_000, [4]), (150, [1] * 4), (60, None)):
        batches = all_micro_batches(rollouts, tokens, share=True)
        shared = [m.prompts_PL for m in batches if m.prompts_PL is not None]
        assert [len(prompts_PL) for prompts_PL in shared] == (prompts or [])
        lengths = [len(rollouts[row].tokens) for m in batches for row in m.rows_B.tolist()]
        assert (lengths == sorted(lengths, reverse=True)) == (prompts in ([4], None))


def test_a_batch_in_which_no_group_counts_has_no_micro_batch():
    with warnings.catch_warnings(action="error"):
        assert not [*micro_batches([rollout(0, 0, [1], [1])], [], 64, CPU, 0, 1, True)]


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


# --- what fits ------------------------------------------------------------------------------------


def test_what_is_tried_comes_in_order_and_a_flag_is_kept():
    def tried(device, longest, again=None, tokens=None):
        asked = Settings(gradient_checkpointing=again, tokens_per_micro_batch=tokens)
        found = [chosen for chosen, _ in trainer.choices(asked, device, longest)]
        assert all(each.share_prompts != each.gradient_checkpointing for each in found)
        return [(each.gradient_checkpointing, each.tokens_per_micro_batch) for each in found]

    gpu = torch.device("cuda:0")
    assert tried(CPU, 16_384) == [(False, 4096)]
    first = [(False, 32_768), (True, 32_768)]
    assert tried(gpu, 16_384) == [*first, (True, 16_384)]
    assert tried(gpu, 10_000) == [*first, (True, 16_384), (True, 8192)]  # one sequence
    assert tried(gpu, 10_000, again=False) == [(False, 32_768 // n) for n in (1, 2, 4)]
    assert tried(gpu, 10_000, tokens=500) == [(False, 500), (True, 500)]
    assert tried(gpu, 10_000, again=True, tokens=500) == [(True, 500)]


def test_the_try_of_the_largest_micro_batch_leaves_no_trace(models, tmp_path, monkeypatch):
    """On a CPU. It is as large as a micro-batch may be, and the run is what it would have been."""
    fed, tries = [], trainer.try_largest_step
    chosen = settings(steps=2, tokens_per_micro_batch=1000)
    batches = [batch_of_groups(0), batch_of_groups(1)]
    train_on(chosen, models["llama"], batches, tmp_path / "plain")
    make = train.make_optimizer

    def tried(settings, policy):
        optimizer = make(settings, policy)
        seen = policy.register_forward_pre_hook(lambda _, given: fed.append(given[0]))
        tries(settings, policy, optimizer, 130)
        seen.remove()
        return optimizer

    monkeypatch.setattr(train, "make_optimizer", tried)
    train_on(chosen, models["llama"], batches, tmp_path / "tried")
    assert 900 < fed[0].inputs_BT.numel() <= 1000
    expected, found = stored(tmp_path / "plain"), stored(tmp_path / "tried")
    assert all(torch.equal(found[name], values) for name, values in expected.items())


def test_an_engine_has_as_many_slots_as_fit_and_samples_as_any(models, monkeypatch):
    fill = TorchEngine.fill_all_slots

    def refuses(engine):
        fill(engine)
        if engine.slots > 40:
            raise torch.OutOfMemoryError("it is full")

    monkeypatch.setattr(TorchEngine, "fill_all_slots", refuses)
    tokenizer, model = load_tokenizer(models["llama"]), load_model(models["llama"])
    decoding = make_decoding(tokenizer, Settings(thinking_budget=(9, 9), answer_budget=4))
    engine, plain = engine_that_fits(model, decoding, 128), TorchEngine(model, decoding, 32)
    assert engine.slots == 32
    wanted = [Request(0, i, [1, 2, 3], 9, (0, i)) for i in range(40)]
    for one, other in zip(sample_all(engine, wanted), sample_all(plain, wanted)):
        assert one.tokens.tolist() == other.tokens.tolist()


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
            is_shared = name in ("shared prompts", "experts")
            same_course(one, several, but=["flops"] if is_shared else [])
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
    for device in ("cpu", "cuda:1"):
        policy = Policy(load_model(models["llama"]), torch.device(device))
        with pytest.raises(Seen):
            train.make_optimizer(settings(), policy)
    assert given == [False, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_optimizer_is_chosen_in_one_place_and_goes_on_from_a_checkpoint(
    models, tmp_path, monkeypatch, dtype
):
    """SGD with momentum and two groups of parameters; whole and in shards."""

    def sgd(settings, policy):
        first, *others = policy.parameters()
        groups = [{"params": [first]}, {"params": others}]
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=0.9)

    monkeypatch.setattr(train, "make_optimizer", sgd)
    chosen = settings(steps=2, dtype=dtype)
    batches = [batch_of_groups(0), batch_of_groups(1)]
    with ranks_module.other_ranks(chosen, None, (), None):
        train_on(chosen, models["llama"], batches, tmp_path / "whole")
        first = dataclasses.replace(chosen, steps=FIRST + 1)
        train_on(first, models["llama"], batches[:1], tmp_path / "first")
        checkpoint = checkpoints(tmp_path / "first")[-1]
        folder, moments = tmp_path / "second", checkpoint / "optimizer.safetensors"
        name = str(checkpoint / "model")
        train_rank(0, chosen, name, batches[1:], folder, step=FIRST + 1, moments=moments)
    expected, found = stored(tmp_path / "whole"), stored(folder)
    assert any(name.endswith("/momentum_buffer") for name in expected)
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


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
