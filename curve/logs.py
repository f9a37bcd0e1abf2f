"""Read the log of an RL run as a curve: pass rate over compute.

    read_log("runs/NAME")                            # the folder of a run of ours
    read_log("wandb.csv", y="all", range=(0, 100))   # one curve for each run in the table

What columns are called in which framework stands in NAMES, and is taken. If none is there, or two
are equally good, --x, --y or --where must say which is meant: a wrong curve with plausible numbers
is worse than no curve.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from curve.flags import option
from curve.least_squares import Array
from curve.records import records_in, row_of

VAL = "(val|valid|validation|eval|evaluation|test|dev|held_?out)"
RATE = (
    r"(pass_rate|(sampled_)?pass(@|_at_)?1|((mean|avg|answer)_)?acc(uracy)?|exact_match|"
    r"success(_rate)?|solve_rate|solved|(mean|avg)@\d+)"
)
LABEL = (
    "(seed|algorithm|method|recipe|condition|label|variant|model|exp|run|run_id|run_name|dataset|"
    "data_source|task|env)"
)
# What a column is, the framework, and its names there, the best first. A name is a regular
# expression for the whole name, without the run that W&B puts before it; a space counts as _.
NAMES = rf"""
x       ours           compute_flops
x       any            ((train|total|cumulative)_)?flop?s ((total|cumulative)_)?eflop?s
x       any            (compute_)?device_hours gpu_hours
x       ours           compute_tokens
x       TRL            (train/)?num_tokens eval[_/]num_tokens
x       transformers   (train/)?num_input_tokens_seen
x       prime-rl       progress/total_tokens
x       open-instruct  (val/)?num_total_tokens
x       any            (total|cumulative)_(\w+_)?tokens compute (wall_time_)?seconds hours
x       verl           training/global_step
x       SkyRL          trainer/global_step
x       transformers   (train/)?global_step
x       OpenRLHF       (eval|train)/global_step
x       slime          eval/step rollout/step
x       any            global_steps? ((train|training|trainer|grpo|ppo|rl|checkpoint)_)?steps?
x       any            optimizer_step
x       SB3            (time/)?total_timesteps
x       RLlib          (env_runners/)?num_env_steps_sampled_lifetime timesteps_total
x       any            (num_)?timesteps? env_steps? frames? (training_)?iterations? updates?
x       tinker         progress/batch
x       any            epochs? episodes? batch(es)?
x       W&B            _step _runtime
x       any            x

y       TRL            eval[_/]rewards/(accuracy_reward|correctness_reward_func)/mean
y       verl           val-core/.*/acc/mean@\d+ val-core/.*/mean@\d+ val/test_score/.*
y       prime-rl       eval/.*/effective/.*avg@\d+ eval/.*avg@\d+
y       SkyRL          eval/all/avg_score eval/.*/avg_score
y       OpenRLHF       eval/.*_pass1
y       tinker         test/env/all/correct eval/.*/score test/env/all/reward/total
y       open-instruct  eval/objective/verifiable_correct_rate
y       any            {VAL}[/_]{RATE}
y       slime          eval/(aime|amc|gpqa|gsm8k|math|minerva|olympiad)[\d_]*
y       ours           pass_rate pass_rate/.*
y       any            {RATE}
y       TRL            (train/)?rewards/(accuracy_reward|correctness_reward_func)(/mean)?
y       tinker         env/all/correct env/all/reward/total
y       open-instruct  objective/verifiable_correct_rate
y       any            (train|training|rollout)[/_]{RATE}
y       verl           critic/score/mean
y       SkyRL          reward/avg_raw_reward
y       slime          rollout/raw_reward
y       TensorBoard    value
y       any            y

kind    any            ((log|event|record)_)?(kind|type|split|subset|mode|phase|stage|part) event
label   any            {LABEL}
"""
TABLE = defaultdict(list)
for role, _, *names in map(str.split, filter(None, NAMES.splitlines())):
    TABLE[role] += names
VALIDATION = re.compile(rf"(?i)(?<![a-z]){VAL}(?![a-z])")
TRAINING = re.compile("(?i)train|rollout|critic|env/all|objective|(?<![a-z])reward")

# The log of a folder is the first of these that is there: ours, TRL's, that of prime-rl, W&B, RLlib
# or Stable-Baselines, of TRL's last checkpoint, TensorBoard's.
LOG_NAMES = """
    log.jsonl trainer_state.json metrics.jsonl wandb-history.jsonl progress.csv
    checkpoint-*/trainer_state.json events.out.tfevents.*
""".split()
Rows = list[dict[str, float | str]]  # numbers and texts, by column


@dataclass(frozen=True)
class Series:
    """The curve of one run: its pass rate y (n,) in [0, 1] at compute x (n,), which increases."""

    name: str
    x: Array
    y: Array
    x_name: str = "x"  # the columns that they come from
    y_name: str = "y"
    num_examples: float | None = None  # answers in a validation, on average
    notes: tuple[str, ...] = ()  # how the log was read; a warning begins with !


@dataclass(frozen=True)
class Reading:
    """Which records and columns of a log are read."""

    x: str | None = option(None, "the column of compute; by default one of a known name")
    y: str | None = option(
        None,
        "the column of the pass rate, by default one of a known name; several with commas, or all"
        " of the best known name",
    )
    where: str | None = option(None, "only the records with COLUMN=VALUE; several with commas")
    range: tuple[float, float] = option(
        (), "what a wrong and a right answer give in this column, such as 0 100 or -1 1"
    )


# --- From a path to curves ------------------------------------------------------------------------


def read_log(path: str | Path, **choices) -> list[Series]:
    """The curves in a log: one, or one for each column that `y` names and each seed.

    path: a file, "-" for standard input, or the folder of a run. choices: the fields of `Reading`.
    Seeds have one name. ValueError, with the file, if there is no curve, or if a flag must say
    which one; OSError if there is no file.
    """
    path, reading = Path(path), Reading(**choices)
    log = log_in(path) if path.is_dir() else path
    if not log:
        raise ValueError(f"{path}: no log of a known name in this folder: name the file of the log")
    if "tfevents" in log.name:
        log = path  # of a folder all
    name = path.absolute().name.removesuffix(".jsonl")
    notes = []
    try:
        rows = [*map(row_of, records_in(log, notes))]
        curves = curves_of(rows, name, reading)
    except (ValueError, csv.Error, RecursionError, ImportError) as error:
        raise ValueError(f"{log}: {error}") from None
    return [replace(curve, notes=(*curve.notes, *notes)) for curve in curves]


def log_in(folder: Path) -> Path | None:
    """The last file of the first of LOG_NAMES that is in a folder."""
    for name in LOG_NAMES:
        for log in sorted(folder.glob(name), key=natural_order, reverse=True):
            return log


def natural_order(path: Path) -> str:
    """A path in which numbers are of one length: checkpoint-90 comes before checkpoint-100."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), str(path))


# --- Which records, which columns -----------------------------------------------------------------


def known(role: str, names: list[str]) -> list[str]:
    """The columns that have the first name in NAMES of a role that any of them has."""
    for pattern in TABLE[role]:
        whole = f"(?i)(.*_-_)?({pattern})"
        found = [name for name in names if re.fullmatch(whole, name.replace(" ", "_"))]
        if found:
            return found
    return []


def names_in(rows: Rows, kind: type = object) -> list[str]:
    """The columns whose values are all of this type."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [n for n in names if all(isinstance(row[n], kind) for row in rows if n in row)]


def groups_of(rows: Rows, name: str) -> dict[str, Rows]:
    """The rows by their value in a column, as a text; those without it have "None"."""
    groups = defaultdict(list)
    for row in rows:
        groups[text_of(row.get(name))].append(row)
    return groups


def text_of(value) -> str:
    """A value as it is shown, and compared with that of --where."""
    return str(value).removesuffix(".0")


def require(names: list[str], among: Collection[str], flag: str) -> list[str]:
    """The names that a flag gives. ValueError if one of them is none of these."""
    for name in names:
        if name not in among:
            raise ValueError(f"--{flag}: there is no {name!r}, but {', '.join(among)}")
    return names


def chosen_rows(rows: Rows, where: str | None) -> tuple[Rows, str]:
    """The rows that --where names; and of those the validations, if a column of a known name, or
    one of texts that all say training or validation, tells kinds apart. Returns them and their
    kinds. ValueError if several kinds of validations are left."""
    for condition in re.split(",(?=[^,]+=)", where) if where else ():  # a value may have commas
        column, _, value = condition.partition("=")
        require([column], names_in(rows), "where")
        groups = groups_of(rows, column)
        require([text_of(value)], groups, f"where {column}")
        rows = groups[text_of(value)]
    columns = known("kind", names_in(rows)) or [
        name for name in names_in(rows, str) if tells_kinds(groups_of(rows, name))
    ]
    kinds = []
    for column in columns:
        groups = groups_of(rows, column)
        found = [kind for kind in groups if VALIDATION.search(kind)]
        if len(found) > 1:
            raise several("kinds of validations", column, found)
        rows = groups[found[0]] if found else rows
        kinds += found or groups
    return rows, " and ".join(kinds)


def tells_kinds(values: Collection[str]) -> bool:
    """Whether some of these texts say validation, and all others training."""
    said = {(bool(VALIDATION.search(value)), bool(TRAINING.search(value))) for value in values}
    return said == {(True, False), (False, True)}


def several(what: str, column: str, values: Collection[str]) -> ValueError:
    """The error that asks for a --where."""
    ways = ", ".join(f"{column}={value}" for value in values)
    return ValueError(f"there are several {what}: choose one with --where, of {ways}")


def chosen_columns(flag: str, rows: Rows, given: str | None) -> list[str]:
    """The columns that --x or --y names, or else the one of a known name. ValueError if there is
    not one."""
    names = names_in(rows)
    if given and (flag == "x" or given in names):
        return require([given], names, flag)
    if given and given != "all":
        return require(given.split(","), names, flag)
    found = known(flag, names)
    if len(found) == 1 or given and found:
        return found
    what = "compute" if flag == "x" else "the pass rate"
    among = ", ".join(found or names_in(rows, float)) or "none"
    raise ValueError(f"which column is {what}? --{flag} must name it; there are {among}")


def parts_of(rows: Rows, x: str) -> dict[str, Rows]:
    """The rows of each seed, by what is said of them. ValueError if they are of several curves."""
    parts = {"": rows}
    compute = [row[x] for row in rows]
    in_turn = compute == sorted(set(compute))
    texts = [] if in_turn else names_in(rows, str)
    for column in dict.fromkeys(known("label", names_in(rows)) + texts):
        groups = groups_of(rows, column)
        if not 1 < len(groups) <= len(rows) // 2:
            continue
        told = f"by {column}: {', '.join(groups)}"
        # They may come in turn, as a base model before its method, or a second stage.
        if in_turn and rows == sum(groups.values(), []):
            parts = {f", one curve of several parts {told}": rows}
        elif column.lower() == "seed":
            parts = {f", of {column} {seed}": group for seed, group in groups.items()}
        else:
            raise several("curves", column, groups)
    return parts


# --- Curves of two columns ------------------------------------------------------------------------


def curves_of(rows: Rows, name: str, reading: Reading) -> list[Series]:
    """The curves of each pass rate and each seed. name: of a curve whose column is not named."""
    chosen, kind = chosen_rows(rows, reading.where)
    curves = []
    for y in chosen_columns("y", chosen, reading.y):
        of_y = [row for row in chosen if y in row]
        last = of_y if reading.x else of_y[-1:]  # the first may be odd
        (x,) = chosen_columns("x", last, reading.x)
        of_both = [row for row in of_y if x in row]
        texts = [row[name] for row in of_both for name in (x, y) if isinstance(row[name], str)]
        if texts:
            raise ValueError(f"{x} and {y} must be numbers like 0.5, without commas: {texts[0]!r}")
        for part, of_part in parts_of(of_both, x).items():
            said = f", from the {kind} records{part}" if kind else part
            curves.append(curve_of(of_part, y if reading.y else name, (x, y), said, reading))
    return curves


def curve_of(
    rows: Rows, name: str, columns: tuple[str, str], said: str, reading: Reading
) -> Series:
    """The curve of the columns x and y. said: of which records it is."""
    x, y = columns
    compute, rates = np.array([[row[x], row[y]] for row in rows]).T
    low, high = reading.range or (0, 1)
    if low == high:
        raise ValueError("--range: a wrong and a right answer give the same")
    rates = (rates - low) / (high - low)
    notes = []
    if reading.range and max(rates) <= 0.01:
        notes.append(f"! no value of {y} is above a hundredth of --range")

    # How many answers a pass rate is the mean of. pass_rate/SOURCE has its own number, and
    # pass_at_n is a mean over problems. -1 often stands for all.
    column = "num_examples" + y.partition("pass_rate")[2]
    answers = [n for row in rows if isinstance(n := row.get(column), float) and n > 0]
    answers = np.mean(answers) if answers and "pass_at_n" not in y else None
    counts = those_that_count(compute, x)
    compute, rates = compute[counts], rates[counts]
    if not counts.all():
        notes.append(
            f"! {x} begins again, and {sum(~counts)} of {len(rows)} points are left out, as if "
            "a resumed run had made them again"
        )
    source = f"{said} {y}"
    if TRAINING.search(source) and not VALIDATION.search(source):
        notes.append(
            f"! {y} is measured in training, and is no validation: on other problems the run may "
            "do otherwise"
        )
    if not reading.range and re.search("(?i)reward|score", y):
        notes.append(
            f"! the scale of {y} is not known: A is a pass rate only if a right answer pays 1, and "
            "a wrong one 0; --range can say what they pay"
        )
    read = f"read: x = {x}, y = {y}, {len(compute)} points{said}"
    return Series(name, compute, rates, x, y, answers, (read, *notes))


def those_that_count(compute: Array, x: str) -> Array:
    """Which of n rows count as points, (n,) of bool: in a resumed run a row counts if no later row
    has the same compute or less."""
    before, after = compute[:-1], compute[1:]
    if np.sum(after == before) > max(1, len(compute) // 10):
        raise ValueError(f"several rows have one {x}: choose with --where, or take another --x")
    counts = compute < np.append(np.minimum.accumulate(compute[::-1])[-2::-1], np.inf)
    # No resumed run goes back to compute that it did not have: then all count, in a wrong order.
    return counts | any(compute[i] not in before[:i] for i in np.flatnonzero(after < before) + 1)
