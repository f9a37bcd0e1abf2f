"""tools/export.py: what it writes for each engine, what it says is not carried over, and one curve of two
logs."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import fit_curve
from core.model import load_model, load_tokenizer, model_path
from core.settings import Settings
from data import Problem
from loss import Recipe
from machinery.checkpoints import write_checkpoint
from machinery.folder import write_config
from tools import export

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run with a checkpoint of step 4, whose log goes on to step 6. Its model is
    the first one."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    settings = Settings(
        steps=24, train_prompts=400, validation_problems=32, prompts_per_step=8, completions_per_prompt=8,
        validation_samples=8, warmup_steps=0, validation_every=10, thinking=False,
    )  # fmt: skip
    write_config(folder, settings)
    path = model_path(settings.model)
    model = load_model(path, torch.device("cpu"), torch.float32)
    write_checkpoint(folder, model, load_tokenizer(path), dict(model.named_parameters()), {"m": torch.zeros(1)},
                     {"step": 4})  # fmt: skip
    lines = [
        {"kind": kind, "step": step, "pass_rate": 0.1 + step / 50, "compute_tokens": 100 * step}
        for step in range(7) for kind in ("train", "validation")[step == 0 : 1 + (step % 2 == 0)]
    ]  # fmt: skip
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


CONFIGS = {
    "trl": ("config.yaml", yaml.safe_load, lambda c: (c["max_steps"], c["num_generations"], c["learning_rate"])),
    "verl": ("config.yaml", yaml.safe_load, lambda c: (c["trainer"]["total_training_steps"],
             c["actor_rollout_ref"]["rollout"]["n"], c["actor_rollout_ref"]["actor"]["optim"]["lr"])),
    "prime-rl": ("config.toml", tomllib.loads, lambda c: (c["max_steps"], c["orchestrator"]["group_size"],
                 c["trainer"]["optim"]["lr"])),
}  # fmt: skip


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("engine", CONFIGS)
def test_the_folder_has_all_that_an_engine_needs(engine, run, tmp_path, capsys):
    out = tmp_path / "out"
    assert export.main([str(run), "--to", engine, "--out", str(out)]) == 0
    name, parse, values = CONFIGS[engine]
    config = parse((out / name).read_text())
    assert values(config) == (20, 8, 2e-4)  # the steps that are left
    checkpoint = run / "checkpoints" / "step-000004" / "model"
    assert (out / "model" / "model.safetensors").read_bytes() == (
        checkpoint / "model.safetensors"
    ).read_bytes()
    assert max(line["step"] for line in read_lines(out / "log.jsonl")) == 4
    for text in (out / "README.md", out / name):
        assert not re.search(r"\$[a-z{](?!oc\.env|trainer)", text.read_text()), (
            "a placeholder is left"
        )
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
    for template in out.glob("*.toml"):
        tomllib.loads(template.read_text())


def in_the_folder(folder: Path, script: str, *launch: str) -> str:
    """What this script prints in a process that sees the exported folder alone."""
    (folder / "script.py").write_text(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, *launch, "script.py"], cwd=folder, capture_output=True, text=True,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_the_shells_share_is_ours_wherever_the_folder_is(run, tmp_path):
    export.main([str(run), "--out", str(tmp_path / "out"), "--from-the-start"])
    script = """
import json, loss, scalerl, torch
assert loss.__file__.startswith(str(scalerl.FOLDER))
row = json.loads((scalerl.FOLDER / "train.jsonl").read_text().splitlines()[0])
ids = lambda text: scalerl.TOKENIZER(text, add_special_tokens=False).input_ids
prompt, end, answer = ids(row["prompt"] + "<think>"), [scalerl.DECODING.eos[0]], json.loads(row["problem"])["answer"]
completions = [ids(f"</think>{answer}") + end, ids("</think>0") + end, ids(f"</think>{answer}"), []]
found = scalerl.scores([row["problem"]] * 4, [prompt] * 4, completions)
assert found == [1, 0, scalerl.UNUSABLE, scalerl.UNUSABLE], found
scores = torch.tensor([[1.0, 0, 0, 1, scalerl.UNUSABLE], [1, 1, 1, 1, 1]])
advantages, weights = scalerl.worth(scores, torch.full((2, 5), 10))
assert torch.allclose(advantages, torch.tensor([[1.0, -1, -1, 1, 0], [0, 0, 0, 0, 0]]), atol=1e-4), advantages
assert torch.allclose(weights.sum() * 10, torch.tensor(1.0)) and not weights[1].any() and not weights[0, 4]
"""
    in_the_folder(tmp_path / "out", script)
    assert len(read_lines(tmp_path / "out" / "log.jsonl")) == 1  # R0


def test_each_part_that_is_not_carried_over_is_named():
    recipe = Recipe(loss="gspo", asynchrony="ppo-2", aggregation="token", advantage_norm="none",
                    fp32_logits=False, no_positive_resampling=False, length_control="penalty")  # fmt: skip
    named = lambda **of_settings: {
        engine: [text.split()[0] for text in export.warnings_of(engine, Settings(**of_settings))]
        for engine in CONFIGS
    }
    left = {
        "trl": ["--asynchrony"],
        "verl": ["--asynchrony"],
        "prime-rl": ["--asynchrony", "--length-control"],
    }
    assert named(recipe=recipe) == left
    several = named(recipe=recipe, data=("a.csv", "b.csv"))
    assert several == {engine: ["--data", *parts] for engine, parts in left.items()}


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
    (system, user) = export.row_of(Problem("1+2=", "3", "data.tasks.arithmetic"), "Add.")[
        "messages"
    ]
    assert (system, user) == (
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2="},
    )


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
    done = subprocess.run(
        [sys.executable, *launch, str(ROOT / "benchmarks" / "elsewhere.py"), "trl", str(tmp_path / "out")],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    differences = [float(value) for value in re.findall(r"largest difference (\S+)", done.stdout)]
    assert len(differences) == 1 + bool(launch) and max(differences) < 1e-5, (
        done.stdout + done.stderr
    )
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
assert train.cut([5, D.end_of_thinking, 6, D.eos[0]]) == ([5, D.end_of_thinking, 6, D.eos[0]], [])
assert train.cut([5, D.end_of_thinking] + [6] * 40) == ([5, D.end_of_thinking] + [6] * D.answer_budget, [])
assert train.cut([5] * 9 + [D.eos[0]]) == ([5] * 9 + [D.eos[0]], [])
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
