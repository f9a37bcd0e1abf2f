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


def test_size_counts_tokens_and_words(modules):
    size = modules["size"]
    code = '"""A text."""\n\n# why\nx = f(f"{1}{2:{w}}", "a")  # here\n'
    assert size.tokens_of(code) == 9  # the docstring, x = f ( 1 , "a" )
    assert size.words_of("one two\n```\ncode\n```\n") == 2
