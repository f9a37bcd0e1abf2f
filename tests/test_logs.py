"""curve/logs.py, curve/records.py: every kind of log, which columns are taken."""

import io
import json
import re
import sys
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from curve.logs import read_log

STEPS = list(range(0, 101, 10))
RATES = [0.2, *(round(0.2 + 0.6 / (1 + (30 / step) ** 2), 4) for step in STEPS[1:])]
CURVE = list(zip(STEPS, RATES))


pytestmark = pytest.mark.usefixtures("here")


def bytes_of(content) -> bytes:
    """Dicts become JSON lines, and other rows a table."""
    if isinstance(content, bytes | str):
        return content if isinstance(content, bytes) else content.encode()
    lines = [
        json.dumps(row) if isinstance(row, dict) else ",".join(map(str, row)) for row in content
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def read_all(content, name="log", **choices):
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes_of(content))
    return read_log(file, **choices)


def read(content, name="log", **choices):
    """The one curve of a log with this content."""
    (series,) = read_all(content, name, **choices)
    return series


def require_curve(series):
    assert list(series.x) == STEPS and series.y == pytest.approx(RATES)


def of_each(*rates, **others) -> list[dict]:
    """A record for each point: the pass rate under each of these names, and others, numbers that
    are times the step."""
    return [
        {"step": step} | dict.fromkeys(rates, rate) | {name: k * step for name, k in others.items()}
        for step, rate in CURVE
    ]


# --- what each framework writes -------------------------------------------------------------------


# The name of a file, and its columns of x and y. Then its lines; from the first with STEP on, each
# point has its own.
FORMATS = """
=== ours/log.jsonl | compute_flops | pass_rate
{"kind": "validation", "compute_flops": STEP, "pass_rate": RATE, "num_examples": 960}
{"kind": "train", "compute_flops": STEP, "pass_rate": 0.5}
=== typed.jsonl | grpo_step | answer_accuracy
{"type": "eval", "grpo_step": STEP, "reward": RATE, "answer_accuracy": RATE, "format_accuracy": 0.9}
{"type": "rollout", "grpo_step": STEP, "reward": RATE, "answer_accuracy": 0.5, "std_reward": 0.1}
=== job.csv | step | accuracy
step,job,accuracy
STEP,eval,RATE
STEP.5,rollout,0.5
=== verl.log | step | val/test_score/openai/gsm8k
commit: d60f843, reward: 7
\x1b[36m(Run)\x1b[0m step:STEP - actor/x:nan - val/test_score/openai/gsm8k:np.float64(RATE) - x/y:0.4
\x1b[36m(Run)\x1b[0m step:STEP1 - actor/x:nan - critic/score/mean:0.4
=== verl-first.log | step | val/test_score/openai/gsm8k
(main_task pid=6) step:STEP - test_score/openai/gsm8k:RATE
=== hf.log | num_tokens | rewards/accuracy_reward/mean
Some weights were not used; a line of a library
\r STEP%|#  | STEP/100 [00:01<01:00, 1.5s/it]\r          \r{'loss': nan, 'rewards/accuracy_reward/mean': RATE, 'num_tokens': STEP}
=== hf-5.log | num_tokens | rewards/accuracy_reward/mean
{'loss': 'nan', 'rewards/accuracy_reward/mean': 'RATE', 'num_tokens': 'STEP'}
=== sb3.log | total_timesteps | success_rate
----------------------------------
|    total_timesteps | STEP   |
| rollout/         |       |
|    success_rate  | RATE |
----------------------------------
=== verl.jsonl | step | val-core/gsm8k/acc/mean@16
{"step": STEP, "data": {"val-core/gsm8k/acc/mean@16": RATE}}
=== wandb.jsonl | trainer/global_step | eval/success_rate
{"_step": 9STEP, "trainer": {"global_step": STEP}, "eval": {"success_rate": RATE}}
=== percent.csv | Step | Eval Accuracy
Step,Eval Accuracy
STEP,PERCENT%
=== scalar.csv | Step | Value
Wall time,Step,Value
9,STEP,RATE
=== tabs.tsv | step | pass_rate
step	pass_rate
STEP	RATE
=== missing.csv | step | acc
step,acc
30,nan
40,
N/A,0.5
STEP,RATE
"""  # noqa: E501


def of_points(lines: str) -> str:
    head, block = re.split("(?m)(?=^.*STEP)", lines, maxsplit=1)
    for step, rate in CURVE:
        rates = block.replace("RATE", str(rate)).replace("PERCENT", str(100 * rate))
        head += rates.replace("STEP", str(step))
    return head


def trl(last=100):
    history = []
    for step, rate in CURVE[: last // 10 + 1]:
        history.append({"step": step, "rewards/accuracy_reward/mean": 0.3, "loss": 0.1})
        history.append({"step": step, "eval_reward": 9, "eval_rewards/accuracy_reward/mean": rate})
    return json.dumps({"log_history": history, "callbacks": {}}, indent=1)


COLUMNS = {"step": STEPS, "val_accuracy": RATES, "loss": [0.5] * 99, "name": "x"}
LISTS = {"train": of_each(acc=0.001), "eval": of_each("acc"), "tags": ["x"]}
LONG = [("algorithm", "step", "acc"), *((name, *at) for name in "ab" for at in CURVE)]
PLAIN = [("step", "pass_rate"), *CURVE]
REWARD = "rewards/accuracy_reward/mean"
KINDS = {  # by name of the file: content, x, y
    "trainer_state.json": (trl(), "step", "eval_rewards/accuracy_reward/mean"),
    "lists.json": (json.dumps(LISTS), "step", "acc"),
    "columns.json": (json.dumps(COLUMNS), "step", "val_accuracy"),
    "long.csv": (LONG, "step", "acc"),
    "utf-16.csv": (bytes_of(PLAIN).decode().encode("utf-16"), "step", "pass_rate"),
    "bom.jsonl": (b"\xef\xbb\xbf" + bytes_of(of_each("acc")), "step", "acc"),
}
for section in FORMATS.split("=== ")[1:]:
    title, lines = section.split("\n", 1)
    name, x, y = title.split(" | ")
    KINDS[name] = (of_points(lines), x, y)


@pytest.mark.parametrize("name", KINDS)
def test_reads_every_kind(name):
    content, x, y = KINDS[name]
    series = read(content, name, where="algorithm=b" if name == "long.csv" else None)
    assert (series.x_name, series.y_name) == (x, y)
    require_curve(series)
    assert f"read: x = {x}, y = {y}, 11 points" in series.notes[0]
    assert series.num_examples == (960 if name.startswith("ours") else None)
    warned = any("scale" in note for note in series.notes)
    assert warned == ("reward" in y or "score" in y)
    assert any("in training" in note for note in series.notes) == y.startswith("rewards/")


def test_folders_and_standard_input_are_named(monkeypatch):
    for last in (90, 100):
        read(trl(last), f"run/checkpoint-{last}/trainer_state.json")
    (series,) = read_log("run")
    assert (series.name, len(series.x)) == ("run", len(STEPS))
    with pytest.raises(ValueError, match="name the file"):
        read_log(".")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(bytes_of(PLAIN))))
    require_curve(read_log("-")[0])


UNDONE = [(step, 0.0 if step >= 50 else rate) for step, rate in CURVE[:8]]  # by a resumed run


def test_all_event_files_of_a_resumed_run_are_read_in_order_of_their_steps(tmp_path, monkeypatch):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for part, suffix in ((UNDONE, ".1"), (CURVE[5:], ".2")):
        with tensorboard.SummaryWriter(str(tmp_path), filename_suffix=suffix) as writer:
            for step, rate in part:
                writer.add_scalar("eval/accuracy", rate, step)
                writer.add_scalar("train/loss", 0.1, step)
    (series,) = read_log(tmp_path)
    require_curve(series)
    assert (series.x_name, series.y_name) == ("step", "eval/accuracy")
    package = "tensorboard.backend.event_processing.event_accumulator"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match="tensorboard"):
        read_log(tmp_path)


def test_a_half_written_last_row_is_left_out():
    plain = bytes_of([("step", "val/acc", '"loss, mean"'), *((*at, 1) for at in CURVE)])
    require_curve(read(plain.rstrip()))
    require_curve(read(plain + b"700,0."))
    assert read(b'{"step": 1, "acc": true}\n').y == [1]


@pytest.mark.parametrize("place", [0, 6, 11])
def test_lines_that_cannot_be_read_are_left_out_and_told_if_they_are_few(place):
    """Zero bytes, as a full disk leaves them, and half a line."""
    for broken in (b"\0" * 99, b'{"step": 700, "ac'):
        lines = bytes_of(of_each("acc")).splitlines()
        lines.insert(place, broken)
        series = read(b"\n".join(lines))
        require_curve(series)
        assert series.notes[-1].startswith(f"! line {place + 1} is no JSON, and left out")
    with pytest.raises(ValueError, match=f"line {place + 1} is no JSON"):
        read(b"\n".join(lines + [broken] * 3))


# --- which records and columns --------------------------------------------------------------------


def test_where_chooses_records():
    stages = KINDS["typed.jsonl"][0].replace("type", "event_type")
    assert "from the eval records" in read(stages).notes[0]
    rollouts = read(stages, where="event_type=rollout", y="answer_accuracy")
    of_batches = read(trl(), y=REWARD)
    assert (set(rollouts.y), set(of_batches.y)) == ({0.5}, {0.3})
    assert all("measured in training" in series.notes[1] for series in (rollouts, of_batches))
    assert ", from the val records" in read(SPLITS, where="split=val").notes[0]
    require_curve(read(BELOW, where="model=a"))
    require_curve(read(SEEDS, where="seed=4"))


# The column that is taken, and after the colon others that hold something else.
CHOICES = """
eval/aime: train/reward loss
env/all/correct: env/all/reward/total
eval_rewards/accuracy_reward/mean: eval_reward eval_rewards/format_reward/mean
val/acc: acc train/acc
pass_rate: accuracy pass_rate/a
acc: best_acc acc_std acc_max loss_acc
val-core/gsm8k/acc/mean@8: val-core/gsm8k/acc/best@8/mean val-core/gsm8k/reward/mean@8
eval/x/effective/solver/avg@8: eval/x/all/solver/avg@8 reward/mean
eval/all/avg_score: eval/gsm8k/avg_score reward/avg_raw_reward
test/env/all/correct: env/all/correct test/env/all/reward/total
eval/objective/verifiable_correct_rate: objective/verifiable_correct_rate scores
validation/accuracy: train/reward
train/rewards/accuracy_reward/mean: train/reward
Val Accuracy: val/loss
val/test_score/gsm8k: critic/score/mean
val-core/math_dapo/acc/mean@32: critic/score/mean val-aux/math_dapo/acc/mean@32
val-core/a/MATH-b/reward/mean@1: val-core/a/MATH-b/reward/best@4/mean
eval/avg@16: eval/pass@8
sampled_pass_at_1: parseable_rate truncation_rate
eval/default_pass1: eval/default_pass8 train/reward
rewards/correctness_reward_func/mean: reward
"""


@pytest.mark.parametrize("choice", CHOICES.strip().splitlines())
def test_the_better_name_is_taken(choice):
    best, others = choice.split(": ")
    series = read(of_each(best, **dict.fromkeys(others.split(), 1 / 200)))
    assert series.y_name == best
    require_curve(series)


def test_another_quantity_is_never_taken():
    names = (
        "timing_s/reward eval_mean_token_accuracy failure_rate eval/failure_rate format_accuracy "
        "acc_std val/acc_min critic/score/max eval_loss kl eval_time reward/format gpu_util "
        "rewards/mine critic/value reward/valid_rate eval/reward_hacking_rate minutes"
    )
    for name in names.split():
        with pytest.raises(ValueError, match=f"there are step, {name}"):
            read(of_each(name))
        require_curve(read(of_each(name), y=name))


def test_equally_good_columns_are_both_named_and_none_is_taken():
    names = ("p - val/acc", "q 0 - val/acc")
    rows = [("step", *names), *((step, rate, rate / 2) for step, rate in CURVE)]
    with pytest.raises(ValueError, match=", ".join(names)):
        read(rows)
    for y in ("all", ",".join(names)):
        first, second = read_all(rows, y=y)
        assert (first.name, second.name) == names
        require_curve(first)
        assert second.y == pytest.approx(np.array(RATES) / 2)


def test_rewards_are_scaled_by_what_a_wrong_and_a_right_answer_give():
    for low, high in ((-1, 1), (0, 100), (1, 0)):  # and the rate of failures
        scaled = of_each(acc=0)
        for record, rate in zip(scaled, RATES):
            record["acc"] = low + (high - low) * rate
        require_curve(read(scaled, range=(low, high)))
    assert "no value" in read(of_each("acc"), range=(0, 100)).notes[1]


def test_each_source_of_problems_has_its_own_number_of_answers():
    numbers = {"num_examples": 256, "num_examples/gym:a": 128, "pass_rate/gym:b": 0.5}
    rates = ("pass_rate", "pass_rate/gym:a", "pass_at_n")
    records = [record | numbers for record in of_each(*rates)]
    assert read(records).num_examples == 256
    of_each_rate = read_all(records, y=",".join(rates))
    assert [series.num_examples for series in of_each_rate] == [256, 128, None]


def test_the_best_compute_that_is_known_is_taken():
    names = (
        "train_flops eflops gpu_hours num_tokens _step time/total_timesteps progress/total_tokens "
        "cumulative_generated_tokens training/global_step"
    )
    for name in names.split():
        records = of_each("acc", **{name: 1, "timing_s/step": 1, "perf/total_num_tokens": 1})
        for record in records[1:]:
            del record["step"]  # what the first record alone has is not taken
        assert read(records).x_name == name


# --- the points -----------------------------------------------------------------------------------


def test_a_resumed_run_counts_once():
    series = read([("step", "val/acc"), *UNDONE, *CURVE[5:]])
    require_curve(series)
    assert "3 of 14 points are left out" in series.notes[1]
    # No resumed run goes back to where it has not been: all points count, and are refused later.
    assert len(read([("step", "val/acc"), *CURVE[5:], *CURVE[:5]]).x) == 11
    # A metric is no label: a loss that repeats, as the learning rate changed.
    parts = [(0.5, *at) for at in UNDONE] + [(0.25, *at) for at in CURVE[5:]]
    require_curve(read([("loss", "step", "val/acc"), *parts]))


def test_seeds_in_one_log_are_curves_of_one_name():
    for series, seed in zip(read_all(SEEDS), (3, 4), strict=True):
        require_curve(series)
        assert series.name == "log" and series.notes[0].endswith(f"of seed {seed}")


def test_parts_of_one_run_are_one_curve_with_a_note():
    """A base row before the method's."""
    rows = [("GRPO" if step else "Base", step, rate) for step, rate in CURVE]
    series = read([("Method", "step", "acc"), *rows])
    require_curve(series)
    assert series.notes[0].endswith("one curve of several parts by Method: Base, GRPO")


# --- what is refused ------------------------------------------------------------------------------

SEEDS = [("seed", "step", "acc"), *((seed, *at) for seed in (3, 4) for at in CURVE)]
SPLITS = [record | {"split": kind} for record in of_each("acc") for kind in ("val", "test")]
SPLIT_IN_TURN = [a | {"split": kind} for a, kind in zip(of_each("acc"), cycle(("val", "test")))]
# Curves below each other. In the last no step comes twice.
BELOW = [("model", "step", "acc"), *[("b", 0, 0.5)] * 2, *(("a", *at) for at in CURVE)]
UNKNOWN_LABEL = [("labelled_so", "step", "acc"), *BELOW[1:]]
OF_TASKS = [("task", *LONG[0]), *((task, *row) for task in "tu" for row in LONG[1:])]
ALTERNATING = [("dataset", "step", "acc"), *(("ab"[i % 2], *at) for i, at in enumerate(CURVE))]
REFUSED = [  # what is said, content, flags
    ("the file is empty", b""),
    ("which column is the pass rate? --y must name it; there are none", b"step,acc"),
    ("which column is compute? --x must name it; there are mine", [{"mine": 1, "acc": 0.5}]),
    ("without commas: '0,42'", b"step;acc\n1;0,42\n"),
    ("more values than columns (decimal commas?): ['1', '000', [", b"step,acc\n1,000,0.4\n"),
    ("each once", b"step,acc,acc\n1,0.1,0.2\n"),
    ("line 1 is no JSON", trl()[:-200]),
    ("neither JSON, nor a console", b"epoch=1 acc=.5\nstep=1 acc=.5\n"),
    ("the file is no text", b"PK\3\4\r" + bytes(range(128, 256))),
    ("recursion", b"[" * 100_000),
    ("--y: there is no 'reward', but step, pass_rate", PLAIN, dict(y="reward")),
    ("--x: there is no 'reward', but step, pass_rate", PLAIN, dict(x="reward")),
    ("--x: there is no 'step,pass_rate'", PLAIN, dict(x="step,pass_rate")),
    ("--where seed: there is no '5', but 3, 4", SEEDS, dict(where="seed=5")),
    ("--where: there is no 'sed', but seed, step", SEEDS, dict(where="sed=4")),
    ("--where, of split=val, split=test", SPLITS),
    ("--where, of split=val, split=test", SPLIT_IN_TURN),
    ("of model=b, model=a", BELOW),
    ("of labelled_so=b, labelled_so=a", UNKNOWN_LABEL),
    ("of algorithm=a, algorithm=b", OF_TASKS, dict(where="task=t")),
    ("of dataset=a, dataset=b", ALTERNATING),
    ("--range: a wrong and a right", PLAIN, dict(range=(1, 1))),
    ("several rows have one step: choose with --where", [{"step": 1, "acc": 0.5}] * 3),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_what_is_no_curve_is_refused_in_one_sentence(case):
    words, content, *flags = case
    with pytest.raises(ValueError) as error:
        read(content, **dict(*flags))
    message = str(error.value)
    assert message.startswith("log: ") and "\n" not in message
    assert words in message
