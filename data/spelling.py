r"""The accepted ways of writing an answer, as tables, and one spelling for all of them.

`cleaned` applies the rules of REWRITTEN, one after the other. It returns ASCII, LaTeX and Greek
letters, with words and units in double quotes. The other functions take apart what expressions.py
does not read: choices, sentences and units.
"""

import re
import unicodedata
from functools import lru_cache

SPELLED = {  # one spelling: the others, with spaces between them
    # signs
    "-": r"− – — ‒ ﹣ \setminus \backslash", "*": r"\times \cdot \ast × · ⋅ ∙ • ∗", "/": r"∕ ⁄ ÷ \div", r"\pm": "±",
    r"\approx": "≈ ≃", "<": r"\lt", ">": r"\gt", r"\le": r"<= \leq \leqslant ≤ ⩽", r"\ge": r">= \geq \geqslant ≥ ⩾",
    r"\ne": r"!= \neq ≠", r"\in": "∈", r"\cup": "∪", ", ": r"\lor \vee", r"\infty": r"∞ \infinity",
    # brackets and quotes
    "(": r"\langle ⟨ 〈", ")": r"\rangle ⟩ 〉", r"\{": r"\lbrace", r"\}": r"\rbrace", "|": r"\lvert \rvert \vert \mid",
    '"': "“ ” „", "'": "’ ‘ ′",
    # commands, names and units; a dollar sign alone stands around mathematics, one with a backslash
    # is money
    r"\frac": r"\dfrac \tfrac \cfrac \nicefrac \sfrac", r"\binom": r"\dbinom \tbinom", r"\emptyset": r"∅ \varnothing",
    r"\pi": "π", r"\sqrt": "√", r"\reals": "ℝ", "ε": r"\epsilon \varepsilon", "φ": r"\phi \varphi",
    **dict(zip("αβγδηθκλμξρστψωΔΓΩℓ", r"\alpha \beta \gamma \delta \eta \theta \kappa \lambda \mu \xi \rho \sigma \tau"
               r" \psi \omega \Delta \Gamma \Omega \ell".split())), ' "deg" ': r"° \degree \circ", "¤": r"\$",
    "%": r"\%", " ": r"\, \; \: \> \( \) \[ \] \quad \qquad \thinspace",
}  # fmt: skip
# Another spelling: the one. A space ends the name of a command.
SPELLINGS = {
    other: sign + " " * sign[-1:].isalpha()
    for sign, others in SPELLED.items()
    for other in others.split()
}

UNITS = {  # one spelling: the others, in the singular; the last are parts of units
    "mm": "millimeter", "cm": "centimeter", "m": "meter metre", "km": "kilometer kilometre", "in": "inch inches",
    "ft": "foot feet", "yd": "yard", "mi": "mile", "g": "gram", "kg": "kilogram", "lb": "pound £", "oz": "ounce",
    "ml": "milliliter", "l": "liter litre", "s": "sec second", "min": "minute", "h": "hr hour", "year": "yr",
    "mi/h": "mph", "$": "¤ dollar usd", "€": "euro eur", "¢": "cent", "rad": "radian", "c": "celsius", "/": "per",
    "deg": "degree", "%": "percent percentage pct", "": "unit st nd rd th", "^2": "square sq", "^3": "cubic",
}  # fmt: skip
UNIT_OF = {word: unit for unit, others in UNITS.items() for word in (unit, *others.split()) if word}
NO_UNIT = set(  # words behind a number which say that the number alone is not the answer
    "not isnt is are was were be if than more less least most fewer wrong incorrect maybe either neither nor but plus"
    " minus squared cubed factorial mod over choose root to through until between about dozen score gross pair"
    " couple lakh crore thousand million billion trillion half halves third quarter fourth fifth sixth eighth tenth"
    " hundred hundredth thousandth double twice triple rather except unless possibly rounded approximately negative"
    " below roughly or so ten".split()
)

TEXT = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname\*?|boldsymbol) ?"
WORDS = r"(?!(?:e|i|or|and) *\})([^\W\d_][^\d\\\"${}]*?)"  # in braces; e and i are numbers
MATRIX = r"\{(?:[pbB]|small)?(?:matrix|array)\}"
GROUP = r"((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)"  # with braces in braces
THOUSANDS = (
    r"(?:,\d{3})+(?![^([]*[])]|[^{]*\\\})|(?: \d{3})+"  # within brackets commas separate numbers
)
KNOWN = f"(?:{'|'.join(filter(str.isalpha, UNIT_OF))})s?"
UNIT = r'"[^"]*"(?= *(?:$|[,;)\]}]|\\\}))|[¤€£¥₹¢]'  # behind what it belongs to
POWER = r"(?![a-z])\.?(?: ?\^ ?\{?-?\d\}?)?[ /]*"
REWRITTEN = [  # patterns, and what is written instead; one after the other
    # characters, commands, words
    (r"(?<!\\)\\\\(?=[a-z]{2})", r"\\"),  # escaped twice
    (r"\\! *|\\(?:left|right|middle|[bB]ig[glr]*|[a-z]+style|(no)?limits|bf|underline|boxed|fbox)(?![a-zA-Z])\.?", ""),
    (r"\\[a-zA-Z]+|\\.|[<>]=|(?<!\d)!=|[^\w\s]|[^\W\d_a-zA-Z]", lambda c: SPELLINGS.get(c[0], c[0])),  # not 5!=120
    (r"[⁰¹²³⁴-⁹⁻]+", lambda digits: f"^{{{unicodedata.normalize('NFKC', digits[0])}}}"),
    (r"(?=[¼-¾⅐-⅞])", " "),  # 3½ is no 31/2
    (r"[^\x00-\x7f]", lambda c: unicodedata.normalize("NFKC", c[0]) * (unicodedata.category(c[0]) != "Cf")),  # no width
    (r"(?<!\\)\\ |(?<!~)~(?!~)|\s+", " "),  # a space of LaTeX, or any white space
    (r"\\\{ ?\\\}", r"\\emptyset "),
    (r"\\mathbb ?\{? ?R ?\}?", r"\\reals "),
    (rf"\\begin ?{MATRIX}(?: ?\{{[clr| ]*\}})?", r"\\matrix "),
    (rf"(?:\\\\)? *\\end ?{MATRIX}", r"\\endmatrix "),
    (r"(?<=\\\\) ?\[-?[\d.]+ ?[a-z]{2}\]|\\phantom ?\{[^{}]*\}", ""),  # \\[4pt]
    (rf"\{{{GROUP}\\over(?![a-z]){GROUP}\}}", r"\\frac{\1}{\2}"),
    (rf"{TEXT}\{{ *{WORDS} *\}}", r' "\1" '),  # "cm"
    (rf"{TEXT}(?:\{{([^{{}}]*)\}}|(?=\{{))", r" \1 "),  # but 5 of \text{5}
    # in plain text
    (r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|log|ln|exp|pi|infinity)(?![a-zA-Z])", r"\\\1 "),
    (r'(?i)^[" ]*no (?:real )?solutions?[". ]*$', r"\\emptyset "),
    (r'(?i)^[" ]*all real(?:s| numbers)[". ]*$', r"\\reals "),
    (r'(?i)^[" ]*(?:DNE|does not exist)[". ]*$', "undefined"),
    (r",? *\b(?:or|and)\b *", ", "),
    (r'(?<=\d) *"? *\bto\b *"? *(?=\d)', ":"),
    # numbers and sets
    (r"^([^$]*)\$([^$]*)$", r"\1¤\2"),  # one dollar sign is money
    (r"\$", " "),  # several stand around mathematics
    (r"(?<=\d)\{([,:])\}(?=\d)", r"\1"),  # 12{,}345
    (r"(?<![\d.^_])(\d+) +(\d+) ?/ ?(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),  # 3 1/2
    (r"\\(frac|binom) ?(\d) ?(\d)", r"\\\1{\2}{\3}"),  # \frac12
    # 1.5 * 10^6
    (r"((?<![\d.^}a-zA-Z])[\d.]+ ?[*x] ?)?(?<![\d.])10 ?\^ ?(-?\d{1,3}|\{ ?-?\d{1,3} ?\})(?![\d.])",
     lambda power: f"{(power[1] or '1').strip(' *x')}e{power[2].strip('{ }')} "),
    (rf"(?<![\d.,])(?<!\d )\d{{1,3}}(?:{THOUSANDS})(?!,?\d| \d)", lambda digits: re.sub("[ ,]", "", digits[0])),
    (r"^ *\\\{ *[a-z] *(?:\\in *\\reals *)?[|:](.*)\\\} *$", r"\1"),  # \{x | x > 2\} is x > 2
    # units
    (r"^ *\(?(-?\d+)\)? ?_ ?[{(]* ?(\d+) ?[)}]*[. ]*$", r'\1 "base \2"'),
    (r'(?i)(?<=\d) *"? *([ap])\.? ?m\b\.?[" ]*$', r' "\1m"'),
    (r"^ *(\d+):00\b", r"\1"),
    (r'\^ ?\{? ?"?(deg|st|nd|rd|th)(?![a-z])"? ?\}?', r' "\1"'),  # 90^\circ, 12^{th}
    (r'"deg" *"?([CF])\b"?', r'"deg \1"'),
    (r'(?<!")%', ' "%" '),
    (rf"(?i)^([-\d./]+|-?\d*\\frac\{{\d+\}}\{{\d+\}}) +((?:(?:{KNOWN}|[a-z]{{3,}}){POWER})+)$", r'\1 "\2"'),  # 5 apples
    (rf"(?i)(?<![\\a-z\"])((?:(?=[a-z]{{2}}){KNOWN}{POWER})+)(?=$|,)", r' "\1"'),  # 5\pi cm
    (r'"\.? ?\^ ?\{?(-?\d)\}?', r'^\1"'),  # "cm"^2
    (r'\\frac ?\{ ?"([^"]*)" ?\}\{ ?"([^"]*)" ?\}', r'"\1/\2"'),
    (r'(?<=[a-z\d]) *" ?(/?) ?"(?=[a-z])', r" \1 "),  # "km" / "h"
    # what stands around an answer, or before or behind it
    (r'^ ?(?:"[^"]*"|\\(?:angle|triangle|overline|vec|det) ?\{?[a-zA-Z]+\}?|[a-z]\^\{-1\} ?\([a-z]\)) ?=', ""),
    (r"^[A-Z] ?(?=\([^()]*,[^()]*\)$)", ""),  # M(3,6)
    (r"^(?: |=|\\approx)+| +$|(?<= ) +|(?<=[^. ]) *(?:[.,;:]|\\\\) *$", ""),
    (r'^(?:\*\*?([^*]+)\*\*?|`([^`]+)`|"([^"]*)")$', r"\1\2\3"),
    (rf"^\{{{GROUP}\}}$", r"\1"),
]  # fmt: skip


@lru_cache(maxsize=1000)
def cleaned(text: str) -> str:
    """The text in one spelling, without what only wraps or spaces it."""
    for pattern, replacement in 2 * REWRITTEN:  # twice, for \text{\textbf{cm}} and **"5"**
        text = re.sub(pattern, replacement, text)
    return text.strip()


def as_choice(text: str) -> tuple[str, str]:
    """The letter of a multiple choice, '' for none, and the text behind it: D, (D) 12, D. 12."""
    pattern = (
        r"(?:(?i:option|choice|answer) ?:? ?)?(?:\(([A-Z])\)|([A-Z])(?=[.):](?: |$)|$))[.):, ]*(.*)"
    )
    match = re.fullmatch(pattern, text.replace('"', ""))
    return (match[1] or match[2], match[3]) if match else ("", text)


def as_words(text: str) -> str:
    """The words that are compared, if the text is a sentence, a word, or letters such as ABCD; ''
    for other texts."""
    text = text.replace('"', " ").strip().casefold()
    is_sentence = re.fullmatch(
        r"(?=.*[^\W\d_]{3})(?!.*(?:\b[a-z][/-]|[/-][a-z]\b))[^\W\d_][\w ,.'()/&:!?-]*", text
    )
    is_letters = re.fullmatch(r"[^\W\d_]+(?:[ ,]+[^\W\d_]+)*", text) and len(text) > 1
    return re.sub(r"(?<!\d)[^\w,]|[^\w,](?!\d)", "", text) if is_sentence or is_letters else ""


def one_unit(unit: str) -> str:
    """A unit in one spelling: square meters, sq m and m^2 are all m^2. Raises ValueError for a word
    that is no unit."""
    unit = re.sub(
        r"\b(square|sq|cubic)\b\.? +([^\W\d_]+)", r"\2 \1", re.sub('[".{}]', "", unit.casefold())
    )
    words = [
        (word, word.removesuffix("s") if len(word) > 2 else word)
        for word in re.findall(r"[^\W\d_]+|\S", unit)
    ]
    if NO_UNIT.intersection(sum(words, ())):
        raise ValueError("no unit")
    return "".join(UNIT_OF.get(word, UNIT_OF.get(singular, singular)) for word, singular in words)
