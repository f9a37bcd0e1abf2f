"""Run every command behind a number in the lessons again, and print what each lesson quotes.

    python -m docs.lessons.check                  # all lessons, about 40 minutes on two cores
    python -m docs.lessons.check --only 03 05     # some lessons
    python -m docs.lessons.check --write          # and put what is printed into the lessons

The commands are read from the lessons. They run in copies of the project, so that the lessons' patches change nothing
here. `python train.py` is run with the seeds 0, 1 and 2. Copies and logs stay in a folder, and the next call goes on
from there: what has been run is not run again, unless its command, its patch or the program is another, or --fresh is
said.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from docs.walkthrough import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
KEPT = Path(tempfile.gettempdir()) / "scalerl-lessons"
SEEDS = (0, 1, 2)
LESSONS = {path.name[:2]: path for path in sorted(HERE.glob("[01][0-9]-*.md"))}
BLOCK = re.compile(r"(?s)(<!-- figures: python -m docs.lessons.check --only \d\d -->\n).*?(<!-- end of figures -->)")


# --- the commands of a lesson -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A line of a lesson that is run."""

    line: str
    common: str  # what `set --` has put into "$@"
    patches: tuple[str, ...]  # those that are applied when it runs

    @property
    def name(self) -> str:
        """What the lesson calls its run, or its study."""
        named = re.search(r"--name (\S+)", self.line) or re.search(r"(?:study\.py |--resume runs/)([\w-]+)", self.line)
        return named[1] if named else ""

    def with_seed(self, seed: int) -> str:
        """The lesson's own line is that of seed 0; other seeds have a name of their own."""
        return re.sub(r"--name (\S+)", rf"--name \1-seed{seed} --seed {seed}", self.line) if seed else self.line


def commands(text: str) -> list[Command]:
    """The commands in the code blocks of a lesson, in their order."""
    found, common, patches = [], "", []
    for block in re.findall(r"(?ms)^```\n(.*?)^```", text):
        for line in block.replace("\\\n", " ").splitlines():
            line = " ".join(line.partition("  #")[0].split())
            if line.startswith("set -- "):
                common = line.removeprefix("set -- ")
            elif line.startswith("git apply -R "):
                patches.remove(line.removeprefix("git apply -R "))
            elif line.startswith("git apply "):
                patches.append(line.removeprefix("git apply "))
            elif line.startswith("python "):
                found.append(Command(line, common, tuple(patches)))
    return found


def copy_of_the_project(folder: Path, patches: tuple[str, ...]) -> None:
    """All files of the project but its runs, with these patches applied."""
    left_out = shutil.ignore_patterns("runs", ".git", "__pycache__", ".venv", ".pytest_cache", ".ruff_cache")
    shutil.copytree(ROOT, folder, ignore=left_out)
    for patch in patches:
        subprocess.run(["git", "apply", patch], cwd=folder, check=True)


def run(lesson: str, command: Command, seed: int = 0) -> Path:
    """Run a command of a lesson, unless that was done before. Returns the copy in which it ran; what it has printed is
    in `printed(copy, command, seed)`."""
    where = KEPT / lesson / ("+".join(Path(patch).stem for patch in command.patches) or "unchanged")
    texts = [(ROOT / patch).read_text() for patch in command.patches]
    texts += [file.read_text() for room in (".", "data", "machinery") for file in sorted((ROOT / room).glob("*.py"))]
    made_of = hashlib.sha256("".join(texts).encode()).hexdigest()
    stamp = where / "made_of"
    if not stamp.exists() or stamp.read_text() != made_of:
        shutil.rmtree(where, ignore_errors=True)
        copy_of_the_project(where, command.patches)
        stamp.write_text(made_of)
    output, line = printed(where, command, seed), command.with_seed(seed)
    said = f"{line} [{command.common}]\n"
    if not (output.exists() and output.read_text().startswith(said)):
        began = time.monotonic()
        for name in re.findall(r"--name (\S+)", line):
            shutil.rmtree(where / "runs" / name, ignore_errors=True)
        environment = {**os.environ, "PYTHONPATH": ""}
        done = subprocess.run(
            ["bash", "-c", f"set -- {command.common}\n{line}"], cwd=where, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode and lesson != "10":  # there things are to break
            raise SystemExit(
                f"lesson {lesson}: `{line}` in {where} ended with status {done.returncode}:\n{done.stdout}"
            )
        output.write_text(f"{said}{done.stdout}\nstatus {done.returncode}\n")
        print(f"lesson {lesson}: {time.monotonic() - began:4.0f} s for {line}", file=sys.stderr, flush=True)
    return where


def printed(where: Path, command: Command, seed: int = 0) -> Path:
    """The file with what a command has printed."""
    what = re.sub(r"\W+", "-", command.with_seed(seed))[:80].strip("-")
    return where / f"printed-{what}.txt"


# --- what runs have logged --------------------------------------------------------------------------------------------


class Log:
    """The log of a run: log["pass_rate"] are the values of its training steps, log.held_out["pass_rate"] those of its
    validations; what is null is left out."""

    def __init__(self, folder: Path, kind: str = "train"):
        self.lines = [line for line in map(json.loads, open(folder / "log.jsonl")) if line["kind"] == kind]
        self.held_out = Log(folder, "validation") if kind == "train" else None

    def __getitem__(self, key: str) -> np.ndarray:
        return np.array([line[key] for line in self.lines if line[key] is not None])


def table_of_runs(lesson: str, columns: dict) -> str:
    """A row for each `python train.py` of a lesson, its seeds in the cells. columns: by their heads, functions of a
    log that return text."""
    rows = []
    for command in commands(LESSONS[lesson].read_text()):
        if "train.py" in command.line:
            folders = [run(lesson, command, s) / "runs" / f"{command.name}{f'-seed{s}' if s else ''}" for s in SEEDS]
            logs = [Log(folder) for folder in folders]
            rows.append([f"`{command.name}`", *(", ".join(column(log) for log in logs) for column in columns.values())])
    return table(["run, with seeds 0, 1, 2", *columns], rows)


def study_table(lesson: str) -> str:
    """The variants of the study in a lesson, as study.py compares them."""
    (command,) = [c for c in commands(LESSONS[lesson].read_text()) if "study.py" in c.line]
    folder = run(lesson, command) / "runs" / command.name
    lines = (folder / "tables.md").read_text().partition("### Variants\n\n")[2].partition("\n\n")[0].splitlines()
    kept = [0, 1, 2, -3, -2, -1]  # variant, runs, A, ratio of B, ratio of C_mid, verdict
    rows = [[line.strip("| ").split(" | ")[i] for i in kept] for line in [lines[0], *lines[2:]]]
    last = {}
    for path in sorted(folder.glob("*/log.jsonl")):
        last.setdefault(path.parent.name.rpartition("-seed")[0], []).append(Log(path.parent).held_out["pass_rate"][-1])
    rows = [[*row[:2], ", ".join(f"{rate:.3f}" for rate in last[row[0]]), *row[2:]] for row in rows[1:]]
    return table(["variant", "runs", "last pass rates", "A", "ratio of B", "ratio of C_mid", "verdict"], rows)


# --- what each lesson quotes ------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """With three decimals."""
    return f"{value:.3f}"


def last_pass_rate(log: Log) -> str:
    return number(log.held_out["pass_rate"][-1])


def from_to(key: str, form: str = ".2f", steps: int = 5):
    """A column: the mean over the first steps and over the last."""
    return lambda log: f"{log[key][:steps].mean():{form}} to {log[key][-steps:].mean():{form}}"


def lesson_01() -> str:
    """A row for each seed and each way to read its curve: the lesson's own commands are those of seed 0."""
    rows = []
    for seed in SEEDS:
        for i, command in enumerate(commands(LESSONS["01"].read_text())):
            line = command.line.replace("seed0", f"seed{seed}")
            if "by_hand" in line:
                here = replace(command, line=line)
                figures = re.findall(r"\w+ ([\d.e+]+)", printed(run("01", here), here).read_text().splitlines()[1])
                R0, A, C_mid, B = map(float, figures)
                rows.append([seed, "by hand", number(R0), number(A), f"{B:.2f}", f"{C_mid:.3g}", "", ""])
                continue
            here = replace(command, line=f"{line} --json fit-{seed}-{i}.json")
            (made,) = json.loads((run("01", here) / f"fit-{seed}-{i}.json").read_text())["runs"]
            low, high = made["interval"]["A"]
            curve = ["not known", "", ""]
            if made["identified"]:
                curve = [
                    f"{number(made['A'])} [{number(low)}, {number(high)}]",
                    f"{made['B']:.2f}",
                    f"{made['C_mid']:.3g}",
                ]
            points = f"fit, {made['n_points']} points"
            if "--fit-to" in line:
                held_out = made["baselines"]["held_out"]
                said = [
                    f"{number(held_out['sigmoid'])}, last value {number(held_out['last_value'])}",
                    number(held_out["came"]),
                ]
            else:
                said = ["", ""]
            rows.append([seed, points, number(made["R0"]), *curve, *said])
    return table(["seed", "how", "R0", "A", "B", "C_mid", "forecast of the end", "came"], rows)


def lesson_02() -> str:
    """Section 5 of the page as it is shipped, and as the change makes it."""
    (command,) = commands(LESSONS["02"].read_text())
    rows = []
    for steps_off, page in ((8, ROOT / "docs" / "walkthrough.md"), (0, run("02", command) / "docs" / "walkthrough.md")):
        for line in page.read_text().partition("**Losses.**")[2].partition("**Norms")[0].splitlines():
            cells = line.strip("| ").split(" | ")
            if len(cells) == 5 and cells[0].startswith("`"):
                rows.append([steps_off, *cells[:4]])
    return table(["steps off-policy", "loss function", "loss", "gradient norm", "clipped tokens"], rows)


def lesson_03() -> str:
    return table_of_runs("03", {
        "best pass rate": lambda log: number(log.held_out["pass_rate"].max()),
        "last pass rate": last_pass_rate,
        "age of the tokens, last ten steps": lambda log: f"{log['off_policyness_mean'][-10:].mean():.1f}",
        "least effective sample size": lambda log: f"{log['effective_sample_size'].min():.2f}",
        "largest ratio": lambda log: f"{log['ratio_max'].max():.3g}",
    })  # fmt: skip


def lesson_04() -> str:
    return table_of_runs("04", {
        "`mismatch_mean`, last": lambda log: f"{log.held_out['mismatch_mean'][-1]:.1e}",
        "`mismatch_max`, largest": lambda log: f"{log.held_out['mismatch_max'].max():.1e}",
        "`ratio_max` - 1, largest": lambda log: f"{log['ratio_max'].max() - 1:.1e}",
        "`clipped_fraction`, mean": lambda log: f"{log['clipped_fraction'].mean():.4f}",
        "last pass rate": last_pass_rate,
    })  # fmt: skip


def lesson_05() -> str:
    return table_of_runs("05", {
        "`push_up`, step 1": lambda log: number(log["push_up"][0]),
        "`push_down`, step 1": lambda log: number(log["push_down"][0]),
        "`share_of_long`, mean of the steps": lambda log: f"{log['share_of_long'].mean():.2f}",
    })  # fmt: skip


def gflops(log: Log, first: int, last: int) -> str:
    """Of a step, mean over these steps."""
    return f"{np.diff(log['compute_flops'], prepend=0)[first - 1 : last].mean() / 1e9:.2f}"


def lesson_06() -> str:
    """The published runs at some of their steps, and then the runs of the lesson."""
    logs = [Log(ROOT / "docs" / "study" / "asynchrony" / f"ppo-1-seed{seed}") for seed in SEEDS]
    columns = {
        "groups without variance": lambda log, a, b: f"{log['zero_variance_fraction'][a - 1 : b].mean():.2f}",
        "GFLOPs a step": gflops,
        "prompts retired": lambda log, a, b: str(log["prompts_retired"][b - 1]),
        "pass rate of the batches": lambda log, a, b: f"{log['pass_rate'][a - 1 : b].mean():.2f}",
    }
    rows = [
        [f"{a} to {b}", *(", ".join(column(log, a, b) for log in logs) for column in columns.values())]
        for a, b in ((1, 5), (11, 15), (21, 25), (46, 50), (96, 100))
    ]
    runs = {
        "groups without variance": from_to("zero_variance_fraction"),
        "prompts retired": lambda log: str(log["prompts_retired"][-1]),
        "GFLOPs a step": lambda log: f"{gflops(log, 1, 5)} to {gflops(log, 36, 40)}",
        "GFLOPs in all": lambda log: f"{log['compute_flops'][-1] / 1e9:.0f}",
        "last pass rate": last_pass_rate,
    }
    published = table(["steps of the published runs, seeds 0, 1, 2", *columns], rows)
    return f"{published}\n\n{table_of_runs('06', runs)}"


def lesson_07() -> str:
    def last(key: str, form: str):
        return lambda log: f"{log.held_out[key][-1]:{form}}"

    return table_of_runs("07", {
        "interrupted, last validation": last("interrupted_fraction", ".2f"),
        "truncated, last validation": last("truncated_fraction", ".2f"),
        "tokens, first and last validation": lambda log: "{:.1f} to {:.1f}".format(
            *log.held_out["completion_length"][[0, -1]]
        ),
        "groups in the loss, of 16": from_to("groups_counted", ".1f"),
        "last pass rate": last_pass_rate,
    })  # fmt: skip


def lesson_08() -> str:
    return study_table("08")


def lesson_09() -> str:
    return study_table("09")


def lesson_10() -> str:
    """A row for each command: what is broken, and who says so."""
    rows = []
    for command in commands(LESSONS["10"].read_text()):
        where = run("10", command)
        text = printed(where, command).read_text()
        if "pytest" in command.line:
            told = [f"fails: `{name}`" for name in dict.fromkeys(re.findall(r"FAILED \S+::(\w+)", text))]
        else:
            told = [*dict.fromkeys(re.findall(r"\w+Error: .*|generator \d.* ended by .*|It is replaced .*", text))]
            if end := re.search(r"([.\d]+) after (\d+) steps", text):
                again = came_before(where / "runs" / command.name, int(end[2]))
                told.append(f"ends well: step {end[2]}, pass rate {end[1]}; {again}")
        patch = " and ".join(f"`{Path(patch).stem}`" for patch in command.patches)
        line, _, then = command.line.partition(" & until")
        rows.append([patch, f"`{line}`" + ", and `kill -9`" * bool(then), "<br>".join(told) or "nothing"])
    return table(["patch", "command", "what it says"], rows)


def came_before(run_folder: Path, steps: int) -> str:
    """How many of the groups that a run has trained on, up to this step, were of a prompt that it had had before."""
    lines = [json.loads(line) for line in open(run_folder / "rollouts.jsonl")]
    prompts = [line["prompt"] for line in lines if line["kind"] == "group" and line["step"] <= steps]
    return f"{len(prompts) - len({*prompts})} of {len(prompts)} groups were of a prompt that had come before"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*LESSONS], default=[*LESSONS], help="numbers of lessons")
    parser.add_argument("--write", action="store_true", help="put what is printed into the lessons")
    parser.add_argument("--fresh", action="store_true", help="forget what has been run before")
    options = parser.parse_args()
    for lesson in options.only:
        if options.fresh:
            shutil.rmtree(KEPT / lesson, ignore_errors=True)
        figures = globals()[f"lesson_{lesson}"]()
        print(f"{LESSONS[lesson].name}\n\n{figures}\n", flush=True)
        if options.write:
            text = LESSONS[lesson].read_text()
            assert len(BLOCK.findall(text)) == 1, f"{LESSONS[lesson]} has no place for figures"
            LESSONS[lesson].write_text(BLOCK.sub(lambda found: f"{found[1]}\n{figures}\n\n{found[2]}", text))


if __name__ == "__main__":
    main()
