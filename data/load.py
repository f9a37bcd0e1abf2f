"""Where problems come from, and which of them are held out."""

import hashlib
import importlib
import math
import pkgutil
import random
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data import Problem, records, sandbox, tasks
from data.tasks import mathematics, programming
from data.verify import in_words


@dataclass(frozen=True)
class Spec:
    """One argument of --data: NAME[:WEIGHT][,OPTION=VALUE]..."""

    name: str  # task, known data set, file, folder or OWNER/NAME on the hub
    weight: float  # share of the prompts of each batch, relative to the others
    options: dict[str, str]
    instruction: str | None = None  # said after each problem of a file, instead of what its task says


@dataclass
class Source:
    """The problems of one argument of --data."""

    name: str  # unique in a run; names its curve in the log
    weight: float
    train: list[Problem]
    validation: list[Problem]  # held out: in no source's training problems
    notes: list[str] = field(default_factory=list)  # to be printed: columns that were guessed, problems left out


@dataclass(frozen=True)
class Known:
    """A data set of the hub with a short name."""

    repository: str
    subsets: tuple[str, ...] = ()  # folders; () is all
    columns: tuple[str, str] = ("problem", "answer")  # of the problem, of the answer or the tests
    train: str | None = "train"  # its part to learn from; None: it is for evaluation only
    test: str | None = None  # its part for evaluation; None: what is held out of `train`


KNOWN = {
    "polaris": Known("POLARIS-Project/Polaris-Dataset-53K"),
    "deepscaler": Known("agentica-org/DeepScaleR-Preview-Dataset"),
    "gsm8k": Known("openai/gsm8k", ("main",), ("question", "answer"), test="test"),
    "math": Known("EleutherAI/hendrycks_math", columns=("problem", "solution"), test="test"),
    "math500": Known("HuggingFaceH4/MATH-500", train=None, test="test"),
    "aime24": Known("math-ai/aime24", columns=("problem", "solution"), train=None, test="test"),
    "aime25": Known("math-ai/aime25", train=None, test="test"),
    "deepcoder": Known(
        "agentica-org/DeepCoder-Preview-Dataset",
        ("primeintellect", "taco", "lcbv5", "codeforces"),
        ("problem", "tests"),
        test="test",
    ),
}
OPTIONS = {
    "problem": "column of the problem",
    "answer": "column of the answer",
    "tests": "column of the unit tests; makes it a programming task",
    "solution": "column of the worked solution, which machinery.imitate learns",
    "subset": "folder within the folder or data set; several are joined by +",
    "split": "train, validation or test, where file names say it",
    "validation": "a file of its own to be held out, instead of a part of this one",
}
LIKELY_COLUMNS = {  # guessed in this order
    "problem": ("problem", "question", "prompt", "query"),
    "tests": ("tests", "test_cases"),
    "answer": ("answer", "final_answer", "ground_truth", "target", "solution"),
    "solution": ("solution",),
}
MOST_UNUSABLE = 0.05  # share of a known data set's records that may be left out; of your own files none is
HELD_OUT_SHARE = 10  # at most one distinct problem in so many is held out


def task_names() -> list[str]:
    return sorted({module.name for module in pkgutil.iter_modules(tasks.__path__)})


def load_task(name: str):
    """The task module called `name`. Raises ValueError, naming the tasks there are, for any other name."""
    if name not in task_names():
        raise ValueError(f"no task is called {name!r}; the tasks in data/tasks/ are: {', '.join(task_names())}")
    return importlib.import_module(f"data.tasks.{name}")


def parse_spec(text: str) -> Spec:
    """Reads NAME[:WEIGHT][,OPTION=VALUE]... Raises ValueError for what is none."""
    name, *pairs = text.split(",")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key not in OPTIONS or not equals or not value:
            known = "; ".join(f"{key}= {meaning}" for key, meaning in OPTIONS.items())
            raise ValueError(f"--data {text}: {pair!r} is no option. Options are {known}")
        options[key] = value
    match = re.fullmatch(r"(.+):(\d*\.?\d+)", name)
    name, weight = (match[1], float(match[2])) if match else (name, 1.0)
    if not name or not weight > 0:
        raise ValueError(f"--data {text}: wanted is NAME or NAME:WEIGHT, with a weight above 0")
    return Spec(name, weight, options)


# --- several sources ------------------------------------------------------------------------------------------------


def load_data(
    arguments: Sequence[str],
    train_problems: int | None,
    validation_problems: int | None,
    seed: int = 0,
    instruction: str | None = None,
    wanted: str = "answer",
) -> list[Source]:
    """The problems of all arguments of --data, held-out ones apart.

    train_problems: at most so many of each source (None: all; of a task that makes its own, 100,000 is the most),
    drawn by `seed`. validation_problems: so many of each source, or a tenth of it where it is small (None: a tenth);
    which ones depends on their text alone. A problem that any source holds out is left out of the training problems of
    all. instruction: said after each problem of a file. wanted: what stands in `Problem.answer`; with "solution" it is
    the worked solution. Raises ValueError, with file and line or record, for anything that cannot be used.
    """
    sources = []
    for spec in (replace(parse_spec(argument), instruction=instruction) for argument in arguments):
        known = KNOWN.get(spec.name)
        if spec.name in task_names() and spec.name not in KNOWN:
            if wanted == "solution":
                raise ValueError(f"{spec.name} is a task, which has no worked solutions: give a file that has them")
            sources.append(made_source(spec, train_problems or 100_000, validation_problems, seed))
        elif known is not None and known.train is None:
            raise ValueError(f"{spec.name} is for evaluation (generate.py --evaluate), not to be trained on")
        else:
            sources.append(read_source(spec, validation_problems, wanted))
    number_names(sources)
    held_out = {text_key(problem.prompt) for source in sources for problem in source.validation}
    for source in sources:
        kept = without(source.train, held_out, source.notes)
        if train_problems is not None and len(kept) > train_problems:
            chosen = sorted(random.Random(f"{source.name} {seed}").sample(range(len(kept)), train_problems))
            kept = [kept[i] for i in chosen]
        if not kept:
            raise ValueError(f"--data {source.name}: no training problem is left")
        source.train = kept
    return sources


def load_evaluation(argument: str, number: int, seed: int = 0, instruction: str | None = None) -> Source:
    """The problems to evaluate on, as a source without training problems: the test part of a known data set, what
    training holds out of a task or of a known data set without one, all of a file of one's own. At most `number`."""
    spec = replace(parse_spec(argument), instruction=instruction)
    known = KNOWN.get(spec.name)
    if known is None and spec.name in task_names():
        source = made_source(spec, 1, number, seed)
    elif known is not None and known.test is None and "split" not in spec.options:
        source = read_source(spec, number)
    else:
        records, notes = read_problems(spec, split=spec.options.get("split") or (known.test if known else "test"))
        problems, more = distinct(records)
        chosen = sorted(random.Random(seed).sample(range(len(problems)), min(number, len(problems))))
        source = Source(spec.name, 1.0, [], [problems[i] for i in chosen], notes + more)
    source.train = []
    return source


def task_of(argument: str) -> str:
    """The task that judges the problems of an argument of --data. Of a data set that is known here, nothing is read; of
    another, its first record. Raises ValueError as `load_evaluation` does."""
    spec = parse_spec(argument)
    known = KNOWN.get(spec.name)
    if known is not None:
        is_tests = known.columns[1] in LIKELY_COLUMNS["tests"]
    elif spec.name in task_names():
        return load_task(spec.name).__name__
    else:
        first = next(records.read_records(files_of(spec, spec.options.get("split", "test"))[0]))
        is_tests = "tests" in choose_columns(*first, spec.options, None)[0]
    return "data.tasks.programming" if is_tests else "data.tasks.mathematics"


def next_source(weights: Sequence[float], handed_out: Sequence[int]) -> int:
    """Which source the next prompt comes from, by the numbers of prompts that each has given so far: any stretch of
    prompts has the sources in proportion to their weights, to within one prompt. A weight of 0 is never chosen."""
    candidates = [i for i, weight in enumerate(weights) if weight > 0]
    return min(candidates, key=lambda i: (handed_out[i] + 1) / weights[i])


def number_names(sources: list[Source]) -> None:
    """Make the names unique, for the log: a second gsm8k becomes gsm8k-2."""
    seen: dict[str, int] = {}
    for source in sources:
        seen[source.name] = seen.get(source.name, 0) + 1
        if seen[source.name] > 1:
            source.name += f"-{seen[source.name]}"


# --- one source -----------------------------------------------------------------------------------------------------


def made_source(spec: Spec, train_problems: int, validation_problems: int, seed: int) -> Source:
    """Problems of a task that makes its own. ValueError, with the call, if it raises or makes none."""
    task = load_task(spec.name)
    if not hasattr(task, "problems"):
        raise ValueError(f"{spec.name} is a task without problems of its own: give it a file or a data set by name")
    if spec.options:
        raise ValueError(f"--data {spec.name} takes no options: it makes its own problems")
    source = Source(spec.name, spec.weight, [], [])
    for split, number in (("train", train_problems), ("validation", validation_problems)):
        call = f"{task.__file__}: problems({split!r}, {number}, {seed})"
        try:
            problems = task.problems(split, number, seed)
        except Exception as error:
            said = in_words(error, task.__name__)
            raise ValueError(f"{call} raised {said}. A task that has fewer problems returns those it has") from error
        if not problems:
            raise ValueError(f"{call} returned no problem")
        if len(problems) < number:
            source.notes.append(f"{number} problems for {split} were asked for, and there are {len(problems)}")
        setattr(source, split, problems)
    return source


def read_source(spec: Spec, validation_problems: int | None, wanted: str = "answer") -> Source:
    """Problems of files: each once, and the held-out ones apart."""
    known = KNOWN.get(spec.name)
    split = spec.options.get("split") or (known.train if known else "train")
    records, notes = read_problems(spec, split, wanted)
    problems, more = distinct(records)
    notes, name = notes + more, spec.name if known else Path(spec.name).name
    if "validation" in spec.options:
        columns = {key: value for key, value in spec.options.items() if key in LIKELY_COLUMNS}
        own = Spec(spec.options["validation"], 1.0, columns, spec.instruction)
        validation, more = distinct(read_problems(own, "validation", wanted)[0])
        train = without(problems, {text_key(problem.prompt) for problem in validation}, notes := notes + more)
        return Source(name, spec.weight, train, validation[:validation_problems], notes)
    if len(problems) < 2:
        raise ValueError(f"{spec.name} has one problem only: there is none left to hold out")
    most = max(1, len(problems) // HELD_OUT_SHARE)
    number = most if validation_problems is None else min(validation_problems, most)
    if number < (validation_problems or 0):
        notes.append(f"{number} of {len(problems)} problems are held out, a tenth, not {validation_problems}")
    # The smallest checksums: the same problems whatever else the file holds, whatever its order.
    ranked = sorted(problems, key=lambda problem: hashlib.sha256(text_key(problem.prompt).encode()).digest())
    validation = set(ranked[:number])
    train = [problem for problem in problems if problem not in validation]
    return Source(name, spec.weight, train, ranked[:number], notes)


def without(problems: list[Problem], held_out: set[str], notes: list[str]) -> list[Problem]:
    """The problems that are not held out, by `text_key`; how many are is added to the notes."""
    kept = [problem for problem in problems if text_key(problem.prompt) not in held_out]
    if len(kept) < len(problems):
        notes.append(f"{len(problems) - len(kept)} training problems are held out elsewhere too, and were left out")
    return kept


def files_of(spec: Spec, split: str) -> list[Path]:
    """The files of records at a place. Raises ValueError, naming what is known, where there are none."""
    known, options = KNOWN.get(spec.name), spec.options
    subsets = tuple(options["subset"].split("+")) if "subset" in options else (known.subsets if known else ())
    if known is None and not Path(spec.name).expanduser().exists() and "/" not in spec.name:
        makers = [name for name in task_names() if hasattr(load_task(name), "problems")]
        raise ValueError(
            f"--data {spec.name}: there is no such file or folder, and no data set or task of that name; known are"
            f" {', '.join([*KNOWN, *makers])}"
        )
    return records.find_files(known.repository if known else spec.name, subsets, split)


def read_problems(spec: Spec, split: str, wanted: str = "answer") -> tuple[list[tuple[str, Problem]], list[str]]:
    """All problems at a place, each with the file and line or record it comes from; and what is to be told."""
    known, options = KNOWN.get(spec.name), spec.options
    problems, notes, unusable = [], [], []
    for path in files_of(spec, split):
        columns = None
        for place, record in records.read_records(path):
            if columns is None:
                columns, note = choose_columns(place, record, options, known, wanted)
                notes += [note] if note and note not in notes else []
            try:
                problems.append((place, make_problem(record, columns, spec.instruction)))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                if known is None:
                    raise ValueError(f"{place}: {error}") from None
                unusable.append(f"{place}: {error}")  # nobody here can mend it
    if len(unusable) > MOST_UNUSABLE * (len(problems) + len(unusable)):
        raise ValueError(f"{len(unusable)} records of {spec.name} cannot be used; {unusable[0]}")
    if unusable:
        notes.append(f"{len(unusable)} records cannot be used and were left out, the first: {unusable[0]}")
    if any(problem.task == programming.__name__ for _, problem in problems):
        sandbox.check()
        notes += [
            f"WARNING, model-written programs run with less than full confinement: {gap}" for gap in sandbox.missing()
        ]
    return problems, notes


def choose_columns(
    place: str, record: dict, options: dict, known: Known | None, wanted: str = "answer"
) -> tuple[dict[str, str], str]:
    """Which columns hold the problem, the tests where it has some, and what is wanted: the answer, which tests replace,
    or the worked solution. And the guess, in words."""
    columns, guesses = {}, []
    for key in ("problem", "tests", wanted):
        if (key == "tests" and "answer" in options) or (key == "answer" and "tests" in columns):
            continue
        if key in options and options[key] not in record:
            raise ValueError(f"{place}: there is no column {options[key]!r}; the columns are {', '.join(record)}")
        likely = LIKELY_COLUMNS[key]
        if known is not None and key != "solution":
            likely = known.columns[:1] if key == "problem" else [name for name in known.columns[1:] if name in likely]
        found = options.get(key) or next((name for name in likely if name in record), None)
        if found is not None:
            columns[key] = found
            guesses += [f"{key}={found}"] if key not in options and known is None else []
        elif key != "tests":
            raise ValueError(
                f"{place}: which column is the {key}? The columns are {', '.join(record)}; name one by adding"
                f" ,{key}=COLUMN to the argument of --data"
            )
    note = f"columns guessed: {', '.join(guesses)}; for others add ,NAME=COLUMN" if guesses else ""
    return columns, note


def make_problem(record: dict, columns: dict[str, str], instruction: str | None = None) -> Problem:
    """The problem of a record. instruction: said after it, in mathematics instead of the usual one. Raises ValueError
    where the problem, or what is wanted of it, is missing or of no known form."""
    for column in columns.values():
        value = record.get(column)
        if value is None or (isinstance(value, str) and not value.strip()) or value == []:
            raise ValueError(f"nothing stands in column {column!r}")
        if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(
                f"column {column!r} holds half of a character (a lone surrogate): no tokenizer can read it"
            )
    values = {key: record[column] for key, column in columns.items()}
    for key in {"problem", "solution"} & values.keys():
        if not isinstance(values[key], str):
            raise ValueError(f"column {columns[key]!r} holds no text but {values[key]!r:.60}")
    text = values["problem"]
    if "tests" in values:
        made = programming.problem(text, values["tests"], record.get("starter_code") or "")
        made = made if instruction is None else replace(made, prompt=f"{made.prompt}\n\n{instruction}")
    elif "answer" in values:
        made = mathematics.problem(text, plain(values["answer"]), instruction)
    else:
        made = Problem(mathematics.worded(text, instruction), "", mathematics.__name__)
    return replace(made, answer=values["solution"]) if "solution" in values else made


def plain(answer) -> str:
    """The text of an answer that a file may hold as a text, as a number or as a list of one."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    is_number = type(answer) is int or (isinstance(answer, float) and math.isfinite(answer))
    if not is_number and not isinstance(answer, str):
        raise ValueError(f"an answer is a text or a number, not {answer!r:.60}")
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def distinct(records: list[tuple[str, Problem]]) -> tuple[list[Problem], list[str]]:
    """Each problem once, the first; and how many were left out, with an example."""
    first: dict[str, tuple[str, Problem]] = {}
    repeated = []
    for place, problem in records:
        key = text_key(problem.prompt)
        if key in first:
            repeated.append(f"{place} repeats {first[key][0]}")
        else:
            first[key] = (place, problem)
    notes = [f"{len(repeated)} repeated problems were left out, the first: {repeated[0]}"] if repeated else []
    return [problem for _, problem in first.values()], notes


def text_key(text: str) -> str:
    """What tells problems apart: their text but for case, spacing and the like."""
    return re.sub(r"[\s$]+", "", unicodedata.normalize("NFKC", text).casefold())
