"""What tests of sampling share: models and requests to sample, and what plain forwards say of the
rollouts."""

import contextlib
import dataclasses
import importlib.util
import os
import time

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import generate
from core.engine import Decoding, EngineSettings
from core.generators import start_generator
from core.model import load_model
from core.rollouts import Request, Rollout, SharedParameters
from core.settings import GenerateCommand, Sampling, parse
from core.text import make_decoding
from docs.make_base import make_tokenizer

# Of the tested engines; benchmarks/gpu.py says a GPU.
DEVICE = os.environ.get("SCALERL_TEST_DEVICE", "cpu")

# A developer's machine may be without vLLM, and then its tests are skipped; in CI (.ci/run sets CI)
# they are not.
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and "CI" not in os.environ,
    reason="vLLM is not installed",
)


def run_generate(arguments: list[str]) -> int:
    """The exit status of `python generate.py` with these arguments, run in this process."""
    return generate.main(parse(arguments, GenerateCommand, generate.__doc__))


def decoding(**changes) -> Decoding:
    """Small budgets and the markers of the arithmetic task's tokenizer, with changes."""
    settings = Sampling(prompt_budget=40, thinking_budget=(30, 30), answer_budget=6)
    return dataclasses.replace(make_decoding(make_tokenizer(), settings), **changes)


def settings_of(folder, name="torch", dtype=torch.float32, slots=48, **changes) -> EngineSettings:
    """What an engine is made of, with these changes of `decoding`."""
    # Many share a GPU.
    return EngineSettings(folder, DEVICE, dtype, 1, slots, decoding(**changes), name, memory=0.05)


def requests(completions, thinking=30, seed=0, validation=False) -> list[Request]:
    """Requests for so many completions of each of twelve prompts, of 2 to 13 tokens."""
    return [
        Request(i, j, [i, 7, *range(i)], thinking, (seed, i, j), validation)
        for i in range(12)
        for j in range(completions)
    ]


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
    model = load_model(settings.model)
    shared = parameters_of(model)
    with contextlib.closing(start_generator(0, settings, shared)) as generator:
        while not [*generator.read_reports(300)]:
            time.sleep(0.01)
        assert generator.slots == settings.slots
        for version in (1, 2):
            change(shared, model, version)
            wanted = requests(2, thinking=9, validation=version == 2)
            rollouts, taken, began = [], [], time.monotonic()
            generator.give(wanted)
            while len(rollouts) < len(wanted):
                for report in generator.read_reports(60):
                    rollouts += report.rollouts
                    taken += [event[2] for event in report.events]
                time.sleep(0.001)
            # It has waited, and taken this version over.
            assert {version, None} <= {*taken}
            assert {rollout.request.seed for rollout in rollouts} == {each.seed for each in wanted}
            for rollout in rollouts:
                assert began <= rollout.began < rollout.ended <= time.monotonic()
                assert (rollout.versions == version).all()
                assert largest_error(rollout, model) < 1e-4
        generator.stop()
        generator.process.join(60)
        assert generator.process.exitcode == 0


def plain_logprobs(rollout: Rollout, model, old=None, kept=0, temperature=1.0) -> np.ndarray:
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
    predicted = logits[0, prompt - 1 : -1] / temperature
    return -cross_entropy(predicted, ids[0, prompt:], reduction="none").numpy()


def largest_error(rollout: Rollout, *of_model, start=0, end=None) -> float:
    """The most that the recorded log-probabilities of sampled tokens are off, of these completion
    tokens. of_model: as in `plain_logprobs`."""
    errors = np.abs(plain_logprobs(rollout, *of_model) - rollout.logprobs)
    return errors[start:end][rollout.sampled[start:end]].max(initial=0.0)


def ends_as_it_should(rollout: Rollout, rules: Decoding) -> tuple:
    """Asserts that a rollout follows the rules, and says which way it went. With the length penalty
    all is answer, and both budgets are one."""
    budget, penalty = rollout.request.thinking_budget, rules.length_control == "penalty"
    thinks, answer = rules.thinks and not penalty, rules.answer_budget + budget * penalty
    chosen, forced = rollout.tokens[rollout.sampled], np.flatnonzero(~rollout.sampled)
    n, ended = len(chosen), chosen[-1] in rules.eos
    # Sampled tokens when thinking ends, by itself or by force, if it comes so far.
    itself = np.flatnonzero(chosen[:budget] == rules.end_of_thinking) + 1
    closed = min([*itself, budget]) if thinks else 0
    interrupted = thinks and n > budget and len(itself) == 0
    assert rollout.interrupted == interrupted and rollout.truncated != ended
    assert forced.tolist() == [*range(budget, budget + len(rules.phrase))] * interrupted
    assert rollout.tokens[forced].tolist() == [*rules.phrase] * interrupted
    assert not rollout.logprobs[forced].any() and (rollout.logprobs[rollout.sampled] < 0).all()
    assert not np.isin(chosen[:-1], rules.eos).any()
    assert n - closed <= answer and (ended or n - closed == answer)
    return ended, interrupted and 1 + budget, np.sign(n - closed), closed == budget, n > budget
