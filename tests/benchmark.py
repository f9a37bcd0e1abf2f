"""Measurements that are too slow for the tests.

    python tests/benchmark.py fit            # coverage of the intervals of fit_curve.py, sensitivity, speed
    python tests/benchmark.py fit --draws 50 # the same, quicker and rougher
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import fit_curve  # noqa: E402

TRUTH = {"A": 0.61, "B": 1.92, "C_mid": 2542.0, "R0": 0.40}  # ScaleRL, table 1 of the paper


def simulate(random, n, reach, noise, correlation=0.0):
    """A run with the paper's curve: validations at compute x (n + 1,) from 0 to `reach` times C_mid, with
    noise in which neighbours correlate (AR(1) of standard deviation `noise`). The first one gives R0."""
    x = np.linspace(0, reach * TRUTH["C_mid"], n + 1)
    shocks = random.standard_normal(n + 1)
    drift = shocks.copy()
    for i in range(1, n + 1):
        drift[i] = correlation * drift[i - 1] + np.sqrt(1 - correlation**2) * shocks[i]
    return x, fit_curve.sigmoid(x, **TRUTH) + noise * drift


def plain_interval(x, y):
    """The interval of A by profile likelihood alone: neighbours taken as independent, R0 as known."""
    theta, sse = fit_curve.variable_projection(x[1:], y[1:], y[0])
    excess = fit_curve.allowed_excess(sse, len(x) - 1, 3, 0.0)
    return fit_curve.profile_over_A(x[1:], y[1:], theta, sse, excess, False)[0]["A"]


def holds(interval, value):
    return interval[0] <= value <= interval[1]


def coverage(draws):
    print(f"\nHow often do 95 % intervals hold the truth? Percent of {draws} simulated runs; noise .01,\n"
          "C_max/C_mid 4, forecast at twice the last compute. Width: median width of the interval of A\n")
    print("points  correlation   A without correction     A     B  C_mid  forecast   width")
    for n in (20, 40, 75):
        for correlation in (0.0, 0.3, 0.6, 0.8):
            random, hits, widths = np.random.default_rng(0), [], []
            for _ in range(draws):
                x, y = simulate(random, n, 4, 0.01, correlation)
                f, later = fit_curve.fit(x, y), 2 * x[-1]
                hits.append([holds(plain_interval(x, y), TRUTH["A"]),
                             *(holds(f.interval[name], TRUTH[name]) for name in ("A", "B", "C_mid")),
                             holds(f.band(later), fit_curve.sigmoid(later, **TRUTH))])
                widths.append(f.interval["A"][1] - f.interval["A"][0])
            plain, A, B, C_mid, forecast = 100 * np.mean(hits, axis=0)
            print(f"{n:6}{correlation:13.1f}{plain:23.0f}{A:6.0f}{B:6.0f}{C_mid:7.0f}{forecast:10.0f}"
                  f"{np.median(widths):8.3f}", flush=True)


def identification(draws):
    print(f"\nHow far must a run go? {draws} simulated runs a line, 40 points, independent noise .01\n")
    print("C_max/C_mid   5-95 % range of fitted A   no A reported   truth above the lower bound")
    for reach in (0.7, 1.0, 1.3, 1.6, 2.0, 3.1):
        random = np.random.default_rng(0)
        fits = [fit_curve.fit(*simulate(random, 40, reach, 0.01)) for _ in range(draws)]
        low, high = np.percentile([f.A for f in fits], [5, 95])
        silent = 100 * np.mean([not f.identified for f in fits])
        above = 100 * np.mean([f.interval["A"][0] <= TRUTH["A"] for f in fits])
        print(f"{reach:11.1f}{low:20.3f} - {high:.3f}{silent:13.0f} %{above:28.0f} %", flush=True)


def sensitivity(draws):
    print(f"\nWhat do the window and R0 do? Mean over {draws} simulated runs, 75 points up to 16k, noise\n"
          ".01, true A .61 and R0 .40\n")
    print("   fitted on     R0   A of the sigmoid   of the power law   error at 16k: sigmoid   power law")
    windows = [(0, 16e3), (1500, 16e3), (0, 8e3), (1500, 8e3), (3000, 8e3)]
    for fit_from, fit_to, shift in [*((*w, 0) for w in windows), (1500, 8e3, -0.05), (1500, 8e3, 0.05)]:
        random, rows = np.random.default_rng(0), []
        for _ in range(draws):
            x, y = simulate(random, 75, 16e3 / TRUTH["C_mid"], 0.01)
            f = fit_curve.fit(x, y, TRUTH["R0"] + shift, fit_from, fit_to)
            law, truth = fit_curve.fit_power_law(f.x, f.y), fit_curve.sigmoid(16e3, **TRUTH)
            rows.append([f.A, law[0], f.predict(16e3) - truth, fit_curve.power_law(16e3, *law) - truth])
        A, law_A, error, law_error = np.mean(rows, axis=0)
        print(f"{fit_from:5} - {fit_to:5.0f}{TRUTH['R0'] + shift:7.2f}{A:19.3f}{law_A:19.3f}{error:+24.3f}"
              f"{law_error:+12.3f}", flush=True)


def speed():
    x, y = simulate(np.random.default_rng(0), 75, 6, 0.01)
    R0, later_x, later_y = y[0], x[1:], y[1:]

    def seconds(function, repeats):
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            result = function()
            times.append(time.perf_counter() - start)
        return np.median(times), result

    fast, (_, sse) = seconds(lambda: fit_curve.variable_projection(later_x, later_y, R0), 200)
    whole, _ = seconds(lambda: fit_curve.fit(x, y), 200)
    slow, (_, sse_grid) = seconds(lambda: fit_curve.paper_grid(later_x, later_y, R0), 3)
    print(f"\nSpeed, 75 points, medians: published grid through SciPy {slow:.2f} s, residual {sse_grid:.6f}\n"
          f"variable projection {1e3 * fast:.2f} ms, residual {sse:.6f}: {slow / fast:.0f} times faster\n"
          f"with intervals and warnings {1e3 * whole:.2f} ms: {slow / whole:.0f} times faster")


def benchmark_fit(options):
    coverage(options.draws)
    identification(options.draws)
    sensitivity(options.draws)
    speed()


def main():
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fit", help="coverage, sensitivity and speed of fit_curve.py")
    command.add_argument("--draws", type=int, default=400, help="simulated runs a line")
    command.set_defaults(run=benchmark_fit)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
