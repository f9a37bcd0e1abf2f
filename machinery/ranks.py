"""The ranks, processes of the trainer: how they start, what they tell each other, how they end; and
how a run ends on a signal.

Every rank runs the same loop (train.py) and gets the same groups. Rank 0 is the process that the
user has started.
"""

import contextlib
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

from core.processes import SIGNALS, belong_to_the_run, signals_deferred
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
    here.

    Rank 0 may wait long for generators, so the others wait for it as long as it lives. In all other
    places a rank that another one waits for must come within --wait-timeout."""
    rank, ranks = rank_and_ranks()
    box = [call(*arguments) if rank == 0 else None]
    if ranks > 1:
        store, number = store_and_number()
        if rank == 0:
            store.set(f"answer {number}", "")
        store.wait([f"answer {number}"], timedelta(days=30))
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


def store_and_number() -> tuple[dist.Store, int]:
    """The store where the ranks have met, in rank 0's process, and the number of this call, which
    all ranks make."""
    store = dist.distributed_c10d._get_default_store()
    return store, store.add(f"calls of rank {dist.get_rank()}", 1)


def refuse_alone(outcome: str, patience: float) -> None:
    """Every rank calls this at the same place, with what has come out of a try. It always ends:
    torch.OutOfMemoryError if it has come out otherwise at another rank, or if another rank has not
    come here within `patience` seconds, since it waits for this one elsewhere."""
    rank, ranks = rank_and_ranks()
    if ranks == 1:
        return
    store, number = store_and_number()
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
TO_START = timedelta(minutes=10)  # imports from a slow disk take long


class RankSilent(Exception):
    """A rank has not come to where another one waits for it. The message is for the user."""


@contextlib.contextmanager
def one_of_the_ranks(rank: int, settings: Settings, store: dist.Store) -> Iterator[None]:
    """In this block this process is one of the trainer's ranks, which have met in this store. They
    wait for each other at most --wait-timeout, but see `from_rank_0`: RankSilent where gloo has
    waited longer. NCCL does not raise: it ends the process."""
    patience = settings.wait_timeout
    _, devices = devices_here(settings)
    backend = "gloo"
    if devices[rank].startswith("cuda"):
        torch.cuda.set_device(devices[rank])  # first of all: otherwise some allocations go to GPU 0
        backend = "cpu:gloo,cuda:nccl"
    here = [f"rank {each} is here" for each in range(len(devices))]
    store.set(here[rank], "")
    store.wait(here, TO_START)
    timeout = timedelta(seconds=patience)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=len(devices), timeout=timeout
    )
    dist.barrier()
    try:
        yield
    except RuntimeError as error:
        if "Timed out" not in str(error):
            raise
        raise RankSilent(
            f"a rank of the trainer has been silent for {patience:.0f} s (--wait-timeout)"
        ) from error
    dist.destroy_process_group()


@contextlib.contextmanager
def other_ranks(
    settings: Settings, train: Callable, arguments: tuple, leave: Callable
) -> Iterator[None]:
    """In this block there are the trainer's other ranks, each a process that calls train(rank,
    *arguments), and this process is rank 0. At its end all have ended.

    If one of them fails, all end, with its traceback (leave: see `end_at_once`). RankSilent if one
    hangs. A single rank needs no process group in fp32. In 16 bits it has one: FSDP keeps the
    parameters in fp32 and computes in 16 bits.

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
    with signals_deferred():
        others = multiprocessing.spawn(
            _other_rank,
            (settings, port, train, arguments),
            len(devices) - 1,
            join=False,
            daemon=True,
        )
    watching = threading.Thread(target=_watch, args=(others, leave), daemon=True)
    watching.start()
    with one_of_the_ranks(0, settings, store):
        yield
    watching.join(60)  # seconds, in which nothing should take one


def _other_rank(
    number: int, settings: Settings, port: int, train: Callable, arguments: tuple
) -> None:
    belong_to_the_run()
    rank = number + 1
    with one_of_the_ranks(rank, settings, dist.TCPStore(HERE, port)):
        train(rank, *arguments)
    os._exit(0)  # at once: if Python ends slowly, one of gloo's threads may abort the process


def _watch(others, leave: Callable) -> None:
    """If another rank fails, end this process and the whole run: the main thread might wait for
    that rank for ever."""
    try:
        while not others.join(grace_period=0.5):  # they ignore SIGTERM, and are killed after that
            pass
    except Exception as error:
        if ending.is_set() and isinstance(error, multiprocessing.ProcessExitedException):
            return  # this process has ended that rank itself
        time.sleep(0.1)
        print(f"\n{error}", file=sys.stderr)
        end_at_once("error: a process of the trainer has failed, and the run ends", 1, leave)


def end_at_once(why: str, status: int, leave: Callable) -> None:
    """End the run with this sentence, whatever the main thread does. leave: leaves its folder as it
    should be, and returns how to go on."""
    print(f"\n{why}{leave()}", file=sys.stderr, flush=True)
    end_children()
    os._exit(status)


def end_children() -> None:
    """Kill all child processes. They ignore the SIGTERM that Python sends at its end, and it would
    wait for ever."""
    ending.set()
    for child in multiprocessing.active_children():
        child.kill()


class Stop:
    """Ctrl-C, or another of SIGNALS: the first ends the run when it can be saved, the second ends
    it at once. A signal within a second is the same one: `timeout` and job schedulers signal a
    process and then its group."""

    def __init__(self):
        self.number, self.at = 0, 0.0  # of the first signal; clock reading when it came

    def asked(self) -> bool:
        """Whether a signal has asked the run to end."""
        return self.number > 0

    @contextlib.contextmanager
    def listening(self, leave: Callable) -> Iterator[None]:
        """In this block the signals are handled in a thread: the main thread may sit in a
        collective and hear nothing. At its end the thread has ended: Python may abort if it ends
        first. leave: see `end_at_once`."""
        come, to_thread = os.pipe()  # the number of each signal goes through it
        os.set_blocking(to_thread, False)
        signal.set_wakeup_fd(to_thread)
        thread = threading.Thread(target=self._hear, args=(come, leave), daemon=True)
        thread.start()
        for number in SIGNALS:
            # `nohup` ignores a closed terminal for its command.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            os.close(to_thread)
            thread.join()

    def _hear(self, come: int, leave: Callable) -> None:
        with open(come, "rb", buffering=0) as signals:
            while number := signals.read(1):
                if ord(number) not in SIGNALS:
                    continue
                if not self.asked():
                    self.at, self.number = time.monotonic(), ord(number)
                    say(
                        "Stopping after this step, with a checkpoint if training has begun. Once"
                        " more stops at once, without."
                    )
                elif time.monotonic() - self.at > 1.0:
                    end_at_once("stopped at once", 128 + ord(number), leave)
