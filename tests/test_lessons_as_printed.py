"""Every command of the lessons, run as its page prints it: how it ends, and whether it does what
the page says. A page with long runs names a trial of seconds, `set -- "$@" ...`, which is given
here after the page's own `set --`."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults import log

import loss
from docs.lessons import check

pytestmark = pytest.mark.slow
LONGEST = 900  # seconds that the commands of a page may take


def shell(command: str, folder: Path) -> str:
    """Run a line of bash in a folder, with the Python of the tests. Returns what it printed;
    AssertionError with that if it fails or takes too long. It leaves no process behind."""
    environment = {name: os.environ[name] for name in os.environ if "PYTEST" not in name}
    here = str(Path(sys.executable).parent)
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment | {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": ""},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LONGEST)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{command}\n{printed}"
    return printed


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """What a student has after `git clone`."""
    folder = tmp_path_factory.mktemp("clone") / "scalerl"
    shutil.copytree(check.ROOT, folder, ignore=check.LEFT_OUT)
    who = "-c user.name=student -c user.email=student@example.org"
    shell(f"git init --quiet && git add . && git {who} commit --quiet -m clone", folder)
    shell("git config user.name student && git config user.email student@example.org", folder)
    return folder


class Page:
    """A lesson whose commands have been run, one after the other, in one shell.

    fail: parts of the commands that the page says fail. All others must end with 0. In the end the
    page has taken back its changes: each of its patches fits again, and no file of the project is
    changed.
    """

    def __init__(self, lesson: str, clone: Path, outputs: Path, fail: tuple[str, ...] = ()):
        text = check.LESSONS[lesson].read_text()
        self.commands, self.clone, script = check.printed(text), clone, []
        for i, command in enumerate(self.commands):
            output = f"{outputs}/{i}"
            script.append(f"{{ {command}\n}} >{output}.txt 2>&1; echo $? >{output}.status")
            if command.startswith("set -- "):
                script.append(check.trial(text))
        shell("\n".join(script), clone)
        self.texts = [(outputs / f"{i}.txt").read_text() for i in range(len(self.commands))]
        for i, command in enumerate(self.commands):
            failed = (outputs / f"{i}.status").read_text() != "0\n"
            assert failed == any(part in command for part in fail), f"{command}\n{self.texts[i]}"
        for patch in re.findall(r"git apply (docs/lessons/solutions/\S+)", text):
            shell(f"git apply --check {patch}", clone)
        assert shell("git status --porcelain --untracked-files=no", clone) == ""

    def said(self, part: str) -> str:
        """What the command that holds this text printed."""
        (printed,) = [
            printed for command, printed in zip(self.commands, self.texts) if part in command
        ]
        return printed

    def steps(self, name: str) -> list[dict]:
        return log(self.clone / "runs" / name, "train")

    def validations(self, name: str) -> list[dict]:
        return log(self.clone / "runs" / name, "validation")

    def column(self, name: str, key: str) -> list[float]:
        return [line[key] for line in self.steps(name)]


def test_01_the_pencil_the_three_fits_and_what_each_knows(clone, tmp_path):
    page = Page("01", clone, tmp_path)
    assert page.said("by_hand.py docs") == "R0 0.118, A 0.689, C_mid 8.86e+10, B 2.23\n"
    assert re.search(r"A +0\.694\d? ", page.said(" all.png"))
    assert re.search(r"A +0\.665\d? ", page.said(" half.png"))
    assert "not identified" in page.said(" quarter.png")
    assert re.search(r"A +0\.924\d? ", page.said("--fit-to 3.6e11"))
    assert "! decline: the pass rate fell from 0.935" in page.said(" fall.png")
    for picture in ("all", "half", "quarter"):
        assert (clone / f"{picture}.png").stat().st_size > 10_000
        assert "held out" in page.said(f" {picture}.png")


def test_02_the_page_is_made_again_with_all_ratios_1(clone, tmp_path):
    changes = Page("02", clone, tmp_path).said("git diff")
    norms = {}
    for sign, name, norm in re.findall(r"(?m)^([+-])\| `(\w+)` \| \S+ \| ([\d.]+) \|", changes):
        if name in loss.LOSSES:
            norms.setdefault(sign, {})[name] = norm
    assert len(norms["+"]) == 7 and len({*norms["+"].values()}) == 1
    assert len({*norms["-"].values()}) > 4


def test_03_four_runs_with_old_and_fresh_tokens(clone, tmp_path):
    page = Page("03", clone, tmp_path)
    for name in ("old-with-ratio", "old-without-ratio"):
        assert page.column(name, "off_policyness_max") == [0, 1, 2, 3]
        assert max(page.column(name, "ratio_max")) > 1.02
    for name in ("fresh-with-ratio", "fresh-without-ratio"):
        assert page.column(name, "off_policyness_max") == [0, 0, 0, 0]
        assert max(page.column(name, "ratio_max")) == pytest.approx(1, abs=1e-3)
    fresh = [page.column(f"fresh-{which}-ratio", "loss")[0] for which in ("with", "without")]
    assert fresh[0] == pytest.approx(fresh[1], rel=1e-3)
    assert "old-without-ratio" in page.said("fit_curve.py")
    assert (clone / "runs" / "ratio.png").exists()


def test_04_one_head_in_bfloat16_is_seen_in_the_columns(clone, tmp_path):
    page = Page("04", clone, tmp_path)
    mean, largest = (
        {
            name: max(line[key] for line in page.validations(name))
            for name in ("both-fp32", "both-bf16", "one-side")
        }
        for key in ("mismatch_mean", "mismatch_max")
    )
    assert mean["one-side"] > 1e-4 > 1e-5 > max(mean["both-fp32"], mean["both-bf16"])
    assert largest["one-side"] > 1e-2 > largest["both-bf16"]
    assert 1e-3 > largest["both-fp32"]
    clipped = [sum(page.column(name, "clipped_fraction")) for name in largest]
    assert clipped[0] == clipped[1] == 0 < clipped[2]
    printed = page.said("grep")
    for key, times in {"mismatch_mean": 2, "mismatch_max": 2, "ratio_max": 4}.items():
        assert printed.count(f'"{key}"') == times


def test_05_under_the_mean_over_samples_up_and_down_are_equal(clone, tmp_path):
    page = Page("05", clone, tmp_path)
    first = {}
    for mean in ("samples", "prompts", "tokens"):
        steps = page.steps(f"mean-over-{mean}")
        first[mean] = steps[0]
        for line in steps:
            up_and_down = line["push_up"] + line["push_down"]
            equal = abs(up_and_down) < 1e-5
            assert equal if mean == "samples" else up_and_down < 0
    assert len({line["completion_length"] for line in first.values()}) == 1  # the same batch
    assert first["tokens"]["share_of_long"] > first["samples"]["share_of_long"] + 0.02
    assert len(page.said("grep").splitlines()) == 3 * 4


def test_06_what_is_filtered_and_retired_costs_less(clone, tmp_path):
    page = Page("06", clone, tmp_path)
    assert page.column("no-filter", "groups_counted") == [16] * 4
    assert max(page.column("both", "groups_counted")) < 16
    cost = {name: page.steps(name)[0]["compute_flops"] for name in ("both", "no-filter")}
    assert cost["no-filter"] > cost["both"]
    retired = {name: page.steps(name)[-1] for name in ("both", "retire-early")}
    assert retired["retire-early"]["prompts_retired"] > retired["both"]["prompts_retired"]
    flops = [float(line.split()[2]) for line in page.said("awk").splitlines()]
    assert sum(flops) == pytest.approx(page.steps("both")[-1]["compute_flops"] / 1e9, rel=1e-3)


def test_07_one_run_interrupts_the_others_truncate_and_warn(clone, tmp_path):
    page = Page("07", clone, tmp_path)
    for name in ("interruption", "penalty", "truncated-is-wrong"):
        interrupts = name == "interruption"
        last = page.validations(name)[-1]
        assert (last["interrupted_fraction"] > 0.1) == interrupts
        assert (last["truncated_fraction"] > 0.1) != interrupts
        samples = (clone / "runs" / name / "samples.txt").read_text()
        assert (samples.count("[[") > 1) == interrupts  # once in its first line, which explains it
        warning = "reached their token limit without ending, and are left out"
        assert page.said(f"--name {name}").count(warning) == (0 if interrupts else 1)


def test_08_nine_runs_become_a_table_and_a_picture(clone, tmp_path):
    """With the trial there are three. The published table comes out as it is in the repository."""
    page = Page("08", clone, tmp_path)
    study = clone / "runs" / "ceiling"
    for variant, oldest in {"fresh": 0, "stale": 3, "short": 0}.items():
        ages = page.column(f"ceiling/{variant}-seed0", "off_policyness_max")
        assert max(ages) == oldest
        assert re.search(rf"(?m)^\| {variant} +\| 1 ", (study / "tables.md").read_text())
    assert (study / "compare.png").exists()
    assert "scalerl raises the ceiling" in page.said("tables docs/study/thinking")


def test_09_a_loss_of_your_own_is_tested_and_compared(clone, tmp_path):
    """The student has written the loss of the patch."""
    shell("git apply docs/lessons/solutions/09-root.patch", clone)
    page = Page("09", clone, tmp_path, fail=("-k root",))
    said = page.said("-k root")
    assert "3 failed, 5 passed" in said and said.count("KeyError: 'root'") >= 3
    tables = (clone / "runs" / "own" / "tables.md").read_text()
    assert re.search(r"(?m)^\| cispo +\| 1 ", tables) and re.search(r"(?m)^\| root +\| 1 ", tables)
    shell("git stash pop && git checkout --quiet loss.py && rm own.json", clone)


def test_10_who_notices_a_broken_promise(clone, tmp_path):
    page = Page("10", clone, tmp_path, fail=("--name no-age-bound", "-m pytest"))
    stopped = page.said("--name no-age-bound")
    assert re.search(r"AssertionError: a token of step \d+ is \d+ steps old", stopped)
    for tests, number in {"older": 2, "pitfall_13": 1, "pitfall_16": 2}.items():
        assert len({*re.findall(r"FAILED \S+::(\w+)", page.said(tests))}) == number
    for part in ("--name half-written", "--name no-cursor", "--resume", "--name killed"):
        assert re.search(r"pass rate .* after (20|10) steps", page.said(part))
        assert ("It is replaced" in page.said(part)) == (part == "--name killed")
    again, groups = re.fullmatch(r"(\d+) of (\d+)\n", page.said("uniq -c")).groups()
    assert int(again) > 0 and int(groups) == 20 * 4
    killed = page.said("--name killed")
    assert "generator 0 on cpu ended by signal 9 and reported no error\n" in killed
    assert "It is replaced (1 of --max-restarts 3).\n" in killed
