"""Seconds of the two copies on the parameters' way: from a trainer into shared memory, and from
there to a generator.

    python benchmarks/parameters.py

All in one process, on one thread, with models of 0.14M to 374M parameters.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from common import SIZES, random_model, seconds

from core.model import load_model
from core.rollouts import SharedParameters
from docs.make_base import BASE_MODEL


def main(repeats: int = 5) -> None:
    print("\nparameters       MiB   trainer's copy   generator's copy   GiB/s of the trainer's")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        random = [random_model(Path(folder) / name, size) for name, size in SIZES.items()]
        for name in (str(BASE_MODEL), *random):
            model, reader = (load_model(name) for _ in range(2))
            shared, durations = SharedParameters(model), []
            for version in range(repeats + 1):
                write = seconds(lambda: shared.write(model.named_parameters(), version))
                durations.append((write, seconds(lambda: shared.read_into(reader))))
            write, read = np.median(durations[1:], axis=0)  # the first warms up
            size = shared.flat.nbytes
            sizes = f"{size / 4e6:9.2f}M {size / 2**20:9.1f}"
            rate = size / write / 2**30
            print(f"{sizes} {write:16.4f} {read:18.4f} {rate:24.1f}", flush=True)


if __name__ == "__main__":
    main()
