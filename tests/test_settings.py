"""Settings: flags, recipes, defaults, what is refused and how, and how devices are split."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
import torch
from steps import run_train

import loss
from core import settings as settings_module
from core.feed import Feed
from core.model import first_learning_rate
from core.settings import (
    PRESETS,
    GenerateCommand,
    Sampling,
    Settings,
    cpu_threads,
    devices_here,
    parse,
    starting_values,
)
from curve.flags import flag, run_command
from machinery.folder import make_folder, new_folder, write_config
from machinery.run import open_run

# --- flags ----------------------------------------------------------------------------------------


def test_generate_samples_the_model_of_a_run_as_the_run_did(tmp_path):
    run = tmp_path / "runs" / "mine"
    model = run / "checkpoints" / "step-000004" / "model"
    for folder in (model, run / "model"):
        folder.mkdir(parents=True)
    (run / "log.jsonl").touch()
    theirs = "--data gsm8k --defaults small --thinking-budget 70 80 --length-control penalty"
    stored = parse([*theirs.split(), "--seed", "3"])
    write_config(run, stored)
    for place in (model, run / "model"):
        command = parse(["--evaluate", "--model", str(place)], GenerateCommand)
        for name in settings_module.OF_ITS_RUN:
            assert getattr(command, name) == getattr(stored, name)
        assert command.length_control == "penalty" and command.seed == 0
    own = ["--model", str(model), "--data", "arithmetic", "--thinking-budget", "5", "5"]
    other = parse(own, GenerateCommand)
    assert (other.data, other.thinking_budget, other.defaults) == (("arithmetic",), (5, 5), "small")
    assert parse(["--model", str(tmp_path)], GenerateCommand).thinking_budget == (54, 58)
    with pytest.raises(ValueError, match="--defaults paper does nothing here"):
        parse(["--model", str(model), "--defaults", "paper"], GenerateCommand)


def test_the_run_of_a_model_is_looked_for_where_the_model_is(tmp_path, monkeypatch):
    run, elsewhere = tmp_path / "runs" / "x", tmp_path / "elsewhere"
    for folder in (run / "model", run / "Qwen", elsewhere):
        folder.mkdir(parents=True)
    (run / "log.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert settings_module.run_of("runs/x/model") == run
    monkeypatch.chdir(run)
    assert settings_module.run_of("model") == run
    assert settings_module.run_of("Qwen/Qwen3-0.6B") is None  # on the hub
    assert settings_module.run_of("data/arithmetic_base") is None  # beside the scripts


def test_recipe_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse([]).recipe == loss.Recipe()
    assert parse(["--recipe", "base"]).recipe == loss.RECIPES["base"]
    mixed = parse(["--recipe=minimax", "--loss", "gspo", "--advantage-norm", "none"]).recipe
    assert mixed == dataclasses.replace(loss.RECIPES["minimax"], loss="gspo", advantage_norm="none")
    assert parse(["--leave-out", "fp32_logits"]).recipe == loss.leave_one_out("fp32_logits")
    named = new_folder(parse(["--loss", "gspo", "--no-fp32-logits", "--seed", "3"])).name
    assert named == "scalerl-loss-gspo-fp32_logits-False-seed3"
    assert new_folder(parse(["--leave-out", "loss"])).name == "scalerl-without-loss-seed0"
    (tmp_path / "runs" / "scalerl-without-loss-seed0").mkdir(parents=True)
    assert new_folder(parse(["--leave-out", "loss"])).name == "scalerl-without-loss-seed0-2"
    # Two runs chose the same free name before either made its folder.
    chosen = new_folder(parse([]))
    folders = [make_folder(chosen, parse([])).name for _ in range(2)]
    assert folders == ["scalerl-seed0", "scalerl-seed0-2"]
    assert parse(["--no-zero-variance-filter"]).recipe.zero_variance_filter is False
    heads = {"--fp32-logits": True, "--no-fp32-logits": False, "--fp32-logits split": "split"}
    assert {
        flags: parse([*flags.split(), "--seed", "3"]).recipe.fp32_logits for flags in heads
    } == heads
    assert parse(["--recipe", "dapo", "--prompts-per-step", "48"]).groups_per_step == 80


def test_the_defaults_are_the_toys_for_the_toy_and_the_papers_for_the_rest():
    """Section 9 of the recipe; single flags still change single settings."""
    for flags, defaults in {
        "": "toy",
        "--data arithmetic:2 arithmetic,max_digits=8": "toy",
        "--data gym:gcd,max_value=9:2": "short",
        "--data arithmetic gym:gcd": "paper",
        "--data polaris:3 deepcoder": "paper",
        "--data gsm8k --defaults toy": "toy",
    }.items():
        settings = parse([*flags.split(), "--warmup-steps", "7"])
        of_all = vars(settings) | vars(settings.recipe)
        expected = PRESETS[defaults] | {"defaults": defaults, "warmup_steps": 7}
        assert expected.items() <= of_all.items()
    paper = parse(["--data", "polaris"])
    assert (paper.learning_rate, paper.adam_eps, paper.prompts_per_step) == (5e-7, 1e-15, 48)
    assert (paper.prompt_budget, paper.thinking_budget[1], paper.answer_budget) == (
        2048,
        12288,
        2048,
    )


def test_on_a_gpu_its_memory_chooses_what_no_flag_gives(monkeypatch):
    for arguments, tokens in (([], 4096), (["--data", "gsm8k"], 32_768)):
        assert parse(arguments).tokens_per_micro_batch == tokens
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for arguments in ([], ["--data", "gsm8k"], ["--data", "gsm8k", "--defaults", "small"]):
        settings = parse([*arguments, "--slots", "9"])
        assert settings.slots == 9
        assert settings.tokens_per_micro_batch is None and settings.generator_memory is None
        assert settings.gradient_checkpointing is None
    assert parse(["--no-gradient-checkpointing"]).gradient_checkpointing is False


@pytest.mark.parametrize(
    "arguments, threads",
    [
        ([], 4),
        (["--generators", "3"], 2),
        (["--asynchrony", "ppo-8"], 8),
        (["--asynchrony", "pipeline-0"], 8),
        (["--asynchrony", "pipeline-1"], 4),
        (["--recipe", "grpo", "--generators", "2"], 4),
    ],
)
def test_processes_that_take_turns_do_not_share_the_cores(arguments, threads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert cpu_threads(parse(arguments)) == threads
    assert cpu_threads(parse([*arguments, "--threads", "1"])) == 1


def shown_values(arguments, monkeypatch, capsys):
    """What --help says of each flag: its text and its value."""
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        run_train([*arguments, "--help"])
    assert ended.value.code == 0
    entries = re.findall(
        r"(?m)^  (--[\w-]+).*?(?:  +|\n +)(?!--)(\S.*) \(default: (.*)\)$", capsys.readouterr().out
    )
    return {name: (text, value) for name, text, value in entries}


def test_help_shows_the_values_of_the_presets_and_those_of_the_recipe_that_is_named(
    monkeypatch, capsys
):
    plain = shown_values([], monkeypatch, capsys)
    assert len(plain) > 45
    assert plain["--clip-gradient"] == ("norm; paper: 1.0; small: 1.0; short: 1.0", "0.3")
    assert plain["--thinking-budget"][0].endswith(
        "; paper: 10240 12288; small: 768 1024; short: 24 24"
    )
    for preset, values in PRESETS.items():
        said = {name for name, (text, _) in plain.items() if re.search(rf"\b{preset}: ", text)}
        assert said == {flag(name) for name in values if not hasattr(loss.Recipe, name)}
    base = shown_values(["--recipe", "base"], monkeypatch, capsys)
    assert (plain["--asynchrony"][1], base["--asynchrony"][1]) == ("pipeline-8", "ppo-8")
    assert (plain["--loss"][1], base["--loss"][1]) == ("cispo", "dapo")
    paper = shown_values(["--defaults", "paper"], monkeypatch, capsys)
    assert (plain["--learning-rate"][1], paper["--learning-rate"][1]) == ("0.0002", "5e-07")


def test_what_the_presets_set_is_what_settings_has():
    names = {field.name for field in dataclasses.fields(Settings)}
    assert settings_module.MAY_CHANGE <= names | {"least_prompts"}  # which is the recipe's
    assert all(values.keys() <= names | {*vars(loss.Recipe())} for values in PRESETS.values())
    assert get_args(get_type_hints(Sampling)["defaults"]) == ("auto", *PRESETS)
    assert starting_values(Settings(defaults="paper")).thinking_budget == loss.THINKING_BUDGET


def test_the_budgets_of_a_small_model_fit_2048_positions_and_its_learning_rate_goes_by_its_size():
    small = parse(["--data", "my.jsonl", "--defaults", "small"])
    tokens = small.prompt_budget + small.thinking_budget[1] + small.answer_budget
    assert tokens + len(small.interruption_phrase) <= 2048 and small.learning_rate is None
    rates = [first_learning_rate(int(millions * 1e6)) for millions in (0.14, 1, 600, 7000)]
    assert rates == [2e-4, 7.5e-5, 3.1e-6, 9e-7]
    assert parse(["--learning-rate", "None"]).learning_rate is None
    assert parse(["--defaults", "small", "--learning-rate", "1e-5"]).learning_rate == 1e-5


def test_max_length_is_one_number_for_the_whole_completion():
    short = parse(["--data", "gym:gcd"])
    assert (short.thinking_budget, short.answer_budget, short.recipe.length_control) == (
        (24, 24),
        8,
        "penalty",
    )
    assert (short.defaults, short.recipe.asynchrony) == ("short", "pipeline-2")
    eight = parse(["--data", "gym:gcd", "--max-length", "8", "--leave-out", "asynchrony"])
    assert (eight.thinking_budget, eight.answer_budget, eight.recipe.asynchrony) == (
        (6, 6),
        2,
        "ppo-8",
    )
    command = parse(["--max-length", "8", "--evaluate"], GenerateCommand)
    assert (command.thinking_budget, command.answer_budget, command.length_control) == (
        (6, 6),
        2,
        "penalty",
    )


# --- what is refused ------------------------------------------------------------------------------

# Flags of train.py, and what the one line says besides: names and values, no wording.
REFUSED = """
--learning-rte 1 | --learning-rte --learning-rate
--slots abc | --slots 'abc'
--thinking-budget 9 | --thinking-budget 2
--thinking-budget 9 8 | --thinking-budget
--thinking-budget 300 400 | --thinking-budget 256
--loss ppo | --loss 'ppo' cispo dapo grpo gspo
--leave-out kl | --leave-out advantage_norm
--recipe base --leave-out loss | --leave-out base
--fp32-logits bf16 | --fp32-logits 'bf16' split
stray | stray
--model no/such/model | --model no/such/model
--model here | --model here
--model data | --model data
--data algebra | --data algebra
--data words.jsonl,problem=problem,answer=answer --prompts-per-step 4 | --model
--data arithmetic,digits | --data digits
--prompt-budget 5 | --prompt-budget 5
--generator-memory 1.5 | --generator-memory 1.5
--asynchrony sync | --asynchrony sync pipeline-K
--completions-per-prompt 1 | --completions-per-prompt 1 2
--trainers -1 | --trainers -1 0
--train-prompts 10 | --prompts-per-step 32 10
--train-prompts 64 --least-prompts 64 | --least-prompts 64
--name taken | --name taken
--name ../taken | --name ../taken
--learning-rate -1 | --learning-rate -1.0
--verifier-memory nan | --verifier-memory nan
--eps-high 0.3 | --eps-high cispo --eps-max
--loss sapo --eps-max 4 | --eps-max sapo
--recipe base --eps-max 4 | --eps-max dapo --eps-low
--eps-max -1 | --eps-max -1.0
--loss dapo --eps-high 0 | --eps-high 0.0
--loss gspo --eps-low 1 | --eps-low 1.0
--least-prompts 9 --recipe base | --least-prompts --no-no-positive-resampling
--adam-betas 0.9 1 | --adam-betas
--batch-factor 0.01 | --batch-factor --prompts-per-step 0.01
--max-length 8 --answer-budget 3 | --max-length --answer-budget
--max-length 8 --thinking-budget 4 4 | --max-length --thinking-budget
--from-step 0 | --from-step --resume
--resume nowhere | nowhere
--resume runs | runs
--track wandb | --track wandb
--one-process --generators 2 | --one-process --generators 2
--one-process --trainers 3 | --one-process --trainers 3
--one-process --tensor-parallel 2 | --one-process --tensor-parallel 2
--one-process --engine vllm | --one-process --engine
--tensor-parallel 2 | --tensor-parallel 2
--train-prompts 10 --prompt-budget 5 --thinking-budget 300 300 | --prompts-per-step 10 5 256
""".strip().split("\n")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to stand in, with a run, a folder that is no model, and a file of problems."""
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "log.jsonl").write_text("mine\n")
    (tmp_path / "here").mkdir()
    words = "".join(f'{{"problem": "Spell word number {i}", "answer": "{i}"}}\n' for i in range(99))
    (tmp_path / "words.jsonl").write_text(words)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Feed, "start", lambda *_: pytest.fail("processes were started"))
    usual = importlib.util.find_spec
    no_wandb = lambda name, *others: usual(name, *others) if name != "wandb" else None
    monkeypatch.setattr("importlib.util.find_spec", no_wandb)
    return tmp_path


@pytest.mark.parametrize("row", REFUSED)
def test_pitfall_18_what_cannot_be_is_refused_in_a_line_before_anything_starts(row, place, capsys):
    flags, words = (part.split() for part in row.split(" | "))
    with pytest.raises(SystemExit) as stopped:
        run_command(run_train, flags)
    said = capsys.readouterr()
    error = said.err.splitlines()[-1]
    assert stopped.value.code == 2 and said.out == ""
    assert error.startswith("error: ") and "Traceback" not in said.err
    assert all(word in error for word in words), error
    assert (place / "runs" / "taken" / "log.jsonl").read_text() == "mine\n"
    assert [path.name for path in (place / "runs").iterdir()] == ["taken"]


# --- devices --------------------------------------------------------------------------------------


def test_generators_have_the_first_gpus_and_trainers_the_last(monkeypatch):
    def names(digits):
        return ("cpu",) if digits == "cpu" else tuple(f"cuda:{i}" for i in digits)

    for gpus, counts, generators, trainers in (
        (0, {}, ["cpu"], ["cpu"]),
        (0, {"generators": 2, "trainers": 3}, ["cpu"] * 2, ["cpu"] * 3),
        (1, {}, "0", "0"),  # one GPU for both
        (2, {}, "0", "1"),
        (8, {}, "0123456", "7"),
        (10, {}, "01234567", "89"),  # one to four, as in the paper
        (8, {"trainers": 2}, "012345", "67"),
        (8, {"generators": 6}, "012345", "7"),
        (8, {"generators": 2, "trainers": 2}, "01", "67"),
        (8, {"tensor_parallel": 2}, ["01", "23", "45"], "7"),
        (8, {"tensor_parallel": 2, "generators": 2, "trainers": 4}, ["01", "23"], "4567"),
    ):
        expected = (
            [names(digits) for digits in generators],
            [name for digits in trainers for name in names(digits)],
        )
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert devices_here(Settings(**counts)) == expected, (gpus, counts)


def test_more_gpus_than_there_are_is_refused(monkeypatch):
    for gpus, counts, words in (
        (0, {"tensor_parallel": 2}, "--tensor-parallel 2 wants as many GPUs, and there is none"),
        (
            1,
            {"trainers": 2},
            "--generators 1 with --tensor-parallel 1 and --trainers 2 want 3 GPUs; there are 1",
        ),
        (1, {"tensor_parallel": 2}, "want 3 GPUs; there are 1"),
        (4, {"generators": 4}, "want 5 GPUs; there are 4 (CUDA_VISIBLE_DEVICES)"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        with pytest.raises(ValueError, match=re.escape(words)):
            devices_here(Settings(**counts))


# --- and soon -------------------------------------------------------------------------------------


def test_prompts_that_were_not_shared_for_a_flag_are_shared_again_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = open_run(parse(["--name", "run", "--gradient-checkpointing", "--train-prompts", "64"]))
    assert not run.settings.share_prompts
    run.lock.close()
    again = open_run(parse(["--resume", "runs/run", "--no-gradient-checkpointing"]))
    assert again.settings.share_prompts


@pytest.mark.parametrize("flags", [["--data", "algebra"], ["--model", "no/such/model"]])
def test_wrong_data_are_refused_before_the_libraries_of_models_are_read(tmp_path, flags):
    """These take most of the seconds until a run begins."""
    script = (
        "import runpy, sys\n"
        "sys.argv[0] = sys.path[0] = sys.argv.pop(1)\n"
        "try: runpy.run_path(sys.argv[0] + '/train.py', run_name='__main__')\n"
        "finally: print('transformers' in sys.modules)\n"
    )
    root = str(settings_module.ROOT)
    command = [sys.executable, "-c", script, root, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert flags[0] in done.stderr
