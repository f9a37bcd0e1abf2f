"""loss.py against worked examples, and against references written as plain loops over single
tokens."""

import dataclasses
import math
import re
from typing import get_args

import pytest
import torch

import loss
from loss import RECIPES, Recipe

RIGHT, WRONG = 1.0, -1.0


def tensor(*rows):
    return torch.tensor(rows)


# --- recipes --------------------------------------------------------------------------------------

AXES = get_args(loss.Axis)
TABLE = {
    "scalerl": ("pipeline-8", "cispo", "prompt", "batch", True, True, True, "interruption"),
    "base": ("ppo-8", "dapo", "sample", "prompt", False, False, False, "interruption"),
    "grpo": ("ppo-8", "grpo", "sample", "prompt", False, False, False, "interruption"),
    "dapo": ("ppo-8", "dapo", "prompt", "prompt", False, True, False, "interruption"),
    "magistral": ("pipeline-8", "dapo", "prompt", "batch", False, True, False, "interruption"),
    "minimax": ("ppo-8", "cispo", "prompt", "prompt", True, True, False, "interruption"),
}


def test_recipes_are_the_table_of_the_study():
    assert [*RECIPES] == [*TABLE]
    for name, recipe in RECIPES.items():
        assert recipe.recipe == name
        assert tuple(getattr(recipe, axis) for axis in AXES) == TABLE[name]
    assert [round(48 * RECIPES[name].batch_factor) for name in TABLE] == [48, 48, 48, 80, 80, 80]


def test_leave_one_out_changes_one_axis_to_its_base_value():
    for axis in AXES:
        base = "penalty" if axis == "length_control" else getattr(RECIPES["base"], axis)
        changed = dataclasses.replace(Recipe(), leave_out=axis, **{axis: base})
        assert loss.leave_one_out(axis) == changed != Recipe()


# --- asynchrony -----------------------------------------------------------------------------------


def test_asynchrony_names():
    assert loss.parse_asynchrony("pipeline-8") == ("pipeline", 8)
    assert loss.parse_asynchrony("ppo-1") == ("ppo", 1)
    for wrong in ("pipeline", "pipeline--1", "ppo-0", "sync-1", "pipeline-x"):
        with pytest.raises(ValueError, match="pipeline-K"):
            loss.parse_asynchrony(wrong)
    assert loss.most_off_policy("pipeline-8") == 8
    assert loss.most_off_policy("ppo-8") == 7


def test_pitfall_15_work_in_flight_is_not_bounded_to_nothing_at_k_0():
    assert loss.groups_ahead("pipeline-0", 32, 5) == 32
    assert loss.groups_ahead("pipeline-8", 32, 5) == 288
    assert loss.groups_ahead("ppo-8", 32, 16) == 256
    assert loss.groups_ahead("ppo-8", 32, 19) == 5 * 32  # a run that goes on after 3 of the 8


def test_a_batch_is_the_oldest_finished_groups_and_waits_for_one_that_would_get_older_than_k():
    for done, unfinished, version, asynchrony, prompts, expected in (
        ([3, 1, 2], [], 3, "pipeline-8", 2, [1, 2]),
        ([3], [3, 3], 3, "pipeline-8", 2, None),  # not enough finished
        # At version 4 with k = 1 the unfinished group of version 3 must be in this batch.
        ([4, 4], [3], 4, "pipeline-1", 2, None),
        ([4, 4], [4], 4, "pipeline-1", 2, [0, 1]),
        # One of two unfinished groups would be late two steps on.
        ([5], [4, 4], 5, "pipeline-2", 1, None),
        ([5], [4, 4], 5, "pipeline-3", 1, [0]),
        # PPO-off-policy waits for all that was handed out, and never asks for freshness.
        ([0] * 3, [0], 0, "ppo-2", 2, None),
        ([0, 0], [], 1, "ppo-2", 2, [0, 1]),
    ):
        assert loss.choose_batch(done, unfinished, version, asynchrony, prompts) == expected


def test_ppo_publishes_each_kth_version_and_a_pipeline_every_one():
    assert [v for v in range(9) if loss.publishes("ppo-4", v)] == [0, 4, 8]
    assert [v for v in range(9) if loss.publishes("pipeline-8", v)] == [*range(9)]


# --- length control -------------------------------------------------------------------------------


def test_interruption_comes_when_open_thinking_reaches_its_budget():
    """Budgets of 10 and 3. Pitfall 8: thinking that was closed late keeps the whole answer budget.
    With the penalty nothing is interrupted, and the budgets are one."""
    sampled, closed_at = tensor(9, 10, 10, 12, 13), tensor(-1, -1, 10, 10, 10)
    interrupt, truncate = loss.interrupt_or_truncate("interruption", sampled, closed_at, 10, 3)
    assert interrupt.tolist() == [False, True, False, False, False]
    assert truncate.tolist() == [False, False, False, False, True]
    at_once = loss.interrupt_or_truncate("interruption", tensor(0), tensor(-1), 0, 3)
    assert [each.item() for each in at_once] == [True, False]
    sampled, closed_at = tensor(0, 10, 12, 13), tensor(-1, -1, -1, 2)
    interrupt, truncate = loss.interrupt_or_truncate("penalty", sampled, closed_at, 10, 3)
    assert interrupt.tolist() == [False] * 4
    assert truncate.tolist() == [False, False, False, True]


def test_rewards_and_the_length_penalty_on_correct_completions_only():
    def rewards(scores, lengths, length_control):
        given = tensor(scores), tensor(lengths)
        return loss.rewards(*given, length_control, max_length=120, penalty_length=20)[0].tolist()

    scores, lengths = [1.0, 1.0, 1.0, 0.0, 0.75, 0.25], [100, 110, 120, 120, 120, 100]
    assert rewards(scores, lengths, "interruption") == [1, 1, 1, -1, 0.5, -0.5]
    assert rewards(scores, lengths, "penalty") == [1.0, 0.5, 0.0, -1.0, -0.25, -0.5]
    assert rewards([1.0, 1.0], [600, 10], "penalty") == [0.0, 1.0]


# --- logits ---------------------------------------------------------------------------------------


def test_the_logits_of_a_chunk_are_bounded_in_bytes():
    assert loss.chunk_tokens(30) == 2048
    assert 0.99 * 2**29 < 3 * 4 * loss.chunk_tokens(151_936) * 151_936 <= 2**29
    assert loss.chunk_tokens(10**6) == 128


@pytest.mark.parametrize("chunk", [None, 1, 16, 37, 100])
def test_sampled_logprobs_entropy_and_gradient_match_a_plain_softmax_at_any_chunk(
    chunk, monkeypatch
):
    """Pitfall 4: the logits of all tokens never exist at once. They are computed again in the
    backward, and the entropy is not."""
    torch.manual_seed(0)
    hidden = torch.randn(37, 8, requires_grad=True)
    head = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (37,))
    plain = torch.log_softmax(hidden @ head.T, -1)
    plain_logprobs = plain[torch.arange(37), targets]
    entropies = -(plain.exp() * plain).sum(-1).detach()
    gradients = torch.autograd.grad(plain_logprobs.square().sum(), (hidden, head))

    rows, whole = [], loss.head_logits
    count = lambda hidden, *others: rows.append(len(hidden)) or whole(hidden, *others)
    monkeypatch.setattr(loss, "head_logits", count)
    found, found_entropies = loss.sampled_logprobs(hidden, head, targets, fp32=True, chunk=chunk)
    in_forward = len(rows)
    found_gradients = torch.autograd.grad(found.square().sum(), (hidden, head))
    torch.testing.assert_close(found, plain_logprobs)
    torch.testing.assert_close(found_entropies, entropies)
    torch.testing.assert_close(found_gradients, gradients)
    assert not found_entropies.requires_grad
    assert max(rows) <= (chunk or 37) and sum(rows[:in_forward]) == sum(rows[in_forward:]) == 37


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pitfall_3_fp32_logits_are_computed_in_fp32_whole_or_split(dtype):
    """And are not cast after a matmul in bf16, which is what off means. Logits have a standard
    deviation of 3; gradients of hidden states in bf16 are rounded."""
    torch.manual_seed(0)
    hidden = torch.randn(60, 1024).to(dtype).requires_grad_()
    head = (0.1 * torch.randn(2000, 1024)).requires_grad_()
    targets = torch.randint(2000, (60,))

    def found(logits):
        logprobs = torch.log_softmax(logits, -1).gather(-1, targets[:, None])
        return logits, *torch.autograd.grad(logprobs.sum(), (hidden, head), retain_graph=True)

    exact = found(hidden.double() @ head.double().T)
    rounded = [0, 2e-3 if dtype == torch.bfloat16 else 0, 0]
    for fp32, most in ((True, 1e-5), ("split", 1e-4), (False, None)):
        logits = loss.head_logits(hidden, head, fp32)
        for tensor, reference, more in zip(found(logits), exact, rounded):
            error = ((tensor.double() - reference).norm() / reference.norm()).item()
            assert error < most + more if most else error > 1e-3
    plain = loss.head_logits(hidden, head, True)
    with torch.no_grad():
        head.mul_(2)
    torch.testing.assert_close(loss.head_logits(hidden, head, True), 2 * plain)  # no stale copy


# --- which samples count, advantages --------------------------------------------------------------


def test_advantage_norms_on_a_worked_example():
    rewards = tensor([RIGHT, WRONG, WRONG, WRONG], [RIGHT, RIGHT, WRONG, WRONG])
    usable = torch.ones_like(rewards, dtype=torch.bool)
    centred = tensor([1.5, -0.5, -0.5, -0.5], [1.0, 1.0, -1.0, -1.0])
    scores, mean_scores = (rewards + 1) / 2, tensor([0.25], [0.5])
    for norm, divisor in (
        ("none", 1.0),
        ("prompt", tensor([math.sqrt(0.75) + 1e-6], [1.0 + 1e-6])),
        ("batch", math.sqrt((3 * 1 + 4 * 1) / 8) + 1e-6),
    ):
        found = loss.advantages(rewards, usable, usable, norm)
        torch.testing.assert_close(found, centred / divisor, rtol=3e-7, atol=0)
    found = loss.advantages(rewards, usable, usable, "mean", eps=0.0)
    torch.testing.assert_close(found, (scores - mean_scores) / mean_scores)  # MaxRL
    nobody = torch.full((1, 4), WRONG)
    assert (loss.advantages(nobody, usable[:1], usable[:1], "mean") == 0).all()


def test_only_the_effective_batch_counts():
    """Truncated completions are no members of their group. Groups without variance are filtered, or
    stay in the denominators."""
    rewards = tensor([RIGHT, WRONG, WRONG], [RIGHT, WRONG, RIGHT])
    usable = tensor([True, True, False], [True, False, True])
    lengths = tensor([3, 5, 100], [1, 100, 1])
    assert loss.zero_variance(rewards, usable).tolist() == [False, True]
    assert loss.zero_variance(rewards, usable & False).all()  # nobody left in the group
    for filter, counted, std, weights in (
        (True, usable & tensor([True], [False]), 1.0, ([1 / 8, 1 / 8, 0], [0, 0, 0])),
        (False, usable, math.sqrt(2 / 4), ([1 / 16, 1 / 16, 0], [1 / 4, 0, 1 / 4])),
    ):
        found = loss.counted_samples(rewards, usable, filter)
        assert torch.equal(found, counted)
        advantages = loss.advantages(rewards, usable, found, "batch", eps=0.0)
        torch.testing.assert_close(advantages, tensor([1 / std, -1 / std, 0.0], [0.0, 0.0, 0.0]))
        torch.testing.assert_close(loss.token_weights(lengths, found, "prompt"), tensor(*weights))
        found &= False
        assert usable.sum() == 4, "the caller's tensor is left alone"


@pytest.mark.parametrize("norm", ["prompt", "batch"])
def test_pitfall_7_a_group_constant_up_to_rounding_gets_no_huge_advantages(norm):
    # The mean is not 1/3 exactly in fp32: a std of ~1e-8 is what it divides by.
    third = torch.full((2, 3), 1 / 3)
    third[1] = 1e4 + 1 / 3
    usable = torch.ones(2, 3, dtype=torch.bool)
    assert loss.advantages(third, usable, usable, norm).abs().max() == 0
    # E[x^2] - E[x]^2 loses this std altogether.
    large, usable = tensor([1e4, 1e4 + 1]), tensor([True, True])
    advantages = loss.advantages(large, usable, usable, norm)
    torch.testing.assert_close(advantages, tensor([-1.0, 1.0]), atol=1e-4, rtol=0)


def test_no_positive_resampling_retires_at_nine_tenths():
    assert [loss.retires(rate) for rate in (0.0, 14 / 16, 0.9, 15 / 16)] == [0, 0, 1, 1]


# --- losses ---------------------------------------------------------------------------------------


def clipped(low, high, of_sequence=False):
    def term(a, b, s, A):
        rho = math.exp(s if of_sequence else a - b)
        bounded = min(max(rho, 1 - low), 1 + high)
        return min(rho * A, bounded * A), bounded * A < rho * A

    return term


def sapo(a, b, s, A):
    tau = 1.0 if A > 0 else 1.05
    return 4 / tau / (1 + math.exp(-tau * (math.exp(a - b) - 1))) * A, False


def icepop(a, b, s, A):
    kept = 0.5 <= math.exp(a - b) <= 5
    return kept * math.exp(a - b) * A * a, not kept


def dppo(a, b, s, A):
    moved = math.exp(a) - math.exp(b)
    kept = moved <= 0.2 if A > 0 else moved >= -0.2
    return kept * min(math.exp(a - b), 20) * A * a, not kept


# For each loss: its equation for one token in Python floats, with whether a clip decides it (a: log
# pi_train, b: log pi_gen, s: mean_t (a - b)); and the slopes of its terms by a, where A is 1 and
# where A is -1, at ratios of 6, 1, .1 and 24 (PI / MU).
PI, MU = tensor([0.6, 0.9, 0.05, 0.24]), tensor([0.1, 0.9, 0.5, 0.01])
S = 14.4 ** (1 / 4)  # their geometric mean
of_sapo = lambda rho, tau: 4 * rho / (2 * math.cosh(tau * (rho - 1) / 2)) ** 2
TABLE_OF_LOSSES = {
    "cispo": (
        lambda a, b, s, A: (min(math.exp(a - b), 5) * A * a, math.exp(a - b) > 5),
        [5, 1, 0.1, 5],
        [-5, -1, -0.1, -5],
    ),
    "dapo": (clipped(0.2, 0.26), [0, 1, 0.1, 0], [-6, -1, 0, -24]),
    "grpo": (clipped(0.2, 0.2), [0, 1, 0.1, 0], [-6, -1, 0, -24]),
    "gspo": (clipped(0.004, 0.005, of_sequence=True), [0] * 4, [-S] * 4),
    "icepop": (icepop, [0, 1, 0, 0], [0, -1, 0, 0]),
    "sapo": (
        sapo,
        [of_sapo(rho, 1.0) for rho in (6, 1, 0.1, 24)],
        [-of_sapo(rho, 1.05) for rho in (6, 1, 0.1, 24)],
    ),
    "dppo": (dppo, [0, 1, 0.1, 0], [-6, -1, 0, -20]),
}
every_loss = pytest.mark.parametrize("name", loss.LOSSES)


@every_loss
def test_losses_match_a_per_token_reference_in_value_and_gradient(name):
    """Forced tokens have no term, and nothing at one of them changes another."""
    equation, *slopes = TABLE_OF_LOSSES[name]
    torch.manual_seed(1)
    generator = -3 * torch.rand(6, 9, dtype=torch.float64)
    spread = {"cispo": 1.5, "gspo": 0.05, "dppo": 2.0}.get(name, 0.5)
    logprobs = generator + spread * torch.randn(6, 9, dtype=torch.float64)
    sampled, advantages = torch.rand(6, 9) < 0.8, torch.randn(6, dtype=torch.float64)
    given = logprobs, generator, sampled, advantages
    terms, log_rho, cut = loss.token_terms(Recipe(loss=name), *given)
    assert cut.any() != (name == "sapo") and not cut.all(), "the example should have both"
    for i, A in enumerate(advantages.tolist()):
        s = (logprobs - generator)[i][sampled[i]].mean().item()
        for t, counts in enumerate(sampled[i].tolist()):
            a, b = logprobs[i, t].item(), generator[i, t].item()
            term, is_cut = equation(a, b, s, A) if counts else (0.0, False)
            assert terms[i, t].item() == pytest.approx(term, rel=1e-6), (i, t)
            assert cut[i, t] == is_cut
            assert log_rho[i, t].item() == pytest.approx(a - b if counts else 0.0)

    for advantage, expected in zip((1.0, -1.0), slopes):
        at = torch.log(PI).requires_grad_()
        every = torch.ones(1, 4, dtype=torch.bool)
        terms, *_ = loss.token_terms(Recipe(loss=name), at, torch.log(MU), every, tensor(advantage))
        terms.sum().backward()
        torch.testing.assert_close(at.grad, tensor(expected).float(), atol=1e-6, rtol=1e-4)


@every_loss
def test_the_gradient_of_every_loss_agrees_with_finite_differences(name, monkeypatch):
    """Of its value in float64, at ratios on both sides of any clip. What is detached is a constant:
    it is kept."""
    torch.manual_seed(3)
    generator_logprobs = -3 * torch.rand(4, 6, dtype=torch.float64)
    logprobs = generator_logprobs + torch.randn(4, 6, dtype=torch.float64)
    sampled, advantages = torch.rand(4, 6) < 0.8, torch.randn(4, dtype=torch.float64)
    given = generator_logprobs, sampled, advantages, torch.full((4,), 0.1, dtype=torch.float64)
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


@every_loss
def test_every_loss_pushes_sampled_tokens_the_way_of_their_advantage(name):
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -0.1, -3.0]], requires_grad=True)
    sampled = tensor([True, True, False], [True, False, True])
    given = logprobs.detach(), sampled, tensor(1.5, -0.5), tensor(0.25, 0.5)
    value, _ = loss.policy_loss(Recipe(loss=name), logprobs, *given)
    value.backward()
    expected = -tensor([1.5 * 0.25], [-0.5 * 0.5]) * sampled
    torch.testing.assert_close(logprobs.grad, expected)


@every_loss
def test_a_wrong_completion_that_has_become_unlikely_is_masked_and_no_other_is(name):
    """The mean over the sampled tokens of log pi_gen - log pi_train decides: above .5, and only
    where A < 0."""
    generator = torch.full((4, 3), -1.0)
    logprobs = tensor([-1.6, -1.6, 9.0], [-1.4, -1.4, 9.0], [-1.6, -1.6, 9.0], [-3.0, -1.0, 9.0])
    sampled = tensor([True, True, False]).expand(4, 3)
    given = logprobs, generator, sampled, tensor(-1.0, -1.0, 1.0, -1.0)
    plain, *_ = loss.token_terms(Recipe(loss=name), *given)
    masked, *_ = loss.token_terms(Recipe(loss=name, mask_sequences=True), *given)
    assert torch.equal(masked[1:3], plain[1:3])
    assert (masked[[0, 3]] == 0).all()


def test_pitfall_2_against_recomputed_logprobs_the_cap_of_cispo_would_never_bite():
    """The negative control of its table: the ratio is to what the generator has recorded."""
    logprobs, every = torch.log(PI), torch.ones(1, 4, dtype=torch.bool)
    for generator, bites in ((torch.log(MU), True), (logprobs, False)):
        _, log_rho, cut = loss.token_terms(Recipe(), logprobs, generator, every, tensor(1.0))
        assert cut.any() == (log_rho != 0).any() == bites


def test_each_function_says_the_formula_of_its_loss_and_a_clip_is_in_the_formula():
    for name, (term, formula, constants) in loss.LOSSES.items():
        docstring = " ".join(term.__doc__.split())
        assert docstring.startswith(formula), (
            f"the docstring of {term.__name__} begins with another formula"
        )
        assert {*constants} == {*re.findall(r"eps_\w+", formula)}, name
        for constant in constants:
            changed = Recipe(loss=name, **{constant: 0.123})
            assert loss.constants(changed) == loss.constants(Recipe(loss=name)) | {constant: 0.123}


@every_loss
@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_a_ratio_beyond_all_numbers_that_is_cut_has_a_finite_gradient(name, advantage):
    """exp overflows above 88 in fp32, and infinity times 0 is no number. The clips cut from above
    where A >= 0."""
    generator = tensor([-200.0, -100.0, -0.5], [-0.6, -0.7, -0.5])
    logprobs = tensor([-0.1, -0.2, -0.3], [-0.5, -0.6, -0.4]).requires_grad_()
    assert torch.isinf((logprobs - generator).exp()[0, :2]).all()
    given = logprobs, generator, torch.ones(2, 3, dtype=torch.bool), tensor(advantage, -1.0)
    value, _ = loss.policy_loss(Recipe(loss=name), *given, torch.full((2,), 1 / 6))
    value.backward()
    assert value.isfinite()
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[1].abs().min() > 0


@every_loss
def test_what_is_logged_of_the_ratio_is_of_tokens_whatever_the_loss(name):
    """Also under gspo, whose own ratio is one per sequence. Pitfall 8: a forced token has no
    ratio."""
    generator = torch.log(tensor([0.1, 0.9, 0.5, 0.3]))
    logprobs = torch.log(tensor([0.6, 0.9, 0.05, 0.9]))
    sampled, ratios = tensor([True, True, True, False]), (6.0, 1.0, 0.1)
    given = logprobs, generator, sampled, tensor(1.0)
    _, sums = loss.policy_loss(Recipe(loss=name), *given, tensor(1 / 3))
    *_, cut = loss.token_terms(Recipe(loss=name), *given)
    expected = {
        "ratio": sum(ratios),
        "ratio_squared": 37.01,
        "ratio_max": 6.0,
        "clipped": cut.sum().item(),
        "kl": sum(rho - 1 - math.log(rho) for rho in ratios),
    }
    assert {name: total.item() for name, total in sums.items()} == pytest.approx(expected, rel=1e-5)
    _, nothing = loss.policy_loss(Recipe(), logprobs, generator, sampled & False, *given[3:] * 2)
    assert all(total == 0 for total in nothing.values())


# --- aggregation ----------------------------------------------------------------------------------


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("aggregation", loss.AGGREGATIONS)
def test_aggregation_matches_means_taken_one_after_the_other(aggregation):
    """Pitfall 6: whatever the number of groups that survive the filter, weights sum to 1."""
    torch.manual_seed(3)
    P, G = 5, 4
    for share in (0.8, 0.3, 0.0):
        counted, lengths = torch.rand(P, G) < share, torch.randint(1, 9, (P, G))
        weights = loss.token_weights(lengths, counted, aggregation)
        found, groups = 0.0, [[] for _ in range(P)]  # the terms of each counted completion
        for p in range(P):
            for g in range(G):
                terms = torch.randn(lengths[p, g]).tolist()
                found += weights[p, g].item() * sum(terms)
                if counted[p, g]:
                    groups[p].append(terms)
        if not counted.any():
            assert found == 0
            continue
        groups = [completions for completions in groups if completions]
        of_groups = [sum(completions, []) for completions in groups]
        expected = {
            "sample": mean([mean(terms) for terms in sum(groups, [])]),
            "prompt": mean([mean(terms) for terms in of_groups]),
            "token": mean(sum(of_groups, [])),
        }
        assert found == pytest.approx(expected[aggregation], abs=1e-6)
        assert (weights * lengths).sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", loss.AGGREGATIONS)
def test_pitfall_5_any_cut_into_micro_batches_gives_the_same_gradient(aggregation):
    torch.manual_seed(4)
    generator_logprobs = -torch.rand(12, 7)
    scores, usable = (torch.rand(3, 4) < 0.5).float(), torch.ones(3, 4, dtype=torch.bool)
    lengths = torch.randint(1, 8, (3, 4))
    sampled = torch.arange(7) < lengths.view(12, 1)

    def gradient(recipe, cut, weights_of=None):
        """By a scale of all log-probabilities, added up over these micro-batches."""
        worth = loss.worth(recipe, scores, lengths, usable, 5, 2)
        scale = torch.tensor(1.1, requires_grad=True)
        for rows in torch.arange(12).split(cut):
            weights = weights_of(rows) if weights_of else worth.weights_PG.flatten()[rows]
            of_rows = generator_logprobs[rows], sampled[rows], worth.advantages_PG.flatten()[rows]
            value, _ = loss.policy_loss(recipe, generator_logprobs[rows] * scale, *of_rows, weights)
            value.backward()
        return scale.grad.item()

    usual = Recipe(aggregation=aggregation)
    masks = dataclasses.replace(usual, mask_sequences=True, length_control="penalty")
    for recipe in [*(dataclasses.replace(usual, loss=name) for name in loss.LOSSES), masks]:
        whole = gradient(recipe, [12])
        for cut in ([1] * 12, [5, 7], [2, 3, 7]):
            assert gradient(recipe, cut) == pytest.approx(whole, rel=1e-5, abs=1e-7)

    def own_weights(rows):
        of_rows = lengths.view(12, 1)[rows], usable.view(12, 1)[rows]
        return loss.token_weights(*of_rows, "token").flatten() / 3

    # The negative control: means per micro-batch, which is the usual mistake, give something else.
    wrong = gradient(usual, [2, 3, 7], own_weights)
    assert wrong != pytest.approx(gradient(usual, [12]), rel=1e-2)
