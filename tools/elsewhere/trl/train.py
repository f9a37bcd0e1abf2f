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
        trainer.generation_config.max_new_tokens = tokens
        trainer.generation_kwargs["max_new_tokens"] = tokens
    ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, copies)
    return ids, logprobs or [[0.0] * len(one) for one in ids]


def cut(ids: list[int]) -> tuple[list[int], list[int]]:
    """What stays of a completion that was sampled up to both budgets, and the phrase if it is
    interrupted after that. Its thinking budget is drawn here (loss.interrupt_or_truncate)."""
    if RECIPE.length_control == "penalty":
        return ids, []
    budget, end = random.randint(*SETTINGS.thinking_budget), DECODING.end_of_thinking
    thinking = ids[:budget]
    if not DECODING.thinks:
        return ids[: DECODING.answer_budget], []
    if end in thinking:
        return ids[: ids.index(end) + 1 + DECODING.answer_budget], []
    if scalerl.has_ended(thinking):
        return thinking, []
    return thinking, [*DECODING.phrase]


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    """TRL's rollout_func, with forced interruption: the answers of interrupted completions need
    another turn."""
    copies = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    chat = SETTINGS.thinking, SETTINGS.system
    prompt_ids = [render(TOKENIZER, prompt, *chat) for prompt in prompts]
    both_budgets = DECODING.thinking_budget + DECODING.answer_budget
    ids, logprobs = turn(trainer, prompt_ids, both_budgets, copies)
    sampled, interrupted = [], []
    for row in range(len(ids)):
        kept, phrase = cut(ids[row])
        ids[row] = kept + phrase
        logprobs[row] = logprobs[row][: len(kept)] + [0.0] * len(phrase)
        sampled.append([1] * len(kept) + [0] * len(phrase))
        if phrase:
            interrupted.append(row)
    # The processes sample together, so each takes part with as many.
    calls = max(gather_object([len(interrupted)]))
    if calls:
        rows = interrupted + [0] * (calls - len(interrupted))
        begun = [prompt_ids[row] + ids[row] for row in rows]
        answers = turn(trainer, begun, DECODING.answer_budget, 1)
        for row, answer, its_logprobs in zip(interrupted, *answers):
            ids[row] += answer
            logprobs[row] += its_logprobs
            sampled[row] += [1] * len(answer)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": ids,
        "env_mask": sampled,
        "rendered": prompt_ids,
        "logprobs": logprobs if trainer.use_vllm else None,
    }


def score(problem: list[str], rendered: list, completion_ids: list, log_metric, **_) -> list[float]:
    """TRL's reward function: the scores. The pass rate goes to its log."""
    scores = scalerl.scores(problem, rendered, completion_ids)
    log_metric("pass_rate", scores.count(1) / len(scores))
    return scores


class ScaleRLTrainer(GRPOTrainer):
    """GRPOTrainer with our advantages, token weights and loss."""

    def _calculate_rewards(self, *args) -> Tensor:
        # [R, 1], of all processes, group by group.
        self.scores_R1 = super()._calculate_rewards(*args)
        return self.scores_R1

    def _generate_and_score_completions(self, inputs: list[dict]) -> dict[str, Tensor]:
        """TRL's, and in training our advantages and weights in place of its. The batch is that of
        all processes."""
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            sampled_BT = output["completion_mask"] * output["tool_mask"]
            lengths_R = self.accelerator.gather(sampled_BT.sum(1))
            lengths_PG = lengths_R.view(-1, self.num_generations)
            worth = scalerl.worth(self.scores_R1.view_as(lengths_PG), lengths_PG)
            # The rows of this process.
            rank, rows = self.accelerator.process_index, len(inputs)
            output["advantages"] = worth.advantages_PG.view(-1, rows)[rank]
            output["weights"] = worth.weights_PG.view(-1, rows)[rank]
            self._metrics["train"]["tokens_of_step"].append(lengths_R.sum().item())
        return output

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        if not self.model.training:  # a validation wants the pass rate alone
            return inputs["advantages"].sum() * 0
        ids_BT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        width = inputs["completion_ids"].shape[1]
        logprobs_BT, _, _ = self._get_per_token_logps_and_entropies(
            model, ids_BT, attention_BT, width
        )
        # Without vLLM pi_gen is pi.
        generator_BT = inputs.get("sampling_per_token_logps", logprobs_BT.detach())
        sampled_BT = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        policy_loss, _ = loss.policy_loss(
            RECIPE, logprobs_BT, generator_BT, sampled_BT, inputs["advantages"], inputs["weights"]
        )
        # The processes average their gradients, but our weights need the sum.
        return policy_loss * self.accelerator.num_processes


def trainer_of(arguments: list[str]) -> ScaleRLTrainer:
    """The trainer by these flags of TRL's, with batches for all processes. ValueError if they
    cannot share a step."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    batch = SETTINGS.groups_per_step * SETTINGS.completions_per_prompt
    if batch % processes:
        raise ValueError(
            f"{processes} processes cannot share the {batch} completions of a step: start fewer"
        )
    files = {part: str(FOLDER / f"{part}.jsonl") for part in ("train", "validation")}
    data = load_dataset("json", data_files=files)
    # As many sequences in a micro-batch as fit, and divide the batch of a process.
    of_process = batch // processes
    at_once = max(1, SETTINGS.tokens_per_micro_batch // DECODING.longest)
    rows = max(n for n in range(1, at_once + 1) if of_process % n == 0)
    # As many problems in a batch of a validation that the last batch is full too.
    problems = max(1, math.gcd(len(data["validation"]), 32 * processes) // processes)
    sizes = [
        "--per_device_train_batch_size", rows, "--gradient_accumulation_steps", of_process // rows,
        "--per_device_eval_batch_size", problems * SETTINGS.validation_samples,
    ]  # fmt: skip
    (args,) = TrlParser(GRPOConfig).parse_args_and_config([*arguments, *map(str, sizes)])
    parts = data["train"], data["validation"]
    return ScaleRLTrainer(str(FOLDER / "model"), score, args, *parts, rollout_func=rollout)


if __name__ == "__main__":
    trainer = trainer_of(sys.argv[1:])
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()
