"""What README.md and the other pages say of the code is true of the code."""

import re

import pytest
from faults import ROOT, SOURCES

FILES = (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {path: path.read_text() for path in FILES}
CODE = {path: path.read_text() for path in SOURCES}


def anchors(page: str) -> set[str]:
    """What a link to a heading of this page may have behind its #, as GitHub makes it."""
    text = re.sub(r"(?ms)^```.*?^```", "", page)
    titles = re.findall(r"(?m)^#+ (.+)", text)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_links_exist_and_one_to_a_function_names_its_file(path):
    """A line number would be wrong with the next line that is added."""
    text = re.sub(r"(?ms)^```.*?^```", "", PAGES[path])
    for words, target, place in re.findall(r"\[([^\]]*)\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"there is no {target}"
        assert not place or place in anchors(PAGES[file]), f"{target} has no heading #{place}"
        for name in re.findall(r"`(?!\w+\.py)(?:\w+\.)?(\w+)`", words) if file in CODE else ():
            defined = re.search(rf"(?m)^ *(def|class) {name}\b|^{name} = ", CODE[file])
            assert defined, f"{name} is not in {target}"


def test_all_flags_that_pages_name_exist():
    """A flag is a field of a dataclass, as `option` gives it its help, or named to argparse."""
    code = "".join(CODE.values())
    fields = re.findall(r"(?m)^    (\w+): [^\n]+=", code)
    known = {f"--{no}{name.replace('_', '-')}" for name in fields for no in ("", "no-")}
    known |= {"--help", "--no", *re.findall(r'"(--[a-z][\w-]*)"', code)}
    of_others = {"--torch-backend", "--no-deps", "--check", "--bf16"}
    for path, text in PAGES.items():
        named = {*re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?!\w)", text)}
        assert not named - known - of_others, path.name


def test_all_scripts_pages_and_modules_that_are_named_exist():
    text = "".join((PAGES | CODE).values())
    named = {
        *re.findall(r"(?:python (?!runs/)|\b(?=docs/[a-z_-]+\.md))(\w[\w/-]*\.(?:py|md))", text)
    }
    modules = re.findall(r"python -m ((?:tools|docs|machinery|benchmarks)\.[\w.]+\w)", text)
    named |= {f"{module.replace('.', '/')}.py" for module in modules}
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == ["by_hand.py"]  # which a patch of a lesson makes
    drawing = (ROOT / "docs" / "pictures" / "pipeline.svg").read_text()
    for file in {*re.findall(r"[\w/]+\.py", drawing)}:
        assert any(path.match(file) for path in CODE), file
