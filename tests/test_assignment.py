"""The assignment of the lessons: its tests pass our own code, and fail the stubs and typical
mistakes."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from docs.lessons.assignment import test_recipe
from docs.lessons.assignment.test_recipe import Ours

ROOT = Path(__file__).parent.parent


def exp_before_the_cut(logprobs_BT, generator_BT, sampled_BT, advantages_B, low, high):
    rho_BT = torch.where(sampled_BT, logprobs_BT - generator_BT, 0.0).exp()
    A_B1 = advantages_B[:, None] * sampled_BT
    return torch.minimum(rho_BT * A_B1, rho_BT.clamp(1 - low, 1 + high) * A_B1)


def truncated_in_the_mean(rewards, counted, norm):
    return Ours.advantages(rewards, counted | True, norm) * counted


def filtered_in_the_denominator(lengths, counted, aggregation):
    return Ours.token_weights(lengths, counted | True, aggregation) * counted


def forced_tokens_have_a_term(logprobs, generator, sampled, *others):
    return Ours.cispo(logprobs, generator, sampled | True, *others)


def without_the_prompt(newest, sample, _, *others):
    return Ours.sample_in_flight(newest, sample, [], *others)


MISTAKES = {
    "zero_variance": lambda rewards, usable: torch.where(usable, rewards, 0).std(1) == 0,
    "advantages": truncated_in_the_mean,
    "token_weights": filtered_in_the_denominator,
    "cispo": forced_tokens_have_a_term,
    "clipped": exp_before_the_cut,
    "sequence_ratio": lambda new, old, sampled: ((new - old) * sampled).mean(1).exp(),
    "interrupt_or_truncate": lambda n, *others: Ours.interrupt_or_truncate(n - 1, *others),
    "choose_batch": lambda done, _, *others: Ours.choose_batch(done, [], *others),
    "sample_in_flight": without_the_prompt,
    "fit_sigmoid": lambda x, y: Ours.fit_sigmoid(x, np.append(0.0, y[1:])),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_our_own_code_passes_and_a_mistake_fails(name):
    test = getattr(test_recipe, f"test_{name}")
    test(Ours)
    with pytest.raises(AssertionError):
        test(SimpleNamespace(**{name: MISTAKES[name]}))


def test_the_command_of_the_page_fails_every_stub():
    command = [sys.executable, "-m", "pytest", "docs/lessons/assignment"]
    stubs = {"RECIPE": "docs/lessons/assignment/stubs.py"}
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | stubs, capture_output=True, text=True
    )
    assert "10 failed" in ended.stdout and "passed" not in ended.stdout, ended.stdout
