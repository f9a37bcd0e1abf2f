"""Supervised learning of worked solutions: a warm start for a model that never succeeds, because RL
learns nothing if all completions fail.

    python -m tools.imitate --model M --data my.jsonl --out FOLDER
    python -m tools.imitate --model M --data my.csv,problem=question,solution=worked --out FOLDER

Then `python train.py --model FOLDER` goes on from there. Each record is a problem with a worked
solution. The model gets the problem as train.py would word it, and learns to go on with the
solution and its EOS; only their tokens count in the loss. The tenth of all texts that train.py
never trains on is held out here too.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from core.decoding import end_tokens, rendered, visible
from core.model import load_model, load_tokenizer, model_path, use_wide_products
from core.policy import Policy, micro_batches
from core.rollouts import given_rollout
from core.screen import Progress, say
from curve.flags import flag, option, read_flags, run_command
from data import Problem, after_thinking
from data.load import load_data
from machinery.files import whole_folder

MOST_MEASURED = 64  # held-out problems whose loss is measured
Example = tuple[list[int], list[bool]]  # ids of prompt and solution, and which are learned


def imitate(
    model: PreTrainedModel,
    batches: Iterable[list[Example]],
    steps: int,
    learning_rate: float,
    tokens: int = 4096,
) -> None:
    """Train the model, a step on each of these batches, of which there are `steps`: AdamW on the
    mean cross entropy of the learned tokens. After a warm-up the learning rate falls to a tenth.
    tokens: in one forward and backward, padding included."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    warmup = min(50, steps // 10 + 1)
    factor = lambda step: min((step + 1) / warmup, 1 - 0.9 * step / steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    progress = Progress("imitation", steps)
    for step, batch in enumerate(batches, start=1):
        loss = 0.0
        for part in loss_in_parts(model, batch, tokens):
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.show(step, f"loss {loss:.3f}")
    progress.close()


def loss_in_parts(model: PreTrainedModel, examples: list[Example], tokens: int) -> Iterator[Tensor]:
    """The mean cross entropy of the learned tokens, in nats, as a sum: one part for each
    micro-batch."""
    rollouts = [given_rollout(ids[:1], ids[1:], learned[1:]) for ids, learned in examples]
    count = sum(int(rollout.sampled.sum()) for rollout in rollouts)
    for batch in micro_batches(rollouts, [*range(len(rollouts))], tokens, model.device, 0, 1):
        logprobs_BT, _ = Policy(model)(batch, fp32_logits=True)
        yield -logprobs_BT.sum() / count


@torch.no_grad()
def mean_loss(model: PreTrainedModel, examples: list[Example], tokens: int) -> float:
    """Mean cross entropy of the learned tokens, in nats."""
    return sum(part.item() for part in loss_in_parts(model, examples, tokens))


@dataclass(frozen=True)
class Command:
    """Teach a model worked solutions."""

    model: str | None = option(
        None, "folder or hub name of a transformers causal LM with full attention"
    )
    data: str | None = option(
        None, "a file, folder or data set with worked solutions: an argument of train.py's --data"
    )
    out: Path | None = option(None, "folder for the model that comes out, new or empty")
    records: int | None = option(None, "learn from the first of them only; None: all")
    epochs: int = option(3, "times that each solution is learned")
    batch_size: int = option(32, "solutions in an optimizer step")
    learning_rate: float | None = option(
        None, "the highest, after the warm-up; by default 1 / sqrt(parameters): 1e-3 for 1M"
    )
    longest: int = option(
        2048, "tokens of problem and solution together; longer records are left out"
    )
    tokens_per_micro_batch: int = option(
        4096, "tokens in one forward and backward, padding included"
    )
    instruction: str | None = option(None, "said after each problem, as in train.py")
    system: str | None = option(None, "a system prompt, as in train.py")
    thinking: bool = option(
        True, "what the chat template is told as enable_thinking, as in train.py"
    )
    threads: int = option(0, "CPU threads; 0: one for each core")
    seed: int = option(0, "of the order of the solutions")


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError or OSError, in one sentence, for wrong flags or data."""
    transformers.utils.logging.disable_progress_bar()
    command = read_flags(Command, arguments, description=__doc__)
    refuse_impossible(command)

    # The worked solutions, and the model that learns them.
    (source,) = load_data(
        [command.data], command.records, None, instruction=command.instruction, wanted="solution"
    )
    for note in source.notes:
        say(f"{source.name}: {note}")
    path = model_path(command.model)
    tokenizer = load_tokenizer(path)
    if command.threads:
        torch.set_num_threads(command.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(path).to(device)
    use_wide_products(model, device)
    model.set_attn_implementation("sdpa")

    # The examples that fit, and what the model gets of the first one.
    positions = getattr(model.config, "max_position_embeddings", None)
    longest = min(command.longest, positions or command.longest)
    train = examples(source.train, tokenizer, command, longest)
    held_out = examples(source.validation, tokenizer, command, longest)[:MOST_MEASURED]
    if not train or not held_out:
        raise ValueError(
            f"--data {command.data}: no problem has at most {longest} tokens with its solution:"
            " --longest"
        )
    ids, learned = train[0]
    start = learned.index(True)
    prompt, solution = tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])
    say(visible(f"The first record; what stands in [[ ]] is learned:\n{prompt}[[{solution}]]"))

    # Learn, and measure the loss before and after.
    learning_rate = command.learning_rate or model.num_parameters() ** -0.5
    steps = command.epochs * math.ceil(len(train) / command.batch_size)
    tokens = command.tokens_per_micro_batch
    with whole_folder(command.out) as folder:
        before = mean_loss(model, held_out, tokens)
        imitate(model, batches(train, command), steps, learning_rate, tokens)
        after = mean_loss(model, held_out, tokens)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(
        f"held-out loss {before:.3f} before, {after:.3f} after {steps} steps,"
        f" in nats a token of {len(held_out)} solutions; learning rate {learning_rate:.2g}"
    )
    print(f"files {command.out}; next: python train.py --model {command.out} --data {command.data}")
    return 0


def refuse_impossible(command: Command) -> None:
    """ValueError, naming the flag, for what is missing, and for values that are impossible."""
    for name, value in vars(command).items():
        if value is None and name in ("model", "data", "out"):
            raise ValueError(f"{flag(name)} is missing; wanted are --model, --data and --out")
        if type(value) in (int, float) and not value > 0 and name not in ("seed", "threads"):
            raise ValueError(f"{flag(name)} is {value}; it must be above 0")
    if command.threads < 0:
        raise ValueError(f"--threads is {command.threads}; it must be at least 0")
    out = command.out
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"--out {out} is there already: name a folder that is new or empty")


def examples(
    problems: list[Problem], tokenizer: PreTrainedTokenizerBase, command: Command, longest: int
) -> list[Example]:
    """The problems with their solutions as the model learns them: the prompt as a generator gets
    it, the solution, and the EOS. Those of more than `longest` tokens are left out, and the user is
    told."""
    fitting, left_open = [], 0
    end = tokenizer.eos_token_id
    if end is None:
        end = end_tokens(tokenizer)[0]
    prompts = rendered(tokenizer, [problem.prompt for problem in problems], command)
    for problem, prompt in zip(problems, prompts):
        solution = tokenizer(problem.answer, add_special_tokens=False).input_ids
        if solution[-1:] != [end]:
            solution.append(end)
        if len(prompt) + len(solution) <= longest:
            fitting.append((prompt + solution, [False] * len(prompt) + [True] * len(solution)))
        # The template may open the thinking at the end of the prompt.
        if not after_thinking(tokenizer.decode(prompt[-8:]) + problem.answer).strip():
            left_open += 1
    if len(fitting) < len(problems):
        say(
            f"{len(problems) - len(fitting)} of {len(problems)} records are left out:"
            f" more than {longest} tokens"
        )
    if left_open:
        say(
            f"warning: {left_open} of {len(problems)} solutions do not close the thinking that"
            " was opened: a task reads what follows </think>, and would find no answer"
        )
    return fitting


def batches(train: list[Example], command: Command) -> Iterator[list[Example]]:
    """The batches of all epochs, each epoch in an order of its own."""
    for epoch in range(command.epochs):
        order = random.Random(f"{command.seed} {epoch}").sample(train, len(train))
        for first in range(0, len(order), command.batch_size):
            yield order[first : first + command.batch_size]


if __name__ == "__main__":
    run_command(main)
