"""How public runs end beside their forecasts, and which warnings foretell errors: the figures of
docs/fitting.md.

    python benchmarks/public_runs.py CLONES

public_runs.csv beside this file has the repository, commit and file of each log, and the flags that
read it. The licences of the repositories are not known, so the logs are no part of this project.
The repositories are cloned into the folder CLONES, if they are not there.
"""

import csv
import io
import itertools
import json
import pickle
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np

from curve.fit import Fit, fit_sigmoid
from curve.forecast import FORECASTERS, LITTLE, gain_of_twice, levelled_off, tested
from curve.logs import Series, read_log
from curve.report import markdown

TABLE = Path(__file__).with_suffix(".csv")
# Problems of the benchmarks of RETU.
RETU_PROBLEMS = dict(gsm8k=1317, olympiad_bench=291, math=237, minerva=262, aime=25, aime25=25)
SMALL = 0.1  # a smaller gain is a small one
PARTS = {"a quarter": 1 / 4, "a third": 1 / 3, "a half": 1 / 2, "two thirds": 2 / 3}
FIVE_PARTS = (*PARTS.values(), 3 / 4)
FITS = {}  # of `early_fit`


@dataclass
class Forecast:
    """What the first part of a run said of the mean of its last three points."""

    errors: np.ndarray  # of the forecast, the sigmoid, the power law and the last value
    inside: bool  # whether it came inside the 95 % interval
    warnings: list[str]  # kinds, of the fit of the first part


# --- the logs -------------------------------------------------------------------------------------


def public_runs(clones: Path) -> list[tuple[dict, Series]]:
    """The distinct curves, each with its line in TABLE."""
    runs = {}
    for log in csv.DictReader(TABLE.open()):
        clone = clones / log["repository"].replace("/", "+")
        if not clone.exists():
            url = f"https://github.com/{log['repository']}"
            command = ["git", "clone", "--quiet", "--bare", "--filter=blob:none", url, clone]
            subprocess.run(command, check=True)
        path = f"{log['folder']}/{log['file']}".removeprefix("/")
        show = ["git", "-C", clone, "show", f"{log['commit']}:{path}"]
        for series in read(subprocess.run(show, capture_output=True, check=True).stdout, log):
            runs.setdefault((series.x.tobytes(), series.y.tobytes()), (log, series))
    return [*runs.values()]


def read(content: bytes, log: dict[str, str]) -> list[Series]:
    """The curves in a file. log: its line in TABLE, whose reader may be a pattern of the lines of a
    console, with a group for each column."""
    reader = log["reader"]
    if reader == "retu":
        return [read_retu(content)]
    if reader == "checkpoints":  # a line begins with the name of a checkpoint, with its step
        content = re.sub(rb"(?m)^[^,\n]*?(\d+),", rb"\1,", content).replace(b"model,", b"step,", 1)
    elif reader:
        lines = re.finditer(reader, content.decode(errors="replace"))
        content = "".join(f"{json.dumps(line.groupdict())}\n" for line in lines).encode()
    flags = {flag: log[flag] for flag in ("x", "y", "where") if log[flag]}
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return read_log(file.name, range=tuple(map(float, log["range"].split())), **flags)


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


def early_fit(series: Series, part: float) -> Fit:
    """The fit of this part of the steps, made once. ValueError if there is none."""
    key = series.x.tobytes(), series.y.tobytes(), part
    if key not in FITS:
        FITS[key] = fit_sigmoid(series.x, series.y, fit_to=part * series.x[-1])
    return FITS[key]


def forecast(series: Series, part: float) -> Forecast | None:
    """The forecast from this part of the steps; None if it cannot be fitted."""
    try:
        early = early_fit(series, part)
    except ValueError:
        return None
    test = tested(early, series.x, series.y)
    low, high = test["interval"]
    errors = np.array([test[name] - test["came"] for name in FORECASTERS])
    kinds = [warning.kind for warning in early.warnings]
    return Forecast(errors, low <= test["came"] <= high, kinds)


def is_foreseeable(series: Series) -> bool:
    """Whether a run neither fell nor stayed at one value."""
    try:
        return not fit_sigmoid(series.x, series.y).fell
    except ValueError:
        return False


def error_rows(runs: list[Series]) -> list[dict]:
    """Median and root mean square of the errors, for small gains and large ones, by the part of the
    run that is fitted."""
    rows = []
    for size in ("small", "large"):
        for name in ("a quarter", "a half", "two thirds"):
            found = []
            for series in runs:
                is_small = series.y[-3:].mean() - series.y[0] < SMALL
                if is_small == (size == "small"):
                    found.append(forecast(series, PARTS[name]))
            found = [*filter(None, found)]
            errors = np.array([one.errors for one in found])
            both = zip(np.median(np.abs(errors), 0), np.sqrt((errors**2).mean(0)))
            cells = [f"{median:.4f} / {square:.4f}" for median, square in both]
            row = {"median / root mean square": f"{size}, {name}", "runs": str(len(found))}
            row |= dict(zip(FORECASTERS, cells))
            row["error"] = signed(errors[:, 0])
            rows.append(row | {"inside": percent([one.inside for one in found])})
    return rows


def signed(errors: np.ndarray) -> str:
    """The median error of a forecast, and how often it is too low."""
    return f"{np.median(errors):+.3f}, low in {percent(errors < 0)}"


def percent(shares) -> str:
    return f"{100 * np.mean(shares):.0f} %"


def warning_rows(runs: list[Series], parts: tuple[float, ...]) -> list[dict]:
    """The errors of the forecasts from these parts, by the warnings of their fits."""
    found = [*filter(None, (forecast(series, part) for series in runs for part in parts))]
    kinds = sorted({kind for one in found for kind in one.warnings})
    groups = {
        "all": found,
        "without `!`": [one for one in found if not one.warnings],
        "with `!`": [one for one in found if one.warnings],
    }
    groups |= {f"`! {kind}`": [one for one in found if kind in one.warnings] for kind in kinds}
    rows = []
    for name, group in groups.items():
        of_forecast = np.array([one.errors[0] for one in group])
        errors = np.abs(of_forecast)
        rows.append({
            "": name,
            "fits": str(len(group)),
            "error: median": f"{np.median(errors):.3f}",
            "root mean square": f"{np.sqrt(np.mean(errors**2)):.3f}",
            "errors above .05": percent(errors > 0.05),
            "error": signed(of_forecast),
            "inside": percent([one.inside for one in group]),
        })  # fmt: skip
    return rows


# --- going on -------------------------------------------------------------------------------------


def stop_rows(runs: list[Series]) -> list[dict]:
    """How often going on is called hardly worth it, and how often that is wrong."""
    names = ["a quarter", "a third", "a half"]
    fits = dict.fromkeys(names, 0)
    gains = {name: [] for name in names}
    for name, series in itertools.product(names, runs):
        try:
            fit = early_fit(series, PARTS[name])
        except ValueError:
            continue
        fits[name] += 1
        if gain_of_twice(fit)["interval"][1] < LITTLE:
            gains[name].append(gain_at_twice(series, int(np.sum(series.x <= fit.C_max))))
    stop = f"`--stop-when-gain-below {LITTLE}`"
    fits[stop] = len(runs)
    gains[stop] = []
    for series in runs:
        for n in range(2, len(series.x)):
            first = Series(series.name, series.x[:n], series.y[:n])
            if series.x[n - 1] <= 0.9 * series.x[-1] and levelled_off(first, LITTLE):
                gains[stop].append(gain_at_twice(series, n))
                break
    rows = []
    for name, came in gains.items():
        wrong = np.array(came) >= 2 * LITTLE
        cells = [name, str(fits[name]), str(len(came)), f"{wrong.sum()} ({percent(wrong)})"]
        rows.append(dict(zip(("", "runs", "stopped", "wrong"), cells)))
    return rows


def gain_at_twice(series: Series, n: int) -> float:
    """What came at twice the compute of point n, or at the end: the mean of three points around it,
    minus the mean of the last three of the first n."""
    later = np.flatnonzero(series.x <= 2 * series.x[n - 1] * 1.0001)[-1]
    return series.y[max(later - 1, n - 1) : later + 2].mean() - series.y[n - 3 : n].mean()


def main() -> None:
    (clones,) = sys.argv[1:]
    runs = public_runs(Path(clones))
    good = {
        kind: [series for log, series in runs if log["kind"] == kind and is_foreseeable(series)]
        for kind in ("validation", "training")
    }
    # A run that was copied into several studies counts once.
    ours = {}
    for path in sorted((common.ROOT / "docs" / "study").glob("*/*.jsonl")):
        (series,) = read_log(path)
        ours.setdefault((series.x.tobytes(), series.y.tobytes()), series)
    ours = [*filter(is_foreseeable, ours.values())]
    public = good["validation"]
    tables = {f"{len(found)} runs, of {kind}": error_rows(found) for kind, found in good.items()}
    tables["Is it worth going on?"] = stop_rows(public)
    for name, found in (("public", public), ("of our studies", ours)):
        for part, parts in (("the first half", (1 / 2,)), ("five parts", FIVE_PARTS)):
            tables[f"{len(found)} runs {name}, from {part}"] = warning_rows(found, parts)
    for title, rows in tables.items():
        print(f"{title}\n\n{markdown(rows)}\n")


if __name__ == "__main__":
    main()
