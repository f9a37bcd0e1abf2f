r"""Mathematics with a final answer in \boxed{}: right is the wanted answer, written in any accepted
way.

What counts is the last box after the last `</think>`. Several answers are wrong if one is wanted. A
number may be written as people do: in digits, as a fraction, a mixed number, a percentage, with a
power of ten. Beyond that an answer may use the operations that the wanted one uses: 5! is wrong for
120, since it is a task that evaluates to the answer. Numbers are compared exactly, expressions in
300 digits and at random points. What cannot be read, or is too large, is wrong. spelling.py gives
an answer one spelling, and expressions.py reads it.
"""

import re
from functools import lru_cache

from data import Problem, after_thinking
from data.expressions import (
    FAULTS,
    REALS,
    close,
    form,
    letters,
    number,
    operations,
    read,
    values_at_points,
)
from data.spelling import UNIT, as_choice, as_words, cleaned, one_unit

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 1000  # characters; what is longer is only compared as text
# behind the letter of a choice
HEDGED = r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])|\b(?:not|nor|neither|wrong|incorrect)\b"
# Between the formulas of a problem: dollars, brackets, lines, text, ends of sentences; words, if
# dollars are left out.
LINES = r"\$+|\\[()\[\]]|\\\\(?![a-zA-Z])|[&\n]|\\(?:begin|end|text[a-z]*) ?(?:\{[^}]*\}){1,2}|[.:?!](?=[\s$]|$)"
WORDS = r"(?<![\\\w^{}(*/+-])(?!or\b|and\b)[a-zA-Z]{2,}(?: an?(?= ))?(?![\w^{}(*/+-])"
SIDES, TERMS = "[=,;]", r"[=,;+]|(?<![a-z\\])[a-z](?![a-z])"  # between the parts of a formula
NAMED = r"(?i)^(?=[^=]*?[a-zα-ω][^=]*?([a-zα-ω|(]|{-1))(?:[^\d=<>,(]|(?<![+-])\([^()=<>]*\)|[_^{]-?\d+)*="  # m + n =
_, LOWEST, HIGHEST = REALS  # the ends of an interval without bounds


def worded(text: str, instruction: str | None = None) -> str:
    """A problem as the model gets it. The instruction behind it is INSTRUCTION, unless the text
    asks for a box."""
    if instruction is None:
        instruction = "" if "\\boxed" in text else INSTRUCTION
    return f"{text.strip()}\n\n{instruction}".strip()


def problem(text: str, answer: str, instruction: str | None = None) -> Problem:
    """A problem with this text. The answer may be a bare one, or a worked solution that ends in
    `#### answer` (GSM8K) or in \\boxed{answer} (MATH). Raises ValueError for a long text that is
    neither, and for an empty answer."""
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
    """Whether the last box after the thinking holds the answer, and not a part of the problem that
    evaluates to it."""
    answer = last_boxed(after_thinking(completion))
    return answer is not None and equal(problem.answer, answer) and not copied(problem, answer)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{} or \\fbox{} that is in no other. A box without braces ends
    before the next space or dollar sign. None if there is no box, or if its braces do not close."""
    content, opened = None, []
    for part in re.finditer(
        r"\\\\?(?:boxed|fbox)\s*(\{|[^\s${}]*)|\\.|[{}]", text, flags=re.DOTALL
    ):
        if "{" in (part[0], part[1]):
            opened.append(part)
            content = None if part[1] else content
        elif part[0] == "}" and opened:
            opening = opened.pop()
            content = text[opening.end() : part.start()] if opening[1] else content
        elif part[1] is not None:
            content = part[1]
    return content


def copied(problem: Problem, answer: str) -> bool:
    """Whether the answer is an equation of the problem, or has not the form that the problem asks
    for. It asks for one if a formula in it is equal to the wanted answer in another form: a task to
    carry out, as x^2 - 1 for (x-1)(x+1)."""
    wanted, given = form_of(problem.answer), form_of(answer)
    formulas = (
        formulas_equal_to(problem.answer, problem.prompt)
        if given != wanted or "=" in answer
        else []
    )
    is_task = (
        wanted
        and given != wanted
        and any(form_of(formula) not in (None, wanted) for formula in formulas)
    )
    equations = [sides(formula) for formula in formulas if "=" not in problem.answer]
    return bool(is_task) or any(
        len(equation) > 1 and equation <= sides(answer) for equation in equations
    )


@lru_cache(maxsize=1000)
def formulas_equal_to(answer: str, text: str) -> list[str]:
    """The formulas in a text, and their parts, that are right answers as they stand."""
    pieces = [*re.split(LINES, text), *re.split(f"{LINES}|{WORDS}", text.replace("$", " "))]
    pieces = {
        part
        for piece in pieces
        for at in ("[,;]", SIDES, TERMS)
        for part in (piece, *re.split(at, piece))
    }
    return [piece for piece in pieces if equal(answer, piece)]


def sides(equation: str) -> set[str]:
    """The sides of an equation in letters and digits: without spaces, brackets, fractions, words
    and .0."""
    return set(re.sub(r'"[^"]*"|\.0+\b|\\frac|[\s(){}[\]/*]', "", cleaned(equation)).split("="))


def form_of(text: str) -> tuple | None:
    """The form of an answer; None for words, and for what cannot be read."""
    try:
        return form(understood(as_choice(cleaned(text))[1])[0])
    except FAULTS:
        return None


def equal(reference: str, answer: str) -> bool:
    """Whether an answer in LaTeX or plain text is the reference, written in an accepted way. This
    is not symmetric: the reference says which operations may be used, and which unit counts."""
    if max(len(reference), len(answer)) > LONGEST_ANSWER:
        return reference.strip() == answer.strip()
    wanted, given = cleaned(reference), cleaned(answer)
    if not given or len({re.sub(r" (?!\w)|(?<!\w) ", "", text) for text in (wanted, given)}) == 1:
        return bool(given)  # the same, but for spaces that are not between words
    wanted = wanted.rpartition(r"\approx")[
        2
    ].strip()  # a wanted answer that is said to be about 0.33 is rounded
    (wanted_letter, wanted_rest), (given_letter, given_rest) = as_choice(wanted), as_choice(given)
    if wanted_letter and given_letter and not (wanted_rest and given_rest):
        return wanted_letter == given_letter and not re.search(HEDGED, given_rest)
    if wanted_letter or given_letter and given_rest:  # 12 is right for (D) 12
        return (not wanted_letter or given_letter in ("", wanted_letter)) and equal(
            wanted_rest, given_rest
        )
    if as_words(wanted):
        return as_words(wanted) == as_words(given)
    try:
        return same_quantity(wanted, given)
    except FAULTS:
        return False


def same_quantity(wanted: str, given: str) -> bool:
    """Whether two answers that are not words have the same unit and the same meaning."""
    given = given if "=" in wanted else re.sub(NAMED, "", given)
    trees, units = zip(understood(wanted), understood(given))
    if (
        units[0] != units[1]
        and ("" not in units or units[0].startswith("base"))
        or not may_use(*trees)
    ):
        return False
    if units[0] == units[1] or "%" not in units:
        return same(*trees)
    # 25 and 0.25 are right for 25 %. 25 % is right for 0.25, and for 25: the problem may ask for
    # percent.
    as_it_stands = units[0] == "%" or trees[0][0] == "number" and abs(trees[0][1]) > 1
    values = [("/", tree, number(100)) if unit == "%" else tree for tree, unit in zip(trees, units)]
    return as_it_stands and same(*trees) or same(*values)


def understood(text: str) -> tuple[tuple, str]:
    """The meaning of a cleaned text, and its unit, '' for none. Raises one of FAULTS if it has
    none, or two units."""
    (unit,) = {one_unit(unit) for unit in re.findall(UNIT, text)} - {""} or {""}
    return meaning(read(re.sub(UNIT, "", text))), unit


def meaning(tree: tuple) -> tuple:
    """The tree with x = 5 as a named 5, and x > 2 as a named interval; also in lists."""
    kind = tree[0]
    if kind == "relation":
        return meaning_of_relation(tree[1], tree[2:])
    if (
        kind == "+" and tree[1] == REALS and tree[2][0] == "-" and tree[2][1][0] == "set"
    ):  # all numbers but some
        ends = [LOWEST, *sorted(tree[2][1][1:], key=lambda number: number[1]), HIGHEST]
        return (r"\cup", *(("()", *pair) for pair in zip(ends, ends[1:])))
    if kind not in ("list", "set"):
        return tree
    items = [meaning(item) for item in tree[1:]]
    names = [item[1] for item in items if item[0] == "named"]
    if not names:
        return (kind, *items)
    values = [item[2] if item[0] == "named" else item for item in items]
    without_index = {
        ("name", re.sub(r"_\d+$", "", name[1])) if name[0] == "name" else name for name in names
    }
    if len(without_index) == 1:  # x = 1 or x = 2; x < 1 or x > 2
        joins = any(part[0] == "relation" and part[1] != ("=",) for part in tree[1:])
        return (
            "named",
            *without_index,
            (r"\cup" if joins else kind, *values),
            *["inequality"] * joins,
        )
    pairs = sorted(zip(names, values, strict=True), key=lambda pair: "yz".find(str(pair[0][1])))
    return ("named", *(("()", *side) for side in zip(*pairs)))


def meaning_of_relation(signs: tuple, parts: tuple) -> tuple:
    """What a relation says of its name, as "named"; the relation itself if it is not solved for a
    name."""
    if set(signs) <= {"=", r"\approx"}:
        if is_name(parts[-1]) and not is_name(parts[0]):
            parts = parts[::-1]
        named = is_name(parts[0])
        steps = parts[named:]
        while (
            r"\approx" in signs[named:] and len(steps) > 1 and rounds(*steps[-2:])
        ):  # x = 1/3 ≈ 0.333 says 1/3
            steps = steps[:-1]
        value = meaning(steps[-1])
        if all(same(value, step) for step in steps[:-1]) and parts[0][1] not in letters(
            value
        ):  # x = 6/2 = 3
            return ("named", parts[0], value) if named else value
    if signs in ((r"\in",), (r"\ne",)) and is_name(parts[0]):
        values = parts[1] if signs == (r"\in",) else ("+", REALS, ("-", ("set", parts[1])))
        return ("named", parts[0], meaning(values), *["inequality"] * (signs == (r"\ne",)))
    if set(signs) <= {">", r"\ge"}:
        signs, parts = tuple({">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]), parts[::-1]
    if set(signs) <= {"<", r"\le"}:
        if len(parts) == 2:  # x < 5 or 5 < x
            below = is_name(parts[0])
            signs = ("<", *signs) if below else (*signs, "<")
            parts = (LOWEST, *parts) if below else (*parts, HIGHEST)
        if (
            len(parts) == 3
            and is_name(parts[1])
            and letters(parts[1]).isdisjoint(letters(("list", *parts[::2])))
        ):
            brackets = "[("[signs[0] == "<"] + "])"[signs[1] == "<"]
            return ("named", parts[1], (brackets, *parts[::2]), "inequality")
    return ("relation", signs, *parts)


def is_name(tree: tuple) -> bool:
    """x, x_1, f(3), f'(1), P(A), AB, |AB|, (x, y), AB:CD, AB/CD"""
    if tree[0] in ("()", ":", "/") or tree[0] == "|" and tree[1][0] == "*":
        return all(map(is_name, tree[1:]))
    if tree[0] == "*":
        of_capitals = all(part[0] == "name" and part[1][:1].isupper() for part in tree[1:])
        return (
            of_capitals
            or len(tree) == 3
            and tree[1][0] == "name"
            and tree[1][1].strip("'") in "fghFGHP"
        )
    return tree[0] == "name"


def may_use(wanted: tuple, given: tuple) -> bool:
    """Whether the wanted answer has all operations and letters of the given one. If it has letters,
    all arithmetic is allowed. If it has another operation, such as a root, products and quotients
    are allowed."""
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
    if (
        kinds == {"named"} and wanted[1][0] == "()" and {*wanted[1]} == {*given[1]}
    ):  # y = 2, x = 1 for x = 1, y = 2
        return same(wanted[2], tuple(given[2][given[1].index(name)] for name in wanted[1]))
    if "relation" in kinds or kinds == {"named"} and wanted[1] != given[1]:
        return kinds <= {"relation", "named"} and same_equation(wanted, given)
    if "named" in kinds:
        if wanted[0] == "named" and (wanted[1][0], given[0]) == (
            "()",
            "list",
        ):  # 1, 2 for x = 1, y = 2
            given = ("()", *given[1:])
        return same(*(tree[2] if tree[0] == "named" else tree for tree in (wanted, given)))
    if kinds & {"list", "set"} or kinds == {r"\cup"}:  # in any order
        groups = {"list", "set"} if r"\cup" not in kinds else {r"\cup"}
        wanted, given = (tree[1:] if tree[0] in groups else (tree,) for tree in (wanted, given))
        matches = [[same(item, candidate) for item in wanted] for candidate in given]
        return len(wanted) == len(given) and all(map(any, [*matches, *zip(*matches)]))
    if kinds & {"()", "[]", "(]", "[)", r"\matrix", r"\\", "&"}:
        return (wanted[0], len(wanted)) == (given[0], len(given)) and all(
            map(same, wanted[1:], given[1:])
        )
    if kinds == {"number"}:  # a decimal with two or more places may be answered with more
        return wanted[1] == given[1] or wanted[3] >= 2 and rounds(given, wanted)
    return all(close(*pair) for pair in values_at_points(wanted, given))


def rounds(exact: tuple, decimal: tuple) -> bool:
    """Whether a decimal is the other value, rounded to its places. ValueError if the value depends
    on letters."""
    ((value, rounded),) = values_at_points(exact, decimal)
    return decimal[0] == "number" and bool(
        abs(value - rounded) * 2 * 10 ** decimal[3] < 1.000001
    )  # 0.5 may go down


def same_equation(wanted: tuple, given: tuple) -> bool:
    """Whether one equation is a multiple of the other. Both must have the same letters, at least
    two."""
    if not all(
        tree[1] == ("=",) or tree[0] == "named" and not tree[3:] for tree in (wanted, given)
    ):
        return False
    sides = [("+", tree[-2], ("-", tree[-1])) for tree in (wanted, given)]
    if (
        letters(sides[0]) != letters(sides[1])
        or len(letters(sides[0])) < 2
        and wanted[0] == "named"
    ):
        return False
    pairs = list(values_at_points(*sides))
    return all(pairs[0]) and all(close(a * pairs[0][1], b * pairs[0][0]) for a, b in pairs)
