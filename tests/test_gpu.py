"""tests/gpu.py itself, on the CPU and in small: what it measures there means nothing."""

from pathlib import Path

import gpu
import pytest
import torch


def rows(path: Path) -> list[list[str]]:
    """The cells of each line of the table."""
    return [
        line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line[:3] in ("| 1", "| 2", "| 3")
    ]


def test_without_cuda_it_says_so_and_ends_with_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path / "gpu.md")]) == 2
    assert capsys.readouterr().err.startswith("error: torch sees no GPU") and not [*tmp_path.iterdir()]


def test_the_first_part_in_small_on_the_cpu(tmp_path):
    out = tmp_path / "gpu.md"
    assert gpu.main(["--device", "cpu", "--small", "--part", "1", "--out", str(out)]) == 0
    names = [name for name, rule in gpu.RULES.items() if rule[0] in gpu.PARTS[1]]
    found = {row[1]: row for row in rows(out)}
    assert [*found] == [gpu.RULES[name][1] for name in names] and f"torch {torch.__version__}" in out.read_text()
    came = {name: found[gpu.RULES[name][1]] for name in names}
    assert came["precision"][2:] == ["highest", "highest", "as expected"]
    assert came["mixed"][3] == "0" and came["mixed"][4] == "as expected"
    assert not [row for row in found.values() if "failed" in row[-1]]


def test_the_engine_and_the_trainer_are_measured(tmp_path):
    at = gpu.Machine("cpu", True, tmp_path, 1e12)
    assert gpu.engine_busy(at)["engine_speed"] > 0
    assert {*gpu.micro_batch_sizes(at)} == {"speed_ratio", "trainer_speed"}


def test_what_fails_is_a_line_and_other_parts_keep_theirs(tmp_path, monkeypatch, capsys):
    def broken(at):
        raise RuntimeError("it | broke\nhere")

    rules = {
        "a": (broken, "what breaks", 0, 1),
        "b": (lambda at: {"b": 3.0}, "three", 0, 2),
        "c": (lambda at: {}, "what is not there", None, None),
    }
    monkeypatch.setattr(gpu, "RULES", rules)
    monkeypatch.setattr(gpu, "PARTS", {1: [broken, rules["b"][0]], 2: [rules["c"][0]], 3: [], 4: []})
    out = tmp_path / "gpu.md"
    for part in ("2", "1", "1"):
        assert gpu.main(["--device", "cpu", "--small", "--part", part, "--out", str(out)]) == 0
    assert rows(out) == [
        ["1", "what breaks", "at most 1", "", "failed: RuntimeError: it / broke here"],
        ["1", "three", "at most 2", "3", "not as expected"],
        ["2", "what is not there", "for the record", "", "left out: not to be had here"],
    ]
    out.write_text(out.read_text().replace(f"torch {torch.__version__}", "torch 1.0"))  # of other versions
    gpu.main(["--device", "cpu", "--small", "--part", "2", "--out", str(out)])
    assert [row[0] for row in rows(out)] == ["2"]


@pytest.mark.parametrize(
    "printed, said",
    [
        ("....\n4 passed, 1 skipped in 2s\n", "all pass"),
        ("F\nFAILED tests/test_x.py::test_y[a] - boom\n1 failed, 1 passed\n", "1 failed, 1 passed, test_y[a]"),
        ("ERROR tests/test_x.py - boom\n1 error in 2s\n", "1 error in 2s"),
        ("", "no output"),
    ],
)  # fmt: skip
def test_what_pytest_says_is_read(tmp_path, monkeypatch, printed, said):
    monkeypatch.setattr(gpu.Machine, "run", lambda *_, **__: printed)
    assert {*gpu.tests(gpu.Machine("cpu", True, tmp_path, 0.0)).values()} == {said}


@pytest.mark.parametrize(
    "name, good, bad",
    [("cudnn", 92_000, 91_000), ("precision", "highest", "high"), ("mixed", 0, 1), ("first", 50.0, 200.0)],
)
def test_verdicts(name, good, bad):
    assert (gpu.verdict(name, good), gpu.verdict(name, bad)) == ("as expected", "not as expected")
    assert gpu.verdict("engine_speed", 1.0) == "" and gpu.should("engine_speed") == "for the record"


def test_each_rule_belongs_to_a_part():
    assert {rule[0] for rule in gpu.RULES.values()} == {measure for part in gpu.PARTS.values() for measure in part}
