"""The loader: from the arguments of --data to the problems of each source, with the held-out ones
apart.

arithmetic                    a task that makes its own problems
gym:chain_sum,max_terms=3     a task with a family of problems, and options of its own
polaris, gsm8k, deepcoder     data sets that are known here (KNOWN)
my.jsonl, folder, owner/name  records of your own: JSONL, JSON, CSV or Parquet; columns are guessed
polaris:3 deepcoder:1         several, with weights
my.csv:2,problem=q,answer=a   with options (OPTIONS), such as the names of columns

What is held out is never trained on, whatever the command: `data.is_held_out` looks at a problem's
own text alone. What the path of a file or the column `split` of a record calls test or validation
(PARTS), and the file of `validation=`, are held out as a whole.
"""

import contextlib
import hashlib
import importlib
import inspect
import json
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from data import Problem, checksum, one_spelling, sandbox, tasks
from data.records import FORMATS, download, read_records
from data.tasks import mathematics, programming

KNOWN = {  # short names of data sets of the hub, and the arguments that they stand for
    "polaris": "POLARIS-Project/Polaris-Dataset-53K",
    "deepscaler": "agentica-org/DeepScaleR-Preview-Dataset",
    "gsm8k": "openai/gsm8k,subset=main",
    "math": "EleutherAI/hendrycks_math",
    "math500": "HuggingFaceH4/MATH-500",
    "aime24": "math-ai/aime24",
    "aime25": "math-ai/aime25",
    "deepcoder": "agentica-org/DeepCoder-Preview-Dataset,tests=tests"
    ",subset=primeintellect+taco+lcbv5+codeforces",
}
# docs/data.md has their meaning
OPTIONS = "problem passage answer tests solution task subset validation".split()
OPTIONAL = "passage image choices system starter_code tests".split()
WANTED = {"problem": "", "answer": "answer", "solution": "answer solution"}  # besides
LIKELY_COLUMNS = {  # guessed in this order
    "problem": "problem question prompt query question_stem messages conversations",
    "passage": "passage context article body",
    "image": "image images image_1 image_path decoded_image",
    "choices": "choices options endings B option_b option_2 option2 op_b opb choice_b choice2",
    "system": "{problem}.system system",  # the turn before the user's
    "starter_code": "starter_code",
    "tests": "tests test_cases input_output",
    "answer": """
        gold gold_answer final_answer ground_truth reward_model.ground_truth expected_answer
        reference_answer answer.value answer correct_answer answerkey correct_option
        answers.text answers_spans.spans solution target
    """,
    "solution": """
        solution generated_solution response completion messages.assistant conversations.assistant
    """,
}
# What stands in a cell without a value, as text and in lower case.
EMPTY = "|[]|{}|nan|none|null|n/a|#n/a|<na>|?".split("|")
# Of a chat template; messages as a text that is not JSON; or an image. Each begins with a sign that
# is found fast, and looks back where it must stand at the start.
TEMPLATE = r"""(?xs) <image> | <[|｜][^\s|｜]+[|｜]> | <start_of_turn> | \[INST\] | \nAssistant:
    | \#{3}[ ]Response:\s*$ | <think>\s*$ | \[(?<!.\[)\{'\w+':[ ]'"""
# Instructions of DAPO, verl and others that data sets have in their problems: our own takes their
# place.
INSTRUCTIONS = r"""(?xis) ^ solve[ ]the[ ]following[ ]math[ ]problem[ ]step[ ]by[ ]step\.[ ]the
        [ ]last[ ]line[ ]of[ ]your[ ]response[ ]should[ ]be[ ]of[ ]the[ ]form[ ]answer:[ ]\$answer
        [ ]\(without[ ]quotes\)[ ]where[ ]\$answer[ ]is[ ]the[ ]answer[ ]to[ ]the[ ]problem\.
    | remember[ ]to[ ]put[ ]your[ ]answer[ ]on[ ]its[ ]own[ ]line[ ]after[ ]"answer:"
        (?: ,[ ]and[ ]you[ ]do[ ]not[ ]need[ ]to[ ]use[ ]a[ ]\\boxed[ ]command )? \.?
    | let'?s[ ]think[ ]step[ ]by[ ]step[ ]and[ ]output[ ]the[ ]final[ ]answer[ ]
        (?: after[ ]"\#{4}" | within[ ]\\boxed\{\} )\.?
    | please[ ]reason[ ]step[ ]by[ ]step,?[ ]and[ ]put[ ]your[ ]final[ ]answer[ ]within[ ]
        \\boxed\{\}\.?"""
# Words that say that a part of the data is held out, in this order: test/train.jsonl is a test.
PARTS = {
    "test": "test",
    "validation": "val|valid|validate|validation|dev|devel|development|eval|evaluate|evaluation"
    "|held|hold",
}
ENDS = "out|outs|outset|ing|s|set|sets|data|split|mini|"  # testset, and held-out and heldout
# What save_to_disk of `datasets` writes beside the records.
NO_RECORDS = r"dataset_dict\.json|dataset_infos?\.json|state\.json|cache-.*\.arrow"
APART = "{} records are held out, as their place says"
NOT_APART = "! {} records are not held apart, since no column of them holds a problem"
OTHER_FORM = "! {} prompts ask for <answer>, and a box is judged: --system '' drops a system prompt"
MADE_PROBLEMS = 100_000  # a task makes so many to train on if nothing says how many
MADE_HELD_OUT = 64  # and so many that are held out
# The seed of tasks that make their problems: runs with different --seed have the same ones.
SEED = 0


@dataclass(frozen=True)
class Spec:
    """One argument of --data: NAME[:WEIGHT][,OPTION=VALUE]..."""

    name: str  # task, TASK:FAMILY, known data set, file, folder or OWNER/NAME on the hub
    weight: float  # share of the prompts of each batch, relative to the others
    options: dict[str, str]  # what follows the colon of a task is its `family`
    place: str  # the file, folder or OWNER/NAME
    task: str  # the one that makes its own problems; "" for records
    # said after each problem of a file, instead of what its task says
    instruction: str | None
    # "answer", or "solution" if the metadata of problems shall hold the worked one
    wanted: str


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
    text = str(len(source.train))
    for problem in source.train + source.validation:
        system = (problem.system,) * (problem.system is not None)
        text += repr((problem.prompt, problem.answer, *system))
    return hashlib.sha256(text.encode()).hexdigest()


def parse_spec(text: str, instruction: str | None = None, wanted: str = "answer") -> Spec:
    """Reads NAME[:WEIGHT][,OPTION=VALUE]... Raises ValueError, naming the options, for any other
    text."""
    name, _, pairs = text.partition(",")
    name, weight = re.fullmatch(r"(?s)(.*?)(?::(\d*\.?\d+))?", name).groups("1")
    if not name or not float(weight) > 0:
        raise ValueError(f"--data {text}: wanted is NAME or NAME:WEIGHT, with a weight above 0")
    place, _, known = KNOWN.get(name, name).partition(",")
    task, _, family = name.partition(":")
    names = task_names()
    if task not in names:
        task = ""
    options = {}
    for pair in filter(None, f"{known},{pairs}".split(",")):
        key, _, value = pair.partition("=")
        if not value or key not in OPTIONS and not task:
            raise ValueError(
                f"--data {text}: {pair!r} is no option; wanted is OPTION=VALUE, and the options are"
                f" {', '.join(OPTIONS)}: docs/data.md explains them"
            )
        options[key] = value
    if not task and options.get("task", names[0]) not in names:
        raise ValueError(f"--data {text}: task= is one of {', '.join(names)}")
    if task and family:
        options["family"] = family
    return Spec(name, float(weight), options, place, task, instruction, wanted)


def task_names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(tasks.__path__)]


def load_data(
    arguments: tuple[str, ...], train_problems: int | None, validation_problems: int | None,
    instruction: str | None = None, wanted: str = "answer",
) -> list[Source]:  # fmt: skip
    """The problems of all arguments of --data.

    train_problems: at most so many of each source; None: all, or MADE_PROBLEMS of a task that makes
    its own. validation_problems: at most so many of each source's held-out ones; None: all, or
    MADE_HELD_OUT. instruction: said after each problem of a file. wanted: "answer", or "solution"
    if the metadata of problems shall hold it; then none need be held out. Raises ValueError, with
    file and line or record, for anything that cannot be used.
    """
    sources, held_out, names = [], set(), Counter()
    for spec in [parse_spec(argument, instruction, wanted) for argument in arguments]:
        if spec.task:
            train = made_problems(spec, "train", train_problems or MADE_PROBLEMS)
            validation = made_problems(spec, "validation", validation_problems or MADE_HELD_OUT)
            source = Source(spec.name, spec.weight, train, validation)
        else:
            source = read_source(spec)
        sources.append(source)
        held_out |= source.apart | {problem.key for problem in source.validation}
        names[source.name] += 1
        if names[source.name] > 1:
            source.name += f"-{names[source.name]}"  # a second gsm8k is gsm8k-2
    for source in sources:
        source.train = [problem for problem in source.train if problem.key not in held_out]
        cut(source, "train", train_problems)
        if wanted == "answer":
            cut(source, "validation", validation_problems)
    return sources


def cut(source: Source, part: str, number: int | None) -> None:
    """Leave so many problems of a part. A note says if there are fewer. ValueError if there are
    none."""
    problems = getattr(source, part)
    if not problems:
        raise ValueError(
            f"--data {source.name}: there is no problem for {part}. The tenth of all texts that"
            " data.is_held_out says is for validation, all others are for training: add problems,"
            " or name a file of held-out ones by ,validation=FILE"
        )
    if number and number > len(problems):
        source.notes.append(
            f"{number} problems for {part} were asked for, and there are {len(problems)}"
        )
    setattr(source, part, problems[:number])


def load_evaluation(argument: str, number: int, instruction: str | None = None) -> Source:
    """At most `number` problems to evaluate on, none of which any run trains on: the source's
    `validation`."""
    spec = parse_spec(argument, instruction)
    source = Source(spec.name, spec.weight, [], [])
    if spec.task:
        source.validation = made_problems(spec, "validation", number)
    else:
        source.validation, source.notes = read_held_out(spec)
        source = source if source.validation else read_source(spec)
    cut(source, "validation", number)
    return source


def task_of(argument: str) -> tuple[str, bool]:
    """The module that judges the problems of an argument of --data, and whether they have a system
    prompt. Reads no more than the first record of a file."""
    spec = parse_spec(argument)
    if spec.task:
        return f"data.tasks.{spec.task}", False
    columns = spec.options
    if spec.name not in KNOWN:
        _, record = next(read_records(next(iter(find_files(spec)))))
        columns, _ = choose_columns(spec, record)
    return judge_of(spec, columns).__name__, "system" in columns


def made_problems(spec: Spec, split: str, number: int) -> list[Problem]:
    """Problems that a task makes for this split, each once. Raises ValueError if it does not take
    the options."""
    task = importlib.import_module(f"data.tasks.{spec.task}")
    if not hasattr(task, "problems"):
        raise ValueError(
            f"{spec.name} is a task without problems of its own: "
            "give it a file or a data set by name"
        )
    arguments, signature = dict(spec.options), inspect.signature(task.problems)
    if "instruction" in signature.parameters:
        arguments["instruction"] = spec.instruction
    try:
        signature.bind(split, number, SEED, **arguments)
    except TypeError as error:
        options = [*signature.parameters][3:]  # behind split, number and seed
        raise ValueError(f"--data {spec.name}: {error}; its options are {options}") from None
    distinct = {
        problem.key: problem
        for problem in task.problems(split, number, SEED, **arguments)
        if problem.held_out == (split == "validation")
    }
    return [*distinct.values()][:number]


# --- files ----------------------------------------------------------------------------------------


def read_source(spec: Spec) -> Source:
    """Problems of files to train on, and those that are held out. Raises ValueError if none are."""
    problems, notes, apart = read_problems(spec, records_of(find_files(spec)), "train")
    if not problems:
        raise ValueError(
            f"--data {spec.name}: this is for evaluation (generate.py --evaluate), not to be"
            " trained on; a file that is named itself may be trained on"
        )
    train = [problem for problem in problems if not problem.held_out]
    validation = [problem for problem in problems if problem.held_out]
    if "validation" in spec.options:
        validation, more = read_held_out(spec)
        notes += more
    if part_of("/".join(Path(spec.name).parts[-2:])) != "train":
        notes.insert(0, "! its name says that it is held out, and all but a tenth is for training")
    return Source(Path(spec.name).name, spec.weight, train, validation, notes, apart)


def read_held_out(spec: Spec) -> tuple[list[Problem], list[str]]:
    """The problems that no run trains on, and notes: those of the option `validation`, or those
    that are called test, or else validation. None if there are none."""
    file = spec.options.get("validation")
    parts = (*PARTS, "train") if file else (*PARTS,)
    files = find_files(parse_spec(file) if file else spec)
    records = [record for record in records_of(files) if record[0] in parts]
    for part in parts:
        problems, notes, _ = read_problems(spec, records, part)
        if problems:
            break
    return problems, notes


def find_files(spec: Spec) -> dict[Path, str]:
    """The files of a source, with the part that each is: test, validation or else train. They are a
    file, or all below a folder or in a data set of the hub. Raises ValueError if there are none."""
    root = Path(spec.place).expanduser()
    if root.is_file():
        return {root: "train"}
    subsets = spec.options.get("subset", "").split("+")
    if not root.is_dir():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", spec.place) or spec.place.endswith(tuple(FORMATS)):
            raise ValueError(
                f"--data {spec.place}: there is no such file or folder, and no data set"
                " (OWNER/NAME) or task of that name; known are"
                f" {', '.join([*KNOWN, *task_names()])}"
            )
        root = download(spec.place, subsets)
    files = {
        path: part_of(str(path.relative_to(root)))
        for path in sorted({path for subset in subsets for path in (root / subset).rglob("*")})
        if path.suffix in FORMATS and not re.fullmatch(NO_RECORDS, path.name)
    }
    if not files:
        raise ValueError(
            f"{spec.place} has no file of records below {'/, '.join(subsets)}/:"
            f" {', '.join(FORMATS)} are looked for"
        )
    return files


@cache
def part_of(name: str) -> str:
    """The part that a path or a column `split` says: test, validation or else train."""
    text = re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower()  # MyTest has two words
    for part, words in PARTS.items():
        if re.search(f"(?<![a-z])({words})({ENDS})(?![a-z])", text):
            return part
    return "train"


def records_of(files: dict[Path, str]) -> Iterator[tuple[str, Path, str, dict]]:
    """All records, with the part that each is, its file and its place. In a file for training its
    columns `split`, in capitals or not, say the part."""
    for path, part in files.items():
        for place, record in read_records(path):
            split = " ".join(str(record[name]) for name in record if name.lower() == "split")
            yield part_of(split) if part == "train" else part, path, place, record


def read_problems(
    spec: Spec, records: Iterable[tuple[str, Path, str, dict]], wanted: str
) -> tuple[list[Problem], list[str], set[str]]:
    """The problems of a part of these records (`records_of`), each once; notes to be printed; and
    if this part is for training, the texts of the others. The order is that of the checksums of
    their texts: so the first ones are a random draw, whatever the order of the file and its other
    problems are."""
    found, columns, columns_of = {}, {}, defaultdict(dict)  # the last ones, and those by file
    apart, told = set(), defaultdict(list)  # what is to be said, and of which places
    unusable = told["{} records cannot be used and were left out"]
    repeated = told["{} repeated problems were left out"]
    for part, path, place, record in records:
        if part != wanted:
            if wanted == "train":
                texts = texts_of(spec, record)
                apart |= texts
                told[APART if texts else NOT_APART].append(place)
            continue
        record = dict.fromkeys(columns_of[path].values()) | record  # what was there and is not
        try:
            columns, values = choose_columns(spec, record)
            columns_of[path] = columns
            problem = make_problem(columns, values, spec)
        except ValueError as error:
            unusable.append(f"{place}: {error}")
            if spec.name not in KNOWN and not isinstance(error, mathematics.NoAnswer):
                raise ValueError(unusable[-1]) from None
            continue  # nobody here can mend it
        first = found.setdefault((problem.key, problem.system), problem)
        if first is not problem:
            repeated.append(place)
        if first.answer != problem.answer:
            answers = f"{problem.answer!r:.60}, and not {first.answer!r:.60}"
            told["! {} of these have another answer"].append(f"{place} has {answers}")
        asks = f"{problem.system}{problem.text}"
        if "<answer>" in asks.lower() and problem.task == mathematics.__name__:
            told[OTHER_FORM].append(place)
    if len(unusable) > len(found) + len(repeated):
        raise ValueError(
            f"{len(unusable)} records cannot be used, the first: {unusable[0]}: name another column"
            " by ,answer=COLUMN, or judge such answers in a task of your own, by ,task=NAME"
        )
    notes = []
    guesses = [f"{key}={column}" for key, column in columns.items() if key not in spec.options]
    if guesses and spec.name not in KNOWN:
        notes.append(f"columns guessed: {', '.join(guesses)}; for others add ,NAME=COLUMN")
    for said, places in told.items():
        if places:
            notes.append(f"{said.format(len(places))}, the first: {places[0]}")
    if any(problem.task == programming.__name__ for problem in found.values()):
        sandbox.require_sandbox()
        notes += [
            f"WARNING, programs of the model run with less than full confinement: {gap}"
            for gap in sandbox.missing()
        ]
    return sorted(found.values(), key=lambda problem: checksum(problem.text)), notes, apart


def texts_of(spec: Spec, record: dict) -> set[str]:
    """What a record that is held apart asks, by the columns that the options name and by those that
    are guessed: its file may have other names. Empty if no column holds a problem."""
    texts = set()
    for options in ({}, spec.options):
        alone = replace(spec, options=options, wanted="problem")
        with contextlib.suppress(ValueError):
            texts.add(one_spelling(question_of(choose_columns(alone, record)[1])))
    return texts


# --- problems -------------------------------------------------------------------------------------


def choose_columns(spec: Spec, record: dict) -> tuple[dict[str, str], dict]:
    """The columns of the problem, of its passage and system prompt if it has any, and of the tests,
    the answer or the worked solution; and what the record has there. The options name them, or they
    are guessed, in capitals or not. ValueError for a missing column."""
    columns, options = {}, spec.options
    names = {re.sub(r"[^\w.]+", "_", name).lower(): name for name in record}
    names |= {name: name for name in record}
    keys = ["problem", *OPTIONAL, *WANTED[spec.wanted].split()]
    needed = ["problem", "tests" if options.get("task") == "programming" else spec.wanted]
    if "answer" in options or options.get("task", "programming") != "programming":
        keys.remove("tests")
    for key in keys:
        if key == "answer" and "tests" in columns:
            continue  # a problem has tests or an answer
        likely = [options[key]] if key in options else LIKELY_COLUMNS[key].format(**columns).split()
        present = [names[name] for name in likely if name in names]
        if key not in needed:
            present = [name for name in present if not is_empty(record[name])]
        if present:
            columns[key] = present[0]
        elif key in options or key in needed:
            raise ValueError(
                f"no column {options.get(key, 'of a usual name')} holds the {key}; the columns are"
                f" {', '.join(record)}: add ,{key}=COLUMN to the argument of --data"
            )
    return columns, {key: record[column] for key, column in columns.items()}


def judge_of(spec: Spec, columns: dict[str, str]):
    """The module that judges records: the option `task`, or what their columns want."""
    name = spec.options.get("task", "programming" if "tests" in columns else "mathematics")
    return importlib.import_module(f"data.tasks.{name}")


def is_empty(value) -> bool:
    return str(value).strip().casefold() in EMPTY


def make_problem(columns: dict[str, str], values: dict, spec: Spec) -> Problem:
    """The problem of a record, with its solution in `metadata` if one is wanted. Raises ValueError
    if a column is empty, or if its form is not known."""
    for key, value in values.items():
        if is_empty(value):
            raise ValueError(
                f"column {columns[key]!r} is empty or holds {value!r}, which is no {key}: fill it"
                " in, or remove the record"
            )
        is_text = key in ("tests", "answer") or isinstance(value, str)
        if key in ("image", "choices") or not is_text:
            raise ValueError(
                f"column {columns[key]!r} holds {value!r:.60}: a problem is one text, without"
                " images and several turns; choices belong into it, as lines such as A. 5, and"
                " their column is to be removed"
            )
    text, system, solution = question_of(values), values.get("system"), values.get("solution")
    if marked := re.search(TEMPLATE, text):
        raise ValueError(
            f"{marked[0]!r} is no part of a problem: give its bare text, for the model's own chat"
            " template is put around it"
        )
    judge, instruction, answer = judge_of(spec, columns), spec.instruction, values.get("answer")
    if judge is programming:
        start = values.get("starter_code")
        problem = programming.problem(text, values["tests"], start, instruction)
    elif judge is mathematics:
        answer = solution if answer is None else answer
        problem = mathematics.problem(text, text_of(answer), instruction)
        if solution and "\\boxed" not in solution:
            solution += f"\n\\boxed{{{problem.answer}}}"
    else:
        worded = getattr(judge, "worded", lambda text, said: f"{text}\n\n{said or ''}".strip())
        answer = json.dumps(answer) if isinstance(answer, list | dict) else text_of(answer)
        problem = Problem(worded(text, instruction), answer, judge.__name__)
    # ValueError for half of a character, a lone surrogate
    f"{problem.prompt}{problem.answer}{system}{solution}".encode()
    metadata = {"solution": solution} if solution else {}
    return replace(problem, metadata=metadata, text=text, system=system)


def question_of(values: dict) -> str:
    """What a record asks: its passage, and the problem without INSTRUCTIONS."""
    text = re.sub(INSTRUCTIONS, "", str(values["problem"]).strip()).strip()
    return f"{values['passage']}\n\n{text}" if "passage" in values else text


def text_of(answer) -> str:
    """The text of an answer, which may be a text, a number, true, false, or one of these in a list.
    ValueError for all others. 0.30000000000000004 is 0.3."""
    match answer:
        case [first, *others] if others.count(first) == len(others):
            answer = first
        case bool():
            answer = str(answer).lower()
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    if type(answer) not in (str, int, float):
        raise ValueError(f"an answer is a text or a number, not {answer!r:.60}")
    return f"{answer:.15g}" if isinstance(answer, float) else str(answer)
