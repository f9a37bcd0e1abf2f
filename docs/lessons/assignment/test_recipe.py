"""The points of a hand-in: python -m pytest docs/lessons/assignment"""

import pytest

from docs.lessons.assignment import grader
from docs.lessons.assignment.cases import OPEN


@pytest.fixture(scope="session")
def verdicts(hand_in, chosen):
    cases = {name: OPEN[name] for name in chosen}
    return grader.grade([hand_in], cases)[0]


@pytest.mark.parametrize("name", grader.POINTS)
def test_points(name, verdicts, give_points):
    give_points(name, verdicts[name])
