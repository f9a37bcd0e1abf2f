"""The engine against plain forwards of the same model, and the parts that cross processes."""

import dataclasses
import json
import multiprocessing
import threading
import time

import numpy as np
import pytest
import torch

import generate
from data import Problem, arithmetic
from data.verify import VerifierPool
from generate import Request, SharedParameters, TorchEngine, Work
from loss import Recipe

CPU = torch.device("cpu")
PROMPT_BUDGET, THINKING, ANSWER = 16, 30, 6


def load(path, dtype=torch.float32, fp32_head=False):
    return generate.load_model(path, CPU, dtype, fp32_head), generate.load_tokenizer(path)


def decoding(tokenizer, thinking=THINKING, answer=ANSWER, **changes):
    made = generate.make_decoding(tokenizer, Recipe(), PROMPT_BUDGET, thinking, answer)
    return dataclasses.replace(made, **changes)


def requests(tokenizer, prompts, completions, thinking=THINKING, seed=0):
    return [
        Request(i, j, generate.render(tokenizer, problem.prompt), thinking, (seed, i, j))
        for i, problem in enumerate(prompts)
        for j in range(completions)
    ]


def plain_logprobs(model, rollout):
    """log-probabilities of a rollout's tokens by one forward over the whole sequence, without a cache."""
    prompt = len(rollout.request.prompt)
    ids = torch.tensor([rollout.request.prompt + rollout.tokens.tolist()])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
    return logprobs[prompt - 1 : -1].gather(-1, ids[0, prompt:, None])[:, 0].numpy()


PROMPTS = arithmetic.problems("train", 12)


@pytest.mark.parametrize("kind", ["llama", "llama-grouped-tied", "qwen3", "qwen3-moe"])
def test_logprobs_match_a_plain_forward(models, kind):
    """Pitfall 1: what is recorded is the log-probability of the distribution sampled from. More requests than slots,
    prompts of several lengths, slots freed and filled at different times."""
    model, tokenizer = load(models[kind])
    wanted = requests(tokenizer, PROMPTS, 4)
    rollouts = generate.sample_all(TorchEngine(model, decoding(tokenizer), slots=10), wanted)
    assert [rollout.request for rollout in rollouts] == wanted
    assert len({len(rollout.tokens) for rollout in rollouts}) > 5
    for rollout in rollouts:
        np.testing.assert_allclose(
            rollout.logprobs[rollout.sampled], plain_logprobs(model, rollout)[rollout.sampled], atol=1e-4
        )


def test_pitfall_1_tokens_are_drawn_from_the_distribution_whose_logprobs_are_recorded(models):
    """First tokens of 4,000 completions of one prompt: their frequencies are the recorded probabilities."""
    model, tokenizer = load(models["llama"])
    wanted = [Request(0, j, [1, 2, 3], 1, (7, j)) for j in range(4000)]
    rollouts = generate.sample_all(TorchEngine(model, decoding(tokenizer, thinking=1, answer=1), 1000), wanted)
    tokens = np.array([rollout.tokens[0] for rollout in rollouts])
    recorded = {rollout.tokens[0]: float(np.exp(rollout.logprobs[0])) for rollout in rollouts}
    assert sum(recorded.values()) == pytest.approx(1.0, abs=0.01)
    for token, probability in recorded.items():
        sd = np.sqrt(probability * (1 - probability) / 4000)
        assert np.mean(tokens == token) == pytest.approx(probability, abs=4.5 * sd)


def test_a_request_is_sampled_alike_in_any_company(models):
    model, tokenizer = load(models["llama"])
    wanted = requests(tokenizer, PROMPTS, 2)
    together = generate.sample_all(TorchEngine(model, decoding(tokenizer), 32), wanted)
    few = generate.sample_all(TorchEngine(model, decoding(tokenizer), 3), wanted[::-1])[::-1]
    for a, b in zip(together, few):
        assert a.tokens.tolist() == b.tokens.tolist()
    other_seed = generate.sample_all(TorchEngine(model, decoding(tokenizer), 32), requests(tokenizer, PROMPTS, 2, seed=1))
    assert [r.tokens.tolist() for r in together] != [r.tokens.tolist() for r in other_seed]


@pytest.mark.parametrize("fp32_logits", [True, False])
def test_bf16_trunk_with_and_without_fp32_logits(models, fp32_logits):
    """The head in fp32 on both sides leaves only what the trunk's own bf16 numerics differ by."""
    for kind in ("llama", "llama-grouped-tied"):
        model, tokenizer = load(models[kind], torch.bfloat16, fp32_head=fp32_logits)
        head = model.get_output_embeddings().weight.detach()
        assert head.dtype == (torch.float32 if fp32_logits else torch.bfloat16)
        assert model.get_input_embeddings().weight.dtype == torch.bfloat16
        engine = TorchEngine(model, decoding(tokenizer, fp32_logits=fp32_logits), 16)
        rollouts = generate.sample_all(engine, requests(tokenizer, PROMPTS[:4], 4))
        for rollout in rollouts:
            ids = torch.tensor([rollout.request.prompt + rollout.tokens.tolist()])
            with torch.no_grad():
                hidden = model.base_model(input_ids=ids).last_hidden_state[0, len(rollout.request.prompt) - 1 : -1]
            dtype = torch.float32 if fp32_logits else torch.bfloat16
            logits = torch.nn.functional.linear(hidden.to(dtype), head.to(dtype)).float()
            expected = torch.log_softmax(logits, -1)[torch.arange(len(rollout.tokens)), rollout.tokens].numpy()
            np.testing.assert_allclose(rollout.logprobs[rollout.sampled], expected[rollout.sampled], atol=0.25)


# --- updates in flight --------------------------------------------------------------------------------------------


def halfway(model, tokenizer, change, wanted, steps=9):
    """Sample with the model, change its parameters after some steps of the engine, and sample on to the end."""
    shared = SharedParameters(model)
    engine = TorchEngine(model, decoding(tokenizer), slots=len(wanted))
    engine.add(wanted)
    rollouts = [rollout for _ in range(steps) for rollout in engine.step()]
    with torch.no_grad():
        for parameter in change.parameters():
            parameter.mul_(1.1)
    shared.write(change.named_parameters(), version=5)
    engine.update(shared)
    assert engine.version == 5
    while engine.unfinished:
        rollouts += engine.step()
    return rollouts


def test_after_an_update_in_flight_tokens_follow_the_new_parameters_over_the_old_cache(models):
    model, tokenizer = load(models["llama"])
    old, new = load(models["llama"])[0], load(models["llama"])[0]
    rollouts = halfway(model, tokenizer, new, requests(tokenizer, PROMPTS, 2))
    mixed = [r for r in rollouts if set(r.versions.tolist()) == {0, 5}]
    assert len(mixed) > 10
    for rollout in mixed:
        prompt, first_new = len(rollout.request.prompt), int((rollout.versions == 0).sum())
        assert first_new == 9 and (rollout.versions == [0] * 9 + [5] * (len(rollout.tokens) - 9)).all()
        ids = torch.tensor([rollout.request.prompt + rollout.tokens.tolist()])
        # Keys and values of everything fed before the update, by the old parameters; the rest by the new ones.
        split = prompt + first_new - 1
        with torch.no_grad():
            before = old(input_ids=ids[:, :split], use_cache=True)
            after = new(input_ids=ids[:, split:], past_key_values=before.past_key_values, use_cache=True)
        logprobs = torch.log_softmax(torch.cat([before.logits, after.logits], 1)[0], -1)
        expected = logprobs[prompt - 1 : -1].gather(-1, ids[0, prompt:, None])[:, 0].numpy()
        np.testing.assert_allclose(rollout.logprobs[rollout.sampled], expected[rollout.sampled], atol=1e-4)
        # The negative control: new parameters over a new cache would be something else.
        wrong = plain_logprobs(new, rollout)[first_new:]
        assert np.abs(wrong - rollout.logprobs[first_new:])[rollout.sampled[first_new:]].max() > 1e-3


def test_pitfall_14_a_request_begun_after_an_update_sees_no_old_cache(models):
    model, tokenizer = load(models["llama"])
    new = load(models["llama"])[0]
    wanted = requests(tokenizer, PROMPTS[:1], 30)  # one prompt, more completions than slots
    shared = SharedParameters(model)
    engine = TorchEngine(model, decoding(tokenizer), slots=4)
    engine.add(wanted)
    rollouts = engine.step()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.1)
    shared.write(new.named_parameters(), version=1)
    engine.update(shared)
    while engine.unfinished:
        rollouts += engine.step()
    begun_after = [r for r in rollouts if r.versions[0] == 1]
    assert len(begun_after) == 26
    for rollout in begun_after:
        expected = plain_logprobs(new, rollout)
        np.testing.assert_allclose(rollout.logprobs[rollout.sampled], expected[rollout.sampled], atol=1e-4)


def test_pitfall_13_readers_get_whole_versions_and_the_newest(models):
    """A writer at full speed writes versions whose parameters all equal the version; no mixture is ever read."""
    model, _ = load(models["llama"])
    reader, _ = load(models["llama"])
    shared = SharedParameters(model)
    assert shared.version == -1
    stop, newest = threading.Event(), [0]

    def write():
        while not stop.is_set():
            newest[0] += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(newest[0])
            shared.write(model.named_parameters(), newest[0])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = []
        for _ in range(60):
            at_least = shared.version
            version = shared.read_into(reader)
            assert version >= at_least
            values = {parameter.unique().item() if parameter.unique().numel() == 1 else None
                      for parameter in reader.parameters()}  # fmt: skip
            assert values == {float(version)}
            seen.append(version)
    finally:
        stop.set()
        writer.join()
    assert len(set(seen)) > 10


def test_pitfall_12_a_writer_that_died_in_the_middle_is_a_time_out_and_not_a_hang(models):
    model, _ = load(models["llama"])
    shared = SharedParameters(model)
    with pytest.raises(TimeoutError, match="no complete version"):
        shared.read_into(model, timeout=0.05)
    shared.write(model.named_parameters(), 3)
    assert shared.read_into(model) == 3
    shared.begun_R[0] = 4
    with pytest.raises(TimeoutError):
        shared.read_into(model, timeout=0.05)


# --- memory -------------------------------------------------------------------------------------------------------


def test_slots_are_as_many_as_fit_beside_the_weights(models, monkeypatch):
    model, tokenizer = load(models["llama-grouped-tied"])
    rules, config = decoding(tokenizer), model.config
    length = rules.prompt_budget + rules.completion_budget
    heads, size = config.num_key_value_heads, config.head_dim
    assert heads < config.num_attention_heads
    sequence = 2 * config.num_hidden_layers * heads * size * length * 2  # bytes, in bfloat16
    weights = 2 * sum(parameter.numel() for parameter in model.parameters()) + 4 * config.vocab_size * config.hidden_size
    model_folder = models["llama-grouped-tied"]
    settings = generate.GeneratorSettings(model_folder, ("cuda:0",), "bfloat16", 1, 0, rules, memory=0.1)
    room_for = lambda slots: weights + slots * 2.5 * sequence  # noqa: E731
    total = 10 * room_for(7.5)
    for free, slots in ((total, 7), (room_for(3.5), 3)):  # a tenth of the device, or what the trainer has left of it
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, total))
        assert generate.slots_that_fit(settings, "cuda:0", reserve=2.5) == slots
        assert generate.slots_that_fit(dataclasses.replace(settings, most_slots=2), "cuda:0", reserve=2.5) == 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (weights + sequence, total))
    with pytest.raises(ValueError, match="has no room for its weights .* and a sequence of .*: raise it, lower"):
        generate.slots_that_fit(settings, "cuda:0", reserve=2.5)


def test_one_completion_takes_one_slot(models):
    model, tokenizer = load(models["llama"])
    settings = generate.GeneratorSettings(models["llama"], ("cpu",), "float32", 1, 0, decoding(tokenizer), most_slots=1)
    engine = generate.make_engine(settings)
    assert engine.slots == 1
    assert len(generate.sample_all(engine, requests(tokenizer, PROMPTS, 1))) == len(PROMPTS)


# --- interruption and ends ----------------------------------------------------------------------------------------


class Scripted:
    """Makes an engine sample given tokens: noise is overruled, everything else is the engine's own."""

    def __init__(self, engine, script):
        self.engine, self.script, self.original = engine, script, engine._sample
        engine._sample = self.sample

    def sample(self, n):
        tokens, logprobs = self.original(n)
        for row in range(n):
            script = self.script[self.engine.requests[row].index]
            at = self.engine.sampled[row]
            tokens[row] = script[at] if at < len(script) else tokens[row]
        return tokens, logprobs


def scripted(models, script, thinking, answer=ANSWER, **changes):
    model, tokenizer = load(models["llama"])
    ids = [[{"e": tokenizer.eos_token_id, "/": 15}.get(c, c) if isinstance(c, str) else c for c in s] for s in script]
    rules = decoding(tokenizer, thinking=max(thinking, 1), answer=answer, **changes)
    engine = TorchEngine(model, rules, 8)
    Scripted(engine, ids)
    wanted = [Request(0, i, [1, 2, 3], thinking, (0, i)) for i in range(len(script))]
    return generate.sample_all(engine, wanted), rules


def test_the_interruption_phrase_is_forced_at_the_budget_and_does_not_count(models):
    (rollout,), rules = scripted(models, [[5] * 4 + [6, 6, "e"]], thinking=4)
    phrase = list(rules.phrase)
    assert rollout.tokens.tolist() == [5] * 4 + phrase + [6, 6, 17]
    assert rollout.sampled.tolist() == [True] * 4 + [False] * len(phrase) + [True] * 3
    assert rollout.interrupted and not rollout.truncated
    assert (rollout.logprobs[4 : 4 + len(phrase)] == 0).all() and (rollout.logprobs[:4] < 0).all()
    model, _ = load(models["llama"])  # the answer's log-probabilities are conditioned on the phrase
    unscripted = plain_logprobs(model, rollout)
    assert np.isfinite(unscripted).all()


@pytest.mark.parametrize("thinking", [0, 1, 5])
def test_interruption_at_any_budget_leaves_the_answer_its_own(models, thinking):
    (rollout,), rules = scripted(models, [[5] * 40], thinking=thinking, answer=3)
    assert rollout.tokens.tolist() == [5] * thinking + list(rules.phrase) + [5] * 3
    assert rollout.interrupted and rollout.truncated
    assert int(rollout.sampled.sum()) == thinking + 3


def test_pitfall_8_a_completion_that_ends_without_closing_is_finished_not_interrupted(models):
    script = [[5, 5, 5, "e"], [5, 5, "e"], [5, 5, 5, 5]]
    rollouts, rules = scripted(models, script, thinking=4)
    for rollout, expected in zip(rollouts[:2], script):
        assert rollout.tokens.tolist() == expected[:-1] + [17]  # EOS as the very last token of the budget, and before
        assert not rollout.interrupted and not rollout.truncated
    assert rollouts[2].interrupted


def test_pitfall_8_thinking_closed_at_the_last_moment_still_has_room_to_answer(models):
    (rollout,), _ = scripted(models, [[5, 5, 5, "/", 6, 6, 6, "e"]], thinking=4, answer=4)
    assert rollout.tokens.tolist() == [5, 5, 5, 15, 6, 6, 6, 17]
    assert not rollout.interrupted and not rollout.truncated and rollout.sampled.all()


def test_an_answer_beyond_its_budget_is_truncated(models):
    (rollout,), _ = scripted(models, [[5, "/", 6, 6, 6, 6, 6]], thinking=4, answer=3)
    assert rollout.tokens.tolist() == [5, 15, 6, 6, 6]
    assert rollout.truncated and not rollout.interrupted


def test_with_the_length_penalty_nothing_is_forced(models):
    (rollout,), _ = scripted(models, [[5] * 40], thinking=4, answer=3, length_control="penalty")
    assert rollout.tokens.tolist() == [5] * 7
    assert rollout.truncated and rollout.sampled.all()


def test_a_truncated_completion_is_never_correct(models):
    _, tokenizer = load(models["llama"])
    tokens = np.array(tokenizer("1+2+0=03</think>3").input_ids + [tokenizer.eos_token_id], np.int32)
    fine = generate.Rollout(Request(0, 0, [1], 9, (0,)), tokens, tokens > -1, tokens * 0.0, tokens * 0, False, False)
    rollouts = [fine, dataclasses.replace(fine, truncated=True), fine]
    texts = [generate.completion_text(tokenizer, decoding(tokenizer), rollout) for rollout in rollouts]
    with VerifierPool(1, 30.0, 4.0) as pool:
        verdicts = generate.judge_all(pool, [Problem("1+2=", "3")], rollouts, texts)
    assert [verdict.correct for verdict in verdicts] == [True, False, True]


# --- chat models --------------------------------------------------------------------------------------------------


def test_a_chat_model_ends_at_any_of_its_eos_tokens_and_starts_as_its_template_says(chat_models):
    """`<think>` is in the prompt, or thinking is over before the model begins: then all of it is answer."""
    model, tokenizer = load(chat_models["qwen3"])
    rules = generate.make_decoding(tokenizer, Recipe(), 100, 30, 6)
    assert rules.eos == tuple(sorted(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])))
    assert rules.thinks and tokenizer.decode(generate.render(tokenizer, "hi")).endswith("assistant\n<think>\n")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<think>\n", "<think>\n{% if not enable_thinking %}\n</think>\n\n{% endif %}"
    )
    assert generate.make_decoding(tokenizer, Recipe(), 100, 30, 6).thinks
    answers = generate.make_decoding(tokenizer, Recipe(), 100, 30, 6, thinking=False)
    ids = generate.render(tokenizer, "What </think> is this?", thinking=False)
    assert not answers.thinks and tokenizer.decode(ids).endswith("</think>\n\n")
    rollouts = generate.sample_all(TorchEngine(model, answers, 8), [Request(0, i, ids, 30, (0, i)) for i in range(8)])
    assert all(len(r.tokens) <= 6 and not r.interrupted for r in rollouts) and any(r.truncated for r in rollouts)


def test_a_marker_of_ones_own_reaches_tasks_as_the_usual_one(models):
    _, tokenizer = load(models["llama"])
    rules = generate.make_decoding(tokenizer, Recipe(), 8, 8, 8, end_of_thinking=";", phrase=";")
    tokens = np.array([*tokenizer("1+2;3").input_ids, tokenizer.eos_token_id], np.int32)
    one = generate.Rollout(Request(0, 0, [1], 9, (0,)), tokens, tokens > -1, tokens * 0.0, tokens * 0, False, False)
    assert generate.completion_text(tokenizer, rules, one) == "1+2</think>3"


# --- requests and settings that cannot be -------------------------------------------------------------------------


def test_pitfall_9_ids_go_through_end_to_end(models):
    """The prompt's ids are the chat template's, and what comes back is the request itself with the sampled ids."""
    model, tokenizer = load(models["llama"])
    ids = generate.render(tokenizer, "12+34=")
    assert tokenizer.decode(ids) == "12+34=<think>"
    (rollout,) = generate.sample_all(TorchEngine(model, decoding(tokenizer), 1), [Request(0, 0, ids, 5, (0,))])
    assert rollout.request.prompt == ids


def test_requests_beyond_the_budgets_are_refused(models):
    model, tokenizer = load(models["llama"])
    engine = TorchEngine(model, decoding(tokenizer), 2)
    with pytest.raises(ValueError, match="17 tokens; the budget is 16"):
        engine.add([Request(0, 0, [1] * 17, 5, (0,))])
    with pytest.raises(ValueError, match="thinking budget of 31"):
        engine.add([Request(0, 0, [1], 31, (0,))])


def test_models_that_cannot_be_used_are_refused_in_one_sentence(models, tmp_path):
    with pytest.raises(ValueError, match="holds no model"):
        generate.load_tokenizer(str(tmp_path))
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="did you mean .*run/model?"):
        generate.load_tokenizer(str(tmp_path / "run"))
    with pytest.raises(ValueError, match="no such folder"):
        generate.load_tokenizer(str(tmp_path / "run" / "other"))
    with pytest.raises(ValueError, match="no such folder"):
        generate.load_model(str(tmp_path / "nothing"), CPU, torch.float32)
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_text("{")
    with pytest.raises(ValueError, match="could not be loaded"):
        generate.load_model(str(broken), CPU, torch.float32)
    with pytest.raises(ValueError, match="could not be loaded"):
        generate.load_tokenizer(str(broken))
    model, tokenizer = load(models["llama"])
    with pytest.raises(ValueError, match="the model holds 256"):
        generate.check_length(model, decoding(tokenizer, thinking=400))
    with pytest.raises(ValueError, match="wants exactly one"):
        generate.make_decoding(tokenizer, Recipe(), 8, 8, 8, end_of_thinking="12")
    with pytest.raises(ValueError, match="does not close thinking"):
        generate.make_decoding(tokenizer, Recipe(), 8, 8, 8, phrase="")
    with pytest.raises(ValueError, match="there is no device 'cuda:7'"):
        generate.check_device("cuda:7")


# --- the process --------------------------------------------------------------------------------------------------


def start(models, kind="llama", **changes):
    model, tokenizer = load(models[kind])
    shared = SharedParameters(model)
    shared.write(model.named_parameters(), 0)
    context = multiprocessing.get_context("spawn")
    work, reports = context.Queue(), context.Queue()
    settings = generate.GeneratorSettings(models[kind], ("cpu",), "float32", 1, 8, decoding(tokenizer))
    settings = dataclasses.replace(settings, **changes)
    process = context.Process(target=generate.generator_process, args=(3, settings, shared, work, reports), daemon=True)
    process.start()
    return model, tokenizer, shared, work, reports, process


def test_a_generator_process_samples_validates_alone_takes_updates_and_stops(models):
    model, tokenizer, shared, work, reports, process = start(models)
    try:
        assert reports.get(timeout=60).generator == 3  # ready
        wanted = requests(tokenizer, PROMPTS, 2)
        shared.write(model.named_parameters(), 1)
        work.put(Work(wanted))
        work.put(Work(wanted[:5], validation=True))
        training, validation, sampled_tokens = [], [], 0
        while len(training) < len(wanted) or len(validation) < 5:
            report = reports.get(timeout=60)
            assert report.error is None
            assert report.validation or not report.rollouts or len(validation) in (0, 5)  # it is sampled alone
            (validation if report.validation else training).extend(report.rollouts)
            sampled_tokens += report.sampled_tokens
        assert sorted(rollout.request.index for rollout in validation) == sorted(r.index for r in wanted[:5])
        assert {v for r in validation + training for v in r.versions.tolist()} == {1}
        assert sampled_tokens == sum(int(r.sampled.sum()) for r in training)
        work.put(Work(stop=True))
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_pitfall_12_an_exception_in_a_generator_travels_with_its_traceback(models):
    *_, work, reports, process = start(models)
    try:
        reports.get(timeout=60)
        work.put(Work([Request(0, 0, [1] * 99, 1, (0,))]))
        report = reports.get(timeout=30)
        assert "99 tokens; the budget is 16" in report.error and "Traceback" in report.error
        process.join(20)
        assert process.exitcode == 1
    finally:
        process.kill()


def _parent_that_dies(folder, ids):
    model = generate.load_model(folder, CPU, torch.float32)
    shared = SharedParameters(model)
    shared.write(model.named_parameters(), 0)
    context = multiprocessing.get_context("spawn")
    work, reports = context.Queue(), context.Queue()
    settings = generate.GeneratorSettings(
        folder, ("cpu",), "float32", 1, 8, decoding(generate.load_tokenizer(folder))
    )
    child = context.Process(target=generate.generator_process, args=(0, settings, shared, work, reports))
    child.start()
    reports.get(timeout=60)
    ids.put(child.pid)
    time.sleep(60)


def test_pitfall_12_a_generator_does_not_outlive_its_trainer(models):
    context = multiprocessing.get_context("spawn")
    ids = context.Queue()
    parent = context.Process(target=_parent_that_dies, args=(models["llama"], ids))
    parent.start()
    child = ids.get(timeout=90)
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _alive(child):
        time.sleep(0.1)
    assert not _alive(child)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_prints_completions_and_mean_at_k(capsys, tmp_path):
    assert generate.main(["--prompt", "4729+8153=", "--samples", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("4729+8153=") for line in lines)
    log = tmp_path / "evaluations.jsonl"
    assert generate.main(["--evaluate", "--problems", "10", "--samples", "4", "--log", str(log)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(log.read_text())
    assert "10 problems, 4 completions of each" in printed and f"mean@4    {figures['pass_rate']:.3f}" in printed
    assert figures["num_examples"] == 40 and figures["pass@4"] >= figures["pass_rate"] > 0
    assert figures["pass@4_low"] <= figures["pass@4"] <= figures["pass@4_high"]
    assert generate.main([]) == 2
    assert "either --prompt TEXT or --evaluate" in capsys.readouterr().err
    assert generate.main(["--prompt", ""]) == 2
    assert generate.main(["--prompt", "1+1=", "--slots", str(10**9)]) == 2
    assert "error: out of memory" in (error := capsys.readouterr().err) and "lower --slots" in error
    assert generate.main(["--prompt", "1+1=", "--generator-memory", "1e-9"]) == 2
    assert "the share of a generator, 1e-09 (--generator-memory)" in capsys.readouterr().err
    for flag, value in (("--slots", "-1"), ("--samples", "0"), ("--problems", "0")):
        assert generate.main(["--evaluate", flag, value]) == 2
        assert f"{flag} is {value}" in capsys.readouterr().err
    assert generate.main(["--model", "no/such", "--evaluate"]) == 2
    assert "no such folder" in capsys.readouterr().err
