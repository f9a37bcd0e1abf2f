"""Send the lines of log.jsonl also to a tracker of experiments (--track)."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from core.screen import warn


def refuse_missing_tracker(name: str | None) -> None:
    """ValueError if the tracker of --track is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise ValueError(f"--track {name}: it is not installed; `pip install {name}` brings it")


@dataclass
class Tracker:
    """Sends numbers to a tracker. When that fails, it warns once and sends nothing more, and the
    run goes on."""

    name: str | None
    folder: Path
    config: dict
    # From the first line on: tensorboard's writer, or the module of wandb or trackio.
    tracker: object = None

    def log(self, line: dict) -> None:
        """Send the numbers of a line of log.jsonl, as train/loss or validation/pass_rate."""
        if self.name is None:
            return
        numbers = {}
        for key, value in line.items():
            if type(value) in (int, float):
                numbers[f"{line['kind']}/{key}"] = value
        try:
            self.tracker = self.tracker or self._start()
            if self.name == "tensorboard":
                for name, value in numbers.items():
                    self.tracker.add_scalar(name, value, line["step"])
                self.tracker.flush()
            else:
                self.tracker.log(numbers, step=line["step"])
        except Exception as error:  # of whatever kind: the run is worth more than its tracker
            words = f"{type(error).__name__}: {error}"
            warn("tracker", f"--track {self.name} has failed, and gets nothing more ({words})")
            self.name = None

    def _start(self):
        if self.name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            return SummaryWriter(self.folder / "tensorboard")
        module = importlib.import_module(self.name)  # wandb, or trackio, which has the same calls
        module.init(project="scalerl", name=self.folder.name, config=self.config)
        return module
