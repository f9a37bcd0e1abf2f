"""Settings: flags, recipes, defaults, what is refused and how, and how devices are split."""

import dataclasses
import os
import re
from typing import get_args, get_type_hints

import pytest
import torch
from steps import run_train

import loss
from core import settings as settings_module
from core.devices import cpu_threads, devices_here
from core.feed import Feed
from core.model import first_learning_rate
from core.settings import (
    PRESETS,
    GenerateCommand,
    Sampling,
    Settings,
    TrainCommand,
    parse,
    starting_values,
)
from curve.flags import flag, run_command
from machinery.folder import make_folder, new_folder, write_config


def refusal(arguments, capsys):
    """The one line that a command says when it refuses its arguments; it ends with 2."""
    with pytest.raises(SystemExit) as stopped:
        run_command(run_train, arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == ""
    assert (
        captured.err.startswith("error: ")
        and captured.err.count("\n") == 1
        and captured.err.endswith("\n")
    )
    return captured.err


# --- flags ----------------------------------------------------------------------------------------


def test_generate_samples_the_model_of_a_run_as_the_run_did(tmp_path):
    run = tmp_path / "runs" / "mine"
    model = run / "checkpoints" / "step-000004" / "model"
    for folder in (model, run / "model"):
        folder.mkdir(parents=True)
    (run / "log.jsonl").touch()
    theirs = [
        "--data",
        "gsm8k",
        "--defaults",
        "toy",
        "--thinking-budget",
        "70",
        "80",
        "--length-control",
        "penalty",
    ]
    write_config(run, parse([*theirs, "--seed", "3"]))
    for place in (model, run / "model"):
        command = parse(["--evaluate", "--model", str(place)], GenerateCommand)
        assert (command.data, command.defaults, command.thinking_budget) == (
            ("gsm8k",),
            "toy",
            (70, 80),
        )
        assert (
            command.length_control == "penalty" and command.seed == 0 and command.answer_budget == 9
        )
    other = parse(
        ["--model", str(model), "--data", "arithmetic", "--thinking-budget", "5", "5"],
        GenerateCommand,
    )
    assert (other.data, other.thinking_budget, other.defaults) == (("arithmetic",), (5, 5), "toy")
    assert parse(["--model", str(tmp_path)], GenerateCommand).thinking_budget == (54, 58)
    small = tmp_path / "runs" / "small"
    (small / "model").mkdir(parents=True)
    (small / "log.jsonl").touch()
    write_config(small, parse(["--data", "gsm8k", "--defaults", "small"]))
    of_small = parse(["--model", str(small / "model")], GenerateCommand)
    assert (of_small.slots, of_small.verifiers) == (128, 2)
    with pytest.raises(ValueError, match="--defaults paper does nothing here: data, budgets"):
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
    with pytest.raises(ValueError, match="--fp32-logits: 'bf16' is not split"):
        parse(["--fp32-logits", "bf16"])
    assert parse(["--recipe", "dapo", "--prompts-per-step", "48"]).groups_per_step == 80
    with pytest.raises(ValueError, match="cannot go with --recipe base"):
        parse(["--recipe", "base", "--leave-out", "loss"])


def test_the_defaults_are_the_toys_for_the_toy_and_the_papers_for_the_rest():
    """Section 9 of the recipe; single flags still change single settings."""
    toy, paper = parse([]), parse(["--data", "polaris:3", "deepcoder", "--steps", "7"])
    assert (toy.defaults, toy.learning_rate, toy.thinking_budget) == ("toy", 2e-4, (54, 58))
    assert (paper.defaults, paper.data, paper.steps) == ("paper", ("polaris:3", "deepcoder"), 7)
    assert (paper.learning_rate, paper.warmup_steps, paper.adam_eps, paper.weight_decay) == (
        5e-7,
        100,
        1e-15,
        0.01,
    )
    assert (paper.prompts_per_step, paper.completions_per_prompt, paper.validation_problems) == (
        48,
        16,
        1000,
    )
    assert (paper.prompt_budget, paper.thinking_budget[1], paper.answer_budget) == (
        2048,
        12_288,
        2048,
    )
    assert parse(["--data", "arithmetic", "--defaults", "paper"]).learning_rate == 5e-7
    assert parse(["--data", "gsm8k", "--defaults", "toy"]).learning_rate == 2e-4


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


def test_the_task_decides_the_defaults_whatever_its_options_and_weight():
    assert parse(["--data", "arithmetic:2", "arithmetic,max_digits=8"]).defaults == "toy"
    assert parse(["--data", "gym:gcd,max_value=9:2"]).defaults == "short"
    assert parse(["--data", "arithmetic", "gym:gcd"]).defaults == "paper"


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
    for flags in (["--thinking-budget", "4", "4"], ["--answer-budget", "3"]):
        with pytest.raises(ValueError, match="--max-length sets both budgets"):
            parse(["--max-length", "8", *flags])


# --- what is refused ------------------------------------------------------------------------------


def test_pitfall_18_unknown_flags_and_values_are_refused_with_the_valid_ones(capsys):
    for flags, named in (
        # Pitfall 18.
        (
            ["--learning-rte", "1"],
            ["--learning-rte", "did you mean --learning-rate?"],
        ),
        (["--slots", "abc"], ["--slots", "'abc'"]),
        (["--thinking-budget", "9"], ["--thinking-budget", "2 arguments"]),
        (["--loss", "ppo"], ["--loss", "'ppo'", "one of cispo, dapo, grpo, gspo"]),
        (["--leave-out", "kl"], ["--leave-out", "advantage_norm"]),
        (["stray"], ["stray"]),
    ):
        said = refusal(flags, capsys)
        assert all(part in said for part in named), said


def test_bad_input_is_one_sentence_before_any_process_starts(capsys, tmp_path, monkeypatch):
    taken = tmp_path / "runs" / "taken"
    taken.mkdir(parents=True)
    (taken / "log.jsonl").write_text("mine\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Feed, "start", lambda *_: pytest.fail("processes were started"))
    words = "".join(f'{{"problem": "Spell word number {i}", "answer": "{i}"}}\n' for i in range(20))
    (tmp_path / "words.jsonl").write_text(words)
    for flags, message in (
        (
            [
                *("--data", "words.jsonl,problem=problem,answer=answer"),
                *("--prompts-per-step", "4", "--validation-problems", "2"),
            ],
            "the shipped model reads sums only; --model names another",
        ),
        (["--model", "no/such/model"], "--model no/such/model: there is no such folder"),
        (["--model", "here"], "--model here: the folder holds no model"),
        (["--model", "data"], "--model data: the folder holds no model"),  # beside the script
        (["--data", "algebra"], "--data algebra: there is no such file or folder"),
        (["--prompt-budget", "5"], "--prompt-budget is 5"),
        (["--thinking-budget", "300", "400"], "the model holds 256"),
        (["--thinking-budget", "9", "8"], "0 <= LOW <= HIGH"),
        (["--generator-memory", "1.5"], "--generator-memory is a share, at most 1, not 1.5"),
        (["--asynchrony", "sync"], "pipeline-K"),
        (["--completions-per-prompt", "1"], "--completions-per-prompt is 1; it must be at least 2"),
        (["--trainers", "-1"], "--trainers is -1; it must be at least 0"),
        (["--train-prompts", "10"], "--prompts-per-step 10 would take no more"),
        (["--name", "taken"], "holds another run"),
        (["--name", "../taken"], "lies in runs/"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0; it must be above 0"),
        (["--verifier-memory", "nan"], "--verifier-memory is nan; it must be above 0"),
        (["--eps-high", "0.3"], "--eps-high does nothing with --loss cispo, which reads --eps-max"),
        (
            ["--loss", "sapo", "--eps-max", "4"],
            "--eps-max does nothing with --loss sapo, which reads neither it nor",
        ),
        (
            ["--recipe", "base", "--eps-max", "4"],
            "--eps-max does nothing with --loss dapo, which reads --eps-low",
        ),
        (["--eps-max", "-1"], "--eps-max is -1.0; it must be above 0"),
        (["--loss", "dapo", "--eps-high", "0"], "--eps-high is 0.0; it must be above 0"),
        (
            ["--least-prompts", "9", "--recipe", "base"],
            "--least-prompts does nothing with --no-no-positive-resampling",
        ),
        (
            ["--loss", "gspo", "--eps-low", "1"],
            "--eps-low is 1.0; it must be at least 0 and below 1",
        ),
        (["--adam-betas", "0.9", "1"], "--adam-betas are (0.9, 1.0); each must be at least 0 and"),
        (["--batch-factor", "0.01"], "--batch-factor 0.01 of --prompts-per-step 32 leaves no prom"),
        (
            ["--train-prompts", "64", "--least-prompts", "64"],
            "--least-prompts is 64, and a source has 64 to train on",
        ),
        (["--from-step", "0"], "--from-step names a checkpoint of the run that --resume names"),
        (["--resume", "nowhere"], "error: nowhere: the folder holds no run"),
        (["--resume", "runs"], "error: runs: the folder holds no run"),
    ):
        assert message in refusal(flags, capsys), flags
    assert (taken / "log.jsonl").read_text() == "mine\n"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["taken"]
    assert (
        parse(["--loss", "gspo", "--eps-low", "0.01", "--eps-high", "0.02"]).recipe.eps_high == 0.02
    )


# --- devices --------------------------------------------------------------------------------------


def test_generators_have_the_first_gpus_and_trainers_the_last():
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
        assert devices_here(TrainCommand(**counts, gpus=gpus)) == expected, (gpus, counts)


def test_more_gpus_than_there_are_is_refused():
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
        with pytest.raises(ValueError, match=re.escape(words)):
            devices_here(TrainCommand(**counts, gpus=gpus))
