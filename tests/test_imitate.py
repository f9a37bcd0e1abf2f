"""The warm start: what is learned, of which tokens, and what comes of it for RL with the settings
of a small model."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from faults import log
from programs import rows
from steps import run_generate, run_train, write_lines

from core.model import load_model, load_tokenizer
from data import Problem
from data.tasks import mathematics
from docs import make_base
from tools import imitate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a random model, a file of numbers that a careless writer has written backwards, and the
    model that has learned to."""
    folder, rng, records = tmp_path_factory.mktemp("imitate"), random.Random(0), []
    torch.manual_seed(0)
    tokenizer = make_base.make_tokenizer()
    model = make_base.make_model(tokenizer, hidden_size=96)
    model.config.max_position_embeddings = 2048
    for each in (model, tokenizer):
        each.save_pretrained(folder / "random")
    for number in rng.sample(range(100, 1000), 600):
        answer = str(number)[::-1]
        written = "".join(
            digit if rng.random() < 0.6 else rng.choice("0123456789") for digit in answer
        )
        solution = f"{written}</think>{written}"
        records.append({"problem": f"{number}=", "solution": solution, "answer": answer})
    write_lines(folder / "my.jsonl", records)
    command = (
        f"--model {folder}/random --data {folder}/my.jsonl,task=arithmetic --out {folder}/warm"
    )
    assert imitate.main(f"{command} --epochs 8 --learning-rate 4e-3".split()) == 0
    return folder


def test_what_has_learned_succeeds_now_and_then_and_ends(folder):
    path = folder / "evaluation"
    command = (
        f"--evaluate --model {folder}/warm --log {path} --data {folder}/my.jsonl,task=arithmetic"
    )
    budgets = "--defaults toy --prompt-budget 40 --thinking-budget 10 10 --problems 20 --samples 4"
    assert run_generate(f"{command} {budgets}") == 0
    found = json.loads(path.read_text())
    assert found["pass_rate"] > 0.05
    assert max(found["truncated_fraction"], found["interrupted_fraction"]) < 0.05


@pytest.mark.slow
def test_from_there_rl_with_the_settings_of_a_small_model_learns(folder, monkeypatch):
    monkeypatch.chdir(folder)
    flags = "--model warm --data my.jsonl,task=arithmetic --defaults small --steps 20"
    assert run_train(f"{flags} --validation-problems 32 --name run") == 0
    run = folder / "runs" / "run"
    first, *_, last = (line["pass_rate"] for line in log(run, "validation"))
    assert (run / "rollouts.html").exists()
    assert first < 0.35 and last > 0.5 and last > first + 0.3, (first, last)


def test_the_prompt_is_that_of_a_generator_and_the_solution_ends(chat_models, here, monkeypatch):
    """Once, also if it ends itself, or if the model's config alone says how. Six are enough."""
    tokenizer = load_tokenizer(chat_models["qwen3"])
    closed = "{% if not enable_thinking %}</think>{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace("<think>\n", f"<think>\n{closed}")
    tokenizer.eos_token, learned_of = None, []
    monkeypatch.setattr(imitate, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(imitate, "imitate", lambda _, batches, *__: learned_of.extend(batches))
    solutions = [rf"{i}</think>\boxed{{{i}}}" for i in range(6)]
    records = [
        {"problem": f"{i}+1?", "worked": worked + i % 3 * "<|im_end|>\n", "answer": 1}
        for i, worked in enumerate(solutions)
    ]
    write_lines(Path("my.jsonl"), records)
    command = f"--model {chat_models['qwen3']} --data my.jsonl,solution=worked --out out"
    flags = ["--epochs=1", "--instruction=Be brief.", "--system=You add.", "--no-thinking"]
    assert imitate.main([*command.split(), *flags]) == 0
    prompt = (
        "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\n{}+1?\n\nBe brief.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n</think>"
    )
    possible = {(prompt.format(i), f"{each}<|im_end|>") for i, each in enumerate(solutions)}
    examples = sum(learned_of, [])
    assert len(examples) > 4
    for ids, labels in examples:
        start = labels.count(imitate.NOT_LEARNED)
        assert labels[start:] == ids[start:]
        assert (tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])) in possible


def test_only_the_solution_counts_however_a_batch_is_padded(folder, monkeypatch):
    """The gradient of a ragged batch is the mean of those of its rows, by their learned tokens."""
    rows = [([1, 2, 3, 4, 5], [-100] * 3 + [4, 5]), ([6, 7, 8], [-100, 7, 8]), ([9, 4], [-100, 4])]
    model = load_model(str(folder / "warm")).double()
    weight, made = model.get_output_embeddings().weight, []
    clip = lambda *_: made.append(weight.grad.clone())
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    for batch in (rows, *zip(rows)):
        imitate.imitate(model, [batch], 1, learning_rate=0.0)
    wanted = (2 * made[1] + 2 * made[2] + made[3]) / 5
    torch.testing.assert_close(made[0], wanted, rtol=1e-4, atol=1e-7)


REFUSED = """
--data a.jsonl --out out | problem, answer, worked, wrong
--data a.jsonl,task=arithmetic,solution=wrong --out out | 1 of 1 solutions
--data a.jsonl --out . | --out .:
--data a.jsonl | --out
--data a.jsonl,task=arithmetic,solution=worked --out out | not 30.* '1[+]1
--data my.jsonl,task=arithmetic --out file/out | Not a directory
--data zebra.jsonl,task=arithmetic,solution=worked --out out --model short | token .*, and the model
"""


def test_what_cannot_be_learned_is_refused_before_anything_is(folder, here, monkeypatch):
    monkeypatch.setattr(imitate, "imitate", lambda *_: pytest.fail("it learns"))
    solutions = {"worked": "2" * 3000, "wrong": "1</think>1"}
    write_lines(Path("a.jsonl"), [{"problem": "1+1=", "answer": "2"} | solutions])
    Path("my.jsonl").symlink_to(folder / "my.jsonl")
    Path("file").touch()
    write_lines(Path("zebra.jsonl"), [{"problem": "zebra", "worked": "2", "answer": "2"}])
    shutil.copytree(folder / "random", "short")
    tokenizer = load_tokenizer("short")
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained("short")
    for flags, message in rows(REFUSED):
        with pytest.raises((ValueError, OSError), match=message):
            imitate.main(f"--model {folder}/random {flags}".split())


def test_solutions_are_judged_before_they_are_learned(capsys):
    problem = Problem("1+1?", "2", mathematics.__name__)
    imitate.refuse_wrong([(text, problem, rf"\boxed{{{text}}}") for text in "2213"])
    assert capsys.readouterr().err == ""
    imitate.refuse_wrong([(text, problem, rf"\boxed{{{text}}}") for text in "2113"])
    assert "! 3 of 4 solutions are judged wrong" in capsys.readouterr().err
