r"""Mathematics with a final answer in \boxed{}: right is the wanted answer, written in any accepted
way.

What counts is the last box after the last `</think>`. Several answers are wrong if one is wanted. A
number may be written as people do: in digits, as a fraction, a mixed number, a percentage, with a
power of ten. Beyond that an answer may use the operations that the wanted one uses: 5! is wrong for
120, since it is a task that evaluates to the answer. Numbers are compared exactly, expressions in
300 digits and at random points. What cannot be read, or is too large, is wrong. spelling.py gives
an answer one spelling, and expressions.py reads it.
"""

import itertools
import re

from data import Problem, after_thinking
from data.expressions import (
    ARITHMETIC,
    FAULTS,
    HIGHEST,
    LOWEST,
    REALS,
    Tree,
    close,
    form,
    is_task,
    items_of,
    letters,
    number,
    operations,
    read,
    value,
    values_at_points,
)
from data.spelling import TURNED, UNIT, Rule, as_choice, as_words, cleaned, one_unit

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 1000  # characters; what is longer is only compared as text
LONGEST_TEXT = 200_000  # characters; what stands before them is not read

SPACES = Rule("spaces, but not between words", r" (?!\w)|(?<!\w) ", "", "x = 5 → x=5", "a b")
# The name of a value. A lone letter is none here: `meaning` needs to know it.
NAMES = Rule(
    "name of the answer",
    r"""(?xi) ^
        (?= [^=]*? [a-zα-ω] [^=]*? ( [a-zα-ω|(] | {-1 ) )   # two letters, |z|, f(3) or f^{-1}
        (?: [^\d=<>,(]                    # letters and signs,
          | (?<! [+-] ) \( [^()=<>]* \)   # brackets, but no task such as 3-(x+1)
          | [_^{] -?\d+                   # digits of an index
        )* =""",
    "",
    "m+n=5 → 5",
    "2x=10",
)
NO_LETTERS = Rule(
    "spaces, brackets, fractions, words and .0",
    r'(?x) "[^"]*" | \.0+\b | \\frac | [\s(){}[\]/*]',
    "",
    r"\frac{x}{2} = 5.0 → x2=5",
    "x=5",
)

# Behind the letter of a choice: another letter, or a word that takes it back.
HEDGED = r"""(?x) (?<![A-Za-z\\]) [A-Z] (?![A-Za-z])
    | \b(?: not | nor | neither | wrong | incorrect )\b"""
# What stands between the formulas of a problem.
LINES = r"""(?x:
    \$+ | \\[()\[\]]                                      # dollars, \( and \[
    | \\\\(?![a-zA-Z]) | [&\n]                            # the ends of rows, cells and lines
    | \\(?: begin | end | text[a-z]* ) [ ]? (?: \{[^}]*\} ){1,2}
    | [.:?!] (?= [\s$] | $ )                              # the ends of sentences
    )"""
# Words also stand between them, if dollars are left out.
WORDS = r"""(?x: (?<! [\\\w^{}(*/+-] ) (?! or\b | and\b )
    [a-zA-Z]{2,} (?: [ ]an? (?=[ ]) )? (?! [\w^{}(*/+-] ) )"""
# Problems that ask for a form name it, or say what is to be done with a formula.
ASKS_FOR_FORM = r"""(?x) \b(?:
    [Ss]implif(?:y|ied) | simplest | lowest[ ]terms | [Rr]educe | [Ee]xpand | [Rr]ationali[sz]e
    | Factor | [Ff]actor(?: ed | i[sz](?:e|ation) | [ ](?: completely | fully | the ) )
    | (?: (?:[Rr]e)?[Ww]rite | [Ee]xpress | [Cc]onvert | [Cc]hange | [Rr]ound ) [ ] (?:
        with[ ]one                                     # with one logarithm
        | (?: the[ ][a-z]+[ ] )? [$\\(.\d-] .{,60}? [ ](?: as | in(?![ ]terms) | into | to | with )
    ) )\b"""
# A box, and the brace that opens it or else its content; or another brace.
BOXES = r"(?sx) \\\\?(?:boxed|fbox) \s* ( \{ | [^\s${}]* ) | \\. | [{}]"
BASE = r"(?i)\bbase[\s$-]*(\w+)|\b(binary|octal|hexadecimal)\b"
BASES = {
    word: str(i) for i, word in enumerate("two three four five six seven eight nine ten".split(), 2)
}
BASES |= {"binary": "2", "octal": "8", "hexadecimal": "16"}
HUNDRED = number(100)
INTERVAL = {"<": "()", r"\le": "[]"}  # the brackets of an interval by the signs at its ends


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
    boxed = last_boxed(answer)
    if "####" in answer:
        answer = answer.rpartition("####")[2]
    elif boxed is not None:
        answer = boxed
    elif len(answer) > LONGEST_ANSWER:
        raise ValueError("the answer is a long text without \\boxed{} or ####")
    if not answer.strip():
        raise ValueError("the answer is empty")
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
    texts = [as_choice(cleaned(text))[1] for text in (problem.answer, answer)]
    try:
        (wanted, _), (given, _) = meanings(*map(cleaned, texts))
    except FAULTS:  # words
        return False
    is_bare = "=" not in answer
    if form(given) == form(wanted):
        if is_bare or "=" in problem.answer:
            return False
    elif re.search(ASKS_FOR_FORM, problem.prompt):
        return True
    if given.kind == "relation" != wanted.kind and re.search("[Ss]olve|subject", problem.prompt):
        return True
    if is_task(given) and not is_task(wanted):
        return True
    return not (is_bare and given.kind == "number") and copied(answer, problem.prompt)


def copied(answer: str, text: str) -> bool:
    """Whether a formula of a text is the answer, or an equation of it a part of the answer. The
    order of sides and terms does not count."""
    given = sides(answer)
    for formula in re.split(f"{LINES}|{WORDS}|[,;]", text):
        said = sides(formula)
        if said == given or "=" in formula and said <= given:
            return True
    return False


def sides(formula: str) -> set[str]:
    """The sides and terms of a formula in letters and digits."""
    return set(re.split("[=+]", NO_LETTERS.apply(cleaned(formula))))


# --- whether two answers are the same -------------------------------------------------------------


def equal(reference: str, answer: str, text: str = "") -> bool:
    """Whether an answer in LaTeX or plain text is the reference, written in an accepted way. This
    is not symmetric: the reference says which operations may be used, and which unit counts. The
    text of the problem may ask for a base, or for a year BC."""
    if max(len(reference), len(answer)) > LONGEST_ANSWER:
        return reference.strip() == answer.strip()
    wanted, given = cleaned(reference), cleaned(answer)
    if not given:
        return False
    if SPACES.apply(wanted) == SPACES.apply(given):
        return True
    wanted = wanted.rpartition(r"\approx")[2].strip()  # of x \approx 0.33 the 0.33
    wanted_letter, wanted_rest = as_choice(wanted)
    given_letter, given_rest = as_choice(given)
    if wanted_letter and given_letter and not (wanted_rest and given_rest):
        return wanted_letter == given_letter and not re.search(HEDGED, given_rest)
    if wanted_letter or given_letter and given_rest:  # 12 is right for (D) 12
        may_be = wanted_letter in ("", given_letter) or not given_letter
        return may_be and equal(wanted_rest, given_rest, text)
    words = as_words(wanted)
    if words:
        return words == as_words(given)
    try:
        return same_quantity(wanted, given, text)
    except FAULTS:
        return False


def same_quantity(wanted: str, given: str, text: str) -> bool:
    """Whether two answers that are not words have the same unit and the same meaning. Raises one of
    FAULTS if one of them has no meaning."""
    (wanted, wanted_unit), (given, given_unit) = meanings(wanted, given)
    if not may_use(wanted, given):
        return False
    if wanted_unit == given_unit:
        return same(wanted, given)
    if wanted_unit and given_unit or wanted_unit.startswith("base"):
        return False
    if not may_be_left_out(wanted_unit or given_unit, text):
        return False
    if given_unit == "%":  # 25 % is right for 0.25, and for 25: the problem may ask for percent
        is_above_1 = wanted.kind == "number" and abs(wanted.value) > 1
        return is_above_1 and same(wanted, given) or same(wanted, Tree("/", (given, HUNDRED)))
    if same(wanted, given):
        return True
    return wanted_unit == "%" and same(Tree("/", (wanted, HUNDRED)), given)  # 0.25 for 25 %


def may_be_left_out(unit: str, text: str) -> bool:
    """Whether a number without this unit is the same. A base makes another number of it, unless
    the text of the problem names it last, or none and it is 10. So does BC, unless the text has it.
    """
    if unit == "bc":
        return re.search(r"B\.? ?C", text) is not None
    named = [match[match.lastindex].lower() for match in re.finditer(BASE, text)]
    base = named[-1] if named else "10"
    return not unit.startswith("base") or unit == f"base{BASES.get(base, base)}"


def meanings(wanted: str, given: str) -> tuple:
    """The meanings of two cleaned texts, each with its unit, without the name of the answer."""
    if "=" not in wanted:
        given = NAMES.apply(given)
    return understood(wanted), understood(given)


def understood(text: str) -> tuple[Tree, str]:
    """The meaning of a cleaned text, and its unit, '' for none. Raises one of FAULTS if it has
    none, or two units."""
    units = {one_unit(unit) for unit in re.findall(UNIT, text)} - {""}
    if len(units) > 1:
        raise ValueError("there are two units")
    return meaning(read(re.sub(UNIT, "", text))), "".join(units)


def may_use(wanted: Tree, given: Tree) -> bool:
    """Whether the wanted answer has all operations and letters of the given one. If it has letters,
    all arithmetic is allowed. If it has another operation, such as a root, products and quotients
    are allowed."""
    allowed = operations(wanted)
    if "letter" in allowed:
        allowed |= ARITHMETIC
    elif allowed:
        allowed |= set("-*/")
        if "^ of numbers" in allowed:
            allowed.add("/ of numbers")
    known = letters(wanted)
    if wanted.kind == "named":
        known |= letters(wanted.value)
    return operations(given) <= allowed and letters(given) <= known


# --- meanings -------------------------------------------------------------------------------------


def meaning(tree: Tree) -> Tree:
    """The tree with x = 5 as a named 5, and x > 2 as a named interval, also in lists; and the
    intervals between the points that the reals are without."""
    match tree:
        case Tree("relation", parts, signs):
            return meaning_of_relation(signs, parts)
        case Tree("list" | "set"):
            return meaning_of_list(tree)
        case Tree("+", (reals, Tree("-", (Tree("set", points),)), *_)) if reals == REALS:
            points = sorted(points, key=lambda point: value(point, {}))
            intervals = itertools.pairwise((LOWEST, *points, HIGHEST))
            return Tree(r"\cup", tuple(Tree("()", ends) for ends in intervals))
    return tree


def meaning_of_list(tree: Tree) -> Tree:
    """x = 1 or x = 2 as a named list, x < 1 or x > 2 as a named union, x = 1, y = 2 as a named
    pair."""
    items = [meaning(part) for part in tree.parts]
    values = tuple(map(unnamed, items))
    names = [item.value for item in items if item.kind == "named"]
    distinct = {without_index(name) for name in names}
    if not names:
        return Tree(tree.kind, values)
    if len(distinct) == 1:
        signs = {part.value for part in tree.parts if part.kind == "relation"}
        kind, form = (tree.kind, "") if signs <= {("=",)} else (r"\cup", "inequality")
        return Tree("named", (Tree(kind, values),), *distinct, form)
    pairs = zip(names, values, strict=True)
    names, values = zip(*sorted(pairs, key=lambda pair: "yz".find(str(pair[0].value))))
    return Tree("named", (Tree("()", values),), Tree("()", names))


def unnamed(tree: Tree) -> Tree:
    return tree.parts[0] if tree.kind == "named" else tree


def without_index(name: Tree) -> Tree:
    return name._replace(value=re.sub(r"_\d+$", "", name.value)) if name.kind == "name" else name


def meaning_of_relation(signs: tuple, parts: tuple) -> Tree:
    """What a relation says of its name, as "named"; the relation itself if it is not solved for a
    name."""
    if set(signs) <= {"=", r"\approx"}:
        return meaning_of_equation(signs, parts)
    if set(signs) <= TURNED.keys():
        signs, parts = tuple(TURNED[sign] for sign in reversed(signs)), parts[::-1]
    if set(signs) <= INTERVAL.keys():
        return meaning_of_inequality(signs, parts)
    name = parts[0]
    if is_name(name) and signs == (r"\in",):
        return Tree("named", (meaning(parts[1]),), name)
    return Tree("relation", parts, signs)


def meaning_of_equation(signs: tuple, parts: tuple) -> Tree:
    """x = 6/2 = 3 as a named 3, 2 + 3 = 5 as a 5."""
    if is_name(parts[-1]) and not is_name(parts[0]):
        parts = parts[::-1]
    name = parts[0] if is_name(parts[0]) else None
    steps = parts[1:] if name else parts
    between = signs[1:] if name else signs
    while r"\approx" in between and len(steps) > 1 and rounds(*steps[-2:]):
        steps = steps[:-1]  # x = 1/3 ≈ 0.333 says 1/3
    result = meaning(steps[-1])
    is_true = all(same(result, step) for step in steps[:-1])
    if not is_true or parts[0].value in letters(result):
        return Tree("relation", parts, signs)
    return Tree("named", (result,), name) if name else result


def meaning_of_inequality(signs: tuple, parts: tuple) -> Tree:
    """1 < x \\le 2, or x < 5 or 5 < x, as a named interval. All signs are < or \\le."""
    if len(parts) == 2 and is_name(parts[0]):
        signs, parts = ("<", *signs), (LOWEST, *parts)
    elif len(parts) == 2:
        signs, parts = (*signs, "<"), (*parts, HIGHEST)
    if len(parts) == 3 and is_name(parts[1]):
        low, name, high = parts
        if letters(name).isdisjoint(letters(low) | letters(high)):
            brackets = INTERVAL[signs[0]][0] + INTERVAL[signs[1]][1]
            return Tree("named", (Tree(brackets, (low, high)),), name, "inequality")
    return Tree("relation", parts, signs)


def is_name(tree: Tree) -> bool:
    """x, x_1, f(3), f'(1), P(A), AB, |AB|, (x, y), AB:CD, AB/CD"""
    match tree:
        case Tree("name"):
            return True
        case Tree("()" | ":" | "/", parts) | Tree("|", (Tree("*"), *_) as parts):
            return all(map(is_name, parts))
        case Tree("*", (Tree("name", _, name), _)) if name.strip("'") in "fghFGHP":
            return True
        case Tree("*", parts):
            return all(part.kind == "name" and part.value[:1].isupper() for part in parts)
    return False


# --- whether two meanings are the same ------------------------------------------------------------


def same(wanted: Tree, given: Tree) -> bool:
    """Whether two meanings are the same. A name may be left out, or added. Raises one of FAULTS if
    a value cannot be computed."""
    if wanted == given:
        return True
    kinds = {wanted.kind, given.kind}
    if kinds == {"named"} and {wanted.value.kind, given.value.kind} == {"()"}:
        values = dict(zip(given.value.parts, unnamed(given).parts, strict=True))
        if values.keys() == {*wanted.value.parts}:  # y = 2, x = 1 for x = 1, y = 2
            in_order = tuple(values[name] for name in wanted.value.parts)
            return same(unnamed(wanted), unnamed(given)._replace(parts=in_order))
    if "relation" in kinds or kinds == {"named"} and wanted.value != given.value:
        return kinds <= {"relation", "named"} and same_equation(wanted, given)
    if "named" in kinds:
        if given.kind == "list" and wanted.value.kind == "()":  # 1, 2 for x = 1, y = 2
            given = given._replace(kind="()")
        return same(unnamed(wanted), unnamed(given))
    if kinds & {"list", "set"} or kinds == {r"\cup"}:
        groups = [r"\cup"] if r"\cup" in kinds else ["list", "set"]
        return same_items(items_of(wanted, *groups), items_of(given, *groups))
    if kinds & {"()", "[]", "(]", "[)", r"\matrix", r"\\", "&"}:
        is_alike = len(kinds) == 1 and len(wanted.parts) == len(given.parts)
        return is_alike and all(map(same, wanted.parts, given.parts))
    if kinds == {"number"}:  # a decimal with two or more places may be answered with more
        return wanted.value == given.value or wanted.decimals >= 2 and rounds(given, wanted)
    return all(close(*pair) for pair in values_at_points(wanted, given))


def same_items(wanted: tuple, given: tuple) -> bool:
    """Whether these are the same trees in any order: each has one that is the same."""
    pairs = [pair for pair in itertools.product(wanted, given) if same(*pair)]
    return len(wanted) == len(given) and {*itertools.chain(*pairs)} == {*wanted, *given}


def rounds(exact: Tree, decimal: Tree) -> bool:
    """Whether a decimal is the other value, rounded to its places. ValueError if the value depends
    on letters."""
    ((unrounded, rounded),) = values_at_points(exact, decimal)
    if decimal.kind != "number":
        return False
    return abs(unrounded - rounded) * 2 * 10**decimal.decimals < 1.000001  # 0.5 may go down


def same_equation(wanted: Tree, given: Tree) -> bool:
    """Whether one equation is a multiple of the other. Both must have the same letters, at least
    two."""
    differences = difference(wanted), difference(given)
    if None in differences:
        return False
    of_wanted, of_given = map(letters, differences)
    if of_wanted != of_given or len(of_wanted) < 2 and wanted.kind == "named":
        return False
    pairs = list(values_at_points(*differences))
    wanted_first, given_first = pairs[0]
    return all(pairs[0]) and all(close(a * given_first, b * wanted_first) for a, b in pairs)


def difference(equation: Tree) -> Tree | None:
    """The left side of an equation minus the right one; None for other trees."""
    match equation:
        case Tree("named", (right,), left, "") | Tree("relation", (left, right), ("=",)):
            return Tree("+", (left, Tree("-", (right,))))
    return None
