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
import math
import os
import re
from collections.abc import Callable
from fractions import Fraction

from data import Problem, after_thinking, sandbox

FAR = 1_000_000_000  # more problems than anyone asks for
INSTRUCTION = "Reply with the answer and nothing else."
SECONDS = 10.0  # for a verdict, if the verifiers do not say how long they have
SHARE_OF_TIME = 0.9  # of that time: an answer that takes too long to judge is wrong, no failure

# These families run an answer as Python, or give it to sympy, which does. Without the sandbox they
# are refused. A test finds them: it gives each family an answer with an effect.
RUN_ANSWERS = (
    "binary_matrix", "composite", "countdown", "intermediate_integration", "n_queens",
    "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
    "string_insertion",
)  # fmt: skip


def problems(
    split: str,
    number: int,
    seed: int = 0,
    family: str = "",
    instruction: str | None = None,
    **options: str,
) -> list[Problem]:
    """Problems of a family, as its own generator makes them. Two that are alike may come; the
    loader leaves one out. ValueError for a family or an option that reasoning-gym does not know,
    and for a family whose problems cannot be judged here."""
    gym = reasoning_gym()
    if family not in gym.factory.DATASETS:
        families = ", ".join(sorted(gym.factory.DATASETS))
        raise ValueError(f"reasoning-gym has no family {family!r}; it has {families}")
    values = {name: value_of(text) for name, text in options.items()}
    # The problem at place i is made from seed + i, so the two splits must lie far from each other.
    first = seed + FAR * (split == "validation")
    try:
        dataset = gym.create_dataset(family, size=number, seed=first, **values)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's {family} does not take {options}: {error}") from None
    refuse_without_sandbox(family)
    made = []
    for entry in dataset:
        metadata = {"family": family, "options": values, "entry": entry["metadata"]}
        metadata = json.loads(json.dumps(metadata, default=str))
        prompt = worded(entry["question"], instruction)
        made.append(Problem(prompt, str(entry["answer"]), __name__, metadata))
    # The reference answer is the package's own text: no sandbox is needed for it.
    judge = verifier(family, json.dumps(values))
    if made[0].answer != "None" and float(judge(made[0].answer, entry_of(made[0]))) != 1:
        raise ValueError(
            f"reasoning-gym's {family}: its answers cannot be judged from their text alone"
        )
    return made


def worded(question: str, instruction: str | None = None) -> str:
    """The user's turn. instruction: instead of INSTRUCTION."""
    return f"{question}\n\n{INSTRUCTION if instruction is None else instruction}".strip()


def score(problem: Problem, completion: str) -> bool:
    """Whether the family's verifier gives the answer a whole 1: some give less than 1 for a part of
    it. It is asked in the sandbox; what it does not judge in time is wrong."""
    text = answer_of(completion)
    family, entry = problem.metadata["family"], entry_of(problem)
    allowed = ALLOWED_ANSWERS.get(family)
    if allowed is not None and not allowed(text, entry):
        return False
    judge = verifier(family, json.dumps(problem.metadata["options"]))
    if not sandbox.confines():
        refuse_without_sandbox(family)
        return float(judge(text, entry)) == 1
    seconds = SHARE_OF_TIME * float(os.environ.get("SCORE_SECONDS", SECONDS))
    try:
        return sandbox.call(lambda: float(judge(text, entry)), seconds) == 1
    except TimeoutError:
        return False


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


def is_arithmetic(text: str, _entry: dict) -> bool:
    """Whether the text holds numbers, + - * / and brackets alone."""
    return re.fullmatch(r"[\d\s.+\-*/()]*", text) is not None


def uses_each_number_once(text: str, entry: dict) -> bool:
    """Whether an arithmetic text has exactly the numbers of the problem: the package only counts
    them, so that 6+6+6+6 made 24 of any four."""
    numbers = sorted(map(int, re.findall(r"\d+", text)))
    return is_arithmetic(text, entry) and numbers == sorted(entry["metadata"]["numbers"])


NAME = r"[^\W\d]\w*"
FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log",
             "ln", "sqrt", "pi", "E", "C"}  # fmt: skip


def is_formula(text: str, entry: dict) -> bool:
    """Whether the text holds arithmetic, the names of the reference answer, and functions that
    everybody knows: no Integral(...) of the problem itself, and no other Python."""
    known = FUNCTIONS | {*re.findall(NAME, entry["answer"])} - {"Integral"}
    only_names_and_arithmetic = re.fullmatch(r"([\w\s+\-*/()]|\.(?=\d)|(?<=\d)\.)*", text)
    return only_names_and_arithmetic is not None and {*re.findall(NAME, text)} <= known


def is_the_reference(text: str, entry: dict) -> bool:
    """Whether the text is the reference answer, but for upper and lower case."""
    return text.lower() == entry["answer"].strip().lower()


def is_valid_board(text: str, entry: dict) -> bool:
    return text in entry["metadata"]["valid_answers"]


def is_near_the_reference(text: str, entry: dict) -> bool:
    """Whether the text is a number or a fraction within a hundredth of the reference: the package
    compares beginnings, so that 0 was right for 0.27."""
    decimal, fraction = r"\d{0,30}\.?\d{1,30}(e-?\d\d?)?", r"\d{1,30}/0*[1-9]\d{0,30}"
    if not re.fullmatch(f"{decimal}|{fraction}", text):
        return False
    return math.isclose(Fraction(text), Fraction(entry["answer"]), rel_tol=0.01)


def is_complex_number(text: str, _entry: dict) -> bool:
    """Whether the text is made of digits, signs and i: the package takes nan for any number."""
    return re.fullmatch(r"[\d\s.+\-ij()]*", text) is not None


ALLOWED_ANSWERS: dict[str, Callable[[str, dict], bool]] = {
    # These run answers. The first four give a whole 1 to the text of the reference alone.
    "binary_matrix": is_the_reference,
    "spiral_matrix": is_the_reference,
    "string_insertion": is_the_reference,
    "n_queens": is_valid_board,
    "countdown": is_arithmetic,
    "puzzle24": uses_each_number_once,
    "polynomial_multiplication": is_formula,
    "simple_integration": is_formula,
    "intermediate_integration": is_formula,
    # These give a 1 to answers that are wrong.
    "coin_flip": is_near_the_reference,
    "complex_arithmetic": is_complex_number,
    "game_of_life_halting": is_the_reference,  # the package takes any word for True
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
