"""Who imports whom: scripts and tools -> machinery -> core -> curve, loss, data. No circle."""

import ast
import graphlib

from faults import ROOT, SOURCES

# A room may import itself and rooms of a lower level. The other scripts may import all of these.
LEVELS = {"loss": 0, "curve": 0, "data": 0, "core": 1, "machinery": 2, "fit_curve": 2, "tools": 3}
FILES = {}  # by the names of modules
for path in SOURCES:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] not in ("tests", "docs", "benchmarks"):
        FILES[".".join(parts).removesuffix(".__init__")] = path


def imports(source: str) -> set[str]:
    """The modules of the project that this source imports, anywhere in it, with the packages around
    them."""
    named = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return named & {*FILES}


def test_a_room_imports_only_what_is_below_it_and_there_is_no_circle():
    graph = {name: imports(path.read_text()) for name, path in FILES.items()}
    assert {"core.feed", "loss"} <= graph["machinery.run"]
    for module, imported in graph.items():
        room = module.partition(".")[0]
        for other in {name.partition(".")[0] for name in imported} - {room}:
            assert LEVELS.get(other, 4) < LEVELS.get(room, 4), f"{module} imports {other}"
    others = {module: imported - {module} for module, imported in graph.items()}
    graphlib.TopologicalSorter(others).prepare()  # it raises CycleError
