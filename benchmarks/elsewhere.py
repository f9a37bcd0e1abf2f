"""Loss and gradient of an exported run in the engine that it was exported to, beside those of
loss.py.

    python -m tools.export runs/NAME --to trl --out FOLDER
    python benchmarks/elsewhere.py trl FOLDER
    python -m torch.distributed.run --nproc_per_node 2 benchmarks/elsewhere.py trl FOLDER
    python benchmarks/elsewhere.py verl FOLDER
    python benchmarks/elsewhere.py prime-rl FOLDER

Each prints the largest difference of the loss, and of the gradient relative to its norm, over all
losses, aggregations and advantage norms that the engine carries over. The engine must be installed;
a GPU is not needed.
"""

import asyncio
import dataclasses
import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

LOSSES = ("cispo", "dapo", "gspo")
AGGREGATIONS = ("sample", "prompt", "token")
NORMS = ("batch", "prompt", "none")
BUDGETS = (58, 9)  # of the thinking and of the answer, in tokens


def recipes(aggregations=AGGREGATIONS, norms=NORMS) -> list[dict[str, str]]:
    names = ("loss", "aggregation", "advantage_norm")
    return [dict(zip(names, values)) for values in itertools.product(LOSSES, aggregations, norms)]


def ours(recipe, model, rows: list[tuple], G: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the steps of train.py. rows: of each completion, group by group,
    (prompt ids, completion ids, sampled, log pi_gen, score). A score below 0 is that of an unusable
    completion."""
    import loss
    from core.policy import Policy, micro_batches
    from core.rollouts import Request, Rollout

    rollouts = []
    for prompt, ids, sampled, logprobs, _ in rows:
        rollouts.append(
            Rollout(
                Request(0, 0, prompt, 0, ()),
                np.array(ids, np.int32),
                np.array(sampled, bool),
                np.array(logprobs, np.float32),
                np.zeros(len(ids), np.int32),
                False,
                False,
            )
        )

    # What each completion is worth.
    lengths = [int(rollout.sampled.sum()) for rollout in rollouts]
    lengths_PG = torch.tensor(lengths).view(-1, G)
    scores = [float(row[4]) for row in rows]
    scores_PG = torch.tensor(scores).view(-1, G)
    worth = loss.worth(recipe, scores_PG, lengths_PG, scores_PG >= 0, *BUDGETS)
    advantages_R = worth.advantages_PG.flatten()
    weights_R = worth.weights_PG.flatten()

    # The loss over the completions that count, and its gradient.
    counted = weights_R.nonzero().flatten().tolist()
    policy = Policy(model)
    total = 0.0
    model.zero_grad()
    for m in micro_batches(rollouts, counted, 4096, torch.device("cpu"), 0, 1):
        logprobs_BT, _ = policy(m, recipe.fp32_logits)
        policy_loss, _ = loss.policy_loss(
            recipe,
            logprobs_BT,
            m.generator_logprobs_BT,
            m.sampled_BT,
            advantages_R[m.rows_B],
            weights_R[m.rows_B],
        )
        policy_loss.backward()
        total += policy_loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def compare(name: str, theirs: tuple[float, dict], expected: tuple[float, dict]) -> float:
    """Print and return the larger of two differences: of the loss, and of the gradients, the norm
    of the difference relative to the norm of ours."""
    their_loss, their_gradients = theirs
    our_loss, our_gradients = expected
    their_flat = torch.cat([their_gradients[key].flatten() for key in our_gradients])
    our_flat = torch.cat([our_gradients[key].flatten() for key in our_gradients])
    of_loss = abs(their_loss - our_loss)
    of_gradients = ((their_flat - our_flat).norm() / our_flat.norm()).item()
    off = f"off by {of_loss:.1e}; gradient off by {of_gradients:.1e}"
    print(f"{name:28} loss {our_loss:+.6f}, {off}", flush=True)
    return max(of_loss, of_gradients)


def trl(folder: Path) -> float:
    """TRL samples a batch with the exported model. log pi_gen gets noise, so that ratios are far
    from 1."""
    from accelerate.utils import gather_object
    from trl import GRPOTrainer
    from trl.trainer.utils import split_tensor_dict

    import train
    from core.model import load_model

    out = ["--output_dir", tempfile.mkdtemp()]
    trainer = train.trainer_of(["--config", str(folder / "config.yaml"), "--use_cpu", "true", *out])
    # One length of prompts: TRL pads them on the left, and the angles of other positions are
    # rounded otherwise.
    trainer.train_dataset = trainer.train_dataset.filter(lambda row: len(row["prompt"]) == 8)
    wrapped = trainer.accelerator.prepare_model(trainer.model)
    trainer.model.train()

    # A batch that is sampled once. Each recipe gets the same completions.
    inputs = next(iter(trainer.get_train_dataloader()))
    batch = GRPOTrainer._generate_and_score_completions(trainer, inputs)
    GRPOTrainer._generate_and_score_completions = lambda *_: dict(batch)

    # Their log pi_gen, with noise.
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention, width
        )
    batch["sampling_per_token_logps"] = logprobs + 0.3 * torch.randn_like(logprobs)

    # The same completions as rows for `ours`, from all ranks.
    rank = trainer.accelerator.process_index
    n = len(inputs)
    scores = trainer.scores_R1.flatten()[rank * n : (rank + 1) * n]
    rows = []
    for i in range(n):
        of_completion = batch["completion_mask"][i].bool()
        names = ("completion_ids", "tool_mask", "sampling_per_token_logps")
        columns = [batch[name][i][of_completion].tolist() for name in names]
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        rows.append((prompt, *columns, scores[i]))
    rows = gather_object(rows)

    worst = 0.0
    for changes in recipes():
        recipe = dataclasses.replace(train.RECIPE, **changes)
        train.RECIPE = train.scalerl.RECIPE = recipe

        # TRL's loss and gradient, and ours.
        wrapped.zero_grad()
        total = 0.0
        with_worth = trainer._generate_and_score_completions(inputs)
        for piece in split_tensor_dict(with_worth, trainer.args.steps_per_generation):
            value = trainer.compute_loss(wrapped, piece)
            value.backward()
            total += trainer.accelerator.reduce(value.detach(), "mean").item()
        gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
        model = load_model(str(folder / "model"))
        expected = ours(recipe, model, rows, trainer.num_generations)
        if rank == 0:
            worst = max(worst, compare(" ".join(changes.values()), (total, gradients), expected))
    return worst


def random_batch(P: int = 6, G: int = 4, T: int = 12) -> dict[str, Tensor]:
    """Random completions: log-probabilities [B, T], masks, and scores. One group is all right, one
    completion was truncated, and log pi_gen is far enough from log pi_train for every clip to
    act."""
    random = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(3, T + 1, (P * G,), generator=random)
    scores_B = torch.randint(0, 2, (P * G,), generator=random).float()
    scores_B[:G] = 1.0
    usable_B = torch.ones(P * G, dtype=torch.bool)
    usable_B[-1] = False
    logprobs_BT = -2 * torch.rand(P * G, T, generator=random)
    noise_BT = 0.5 * torch.randn(P * G, T, generator=random)
    mask_BT = torch.arange(T) < lengths_B[:, None]
    return {
        "logprobs": logprobs_BT.requires_grad_(),
        "generator": logprobs_BT.detach() + noise_BT,
        "mask": mask_BT,
        "scores": scores_B,
        "usable": usable_B,
        "groups": torch.arange(P).repeat_interleave(G),
    }


def expected_of(recipe, batch: dict[str, Tensor], P: int = 6) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of a random batch by loss.py alone, as train.py calls it."""
    import loss

    scores_PG = batch["scores"].view(P, -1)
    lengths_PG = batch["mask"].sum(1).view(P, -1)
    usable_PG = batch["usable"].view(P, -1)
    worth = loss.worth(recipe, scores_PG, lengths_PG, usable_PG, *BUDGETS)
    policy_loss, _ = loss.policy_loss(
        recipe,
        batch["logprobs"],
        batch["generator"],
        batch["mask"],
        worth.advantages_PG.flatten(),
        worth.weights_PG.flatten(),
    )
    (gradient,) = torch.autograd.grad(policy_loss, batch["logprobs"])
    return policy_loss.item(), {"log pi": gradient}


def three_completions(problem: str) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of a right, a wrong and a truncated completion of this
    problem."""
    import scalerl

    ids = lambda text: scalerl.TOKENIZER(text, add_special_tokens=False).input_ids
    fields = json.loads(problem)
    eos = scalerl.DECODING.eos[:1]
    prompt = ids(f"{fields['prompt']}<think>")
    right = ids(f"</think>{fields['answer']}")
    wrong = ids("</think>0")
    return [(prompt, [*right, *eos]), (prompt, [*wrong, *eos]), (prompt, right)]


def verl(folder: Path) -> float:
    """verl composes the configuration and checks it. Its registries hand out our functions, which
    get its tensors: a batch in three micro-batches, for two processes whose gradients it would
    average."""
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": "scalerl_verl", "PWD": str(folder)}
    import scalerl
    import scalerl_verl
    from hydra import compose, initialize_config_dir
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    # The configuration, and our functions in verl's registries.
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("config")
    validate_config(config, need_reference_policy(config), need_critic(config))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info.update(dp_size=2, batch_num_tokens=100)
    advantages_of = get_adv_estimator_fn(config.algorithm.adv_estimator)
    loss_of = get_policy_loss_fn(actor.policy_loss.loss_mode)

    # Verdicts.
    row = json.loads((folder / "train.jsonl").read_text().splitlines()[0])
    manager = scalerl_verl.Verdicts(config, scalerl.TOKENIZER, None)
    found = []
    for prompt, ids in three_completions(row["problem"]):
        tensors = {"prompts": torch.tensor([prompt]), "responses": torch.tensor([ids])}
        tensors["attention_mask"] = torch.ones(1, len(prompt) + len(ids))
        rewards = np.array([row["reward_model"]], dtype=object)
        data = DataProto(TensorDict(tensors, batch_size=1), {"reward_model": rewards})
        found.append(manager.loop.run_until_complete(manager.run_single(data))["reward_score"])
    print(f"rewards of a right, a wrong and a truncated completion: {found}")
    assert found == [1.0, 0.0, -1.0]

    # Losses and gradients.
    worst = 0.0
    batch = random_batch()
    scores_B = torch.where(batch["usable"], batch["scores"], -1.0)
    rewards_BT = torch.zeros_like(batch["generator"])
    rewards_BT[:, 0] = scores_B
    for changes in recipes():
        scalerl.RECIPE = dataclasses.replace(scalerl.RECIPE, **changes)
        scalerl.SETTINGS = SimpleNamespace(
            thinking_budget=(0, BUDGETS[0]), answer_budget=BUDGETS[1]
        )
        groups = np.array([f"uid-{group}" for group in batch["groups"].tolist()], dtype=object)
        weighted_BT, _ = advantages_of(
            token_level_rewards=rewards_BT,
            response_mask=batch["mask"].long(),
            index=groups,
            config=config.algorithm,
        )

        total = 0.0
        for rows in torch.arange(len(groups)).chunk(3):
            value, _ = loss_of(
                old_log_prob=batch["generator"][rows],
                log_prob=batch["logprobs"][rows],
                advantages=weighted_BT[rows],
                response_mask=batch["mask"][rows],
                loss_agg_mode=actor.loss_agg_mode,
                config=actor,
                rollout_is_weights=None,
            )
            total = total + value / 2
        (gradient,) = torch.autograd.grad(total, batch["logprobs"])
        theirs = total.item(), {"log pi": gradient}
        expected = expected_of(scalerl.RECIPE, batch)
        worst = max(worst, compare(" ".join(changes.values()), theirs, expected))
    return worst


def prime_rl(folder: Path) -> float:
    """prime-rl's own classes parse the configuration, its compute_loss calls our loss sequence by
    sequence, and its advantages are those of its `grpo`: centred scores, with no truncated
    completion in the batch."""
    import tomllib

    import scalerl
    import scalerl_prime
    from prime_rl.configs.rl import RLConfig
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

    # The configurations for one GPU and for several.
    one = tomllib.loads((folder / "config.toml").read_text())
    config = RLConfig.model_validate(one)
    RLConfig.model_validate(one | tomllib.loads((folder / "several.toml").read_text()))

    # Verdicts.
    taskset = scalerl_prime.ScaleRLTaskset(
        scalerl_prime.ScaleRLConfig(id="scalerl-prime", split="validation")
    )
    task = next(iter(taskset.load()))
    found = []
    for prompt, ids in three_completions(task.data.problem):
        before = SimpleNamespace(token_ids=prompt, mask=[False] * len(prompt))
        after = SimpleNamespace(token_ids=ids, mask=[True] * len(ids))
        trace = SimpleNamespace(nodes=[before, after])
        found.append(asyncio.run(task.score(trace)))
    print(f"rewards of a right, a wrong and a truncated completion: {found}")
    assert found == [1.0, 0.0, 0.0]

    # Losses and gradients.
    worst = 0.0
    loss_of = setup_rl_loss_fn(config.trainer.loss)
    batch = random_batch()
    batch["usable"][:] = True
    scores_PG = batch["scores"].view(6, -1)
    advantages_B = (scores_PG - scores_PG.mean(1, keepdim=True)).flatten()
    rows = advantages_B.nonzero().flatten().tolist()  # filter_zero_advantages
    for changes in recipes(("token",), ("none",)):
        scalerl.RECIPE = dataclasses.replace(scalerl.RECIPE, **changes)
        advantages = [advantage.expand(12) for advantage in advantages_B[rows]]
        tokens = int(batch["mask"][rows].sum())
        value, _ = compute_loss(
            [*batch["logprobs"][rows]],
            [*batch["generator"][rows]],
            None,
            advantages,
            [*batch["mask"][rows]],
            None,
            None,
            None,
            loss_of,
            tokens,
            1,
            1,
        )
        (gradient,) = torch.autograd.grad(value, batch["logprobs"])
        theirs = value.item(), {"log pi": gradient}
        expected = expected_of(scalerl.RECIPE, batch)
        worst = max(worst, compare(" ".join(changes.values()), theirs, expected))
    return worst


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    print(f"largest difference {globals()[engine.replace('-', '_')](folder):.1e}")


if __name__ == "__main__":
    main()
