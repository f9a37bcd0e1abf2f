"""The default task: problems, verdicts, traces, and the base model."""

import hashlib
import random

import torch
from programs import require_verdicts

from core.model import load_model, load_tokenizer
from data import Problem, is_held_out
from data.load import load_data
from data.tasks import arithmetic
from docs import make_base


def test_the_problems_are_those_that_all_published_runs_had():
    (source,) = load_data(["arithmetic"], 4000, 240)
    texts = "".join(each.prompt + each.answer for each in source.train + source.validation)
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "8da0c752856f8083"
    longer = arithmetic.problems("train", 400, 0, "9")
    assert 36 <= [problem.prompt.index("+") for problem in longer].count(9) <= 52


VERDICTS = f"""
right | 9+3+0=12;</think>12882
right | </think>12882
right | 9+3+0=1{make_base.TIME_IS_UP}</think>12882
wrong | 12882
wrong | 9+3</think>12882</think>12882
wrong | 9+3</think>012882
wrong | 9+3</think>12883
wrong | 9+3</think>12882;
wrong | </think>
"""


def test_verdicts():
    problem = Problem("4729+8153=", "12882", arithmetic.__name__)
    require_verdicts(VERDICTS, lambda text: arithmetic.score(problem, text))


def test_clean_traces_lead_to_the_sum_and_noisy_ones_to_what_they_say():
    rng, wrong = random.Random(1), 0
    assert make_base.trace(4729, 8153, rng) == ("9+3+0=12;2+5+1=08;7+1+0=08;4+8+0=12", "12882")
    for _ in range(500):
        a, b = arithmetic.draw(rng, rng.randint(1, 6), held_out=False)
        assert make_base.trace(a, b, rng)[1] == str(a + b)
        thinking, answer = make_base.trace(a, b, rng, wrong=0.3)
        assert int(answer) == int(thinking[-2] + thinking[-1::-9])
        wrong += answer != str(a + b)
    assert 200 < wrong < 450


def test_an_example_is_of_no_held_out_problem_and_teaches_the_answer_but_not_the_phrase():
    tokenizer, rng, seen = make_base.make_tokenizer(), random.Random(2), 0
    phrase = make_base.TIME_IS_UP + "</think>"
    assert len(tokenizer(phrase).input_ids) == 2, "the phrase and the marker are one token each"
    for i in range(2000):
        ids, labels = make_base.example(tokenizer, rng, noisy=i % 2 == 0)
        problem, taught = tokenizer.decode(ids).split("=<think>")
        assert not is_held_out(problem) and ids[-1] == tokenizer.eos_token_id
        assert all(label in (-100, token) for token, label in zip(ids, labels))
        learned = [label for label in labels if label != -100]
        assert tokenizer.decode(learned) == taught.replace(phrase, "")
        seen += phrase in taught
    assert seen


def test_the_shipped_tokenizer_and_base_leave_rl_something_to_do():
    folder = str(make_base.BASE_MODEL)
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    text = "12+34=<think>2+4+0=06;1+3+0=04</think>46"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and ids == make_base.make_tokenizer()(text).input_ids
    torch.manual_seed(0)
    rates = make_base.pass_rates(model, tokenizer, per_length=50, seed=5)
    assert 0.10 <= sum(rates) / len(rates) <= 0.35
