"""Which device does what, how many CPU threads a process has, and what a model computes in.

`settings` are those of settings.py, which imports this file.
"""

import os

import torch


def devices_here(settings) -> tuple[list[tuple[str, ...]], list[str]]:
    """The devices of each generator, and the device of each trainer, on this machine. ValueError if
    it has too few GPUs.

    Without a GPU all are CPU processes. One GPU does both, and --one-process uses one only. Of
    several, generators have the first and trainers the last; one in five trains by default, as in
    the paper.
    """
    gpus, gpus_each = settings.gpus_here(), settings.tensor_parallel
    if settings.one_process:
        gpus = min(gpus, 1)
    generators, trainers = settings.generators, settings.trainers
    if gpus == 0:
        if gpus_each > 1:
            raise ValueError(f"--tensor-parallel {gpus_each} wants as many GPUs, and there is none")
        return [("cpu",)] * (generators or 1), ["cpu"] * (trainers or 1)
    if gpus == 1 and generators <= 1 and trainers <= 1 and gpus_each == 1:
        return [("cuda:0",)], ["cuda:0"]
    trainers = trainers or max(1, min(gpus // 5, gpus - generators * gpus_each))
    generators = generators or max(1, (gpus - trainers) // gpus_each)
    wanted = generators * gpus_each + trainers
    if wanted > gpus:
        raise ValueError(
            f"--generators {generators} with --tensor-parallel {gpus_each} and --trainers"
            f" {trainers} want {wanted} GPUs; there are {gpus} (CUDA_VISIBLE_DEVICES)"
        )
    names = [f"cuda:{i}" for i in range(gpus)]
    firsts = range(0, generators * gpus_each, gpus_each)
    return [tuple(names[i : i + gpus_each]) for i in firsts], names[-trainers:]


def cpu_threads(settings) -> int:
    """CPU threads of a process: --threads, or the cores divided by those that compute at once."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):  # Linux: the cores that this process may use
        cores = len(os.sched_getaffinity(0))
    return settings.threads or max(1, cores // settings.processes())


def trunk_dtype(settings, device: str) -> torch.dtype:
    """The dtype that the trunk of the model computes in on this device."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.float32 if device == "cpu" else torch.bfloat16
