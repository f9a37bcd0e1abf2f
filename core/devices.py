"""Which device does what, how many CPU threads a process has, and what a model computes in.

`settings` are those of core/settings.py, which imports this file.
"""

import os

import torch


def devices_here(settings) -> tuple[list[tuple[str, ...]], list[str]]:
    """The devices of each generator, and the device of each trainer, on this machine, or on the one
    that --plan is about. ValueError if it has too few GPUs.

    Without a GPU all are CPU processes. One GPU does both. Of several, generators have the first
    and trainers the last; one in five trains by default, as in the paper.
    """
    gpus, gpus_each = gpus_here(settings), settings.tensor_parallel
    if gpus == 0:
        if gpus_each > 1:
            raise ValueError(f"--tensor-parallel {gpus_each} wants as many GPUs, and there is none")
        return [("cpu",)] * (settings.generators or 1), ["cpu"] * (settings.trainers or 1)
    if gpus == 1 and settings.generators <= 1 and settings.trainers <= 1 and gpus_each == 1:
        return [("cuda:0",)], ["cuda:0"]
    trainers = settings.trainers or max(1, min(gpus // 5, gpus - settings.generators * gpus_each))
    generators = settings.generators or max(1, (gpus - trainers) // gpus_each)
    if generators * gpus_each + trainers > gpus:
        raise ValueError(
            f"--generators {generators} with --tensor-parallel {gpus_each} and --trainers {trainers} want"
            f" {generators * gpus_each + trainers} GPUs; there are {gpus} (CUDA_VISIBLE_DEVICES)"
        )
    names = [f"cuda:{i}" for i in range(gpus)]
    return [tuple(names[i * gpus_each : (i + 1) * gpus_each]) for i in range(generators)], names[
        gpus - trainers :
    ]


def gpus_here(settings) -> int:
    """How many GPUs this machine has, or the machine that --plan is about."""
    gpus = getattr(settings, "gpus", None)
    return torch.cuda.device_count() if gpus is None else gpus


def cpu_threads(settings) -> int:
    """CPU threads of each process: --threads, or the cores divided by the processes of the run."""
    is_run = hasattr(settings, "generators")  # generate.py is one process
    processes = sum(map(len, devices_here(settings))) if is_run else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return settings.threads or max(1, cores // processes)


def trunk_dtype(settings, device: str) -> torch.dtype:
    """The dtype that the trunk of the model computes in on this device."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.float32 if device.startswith("cpu") else torch.bfloat16
