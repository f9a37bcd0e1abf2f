"""Studies: many runs from one command, their tables and figures."""

import itertools
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import steps
from faults import ROOT, TINY, check_log, last_step, log
from programs import rows

import fit_curve
import loss
from core.settings import parse, read_settings
from curve.flags import run_command
from machinery.folder import write_config
from tools import study

VARIANTS = {"plain": {}, "other": {"aggregation": "token", "thinking_budget": [50, 52]}}
SIZES = "--steps 10 --validation-every 2 --validation-samples 6"
COMMAND = f"two.json --seeds 0 1 --jobs 2 {SIZES}"


@pytest.fixture(autouse=True)
def folder_and_ctrl_c(tmp_path, here):
    """A folder with two.json. Ctrl-C is not ignored, as it is in tests that a shell has started in
    the background."""
    (tmp_path / "two.json").write_text(json.dumps(VARIANTS))
    signal.signal(signal.SIGINT, signal.default_int_handler)


def status_of(command):
    """The exit status of tools/study.py, run in this process."""
    with pytest.raises(SystemExit) as stop:
        run_command(study.main, command.split())
    return stop.value.code


# --- real runs ------------------------------------------------------------------------------------


def send_when(condition, number):
    """Send this process a signal as soon as the condition holds."""

    def wait():
        while not condition():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_a_study_is_interrupted_goes_on_and_finds_itself_finished(tmp_path, monkeypatch, capsys):
    """Two variants, one run after the other, Ctrl-C in the first. (Seeds, and runs at once, are of
    the next test.)"""
    command = f"two.json {TINY} --seeds 0 {SIZES}"
    begun, other = (tmp_path / "runs" / "two" / f"{name}-seed0" for name in VARIANTS)
    send_when(lambda: last_step(begun) >= 2, signal.SIGINT)
    assert status_of(command) == 130
    assert last_step(begun) < 10 and not other.exists()

    # The same command goes on.
    assert status_of(command) == 0
    for folder in (begun, other):
        check_log(folder, steps=10, validation_every=2)
    assert read_settings(other).thinking_budget == (50, 52)
    assert "going on from step" in Path(f"{begun}.txt").read_text()

    # Everything is finished, unless there are more steps.
    monkeypatch.setattr(study, "start_run", lambda *_: pytest.fail("a finished run was started"))
    assert status_of(f"{command} --learning-rate None") == 0
    with pytest.raises(pytest.fail.Exception):
        status_of(f"{command} --steps 11")
    assert status_of(f"{command} --learning-rate 1e-3") == 2  # that would be another run
    assert "--learning-rate (was 0.0002, now 0.001)" in capsys.readouterr().err


# In place of train.py: a run that takes SECONDS. The file `events` has a + at its begin, and a - at
# its end.
TRAIN = """
import json, pathlib, signal, sys, time

signal.signal(signal.SIGTERM, signal.default_int_handler)
folder = pathlib.Path("runs", sys.argv[sys.argv.index("--name") + 1])
folder.mkdir()
with open(folder / "log.jsonl", "w") as log, open("events", "a", buffering=1) as events:
    for i in range(9):
        line = {"kind": "validation", "step": i, "pass_rate": i / 10, "compute_flops": i}
        print(json.dumps(line), file=log)
    try:
        print("+", file=events)
        time.sleep(SECONDS)
    finally:
        print("-", file=events)
print("this is why")
sys.exit(folder.name == "other-seed0")
"""


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Lets runs take so many seconds. Returns a function that reads their events."""

    def put(seconds):
        monkeypatch.setattr(study, "ROOT", tmp_path)
        (tmp_path / "train.py").write_text(TRAIN.replace("SECONDS", str(seconds)))
        (events := tmp_path / "events").touch()
        return lambda: events.read_text().split()

    return put


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_to_all_runs_and_no_other_is_started(number, pretend, capsys):
    events = pretend(seconds=60)
    send_when(lambda: events() == ["+", "+"], number)
    assert status_of(COMMAND) == 130
    assert events() == ["+", "+", "-", "-"]
    assert "the same command goes on" in capsys.readouterr().err
    assert not Path("runs/two/tables.md").exists()


def test_a_failed_run_is_reported_and_the_others_go_on(pretend, capsys):
    events = pretend(seconds=1)
    assert status_of(COMMAND) == 1
    running = [*itertools.accumulate({"+": 1, "-": -1}[event] for event in events())]
    assert len(running) == 8 and max(running) == 2
    error = capsys.readouterr().err
    begun = re.findall(r"two/(\S+) begins, \d of 4", error)
    assert begun == ["plain-seed0", "other-seed0", "plain-seed1", "other-seed1"]
    assert error.count("error: ") == error.count("runs/two/other-seed0 failed: this is why") == 1
    assert "| other " in Path("runs/two/tables.md").read_text()


@pytest.mark.parametrize("batches, step, why", [(20, 3, "less than 0.05"), (2, 2, "Every prompt")])
def test_a_run_that_has_levelled_off_or_no_prompt_left_says_why_and_is_finished_as_it_was_wanted(
    llama, tmp_path, monkeypatch, batches, step, why
):
    """At the fourth validation, by a curve that is said to be level there; or after its batches."""
    level = lambda series, least_gain: least_gain == 0.05 and len(series.x) == 4
    monkeypatch.setattr("machinery.run.levelled_off", level)
    chosen = steps.settings(steps=20, validation_every=1, stop_when_gain_below=0.05)
    write_config(tmp_path, chosen)
    given = [steps.batch_of_groups()] * batches
    run, _ = steps.train_on(chosen, llama, given, tmp_path)
    flags = "--stop-when-gain-below 0.05 --steps"
    finished = lambda more: study.finished(tmp_path, steps.asked(f"{flags} {more}"))
    assert log(tmp_path, "end") == [] and not finished("70")  # its model is not written yet
    run.leave_results(lambda folder: folder)
    (end,) = log(tmp_path, "end")
    assert end["step"] == steps.FIRST + step and why in end["reason"]
    assert finished("70") and finished("20") and not finished("71")
    for other in ("--least-prompts 9", "--stop-when-gain-below 0.01"):
        assert not finished(f"70 {other}")
    with pytest.raises(ValueError, match=f"{tmp_path} is finished"):
        steps.run_train(f"--resume {tmp_path}")


# --- what is refused ------------------------------------------------------------------------------


# A study or the text of its file; flags; what is said.
REFUSED = """
lo | | lo: neither loo, recipes, asynchrony
batch | --steps=9 | variant 'prompts-8' of batch, runs/batch/prompts-8-seed0:
{"b": {"fp32_logits": true}} | --no-fp32-logits | sets --fp32-logits itself
{"a": {"los": "dapo"}} | | did you mean --loss?
{"a": {"seed": 3}} | | sets --seed itself
{"fine": {}, "a/b": {}} | | 'a/b'
{"fine": {}, "b": {"asynchrony": "pipe-2"}} | | variant 'b' of study.json,
{"b": {"steps": true}} | | variant 'b' of study.json,
{"a": 3} | | 'a'
[] | | study.json: neither
loo | --resume=runs/x | sets --resume itself
loo | --jobs=0 | --jobs is 0
--jobs=2 | | STUDY is missing
tables | | tables FOLDER
tables | . | no log
"""


def test_what_cannot_be_is_refused_by_name_before_anything_starts(tmp_path, capsys):
    for name, flags, words in rows(REFUSED):
        if name[0] in "[{":
            (tmp_path / "study.json").write_text(name)
            name = "study.json"
        assert status_of(f"{name} {flags}") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and words in error, error
    assert not (tmp_path / "runs").exists()


def test_the_studies_of_the_paper_are_its_recipes():
    wanted = loss.RECIPES | {
        f"without-{axis}": loss.leave_one_out(axis) for axis in loss.Axis.__args__
    }
    for name in "pipeline-1 pipeline-4 pipeline-8 pipeline-16 ppo-1 ppo-8".split():
        wanted[name] = loss.Recipe(asynchrony=name)
    found = {}
    for name in study.STUDIES:
        of_all = study.Study(name, seeds=(3,)), name, ["--learning-rate", "1"]
        for folder, arguments in study.runs_to_train(*of_all).items():
            settings = parse(arguments)
            assert (settings.learning_rate, settings.keep_checkpoints, settings.seed) == (1, 1, 3)
            # A run that goes on would otherwise have those of its config.json.
            assert {"--steps", "--stop-when-gain-below", "--threads"} <= {*arguments}
            assert str(folder) == f"runs/{settings.name}"
            found.setdefault(folder.name.removesuffix("-seed3"), settings.recipe)
    assert wanted.items() <= found.items()


# --- tables ---------------------------------------------------------------------------------------


PUBLISHED = ROOT / "docs" / "study"
NAMES = [
    pytest.param(path.name, marks=() if path.name in ("loo", "falls") else pytest.mark.slow)
    for path in sorted(PUBLISHED.iterdir())
]


@pytest.mark.parametrize("name", NAMES)
def test_the_published_tables_are_made_of_the_published_logs(name, monkeypatch):
    """The same words, and the same numbers but for the last digit, which another machine may round
    otherwise. Nothing is drawn, which would take most of the time."""
    texts = [(PUBLISHED / name / "tables.md").read_text()]
    monkeypatch.setattr(fit_curve, "plot_variants", lambda *_: None)
    monkeypatch.setattr(study, "write_whole", lambda _, text: texts.append(text))
    assert status_of(f"tables {PUBLISHED / name}") == 0
    number = r"[-+]?\d+\.?\d*(?:e[-+]\d+)?"
    words = [re.sub(rf"{number}|[ -]+", "", text) for text in texts]  # and not how wide a column is
    assert words[0] == words[1]
    published, made = (np.array(re.findall(number, text), float) for text in texts)
    assert np.allclose(made, published, rtol=0.02, atol=0.002)
