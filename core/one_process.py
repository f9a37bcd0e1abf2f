"""--one-process: the generator and the verifiers work in the trainer's own process, by turns.

The feed gives them work and reads what has come, as it does with processes. But nothing comes by
itself here: the engine makes a step when it is asked for reports, and a completion is judged when
it is submitted. So `breakpoint()`, a debugger and a traceback work in a task's `score`, in
`TorchEngine.step` and in the loop.
"""

import importlib
import os
import time
from collections.abc import Hashable

from core.engine import EngineSettings
from core.generators import Sampler
from core.rollouts import Report, Request, SharedParameters
from data import Problem
from data.sandbox import RaisedInside
from data.verify import Verdict, score_of


class GeneratorHere:
    """A generator with the calls of a `Generator`, and without a process."""

    def __init__(self, number: int, engine: EngineSettings, parameters: SharedParameters):
        self.number = number
        self.sampler = Sampler(engine, parameters)
        self.slots = self.sampler.engine.slots
        self.idle_since = time.monotonic()

    def give(self, requests: list[Request]) -> None:
        if self.sampler.engine.unfinished == 0:
            self.sampler.events.append((self.idle_since, time.monotonic(), None))
        self.sampler.engine.add(requests)

    def read_reports(self, _timeout: float) -> list[Report]:
        """Add a token to each completion in flight. The report has those that have ended."""
        if self.sampler.engine.unfinished == 0:
            return []
        report = self.sampler.report(self.sampler.step())
        self.idle_since = time.monotonic()
        return [report]

    def stop(self) -> None:
        """No process is to end."""

    def close(self, _timeout: float = 0.0) -> None:
        """No process is to end."""


class VerifierHere:
    """A verifier with the calls of a `VerifierPool`, and without processes and limits. What a
    task's `score` raises goes up to the user."""

    def __init__(self, _workers: int, time_limit: float, _memory_gib: float):
        os.environ["SCORE_SECONDS"] = str(time_limit)  # tasks that run programs read it
        self.judged = []  # keys with their verdicts, not taken yet

    def submit(self, items: list[tuple[Hashable, Problem, str]]) -> None:
        for key, problem, completion in items:
            task = importlib.import_module(problem.task)
            try:
                verdict = Verdict(score_of(task, problem, completion))
            except RaisedInside as error:  # in the sandbox: the completion is wrong
                verdict = Verdict(0.0, detail=str(error))
            self.judged.append((key, verdict))

    def results(self) -> list[tuple[Hashable, Verdict]]:
        judged, self.judged = self.judged, []
        return judged

    def close(self) -> None:
        """No process is to end."""
