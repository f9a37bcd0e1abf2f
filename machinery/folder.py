"""The folder of a run: its name, its lock, its config.json, and where its checkpoints are."""

import dataclasses
import fcntl
import json
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import loss
from core.settings import Settings
from curve.files import write_whole


def new_folder(settings: Settings) -> Path:
    """The path of a new run's folder. ValueError if --name names one outside runs/ or not empty."""
    if settings.name is None:
        return free_folder(name_of(settings))
    folder = Path("runs") / settings.name
    if ".." in folder.parts or Path(settings.name).is_absolute():
        advice = "a run's folder lies in runs/; give a name without .."
        raise ValueError(f"--name {settings.name}: {advice}")
    if folder.exists() and not (folder.is_dir() and {*os.listdir(folder)} <= {"lock"}):
        raise ValueError(f"{folder} holds another run; choose another --name, or move it away")
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


def free_folder(name: str) -> Path:
    """The first of runs/NAME, runs/NAME-2, runs/NAME-3, ... that does not exist."""
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def make_folder(folder: Path, settings: Settings) -> Path:
    """Make the folder of a run. A new run without --name gets the next free one, if another run has
    taken this one since it was chosen. Returns the folder."""
    named = settings.name or settings.resume
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=bool(named))
            return folder
        except FileExistsError:
            if named:
                raise
            folder = new_folder(settings)


def write_config(folder: Path, settings: Settings, chosen: dict | None = None) -> None:
    """Write config.json: all settings, which of them the memory has chosen and why, the versions of
    Python, torch and transformers."""
    versions = {"torch": version("torch"), "transformers": version("transformers")}
    versions["python"] = platform.python_version()
    resumption = {"resume": None, "from_step": None}  # no settings of the run
    stored = dataclasses.asdict(settings) | resumption | {"chosen": chosen, "versions": versions}
    write_whole(folder / "config.json", json.dumps(stored, indent=2) + "\n")


def lock_folder(folder: Path) -> TextIO:
    """Lock a folder until the returned file closes or the process ends. ValueError if another
    process has it."""
    file = open(folder / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = f"process {file.read().strip()}"
        raise ValueError(f"{folder} is in use by {holder}; wait for it or stop it") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def in_use(folder: Path) -> bool:
    """Whether a process has the lock of this folder."""
    if not (folder / "lock").exists():
        return False
    with open(folder / "lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # free again when the file closes
        except BlockingIOError:
            return True
    return False


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    found = (folder / "checkpoints").glob("step-*")
    return sorted((path for path in found if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that had been made when it was written."""
    return int(checkpoint.name.removeprefix("step-"))
