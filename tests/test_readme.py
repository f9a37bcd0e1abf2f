"""What the README says of the code is true of the code."""

import re
from pathlib import Path

import tyro

import generate
import train

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_each_part_of_the_recipe_is_at_the_line_given():
    lines = (ROOT / "loss.py").read_text().splitlines()
    links = re.findall(r"\[`(\w+)`\]\(loss\.py#L(\d+)\)", README)
    assert len(links) >= 10
    for name, number in links:
        assert lines[int(number) - 1].startswith(f"def {name}("), f"{name} is not at line {number} of loss.py"


def test_flags_named_exist(capsys):
    known = (ROOT / "fit_curve.py").read_text() + (ROOT / "tests" / "benchmark.py").read_text()
    for settings in (train.Settings, train.Study, generate.Command):
        try:
            tyro.cli(settings, args=["--help"])
        except SystemExit:
            known += capsys.readouterr().out
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", README)):
        assert flag in known, f"the README names {flag}, which no command has"


def test_files_named_exist():
    for target in re.findall(r"\]\(((?!http)[^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_places_named_within_it_exist():
    headings = {re.sub(r"[^\w -]", "", line.strip("# ").lower()).replace(" ", "-") for line in re.findall(r"(?m)^##+ .+", README)}
    for target in re.findall(r"\]\(#([^)]+)", README):
        assert target in headings, target
