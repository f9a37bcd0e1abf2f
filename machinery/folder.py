"""The folder of a run: its name, its lock, its config.json."""

import dataclasses
import fcntl
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import TextIO

import loss
from core.settings import Settings
from curve.files import write_whole


def new_folder(settings: Settings) -> Path:
    """The path of a new run's folder. ValueError if --name names one outside runs/ or not empty."""
    if settings.name is not None:
        folder = Path("runs") / settings.name
        if ".." in folder.parts or Path(settings.name).is_absolute():
            raise ValueError(
                f"--name {settings.name}: a run's folder lies in runs/; give a name without .."
            )
        if folder.exists() and (
            not folder.is_dir() or {path.name for path in folder.iterdir()} - {"lock"}
        ):
            raise ValueError(f"{folder} holds another run; choose another --name, or move it away")
        return folder
    recipe = settings.recipe
    start = (
        loss.leave_one_out(recipe.leave_out) if recipe.leave_out else loss.RECIPES[recipe.recipe]
    )
    name = f"{recipe.recipe}-without-{recipe.leave_out}" if recipe.leave_out else recipe.recipe
    for part in dataclasses.fields(recipe):
        if getattr(recipe, part.name) != getattr(start, part.name):
            name += f"-{part.name}-{getattr(recipe, part.name)}"
    name += f"-seed{settings.seed}"
    candidates = [Path("runs") / name, *(Path("runs") / f"{name}-{i}" for i in range(2, 10_000))]
    return next(folder for folder in candidates if not folder.exists())


def write_config(folder: Path, settings: Settings) -> None:
    """Write config.json: all settings, and the versions of Python, torch and transformers."""
    versions = {
        package: importlib.metadata.version(package) for package in ("torch", "transformers")
    }
    versions["python"] = platform.python_version()
    stored = dataclasses.asdict(dataclasses.replace(settings, resume=None, from_step=None))
    write_whole(
        folder / "config.json", json.dumps({**stored, "versions": versions}, indent=2) + "\n"
    )


def lock_folder(folder: Path) -> TextIO:
    """Lock a folder until the returned file closes or the process ends. ValueError if another
    process has it."""
    file = open(folder / "lock", "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"{folder} is in use by process {file.read().strip()}; wait for it or stop it"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file
