r"""Mathematics with a final answer in \boxed{}: right is the wanted answer, written in any accepted way.

What counts is the last box after the last `</think>`. Several answers are wrong if one is wanted. A number may be
written as people do: in digits, as a fraction, a mixed number, a percentage, with a power of ten. Beyond that an answer
may use the operations that the wanted one uses: 5! is wrong for 120, since it is a task that evaluates to the answer.
Numbers are compared exactly, expressions in 300 digits and at random points. What cannot be read, or is too large, is
wrong. spelling.py gives an answer one spelling, and expressions.py reads it.
"""

import re

from data import Problem, after_thinking
from data.expressions import FAULTS, REALS, close, letters, on_numbers, operations, read, values_at_points
from data.spelling import as_choice, as_time_or_base, as_words, cleaned, closing_braces, squeezed, without_unit

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 1000  # characters; what is longer is only compared as text
HEDGED = r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])|\b(?:not|nor|neither|wrong|incorrect)\b"  # behind the letter of a choice
_, LOWEST, HIGHEST = REALS  # the ends of an interval without bounds


def worded(text: str, instruction: str | None = None) -> str:
    """A problem as the model gets it. The instruction behind it is INSTRUCTION, unless the text asks for a box."""
    if instruction is None:
        instruction = "" if "\\boxed" in text else INSTRUCTION
    return f"{text.strip()}\n\n{instruction}".strip()


def problem(text: str, answer: str, instruction: str | None = None) -> Problem:
    """A problem with this text. The answer may be a bare one, or a worked solution that ends in `#### answer` (GSM8K)
    or in \\boxed{answer} (MATH). Raises ValueError for a long text that is neither, and for an empty answer."""
    if "####" in answer:
        answer = answer.rpartition("####")[2]
    elif (boxed := last_boxed(answer)) is not None:
        answer = boxed
    elif len(answer) > LONGEST_ANSWER:
        raise ValueError("the answer is a long text without \\boxed{} or ####")
    if not answer.strip():
        raise ValueError("the answer is empty")
    return Problem(worded(text, instruction), answer.strip(), task="data.tasks.mathematics")


def score(problem: Problem, completion: str) -> bool:
    """Whether the last box after the thinking holds the answer, and not a part of the problem that evaluates to it."""
    answer = last_boxed(after_thinking(completion))
    return answer is not None and equal(problem.answer, answer) and not copied(problem, answer)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{} or \\fbox{} that is in no other. A box without braces ends before the next
    space or dollar sign. None if there is no box, or if its braces do not close."""
    closed_at, content, end = closing_braces(text), None, 0
    for box in re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s${}]*)", text):
        if box.start() >= end and box[1] == "{":
            end = closed_at.get(box.end() - 1, 0)
            content = text[box.end() : end] if end else None
        elif box.start() >= end:  # in no other
            content = box[1]
    return content


def copied(problem: Problem, answer: str) -> bool:
    """Whether the answer is a part of the problem that is not worked out yet, and not the wanted text itself."""
    given = squeezed(cleaned(answer))
    start = r"(?<![\d.^])\b" if given[:1].isalnum() else r"(?<![\d.^])"
    if given == squeezed(cleaned(problem.answer)) or as_words(given):
        return False
    if not re.search(rf"{start}{re.escape(given)}(?![\w^])", squeezed(cleaned(problem.prompt))):
        return False
    try:
        tree = read(given)
        to_carry_out = operations(meaning(tree)) - {"letter"}
    except FAULTS:  # with a unit
        return False
    to_solve = tree[0] == "relation" and not set(tree[1]) <= {"=", r"\in"}
    to_reduce = tree[0] == "number" and tree[2] in ("unreduced", "power of ten")
    return bool(to_solve or to_reduce or to_carry_out)


def equal(reference: str, answer: str) -> bool:
    """Whether an answer in LaTeX or plain text is the reference, written in an accepted way. This is not symmetric: the
    reference says which operations may be used, and which unit counts."""
    if max(len(reference), len(answer)) > LONGEST_ANSWER:
        return reference.strip() == answer.strip()
    wanted, given = cleaned(reference), cleaned(answer)
    if squeezed(wanted) == squeezed(given) or not given:
        return bool(given)
    (wanted_letter, wanted_rest), (given_letter, given_rest) = as_choice(wanted), as_choice(given)
    if wanted_letter and given_letter and not (wanted_rest and given_rest):
        return wanted_letter == given_letter and not re.search(HEDGED, given_rest)
    if wanted_letter or given_letter and given_rest:  # 12 is right for (D) 12
        return (not wanted_letter or given_letter in ("", wanted_letter)) and equal(wanted_rest, given_rest)
    if as_words(wanted):
        return as_words(wanted) == as_words(given)
    (wanted_digits, wanted_mark), (given_digits, given_mark) = as_time_or_base(wanted), as_time_or_base(given)
    if wanted_mark or given_mark:
        return wanted_digits == given_digits and wanted_mark in ("", given_mark)
    try:
        return same_quantity(wanted, given)
    except FAULTS:
        return False


def same_quantity(wanted: str, given: str) -> bool:
    """Whether two answers that are not words have the same unit and the same meaning."""
    (wanted, wanted_unit), (given, given_unit) = without_unit(wanted), without_unit(given)
    wanted_tree, given_tree = meaning(read(wanted)), meaning(read(given))
    if "" != wanted_unit != given_unit != "" or not may_use(wanted_tree, given_tree):
        return False
    if wanted_unit == given_unit or "%" not in (wanted_unit, given_unit):
        return same(wanted_tree, given_tree)
    are_numbers = wanted_tree[0] == given_tree[0] == "number"
    if wanted_unit == "%":  # 25 and 0.25 are right for 25 %
        return same(wanted_tree, given_tree) or are_numbers and same(percent(wanted_tree), given_tree)
    # 25 % is right for 25, if the problem may ask for percent, and for 0.25.
    as_it_stands = are_numbers and abs(wanted_tree[1]) > 1 and same(wanted_tree, given_tree)
    return as_it_stands or are_numbers and same(wanted_tree, percent(given_tree))


def percent(tree: tuple) -> tuple:
    """A number divided by 100. If it had decimals, it gets two more."""
    return ("number", tree[1] / 100, tree[2], tree[3] + 2 if tree[3] else 0)


def meaning(tree: tuple) -> tuple:
    """The tree with x = 5 as a named 5, and x > 2 as a named interval; also in lists."""
    kind = tree[0]
    if kind == "relation":
        return meaning_of_relation(tree[1], tree[2:])
    if kind == r"\setminus" and tree[1] == REALS and tree[2][0] == "set":  # all numbers but some
        ends = [LOWEST, *sorted(tree[2][1:], key=lambda number: number[1]), HIGHEST]
        return (r"\cup", *(("()", low, high) for low, high in zip(ends, ends[1:])))
    if kind not in ("list", "set"):
        return tree
    items = [meaning(item) for item in tree[1:]]
    names = {item[1] for item in items if item[0] == "named"}
    if not names:
        return (kind, *items)
    values = [item[2] if item[0] == "named" else item for item in items]
    without_index = {("name", re.sub(r"_\d+$", "", name[1])) if name[0] == "name" else name for name in names}
    if len(without_index) == 1:  # x = 1 or x = 2; x < 1 or x > 2
        joins = any(part[0] == "relation" and part[1] != ("=",) for part in tree[1:])
        return ("named", *without_index, (r"\cup" if joins else kind, *values))
    if len(names) < len(items):
        raise ValueError("some have the same name")
    return ("()", *(item[2] for item in sorted(items, key=lambda item: repr(item[1]))))  # x = 1, y = 2


def meaning_of_relation(signs: tuple, parts: tuple) -> tuple:
    """What a relation says of its name, as "named"; the relation itself if it is not solved for a name."""
    if set(signs) == {"="}:
        if is_name(parts[-1]) and not is_name(parts[0]):
            parts = parts[::-1]
        named, value = is_name(parts[0]), meaning(parts[-1])
        steps = [on_numbers(operations(step)) and same(value, step) for step in parts[named:-1]]
        if all(steps) and parts[0][1] not in letters(value):  # x = 6/2 = 3
            return ("named", parts[0], value) if named else value
    if signs in ((r"\in",), (r"\ne",)) and is_name(parts[0]):
        values = parts[1] if signs[0] == r"\in" else (r"\setminus", REALS, ("set", parts[1]))
        return ("named", parts[0], meaning(values))
    if set(signs) <= {">", r"\ge"}:
        signs, parts = tuple({">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]), parts[::-1]
    if set(signs) <= {"<", r"\le"}:
        if len(parts) == 2:  # x < 5 or 5 < x
            below = is_name(parts[0])
            signs = ("<", *signs) if below else (*signs, "<")
            parts = (LOWEST, *parts) if below else (*parts, HIGHEST)
        if len(parts) == 3 and is_name(parts[1]) and letters(parts[1]).isdisjoint(letters(("list", *parts[::2]))):
            return ("named", parts[1], ("[("[signs[0] == "<"] + "])"[signs[1] == "<"], *parts[::2]))
    return ("relation", signs, *parts)


def is_name(tree: tuple) -> bool:
    """x, x_1, f(3), P(A), AB, |AB|, (x, y)"""
    if tree[0] in ("()", "|"):
        return all(is_name(part) and (tree[0] == "()" or part[0] == "*") for part in tree[1:])
    if tree[0] == "*":
        of_capitals = all(part[0] == "name" and part[1][:1].isupper() for part in tree[1:])
        return of_capitals or len(tree) == 3 and tree[1][0] == "name" and tree[1][1] in "fghFGHP"
    return tree[0] == "name"


def may_use(wanted: tuple, given: tuple) -> bool:
    """Whether the wanted answer has all operations and letters of the given one. If it has letters, all arithmetic is
    allowed. If it has another operation, such as a root, products and quotients are allowed."""
    allowed = operations(wanted)
    if "letter" in allowed:
        allowed |= {"+", "-", "*", "/", "^"}
    elif allowed:
        allowed |= {"-", "*", "/"} | ({"/ of numbers"} if "^ of numbers" in allowed else set())
    known = letters(wanted) | (letters(wanted[1]) if wanted[0] == "named" else set())
    return operations(given) <= allowed and letters(given) <= known


def same(wanted: tuple, given: tuple) -> bool:
    """Whether two meanings are the same. A name may be left out, or added."""
    kinds = {wanted[0], given[0]}
    if wanted == given:
        return True
    if "relation" in kinds or kinds == {"named"} and wanted[1] != given[1]:
        return kinds <= {"relation", "named"} and same_equation(wanted, given)
    if "named" in kinds:
        return same(*(tree[2] if tree[0] == "named" else tree for tree in (wanted, given)))
    if kinds & {"list", "set"} or kinds == {r"\cup"}:  # in any order
        groups = {"list", "set"} if r"\cup" not in kinds else {r"\cup"}
        left_over, items = [list(tree[1:]) if tree[0] in groups else [tree] for tree in (wanted, given)]
        for item in items:
            match = next((candidate for candidate in left_over if same(candidate, item)), ())
            if not match:
                return False
            left_over.remove(match)
        return not left_over
    if len(kinds) == 1 and kinds <= {"()", "[]", "(]", "[)", "matrix", "row"}:
        return len(wanted) == len(given) and all(map(same, wanted[1:], given[1:]))
    if kinds == {"number"}:  # a decimal with two or more places may be answered with more
        difference = abs(wanted[1] - given[1])
        return difference == 0 or wanted[3] >= 2 and difference * 2 * 10 ** wanted[3] <= 1
    return all(close(*pair) for pair in values_at_points(wanted, given))


def same_equation(wanted: tuple, given: tuple) -> bool:
    """Whether one equation is a multiple of the other. Both must have the same letters, at least two."""
    sides = []
    for tree in (wanted, given):
        signs, left, right = (("=",), *tree[1:]) if tree[0] == "named" else (tree[1], tree[2], tree[-1])
        if signs != ("=",):
            return False
        sides.append(("+", left, ("-", right)))
    if letters(sides[0]) != letters(sides[1]) or len(letters(sides[0])) < 2 and wanted[0] == "named":
        return False
    pairs = list(values_at_points(*sides))
    return all(pairs[0]) and all(close(a * pairs[0][1], b * pairs[0][0]) for a, b in pairs)
