"""Who imports whom: scripts and tools -> machinery -> core -> curve, loss, data. No circle."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BELOW = {  # what a room may import of the project, beside itself
    "loss": set(),
    "curve": set(),
    "data": set(),
    "core": {"curve", "loss", "data"},
    "machinery": {"curve", "loss", "data", "core"},
    "tools": {"curve", "loss", "data", "core", "machinery", "fit_curve"},
}
MODULES = {
    path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if not {"tests", "docs", "benchmarks"} & {*path.relative_to(ROOT).parts}
}
NAMES = {*MODULES.values()}


def modules_of(node: ast.AST) -> list[str]:
    """The modules of the project that an import statement names, with the packages around them."""
    if isinstance(node, ast.Import):
        named = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    else:
        return []
    return [name for name in named if name in NAMES]


def imports(source: str) -> set[str]:
    """The modules of the project that this source imports, anywhere in it."""
    return {name for node in ast.walk(ast.parse(source)) for name in modules_of(node)}


GRAPH = {name: imports(path.read_text()) for path, name in MODULES.items()}


def room(module: str) -> str:
    return module.partition(".")[0]


def test_the_graph_sees_imports_of_all_kinds():
    """The control. Also those within functions."""
    source = "import loss\ndef f():\n    from core import feed, rollouts\n    import torch.core\n"
    assert imports(source) == {"loss", "core.feed", "core.rollouts"}
    assert "core.feed" in GRAPH["machinery.run"] and "machinery.run" in GRAPH["train"]
    assert "data.verify" in GRAPH["core.feed"] and len(GRAPH) > 50


@pytest.mark.parametrize("name", BELOW)
def test_a_room_imports_only_what_is_below_it(name):
    for module, imported in GRAPH.items():
        if room(module) == name:
            above = {room(other) for other in imported} - BELOW[name] - {name}
            assert not above, f"{module} imports {', '.join(above)}"


def test_there_is_no_circle():
    graph = {module: imported - {module} for module, imported in GRAPH.items()}
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) >= len(graph)
    circle = {**graph, "loss": {"train"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(circle).prepare()
