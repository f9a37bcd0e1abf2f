"""vLLM in whole runs. What it shares with the other engine is in test_engines.py."""

import pytest
from faults import ROOT, log, python
from steps import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    "parameters", ["--learning-rate 5e-4", "--lora-rank 8 --learning-rate 2e-3"]
)
def test_a_whole_short_run_with_vllm_learns(tmp_path, parameters):
    """Asynchronous, with an update after each step, of all parameters or of adapters; generator and
    trainer agree at every validation."""
    flags = """
        --engine vllm --steps 14 --prompts-per-step 16 --completions-per-prompt 8
        --train-prompts 2000 --validation-every 7 --validation-problems 64
        --validation-samples 4 --slots 128 --name vllm
    """
    run = python(ROOT / "train.py", *flags.split(), *parameters.split(), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    steps, validations = (log(tmp_path / "runs/vllm", kind) for kind in ("train", "validation"))
    assert len(steps) == 14 and 0 < max(line["off_policyness_max"] for line in steps) < 9
    assert len(validations) == 3
    for line in validations:  # older keys and values make both ten times these limits
        assert line["mismatch_max"] < 1e-3 and line["mismatch_mean"] < 1e-6
    assert validations[-1]["pass_rate"] > validations[0]["pass_rate"] + 0.2
