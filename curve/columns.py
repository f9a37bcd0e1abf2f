"""Choose the columns of compute and pass rate in the table of a log, and make curves of them.

A column is chosen by its name. The lists below say what frameworks call these columns, the best name first. If two
columns are equally likely, none is taken, and the error names both: a wrong curve with plausible numbers is worse than
no curve.
"""

import difflib
import re
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

MOST_POINTS = 2000  # of a curve. More are averaged: each point costs a fit time and memory, and no plot shows so many


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


def check_curve(x: np.ndarray, y: np.ndarray, place: Callable[[int], str] = lambda i: f"point {i + 1}") -> None:
    """ValueError, naming the first wrong point, unless compute x (n,) increases and pass rates y (n,) are in [0, 1]."""
    with np.errstate(invalid="ignore"):
        advice = "if it is in percent, say --percent" if 1.5 < y.max() <= 100 else "name another column with --y"
        rules = (
            (~np.isfinite(x + y), "x = {x:g}, y = {y:g}: not finite; remove the line"),
            (x < 0, "x = {x:g}: compute is never negative"),
            (np.diff(x, prepend=-1) <= 0, "x = {x:g} after {before:g}: x must increase; sort the log by it"),
            ((y < 0) | (y > 1), "y = {y:g} is no pass rate, not in [0, 1]: " + advice),
        )
    for broken, message in rules:
        if broken.any():
            i = int(broken.argmax())
            raise ValueError(f"{place(i)}: {message.format(x=x[i], y=y[i], before=x[i - 1])}")


def _word(words: str) -> re.Pattern:
    return re.compile(rf"(?<![a-z0-9])({words})(?![a-z0-9])")


# Names of compute, the best first. The whole name must match.
COMPUTE = (
    r"(compute_|train_|total_)?(flops|flos)",  # this project, transformers
    r".*(gpu|device|accelerator)[ _-]?hours.*",
    r"compute.*",
    r"((.*/)?(num|total|cumulative|sampled)_(input_)?)?tokens(_seen)?",  # TRL
    r"(wall_?)?(seconds|clock|hours)",
    r"(.*[/_])?(global|train|training|trainer|grpo|ppo|rl|checkpoint)_?steps?",  # OpenRLHF, the user's step in W&B
    r"(.*/)?steps?",  # verl, prime-rl, tinker, TRL, TensorBoard
    r"_step",  # W&B's own, which counts its calls
    r"(.*/)?(optimizer_?steps?|iterations?|updates?|((total|num)_)?timesteps)",  # Stable-Baselines, RLlib
    r"(.*/)?(num_)?episodes?",
    r"relative[ _]time.*|_runtime",  # W&B
    r"(.*/)?epochs?",
    r".*[/_ -]steps?",
    r"x",
)
STEP = re.compile(r"(.*[/_])?steps?|(.*/)?(iterations?|updates?)", re.I)  # a resumed run repeats its values

# Words in the names of pass rates, the best first. All words of a name count: acc/mean@8 comes before reward/mean@8.
MEASURES = [
    _word(r"pass[_ ]?rates?"),  # this project
    _word(r"(mean|avg|average)@\d+|pass[_@ ]?(at_?)?1"),  # verl, prime-rl, OpenRLHF
    _word(r"acc|accuracy|correct|correctness|success|solved?|exact_match"),  # verl, TRL, tinker
    _word(r"scores?"),  # verl until 2024
    _word(r"rewards?"),
    _word(r"y|value"),
    _word(r"(pass|best|maj|majority|cons)[_@]?(at_?)?[\dk]+"),
    _word(r"aux|best"),
]
REWARDS = (3, 4)  # a name whose best word is one of these is from training, unless it says validation
# A column whose name has one of these words is no pass rate. --y can still name it.
NEVER = frozenset(
    "format formatted length lengths len std stdev stderr var sem min max median loss losses lr learning kl entropy "
    "time timing second seconds hours runtime token tokens grad gradient norm clip clipped clipfrac ratio frac "
    "fraction advantage advantages penalty temperature memory gib num number count epoch epochs step steps turn "
    "turns lower upper low high ci err error errors ppl perplexity coef coeff beta size sample samples prompt "
    "prompts".split()
)
VALIDATION = _word(r"val|valid|validation|eval|evaluation|evaluate|test|dev|held_?out")
TRAINING = _word(r"train|training|rollouts?|critic|actor|env")

# These columns say whether a record is from training or from a validation.
KINDS_OF_RECORD = ("kind", "type", "split", "mode", "phase", "stage", "event")
# These columns say to which of several curves a record belongs.
GROUPS = re.compile(
    r"(?i)algo(rithm)?|method|recipe|run(_?(id|name))?|exp(eriment)?|seed|trial|(data_?)?set|data_source|task|benchmark"
    r"|env(ironment)?|model|policy|variant|setting|group|metric|tag|key")  # fmt: skip
# The columns with the cost of one step, which --x seconds and --x tokens add up. The first pattern that matches counts.
COSTS = {
    "seconds": (r"timing(_s)?/step|perf/time_per_step|time/(step|total)|step_(time|seconds)",  # verl, tinker
                r"timing(_s)?/(?!testing|save|.*valid).*"),  # verl until 2024: the parts of a step
    "tokens": (r"perf/total_num_tokens", r"(.*/)?num_tokens|env/all/total_ac_tokens"),
}  # fmt: skip


def _plain(name: str) -> str:
    """A name in lower case with _ between words, without the run that W&B puts before it: "a - evalAcc" is eval_acc."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(" - ")[2]).lower()


def _compute_rank(name: str) -> int | None:
    """The place of a name in COMPUTE: 0 is the best. None if it is no name of compute."""
    return next((i for i, pattern in enumerate(COMPUTE) if re.fullmatch(pattern, name, re.I)), None)


def _pass_rate_rank(name: str, source: str) -> tuple[int, ...]:
    """How likely a column is the pass rate: the lowest tuple is the likeliest, and () is no pass rate.

    source: the kind of the records. The tuple begins with 0 for a validation, 2 for training, and 1 if nothing says
    which. Then come the places of its words in MEASURES. Without such a word only --y can choose the column."""
    plain = _plain(name)
    if _compute_rank(name) is not None or not NEVER.isdisjoint(re.split(r"[^a-z0-9]+", plain)):
        return ()
    measures = [i for i, measure in enumerate(MEASURES) if measure.search(plain)]
    if VALIDATION.search(f"{source} {plain}"):
        if not measures and re.fullmatch(r"[^/]+/[^/]+", plain):  # eval/aime
            measures = [len(MEASURES)]
        return 0, *measures
    is_training = TRAINING.search(f"{source} {plain}") or (measures and measures[0] in REWARDS)
    return 2 if is_training else 1, *measures


class Table:
    """The values of a log by column: the rows that have one, and their numbers. A text is NaN, and stands in `texts`.

    lines: the line of each row in the file; -3 is the third record of a JSON document. chosen: a mask of the rows that
    are read. names: the columns with a value in these rows. source: the kind of these rows, such as "eval".
    """

    def __init__(self, rows: Iterable[tuple[int, dict]], notes: list[str]):
        self.notes, self.source = notes, ""
        self.lines, self.columns = array("q"), defaultdict(lambda: (array("i"), array("d")))
        self.texts: dict[str, dict[int, str]] = defaultdict(dict)  # by column and row
        self.in_percent = set()  # columns with values such as 62%, which are divided by 100
        for line, values in rows:
            for name, value in values.items():
                if value is not None and value != "" and name:
                    number = value if type(value) is float else self._parse(name, str(value).strip()[:80])
                    self.columns[name][0].append(len(self.lines))
                    self.columns[name][1].append(number)
            self.lines.append(line)
        self.chosen, self.names = np.ones(len(self.lines), bool), [*self.columns]

    def _parse(self, name: str, text: str) -> float:
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            if text.lower() not in ("", "na", "n/a", "#n/a", "null", "none", "-"):
                self.texts[name][len(self.lines)] = sys.intern(text)  # one copy of each text
            return np.nan
        if text.endswith("%"):
            self.in_percent.add(name)
            number /= 100
        return number

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
def read_curves(
    table: Table, name: str, x: str | None, y: str | None, where: str | None, percent: bool
) -> list[Series]:
    """The curves in a table: one, or one for each column that `y` names. The arguments are those of `read_log`."""
    kinds = {}  # by column what the records are
    for condition in where.split(",") if where else ():
        column, _, value = condition.partition("=")
        _require_column(table, column, "--where")
        if value not in (groups := table.groups(column, table.rows(column))):
            raise ValueError(f"no record has {condition}: {column} can be {_listed([*groups])}")
        table.choose(groups[value])
        kinds[column] = value
    for column in KINDS_OF_RECORD:
        if column in table.names and column not in kinds:
            groups = table.groups(column, table.rows(column))
            trained = [value for value in groups if TRAINING.search(_plain(value))]
            validations = [value for value in groups if VALIDATION.search(_plain(value)) and value not in trained]
            if len(validations) > 1:
                choices = " or ".join(f"--where {column}={value}" for value in validations)
                raise ValueError(f"which records are the validations? say {choices}")
            for value in validations:
                table.choose(groups[value])
            if validations or trained:
                kinds[column] = " and ".join(validations or trained)
    table.source = " and ".join(kinds.values())

    if not table.names:
        raise ValueError("no column has a value: expected a table with names, or a JSON object a line")
    columns = _pass_rates(table, y)
    several, guessed = len(columns) > 1 or y == "all", x is None or y is None
    return [_series(table, column if several else name, x, column, percent, guessed) for column in columns]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _require_column(table: Table, name: str, flag: str) -> None:
    if name not in table.names:
        near = difflib.get_close_matches(name, table.names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no column {name!r} with values{hint}; {flag} can name: {_listed(table.names)}")


def _pass_rates(table: Table, y: str | None) -> list[str]:
    """The columns that `y` names, or else the likeliest pass rate. ValueError if several are equally likely."""
    if y not in (None, "all"):
        names = [y] if y in table.names else y.split(",")
        for name in names:
            _require_column(table, name, "--y")
        return names
    ranks = {name: rank for name in table.names if (rank := _pass_rate_rank(name, table.source))}
    named = {name: rank for name, rank in ranks.items() if len(rank) > 1}
    numbers = {name: table.numbers(name)[table.rows(name)] for name in ranks}
    likely = [name for name in named if named[name] == min(named.values())]
    likely = likely or [name for name in ranks if np.isfinite(numbers[name]).any()]  # each is a run, or unknown
    if not likely:
        raise ValueError(f"no column is named like a pass rate: name it with --y of: {_listed(table.names)}")
    if len(likely) == 1 or y == "all":
        return likely
    ranges = []
    for name in likely:
        low, high = np.fmin.reduce(numbers[name]), np.fmax.reduce(numbers[name])
        ranges.append(f"{name} ({low:.3g} to {high:.3g}{'' if 0 <= low and high <= 1 else ': no pass rate'})")
    raise ValueError(f"which column is the pass rate? name it with --y (or all): {_listed(ranges)}")


def _counters(table: Table, y: str, rows: np.ndarray) -> list[str]:
    """The columns of compute, the best name first. Columns with few values in these rows, or with few different ones
    (max_steps), are left out, unless all are such."""
    names = sorted((name for name in table.names if name != y and _compute_rank(name) is not None), key=_compute_rank)
    filled = []
    for name in names:
        values = table.numbers(name)[rows]
        if np.isfinite(values).mean() > 0.9 and len(np.unique(values)) >= min(len(rows), 2 + len(rows) // 10):
            filled.append(name)
    return filled or names


def _best_compute(table: Table, counters: list[str], rows: np.ndarray) -> str:
    """The best counter that increases over these rows. ValueError if there is no counter, or two are equally likely."""
    if not counters:
        names = _listed(table.names)
        raise ValueError(f"no column is named like compute (steps, tokens, hours, FLOPs): name it with --x of: {names}")
    values = {name: table.numbers(name)[rows] for name in counters}
    rising = [name for name in counters if (np.diff(values[name][np.isfinite(values[name])]) > 0).all()]
    best, *others = [name for name in rising if _compute_rank(name) == _compute_rank(rising[0])] or counters[:1]
    for name in others:  # two columns in different units give the same curve
        if not np.allclose(values[best] * values[name][-1], values[name] * values[best][-1], rtol=1e-3):
            raise ValueError(f"which column is the compute, {best!r} or {name!r}? name it with --x")
    return best


def _series(table: Table, name: str, x: str | None, y: str, percent: bool, guessed: bool) -> Series:
    """The curve of the pass rate y. x, percent: as in `read_log`. guessed: whether x or y was not given there."""
    for row, text in table.texts.get(y, {}).items():
        if table.chosen[row]:
            raise ValueError(f"{table.place(row)}: {y} = {text[:40]!r} is not a number: mend or remove it")
    rows, pass_rate = table.rows(y), table.numbers(y)
    nan = np.isnan(pass_rate[rows])
    rows = rows[~nan]

    counters = _counters(table, y, rows)
    step = next((name for name in counters if STEP.fullmatch(name)), x if x in table.names else None)
    step = step or _best_compute(table, counters, rows)
    _refuse_several_curves(table, step, y, rows)
    last = _last_of_each(table.numbers(step)[rows])
    repeated, rows = len(rows) - len(last), rows[last]

    x = x or _best_compute(table, counters, rows)
    if x in COSTS and x not in table.names:
        compute = _summed_costs(table, x, step)
    else:
        _require_column(table, x, "--x")
        compute = table.numbers(x)
    missing = np.isnan(compute[rows])
    if missing.all():
        raise ValueError(f"no line has a value of {x!r} and of {y!r}")
    rows = rows[~missing]
    compute, pass_rate = compute[rows], pass_rate[rows] / (100 if percent and y not in table.in_percent else 1)
    check_curve(compute, pass_rate, lambda i: table.place(rows[i]))

    note = f"read: x = {x}, y = {y}, {len(rows)} points"
    note += f", from the {table.source} records" if table.source else ""
    repeats = f"whose {step} comes again later, as in a resumed run"
    counts = {"with NaN": nan.sum(), repeats: repeated, f"without {x}": missing.sum()}
    left_out = [f"{count} {reason}" for reason, count in counts.items() if count]
    note += f"; left out: {', '.join(left_out)}" if left_out else ""
    examples = table.numbers("num_examples")[rows]
    examples = examples[np.isfinite(examples)]
    num_examples = float(examples.mean()) if len(examples) else None
    if len(rows) > MOST_POINTS:  # the first may give R0; the others become means of neighbours
        starts = np.append(0, np.arange(1, len(rows), -(-(len(rows) - 1) // (MOST_POINTS - 1))))
        sizes = np.diff(np.append(starts, len(rows)))
        compute, pass_rate = (np.add.reduceat(values, starts) / sizes for values in (compute, pass_rate))
        num_examples = num_examples and num_examples * len(rows) / len(compute)
        note += f"; neighbours averaged into {len(compute)}"
    usable = [column for column in table.names if _compute_rank(column) is not None or _pass_rate_rank(column, "")]
    others = [column for column in usable if column not in (x, y) and column not in table.texts]
    note += f"; --x and --y can name others: {_listed(others)}" if others and guessed else ""
    notes = [note, *table.notes]
    if _pass_rate_rank(y, table.source)[:1] == (2,):
        notes.append(f"! {y} is measured in training, and is no validation: on other problems the run may do otherwise")
    return Series(name, compute, pass_rate, x, y, num_examples, tuple(notes))


def _refuse_several_curves(table: Table, step: str, y: str, rows: np.ndarray) -> None:
    """ValueError, naming the column that tells the runs apart, if these rows are from several runs."""
    steps, pass_rates = table.numbers(step), table.numbers(y)[rows]
    changes = np.diff(steps[rows])
    for column in table.names:
        is_group = GROUPS.fullmatch(column)
        if column not in (step, y) and (is_group or (changes <= 0).any()):
            groups = table.groups(column, rows.tolist())
            runs = (steps[group] for group in groups.values())
            if 1 < len(groups) <= len(rows) // 2 and (is_group or all((np.diff(run) > 0).all() for run in runs)):
                curves = f"several curves under each other, by {column}: {_listed([*groups])}"
                raise ValueError(f"{curves}; choose one with --where {column}={next(iter(groups))}")
    differ = np.flatnonzero((changes == 0) & (np.diff(pass_rates) != 0))
    if len(differ) > max(1, len(rows) // 10):
        row = rows[differ[0] + 1]
        values = f"{step} = {steps[row]:g} has several values of {y}"
        raise ValueError(f"{table.place(row)}: {values}: choose with --where COLUMN=VALUE")


def _last_of_each(steps: np.ndarray) -> np.ndarray:
    """The indices of the points that count in a resumed run: no later point has the same step or a lower one. If the
    steps go back to a step that is new, all points count, since no resumed run does that."""
    _, first = np.unique(steps, return_index=True)
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    if np.isin(back, first).any():
        return np.arange(len(steps))
    lowest_later = np.fmin.accumulate(steps[::-1])[::-1]
    return np.flatnonzero(~np.append(steps[:-1] >= lowest_later[1:], False))


def _summed_costs(table: Table, unit: str, step: str) -> np.ndarray:
    """The seconds or tokens of all steps up to each row. A step that a resumed run made again counts once."""
    matches = ([name for name in table.columns if re.fullmatch(pattern, name, re.I)] for pattern in COSTS[unit])
    parts = next(filter(None, matches), None)
    if not parts:
        raise ValueError(f"no column says what a step costs in {unit}: name another with --x")
    costs = np.array([table.numbers(name) for name in parts])
    rows = np.flatnonzero(~np.isnan(costs).all(axis=0))
    rows = rows[_last_of_each(table.numbers(step)[rows])]
    counted = np.zeros(len(table.lines))
    counted[rows] = np.nansum(costs[:, rows], axis=0)
    return np.cumsum(counted)
