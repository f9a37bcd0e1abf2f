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

sys.path.insert(0, str(Path(__file__).parent.parent))

import fit_curve  # noqa: E402
from curve.logs import read_log  # noqa: E402

STEPS = list(range(0, 101, 10))
RATES = [round(0.2 + 0.6 / (1 + (30 / step) ** 2) if step else 0.2, 4) for step in STEPS]
CURVE = list(zip(STEPS, RATES))


def json_lines(records) -> bytes:
    return lines(map(json.dumps, records))


def table(rows, delimiter=",", encoding="utf-8") -> bytes:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(encoding)


def lines(texts) -> bytes:
    return "".join(f"{text}\n" for text in texts).encode()


def typed():
    for step, rate in CURVE:
        yield {"type": "eval", "grpo_step": step, "optimizer_step": step, "num_examples": 1024, "reward": rate,
               "format_accuracy": 0.9, "answer_accuracy": rate, "max_tokens": 1024, "eval_seconds": 45.1}  # fmt: skip
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
        test = (
            f" - timing/testing:70.0 - val/test_score/openai/gsm8k:{rates[step]}"
            if step in rates
            else ""
        )
        yield f"step:{step} - timing/gen:40.0 - timing/ref:10.0 - critic/lr(1e-4):0.1{test} - critic/score/mean:0.4"


def verl_newer():
    for step, rate in CURVE:
        yield (f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - actor/entropy:np.float64(0.31) - critic/score/mean:0.4"
               f" - val-core/openai/gsm8k/reward/mean@1:np.float64({rate}) - val-core/openai/gsm8k/reward/std@1:0.4"
               f" - timing_s/step:50.0 - perf/total_num_tokens:1000 - perf/time_per_step:nan")  # fmt: skip


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
        yield {"eval_loss": 0.1, "eval_reward": 0.5 * rate + 0.5, "eval_rewards/format_reward/mean": 1.0,
               "eval_rewards/accuracy_reward/mean": rate, "eval_runtime": 9.0, "epoch": at / 100, **place}  # fmt: skip


def history():
    for step, rate in CURVE:
        yield {"_step": 3 * step, "_runtime": 9.5 * step, "_timestamp": 1.7e9 + step, "trainer": {"global_step": step},
               "train": {"reward": 0.4}, "eval": {"success_rate": rate, "mean_len": 80.0}}  # fmt: skip


def boxes():
    yield "env_name: FetchPush-v1"
    for step, rate in CURVE:
        yield from (
            "-" * 30,
            f"| epoch            | {step / 100} |",
            f"| test/success_rate | {rate} |",
        )
        yield from ("| train/           |  |", "|    success_rate  | 0.5 |", "-" * 30)


LONG = [["algorithm", "checkpoint_step", "sampled_pass_at_1", "format_valid_rate"],
        *([algorithm, s, r, 0.9] for algorithm in ("ppo", "grpo") for s, r in CURVE)]  # fmt: skip
WIDE = [["Step", "0.6b", "14b"], *([step, 0.9 * rate, rate] for step, rate in CURVE)]
PLAIN = [("step", "pass_rate"), *CURVE]

# The name of the file, where such files come from, its bytes, the flags that it needs, and the
# columns that are read.
KINDS = [
    ("ours/log.jsonl", "this project", lambda: json_lines(
        {"kind": kind, "step": s, "compute_flops": s * 1e9, "pass_rate": r if kind == "validation" else 0.5,
         "num_examples": 960} for s, r in CURVE for kind in ("validation", "train")),
     {}, "compute_flops", "pass_rate"),
    ("typed.jsonl", "own scripts: records of several types", lambda: json_lines(typed()), {}, "grpo_step",
     "answer_accuracy"),
    ("verl.log", "verl, console of 2024", lambda: lines(verl_console()), {}, "step", "val/test_score/openai/gsm8k"),
    ("verl2.log", "verl, console of 2025", lambda: lines(verl_newer()), {}, "step",
     "val-core/openai/gsm8k/reward/mean@1"),
    ("verl.jsonl", "verl, its `file` logger", lambda: json_lines(
        {"step": s, "data": {"val-core/gsm8k/acc/mean@16": r, "val-core/gsm8k/acc/best@16/mean": 1}} for s, r in CURVE),
     {}, "step", "val-core/gsm8k/acc/mean@16"),
    ("prime/metrics.jsonl", "prime-rl", lambda: json_lines(
        {"step": s, "time": 1.78e9 + s, **its} for s, r in CURVE
        for its in ({"eval/aime24/all/agent/avg@16": r, "eval/aime24/all/agent/pass@8": 0.9}, {"reward/mean": 0.1})),
     {}, "step", "eval/aime24/all/agent/avg@16"),
    ("pairs.log", "console lines of key=value", lambda: lines(
        f"[{kind}] step={s} loss=0.1 acc={rate}" for s, r in CURVE for kind, rate in (("train", 0.5), ("eval", r))),
     {}, "step", "acc"),
    ("tinker/metrics.jsonl", "tinker", lambda: json_lines(
        {"step": s, "optim/lr": 1e-4, "env/all/total_ac_tokens": 1900, "env/all/reward/total": r - 0.02,
         "env/all/format": 0.8, "env/all/correct": r, "env/all/by_group/frac_all_good": 0.2, "time/total": 9.6}
        for s, r in CURVE), {}, "step", "env/all/correct"),
    ("run/checkpoint-100/trainer_state.json", "TRL and transformers", lambda: json.dumps(
        {"best_metric": None, "log_history": [*trl()], "stateful_callbacks": {}}, indent=2).encode(),
     {}, "step", "eval_rewards/accuracy_reward/mean"),
    ("trl.log", "TRL and Unsloth, console", lambda: lines(["Loading: 100%|##| 2/2", *map(str, trl(step=False))]),
     {}, "epoch", "eval_rewards/accuracy_reward/mean"),
    ("tensorboard.csv", "TensorBoard, a scalar downloaded as CSV",
     lambda: table([["Wall time", "Step", "Value"], *([1.7e9 + s, s, r] for s, r in CURVE)]), {}, "Step", "Value"),
    ("one_reward.jsonl", "TRL with one reward function", lambda: json_lines(
        {"step": s, "reward": r, "rewards/mine": r, "reward_std": 0.1} for s, r in CURVE), {}, "step", "reward"),
    ("wide.csv:14b", "a column for each run, one of them", lambda: table(WIDE), {}, "Step", "14b"),
    ("history.jsonl", "W&B, history of a run", lambda: json_lines(history()), {}, "trainer/global_step",
     "eval/success_rate"),
    ("long.csv", "algorithms under each other", lambda: table(LONG), {"where": "algorithm=ppo"}, "checkpoint_step",
     "sampled_pass_at_1"),
    ("excel.csv", "UTF-16, as Excel writes it", lambda: table(PLAIN, "\t", "utf-16"), {}, "step", "pass_rate"),
    ("comma.csv", "decimal commas", lambda: table([PLAIN[0], *((s, str(r).replace(".", ",")) for s, r in CURVE)], ";"),
     {}, "step", "pass_rate"),
]  # fmt: skip


def changed(row, name="y", value="") -> bytes:
    """The curve as a table, with one cell of a row replaced."""
    rows = [[str(a), str(b)] for a, b in zip(range(7), (0.1, 0.15, 0.3, 0.42, 0.5, 0.55, 0.58))]
    rows[row]["xy".index(name)] = value
    return "\n".join(["x,y", *map(",".join, rows)]).encode() + b"\n"


GOOD = json_lines({"step": s, "pass_rate": r} for s, r in CURVE)

# What is wrong, and the bytes. The sentences stand in the table of docs/formats.md.
BROKEN = {
    "empty file": lambda: b"",
    "one point": lambda: b"x,y\n1,0.5\n",
    "a word for a number": lambda: changed(3, value="much"),
    "a percent sign": lambda: changed(3, value="42%"),
    "compute that falls": lambda: changed(3, "x", "1.5"),
    "a pass rate of 50": lambda: changed(4, value="50"),
    "negative reward (TRL)": lambda: json_lines(
        {"step": s, "reward": r - 0.7, "rewards/a/mean": r - 0.9, "rewards/format/mean": 0.5} for s, r in CURVE),
    "more cells than names": lambda: changed(4, value="0.5,7"),
    "unknown names": lambda: b"step,foo,bar\n" + b"".join(b"%d,0.%d,0.2%d\n" % (i, i, i) for i in range(9)),
    "two kinds of validation": lambda: json_lines(
        {"step": s, "split": split, "acc": r} for s, r in CURVE for split in ("train", "val", "test")),
    "two algorithms": lambda: table(LONG),
    "three values a step, unnamed": lambda: table([PLAIN[0], *((s, r * f) for s, r in CURVE for f in (1, 0.9, 0.8))]),
    "rewards of episodes (RLlib)": lambda: table([["timesteps_total", "episode_reward_mean", "info/cur_kl"],
                                                   *([s, 10 * r, r] for s, r in CURVE)]),
    "lengths of episodes (monitor of Stable-Baselines)":
        lambda: b'#{"env_id": "Fetch"}\nr,l,t\n-50.0,50,2.7\n-49.0,50,2.8\n',
    "no compute": lambda: b"acc,other\n" + b"".join(b"0.%d,1\n" % i for i in range(9)),
    "JSON that is cut off": lambda: json.dumps({"log_history": [*trl()]}, indent=1).encode()[:-200],
    "a broken line in the middle": lambda: GOOD + b'{"step": 110, "pa\n' + GOOD,
    "100,000 brackets": lambda: b"[" * 100_000,
    "a console line of 10 MB": lambda: b"".join(b"a=%d " % i for i in range(1_000_000)),
    "boxes (OpenAI's baselines, Stable-Baselines)": lambda: lines(boxes()),
    "events of TensorBoard": lambda: b"\x18" + bytes(8) + b"...brain.Event:2" + bytes(9),
    "a pickle": lambda: pickle.dumps(CURVE),
}  # fmt: skip


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
    for name, source, content, flags, *_ in KINDS:
        series = read_log(write(folder, name, content()), **flags)
        flags = ", ".join(f"`--{flag} {value}`" for flag, value in flags.items()) or "none"
        remarks = [f"{len(series)} curves"] if len(series) > 1 else []
        remarks += (
            ["warns: of training"] if any(note.startswith("!") for note in series[0].notes) else []
        )
        remarks += [part for part in series[0].notes[0].split("; ") if part.startswith("left out")]
        columns = f"`{series[0].x_name}` | `{series[0].y_name}`"
        rows.append(f"| {name} | {source} | {flags} | {columns} | {'; '.join(remarks)} |")
    return "\n".join(rows)


def table_of_broken(folder: Path) -> str:
    """The table of docs/formats.md of the sentences about broken files."""
    rows = ["| | what is wrong | the sentence |", "|---|---|---|"]
    for i, (mistake, content) in enumerate(BROKEN.items(), 1):
        message = sentence(folder, i, content()).replace("|", "\\|").replace("__", "\\_\\_")
        rows.append(f"| {i} | {mistake} | {message} |")
    return "\n".join(rows)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(table_of_kinds(Path(folder)), table_of_broken(Path(folder)), sep="\n\n")
