"""The folder of a run: its name, its lock, its config.json, its checkpoints, its files of lines."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import safetensors

import loss
from core.screen import warn
from core.settings import Settings, read_settings, refuse
from curve.files import write_whole

# --- its name, its lock, its settings -------------------------------------------------------------


def new_folder(settings: Settings) -> Path:
    """The path of a new run's folder: runs/NAME of --name, or the first of runs/NAME, runs/NAME-2,
    runs/NAME-3, ... that does not exist. ValueError if --name names one that holds anything, but
    for what a run leaves that was killed before its first validation."""
    name, number = settings.name or name_of(settings), 1
    folder = Path("runs", name)
    while folder.exists() and settings.name is None:
        number += 1
        folder = Path("runs", f"{name}-{number}")
    files = {*os.listdir(folder)} if folder.exists() else set()
    refuse(
        files - {"lock", "config.json", "log.jsonl"} or lines_of_log(folder),
        f"{folder} holds another run; choose another --name, or move it away",
    )
    return folder


def name_of(settings: Settings) -> str:
    """What a run without --name is called: its recipe, each part that was changed, its seed."""
    recipe = settings.recipe
    name, start = recipe.recipe, loss.RECIPES[recipe.recipe]
    if recipe.leave_out:
        name += f"-without-{recipe.leave_out}"
        start = loss.leave_one_out(recipe.leave_out)
    for part, value in vars(recipe).items():
        if value != getattr(start, part):
            name += f"-{part}-{value}"
    return f"{name}-seed{settings.seed}"


def write_config(folder: Path, settings: Settings) -> None:
    """Write config.json: all settings, and the versions of Python, torch and transformers."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    versions["python"] = platform.python_version()
    others = {"versions": versions, "resume": None, "from_step": None}  # no settings of the run
    stored = dataclasses.asdict(settings) | others
    write_whole(folder / "config.json", json.dumps(stored, indent=2) + "\n")


def lock_folder(folder: Path) -> TextIO:
    """Lock a folder until the returned file closes or the process ends. ValueError if another
    process has it. On a file system without locks it is warned that nothing guards the folder."""
    file = open(folder / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter where NFS imitates it
        file.seek(0)
        raise ValueError(
            f"{folder} is in use by process {file.read().strip()}; wait for it or stop it"
        ) from None
    except OSError as error:
        warn("lock", f"{folder} cannot be locked ({error}): let no other process work on it")
    file.truncate(0)
    print(os.getpid(), file=file, flush=True)
    return file


# --- its checkpoints: checkpoints/step-000020/, each whole or not there ---------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    named = (folder / "checkpoints").glob("step-*")
    return sorted((each for each in named if each.name[5:].isdecimal()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that had been made when it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_of(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of this step, or ValueError. If step is None: the newest one, or None if the
    run has none."""
    saved = checkpoints(folder)
    chosen = [each for each in saved if step in (None, step_of(each))]
    refuse(
        step is not None and not chosen,
        f"--from-step is {step}: --resume {folder} has steps {[*map(step_of, saved)]}",
    )
    return chosen[-1] if chosen else None


def read_state(folder: Path, checkpoint: Path) -> dict:
    """The state in a checkpoint of a run. ValueError, with what to do, if a file of it is damaged,
    or if the log has lost R0 or the step of the checkpoint."""
    steps, path = {line["step"] for line in lines_of_log(folder)}, checkpoint / "state.json"
    refuse(
        not {0, step_of(checkpoint)} <= steps,
        f"{folder}/log.jsonl has lost its beginning or its end: put the old log back, or train the"
        f" model in a new run: --model {checkpoint}/model",
    )
    try:
        state = json.loads(path.read_text())
        state["wall_seconds"]  # a run writes it
        for path in (checkpoint / "optimizer.safetensors", *checkpoint.rglob("*.safetensors")):
            safetensors.safe_open(path, "pt")  # reads its header, and compares its length
        return state
    except Exception as error:  # of many kinds: of JSON, of safetensors, of the file system
        raise ValueError(
            f"{path} is damaged ({error!r}): --from-step goes on from an older checkpoint, or begin"
            " a new run"
        ) from None


def remove_checkpoints(folder: Path, unwanted: list[Path]) -> None:
    """Remove these checkpoints of a run, and what processes have left that were killed while they
    wrote or removed a folder. If this one is killed too, what is left is no checkpoint."""
    for partial in [*folder.rglob("*.partial/")]:
        shutil.rmtree(partial)
    for checkpoint in unwanted:
        shutil.rmtree(checkpoint.rename(f"{checkpoint}.partial"))


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write into. It replaces `target` once all of it is on disk. OSError if it
    cannot."""
    target = Path(os.path.realpath(target))  # a link stays, and the folder behind it is replaced
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in filter(Path.is_file, partial.rglob("*")):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        # The old folder goes out of the way as a whole: half a model is never there. If there is
        # none after a kill, --resume writes that of the last checkpoint again.
        if target.exists():
            target.rename(partial / "old")
        partial.rename(target)
        shutil.rmtree(target / "old", ignore_errors=True)
    except safetensors.SafetensorError as error:  # its way to report a full disk
        raise OSError(f"{target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# --- its files of lines ---------------------------------------------------------------------------


def append_line(path: Path, line: dict) -> None:
    """Add a line to a file of JSON lines. OSError if it cannot be written; then the file may end
    with half a line, which `json_lines` leaves out."""
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\n")


def six_digits(value: float) -> float | None:
    """A number rounded to six digits; None if it is not finite, since JSON has no such numbers."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def json_lines(path: Path) -> list[dict]:
    """The objects in a file of JSON lines. The last line is left out if it is cut off or still
    being written. ValueError for a broken line; it names the file and the line."""
    lines = []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
            line["kind"], line["step"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path}, line {number}: no run has written this line: remove it"
            ) from None
        lines.append(line)
    return lines


def lines_of_log(folder: Path) -> list[dict]:
    """The lines of a run's log; [] if there is none. ValueError as in `json_lines`."""
    log = folder / "log.jsonl"
    return json_lines(log) if log.exists() else []


def drop_later(path: Path, step: int) -> list[dict]:
    """Move the lines of all steps after this one, since they come again, and the line of the end to
    the end of PATH.before. Returns the lines that are left; [] if there is no file. ValueError as
    in `json_lines`."""
    if not path.exists():
        return []
    left = []
    for line in json_lines(path):
        if line["step"] <= step and line["kind"] != "end":
            left.append(line)
        else:
            append_line(path.with_name(f"{path.name}.before"), line)
    write_whole(path, "".join(json.dumps(line) + "\n" for line in left))
    return left


def finished(folder: Path, wanted: Settings) -> bool:
    """Whether the run in this folder has come to its end as these settings want it: the log says
    so when its last checkpoint and its model are written. ValueError as in `json_lines`."""
    lines = lines_of_log(folder)
    if not lines or lines[-1]["kind"] != "end":
        return False
    before = read_settings(folder)
    conditions = lambda each: (each.stop_when_gain_below, each.recipe.least_prompts)
    return wanted.steps <= before.steps and conditions(wanted) == conditions(before)
