"""Problems of reasoning-gym, a package with a hundred families of problems and their verifiers.

    pip install reasoning-gym
    python train.py --data gym:word_sequence_reversal,max_words=4 --model YOUR/MODEL

What follows the colon is the family; the options are those of its configuration. What stands in the
last <answer> </answer> is judged or, without them, all that follows the thinking.

Some of the package's verifiers run an answer as code, and some call wrong answers right: these
families are refused by name, but for two that have a verifier here. Every verdict is computed in
the sandbox, in a fork of its own (`sandbox.call`), if the machine has one whole.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator

from data import Problem, after_thinking, is_held_out, one_spelling, sandbox
from data.tasks.mathematics import FAULTS, compute, tree_of

AT_ONCE = 1000  # problems in a data set of the package; in some families it decides which they are
MOST_IN_VAIN = 1000  # problems in a row without a new one, after which a family has no more
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
        raise ValueError(
            f"--data gym:FAMILY: there is no {family!r}; there are"
            f" {', '.join(sorted(gym.factory.DATASETS))}"
        )
    for why, families in REFUSED.items():
        if family in families.split():
            raise ValueError(f"reasoning-gym's {family} is refused: {why}; take another family")
    values = {name: value_of(text) for name, text in options.items()}
    made, in_vain = {}, 0
    for entry in entries(family, values, seed):
        question = entry["question"]
        text = one_spelling(question)
        in_vain += 1
        if text not in made and is_held_out(question) == (split == "validation"):
            metadata = {"family": family, "options": values, "entry": entry["metadata"]}
            metadata = json.loads(json.dumps(metadata, default=str))
            prompt = worded(question, instruction)
            made[text] = Problem(prompt, str(entry["answer"]), __name__, metadata, question)
            in_vain = 0
        if len(made) == number or in_vain == MOST_IN_VAIN:
            break
    return [*made.values()]


def entries(family: str, options: dict, seed: int) -> Iterator[dict]:
    """The problems of a family without end: the one at place i is made from seed + i."""
    while True:
        try:
            made = reasoning_gym().create_dataset(family, size=AT_ONCE, seed=seed, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"reasoning-gym's {family} does not take {options}: {error}") from None
        yield from made
        seed += AT_ONCE


def worded(question: str, instruction: str | None = None) -> str:
    """The user's turn. instruction: instead of INSTRUCTION."""
    return f"{question}\n\n{INSTRUCTION if instruction is None else instruction}".strip()


def score(problem: Problem, completion: str) -> bool:
    """Whether the family's verifier gives the answer a whole 1: some give less than 1 for a part of
    it. On a machine that confines, it is asked in the sandbox, and what it does not judge
    in time is wrong."""
    time_left = sandbox.time_of_verdict()
    text = answer_of(completion)
    if len(text) > LONGEST_ANSWER + 2 * len(problem.answer):
        return False
    judge, metadata = get_ready(problem), problem.metadata["entry"]
    entry = {"question": problem.prompt, "answer": problem.answer, "metadata": metadata}
    if not sandbox.confines():
        return float(judge(text, entry)) == 1
    try:
        return sandbox.call(lambda: float(judge(text, entry)), time_left()) == 1
    except TimeoutError:
        return False


def get_ready(problem: Problem) -> Callable:
    """The verifier for this problem. A verifier process calls this before it starts the clock,
    since the package takes seconds to import."""
    family, options = problem.metadata["family"], problem.metadata["options"]
    return OWN_VERIFIERS.get(family) or verifier(family, json.dumps(options))


def answer_of(completion: str) -> str:
    """What is judged of a completion."""
    text = after_thinking(completion)
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


# Numbers with brackets and - before them, and one operation between them: no ** and no //.
SUM = r"([\s(-]*[0-9]{1,9}[\s)]*([+\-*/]|$))*"


def makes_the_target(text: str, entry: dict) -> bool:
    """Whether the text is a sum of the given numbers, each used once, with + - * / and brackets,
    whose value is the target, exactly. The package takes 6+6+6+6 for any numbers, and 24.3
    for 24, and it runs the text."""
    if not re.fullmatch(SUM, text):
        return False
    metadata = entry["metadata"]
    numbers = sorted(map(int, re.findall(r"\d+", text)))
    if numbers != sorted(metadata["numbers"]):
        return False
    try:
        return compute(tree_of(text), {}, set()) == metadata.get("target", 24)
    except FAULTS:
        return False


OWN_VERIFIERS = {"countdown": makes_the_target, "puzzle24": makes_the_target}
# Families whose verdicts cannot be trusted, or whose problems are never the same.
REFUSED = {
    # as Python, or by sympy, which does so
    "its verifier runs what the model writes as code": """binary_matrix composite n_queens
        intermediate_integration polynomial_multiplication simple_integration spiral_matrix
        string_insertion""",
    "its verifier calls wrong answers right": """boxnet coin_flip complex_arithmetic game_of_life
        game_of_life_halting gsm_symbolic letter_jumble number_sorting propositional_logic
        word_sorting""",
    "its answers cannot be judged from their text alone": "arc_agi rearc",
    "it makes other problems in each process": """codeio isomorphic_strings knight_swap
        list_functions ransom_note word_ladder""",
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
