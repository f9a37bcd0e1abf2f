"""curve/logs.py and curve/columns.py: every kind of log, what is chosen in it, and what is never
guessed."""

import io
import itertools
import json
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from kinds_of_logs import (
    CURVE,
    GOOD,
    KINDS,
    PLAIN,
    RATES,
    STEPS,
    json_lines,
    table,
    table_of_broken,
    table_of_kinds,
    typed,
    write,
)

from curve import logs
from curve.columns import MOST_POINTS, Series
from curve.logs import read_log, runs_of_study

ROOT = Path(__file__).parent.parent


def read(folder, content, **flags) -> Series:
    """The one curve of a log with this content."""
    (series,) = read_log(write(folder, "log", content), **flags)
    return series


def refusal(folder, content, **flags) -> str:
    with pytest.raises(ValueError) as error:
        read_log(write(folder, "log", content), **flags)
    return str(error.value)


def test_reads_every_kind(tmp_path):
    costs = {"compute_flops": 1e9, "epoch": 0.01}
    for kind in KINDS:
        series = read_log(write(tmp_path, kind.name, kind.content), **kind.flags)[0]
        assert series.x_name == kind.x, kind.source
        assert series.y_name == kind.y, kind.source
        assert series.y == pytest.approx(RATES, abs=1.1e-4), kind.source
        assert np.allclose(series.x, np.array(STEPS) * costs.get(kind.x, 1)), kind.source
        note = series.notes[0]
        assert f"read: x = {kind.x}, y = " in note, kind.source
        assert f"{len(series.x)} points" in note, kind.source


def test_a_folder_is_read_by_the_log_in_it(tmp_path):
    for step in (90, 100):
        history = [{"step": s, "eval_accuracy": r} for s, r in CURVE if s <= step]
        state = json.dumps({"log_history": history})
        write(tmp_path, f"run/checkpoint-{step}/trainer_state.json", state.encode())
    (series,) = read_log(tmp_path / "run")
    assert len(series.x) == len(STEPS)  # 100 comes after 90
    (tmp_path / "log.jsonl").mkdir()  # no log
    with pytest.raises(ValueError, match="name the file"):
        read_log(tmp_path)


def test_the_runs_of_a_study_are_folders_or_published_files(tmp_path):
    """Both have the same names and points, in natural order but for `scalerl`."""
    logs = {}
    for run, factor in (("scalerl-seed0", 1), ("K16-seed0", 0.9), ("K8.5-seed1", 0.5)):
        rates = [{"compute_flops": s, "pass_rate": factor * r} for s, r in CURVE]
        logs[run] = json_lines([{"kind": "validation", **each} for each in rates])
        write(tmp_path, f"folders/{run}/log.jsonl", logs[run])
        write(tmp_path, f"published/{run}.jsonl", logs[run])
    write(tmp_path, "published/tables.md", b"")
    for form in ("folders", "published"):
        runs = runs_of_study(tmp_path / form)
        assert [variant for variant, _ in runs] == ["scalerl", "K8.5", "K16"]
        read = [read_log(path)[0] for _, path in runs]
        assert [series.name for series in read] == ["scalerl-seed0", "K8.5-seed1", "K16-seed0"]
        assert read[1].y == pytest.approx(np.array(RATES) / 2)


def test_runs_of_a_wide_table_have_steps_of_their_own(tmp_path):
    # The name of a run says nothing.
    rows = [["Step", "kl 0 - val/acc", "kl 0 - val/acc__MIN", "b - val/acc"]]
    for s, r in CURVE:
        rows += [[s, r, r, ""], [s + 1, "", "", r / 2]]
    message = "--y (or all): kl 0 - val/acc (0.2 to 0.75), b - val/acc (0.1 to 0.375)"
    assert message in refusal(tmp_path, table(rows))
    a, b = read_log(write(tmp_path, "w.csv", table(rows)), y="all")
    assert (a.name, b.name) == (a.y_name, b.y_name) == ("kl 0 - val/acc", "b - val/acc")
    assert list(b.x) == [s + 1 for s in STEPS]
    assert b.y == pytest.approx(np.array(RATES) / 2)

    # A run that gives no curve does not cost the others theirs, unless it is named.
    wide = table([["step", "a - val/acc", "b - val/acc"], *([s, 7, r] for s, r in CURVE)])
    (b,) = read_log(write(tmp_path, "w.csv", wide), y="all")
    assert b.name == "b - val/acc"
    assert b.notes[-1].startswith("! a - val/acc is left out: line 2: a - val/acc = 7 is no pass")
    assert "a - val/acc = 7" in refusal(tmp_path, wide, y="a - val/acc,b - val/acc")
    assert "a - val/acc = 7" in refusal(tmp_path, table([["step", "a - val/acc"], [0, 7]]), y="all")


def test_stray_bytes_in_a_console_log(tmp_path):
    content = b"config: {'lr': 1e-6}\n\xff\xfe\x00 stray \x0c bytes\n"
    for s, r in CURVE:
        line = f"\x1b[36m(Runner)\x1b[0m step:{s} - val/acc:np.float64({r}) - perf/x:nan\n"
        content += line.encode() + b"\x85\xff\n"
    assert read(tmp_path, content).y == pytest.approx(RATES)


def test_a_half_written_last_line_is_left_out(tmp_path):
    series = read(tmp_path, GOOD + b'{"step": 700, "pa')
    assert series.y == pytest.approx(RATES)
    assert any("line 12 is cut off" in note for note in series.notes)
    assert "line 12: no valid JSON" in refusal(tmp_path, GOOD + b'{"step": 700, "pa\n' + GOOD)

    # In a table too, but there a last line without an end may be whole.
    whole = table([["step", "val/acc", "loss, mean"], *([s, r, 1] for s, r in CURVE)]).rstrip()
    assert read(tmp_path, whole).y == pytest.approx(RATES)
    series = read(tmp_path, whole + b"\n700,0.")
    assert series.y == pytest.approx(RATES)
    assert any("line 13 is cut off" in note for note in series.notes)


def test_validations_are_taken_and_where_decides_otherwise(tmp_path):
    content = json_lines(typed())
    series = read(tmp_path, content)
    assert "from the eval records" in series.notes[0]
    assert series.num_examples == 1024
    assert len(series.notes) == 1
    rollouts = read(tmp_path, content, where="type=rollout", y="answer_accuracy")
    assert set(rollouts.y) == {0.5}
    assert "from the rollout records" in rollouts.notes[0]
    assert "measured in training" in rollouts.notes[1]
    assert "type can be eval, rollout, train" in refusal(tmp_path, content, where="type=evil")
    assert "did you mean 'type'" in refusal(tmp_path, content, where="typ=eval")

    rows = [["algorithm", "seed", "step", "acc"]]
    for algorithm, seed in itertools.product("ab", (1, 2)):
        rows += [[algorithm, seed, s, r / seed] for s, r in CURVE]
    series = read(tmp_path, table(rows), where="algorithm=b,seed=2")
    assert series.y == pytest.approx(np.array(RATES) / 2)


def test_curves_under_each_other_are_never_joined(tmp_path):
    columns = {"seed": [3, 4], "dataset": "ab", "labelled_so": "ab", "batch_size": [3, 4.5]}
    for group, (one, other) in columns.items():
        rows = [[group, "step", "acc"]]
        rows += [[one, s, r] for s, r in CURVE]
        rows += [[other, s, r] for s, r in CURVE]
        message = f"by {group}: {one}, {other}; choose one with --where {group}={one}"
        assert message in refusal(tmp_path, table(rows))
        series = read(tmp_path, table(rows), where=f"{group}={other}")
        assert series.y == pytest.approx(RATES), group

    # No step comes twice, and yet there are two curves.
    rows = [["dataset", "step", "acc"]]
    for s, r in CURVE:
        rows += [["a", s, r], ["b", s + 5, r]]
    assert "several curves" in refusal(tmp_path, table(rows))


def test_rows_of_one_step_are_averaged_when_told(tmp_path):
    rows = [("step", "acc", "num_examples")]
    for s, r in CURVE:
        rows += [(s, r * factor, 10) for factor in (1.1, 0.9, 1.0)]
    series = read(tmp_path, table(rows), mean=True)
    assert list(series.x) == STEPS
    assert series.y == pytest.approx(RATES)
    assert "11 points, each the mean of all with its step (33 in all)" in series.notes[0]
    assert series.num_examples == 30
    assert len(series.notes) == 1

    # A run that ended early makes the mean jump.
    shorter = read(tmp_path, table(rows[:-2]), mean=True)
    assert "a point is the mean of 1 to 3 rows: the curve jumps" in shorter.notes[1]


@pytest.mark.parametrize("order", (1, -1))
def test_the_compute_of_one_step_is_averaged_too(order, tmp_path):
    rows = [(s, r, times * s) for s, r in CURVE for times in (1, 3, 5)[::order]]
    series = read(tmp_path, table([("step", "acc", "tokens"), *rows]), x="tokens", mean=True)
    assert list(series.x) == [3 * step for step in STEPS]


def test_a_number_with_a_thousands_comma_is_never_cut(tmp_path):
    for form in ("step={:,} acc={}", "step {:,}: acc={}", "step: {}k acc={}", "epoch {}.5 acc={}"):
        lines = [form.format(1000 * (s + 1), r) for s, r in CURVE]
        said = refusal(tmp_path, "\n".join(lines).encode())
        assert "no column is named like compute" in said, form
    rows = [("step", "acc"), *((f"{s + 1},000", r) for s, r in CURVE)]
    semicolons = "\n".join(f"{s};{r}" for s, r in rows).encode()
    assert "not a number" in refusal(tmp_path, semicolons)


def test_num_examples_of_minus_one_says_nothing(tmp_path):
    rows = [(s, r, -1) for s, r in CURVE]
    assert read(tmp_path, table([("step", "acc", "num_examples"), *rows])).num_examples is None


def test_long_names_of_runs_are_told_apart(tmp_path):
    path = "/mnt/experiments/" + 100 * "x"
    rows = [(f"{path}-seed{seed}", s, r) for seed in (0, 1) for s, r in CURVE]
    content = table([("run", "step", "acc"), *rows])
    assert "run" in refusal(tmp_path, content)
    assert read(tmp_path, content, where=f"run={path}-seed1").y == pytest.approx(RATES)


# The column that is taken, and after the colon the other columns, which hold something else.
CHOICES = """
    eval/aime: step train/reward loss          | eval/success_rate: eval/mean_reward reward
    env/all/correct: env/all/reward/total      | reward/pass@1: reward/mean
    eval_rewards/accuracy_reward/mean: eval_reward eval_rewards/format_reward/mean
    answer_accuracy: format_accuracy reward    | val/acc: acc train/acc      | pass_rate: accuracy
    val-core/x/acc/mean@8: val-core/x/acc/best@8/mean val-core/x/acc/std@8 val-core/x/reward/mean@8
    acc: best_acc acc_std acc_max loss_acc     | evalAccuracy: reward
    val/test_score/x: critic/score/mean        | eval/avg@16: eval/pass@8
    sampled_pass_at_1: parseable_rate truncation_rate
    eval/default_pass1: eval/default_pass8 train/reward
"""


def test_the_better_name_is_taken(tmp_path):
    for choice in re.split(r"[|\n]", CHOICES.strip()):
        best, _, others = choice.strip().partition(": ")
        names = [name for name in others.split() if name != "step"]
        rows = []
        for s, r in CURVE:
            values = [0.3 + 0.001 * (s + i) for i in range(len(names))]
            rows.append([s, *values, r])
        series = read(tmp_path, table([["step", *names, best], *rows]))
        assert series.y_name == best, choice
        assert series.y == pytest.approx(RATES), choice


def test_names_of_compute(tmp_path):
    names = (
        "train_flops total_flos gpu_hours num_tokens seconds grpo_step iteration episode epoch "
        "timesteps_total training_iteration Timestep frame"
    )
    for name in names.split():
        rows = [["acc", name], *((r, s + 1) for s, r in CURVE)]
        assert read(tmp_path, table(rows)).x_name == name


def test_what_is_never_a_pass_rate(tmp_path):
    names = (
        "format_accuracy acc_std val/acc_min val/acc/std@8 critic/score/max eval_loss lr kl "
        "entropy eval_time reward/format len alpha_value gpu_util perf/mfu exploration_rate "
        "dropout eval/failure_rate eval/reward_hacking_rate rewards/mine critic/value "
        "reward/valid_rate"
    )
    for column in names.split():
        content = table([["step", column], *CURVE])
        assert "no column is named like a pass rate" in refusal(tmp_path, content), column
        assert read(tmp_path, content, y=column).y == pytest.approx(RATES), column


def test_equally_likely_columns_are_both_named_and_none_is_taken(tmp_path):
    two = json_lines({"step": s, "eval/aime": r, "eval/math": r / 2} for s, r in CURVE)
    message = "--y (or all): eval/aime (0.2 to 0.75), eval/math (0.1 to 0.375)"
    assert message in refusal(tmp_path, two)
    curves = read_log(tmp_path / "log", y="eval/aime,eval/math")
    assert [series.name for series in curves] == ["eval/aime", "eval/math"]
    assert curves[1].y[0] == 0.1
    curves = read_log(tmp_path / "log", y="all")
    assert [series.name for series in curves] == ["eval/aime", "eval/math"]


def test_the_pass_rate_of_all_sources_is_taken_and_those_of_one_can_be_named(tmp_path):
    numbers = {"num_examples": 256, "num_examples/gym:a": 128}
    records = []
    for s, r in CURVE:
        rates = {"pass_rate": r, "pass_rate/gym:a": r - 0.1, "pass_rate/gym:b": r + 0.1}
        records.append({"step": s, **rates, **numbers})
    content = json_lines(records)
    series = read(tmp_path, content)
    assert series.y_name == "pass_rate"
    assert series.num_examples == 256
    assert read(tmp_path, content, y="pass_rate/gym:a").num_examples == 128
    curves = read_log(tmp_path / "log", y="all")
    assert [series.y_name for series in curves] == [*rates]


def test_the_better_compute_is_taken_and_the_other_can_be_named(tmp_path):
    steps = table([("rl_step", "train_step", "acc"), *((s * s, s, r) for s, r in CURVE)])
    assert read(tmp_path, steps).x_name == "train_step"
    assert read(tmp_path, steps, x="rl_step").x[-1] == 10_000


def test_a_limit_on_steps_is_no_count_of_them(tmp_path):
    content = json_lines({"max_steps": 100, "num_tokens": 7 * s, "acc": r} for s, r in CURVE)
    assert read(tmp_path, content).x_name == "num_tokens"


def test_tokens_of_a_step_are_no_compute_until_they_are_asked_for(tmp_path):
    content = json_lines({"step": s, "num_tokens": 100 + (s // 10) % 3, "acc": r} for s, r in CURVE)
    assert read(tmp_path, content).x_name == "step"
    assert "must increase" in refusal(tmp_path, content, x="num_tokens")


def test_a_resumed_run_counts_once(tmp_path):
    """The run is resumed at 50. The steps after 50 were made twice: they are one point."""
    lines = [{"step": s, "val/acc": 0.0 if s >= 50 else r} for s, r in CURVE if s < 80]
    lines += [{"step": s, "val/acc": r} for s, r in CURVE if s >= 50]
    series = read(tmp_path, json_lines(lines))
    assert list(series.x) == STEPS
    assert series.y == pytest.approx(RATES)
    assert "left out: 3 that a resumed run has made again or undone" in series.notes[0]

    # Resumed twice, and once without a step in between.
    points = CURVE[:4] + CURVE[2:6] + CURVE[5:]
    again = [{"step": s, "loss": i, "val/acc": r} for i, (s, r) in enumerate(points)]
    assert read(tmp_path, json_lines(again)).y == pytest.approx(RATES)

    # The last validation is made again.
    twice = [{"step": s, "val/acc": r} for s, r in [*CURVE, (100, 0.7)]]
    assert read(tmp_path, json_lines(twice)).y[-1] == 0.7


def test_missing_values_leave_out_their_points(tmp_path):
    rows = [[s, r, 2 * s] for s, r in CURVE]
    rows[3][1] = "nan"
    rows[4][1] = ""
    rows[5][2] = "NA"
    series = read(tmp_path, table([["a", "acc", "x"], *rows]))
    assert list(series.x) == [2 * s for s in STEPS[:3] + STEPS[6:]]
    assert "left out: 1 with NaN, 1 without x" in series.notes[0]


def test_a_column_without_any_number_is_refused(tmp_path):
    content = table([["step", "acc"], *((s, "nan") for s in STEPS)])
    for flags in ({}, {"mean": True}):
        message = refusal(tmp_path, content, y="acc", **flags)
        assert "no line has a value of 'step' and of 'acc'" in message


def test_a_line_that_is_none_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    """A line of any length would be held three times: 600 MB took 1.8 GB."""
    monkeypatch.setattr(logs, "LONGEST_LINE", 1000)
    assert "the first line has more than 1,000 characters" in refusal(tmp_path, b"a" * 5000)
    document = json.dumps([{"step": s, "acc": r} for s, r in CURVE * 5]).encode()
    assert len(document) > 1000  # a document may be one line
    assert read(tmp_path, document).y == pytest.approx(RATES)


def test_two_columns_of_one_name_are_refused_with_their_line(tmp_path):
    lines = ['{"step": 1, "pass_rate": 0.1}', '{"step": 2, "pass_rate": 0.2, "pass_rate": 0.9}']
    with pytest.raises(ValueError, match="log: line 2: 'pass_rate' is there twice"):
        read(tmp_path, "\n".join(lines).encode() + b"\n")
    with pytest.raises(ValueError, match="'pass_rate' is there twice"):
        read(tmp_path, f"[\n{', '.join(lines)}]".encode())


def test_a_log_whose_every_line_has_a_new_column_is_refused_before_it_fills_the_memory(tmp_path):
    lines = "".join(f'{{"step": {i}, "column {i}": 1}}\n' for i in range(100_100))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="line 100000: more than 100,000 columns"):
            read(tmp_path, lines.encode())
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_many_points_stream_and_are_averaged(tmp_path):
    """Reading takes a few bytes a value, where a list of records takes 600 bytes a record of four
    values."""
    n = 20_000
    with open(tmp_path / "long.jsonl", "w") as file:
        for s in range(n):
            rates = f'"acc": {s / 2 / n:.6f}, "loss": 0.123456'
            file.write(f'{{"step": {s}, {rates}, "type": "eval"}}\n')
    tracemalloc.start()
    (series,) = read_log(tmp_path / "long.jsonl")
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(series.x) <= MOST_POINTS
    assert (series.x[0], series.y[0]) == (0, 0)
    assert f"{n} points" in series.notes[0]
    assert "neighbours averaged into" in series.notes[0]
    assert most_bytes < 250 * n


def test_averaged_points_keep_the_first_and_have_less_noise(tmp_path):
    n = 1 + 3 * (MOST_POINTS - 1)
    rows = [(s, 0.2 + 0.6 * s / n, 100) for s in range(n)]
    series = read(tmp_path, table([("step", "acc", "num_examples"), *rows]))
    assert len(series.x) == MOST_POINTS
    assert series.num_examples == pytest.approx(300, rel=1e-3)
    assert (series.x[0], series.y[0]) == (0, 0.2)
    assert np.allclose(series.y, 0.2 + 0.6 * series.x / n)


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(GOOD)))
    (series,) = read_log("-")
    assert series.name == "standard input"
    assert series.y == pytest.approx(RATES)


def test_encodings(tmp_path):
    for encoding in ("utf-8-sig", "utf-16"):
        assert read(tmp_path, table(PLAIN, encoding=encoding)).y == pytest.approx(RATES), encoding
        assert read(tmp_path, GOOD.decode().encode(encoding)).y == pytest.approx(RATES), encoding


def test_the_tables_of_the_docs_are_those_that_come(tmp_path):
    text = (ROOT / "docs" / "formats.md").read_text()
    assert table_of_kinds(tmp_path) in text
    assert table_of_broken(tmp_path) in text


def test_fitting_needs_no_more_than_numpy_scipy_and_matplotlib_on_any_system():
    """Every module of curve/ is imported, and the example fitted, without what only Linux or only
    training has."""
    code = """
import sys, pathlib, importlib
for name in "fcntl resource torch transformers tqdm core machinery tools data loss".split():
    sys.modules[name] = None
for path in pathlib.Path("curve").glob("*.py"):
    importlib.import_module(f"curve.{path.stem}")
(series,) = sys.modules["curve.logs"].read_log("data/examples/simulated.csv")
print(sys.modules["curve.fit"].fit_sigmoid(series.x, series.y).A)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert abs(float(ended.stdout) - 0.92) < 0.02


# --- what was read wrong, or lost in silence ---


def test_stacked_experiments_under_an_unknown_name_are_refused(tmp_path):
    """One of them restarts, so no column alone makes the steps increase."""
    rows = [["condition", "step", "accuracy"]]
    for name in ("plain", "dots"):
        rows += [[name, s, r] for s, r in CURVE]
    rows += [["dots", s, r / 2] for s, r in CURVE]
    message = refusal(tmp_path, table(rows))
    assert "22 of 33 points would be left out" in message
    assert "--where COLUMN=VALUE, of condition (plain, dots)" in message


def test_a_pair_in_the_text_of_a_model_hides_no_line(tmp_path):
    lines = [f"step={s} val_acc={r}" for s, r in CURVE]
    lines.insert(3, "The answer is {'x': 1}")
    assert read(tmp_path, "\n".join(lines).encode()).y == pytest.approx(RATES)


@pytest.mark.parametrize("key", ["history", "rows", "log_history"])
def test_records_of_a_document_lie_under_any_key(tmp_path, key):
    document = {"name": "a", key: [{"step": s, "acc": r} for s, r in CURVE], "tags": ["x"]}
    assert read(tmp_path, json.dumps(document, indent=1).encode()).y == pytest.approx(RATES)


def test_lists_of_records_are_told_apart_by_their_names(tmp_path):
    document = {}
    for key, factor in (("train", 0.5), ("eval", 1)):
        document[key] = [{"step": s, "acc": factor * r} for s, r in CURVE]
    assert read(tmp_path, json.dumps(document, indent=1).encode()).y == pytest.approx(RATES)


def test_accuracy_of_each_training_step_is_warned_of(tmp_path):
    steps = [{"step": s, "loss": 0.1, "accuracy": r} for s, r in CURVE]
    assert any("measured in training" in note for note in read(tmp_path, json_lines(steps)).notes)
    # A setting by which runs are chosen is no loss.
    runs = [{"step": s, "lr": lr, "acc": r} for lr in (0.1, 0.2) for s, r in CURVE]
    assert len(read(tmp_path, json_lines(runs), where="lr=0.1").notes) == 1
    # A validation comes less often, or in lines of its own.
    between = [{"step": s + 5, "loss": 0.1} for s in STEPS]
    evaluations = [{"step": s, "accuracy": r} for s, r in CURVE]
    for lines in (steps + between, between + evaluations):
        lines = sorted(lines, key=lambda line: line["step"])
        assert len(read(tmp_path, json_lines(lines)).notes) == 1


def test_costs_of_single_steps_are_added_up(tmp_path):
    lines = [f"step:{s} - val/acc:{r} - timing_s/step:2.0 - lr:1.0" for s, r in CURVE]
    content = "\n".join(lines).encode()
    series = read(tmp_path, content, x="timing_s/step")
    assert list(series.x) == list(np.arange(1, 12) * 2.0)
    assert series.x_name == "sum of timing_s/step"
    assert "it is no sum of all compute so far" in refusal(tmp_path, content, x="lr")
    # The run was killed after its last step, and went on from the ninth.
    series = read(tmp_path, "\n".join(lines + lines[9:]).encode(), x="timing_s/step")
    assert list(series.x) == list(np.arange(1, 12) * 2.0)
    # Two seeds under each other: no step is undone.
    for both in (lines + lines, sorted(lines + lines)):
        series = read(tmp_path, "\n".join(both).encode(), x="timing_s/step", mean=True)
        assert list(series.x) == list(np.arange(1, 12) * 2.0)


def test_flops_have_prefixes_and_nan_has_a_sentence(tmp_path):
    rows = [["eflops", "acc"], *CURVE]
    assert read(tmp_path, table(rows)).x_name == "eflops"
    nothing = table([["acc", "kl"], *(("nan", "nan") for _ in STEPS)])
    assert "no value is a finite number, in any of acc, kl" in refusal(tmp_path, nothing)


def test_events_of_tensorboard_are_read_by_its_package(tmp_path):
    writer = pytest.importorskip("tensorboard.summary").Writer(str(tmp_path))
    for s, r in CURVE:
        writer.add_scalar("eval/accuracy", r, s)
        writer.add_scalar("train/loss", 0.1, s)
    writer.close()
    (series,) = read_log(tmp_path)
    assert list(series.x) == STEPS
    assert series.y == pytest.approx(RATES)
    assert (series.x_name, series.y_name) == ("step", "eval/accuracy")


def test_without_its_package_events_have_a_sentence(tmp_path, monkeypatch):
    package = "tensorboard.backend.event_processing.event_file_loader"
    monkeypatch.setitem(sys.modules, package, None)
    events = b"\x18" + bytes(8) + b"...brain.Event:2" + bytes(9)
    assert "pip install tensorboard" in refusal(tmp_path, events)


def test_a_table_of_which_some_cells_hold_objects_is_no_console_log(tmp_path):
    """W&B's exports have such cells for tables and pictures."""
    media = {"_type": "table-file", "nrows": 2, "path": "media/table"}
    rows = [["val/generations", "_step", "val/acc", "note"]]
    rows += [[media, s, r, "a, b"] for s, r in CURVE]
    assert read(tmp_path, table(rows)).y == pytest.approx(RATES)


@pytest.mark.parametrize("word, x_name", [("rollout batch", "batch"), ("step batch", "step")])
def test_steps_are_counted_in_batches_too(tmp_path, word, x_name):
    lines = []
    for s, r in CURVE:
        lines.append(f"train - INFO - {word} {s} done, eval_acc: {r}")
        if s in (0, 30):
            lines.append(f"train - INFO - in step {s} new best eval_acc: {r}, saved")
    content = "\n".join([*lines, f"Best eval_acc: {RATES[3]}"])
    if x_name == "batch":
        content = content.replace("in step 0 ", "").replace("in step 30 ", "")
    series = read(tmp_path, content.encode())
    assert (series.x_name, list(series.x)) == (x_name, STEPS)
    assert series.y == pytest.approx(RATES)


def test_a_column_that_few_rows_have_tells_no_runs_apart(tmp_path):
    """This run was resumed at step 90, and logs a picture now and then."""
    records = [{"step": s, "acc": r} for s, r in [*CURVE[:10], *CURVE[9:]]]
    for name, record in zip("ab", records[::4]):
        record["picture"] = name
    assert read(tmp_path, json_lines(records)).y == pytest.approx(RATES)


def test_a_table_without_a_number_that_can_be_a_pass_rate_says_why(tmp_path):
    percent = table([["step", "val/acc"], *([s, f"{r:.1%}"] for s, r in CURVE)])
    message = refusal(tmp_path, percent)
    assert "line 2: val/acc = " in message and "--percent" in message
    texts = table([["step", "note"], *([s, "fine"] for s, r in CURVE)])
    assert refusal(tmp_path, texts).endswith("no column can be a pass rate, of step, note")


def test_compute_that_is_a_text_is_refused_by_its_line(tmp_path):
    steps = ["0", *(f"{100 * n:,}" for n in range(1, 41))]
    content = table([["step", "acc"], *((s, 0.2 + n / 100) for n, s in enumerate(steps))])
    assert "line 12: step = '1,000' is not a number" in refusal(tmp_path, content)


def test_the_counter_that_most_points_have_is_taken(tmp_path):
    rows = [["step", "tokens", "acc"]]
    for _, r in CURVE * 3:
        n = len(rows)
        rows.append([n if n % 5 else "", 1000 * n if n % 5 == 0 else "", r])
    assert read(tmp_path, table(rows)).x_name == "step"


def test_two_runs_under_each_other_are_warned_of(tmp_path):
    rows = [["step", "acc"], *((s, 0.3 + s / 1000) for s in range(0, 400, 10))]
    rows += [(s, 0.2 + s / 1000) for s in range(0, 200, 10)]
    series = read(tmp_path, table(rows))
    assert series.notes[-1].startswith("! step begins again, and 40 of 60 points are left out")


def test_a_log_with_the_newest_line_first_is_to_be_sorted(tmp_path):
    message = refusal(tmp_path, table([["step", "acc"], *reversed(CURVE)]))
    assert message.endswith("it must increase; sort the log by it")


def test_one_source_of_several_has_no_number_of_answers(tmp_path):
    lines = [
        {"step": s, "pass_rate": r, "pass_rate/a": r, "num_examples": 500, "kind": "validation"}
        for s, r in CURVE
    ]
    assert read(tmp_path, json_lines(lines)).num_examples == 500
    assert read(tmp_path, json_lines(lines), y="pass_rate/a").num_examples is None


def test_names_that_data_and_metrics_share_are_told_apart(tmp_path):
    lines = [{"step": s, "data": {"acc": r}, "metrics": {"acc": 0.1, "step": 5}} for s, r in CURVE]
    series = read(tmp_path, json_lines(lines), y="acc")
    assert list(series.x) == STEPS
    assert series.y == pytest.approx(RATES)
    assert read(tmp_path, json_lines(lines), y="metrics/acc").y == pytest.approx(0.1)


def test_a_run_of_a_study_can_have_its_column_named():
    (series,) = read_log("docs/study/loo/scalerl-seed0.jsonl:pass_rate")
    assert series.y_name == "pass_rate"
