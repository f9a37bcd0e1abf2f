"""Small logs of every kind, and broken ones, for test_logs.py and for the tables of
docs/formats.md.

python tests/kinds_of_logs.py            # prints the two tables, from files that it makes and reads
"""

import csv
import io
import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import fit_curve  # noqa: E402
from curve.logs import read_log  # noqa: E402

STEPS = list(range(0, 101, 10))
RATES = [0.2, *(round(0.2 + 0.6 / (1 + (30 / step) ** 2), 4) for step in STEPS[1:])]
CURVE = list(zip(STEPS, RATES))


def json_lines(records) -> bytes:
    return lines(map(json.dumps, records))


def table(rows, delimiter=",", encoding="utf-8") -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(encoding)


def lines(texts) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


# --- what each framework writes -------------------------------------------------------------------


def ours():
    for step, rate in CURVE:
        for kind, pass_rate in (("validation", rate), ("train", 0.5)):
            yield {
                "kind": kind,
                "step": step,
                "compute_flops": step * 1e9,
                "pass_rate": pass_rate,
                "num_examples": 960,
            }


def typed():
    for step, rate in CURVE:
        yield {
            "type": "eval",
            "grpo_step": step,
            "optimizer_step": step,
            "num_examples": 1024,
            "reward": rate,
            "format_accuracy": 0.9,
            "answer_accuracy": rate,
            "max_tokens": 1024,
            "eval_seconds": 45.1,
        }
        yield {
            "type": "rollout",
            "grpo_step": step + 1,
            "reward": 0.5,
            "answer_accuracy": 0.5,
            "std_reward": 0.1,
        }
        yield {
            "type": "train",
            "grpo_step": step + 1,
            "loss": 0.1,
            "train_answer_accuracy": 0.5,
            "approx_kl": None,
        }


def verl_console():
    yield "commit: d60f843, reward: 7"
    yield f"(main_task pid=6) step:0 - test_score/openai/gsm8k:{RATES[0]:.3f}"
    rates = dict(CURVE)
    for step in range(1, 101):
        test = ""
        if step in rates:
            test = f" - timing/testing:70.0 - val/test_score/openai/gsm8k:{rates[step]}"
        timing = f"step:{step} - timing/gen:40.0 - timing/ref:10.0"
        yield f"{timing} - critic/lr(1e-4):0.1{test} - critic/score/mean:0.4"


def verl_newer():
    for step, rate in CURVE:
        columns = {
            "actor/entropy": "np.float64(0.31)",
            "critic/score/mean": 0.4,
            "val-core/openai/gsm8k/reward/mean@1": f"np.float64({rate})",
            "val-core/openai/gsm8k/reward/std@1": 0.4,
            "timing_s/step": 50.0,
            "perf/total_num_tokens": 1000,
            "perf/time_per_step": "nan",
        }
        pairs = " - ".join(f"{name}:{value}" for name, value in columns.items())
        yield f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - {pairs}"


def verl_file():
    for step, rate in CURVE:
        data = {"val-core/gsm8k/acc/mean@16": rate, "val-core/gsm8k/acc/best@16/mean": 1}
        yield {"step": step, "data": data}


def prime_rl():
    for step, rate in CURVE:
        at = {"step": step, "time": 1.78e9 + step}
        yield {**at, "eval/aime24/all/agent/avg@16": rate, "eval/aime24/all/agent/pass@8": 0.9}
        yield {**at, "reward/mean": 0.1}


def pairs():
    for step, rate in CURVE:
        yield f"[train] step={step} loss=0.1 acc=0.5"
        yield f"[eval] step={step} loss=0.1 acc={rate}"


def tinker():
    for step, rate in CURVE:
        yield {
            "step": step,
            "optim/lr": 1e-4,
            "env/all/total_ac_tokens": 1900,
            "env/all/reward/total": rate - 0.02,
            "env/all/format": 0.8,
            "env/all/correct": rate,
            "env/all/by_group/frac_all_good": 0.2,
            "time/total": 9.6,
        }


def trl(step=True):
    for at, rate in CURVE:
        place = {"step": at} if step else {}
        yield {
            "reward": 0.4,
            "rewards/accuracy_reward/mean": 0.3,
            "num_tokens": at * 1000.0,
            "epoch": at / 100,
            **place,
        }
        yield {
            "eval_loss": 0.1,
            "eval_reward": 0.5 * rate + 0.5,
            "eval_rewards/format_reward/mean": 1.0,
            "eval_rewards/accuracy_reward/mean": rate,
            "eval_runtime": 9.0,
            "epoch": at / 100,
            **place,
        }


def one_reward():
    for step, rate in CURVE:
        yield {"step": step, "reward": rate, "rewards/mine": rate, "reward_std": 0.1}


def history():
    for step, rate in CURVE:
        yield {
            "_step": 3 * step,
            "_runtime": 9.5 * step,
            "_timestamp": 1.7e9 + step,
            "trainer": {"global_step": step},
            "train": {"reward": 0.4},
            "eval": {"success_rate": rate, "mean_len": 80.0},
        }


def boxes():
    yield "env_name: FetchPush-v1"
    for step, rate in CURVE:
        yield "-" * 30
        yield f"| epoch            | {step / 100} |"
        yield f"| test/success_rate | {rate} |"
        yield "| train/           |  |"
        yield "|    success_rate  | 0.5 |"
        yield "-" * 30


def with_commas():
    for step, rate in CURVE:
        yield step, str(rate).replace(".", ",")


LONG = [["algorithm", "checkpoint_step", "sampled_pass_at_1", "format_valid_rate"]]
for algorithm in ("ppo", "grpo"):
    LONG += [[algorithm, step, rate, 0.9] for step, rate in CURVE]
WIDE = [["Step", "0.6b", "14b"], *([step, 0.9 * rate, rate] for step, rate in CURVE)]
SCALAR = [["Wall time", "Step", "Value"], *([1.7e9 + step, step, rate] for step, rate in CURVE)]
PLAIN = [("step", "pass_rate"), *CURVE]
COMMAS = [PLAIN[0], *with_commas()]
STATE = {"best_metric": None, "log_history": [*trl()], "stateful_callbacks": {}}
CONSOLE = ["Loading: 100%|##| 2/2", *map(str, trl(step=False))]


class Kind(NamedTuple):
    """A kind of log."""

    name: str  # of the file; after a colon, the column
    source: str  # where such files come from
    content: bytes
    x: str  # the columns that are read
    y: str
    flags: dict = {}  # that it needs


KINDS = [
    Kind("ours/log.jsonl", "this project", json_lines(ours()), "compute_flops", "pass_rate"),
    Kind(
        "typed.jsonl",
        "own scripts: records of several types",
        json_lines(typed()),
        "grpo_step",
        "answer_accuracy",
    ),
    Kind(
        "verl.log",
        "verl, console of 2024",
        lines(verl_console()),
        "step",
        "val/test_score/openai/gsm8k",
    ),
    Kind(
        "verl2.log",
        "verl, console of 2025",
        lines(verl_newer()),
        "step",
        "val-core/openai/gsm8k/reward/mean@1",
    ),
    Kind(
        "verl.jsonl",
        "verl, its `file` logger",
        json_lines(verl_file()),
        "step",
        "val-core/gsm8k/acc/mean@16",
    ),
    Kind(
        "prime/metrics.jsonl",
        "prime-rl",
        json_lines(prime_rl()),
        "step",
        "eval/aime24/all/agent/avg@16",
    ),
    Kind("pairs.log", "console lines of key=value", lines(pairs()), "step", "acc"),
    Kind("tinker/metrics.jsonl", "tinker", json_lines(tinker()), "step", "env/all/correct"),
    Kind(
        "run/checkpoint-100/trainer_state.json",
        "TRL and transformers",
        json.dumps(STATE, indent=2).encode(),
        "step",
        "eval_rewards/accuracy_reward/mean",
    ),
    Kind(
        "trl.log",
        "TRL and Unsloth, console",
        lines(CONSOLE),
        "epoch",
        "eval_rewards/accuracy_reward/mean",
    ),
    Kind(
        "tensorboard.csv",
        "TensorBoard, a scalar downloaded as CSV",
        table(SCALAR),
        "Step",
        "Value",
    ),
    Kind(
        "one_reward.jsonl",
        "TRL with one reward function",
        json_lines(one_reward()),
        "step",
        "reward",
    ),
    Kind("wide.csv:14b", "a column for each run, one of them", table(WIDE), "Step", "14b"),
    Kind(
        "history.jsonl",
        "W&B, history of a run",
        json_lines(history()),
        "trainer/global_step",
        "eval/success_rate",
    ),
    Kind(
        "long.csv",
        "algorithms under each other",
        table(LONG),
        "checkpoint_step",
        "sampled_pass_at_1",
        {"where": "algorithm=ppo"},
    ),
    Kind(
        "excel.csv",
        "UTF-16, as Excel writes it",
        table(PLAIN, "\t", "utf-16"),
        "step",
        "pass_rate",
    ),
    Kind("comma.csv", "decimal commas", table(COMMAS, ";"), "step", "pass_rate"),
]

# --- what is wrong --------------------------------------------------------------------------------


def changed(row, name="y", value="") -> bytes:
    """The curve as a table, with one cell of a row replaced."""
    rates = (0.1, 0.15, 0.3, 0.42, 0.5, 0.55, 0.58)
    rows = [[str(step), str(rate)] for step, rate in enumerate(rates)]
    rows[row]["xy".index(name)] = value
    return lines(["x,y", *map(",".join, rows)])


def negative_rewards():
    for step, rate in CURVE:
        yield {
            "step": step,
            "reward": rate - 0.7,
            "rewards/a/mean": rate - 0.9,
            "rewards/format/mean": 0.5,
        }


def splits():
    for step, rate in CURVE:
        for split in ("train", "val", "test"):
            yield {"step": step, "split": split, "acc": rate}


THREE = [PLAIN[0]]
for step, rate in CURVE:
    THREE += [(step, rate), (step, rate * 0.9), (step, rate * 0.8)]
EPISODES = [
    ["timesteps_total", "episode_reward_mean", "info/cur_kl"],
    *([step, 10 * rate, rate] for step, rate in CURVE),
]
GOOD = json_lines({"step": step, "pass_rate": rate} for step, rate in CURVE)
HISTORY = json.dumps({"log_history": [*trl()]}, indent=1).encode()

# The bytes of each. The sentences stand in the table of docs/formats.md.
BROKEN = {
    "empty file": b"",
    "one point": b"x,y\n1,0.5\n",
    "a word for a number": changed(3, value="much"),
    "a percent sign": changed(3, value="42%"),
    "compute that falls": changed(3, "x", "1.5"),
    "a pass rate of 50": changed(4, value="50"),
    "negative reward (TRL)": json_lines(negative_rewards()),
    "more cells than names": changed(4, value="0.5,7"),
    "unknown names": lines(["step,foo,bar", *(f"{i},0.{i},0.2{i}" for i in range(9))]),
    "two kinds of validation": json_lines(splits()),
    "two algorithms": table(LONG),
    "three values a step, unnamed": table(THREE),
    "rewards of episodes (RLlib)": table(EPISODES),
    "lengths of episodes (monitor of Stable-Baselines)": lines(
        ['#{"env_id": "Fetch"}', "r,l,t", "-50.0,50,2.7", "-49.0,50,2.8"]
    ),
    "no compute": lines(["acc,other", *(f"0.{i},1" for i in range(9))]),
    "JSON that is cut off": HISTORY[:-200],
    "a broken line in the middle": GOOD + b'{"step": 110, "pa\n' + GOOD,
    "100,000 brackets": b"[" * 100_000,
    "a console line of 10 MB": b"".join(b"a=%d " % i for i in range(1_000_000)),
    "boxes (OpenAI's baselines, Stable-Baselines)": lines(boxes()),
    "a pickle": pickle.dumps(CURVE),
}

# --- the tables of docs/formats.md ----------------------------------------------------------------


def write(folder: Path, name: str, content: bytes) -> Path:
    file = folder / name.partition(":")[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return folder / name


def sentence(folder: Path, number: int, content: bytes) -> str:
    """The one sentence of the command about a broken file. AssertionError if the file is read."""
    path = write(folder, f"broken{number}", content)
    try:
        fit_curve.main([str(path)])
    except (ValueError, OSError) as error:
        message = str(error).replace(f"{folder}/", "")
        assert message.startswith(f"broken{number}")
        assert len(message) < 400
        assert "\n" not in message
        return message
    raise AssertionError(f"broken{number} was read")


def table_of_kinds(folder: Path) -> str:
    """The table of docs/formats.md of what is read in every kind of log."""
    rows = ["| file | from | flags | x | y | |", "|---|---|---|---|---|---|"]
    for kind in KINDS:
        curves = read_log(write(folder, kind.name, kind.content), **kind.flags)
        series = curves[0]
        remarks = [f"{len(curves)} curves"] if len(curves) > 1 else []
        if any(note.startswith("!") for note in series.notes):
            remarks.append("warns: of training")
        for part in series.notes[0].split("; "):
            if part.startswith("left out"):
                remarks.append(part)
        flags = ", ".join(f"`--{flag} {value}`" for flag, value in kind.flags.items()) or "none"
        columns = f"`{series.x_name}` | `{series.y_name}`"
        rows.append(f"| {kind.name} | {kind.source} | {flags} | {columns} | {'; '.join(remarks)} |")
    return "\n".join(rows)


def table_of_broken(folder: Path) -> str:
    """The table of docs/formats.md of the sentences about broken files."""
    rows = ["| | what is wrong | the sentence |", "|---|---|---|"]
    for i, (mistake, content) in enumerate(BROKEN.items(), 1):
        message = sentence(folder, i, content).replace("|", "\\|").replace("__", "\\_\\_")
        rows.append(f"| {i} | {mistake} | {message} |")
    return "\n".join(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(table_of_kinds(Path(folder)), table_of_broken(Path(folder)), sep="\n\n")
