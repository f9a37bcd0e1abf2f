"""Tables, as the tests of problems and of the sandbox read them, and problems for programs."""

from pathlib import Path

from data.tasks import programming

IN_AND_OUT = programming.problem(
    "Add.", [{"type": "stdin_stdout", "input": "41 1\n", "output": "42\n"}]
)
CALLED = programming.problem("Add.", {"inputs": [[41, 1]], "outputs": [[42]], "fn_name": "add"})


def rows(table):
    """The cells of each line, between which | stands. In a cell ⏎ is the end of a line."""
    lines = [line.split(" |") for line in table.strip().split("\n")]
    return [[cell.strip().replace("⏎", "\n") for cell in line] for line in lines]


def require_verdicts(table, score):
    """Assert that score(*cells) is what the first cell of each line says, right or wrong."""
    for verdict, *cells in rows(table):
        assert score(*cells) is (verdict == "right"), cells


def judge(pool, items):
    """The verdicts, one each, in the order of the items."""
    keyed = [(i, *item) for i, item in enumerate(items)]
    verdicts = sorted(pool.judge(keyed), key=lambda pair: pair[0])
    assert [key for key, _ in verdicts] == [*range(len(items))] and pool.unfinished == 0
    return [verdict for _, verdict in verdicts]


def read_programs(name):
    """The programs of a file beside this one by their groups (===) and names (---)."""
    groups = Path(__file__).with_name(name).read_text(encoding="utf-8").split("=== ")[1:]
    tables = {}
    for group in groups:
        title, *programs = group.split("\n--- ")
        tables[title] = dict(program.split("\n", 1) for program in programs)
    return tables


def block(program):
    """A completion whose program this is."""
    return f"Thinking.</think>Here it is:\n```python\n{program}\n```\nThat is all."
