"""Families of models: heads with factors, caps and biases, sliding windows, recurrent states, and
caps and sinks in attention. families.json has a tiny config of each."""

import copy
import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from programs import rows
from steps import (
    CPU,
    decoding,
    largest_error,
    needs_vllm,
    policy_of,
    run_generate,
    run_train,
)
from transformers import AutoConfig, AutoModelForCausalLM

from core.attention import attention_on_gpu, padded, recurrent
from core.check import refuse_overflow, refuse_wrong_logprobs
from core.engine import NoEngine, sample_all
from core.lora import merged
from core.model import load_model, put_on_device
from core.policy import Policy, micro_batches
from core.rollouts import Request
from core.settings import Settings
from core.torch_engine import TorchEngine
from docs.make_base import make_tokenizer
from machinery.measures import attention_widths, matmul_parameters
from machinery.run import settings_of_the_run
from machinery.trainer import make_policy, numerics_mismatch

TABLE = json.loads((Path(__file__).parent / "families.json").read_text())
# One of each kind; the others take a minute.
FEW = (
    "deepseek_v3 granite phi mistral gpt_oss gemma2 gemma3_text qwen3_5_text lfm2 falcon_h1".split()
)
FAMILIES = [
    family if family in FEW else pytest.param(family, marks=pytest.mark.slow)
    for family in TABLE["families"]
]


def random_model(family, **changes):
    """Far from uniform, so that a wrong mask, position or state shows."""
    names, own = (TABLE["families"] | TABLE["others"])[family]
    config = {}
    for part in ["sizes", *names]:
        config |= TABLE["parts"][part]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **config | own | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="grouped").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.15)
        elif name.endswith(("sinks", "lm_head.bias")):
            parameter.data.normal_()
    return model


def gradients(model, of_rollouts):
    """Of a weighted sum of these log-probabilities, by parameter."""
    weights = (torch.from_numpy(np.random.default_rng(0).normal(size=1000)) for _ in of_rollouts)
    sum((each * w[: len(each)]).sum() for each, w in zip(of_rollouts, weights)).backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def in_trainer(model, rollouts, share):
    """The log-probabilities of each rollout, differentiable."""
    found = [None] * len(rollouts)
    for m in micro_batches(rollouts, [*range(len(rollouts))], 600, CPU, 0, 1, share):
        assert (m.prompts_PL is not None) == share
        logprobs_BT, _ = Policy(model)(m, True)
        for row, logprobs_T, sampled_T in zip(m.rows_B.tolist(), logprobs_BT, m.sampled_BT):
            found[row] = logprobs_T[sampled_T]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_compute_what_the_stock_model_does(family, tmp_path):
    """Slots at several positions, prompts of one token and others admitted together, completions
    that are longer than the window of 8, gaps that close. And the gradients, also behind shared
    prompts. A checkpoint of it can be loaded, and what it costs can be counted."""
    model = random_model(family)
    model.save_pretrained(tmp_path, state_dict=dict(merged(model)))
    load_model(str(tmp_path))
    assert matmul_parameters(model) > 0 < sum(attention_widths(model).values())
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    share = not recurrent(model)
    refuse_wrong_logprobs(model, family, over_slots=True, share_prompts=share)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(6, 128, size=n).tolist() for n in (1, 2, 3, 5, 7, 12, 20)]
    rules = decoding(eos=(2, 3, 4, 5), length_control="penalty")
    wanted = [Request(i, j, each, 30, (i, j)) for j in range(2) for i, each in enumerate(prompts)]
    rollouts = sample_all(TorchEngine(model, rules, slots=5), wanted)
    lengths = [len(rollout.tokens) for rollout in rollouts]
    assert min(lengths) < 8 and max(lengths) > 24
    assert max(largest_error(rollout, stock) for rollout in rollouts) < 1e-3

    model.set_attn_implementation(attention_on_gpu(model))
    true = [each.log_prob(tokens) for each, tokens in (policy_of(r, stock) for r in rollouts)]
    expected = gradients(stock, true)
    for shared in {False, share}:
        found = in_trainer(model, rollouts, shared)
        assert max((one - other).abs().max() for one, other in zip(found, true)) < 1e-3
        for name, gradient in gradients(model, found).items():
            error = (gradient - expected[name]).norm()
            assert error < 1e-3 * (expected[name].norm() + 1e-3), name


@pytest.mark.parametrize("limit", [71, 128])
def test_a_gpus_padding_beyond_its_positions_does_not_make_a_model_rotate_otherwise(
    monkeypatch, limit
):
    """It would be off by 4 nats."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    rope |= {"rope_theta": 1e4, "original_max_position_embeddings": limit}
    model = random_model("phi3", original_max_position_embeddings=limit, rope_parameters=rope)
    for user in ("policy", "torch_engine"):
        on_a_gpu = lambda positions, _: padded(positions, torch.device("cuda"))
        monkeypatch.setattr(f"core.{user}.padded", on_a_gpu)
    rules, prompt = decoding(eos=(), length_control="penalty"), [*range(6, limit - 30)]
    wanted = [Request(i, 0, prompt[i:], 30, (i,)) for i in range(3)]
    rollouts = sample_all(TorchEngine(model, rules, slots=3), wanted)
    assert rollouts[0].total_tokens == limit
    assert max(largest_error(rollout, model) for rollout in rollouts) < 1e-3
    for share in (False, True):
        for rollout, found in zip(rollouts, in_trainer(model, rollouts, share)):
            assert abs(found.detach().numpy() - rollout.logprobs).max() < 1e-3


def test_in_bf16_the_trainer_keeps_in_fp32_what_the_generator_does(group_of_one):
    """Here it is the rotation. FSDP could cast what a layer gets, and the mismatch was .011 then; a
    processor that rounds by shape (AMX) makes some 1e-4."""
    model = random_model("olmo3")
    sampler = copy.deepcopy(model)
    put_on_device(sampler, CPU, torch.bfloat16, True)
    wanted = [Request(i, 0, [6 + i, 7], 30, (i,)) for i in range(12)]
    rollouts = sample_all(TorchEngine(sampler, decoding(eos=(2, 3)), slots=5), wanted)
    settings = Settings(dtype="bfloat16", share_prompts=False)
    policy = make_policy(settings, model, CPU)
    assert numerics_mismatch(policy, rollouts, settings)["mismatch_mean"] < 2e-3


# --- the check at loading -------------------------------------------------------------------------


REFUSED = r"""
doge | {"sliding_window": null, "keep_window_size": 8} | cannot be trained .* off by
mamba2 | {} | over slots .*vllm may know .* off by [\d.]+%
rwkv | {} | over slots .* off by
bloom | {} | over slots
hyperclovax | {} | cannot be trained .* off by
"""


@pytest.mark.parametrize("family, changes, message", rows(REFUSED))
def test_a_model_that_is_computed_otherwise_is_refused_in_one_sentence(family, changes, message):
    with pytest.raises(ValueError, match=rf"^--model M: .*{message}[^\n]*$"):
        refuse_wrong_logprobs(random_model(family, **json.loads(changes)), "M", True, False)


@pytest.mark.parametrize("way, message", [(0, "over slots"), (1, "--no-share-prompts is needed")])
def test_six_tokens_try_a_window_of_any_size_which_is_as_before_then(monkeypatch, way, message):
    model, wanted = random_model("gemma3_text", sliding_window=100), [way == 0, way == 1]
    refuse_wrong_logprobs(model, "M", *wanted)
    monkeypatch.setattr("core.attention.windows", lambda _: [None])
    with pytest.raises(ValueError, match=f"{message} .*off by"):
        refuse_wrong_logprobs(model, "M", *wanted)
    assert model.config.sliding_window == 100
    assert model.config._attn_implementation == "grouped"


@pytest.mark.parametrize("family", ["gemma3_text", "granite"])
def test_activations_that_float16_has_no_room_for_are_refused(family):
    """And sampled from, if training has made them so large, they are a sentence too."""
    model = random_model(family)
    refuse_overflow(model)
    model.get_decoder().layers[1].mlp.down_proj.weight.data *= 1e5
    with pytest.raises(ValueError, match="^--dtype float16 ends at 65,504, .* --dtype float32$"):
        refuse_overflow(model)
    put_on_device(model, CPU, torch.float16, True)
    with pytest.raises(NoEngine, match="overflowed in float16, --dtype float32"):
        sample_all(TorchEngine(model, decoding(), slots=1), [Request(0, 0, [6, 7], 3, (0,))])


def test_kernels_that_a_cpu_does_not_run_are_named(monkeypatch):
    model = random_model("lfm2")
    monkeypatch.setattr(model, "forward", Mock(side_effect=RuntimeError("not on CUDA\nat 0x1")))
    message = r"if fla, .* is installed, uninstall it \(RuntimeError: not on CUDA\)$"
    with pytest.raises(ValueError, match=message):
        refuse_wrong_logprobs(model, "M", True, False)


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=needs_vllm)])
@pytest.mark.parametrize("run, flags", [(run_train, ""), (run_generate, "--evaluate")])
def test_both_commands_try_the_model_before_anything_is_written(here, run, flags, engine):
    """With vLLM the trainer alone."""
    for part in (random_model("hyperclovax"), make_tokenizer()):
        part.save_pretrained("model")
    with pytest.raises(ValueError, match="cannot be trained .*off by"):
        run(f"--model model --engine {engine} {flags}")
    assert [*Path().iterdir()] == [Path("model")]


# A family, what is said of it, and the setting share_prompts.
FORBIDDEN = """
gemma2 | memory by the square | True
gpt_oss | memory by the square | True
lfm2 | this model has states | False
mpt | the place in the cache for the position | False
gemma3_text | | True
"""


@pytest.mark.parametrize("family, said, shares", rows(FORBIDDEN))
def test_a_run_says_what_a_model_forbids(monkeypatch, capsys, family, said, shares):
    monkeypatch.setattr("machinery.run.devices_here", lambda _: (["cuda:0"], ["cuda:0"]))
    chosen = settings_of_the_run(Settings(learning_rate=1e-3), random_model(family))
    lines = capsys.readouterr().err
    assert said in lines and str(chosen.share_prompts) == shares
    assert len(lines.splitlines()) == bool(said)
