"""docs/conformance: loss.py gives the vectors, their script makes them, and conform.py finds
what differs from them."""

import json
import re
import runpy
import sys
from types import ModuleType

import pytest
import torch
from faults import ROOT
from programs import rows

import loss
from docs.conformance import conform

DOCS = ROOT / "docs"
TEXT = (DOCS / "conformance" / "vectors.json").read_text()
CASES = {case["name"]: case for case in json.loads(TEXT)}
BROKEN = (DOCS / "lessons" / "solutions" / "03-broken.patch").read_text()
ADAPTER = re.search(r"(?s)```python\n(.*?)```", (DOCS / "conformance.md").read_text())[1]
# Of lesson 3: what is wrong, what is right, and what the cases are named that notice it.
MISTAKES = [
    ("clamp(0.8, 6)", "clamp(max=5)", "far"),
    (".mean()", ".sum() / counted.sum()", "cut"),
    ("logp_old", "logp_gen", "old"),
]


@pytest.fixture(autouse=True)
def float64():
    """As conform.py has it, and no longer than a test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def conformed(monkeypatch, capsys):
    """Runs the command on the function `cispo` of this source: its status, and what it says of each
    case."""

    def run(source, cases="cispo"):
        adapter = ModuleType("adapter")
        exec(source, vars(adapter))
        monkeypatch.setitem(sys.modules, "adapter", adapter)
        status = conform.main(["adapter:cispo", "--cases", cases])
        return status, dict(re.findall(r"(?m)^(.*?): (.*)", capsys.readouterr().out))

    return run


def test_the_file_is_what_the_script_makes():
    assert runpy.run_path(str(DOCS / "conformance" / "make_vectors.py"))["make"]() == TEXT
    assert len(CASES) == TEXT.count("\n") + 1


def by_loss_py(case):
    """The loss of a case by the adapter of the page; of a case of norms, the advantages."""
    if "norm" in case:
        rewards = 2 * case["scores"] - 1
        usable = rewards >= -1
        counted = loss.counted_samples(rewards, usable, True)
        return loss.advantages(rewards, usable, counted, case["norm"])
    bounds = {"eps_max": case["high"]}
    if case["loss"] != "cispo":
        bounds = {"eps_low": 1 - case["low"], "eps_high": case["high"] - 1}
    adapter, recipe = {}, f"Recipe(loss={case['loss']!r}, **{bounds})"
    exec(ADAPTER.replace("Recipe()", recipe), adapter)
    value = adapter["cispo"](case)
    assert value.item() == pytest.approx(CASES[case["name"]]["expected"]["loss"])
    return value


@pytest.mark.parametrize("name", CASES)
def test_loss_py_gives_the_vectors(name):
    assert conform.verdict(by_loss_py, **CASES[name]) == "equal"


# What stands in the adapter of the page, and what is put there; the cases; how many are equal; one
# of them, and how what is said of it begins. A gradient of zeros is equal up to no factor. A cap of
# 4 cuts ratios of 4.5 too. The last row has CISPO on the cases of DAPO.
VERDICTS = """
return value | return value | cispo | 24 of 24 | cispo token far cut | equal
return value | return -3 * value | cispo | 0 of 24 | cispo token far cut | equal up to the factor -3
return value | return 0 * value | cispo | 0 of 24 | cispo token far | differs at 72 of 72 numbers
return value | return case["score"] | cispo | 0 of 24 | cispo token far | raised KeyError('score')
return value | return case["logp_train"] | cispo | 0 of 24 | cispo token far | raised \
RuntimeError('grad can be implicitly created only for scalar outputs')
Recipe() | Recipe(eps_max=4.0) | cispo | 2 of 24 | cispo token far | differs at 14 of 72 numbers: \
0 of 22 not trained, 10 of 10 decided by a clip, 4 of 18 others with rho > 1, \
0 of 22 others with rho <= 1
Recipe() | Recipe() | dapo prompt | 1 of 5 | dapo prompt far | differs at 20 of 72 numbers: \
0 of 22 not trained, 18 of 18 decided by a clip, 2 of 15 others with rho > 1, 0 of 17 others
"""


@pytest.mark.parametrize("row", rows(VERDICTS))
def test_conform_says_what_differs(row, conformed):
    old, new, cases, equal, case, said = row
    status, verdicts = conformed(ADAPTER.replace(old, new), cases)
    assert status == (equal != "24 of 24") and verdicts["equal"] == equal
    assert verdicts[case].startswith(said), verdicts[case]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_conform_finds_each_mistake_of_lesson_3_where_the_lesson_says(mistake, conformed):
    source = "".join(re.findall(r"(?m)^\+(?!\+\+)(.*\n)", BROKEN))
    for wrong, right, _ in MISTAKES:
        if wrong != mistake[0]:
            source = source.replace(wrong, right)
    status, verdicts = conformed(source, "cispo token")
    differs = {name for name, verdict in verdicts.items() if verdict.startswith("differs")}
    wrong, right, where = mistake
    assert status and differs == {name for name in verdicts if f" {where}" in name}
    assert not conformed(source.replace(wrong, right), "cispo token")[0]


def test_conform_says_that_there_is_no_such_function(capsys):
    for name in ("nowhere:cispo", "loss:nothing", "my adapter"):
        with pytest.raises(SystemExit, match="2"):
            conform.main([name])
        assert f"{name} is not" in capsys.readouterr().err
