r"""The accepted ways of writing an answer, as tables, and one spelling for all of them.

`cleaned` applies the tables SPELLED, REWRITTEN and WRAPPED, and returns ASCII and LaTeX, with words in double quotes.
The other functions take apart what expressions.py does not read: choices, sentences and units.
"""

import re
import unicodedata
from functools import lru_cache

SPELLED = {  # one spelling: the others, with spaces between them
    # signs
    "-": "− – — ‒ ﹣", "*": r"\times \cdot \ast × · ⋅ ∙ • ∗", "/": "∕ ⁄", r"\pm": "±", r"\approx": "≈ ≃", "<": r"\lt",
    ">": r"\gt", r"\le": r"<= \leq \leqslant ≤ ⩽", r"\ge": r">= \geq \geqslant ≥ ⩾",
    r"\ne": r"!= \neq ≠", r"\in": "∈", r"\cup": "∪", ", ": r"\lor \vee",
    # brackets and quotes
    "(": r"\langle ⟨ 〈", ")": r"\rangle ⟩ 〉", r"\{": r"\lbrace", r"\}": r"\rbrace", "|": r"\lvert \rvert \vert \mid",
    '"': "“ ” „", "'": "’ ‘",
    # commands, names and units; a dollar sign alone stands around mathematics, one with a backslash is money
    r"\frac": r"\dfrac \tfrac \cfrac \nicefrac \sfrac", r"\binom": r"\dbinom \tbinom", r"\emptyset": r"∅ \varnothing",
    r"\infty": "∞", r"\angle": "∠", r"\pi": "π", "ε": r"\epsilon \varepsilon", "φ": r"\phi \varphi",
    **dict(zip("αβγδΔθλμρσω", r"\alpha \beta \gamma \delta \Delta \theta \lambda \mu \rho \sigma \omega".split())),
    r"^\circ": r"° \degree", "¤": r"\$", ' "%" ': r"% \%",
    # what only spaces or sizes
    " ": r"\, \; \: \> \( \) \[ \] \quad \qquad \thinspace",
    "": r"\left \right \middle \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \displaystyle \limits \nolimits",
}  # fmt: skip
# Another spelling: the one. A space ends the name of a command.
SPELLINGS = {other: sign + " " * sign[-1:].isalpha() for sign, others in SPELLED.items() for other in others.split()}
SIGN = r"\\[a-zA-Z]+|\\.|[<>!]=|[^\w\s]|[^\W\d_a-zA-Z]"  # a sign that SPELLINGS may have

TEXT = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname\*?) ?"
WORDS = r"(?!(?:e|i|or|and) *\})([^\W\d_][^\d\\\"${}]*?)"  # in braces; e and i are numbers
TEXTS = [(rf"{TEXT}\{{ *{WORDS} *\}}", r' "\1" '), (rf"{TEXT}\{{([^{{}}]*)\}}", r" \1 ")]  # "cm", but 5 of \text{5}
MATRIX = r"\{(?:[pbB]|small)?(?:matrix|array)\}"
THOUSANDS = r"(?:,\d{3})+(?![^([]*[])]|[^{]*\\\})|(?: \d{3})+"  # within brackets commas separate numbers
REWRITTEN = [  # patterns, and what is written instead; one after the other
    (r"(?<!\\)\\ |(?<!~)~(?!~)|\s+", " "),  # a space of LaTeX, or any white space
    (r"(?<=,)\\! *|\\!", ""),
    (r"\\\{ ?\\\}", r"\\emptyset "),
    (r"\\mathbb ?\{? ?R ?\}?", r"\\reals "),
    (rf"\\begin ?{MATRIX}(?: ?\{{[clr| ]*\}})?", r"\\matrix "),
    (rf"(?:\\\\)? *\\end ?{MATRIX}", r"\\endmatrix "),
    *2 * TEXTS,  # twice, for \text{\textbf{cm}}
    (rf"{TEXT}(?=\{{)", ""),
    (r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|log|ln|exp|pi)(?![a-zA-Z])", r"\\\1 "),  # in plain text
    (r'(?i)^[" ]*no (?:real )?solutions?[". ]*$', r"\\emptyset "),
    (r'(?i)^[" ]*all real(?:s| numbers)[". ]*$', r"\\reals "),
    (r"^ *(-?\d+) ?_ ?\{? ?(\d+) ?\}?[. ]*$", r'\1 "base \2"'),  # the base is a unit
    (r'(?i)(?<=\d) *"? *([ap])\.? ?m\b\.?[" ]*$', r' "\1m"'),  # and so is p.m.
    (r"^ *(\d+):00\b", r"\1"),
    (r",? *\b(?:or|and)\b *", ", "),
    (r"\^ ?\{? ?\\circ(?![a-zA-Z]) ?\}?", ' "°" '),  # 90^\circ is 90 "°"
    (r"^ ?\\(?:angle|triangle|overline|vec) ?\{?([a-zA-Z]+)\}? ?=", r'"\1" ='),  # \angle ABC = 90
    (r"^([^$]*)\$([^$]*)$", r"\1¤\2"),  # one dollar sign is money
    (r"\$", " "),  # several stand around mathematics
    (r"(?<=\d)\{([,:])\}(?=\d)", r"\1"),  # 12{,}345
    (r"(?<![\d.^_])(\d+) +(\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),  # 3 1/2
    (rf"(?<![\d.,])(?<!\d )\d{{1,3}}(?:{THOUSANDS})(?!,?\d| \d)", lambda digits: re.sub("[ ,]", "", digits[0])),
    (r"^ *\\\{ *[a-z] *(?:\\in *\\reals *)?[|:](.*)\\\} *$", r"\1"),  # \{x | x > 2\} is x > 2
    (" +", " "),
]
WRAPPED = [  # what stands around an answer, or before or behind it; the answer is the group
    r"\*(.+)\*", "`([^`]+)`", '"([^"]*)"', r"(?:\\(?:boxed|fbox) ?)?\{(.*)\}", "=(.*)", r"(.*[^.])[.,;:]", r"(.*)\\\\",
]  # fmt: skip
UNITS = {  # one spelling: the others, in the singular; the last are parts of units
    "mm": "millimeter millimetre", "cm": "centimeter centimetre", "m": "meter metre", "km": "kilometer kilometre",
    "in": "inch inches", "ft": "foot feet", "mi": "mile", "g": "gram", "kg": "kilogram", "lb": "lbs pound £",
    "ml": "milliliter millilitre", "l": "liter litre", "s": "sec second", "min": "minute", "h": "hr hour", "day": "",
    "year": "", "mi/h": "mph", "km/h": "kph kmh", "$": "¤ dollar usd", "€": "euro eur", "¢": "cent", "c": "celsius",
    "°": "degree deg", "%": "percent percentage pct", "": "unit", "^2": "square sq", "^3": "cubic", "/": "per",
}  # fmt: skip
UNIT_OF = {word: unit for unit, others in UNITS.items() for word in (unit, *others.split()) if word}
NO_UNIT = set(  # words behind a number which say that the number alone is not the answer
    "not isnt is are was were be if than more less least most fewer wrong incorrect maybe either neither nor but plus"
    " minus times squared cubed factorial mod over choose root to through until between about dozen score gross pair"
    " couple lakh crore thousand million billion trillion half halves third quarter fourth fifth sixth eighth tenth"
    " hundred hundredth thousandth one two three four five six seven eight nine ten zero pi double twice triple rather"
    " except unless possibly rounded approximately negative below roughly".split()
)


@lru_cache(maxsize=1000)
def cleaned(text: str) -> str:
    """The text in one spelling: ASCII and LaTeX, words in double quotes, without what only wraps or spaces it."""
    text = re.sub(r"[⁰¹²³⁴-⁹⁻]+", lambda digits: f"^{{{unicodedata.normalize('NFKC', digits[0])}}}", text)
    text = re.sub(r"(?=[¼-¾⅐-⅞])", " ", text).replace("ℝ", r"\reals ")  # 3½ is no 31/2
    text = re.sub(r"√ ?(\d+|[a-z])", r"\\sqrt{\1}", text).replace("√", r"\sqrt ")
    text = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")  # of no width
    text = re.sub(r"(?<!\\)\\\\(?=[dt]?frac|sqrt|left|right|pi|infty|text|cdot)", r"\\", text)  # escaped twice
    text = re.sub(SIGN, lambda sign: SPELLINGS.get(sign[0], sign[0]), text)
    for pattern, replacement in REWRITTEN:
        text = re.sub(pattern, replacement, text)
    before = None
    while text != before:
        before = text = text.strip()
        for pattern in WRAPPED:
            match = re.fullmatch(pattern, text)
            if match and closing_braces(text).get(match.start(1) - 1, len(text) - 1) == len(text) - 1:
                text = match[1].strip()
    return text


def closing_braces(text: str) -> dict[int, int]:
    """For the place of each opening brace the place of its closing one. A brace behind a backslash is none."""
    closed_at, opened = {}, []
    for brace in re.finditer(r"\\.|[{}]", text, flags=re.DOTALL):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closed_at[opened.pop()] = brace.start()
    return closed_at


def as_choice(text: str) -> tuple[str, str]:
    """The letter of a multiple choice, '' for none, and the text behind it: D, (D) 12, D. 12."""
    pattern = r"(?:(?i:option|choice|answer) ?:? ?)?(?:\(([A-Z])\)|([A-Z])(?=[.):](?: |$)|$))[.):, ]*(.*)"
    match = re.fullmatch(pattern, text.replace('"', ""))
    return (match[1] or match[2], match[3]) if match else ("", text)


def as_words(text: str) -> str:
    """The words that are compared, if the text is a sentence, a word, or letters such as ABCD; '' for other texts."""
    text = text.replace('"', " ").strip().casefold()
    is_formula = re.search(r"\b[a-z][/-]|[/-][a-z]\b", text)  # abc-d
    is_sentence = re.fullmatch(r"(?=.*[^\W\d_]{3})[^\W\d_][\w ,.'()/&:!?-]*", text) and not is_formula
    is_letters = re.fullmatch(r"[^\W\d_]+(?:[ ,]+[^\W\d_]+)*", text) and len(text) > 1
    return re.sub(r"(?<!\d)[^\w,]|[^\w,](?!\d)", "", text) if is_sentence or is_letters else ""


def without_unit(text: str) -> tuple[str, str]:
    """The text without its unit, and the unit in one spelling, '' for none. Letters may be variables, and words may say
    anything: a unit is known, or it is said to be text, or it stands behind a number. Raises ValueError for two."""
    units = {one_unit(symbol) for symbol in re.findall("[¤€£¥₹]", text)}
    text = re.sub("[¤€£¥₹]", "", text).strip()
    word = r'(?:"[^"]*"|(?<![a-zA-Z\\])[a-zA-Z]+|¢)\.?(?: ?\^ ?\{?-?\d\}?)?'
    if match := re.fullmatch(rf"(.*?[^\s/])( *(?:{word})(?:[ /]*(?:{word}))*)", text):
        before, unit = match.groups()
        words = re.findall(r"[^\W\d_]+", unit.casefold())
        is_known, shortest = all(one_unit(word) in UNITS for word in words), min(map(len, words), default=1)
        is_text = not re.search("[a-zA-Z]", re.sub('"[^"]*"', "", unit))
        is_behind_number = re.fullmatch(r"[-\d./]+|-?\d*\\frac\{\d+\}\{\d+\}", before) and unit[0] == " "
        marked = is_text or is_behind_number
        is_unit = is_known or shortest > (1 if is_text else 2) if marked else is_known and shortest > 1
        is_more = NO_UNIT.intersection(words + [word.removesuffix("s") for word in words])
        if is_unit and not is_more and not re.search(r"[\\,]", unit):
            text = re.sub(rf"{re.escape(unit.strip())} ?(?=,)", "", before)
            units |= {one_unit(unit)} - {""}
    if len(units) > 1 or "%%" in units:
        raise ValueError("two units")
    return text.strip(), "".join(units)


def one_unit(unit: str) -> str:
    """A unit in one spelling: square meters, sq m and m^2 are all m^2."""
    unit = re.sub(r"\b(square|sq|cubic)\b\.? +([^\W\d_]+)", r"\2 \1", re.sub('[".{}]', "", unit.casefold()))
    words = [(word, word.removesuffix("s") if len(word) > 2 else word) for word in re.findall(r"[^\W\d_]+|\S", unit)]
    return "".join(UNIT_OF.get(word, UNIT_OF.get(singular, singular)) for word, singular in words)
