"""Which side of the default run waits, and when: 80 steps with a validation every 40, one core for
each side.

python benchmarks/idle.py
"""

import tempfile
from pathlib import Path

import numpy as np
from common import run_training


def main(steps: int = 80, part: int = 20) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines, _ = run_training(Path(folder), "idle", "--steps", steps, "--validation-every", 40)
    print("\nshares of the time in which each side of a PipelineRL-8 run waits\n")
    columns = "groups filtered out   groups waiting   off-policyness mean, max"
    print(f"steps      trainer   generator   {columns}")
    for start in range(0, steps, part):
        some = lines[start : start + part]
        mean = lambda key: np.mean([line[key] for line in some])
        print(
            f"{start + 1:3}-{start + part:3} {mean('trainer_idle_fraction'):10.2f}"
            f" {mean('generator_idle_fraction'):11.2f} {mean('zero_variance_fraction'):21.2f}"
            f" {mean('groups_waiting'):16.1f} {mean('off_policyness_mean'):15.1f},"
            f" {max(line['off_policyness_max'] for line in some)}"
        )


if __name__ == "__main__":
    main()
