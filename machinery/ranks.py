"""The ranks, processes of the trainer: how they start, what they tell each other, how they end.

Every rank runs the same loop (train.py) and gets the same groups. Rank 0 is the process that the user has started.
"""

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers

from machinery.devices import devices_here, trunk_dtype
from machinery.processes import belong_to_the_run, ending
from machinery.settings import Settings


def rank_and_ranks() -> tuple[int, int]:
    """The number of this rank, and how many ranks there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def everyone(value):
    """Every rank calls this at the same place. All get rank 0's value."""
    if rank_and_ranks()[1] > 1:
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        value = box[0]
    return value


def from_all_ranks(value) -> list:
    """Every rank calls this at the same place. All get the list of all values, in the order of the ranks."""
    values = [value] * rank_and_ranks()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def wait_for_ranks() -> None:
    """Every rank calls this at the same place. It returns when all have come here."""
    from_all_ranks(None)


def join_ranks(rank: int, devices: list[str], meeting_place: str) -> None:
    """Make this process one of the trainer's ranks. They meet at a file, so no port is needed."""
    if devices[rank].startswith("cuda"):
        torch.cuda.set_device(devices[rank])  # first of all: otherwise some allocations go to GPU 0
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if devices[rank].startswith("cuda") else "gloo",
        store=dist.FileStore(meeting_place, len(devices)),
        rank=rank,
        world_size=len(devices),
        timeout=timedelta(days=30),  # rank 0 may wait long for generators; `_watch` sees when a rank has died
    )
    dist.barrier()


def start_other_ranks(settings: Settings, train: Callable, arguments: tuple, hint: Callable[[], str]) -> None:
    """Start the trainer's other ranks, each a process that calls train(rank, *arguments), and make this one rank 0.

    If one of them fails, all end, with its traceback and with what `hint` returns then. A single rank needs no process
    group in fp32. In bf16 it has one: FSDP keeps the parameters in fp32 and computes in bf16.
    """
    devices = devices_here(settings)[1]
    if len(devices) == 1 and trunk_dtype(settings, devices[0]) == torch.float32:
        return
    with tempfile.TemporaryDirectory(prefix="trainers-") as folder:
        meeting_place = os.path.join(folder, "meeting-place")
        if len(devices) > 1:
            others = multiprocessing.spawn(
                _other_rank, (devices, meeting_place, train, arguments), len(devices) - 1, join=False, daemon=True
            )
            threading.Thread(target=_watch, args=(others, hint), daemon=True).start()
        join_ranks(0, devices, meeting_place)


def _other_rank(number: int, devices: list[str], meeting_place: str, train: Callable, arguments: tuple) -> None:
    belong_to_the_run()
    transformers.utils.logging.disable_progress_bar()
    join_ranks(number + 1, devices, meeting_place)
    train(number + 1, *arguments)
    end_ranks()
    os._exit(0)  # at once: if Python ends slowly, one of gloo's threads may abort the process


def end_ranks() -> None:
    """Leave the group of ranks, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def give_way_to_a_dead_rank() -> None:
    """After an error, wait a moment if there are other ranks. If one has died, `_watch` ends this process meanwhile."""
    if rank_and_ranks()[1] > 1:
        time.sleep(2.0)


def _watch(others, hint: Callable[[], str]) -> None:
    """If another rank fails, end this process and the whole run: the main thread might wait for that rank for ever."""
    try:
        while not others.join():
            pass
    except Exception as error:
        if ending.is_set() and isinstance(error, multiprocessing.ProcessExitedException):
            return  # this process has ended that rank itself
        time.sleep(0.1)
        print(f"\nerror: a process of the trainer has failed, and the run ends{hint()}\n{error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
