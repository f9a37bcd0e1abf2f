"""Read the log of an RL run as a curve: pass rate over compute.

    read_log("runs/NAME")                          # the folder of a run of ours
    read_log("wandb.csv", y="all", percent=True)   # one curve for each run in the table

A log is JSON lines, a JSON document with a list of records, a table with a line of names, verl's
console, or TensorBoard's events. It becomes rows: numbers and texts by name. Then the columns of
compute and pass rate are chosen by their names. If no name is known, or if two fit equally, none is
taken, and the error names them: a wrong curve with plausible numbers is worse than no curve.
"""

import csv
import difflib
import itertools
import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from curve.flags import option
from curve.least_squares import Array

Row = dict[str, float | str]

# The log of a folder is the first of these that is there.
LOG_NAMES = (
    "log.jsonl",  # ours
    "trainer_state.json",  # TRL
    "metrics.jsonl",  # prime-rl
    "wandb-history.jsonl",  # W&B
    "progress.csv",  # RLlib and Stable-Baselines
    "checkpoint-*/trainer_state.json",  # TRL's last checkpoint
    "events.out.tfevents.*",  # TensorBoard
)
VERL = re.compile(r"\bstep:\d+ - .*")
VERL_PAIR = re.compile(r"([^\s:]+):(?:\w+(?:\.\w+)*\()?(-?[\d.]+(?:e[-+]?\d+)?|nan)", re.I)
NO_VALUE = {"", "na", "n/a", "#n/a", "null", "none", "nan", "-"}
MOST_POINTS = 2000  # of a curve: a fit takes memory for each, and no plot shows more
MOST_REPEATED = 0.2  # the part of the points that a resumed run may have made again

# What compute is called, the best first. Only the last part of a path counts.
COMPUTE = """
    compute_flops train_flops total_flops flops compute_flos total_flos flos total_eflops eflops
    compute_device_hours device_hours gpu_hours compute_tokens compute
    num_tokens total_tokens num_input_tokens_seen tokens seconds wall_time_seconds hours
    global_step train_step training_step trainer_step grpo_step ppo_step rl_step checkpoint_step
    step _step timesteps_total total_timesteps num_timesteps timestep env_step frame
    optimizer_step training_iteration iteration update epoch episode batch _runtime x
""".split()
# The words in the name of a pass rate, the best first. With any other word it is another quantity,
# such as failure_rate or token_accuracy.
MEASURES = (
    "passrate",
    "pass@1 pass1 mean@ avg@",
    "acc accuracy correct correctness success successrate solved solverate match",
    "aime aime24 aime25 amc gpqa gsm8k math math500 minerva olympiad",
    "score scores",
    "reward rewards",
)
RANK = {word: rank for rank, words in enumerate(MEASURES) for word in words.split()}
UNSCALED = set("score scores reward rewards".split())  # a right answer may pay any number of these
VALIDATION = set("val valid validation eval evaluation test dev heldout".split())
TRAINING = set("train training rollout rollouts critic actor env".split()) | UNSCALED
ADDED = set("mean avg all overall answer sampled default agent core openai episode".split())
KNOWN = RANK.keys() | ADDED | VALIDATION | TRAINING | set("is func".split())
# Columns that say of which kind a record is, and to which of several curves it belongs.
KINDS = ("kind", "type", "split", "mode", "phase")
GROUPS = set("algorithm method recipe run run_id exp seed dataset task env model variant".split())


@dataclass(frozen=True)
class Series:
    """The curve of one run: its pass rate y (n,) in [0, 1] at compute x (n,), which increases."""

    name: str
    x: Array = field(repr=False)
    y: Array = field(repr=False)
    x_name: str = "x"  # the columns that they come from
    y_name: str = "y"
    num_examples: float | None = None  # answers in a validation, on average
    notes: tuple[str, ...] = ()  # how the log was read; a warning begins with !


@dataclass(frozen=True)
class Reading:
    """Which records and columns of a log are read."""

    x: str | None = option(None, "the column of compute; by default guessed, and printed")
    y: str | None = option(
        None, "the column of the pass rate, several with commas, or all; by default guessed"
    )
    where: str | None = option(None, "only the records with COLUMN=VALUE; several with commas")
    percent: bool = option(False, "the pass rate is in percent")
    mean: bool = option(False, "rows of one compute are averaged, such as problems or seeds")


def beyond_0(points) -> tuple[Array, Array]:
    """x and y of the points with compute above 0, which has a logarithm. points: a Series or a
    Fit."""
    later = points.x > 0
    return points.x[later], points.y[later]


def check_curve(x: Array, y: Array, names: tuple[str, str] = ("x", "y")) -> None:
    """ValueError, naming the first wrong point, unless compute x (n,) increases and pass rates y
    (n,) are in [0, 1]. names: the columns that they come from."""
    percent = ", or say --percent" if len(y) and 20 < y.max() <= 100 else ""
    wrong = {
        "not finite: remove the line": ~np.isfinite(x + y),
        "compute must increase, and is never below 0: sort the log, or name another column with "
        "--x": (x < 0) | (np.diff(x, prepend=-1) <= 0),
        f"a pass rate lies in [0, 1]: name another column with --y{percent}": (y < 0) | (y > 1),
    }
    for message, broken in wrong.items():
        if broken.any():
            i = broken.argmax()
            raise ValueError(f"{names[0]} = {x[i]:g}, {names[1]} = {y[i]:g}: {message}")


# --- 1. From a path to curves ---------------------------------------------------------------------


def read_log(path: str | os.PathLike, **choices) -> list[Series]:
    """The curves in a log: one, or one for each column that `y` names.

    path: a file, "-" for standard input, the folder of a run, or FILE:COLUMN. choices: the fields
    of `Reading`. ValueError, with the file, if there is no curve; OSError if there is no file.
    """
    file, _, column = os.fspath(path).rpartition(":")
    if file and not Path(path).exists() and Path(file).exists():
        path = file
        choices["y"] = column
    reading = Reading(**choices)
    files = logs_in(Path(path))
    log = files[-1]
    name = log.name.removesuffix(".jsonl")
    if log.name in LOG_NAMES or "tfevents" in log.name:
        name = log.absolute().parent.name
    try:
        records = event_records(files) if "tfevents" in log.name else text_records(log)
        rows, kind = chosen_rows([*map(row_of, records)], reading.where)
        return [
            curve_of(rows, y if reading.y else name, y, reading, kind)
            for y in pass_rates(rows, reading, kind)
        ]
    except (ValueError, csv.Error, RecursionError) as error:
        raise ValueError(f"{log}: {error}") from None


def logs_in(path: Path) -> list[Path]:
    """The log in a folder, or all files of events; any other path is that of a log. ValueError if
    there is none."""
    if not path.is_dir():
        return [path]
    for name in LOG_NAMES:
        found = sorted(filter(Path.is_file, path.glob(name)), key=natural_order)
        if found:
            return found if "tfevents" in name else found[-1:]
    raise ValueError(f"{path}: no {', '.join(LOG_NAMES)} in this folder: name the file of the log")


def natural_order(path: Path) -> list:
    """The parts of a path, in which numbers are numbers: checkpoint-90 comes before -100."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]


def runs_of_study(folder: Path) -> list[tuple[str, Path]]:
    """(variant, log) of the runs in a folder that has no log itself: of each folder in it that has
    one, and of each VARIANT-seedN.jsonl. They come in natural order, but `scalerl` first. The
    variant of a name without a seed is ""."""

    def has_log(folder: Path) -> bool:
        return any(file.is_file() for name in LOG_NAMES for file in folder.glob(name))

    if has_log(folder):
        return []
    runs = []
    logs = [*filter(has_log, folder.glob("*/")), *folder.glob("*-seed*.jsonl")]
    for log in sorted(logs, key=natural_order):
        seed = re.fullmatch(r"(.+)-seed\d+(\.jsonl)?", log.name)
        runs.append((seed[1] if seed else "", log))
    return sorted(runs, key=lambda run: run[0] != "scalerl")


# --- 2. Rows --------------------------------------------------------------------------------------


def text_records(log: Path) -> list[dict]:
    """The records in a text, without a last line that is half: a run is writing it. The first line
    tells the format."""
    data = sys.stdin.buffer.read() if str(log) == "-" else log.read_bytes()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    text = data.decode(encoding, "replace")
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("#")]
    if not lines:
        raise ValueError("the file is empty: the run has logged nothing yet")
    is_whole = text.endswith(("\n", "}"))
    first = lines[0].strip()
    if first.startswith(("{", "[")):
        if len(lines) == 1 or not first.endswith("}"):
            return document_records(parse_json(text))
        return [*map(parse_json, lines if is_whole else lines[:-1])]
    of_verl = [*filter(None, map(VERL.search, lines))]
    if of_verl:
        return [dict(VERL_PAIR.findall(line[0])) for line in of_verl]
    return table_records(lines, is_whole)


def parse_json(text: str):
    try:
        return json.loads(text, parse_int=float)  # an integer may have any length
    except ValueError as error:
        raise ValueError(f"{text[:40].strip()!r} is no valid JSON: mend it ({error})") from None


def document_records(document) -> list[dict]:
    """A list of records, or the lists of records in an object, such as a trainer_state.json. The
    name of a list may say that its records are validations."""
    lists = document if isinstance(document, dict) else {"": document}
    return [
        {"kind": name} | record
        for name, records in lists.items()
        for record in (records if isinstance(records, list) else ())
        if isinstance(record, dict)
    ]


def table_records(lines: list[str], is_whole: bool) -> list[dict]:
    delimiter = max(",\t;", key=lines[0].count)
    table = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    records = [*table]
    names = table.fieldnames
    if not 1 < len(names) == len(set(names)):
        raise ValueError(
            "neither JSON, nor verl's console, nor a table whose first line names its columns, like"
            f" x,y: {lines[0][:40].strip()!r}"
        )
    if not is_whole and None in records[-1].values():
        records.pop()
    for record in records:
        if None in record:
            raise ValueError(f"more values than the {len(names)} names: mend {record}")
    return records


def event_records(files: list[Path]) -> list[dict]:
    """The scalars of all files of a run, one record for each step, in order. What a later file has
    counts: a resumed run has made it again. ValueError if TensorBoard's package is missing."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ValueError(
            "TensorBoard's events are read by its own package: pip install tensorboard, or download"
            " the scalar in TensorBoard as CSV"
        ) from None
    steps = {}
    for event in itertools.chain(*(EventFileLoader(str(file)).Load() for file in files)):
        for scalar in event.summary.value:
            if scalar.HasField("tensor"):
                value = make_ndarray(scalar.tensor)
                if value.size == 1 and value.dtype.kind == "f":
                    steps.setdefault(event.step, {})[scalar.tag] = value.item()
    return [{"step": step} | steps[step] for step in sorted(steps)]


def row_of(record: dict, prefix: str = "") -> Row:
    """The numbers and texts of a record; true is 1. What has no value is left out. A record in it
    adds its name, as in eval/acc."""
    if not isinstance(record, dict):
        raise ValueError(f"{str(record)[:40]} is no JSON object: mend or remove the line")
    row = {}
    for name, value in record.items():
        name = prefix + re.sub("^test_score", "val/test_score", name)  # verl's first validation
        text = str(value).strip()
        if isinstance(value, dict):
            inner = "" if name in ("data", "metrics") else f"{name}/"
            row = row_of(value, inner) | row
        elif name and text.lower() not in NO_VALUE:
            try:
                row[name] = float({"true": 1, "false": 0}.get(text.lower(), text))
            except ValueError:
                row[name] = text
    return row


# --- 3. Which records, which columns --------------------------------------------------------------


def columns_of(rows: list[Row]) -> dict[str, list]:
    """By name of a column, its values."""
    columns = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def groups_of(rows: list[Row], name: str) -> dict[str, list[Row]]:
    """The rows that have a value in a column, by this value as a text."""
    groups = {}
    for row in rows:
        if name in row:
            groups.setdefault(str(row[name]).removesuffix(".0"), []).append(row)
    return groups


def require(name: str, among, flag: str) -> None:
    """ValueError if what a flag names is none of these."""
    if name not in among:
        near = difflib.get_close_matches(name, among, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{flag}: there is no {name!r}{hint}, but {listed(among)}")


def listed(names) -> str:
    """The first ten names, and how many more there are."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join([*names][:10]) + more


def chosen_rows(rows: list[Row], where: str | None) -> tuple[list[Row], str]:
    """The rows that --where names; and of those, the validations, if a column tells them from
    others. Returns them and their kinds."""
    kinds = {}
    for condition in where.split(",") if where else ():
        column, _, value = condition.partition("=")
        groups = groups_of(rows, column)
        require(column, columns_of(rows), "--where")
        require(value, groups, f"--where {column}")
        rows = groups[value]
        kinds[column] = value
    for column in KINDS:
        groups = groups_of(rows, column)
        if column in kinds or not groups:
            continue
        found = [kind for kind in groups if VALIDATION & words_of(kind)]
        if len(found) > 1:
            choices = " or ".join(f"--where {column}={kind}" for kind in found)
            raise ValueError(f"which records are the validations? say {choices}")
        if found:
            rows = groups[found[0]]
        kinds[column] = " and ".join(found or groups)
    return rows, " and ".join(kinds.values())


def words_of(name: str) -> set[str]:
    """The words of a name, in lower case, without the run that W&B puts before it: "a - evalAcc/m"
    has eval, acc and m. A rate is one word with what it counts, and the number in mean@8 is
    none."""
    plain = re.sub("(?<=[a-z])(?=[A-Z])", "_", name.rpartition(" - ")[2]).lower()
    plain = plain.replace("_rate", "rate").replace("_at_", "@")
    return set(re.findall("[a-z0-9@]+", re.sub(r"(mean|avg)@\d+", r"\1@", plain)))


def pass_rate_rank(name: str, kind: str) -> tuple[int, ...]:
    """How likely a column is the pass rate: the lowest tuple is the likeliest, and () is none. It
    begins with 0 for a validation, 2 for training, and 1 if nothing says which. Then come the
    places of its words in MEASURES. kind: of the records."""
    words = words_of(name)
    if name.startswith("pass_rate/"):  # of one source of our problems
        words = {"passrate"}
    if words in ({"y"}, {"value"}):  # as TensorBoard's CSV has it
        return (1, len(RANK))
    ranks = sorted({RANK[word] for word in words & RANK.keys()})
    if not ranks or words - KNOWN:
        return ()
    said = words | words_of(kind)
    place = 2 if said & TRAINING else 1
    return (0 if said & VALIDATION else place, *ranks)


def computes(columns) -> list[str]:
    """The columns of compute, the best name first."""
    lasts = {name: name.rpartition("/")[2].lower() for name in columns}
    return [name for known in COMPUTE for name in lasts if lasts[name] in (known, known + "s")]


def pass_rates(rows: list[Row], reading: Reading, kind: str) -> list[str]:
    """The columns that --y names, or else the likeliest pass rate. ValueError if several are
    equally likely."""
    columns = columns_of(rows)
    if reading.y and reading.y != "all":
        names = [reading.y] if reading.y in columns else reading.y.split(",")
        for name in names:
            require(name, columns, "--y")
        return names

    # What goes below 0 is none. If no name is known, those in [0, 1] can be named.
    ranks = {}
    inside = []
    for name, values in columns.items():
        values = [value for value in values if isinstance(value, float)]
        if min(values, default=0) >= 0:
            ranks[name] = pass_rate_rank(name, kind)
            if max(values, default=2) <= (100 if reading.percent else 1):
                inside.append(name)
    best = min(filter(None, ranks.values()), default=None)
    likely = [name for name in ranks if ranks[name] == best]
    if all(columns[name] == columns[likely[0]] for name in likely):
        likely = likely[:1]  # TRL names a single reward twice
    if "pass_rate" in likely and not reading.y:  # pass_rate/SOURCE is a part of it
        likely = ["pass_rate"]
    choices = likely or [name for name in inside if name not in computes(columns)]
    if reading.y or len(likely) == 1:
        return choices
    why = "these fit equally" if likely else "no column in [0, 1] is named like a pass rate"
    raise ValueError(f"{why}: name one with --y (or all): {listed(choices or columns)}")


def best_compute(rows: list[Row], y: str) -> str:
    """The column of compute: of those that nearly all rows have, the best name that increases, or
    else the best. ValueError if there is none."""
    columns = columns_of(rows)
    known = [name for name in computes(columns) if name != y]
    for name in known:
        values = columns[name]
        steps = np.diff([value for value in values if isinstance(value, float)])
        if len(values) > 0.9 * len(rows) and (steps > 0).all():
            return name
    if not known:
        raise ValueError(
            "no column is named like compute (steps, tokens, FLOPs): name it with --x of "
            + listed(columns)
        )
    return max(known, key=lambda name: len(columns[name]))


# --- 4. A curve of two columns --------------------------------------------------------------------


def numbers(rows: list[Row], name: str) -> Array:
    """The numbers of rows that all have a value in this column. ValueError if one is a text."""
    for row in rows:
        if isinstance(row[name], str):
            raise ValueError(
                f"{name} = {row[name][:40]!r} is no number: mend it; for a percent sign say "
                "--percent"
            )
    return np.array([row[name] for row in rows])


def curve_of(rows: list[Row], name: str, y: str, reading: Reading, kind: str) -> Series:
    """The curve of the pass rate y. kind: of the records."""
    rows = [row for row in rows if y in row]
    x = reading.x or best_compute(rows, y)
    require(x, columns_of(rows), "--x")
    rows = [row for row in rows if x in row]
    answers = num_examples(rows, y)
    if reading.mean:
        groups = [*groups_of(rows, x).values()]
        points = [group[0] | {y: numbers(group, y).mean()} for group in groups]
        points.sort(key=lambda row: row[x])
        answers = answers and answers * len(rows) / len(points)
        notes = [f"a point is the mean of {min(map(len, groups))} to {max(map(len, groups))} rows"]
    else:
        notes = refuse_several_curves(rows, x, y)
        points = last_of_each(rows, x)
    compute = numbers(points, x)
    rates = numbers(points, y) / (100 if reading.percent else 1)
    every = -(-len(points) // MOST_POINTS)
    if every > 1:
        notes.append(f"of {len(points)} points one in {every} is used")
        compute, rates = compute[::every], rates[::every]
    check_curve(compute, rates, (x, y))

    read = f"read: x = {x}, y = {y}, {len(compute)} points"
    if kind:
        read += f", from the {kind} records"
    if pass_rate_rank(y, kind)[:1] == (2,):
        notes.append(
            f"! {y} is measured in training, and is no validation: on other problems the run may "
            "do otherwise"
        )
    if UNSCALED & words_of(y):
        notes.append(
            f"! the scale of {y} is not known: A is a pass rate only if a right answer pays 1, and "
            "a wrong one 0"
        )
    return Series(name, compute, rates, x, y, answers, (read, *notes))


def last_of_each(rows: list[Row], x: str) -> list[Row]:
    """The rows that count in a resumed run: no later row has the same compute or less. All count if
    compute goes back to a new value, since no resumed run does that."""
    compute = numbers(rows, x)
    for i in np.flatnonzero(np.diff(compute) < 0) + 1:
        if compute[i] not in compute[:i]:
            return rows
    lowest_later = np.append(np.minimum.accumulate(compute[::-1])[-2::-1], np.inf)
    return [row for row, counts in zip(rows, compute < lowest_later) if counts]


def refuse_several_curves(rows: list[Row], x: str, y: str) -> list[str]:
    """ValueError, naming the column that tells them apart, if these rows are of several curves.
    Returns what is doubtful, in sentences."""
    steps = np.diff(numbers(rows, x))
    rises = (steps > 0).all()
    notes = []
    for name in columns_of(rows):
        groups = groups_of(rows, name)
        if name in (x, y) or not 1 < len(groups) <= len(rows) // 2:
            continue
        told = f"by {name}: {listed(groups)}; choose one with --where {name}={next(iter(groups))}"
        each_rises = all((np.diff(numbers(group, x)) > 0).all() for group in groups.values())
        # They may come in turn, as a base model before its method, or a second stage.
        changes = sum(a.get(name) != b.get(name) for a, b in itertools.pairwise(rows))
        in_turn = rises and changes < len(groups)
        is_group = name.lower() in GROUPS
        if (each_rises and not rises) or (is_group and not in_turn):
            raise ValueError(f"several curves under each other, {told}")
        if is_group:
            notes.append(f"one curve of several parts, {told}")
    if np.sum(steps == 0) > max(1, 0.1 * len(rows)):
        raise ValueError(
            f"several rows have one {x}: choose with --where COLUMN=VALUE, or average them with "
            "--mean"
        )
    lost = len(rows) - len(last_of_each(rows, x))
    if lost:
        many = "! " if lost > MOST_REPEATED * len(rows) else ""
        notes.append(
            f"{many}{x} begins again, and {lost} of {len(rows)} points are left out, as if a "
            "resumed run had made them again"
        )
    return notes


def num_examples(rows: list[Row], y: str) -> float | None:
    """How many answers a pass rate y is the mean of, on average; None if the log does not say.
    pass_rate/SOURCE has its own number, and pass_at_n is a mean over problems."""
    if "pass_at_n" in y:
        return None
    name = y.replace("pass_rate", "num_examples") if "pass_rate/" in y else "num_examples"
    numbers = [row[name] for row in rows if isinstance(row.get(name), float)]
    known = [number for number in numbers if number > 0]  # -1 often stands for all
    return np.mean(known) if known else None
