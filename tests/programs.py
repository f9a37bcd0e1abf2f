"""Tables, as the tests of problems and of the sandbox read them, and problems for programs."""

from pathlib import Path

from data.tasks import programming

IN_AND_OUT = programming.problem(
    "Add.", [{"type": "stdin_stdout", "input": "41 1\n", "output": "42\n"}]
)
CALLED = programming.problem("Add.", {"inputs": [[41, 1]], "outputs": [[42]], "fn_name": "add"})


def rows(table: str) -> list[list[str]]:
    """The cells of each line, between which | stands."""
    return [[*map(str.strip, line.split(" |"))] for line in table.strip().split("\n")]


def read_programs(name: str) -> dict[str, dict[str, str]]:
    """The programs of a file beside this one by their groups (===) and names (---)."""
    groups = Path(__file__).with_name(name).read_text(encoding="utf-8").split("=== ")[1:]
    tables = {}
    for group in groups:
        title, *programs = group.split("\n--- ")
        tables[title] = dict(program.split("\n", 1) for program in programs)
    return tables


def block(program: str) -> str:
    """A completion whose program this is."""
    return f"Thinking.</think>Here it is:\n```python\n{program}\n```\nThat is all."
