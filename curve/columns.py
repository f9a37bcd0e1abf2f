"""Choose the columns of compute and pass rate in the table of a log, and make curves of them.

A column is chosen by its name. The lists below say what frameworks call these columns, the best
name first. If no name is known, or two pass rates are equally likely, none is taken, and the error
names them: a wrong curve with plausible numbers is worse than no curve.
"""

import difflib
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from curve.flags import option

# of a curve. More are averaged: each point costs a fit time and memory, and no plot shows so many
MOST_POINTS = 2000


@dataclass(frozen=True)
class Series:
    """The curve of one run: its pass rate y (n,) in [0, 1] at compute x (n,), which increases."""

    name: str
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    x_name: str = "x"  # the columns that they come from
    y_name: str = "y"
    num_examples: float | None = None  # answers in a validation, on average
    notes: tuple[str, ...] = ()  # how the log was read; a warning begins with !


@dataclass(frozen=True)
class Reading:
    """Which records and columns of a log are read."""

    x: str | None = option(None, "the column of compute; by default guessed, and printed")
    y: str | None = option(
        None,
        "the column of the pass rate, or several with commas, or all; by default guessed, and printed",
    )
    where: str | None = option(None, "only the records with COLUMN=VALUE; several with commas")
    percent: bool = option(False, "the pass rate is in percent")
    mean: bool = option(
        False, "average the rows of one step, such as several problems or seeds under each other"
    )


def check_curve(
    x: np.ndarray,
    y: np.ndarray,
    place: Callable[[int], str] = lambda i: f"point {i + 1}",
    names: tuple = ("x", "y"),
) -> None:
    """ValueError, naming the first wrong point and its column, unless compute x (n,) increases and
    pass rates y (n,) are in [0, 1]."""
    x_name, y_name = names
    with np.errstate(invalid="ignore"):
        advice = (
            "if it is in percent, say --percent"
            if 20 < y.max() <= 100
            else "name another column with --y"
        )
        rules = (
            (
                ~np.isfinite(x + y),
                "{x_name} = {x:g}, {y_name} = {y:g}: not finite; remove the line",
            ),
            (x < 0, "{x_name} = {x:g}: compute is never negative"),
            (
                np.diff(x, prepend=-1) <= 0,
                "{x_name} = {x:g} after {before:g}: it must increase; sort the log by it",
            ),
            ((y < 0) | (y > 1), "{y_name} = {y:g} is no pass rate, not in [0, 1]: " + advice),
        )
    for broken, message in rules:
        if broken.any():
            i = int(broken.argmax())
            values = {"x": x[i], "y": y[i], "before": x[i - 1], "x_name": x_name, "y_name": y_name}
            raise ValueError(f"{place(i)}: {message.format(**values)}")


# What compute is called, the best first. Only the last part of a path counts.
COMPUTE = """
    compute_flops train_flops total_flops flops compute_flos total_flos flos
    compute_device_hours device_hours gpu_hours accelerator_hours
    compute_tokens compute
    num_tokens total_tokens cumulative_tokens sampled_tokens num_input_tokens num_input_tokens_seen tokens_seen tokens
    seconds wall_seconds wall_clock wall_time_seconds clock hours time_total_s
    global_step train_step training_step trainer_step grpo_step ppo_step rl_step checkpoint_step step _step
    timesteps_total total_timesteps num_timesteps timestep env_step frame
    optimizer_step training_iteration iteration update epoch episode num_episodes
    relative_time relative_time_process relative_time_wall _runtime x
""".split()
STEP = re.compile(
    r"(.*[/_])?steps?|(.*/)?(iterations?|updates?)", re.I
)  # a resumed run repeats its values

# Words in the names of pass rates, the best first. All words of a name count: acc/mean@8 comes
# before reward/mean@8.
MEASURES = tuple(line.split() for line in """
    passrate
    meanofn passone
    acc accuracy correct correctness success solve solved match
    aime aime24 aime25 aime2024 aime2025 amc gpqa gsm8k humaneval livecodebench math math500 mbpp minerva mmlu olympiad
    score scores
    reward rewards
""".strip().splitlines())  # fmt: skip
REWARDS = (4, 5)  # a name with one of these is from training, unless it says validation
RANK = {word: rank for rank, words in enumerate(MEASURES) for word in words}
# What these words add to a measure does not change what it is. A word that is not known makes
# another quantity of it.
ADDED = set("mean avg average total rate overall all default final answer sampled greedy is func fn function episode "
            "default core agent of per exact out".split())  # fmt: skip
VALIDATION = set("val valid validation eval evaluation evaluate test dev held heldout".split())
TRAINING = set("train training rollout rollouts critic actor env".split())
# A part of a path with one of these is no pass rate, whatever stands before it.
NEVER = set("std stdev stderr var sem min max median count format length len loss kl entropy time "
            "best worst maj majority cons aux".split())  # fmt: skip
SPELLINGS = (  # of words that hold a number or a space
    (r"pass[_ ]?rates?", "passrate"),
    (r"(mean|avg|average)@\d+", "meanofn"),
    (r"pass[_@ ]?(at_?)?1(?!\d)", "passone"),
)

# These columns say whether a record is from training or from a validation.
KINDS_OF_RECORD = ("kind", "type", "split", "mode", "phase", "stage", "event")
# These columns say to which of several curves a record belongs.
GROUPS = re.compile(
    r"(?i)algo(rithm)?|method|recipe|run(_?(id|name))?|exp(eriment)?|seed|trial|(data_?)?set|data_source|task|benchmark"
    r"|env(ironment)?|model|policy|variant|setting|group|metric|tag|key")  # fmt: skip


def _parts(name: str) -> list[list[str]]:
    """The words of each part of a path, in lower case, without the run that W&B puts before it: "a
    - evalAcc/mean" is [[eval, acc], [mean]]."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(" - ")[2]).lower()
    for spelling, word in SPELLINGS:
        plain = re.sub(rf"(?<![a-z0-9]){spelling}(?![a-z0-9])", word, plain)
    return [re.findall("[a-z0-9]+", part) for part in plain.split("/")]


def _says(words: set[str], name: str) -> bool:
    """Whether one of these words is in a name."""
    return any(word in words for part in _parts(name) for word in part)


def _compute_rank(name: str) -> int | None:
    """The place of a name in COMPUTE: 0 is the best. None if it is no name of compute."""
    last = re.sub("[^a-z0-9]+", "_", name.rpartition("/")[2].lower()).rstrip("_")
    return next(
        (rank for rank, known in enumerate(COMPUTE) if known in (last, last.removesuffix("s"))),
        None,
    )


def _pass_rate_rank(name: str, source: str) -> tuple[int, ...]:
    """How likely a column is the pass rate: the lowest tuple is the likeliest, and () is no name of
    a pass rate.

    source: the kind of the records. The tuple begins with 0 for a validation, 2 for training, and 1
    if nothing says which. Then come the places of its words in MEASURES. The part of the name that
    holds them must have no unknown word (failure_rate, reward_hacking_rate), and so must the parts
    after a reward, which say what is rewarded."""
    parts = _parts(name)
    ranks = {len(MEASURES)} if parts in ([["y"]], [["value"]]) else set()  # nothing but the value
    known = RANK.keys() | ADDED | VALIDATION | TRAINING
    for part in parts:
        if known.issuperset(part):
            ranks |= {RANK[word] for word in part if word in RANK}
        elif RANK["reward"] in ranks or not NEVER.isdisjoint(part):
            return ()
    trained = _says(TRAINING, f"{source}/{name}") or not ranks.isdisjoint(REWARDS)
    return (
        (0 if _says(VALIDATION, f"{source}/{name}") else 2 if trained else 1, *sorted(ranks))
        if ranks
        else ()
    )


class Table:
    """The values of a log by column: the rows that have one, and their numbers. A text is NaN, and
    stands in `texts`.

    lines: the line of each row in the file; -3 is the third record of a JSON document. chosen: a
    mask of the rows that are read. names: the columns with a value in these rows. source: the kind
    of these rows, such as "eval".
    """

    def __init__(self, rows: Iterable[tuple[int, dict]], notes: list[str]):
        self.notes, self.source = notes, ""
        self.lines, self.columns = array("q"), defaultdict(lambda: (array("i"), array("d")))
        self.texts: dict[str, dict[int, str]] = defaultdict(dict)  # by column and row
        for line, values in rows:
            for name, value in values.items():
                if value is not None and value != "" and name:
                    number = (
                        value
                        if type(value) is float
                        else self._parse(name, str(value).strip()[:80])
                    )
                    self.columns[name][0].append(len(self.lines))
                    self.columns[name][1].append(number)
            self.lines.append(line)
        self.chosen, self.names = np.ones(len(self.lines), bool), [*self.columns]

    def _parse(self, name: str, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            if text.lower() not in ("", "na", "n/a", "#n/a", "null", "none", "-"):
                self.texts[name][len(self.lines)] = sys.intern(text)  # one copy of each text
            return np.nan

    def place(self, row: int) -> str:
        return f"line {self.lines[row]}" if self.lines[row] > 0 else f"record {-self.lines[row]}"

    def rows(self, name: str) -> np.ndarray:
        """The chosen rows that have a value in this column. The value may be NaN."""
        rows = np.asarray(self.columns[name][0])
        return rows[self.chosen[rows]]

    def numbers(self, name: str) -> np.ndarray:
        """The numbers of a column by row, NaN if there is none."""
        numbers = np.full(len(self.lines), np.nan)
        numbers[np.asarray(self.columns[name][0])] = self.columns[name][1]
        return numbers

    def groups(self, name: str, rows: Iterable[int]) -> dict[str, list[int]]:
        """These rows by their value in a column, as a text. Rows without a value are left out."""
        groups, numbers, texts = defaultdict(list), self.numbers(name), self.texts.get(name, {})
        for row in rows:
            if row in texts or numbers[row] == numbers[row]:  # not NaN
                groups[texts.get(row) or str(numbers[row]).removesuffix(".0")].append(row)
        return groups

    def choose(self, rows: list[int]) -> None:
        """Choose these rows alone."""
        self.chosen = np.zeros(len(self.lines), bool)
        self.chosen[rows] = True
        self.names = [name for name in self.columns if len(self.rows(name))]


@np.errstate(all="ignore")  # NaN is a missing value, and check_curve names the place of an infinity
def read_curves(table: Table, name: str, reading: Reading) -> list[Series]:
    """The curves in a table: one, or one for each column that `reading.y` names."""
    kinds = {}  # by column what the records are
    for condition in reading.where.split(",") if reading.where else ():
        column, _, value = condition.partition("=")
        _require_column(table, column, "--where")
        if value not in (groups := table.groups(column, table.rows(column))):
            raise ValueError(f"no record has {condition}: {column} can be {_listed([*groups])}")
        table.choose(groups[value])
        kinds[column] = value
    for column in KINDS_OF_RECORD:
        if column in table.names and column not in kinds:
            groups = table.groups(column, table.rows(column))
            trained = [value for value in groups if _says(TRAINING, value)]
            validations = [
                value for value in groups if _says(VALIDATION, value) and value not in trained
            ]
            if len(validations) > 1:
                choices = " or ".join(f"--where {column}={value}" for value in validations)
                raise ValueError(f"which records are the validations? say {choices}")
            for value in validations:
                table.choose(groups[value])
            if validations or trained:
                kinds[column] = " and ".join(validations or trained)
    table.source = " and ".join(kinds.values())

    if not table.names:
        raise ValueError(
            "no column has a value: expected a table with names, or a JSON object a line"
        )
    columns = _pass_rates(table, reading.y)
    several = len(columns) > 1 or reading.y == "all"
    return [_series(table, column if several else name, column, reading) for column in columns]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _require_column(table: Table, name: str, flag: str) -> None:
    if name not in table.names:
        near = difflib.get_close_matches(name, table.names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(
            f"no column {name!r} with values{hint}; {flag} can name: {_listed(table.names)}"
        )


def _pass_rates(table: Table, y: str | None) -> list[str]:
    """The columns that `y` names, or else the likeliest pass rate. ValueError if several are
    equally likely."""
    if y not in (None, "all"):
        names = [y] if y in table.names else y.split(",")
        for name in names:
            _require_column(table, name, "--y")
        return names
    numbers = {name: table.numbers(name)[table.chosen] for name in table.names}
    numbers = {
        name: values for name, values in numbers.items() if np.isfinite(values).any()
    }  # texts are no candidates
    ranks = {name: rank for name in numbers if (rank := _pass_rate_rank(name, table.source))}
    likely = [name for name in ranks if ranks[name] == min(ranks.values())]
    alike = lambda one, other: np.array_equal(numbers[one], numbers[other], equal_nan=True)
    likely = [
        name for i, name in enumerate(likely) if not any(alike(name, other) for other in likely[:i])
    ]
    if (
        "pass_rate" in likely and y != "all"
    ):  # of all sources in a log of ours; pass_rate/SOURCE is of one
        likely = ["pass_rate"]
    if len(likely) == 1:
        return likely
    question = (
        "which column is the pass rate?" if likely else "no column is named like a pass rate:"
    )
    likely = likely or [name for name in numbers if _compute_rank(name) is None]
    if y == "all" and likely:
        return likely
    ranges = [
        f"{name} ({np.fmin.reduce(numbers[name]):.3g} to {np.fmax.reduce(numbers[name]):.3g})"
        for name in likely
    ]
    raise ValueError(f"{question} name it with --y (or all): {_listed(ranges)}")


def _counters(table: Table, y: str, rows: np.ndarray) -> list[str]:
    """The columns of compute, the best name first: those with values in nearly all of these rows,
    if there are any."""
    known = [name for name in table.names if name != y and _compute_rank(name) is not None]
    filled = [name for name in known if np.isfinite(table.numbers(name)[rows]).mean() > 0.9]
    return sorted(filled or known, key=_compute_rank)


def _best_compute(table: Table, counters: list[str], rows: np.ndarray) -> str:
    """The first counter that increases over these rows. ValueError if there is no counter."""
    if not counters:
        names = _listed(table.names)
        raise ValueError(
            f"no column is named like compute (steps, tokens, hours, FLOPs): name it with --x of: {names}"
        )
    values = {name: table.numbers(name)[rows] for name in counters}
    rising = (
        name for name in counters if (np.diff(values[name][np.isfinite(values[name])]) > 0).all()
    )
    return next(rising, counters[0])


def _series(table: Table, name: str, y: str, reading: Reading) -> Series:
    """The curve of the pass rate y."""
    for row, text in table.texts.get(y, {}).items():
        if table.chosen[row]:
            raise ValueError(
                f"{table.place(row)}: {y} = {text[:40]!r} is not a number: mend or remove it"
            )
    rows, pass_rate = table.rows(y), table.numbers(y)
    nan = np.isnan(pass_rate[rows])
    rows = rows[~nan]

    counters, x = _counters(table, y, rows), reading.x
    step = next(
        (name for name in counters if STEP.fullmatch(name)), x if x in table.names else None
    )
    step = step or _best_compute(table, counters, rows)
    repeated, averaged = 0, 0
    if reading.mean:
        _, first, group = np.unique(
            table.numbers(step)[rows], return_index=True, return_inverse=True
        )
        pass_rate[rows[first]] = np.bincount(group, pass_rate[rows]) / np.bincount(group)
        averaged, rows = len(rows), rows[first]
    else:
        _refuse_several_curves(table, step, y, rows)
        last = _last_of_each(table.numbers(step)[rows])
        repeated, rows = len(rows) - len(last), rows[last]

    x = x or _best_compute(table, counters, rows)
    _require_column(table, x, "--x")
    compute = table.numbers(x)
    missing = np.isnan(compute[rows])
    if missing.all():
        raise ValueError(f"no line has a value of {x!r} and of {y!r}")
    rows = rows[~missing]
    compute, pass_rate = compute[rows], pass_rate[rows] / (100 if reading.percent else 1)
    check_curve(compute, pass_rate, lambda i: table.place(rows[i]), (x, y))

    note = f"read: x = {x}, y = {y}, {len(rows)} points"
    note += f", from the {table.source} records" if table.source else ""
    note += f", each the mean of all with its {step} ({averaged} in all)" if averaged else ""
    repeats = f"whose {step} comes again later, as in a resumed run"
    counts = {"with NaN": nan.sum(), repeats: repeated, f"without {x}": missing.sum()}
    left_out = [f"{count} {reason}" for reason, count in counts.items() if count]
    note += f"; left out: {', '.join(left_out)}" if left_out else ""
    of_source = f"num_examples{y.removeprefix('pass_rate')}"
    examples = table.numbers(of_source if of_source in table.names else "num_examples")[rows]
    examples = examples[np.isfinite(examples)]
    num_examples = float(examples.mean()) * max(averaged / len(rows), 1) if len(examples) else None
    if len(rows) > MOST_POINTS:  # the first may give R0; the others become means of neighbours
        starts = np.append(0, np.arange(1, len(rows), -(-(len(rows) - 1) // (MOST_POINTS - 1))))
        sizes = np.diff(np.append(starts, len(rows)))
        compute, pass_rate = (
            np.add.reduceat(values, starts) / sizes for values in (compute, pass_rate)
        )
        num_examples = num_examples and num_examples * len(rows) / len(compute)
        note += f"; neighbours averaged into {len(compute)}"
    notes = [note, *table.notes]
    if _pass_rate_rank(y, table.source)[:1] == (2,):
        notes.append(
            f"! {y} is measured in training, and is no validation: on other problems the run may do otherwise"
        )
    return Series(name, compute, pass_rate, x, y, num_examples, tuple(notes))


def _refuse_several_curves(table: Table, step: str, y: str, rows: np.ndarray) -> None:
    """ValueError, naming the column that tells the runs apart, if these rows are from several
    runs."""
    steps, pass_rates = table.numbers(step), table.numbers(y)[rows]
    changes = np.diff(steps[rows])
    for column in table.names:
        is_group = GROUPS.fullmatch(column)
        if column not in (step, y) and (is_group or (changes <= 0).any()):
            groups = table.groups(column, rows.tolist())
            runs = (steps[group] for group in groups.values())
            if 1 < len(groups) <= len(rows) // 2 and (
                is_group or all((np.diff(run) > 0).all() for run in runs)
            ):
                curves = f"several curves under each other, by {column}: {_listed([*groups])}"
                raise ValueError(f"{curves}; choose one with --where {column}={next(iter(groups))}")
    differ = np.flatnonzero((changes == 0) & (np.diff(pass_rates) != 0))
    if len(differ) > max(1, len(rows) // 10):
        row = rows[differ[0] + 1]
        values = f"{step} = {steps[row]:g} has several values of {y}"
        raise ValueError(
            f"{table.place(row)}: {values}: choose with --where COLUMN=VALUE, or average them with --mean"
        )


def _last_of_each(steps: np.ndarray) -> np.ndarray:
    """The indices of the points that count in a resumed run: no later point has the same step or a
    lower one. If the steps go back to a step that is new, all points count, since no resumed run
    does that."""
    _, first = np.unique(steps, return_index=True)
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    if np.isin(back, first).any():
        return np.arange(len(steps))
    lowest_later = np.fmin.accumulate(steps[::-1])[::-1]
    return np.flatnonzero(~np.append(steps[:-1] >= lowest_later[1:], False))
