"""benchmarks/: that each finds what it imports, the first steps of gpu.py, and the counter of
size.py."""

import importlib
import sys

import pytest
from faults import ROOT

NAMES = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """All benchmarks by name. gpu.py reads its flags when it is imported."""
    flags = ["--small", "--device", "cpu", "--out", str(tmp_path_factory.mktemp("gpu"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu.py", *flags])
        return {name: importlib.import_module(name) for name in NAMES}


def test_gpu_writes_what_it_sees_at_once(modules):
    gpu = modules["gpu"]
    for step in (gpu.machine, gpu.locked_memory, gpu.attention):
        step()
        table = (gpu.OUT / "table.md").read_text()
    assert "| wrong copies of 20 | 0 | 0 |" in table and table.count("kernel") == 2
    assert all(step in vars(gpu) for step in gpu.LIMITS)


def test_size_counts_tokens_and_names_what_is_too_large(modules, monkeypatch):
    size = modules["size"]
    code = '"""A text."""\n\n# why\nx = f(f"{1}{2:{w}}", "a")  # here\n'
    assert size.tokens_of(code) == 9  # the docstring, x = f ( 1 , "a" )
    long = "def f(a, b, c, d, e, f, g, *, h):\n" + "    a = b\n" * 61
    files = {"core/a.py": long, "tests/a.py": long, "README.md": "one two\n```\ncode\n```\n"}
    rooms, sizes, broken = size.measure(files)
    assert rooms["core"] == rooms["tests"] and sizes["words of pages"] == 2
    assert broken == ["core/a.py: the body of f has 61 lines", "core/a.py: f has 8 arguments"]
    monkeypatch.setitem(size.AIMS, "what a user runs", 1000)
    assert not size.measure({"data/a.py": "f(1, 2, 3, 4)\n\n" * 104})[2]
    _, _, broken = size.measure({"data/a.py": "x = f(1, 2, 3)\n" * 105})
    assert broken[0] == "data has 10.0 tokens a line" and "1,050, at most 1,040" in broken[1]
