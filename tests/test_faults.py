"""Nothing hangs and nothing is lost: real runs, and what is done to them."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import (
    DIES,
    HANGS,
    RAISES,
    ROOT,
    RealRun,
    check_log,
    faulty_engine,
    faulty_loss,
    faulty_reward,
    kill_at_random,
    log,
    nothing_left,
    project,
)  # fmt: skip

import generate
import train
from train import PromptOrder

FOREVER = ["--steps", "100000"]


# --- a run goes on ------------------------------------------------------------------------------------------------


def test_a_run_goes_on_after_all_that_can_go_wrong_beside_the_trainer(tmp_path):
    """An exception in the engine, a generator that is killed, one that hangs, a reward that raises, one that hangs,
    and a step that is not finite, one after the other."""
    folder = project(
        tmp_path,
        generate=faulty_engine(exception=RAISES, hang=HANGS, kill=DIES),
        data__arithmetic=faulty_reward(reward_raises=RAISES, reward_hangs=HANGS),
        loss=faulty_loss(call=4),
    )
    run = RealRun(folder, "--steps", "12", "--validation-every", "4", "--wait-timeout", "20", "--verifier-time-limit", "2")
    status = run.end()
    printed = run.text()
    assert status == 0, printed[-3000:]
    check_log(run.folder, steps=12, validation_every=4)
    assert "RuntimeError: it broke" in printed and "(1 of --max-restarts 3)" in printed
    assert "silent for 20 s (--wait-timeout)" in printed and "ended by signal 9" in printed
    assert "(3 of --max-restarts 3)" in printed
    assert sum(line.get("verifier_failures", 0) for line in log(run.folder)) == 2 and printed.count("no verdict on") == 1
    skipped = [line for line in log(run.folder, "train") if line["skipped"]]
    assert len(skipped) == 1 and skipped[0]["loss"] is None and "its batch is in" in printed
    batch = json.loads((run.folder / "not_finite_batch.json").read_text())
    assert len(batch) == 4 and len(batch[0]["completions"]) == 4
    model = generate.load_model(str(run.folder / "model"), torch.device("cpu"), torch.float32)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_generators_that_keep_failing_end_the_run_with_a_checkpoint(tmp_path):
    folder = project(
        tmp_path,
        generate="_step = TorchEngine.step\n"
        "def step(self):\n"
        "    if self.version > 1: raise RuntimeError('the engine broke')\n"
        "    return _step(self)\n"
        "TorchEngine.step = step\n",
    )
    run = RealRun(folder, *FOREVER, "--max-restarts", "1")
    assert run.end() == 1
    printed = run.text()
    assert printed.count("RuntimeError: the engine broke") == 2 and "Traceback" in printed
    saved = train.newest_checkpoint(run.folder)
    assert json.loads((saved / "state.json").read_text())["step"] == log(run.folder)[-1]["step"]


def test_steps_that_are_never_finite_end_the_run_with_a_checkpoint(tmp_path):
    folder = project(
        tmp_path,
        loss="_policy_loss = policy_loss\n"
        "def policy_loss(*arguments):\n"
        "    loss, sums = _policy_loss(*arguments)\n"
        "    return loss * float('inf'), sums\n",
    )
    run = RealRun(folder, *FOREVER)
    assert run.end() == 1
    steps = log(run.folder, "train")
    assert "in a row" not in run.text() and "So were the 4 steps before it" in run.text()
    assert [line["skipped"] for line in steps[-5:]] == [1] * 5
    assert f"of step {steps[-1]['step']} is not finite" in run.text()
    saved = generate.load_model(str(train.newest_checkpoint(run.folder) / "model"), torch.device("cpu"), torch.float32)
    base = generate.load_model(str(ROOT / "data/arithmetic_base"), torch.device("cpu"), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), base.parameters()))


def test_a_full_gpu_ends_the_run_with_what_to_lower(tmp_path):
    """The error is that of CUDA; the way of a run that meets it is the same without a GPU."""
    full = "if __import__('os').path.exists('full'): raise torch.OutOfMemoryError('CUDA out of memory. Tried to ..')"
    folder = project(
        tmp_path,
        loss=f"_rewards = rewards\ndef rewards(*arguments, **keywords):\n    {full}\n"
        "    return _rewards(*arguments, **keywords)\n",
    )
    run = RealRun(folder, *FOREVER)
    run.until_step(3)
    (tmp_path / "full").touch()
    assert run.end() == 1
    assert "error: CUDA out of memory: lower --tokens-per-micro-batch" in run.text()
    assert f"--resume runs/{run.folder.name}" in run.text() and "Traceback" not in run.text()


def test_a_generator_with_other_parameters_is_noticed(tmp_path):
    """The mismatch on on-policy tokens is far above what numerics do; said once."""
    folder = project(
        tmp_path,
        generate="_read_into = SharedParameters.read_into\n"
        "def read_into(self, model, *arguments):\n"
        "    version = _read_into(self, model, *arguments)\n"
        "    model.get_output_embeddings().weight.data.mul_(1.5)\n"
        "    return version\n"
        "SharedParameters.read_into = read_into\n",
    )
    run = RealRun(folder, "--steps", "2", "--validation-every", "1")
    assert run.end() == 0
    assert run.text().count("generator and trainer differ by") == 1


# --- the trainer ends ---------------------------------------------------------------------------------------------


def test_a_killed_trainer_takes_everything_with_it_and_the_run_is_resumed(tmp_path):
    run = RealRun(tmp_path, *FOREVER, "--generator-devices", "cpu", "cpu")
    run.until_step(3)
    assert len(run.generators()) == 2 and run.verifiers()
    run.kill()
    assert run.end() == -signal.SIGKILL  # within seconds, and no process is left
    assert nothing_left()
    reached = log(run.folder, "train")[-1]["step"]
    again = RealRun(tmp_path, "--resume", "runs/run", "--steps", str(reached + 3), "--generator-devices", "cpu")
    assert again.end() == 0, again.text()[-3000:]
    check_log(run.folder, reached + 3, validation_every=8)
    assert json.loads((run.folder / "config.json").read_text())["generator_devices"] == ["cpu"]


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_what_there_is(tmp_path, signal_number):
    """Sent to the whole process group, as a terminal and most job schedulers do."""
    run = RealRun(tmp_path, *FOREVER, "--checkpoint-every", "1000")
    run.until_step(2)
    os.killpg(run.process.pid, signal_number)
    assert run.end() == 128 + signal_number
    assert f"stopped by {'Ctrl-C' if signal_number == signal.SIGINT else 'SIGTERM'}" in run.text()
    assert "Traceback" not in run.text() and "is replaced" not in run.text()
    step = log(run.folder, "train")[-1]["step"]
    assert json.loads((train.newest_checkpoint(run.folder) / "state.json").read_text())["step"] == step
    generate.load_model(str(run.folder / "model"), torch.device("cpu"), torch.float32)


def test_ctrl_c_twice_stops_at_once_and_keeps_the_last_checkpoint(tmp_path):
    """In a step that lasts for ever, which the first Ctrl-C waits for."""
    folder = project(
        tmp_path,
        loss="_policy_loss, _calls = policy_loss, []\n"
        "def policy_loss(*arguments):\n"
        "    _calls.append(1)\n"
        "    if len(_calls) == 6: open('stuck', 'w').close(); __import__('time').sleep(1000)\n"
        "    return _policy_loss(*arguments)\n",
    )
    run = RealRun(folder, *FOREVER)
    run.until((tmp_path / "stuck").exists)
    run.process.send_signal(signal.SIGINT)
    run.until(lambda: "Once more stops at once" in run.text())
    run.process.send_signal(signal.SIGINT)  # at once: the same one again
    time.sleep(1.5)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.end(20) == 130
    saved = train.newest_checkpoint(run.folder)
    assert "stopped at once" in run.text() and "Traceback" not in run.text()
    assert f"of step {json.loads((saved / 'state.json').read_text())['step']}: python train.py --resume" in run.text()


# --- resuming -----------------------------------------------------------------------------------------------------


def columns(folder):
    names = ("step", "loss", "gradient_norm", "pass_rate", "ratio_max", "compute_tokens", "compute_flops", "epoch")
    return [[line.get(name) for name in names] for line in log(folder)]


def test_a_synchronous_run_killed_and_resumed_is_the_run_left_alone(tmp_path):
    """The same losses, pass rates and compute to the last digit, step by step (PPO-off-policy-1)."""
    flags = ["--steps", "9", "--asynchrony", "ppo-1", "--validation-every", "2", "--train-prompts", "20"]
    alone = RealRun(tmp_path, *flags, name="alone")
    killed = RealRun(tmp_path, *flags, name="killed")
    killed.until_step(5)
    killed.kill()
    killed.end()
    assert alone.end() == 0
    resumed = RealRun(tmp_path, "--resume", "runs/killed")
    assert resumed.end() == 0, resumed.text()[-3000:]
    assert "going on from step" in resumed.text() and "going on from step 0" not in resumed.text()
    assert columns(killed.folder) == columns(alone.folder)
    names = sorted(path.name for path in alone.folder.iterdir())
    assert sorted(path.name for path in killed.folder.iterdir()) == names
    samples = [(run.folder / "samples.txt").read_text() for run in (alone, killed)]
    assert samples[0] == samples[1]


@pytest.mark.parametrize("asynchrony", ["pipeline-2", "ppo-3"])
def test_pitfall_16_no_prompt_comes_twice_or_is_lost_when_a_run_is_resumed(tmp_path, asynchrony):
    """Killed between two checkpoints, and for ppo-3 in the middle of what one policy sampled: all prompts handed out
    are trained on once, or under way."""
    run = RealRun(tmp_path, *FOREVER, "--asynchrony", asynchrony, "--train-prompts", "400")
    run.until_step(4)
    run.kill()
    run.end()
    resumed = RealRun(tmp_path, "--resume", "runs/run", "--checkpoint-every", "1")
    resumed.until_step(8)
    resumed.process.send_signal(signal.SIGTERM)
    resumed.end()
    state = json.loads((train.newest_checkpoint(run.folder) / "state.json").read_text())
    trained = [prompt for prompt, _ in state["orders"][0]["pass_rates"]]
    under_way = [prompt for _, _, prompt in state["to_repeat"]]
    assert len(trained) == 4 * state["step"]
    assert len({*trained, *under_way}) == len(trained) + len(under_way) == sum(state["handed_out"])
    order = PromptOrder(400, seed=0, no_positive_resampling=True).shuffled()
    assert {*trained, *under_way} == set(order[: len(trained) + len(under_way)].tolist())
    assert max(line["off_policyness_max"] for line in log(run.folder, "train")) <= 2


def test_the_order_of_prompts_goes_on_where_it_was(tmp_path):
    """Epoch, place in it and retired prompts survive a checkpoint."""
    alone = PromptOrder(12, seed=3, no_positive_resampling=True)
    for visit in range(17):
        prompt = alone.next()
        alone.record(prompt, 1.0 if visit % 3 == 0 else 0.5)
    resumed = PromptOrder(12, seed=3, no_positive_resampling=True)
    resumed.restore(json.loads(json.dumps(alone.state())))
    assert resumed.retired == alone.retired and resumed.pass_rates == alone.pass_rates
    assert [resumed.next() for _ in range(20)] == [alone.next() for _ in range(20)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run with four checkpoints, and the folder it was made in."""
    folder = tmp_path_factory.mktemp("finished")
    run = RealRun(folder, "--steps", "4", "--checkpoint-every", "1", "--keep-checkpoints", "3", "--validation-every", "2")
    assert run.end() == 0, run.text()[-3000:]
    return folder


def copy(finished, tmp_path):
    subprocess.run(["cp", "-r", str(finished / "runs"), str(tmp_path)], check=True)
    return tmp_path / "runs" / "run"


def test_the_last_few_checkpoints_are_kept_and_hold_data_only(finished):
    folders = train.checkpoint_folders(finished / "runs" / "run")
    assert [folder.name for folder in folders] == ["step-000002", "step-000003", "step-000004"]
    suffixes = {path.suffix for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jinja"}


@pytest.mark.parametrize("file", ["model/model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"])
@pytest.mark.parametrize("damage", ["cut short", "one bit", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(finished, tmp_path, capsys, file, damage):
    folder = copy(finished, tmp_path)
    path = folder / "checkpoints" / "step-000004" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "one bit" else content[: len(content) // 2])
    assert train.newest_checkpoint(folder).name == "step-000003"
    warning = capsys.readouterr().err
    assert "step-000004 is damaged" in warning and warning.count("\n") == 1
    if file != "checksums.json":
        assert file in warning


def test_a_run_without_a_whole_checkpoint_is_refused_and_a_finished_one_goes_further(finished, tmp_path):
    folder = copy(finished, tmp_path)
    (folder / "checkpoints" / "step-000004" / "state.json").write_text("{}")
    longer = RealRun(tmp_path, "--resume", "runs/run", "--steps", "6")
    assert longer.end() == 0, longer.text()[-3000:]
    assert "step-000004 is damaged (state.json)" in longer.text() and "going on from step 3" in longer.text()
    check_log(folder, steps=6, validation_every=2)
    for checkpoint in train.checkpoint_folders(folder):
        (checkpoint / "optimizer.safetensors").unlink()
    lines = (folder / "log.jsonl").read_text()
    refused = RealRun(tmp_path, "--resume", "runs/run")
    assert refused.end() == 2 and "no checkpoint of this run is whole" in refused.text()
    assert (folder / "log.jsonl").read_text() == lines


def test_what_a_resumed_run_cannot_change_is_refused_by_name(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    copy(finished, tmp_path)
    resume = ["--resume", "runs/run"]
    for flags, named in {
        ("--learning-rate", "1e-3"): "--learning-rate (was 0.0002, now 0.001)",
        ("--seed", "1"): "--seed",
        ("--loss", "gspo"): "--loss",
        ("--recipe", "base"): "--recipe",
        ("--thinking-budget", "50", "58"): "--thinking-budget",
        ("--name", "other"): "--name",
    }.items():
        with pytest.raises(ValueError) as refused:
            train.parse_settings([*resume, *flags])
        assert named in str(refused.value) and "those that can: --checkpoint-every" in str(refused.value)
    allowed = ["--steps", "9", "--generator-devices", "cpu", "cpu", "--threads", "2", "--wait-timeout", "9"]
    changed = train.parse_settings([*resume, *allowed])
    before = train.read_settings(Path("runs/run"))
    assert changed == dataclasses.replace(
        before, resume=Path("runs/run"), steps=9, generator_devices=("cpu", "cpu"), threads=2, wait_timeout=9.0
    )
    assert train.MAY_CHANGE <= {field.name for field in dataclasses.fields(train.Settings)}
    for folder in ("runs", "nowhere"):
        assert train.main(["--resume", folder]) == 2
        assert f"--resume {folder}: the folder holds no run" in capsys.readouterr().err


# --- the run's folder ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder, options):
    """A file system of its own; needs the right to mount, which a container's root and CI have."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_in_words_and_loses_nothing(tmp_path):
    """A disk with room for two checkpoints and a half (of 1.7 MB each), then a larger one."""
    with small_disk(tmp_path / "runs", "size=5m") as disk:
        run = RealRun(tmp_path, *FOREVER, "--validation-every", "2", "--keep-checkpoints", "10")
        assert run.end() == 1
        assert "the run's folder cannot be written" in run.text() and "No space left on device" in run.text()
        assert "Traceback" not in run.text()
        saved = train.newest_checkpoint(run.folder)
        assert f"the last checkpoint is of step {int(saved.name[5:])}" in run.text()
        assert not list(run.folder.rglob("*.partial"))
        assert all(json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines())
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        steps = log(run.folder, "train")[-1]["step"] + 2
        again = RealRun(tmp_path, "--resume", "runs/run", "--steps", str(steps))
        assert again.end() == 0, again.text()[-3000:]
        check_log(run.folder, steps, validation_every=2)


def test_a_folder_that_cannot_be_written_or_is_in_use_is_refused_before_anything_starts(tmp_path, finished):
    with small_disk(tmp_path / "runs", "size=1m,ro"):
        run = RealRun(tmp_path, "--steps", "1")
        assert run.end() == 2 and "Read-only file system" in run.text() and "Traceback" not in run.text()
    (tmp_path / "there").mkdir()
    folder = copy(finished, tmp_path / "there")
    with train.lock_folder(folder):
        refused = RealRun(tmp_path / "there", "--resume", "runs/run", "--steps", "9")
        assert refused.end() == 2 and f"is in use by process {os.getpid()}" in refused.text()
    train.lock_folder(folder).close()  # free again


# --- at random ----------------------------------------------------------------------------------------------------


def test_twenty_kills_at_random_moments_lose_nothing(tmp_path):
    """Trainer, generator and verifier, whatever they are doing. Training goes on after each; the log tells of one
    unbroken run; and what was learned stays: the mean pass rate of the last validations is not below the best of the first."""
    flags = [*FOREVER, "--validation-every", "4", "--validation-problems", "32", "--validation-samples", "4"]
    record = kill_at_random(tmp_path, kills=20, flags=flags, seed=0)
    assert len(record) == 20 and {victim for victim, _ in record} == {"trainer", "generator", "verifier"}
    folder = tmp_path / "runs" / "run"
    steps = log(folder, "train")[-1]["step"]
    check_log(folder, steps, validation_every=4, finished=False)
    rates = [line["pass_rate"] for line in log(folder, "validation")]
    noise = 2 * np.sqrt(0.25 / 128)
    assert np.mean(rates[-3:]) > max(rates[0], np.mean(rates[:3])) - noise
    assert nothing_left()
