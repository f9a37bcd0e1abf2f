"""benchmarks/: that each can be started, that the docs name commands that exist, the table of
gpu.py, and the counter of size.py."""

import importlib
import re
from pathlib import Path

import gpu
import numpy as np
import public_runs
import size
import torch

from curve.columns import Series

ROOT = Path(__file__).parent.parent
NAMES = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


def test_the_commands_in_the_docs_exist_and_each_benchmark_finds_what_it_imports():
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))
    texts = [path.read_text() for path in pages]
    named = set(re.findall(r"python benchmarks/(\w+)\.py", "".join(texts)))
    assert named == NAMES - {"common"}
    for name in sorted(NAMES):
        importlib.import_module(name)


def rows(path: Path) -> list[list[str]]:
    """The cells of each line of the table."""
    lines = [line for line in path.read_text().splitlines() if re.match(r"\| \d", line)]
    return [line.strip("| ").split(" | ") for line in lines]


def test_gpu_says_when_there_is_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "gpu.md")]) == 2
    assert capsys.readouterr().err.startswith("error: torch sees no GPU")
    assert [*tmp_path.iterdir()] == []


def measured_in_small(out: Path, part: str) -> int:
    """The exit status of a part on the CPU, with small sizes."""
    return gpu.main(["--device", "cpu", "--small", "--part", part, "--out", str(out)])


def test_gpu_in_small_on_the_cpu(tmp_path):
    """What it measures there means nothing."""
    out = tmp_path / "gpu.md"
    assert measured_in_small(out, "1") == 0
    assert rows(out)[-1] == ["1", gpu.RULES["mixed_reads"][1], "0", "0", "as expected"]
    assert "failed" not in out.read_text() and f"torch {torch.__version__}" in out.read_text()

    machine = gpu.Machine("cpu", True, tmp_path, 1e12)
    assert {*gpu.micro_batch_sizes(machine)} == {"speed_ratio", "trainer_speed"}

    # Each part measures what rules ask for, and nothing else.
    asked = {rule[0] for rule in gpu.RULES.values()}
    assert asked == {measure for part in gpu.PARTS.values() for measure in part}


def test_gpu_what_fails_is_a_line_and_other_parts_keep_theirs(tmp_path, monkeypatch):
    def broken(machine):
        raise RuntimeError("it | broke\nhere")

    def high(machine):
        return {"b": 3.0, "c": "all pass"}

    def none(machine):
        return {}

    rules = {
        "a": (broken, "what breaks", 0, 1),
        "b": (high, "three", 0, 2),
        "c": (high, "tests", "all pass", "all pass"),
        "d": (none, "what is not there", 3, None),
    }
    monkeypatch.setattr(gpu, "RULES", rules)
    monkeypatch.setattr(gpu, "PARTS", {1: [broken, high], 2: [none], 3: [], 4: []})
    out = tmp_path / "gpu.md"
    for part in ("2", "1", "1"):
        assert measured_in_small(out, part) == 0
    assert rows(out) == [
        ["1", "what breaks", "0 to 1", "", "failed: RuntimeError: it / broke here"],
        ["1", "three", "0 to 2", "3", "not as expected"],
        ["1", "tests", "all pass", "all pass", "as expected"],
        ["2", "what is not there", "at least 3", "", "left out: not to be had here"],
    ]

    # What was measured with other versions goes.
    out.write_text(out.read_text().replace(f"torch {torch.__version__}", "torch 1.0"))
    measured_in_small(out, "2")
    assert [row[0] for row in rows(out)] == ["2"]


def test_size_counts_tokens_and_names_what_is_too_large():
    code = '"""A text."""\n\n# why\nx = f(1, "a")  # here\n'
    assert size.tokens_of(code) == 9  # the docstring, x = f ( 1 , "a" )
    short = 'def f(a, *, b):\n    """It\n    does."""\n    return a\n'
    assert size.functions_of(short) == [("f", 1, 2)]

    long = "def f(a, b, c, d, e, f, g, h):\n" + "    a = b\n" * 61
    sources = {"core/a.py": long, "core/b.py": short, "tests/c.py": long, "train.py": code}
    rooms, broken = size.measure(sources)
    assert rooms["core"][1] == 66 and rooms["train.py"] == [9, 4]
    assert broken == [
        "core/a.py: the body of f has 61 lines",
        "core/a.py: f has 8 arguments",
    ]
    dense = {"tests/a.py": code * 3, "data/a.py": "x = f(1, 2, 3)\n" * 9_000}
    assert size.measure(dense)[1] == [
        "data has 10.0 tokens a line",
        "what a user runs has 90,000 tokens; it must stay below 84,000",
    ]


def test_public_runs_reads_steps_out_of_the_names_of_checkpoints():
    content = b"model,acc\neval_results-global_step_0,20.0\neval_results-global_step_40,30.0\n"
    log = {"reader": "checkpoints", "y": "acc", "where": "", "percent": "yes"}
    (series,) = public_runs.read(content, log)
    assert (list(series.x), list(series.y)) == ([0, 40], [0.2, 0.3])


def a_public_run(repository: str, gain: float) -> public_runs.Run:
    x = np.arange(20.0)
    y = 0.1 + gain * x**2 / (x**2 + 9)
    return public_runs.Run(repository, "", "", "log", False, Series("log", x, y))


def test_public_runs_draws_the_first_run_of_each_repository(tmp_path, monkeypatch):
    runs = [a_public_run(repository, 0.5) for repository in ("o/a", "o/b", "o/a")]
    drawn = []
    monkeypatch.setattr(public_runs, "draw_panel", lambda panel, run: drawn.append(run))
    public_runs.draw_gallery(tmp_path / "g.png", runs)
    assert drawn == runs[:2] and (tmp_path / "g.png").stat().st_size > 1000
