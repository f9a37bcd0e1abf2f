r"""Expressions of mathematics in LaTeX or plain text: a reader of its own, and the numbers that they stand for.

Nothing is evaluated as Python or by a computer algebra system, and what is too deep or too large is not computed.
A tree is a tuple of its kind and its parts. Leaves are ("number", value, form, decimals), ("name", name) and
("constant", name). The parts of all other kinds are trees: of sums, products, powers and functions, of "list", "set" and
"matrix" with its "row"s, of r"\cup" and r"\setminus", of brackets such as "()" and "[)". Before the parts of "relation"
stand its signs, and ("named", name, tree) is x = 5 once it is understood.
"""

import math
import random
import re
from fractions import Fraction

import mpmath

DEEPEST = 20  # brackets, fractions and roots within each other
LARGEST_ARGUMENT = 1000  # of exponential, trigonometric and other functions that grow or turn
MOST_DIGITS = 1000  # of a power; two numbers that agree in so many are the same, since no answer can write more
mp = mpmath.MPContext()
mp.dps = MOST_DIGITS + 100


class Unreadable(Exception):
    """This is no answer in the language of the reader, or it is too large."""


FAULTS = (Unreadable, ArithmeticError, ValueError, TypeError, RecursionError)  # of reading and computing

# fmt: off
TOKEN = re.compile(r'(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3}(?![\w.]))?|\\[a-zA-Z]+|\\.|"[^"]*"|\S')
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx")
CONSTANTS = {"e": mp.e, "i": mp.j, r"\pi": mp.pi, r"\infty": mp.inf}
GREEK = {f"\\{name}" for name in "alpha beta gamma delta epsilon varepsilon theta lambda mu nu rho sigma tau phi varphi"
         " chi psi omega kappa eta zeta xi Delta Gamma Theta Omega Phi Lambda Sigma ell".split()}
FUNCTIONS = {  # the family, of which an answer may use all, and the value
    **{rf"\{name}": ("trigonometry", getattr(mp, name)) for name in "sin cos tan cot sec csc sinh cosh tanh".split()},
    **{rf"\arc{name}": ("inverse trigonometry", getattr(mp, f"a{name}")) for name in ("sin", "cos", "tan")},
    r"\ln": ("logarithm", mp.ln), r"\log": ("logarithm", lambda x, base=10: mp.log(x) / mp.log(base)),
    r"\exp": ("e", mp.exp),
}
VALUES = {
    "+": lambda *terms: sum(terms), "-": lambda x: -x, "*": lambda *factors: math.prod(factors),
    "/": lambda x, y: x / y, ":": lambda x, y: x / y, "|": abs, r"\lfloor": mp.floor, r"\lceil": mp.ceil,
    "!": lambda n: factorial(n), r"\binom": lambda n, k: factorial(n) / factorial(k) / factorial(n - k), **{name: function for name, (_, function) in FUNCTIONS.items()},
}
UNBOUNDED = ("+", "-", "*", "/", ":", "|", r"\ln", r"\log")
CLOSING = {"(": ")]", "[": ")]", "|": "|", r"\{": [r"\}"], r"\lfloor": [r"\rfloor"], r"\lceil": [r"\rceil"]}
STARTS_FACTOR = {"{", "(", "[", r"\frac", r"\sqrt", r"\pi", r"\binom", *GREEK, *FUNCTIONS}
INFINITY = ("constant", r"\infty")
NEGATIVE_INFINITY = ("-", INFINITY)
REALS = ("()", NEGATIVE_INFINITY, INFINITY)
BOTH_SIGNS = ({r"\pm": "+", r"\mp": "-"}, {r"\pm": "-", r"\mp": "+"})
# fmt: on


# --- the grammar ------------------------------------------------------------------------------------------------------


def read(text: str) -> tuple:
    """The tree of an answer; several between commas are a list, and so are the two of ±. Raises one of FAULTS."""
    items, tokens = [], TOKEN.findall(text)
    both = {r"\pm", r"\mp"}.intersection(tokens)
    for signs in BOTH_SIGNS if both else [{}]:
        reader = Reader([signs.get(token, token) for token in tokens])
        items += reader.items()
        if reader.next:
            raise Unreadable(f"{reader.next!r} is too much")
    items = list(dict.fromkeys(items)) if both else items
    return items[0] if len(items) == 1 else ("list", *items)


class Reader:
    """Recursive descent. Each method reads what its name says, and returns its tree."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.at, self.depth, self.bars = 0, 0, 0

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        """The next token if it is one of these; '' and nothing is taken if not."""
        token = self.next if self.next in wanted else ""
        self.at += bool(token)
        return token

    def need(self, *wanted: str) -> str:
        if not (token := self.take(*wanted)):
            raise Unreadable(f"{' or '.join(wanted)} was wanted, {self.next!r} is there")
        return token

    def items(self) -> list:
        items = [self.relation()]
        while self.take(",", ";"):
            items.append(self.relation())
        return items

    def relation(self) -> tuple:
        parts, signs = [self.joined()], []
        while sign := self.take(*RELATIONS):
            signs.append(sign.replace(r"\approx", "="))
            parts.append(self.joined())
        return ("relation", tuple(signs), *parts) if signs else parts[0]

    def joined(self, signs: tuple = (r"\cup", r"\setminus", ":")) -> tuple:
        """Sums with these signs between them; the first one binds least."""
        if not signs:
            return self.sum()
        parts = [self.joined(signs[1:])]
        while self.take(signs[0]):
            parts.append(self.joined(signs[1:]))
        return (signs[0], *parts) if len(parts) > 1 else parts[0]

    def sum(self) -> tuple:
        terms = [self.product()]
        while self.next in ("+", "-"):
            terms.append(self.product())
        return ("+", *terms) if len(terms) > 1 else terms[0]

    def product(self) -> tuple:
        factors = [self.signed()]
        while True:
            if self.take("*"):
                factors.append(self.signed())
            elif self.take("/"):
                factors = [quotient(product(factors), self.signed())]
            elif self.starts_factor():
                factors.append(self.power())
            else:
                return product(factors)

    def starts_factor(self) -> bool:
        """Whether a factor follows without a sign; a number never does."""
        token = self.next
        return token in STARTS_FACTOR or token.isalpha() or token[:1] == '"' or token == "|" and not self.bars

    def signed(self) -> tuple:
        return negative(self.power()) if self.take("+", "-") == "-" else self.power()

    def power(self) -> tuple:
        tree = self.atom()
        if self.take("^"):
            tree = power(tree, self.argument())
        return ("!", tree) if self.take("!") else tree

    def argument(self, digits: bool = True) -> tuple:
        """What a command or ^ is about; without `digits` one digit of several."""
        if not digits and self.next.isdigit():
            self.tokens[self.at : self.at + 1] = self.next
        return self.signed() if self.next == "-" else self.atom()

    def raw(self) -> str:
        """The text of an argument."""
        start = self.at
        while self.next == "{" or self.at > start and self.next not in ("", "}"):
            self.at += 1
        self.at += 1
        return "".join(self.tokens[start : self.at]).strip("{}")

    def atom(self) -> tuple:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("nested too deep")
        tree = self.shallow_atom()
        self.depth -= 1
        return tree

    def shallow_atom(self) -> tuple:
        token, self.at = self.next, self.at + 1
        if re.match(r"\.?\d", token):
            return self.number(token)
        if token in CONSTANTS:
            return ("constant", token)
        if token.isalpha() or token in GREEK or token[:1] == '"':
            name = token.strip('"').casefold() if len(token) > 3 else token.strip('"')
            while self.take("'"):
                name += "'"
            return ("name", name + "_" + self.raw() if self.take("_") else name)
        if token in (r"\angle", r"\triangle", r"\overline", r"\vec"):
            return ("name", token + self.raw() + "".join(iter(lambda: self.next.isalpha() and self.raw(), False)))
        if token == "{":
            return self.closed(self.relation(), "}")
        if token in CLOSING:
            return self.bracket(token)
        if token == r"\frac":
            return quotient(self.argument(digits=False), self.argument(digits=False))
        if token == r"\binom":
            return (token, self.argument(digits=False), self.argument(digits=False))
        if token == r"\sqrt":
            degree = self.closed(self.relation(), "]") if self.take("[") else number(2)
            return ("^", self.argument(), quotient(number(1), degree))
        if token in FUNCTIONS:
            return self.call(token)
        if token == r"\matrix":
            return self.matrix()
        if token in (r"\emptyset", r"\reals"):
            return REALS if token == r"\reals" else ("set",)
        raise Unreadable(f"{token!r} is not known")

    def closed(self, tree: tuple, end: str) -> tuple:
        self.need(end)
        return tree

    def number(self, digits: str) -> tuple:
        """A literal: 12, 1.5e6, a decimal that repeats, a mixed number."""
        value, (mantissa, _, exponent) = Fraction(digits), digits.lower().partition("e")
        decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
        if "." in digits and self.take(r"\overline", r"\bar", r"\dot"):
            period = self.raw()
            return number(value + Fraction(int(period), 10 ** len(period) - 1) / 10**decimals, "fraction")
        if self.next == r"\frac" and digits.isdigit():
            start, part = self.at, self.atom()
            if part[0] == "number" and 0 < part[1] < 1:
                return number(value + part[1], "fraction")
            self.at = start
        return number(value, "digits", decimals if "." in digits else 0)

    def bracket(self, opening: str) -> tuple:
        self.bars += opening == "|"
        items = self.items()
        brackets = opening + self.need(*CLOSING[opening])
        self.bars -= opening == "|"
        if opening == r"\{":
            return ("set", *items)
        if opening in "([":
            return items[0] if len(items) == 1 and brackets in ("()", "[]") else (brackets, *items)
        return (opening, *items)

    def call(self, name: str) -> tuple:
        """A function with its power, its base, and what it is of: all up to a sign or another function."""
        exponent = self.argument() if self.take("^") else None
        base = [self.argument()] if name == r"\log" and self.take("_") else []
        in_brackets = self.next in ("(", "{")
        factors = [self.atom() if in_brackets else self.signed()]
        while not in_brackets and self.starts_factor() and self.next not in FUNCTIONS:
            factors.append(self.power())
        tree = (name, product(factors), *base)
        return power(tree, exponent) if exponent else tree

    def matrix(self) -> tuple:
        """Rows of cells; one column is a vector, as (1, 2) is."""
        rows = [[self.relation()]]
        while not self.take(r"\endmatrix"):
            if self.need("&", r"\\") == "&":
                rows[-1].append(self.relation())
            elif self.next != r"\endmatrix":
                rows.append([self.relation()])
        is_column = all(len(row) == 1 for row in rows) and len(rows) > 1
        return ("()", *(row[0] for row in rows)) if is_column else ("matrix", *(("row", *row) for row in rows))


def number(value: Fraction | int, form: str = "digits", decimals: int = 0) -> tuple:
    return ("number", Fraction(value), form, decimals)


def negative(tree: tuple) -> tuple:
    is_literal = tree[0] == "number" and tree[1] >= 0
    return ("number", -tree[1], *tree[2:]) if is_literal else ("-", tree)


def quotient(above: tuple, below: tuple) -> tuple:
    """Of two numbers in digits a literal, reduced or not."""
    if above[0] == below[0] == "number" and above[2] == below[2] == "digits":
        value = above[1] / below[1]
        return number(value, "fraction" if value.denominator == abs(below[1]) != 1 else "unreduced")
    return ("/", above, below)


def product(factors: list) -> tuple:
    """Digits times a power of ten are a literal."""
    forms = [factor[2] if factor[0] == "number" else "" for factor in factors]
    if len(forms) == 2 and forms[0] == "digits" and forms[1].endswith("power of ten"):
        return number(factors[0][1] * factors[1][1], "power of ten")
    return ("*", *factors) if len(factors) > 1 else factors[0]


def power(base: tuple, exponent: tuple) -> tuple:
    """An integer power of 10 is a literal; 10^0 and 10^1 are none by themselves."""
    integer = exponent[0] == "number" and exponent[1].denominator == 1
    if base == number(10) and integer and abs(exponent[1]) <= LARGEST_ARGUMENT:
        return number(base[1] ** exponent[1], "trivial power of ten" if exponent[1] in (0, 1) else "power of ten")
    return ("^", base, exponent)


# --- trees and their values -------------------------------------------------------------------------------------------


def parts_of(tree: tuple) -> tuple:
    """The trees below a tree; of x = 5 the 5 alone."""
    if tree[0] in ("number", "name", "constant"):
        return ()
    return tree[2:] if tree[0] in ("relation", "named") else tree[1:]


def letters(tree: tuple) -> set[str]:
    return {tree[1]} if tree[0] == "name" else set().union(*map(letters, parts_of(tree)))


def value(tree: tuple, point: dict):
    """A real or complex number of mpmath. Raises one of FAULTS for what has no value or is too large."""
    kind, parts = tree[0], parts_of(tree)
    if kind == "number":
        return mp.mpf(tree[1].numerator) / tree[1].denominator
    if kind in ("name", "constant"):
        return point[tree[1]] if kind == "name" else +CONSTANTS[tree[1]]
    values = [value(part, point) for part in parts]
    if kind == "^":
        odd = parts[1][0] == "number" and parts[1][1].numerator % 2 == parts[1][1].denominator % 2 == 1
        return raised(*values, odd)
    if kind not in VALUES or kind not in UNBOUNDED and max(map(abs, values)) > LARGEST_ARGUMENT:
        raise Unreadable(f"{kind} has no value, or too large a one")
    return VALUES[kind](*values)


def raised(base, exponent, odd: bool):
    """A power that is not too large; of a number below 0 the odd root that is real."""
    if base != 0 and abs(exponent * mpmath.log10(abs(base))) > MOST_DIGITS:  # the logarithm in few digits is quick
        raise Unreadable("a power is too large")
    return -mp.power(-base, exponent) if odd and mp.im(base) == 0 > mp.re(base) else mp.power(base, exponent)


def factorial(number):
    if not mp.isint(number):
        raise Unreadable("a factorial of no integer")
    return mp.mpf(math.factorial(int(number)))


def values_at_points(*trees: tuple) -> list[tuple]:
    """The values of the trees where the letters are numbers drawn by chance: above 0 and below in all combinations
    of two."""
    names, rng, rows = sorted(set().union(*map(letters, trees))), random.Random(0), []
    for i in range(4 if names else 1):
        signs = (1 - i % 2 * 2, 1 - i // 2 * 2)
        point = {name: signs[k % 2] * mp.mpf(rng.randint(1, 999)) / rng.randint(100, 999) for k, name in enumerate(names)}
        rows.append(tuple(value(tree, point) for tree in trees))
    return rows


def close(a, b) -> bool:
    return bool(a == b or abs(a - b) < max(abs(a), abs(b)) * mp.mpf(10) ** -MOST_DIGITS)
