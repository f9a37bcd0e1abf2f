"""Grades hand-ins: their functions are called in processes of their own (child.py), and what they
return is compared here with what they must return."""

import ast
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from docs.lessons.assignment import child

POINTS = {
    "zero_variance": 5,
    "advantages": 10,
    "token_weights": 10,
    "cispo": 10,
    "clipped": 10,
    "sequence_ratio": 5,
    "interrupt_or_truncate": 5,
    "choose_batch": 15,
    "sample_in_flight": 15,
    "fit_sigmoid": 15,
}
SECONDS = 30  # for all cases of a function
LIBRARIES = {"numpy", "scipy", "torch"}  # a hand-in may import these, and of Python:
LIBRARIES |= {
    "__future__",
    "collections",
    "dataclasses",
    "functools",
    "itertools",
    "math",
    "typing",
}


# --- what a function must return ------------------------------------------------------------------


def same(expected, returned) -> bool:
    """Whether two encoded values that are no tensors agree; floats up to rounding."""
    if isinstance(expected, list) and isinstance(returned, list):
        return len(expected) == len(returned) and all(map(same, expected, returned))
    if isinstance(expected, float) and type(returned) in (int, float):
        return math.isclose(expected, returned, rel_tol=1e-4, abs_tol=1e-6)
    return type(expected) is type(returned) and expected == returned


def difference(expected, returned) -> str | None:
    """A sentence about the difference of two encoded values, or None."""
    if not isinstance(expected, dict):
        if same(expected, returned):
            return None
        return f"it returned {describe(returned)}, and must return {describe(expected)}"
    if not isinstance(returned, dict) or "tensor" not in returned:
        return f"it returned {describe(returned)}, and must return a tensor"
    for name in ("dtype", "shape"):
        if returned[name] != expected[name]:
            return f"the {name} is {returned[name]}, and must be {expected[name]}"
    left, right = np.array(returned["tensor"]), np.array(expected["tensor"])
    wrong = np.argwhere(~np.isclose(left, right, rtol=1e-4, atol=1e-6))
    if not len(wrong):
        return None
    place = tuple(wrong[0].tolist())
    return f"at {list(place)} it is {left[place]:.6g}, and must be {right[place]:.6g}"


def difference_with_gradient(expected, returned) -> str | None:
    """The same for two pairs of a value and its gradient."""
    if sentence := difference(expected[0], returned[0]):
        return sentence
    if returned[1] is None:
        return "no gradient flows from what it returned to logprobs_BT"
    sentence = difference(expected[1], returned[1])
    return sentence and f"its value is right, but in its gradient by logprobs_BT {sentence}"


def describe(value) -> str:
    """A short text for an encoded value."""
    if isinstance(value, dict):
        kinds = {"tensor": "a tensor", "array": "an array of numpy"}
        return kinds.get(next(iter(value)), f"an object of the type {value.get('kind')}")
    return textwrap.shorten(repr(value), 300)


@dataclass(frozen=True)
class Case:
    """One call of a function, and what it must return. With `gradient_of`, `expected` is a pair:
    what it must return, and the gradient of the sum of this by that argument."""

    name: str
    arguments: dict
    expected: object
    gradient_of: str | None = None
    # (expected, returned), both encoded: a sentence about what is wrong, or None.
    fault: Callable = difference


# --- grading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """About one function of a hand-in."""

    fault: str | None  # what is wrong, in a sentence; None: it has its points
    printed: str  # what the function has printed


def refused(hand_in: Path) -> str | None:
    """A sentence about a hand-in whose functions are not called, or None: one that is no Python,
    or that imports what it may not."""
    try:
        tree = ast.parse(hand_in.read_text())
    except (SyntaxError, ValueError) as error:
        return f"Python cannot read the file: {error}."
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        for name in names:
            if name.partition(".")[0] not in LIBRARIES:
                allowed = ", ".join(sorted(LIBRARIES))
                return f"Line {node.lineno} imports {name}. A hand-in may import {allowed}."
    return None


def run(jobs: list[dict]) -> list[dict]:
    """The outcomes of jobs, as child.py describes both. It runs in an empty folder, and does not
    find the modules of this project."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [sys.executable, "-P", child.__file__],
            input=json.dumps(jobs),
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
            check=True,
        )
    return json.loads(result.stdout)


def grade(
    hand_ins: list[Path], cases: dict[str, list[Case]], seconds: float = SECONDS
) -> list[dict[str, Verdict]]:
    """For each hand-in the verdict about each function that has cases. seconds: the time that a
    function has for all its cases."""
    verdicts, jobs, asked = [], [], []
    for hand_in in hand_ins:
        refusal = refused(hand_in)
        verdicts.append({name: Verdict(refusal, "") for name in cases})
        for name in () if refusal else cases:
            calls = [
                {"arguments": encoded(case.arguments), "gradient_of": case.gradient_of}
                for case in cases[name]
            ]
            job = {"hand_in": str(hand_in.resolve()), "function": name, "cases": calls}
            jobs.append(job | {"seconds": seconds})
            asked.append((verdicts[-1], name))
    outcomes = run(jobs) if jobs else []
    for (of_hand_in, name), outcome in zip(asked, outcomes):
        of_hand_in[name] = Verdict(first_fault(cases[name], outcome), outcome.get("printed", ""))
    return verdicts


def encoded(arguments: dict) -> dict:
    """Arguments as JSON."""
    return {name: child.encode(value) for name, value in arguments.items()}


def first_fault(cases: list[Case], outcome: dict) -> str | None:
    """A sentence about the first case that a function got wrong, or None."""
    if "error" in outcome:
        return outcome["error"]
    for case, returned in zip(cases, outcome["results"]):
        if sentence := case.fault(child.encode(case.expected), returned):
            values = ", ".join(f"{name} = {shown(value)}" for name, value in case.arguments.items())
            return f'Case "{case.name}": {sentence}.\n{textwrap.fill(values, 100)}'
    return None


def shown(value) -> str:
    """An argument as text."""
    if hasattr(value, "tolist"):
        value = np.array2string(np.asarray(value), separator=", ", precision=6)
    return textwrap.shorten(str(value), 500)
