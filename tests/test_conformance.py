"""docs/conformance: loss.py gives the vectors, the script makes them, and tools/conform.py finds
what differs."""

import dataclasses
import json
import re
import runpy
from pathlib import Path

import numpy
import pytest
import torch

import loss

FOLDER = Path(__file__).parent.parent / "docs" / "conformance"
CASES = json.loads((FOLDER / "vectors.json").read_text())
NAMED = [pytest.param(case, id=case["name"]) for case in CASES]


def tensors(values):
    return [torch.tensor(numpy.array(value)) for value in values]


def recipe_of(case):
    bounds = {"eps_max": case["high"]}
    if case["loss"] != "cispo":
        bounds = {"eps_low": 1 - case["low"], "eps_high": case["high"] - 1}
    return loss.Recipe(loss=case["loss"], aggregation=case["aggregation"], **bounds)


@pytest.mark.parametrize("case", [each for each in NAMED if "loss" in each.values[0]])
def test_losses_are_the_vectors(case):
    keys = ("logp_train", "logp_gen", "mask", "advantages")
    logp, gen, mask, advantages = tensors(case[key] for key in keys)
    P = len({*case["group"]})
    lengths = mask.sum(1).view(P, -1)
    counted = loss.counted_samples(advantages.view(P, -1), lengths > 0, True)
    recipe = recipe_of(case)
    weights = loss.token_weights(lengths, counted, recipe.aggregation).flatten()
    expected = dict(zip(case["expected"], tensors(case["expected"].values())))

    logp.requires_grad_()
    given = recipe, logp, gen, mask.bool(), advantages
    terms, _, clip = loss.token_terms(*given)
    (coefficient,) = torch.autograd.grad(terms.sum(), logp)
    value, _ = loss.policy_loss(*given, weights)
    (gradient,) = torch.autograd.grad(value, logp)
    found = {
        "coefficient": coefficient,
        "weight": weights[:, None] * mask,
        "clip": clip.long(),
        "gradient": gradient,
        "loss": value.detach(),
    }
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, check_dtype=False)
