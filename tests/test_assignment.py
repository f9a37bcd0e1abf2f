"""The assignment of the lessons: its tests pass our own code, and fail the stubs and typical
mistakes."""

from types import SimpleNamespace

import numpy as np
import pytest
from faults import python

from docs.lessons.assignment import test_recipe
from docs.lessons.assignment.test_recipe import Ours

# By what they leave out.
MISTAKES = {
    "zero_variance": lambda rewards, usable: Ours.zero_variance(rewards, usable | True),
    "advantages": lambda r, counted, norm: Ours.advantages(r, counted | True, norm) * counted,
    "token_weights": lambda n, counted, by: Ours.token_weights(n, counted | True, by) * counted,
    "cispo": lambda new, old, sampled, *others: Ours.cispo(new, old, sampled | True, *others),
    # Where the ratio is infinite, and is not cut before the exponential, the loss is no number.
    "clipped": lambda new, old, *others: (
        Ours.clipped(new, old, *others) * (new - old).exp() / (new - old).exp()
    ),
    "sequence_ratio": lambda new, old, sampled: ((new - old) * sampled).mean(1).exp(),
    "interrupt_or_truncate": lambda n, *others: Ours.interrupt_or_truncate(n - 1, *others),
    "choose_batch": lambda done, _, *others: Ours.choose_batch(done, [], *others),
    "sample_in_flight": lambda new, sample, _, *others: Ours.sample_in_flight(
        new, sample, [], *others
    ),
    "fit_sigmoid": lambda x, y: Ours.fit_sigmoid(x, np.append(0.0, y[1:])),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_our_own_code_passes_and_a_mistake_fails(name):
    test = getattr(test_recipe, f"test_{name}")
    test(Ours)
    with pytest.raises(AssertionError):
        test(SimpleNamespace(**{name: MISTAKES[name]}))


def test_the_command_of_the_page_fails_every_stub():
    folder = "docs/lessons/assignment"
    ended = python("-m", "pytest", folder, RECIPE=f"{folder}/stubs.py")
    assert "10 failed" in ended.stdout and "passed" not in ended.stdout, ended.stdout
