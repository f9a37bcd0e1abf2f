"""What README.md and the other pages say of the code is true of the code."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fit_curve
from core.settings import GenerateCommand, TrainCommand
from curve.columns import Reading
from curve.flags import flag
from docs import forecasts, make_base
from loss import Recipe
from tools import export, imitate, pack, study, view

ROOT = Path(__file__).parent.parent
FILES = (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {path: path.read_text() for path in FILES}
NOT_OURS = {"runs", ".venv"}
CODE = [path for path in ROOT.rglob("*.py") if not NOT_OURS & {*path.relative_to(ROOT).parts}]


def anchors(page: str) -> set[str]:
    """What a link to a heading of this page may have behind its #, as GitHub makes it."""
    text = re.sub(r"(?ms)^```.*?^```", "", page)
    titles = re.findall(r"(?m)^#+ (.+)", text)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_all_links_and_their_headings_exist():
    links = 0
    for path, text in PAGES.items():
        without_code = re.sub(r"`[^`\n]*`", "", text)
        for target, place in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", without_code):
            links += 1
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f"{path.name} links to {target}, which does not exist"
            if place:
                known = anchors(PAGES[file])
                assert place in known, f"{path.name}: {file.name} has no heading #{place}"
    assert links > 100


def test_a_link_to_a_function_names_its_file():
    """A line number would be wrong with the next line that is added."""
    links = 0
    for path, text in PAGES.items():
        for name, file in re.findall(r"\[`(\w+)`\]\(([\w/.]+\.py)\)", text):
            links += 1
            found = re.search(rf"(?m)^(def|class) {name}\b", (path.parent / file).read_text())
            assert found, f"{path.name}: {name} is not in {file}"
    assert links >= 10


def test_all_flags_that_pages_name_exist():
    kinds = [
        *(TrainCommand, Recipe, GenerateCommand, fit_curve.Options, Reading),
        *(imitate.Command, study.Study, view.View, export.Options, pack.Pack),
        *(make_base.Command, forecasts.Command),
    ]
    known = {"--help", "--no", "--all"}
    for kind in kinds:
        for field in dataclasses.fields(kind):
            known |= {flag(field.name), flag(f"no_{field.name}")}
    # Other scripts name their flags to argparse.
    for script in CODE:
        if {"benchmarks", "docs", "tools"} & {*script.relative_to(ROOT).parts}:
            known |= {*re.findall(r'"(--[\w-]+)"', script.read_text())}
    pip_and_git = {"--torch-backend", "--no-deps", "--no-build-isolation", "--nproc_per_node"}
    for path, text in PAGES.items():
        for name in {*re.findall(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]", text)} - pip_and_git:
            assert name in known, f"{path.name} names {name}, which no command has"


def test_all_scripts_and_pages_that_are_named_exist():
    """The scripts that a page runs, and the pages that code names."""
    of_the_reader = {"by_hand.py"}  # which a patch of a lesson makes
    for path, text in PAGES.items():
        for name in {*re.findall(r"python ([\w/]+\.py)", text)} - of_the_reader:
            assert (ROOT / name).exists(), f"{path.name} runs {name}, which does not exist"
    for path in CODE:
        for name in {*re.findall(r"docs/[\w/-]+\.md", path.read_text())}:
            assert (ROOT / name).exists(), f"{path.name} names {name}, which does not exist"


# What a command was called before it stood in tools/, by the room of its file.
OLD_NAMES = [
    ("", "study"),
    ("", "view"),
    ("", "export"),
    ("machinery", "imitate"),
    ("docs", "pack"),
    ("docs", "unpack"),
]


def test_all_modules_that_are_run_by_name_exist():
    """`python -m tools.study`, on pages and in code; and nowhere an old name."""
    named = set()
    for path in (*PAGES, *CODE):
        text = path.read_text()
        for room, name in re.findall(r"python -m (tools|docs|machinery)\.([\w.]+)", text):
            module = ROOT / room / f"{name.replace('.', '/')}.py"
            assert module.exists(), f"{path.name} runs {room}.{name}, which does not exist"
            assert (room, name) not in OLD_NAMES, f"{path.name} runs {room}.{name}, an old name"
            named.add(name)
        assert not re.search(r"python (study|view|export)\.py", text), path.name
    assert {"study", "view", "export", "imitate", "pack", "unpack"} <= named


@pytest.mark.parametrize("room, name", OLD_NAMES)
def test_an_old_name_is_answered_with_the_new_one(room, name):
    script = ["-m", f"{room}.{name}"] if room else [f"{name}.py"]
    command = [sys.executable, *script, "--any"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"error: this command has a new name: python -m tools.{name}\n"


def test_pip_installs_the_same_by_extras_as_by_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for name, ending in (("train", ""), ("vllm", "-vllm"), ("dev", "-dev")):
        file = f"requirements{ending}.txt"
        lines = (ROOT / file).read_text().replace("-r requirements.txt", "scalerl[train]").split()
        assert sorted(extras[name]) == sorted(lines), file
    assert {*extras["curve"]} <= {*extras["train"]}


def test_ci_runs_the_first_commands_as_they_stand():
    """Each of the two makes an environment, and ends with what CI adds its flags to."""
    of_readme = re.findall(r"(?m)^python3 -m venv .+", PAGES[ROOT / "README.md"])
    assert len(of_readme) == 2 and all(" && . .venv/bin/activate && " in line for line in of_readme)
    assert of_readme[0].endswith(" && python train.py")
    assert of_readme[1].endswith(" && python -m pytest")
    ci = (ROOT / ".ci" / "run").read_text()
    assert "grep '^python3 -m venv' README.md" in ci
    flags = {flag for flag in re.findall(r"--[\w-]+", re.search(r"commands\[0\].*", ci)[0])}
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= {
        field.name for field in dataclasses.fields(TrainCommand)
    }


def test_the_warnings_that_are_explained_are_those_of_the_program():
    files = (*ROOT.glob("core/*.py"), *ROOT.glob("machinery/*.py"))
    code = "".join(path.read_text() for path in files)
    said = re.sub(r'"\s*\n\s*f?"', "", code)
    page = (ROOT / "docs" / "help.md").read_text()
    table = page.partition("| warning | meaning |")[2].partition("\n## ")[0]
    words = re.findall(r"(?m)^\| ([^|-]+) \|", table)
    assert len(words) > 9 and not [each for each in words if each not in said]
