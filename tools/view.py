"""Look inside a run: its rollouts, token by token, on one page that any browser opens offline.

    python -m tools.view runs/NAME    # makes runs/NAME/rollouts.html, as a run does at its end;
                                      # also while the run goes on

The numbers come from the run's rollouts.jsonl (docs/log.md) and log.jsonl, and from the
functions of loss.py. tools/view.html is the page without them.
"""

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import loss
from core.settings import read_settings
from curve.files import write_whole
from curve.flags import option, read_flags, run_command
from machinery.folder import json_lines, six_digits

TEMPLATE = Path(__file__).with_name("view.html")
MOST_BYTES = 10_000_000  # of the completions on a page


@dataclass(frozen=True)
class OneRun:
    """What this command gets, and tools/export.py."""

    run: Path = option(help="the folder of a run")


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError or OSError, in one sentence, if the folder holds no run or
    no rollouts.jsonl (--rollouts-kept 0, or nothing is sampled yet)."""
    run = read_flags(OneRun, arguments, description=__doc__).run
    print(f"{write_page(run)}: open it in a browser")
    return 0


def write_page(run: Path) -> Path:
    """Make rollouts.html of the run in this folder, and return its path. Errors as in `main`."""
    # Only the page's own script is allowed to run on it: no completion can know this number.
    page = TEMPLATE.read_text(encoding="utf-8").replace("NONCE_OF_THE_PAGE", secrets.token_hex())
    before, after = page.split("DATA_OF_THE_RUN")
    target = run / "rollouts.html"
    write_whole(target, before + as_json(read_run(run)) + after)
    return target


def as_json(data) -> str:
    """JSON in ASCII that cannot end the element of HTML that it stands in."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def read_run(run: Path) -> dict:
    """All that the page shows. Errors as in `main`."""
    recipe = read_settings(run).recipe
    log, rollouts = json_lines(run / "log.jsonl"), json_lines(run / "rollouts.jsonl")
    groups = [line for line in rollouts if line["kind"] != "times"]
    completions = [each for line in groups for each in line["completions"]]
    for completion in completions:
        if completion.get("trainer_logprobs"):
            add_terms(recipe, completion)

    # If the page would be too large, each line has the same share of its completions.
    share = MOST_BYTES / len(as_json(groups))
    for line in groups:
        line["completions"] = line["completions"][: max(1, int(share * len(line["completions"])))]
    constants = {name: six_digits(value) for name, value in loss.constants(recipe).items()}
    return {
        "name": run.resolve().name,
        "recipe": asdict(recipe) | constants,
        "formula": loss.LOSSES[recipe.loss].formula + ", or 0 if masked" * recipe.mask_sequences,
        "constants": constants,
        "log": log,
        "rollouts": rollouts,
        "completions": len(completions),
    }


def add_terms(recipe: loss.Recipe, completion: dict) -> None:
    """Add the term of each token, and the places at which the clip decides, to a completion of
    rollouts.jsonl that was trained on."""
    both = [[completion["trainer_logprobs"]], [completion["generator_logprobs"]]]
    logprobs_21T = torch.tensor(np.array(both, np.float32))
    sampled_1T = logprobs_21T.isfinite().all(0)  # a null has become NaN
    advantages_1 = torch.tensor([completion["advantage"]])
    inputs = *logprobs_21T.nan_to_num(), sampled_1T, advantages_1
    terms_1T, _, clipped_1T = loss.token_terms(recipe, *inputs)
    completion["terms"] = [six_digits(term) for term in terms_1T[0].tolist()]
    completion["clipped"] = clipped_1T[0].nonzero().flatten().tolist()


if __name__ == "__main__":
    run_command(main)
