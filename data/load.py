"""The loader: from the arguments of --data to the problems of each source, with the held-out ones
apart.

arithmetic                    a task that makes its own problems
gym:word_sorting,max_words=3  a task with a family of problems, and options of its own
polaris, gsm8k, deepcoder     data sets that are known here (KNOWN)
my.jsonl, folder, owner/name  records of your own: JSONL, JSON, CSV or Parquet; columns are guessed
polaris:3 deepcoder:1         several, with weights
my.csv:2,problem=q,answer=a   with options (OPTIONS), such as the names of columns
"""

import hashlib
import importlib
import inspect
import pkgutil
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
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
    # the part for evaluation; None: the problems that are held out of `train`
    test: str | None = None
    task: str = mathematics.__name__


KNOWN = {
    "polaris": Known("POLARIS-Project/Polaris-Dataset-53K"),
    "deepscaler": Known("agentica-org/DeepScaleR-Preview-Dataset"),
    "gsm8k": Known("openai/gsm8k", ("main",), test="test"),
    "math": Known("EleutherAI/hendrycks_math", test="test"),
    "math500": Known("HuggingFaceH4/MATH-500", train=None, test="test"),
    "aime24": Known("math-ai/aime24", train=None, test="test"),
    "aime25": Known("math-ai/aime25", train=None, test="test"),
    "deepcoder": Known(
        "agentica-org/DeepCoder-Preview-Dataset",
        ("primeintellect", "taco", "lcbv5", "codeforces"),
        test="test",
        task=programming.__name__,
    ),
}
# docs/data.md has their meaning
OPTIONS = "problem answer tests solution subset split validation".split()
MADE_PROBLEMS = 100_000  # a task makes so many to train on if nothing says how many
MADE_HELD_OUT = 64  # and so many that are held out
# The share of a known data set's records that may be left out. In your own files none may be.
MOST_UNUSABLE = 0.05
HELD_OUT_SHARE = 10  # at most one distinct problem in so many is held out
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
        """Where the records are, and which parts are for what."""
        return KNOWN.get(self.name, Known(self.name, test="test"))


@dataclass
class Source:
    """The problems of one argument of --data."""

    name: str  # unique in a run; names its curve in the log
    weight: float
    train: list[Problem]
    validation: list[Problem]  # held out: in no source's training problems
    # printed: columns that were guessed, problems left out
    notes: list[str] = field(default_factory=list)


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
    its own. validation_problems: so many of each source are held out, but at most a tenth of a
    file; None: a tenth. Their texts alone decide which. A problem that one source holds out is in
    no source's training problems. instruction: said after each problem of a file. wanted: "answer",
    or "solution" if `Problem.answer` shall hold the worked solution. Raises ValueError, with file
    and line or record, for anything that cannot be used.
    """
    specs = [parse_spec(argument, instruction) for argument in arguments]
    sources = [load_source(spec, train_problems, validation_problems, wanted) for spec in specs]
    held_out = {text_key(problem.prompt) for source in sources for problem in source.validation}
    names = Counter()
    for source in sources:
        names[source.name] += 1
        if names[source.name] > 1:
            source.name += f"-{names[source.name]}"  # a second gsm8k is gsm8k-2
        train = [problem for problem in source.train if text_key(problem.prompt) not in held_out]
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


def load_source(
    spec: Spec, train_problems: int | None, validation_problems: int | None, wanted: str
) -> Source:
    """The problems of one argument, as `load_data` wants them."""
    if spec.known.train is None:
        raise ValueError(
            f"{spec.name} is for evaluation (generate.py --evaluate), not to be trained on"
        )
    if not spec.is_task:
        return read_source(spec, validation_problems, wanted)
    source = made_source(
        spec, train_problems or MADE_PROBLEMS, validation_problems or MADE_HELD_OUT
    )
    if wanted == "solution":
        problem = source.train[0]
        if importlib.import_module(problem.task).score(problem, problem.answer) != 1:
            raise ValueError(
                f"{spec.name}: its answers are no whole completions: give a file of solutions"
            )
    return source


def load_evaluation(argument: str, number: int, instruction: str | None = None) -> Source:
    """At most `number` problems to evaluate on: from a file, from the test part of a known data
    set, or else from the problems that training holds out. The source has no training problems."""
    spec = parse_spec(argument, instruction)
    if spec.is_task:
        return replace(made_source(spec, 1, number), train=[])
    if "validation" in spec.options or (spec.known.test is None and "split" not in spec.options):
        source = read_source(spec, number)
        return replace(source, train=[], validation=source.validation[:number])
    problems, notes = read_problems(spec, spec.known.test)
    most = max(1, len(problems) // HELD_OUT_SHARE)
    if min(number, len(problems)) > most and are_trained_on(spec):
        notes.append(
            f"a run on these {len(problems)} problems holds out at most {most}, and trains on the "
            f"others: --problems {most} takes only what it has held out"
        )
    return Source(spec.name, 1.0, [], problems[:number], notes)


def are_trained_on(spec: Spec) -> bool:
    """Whether the files that are evaluated on are those that a run trains on."""
    if spec.name in KNOWN or "split" in spec.options:
        return False
    try:
        return files_of(spec, "train") == files_of(spec, "test")
    except ValueError:  # there is none to train on
        return False


def task_of(argument: str) -> str:
    """The module that judges the problems of an argument of --data. Reads no more than the first
    record of a file."""
    spec = parse_spec(argument)
    if spec.is_task:
        return f"data.tasks.{spec.task}"
    if spec.name in KNOWN:
        return spec.known.task
    place, record = next(records.read_records(files_of(spec, "test")[0]))
    columns, _ = records.choose_columns(place, record, spec.options)
    return programming.__name__ if "tests" in columns else mathematics.__name__


def next_source(weights: Sequence[float], handed_out: Sequence[int]) -> int:
    """The source of the next prompt. handed_out: the prompts that each source has given so far. In
    the long run they are in proportion to the weights. Before each light source has given one, the
    heavy ones give more than their share."""
    candidates = [i for i, weight in enumerate(weights) if weight > 0]
    return min(candidates, key=lambda i: (handed_out[i] + 1) / weights[i])


def made_source(spec: Spec, train_problems: int, validation_problems: int) -> Source:
    """Problems of a task that makes its own, each once. Raises ValueError if the task makes none,
    or takes no such options."""
    task = importlib.import_module(f"data.tasks.{spec.task}")
    if not hasattr(task, "problems"):
        raise ValueError(
            f"{spec.name} is a task without problems of its own: "
            "give it a file or a data set by name"
        )
    arguments = task_arguments(spec, task.problems)
    made, notes = {}, []
    for split, number in (("train", train_problems), ("validation", validation_problems)):
        call = f"{task.__file__}: problems({split!r}, {number}, {SEED})"
        try:
            problems = task.problems(split, number, SEED, **arguments)
        except ValueError:  # the task's own sentence
            raise
        except Exception as error:
            raise ValueError(f"{call} raised {error!r}") from error
        distinct = {text_key(problem.prompt): problem for problem in problems}
        if not distinct:
            raise ValueError(f"{call} returned no problem")
        repeated = len(problems) - len(distinct)
        if repeated:
            notes.append(
                f"{repeated} of {len(problems)} problems for {split} repeat another, "
                "and were left out"
            )
        if len(distinct) < number:
            notes.append(
                f"{number} problems for {split} were asked for, and there are {len(distinct)}"
            )
        made[split] = list(distinct.values())
    return Source(spec.name, spec.weight, notes=notes, **made)


def task_arguments(spec: Spec, problems: Callable) -> dict:
    """What the function `problems` of a task gets beside split, number and seed: the family, the
    options, and the instruction if it takes one. Raises ValueError for options that it does not
    take."""
    arguments = dict(spec.options)
    family = spec.name.partition(":")[2]
    if family:
        arguments["family"] = family
    parameters = inspect.signature(problems).parameters
    for key in ("split", "number", "seed", "instruction"):
        if key in arguments:
            raise ValueError(f"--data {spec.name}: {key} is no option of a task")
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [key for key in arguments if key not in parameters]
    if unknown and not takes_any:
        raise ValueError(f"--data {spec.name}: the task takes no {' and no '.join(unknown)}")
    if "instruction" in parameters:
        arguments["instruction"] = spec.instruction
    return arguments


def read_source(spec: Spec, validation_problems: int | None, wanted: str = "answer") -> Source:
    """Problems of files. The option `validation` names the held-out ones; without it they are the
    first ones, by their checksums. Raises ValueError if there is only one problem."""
    problems, notes = read_problems(spec, spec.known.train, wanted)
    source = Source(Path(spec.name).name, spec.weight, problems, [], notes)
    if "validation" in spec.options:
        columns = {key: spec.options[key] for key in records.LIKELY_COLUMNS if key in spec.options}
        of_validation = replace(spec, name=spec.options["validation"], options=columns)
        source.validation, more_notes = read_problems(of_validation, "validation", wanted)
        source.notes += [note for note in more_notes if note not in notes]
        return source
    if len(problems) < 2:
        raise ValueError(
            f"{spec.name} has one problem only: there is none left to hold out; add problems, or"
            " name a file of held-out ones by ,validation=FILE"
        )
    most = max(1, len(problems) // HELD_OUT_SHARE)
    number = min(validation_problems or most, most)
    if validation_problems and number < validation_problems:
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
        raise ValueError(
            f"--data {place}: there is no such file or folder, and no data set (OWNER/NAME) or "
            f"task of that name; known are {', '.join([*KNOWN, *task_names()])}"
        )
    subsets = spec.known.subsets
    if "subset" in spec.options:
        subsets = tuple(spec.options["subset"].split("+"))
    return records.find_files(place, subsets, spec.options.get("split", split))


def read_problems(
    spec: Spec, split: str, wanted: str = "answer"
) -> tuple[list[Problem], list[str]]:
    """The problems of all files of a source, each once, and notes to be printed. The order is that
    of the checksums of their texts: so the first ones are a random draw, whatever the order of the
    file and its other problems are."""
    found = {}  # by text: the place and the problem
    notes, repeated, unusable = [], [], []
    is_known = spec.name in KNOWN
    for path in files_of(spec, split):
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
            first_place, first = found.setdefault(text_key(problem.prompt), (place, problem))
            if first is problem:
                continue
            repeated.append(place)
            if wanted == "answer" and not is_known and conflict(first, problem):
                both = f"{first.answer!r:.60} in {first_place}, {problem.answer!r:.60} here"
                raise ValueError(f"{place}: one problem has two answers, {both}: remove one")
    if len(unusable) > MOST_UNUSABLE * (len(found) + len(repeated) + len(unusable)):
        raise ValueError(f"{len(unusable)} records of {spec.name} cannot be used; {unusable[0]}")
    if unusable:
        notes.append(
            f"{len(unusable)} records cannot be used and were left out, the first: {unusable[0]}"
        )
    if any(problem.task == programming.__name__ for _, problem in found.values()):
        sandbox.require_sandbox()
        warning = "WARNING, programs of the model run with less than full confinement: "
        notes += [warning + gap for gap in sandbox.missing()]
    if repeated:
        notes.append(f"{len(repeated)} repeated problems were left out, the first: {repeated[0]}")
    in_order = sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())
    return [found[text][1] for text in in_order], notes


def conflict(one: Problem, other: Problem) -> bool:
    """Whether the answers of a problem that comes twice are different."""
    mathematical = one.task == other.task == mathematics.__name__
    return mathematical and not mathematics.equal(one.answer, other.answer)


def text_key(text: str) -> str:
    """A key that is the same for texts that differ only in case, spacing and the like."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().replace("$", "").split())
