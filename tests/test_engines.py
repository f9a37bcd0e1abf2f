"""What both engines promise, the same tests over each: the one to read, and vLLM, the real one."""

import dataclasses
import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_models
from sampling import (
    DEVICE,
    PROMPTS,
    change,
    decoding,
    ends_as_it_should,
    largest_error,
    load,
    needs_vllm,
    parameters_of,
    plain_logprobs,
    requests,
    run_generate,
    same_frequencies,
)

import loss
from core import generators, vllm_engine
from core.engine import (
    EngineSettings,
    NoEngine,
    choose_engine,
    engine_settings,
    make_requests,
    refuse_split,
    sample_all,
)
from core.model import load_tokenizer, render
from core.rollouts import Request
from core.settings import Settings
from docs.make_base import make_tokenizer
from machinery.trainer import make_policy, numerics_mismatch

LONG = 40  # tokens of the longest prompt: more than a block of vLLM's cache
# Tokens; of an interrupted completion, what fills no block is computed again.
BLOCK = {
    "torch": 1,
    "vllm": 32 if DEVICE == "cpu" else 16,
}
KINDS = ["llama", "llama-grouped-tied", "qwen3", "qwen3-moe", "deepseek-v3", "glm4-moe-lite"]
slow_vllm = [needs_vllm, pytest.mark.slow]
BOTH = ["torch", pytest.param("vllm", marks=slow_vllm)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny random models with heads of 32, the smallest that vLLM takes on a CPU. Each
    has sampling defaults that would show if they were used."""
    folders = make_models(tmp_path_factory.mktemp("wide"), head_dim=32)
    defaults = {
        "do_sample": True,
        "temperature": 0.2,
        "top_k": 2,
        "top_p": 0.5,
        "repetition_penalty": 3.0,
    }
    for folder in folders.values():
        (Path(folder) / "generation_config.json").write_text(json.dumps(defaults))
    return folders


def settings_of(name, folder, dtype="float32", slots=48, **changes) -> EngineSettings:
    rules = decoding(load_tokenizer(folder), **{"prompt_budget": LONG, **changes})
    # Many share a GPU.
    return EngineSettings(folder, (DEVICE,), dtype, 1, slots, rules, name, memory=0.05)


class Engines:
    """The engines of one name, each made at its first use: they all live in this process."""

    def __init__(self, name, folders):
        self.name, self.folders, self.made = name, folders, {}

    def __call__(self, kind="llama", dtype="float32", **changes):
        """The engine with the parameters in the folder; also the model, the tokenizer, the shared
        parameters."""
        key = (kind, dtype, *changes.items())
        if key not in self.made:
            self.made[key] = generators.make_engine(
                settings_of(self.name, self.folders[kind], dtype, **changes)
            )
        engine, (model, tokenizer) = self.made[key], load(self.folders[kind])
        shared = parameters_of(model)
        engine.update(shared)
        assert engine.version == 0 and engine.unfinished == 0 and engine.in_flight == []
        return engine, model, tokenizer, shared


@pytest.fixture(scope="module")
def by_name(folders):
    """Engines of vLLM with small caches: many live in this process, and whatever it starts later,
    in tests of other files too, takes the longer to fork the more memory it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "CPU_CACHE", 2**26)
        yield {name: Engines(name, folders) for name in ("torch", "vllm")}


@pytest.fixture(scope="module", params=BOTH)
def engines(request, by_name):
    return by_name[request.param]


@pytest.fixture
def vllm(by_name):
    return by_name["vllm"]


# --- log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engines, kind",
    [
        *(("torch", kind) for kind in KINDS),
        pytest.param("vllm", "llama", marks=needs_vllm),
        *(pytest.param("vllm", kind, marks=slow_vllm) for kind in KINDS[1:3]),
    ],
    indirect=["engines"],
)
def test_logprobs_match_a_plain_forward(engines, kind):
    """Pitfall 1: what is recorded is the log-probability of the distribution sampled from. More
    requests than slots, prompts of several lengths, slots freed and filled at different times,
    interrupted completions and others. vLLM with experts is tested in a process of its own
    (test_vllm.py)."""
    engine, model, tokenizer, _ = engines(kind)
    wanted = requests(tokenizer, PROMPTS, 3) + requests(tokenizer, PROMPTS, 3, thinking=5, seed=1)
    wanted = [dataclasses.replace(request, group=i) for i, request in enumerate(wanted)]
    assert len(wanted) > engine.slots
    rollouts = sample_all(engine, wanted)
    assert [rollout.request for rollout in rollouts] == wanted
    assert len({len(rollout.tokens) for rollout in rollouts}) > 5
    assert {rollout.interrupted for rollout in rollouts} == {False, True}
    for rollout in rollouts:
        assert (
            rollout.tokens.dtype == rollout.versions.dtype == np.int32
            and rollout.logprobs.dtype == np.float32
        )
        assert largest_error(rollout, plain_logprobs(model, rollout)) < 1e-4


def test_pitfall_1_tokens_are_drawn_from_the_distribution_whose_logprobs_are_recorded(engines):
    """First tokens of 3,000 completions of one prompt, in spite of the sampling defaults in the
    model's folder."""
    engine, *_ = engines()
    same_frequencies(sample_all(engine, [Request(0, j, [1, 2, 3], 1, (7, j)) for j in range(3000)]))


def test_a_request_is_sampled_alike_in_other_company(engines):
    """By vLLM up to rounding, which depends on the batch: the noise is the request's."""
    engine, _, tokenizer, _ = engines()
    wanted = requests(tokenizer, PROMPTS, 3, thinking=9)
    others = requests(tokenizer, PROMPTS, 3, thinking=9, seed=1)
    others = [dataclasses.replace(other, group=100 + other.group) for other in others]
    tokens = lambda rollouts: [rollout.tokens.tolist() for rollout in rollouts]
    alone = tokens(sample_all(engine, wanted))
    together = tokens(sample_all(engine, [*others[:20], *wanted[::-1], *others[20:]]))
    same = lambda found: np.mean([one == other for one, other in zip(alone, found)])
    among = together[20 : 20 + len(wanted)][::-1]
    assert same(among) >= (1.0 if engines.name == "torch" else 0.9)
    assert same(together[:20]) < 0.2


@pytest.mark.parametrize("fp32_logits", [True, "split", False])
def test_pitfall_3_generator_and_trainer_agree_over_a_trunk_in_bf16(
    engines, group_of_one, fp32_logits
):
    """The head is in fp32 on both sides, or in bf16 on both. What vLLM rounds otherwise in the
    trunk is below .05 in the mean and 1 at most on these models (weights of .3, far above real
    ones). The control: a trunk in fp32."""
    engine, _, tokenizer, _ = engines("llama-grouped-tied", "bfloat16", fp32_logits=fp32_logits)
    rollouts = sample_all(engine, requests(tokenizer, PROMPTS, 4))
    recipe, mismatch = loss.Recipe(fp32_logits=fp32_logits), {}
    for dtype in ("float32", "bfloat16"):
        # Sharing rounds otherwise.
        settings = Settings(recipe=recipe, dtype=dtype, share_prompts=False)
        model, _ = load(engines.folders["llama-grouped-tied"])
        policy = make_policy(settings, model, torch.device(DEVICE))
        mismatch[dtype] = numerics_mismatch(policy, rollouts, settings)
    exact = (engines.name, DEVICE) == ("torch", "cpu")
    assert mismatch["bfloat16"]["mismatch_mean"] < (1e-5 if exact else 0.05)
    assert mismatch["bfloat16"]["mismatch_max"] < 1
    assert mismatch["float32"]["mismatch_mean"] > 1e-3


def test_a_temperature_of_0_takes_the_likeliest_tokens_and_of_a_half_a_sharper_distribution(
    engines,
):
    for temperature in (0.0, 0.5):
        engine, model, tokenizer, _ = engines("llama", temperature=temperature)
        for rollout in sample_all(engine, requests(tokenizer, PROMPTS[:3], 2)):
            prompt, sampled = rollout.request.prompt_ids, rollout.sampled
            tokens = torch.tensor(rollout.tokens, dtype=torch.int64)
            ids = torch.cat([torch.tensor(prompt), tokens])[None]
            logits_TV = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].detach()
            if temperature == 0:
                assert (logits_TV.argmax(-1) == tokens)[sampled].all()
            else:
                logprobs_TV = torch.log_softmax(logits_TV / temperature, -1)
                expected = logprobs_TV.gather(-1, tokens[:, None])[:, 0].numpy()
                np.testing.assert_allclose(rollout.logprobs[sampled], expected[sampled], atol=1e-4)


def test_thinking_budgets_do_not_follow_the_noise_of_their_completions():
    """With budgets out of the stream of the first completion's noise, that noise would say how long
    it may think. With the length penalty all have the largest budget."""
    rules = decoding(make_tokenizer())
    pairs = [make_requests(i, [1, 2, 3], 2, (0, 30), rules, seed=(0, i)) for i in range(300)]
    budgets = np.array([[request.thinking_budget for request in pair] for pair in pairs])
    assert budgets.min() == 0 and budgets.max() == 30 and len(np.unique(budgets[:, 0])) > 25
    first = lambda request: np.random.default_rng(request.seed).random()
    noise = np.array([[first(request) for request in pair] for pair in pairs])
    correlations = np.corrcoef(budgets.T, noise.T)[:2, 2:]
    assert np.abs(correlations).max() < 4.5 / np.sqrt(len(pairs))
    penalty = dataclasses.replace(rules, length_control="penalty")
    wanted = make_requests(0, [1], 9, (0, 30), penalty, seed=(0, 0))
    assert {request.thinking_budget for request in wanted} == {30}


# --- updates in flight ----------------------------------------------------------------------------


def test_after_an_update_in_flight_tokens_follow_the_new_parameters_over_the_old_cache(engines):
    """Also when a validation with the new parameters comes between. What is interrupted after the
    update goes on over the blocks that were full; the rest is computed again."""
    steps, block = 9, BLOCK[engines.name]
    engine, new, tokenizer, shared = engines()
    old = load(engines.folders["llama"])[0]
    wanted = [
        dataclasses.replace(r, thinking_budget=29 - 5 * (r.index % 4))
        for r in requests(tokenizer, PROMPTS, 4)
    ]
    wanted = [
        dataclasses.replace(r, prompt_ids=[*r.prompt_ids, *range(10), *range(r.group)])
        for r in wanted
    ]
    engine.add(wanted)
    rollouts = [rollout for _ in range(steps) for rollout in engine.step()]
    change(shared, new, version=5)
    engine.update(shared)
    assert engine.version == 5
    engine.add([dataclasses.replace(r, validation=True) for r in wanted[::4]])
    while engine.unfinished:
        rollouts += engine.step()

    begun_after = [r for r in rollouts if r.request.validation]
    assert len(begun_after) == 12 and {v for r in begun_after for v in r.versions.tolist()} == {5}
    begun_before = [r for r in rollouts if not r.request.validation and len(r.tokens) > steps]
    interrupted = [r for r in begun_before if r.interrupted]
    assert len(begun_before) > 10 and 3 < len(interrupted) < len(begun_before)
    for rollout in begun_before:
        assert (rollout.versions == [0] * steps + [5] * (len(rollout.tokens) - steps)).all()
        prompt, thinking = len(rollout.request.prompt_ids), rollout.request.thinking_budget
        kept = prompt + steps - 1  # fed before the update
        head = up_to(rollout, thinking) if rollout.interrupted else rollout
        assert largest_error(head, plain_logprobs(new, head, old, kept), start=steps) < 1e-4
        # The negative control: a cache that was computed again would give something else.
        assert largest_error(head, plain_logprobs(new, head), start=steps) > 1e-4
        if rollout.interrupted:
            full = (prompt + thinking - 1) // block * block
            expected = plain_logprobs(new, rollout, old, min(kept, full))
            assert largest_error(rollout, expected, start=thinking) < 1e-4
    assert any(
        (len(r.request.prompt_ids) + r.request.thinking_budget - 1) // block for r in interrupted
    )


def up_to(rollout, end):
    """The first tokens of a rollout."""
    arrays = ("tokens", "sampled", "logprobs", "versions")
    return dataclasses.replace(rollout, **{name: getattr(rollout, name)[:end] for name in arrays})


def test_pitfall_14_a_request_begun_after_an_update_sees_no_old_cache(engines):
    """One prompt of more than a block, asked for before and after an update, more often than there
    are slots."""
    engine, model, _, shared = engines()
    prompt = (list(range(13)) * 4)[:LONG]
    engine.add([Request(0, i, prompt, 20, (0, i)) for i in range(100)])
    rollouts = engine.step()
    change(shared, model, version=1)
    engine.update(shared)
    while engine.unfinished:
        rollouts += engine.step()
    begun_after = [rollout for rollout in rollouts if rollout.versions[0] == 1]
    assert len(begun_after) == 100 - engine.slots
    assert all(
        largest_error(rollout, plain_logprobs(model, rollout)) < 1e-4 for rollout in begun_after
    )


def test_a_validation_goes_before_what_waits_beside_what_is_in_flight(engines):
    """All slots are taken and more requests wait when the validation comes, and with it new
    parameters."""
    engine, model, tokenizer, shared = engines()
    training = requests(tokenizer, PROMPTS, 10, thinking=20)
    training = [dataclasses.replace(each, group=100 + each.group) for each in training]
    engine.add(training)
    rollouts = [rollout for _ in range(3) for rollout in engine.step()]
    begun = {request.seed for request in engine.in_flight}
    begun |= {rollout.request.seed for rollout in rollouts}
    assert engine.slots <= len(begun) < len(training)
    assert engine.unfinished == len(training) - len(rollouts)
    change(shared, model, version=1)
    engine.update(shared)
    validation = requests(tokenizer, PROMPTS, 3, thinking=20, seed=1, validation=True)
    engine.add(validation)
    waiting = {request.seed for request in validation}
    while engine.unfinished:
        rollouts += (ended := engine.step())
        seen = [*engine.in_flight, *(rollout.request for rollout in ended)]
        waiting -= {request.seed for request in seen}
        assert not waiting or {request.seed for request in seen if not request.validation} <= begun
    for rollout in rollouts:
        if rollout.request.seed not in begun:
            assert set(rollout.versions.tolist()) == {1}


# --- interruption and ends ------------------------------------------------------------------------


def test_interruption_at_any_budget_and_natural_ends_around_it(engines):
    """Pitfall 8, and all that `loss.interrupt_or_truncate` says: budgets of 0, 1, some and all
    tokens. All ways to end come."""
    engine, _, tokenizer, _ = engines()
    prompts = [render(tokenizer, problem.prompt) for problem in PROMPTS]
    wanted = [
        Request(i, b, prompts[i % 12], (0, 1, 6, 30)[b], (3, i, b))
        for i in range(250)
        for b in range(4)
    ]
    ways = {ends_as_it_should(rollout, engine.decoding) for rollout in sample_all(engine, wanted)}
    assert len(ways) == 16


def test_with_the_length_penalty_nothing_is_forced(engines):
    engine, _, tokenizer, _ = engines("llama", length_control="penalty")
    rollouts = sample_all(engine, requests(tokenizer, PROMPTS, 4, thinking=4))
    for rollout in rollouts:
        assert rollout.sampled.all() and not rollout.interrupted
        assert rollout.truncated == (rollout.tokens[-1] not in engine.decoding.eos)
        assert len(rollout.tokens) == 10 if rollout.truncated else len(rollout.tokens) <= 10
    assert 0 < sum(rollout.truncated for rollout in rollouts) < len(rollouts)


# --- vLLM alone -----------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.slow
def test_the_answer_after_an_interruption_has_noise_of_its_own(vllm):
    """Its first token equals the first of the thinking as often as its distribution says, and not
    more often."""
    engine, model, *_ = vllm()
    rollouts = sample_all(engine, [Request(0, j, [1, 2, 3], 1, (8, j)) for j in range(1500)])
    place = 1 + len(engine.decoding.phrase)
    tokens = np.array([r.tokens[: place + 1] for r in rollouts if r.interrupted])
    ids = torch.tensor([[1, 2, 3, *row] for row in tokens[:, :place].tolist()])
    with torch.no_grad():
        shares_NV = torch.softmax(model(input_ids=ids).logits[:, -1], -1)
    shares = shares_NV[torch.arange(len(ids)), ids[:, 3]].numpy()
    same, sd = (tokens[:, place] == tokens[:, 0]).sum(), np.sqrt((shares * (1 - shares)).sum())
    assert abs(same - shares.sum()) < 4.5 * sd


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("fp32_logits", [True, False])
def test_pitfall_3_the_head_inside_of_vllm_is_the_trainers(vllm, fp32_logits):
    """Bit for bit, and so are its logits."""
    engine, model, *_ = vllm("llama-grouped-tied", "bfloat16", fp32_logits=fp32_logits)
    head_VD = model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        hidden_ND = torch.randn(5, head_VD.shape[1]).bfloat16()
        (inside,) = engine.engine.collective_rpc(_head_and_logits, args=(hidden_ND,))
    expected_VD = head_VD if fp32_logits else head_VD.bfloat16()
    assert torch.equal(inside[0][: len(head_VD)], expected_VD)
    expected_NV = loss.head_logits(hidden_ND, head_VD, fp32_logits)
    torch.testing.assert_close(
        inside[1].float(), expected_NV, atol=1e-5 if fp32_logits else 0.05, rtol=1e-5
    )
    # The negative control: vLLM's own head_dtype, fp32 arithmetic on the weight in bf16.
    if fp32_logits:
        assert (
            expected_NV - loss.head_logits(hidden_ND, head_VD.bfloat16(), True)
        ).abs().max() > 1e-3


def _head_and_logits(worker, hidden_ND):
    model = worker.get_model()
    return model.lm_head.weight, model.compute_logits(hidden_ND)


@pytest.fixture
def small_cache(folders, monkeypatch):
    """A vLLM whose cache has room for four completions of full length, while sixteen are begun.
    Also both models, of the parameters in the folder, and the shared parameters."""
    # Bytes: keys and values, layers, heads, their size, fp32.
    block = 2 * 2 * 4 * 32 * 4 * BLOCK["vllm"]
    monkeypatch.setattr(vllm_engine, "CPU_CACHE", 13 * block)
    engine = generators.make_engine(settings_of("vllm", folders["llama"], slots=16))
    (old, _), (new, _) = load(folders["llama"]), load(folders["llama"])
    engine.update(shared := parameters_of(new, version=3))
    return engine, old, new, shared


def waiting_inside(engine) -> list[bool]:
    """Of each request that has to wait inside vLLM, whether it was preempted; the others have not
    begun."""
    return [
        request.num_preemptions > 0
        for request in engine.engine.engine_core.engine_core.scheduler.waiting
    ]


@needs_vllm
@pytest.mark.slow
def test_a_cache_so_small_that_vllm_preempts_leaves_every_rollout_right(small_cache):
    """What is preempted is computed again, also across an update. Each token keeps the
    log-probability and the version of the parameters that sampled it."""
    engine, old, new, shared = small_cache
    prompts = [np.random.default_rng(i).integers(13, size=30).tolist() for i in range(48)]
    engine.add([Request(i, 0, prompt, (30, 12)[i % 2], (5, i)) for i, prompt in enumerate(prompts)])
    rollouts = [rollout for _ in range(12) for rollout in engine.step()]
    assert sum(waiting_inside(engine)) > 2, "preempted, and waiting over the update"
    change(shared, new, version=4)
    engine.update(shared)
    while engine.unfinished:
        rollouts += engine.step()
    assert len(rollouts) == len(prompts)
    assert {rollout.interrupted for rollout in rollouts} == {False, True}
    for rollout in rollouts:
        ends_as_it_should(rollout, engine.decoding)
        assert (np.diff(rollout.versions) >= 0).all()
        before = int((rollout.versions == 3).sum())
        head = up_to(rollout, before)
        assert largest_error(head, plain_logprobs(old, head)) < 1e-4
        if before == 0:
            assert largest_error(rollout, plain_logprobs(new, rollout)) < 1e-4


@needs_vllm
@pytest.mark.slow
def test_pitfall_14_what_a_full_cache_has_kept_waiting_begins_with_the_newest_parameters(
    small_cache,
):
    """One prompt of more than a block. Some of its completions are inside vLLM when the update
    comes, and have waited for room in its cache: what those in flight have left of the prompt there
    is of older parameters."""
    engine, _, new, shared = small_cache
    prompt = (list(range(13)) * 4)[:LONG]
    same = [Request(9, i, prompt, 30, (0, i)) for i in range(30)]
    draw = lambda i: np.random.default_rng(i).integers(13, size=LONG).tolist()
    engine.add([same[0], *(Request(i, 0, draw(i), 1, (5, i)) for i in range(5)), *same[1:]])
    rollouts = engine.step()
    assert waiting_inside(engine).count(False) > 2, "not begun, and waiting over the update"
    change(shared, new, version=4)
    engine.update(shared)
    while engine.unfinished:
        rollouts += engine.step()
    begun_after = [rollout for rollout in rollouts if rollout.versions[0] == 4]
    assert len(rollouts) == 35 and len(begun_after) > 20
    for rollout in begun_after:
        assert largest_error(rollout, plain_logprobs(new, rollout)) < 1e-4


@needs_vllm
@pytest.mark.slow
def test_the_command_evaluates_with_vllm_and_finds_the_same_pass_rate(tmp_path):
    """mean@8 of the base model on 128 problems: within 4 standard deviations of a difference of two
    shares."""
    rates = {}
    for name in ("torch", "vllm"):
        log = tmp_path / f"{name}.jsonl"
        assert (
            run_generate(["--evaluate", "--samples", "8", "--engine", name, "--log", str(log)]) == 0
        )
        rates[name] = json.loads(log.read_text())["pass_rate"]
    share = np.mean(list(rates.values()))
    assert 0.05 < share < 0.3
    assert abs(rates["torch"] - rates["vllm"]) < 4 * np.sqrt(2 * share * (1 - share) / (128 * 8))


def test_vllm_is_taken_for_a_gpu_if_it_is_installed_and_missed_when_asked_for(monkeypatch):
    for installed, found in (("it is", ["torch", "vllm"]), (None, ["torch", "torch"])):
        monkeypatch.setattr(importlib.util, "find_spec", partial(lambda found, _: found, installed))
        assert [choose_engine("auto", device) for device in ("cpu", "cuda:1")] == found
    with pytest.raises(ValueError, match="not installed; `pip install -r requirements-vllm.txt`"):
        choose_engine("vllm", "cuda:0")


def test_a_model_is_split_over_gpus_by_vllm_and_by_its_heads():
    for fits in (("vllm", 2, 4), ("torch", 1, 3), ("torch", 1, None)):  # RWKV has no heads
        refuse_split(*fits)
    for engine, devices, message in (
        ("vllm", 3, "cannot be split over 3"),
        ("torch", 2, "only vL"),
    ):
        with pytest.raises(ValueError, match=message):
            refuse_split(engine, devices, heads=4)


def test_vllm_takes_the_runner_that_the_tests_run_unless_the_user_has_said_another(monkeypatch):
    for given, expected in (({}, "0"), ({"VLLM_USE_V2_MODEL_RUNNER": "1"}, "1")):
        monkeypatch.setattr(os, "environ", dict(given))
        vllm_engine._set_environment(on_cpu=False, threads=1)
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == expected


@needs_vllm
def test_on_a_gpu_vllm_sizes_its_own_cache(folders, monkeypatch):
    """By its share of the memory, or by what is free beside a trainer; sequences are bounded by
    --slots alone."""
    import vllm

    class Seen(BaseException):
        """Not one of vLLM's errors, which would be made into a sentence."""

    def seen(**arguments):
        raise Seen(arguments)

    monkeypatch.setattr(vllm, "EngineArgs", seen)
    rules, given = decoding(load_tokenizer(folders["llama"])), []
    for settings, free in (
        (Settings(), 80),
        (Settings(), 40),
        (Settings(generator_memory=0.7), 40),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80))
        chosen = dataclasses.replace(settings, engine="vllm", slots=77)
        with pytest.raises(Seen) as caught:
            vllm_engine.make_llm_engine(engine_settings(chosen, ("cuda:0",), "model", rules), 8192)
        given.append(caught.value.args[0])
    assert [arguments["gpu_memory_utilization"] for arguments in given] == [0.9, 0.45, 0.7]
    for arguments in given:
        assert arguments["max_num_seqs"] == 77 and arguments["kv_cache_memory_bytes"] is None
        assert not arguments["enforce_eager"] and arguments["dtype"] == "bfloat16"


@needs_vllm
@pytest.mark.slow
def test_what_vllm_cannot_do_is_said_in_one_sentence(models, folders, monkeypatch):
    for folder, changes, setting, message in (
        (models["llama"], {}, None, "takes heads of 32, 64, .* have 16"),
        (folders["llama"], {"thinking_budget": 1000}, None, "greater than the derived max_model"),
        (folders["llama"], {}, (vllm_engine, "CPU_CACHE", 2**16), "lower --generator-memory"),
        (folders["llama"], {}, (sys.modules, "vllm", None), "cannot be imported.*requirements-v"),
    ):
        with monkeypatch.context() as patch, pytest.raises(NoEngine, match=message) as caught:
            if setting:
                (patch.setitem if setting[0] is sys.modules else patch.setattr)(*setting)
            generators.make_engine(settings_of("vllm", folder, **changes))
        assert "\n" not in str(caught.value)
