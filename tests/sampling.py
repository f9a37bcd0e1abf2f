"""What tests of sampling share: models and requests to sample, and what plain forwards say of the
rollouts."""

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import time

import numpy as np
import pytest
import torch

import generate
from core import generators
from core.engine import Decoding, EngineSettings
from core.model import load_model, load_tokenizer, make_decoding, render
from core.rollouts import Request, Rollout, SharedParameters
from core.settings import GenerateCommand, Sampling, parse
from data.tasks import arithmetic

CPU = torch.device("cpu")
# Of the tested engines; benchmarks/gpu.py says a GPU.
DEVICE = os.environ.get("SCALERL_TEST_DEVICE", "cpu")
THINKING, ANSWER = 30, 6
PROMPTS = arithmetic.problems("train", 12)

# A developer's machine may be without vLLM, and then its tests are skipped; in CI (.ci/run sets CI)
# they are not.
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and "CI" not in os.environ,
    reason="vLLM is not installed",
)


def run_generate(arguments: list[str]) -> int:
    """The exit status of `python generate.py` with these arguments, run in this process."""
    return generate.main(parse(arguments, GenerateCommand, generate.__doc__))


def load(folder):
    """The model in a folder, in fp32, and its tokenizer."""
    return load_model(folder), load_tokenizer(folder)


def decoding(tokenizer, **changes) -> Decoding:
    """Small budgets and the markers of this tokenizer, with changes."""
    settings = Sampling(
        prompt_budget=16, thinking_budget=(THINKING, THINKING), answer_budget=ANSWER
    )
    return dataclasses.replace(make_decoding(tokenizer, settings), **changes)


def requests(
    tokenizer, prompts, completions, thinking=THINKING, seed=0, validation=False
) -> list[Request]:
    """Requests for completions of these problems."""
    return [
        Request(i, j, render(tokenizer, problem.prompt), thinking, (seed, i, j), validation)
        for i, problem in enumerate(prompts)
        for j in range(completions)
    ]


def parameters_of(model, version=0) -> SharedParameters:
    """Shared parameters that hold those of a model."""
    shared = SharedParameters(model)
    shared.write(model.named_parameters(), version)
    return shared


def change(shared: SharedParameters, model, version) -> None:
    """Write another version of the parameters, which the model gets too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    shared.write(model.named_parameters(), version)


@contextlib.contextmanager
def generator(settings: EngineSettings, shared: SharedParameters, daemon=True):
    """A generator process and its queues for work and reports; when it is ready."""
    context = multiprocessing.get_context("spawn")
    work, reports = context.Queue(), context.Queue()
    process = context.Process(
        target=generators.generator_process, args=(settings, shared, work, reports), daemon=daemon
    )
    process.start()
    try:
        report = reports.get(timeout=300)
        assert report.error is None and report.slots == settings.slots
        yield process, work, reports
    finally:
        process.kill()


def samples_takes_updates_validates_and_stops(settings: EngineSettings, daemon=True) -> None:
    """Assert that a generator process does."""
    model, tokenizer = load(settings.model)
    shared = parameters_of(model)
    with generator(settings, shared, daemon) as (process, work, reports):
        for version in (1, 2):
            change(shared, model, version)
            validation = version == 2
            wanted = requests(tokenizer, PROMPTS, 2, thinking=9, validation=validation)
            work.put(wanted)
            rollouts, busy, sampled_tokens, events, began = [], 0.0, 0, [], time.monotonic()
            while len(rollouts) < len(wanted):
                report = reports.get(timeout=60)
                assert report.error is None and report.slots is None
                rollouts, busy = rollouts + report.rollouts, busy + report.busy_seconds
                sampled_tokens += report.sampled_tokens
                events += report.events
            # It has waited, and taken this version over.
            assert {version, None} <= {taken for _, _, taken in events}
            assert all(start <= end <= time.monotonic() for start, end, _ in events)
            assert all(
                began <= rollout.began < rollout.ended <= time.monotonic() for rollout in rollouts
            )
            assert sorted(rollout.request.seed for rollout in rollouts) == sorted(
                request.seed for request in wanted
            )
            assert {v for rollout in rollouts for v in rollout.versions.tolist()} == {version}
            assert all(
                largest_error(rollout, plain_logprobs(model, rollout)) < 1e-4
                for rollout in rollouts
            )
            assert sampled_tokens == (
                0 if validation else sum(int(r.sampled.sum()) for r in rollouts)
            )
            assert busy == 0 if validation else busy > 0
        work.put(None)
        process.join(60)
        assert process.exitcode == 0


def plain_logprobs(model, rollout: Rollout, old=None, kept=0) -> np.ndarray:
    """log-probabilities of a rollout's tokens by forwards over the whole sequence. With `old`, keys
    and values of the first `kept` positions are those of the model `old`, which has sampled what
    they lead to."""
    prompt = len(rollout.request.prompt_ids)
    ids = torch.tensor([rollout.request.prompt_ids + rollout.tokens.tolist()])
    with torch.no_grad():
        past = old(input_ids=ids[:, :kept], use_cache=True) if kept else None
        logits = model(
            input_ids=ids[:, kept:], past_key_values=past.past_key_values if kept else None
        ).logits
    if kept:
        logits = torch.cat([past.logits, logits], 1)
    logprobs = torch.log_softmax(logits[0].float(), -1)[prompt - 1 : -1]
    return logprobs.gather(-1, ids[0, prompt:, None])[:, 0].numpy()


def largest_error(rollout: Rollout, expected: np.ndarray, start=0) -> float:
    """The most that the recorded log-probabilities of sampled tokens are off, from completion token
    `start` on."""
    counts = rollout.sampled & (np.arange(len(rollout.tokens)) >= start)
    return float(np.abs(expected - rollout.logprobs)[counts].max(initial=0.0))


def same_frequencies(rollouts: list[Rollout]) -> None:
    """Assert that the first tokens, of one prompt, are as frequent as the recorded probabilities
    say."""
    tokens = np.array([rollout.tokens[0] for rollout in rollouts])
    recorded = {rollout.tokens[0]: float(np.exp(rollout.logprobs[0])) for rollout in rollouts}
    assert len(recorded) > 5 and sum(recorded.values()) == pytest.approx(1.0, abs=0.02)
    for token, probability in recorded.items():
        sd = np.sqrt(probability * (1 - probability) / len(rollouts))
        assert np.mean(tokens == token) == pytest.approx(probability, abs=4.5 * sd)


def ends_as_it_should(rollout: Rollout, rules: Decoding) -> str:
    """Replays a rollout token by token, by the rules in words, and says which way it went."""
    budget, closed, n, interrupted, place = rollout.request.thinking_budget, None, 0, False, 0
    while True:
        if closed is None and n == budget:
            phrase = slice(place, place + len(rules.phrase))
            assert (
                rollout.tokens[phrase].tolist() == list(rules.phrase)
                and not rollout.sampled[phrase].any()
            )
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
    assert (
        place
        == len(rollout.tokens)
        == len(rollout.sampled)
        == len(rollout.logprobs)
        == len(rollout.versions)
    )
    assert rollout.interrupted == interrupted and rollout.truncated == (how == "truncated")
    if interrupted:
        return f"interrupted at {budget}, {how}"
    if closed is None:
        return (
            f"{how} at the budget without closing"
            if n == budget
            else f"{how} before the budget without closing"
        )
    at = "at the budget" if closed == budget else "early"
    return f"closed {at}, {how}{' beyond the budget' if n > budget else ''}"
