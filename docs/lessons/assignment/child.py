"""Calls functions of hand-ins, each in a process of its own with a time limit. grader.py starts it,
and compares what comes back. It imports nothing of the project, so a hand-in finds nothing there.

    python -P child.py < jobs.json > outcomes.json

A job is {"hand_in": path, "function": name, "seconds": limit, "cases": [...]}. Its outcome is
{"results": [one for each case]} or {"error": a sentence}. All of it is JSON: to read a pickle that
a hand-in has written would be to run it.
"""

import contextlib
import importlib.util
import io
import json
import os
import select
import signal
import sys
import time
import traceback

import numpy as np
import scipy.optimize  # noqa: F401  # here once, so that the process of a hand-in has it already
import torch

MOST_NUMBERS = 10_000  # of a tensor that is returned

# --- values as JSON -------------------------------------------------------------------------------


def encode(value):
    """A tensor, a number, a text, None, or a tuple or list of these, as JSON; of anything else, its
    kind. A tuple becomes a list."""
    if isinstance(value, torch.Tensor):
        shape, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
        numbers = value.tolist() if value.numel() <= MOST_NUMBERS else []
        return {"tensor": numbers, "dtype": dtype, "shape": shape}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [encode(item) for item in value[:MOST_NUMBERS]]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        return {"array": value.tolist()}
    return {"kind": type(value).__name__}


def decode(value):
    """What `encode` has encoded: tensors, arrays and plain values."""
    if isinstance(value, dict) and "tensor" in value:
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    if isinstance(value, dict):
        return np.array(value["array"])
    return value


# --- one call -------------------------------------------------------------------------------------


def call(function, case):
    """What the function returns for the arguments of a case, and, if the case has a gradient_of,
    the gradient of the sum of what it returns by that argument."""
    arguments = {name: decode(value) for name, value in case["arguments"].items()}
    if "updates" in arguments:
        arguments |= pretended_generator(arguments.pop("updates"), arguments)
    if case["gradient_of"] is None:
        return encode(function(**arguments))
    by = arguments[case["gradient_of"]].requires_grad_()
    returned = function(**arguments)
    if not isinstance(returned, torch.Tensor):
        return encode([returned, None])
    gradient = None
    if returned.requires_grad:
        returned.sum().backward()
        gradient = by.grad
    return encode([returned.detach(), gradient])


def pretended_generator(updates, arguments):
    """newest() and sample() for sample_in_flight. updates: the version that each call of newest()
    returns; later calls return the last one. The token after n tokens is 10 x version + n, and its
    log-probability -version - n / 100. At place `ends_at` the token is `end`, if it is not None."""
    ends_at, end, calls = arguments.pop("ends_at"), arguments["end"], [0]

    def newest():
        version = updates[min(calls[0], len(updates) - 1)]
        calls[0] += 1
        return version, {"version": version}

    def sample(parameters, tokens):
        version, n = parameters["version"], len(tokens)
        token = end if n == ends_at else 10 * version + n
        return token, -version - n / 100

    return {"newest": newest, "sample": sample}


# --- one job, in a process of its own -------------------------------------------------------------


def run(job):
    """The outcome of a job, in this process."""
    torch.set_num_threads(1)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            specification = importlib.util.spec_from_file_location("hand_in", job["hand_in"])
            module = importlib.util.module_from_spec(specification)
            sys.modules["hand_in"] = module
            specification.loader.exec_module(module)
            function = getattr(module, job["function"])
            outcome = {"results": [call(function, case) for case in job["cases"]]}
    except BaseException as error:
        outcome = {"error": sentence(error, job["hand_in"])}
    return outcome | {"printed": printed.getvalue()[:MOST_NUMBERS]}


def sentence(error, hand_in):
    """An exception in one sentence, with the last line of the hand-in that it went through."""
    if isinstance(error, NotImplementedError) and not str(error):
        return "It is not written yet."
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == hand_in]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    place = f" in line {lines[-1]}" if lines else ""
    text = " ".join(str(error).split())[:200]
    return f"It raised {type(error).__name__}{place}: {text}"


def run_apart(job):
    """The outcome of a job, run in a process of its own, which ends at the time limit."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()  # a group of its own, so that what it starts ends with it
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        os.close(reader)
        with open(writer, "w") as pipe:
            json.dump(run(job), pipe)
        os._exit(0)
    os.close(writer)
    data, ends = b"", time.monotonic() + job["seconds"]
    in_time = True
    while in_time and (more := read_until(reader, ends)) != b"":
        in_time = more is not None
        data += more or b""
    os.close(reader)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    if not in_time:
        return {"error": f"It did not end within {job['seconds']} seconds."}
    try:
        return json.loads(data)
    except ValueError:
        return {"error": "Its process ended before it returned anything."}


def read_until(reader, ends):
    """The next bytes of a pipe, b"" at its end, or None if none come by this time."""
    ready, _, _ = select.select([reader], [], [], max(0, ends - time.monotonic()))
    return os.read(reader, 65536) if ready else None


if __name__ == "__main__":
    json.dump([run_apart(job) for job in json.load(sys.stdin)], sys.stdout)
