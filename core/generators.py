"""The generators: how the trainer starts, hears and ends them; what such a process does."""

import contextlib
import dataclasses
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.multiprocessing as multiprocessing
import transformers
from transformers import PreTrainedModel

from core.engine import Engine, EngineSettings, NoEngine
from core.model import load_model, put_on_device
from core.rollouts import Report, SharedParameters, Work
from core.torch_engine import TorchEngine
from core.vllm_engine import VllmEngine


class GeneratorFailed(Exception):
    """A generator has ended by itself, or is silent. The message holds its traceback, its signal or
    its exit status."""


@dataclass
class Generator:
    """The trainer's side of one generator process."""

    number: int
    process: multiprocessing.Process
    work: multiprocessing.Queue
    reports: multiprocessing.Queue
    heard: float  # clock reading when it was started, or when its last report came
    slots: int = 0  # of its engine; 0 until it has reported that it is ready


def start_generator(
    number: int, process: Callable, engine: EngineSettings, parameters: SharedParameters
) -> Generator:
    """Start a generator: process(engine, parameters, work, reports) in a process of its own. Its
    first report says that it is ready. It sees only the GPUs of its engine, under the names cuda:0,
    cuda:1 and so on."""
    gpus = [torch.device(device).index for device in engine.devices if device != "cpu"]
    context = multiprocessing.get_context(
        "spawn" if gpus else "forkserver"
    )  # CUDA does not survive a fork
    work, reports = context.Queue(), context.Queue()
    seen_as = tuple(f"cuda:{i}" for i in range(len(gpus))) or engine.devices
    child = context.Process(
        target=process,
        args=(dataclasses.replace(engine, devices=seen_as), parameters, work, reports),
        name=f"generator {number} on {','.join(engine.devices)}",
        daemon=len(engine.devices)
        == 1,  # a daemon may have no processes of its own, which vLLM has for several GPUs
    )
    # Only for a spawned child. CUDA reads this variable once, at the first call in a process,
    # perhaps in an import.
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(
        ours.split(",")[gpu] if ours else str(gpu) for gpu in gpus
    )
    handler = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a spawned child inherits this: Ctrl-C is for the trainer
    child.start()
    signal.signal(signal.SIGINT, handler)
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    if ours is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ours
    # The trainer keeps its own end of each pipe only. If the generator dies, even in the middle of
    # a message, reading then meets an end of file, and writing an error. Otherwise both would wait
    # for ever.
    reports._writer.close()
    work._reader.close()
    work._ignore_epipe = True
    return Generator(number, child, work, reports, heard=time.monotonic())


def read_reports(generator: Generator, timeout: float) -> list[Report]:
    """The reports that have come, perhaps none. GeneratorFailed if the generator has died, or if it
    has sent nothing for `timeout` seconds: it should report every few seconds."""
    reports = []
    alive = (
        generator.process.is_alive()
    )  # asked before reading: the last reports of a dead generator still count
    with contextlib.suppress(
        queue.Empty, EOFError, OSError
    ):  # the latter two while it dies: the next call says so
        while True:
            reports.append(generator.reports.get_nowait())
            generator.heard, generator.slots = (
                time.monotonic(),
                reports[-1].slots or generator.slots,
            )
            if reports[-1].error is not None:
                raise GeneratorFailed(f"{generator.process.name} failed:\n{reports[-1].error}")
    if reports:
        return reports
    if not alive:
        code = generator.process.exitcode
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        raise GeneratorFailed(f"{generator.process.name} ended {how} and reported no error")
    if time.monotonic() - generator.heard > timeout:
        raise GeneratorFailed(
            f"{generator.process.name} has been silent for {timeout:.0f} s (--wait-timeout)"
        )
    return reports


def discard(generator: Generator) -> None:
    """Kill a generator, if it lives, and close its queues."""
    generator.process.kill()
    generator.process.join()
    for end in (generator.work, generator.reports):
        end.cancel_join_thread()
        end.close()


# --- the generator, a process of its own -----------------------------------------------------------

HEARTBEAT = 5.0  # the most seconds between two reports, if no step of the engine takes longer


def generator_process(
    settings: EngineSettings, parameters: SharedParameters, work: queue.Queue, reports: queue.Queue
) -> None:
    """Sample what comes through `work`, with the newest parameters, until told to stop. Any
    exception is sent to the trainer, with its traceback unless it is `NoEngine` or memory is full.
    When the trainer dies, the process ends."""
    belong_to_the_run()
    try:
        _generate(settings, parameters, work, reports)
    except BaseException as error:
        text = str(error) if isinstance(error, NoEngine) else traceback.format_exc()
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            text = out_of_memory(error)
        reports.put(Report(error=text))
        raise SystemExit(1) from None


def _generate(
    settings: EngineSettings, parameters: SharedParameters, work: queue.Queue, reports: queue.Queue
) -> None:
    transformers.utils.logging.disable_progress_bar()
    engine = make_engine(settings)
    if (
        isinstance(engine, TorchEngine) and engine.device.type == "cuda"
    ):  # the workers of vLLM do it themselves
        parameters.pin()
    engine.update(parameters)
    reports.put(Report(slots=engine.slots))
    busy, reported, events = 0.0, time.monotonic(), []
    while True:
        # 1. First take all the work, then the parameters. The trainer has read the version of a group before it sent
        # the work, so no token is sampled with parameters older than that.
        waits, began = engine.unfinished == 0, time.monotonic()
        while (message := _next_work(work, wait=engine.unfinished == 0)) is not None:
            if message.stop:
                return
            engine.add(message.requests)
        if waits:
            events.append((began, time.monotonic(), None))
        if parameters.version > engine.version:
            began = time.monotonic()
            engine.update(parameters)
            events.append((began, time.monotonic(), engine.version))

        # 2. One token for everything in flight.
        started = time.monotonic()
        rollouts = engine.step()
        training = [not request.validation for request in engine.in_flight]
        training += [not rollout.request.validation for rollout in rollouts]
        busy += (time.monotonic() - started) * sum(training) / max(1, len(training))

        # 3. What has ended goes back; now and then an empty report says that the process lives.
        if rollouts or time.monotonic() - reported > HEARTBEAT:
            sampled = sum(
                int(rollout.sampled.sum()) for rollout in rollouts if not rollout.request.validation
            )
            reports.put(Report(rollouts, busy, sampled, events=events))
            busy, reported, events = 0.0, time.monotonic(), []


def _next_work(work: queue.Queue, wait: bool) -> Work | None:
    """The next message; None if there is none yet. With `wait` it may take a second to come."""
    try:
        return work.get(timeout=1.0) if wait else work.get_nowait()
    except queue.Empty:
        return None


def out_of_memory(error: BaseException) -> str:
    """A sentence for the user."""
    return f"out of memory ({str(error).partition('. ')[0]}): lower --slots or the budgets"


def make_engine(settings: EngineSettings, model: PreTrainedModel | None = None) -> Engine:
    """The engine, ready for its first `update`. ValueError, in one sentence, if there can be none.
    model: the same model on the CPU in fp32, if it is loaded already; TorchEngine takes it as its
    own."""
    torch.set_num_threads(settings.threads)
    if settings.engine == "vllm":
        return VllmEngine(settings)
    model = model or load_model(settings.model, torch.device("cpu"), torch.float32)
    dtype, fp32_head = getattr(torch, settings.dtype), settings.decoding.fp32_logits
    put_on_device(model, torch.device(settings.devices[0]), dtype, fp32_head)
    return TorchEngine(model, settings.decoding, settings.slots)


def belong_to_the_run() -> None:
    """A process that the trainer has started calls this first. It then ends when the trainer dies,
    even if its main thread is busy. It ignores Ctrl-C and SIGTERM, which reach whole groups of
    processes: the trainer handles them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
