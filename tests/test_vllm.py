"""The vLLM engine, the real one, against plain forwards and against the torch engine.

A developer's machine may be without vLLM, and then these are skipped; in CI (.ci/run sets CI) they are not.
"""

import dataclasses
import importlib.util
import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_generate import PROMPTS, decoding, load, plain_logprobs, requests
from test_train import lines, run

import generate
import train
from generate import Decoding, GeneratorSettings, Request, SharedParameters, Work
from loss import Recipe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and "CI" not in os.environ, reason="vLLM is not installed"
)
BLOCK = 32  # tokens, in vLLM's cache on a CPU
LONG = 40  # tokens of the longest prompt: more than a block


@pytest.fixture(scope="module")
def wide_models(tmp_path_factory):
    """Folders of tiny random models with heads of 32, the smallest that vLLM takes on a CPU. Each has sampling defaults
    that would show if they were used."""
    from conftest import make_models

    folders = make_models(tmp_path_factory.mktemp("wide"), head_dim=32)
    defaults = {"do_sample": True, "temperature": 0.2, "top_k": 2, "top_p": 0.5, "repetition_penalty": 3.0}
    for folder in folders.values():
        (Path(folder) / "generation_config.json").write_text(json.dumps(defaults))
    return folders


def rules(folder, fp32_logits=True, **changes) -> Decoding:
    changes = dict(prompt_budget=LONG, fp32_logits=fp32_logits, **changes)
    return decoding(generate.load_tokenizer(folder), **changes)


@pytest.fixture(scope="module")
def engines(wide_models):
    """The engine of a kind of model, made at its first use: they all live in this process."""
    made = {}

    def engine(kind="llama", dtype="float32", **changes):
        key = (kind, dtype, *changes.items())
        if key not in made:
            settings = GeneratorSettings(wide_models[kind], ("cpu",), dtype, 1, 48, rules(wide_models[kind], **changes))
            made[key] = generate.make_engine(dataclasses.replace(settings, engine="vllm"))
        return made[key]

    return engine


def given(engine, folder, version=0):
    """The engine with the parameters in the folder, and those as a model."""
    model, tokenizer = load(folder)
    shared = SharedParameters(model)
    shared.write(model.named_parameters(), version)
    engine.update(shared)
    assert engine.version == version and engine.unfinished == 0
    return model, tokenizer, shared


def changed(shared, model, version):
    """Another version of the parameters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    shared.write(model.named_parameters(), version)


# --- log-probabilities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "llama-grouped-tied", "qwen3"])
def test_logprobs_match_a_plain_forward(wide_models, engines, kind):
    """Pitfall 1: more requests than slots, prompts of several lengths, interrupted and others."""
    engine = engines(kind)
    model, tokenizer, _ = given(engine, wide_models[kind])
    wanted = requests(tokenizer, PROMPTS, 3) + requests(tokenizer, PROMPTS, 3, thinking=5, seed=1)
    wanted = [dataclasses.replace(request, group=i) for i, request in enumerate(wanted)]
    rollouts = generate.sample_all(engine, wanted)
    assert [rollout.request for rollout in rollouts] == wanted
    assert len({len(rollout.tokens) for rollout in rollouts}) > 5 and any(rollout.interrupted for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.tokens.dtype == rollout.versions.dtype == np.int32 and rollout.logprobs.dtype == np.float32
        np.testing.assert_allclose(
            rollout.logprobs[rollout.sampled], plain_logprobs(model, rollout)[rollout.sampled], atol=1e-4
        )


def test_pitfall_1_tokens_are_drawn_from_the_distribution_whose_logprobs_are_recorded(wide_models, engines):
    """First tokens of 2,000 completions of one prompt, in spite of the sampling defaults in the model's folder."""
    engine = engines("llama")
    given(engine, wide_models["llama"])
    rollouts = generate.sample_all(engine, [Request(0, j, [1, 2, 3], 1, (7, j)) for j in range(2000)])
    tokens = np.array([rollout.tokens[0] for rollout in rollouts])
    recorded = {rollout.tokens[0]: float(np.exp(rollout.logprobs[0])) for rollout in rollouts}
    assert len(recorded) > 5 and sum(recorded.values()) == pytest.approx(1.0, abs=0.02)
    for token, probability in recorded.items():
        sd = np.sqrt(probability * (1 - probability) / 2000)
        assert np.mean(tokens == token) == pytest.approx(probability, abs=4.5 * sd)


def test_a_request_is_sampled_alike_in_other_company(wide_models, engines):
    """Up to rounding, which depends on the batch: the noise is the request's."""
    engine = engines("llama")
    _, tokenizer, _ = given(engine, wide_models["llama"])
    wanted = requests(tokenizer, PROMPTS, 3, thinking=9)
    together = generate.sample_all(engine, wanted)
    others = generate.sample_all(engine, requests(tokenizer, PROMPTS, 3, thinking=9, seed=1))
    again = generate.sample_all(engine, wanted[::-1])[::-1]
    same = lambda a, b: np.mean([x.tokens.tolist() == y.tokens.tolist() for x, y in zip(a, b)])  # noqa: E731
    assert same(together, again) > 0.9
    assert same(together, others) < 0.2


def test_the_answer_after_an_interruption_has_noise_of_its_own(wide_models, engines):
    """Its first token equals the first of the thinking as often as its distribution says, and not more often."""
    engine = engines("llama")
    model, _, _ = given(engine, wide_models["llama"])
    rollouts = generate.sample_all(engine, [Request(0, j, [1, 2, 3], 1, (8, j)) for j in range(1500)])
    place = 1 + len(engine.decoding.phrase)
    interrupted = [r for r in rollouts if r.interrupted]
    ids = torch.tensor([[1, 2, 3, *r.tokens[:place].tolist()] for r in interrupted])
    with torch.no_grad():
        shares = torch.softmax(model(input_ids=ids).logits[:, -1], -1)[torch.arange(len(ids)), ids[:, 3]].numpy()
    same = np.array([r.tokens[place] == r.tokens[0] for r in interrupted])
    assert abs(same.mean() - shares.mean()) < 4.5 * np.sqrt((shares * (1 - shares)).sum()) / len(same)


@pytest.mark.parametrize("fp32_logits", [True, False])
def test_bf16_trunk_with_and_without_fp32_logits(wide_models, engines, fp32_logits):
    """Pitfall 3. The head is the trainer's, bit for bit, and so are its logits; the trunk's rounding, which is not
    vLLM's alone, stays below .05 in the mean and 1 at most on these models (weights of .3, far above real ones)."""
    kind = "llama-grouped-tied"
    engine = engines(kind, "bfloat16", fp32_logits=fp32_logits)
    model, tokenizer, _ = given(engine, wide_models[kind])
    head_VD = model.get_output_embeddings().weight.detach()
    with torch.no_grad():
        hidden_ND = torch.randn(5, head_VD.shape[1]).bfloat16()
        (inside,) = engine.engine.collective_rpc(_head_and_logits, args=(hidden_ND,))
    expected_VD = head_VD if fp32_logits else head_VD.bfloat16()
    assert torch.equal(inside[0][: len(head_VD)], expected_VD)
    expected_NV = scalerl_logits(hidden_ND, head_VD, fp32_logits)
    torch.testing.assert_close(inside[1].float(), expected_NV, atol=1e-5 if fp32_logits else 0.05, rtol=1e-5)
    if fp32_logits:  # the negative control: vLLM's own head_dtype, fp32 arithmetic on the weight in bf16
        assert (expected_NV - scalerl_logits(hidden_ND, head_VD.bfloat16(), True)).abs().max() > 1e-3
    settings = train.Settings(recipe=Recipe(fp32_logits=fp32_logits), dtype="bfloat16")
    rollouts = generate.sample_all(engine, requests(tokenizer, PROMPTS, 4))
    train.compute_in(model, torch.bfloat16, gradient_checkpointing=False)
    mismatch = train.numerics_mismatch(train.Policy(model), rollouts, settings)
    assert 0 < mismatch["mismatch_mean"] < 0.05 and mismatch["mismatch_max"] < 1


def test_without_fp32_logits_the_head_is_in_bf16_even_over_a_trunk_in_fp32(wide_models, engines):
    """As the trainer's is: --leave-out fp32_logits on a CPU. A head in fp32 would be off by .003 in the mean."""
    engine = engines("llama", fp32_logits=False)
    model, tokenizer, _ = given(engine, wide_models["llama"])
    rollouts = generate.sample_all(engine, requests(tokenizer, PROMPTS, 4))
    mismatch = [
        train.numerics_mismatch(train.Policy(model), rollouts, train.Settings(recipe=Recipe(fp32_logits=fp32)))["mismatch_mean"]
        for fp32 in (False, True)
    ]
    assert mismatch[0] < 5e-4 < 2e-3 < mismatch[1]


def scalerl_logits(hidden_ND, head_VD, fp32_logits):
    return generate.scalerl.head_logits(hidden_ND, head_VD, fp32_logits)


def _head_and_logits(worker, hidden_ND):
    model = worker.get_model()
    return model.lm_head.weight, model.compute_logits(hidden_ND)


# --- updates in flight --------------------------------------------------------------------------------------------


def follows(rollout, old, new, first_new, kept):
    """Whether the log-probabilities are those of: keys and values of the first `kept` positions by the old parameters,
    the rest by the new; tokens sampled by the new ones from completion token `first_new` on."""
    prompt = len(rollout.request.prompt)
    ids = torch.tensor([rollout.request.prompt + rollout.tokens.tolist()])
    with torch.no_grad():
        past = old(input_ids=ids[:, :kept], use_cache=True).past_key_values if kept else None
        after = new(input_ids=ids[:, kept:], past_key_values=past).logits[0]
        before = old(input_ids=ids).logits[0, :kept]
    logprobs = torch.log_softmax(torch.cat([before, after]), -1)[prompt - 1 : -1]
    expected = logprobs.gather(-1, ids[0, prompt:, None])[:, 0].numpy()
    off = np.abs(expected - rollout.logprobs)[rollout.sampled & (np.arange(len(rollout.tokens)) >= first_new)]
    return off.max() < 1e-4


@pytest.mark.parametrize("validation", [False, True])
def test_after_an_update_in_flight_tokens_follow_the_new_parameters_over_the_old_cache(
    wide_models, engines, validation
):
    """Also when a validation with the new parameters comes between, which finds everything in flight standing still.

    An interruption after the update goes on over the blocks that were full; the rest is computed again.
    """
    engine, folder, steps = engines("llama"), wide_models["llama"], 9
    old, tokenizer, shared = given(engine, folder)
    new = load(folder)[0]
    wanted = [dataclasses.replace(r, thinking_budget=29 - 5 * (r.index % 4)) for r in requests(tokenizer, PROMPTS, 4)]
    wanted = [dataclasses.replace(r, prompt=[*r.prompt, *range(10), *range(r.group)]) for r in wanted]
    engine.add(wanted)
    rollouts = [rollout for _ in range(steps) for rollout in engine.step()]
    changed(shared, new, version=5)
    engine.update(shared)
    if validation:
        in_flight = engine.unfinished
        alone = [r for step in engine.sample_alone(requests(tokenizer, PROMPTS, 3, seed=9)) for r in step]
        assert engine.unfinished == in_flight
        assert len(alone) == 36 and {v for r in alone for v in r.versions.tolist()} == {5}
        assert all(follows(r, old, new, 0, kept=0) for r in alone)
    while engine.unfinished:
        rollouts += engine.step()
    mixed = [r for r in rollouts if set(r.versions.tolist()) == {0, 5}]
    interrupted = [r for r in mixed if r.interrupted]
    assert len(mixed) > 10 and len(interrupted) > 3 and len(mixed) > len(interrupted)
    for rollout in mixed:
        assert (rollout.versions == [0] * steps + [5] * (len(rollout.tokens) - steps)).all()
        prompt, thinking = len(rollout.request.prompt), rollout.request.thinking_budget
        kept = prompt + steps - 1  # fed before the update
        head, tail = cut(rollout, thinking) if rollout.interrupted else (rollout, None)
        assert follows(head, old, new, steps, kept)
        assert not follows(head, old, new, steps, kept=0)  # the negative control: a cache that was computed again
        if tail is not None:
            full = (prompt + thinking - 1) // BLOCK * BLOCK
            assert follows(tail, old, new, thinking, kept=min(kept, full))
    assert any((len(r.request.prompt) + r.request.thinking_budget - 1) // BLOCK for r in interrupted)


def cut(rollout, thinking):
    """An interrupted rollout without what came after its thinking; and whole."""
    arrays = ("tokens", "sampled", "logprobs", "versions")
    return dataclasses.replace(rollout, **{name: getattr(rollout, name)[:thinking] for name in arrays}), rollout


def test_pitfall_14_a_request_begun_after_an_update_sees_no_old_cache(wide_models, engines):
    """One prompt of more than a block, asked for before and after an update, more often than there are slots."""
    engine, folder = engines("llama"), wide_models["llama"]
    _, _, shared = given(engine, folder)
    new = load(folder)[0]
    prompt = (list(range(13)) * 4)[:LONG]
    engine.add([Request(0, i, prompt, 20, (0, i)) for i in range(100)])
    rollouts = engine.step()
    changed(shared, new, version=1)
    engine.update(shared)
    while engine.unfinished:
        rollouts += engine.step()
    begun_after = [r for r in rollouts if r.versions[0] == 1]
    assert len(begun_after) == 100 - engine.slots
    for rollout in begun_after:
        expected = plain_logprobs(new, rollout)
        np.testing.assert_allclose(rollout.logprobs[rollout.sampled], expected[rollout.sampled], atol=1e-4)


def test_many_updates_leave_the_last_one(wide_models, engines):
    engine, folder = engines("qwen3"), wide_models["qwen3"]
    model, tokenizer, shared = given(engine, folder)
    for version in range(1, 31):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        shared.write(model.named_parameters(), version)
        engine.update(shared)
        assert engine.version == version
    for rollout in generate.sample_all(engine, requests(tokenizer, PROMPTS, 1)):
        assert follows(rollout, model, model, 0, kept=0)


# --- interruption and ends ----------------------------------------------------------------------------------------


def ends_as_it_should(rollout, rules) -> str:
    """Replays a rollout token by token, by the rules in words, and says which way it went."""
    budget, closed, n, interrupted, place = rollout.request.thinking_budget, None, 0, False, 0
    while True:
        if closed is None and n == budget:
            phrase = slice(place, place + len(rules.phrase))
            assert rollout.tokens[phrase].tolist() == list(rules.phrase) and not rollout.sampled[phrase].any()
            assert (rollout.logprobs[phrase] == 0).all()
            interrupted, closed, place = True, n, phrase.stop
        if closed is not None and n - closed == rules.answer_budget:
            how = "truncated"
            break
        assert rollout.sampled[place] and rollout.logprobs[place] < 0
        token, n, place = rollout.tokens[place], n + 1, place + 1
        if token in rules.eos:
            how = "ended"
            break
        if token == rules.end_of_thinking and closed is None:
            closed = n
    assert place == len(rollout.tokens) == len(rollout.sampled) == len(rollout.logprobs) == len(rollout.versions)
    assert rollout.interrupted == interrupted and rollout.truncated == (how == "truncated")
    if interrupted:
        return f"interrupted at {budget}, {how}"
    if closed is None:
        return f"{how} at the budget without closing" if n == budget else f"{how} before the budget without closing"
    at = "at the budget" if closed == budget else "early"
    return f"closed {at}, {how}{' beyond the budget' if n > budget else ''}"


def test_interruption_at_any_budget_and_natural_ends_around_it(wide_models, engines):
    """Pitfall 8, and all that `loss.length_control` says: budgets of 0, 1, some and all tokens."""
    engine = engines("llama")
    _, tokenizer, _ = given(engine, wide_models["llama"])
    prompts = [generate.render(tokenizer, problem.prompt) for problem in PROMPTS]
    wanted = [Request(i, b, prompts[i % 12], (0, 1, 6, 30)[b], (3, i, b)) for i in range(250) for b in range(4)]
    ways = {ends_as_it_should(rollout, engine.decoding) for rollout in generate.sample_all(engine, wanted)}
    assert ways == {
        *(f"interrupted at {budget}, {how}" for budget in (0, 1, 6, 30) for how in ("ended", "truncated")),
        "ended at the budget without closing",
        "ended before the budget without closing",
        "closed at the budget, truncated beyond the budget",
        "closed at the budget, ended beyond the budget",
        "closed early, truncated",
        "closed early, truncated beyond the budget",
        "closed early, ended",
        "closed early, ended beyond the budget",
    }


def test_both_engines_sample_the_same_distribution_of_lengths(wide_models, engines):
    engine, folder = engines("llama"), wide_models["llama"]
    model, tokenizer, _ = given(engine, folder)
    wanted = requests(tokenizer, PROMPTS, 60, thinking=6)
    both = [generate.sample_all(e, wanted) for e in (engine, generate.TorchEngine(model, engine.decoding, 512))]
    for what in ("interrupted", "truncated"):
        a, b = (np.mean([getattr(rollout, what) for rollout in rollouts]) for rollouts in both)
        assert 0 < b < 1 and abs(a - b) < 4 * np.sqrt(2 * b * (1 - b) / len(wanted))
    a, b = (np.array([rollout.sampled.sum() for rollout in rollouts]) for rollouts in both)
    assert abs(a.mean() - b.mean()) < 4 * np.sqrt((a.var() + b.var()) / len(wanted))


def test_with_the_length_penalty_nothing_is_forced(wide_models, engines):
    engine = engines("llama", length_control="penalty")
    _, tokenizer, _ = given(engine, wide_models["llama"])
    rollouts = generate.sample_all(engine, requests(tokenizer, PROMPTS, 4, thinking=4))
    for rollout in rollouts:
        assert rollout.sampled.all() and not rollout.interrupted
        assert rollout.truncated == (rollout.tokens[-1] not in engine.decoding.eos)
        assert len(rollout.tokens) == 10 if rollout.truncated else len(rollout.tokens) <= 10
    assert 0 < sum(rollout.truncated for rollout in rollouts) < len(rollouts)


# --- what cannot be -----------------------------------------------------------------------------------------------


def test_requests_beyond_the_budgets_are_refused(engines):
    with pytest.raises(ValueError, match="41 tokens; the budget is 40"):
        engines("llama").add([Request(0, 0, [1] * 41, 5, (0,))])
    with pytest.raises(ValueError, match="thinking budget of 31"):
        engines("llama").add([Request(0, 0, [1], 31, (0,))])
    assert engines("llama").unfinished == 0


def test_vllm_is_taken_for_a_gpu_where_it_is_installed_and_missed_when_asked_for(monkeypatch):
    assert [generate.choose_engine("auto", device) for device in ("cpu", "cuda:1")] == ["torch", "vllm"]
    assert generate.choose_engine("vllm", "cpu") == "vllm" and generate.choose_engine("torch", "cuda:0") == "torch"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert generate.choose_engine("auto", "cuda:1") == "torch"
    with pytest.raises(ValueError, match="not installed; `pip install -r requirements-vllm.txt`"):
        generate.choose_engine("vllm", "cpu")
    with pytest.raises(ValueError, match="not installed"):
        train.prepare(train.Settings(engine="vllm"))


def test_what_vllm_cannot_do_is_said_in_one_sentence(models, wide_models, monkeypatch):
    def message(folder, slots=8, **changes):
        settings = GeneratorSettings(folder, ("cpu",), "float32", 1, slots, rules(folder, **changes), "vllm")
        with pytest.raises(generate.NoEngine) as caught:
            generate.make_engine(settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "takes heads of 32, 64, " in (text := message(models["llama"])) and "have 16" in text
    assert "greater than the derived max_model_len" in message(wide_models["llama"], thinking_budget=1000)
    large = message(wide_models["llama"], slots=300_000, thinking_budget=200)
    assert "do not fit beside the model: lower --slots" in large
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "cannot be imported" in (text := message(wide_models["llama"])) and "requirements-vllm" in text
    model, _ = load(wide_models["llama"])
    with pytest.raises(ValueError, match="4 attention heads cannot be split over 3"):
        generate.check_tensor_parallel("vllm", 3, model)
    with pytest.raises(ValueError, match="only vLLM splits"):
        generate.check_tensor_parallel("torch", 2, model)


# --- the process, and several devices -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind, devices", [("qwen3-moe", 1), ("llama", 2)])
def test_a_generator_process_with_experts_or_with_tensor_parallelism(wide_models, kind, devices):
    """Samples, takes updates, validates, stops: with the parameters of a mixture of experts, and with a model split
    over two workers."""
    model, tokenizer = load(wide_models[kind])
    shared = SharedParameters(model)
    shared.write(model.named_parameters(), 0)
    context = multiprocessing.get_context("spawn")
    work, reports = context.Queue(), context.Queue()
    settings = GeneratorSettings(
        wide_models[kind], ("cpu",) * devices, "float32", 1, 0, rules(wide_models[kind]), "vllm", most_slots=8
    )
    arguments = (3, settings, shared, work, reports)
    process = context.Process(target=generate.generator_process, args=arguments, daemon=devices == 1)
    process.start()
    try:
        report = reports.get(timeout=120)  # ready
        assert report.error is None and report.slots == 8
        wanted = requests(tokenizer, PROMPTS, 1, thinking=9)
        for version in (1, 2):
            changed(shared, model, version)
            work.put(Work(wanted, validation=version == 2))
            rollouts = []
            while len(rollouts) < len(wanted):
                report = reports.get(timeout=60)
                assert report.error is None and report.validation == (version == 2)
                rollouts += report.rollouts
            assert {v for r in rollouts for v in r.versions.tolist()} == {version}
            assert all(follows(r, model, model, 0, kept=0) for r in rollouts)
        work.put(Work(stop=True))
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


# --- whole runs ---------------------------------------------------------------------------------------------------


def test_both_engines_have_the_same_pass_rate(tmp_path):
    """mean@16 of the base model on 128 problems: within 4 standard deviations of a difference of two shares."""
    rates = {}
    for engine in ("torch", "vllm"):
        log = tmp_path / f"{engine}.jsonl"
        assert generate.main(["--evaluate", "--engine", engine, "--log", str(log)]) == 0
        rates[engine] = json.loads(log.read_text())["pass_rate"]
    share = np.mean(list(rates.values()))
    assert 0.05 < share < 0.3
    assert abs(rates["torch"] - rates["vllm"]) < 4 * np.sqrt(2 * share * (1 - share) / (128 * 16))


def test_a_whole_short_run_with_vllm_learns(tmp_path):
    """Asynchronous, with an update after each step; generator and trainer agree at every validation."""
    folder, _ = run(
        tmp_path, "--engine", "vllm", "--steps", "24", "--prompts-per-step", "16", "--completions-per-prompt", "8",
        "--learning-rate", "5e-4", "--train-prompts", "2000", "--validation-every", "8", "--validation-problems", "64",
        "--validation-samples", "4", "--slots", "128",
    )  # fmt: skip
    steps, validations = lines(folder, "train"), lines(folder, "validation")
    assert len(steps) == 24 and max(line["off_policyness_max"] for line in steps) in range(1, 9)
    assert all(line["mismatch_max"] < 1e-4 for line in validations)
    assert validations[-1]["pass_rate"] > validations[0]["pass_rate"] + 0.2
