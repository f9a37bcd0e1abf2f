"""The folder of a run: its name, its lock, its config.json, its checkpoints, its files of lines.
And the folder of a process for temporary files."""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TextIO

import safetensors.torch
from torch import Tensor

import loss
from core.settings import Settings
from curve.files import write_whole
from data.verify import remove

# --- its name, its lock, its settings -------------------------------------------------------------


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


def write_config(folder: Path, settings: Settings, **changes) -> None:
    """Write config.json: all settings with these changes, the versions of Python, torch and
    transformers."""
    versions = {"torch": version("torch"), "transformers": version("transformers")}
    versions["python"] = platform.python_version()
    changes |= {"resume": None, "from_step": None}  # no settings of the run
    stored = dataclasses.asdict(settings) | changes | {"versions": versions}
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


# --- its checkpoints: checkpoints/step-000020/, each whole or not there ---------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    found = (folder / "checkpoints").glob("step-*")
    return sorted((path for path in found if re.fullmatch(r"step-\d+", path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that had been made when it was written."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_of(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of this step, or ValueError. If step is None: the newest one, or None if the
    run has none."""
    by_step = {step_of(checkpoint): checkpoint for checkpoint in checkpoints(folder)}
    if step is None:
        step = max(by_step, default=None)
    elif step not in by_step:
        steps = ", ".join(map(str, by_step)) or "none"
        raise ValueError(f"--from-step is {step}; the checkpoints of {folder} are of steps {steps}")
    return by_step.get(step)


def write_checkpoint(
    folder: Path,
    model,
    tokenizer,
    parameters: dict[str, Tensor],
    moments: dict[str, Tensor],
    state: dict,
) -> None:
    """Add the checkpoint of state["step"]. Its files do not depend on the number of ranks. OSError
    if it cannot be written; all earlier ones are still there then."""
    with whole_folder(folder / "checkpoints" / f"step-{state['step']:06d}") as checkpoint:
        model.save_pretrained(checkpoint / "model", state_dict=parameters)
        safetensors.torch.save_file(moments, checkpoint / "optimizer.safetensors")
        tokenizer.save_pretrained(checkpoint / "model")
        (checkpoint / "state.json").write_text(json.dumps(state))


def read_state(checkpoint: Path) -> dict:
    """The state.json of a checkpoint: the step, the states of feed and record. ValueError if it is
    damaged."""
    try:
        with safetensors.safe_open(checkpoint / "optimizer.safetensors", "pt"):
            state = json.loads((checkpoint / "state.json").read_text())
        int(state["step"]), state["data"], state["orders"], state["compute"]
        return state
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        advice = "move it away to go on from the one before"
        raise ValueError(f"{checkpoint} is damaged ({error!r}); {advice}") from None


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
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except safetensors.SafetensorError as error:  # its way to report a full disk
        raise OSError(f"{target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# --- its files of lines ---------------------------------------------------------------------------


def append_whole(target: Path, text: str) -> None:
    """Add a text to a file, at once. OSError if it cannot be written; then the file is as it
    was."""
    left = text.encode()
    with open(target, "ab", buffering=0) as file:  # after an error, a buffer would be written again
        end = file.tell()
        try:
            while left:
                written = file.write(left)
                left = left[written:]
        except OSError:
            file.truncate(end)  # half a line helps nobody
            raise


def six_digits(value: float) -> float | None:
    """A number rounded to six digits; None if it is not finite, since JSON has no such numbers."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def json_lines(path: Path) -> Iterator[tuple[str, dict]]:
    """The lines of a file with one JSON object in each: as text, and as object. The last line is
    left out if it is cut off or still being written. ValueError for a broken line; it names the
    file and the line."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                text, record = line.decode(), json.loads(line)
                record["kind"], record["step"]
            except (ValueError, TypeError, KeyError, RecursionError):
                broken = "this is no line that a run has written: remove it"
                raise ValueError(f"{path}, line {number}: {broken}") from None
            yield text, record


def drop_later(path: Path, step: int) -> list[dict]:
    """Drop the lines of all steps after this one, since they come again, and the line of the end.
    Returns the lines that are left; [] if there is no file. ValueError as in `json_lines`."""
    if not path.exists():
        return []
    texts, left = "", []
    for text, line in json_lines(path):
        if line["step"] <= step and line["kind"] != "end":
            texts += text
            left.append(line)
    write_whole(path, texts)
    return left


def last_line(folder: Path) -> dict:
    """The newest line in the log of a run, which may be writing it; {} if there is none. ValueError
    as in `json_lines`."""
    log = folder / "log.jsonl"
    lines = [line for _, line in json_lines(log)] if log.exists() else []
    return lines[-1] if lines else {}


# --- temporary files ------------------------------------------------------------------------------


def use_temporary_folder() -> None:
    """From now on this process makes its temporary files in a new folder, which is removed at its
    end. The process id is in its name. Those of processes that are gone are removed now."""
    parent = Path(tempfile.gettempdir())
    for left in parent.glob("scalerl-*-*"):
        try:
            os.kill(int(left.name.split("-")[1]), 0)  # only asks whether there is such a process
        except ProcessLookupError:
            remove(str(left))
        except (ValueError, OSError):  # no folder of a run; a process of another user
            continue
    tempfile.tempdir = tempfile.mkdtemp(prefix=f"scalerl-{os.getpid()}-")
    # Python removes its own files there at priority -100.
    Finalize(None, remove, [tempfile.tempdir], exitpriority=-200)
