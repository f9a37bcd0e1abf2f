"""The page that shows one batch is what its script makes now."""

import re

import pytest

from docs import walkthrough

NUMBER = r"-?\d+\.\d+"


def test_every_line_of_the_page_is_made_again_with_its_numbers():
    """Numbers to a few per cent: other processors round differently, and eight optimizer steps lie
    between. A new loss adds lines."""
    made = iter(walkthrough.page().splitlines())
    for line in walkthrough.PAGE.read_text().splitlines():
        words = re.sub(NUMBER, "#", line)
        again = next((new for new in made if re.sub(NUMBER, "#", new) == words), None)
        assert again is not None, f"not made again: {line}"
        old, new = ([*map(float, re.findall(NUMBER, text))] for text in (line, again))
        assert new == pytest.approx(old, rel=0.05, abs=0.003)
