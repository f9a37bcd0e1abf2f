"""--one-process: the generator and the verifiers work in the trainer's own process. What they
compute is compared in test_faults.py."""

import multiprocessing.process
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
from faults import TINY, log
from steps import run_train

from data.tasks import arithmetic
from machinery import run as run_module

RUN = Path("runs/run")
FLAGS = f"{TINY} --one-process --train-prompts 20 --steps 1 --name run"


pytestmark = pytest.mark.usefixtures("here")


class Broken(OSError):
    """An error that could come from a full disk too."""


@pytest.mark.parametrize("error, calls", [(Broken("it broke"), 20), (ValueError("soon"), 1)])
def test_an_exception_in_score_is_the_users_and_breakpoint_stops_in_this_process(
    monkeypatch, error, calls
):
    """Nothing makes a verdict or a sentence of it. No process is started, by any means."""
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", None)
    monkeypatch.setattr(subprocess.Popen, "__init__", None)
    monkeypatch.setattr(os, "fork", None)
    stopped_in, usual = [], arithmetic.score

    def score(problem, completion):
        breakpoint()
        if len(stopped_in) == calls:  # 20: after the first validation
            raise error
        return usual(problem, completion)

    monkeypatch.setattr(
        sys, "breakpointhook", lambda: stopped_in.append(threading.current_thread())
    )
    monkeypatch.setattr(arithmetic, "score", score)
    with pytest.raises(RuntimeError, match="the run has failed, as said above") as failed:
        run_train(FLAGS)
    assert failed.value.__cause__ is error
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1] == "score" and "train" in frames
    assert stopped_in == [threading.main_thread()] * calls
    assert RUN.exists() == (calls == 20), "a first try leaves the name free"


@pytest.mark.parametrize("mismatch, status", [(0.04, 0), (0.06, 1), (float("nan"), 1)])
def test_a_run_ends_if_both_sides_differ_before_training(monkeypatch, capsys, mismatch, status):
    """In the first validation they hold the same model. A page that fails is no failure."""
    monkeypatch.setattr("tools.view.write_page", lambda page: {}["a page" * 9999])
    figures = {"mismatch_mean": mismatch, "mismatch_max": mismatch}
    monkeypatch.setattr(run_module, "numerics_mismatch", lambda *_: figures)
    assert run_train(FLAGS) == status
    printed = capsys.readouterr().err
    said = "The run trains with --asynchrony ppo-1, not pipeline-8, because of --one-process."
    assert said in printed and "rollouts.html cannot be made (Key" in printed
    assert len(printed) < 9999
    assert ("error: generator and trainer differ by" in printed) == bool(status)
    assert len(log(RUN, "train")) == 1 - status
