"""What a run writes down: its clock and its compute, the log, checkpoints; and what is said when
something goes wrong."""

import dataclasses
import errno
import json
import math
import os
import resource
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from faults import log
from programs import rows
from steps import (
    FIRST,
    GivenGroups,
    add_R0,
    asked,
    batch_of_groups,
    credit_of,
    make_group,
    rewrite,
    rollout,
    run_train,
    settings,
    train_on,
    write_lines,
)
from torch.utils.flop_counter import FlopCounterMode

import train
from core.feed import Feed
from core.generators import GeneratorFailed
from core.model import load_model
from core.rollouts import Batch
from core.screen import Progress
from core.settings import read_settings, resumed
from data.load import Source
from data.tasks import arithmetic
from data.verify import Verdict
from machinery.folder import (
    checkpoints,
    drop_later,
    json_lines,
    lock_folder,
    new_folder,
    step_of,
    write_config,
)
from machinery.measures import Compute, Totals, attention_widths, matmul_parameters
from machinery.record import Log, Record, pass_rates, warnings
from machinery.run import compute_of, open_run


def test_the_clock_of_training_stands_in_validations_and_idle_time_adds_up(
    llama, tmp_path, monkeypatch
):
    """Generators that go on with what is under way in a validation are not free: here two of three
    GPUs. Their reports come in lumps. And the clock goes on when a run is resumed."""
    monkeypatch.setattr("time.monotonic", clock := Mock(return_value=100.0))
    feed = GivenGroups(settings(rollouts_kept=0), [], None, llama)
    feed.engines *= 2
    record = Record(tmp_path, Compute(3, 1000, {None: 10}), feed)
    record.progress, compute = Progress("training", 1000), record.compute
    batch = Batch(batch_of_groups(), FIRST)
    credit = credit_of(feed.settings, batch)

    def log_a_step(step, busy, seconds=1.0):
        clock.return_value += seconds
        feed.busy_seconds += busy  # of both generators
        record.waited = 0.0, 0.25 * seconds
        record.log_step(step, batch, Totals(), credit, {"skipped": 0, "groups_counted": 3})

    assert compute.seconds == 0
    compute.started, feed.busy_seconds = 99.0, 1.0
    with record.pause():
        clock.return_value += 20.0
        feed.busy_seconds += 4.0
    log_a_step(1, busy=10.0, seconds=10.0)  # what was busy in the validation is not of this step
    state = record.state() | {"step": 1}
    for step, busy in enumerate([0.0, 0.0, 5.0, 0.0, 5.0], 2):
        log_a_step(step, busy)
    first, *others = log(tmp_path, "train")
    assert first["generator_idle_fraction"] == 1 - 5.5 / 11
    before = 3 * 11.0 + 4.0
    assert first["compute_device_hours"] * 3600 == pytest.approx(before)
    # The generators were busy for 5 of 5 seconds, of which 2 were logged late.
    assert [line["generator_idle_fraction"] for line in others] == [1, 1, 0, 0, 0]
    assert {line["trainer_idle_fraction"] for line in others} == {0.25}
    compute.ended = clock.return_value
    clock.return_value += 1000.0
    assert compute.seconds == 16.0
    again = Record(tmp_path, Compute(2, 1000, {}), feed, state).compute
    again.started = clock.return_value - 10.0
    assert again.columns()["compute_device_hours"] * 3600 == pytest.approx(before + 2 * 10)


def test_a_gpu_that_does_both_is_one_device_and_processes_on_a_cpu_count_each(llama, monkeypatch):
    model = load_model(llama)
    for gpus, sides, devices in ((0, 2, 4), (1, 0, 1), (8, 0, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        chosen = settings(engine="torch", generators=sides, trainers=sides)
        assert compute_of(chosen, model).devices == devices


KINDS = "llama llama-grouped-tied qwen3 qwen3-moe deepseek-v3"


@pytest.mark.parametrize("kind", KINDS.split())
def test_flops_count_the_parameters_that_a_token_meets_and_attention_as_torch_does(models, kind):
    """Of four experts a token is sent to two. The attention of CPUs multiplies all pairs of
    positions, also those that are hidden then."""
    model, length = load_model(models[kind]), 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.int64))
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
    (width,) = attention_widths(model).values()
    assert 2 * width * length**2 == counted > 0
    numbers = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(number for name, number in numbers.items() if ".experts." in name)
    table = 0 if "tied" in kind else numbers["model.embed_tokens.weight"]
    assert matmul_parameters(model) == sum(numbers.values()) - table - experts // 2


def test_compute_is_two_flops_a_number_for_what_is_generated_and_six_for_what_is_trained_on():
    """A prompt is read once for all its completions. Each token attends to those before it. What is
    frozen costs a third less, and its adapters are added."""
    compute, prompt = Compute(1, parameters=10, attention={None: 3, 2: 5}), [1, 2, 3]
    group = make_group(0, [rollout(0, i, prompt, [5] * (4 + i)) for i in range(2)], [True, False])
    compute.add(Batch([group], FIRST), [])
    pairs, in_a_window_of_2 = 6 + (4 * 3 + 10) + (5 * 3 + 15), 5 + 2 * 4 + 2 * 5
    expected = 20 * (3 + 4 + 5) + 6 * pairs + 10 * in_a_window_of_2
    assert (compute.tokens, compute.flops) == (9, expected)
    fed, of_pairs = [(7, 0)], 18 * 28 + 30 * 13
    compute.add(Batch([group], FIRST), fed)
    assert compute.flops == 2 * expected + 60 * 7 + of_pairs
    compute.adapters, compute.flops = 4, 0
    compute.add(Batch([group], FIRST), fed)
    assert compute.flops == expected + (40 + 6 * 4) * 7 + of_pairs


# --- the log --------------------------------------------------------------------------------------


def test_a_resumed_run_drops_what_the_log_tells_of_later_steps_and_half_a_line(tmp_path):
    path, validation, train = tmp_path / "log.jsonl", "validation", "train"
    kinds = (validation, 0), (train, 1), (train, 2), (validation, 2), (train, 3), ("end", 2)
    lines = [{"kind": kind, "step": step} for kind, step in kinds]
    write_lines(path, lines)
    path.open("a").write('{"kind": "train", "st')
    assert drop_later(path, 2) == json_lines(path) == lines[:4]
    assert drop_later(path, -1) == json_lines(path) == []
    assert json_lines(tmp_path / "log.jsonl.before") == [*lines[4:], *lines[:4]]


# --- scores in between ----------------------------------------------------------------------------


def test_a_validation_has_the_means_of_all_sources_by_their_weights():
    groups, first = batch_of_groups(), Source("first", 1.0, [], [])
    for group, source, scores in zip(groups, (0, 0, 1), ((0.5, 1.0, True, 0), [0] * 4, [1.0, 0])):
        group.source, group.verdicts = source, dict(enumerate(map(Verdict, scores)))
    names = "pass_rate", "pass_at_n", "score_mean"
    of_first, of_other, of_both = (0.25, 0.5, 0.3125), (0.25, 1, 0.25), (0.25, 0.875, 0.265625)
    alone = pass_rates(groups[:2], [first])
    assert alone == dict(zip(names, of_first))
    expected = dict(zip(names, of_both)) | {f"{name}/first": alone[name] for name in names}
    expected |= {f"{name}/other": value for name, value in zip(names, of_other)}
    assert pass_rates(groups, [first, Source("other", 3.0, [], [])]) == expected


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.fixture
def resumable(run, monkeypatch):
    """In runs/run there is a run with a checkpoint. To go on fails in this way before any process
    is started."""
    return lambda error: monkeypatch.setattr(Feed, "start", Mock(side_effect=error))


RESUME = "--resume runs/run --steps 99"
HINT = "python train.py --resume runs/run goes on from the last checkpoint"


@pytest.mark.parametrize("saved", [True, False])
def test_what_ends_a_run_is_said_in_words(resumable, monkeypatch, capsys, saved):
    """With how to go on, if there is a checkpoint."""
    if not saved:
        monkeypatch.setattr("machinery.run.checkpoints", lambda _: [])
    for error, words in (
        (torch.OutOfMemoryError("CUDA is full. Tried .."), "CUDA is full: lower --slots"),
        (OSError(errno.ENOSPC, "No space left"), "cannot be read or written: [Errno 28]"),
        (GeneratorFailed("generator 0 cannot start"), "generator 0 cannot start"),
    ):
        resumable(error)
        assert run_train(RESUME) == 1
        error.__traceback__ = None  # it held the run, and so the lock of the folder
        said = capsys.readouterr().err
        assert "error: " in said and words in said and "Traceback" not in said
        assert (HINT in said) == saved


def test_a_limit_of_the_size_of_files_is_said_before_anything_is_written(here):
    """Which is one of shared memory too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ValueError, match="^no shared memory .*File too large"):
            open_run(asked(""))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not Path("runs").exists()


def test_data_and_weights_that_have_changed_and_a_folder_in_use_are_refused(resumable, monkeypatch):
    """Before anything starts. The weights decide, and not where they lie; of before there is no
    checksum, and the name does. An error that is no file's keeps its traceback."""
    refused, run = ConnectionRefusedError(errno.ECONNREFUSED, "refused"), Path("runs/run")
    resumable(refused)
    with lock_folder(run), pytest.raises(ValueError, match=f"process {os.getpid()}"):
        run_train(f"{RESUME} --from-step 1")  # before there is a look at its checkpoints
    newest, first = checkpoints(run)[-1], read_settings(run).model
    shutil.copytree(first, "same")
    for others in ([f"{newest}/model"], [f"{newest}/model", first]):
        for other in others:
            with pytest.raises(ValueError, match=f"weights of --model {other}, are not those"):
                run_train(f"{RESUME} --model {other}")
        with pytest.raises(RuntimeError, match="the run has failed") as failed:
            run_train(f"{RESUME} --model same")
        assert failed.value.__cause__ is refused
        refused.__traceback__ = failed = None  # they held the lock
        rewrite(newest / "state.json", weights=None)
    problems = arithmetic.problems
    monkeypatch.setattr(arithmetic, "problems", lambda *asked: problems(*asked)[::-1])
    with pytest.raises(ValueError, match="are not those that its checkpoint"):
        run_train(RESUME)


def test_what_a_run_leaves_that_has_measured_nothing_is_free_and_a_name_may_be_a_path(
    tmp_path, monkeypatch, capsys
):
    """The file system of that path may have no locks."""
    error, chosen = OSError(errno.ENOLCK, "No locks available"), asked(f"--name {tmp_path}")
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=error))
    lock_folder(tmp_path).close()
    assert f"{tmp_path} cannot be locked ([Errno {errno.ENOLCK}]" in capsys.readouterr().err
    write_config(tmp_path, chosen)
    (tmp_path / "log.jsonl").touch()
    assert new_folder(chosen) == tmp_path
    write_lines(tmp_path / "log.jsonl", [{"kind": "validation", "step": 0}])
    with pytest.raises(ValueError, match="holds another run"):
        new_folder(chosen)


# What is damaged, what is left of it, and what is said.
LOST = """
log.jsonl | half {} [] tail nothing | --model runs/run/checkpoints/step-000052/model
state.json | half {} [] tail nothing | --from-step
optimizer.safetensors | half {} [] tail nothing | --from-step
model.safetensors | half {} [] tail empty | --from-step
step-000052 | another-name | move the folder away
"""


@pytest.mark.parametrize("file, ways, advice", rows(LOST))
def test_what_is_lost_or_damaged_is_named_with_what_to_do(resumable, file, ways, advice):
    """Before anything is written. A checkpoint that a person has renamed is none."""
    resumable(AssertionError("it went on"))
    run = Path("runs/run")
    (path,) = run.rglob(file)
    files = lambda: {each: each.stat().st_mtime_ns for each in run.glob("[!l]*")}
    data = path.is_file() and path.read_bytes()
    for left in ways.split():
        if left == "nothing":
            path.unlink()
        elif data:
            parts = {"half": data[: len(data) // 2], "tail": data.partition(b"\n")[2], "empty": b""}
            path.write_bytes(parts.get(left, left.encode()))
        else:
            path.rename(f"{path}-{left}")
        before = files()
        with pytest.raises(ValueError, match=rf"^runs/run[^\n]+ {advice}[^\n]*$"):
            run_train(RESUME)
        assert files() == before


# --- checkpoints and what they are resumed with ---------------------------------------------------


def test_a_fall_is_said_with_the_command_that_goes_on_from_before_it_and_it_does(
    llama, here, monkeypatch
):
    """The pass rate rises, scatters and falls, with a validation and a checkpoint each step. The
    best one is kept beside the newest ones; what came later is dropped."""
    rates = iter([0.1, 0.5, 0.9, 0.8, 0.84, 0.7, 0.6])  # a fifth of the gain is .16
    next_rate = lambda *_: {"pass_rate": next(rates), "num_examples": 2000}
    monkeypatch.setattr("machinery.record.pass_rates", next_rate)
    folder = Path("runs/fallen")
    (folder / "checkpoints" / "step-000051.partial" / "model").mkdir(parents=True)  # of a kill
    every_step = dict(validation_every=1, checkpoint_every=1, keep_checkpoints=2, rollouts_kept=0)
    chosen = settings(6, model=llama, defaults="toy", name="fallen", **every_step)
    train_on(chosen, llama, [batch_of_groups(seed) for seed in range(6)], folder)
    line = log(folder, "warning")[-1]
    assert (line["about"], line["step"]) == ("fall", FIRST + 5)
    assert f"0.900 at step {FIRST + 2} to 0.700 at step {FIRST + 5}" in line["text"]
    assert f"--resume runs/fallen --from-step {FIRST + 2} goes on" in line["text"]
    saved = lambda: [step_of(path) - FIRST for path in checkpoints(folder)]
    assert saved() == [2, 5, 6] and not [*folder.rglob("*.partial")]
    assert not (folder / "rollouts.jsonl").exists()  # --rollouts-kept 0
    files = {path.suffix for path in (folder / "checkpoints").rglob("*.*")}
    assert files <= {".json", ".safetensors", ".jinja"}, "data only"

    write_config(folder, chosen)
    add_R0(folder)
    monkeypatch.setattr(train, "train", started := Mock())
    back_to = lambda step: run_train(f"--resume runs/fallen --from-step {step}")
    with monkeypatch.context() as killed, pytest.raises(ZeroDivisionError):
        killed.setattr(shutil, "rmtree", lambda *_: 1 / 0)
        back_to(FIRST + 2)
    assert saved() == [2, 5]  # none that is half there
    assert back_to(FIRST + 2) == 0
    assert started.call_args.args[1].step == FIRST + 2
    assert saved() == [2] and not [*folder.rglob("*.partial")]
    assert max(line["step"] for line in log(folder)) == FIRST + 2
    assert read_settings(folder).from_step is None


# Flags, and what is said of them.
REFUSED = r"""
--learning-rate 1e-3 | cannot change: --learning-rate
--recipe base | cannot change: --recipe
--thinking-budget 50 58 | cannot change: --thinking-budget
--from-step 3 | --from-step is 3: .* has steps \[52\]
"""


def test_what_a_resumed_run_cannot_change_is_refused_by_name(run):
    resume = lambda flags: asked(f"--resume runs/run {flags}")
    first = dataclasses.replace(read_settings(run), resume=Path("runs/run"))
    for flags, words in rows(REFUSED):
        with pytest.raises(ValueError, match=words):
            run_train(f"--resume runs/run {flags}")
    assert resume("--least-prompts 9").recipe.least_prompts == 9  # what mends a fall
    assert resume("--learning-rate None") == first  # the run has one
    expected = dataclasses.replace(first, steps=99, generators=2, wait_timeout=9.0)
    assert resume(more := "--steps 99 --generators 2 --wait-timeout 9") == expected
    # Weights, and the names of several curves, are in no checksum.
    data = lambda paths: dataclasses.replace(expected, data=tuple(paths.split()))
    moved = data("b/x:2,answer=a b/y")
    assert resumed(data("a/x:2 y"), moved) == moved
    for other in ("a/x:3 y", "a/z:2 y", "y a/x:2", "a/x:2,task=gym y"):
        with pytest.raises(ValueError, match="cannot change: --data "):
            resumed(data("a/x:2 y"), data(other))
    # A run of before has the name that the paper has, and a setting that is gone.
    recipe = json.loads((run / "config.json").read_text())["recipe"]
    recipe["no_positive_resampling"] = not recipe.pop("positive_resampling")
    rewrite(run / "config.json", recipe=recipe, offload=True)
    assert resume(more) == expected
    for text in ('{"recipe": {}, "versions": {}, "checksum": 1}', "1", "{"):
        (run / "config.json").write_text(text)
        with pytest.raises(ValueError, match="holds no run of this program"):
            resume("")


# --- warnings -------------------------------------------------------------------------------------

# What differs from a healthy step.
STEPS = {
    "healthy": {},
    "truncated": {"truncated_fraction": 0.11},
    "far": {"kl_estimate": 2.1},
    "untrained": {"kl_estimate": None, "entropy": None},  # nothing counted
    "few": {"zero_variance_fraction": 0.75},
    "solved": {"zero_variance_fraction": 1.0, "pass_rate": 0.95},
    "skipped": {"skipped": 1},
}
# Steps, each so many times, and what is warned of after the last.
WARNINGS = """
10 healthy |
1 truncated | truncation
1 far, 1 healthy, 1 far | drift
1 far, 2 healthy, 1 far |
1 far, 2 untrained |
9 few |
10 few | few groups
5 few, 1 solved, 4 few |
5 few, 1 healthy, 4 few |
1 skipped | not finite
"""


@pytest.mark.parametrize("made, about", rows(WARNINGS))
def test_what_the_last_steps_are_warned_of(made, about):
    healthy = dict(step=9, truncated_fraction=0.1, kl_estimate=0.1, entropy=1.0, skipped=0)
    healthy |= dict(zero_variance_fraction=0.7, pass_rate=0.4)
    steps = []
    for times, kind in (each.split() for each in made.split(", ")):
        steps += [healthy | STEPS[kind]] * int(times)
    assert ", ".join(warnings(steps, 100, 8)) == about
    assert warnings(steps, 7, 8)["few prompts"].startswith("7 prompts are left")


# --- trackers -------------------------------------------------------------------------------------


def test_tensorboard_gets_what_the_log_gets(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    line = {"kind": "train", "step": 7, "loss": 0.5, "ratio_max": math.nan, "words": "no"}
    Log(tmp_path, settings(track="tensorboard"), 0.0).add(line)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {*events.Tags()["scalars"]} == {"train/step", "train/loss", "train/wall_seconds"}
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(7, 0.5)]


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    tracker = Mock(**{"log.side_effect": [None, ConnectionError("no network")]})
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    writer = Log(tmp_path, settings(track="trackio"), 0.0)
    for step in range(1, 5):
        writer.add({"kind": "validation", "step": step})
    first, _ = tracker.log.call_args_list
    assert first.args[0]["validation/step"] == 1 and first.kwargs == {"step": 1}
    assert capsys.readouterr().err.count("--track trackio has failed") == 1
    assert len(log(tmp_path)) == 4
