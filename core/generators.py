"""The generators: how the trainer starts, hears and ends them; what such a process does, or does in
the trainer's own process."""

import contextlib
import dataclasses
import os
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait

import torch
import torch.multiprocessing as multiprocessing
from transformers import PreTrainedModel

from core.engine import Engine, EngineSettings, NoEngine
from core.model import load_model, put_on_device
from core.processes import belong_to_the_run, signals_deferred
from core.rollouts import Report, Request, Rollout, SharedParameters
from core.torch_engine import TorchEngine, engine_that_fits
from core.vllm_engine import VllmEngine

# --- the trainer's side ---------------------------------------------------------------------------


class GeneratorFailed(Exception):
    """A generator cannot be started, has ended by itself, or is silent. The message holds the
    system's error, its traceback, its signal or its exit status."""


class Generator:
    """The trainer's side of a generator, whose process runs `generator_process`."""

    def __init__(self, number: int, settings: EngineSettings, parameters: SharedParameters):
        """Start the process. Its first report says that it is ready. It sees only the GPU of its
        engine, under the name cuda:0. GeneratorFailed if the system lets no process or queue
        begin."""
        name, visible = f"generator {number} on {settings.device}", ""
        context = multiprocessing.get_context("forkserver")
        if settings.device != "cpu":
            gpu, ours = torch.device(settings.device).index, os.environ.get("CUDA_VISIBLE_DEVICES")
            visible = ours.split(",")[gpu] if ours else str(gpu)
            context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
            settings = dataclasses.replace(settings, device="cuda:0")
        try:
            with signals_deferred():
                self.work, reports = context.Queue(), context.Queue()
                self.process = context.Process(
                    target=generator_process,
                    args=(visible, settings, parameters, self.work, reports),
                    name=name,
                    daemon=True,
                )
                self.process.start()
        except (OSError, EOFError) as error:
            raise GeneratorFailed(
                f"{name} cannot be started ({error}): is /dev/shm full, or the number of processes"
                " or files at its limit?"
            ) from error
        self.number = number
        self.slots = 0  # of its engine; 0 until it has reported that it is ready
        self.heard = time.monotonic()  # when it was started, or when its last report came
        self.reports = queue.SimpleQueue()  # that have come
        given = reports, self.reports, self.process.sentinel
        self.receiver = threading.Thread(target=receive, args=given, daemon=True)
        self.receiver.start()

    def give(self, requests: list[Request]) -> None:
        """Completions to sample. Returns at once."""
        self.work.put(requests)

    def read_reports(self, timeout: float) -> Iterator[Report]:
        """The reports that have come, perhaps none. GeneratorFailed after them if the generator has
        failed or died, or if it has sent nothing for `timeout` seconds: it should report every few
        seconds."""
        # Asked before reading: the last reports of a dead generator still count.
        alive = self.process.is_alive()
        if not alive:
            self.receiver.join(2.0)
        with contextlib.suppress(queue.Empty):
            while True:
                report = self.reports.get_nowait()
                if report.error:
                    raise GeneratorFailed(f"{self.process.name} failed:\n{report.error}")
                self.heard = time.monotonic()
                self.slots = report.slots or self.slots
                yield report
        if not alive:
            code = self.process.exitcode
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            raise GeneratorFailed(f"{self.process.name} ended {how} and reported no error")
        if time.monotonic() - self.heard > timeout:
            raise GeneratorFailed(
                f"{self.process.name} has been silent for {timeout:.0f} s (--wait-timeout)"
            )

    def stop(self) -> None:
        """Ask it to end. Returns at once."""
        with contextlib.suppress(ValueError):  # it was killed, and no other could replace it
            self.work.put(None)

    def close(self, timeout: float = 0.0) -> None:
        """Kill it, if it has not ended within `timeout` seconds, and close its queue."""
        self.process.join(timeout)
        self.process.kill()
        self.process.join()
        self.work.cancel_join_thread()
        self.work.close()


def receive(reports: multiprocessing.Queue, come: queue.SimpleQueue, ended: int) -> None:
    """Bring the reports of a generator into this process, until `ended`, its sentinel, says that it
    has ended. It may be stopped or killed in the middle of a report. Whoever reads that waits for
    ever, so this is a thread."""
    while True:
        try:
            come.put(reports.get(timeout=1.0))
        except queue.Empty:
            if wait([ended], 0):
                return


# --- the generator, a process of its own ----------------------------------------------------------

HEARTBEAT = 5.0  # the most seconds between two reports, if no step of the engine takes longer


def generator_process(
    gpu: str,
    settings: EngineSettings,
    parameters: SharedParameters,
    work: multiprocessing.Queue,
    reports: multiprocessing.Queue,
) -> None:
    """Sample what comes through `work`, with the newest parameters, until told to stop. Any
    exception is sent to the trainer, with its traceback unless it is `NoEngine` or memory is full.
    When the trainer dies, the process ends. gpu: the one it may see, as CUDA_VISIBLE_DEVICES."""
    # First of all: CUDA reads it once, at the first call.
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    belong_to_the_run()
    try:
        if settings.device != "cpu":
            parameters.pin()
        sampler = Sampler(settings, parameters)
        reports.put(Report(slots=sampler.engine.slots))
        reported = time.monotonic()
        while True:
            # 1. First take all the work, then the parameters. The trainer has read the version of a
            # group before it sent the work, so no token is sampled with parameters older than that.
            with contextlib.suppress(queue.Empty):
                while True:
                    requests = work.get(timeout=0.0 if sampler.engine.unfinished else 1.0)
                    if requests is None:
                        return
                    sampler.add(requests)

            # 2. One token for everything in flight.
            rollouts = sampler.step()

            # 3. What has ended goes back; now and then an empty report says that the process lives.
            if rollouts or time.monotonic() - reported > HEARTBEAT:
                reports.put(sampler.report(rollouts))
                reported = time.monotonic()
    except BaseException as error:
        text = str(error) if isinstance(error, NoEngine) else traceback.format_exc()
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            text = out_of_memory(error)
        reports.put(Report(error=text))
        raise SystemExit(1) from None


class Sampler:
    """An engine that always has the newest parameters, and what it has done since its last
    report."""

    def __init__(self, settings: EngineSettings, parameters: SharedParameters):
        self.engine = make_engine(settings)
        self.engine.update(parameters)
        self.parameters = parameters
        self.busy_seconds = 0.0  # these two are as in Report
        self.events = []
        self.idle_since = time.monotonic()

    def add(self, requests: list[Request]) -> None:
        """Queue completions to sample. If there were none, the wait for them is an event."""
        if not self.engine.unfinished:
            self.events.append((self.idle_since, time.monotonic(), None))
        self.engine.add(requests)

    def step(self) -> list[Rollout]:
        """Take over newer parameters, then add a token to each completion in flight. Returns those
        that have ended."""
        began = time.monotonic()
        if self.parameters.version > self.engine.version:
            self.engine.update(self.parameters)
            self.events.append((began, time.monotonic(), self.engine.version))
            began = time.monotonic()
        rollouts = self.engine.step()
        requests = self.engine.in_flight + [rollout.request for rollout in rollouts]
        if requests:
            self.idle_since = time.monotonic()
            for_training = sum(not request.validation for request in requests)
            self.busy_seconds += (self.idle_since - began) * for_training / len(requests)
        return rollouts

    def report(self, rollouts: list[Rollout]) -> Report:
        """The report with these rollouts."""
        report = Report(rollouts, self.busy_seconds, self.events)
        self.busy_seconds, self.events = 0.0, []
        return report


def make_engine(settings: EngineSettings, model: PreTrainedModel | None = None) -> Engine:
    """The engine, ready for its first `update`. ValueError, in one sentence, if there can be none.
    model: the same model on the CPU in fp32, if it is loaded already; TorchEngine takes it as its
    own."""
    torch.set_num_threads(settings.threads)
    if settings.engine == "vllm":
        return VllmEngine(settings)
    model, device = model or load_model(settings.model), torch.device(settings.device)
    put_on_device(model, device, settings.dtype, settings.decoding.fp32_logits)
    make = engine_that_fits if settings.may_halve else TorchEngine
    return make(model, settings.decoding, settings.slots)


def out_of_memory(error: BaseException) -> str:
    """A sentence for the user."""
    return f"out of memory ({str(error).partition('. ')[0]}): lower --slots or the budgets"


# --- the generator of --one-process ---------------------------------------------------------------
# It works in the trainer's process, by turns. So `breakpoint()`, a debugger and a traceback work in
# `TorchEngine.step` and in the loop; and in a task's `score`, by `VerifierHere`.


class GeneratorHere:
    """A generator with the calls of a `Generator`, and without a process: it adds a token to each
    completion when it is asked for reports."""

    def __init__(self, number: int, settings: EngineSettings, parameters: SharedParameters):
        self.number = number
        self.sampler = Sampler(settings, parameters)
        self.slots = self.sampler.engine.slots
        self.give = self.sampler.add

    def read_reports(self, _timeout: float) -> list[Report]:
        if not self.sampler.engine.unfinished:
            return []
        return [self.sampler.report(self.sampler.step())]

    def stop(self, *_) -> None:
        """No process is to end."""

    close = stop
