"""The trainer on several devices: the same gradients whatever the ranks, and what happens when one dies."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
from faults import RealRun, check_log, log, nothing_left, project
from test_train import batch_of_groups, settings

import generate
import loss as scalerl
import train
from loss import Recipe
from train import Settings

FOREVER = ["--steps", "100000"]


# --- devices ------------------------------------------------------------------------------------------------------


def test_devices_are_named_singly_or_in_ranges():
    assert train.list_devices(("cpu:2", "cpu")) == ["cpu"] * 3
    assert train.list_devices(("cuda:0-2", "cuda:6,7", "cuda")) == [f"cuda:{i}" for i in (0, 1, 2, 6, 7, 0)]
    for wrong in ("gpu", "cuda:", "cuda:a", "cpu:0", "cuda:1-", ""):
        if wrong != "cuda:":
            with pytest.raises(ValueError, match="is no device; devices are cpu, cpu:2"):
                train.list_devices((wrong,))


@pytest.mark.parametrize(
    "gpus, flags, generators, trainers",
    [
        (0, {}, "cpu", "cpu"),
        (1, {}, "0", "0"),  # one GPU for both
        (2, {}, "0", "1"),
        (8, {}, "0123456", "7"),
        (10, {}, "01234567", "89"),  # one to four, as in the paper
        (8, {"trainer_devices": ("cuda:0,1",)}, "234567", "01"),
        (8, {"generator_devices": ("cuda:0-5",)}, "012345", "7"),
        (1, {"generator_devices": ("cuda:0",)}, "0", "0"),
        (8, {"generator_devices": ("cpu",), "trainer_devices": ("cpu:2",)}, ["cpu"], ["cpu", "cpu"]),
    ],
)
def test_devices_that_nobody_has_named_are_split(gpus, flags, generators, trainers):
    def listed(names):
        return names if isinstance(names, list) else ["cpu"] if names == "cpu" else [f"cuda:{i}" for i in names]

    assert train.split_devices(Settings(**flags), gpus) == (listed(generators), listed(trainers))


@pytest.mark.parametrize(
    "asynchrony, waited, busy, says",
    [
        # The generators are busy all the time, the trainer for a fifth of it: it needs a fifth of a device.
        ("pipeline-8", 80.0, 600.0, "trainer 0.80, generators 0.00 of the time (a step trains for 2.00 s and samples for"
         " 10.00 s); 7 generator and 1 trainer devices would balance them better"),
        ("pipeline-8", 0.0, 240.0, "trainer 0.00, generators 0.60 of the time (a step trains for 10.00 s and samples for"
         " 4.00 s); 4 generator and 4 trainer devices would balance them better"),
        ("pipeline-8", 0.0, 540.0, "samples for 9.00 s); no other split of 8 devices balances them better"),
        ("ppo-8", 50.0, 300.0, "samples for 5.00 s); the two take turns"),
    ],
)  # fmt: skip
def test_the_screen_says_who_waits_and_what_split_would_balance(tmp_path, monkeypatch, asynchrony, waited, busy, says):
    chosen = settings(generator_devices=("cpu:6",), trainer_devices=("cpu:2",), recipe=Recipe(asynchrony=asynchrony))
    run = train.Run(chosen, tmp_path, None, None, [])
    monkeypatch.setattr(train.time, "monotonic", lambda: 100.0)
    run.waited, run.busy_seconds, run.step = waited, busy, 10
    assert says in run.balance()
    run.settings = settings(generator_devices=("cpu",), trainer_devices=("cpu",), recipe=Recipe(asynchrony=asynchrony))
    assert "balance" not in run.balance()  # there is no other split of two


def test_the_clock_of_training_stands_after_the_last_step_and_counts_a_shared_gpu_once(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: 8)
    cases = ((("cuda:0",), ("cuda:0",), 1), (("cuda:0-5",), ("cuda:6,7",), 8), (("cpu:2",), ("cpu",), 3))
    for generators, trainers, devices in cases:
        chosen = settings(generator_devices=generators, trainer_devices=trainers)
        compute = train.Run(chosen, tmp_path, None, None, []).compute
        compute.started, now[0] = 100.0, 160.0
        with compute.pause():
            now[0] += 40.0
        compute.ended = now[0]
        now[0] += 1000.0
        assert compute.seconds == 60.0 and compute.columns()["compute_device_hours"] == devices * 60.0 / 3600
        now[0] = 100.0


def test_idle_time_of_the_generators_adds_up_though_their_reports_come_in_lumps(tmp_path, monkeypatch):
    run = train.Run(settings(generator_devices=("cpu:2",)), tmp_path, None, None, [])
    run.generators, run.trainer = [None] * 2, SimpleNamespace(copy_seconds=0.0)
    run.parameters, run.orders = SimpleNamespace(flat=np.zeros(1)), [SimpleNamespace(epoch=0, retired=set())]
    run.last_rates = {"seconds": 0.0, "busy": 0.0, "tokens": 0, "waited": 0.0}
    busy, idle = [0.0, 0.0, 5.0, 5.0, 10.0], []  # of both; a step takes a second
    for second, value in enumerate(busy, 1):
        now = {"seconds": float(second), "busy": value, "tokens": 10, "waited": 0.0}
        monkeypatch.setattr(run, "counters", lambda now=now: now)
        idle.append(run.rates(0.0, 1)["generator_idle_fraction"])
    assert idle == [1.0, 1.0, 0.0, 0.0, 0.0]  # the generators were busy for 5 of 5 seconds, of which 2 were logged late
    assert run.unlogged_busy == 2.0


# --- gradients ----------------------------------------------------------------------------------------------------


def one_rank(rank, chosen, folder, shared, meeting_place, results):
    """Two optimizer steps on the same groups and the mismatch after them; rank 0 sends what came of it, and what the
    generators would get."""
    torch.set_num_threads(1)
    if len(chosen.trainers) > 1:
        train.join_ranks(chosen, rank, meeting_place)
    trainer = train.Trainer(chosen, train.load_for_trainer(chosen, folder, rank), rank, shared)
    metrics = [trainer.step(batch_of_groups(seed), step=50) for seed in (0, 1)]
    rollouts = [rollout for group in batch_of_groups() for rollout in group.rollouts.values()]
    mismatch = trainer.mismatch(rollouts)
    trainer.publish(2)
    parameters, moments = trainer.gather()
    if rank == 0:
        numbers = {name: tensor.numpy() for name, tensor in {**parameters, **moments}.items()}
        while not shared.holds(2):
            time.sleep(0.01)
        published = shared.views()
        assert published.keys() == parameters.keys()
        assert all(torch.equal(published[name], parameters[name]) for name in published)
        results.put((metrics, mismatch, numbers))
    else:
        assert not parameters and not moments
    results.close()
    results.join_thread()  # what was put there is on its way
    if len(chosen.trainers) > 1:
        train.leave_ranks()


def on_ranks(ranks, folder, tmp_path, **changes):
    chosen = settings(trainer_devices=(f"cpu:{ranks}",), **changes)
    context = multiprocessing.get_context("spawn")
    results, meeting_place = context.Queue(), str(tmp_path / f"meet-{ranks}")
    shared = generate.SharedParameters(train.load_for_trainer(chosen, folder, 0), ranks)
    processes = [
        context.Process(target=one_rank, args=(rank, chosen, folder, shared, meeting_place, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = results.get(timeout=300)  # compiling takes its time
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_layers_compute_what_one_rank_computes_without(models, tmp_path, ranks):
    eager, _, expected = on_ranks(1, models["qwen3"], tmp_path, tokens_per_micro_batch=1)
    compiled, _, found = on_ranks(ranks, models["qwen3"], tmp_path, tokens_per_micro_batch=1, compile=True)
    for one, other in zip(eager, compiled):
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-5)
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    for name, values in expected.items():
        assert np.allclose(found[name], values, rtol=0.0, atol=1e-5 * np.abs(values).max()), name


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("llama-grouped-tied", {"tokens_per_micro_batch": 1}),
        ("qwen3", {"tokens_per_micro_batch": 60, "gradient_checkpointing": True}),
        ("qwen3-moe", {"tokens_per_micro_batch": 10_000, "pack": True}),
    ],
)
def test_pitfall_5_losses_and_gradients_are_the_same_with_one_two_and_three_ranks(models, tmp_path, kind, changes):
    """Also where one rank has nothing to do. The first moments are the gradients (times 1 - beta)."""
    recipe = scalerl.Recipe(loss="gspo" if kind == "qwen3" else "cispo")
    metrics, mismatch, numbers = on_ranks(1, models[kind], tmp_path, recipe=recipe, **changes)
    assert metrics[0]["gradient_norm"] > 0 and metrics[0]["loss"] != metrics[1]["loss"]
    for ranks in (2, 3):
        other, other_mismatch, other_numbers = on_ranks(ranks, models[kind], tmp_path, recipe=recipe, **changes)
        for ours, theirs in zip(metrics, other):
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-5), name
        assert other_mismatch == pytest.approx(mismatch, rel=1e-4)
        assert other_numbers.keys() == numbers.keys()
        for name, values in numbers.items():
            if name.endswith("/exp_avg"):
                assert abs(values - other_numbers[name]).max() < 1e-5, name


def test_a_bf16_trunk_over_two_ranks_computes_what_one_computes(models, tmp_path):
    alone = dict(dtype="bfloat16", tokens_per_micro_batch=1)  # rows of another micro-batch would be rounded otherwise
    metrics, mismatch, numbers = on_ranks(1, models["llama"], tmp_path, **alone)
    other, other_mismatch, other_numbers = on_ranks(2, models["llama"], tmp_path, **alone)
    assert other_mismatch == pytest.approx(mismatch, rel=1e-4)  # the forward is the same to the bit, or nearly
    assert other[0]["loss"] == pytest.approx(metrics[0]["loss"], rel=1e-4)
    assert other[0]["gradient_norm"] == pytest.approx(metrics[0]["gradient_norm"], rel=1e-2)
    assert all(values.dtype == "float32" for values in other_numbers.values())


# --- parameters on their way to the generators --------------------------------------------------------------------


def test_the_copy_of_the_parameters_runs_beside_the_next_step_and_is_of_the_step_before(models, monkeypatch):
    """The copy is held up until the next step has computed a loss: had the trainer waited for it, there would be none.
    What arrives are the parameters of before that step."""
    chosen = settings(trainer_devices=("cpu",))
    model = train.load_for_trainer(chosen, models["llama"], 0)
    shared, loss_computed = generate.SharedParameters(model), threading.Event()
    trainer = train.Trainer(chosen, model, 0, shared)
    write, policy_loss = shared.write, scalerl.policy_loss

    def late_write(*arguments):
        assert loss_computed.wait(60)
        write(*arguments)

    def observed(*arguments):
        loss_computed.set()
        return policy_loss(*arguments)

    monkeypatch.setattr(shared, "write", late_write)
    monkeypatch.setattr(scalerl, "policy_loss", observed)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.publish(1)
    assert shared.version == -1
    trainer.step(batch_of_groups(), step=50)
    assert shared.holds(1)
    for name, view in shared.views().items():
        assert torch.equal(view, before[name])
        assert not torch.equal(view, model.get_parameter(name))


def test_a_copy_that_fails_ends_the_step(models, monkeypatch):
    chosen = settings(trainer_devices=("cpu",))
    model = train.load_for_trainer(chosen, models["llama"], 0)
    trainer = train.Trainer(chosen, model, 0, generate.SharedParameters(model))
    monkeypatch.setattr(trainer.shared, "write", lambda *_: 1 / 0)
    trainer.publish(1)
    with pytest.raises(ZeroDivisionError):
        trainer.step(batch_of_groups(), step=50)


def test_a_version_is_complete_when_every_rank_has_written_its_part(models):
    model = generate.load_model(models["llama"], torch.device("cpu"), torch.float32)
    shared = generate.SharedParameters(model, ranks=2)
    shared.write(model.named_parameters(), 1, rank=0)
    assert shared.version == -1 and not shared.holds(1)
    shared.write(model.named_parameters(), 1, rank=1)
    assert shared.version == 1 and shared.holds(1)
    shared.begun_R[1] = 2
    assert shared.version == 1 and not shared.holds(1) and not shared.holds(2)


def test_k_holds_while_parameters_take_longer_than_a_step(tmp_path):
    """And validations wait for the parameters of their step."""
    slow = ("_write = SharedParameters.write\n"
            "def write(self, parameters, version, rank=0):\n"
            "    time.sleep(0.4)\n"
            "    _write(self, parameters, version, rank)\n"
            "SharedParameters.write = write\n")  # fmt: skip
    flags, kinds = ["--steps", "10", "--validation-every", "5", "--learning-rate", "3e-3"], ("pipeline-1", "ppo-2")
    folder = project(tmp_path, generate=slow)
    for run in [RealRun(folder, *flags, "--asynchrony", kind, name=kind) for kind in kinds]:
        assert run.end() == 0, run.text()[-3000:]
        check_log(run.folder, steps=10, validation_every=5)
        steps = log(run.folder, "train")
        assert max(line["off_policyness_max"] for line in steps) == 1
        assert all(line["parameters_seconds"] >= 0.4 for line in steps[2:])
        assert all(line["mismatch_max"] < 1e-3 for line in log(run.folder, "validation"))


# --- whole runs ---------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_any_number_of_ranks(tmp_path):
    """Begun with two, gone on with three, then one: the losses of a synchronous run that had one all along."""
    flags = ["--asynchrony", "ppo-1", "--validation-every", "2", "--train-prompts", "40"]
    folders = set(Path("/tmp").glob("trainers-*"))
    alone = RealRun(tmp_path, *flags, "--steps", "6", name="alone")
    run = RealRun(tmp_path, *flags, "--steps", "2", "--trainer-devices", "cpu:2", "--threads", "1")
    assert run.end() == 0, run.text()[-3000:]
    assert alone.end() == 0, alone.text()[-3000:]
    for steps, devices in (("4", "cpu:3"), ("6", "cpu")):
        run = RealRun(tmp_path, "--resume", "runs/run", "--steps", steps, "--trainer-devices", devices)
        assert run.end() == 0, run.text()[-3000:]
    folder = tmp_path / "runs" / "run"
    check_log(folder, steps=6, validation_every=2)
    for ours, theirs in zip(log(folder, "train"), log(alone.folder, "train")):
        bound = 1e-3 if ours["step"] <= 3 else 0.1  # later a last digit has changed a sampled token here and there
        for name in ("loss", "gradient_norm", "pass_rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=bound, abs=1e-4), (ours["step"], name)
    hours = [line["compute_device_hours"] for line in log(folder) if line["kind"] != "end"]
    assert hours == sorted(hours)
    generate.load_model(str(folder / "model"), torch.device("cpu"), torch.float32)
    assert nothing_left() and set(Path("/tmp").glob("trainers-*")) == folders


@pytest.mark.parametrize("victim", ["trainer 0", "trainer 1", "generator"])
def test_whoever_is_killed_the_run_ends_or_goes_on_and_the_last_checkpoint_is_good(tmp_path, victim):
    run = RealRun(tmp_path, *FOREVER, "--trainer-devices", "cpu:2", "--generator-devices", "cpu:2")
    run.until_step(3)
    children = run.generators()  # in the order of their start: the other trainer, then the generators
    assert len(children) == 3
    run.kill({"trainer 0": run.process.pid, "trainer 1": children[0], "generator": children[1]}[victim])
    if victim == "generator":
        run.until_step(train_step_of(run) + 3)
        assert "is replaced" in run.text()
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
    else:
        assert run.end() == (-signal.SIGKILL if victim == "trainer 0" else 1)
        if victim == "trainer 1":
            assert "trainer 1 on cpu ended with status -9; the last checkpoint is of step" in run.text()
    saved = json.loads((train.newest_checkpoint(run.folder) / "state.json").read_text())["step"]
    assert saved >= 2 and nothing_left()


def train_step_of(run):
    return log(run.folder, "train")[-1]["step"]


def test_a_rank_that_dies_while_the_others_wait_in_a_collective_ends_the_run(monkeypatch):
    """What NCCL does not notice: the main thread would wait for ever."""
    context = multiprocessing.get_context("spawn")
    follower = context.Process(target=time.sleep, args=(600,))
    follower.start()
    ended = []
    monkeypatch.setattr(train.os, "_exit", ended.append)
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    os.kill(follower.pid, signal.SIGKILL)
    train.watch([follower], grace=0.0)
    assert ended == [1]
