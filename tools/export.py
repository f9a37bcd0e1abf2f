"""A script with which a run goes on in TRL, which spans nodes: written for TRL 1.16.0.

    python -m tools.export runs/NAME       # writes runs/NAME/on_trl.py; says what carries over

The script has TRL's public options with the values of the run, and the model of its last
checkpoint. Data, verdicts and the credit of completions are ours, in a reward function
(tools/on_trl.py).
"""

import loss
from core.settings import ROOT, model_path, rate_factor, read_settings
from curve.files import write_whole
from curve.flags import read_flags, run_command
from machinery.folder import checkpoint_of
from tools.view import OneRun

TABLE = """\
| part | in TRL |
|---|---|
| loss {recipe.loss} | `loss_type`; with vLLM also a factor, cut at `--eps-max` |
| mean over {recipe.aggregation}, advantages by {recipe.advantage_norm} | by our reward function: exactly; of `ppo-K` over K batches |
| zero-variance filter; what is truncated or has no verdict | exactly, by our reward function |
| fp32 head | `cast_lm_head_to_fp32`: in the trainer alone |
| {recipe.asynchrony} | of `ppo-K`: `generation_batch_size`; TRL has no `pipeline-K`: as `ppo-1` |
| forced interruption | TRL has none: one budget for thinking and answer |
| length penalty | exactly, by our reward function |
| No-Positive-Resampling | TRL has none: solved prompts come again |
| weights of several sources | TRL has none: one set |
| optimizer | new moments; the warmup begins at 0 |
| `--lora-rank` | its adapters are merged; all parameters are trained, at 1/{factor:g} of the run's rate |
| held-out problems | `eval_pass_rate` in `trl/trainer_state.json` |
| other parts, of a fork of ours | not known here |
"""  # noqa: E501
SCRIPT = '''"""A run goes on in TRL 1.16.0.

    python runs/NAME/on_trl.py          # each option of TRL's GRPOConfig is a flag: --max_steps 40
    accelerate launch --num_processes 8 runs/NAME/on_trl.py --bf16 True --use_vllm True

{table}"""

import os
import sys
from math import inf

sys.path.insert(0, {project!r})  # loss.py, data/ and all that they need

from tools.on_trl import make_trainer

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
if {settings.groups_per_step} % PROCESSES:
    sys.exit(f"the {settings.groups_per_step} groups of a step cannot be shared by {{PROCESSES}} processes")
OPTIONS = {loss} | {{
    "scale_rewards": "none",
    "off_policy_mask_threshold": {mask},
    "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": {cap},
    "cast_lm_head_to_fp32": bool({recipe.fp32_logits!r}),
    "model_init_kwargs": {{"dtype": "float32"}},
    "bf16": False,
    "gradient_checkpointing": bool({settings.gradient_checkpointing}),
    "chat_template_kwargs": {{"enable_thinking": {settings.thinking}}},
    "generation_batch_size": {batches} * {settings.groups_per_step} * {settings.completions_per_prompt},
    "max_completion_length": {settings.thinking_budget[1]} + {settings.answer_budget},
    "num_generations": {settings.completions_per_prompt},
    "per_device_train_batch_size": {settings.completions_per_prompt},  # a group
    "gradient_accumulation_steps": {settings.groups_per_step} // PROCESSES,
    "num_generations_eval": {settings.validation_samples},
    "per_device_eval_batch_size": 8 * {settings.validation_samples},
    "learning_rate": {rate},
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": {settings.warmup_steps},
    "adam_beta1": {settings.adam_betas[0]},
    "adam_beta2": {settings.adam_betas[1]},
    "adam_epsilon": {settings.adam_eps},
    "weight_decay": {settings.weight_decay},
    "max_grad_norm": {settings.clip_gradient},
    "max_steps": {settings.steps},
    "eval_strategy": "steps",
    "eval_steps": {settings.validation_every},
    "eval_on_start": True,
    "save_steps": {settings.checkpoint_every},
    "logging_steps": 1,
    "seed": {settings.seed},
    "output_dir": {run!r} + "/trl",
}}

if __name__ == "__main__":
    trainer = make_trainer({run!r}, {model!r}, OPTIONS)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
'''  # noqa: E501


def loss_options(recipe: loss.Recipe) -> dict:
    """TRL's options for the loss of this recipe. ValueError if TRL has no such loss."""
    constants = loss.constants(recipe)
    over_samples = recipe.aggregation == "sample"
    if recipe.loss == "cispo" and not over_samples:
        return {"loss_type": "cispo", "epsilon_high": constants["eps_max"]}
    if recipe.loss not in ("dapo", "grpo", "gspo"):
        raise ValueError(f"TRL has no --loss {recipe.loss} with --aggregation {recipe.aggregation}")
    return {
        "loss_type": "grpo" if over_samples else "dapo",
        "epsilon": constants["eps_low"],
        "epsilon_high": constants["eps_high"],
        "importance_sampling_level": "sequence" if recipe.loss == "gspo" else "token",
    }


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError or OSError, in one sentence, if there is no such run, or
    if TRL has not its loss."""
    run = read_flags(OneRun, arguments, description=__doc__).run.resolve()
    settings = read_settings(run)
    recipe = settings.recipe
    trained = (checkpoint_of(run, None) or run) / "model"
    model = trained if trained.exists() else model_path(settings.model)
    kind, k = loss.parse_asynchrony(recipe.asynchrony)
    factor = rate_factor(settings.lora_rank, settings.defaults)
    table = TABLE.format(recipe=recipe, factor=factor)
    script = SCRIPT.format(
        run=str(run),
        project=str(ROOT),
        model=str(model),
        settings=settings,
        recipe=recipe,
        table=table,
        rate=settings.learning_rate / factor,
        batches=k if kind == "ppo" else 1,
        loss=loss_options(recipe),
        cap=(loss.LOSSES["cispo"].constants | loss.constants(recipe))["eps_max"],
        mask=loss.MASK_DELTA if recipe.mask_sequences else None,
    )
    write_whole(run / "on_trl.py", script)
    print(f"{table}\npython {run}/on_trl.py")
    return 0


if __name__ == "__main__":
    run_command(main)
