"""tools/export.py: what it says TRL has, and TRL's gradient beside ours."""

import importlib.util
import json
import runpy
from dataclasses import replace

import pytest
from faults import python
from steps import asked, loss_by_hand, make_group, policy_of
from torch.nn.utils import parameters_to_vector
from torch.optim.optimizer import register_optimizer_step_pre_hook

import loss
from core.model import load_model, load_tokenizer
from core.rollouts import Batch, given_rollout
from core.settings import ROOT, read_sources
from core.text import prompt_ids
from data.tasks import arithmetic
from machinery.folder import write_config
from tools import export

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed")
FLAGS = """
    --steps 2 --train-prompts 40 --validation-problems 8 --prompts-per-step 6
    --completions-per-prompt 4 --validation-samples 2 --warmup-steps 0 --learning-rate 1e-3
"""
SETTINGS = asked(FLAGS)
MODEL = str(ROOT / SETTINGS.model)
BASE = replace(loss.RECIPES["base"], asynchrony="ppo-1")
GSPO = replace(loss.Recipe(), loss="gspo", aggregation="token", advantage_norm="none")


def exported(tmp_path, recipe=None):
    """The options in the script that is written for a run with this recipe."""
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    write_config(run, replace(SETTINGS, recipe=recipe or loss.Recipe()))
    assert export.main([str(run)]) == 0
    return runpy.run_path(str(run / "on_trl.py"))["OPTIONS"]


def test_the_options_and_the_table_are_those_of_the_recipe_or_it_is_refused(tmp_path, capsys):
    (odd := tmp_path / 'a"b').mkdir()
    options = exported(odd)
    assert options["loss_type"] == "cispo" and options["epsilon_high"] == 5
    assert options["learning_rate"] == 1e-3 and "| pipeline-8 |" in capsys.readouterr().out
    options = exported(tmp_path, replace(BASE, asynchrony="ppo-4"))
    assert options["loss_type"] == "grpo" and options["generation_batch_size"] == 4 * 24
    for changes in ({"loss": "icepop"}, {"aggregation": "sample"}):
        with pytest.raises(ValueError, match="TRL has no --loss"):
            exported(tmp_path, replace(loss.Recipe(), **changes))


def gradient_of(model):
    return parameters_to_vector(parameter.grad for parameter in model.parameters())


def our_gradient(recipe, batch):
    """The gradient of our loss on what TRL has sampled, one completion at a time."""
    model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
    (source,) = read_sources(SETTINGS)
    rollouts, correct = [], []
    for number, ids in zip(batch["number"], batch["completion_ids"]):
        problem, ended = source.train[number], ids[-1] == tokenizer.eos_token_id
        correct.append(arithmetic.score(problem, tokenizer.decode(ids[:-1] if ended else ids)))
        made = given_rollout(prompt_ids(tokenizer, problem, SETTINGS), ids)
        policy, tokens_T = policy_of(made, model)
        logprobs = policy.log_prob(tokens_T).detach().numpy()  # on-policy
        rollouts.append(replace(made, logprobs=logprobs, truncated=not ended))
    G = SETTINGS.completions_per_prompt
    groups = [
        make_group(i, rollouts[i : i + G], correct[i : i + G]) for i in range(0, len(rollouts), G)
    ]
    loss_by_hand(model, Batch(groups, 0), replace(SETTINGS, recipe=recipe)).backward()
    return gradient_of(model)


@pytest.mark.parametrize("recipe", [loss.Recipe(), BASE, GSPO])
def test_trl_has_our_gradient(recipe, tmp_path):
    """Of a batch that TRL samples, with groups of equal rewards and truncated completions."""
    from tools.on_trl import make_trainer

    options = exported(tmp_path, recipe)
    flags = "--max_steps 1 --max_grad_norm 0 --use_cpu True --eval_strategy no --save_strategy no"
    flags += " --eval_on_start False"
    trainer = make_trainer(str(tmp_path / "run"), MODEL, options, flags.split())
    judge, batches, theirs = trainer.reward_funcs[0], [], []

    def noted(**batch):
        batches.append(batch)
        return judge(**batch)

    trainer.reward_funcs[0] = noted
    hook = register_optimizer_step_pre_hook(lambda *_: theirs.append(gradient_of(trainer.model)))
    trainer.train()
    hook.remove()
    ours = our_gradient(recipe, *batches)
    assert ours.norm() > 0 and (ours - theirs[0]).norm() / ours.norm() < 1e-4


@pytest.mark.slow
def test_two_processes_make_a_step(tmp_path):
    exported(tmp_path)
    launch = f"-m accelerate.commands.launch --cpu --num_processes 2 {tmp_path}/run/on_trl.py"
    done = python(*f"{launch} --max_steps 1 --use_cpu True".split(), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "run" / "trl" / "trainer_state.json").read_text())
    rates = [line["eval_pass_rate"] for line in state["log_history"] if "eval_pass_rate" in line]
    assert len(rates) == 2 and all(0 < rate < 1 for rate in rates)
