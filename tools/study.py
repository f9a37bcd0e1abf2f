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
import dataclasses
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
import loss
from core.screen import Progress, say
from core.settings import Settings, cpu_threads, parse, read_settings, refuse_changes
from curve.files import write_whole
from curve.flags import HELP, flag, option, read_flags, run_command
from machinery.folder import checkpoints, last_line, lock_folder, step_of

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
        "the folder is runs/NAME, with a folder VARIANT-seedN a run; by default named as the study",
    )


# The variants of each study by name, and what each changes: fields of Settings or of its Recipe.
STUDIES = {
    "loo": {"scalerl": {}}
    | {f"without-{axis}": {"leave_out": axis} for axis in loss.Axis.__args__},
    "recipes": {recipe: {"recipe": recipe} for recipe in loss.RECIPES},
    "asynchrony": {
        asynchrony: {"asynchrony": asynchrony}
        for asynchrony in "pipeline-1 pipeline-4 pipeline-8 pipeline-16 ppo-1 ppo-8".split()
    },
    "losses": {"scalerl": {}, "tis": {"eps_max": 2.0}}
    | {name: {"loss": name} for name in loss.LOSSES if name != "cispo"}
    | {"norm-mean": {"advantage_norm": "mean"}, "mask-sequences": {"mask_sequences": True}},
    # As many groups in all, and as many completions in a step, as the default run has.
    "batch": {
        f"prompts-{n}": {"prompts_per_step": n, "steps": 5120 // n, "validation_every": 256 // n}
        for n in (8, 16, 32, 64, 128)
    },
    "groups": {
        f"group-{n}": {"completions_per_prompt": n, "prompts_per_step": 512 // n}
        for n in (4, 8, 16, 32)
    },
}

Runs = dict[Path, tuple[Settings, list[str]]]  # by folder: settings, and the flags that give them


def read_study(study: str) -> dict[str, dict]:
    """The changes of each variant of a study, by name. ValueError if it is not a study."""
    if study in STUDIES:
        return STUDIES[study]
    try:
        variants = json.loads(Path(study).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{study}: neither {', '.join(STUDIES)}, tables nor a JSON file ({error})"
        ) from None
    has_variants = isinstance(variants, dict) and variants
    if not has_variants or not all(isinstance(changes, dict) for changes in variants.values()):
        raise ValueError(f'{study}: the file must hold {{"NAME": {{"field": value, ...}}, ...}}')
    for variant in variants:
        if not re.fullmatch(r"[\w.+-]+", variant):
            raise ValueError(
                f"{study}: {variant!r} cannot name a folder: letters, digits, _ . + - only"
            )
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


def same_run(one: Settings, other: Settings) -> bool:
    """Whether two runs have different names only, and compute the same."""
    recipe = dataclasses.replace(one.recipe, leave_out=other.recipe.leave_out)
    return dataclasses.replace(one, name=other.name, recipe=recipe) == other


def runs_to_train(study: Study, common: list[str]) -> Runs:
    """The runs of a study. common: flags of train.py for all runs. Of a study by name, a variant
    that changes nothing has no run: the data's defaults may have its value already. ValueError if
    a run is impossible, or if its folder holds another run."""
    if study.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {study.jobs}")
    parent = study.name or Path(study.study).stem
    if (Path("runs") / parent / "config.json").exists():
        raise ValueError(f"runs/{parent} holds a run, not a study; choose another --name")
    common_flags = {argument.split("=")[0] for argument in common}
    runs = {}
    for seed, (variant, changes) in itertools.product(study.seeds, read_study(study.study).items()):
        # Refuse flags that no study can have, and flags for all runs that this variant has itself.
        about = f"variant {variant!r} of {study.study}"
        own_flags = {flag(name) for field in changes for name in (field, f"no_{field}")}
        for single in {"--name", "--seed", "--resume", "--from-step"} & (common_flags | own_flags):
            raise ValueError(
                f"{single} is for one run:"
                " a study names its runs, has --seeds, and goes on by itself"
            )
        for twice in common_flags & own_flags:
            raise ValueError(f"{about} has its own {twice}: it is no flag for all runs")

        # The flags of this run, and its settings; it may have begun already.
        name = f"{parent}/{variant}-seed{seed}"
        own = flags_for(changes | {"name": name, "seed": seed})
        arguments = ["--keep-checkpoints", "1", "--rollouts-kept", "0", *common, *own]
        try:
            settings = parse(arguments)
        except ValueError as error:
            raise ValueError(f"{about}: {error}") from None
        folder = Path("runs") / name
        same = [run.name for run, (before, _) in runs.items() if same_run(before, settings)]
        if same and study.study in STUDIES:
            say(f"{folder.name} is left out: with these flags it is the same run as {same[0]}.")
            continue
        if (folder / "config.json").exists():
            try:
                refuse_changes(read_settings(folder), settings)
            except ValueError as error:
                raise ValueError(
                    f"{folder} holds another run; choose another --name. {error}"
                ) from None

        # Runs at once share the cores. A run that goes on has what no flag says from its
        # config.json: when it ends is said here.
        said = {
            "threads": settings.threads or max(1, cpu_threads(settings) // study.jobs),
            "steps": settings.steps,
            "stop_when_gain_below": settings.stop_when_gain_below,
        }
        runs[folder] = settings, [*arguments, *flags_for(said)]
    return runs


# --- training -------------------------------------------------------------------------------------


def finished(folder: Path, settings: Settings) -> bool:
    """Whether the run in this folder has ended, after as many steps as these settings want, and its
    last checkpoint was written. A run that --stop-when-gain-below has ended goes on only with a
    lower limit, or without one."""
    end = last_line(folder)
    newest = max(map(step_of, checkpoints(folder)), default=None)  # None: they were removed
    if end.get("kind") != "end" or newest not in (None, end["step"]):
        return False
    before = read_settings(folder)
    if before.stop_when_gain_below and end["step"] < before.steps:
        return settings.stop_when_gain_below >= before.stop_when_gain_below
    return before.steps == settings.steps


def steps_made(runs: Runs) -> int:
    """The optimizer steps that all runs have made so far."""
    return sum(
        min(last_line(folder).get("step", 0), settings.steps)
        for folder, (settings, _) in runs.items()
    )


def start_run(folder: Path, arguments: list[str]) -> subprocess.Popen:
    """Start a run in a process of its own, or go on with it if it was interrupted. Its output is in
    FOLDER.txt. The signals of the terminal do not reach it: the study passes them on."""
    command = [sys.executable, str(Path(__file__).parent.parent / "train.py"), *arguments]
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


def train_all(name: str, runs: Runs, jobs: int) -> int:
    """Train all runs that are not finished, `jobs` at once. Returns how many failed. SystemExit
    after a signal: the first stops the runs, each with a checkpoint, and a second one stops them at
    once. name: of the study, for the screen."""
    exit_on_signals()
    waiting = [folder for folder, (settings, _) in runs.items() if not finished(folder, settings)]
    running = {}  # the process of each run, by folder
    done, failed = len(runs) - len(waiting), 0
    progress = Progress(
        name, sum(settings.steps for settings, _ in runs.values()), steps_made(runs)
    )
    try:
        while running or waiting:
            # Start runs until enough are running.
            while waiting and len(running) < jobs:
                folder = waiting.pop(0)
                running[folder] = start_run(folder, runs[folder][1])
            time.sleep(0.5)
            # Count the runs that have ended. A failed one has said why in its last line.
            ended = [folder for folder, run in running.items() if run.poll() is not None]
            for folder in ended:
                status = running.pop(folder).returncode
                if status == 0:
                    done += 1
                    continue
                failed += 1
                reason = Path(f"{folder}.txt").read_text().strip().rpartition("\n")[2]
                say(f"error: {folder} failed with status {status}: {reason} ({folder}.txt has all)")
            now = ", ".join(folder.name for folder in running)
            progress.show(
                steps_made(runs), f"{done} of {len(runs)} runs done, {failed} failed; now {now}"
            )
    finally:
        progress.close()
        stop(list(running.values()))
    return failed


def exit_on_signals() -> None:
    """Let signals that end a process raise SystemExit. nohup has SIGHUP ignored; that stays."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def stop(processes: list[subprocess.Popen]) -> None:
    """Interrupt the runs that are still alive, and wait for them. A second signal interrupts them
    once more."""
    while alive := [process for process in processes if process.poll() is None]:
        with contextlib.suppress(SystemExit):  # which the second signal raises here
            say("Stopping the runs; the same command goes on.")
            for process in alive:
                process.send_signal(signal.SIGINT)
            for process in alive:
                process.wait()


# --- the command ----------------------------------------------------------------------------------


def make_tables(folder: Path, flags: list[str]) -> int:
    """Fit and compare all runs of a study. What fit_curve prints of them is kept in tables.md, and
    its picture in compare.png, in its folder. flags: of fit_curve."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        plot = ["--plot", str(folder / "compare.png")]
        status = fit_curve.main(["--compare", str(folder), *plot, *flags])
    write_whole(folder / "tables.md", printed.getvalue())
    print(printed.getvalue(), end="")
    return status


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status: 0, or 1 if a run failed. (It is 130 after Ctrl-C, 143
    after SIGTERM.)"""
    if arguments[:1] == ["tables"]:
        if len(arguments) == 1:
            raise ValueError("tables FOLDER: name the folder of the study")
        return make_tables(Path(arguments[1]), arguments[2:])
    begins_with_study = arguments and not arguments[0].startswith("-")
    if not begins_with_study and HELP.isdisjoint(arguments):
        raise ValueError(
            f"what comes first is the study: {', '.join(STUDIES)}, a JSON file, or tables FOLDER"
        )
    study, common = read_flags(Study, arguments, description=__doc__, others=True)
    runs = runs_to_train(study, common)
    folder = next(iter(runs)).parent
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        failed = train_all(folder.name, runs, study.jobs)
    try:
        make_tables(folder, [])
    except ValueError as error:  # the runs have failed, or are too short
        say(f"no tables: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    run_command(main)
