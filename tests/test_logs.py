"""curve/logs.py, curve/records.py: every kind of log, which columns are taken."""

import io
import re
import sys
from pathlib import Path

import pytest
from programs import rows

from curve.logs import read_log

STEPS = list(range(0, 101, 10))
RATES = [0.2, *(round(0.2 + 0.6 / (1 + (30 / step) ** 2), 4) for step in STEPS[1:])]
CURVE = list(zip(STEPS, RATES))


pytestmark = pytest.mark.usefixtures("here")

# Logs by name. Each point has its own lines, from the first with STEP on to END.
LOGS = """
=== ours.jsonl
{"kind": "validation", "compute_flops": STEP, "pass_rate": RATE, "num_examples": 960, \
"pass_rate/gym:a": RATE, "num_examples/gym:a": 128, "pass_rate/gym:b": 0.5, "pass_at_n": RATE}
{"kind": "train", "compute_flops": STEP, "pass_rate": 0.5}
=== typed.jsonl
{"type": "eval", "grpo_step": STEP, "reward": RATE, "answer_accuracy": RATE, "format_accuracy": 0.9}
{"type": "rollout", "grpo_step": STEP, "reward": RATE, "answer_accuracy": 0.5, "std_reward": 0.1}
END

=== stages.jsonl
{"event_type": "eval", "grpo_step": STEP, "reward": RATE, "answer_accuracy": 0.5}
{"event_type": "rollout", "grpo_step": STEP, "reward": RATE, "answer_accuracy": RATE}
=== job.csv
step,job,accuracy
STEP,eval,RATE
STEP.5,rollout,0.5
=== verl.log
commit: d60f843, reward: 7
\x1b[36m(Run)\x1b[0m step:STEP - actor/x:nan - val/test_score/openai/gsm8k:np.float64(RATE) - x/y:0.4
\x1b[36m(Run)\x1b[0m step:STEP1 - actor/x:nan - critic/score/mean:0.4
=== verl-first.log
(main_task pid=6) step:STEP - test_score/openai/gsm8k:RATE
=== hf.log
Some weights were not used; a line of a library
\r STEP%|#  | STEP/100 [00:01<01:00, 1.5s/it]\r          \r{'loss': nan, 'rewards/accuracy_reward/mean': RATE, 'num_tokens': STEP}
=== hf-5.log
{'loss': 'nan', 'rewards/accuracy_reward/mean': 'RATE', 'num_tokens': 'STEP'}
=== sb3.log
----------------------------------
|    total_timesteps | STEP   |
| rollout/         |       |
|    success_rate  | RATE |
----------------------------------
=== verl.jsonl
{"step": STEP, "data": {"val-core/gsm8k/acc/mean@16": RATE}}
=== wandb.jsonl
{"_step": 9STEP, "trainer": {"global_step": STEP}, "eval": {"success_rate": RATE}}
=== trainer_state.json
{"log_history": [{}
, {"step": STEP, "rewards/accuracy_reward/mean": 0.3, "loss": 0.1},
{"step": STEP, "eval_reward": 9, "eval_rewards/accuracy_reward/mean": RATE}
END
], "callbacks": {}}
=== lists.json
{"tags": ["x"], "train": [{"step": 0, "acc": 0.1}], "eval": [{}
, {"step": STEP, "acc": RATE}
END
]}
=== columns.json
{"step": ALL_STEPS, "val_accuracy": ALL_RATES, "loss": [0.5, 0.5, 0.5], "name": "x"}
=== percent.csv
Step,Eval Accuracy
STEP,PERCENT%
=== hundred.csv
step,reward
STEP,PERCENT
=== failures.csv
step,failures
STEP,FAILED
=== scalar.csv
Wall time,Step,Value
9,STEP,RATE
=== tabs.tsv
step	pass_rate
STEP	RATE
=== missing.csv
step,acc
30,nan
40,
N/A,0.5
STEP,RATE
END

=== half.csv
step,val/acc,"loss, mean"
STEP,RATE,1
END
700,0.
=== methods.csv
Method,step,acc
METHOD,STEP,RATE
=== seeds.csv
seed,step,acc
3,STEP,RATE
4,STEP,RATE
=== splits.jsonl
{"step": STEP, "acc": RATE, "split": "val"}
{"step": STEP, "acc": 0.5, "split": "test"}
=== below.csv
model,step,acc
b,0,0.5
b,0,0.5
a,STEP,RATE
=== unknown.csv
labelled_so,step,acc
b,0,0.5
b,0,0.5
a,STEP,RATE
=== tasks.csv
task,algorithm,step,acc
t,a,STEP,RATE
t,b,STEP,RATE
u,a,STEP,RATE
=== in turn.csv
dataset,step,acc
TURN,STEP,RATE
=== two.csv
step,p - val/acc,q 0 - val/acc
STEP,RATE,0.5
=== plain.csv
step,pass_rate
STEP,RATE
=== empty.csv

=== names.csv
step,acc
=== mine.jsonl
{"mine": 1, "acc": 0.5}
=== decimal.csv
step;acc
1;0,42
=== thousands.csv
step,acc
1,000,0.4
=== twice.csv
step,acc,acc
1,0.1,0.2
=== half.json
{"log_history": [
{"step": 0,
"acc": 0.5},
{"step": 1,
=== no.log
epoch=1 acc=.5
=== three.jsonl
{"step": 1, "acc": 0.5}
{"step": 1, "acc": 0.5}
{"step": 1, "acc": 0.5}
"""  # noqa: E501


def of_points(text: str) -> str:
    """The text of a log: its lines with STEP have been written for each point."""
    text = text.replace("ALL_STEPS", str(STEPS)).replace("ALL_RATES", str(RATES))
    head, *block = re.split("(?m)(?=^.*STEP)", text, maxsplit=1)
    if not block:
        return head
    block, *tail = block[0].split("\nEND\n")
    points = []
    for i, (step, rate) in enumerate(CURVE):
        values = {"STEP": step, "RATE": rate, "PERCENT": 100 * rate, "FAILED": 1 - rate}
        values |= {"TURN": "ab"[i % 2], "METHOD": "GRPO" if step else "Base"}
        points.append(block)
        for name, value in values.items():
            points[-1] = points[-1].replace(name, str(value))
    return head + "\n".join([*points, *tail])


LOGS = dict(log.split("\n", 1) for log in LOGS.removesuffix("\n").split("\n=== ")[1:])
LOGS = {name: of_points(text) for name, text in LOGS.items()}


def read_all(content: str | bytes, **choices):
    Path("log").write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_log("log", **choices)


def read(content: str | bytes, **choices):
    """The one curve of a log with this content."""
    (series,) = read_all(content, **choices)
    return series


def named(best: str, others: str = "") -> str:
    """A table with the pass rate in the first column after the step, and something else in
    others."""
    columns = ["step", best, *others.split()]
    return of_points(",".join(columns) + "\nSTEP,RATE" + ",0.5" * (len(columns) - 2))


def require_curve(series):
    assert list(series.x) == STEPS and series.y == pytest.approx(RATES)


# --- what each framework writes -------------------------------------------------------------------


# A log, what is chosen, the columns of x and y that are read, and what is noted.
READ = """
ours.jsonl | | compute_flops | pass_rate | from the validation records
typed.jsonl | | grpo_step | answer_accuracy | from the eval records
stages.jsonl | where="event_type=rollout" | grpo_step | answer_accuracy | measured in training
job.csv | | step | accuracy |
verl.log | | step | val/test_score/openai/gsm8k | the scale of
verl-first.log | | step | val/test_score/openai/gsm8k | the scale of
hf.log | | num_tokens | rewards/accuracy_reward/mean | the scale of; measured in training
hf-5.log | | num_tokens | rewards/accuracy_reward/mean | the scale of; measured in training
sb3.log | | total_timesteps | success_rate |
verl.jsonl | | step | val-core/gsm8k/acc/mean@16 |
wandb.jsonl | | trainer/global_step | eval/success_rate |
trainer_state.json | | step | eval_rewards/accuracy_reward/mean | the scale of
lists.json | | step | acc |
columns.json | | step | val_accuracy |
percent.csv | | Step | Eval Accuracy |
hundred.csv | y="reward", range=(0, 100) | step | reward | measured in training
failures.csv | y="failures", range=(1, 0) | step | failures |
scalar.csv | | Step | Value |
tabs.tsv | | step | pass_rate |
missing.csv | | step | acc |
half.csv | | step | val/acc |
methods.csv | | step | acc | one curve of several parts by Method: Base, GRPO
seeds.csv | where="seed=4" | step | acc |
splits.jsonl | where="split=val" | step | acc | from the val records
below.csv | where="model=a" | step | acc |
tasks.csv | where="task=t,algorithm=b" | step | acc |
"""
WARNINGS = "the scale of", "measured in training", "begins again", "no value"


@pytest.mark.parametrize("name, choices, x, y, words", rows(READ))
def test_reads_every_kind(name, choices, x, y, words):
    series = read(LOGS[name], **eval(f"dict({choices})"))
    assert (series.x_name, series.y_name) == (x, y)
    require_curve(series)
    assert f"read: x = {x}, y = {y}, 11 points" in series.notes[0]
    said = " ".join(series.notes)
    assert all(each in said for each in words.split("; "))
    assert all((warning in said) == (warning in words) for warning in WARNINGS)


def test_reads_the_encodings_of_windows():
    for encoding in ("utf-16", "utf-8-sig"):
        require_curve(read(LOGS["plain.csv"].encode(encoding)))


def test_folders_and_standard_input_are_named(monkeypatch):
    for last, text in ((90, "step,acc\n0,0.5"), (100, LOGS["plain.csv"])):
        Path(f"run/checkpoint-{last}").mkdir(parents=True)
        Path(f"run/checkpoint-{last}/trainer_state.json").write_text(text)
    (series,) = read_log("run")
    require_curve(series)
    assert series.name == "run"
    with pytest.raises(ValueError, match="name the file"):
        read_log(".")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LOGS["plain.csv"].encode())))
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


@pytest.mark.parametrize("place", [0, 6, 11])
def test_lines_that_cannot_be_read_are_left_out_and_told_if_they_are_few(place):
    """Zero bytes, as a full disk leaves them, and half a line."""
    for broken in ("\0" * 99, '{"step": 700, "ac'):
        lines = of_points('{"step": STEP, "acc": RATE}').split("\n")
        lines.insert(place, broken)
        series = read("\n".join(lines))
        require_curve(series)
        assert series.notes[-1].startswith(f"! line {place + 1} ")
    with pytest.raises(ValueError, match=f"line {place + 1} "):
        read("\n".join(lines + [broken] * 3))


# --- which records and columns --------------------------------------------------------------------


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
    series = read(named(best, others))
    assert series.y_name == best
    require_curve(series)


def test_another_quantity_is_never_taken():
    names = (
        "timing_s/reward eval_mean_token_accuracy failure_rate eval/failure_rate format_accuracy "
        "acc_std val/acc_min critic/score/max eval_loss kl eval_time reward/format gpu_util "
        "rewards/mine critic/value reward/valid_rate eval/reward_hacking_rate minutes"
    )
    for name in names.split():
        with pytest.raises(ValueError, match=f"--y .*step, {name}"):
            read(named(name))
        require_curve(read(named(name), y=name))


def test_several_columns_and_seeds_are_curves():
    for y in ("all", "p - val/acc,q 0 - val/acc"):
        first, second = read_all(LOGS["two.csv"], y=y)
        assert (first.name, second.name) == ("p - val/acc", "q 0 - val/acc")
        require_curve(first)
        assert {*second.y} == {0.5}
    for series, seed in zip(read_all(LOGS["seeds.csv"]), (3, 4), strict=True):
        require_curve(series)
        assert series.name == "log" and series.notes[0].endswith(f"of seed {seed}")
    assert read('{"step": 1, "acc": true}').y == [1]
    assert "no value" in read(LOGS["plain.csv"], range=(0, 100)).notes[1]


def test_each_source_of_problems_has_its_own_number_of_answers():
    of_each = read_all(LOGS["ours.jsonl"], y="pass_rate,pass_rate/gym:a,pass_at_n")
    assert [series.num_examples for series in of_each] == [960, 128, None]


COMPUTE = """{"step": 0, "acc": 0.2}
{"NAME": STEP, "acc": RATE, "timing_s/step": STEP, "perf/total_num_tokens": STEP}"""


def test_the_best_compute_that_is_known_is_taken():
    """What the first record alone has is not taken."""
    names = (
        "train_flops eflops gpu_hours num_tokens _step time/total_timesteps progress/total_tokens "
        "cumulative_generated_tokens training/global_step"
    )
    for name in names.split():
        assert read(of_points(COMPUTE.replace("NAME", name))).x_name == name


# --- the points -----------------------------------------------------------------------------------


def test_a_resumed_run_counts_once():
    # A metric is no label: a loss that repeats, as the learning rate changed.
    table = lambda *parts: "\n".join(
        ["loss,step,val/acc", *(f"{i},{x},{y}" for i, part in enumerate(parts) for x, y in part)]
    )
    series = read(table(UNDONE, CURVE[5:]))
    require_curve(series)
    assert "3 of 14 points are left out" in series.notes[1]
    # No resumed run goes back to where it has not been: all points count, and are refused later.
    assert len(read(table(CURVE[5:], CURVE[:5])).x) == 11


# --- what is refused ------------------------------------------------------------------------------

# A log, what is chosen, and what the one sentence names.
REFUSED = """
empty.csv | | empty
names.csv | | --y none
mine.jsonl | | --x mine
decimal.csv | | '0,42'
thousands.csv | | ['1', '000',
twice.csv | | step,acc,acc
half.json | | line 1
no.log | | epoch=1
plain.csv | y="reward" | --y 'reward' step, pass_rate
plain.csv | x="reward" | --x 'reward' step, pass_rate
plain.csv | x="step,pass_rate" | --x 'step,pass_rate'
seeds.csv | where="seed=5" | --where seed '5' 3, 4
seeds.csv | where="sed=4" | --where 'sed' seed, step
two.csv | | --y p - val/acc, q 0 - val/acc
splits.jsonl | | --where split=val, split=test
below.csv | | --where model=b, model=a
unknown.csv | | --where labelled_so=b, labelled_so=a
tasks.csv | where="task=t" | --where algorithm=a, algorithm=b
in turn.csv | | --where dataset=a, dataset=b
plain.csv | range=(1, 1) | --range
three.jsonl | | step --where
"""
LOGS["binary"] = b"PK\3\4\r" + bytes(range(128, 256))
LOGS["deep"] = "[" * 100_000


@pytest.mark.parametrize(
    "name, choices, words", [*rows(REFUSED), ("binary", "", ""), ("deep", "", "")]
)
def test_what_is_no_curve_is_refused_in_one_sentence(name, choices, words):
    with pytest.raises(ValueError) as error:
        read(LOGS[name], **eval(f"dict({choices})"))
    message = str(error.value)
    assert message.startswith("log: ") and "\n" not in message
    assert all(word in message for word in words.split()), message
