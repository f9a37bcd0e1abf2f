"""Data: where problems come from, and how a completion is judged.

A task is a module of data/tasks/ that judges completions. Of these functions it must have the
first:

    score(problem, completion) -> bool
        or a number from 0 to 1. The completion is its whole text, with the forced tokens. It starts
        with `<think>` if the prompt ends with it.
    problems(split, number, seed) -> list[Problem]
        `split` is "train" or "validation", and `number` is how many are wanted. The loader takes
        only those whose text belongs to the split (`is_held_out`), and a task may have fewer.
    worded(text, instruction) -> str
        What the model gets of a problem's text (generate.py --prompt).
    get_ready(problem)
        What takes long and is no part of the time limit, such as an import.

These are the tasks:

    arithmetic   makes its own problems: additions, the default of train.py
    mathematics  a final answer in \\boxed{}, for records of files
    gym          makes problems of reasoning-gym, a package with a hundred families and their
                 verifiers
    programming  a program that must pass tests, for records of files; sandbox.py runs it

The other files serve all tasks. load.py makes problems of what --data says, and holds some out;
records.py reads files and data sets of the hub; verify.py calls `score` in a process that may hang
or crash without harm.
"""

import hashlib
import re
import unicodedata
import zlib
from dataclasses import dataclass, field
from functools import lru_cache

HELD_OUT_SHARE = 10  # one text in so many is held out
# All but letters and digits above or below the line, and fractions.
SAME_WHEN_PLAIN = "[^¹²³¼-¾ʰ-ʸˠ-ˤᴬ-ᵪᶛ-ᶿ⁰-ₜ⅐-⅟ⱼⱽ]+"
# These patterns begin with a sign, and look back behind it: so they are found fast.
DOLLAR = r"\$(?!\d)|\\\$(?!\d)|\$(?<!\w\$)|\\\$(?<!\w\\\$)|\\[()[\]](?<!\\\\.)"  # not that of x$1
SPACE = r" (?:(?![\w'’])|(?<![\w'’] )(?!(?<=\d[.,:] )\d))"  # beside a sign
# A word, but no command, and no formula such as x, aB and 2xy; or an article.
WORD = r"(?<!\\)\b(?:(?![a-z][A-Z]\b)[^\W\d_](?:['’]?[^\W\d_])+\b|[AI](?= [^\W\d_]{2}))"
SUM = r"([0-9]+\+[0-9]+)=?"


@dataclass(frozen=True)
class Problem:
    """One problem: what the user says to the model, and what a right completion must arrive at."""

    prompt: str  # the user's turn, before the model's chat template
    answer: str  # the reference that `score` compares with
    task: str  # the module whose `score` judges it, for example data.tasks.arithmetic
    # what else `score` needs, as JSON can hold it
    metadata: dict = field(default_factory=dict, hash=False)
    # The problem without its wording and instruction, which says whether it is held out; "": the
    # prompt is all there is.
    text: str = ""
    system: str | None = None  # the system prompt of the data

    @property
    def key(self) -> str:
        """The problem's own text. Problems with the same key are one."""
        return one_spelling(self.text or self.prompt)

    @property
    def held_out(self) -> bool:
        """Whether it is for validation."""
        return is_held_out(self.text or self.prompt)


@lru_cache(1 << 18)
def one_spelling(text: str) -> str:
    """The text in the spelling that says whether two problems are one: without dollars around
    formulas, spaces beside signs, characters without a width, and capitals of words. A formula
    keeps what it asks: x is not X, 1 1/2 is not 11/2, and 10^2 and 10² are not 102."""
    if not text.isascii():
        text = re.sub(r"[\u00ad\u200b-\u200f\u2060\ufeff]", "", text)
        text = re.sub(SAME_WHEN_PLAIN, lambda part: unicodedata.normalize("NFKC", part[0]), text)
    words = re.sub(DOLLAR, "", text).split()
    for i, word in enumerate(words):
        if word != word.casefold():
            article = word[-1] in "AI" and i + 1 < len(words)
            words[i] = in_lower_case(word, words[i + 1][:2] if article else "")
    return re.sub(SPACE, "", " ".join(words))


@lru_cache(1 << 16)
def in_lower_case(part: str, after: str) -> str:
    """A part of a text between spaces, in lower case. An A or I is an article if letters follow."""
    folded = re.sub(WORD, lambda word: word[0].casefold(), f"{part} {after}")
    return folded.partition(" ")[0]


def checksum(text: str) -> float:
    """A number in [0, 1) that is the same for texts that differ only in their spelling."""
    data = one_spelling(text).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(data).digest()[:6]) / 2**48


def is_held_out(text: str) -> bool:
    """Whether the problem with this text is for validation. Its text decides, and nothing else, so
    what one command trains on is never what another one evaluates on. A bare sum has a checksum of
    its own, with which the shipped model and all published runs were made."""
    if bare_sum := re.fullmatch(SUM, one_spelling(text)):
        return zlib.crc32(bare_sum[1].encode()) % HELD_OUT_SHARE == 0
    return checksum(text) < 1 / HELD_OUT_SHARE


def after_thinking(completion: str) -> str:
    """The text after the last `</think>`: nothing if thinking is open at the end, all of it if
    there is no thinking."""
    answer = completion.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer
