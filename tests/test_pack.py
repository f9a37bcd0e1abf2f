"""tools/pack.py: the logs of a study in one file, from which fits and tables come out the same."""

import json

import pytest

from curve.flags import run_command
from curve.logs import packed_runs, read_log, read_table
from tools import pack

VALIDATION = {
    "step": 0,
    "pass_rate": 0.25,
    "pass_rate/aime": 0.1,
    "num_examples": 8,
    "compute_flops": 1.5e11,
    "truncated_fraction": 0.0,
}
TRAIN = {"step": 1, "loss": 0.5, "kl_estimate": 0.123456789, "entropy": None}


@pytest.fixture
def study(tmp_path):
    """The folder of a study of two runs, one of which is being written."""
    first = {"kind": "validation", **VALIDATION}
    lines = [
        first | {"wall_seconds": 3.0, "mismatch_mean": 1e-7},
        {"kind": "train", **TRAIN},
        {"kind": "warning", "step": 1, "about": "fall", "text": "it falls"},
        first | {"step": 1, "compute_flops": 3e11, "pass_rate": 0.5},
    ]
    for run in ("base-seed0", "scalerl-seed0"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "runs" / run / "log.jsonl").write_text(text + '{"kind": "valid')
    return tmp_path / "runs"


def packed(study, *flags: str):
    target = study.parent / "packed"
    assert pack.main([str(study), str(target), *flags]) == 0
    return target


def test_a_packed_log_has_what_fits_and_tables_need(study):
    folder = packed(study)
    logs = packed_runs(folder)
    assert [*logs] == ["base-seed0", "scalerl-seed0"]
    for log in logs.values():
        lines = [json.loads(line) for line in log.splitlines()]
        assert [line["kind"] for line in lines] == ["validation", "warning", "validation"]
        assert lines[0] == {"kind": "validation", **VALIDATION}
    (before,) = read_log(study / "base-seed0", y="pass_rate")
    (after,) = read_log(folder / "base-seed0", y="pass_rate")
    assert before.name == after.name
    assert (before.x == after.x).all() and (before.y == after.y).all()
    assert before.num_examples == after.num_examples


def test_a_column_that_no_step_has_is_refused(study):
    with pytest.raises(ValueError, match="--train kl_estimat: no training step of .* has it"):
        packed(study, "--train", "kl_estimat")


def test_a_name_may_hold_any_letter(study):
    (study / "base-seed0").rename(study / "pâte-seed0")
    folder = packed(study)
    assert [*packed_runs(folder)] == ["pâte-seed0", "scalerl-seed0"]
    assert read_log(folder / "pâte-seed0", y="pass_rate")


def test_columns_of_training_are_kept_if_they_are_named(study):
    folder = packed(study, "--train", "kl_estimate", "entropy")
    lines = [json.loads(line) for line in packed_runs(folder)["base-seed0"].splitlines()]
    (line,) = [line for line in lines if line["kind"] == "train"]
    assert line == {"kind": "train", "step": 1, "kl_estimate": 0.123457, "entropy": None}
    assert "loss" not in read_table(folder / "base-seed0" / "log.jsonl").names


def test_a_folder_without_logs_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(pack.main, [str(tmp_path / "nothing"), str(tmp_path / "packed")])
    assert ended.value.code == 2 and not (tmp_path / "packed").exists()
    assert "name the folder of a study" in capsys.readouterr().err
