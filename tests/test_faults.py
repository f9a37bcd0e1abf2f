"""Nothing hangs and nothing is lost: real runs, and what is done to them."""

import json
import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import steps
from faults import COMPUTED, ROOT, TINY, RealRun, check_log, last_step, log, project, python
from programs import rows

from core.model import load_model
from core.settings import read_settings
from machinery.folder import checkpoints, json_lines, step_of

FOREVER = "--steps 100000"
HINT = "python train.py --resume runs/run goes on from the last checkpoint"


def saved_step(run):
    """The step of the newest checkpoint, whose model can be loaded."""
    newest = checkpoints(run.folder)[-1]
    load_model(str(newest / "model"))
    return step_of(newest)


def fails(run, *words):
    """Assert that the run ends and says this, and how to go on, from a checkpoint that is at most
    two steps old."""
    assert run.end() == 1
    assert [text for text in (*words, HINT) if text not in run.text()] == []
    reached = last_step(run.folder)
    assert reached - 2 <= saved_step(run) <= reached


# --- a run goes on --------------------------------------------------------------------------------


def computed(folder, steps):
    """What was computed up to this step, by the log; and the groups and validations that are kept,
    without times."""
    of_a_step = lambda line: line["step"] <= steps and line["kind"] not in ("end", "times")
    columns = [[line.get(name) for name in COMPUTED] for line in filter(of_a_step, log(folder))]
    kept = [*filter(of_a_step, json_lines(folder / "rollouts.jsonl"))]
    for completion in sum((line["completions"] for line in kept), []):
        del completion["began"], completion["ended"]
    return columns, kept


def test_kill_9_and_resume_to_the_last_digit_and_a_killed_generator_is_replaced(tmp_path):
    """A run beside one in one process that is left alone. Its trainer is killed; it goes on in one
    process, then with processes again, and at last its generator is killed. PipelineRL-0,
    PPO-off-policy-1 and what one process does are the same thing."""
    flags = "--train-prompts 20 --validation-every 3"
    usual = f"{flags} --one-process --steps 9 --asynchrony ppo-1"
    alone = RealRun(tmp_path, usual, name="alone")
    run = RealRun(tmp_path, f"{flags} --steps 12 --asynchrony pipeline-0")
    run.until_step(3)
    assert run.children() and run.processes("data.verify")
    run.kill()
    assert run.end() == -signal.SIGKILL  # and no process is left, and no shared memory
    assert run.shared_memory, "the control"
    alone.end_well()

    run = RealRun(tmp_path, "--resume runs/run --one-process --steps 6")
    run.end_well()
    assert "going on from step 2\n" in run.text()
    run = RealRun(tmp_path, "--resume runs/run --no-one-process --steps 12")
    run.until_step(10)
    run.kill(run.children()[-1])
    run.end_well()
    assert "ended by signal 9" in run.text()
    assert "It is replaced (1 of --max-restarts 3)" in run.text()
    check_log(run.folder, steps=12, validation_every=3)
    assert computed(run.folder, 9) == computed(alone.folder, 9)
    steps = log(run.folder, "train")
    assert len({line["loss"] for line in steps}) > 3
    assert max(line["off_policyness_max"] for line in steps) == 0


# Python text at the end of modules. Files tell all processes of the run what has happened.
ENGINE_FAILS = """
import os, time
_step = TorchEngine.step
def step(self):
    if self.version >= 3 and not os.path.exists("raised"):
        open("raised", "w")
        raise RuntimeError("it broke")
    if self.version >= 5 and not os.path.exists("hung"):
        open("hung", "w")
        time.sleep(1000)
    return _step(self)
TorchEngine.step = step
"""
REWARD_FAILS = """
import os, time
_score = score
def score(problem, completion):
    if "</think>" in completion and not os.path.exists("reward raised"):
        open("reward raised", "w")
        raise RuntimeError("it broke")
    if "</think>" in completion and not os.path.exists("reward hung"):
        open("reward hung", "w")
        time.sleep(1000)
    return _score(problem, completion)
"""


@pytest.mark.slow
def test_a_run_goes_on_after_all_else_that_can_go_wrong_beside_the_trainer(tmp_path):
    """An exception in the engine, a generator that hangs, a reward that raises, and one that hangs,
    one after the other."""
    folder = project(
        tmp_path,
        core__torch_engine=ENGINE_FAILS,
        data__tasks__arithmetic=REWARD_FAILS,
    )
    flags = "--steps 10 --validation-every 5 --wait-timeout 15 --verifier-time-limit 2"
    run = RealRun(folder, flags)
    run.end_well()
    check_log(run.folder, steps=10, validation_every=5)
    for column in ("verifier_failures", "task_errors"):
        assert sum(line.get(column, 0) for line in log(run.folder)) == 1
    for text in (
        "RuntimeError: it broke",
        "(1 of --max-restarts 3)",
        "silent for 15 s (--wait-timeout)",
        "(2 of --max-restarts 3)",
        "no verdict on",
        "the task has raised on a completion",
        "in score",
    ):
        assert text in run.text()


# --- the trainer ends -----------------------------------------------------------------------------

# Python text at the end of core/policy.py: rank 1 raises as soon as there is a file `now`.
RANK_1_BREAKS = """
import os
_micro_batches = micro_batches
def micro_batches(*arguments):
    rank = arguments[4]
    if rank == 1 and os.path.exists("now"):
        raise RuntimeError("this rank broke")
    return _micro_batches(*arguments)
"""


@pytest.mark.slow
def test_a_run_whose_rank_or_disk_fails_ends_and_goes_on_from_a_checkpoint(tmp_path):
    """A rank dies, hangs or raises, and the disk is full, one after the other; the log at the end
    is that of one run."""
    folder = project(tmp_path, core__policy=RANK_1_BREAKS)
    run = RealRun(folder, f"{FOREVER} --trainers 2 --validation-problems 500")
    run.until(lambda: "devices:" in run.text())  # in the first validation
    run.kill(run.children()[0])
    assert run.end() == 1 and not run.folder.exists()

    run = RealRun(folder, f"{FOREVER} --trainers 2")
    run.until_step(3)
    rank, _ = run.children()
    run.kill(rank)
    fails(run, "a process of the trainer has failed, and the run ends", "SIGKILL")

    run = RealRun(folder, "--resume runs/run --wait-timeout 20")
    run.until_step(last_step(run.folder) + 2)
    os.kill(run.children()[0], signal.SIGSTOP)  # it does not die
    fails(run, "a rank of the trainer has been silent for 20 s (--wait-timeout)")

    run = RealRun(folder, "--resume runs/run")
    run.until_step(last_step(run.folder) + 2)
    (tmp_path / "now").touch()  # rank 0 waits for the other in a collective meanwhile
    fails(run, "RuntimeError: this rank broke", "Traceback")

    run = RealRun(folder, "--resume runs/run --trainers 1")
    run.until(lambda: "devices:" in run.text())
    less_than_a_model = (400_000, 400_000)  # bytes
    resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, less_than_a_model)
    fails(run, "error: a file cannot be read or written", "File too large")
    assert "Traceback" not in run.text()
    assert not list(run.folder.rglob("*.partial"))
    assert all(json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines())

    steps = last_step(run.folder) + 2
    RealRun(folder, f"--resume runs/run --steps {steps} --generators 2").end_well()
    check_log(run.folder, steps, validation_every=8)
    config = read_settings(run.folder)
    assert (config.generators, config.trainers) == (2, 1)


# --- the user ends it -----------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_saves_what_there_is(tmp_path):
    """The signal goes to the whole process group, as from a terminal. The run has another recipe
    and two ranks. No process takes a module from the folder that the user stands in."""
    for module in ("multiprocessing", "signal", "torch"):
        (tmp_path / f"{module}.py").write_text("open('it ran', 'w')\nraise ImportError\n")
    flags = "--checkpoint-every 1000 --recipe base --trainers 2"
    run = RealRun(tmp_path, f"{FOREVER} {flags}")
    run.until_step(2)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT
    assert f"stopped by Ctrl-C; {HINT}" in run.text()
    for text in ("Traceback", "is replaced", "error"):
        assert text not in run.text()
    assert saved_step(run) == last_step(run.folder)
    assert log(run.folder, "end") == []
    load_model(str(run.folder / "model"))
    assert not (tmp_path / "it ran").exists()


# Python text at the end of a module, for the name of a function there: after the first checkpoint
# it hangs, at all ranks or at one, and a file says so.
HANGS = """
import pathlib, time, torch
_usual = {0}
def {0}(*arguments):
    of_rank = {1} in (None, torch.distributed.is_initialized() and torch.distributed.get_rank())
    if of_rank and pathlib.Path("runs/run/checkpoints/step-000002").exists():
        pathlib.Path("stuck").touch()
        time.sleep(1000)
    return _usual(*arguments)
"""


# A signal; the module and the function that hangs, and at which rank; flags.
FIRST, *OTHERS = rows("""
SIGINT | data__tasks__arithmetic | score | None | --one-process
SIGTERM | loss | policy_loss | None | --trainers 1
SIGUSR1 | loss | policy_loss | 1 | --trainers 2
""")


@pytest.mark.parametrize(
    "row", [FIRST, *(pytest.param(row, marks=pytest.mark.slow) for row in OTHERS)]
)
def test_a_second_signal_stops_at_once_and_keeps_the_last_checkpoint(tmp_path, row):
    """While a task or a step hangs, or rank 0 waits for another; the first signal waits for the
    end."""
    name, module, function, rank, flags = row
    project(tmp_path, **{module: HANGS.format(function, rank)})
    run, number = RealRun(tmp_path, f"{FOREVER} {flags}"), signal.Signals[name]
    run.until((tmp_path / "stuck").exists)
    os.kill(run.process.pid, number)
    run.until(lambda: "Once more stops at once" in run.text())
    os.kill(run.process.pid, number)  # within a second: the same one again
    time.sleep(1.2)
    assert not run.ended()
    os.kill(run.process.pid, number)
    assert run.end(20) == 128 + number
    assert f"stopped at once; {HINT}" in run.text()
    assert "Traceback" not in run.text()
    assert 2 <= saved_step(run) <= last_step(run.folder)


@pytest.mark.slow
def test_help_wrong_flags_and_wrong_data_are_answered_before_the_long_imports(tmp_path):
    """transformers takes most of the seconds that a start takes."""
    program = """
import runpy, sys
for script in ("train.py", "generate.py", "tools/study.py"):
    wrong = ["--data", "algebra"] if script == "train.py" else ["loo", "--stepz", "3"]
    for flags in (["--help"], ["--stepz", "3"], wrong):
        sys.argv = [script, *flags]
        try:
            runpy.run_path(f"{sys.path[0]}/{script}", run_name="__main__")
        except SystemExit as end:
            print("ended", end.code, "transformers" in sys.modules)
"""
    ran = python("-c", f"import sys; sys.path[0] = {str(ROOT)!r}\n{program}", folder=tmp_path)
    ends = [line for line in ran.stdout.split("\n") if line.startswith("ended ")]
    assert ends == ["ended 0 False", "ended 2 False", "ended 2 False"] * 3, ran.stderr


@pytest.mark.slow
def test_a_signal_before_the_first_step_is_heard_and_leaves_the_name_free(
    here, monkeypatch, capsys
):
    """While a generator starts, and with the handler that a terminal leaves."""
    start = multiprocessing.process.BaseProcess.start

    def hung_up(process):
        os.kill(os.getpid(), signal.SIGHUP)
        start(process)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", hung_up)
    assert steps.run_train(f"--name mine {TINY}") == 128 + signal.SIGHUP
    assert capsys.readouterr().err.endswith("\nstopped by SIGHUP\n")  # and not how to go on
    assert not Path("runs/mine").exists() and not multiprocessing.active_children()
