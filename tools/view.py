"""Look inside a run: its rollouts, token by token, on one page that any browser opens offline.

    python -m tools.view runs/NAME               # makes runs/NAME/rollouts.html, as a run does at
                                                 # its end; also while the run goes on
    python -m tools.view runs/NAME --watch 10    # makes it again every 10 seconds until the run
                                                 # ends; meanwhile the page reloads itself

The page has the curve, a timeline, groups with their completions, each token with what the loss
made of it, and a problem at every validation. The numbers come from the run's rollouts.jsonl
(docs/rollouts.md) and log.jsonl, and from the functions of loss.py. tools/view.html is the page
without them.
"""

import base64
import dataclasses
import hashlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import loss
from core.settings import read_settings
from curve.files import write_whole
from curve.fit import fit_sigmoid
from curve.flags import option, read_flags, run_command
from curve.logs import read_log
from curve.report import describe, report
from machinery.files import json_lines, six_digits
from machinery.folder import in_use

TEMPLATE = Path(__file__).with_name("view.html")
PAGE = "rollouts.html"  # in the folder of the run
MOST_BYTES = 10_000_000  # of the page


@dataclass(frozen=True)
class View:
    run: Path = option(help="the folder of a run")
    watch: float | None = option(
        None, "make the page again every so many seconds, until the run ends; it reloads itself"
    )


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError, in one sentence, if the folder holds no run, or nothing
    to show."""
    options = read_flags(View, arguments, description=__doc__)
    if options.watch is not None:
        watch(options.run, options.watch)
    print(f"{write_page(options.run)}: open it in a browser")
    return 0


def watch(run: Path, seconds: float) -> None:
    """Make the page again every so many seconds, as long as a process works on the run. ValueError
    as in `main`."""
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--watch {seconds:g}: the page is made again after some seconds, above 0")
    read_settings(run)
    kept = run / "rollouts.jsonl"
    print(f"{run / PAGE}: open it in a browser; Ctrl-C ends this, and the run goes on", flush=True)
    try:
        while in_use(run):
            if kept.exists():  # otherwise nothing is sampled yet
                write_page(run, reload_seconds=seconds)
            time.sleep(seconds)
    except KeyboardInterrupt:
        if kept.exists():
            write_page(run)  # which does not reload itself
        raise
    print("no process works on this run any more; its last page follows")


def write_page(run: Path, reload_seconds: float | None = None) -> Path:
    """Make rollouts.html of the run in this folder, and return its path. If `reload_seconds` is
    given, the page reloads itself after so many seconds. ValueError as in `main`."""
    template = TEMPLATE.read_text()
    # Only the page's own script is allowed to run on it, whatever a completion holds.
    script = re.search(r"<script>(.*?)</script>", template, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = template.replace("SHA256_OF_THE_SCRIPT", f"sha256-{digest}")
    before, after = page.split("DATA_OF_THE_RUN")
    data = read_run(run, MOST_BYTES - len(template.encode()))
    path = run / PAGE
    write_whole(path, before + as_json(data | {"reload_seconds": reload_seconds}) + after)
    return path


def as_json(data) -> str:
    """JSON in ASCII that cannot end the element of HTML that it stands in. Its lines have some
    1,000 characters; a line is longer only if a single text is."""
    # A separator with a line end puts each value on a line of its own: in texts it is written \n.
    text = json.dumps(data, separators=(",\n", ":"), allow_nan=False).replace("<", "\\u003c")
    # As many of these short lines as fit, or one that is longer, become one line.
    lines = re.findall(r".{1,1000}\n|.+?\n", text + "\n", re.S)
    return "\n".join(line.replace("\n", "") for line in lines)


def read_run(run: Path, most_bytes: int) -> dict:
    """All that the page shows, in JSON of about so many bytes at most. ValueError as in `main`."""
    recipe = read_settings(run).recipe
    kept = run / "rollouts.jsonl"
    if not kept.exists():
        raise ValueError(
            f"{kept} is not there: --rollouts-kept 0 leaves none,"
            " nor does a run before it has sampled"
        )
    if recipe.loss not in loss.LOSSES:
        raise ValueError(f"{run}: its loss is {recipe.loss}, which loss.py does not have")
    log = [line for _, line in json_lines(run / "log.jsonl")]
    rollouts, times = [], []
    for number, (_, line) in enumerate(json_lines(kept), start=1):
        try:
            if line["kind"] == "times":
                times.append(line)
            else:
                rollouts.append(with_terms(recipe, line))
        except Exception as error:  # of whatever kind: the file is broken
            raise ValueError(
                f"{kept}, line {number}: not as a run writes it ({error!r}): remove it"
            ) from None
    page = {
        "name": run.resolve().name,
        "recipe": dataclasses.asdict(recipe),
        "formula": loss.LOSSES[recipe.loss].formula,
        "constants": loss.constants(recipe),
        "curves": curves(run, log),
        "steps": columns(log, "train", "step", "wall_seconds", "parameters_seconds", "skipped"),
        "validations": columns(log, "validation", "step", "wall_seconds"),
        "times": times,
        "completions": sum(len(line["completions"]) for line in rollouts),
    }

    # If the page would be too large, each line keeps the same share of its completions, and at
    # least one.
    share = (most_bytes - len(as_json(page))) / len(as_json(rollouts))
    if share < 1:
        for line in rollouts:
            number = max(1, int(share * len(line["completions"])))
            line["completions"] = line["completions"][:number]
    return page | {"lines": rollouts}


def columns(log: list[dict], kind: str, *names: str) -> list[list]:
    """These columns of all lines of a kind in the log. ValueError for a line that lacks one."""
    for number, line in enumerate(log, start=1):
        missing = {*names} - {*line}
        if line["kind"] == kind and missing:
            raise ValueError(f"log.jsonl, line {number} has no {min(missing)}: remove the line")
    return [[line[name] for name in names] for line in log if line["kind"] == kind]


def with_terms(recipe: loss.Recipe, line: dict) -> dict:
    """A line of rollouts.jsonl. Each completion in it that was trained on gets log_rho and terms by
    token, the places at which the clip decides, and its sequence ratio."""
    for completion in line["completions"]:
        if not completion.get("trainer_logprobs"):
            continue
        names = ("trainer_logprobs", "generator_logprobs")
        logprobs_1T, generator_1T = (
            torch.from_numpy(np.array([completion[name]], np.float32)) for name in names
        )
        sampled_1T = logprobs_1T.isfinite() & generator_1T.isfinite()  # a null has become NaN
        advantages_1 = torch.tensor([float(completion["advantage"])])
        inputs = logprobs_1T.nan_to_num(), generator_1T.nan_to_num(), sampled_1T, advantages_1
        terms_1T, log_rho_1T, clipped_1T = loss.token_terms(recipe, *inputs)
        for name, values_1T in (("log_rho", log_rho_1T), ("terms", terms_1T)):
            values_T = values_1T.masked_fill(~sampled_1T, np.nan)[0]  # six_digits makes it a null
            completion[name] = [six_digits(value) for value in values_T.tolist()]
        completion["clipped"] = clipped_1T[0].nonzero().flatten().tolist()
        ratio = loss.sequence_log_ratios(log_rho_1T, sampled_1T).exp()
        completion["s"] = six_digits(ratio.item())  # its name in the formula of gspo
    return line


def curves(run: Path, log: list[dict]) -> list[dict]:
    """The curve of each source: at each validation its points [step, compute, pass rate]; and of
    the fit that train.py makes, if there is one: its line [compute, pass rate, low, high], the
    compute at which the forecast begins, and its report in words."""
    names = next((line for line in log if line["kind"] == "validation"), ())
    rates = [name for name in names if name.startswith("pass_rate/")] or ["pass_rate"]
    found = []
    for rate in rates:
        curve = {"name": rate, "points": columns(log, "validation", "step", "compute_flops", rate)}
        found.append(curve)
        try:
            (series,) = read_log(run / "log.jsonl", x="compute_flops", y=rate)
            # If there are several sources, the log does not say how many answers each has.
            num_examples = series.num_examples if len(rates) == 1 else None
            fit = fit_sigmoid(series.x, series.y, num_examples=num_examples)
        except ValueError as error:
            curve |= {"line": [], "words": f"no fit: {error}"}
            continue
        C = np.geomspace(fit.C_min / 1.5, 2 * fit.C_max, 120)
        numbers = report(series, fit)
        curve |= {
            "line": np.stack([C, fit.predict(C), *fit.band(C)], 1).tolist(),
            "until": fit.C_max,
            "A": numbers["A"],
            "words": describe(series, fit, numbers),
        }
    return found


if __name__ == "__main__":
    run_command(main)
