"""--lora-rank: what is trained, what everything else sees of it, and how a run goes on. Several
ranks, bf16 and vLLM are in the tables of test_trainer.py, test_gpu_paths.py and test_train.py."""

import shutil
from pathlib import Path

import pytest
import torch
from faults import TINY, log
from safetensors.torch import load_file
from steps import run_train

from core.lora import adapters, add_adapters, merged
from core.model import load_model
from core.settings import Settings
from docs.make_base import BASE_MODEL

RUN = Path("runs/run")
FLAGS = f"{TINY} --one-process --train-prompts 20 --lora-rank 4 --name run --keep-checkpoints 9"


pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("kind", ["llama-grouped-tied", "qwen3"])
def test_a_model_with_adapters_is_the_one_that_has_the_merged_weights(models, kind):
    """New adapters change nothing, and nothing else is trained."""
    model, plain = load_model(models[kind]), load_model(models[kind])
    first = dict(plain.named_parameters())
    add_adapters(model, Settings(lora_rank=4, seed=3))
    assert all(torch.equal(parameter, first[name]) for name, parameter in merged(model))
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == dict(adapters(model)).keys() and len(trained) == 2 * 7 * 2
    for name, parameter in adapters(model):
        if "lora_b" in name:
            parameter.data.normal_(0, 0.05, generator=torch.manual_seed(len(name)))
    plain.load_state_dict(dict(merged(model)), strict=False)
    ours, theirs, before = (
        each(input_ids=torch.arange(3, 15)[None]).logits
        for each in (model, plain, load_model(models[kind]))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # sums in other orders
    assert (ours - before).abs().max() > 0.1


def test_a_run_goes_on_to_the_last_digit_beside_the_weights_of_its_first_model():
    """Its checkpoints have the merged weights, adapters and moments. A checkpoint without adapters
    is refused before anything is written."""
    shutil.copytree(BASE_MODEL, "base")
    assert run_train(f"{FLAGS} --model base --steps 4 --checkpoint-every 2") == 0
    assert log(RUN, "validation")[0]["mismatch_max"] < 1e-4
    files = ["model/model.safetensors", "adapters.safetensors", "optimizer.safetensors"]
    last = RUN / "checkpoints" / "step-000004"
    whole = {name: load_file(last / name) for name in files}
    assert {name.rpartition(".")[2] for name in whole[files[1]]} == {"lora_a_RI", "lora_b_OR"}
    base = load_file("base/model.safetensors")
    changed = {name for name in base if not torch.equal(base[name], whole[files[0]][name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    again = f"--resume {RUN} --from-step 2"
    assert run_train(again) == 0
    for name in files:
        torch.testing.assert_close(load_file(last / name), whole[name], rtol=0, atol=0)

    kept = log(RUN)
    (RUN / "checkpoints" / "step-000002" / "adapters.safetensors").unlink()
    with pytest.raises((ValueError, OSError), match="adapters.safetensors"):
        run_train(again)
    assert log(RUN) == kept


def test_what_would_not_learn_and_a_rank_that_saves_nothing_are_refused(models):
    """Experts in one tensor are no linear layers."""
    for kind, rank, words in (("qwen3-moe", 1, "experts"), ("llama", 32, "as large as")):
        model = load_model(models[kind])
        with pytest.raises(ValueError, match=words):
            add_adapters(model, Settings(lora_rank=rank))
        assert all(parameter.requires_grad for parameter in model.parameters())
