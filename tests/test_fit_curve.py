"""fit_curve.py: the curve, its intervals, what it refuses to say, and the command."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from curves import curve, fit_of, run_of
from faults import python
from fit import intervals_that_hold
from programs import rows
from scipy.optimize import least_squares

import fit_curve
from curve.fit import fit_series, fit_sigmoid, power_law, sigmoid
from curve.forecast import (
    forecasts,
    gain_of_twice,
    levelled_off,
)
from curve.least_squares import fit_power_law
from curve.logs import Series
from curve.report import report

SCRIPT = Path(fit_curve.__file__)


# --- the curve ------------------------------------------------------------------------------------


def test_recovers_the_parameters_of_exact_curves():
    """The first one is that of batch 2048 in table 1 of the paper, over GPU-hours."""
    published = 0.645, 1.70, 10909, 0.40
    for first in (5000, 0):  # before training is 0
        x = np.linspace(first, 65_000, 40)
        fit = fit_sigmoid(x, sigmoid(x, *published))
        assert np.allclose((fit.A, fit.B, fit.C_mid, fit.R0), published, rtol=1e-4)
        assert fit.identified and np.ptp(fit.interval["A"]) < 1e-4
    law = 0.8, 20, 0.5
    assert fit_power_law(x[1:], power_law(x[1:], *law)) == pytest.approx(law, rel=1e-3)


def test_fit_window_degrees_of_freedom_and_source_of_R0():
    x, y = run_of()
    fit = fit_sigmoid(x, y, fit_from=100, fit_to=400)
    assert (fit.C_min, fit.C_max, fit.R0) == (105, 390, y[0])
    assert fit_sigmoid(x, y, 0.25).interval["R0"] == (0.25, 0.25)
    assert [fit_sigmoid(x[:5], y[:5], r0).degrees for r0 in ("first", "free", 0.2)] == [1, 1, 1]


# The first two of four points, and the wrong one.
NO_CURVE = """
-1 0.1 1 0.2 | x = -1, y = 0.1
0 0.1 0 0.3 | x = 0, y = 0.3
0 0.1 1 1.1 | x = 1, y = 1.1
0 0.1 1 -0.1 | x = 1, y = -0.1
0 0.1 1 nan | x = 1, y = nan
"""


def test_what_is_no_curve_is_refused():
    for points, words in rows(NO_CURVE):
        x0, y0, x1, y1 = map(float, points.split())
        with pytest.raises(ValueError, match=words):
            fit_sigmoid([x0, x1, 2, 3], [y0, y1, 0.3, 0.4])


# --- the intervals --------------------------------------------------------------------------------


def test_intervals_are_those_of_scipy():
    """With A held at an end of its interval, the squared error is the least plus the allowed
    excess, which is larger if neighbours correlate. With A held at its value, B and C_mid have the
    usual errors, widened by Student's t and by the correlation."""
    fit = fit_sigmoid(*run_of(noise=0.015, correlation=0.6), 0.2)
    r = fit.correlation
    assert r > 0.3
    wider = (1 + r) / (1 - r)
    residuals = lambda theta, A: sigmoid(fit.x, A, *np.exp(theta), 0.2) - fit.y
    best = lambda A: least_squares(residuals, np.log([fit.B, fit.C_mid]), args=(A,))
    excess = fit.squares / 37 * 2.026192**2 * wider  # t of 37 degrees of freedom
    for end in fit.interval["A"]:
        assert (2 * best(end).cost - fit.squares) / excess == pytest.approx(1, rel=0.12)
    held = best(fit.A)
    variances = np.linalg.inv(held.jac.T @ held.jac).diagonal() * 2 * held.cost / 38 * wider
    (found,), (errors,) = fit.efficiency_at([fit.A])
    assert found == pytest.approx(held.x, rel=1e-4)
    # t of 38 degrees of freedom, and none but the normal's.
    assert errors == pytest.approx(2.024394 / 1.959964 * np.sqrt(variances), rel=1e-3)


def test_intervals_hold_the_truth_over_many_draws():
    """Correlated neighbours, noisy R0. At 95 %, fewer than 33 of 40 hold the truth less than once
    in 1,000."""
    assert intervals_that_hold(40, points=60, correlation=0.4).sum(0).min() >= 33


# --- what the data does not carry -----------------------------------------------------------------


# A run, its first warning, and whether its A is identified. At 3 C_mid a curve with B = .6 has made
# 66 % of its gain; at 1.45 C_mid one with B = 3 has made 75 %.
WARNED = """
n=60, fall=(400, 0) | ^collapse: .* --fit-to | False
n=60, fall=(500, 0.55) | decline: | False
n=60, A=0.3, R0=0.3 | ^no rise: | False
B=0.6, last=300, noise=0.001 | ^A is not identified: .* 6[56] % .* A > 0.6 | False
B=3, last=145, noise=0.001 | ^short: .* 7[45] % | True
n=21, noise=0.06 | ^A is not identified: 20 points .* 0.0 | False
n=6 | ^few points: .* 5 points: .*: 2$ | True
noise=0.003 | ^$ | True
n=161, noise=0.06 | | True
"""


def test_what_the_data_does_not_carry_is_a_warning():
    for run, words, identified in rows(WARNED):
        fit = fit_of(**curve(run))
        assert re.search(words, " ".join(map(str, fit.warnings))), run
        assert str(fit.identified) == identified, run
    assert fit_of(A=1.15, B=1.5, C_mid=200, last=400, noise=0).A == pytest.approx(1)


# --- forecasts, and whether it is worth going on --------------------------------------------------


def test_the_forecast_is_a_median_if_the_points_do_not_bend():
    """If they do, it is the sigmoid, as the README shows."""
    x = np.linspace(10, 600, 30)
    fit = fit_sigmoid(x, 0.5 + 0.05 * np.log10(x) + 0.01 * np.sin(7 * x))
    found = forecasts(fit, 1200.0)
    log_x = np.log(x)
    slope, _ = np.polyfit(log_x[15:], fit.y[14:], 1)
    trend = fit.y[-4:].mean() + slope / 2 * (np.log(1200) - log_x[-4:].mean())
    least, middle, most = sorted([found["sigmoid"], found["power_law"], trend])
    assert found["forecast"] == pytest.approx(middle)
    low, high = found["interval"]
    assert low < least and most < high
    # Where A is identified it is the sigmoid, or it might lie above A.
    for fit in filter(lambda fit: fit.identified, (fit_of(n=11, seed=seed) for seed in range(9))):
        found = forecasts(fit, 1200.0)
        assert found["forecast"] == found["sigmoid"]


# A run, and what is said.
GOING_ON = """
A=0.9, last=3000, noise=0.002 | hardly worth it
A=0.9, last=100, noise=0.005 | : worth it
A=0.9, last=150, n=9, noise=0.05 | cannot tell
"""


def test_going_on_is_judged_only_if_its_interval_allows_it():
    """+.144 [-.521, +.479] was called worth it."""
    for run, words in rows(GOING_ON):
        going_on = gain_of_twice(fit_of(**curve(run)))
        low, high = going_on["interval"]
        assert words in going_on["sentence"]
        assert (words == "cannot tell") == (low < 0.02 <= high)


def test_a_forecast_shows_its_record():
    x, y = run_of(n=61, noise=0.004)
    fit = fit_series(Series("run", x, y))
    record = report(fit)["record"]
    assert [test["fit_to"] for test in record] == [150, 300, 450]
    for test in record:
        early = fit_sigmoid(x, y, fit_to=test["fit_to"])
        assert test["forecast"] == pytest.approx(forecasts(early, x[-3:])["forecast"], abs=1e-3)
        assert test["missed_by"] == test["forecast"] - y[-3:].mean()


def test_residuals_larger_than_the_noise_of_a_validation_are_warned_of():
    """.028 beside .014 was said by nobody."""
    x, y = run_of(noise=0.02)
    for number, warned in ((10_000, True), (500, False)):
        fit = fit_series(Series("run", x, y, num_examples=number))
        assert ("scatter" in [warning.kind for warning in fit.warnings]) == warned


# A run, and whether twice the compute would surely gain less than .02.
LEVEL = """
True | A=0.9, B=2, n=31, last=3000, noise=0.002
False | A=0.9, B=2, n=31, last=3000, noise=0.002, fall=(2500, 0.3)
False | A=0.9, B=2, n=31, last=3000, noise=0.03
False | A=0.9, B=2, n=9, last=3000, noise=0.002
False | A=0.9, B=1, C_mid=300
False | A=0.2
"""


def test_a_run_that_has_levelled_off_is_told_from_one_that_may_still_climb():
    for level, run in rows(LEVEL):
        series = Series(run, *run_of(**curve(run)))
        assert str(levelled_off(series, 0.02)) == level, run
        assert not levelled_off(series, 0.0001)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def results_of(here, capsys):
    """Runs the command in an empty folder: returns what it prints, and what --json writes."""

    def run(arguments):
        fit_curve.main([*shlex.split(arguments), "--json", "out.json"])
        return capsys.readouterr().out, json.loads(Path("out.json").read_text())

    return run


def write_csv(path, *columns, header="compute_flops,pass_rate"):
    np.savetxt(path, np.transpose(columns), "%.17g", ",", header=header, comments="")


def write_seeds(name, **curve):
    """Writes three simulated runs; returns NAME=LOG,LOG,LOG."""
    logs = [f"{name}{seed}.csv" for seed in range(3)]
    for seed, log in enumerate(logs):
        write_csv(log, *run_of(**curve, seed=seed))
    return f"{name}={','.join(logs)}"


def test_a_log_is_fitted_reported_and_drawn(results_of):
    x, y = run_of()
    write_csv("log.csv", x, y, np.full(41, 500), header="step,acc,num_examples")
    how = "--predict 1000 300 --fit-to 500 --plot p.svg"
    text, results = results_of(f"log.csv {how}")
    (run,) = results["runs"]
    fit = fit_sigmoid(x, y, fit_to=500)
    assert (run["A"], run["fit_window"], run["n_points"]) == (fit.A, [x[1], 495], 33)
    later, inside, _ = run["forecast"]
    assert (later["x"], inside["interval"]) == (1000, pytest.approx(fit.band(300.0)))
    assert run["going_on"]["sentence"] in text
    assert [test["fit_to"] for test in run["record"]] == [495]  # the points after --fit-to
    picture = Path("p.svg").read_text()  # in which text stays text
    for drawn in "compute (step), pass rate (acc), 95 % of 500 answers, asymptote A 0.7".split(
        ", "
    ):
        assert drawn in picture

    # Of a collapse nothing is drawn that it does not show.
    write_csv("fallen.csv", *run_of(fall=(400, 0)))
    results_of("fallen.csv --plot c.svg")
    picture = Path("c.svg").read_text()
    assert "fitted curve" in picture and not re.search("forecast|asymptote|R0 ", picture)


def test_variants_are_compared_with_the_first(results_of):
    """Three seeds of each; one variant does not identify A, and a seed of another fell."""
    high = write_seeds("_$high", A=0.75)
    less = write_seeds("low", A=0.65)
    short = write_seeds("short", last=90.0)
    write_csv("fell.csv", *run_of(A=0.75, fall=(500, 0.2)))
    _, results = results_of(f"--compare '{high},fell.csv' {less} {short} --plot c.svg")
    _, second, third = results["variants"]
    assert second["verdict"] == "_$high raises the ceiling"
    assert third["A"] == {"estimate": None, "text": "not identified by 3 of 3 runs"}
    low, A, high = sorted(second["A"]["estimate"])
    assert low < A < high and third["B"] is None
    run = results["runs"][-1]
    assert run["A"] is run["B"] is run["C_mid"] is None and run["interval"]["A"][0] < 0.7
    assert run["warnings"][0].keys() == {"kind", "text"}

    # $ begins a formula in matplotlib, and _ hides a label.
    picture = Path("c.svg").read_text()
    drawn = " _$high: A 0.7", "_$high raises the ceiling", "compute (FLOPs)", "3 variants, 10 runs"
    assert all(text in picture for text in drawn)


def test_a_run_that_cannot_be_fitted_is_named_and_left_out(results_of):
    """A seed of a variant, or a variant by itself: the verdict is that of the others."""
    write_csv("bad.csv", np.arange(9), np.full(9, 0.3))
    good = write_seeds("good")
    low = write_seeds("low", A=0.5)
    verdicts = set()
    for logs in (f"{good} {low}", f"{good} {low} bad=bad.csv", f"{good},bad.csv {low}"):
        verdict, *left_out = results_of(f"--compare {logs}")[0].strip().split("\n\n")[2:]
        verdicts.add(verdict)
    assert verdicts == {verdict}
    assert "good raises the ceiling" in verdict
    assert left_out[0].startswith("left out, since it gives no curve: bad.csv: pass_rate: the ")


def test_folders_columns_and_equal_names_are_told_apart(results_of):
    def variants(arguments):
        return [row["variant"] for row in results_of(arguments)[1]["variants"]]

    x, y = run_of()
    for name in ("scalerl-seed0", "a-seed0-low", "k9-seed0", "k10-seed0"):
        Path("study", name).mkdir(parents=True)
        write_csv(f"study/{name}/progress.csv", x, y)
    assert variants("study") == ["scalerl", "a-seed0-low", "k9", "k10"]
    # Two studies may have variants of one name, and two logs too.
    shutil.copytree("study", "again")
    assert variants("--compare study again")[3:5] == ["study/k10", "again/scalerl"]
    for folder in ("study", "again"):
        write_csv(f"{folder}/log.csv", x, y, y / 2, header="step,val/a,val/b")
    logs = "study/log.csv again/log.csv"
    assert variants(f"{logs} --y val/a") == ["val/a", "again/log.csv: val/a"]
    # Columns of one log are no seeds of each other.
    both = f"--compare base={logs.replace(' ', ',')} --y val/a,val/b"
    assert variants(both) == ["base: val/a", "base: val/b"]
    # The seeds in a log are seeds of its variant, and of none by default.
    seeds = np.repeat([1, 2], len(x))
    write_csv("seeds.csv", seeds, np.tile(x, 2), np.tile(y, 2), header="seed,hours,val/a")
    for arguments in ("seeds.csv", "--compare seeds.csv study/log.csv", "--compare n=seeds.csv"):
        _, results = results_of(f"{arguments} --y val/a")
        assert int(results["variants"][0]["runs"]) == 2
    # Nor are steps hours.
    write_csv("hours.csv", x, y, header="hours,val/a")
    text, _ = results_of("--compare study/log.csv hours.csv --y val/a")
    assert "! compute is step and hours: the comparison says nothing" in text


# Flags, and what is named.
REFUSED = """
missing.csv | missing.csv
 | LOGS
--compare a= b=log.csv | 'a='
--compare 3.csv 4.csv | 3.csv 2 4.csv 3
log.csv --predict 1e400 | finite
log.csv --predikt 3 | --predikt --predict
log.csv --r0 second | --r0 'second'
log.csv --r0 -1 | R0 -1
log.csv --fit-from 1e9 | 0 of 41
log.csv --plot no/such/folder.png | no/such/folder.png
log.csv --plot picture.xyz | 'xyz'
log.csv --x pass_rate | --x
log.csv --range 0 0.1 | --range 2.01257
"""


def test_bad_arguments_are_refused(here, capsys):
    write_csv("log.csv", *run_of())
    for n in (3, 4):
        write_csv(f"{n}.csv", np.arange(n), np.linspace(0.1, 0.4, n))
    for arguments, words in rows(REFUSED):
        with pytest.raises((ValueError, OSError)) as error:
            fit_curve.main(shlex.split(arguments))
        assert all(word in str(error.value) for word in words.split()), error.value
    assert capsys.readouterr().out == ""


# --- as a process ---------------------------------------------------------------------------------

# The other requirements, and modules that Windows lacks, are hidden.
HIDE = """
import sys
for name in HIDDEN | set("fcntl resource pwd grp termios tty pty".split()):
    sys.modules[name] = None
"""


def test_it_runs_with_numpy_scipy_and_matplotlib_alone(tmp_path):
    required = re.findall(r"(?m)^[\w-]+", SCRIPT.with_name("requirements.txt").read_text())
    hidden = {name.replace("-", "_") for name in required} - {"numpy", "scipy", "matplotlib"}
    for name in ("fit_curve.py", "curve", "data", "docs"):
        (tmp_path / name).symlink_to(SCRIPT.with_name(name))
    (tmp_path / "sitecustomize.py").write_text(HIDE.replace("HIDDEN", str(hidden)))

    def run(*arguments):
        done = python(*arguments, folder=tmp_path, PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    modules = "import sys, fit_curve; print(sys.modules['torch'], *sys.modules)"
    hidden, *loaded = run("-c", modules).split()
    assert hidden == "None"
    assert not {"matplotlib", "scipy.stats", "scipy.optimize"} & set(loaded)
    commands = re.findall(r"(?m)^    python ([^#\n]+)", fit_curve.__doc__)[:3]
    of_example, *others = (run(*shlex.split(line)) for line in commands)
    assert of_example in SCRIPT.with_name("README.md").read_text()
    assert all(" A " in printed for printed in others)
    assert (tmp_path / "fit.png").read_bytes()[:4] == b"\x89PNG"


def test_a_reader_of_the_output_that_ends_is_no_error():
    """`python fit_curve.py LOG | head -1`"""
    log = SCRIPT.with_name("data") / "examples" / "simulated.csv"
    pipe = subprocess.PIPE
    run = subprocess.Popen([sys.executable, SCRIPT, log], stdout=pipe, stderr=pipe)
    run.stdout.close()
    assert run.wait() == 141
    assert run.stderr.read() == b""
