"""A run of ours goes on in TRL's GRPOTrainer, by TRL's public options and a reward function.
tools/export.py writes the script that calls `make_trainer`."""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer, TrlParser

import loss
from core.model import load_tokenizer
from core.rollouts import given_rollout
from core.settings import Settings, read_settings, read_sources
from core.text import completion_text, make_decoding, messages, prompt_ids, rendered
from data import Problem
from data.verify import VerifierPool


def reward_function(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, problems: list[Problem]
) -> Callable:
    """TRL's reward function for these problems.

    A validation gets the scores. In training, TRL subtracts the mean of a group and has the loss
    -sum(advantage x term) / (all tokens), or with `grpo` the mean of each completion's. Ours is
    -sum(weight x advantage x term) by `loss.credit`. So the reward is weight x advantage x TRL's
    denominator, whose mean in a group is 0.
    """
    recipe = settings.recipe
    decoding = make_decoding(tokenizer, settings, recipe.length_control)
    budgets = settings.thinking_budget[1], settings.answer_budget
    verifiers = VerifierPool(*settings.verifier_limits)

    def reward(number, held_out, completion_ids, log_metric, **_) -> list[float]:
        """The lists have a value for each completion of this process."""
        problem_of_each = [problems[i] for i in number]
        prompts = [prompt_ids(tokenizer, problem, settings) for problem in problem_of_each]
        rollouts = [*map(given_rollout, prompts, completion_ids)]
        texts = [completion_text(tokenizer, decoding, rollout) for rollout in rollouts]
        verdicts = dict(verifiers.judge([*zip(itertools.count(), problem_of_each, texts)]))
        # Score, length, and whether it ended by itself and has a verdict.
        own = [
            (verdicts[i].score, len(ids), ids[-1] in decoding.eos and not verdicts[i].failure)
            for i, ids in enumerate(completion_ids)
        ]
        right = [score * usable for score, _, usable in own]
        log_metric("pass_rate", right.count(1) / len(right))
        if held_out[0]:
            return right

        # The whole batch, of all processes, in groups.
        batch = torch.tensor(gather_object(own)).view(-1, settings.completions_per_prompt, 3)
        scores_PG, lengths_PG, usable_PG = batch.unbind(2)
        credit = loss.credit(recipe, scores_PG, lengths_PG, usable_PG.bool(), *budgets)
        denominators_PG = lengths_PG.sum()
        if recipe.aggregation == "sample":
            denominators_PG = lengths_PG * lengths_PG.numel()
        rewards_PG = credit.weights_PG * credit.advantages_PG * denominators_PG
        of_processes = rewards_PG.view(-1, len(own))
        return of_processes[PartialState().process_index].tolist()

    return reward


def make_trainer(
    run: str, model: str, options: dict, flags: list[str] | None = None
) -> GRPOTrainer:
    """The trainer of the run in this folder, with these options and flags of TRL's GRPOConfig; by
    default the flags are those of the command."""
    settings = read_settings(Path(run))
    sources = read_sources(settings)
    problems = [problem for source in sources for problem in source.train]
    trained = len(problems)
    problems += [problem for source in sources for problem in source.validation]
    tokenizer = load_tokenizer(model)
    rows = []
    for number, problem in enumerate(problems):
        prompt = messages(problem, settings)
        if tokenizer.chat_template is None:
            prompt = rendered(tokenizer, prompt, settings)
        rows.append({"prompt": prompt, "number": number, "held_out": number >= trained})
    parser = TrlParser(GRPOConfig)
    parser.set_defaults(**options)
    (args,) = parser.parse_args_and_config(flags)
    return GRPOTrainer(
        model,
        reward_function(settings, tokenizer, problems),
        args,
        Dataset.from_list(rows[:trained]),
        Dataset.from_list(rows[trained:]),
    )
