"""Problems of reasoning-gym, a package with a hundred families of problems and their verifiers.

    pip install reasoning-gym
    python train.py --data gym:word_sorting,max_words=3 --model YOUR/MODEL

What follows the colon is the family; the options are those of its configuration. What stands in the
last <answer> </answer> is judged or, without them, all that follows the thinking.

Some of the package's verifiers run an answer as code. So every verdict is computed in the sandbox,
in a fork of its own (`sandbox.call`), and those families have a check here that lets no code
through (`ALLOWED_ANSWERS`).
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from data import Problem, after_thinking, is_held_out, one_line, sandbox
from data.expressions import FAULTS, close, read, value

AT_ONCE = 1000  # problems in a data set of the package; in some families it decides which they are
PATIENCE = 1000  # problems in a row without a new one, after which a family has no more
INSTRUCTION = "Reply with the answer and nothing else."
LONGEST_ANSWER = 10_000  # characters, and twice those of the reference; a longer one is wrong


def problems(
    split: str,
    number: int,
    seed: int = 0,
    family: str = "",
    instruction: str | None = None,
    **options: str,
) -> list[Problem]:
    """Distinct problems of a family, as its own generator makes them, in the order of their seeds:
    those that the checksum of their own text puts into this split. Fewer, if the family has no
    more. ValueError for a family or an option that reasoning-gym does not know, and for a family
    whose problems cannot be judged here."""
    gym = reasoning_gym()
    if family not in gym.factory.DATASETS:
        families = ", ".join(sorted(gym.factory.DATASETS))
        said = f"has no family {family!r}" if family else "wants a family, as in gym:word_sorting"
        raise ValueError(f"reasoning-gym {said}; it has {families}")
    values = {name: value_of(text) for name, text in options.items()}
    try:
        gym.create_dataset(family, size=1, seed=seed, **values)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's {family} does not take {options}: {error}") from None
    refuse_without_sandbox(family)
    distinct, in_vain = {}, 0
    for entry in entries(family, values, seed):
        text = one_line(entry["question"])
        in_vain += 1
        if text not in distinct and is_held_out(text) == (split == "validation"):
            distinct[text] = entry
            in_vain = 0
        if len(distinct) == number or in_vain == PATIENCE:
            break
    if not distinct:
        raise ValueError(
            f"reasoning-gym's {family} has too few problems with {options}: none is for {split}"
        )
    made = []
    for text, entry in distinct.items():
        metadata = {"family": family, "options": values, "entry": entry["metadata"]}
        metadata = json.loads(json.dumps(metadata, default=str))
        prompt = worded(entry["question"], instruction)
        made.append(Problem(prompt, str(entry["answer"]), __name__, metadata, text))
    # The reference answer is the package's own text: no sandbox is needed for it.
    judge = get_ready(made[0])
    if made[0].answer != "None" and float(judge(made[0].answer, entry_of(made[0]))) != 1:
        raise ValueError(
            f"reasoning-gym's {family}: its answers cannot be judged from their text alone"
        )
    return made


def entries(family: str, options: dict, seed: int) -> Iterator[dict]:
    """The problems of a family without end: the one at place i is made from seed + i."""
    gym = reasoning_gym()
    while True:
        yield from gym.create_dataset(family, size=AT_ONCE, seed=seed, **options)
        seed += AT_ONCE


def worded(question: str, instruction: str | None = None) -> str:
    """The user's turn. instruction: instead of INSTRUCTION."""
    return f"{question}\n\n{INSTRUCTION if instruction is None else instruction}".strip()


def score(problem: Problem, completion: str) -> bool:
    """Whether the family's verifier gives the answer a whole 1: some give less than 1 for a part of
    it. It is asked in the sandbox; what it does not judge in time is wrong."""
    time_left = sandbox.time_of_verdict()
    text = answer_of(completion)
    family, entry = problem.metadata["family"], entry_of(problem)
    if len(text) > LONGEST_ANSWER + 2 * len(problem.answer):
        return False
    allowed = ALLOWED_ANSWERS.get(family)
    if allowed is not None and not allowed(text, entry):
        return False
    refuse_without_sandbox(family)
    judge = get_ready(problem)
    if not sandbox.confines():
        return float(judge(text, entry)) == 1
    try:
        return sandbox.call(lambda: float(judge(text, entry)), time_left()) == 1
    except TimeoutError:
        return False


def get_ready(problem: Problem) -> Callable[[str, dict], float]:
    """The package's verifier for this problem. A verifier process calls this before it starts the
    clock, since the package takes seconds to import."""
    return verifier(problem.metadata["family"], json.dumps(problem.metadata["options"]))


def answer_of(completion: str) -> str:
    """What is judged of a completion."""
    text = after_thinking(completion)
    if "<answer>" in text:
        text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    return text.strip()


def entry_of(problem: Problem) -> dict:
    """The problem as its family made it."""
    metadata = problem.metadata["entry"]
    return {"question": problem.prompt, "answer": problem.answer, "metadata": metadata}


def refuse_without_sandbox(family: str) -> None:
    """ValueError if this family runs answers as code, and this machine has no sandbox for them."""
    if family in RUN_ANSWERS and not sandbox.confines():
        raise ValueError(
            f"reasoning-gym's {family} runs what the model writes as code, and this machine has no"
            " sandbox for it (Landlock and seccomp: Linux on x86-64); take another family"
        )


# --- what an answer must look like before the package's verifier sees it -------------------------


# Numbers with brackets and - before them, and one operation between them: no ** and no //.
SUM = r"([\s(-]*[0-9]{1,9}[\s)]*([+\-*/]|$))*"


def makes_the_target(text: str, entry: dict) -> bool:
    """Whether the text is a sum of the given numbers, each used once, with + - * / and brackets,
    whose value is the target, in 300 digits. The package takes 6+6+6+6 for any numbers, and 24.3
    for 24."""
    if not re.fullmatch(SUM, text):
        return False
    metadata = entry["metadata"]
    numbers = sorted(map(int, re.findall(r"\d+", text)))
    if numbers != sorted(metadata["numbers"]):
        return False
    try:
        return close(value(read(text), {}), metadata.get("target", 24))
    except FAULTS:
        return False


NAME = r"[^\W\d]\w*"
FUNCTIONS = set("sin cos tan asin acos atan sinh cosh tanh exp log ln sqrt pi E C c K".split())


def is_formula(text: str, entry: dict) -> bool:
    """Whether the text holds arithmetic, the names of the reference answer, and functions that
    everybody knows: no Integral(...) of the problem itself, and no other Python."""
    known = FUNCTIONS | {*re.findall(NAME, entry["answer"])} - {"Integral"}
    only_names_and_arithmetic = re.fullmatch(r"[\w\s.+\-*/()]*", text) is not None
    dot_without_digit = re.search(r"(?<!\d)\.(?!\d)|\.[^\W\d]", text) is not None
    names = {*re.findall(NAME, text)}
    return only_names_and_arithmetic and not dot_without_digit and names <= known


def words(text: str) -> list[str]:
    """The words and numbers of a text, in lower case, without what stands between them."""
    return re.findall(r"-?\d+(?:\.\d+)?|\w+", text.lower())


def has_the_words(text: str, entry: dict) -> bool:
    """Whether the text has the words and numbers of the reference, in the same order."""
    return words(text) == words(entry["answer"])


def has_the_number(text: str, entry: dict) -> bool:
    """Whether the only number of the text is that of the reference."""
    numbers, wanted = (
        re.findall(r"-?\d+(?:\.\d+)?", each.replace(",", "")) for each in (text, entry["answer"])
    )
    return list(map(float, numbers)) == list(map(float, wanted))


def is_valid_board(text: str, entry: dict) -> bool:
    """Whether the text is one of the boards that are right."""
    return text in entry["metadata"]["valid_answers"]


def is_the_probability(text: str, entry: dict) -> bool:
    """Whether the text is the reference, or the reference rounded to two digits or more: the
    package compares beginnings, so that 0 was right for 0.27."""
    decimal, fraction = r"\d{0,30}\.?\d{1,30}(e-?\d\d?)?", r"\d{1,30}/0*[1-9]\d{0,30}"
    text = text.lower().removeprefix("+")
    if not re.fullmatch(f"{decimal}|{fraction}", text):
        return False
    value, wanted = Fraction(text), Fraction(entry["answer"])
    rounded = round(wanted, len(text.partition(".")[2]))
    digits = re.sub(r"\D", "", text).lstrip("0")
    return value == wanted or (value == rounded and len(digits) >= 2)


def has_only_possible_moves(text: str, entry: dict) -> bool:
    """Whether each move of a plan moves a box or matches it: the package skips the others, so that
    one long sweep over all squares solved half of the problems."""
    from reasoning_gym.games.boxnet import action_from_response

    squares = entry["metadata"]["initial_state"]
    try:
        for moves in json.loads(text):
            for agent, move in moves.items():
                before, squares = squares, action_from_response(squares, [{agent: move}])
                if squares == before:
                    return False
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return False
    return True


def is_complex_number(text: str, _entry: dict) -> bool:
    """Whether the text is made of digits, signs and i: the package takes nan for any number."""
    return re.fullmatch(r"[0-9\s.+\-ijIJ()]*", text) is not None


ALLOWED_ANSWERS = {
    # These run an answer as Python, or give it to sympy, which does. The first four give a whole 1
    # to the text of the reference alone.
    "binary_matrix": has_the_words,
    "spiral_matrix": has_the_words,
    "string_insertion": has_the_words,
    "n_queens": is_valid_board,
    "countdown": makes_the_target,
    "puzzle24": makes_the_target,
    "polynomial_multiplication": is_formula,
    "simple_integration": is_formula,
    "intermediate_integration": is_formula,
}
# Without the sandbox these are refused. A test finds them: it gives each family an answer with an
# effect.
RUN_ANSWERS = [*ALLOWED_ANSWERS, "composite"]
ALLOWED_ANSWERS |= {
    # These give a 1 to answers that are wrong.
    "boxnet": has_only_possible_moves,
    "coin_flip": is_the_probability,
    "complex_arithmetic": is_complex_number,
    "game_of_life_halting": has_the_words,  # any word was True
    "game_of_life": has_the_words,  # rows behind the last one were not seen
    "gsm_symbolic": has_the_number,  # the sign and a second number were not seen
    "letter_jumble": has_the_words,  # words behind the last one were not seen
    "number_sorting": has_the_words,  # NaN was any number
    "word_sorting": has_the_words,  # words behind the last one were not seen
}


# --- the package ----------------------------------------------------------------------------------


def value_of(text: str) -> bool | int | float | str:
    """The value of an option."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@functools.cache
def verifier(family: str, options: str):
    """The function that judges an answer: of a family with these options, in JSON. It has judged an
    answer of the package, so what it imports late is here before a fork wants it."""
    dataset = reasoning_gym().create_dataset(family, size=1, seed=0, **json.loads(options))
    entry = dataset[0]
    dataset.score_answer(entry["answer"], entry)
    return dataset.score_answer


def reasoning_gym():
    """The package. ValueError if it is not installed."""
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(
            "--data gym: reasoning-gym is not installed; `pip install reasoning-gym` brings it"
        ) from None
    return reasoning_gym
