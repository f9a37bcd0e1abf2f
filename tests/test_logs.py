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


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(rows, delimiter=",", encoding="utf-8") -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(encoding)


def bytes_of(content) -> bytes:
    """Records become JSON lines, and rows become a table."""
    if isinstance(content, bytes):
        return content
    content = list(content)
    if not isinstance(content[0], dict):
        return table(content)
    return "".join(json.dumps(record) + "\n" for record in content).encode()


def write(name: str, content) -> Path:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes_of(content))
    return file


def read_all(content, name="log", **choices):
    return read_log(write(name, content), **choices)


def read(content, name="log", **choices):
    """The one curve of a log with this content."""
    (series,) = read_all(content, name, **choices)
    return series


def refusal(content, **choices) -> str:
    with pytest.raises(ValueError) as error:
        read_all(content, **choices)
    message = str(error.value)
    assert message.startswith("log: ")
    assert "\n" not in message
    return message


def require_curve(series):
    assert series.y == pytest.approx(RATES)


def of_each(rates=(), **others) -> list[dict]:
    """A record for each point: the pass rate under each name of `rates`, and the others, numbers
    that are times the step."""
    records = []
    for step, rate in CURVE:
        record = dict.fromkeys([rates] if isinstance(rates, str) else rates, rate)
        for name, value in others.items():
            record[name] = value * step
        records.append(record)
    return records


def undone():
    """The first points, of which a resumed run makes the last three again."""
    return [(step, 0.0 if step >= 50 else rate) for step, rate in CURVE[:8]]


# --- what each framework writes -------------------------------------------------------------------


def ours():
    for validation in of_each("pass_rate", compute_flops=1e9, step=1):
        yield validation | {"kind": "validation", "num_examples": 960}
        yield validation | {"kind": "train", "pass_rate": 0.5}


def typed():
    for step, rate in CURVE:
        at = {"grpo_step": step, "reward": rate}
        yield at | {"type": "eval", "answer_accuracy": rate, "format_accuracy": 0.9}
        yield at | {"type": "rollout", "answer_accuracy": 0.5, "std_reward": 0.1}


def verl_console():
    yield "commit: d60f843, reward: 7"
    yield f"(main_task pid=6) step:0 - test_score/openai/gsm8k:{RATES[0]}"
    rates = dict(CURVE)
    for step in range(1, 101):
        test = ""
        if step in rates:
            test = f" - val/test_score/openai/gsm8k:np.float64({rates[step]})"
        yield f"\x1b[36m(Run)\x1b[0m step:{step} - actor/x:nan{test} - critic/score/mean:0.4"


def trl():
    for step, rate in CURVE:
        yield {"step": step, "reward": 0.4, "rewards/accuracy_reward/mean": 0.3, "loss": 0.1}
        yield {"step": step, "eval_reward": 0.9, "eval_rewards/accuracy_reward/mean": rate}


VERL = [{"step": s, "data": {"val-core/gsm8k/acc/mean@16": r}} for s, r in CURVE]
WANDB = [
    {"_step": 3 * step, "trainer": {"global_step": step}, "eval": {"success_rate": rate}}
    for step, rate in CURVE
]
LISTS = {"train": of_each(step=1, acc=0.001), "eval": of_each("acc", step=1), "tags": ["x"]}
HISTORY = json.dumps({"log_history": [*trl()], "callbacks": {}}, indent=1).encode()
PLAIN = [("step", "pass_rate"), *CURVE]
SCALAR = [("Wall time", "Step", "Value"), *((9, *at) for at in CURVE)]
LONG = [("algorithm", "step", "acc"), *((name, *at) for name in "ab" for at in CURVE)]
KINDS = {  # by name of the file: content, x, y
    "ours/log.jsonl": (bytes_of(ours()), "compute_flops", "pass_rate"),
    "typed.jsonl": (bytes_of(typed()), "grpo_step", "answer_accuracy"),
    "verl.log": ("\n".join(verl_console()).encode(), "step", "val/test_score/openai/gsm8k"),
    "verl.jsonl": (VERL, "step", "val-core/gsm8k/acc/mean@16"),
    "run/checkpoint-9/trainer_state.json": (HISTORY, "step", "eval_rewards/accuracy_reward/mean"),
    "lists.json": (json.dumps(LISTS).encode(), "step", "acc"),
    "wandb.jsonl": (WANDB, "trainer/global_step", "eval/success_rate"),
    "scalar.csv": (SCALAR, "Step", "Value"),
    "long.csv": (LONG, "step", "acc"),
    "excel.csv": (table(PLAIN, "\t", "utf-16"), "step", "pass_rate"),
    "bom.jsonl": (b"\xef\xbb\xbf" + bytes_of(of_each("acc", step=1)), "step", "acc"),
}


@pytest.mark.parametrize("name", KINDS)
def test_reads_every_kind(name):
    content, x, y = KINDS[name]
    where = "algorithm=b" if name == "long.csv" else None
    series = read(content, name, where=where)
    assert (series.x_name, series.y_name) == (x, y)
    require_curve(series)
    unit = 1e9 if x == "compute_flops" else 1
    assert np.allclose(series.x, np.array(STEPS) * unit)
    assert f"read: x = {x}, y = {y}, 11 points" in series.notes[0]
    assert series.num_examples == (960 if name.startswith("ours") else None)
    warned = [note for note in series.notes if "scale" in note]
    assert bool(warned) == ("reward" in y or "score" in y)


def test_folders_standard_input_and_columns_are_named(monkeypatch):
    for last in (90, 100):
        history = [record for record in trl() if record["step"] <= last]
        state = json.dumps({"log_history": history}).encode()
        write(f"run/checkpoint-{last}/trainer_state.json", state)
    (series,) = read_log("run")
    assert len(series.x) == len(STEPS)
    assert series.name == "checkpoint-100"
    with pytest.raises(ValueError, match="name the file"):
        read_log(".")

    write("w.csv", [("step", "x1", "x2"), *((s, 9, r) for s, r in CURVE)])
    (series,) = read_log("w.csv:x2")
    assert (series.name, series.y_name) == ("x2", "x2")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table(PLAIN))))
    require_curve(read_log("-")[0])


def test_the_runs_of_a_study_are_folders_or_published_files():
    names = ("k10-seed0", "k9-seed0", "scalerl-seed1")
    for name in names:
        write(f"runs/{name}/log.jsonl", ours())
        write(f"published/{name}.jsonl", ours())
    for folder in ("runs", "published"):
        runs = runs_of_study(Path(folder))
        assert [variant for variant, _ in runs] == ["scalerl", "k9", "k10"]
        assert [read_log(log)[0].name for _, log in runs] == [*reversed(names)]
    assert runs_of_study(Path("runs", names[0])) == []


def test_all_event_files_of_a_resumed_run_are_read_in_order_of_their_steps(tmp_path):
    summary = pytest.importorskip("tensorboard.summary")
    for part in (undone(), CURVE[5:]):
        writer = summary.Writer(str(tmp_path))
        for step, rate in part:
            writer.add_scalar("eval/accuracy", rate, step)
            writer.add_scalar("train/loss", 0.1, step)
        writer.close()
    assert len(list(tmp_path.iterdir())) == 2
    (series,) = read_log(tmp_path)
    assert list(series.x) == STEPS
    require_curve(series)
    assert (series.x_name, series.y_name) == ("step", "eval/accuracy")


def test_without_its_package_events_have_a_sentence(monkeypatch):
    package = "tensorboard.backend.event_processing.event_file_loader"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        read(b"...", "events.out.tfevents.1")


def test_a_half_written_last_line_is_left_out():
    whole = bytes_of(of_each("acc", step=1))
    half = b'{"step": 700, "ac'
    require_curve(read(whole + half))
    assert "no valid JSON" in refusal(whole + half + b"\n" + whole)
    plain = table([("step", "val/acc", "loss, mean"), *((*at, 1) for at in CURVE)])
    require_curve(read(plain.rstrip()))
    require_curve(read(plain + b"700,0."))


# --- which records and columns --------------------------------------------------------------------


def test_where_chooses_records():
    content = bytes_of(typed())
    assert "from the eval records" in read(content).notes[0]
    rollouts = read(content, where="type=rollout", y="answer_accuracy")
    assert set(rollouts.y) == {0.5}
    assert "measured in training" in rollouts.notes[1]
    assert "eval, rollout" in refusal(content, where="type=evil")
    assert "did you mean 'type'" in refusal(content, where="typ=eval")
    both = [{"split": kind, "step": s, "acc": r} for s, r in CURVE for kind in ("val", "test")]
    assert "--where split=val or --where split=test" in refusal(both)


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
def test_the_better_name_is_taken(choice):
    best, others = choice.split(": ")
    worse = dict.fromkeys(others.split(), 1 / 200)
    series = read(of_each(best, step=1, **worse))
    assert series.y_name == best
    require_curve(series)


@pytest.mark.parametrize(
    "name",
    "timing_s/reward eval_mean_token_accuracy failure_rate eval/failure_rate format_accuracy "
    "acc_std val/acc_min critic/score/max eval_loss kl eval_time reward/format gpu_util "
    "rewards/mine critic/value reward/valid_rate eval/reward_hacking_rate".split(),
)
def test_another_quantity_is_never_taken_in_silence(name):
    content = of_each(name, step=1)
    none = "no column in [0, 1] is named like a pass rate: name one with --y (or all)"
    assert f"{none}: {name}" in refusal(content)
    require_curve(read(content, y=name))


def test_a_reward_is_read_with_the_warning_that_its_scale_is_not_known():
    """2.0 for a right answer, and all means below 1: A was twice too high, without a word."""
    name = "rewards/correctness_reward_func/mean"
    series = read(of_each(name, step=1, reward=0.001))
    assert series.y_name == name
    assert any(note.startswith(f"! the scale of {name} is not known") for note in series.notes)
    assert any("measured in training" in note for note in series.notes)
    # TRL names a single reward twice.
    alike = ("reward", "rewards/func/mean")
    assert read(of_each(alike, step=1)).y_name == "reward"


@pytest.mark.parametrize("names", [("p - val/acc", "q 0 - val/acc"), ("0.6b", "14b")])
def test_equally_likely_columns_are_both_named_and_none_is_taken(names):
    rows = [("step", *names), *((s, r, r / 2) for s, r in CURVE)]
    assert refusal(rows).endswith(f"(or all): {names[0]}, {names[1]}")
    for y in ("all", ",".join(names)):
        first, second = read_all(rows, y=y)
        assert (first.name, second.name) == names
        assert second.y == pytest.approx(np.array(RATES) / 2)


def test_a_column_that_leaves_0_to_1_is_not_proposed():
    """A negative reward was advised, and then refused."""
    rows = [{"step": s, "reward": r - 0.7, "critic/score/mean": -r, "mine": r} for s, r in CURVE]
    assert refusal(rows).endswith("(or all): mine")
    assert "a pass rate lies in [0, 1]" in refusal(of_each(step=1, episode_reward=0.5))


def test_each_source_of_problems_has_its_own_number_of_answers():
    numbers = {"num_examples": 256, "num_examples/gym:a": 128, "pass_rate/gym:b": 0.5}
    rates = ("pass_rate", "pass_rate/gym:a")
    records = [record | numbers for record in of_each(rates, step=1)]
    assert read(records).num_examples == 256
    assert [series.num_examples for series in read_all(records, y="all")] == [256, 128, None]


def test_the_best_compute_that_rises_is_taken():
    for name in "train_flops eflops gpu_hours num_tokens iteration epoch Timestep x".split():
        assert read(of_each("acc", **{name: 1})).x_name == name
    rows = [{"num_tokens": 100 + s % 3, "step": s, "max_steps": 1, "acc": r} for s, r in CURVE]
    assert read(rows).x_name == "step"
    tokens = read(rows, x="num_tokens")
    assert tokens.notes[1].startswith("! num_tokens begins again, and 9 of 11 points")
    few = of_each("acc", step=1)
    few[0]["tokens"] = 1
    assert read(few).x_name == "step"


# --- the points -----------------------------------------------------------------------------------


def test_a_resumed_run_counts_once():
    series = read([("step", "val/acc"), *undone(), *CURVE[5:]])
    assert list(series.x) == STEPS
    require_curve(series)
    assert "3 of 14 points are left out" in series.notes[1]
    # So few are left that they are hardly of one run: both columns lose the same points.
    again = of_each(("val_acc", "train_acc"), epoch=1)
    for y in (None, "train_acc"):
        series = read(again + again[:2], y=y)
        assert len(series.x) == 2
        assert series.notes[1].startswith("! epoch begins again, and 11 of 13 points are left out")


def test_rows_of_one_step_are_averaged_when_told_and_true_is_1():
    rows = []
    for step, solved in ((10, 1), (20, 2), (30, 4)):
        rows += [{"step": step, "solved": i < solved, "num_examples": 10} for i in range(4)]
    rows[0]["num_examples"] = "many"
    assert "average them with --mean" in refusal(rows)
    series = read(rows, mean=True)
    assert list(series.x) == [10, 20, 30]
    assert list(series.y) == [0.25, 0.5, 1]
    assert "the mean of 4 to 4 rows" in series.notes[1]
    assert series.num_examples == 40


def test_curves_under_each_other_are_never_joined():
    for column, (one, other) in {"seed": (3, 4), "labelled_so": "ab", "lr": (3, 4.5)}.items():
        rows = [(column, "step", "acc"), *((g, *at) for g in (one, other) for at in CURVE)]
        message = f"by {column}: {one}, {other}; choose one with --where {column}={one}"
        assert message in refusal(rows)
        require_curve(read(rows, where=f"{column}={other}"))
    # No step comes twice, and yet there are two curves.
    rows = [("dataset", "step", "acc")]
    for step, rate in CURVE:
        rows += [("a", step, rate), ("b", step + 5, rate)]
    assert "several curves" in refusal(rows)


@pytest.mark.parametrize("first", [1, 5])
def test_parts_of_one_run_are_one_curve_with_a_note(first):
    """A base row before the method's, or a curriculum."""
    rows = [("Base" if i < first else "GRPO", *at) for i, at in enumerate(CURVE)]
    series = read([("method", "step", "acc"), *rows])
    require_curve(series)
    assert series.notes[1].startswith("one curve of several parts, by method: Base, GRPO")


def test_of_very_many_points_some_are_used():
    rows = [(step, step / 9000) for step in range(4500)]
    series = read([("step", "acc"), *rows])
    assert list(series.x) == list(range(0, 4500, 3))
    assert "of 4500 points one in 3 is used" in series.notes


def changed(row: int, **cells) -> list[dict]:
    """The curve, with cells of one row replaced."""
    records = of_each("acc", step=1)
    records[row] |= cells
    return records


def test_missing_values_leave_out_their_points():
    gaps = [(30, "nan"), (40, ""), ("N/A", 0.5)]
    series = read([("step", "acc"), *CURVE[:3], *gaps, *CURVE[6:]])
    assert list(series.x) == STEPS[:3] + STEPS[6:]


PERCENT = "a pass rate lies in [0, 1]: name another column with --y, or say --perc"
BROKEN = {
    "the file is empty": b"",
    "acc = '42%' is no number": changed(2, acc="42%"),
    "step = '1,000' is no number": changed(10, step="1,000"),
    "step = 15, acc = 0.5: compute must increase": changed(3, step=15),
    "step = 90, acc = 0.74: compute must increase": [("step", "acc"), *reversed(CURVE)],
    f"acc = 70: {PERCENT}": changed(10, acc=70),
    "not finite": changed(2, acc="inf"),
    "more values than the 2 names": b"step,acc\n1,000,0.4\n",
    "no column is named like compute": of_each("acc", mine=1),
    "no column in [0, 1] is named like a pass rate": [{"step": s, "note": "fine"} for s in STEPS],
    "is no valid JSON": HISTORY[:-200],
    "is no JSON object": b'{"step": 1}\n[1, 2]\n',
    "neither JSON, nor verl's console, nor a table": b"| epoch | 0.1 |\nstep=1 acc=.5\n",
    "recursion": b"[" * 100_000,
}


@pytest.mark.parametrize("words", BROKEN)
def test_what_is_wrong_is_said_in_one_sentence(words):
    assert words in refusal(BROKEN[words])


def test_columns_that_flags_name_must_be_there():
    assert "did you mean 'pass_rate'" in refusal(PLAIN, y="pass_rat")
    assert "--x: there is no 'steps'" in refusal(PLAIN, x="steps")
    percent = [("step", "acc"), *((s, 100 * r) for s, r in CURVE)]
    require_curve(read(percent, percent=True))
