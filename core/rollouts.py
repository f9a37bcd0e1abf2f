"""What crosses between processes: requests and rollouts through queues, parameters through shared
memory.

    trainer:    work.put([Request, ...])                generator:  engine.add(work.get())
                parameters.write(named_parameters, step)            parameters.read_into(model)
                reports.get().rollouts                              reports.put(Report(rollouts))

Version v of the parameters is what v optimizer steps have made. All times are readings of
`time.monotonic`, a clock that the processes of a machine share.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from core.screen import warn
from data import Problem
from data.verify import Verdict

READ_TIMEOUT = 60.0  # seconds to wait for parameters that are complete


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    # The number of its group: the completions of one prompt at one visit, or at one place of a
    # validation.
    group: int
    index: int  # place within the group
    prompt_ids: list[int]  # token ids, chat template included
    thinking_budget: int  # sampled tokens after which thinking is interrupted
    # Of the noise: the same request is sampled alike in any slot of any generator.
    seed: tuple[int, ...]
    validation: bool = False  # then it is sampled before the waiting requests for training


@dataclass(frozen=True)
class Rollout:
    """One completion as it was sampled. Arrays have one entry per completion token, EOS and forced
    tokens included."""

    request: Request
    tokens: np.ndarray  # int32 [T]: token ids
    sampled: np.ndarray  # bool [T]: False if the token was forced
    # float32 [T]: log pi_gen when the token was sampled; 0, without meaning, if it was forced.
    logprobs: np.ndarray
    versions: np.ndarray  # int32 [T]: version of the parameters in use
    interrupted: bool = False  # thinking reached its budget and got the phrase
    truncated: bool = False  # reached the token limit without ending
    began: float = 0.0  # when its sampling began
    ended: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.request.prompt_ids) + len(self.tokens)


def given_rollout(prompt_ids: list[int], tokens: list[int]) -> Rollout:
    """A rollout of these tokens, as if they had been sampled."""
    T = len(tokens)
    return Rollout(
        request=Request(0, 0, prompt_ids, T, seed=(0,)),
        tokens=np.array(tokens, np.int32),
        sampled=np.ones(T, bool),
        logprobs=np.zeros(T, np.float32),
        versions=np.zeros(T, np.int32),
    )


@dataclass(frozen=True)
class Report:
    """Generator to trainer, at least every few seconds. `busy_seconds` and `events` are since the
    last report. While completions for a validation are sampled too, `busy_seconds` counts only the
    share of those for training."""

    rollouts: list[Rollout] = field(default_factory=list)
    busy_seconds: float = 0.0  # in steps of the engine: neither waiting nor taking parameters over
    # What the engine did beside sampling: from when, until when, and the version of the parameters
    # that it took over; None: it had no work.
    events: list[tuple] = field(default_factory=list)
    # Of the engine; only in the first report, which says that the generator is ready.
    slots: int | None = None
    error: str | None = None  # a traceback, or a sentence for the user: the generator has ended


@dataclass
class Group:
    """The completions of one prompt at one visit, from when it is handed out until it is trained
    on."""

    number: int  # unique in the run, in the order of handing out; in a validation, the place in it
    source: int  # index of the source of its problem
    problem_index: int  # place of the problem in that source
    problem: Problem
    version: int  # of the parameters when it was handed out: no token is older
    generator: int  # the number of the generator that samples it
    requests: list[Request]
    rollouts: dict[int, Rollout] = field(default_factory=dict)  # by their index, as they come back
    verdicts: dict[int, Verdict] = field(default_factory=dict)  # by index, from the verifiers

    @property
    def finished(self) -> bool:
        """Whether each completion has come back and has been judged."""
        return len(self.verdicts) == len(self.requests)

    @property
    def pass_rate(self) -> float:
        """The share of the completions that is correct; one that has no verdict or is truncated is
        not."""
        return sum(verdict.correct for verdict in self.verdicts.values()) / len(self.requests)

    @property
    def pass_at_n(self) -> bool:
        """Whether at least one of the completions is correct."""
        return self.pass_rate > 0

    @property
    def score_mean(self) -> float:
        """The mean score of the completions, 0 without a verdict. If every score is 0 or 1, it is
        the pass rate."""
        return sum(verdict.score for verdict in self.verdicts.values()) / len(self.requests)

    def judged(self) -> list[tuple[Rollout, Verdict]]:
        """The completions with their verdicts, by index."""
        return [(self.rollouts[i], self.verdicts[i]) for i in range(len(self.requests))]


class Batch:
    """A batch of groups as tensors: P groups of G completions each, on the CPU. version: of the
    parameters that are trained on it."""

    def __init__(self, groups: list[Group], version: int):
        self.groups = groups
        # P x G pairs, group by group.
        self.judged = judged = [pair for group in groups for pair in group.judged()]
        self.rollouts = [rollout for rollout, _ in judged]
        tensor_PG = lambda values: torch.tensor(values).view(len(groups), -1)
        lengths = [int(rollout.sampled.sum()) for rollout in self.rollouts]
        self.lengths_PG = tensor_PG(lengths)  # int64: sampled tokens
        self.scores_PG = tensor_PG([float(verdict.score) for _, verdict in judged])  # float32
        usable = [not (verdict.failure or rollout.truncated) for rollout, verdict in judged]
        self.usable_PG = tensor_PG(usable)
        # How off-policy each sampled token is: the optimizer steps since the parameters that it was
        # sampled with.
        versions = [rollout.versions[rollout.sampled] for rollout in self.rollouts]
        self.ages_N = version - np.concatenate(versions)


def kept_buffers(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """The buffers that a checkpoint has beside the parameters, such as the bias of DeepSeek-V3's
    router, by name."""
    kept = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in kept]


class SharedParameters:
    """The newest parameters of the trainer, in shared memory, float32. Each of the trainer's ranks
    writes its shard (`publish` in train.py); any number of generators read. W ranks.

    Why no reader ever takes over half an update: a rank writes down the version in `begun_W` before
    it writes any parameter, and in `written_W` after the last one. A version is complete when both
    have it at every rank. A reader copies only a complete version, and looks again after the copy.
    If any rank has begun to write by then, the reader copies again.

    There is no lock, which could stay closed when its owner dies, and no queue, which would deliver
    the oldest first.
    """

    def __init__(self, model: PreTrainedModel, ranks: int = 1):
        """ValueError if the system gives no memory."""
        head = model.get_output_embeddings().weight
        self.shapes = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # what reads pictures is never changed
                self.shapes[name] = parameter.shape
            if parameter is head:
                self.head_name = name  # of the embedding, if they are tied
        self.shapes |= {name: buffer.shape for name, buffer in kept_buffers(model)}
        try:
            numbers = sum(shape.numel() for shape in self.shapes.values())
            self.flat = torch.empty(numbers).share_memory_()
        except RuntimeError as error:
            raise ValueError(
                f"no shared memory for the parameters ({error}): make /dev/shm larger (Docker:"
                " --shm-size) or writable, remove what dead runs have left there (torch_*), or"
                " raise `ulimit -f`"
            ) from None
        self.begun_W, self.written_W = torch.full((2, ranks), -1).share_memory_()  # int64: versions

    def views(self) -> dict[str, Tensor]:
        """The parameters by name, as views of the shared memory."""
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), self.flat.split(sizes))
        return {name: part.view(shape) for (name, shape), part in parts}

    def on(self, device: torch.device, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These parameters by name, each copied to the device when its turn comes; at the end all
        copies are made. They stay in fp32, and the caller casts: a copy to a GPU would cast on the
        CPU first. A reader whose head is not tied to its embedding asks for the head by a name that
        is not stored here. It gets the weight that is the head here."""
        views = self.views()
        for name in names:
            yield name, views.get(name, views[self.head_name]).to(device, non_blocking=True)
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    @property
    def version(self) -> int:
        """The newest version that every rank has written; -1: none yet. A newer one may be half
        written over it."""
        return int(self.written_W.min())

    def holds(self, version: int) -> bool:
        """Whether this version is complete and nobody has begun to write over it."""
        return all((each == version).all() for each in (self.written_W, self.begun_W))

    @torch.no_grad()
    def write(self, parameters: Iterable[tuple[str, Tensor]], version: int, rank: int = 0) -> None:
        """Write the part that this rank of the trainer has: its shard of a sharded parameter, and
        all of any other."""
        self.begun_W[rank] = version
        views = self.views()
        for name, parameter in parameters:
            if name not in views:
                continue
            if isinstance(parameter, DTensor):
                # As FSDP has cut it, along the first dimension.
                shards = views[name].chunk(len(self.begun_W))
                if rank < len(shards):  # a short dimension has fewer shards than there are ranks
                    shards[rank].copy_(parameter.to_local())
            else:
                views[name].copy_(parameter)
        self.written_W[rank] = version

    def read(self, copy: Callable) -> int:
        """Call `copy`, which copies the parameters, until no write has come between. Returns the
        version that was copied, the newest. TimeoutError if that does not happen within
        READ_TIMEOUT seconds."""
        deadline = time.monotonic() + READ_TIMEOUT
        while time.monotonic() < deadline:
            version = self.version
            if version >= 0 and self.holds(version):
                copy()
                if self.holds(version):
                    return version
            time.sleep(0.001)
        raise TimeoutError(
            f"no complete version of the parameters within {READ_TIMEOUT:.0f} s:"
            " has the trainer died?"
        )

    @torch.no_grad()
    def read_into(self, model: PreTrainedModel) -> int:
        """`read` into the parameters of a model."""
        named = model.named_parameters()
        parameters = {name: parameter for name, parameter in named if parameter.requires_grad}

        def copy() -> None:
            for name, values in self.on(model.device, parameters):
                parameters[name].copy_(values)

        return self.read(copy)

    def pin(self) -> None:
        """Lock the memory for this process, as long as this object is there: copies to and from its
        GPU then run at the full speed of the bus. If the driver refuses, a warning says so, and
        they are slower."""
        cuda, address = torch.cuda.cudart(), self.flat.data_ptr()
        try:
            torch.cuda.check_error(cuda.cudaHostRegister(address, self.flat.nbytes, 0))
            # Otherwise copies would go to these pages for ever, whatever lies at their address.
            unlock = weakref.finalize(self, cuda.cudaHostUnregister, address)
            unlock.atexit = False  # the driver ends then too
        except torch.cuda.CudaError as error:
            warn("pin", f"the driver does not lock shared memory ({error}): copies are slower")
            # CUDA keeps the error, and the next kernel would raise it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
