r"""Expressions of mathematics in LaTeX or plain text: a reader makes trees of them, and trees have
values.

Nothing is evaluated as Python or by a computer algebra system, and what is too large is not
computed. These are the kinds of trees:

    leaves       number, name (x, f', x_1, "cm"), constant (e, \pi)
    operations   +  *  /  -  ^  :  !  |  \sin  \lfloor  and so on
    collections  list, set, tuples and intervals by their brackets: ()  [), and unions \cup
    matrices     \matrix, its rows \\ and their cells &
    relation     a < b = c; its `value` is the signs between the parts
    named        x = 5 and x > 5, made by mathematics.py; its only part is the 5 or the interval,
                 and its `value` is the tree of the name

A sum has the kind +. Its terms have their own signs, so 2 - x is (+ 2 (- x)).
"""

import random
import re
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from math import gcd, prod
from operator import neg, truediv
from typing import NamedTuple

import mpmath

from data.spelling import table

LARGEST_ARGUMENT = 1000  # of functions that grow or oscillate
MOST_DIGITS = 300  # of a power; two values that agree in so many digits are the same
mp = mpmath.MPContext()
mp.dps = MOST_DIGITS + 50
# What reading and computing may raise
FAULTS = (ArithmeticError, LookupError, ValueError, TypeError, RecursionError)


class Tree(NamedTuple):
    """An expression or a part of one."""

    kind: str
    parts: tuple = ()  # trees
    value: object = None  # of a number: a Fraction; of a name or a constant: its text
    form: str = ""  # of a number: how it is written; of what is named: "inequality" or ""
    decimals: int = 0  # of a number: digits behind the point


BOTH = {r"\pm": "+-", r"\mp": "-+"}  # signs, and what they stand for


def items_of(tree: Tree, *kinds: str) -> tuple:
    """The parts of a tree of one of these kinds; another tree is the only item."""
    return tree.parts if tree.kind in kinds else (tree,)


REPEATING = r"(\d*\.(\d*))\\(?:overline|bar|dot)[ ]?\{?(\d+)\}?"  # 0.1\overline{6}
TOKEN = re.compile(
    rf"""(?x) {REPEATING}
    | (?: \d+\.?\d* | \.\d+ ) (?: [eE][+-]?\d{{1,3}} (?![\w.]) )?     # 12, .5, 1.5e6
    | \\[a-zA-Z]+ | \\. | "[^"]*"                                     # a command, or words
    | [^\W\d_] (?: ' | _[ ]? (?: \w | \{{[^{{}}]*\}} ) )*             # x, f', x_1
    | \S                                                              # any other sign"""
)
# The kind of tree that signs make when they stand between parts. Those of later lines bind more.
LEVELS = table(
    r"""
    list      , ;
    \\        \\
    &         &
    relation  = \approx < > \le \ge \ne \in
    \cup      \cup
    :         :
    +         + -
"""
)
# Brackets: opening and closing, and the kind of tree that they make.
BRACKETS = table(
    r"""
    (        )          ()
    (        ]          (]
    [        )          [)
    [        ]          []
    {        }          {}
    |        |          |
    \{       \}         set
    \lfloor  \rfloor    \lfloor
    \lceil   \rceil     \lceil
    \matrix  \endmatrix \matrix
"""
)
# What `form` leaves out
UNWRITTEN = {"", *"number name constant named + * / : list set digits fraction None 1".split()}
GROUPS = ("()", "[]", "{}")  # make no tree around one part
ARITHMETIC = set("+-*/^")
# Families of functions. An answer may use all of one if the wanted answer uses one of them.
FAMILIES = table(
    r"""
    trigonometry  \sin \cos \tan \cot \sec \csc \sinh \cosh \tanh
    inverse       \arcsin \arccos \arctan
    log           \ln \log
    e             \exp
"""
)
KINDS = {(opening, closing): kind for opening, closing, kind in BRACKETS}
OPENING = {opening for opening, _ in KINDS}
FAMILY_OF = {name: family for family, *names in FAMILIES for name in names}
CONSTANTS = {"e": mp.e, "i": mp.j, r"\pi": mp.pi, r"\infty": mp.inf, '"deg"': mp.degree}
VALUES = {
    "+": lambda *terms: sum(terms),
    "*": lambda *factors: prod(factors),
    "-": neg,
    "/": truediv,
    ":": truediv,
    "^": mp.power,
    "|": abs,
    "!": mp.factorial,
    r"\lfloor": mp.floor,
    r"\lceil": mp.ceil,
    r"\binom": mp.binomial,
    **{name: getattr(mp, name[1:].replace("arc", "a")) for name in FAMILY_OF},
}
# The first tokens of factors that may stand without a sign before them, beside letters
STARTS_FACTOR = {*r'" { ( [ \frac \sqrt \pi \binom'.split(), *FAMILY_OF}
LEAVES = {name: Tree("constant", value=name) for name in CONSTANTS}
HIGHEST = LEAVES[r"\infty"]
LOWEST = Tree("-", (HIGHEST,))
REALS = Tree("()", (LOWEST, HIGHEST))
LEAVES |= {r"\emptyset": Tree("set"), r"\reals": REALS}


def read(text: str) -> Tree:
    """The tree of an answer. Several with commas are a list. So are the two of ±, also of ± in a
    list or a set. Raises one of FAULTS for other texts."""
    tokens = [match[0] for match in TOKEN.finditer(text)]
    if BOTH.keys().isdisjoint(tokens):
        return Reader(tokens).whole()
    items = []
    for i in (0, 1):
        tree = Reader([BOTH[token][i] if token in BOTH else token for token in tokens]).whole()
        for item in items_of(tree, "list"):
            items += items_of(item, "set")
    items = tuple(dict.fromkeys(items))
    return items[0] if len(items) == 1 else Tree("list", items)


class Reader:
    """Recursive descent: each method reads what its name says from the next tokens, and returns
    its tree."""

    def __init__(self, tokens: list[str]):
        self.tokens = [*tokens, ""]
        self.open = []  # brackets

    @property
    def next(self) -> str:
        return self.tokens[0]

    def take(self, *wanted: str) -> str:
        """Take the next token if it is one of these; '' if it is not."""
        return self.tokens.pop(0) if self.next in wanted else ""

    def whole(self) -> Tree:
        tree = self.level()
        if self.next:
            raise ValueError(f"{self.next!r} is too much")
        return tree

    def level(self, level: int = 0) -> Tree:
        """Parts with signs of this level of LEVELS, or of later ones, between them."""
        if level == len(LEVELS):
            return self.product()
        kind, *signs_between = LEVELS[level]
        parts, signs = [self.level(level + 1)], []
        while self.next in signs_between:
            signs.append(self.next)
            if kind != "+":  # a term takes its own sign
                self.take(*signs_between)
            parts.append(self.level(level + 1))
        if not signs:
            return parts[0]
        return Tree(kind, tuple(parts), tuple(signs) if kind == "relation" else None)

    def product(self, signs=("*", "/"), ends=()) -> Tree:
        """Factors with these signs or none between them. It stops before one of `ends`."""
        tree = factor = self.power()
        while self.next in signs or self.starts_factor(factor.kind) and self.next not in ends:
            sign = self.take(*signs)
            factor = self.power()
            if sign == "/":
                tree = divided(tree, factor)
            else:
                tree = Tree("*", (*items_of(tree, "*"), factor))
        return tree

    def starts_factor(self, before: str) -> bool:
        """Whether the next token starts a factor without a sign. Digits do so in n2^k, 2^n 3 and (x
        + 2)6."""
        first = self.next[:1]
        if first.isdigit():
            return before in ("+", "^") or before == "name" and self.tokens[1] == "^"
        if first == "|":
            return "|" not in self.open
        return first.isalpha() or not STARTS_FACTOR.isdisjoint((first, self.next))

    def power(self) -> Tree:
        """A power, or a number with !, and the sign before it."""
        if self.take("+"):
            return self.power()
        if self.take("-"):
            tree = self.power()
            is_literal = tree.kind == "number" and tree.value >= 0
            return tree._replace(value=-tree.value) if is_literal else Tree("-", (tree,))
        tree = self.atom()
        if self.take("^"):
            tree = Tree("^", (tree, self.argument()))
        return Tree("!", (tree,)) if self.take("!") else tree

    def argument(self) -> Tree:
        """The argument of a command or of ^: a group in braces, or one token."""
        return self.power() if self.next == "-" else self.atom()

    def atom(self) -> Tree:
        token = self.tokens.pop(0)
        if re.match(r"\d|\..", token):
            return self.number(token)
        if token in LEAVES:
            return LEAVES[token]
        if re.match(r'[^\W\d_]|"', token):
            is_word = token[0] == '"' and len(token) > 3
            name = token.casefold() if is_word else token
            return Tree("name", value=re.sub(r'[{} "]', "", name))
        if token in OPENING:
            return self.bracket(token)
        if token == r"\frac":
            return divided(self.argument(), self.argument())
        if token == r"\binom":
            return Tree(token, (self.argument(), self.argument()))
        if token == r"\sqrt":  # a root is a power, of the form "root"
            degree = self.atom() if self.next == "[" else number(2)
            exponent = divided(number(1), degree)._replace(form="root")
            return Tree("^", (self.argument(), exponent))
        if token in FAMILY_OF:
            return self.function(token)
        raise ValueError(f"{token!r} is not known")

    def number(self, digits: str) -> Tree:
        """A literal: 12, 1.5e6, whose form is the text itself, 0.1\\overline{6}, or the mixed
        number 3\\frac{1}{2}."""
        if match := re.fullmatch(REPEATING, digits):
            start, decimals, period = match.groups()
            ninths = Fraction(int(period), 10 ** len(period) - 1)
            return number(Fraction(f"0{start}") + ninths / 10 ** len(decimals), "repeating")
        value = Fraction(digits)
        form = "digits" if value.denominator == 1 else "decimal"
        decimals = -Decimal(digits).as_tuple().exponent if "." in digits else 0
        literal = number(value, digits if "e" in digits else form, decimals)
        if self.next != r"\frac" or not digits.isdigit():
            return literal
        part = self.atom()
        if part.kind == "number" and 0 < part.value < 1:
            return number(value + part.value, "mixed")
        return Tree("*", (literal, part))

    def bracket(self, opening: str) -> Tree:
        self.open.append(opening)
        items = items_of(self.level(), "list")
        kind = KINDS[opening, self.tokens.pop(0)]
        self.open.pop()
        rows = items_of(items[0], r"\\") if len(items) == 1 else ()
        if kind == r"\matrix" and len(rows) > 1 and all(row.kind != "&" for row in rows):
            return Tree("()", rows)  # a column is a vector
        return items[0] if kind in GROUPS and len(items) == 1 else Tree(kind, items)

    def function(self, name: str) -> Tree:
        """Such as \\sin^2 x or \\log_2(8). Without brackets the argument ends before the next
        function or sign."""
        exponent = self.take("^") and self.argument()
        base = ()
        if name == r"\log":
            base = (self.argument() if self.take("_") else number(10),)
        if self.next in ("(", "{"):
            argument = self.atom()
        else:
            argument = self.product(signs=(), ends=FAMILY_OF)
        tree = Tree(name, (argument, *base))
        return Tree("^", (tree, exponent)) if exponent else tree


def number(value: Fraction | int, form: str = "digits", decimals: int = 0) -> Tree:
    return Tree("number", (), Fraction(value), form, decimals)


def divided(above: Tree, below: Tree) -> Tree:
    """The tree of a division; a number if people write numbers so: as a fraction. Its form says
    whether the first factors reduce, as in 6x/9."""
    first, second = items_of(above, "*")[0], items_of(below, "*")[0]
    form = ""
    if first.form == second.form == "digits":
        form = "fraction" if gcd(int(first.value), int(second.value)) == 1 else "unreduced"
        if (first, second) == (above, below) and above.value % below.value:  # 10/2 is a task
            return number(above.value / below.value, form)
    return Tree("/", (above, below), form=form)


def letters(tree: Tree) -> set[str]:
    return {tree.value} if tree.kind == "name" else set().union(*map(letters, tree.parts))


def operations(tree: Tree) -> set[str]:
    """The operations of a tree, which decide whether an answer is written in an accepted way. A
    number has none. "* of numbers" is another operation than "*", so that a wanted 2 * x does not
    allow 2 * 3."""
    kind = tree.kind
    of_parts = [operations(part) for part in tree.parts]
    found = set().union(*of_parts)
    if kind == "name":
        found.add("letter")
    elif kind == "constant":
        found.add(tree.value)
    elif kind == "^" and is_fraction(tree.parts[1]):
        found.add("root")
    elif kind in ARITHMETIC:
        numbers = [part for part in of_parts if all(name.endswith("of numbers") for name in part)]
        if len(numbers) < len(of_parts):
            found.add(kind)
        if len(numbers) == len(of_parts) or len(numbers) > 1 and kind in ("+", "*"):
            found.add(f"{kind} of numbers")
    elif kind in VALUES:
        found.add(FAMILY_OF.get(kind, kind))
    return found


def is_fraction(tree: Tree) -> bool:
    return tree.kind == "number" and tree.value.denominator != 1


def form(tree: Tree) -> list[str]:
    """How a tree is written, but for brackets, the order, and the name of a value: its numbers,
    letters, functions and minus signs, sorted. Of two trees with one value but two forms, one is a
    task that leads to the other: 2x + 3x and 5x, x^2 - 1 and (x - 1)(x + 1)."""
    signs = [tree.kind, tree.form]
    if tree.kind != "named":
        signs += re.findall("-|[^/-]+", str(tree.value))  # the numbers above and below a line
    written = [sign for sign in signs if sign not in UNWRITTEN]
    return sorted(sum(map(form, tree.parts), written))


def is_task(tree: Tree) -> bool:
    """Whether there is a fraction that reduces, or a product of sums or roots. The sides of an
    equation may be written in any way."""
    return tree.kind != "relation" and (
        tree.form == "unreduced" or factors(tree) > 1 or any(map(is_task, tree.parts))
    )


def factors(tree: Tree) -> int:
    """How many factors of a tree are sums, or roots of numbers. A power counts twice, and so does
    a sum below a line."""
    match tree:
        case Tree("+"):
            return 1
        case Tree("*" | "-", parts):
            return sum(map(factors, parts))
        case Tree("/", (above, below)):
            return factors(above) + 2 * any(part.kind == "+" for part in items_of(below, "*"))
        case Tree("^", (base, Tree("number") as exponent)):
            return not letters(base) if is_fraction(exponent) else 2 * factors(base)
    return 0


def value(tree: Tree, point: dict):
    """The value of a tree with the numbers of `point` for its letters. Raises one of FAULTS if
    there is none."""
    kind = tree.kind
    if kind == "number":
        return mp.convert(tree.value)
    if kind == "name":
        return point[tree.value]
    if kind == "constant":
        return +CONSTANTS[tree.value]
    values = [value(part, point) for part in tree.parts]
    if kind == "^":
        base, exponent = values
        digits = exponent * mpmath.log10(abs(base)) if base != 0 else 0  # in few digits: quick
        if abs(digits) > MOST_DIGITS:
            raise ValueError("a power is too large")
        fraction = tree.parts[1].value
        if mp.re(base) < 0 and tree.parts[1].kind == "number" and fraction.denominator % 2:
            return (-1) ** fraction.numerator * mp.power(-base, exponent)  # the cube root of -8
    grows = kind[0] in "!\\" and kind not in (r"\ln", r"\log")
    if grows and max(map(abs, values)) > LARGEST_ARGUMENT:
        raise ValueError(f"the argument of {kind} is too large")
    result = VALUES[kind](*values)
    if mp.im(result) and not any(map(mp.im, values)) and letters(tree):
        raise ArithmeticError("there is no real value")
    return result


def values_at_points(*trees: Tree):
    """Yields the values of the trees at random points, or once if there are no letters. At the
    first point letters are complex numbers near positive ones: so roots have values. At the others
    some are negative: so x is neither |x| nor the root of x^2. A point is left out if there is no
    real value."""
    names = sorted(letters(Tree("list", trees)))
    rng = random.Random(0)
    point = {}
    for name in names:
        point[name] = mp.mpc(rng.randint(100, 999), rng.randint(1, 99)) / rng.randint(100, 999)
    yield [value(tree, point) for tree in trees]
    if not names:
        return
    for signs in ((-1, -1), (-1, 1), (1, -1)):
        for i, name in enumerate(names):
            point[name] = signs[i % 2] * abs(point[name]) * rng.uniform(0.5, 2)
        with suppress(*FAULTS):
            yield [value(tree, point) for tree in trees]


def close(a, b) -> bool:
    """Whether two values agree in MOST_DIGITS digits."""
    largest = max(abs(a), abs(b))
    return a == b or abs(a - b) < largest * mp.mpf(10) ** -MOST_DIGITS
