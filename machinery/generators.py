"""The generator processes, as the trainer sees them: started, heard, ended."""

import contextlib
import dataclasses
import os
import queue
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.multiprocessing as multiprocessing

from machinery.engine import EngineSettings
from machinery.rollouts import Report, SharedParameters


class GeneratorFailed(Exception):
    """A generator has ended by itself, or is silent. The message holds its traceback, its signal or its exit status."""


@dataclass
class Generator:
    """The trainer's side of one generator process."""

    number: int
    process: multiprocessing.Process
    work: multiprocessing.Queue
    reports: multiprocessing.Queue
    heard: float  # clock reading when it was started, or when its last report came
    slots: int = 0  # of its engine; 0 until it has reported that it is ready


def start_generator(number: int, process: Callable, engine: EngineSettings, parameters: SharedParameters) -> Generator:
    """Start a generator: process(engine, parameters, work, reports) in a process of its own. Its first report says that
    it is ready. It sees only the GPUs of its engine, under the names cuda:0, cuda:1 and so on."""
    gpus = [torch.device(device).index for device in engine.devices if device != "cpu"]
    context = multiprocessing.get_context("spawn" if gpus else "forkserver")  # CUDA does not survive a fork
    work, reports = context.Queue(), context.Queue()
    seen_as = tuple(f"cuda:{i}" for i in range(len(gpus))) or engine.devices
    child = context.Process(
        target=process,
        args=(dataclasses.replace(engine, devices=seen_as), parameters, work, reports),
        name=f"generator {number} on {','.join(engine.devices)}",
        daemon=len(engine.devices) == 1,  # a daemon may have no processes of its own, which vLLM has for several GPUs
    )
    # Only for a spawned child. CUDA reads this variable once, at the first call in a process, perhaps in an import.
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ours.split(",")[gpu] if ours else str(gpu) for gpu in gpus)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a spawned child inherits this: Ctrl-C is for the trainer
    child.start()
    signal.signal(signal.SIGINT, handler)
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if ours is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ours
    # The trainer keeps its own end of each pipe only. If the generator dies, even in the middle of a message, reading
    # then meets an end of file, and writing an error. Otherwise both would wait for ever.
    reports._writer.close()
    work._reader.close()
    work._ignore_epipe = True
    return Generator(number, child, work, reports, heard=time.monotonic())


def read_reports(generator: Generator, timeout: float) -> list[Report]:
    """The reports that have come, perhaps none. GeneratorFailed if the generator has died, or if it has sent nothing
    for `timeout` seconds: it should report every few seconds."""
    reports = []
    alive = generator.process.is_alive()  # asked before reading: the last reports of a dead generator still count
    with contextlib.suppress(queue.Empty, EOFError, OSError):  # the latter two while it dies: the next call says so
        while True:
            reports.append(generator.reports.get_nowait())
            generator.heard, generator.slots = time.monotonic(), reports[-1].slots or generator.slots
            if reports[-1].error is not None:
                raise GeneratorFailed(f"{generator.process.name} failed:\n{reports[-1].error}")
    if reports:
        return reports
    if not alive:
        code = generator.process.exitcode
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        raise GeneratorFailed(f"{generator.process.name} ended {how} and reported no error")
    if time.monotonic() - generator.heard > timeout:
        raise GeneratorFailed(f"{generator.process.name} has been silent for {timeout:.0f} s (--wait-timeout)")
    return reports


def discard(generator: Generator) -> None:
    """Kill a generator, if it lives, and close its queues."""
    generator.process.kill()
    generator.process.join()
    for end in (generator.work, generator.reports):
        end.cancel_join_thread()
        end.close()
