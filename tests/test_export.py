"""tools/export.py: what it writes for each engine, what it says is not carried over, and one curve
of two logs."""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

import fit_curve
from core.model import load_model, load_tokenizer, model_path
from core.settings import Settings
from data import Problem
from loss import Recipe
from machinery import compute
from machinery.checkpoints import write_checkpoint
from machinery.folder import checkpoints, write_config
from tools import export

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run with a checkpoint of step 4, whose log goes on to step 6. Its model is
    the first one."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    settings = Settings(
        steps=24,
        train_prompts=400,
        validation_problems=32,
        prompts_per_step=8,
        completions_per_prompt=8,
        validation_samples=8,
        warmup_steps=0,
        validation_every=10,
        thinking=False,
    )
    write_config(folder, settings)

    path = model_path(settings.model)
    model = load_model(path)
    parameters, moments = dict(model.named_parameters()), {"m": torch.zeros(1)}
    state = {"step": 4, "data": [], "orders": [], "handed_out": [], "to_repeat": []}
    state |= {"compute": compute.Compute(1, 1, 1).columns(), "wall_seconds": 1.0}
    write_checkpoint(folder, model, load_tokenizer(path), parameters, moments, state)

    # Each step from the first on has a line, and every other step a validation.
    lines = []
    for step in range(7):
        line = {"step": step, "pass_rate": 0.1 + step / 50, "compute_tokens": 100 * step}
        if step > 0:
            lines.append(line | {"kind": "train"})
        if step % 2 == 0:
            lines.append(line | {"kind": "validation"})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


# Of each engine the file of its configuration, what reads it, and where it has the steps, the
# completions of a prompt and the learning rate.
CONFIGS = {
    "trl": (
        "config.yaml",
        yaml.safe_load,
        ["max_steps", "num_generations", "learning_rate"],
    ),
    "verl": (
        "config.yaml",
        yaml.safe_load,
        [
            "trainer.total_training_steps",
            "actor_rollout_ref.rollout.n",
            "actor_rollout_ref.actor.optim.lr",
        ],
    ),
    "prime-rl": (
        "config.toml",
        tomllib.loads,
        ["max_steps", "orchestrator.group_size", "trainer.optim.lr"],
    ),
}


def value_at(config: dict, place: str):
    for name in place.split("."):
        config = config[name]
    return config


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("engine", CONFIGS)
def test_the_folder_has_all_that_an_engine_needs(engine, run, tmp_path, capsys):
    out = tmp_path / "out"
    assert export.main([str(run), "--to", engine, "--out", str(out)]) == 0
    name, parse, places = CONFIGS[engine]
    config = parse((out / name).read_text())
    steps_left = 20
    assert [value_at(config, place) for place in places] == [steps_left, 8, 2e-4]

    # The model and the log end with the checkpoint.
    weights = run / "checkpoints" / "step-000004" / "model" / "model.safetensors"
    assert (out / "model" / "model.safetensors").read_bytes() == weights.read_bytes()
    assert max(line["step"] for line in read_lines(out / "log.jsonl")) == 4

    # No placeholder is left.
    for text in (out / "README.md", out / name):
        assert not re.search(r"\$[a-z{](?!oc\.env|trainer)", text.read_text()), text
    for template in out.glob("*.toml"):
        tomllib.loads(template.read_text())
    said = capsys.readouterr().out
    assert "! --no-positive-resampling True; there: solved prompts come again" in said
    assert ("--length-control interruption; there: n" in said) == (engine != "trl")

    train, held_out = read_lines(out / "train.jsonl"), read_lines(out / "validation.jsonl")
    assert (len(train), len(held_out)) == (400, 32)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    if engine == "verl":
        assert config["data"]["apply_chat_template_kwargs"] == {"enable_thinking": False}
    elif engine == "prime-rl":
        assert config["orchestrator"]["renderer"]["enable_thinking"] is False


def in_the_folder(folder: Path, script: str, *launch: str) -> str:
    """What this script prints in a process that sees the exported folder alone."""
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, *launch, "script.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_the_shells_share_is_ours_wherever_the_folder_is(run, tmp_path):
    export.main([str(run), "--out", str(tmp_path / "out"), "--from-the-start"])
    script = """
import json, loss, scalerl, torch
assert loss.__file__.startswith(str(scalerl.FOLDER))
row = json.loads((scalerl.FOLDER / "train.jsonl").read_text().splitlines()[0])
ids = lambda text: scalerl.TOKENIZER(text, add_special_tokens=False).input_ids
prompt, end = ids(row["prompt"] + "<think>"), [scalerl.DECODING.eos[0]]
answer = json.loads(row["problem"])["answer"]
completions = [ids(f"</think>{answer}") + end, ids("</think>0") + end, ids(f"</think>{answer}"), []]
found = scalerl.scores([row["problem"]] * 4, [prompt] * 4, completions)
assert found == [1, 0, scalerl.UNUSABLE, scalerl.UNUSABLE], found
scores = torch.tensor([[1.0, 0, 0, 1, scalerl.UNUSABLE], [1, 1, 1, 1, 1]])
_, _, advantages, weights = scalerl.worth(scores, torch.full((2, 5), 10))
wanted = torch.tensor([[1.0, -1, -1, 1, 0], [0, 0, 0, 0, 0]])
assert torch.allclose(advantages, wanted, atol=1e-4), advantages
assert torch.allclose(weights.sum() * 10, torch.tensor(1.0))
assert not weights[1].any() and not weights[0, 4]
"""
    in_the_folder(tmp_path / "out", script)
    assert len(read_lines(tmp_path / "out" / "log.jsonl")) == 1  # R0


def test_each_part_that_is_not_carried_over_is_named():
    recipe = Recipe(
        loss="gspo",
        asynchrony="ppo-2",
        aggregation="token",
        advantage_norm="none",
        fp32_logits=False,
        no_positive_resampling=False,
        length_control="penalty",
    )
    left = {
        "trl": ["--asynchrony"],
        "verl": ["--asynchrony"],
        "prime-rl": ["--asynchrony", "--length-control"],
    }
    for engine, parts in left.items():
        warnings = export.warnings_of(engine, Settings(recipe=recipe))
        assert [text.split()[0] for text in warnings] == parts
        two_files = Settings(recipe=recipe, data=("a.csv", "b.csv"))
        warnings = export.warnings_of(engine, two_files)
        assert [text.split()[0] for text in warnings] == ["--data", *parts]

    # Each engine has an fp32 head on one side alone.
    fp32 = Settings(recipe=replace(recipe, fp32_logits=True))
    for engine in left:
        parts = [text.split()[0] for text in export.warnings_of(engine, fp32)]
        assert "--fp32-logits" in parts


def test_a_split_head_is_one_in_fp32_there(run, tmp_path, capsys):
    mine = Path(shutil.copytree(run, tmp_path / "run"))
    settings = json.loads((mine / "config.json").read_text())
    settings["recipe"]["fp32_logits"] = "split"
    (mine / "config.json").write_text(json.dumps(settings))
    for engine, (name, parse, _) in CONFIGS.items():
        export.main([str(mine), "--to", engine, "--out", str(tmp_path / engine)])
        config = parse((tmp_path / engine / name).read_text())
        assert engine != "trl" or config["cast_lm_head_to_fp32"] is True
        assert "! --fp32-logits split; there: " in capsys.readouterr().out


def test_a_system_prompt_is_in_verls_messages():
    row = export.row_of(Problem("1+2=", "3", "data.tasks.arithmetic"), "Add.")
    assert row["messages"] == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2="},
    ]


def test_wrong_commands_say_what_to_do(run, tmp_path):
    with pytest.raises(ValueError, match="exists; choose another folder"):
        export.main([str(run), "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="--steps is -3; it must be at least 0"):
        export.main([str(run), "--out", str(tmp_path / "new"), "--steps", "-3"])
    with pytest.raises(ValueError, match="holds no run"):
        export.main([str(tmp_path), "--out", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def with_trl(test):
    """A test that wants TRL, which CI installs."""
    missing = not importlib.util.find_spec("trl") and "CI" not in os.environ
    return pytest.mark.slow(pytest.mark.skipif(missing, reason="trl is not installed")(test))


TWO = ("-m", "torch.distributed.run", "--nproc_per_node", "2")


@with_trl
@pytest.mark.parametrize("launch", [(), TWO], ids=["one", "two"])
def test_trl_has_our_loss_and_gradient(launch, run, tmp_path):
    """TRL samples a batch; all losses, aggregations and norms, by benchmarks/elsewhere.py."""
    export.main([str(run), "--out", str(tmp_path / "out")])
    benchmark = str(ROOT / "benchmarks" / "elsewhere.py")
    done = subprocess.run(
        [sys.executable, *launch, benchmark, "trl", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    printed = done.stdout + done.stderr
    differences = [float(value) for value in re.findall(r"largest difference (\S+)", done.stdout)]
    assert len(differences) == (2 if launch else 1) and max(differences) < 1e-5, printed
    assert done.stdout.count("gradient off by") == 27


@with_trl
@pytest.mark.parametrize("launch", [(), TWO], ids=["one", "two"])
def test_trl_goes_on_and_the_curve_with_it(launch, run, tmp_path):
    """Twenty steps, with completions that are interrupted where ours are."""
    out = tmp_path / "out"
    export.main([str(run), "--out", str(out)])
    script = """
import train
D = train.DECODING
low, high = train.SETTINGS.thinking_budget
kept, phrase = train.cut([5] * (high + D.answer_budget))
assert low <= len(kept) <= high and phrase == [*D.phrase]
thought, end = [5, D.end_of_thinking], [D.eos[0]]
assert train.cut(thought + [6] + end) == (thought + [6] + end, [])
assert train.cut(thought + [6] * 40) == (thought + [6] * D.answer_budget, [])
assert train.cut([5] * 9 + end) == ([5] * 9 + end, [])
trainer = train.trainer_of(["--config", "config.yaml", "--use_cpu", "true"])
trainer.train()
trainer.save_state()
"""
    in_the_folder(out, script, *launch)
    records = json.loads((out / "trained" / "trainer_state.json").read_text())["log_history"]
    tokens = [record["tokens_of_step"] for record in records if "tokens_of_step" in record]
    pass_rates = [record["eval_pass_rate"] for record in records if "eval_pass_rate" in record]
    assert len(tokens) == 20 and all(64 * 5 < count < 64 * 67 for count in tokens)
    assert len(pass_rates) == 3 and 0.05 < pass_rates[0] < pass_rates[-1], pass_rates
    logs = str(out / "log.jsonl"), str(out / "trained" / "trainer_state.json")
    options = fit_curve.Options(logs=logs, join=True)
    (((series, _),),) = fit_curve.fit_logs(fit_curve.named_logs(options), options)[0].values()
    assert series.x.tolist() == [0, 200, 400, 400 + sum(tokens[:10]), 400 + sum(tokens)]
    assert series.y[-2:].tolist() == pass_rates[1:]


def test_a_checkpoint_that_was_tampered_with_is_not_carried_on(run, tmp_path):
    out = str(tmp_path / "out")
    tampered = shutil.copytree(run, tmp_path / "run")
    (checkpoint,) = checkpoints(tampered)
    state = checkpoint / "state.json"
    whole = state.read_text()
    for broken in ("[4]", "4", whole.replace("4", "[]", 1), "[" * 100_000):
        state.write_text(broken)
        with pytest.raises(ValueError, match="step-000004 is damaged"):
            export.main([str(tampered), "--out", out])
    state.write_text(whole)
    file = checkpoint / "model" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    name = min(weights)
    for wrong, said in ((weights[name] * math.nan, "not finite"), (torch.zeros(3), "be loaded")):
        safetensors.torch.save_file(weights | {name: wrong}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=said):
            export.main([str(tampered), "--out", out])
    assert not Path(out).exists()
