"""What a machine without a GPU can show of the paths for GPUs: whole runs on pretended ones mix no
devices, and the traced memory of a step is what the plan says. Both lean on private symbols of one
version of torch."""

import json
import os
import subprocess
import sys

import pytest
import torch
from plans import MODELS, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."),
        reason="it leans on private symbols of torch 2.13",
    ),
]
PRETENDED = ROOT / "tests" / "pretended"


def run(gpus, *command, folder=ROOT) -> subprocess.CompletedProcess:
    """A command of Python on a machine with so many pretended GPUs."""
    environment = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }
    environment |= {"PYTHONPATH": f"{ROOT}:{PRETENDED}", "PRETENDED_GPUS": str(gpus or "")}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_pretended_gpus_do_not_mix():
    """The negative control, of all that follows."""
    for other, message in (
        ("torch.zeros(2)", "on the same device"),
        ("torch.zeros(2, device='cuda:1')", "same device"),
    ):
        done = run(2, "-c", f"import torch; torch.zeros(2, device='cuda:0') + {other}")
        assert done.returncode and message in done.stderr
    assert (
        run(
            2, "-c", "import torch; assert (torch.ones(2, device='cuda') + 1).tolist() == [2, 2]"
        ).returncode
        == 0
    )


SIZES = [
    "--steps", "2", "--prompts-per-step", "4", "--completions-per-prompt", "4",
    "--validation-problems", "6", "--validation-samples", "2", "--slots", "32",
    "--checkpoint-every", "2",
]  # fmt: skip


def whole_run(gpus, *flags, folder) -> tuple[str, list[dict]]:
    """What train.py says with these flags, and the lines of the log of runs/run."""
    done = run(gpus, ROOT / "train.py", *flags, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr, [*map(json.loads, open(folder / "runs" / "run" / "log.jsonl"))]


@pytest.mark.parametrize(
    "gpus, flags",
    [
        (1, []),
        (1, ["--one-process"]),
        (3, ["--trainers", "2", "--gradient-checkpointing", "--fp32-logits", "split"]),
    ],
)
def test_a_whole_run_mixes_no_devices(tmp_path, gpus, flags):
    """One GPU for both sides, with shared prompts, in two processes or in one; or a generator and
    two trainers, with a split head. In bf16, with checkpoints."""
    named = ["--engine", "torch", "--name", "run"]
    said, log = whole_run(gpus, *named, *SIZES, *flags, folder=tmp_path)
    assert (
        f"trainers cuda:{gpus - 1}" in said or f"trainers cuda:{gpus - 2}, cuda:{gpus - 1}" in said
    )
    steps, validations = (
        [line for line in log if line["kind"] == kind] for kind in ("train", "validation")
    )
    assert len(steps) == 2 and all(line["skipped"] == 0 for line in steps)
    assert all(0 < line["mismatch_mean"] < 0.02 for line in validations)


def test_parameters_wait_in_the_cpus_memory_and_losses_are_the_same(tmp_path):
    """On one GPU, synchronously; then the run goes on with two trainers, from the moments that the
    first one left."""
    logs = []
    for offload in ("--offload", "--no-offload"):
        folder = tmp_path / offload
        folder.mkdir()
        once = ["--engine", "torch", "--name", "run", "--one-process", *SIZES, offload]
        logs.append(whole_run(1, *once, folder=folder)[1])
    for one, other in zip(*logs, strict=True):
        assert one.keys() == other.keys()
        for name in {"loss", "gradient_norm", "pass_rate", "update_size", "mismatch_mean"} & {*one}:
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
    assert any(line.get("gradient_norm") for line in logs[0])
    again = ["--resume", "runs/run", "--steps", "4", "--trainers", "2", "--no-one-process"]
    said, log = whole_run(3, *again, folder=tmp_path / "--offload")
    assert "trainers cuda:1, cuda:2" in said
    assert [line["skipped"] for line in log if line["kind"] == "train"] == [0] * 4


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--trainers 4",
        "--checkpointing",
        "--trainers 4 --checkpointing",
        "--checkpointing --split",
    ],
)
def test_the_plan_is_what_torch_traces(flags):
    """Of four layers as those of Qwen3-0.6B, for two sequences of 14,336 tokens, within 15 %."""
    config = json.dumps(MODELS["Qwen/Qwen3-0.6B"] | {"num_hidden_layers": 4})
    done = run(None, ROOT / "tests" / "traced.py", config, *flags.split())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["planned"] == pytest.approx(found["traced"], rel=0.15)
