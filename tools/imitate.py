"""Supervised learning of worked solutions: a warm start for a model that never succeeds, because RL
learns nothing if all completions fail.

    python -m tools.imitate --model M --data my.jsonl --out FOLDER
    python -m tools.imitate --model M --data my.csv,problem=question,solution=worked --out FOLDER

Then `python train.py --model FOLDER` goes on from there. Each record is a problem with a worked
solution. The model gets the problem as train.py would word it, and learns to go on with the
solution and its EOS; only their tokens count in the loss. The tenth of all texts that train.py
never trains on is not learned here either. Each solution is judged before, as a completion is.
"""

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from core.model import load_model, load_tokenizer, refuse_too_long, refuse_unknown
from core.screen import Progress, say
from core.settings import model_path, refuse, refuse_small_numbers, say_notes
from core.text import end_tokens, prompt_ids, refuse_template, token_ids
from curve.flags import option, read_flags, run_command
from data import Problem
from data.load import load_data
from data.verify import VerifierPool
from machinery.folder import whole_folder

NOT_LEARNED = -100  # the label of a token that is context only, for transformers
Example = tuple[list[int], list[int]]  # ids of prompt and solution, and their labels


@dataclass(frozen=True)
class Command:
    """Teach a model worked solutions."""

    model: str = option("", "folder or hub name of a transformers causal LM")
    data: str = option("", "worked solutions: an argument of train.py's --data")
    out: Path | None = option(None, "a new folder for the model that comes out")
    records: int | None = option(None, "learn from the first of them only")
    epochs: int = option(3, "times that each solution is learned")
    batch_size: int = option(32, "solutions in an optimizer step, and in memory at once")
    learning_rate: float | None = option(
        None, "the highest, after the warm-up; by default 1 / sqrt(parameters): 1e-3 for 1M"
    )
    instruction: str | None = option(None, "said after each problem, as in train.py")
    system: str | None = option(None, "a system prompt, as in train.py")
    thinking: bool = option(True, "enable_thinking of the chat template, as in train.py")


def main(arguments: list[str]) -> int:
    """The command. Returns 0; ValueError or OSError, in one sentence, for wrong flags or data."""
    command = read_flags(Command, arguments, description=__doc__)
    refuse_small_numbers(command)
    given = command.model, command.data, command.out
    refuse(not all(given), "--model, --data and --out are wanted")
    refuse(command.out.exists(), f"--out {command.out}: name a folder that is not there yet")
    (source,) = load_data(
        (command.data,), command.records, None, command.instruction, wanted="solution"
    )
    say_notes([source])
    path = model_path(command.model)
    tokenizer = load_tokenizer(path)
    model = load_model(path).to("cuda" if torch.cuda.is_available() else "cpu")

    # The model learns the solution and its EOS, after which nothing is ever sampled.
    examples, ends, completions = [], end_tokens(tokenizer), []
    refuse_template(tokenizer, source.train, command)
    for problem in source.train:
        prompt = prompt_ids(tokenizer, problem, command)
        text = problem.metadata.get("solution", problem.answer)
        solution = token_ids(tokenizer, text)
        solution = [*itertools.takewhile(lambda token: token not in ends, solution), ends[0]]
        about = f"shorten the solution of {problem.prompt[:60]!r}, or remove it"
        refuse_too_long(model, len(prompt + solution), about)
        refuse_unknown(model, prompt + solution)
        opened = "<think>" * tokenizer.decode(prompt).rstrip().endswith("<think>")
        written = tokenizer.decode(solution[:-1], clean_up_tokenization_spaces=False)
        completions.append((text, problem, opened + written))
        examples.append((prompt + solution, [NOT_LEARNED] * len(prompt) + solution))
    say(f"After {tokenizer.decode(prompt)!r} the model learns {tokenizer.decode(solution)!r}")
    refuse_wrong(completions)

    # Each epoch has an order of its own.
    batches = []
    for epoch in range(command.epochs):
        order = random.Random(epoch).sample(examples, len(examples))
        batches += DataLoader(order, command.batch_size, collate_fn=list)
    learning_rate = command.learning_rate or model.num_parameters() ** -0.5
    with whole_folder(command.out) as folder:
        imitate(model, batches, len(batches), learning_rate)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(f"next: python train.py --model {command.out} --data {command.data}")
    return 0


def refuse_wrong(completions: list[tuple[str, Problem, str]]) -> None:
    """ValueError if all of these solutions, with their problems, are judged wrong: RL would never
    see a success. It is said if most are."""
    with VerifierPool(2, 10.0, 4.0) as pool:
        wrong = [text for text, verdict in pool.judge(completions) if not verdict.correct]
    if 2 * len(wrong) <= len(completions):
        return
    said = f"{len(wrong)} of {len(completions)} solutions are judged wrong, such as {wrong[0]!r}"
    refuse(
        len(wrong) == len(completions),
        f"{said}: write them as the task reads a completion, with </think> if the prompt opens"
        " thinking, or judge them in a task of your own by ,task=NAME",
    )
    say(f"! {said}")


def imitate(
    model: PreTrainedModel, batches: Iterable[list[Example]], steps: int, learning_rate: float
) -> None:
    """Train the model, a step on each of these batches, of which there are `steps`: AdamW on the
    mean cross entropy of the learned tokens. After a warm-up the learning rate falls to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    warmup = min(50, steps // 10 + 1)
    progress = Progress("imitation", steps)
    for step, batch in enumerate(batches):
        factor = min((step + 1) / warmup, 1 - 0.9 * step / steps)
        optimizer.param_groups[0]["lr"] = learning_rate * factor
        rows = [torch.tensor(example).T for example in batch]
        padded_BT2 = pad_sequence(rows, batch_first=True, padding_value=NOT_LEARNED)
        ids_BT, labels_BT = padded_BT2.to(model.device).unbind(2)
        loss = model(ids_BT.clamp(min=0), labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.show(step + 1, f"loss {loss.item():.3f}")
    progress.close()


if __name__ == "__main__":
    run_command(main)
