r"""Expressions of mathematics in LaTeX or plain text: a reader makes trees of them, and trees have
values.

Nothing is evaluated as Python or by a computer algebra system, and what is too large is not
computed. A tree is a tuple of its kind and its parts:

    ("number", value, form, decimals)  ("name", "x")  ("constant", r"\pi")     leaves; `value` is a Fraction
    ("+", tree, ...)  ("-", tree)  ("/", tree, tree)  (r"\sin", tree)  ...     operations and functions
    ("list", ...)  ("set", ...)  ("()", ...)  ("[)", ...)  (r"\cup", ...)      collections, by their brackets
    (r"\matrix", (r"\\", ("&", tree, ...), ...))                              rows and their cells
    ("relation", signs, tree, tree, ...)                                       a < b = c, the signs before the trees
    ("named", name, tree)  ("named", name, tree, "inequality")                 x = 5 and x > 5, by mathematics.py
"""

import random
import re
from contextlib import suppress
from fractions import Fraction
from math import prod

import mpmath

LARGEST_ARGUMENT = 1000  # of functions that grow or oscillate
MOST_DIGITS = 300  # of a power; two values that agree in so many digits are the same
mp = mpmath.MPContext()
mp.dps = MOST_DIGITS + 50
FAULTS = (
    ArithmeticError,
    LookupError,
    ValueError,
    TypeError,
    RecursionError,
)  # what reading and computing may raise

NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3}(?![\w.]))?"
REPEATING = r"(\d*\.(\d*))\\(?:overline|bar|dot) ?\{?(\d+)\}?"  # 0.1\overline{6}
NAME = r"[^\W\d_](?:'|_ ?(?:\w|\{[^{}]*\}))*"  # x, f', x_1
TOKEN = re.compile(
    rf'{REPEATING}|{NUMBER}|\\[a-zA-Z]+|\\.|"[^"]*"|{NAME}|\S'
)  # or \sqrt, \{, "cm", or any other sign
RELATIONS = ("=", r"\approx", "<", ">", r"\le", r"\ge", r"\ne", r"\in")
LEVELS = [(",", ";"), (r"\\",), ("&",), RELATIONS, (r"\cup",), (":",), ("+", "-")]
CONSTANTS = {"e": mp.e, "i": mp.j, r"\pi": mp.pi, r"\infty": mp.inf, '"deg"': mp.degree}
FAMILIES = {  # an answer may use all functions of a family if the wanted one uses one of them
    **dict.fromkeys(r"\sin \cos \tan \cot \sec \csc \sinh \cosh \tanh".split(), "trigonometry"),
    **dict.fromkeys(r"\arcsin \arccos \arctan".split(), "inverse"), r"\ln": "log", r"\log": "log", r"\exp": "e",
}  # fmt: skip
VALUES = {
    "+": lambda *terms: sum(terms), "*": lambda *factors: prod(factors), "-": lambda x: -x,
    "/": lambda x, y: x / y, ":": lambda x, y: x / y, "^": mp.power, "|": abs, "!": mp.factorial,
    r"\lfloor": mp.floor, r"\lceil": mp.ceil, r"\binom": mp.binomial,
    **{name: getattr(mp, name[1:].replace("arc", "a")) for name in FAMILIES},
}  # fmt: skip
CLOSING = {"(": ")]", "[": ")]", "{": "}", "|": "|", r"\{": [r"\}"], r"\lfloor": [r"\rfloor"], r"\lceil": [r"\rceil"],
           r"\matrix": [r"\endmatrix"]}  # fmt: skip
STARTS_FACTOR = {
    "{",
    "(",
    "[",
    r"\frac",
    r"\sqrt",
    r"\pi",
    r"\binom",
    *FAMILIES,
}  # without a sign before it
REALS = ("()", ("-", ("constant", r"\infty")), ("constant", r"\infty"))
LEAVES = {
    r"\emptyset": ("set",),
    r"\reals": REALS,
    **{name: ("constant", name) for name in CONSTANTS},
}


def read(text: str) -> tuple:
    """The tree of an answer; several with commas, or the two of ±, are a list. Raises one of FAULTS
    for other texts."""
    items, tokens = [], [match[0] for match in TOKEN.finditer(text)]
    both = r"\pm" in tokens or r"\mp" in tokens
    for signs in ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})[: 1 + both]:
        reader = Reader([signs.get(token, token) for token in tokens])
        items += reader.items()
        if reader.next:
            raise ValueError(f"{reader.next!r} is too much")
    if both:  # 1 \pm 2 in a set or a list
        items = list(
            dict.fromkeys(
                part for item in items for part in (item[1:] if item[0] == "set" else [item])
            )
        )
    return items[0] if len(items) == 1 else ("list", *items)


class Reader:
    """Recursive descent: each method reads what its name says from the first tokens, and returns
    its tree."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.open = [*tokens, ""], []

    @property
    def next(self) -> str:
        return self.tokens[0]

    def take(self, *wanted: str) -> str:
        """Take the next token if it is one of these; '' if it is not."""
        return self.tokens.pop(0) if self.next in wanted else ""

    def items(self) -> list:
        tree = self.level()
        return [*tree[1:]] if tree[0] in LEVELS[0] else [tree]

    def level(self, level: int = 0) -> tuple:
        """Parts with signs of this level of LEVELS between them. Signs of later levels bind
        more."""
        if level == len(LEVELS):
            return self.product()
        parts, signs = [self.level(level + 1)], []
        while self.next in LEVELS[level]:
            signs.append(
                self.next if self.next in ("+", "-") else self.take(self.next)
            )  # a term has its sign
            parts.append(self.level(level + 1))
        if not signs:
            return parts[0]
        return (
            ("relation", tuple(signs), *parts)
            if signs[0] in RELATIONS
            else (signs[0].replace("-", "+"), *parts)
        )

    def product(self, of_function: bool = False) -> tuple:
        """Factors. The argument of a function without brackets ends before the next function or
        sign."""
        tree = factor = self.power()
        while True:
            sign = "" if of_function else self.take("*", "/")
            if (
                not sign
                and not self.starts_factor(factor[0])
                or of_function
                and self.next in FAMILIES
            ):
                return tree
            factor = self.power()
            tree = (
                divided(tree, factor)
                if sign == "/"
                else ("*", *(tree[1:] if tree[0] == "*" else [tree]), factor)
            )

    def starts_factor(self, before: str) -> bool:
        """Whether the next token starts a factor without a sign. Digits do so in n2^k, 2^n 3 and (x
        + 2)6."""
        if self.next[:1].isdigit():
            return before in ("+", "^") or before == "name" and self.tokens[1] == "^"
        is_bar = self.next == "|" and "|" not in self.open
        return (
            self.next[:1].isalpha() or self.next[:1] == '"' or self.next in STARTS_FACTOR or is_bar
        )

    def power(self) -> tuple:
        """A power, or a number with !, and the sign before it."""
        if sign := self.take("+", "-"):
            tree = self.power()
            is_literal = tree[0] == "number" and tree[1] >= 0
            return (
                tree
                if sign == "+"
                else ("number", -tree[1], *tree[2:])
                if is_literal
                else ("-", tree)
            )
        tree = self.atom()
        if self.take("^"):
            tree = ("^", tree, self.argument())
        return ("!", tree) if self.take("!") else tree

    def argument(self) -> tuple:
        """The argument of a command or of ^: a group in braces, or one token."""
        return self.power() if self.next == "-" else self.atom()

    def atom(self) -> tuple:
        token = self.tokens.pop(0)
        if re.match(r"\d|\..", token):
            return self.number(token)
        if token in LEAVES:
            return LEAVES[token]
        if re.match(r'[^\W\d_]|"', token):
            return (
                "name",
                re.sub(
                    r'[{} "]', "", token.casefold() if len(token) > 3 and token[0] == '"' else token
                ),
            )
        if token in CLOSING:
            return self.bracket(token)
        if token in (r"\frac", r"\binom"):
            parts = self.argument(), self.argument()
            return divided(*parts) if token == r"\frac" else (token, *parts)
        if token == r"\sqrt":
            degree = self.atom() if self.next == "[" else number(2)
            inverse = divided(number(1), degree)
            return (
                "^",
                self.argument(),
                number(inverse[1], "root") if inverse[0] == "number" else inverse,
            )
        if token in FAMILIES:
            exponent = self.argument() if self.take("^") else None
            base = [] if token != r"\log" else [self.argument()] if self.take("_") else [number(10)]
            tree = (
                token,
                self.atom() if self.next in ("(", "{") else self.product(of_function=True),
                *base,
            )
            return ("^", tree, exponent) if exponent else tree
        raise ValueError(f"{token!r} is not known")

    def number(self, digits: str) -> tuple:
        """A literal: 12, 1.5e6, 0.1\\overline{6}, or the mixed number 3\\frac{1}{2}."""
        if match := re.fullmatch(REPEATING, digits):
            ninths = Fraction(int(match[3]), 10 ** len(match[3]) - 1)
            return number(Fraction(f"0{match[1]}") + ninths / 10 ** len(match[2]), "repeating")
        mantissa, _, exponent = digits.lower().partition("e")
        decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
        form = (
            "digits"
            if not exponent
            else "power of ten"
            if re.match(r"[1-9](?!\d)", digits)
            else "unreduced"
        )
        literal = number(Fraction(digits), form, decimals if "." in digits else 0)
        if self.next == r"\frac" and digits.isdigit():
            part = self.atom()
            is_mixed = part[0] == "number" and 0 < part[1] < 1
            return number(literal[1] + part[1], "mixed") if is_mixed else ("*", literal, part)
        return literal

    def bracket(self, opening: str) -> tuple:
        self.open.append(opening)
        items, closing = self.items(), self.take(*CLOSING[opening])
        if not closing:
            raise ValueError(f"{opening!r} is not closed")
        self.open.pop()
        if (
            opening == r"\matrix"
            and items[0][0] == r"\\"
            and "&" not in [row[0] for row in items[0][1:]]
        ):
            return ("()", *items[0][1:])  # a column is a vector
        kind = {r"\{": "set", "(": "(" + closing, "[": "[" + closing}.get(opening, opening)
        return items[0] if kind in ("()", "[]", "{") and len(items) == 1 else (kind, *items)


def number(value: Fraction | int, form: str = "digits", decimals: int = 0) -> tuple:
    return ("number", Fraction(value), form, decimals)


def divided(above: tuple, below: tuple) -> tuple:
    """The tree of a division; a number if people write numbers so: as a fraction."""
    if all(part[0] == "number" and part[2] == "digits" for part in (above, below)):
        value = above[1] / below[1]
        if value.denominator != 1:  # 10/2 is a task
            return number(value, "fraction" if value.denominator == abs(below[1]) else "unreduced")
    return ("/", above, below)


def parts_of(tree: tuple) -> tuple:
    """The trees below a tree. Below x = 5 there is only the 5."""
    if tree[0] in ("number", "name", "constant"):
        return ()
    return {"relation": tree[2:], "named": tree[2:3]}.get(tree[0], tree[1:])


def letters(tree: tuple) -> set[str]:
    return {tree[1]} if tree[0] == "name" else set().union(*map(letters, parts_of(tree)))


def operations(tree: tuple) -> set[str]:
    """The operations of a tree, which decide whether an answer is written in an accepted way. A
    number has none. "* of numbers" is another operation than "*", so that a wanted 2 * x does not
    allow 2 * 3."""
    kind, parts = tree[0], parts_of(tree)
    if not parts:
        return {"letter"} if kind == "name" else CONSTANTS.keys() & tree[1:2]
    of_parts = [operations(part) for part in parts]
    if kind == "^" and parts[1][0] == "number" and parts[1][1].denominator != 1:
        kind = "root"
    elif kind in ("+", "*", "-", "/", "^"):
        numbers = sum(
            all(operation.endswith("of numbers") for operation in some) for some in of_parts
        )
        others = (
            {f"{kind} of numbers"}
            if numbers == len(parts) or kind in ("+", "*") and numbers > 1
            else set()
        )
        return others.union({kind} if numbers < len(parts) else (), *of_parts)
    return set().union(
        {FAMILIES.get(kind, kind)} if kind in VALUES or kind == "root" else (), *of_parts
    )


def form(tree: tuple) -> tuple:
    """How a tree is written, but for brackets, the order of terms and factors, and the name of a
    value. Of two trees with one value but two forms, one is a task that leads to the other: 2x + 3x
    and 5x, x^2 - 1 and (x - 1)(x + 1)."""
    kind, parts = tree[0], parts_of(tree)
    if not parts:
        return tree[:3]
    if kind in ("*", "/", "-"):
        items = list(factors(tree))
        above, below = (
            prod(item for item, power in items if type(item) is int and power == side)
            for side in (1, -1)
        )
        return (
            "*",
            above,
            below,
            *sorted((item for item in items if type(item[0]) is not int), key=repr),
        )
    forms = [form(part) for part in parts]
    if kind == "named":
        return (*tree[3:], *forms) if tree[3:] else forms[0]
    if kind in ("list", "set", "+", r"\cup") or kind == "relation" and set(tree[1]) == {"="}:
        forms.sort(key=repr)
    return ("set" if kind == "list" else kind, tree[1] if kind == "relation" else "", *forms)


def factors(tree: tuple, power: int = 1):
    """Yields the factors of a tree with their power, 1 or -1: whole numbers, -1 for a minus sign,
    and forms."""
    kind, parts = tree[0], parts_of(tree)
    if kind in ("*", "/", "-"):
        yield -1 if kind == "-" else 1, 1
        for i, part in enumerate(parts):
            yield from factors(part, -power if kind == "/" and i else power)
    elif kind == "number" and tree[2] != "unreduced":
        yield tree[1].numerator, power
        yield tree[1].denominator, -power
    else:
        yield form(tree), power


def value(tree: tuple, point: dict):
    """The value of a tree with the numbers of `point` for its letters. Raises one of FAULTS if
    there is none."""
    kind, parts = tree[0], parts_of(tree)
    if kind == "number":
        return mp.mpf(tree[1].numerator) / tree[1].denominator
    if kind in ("name", "constant"):
        return point[tree[1]] if kind == "name" else +CONSTANTS[tree[1]]
    values = [value(part, point) for part in parts]
    if kind == "^":
        base, exponent = values
        if (
            base != 0 and abs(exponent * mpmath.log10(abs(base))) > MOST_DIGITS
        ):  # the logarithm in few digits is quick
            raise ValueError("a power is too large")
        if (
            mp.re(base) < 0 and parts[1][0] == "number" and parts[1][1].denominator % 2
        ):  # -2 is the cube root of -8
            return (-1) ** parts[1][1].numerator * mp.power(-base, exponent)
    grows = kind[0] in "!\\" and kind not in (r"\ln", r"\log")
    if kind not in VALUES or grows and max(map(abs, values)) > LARGEST_ARGUMENT:
        raise ValueError(f"{kind} has no value here, or one that is too large")
    result = VALUES[kind](*values)
    if mp.im(result) and not any(map(mp.im, values)) and letters(tree):
        raise ArithmeticError("there is no real value")
    return result


def values_at_points(*trees: tuple):
    """Yields the values of the trees at random points, or once if there are no letters. At the
    first point letters are complex numbers near positive ones: so roots have values. At the others
    some are negative: so x is neither |x| nor the root of x^2. A point is left out if there is no
    real value."""
    names, rng = sorted(set().union(*map(letters, trees))), random.Random(0)
    point = {
        name: mp.mpc(rng.randint(100, 999), rng.randint(1, 99)) / rng.randint(100, 999)
        for name in names
    }
    yield tuple(value(tree, point) for tree in trees)
    for signs in [(-1, -1), (-1, 1), (1, -1)] * bool(names):
        point = {name: signs[i % 2] * abs(point[name]) for i, name in enumerate(names)}
        with suppress(*FAULTS):
            yield tuple(value(tree, point) for tree in trees)


def close(a, b) -> bool:
    """Whether two values agree in MOST_DIGITS digits."""
    return bool(a == b or abs(a - b) < max(abs(a), abs(b)) * mp.mpf(10) ** -MOST_DIGITS)
