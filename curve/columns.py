"""Choose the columns of compute and pass rate in the table of a log, and make curves of them.

A column is chosen by its name. The lists below say what frameworks call these columns, the best name first. If two
columns are equally likely, none is taken, and the error names both: a wrong curve with plausible numbers is worse than
no curve.
"""

import difflib
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

MOST_POINTS = 2000  # of a curve. More are averaged: a fit takes seconds and memory by the point, and no plot shows more
MOST_TEXTS = 1000  # different texts that a column keeps. A column of more does not tell groups of records apart


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
    """ValueError unless x is compute that increases and y the pass rate there. It names the first point that is wrong.

    place: gives the name of a point, by its number from 0.
    """
    if x.shape != y.shape or x.ndim != 1 or not len(x):
        raise ValueError(f"x and y must be two lists of the same length, got shapes {x.shape} and {y.shape}")
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


# --- what the name of a column says ---------------------------------------------------------------------------------


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
    r"algo(rithm)?|method|recipe|run(_?(id|name))?|exp(eriment)?|seed|trial|(data_?)?set|data_source|task|benchmark"
    r"|env(ironment)?|model|policy|variant|setting|group|metric|tag|key",
    re.I,
)
# The columns with the cost of one step, which --x seconds and --x tokens add up. The first pattern that matches counts.
COSTS = {
    "seconds": (
        r"timing(_s)?/step|perf/time_per_step|time/(step|total)|step_(time|seconds)",  # verl, tinker
        r"timing(_s)?/(?!testing|save|.*valid).*",  # verl until 2024: the parts of a step
    ),
    "tokens": (r"perf/total_num_tokens", r"(.*/)?num_tokens|env/all/total_ac_tokens"),
}


def _plain(name: str) -> str:
    """A name in lower case, its words parted, without the run that W&B writes before it: "a - evalAcc" is eval_acc."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(" - ")[2]).lower()


def _compute_rank(name: str) -> int | None:
    """The place of a name in COMPUTE: 0 is the best. None if it is no name of compute."""
    return next((i for i, pattern in enumerate(COMPUTE) if re.fullmatch(pattern, name, re.I)), None)


def _is_excluded(name: str) -> bool:
    """Whether a name is neither compute nor a pass rate."""
    return _compute_rank(name) is None and not NEVER.isdisjoint(re.split(r"[^a-z0-9]+", _plain(name)))


def _pass_rate_rank(name: str, source: str) -> tuple[int, ...]:
    """The rank of a column as the pass rate. Ranks are compared as tuples, and the lowest is the likeliest.

    The first number is 0 if the column was measured in validations, 2 if in training, and 1 if nothing says which. The
    others are the places of its words in MEASURES; a column without any is no pass rate. source: what the records are.
    """
    name = _plain(name)
    measures = [i for i, measure in enumerate(MEASURES) if measure.search(name)]
    if VALIDATION.search(f"{source} {name}"):
        if not measures and re.fullmatch(r"[^/]+/[^/]+", name):  # eval/aime
            measures = [len(MEASURES)]
        return 0, *measures
    is_training = TRAINING.search(f"{source} {name}") or (measures and measures[0] in REWARDS)
    return 2 if is_training else 1, *measures


# --- tables ---------------------------------------------------------------------------------------------------------


class Column:
    """The values of one column, 14 bytes each: rows[k] is the row of the k-th value.

    numbers[k] is the value if it is a number. A text is kept once, in `texts` with its code, which counts from 1: then
    codes[k] is that code, and numbers[k] is NaN. The code of a number is 0.
    """

    def __init__(self):
        self.rows, self.numbers, self.codes = array("i"), array("d"), array("H")
        self.texts: dict[str, int] = {}
        self.in_percent = False  # whether a value was written with %, and is divided by 100

    def add(self, row: int, value: object) -> None:
        number, code = (value, 0) if type(value) is float else self.parse(str(value).strip())
        self.rows.append(row)
        self.numbers.append(number)
        self.codes.append(code)

    def parse(self, text: str) -> tuple[float, int]:
        """The number and the code of a value."""
        if text in self.texts:
            return np.nan, self.texts[text]
        try:
            return float(text), 0
        except ValueError:
            pass
        if text.lower() in ("na", "n/a", "#n/a", "null", "none", "-"):
            return np.nan, 0
        if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+) ?%", text):
            self.in_percent = True
            return float(text.rstrip(" %")) / 100, 0
        text = text[:80] if len(self.texts) < MOST_TEXTS else "..."
        return np.nan, self.texts.setdefault(text, len(self.texts) + 1)


class Table:
    """The rows of a log, kept by column.

    lines: by row its line in the file, or -3 for the third record of a JSON document. chosen: a mask of the rows that
    are read. source: what these records are, such as "eval". names: the columns that have a value in a chosen row.
    notes: what was left out of the file.
    """

    def __init__(self, file: str, rows: Iterable[tuple[int, dict]], notes: list[str]):
        self.file, self.notes, self.source = file, notes, ""
        self.lines, self.columns = array("q"), defaultdict(Column)
        for line, values in rows:
            for name, value in values.items():
                if value is not None and value != "" and name:
                    self.columns[name].add(len(self.lines), value)
            self.lines.append(line)
        self.chosen, self.names = np.ones(len(self.lines), bool), [*self.columns]

    def choose(self, name: str, value: str) -> None:
        """Leave out all rows without this value in this column."""
        self.chosen = self.chosen & self.equals(name, value)
        self.names = [name for name in self.columns if len(self.rows(name))]

    def place(self, row: int) -> str:
        line = self.lines[row]
        return f"{self.file}, {f'line {line}' if line > 0 else f'record {-line}'}"

    def rows(self, name: str) -> np.ndarray:
        """The chosen rows that have a value in this column, be it NaN."""
        rows = np.asarray(self.columns[name].rows)
        return rows[self.chosen[rows]]

    def numbers(self, name: str) -> np.ndarray:
        """The numbers of a column by row, NaN if there is none."""
        numbers = np.full(len(self.lines), np.nan)
        numbers[np.asarray(self.columns[name].rows)] = self.columns[name].numbers
        return numbers

    def codes(self, name: str) -> np.ndarray:
        """The codes of a column's texts by row, 0 if there is none."""
        codes = np.zeros(len(self.lines), int)
        codes[np.asarray(self.columns[name].rows)] = self.columns[name].codes
        return codes

    def values(self, name: str, rows: np.ndarray) -> list[str]:
        """The different values of a column in these rows as texts, in the order in which they come."""
        texts = [None, *self.columns[name].texts]
        pairs = zip(self.codes(name)[rows].tolist(), self.numbers(name)[rows].tolist())
        values = dict.fromkeys(texts[code] if code else number for code, number in pairs if code or number == number)
        return [value if isinstance(value, str) else str(value).removesuffix(".0") for value in values]

    def equals(self, name: str, value: str) -> np.ndarray:
        """By row whether a column has this value, which is written as in a log."""
        number, code = self.columns[name].parse(value)
        return self.codes(name) == code if code else self.numbers(name) == number


# --- which records --------------------------------------------------------------------------------------------------


@np.errstate(all="ignore")  # NaN is a missing value, and check_curve names the place of an infinity
def read_curves(
    table: Table, name: str, x: str | None, y: str | None, where: str | None, percent: bool
) -> list[Series]:
    """The curves in a table: one, or one for each column that `y` names. The arguments are those of `read_log`."""
    _choose_records(table, where)
    if not table.names:
        raise ValueError(f"{table.file}: no column has a value: expected a table with names, or a JSON object a line")
    columns = _pass_rates(table, y)
    guessed = " and ".join(flag for flag, column in (("--x", x), ("--y", y)) if column is None)
    several = len(columns) > 1 or y == "all"
    return [_series(table, column if several else name, x, column, percent, guessed) for column in columns]


def _choose_records(table: Table, where: str | None) -> None:
    """Choose the rows that `where` names, and of those the validations, if a column tells them from other records."""
    kinds = {}  # by column what the records are
    for condition in where.split(",") if where else ():
        column, _, value = condition.partition("=")
        if not value:
            raise ValueError(f"--where {condition}: expected COLUMN=VALUE, such as type=eval")
        _require_column(table, column, "--where")
        values = table.values(column, table.chosen)
        table.choose(column, value)
        if not table.chosen.any():
            raise ValueError(f"{table.file}: no record has {condition}; {column} can be {_listed(values)}")
        kinds[column] = value
    for column in KINDS_OF_RECORD:
        if column in table.names and column not in kinds:
            values = table.values(column, table.chosen)
            trained = [value for value in values if TRAINING.search(_plain(value))]
            validations = [value for value in values if VALIDATION.search(_plain(value)) and value not in trained]
            if len(validations) > 1:
                choices = " or ".join(f"--where {column}={value}" for value in validations)
                raise ValueError(f"{table.file}: which records are the validations? say {choices}")
            for value in validations:
                table.choose(column, value)
            if validations or trained:
                kinds[column] = " and ".join(validations or trained)
    table.source = " and ".join(kinds.values())


# --- which columns --------------------------------------------------------------------------------------------------


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _require_column(table: Table, name: str, flag: str) -> None:
    """ValueError unless a chosen row has a value in this column."""
    if name not in table.names:
        near = difflib.get_close_matches(name, table.names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{table.file}: no column {name!r} with values{hint}; {flag} can name: {_listed(table.names)}")


def _pass_rates(table: Table, y: str | None) -> list[str]:
    """The columns that `y` names, or else the likeliest pass rate. ValueError if several are equally likely."""
    if y not in (None, "all"):
        names = [y] if y in table.names else y.split(",")
        for name in names:
            _require_column(table, name, "--y")
        return names
    candidates = [name for name in table.names if _compute_rank(name) is None and not _is_excluded(name)]
    numbers = {name: table.numbers(name)[table.rows(name)] for name in candidates}
    ranks = {name: rank for name in candidates if len(rank := _pass_rate_rank(name, table.source)) > 1}
    likely = [name for name in ranks if ranks[name] == min(ranks.values())]
    likely = likely or [name for name in candidates if np.isfinite(numbers[name]).any()]  # a column a run, or unknown
    if not likely:
        names = _listed(table.names)
        raise ValueError(f"{table.file}: no column is named like a pass rate: name it with --y of: {names}")
    if len(likely) == 1 or y == "all":
        return likely
    ranges = []
    for name in likely:
        low, high = np.fmin.reduce(numbers[name]), np.fmax.reduce(numbers[name])
        ranges.append(f"{name} ({low:.3g} to {high:.3g}{'' if 0 <= low and high <= 1 else ': no pass rate'})")
    raise ValueError(f"{table.file}: which column is the pass rate? name it with --y (or all): {_listed(ranges)}")


def _counters(table: Table, y: str, rows: np.ndarray) -> list[str]:
    """The columns of compute, the best name first.

    A column is left out if it has a value in few of these rows, or few different ones, as max_steps has. All come back
    if none would be left.
    """
    names = sorted((name for name in table.names if name != y and _compute_rank(name) is not None), key=_compute_rank)
    known = []
    for name in names:
        values = table.numbers(name)[rows]
        if np.isfinite(values).mean() > 0.9 and len(np.unique(values)) >= min(len(rows), 2 + len(rows) // 10):
            known.append(name)
    return known or names


def _best_compute(table: Table, counters: list[str], rows: np.ndarray) -> str:
    """The best counter that increases over these rows. ValueError if there is no counter, or two are equally likely."""
    if not counters:
        compute, names = "compute (steps, tokens, hours, FLOPs)", _listed(table.names)
        raise ValueError(f"{table.file}: no column is named like {compute}: name it with --x of: {names}")
    values = {name: table.numbers(name)[rows] for name in counters}
    rising = [name for name in counters if (np.diff(values[name][np.isfinite(values[name])]) > 0).all()]
    best, *others = [name for name in rising if _compute_rank(name) == _compute_rank(rising[0])] or counters[:1]
    for name in others:
        same_but_for_the_unit = np.allclose(values[best] * values[name][-1], values[name] * values[best][-1], rtol=1e-3)
        if not same_but_for_the_unit:
            raise ValueError(f"{table.file}: which column is the compute, {best!r} or {name!r}? name it with --x")
    return best


# --- the points of a curve ------------------------------------------------------------------------------------------


def _series(table: Table, name: str, x: str | None, y: str, percent: bool, guessed: str) -> Series:
    """The curve of the pass rate y. x, percent: as in `read_log`. guessed: the flags that were not given, in words."""
    rows, compute, x, left_out = _points(table, x, y)
    pass_rate = table.numbers(y)[rows] / (100 if percent and not table.columns[y].in_percent else 1)
    check_curve(compute, pass_rate, lambda i: table.place(rows[i]))

    note = f"read: x = {x}, y = {y}, {len(rows)} points"
    note += f", from the {table.source} records" if table.source else ""
    note += f"; left out: {', '.join(left_out)}" if left_out else ""
    examples = table.numbers("num_examples")[rows] if "num_examples" in table.names else np.full(len(rows), np.nan)
    num_examples = None if np.isnan(examples).all() else float(np.nanmean(examples))
    if len(rows) > MOST_POINTS:
        compute, pass_rate = thin(compute, pass_rate)
        num_examples = num_examples and num_examples * len(rows) / len(compute)
        note += f"; neighbours averaged into {len(compute)}"
    usable = [other for other in table.names if not table.columns[other].texts and not _is_excluded(other)]
    others = [other for other in usable if other not in (x, y)]
    note += f"; {guessed} can name others: {_listed(others)}" if others and guessed else ""
    notes = [note, *table.notes]
    if _pass_rate_rank(y, table.source)[0] == 2:
        notes.append(f"! {y} is measured in training, and is no validation: on other problems the run may do otherwise")
    return Series(name, compute, pass_rate, x, y, num_examples, tuple(notes))


def _points(table: Table, x: str | None, y: str) -> tuple[np.ndarray, np.ndarray, str, list[str]]:
    """The rows of the curve's points, their compute, the column of the compute, and what was left out, in words."""
    rows = _rows_of_numbers(table, y)
    nan = np.isnan(table.numbers(y)[rows])
    if 2 * nan.sum() > len(rows):
        place = table.place(rows[nan.argmax()])
        raise ValueError(f"{place}: {y} is NaN in {nan.sum()} of {len(rows)} lines: name another column with --y")
    rows = rows[~nan]

    counters = _counters(table, y, rows)
    step = next((name for name in counters if STEP.fullmatch(name)), x if x in table.names else None)
    step = step or _best_compute(table, counters, rows)
    _refuse_several_curves(table, step, y, rows)
    last = _last_of_each(table.numbers(step)[rows])
    repeated, rows = len(rows) - len(last), rows[last]

    x = x or _best_compute(table, counters, rows)
    if x in COSTS and x not in table.names:
        compute = _summed_costs(table, x, step)[rows]
    else:
        _require_column(table, x, "--x")
        _rows_of_numbers(table, x)
        compute = table.numbers(x)[rows]
    missing = np.isnan(compute)
    if missing.all():
        raise ValueError(f"{table.file}: no line has a value of {x!r} and of {y!r}")
    counts = {
        "with NaN": nan.sum(),
        f"whose {step} comes again later, as in a resumed run": repeated,
        f"without {x}": missing.sum(),
    }
    left_out = [f"{count} {reason}" for reason, count in counts.items() if count]
    return rows[~missing], compute[~missing], x, left_out


def _rows_of_numbers(table: Table, name: str) -> np.ndarray:
    """The chosen rows that have a value in this column. ValueError, with the place of the first, if one is a text."""
    rows = table.rows(name)
    texts = rows[table.codes(name)[rows] > 0]
    if len(texts):
        (text,) = table.values(name, texts[:1])
        raise ValueError(f"{table.place(texts[0])}: {name} = {text[:40]!r} is not a number: mend or remove it")
    return rows


def _refuse_several_curves(table: Table, step: str, y: str, rows: np.ndarray) -> None:
    """ValueError if these rows are of several runs. It names the column that tells them apart."""
    steps, pass_rates = table.numbers(step)[rows], table.numbers(y)[rows]
    goes_back = (np.diff(steps) <= 0).any()
    for column in table.names:
        is_group = GROUPS.fullmatch(column)
        if column in (step, y) or not (goes_back or is_group):
            continue
        groups = table.values(column, rows)
        if 1 < len(groups) <= len(rows) // 2:
            runs = (steps[table.equals(column, group)[rows]] for group in groups)
            if is_group or all((np.diff(run) > 0).all() for run in runs):
                curves = f"several curves under each other, by {column}: {_listed(groups)}"
                raise ValueError(f"{table.file}: {curves}; choose one with --where {column}={groups[0]}")
    differ = np.flatnonzero((np.diff(steps) == 0) & (np.diff(pass_rates) != 0))
    if len(differ) > max(1, len(rows) // 10):
        values = f"{step} = {steps[differ[0]]:g} has several values of {y}"
        raise ValueError(f"{table.place(rows[differ[0] + 1])}: {values}: choose with --where COLUMN=VALUE")


def _last_of_each(steps: np.ndarray) -> np.ndarray:
    """The places of the points that count if the run was resumed: after them no step is the same or an earlier one.

    All points count if the steps go back to a step that is new, since no resumed run does that.
    """
    _, first = np.unique(steps, return_index=True)
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    if np.isin(back, first).any():
        return np.arange(len(steps))
    lowest_later = np.fmin.accumulate(steps[::-1])[::-1]
    return np.flatnonzero(~np.append(steps[:-1] >= lowest_later[1:], False))


def _summed_costs(table: Table, unit: str, step: str) -> np.ndarray:
    """By row the seconds or tokens of all steps up to it. A step that a resumed run made again counts once."""
    matches = ([name for name in table.columns if re.fullmatch(pattern, name, re.I)] for pattern in COSTS[unit])
    parts = next(filter(None, matches), None)
    if not parts:
        raise ValueError(f"{table.file}: no column says what a step costs in {unit}: name another with --x")
    costs = np.array([table.numbers(name) for name in parts])
    rows = np.flatnonzero(~np.isnan(costs).all(axis=0))
    rows = rows[_last_of_each(table.numbers(step)[rows])]
    counted = np.zeros(len(table.lines))
    counted[rows] = np.nansum(costs[:, rows], axis=0)
    return np.cumsum(counted)


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_POINTS points: the first, which may give R0, and means of neighbours, equally many in each."""
    neighbours = -(-(len(x) - 1) // (MOST_POINTS - 1))
    starts = np.append(0, np.arange(1, len(x), neighbours))
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
