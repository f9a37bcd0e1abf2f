r"""Mathematics with a final answer in \boxed{}: right is the wanted answer, written in any accepted way.

What counts is the last \boxed{} after the last `</think>`, and nothing else: an answer without a box is wrong, and so
is naming several answers in the hope that one is it. Of a text without `</think>` all is judged, unless it opens
thinking by `<think>` and never closes it.

An answer may use the operations that the wanted one uses. Beyond that it may use literals: digits, a fraction, a mixed
number, a percentage, a power of ten. A task that evaluates to the answer, as 5! does to 120, is wrong. A grammar of its
own reads the answer (`Reader`); nothing is evaluated as Python or by a computer algebra system. Then numbers are
compared exactly, roots and letters by many digits at random points. What cannot be read, or is too large, is wrong.
"""

import math
import random
import re
import unicodedata
from fractions import Fraction
from functools import lru_cache, reduce

import mpmath

from data import Problem

START_OF_THINKING, END_OF_THINKING = "<think>", "</think>"
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_ANSWER = 1000  # characters; what is longer is only compared as text
DEEPEST = 20  # brackets, fractions and roots within each other
MOST_BITS = 20_000  # of an exact number
LARGEST_ARGUMENT = 1000  # of exponential, trigonometric and other functions
DIGITS = 60  # of numbers that are not exact; two that agree in half of them are the same


class Unreadable(Exception):
    """This is no answer in the language of the reader, or it is too large."""


FAULTS = (Unreadable, ArithmeticError, ValueError, RecursionError)  # of reading and computing


# --- the answer in a completion ---------------------------------------------------------------------------------------


def problem(text: str, answer: str) -> Problem:
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
    prompt = text.strip() if "\\boxed" in text else f"{text.strip()}\n\n{INSTRUCTION}"
    return Problem(prompt, answer.strip(), task="data.mathematics")


def score(problem: Problem, completion: str) -> bool:
    """Whether the last box after the thinking holds the answer, and not a part of the problem that evaluates to it."""
    said = completion.rpartition(END_OF_THINKING)[2]
    answer = None if START_OF_THINKING in said else last_boxed(said)
    return answer is not None and equal(problem.answer, answer) and not copied(problem, answer)


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{} or \\fbox{} that is in no other, or behind a \\boxed without braces up to the
    next space or dollar sign; None without one, or when its braces do not close."""
    closed_at, opened = {}, []
    for brace in re.finditer(r"\\.|[{}]", text, flags=re.DOTALL):  # what is behind a backslash is no brace
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closed_at[opened.pop()] = brace.start()
    content, end = None, 0
    for box in re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s${}]*)", text):
        if box.start() < end:  # in another
            continue
        content = box[1]
        if content == "{":
            end = closed_at.get(box.end() - 1, 0)
            content = text[box.end() : end] if end else None
    return content


def copied(problem: Problem, answer: str) -> bool:
    """Whether the answer is an expression or inequality of the problem that is not written as the wanted answer is."""
    given, wanted = squeezed(cleaned(answer)), squeezed(cleaned(problem.answer))
    if given == wanted or as_words(given) or as_tree(given) == as_tree(wanted) or not is_task(given):
        return False
    start = r"(?<![\d.^])" + r"\b" * given[0].isalnum()
    return bool(re.search(rf"{start}{re.escape(given)}(?![\w^])", squeezed(cleaned(problem.prompt))))


# --- two answers, as texts --------------------------------------------------------------------------------------------


def equal(reference: str, answer: str) -> bool:
    """Whether an answer in LaTeX or plain text is the reference written in an accepted way. Not symmetric: the
    reference says which operations may be used, and which units count."""
    if max(len(reference), len(answer)) > LONGEST_ANSWER:
        return reference.strip() == answer.strip()
    wanted, given = cleaned(reference), cleaned(answer)
    if not given:
        return False
    if squeezed(wanted) == squeezed(given):
        return True
    if as_choice(wanted) or any(as_choice(given)[1:]):
        return same_choice(wanted, given)
    if as_words(wanted):
        return as_words(wanted) == as_words(given)
    if (time := as_time(wanted)) and (time[2] or as_time(given)):
        other = as_time(given)
        return time[:2] == other[:2] and time[2] in ("", other[2])
    try:
        return same_quantity(wanted, given)
    except FAULTS:
        return False


# fmt: off
CHARACTERS = {
    "−–—‒﹣": "-", "×·⋅∙•∗": r"\cdot ", "∕⁄": "/", "≤⩽": r"\le ", "≥⩾": r"\ge ", "≠": r"\ne ", "≈≃": r"\approx ",
    "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "φ": r"\phi ", "ω": r"\omega ",
    "λ": r"\lambda ", "∪": r"\cup ", "∅": r"\emptyset ", "°": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "∈": r"\in ",
    "⟨〈": r"\langle ", "⟩〉": r"\rangle ", "∠": r"\angle ", "“”„": '"', "’‘": "'",
}
CHARACTERS = str.maketrans({character: latex for many, latex in CHARACTERS.items() for character in many})
END = r"(?![a-zA-Z])"  # of a command
REWRITTEN = [(re.compile(pattern), new) for pattern, new in [  # one after the other
    # what says nothing, spaces, other names of the same
    (rf"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?[lrm]?|(?:display|text)style|(?:no)?limits){END}|\\!", ""),
    (rf"(?<!\\)\\[,;:> ]|(?<!~)~(?!~)|\\q?quad{END}|\\(?:thin|med|thick)space{END}|\s+", " "),
    (rf"\\[dtc]frac{END}", r"\\frac"), (rf"\\[dt]binom{END}", r"\\binom"),
    (rf"\\leq(?:slant)?{END}|<=", r"\\le "), (rf"\\geq(?:slant)?{END}|>=", r"\\ge "), (rf"\\neq{END}|!=", r"\\ne "),
    (rf"\\lt{END}", "<"), (rf"\\gt{END}", ">"), (rf"\\(?:times|ast){END}", r"\\cdot "),
    (r"\\lbrace", r"\\{"), (r"\\rbrace", r"\\}"), (rf"\\varnothing{END}|\\\{{ ?\\\}}", r"\\emptyset "),
    (r"\\\\ ?\[[^\]]*\]", r"\\\\"),
    (r"\\begin ?\{(?:[pbB]|small)?matrix\}|\\begin ?\{array\} ?\{[clr| ]*\}", r"\\matrix "),
    (r"\\end ?\{(?:(?:[pbB]|small)?matrix|array)\}", r"\\endmatrix "),
    (r"\\mathbb ?R|ℝ", r"\\mathbb{R}"),
    # words
    *[(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname\*?) ?\{([^{}]*)\}",
       lambda m: quoted(m[1]))] * 2, (r"\\(?:text|math)(?:bf|rm|it) ?(?=\{)", ""),
    (r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|log|ln|exp|pi)(?![a-zA-Z])", r"\\\1 "),
    (r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])", r"\\infty "),
    (rf",? ?(?:\b(?:or|and)\b|\\(?:lor|vee){END}) ?", ", "), (r",[ ,]*,", ","),
    # money, percent, degrees
    (r"\\\$|\b(?:US\$|USD) ?(?=\d)", "¤"), (r"\bEUR ?(?=\d)", "€"), (r"\\?%", ' "%" '),
    (rf"\^ ?\{{? ?\\circ{END} ?\}}?|\\degree{END}", ' "°" '), (r'"°" *"?([CF])(?![a-z])"?', r'"°\1"'),
    (r"^([^$]*)\$([^$]*)$", r"\1¤\2"), (r"\$|(?<!\\)\\[()\[\]]", " "),  # one dollar is money, two are for mathematics
    # digits: groups of three, mixed numbers, millions
    (r"(?<=\d)\{,\}(?=\d)", ","), (r"(?<![\d.^_])(\d+) +(\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.,])(?<!\d )\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?!,?\d| \d)", lambda m: joined(m)),
    *[(rf'(?<=\d) *("?){name}(?![a-z]) ?', rf"\\cdot 10^{{{power}}} \1") for name, power in
      {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}.items()], ('""', ""),
    (r'\\frac ?\{ ?("[^"]*") ?\} ?\{ ?("[^"]*") ?\}', r"\1/\2"),  # of units
    (r"^ ?\\\{ ?[a-z] ?(?:\\in ?\\mathbb\{R\} ?)?(?:\\mid|\\vert|[|:])(.*)\\\}$", r"\1"),  # { x | x > 2 }
]]
WRAPPED = [r"\*\*(.+)\*\*", r"\*(.+)\*", r"__(.+)__", r"`+([^`]+)`+", '"([^"]*)"', "'([^']*)'",
           r"(?:\\(?:boxed|fbox) ?)?\{(.*)\}", r"(?:=|\\approx)(.*)", r"(.*[^.])[.,;:]", r"(.*)\\\\"]
# fmt: on


@lru_cache(maxsize=1000)
def cleaned(text: str) -> str:
    """The text in one spelling: ASCII and LaTeX, words in double quotes, without what only wraps or spaces it."""
    normalize = lambda text: unicodedata.normalize("NFKC", text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁻]+", lambda digits: f"^{{{normalize(digits[0])}}}", text)
    text = re.sub(r"[₀-₉]+", lambda digits: f"_{{{normalize(digits[0])}}}", text)
    text = re.sub(r"(?=[¼-¾⅐-⅞])", " ", text)  # 3½ is no 31/2
    text = re.sub(r"√ ?(\d+|[a-z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt ").replace("ℝ", r"\mathbb{R}")
    text = normalize(text).translate(CHARACTERS)
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")  # of no width
    for pattern, new in REWRITTEN:
        text = pattern.sub(new, text)
    text = re.sub(" +", " ", text)
    before = None
    while text != before:
        before = text = text.strip()
        for pattern in WRAPPED:
            match = re.fullmatch(pattern, text)
            if match and is_balanced(match[1]):
                text = match[1].strip()
    return text


def quoted(text: str) -> str:
    """The content of LaTeX's \\text{}: words in quotes, but not numbers, signs and constants."""
    text = text.strip()
    if re.fullmatch(r",? *(?:or|and)", text):
        return ", "
    return f' "{text}" ' if re.fullmatch(r"[^\W\d_][^\d\\\"$]*", text) and text not in ("e", "i") else f" {text} "


def joined(groups: re.Match) -> str:
    """Digits in groups of three as one number; but within brackets commas separate numbers."""
    before = groups.string[: groups.start()]
    inside = len(re.findall(r"[(\[]|\\\{", before)) > len(re.findall(r"[)\]]|\\\}", before))
    return groups[0] if inside and "," in groups[0] else re.sub("[ ,]", "", groups[0])


def is_balanced(text: str) -> bool:
    """Whether each brace that closes was opened in the text."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return False
    return True


def squeezed(text: str) -> str:
    return re.sub(r" (?!\w)|(?<!\w) ", "", text)


# --- letters, words and times -----------------------------------------------------------------------------------------

NO_UNIT = set(  # behind a number these say that it is not the answer
    "not isnt is are was were be if than more less least most fewer wrong incorrect false maybe either neither"
    " nor but plus minus times squared cubed factorial mod modulo gcd lcm over choose root to through until"
    " between about dozen dozens score half halves third thirds quarter fourth fourths fifth fifths sixth sixths"
    " eighth eighths tenth tenths hundred hundredth hundredths thousandth thousandths one two three four five six"
    " seven eight nine ten zero pi double twice triple instead rather except unless possibly alternatively th st"
    " nd rd rounded approximately negative below base roughly estimated".split()
)


def as_choice(text: str) -> tuple[str, ...]:
    """The letter of a multiple choice, and what stands behind it: D, (D) 12, D. 12; () for anything else."""
    pattern = r"(?:(?:option|choice|answer) ?:? ?)?(?:\(([A-Z])\)|([A-Z])(?=[.):](?: |$)|$))[.):, ]*(.*)"
    match = re.fullmatch(pattern, text.replace('"', ""), flags=re.IGNORECASE)
    letter = match and (match[1] or match[2])
    return (letter, match[3]) if match and letter.isupper() else ()


def same_choice(wanted: str, given: str) -> bool:
    """Whether the letters are the same, and what stands behind them where both have it; 12 is right for (D) 12."""
    right, chosen = as_choice(wanted), as_choice(given)
    if not right or not chosen:
        return equal((right or ("", wanted))[1] or "?", (chosen or ("", given))[1])
    if right[1] and chosen[1]:
        return right[0] == chosen[0] and equal(right[1], chosen[1])
    hedged = re.search(r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])|\b(?:not|nor|neither|wrong|incorrect)\b", chosen[1])
    return right[0] == chosen[0] and not hedged


def as_words(text: str) -> str:
    """What is compared of a sentence, of a word, or of letters alone such as ABCD; '' for anything else."""
    text = text.replace('"', " ").strip().casefold()
    sentence = re.fullmatch(r"[^\W\d_][\w ,.'()/&:!?-]*", text) and re.search(r"[^\W\d_]{3}", text)
    letters = re.fullmatch(r"[^\W\d_]+(?:[ ,]+[^\W\d_]+)*", text) and len(text) > 1
    return re.sub(r"(?<!\d)[^\w,]|[^\w,](?!\d)", "", text) if sentence or letters else ""


def as_time(text: str) -> tuple[str, str, str] | tuple[()]:
    """Hour, minutes and `a` or `p` ('' for neither) of a time of day: 3:05, 3 pm; () for anything else."""
    match = re.fullmatch(r'0?(\d{1,2})(?::([0-5]\d))? ?(?:"?([ap])\.? ?m\.?"?)?', text.casefold())
    return (match[1], match[2] or "00", match[3] or "") if match and (match[2] or match[3]) else ()


# --- units ------------------------------------------------------------------------------------------------------------

UNITS = {  # each in one spelling
    "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre", "mm": "millimeter millimetre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "g": "gram", "kg": "kilogram",
    "lb": "lbs pound £", "oz": "ounce", "l": "liter litre", "ml": "milliliter millilitre", "s": "sec second",
    "min": "minute", "h": "hr hour", "$": "¤ dollar usd", "€": "euro eur", "¢": "cent", "¥": "yen", "₹": "rupee",
    "°": "degree deg", "°c": "celsius", "°f": "fahrenheit", "rad": "radian", "n": "newton", "j": "joule", "w": "watt",
    "mi/h": "mph", "km/h": "kph kmh", "am": "a.m", "pm": "p.m", "day": "", "year": "", "mol": "mole", "gal": "gallon",
    "mg": "milligram", "%": "percent", "": "unit",
}  # fmt: skip
POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "2": "^2", "cubic": "^3", "cubed": "^3", "3": "^3"}
SPELLINGS = {word: unit for unit, others in UNITS.items() for word in (unit, *others.split()) if word}
KNOWN = {*SPELLINGS, *POWERS, "per"}


def without_unit(text: str) -> tuple[str, str]:
    """The text without units of money and what it is measured in, and these in one spelling; '' where it has none."""
    money = set(re.findall("[¤€£¥₹]", text))
    if len(money) > 1:
        raise Unreadable("two currencies")
    text = re.sub("[¤€£¥₹]", "", text).strip()
    piece = r'(?:"[^"]*"|(?<![a-zA-Z\\])[a-zA-Z]+|¢)\.?(?: ?\^ ?\{?-?\d\}?|[23](?!\d))?'
    match = re.fullmatch(rf"(.*?[^\s/])( *(?:{piece})(?:[ /]*(?:{piece}))*)", text)
    unit = ""
    if match and is_unit(match[1], match[2]):
        text, unit = re.sub(rf"{re.escape(match[2].strip())} ?(?=,)", "", match[1]), one_spelling(match[2])
    symbol = one_spelling("".join(money))
    if unit and symbol and unit != symbol or unit.count("%") > (unit == "%"):
        raise Unreadable("two units")
    return text.strip(), unit or symbol


def is_unit(before: str, unit: str) -> bool:
    """Whether these words are a unit of what stands before: letters may be variables, and words may say anything."""
    words = re.findall(r"°?[^\W\d_]+", unit.casefold())
    if NO_UNIT.intersection(words) or re.search(r"[\\,]", unit):
        return False
    known = all(word in KNOWN or word.removesuffix("s") in KNOWN for word in words)
    if not re.search("[a-zA-Z]", re.sub('"[^"]*"', "", unit)):  # all of it is said to be text
        return known or min(map(len, words)) > 1
    literal = re.fullmatch(r"[-\d./]+|-?\d*\\frac\{\d+\}\{\d+\}", before) and unit[0] == " "
    return bool(known and (literal or min(map(len, words)) > 1) or literal and min(map(len, words)) > 2)


def one_spelling(unit: str) -> str:
    """square meters, sq m, m^2 and meters squared all as m^2; per as /."""
    words = re.findall(r"[^\W\d_°%]+(?:\.m)?|[°%$€¢¥₹£¤][CF]?|\^ ?\{?-?\d\}?|[23]|/", unit.replace('"', " ").casefold())
    result, waiting = "", ""  # for the word that is squared
    for word in words:
        if word in ("square", "sq", "cubic"):
            waiting = POWERS[word]
        elif word in POWERS or word[0] == "^":
            result += POWERS.get(word) or "^" + re.sub(r"[^\d-]", "", word)
        else:
            singular = word.removesuffix("s") if len(word) > 2 else word
            result += "/" if word == "per" else SPELLINGS.get(word, SPELLINGS.get(singular, singular)) + waiting
            waiting = ""
    return result


def same_quantity(wanted: str, given: str) -> bool:
    """Whether two answers that are not words are the same: base, unit, and what the rest means."""
    if based := re.fullmatch(BASED, given):
        right = re.fullmatch(BASED, wanted)
        base = BASES.get(based[2], based[2])
        same_base = not right or BASES.get(right[2], right[2]) == base
        return same_base and int(right[1] if right else wanted, int(base)) == int(based[1], int(base))
    if re.fullmatch(BASED, wanted):
        return False
    (wanted, unit), (given, other) = without_unit(wanted), without_unit(given)
    right, answer = meaning(read(wanted)), meaning(read(given))
    if unit and other and unit != other or not may_use(right, answer):
        return False
    is_number = right[0] == answer[0] == "number"
    if other == "%" != unit:
        return is_number and (same(right, percent(answer)) or abs(right[1]) > 1 and same(right, answer))
    return same(right, answer) or unit == "%" != other and is_number and same(percent(right), answer)


BASED = r'([0-9A-F]+) ?_ ?\{? ?"?(\w+)"? ?\}?'
BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
         "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip


# --- the grammar ------------------------------------------------------------------------------------------------------
#
# A tree is a tuple: its kind, then its parts. Kinds:
#   number (value, form, decimals), name, constant; + * / ^ - of trees; root (degree, of what); call (function, ...);
#   list, set, tuple (two brackets, ...), union, without, matrix (rows); relation (signs, ...);
#   of a meaning also named (name, tree): x = 5

TOKEN = re.compile(r'(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3}(?![\w.]))?|\\[a-zA-Z]+|\\.|"[^"]*"|\S')
RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx")
GREEK = {f"\\{name}" for name in "alpha beta gamma delta epsilon varepsilon theta lambda mu nu rho sigma tau phi varphi"
         " chi psi omega kappa eta zeta xi Delta Gamma Theta Omega Phi Lambda Sigma ell".split()}  # fmt: skip
FUNCTIONS = {  # by LaTeX's name: the family, which is the operation that an answer may use, and mpmath's name
    **{name: ("trigonometry", name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{f"arc{name}": ("inverse trigonometry", f"a{name}") for name in ("sin", "cos", "tan", "cot")},
    "ln": ("logarithm", "ln"), "log": ("logarithm", "log"), "exp": ("e", "exp"),
}  # fmt: skip
EXACT = {"factorial": math.factorial, "binomial": math.comb}  # of integers
CLOSING = {"(": (")", "]"), "[": (")", "]"), r"\{": (r"\}",), r"\langle": (r"\rangle",), "|": ("|",),
           r"\lvert": (r"\rvert",), r"\lfloor": (r"\rfloor",), r"\lceil": (r"\rceil",)}  # fmt: skip
CALLED = {"|": "fabs", r"\lvert": "fabs", r"\lfloor": "floor", r"\lceil": "ceil"}
INFINITY = ("constant", "infty")
NEGATIVE_INFINITY = ("-", INFINITY)
REALS = ("tuple", "(", ")", NEGATIVE_INFINITY, INFINITY)


class Reader:
    """Reads one answer by recursive descent. Each method reads what its name says, and returns its tree."""

    def __init__(self, text: str):
        self.tokens = TOKEN.findall(text)
        self.at, self.depth, self.bars = 0, 0, 0
        self.sign, self.twofold = 1, False  # how ± is read now, and whether there was one

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

    def whole(self) -> tuple:
        items = self.items()
        if self.next:
            raise Unreadable(f"{self.next!r} is too much")
        return items[0] if len(items) == 1 else ("list", *items)

    def items(self) -> list:
        """What stands between commas; an item with ± is two."""
        items = []
        while not items or self.take(",", ";"):
            start, self.twofold, self.sign = self.at, False, 1
            items.append(self.relation())
            if self.twofold:
                self.at, self.sign = start, -1
                items.append(self.relation())
        return items

    def relation(self) -> tuple:
        parts, signs = [self.union()], []
        while sign := self.take(*RELATIONS):
            signs.append(sign.replace(r"\approx", "="))
            parts.append(self.union())
        return ("relation", tuple(signs), *parts) if signs else parts[0]

    def union(self) -> tuple:
        parts = [self.ratio()]
        while self.take(r"\cup"):
            parts.append(self.ratio())
        if len(parts) == 1 and self.take(r"\setminus", r"\backslash"):
            return ("without", parts[0], self.ratio())
        return ("union", *parts) if len(parts) > 1 else parts[0]

    def ratio(self) -> tuple:
        parts = [self.sum()]
        while self.take(":"):
            parts.append(self.sum())
        if len(parts) == 2:
            tree = quotient(*parts)
            return number(tree[1], "ratio") if tree[0] == "number" else tree
        return ("tuple", ":", ":", *parts) if len(parts) > 2 else parts[0]

    def sum(self) -> tuple:
        terms = [self.product()]
        while self.next in ("+", "-", r"\pm", r"\mp"):
            terms.append(self.product())
        return ("+", *terms) if len(terms) > 1 else terms[0]

    def product(self) -> tuple:
        factors = [self.signed()]
        while True:
            if self.take(r"\cdot", "*"):
                factors.append(self.signed())
            elif self.take("/"):
                factors = [quotient(product(factors), self.signed())]
            elif self.starts_factor():
                factors.append(self.power())
            else:
                return product(factors)

    def starts_factor(self) -> bool:
        """Whether a factor follows without a sign; a number never does."""
        known = ("{", "(", "[", r"\frac", r"\sqrt", r"\pi", r"\binom", *GREEK, *(f"\\{name}" for name in FUNCTIONS))
        return self.next in known or self.next.isalpha() or self.next[:1] == '"' or self.next == "|" and not self.bars

    def signed(self) -> tuple:
        if self.take("+"):
            return self.power()
        if self.take("-"):
            return negative(self.power())
        if both := self.take(r"\pm", r"\mp"):
            self.twofold = True
            return self.power() if (self.sign == 1) == (both == r"\pm") else negative(self.power())
        return self.power()

    def power(self) -> tuple:
        tree = self.atom()
        if self.take("^"):
            tree = power(tree, self.argument())
        return ("call", "factorial", tree) if self.take("!") else tree

    def argument(self, digits: bool = True) -> tuple:
        """What a command or ^ is about; without `digits` one digit of several."""
        if not digits and self.next.isdigit():
            self.tokens[self.at : self.at + 1] = self.next
        return self.signed() if self.next == "-" else self.atom()

    def raw(self) -> str:
        """The text of an argument."""
        if not self.take("{"):
            self.at += 1
            return self.tokens[self.at - 1] if self.at <= len(self.tokens) else ""
        start = self.at
        while self.next not in ("", "}"):
            self.at += 1
        self.need("}")
        return "".join(self.tokens[start : self.at - 1])

    def atom(self) -> tuple:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("nested too deep")
        tree = self.shallow_atom()
        self.depth -= 1
        return tree

    def shallow_atom(self) -> tuple:
        token, self.at = self.next, self.at + 1
        if token[:1].isdigit() or token[:1] == "." != token:
            return self.number(token)
        if token in ("e", "i"):
            return ("constant", token)
        if token in (r"\pi", r"\infty"):
            return ("constant", token[1:])
        if token.isalpha() or token in GREEK or token[:1] == '"':
            name = token.strip('"').casefold() if len(token) > 3 else token.strip('"')
            while self.take("'"):
                name += "'"
            return ("name", name + "_" + self.raw() if self.take("_") else name)
        if token in (r"\angle", r"\triangle", r"\overline", r"\vec", r"\hat", r"\bar"):
            name = token + self.raw()
            while token in (r"\angle", r"\triangle") and self.next.isalpha():
                name += self.raw()
            return ("name", name)
        if token == r"\mathbb":
            letter = self.raw()
            return REALS if letter == "R" else ("name", token + letter)
        if token == "{":
            return self.until("}")
        if token in CLOSING:
            return self.bracket(token)
        if token == r"\frac":
            return quotient(self.argument(digits=False), self.argument(digits=False))
        if token == r"\binom":
            return ("call", "binomial", self.argument(digits=False), self.argument(digits=False))
        if token == r"\sqrt":
            degree = self.until("]") if self.take("[") else number(2)
            return ("root", degree, self.argument())
        if token[1:] in FUNCTIONS:
            return self.call(token[1:])
        if token == r"\emptyset":
            return ("set",)
        if token == r"\matrix":
            return self.matrix()
        raise Unreadable(f"{token!r} is not known")

    def until(self, end: str) -> tuple:
        tree = self.relation()
        self.need(end)
        return tree

    def number(self, digits: str) -> tuple:
        """A literal: 12, 1.5e6, a decimal that repeats, a mixed number."""
        mantissa, _, exponent = digits.lower().partition("e")
        decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
        value = Fraction(int(mantissa.replace(".", "")), 1) / Fraction(10) ** decimals
        if "." in digits and self.take(r"\overline", r"\bar", r"\dot"):
            period = self.raw()
            if not re.fullmatch("[0-9]+", period):
                raise Unreadable(f"{period!r} does not repeat")
            return number(value + Fraction(int(period), (10 ** len(period) - 1) * 10**decimals), "fraction")
        if self.next == r"\frac" and digits.isdigit():
            start = self.at
            part = self.atom()
            if part[0] == "number" and 0 < part[1] < 1:
                return number(value + part[1], "fraction")
            self.at = start
        return number(value, "digits", decimals if "." in digits else 0)

    def bracket(self, opening: str) -> tuple:
        if opening == r"\{":
            items = self.items()
            self.need(r"\}")
            return ("set", *items)
        self.bars += opening == "|"
        items = [self.relation()]
        while opening not in CALLED and self.take(",", ";"):
            items.append(self.relation())
        closing = self.need(*CLOSING[opening])
        self.bars -= opening == "|"
        if opening in CALLED:
            return ("call", CALLED[opening], items[0])
        if len(items) == 1 and opening + closing in ("()", "[]"):
            return items[0]
        return ("tuple", *("()" if opening == r"\langle" else opening + closing), *items)

    def call(self, name: str) -> tuple:
        """A function with its power, its base, and what it is of: all up to a sign or another function."""
        exponent = self.argument() if self.take("^") else None
        base = [self.argument()] if name == "log" and self.take("_") else []
        if self.next in ("(", "{"):
            argument = self.atom()
        else:
            factors = [self.signed()]
            while self.starts_factor() and self.next[1:] not in FUNCTIONS:
                factors.append(self.power())
            argument = product(factors)
        tree = ("call", name, argument, *base)
        return power(tree, exponent) if exponent else tree

    def matrix(self) -> tuple:
        rows = [[]]
        while not self.take(r"\endmatrix"):
            rows[-1].append(self.relation())
            if self.take(r"\\") and self.next != r"\endmatrix":
                rows.append([])
            elif self.next != r"\endmatrix":
                self.need("&")
        return ("matrix", *(tuple(row) for row in rows))


def read(text: str) -> tuple:
    """The tree of an answer. Raises one of FAULTS."""
    return Reader(text).whole()


def as_tree(text: str) -> tuple | None:
    """The tree of an answer; None if it cannot be read."""
    try:
        return read(text)
    except FAULTS:
        return None


def number(value: Fraction | int, form: str = "digits", decimals: int = 0) -> tuple:
    return ("number", Fraction(value), form, decimals)


def negative(tree: tuple) -> tuple:
    if tree[0] == "number" and tree[1] >= 0:
        return ("number", -tree[1], *tree[2:])
    return ("-", tree)


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


# --- what a tree means ------------------------------------------------------------------------------------------------


def meaning(tree: tuple) -> tuple:
    """The tree with x = 5 as a named 5, an inequality that is solved as the interval, and so for the parts of lists."""
    kind = tree[0]
    if kind == "relation":
        return meaning_of_relation(tree[1], tree[2:])
    if kind == "without" and tree[1] == REALS and tree[2][0] == "set":
        return all_but(tree[2][1:])
    if kind not in ("list", "set"):
        return tree
    items = [meaning(item) for item in tree[1:]]
    names = {item[1] for item in items if item[0] == "named"}
    if not names:
        return (kind, *items)
    if items[0][0] != "named" or kind == "set":
        raise Unreadable("some have names")
    values = [item[2] if item[0] == "named" else item for item in items]
    without_index = {("name", re.sub(r"_\d+$", "", name[1])) if name[0] == "name" else name for name in names}
    if len(without_index) == 1:  # x = 1 or x = 2; x < 1 or x > 2
        joins = any(part[0] == "relation" and part[1] != ("=",) for part in tree[1:])
        return ("named", *without_index, ("union" if joins else kind, *values))
    if len(names) < len(items):
        raise Unreadable("some have the same name")
    return ("tuple", "(", ")", *(item[2] for item in sorted(items, key=lambda item: repr(item[1]))))  # x = 1, y = 2


def meaning_of_relation(signs: tuple, parts: tuple) -> tuple:
    """What a relation says of its name; the relation itself where it is not solved for one."""
    if set(signs) == {"="}:
        if is_name(parts[-1]) and not is_name(parts[0]):
            parts = parts[::-1]
        named, value = is_name(parts[0]), meaning(parts[-1])
        steps = parts[1:-1] if named else parts[:-1]
        if parts[0] not in [("name", letter) for letter in letters(value)] and all(
            on_numbers(operations(step)) and same(value, step) for step in steps
        ):  # x = 6/2 = 3
            return ("named", parts[0], value) if named else value
    if signs == (r"\in",) and is_name(parts[0]):
        return ("named", parts[0], meaning(parts[1]))
    if signs == (r"\ne",) and is_name(parts[0]):
        return ("named", parts[0], all_but(parts[1:]))
    if set(signs) <= {">", r"\ge"}:
        signs, parts = tuple({">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]), parts[::-1]
    if set(signs) <= {"<", r"\le"}:
        if len(parts) == 2 and is_name(parts[0]):  # x < 5
            signs, parts = ("<", *signs), (NEGATIVE_INFINITY, *parts)
        elif len(parts) == 2:  # 5 < x
            signs, parts = (*signs, "<"), (*parts, INFINITY)
        if (
            len(parts) == 3
            and is_name(parts[1])
            and letters(parts[1]).isdisjoint(letters(parts[0]) | letters(parts[2]))
        ):
            brackets = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
            return ("named", parts[1], ("tuple", *brackets, parts[0], parts[2]))
    return ("relation", signs, *parts)


def all_but(points: tuple) -> tuple:
    """The real numbers but these, as intervals."""
    if any(point[0] != "number" for point in points):
        raise Unreadable("points that are no literals")
    ends = [NEGATIVE_INFINITY, *sorted(points, key=lambda point: point[1]), INFINITY]
    return ("union", *(("tuple", "(", ")", low, high) for low, high in zip(ends, ends[1:])))


def is_name(tree: tuple) -> bool:
    """x, x_1, f(3), P(A), AB, |AB|, (x, y)"""
    if tree[0] == "tuple":
        return tree[1:3] == ("(", ")") and all(is_name(part) for part in tree[3:])
    if tree[0] == "call" and tree[1] == "fabs":
        return tree[2][0] == "*" and is_name(tree[2])
    if tree[0] == "*":
        of_capitals = all(part[0] == "name" and part[1][:1].isupper() for part in tree[1:])
        return of_capitals or len(tree) == 3 and tree[1][0] == "name" and tree[1][1] in "fghFGHP"
    return tree[0] == "name"


def parts_of(tree: tuple) -> list:
    """The trees below a tree."""
    kind = tree[0]
    if kind in ("number", "name", "constant"):
        return []
    if kind == "matrix":
        return [part for row in tree[1:] for part in row]
    return list(tree[{"tuple": 3, "relation": 2, "call": 2, "named": 2}.get(kind, 1) :])


def letters(tree: tuple) -> set[str]:
    return {tree[1]} if tree[0] == "name" else set().union(*map(letters, parts_of(tree)))


def operations(tree: tuple) -> set[str]:
    """What is to be carried out to have the value. Literals are none; an operation on numbers alone is one of its own,
    so that 2 * 3 is not allowed by 2 * x."""
    kind, parts = tree[0], parts_of(tree)
    of_parts = [operations(part) for part in parts]
    found = set().union(*of_parts)
    if kind == "name":
        return {"letter"}
    if kind == "number":
        return {"ratio", "trivial power of ten"} & {tree[2]}
    if kind == "constant":
        return {tree[1]} - {"infty"}
    if kind == "root" or kind == "^" and parts[1][0] == "number" and parts[1][1].denominator != 1:
        return found | {"root"}
    if kind == "call":
        return found | {FUNCTIONS.get(tree[1], (tree[1],))[0]}
    if kind in ("+", "-", "*", "/", "^") and tree != NEGATIVE_INFINITY:
        numbers = sum(map(on_numbers, of_parts))
        if numbers == len(parts) or kind in ("+", "*") and numbers > 1:
            found.add(f"{kind} of numbers")
        if numbers < len(parts):
            found.add(kind)
    return found


def on_numbers(operations: set[str]) -> bool:
    return all(operation.endswith("of numbers") for operation in operations)


def is_task(text: str) -> bool:
    """Whether there is something to be solved or carried out, a fraction to be reduced among it."""
    try:
        tree = read(text)
        is_inequality = tree[0] == "relation" and not {"=", r"\in"}.issuperset(tree[1])
        is_literal = tree[0] == "number" and tree[2] in ("unreduced", "power of ten")
        return is_inequality or is_literal or bool(operations(meaning(tree)) - {"letter"})
    except FAULTS:  # words, or with a unit
        return False


def may_use(wanted: tuple, given: tuple) -> bool:
    """Whether all operations and letters of the answer are those of the wanted one. With letters all arithmetic is
    allowed, and beside a root or a constant factors."""
    allowed = operations(wanted)
    if "letter" in allowed:
        allowed |= {"+", "-", "*", "/", "^"}
    elif allowed:
        allowed |= {"-", "*", "/"} | ({"/ of numbers"} if "^ of numbers" in allowed else set())
    known = letters(wanted) | (letters(wanted[1]) if wanted[0] == "named" else set())
    return operations(given) <= allowed and letters(given) <= known


# --- two trees --------------------------------------------------------------------------------------------------------


def same(wanted: tuple, given: tuple) -> bool:
    """Whether two meanings are the same. A name may be left out, or added."""
    kinds = wanted[0], given[0]
    if "relation" in kinds or kinds == ("named", "named") and wanted[1] != given[1]:
        return same_equation(wanted, given)
    if "named" in kinds:
        return same(*(tree[2] if tree[0] == "named" else tree for tree in (wanted, given)))
    if "list" in kinds or "set" in kinds or kinds == ("union", "union"):
        groups = ("list", "set") if "union" not in kinds else ("union",)
        return same_in_any_order(*(list(tree[1:]) if tree[0] in groups else [tree] for tree in (wanted, given)))
    if kinds == ("matrix", "tuple"):
        kinds, wanted, given = ("tuple", "matrix"), given, wanted
    if kinds == ("tuple", "matrix"):  # a row or a column
        is_vector = wanted[1:3] == ("(", ")") and 1 in (len(given) - 1, len(given[1]))
        return is_vector and same_in_order(wanted[3:], parts_of(given))
    if kinds == ("matrix", "matrix"):
        return len(wanted) == len(given) and all(map(same_in_order, wanted[1:], given[1:]))
    if kinds == ("tuple", "tuple"):
        return wanted[1:3] == given[1:3] and same_in_order(wanted[3:], given[3:])
    return same_value(wanted, given)


def same_in_order(wanted, given) -> bool:
    return len(wanted) == len(given) and all(map(same, wanted, given))


def same_in_any_order(wanted: list, given: list) -> bool:
    if len(wanted) != len(given):
        return False
    left = list(wanted)
    for tree in given:
        match = next((other for other in left if same(other, tree)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def same_value(wanted: tuple, given: tuple) -> bool:
    """Two expressions: literals exactly, but a decimal with two places or more may be given with more of them; others
    at random points."""
    if wanted[0] == given[0] == "number":
        difference = abs(wanted[1] - given[1])
        return difference == 0 or wanted[3] >= 2 and difference * 2 * 10 ** wanted[3] <= 1
    return all(close(*pair) for pair in values_at_points(wanted, given))


def same_equation(wanted: tuple, given: tuple) -> bool:
    """Two equations in the same letters, at least two: whether one is a multiple of the other."""
    if wanted == given or not {wanted[0], given[0]} <= {"named", "relation"}:
        return wanted == given
    sides = []
    for tree in (wanted, given):
        signs, left, right = (("=",), *tree[1:]) if tree[0] == "named" else (tree[1], tree[2], tree[-1])
        if signs != ("=",):
            return False
        sides.append(("+", left, ("-", right)))
    if letters(sides[0]) != letters(sides[1]) or len(letters(sides[0])) < 2 and wanted[0] == "named":
        return False
    pairs = values_at_points(*sides)
    return all(pairs[0]) and all(close(a / pairs[0][0], b / pairs[0][1]) for a, b in pairs)


def values_at_points(*trees: tuple) -> list[tuple]:
    """The values of the trees where each letter is a number drawn by chance: all above 0, all below, then both."""
    names = sorted(set().union(*map(letters, trees)))
    pairs = []
    with mpmath.workdps(DIGITS):
        for i in range(4 if names else 1):
            rng = random.Random(i)
            point = {name: Fraction(rng.randint(1, 999), rng.randint(100, 999)) for name in names}
            point = {name: number * (1, -1, rng.choice((1, -1)))[min(i, 2)] for name, number in point.items()}
            pairs.append(tuple(value(tree, point) for tree in trees))
    return pairs


def close(a, b) -> bool:
    """Of exact numbers whether they are equal; of others whether half of the digits agree."""
    if sum(isinstance(x, Fraction) and abs(x.numerator) * x.denominator > 10 ** (DIGITS // 2) for x in (a, b)) == 1:
        return False  # digits enough to be a root that was rounded
    if isinstance(a, Fraction) and isinstance(b, Fraction) or mpmath.inf in (abs(a), abs(b)):
        return a == b
    with mpmath.workdps(DIGITS):
        a, b = mpmath.mpmathify(a), mpmath.mpmathify(b)
        return bool(abs(a - b) <= max(abs(a), abs(b)) * mpmath.mpf(10) ** (-DIGITS // 2))


def percent(tree: tuple) -> tuple:
    return ("number", tree[1] / 100, tree[2], tree[3] + 2 if tree[3] else 0)


def value(tree: tuple, point: dict):
    """A Fraction, or a real or complex number of mpmath. Raises Unreadable for what has no value or is too large."""
    kind = tree[0]
    if kind == "number":
        return tree[1]
    if kind == "name":
        return point[tree[1]]
    if kind == "constant":
        return {"pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1), "infty": mpmath.inf}[tree[1]]
    if kind not in ("+", "-", "*", "/", "^", "root", "call"):
        raise Unreadable(f"a {kind} has no value")
    values = [value(part, point) for part in parts_of(tree)]
    if kind in ("+", "*", "/") and not all(isinstance(number, Fraction) for number in values):
        values = [mpmath.mpmathify(number) for number in values]
    if kind == "+":
        return reduce(lambda total, term: bounded(total + term), values)
    if kind == "-":
        return -values[0]
    if kind == "*":
        return reduce(lambda total, factor: bounded(total * factor), values)
    if kind == "/":
        return bounded(values[0] / values[1])
    if kind == "^":
        return raised(*values)
    if kind == "root":
        return raised(values[1], 1 / values[0])
    return called(tree[1], values)


def bounded(number):
    """The number, if it is not too large to go on with."""
    if isinstance(number, Fraction) and max(number.numerator.bit_length(), number.denominator.bit_length()) > MOST_BITS:
        raise Unreadable("a number is too large")
    return number


def raised(base, exponent):
    """A power that is not too large; of numbers below 0 the root that is real, if there is one."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > MOST_BITS:
            raise Unreadable("a power is too large")
        return base**exponent
    if base != 0 and abs(exponent * mpmath.log(abs(base))) > MOST_BITS:
        raise Unreadable("a power is too large")
    if isinstance(exponent, Fraction) and exponent.denominator % 2 and mpmath.im(base) == 0 > mpmath.re(base):
        return (-1) ** exponent.numerator * mpmath.power(-base, exponent)
    return mpmath.power(base, exponent)


def called(name: str, values: list):
    """A function's value. A logarithm without a base is that of base 10."""
    if name == "log":
        base = values[1] if len(values) > 1 else 10
        return mpmath.log(values[0]) / mpmath.log(base)
    if name not in ("ln", "fabs") and max(map(abs, values)) > LARGEST_ARGUMENT:
        raise Unreadable("an argument is too large")
    if name in EXACT and all(isinstance(number, Fraction) and number.denominator == 1 for number in values):
        return Fraction(EXACT[name](*map(int, values)))
    return getattr(mpmath, FUNCTIONS.get(name, ("", name))[1])(*values)
