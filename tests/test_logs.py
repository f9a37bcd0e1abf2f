"""curve/logs.py: every kind of log, what is chosen in it, and what is never taken in silence."""

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from curve.logs import read_log, runs_of_study

STEPS = list(range(0, 101, 10))
RATES = [0.2, *(round(0.2 + 0.6 / (1 + (30 / step) ** 2), 4) for step in STEPS[1:])]
CURVE = list(zip(STEPS, RATES))


def json_lines(records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def table(*rows, delimiter=",", encoding="utf-8") -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(encoding)


def write(folder: Path, name: str, content: bytes) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def read(folder, content, name="log", **choices):
    """The one curve of a log with this content."""
    (series,) = read_log(write(folder, name, content), **choices)
    return series


def refusal(folder, content, **choices) -> str:
    with pytest.raises(ValueError) as error:
        read_log(write(folder, "log", content), **choices)
    message = str(error.value)
    assert message.startswith(f"{folder}/log: ") and "\n" not in message
    return message


def of_each(**values) -> list[dict]:
    """A record for each point: a value of None is the pass rate, a number is times the step."""
    return [
        {
            name: rate if value is None else value * step if value != str(value) else value
            for name, value in values.items()
        }
        for step, rate in CURVE
    ]


# --- what each framework writes -------------------------------------------------------------------


def ours():
    for validation in of_each(kind="validation", compute_flops=1e9, step=1, pass_rate=None):
        yield validation | {"num_examples": 960}
        yield validation | {"kind": "train", "pass_rate": 0.5}


def typed():
    for step, rate in CURVE:
        at = {"grpo_step": step, "reward": rate}
        yield at | {"type": "eval", "answer_accuracy": rate, "format_accuracy": 0.9}
        yield at | {"type": "rollout", "answer_accuracy": 0.5, "std_reward": 0.1}


def verl_console():
    yield "commit: d60f843, reward: 7"
    yield f"(main_task pid=6) step:0 - test_score/openai/gsm8k:{RATES[0]}"
    for step in range(1, 101):
        test = f" - val/test_score/openai/gsm8k:np.float64({dict(CURVE).get(step)})"
        test = test if step in STEPS else ""
        yield f"\x1b[36m(Run)\x1b[0m step:{step} - actor/x:nan{test} - critic/score/mean:0.4"


def trl():
    for step, rate in CURVE:
        yield {"step": step, "reward": 0.4, "rewards/accuracy_reward/mean": 0.3, "loss": 0.1}
        yield {"step": step, "eval_reward": 0.9, "eval_rewards/accuracy_reward/mean": rate}


def wandb_history():
    for step, rate in CURVE:
        yield {"_step": 3 * step, "trainer": {"global_step": step}, "eval": {"success_rate": rate}}


LONG = [("algorithm", "step", "acc"), *((name, *at) for name in "ab" for at in CURVE)]
SCALARS = [(9, *at) for at in CURVE]
PLAIN = [("step", "pass_rate"), *CURVE]
LISTS = {"train": of_each(step=1, acc=0.001), "eval": of_each(step=1, acc=None), "tags": ["x"]}
HISTORY = json.dumps({"log_history": [*trl()], "callbacks": {}}, indent=1).encode()
KINDS = {  # by name of the file: content, x, y, flags
    "ours/log.jsonl": (json_lines(ours()), "compute_flops", "pass_rate"),
    "typed.jsonl": (json_lines(typed()), "grpo_step", "answer_accuracy"),
    "verl.log": ("\n".join(verl_console()).encode(), "step", "val/test_score/openai/gsm8k"),
    "verl.jsonl": (
        json_lines({"step": s, "data": {"val-core/gsm8k/acc/mean@16": r}} for s, r in CURVE),
        "step",
        "val-core/gsm8k/acc/mean@16",
    ),
    "run/checkpoint-9/trainer_state.json": (HISTORY, "step", "eval_rewards/accuracy_reward/mean"),
    "lists.json": (json.dumps(LISTS).encode(), "step", "acc"),
    "wandb.jsonl": (json_lines(wandb_history()), "trainer/global_step", "eval/success_rate"),
    "scalar.csv": (
        table(("Wall time", "Step", "Value"), *((9, *c) for c in CURVE)),
        "Step",
        "Value",
    ),
    "long.csv": (table(*LONG), "step", "acc", {"where": "algorithm=b"}),
    "excel.csv": (table(*PLAIN, delimiter="\t", encoding="utf-16"), "step", "pass_rate"),
    "bom.jsonl": (b"\xef\xbb\xbf" + json_lines(of_each(step=1, acc=None)), "step", "acc"),
}


@pytest.mark.parametrize("name", KINDS)
def test_reads_every_kind(name, tmp_path):
    content, x, y, *flags = KINDS[name]
    series = read(tmp_path, content, name, **dict(*flags))
    assert (series.x_name, series.y_name) == (x, y)
    assert series.y == pytest.approx(RATES)
    assert np.allclose(series.x, np.array(STEPS) * (1e9 if x == "compute_flops" else 1))
    assert f"read: x = {x}, y = {y}, 11 points" in series.notes[0]
    assert series.num_examples == (960 if name.startswith("ours") else None)
    warned = [note for note in series.notes if "scale" in note]
    assert bool(warned) == ("reward" in y or "score" in y)


def test_folders_standard_input_and_columns_are_named(tmp_path, monkeypatch):
    for step in (90, 100):
        state = json.dumps({"log_history": [r for r in trl() if r["step"] <= step]})
        write(tmp_path, f"run/checkpoint-{step}/trainer_state.json", state.encode())
    (series,) = read_log(tmp_path / "run")
    assert len(series.x) == len(STEPS) and series.name == "checkpoint-100"
    with pytest.raises(ValueError, match="name the file"):
        read_log(tmp_path)
    wide = write(tmp_path, "w.csv", table(("step", "x1", "x2"), *((s, 9, r) for s, r in CURVE)))
    (series,) = read_log(f"{wide}:x2")
    assert (series.name, series.y_name) == ("x2", "x2")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table(*PLAIN))))
    assert read_log("-")[0].y == pytest.approx(RATES)


def test_the_runs_of_a_study_are_folders_or_published_files(tmp_path):
    names = ("k10-seed0", "k9-seed0", "scalerl-seed1")
    for name in names:
        write(tmp_path, f"runs/{name}/log.jsonl", json_lines(ours()))
        write(tmp_path, f"published/{name}.jsonl", json_lines(ours()))
    for folder in ("runs", "published"):
        runs = runs_of_study(tmp_path / folder)
        assert [variant for variant, _ in runs] == ["scalerl", "k9", "k10"]
        assert [read_log(log)[0].name for _, log in runs] == [*reversed(names)]
    assert runs_of_study(tmp_path / "runs" / names[0]) == []


def test_all_event_files_of_a_resumed_run_are_read_in_order_of_their_steps(tmp_path):
    summary = pytest.importorskip("tensorboard.summary")
    for part, factor in ((CURVE[:8], 0.5), (CURVE[5:], 1)):
        writer = summary.Writer(str(tmp_path))
        for step, rate in part:
            writer.add_scalar("eval/accuracy", rate * (factor if step >= 50 else 1), step)
            writer.add_scalar("train/loss", 0.1, step)
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    (series,) = read_log(tmp_path)
    assert list(series.x) == STEPS
    assert series.y == pytest.approx(RATES)
    assert (series.x_name, series.y_name) == ("step", "eval/accuracy")


def test_without_its_package_events_have_a_sentence(tmp_path, monkeypatch):
    package = "tensorboard.backend.event_processing.event_file_loader"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        read_log(write(tmp_path, "events.out.tfevents.1", b"..."))


def test_a_half_written_last_line_is_left_out(tmp_path):
    whole = json_lines(of_each(step=1, acc=None))
    assert read(tmp_path, whole + b'{"step": 700, "ac').y == pytest.approx(RATES)
    assert "no valid JSON" in refusal(tmp_path, whole + b'{"step": 700, "ac\n' + whole)
    plain = table(("step", "val/acc", "loss, mean"), *((*at, 1) for at in CURVE))
    assert read(tmp_path, plain.rstrip()).y == pytest.approx(RATES)
    assert read(tmp_path, plain + b"700,0.").y == pytest.approx(RATES)


# --- which records and columns --------------------------------------------------------------------


def test_where_chooses_records(tmp_path):
    content = json_lines(typed())
    assert "from the eval records" in read(tmp_path, content).notes[0]
    rollouts = read(tmp_path, content, where="type=rollout", y="answer_accuracy")
    assert set(rollouts.y) == {0.5} and "measured in training" in rollouts.notes[1]
    assert "eval, rollout" in refusal(tmp_path, content, where="type=evil")
    assert "did you mean 'type'" in refusal(tmp_path, content, where="typ=eval")
    both = [{"split": kind, "step": s, "acc": r} for s, r in CURVE for kind in ("val", "test")]
    assert "--where split=val or --where split=test" in refusal(tmp_path, json_lines(both))


# The column that is taken, and after the colon others that hold something else.
CHOICES = """
eval/aime: train/reward loss
env/all/correct: env/all/reward/total
eval_rewards/accuracy_reward/mean: eval_reward eval_rewards/format_reward/mean
val/acc: acc train/acc
pass_rate: accuracy pass_rate/a
acc: best_acc acc_std acc_max loss_acc
val-core/gsm8k/acc/mean@8: val-core/gsm8k/acc/best@8/mean val-core/gsm8k/reward/mean@8
evalAccuracy: reward
val/test_score/gsm8k: critic/score/mean
eval/avg@16: eval/pass@8
sampled_pass_at_1: parseable_rate truncation_rate
eval/default_pass1: eval/default_pass8 train/reward
"""


@pytest.mark.parametrize("choice", CHOICES.strip().splitlines())
def test_the_better_name_is_taken(choice, tmp_path):
    best, others = choice.split(": ")
    rows = [{"step": s} | dict.fromkeys(others.split(), s / 200) | {best: r} for s, r in CURVE]
    series = read(tmp_path, json_lines(rows))
    assert series.y_name == best
    assert series.y == pytest.approx(RATES)


@pytest.mark.parametrize(
    "name",
    "timing_s/reward eval_mean_token_accuracy failure_rate eval/failure_rate format_accuracy "
    "acc_std val/acc_min critic/score/max eval_loss kl eval_time reward/format gpu_util "
    "rewards/mine critic/value reward/valid_rate eval/reward_hacking_rate".split(),
)
def test_another_quantity_is_never_taken_in_silence(name, tmp_path):
    content = json_lines(of_each(step=1, **{name: None}))
    assert f"no column in [0, 1] is named like a pass rate: name one with --y (or all): {name}" in (
        refusal(tmp_path, content)
    )
    assert read(tmp_path, content, y=name).y == pytest.approx(RATES)


def test_a_reward_is_read_with_the_warning_that_its_scale_is_not_known(tmp_path):
    """2.0 for a right answer, and all means below 1: A was twice too high, without a word."""
    name = "rewards/correctness_reward_func/mean"
    series = read(tmp_path, json_lines(of_each(step=1, reward=0.001, **{name: None})))
    assert series.y_name == name
    assert any(note.startswith(f"! the scale of {name} is not known") for note in series.notes)
    assert any("measured in training" in note for note in series.notes)
    alike = read(tmp_path, json_lines(of_each(step=1, reward=None, **{"rewards/func/mean": None})))
    assert alike.y_name == "reward"


def test_equally_likely_columns_are_both_named_and_none_is_taken(tmp_path):
    wide = table(("step", "p - val/acc", "q 0 - val/acc"), *((s, r, r / 2) for s, r in CURVE))
    assert refusal(tmp_path, wide).endswith("(or all): p - val/acc, q 0 - val/acc")
    for y in ("all", "p - val/acc,q 0 - val/acc"):
        p, q = read_log(tmp_path / "log", y=y)
        assert (p.name, q.name) == ("p - val/acc", "q 0 - val/acc")
        assert q.y == pytest.approx(np.array(RATES) / 2)
    unnamed = table(("step", "0.6b", "14b"), *((s, r, r / 2) for s, r in CURVE))
    assert [series.name for series in read_log(write(tmp_path, "u", unnamed), y="all")] == [
        "0.6b",
        "14b",
    ]


def test_a_column_that_leaves_0_to_1_is_not_proposed(tmp_path):
    """A negative reward was advised, and then refused."""
    rows = [{"step": s, "reward": r - 0.7, "critic/score/mean": -r, "mine": r} for s, r in CURVE]
    assert refusal(tmp_path, json_lines(rows)).endswith("(or all): mine")
    rows = of_each(step=1, episode_reward=0.5)
    assert "a pass rate lies in [0, 1]" in refusal(tmp_path, json_lines(rows))


def test_each_source_of_problems_has_its_own_number_of_answers(tmp_path):
    numbers = {"num_examples": 256, "num_examples/gym:a": 128, "pass_rate/gym:b": 0.5}
    records = [at | numbers for at in of_each(step=1, pass_rate=None, **{"pass_rate/gym:a": None})]
    content = json_lines(records)
    assert read(tmp_path, content).num_examples == 256
    assert read(tmp_path, content, y="pass_rate/gym:a").num_examples == 128
    assert read(tmp_path, content, y="pass_rate/gym:b").num_examples is None
    assert [series.num_examples for series in read_log(tmp_path / "log", y="all")] == [
        256,
        128,
        None,
    ]


def test_the_best_compute_that_rises_is_taken(tmp_path):
    for name in "train_flops eflops gpu_hours num_tokens iteration epoch Timestep x".split():
        assert read(tmp_path, json_lines(of_each(acc=None, **{name: 1}))).x_name == name
    rows = [{"step": s, "num_tokens": 100 + s % 3, "max_steps": 1, "acc": r} for s, r in CURVE]
    assert read(tmp_path, json_lines(rows)).x_name == "step"
    tokens = read(tmp_path, json_lines(rows), x="num_tokens")
    assert tokens.notes[1].startswith("! num_tokens begins again, and 9 of 11 points")
    few = [row if i else row | {"tokens": 1} for i, row in enumerate(of_each(step=1, acc=None))]
    assert read(tmp_path, json_lines(few)).x_name == "step"


# --- the points -----------------------------------------------------------------------------------


def test_a_resumed_run_counts_once(tmp_path):
    lines = [{"step": s, "val/acc": 0.0 if s >= 50 else r} for s, r in CURVE if s < 80]
    lines += [{"step": s, "val/acc": r} for s, r in CURVE if s >= 50]
    series = read(tmp_path, json_lines(lines))
    assert list(series.x) == STEPS
    assert series.y == pytest.approx(RATES)
    assert "3 of 14 points are left out" in series.notes[1]
    # So few are left that they are hardly of one run: both columns lose the same points.
    again = [at | {"train_acc": at["val_acc"]} for at in of_each(epoch=1, val_acc=None)]
    for y in (None, "train_acc"):
        series = read(tmp_path, json_lines(again + again[:2]), y=y)
        assert len(series.x) == 2
        assert series.notes[1].startswith("! epoch begins again, and 11 of 13 points are left out")


def test_rows_of_one_step_are_averaged_when_told_and_true_is_1(tmp_path):
    rows = [
        {"step": step, "solved": i < solved}
        for step, solved in ((10, 1), (20, 2), (30, 4))
        for i in range(4)
    ]
    assert "average them with --mean" in refusal(tmp_path, json_lines(rows))
    series = read(tmp_path, json_lines(rows), mean=True)
    assert list(series.x) == [10, 20, 30]
    assert list(series.y) == [0.25, 0.5, 1]
    assert "the mean of 4 to 4 rows" in series.notes[1]
    rows = [row | {"num_examples": 10} for row in rows]
    rows[0]["num_examples"] = "many"
    assert read(tmp_path, json_lines(rows), mean=True).num_examples == 40


def test_curves_under_each_other_are_never_joined(tmp_path):
    for column, (one, other) in {"seed": (3, 4), "labelled_so": "ab", "lr": (3, 4.5)}.items():
        rows = [(column, "step", "acc"), *((g, *at) for g in (one, other) for at in CURVE)]
        message = f"by {column}: {one}, {other}; choose one with --where {column}={one}"
        assert message in refusal(tmp_path, table(*rows))
        assert read(tmp_path, table(*rows), where=f"{column}={other}").y == pytest.approx(RATES)
    # No step comes twice, and yet there are two curves.
    pairs = (("a", s, r, "b", s + 5, r) for s, r in CURVE)
    rows = [row for pair in pairs for row in (pair[:3], pair[3:])]
    assert "several curves" in refusal(tmp_path, table(("dataset", "step", "acc"), *rows))


@pytest.mark.parametrize("first", [1, 5])
def test_parts_of_one_run_are_one_curve_with_a_note(first, tmp_path):
    """A base row before the method's, or a curriculum."""
    rows = [("Base" if i < first else "GRPO", *at) for i, at in enumerate(CURVE)]
    series = read(tmp_path, table(("method", "step", "acc"), *rows))
    assert series.y == pytest.approx(RATES)
    assert series.notes[1].startswith("one curve of several parts, by method: Base, GRPO")


def test_of_very_many_points_some_are_used(tmp_path):
    rows = [(step, step / 9000) for step in range(4500)]
    series = read(tmp_path, table(("step", "acc"), *rows))
    assert list(series.x) == list(range(0, 4500, 3))
    assert "of 4500 points one in 3 is used" in series.notes


def test_missing_values_leave_out_their_points(tmp_path):
    rows = [[s, r] for s, r in CURVE]
    rows[3][1], rows[4][1], rows[5][0] = "nan", "", "N/A"
    assert list(read(tmp_path, table(("step", "acc"), *rows)).x) == STEPS[:3] + STEPS[6:]


def changed(row: int, x=None, y=None) -> bytes:
    """The curve as a table, with one cell replaced."""
    rows = [["step", "acc"], *map(list, CURVE)]
    rows[row] = [rows[row][0] if x is None else x, rows[row][1] if y is None else y]
    return table(*rows)


BROKEN = {
    "the file is empty": b"",
    "acc = 'much' is no number": changed(3, y="much"),
    "acc = '42%' is no number": changed(3, y="42%"),
    "step = '1,000' is no number": changed(11, x="1,000"),
    "step = 15, acc = 0.5: compute must increase": changed(4, x=15),
    "step = 90, acc = 0.74: compute must increase": table(("step", "acc"), *reversed(CURVE)),
    "acc = 70: a pass rate lies in [0, 1]: name another column with --y, or say --perc": changed(
        11, y=70
    ),
    "not finite": changed(3, y="inf"),
    "more values than the 2 names": b"step,acc\n1,000,0.4\n",
    "no column is named like compute": json_lines(of_each(mine=1, acc=None)),
    "no column in [0, 1] is named like a pass rate": table(
        ("step", "note"), *((s, "fine") for s in STEPS)
    ),
    "is no valid JSON": HISTORY[:-200],
    "is no JSON object": b'{"step": 1}\n[1, 2]\n',
    "neither JSON, nor verl's console, nor a table": b"| epoch | 0.1 |\nstep=1 acc=.5\n",
    "recursion": b"[" * 100_000,
}


@pytest.mark.parametrize("words", BROKEN)
def test_what_is_wrong_is_said_in_one_sentence(words, tmp_path):
    assert words in refusal(tmp_path, BROKEN[words])


def test_columns_that_flags_name_must_be_there(tmp_path):
    content = table(*PLAIN)
    assert "did you mean 'pass_rate'" in refusal(tmp_path, content, y="pass_rat")
    assert "--x: there is no 'steps'" in refusal(tmp_path, content, x="steps")
    percent = table(("step", "acc"), *((s, 100 * r) for s, r in CURVE))
    assert read(tmp_path, percent, percent=True).y == pytest.approx(RATES)
