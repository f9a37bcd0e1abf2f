"""What a machine without a GPU can show of the paths for GPUs: whole runs on pretended ones mix no
devices, and take what fits. This leans on private symbols of one version of torch."""

import pytest
import torch
from faults import ROOT, log, python

from core.settings import read_settings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."),
        reason="it leans on private symbols of torch 2.13",
    ),
]
PRETENDED = ROOT / "tests" / "pretended"


def run(gpus, *command, folder=ROOT, **variables):
    """A command of Python on a machine with so many pretended GPUs."""
    variables["PYTHONPATH"] = f"{ROOT}:{PRETENDED}"
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(gpus)))
    return python(*command, folder=folder, **variables)


# The negative control, of all that follows.
SUMS = """
import torch

two = torch.zeros(2, device="cuda:0")
two + 1
two + torch.zeros(2, device="cuda")
for device in ("cpu", "cuda:1"):
    try:
        two + torch.zeros(2, device=device)
    except RuntimeError as error:
        assert "on the same device" in str(error), error
    else:
        raise AssertionError(f"cuda:0 and {device} mix")
"""
ATTENTION = """
import torch
from core.model import put_on_device
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_grad_enabled(False)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
ids, calls = torch.arange(40).view(2, 20), []
expected = model(input_ids=ids).logits
attention = torch.nn.functional.scaled_dot_product_attention


def seen(query, key, value, **options):
    calls.append((key.shape[1], value.shape[1], options.get("enable_gqa", False)))
    return attention(query, key, value, **options)


torch.nn.functional.scaled_dot_product_attention = seen
for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
    put_on_device(model, torch.device("cuda:0"), dtype, fp32_head=True)
    found = model.base_model(input_ids=ids.cuda()).last_hidden_state.float()
    logits = (found @ model.lm_head.weight.T).cpu()
    assert (logits - expected).abs().max() < error
assert calls == [(4, 4, False), (2, 2, True)], calls
"""


def test_pretended_gpus_do_not_mix_and_fp32_grouped_heads_get_copies():
    """No fused kernel takes them."""
    done = run(2, "-c", SUMS + ATTENTION)
    assert done.returncode == 0, done.stderr


SIZES = """--steps 2 --prompts-per-step 4 --completions-per-prompt 4 --validation-problems 6
    --validation-samples 2 --checkpoint-every 2"""


def whole_run(gpus, flags, folder, status=0, **variables):
    """What train.py says with these flags, while it makes runs/run, and ends with this status."""
    flags = f"--engine torch --name run {SIZES} {flags}".split()
    done = run(gpus, ROOT / "train.py", *flags, folder=folder, **variables)
    assert done.returncode == status, done.stderr
    return done.stderr


def largest(elements, on=""):
    """Of these pretended GPUs, or all, none has room for a tensor of more elements."""
    return {"PRETENDED_LARGEST": str(elements), "PRETENDED_LARGEST_ON": on}


@pytest.mark.parametrize(
    "gpus, flags, trainers",
    [
        (1, "--one-process --lora-rank 4", "cuda:0"),
        (3, "--trainers 2 --fp32-logits split", "cuda:1, cuda:2"),
    ],
)
def test_what_fits_is_tried_and_losses_are_the_same_whatever_is_chosen(
    tmp_path, gpus, flags, trainers
):
    """One GPU for both sides, with adapters, in fp16 since it has no bf16; or a generator and two
    trainers with a split head, in bf16. With checkpoints, and no devices are mixed. The
    feed-forward part of a layer has 192 numbers a token."""
    logs, t4 = [], {"PRETENDED_T4": "yes"} if gpus == 1 else {}
    for room, chosen in (
        ({}, "--no-gradient-checkpointing --tokens-per-micro-batch 32768"),
        (largest(192 * 8192), "--gradient-checkpointing --tokens-per-micro-batch 8192"),
    ):
        (folder := tmp_path / str(len(room))).mkdir()
        common = f"--asynchrony ppo-1 --slots 32 {flags}"
        said, its = whole_run(gpus, common, folder, **room, **t4), folder / "runs" / "run"
        logs.append(log(its, "train"))
        assert f"trainers {trainers}" in said
        assert said.count(f"{chosen}: the largest micro-batch fits") == 1
        assert [line["skipped"] for line in logs[-1]] == [0, 0]
        assert (logs[-1][0]["loss_scale"] > 1) == (gpus == 1)
        assert all(line["mismatch_mean"] < 0.02 for line in log(its, "validation"))
        config = read_settings(its)
        assert config.tokens_per_micro_batch is None and config.share_prompts
    for one, other in zip(*logs, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-2, abs=1e-4)
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-2)


def test_a_flag_is_kept_and_slots_are_halved_until_they_fit(tmp_path):
    # The keys of a layer have 4 heads of 32 numbers a position, of which a slot has 128.
    said = whole_run(1, "--tokens-per-micro-batch 2048", tmp_path, **largest(128 * 136 * 64))
    assert "--tokens-per-micro-batch 2048: the largest micro-batch fits" in said
    assert "with 64 slots" in said


@pytest.mark.parametrize("gpu", ["1", "2"])
def test_a_rank_that_has_too_little_memory_alone_ends_the_run(tmp_path, gpu):
    """It waits for the other, or the other for it, and neither for ever."""
    flags = "--trainers 2 --wait-timeout 30 --slots 32"
    said = whole_run(3, flags, tmp_path, status=1, **largest(192 * 8192, gpu))
    assert "of the trainer alone" in said
