"""Run every command behind a number in the lessons again, and print what each lesson quotes.

    python -m docs.lessons.check                  # all lessons, about 40 minutes on two cores
    python -m docs.lessons.check --only 03 05     # some lessons
    python -m docs.lessons.check --write          # and put what is printed into the lessons
    python -m docs.lessons.check --teacher        # copy their answers into teacher.md; runs nothing

The commands are read from the lessons. They run in copies of the project, so that the patches of
the lessons change nothing here. `python train.py` is run with the seeds 0, 1 and 2. The copies
stay, with all logs, in the folders that are printed.
"""

import argparse
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np

from curve.logs import packed_runs
from docs.walkthrough import table

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
LEFT_OUT = shutil.ignore_patterns("runs", ".git", "__pycache__", ".venv", ".*_cache")
SEEDS = (0, 1, 2)
LESSONS = {path.name[:2]: path for path in sorted(FOLDER.glob("[01][0-9]-*.md"))}
BEGIN, END = (
    r"<!-- figures: python -m docs.lessons.check --only \d\d -->\n",
    "<!-- end of figures -->",
)
BLOCK = re.compile(rf"(?s)({BEGIN}).*?({END})")
ANSWER = re.compile(r"(?s)<summary>The answer</summary>\n\n(.*?)\n\n</details>")
TEACHER = FOLDER / "teacher.md"


# --- the commands of a lesson ---------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A line of a lesson that is run."""

    line: str
    common: str  # what `set --` has put into "$@"
    patches: tuple[str, ...]  # those that are applied when it runs

    @property
    def name(self) -> str:
        """What the lesson calls its run, or its study; "" for a command that makes neither."""
        match = re.search(r"(?:--name |tools\.study |--resume runs/)([\w-]+)", self.line)
        return match[1] if match else ""

    def with_seed(self, seed: int) -> "Command":
        """The lesson's own line is seed 0; runs with other seeds have their seed in their name."""
        line = re.sub(r"--name (\S+)", rf"--name \1-seed{seed} --seed {seed}", self.line)
        return replace(self, line=line)


def printed(text: str) -> list[str]:
    """The shell commands in the code blocks of a page, in their order, as they are printed. A line
    that ends with a backslash or a pipe goes on in the next one."""
    blocks = re.findall(r"(?ms)^```\n(.*?)^```", text)
    return [command for block in blocks for command in re.findall(r"(?:.*[\\|]\n)*.+", block)]


def trial(text: str) -> str:
    """The command that a lesson with long runs names for trying all its commands in seconds; "" if
    it names none."""
    match = re.search(r'`(set -- "\$@" [^`]*)`', text)
    return match[1] if match else ""


def commands(text: str) -> list[Command]:
    """The commands of a lesson that start with `python`, in their order."""
    in_order, common, patches = [], "", []
    for command in printed(text):
        line = " ".join(command.replace("\\\n", " ").split())
        if line.startswith("set -- "):
            common = line.removeprefix("set -- ")
        elif line.startswith("git apply -R "):
            patches.remove(line.removeprefix("git apply -R "))
        elif line.startswith("git apply "):
            patches.append(line.removeprefix("git apply "))
        elif line.startswith("python "):
            in_order.append(Command(line, common, tuple(patches)))
    return in_order


def commands_of(lesson: str) -> list[Command]:
    return commands(LESSONS[lesson].read_text())


@functools.cache
def copy_of_the_project(lesson: str, patches: tuple[str, ...]) -> Path:
    """A copy of all files but runs, with these patches applied. All commands of a lesson with the
    same patches run in the same copy."""
    copy = Path(tempfile.mkdtemp(prefix=f"lesson-{lesson}-")) / "scalerl"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    for patch in patches:
        subprocess.run(["git", "apply", patch], cwd=copy, check=True)
    return copy


def run(lesson: str, command: Command) -> tuple[Path, str]:
    """Run a command of a lesson in a copy. Returns the copy, and what the command printed."""
    copy, began = copy_of_the_project(lesson, command.patches), time.monotonic()
    done = subprocess.run(
        ["bash", "-c", f"set -- {command.common}\n{command.line}"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": ""},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    where = f"`{command.line}` in {copy}"
    if done.returncode and lesson != "10":  # where things are meant to break
        raise SystemExit(f"lesson {lesson}: {where} ended with {done.returncode}:\n{done.stdout}")
    seconds = time.monotonic() - began
    print(f"lesson {lesson}: {seconds:4.0f} s for {where}", file=sys.stderr, flush=True)
    return copy, done.stdout


# --- what runs have logged ------------------------------------------------------------------------


class Log:
    """What a run has logged: log["pass_rate"] are the values of its training steps,
    log.held_out["pass_rate"] those of its validations; null is left out."""

    def __init__(self, text: str | bytes, kind: str = "train"):
        self.lines = [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]
        self.held_out = Log(text, "validation") if kind == "train" else None

    def __getitem__(self, key: str) -> np.ndarray:
        return np.array([line[key] for line in self.lines if line[key] is not None])


def table_of_runs(lesson: str) -> str:
    """A row for each `python train.py` of a lesson, with its COLUMNS; the seeds share a cell."""
    columns = COLUMNS[lesson]
    rows = []
    for command in commands_of(lesson):
        if "train.py" not in command.line:
            continue
        logs = []
        for seed in SEEDS:
            seeded = command.with_seed(seed) if seed else command
            copy, _ = run(lesson, seeded)
            logs.append(Log((copy / "runs" / seeded.name / "log.jsonl").read_text()))
        cells = [", ".join(map(column, logs)) for column in columns.values()]
        rows.append([f"`{command.name}`", *cells])
    return table(["run, with seeds 0, 1, 2", *columns], rows)


def study_table(lesson: str) -> str:
    """The variants of the study in a lesson, as the first table of the study compares them."""
    (command,) = [command for command in commands_of(lesson) if "--seeds" in command.line]
    copy, _ = run(lesson, command)
    study = copy / "runs" / command.name
    lines = re.search(r"(?m)(^\|.*\n)+", (study / "tables.md").read_text())[0].splitlines()
    rows = []
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        variant, number, A, *_, B_ratio, C_mid_ratio, verdict = cells
        logs = [Log(path.read_text()) for path in sorted(study.glob(f"{variant}-seed*/log.jsonl"))]
        last = ", ".join(map(last_pass_rate, logs))
        rows.append([variant, number, last, A, B_ratio, C_mid_ratio, verdict])
    head = ["variant", "runs", "last pass rates", "A", "ratio of B", "ratio of C_mid", "verdict"]
    return table(head, rows)


def last_pass_rate(log: Log) -> str:
    return f"{log.held_out['pass_rate'][-1]:.3f}"


def from_to(key: str, form: str = ".2f"):
    """A column: the mean of the first five steps and of the last five."""
    return lambda log: f"{log[key][:5].mean():{form}} to {log[key][-5:].mean():{form}}"


def gflops(log: Log, first: int, last: int) -> str:
    """GFLOPs of a step, mean of these steps."""
    return f"{np.diff(log['compute_flops'], prepend=0)[first - 1 : last].mean() / 1e9:.2f}"


# --- what each lesson quotes ----------------------------------------------------------------------


# The columns of a table of runs, by their heads: functions of a log that return text.
COLUMNS = {
    "03": {
        "best pass rate": lambda log: f"{log.held_out['pass_rate'].max():.3f}",
        "last pass rate": last_pass_rate,
        "age of the tokens, last ten steps": lambda log: (
            f"{log['off_policyness_mean'][-10:].mean():.1f}"
        ),
        "least effective sample size": lambda log: f"{log['effective_sample_size'].min():.2f}",
        "largest ratio": lambda log: f"{log['ratio_max'].max():.3g}",
    },
    "04": {
        "`mismatch_mean`, last": lambda log: f"{log.held_out['mismatch_mean'][-1]:.1e}",
        "`mismatch_max`, largest": lambda log: f"{log.held_out['mismatch_max'].max():.1e}",
        "`ratio_max` - 1, largest": lambda log: f"{log['ratio_max'].max() - 1:.1e}",
        "`clipped_fraction`, mean": lambda log: f"{log['clipped_fraction'].mean():.4f}",
        "last pass rate": last_pass_rate,
    },
    "05": {
        "`push_up`, step 1": lambda log: f"{log['push_up'][0]:.3f}",
        "`push_down`, step 1": lambda log: f"{log['push_down'][0]:.3f}",
        "`share_of_long`, mean of the steps": lambda log: f"{log['share_of_long'].mean():.2f}",
    },
    "06": {
        "groups without variance": from_to("zero_variance_fraction"),
        "prompts retired": lambda log: str(log["prompts_retired"][-1]),
        "GFLOPs a step": lambda log: f"{gflops(log, 1, 5)} to {gflops(log, 36, 40)}",
        "GFLOPs in all": lambda log: f"{log['compute_flops'][-1] / 1e9:.0f}",
        "last pass rate": last_pass_rate,
    },
    "07": {
        "interrupted, last validation": lambda log: (
            f"{log.held_out['interrupted_fraction'][-1]:.2f}"
        ),
        "truncated, last validation": lambda log: f"{log.held_out['truncated_fraction'][-1]:.2f}",
        "tokens, first and last validation": lambda log: "{:.1f} to {:.1f}".format(
            *log.held_out["completion_length"][[0, -1]]
        ),
        "groups in the loss, of 16": from_to("groups_counted", ".1f"),
        "last pass rate": last_pass_rate,
    },
}


def lesson_01() -> str:
    """A row for each seed and each way to read its curve: the lesson's own commands are those of
    seed 0."""
    rows = []
    for seed in SEEDS:
        for command in commands_of("01"):
            if "thinking-46-seed0" not in command.line:
                continue  # of a harder question
            line = command.line.replace("seed0", f"seed{seed}")
            if "by_hand" in line:
                _, text = run("01", replace(command, line=line))
                R0, A, C_mid, B = map(float, re.findall(r"\w+ ([\d.e+]+)", text))
                rows.append([seed, "by hand", R0, A, f"{B:.2f}", f"{C_mid:.3g}", "", ""])
                continue
            copy, _ = run("01", replace(command, line=f"{line} --json fit.json"))
            (fit,) = json.loads((copy / "fit.json").read_text())["runs"]
            parameters, forecast = ["not known", "", ""], ["", ""]
            if fit["identified"]:
                low, high = fit["interval"]["A"]
                A = f"{fit['A']:.3f} [{low:.3f}, {high:.3f}]"
                parameters = [A, f"{fit['B']:.2f}", f"{fit['C_mid']:.3g}"]
            if "--fit-to" in line:
                end = fit["baselines"]["held_out"]
                last = f"last value {end['last_value']:.3f}"
                forecast = [f"{end['forecast']:.3f}, {last}", end["came"]]
            points = f"fit, {fit['n_points']} points"
            rows.append([seed, points, fit["R0"], *parameters, *forecast])
    return table(["seed", "how", "R0", "A", "B", "C_mid", "forecast of the end", "came"], rows)


def lesson_02() -> str:
    """Section 5 of the page as it is shipped, and as the change makes it."""
    (command,) = commands_of("02")
    copy, _ = run("02", command)
    rows = []
    for steps_off, project in ((8, ROOT), (0, copy)):
        page = (project / "docs" / "walkthrough.md").read_text()
        for line in page.partition("**Losses.**")[2].partition("**Norms")[0].splitlines():
            cells = line.strip("| ").split(" | ")
            if len(cells) == 5 and cells[0].startswith("`"):
                rows.append([steps_off, *cells[:4]])
    head = ["steps off-policy", "loss function", "loss", "gradient norm", "clipped tokens"]
    return table(head, rows)


def published_runs() -> str:
    """The published runs of lesson 6 at some of their steps."""
    published = packed_runs(ROOT / "docs" / "study" / "asynchrony")
    logs = [Log(published[f"ppo-1-seed{seed}"]) for seed in SEEDS]
    columns = {
        "groups without variance": lambda log, a, b: (
            f"{log['zero_variance_fraction'][a - 1 : b].mean():.2f}"
        ),
        "GFLOPs a step": gflops,
        "prompts retired": lambda log, _, b: str(log["prompts_retired"][b - 1]),
        "pass rate of the batches": lambda log, a, b: f"{log['pass_rate'][a - 1 : b].mean():.2f}",
    }
    rows = []
    for a, b in ((1, 5), (11, 15), (21, 25), (46, 50), (96, 100)):
        cells = [", ".join(column(log, a, b) for log in logs) for column in columns.values()]
        rows.append([f"{a} to {b}", *cells])
    return table(["steps of the published runs, seeds 0, 1, 2", *columns], rows)


def lesson_10() -> str:
    """A row for each command: what is broken, and who says so."""
    rows = []
    for command in commands_of("10"):
        copy, text = run("10", command)
        if "pytest" in command.line:
            failed = dict.fromkeys(re.findall(r"FAILED \S+::(\w+)", text))
            messages = [f"fails: `{name}`" for name in failed]
        else:
            errors = re.findall(r"\w+Error: .*|generator \d.* ended by .*|It is replaced .*", text)
            messages = list(dict.fromkeys(errors))
            if end := re.search(r"([.\d]+) after (\d+) steps", text):
                repeats = repeated_prompts(copy / "runs" / command.name, int(end[2]))
                messages.append(f"ends well: step {end[2]}, pass rate {end[1]}; {repeats}")
        patches = " and ".join(f"`{Path(patch).stem}`" for patch in command.patches)
        line, and_then_killed, _ = command.line.partition(" & until")
        line = f"`{line}`, and `kill -9`" if and_then_killed else f"`{line}`"
        rows.append([patches, line, "<br>".join(messages) or "nothing"])
    return table(["patch", "command", "what it says"], rows)


def repeated_prompts(run_folder: Path, steps: int) -> str:
    """How many of the groups that a run has trained on, up to this step, were of a prompt that it
    had had before."""
    prompts = []
    for line in map(json.loads, open(run_folder / "rollouts.jsonl")):
        if line["kind"] == "group" and line["step"] <= steps:
            prompts.append(line["prompt"])
    again = len(prompts) - len({*prompts})
    return f"{again} of {len(prompts)} groups were of a prompt that had come before"


FIGURES = {
    "01": lesson_01,
    "02": lesson_02,
    "06": lambda: f"{published_runs()}\n\n{table_of_runs('06')}",
    "08": lambda: study_table("08"),
    "09": lambda: study_table("09"),
    "10": lesson_10,
    **{lesson: functools.partial(table_of_runs, lesson) for lesson in ("03", "04", "05", "07")},
}


def measured() -> str:
    """When, of which commit and with how many cores the figures are."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(git, cwd=ROOT, text=True).strip()
    return f"Measured on {date.today()} at commit {commit}, with {os.cpu_count()} cores."


def teachers_page(text: str) -> str:
    """The teacher's page, with each lesson's folded answer as the lesson has it now."""

    def answer(match: re.Match) -> str:
        (found,) = ANSWER.findall(LESSONS[match[2]].read_text())
        return f"{match[1]}\n{found}\n\n<!-- end -->"

    return re.sub(r"(?s)(<!-- from lesson (\d\d) -->\n).*?<!-- end -->", answer, text)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    numbers = [*LESSONS]
    parser.add_argument("--only", nargs="+", choices=numbers, default=numbers, help="of lessons")
    parser.add_argument("--write", action="store_true", help="put what is printed into the lessons")
    about = "put the answers of the lessons into teacher.md, and run nothing"
    parser.add_argument("--teacher", action="store_true", help=about)
    options = parser.parse_args()
    if options.teacher:
        TEACHER.write_text(teachers_page(TEACHER.read_text()))
        return
    for lesson in options.only:
        figures = FIGURES[lesson]()
        print(f"{LESSONS[lesson].name}\n\n{figures}\n", flush=True)
        if options.write:
            text = LESSONS[lesson].read_text()
            whole, begin, end = BLOCK.search(text).group(0, 1, 2)
            figures = f"{figures}\n\n{measured()}"
            LESSONS[lesson].write_text(text.replace(whole, f"{begin}\n{figures}\n\n{end}"))


if __name__ == "__main__":
    main()
