"""Look inside a run: its rollouts, token by token, on one page that any browser opens, without a network.

    python view.py runs/NAME                # makes runs/NAME/rollouts.html, as a run does at its end
    python view.py runs/NAME --follow       # makes it again and again, while the run goes on

The page has the curve, a timeline, groups with their completions, each token with what the loss made of it, histograms
of ratio and age, and a problem at every validation. What it shows is what the run has left in rollouts.jsonl
(docs/rollouts.md) and log.jsonl, and what the functions of loss.py say of these numbers. How it is shown is in
machinery/view.html.
"""

import base64
import dataclasses
import hashlib
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import loss
from curve.columns import Series
from curve.files import write_whole
from curve.fit import fit_sigmoid
from curve.flags import read_flags, run_command
from curve.report import describe, report
from machinery.files import json_lines, six_digits
from machinery.settings import read_settings

TEMPLATE = Path(__file__).parent / "machinery" / "view.html"
MOST_BYTES = 10_000_000  # of the page
MOST_TIMES = 2_000_000  # bytes of it for the times of steps
BINS = 41  # of the histogram of ratios


@dataclass(frozen=True)
class View:
    """What the command takes."""

    run: Path  # the folder of a run
    follow: bool = False  # make the page again while the run goes on, until it has ended or Ctrl-C


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError, in one sentence, for what is no run, or has left nothing to show."""
    view = read_flags(View, arguments, description=__doc__)
    began = time.monotonic()
    print(f"{write_page(view.run)}: open it in a browser")
    while view.follow and not any(line["kind"] == "end" for _, line in json_lines(view.run / "log.jsonl")):
        time.sleep(max(5.0, 20 * (time.monotonic() - began)))  # 20 times what the page took: the run needs the cores
        began = time.monotonic()
        write_page(view.run)
    return 0


def write_page(run: Path) -> Path:
    """Make rollouts.html of the run in this folder, and return its path. ValueError as in `main`."""
    template = TEMPLATE.read_text()
    script = re.search(r"<script>(.*?)</script>", template, re.S)[1]
    # Only this script is allowed to run on the page, whatever a completion holds.
    allowed = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head, tail = template.replace("SHA256_OF_THE_SCRIPT", allowed).split("DATA_OF_THE_RUN")
    data = as_json(read_run(run, MOST_BYTES - len(template.encode()) - 1000))
    write_whole(run / "rollouts.html", head + data + tail)
    return run / "rollouts.html"


def as_json(data) -> str:
    """JSON that cannot end the element of HTML that it stands in. All of it is ASCII."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


# --- what the page is made of -----------------------------------------------------------------------------------------


def read_run(run: Path, most_bytes: int) -> dict:
    """All that the page shows, in JSON of at most so many bytes. ValueError as in `main`."""
    recipe, path = read_settings(run).recipe, run / "rollouts.jsonl"
    if not path.exists():
        raise ValueError(f"{path} is not there: --rollouts-kept 0 leaves none, nor does a run before it has sampled")
    if recipe.loss not in loss.LOSSES:
        raise ValueError(f"{run}: its loss is {recipe.loss}, which loss.py does not have")
    log = [line for _, line in json_lines(run / "log.jsonl")]
    lines, times = [], []
    for number, (_, line) in enumerate(json_lines(path), 1):
        try:
            (times if line["kind"] == "times" else lines).append(with_terms(recipe, line))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path}, line {number}: not as a run writes it ({error!r}): remove it") from None
    page = {
        "name": run.resolve().name,
        "recipe": dataclasses.asdict(recipe),
        "formula": loss.LOSSES[recipe.loss].formula,
        "constants": constants(recipe),
        "oldest": loss.most_off_policy(recipe.asynchrony),
        "curves": curves(run.resolve().name, log),
        "steps": [[line[column] for column in ("step", "wall_seconds", "parameters_seconds", "skipped")]
                  for line in log if line["kind"] == "train"],
        "validations": [[line["step"], line["wall_seconds"]] for line in log if line["kind"] == "validation"],
        "histograms": histograms([line for line in lines if line["kind"] == "group"], bounds(recipe)),
        "times": times[:: 1 + len(as_json(times)) // MOST_TIMES],
    }  # fmt: skip
    page["lines"] = thinned(lines, most_bytes - len(as_json(page)))
    page["kept"] = [len(lines), sum(len(line["completions"]) for line in lines)]
    return page


def constants(recipe: loss.Recipe) -> dict[str, float]:
    """The numbers of the recipe that the formula of its loss names, by name; a clip that is None is the loss's own."""
    kind = loss.LOSSES[recipe.loss]
    values = dict(zip(("eps_low", "eps_high"), kind.clip or ()))
    values |= {name: value for name, value in vars(recipe).items() if type(value) is float}
    return {name: value for name, value in values.items() if re.search(rf"\b{name}\b", kind.formula)}


def bounds(recipe: loss.Recipe) -> list[list]:
    """Where the formula cuts a ratio, in words and as a number."""
    found, text = [], loss.LOSSES[recipe.loss].formula
    for name, value in constants(recipe).items():
        around = [[f"1 - {name}", 1 - value], [f"1 + {name}", 1 + value]]
        if name.startswith("eps"):
            found += [cut for cut in around if cut[0] in text] or [[name, value]]
    return found


# --- terms ------------------------------------------------------------------------------------------------------------


def with_terms(recipe: loss.Recipe, line: dict) -> dict:
    """A group that was trained on, with what loss.py says of each token: log_rho, terms, and the places where the clip
    decides. A line of another kind as it is."""
    trained = [completion for completion in line.get("completions", ()) if completion.get("trainer_logprobs")]
    if not trained:
        return line
    shape = len(trained), max(len(completion["ids"]) for completion in trained)
    logprobs_BT, generator_BT = torch.full(shape, math.nan), torch.full(shape, math.nan)
    for row, completion in enumerate(trained):
        for tensor_BT, name in ((logprobs_BT, "trainer_logprobs"), (generator_BT, "generator_logprobs")):
            values = [math.nan if value is None else value for value in completion[name]]
            tensor_BT[row, : len(values)] = torch.tensor(values)
    sampled_BT = logprobs_BT.isfinite() & generator_BT.isfinite()
    advantages_B = torch.tensor([float(completion["advantage"]) for completion in trained])
    inputs = logprobs_BT.nan_to_num(), generator_BT.nan_to_num(), sampled_BT, advantages_B
    terms_BT, log_rho_BT, clipped_BT = loss.token_terms(recipe, *inputs)
    ratios_B1 = loss.sequence_log_ratios(log_rho_BT, sampled_BT).exp()
    for row, completion in enumerate(trained):
        sampled_T = sampled_BT[row, : len(completion["ids"])]
        for name, tensor_BT in (("log_rho", log_rho_BT), ("terms", terms_BT)):
            pairs = zip(tensor_BT[row].tolist(), sampled_T.tolist())
            completion[name] = [six_digits(value) if there else None for value, there in pairs]
        completion["clipped"] = clipped_BT[row].nonzero().flatten().tolist()
        completion["s"] = six_digits(ratios_B1[row].item())  # as the formula of gspo calls it
    return line


def histograms(groups: list[dict], bounds: list[list]) -> dict:
    """By step how many tokens there are of each ratio, of those trained on, and of each age, of all sampled: counts in
    equal bins of log rho between -reach and reach (what lies beyond is in the outermost), and counts of each age."""
    ratios, ages = {}, {}
    for group in groups:
        for completion in group["completions"]:
            found = [value for value in completion.get("log_rho", ()) if value is not None]
            ratios.setdefault(group["step"], []).extend(found)
            versions = [version for version, times in completion["versions"] for _ in range(times)]
            sampled = [flag for flag, times in completion["sampled"] for _ in range(times)]
            own = ages.setdefault(group["step"], [])
            own += [group["step"] - 1 - version for version, flag in zip(versions, sampled) if flag]
    every = [abs(value) for values in ratios.values() for value in values]
    cuts = [abs(math.log(value)) for _, value in bounds if value > 0]
    reach = 1.1 * max([float(np.quantile(every, 0.999)) if every else 0.0, *cuts, 0.005])
    edges = np.linspace(-reach, reach, BINS + 1)
    counted = lambda values: np.histogram(np.clip(values, -reach, reach), edges)[0].tolist()
    return {
        "reach": reach,
        "bounds": bounds,
        "rho": [[step, counted(values)] for step, values in ratios.items()],
        "age": [[step, np.bincount(values).tolist()] for step, values in ages.items()],
    }


# --- the curve --------------------------------------------------------------------------------------------------------


def curves(name: str, log: list[dict]) -> list[dict]:
    """The pass rate of each source at each validation, with the fit that train.py makes of it, where there is one."""
    validations = [line for line in log if line["kind"] == "validation"]
    columns = [column for column in (validations or [{}])[0] if column.startswith("pass_rate/")] or ["pass_rate"]
    return [curve(name, column, validations, len(columns)) for column in columns]


def curve(name: str, column: str, validations: list[dict], sources: int) -> dict:
    """One curve: points [step, compute, pass rate], and of the fit its line [compute, pass rate, low, high], the
    compute at which the forecast begins, and its report in words."""
    x = np.array([float(line["compute_flops"]) for line in validations])
    y = np.array([float(line[column]) for line in validations])
    # Of several sources the log does not say how many answers belong to each.
    examples = validations[0]["num_examples"] if sources == 1 and validations else None
    series = Series(name, x, y, "compute_flops", column, examples)
    found = {"name": column, "points": [[line["step"], *point] for line, *point in zip(validations, x, y)]}
    try:
        fit = fit_sigmoid(x, y, num_examples=examples)
    except ValueError as error:
        return found | {"line": [], "words": f"no fit: {error}"}
    C = np.geomspace(fit.x[fit.x > 0][0] / 1.5, 2 * fit.C_max, 120)
    line = np.stack([C, fit.predict(C), *fit.band(C)], 1)
    words = describe(series, fit, report(series, fit))
    asymptote = fit.A if fit.identified else None
    return found | {"line": line.tolist(), "until": fit.C_max, "A": asymptote, "words": words}


# --- what fits --------------------------------------------------------------------------------------------------------


def thinned(lines: list[dict], most_bytes: int) -> list[dict]:
    """The groups and validations that fit into so many bytes: every one, or those of every second, fourth .. step, or
    at last only the first completions of each."""
    for completions in (None, 8, 4, 2, 1):
        cut = [line | {"completions": line["completions"][:completions]} for line in lines]
        bytes_of = [len(as_json(line)) + 1 for line in cut]
        steps = sorted({line["step"] for line in cut})
        for apart in (1, 2, 4, 8):
            chosen = {*steps[::apart], *steps[-1:]}
            fits = [line for line in cut if line["step"] in chosen]
            if sum(size for size, line in zip(bytes_of, cut) if line["step"] in chosen) < most_bytes:
                return fits
    return []


if __name__ == "__main__":
    run_command(main)
