"""The lessons for teachers: what they name exists, their patches apply, run, and do what the lesson
says."""

import ast
import contextlib
import importlib.util
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import steps
import test_loss
import torch
from faults import TINY, RealRun, apply, check_log, log, project

import loss
import train
from core import policy, rollouts
from core.decoding import make_decoding, render
from core.engine import make_requests, sample_all
from core.feed import PromptOrder
from core.model import load_model, load_tokenizer, model_path
from core.settings import Settings, TrainCommand, parse
from curve.fit import fit_sigmoid
from curve.logs import read_log
from data.tasks import arithmetic
from docs.lessons import check
from machinery import trainer
from tools import study

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "lessons"
PATCHES = sorted(path.name for path in (FOLDER / "solutions").iterdir())
LESSONS = {path.stem: path.read_text() for path in check.LESSONS.values()}
PARTS = ["Read", "Before you run anything", "Do", "Look at", "What we saw", "Two harder questions"]
FOLDED = ["Our numbers: open them when you have yours", "The answer"]
MODEL = model_path("data/arithmetic_base")


# --- what the lessons say -------------------------------------------------------------------------


def part(text: str, name: str) -> str:
    return re.search(rf"(?ms)^## {name}\n(.*?)(?=^## |\Z)", text)[1]


def test_each_lesson_has_its_parts():
    for lesson, text in LESSONS.items():
        assert re.findall(r"(?m)^## (.*)", text) == PARTS, lesson
        about = re.search(r"(?s)\A# \d+\. [^\n]*\n\n(.*?)\n\n## ", text)[1]
        assert len(about.splitlines()) == 5 and "In the paper: " in about, lesson
        assert "**" in part(text, "Before you run anything") and "?" in part(
            text, "Before you run anything"
        ), lesson
        assert "minute" in part(text, "Do"), lesson
        assert re.findall("<summary>(.*)</summary>", text) == FOLDED, lesson
        in_the_open = re.sub(r"(?s)<details>.*?</details>", "", part(text, "What we saw"))
        assert in_the_open.strip() == "", f"{lesson}: an answer can be seen before the guess"
        assert re.findall(r"(?m)^(\d)\. ", part(text, "Two harder questions")) == ["1", "2"], lesson
        assert len(check.BLOCK.findall(text)) == 1 and f"--only {lesson[:2]} -->" in text, lesson
    assert sorted(check.FIGURES) == sorted(check.LESSONS)


def lines_of(file: Path, name: str) -> int:
    """How many lines a function, a class or a method `Class.method` has; AssertionError if there is
    none."""
    nodes = [ast.parse(file.read_text())]
    for wanted in name.split("."):
        nodes = [
            n
            for node in nodes
            for n in ast.iter_child_nodes(node)
            if getattr(n, "name", None) == wanted
        ]
    assert len(nodes) == 1, f"{file.name} has no {name}"
    return nodes[0].end_lineno - nodes[0].lineno + 1


def test_what_is_to_be_read_exists_and_is_as_short_as_the_lesson_says():
    """The lesson says about how many lines each item has."""
    for lesson, text in LESSONS.items():
        total = 0
        for item in re.split(r"(?m)^- ", part(text, "Read")):
            links = re.findall(r"\[([^\]]*)\]\(([\w/.]+\.py)\)", item)
            if named := [
                (name, file) for names, file in links for name in re.findall(r"`([\w.]+)`", names)
            ]:
                lines = sum(lines_of(FOLDER / file, name) for name, file in named)
                said = int(re.search(r"about (\d+) lines", item)[1])
                assert abs(said - lines) <= max(5, said // 5), f"{lesson}: {lines} lines: {item}"
                total += lines
        assert 0 < total < 110, lesson


def quick_tests(file: Path) -> list[str]:
    """The names of the tests in a file that run without --all."""
    tests = [
        node
        for node in ast.parse(file.read_text()).body
        if getattr(node, "name", "").startswith("test_")
    ]
    return [
        test.name for test in tests if "slow" not in " ".join(map(ast.unparse, test.decorator_list))
    ]


def test_the_commands_of_each_lesson_are_commands(tmp_path, monkeypatch):
    """Flags are read as train.py reads them, before any run; -k names tests that exist."""
    monkeypatch.chdir(tmp_path)
    for lesson, text in LESSONS.items():
        commands = check.commands(text)
        names = [command.name for command in commands if "--name" in command.line]
        assert commands and len({*names}) == len(names), lesson
        for command in commands:
            if "train.py" in command.line and "--resume" not in command.line:
                flags = re.search(r"train\.py (.*?)(?: & .*)?$", command.line)[1].replace(
                    '"$@"', command.common
                )
                settings = parse(shlex.split(flags), TrainCommand)
                assert settings.name == command.name and settings.steps <= 60, command.line
            elif "pytest" in command.line:
                files, expression = re.search(r"pytest (.*?) -k (.*)", command.line).groups()
                tests = [name for file in files.split() for name in quick_tests(ROOT / file)]
                for word in set(re.findall(r"\w+", expression)) - {"or", "root"}:
                    assert any(word in name for name in tests), (
                        f"{lesson}: no test of {files} is chosen by {word}"
                    )
            else:
                known = (
                    "fit_curve.py",
                    "by_hand.py",
                    "train.py",
                    "-m tools.study",
                    "-m docs.walkthrough",
                )
                started = tuple(f"python {name} " for name in known)
                assert f"{command.line} ".startswith(started), command.line


def test_the_teachers_page_has_the_answers_that_the_lessons_have():
    text = check.TEACHER.read_text()
    assert check.teachers_page(text) == text, "python -m docs.lessons.check --teacher"
    headings = re.findall(r"(?m)^## (\d+)\. (.*)", text)
    titles = [re.match(r"# (\d+)\. (.*)", lesson).groups() for lesson in LESSONS.values()]
    assert headings == titles
    harder = re.findall(r"(?s)\*\*The harder questions\*\*\n\n(.*?)(?=\n## |\Z)", text)
    assert [re.findall(r"(?m)^(\d)\. ", answers) for answers in harder] == [["1", "2"]] * 10


def test_the_page_names_all_lessons_and_each_patch_is_in_one():
    page = (FOLDER / "README.md").read_text()
    assert [name for name in LESSONS if f"]({name}.md)" in page] == [*LESSONS] and len(
        LESSONS
    ) == 10
    assert (
        sorted(
            {name for text in LESSONS.values() for name in re.findall(r"solutions/([\w.-]+)", text)}
        )
        == PATCHES
    )


# --- the page that comes first --------------------------------------------------------------------


def test_the_one_page_trains_as_train_py_does(tmp_path, monkeypatch, capsys):
    """Three steps of smaller batches, in which thinking is interrupted too."""
    page = (FOLDER / "one_page.py").read_text()
    assert len(page.splitlines()) <= 150
    settings = "\nSTEPS, P, G = 20, 32, 16\n"
    assert page.count(settings) == 1
    script = tmp_path / "one_page.py"
    script.write_text(page.replace(settings, "\nSTEPS, P, G = 3, 8, 8\n"))
    flags = ["--one-process", "--thinking-budget", "56", "56", "--threads", "1"]
    flags += ["--steps", "3", "--prompts-per-step", "8", "--completions-per-prompt", "8"]
    run = RealRun(tmp_path, *flags)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(script))
    printed = re.findall(r"step +\d+ +pass rate ([\d.]+) +loss (\S+)", capsys.readouterr().out)
    run.end_well()
    lines = log(run.folder, "train")
    assert len(printed) == len(lines) == 3
    for (pass_rate, page_loss), line in zip(printed, lines):
        assert float(pass_rate) == pytest.approx(line["pass_rate"], abs=1e-3)
        assert float(page_loss) == pytest.approx(line["loss"], abs=1e-5) and line["loss"] != 0
    assert any(line["interrupted_fraction"] > 0 for line in lines)


# --- what the patches do --------------------------------------------------------------------------


def changed(name: str) -> dict[str, int]:
    """The files of a patch, and how many lines that are not blank it adds to each."""
    files = re.split(r"(?m)^\+\+\+ b/", (FOLDER / "solutions" / name).read_text())[1:]
    return {
        text.splitlines()[0]: len(re.findall(r"(?m)^\+[^\n]*\S", text.partition("\n")[2]))
        for text in files
    }


@pytest.fixture
def patched(tmp_path):
    """patched(name) applies a patch to copies of its files; returns their folder. patched(name,
    file) returns the changed file as a module."""

    def patched(name: str, file: str | None = None):
        folder = tmp_path / name
        for there in changed(name):
            (folder / there).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / there).exists():
                shutil.copy(ROOT / there, folder / there)
        subprocess.run(["git", "apply", FOLDER / "solutions" / name], cwd=folder, check=True)
        if file is None:
            return folder
        spec = importlib.util.spec_from_file_location(f"patched_{Path(file).stem}", folder / file)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return patched


def test_each_patch_is_short_and_applies(patched):
    for name in PATCHES:
        files = changed(name)
        assert sum(files.values()) <= 10, name
        folder = patched(name)
        for file in files:
            assert (
                not (ROOT / file).exists()
                or (folder / file).read_text() != (ROOT / file).read_text()
            ), name


@pytest.mark.slow
def test_a_step_is_made_with_each_patched_loss(patched, tmp_path, monkeypatch):
    for name in PATCHES:
        if "loss.py" in changed(name):
            module = patched(name, "loss.py")
            monkeypatch.setattr(train, "loss", module)
            recipe = module.Recipe(loss="root" if "root" in module.LOSSES else "cispo")
            steps.train_on(
                steps.settings(recipe=recipe),
                MODEL,
                [steps.batch_of_groups()],
                tmp_path / f"{name}-run",
            )
            (line,) = steps.lines(tmp_path / f"{name}-run", "train")
            assert line["skipped"] == 0 and line["loss"] != 0 and line["gradient_norm"] > 0, name


def gradient(module, name: str, log_rho: float, advantage: float) -> float:
    """Of the loss, by the log-probability of one token whose ratio is exp(log_rho)."""
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    sampled = torch.tensor([[True]])
    given = (
        logprobs,
        logprobs.detach() - log_rho,
        sampled,
        torch.tensor([advantage]),
        torch.tensor([1.0]),
    )
    module.policy_loss(module.Recipe(loss=name), *given)[0].backward()
    return logprobs.grad.item()


def test_01_the_pencil_and_the_fit_agree(patched, monkeypatch, capsys):
    script = patched("01-by-hand.patch") / "by_hand.py"
    for seed in range(3):
        log = ROOT / "docs" / "study" / "thinking" / f"thinking-46-seed{seed}"
        monkeypatch.setattr(sys, "argv", ["by_hand.py", str(log)])
        runpy.run_path(str(script))
        R0, A, C_mid, B = map(float, re.findall(r"\w+ ([\d.e+]+)", capsys.readouterr().out))
        (series,) = read_log(log)
        fitted = fit_sigmoid(series.x, series.y)
        assert R0 == pytest.approx(fitted.R0, abs=5e-4) and A == pytest.approx(fitted.A, abs=0.02)
        assert B == pytest.approx(fitted.B, rel=0.2) and C_mid == pytest.approx(
            fitted.C_mid, rel=0.1
        )


def test_01_the_notebook_runs_and_says_what_the_lesson_says(monkeypatch, capsys):
    cells = json.loads((FOLDER / "01-a-curve-by-hand.ipynb").read_text())["cells"]
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(FOLDER)  # as Jupyter does
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "A 0.694, 95 % [0.680, 0.712]; B 2.03" in printed  # the figures of the lesson
    assert "10 validations: A is known, 0.665 [0.643, 0.696]; it ended at 0.688" in printed
    # For three values of A.
    rms = [float(value) for value in re.findall(r"residuals ([\d.]+)", printed)]
    assert min(rms) == rms[1]


def test_02_on_policy_all_ratios_are_1_and_all_losses_have_one_gradient(patched):
    walkthrough = patched("02-on-policy.patch", "docs/walkthrough.py")
    batch, policy, _ = walkthrough.one_batch()
    made = [walkthrough.step(loss.Recipe(loss=name), batch, policy) for name in loss.LOSSES]
    assert batch.ages_N.max() == 0
    assert made[0].log_rho_BT.abs().max() < 1e-4
    assert [step.gradient_norm for step in made] == pytest.approx(
        [made[0].gradient_norm] * len(made), rel=1e-3
    )
    assert not any(step.clipped_BT.any() for step in made)


def test_03_without_the_ratio_an_unlikely_wrong_token_pushes_four_times_as_hard(patched):
    without = patched("03-no-ratio.patch", "loss.py")
    quarter = math.log(1 / 4)
    assert gradient(without, "cispo", 0.0, -1.0) == gradient(loss, "cispo", 0.0, -1.0) == 1
    assert gradient(loss, "cispo", quarter, -1.0) == pytest.approx(0.25)
    assert gradient(without, "cispo", quarter, -1.0) == 1


def test_04_one_head_in_bf16_is_a_mismatch_and_two_in_fp32_are_none(patched):
    settings = Settings(threads=1, thinking_budget=(20, 20))
    tokenizer = load_tokenizer(MODEL)
    decoding = make_decoding(tokenizer, settings)
    policy = trainer.make_policy(settings, load_model(MODEL), steps.CPU)
    wanted = make_requests(0, render(tokenizer, "4729+8153="), 16, (20, 20), decoding, (0,))

    def mismatch(module) -> dict:
        engine = module.TorchEngine(load_model(MODEL), decoding, 16)
        return trainer.numerics_mismatch(policy, sample_all(engine, wanted), settings)

    with_patch = mismatch(patched("04-one-side.patch", "core/torch_engine.py"))
    as_shipped = mismatch(importlib.import_module("core.torch_engine"))
    assert with_patch["mismatch_mean"] > 1e-4 > 1e-5 > as_shipped["mismatch_mean"]
    assert with_patch["mismatch_max"] > 1e-2 > 1e-3 > as_shipped["mismatch_max"]


def test_05_where_long_answers_are_wrong_only_the_mean_over_samples_pushes_up_as_hard_as_down(
    patched, tmp_path, monkeypatch
):
    monkeypatch.setattr(steps, "train", patched("05-short-is-right.patch", "train.py"))
    lines = {}
    for aggregation in ("sample", "prompt", "token"):
        settings = steps.settings(recipe=loss.Recipe(aggregation=aggregation))
        steps.train_on(settings, MODEL, [steps.batch_of_groups()], tmp_path / aggregation)
        (lines[aggregation],) = steps.lines(tmp_path / aggregation, "train")
    balance = {name: line["push_up"] + line["push_down"] for name, line in lines.items()}
    assert balance["sample"] == pytest.approx(0, abs=1e-6)
    assert balance["prompt"] < -0.01 and balance["token"] < -0.01
    assert lines["token"]["share_of_long"] > lines["sample"]["share_of_long"]


def test_06_what_retires_at_half_is_more_than_what_retires_at_nine_tenths(patched):
    early = patched("06-retire-early.patch", "loss.py")
    rates = [i / 8 for i in range(9)]
    assert [rate for rate in rates if early.retires(rate)] == rates[4:]
    assert [rate for rate in rates if loss.retires(rate)] == rates[8:]


def test_07_a_truncated_completion_that_counts_as_wrong_is_pushed_down(patched):
    groups = steps.batch_of_groups()
    advantages = []
    for module in (rollouts, patched("07-truncated-is-wrong.patch", "core/rollouts.py")):
        groups[0].verdicts[3] = steps.Verdict(0.0)
        batch = module.Batch(groups, steps.FIRST)
        rewards_PG = loss.rewards(batch.scores_PG, batch.lengths_PG, "interruption", 20, 5)
        counted_PG = loss.counted_samples(rewards_PG, batch.usable_PG, True)
        advantages.append(loss.advantages(rewards_PG, batch.usable_PG, counted_PG, "batch"))
    assert groups[0].rollouts[3].truncated
    assert advantages[0][0, 3] == 0 > advantages[1][0, 3]


def test_08_the_settings_are_a_study_and_short_thinking_is_too_short_for_long_sums(
    patched, monkeypatch
):
    monkeypatch.chdir(patched("08-ceiling-or-speed.patch"))
    command, _ = check.commands(LESSONS["08-ceiling-or-speed"])
    runs = study.runs_to_train(
        study.Study("ceiling.json", seeds=(0, 1, 2)), shlex.split(command.common)
    )
    assert len(runs) == 9
    most = {
        path.name: loss.most_off_policy(its.recipe.asynchrony) for path, (its, _) in runs.items()
    }
    assert [most[f"{name}-seed0"] for name in ("fresh", "stale", "short")] == [0, 16, 0]
    budgets = {path.name: its.thinking_budget[1] for path, (its, _) in runs.items()}
    # Of the thinking for the longest sums: `9+3+0=12;` a digit.
    tokens = 9 * arithmetic.MAX_DIGITS - 1
    assert budgets["short-seed0"] < tokens < budgets["fresh-seed0"]


def test_08_the_published_runs_say_that_the_thinking_budget_moves_the_ceiling():
    A = {}
    for name in ("thinking-36", "thinking-46", "scalerl"):
        (series,) = read_log(str(ROOT / "docs" / "study" / "thinking" / f"{name}-seed0"))
        A[name] = fit_sigmoid(series.x, series.y).interval["A"]
    assert A["thinking-36"][1] < A["thinking-46"][0] and A["thinking-46"][1] < A["scalerl"][0]


def test_09_the_root_halves_the_correction_and_stays_finite(patched):
    own = patched("09-root.patch", "loss.py")
    assert json.loads((Path(own.__file__).parent / "own.json").read_text()) == {
        "cispo": {},
        "root": {"loss": "root"},
    }
    for advantage in (-1.0, 0.5):
        assert gradient(own, "root", 0.0, advantage) == gradient(own, "cispo", 0.0, advantage)
        for log_rho in (math.log(4), math.log(1 / 4)):
            ratio = gradient(own, "root", log_rho, advantage) / gradient(
                own, "cispo", log_rho, advantage
            )
            assert ratio == pytest.approx(math.exp(-log_rho / 2))
        assert math.isfinite(gradient(own, "root", 300.0, advantage))


def test_09_the_tests_judge_the_root_as_the_lesson_says(patched, monkeypatch):
    """A root without a cap is not finite; three of the seven tests of a loss do not know a new
    one."""
    own = patched("09-root.patch", "loss.py")
    monkeypatch.setattr(test_loss, "loss", own)
    monkeypatch.setattr(test_loss, "Recipe", own.Recipe)
    test_loss.test_every_loss_pushes_sampled_tokens_the_way_of_their_advantage("root")
    test_loss.test_the_gradient_of_every_loss_agrees_with_finite_differences("root", monkeypatch)
    test_loss.test_pitfall_8_forced_tokens_have_no_weight_and_no_ratio("root")
    test_loss.test_what_is_logged_of_the_ratio_is_of_tokens_whatever_the_loss("root")
    with pytest.raises(KeyError, match="root"):
        test_loss.test_losses_match_a_per_token_reference_in_value_and_gradient("root")
    beyond = test_loss.test_a_ratio_beyond_all_numbers_that_is_cut_has_a_finite_gradient
    for advantage in (0.0, 1.0):
        with pytest.raises(KeyError, match="root"):
            beyond("root", advantage)
        with monkeypatch.context() as without_cap:
            root = lambda inputs: (
                inputs.sg_rho_BT.sqrt() * inputs.advantages_B1 * inputs.logprobs_BT,
                torch.zeros_like(inputs.sampled_BT),
            )
            without_cap.setitem(own.LOSSES, "root", own.LOSSES["root"]._replace(term=root))
            with pytest.raises(AssertionError, match="isfinite"):
                beyond("root", advantage)


def test_10_without_the_bound_a_batch_takes_what_it_should_wait_for(patched):
    broken = patched("10-no-age-bound.patch", "loss.py")
    waits = dict(done=[3], unfinished=[2], version=4, asynchrony="pipeline-2", prompts=1)
    assert loss.choose_batch(**waits) is None
    assert broken.choose_batch(**waits) == [0]
    assert broken.groups_ahead("pipeline-1", 16, 5) > loss.groups_ahead("pipeline-1", 16, 5)


def test_10_half_written_parameters_are_called_whole(patched):
    broken = patched("10-half-written.patch", "core/rollouts.py")
    model = load_model(MODEL)
    called_whole = {}
    for module in (rollouts, broken):
        shared = module.SharedParameters(model)

        def parameters(shared=shared, module=module):
            for i, named in enumerate(model.named_parameters()):
                if i == 1:
                    called_whole[module.__name__] = shared.holds(1)
                yield named

        shared.write(parameters(), 1)
        assert shared.holds(1)
    assert [*called_whole.values()] == [False, True]


@pytest.mark.slow
def test_10_the_last_command_kills_a_generator_which_is_replaced(tmp_path):
    """The whole line of the lesson, with a smaller run in "$@"."""
    command = check.commands(LESSONS["10-break-the-machine"])[-1]
    assert command.name == "killed" and not command.patches and " kill -9 " in command.line
    line = command.line.replace("python train.py", f"{sys.executable} {ROOT / 'train.py'}")
    flags = [*TINY, "--steps", "100", "--validation-every", "50", "--threads", "1"]
    shell = subprocess.Popen(
        ["bash", "-c", line, "bash", *flags],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = shell.communicate(timeout=240)
    finally:  # all of it, also if the run has never come to its fifth step
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, printed
    assert "warning: generator 0 on cpu ended by signal 9 and reported no error\n" in printed
    assert "It is replaced (1 of --max-restarts 3).\n" in printed
    check_log(tmp_path / "runs" / "killed", steps=100, validation_every=50)


def test_10_without_the_cursor_prompts_come_twice(patched):
    broken = patched("10-no-cursor.patch", "core/feed.py")
    repeated = []
    for kind in (PromptOrder, broken.PromptOrder):
        order = kind(12, seed=3, recipe=loss.Recipe())
        before = [order.next() for _ in range(5)]
        resumed = kind(12, seed=3, recipe=loss.Recipe(), state=order.state())
        repeated.append({*before} & {resumed.next() for _ in range(5)})
    assert repeated[0] == set() and len(repeated[1]) == 5


def test_the_changes_of_your_own_md_are_as_it_says_and_as_ruff_wants_them(
    models, tmp_path, monkeypatch
):
    """The entropy bonus is in the loss and in the gradient, and the KL to the model that the
    settings name is above 0. With means over tokens the weighted mean of the entropy is the logged
    one."""
    apply("your_own.md", project(tmp_path))
    for command in (["check"], ["format", "--check"]):
        flags = ["--config", ROOT / "pyproject.toml", tmp_path / "loss.py", tmp_path / "train.py"]
        subprocess.run([sys.executable, "-m", "ruff", *command, *flags], check=True)
    changed = {}
    for name in ("loss", "train"):
        monkeypatch.setitem(sys.modules, "loss", changed.get("loss", loss))
        spec = importlib.util.spec_from_file_location(f"changed_{name}", tmp_path / f"{name}.py")
        changed[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(changed[name])
    found = {}
    for reference in (None, models["llama"], models["qwen3"]):
        if reference:
            monkeypatch.setattr(steps.train, "train", changed["train"].train)
            monkeypatch.setattr(policy, "loss", changed["loss"])
        chosen = steps.settings(recipe=loss.Recipe(aggregation="token"), model=reference or MODEL)
        folder = tmp_path / str(len(found))
        _, (gradients,) = steps.train_on(chosen, models["llama"], [steps.batch_of_groups()], folder)
        found[reference] = steps.lines(folder, "train")[0], gradients
    (plain, without), (same, with_bonus), (other, _) = found.values()
    assert same["loss"] == pytest.approx(plain["loss"] - 0.001 * plain["entropy"], rel=1e-4)
    assert any(not torch.allclose(without[name], with_bonus[name], rtol=1e-4) for name in without)
    assert other["loss"] > same["loss"] + 1e-4
