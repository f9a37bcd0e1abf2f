"""Make docs/public_runs.md: how public runs end beside their forecasts, and which warnings foretell
errors.

    python benchmarks/public_runs.py CLONES > docs/public_runs.md

The logs lie in six repositories. Their licences are not known, so they are no part of this
project. The repositories are cloned into the folder CLONES, if they are not there.
"""

import argparse
import io
import pickle
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np

from curve.columns import Series
from curve.fit import fit_sigmoid
from curve.forecast import FORECASTERS, LITTLE, gain_of_twice, held_out, levelled_off, reached_at
from curve.logs import packed_runs, read_log

MATH = "ShibukiZero/assignment5-alignment", "73a0f46", "artifacts/experiments/main/ch7"
GSM8K = "josancamon19/rl-scaling-laws", "cc6c4ee", "results"
VERL = "eric-haibin-lin/verl-data", "f07af32", "gsm8k"
TINY = "kanishkg/TinyZero", "ed4139f", "results"
DEQUEUEING = "dequeueing/assignment5-alignment", "bf9443a", "results"
RETU = "LINs-lab/RETU", "5fbdfcb", "analysis/flops_estimate_kit/cache/sft_then_rl"
# Steps of supervised training before RL, by its data; and the problems of each benchmark.
RETU_STARTS = {
    "easy102K": (0, 360, 720, 1080, 1440, 1800, 6120),
    "general": (360, 720, 1080, 1440, 1800, 3600, 5400, 7200, 9000, 10800, 12600, 14080),
    "hard102K": (360, 720, 1080, 1440, 1800),
    "s1K": (62, 124, 186, 248, 310),
    "uniform102K": (360, 720, 1080, 1440, 1800),
}
RETU_PROBLEMS = {
    "gsm8k": 1317,
    "olympiad_bench": 291,
    "math": 237,
    "minerva": 262,
    "aime": 25,
    "aime25": 25,
}
CONDITIONS = {
    "qwen": "base_ppo backtracking_backward only_backtracking backtracking_verification "
    "no_positive_all_strategies all_strategies empty_cot dots backtracking_subgoal",
    "llama": "backtracking_subgoal backtracking_backward only_backtracking "
    "backtracking_verification no_positive_all_strategies base_ppo all_strategies base_70b dots "
    "empty_cot owmathqa2_ppo owmathqa_none_ppo1",
}
NAMES = """
    grpo_baselines/runs/no_baseline
    grpo_baselines/runs/reinforce_with_baseline
    grpo_group_standard_deviation/runs/no_std_normalization
    grpo_group_standard_deviation/runs/std_normalization
    grpo_length_normalization/runs/batch_token_mean
    grpo_length_normalization/runs/masked_mean
    grpo_length_normalization/runs/masked_normalize
    grpo_off_policy_clip_ablation/runs/GRPO-Clip_0.20_0.20_(e2_tb256)
    grpo_off_policy_clip_ablation/runs/GRPO-Clip_0.20_0.28_(e2_tb256)
    grpo_off_policy_clip_ablation/runs/GRPO-No-Clip_(e2_tb256)
    grpo_off_policy_sweep/runs/broad_e16_tb256
    grpo_off_policy_sweep/runs/broad_e2_tb128
    grpo_off_policy_sweep/runs/broad_e2_tb256
    grpo_off_policy_sweep/runs/broad_e2_tb32
    grpo_off_policy_sweep/runs/broad_e2_tb64
    grpo_off_policy_sweep/runs/broad_e4_tb128
    grpo_off_policy_sweep/runs/broad_e4_tb256
    grpo_off_policy_sweep/runs/broad_e8_tb256
    grpo_off_policy_sweep/runs/focused_e2_tb128
    grpo_off_policy_sweep/runs/focused_e2_tb256
    grpo_off_policy_sweep/runs/focused_e4_tb256
    grpo_off_policy_sweep/runs/on_policy_reference_e1_tb256_std_norm
    grpo_prompt_ablation/runs/question_only
    grpo_prompt_ablation/runs/r1_zero_reference
    grpo_train_loop/runs/grpo_on_policy_lr1e-5
    leaderboard/runs/final_on_policy_lr4e-5_400_full_eval
    sft_kl_grpo/runs/direct_grpo_lr4e-5
    sft_kl_grpo/runs/grpo_sft256_step100_kl0p01_190
""".split()
RATES = "grpo_learning_rate/grpo_learning_rate_eval_points.csv"
LOGS = [  # repository, commit, folder, file, and the flags that read it
    *((*MATH, f"{name}/metrics.jsonl", {}) for name in NAMES),
    *(
        (*MATH, RATES, {"where": f"label=lr={rate}"})
        for rate in "3e-6 5e-6 1e-5 2e-5 3e-5 4e-5 5e-5 7e-5 2e-4".split()
    ),
    (*GSM8K, "export.csv", {"y": "all"}),
    (*VERL, "Qwen2.5-0.5B-bsz256_2-prompt512-resp256-0.538.log", {}),
    (*VERL, "Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log", {}),
    (*VERL, "gemma-2-2b-it-ppo-bsz512_4-prompt1024-resp-512-0.640.log", {}),
]
LOGS += [
    (*TINY, f"{model}_results.csv", {"where": f"condition={condition}"})
    for model, conditions in CONDITIONS.items()
    for condition in conditions.split()
]
LOGS += [
    (*DEQUEUEING, f"grpo_{name}/grpo_metrics.jsonl", {})
    for name in (
        "clip_e1 clip_e4 leaderboard length_norm lr_5e-6 lr_5e-6_full no_baseline no_std_norm_rwb "
        "noclip_e4"
    ).split()
]
LOGS += [
    (*RETU, f"{data}/{data}_step2flops2valPerform_dapo_ckpt{start}.pkl", {})
    for data, starts in RETU_STARTS.items()
    for start in starts
]
REPOSITORIES = MATH, GSM8K, VERL, TINY, DEQUEUEING, RETU
SMALL = 0.1  # a smaller gain is a small one
PARTS = 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4  # of a run's steps, from which its end is forecast


@dataclass
class Forecast:
    """What the first part of a run said of the mean of its last three points."""

    came: float
    errors: dict[str, float]  # by forecaster
    inside: bool  # whether it came inside the 95 % interval
    warnings: list[str]  # kinds, of the fit of the first part


def public_runs(clones: Path) -> tuple[dict[tuple[str, str, str], Series], dict[str, str]]:
    """The distinct curves by (repository, commit, file and flags), and by file the one that a file
    repeats."""
    runs = {}
    known = {}
    repeated = {}
    for repository, commit, folder, file, flags in LOGS:
        clone = clones / repository.replace("/", "+")
        if not clone.exists():
            url = f"https://github.com/{repository}"
            subprocess.run(
                ["git", "clone", "--quiet", "--bare", "--filter=blob:none", url, clone], check=True
            )
        show = ["git", "-C", clone, "show", f"{commit}:{folder}/{file}"]
        with tempfile.NamedTemporaryFile() as log:
            subprocess.run(show, stdout=log, check=True)
            pickled = file.endswith(".pkl")
            curves = [read_retu(Path(log.name))] if pickled else read_log(log.name, **flags)
        for series in curves:
            name = file + "".join(f" --{flag} {value}" for flag, value in flags.items())
            name = f"{file}:{series.name}" if len(curves) > 1 else name
            first = known.setdefault((series.x.tobytes(), series.y.tobytes()), name)
            if first == name:
                runs[repository, commit, name] = series
            else:
                repeated[name] = first
    return runs, repeated


class Numbers(pickle.Unpickler):
    """Reads dicts of numbers, and refuses everything else: a pickle may run any program."""

    def find_class(self, module: str, name: str):
        if (module.replace("_core", "core"), name) == ("numpy.core.multiarray", "scalar"):
            return np._core.multiarray.scalar
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        raise ValueError(f"{module}.{name} is no number")


def read_retu(log: Path) -> Series:
    """The mean pass rate of all problems over EFLOPs, of one run of RETU."""
    (curve,) = Numbers(io.BytesIO(log.read_bytes())).load().values()
    x = sorted(curve)
    y = []
    for compute in x:
        rates = {name: rate for name, rate in curve[compute].items() if name in RETU_PROBLEMS}
        number = sum(RETU_PROBLEMS[name] for name in rates)
        solved = sum(RETU_PROBLEMS[name] * rate for name, rate in rates.items())
        y.append(solved / number / 100)
    return Series(log.name, np.array(x, float), np.array(y, float), "eflops", "overall")


def forecast(series: Series, part: float) -> Forecast | None:
    """The forecast from this part of the steps; None if it cannot be fitted."""
    try:
        early = fit_sigmoid(series.x, series.y, fit_to=part * series.x[-1])
        test = held_out(series.x, series.y, fit_to=part * series.x[-1])
    except ValueError:
        return None
    low, high = test["interval"]
    came = test["came"]
    errors = {name: test[name] - came for name in FORECASTERS}
    return Forecast(came, errors, low <= came <= high, [warning.kind for warning in early.warnings])


def state(series: Series) -> str:
    """What keeps a whole run from being foreseen by a sigmoid, or ""."""
    try:
        return "fell" if fit_sigmoid(series.x, series.y).fell else ""
    except ValueError:
        return "never moved"


def errors_of(found: list[Forecast], name: str = "forecast") -> np.ndarray:
    return np.abs([each.errors[name] for each in found])


def print_table(names: list[str], rows: list[list]) -> None:
    for cells in (names, ["---"] * len(names), *rows):
        print(f"| {' | '.join(map(str, cells))} |".replace("  ", " "))


def root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(errors**2)))


def run_row(name: str, series: Series) -> list:
    """The line of a run in the table of all runs."""
    found = forecast(series, 1 / 2)
    how = state(series)
    figures = (
        [f"{found.came:.3f}", *(f"{error:+.3f}" for error in found.errors.values())]
        if found
        else ["-"] * 5
    )
    said = [how] * bool(how) + ([f"! {kind}" for kind in found.warnings] if found else [])
    return [f"`{name}`", len(series.x), *figures, "; ".join(said)]


def gain(series: Series) -> float:
    return series.y[-3:].mean() - series.y[0]


def error_rows(series: list[Series]) -> list[list]:
    """Median and root mean square of the errors, for small gains and large ones, by the part of the
    run that is fitted."""
    rows = []
    for name, small in (("small", True), ("large", False)):
        chosen = [each for each in series if (gain(each) < SMALL) == small]
        for part, text in ((1 / 4, "a quarter"), (1 / 2, "a half"), (2 / 3, "two thirds")):
            found = [each for one in chosen if (each := forecast(one, part))]
            cells = []
            for by in FORECASTERS:
                errors = errors_of(found, by)
                cells.append(f"{np.median(errors):.4f} / {root_mean_square(errors):.4f}")
            inside = np.mean([each.inside for each in found])
            rows.append([f"{name}, {text}", len(found), *cells, f"{100 * inside:.0f} %"])
    return rows


def stop_rows(series: list[Series]) -> list[list]:
    """How often going on is called hardly worth it, and how often that is wrong."""
    rows = []
    for part, text in ((1 / 4, "a quarter"), (1 / 3, "a third"), (1 / 2, "a half")):
        gains = []
        fits = 0
        for each in series:
            try:
                fit = fit_sigmoid(each.x, each.y, fit_to=part * each.x[-1])
            except ValueError:
                continue
            fits += 1
            if gain_of_twice(fit)["gain"] < LITTLE:
                gains.append(gain_at_twice(each, len(each.x[each.x <= fit.C_max])))
        rows.append([f"at {text}", fits, len(gains), share_wrong(gains)])
    gains = []
    saved = []
    for each in series:
        for n in range(2, len(each.x)):
            first = Series(each.name, each.x[:n], each.y[:n])
            if each.x[n - 1] <= 0.9 * each.x[-1] and levelled_off(first, LITTLE):
                gains.append(gain_at_twice(each, n))
                saved.append(1 - each.x[n - 1] / each.x[-1])
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
    return f"{sum(each >= 2 * LITTLE for each in gains)} ({100 * wrong:.0f} %)"


def reach_rows(series: list[Series]) -> list[list]:
    """Pass rates that were reached later: how often --reach holds the compute in its interval, and
    how often it says that they are surely not reached, or perhaps not."""
    rows = []
    for times in (1.2, 1.5, 2, 3):
        found = []
        for each in series:
            level = np.convolve(each.y, np.ones(3) / 3, "valid")  # means of three neighbours
            x = each.x[1:-1]
            for part in (1 / 4, 1 / 3, 1 / 2):
                try:
                    fit = fit_sigmoid(each.x, each.y, fit_to=part * each.x[-1])
                except ValueError:
                    continue
                if times * fit.C_max > x[-1]:
                    continue
                wanted = level[np.searchsorted(x, times * fit.C_max)]
                if wanted > fit.y[-3:].mean() + 0.005:
                    reached = x[(x > fit.C_max) & (level >= wanted)][0]
                    answer = reached_at(fit, wanted)
                    low, high = (end or np.inf for end in answer["interval"])
                    never = answer["x"] is None
                    found.append((low <= reached <= high, np.isinf(low), never))
        shares = [f"{100 * share:.0f} %" for share in np.mean(found, axis=0)]
        rows.append([f"at {times} times the compute", len(found), *shares])
    return rows


def warning_rows(found: list[Forecast]) -> list[list]:
    kinds = sorted({kind for each in found for kind in each.warnings})
    groups = {
        "all": found,
        "without `!`": [each for each in found if not each.warnings],
        "with `!`": [each for each in found if each.warnings],
        **{f"`! {kind}`": [each for each in found if kind in each.warnings] for kind in kinds},
    }
    rows = []
    for name, group in groups.items():
        error = errors_of(group)
        shares = np.mean(error > 0.05), np.mean([each.inside for each in group])
        figures = (
            f"{np.median(error):.3f}",
            f"{root_mean_square(error):.3f}",
            *(f"{100 * share:.0f} %" for share in shares),
        )
        rows.append([name, len(group), *figures])
    return rows


HEAD = """# Public runs

Made by `python benchmarks/public_runs.py CLONES > docs/public_runs.md`. It clones six \
repositories and reads their
logs as `python fit_curve.py LOG` does. Their licences are not known, so the logs are not \
shipped here.

## The runs

The outcome is the mean of the last three points. An error is a forecast from the first half of \
the steps, minus the
outcome. A line with `!` names the warnings of the fit of the first half."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clones", type=Path, help="the folder of the clones")
    runs, repeated = public_runs(parser.parse_args().clones)
    print(HEAD)
    for repository, commit, folder in REPOSITORIES:
        print(f"\n`{repository}`, commit `{commit}`, folder `{folder}`:\n")
        rows = [run_row(name, series) for (of, _, name), series in runs.items() if of == repository]
        names = ["error: forecast", "sigmoid", "power law", "last value"]
        print_table(["file", "points", "outcome", *names, ""], rows)
    print("\nThese files hold a curve again, which counts once:\n")
    print_table(
        ["file", "the same as"], [[f"`{name}`", f"`{first}`"] for name, first in repeated.items()]
    )

    good = [series for series in runs.values() if not state(series)]
    print("\n## Errors of the forecast\n")
    print(
        f"The {len(good)} runs that neither fell nor stayed at one value. A gain is small below "
        f"{SMALL}. It is the\noutcome minus the first point. The part of the steps is fitted:\n"
    )
    names = ["forecast", "sigmoid", "power law", "last value"]
    print_table(["median / root mean square", "runs", *names, "inside"], error_rows(good))
    print(STOPPING)
    print_table(["", "runs", "stopped", "wrong"], stop_rows(good))
    print(REACHING)
    print_table(["", "pass rates", "inside", "surely not", "perhaps not"], reach_rows(good))

    study = common.ROOT / "docs" / "study"
    packed = sorted(
        f"{folder}/{run}"
        for folder in study.iterdir()
        if folder.is_dir()
        for run in packed_runs(folder)
    )
    ours = [series for path in packed for series in read_log(path) if not state(series)]
    print(WARNINGS)
    for name, chosen in (("public runs", good), ("runs of our [studies](study.md)", ours)):
        for text, parts in (("the first half", (1 / 2,)), ("five parts", PARTS)):
            found = [
                each for series in chosen for part in parts if (each := forecast(series, part))
            ]
            print(f"\n{len(chosen)} {name}, from {text}:\n")
            columns = [
                "",
                "fits",
                "error: median",
                "root mean square",
                "errors above .05",
                "inside",
            ]
            print_table(columns, warning_rows(found))


if __name__ == "__main__":
    main()
