"""Choose the columns of compute and pass rate in a table, and make curves of them.

Columns are chosen by their names, in the order of the rules below. What the rules leave open is never guessed: the
error names the columns that are equally likely, since a wrong curve with plausible numbers is worse than none.
"""

import difflib
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

MOST_TEXTS = 1000  # that a column tells apart; more are no groups of records
TEXT = -1e300  # no number of a log is below it; a number from here down stands for a text
AT_MOST = 2000  # points of a curve; more are averaged, since a fit costs seconds and a plot shows no more

# --- what a column is, by its name ----------------------------------------------------------------------------------

# Compute, best first; a name is matched in full.
COMPUTE = (
    r"(compute_|train_|total_)?(flops|flos)",
    r".*(gpu|device|accelerator)[ _-]?hours.*",
    r"compute.*",
    r"((.*/)?(num|total|cumulative|sampled)_(input_)?)?tokens(_seen)?",
    r"(wall_?)?(seconds|clock|hours)",
    r"(.*[/_])?(global|train|training|trainer|grpo|ppo|rl|checkpoint)_?steps?",
    r"(.*/)?steps?",
    r"_step",  # W&B counts its own calls
    r"(.*/)?(optimizer_?steps?|iterations?|updates?|((total|num)_)?timesteps)",
    r"(.*/)?(num_)?episodes?",
    r"relative[ _]time.*|_runtime",
    r"(.*/)?epochs?",
    r".*[/_ -]steps?",
    r"x",
)
STEP = re.compile(r"(.*[/_])?steps?|(.*/)?(iterations?|updates?)", re.I)  # what a resumed run repeats
# A column with one of these words is no pass rate; --y can still name it.
NEVER = frozenset(
    "format formatted length lengths len std stdev stderr var sem min max median loss losses lr learning kl entropy "
    "time timing second seconds hours runtime token tokens grad gradient norm clip clipped clipfrac ratio frac "
    "fraction advantage advantages penalty temperature memory gib num number count epoch epochs step steps turn "
    "turns lower upper low high ci err error errors ppl perplexity coef coeff beta size sample samples prompt "
    "prompts".split()
)
# What a pass rate is called, best first. A name ranks by all that it holds: acc/mean@8 comes before reward/mean@8.
_PASS_RATE = (
    r"pass[_ ]?rates?",
    r"(mean|avg|average)@\d+|pass[_@ ]?(at_?)?1",
    r"acc|accuracy|correct|correctness|success|solved?|exact_match",
    r"scores?",
    r"rewards?",
    r"y|value",
    r"(pass|best|maj|majority|cons)[_@]?(at_?)?[\dk]+",
    r"aux|best",
)
MEASURES = [re.compile(rf"(?<![a-z0-9])({words})(?![a-z0-9])") for words in _PASS_RATE]
ONLY_REWARDS = ([3], [4])  # scores and rewards: of training, unless the name or the record says validation
VALIDATION = re.compile(r"(?<![a-z0-9])(val|valid|validation|eval|evaluation|evaluate|test|dev|held_?out)(?![a-z0-9])")
TRAINING = re.compile(r"(?<![a-z0-9])(train|training|rollouts?|critic|actor|env)(?![a-z0-9])")
KINDS = ("kind", "type", "split", "mode", "phase", "stage", "event")  # columns that say what a record is
GROUPS = re.compile(
    r"algo(rithm)?|method|recipe|run(_?(id|name))?|exp(eriment)?|seed|trial|(data_?)?set|data_source|task|benchmark"
    r"|env(ironment)?|model|policy|variant|setting|group|metric|tag|key",
    re.I,
)  # columns that say which of several curves a row belongs to
# What one step has cost, by what --x calls its sum: the first of these that there is; several columns are added up.
COSTS = {
    "seconds": (
        r"timing(_s)?/step|perf/time_per_step|time/(step|total)|step_(time|seconds)",
        r"timing(_s)?/(?!testing|save|.*valid).*",
    ),
    "tokens": (r"perf/total_num_tokens", r"(.*/)?num_tokens|env/all/total_ac_tokens"),
}


def _plain(column: str) -> str:
    """A name in lower case, its words parted, without the run that W&B writes before it: "a - evalAcc" is eval_acc."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column.rpartition(" - ")[2]).lower()


def _is_neither(column: str) -> bool:
    """Whether a column is no compute and certainly no pass rate."""
    return _compute_rank(column) is None and not NEVER.isdisjoint(re.split(r"[^a-z0-9]+", _plain(column)))


def _compute_rank(column: str) -> int | None:
    """The place of a column among those of compute, the best is 0; None for any other."""
    return next((i for i, pattern in enumerate(COMPUTE) if re.fullmatch(pattern, column, re.I)), None)


def _pass_rate_rank(column: str, source: str) -> tuple[int, ...]:
    """The place of a column of the `source` records among those of the pass rate; the least is the best. First where it
    was measured (0 in validation, 1 not said, 2 in training), then what it measures; that is missing for no pass rate.
    """
    name = _plain(column)
    said = f"{source} {name}"
    measures = [i for i, pattern in enumerate(MEASURES) if pattern.search(name)]
    trained = TRAINING.search(said) or measures[:1] in ONLY_REWARDS
    place = 0 if VALIDATION.search(said) else 2 if trained else 1
    if place == 0 and not measures and re.fullmatch(r"[^/]+/[^/]+", name):  # eval/aime
        measures = [len(MEASURES)]
    return place, *measures


# --- tables ---------------------------------------------------------------------------------------------------------


class Column:
    """The values of one column, few bytes each. A text is kept once; a number below TEXT stands for it."""

    def __init__(self):
        self.rows, self.values = array("q"), array("d")
        self.texts: dict[str, float] = {}
        self.in_percent = False  # some values end with %

    def add(self, row: int, value) -> None:
        self.rows.append(row)
        self.values.append(value if type(value) is float else self._number(str(value).strip()))

    def _number(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            if text.lower() in ("na", "n/a", "#n/a", "null", "none", "-"):
                return np.nan
            if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+) ?%", text):
                self.in_percent = True
                return float(text.rstrip(" %")) / 100
            text = text[:80] if len(self.texts) < MOST_TEXTS else "..."
            return self.texts.setdefault(text, TEXT * (1 + len(self.texts) / MOST_TEXTS))


class Table:
    """The rows of a log by column, and for each row its line in the file.

    chosen: which rows are read (a mask). source: what these records are, in words. names: the columns that have values
    in them.
    """

    def __init__(self, file: str, rows: Iterable[tuple[int, dict]], notes: list[str]):
        self.file, self.notes, self.source = file, notes, ""
        self.lines, self.columns = array("q"), {}
        for line, values in rows:
            for name, value in values.items():
                if value is not None and value != "" and name:
                    if (column := self.columns.get(name)) is None:
                        column = self.columns[name] = Column()
                    column.add(len(self.lines), value)
            self.lines.append(line)
        self.choose(np.ones(len(self.lines), bool))

    def choose(self, rows: np.ndarray) -> None:
        self.chosen = rows
        self.names = [name for name in self.columns if self.has(name)[rows].any()]

    def place(self, row: int) -> str:
        line = self.lines[row]
        return f"{self.file}, {f'line {line}' if line > 0 else f'record {-line}'}"

    def has(self, name: str) -> np.ndarray:
        """Where a column has a value, be it NaN."""
        present = np.zeros(len(self.lines), bool)
        present[np.asarray(self.columns[name].rows, int)] = True
        return present

    def labels(self, name: str) -> np.ndarray:
        """The values of a column by row, NaN where there is none; numbers below TEXT stand for texts."""
        labels = np.full(len(self.lines), np.nan)
        labels[np.asarray(self.columns[name].rows, int)] = self.columns[name].values
        return labels

    def numbers(self, name: str) -> np.ndarray:
        """The numbers of a column by row, NaN where there is none."""
        labels = self.labels(name)
        return np.where(labels <= TEXT, np.nan, labels)

    def values(self, name: str, rows: np.ndarray) -> dict[str, float]:
        """The different values of a column in these rows as texts, each with its label."""
        texts = {label: text for text, label in self.columns[name].texts.items()}
        labels = dict.fromkeys(self.labels(name)[rows].tolist())
        return {texts.get(label, f"{label:.10g}"): label for label in labels if label == label}


# --- curves ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """The curve of one run: its pass rate y (n,) in [0, 1] at compute x (n,), which increases."""

    name: str
    x: np.ndarray = field(repr=False)
    y: np.ndarray = field(repr=False)
    x_name: str = "x"  # the columns that they come from
    y_name: str = "y"
    num_examples: float | None = None  # mean number of answers in a validation
    notes: tuple[str, ...] = ()  # how it was read


def check_curve(x: np.ndarray, y: np.ndarray, places=None) -> None:
    """Raise ValueError, naming the place of a point, unless x is compute that increases and y the pass rate there.

    places: function from the number of a point, from 0, to its place.
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
    for bad, said in rules:
        if bad.any():
            i = int(bad.argmax())
            place = places(i) if places else f"point {i + 1}"
            raise ValueError(f"{place}: {said.format(x=x[i], y=y[i], before=x[i - 1])}")


@np.errstate(all="ignore")  # NaN is a value that is missing, and check_curve names the place of an infinity
def read_curves(table: Table, name: str, x: str | None, y: str | None, where: str | None, percent: bool):
    """The curves in a table: one, or one for each column that `y` names. The arguments are those of `read_log`."""
    _choose_records(table, where)
    if not table.names:
        raise ValueError(f"{table.file}: no column has a value: expected a table with names, or a JSON object a line")
    columns = _pass_rates(table, y)
    guessed = " and ".join(flag for flag, column in (("--x", x), ("--y", y)) if column is None)
    several = len(columns) > 1 or y == "all"
    return [_series(table, column if several else name, x, column, percent, guessed) for column in columns]


# --- which records --------------------------------------------------------------------------------------------------


def _choose_records(table: Table, where: str | None) -> None:
    """Choose the rows that `where` picks, and of those the records of validations."""
    rows, said, named = table.chosen, [], []
    for condition in where.split(",") if where else ():
        column, _, value = condition.partition("=")
        if not value:
            raise ValueError(f"--where {condition}: expected COLUMN=VALUE, such as type=eval")
        _refuse_unknown("--where", column, table)
        values = table.values(column, rows)
        if value not in values:
            raise ValueError(f"{table.file}: no record has {condition}; {column} can be {_listed([*values])}")
        rows = rows & (table.labels(column) == values[value])
        said.append(value)
        named.append(column)
    for column in KINDS:
        if column in table.columns and column not in named:
            kinds = table.values(column, rows)
            trained = [kind for kind in kinds if TRAINING.search(_plain(kind))]
            validations = [kind for kind in kinds if VALIDATION.search(_plain(kind)) and kind not in trained]
            if len(validations) > 1:
                choices = " or ".join(f"--where {column}={kind}" for kind in validations)
                raise ValueError(f"{table.file}: which records are the validations? say {choices}")
            if validations:
                rows = rows & (table.labels(column) == kinds[validations[0]])
            said += validations or trained
    table.source = " and ".join(said)
    table.choose(rows)


# --- which columns --------------------------------------------------------------------------------------------------


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _refuse_unknown(flag: str, name: str, table: Table) -> None:
    """ValueError unless there is a column of this name."""
    if name not in table.names:
        near = difflib.get_close_matches(name, table.names, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{table.file}: no column {name!r} with values{hint}; {flag} can name: {_listed(table.names)}")


def _nothing_like(table: Table, what: str, flag: str) -> ValueError:
    return ValueError(f"{table.file}: no column is named like {what}: name it with {flag} of: {_listed(table.names)}")


def _pass_rates(table: Table, y: str | None) -> list[str]:
    """The columns of the pass rate: those that `y` names, or else the likeliest. ValueError, with the range of each, if
    several are equally likely."""
    if y not in (None, "all"):
        names = [y] if y in table.names else y.split(",")
        for name in names:
            _refuse_unknown("--y", name, table)
        return names
    others = [name for name in table.names if _compute_rank(name) is None and not _is_neither(name)]
    ranks = {name: rank for name in others if len(rank := _pass_rate_rank(name, table.source)) > 1}
    numbers = {name: its[table.chosen & np.isfinite(its)] for name in others if len(its := table.numbers(name))}
    likely = [name for name in ranks if ranks[name] == min(ranks.values())]
    likely = likely or [name for name in others if len(numbers[name])]  # names of runs, or a single unknown one
    if not likely:
        raise _nothing_like(table, "a pass rate", "--y")
    if len(likely) == 1 or y == "all":
        return likely
    spans = []
    for name in likely:
        low, high = (numbers[name].min(), numbers[name].max()) if len(numbers[name]) else (np.nan, np.nan)
        spans.append(f"{name} ({low:.3g} to {high:.3g}{'' if 0 <= low and high <= 1 else ': no pass rate'})")
    raise ValueError(f"{table.file}: which column is the pass rate? name it with --y (or all): {_listed(spans)}")


def _counters(table: Table, y: str, points: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of compute with their values at these points, the best name first."""
    ranked = sorted((name for name in table.names if name != y and _compute_rank(name) is not None), key=_compute_rank)
    counters = {name: table.numbers(name)[points] for name in ranked}
    various = {name: len(np.unique(values)) for name, values in counters.items()}  # max_steps is always the same
    known = {
        name: values
        for name, values in counters.items()
        if np.isfinite(values).mean() > 0.9 and various[name] >= min(len(values), 2 + len(values) // 10)
    }
    return known or counters


def _compute(table: Table, counters: dict[str, np.ndarray]) -> str:
    """The best of these names whose values increase. ValueError if there is none, or another that is as likely."""
    if not counters:
        raise _nothing_like(table, "compute (steps, tokens, hours, FLOPs)", "--x")
    rising = [name for name, values in counters.items() if (np.diff(values[np.isfinite(values)]) > 0).all()]
    best = [name for name in rising if _compute_rank(name) == _compute_rank(rising[0])] or [*counters][:1]
    one = counters[best[0]]
    for name in best[1:]:
        if not np.allclose(one * counters[name][-1], counters[name] * one[-1], rtol=1e-3):  # the same but for the unit
            raise ValueError(f"{table.file}: which column is the compute, {best[0]!r} or {name!r}? name it with --x")
    return best[0]


# --- the points of a curve ------------------------------------------------------------------------------------------


def _points(table: Table, x: str | None, y: str) -> tuple[np.ndarray, np.ndarray, str, list[str]]:
    """The rows of the points of a curve, their compute, its name (x, or the likeliest), and what was left out."""
    _refuse_texts(table, y)
    at = table.chosen & table.has(y)
    nan = at & np.isnan(table.numbers(y))
    if 2 * nan.sum() > at.sum():
        place = table.place(int(nan.argmax()))
        raise ValueError(f"{place}: {y} is NaN in {nan.sum()} of {at.sum()} lines: name another column with --y")
    points = np.flatnonzero(at & ~nan)

    counters = _counters(table, y, points)
    steps = [name for name in counters if STEP.fullmatch(name)] or [x] * (x in table.names)
    step = steps[0] if steps else _compute(table, counters)
    _refuse_groups(table, step, y, points)
    kept = _last_of_each(table.numbers(step)[points])
    again, points = len(points) - len(kept), points[kept]

    x = x or _compute(table, {name: values[kept] for name, values in counters.items()})
    if x in COSTS and x not in table.names:
        compute = _accumulated(table, x, step)[points]
    else:
        _refuse_unknown("--x", x, table)
        _refuse_texts(table, x)
        compute = table.numbers(x)[points]
    missing = np.isnan(compute)
    if missing.all():
        raise ValueError(f"{table.file}: no line has a value of {x!r} and of {y!r}")
    left_out = {
        "with NaN": nan.sum(),
        f"whose {step} comes again later, as in a resumed run": again,
        f"without {x}": missing.sum(),
    }
    said = [f"{count} {what}" for what, count in left_out.items() if count]
    return points[~missing], compute[~missing], x, said


def _series(table: Table, name: str, x: str | None, y: str, percent: bool, guessed: str) -> Series:
    """The curve of the pass rate y; x and percent are as in `read_log`, guessed: the flags that were not given."""
    points, compute, x, left_out = _points(table, x, y)
    if percent and table.columns[y].in_percent:
        raise ValueError(f"{table.file}: {y} is written with % already: leave out --percent")
    pass_rate = table.numbers(y)[points] / (100 if percent else 1)
    check_curve(compute, pass_rate, lambda i: table.place(points[i]))

    said = f"read: x = {x}, y = {y}, {len(points)} points"
    said += f", from the {table.source} records" if table.source else ""
    said += f"; left out: {', '.join(left_out)}" if left_out else ""
    examples = table.numbers("num_examples")[points] if "num_examples" in table.names else compute * np.nan
    num_examples = None if np.isnan(examples).all() else float(np.nanmean(examples))
    if len(points) > AT_MOST:
        compute, pass_rate = thin(compute, pass_rate)
        num_examples = num_examples and num_examples * len(points) / len(compute)
        said += f"; neighbours averaged into {len(compute)}"
    texts = [column for column in table.names if table.columns[column].texts]
    others = [column for column in table.names if column not in (x, y, *texts) and not _is_neither(column)]
    said += f"; {guessed} can name others: {_listed(others)}" if others and guessed else ""
    notes = [said, *table.notes]
    if _pass_rate_rank(y, table.source)[0] == 2:
        notes.append(f"! {y} is measured in training, and is no validation: on other problems the run may do otherwise")
    return Series(name, compute, pass_rate, x, y, num_examples, tuple(notes))


def _refuse_texts(table: Table, column: str) -> None:
    """ValueError with the place of the first value of a column that is no number."""
    labels = table.labels(column)
    texts = np.flatnonzero(table.chosen & (labels <= TEXT))
    if len(texts):
        (text,) = table.values(column, texts[:1])
        raise ValueError(f"{table.place(texts[0])}: {column} = {text[:40]!r} is not a number: mend or remove it")


def _refuse_groups(table: Table, step: str, y: str, points: np.ndarray) -> None:
    """ValueError if the points are those of several runs under each other, naming the column that tells them apart."""
    steps, rates = table.numbers(step)[points], table.numbers(y)[points]
    repeats = (np.diff(steps) <= 0).any()
    for column in table.names:
        labels = table.labels(column)[points]
        groups = np.unique(labels[~np.isnan(labels)])
        if column in (step, y) or not 1 < len(groups) <= len(points) // 2:
            continue
        apart = repeats and len(groups) < 100 and all((np.diff(steps[labels == group]) > 0).all() for group in groups)
        if apart or GROUPS.fullmatch(column):
            values = [*table.values(column, points)]
            found = f"several curves under each other, by {column}: {_listed(values)}"
            raise ValueError(f"{table.file}: {found}; choose one with --where {column}={values[0]}")
    differ = np.flatnonzero((np.diff(steps) == 0) & (np.diff(rates) != 0))
    if len(differ) > max(1, len(points) // 10):
        found = f"{step} = {steps[differ[0]]:g} has several values of {y}"
        raise ValueError(f"{table.place(points[differ[0] + 1])}: {found}: choose with --where COLUMN=VALUE")


def _last_of_each(steps: np.ndarray) -> np.ndarray:
    """The places of those points after which the run did not go back to their step or before it. All places if it goes
    back to a step that is new: no resumed run does that."""
    _, first = np.unique(steps, return_index=True)
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    if np.isin(back, first).any():
        return np.arange(len(steps))
    later = np.fmin.accumulate(steps[::-1])[::-1]
    return np.flatnonzero(~np.append(steps[:-1] >= later[1:], False))


def _accumulated(table: Table, what: str, step: str) -> np.ndarray:
    """By row the seconds or tokens of all steps up to it, those left out that a resumed run makes again."""
    named = ([name for name in table.columns if re.fullmatch(pattern, name, re.I)] for pattern in COSTS[what])
    parts = next(filter(None, named), None)
    if not parts:
        raise ValueError(f"{table.file}: no column says what a step costs in {what}: name another with --x")
    costs = np.array([table.numbers(name) for name in parts])
    rows = np.flatnonzero(~np.isnan(costs).all(axis=0))
    rows = rows[_last_of_each(table.numbers(step)[rows])]
    counted = np.zeros(len(table.lines))
    counted[rows] = np.nansum(costs[:, rows], axis=0)
    return np.cumsum(counted)


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first point, which may give R0, and the means of equally many neighbours, at most AT_MOST points in all."""
    each = -(-(len(x) - 1) // (AT_MOST - 1))
    starts = np.append(0, np.arange(1, len(x), each))
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
