"""Make docs/public_runs.md: how public runs end beside their forecasts, what folds by repository
choose for the forecast, and which warnings foretell errors; and a picture of the forecasts.

    python benchmarks/public_runs.py CLONES --gallery docs/pictures/public_runs.png \\
        > docs/public_runs.md

public_runs.csv has the repository, commit and file of each log, and the flags that read it. The
licences of the repositories are not known, so the logs are no part of this project. The
repositories are cloned into the folder CLONES, if they are not there.
"""

import argparse
import csv
import io
import itertools
import pickle
import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import common
import numpy as np

from curve import forecast as rule
from curve.columns import Series
from curve.files import whole_file
from curve.fit import Fit, fit_sigmoid
from curve.forecast import FORECASTERS, LITTLE, gain_of_twice, held_out, reached_at
from curve.logs import read_log

TABLE = Path(__file__).with_suffix(".csv")

# Problems of the benchmarks of RETU.
RETU_PROBLEMS = {
    "gsm8k": 1317,
    "olympiad_bench": 291,
    "math": 237,
    "minerva": 262,
    "aime": 25,
    "aime25": 25,
}
SMALL = 0.1  # a smaller gain is a small one
PARTS = 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4  # of a run's steps, from which its end is forecast


CELLS = list(itertools.product((True, False), (1 / 4, 1 / 2, 2 / 3)))  # a small gain; the part
PART_NAMES = {1 / 4: "a quarter", 1 / 3: "a third", 1 / 2: "a half", 2 / 3: "two thirds"}


@dataclass(frozen=True, eq=False)
class Run:
    """A curve, and the place of its log."""

    repository: str
    commit: str
    folder: str
    name: str  # of the file in this folder, with the flags that read it
    is_training: bool  # it is of the batches that the run trained on, and no validation
    series: Series = field(repr=False)

    @property
    def gain(self) -> float:
        return self.series.y[-3:].mean() - self.series.y[0]


@dataclass
class Forecast:
    """What the first part of a run said of the mean of its last three points."""

    came: float
    errors: dict[str, float]  # by forecaster
    inside: bool  # whether it came inside the 95 % interval
    width: float  # of the interval
    warnings: list[str]  # kinds, of the fit of the first part


def public_runs(clones: Path) -> tuple[list[Run], dict[str, str]]:
    """The distinct curves, and by file the one that a file repeats."""
    runs = []
    known = {}
    repeated = {}
    for log in csv.DictReader(TABLE.open()):
        clone = clones / log["repository"].replace("/", "+")
        if not clone.exists():
            url = f"https://github.com/{log['repository']}"
            subprocess.run(
                ["git", "clone", "--quiet", "--bare", "--filter=blob:none", url, clone], check=True
            )
        path = f"{log['folder']}/{log['file']}".removeprefix("/")
        show = ["git", "-C", clone, "show", f"{log['commit']}:{path}"]
        curves = read(subprocess.run(show, stdout=subprocess.PIPE, check=True).stdout, log)
        for series in curves:
            name = log["file"] + "".join(
                f" --{flag} {log[flag]}" for flag in ("y", "where") if log[flag] not in ("", "all")
            )
            name = f"{log['file']}:{series.name}" if len(curves) > 1 else name
            first = known.setdefault((series.x.tobytes(), series.y.tobytes()), name)
            if first == name:
                place = log["repository"], log["commit"], log["folder"]
                runs.append(Run(*place, name, log["kind"] == "training", series))
            else:
                repeated[name] = first
    return runs, repeated


def read(content: bytes, log: dict[str, str]) -> list[Series]:
    """The curves in a file. log: its line in TABLE."""
    if log["reader"] == "retu":
        return [read_retu(content)]
    if log["reader"] == "checkpoints":  # a line begins with the name of a checkpoint, with its step
        content = re.sub(rb"(?m)^[^,\n]*?(\d+),", rb"\1,", content).replace(b"model,", b"step,", 1)
    flags = {flag: log[flag] for flag in ("y", "where") if log[flag]}
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return read_log(file.name, percent=bool(log["percent"]), **flags)


class Numbers(pickle.Unpickler):
    """Reads dicts of numbers, and refuses everything else: a pickle may run any program."""

    def find_class(self, module: str, name: str):
        if (module.replace("_core", "core"), name) == ("numpy.core.multiarray", "scalar"):
            return np._core.multiarray.scalar
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        raise ValueError(f"{module}.{name} is no number")


def read_retu(content: bytes) -> Series:
    """The mean pass rate of all problems over EFLOPs, of one run of RETU."""
    (curve,) = Numbers(io.BytesIO(content)).load().values()
    x = sorted(curve)
    y = []
    for compute in x:
        rates = {name: rate for name, rate in curve[compute].items() if name in RETU_PROBLEMS}
        number = sum(RETU_PROBLEMS[name] for name in rates)
        solved = sum(RETU_PROBLEMS[name] * rate for name, rate in rates.items())
        y.append(solved / number / 100)
    return Series("retu", np.array(x, float), np.array(y, float), "eflops", "overall")


# --- forecasts ------------------------------------------------------------------------------------


@cache
def _fit(x: bytes, y: bytes, *window) -> Fit | ValueError:
    try:
        return fit_sigmoid(np.frombuffer(x), np.frombuffer(y), *window)
    except ValueError as error:
        return error


def fit_once(x, y, r0="first", fit_from=0.0, fit_to=np.inf) -> Fit:
    """`fit_sigmoid`, which makes each fit only once."""
    fit = _fit(
        np.ascontiguousarray(x).tobytes(), np.ascontiguousarray(y).tobytes(), r0, fit_from, fit_to
    )
    if isinstance(fit, ValueError):
        raise fit
    return fit


def forecast(series: Series, part: float) -> Forecast | None:
    """The forecast from this part of the steps; None if it cannot be fitted."""
    try:
        early = fit_once(series.x, series.y, fit_to=part * series.x[-1])
        test = held_out(series.x, series.y, fit_to=part * series.x[-1])
    except ValueError:
        return None
    low, high = test["interval"]
    came = test["came"]
    errors = {name: test[name] - came for name in FORECASTERS}
    kinds = [warning.kind for warning in early.warnings]
    return Forecast(came, errors, low <= came <= high, high - low, kinds)


def state(series: Series) -> str:
    """What keeps a whole run from being foreseen by a sigmoid, or ""."""
    try:
        return "fell" if fit_once(series.x, series.y).fell else ""
    except ValueError:
        return "never moved"


def errors_of(found: list[Forecast], name: str = "forecast") -> np.ndarray:
    return np.abs([one.errors[name] for one in found])


def print_table(names: list[str], rows: Iterable[list]) -> None:
    for cells in (names, ["---"] * len(names), *rows):
        print(f"| {' | '.join(map(str, cells))} |".replace("  ", " "))


def root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def run_row(run: Run) -> list:
    """The line of a run in the table of all runs."""
    found = forecast(run.series, 1 / 2)
    how = state(run.series)
    figures = (
        [f"{found.came:.3f}", *(f"{error:+.3f}" for error in found.errors.values())]
        if found
        else ["-"] * 5
    )
    said = [how] * bool(how) + ([f"! {kind}" for kind in found.warnings] if found else [])
    return [f"`{run.name}`", len(run.series.x), *figures, "; ".join(said)]


def cell_of(runs: list[Run], small: bool, part: float) -> list[tuple[Run, Forecast]]:
    """The runs with a small gain, or a large one, that can be fitted on this part, and their
    forecasts."""
    chosen = [run for run in runs if (run.gain < SMALL) == small]
    return [(run, found) for run in chosen if (found := forecast(run.series, part))]


def error_rows(runs: list[Run]) -> list[list]:
    """Median and root mean square of the errors, for small gains and large ones, by the part of the
    run that is fitted."""
    rows = []
    for small, part in CELLS:
        found = [found for _, found in cell_of(runs, small, part)]
        cells = [of_errors(errors_of(found, by)) for by in FORECASTERS]
        inside = np.mean([one.inside for one in found])
        name = f"{'small' if small else 'large'}, {PART_NAMES[part]}"
        rows.append([name, len(found), *cells, f"{100 * inside:.0f} %"])
    return rows


def of_errors(errors: np.ndarray) -> str:
    return f"{np.median(errors):.4f} / {root_mean_square(errors):.4f}"


# --- folds by repository --------------------------------------------------------------------------

BENDS = 0, 1, 1.5, 2, 3, 5, 7, 10, 20, 50, np.inf  # 0: always the sigmoid, inf: never
DOUBTS = list(itertools.product((0, 0.25, 0.5, 1, 1.5), (0.5, 1, 1.5, 2, 3)))  # if bent, if not
LEAST_INSIDE = 0.9  # of the outcomes in each cell


@contextmanager
def other_rule(bent: float, doubts: tuple[float, float]):
    """The forecast with this limit and these widths."""
    before = rule.BENT, rule.DOUBT
    rule.BENT, rule.DOUBT = bent, {True: doubts[0], False: doubts[1]}
    yield
    rule.BENT, rule.DOUBT = before


def goodness(cells: list[list[Forecast]]) -> float:
    """The mean logarithm of the median and the root mean square of the errors over the cells; the
    lower, the better. No error counts as less than .001."""
    errors = [errors_of(found) for found in cells if found]
    figures = [f(one) for one in errors for f in (np.median, root_mean_square)]
    return np.log(np.maximum(figures, 0.001)).mean()


def without(repository: str, cells: list[list[tuple[Run, Forecast]]]) -> list[list[Forecast]]:
    return [[one for run, one in cell if run.repository != repository] for cell in cells]


def chosen_rule(cells_of, left_out: str) -> tuple[float, tuple[float, float]]:
    """The limit with the best errors. Then, of the widths that hold LEAST_INSIDE of the outcomes in
    each cell, those with the narrowest intervals. cells_of: the forecasts in each cell, a function
    of limit and widths. left_out: a repository."""
    bent = min(BENDS, key=lambda bent: goodness(without(left_out, cells_of(bent, DOUBTS[0]))))
    widths = {}
    for doubts in DOUBTS:
        cells = list(filter(None, without(left_out, cells_of(bent, doubts))))
        if min(np.mean([one.inside for one in cell]) for cell in cells) >= LEAST_INSIDE:
            widths[doubts] = np.mean([one.width for cell in cells for one in cell])
    return bent, min(widths, key=widths.get)


def fold_rows(runs: list[Run]) -> tuple[list[list], list[list], str]:
    """What is chosen without each repository; how well that does on the repositories that were left
    out, beside the forecast as it is; and a sentence that compares the two."""

    @cache
    def cells_of(bent, doubts) -> list[list[tuple[Run, Forecast]]]:
        with other_rule(bent, doubts):
            return [cell_of(runs, *cell) for cell in CELLS]

    as_it_is = [cell_of(runs, *cell) for cell in CELLS]
    choices = {
        repository: chosen_rule(cells_of, repository)
        for repository in dict.fromkeys(run.repository for run in runs)
    }
    chosen = [[f"`{name}`", f"{bent:g}", *doubts] for name, (bent, doubts) in choices.items()]

    # What their choice does where it was not made.
    folds = [
        [(run, cells_of(*choices[run.repository])[i][k][1]) for k, (run, _) in enumerate(cell)]
        for i, cell in enumerate(as_it_is)
    ]
    rows = []
    for (small, part), cell, now in zip(CELLS, folds, as_it_is):
        cells = []
        for found in ([one for _, one in now], [one for _, one in cell]):
            inside = np.mean([one.inside for one in found])
            cells += [of_errors(errors_of(found)), f"{100 * inside:.0f} %"]
        rows.append([f"{'small' if small else 'large'}, {PART_NAMES[part]}", len(cell), *cells])

    # Repositories are drawn at random, to see what of the difference is chance.
    draws = np.random.default_rng(0)
    differences = []
    for _ in range(1000):
        drawn = draws.choice([*choices], len(choices))
        goods = []
        for cells in (folds, as_it_is):
            times = [
                [one for name in drawn for run, one in cell if run.repository == name]
                for cell in cells
            ]
            goods.append(goodness(times))
        differences.append(goods[0] - goods[1])
    low, middle, high = 100 * np.expm1(np.percentile(differences, (2.5, 50, 97.5)))
    return chosen, rows, f"{middle:+.0f} % [{low:+.0f}, {high:+.0f}]"


# --- going on -------------------------------------------------------------------------------------


def stop_rows(series: list[Series]) -> list[list]:
    """How often going on is called hardly worth it, and how often that is wrong."""
    rows = []
    for part in (1 / 4, 1 / 3, 1 / 2):
        gains = []
        fits = 0
        for one in series:
            try:
                fit = fit_once(one.x, one.y, fit_to=part * one.x[-1])
            except ValueError:
                continue
            fits += 1
            if gain_of_twice(fit)["gain"] < LITTLE:
                gains.append(gain_at_twice(one, len(one.x[one.x <= fit.C_max])))
        rows.append([f"at {PART_NAMES[part]}", fits, len(gains), share_wrong(gains)])
    gains = []
    saved = []
    for one in series:
        for n in range(2, len(one.x)):
            first = Series(one.name, one.x[:n], one.y[:n])
            if one.x[n - 1] <= 0.9 * one.x[-1] and rule.levelled_off(first, LITTLE):
                gains.append(gain_at_twice(one, n))
                saved.append(1 - one.x[n - 1] / one.x[-1])
                break
    print(f"Stopped runs save {100 * np.median(saved):.0f} % of their steps (median).\n")
    rows.append(["`--stop-when-gain-below 0.02`", len(series), len(gains), share_wrong(gains)])
    return rows


def gain_at_twice(series: Series, n: int) -> float:
    """What came at twice the compute of point n, or at the end: the mean of three points around it,
    minus the mean of the last three of the first n."""
    later = np.flatnonzero(series.x <= 2 * series.x[n - 1] * 1.0001)[-1]
    return series.y[max(later - 1, n - 1) : later + 2].mean() - series.y[n - 3 : n].mean()


def share_wrong(gains: list[float]) -> str:
    wrong = np.mean(np.array(gains) >= 2 * LITTLE) if gains else 0
    return f"{sum(gain >= 2 * LITTLE for gain in gains)} ({100 * wrong:.0f} %)"


def reach_rows(series: list[Series]) -> list[list]:
    """Pass rates that were reached later: how often --reach holds the compute in its interval, and
    how often it says that they are surely not reached, or perhaps not."""
    rows = []
    for times in (1.2, 1.5, 2, 3):
        found = []
        for one in series:
            level = np.convolve(one.y, np.ones(3) / 3, "valid")  # means of three neighbours
            x = one.x[1:-1]
            for part in (1 / 4, 1 / 3, 1 / 2):
                try:
                    fit = fit_once(one.x, one.y, fit_to=part * one.x[-1])
                except ValueError:
                    continue
                if times * fit.C_max > x[-1]:
                    continue
                wanted = level[np.searchsorted(x, times * fit.C_max)]
                if wanted > fit.end + 0.005:
                    reached = x[(x > fit.C_max) & (level >= wanted)][0]
                    answer = reached_at(fit, wanted)
                    low, high = (end or np.inf for end in answer["interval"])
                    never = answer["x"] is None
                    found.append((low <= reached <= high, np.isinf(low), never))
        shares = [f"{100 * share:.0f} %" for share in np.mean(found, axis=0)]
        rows.append([f"at {times} times the compute", len(found), *shares])
    return rows


# --- warnings -------------------------------------------------------------------------------------


def warning_rows(found: list[Forecast]) -> list[list]:
    kinds = sorted({kind for one in found for kind in one.warnings})
    groups = {
        "all": found,
        "without `!`": [one for one in found if not one.warnings],
        "with `!`": [one for one in found if one.warnings],
        **{f"`! {kind}`": [one for one in found if kind in one.warnings] for kind in kinds},
    }
    rows = []
    for name, group in groups.items():
        error = errors_of(group)
        shares = np.mean(error > 0.05), np.mean([one.inside for one in group])
        figures = (
            f"{np.median(error):.3f}",
            f"{root_mean_square(error):.3f}",
            *(f"{100 * share:.0f} %" for share in shares),
        )
        rows.append([name, len(group), *figures])
    return rows


# --- the picture ----------------------------------------------------------------------------------


def draw_gallery(path: Path, runs: list[Run]) -> None:
    """Draw the first run of each repository: the points of the first half filled, later ones
    hollow, and the forecast from the first half with its interval."""
    from matplotlib.figure import Figure

    first = {run.repository: run for run in reversed(runs)}
    firsts = [run for run in runs if first[run.repository] is run]
    rows = -(-len(firsts) // 6)
    figure = Figure(figsize=(13, 2.1 * rows), layout="constrained")
    panels = figure.subplots(rows, 6, sharex=True, sharey=True, squeeze=False)
    for panel, run in itertools.zip_longest(panels.flat, firsts):
        if run is None:
            panel.set_axis_off()
        else:
            draw_panel(panel, run)
    panels[0, 0].set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=TICKS, yticks=TICKS)
    figure.supxlabel("part of the run's compute")
    figure.supylabel("pass rate (on grey ground: of training batches)")
    with whole_file(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=90)


TICKS = 0, 0.5, 1
MOST_DRAWN = 50  # points; of more, neighbours are averaged


def draw_panel(panel, run: Run) -> None:
    x = run.series.x / run.series.x[-1]
    y = run.series.y
    for half, fill in ((x <= 0.5, "C0"), (x > 0.5, "w")):
        parts = min(half.sum(), MOST_DRAWN // 2)
        points = [
            [part.mean() for part in np.array_split(values[half], parts)] for values in (x, y)
        ]
        panel.plot(*points, "o", color="C0", mfc=fill, ms=3.5, mew=0.7)
    title = run.repository.replace("/", "/\n")
    try:
        fit = fit_once(run.series.x, y, fit_to=run.series.x[-1] / 2)  # all points
    except ValueError:
        title += " (not fitted)"
    else:
        C = np.linspace(0.5, 1, 50)
        later = rule.each(fit, C * run.series.x[-1])
        panel.plot(C, later.value, "C1")
        panel.fill_between(C, later.low, later.high, color="C1", alpha=0.25, lw=0)
    panel.set_title(title, fontsize=8)
    panel.set_facecolor("0.94" if run.is_training else "w")


# --- the page -------------------------------------------------------------------------------------

HEAD = """# Public runs

Made by `python benchmarks/public_runs.py CLONES --gallery docs/pictures/public_runs.png > \
docs/public_runs.md`. It clones
the repositories of [public_runs.csv](../benchmarks/public_runs.csv) and reads their logs as \
`python fit_curve.py LOG` does.
Their licences are not known, so the logs are not shipped here.

On 2026-11-23, 384 public repositories on RL of language models, or of courses that teach it, \
were searched for such logs.
In 120 no file could hold one, and in 202 no file has a rate of at least seven values. Of the \
other 62 these 24 are used.
The rest have verdicts on single problems, rewards outside [0, 1], fewer than five validations, or \
no RL.

![The first run of each repository, with the forecast from its first half](pictures/public_runs.png)

Above is the first run of each repository that the table below names, well foreseen or not. \
Filled points are the first
half, from which the forecast (orange) and its 95 % interval come. Of more than 50 points \
neighbours are averaged. On a
grey ground the points are no validations, but batches that the run trained on.

## The runs

The outcome is the mean of the last three points. An error is a forecast from the first half of \
the steps, minus the
outcome. A line with `!` names the warnings of the fit of the first half."""
TRAINING = """
These repositories hold no validations that can be fitted, but the mean reward or accuracy of each \
training batch. One
table of errors below is theirs. All others are of validations."""
FOLDS = """
## What folds by repository choose

Two things were set by hand: the points count as bent if the squared error of the power law is \
more than {bent} times that
of the sigmoid, and the spread of the three curves widens the interval by {if_bent} times itself \
if they bend, and by {if_not} times
if not. Here each repository is left out in turn, and the others choose: the limit with the lowest \
mean logarithm of the
twelve figures (median and root mean square in six cells), and the narrowest widths that hold 90 % \
in each cell.
"""
STOPPING = """
## Is it worth going on?

The forecast says that twice the compute gains less than .02. That is wrong if it gained .04 or \
more. The last line asks
at every validation, as a run does, and stops at the first answer that holds at two in a row.
"""
REACHING = """
## The compute for a pass rate

Pass rates that were reached at a multiple of the compute that was fitted (a quarter, a third and \
a half of the steps).
"""
WARNINGS = """
## Which warnings foretell errors

The error of the forecast, by the warnings of the fit that it comes from. "Inside" \
counts the outcomes in the
95 % interval. A fit can have several warnings. "Five parts" are a quarter, a third, a half, \
two thirds and three
quarters of the steps; these fits are not independent."""


def print_runs(runs: list[Run]) -> None:
    """A table for each repository."""
    names = ["file", "points", "outcome", "error: forecast", "sigmoid", "power law", "last value"]
    for place in dict.fromkeys((run.repository, run.commit, run.folder) for run in runs):
        repository, commit, folder = place
        where = f", folder `{folder}`" if folder else ""
        print(f"\n`{repository}`, commit `{commit}`{where}:\n")
        of = [run for run in runs if (run.repository, run.commit, run.folder) == place]
        print_table([*names, ""], map(run_row, of))


def print_errors(good: list[Run], of_training: list[Run]) -> None:
    print("\n## Errors of the forecast\n")
    print(
        f"The {len(good)} runs that neither fell nor stayed at one value. A gain is small below "
        f"{SMALL}. It is the\noutcome minus the first point. The part of the steps is fitted:\n"
    )
    names = ["runs", "forecast", "sigmoid", "power law", "last value", "inside"]
    print_table(["median / root mean square", *names], error_rows(good))
    print(f"\nThe same for {len(of_training)} runs of training batches:\n")
    print_table(["median / root mean square", *names], error_rows(of_training))


def print_folds(good: list[Run]) -> None:
    widths = {"if_bent": rule.DOUBT[True], "if_not": rule.DOUBT[False]}
    print(FOLDS.format(bent=rule.BENT, **widths))
    chosen, rows, difference = fold_rows(good)
    print_table(["left out", "limit", "width if bent", "if not"], chosen)
    print("\nMedian and root mean square on the repositories that were left out:\n")
    names = ["runs", "the forecast as it is", "inside", "the choice of the folds", "inside"]
    print_table(["", *names], rows)
    print(
        f"\nThe errors of the folds' choice differ by {difference} from those of the forecast "
        "(the geometric mean of the\ntwelve; in brackets the 95 % interval when repositories are "
        "drawn at random)."
    )


def print_warnings(good: list[Series]) -> None:
    study = common.ROOT / "docs" / "study"
    # A run that was copied into several studies counts once.
    distinct = {}
    for path in sorted(study.glob("*/*.jsonl")):
        for series in read_log(path):
            distinct.setdefault((series.x.tobytes(), series.y.tobytes()), series)
    ours = [series for series in distinct.values() if not state(series)]
    print(WARNINGS)
    for name, chosen in (("public runs", good), ("runs of our [studies](findings.md)", ours)):
        for text, parts in (("the first half", (1 / 2,)), ("five parts", PARTS)):
            found = [one for series in chosen for part in parts if (one := forecast(series, part))]
            print(f"\n{len(chosen)} {name}, from {text}:\n")
            names = ["", "fits", "error: median", "root mean square", "errors above .05", "inside"]
            print_table(names, warning_rows(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clones", type=Path, help="the folder of the clones")
    parser.add_argument("--gallery", type=Path, help="the picture")
    options = parser.parse_args()
    rule.fit_sigmoid = fit_once  # so that other rules are tried on the same fits
    runs, repeated = public_runs(options.clones)
    if options.gallery:
        draw_gallery(options.gallery, runs)
    validations = [run for run in runs if not run.is_training]
    of_training = [run for run in runs if run.is_training]

    print(HEAD)
    print_runs(validations)
    print(TRAINING)
    print_runs(of_training)
    print("\nThese files hold a curve again, which counts once:\n")
    print_table(
        ["file", "the same as"], [[f"`{name}`", f"`{first}`"] for name, first in repeated.items()]
    )

    good = [run for run in validations if not state(run.series)]
    print_errors(good, [run for run in of_training if not state(run.series)])
    print_folds(good)
    series = [run.series for run in good]
    print(STOPPING)
    print_table(["", "runs", "stopped", "wrong"], stop_rows(series))
    print(REACHING)
    print_table(["", "pass rates", "inside", "surely not", "perhaps not"], reach_rows(series))
    print_warnings(series)


if __name__ == "__main__":
    main()
