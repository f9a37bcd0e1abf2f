"""Choose the columns of compute and pass rate in the table of a log, and make curves of them.

A column is chosen by its name. The lists below say what frameworks call these columns, the best
name first. If no name is known, or two pass rates are equally likely, none is taken, and the error
names them: a wrong curve with plausible numbers is worse than no curve.
"""

import difflib
import math
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from curve.flags import option
from curve.least_squares import Array

# A curve has at most so many points; of a longer one, neighbours are averaged. Each point costs a
# fit time and memory, and no plot shows more.
MOST_POINTS = 2000
MOST_REPEATED = 0.2  # the part of the points that a resumed run may have made again
FEW_POINTS = 5  # a curve with fewer cannot be fitted
MOST_COLUMNS = 100_000  # of a log, in some 50 MB
LONGEST_TEXT = 300  # characters of a value that are kept: the path of a run, but no completion


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


def beyond_0(points) -> tuple[Array, Array]:
    """x and y of the points with compute above 0, which has a logarithm. points: a Series or a
    Fit."""
    later = points.x > 0
    return points.x[later], points.y[later]


@dataclass(frozen=True)
class Reading:
    """Which records and columns of a log are read."""

    x: str | None = option(None, "the column of compute; by default guessed, and printed")
    y: str | None = option(
        None,
        "the column of the pass rate, or several with commas, or all; by default guessed, and "
        "printed",
    )
    where: str | None = option(None, "only the records with COLUMN=VALUE; several with commas")
    percent: bool = option(False, "the pass rate is in percent")
    mean: bool = option(
        False, "average the rows of one step, such as several problems or seeds under each other"
    )


def check_curve(
    x: Array,
    y: Array,
    place: Callable[[int], str] = lambda i: f"point {i + 1}",
    names: tuple[str, str] = ("x", "y"),
) -> None:
    """ValueError, naming the first wrong point and its column, unless compute x (n,) increases and
    pass rates y (n,) are in [0, 1]. place: what a point is called, by its index. names: the columns
    of x and y."""
    with np.errstate(invalid="ignore"):
        advice = "name another column with --y"
        if 20 < y.max() <= 100:
            advice = "if it is in percent, say --percent"
        elif 1 < y.max() <= 20:
            advice = f"if it is in percent, say --percent, else {advice}"
        falls = np.diff(x, prepend=-1) <= 0
        order = "sort the log by it"
        if falls.sum() > len(x) / 5 and (np.diff(x) >= 0).any():
            order = (
                f"it falls {falls.sum()} times, so it is no sum of all compute so far, or the lines"
                " are in no order: name another column with --x, or sort the log"
            )
        wrong = {
            "{x}, {y}: not finite; remove the line": ~np.isfinite(x + y),
            "{x}: compute is never negative": x < 0,
            "{x} after {before:g}: it must increase; {order}": falls,
            "{y} is no pass rate, not in [0, 1]: {advice}": (y < 0) | (y > 1),
        }
    for message, broken in wrong.items():
        if broken.any():
            i = int(broken.argmax())
            text = message.format(
                x=f"{names[0]} = {x[i]:g}",
                y=f"{names[1]} = {y[i]:g}",
                before=x[i - 1],
                advice=advice,
                order=order,
            )
            raise ValueError(f"{place(i)}: {text}")


# --- 1. Names -------------------------------------------------------------------------------------

# What compute is called, the best first. Only the last part of a path counts.
COMPUTE = """
    compute_flops train_flops total_flops flops compute_flos total_flos flos
    total_flops_eflops cumulative_eflops total_eflops eflops exaflops pflops petaflops
    compute_device_hours device_hours gpu_hours accelerator_hours
    compute_tokens compute
    num_tokens total_tokens cumulative_tokens sampled_tokens num_input_tokens
    num_input_tokens_seen tokens_seen tokens
    seconds wall_seconds wall_clock wall_time_seconds clock hours time_total_s
    global_step train_step training_step trainer_step grpo_step ppo_step rl_step
    checkpoint_step step _step
    timesteps_total total_timesteps num_timesteps timestep env_step frame
    optimizer_step training_iteration iteration update epoch episode num_episodes batch
    relative_time relative_time_process relative_time_wall _runtime x
""".split()
# These columns count steps. A resumed run repeats their values.
STEP = re.compile(r"(.*[/_])?steps?|(.*/)?(iterations?|updates?)", re.I)

# These columns say what one step costs, in seconds or tokens. Compute is their sum so far.
OF_ONE_STEP = re.compile(
    r"timing(_s)?/\w+|perf/(time_per_step|total_num_tokens)"
    r"|(actor/)?tokens_of_step|progress/output_tokens"
)

# Words in the names of pass rates, the best first. All words of a name count: acc/mean@8 comes
# before reward/mean@8.
MEASURES = (
    "passrate",
    "meanofn passone",
    "acc accuracy correct correctness success solve solved match",
    "aime aime24 aime25 aime2024 aime2025 amc gpqa gsm8k humaneval livecodebench math math500 mbpp "
    "minerva mmlu olympiad",
    "score scores",
    "reward rewards",
)
REWARDS = {4, 5}  # a name with one of these is from training, unless it says validation
RANK = {word: rank for rank, words in enumerate(MEASURES) for word in words.split()}
# What these words add to a measure does not change what it is. A word that is not known makes
# another quantity of it.
ADDED = set(
    "mean avg average total rate overall all default final answer sampled greedy is func fn "
    "function episode core agent of per exact out".split()
)
VALIDATION = set("val valid validation eval evaluation evaluate test dev held heldout".split())
TRAINING = set("train training rollout rollouts critic actor env".split())
# A part of a path with one of these is no pass rate, whatever stands before it.
NEVER = set(
    "std stdev stderr var sem min max median count format length len loss kl entropy time "
    "best worst maj majority cons aux".split()
)
SPELLINGS = (  # of words that hold a number or a space
    (r"valid[_ ]?rate", "validrate"),  # how many answers can be read
    (r"pass[_ ]?rates?", "passrate"),
    (r"(mean|avg|average)@\d+", "meanofn"),
    (r"pass[_@ ]?(at_?)?1(?!\d)", "passone"),
)

# A record with one of these is from training, unless its name says validation.
LOSS = re.compile(r"(.*[/_])?(loss|kl|entropy|grad_norm|learning_rate|lr|advantages?)", re.I)
# These columns say whether a record is from training or from a validation.
KINDS_OF_RECORD = ("kind", "type", "split", "mode", "phase", "stage", "event")
# These columns say to which of several curves a record belongs.
GROUPS = re.compile(
    r"(?i)algo(rithm)?|method|recipe|run(_?(id|name))?|exp(eriment)?|seed|trial|(data_?)?set"
    r"|data_source|task|benchmark|env(ironment)?|model|policy|variant|setting|group|metric|tag|key"
)


def _parts(name: str) -> list[list[str]]:
    """The words of each part of a path, in lower case, without the run that W&B puts before it: "a
    - evalAcc/mean" is [[eval, acc], [mean]]."""
    path = name.rpartition(" - ")[2]
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path).lower()
    for spelling, word in SPELLINGS:
        plain = re.sub(rf"(?<![a-z0-9]){spelling}(?![a-z0-9])", word, plain)
    return [re.findall("[a-z0-9]+", part) for part in plain.split("/")]


def _says(words: set[str], name: str) -> bool:
    """Whether one of these words is in a name."""
    return any(not words.isdisjoint(part) for part in _parts(name))


def _compute_rank(name: str) -> int | None:
    """The place of a name in COMPUTE: 0 is the best. None if it is no name of compute."""
    last = name.rpartition("/")[2].lower()
    plain = re.sub("[^a-z0-9]+", "_", last).rstrip("_")
    for rank, known in enumerate(COMPUTE):
        if known in (plain, plain.removesuffix("s")):
            return rank
    return None


def _pass_rate_rank(name: str, source: str) -> tuple[int, ...]:
    """How likely a column is the pass rate: the lowest tuple is the likeliest, and () is no name of
    a pass rate.

    source: the kind of the records. The tuple begins with 0 for a validation, 2 for training, and 1
    if nothing says which. Then come the places of its words in MEASURES. The part of the name that
    holds them must have no unknown word (failure_rate, reward_hacking_rate), and so must the parts
    after a reward, which say what is rewarded."""
    parts = _parts(name)
    ranks = set()
    if parts in ([["y"]], [["value"]]):  # the name says no more than that it is a value
        ranks.add(len(MEASURES))
    known = RANK.keys() | ADDED | VALIDATION | TRAINING
    for part in parts:
        if known.issuperset(part):
            ranks |= {RANK[word] for word in part if word in RANK}
        elif RANK["reward"] in ranks or not NEVER.isdisjoint(part):
            return ()
    if not ranks:
        return ()
    said = f"{source}/{name}"
    if _says(VALIDATION, said):
        place = 0
    elif _says(TRAINING, said) or ranks & REWARDS:
        place = 2
    else:
        place = 1
    return (place, *sorted(ranks))


# --- 2. The table of a log ------------------------------------------------------------------------


class Table:
    """The values of a log by column: the rows that have one, and their numbers. A text is NaN, and
    stands in `texts`.

    lines: the line of each row in the file; -3 is the third record of a JSON document. chosen: a
    mask of the rows that are read. names: the columns with a value in these rows. source: the kind
    of these rows, such as "eval".
    """

    def __init__(self, rows: Iterable[tuple[int, dict]], notes: list[str]):
        self.notes = notes
        self.source = ""
        self.lines = array("q")
        self.columns = defaultdict(lambda: (array("i"), array("d")))
        self.texts: dict[str, dict[int, str]] = defaultdict(dict)  # by column and row
        for line, values in rows:
            for name, value in values.items():
                if name and value not in (None, ""):
                    in_rows, numbers = self.columns[name]
                    in_rows.append(len(self.lines))
                    numbers.append(self._number(name, value))
            if len(self.columns) > MOST_COLUMNS:
                raise ValueError(f"line {abs(line)}: more than {MOST_COLUMNS:,} columns: no log")
            self.lines.append(line)
        self.chosen = np.ones(len(self.lines), bool)
        self.names = [*self.columns]

    def _number(self, name: str, value) -> float:
        """A value of the row that is being read. A text is NaN, and is kept in `texts`."""
        if type(value) is float:
            return value
        text = str(value).strip()[:LONGEST_TEXT]
        try:
            return float(text)
        except ValueError:
            if text.lower() not in ("", "na", "n/a", "#n/a", "null", "none", "-"):
                self.texts[name][len(self.lines)] = sys.intern(text)  # one copy of each text
            return np.nan

    def place(self, row: int) -> str:
        """Where a row stands in the file, in words."""
        line = self.lines[row]
        return f"line {line}" if line > 0 else f"record {-line}"

    def rows(self, name: str) -> Array:
        """The chosen rows that have a value in this column. The value may be NaN."""
        rows = np.asarray(self.columns[name][0])
        return rows[self.chosen[rows]]

    def numbers(self, name: str) -> Array:
        """The numbers of a column by row, NaN if there is none."""
        rows, values = self.columns[name]
        numbers = np.full(len(self.lines), np.nan)
        numbers[np.asarray(rows)] = values
        return numbers

    def groups(self, name: str, rows: Iterable[int]) -> dict[str, list[int]]:
        """These rows by their value in a column, as a text. Rows without a value are left out."""
        groups = defaultdict(list)
        numbers = self.numbers(name)
        texts = self.texts.get(name, {})
        for row in rows:
            value = texts.get(row) or str(numbers[row]).removesuffix(".0")
            if value != "nan":
                groups[value].append(row)
        return groups

    def choose(self, rows: list[int]) -> None:
        """Choose these rows alone."""
        self.chosen = np.zeros(len(self.lines), bool)
        self.chosen[rows] = True
        self.names = [name for name in self.columns if len(self.rows(name))]

    def require(self, name: str, flag: str) -> None:
        """ValueError if no chosen row has a value in the column that a flag names."""
        if name not in self.names:
            near = difflib.get_close_matches(name, self.names, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"no column {name!r} with values{hint}; {flag} can name: {_listed(self.names)}"
            )


def _listed(names: Iterable[str]) -> str:
    """The first ten names, and how many more there are."""
    first = [*names][:10]
    more = len(names) - 10
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


# --- 3. Which records and which columns -----------------------------------------------------------


@np.errstate(all="ignore")  # NaN is a missing value, and check_curve names the place of an infinity
def read_curves(table: Table, name: str, reading: Reading) -> list[Series]:
    """The curves in a table: one, or one for each column that `reading.y` names. name: of the run,
    if there is one curve. ValueError if there is none, or if a column that is named gives none."""
    kinds = _choose_where(table, reading.where)
    _choose_validations(table, kinds)
    table.source = " and ".join(kinds.values())
    table.names = [name for name in table.names if name not in kinds]  # lr=1e-5 is no loss
    if not table.names:
        raise ValueError(
            "no column has a value: expected a table with names, or a JSON object a line"
        )
    columns = _pass_rates(table, reading.y)
    several = len(columns) > 1 or reading.y == "all"
    curves = []
    broken = []
    for column in columns:
        try:
            curves.append(_series(table, column if several else name, column, reading))
        except ValueError as error:
            # Of all columns, one that gives no curve does not cost the others theirs.
            if reading.y != "all":
                raise
            broken.append(f"! {column} is left out: {error}")
    if not curves:
        raise ValueError(broken[0].removeprefix("! "))
    curves[0] = replace(curves[0], notes=(*curves[0].notes, *broken))
    return curves


def _choose_where(table: Table, where: str | None) -> dict[str, str]:
    """Choose the records that --where names. Returns its values, by column."""
    kinds = {}
    for condition in where.split(",") if where else ():
        column, _, value = condition.partition("=")
        table.require(column, "--where")
        groups = table.groups(column, table.rows(column))
        if value not in groups:
            raise ValueError(f"no record has {condition}: {column} can be {_listed(groups)}")
        table.choose(groups[value])
        kinds[column] = value
    return kinds


def _choose_validations(table: Table, kinds: dict[str, str]) -> None:
    """If records are of several kinds, choose those of the validations. What is known of the
    records is added to `kinds`, by column."""
    for column in KINDS_OF_RECORD:
        if column not in table.names or column in kinds:
            continue
        groups = table.groups(column, table.rows(column))
        trained = [value for value in groups if _says(TRAINING, value)]
        validations = [each for each in groups if _says(VALIDATION, each) and each not in trained]
        if len(validations) > 1:
            choices = " or ".join(f"--where {column}={value}" for value in validations)
            raise ValueError(f"which records are the validations? say {choices}")
        if validations:
            table.choose(groups[validations[0]])
        if validations or trained:
            kinds[column] = " and ".join(validations or trained)


def _pass_rates(table: Table, y: str | None) -> list[str]:
    """The columns that `y` names, or else the likeliest pass rate. ValueError if several are
    equally likely."""
    if y not in (None, "all"):
        names = [y] if y in table.names else y.split(",")
        for name in names:
            table.require(name, "--y")
        return names

    # The likeliest columns. A column of texts is none, and of two that are alike the first counts.
    columns = {name: table.numbers(name)[table.chosen] for name in table.names}
    numbers = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    if not numbers:
        raise ValueError(f"no value is a finite number, in any of {_listed(columns)}")
    ranks = {name: _pass_rate_rank(name, table.source) for name in numbers}
    best = min(filter(None, ranks.values()), default=None)
    likely = []
    for name in numbers:
        alike = (np.array_equal(numbers[name], numbers[one], equal_nan=True) for one in likely)
        if ranks[name] == best and not any(alike):
            likely.append(name)
    if "pass_rate" in likely and y != "all":  # of all sources; pass_rate/SOURCE is of one of them
        return ["pass_rate"]
    if len(likely) == 1:
        return likely

    question = "which column is the pass rate?"
    if not likely:
        # A name may fit a column that has texts, such as 62%.
        for name in columns:
            if _pass_rate_rank(name, table.source):
                _refuse_texts(table, name, table.rows(name))
        question = "no column is named like a pass rate:"
        likely = [name for name in numbers if _compute_rank(name) is None]
    if not likely:
        raise ValueError(f"no column can be a pass rate, of {_listed(columns)}")
    if y == "all":
        return likely
    for i, name in enumerate(likely):
        low = np.nanmin(numbers[name])
        high = np.nanmax(numbers[name])
        likely[i] = f"{name} ({low:.3g} to {high:.3g})"
    raise ValueError(f"{question} name it with --y (or all): {_listed(likely)}")


def _counters(table: Table, y: str, rows: Array) -> list[str]:
    """The columns of compute, the best name first: those with nearly as many values in these rows
    as the fullest."""
    known = [name for name in table.names if name != y and _compute_rank(name) is not None]
    found = {name: np.isfinite(table.numbers(name)[rows]).sum() for name in known}
    enough = 0.9 * max(found.values(), default=0)
    return sorted([name for name in known if found[name] >= enough], key=_compute_rank)


def _best_compute(table: Table, counters: list[str], rows: Array) -> str:
    """The first counter that increases over these rows, or else the first. ValueError if there is
    no counter."""
    for name in counters:
        values = table.numbers(name)[rows]
        if (np.diff(values[np.isfinite(values)]) > 0).all():
            return name
    if counters:
        return counters[0]
    raise ValueError(
        "no column is named like compute (steps, tokens, hours, FLOPs): name it with --x of: "
        + _listed(table.names)
    )


# --- 4. A curve of two columns --------------------------------------------------------------------


def _series(table: Table, name: str, y: str, reading: Reading) -> Series:
    """The curve of the pass rate y."""
    rows = table.rows(y)
    _refuse_texts(table, y, rows)
    pass_rate = table.numbers(y)
    nan = np.isnan(pass_rate[rows])
    rows = rows[~nan]
    left_out = {"with NaN": nan.sum()}  # rows, by the reason

    # The column that tells which rows are of one step, and one row for each step.
    counters = _counters(table, y, rows)
    step = next(filter(STEP.fullmatch, counters), reading.x)
    if step not in table.names:
        step = _best_compute(table, counters, rows)
    steps = table.numbers(step)
    number = len(rows)
    every = rows
    if reading.mean:
        doubts = _steps_of_several_sizes(steps[every])
        rows, pass_rate = _means_of_steps(steps, pass_rate, every)
    else:
        doubts = _refuse_several_curves(table, step, y, rows)
        rows = rows[_last_of_each(steps[rows])]
        left_out["that a resumed run has made again or undone"] = number - len(rows)

    # A point needs its compute, too.
    x = reading.x or _best_compute(table, counters, rows)
    _refuse_texts(table, x, rows)
    x, compute = _compute(table, x, steps, reading.mean)
    if reading.mean:
        _, compute = _means_of_steps(steps, compute, every)
    missing = np.isnan(compute[rows])
    if missing.all():
        raise ValueError(f"no line has a value of {x!r} and of {y!r}")
    left_out[f"without {x}"] = missing.sum()
    rows = rows[~missing]
    compute, pass_rate = compute[rows], pass_rate[rows]
    if reading.percent:
        pass_rate = pass_rate / 100
    check_curve(compute, pass_rate, lambda i: table.place(rows[i]), (x, y))

    # Notes say what was read, and what was not.
    note = f"read: x = {x}, y = {y}, {len(rows)} points"
    if table.source:
        note += f", from the {table.source} records"
    if reading.mean:
        note += f", each the mean of all with its {step} ({number} in all)"
    reasons = [f"{count} {reason}" for reason, count in left_out.items() if count]
    if reasons:
        note += f"; left out: {', '.join(reasons)}"
    warnings = _warnings(table, y, rows) + doubts

    # What a point is the mean of has more answers.
    num_examples = _num_examples(table, y, rows)
    if num_examples and reading.mean:
        num_examples *= number / len(rows)
    if len(rows) > MOST_POINTS:
        compute, pass_rate = _neighbours_averaged(compute), _neighbours_averaged(pass_rate)
        num_examples = num_examples and num_examples * len(rows) / len(compute)
        note += f"; neighbours averaged into {len(compute)}"
    notes = (note, *table.notes, *warnings)
    return Series(name, compute, pass_rate, x, y, num_examples, notes)


def _compute(table: Table, x: str, steps: Array, mean: bool) -> tuple[str, Array]:
    """Compute by row, and what it is called: the column x, or its sum so far if it is of one step.
    steps: by row. What a resumed run has undone is not in the sum. mean: a step that comes again
    undoes nothing; the sum has the mean of its rows."""
    if not (OF_ONE_STEP.fullmatch(x) and x in table.columns):
        table.require(x, "--x")
        return x, table.numbers(x)
    rows = np.asarray(table.columns[x][0])  # those of training too
    if mean:
        rows, cost = _means_of_steps(steps, np.nan_to_num(table.numbers(x)), rows)
        so_far = np.append(0, cost[rows].cumsum())
        return f"sum of {x}", so_far[np.searchsorted(steps[rows], steps, side="right")]
    if (np.diff(steps[rows]) < 0).any():
        rows = rows[_last_of_each(steps[rows])]
    of_step = np.zeros(len(steps))
    of_step[rows] = np.nan_to_num(table.numbers(x)[rows])
    return f"sum of {x}", of_step.cumsum()


def _warnings(table: Table, y: str, rows: Array) -> list[str]:
    """What makes the pass rate y of these rows doubtful, in sentences."""
    warnings = []
    if _is_of_training(table, y, rows):
        warnings.append(
            f"! {y} is measured in training, and is no validation: on other problems the run may "
            "do otherwise"
        )
    if len(rows) < FEW_POINTS:
        others = [name for name in table.names if name != y and _pass_rate_rank(name, "")]
        counts = {name: len(table.rows(name)) for name in others}
        longest = max(counts, key=counts.get, default=y)
        if counts.get(longest, 0) >= FEW_POINTS:
            more = f"{longest} has {counts[longest]}: --y {longest}"
            warnings.append(f"! {y} has {len(rows)} points, and {more}")
    return warnings


def _is_of_training(table: Table, y: str, rows: Array) -> bool:
    """Whether a pass rate is of training: by its name; or because nothing says that it is of a
    validation, and each training step has it."""
    place, *measures = _pass_rate_rank(y, table.source) or (0, 0)
    if place != 1 or measures == [RANK["passrate"]]:
        return place == 2
    losses = [name for name in table.names if LOSS.fullmatch(name) and not _says(VALIDATION, name)]
    steps = [table.rows(name) for name in losses]
    return any(len(rows) >= 0.9 * len(of) and np.isin(of, rows).mean() > 0.9 for of in steps)


def _refuse_texts(table: Table, name: str, rows: Array) -> None:
    """ValueError, naming the first, if a value in these rows of a column is a text."""
    texts = table.texts.get(name, {})
    for row in rows:
        if row in texts:
            text = texts[row]
            advice = "mend or remove it"
            if text.endswith("%"):
                advice = "remove the signs, and say --percent"
            raise ValueError(
                f"{table.place(row)}: {name} = {text[:40]!r} is not a number: {advice}"
            )


def _means_of_steps(steps: Array, values: Array, rows: Array) -> tuple[Array, Array]:
    """The first of these rows for each step, and the values with the mean of a step there: of those
    that are no NaN."""
    _, first, group = np.unique(steps[rows], return_index=True, return_inverse=True)
    known = ~np.isnan(values[rows])
    sums = np.bincount(group[known], values[rows][known], len(first))
    values[rows[first]] = sums / np.bincount(group[known], minlength=len(first))
    return rows[first], values


def _steps_of_several_sizes(steps: Array) -> list[str]:
    """A warning if some steps have more rows than others. steps: by row."""
    _, sizes = np.unique(steps, return_counts=True)
    if len(set(sizes)) <= 1:
        return []
    return [
        f"! a point is the mean of {min(sizes)} to {max(sizes)} rows: the curve jumps if a seed or"
        " problem is missing at some steps"
    ]


def _num_examples(table: Table, y: str, rows: Array) -> float | None:
    """How many answers a pass rate y is the mean of, on average; None if the log does not say."""
    column = f"num_examples{y.removeprefix('pass_rate')}"  # pass_rate/SOURCE has its own
    if column not in table.names:
        if y.startswith("pass_rate/"):  # only the number of all sources is known
            return None
        column = "num_examples"
    numbers = table.numbers(column)[rows]
    known = numbers[np.isfinite(numbers) & (numbers > 0)]  # -1 often stands for all
    return known.mean() if len(known) else None


def _neighbours_averaged(values: Array) -> Array:
    """At most MOST_POINTS values: the first, which may give R0, and means of neighbours."""
    size = math.ceil((len(values) - 1) / (MOST_POINTS - 1))
    starts = np.append(0, np.arange(1, len(values), size))
    sizes = np.diff(np.append(starts, len(values)))
    return np.add.reduceat(values, starts) / sizes


def _refuse_several_curves(table: Table, step: str, y: str, rows: Array) -> list[str]:
    """ValueError, naming the column that tells the runs apart, if these rows are from several runs.
    Returns the warnings of `_doubt_repeats`."""
    steps = table.numbers(step)
    changes = np.diff(steps[rows])
    goes_back = (changes <= 0).any()
    for column in table.names:
        is_group = GROUPS.fullmatch(column)
        if column in (step, y) or not (is_group or goes_back):
            continue
        groups = table.groups(column, rows.tolist())
        if not 1 < len(groups) <= len(rows) // 2:
            continue
        # In each run alone the steps increase. A column that few rows have tells no runs apart.
        increase = all((np.diff(steps[group]) > 0).all() for group in groups.values())
        if is_group or (increase and sum(map(len, groups.values())) == len(rows)):
            raise ValueError(
                f"several curves under each other, by {column}: {_listed(groups)}; choose one with"
                f" --where {column}={next(iter(groups))}"
            )
    doubts = _doubt_repeats(table, step, y, rows)
    other_values = np.diff(table.numbers(y)[rows]) != 0
    differ = np.flatnonzero((changes == 0) & other_values)
    if len(differ) > max(1, len(rows) // 10):
        row = rows[differ[0] + 1]
        raise ValueError(
            f"{table.place(row)}: {step} = {steps[row]:g} has several values of {y}: choose with"
            " --where COLUMN=VALUE, or average them with --mean"
        )
    return doubts


def _doubt_repeats(table: Table, step: str, y: str, rows: Array) -> list[str]:
    """A warning if so many of these rows come again that they are hardly of one resumed run.
    ValueError if there are columns that could tell the runs apart, which it names."""
    steps = table.numbers(step)
    lost = len(rows) - len(_last_of_each(steps[rows]))
    if lost <= MOST_REPEATED * len(rows):
        return []
    falls = (np.diff(steps[rows]) < 0).sum()
    apart = []
    for column in table.names:
        groups = table.groups(column, rows.tolist())
        if column not in (step, y) and 1 < len(groups) <= falls + 1:
            within = sum((np.diff(steps[group]) < 0).sum() for group in groups.values())
            if within < falls:
                apart.append(f"{column} ({_listed(groups)})")
    if apart:
        raise ValueError(
            f"several curves under each other? {step} begins again, and {lost} of {len(rows)}"
            " points would be left out: choose one with --where COLUMN=VALUE, of"
            f" {'; '.join(apart)}"
        )
    return [
        f"! {step} begins again, and {lost} of {len(rows)} points are left out: is this one "
        "resumed run, or are these several runs?"
    ]


def _last_of_each(steps: Array) -> Array:
    """The indices of the points that count in a resumed run: no later point has the same step or a
    lower one. If the steps go back to a step that is new, all points count, since no resumed run
    does that."""
    _, first = np.unique(steps, return_index=True)
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    if np.isin(back, first).any():
        return np.arange(len(steps))
    lowest_from_here = np.fmin.accumulate(steps[::-1])[::-1]
    lowest_later = np.append(lowest_from_here[1:], np.nan)
    return np.flatnonzero(~(steps >= lowest_later))
