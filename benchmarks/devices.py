"""Tokens/s with one and with two devices on each side, a CPU process of one thread each.

    python benchmarks/devices.py

Training is synchronous, so that one side has the cores while the other waits.
"""

import tempfile
from pathlib import Path

import numpy as np
from common import SIZES, random_model, run_training


def main() -> None:
    print("\ntokens/s with one and two devices on each side\n")
    print("parameters   devices   sampled/s            trained/s            copy of parameters, s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = {
            "0.14M": ["--steps", 8],
            "25.7M": ["--steps", 4, "--model", random_model(folder / "25.7M", SIZES["25.7M"]),
                      "--prompts-per-step", 4, "--slots", 32],
        }  # fmt: skip
        for size in flags:
            speeds = {}
            for devices in (1, 2):
                lines, _ = run_training(
                    folder, f"run-{size}-{devices}", "--asynchrony", "ppo-1", "--no-zero-variance-filter", "--threads",
                    1, "--learning-rate", 1e-12, "--validation-problems", 2, "--validation-samples", 2, "--generators",
                    devices, "--trainers", devices, *flags[size],
                )  # fmt: skip
                median = lambda key: np.median(
                    [line[key] for line in lines[1:]]
                )  # the first step warms up
                speeds[devices] = [
                    median(f"{side}_tokens_per_second") for side in ("generator", "trainer")
                ]
                ratios = [
                    f"{speed:10,.0f} ({speed / one:.2f}x)"
                    for speed, one in zip(speeds[devices], speeds[1])
                ]
                copy = median("parameters_seconds")
                print(
                    f"{size:>10} {devices:9}   {ratios[0]:20} {ratios[1]:20} {copy:.4f}", flush=True
                )


if __name__ == "__main__":
    main()
