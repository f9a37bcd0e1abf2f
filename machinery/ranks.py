"""The ranks, processes of the trainer: how they start, what they tell each other, how they end; and
how a run ends on a signal.

Every rank runs the same loop (train.py) and gets the same groups. Rank 0 is the process that the
user has started.
"""

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from core.generators import belong_to_the_run, children_inherit
from core.screen import say
from core.settings import Settings, devices_here, trunk_dtype

ending = threading.Event()  # set when this process ends its children itself

# --- what they tell each other --------------------------------------------------------------------


def rank_and_ranks() -> tuple[int, int]:
    """The number of this rank, and how many ranks there are."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def from_rank_0(call: Callable, *arguments):
    """What this call returns at rank 0, which alone makes it; all ranks get the answer. Every rank
    comes here at the same place. The answer is pickled: whole groups of rollouts go through
    here."""
    rank, ranks = rank_and_ranks()
    box = [call(*arguments) if rank == 0 else None]
    if ranks > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def from_all_ranks(value) -> list:
    """Every rank calls this at the same place. All get the list of all values, in the order of the
    ranks."""
    _, ranks = rank_and_ranks()
    values = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value)
    return values


def wait_for_ranks() -> None:
    """Every rank calls this at the same place. It returns when all have come here."""
    from_all_ranks(None)


_numbers = itertools.count()


def refuse_alone(outcome: str, patience: float) -> None:
    """Every rank calls this at the same place, with what has come out of a try. It always ends:
    torch.OutOfMemoryError if it has come out otherwise at another rank, or if another rank has not
    come here within `patience` seconds, since it waits for this one elsewhere."""
    rank, ranks = rank_and_ranks()
    if ranks == 1:
        return
    store, number = dist.distributed_c10d._get_default_store(), next(_numbers)
    keys = [f"outcome {number} of {each}" for each in range(ranks)]
    store.set(keys[rank], outcome)
    try:
        store.wait(keys, timedelta(seconds=patience))
        alike = len({store.get(key) for key in keys}) == 1
    except dist.DistError:
        alike = False
    if not alike:
        raise torch.OutOfMemoryError(
            f"one rank of the trainer alone has too little memory (at rank {rank}: {outcome})"
        )


# --- how they start and end -----------------------------------------------------------------------

HERE = "127.0.0.1"  # all ranks are on this machine, and no other machine reaches their store


def join_ranks(rank: int, devices: list[str], store: dist.Store) -> None:
    """Make this process one of the trainer's ranks, which meet in this store."""
    backend = "gloo"
    if devices[rank].startswith("cuda"):
        torch.cuda.set_device(devices[rank])  # first of all: otherwise some allocations go to GPU 0
        backend = "cpu:gloo,cuda:nccl"
    # Rank 0 may wait long for generators. `_watch` sees when a rank has died.
    patience = timedelta(days=30)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=len(devices), timeout=patience
    )
    dist.barrier()


@contextlib.contextmanager
def other_ranks(
    settings: Settings, train: Callable, arguments: tuple, hint: Callable
) -> Iterator[None]:
    """In this block there are the trainer's other ranks, each a process that calls train(rank,
    *arguments), and this process is rank 0. At its end all have ended.

    If one of them fails, all end, with its traceback and with what `hint` returns then. A single
    rank needs no process group in fp32. In bf16 it has one: FSDP keeps the parameters in fp32 and
    computes in bf16.

    The store is in this process, and lives as long as the ranks do. gloo needs it at the start
    alone. NCCL writes to it at the first collective of a GPU, and asks it now and then until the
    ranks end.
    """
    _, devices = devices_here(settings)
    in_fp32 = trunk_dtype(settings, devices[0]) == torch.float32
    if len(devices) == 1 and in_fp32:
        yield
        return
    listening = socket.create_server((HERE, 0))  # at any free port
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    with children_inherit():
        others = multiprocessing.spawn(
            _other_rank,
            (devices, port, train, arguments),
            len(devices) - 1,
            join=False,
            daemon=True,
        )
    watching = threading.Thread(target=_watch, args=(others, hint), daemon=True)
    watching.start()
    join_ranks(0, devices, store)
    yield
    dist.destroy_process_group()
    watching.join(60)  # seconds, in which nothing should take one


def _other_rank(
    number: int, devices: list[str], port: int, train: Callable, arguments: tuple
) -> None:
    belong_to_the_run()
    join_ranks(number + 1, devices, dist.TCPStore(HERE, port))
    train(number + 1, *arguments)
    dist.destroy_process_group()
    os._exit(0)  # at once: if Python ends slowly, one of gloo's threads may abort the process


def _watch(others, hint: Callable) -> None:
    """If another rank fails, end this process and the whole run: the main thread might wait for
    that rank for ever."""
    try:
        while not others.join(grace_period=0.5):  # they ignore SIGTERM, and are killed after that
            pass
    except Exception as error:
        if ending.is_set() and isinstance(error, multiprocessing.ProcessExitedException):
            return  # this process has ended that rank itself
        time.sleep(0.1)
        print(
            f"\nerror: a process of the trainer has failed, and the run ends{hint()}\n{error}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def end_children() -> None:
    """Kill all child processes. They ignore the SIGTERM that Python sends at its end, and it would
    wait for ever."""
    ending.set()
    for child in multiprocessing.active_children():
        child.kill()


class Stop:
    """Ctrl-C or SIGTERM: the first ends the run when it can be saved, the second ends it at once. A
    signal within a second is the same one: `timeout` and job schedulers signal a process and then
    its group."""

    def __init__(self):
        self.number, self.at = 0, 0.0  # of the signal; clock reading when it came

    def asked(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self.number > 0

    def listen(self) -> None:
        """Handle the signals from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _) -> None:
        if not self.asked():
            self.number, self.at = number, time.monotonic()
            say(
                "Stopping after this step, with a checkpoint if training has begun. Once more stops"
                " at once, without."
            )
        elif time.monotonic() - self.at > 1.0:
            raise KeyboardInterrupt
