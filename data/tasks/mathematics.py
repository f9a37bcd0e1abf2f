r"""Mathematics with a final answer in \boxed{}: right is the wanted answer, written in any accepted
way.

What counts is the last box after the last `</think>`. Its content gets one spelling. It is taken
apart into a list, a tuple or an interval, their items, and the name of an item (x = 5). Then one
item is compared with one item:

    a number wants a number: 120 may be written as 120.0, but not as 5!, which is a task;
    an expression wants one with the same values at points, by no steps that it does not take;
    all else is text.

Nothing is rounded or converted. What cannot be read, or is too large to compute, is text.
"""

import contextlib
import operator
import random
import re
import unicodedata
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import mpmath

from data import Problem, after_thinking

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
LONGEST_TEXT = 200_000  # characters; what stands before them is not read
LONGEST_ANSWER = 1000  # characters; a longer one must be the wanted text itself

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
SENTENCE = r"""(?xis) ^ (?: (?= .* \b(?:is|are|was|were|has|have|we|it|he|she|they)\b )
    (?: .*? \b[^\W\d_]{2,}\b ){2} | (?= .* [.!?] \s* $ ) (?: .*? \b[^\W\d_]{2,}\b ){4}
    | \s* (?: proof | not[ ]?found ) \s* $ | .* (?: \\boxed | ``` | \#{4} )
    | (?: def | import )[ ] | (?: therefore | hence | thus )\b )"""
# A box, and the brace that opens it or else its content; or another brace.
BOXES = r"(?sx) \\\\?(?:boxed|fbox) \s* ( \{ | [^\s${}]* ) | \\. | [{}]"


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
    if before:
        last = re.split(ENDS_ANSWER, last.strip())[0].strip(" *")
    said = last if boxed is None else boxed
    if not said.strip():
        raise ValueError("the answer is empty")
    if len(said) > LONGEST_ANSWER or said != boxed and re.search(SENTENCE, said):
        raise NoAnswer(
            f"the answer {said!r:.60} is a long text or a sentence, without ####, `The answer is`"
            " or a \\boxed{} that closes, and no reply repeats it"
        )
    return Problem(worded(text, instruction), said.strip(), task="data.tasks.mathematics")


def score(problem: Problem, completion: str) -> bool:
    """Whether the last box after the thinking holds the answer."""
    answer = last_boxed(after_thinking(completion)[-LONGEST_TEXT:])
    return answer is not None and equal(problem.answer, answer, problem.prompt)


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


# --- one spelling ---------------------------------------------------------------------------------


def table(text: str) -> dict[str, str]:
    """For each word of a table the first word of its line. ␣ stands for a space."""
    rows = map(str.split, text.splitlines())
    return {word: words[0].replace("␣", " ") for words in rows for word in words}


# Units are in the singular. A set, a matrix, ≤ and ≥ get signs of their own.
SPELLING_OF = table(
    r"""
    -          − – — ‒ ﹣ \setminus
    *          \times \cdot \ast × · ⋅ ∙ • ∗
    /          ∕ ÷ \div
    ±          \pm
    =          \approx ≈ ≃
    <          \lt
    >          \gt
    ≤          <= \le \leq \leqslant ⩽
    ≥          >= \ge \geq \geqslant ⩾
    ≠          != \ne \neq
    ∈          \in
    ∪          \cup
    ,          ; \lor \vee
    :          \colon
    ∞          \infty \infinity
    (          \langle ⟨ 〈
    )          \rangle ⟩ 〉
    «          \{ \lbrace
    »          \} \rbrace
    |          \lvert \rvert \vert \mid
    '          ’ ‘ ′ \prime
    \frac␣     \dfrac \tfrac \cfrac \nicefrac \sfrac
    \sqrt␣     √
    \binom␣    \dbinom \tbinom
    ∅          \emptyset \varnothing
    ℝ          \reals
    …          \ldots \dots \cdots
    \phi␣      \varphi
    \epsilon␣  \varepsilon ε
    \pi␣       π
    \alpha␣    α
    \beta␣     β
    \gamma␣    γ
    \theta␣    θ
    \lambda␣   λ
    \mu␣       μ
    \rho␣      ρ
    \sigma␣    σ
    \omega␣    ω
    ␣deg␣      ° \degree \circ degree degrees
    %          \% percent percentage pct
    ¤          \$ dollar dollars usd
    €          euro euros eur
    ¢          cent cents
    mm         millimeter millimeters millimetre millimetres
    cm         centimeter centimeters centimetre centimetres
    m          meter meters metre metres
    km         kilometer kilometers kilometre kilometres
    in         inch inches
    ft         foot feet
    yd         yard yards
    mi         mile miles
    mi/h       mph
    g          gram grams
    kg         kilogram kilograms
    lb         pound pounds lbs
    oz         ounce ounces
    ml         milliliter milliliters
    l          liter liters litre litres
    gal        gallon gallons
    s          sec secs second seconds
    min        mins minute minutes
    h          hr hrs hour hours
    day        days
    week       weeks
    month      months
    year       years yr
    rad        radian radians
    /          per
    ␣          \, \: \; \> ~ \( \) \[ \] \quad \qquad \thinspace unit units
"""
)

FONTS = "text[a-z]*|math(?:rm|bf|it|sf|tt)|mbox|operatorname|boldsymbol|bm|underline"


def rules(text: str) -> list[list[str]]:
    """The rows of a table: a pattern, what is written instead, and an example. ␣ is a space, ν a
    letter or a command, τ what stands beside signs, and φ the command of a font."""
    text = text.replace("␣", " ").replace("ν", r"([a-zA-Z](?:_\w)?|\\[a-z]+)")
    text = text.replace("τ", "(?<![^<>≤≥∪,=])([^<>≤≥∪,=]+)")
    text = text.replace("φ", rf"\\(?:{FONTS})")
    return [row.split(" → ")[:2] for row in text.split("\n")[1:-1]]


# Applied in this order.
BEFORE = rules(r"""
(?<!\\)\\\\(?=[a-z]{2}) → \\ → 3\\sqrt2
\\!\s*|[\u00ad\u200b-\u200f\u2060\ufeff] →  → no width
\\(left|right|[bB]ig+[lr]?|[a-z]+style|limits|boxed|fbox)(?![a-zA-Z])\.? →  → \left(
\\(text)?color␣?\{\w+\}|\\phantom␣?\{[^{}]*\}|(?<=\\\\)\s?\[-?[\d.]+␣?[a-z]{2}\] →  → \\[4pt]
\\\\ → ↵ → the end of a row
\\not\s*= → ≠ → \not=
\\begin␣?\{([pb]?matrix|array\}␣?\{[lcr]*)\} → ⟦ → \begin{pmatrix}
(↵\s*)?\\end␣?\{([pb]?matrix|array)\} → ⟧ → \end{pmatrix}
φ␣?\{([^{}]*)\} → ␣\1␣ → \text{ cm}
φ␣?\{([^{}]*)\} → ␣\1␣ → around it, too
\\mathbb␣?\{?␣?R␣?\}? → ℝ → \mathbb{R}
(?<![\\a-zA-Z])(sqrt|log|ln|exp|(arc|a)?(sin|cos|tan)|cot|sec|csc)(?![a-zA-Z]) → \\\1␣ → sqrt(2)
(?<![\\a-zA-Z])(pi|theta|infty|infinity)(?![a-zA-Z]) → \\\1␣ → 2pi
[⁰¹²³⁴-⁹⁻]+ → ^{\g<0>} → x²
[₀-₉]+ → _{\g<0>} → log₂
(?=[¼-¾⅐-⅞])|(?<!\\)\\␣|\s+ → ␣ → 3½
\{([^{}]*)\\over(?![a-z])([^{}]*)\} → \\frac{\1}{\2} → {1\over2}
""")
AFTER = rules(r"""
⁄ → / → ½
^([^$]*)\$([^$]*)$ → \1¤\2 → $18
[$"] →  → $5$
\bor\b(?=.*[<>≤≥]) → ∪ → x<1 or x>2
,?␣*\b(or\b(?=.*[\d=\\])|and\b(?!.*[<>≤≥]))␣* → ,␣ → 1, 2 and 3
␣+(?=[^\w\s¤€£¢]|$)|(?<![\w})%.:,])␣+|(?<=␣)␣+ →  → x + 1
(?<=\d)(\{,\}|(?<!\d{4}),(?=\d{3}(?!\d))(?![^([]*[)\]]|[^«]*»)|␣(?=\d{3}(?!\d))) →  → 12,345
([¤€£])␣?([\d.,]+) → \2␣\1 → ¤18
,␣ → , → 12, 345
\^\{?deg\}? → ␣deg → 90^{\circ}
(?<=\d)␣?\^?\{?␣?(st|nd|rd|th)\b␣?\}? →  → 12^{th}
\b(square|sq|cubic)␣*$ →  → 5 square units
(?<=\d)E(?=[-\d]) → e → 1.5E6
\b(square|sq)\b␣?([a-z]*) → \2^2 → square m
\bcubic\b␣?([a-z]*) → \1^3 → cubic m
\^\{(\w)\}(?!\w) → ^\1 → cm^{2}
_\{(\w+)\}(?!\w) → _\1 → 11_{10}
\\frac␣?(\w) → \\frac{\1} → \frac12
\\frac(\{[^{}]*\})(\w) → \\frac\1{\2} → \frac{1}2
(?<![\w.^}])(\d+)␣?\\frac\{(\d+)\}\{(\d+)\} → \1␣\2/\3 → 3\frac{1}{2}
(?<![\d.])10\^(\{(-?\d{1,3})\}|(\d{1,3}))(?!\d) → 1e\2\3 → 10^{6}
(?<![\w.^}])([\d.]+)␣?[*x]␣?1e → \1e → 1.5*10^6
\\(arc(sin|cos|tan)|(sin|cos|tan)\^\{-1\}) → \\a\2\3 → \tan^{-1}
\\log(?!␣?_|[a-z]) → \\log_{10} → \log 2
\\log␣?_ → \\log_ → \log _2
↵(?=[^&⟧]*⟧) → , → a column
⟦([^&⟧]*)⟧ → (\1) → a column
^\(([^()]*)\)(?=_|␣[a-z]+$) → \1 → (1011)_2
^([\d.]+)-([\d.]+(-[\d.]+)*(␣[a-z]+)?)$ → \1–\2 → 10-12
^0(\d:\d\d)$ → \1 → 07:05
\+∞ → ∞ → (2,+∞)
(?<![^,«»∪])([^,«»∪±]*)±([^,«»∪]*) → \1+\2,\1-\2 → 1±2
(^|[,({=«∪])\+ → \1 → +5
^[=*`]+|[*`.,;:␣]+$ →  → **5**.
(?i)(?<=\d)␣?a\.?m$ → ␣am → 8:30 a.m.
(?i)(?<=\d)␣?p\.?m$ → ␣pm
(?i)^(an?|the)␣(?=[a-z]{3}) →  → a rhombus
^«[a-z](∈ℝ)?[|:](.*)»$|^[a-z]∈ → \2 → {x ∈ ℝ | x>2}
(?i)^«»$|^no␣(real␣)?solutions?$ → ∅ → no solution
(?i)^ℝ$|^all␣real␣(numbers|s)$ → (-∞,∞) → all reals
^(\w+)␣base␣(\d+)$ → \1_\2 → 11 base 2
deg␣?[CF]$ → deg → 68 deg F
(?<=\d)(?=(mm|cm|km|kg|in|ft|yd|mi|lb|oz|ml|gal|min|deg)\b|[¤€£¢]) → ␣ → 5cm
\\log_\{?e\}? → \\ln␣ → \log_e 2
^([^=a-zA-Z]+)=ν$ → \2=\1 → 5=x
τ>τ>τ → \3<\2<\1 → 5>x>2
τ≥τ≥τ → \3≤\2≤\1
τ>τ≥τ → \3≤\2<\1
τ≥τ>τ → \3<\2≤\1
τ>τ → \2<\1 → x>2
τ≥τ → \2≤\1
τ<ν<τ → \2=(\1,\3) → 2<x<5
τ<ν≤τ → \2=(\1,\3]
τ≤ν<τ → \2=[\1,\3)
τ≤ν≤τ → \2=[\1,\3]
ν<τ → \1=(-∞,\2) → x<5
ν≤τ → \1=(-∞,\2]
τ<ν → \2=(\1,∞) → 5<x
τ≤ν → \2=[\1,∞)
""")
# A command, a sign, a letter that is not Latin, or a word
SIGN = r"\\[a-zA-Z]+|\\\S|[<>]=|(?<![\d)}])!=|[^\w\s]|[^\W_a-zA-Z0-9]|(?<![a-zA-Z])[a-z]{2,}"
NOT_ASCII = "[^\x00-\x7f±≤≥≠∈∪∞«»∅ℝ…↵⟦⟧¤€£¢]"


SPELLING = [
    *BEFORE,
    (SIGN, lambda sign: SPELLING_OF.get(sign[0], sign[0])),
    (NOT_ASCII, lambda sign: unicodedata.normalize("NFKC", sign[0])),
    *AFTER,
]


@lru_cache
def cleaned(text: str) -> str:
    """The text in one spelling, without what only wraps or spaces it."""
    for pattern, instead in SPELLING:
        text = re.sub(pattern, instead, text)
    return text


# --- whether two answers are the same -------------------------------------------------------------

# The letter of a choice, alone or before its text: D, (D) 12, D. 12, Option D.
CHOICE = r"""(?xs) (?: (?i: (?:option|choice|answer) :?[ ]? )?
    (?: \( ([A-Z]) \) | ([A-Z]) (?= [.):] (?:[ ]|$) | $ ) ) [.):,]* [ ]* )? (.*)"""
# What stands between the formulas of a problem.
BETWEEN = r"""(?x) \$+ | \\[()\[\]] | \\\\(?![a-zA-Z]) | [&\n,;] | [.:?!](?=[\s$]|$)
    | (?<!\\)\b (?: [a-zA-Z]{3,} | an?(?=[ ][a-zA-Z]) | is | by | of | to | in | at | if | as )\b"""


def equal(wanted: str, given: str, text: str = "") -> bool:
    """Whether an answer in LaTeX or plain text is the wanted one, for the problem with this text.
    This is not symmetric: the wanted answer says which steps are allowed, and which unit counts."""
    if max(len(wanted), len(given)) > LONGEST_ANSWER:
        return wanted == given.strip()
    (letter, wanted), (given_letter, given) = as_choice(wanted), as_choice(given)
    if letter and given_letter and not (wanted and given):
        # behind the letter stands no other one, and no words but those of the choice
        has_words = re.search(r"(?<![\\a-z])[a-z]{2}", given) and given not in cleaned(text)
        return letter == given_letter and not has_words and not re.search(r"\b[A-Z]\b", given)
    if letter and given_letter not in ("", letter):
        return False
    try:
        return same(wanted, given) and not copied(wanted, given, text)
    except FAULTS:
        return False


def as_choice(text: str) -> tuple[str, str]:
    """The letter of a choice, '' for none; and the text behind it, in one spelling."""
    in_brackets, alone, behind = re.fullmatch(CHOICE, cleaned(text)).groups("")
    return in_brackets + alone, behind


def copied(wanted: str, given: str, text: str) -> bool:
    """Whether a formula of the problem is the answer or, if it is long or an equation, a part of
    it: by its numbers and letters, in any order. Not if these are those of the wanted answer."""
    leaves, others = leaves_of(given), leaves_of(wanted)
    if leaves == others or re.fullmatch("[-.0-9]+", given) and "^" not in wanted:
        return False
    formulas = [leaves_of(cleaned(formula)) for formula in re.split(BETWEEN, text)]
    return any(found == leaves or found.total() > 2 and found <= leaves for found in formulas)


def leaves_of(text: str) -> Counter:
    """The numbers, letters, functions, -, =, | and % of a formula, and how often each is there."""
    return Counter(re.findall(r"\\(?!frac)[a-z]+|[a-zA-Z=|%-]|\d+", text))


# --- part by part ---------------------------------------------------------------------------------

OPENING, CLOSING = "([{«⟦", ")]}»⟧"
# What a value may be called: x_1, f(x), AB, (x, y); and in a given answer |z|, m + n, \angle ABC,
# all without digits but in brackets or as an index.
NAME = r"""(?: (?: [a-zA-Z] | [A-Z]+ | \\[a-z]+ ) '? (?: _\{?\w+\}? )? (?: \([^()=]*\) )?
    | \( [a-z] (?:_\{?\d\}?)? (?: , [a-z] (?:_\{?\d\}?)? )+ \) )"""
LONG_NAME = r"""(?=[^=]*[a-zA-Z]) (?! [^=]*\\sqrt | [^=]*(?<![\\a-z])(?!deg)[a-z]{3,}[ ][a-zA-Z\\] )
    (?: [a-zA-Z\\|] | \([^()=]*\) ) (?: [^]\d=([,∪] | \([^()=]*\) | _\{?\d+ | \^\{?-1 )*"""


def same(wanted: str, given: str) -> bool:
    """Whether two texts in one spelling are the same: a list, a set or a union in any order, a
    tuple, an interval or a matrix in its own. A name of a value may be left out or added."""
    wanted, given = unwrapped(wanted), unwrapped(given)
    if squeezed(wanted) == squeezed(given):
        return given != ""
    name, wanted = named(wanted, NAME)
    given_name, given = ("", given) if "=" in wanted else named(given, LONG_NAME)
    if name or given_name:
        return given_name in ("", name or given_name) and same(wanted, given)
    (kind, items), (given_kind, others) = parts(wanted), parts(given)
    if kind != given_kind or len(items) != len(others):
        return False
    if kind == "":
        return same_value(wanted, given)
    if kind not in "∪,":
        return all(map(same, items, others))
    for item in items:
        alike = [other for other in others if same(item, other)]
        if not alike:
            return False
        others.remove(alike[0])
    return True


def unwrapped(text: str) -> str:
    """A text without brackets that say nothing; but values with names of their own are a tuple."""
    while (
        is_wrapped(text)
        and text != "«∅»"
        and (text[0] in "«{⟦" or len(split(text[1:-1], ",")) == 1)
    ):
        text = text[1:-1]
    names = {named(item, NAME)[0][:1] for item in split(text, ",")}
    return f"({text})" if len(names) > 1 and "" not in names else text


def named(text: str, names: str) -> tuple[str, str]:
    """The name of a value, '' for none, and the value."""
    value = r"(?! .* (?<![a-zA-Z])\1(?![a-zA-Z]) ) ( [^∪,]* | [(«[].* )"  # without the name
    match = re.fullmatch(f"(?x)({names})={value}", text)
    return match.groups() if match else ("", text)


def parts(text: str) -> tuple[str, list[str]]:
    """What a text is made of: the sign between its items, or the brackets around them; and these.
    One item has no sign."""
    for sign in "∪,↵&=":
        if len(items := split(text, sign)) > 1:
            return sign, items
    if is_wrapped(text):
        return text[0] + text[-1], split(text[1:-1], ",")
    return "", [text]


def is_wrapped(text: str) -> bool:
    """Whether brackets stand around all of a text."""
    return text[:1] in OPENING and depths(text).index(0) == len(text) - 1


def depths(text: str) -> list[int]:
    """In how many brackets each character stands."""
    return [*accumulate((sign in OPENING) - (sign in CLOSING) for sign in text)]


def split(text: str, sign: str) -> list[str]:
    """What stands between the signs that are in no brackets."""
    places = [k for k, depth in enumerate(depths(text)) if depth == 0 and text[k] == sign]
    return [text[i + 1 : k] for i, k in pairwise([-1, *places, len(text)])]


# --- value by value -------------------------------------------------------------------------------

KNOWN = r"""(?: mi/h | mm | cm | km | kg | in | ft | yd | mi | lb | oz | ml | gal | min | day | week
    | month | year | deg | rad | [mglsh¤€£¢] ) (?: \^\d )?"""
# Another word behind a wanted number is its unit, if it does not make it another number.
OTHER = r"""(?<=[\d}]\ )(?! [a-z]*illion | thousand | hundred | dozen | lakh | crore | base | or
    | ad | [ap]m | bce? | [a-z]+ths? ) [a-z]{2,}"""
# 5 cm, 5 mi/h, 25%; but a lone letter wants no minus sign: -2 m
WITH_UNIT = r"""(?xi) ( -.*\ [mglsh] | .*? )
    ( \ (?:UNIT) (?:/UNIT)? )? (%?)"""
GIVEN = WITH_UNIT.replace("UNIT", KNOWN)
WANTED = WITH_UNIT.replace("UNIT", f"{KNOWN}|{OTHER}", 1).replace("UNIT", KNOWN)
ABOVE_1 = r"-?(?:[2-9]|[1-9]\d+)(?:\.\d+| \d+/\d+)?"
WORDS = r"(?=.*[^\W\d_]{3}|[^\W\d_]+$)[^\W\d_][\w ,.'()&:!?/-]+"  # they do not differ by capitals


def squeezed(text: str) -> str:
    """A text without what does not count when texts are compared."""
    text = re.sub(r"(?<!\\[a-z]{3}) (?!(?<=\d )\d)", "", text)  # but not \cotx and 12
    return text.casefold() if re.fullmatch(WORDS, text) else text


def same_value(wanted: str, given: str) -> bool:
    """Whether two items are numbers or expressions with one value and one unit. 25 is right for
    25 %, and 25 % for .25, and for 25: the problem may ask for percent."""
    if re.fullmatch(WORDS, wanted):
        return False
    wanted, unit, percent = re.fullmatch(WANTED, wanted).groups("")
    given, given_unit, given_percent = re.fullmatch(GIVEN, given.removesuffix(unit)).groups("")
    if unit and given_unit:
        return False
    if same_expression(wanted + percent, given + given_percent):
        return True
    if percent == given_percent or not (percent or re.fullmatch(ABOVE_1, wanted)):
        return False
    return same_expression(wanted, given)


# --- expressions ----------------------------------------------------------------------------------

LARGEST_ARGUMENT = 1000  # of a power, and of a function
MOST_BITS = 1000  # of a value, before or behind the point
MOST_TOKENS = 200
SIGNS = [(0,)] + 10 * [(1,)] + 6 * [(1, -1)]  # of letters at the points
# What reading and computing may raise
FAULTS = (ArithmeticError, LookupError, ValueError, TypeError, RecursionError)
mp = mpmath.MPContext()
mp.dps = 200  # digits; two values are the same if half of them agree
CONSTANTS = {"e": mp.e, "i": mp.j, r"\pi": mp.pi}
FUNCTIONS = "exp ln sin cos tan cot sec csc asin acos atan sinh cosh tanh"
GREEK = "pi|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|psi|omega"
# A letter, but not that of a command; and what may stand behind it
LETTER = rf"""(?: (?<!\\) (?<!\\[a-z]) (?<!\\[a-z]{{2}}) (?<!\\[a-z]{{3}}) (?<!\\[a-z]{{4}})
    [a-zA-Z] | \\(?:{GREEK}) (?![a-z]) ) '? (?: _(?: \w | \{{\w+\}} ) )?"""
TOKEN = rf"""(?xa) (?<![\w^.}}])\d+[ ]\d+/\d+ | \d{{1,80}}(?:\.\d{{1,80}})?(?:[eE]-?\d\d?)?(?![\d.])
    | \.\d{{1,80}}(?!\d) | {LETTER} | \\log_ | \\[a-z]+ | !+ | \S"""
FACTOR = r"[a-zA-Z({¦\\]|\d+\^"  # how one begins that has no sign before it, as in n 2^k
BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "^": 4, "!": 5, "%": 5}  # of signs; of no sign 2.5
BRACKETS = dict(zip("([{|¦", ")]}||"))  # ¦ is a | that opens
OPERATIONS = {
    "+": operator.add,
    "-": operator.sub,
    "negative": operator.neg,
    "*": operator.mul,
    "/": operator.truediv,
    "|": abs,
    "^": operator.pow,
    "!": mp.factorial,
    "%": lambda value: value / 100,
    r"\log_": mp.log,
} | {rf"\{name}": getattr(mp, name) for name in FUNCTIONS.split()}
# The step that an operation is
STEP_OF = table(
    r"""
    sum  + -
    !
    |
    \sin \cos \tan \cot \sec \csc \sinh \cosh \tanh \asin \acos \atan
    \log_ \ln
    e    \exp
"""
)


def same_expression(wanted: str, given: str) -> bool:
    r"""Whether two expressions have the same values at points, and the given one takes no steps
    that the wanted one does not take. At the first point letters are 0, so x^2/x is not x. Points
    are left out where there are no real values; but \ln x, without one below 0, is not \ln|x|."""
    if squeezed(wanted) == squeezed(given):
        return True
    trees = tree_of(wanted), tree_of(given)
    letters = sorted({*re.findall(f"(?x){LETTER}", f"{wanted} {given}")} - {*CONSTANTS})
    rng, compared = random.Random(0), 0
    steps = allowed, taken = {""}, set()
    for tree, own in zip(trees, steps):
        sums_of(tree, own)
    for signs in SIGNS if letters else SIGNS[:1]:
        sizes = [mp.mpf(rng.choice(signs) * rng.lognormvariate(2, 4)) for _ in letters]
        point = CONSTANTS | dict(zip(letters, sizes))
        values = []
        with contextlib.suppress(*FAULTS):
            for tree, own in zip(trees, steps):
                values.append(compute(tree, point, own))
        if len(values) == 2:
            if not taken <= allowed or not mp.almosteq(*map(mp.convert, values), mp.eps**0.5, 0):
                return False
            compared += 1
        elif values and (signs == SIGNS[0] or "|" in wanted):
            return False
    return compared > bool(letters)


def tree_of(text: str):
    """The tree of an expression: an operation and its trees, or a token. Raises one of FAULTS."""
    text = re.sub(r"\|([^|]+)\|", r"¦\1|", text)
    tokens = ["", *reversed(re.findall(TOKEN, text))]
    tree = read(tokens) if len(tokens) < MOST_TOKENS else ""
    if tokens != [""]:
        raise ValueError("it is no expression, or too long")
    return tree


def read(tokens: list[str], least: float = 0):
    """The tree of the last tokens, as far as they bind more than `least`."""
    tree = operand(tokens)
    while binding_of(tokens) > least:
        sign = tokens.pop() if tokens[-1] in BINDING else "*"
        tree = (sign, tree) if sign in "!%" else (sign, tree, read(tokens, BINDING[sign] + 0.5))
    return tree


def binding_of(tokens: list[str]) -> float:
    """How much the next sign binds, or the next factor without a sign."""
    if re.match(FACTOR, "".join(tokens[:-3:-1])):
        return 2 if tokens[-1] in OPERATIONS else 2.5
    return BINDING.get(tokens[-1], 0)


def operand(tokens: list[str]):
    """The tree of a number, a letter, a group or a command, with its sign."""
    token = tokens.pop()
    if token == "-":
        return ("negative", read(tokens, 2.5))
    if token in BRACKETS:
        tree = read(tokens)
        if tokens.pop() != BRACKETS[token]:
            raise ValueError("a bracket is not closed")
        return ("|", tree) if token in "|¦" else tree
    if token == r"\sqrt":
        degree = operand(tokens) if tokens[-1] == "[" else "2"
        return ("^", operand(tokens), ("/", "1", degree))
    if token == r"\frac":
        return ("/", operand(tokens), operand(tokens))
    if token not in OPERATIONS:
        return token
    exponent = operand(tokens) if tokens[-1] == "^" and tokens.pop() else "1"  # \sin^2 x
    base = [operand(tokens)] if token == r"\log_" else []
    argument = operand(tokens) if tokens[-1] in BRACKETS else read(tokens, 2)
    return ("^", (token, argument, *base), exponent)


def sums_of(tree, steps: set) -> tuple[int, int]:
    """How many factors of a tree are sums, above and below its strokes. Products and powers of sums
    are added to the steps."""
    if isinstance(tree, str):
        return 0, 0
    sign, *parts = tree
    counts = [sums_of(part, steps) for part in parts]
    if sign == "/":
        counts[1] = counts[1][::-1]
    above, below = map(sum, zip(*counts))
    is_power = sign == "^" and parts[1][0] != "/"  # no root
    if max(above, below) > 1 and sign in "*/" or is_power and any(counts[0]):
        steps.add("product of sums")
    if sign in "+-":
        return 1, 0
    return (above, below) if sign in ("*", "/", "negative") else (0, 0)


def compute(tree, point: dict, steps: set):
    """The value of a tree at a point, a Fraction if it is made of plain numbers. The steps that it
    takes are added: letters, functions, roots, sums, and what is done with plain numbers alone, but
    no reduced fraction. Raises one of FAULTS."""
    if isinstance(tree, str):
        if tree not in point:
            return sum(map(Fraction, tree.split()))
        steps.add(tree)
        return +point[tree]
    sign, *parts = tree
    values = [compute(part, point, steps) for part in parts]
    first, last = values[0], values[-1]
    are_plain = all(isinstance(value, Fraction) for value in values)
    is_fraction = are_plain and sign == "/" and 1 < abs(last) == (first / last).denominator
    if are_plain and (sign in "+-*/^" and not is_fraction or sign == "negative" and first < 0):
        steps.add(f"{sign} of numbers")
    if sign == "^" and isinstance(last, Fraction) and last.denominator > 1:
        steps.add("root")
        are_plain = False
    steps.add(STEP_OF.get(sign, ""))
    if sign[0] in "^!\\" and abs(last) > LARGEST_ARGUMENT:
        raise ValueError(f"the argument of {sign} is too large")
    if not are_plain:
        values = [*map(mp.convert, values)]
    result = OPERATIONS[sign](*values)
    if result and abs(mp.mag(result)) > MOST_BITS or mp.im(result) and not any(map(mp.im, values)):
        raise ValueError(f"{sign} has no real value, or a too large one")
    return result
