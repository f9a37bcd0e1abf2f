"""The drawing of the pipeline is what its script makes, and names what there is."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from docs import pipeline

ROOT = Path(__file__).parent.parent
ROOMS = ("", "core", "data", "machinery")


def test_the_drawing_is_that_of_its_script():
    assert pipeline.PICTURE.read_text() == pipeline.picture()


def test_the_files_and_functions_that_it_names_exist():
    drawing = ElementTree.fromstring(pipeline.picture())
    words = " ".join(drawing.itertext())
    files = {*re.findall(r"[\w/]+\.py", words)}
    assert len(files) >= 6
    code = ""
    for file in files:
        (path,) = [ROOT / room / file for room in ROOMS if (ROOT / room / file).exists()]
        code += path.read_text()
    functions = {*re.findall(r"\((\w+_\w+|publish)\)", words)}
    assert functions == {"groups_ahead", "choose_batch", "publish", "read_into"}
    for name in functions:
        assert f"def {name}(" in code


def test_it_is_light_and_dark_and_every_text_has_a_colour_in_both():
    """Each class of the style that has a colour has another one in the dark, or stays readable on
    both: the squares of tokens do."""
    light, dark = pipeline.STYLE.split("@media (prefers-color-scheme: dark)")
    coloured = {*re.findall(r"\.([\w-]+) \{ [^}]*fill: #", light)}
    assert coloured - {*re.findall(r"\.([\w-]+) \{", dark)} == {"older", "newer"}
    used = {*re.findall(r'class="([^"]+)"', pipeline.picture())}
    assert used <= coloured | {"title", "arrow"}
