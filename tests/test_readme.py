"""What README.md and docs/ say of the code is true of the code."""

import dataclasses
import re
from pathlib import Path

import pytest

import fit_curve
import study
import view
from curve.flags import flag
from loss import Recipe
from machinery import imitate
from machinery.settings import GenerateCommand, TrainCommand

ROOT = Path(__file__).parent.parent
TEXTS = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def test_each_part_of_the_recipe_is_where_the_link_says():
    """Links to a function name its file; a line number would be wrong with the next line that is added."""
    links = re.findall(r"\[`(\w+)`\]\((?:\.\./)?([\w/]+\.py)\)", "".join(TEXTS.values()))
    assert len(links) >= 10
    for name, file in links:
        assert re.search(rf"(?m)^(def|class) {name}\b", (ROOT / file).read_text()), f"{name} is not in {file}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_what_is_named_exists(path):
    """Flags, files, and headings that a text links to."""
    kinds = (TrainCommand, Recipe, GenerateCommand, imitate.Command, study.Study, fit_curve.Options, fit_curve.Fitting)
    kinds += (view.View,)
    fields = [field.name for kind in kinds for field in dataclasses.fields(kind)]
    known = {"--help", "--no", *map(flag, fields), *(flag(f"no_{field}") for field in fields)}
    for script in (ROOT / "benchmarks").glob("*.py"):
        known |= {*re.findall(r'"(--[\w-]+)"', script.read_text())}
    for name in {*re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", TEXTS[path])}:
        assert name in known, f"{path.name} names {name}, which no command has"
    without_code = re.sub(r"`[^`\n]*`", "", TEXTS[path])
    for target, place in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", without_code):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {target}"
        if file.suffix == ".md" and place:
            headings = re.findall(r"(?m)^#+ (.+)", file.read_text())
            places = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert place in places, f"{path.name} links to #{place}"
