r"""Answers of mathematics: one spelling, the trees that are read from it, and their values.

`cleaned` applies the rules of RULES, one after the other. It returns ASCII, LaTeX and Greek
letters, with words and units in double quotes. A table of words has one spelling in each line, and
behind it the others.

Nothing is evaluated as Python or by a computer algebra system, and what is too large is not
computed. These are the kinds of trees:

    leaves       number, name (x, f', x_1, "cm"), constant (e, \pi)
    operations   +  *  /  -  ^  :  !  \sin  \abs  and so on
    collections  list, set, tuples and intervals by their brackets: ()  [), and unions \cup
    matrices     \matrix\endmatrix, its rows \\ and their cells &
    relation     a < b = c; its `value` is the signs between the parts
    named        x = 5 and x > 5, made by mathematics.py; its only part is the 5 or the interval,
                 and its `value` is the tree of the name

A sum has the kind +. Its terms have their own signs, so 2 - x is (+ 2 (- x)).
"""

import random
import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from math import prod
from operator import neg, truediv
from typing import NamedTuple

import mpmath


def table(text: str) -> dict[str, str]:
    """For each word of a table the first word of its line."""
    lines = [line.split() for line in text.splitlines()]
    return {word: words[0] for words in lines for word in words}


# --- one spelling ---------------------------------------------------------------------------------

# ␣ stands for a space, which ends the name of a command.
SPELLING_OF = table(
    r"""
    -          − – — ‒ ﹣ \setminus \backslash
    *          \times \cdot \ast × · ⋅ ∙ • ∗
    /          ∕ ⁄ ÷ \div
    \pm␣       ±
    \approx␣   ≈ ≃
    <          \lt
    >          \gt
    \le␣       <= \leq \leqslant ≤ ⩽
    \ge␣       >= \geq \geqslant ≥ ⩾
    \ne␣       != \neq ≠
    \in␣       ∈
    \cup␣      ∪
    ,␣         \lor \vee
    :          \colon
    \infty␣    ∞ \infinity

    (          \langle ⟨ 〈
    )          \rangle ⟩ 〉
    \{         \lbrace
    \}         \rbrace
    |          \lvert \rvert \vert \mid
    "          “ ” „
    '          ’ ‘ ′

    \binom␣    \dbinom \tbinom
    \frac␣     \dfrac \tfrac \cfrac \nicefrac \sfrac
    \sqrt␣     √
    \emptyset␣ ∅ \varnothing
    \ldots␣    \dots \cdots
    \reals␣    ℝ

    \pi␣       π
    α␣         \alpha
    β␣         \beta
    γ␣         \gamma
    δ␣         \delta
    ε␣         \epsilon \varepsilon
    η␣         \eta
    θ␣         \theta
    κ␣         \kappa
    λ␣         \lambda
    μ␣         \mu
    ξ␣         \xi
    ρ␣         \rho
    σ␣         \sigma
    τ␣         \tau
    φ␣         \phi \varphi
    ψ␣         \psi
    ω␣         \omega
    Δ␣         \Delta
    Γ␣         \Gamma
    Ω␣         \Omega
    ℓ␣         \ell

    ␣"deg"␣    ° \degree \circ
    %          \%
    ¤          \$
    ␣          \, \; \: \> \( \) \[ \] \quad \qquad \thinspace
"""
)
# In the singular. The last lines are parts of units, and words that name none.
UNIT_OF = table(
    """
    mm    millimeter
    cm    centimeter
    m     meter metre
    km    kilometer kilometre
    in    inch inches
    ft    foot feet
    yd    yard
    mi    mile
    g     gram
    kg    kilogram
    lb    pound £
    oz    ounce
    ml    milliliter
    l     liter litre
    s     sec second
    min   minute
    h     hr hour
    year  yr
    mi/h  mph
    $     ¤ dollar usd
    €     euro eur
    ¢     cent
    rad   radian
    deg   degree
    c     celsius
    f     fahrenheit
    %     percent percentage pct
    /     per
    ^2    square sq
    ^3    cubic
    ␣     unit st nd rd th
"""
)
# Words behind a number that say that the number alone is not the answer.
NO_UNIT = set(
    """
    rejected extraneous false invalid remainder
    not isnt is are was were be if than more less least most fewer wrong incorrect maybe either
    neither nor but plus minus squared cubed factorial mod over choose root to through until between
    about dozen score gross pair couple lakh crore thousand million billion trillion half halves
    bc bce third quarter fourth fifth sixth eighth tenth hundred hundredth thousandth double twice
    triple rather except unless possibly rounded approximately negative below roughly or so ten
    """.split()
)
TURNED = {">": "<", r"\ge": r"\le"}

# Parts of patterns
TEXT = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname\*?|boldsymbol)[ ]?"
WORDS = r"(?!(?:e|i|or|and)[ ]*\})([^\W\d_][^\d\\\"${}]*?)"  # in braces; e and i are numbers
MATRIX = r"\{(?:[pbB]|small)?(?:matrix|array)\}"
GROUP = r"((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)"  # with braces in braces
KNOWN = f"(?:{'|'.join(filter(str.isalpha, UNIT_OF))})s?"  # a unit
POWER = r"(?![a-z])\.?(?:[ ]?\^[ ]?\{?-?\d\}?)?[ /]*"  # of a unit, and what joins it to the next
UNIT = r'/? ?"[^"]*"(?= *(?:$|[,;)\]}]|\\\}))|[¤€£¥₹¢]'  # behind what it belongs to

RULES = {  # a pattern, and what is written instead
    # 3\\sqrt2 → 3\sqrt2
    r"(?<!\\)\\\\(?=[a-z]{2})": r"\\",
    # \left(5\\[4pt]\phantom{-}2\right. → (5\\2
    r"""(?x) \\! [ ]*
            | \\ (?: left | right | middle | [bB]ig[glr]* | [a-z]+style | (?:no)?limits | bf
                   | underline | boxed | fbox ) (?![a-zA-Z]) \.?
            | \\ (?:text)?color [ ]? \{\w+\}
            | (?<=\\\\) \s? \[-?[\d.]+ [ ]? [a-z]{2}\] | \\phantom [ ]? \{[^{}]*\}
            | [\u00ad\u200b-\u200f\u2060\ufeff]         # characters without a width""": "",
    # x\leq1 → x\le 1
    r"""(?x) \\[a-zA-Z]+ | \\.      # a command
            | [<>]= | (?<!\d)!=         # != in plain text, but not in 5!=120
            | [^\w\s] | [^\W\d_a-zA-Z]  # a sign, or a letter that is not Latin""": lambda sign: (
        SPELLING_OF.get(sign[0], sign[0]).replace("␣", " ")
    ),
    # 5\ 6 → 5 6, 3½ → 3 ½
    r"(?<!\\)\\ |(?<!~)~(?!~)|\s+|(?=[¼-¾⅐-⅞])": " ",
    # 5\text{ cm} → 5 "cm"
    rf"{TEXT}\{{ *{WORDS} *\}}": r' "\1" ',
    # x² → x^{²}
    r"[⁰¹²³⁴-⁹⁻]+": r"^{\g<0>}",
    # log₂ 3 → log_{₂} 3
    r"[₀-₉]+": r"_{\g<0>}",
    # wide and bold characters
    r"[^\x00-\x7f]": lambda sign: unicodedata.normalize("NFKC", sign[0]),
    # \begin{array}{cc}1 → \matrix 1
    rf"(?x) \\begin [ ]? {MATRIX} (?: [ ]? \{{[clr| ]*\}} )?": r"\\matrix ",
    # 1\\\end{matrix} → 1\endmatrix
    rf"(?:\\\\)? *\\end ?{MATRIX}": r"\\endmatrix ",
    # \mathbf{5} →  5
    rf"{TEXT}(?:\{{([^{{}}]*)\}}|(?=\{{))": r" \1 ",
    # 2pi → 2\pi
    r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|log|ln|exp|pi|infinity)(?![a-zA-Z])": r"\\\1 ",
    # No solution. → \emptyset
    r'\\\{ ?\\\}|(?i:^[" ]*no (?:real )?solutions?[". ]*$)': r"\\emptyset ",
    # \mathbb{R} → \reals
    r'\\mathbb ?\{? ?R ?\}?|(?i:^[" ]*all real(?:s| numbers)[". ]*$)': r"\\reals ",
    # A or C → A/C
    r"^(?=.*[A-Z]|.*[a-z]{3})([^\d=<>\\+*/^-]+?),? +or +([^\d=<>\\+*/^-]+)$": r"\1/\2",
    # 1, 2, and 3 → 1, 2, 3
    r",? *\b(?:or|and(?!.{0,300}(?:[<>]|\\[gl]e(?![a-z]))))\b *": ", ",
    # $5 → ¤5
    r"^([^$]*)\$([^$]*)$": r"\1¤\2",
    # $5$ →  5
    r"\$": " ",
    # 12{,}345 → 12,345
    r"(?<=\d)\{([,:])\}(?=\d)": r"\1",
    # {1\over2} → \frac{1}{2}
    r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}": r"\\frac{\1}{\2}",
    # 3 1/2 → 3\frac{1}{2}
    r"(?x) (?<![\d.^_]) (\d+) [ ]+ (\d+) [ ]?/[ ]? (\d+) (?![\d.])": r"\1\\frac{\2}{\3}",
    # \frac12 → \frac{1}{2}
    r"\\frac ?(\d) ?(\d)": r"\\frac{\1}{\2}",
    # 10^{6} → 1e6
    r"(?<![\d.])10 ?\^ ?(?:(-?\d{1,3})|\{ ?(-?\d{1,3}) ?\})(?![\d.])": r"1e\1\2 ",
    # 1.5 * 1e6 → 1.5e6
    r"(?<![\d.^}a-zA-Z])([\d.]+) ?[*x] ?1e": r"\1e",
    # 12,345 → 12345
    r"""(?x) (?<! [\d.,] ) (?<! \d[ ] ) \d{1,3}
            (?: (?:,\d{3})+ (?! [^([]{0,300} [])] | [^{]{0,300} \\\} ) | (?:[ ]\d{3})+ )
            (?! ,?\d | [ ]\d )""": lambda digits: re.sub("[ ,]", "", digits[0]),
    # (101)_{2} → 101 "base 2"
    r"""(?x) ^ [ ]* \(? (-?[A-F]*\d[\dA-F]* | [A-F]+(?=\)?_\{?16)) \)?
            (?: [ ]?_[ ]? | [( "]+ base[ ]? ) ["{( ]* (\d+) [)}" ]* [. ]* $
        """: r'\1 "base \2"',
    # 07:05 → t_{7:05}, 10:30 → t_{10:30}, but 9:16 may be a ratio
    r"(?<![\d:.{])0?(\d{1,2}):(0\d|[1-5][05])(?![\d:.])": r"t_{\1:\2}",
    # |x| → \abs{x}, \lfloor x\rfloor → \floor{x}
    r"\|([^|]*)\|": r"\\abs{\1}",
    r"\\l(floor|ceil)((?:(?!\\l[fc]).)*?)\\r\1": r"\\\1{\2}",
    # \matrix 1\\2\endmatrix → (1,2)
    r"\\matrix ([^&]*?\\\\[^&]*?)\\endmatrix": lambda m: f"({m[1].replace(chr(92) * 2, ',')})",
    # square meters → meters square
    r"\b(square|sq|cubic) +([^\W\d_]+)": r"\2 \1",
    # 12^{th} → 12 "th"
    r'(?x) \^ [ ]? \{? [ ]? "? (deg|st|nd|rd|th) (?![a-z]) "? [ ]? \}?': r' "\1"',
    # 68 "deg" F → 68 "deg F"
    r'"deg" *"?([CF])\b"?': r'"deg \1"',
    # 5% → 5 "%"
    r'(?<!")%': ' "%" ',
    # 5 apples → 5 "apples", and so 5 (apples)
    rf"""(?xi) ^ ( [-\d./]+ (?: e\d+ )? | -?\d*\\frac\{{\d+\}}\{{\d+\}} )
            [ ]+ \(? ( (?: (?: (?! [a-z]{{3}} ) {KNOWN} | [a-z]{{3,}} ) {POWER} )+ )
            \)? $""": r'\1 "\2"',
    # 5\pi cm → 5\pi  "cm"
    rf"""(?xi) (?<! [\\a-z"] ) ( (?: (?=[a-z]{{2}}) {KNOWN} {POWER} )+ ) (?= $ | , )""": r' "\1"',
    # "cm"^2 → "cm^2"
    r'"\.? ?\^ ?\{?(-?\d)\}?': r'^\1"',
    # "km"/"h" → "km / h"
    r'(?<=[a-z\d]) *" ?(/?) ?"(?=[a-zA-Z])': r" \1 ",
    # =5  6. → 5 6, x \in (1,2) → (1,2), A rhombus → rhombus
    r"""(?x) ^ (?: [ ] | = | \\approx )+ (?: [a-z] [ ]* \\in (?![a-z]) )?     # before an answer
            | ^ [a-z] [ ]* \\in (?![a-z])
            | ^ [" ]* (?: an? | An? (?=[ ][a-z]) | [Tt]he ) [" ]+ (?=[^\W\d_]{3})
            | [ ]+ $ | (?<= [ ] ) [ ]+          # behind it, and in it
            | (?<= [^. ] ) [ ]* (?: [.,;:] | \\\\ ) [ ]* $""": "",
    # **5** → 5
    rf'^(?:\*\*?([^*]+)\*\*?|`([^`]+)`|"([^"]*)"|\{{{GROUP}\}})$': r"\1\2\3\4",
    # 3, x = 1 \pm 2 → 3, x = 1 +2, x = 1 -2
    r"""(?x) (?: ^ | (?<=,) | (?<=\\\{) ) ( (?: (?!\\\{) [^,] )*? ) \\pm
            ([^,]*?) (?= [ ]* (?: , | \\\} | $ ) )""": r"\1+\2,\1-\2",
}
PUNCTUATION = r"(?<!\d)[^\w,]|[^\w,](?!\d)"  # but not in numbers

CHOICE = r"""(?x) (?: (?i: option | choice | answer ) [ ]? :? [ ]? )?
    (?: \( ([A-Z]) \) | ([A-Z]) (?= [.):] (?:[ ]|$) | $ ) )     # the letter: (D), D. or D alone
    [.):, ]* (.*)"""
# Letters in the beginning, three in a row somewhere, but none alone beside - or /: these are names.
# Or words without other signs, such as ABCD.
SENTENCE = r"""(?x) (?= .* [^\W\d_]{3} ) (?! .* (?: \b[a-z][/-] | [/-][a-z]\b ) )
        [^\W\d_] [\w ,.'()/&:!?-]*
    | [^\W\d_]{2,} | [^\W\d_]+ (?: [ ,]+ [^\W\d_]+ )+"""


@lru_cache
def cleaned(text: str) -> str:
    """The text in one spelling, without what only wraps or spaces it."""
    for _ in range(2):  # twice, for \text{\textbf{cm}} and **"5"**
        for pattern, replacement in RULES.items():
            text = re.sub(pattern, replacement, text)
    return text.strip()


def as_choice(text: str) -> tuple[str, str]:
    """The letter of a multiple choice such as D, (D) 12 and D. 12, '' for none; and the text behind
    it, cleaned."""
    text = cleaned(text)
    match = re.fullmatch(CHOICE, text.replace('"', ""))
    return (match[1] or match[2], cleaned(match[3])) if match else ("", text)


def as_words(text: str) -> str:
    """The words that are compared, if the text is a sentence, a word, or letters such as ABCD; ''
    for other texts."""
    text = text.replace('"', " ").strip().casefold()
    return re.sub(PUNCTUATION, "", text) if re.fullmatch(SENTENCE, text) else ""


def one_unit(unit: str) -> str:
    """A unit in one spelling: square meters, sq m and m^2 are all m^2. Raises ValueError for a word
    that is no unit."""
    spelled = ""
    for word in re.findall(r"[^\W\d_]+|\S", re.sub('[".{}]', "", unit.casefold())):
        singular = word.removesuffix("s") if len(word) > 2 else word
        if NO_UNIT & {word, singular}:
            raise ValueError(f"{word} is no unit")
        spelled += UNIT_OF.get(word, UNIT_OF.get(singular, singular))
    return spelled.replace("␣", "")


# --- trees ----------------------------------------------------------------------------------------

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


def items_of(tree, *kinds: str) -> tuple:
    """The parts of a tree of one of these kinds; another tree is the only item."""
    return tree.parts if tree.kind in kinds else (tree,)


REPEATING = r"(\d*\.(\d*))\\(?:overline|bar|dot)[ ]?\{?(\d+)\}?"  # 0.1\overline{6}
MIXED = r"(\d+)[ ]*\\frac[ ]*\{[ ]*(\d+)[ ]*\}[ ]*\{[ ]*(\d+)[ ]*\}"  # 3\frac{1}{2}
TOKEN = rf"""(?x) {REPEATING} | {MIXED}
    | (?: \d+\.?\d* | \.\d+ ) (?: [eE][+-]?\d{{1,3}} (?![\w.]) )?     # 12, .5, 1.5e6
    | \\[a-zA-Z]+ | \\. | "[^"]*"                                     # a command, or words
    | [^\W\d_] (?: ' | _[ ]? (?: \w | \{{[^{{}}]*\}} ) )*             # x, f', x_1
    | \S                                                              # any other sign"""
# Signs between parts, behind the kind of tree that they make. Those of later lines bind more.
KIND_OF = table(
    r"""
    list      , ;
    \\        \\
    &         &
    relation  = \approx < > \le \ge \ne
    \cup      \cup
    :         :
    +         + -
"""
)
LEVELS = [*dict.fromkeys(KIND_OF.values())]
# Brackets that may stand around parts: the kinds of trees that they make.
BRACKETS = r"() (] [) [] {} \{\} \matrix\endmatrix".split()
OPENING = r"( [ { \{ \matrix".split()
# What `form` leaves out
UNWRITTEN = {"", *r"() number name constant named + * / : list \{\} digits fraction None 1".split()}
GROUPS = "() [] {}".split()  # make no tree around one part
ARITHMETIC = set("+-*/^")
# Families of functions. An answer may use all of one if the wanted answer uses one of them.
FAMILY_OF = table(
    r"""
    \sin    \cos \tan \cot \sec \csc \sinh \cosh \tanh
    \arcsin \arccos \arctan
    \log    \ln
    \floor  \ceil
    \abs
"""
)
FAMILY_OF[r"\exp"] = "e"
CONSTANTS = {"e": mp.e, "i": mp.j, r"\pi": mp.pi, r"\infty": mp.inf, '"deg"': mp.degree}
VALUES = {
    "+": lambda *terms: sum(terms),
    "*": lambda *factors: prod(factors),
    "-": neg,
    "/": truediv,
    ":": truediv,
    "^": mp.power,
    "!": mp.factorial,
    r"\binom": mp.binomial,
    **{name: getattr(mp, name[1:].replace("arc", "a"), abs) for name in FAMILY_OF},
}
# How factors begin that may stand without a sign before them. Digits do so in n 2^k.
STARTS_FACTOR = rf"""(?x) [^\W\d_] | ["{{(\[] | \d\S*[ ]\^
    | \\(?: binom | frac | sqrt | pi | {"|".join(FAMILY_OF).replace(chr(92), "")} )\b"""
LEAVES = {name: Tree("constant", value=name) for name in CONSTANTS}
HIGHEST = LEAVES[r"\infty"]
LOWEST = Tree("-", (HIGHEST,))
LEAVES |= {r"\emptyset": Tree(r"\{\}"), r"\reals": Tree("()", (LOWEST, HIGHEST))}


def read(text: str) -> Tree:
    """The tree of an answer; several with commas are a list. Raises one of FAULTS for others."""
    reader = Reader([match[0] for match in re.finditer(TOKEN, text)] + [""])
    tree = reader.level()
    if reader[0]:
        raise ValueError(f"{reader[0]!r} is too much")
    return tree


class Reader(list):
    """Recursive descent over the tokens that are left: each method reads what its name says from
    the first ones, and returns its tree."""

    def take(self, *wanted):
        """Take the next token if it is one of these; '' if it is not."""
        return self.pop(0) if self[0] in wanted else ""

    def level(self, level=0):
        """Parts with signs of this level of LEVELS, or of later ones, between them."""
        if level == len(LEVELS):
            return self.product()
        kind = LEVELS[level]
        parts, signs = [self.level(level + 1)], []
        while KIND_OF.get(self[0]) == kind:
            signs.append(self[0] if kind == "+" else self.pop(0))  # a term takes its own sign
            parts.append(self.level(level + 1))
        if not signs:
            return parts[0]
        if {*signs} <= TURNED.keys():  # 2 > x is x < 2
            signs, parts = [TURNED[sign] for sign in signs[::-1]], parts[::-1]
        return Tree(kind, tuple(parts), tuple(signs) if kind == "relation" else None)

    def product(self, signs=("*", "/"), ends=()):
        """Factors with these signs or none between them. It stops before one of `ends`."""
        tree = self.power()
        while self[0] in signs or (
            self[0] not in ends and re.match(STARTS_FACTOR, " ".join(self[:2]))
        ):
            sign = self.take(*signs)
            factor = self.power()
            if sign == "/":
                tree = divided(tree, factor)
            else:
                tree = Tree("*", (*items_of(tree, "*"), factor))
        return tree

    def power(self):
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

    def argument(self):
        """The argument of a command or of ^: a group in braces, or one token."""
        return self.power() if self[0] == "-" else self.atom()

    def atom(self):
        token = self.pop(0)
        if re.match(r"\d|\..", token):
            return self.number(token)
        if token in LEAVES:
            return LEAVES[token]
        if re.match(r'[^\W\d_]|"', token):
            return Tree("name", value=re.sub(r'[{} "]', "", token))
        if token in OPENING:
            items = items_of(self.level(), "list")
            kind = token + self.pop(0)
            if kind not in BRACKETS:
                raise ValueError(f"{kind} are no brackets")
            return items[0] if kind in GROUPS and len(items) == 1 else Tree(kind, items)
        if token == r"\binom":
            return Tree(token, (self.argument(), self.argument()))
        if token == r"\frac":
            return divided(self.argument(), self.argument())
        if token == r"\sqrt":  # a root is a power, of the form "root"
            degree = self.atom() if self[0] == "[" else number(2)
            exponent = divided(number(1), degree)._replace(form="root")
            return Tree("^", (self.argument(), exponent))
        if token in FAMILY_OF:
            return self.function(token)
        raise ValueError(f"{token!r} is not known")

    def number(self, digits):
        """A literal: 12, 1.5e6, whose form is the text itself, 0.1\\overline{6}, or the mixed
        number 3\\frac{1}{2}."""
        if match := re.fullmatch(REPEATING, digits):
            start, decimals, period = match.groups()
            ninths = 10 ** len(decimals) * (10 ** len(period) - 1)
            return number(Fraction(f"0{start}") + Fraction(int(period), ninths), "repeating")
        if match := re.fullmatch(MIXED, digits):
            whole, above, below = map(int, match.groups())
            return number(whole + Fraction(above, below), "mixed")
        value = Fraction(digits)
        if "e" in digits:
            return number(value, digits)
        form = "decimal" if value.denominator > 1 else "digits"
        return number(value, form, len(digits.partition(".")[2]))

    def function(self, name):
        """Such as \\sin^2 x or \\log_2(8). Without brackets the argument ends before the next
        function or sign."""
        exponent = self.take("^") and self.argument()
        base = ()
        if name == r"\log":
            base = (self.argument() if self.take("_") else number(10),)
        if self[0] in ("(", "{"):
            argument = self.atom()
        else:
            argument = self.product(signs=(), ends=FAMILY_OF)
        inverse = name.replace("\\", r"\arc")
        if exponent and exponent.value == -1 and inverse in FAMILY_OF:  # \sin^{-1} is \arcsin
            name, exponent = inverse, ""
        tree = Tree(name, (argument, *base))
        return Tree("^", (tree, exponent)) if exponent else tree


def number(value, form="digits", decimals=0):
    return Tree("number", (), Fraction(value), form, decimals)


def divided(above, below) -> Tree:
    """The tree of a division; a number if people write numbers so: as a fraction. Its form says
    whether the first factors reduce, as in 6x/9."""
    first, second = items_of(above, "*")[0], items_of(below, "*")[0]
    form = ""
    if first.form == second.form == "digits":
        quotient = first.value / second.value
        form = "fraction" if quotient.denominator == abs(second.value) else "unreduced"
        if (first, second) == (above, below) and quotient.denominator > 1:  # 10/2 is a task
            return number(quotient, form)
    return Tree("/", (above, below), form=form)


# --- what is asked of trees -----------------------------------------------------------------------
# `tree` is a Tree in all of these, and a function whose docstring begins with "Whether" says so
# with a bool.


def letters(tree):
    """The set of the names in a tree."""
    return {tree.value} if tree.kind == "name" else set().union(*map(letters, tree.parts))


def operations(tree):
    """The set of the operations of a tree, which decide whether an answer is written in an accepted
    way. A number has none. "* of numbers" is another operation than "*", so that a wanted 2 * x
    does not allow 2 * 3."""
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
        numbers = [all(name.endswith("of numbers") for name in part) for part in of_parts]
        if not all(numbers):
            found.add(kind)
        if all(numbers) or sum(numbers) > 1:
            found.add(f"{kind} of numbers")
    elif kind in VALUES:
        found.add(FAMILY_OF.get(kind, kind))
    return found


def is_fraction(tree):
    return tree.kind == "number" and tree.value.denominator != 1


def form(tree) -> list[str]:
    """How a tree is written, but for brackets, the order, and the name of a value: its numbers,
    letters, functions and minus signs, sorted. Of two trees with one value but two forms, one is a
    task that leads to the other: 2x + 3x and 5x, x^2 - 1 and (x - 1)(x + 1)."""
    signs = [tree.kind, tree.form]
    if tree.kind != "named":
        signs += re.findall("-|[^/-]+", str(tree.value))  # the numbers above and below a line
    written = [sign for sign in signs if sign not in UNWRITTEN]
    return sorted(sum(map(form, tree.parts), written))


def is_task(tree):
    """Whether there is a fraction that reduces, a product of sums or roots, or a power of 0. The
    sides of an equation may be written in any way."""
    return tree.kind != "relation" and (
        tree.form == "unreduced"
        or factors(tree) > 1
        or tree.kind == "^"
        and tree.parts[1] == number(0)
        or any(map(is_task, tree.parts))
    )


def factors(tree):
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


def value(tree, point):
    """The value of a tree with the dict `point` for its letters. Raises one of FAULTS if
    there is none."""
    kind = tree.kind
    if kind == "number":
        return mp.convert(tree.value)
    if kind == "name":
        return point[tree.value]
    if kind == "constant":
        return +CONSTANTS[tree.value]
    values = [value(part, point) for part in tree.parts]
    if kind == "^" and values[0]:
        digits = values[1] * mpmath.log10(abs(values[0]))  # in few digits: quick
        if abs(digits) > MOST_DIGITS:
            raise ValueError("a power is too large")
    grows = kind[0] in "!\\" and kind not in (r"\ln", r"\log", r"\abs")
    if grows and max(map(abs, values)) > LARGEST_ARGUMENT:
        raise ValueError(f"the argument of {kind} is too large")
    result = VALUES[kind](*values)
    if mp.im(result) and not any(map(mp.im, values)) and letters(tree):
        raise ArithmeticError("there is no real value")
    return result


def values_at_points(*trees):
    """Yields the values of the trees at six random points, or once if there are no letters. At the
    first point letters are complex numbers near positive ones: so roots have values. At the others
    some are negative: so x is neither |x| nor the root of x^2. Beside floors n and the like are
    whole, and other letters at each second point. A point is left out if there is no real value."""
    rng, point = random.Random(0), {}
    names = sorted(letters(Tree("list", trees)))
    has_steps = any(r"\floor" in operations(tree) for tree in trees)  # alike at most points
    for k in range((200 if has_steps else 6) if names else 1):
        for name in names:
            point[name] = mp.mpf(rng.uniform(-10, 10))
            if has_steps and (k % 2 or name in [*"ijklmn"]):
                point[name] = mp.nint(point[name])
            elif k == 0:
                point[name] = mp.mpc(rng.uniform(0.1, 10), rng.uniform(0, 0.1))
        try:
            yield [value(tree, point) for tree in trees]
        except FAULTS:
            if k == 0:
                raise


def close(a, b):
    """Whether two values agree in MOST_DIGITS digits."""
    return a == b or mp.almosteq(a, b, mp.mpf(10) ** -MOST_DIGITS, 0)
