"""--one-process: the generator and the verifiers work in the trainer's own process, and compute
what they compute in processes of their own."""

import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
from faults import COMPUTED, HANGS, TINY, RealRun, faulty_reward, log, project
from steps import run_train

from core.settings import Settings, devices_here
from data.tasks import arithmetic
from machinery import run as run_module
from machinery.ranks import Stop

FLAGS = ["--train-prompts", "20", "--validation-every", "2"]
SAID = "The run trains with --asynchrony ppo-1, not {}, because of --one-process."


def test_the_losses_are_those_of_processes_to_the_last_digit_and_a_run_may_switch(tmp_path):
    """Processes, then one process, then processes; beside a run that is left alone."""
    dapo = [*FLAGS, "--recipe", "dapo", "--prompts-per-step", "3", "--asynchrony", "ppo-1"]
    alone = RealRun(tmp_path, *dapo, "--steps", "5", name="alone")
    for steps, flags in (
        ("2", dapo),
        ("4", ["--resume", "runs/run", "--one-process"]),
        ("5", ["--resume", "runs/run", "--no-one-process"]),
    ):
        run = RealRun(tmp_path, *flags, "--steps", steps)
        run.end_well()
        config = json.loads((run.folder / "config.json").read_text())
        assert config["one_process"] == (steps == "4") and config["engine"] == "auto"
        assert SAID[:20] not in run.text(), "ppo-1 was asked for"
    alone.end_well()
    for kind, number in (("train", 5), ("validation", 4)):
        ours, theirs = (
            [[line.get(name) for name in (*COMPUTED, "mismatch_max")] for line in log(each, kind)]
            for each in (run.folder, alone.folder)
        )
        assert ours == theirs and len(ours) == number


class Broken(OSError):
    """An error that could come from a full disk too."""


@pytest.mark.parametrize(
    "error, calls", [(Broken("it broke"), 20), (ValueError("it broke"), 20), (Broken("soon"), 1)]
)
def test_an_exception_in_score_is_the_users_and_breakpoint_stops_in_this_process(
    tmp_path, monkeypatch, error, calls
):
    """Nothing makes a verdict or a sentence of it. No process is started, by any means."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Stop, "listen", lambda _: None)

    def no_process(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", no_process)
    monkeypatch.setattr(subprocess.Popen, "__init__", no_process)
    monkeypatch.setattr(os, "fork", no_process)
    stopped_in, usual = [], arithmetic.score

    def score(problem, completion):
        breakpoint()
        if len(stopped_in) == calls:  # 20: after the first validation
            raise error
        return usual(problem, completion)

    here = lambda: stopped_in.append(threading.current_thread() is threading.main_thread())
    monkeypatch.setattr(sys, "breakpointhook", here)
    monkeypatch.setattr(arithmetic, "score", score)
    with pytest.raises(RuntimeError, match="the run has failed, as said above") as failed:
        run_train(["--one-process", "--name", "run", *TINY, *FLAGS, "--steps", "5"])
    assert failed.value.__cause__ is error
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1] == "score" and "train" in frames
    assert len(stopped_in) == calls and all(stopped_in)
    assert Path("runs/run").exists() == (calls == 20), "a first try leaves the name free"


@pytest.mark.parametrize("mismatch, status", [(0.04, 0), (0.06, 1), (float("nan"), 1)])
def test_a_run_ends_if_both_sides_differ_before_training(
    tmp_path, monkeypatch, capsys, mismatch, status
):
    """In the first validation they hold the same model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Stop, "listen", lambda _: None)
    figures = {"mismatch_mean": mismatch, "mismatch_max": mismatch}
    monkeypatch.setattr(run_module, "numerics_mismatch", lambda *_: figures)
    flags = ["--one-process", *TINY, *FLAGS, "--steps", "1", "--name", "run"]
    assert run_train(flags) == status
    printed = capsys.readouterr().err
    assert SAID.format("pipeline-8") in printed
    ended = "error: generator and trainer differ by" in printed
    assert ended == (status == 1)
    assert len(log(Path("runs/run"), "train")) == (0 if ended else 1)


def test_ctrl_c_twice_ends_a_run_in_which_a_task_hangs(tmp_path):
    folder = project(tmp_path, data__tasks__arithmetic=faulty_reward(hangs=HANGS))
    run = RealRun(folder, *FLAGS, "--one-process")
    run.until(lambda: (folder / "hangs").exists())
    os.kill(run.process.pid, signal.SIGINT)
    run.until(lambda: "Once more stops at once" in run.text())
    time.sleep(1.1)  # a signal within a second is the same one
    assert run.process.is_alive(), "the control: one Ctrl-C waits for the task"
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end(seconds=20) == 128 + signal.SIGINT
    assert "stopped at once" in run.text()


def test_one_process_has_one_device(monkeypatch):
    for gpus, device in ((8, "cuda:0"), (0, "cpu")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert devices_here(Settings(one_process=True)) == ([(device,)], [device])
