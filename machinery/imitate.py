"""Supervised learning of worked solutions: a warm start for a model that never succeeds, since RL learns nothing from
completions that all fail.

    python -m machinery.imitate --model M --data my.jsonl --out FOLDER
    python -m machinery.imitate --model M --data my.csv,problem=question,solution=worked --out FOLDER --epochs 10

Then `python train.py --model FOLDER` goes on from there. Each record is a problem with a worked solution. The model
gets the problem as train.py would word it, and learns to go on with the solution and its EOS; only their tokens count
in the loss. A tenth of the problems is held out: among them are all that train.py holds out of the same file.

`imitate` also makes the base model of the default task (make_base.py). This file imports machinery/, as train.py does;
of data/ only make_base.py imports it.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from curve.flags import flag, read_flags, run_command
from data import Problem, after_thinking
from data.load import load_data
from machinery.decoding import end_tokens, render
from machinery.files import whole_folder
from machinery.model import load_model, load_tokenizer, model_path
from machinery.screen import Progress, say

MOST_MEASURED = 256  # held-out problems whose loss is measured
Example = tuple[list[int], list[bool]]  # token ids of prompt and solution, and which of them are to be learned


# --- the loop -------------------------------------------------------------------------------------------------------


def imitate(
    model: PreTrainedModel, batches: Iterable[list[Example]], steps: int, learning_rate: float, at_once: int = 4096
) -> None:
    """Train the model on so many batches: AdamW on the mean cross entropy of the tokens to be learned. After a warm-up
    the learning rate falls to a tenth. at_once: tokens of one forward and backward, padding included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = min(50, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 1 - 0.9 * step / steps)
    )
    progress = Progress("imitation", steps)
    for step, batch in enumerate(batches, start=1):
        tokens, loss = learned_tokens(batch), 0.0
        for part in parts(batch, at_once):
            value = cross_entropy(model, part) / tokens
            value.backward()
            loss += value.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.show(step, f"loss {loss:.3f}")
    progress.close()


def learned_tokens(examples: list[Example]) -> int:
    return sum(sum(learned) for _, learned in examples)


def parts(examples: list[Example], at_once: int) -> Iterator[list[Example]]:
    """The examples, as many together as fit into `at_once` tokens when padded to the longest of all; or one."""
    count = max(1, at_once // max(len(ids) for ids, _ in examples))
    for start in range(0, len(examples), count):
        yield examples[start : start + count]


def cross_entropy(model: PreTrainedModel, examples: list[Example]) -> Tensor:
    """The sum over the tokens to be learned, in nats. Padding is on the right, where a causal model never looks."""
    width = max(len(ids) for ids, _ in examples)
    ids_BT = torch.zeros(len(examples), width, dtype=torch.int64)
    targets_BT = torch.full_like(ids_BT, -100)  # left out of the sum
    for row, (ids, learned) in enumerate(examples):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        targets_BT[row, : len(ids)] = torch.where(torch.tensor(learned), torch.tensor(ids), -100)
    logits_BTV = model(ids_BT.to(model.device)).logits[:, :-1]
    targets_N = targets_BT[:, 1:].flatten().to(model.device)
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_N, reduction="sum")


@torch.no_grad()
def mean_loss(model: PreTrainedModel, examples: list[Example], at_once: int = 4096) -> float:
    """Cross entropy of a token to be learned, in nats."""
    total = sum(cross_entropy(model, part).item() for part in parts(examples, at_once))
    return total / learned_tokens(examples)


# --- the command ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """Teach a model worked solutions."""

    model: str | None = None  # folder or hub name of a transformers causal LM with full attention
    data: str | None = None  # a file, folder or data set with worked solutions: an argument of train.py's --data
    out: Path | None = None  # folder for the model that comes out, new or empty
    epochs: int = 3  # times that each solution is learned
    batch_size: int = 32  # solutions in an optimizer step
    learning_rate: float | None = None  # the highest, after the warm-up; by default 1 / sqrt(parameters): 1e-3 for 1M
    longest: int = 2048  # tokens of problem and solution together; what is longer is left out
    tokens_per_micro_batch: int = 4096  # tokens in one forward and backward, padding included
    instruction: str | None = None  # said after each problem, as in train.py
    system: str | None = None  # a system prompt, as in train.py
    thinking: bool = True  # what the chat template is told as enable_thinking, as in train.py
    seed: int = 0  # of the order of the solutions


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status 0; ValueError or OSError, in one sentence, for what cannot be."""
    transformers.utils.logging.disable_progress_bar()
    c = read_flags(Command, arguments, description=__doc__)
    check(c)
    (source,) = load_data([c.data], None, None, instruction=c.instruction, wanted="solution")
    for note in source.notes:
        say(f"{source.name}: {note}")
    path = model_path(c.model)
    tokenizer = load_tokenizer(path)
    model = load_model(path, torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
    model.set_attn_implementation("sdpa")
    longest = min(c.longest, getattr(model.config, "max_position_embeddings", None) or c.longest)
    train = examples(source.train, tokenizer, c, longest)
    held_out = examples(source.validation, tokenizer, c, longest)[:MOST_MEASURED]
    if not train or not held_out:
        raise ValueError(
            f"--data {c.data}: no {'held-out problem' if train else 'problem'} has at most {longest} tokens"
            " with its solution: raise --longest, or take a model that holds more"
        )
    ids, learned = train[0]
    prompt, rest = (tokenizer.decode(part) for part in (ids[: learned.index(True)], ids[learned.index(True) :]))
    say(f"The first record; what stands in [[ ]] is learned:\n{prompt}[[{rest}]]")

    learning_rate = c.learning_rate or model.num_parameters() ** -0.5
    steps = c.epochs * math.ceil(len(train) / c.batch_size)

    def batches() -> Iterator[list[Example]]:
        for epoch in range(c.epochs):
            order = random.Random(f"{c.seed} {epoch}").sample(train, len(train))
            for first in range(0, len(order), c.batch_size):
                yield order[first : first + c.batch_size]

    try:
        with whole_folder(c.out) as folder:
            before = mean_loss(model, held_out, c.tokens_per_micro_batch)
            imitate(model, batches(), steps, learning_rate, c.tokens_per_micro_batch)
            after = mean_loss(model, held_out, c.tokens_per_micro_batch)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"{str(error).partition('. ')[0]}: lower --tokens-per-micro-batch or --longest") from error
    except safetensors.SafetensorError as error:  # a full disk, in its words
        raise OSError(f"{c.out}: {error}") from error
    print(
        f"held-out loss {before:.3f} before, {after:.3f} after {steps} steps, in nats a token of {len(held_out)}"
        f" solutions; learning rate {learning_rate:.2g}"
    )
    return 0


def check(c: Command) -> None:
    """ValueError, naming the flag, for what is missing or cannot be."""
    for name in ("model", "data", "out"):
        if getattr(c, name) is None:
            raise ValueError(f"{flag(name)} is missing; wanted are --model, --data and --out")
    for name, value in vars(c).items():
        if type(value) in (int, float) and (value < 0 or (value == 0 and name != "seed")):
            raise ValueError(f"{flag(name)} is {value}; it must be {'at least 0' if name == 'seed' else 'above 0'}")
    if c.out.exists() and not (c.out.is_dir() and not any(c.out.iterdir())):
        raise ValueError(f"--out {c.out} is there already: name a folder that is new or empty")


def examples(problems: list[Problem], tokenizer: PreTrainedTokenizerBase, c: Command, longest: int) -> list[Example]:
    """The problems with their solutions as the model learns them: the prompt as a generator gets it, the solution, and
    the EOS. Those of more than `longest` tokens are left out, and the user is
    told."""
    found, too_long, left_open = [], [], 0
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end_tokens(tokenizer)[0]
    for problem in problems:
        prompt = render(tokenizer, problem.prompt, c.thinking, c.system)
        solution = tokenizer(problem.answer, add_special_tokens=False).input_ids
        solution += [end] if solution[-1:] != [end] else []
        left_open += not after_thinking(tokenizer.decode(prompt[-8:]) + problem.answer).strip()
        if len(prompt) + len(solution) <= longest:
            found.append((prompt + solution, [False] * len(prompt) + [True] * len(solution)))
        else:
            too_long.append(problem.prompt)
    if too_long:
        say(
            f"{len(too_long)} of {len(problems)} records have more than {longest} tokens and are left out, the first:"
            f" {too_long[0][:60]!r}"
        )
    if left_open:
        say(
            f"warning: {left_open} of {len(problems)} solutions do not close the thinking that was opened: a task"
            " reads what follows </think>, and would find no answer"
        )
    return found


if __name__ == "__main__":
    run_command(main)
