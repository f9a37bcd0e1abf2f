"""Whole runs of train.py in which all goes well: what they leave behind, and that they compute the
same again."""

import json

import pytest
import torch
from faults import ROOT, RealRun, check_log, log, project
from steps import needs_vllm

from core.model import load_model
from docs.make_base import BASE_MODEL


def run(folder, flags, name="run"):
    """A small run in this folder that ends well; its folder and what it printed."""
    done = RealRun(folder, f"--train-prompts 40 {flags}", name)
    done.end_well()
    return done.folder, done.text()


def test_a_whole_short_run(tmp_path):
    """With two generators and an update after every step; the screen, and everything that a run
    leaves behind."""
    flags = "--steps 8 --validation-every 1 --generators 2 --asynchrony pipeline-2"
    folder, printed = run(tmp_path, flags)
    check_log(folder, steps=8, validation_every=1)
    steps, validations = log(folder, "train"), log(folder, "validation")
    for line in validations:
        assert line["num_examples"] == 12
        assert line["mismatch_max"] < 1e-4  # fp32 on both sides
    assert max(line["off_policyness_mean"] for line in steps) > 0
    explained = (ROOT / "docs" / "log.md").read_text()
    for key in [*steps[-1], *validations[-1]]:
        assert f"`{key}`" in explained, key
    assert log(folder)[-1].items() >= {"kind": "end", "reason": "All steps are made"}.items()
    config = json.loads((folder / "config.json").read_text())
    assert config["recipe"]["asynchrony"] == "pipeline-2"
    assert torch.__version__.startswith(config["versions"]["torch"])  # 2.13.0+cu130
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    for text in (
        "devices: generators cpu with 32 slots, cpu with 32 slots; trainers cpu",
        "forecast at",
        f" {validations[-1]['compute_tokens']:,} sampled tokens",
    ):
        assert text in printed
    base, trained = (load_model(str(each)).parameters() for each in (BASE_MODEL, folder / "model"))
    assert not all(map(torch.equal, base, trained))
    for text in ("warning", "loading weights", "have to come"):
        assert text not in printed.lower()


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters", ["--learning-rate 5e-4", "--lora-rank 8 --learning-rate 2e-3"]
)
def test_a_short_run_with_vllm_learns(tmp_path, parameters):
    """Asynchronous, with an update after each step, of all parameters or of adapters; generator and
    trainer agree at every validation."""
    flags = """
        --engine vllm --steps 14 --prompts-per-step 16 --completions-per-prompt 8
        --train-prompts 2000 --validation-every 7 --validation-problems 64
        --validation-samples 4 --slots 128 --checkpoint-every 14
    """
    folder, _ = run(tmp_path, f"{flags} {parameters}")
    check_log(folder, steps=14, validation_every=7)
    assert 0 < max(line["off_policyness_max"] for line in log(folder, "train")) < 9
    validations = log(folder, "validation")
    for line in validations:  # older keys and values make both ten times these limits
        assert line["mismatch_max"] < 1e-3 and line["mismatch_mean"] < 1e-6
    assert validations[-1]["pass_rate"] > validations[0]["pass_rate"] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("adapted", ["", "--lora-rank 4"])
def test_a_finished_run_goes_further_with_any_number_of_ranks(tmp_path, adapted):
    """Begun with two, gone on with one: the losses of a synchronous run that had one all along."""
    flags = f"{adapted} --validation-every 2 --asynchrony ppo-1 --steps"
    alone, _ = run(tmp_path, f"{flags} 8", name="alone")
    two, printed = run(tmp_path, f"{flags} 5 --trainers 2")
    assert "trainers cpu, cpu" in printed
    RealRun(tmp_path, "--resume runs/run --steps 8 --trainers 1").end_well()
    assert [line["step"] for line in log(two, "validation")] == [0, 2, 4, 5, 6, 8]  # 5 was an end
    for ours, theirs in zip(log(two, "train"), log(alone, "train"), strict=True):
        # Later a last digit has changed a sampled token here and there.
        bound = 1e-3 if ours["step"] <= 3 else 0.1
        for name in ("loss", "gradient_norm", "pass_rate"):
            expected = pytest.approx(theirs[name], rel=bound, abs=1e-4)
            assert ours[name] == expected, (ours["step"], name)


# --- each kind of asynchrony ----------------------------------------------------------------------


SLOW_WRITES = """
_write = SharedParameters.write
def write(self, parameters, version, rank=0):
    time.sleep(0.3)
    _write(self, parameters, version, rank)
SharedParameters.write = write
"""


@pytest.mark.slow
def test_ppo_off_policy_k_trains_k_steps_on_what_one_policy_sampled(tmp_path):
    """Also when it takes long to hand the parameters over: validations wait for those of their
    step."""
    flags = "--steps 6 --validation-every 2 --asynchrony ppo-3 --learning-rate 3e-3"
    folder, _ = run(project(tmp_path, core__rollouts=SLOW_WRITES), flags)
    check_log(folder, steps=6, validation_every=2)
    steps = log(folder, "train")
    ages = [(line["off_policyness_mean"], line["off_policyness_max"]) for line in steps]
    assert ages == [(0, 0), (1, 1), (2, 2)] * 2
    assert [line["parameters_seconds"] >= 0.3 for line in steps] == [False, False, True] * 2
    assert all(line["mismatch_max"] < 1e-3 for line in log(folder, "validation"))


# --- other data and models ------------------------------------------------------------------------


ALWAYS_RIGHT = """
from data import Problem
def problems(split, number, seed=0):
    return [Problem(f"{i}+{len(split)}=", "", __name__) for i in range(40 * number)]
def score(problem, completion):
    return True
"""


@pytest.mark.slow
def test_a_run_ends_when_every_prompt_of_a_task_of_ones_own_is_retired(tmp_path):
    """A file in data/ with two functions is a task; with the penalty for length nothing is
    interrupted."""
    flags = """
        --data always --defaults toy --train-prompts 8 --steps 20 --length-control penalty
    """
    folder, printed = run(project(tmp_path, data__tasks__always=ALWAYS_RIGHT), flags)
    reason, end = "Every prompt has been retired (pass rate >= 0.9)", log(folder)[-1]
    assert reason in printed and (end["kind"], end["reason"]) == ("end", reason)
    steps = log(folder, "train")
    assert 2 <= len(steps) < 20 and steps[-1]["prompts_retired"] == 8
    assert all(line["interrupted_fraction"] == 0 for line in steps)
    validated = {line["step"] for line in log(folder, "validation")}
    assert len(steps) in validated <= {0, 8, 16, len(steps)} and (folder / "model").is_dir()


RECORDS = {
    "sums": '{"question": "What is NUMBER and NUMBER?", "answer": "NUMBER"}',
    "programs": '{"problem": "Double a number, NUMBER times.", "tests": '
    r'[{"input": "3\n", "output": "6\n", "type": "stdin_stdout"}]}',
}


@pytest.mark.slow
def test_a_chat_model_trains_on_mathematics_and_programs_together(tmp_path, chat_models):
    """From files of one's own, in proportion to their weights, each with its own held-out curve;
    experts, in bf16. (The model is random and never right, so all groups are of zero variance; that
    verdicts count is for other tests.)"""
    for name, record in RECORDS.items():
        lines = [record.replace("NUMBER", str(number)) for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    flags = f"""
        --model {chat_models["qwen3-moe"]} --data sums.jsonl:3 programs.jsonl:1 --defaults toy
        --steps 3 --train-prompts 30 --prompt-budget 300 --thinking-budget 10 12 --answer-budget 8
        --asynchrony ppo-1 --dtype bfloat16 --gradient-checkpointing
    """
    folder, _ = run(tmp_path, flags)
    expected = {"num_examples": (5 + 3) * 2, "verifier_failures": 0}  # so many are held out
    expected |= {f"pass_rate/{name}.jsonl": 0 for name in ("sums", "programs")}
    for step, line in zip((0, 3), log(folder, "validation"), strict=True):
        assert line.items() >= (expected | {"step": step}).items()
        assert line["mismatch_mean"] < 0.05
    load_model(str(folder / "model"))
