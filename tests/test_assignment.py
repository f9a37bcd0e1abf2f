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

import loss
from curve.fit import fit_sigmoid
from docs.lessons.assignment import test_recipe
from loss import Recipe

ROOT = Path(__file__).parent.parent


def cispo(logprobs_BT, generator_BT, sampled_BT, advantages_B, eps_max):
    recipe = Recipe(loss="cispo", eps_max=eps_max)
    return loss.token_terms(recipe, logprobs_BT, generator_BT, sampled_BT, advantages_B)[0]


def clipped(logprobs_BT, generator_BT, sampled_BT, advantages_B, low, high):
    recipe = Recipe(loss="dapo", eps_low=low, eps_high=high)
    return loss.token_terms(recipe, logprobs_BT, generator_BT, sampled_BT, advantages_B)[0]


def exp_before_the_cut(logprobs_BT, generator_BT, sampled_BT, advantages_B, low, high):
    rho_BT = torch.where(sampled_BT, logprobs_BT - generator_BT, 0.0).exp()
    A_B1 = advantages_B[:, None] * sampled_BT
    return torch.minimum(rho_BT * A_B1, rho_BT.clamp(1 - low, 1 + high) * A_B1)


def sequence_ratio(logprobs_BT, generator_BT, sampled_BT):
    log_rho_BT = torch.where(sampled_BT, logprobs_BT - generator_BT, 0.0)
    return loss.sequence_log_ratios(log_rho_BT, sampled_BT)[:, 0].exp()


def length_control(*given):
    return tuple(map(bool, loss.interrupt_or_truncate("interruption", *map(np.array, given))))


def choose_batch(done, unfinished, version, k, prompts):
    return loss.choose_batch(done, unfinished, version, f"pipeline-{k}", prompts)


def in_flight(newest, sample, prompt, end, budget):
    tokens, logprobs, versions = [], [], []
    while len(tokens) < budget and end not in tokens:
        version, parameters = newest()
        token, logprob = sample(parameters, prompt + tokens)
        tokens.append(token)
        logprobs.append(logprob)
        versions.append(version)
    return tokens, logprobs, versions


def curve(compute_n, pass_rate_n):
    fit = fit_sigmoid(compute_n, pass_rate_n)
    return fit.A, fit.B, fit.C_mid


# For each function ours, and ours with a mistake.
FUNCTIONS = {
    "zero_variance": (
        loss.zero_variance,
        lambda rewards, usable: torch.where(usable, rewards, 0).std(1) == 0,
    ),
    "advantages": (
        lambda rewards, counted, norm: loss.advantages(rewards, counted, counted, norm),
        lambda rewards, counted, norm: loss.advantages(rewards, counted | True, counted, norm),
    ),
    "token_weights": (
        loss.token_weights,
        lambda lengths, counted, name: loss.token_weights(lengths, counted | True, name) * counted,
    ),
    "cispo": (cispo, lambda *given: cispo(*given[:2], given[2] | True, *given[3:])),
    "clipped": (clipped, exp_before_the_cut),
    "sequence_ratio": (
        sequence_ratio,
        lambda *given: ((given[0] - given[1]) * given[2]).mean(1).exp(),
    ),
    "interrupt_or_truncate": (
        length_control,
        lambda sampled, *others: length_control(sampled - 1, *others),
    ),
    "choose_batch": (choose_batch, lambda done, _, *others: choose_batch(done, [], *others)),
    "sample_in_flight": (
        in_flight,
        lambda newest, sample, _, *others: in_flight(newest, sample, [], *others),
    ),
    "fit_sigmoid": (curve, lambda x, y: curve(x, np.append(0.0, y[1:]))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_our_own_code_passes_and_a_mistake_fails(name):
    test = getattr(test_recipe, f"test_{name}")
    marks = getattr(test, "pytestmark", [])
    cases = [{marks[0].args[0]: value} for value in marks[0].args[1]] if marks else [{}]
    ours, mistaken = (SimpleNamespace(**{name: function}) for function in FUNCTIONS[name])
    for case in cases:
        test(ours, **case)
    with pytest.raises(AssertionError):
        for case in cases:
            test(mistaken, **case)


def test_the_command_of_the_page_fails_every_stub():
    command = [sys.executable, "-m", "pytest", "docs/lessons/assignment"]
    stubs = {"RECIPE": "docs/lessons/assignment/stubs.py"}
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | stubs, capture_output=True, text=True
    )
    assert "15 failed" in ended.stdout and "passed" not in ended.stdout, ended.stdout
