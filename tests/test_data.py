"""Data: files of records, data sets of the hub by name, what is held out, mixtures, and what bad
input says."""

import csv
import importlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data import Problem, tasks
from data import load as loading
from data import records as files
from data.load import KNOWN, load_data, load_evaluation, next_source, parse_spec
from data.tasks import arithmetic, mathematics

ROOT = Path(__file__).parent.parent


def records(
    number: int, start: int = 0, problem: str = "problem", answer: str = "answer"
) -> list[dict]:
    return [
        {"id": i, problem: f"What is {i} + 1?", answer: str(i + 1)}
        for i in range(start, start + number)
    ]


def write(path: Path, rows: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def load(argument: str, train: int | None = None, validation: int = 10):
    (source,) = load_data([argument], train, validation)
    return source


# --- files of one's own ---------------------------------------------------------------------------


def test_answers_may_be_numbers_or_lists_of_one(tmp_path):
    rows = [
        {"problem": f"{i}?", "answer": answer} for i, answer in enumerate([3, 0.5, 2.0, ["x"], "7"])
    ]
    evaluated = load_evaluation(write(tmp_path / "a.jsonl", rows), 5).validation
    answers = {problem.prompt[0]: problem.answer for problem in evaluated}
    assert answers == {"0": "3", "1": "0.5", "2": "2", "3": "x", "4": "7"}


def test_every_format_gives_the_same_problems(tmp_path):
    odd = {"id": 0, "problem": 'A "quoted", two-\nline\u2028 prompt: π?', "answer": "\\frac{1}{2}"}
    long = {"id": 1, "problem": "?" * 200_000, "answer": "1"}
    for suffix in files.FORMATS:
        source = load(write(tmp_path / f"mine{suffix}", [odd, long, *records(98)]))
        assert source.name == f"mine{suffix}"
        assert len(source.train) == 90 and len(source.validation) == 10
        made = {problem.prompt: problem for problem in source.train + source.validation}
        assert made[f"{odd['problem']}\n\n{mathematics.INSTRUCTION}"].answer == "\\frac{1}{2}"
        usual = mathematics.problem("What is 7 + 1?", "8")
        assert made[f"What is 7 + 1?\n\n{mathematics.INSTRUCTION}"] == usual
        assert {problem.task for problem in made.values()} == {"data.tasks.mathematics"}


def test_columns_are_guessed_and_told_or_named(tmp_path):
    rows = [
        {**row, "query": "other", "gold": "0"}
        for row in records(20, problem="question", answer="final_answer")
    ]
    path = write(tmp_path / "a.jsonl", rows)
    source = load(path)
    assert "problem=question, answer=final_answer" in source.notes[0]
    assert source.train[0].answer != "0"
    named = load(f"{path},problem=question,answer=gold")
    assert named.train[0].answer == "0" and len(named.notes) == 1
    assert named.train[0].prompt == source.train[0].prompt
    none = r"a.jsonl, line 1: there is no column 'key'; the columns are id, question, f"
    with pytest.raises(ValueError, match=none):
        load(f"{path},answer=key")
    path = write(tmp_path / "b.csv", records(20, answer="result"))
    one = r"b.csv, line 2: which column is the answer\? .* id, problem, result; .*,ans"
    with pytest.raises(ValueError, match=one):
        load(path)
    path = write(tmp_path / "c.jsonl", records(20, problem="task", answer="result"))
    two = r"is the problem, and which the answer\?.* ,problem=COLUMN,answer=COLUMN"
    with pytest.raises(ValueError, match=two):
        load(path)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_may_have_semicolons_or_tabs(tmp_path, separator):
    lines = [["problem", "answer"], *([f"What is {i}, plus 1?", str(i + 1)] for i in range(20))]
    path = tmp_path / "a.csv"
    path.write_text("".join(separator.join(line) + "\n" for line in lines))
    source = load(str(path))
    answers = {problem.answer for problem in source.train + source.validation}
    assert answers == {str(i + 1) for i in range(20)}


def test_an_instruction_of_ones_own_is_said_after_each_problem(tmp_path):
    path = write(tmp_path / "a.jsonl", records(20))
    for instruction, wanted in (
        (None, f"\n\n{mathematics.INSTRUCTION}"),
        ("Be brief.", "\n\nBe brief."),
        ("", ""),
    ):
        (source,) = load_data([path], None, 5, instruction=instruction)
        evaluated = load_evaluation(path, 20, instruction=instruction).validation
        assert {p.prompt for p in source.train + source.validation} == {p.prompt for p in evaluated}
        assert {p.prompt.partition("?")[2] for p in evaluated} == {wanted}
    tests = json.dumps([{"input": "1", "output": "2", "type": "stdin_stdout"}])
    path = write(
        tmp_path / "b.jsonl", [{"problem": f"Task {i}", "tests": tests} for i in range(20)]
    )
    (usual,) = load_evaluation(path, 1).validation
    (fast,) = load_evaluation(path, 1, instruction="Fast.").validation
    assert fast.prompt == f"{usual.prompt}\n\nFast."


def test_the_task_of_a_data_set_is_told_without_reading_it(tmp_path, monkeypatch):
    answers = write(tmp_path / "a.jsonl", records(20))
    tests = write(tmp_path / "b.jsonl", [{"question": "?", "tests": "[]"}] * 2)
    open(answers, "a").write("this line is never read")
    assert loading.task_of(answers) == "data.tasks.mathematics"
    assert loading.task_of(tests) == "data.tasks.programming"
    monkeypatch.setattr(files, "find_files", lambda *_: pytest.fail("it was looked for"))
    assert loading.task_of("arithmetic") == "data.tasks.arithmetic"
    assert loading.task_of("polaris") == "data.tasks.mathematics"
    assert loading.task_of("aime24") == "data.tasks.mathematics"
    assert loading.task_of("deepcoder:2") == "data.tasks.programming"


def test_a_column_of_tests_makes_programming_problems(tmp_path):
    tests = json.dumps([{"input": "1", "output": "2", "type": "stdin_stdout"}])
    rows = [{"problem": f"Task {i}", "answer": "none", "tests": tests} for i in range(20)]
    source = load(write(tmp_path / "a.parquet", rows))
    assert {p.task for p in source.train + source.validation} == {"data.tasks.programming"}
    with pytest.raises(ValueError, match=r"a.jsonl, line 2: the tests are neither"):
        load(write(tmp_path / "a.jsonl", [rows[0], {**rows[1], "tests": "{}"}]))


def test_gaps_in_the_sandbox_are_told(tmp_path, monkeypatch):
    from data import sandbox

    tests = [{"input": "1", "output": "2"}]
    path = write(
        tmp_path / "a.jsonl", [{"problem": f"Task {i}", "tests": tests} for i in range(20)]
    )
    assert not any("WARNING" in note for note in load(path).notes)
    monkeypatch.setattr(sandbox, "missing", lambda: ["no Landlock: files"])
    assert any("WARNING" in note and "no Landlock" in note for note in load(path).notes)


BAD_FILES = [  # their name and content, and what is said
    ("a.jsonl", b"", r"a\.jsonl holds no record"),
    ("a.csv", b"problem,answer\n", r"a\.csv holds no record"),
    (
        "a.jsonl",
        b'{"problem": "x", "answer": "1"}\n{"problem": "y"}\n',
        r"line 2: column 'answer' is empty",
    ),
    (
        "a.jsonl",
        b'{"problem": "x", "answer": ""}\n',
        r"line 1: column 'answer' is empty: fill it in",
    ),
    (
        "a.jsonl",
        b'{"problem": " ", "answer": "1"}\n',
        r"line 1: column 'problem' is empty",
    ),
    (
        "a.jsonl",
        b'\n{"problem": "x", "answer": {"a": 1}}\n',
        r"line 2: an answer is a text or a number",
    ),
    (
        "a.jsonl",
        b'{"problem": "x", "answer": NaN}\n',
        r"line 1: an answer is a text or a number, not nan",
    ),
    (
        "a.jsonl",
        b'\n{"problem": "x\\ud800", "answer": "1"}\n',
        r"line 2: column 'problem' holds half of a character",
    ),
    ("a.jsonl", b'{"problem": ["x"], "answer": "1"}\n', r"line 1: column 'problem' holds no text"),
    ("a.jsonl", b'{"problem": "x", "answer": "1"}\n{"problem": "y", "an', r"line 2 is not JSON"),
    ("a.jsonl", b'{"problem": "x", "answer": "1"}\n[1]\n', r"line 2: a record must be an object"),
    (
        "a.jsonl",
        b'{"problem": "x", \n{"problem": "y", "answer": "1"}\n',
        r"line 1 is not JSON in UTF-8",
    ),
    (
        "a.jsonl",
        b'{"problem": "x", "answer": "1"}\n{"problem": "\xff", "answer": "1"}',
        r"line 2 is not JSON in UTF-8",
    ),
    ("a.jsonl", b"[" * 100_000, r"line 1 is not JSON"),
    ("a.json", b'[{"problem": "x",\n"answer": "\xff"}]', r"line 2 is not JSON in UTF-8"),
    ("a.json", b'{"problem": "x"}', r"holds no list of records, but a dict"),
    (
        "a.json",
        b'[{"problem": "x", "answer": "1"}, {"problem": "y"}]',
        r"record 2: column 'answer' is empty",
    ),
    ("a.csv", b"problem,answer\nx,1\ny\n", r"line 3: column 'answer' is empty: fill it in"),
    ("a.csv", b"problem,answer\nx,1\ny,1,2\n", r"line 3: more cells than columns"),
    ("a.csv", b'problem,answer\nx,"1\n', r"after line 1 is not CSV"),
    ("a.csv", b"problem,answer\nx,1\n\xff,2\n", r"a\.csv.* is not CSV in UTF-8"),
    ("a.parquet", b"not parquet", r"a\.parquet is no Parquet file that can be read"),
    ("a.txt", b"x", r"a\.txt is not a file of records; the endings known are \.jsonl"),
    ("a.jsonl", b'{"problem": "x", "answer": "1"}\n', r"one problem only: .* by ,validation=FILE"),
]


def test_a_file_that_cannot_be_used_is_refused_with_its_place(tmp_path):
    for name, content, message in BAD_FILES:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            load(str(tmp_path / name))
        assert str(tmp_path / name) in str(error.value), (name, content)


@pytest.mark.parametrize("rows_in_a_list", [1, 300])
def test_a_small_parquet_file_with_far_larger_rows_is_refused(tmp_path, rows_in_a_list):
    """A category is stored once; it is read as often as it comes, in a column or in lists."""
    few, long = (pyarrow.array(["x" * length] * 2).dictionary_encode() for length in (9, 2**20))
    for categories, size in ((few, 2), (long, 300)):
        column = categories.take(pyarrow.array([0] * size))
        if rows_in_a_list > 1:
            column = pyarrow.ListArray.from_arrays(
                pyarrow.array([0, size, size], pyarrow.int32()), column
            )
        rows = {
            "problem": [str(i) for i in range(len(column))],
            "answer": ["1"] * len(column),
            "solution": column,
        }
        pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet", compression="zstd")
        assert (tmp_path / "a.parquet").stat().st_size < 10_000
        if size == 2 and rows_in_a_list == 1:
            (source,) = load_data([str(tmp_path / "a.parquet")], None, 1, wanted="solution")
            assert source.train[0].answer == "x" * 9
        else:
            with pytest.raises(
                ValueError, match="rows are more than 200 times as large as the file"
            ):
                load(str(tmp_path / "a.parquet"))


def test_a_task_that_makes_no_problem_is_named_with_the_call(monkeypatch):
    monkeypatch.setattr(arithmetic, "problems", lambda *_: [])
    message = r"arithmetic\.py: problems\('train', 50, 0\) returned no problem"
    with pytest.raises(ValueError, match=message):
        load("arithmetic", 50)


def test_a_task_with_fewer_problems_than_asked_for_is_told(monkeypatch):
    def one(split, *_):
        return [Problem(split, "2", arithmetic.__name__)]

    monkeypatch.setattr(arithmetic, "problems", one)
    (note,) = load("arithmetic", 2, 1).notes
    assert note == "2 problems for train were asked for, and there are 1"


# --- held out -------------------------------------------------------------------------------------


def test_what_is_held_out_depends_on_the_text_alone(tmp_path):
    rows = records(500)
    source = load(write(tmp_path / "a.jsonl", rows), validation=20)
    assert len(source.validation) == 20 and len(source.train) == 480
    assert not set(source.train) & set(source.validation)
    turned = load(write(tmp_path / "b.jsonl", rows[::-1]), validation=20)
    assert turned.validation == source.validation and turned.train == source.train
    fewer = load(str(tmp_path / "a.jsonl"), validation=5)
    assert fewer.validation == source.validation[:5]
    more = load(write(tmp_path / "c.jsonl", rows + records(100, start=1000)), validation=1000)
    assert len(set(more.validation) & set(source.validation)) == 20 and len(more.validation) == 60
    assert "60 of 600 problems are held out, a tenth, not 1000" in more.notes


def test_repeated_problems_are_left_out_and_told(tmp_path):
    rows = records(50)
    rows += [{**rows[3], "problem": "  what IS 3 +\n1? "}, {**rows[4], "answer": "5.0"}]
    source = load(write(tmp_path / "a.jsonl", rows))
    assert len(source.train) + len(source.validation) == 50
    message = r"2 repeated .* the first: .*a\.jsonl, line 51"
    assert any(re.search(message, note) for note in source.notes)
    answers = {problem.answer for problem in source.train + source.validation}
    assert answers == {str(i + 1) for i in range(50)}, "the first counts"
    assert loading.text_key("x-1") != loading.text_key("x+1")


def test_what_can_be_read_in_two_ways_is_refused_with_its_line(tmp_path):
    rows = records(20)
    path = write(tmp_path / "a.jsonl", [*rows, {**rows[4], "answer": "9"}])
    said = (
        r"a\.jsonl, line 21: one problem has two answers, '5' in .*, line 5, '9' here: remove one"
    )
    with pytest.raises(ValueError, match=said):
        load(path)
    for answer, said in (
        (r"\boxed{3} or \boxed{4}", "several boxes"),
        (r"thus \boxed{3", "a box that does not close"),
        (r"\boxed{ and then \boxed{4}", "a box that does not close"),
    ):
        path = write(tmp_path / "b.jsonl", [*rows, {"problem": "3 or 4?", "answer": answer}])
        with pytest.raises(ValueError, match=rf"b\.jsonl, line 21: the answer has {said}"):
            load(path)
    twice = [*rows, {"problem": "3?", "answer": r"\boxed{3}, so \boxed{3}"}]
    assert len(load(write(tmp_path / "c.jsonl", twice)).train) == 19
    (tmp_path / "d.jsonl").write_text('{"problem": "a", "answer": "1", "answer": "2"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 1 .*'answer' is there twice"):
        load(str(tmp_path / "d.jsonl"))
    (tmp_path / "e.csv").write_text("problem,answer,answer,\na,1,2,\n")
    with pytest.raises(
        ValueError, match=r"e\.csv, line 1: two columns are named 'answer': rename one"
    ):
        load(str(tmp_path / "e.csv"))


def test_problems_held_out_anywhere_are_trained_on_nowhere(tmp_path):
    own = write(tmp_path / "held_out.jsonl", records(30))
    one = write(tmp_path / "one.jsonl", records(300))
    other = write(tmp_path / "two.jsonl", records(300, start=100))
    sources = load_data([f"{one},validation={own}", other], None, 1000)
    prompts = [{problem.prompt for problem in source.train} for source in sources]
    held_out = [{problem.prompt for problem in source.validation} for source in sources]
    assert [len(part) for part in held_out] == [30, 30]
    assert not (prompts[0] | prompts[1]) & (held_out[0] | held_out[1])
    assert "51 training problems are held out elsewhere too" in " ".join(sources[0].notes)
    with pytest.raises(ValueError, match="no training problem is left"):
        load(f"{own},validation={own}")


def test_fewer_training_problems_are_drawn_the_same_each_time(tmp_path):
    path = write(tmp_path / "a.jsonl", records(500))
    everything, drawn = (load_data([path], number, 10)[0].train for number in (None, 40))
    assert drawn == everything[:40]
    assert {problem.answer for problem in drawn} != {str(i + 1) for i in range(40)}


# --- names and mixtures ---------------------------------------------------------------------------


def test_arguments_are_read():
    assert parse_spec("polaris") == loading.Spec("polaris", 1.0, {})
    assert parse_spec("polaris:3") == loading.Spec("polaris", 3.0, {})
    options = {"problem": "q", "answer": "a b"}
    spec = parse_spec("a/b.jsonl:.5,problem=q,answer=a b")
    assert spec == loading.Spec("a/b.jsonl", 0.5, options)
    assert parse_spec("C:x.jsonl").name == "C:x.jsonl"
    for wrong, why in [
        ("a:0", "above 0"),
        ("", "wanted is"),
        ("a,b", "no option"),
        ("a,problem=", "no option"),
        ("a,weight=2", "They are problem="),
    ]:
        with pytest.raises(ValueError, match=why):
            parse_spec(wrong)


def test_a_name_that_cannot_be_used_is_refused():
    for argument, message in [
        (
            "algebra",
            "no such file or folder, and no data set .*; known are polaris, .*, arithmetic",
        ),
        ("aime24", "for evaluation"),
        ("mathematics", "without problems of its own"),
        ("arithmetic,problem=x", "takes no problem"),
        ("no/such/file.jsonl", "no such file or folder"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(argument)


def test_every_batch_has_the_sources_by_their_weights():
    handed_out, order = [0, 0, 0], []
    for _ in range(600):
        order.append(next_source([3, 1, 0], handed_out))
        handed_out[order[-1]] += 1
    assert handed_out == [450, 150, 0]
    for start in range(0, 560, 7):
        batch = Counter(order[start : start + 32])
        assert abs(batch[0] - 24) <= 1 and abs(batch[1] - 8) <= 1
    assert [next_source([0.1, 10], [0, n]) for n in (0, 50, 98, 101)] == [1, 1, 1, 0]


def test_the_template_of_the_readme_is_a_task(tmp_path, monkeypatch):
    (code,) = re.findall(
        r'```python\n("""data/tasks/squares.py.*?)```',
        (ROOT / "README.md").read_text(),
        flags=re.DOTALL,
    )
    assert code.count("\n") <= 25
    (tmp_path / "squares.py").write_text(code)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    (source,) = load_data(["squares"], 200, 50)
    assert len(source.train) == 200 and len(source.validation) == 50 and source.notes == []
    problem, score = source.train[0], importlib.import_module("data.tasks.squares").score
    assert problem.task == "data.tasks.squares"
    assert score(problem, f"so</think>It is {problem.answer}")
    assert not score(problem, f"{problem.answer}</think>") and not score(problem, "</think>12 13")


def test_mixed_sources_keep_their_names_apart(tmp_path):
    one = write(tmp_path / "a" / "d.jsonl", records(50))
    two = write(tmp_path / "b" / "d.jsonl", records(50, start=50))
    sources = load_data([f"{one}:3", two, "arithmetic:0.5"], 20, 5)
    assert [source.name for source in sources] == ["d.jsonl", "d.jsonl-2", "arithmetic"]
    assert [source.weight for source in sources] == [3, 1, 0.5]
    for source in sources:
        assert len(source.train) == 20 and len(source.validation) == 5


# --- data sets of the hub -------------------------------------------------------------------------

TESTS = json.dumps([{"input": "1", "output": "2", "type": "stdin_stdout"}])
AS_ON_THE_HUB = {  # how each data set lies there, with rows of its columns
    "polaris": {
        "polaris-data-53K.parquet": lambda i: {
            "problem": f"P {i}",
            "answer": str(i),
            "difficulty": "3/8",
        },
    },
    "deepscaler": {
        "deepscaler.json": lambda i: {
            "problem": f"P {i}",
            "answer": str(i),
            "solution": "long",
        },
    },
    "gsm8k": {
        "main/train-00000-of-00001.parquet": lambda i: {
            "question": f"P {i}",
            "answer": f"2+2=<<2+2=4>>4\n#### {i}",
        },
        "main/test-00000-of-00001.parquet": lambda i: {
            "question": f"T {i}",
            "answer": f"so\n#### {i}",
        },
        "socratic/train-00000-of-00001.parquet": lambda i: {
            "question": f"S {i}",
            "answer": "no",
        },
    },
    "math": {
        "algebra/train-00000-of-00001.parquet": lambda i: {
            "problem": f"P {i}",
            "solution": rf"so \boxed{{{i}}}.",
        },
        "geometry/train-00000-of-00001.parquet": lambda i: {
            "problem": f"P {i + 50}",
            "solution": rf"so \boxed {i + 50}",
        },
        "algebra/test-00000-of-00001.parquet": lambda i: {
            "problem": f"T {i}",
            "solution": rf"so \boxed{{{i}}}.",
        },
    },
    "math500": {
        "test.jsonl": lambda i: {"problem": f"T {i}", "solution": "long", "answer": str(i)},
    },
    "aime24": {
        "data/test-00000-of-00001.parquet": lambda i: {
            "problem": f"T {i}",
            "solution": rf"\boxed{{{i}}}",
        },
    },
    "aime25": {
        "test.jsonl": lambda i: {"problem": f"T {i}", "answer": str(i)},
    },
    "deepcoder": {
        "primeintellect/train-00000-of-00002.parquet": lambda i: {
            "problem": f"P {i}",
            "tests": TESTS,
            "solutions": ["x"],
        },
        "taco/train-00000-of-00001.parquet": lambda i: {
            "problem": f"P {i + 50}",
            "tests": json.dumps({"inputs": ["1"], "outputs": ["2"]}),
        },
        "lcbv5/test-00000-of-00001.parquet": lambda i: {
            "problem": f"T {i}",
            "tests": TESTS,
            "starter_code": "",
        },
        "codeforces/test-00000-of-00001.parquet": lambda i: {
            "problem": f"T {i + 50}",
            "tests": TESTS,
        },
    },
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The hub's cache, filled with small data sets that lie as the real ones do; nothing else can
    be had."""
    import huggingface_hub

    cache = tmp_path / "cache"
    for name, content in AS_ON_THE_HUB.items():
        repository = cache / f"datasets--{KNOWN[name].repository.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40)
        for path, row in content.items():
            write(repository / "snapshots" / ("0" * 40) / path, [row(i) for i in range(50)])
    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *a, **k: real(*a, **k, cache_dir=cache, local_files_only=True),
    )
    return cache


def test_known_data_sets_are_trained_on_by_name(hub):
    for name in [name for name, known in KNOWN.items() if known.train]:
        source = load(name, validation=4)
        total = {"math": 100, "deepcoder": 100}.get(name, 50)
        assert len(source.train) == total - 4 and len(source.validation) == 4
        assert source.name == name and source.notes == []
        problems = source.train + source.validation
        prompts = {problem.prompt.split("\n")[0] for problem in problems}
        assert prompts == {f"P {i}" for i in range(total)}, "no test part, no other subset"
        if name != "deepcoder":
            assert {problem.answer for problem in problems} == {str(i) for i in range(total)}, name


def test_known_data_sets_are_evaluated_on_by_name(hub):
    for name, known in KNOWN.items():
        source, start = load_evaluation(name, 1000), "T " if known.test else "P "
        number = {"deepcoder": 100}.get(name, 50) if known.test else 5
        assert source.train == [] and len(source.validation) == number, name
        assert all(problem.prompt.startswith(start) for problem in source.validation), name
        assert {problem.task for problem in source.validation} == {loading.task_of(name)}, name
        assert len(load_evaluation(name, 3).validation) == 3


def test_evaluation_takes_a_whole_file_or_what_a_task_holds_out(tmp_path):
    evaluated = load_evaluation(write(tmp_path / "mine.jsonl", records(50)), 1000)
    assert len(evaluated.validation) == 50 and evaluated.train == []
    assert load_evaluation("arithmetic", 50).validation == arithmetic.problems("validation", 50)


def test_evaluation_says_what_a_run_would_have_trained_on(tmp_path):
    path = write(tmp_path / "mine.jsonl", records(50))
    held_out = load(path, validation=5).validation
    assert load_evaluation(path, 5).validation == held_out
    assert load_evaluation(path, 5).notes == load_evaluation(path, 4).notes
    assert "--problems 5 takes only what it has held out" in load_evaluation(path, 6).notes[-1]

    # A folder whose files say what is held apart.
    folder = tmp_path / "folder"
    write(folder / "train.jsonl", records(20))
    write(folder / "val.jsonl", records(10, start=100))
    (source,) = load_data([str(folder)], None, 2)
    assert len(source.train) == 18, "val says validation"
    evaluated = load_evaluation(str(folder), 4)
    assert evaluated.validation[:2] == source.validation
    assert "holds out at most 2" in evaluated.notes[-1]
    assert loading.task_of(str(folder)) == "data.tasks.mathematics"
    named = load_evaluation(f"{folder / 'train.jsonl'},validation={folder / 'val.jsonl'}", 4)
    assert {problem.prompt for problem in named.validation} <= {
        problem.prompt for problem in load_evaluation(f"{folder},split=validation", 99).validation
    }
    by_its_word = load_evaluation(f"{folder},split=val", 99).validation
    assert by_its_word == load_evaluation(f"{folder},split=validation", 99).validation


def test_a_table_with_an_index_column_and_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "a.csv").write_text(",problem,answer\n0,1+1?,2\n1,2+2?,4\n")
    assert len(load_evaluation(str(tmp_path / "a.csv"), 9).validation) == 2
    text = '{"problem": "1+1?", "answer": "2"}\n'
    (tmp_path / "b.jsonl").write_text("\ufeff" + text)
    assert len(load_evaluation(str(tmp_path / "b.jsonl"), 9).validation) == 1
    (tmp_path / "c.csv").write_text("problem,answer\n1+1?,2,3\n")
    with pytest.raises(
        ValueError, match="line 2: more cells than columns: put quotes around a text that holds ','"
    ):
        load_evaluation(str(tmp_path / "c.csv"), 9)


def test_any_data_set_of_the_hub_and_any_folder_can_be_named(hub, tmp_path):
    for i, name in enumerate(("openai/gsm8k", "agentica-org/DeepScaleR-Preview-Dataset")):
        source = load(f"{name},subset=main" if i == 0 else name)
        assert len(source.train) == 45 and source.name == name.split("/")[1]
    write(tmp_path / "folder" / "sub" / "train.jsonl", records(20))
    write(tmp_path / "folder" / "sub" / "test.jsonl", records(20, start=100))
    assert len(load(str(tmp_path / "folder")).train) == 18
    assert len(load(f"{tmp_path / 'folder'},split=test,subset=sub").train) == 18
    with pytest.raises(ValueError, match="no file of records below other"):
        load(f"{tmp_path / 'folder'},subset=other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file of records"):
        load(str(tmp_path / "empty"))


def test_a_few_bad_records_of_a_known_data_set_are_left_out_and_told(hub):
    (path,) = hub.glob("*DeepScaleR*/snapshots/*/deepscaler.json")
    rows = json.loads(path.read_text())
    rows[7]["answer"] = None
    path.write_text(json.dumps(rows))
    source = load("deepscaler")
    assert len(source.train) + len(source.validation) == 49
    message = r"1 records cannot be used .*deepscaler\.json, record 8: column 'answer' is empty"
    assert re.search(message, source.notes[0])
    for row in rows[10:15]:
        row["answer"] = ""
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"6 records of deepscaler cannot be used; .*record 8"):
        load("deepscaler")


def test_an_unreachable_hub_says_what_to_do(tmp_path):
    """In a process of its own: the hub's library reads its settings once."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    program = """
from data.load import load_data
try:
    load_data(['polaris'], 1, 1)
except ValueError as error:
    print(error)
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    wanted = (
        "the data set POLARIS-Project/Polaris-Dataset-53K could not be downloaded from the hub: "
        ".* download the data set elsewhere and give its folder .*HF_HOME"
    )
    assert re.match(wanted, run.stdout), run
    assert run.stdout.count("\n") == 1 and run.stderr == ""
