"""The lessons: their commands run as the pages print them, and do what the pages say. A page with
long runs names a trial of seconds, `set -- "$@" ...`: it is given here after its own `set --`."""

import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import steps
from faults import ROOMS, ROOT, apply, log, project
from programs import rows

from core import policy

FOLDER = ROOT / "docs" / "lessons"
LESSONS = {path.name[:2]: path.read_text() for path in sorted(FOLDER.glob("[01][0-9]-*.md"))}


def test_the_one_page_trains_as_train_py_does(tmp_path, monkeypatch, capsys):
    """Three steps of smaller batches, in which thinking is interrupted too."""
    page = (FOLDER / "one_page.py").read_text()
    script = tmp_path / "one_page.py"
    script.write_text(page.replace("STEPS, P, G = 20, 32, 16", "STEPS, P, G = 3, 8, 8"))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(script))
    printed = re.findall(r"step +\d+ +pass rate ([\d.]+) +loss (\S+)", capsys.readouterr().out)
    monkeypatch.chdir(tmp_path)
    flags = "--one-process --thinking-budget 56 56 --threads 1 --name run --validation-problems 4"
    sizes = "--steps 3 --prompts-per-step 8 --completions-per-prompt 8"
    assert steps.run_train(f"{flags} {sizes}") == 0
    lines = log(tmp_path / "runs/run", "train")
    for (pass_rate, page_loss), line in zip(printed, lines, strict=True):
        assert float(pass_rate) == pytest.approx(line["pass_rate"], abs=1e-3)
        assert float(page_loss) == pytest.approx(line["loss"], abs=1e-5) and line["loss"] != 0
    assert any(line["interrupted_fraction"] > 0 for line in lines)


def test_the_notebook_says_what_lesson_1_says(monkeypatch, capsys):
    cells = json.loads((FOLDER / "01-a-curve-by-hand.ipynb").read_text())["cells"]
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(FOLDER)  # as Jupyter does
    exec("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), {})
    printed = capsys.readouterr().out
    assert "A 0.694, 95 % [0.680, 0.711]; B 2.03" in printed  # the figures of the lesson
    assert "10 validations: A is known, 0.665 [0.642, 0.696]; it ended at 0.688" in printed


# --- changes that pages show ----------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_each_patch_applies_and_is_in_a_lesson():
    for patch in (FOLDER / "solutions").iterdir():
        subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)
        assert patch.name in LESSONS[patch.name[:2]]


def test_the_entropy_bonus_and_the_kl_do_what_their_page_says(models, tmp_path, monkeypatch):
    """Off, they change nothing. The entropy bonus is in the loss and in the gradient, and the KL to
    the model that the settings name is above 0. With means over tokens the weighted mean of the
    entropy is the logged one."""
    apply("data.md", project(tmp_path))
    for name in ("loss", "train"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    changed = importlib.import_module("train")
    lines = []
    for reference, *factors in (("llama",), ("llama", 0, 0), ("llama", 0.001, 1), ("qwen3", 0, 1)):
        named = dict(zip(("entropy_bonus", "kl_factor"), factors))
        recipe = changed.loss.Recipe(aggregation="token", **named)
        settings, folder = steps.settings(recipe=recipe, model=models[reference]), tmp_path / "run"
        steps.train_on(settings, models["llama"], [steps.batch_of_groups()], folder)
        lines += log(folder, "train")
        # The first run was without the changes.
        monkeypatch.setattr(steps.train, "train", changed.train)
        monkeypatch.setattr(policy, "loss", changed.loss)
    plain, off, bonus, far = (line["loss"] for line in lines)
    assert off == plain and far > plain + 1e-4
    assert bonus == pytest.approx(plain - 0.001 * lines[0]["entropy"], rel=1e-4)
    norm = pytest.approx(lines[0]["gradient_norm"], rel=1e-5)
    assert lines[1]["gradient_norm"] == norm != lines[2]["gradient_norm"]


# --- the commands, as they are printed ------------------------------------------------------------


def shell(command: str, folder: Path) -> str:
    """Run bash in a folder, with the Python of the tests. Returns what it printed; AssertionError
    with that if it fails or takes 900 seconds."""
    ours = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": "",
        "PYTEST_ADDOPTS": "-n 0",
    }
    ended = subprocess.run(
        ["timeout", "900", "bash", "-c", command],
        cwd=folder,
        env={name: os.environ[name] for name in os.environ if "PYTEST" not in name} | ours,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}"
    return ended.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """What a student has after `git clone`."""
    folder = tmp_path_factory.mktemp("clone") / "scalerl"
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(file, folder)
    name = "git config user.name student && git config user.email student@example.org"
    shell(f"git init -q && {name} && git add . && git commit -q -m clone", folder)
    return folder


# By lesson: a part of a command, and a pattern of what it prints. With a ! the command must fail.
# On-policy the losses have one gradient, as 02 says.
PRINTED = r"""
01 | by_hand.py docs | R0 0.118, A 0.689, C_mid 8.86e.10, B 2.23\n
01 |  all.png | \n *A +0.694
01 |  half.png | \n *A +0.665
01 |  quarter.png | \n *A +not
02 | git diff | \+\| `cispo` \| \S+ \| ([\d.]+) \|.*\+\| `grpo` \| \S+ \| \1 \|
03 | !conform.py | equal: 0 of 6
06 | awk | \Astep 1 .*step 4 \S+\s*\Z
07 | --name interruption | \A((?!reached their token limit).)*\Z
07 | --name penalty | reached their token limit
07 | --name truncated-is-wrong | reached their token limit
08 | ceiling.json --seeds | (?=.*\| fresh\b)(?=.*\| stale\b).*\| short\b
08 | tables docs/study/thinking | scalerl raises the ceiling
09 | !-k root | (?=.*KeyError: 'root').*passed
10 | !--name no-age-bound | a token of step [0-9]+ is [0-9]+ steps old
10 | !-m pytest | (?i)failed
10 | --name half-written | steps .mean@
10 | --name no-cursor | steps .mean@
10 | --name killed | It is replaced.* steps .mean@
10 | uniq -c | \A[1-9]
"""


@pytest.fixture
def run_page(clone, tmp_path):
    """Runs the commands of a lesson, one after the other, in one shell. Their statuses and what
    they print must be as in PRINTED. In the end the page has taken back its changes: no text of the
    project is changed. Returns the folder of the runs."""

    def run(lesson: str) -> Path:
        blocks = re.findall(r"(?ms)^```\n(.*?)^```", LESSONS[lesson])
        # A line that ends with a backslash or a pipe goes on in the next one.
        commands = re.findall(r"(?:.*[\\|]\n)*.+", "".join(blocks))
        trial = re.search(r'`(set -- "\$@" [^`]*)`', LESSONS[lesson])
        script = ""
        for i, command in enumerate(commands):
            place = f"{tmp_path}/{i}"
            script += f"{{ {command}\n}} >{place} 2>&1; printf '\\n%s' $? >>{place}\n"
            if command.startswith("set -- "):
                script += f"{trial[1]}\n"
        shell(script, clone)
        patterns = re.findall(rf"(?m)^{lesson} \| (!?)(.*?) \| (.*)$", PRINTED)
        seen = set()
        for i, command in enumerate(commands):
            said, _, status = (tmp_path / str(i)).read_text().rpartition("\n")
            of_command = [row for row in patterns if row[1] in command]
            seen.update(of_command)
            assert (status != "0") == any(row[0] for row in of_command), f"{command}\n{said}"
            for _, _, pattern in of_command:
                assert re.search(pattern, said, re.S), f"{command}\n{said}"
        assert seen == {*patterns}
        assert shell("git status --porcelain --untracked-files=no -- . ':!*.png'", clone) == ""
        return clone / "runs"

    return run


# By lesson: what holds of the columns of its runs.
CLAIMS = """
03 | old_with_ratio.off_policyness_max[-1] == old_without_ratio.off_policyness_max[-1] == 3
03 | fresh_with_ratio.off_policyness_max[-1] == fresh_without_ratio.off_policyness_max[-1] == 0
03 | max(old_with_ratio.ratio_max) > 1.02 < max(old_without_ratio.ratio_max)
03 | max(fresh_with_ratio.ratio_max + fresh_without_ratio.ratio_max) <= 1.02
04 | max(one_side.mismatch_mean) > 1e-4 and sum(one_side.clipped_fraction) > 0
04 | max(both_fp32.mismatch_mean + both_bf16.mismatch_mean) < 1e-5
04 | sum(both_fp32.clipped_fraction + both_bf16.clipped_fraction) == 0
05 | coin.pass_rate[0] == wrong_is_right.pass_rate[0] == exact.pass_rate[0] < 0.3
05 | max(coin.pass_rate) > 0.35 > max(exact.pass_rate)
06 | no_filter.groups_counted == [16] * 4
06 | max(both.groups_counted) < 16
06 | both.prompts_retired[-1] < retire_early.prompts_retired[-1]
"""


def columns(run: Path) -> SimpleNamespace:
    lines = log(run)
    return SimpleNamespace(
        **{name: [line[name] for line in lines if name in line] for name in set().union(*lines)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("lesson", [number for number in LESSONS if number != "09"])
def test_commands_print_and_their_runs_show_what_the_lesson_says(lesson, run_page):
    logs = run_page(lesson).glob("*/log.jsonl")
    runs = {path.parent.name.replace("-", "_"): columns(path.parent) for path in logs}
    for number, claim in rows(CLAIMS):
        assert number != lesson or eval(claim, runs), claim


@pytest.mark.slow
def test_09_a_loss_of_your_own_is_tested_and_compared(clone, run_page):
    """The student has written the loss of the patch."""
    shell("git apply docs/lessons/solutions/09-root.patch", clone)
    assert "\n| root " in (run_page("09") / "own" / "tables.md").read_text()
    shell("git stash pop && git checkout -q loss.py && rm own.json", clone)
