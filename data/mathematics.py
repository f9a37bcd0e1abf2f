"""Mathematics with a final answer in \\boxed{}, judged by Math-Verify on the part after the thinking.

What counts is the last \\boxed{} after the last `</think>`, and nothing else: an answer without a box is wrong, and so
is naming several answers in the hope that one is it. Of a text without `</think>` all is judged.

The answer is read as LaTeX, by a grammar: nothing of it is ever evaluated as Python. Math-Verify's own time limits are
signal.alarm's and off; an answer that keeps SymPy busy for ever is ended by the pool of verifiers (verify.py).
"""

import logging
import re
from functools import lru_cache

from data import Problem

END_OF_THINKING = "</think>"
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 1000  # characters; what is longer is only compared as text


def worded(text: str, instruction: str | None = None) -> str:
    """A problem as it is put to the model, with an instruction behind it: INSTRUCTION, unless the text says itself what
    to box."""
    if instruction is None:
        instruction = "" if "\\boxed" in text else INSTRUCTION
    return f"{text.strip()}\n\n{instruction}".strip()


def problem(text: str, answer: str, instruction: str | None = None) -> Problem:
    """The prompt for a problem whose text is `text`; the answer may be a bare one or a worked solution that ends in
    `#### answer` (GSM8K) or in \\boxed{answer} (MATH). Raises ValueError when it is neither."""
    if "####" in answer:
        answer = answer.rpartition("####")[2]
    elif (boxed := last_boxed(answer)) is not None:
        answer = boxed
    elif len(answer) > LONGEST_ANSWER:
        raise ValueError("the answer is a long text without \\boxed{} or ####")
    if not answer.strip():
        raise ValueError("the answer is empty")
    return Problem(worded(text, instruction), answer.strip(), task="data.mathematics")


def score(problem: Problem, completion: str) -> bool:
    """Whether the last box after the thinking holds the answer."""
    answer = last_boxed(completion.rpartition(END_OF_THINKING)[2])
    return answer is not None and equal(problem.answer, answer)


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{} or \\fbox{}, or behind a \\boxed without braces up to the next space or dollar
    sign; None without one, or when its braces do not close."""
    boxes = list(re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s${}]*)", text))
    if not boxes:
        return None
    if boxes[-1][1] != "{":
        return boxes[-1][1]
    depth, start = 1, boxes[-1].end()
    for brace in re.finditer(r"\\.|[{}]", text[start:], flags=re.DOTALL):  # what is behind a backslash is no brace
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start : start + brace.start()]
    return None


def equal(reference: str, answer: str) -> bool:
    """Whether two answers in LaTeX are the same. Not symmetric where the reference says what is wanted: x = 5 and 5."""
    reference, answer = cleaned(reference), cleaned(answer)
    if not answer:
        return False
    if reference == answer:
        return True
    if max(len(reference), len(answer)) > LONGEST_ANSWER or {kind(reference), kind(answer)} == {"set", "tuple"}:
        return False
    from math_verify import verify

    # Relations are compared with sets both ways (x > 2 and (2, oo)); without a limit there is no signal.alarm.
    return verify(parsed(reference), parsed(answer), allow_set_relation_comp=True, timeout_seconds=None)


def cleaned(answer: str) -> str:
    """Without what says nothing: LaTeX's thousands separators, a full stop at the end, spacing, dollar signs."""
    answer = re.sub(r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3}(?!\d))", "", answer)
    answer = re.sub(r"\\[,;:! ]|~|\\q?quad\b", " ", answer).strip().strip("$").strip()
    return re.sub(r"\s+", " ", re.sub(r"(?<=[^.])\.$", "", answer)).strip()


def kind(answer: str) -> str:
    """Math-Verify takes the tuple (1, 2), read as an interval, for the set {1, 2}; what is in braces is a set, what is
    in brackets with two parts is not, and of anything else this does not judge: ''."""
    bare = re.sub(r"\\left|\\right|\s", "", answer)
    if re.fullmatch(r"\\\{.*\\\}", bare):
        return "set"
    return "tuple" if re.fullmatch(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]", bare) else ""


@lru_cache(maxsize=1000)
def parsed(answer: str) -> list:
    """SymPy's reading of an answer in LaTeX, and its text; a list, as Math-Verify wants it."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit
    boxes_only = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(f"\\boxed{{{answer}}}", boxes_only, extraction_mode="first_match", parsing_timeout=None)
