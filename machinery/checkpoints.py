"""The checkpoints of a run: runs/NAME/checkpoints/step-000020/, each whole or not there."""

import json
from pathlib import Path

import safetensors.torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core.limits import refuse_odd_files
from core.settings import is_of
from machinery.files import whole_folder
from machinery.folder import checkpoints, step_of


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
        model.save_pretrained(checkpoint / "model", state_dict=parameters)
        safetensors.torch.save_file(moments, checkpoint / "optimizer.safetensors")
        tokenizer.save_pretrained(checkpoint / "model")
        (checkpoint / "state.json").write_text(json.dumps(state))


ORDER = {"epoch": int, "cursor": int, "retired": list[int]}
STATE = {
    "step": int,
    "data": list[str],
    "orders": list[dict],
    "handed_out": list[int],
    "to_repeat": list[list[int]],
    "compute": {
        "compute_device_hours": float,
        "compute_tokens": float,
        "compute_flops": float,
    },
    "wall_seconds": float,
}


def read_state(checkpoint: Path) -> dict:
    """The state.json of a checkpoint: the step, the states of feed and record. ValueError if it is
    damaged."""
    refuse_odd_files(checkpoint)
    try:
        with safetensors.safe_open(checkpoint / "optimizer.safetensors", "pt"):
            state = json.loads((checkpoint / "state.json").read_text())
        well_formed = is_of(state, STATE) and all(is_of(order, ORDER) for order in state["orders"])
        if not well_formed or len(state["orders"]) != len(state["data"]):
            raise ValueError("state.json is not as a run writes it")
        return state
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        advice = "move it away to go on from the one before"
        raise ValueError(f"{checkpoint} is damaged ({error}); {advice}") from None
