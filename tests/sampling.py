"""What tests of sampling share: models and requests to sample, and what plain forwards say of the
rollouts."""

import dataclasses
import importlib.util
import os
import time

import numpy as np
import pytest
import torch

import generate
from core.engine import Decoding, EngineSettings
from core.generators import start_generator
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
    tokenizer, prompts, completions, thinking=THINKING, seed=0, validation=False, groups_from=0
) -> list[Request]:
    """Requests for completions of these problems."""
    made = []
    for i, problem in enumerate(prompts):
        ids = render(tokenizer, problem.prompt)
        for j in range(completions):
            group, noise = groups_from + i, (seed, i, j)
            made.append(Request(group, j, ids, thinking, noise, validation))
    return made


def finish(engine) -> list[Rollout]:
    """What an engine still returns until nothing is unfinished."""
    rollouts = []
    while engine.unfinished:
        rollouts += engine.step()
    return rollouts


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


def samples_takes_updates_validates_and_stops(settings: EngineSettings) -> None:
    """Assert that a generator process does."""
    model, tokenizer = load(settings.model)
    shared = parameters_of(model)
    generator = start_generator(0, settings, shared)
    try:
        while not generator.slots:
            assert generator.read_reports(300) or not time.sleep(0.01)
        assert generator.slots == settings.slots
        for version in (1, 2):
            change(shared, model, version)
            validation = version == 2
            wanted = requests(tokenizer, PROMPTS, 2, thinking=9, validation=validation)
            reports, rollouts, began = [], [], time.monotonic()
            generator.give(wanted)
            while len(rollouts) < len(wanted):
                reports += generator.read_reports(60)
                rollouts = [rollout for report in reports for rollout in report.rollouts]
                time.sleep(0.001)
            # It has waited, and taken this version over.
            assert {version, None} <= {taken for each in reports for _, _, taken in each.events}
            assert {rollout.request.seed for rollout in rollouts} == {each.seed for each in wanted}
            for rollout in rollouts:
                assert began <= rollout.began < rollout.ended <= time.monotonic()
                assert (rollout.versions == version).all()
                assert largest_error(rollout, plain_logprobs(model, rollout)) < 1e-4
            sampled = sum(int(rollout.sampled.sum()) for rollout in rollouts)
            assert sum(report.sampled_tokens for report in reports) == sampled * (not validation)
            assert (sum(report.busy_seconds for report in reports) > 0) != validation
        generator.stop()
        generator.process.join(60)
        assert generator.process.exitcode == 0
    finally:
        generator.close()


def plain_logprobs(model, rollout: Rollout, old=None, kept=0, temperature=1.0) -> np.ndarray:
    """log-probabilities of a rollout's tokens by forwards over the whole sequence. With `old`, keys
    and values of the first `kept` positions are those of the model `old`, which has sampled what
    they lead to."""
    prompt = len(rollout.request.prompt_ids)
    ids = torch.tensor([rollout.request.prompt_ids + rollout.tokens.tolist()])
    with torch.no_grad():
        if kept:
            past = old(input_ids=ids[:, :kept], use_cache=True)
            new = model(input_ids=ids[:, kept:], past_key_values=past.past_key_values)
            logits = torch.cat([past.logits, new.logits], 1)
        else:
            logits = model(input_ids=ids).logits
    logprobs = torch.log_softmax(logits[0].float() / temperature, -1)[prompt - 1 : -1]
    return logprobs.gather(-1, ids[0, prompt:, None])[:, 0].numpy()


def largest_error(rollout: Rollout, expected: np.ndarray, start=0) -> float:
    """The most that the recorded log-probabilities of sampled tokens are off, from completion token
    `start` on."""
    counts = rollout.sampled & (np.arange(len(rollout.tokens)) >= start)
    return float(np.abs(expected - rollout.logprobs)[counts].max(initial=0.0))


def ends_as_it_should(rollout: Rollout, rules: Decoding) -> tuple:
    """Replays a rollout token by token, by the rules in words, and says which way it went. With the
    length penalty all is answer, and both budgets are one."""
    budget, answer = rollout.request.thinking_budget, rules.answer_budget
    closed, n, interrupted, place, how = None if rules.thinks else 0, 0, False, 0, None
    if rules.length_control == "penalty":
        closed, answer = 0, budget + answer
    while how is None:
        if closed is None and n == budget:
            phrase = slice(place, place + len(rules.phrase))
            assert rollout.tokens[phrase].tolist() == list(rules.phrase)
            assert not rollout.sampled[phrase].any() and not rollout.logprobs[phrase].any()
            interrupted, closed, place = True, n, phrase.stop
        if closed is not None and n - closed == answer:
            how = "truncated"
            break
        assert rollout.sampled[place] and rollout.logprobs[place] < 0
        token, n, place = rollout.tokens[place], n + 1, place + 1
        if token in rules.eos:
            how = "ended"
        elif token == rules.end_of_thinking and closed is None:
            closed = n
    arrays = (rollout.tokens, rollout.sampled, rollout.logprobs, rollout.versions)
    assert {len(array) for array in arrays} == {place}
    assert rollout.interrupted == interrupted and rollout.truncated == (how == "truncated")
    if closed is None:
        return "not closed", n == budget
    return how, interrupted and 1 + budget, closed == budget, n > budget
