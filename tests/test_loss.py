"""loss.py against worked examples, and against one reference of the whole loss: plain loops over
single tokens."""

import dataclasses
import itertools
import math
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from programs import rows

import loss
from loss import RECIPES, Recipe

every_loss = pytest.mark.parametrize("name", loss.LOSSES)


def tensor(*rows):
    return torch.tensor(rows)


# --- recipes --------------------------------------------------------------------------------------

FIELDS = {axis: axis.removeprefix("no_") for axis in get_args(loss.Axis)}
TABLE = """\
scalerl pipeline-8 cispo prompt batch True True False interruption 48
base ppo-8 dapo sample prompt False False True interruption 48
grpo ppo-8 grpo sample prompt False False True interruption 48
dapo ppo-8 dapo prompt prompt False True True interruption 80
magistral pipeline-8 dapo prompt batch False True True interruption 80
minimax ppo-8 cispo prompt prompt True True True interruption 80"""


def test_recipes_are_the_table_of_the_study():
    rows = [
        [
            name,
            *(getattr(recipe, field) for field in FIELDS.values()),
            round(48 * recipe.batch_factor),
        ]
        for name, recipe in RECIPES.items()
    ]
    assert [" ".join(map(str, row)) for row in rows] == TABLE.split("\n")


def test_leave_one_out_changes_one_axis_to_its_base_value():
    for axis, field in FIELDS.items():
        base = "penalty" if axis == "length_control" else getattr(RECIPES["base"], field)
        changed = dataclasses.replace(Recipe(), leave_out=axis, **{field: base})
        assert loss.leave_one_out(axis) == changed != Recipe()


def test_a_clip_of_the_recipe_comes_before_that_of_the_loss():
    assert loss.constants(Recipe(eps_max=8.0)) == {"eps_max": 8.0}
    found = loss.constants(Recipe(loss="dapo", eps_low=0.0))
    assert found == {"eps_low": 0.0, "eps_high": 0.26}


# --- asynchrony -----------------------------------------------------------------------------------


def test_asynchrony_names():
    for name, kind, k, off_policy in (("pipeline-8", "pipeline", 8, 8), ("ppo-8", "ppo", 8, 7)):
        assert loss.parse_asynchrony(name) == (kind, k)
        assert loss.most_off_policy(name) == off_policy
    for wrong in ("pipeline", "pipeline--1", "ppo-0", "sync-1"):
        with pytest.raises(ValueError, match="pipeline-K"):
            loss.parse_asynchrony(wrong)


# The versions of finished and of unfinished groups; the version to be trained; prompts in a batch.
BATCHES = """
3 1 2 | | 3 pipeline-8 2 | 1 2
3 | 3 3 | 3 pipeline-8 2 | not enough are finished
4 4 | 3 | 4 pipeline-1 2 | the unfinished group of version 3 must be in this batch
4 4 | 4 | 4 pipeline-1 2 | 0 1
5 | 4 4 | 5 pipeline-2 1 | one of two unfinished groups would be late two steps on
5 | 4 4 | 5 pipeline-3 1 | 0
0 0 0 | 0 | 0 ppo-2 2 | PPO-off-policy waits for all that was handed out
0 0 | | 1 ppo-2 2 | 0 1
"""


@pytest.mark.parametrize("row", rows(BATCHES))
def test_a_batch_is_the_oldest_finished_groups_and_waits_for_one_that_would_get_older_than_k(row):
    done, unfinished, batch, expected = map(str.split, row)
    version, asynchrony, prompts = batch
    versions = [*map(int, done)], [*map(int, unfinished)]
    found = loss.choose_batch(*versions, int(version), asynchrony, int(prompts))
    waits = not expected[0].isdecimal()
    assert found == (None if waits else [*map(int, expected)])


# --- length control -------------------------------------------------------------------------------


def test_the_length_penalty_is_on_correct_completions_only():
    scores = tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.75, 0.25])
    lengths = tensor([60, 100, 110, 120, 600, 120, 120, 100])
    credit = loss.credit(Recipe(length_control="penalty"), scores, lengths, lengths > 0, 100, 20)
    assert credit.rewards_PG.tolist() == [[1.0, 1.0, 0.5, 0.0, 0.0, -1.0, -0.25, -0.5]]


# --- logits ---------------------------------------------------------------------------------------


def test_the_logits_of_a_chunk_are_bounded_in_bytes():
    assert loss.chunk_tokens(30) == 2048
    in_bytes = 3 * 4 * 151_936 * loss.chunk_tokens(151_936)
    assert 0.99 * 2**29 < in_bytes <= 2**29
    assert loss.chunk_tokens(10**6) == 128


def test_pitfall_4_logprobs_and_gradients_of_chunks_are_those_of_a_plain_softmax(
    monkeypatch,
):
    """The logits of all tokens never exist at once. They are computed again in the backward."""
    torch.manual_seed(0)
    hidden = torch.randn(37, 8, requires_grad=True)
    head = torch.randn(50, 8, requires_grad=True)
    targets = torch.randint(50, (37,))
    head_logits = Mock(wraps=loss.head_logits)
    monkeypatch.setattr(loss, "head_logits", head_logits)
    monkeypatch.setattr(loss, "chunk_tokens", lambda _: 16)
    found, entropies = loss.sampled_logprobs(hidden, loss.Head(head), targets, True)
    plain = torch.distributions.Categorical(logits=hidden @ head.T)
    expected = plain.log_prob(targets)
    torch.testing.assert_close((found, entropies), (expected, plain.entropy()))
    sums = [logprobs.square().sum() for logprobs in (found, expected)]
    torch.testing.assert_close(*(torch.autograd.grad(each, (hidden, head)) for each in sums))
    rows = [len(call.args[0]) for call in head_logits.call_args_list]
    assert max(rows) == 16 and sum(rows) == 2 * 37


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pitfall_3_fp32_logits_are_computed_in_fp32_whole_or_split(dtype):
    """And are not cast after a matmul in bf16, which is what off means. Logits have a standard
    deviation of 3; gradients of hidden states in bf16 are rounded. The head has all that heads
    have: a bias (these numbers are exact in bf16), a factor and a cap."""
    torch.manual_seed(0)
    hidden = torch.randn(60, 1024).to(dtype).requires_grad_()
    head = (0.1 * torch.randn(2000, 1024)).requires_grad_()
    targets, bias = torch.randint(2000, (60, 1)), torch.arange(2000.0) % 4
    whole = loss.Head(head, bias, scale=0.9, cap=20.0)

    def with_gradients(logits):
        logprobs = torch.log_softmax(logits, -1).gather(-1, targets)
        return logits, *torch.autograd.grad(logprobs.sum(), (hidden, head))

    scaled = 0.9 * (hidden.double() @ head.double().T + bias)
    exact = with_gradients(20 * torch.tanh(scaled / 20))
    rounding = [0, 2e-3 if dtype == torch.bfloat16 else 0, 0]
    for fp32, most in ((True, 1e-5), ("split", 1e-4), (False, None)):
        found = with_gradients(loss.head_logits(hidden, whole, fp32))
        for value, reference, rounded in zip(found, exact, rounding):
            error = (value.double() - reference).norm() / reference.norm()
            assert error < most + rounded if most else error > 1e-3


# --- which samples count, advantages, weights -----------------------------------------------------


@pytest.mark.parametrize(
    "filtered, completions, prompts, tokens", [(True, 7, 2, 32), (False, 10, 3, 44)]
)
def test_pitfall_6_means_are_over_the_completions_that_count(
    filtered, completions, prompts, tokens
):
    """Two completions and the whole last group are not usable. The third group has no variance: it
    counts only without the filter."""
    scores = tensor([1.0, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 1, 0])
    usable = tensor([1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]).bool()
    lengths = tensor([1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3], [4, 5, 6, 7])
    centred = tensor([4 / 3, -2 / 3, -2 / 3, 0], [0.5, 0.5, -1.5, 0.5])
    divisors = {
        "none": 1,
        "prompt": tensor([8 / 9], [3 / 4]).sqrt(),
        "batch": math.sqrt((8 / 3 + 3) / completions),
        "mean": tensor([2 / 3], [3 / 2]),
    }
    denominators = {
        "sample": completions * lengths,
        "prompt": prompts * tensor([6], [26], [12], [1]),
        "token": tokens,
    }
    counted = usable.clone()
    counted[2] &= not filtered
    for norm, aggregation in itertools.product(loss.NORMS, loss.AGGREGATIONS):
        how = {"advantage_norm": norm, "aggregation": aggregation}
        recipe = Recipe(zero_variance_filter=filtered, **how)
        credit = loss.credit(recipe, scores, lengths, usable, 4, 2)
        torch.testing.assert_close(credit.advantages_PG[:2], centred / divisors[norm])
        assert not credit.advantages_PG[2:].any()
        torch.testing.assert_close(credit.weights_PG, counted / denominators[aggregation])
        nothing = loss.credit(recipe, scores, lengths, usable & False, 4, 2)
        assert not nothing.advantages_PG.any() and not nothing.weights_PG.any()


@pytest.mark.parametrize("norm", ["prompt", "batch"])
def test_pitfall_7_a_group_constant_up_to_rounding_gets_no_huge_advantages(norm):
    # In fp32 the mean of seven such numbers is another one: what it divides by is as small.
    constant = tensor([1 / 3] * 7, [1e4 + 0.1] * 7)
    usable = constant > 0
    assert not loss.advantages(constant, usable, usable, norm).any()
    # E[x^2] - E[x]^2 loses this std altogether.
    large = tensor([1e4, 1e4 + 1])
    found = loss.advantages(large, large > 0, large > 0, norm)
    torch.testing.assert_close(found, tensor([-1.0, 1.0]), atol=1e-4, rtol=0)


# --- the reference --------------------------------------------------------------------------------
# For each loss its equation for one token: the term, its derivative by log pi_train, and whether a
# clip decides it. a: log pi_train, rho: pi_train / pi_gen, s: the geometric mean of rho over the
# completion, A: its advantage.


def cispo(a, rho, s, A):
    slope = min(rho, 5) * A
    return slope * a, slope, rho > 5


def clipped(rho, A, low, high):
    bounded = min(max(rho, 1 - low), 1 + high)
    is_clipped = bounded * A < rho * A
    return min(rho * A, bounded * A), 0.0 if is_clipped else rho * A, is_clipped


def icepop(a, rho, s, A):
    kept = 0.5 <= rho <= 5
    slope = kept * rho * A
    return slope * a, slope, not kept


def sapo(a, rho, s, A):
    tau = 1.0 if A > 0 else 1.05
    sigmoid = 1 / (1 + math.exp(-tau * (rho - 1)))
    return 4 / tau * sigmoid * A, 4 * sigmoid * (1 - sigmoid) * rho * A, False


def dppo(a, rho, s, A):
    sign = (A > 0) - (A < 0)
    moved = math.exp(a) - math.exp(a) / rho
    kept = moved * sign <= 0.2
    slope = kept * min(rho, 20) * A
    return slope * a, slope, not kept


EQUATIONS = {
    "cispo": cispo,
    "dapo": lambda a, rho, s, A: clipped(rho, A, 0.2, 0.26),
    "grpo": lambda a, rho, s, A: clipped(rho, A, 0.2, 0.2),
    "gspo": lambda a, rho, s, A: clipped(s, A, 0.004, 0.005),
    "icepop": icepop,
    "sapo": sapo,
    "dppo": dppo,
}
B, T = 60, 8


@every_loss
def test_pitfalls_2_5_8_the_loss_is_that_of_single_tokens_however_the_batch_is_cut(name):
    """And so is its gradient, and what is logged: ratios of tokens, also under gspo, whose own one
    is of the sequence. Pitfall 2: the cap of cispo is on the ratio to what the generator has
    recorded. Pitfall 5: micro-batches add up, whatever the cut. Pitfall 8: forced tokens have no
    weight, no ratio and no gradient; they have a placeholder for log pi_gen, which would make a
    ratio. Some completions have drifted away as a whole, and the last one is empty."""
    torch.manual_seed(0)
    sampled = torch.rand(B, T) < 0.8
    sampled[-1] = False
    logprobs = -3 * torch.rand(B, T, dtype=torch.float64)
    log_rho = torch.randn(B, 1) + 1.5 * torch.randn(B, T)
    generator = torch.where(sampled, logprobs - log_rho, 0.0)
    advantages, weights = torch.randn(B) * (torch.rand(B) < 0.8), torch.rand(B)
    given = logprobs.requires_grad_(), generator, sampled, advantages, weights
    for masks in (False, True):
        recipe = Recipe(loss=name, mask_sequences=masks)
        expected, slopes, clips = 0.0, torch.zeros_like(logprobs), 0
        for i, t in sampled.nonzero().tolist():
            a, b = logprobs[i, t].item(), generator[i, t].item()
            A, weight = advantages[i].item(), weights[i].item()
            mean_log = (logprobs - generator)[i][sampled[i]].mean().item()
            term, slope, is_clipped = EQUATIONS[name](a, math.exp(a - b), math.exp(mean_log), A)
            if not (masks and A < 0 and mean_log < -0.5):
                expected -= weight * term
                slopes[i, t] = -weight * slope
            clips += is_clipped

        for cut in ([B], [1] * B, [5, 40, 15]):
            parts = zip(*(each.split(cut) for each in given))
            value = sum(loss.policy_loss(recipe, *part)[0] for part in parts)
            assert value.item() == pytest.approx(expected, rel=1e-5)
            (found,) = torch.autograd.grad(value, logprobs)
            torch.testing.assert_close(found, slopes, rtol=1e-5, atol=1e-7)
        _, sums = loss.policy_loss(recipe, *given)
        rho = (logprobs - generator)[sampled].detach().exp()
        logged = {
            "ratio": rho.sum(),
            "ratio_squared": (rho**2).sum(),
            "ratio_max": rho.max(),
            "clipped": torch.tensor(clips),
            "kl": (rho - 1 - rho.log()).sum(),
        }
        torch.testing.assert_close({name: sums[name] for name in logged}, logged)


@every_loss
@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_a_ratio_beyond_all_numbers_that_is_cut_has_a_finite_gradient(name, advantage):
    """exp overflows above 88 in fp32, and infinity times 0 is no number. The clips cut from above
    where A >= 0."""
    generator = tensor([-200.0, -100.0], [-0.6, -0.7])
    logprobs = tensor([-0.1, -0.2], [-0.5, -0.6]).requires_grad_()
    given = logprobs, generator, logprobs < 0, tensor(advantage, -1.0), tensor(0.1, 0.1)
    value, _ = loss.policy_loss(Recipe(loss=name), *given)
    value.backward()
    assert value.isfinite()
    assert logprobs.grad.isfinite().all()
    if name in EQUATIONS:  # the test above misses it
        _, slope, _ = EQUATIONS[name](-0.5, math.exp(0.1), math.exp(0.1), -1.0)
        assert (logprobs.grad[1].abs().min() > 0) == (slope != 0)
