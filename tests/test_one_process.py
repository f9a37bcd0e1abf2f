"""--one-process: the generator and the verifiers work in the trainer's own process, and compute
what they compute in processes of their own."""

import contextlib
import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from faults import HANGS, TINY, RealRun, check_log, faulty_reward, log, project
from steps import run_train

from core.settings import Settings, devices_here
from data.tasks import arithmetic
from machinery import run as run_module
from machinery.ranks import Stop

FLAGS = ["--train-prompts", "20", "--validation-every", "2", "--threads", "1"]
SAID = "The run trains with --asynchrony ppo-1, not {}, because of --one-process."


def columns(run: RealRun) -> list[list]:
    """What a run has computed, step by step and validation by validation."""
    names = ("kind", "step", "loss", "gradient_norm", "pass_rate", "ratio_max", "mismatch_max",
             "compute_tokens", "compute_flops", "completion_length", "prompts_retired")  # fmt: skip
    return [[line.get(name) for name in names] for line in log(run.folder) if line["kind"] != "end"]


def children(run: RealRun) -> set[str]:
    """The command lines of all processes that any thread of the trainer has started."""
    found = set()
    of_thread = []
    with contextlib.suppress(OSError):  # it has just ended
        of_thread += Path(f"/proc/{run.process.pid}/task").glob("*/children")
    for listing in of_thread:
        with contextlib.suppress(OSError):
            for child in listing.read_text().split():
                found.add(Path(f"/proc/{child}/cmdline").read_text())
    return found


@pytest.fixture
def temporary():
    """A folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_the_losses_are_those_of_processes_to_the_last_digit(tmp_path, temporary):
    """Without any child process, from the first line on the screen to the end, but for the forks
    that read the model's files, and for `chmod` and `rm`, which remove its temporary files."""
    flags = [*FLAGS, "--steps", "5"]
    others = RealRun(tmp_path, *flags, "--asynchrony", "ppo-1", name="others")
    # A run that starts removes what dead runs have left in that folder, and other tests kill runs.
    one = RealRun(tmp_path, *flags, "--one-process", name="one", temporary=temporary)
    seen_of_one, seen_of_others, seen_there = set(), set(), set()
    own = Path(f"/proc/{one.process.pid}/cmdline").read_text()
    while one.process.is_alive() or others.process.is_alive():
        seen_of_one |= children(one)
        seen_of_others |= children(others)
        seen_there |= {path.name for path in Path(temporary).glob("scalerl-*")}
        time.sleep(0.02)
    others.end_well()
    one.end_well()
    assert any("data.verify" in line for line in seen_of_others), "the control: children are seen"
    assert len(seen_there) == 1, "the control: its temporary files are in the folder of its own"
    removes = {line for line in seen_of_one if line.startswith(("chmod\0", "rm\0"))}
    assert all(f"{temporary}/scalerl-" in line for line in removes)
    assert seen_of_one - removes <= {own, ""}  # empty: one that has ended
    assert columns(one) == columns(others)
    assert len({line["loss"] for line in log(one.folder, "train")}) > 3
    check_log(one.folder, steps=5, validation_every=2)
    assert one.text().count(SAID.format("pipeline-8")) == 1
    assert sorted(path.name for path in one.folder.iterdir()) == sorted(
        path.name for path in others.folder.iterdir()
    )


def test_a_run_that_is_resumed_may_switch_and_goes_on_as_if_it_had_not(tmp_path):
    """Processes, then one process, then processes; beside a run that is left alone."""
    dapo = [*FLAGS, "--recipe", "dapo", "--prompts-per-step", "3"]
    alone = RealRun(tmp_path, *dapo, "--asynchrony", "ppo-1", "--steps", "5", name="alone")
    run = RealRun(tmp_path, *dapo, "--asynchrony", "ppo-1", "--steps", "2")
    run.end_well()
    run = RealRun(tmp_path, "--resume", "runs/run", "--one-process", "--steps", "4")
    run.end_well()
    assert "--one-process" not in run.text(), "ppo-1 was asked for"
    config = json.loads((run.folder / "config.json").read_text())
    assert config["one_process"] and config["engine"] == "auto"
    run = RealRun(tmp_path, "--resume", "runs/run", "--no-one-process", "--steps", "5")
    run.end_well()
    alone.end_well()
    ours, theirs = ([line for line in columns(each) if line[0] == "train"] for each in (run, alone))
    assert ours == theirs and len(ours) == 5


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
    frames = [entry.name for entry in failed.traceback.__class__(error.__traceback__)]
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
    ended = "error: generator and trainer differ by" in capsys.readouterr().err
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
