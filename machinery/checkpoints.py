"""The checkpoints of a run: runs/NAME/checkpoints/step-000020/, each whole or not there."""

import json
import shutil
from pathlib import Path

import safetensors.torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core.limits import refuse_odd_files
from machinery.files import whole_folder


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return sorted((folder / "checkpoints").glob("step-*[0-9]"), key=step_of)


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
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    parameters: dict[str, Tensor],
    moments: dict[str, Tensor],
    state: dict,
) -> None:
    """Add the checkpoint of state["step"]. Its files do not depend on the number of ranks. OSError
    if it cannot be written; all earlier ones are still there then."""
    with whole_folder(folder / "checkpoints" / f"step-{state['step']:06d}") as checkpoint:
        try:
            model.save_pretrained(checkpoint / "model", state_dict=parameters)
            safetensors.torch.save_file(moments, checkpoint / "optimizer.safetensors")
        except safetensors.SafetensorError as error:  # its way to report a full disk
            raise OSError(f"{checkpoint}: {error}") from error
        tokenizer.save_pretrained(checkpoint / "model")
        (checkpoint / "state.json").write_text(json.dumps(state))


def remove_old_checkpoints(folder: Path, keep: int, kept_too: Path | None) -> None:
    """Remove all checkpoints but the newest `keep` and `kept_too`."""
    for old in checkpoints(folder)[:-keep]:
        if old != kept_too:
            shutil.rmtree(old)


NUMBER = int | float
FORM_OF_STATE = {
    "step": int,
    "data": [str],
    "orders": [{"epoch": int, "cursor": int, "retired": [int]}],
    "handed_out": [int],
    "to_repeat": [[int]],
    "compute": {
        "compute_device_hours": NUMBER,
        "compute_tokens": NUMBER,
        "compute_flops": NUMBER,
    },
    "wall_seconds": NUMBER,
}


def has_form(value, form) -> bool:
    """Whether a value of JSON is of a type, a list of such a form, or a record with such forms."""
    if isinstance(form, list):
        return isinstance(value, list) and all(has_form(each, form[0]) for each in value)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            name in value and has_form(value[name], inner) for name, inner in form.items()
        )
    return isinstance(value, form)


def read_state(checkpoint: Path) -> dict:
    """The state.json of a checkpoint: the step, the states of feed and record. ValueError if it is
    damaged."""
    refuse_odd_files(checkpoint)
    try:
        with safetensors.safe_open(checkpoint / "optimizer.safetensors", "pt"):
            state = json.loads((checkpoint / "state.json").read_text())
        if not has_form(state, FORM_OF_STATE) or len(state["orders"]) != len(state["data"]):
            raise ValueError("state.json is not as a run writes it")
        return state
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        advice = "move it away to go on from the one before"
        raise ValueError(f"{checkpoint} is damaged ({error}); {advice}") from None
