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
    axes = get_args(loss.Axis)
    table = {
        "scalerl": ("pipeline-8", "cispo", "prompt", "batch", True, True, True, "interruption"),
        "base": ("ppo-8", "dapo", "sample", "prompt", False, False, False, "interruption"),
        "grpo": ("ppo-8", "grpo", "sample", "prompt", False, False, False, "interruption"),
        "dapo": ("ppo-8", "dapo", "prompt", "prompt", False, True, False, "interruption"),
        "magistral": ("pipeline-8", "dapo", "prompt", "batch", False, True, False, "interruption"),
        "minimax": ("ppo-8", "cispo", "prompt", "prompt", True, True, False, "interruption"),
    }
    assert axes == (
        "asynchrony",
        "loss",
        "aggregation",
        "advantage_norm",
        "fp32_logits",
        "zero_variance_filter",
        "no_positive_resampling",
        "length_control",
    )
    assert [*RECIPES] == [*table]
    for name, recipe in RECIPES.items():
        assert recipe.recipe == name
        assert tuple(getattr(recipe, axis) for axis in axes) == table[name]
    assert [round(48 * RECIPES[name].batch_factor) for name in table] == [48, 48, 48, 80, 80, 80]


@pytest.mark.parametrize("axis", get_args(loss.Axis))
def test_leave_one_out_changes_one_axis_to_its_base_value(axis):
    recipe = loss.leave_one_out(axis)
    names = [field.name for field in dataclasses.fields(Recipe)]
    changed = [name for name in names if getattr(recipe, name) != getattr(Recipe(), name)]
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
    choose = loss.choose_batch
    assert choose([3, 1, 2], [], 3, "pipeline-8", 2) == [1, 2]
    assert choose([3], [3, 3], 3, "pipeline-8", 2) is None  # not enough finished
    # At version 4 with k = 1 the unfinished group of version 3 must be in this batch: nothing may
    # overtake it.
    assert choose([4, 4], [3], 4, "pipeline-1", 2) is None
    assert choose([4, 4], [4], 4, "pipeline-1", 2) == [0, 1]
    # Two unfinished groups of one version, one group a step: one of them would be late two steps
    # on.
    assert choose([5], [4, 4], 5, "pipeline-2", 1) is None
    assert choose([5], [4, 4], 5, "pipeline-3", 1) == [0]
    # PPO-off-policy waits for all that was handed out, and never asks for freshness.
    assert choose([0] * 3, [0], 0, "ppo-2", 2) is None
    assert choose([0, 0], [], 1, "ppo-2", 2) == [0, 1]


def test_ppo_publishes_each_kth_version_and_a_pipeline_every_one():
    assert [v for v in range(9) if loss.publishes("ppo-4", v)] == [0, 4, 8]
    assert [v for v in range(9) if loss.publishes("pipeline-8", v)] == [*range(9)]


@pytest.mark.parametrize("k", [0, 1, 2, 8])
def test_no_group_ever_gets_older_than_k_steps_whatever_order_they_finish_in(k):
    prompts, asynchrony = 4, f"pipeline-{k}"
    generator = torch.Generator().manual_seed(k)
    done, unfinished, ages = [], [], []
    for version in range(200):
        ahead = loss.groups_ahead(asynchrony, prompts, version)
        new = ahead - len(done) - len(unfinished)
        unfinished += [version] * new
        while True:
            batch = loss.choose_batch(done, unfinished, version, asynchrony, prompts)
            if batch is not None:
                break
            assert unfinished, "everything is finished, and no batch can be made of it: a deadlock"
            finished = torch.randint(len(unfinished), (1,), generator=generator).item()
            done.append(unfinished.pop(finished))
        ages += [version - done[i] for i in batch]
        done = [group for i, group in enumerate(done) if i not in batch]
    assert max(ages) == k


# --- length control -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampled, closed_at, interrupts, truncates",
    [
        (9, -1, False, False),
        (10, -1, True, False),
        (10, 10, False, False),  # closed by its last token
        (12, 10, False, False),
        (13, 10, False, True),
    ],
)
def test_interruption_comes_when_open_thinking_reaches_its_budget(
    sampled, closed_at, interrupts, truncates
):
    given = torch.tensor([sampled]), torch.tensor([closed_at])
    interrupt, truncate = loss.interrupt_or_truncate("interruption", *given, 10, 3)
    assert interrupt.tolist() == [interrupts]
    assert truncate.tolist() == [truncates]


def test_pitfall_8_thinking_closed_late_keeps_the_whole_answer_budget():
    sampled, closed_at = torch.tensor([12, 13]), torch.tensor([10, 10])
    _, truncate = loss.interrupt_or_truncate("interruption", sampled, closed_at, 10, 3)
    assert truncate.tolist() == [False, True]


def test_with_the_penalty_nothing_is_interrupted_and_the_budgets_are_one():
    sampled, closed_at = torch.tensor([10, 12, 13]), torch.tensor([-1, -1, 2])
    interrupt, truncate = loss.interrupt_or_truncate("penalty", sampled, closed_at, 10, 3)
    assert interrupt.tolist() == [False] * 3
    assert truncate.tolist() == [False, False, True]


def test_rewards_and_the_length_penalty_on_correct_completions_only():
    def rewards(scores, lengths, length_control):
        given = tensor(scores), tensor(lengths)
        return loss.rewards(*given, length_control, max_length=120, penalty_length=20)[0].tolist()

    scores, lengths = [1.0, 1.0, 1.0, 0.0], [100, 110, 120, 120]
    assert rewards(scores, lengths, "interruption") == [1, 1, 1, -1]
    assert rewards(scores, lengths, "penalty") == [1.0, 0.5, 0.0, -1.0]
    assert rewards(scores, [600, 610, 620, 620], "penalty") == [0.0, 0.0, 0.0, -1.0]
    graded = [0.75, 0.25]
    assert rewards(graded, [120, 100], "interruption") == [0.5, -0.5]
    assert rewards(graded, [120, 100], "penalty") == [-0.25, -0.5]


# --- logits ---------------------------------------------------------------------------------------


def test_the_logits_of_a_chunk_are_bounded_in_bytes():
    assert loss.chunk_tokens(30) == 2048, "the default task: as it was"
    for vocabulary in (32_000, 49_152, 151_936):
        tokens = loss.chunk_tokens(vocabulary)
        assert 0.99 * 2**29 < 3 * 4 * tokens * vocabulary <= 2**29
    assert loss.chunk_tokens(10**6) == 128


@pytest.mark.parametrize("chunk", [None, 1, 5, 36, 100])
def test_sampled_logprobs_entropy_and_gradient_match_a_plain_softmax_at_any_chunk(chunk):
    torch.manual_seed(0)
    hidden = torch.randn(37, 8, requires_grad=True)
    head = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (37,))
    plain = torch.log_softmax(hidden @ head.T, -1)
    plain_logprobs = plain[torch.arange(37), targets]
    entropies = -(plain.exp() * plain).sum(-1).detach()
    gradients = torch.autograd.grad(plain_logprobs.square().sum(), (hidden, head))

    found, found_entropies = loss.sampled_logprobs(hidden, head, targets, fp32=True, chunk=chunk)
    found_gradients = torch.autograd.grad(found.square().sum(), (hidden, head))
    torch.testing.assert_close(found, plain_logprobs)
    torch.testing.assert_close(found_entropies, entropies)
    torch.testing.assert_close(found_gradients, gradients)


def test_the_entropy_is_not_computed_again_in_the_backward():
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            called.append(function)
            return function(*args, **(kwargs or {}))

    called = []
    hidden, head = torch.randn(32, 8), torch.randn(50, 8, requires_grad=True)
    targets = torch.zeros(32, dtype=torch.int64)
    with Calls():
        logprobs, _ = loss.sampled_logprobs(hidden, head, targets, True, chunk=16)
        logprobs.sum().backward()
    # Of two chunks, forward and backward.
    assert called.count(torch.ops.aten._log_softmax.default) == 4
    assert called.count(torch.ops.aten.exp.default) == 2


def test_pitfall_4_the_logits_of_all_tokens_never_exist_at_once(monkeypatch):
    rows = []
    whole = loss.head_logits

    def head_logits(hidden, head, fp32):
        rows.append(len(hidden))
        return whole(hidden, head, fp32)

    monkeypatch.setattr(loss, "head_logits", head_logits)
    hidden, head = torch.randn(100, 8), torch.randn(50, 8, requires_grad=True)
    targets = torch.zeros(100, dtype=torch.int64)
    logprobs, _ = loss.sampled_logprobs(hidden, head, targets, True, chunk=16)
    assert rows == [16] * 6 + [4]
    logprobs.sum().backward()
    assert sorted(rows[7:]) == [4] + [16] * 6  # recomputed in the backward, so not kept until then


def test_pitfall_3_fp32_logits_are_computed_in_fp32_and_not_cast_after_a_bf16_matmul():
    torch.manual_seed(0)
    hidden, head = torch.randn(64, 256).bfloat16(), torch.randn(100, 256)
    exact = hidden.double() @ head.double().T
    on, off = loss.head_logits(hidden, head, True), loss.head_logits(hidden, head, False)
    assert on.dtype == off.dtype == torch.float32
    assert (on.double() - exact).abs().max() < 1e-3
    assert (off.double() - exact).abs().max() > 1e-2
    # The negative control: a cast after it.
    torch.testing.assert_close(off, (hidden @ head.bfloat16().T).float())


@pytest.mark.parametrize("dtype, rounded", [(torch.float32, 0.0), (torch.bfloat16, 1e-3)])
def test_pitfall_3_split_logits_agree_with_fp32(dtype, rounded):
    """With logits whose standard deviation is 3. Gradients of hidden states in bf16 are rounded, a
    few otherwise."""
    torch.manual_seed(0)
    hidden = torch.randn(60, 1024).to(dtype).requires_grad_()
    head = (0.1 * torch.randn(2000, 1024)).requires_grad_()
    targets = torch.randint(2000, (60,))

    def found(fp32):
        logprobs, _ = loss.sampled_logprobs(hidden, head, targets, fp32, chunk=40)
        of_hidden, of_head = torch.autograd.grad(logprobs.sum(), (hidden, head))
        return logprobs.detach(), of_hidden.float(), of_head

    def error(tensor, reference):
        return ((tensor - reference).norm() / reference.norm()).item()

    logprobs, of_hidden, of_head = found(True)
    split_logprobs, split_of_hidden, split_of_head = found("split")
    off_logprobs, off_of_hidden, off_of_head = found(False)
    assert (split_logprobs - logprobs).abs().max() < 5e-5
    assert (off_logprobs - logprobs).abs().max() > 5e-3
    assert error(split_of_hidden, of_hidden) < max(1e-4, rounded)
    assert error(off_of_hidden, of_hidden) > 2e-3
    assert error(split_of_head, of_head) < 1e-4
    assert error(off_of_head, of_head) > 2e-3


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
    scores, mean_scores = (rewards + 1) / 2, tensor([0.25], [0.5])
    expected = {
        "none": centred,
        "prompt": centred / tensor([math.sqrt(0.75)], [1.0]),
        "batch": centred / math.sqrt((3 * 1 + 4 * 1) / 8),
        "mean": (scores - mean_scores) / mean_scores,  # MaxRL
    }
    for norm, advantages in expected.items():
        found = loss.advantages(rewards, usable, usable, norm, eps=0.0)
        torch.testing.assert_close(found, advantages)
    nobody = torch.full((1, 4), WRONG)
    assert (loss.advantages(nobody, usable[:1], usable[:1], "mean") == 0).all()


def test_the_batch_std_is_over_the_effective_batch():
    rewards = tensor([RIGHT, WRONG], [RIGHT, RIGHT])
    kept = loss.counted_samples(rewards, ALL, zero_variance_filter=True)
    assert kept.tolist() == [[True, True], [False, False]]
    advantages = loss.advantages(rewards, ALL, kept, "batch", eps=0.0)
    torch.testing.assert_close(advantages, tensor([1.0, -1.0], [0.0, 0.0]))

    everything = loss.counted_samples(rewards, ALL, zero_variance_filter=False)
    assert everything.all()
    advantages = loss.advantages(rewards, ALL, everything, "batch", eps=0.0)
    std = math.sqrt(2 / 4)
    torch.testing.assert_close(advantages, tensor([1 / std, -1 / std], [0.0, 0.0]))


def test_truncated_completions_are_no_members_of_their_group():
    rewards = tensor([RIGHT, WRONG, WRONG], [RIGHT, WRONG, RIGHT])
    usable = tensor([True, True, False], [True, False, True])
    lengths = tensor([3, 5, 100], [1, 100, 1])
    assert loss.zero_variance(rewards, usable).tolist() == [False, True]
    counted = loss.counted_samples(rewards, usable, True)
    assert counted.tolist() == [[True, True, False], [False, False, False]]
    advantages = loss.advantages(rewards, usable, counted, "none")
    assert advantages.tolist() == [[1, -1, 0], [0, 0, 0]]
    weights = loss.token_weights(lengths, counted, "prompt")
    torch.testing.assert_close(weights, tensor([1 / 8, 1 / 8, 0.0], [0.0, 0.0, 0.0]))
    assert loss.zero_variance(rewards, torch.zeros_like(usable)).all()  # nobody left in the group


@pytest.mark.parametrize("norm", ["prompt", "batch"])
def test_pitfall_7_a_group_constant_up_to_rounding_gets_no_huge_advantages(norm):
    # The mean is not 1/3 exactly in fp32: a std of ~1e-8 is what it divides by.
    third = torch.full((2, 3), 1 / 3)
    third[1] = 1e4 + 1 / 3
    usable = torch.ones(2, 3, dtype=torch.bool)
    assert loss.zero_variance(third, usable).all()
    assert loss.advantages(third, usable, usable, norm).abs().max() == 0
    # E[x^2] - E[x]^2 loses this std altogether.
    large, usable = tensor([1e4, 1e4 + 1]), tensor([True, True])
    advantages = loss.advantages(large, usable, usable, norm)
    torch.testing.assert_close(advantages, tensor([-1.0, 1.0]), atol=1e-4, rtol=0)


def test_no_positive_resampling_retires_at_nine_tenths():
    assert not loss.retires(0.0)
    assert not loss.retires(14 / 16)
    assert loss.retires(0.9)
    assert loss.retires(15 / 16)
    assert loss.retires(1.0)


# --- losses ---------------------------------------------------------------------------------------


CLIPS = {"dapo": (0.2, 0.26), "grpo": (0.2, 0.2), "gspo": (0.004, 0.005)}


def reference_term(name: str, a: float, b: float, sequence_ratio: float, advantage: float) -> float:
    """The equation of a loss for one token, in Python floats. a: log pi_train, b: log pi_gen."""
    rho = math.exp(a - b)
    if name == "cispo":
        return min(rho, 5) * advantage * a
    if name == "icepop":
        return rho * advantage * a if 0.5 <= rho <= 5 else 0.0
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return 4 / tau / (1 + math.exp(-tau * (rho - 1))) * advantage
    if name == "dppo":
        moved = math.exp(a) - math.exp(b)
        kept = moved <= 0.2 if advantage > 0 else moved >= -0.2
        return min(rho, 20) * advantage * a if kept else 0.0
    low, high = CLIPS[name]
    if name == "gspo":
        rho = sequence_ratio
    clipped = min(max(rho, 1 - low), 1 + high)
    return min(rho * advantage, clipped * advantage)


def reference_terms(name, logprobs, generator_logprobs, sampled, advantages):
    """The equations of the paper, token by token; returns values (their gradients: see below)."""
    terms = []
    for train, gen, counts, advantage in zip(logprobs, generator_logprobs, sampled, advantages):
        log_ratios = [a - b for a, b, c in zip(train, gen, counts) if c]
        of_sequence = math.exp(sum(log_ratios) / len(log_ratios))
        row = []
        for a, b, c in zip(train, gen, counts):
            row.append(reference_term(name, a, b, of_sequence, advantage) if c else 0.0)
        terms.append(row)
    return terms


@pytest.mark.parametrize("name", loss.LOSSES)
def test_losses_match_a_per_token_reference_in_value_and_gradient(name):
    torch.manual_seed(1)
    generator_logprobs = -3 * torch.rand(6, 9, dtype=torch.float64)
    spread = {"cispo": 1.5, "gspo": 0.05, "dppo": 2.0}.get(name, 0.5)
    logprobs = generator_logprobs + spread * torch.randn(6, 9, dtype=torch.float64)
    logprobs.requires_grad_()
    sampled, advantages = torch.rand(6, 9) < 0.8, torch.randn(6, dtype=torch.float64)
    given = generator_logprobs, sampled, advantages
    terms, log_rho, clipped = loss.token_terms(Recipe(loss=name), logprobs, *given)

    def reference(logprobs):
        lists = [tensor.tolist() for tensor in (logprobs, *given)]
        return torch.tensor(reference_terms(name, *lists), dtype=torch.float64)

    torch.testing.assert_close(terms, reference(logprobs))
    assert clipped.any() != (name == "sapo") and not clipped.all(), "the example should have both"
    expected = torch.where(sampled, logprobs - generator_logprobs, 0.0).detach()
    torch.testing.assert_close(log_rho, expected)
    terms.sum().backward()
    if name in ("cispo", "icepop", "dppo"):
        # The ratio is a constant to the gradient: term = constant x log pi.
        torch.testing.assert_close(logprobs.grad, (terms / logprobs).detach())
        return
    step = 1e-6  # the others: by finite differences of the reference
    for i, t in [(0, 0), (1, 4), (3, 2), (5, 8)]:
        moved = torch.zeros(6, 9, dtype=torch.float64)
        moved[i, t] = step
        difference = reference(logprobs + moved).sum() - reference(logprobs - moved).sum()
        slope = difference.item() / (2 * step)
        assert logprobs.grad[i, t].item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize(
    "name, advantage, expected",
    [
        ("dapo", 1.0, [1.26, 1.0, 0.1]),
        ("grpo", 1.0, [1.2, 1.0, 0.1]),
        ("dapo", -1.0, [-6.0, -1.0, -0.8]),
        ("grpo", -1.0, [-6.0, -1.0, -0.8]),
    ],
)
def test_worked_examples_of_the_clips(name, advantage, expected):
    logprobs = torch.log(tensor([0.6, 0.9, 0.05]))
    generator = torch.log(tensor([0.1, 0.9, 0.5]))  # ratios 6, 1, 0.1
    sampled = torch.ones(1, 3, dtype=torch.bool)
    recipe = Recipe(loss=name)
    terms, log_rho, clipped = loss.token_terms(
        recipe, logprobs, generator, sampled, tensor(advantage)
    )
    torch.testing.assert_close(terms, tensor(expected))
    torch.testing.assert_close(log_rho.exp(), tensor([6.0, 1.0, 0.1]))
    assert clipped.tolist() == [[advantage > 0, False, advantage < 0]]


PI, MU = tensor([0.6, 0.9, 0.05, 0.24]), tensor([0.1, 0.9, 0.5, 0.01])  # ratios 6, 1, 0.1, 24


@pytest.mark.parametrize(
    "name, advantage, slopes",
    [
        ("icepop", 1.0, [0, 1, 0, 0]),
        ("icepop", -1.0, [0, -1, 0, 0]),
        ("dppo", 1.0, [0, 1, 0.1, 0]),  # 0.6 - 0.1 and 0.24 - 0.01 are above 0.2
        ("dppo", -1.0, [-6, -1, 0, -20]),  # 0.05 - 0.5 is below -0.2, and 24 is capped at 20
    ],
)
def test_worked_examples_of_the_newer_losses(name, advantage, slopes):
    logprobs, sampled = torch.log(PI).requires_grad_(), torch.ones(1, 4, dtype=torch.bool)
    terms, _, clipped = loss.token_terms(
        Recipe(loss=name), logprobs, torch.log(MU), sampled, tensor(advantage)
    )
    terms.sum().backward()
    torch.testing.assert_close(logprobs.grad, tensor(slopes).float())
    torch.testing.assert_close(terms, (tensor(slopes) * torch.log(PI)).float())
    assert torch.equal(clipped, tensor(slopes) == 0)


@pytest.mark.parametrize("advantage, tau", [(1.0, 1.0), (-1.0, 1.05)])
def test_worked_examples_of_sapo(advantage, tau):
    sampled = torch.ones(1, 4, dtype=torch.bool)
    terms, _, clipped = loss.token_terms(
        Recipe(loss="sapo"), torch.log(PI), torch.log(MU), sampled, tensor(advantage)
    )
    expected = []
    for rho in (6, 1, 0.1, 24):
        sigmoid = 1 / (1 + math.exp(-tau * (rho - 1)))
        expected.append(4 / tau * sigmoid * advantage)
    torch.testing.assert_close(terms, tensor(expected))
    assert not clipped.any()


@pytest.mark.parametrize("name", loss.LOSSES)
def test_a_wrong_completion_that_has_become_unlikely_is_masked_and_no_other_is(name):
    """The mean over the sampled tokens of log pi_gen - log pi_train decides: above .5, and only
    where A < 0."""
    generator = torch.full((4, 3), -1.0)
    logprobs = tensor(
        [-1.6, -1.6, 9.0],
        [-1.4, -1.4, 9.0],
        [-1.6, -1.6, 9.0],
        [-3.0, -1.0, 9.0],
    ).requires_grad_()
    sampled = tensor([True, True, False]).expand(4, 3)
    given = logprobs, generator, sampled, tensor(-1.0, -1.0, 1.0, -1.0)
    plain, *_ = loss.token_terms(Recipe(loss=name), *given)
    masked, *_ = loss.token_terms(Recipe(loss=name, mask_sequences=True), *given)
    assert torch.equal(masked[1:3], plain[1:3])
    assert (masked[[0, 3]] == 0).all()
    (plain_gradient,) = torch.autograd.grad(plain.sum(), logprobs, retain_graph=True)
    (gradient,) = torch.autograd.grad(masked.sum(), logprobs)
    assert torch.equal(gradient[1:3], plain_gradient[1:3])
    assert (gradient[[0, 3]] == 0).all()
    if name in ("cispo", "dppo"):  # a clip may take the gradient of the others away
        assert (gradient[1:3, :2] != 0).all()


def test_pitfall_2_cispo_caps_the_ratio_itself_from_above_only():
    """And it is the ratio to what the generator recorded."""
    generator = torch.log(tensor([0.1, 0.1, 0.5]))
    logprobs = torch.log(tensor([0.55, 0.45, 0.005])).requires_grad_()  # ratios 5.5, 4.5, 0.01
    sampled, advantage = torch.ones(1, 3, dtype=torch.bool), tensor(1.0)
    terms, _, clipped = loss.token_terms(Recipe(), logprobs, generator, sampled, advantage)
    terms.sum().backward()
    # 5, not 1 + 5; 0.01 is not raised to anything.
    torch.testing.assert_close(logprobs.grad, tensor([5.0, 4.5, 0.01]))
    assert clipped.tolist() == [[True, False, False]]
    # The negative control: against recomputed log-probabilities the cap never bites.
    recomputed = logprobs.detach()
    _, log_rho, clipped = loss.token_terms(Recipe(), logprobs, recomputed, sampled, advantage)
    assert (log_rho == 0).all() and not clipped.any()


@pytest.mark.parametrize(
    "part, table",
    [
        ("loss", loss.LOSSES),
        ("aggregation", loss.AGGREGATIONS),
        ("advantage_norm", loss.NORMS),
    ],
)
def test_what_recipe_allows_is_what_there_is_a_function_for(part, table):
    """A name that stands in one of the two places only could not be chosen, or would end a run."""
    allowed = get_args(Recipe.__annotations__[part])
    assert {*allowed} == {*table}, f"Recipe.{part} and its table do not agree"


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
    given = logprobs.detach(), sampled, tensor(1.5, -0.5), tensor(0.25, 0.25)
    value, _ = loss.policy_loss(Recipe(loss=name), logprobs, *given)
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
    weights = torch.full((4,), 0.1, dtype=torch.float64)
    given = generator_logprobs, sampled, advantages, weights
    plain_detach, constants = torch.Tensor.detach, []

    def keep(tensor):
        constants.append(plain_detach(tensor))
        return constants[-1]

    def value(at, detach):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "detach", detach)
            return loss.policy_loss(Recipe(loss=name), at, *given)[0]

    def value_with_the_constants(at):
        kept = iter(constants)
        return value(at, lambda _: next(kept)).item()

    at = logprobs.clone().requires_grad_()
    value(at, keep).backward()
    step = 1e-6
    for i, t in sampled.nonzero().tolist():
        moved = torch.zeros(4, 6, dtype=torch.float64)
        moved[i, t] = step
        above = value_with_the_constants(logprobs + moved)
        below = value_with_the_constants(logprobs - moved)
        assert at.grad[i, t].item() == pytest.approx((above - below) / (2 * step), abs=1e-6)
    assert at.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", loss.LOSSES)
def test_pitfall_8_forced_tokens_have_no_weight_and_no_ratio(name):
    """Whatever stands at a forced token changes nothing: loss, gradient and metrics are those of
    the sampled ones."""
    torch.manual_seed(2)
    sampled = tensor([True, True, False, False, True])
    generator = tensor([-1.1, -0.7, 0.0, 0.0, -1.5])
    results = []
    for filler in (0.0, -700.0):
        logprobs = tensor([-1.0, -0.5, filler, filler, -2.0]).requires_grad_()
        given = generator, sampled, tensor(0.7), tensor(0.25)
        value, sums = loss.policy_loss(Recipe(loss=name), logprobs, *given)
        value.backward()
        assert logprobs.grad[0, 2:4].tolist() == [0, 0]
        gradients = logprobs.grad[0, [0, 1, 4]].tolist()
        results.append([value.item(), *gradients, *(total.item() for total in sums.values())])
    assert results[0] == results[1]


def test_on_policy_all_losses_have_the_same_gradient():
    logprobs = tensor([-1.0, -2.0], [-0.3, -0.1])
    given = logprobs, ALL, tensor(1.0, -0.5), tensor(0.25, 0.25)
    gradients = []
    for name in loss.LOSSES:
        here = logprobs.clone().requires_grad_()
        value, _ = loss.policy_loss(Recipe(loss=name), here, *given)
        value.backward()
        gradients.append(here.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


# The largest factor of A, or for cispo of A log pi.
MOST = {
    "cispo": 5.0,
    "dapo": 1.26,
    "grpo": 1.2,
    "gspo": 1.005,
    "icepop": 0.0,
    "sapo": 4.0,
    "dppo": 0.0,
}


@pytest.mark.parametrize("name", loss.LOSSES)
@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_a_ratio_beyond_all_numbers_that_is_cut_has_a_finite_gradient(name, advantage):
    """exp overflows above 88 in fp32, and infinity times 0 is no number. The clips cut from above
    where A >= 0."""
    generator = tensor([-200.0, -100.0, -0.5], [-0.6, -0.7, -0.5])
    logprobs = tensor([-0.1, -0.2, -0.3], [-0.5, -0.6, -0.4]).requires_grad_()
    assert torch.isinf((logprobs - generator).exp()[0, :2]).all()
    sampled, weights = torch.ones(2, 3, dtype=torch.bool), torch.full((2,), 1 / 6)
    given = logprobs, generator, sampled, tensor(advantage, -1.0)
    value, _ = loss.policy_loss(Recipe(loss=name), *given, weights)
    value.backward()
    assert value.isfinite()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[1].abs().min() > 0
    most = MOST[name] * advantage * (0.2 if name == "cispo" else 1)
    terms, _, clipped = loss.token_terms(Recipe(loss=name), *given)
    assert terms[0, :2].abs().max() <= most + 1e-5
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
    given = generator, sampled, tensor(1.0), tensor(1 / 3)
    _, sums = loss.policy_loss(Recipe(loss=name), logprobs, *given)
    assert sums["ratio"].item() == pytest.approx(7.1, rel=1e-5)
    assert sums["ratio_max"].item() == pytest.approx(6.0, rel=1e-5)
    kl = sum(rho - 1 - math.log(rho) for rho in (6.0, 1.0, 0.1))
    assert sums["kl"].item() == pytest.approx(kl, rel=1e-5)


# --- aggregation ----------------------------------------------------------------------------------


def test_aggregation_on_a_worked_example():
    lengths, counted = tensor([1, 3], [2, 6]), torch.ones(2, 2, dtype=torch.bool)
    expected = {
        "sample": tensor([1 / 4, 1 / 12], [1 / 8, 1 / 24]),
        "prompt": tensor([1 / 8, 1 / 8], [1 / 16, 1 / 16]),
        "token": torch.full((2, 2), 1 / 12),
    }
    for aggregation, weights in expected.items():
        found = loss.token_weights(lengths, counted, aggregation)
        torch.testing.assert_close(found, weights)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("aggregation", ["sample", "prompt", "token"])
def test_aggregation_matches_means_taken_one_after_the_other(aggregation):
    torch.manual_seed(3)
    P, G = 5, 4
    counted, lengths = torch.rand(P, G) < 0.8, torch.randint(1, 9, (P, G))
    weights = loss.token_weights(lengths, counted, aggregation)
    groups, found = [], 0.0  # the terms of each counted completion, by group
    for p in range(P):
        completions = []
        for g in range(G):
            terms = torch.randn(lengths[p, g]).tolist()
            found += weights[p, g].item() * sum(terms)
            if counted[p, g]:
                completions.append(terms)
        if completions:
            groups.append(completions)
    of_groups = [sum(completions, []) for completions in groups]  # the terms of a group
    if aggregation == "sample":
        expected = mean([mean(terms) for terms in sum(groups, [])])
    elif aggregation == "prompt":
        expected = mean([mean(terms) for terms in of_groups])
    else:
        expected = mean(sum(of_groups, []))
    assert found == pytest.approx(expected, abs=1e-6)
    assert (weights * lengths).sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["sample", "prompt", "token"])
def test_pitfall_6_the_loss_does_not_grow_with_the_groups_that_survive_the_filter(aggregation):
    lengths = torch.full((5, 4), 7)
    for survivors in (1, 2, 5):
        counted = torch.arange(5)[:, None].expand(5, 4) < survivors
        weights = loss.token_weights(lengths, counted, aggregation)
        assert (weights * lengths).sum().item() == pytest.approx(1.0)
    nothing = torch.zeros(5, 4, dtype=torch.bool)
    assert loss.token_weights(lengths, nothing, aggregation).sum() == 0


@pytest.mark.parametrize("aggregation", loss.AGGREGATIONS)
def test_pitfall_5_any_cut_into_micro_batches_gives_the_same_gradient(aggregation):
    torch.manual_seed(4)
    generator_logprobs = -torch.rand(12, 7)
    rewards = torch.where(torch.rand(3, 4) < 0.5, 1.0, -1.0)
    lengths = torch.randint(1, 8, (3, 4))
    usable = torch.ones(3, 4, dtype=torch.bool)
    sampled = torch.arange(7) < lengths.view(12, 1)
    advantages = loss.advantages(rewards, usable, usable, "batch").flatten()
    weights = loss.token_weights(lengths, usable, aggregation).flatten()

    def gradient(recipe, cut, weights_of=lambda rows: weights[rows]):
        """By a scale of all log-probabilities, added up over these micro-batches."""
        scale = torch.tensor(1.1, requires_grad=True)
        for rows in torch.arange(12).split(cut):
            of_rows = generator_logprobs[rows], sampled[rows], advantages[rows], weights_of(rows)
            value, _ = loss.policy_loss(recipe, generator_logprobs[rows] * scale, *of_rows)
            value.backward()
        return scale.grad.item()

    for recipe in [*(Recipe(loss=name) for name in loss.LOSSES), Recipe(mask_sequences=True)]:
        whole = gradient(recipe, [12])
        assert whole != 0 or recipe.loss == "gspo"  # whose clip has cut everything here
        for cut in ([1] * 12, [5, 7], [2, 3, 7]):
            assert gradient(recipe, cut) == pytest.approx(whole, rel=1e-5, abs=1e-7)

    def own_weights(rows):
        of_rows = lengths.view(12, 1)[rows], usable.view(12, 1)[rows]
        return loss.token_weights(*of_rows, "token").flatten() / 3

    # The negative control: means per micro-batch, which is the usual mistake, give something else.
    wrong = gradient(Recipe(), [2, 3, 7], own_weights)
    assert wrong != pytest.approx(gradient(Recipe(), [12]), rel=1e-2)
