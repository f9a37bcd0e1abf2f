"""Read the log of an RL run as a curve: pass rate over compute.

    read_log("runs/NAME")                          # the folder of a run of ours
    read_log("wandb.csv", y="all", percent=True)   # one curve for each run in the table

A log is JSON lines, a JSON document with a list of records, a table with a line of names, verl's
console, or TensorBoard's events. It becomes rows: numbers and texts by name. Then the columns of
compute and pass rate are chosen by their names. If no name is known, or if two fit equally, none is
taken, and the error names them: a wrong curve with plausible numbers is worse than no curve.
"""

import csv
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from curve.files import read_text
from curve.flags import option
from curve.least_squares import Array

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
VERL_PAIR = r"(?i)([^\s:]+):(?:\w+(?:\.\w+)*\()?(-?[\d.]+(?:e[-+]?\d+)?|nan)"
NO_VALUE = "|na|n/a|#n/a|null|none|nan|-".split("|")

# What compute is called, the best first. Only the last part of a path counts.
COMPUTE = """
    compute_flops train_flops total_flops flops compute_flos total_flos flos total_eflops eflops
    compute_device_hours device_hours gpu_hours compute_tokens compute
    num_tokens total_tokens num_input_tokens_seen tokens seconds wall_time_seconds hours
    global_step global_steps train_step training_step trainer_step grpo_step ppo_step rl_step
    checkpoint_step step steps _step timesteps_total total_timesteps num_timesteps timestep
    timesteps env_step env_steps frame frames optimizer_step training_iteration iteration
    iterations update updates epoch epochs episode episodes batch batches _runtime x
""".split()
# The words in the name of a pass rate, the best first. With any other word it is another quantity,
# such as failure_rate or token_accuracy.
MEASURES = """
    passrate
    pass@1 pass1 mean@ avg@
    acc accuracy correct correctness success successrate solved solverate match
    aime aime24 aime25 amc gpqa gsm8k math math500 minerva olympiad
    score scores
    reward rewards
"""
RANK = {word: i for i, words in enumerate(MEASURES.splitlines()) for word in words.split()}
UNSCALED = set("score scores reward rewards".split())  # a right answer may pay any number of these
VALIDATION = set("val valid validation eval evaluation test dev heldout".split())
TRAINING = set("train training rollout rollouts critic actor env".split()) | UNSCALED
OTHERS = "mean avg all overall answer sampled default agent core openai episode is func".split()
KNOWN = {*RANK, *VALIDATION, *TRAINING, *OTHERS}
# Columns that say of which kind a record is, and to which of several curves it belongs.
KINDS = "kind type split mode phase".split()
GROUPS = "algorithm method recipe run run_id exp seed dataset task env model variant".split()


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

    x: str | None = option(None, "the column of compute; by default guessed, and printed")
    y: str | None = option(
        None, "the column of the pass rate, several with commas, or all; by default guessed"
    )
    where: str | None = option(None, "only the records with COLUMN=VALUE; several with commas")
    percent: bool = option(False, "the pass rate is in percent")
    mean: bool = option(False, "rows of one compute are averaged, such as problems or seeds")


# --- 1. From a path to curves ---------------------------------------------------------------------


def read_log(path: str | Path, **choices) -> list[Series]:
    """The curves in a log: one, or one for each column that `y` names.

    path: a file, "-" for standard input, the folder of a run, or FILE:COLUMN. choices: the fields
    of `Reading`. ValueError, with the file, if there is no curve; OSError if there is no file.
    """
    for colon in re.finditer(":(?=.)", str(path)):  # a folder or a column may have one too
        if Path(file := str(path)[: colon.start()]).is_file():
            choices["y"] = str(path)[colon.end() :]
            path = file
            break
    reading = Reading(**choices)
    path = Path(path)
    log = log_in(path) if path.is_dir() else path
    if not log:
        raise ValueError(f"{path}: no log of a known name in this folder: name the file of the log")
    name = path.absolute().name.removesuffix(".jsonl")
    try:
        left_out = []
        is_events = "tfevents" in log.name
        records = event_records(path) if is_events else text_records(log, left_out)
        rows, kind = chosen_rows([*map(row_of, records)], reading.where)
        return [
            curve_of(rows, y if reading.y else name, y, reading, kind, left_out)
            for y in pass_rates(rows, reading, kind)
        ]
    except (ValueError, csv.Error, RecursionError, ImportError) as error:
        raise ValueError(f"{log}: {error}") from None


def log_in(folder: Path) -> Path | None:
    """The last file of the first of LOG_NAMES that is in a folder."""
    for name in LOG_NAMES:
        for log in sorted(folder.glob(name), key=natural_order, reverse=True):
            return log


def natural_order(path: Path) -> str:
    """A path in which numbers are of one length: checkpoint-90 comes before checkpoint-100."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), str(path))


# --- 2. Rows --------------------------------------------------------------------------------------


def text_records(log: Path, left_out: list[str]) -> list[dict]:
    """The records in a text, without a last line of JSON that is half or a last row that lacks
    values: a run is writing it. The first line tells the format. Sentences about lines that cannot
    be read are added to `left_out`. ValueError if there are many."""
    text = read_text(log)
    if text.count("\ufffd") > len(text) / 100:
        raise ValueError("the file is no text")
    lines = {
        i: line for i, line in enumerate(text.split("\n"), 1) if line.strip() and line[0] != "#"
    }
    if not lines:
        raise ValueError("the file is empty: the run has logged nothing yet")
    is_whole = text.endswith(("\n", "}"))
    first, *others = [line for line in lines.values() if "\0" not in line] or lines.values()
    if first.strip()[0] in "{[":
        if first.strip()[-1] != "}" or not others:
            return json_records(json.loads(text))
        if not is_whole:
            lines.popitem()
        return json_records(line_records(lines, left_out))
    text = text.replace(" test_score", " val/test_score")  # verl's first validation
    of_verl = re.findall(r"\bstep:\d+ - .*", text)
    if of_verl:
        return [dict(re.findall(VERL_PAIR, line)) for line in of_verl]
    return table_records([first, *others], is_whole)


def line_records(lines: dict[int, str], left_out: list[str]) -> list:
    """What lines of JSON hold, by their numbers. One in a hundred may be broken, and any that has
    zero bytes, as a full disk leaves it."""
    found, broken = [], []
    for number, line in lines.items():
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError
            found.append(record)
        except ValueError:
            sentence = f"line {number} is no JSON object: {line[:40]!r}"
            left_out.append(f"! left out: {sentence}")
            broken += [sentence] * ("\0" not in line)
    if len(broken) > len(lines) / 100:
        raise ValueError(broken[0])
    return found


def json_records(document) -> list[dict]:
    """The records in a list, or in the lists of an object, such as a trainer_state.json. The name
    of a list may say that its records are validations. An object without lists is a record."""
    lists = document if isinstance(document, dict) else {"": document}
    in_lists = [
        {"kind": name} | record
        for name, records in lists.items()
        if isinstance(records, list)
        for record in records
        if isinstance(record, dict)
    ]
    return in_lists or [lists]


def table_records(lines: list[str], is_whole: bool) -> list[dict]:
    delimiter = max(",\t;", key=lines[0].count)
    table = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True)
    records = [*table]
    if len(set(table.fieldnames)) < 2:
        raise ValueError(
            "neither JSON, nor verl's console, nor a table whose first line names its columns, like"
            f" x,y: {lines[0][:40].strip()!r}"
        )
    for name in table.fieldnames:
        if table.fieldnames.count(name) > 1 and pass_rate_rank(name, ""):
            raise ValueError(f"two columns have one name: rename one {name}")
    if records and not is_whole and None in records[-1].values():
        records.pop()
    for record in records:
        if None in record:
            raise ValueError(f"more values than columns: mend {[*record.values()]}")
    return records


def event_records(path: Path) -> list[dict]:
    """The scalars in a file of events, or in all files of a folder: one record for each step, in
    order. What a later file has counts: a resumed run has made it again. ImportError without
    TensorBoard's package."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    steps = defaultdict(dict)
    for tag in events.Tags()["scalars"]:
        for scalar in events.Scalars(tag):
            steps[scalar.step][tag] = scalar.value
    return [{"step": step} | row for step, row in sorted(steps.items())]


def row_of(record: dict, prefix: str = "") -> dict[str, float | str]:
    """The numbers and texts of a record; true is 1. What has no value is left out. A record in it
    adds its name, as in eval/acc."""
    row = {}
    for name, value in record.items():
        text = str(value).strip()
        if isinstance(value, dict):
            row |= row_of(value, "" if name in ("data", "metrics") else f"{prefix}{name}/")
        elif text.lower() not in NO_VALUE:
            try:
                row[prefix + name] = float({"true": 1, "false": 0}.get(text.lower(), text))
            except ValueError:
                row[prefix + name] = text
    return row


# --- 3. Which records, which columns --------------------------------------------------------------


def columns_of(rows: list[dict]) -> dict[str, list[float]]:
    """By name of a column, the numbers in it."""
    columns = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            columns[name] += [value] if isinstance(value, float) else []
    return columns


def groups_of(rows: list[dict], name: str) -> dict[str, list[dict]]:
    """The rows that have a value in a column, by this value as a text."""
    groups = defaultdict(list)
    for row in rows:
        if name in row:
            groups[str(row[name]).removesuffix(".0")].append(row)
    return groups


def require(name: str, among, flag: str) -> None:
    """ValueError if what a flag names is none of these."""
    if name not in among:
        raise ValueError(f"{flag}: there is no {name!r}, but {', '.join(among)}")


def chosen_rows(rows: list[dict], where: str | None) -> tuple[list[dict], str]:
    """The rows that --where names; and of those, the validations, if a column tells them from
    others. Returns them and their kinds."""
    for condition in where.split(",") if where else ():
        column, _, value = condition.partition("=")
        groups = groups_of(rows, column)
        require(column, columns_of(rows), "--where")
        require(value, groups, f"--where {column}")
        rows = groups[value]
    kinds = []
    for column in columns_of(rows):
        if not tells_kinds(rows, column):
            continue
        groups = groups_of(rows, column)
        found = [kind for kind in groups if VALIDATION & words_of(kind)]
        if len(found) > 1:
            raise ValueError(
                "which records are the validations? say "
                f"{' or '.join(f'--where {column}={kind}' for kind in found)}"
            )
        for kind in found:
            rows = groups[kind]
        kinds += found or groups
    return rows, " and ".join(kinds)


def tells_kinds(rows: list[dict], column: str) -> bool:
    """Whether a column says of which kind a record is: by its name, or since it has a text in each
    row, all of known words, with validation and training among them."""
    if column in KINDS:
        return True
    texts = {row.get(column) for row in rows}
    if not all(isinstance(text, str) for text in texts):
        return False
    words = set().union(*map(words_of, texts))
    return words <= KNOWN and bool(words & VALIDATION and words & TRAINING)


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
    words = words_of(re.sub(r"(?i)^(val)-core/.*(/[^/]+/mean@)", r"\1\2", name))  # verl's data sets
    if name.startswith("pass_rate/"):  # of one source of our problems
        words = {"passrate"}
    if name.lower() in ("y", "value"):  # as TensorBoard's CSV has it
        return 1, len(RANK)
    ranks = sorted({RANK[word] for word in words & RANK.keys()})
    if not ranks or words - KNOWN:
        return ()
    said = words | words_of(kind)
    place = 0 if said & VALIDATION else 1 + bool(said & TRAINING)
    return place, *ranks


def computes(columns) -> list[str]:
    """The columns of compute, the best name first; timing_s/step is the time of one step."""
    cumulative = [name for name in columns if not re.search(r"\btim(e|ing)[^/]*/step$", name)]
    return [
        name for known in COMPUTE for name in cumulative if name.rpartition("/")[2].lower() == known
    ]


def pass_rates(rows: list[dict], reading: Reading, kind: str) -> list[str]:
    """The columns that --y names, or else the likeliest pass rate. ValueError if several are
    equally likely."""
    columns = columns_of(rows)
    if reading.y and reading.y != "all":
        names = [reading.y] if reading.y in columns else reading.y.split(",")
        for name in names:
            require(name, columns, "--y")
        return names

    # What goes below 0 is none. If no name is known, those in [0, 1] can be named.
    ranks = {
        name: pass_rate_rank(name, kind)
        for name, values in columns.items()
        if min(values, default=0) >= 0
    }
    best = min(filter(None, ranks.values()), default=None)
    likely = [name for name in ranks if ranks[name] == best]
    if all(columns[name] == columns[likely[0]] for name in likely):
        likely = likely[:1]  # TRL names a single reward twice
    if "pass_rate" in likely and not reading.y:  # pass_rate/SOURCE is a part of it
        likely = ["pass_rate"]
    if not best:
        most = 100 if reading.percent else 1
        likely = [
            name
            for name in ranks
            if max(columns[name], default=101) <= most and name not in computes(columns)
        ]
    if likely and (reading.y or best and len(likely) == 1):
        return likely
    why = "these fit equally: name one"
    if not best:
        why = "no column in [0, 1] is named like a pass rate: if one of these is it, name one"
    raise ValueError(f"{why} with --y (or all): {', '.join(likely or columns)}")


def best_compute(columns: dict[str, list[float]]) -> str:
    """The column of compute: of those with the most values, the best name that increases, or else
    the best name. ValueError if there is none."""
    known = computes(columns)
    if not known:
        raise ValueError(
            "no column is named like compute (steps, tokens, FLOPs): name it with --x of "
            f"{', '.join(columns)}"
        )
    return max(known, key=lambda name: (len(columns[name]), rises(columns[name])))


def rises(values) -> bool:
    """Whether each value is above the one before it."""
    return np.all(np.diff(values) > 0)


# --- 4. A curve of two columns --------------------------------------------------------------------


def curve_of(
    rows: list[dict], name: str, y: str, reading: Reading, kind: str, left_out: list[str]
) -> Series:
    """The curve of the pass rate y. kind: of the records. left_out: notes about others."""
    rows = [row for row in rows if y in row]
    columns = columns_of(rows)
    x = reading.x or best_compute(columns)
    require(x, columns, "--x")
    rows = [row for row in rows if x in row]
    try:
        compute, rates = (np.array([row[column] for row in rows], float) for column in (x, y))
    except ValueError as error:
        raise ValueError(f"{x} and {y} must be plain numbers, like .5: {error}") from None
    if reading.percent:
        rates /= 100
        if rates.max() <= 0.01:
            raise ValueError(f"--percent: no value of {y} is above 1, so it is no percentage")
    # How many answers a pass rate is the mean of. pass_rate/SOURCE has its own number, and
    # pass_at_n is a mean over problems. -1 often stands for all.
    answers = [n for n in columns["num_examples" + y.partition("pass_rate")[2]] if n > 0]
    answers = np.mean(answers) if answers and "pass_at_n" not in y else None
    if reading.mean:
        compute, index, number = np.unique(compute, return_inverse=True, return_counts=True)
        rates = np.bincount(index, rates) / number
        answers = answers and answers * number.mean()
        doubt = "! " if np.ptp(number) else ""  # the mean jumps where a curve begins or ends
        notes = [f"{doubt}a point is the mean of {number.min()} to {number.max()} rows"]
    else:
        counts, notes = points_of_one_curve(rows, compute, x, y)
        compute, rates = compute[counts], rates[counts]

    of_kind = f", from the {kind} records" if kind else ""
    read = f"read: x = {x}, y = {y}, {len(compute)} points{of_kind}"
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
    return Series(name, compute, rates, x, y, answers, (read, *notes, *left_out))


def points_of_one_curve(
    rows: list[dict], compute: Array, x: str, y: str
) -> tuple[Array, list[str]]:
    """Which of n rows count as points, (n,) of bool, and what is doubtful, in sentences. In a
    resumed run a row counts if no later row has the same compute or less. ValueError if the rows
    are of several curves, with the column that tells them apart."""
    notes = []
    for name in columns_of(rows):
        groups = groups_of(rows, name)
        if name in (y, "session") or not 1 < len(groups) <= len(rows) // 2:
            continue
        told = f"by {name}: {', '.join(groups)}; choose one with --where {name}=X"
        each_rises = all(rises([row[x] for row in group]) for group in groups.values())
        is_group = name.lower() in GROUPS
        # They may come in turn, as a base model before its method, or a second stage.
        if is_group and rises(compute) and rows == sum(groups.values(), []):
            notes.append(f"one curve of several parts, {told}")
        elif is_group or each_rises and not rises(compute):
            raise ValueError(f"several curves under each other, {told}")
    steps = np.diff(compute)
    if np.sum(steps == 0) > max(1, len(rows) // 10):
        raise ValueError(
            f"several rows have one {x}: choose with --where COLUMN=VALUE, or average them with "
            "--mean"
        )

    counts = compute < np.append(np.minimum.accumulate(compute[::-1])[-2::-1], np.inf)
    # No resumed run goes back to compute that it did not have: then all count, in a wrong order.
    counts |= any(compute[i] not in compute[:i] for i in np.flatnonzero(steps < 0) + 1)
    if not counts.all():
        notes.append(
            f"! {x} begins again, and {np.sum(~counts)} of {len(rows)} points are left out, as if "
            "a resumed run had made them again"
        )
    return counts, notes
