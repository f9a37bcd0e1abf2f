"""Problems of reasoning-gym, a package with a hundred families of problems and their verifiers.

    python train.py --data gym:word_sorting,max_words=3 --model YOUR/MODEL       # `pip install reasoning-gym` brings it

What follows the colon is the family; the options are those of its configuration. What stands in the
last <answer> </answer> is judged or, without them, all that follows the thinking.
"""

import functools
import json

from data import Problem, after_thinking

FAR = 1_000_000_000  # more problems than anyone asks for
INSTRUCTION = "Reply with the answer and nothing else."


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
        raise ValueError(
            f"reasoning-gym has no family {family!r}; it has {', '.join(sorted(gym.factory.DATASETS))}"
        )
    values = {name: value_of(text) for name, text in options.items()}
    # The problem at place i is made from seed + i, so the two splits must lie far from each other.
    first = seed + FAR * (split == "validation")
    try:
        dataset = gym.create_dataset(family, size=number, seed=first, **values)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning-gym's {family} does not take {options}: {error}") from None
    made = []
    for entry in dataset:
        metadata = {"family": family, "options": values, "entry": entry["metadata"]}
        metadata = json.loads(json.dumps(metadata, default=str))
        made.append(
            Problem(
                worded(entry["question"], instruction), str(entry["answer"]), __name__, metadata
            )
        )
    if made[0].answer != "None" and not score(made[0], made[0].answer):
        raise ValueError(
            f"reasoning-gym's {family}: its answers cannot be judged from their text alone"
        )
    return made


def worded(question: str, instruction: str | None = None) -> str:
    """The user's turn. instruction: instead of INSTRUCTION."""
    return f"{question}\n\n{INSTRUCTION if instruction is None else instruction}".strip()


def score(problem: Problem, completion: str) -> bool:
    """Whether the family's verifier gives the answer a whole 1: some give less than 1 for a part of
    it."""
    text = after_thinking(completion)
    if "<answer>" in text:
        text = text.rpartition("<answer>")[2].partition("</answer>")[0]
    entry = {
        "question": problem.prompt,
        "answer": problem.answer,
        "metadata": problem.metadata["entry"],
    }
    judge = verifier(problem.metadata["family"], json.dumps(problem.metadata["options"]))
    return float(judge(text.strip(), entry)) == 1


def value_of(text: str) -> bool | int | float | str:
    """The value of an option."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@functools.cache
def verifier(family: str, options: str):
    """The function that judges an answer: of a family with these options, in JSON."""
    return reasoning_gym().create_dataset(family, size=1, **json.loads(options)).score_answer


def reasoning_gym():
    """The package. ValueError if it is not installed."""
    try:
        import reasoning_gym
    except ImportError:
        raise ValueError(
            "--data gym: reasoning-gym is not installed; `pip install reasoning-gym` brings it"
        ) from None
    return reasoning_gym
