"""Make docs/public_runs.md: how public runs end beside their forecasts, and which warnings foretell
errors.

    python benchmarks/public_runs.py CLONES > docs/public_runs.md

The logs lie in three repositories. Their licences are not known, so they are no part of this
project. The repositories are cloned into the folder CLONES, if they are not there.
"""

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import common
import numpy as np

from curve.columns import Series
from curve.fit import fit_sigmoid
from curve.forecast import FORECASTERS, held_out
from curve.logs import packed_runs, read_log

MATH = "ShibukiZero/assignment5-alignment", "73a0f46", "artifacts/experiments/main/ch7"
GSM8K = "josancamon19/rl-scaling-laws", "cc6c4ee", "results"
VERL = "eric-haibin-lin/verl-data", "f07af32", "gsm8k"
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
            curves = read_log(log.name, **flags)
        for series in curves:
            name = file + "".join(f" --{flag} {value}" for flag, value in flags.items())
            name = f"{file}:{series.name}" if len(curves) > 1 else name
            first = known.setdefault((series.x.tobytes(), series.y.tobytes()), name)
            if first == name:
                runs[repository, commit, name] = series
            else:
                repeated[name] = first
    return runs, repeated


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


def errors_of(found: list[Forecast], name: str = "sigmoid") -> np.ndarray:
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
        else ["-"] * 4
    )
    said = [how] * bool(how) + ([f"! {kind}" for kind in found.warnings] if found else [])
    return [f"`{name}`", len(series.x), *figures, "; ".join(said)]


def error_rows(series: list[Series]) -> list[list]:
    rows = []
    measures = {"median": np.median, "root mean square": root_mean_square}
    for least in (0, 14):
        found = [forecast(each, 1 / 2) for each in series if len(each.x) >= least]
        chosen = f"the {len(found)} with {least} points or more" if least else f"{len(found)} runs"
        for figure, measure in measures.items():
            errors = [measure(errors_of(found, name)) for name in FORECASTERS]
            rows.append([f"{chosen}: {figure}", *(f"{error:.3f}" for error in errors)])
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

Made by `python benchmarks/public_runs.py CLONES > docs/public_runs.md`. It clones three \
repositories and reads their
logs as `python fit_curve.py LOG` does. Their licences are not known, so the logs are not \
shipped here.

## The runs

The outcome is the mean of the last three points. An error is a forecast from the first half of \
the steps, minus the
outcome. A line with `!` names the warnings of the fit of the first half."""
WARNINGS = """
## Which warnings foretell errors

The error of the sigmoid's forecast, by the warnings of the fit that it comes from. "Inside" \
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
    for repository, commit, folder in (MATH, GSM8K, VERL):
        print(f"\n`{repository}`, commit `{commit}`, folder `{folder}`:\n")
        rows = [run_row(name, series) for (of, _, name), series in runs.items() if of == repository]
        print_table(
            ["file", "points", "outcome", "error: sigmoid", "power law", "last value", ""], rows
        )
    print("\nThese files hold a curve again, which counts once:\n")
    print_table(
        ["file", "the same as"], [[f"`{name}`", f"`{first}`"] for name, first in repeated.items()]
    )

    good = [series for series in runs.values() if not state(series)]
    print("\n## Errors of the forecast\n")
    print(f"The {len(good)} runs that neither fell nor stayed at one value:\n")
    print_table(["", "sigmoid", "power law", "last value"], error_rows(good))

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
