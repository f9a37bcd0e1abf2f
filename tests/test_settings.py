"""Settings: flags, recipes, defaults, what is refused and how, and how devices are split."""

import os
import re
import sys
import tempfile

import pytest
import torch
from programs import rows
from steps import asked, run_train, write_lines

from core import settings as settings_module
from core.feed import Feed
from core.model import first_learning_rate
from core.settings import (
    PRESETS,
    GenerateCommand,
    Settings,
    cpu_threads,
    devices_here,
    with_recipe,
)
from curve.flags import run_command
from machinery.folder import new_folder, write_config

# --- flags ----------------------------------------------------------------------------------------


# In the folder of a run: flags of generate.py; thinking budget, length control and answer budget.
# The last three are on the hub, beside the scripts, and of no run.
OF_A_RUN = """
--model checkpoints/step-000004/model | (70, 80) penalty 256
--model model | (70, 80) penalty 256
--model Qwen | (70, 80) penalty 256
--model model --data arithmetic --thinking-budget 5 5 | (5, 5) penalty 256
--model Qwen/Qwen3-0.6B | (54, 58) interruption 9
--model data/arithmetic_base | (54, 58) interruption 9
--model ../.. | (54, 58) interruption 9
"""


def test_generate_samples_the_model_of_a_run_as_the_run_did(tmp_path, monkeypatch):
    """The run is looked for where the model is."""
    run = tmp_path / "runs" / "mine"
    for folder in ("checkpoints/step-000004/model", "model", "Qwen"):
        (run / folder).mkdir(parents=True)
    (run / "log.jsonl").touch()
    theirs = "--data gsm8k --defaults small --thinking-budget 70 80 --length-control penalty"
    stored = asked(f"{theirs} --seed 3")
    write_config(run, stored)
    monkeypatch.chdir(run)
    of = lambda flags: asked(flags, GenerateCommand)
    for flags, values in rows(OF_A_RUN):
        found = of(flags)
        assert values == f"{found.thinking_budget} {found.length_control} {found.answer_budget}"
    for name in settings_module.OF_ITS_RUN:
        assert getattr(of("--model model"), name) == with_recipe(stored)[name]
    assert of("--model model").seed == 0
    assert of("--model model --data arithmetic").defaults == "small"
    with pytest.raises(ValueError, match="--defaults paper does nothing here"):
        of("--model model --defaults paper")


# Flags, and how the run is named.
NAMES = """
--recipe base | base
--leave-out loss | scalerl-without-loss
--recipe=minimax --loss gspo | minimax-loss-gspo
--no-fp32-logits | scalerl-fp32_logits-False
--fp32-logits split | scalerl-fp32_logits-split
--fp32-logits | scalerl
"""


def test_a_recipe_gives_a_run_its_name_and_its_groups(tmp_path, here):
    for flags, name in rows(NAMES):
        assert new_folder(asked(f"{flags} --seed 3")).name == f"{name}-seed3"
    assert asked("--recipe dapo --prompts-per-step 48").groups_per_step == 80
    for number in ("", "-2"):
        assert new_folder(asked("")).name == f"scalerl-seed0{number}"
        (tmp_path / "runs" / f"scalerl-seed0{number}").mkdir(parents=True)


# Flags, the preset that they start from, and what has another value than there.
VALUES = """
--learning-rate None | toy | learning_rate None
--lora-rank 4 | toy | lora_rank 4; learning_rate 0.0005
--lora-rank 4 --learning-rate 1e-5 | toy | lora_rank 4; learning_rate 1e-05
--lora-rank 4 --defaults paper | paper | lora_rank 4; learning_rate 5e-06
--lora-rank 4 --defaults small | small | lora_rank 4; learning_rate None
 | toy |
--data arithmetic:2 arithmetic,max_digits=8 | toy |
--data gym:gcd,max_value=9:2 | short | answer_budget 8; asynchrony pipeline-2
--data arithmetic gym:gcd | paper |
--data polaris:3 deepcoder | paper | learning_rate 5e-07; adam_eps 1e-15; answer_budget 2048
--data gsm8k --defaults toy | toy |
--data gsm8k --defaults small | small | learning_rate None
--defaults small --learning-rate 1e-5 --least-prompts 0 | small | learning_rate 1e-05
--loss dapo --eps-low 0 | toy | eps_low 0.0
--recipe base --no-positive-resampling | toy | positive_resampling False
--no-fp32-logits | toy | fp32_logits False
--fp32-logits split | toy | fp32_logits split
--recipe base --fp32-logits | toy | fp32_logits True
--data gym:gcd --leave-out asynchrony | short | asynchrony ppo-8; length_control penalty
--data gym:gcd --recipe base --loss grpo | short | asynchrony ppo-8; loss grpo
"""


@pytest.mark.parametrize("flags, defaults, others", rows(VALUES))
def test_a_value_comes_from_its_flag_the_recipe_or_the_preset_that_suits_the_data(
    flags, defaults, others
):
    settings = with_recipe(asked(f"{flags} --warmup-steps 7"))
    expected = {"defaults": defaults, **PRESETS[defaults], "warmup_steps": 7}
    expected |= dict(other.split(" ", 1) for other in others.split("; ") if other)
    for name, value in expected.items():
        assert str(settings[name]) == str(value), name


def test_on_a_gpu_its_memory_chooses_what_no_flag_gives(monkeypatch):
    chosen = lambda flags: [getattr(asked(flags), name) for name in settings_module.BY_MEMORY]
    assert chosen("--slots 9") == [9, False, 4096]
    assert chosen("--data gsm8k --slots 9") == [9, True, 32_768]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for flags in ("", "--data gsm8k", "--data gsm8k --defaults small"):
        assert chosen(f"{flags} --slots 9") == [9, None, None]
    assert chosen("--no-gradient-checkpointing") == [None, False, None]
    assert asked("", GenerateCommand).slots is None


# Flags, and the threads of each process on eight cores.
THREADS = """
--asynchrony ppo-8 | 8
--asynchrony pipeline-0 | 8
--asynchrony pipeline-1 | 4
 | 4
--generators 3 | 2
--recipe grpo --generators 2 | 4
--recipe grpo --generators 2 --threads 1 | 1
"""


def test_processes_that_take_turns_do_not_share_the_cores(monkeypatch, tmp_path):
    """There are eight, by affinity or by the quota of a container."""
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(settings_module, "QUOTA", quota)
    for affinity, text in ((8, "max 100000"), (64, "850000 100000")):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _, cores=affinity: range(cores), raising=False
        )
        quota.write_text(text)
        for flags, threads in rows(THREADS):
            assert cpu_threads(asked(flags)) == int(threads)
    quota.write_text("50000 100000")
    assert cpu_threads(asked("")) == 1


# Flags, and the defaults that --help shows.
HELP = """
--asynchrony TEXT pipeline-K | ppo-8
--loss cispo.dapo.* the term | dapo
--learning-rate None.NUMBER None | 5e-07
--share-prompts, --no-share-prompts the | True
"""


def test_help_shows_the_values_of_the_preset_and_of_the_recipe_that_are_named(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit, match="^0$"):
        run_train("--recipe base --defaults paper --help")
    shown = " ".join(capsys.readouterr().out.split())
    for flag, default in rows(HELP):
        assert re.search(rf"{flag}.*?default: (.*?)\)", shown)[1] == default, flag


def test_what_a_resumed_run_may_change_are_settings():
    assert settings_module.MAY_CHANGE <= with_recipe(Settings()).keys()


def test_the_budgets_of_a_small_model_fit_2048_positions_and_its_learning_rate_goes_by_its_size():
    small = asked("--defaults small")
    tokens = small.prompt_budget + small.thinking_budget[1] + small.answer_budget
    assert tokens + len(small.interruption_phrase) <= 2048
    rates = [first_learning_rate(int(millions * 1e6)) for millions in (0.14, 1, 600, 7000)]
    assert rates == [2e-4, 7.5e-5, 3.1e-6, 9e-7]


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
--model no/such/model | --model no/such/model folder
--lora-rank 64 | --lora-rank 64
--vllm-options {nonsense | --vllm-options
--model here | --model here
--model data | --model data
--model runs/taken | runs/taken/model?
--model runs/taken/checkpoints/step-000002 | step-000002/model?
--data algebra | --data algebra
--data words.jsonl,problem=problem,answer=answer --prompts-per-step 4 | --model
--data arithmetic,digits | --data digits
--data arithmetic,digits=3 | --data digits max_digits
--data sums.jsonl --defaults toy --instruction= --prompts-per-step 4 | --model \\boxed{
--prompt-budget 5 | --prompt-budget 5
--generator-memory 1.5 | --generator-memory 1.5
--asynchrony sync | --asynchrony sync pipeline-K
--completions-per-prompt 1 | --completions-per-prompt 1 2
--trainers -1 | --trainers -1 0
--train-prompts 10 | --prompts-per-step 32 10
--train-prompts 64 --least-prompts 64 | --least-prompts 64
--name taken | --name taken
--learning-rate -1 | --learning-rate -1.0
--learning-rate inf | --learning-rate inf finite
--verifier-memory inf | --verifier-memory inf finite
--verifier-memory nan | --verifier-memory nan
--eps-high 0.3 | --eps-high cispo --eps-max
--loss sapo --eps-max 4 | --eps-max sapo
--recipe base --eps-max 4 | --eps-max dapo --eps-low
--eps-max -1 | --eps-max -1.0
--loss dapo --eps-high 0 | --eps-high 0.0
--loss gspo --eps-low 1 | --eps-low 1.0
--least-prompts 9 --recipe base | --least-prompts --positive-resampling
--adam-betas 0.9 1 | --adam-betas
--batch-factor 0.01 | --batch-factor --prompts-per-step 0.01
--from-step 0 | --from-step 0
--resume nowhere | nowhere
--resume runs | runs
--track wandb | --track wandb
--one-process --trainers 3 | --one-process --trainers
--one-process --engine vllm | --one-process --engine
"""


@pytest.fixture
def taken(tmp_path, here, monkeypatch):
    """The folder of a run. We stand above it, beside a folder that is no model and a file of
    problems."""
    taken = tmp_path / "runs" / "taken"
    for model in ("model", "checkpoints/step-000002/model"):
        (taken / model).mkdir(parents=True)
    (taken / "log.jsonl").write_text("mine\n")
    (tmp_path / "here").mkdir()
    for name, text in (("words", "Spell word number {}"), ("sums", "{}+1=")):
        lines = [{"problem": text.format(i), "answer": str(i + 1)} for i in range(99)]
        write_lines(tmp_path / f"{name}.jsonl", lines)
    monkeypatch.setattr(Feed, "start", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    return taken


@pytest.mark.parametrize("flags, words", rows(REFUSED))
def test_pitfall_18_what_cannot_be_is_refused_in_a_line_before_anything_starts(
    flags, words, taken, capsys
):
    with pytest.raises(SystemExit) as stopped:
        run_command(run_train, flags)
    said = capsys.readouterr()
    error = said.err.splitlines()[-1]
    assert stopped.value.code == 2 and said.out == ""
    assert error.startswith("error: ") and "Traceback" not in said.err
    assert all(word in error for word in words.split()), error
    assert (taken / "log.jsonl").read_text() == "mine\n" and [*taken.parent.iterdir()] == [taken]


def test_a_folder_too_long_for_sockets_is_named_where_sockets_are_used(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "j" * 80)
    with pytest.raises(ValueError, match="TMPDIR, /tmp/jjj.* TMPDIR=/tmp"):
        asked("")
    assert asked("--one-process").one_process


# --- devices --------------------------------------------------------------------------------------


# GPUs, flags, and the GPUs of each generator and of each trainer.
DEVICES = """
0 | | cpu | cpu
0 | --generators 2 --trainers 3 | cpu cpu | cpu cpu cpu
1 | | 0 | 0
8 | --one-process | 0 | 0
2 | | 0 | 1
8 | | 0 1 2 3 4 5 6 | 7
10 | | 0 1 2 3 4 5 6 7 | 8 9
8 | --trainers 2 | 0 1 2 3 4 5 | 6 7
8 | --generators 6 | 0 1 2 3 4 5 | 7
8 | --generators 2 --trainers 2 | 0 1 | 6 7
1 | --trainers 2 | want 3 GPUs; there are 1
4 | --generators 4 | want 5 GPUs; there are 4
"""


@pytest.mark.parametrize("row", rows(DEVICES))
def test_generators_have_the_first_gpus_and_trainers_the_last(row, monkeypatch):
    """Of all GPUs one in five trains. More than there are is refused."""
    gpus, flags, *expected = row
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpus))
    if len(expected) == 1:
        with pytest.raises(ValueError, match=f"{flags}.* {expected[0]}"):
            asked(flags)
        return
    found = devices_here(asked(flags))
    assert [" ".join(part).replace("cuda:", "") for part in found] == expected
