"""Many runs from one command, and what they show: the studies of the paper, or one of your own.

    python -m tools.study loo --seeds 0 1 2 --jobs 2    # ScaleRL, and ScaleRL without each of its
                                                        # eight parts; two runs at once
    python -m tools.study recipes                       # the six recipes
    python -m tools.study asynchrony                    # PipelineRL-1, -4, -8, -16,
                                                        # PPO-off-policy-1 and -8
    python -m tools.study mine.json --steps 80          # variants of your own; any flag of train.py
                                                        # is for all runs
    python -m tools.study tables runs/loo               # the tables and figures alone, at any time

A study compares variants of a run. A file of your own names them, with the fields of Settings
(core/settings.py) and Recipe (loss.py) that each changes: {"small": {"prompts_per_step": 16},
"gspo": {"loss": "gspo", "eps_high": 0.01}}. Each run is `train.py` in a process of its own, with
the folder runs/STUDY/VARIANT-seedN. tables.md and compare.png are made from the logs alone.
"""

import contextlib
import io
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import fit_curve
from core.processes import SIGNALS
from core.screen import say
from core.settings import ROOT, cpu_threads, parse, read_settings, refuse_small_numbers, resumed
from curve.files import read_text, write_whole
from curve.flags import flag, option, read_flags, run_command
from machinery.folder import finished, lock_folder

# --- which runs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """Train several variants over seeds. What is finished is not trained again, and what was
    interrupted goes on."""

    study: str = option(
        help="loo, recipes, asynchrony, losses, batch, groups,"
        ' or a JSON file: {"NAME": {"learning_rate": 4e-4}, ...}'
    )
    seeds: tuple[int, ...] = option((0, 1, 2), "each variant is trained with each")
    jobs: int = option(1, "runs at once, which share the cores")
    name: str | None = option(
        None,
        "the folder is runs/NAME, or NAME if it begins with a /, with a folder VARIANT-seedN a run;"
        " by default named as the study",
    )


# The variants of each study by name, and what each changes: fields of Settings or of its Recipe.
# `batch` has as many groups in all, and `groups` as many completions in a step, as the default run.
STUDIES = json.loads(Path(__file__).with_name("studies.json").read_text())
OF_ONE_RUN = {"name", "seed", "resume", "from-step"}


def read_study(study: str) -> dict[str, dict]:
    """The changes of each variant of a study, by name. ValueError if it is not a study."""
    try:
        variants = STUDIES.get(study) or json.loads(read_text(Path(study)))
        for name, changes in variants.items():
            if not re.fullmatch(r"[\w.+-]+", name) or not isinstance(changes, dict):
                raise ValueError(f"{name!r} is no name of a folder, or names no fields")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{study}: neither {', '.join(STUDIES)}, tables FOLDER nor a JSON file"
            f' {{"NAME": {{"field": value, ...}}, ...}} ({error})'
        ) from None
    return variants


def flags_for(changes: dict) -> list[str]:
    """The flags of train.py that set these fields."""
    arguments = []
    for name, value in changes.items():
        if isinstance(value, bool):
            arguments.append(flag(name if value else f"no_{name}"))
        else:
            values = value if isinstance(value, list) else [value]
            arguments += [flag(name), *map(str, values)]
    return arguments


def runs_to_train(study: Study, place: str, common: list[str]) -> dict[Path, list[str]]:
    """The flags of train.py for each run of a study, by its folder, which is within runs/PLACE.
    common: flags for all runs. ValueError if a run is impossible, or if its folder holds another
    run."""
    refuse_small_numbers(study)
    runs = {}
    for seed, (variant, changes) in itertools.product(study.seeds, read_study(study.study).items()):
        name = f"{place}/{variant}-seed{seed}"
        folder = Path("runs") / name
        own = flags_for(changes)
        of_run = {"keep_checkpoints": 1, "rollouts_kept": 0, "name": name, "seed": seed}
        arguments = flags_for(of_run) + common + own
        try:
            twice = fields_of(common) & fields_of(own)
            for field in twice | OF_ONE_RUN & fields_of(common + own):
                raise ValueError(f"the study sets --{field} itself: it is no flag for all runs")
            settings = parse(arguments)
            if (folder / "config.json").exists():
                resumed(read_settings(folder), settings)  # refused, if another run lies there
        except ValueError as error:
            raise ValueError(f"variant {variant!r} of {study.study}, {folder}: {error}") from None

        # Runs at once share the cores. A run that goes on has what no flag says from its
        # config.json: when it ends is said here.
        said = {
            "threads": settings.threads or max(1, cpu_threads(settings) // study.jobs),
            "steps": settings.steps,
            "stop_when_gain_below": settings.stop_when_gain_below,
        }
        runs[folder] = arguments + flags_for(said)
    return runs


def fields_of(arguments: list[str]) -> set[str]:
    """The fields that these flags set, as in --fp32-logits and --no-fp32-logits."""
    return {re.sub("^--(no-)*|=.*", "", text) for text in arguments if text.startswith("--")}


# --- training -------------------------------------------------------------------------------------


def start_run(folder: Path, arguments: list[str]) -> subprocess.Popen:
    """Start a run in a process of its own, or go on with it if it was interrupted. Its output is in
    FOLDER.txt. The signals of the terminal do not reach it: the study passes them on."""
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    if (folder / "config.json").exists():
        command += ["--resume", str(folder)]
    with open(f"{folder}.txt", "a") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def train_all(runs: dict[Path, list[str]], jobs: int) -> bool:
    """Train all runs that are not finished, `jobs` at once. Returns whether one failed.
    KeyboardInterrupt after a signal, which stops the runs, each with a checkpoint."""
    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:  # not ignored, as by `nohup`
            signal.signal(number, signal.default_int_handler)
    waiting = [
        folder for folder, arguments in runs.items() if not finished(folder, parse(arguments))
    ]
    running = {}  # the process of each run, by folder
    failed = False
    try:
        while running or waiting:
            while waiting and len(running) < jobs:
                folder = waiting.pop(0)
                say(f"{folder} begins, {len(runs) - len(waiting)} of {len(runs)}: see {folder}.txt")
                running[folder] = start_run(folder, runs[folder])
            time.sleep(0.5)
            ended = [folder for folder, run in running.items() if run.poll() is not None]
            for folder in ended:
                if running.pop(folder).returncode:
                    failed = True
                    say(f"error: {folder} failed: {last_line(folder)} ({folder}.txt has all)")
    finally:
        if running:
            say("Stopping the runs; the same command goes on.")
        for run in running.values():
            run.terminate()  # SIGTERM, which nobody has ignored for it
        for run in running.values():
            run.wait()
    return failed


def last_line(folder: Path) -> str:
    """The last line that a run has printed."""
    return read_text(Path(f"{folder}.txt")).strip().split("\n")[-1]


# --- the command ----------------------------------------------------------------------------------


def make_tables(folder: str, *flags: str) -> None:
    """Fit and compare all runs of a study. What fit_curve prints of them is kept in tables.md, and
    its picture in compare.png, in its folder. flags: of fit_curve."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        fit_curve.main(["--compare", folder, "--plot", f"{folder}/compare.png", *flags])
    write_whole(Path(folder, "tables.md"), printed.getvalue())
    print(printed.getvalue(), end="")


def main(arguments: list[str]) -> bool:
    """The command. Returns whether a run failed."""
    if arguments[:1] == ["tables"] and len(arguments) > 1:
        make_tables(*arguments[1:])
        return False
    study, common = read_flags(Study, arguments, description=__doc__, others=True)
    place = study.name or Path(study.study).stem
    runs = runs_to_train(study, place, common)
    folder = Path("runs") / place
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        failed = train_all(runs, study.jobs)
    try:
        make_tables(str(folder))
    except ValueError as error:  # the runs have failed, or are too short
        say(f"no tables: {error}")
    return failed


if __name__ == "__main__":
    run_command(main)
