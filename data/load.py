"""The loader: from the arguments of --data to the problems of each source, with the held-out ones
apart.

arithmetic                    a task that makes its own problems
gym:chain_sum,max_terms=3     a task with a family of problems, and options of its own
polaris, gsm8k, deepcoder     data sets that are known here (KNOWN)
my.jsonl, folder, owner/name  records of your own: JSONL, JSON, CSV or Parquet; columns are guessed
polaris:3 deepcoder:1         several, with weights
my.csv:2,problem=q,answer=a   with options (OPTIONS), such as the names of columns

What is held out is never trained on, whatever the command: `data.is_held_out` looks at a problem's
own text alone. What a folder calls test or validation, and the file of `validation=`, are held out
as a whole.
"""

import hashlib
import importlib
import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data import Problem, checksum, is_held_out, one_line, records, sandbox, tasks
from data.tasks import mathematics, programming


@dataclass(frozen=True)
class Known:
    """A data set of the hub that has a short name. The names of its columns are likely ones
    (records.py)."""

    repository: str
    subsets: tuple[str, ...] = ()  # folders; () is all
    task: str = mathematics.__name__
    for_training: bool = True  # False: it is for evaluation only


KNOWN = {
    "polaris": Known("POLARIS-Project/Polaris-Dataset-53K"),
    "deepscaler": Known("agentica-org/DeepScaleR-Preview-Dataset"),
    "gsm8k": Known("openai/gsm8k", ("main",)),
    "math": Known("EleutherAI/hendrycks_math"),
    "math500": Known("HuggingFaceH4/MATH-500", for_training=False),
    "aime24": Known("math-ai/aime24", for_training=False),
    "aime25": Known("math-ai/aime25", for_training=False),
    "deepcoder": Known(
        "agentica-org/DeepCoder-Preview-Dataset",
        ("primeintellect", "taco", "lcbv5", "codeforces"),
        task=programming.__name__,
    ),
}
# docs/data.md has their meaning
OPTIONS = "problem answer tests solution subset split validation".split()
MADE_PROBLEMS = 100_000  # a task makes so many to train on if nothing says how many
MADE_HELD_OUT = 64  # and so many that are held out
# The share of a known data set's records that may be left out. In your own files none may be.
MOST_UNUSABLE = 0.05
# The seed of tasks that make their problems: runs with different --seed have the same ones.
SEED = 0


@dataclass(frozen=True)
class Spec:
    """One argument of --data: NAME[:WEIGHT][,OPTION=VALUE]..."""

    name: str  # task, TASK:FAMILY, known data set, file, folder or OWNER/NAME on the hub
    weight: float  # share of the prompts of each batch, relative to the others
    options: dict[str, str]
    # said after each problem of a file, instead of what its task says
    instruction: str | None = None

    @property
    def is_task(self) -> bool:
        """Whether this is a task that makes its own problems."""
        return self.name not in KNOWN and self.task in task_names()

    @property
    def task(self) -> str:
        """The part of the name before a colon."""
        return self.name.partition(":")[0]

    @property
    def known(self) -> Known:
        """Where the records are."""
        return KNOWN.get(self.name, Known(self.name))


@dataclass
class Source:
    """The problems of one argument of --data."""

    name: str  # unique in a run; names its curve in the log
    weight: float
    train: list[Problem]
    validation: list[Problem]  # held out: in no source's training problems
    # printed: columns that were guessed, problems left out
    notes: list[str] = field(default_factory=list)
    # texts of its parts for evaluation: in no source's training problems either
    apart: set[str] = field(default_factory=set)


def fingerprint(source: Source) -> str:
    """A checksum of the problems in their order. A checkpoint holds indices of them, which mean
    nothing for others."""
    checksum = hashlib.sha256(str(len(source.train)).encode())
    for problem in (*source.train, *source.validation):
        checksum.update(repr((problem.prompt, problem.answer)).encode())
    return checksum.hexdigest()


def parse_spec(text: str, instruction: str | None = None) -> Spec:
    """Reads NAME[:WEIGHT][,OPTION=VALUE]... Raises ValueError, naming the options, for any other
    text."""
    name, *pairs = text.split(",")
    options = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if not key or not value:
            raise ValueError(f"--data {text}: {pair!r} is no option; wanted is OPTION=VALUE")
        options[key] = value
    name, weight = re.fullmatch(r"(?s)(.*?)(?::(\d*\.?\d+))?", name).groups("1")
    if not name or not float(weight) > 0:
        raise ValueError(f"--data {text}: wanted is NAME or NAME:WEIGHT, with a weight above 0")
    spec = Spec(name, float(weight), options, instruction)
    for key in options:
        if key not in OPTIONS and not spec.is_task:
            known = ", ".join(f"{key}=" for key in OPTIONS)
            raise ValueError(
                f"--data {text}: {key!r} is no option. They are {known}; docs/data.md explains them"
            )
    return spec


def task_names() -> list[str]:
    return sorted({module.name for module in pkgutil.iter_modules(tasks.__path__)})


def load_data(
    arguments: Sequence[str], train_problems: int | None, validation_problems: int | None,
    instruction: str | None = None, wanted: str = "answer",
) -> list[Source]:  # fmt: skip
    """The problems of all arguments of --data.

    train_problems: at most so many of each source; None: all, or MADE_PROBLEMS of a task that makes
    its own. validation_problems: at most so many of each source's held-out ones; None: all, or
    MADE_HELD_OUT. instruction: said after each problem of a file. wanted: "answer", or "solution"
    if `Problem.answer` shall hold the worked solution. Raises ValueError, with file and line or
    record, for anything that cannot be used.
    """
    sources = []
    for argument in arguments:
        spec = parse_spec(argument, instruction)
        if spec.is_task:
            train, notes = made_problems(spec, "train", train_problems or MADE_PROBLEMS)
            if wanted == "solution":
                refuse_without_solutions(spec, train[0])
            number = validation_problems or MADE_HELD_OUT
            validation, more_notes = made_problems(spec, "validation", number)
            source = Source(spec.name, spec.weight, train, validation, notes + more_notes)
        else:
            source = read_source(spec, wanted)
            say_if_fewer(source, validation_problems)
        sources.append(source)

    held_out = set().union(*(source.apart for source in sources))
    held_out |= {problem.key for source in sources for problem in source.validation}
    names = Counter()
    for source in sources:
        names[source.name] += 1
        if names[source.name] > 1:
            source.name += f"-{names[source.name]}"  # a second gsm8k is gsm8k-2
        train = [problem for problem in source.train if problem.key not in held_out]
        repeated = len(source.train) - len(train)
        if repeated:
            source.notes.append(
                f"{repeated} training problems are held out elsewhere too, and were left out"
            )
        source.train = train[:train_problems]
        source.validation = source.validation[:validation_problems]
        if not source.train:
            raise ValueError(f"--data {source.name}: no training problem is left")
    return sources


def load_evaluation(argument: str, number: int, instruction: str | None = None) -> Source:
    """At most `number` problems to evaluate on, none of which any run trains on. The source has no
    training problems."""
    spec = parse_spec(argument, instruction)
    source = Source(spec.name, spec.weight, [], [])
    if spec.is_task:
        source.validation, source.notes = made_problems(spec, "validation", number)
        return source
    spec, files = held_out_files(spec)
    if files:
        source.validation, source.notes = read_problems(spec, files)
    else:
        source = replace(read_source(spec, "answer"), train=[])
    say_if_fewer(source, number)
    source.validation = source.validation[:number]
    return source


def say_if_fewer(source: Source, number: int | None) -> None:
    """Note if a source has fewer held-out problems than this number."""
    held_out = len(source.validation)
    if number and number > held_out:
        source.notes.append(f"{number} held-out problems were asked for, and there are {held_out}")


def task_of(argument: str) -> str:
    """The module that judges the problems of an argument of --data. Reads no more than the first
    record of a file."""
    spec = parse_spec(argument)
    if spec.is_task:
        return f"data.tasks.{spec.task}"
    if spec.name in KNOWN:
        return spec.known.task
    files = held_out_files(spec)[1] or find_parts(spec)["train"]
    place, record = next(records.read_records(files[0]))
    columns, _ = records.choose_columns(place, record, spec.options)
    return programming.__name__ if "tests" in columns else mathematics.__name__


def next_source(weights: Sequence[float], handed_out: Sequence[int]) -> int:
    """The source of the next prompt. handed_out: the prompts that each source has given so far. In
    the long run they are in proportion to the weights. Before each light source has given one, the
    heavy ones give more than their share."""
    candidates = [i for i, weight in enumerate(weights) if weight > 0]
    return min(candidates, key=lambda i: (handed_out[i] + 1) / weights[i])


# --- tasks that make their problems ---------------------------------------------------------------


def made_problems(spec: Spec, split: str, number: int) -> tuple[list[Problem], list[str]]:
    """Problems that a task makes for this split, each once, and notes. Raises ValueError if there
    are none, or if the task takes no such options."""
    task = importlib.import_module(f"data.tasks.{spec.task}")
    if not hasattr(task, "problems"):
        raise ValueError(
            f"{spec.name} is a task without problems of its own: "
            "give it a file or a data set by name"
        )
    problems = task.problems(split, number, SEED, **task_arguments(spec, task.problems))
    held_out = getattr(task, "is_held_out", is_held_out)
    distinct = {
        problem.key: problem
        for problem in problems
        if held_out(problem.key) == (split == "validation")
    }
    if not distinct:
        raise ValueError(
            f"{task.__file__}: problems({split!r}, {number}, {SEED}) returned no problem of that"
            " split: data.is_held_out(text) says which are"
        )
    made = list(distinct.values())[:number]
    notes = []
    if len(made) < number:
        notes = [f"{number} problems for {split} were asked for, and there are {len(made)}"]
    return made, notes


def task_arguments(spec: Spec, problems: Callable) -> dict:
    """What the function `problems` of a task gets beside split, number and seed: the family, the
    options, and the instruction if it takes one. Raises ValueError for options that it does not
    take."""
    arguments, signature = dict(spec.options), inspect.signature(problems)
    family = spec.name.partition(":")[2]
    if family:
        arguments["family"] = family
    if "instruction" in signature.parameters:
        arguments["instruction"] = spec.instruction
    try:
        signature.bind("", 0, 0, **arguments)
    except TypeError as error:
        raise ValueError(f"--data {spec.name}: {error}") from None
    return arguments


def refuse_without_solutions(spec: Spec, problem: Problem) -> None:
    """ValueError if the answers of a task are no whole completions, which a model could imitate."""
    if importlib.import_module(problem.task).score(problem, problem.answer) != 1:
        raise ValueError(
            f"{spec.name}: its answers are no whole completions: give a file of solutions"
        )


# --- files ----------------------------------------------------------------------------------------


def read_source(spec: Spec, wanted: str) -> Source:
    """Problems of files to train on, and those that are held out. Raises ValueError if none are."""
    parts = find_parts(spec) if spec.known.for_training else {"train": []}
    if not parts["train"] or spec.options.get("split", "train") != "train":
        raise ValueError(
            f"--data {spec.name}: this is for evaluation (generate.py --evaluate), not to be"
            " trained on; a file that is named itself may be trained on"
        )
    problems, notes = read_problems(spec, parts["train"], wanted)
    source = Source(Path(spec.name).name, spec.weight, [], [], notes)
    for problem in problems:
        part = source.validation if is_held_out(problem.key) else source.train
        part.append(problem)
    if "validation" in spec.options:
        source.validation, more_notes = read_problems(*held_out_files(spec), wanted)
        source.notes += [note for note in more_notes if note not in notes]
    if not source.validation:
        raise ValueError(
            f"{spec.name}: none of its {len(problems)} problems is in the tenth of all texts that"
            " is held out; add problems, or name a file of held-out ones by ,validation=FILE"
        )
    columns = [spec.options.get("problem"), *records.LIKELY_COLUMNS["problem"]]
    for path in {*parts["test"], *parts["validation"]} - {*parts["train"]}:
        for _, record in records.read_records(path):
            source.apart |= {one_line(str(record[key])) for key in columns if key in record}
    return source


def held_out_files(spec: Spec) -> tuple[Spec, list[Path]]:
    """The files that no run trains on: those of the option `validation`, which have the columns of
    this argument, or the part of the option `split`, or the test part. None, if there are none."""
    if "validation" in spec.options:
        columns = {key: spec.options[key] for key in records.LIKELY_COLUMNS if key in spec.options}
        spec = replace(spec, name=spec.options["validation"], options=columns)
        parts = find_parts(spec)
        return spec, parts["validation"] or parts["test"] or parts["train"]
    word = spec.options.get("split", "test")
    if word not in records.SPLITS:
        raise ValueError(f"--data {spec.name}: split= is one of {', '.join(records.SPLITS)}")
    parts = find_parts(spec)
    return spec, [path for path in parts[records.SPLITS[word]] if path not in parts["train"]]


def find_parts(spec: Spec) -> dict[str, list[Path]]:
    """The files of train, test and validation of a source. Raises ValueError if there are none."""
    place = spec.known.repository
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", place) and not place.endswith(records.FORMATS)
    if not is_on_hub and not Path(place).expanduser().exists():
        raise ValueError(
            f"--data {place}: there is no such file or folder, and no data set (OWNER/NAME) or "
            f"task of that name; known are {', '.join([*KNOWN, *task_names()])}"
        )
    subsets = spec.known.subsets
    if "subset" in spec.options:
        subsets = tuple(spec.options["subset"].split("+"))
    return records.find_files(place, subsets)


def read_problems(
    spec: Spec, files: list[Path], wanted: str = "answer"
) -> tuple[list[Problem], list[str]]:
    """The problems of these files, each once, and notes to be printed. The order is that of the
    checksums of their texts: so the first ones are a random draw, whatever the order of the file
    and its other problems are."""
    found = {}  # by text: the place and the problem
    notes, repeated, unusable = [], [], []
    is_known = spec.name in KNOWN
    for path in files:
        columns = None
        for place, record in records.read_records(path):
            if columns is None:
                columns, guess = records.choose_columns(place, record, spec.options, wanted)
                if guess and guess not in notes and not is_known:
                    notes.append(guess)
            try:
                problem = records.make_problem(record, columns, spec.instruction)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                if not is_known:
                    raise ValueError(f"{place}: {error}") from None
                unusable.append(f"{place}: {error}")  # nobody here can mend it
                continue
            first_place, first = found.setdefault(problem.key, (place, problem))
            if first is problem:
                continue
            repeated.append(place)
            if (
                wanted == "answer"
                and not is_known
                and first.task == problem.task == mathematics.__name__
                and not mathematics.equal(first.answer, problem.answer)
            ):
                raise ValueError(
                    f"{place}: one problem has two answers: {first.text!r:.60} has"
                    f" {first.answer!r:.60} in {first_place}, and {problem.text!r:.60} has"
                    f" {problem.answer!r:.60} here: remove one"
                )
    if len(unusable) > MOST_UNUSABLE * (len(found) + len(repeated) + len(unusable)):
        raise ValueError(f"{len(unusable)} records of {spec.name} cannot be used; {unusable[0]}")
    if unusable:
        notes.append(
            f"{len(unusable)} records cannot be used and were left out, the first: {unusable[0]}"
        )
    problems = [problem for _, problem in found.values()]
    if any(problem.task == programming.__name__ for problem in problems):
        sandbox.require_sandbox()
        warning = "WARNING, programs of the model run with less than full confinement: "
        notes += [warning + gap for gap in sandbox.missing()]
    if repeated:
        notes.append(f"{len(repeated)} repeated problems were left out, the first: {repeated[0]}")
    return sorted(problems, key=lambda problem: checksum(problem.key)), notes
