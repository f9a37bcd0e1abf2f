"""Is your loss the paper's? Runs a function on vectors.json, beside this file. It says of each
case: equal; equal up to one factor; differs, and at which tokens; or what was raised.

    python docs/conformance/conform.py MODULE:FUNCTION                  # all cases
    python docs/conformance/conform.py MODULE:FUNCTION --cases cispo    # with this text in the name

docs/conformance.md says what the function gets and returns. The status is 1 unless all are equal.
It needs torch and nothing else of this project.
"""

import argparse
import json
import pkgutil
import sys
from pathlib import Path

import torch


def main(arguments: list[str] | None = None) -> bool:
    """The command. Returns whether a case is not equal, or none was run; SystemExit with 2 if there
    is no such function."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("function", metavar="MODULE:FUNCTION")
    parser.add_argument("--cases", default="", help="run those with this text in their name")
    asked = parser.parse_args(arguments)
    sys.path.insert(0, "")  # the module stands in the user's folder
    try:
        function = pkgutil.resolve_name(asked.function)
    except Exception as error:
        parser.error(f"{asked.function} is not MODULE:FUNCTION here: {error!r}")
    torch.set_default_dtype(torch.float64)
    verdicts = []
    for case in json.loads(Path(__file__).with_name("vectors.json").read_text()):
        if asked.cases in case["name"]:
            verdicts.append(verdict(function, **case))
            print(f"{case['name']}: {verdicts[-1]}")
    print(f"equal: {verdicts.count('equal')} of {len(verdicts)}")
    return {*verdicts} != {"equal"}


def verdict(function, expected, **case):
    """What the function makes of a case of the file, in words. The other arguments are the keys of
    the case."""
    arrays = {key: torch.tensor(each) for key, each in case.items() if isinstance(each, list)}
    wanted = torch.tensor(expected.get("gradient") or expected["advantages"])
    kinds = {}
    if "mask" in case:
        mask = arrays["mask"] = arrays["mask"] > 0
        clip = torch.tensor(expected["clip"]) > 0
        logp = arrays["logp_train"].requires_grad_()
        above = logp > arrays["logp_gen"]
        kinds = {
            "not trained": ~mask,
            "decided by a clip": clip,
            "others with rho > 1": above & ~clip,
            "others with rho <= 1": mask & ~clip & ~above,
        }
    try:
        found = function(case | arrays)
        if kinds:
            (found,) = torch.autograd.grad(found, logp)
        # The factor that makes the most numbers right.
        right = lambda factor: torch.isclose(factor * found, wanted)
        factor = max((wanted / found)[wanted != 0], key=lambda each: right(each).sum())
        wrong = ~right(factor)
    except Exception as error:
        return f"raised {error!r}"
    if wrong.any():
        counts = [
            f"{(wrong & kind).sum()} of {kind.sum()} {words}" for words, kind in kinds.items()
        ]
        return f"differs at {wrong.sum()} of {wrong.numel()} numbers: {', '.join(counts)}"
    return "equal" if abs(factor - 1) < 1e-5 else f"equal up to the factor {1 / factor:.6g}"


if __name__ == "__main__":
    sys.exit(main())
