"""The loader: from the arguments of --data to the problems of each source, with the held-out ones
apart.

arithmetic                    a task that makes its own problems
gym:word_sorting,max_words=3  a task with a family of problems, and options of its own
polaris, gsm8k, deepcoder     data sets that are known here (KNOWN)
my.jsonl, folder, owner/name  records of your own: JSONL, JSON, CSV or Parquet; columns are guessed, or named
polaris:3 deepcoder:1         several, with weights
my.csv:2,problem=q,answer=a   with options (OPTIONS)
"""

import hashlib
import importlib
import inspect
import pkgutil
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from data import Problem, records, sandbox, tasks
from data.tasks import mathematics, programming


@dataclass(frozen=True)
class Known:
    """A data set of the hub that has a short name. The names of its columns are likely ones
    (records.py)."""

    repository: str
    subsets: tuple[str, ...] = ()  # folders; () is all
    train: str | None = "train"  # the part to learn from; None: the data set is for evaluation only
    test: str | None = (
        None  # the part for evaluation; None: the problems that are held out of `train`
    )
    task: str = mathematics.__name__


KNOWN = {
    "polaris": Known("POLARIS-Project/Polaris-Dataset-53K"),
    "deepscaler": Known("agentica-org/DeepScaleR-Preview-Dataset"),
    "gsm8k": Known("openai/gsm8k", ("main",), test="test"),
    "math": Known("EleutherAI/hendrycks_math", test="test"),
    "math500": Known("HuggingFaceH4/MATH-500", train=None, test="test"),
    "aime24": Known("math-ai/aime24", train=None, test="test"),
    "aime25": Known("math-ai/aime25", train=None, test="test"),
    "deepcoder": Known("agentica-org/DeepCoder-Preview-Dataset", ("primeintellect", "taco", "lcbv5", "codeforces"),
                       test="test", task=programming.__name__),
}  # fmt: skip
OPTIONS = (
    "problem",
    "answer",
    "tests",
    "solution",
    "subset",
    "split",
    "validation",
)  # docs/data.md has their meaning
MADE_PROBLEMS, MADE_HELD_OUT = 100_000, 64  # a task makes so many if nothing says how many
MOST_UNUSABLE = (
    0.05  # share of a known data set's records that may be left out; in your own files none may be
)
HELD_OUT_SHARE = 10  # at most one distinct problem in so many is held out
# of the tasks that make their problems, so that runs with different --seed have the same ones
SEED = 0


@dataclass(frozen=True)
class Spec:
    """One argument of --data: NAME[:WEIGHT][,OPTION=VALUE]..."""

    name: str  # task, TASK:FAMILY, known data set, file, folder or OWNER/NAME on the hub
    weight: float  # share of the prompts of each batch, relative to the others
    options: dict[str, str]
    instruction: str | None = (
        None  # said after each problem of a file, instead of what its task says
    )

    @property
    def is_task(self) -> bool:
        """Whether this is a task that makes its own problems."""
        return self.name not in KNOWN and self.task_and_family[0] in task_names()

    @property
    def task_and_family(self) -> tuple[str, str]:
        """The name split at the colon."""
        task, _, family = self.name.partition(":")
        return task, family

    @property
    def known(self) -> Known:
        """Where the records are, and which parts are for what."""
        return KNOWN.get(self.name, Known(self.name, test="test"))


@dataclass
class Source:
    """The problems of one argument of --data."""

    name: str  # unique in a run; names its curve in the log
    weight: float
    train: list[Problem]
    validation: list[Problem]  # held out: in no source's training problems
    notes: list[str] = field(
        default_factory=list
    )  # printed: columns that were guessed, problems left out


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
        key, equals, value = pair.partition("=")
        if not key or not equals or not value:
            raise ValueError(f"--data {text}: {pair!r} is no option; wanted is OPTION=VALUE")
        options[key] = value
    name, weight = re.fullmatch(r"(.*?)(?::(\d*\.?\d+))?", name, flags=re.DOTALL).groups("1")
    if not name or not float(weight) > 0:
        raise ValueError(f"--data {text}: wanted is NAME or NAME:WEIGHT, with a weight above 0")
    spec = Spec(name, float(weight), options, instruction)
    if unknown := [] if spec.is_task else [key for key in options if key not in OPTIONS]:
        known = ", ".join(f"{key}=" for key in OPTIONS)
        raise ValueError(
            f"--data {text}: {unknown[0]!r} is no option. They are {known}; docs/data.md explains them"
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
    its own. validation_problems: so many of each source are held out, but at most a tenth of a
    file; None: a tenth. Their texts alone decide which. A problem that one source holds out is in
    no source's training problems. instruction: said after each problem of a file. wanted: "answer",
    or "solution" if `Problem.answer` shall hold the worked solution. Raises ValueError, with file
    and line or record, for anything that cannot be used.
    """
    sources = []
    for spec in [parse_spec(argument, instruction) for argument in arguments]:
        if spec.known.train is None:
            raise ValueError(
                f"{spec.name} is for evaluation (generate.py --evaluate), not to be trained on"
            )
        if spec.is_task:
            sources.append(
                made_source(
                    spec, train_problems or MADE_PROBLEMS, validation_problems or MADE_HELD_OUT
                )
            )
            problem = sources[-1].train[0]
            if (
                wanted == "solution"
                and importlib.import_module(problem.task).score(problem, problem.answer) != 1
            ):
                raise ValueError(
                    f"{spec.name}: its answers are no whole completions: give a file of solutions"
                )
        else:
            sources.append(read_source(spec, validation_problems, wanted))
    names = [source.name for source in sources]
    held_out = {text_key(problem.prompt) for source in sources for problem in source.validation}
    for i, source in enumerate(sources):
        if source.name in names[:i]:
            source.name += f"-{names[: i + 1].count(source.name)}"  # a second gsm8k is gsm8k-2
        train = [problem for problem in source.train if text_key(problem.prompt) not in held_out]
        if repeated := len(source.train) - len(train):
            source.notes.append(
                f"{repeated} training problems are held out elsewhere too, and were left out"
            )
        source.train, source.validation = (
            train[:train_problems],
            source.validation[:validation_problems],
        )
        if not source.train:
            raise ValueError(f"--data {source.name}: no training problem is left")
    return sources


def load_evaluation(argument: str, number: int, instruction: str | None = None) -> Source:
    """At most `number` problems to evaluate on: from a file, from the test part of a known data
    set, or else from the problems that training holds out. The source has no training problems."""
    spec = parse_spec(argument, instruction)
    if spec.is_task:
        return replace(made_source(spec, 1, number), train=[])
    if spec.known.test is None and "split" not in spec.options:
        return replace(read_source(spec, number), train=[])
    problems, notes = read_problems(spec, spec.known.test)
    return Source(spec.name, 1.0, [], problems[:number], notes)


def task_of(argument: str) -> str:
    """The module that judges the problems of an argument of --data. Reads no more than the first
    record of a file."""
    spec = parse_spec(argument)
    if spec.is_task:
        return f"data.tasks.{spec.task_and_family[0]}"
    if spec.name in KNOWN:
        return spec.known.task
    place, record = next(records.read_records(files_of(spec, "test")[0]))
    columns, _ = records.choose_columns(place, record, spec.options)
    return programming.__name__ if "tests" in columns else mathematics.__name__


def next_source(weights: Sequence[float], handed_out: Sequence[int]) -> int:
    """The source of the next prompt. handed_out: the prompts that each source has given so far. Any
    stretch of prompts has the sources in proportion to their weights, to within one prompt."""
    candidates = [i for i, weight in enumerate(weights) if weight > 0]
    return min(candidates, key=lambda i: (handed_out[i] + 1) / weights[i])


def made_source(spec: Spec, train_problems: int, validation_problems: int) -> Source:
    """Problems of a task that makes its own, each once. Its function `problems` gets the family,
    the options and the instruction as arguments, if it has such. Raises ValueError, with the call,
    if it makes none."""
    name, family = spec.task_and_family
    task = importlib.import_module(f"data.tasks.{name}")
    if not hasattr(task, "problems"):
        raise ValueError(
            f"{spec.name} is a task without problems of its own: give it a file or a data set by name"
        )
    given = spec.options | ({"family": family} if family else {})
    if taken := [key for key in ("split", "number", "seed", "instruction") if key in given]:
        raise ValueError(f"--data {spec.name}: {taken[0]} is no option of a task")
    parameters = inspect.signature(task.problems).parameters
    if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        if unknown := [key for key in given if key not in parameters]:
            raise ValueError(f"--data {spec.name}: the task takes no {' and no '.join(unknown)}")
    if "instruction" in parameters:
        given["instruction"] = spec.instruction
    source = Source(spec.name, spec.weight, [], [])
    for split, number in (("train", train_problems), ("validation", validation_problems)):
        call = f"{task.__file__}: problems({split!r}, {number}, {SEED})"
        try:
            made = task.problems(split, number, SEED, **given)
        except ValueError:  # the task's own sentence
            raise
        except Exception as error:
            raise ValueError(f"{call} raised {error!r}") from error
        problems = [*{text_key(problem.prompt): problem for problem in made}.values()]
        if not problems:
            raise ValueError(f"{call} returned no problem")
        if repeated := len(made) - len(problems):
            source.notes.append(
                f"{repeated} of {len(made)} problems for {split} repeat another, and were left out"
            )
        if len(problems) < number:
            source.notes.append(
                f"{number} problems for {split} were asked for, and there are {len(problems)}"
            )
        setattr(source, split, problems)
    return source


def read_source(spec: Spec, validation_problems: int | None, wanted: str = "answer") -> Source:
    """Problems of files. The option `validation` names the held-out ones; without it they are the
    first ones, by their checksums. Raises ValueError if there is only one problem."""
    problems, notes = read_problems(spec, spec.known.train, wanted)
    source = Source(Path(spec.name).name, spec.weight, problems, [], notes)
    if "validation" in spec.options:
        columns = {
            key: column for key, column in spec.options.items() if key in records.LIKELY_COLUMNS
        }
        of_validation = replace(spec, name=spec.options["validation"], options=columns)
        source.validation, more_notes = read_problems(of_validation, "validation", wanted)
        source.notes += [note for note in more_notes if note not in notes]
        return source
    if len(problems) < 2:
        raise ValueError(f"{spec.name} has one problem only: there is none left to hold out")
    most = max(1, len(problems) // HELD_OUT_SHARE)
    number = min(validation_problems or most, most)
    if validation_problems is not None and number < validation_problems:
        notes.append(
            f"{number} of {len(problems)} problems are held out, a tenth, not {validation_problems}"
        )
    source.validation, source.train = problems[:number], problems[number:]
    return source


def files_of(spec: Spec, split: str) -> list[Path]:
    """The files of the part of a source that its options name, or of `split`. Raises ValueError if
    there are none."""
    place = spec.known.repository
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", place) and not place.endswith(records.FORMATS)
    if not is_on_hub and not Path(place).expanduser().exists():
        wrong = f"--data {place}: there is no such file or folder, and no data set (OWNER/NAME) or task of that name"
        raise ValueError(f"{wrong}; known are {', '.join([*KNOWN, *task_names()])}")
    subsets = (
        tuple(spec.options["subset"].split("+")) if "subset" in spec.options else spec.known.subsets
    )
    return records.find_files(place, subsets, spec.options.get("split", split))


def read_problems(
    spec: Spec, split: str, wanted: str = "answer"
) -> tuple[list[Problem], list[str]]:
    """The problems of all files of a source, each once, and notes to be printed. The order is that
    of the checksums of their texts: so the first ones are a random draw, whatever the order of the
    file and its other problems are."""
    problems: dict[str, Problem] = {}  # by text
    notes, repeated, unusable = [], [], []
    for path in files_of(spec, split):
        columns = None
        for place, record in records.read_records(path):
            if columns is None:
                columns, guess = records.choose_columns(place, record, spec.options, wanted)
                if guess and guess not in notes and spec.name not in KNOWN:
                    notes.append(guess)
            try:
                problem = records.make_problem(record, columns, spec.instruction)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                if spec.name not in KNOWN:
                    raise ValueError(f"{place}: {error}") from None
                unusable.append(f"{place}: {error}")  # nobody here can mend it
                continue
            if problems.setdefault(text_key(problem.prompt), problem) is not problem:
                repeated.append(place)
    if len(unusable) > MOST_UNUSABLE * (len(problems) + len(repeated) + len(unusable)):
        raise ValueError(f"{len(unusable)} records of {spec.name} cannot be used; {unusable[0]}")
    if unusable:
        notes.append(
            f"{len(unusable)} records cannot be used and were left out, the first: {unusable[0]}"
        )
    if any(problem.task == programming.__name__ for problem in problems.values()):
        sandbox.require_sandbox()
        warning = "WARNING, programs of the model run with less than full confinement: "
        notes += [warning + gap for gap in sandbox.missing()]
    if repeated:
        notes.append(f"{len(repeated)} repeated problems were left out, the first: {repeated[0]}")
    order = sorted(problems, key=lambda text: hashlib.sha256(text.encode()).digest())
    return [problems[text] for text in order], notes


def text_key(text: str) -> str:
    """A key that is the same for texts that differ only in case, spacing and the like."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().replace("$", "").split())
