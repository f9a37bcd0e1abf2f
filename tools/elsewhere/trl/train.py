"""Go on with a run in TRL's GRPOTrainer. The worth of a completion and its loss are loss.py's; the
system is TRL's."""

import math
import os
import random
import sys

import scalerl
import torch
from accelerate.utils import gather_object
from datasets import load_dataset
from scalerl import DECODING, FOLDER, RECIPE, SETTINGS, TOKENIZER
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, TrlParser

import loss
from core.decoding import render


def turn(
    trainer: GRPOTrainer, prompt_ids: list[list[int]], tokens: int, copies: int
) -> tuple[list, list]:
    """At most `tokens` sampled ids after each prompt, and log pi_gen of each (0 without vLLM, which
    alone tells it). copies: how often each prompt stands in the list."""
    if trainer.use_vllm:
        trainer.vllm_generation.max_completion_length = tokens
    else:
        trainer.generation_config.max_new_tokens = trainer.generation_kwargs["max_new_tokens"] = (
            tokens
        )
    ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, copies)
    return ids, logprobs or [[0.0] * len(one) for one in ids]


def cut(ids: list[int]) -> tuple[list[int], list[int]]:
    """What stays of a completion that was sampled up to both budgets, and the phrase if it is
    interrupted after that. Its thinking budget is drawn here (loss.interrupt_or_truncate)."""
    if RECIPE.length_control == "penalty":
        return ids, []
    budget, end = random.randint(*SETTINGS.thinking_budget), DECODING.end_of_thinking
    if DECODING.thinks and end not in ids[:budget]:
        return ids[:budget], [] if scalerl.has_ended(ids[:budget]) else [*DECODING.phrase]
    closed = ids.index(end) + 1 if DECODING.thinks else 0
    return ids[: closed + DECODING.answer_budget], []


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    """TRL's rollout_func, with forced interruption: the answers of interrupted completions need
    another turn."""
    copies = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    prompt_ids = [
        render(TOKENIZER, prompt, SETTINGS.thinking, SETTINGS.system) for prompt in prompts
    ]
    ids, logprobs = turn(
        trainer, prompt_ids, DECODING.thinking_budget + DECODING.answer_budget, copies
    )
    sampled, interrupted = [], []
    for row, (kept, phrase) in enumerate([cut(one) for one in ids]):
        ids[row], logprobs[row] = kept + phrase, logprobs[row][: len(kept)] + [0.0] * len(phrase)
        sampled.append([1] * len(kept) + [0] * len(phrase))
        interrupted += [row] if phrase else []
    calls = max(
        gather_object([len(interrupted)])
    )  # the processes sample together, so each takes part with as many
    if calls:
        rows = interrupted + [0] * (calls - len(interrupted))
        answers = turn(
            trainer, [prompt_ids[row] + ids[row] for row in rows], DECODING.answer_budget, 1
        )
        for row, answer, its_logprobs in zip(interrupted, *answers):
            ids[row], logprobs[row] = ids[row] + answer, logprobs[row] + its_logprobs
            sampled[row] += [1] * len(answer)
    return {
        "prompt_ids": prompt_ids, "completion_ids": ids, "env_mask": sampled, "rendered": prompt_ids,
        "logprobs": logprobs if trainer.use_vllm else None,
    }  # fmt: skip


def score(problem: list[str], rendered: list, completion_ids: list, log_metric, **_) -> list[float]:
    """TRL's reward function: the scores. The pass rate goes to its log."""
    scores = scalerl.scores(problem, rendered, completion_ids)
    log_metric("pass_rate", scores.count(1) / len(scores))
    return scores


class ScaleRLTrainer(GRPOTrainer):
    """GRPOTrainer with our advantages, token weights and loss."""

    def _calculate_rewards(self, *args) -> Tensor:
        self.scores_R1 = super()._calculate_rewards(
            *args
        )  # [R, 1], of all processes, group by group
        return self.scores_R1

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Tensor]:
        """TRL's, and in training our advantages and weights in place of its. The batch is that of
        all processes."""
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            lengths_R = self.accelerator.gather(
                (output["completion_mask"] * output["tool_mask"]).sum(1)
            )
            lengths_PG = lengths_R.view(-1, self.num_generations)
            worth = scalerl.worth(self.scores_R1.view_as(lengths_PG), lengths_PG)
            for name, values_PG in zip(("advantages", "weights"), worth):
                output[name] = values_PG.view(-1, len(inputs))[self.accelerator.process_index]
            self._metrics["train"]["tokens_of_step"].append(lengths_R.sum().item())
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        if not self.model.training:  # a validation wants the pass rate alone
            return inputs["advantages"].sum() * 0
        names = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
        ids_BT, attention_BT = (torch.cat([inputs[name] for name in pair], 1) for pair in names)
        width = inputs["completion_ids"].shape[1]
        logprobs_BT, _, _ = self._get_per_token_logps_and_entropies(
            model, ids_BT, attention_BT, width
        )
        generator_BT = inputs.get(
            "sampling_per_token_logps", logprobs_BT.detach()
        )  # without vLLM pi_gen is pi
        sampled_BT = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        value, _ = loss.policy_loss(
            RECIPE, logprobs_BT, generator_BT, sampled_BT, inputs["advantages"], inputs["weights"]
        )
        return (
            value * self.accelerator.num_processes
        )  # which average their gradients, but our weights need the sum


def trainer_of(arguments: list[str]) -> ScaleRLTrainer:
    """The trainer by these flags of TRL's, with batches for all processes. ValueError if they
    cannot share a step."""
    processes, batch = (
        int(os.environ.get("WORLD_SIZE", 1)),
        SETTINGS.groups_per_step * SETTINGS.completions_per_prompt,
    )
    if batch % processes:
        raise ValueError(
            f"{processes} processes cannot share the {batch} completions of a step: start fewer"
        )
    data = load_dataset(
        "json", data_files={part: str(FOLDER / f"{part}.jsonl") for part in ("train", "validation")}
    )
    at_once = max(
        1, SETTINGS.tokens_per_micro_batch // DECODING.longest
    )  # sequences of a micro-batch
    rows = max(n for n in range(1, at_once + 1) if batch // processes % n == 0)
    problems = max(
        1, math.gcd(len(data["validation"]), 32 * processes) // processes
    )  # the last batch is full too
    sizes = [
        "--per_device_train_batch_size", rows, "--gradient_accumulation_steps", batch // processes // rows,
        "--per_device_eval_batch_size", problems * SETTINGS.validation_samples,
    ]  # fmt: skip
    (args,) = TrlParser(GRPOConfig).parse_args_and_config([*arguments, *map(str, sizes)])
    model = str(FOLDER / "model")
    return ScaleRLTrainer(
        model, score, args, data["train"], data["validation"], rollout_func=rollout
    )


if __name__ == "__main__":
    trainer = trainer_of(sys.argv[1:])
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
