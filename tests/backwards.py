"""A model and an easy task of the tests' own: to write a number backwards, in a file of records
with worked solutions.

The solutions are those of a careless writer: a digit is wrong with probability WRONG, so that a
model that has learned to imitate them is right now and then, and RL has something to do.
"""

import random
import re

from conftest import save_random, sizes
from steps import write_lines

from data.tasks.mathematics import INSTRUCTION
from loss import INTERRUPTION_PHRASE

WRONG = 0.4
PIECE = r" ?[A-Za-z]+|\d| ?[^A-Za-z0-9]"  # a word with the space before it, a digit, or a sign
MARKERS = ["<think>", "</think>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def write_records(path):
    """A JSONL file of 600 different problems with their answers, and with solutions that may be
    wrong; returns its path."""
    rng = random.Random(0)
    numbers = [str(number) for number in range(111, 1000) if "0" not in str(number)]
    records = []
    for number in rng.sample(numbers, 600):
        answer, written = number[::-1], ""
        for digit in answer:
            written += rng.choice("123456789") if rng.random() < WRONG else digit
        solution = f"{written}</think>\\boxed{{{written}}}"
        problem = f"Write {number} backwards."
        records.append({"problem": problem, "solution": solution, "answer": answer})
    write_lines(path, records)
    return str(path)


def make_tokenizer():
    """A tokenizer of words and digits, which knows those of the task and of the prompts around
    it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    said = f"Write 123456789 backwards. 0\n\n{INSTRUCTION}{INTERRUPTION_PHRASE}\\boxed{{}}"
    pieces = dict.fromkeys(["<unk>", *re.findall(PIECE, said)])
    ids = {piece: i for i, piece in enumerate(pieces)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    words.decoder = decoders.Fuse()
    words.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<|end|>", chat_template=TEMPLATE
    )


def make_model(folder):
    """Save a random Llama and the tokenizer; returns the folder."""
    from transformers import LlamaConfig

    tokenizer = make_tokenizer()
    larger = dict(hidden_size=96, intermediate_size=288, max_position_embeddings=2048)
    return save_random(LlamaConfig(**sizes(tokenizer) | larger), folder, tokenizer)
