r"""The accepted ways of writing an answer, as tables, and one spelling for all of them.

`cleaned` applies the rules of RULES, one after the other. It returns ASCII, LaTeX and Greek
letters, with words and units in double quotes. The other functions take apart what expressions.py
does not read: choices, sentences and units.

A table of words has one spelling in each line, and behind it the others. A table of rules has a
`Rule` in each row. Patterns that begin with (?x) have spaces and comments that do not count.
"""

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple


def table(text: str) -> list[list[str]]:
    """The words of each line."""
    return [line.split() for line in text.splitlines() if line.strip()]


# ␣ stands for a space, which ends the name of a command.
SPELLED = table(
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

    \frac␣     \dfrac \tfrac \cfrac \nicefrac \sfrac
    \binom␣    \dbinom \tbinom
    \sqrt␣     √
    \emptyset␣ ∅ \varnothing
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
# In the singular. The last lines are parts of units.
UNITS = table(
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
"""
)
NOTHING = "unit st nd rd th"  # words that name no unit: 5 units, 12th
# Words behind a number that say that the number alone is not the answer.
NO_UNIT = set(
    """
    not isnt is are was were be if than more less least most fewer wrong incorrect maybe either
    neither nor but plus minus squared cubed factorial mod over choose root to through until between
    about dozen score gross pair couple lakh crore thousand million billion trillion half halves
    third quarter fourth fifth sixth eighth tenth hundred hundredth thousandth double twice triple
    rather except unless possibly rounded approximately negative below roughly or so ten
    """.split()
)
ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
TURNED = {">": "<", r"\ge": r"\le"}
SPELLING_OF = {other: sign.replace("␣", " ") for sign, *others in SPELLED for other in others}
UNIT_OF = {word: line[0] for line in UNITS for word in line}
UNIT_OF |= dict.fromkeys(NOTHING.split(), "")


class Rule(NamedTuple):
    """A way of writing, and what is written instead."""

    name: str
    pattern: str
    replacement: str | Callable[[re.Match], str]
    takes: str  # an example, an arrow, and what the rule makes of it
    leaves: str  # an example that it leaves alone

    def apply(self, text: str) -> str:
        return re.sub(self.pattern, self.replacement, text)


def plain(character: re.Match) -> str:
    """Wide or bold characters as usual ones. Those without a width vanish."""
    if unicodedata.category(character[0]) == "Cf":
        return ""
    return unicodedata.normalize("NFKC", character[0])


def scientific(power: re.Match) -> str:
    factor = power[1] or "1"
    return f"{factor.strip(' *x')}e{power[2].strip('{ }')} "


# Parts of patterns
TEXT = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname\*?|boldsymbol)[ ]?"
WORDS = r"(?!(?:e|i|or|and)[ ]*\})([^\W\d_][^\d\\\"${}]*?)"  # in braces; e and i are numbers
MATRIX = r"\{(?:[pbB]|small)?(?:matrix|array)\}"
GROUP = r"((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)"  # with braces in braces
KNOWN = f"(?:{'|'.join(filter(str.isalpha, UNIT_OF))})s?"  # a unit
POWER = r"(?![a-z])\.?(?:[ ]?\^[ ]?\{?-?\d\}?)?[ /]*"  # of a unit, and what joins it to the next
UNIT = r'"[^"]*"(?= *(?:$|[,;)\]}]|\\\}))|[¤€£¥₹¢]'  # behind what it belongs to

RULES = [
    # characters, commands and words
    Rule("escaped twice", r"(?<!\\)\\\\(?=[a-z]{2})", r"\\", r"3\\sqrt2 → 3\sqrt2", r"5\\x"),
    Rule(
        "layout",
        r"""(?x) \\! [ ]*
            | \\ (?: left | right | middle | [bB]ig[glr]* | [a-z]+style | (?:no)?limits | bf
                   | underline | boxed | fbox ) (?![a-zA-Z]) \.?
            | (?<=\\\\) \s? \[-?[\d.]+ [ ]? [a-z]{2}\] | \\phantom [ ]? \{[^{}]*\}""",
        "",
        r"\left(5\\[4pt]\phantom{-}2\right. → (5\\2",
        r"\leftarrow",
    ),
    Rule(
        "one spelling",
        r"""(?x) \\[a-zA-Z]+ | \\.      # a command
            | [<>]= | (?<!\d)!=         # != in plain text, but not in 5!=120
            | [^\w\s] | [^\W\d_a-zA-Z]  # a sign, or a letter that is not Latin""",
        lambda sign: SPELLING_OF.get(sign[0], sign[0]),
        r"x\leq1 → x\le 1",
        "5!=120",
    ),
    Rule("words", rf"{TEXT}\{{ *{WORDS} *\}}", r' "\1" ', r'5\text{ cm} → 5 "cm" ', r"\text{5}"),
    Rule("superscript", r"[⁰¹²³⁴-⁹⁻]+", r"^{\g<0>}", "x² → x^{²}", "x2"),
    Rule("subscript", r"[₀-₉]+", r"_{\g<0>}", "log₂ 3 → log_{₂} 3", "x_2"),
    Rule("mixed number in one character", r"(?=[¼-¾⅐-⅞])", " ", "3½ → 3 ½", "31/2"),
    Rule("wide character, or one without width", r"[^\x00-\x7f]", plain, "５\u200b → 5", "ε"),
    Rule(
        "space of LaTeX, or any white space",
        r"(?<!\\)\\ |(?<!~)~(?!~)|\s+",
        " ",
        r"5\ 6 → 5 6",
        "5~~6",
    ),
    Rule(
        "start of a matrix",
        rf"(?x) \\begin [ ]? {MATRIX} (?: [ ]? \{{[clr| ]*\}} )?",
        r"\\matrix ",
        r"\begin{array}{cc}1 → \matrix 1",
        r"\begin{cases}1",
    ),
    Rule(
        "end of a matrix",
        rf"(?:\\\\)? *\\end ?{MATRIX}",
        r"\\endmatrix ",
        r"1\\\end{matrix} → 1\endmatrix ",
        r"1\end{cases}",
    ),
    Rule(
        "fraction by over",
        rf"(?x) \{{ {GROUP} \\over (?![a-z]) {GROUP} \}}",
        r"\\frac{\1}{\2}",
        r"{1\over2} → \frac{1}{2}",
        r"\overline{1}",
    ),
    Rule(
        "no words",
        rf"{TEXT}(?:\{{([^{{}}]*)\}}|(?=\{{))",
        r" \1 ",
        r"\mathbf{5} →  5 ",
        r"\sqrt{5}",
    ),
    Rule(
        "function in plain text",
        r"(?<![\\a-zA-Z])(sqrt|sin|cos|tan|log|ln|exp|pi|infinity)(?![a-zA-Z])",
        r"\\\1 ",
        r"2pi → 2\pi ",
        "pick",
    ),
    Rule(
        "empty set",
        r'\\\{ ?\\\}|(?i:^[" ]*no (?:real )?solutions?[". ]*$)',
        r"\\emptyset ",
        r"No solution. → \emptyset ",
        r"\{0\}",
    ),
    Rule(
        "real numbers",
        r'\\mathbb ?\{? ?R ?\}?|(?i:^[" ]*all real(?:s| numbers)[". ]*$)',
        r"\\reals ",
        r"\mathbb{R} → \reals ",
        r"\mathbb{Z}",
    ),
    Rule(
        "does not exist",
        r'(?i)^[" ]*(?:DNE|does not exist)[". ]*$',
        "undefined",
        "DNE → undefined",
        "DNA",
    ),
    Rule(
        "one of several words",
        r"^(?=.*[A-Z]|.*[a-z]{3})([^\d=<>\\+*/^-]+?),? +or +([^\d=<>\\+*/^-]+)$",
        r"\1/\2",
        "A or C → A/C",
        "i or -i",
    ),
    Rule(
        "two units",
        rf"""(?xi) ^ (\d+) [ "]* ({KNOWN}) [ ",]* (?:and)? [ "]*
            (\d+) [ "]* (?!\2) ({KNOWN}) [ "]* $""",
        r"t_{\1 \2 \3 \4}",
        "2 hours and 5 minutes → t_{2 hours 5 minutes}",
        "2 hours",
    ),
    Rule(
        "two ends of an interval",
        r"^ *([a-z]) *(>|\\ge) *([^<>]+?) *\band +\1 *(<|\\le) *([^<>]+)$",
        lambda ends: f"{ends[3]} {TURNED[ends[2]]} {ends[1]} {ends[4]} {ends[5]}",
        "x>1 and x<2 → 1 < x < 2",
        "x<1 and x>2",
    ),
    Rule(
        "or, and",
        r",? *\b(?:or|and(?!.*(?:[<>]|\\[gl]e(?![a-z]))))\b *",
        ", ",
        "1, 2, and 3 → 1, 2, 3",
        "x<1 and x>2",
    ),
    Rule("ratio in words", r'(?<=\d) *"? *\bto\b *"? *(?=\d)', ":", "4 to 9 → 4:9", "to 9"),
    # numbers and sets
    Rule("one dollar sign is money", r"^([^$]*)\$([^$]*)$", r"\1¤\2", "$5 → ¤5", "$5$"),
    Rule("several stand around mathematics", r"\$", " ", "$5$ →  5 ", "¤5"),
    Rule("separator in braces", r"(?<=\d)\{([,:])\}(?=\d)", r"\1", "12{,}345 → 12,345", "{,}"),
    Rule(
        "mixed number",
        r"(?x) (?<![\d.^_]) (\d+) [ ]+ (\d+) [ ]?/[ ]? (\d+) (?![\d.])",
        r"\1\\frac{\2}{\3}",
        r"3 1/2 → 3\frac{1}{2}",
        "1/2",
    ),
    Rule(
        "arguments without braces",
        r"\\(frac|binom) ?(\d) ?(\d)",
        r"\\\1{\2}{\3}",
        r"\frac12 → \frac{1}{2}",
        r"\frac1x",
    ),
    Rule(
        "power of ten",
        r"""(?x) ( (?<! [\d.^}a-zA-Z] ) [\d.]+ [ ]?[*x][ ]? )?
            (?<![\d.]) 10 [ ]? \^ [ ]? ( -?\d{1,3} | \{ [ ]? -?\d{1,3} [ ]? \} ) (?![\d.])""",
        scientific,
        "1.5 * 10^{6} → 1.5e6 ",
        "2^{10}",
    ),
    # Within brackets commas separate numbers.
    Rule(
        "thousands",
        r"""(?x) (?<! [\d.,] ) (?<! \d[ ] ) \d{1,3}
            (?: (?:,\d{3})+ (?! [^([]* [])] | [^{]* \\\} ) | (?:[ ]\d{3})+ )
            (?! ,?\d | [ ]\d )""",
        lambda digits: re.sub("[ ,]", "", digits[0]),
        "12,345 → 12345",
        "(12,345)",
    ),
    Rule(
        "set with a condition",
        r"""(?x) ^ [ ]* \\\{ [ ]* [a-z] [ ]* (?: \\in [ ]* \\reals [ ]* )? [|:]
            (.*) \\\} [ ]* $""",
        r"\1",
        r"\{x|x>2\} → x>2",
        r"\{x\}",
    ),
    Rule(
        "not plus or minus",
        r"\\ne *\\pm *([^,]*)$",
        r"\\ne \1, -\1",
        r"x\ne\pm3 → x\ne 3, -3",
        r"\pm3",
    ),
    Rule(
        "not this, not that",
        r"^ *([a-z]\w*)( *\\ne[^=<>]*), *\1 *\\ne",
        r"\1\2,",
        r"x\ne1, x\ne2 → x\ne1,2",
        r"x\ne1",
    ),
    Rule(
        "all numbers but some",
        r"^ *([a-z]\w*) *\\ne *([^=<>]*)$",
        r"\1\\in \\reals -\\{\2\\}",
        r"x\ne 1, 2 → x\in \reals -\{1, 2\}",
        r"x+y\ne 1",
    ),
    Rule(
        "millions",
        r'(?i)(\d[\d.]*) *("?) *(thousand|million|billion|trillion)s?\b *',
        lambda words: f"{words[1]}e{ZEROS[words[3].lower()]} {words[2]}",
        "2.5 million people → 2.5e6 people",
        "millions",
    ),
    # units
    Rule(
        "base",
        r"""(?x) ^ [ ]* \(? (-?[A-F]*\d[\dA-F]* | [A-F]+(?=\)?_\{?16)) \)?
            (?: [ ]?_[ ]? | [( "]+ base[ ]? ) ["{( ]* (\d+) [)}" ]* [. ]* $   # the base""",
        r'\1 "base \2"',
        '(101)_{2} → 101 "base 2"',
        "x_2",
    ),
    Rule(
        "half of a day",
        r'(?xi) (?<=\d) [ ]* "? [ ]* ([ap]) \.? [ ]? m\b \.? [" ]* $',
        r' "\1m"',
        '3 p.m. → 3 "pm"',
        "3 m",
    ),
    Rule(
        "year",
        r'^ *(\d+)[ "]+([AB])\.? ?([CD])\.?(?: ?E\.?)?[" ]*$',
        r'\1 "\2\3"',
        '44 B.C. → 44 "BC"',
        "2BC",
    ),
    Rule("full hour", r"^ *(\d+):00\b", r"\1", "3:00 → 3", "3:30"),
    Rule(
        "time, but not what may be a ratio in lowest terms",
        r"""(?x) (?<! [\d:.{] ) (?! \d+:00 ) 0? (
            (?: 1?\d | 2[0-3] ) : (?: 0\d | 30 )            # 7:05, 11:30
            | (?: 1?[02468] | 2[02] ) : [0-5][02468]        # both even
            | (?: 1?[05] | 20 ) : [0-5][05]                 # both by 5
            | (?: [369] | 1[258] | 21 ) : (?: 1[258] | 2[147] | 3[369] | 4[258] | 5[147] )  # by 3
            | (?: 7 | 14 | 21 ) : (?: 14 | 21 | 28 | 35 | 42 | 49 | 56 )                  # by 7
            ) (?! [\d:.] )""",
        r"t_{\1}",
        "07:05 → t_{7:05}",
        "9:16",
    ),
    Rule(
        "raised unit",
        r'(?x) \^ [ ]? \{? [ ]? "? (deg|st|nd|rd|th) (?![a-z]) "? [ ]? \}?',
        r' "\1"',
        '12^{th} → 12 "th"',
        "x^t",
    ),
    Rule(
        "degrees of heat", r'"deg" *"?([CF])\b"?', r'"deg \1"', '5 "deg" C → 5 "deg C"', '"deg" x'
    ),
    Rule("percent", r'(?<!")%', ' "%" ', '5% → 5 "%" ', '5 "%"'),
    Rule(
        "number with words behind it",
        rf"""(?xi) ^ ( [-\d./]+ (?: e\d+ )? | -?\d*\\frac\{{\d+\}}\{{\d+\}} )
            [ ]+ ( (?: (?: (?! [a-z]{{3}} ) {KNOWN} | [a-z]{{3,}} ) {POWER} )+ ) $""",
        r'\1 "\2"',
        '5 apples → 5 "apples"',
        "5 x",
    ),
    Rule(
        "unit behind anything",
        rf"""(?xi) (?<! [\\a-z"] ) ( (?: (?=[a-z]{{2}}) {KNOWN} {POWER} )+ ) (?= $ | , )""",
        r' "\1"',
        r'5\pi cm → 5\pi  "cm"',
        "5 m",
    ),
    Rule("power of a unit", r'"\.? ?\^ ?\{?(-?\d)\}?', r'^\1"', '"cm"^2 → "cm^2"', "x^2"),
    Rule(
        "fraction of units",
        r'(?x) \\frac [ ]? \{ [ ]? "([^"]*)" [ ]? \}\{ [ ]? "([^"]*)" [ ]? \}',
        r'"\1/\2"',
        r'\frac{"m"}{"s"} → "m/s"',
        r"\frac{m}{s}",
    ),
    Rule(
        "units in a row",
        r'(?<=[a-z\d]) *" ?(/?) ?"(?=[a-z])',
        r" \1 ",
        '"km"/"h" → "km / h"',
        '"km"',
    ),
    # what stands around an answer, before it or behind it
    Rule(
        "name before an equals sign, or of a point",
        r"""(?x) ^ [ ]? (?: "[^"]*" | \\(?: angle | triangle | overline | vec | det ) [ ]?
              \{?[a-zA-Z]+\}? | [a-z] \^\{-1\} [ ]? \([a-z]\) ) [ ]? =
            | ^ [A-Z] [ ]? (?= \( [^()]*,[^()]* \) $ )""",
        "",
        r"\angle ABC=5 → 5",
        "P(3)",
    ),
    Rule(
        "spaces and punctuation",
        r"""(?x) ^ (?: [ ] | = | \\approx )+    # before an answer
            | [ ]+ $ | (?<= [ ] ) [ ]+          # behind it, and in it
            | (?<= [^. ] ) [ ]* (?: [.,;:] | \\\\ ) [ ]* $""",
        "",
        "=5  6. → 5 6",
        "5",
    ),
    Rule(
        "little words before",
        r"""(?x) ^ [" ]* (?: (?: an? | An?(?=[ ][a-z]) | [Tt]he | [OoIi]n | [Yy]ear | A\.?D\.? )
            [" ]+ )+ (?= [^\W\d_]{3} | \d+$ )""",
        "",
        "the year 1945 → 1945",
        "in 5 days",
    ),
    Rule(
        "emphasis, or braces around all",
        rf'^(?:\*\*?([^*]+)\*\*?|`([^`]+)`|"([^"]*)"|\{{{GROUP}\}})$',
        r"\1\2\3\4",
        "**5** → 5",
        "{5}2",
    ),
]
PUNCTUATION = Rule(
    "punctuation, but not in numbers", r"(?<!\d)[^\w,]|[^\w,](?!\d)", "", "so-so. → soso", "1-2"
)
POWER_FIRST = Rule(
    "power before a unit",
    r"\b(square|sq|cubic)\b +([^\W\d_]+)",
    r"\2 \1",
    "square meters → meters square",
    "meters",
)

CHOICE = r"""(?x) (?: (?i: option | choice | answer ) [ ]? :? [ ]? )?
    (?: \( ([A-Z]) \) | ([A-Z]) (?= [.):] (?:[ ]|$) | $ ) )     # the letter: (D), D. or D alone
    [.):, ]* (.*)"""
# Letters in the beginning, three in a row somewhere, but none alone beside - or /: these are names.
SENTENCE = r"""(?x) (?= .* [^\W\d_]{3} ) (?! .* (?: \b[a-z][/-] | [/-][a-z]\b ) )
    [^\W\d_] [\w ,.'()/&:!?-]*"""
LETTERS = r"[^\W\d_]+(?:[ ,]+[^\W\d_]+)*"  # or words without other signs


@lru_cache(maxsize=1000)
def cleaned(text: str) -> str:
    """The text in one spelling, without what only wraps or spaces it."""
    for _ in range(2):  # twice, for \text{\textbf{cm}} and **"5"**
        for rule in RULES:
            text = rule.apply(text)
    return text.strip()


def as_choice(text: str) -> tuple[str, str]:
    """The letter of a multiple choice, '' for none, and the text behind it: D, (D) 12, D. 12."""
    match = re.fullmatch(CHOICE, text.replace('"', ""))
    return (match[1] or match[2], match[3]) if match else ("", text)


def as_words(text: str) -> str:
    """The words that are compared, if the text is a sentence, a word, or letters such as ABCD; ''
    for other texts."""
    text = text.replace('"', " ").strip().casefold()
    has_words = re.fullmatch(SENTENCE, text) or len(text) > 1 and re.fullmatch(LETTERS, text)
    return PUNCTUATION.apply(text) if has_words else ""


def one_unit(unit: str) -> str:
    """A unit in one spelling: square meters, sq m and m^2 are all m^2. Raises ValueError for a word
    that is no unit."""
    spelled = ""
    unit = POWER_FIRST.apply(re.sub('[".{}]', "", unit.casefold()))
    for word in re.findall(r"[^\W\d_]+|\S", unit):
        singular = word.removesuffix("s") if len(word) > 2 else word
        if NO_UNIT & {word, singular}:
            raise ValueError(f"{word} is no unit")
        spelled += UNIT_OF.get(word, UNIT_OF.get(singular, singular))
    return spelled
