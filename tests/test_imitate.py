"""The warm start: what is learned, of which tokens, and what comes of it for RL with the settings
of a small model."""

import contextlib
import io
import json
import random
import re
from pathlib import Path

import backwards
import pytest
import torch
from faults import ROOT, Script, log
from sampling import run_generate

from core.decoding import end_tokens
from core.model import load_model, load_tokenizer
from core.settings import parse
from curve.flags import run_command
from data.load import load_data
from machinery.run import open_run
from tools import imitate
from tools.imitate import Command, examples, mean_loss

# Token ids, and which of them are learned.
RAGGED = [
    ([1, 2, 3, 4, 5], [False, False, False, True, True]),
    ([6, 7, 8], [False, True, True]),
    ([9, 4], [False, True]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a random model, a file of records, the model that has learned them, and what the command
    printed."""
    folder = tmp_path_factory.mktemp("imitate")
    model = backwards.make_model(folder / "random", hidden=96, layers=2)
    data = backwards.write_records(folder / "my.jsonl", 600, digits=3, wrong=0.4)
    command = f"--model {model} --data {data} --out {folder}/warm --epochs 8 --learning-rate 4e-3"
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        assert imitate.main(command.split()) == 0
    (folder / "printed.txt").write_text(err.getvalue() + out.getvalue())
    return folder


def evaluated(folder: Path, model: str) -> dict:
    """What generate.py --evaluate finds on the records with this model."""
    path = folder / f"{model}.evaluation"
    command = f"--evaluate --model {folder / model} --data {folder}/my.jsonl --log {path}"
    budgets = "--defaults toy --prompt-budget 40 --thinking-budget 10 10 --problems 20 --samples 4"
    assert run_generate([*command.split(), *budgets.split()]) == 0
    return json.loads(path.read_text())


# --- what comes of it -----------------------------------------------------------------------------


def test_a_model_that_never_succeeds_does_so_now_and_then_and_ends(folder):
    before, after = evaluated(folder, "random"), evaluated(folder, "warm")
    assert before["pass_rate"] == 0 and before["truncated_fraction"] > 0.3
    assert after["pass_rate"] > 0.05
    assert max(after["truncated_fraction"], after["interrupted_fraction"]) < 0.05

    printed = (folder / "printed.txt").read_text()
    line = r"held-out loss ([\d.]+) before, ([\d.]+) after 136 steps, .* of (\d+) solutions"
    loss_before, loss_after, solutions = re.search(line, printed).groups()
    assert float(loss_before) > 2 and float(loss_after) < 0.8 and int(solutions) > 50
    assert re.search(r"next: python train.py --model \S+warm --data \S+my.jsonl\n", printed)
    assert re.search(r"<\|assistant\|><think>\[\[\d{3}</think>\\boxed{\d{3}}<\|end\|>\]\]", printed)


@pytest.mark.slow
def test_from_there_rl_with_the_settings_of_a_small_model_learns(folder):
    flags = f"--model {folder}/warm --data {folder}/my.jsonl --defaults small --steps 20"
    flags = [*flags.split(), "--validation-problems", "32", "--name", "run"]
    output = folder / "run.txt"
    process = Script(ROOT / "train.py", flags, folder, {"CUDA_VISIBLE_DEVICES": ""}, str(output))
    process.start()
    process.join()
    printed = output.read_text()
    assert process.exitcode == 0, printed[-3000:]
    first, *_, last = (line["pass_rate"] for line in log(folder / "runs" / "run", "validation"))
    assert first < 0.35 and last > 0.5 and last > first + 0.3, (first, last)
    config = json.loads((folder / "runs" / "run" / "config.json").read_text())
    parameters = load_model(str(folder / "warm")).num_parameters()
    rate = config["learning_rate"]
    assert rate == pytest.approx(0.075 / parameters**0.5, rel=0.05)
    assert f"The learning rate is {rate}, for {parameters:,} parameters." in printed


# --- what is learned ------------------------------------------------------------------------------

TESTS = json.dumps([{"input": "1", "output": "2", "type": "stdin_stdout"}])


def test_the_prompt_is_that_of_a_generator_and_the_solution_ends(
    chat_models, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(chat_models["qwen3"])
    closed = "{% if not enable_thinking %}\n</think>\n\n{% endif %}"
    with_switch = tokenizer.chat_template.replace("<think>\n", f"<think>\n{closed}")
    tokenizer.chat_template = with_switch
    load_model(chat_models["qwen3"]).save_pretrained("model")
    tokenizer.save_pretrained("model")

    rows, programs = [], []
    for i in range(20):
        record = {"problem": f" {i}+1? ", "worked": f"{i}</think>\\boxed{{{i + 1}}}"}
        rows.append(record | {"answer": i + 1})
        programs.append(record | {"tests": TESTS})
    for records, flags in (
        (rows, ["--instruction", "Be brief."]),
        (rows, ["--system", "You add."]),
        (rows, ["--no-thinking"]),
        (programs, []),
    ):
        Path("my.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        shared = ["--model", "model", "--data", "my.jsonl,solution=worked", *flags]
        command = imitate.read_flags(Command, shared)
        wording = {"instruction": command.instruction, "wanted": "solution"}
        (source,) = load_data([command.data], None, None, **wording)
        problems, prompts = source.train + source.validation, prompts_of_a_run(shared)
        assert prompts.keys() == {problem.prompt for problem in problems}, flags
        assert len(prompts) == 20
        for problem, (ids, learned) in zip(problems, examples(problems, tokenizer, command, 2000)):
            start = learned.index(True)
            assert ids[:start] == prompts[problem.prompt] and all(learned[start:]), flags
            assert ids[-1] in end_tokens(tokenizer) and ids[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(ids[start:-1]) == problem.answer
            assert problem.answer in {row["worked"] for row in rows}


def prompts_of_a_run(flags) -> dict[str, list[int]]:
    """The ids that a generator of train.py gets for each problem, by the problem's prompt."""
    sizes = "--defaults small --prompt-budget 500 --thinking-budget 20 20 --prompts-per-step 4"
    feed = open_run(parse([*flags, *sizes.split()])).feed
    feed.generators = [type("Generator", (), {"number": 0})()]
    (source,), prompts = feed.prompts.sources, {}
    for validation, of_source in ((False, source.train), (True, source.validation)):
        for i in range(len(of_source)):
            group = feed._group(0, 0, i, feed.generators[0], 0 if validation else None)
            prompts[group.problem.prompt] = group.requests[0].prompt_ids
    return prompts


def test_what_a_run_holds_out_is_not_learned(folder):
    data = str(folder / "my.jsonl")
    (source,) = load_data([data], None, None, wanted="solution")
    learned = {problem.prompt for problem in source.train}
    assert len(learned) > 500
    for number in (1, 20, 10_000):
        (run,) = load_data([data], None, number)
        held_out = {problem.prompt for problem in run.validation}
        assert held_out and not held_out & learned
    assert held_out == {problem.prompt for problem in source.validation}  # as many as there can be


def test_only_the_solution_counts_however_a_batch_is_padded_and_cut(folder):
    model = load_model(str(folder / "warm"))
    expected = 0.0
    for ids, learned in RAGGED:
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected -= sum(logprobs[t - 1, ids[t]].item() for t in range(len(ids)) if learned[t])
    for tokens in (1, 10, 100):
        assert mean_loss(model, RAGGED, tokens) == pytest.approx(expected / 5, rel=1e-5)


# --- what is said, and what cannot be -------------------------------------------------------------


def test_what_is_too_long_is_left_out_and_said(folder, tmp_path, monkeypatch, capsys):
    rows = [backwards.record(str(number), random.Random(0)) for number in range(111, 171)]
    rows[7]["solution"] = "1" * 400 + rows[7]["solution"]
    for row in rows[20:23]:
        row["solution"] = "no end of thinking"
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(imitate, "imitate", lambda *_: None)
    command = f"--model {folder}/random --data {data} --out {tmp_path}/out --longest 100"
    assert imitate.main(command.split()) == 0
    printed = capsys.readouterr().err
    assert re.search(r"1 of \d+ records are left out: more than 100 tokens", printed)
    assert "solutions do not close the thinking that was opened" in printed


def test_what_cannot_be_is_one_sentence(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"problem": "1+1?", "worked": "2"}\n' * 3)
    Path("numbers.jsonl").write_text('{"problem": "1+1?", "solution": 7}\n')
    Path("empty.jsonl").touch()
    Path("full").mkdir()
    Path("empty").mkdir()
    Path("full", "mine.txt").touch()
    usual = f"--model {folder}/random --data {folder}/my.jsonl --out out".split()
    monkeypatch.setattr(imitate, "imitate", lambda *_: pytest.fail("it was trained"))
    columns = "the columns are problem, worked"
    for flags, message in (
        ("--data a.jsonl", f"a.jsonl, line 1: which column is the solution? {columns}; add"),
        ("--data a.jsonl,solution=gold", f"line 1: there is no column 'gold'; {columns}"),
        ("--data empty.jsonl", "empty.jsonl holds no record"),
        ("--data numbers.jsonl", "numbers.jsonl, line 1: column 'solution' holds no text but 7"),
        ("--data nothing.jsonl", "there is no such file"),
        (
            "--data arithmetic",
            "arithmetic: its answers are no whole completions: give a file of solutions",
        ),
        ("--data aime24", "aime24: this is for evaluation"),
        ("--longest 5", "no problem has at most 5 tokens"),
        ("--out full", "--out full is there already: name a folder that is new or empty"),
        ("--out a.jsonl", "--out a.jsonl is there already"),
        ("--epochs 0", "--epochs is 0; it must be above 0"),
        ("--learning-rate -1", "--learning-rate is -1.0; it must be above 0"),
        ("--model empty", "--model empty: the folder holds no model"),
        ("--epoch 1", "did you mean --epochs?"),
    ):
        with pytest.raises(SystemExit) as ended:
            run_command(imitate.main, [*usual, *flags.split()])
        sentence = capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code == 2, flags
        assert sentence.startswith("error: ") and message in sentence, sentence
    assert not Path("out").exists() and Path("full", "mine.txt").exists()
    with pytest.raises(ValueError, match="--out is missing; wanted are --model, --data and --out"):
        imitate.main(["--model", "m", "--data", "my.jsonl"])


def test_what_is_stopped_while_it_learns_leaves_no_folder(folder, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(imitate, "imitate", stopped)
    command = f"--model {folder}/random --data {folder}/my.jsonl --out {tmp_path}/out"
    with pytest.raises(KeyboardInterrupt):
        imitate.main(command.split())
    assert list(tmp_path.iterdir()) == []
