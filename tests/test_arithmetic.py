"""The default task: problems, verdicts, traces, and the base model."""

import random
import zlib

import pytest
import torch

from core.model import load_model, load_tokenizer
from data import Problem, load
from data.tasks import arithmetic
from docs import make_base


def test_training_and_validation_are_disjoint_and_repeat_for_a_seed():
    train = arithmetic.problems("train", 4000)
    validation = arithmetic.problems("validation", 240)
    train_prompts = {problem.prompt for problem in train}
    validation_prompts = {problem.prompt for problem in validation}
    assert len(train_prompts) == 4000 and len(validation_prompts) == 240
    assert not train_prompts & validation_prompts
    assert train == arithmetic.problems("train", 4000)
    assert train != arithmetic.problems("train", 4000, seed=1)
    digits = [problem.prompt.index("+") for problem in validation]
    for number in range(2, 7):
        assert digits.count(number) == pytest.approx(46, abs=2)
    for problem in train:
        a, b = problem.prompt.rstrip("=").split("+")
        assert int(a) + int(b) == int(problem.answer) and len(a) == len(b)


def test_the_warm_start_never_sees_a_validation_problem():
    tokenizer, rng = make_base.make_tokenizer(), random.Random(0)
    for i in range(3000):
        ids, _ = make_base.example(tokenizer, rng, noisy=i % 2 == 0)
        a, b = tokenizer.decode(ids).split("=")[0].split("+")
        assert zlib.crc32(f"{a}+{b}".encode()) % 10 != 0


def test_verdicts():
    for completion, right in [
        ("9+3+0=12;</think>12882", True),
        ("</think>12882", True),
        ("9+3+0=1" + make_base.TIME_IS_UP + "</think>12882", True),
        ("12882", False),  # ended without closing
        ("9+3</think>12882</think>12882", False),
        ("9+3</think>012882", False),
        ("9+3</think>12883", False),
        ("9+3</think>12882;", False),
        ("</think>", False),
        ("", False),
    ]:
        problem = Problem("4729+8153=", "12882", arithmetic.__name__)
        assert arithmetic.score(problem, completion) is right, completion


def test_clean_traces_lead_to_the_sum_and_noisy_ones_to_what_they_say():
    rng = random.Random(1)
    assert make_base.trace(4729, 8153, rng) == ("9+3+0=12;2+5+1=08;7+1+0=08;4+8+0=12", "12882")
    wrong = 0
    for _ in range(500):
        digits = rng.randint(1, 6)
        a, b = arithmetic.draw(rng, digits, held_out=False)
        thinking, answer = make_base.trace(a, b, rng)
        assert answer == str(a + b) and len(thinking) == 9 * digits - 1
        thinking, answer = make_base.trace(a, b, rng, wrong=0.3, ramble=0.5)
        steps = thinking.split(";")[:digits]
        results = [int(step.split("=")[1]) for step in steps]
        written = [result % 10 for result in results] + [results[-1] // 10]  # with the last carry
        assert int(answer) == sum(digit * 10**i for i, digit in enumerate(written))
        for step, carry in zip(steps[1:], results):  # a mistake is built on
            assert step.split("=")[0].split("+")[2] == str(carry // 10)
        wrong += answer != str(a + b)
    assert 200 < wrong < 450


def test_interrupted_examples_teach_the_answer_but_not_the_phrase():
    tokenizer, rng = make_base.make_tokenizer(), random.Random(2)
    phrase = tokenizer(make_base.TIME_IS_UP + "</think>").input_ids
    assert len(phrase) == 2, "the phrase and the marker are one token each"
    seen = 0
    for _ in range(400):
        ids, learned = make_base.example(tokenizer, rng, noisy=True)
        prompt = ids.index(tokenizer.convert_tokens_to_ids("<think>")) + 1
        assert not any(learned[:prompt]) and learned[-1] and ids[-1] == tokenizer.eos_token_id
        if phrase[0] in ids:
            at = ids.index(phrase[0])
            assert ids[at : at + 2] == phrase and not any(learned[at : at + 2])
            assert all(learned[prompt:at]) and all(learned[at + 2 :])
            seen += 1
        else:
            assert all(learned[prompt:])
    assert 5 <= seen <= 45


def test_the_tokenizer_is_one_token_a_character_and_survives_being_saved():
    tokenizer = load_tokenizer(str(make_base.BASE_MODEL))
    text = "12+34=<think>2+4+0=06;1+3+0=04</think>46"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.replace("<think>", "x").replace("</think>", "x"))
    assert ids == make_base.make_tokenizer()(text).input_ids


def test_longer_sums_for_another_base():
    spec = load.parse_spec("arithmetic,max_digits=9")
    longest = [problem.prompt.index("+") for problem in load.made_source(spec, 400, 90).train]
    assert max(longest) == 9 and longest.count(9) == pytest.approx(400 / 9, abs=8)
    for wrong in ("0", "-3", "six"):
        with pytest.raises(ValueError, match=f"1 digit or more, not max_digits={wrong}"):
            arithmetic.problems("train", 10, max_digits=wrong)
    tokenizer = make_base.make_tokenizer()
    sizes = [make_base.make_model(tokenizer, width).num_parameters() for width in (32, 64, 144)]
    assert [round(size / 1e6, 2) for size in sizes] == [0.05, 0.14, 0.53]


def test_the_shipped_base_leaves_rl_something_to_do():
    folder = str(make_base.BASE_MODEL)
    model = load_model(folder)
    torch.manual_seed(0)
    rates = make_base.pass_rates(model, load_tokenizer(folder), per_length=50, seed=5)
    assert 0.10 <= sum(rates) / len(rates) <= 0.35


@pytest.mark.slow
def test_making_a_base_is_deterministic_and_refuses_one_that_has_not_learned(tmp_path, monkeypatch):
    def measure(*rates: list[float]) -> None:
        """The pass rates after the clean traces and after the noisy ones, whatever is learned."""
        left = iter(rates)
        monkeypatch.setattr(make_base, "pass_rates", lambda *_, **__: next(left))

    for rates, message in (
        ([0.9, 0.2], "has not learned to add 2 digits"),
        ([0.9, 0.9], "outside 0.10 to 0.35"),
    ):
        measure(rates, rates)
        with pytest.raises(ValueError, match=message):
            make_base.make_base(tmp_path / "a", clean_steps=1, noisy_steps=1)
    assert not (tmp_path / "a").exists()
    measure([0.9, 0.2], [0.9, 0.0])
    make_base.make_base(tmp_path / "any", clean_steps=1, noisy_steps=1, any_pass_rate=True)
    assert (tmp_path / "any" / "model.safetensors").exists()
    for name in ("b", "c"):
        measure([0.9], [0.2])
        assert make_base.make_base(tmp_path / name, clean_steps=4, noisy_steps=3) == [0.2]
    saved = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("b", "c")]
    assert saved[0] == saved[1]
