"""Optimizer steps: batches and micro-batches, gradients against a plain reference, one rank against
several."""

import math
import time
import traceback

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import log
from steps import (
    CPU,
    FIRST,
    batch_of_groups,
    loss_by_hand,
    rollout,
    settings,
    stored,
    train_on,
    train_rank,
)
from torch.distributed.fsdp import FSDPModule

import loss
import train
from core.model import load_model
from core.policy import micro_batches
from core.rollouts import Batch, SharedParameters
from core.settings import Settings
from data.verify import Verdict
from machinery import ranks as ranks_module
from machinery import trainer
from machinery.folder import checkpoints, json_lines

# Of the same run twice. On a GPU the backward of attention adds in an order of its own each time.
SAME = {} if torch.cuda.is_available() else dict(rtol=0, atol=0)


# --- one step -------------------------------------------------------------------------------------


KINDS = "llama llama-grouped-tied qwen3 qwen3-moe deepseek-v3 glm4-moe-lite".split()


@pytest.mark.parametrize("number, kind", [*enumerate(KINDS)])
def test_pitfalls_5_and_11_a_step_is_that_of_single_completions_however_it_is_cut(
    models, tmp_path, number, kind
):
    """Loss and gradient of random groups, with forced tokens, truncated ones and one without a
    verdict; with any budget, layers computed again or not, prompts shared or not."""
    rng, model = np.random.default_rng(number), load_model(models[kind])
    recipe = loss.Recipe(
        aggregation=["sample", "prompt", "token"][number % 3],
        loss=["cispo", "gspo", "dapo"][number // 2],
    )
    groups = batch_of_groups(number, long_prompts=number % 2 == 0)
    groups[-1].verdicts[1] = Verdict(False, "time limit")
    batch = Batch(groups, FIRST)
    assert (~batch.usable_PG).nonzero().tolist() == [[0, 3], [2, 1]]  # truncated; no verdict
    expected = loss_by_hand(model, batch, settings(recipe=recipe))
    expected.backward()
    for again in (True, False, False):
        chosen = settings(
            recipe=recipe,
            tokens_per_micro_batch=int(rng.choice([1, 60, 90, 10_000])),
            gradient_checkpointing=again,
            clip_gradient=math.inf,
        )
        _, (found,) = train_on(chosen, models[kind], [groups], tmp_path)
        (line,) = log(tmp_path, "train")
        assert line["loss"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
        for name, parameter in model.named_parameters():
            atol = 1e-5 * max(1.0, parameter.grad.abs().max().item())
            torch.testing.assert_close(found[name], parameter.grad, atol=atol, rtol=1e-3)


def test_a_token_that_is_too_old_ends_the_run_wherever_the_mistake_was_made(llama, tmp_path):
    chosen, groups = settings(recipe=loss.Recipe(asynchrony="ppo-3")), batch_of_groups()
    groups[1].rollouts[3].versions[-1] = FIRST - 3
    with pytest.raises(AssertionError, match=f"a token of step {FIRST + 1} is 3 steps old"):
        train_on(chosen, llama, [groups], tmp_path)
    assert log(tmp_path, "train") == []


# --- steps that are not finite --------------------------------------------------------------------


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_step_without_variance_or_that_is_not_finite_changes_nothing_and_five_end_the_run(
    llama, tmp_path, monkeypatch, capsys
):
    """What is not finite is said once. The run ends with a checkpoint, and with parameters that are
    finite. A generator with other parameters is said once too: what these completions say of their
    log-probabilities is made up."""
    factors, policy_loss = iter([math.nan, math.nan, 1] + [math.nan] * 5), loss.policy_loss

    def spoilt(*arguments):
        value, sums = policy_loss(*arguments)
        return value * next(factors), sums

    monkeypatch.setattr(loss, "policy_loss", spoilt)
    batches = [batch_of_groups(seed) for seed in range(20)]
    for group in batches[0]:
        group.verdicts = dict.fromkeys(range(4), Verdict(True))
    chosen = settings(steps=20, validation_every=1)
    run, gradients = train_on(chosen, llama, batches, tmp_path)
    flat, *others = log(tmp_path, "train")
    expected = {"loss": 0, "zero_variance_fraction": 1, "entropy": None, "groups_counted": 0}
    assert (expected | {"skipped": 0}).items() <= flat.items()
    assert [line["skipped"] for line in others] == [1, 1, 0] + [1] * 5
    assert [line["loss"] is None for line in others] == [bool(line["skipped"]) for line in others]
    assert len(gradients) == 1
    assert "of each of the last 5 steps is not finite" in run.failure
    said = capsys.readouterr().err
    assert f"gradient of step {FIRST + 2} is not finite" in said
    assert said.count("is not finite") == said.count("generator and trainer differ") == 1
    assert checkpoints(tmp_path)[-1].name == f"step-{others[-1]['step']:06d}"


# --- micro-batches --------------------------------------------------------------------------------


def all_micro_batches(rollouts, tokens, rank=0, ranks=1, share=False, device=CPU):
    rows = list(range(len(rollouts)))
    return list(micro_batches(rollouts, rows, tokens, device, rank, ranks, share))


@pytest.mark.parametrize(
    "ranks, device, share", [(1, "cpu", True), (3, "cpu", False), (2, "cuda", False)]
)
def test_pitfalls_9_and_10_micro_batches_hold_the_sampled_tokens_within_their_budget(
    monkeypatch, ranks, device, share
):
    """Every row is at one rank, all ranks have as many micro-batches, and on a GPU widths are
    multiples of 64. (Made for a GPU, on a CPU.)"""
    made, rng = torch.tensor, np.random.default_rng(ranks)
    monkeypatch.setattr(torch, "tensor", lambda array, device=None: made(array))
    rollouts = []
    for i, n in enumerate(rng.integers(3, 200, size=60)):
        rollouts.append(rollout(0, i, [1 + i % 3] * (1 + i % 5), rng.integers(3, size=n)))
    for tokens in (1, 300, 4000, 20_000):
        found = [
            all_micro_batches(rollouts, tokens, rank, ranks, share, torch.device(device))
            for rank in range(ranks)
        ]
        assert len({*map(len, found)}) == 1
        real = [m for m in sum(found, []) if m.sampled_BT.any()]
        assert sorted(torch.cat([m.rows_B for m in real]).tolist()) == list(range(60))
        for m in real:
            L, (B, T) = 0 if m.prompts_PL is None else m.prompts_PL.shape[1], m.inputs_BT.shape
            assert B == 1 or B * (T + L) <= tokens + B
            assert device == "cpu" or T % 64 == 0
        if tokens > 1:  # the ranks have about the same to do, and no micro-batch is left half full
            work = [sum(m.inputs_BT.numel() for m in batches) for batches in found]
            assert max(work) < 1.3 * min(work)
            assert sum(work) > 0.5 * tokens * (len(real) - ranks)


def test_prompts_are_shared_if_a_micro_batch_holds_several_sequences():
    """Those of a prompt come together if it holds fewer than there are prompts."""
    rollouts = [rollout(g, i, [g] * 30, [1] * (5 + 7 * i)) for i in range(3) for g in range(4)]
    for tokens, prompts in ((10_000, [4]), (150, [1] * 4), (60, [])):
        batches = all_micro_batches(rollouts, tokens, share=True)
        assert [len(m.prompts_PL) for m in batches if m.prompts_PL is not None] == prompts


# --- 16 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, error", [("bfloat16", 0.2), ("float16", 0.03)])
def test_gradients_of_a_trunk_in_16_bits_are_those_of_the_fp32_parameters(
    llama, tmp_path, group_of_one, dtype, error
):
    """They come back in fp32, close to those of fp32 arithmetic, and the same when layers are
    computed again."""

    def gradients(**changes):
        chosen = settings(**{"dtype": dtype, "clip_gradient": math.inf} | changes)
        _, (found,) = train_on(chosen, llama, [batch_of_groups()], tmp_path)
        return found

    plain, shared = gradients(share_prompts=False), gradients()
    assert {values.dtype for values in stored(tmp_path).values()} == {torch.float32}
    torch.testing.assert_close(plain, gradients(gradient_checkpointing=True))
    for name, exact in gradients(dtype="float32").items():
        for found in (plain[name], shared[name]):
            assert found.dtype == torch.float32
            assert 0 < (found - exact).norm() < error * exact.norm()


def test_a_scale_that_makes_gradients_overflow_is_halved_until_they_do_not(
    llama, tmp_path, group_of_one, monkeypatch
):
    """Also in more steps than may fail. What is left of it when the run goes on is as it was."""
    monkeypatch.setattr(trainer, "FIRST_SCALE", 2.0**32)
    chosen = settings(24, dtype="float16", recipe=loss.Recipe(asynchrony="pipeline-24"))
    train_on(chosen, llama, [batch_of_groups(step) for step in range(24)], tmp_path)
    lines = log(tmp_path, "train")
    rescaled = [line["rescaled"] for line in lines]
    assert rescaled[:6] == [1] * 6 and rescaled[-1] == 0
    assert [line["skipped"] for line in lines] == [0] * 24
    scale = trainer.loss_scale(chosen, CPU, checkpoints(tmp_path)[-1])
    assert scale == 2.0 ** (32 - sum(rescaled)) == lines[-1]["loss_scale"]
    assert [trainer.next_scale(scale, False, step) / scale for step in (999, 1000)] == [1, 2]


def test_the_layers_of_the_language_part_are_gathered_one_by_one(models, group_of_one):
    """The tower, which is never called, never is."""
    model = load_model(models["gemma3-pictures"])
    trainer.make_policy(settings(dtype="bfloat16"), model, CPU)
    parts = *model.get_decoder().layers, model.model.vision_tower
    assert len(parts) == 3 and all(isinstance(part, FSDPModule) for part in parts)


# --- what fits ------------------------------------------------------------------------------------


def test_what_is_tried_comes_in_order_and_a_flag_is_kept():
    def tried(longest, again=None, tokens=None):
        asked = Settings(gradient_checkpointing=again, tokens_per_micro_batch=tokens)
        for chosen, _ in trainer.choices(asked, longest):
            assert chosen.share_prompts != chosen.gradient_checkpointing
            yield chosen.gradient_checkpointing, chosen.tokens_per_micro_batch

    first = [(False, 32_768), (True, 32_768)]
    assert [*tried(16_384)] == [*first, (True, 16_384)]
    assert [*tried(10_000)] == [*first, (True, 16_384), (True, 8192)]  # one sequence
    assert [*tried(10_000, again=False)] == [(False, 32_768 // n) for n in (1, 2, 4)]
    assert [*tried(100, tokens=500)] == [(False, 500), (True, 500)]


def test_the_try_of_the_largest_micro_batch_leaves_no_trace(llama, tmp_path, monkeypatch):
    """On a CPU. It is as large as a micro-batch may be, and the run is what it would have been."""
    fed, make, chosen = [], train.make_optimizer, settings(tokens_per_micro_batch=1000)

    def tried(settings, policy):
        optimizer = make(settings, policy)
        seen = policy.register_forward_pre_hook(lambda _, given: fed.append(given[0].inputs_BT))
        trainer.try_largest_step(settings, policy, optimizer, 130)
        seen.remove()
        return optimizer

    after = []
    for way in (make, tried):
        monkeypatch.setattr(train, "make_optimizer", way)
        train_on(chosen, llama, [batch_of_groups()], tmp_path)
        after.append(stored(tmp_path))
    assert 900 < fed[0].numel() <= 1000
    torch.testing.assert_close(*after, **SAME)


# --- several ranks --------------------------------------------------------------------------------

# Kinds of models, and settings: tied heads, experts, prompts that are shared or not. One row each
# is a micro-batch, if nothing else is said. (In 16 bits a row is rounded otherwise beside others.)
GSPO = dict(recipe=loss.Recipe(loss="gspo"), gradient_checkpointing=True)
CASES = {
    "tied": ("llama-grouped-tied", {}),
    "gspo": ("qwen3", GSPO | dict(tokens_per_micro_batch=60)),
    "experts": ("qwen3-moe", dict(tokens_per_micro_batch=120)),
    "16 bits": ("llama", dict(dtype="bfloat16")),
    "pictures": ("gemma3-pictures", {}),
    "lora": ("llama-grouped-tied", dict(lora_rank=2)),
    "lora-16 bits": ("llama", dict(lora_rank=2, dtype="float16")),
}


def waits_for_rank_0(_=0):
    assert ranks_module.from_rank_0(lambda: time.sleep(9) or "it came") == "it came"


@pytest.mark.slow
def test_rank_0_may_take_longer_than_the_others_wait_in_a_collective():
    """As for generators."""
    chosen = settings(trainers=2, wait_timeout=6.0)
    with ranks_module.other_ranks(chosen, waits_for_rank_0, (), None):
        waits_for_rank_0()


def train_cases(rank, ranks, models, folder, shared):
    """Be this rank in these cases, one after the other."""
    for name, parameters in shared.items():
        kind, changes = CASES[name]
        chosen = settings(2, trainers=ranks, **{"tokens_per_micro_batch": 1} | changes)
        batches = [batch_of_groups(seed, long_prompts=True) for seed in (0, 1)]
        try:
            train_rank(rank, chosen, models[kind], batches, folder / name, parameters)
        except Exception:
            traceback.print_exc()  # pytest shows what another rank prints
            raise


def course(folder, but):
    """What a run has logged but what tells of time, without columns that have one more word;
    log pi_train of the completions that it has kept; and the moments of the optimizer."""
    left_out = "kind", "seconds", "hours", "idle", "per_second", but
    logged = [
        {name: line[name] for name in line if not any(word in name for word in left_out)}
        for line in log(folder, "train") + log(folder, "validation")
    ]
    kept = [line.get("completions", ()) for line in json_lines(folder / "rollouts.jsonl")]
    logprobs = [each.get("trainer_logprobs") for completions in kept for each in completions]
    assert len(logprobs) - logprobs.count(None) > 10
    moments = {name: values for name, values in stored(folder).items() if "/exp_avg" in name}
    return logged, logprobs, moments


@pytest.mark.parametrize(
    "ranks, cases", [(2, ["tied"]), pytest.param(3, [*CASES][1:], marks=pytest.mark.slow)]
)
def test_pitfall_5_losses_and_gradients_are_the_same_with_one_and_several_ranks(
    models, tmp_path, ranks, cases
):
    """All that is logged, the mismatch too, and the checkpoint. What the generators get is what the
    checkpoint has."""
    shared = {name: load_model(models[CASES[name][0]]) for name in cases}
    shared = {name: SharedParameters(model, ranks) for name, model in shared.items()}
    given = ranks, models, tmp_path, shared
    with ranks_module.other_ranks(settings(trainers=ranks), train_cases, given, None):
        train_cases(0, *given)
    assert not dist.is_initialized()
    for name in cases:
        with ranks_module.other_ranks(settings(**CASES[name][1]), None, (), None):
            train_cases(0, 1, models, tmp_path / "one", {name: None})
        one, several = tmp_path / "one" / name, tmp_path / name
        if "16 bits" in name:  # the forward of the first step
            first, other = (log(folder, "train")[0] for folder in (one, several))
            assert other["loss"] == pytest.approx(first["loss"], rel=1e-4)
            assert other["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-2)
        else:
            # A prompt is fed once for each micro-batch, so FLOPs depend on how a batch is cut.
            but = "flops" if name == "experts" else "nothing else"
            expected, found = course(one, but), course(several, but)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_dtype=False)
        assert shared[name].holds(FIRST + 2)
        newest, views = stored(several), shared[name].views()
        for key, parameter in load_model(models[CASES[name][0]]).named_parameters():
            # What reads pictures is not sent, and stays as it was.
            assert (key in views) != ("vision_tower" in key or "projector" in key)
            assert torch.equal(views.get(key, parameter), newest[key])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_another_optimizer_is_chosen_in_one_place_and_goes_on_from_a_checkpoint(
    llama, tmp_path, monkeypatch, dtype
):
    """SGD with momentum and two groups of parameters; whole and in shards."""

    def sgd(settings, policy):
        first, *others = policy.parameters()
        groups = [{"params": [first]}, {"params": others}]
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=0.9)

    monkeypatch.setattr(train, "make_optimizer", sgd)
    chosen = settings(steps=2, dtype=dtype, checkpoint_every=1, keep_checkpoints=2)
    batches = [batch_of_groups(0), batch_of_groups(1)]
    with ranks_module.other_ranks(chosen, None, (), None):
        train_rank(0, chosen, llama, batches, tmp_path / "whole")
        first, _ = checkpoints(tmp_path / "whole")
        again = dict(step=FIRST + 1, checkpoint=first)
        train_rank(0, chosen, str(first / "model"), batches[1:], tmp_path / "second", **again)
    expected, found = stored(tmp_path / "whole"), stored(tmp_path / "second")
    assert any(name.endswith("/momentum_buffer") for name in expected)
    torch.testing.assert_close(found, expected, **SAME)
