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
AT_MOST = 2000  # points of a curve; more are averaged, since a fit costs seconds and a plot shows no more

# --- what a column is, by its name ----------------------------------------------------------------------------------

# Compute, best first; a name is matched in full.
COMPUTE = (
    r"(compute_|train_|total_)?(flops|flos)",
    r".*(gpu|device|accelerator)[ _-]?hours.*",
    r"compute.*",
    r"((.*/)?(num|total|cumulative|sampled)_(input_)?)?tokens(_seen)?",
    r"(wall_?)?(seconds|time|clock|hours)",
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
ONLY_A_REWARD = range(3, 5)  # scores and rewards: of training, unless the name or the record says validation
VALIDATION = re.compile(r"(?<![a-z0-9])(val|valid|validation|eval|evaluation|evaluate|test|dev|held_?out)(?![a-z0-9])")
TRAINING = re.compile(r"(?<![a-z0-9])(train|training|rollouts?|critic|actor|env)(?![a-z0-9])")
KINDS = ("kind", "type", "split", "mode", "phase", "stage", "event")  # columns that say what a record is
GROUPS = re.compile(
    r"algo(rithm)?|method|recipe|run(_?(id|name))?|exp(eriment)?|seed|trial|(data_?)?set|data_source|task|benchmark"
    r"|env(ironment)?|model|policy|variant|setting|group",
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
    """A name in lower case, its words parted: eval/meanReward is eval/mean_reward."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column).lower()


def _words(column: str) -> set[str]:
    return {*re.split(r"[^a-z0-9]+", _plain(column))}


def _compute_rank(column: str) -> int | None:
    """The place of a column among those of compute, the best is 0; None for any other."""
    return next((i for i, pattern in enumerate(COMPUTE) if re.fullmatch(pattern, column, re.I)), None)


def _pass_rate_rank(column: str, of_validation: bool) -> tuple | None:
    """The place of a column among those of the pass rate; the least is the best. None for any other.

    of_validation: the records are those of validations, whatever the name says.
    """
    name = _plain(column)
    if _compute_rank(column) is not None or NEVER & _words(column):
        return None
    where = 0 if of_validation or VALIDATION.search(name) else 2 if TRAINING.search(name) else 1
    measures = [i for i, pattern in enumerate(MEASURES) if pattern.search(name)]
    if where == 0 and not measures and re.fullmatch(r"[^/]+/[^/]+", name):  # eval/aime
        measures = [len(MEASURES)]
    return (where, *measures) if measures else None


# --- tables ---------------------------------------------------------------------------------------------------------


class Column:
    """The values of one column, few bytes each: numbers by row (NaN where a text stands), and the rows of each text."""

    def __init__(self):
        self.rows, self.values = array("q"), array("d")
        self.texts: dict[str, array] = {}
        self.in_percent = False  # some values end with %

    def add(self, row: int, value) -> None:
        self.rows.append(row)
        self.values.append(value if type(value) is float else self._number(row, str(value)))

    def _number(self, row: int, text: str) -> float:
        """A text as a number; NaN if it is none, and then the row is kept under the text."""
        if text not in self.texts:
            try:
                return float(text)
            except ValueError:
                if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+) ?%", text):
                    self.in_percent = True
                    return float(text.rstrip(" %")) / 100
                if text.strip().lower() in ("na", "n/a", "#n/a", "null", "none", "-"):
                    return np.nan
        text = text[:80] if len(self.texts) < MOST_TEXTS else "..."
        self.texts.setdefault(text, array("q")).append(row)
        return np.nan


class Table:
    """The rows of a log by column, and for each row its line in the file."""

    def __init__(self, file: str, rows: Iterable[tuple[int, dict]], notes: list[str]):
        self.file, self.notes = file, notes
        self.lines, self.columns = array("q"), {}
        for line, values in rows:
            for name, value in values.items():
                if value is not None and value != "" and name:
                    if (column := self.columns.get(name)) is None:
                        column = self.columns[name] = Column()
                    column.add(len(self.lines), value)
            self.lines.append(line)

    def place(self, row: int) -> str:
        line = self.lines[row]
        return f"{self.file}, {f'line {line}' if line > 0 else f'record {-line}'}"

    def numbers(self, name: str) -> np.ndarray:
        """The numbers of a column by row, NaN where there is none."""
        numbers = np.full(len(self.lines), np.nan)
        numbers[np.asarray(self.columns[name].rows)] = self.columns[name].values
        return numbers

    def has(self, name: str) -> np.ndarray:
        """Where a column has a value, be it NaN."""
        present = np.zeros(len(self.lines), bool)
        present[np.asarray(self.columns[name].rows, int)] = True
        return present

    def labels(self, name: str) -> np.ndarray:
        """Numbers by row that tell the values of a column apart, NaN where there is none."""
        labels = self.numbers(name)
        for i, rows in enumerate(self.columns[name].texts.values()):
            labels[np.asarray(rows)] = -1e300 * (1 + i / 1000)
        return labels

    def values(self, name: str, rows: np.ndarray) -> list[str]:
        """The different values of a column in these rows, as texts."""
        texts = [text for text, its in self.columns[name].texts.items() if rows[np.asarray(its)].any()]
        return texts + [f"{value:g}" for value in dict.fromkeys(self.numbers(name)[rows].tolist()) if value == value]

    def rows_of(self, name: str, text: str) -> np.ndarray:
        """The rows in which a column has this value."""
        rows = np.zeros(len(self.lines), bool)
        rows[np.asarray(self.columns[name].texts.get(text, ()), int)] = True
        try:
            return rows | (self.numbers(name) == float(text))
        except ValueError:
            return rows


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
    step = np.diff(x, prepend=-1.0)
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(x + y) | (x < 0) | (step <= 0) | (y < 0) | (y > 1)
        advice = "if it is in percent, say --percent" if 1.5 < y.max() <= 100 else "name another column with --y"
    if not bad.any():
        return
    i = int(bad.argmax())
    place = places(i) if places else f"point {i + 1}"
    if not np.isfinite(x[i] + y[i]):
        raise ValueError(f"{place}: x = {x[i]:g}, y = {y[i]:g}: not finite; remove the line")
    if x[i] < 0 or (x[i] == 0 and i > 0):
        raise ValueError(f"{place}: x = {x[i]:g}: compute is positive, or 0 at the first point")
    if step[i] <= 0:
        raise ValueError(f"{place}: x = {x[i]:g} after {x[i - 1]:g}: x must increase; sort the log by it")
    raise ValueError(f"{place}: y = {y[i]:g} is no pass rate, not in [0, 1]: {advice}")


@np.errstate(all="ignore")  # NaN is a value that is missing, and check_curve names the place of an infinity
def read_curves(
    table: Table, name: str, x: str | None, y: str | None, where: str | None, percent: bool
) -> list[Series]:
    """The curves in a table: one, or one for each column that `y` names. The arguments are those of `read_log`."""
    rows, source = _chosen_records(table, where)
    columns = [column for column in table.columns if table.has(column)[rows].any()]
    if not columns:
        raise ValueError(f"{table.file}: column names and no data")
    is_validation = bool(VALIDATION.search(source))
    by_run = {column: column.split(" - ", 1) for column in columns if " - " in column}  # W&B: "run - metric"
    if by_run and y not in columns:
        metrics = list(dict.fromkeys(metric for _, metric in by_run.values()))
        likely = _named(y, metrics, table) if y not in (None, "all") else _likeliest(metrics, is_validation)
        if not likely or len(likely) > 1 and y is None:
            raise _which(table, likely or metrics, rows)
        several = len(likely) > 1
        chosen = {column: column if several else run for column, (run, its) in by_run.items() if its in likely}
    else:
        likely = _pass_rates(table, rows, columns, y, is_validation)
        chosen = {column: name if len(likely) == 1 and y != "all" else column for column in likely}
    guess = " and ".join(flag for flag, column in (("--x", x), ("--y", y)) if column is None)
    return [_series(table, rows, columns, run, x, column, percent, source, guess) for column, run in chosen.items()]


# --- which records --------------------------------------------------------------------------------------------------


def _chosen_records(table: Table, where: str | None) -> tuple[np.ndarray, str]:
    """The rows (a mask) that `where` picks, and of those the records of validations; and what they are, in words."""
    rows, said, named = np.ones(len(table.lines), bool), [], []
    for condition in where.split(",") if where else ():
        column, _, value = condition.partition("=")
        if not value:
            raise ValueError(f"--where {condition}: expected COLUMN=VALUE, such as type=eval")
        _refuse_unknown("--where", column, list(table.columns), table)
        values, rows = table.values(column, rows), rows & table.rows_of(column, value)
        if not rows.any():
            raise ValueError(f"{table.file}: no record has {condition}; {column} can be {_listed(values)}")
        said.append(value)
        named.append(column)
    for column in KINDS:
        if column not in table.columns or column in named or not table.columns[column].texts:
            continue
        kinds = table.values(column, rows)
        trained = [kind for kind in kinds if TRAINING.search(_plain(kind))]
        validations = [kind for kind in kinds if VALIDATION.search(_plain(kind)) and kind not in trained]
        if len(validations) > 1:
            choices = " or ".join(f"--where {column}={kind}" for kind in validations)
            raise ValueError(f"{table.file}: which records are the validations? say {choices}")
        if validations:
            rows = rows & table.rows_of(column, validations[0])
        said += validations or trained
    return rows, " and ".join(said)


# --- which columns --------------------------------------------------------------------------------------------------


def _listed(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _refuse_unknown(flag: str, name: str, columns: list[str], table: Table) -> None:
    """ValueError unless there is a column of this name."""
    if name not in columns:
        near = difflib.get_close_matches(name, columns, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{table.file}: no column {name!r} with values{hint}; {flag} can name: {_listed(columns)}")


def _named(names: str, columns: list[str], table: Table) -> list[str]:
    """The columns that --y names: one, or several with commas."""
    named = [names] if names in columns else names.split(",")
    for name in named:
        _refuse_unknown("--y", name, columns, table)
    return named


def _which(table: Table, columns: list[str], rows: np.ndarray) -> ValueError:
    """The error that asks which of these columns is the pass rate, with the range of each."""
    spans, fitting = [], []
    for column in columns:
        values = table.numbers(column)[rows] if column in table.columns else np.array([])
        values = values[np.isfinite(values)]
        fits = len(values) == 0 or 0 <= values.min() and values.max() <= 1
        fitting += [column] if fits else []
        span = f" ({values.min():.3g} to {values.max():.3g}{'' if fits else ': no pass rate'})" if len(values) else ""
        spans.append(f"{column}{span}")
    several = f", or several with commas, such as --y {','.join(fitting[:2])}" if fitting[1:] else ""
    return ValueError(f"{table.file}: which column is the pass rate? name one with --y{several}: {_listed(spans)}")


def _nothing_like(table: Table, what: str, flag: str, columns: list[str]) -> ValueError:
    return ValueError(f"{table.file}: no column is named like {what}: name it with {flag} of: {_listed(columns)}")


def _likeliest(columns: list[str], is_validation: bool) -> list[str]:
    """The columns that are by name the likeliest pass rate: none, one, or several that are equally likely."""
    ranks = {column: rank for column in columns if (rank := _pass_rate_rank(column, is_validation))}
    return [column for column, rank in ranks.items() if rank == min(ranks.values())]


def _pass_rates(table: Table, rows: np.ndarray, columns: list[str], y: str | None, is_validation: bool) -> list[str]:
    """The columns of the pass rate: those that `y` names, or else the likeliest. ValueError if several are equally
    likely and not the same."""
    if y not in (None, "all"):
        return _named(y, columns, table)
    likely = _likeliest(columns, is_validation)
    if not likely:  # the names of runs, or a single unknown one
        rest = [column for column in columns if _compute_rank(column) is None and not NEVER & _words(column)]
        likely = [column for column in rest if not np.isnan(table.numbers(column)[rows]).all()]
    same = [table.numbers(column)[rows] for column in likely]
    if len(likely) == 1 or y == "all" and likely or same and all(np.array_equal(same[0], its, True) for its in same):
        return likely if y == "all" else likely[:1]
    raise _which(table, likely, rows) if likely else _nothing_like(table, "a pass rate", "--y", columns)


def _compute(table: Table, columns: list[str], y: str, points: np.ndarray) -> str:
    """The column of compute at these points (row numbers): the best name whose values increase."""
    ranks = {column: rank for column in columns if column != y and (rank := _compute_rank(column)) is not None}
    known = {}
    for column in sorted(ranks, key=ranks.get):
        values = table.numbers(column)[points]
        if np.isfinite(values).mean() > 0.9 and not ("time" in column and values[0] > 1e9):  # not Unix time
            known[column] = values
    rising = [column for column, values in known.items() if (np.diff(values[np.isfinite(values)]) > 0).all()]
    best = [column for column in rising if ranks[column] == ranks[rising[0]]]
    for other in best[1:]:
        one, two = known[best[0]], known[other]
        if not np.allclose(one * two[-1], two * one[-1], rtol=1e-3):  # the same but for the unit
            raise ValueError(f"{table.file}: which column is the compute, {best[0]!r} or {other!r}? name it with --x")
    if not ranks:
        raise _nothing_like(table, "compute (steps, tokens, hours, FLOPs)", "--x", columns)
    return (best or [*known] or [*ranks])[0]


def _step(table: Table, columns: list[str], y: str, points: np.ndarray) -> str | None:
    """The column that counts the steps at these points, whether or not they increase; None if there is none."""
    for column in sorted(filter(STEP.fullmatch, columns), key=_compute_rank):
        values = table.numbers(column)[points]
        if (
            column != y and np.isfinite(values).all() and len(np.unique(values)) > max(1, len(values) // 10)
        ):  # max_steps
            return column
    return None


# --- the points of a curve ------------------------------------------------------------------------------------------


def _series(
    table: Table, rows: np.ndarray, columns: list[str], name: str, x, y: str, percent: bool, source: str, guess
):
    """The curve of the pass rate y; x and percent are as in `read_log`, guess: the flags that were not said."""
    at, pass_rate, left_out = rows & table.has(y), table.numbers(y), []
    _refuse_texts(table, y, at)
    nan = at & np.isnan(pass_rate)
    if 2 * nan.sum() > at.sum():
        where = table.place(int(nan.argmax()))
        raise ValueError(f"{where}: {y} is NaN in {nan.sum()} of {at.sum()} lines: name another column with --y")
    if nan.any():
        left_out.append(f"{nan.sum()} with NaN")
    points = np.flatnonzero(at & ~nan)

    step = _step(table, columns, y, points) or (x if x in columns else _compute(table, columns, y, points))
    _refuse_groups(table, columns, step, y, points)
    kept = _last_of_each(table.numbers(step)[points])
    if len(kept) < len(points):
        left_out.append(f"{len(points) - len(kept)} whose {step} comes again later, as in a resumed run")
    points = points[kept]

    x_name = x or _compute(table, columns, y, points)
    if x_name in COSTS and x_name not in columns:
        compute = _accumulated(table, x_name, step)
    else:
        _refuse_unknown("--x", x_name, columns, table)
        _refuse_texts(table, x_name, at)
        compute = table.numbers(x_name)
    missing = np.isnan(compute[points])
    if missing.all():
        raise ValueError(f"{table.file}: no line has a value of {x_name!r} and of {y!r}")
    if missing.any():
        left_out.append(f"{missing.sum()} without {x_name}")
    points = points[~missing]
    compute, pass_rate = compute[points], pass_rate[points] / (100 if percent else 1)
    if percent and table.columns[y].in_percent:
        raise ValueError(f"{table.place(points[0])}: {y} is written with % already: leave out --percent")
    check_curve(compute, pass_rate, lambda i: table.place(points[i]))

    examples = table.numbers("num_examples")[points] if "num_examples" in columns else np.array([np.nan])
    num_examples = None if np.isnan(examples).all() else float(np.nanmean(examples))
    said = [f"read: x = {x_name}, y = {y}, {len(points)} points" + (f", from the {source} records" if source else "")]
    if left_out:
        said.append(f"left out: {', '.join(left_out)}")
    if len(points) > AT_MOST:
        compute, pass_rate = thin(compute, pass_rate)
        num_examples = num_examples and num_examples * len(points) / len(compute)
        said.append(f"neighbours averaged into {len(compute)}")
    numbers = [column for column in columns if column not in (x_name, y) and not table.columns[column].texts]
    others = [column for column in numbers if _compute_rank(column) is not None or not NEVER & _words(column)]
    if others and guess:
        said.append(f"{guess} can name others: {_listed(others)}")
    notes = ["; ".join(said), *table.notes]
    if _is_of_training(y, source):
        notes.append(f"! {y} is measured in training, and is no validation: on other problems the run may do otherwise")
    return Series(name, compute, pass_rate, x_name, y.removeprefix(f"{name} - "), num_examples, tuple(notes))


def _is_of_training(column: str, source: str) -> bool:
    """Whether values are measured on the problems of training, by the name of the column or of the records."""
    said = f"{source} {_plain(column)}"
    measure = next((i for i, pattern in enumerate(MEASURES) if pattern.search(said)), None)
    return not VALIDATION.search(said) and bool(TRAINING.search(said) or measure in ONLY_A_REWARD)


def _refuse_texts(table: Table, column: str, rows: np.ndarray) -> None:
    """ValueError with the place of the first value of a column that is no number."""
    texts = table.columns[column].texts
    first = min(((row, text) for text, its in texts.items() for row in its if rows[row]), default=None)
    if first:
        raise ValueError(f"{table.place(first[0])}: {column} = {first[1][:40]!r} is not a number: mend or remove it")


def _refuse_groups(table: Table, columns: list[str], step: str, y: str, points: np.ndarray) -> None:
    """ValueError if the points are those of several runs under each other, naming the column that tells them apart."""
    steps = table.numbers(step)[points]
    repeats = (np.diff(steps) <= 0).any()
    for column in columns:
        by_name = GROUPS.fullmatch(column)
        if column in (step, y) or not (by_name or repeats):
            continue
        labels = table.labels(column)[points]
        order = np.argsort(labels, kind="stable")  # NaN at the end
        same = labels[order][1:] == labels[order][:-1]
        groups = np.isfinite(labels).sum() - same.sum()
        apart = (np.diff(steps[order])[same] > 0).all()  # in each group the steps increase
        if 1 < groups <= len(points) // 2 and (by_name or apart):
            values = table.values(column, np.isin(np.arange(len(table.lines)), points))
            found = f"several curves under each other, by {column}: {_listed(values)}"
            raise ValueError(f"{table.file}: {found}; choose one with --where {column}={values[0]}")
    same = np.flatnonzero(np.diff(steps) == 0)
    rates = table.numbers(y)[points]
    differ = same[rates[same] != rates[same + 1]]
    if len(differ) > max(1, len(points) // 10):
        found = f"{step} = {steps[differ[0]]:g} has several values of {y}"
        raise ValueError(f"{table.place(points[differ[0] + 1])}: {found}: choose with --where COLUMN=VALUE")


def _last_of_each(steps: np.ndarray) -> np.ndarray:
    """The places of those points after which the run did not go back to their step or before it; of equal neighbours
    the last. All places, equal neighbours aside, if it goes back to a step that is new: no resumed run does that."""
    _, first = np.unique(steps, return_index=True)
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    later = np.fmin.accumulate(steps[::-1])[::-1] if not np.isin(back, first).any() else np.full(len(steps), np.inf)
    return np.flatnonzero(~np.append((steps[:-1] >= later[1:]) | (np.diff(steps) == 0), False))


def _accumulated(table: Table, what: str, step: str) -> np.ndarray:
    """By row the seconds or tokens of all steps up to it, those left out that a resumed run makes again."""
    for pattern in COSTS[what]:
        parts = [column for column in table.columns if re.fullmatch(pattern, column, re.I)]
        if parts:
            break
    else:
        raise ValueError(f"{table.file}: no column says what a step costs in {what}: name another with --x")
    cost = np.nansum([table.numbers(column) for column in parts], axis=0)
    rows = np.flatnonzero(np.any([table.has(column) for column in parts], axis=0))
    rows = rows[_last_of_each(table.numbers(step)[rows])]
    counted = np.zeros(len(cost))
    counted[rows] = cost[rows]
    return np.cumsum(counted)


def thin(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first point, which may give R0, and the means of equally many neighbours, at most AT_MOST points in all."""
    each = -(-(len(x) - 1) // (AT_MOST - 1))
    starts = np.append(0, np.arange(1, len(x), each))
    counts = np.diff(np.append(starts, len(x)))
    return np.add.reduceat(x, starts) / counts, np.add.reduceat(y, starts) / counts
