r"""Mathematics with a final answer in \boxed{}: right is the wanted answer, written in any accepted
way.

What counts is the last box after the last `</think>`. Several answers are wrong if one is wanted. A
number may be written as people do: in digits, as a fraction, a mixed number, a percentage, with a
power of ten. Beyond that an answer may use the operations that the wanted one uses: 5! is wrong for
120, since it is a task that evaluates to the answer. Numbers are compared exactly, expressions in
300 digits and at random points. What cannot be read, or is too large, is wrong. expressions.py
gives an answer one spelling, and reads it.
"""

import re
import unicodedata

from data import Problem, after_thinking
from data.expressions import (
    ARITHMETIC,
    BRACKETS,
    FAULTS,
    HIGHEST,
    LOWEST,
    UNIT,
    Tree,
    as_choice,
    as_words,
    cleaned,
    close,
    form,
    is_task,
    items_of,
    letters,
    number,
    one_unit,
    operations,
    read,
    table,
    values_at_points,
)

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 1000  # characters after NFKC; what is longer is only compared as text
LONGEST_TEXT = 200_000  # characters; what stands before them is not read

SPACES = r" (?!\w)|(?<!\w) "  # but not those between words
# The name of a value and its =. A lone letter is none here: `meaning` needs to know it.
NAMES = r"""(?xi) ^
    (?= [^=]*? [a-zα-ω] [^=]*? ( [a-zα-ω|(] | {-1 ) )   # two letters, |z|, f(3) or f^{-1}
    (?: [^\d=<>,(]                    # letters and signs,
      | (?<! [+-] ) \( [^()=<>]* \)   # brackets, but no task such as 3-(x+1)
      | [_^{] -?\d+                   # digits of an index
    )* ="""
# Spaces, brackets, fractions, words and .0
NO_LETTERS = r'(?x) "[^"]*" | \.0+\b | \\frac | [\s(){}[\]/*]'

# What a worked solution says before its answer, and what ends the answer.
SAYS_ANSWER = r"""(?xi) \#{4} (?= \s* [^\w\s]* \d | [^\n]* \s* \Z )      # not the heading of a step
    | (?: \b (?:the|final|correct) \s+ answer \s+ is \b | \b (?:ans|answer) \b [\s*]* [:=] ) [\s*:]*
    | <answer> | 答案 [:：]"""
# A full stop, but not behind Dr or an initial; or what gives a reason.
ENDS_ANSWER = r"""(?x) (?<! \b[A-Z] ) (?<! \b[A-Z][a-z] ) (?<! \bMrs ) \. (?= \s+[A-Z] | \s*$ )
    | (?<= ^[A-Z] ) \. (?= \s+[A-Z][a-z] | \s*$ ) | \n | ,?[ ](?: since | because | as | so )\b
    | </answer> | 。"""
# A sentence: four words and a full stop, or two words and one of these; or what stands for none; a
# box that does not close; or a program.
PROSE = r"""(?xis) ^ (?: (?= .* \b(?:is|are|was|were|has|have|we|it|he|she|they)\b )
    (?: .*? \b[^\W\d_]{2,}\b ){2} | (?= .* [.!?] \s* $ ) (?: .*? \b[^\W\d_]{2,}\b ){4}
    | \s* (?: proof | not[ ]?found ) \s* $ | .* (?: \\boxed | ``` | \#{4} )
    | (?: def | import )[ ] | (?: therefore | hence | thus )\b )"""

# Behind the letter of a choice: another letter, or a word that takes it back.
HEDGED = r"""(?x) (?<![A-Za-z\\]) [A-Z] (?![A-Za-z])
    | \b(?: not | nor | neither | wrong | incorrect )\b"""
# What stands between the formulas of a problem.
BETWEEN = r"""(?x)
    \$+ | \\[()\[\]]                                      # dollars, \( and \[
    | \\\\(?![a-zA-Z]) | [&\n]                            # the ends of rows, cells and lines
    | \\(?: begin | end | text[a-z]* ) [ ]? (?: \{[^}]*\} ){1,2}
    | [.:?!] (?= [\s$] | $ )                              # the ends of sentences
    | [,;]
    # words, if dollars are left out
    | (?<! [\\\w^{}(*/+-] ) (?! or\b | and\b )
      [a-zA-Z]{2,} (?: [ ]an? (?=[ ]) )? (?! [\w^{}(*/+-] )"""
# Problems that ask for a form name it, or say what is to be done with a formula.
ASKS_FOR_FORM = r"""(?x) \b(?:
    [Ss]implif(?:y|ied) | simplest | lowest[ ]terms | Reduce | Expand | [Rr]ationali[sz]e
    | Factor | [Ff]actor(?: ed | i[sz](?:e|ation) | [ ](?: completely | fully | the ) )
    | (?: (?:[Rr]e)?[Ww]rite | [Ee]xpress | [Cc]onvert | [Cc]hange | [Rr]ound ) [ ] (?:
        with[ ]one                                     # with one logarithm
        | (?: the[ ][a-z]+[ ] )? [$\\(.\d-] .{,60}? [ ](?: as | in(?![ ]terms) | into | to | with )
    ) )\b"""
# A box, and the brace that opens it or else its content; or another brace.
BOXES = r"(?sx) \\\\?(?:boxed|fbox) \s* ( \{ | [^\s${}]* ) | \\. | [{}]"
# The base that a problem names
BASE = r"(?x) (?: \bbase [\s$-]* | \b (?=binary|octal|hexadecimal) ) (\w+)"
BASES = table(
    """
    2  two binary
    3  three
    4  four
    5  five
    6  six
    7  seven
    8  eight octal
    9  nine
    10 ten
    16 hexadecimal
"""
)
HUNDRED = number(100)
INTERVAL = {"<": "()", r"\le": "[]"}  # the brackets of an interval by the signs at its ends


class NoAnswer(ValueError):
    """No answer can be taken from what a record says. Others of its file may have one."""


def worded(text: str, instruction: str | None = None) -> str:
    """A problem as the model gets it. The instruction behind it is INSTRUCTION, unless the text
    asks for a box."""
    if instruction is None:
        instruction = "" if "\\boxed" in text else INSTRUCTION
    return f"{text.strip()}\n\n{instruction}".strip()


def problem(text: str, answer: str, instruction: str | None = None) -> Problem:
    """A problem with this text. The answer may be a bare one, or a worked solution that says it: in
    its last \\boxed{} (MATH), or behind the last `####` (GSM8K), `The answer is` or `Answer:`. What
    stands before `</think>` says none. Raises NoAnswer for another sentence, and ValueError for an
    empty answer."""
    answer = after_thinking(answer).strip() or answer
    boxed, (*before, last) = last_boxed(answer), re.split(SAYS_ANSWER, answer)
    says = before and last_boxed(last) is None
    sentence = answer  # if it is one, no reply repeats it
    if says and (boxed is None or re.search(r"####[^\n]*\s*$", answer)):
        answer = re.split(ENDS_ANSWER, last.strip())[0].strip(" *")
        sentence = f"{answer}."
    elif boxed is not None:
        answer, sentence = boxed, ""
    if not answer.strip():
        raise ValueError("the answer is empty")
    if len(answer) > LONGEST_ANSWER or re.search(PROSE, sentence):
        raise NoAnswer(
            f"the answer {answer!r:.60} is a long text or a sentence, without ####, `The answer is`"
            " or a \\boxed{} that closes, and no reply repeats it"
        )
    return Problem(worded(text, instruction), answer.strip(), task="data.tasks.mathematics")


def score(problem: Problem, completion: str) -> bool:
    """Whether the last box after the thinking holds the answer, and not a task that evaluates to
    it."""
    answer = last_boxed(after_thinking(completion)[-LONGEST_TEXT:])
    if answer is None or not equal(problem.answer, answer, problem.prompt):
        return False
    return not undone(problem, answer)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{} or \\fbox{} that is in no other. A box without braces ends
    before the next space or dollar sign. None if there is no box, or if its braces do not close."""
    content = None
    opened = []  # for each open brace: where the content of its box starts, 0 if it is none's
    for part in re.finditer(BOXES, text):
        of_box = part[1]
        if of_box == "{":
            opened.append(part.end())
            content = None
        elif of_box is not None:
            content = of_box
        elif part[0] == "{":
            opened.append(0)
        elif part[0] == "}" and opened:
            start = opened.pop()
            if start:
                content = text[start : part.start()]
    return content


# --- whether the answer is worked out -------------------------------------------------------------


def undone(problem: Problem, answer: str) -> bool:
    """Whether a right answer is still a task. This depends on the form of the wanted answer: a
    reduced fraction wants none that reduces, and an expanded sum wants no product of sums or roots.
    A problem that asks for a form gets no other. A formula of the problem is no answer."""
    try:
        (wanted, _), (given, _) = meanings(as_choice(problem.answer)[1], as_choice(answer)[1])
    except FAULTS:  # words
        return False
    is_bare, asked = "=" not in answer, problem.prompt
    same_form = form(given) == form(wanted)
    if same_form and (is_bare or "=" in problem.answer):
        return False
    in_other_form = not same_form and re.search(ASKS_FOR_FORM, asked)
    is_unsolved = given.kind == "relation" != wanted.kind and re.search("[Ss]olve|subject", asked)
    if in_other_form or is_unsolved or is_task(given) and not is_task(wanted):
        return True
    return not (is_bare and given.kind == "number") and copied(answer, asked)


def copied(answer: str, text: str) -> bool:
    """Whether a formula of a text is the answer, or an equation of it a part of the answer. The
    order of sides and terms does not count."""
    given = sides(answer)
    formulas = re.split(BETWEEN, text)
    return any(
        sides(formula) <= given if "=" in formula else sides(formula) == given
        for formula in formulas
    )


def sides(formula: str) -> set[str]:
    """The sides and terms of a formula in letters and digits."""
    return set(re.split("[=+]", re.sub(NO_LETTERS, "", cleaned(formula))))


# --- whether two answers are the same -------------------------------------------------------------


def equal(reference: str, answer: str, text: str = "") -> bool:
    """Whether an answer in LaTeX or plain text is the reference, written in an accepted way. This
    is not symmetric: the reference says which operations may be used, and which unit counts. The
    text of the problem may ask for a base."""
    plain = [unicodedata.normalize("NFKC", text) for text in (reference, answer)]
    if max(map(len, plain)) > LONGEST_ANSWER:
        return reference.strip() == answer.strip()
    (letter, wanted), (given_letter, given) = as_choice(reference), as_choice(answer)
    if letter and not (wanted and given):
        return letter == given_letter and not re.search(HEDGED, given)
    if letter and given_letter not in ("", letter):  # but 12 is right for (D) 12
        return False
    given = given or given_letter  # the name of a value
    if re.sub(SPACES, "", wanted) == re.sub(SPACES, "", given):
        return given != ""
    wanted = wanted.rpartition(r"\approx")[2]  # of x \approx 0.33 the 0.33
    words = as_words(wanted)
    if words:
        return words == as_words(given)
    try:
        return same_quantity(wanted, given, text)
    except FAULTS:
        return False


def same_quantity(reference: str, answer: str, text: str) -> bool:
    """Whether two answers that are not words have the same unit and the same meaning. Raises one of
    FAULTS if one of them has no meaning."""
    (wanted, wanted_unit), (given, given_unit) = meanings(reference, answer)
    if not may_use(wanted, given):
        return False
    if re.fullmatch(r"\d+(-\d+)+", reference) and form(wanted) != form(given):
        return False  # a date or a range, and no task
    if wanted_unit == given_unit:
        return same(wanted, given)
    if wanted_unit and given_unit or wanted_unit.startswith("base"):
        return False
    base = ["10", *re.findall(BASE, text.lower())][-1]  # the one that the problem names last
    if given_unit.startswith("base") and given_unit != f"base{BASES.get(base, base)}":
        return False
    if given_unit == "%":  # 25 % is right for 0.25, and for 25: the problem may ask for percent
        is_above_1 = wanted.kind == "number" and abs(wanted.value) > 1
        return is_above_1 and same(wanted, given) or same(wanted, Tree("/", (given, HUNDRED)))
    # 0.25 is right for 25 %
    return same(wanted, given) or wanted_unit == "%" and same(Tree("/", (wanted, HUNDRED)), given)


def meanings(wanted: str, given: str):
    """A list: the meanings of two cleaned texts with units, '' for none, without the name of the
    answer. Raises one of FAULTS if one of them has no meaning."""
    if "=" not in wanted:
        given = re.sub(NAMES, "", given)
    found = []
    for text in (wanted, given):
        units = sorted({one_unit(unit) for unit in re.findall(UNIT, text)})
        tree = read(re.sub(UNIT, "", text))
        found.append((meaning(tree), "".join(units)))
    return found


def may_use(wanted, given):
    """Whether the wanted answer has all operations and letters of the given one. If it has letters,
    all arithmetic is allowed. If it has another operation, such as a root, products and quotients
    are allowed."""
    allowed = operations(wanted) | set("-*/")
    if "letter" in allowed:
        allowed |= ARITHMETIC
    if "e" in allowed:
        allowed.add("^")
    known = letters(wanted)
    if wanted.kind == "named":
        known |= letters(wanted.value)
    return operations(given) <= allowed and letters(given) <= known


# --- meanings -------------------------------------------------------------------------------------
# Here and below a function without types takes trees. It gives a tree back, or a bool if its
# docstring begins with "Whether".


def meaning(tree):
    """The tree with x = 5 as a named 5, and x > 2 as a named interval, also in lists; x < 1 or
    x > 2 as a union."""
    if tree.kind == "relation":
        return meaning_of_relation(tree)
    if tree.kind not in ("list", r"\{\}"):
        return tree
    tree = tree._replace(parts=tuple(map(meaning, tree.parts)))
    has_intervals = any(item.kind == "named" and item.form for item in tree.parts)
    return tree._replace(kind=r"\cup") if has_intervals and len({*names_of(tree)}) == 1 else tree


def names_of(tree) -> list:
    """The names of the values in a list or a set."""
    items = items_of(tree, "list", r"\{\}")
    return [item.value for item in items if item.kind == "named"]


def unnamed(tree, beside_list=False):
    """x = 1, y = 2 as (1, 2), and x_1 = 1, x_2 = 2 as a list beside a list. Other trees as they
    are."""
    names = {*names_of(tree)}
    if len(names) < 2:
        return tree
    alike = len({str(name.value or name).partition("_")[0] for name in names}) == 1
    kind = "list" if alike and beside_list else "()"
    return Tree(kind, tuple(items_of(item, "named")[0] for item in tree.parts))


def meaning_of_equation(equation):
    """x = 6/2 = 3 as a named 3, 2 + 3 = 5 as a 5, and several names; others as they are."""
    parts = equation.parts
    if not is_name(parts[0]):
        parts = parts[::-1]  # 3 = x
    name, *steps = parts if is_name(parts[0]) else (None, *equation.parts)
    if r"\approx" in equation.value and len(steps) > 1 and rounds(*steps[-2:]):
        steps.pop()  # x = 1/3 ≈ 0.333 says 1/3
    result = meaning(steps.pop())
    if parts[0].value in letters(result) or not all(same(result, step) for step in steps):
        return equation
    if name and name.kind == result.kind == "()":  # (x, y) = (1, 2) is x = 1, y = 2
        pairs = zip(name.parts, result.parts, strict=True)
        return Tree("list", tuple(Tree("named", (part,), of_part) for of_part, part in pairs))
    return Tree("named", (result,), name) if name else result


def meaning_of_relation(relation):
    """1 < x \\le 2, x < 5, or 5 < x as a named interval, x = 5 as a named 5; others as they are."""
    signs, parts = relation.value, relation.parts
    if {*signs} <= {"=", r"\approx"}:
        return meaning_of_equation(relation)
    if len(parts) == 2 and is_name(parts[0]):
        signs, parts = ("<", *signs), (LOWEST, *parts)
    elif len(parts) == 2:
        signs, parts = (*signs, "<"), (*parts, HIGHEST)
    low, name, high = parts
    if not is_name(name) or r"\ne" in signs:
        return relation
    brackets = INTERVAL[signs[0]][0] + INTERVAL[signs[1]][1]
    return Tree("named", (Tree(brackets, (low, high)),), name, "inequality")


def is_name(tree):
    """Whether a tree is x, x_1, (x, y), or a product such as f(3), f'(1), P(A), AB."""
    match tree:
        case Tree("name"):
            return True
        case Tree("()", parts):
            return all(map(is_name, parts))
        case Tree("*", (Tree("name", _, first), _)):
            return first[0] in "fghpqr" or first[0].isupper()
    return False


# --- whether two meanings are the same ------------------------------------------------------------


def same(wanted, given):
    """Whether two meanings are the same. A name may be left out, or added. Raises one of FAULTS if
    a value cannot be computed."""
    if wanted == given:
        return True
    names = names_of(wanted), names_of(given)
    if not all(len({*each}) == len(each) > 1 for each in names):  # else names are compared
        wanted, given = unnamed(wanted), unnamed(given, wanted.kind == "list")
    kinds = {wanted.kind, given.kind}
    if "relation" in kinds or have_other_names(wanted, given):
        return same_equation(wanted, given)
    if "named" in kinds:
        return same(*items_of(wanted, "named"), *items_of(given, "named"))
    for group in (["list", r"\{\}"], [r"\cup"]):
        if kinds & {*group}:
            return same_items(items_of(wanted, *group), items_of(given, *group))
    if kinds & {*BRACKETS, r"\\", "&"}:
        is_alike = len(kinds) == 1 and len(wanted.parts) == len(given.parts)
        return is_alike and all(map(same, wanted.parts, given.parts))
    if wanted.decimals >= 2:  # it may be answered with more places
        return rounds(given, wanted)
    return all(close(*pair) for pair in values_at_points(wanted, given))


def have_other_names(wanted, given):
    """Whether two trees are values with names that differ."""
    return wanted.kind == given.kind == "named" and wanted.value != given.value


def same_items(wanted, given):
    """Whether two tuples have the same trees, each as often, in any order."""
    given = [*given]
    for item in wanted:
        alike = [
            other for other in given if not have_other_names(item, other) and same(item, other)
        ]
        if not alike:
            return False
        given.remove(alike[0])
    return not given


def rounds(exact, decimal):
    """Whether a decimal is the other value, rounded to its places. ValueError if the value depends
    on letters."""
    ((unrounded, rounded),) = values_at_points(exact, decimal)
    error = abs(unrounded - rounded) * 2 * 10**decimal.decimals
    return decimal.kind == "number" and error < 1.000001  # 0.5 may go down


def same_equation(wanted, given):
    """Whether one equation is a multiple of the other. A letter that only one of them has changes
    one of their values."""
    first, *others = values_at_points(difference(wanted), difference(given))
    return all(first) and all(close(a * first[1], b * first[0]) for a, b in others)


def difference(equation):
    """The left side of an equation minus the right one. ValueError for other trees."""
    match equation:
        case Tree("named", (right,), left) | Tree("relation", (left, right), ("=",)):
            return Tree("+", (left, Tree("-", (right,))))
    raise ValueError("it is no equation")
