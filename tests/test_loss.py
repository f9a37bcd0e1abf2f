"""loss.py against worked examples, and against references written as plain loops over single
tokens."""

import dataclasses
import math
import re
from typing import get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import loss
from loss import RECIPES, Recipe

RIGHT, WRONG = 1.0, -1.0


def tensor(*rows):
    return torch.tensor(rows)


# --- recipes --------------------------------------------------------------------------------------


def test_recipes_are_the_table_of_the_study():
    columns = ("asynchrony", "loss", "aggregation", "advantage_norm", "fp32_logits", "zero_variance_filter",
               "no_positive_resampling", "length_control")  # fmt: skip
    table = {
        "scalerl": ("pipeline-8", "cispo", "prompt", "batch", True, True, True, "interruption"),
        "base": ("ppo-8", "dapo", "sample", "prompt", False, False, False, "interruption"),
        "grpo": ("ppo-8", "grpo", "sample", "prompt", False, False, False, "interruption"),
        "dapo": ("ppo-8", "dapo", "prompt", "prompt", False, True, False, "interruption"),
        "magistral": ("pipeline-8", "dapo", "prompt", "batch", False, True, False, "interruption"),
        "minimax": ("ppo-8", "cispo", "prompt", "prompt", True, True, False, "interruption"),
    }
    assert {
        name: tuple(getattr(recipe, c) for c in columns) for name, recipe in RECIPES.items()
    } == table
    assert all(recipe.recipe == name for name, recipe in RECIPES.items())
    assert [round(48 * RECIPES[name].batch_factor) for name in table] == [48, 48, 48, 80, 80, 80]


@pytest.mark.parametrize("axis", loss.Axis.__args__)
def test_leave_one_out_changes_one_axis_to_its_base_value(axis):
    recipe = loss.leave_one_out(axis)
    changed = [
        f.name
        for f in dataclasses.fields(Recipe)
        if getattr(recipe, f.name) != getattr(Recipe(), f.name)
    ]
    assert sorted(changed) == sorted(["leave_out", axis])
    expected = "penalty" if axis == "length_control" else getattr(RECIPES["base"], axis)
    assert getattr(recipe, axis) == expected


# --- asynchrony -----------------------------------------------------------------------------------


def test_asynchrony_names():
    assert loss.parse_asynchrony("pipeline-8") == ("pipeline", 8)
    assert loss.parse_asynchrony("ppo-1") == ("ppo", 1)
    for wrong in ("pipeline", "pipeline--1", "ppo-0", "sync", "pipeline-x"):
        with pytest.raises(ValueError, match="pipeline-K"):
            loss.parse_asynchrony(wrong)


def test_pitfall_15_work_in_flight_is_not_bounded_to_nothing_at_k_0():
    assert loss.groups_ahead("pipeline-0", 32, 5) == 32
    assert loss.groups_ahead("pipeline-8", 32, 5) == 288
    assert loss.groups_ahead("ppo-8", 32, 16) == 256
    assert loss.groups_ahead("ppo-8", 32, 19) == 5 * 32  # a run that goes on after 3 of the 8


def test_a_batch_is_the_oldest_finished_groups_and_waits_for_those_that_would_get_too_old():
    assert loss.choose_batch([3, 1, 2], [], 3, "pipeline-8", 2) == [1, 2]
    assert loss.choose_batch([3], [3, 3], 3, "pipeline-8", 2) is None  # not enough finished
    # At step 4 with k = 1 the unfinished group of version 3 must be in this batch: nothing may
    # overtake it.
    assert loss.choose_batch([4, 4], [3], 4, "pipeline-1", 2) is None
    assert loss.choose_batch([4, 4], [4], 4, "pipeline-1", 2) == [0, 1]
    # Two unfinished groups of one version, one group a step: one of them would be late two steps
    # on.
    assert loss.choose_batch([5], [4, 4], 5, "pipeline-2", 1) is None
    assert loss.choose_batch([5], [4, 4], 5, "pipeline-3", 1) == [0]
    # PPO-off-policy waits for all that was handed out, and never asks for freshness.
    assert loss.choose_batch([0] * 3, [0], 0, "ppo-2", 2) is None
    assert loss.choose_batch([0, 0], [], 1, "ppo-2", 2) == [0, 1]
    assert [loss.publishes("ppo-4", version) for version in range(5)] == [
        True,
        False,
        False,
        False,
        True,
    ]
    assert all(loss.publishes("pipeline-8", version) for version in range(9))


@pytest.mark.parametrize("k", [0, 1, 2, 8])
def test_no_group_ever_gets_older_than_k_steps_whatever_order_they_finish_in(k):
    prompts, asynchrony = 4, f"pipeline-{k}"
    generator = torch.Generator().manual_seed(k)
    draw = lambda most: torch.randint(most, (1,), generator=generator).item()  # noqa: E731
    done, unfinished, ages = [], [], []
    for step in range(200):
        unfinished += [step] * (
            loss.groups_ahead(asynchrony, prompts, step) - len(done) - len(unfinished)
        )
        while (batch := loss.choose_batch(done, unfinished, step, asynchrony, prompts)) is None:
            assert unfinished, "everything is finished, and no batch can be made of it: a deadlock"
            done.append(unfinished.pop(draw(len(unfinished))))
        ages += [step - done[i] for i in batch]
        done = [version for i, version in enumerate(done) if i not in batch]
    assert max(ages) == k


# --- length control -------------------------------------------------------------------------------


def test_interruption_comes_when_open_thinking_reaches_its_budget():
    control = lambda sampled, closed_at: tuple(  # noqa: E731
        bool(x) for x in map(lambda v: v[0], loss.interrupt_or_truncate("interruption", torch.tensor([sampled]),
                                                                    torch.tensor([closed_at]), 10, 3)))  # fmt: skip
    assert control(9, -1) == (False, False)
    assert control(10, -1) == (True, False)
    assert control(10, 10) == (False, False)  # closed by its last token
    assert control(12, 10) == (False, False)
    assert control(13, 10) == (False, True)


def test_pitfall_8_thinking_closed_late_keeps_the_whole_answer_budget():
    sampled, closed_at = torch.tensor([12, 13]), torch.tensor([10, 10])
    _, truncate = loss.interrupt_or_truncate("interruption", sampled, closed_at, 10, 3)
    assert truncate.tolist() == [False, True]


def test_with_the_penalty_nothing_is_interrupted_and_the_budgets_are_one():
    sampled = torch.tensor([10, 12, 13])
    interrupt, truncate = loss.interrupt_or_truncate(
        "penalty", sampled, torch.tensor([-1, -1, 2]), 10, 3
    )
    assert interrupt.tolist() == [False] * 3
    assert truncate.tolist() == [False, False, True]


def test_rewards_and_the_length_penalty_on_correct_completions_only():
    correct, lengths = tensor([True, True, True, False]), tensor([100, 110, 120, 120])
    plain = loss.rewards(correct.float(), lengths, "interruption", 120, 20)
    assert plain.tolist() == [[1, 1, 1, -1]]
    penalised = loss.rewards(correct.float(), lengths, "penalty", 120, 20)
    assert penalised.tolist() == [[1.0, 0.5, 0.0, -1.0]]
    beyond = loss.rewards(correct.float(), lengths + 500, "penalty", 120, 20)
    assert beyond.tolist() == [[0.0, 0.0, 0.0, -1.0]]
    graded = tensor([0.75, 0.25])
    assert loss.rewards(graded, tensor([120, 100]), "interruption", 120, 20).tolist() == [
        [0.5, -0.5]
    ]
    assert loss.rewards(graded, tensor([120, 100]), "penalty", 120, 20).tolist() == [[-0.25, -0.5]]


# --- logits ---------------------------------------------------------------------------------------


def test_sampled_logprobs_entropy_and_gradient_match_a_plain_softmax_at_any_chunk():
    torch.manual_seed(0)
    hidden, head, targets = torch.randn(37, 8), torch.randn(50, 8), torch.randint(50, (37,))
    h1, w1 = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    plain = torch.log_softmax(h1 @ w1.T, -1)
    plain[torch.arange(37), targets].square().sum().backward()
    for chunk in (1, 5, 36, 100):
        h2, w2 = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logprobs, entropies = loss.sampled_logprobs(h2, w2, targets, fp32=True, chunk=chunk)
        logprobs.square().sum().backward()
        torch.testing.assert_close(logprobs, plain[torch.arange(37), targets])
        torch.testing.assert_close(entropies, -(plain.exp() * plain).sum(-1).detach())
        torch.testing.assert_close(h2.grad, h1.grad)
        torch.testing.assert_close(w2.grad, w1.grad)


def test_the_entropy_is_not_computed_again_in_the_backward():
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function)
            return function(*args, **(kwargs or {}))

    called, head = [], torch.randn(50, 8, requires_grad=True)
    with Calls():
        logprobs, _ = loss.sampled_logprobs(
            torch.randn(32, 8), head, torch.zeros(32, dtype=torch.int64), True, 16
        )
        logprobs.sum().backward()
    softmax, exp = torch.ops.aten._log_softmax.default, torch.ops.aten.exp.default
    assert (called.count(softmax), called.count(exp)) == (4, 2)  # of two chunks


def test_pitfall_4_the_logits_of_all_tokens_never_exist_at_once(monkeypatch):
    rows = []
    whole = loss.head_logits
    monkeypatch.setattr(
        loss, "head_logits", lambda h, w, fp32: rows.append(len(h)) or whole(h, w, fp32)
    )
    head = torch.randn(50, 8, requires_grad=True)
    logprobs, _ = loss.sampled_logprobs(
        torch.randn(100, 8), head, torch.zeros(100, dtype=torch.int64), True, 16
    )
    assert rows == [16] * 6 + [4]
    logprobs.sum().backward()
    assert sorted(rows[7:]) == [4] + [16] * 6  # recomputed in the backward, so not kept until then


def test_pitfall_3_fp32_logits_are_computed_in_fp32_and_not_cast_after_a_bf16_matmul():
    torch.manual_seed(0)
    hidden, head = torch.randn(64, 256).bfloat16(), torch.randn(100, 256)
    exact = hidden.double() @ head.double().T
    error = lambda logits: (logits.double() - exact).abs().max().item()  # noqa: E731
    on, off = loss.head_logits(hidden, head, True), loss.head_logits(hidden, head, False)
    assert on.dtype == off.dtype == torch.float32
    assert error(on) < 1e-3 < 1e-2 < error(off)
    torch.testing.assert_close(
        off, (hidden @ head.bfloat16().T).float()
    )  # the negative control: a cast after it


@pytest.mark.parametrize("dtype, rounded", [(torch.float32, 0.0), (torch.bfloat16, 1e-3)])
def test_pitfall_3_split_logits_agree_with_fp32(dtype, rounded):
    """With logits whose standard deviation is 3. Gradients of hidden states in bf16 are rounded, a
    few otherwise."""
    torch.manual_seed(0)
    hidden, head, targets = (
        torch.randn(60, 1024).to(dtype),
        0.1 * torch.randn(2000, 1024),
        torch.randint(2000, (60,)),
    )

    def found(fp32):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logprobs, _ = loss.sampled_logprobs(h, w, targets, fp32, chunk=40)
        logprobs.sum().backward()
        return logprobs.detach(), h.grad.float(), w.grad

    on, split, off = found(True), found("split"), found(False)
    error = lambda i, logits: ((logits[i] - on[i]).norm() / on[i].norm()).item()
    assert (split[0] - on[0]).abs().max() < 5e-5 < 5e-3 < (off[0] - on[0]).abs().max()
    assert error(1, split) < max(1e-4, rounded) < 2e-3 < error(1, off)
    assert error(2, split) < 1e-4 < 2e-3 < error(2, off)


def test_pitfall_3_the_head_is_never_a_stale_copy():
    head, hidden = torch.randn(5, 4), torch.randn(3, 4)
    before = loss.head_logits(hidden, head, True)
    head.mul_(2)
    torch.testing.assert_close(loss.head_logits(hidden, head, True), 2 * before)


# --- which samples count, advantages --------------------------------------------------------------

ALL = tensor([True, True], [True, True])


def test_advantage_norms_on_a_worked_example():
    rewards = tensor([RIGHT, WRONG, WRONG, WRONG], [RIGHT, RIGHT, WRONG, WRONG])
    usable = torch.ones_like(rewards, dtype=torch.bool)
    centred = tensor([1.5, -0.5, -0.5, -0.5], [1.0, 1.0, -1.0, -1.0])
    advantage = lambda norm: loss.advantages(rewards, usable, usable, norm, eps=0.0)  # noqa: E731
    torch.testing.assert_close(advantage("none"), centred)
    torch.testing.assert_close(advantage("prompt"), centred / tensor([math.sqrt(0.75)], [1.0]))
    torch.testing.assert_close(advantage("batch"), centred / math.sqrt((3 * 1 + 4 * 1) / 8))
    scores = (rewards + 1) / 2  # MaxRL: (s - mean s) / mean s, with means 1/4 and 1/2
    torch.testing.assert_close(
        advantage("mean"), (scores - tensor([0.25], [0.5])) / tensor([0.25], [0.5])
    )
    nobody = torch.full((1, 4), WRONG)
    assert (loss.advantages(nobody, usable[:1], usable[:1], "mean") == 0).all()


def test_the_batch_std_is_over_the_effective_batch():
    rewards = tensor([RIGHT, WRONG], [RIGHT, RIGHT])
    kept = loss.counted_samples(rewards, ALL, zero_variance_filter=True)
    assert kept.tolist() == [[True, True], [False, False]]
    torch.testing.assert_close(
        loss.advantages(rewards, ALL, kept, "batch", eps=0.0), tensor([1.0, -1.0], [0.0, 0.0])
    )
    everything = loss.counted_samples(rewards, ALL, zero_variance_filter=False)
    assert everything.all()
    root = math.sqrt(2 / 4)
    torch.testing.assert_close(
        loss.advantages(rewards, ALL, everything, "batch", eps=0.0),
        tensor([1 / root, -1 / root], [0.0, 0.0]),
    )


def test_truncated_completions_are_no_members_of_their_group():
    rewards = tensor([RIGHT, WRONG, WRONG], [RIGHT, WRONG, RIGHT])
    usable = tensor([True, True, False], [True, False, True])
    assert loss.zero_variance(rewards, usable).tolist() == [False, True]
    counted = loss.counted_samples(rewards, usable, True)
    assert counted.tolist() == [[True, True, False], [False, False, False]]
    assert loss.advantages(rewards, usable, counted, "none").tolist() == [[1, -1, 0], [0, 0, 0]]
    weights = loss.token_weights(tensor([3, 5, 100], [1, 100, 1]), counted, "prompt")
    torch.testing.assert_close(weights, tensor([1 / 8, 1 / 8, 0.0], [0.0, 0.0, 0.0]))
    assert loss.zero_variance(rewards, torch.zeros_like(usable)).all()  # nobody left in the group


@pytest.mark.parametrize("norm", ["prompt", "batch"])
def test_pitfall_7_a_group_constant_up_to_rounding_gets_no_huge_advantages(norm):
    third = torch.full(
        (2, 3), 1 / 3
    )  # its mean is not 1/3 exactly in fp32: a std of ~1e-8 is what it divides by
    third[1] = 1e4 + 1 / 3
    usable = torch.ones(2, 3, dtype=torch.bool)
    assert loss.zero_variance(third, usable).all()
    assert loss.advantages(third, usable, usable, norm).abs().max() == 0
    large = torch.tensor([[1e4, 1e4 + 1]])  # E[x^2] - E[x]^2 loses this std altogether
    torch.testing.assert_close(
        loss.advantages(large, usable[:1, :2], usable[:1, :2], norm),
        tensor([-1.0, 1.0]),
        atol=1e-4,
        rtol=0,
    )


def test_no_positive_resampling_retires_at_nine_tenths():
    assert [loss.retires(rate) for rate in (0.0, 14 / 16, 0.9, 15 / 16, 1.0)] == [
        False,
        False,
        True,
        True,
        True,
    ]


# --- losses ---------------------------------------------------------------------------------------


def reference_terms(recipe, logprobs, generator_logprobs, sampled, advantages):
    """The equations of the paper, token by token, in Python floats; returns values (their
    gradients: see below)."""
    terms = []
    for train, gen, counts, advantage in zip(logprobs, generator_logprobs, sampled, advantages):
        ratios = [math.exp(a - b) for a, b, c in zip(train, gen, counts) if c]
        mean = math.exp(sum(a - b for a, b, c in zip(train, gen, counts) if c) / len(ratios))
        row = []
        for a, b, c in zip(train, gen, counts):
            rho = math.exp(a - b)
            if not c:
                row.append(0.0)
            elif recipe.loss == "cispo":
                row.append(min(rho, recipe.eps_max) * advantage * a)
            elif recipe.loss == "icepop":
                row.append(rho * advantage * a if 0.5 <= rho <= 5 else 0.0)
            elif recipe.loss == "sapo":
                tau = 1.0 if advantage > 0 else 1.05
                row.append(4 / tau / (1 + math.exp(-tau * (rho - 1))) * advantage)
            elif recipe.loss == "dppo":
                moved = math.exp(a) - math.exp(b)
                kept = moved <= 0.2 if advantage > 0 else moved >= -0.2
                row.append(min(rho, 20) * advantage * a if kept else 0.0)
            else:
                rho = mean if recipe.loss == "gspo" else rho
                low, high = {"dapo": (0.2, 0.26), "grpo": (0.2, 0.2), "gspo": (0.004, 0.005)}[
                    recipe.loss
                ]
                row.append(min(rho * advantage, min(max(rho, 1 - low), 1 + high) * advantage))
        terms.append(row)
    return terms


@pytest.mark.parametrize("name", loss.LOSSES)
def test_losses_match_a_per_token_reference_in_value_and_gradient(name):
    torch.manual_seed(1)
    recipe = Recipe(loss=name)
    generator_logprobs = -3 * torch.rand(6, 9, dtype=torch.float64)
    spread = {"cispo": 1.5, "gspo": 0.05, "dppo": 2.0}.get(name, 0.5)
    logprobs = (
        generator_logprobs + spread * torch.randn(6, 9, dtype=torch.float64)
    ).requires_grad_()
    sampled, advantages = torch.rand(6, 9) < 0.8, torch.randn(6, dtype=torch.float64)
    terms, log_rho, clipped = loss.token_terms(
        recipe, logprobs, generator_logprobs, sampled, advantages
    )
    arguments = (generator_logprobs.tolist(), sampled.tolist(), advantages.tolist())
    expected = reference_terms(recipe, logprobs.tolist(), *arguments)
    torch.testing.assert_close(terms, torch.tensor(expected, dtype=torch.float64))
    assert clipped.any() != (name == "sapo") and not clipped.all(), "the example should have both"
    torch.testing.assert_close(
        log_rho, torch.where(sampled, logprobs - generator_logprobs, 0.0).detach()
    )
    terms.sum().backward()
    if name in (
        "cispo",
        "icepop",
        "dppo",
    ):  # the ratio is a constant to the gradient: term = constant x log pi
        torch.testing.assert_close(logprobs.grad, (terms / logprobs).detach())
        return
    step = 1e-6  # the others: by finite differences of the reference
    for i, t in [(0, 0), (1, 4), (3, 2), (5, 8)]:
        values = []
        for sign in (1, -1):
            moved = logprobs.detach().clone()
            moved[i, t] += sign * step
            values.append(sum(map(sum, reference_terms(recipe, moved.tolist(), *arguments))))
        assert logprobs.grad[i, t].item() == pytest.approx(
            (values[0] - values[1]) / (2 * step), abs=1e-5
        )


def test_worked_examples_of_the_clips():
    logprobs = torch.log(tensor([0.6, 0.9, 0.05])).requires_grad_()
    generator = torch.log(tensor([0.1, 0.9, 0.5]))  # ratios 6, 1, 0.1
    all_sampled = torch.ones(1, 3, dtype=torch.bool)
    for advantage, dapo, grpo in [
        (1.0, [1.26, 1.0, 0.1], [1.2, 1.0, 0.1]),
        (-1.0, [-6.0, -1.0, -0.8], None),
    ]:
        for name, expected in (("dapo", dapo), ("grpo", grpo or dapo)):
            terms, log_rho, clipped = loss.token_terms(
                Recipe(loss=name), logprobs, generator, all_sampled, torch.tensor([advantage])
            )
            torch.testing.assert_close(terms, tensor(expected))
            torch.testing.assert_close(log_rho.exp(), tensor([6.0, 1.0, 0.1]))
            assert clipped.tolist() == [[advantage > 0, False, advantage < 0]]


def test_worked_examples_of_the_newer_losses():
    pi, mu = tensor([0.6, 0.9, 0.05, 0.24]), tensor([0.1, 0.9, 0.5, 0.01])  # ratios 6, 1, 0.1, 24
    generator, sampled = torch.log(mu), torch.ones(1, 4, dtype=torch.bool)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    for name, advantage, slopes in [
        ("icepop", 1.0, [0, 1, 0, 0]),
        ("icepop", -1.0, [0, -1, 0, 0]),
        ("dppo", 1.0, [0, 1, 0.1, 0]),  # 0.6 - 0.1 and 0.24 - 0.01 are above 0.2
        ("dppo", -1.0, [-6, -1, 0, -20]),  # 0.05 - 0.5 is below -0.2, and 24 is capped at 20
    ]:
        logprobs = torch.log(pi).requires_grad_()
        terms, _, clipped = loss.token_terms(
            Recipe(loss=name), logprobs, generator, sampled, tensor(advantage)
        )
        terms.sum().backward()
        torch.testing.assert_close(logprobs.grad, tensor(slopes).float())
        torch.testing.assert_close(terms, (tensor(slopes) * torch.log(pi)).float())
        assert torch.equal(clipped, tensor(slopes) == 0)
    for advantage, tau in [(1.0, 1.0), (-1.0, 1.05)]:
        terms, _, clipped = loss.token_terms(
            Recipe(loss="sapo"), torch.log(pi), generator, sampled, tensor(advantage)
        )
        expected = [4 / tau * sigmoid(tau * (rho - 1)) * advantage for rho in (6, 1, 0.1, 24)]
        torch.testing.assert_close(terms, tensor(expected))
        assert not clipped.any()


def test_a_wrong_completion_that_has_become_unlikely_is_masked_and_no_other_is():
    """The mean over the sampled tokens of log pi_gen - log pi_train decides: above .5, and only
    where A < 0."""
    generator = torch.full((4, 3), -1.0)
    logprobs = tensor(
        [-1.6, -1.6, 9.0], [-1.4, -1.4, 9.0], [-1.6, -1.6, 9.0], [-3.0, -1.0, 9.0]
    ).requires_grad_()
    sampled = tensor([True, True, False]).expand(4, 3)
    advantages = tensor(-1.0, -1.0, 1.0, -1.0)
    rows = lambda recipe: loss.token_terms(recipe, logprobs, generator, sampled, advantages)[0]  # noqa: E731
    for name in loss.LOSSES:
        plain = rows(Recipe(loss=name))
        masked = rows(Recipe(loss=name, mask_sequences=True))
        assert torch.equal(masked[1:3], plain[1:3]) and (masked[[0, 3]] == 0).all()
    masked.sum().backward()
    assert (logprobs.grad[[0, 3]] == 0).all() and (logprobs.grad[1:3, :2] != 0).all()


def test_pitfall_2_cispo_caps_the_ratio_itself_from_above_only_and_against_what_the_generator_recorded():
    generator = torch.log(tensor([0.1, 0.1, 0.5]))
    logprobs = torch.log(tensor([0.55, 0.45, 0.005])).requires_grad_()  # ratios 5.5, 4.5, 0.01
    sampled = torch.ones(1, 3, dtype=torch.bool)
    terms, _, clipped = loss.token_terms(
        Recipe(), logprobs, generator, sampled, torch.tensor([1.0])
    )
    terms.sum().backward()
    torch.testing.assert_close(
        logprobs.grad, tensor([5.0, 4.5, 0.01])
    )  # 5, not 1 + 5; 0.01 is not raised to anything
    assert clipped.tolist() == [[True, False, False]]
    # The negative control: against recomputed log-probabilities the cap never bites.
    _, log_rho, clipped = loss.token_terms(
        Recipe(), logprobs, logprobs.detach(), sampled, torch.tensor([1.0])
    )
    assert (log_rho == 0).all() and not clipped.any()


def test_what_recipe_allows_is_what_there_is_a_function_for():
    """A name that stands in one of the two places only could not be chosen, or would end a run."""
    for part, table in (
        ("loss", loss.LOSSES),
        ("aggregation", loss.AGGREGATIONS),
        ("advantage_norm", loss.NORMS),
    ):
        assert {*get_args(Recipe.__annotations__[part])} == {*table}, (
            f"Recipe.{part} and its table do not agree"
        )


def test_each_function_says_the_formula_of_its_loss_and_a_clip_is_in_the_formula():
    for name, (term, formula, constants) in loss.LOSSES.items():
        docstring = " ".join(term.__doc__.split())
        assert docstring.startswith(formula), (
            f"the docstring of {term.__name__} begins with another formula"
        )
        assert {*constants} == {*re.findall(r"eps_\w+", formula)}, name
        assert ("eps_low" in constants) == ("eps_high" in constants), name


@pytest.mark.parametrize("name", loss.LOSSES)
def test_every_loss_pushes_sampled_tokens_the_way_of_their_advantage(name):
    """At a ratio of 1. So a loss without a gradient, or with the wrong sign, is none."""
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -0.1, -3.0]], requires_grad=True)
    sampled = tensor([True, True, False], [True, False, True])
    value, _ = loss.policy_loss(
        Recipe(loss=name),
        logprobs,
        logprobs.detach(),
        sampled,
        tensor(1.5, -0.5),
        tensor(0.25, 0.25),
    )
    value.backward()
    assert torch.equal(logprobs.grad.sign(), tensor([-1.0, -1.0, 0.0], [1.0, 0.0, 1.0]))


@pytest.mark.parametrize("name", loss.LOSSES)
def test_the_gradient_of_every_loss_agrees_with_finite_differences(name, monkeypatch):
    """Of its value in float64, at ratios on both sides of any clip. What is detached is a constant:
    it is kept."""
    torch.manual_seed(3)
    generator_logprobs = -3 * torch.rand(4, 6, dtype=torch.float64)
    logprobs = generator_logprobs + torch.randn(4, 6, dtype=torch.float64)
    sampled, advantages = torch.rand(4, 6) < 0.8, torch.randn(4, dtype=torch.float64)
    detach, constants = torch.Tensor.detach, []

    def value(at: torch.Tensor) -> torch.Tensor:
        weights = torch.full((4,), 0.1, dtype=torch.float64)
        return loss.policy_loss(
            Recipe(loss=name), at, generator_logprobs, sampled, advantages, weights
        )[0]

    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor, "detach", lambda tensor: constants.append(detach(tensor)) or constants[-1]
        )
        at = logprobs.clone().requires_grad_()
        value(at).backward()
    step = 1e-6
    for i, t in sampled.nonzero().tolist():
        moved = torch.zeros(4, 6, dtype=torch.float64)
        moved[i, t] = step
        values = []
        for sign in (1, -1):
            kept = iter(constants)
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "detach", lambda _, kept=kept: next(kept))
                values.append(value(logprobs + sign * moved).item())
        assert at.grad[i, t].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-6)
    assert at.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", loss.LOSSES)
def test_pitfall_8_forced_tokens_have_no_weight_and_no_ratio(name):
    """Whatever stands at a forced token changes nothing: loss, gradient and metrics are those of
    the sampled ones."""
    torch.manual_seed(2)
    sampled = tensor([True, True, False, False, True])
    results = []
    for filler in (0.0, -700.0):
        logprobs = torch.tensor([[-1.0, -0.5, filler, filler, -2.0]], requires_grad=True)
        generator = torch.tensor([[-1.1, -0.7, 0.0, 0.0, -1.5]])
        value, sums = loss.policy_loss(
            Recipe(loss=name),
            logprobs,
            generator,
            sampled,
            torch.tensor([0.7]),
            torch.tensor([0.25]),
        )
        value.backward()
        assert logprobs.grad[0, 2:4].tolist() == [0, 0]
        results.append(
            [
                value.item(),
                *logprobs.grad[0, [0, 1, 4]].tolist(),
                *(total.item() for total in sums.values()),
            ]
        )
    assert results[0] == results[1]


def test_on_policy_all_losses_have_the_same_gradient():
    logprobs, sampled, gradients = torch.tensor([[-1.0, -2.0], [-0.3, -0.1]]), ALL, []
    for name in loss.LOSSES:
        here = logprobs.clone().requires_grad_()
        weights = torch.tensor([0.25, 0.25])
        value, _ = loss.policy_loss(
            Recipe(loss=name), here, logprobs, sampled, torch.tensor([1.0, -0.5]), weights
        )
        value.backward()
        gradients.append(here.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize("name", loss.LOSSES)
@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_a_ratio_beyond_all_numbers_that_is_cut_has_a_finite_gradient(name, advantage):
    """exp overflows above 88 in fp32, and infinity times 0 is no number. The clips cut from above
    where A >= 0."""
    generator = torch.tensor([[-200.0, -100.0, -0.5], [-0.6, -0.7, -0.5]])
    logprobs = torch.tensor([[-0.1, -0.2, -0.3], [-0.5, -0.6, -0.4]], requires_grad=True)
    assert torch.isinf((logprobs - generator).exp()[0, :2]).all()
    sampled, weights = torch.ones(2, 3, dtype=torch.bool), torch.full((2,), 1 / 6)
    value, sums = loss.policy_loss(
        Recipe(loss=name), logprobs, generator, sampled, torch.tensor([advantage, -1.0]), weights
    )
    value.backward()
    assert value.isfinite() and logprobs.grad.isfinite().all() and logprobs.grad[1].abs().min() > 0
    most = {
        "cispo": 5.0,
        "dapo": 1.26,
        "grpo": 1.2,
        "gspo": 1.005,
        "icepop": 0.0,
        "sapo": 4.0,
        "dppo": 0.0,
    }[name]
    terms, _, clipped = loss.token_terms(
        Recipe(loss=name), logprobs, generator, sampled, torch.tensor([advantage, -1.0])
    )
    assert terms[0, :2].abs().max() <= most * advantage * (0.2 if name == "cispo" else 1) + 1e-5
    if name != "cispo":
        assert (logprobs.grad[0, :2] == 0).all()
    if name in ("dapo", "grpo", "gspo", "dppo"):
        assert clipped[0, :2].all() == (advantage != 0)


@pytest.mark.parametrize("name", loss.LOSSES)
def test_what_is_logged_of_the_ratio_is_of_tokens_whatever_the_loss(name):
    """Also under gspo, whose own ratio is one per sequence."""
    generator = torch.log(tensor([0.1, 0.9, 0.5, 0.3]))
    logprobs = torch.log(tensor([0.6, 0.9, 0.05, 0.9]))
    sampled = tensor([True, True, True, False])  # ratios 6, 1, 0.1
    _, sums = loss.policy_loss(
        Recipe(loss=name), logprobs, generator, sampled, torch.tensor([1.0]), torch.tensor([1 / 3])
    )
    assert sums["ratio"].item() == pytest.approx(7.1, rel=1e-5)
    assert sums["ratio_max"].item() == pytest.approx(6.0, rel=1e-5)
    kl = sum(rho - 1 - math.log(rho) for rho in (6.0, 1.0, 0.1))
    assert sums["kl"].item() == pytest.approx(kl, rel=1e-5)


# --- aggregation ----------------------------------------------------------------------------------

LENGTHS = tensor([1, 3], [2, 6])


def test_aggregation_on_a_worked_example():
    counted = torch.ones(2, 2, dtype=torch.bool)
    weights = lambda name: loss.token_weights(LENGTHS, counted, name)  # noqa: E731
    torch.testing.assert_close(weights("sample"), tensor([1 / 4, 1 / 12], [1 / 8, 1 / 24]))
    torch.testing.assert_close(weights("prompt"), tensor([1 / 8, 1 / 8], [1 / 16, 1 / 16]))
    torch.testing.assert_close(weights("token"), torch.full((2, 2), 1 / 12))


@pytest.mark.parametrize("aggregation", ["sample", "prompt", "token"])
def test_aggregation_matches_means_taken_one_after_the_other(aggregation):
    torch.manual_seed(3)
    P, G = 5, 4
    counted, lengths = torch.rand(P, G) < 0.8, torch.randint(1, 9, (P, G))
    terms = [[torch.randn(lengths[p, g]).tolist() for g in range(G)] for p in range(P)]
    kept = [[terms[p][g] for g in range(G) if counted[p, g]] for p in range(P)]
    kept = [group for group in kept if group]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    if aggregation == "sample":
        expected = mean([mean(sample) for group in kept for sample in group])
    elif aggregation == "prompt":
        expected = mean([mean(sum(group, [])) for group in kept])
    else:
        expected = mean([term for group in kept for sample in group for term in sample])
    weights = loss.token_weights(lengths, counted, aggregation)
    got = sum(weights[p, g].item() * sum(terms[p][g]) for p in range(P) for g in range(G))
    assert got == pytest.approx(expected, abs=1e-6)
    assert (weights * lengths).sum().item() == pytest.approx(1.0)


def test_pitfall_6_the_loss_does_not_grow_with_the_groups_that_survive_the_filter():
    for survivors in (1, 2, 5):
        counted = torch.arange(5)[:, None].expand(5, 4) < survivors
        for aggregation in ("sample", "prompt", "token"):
            weights = loss.token_weights(torch.full((5, 4), 7), counted, aggregation)
            assert (weights * 7).sum().item() == pytest.approx(1.0)
    nothing = loss.token_weights(
        torch.full((5, 4), 7), torch.zeros(5, 4, dtype=torch.bool), "prompt"
    )
    assert nothing.sum() == 0


@pytest.mark.parametrize("aggregation", loss.AGGREGATIONS)
def test_pitfall_5_any_cut_into_micro_batches_gives_the_same_gradient(aggregation):
    torch.manual_seed(4)
    generator_logprobs, rewards = -torch.rand(12, 7), torch.where(torch.rand(3, 4) < 0.5, 1.0, -1.0)
    lengths = torch.randint(1, 8, (3, 4))
    sampled = torch.arange(7) < lengths.view(12, 1)
    usable = torch.ones(3, 4, dtype=torch.bool)
    advantages = loss.advantages(rewards, usable, usable, "batch").flatten()
    weights = loss.token_weights(lengths, usable, aggregation).flatten()
    plain = None
    for recipe in [*(Recipe(loss=name) for name in loss.LOSSES), Recipe(mask_sequences=True)]:
        gradients = []
        for cut in ([12], [1] * 12, [5, 7], [2, 3, 7]):
            scale = torch.tensor(1.1, requires_grad=True)
            for rows in torch.arange(12).split(cut):
                logprobs = generator_logprobs[rows] * scale
                given = (generator_logprobs[rows], sampled[rows], advantages[rows], weights[rows])
                loss.policy_loss(recipe, logprobs, *given)[0].backward()
            gradients.append(scale.grad.item())
        assert gradients == pytest.approx([gradients[0]] * 4, rel=1e-5, abs=1e-7)
        assert gradients[0] != 0 or recipe.loss == "gspo"  # whose clip has cut everything here
        plain = gradients[0] if recipe == Recipe() else plain
    # The negative control: means per micro-batch, which is the usual mistake, give something else.
    scale = torch.tensor(1.1, requires_grad=True)
    for rows in torch.arange(12).split([2, 3, 7]):
        own = loss.token_weights(
            lengths.view(12, 1)[rows], usable.view(12, 1)[rows], "token"
        ).flatten()
        logprobs = generator_logprobs[rows] * scale
        value, _ = loss.policy_loss(
            Recipe(), logprobs, generator_logprobs[rows], sampled[rows], advantages[rows], own / 3
        )
        value.backward()
    assert scale.grad.item() != pytest.approx(plain, rel=1e-2)
