"""Tokens/s with one and with two devices on each side, a CPU process of one thread each.

    python benchmarks/devices.py

Training is synchronous, so that one side has the cores while the other waits.
"""

import tempfile
from pathlib import Path

import numpy as np
from common import SIZES, random_model, run_training

# All work is trained on, and stays the same.
ALWAYS = """
    --asynchrony ppo-1 --no-zero-variance-filter --learning-rate 1e-12 --threads 1
    --validation-problems 2 --validation-samples 2
""".split()
# The median over all steps but the first, which warms up.
MEASURED = ["generator_tokens_per_second", "trainer_tokens_per_second", "parameters_seconds"]


def main() -> None:
    print("\ntokens/s with one and two devices on each side\n")
    print("parameters   devices   sampled/s            trained/s            copy of parameters, s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = {
            "0.14M": ["--steps", 8],
            "25.7M": "--steps 4 --prompts-per-step 4 --slots 32 --model".split(),
        }
        flags["25.7M"].append(random_model(folder / "25.7M", SIZES["25.7M"]))
        for size in flags:
            alone = None
            for devices in (1, 2):
                sides = ["--generators", devices, "--trainers", devices]
                name = f"run-{size}-{devices}"
                lines, _ = run_training(folder, name, *ALWAYS, *sides, *flags[size])
                median = {key: np.median([line[key] for line in lines[1:]]) for key in MEASURED}
                alone = alone or median
                speeds = []
                for key in ("generator_tokens_per_second", "trainer_tokens_per_second"):
                    speeds.append(f"{median[key]:10,.0f} ({median[key] / alone[key]:.2f}x)")
                figures = f"{speeds[0]:20} {speeds[1]:20} {median['parameters_seconds']:.4f}"
                print(f"{size:>10} {devices:9}   {figures}", flush=True)


if __name__ == "__main__":
    main()
