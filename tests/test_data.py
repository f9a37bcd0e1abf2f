"""Data: files of records, data sets of the hub by name, what is held out, mixtures, and what bad
input says."""

import importlib
import json
import re
from pathlib import Path

import huggingface_hub
import pyarrow.csv
import pyarrow.parquet
import pytest
from faults import ROOT
from programs import rows

from data import Problem, one_spelling, sandbox, tasks
from data.load import (
    KNOWN,
    load_data,
    load_evaluation,
    parse_spec,
    read_problems,
    records_of,
    task_of,
)
from data.records import FORMATS
from data.tasks import arithmetic, mathematics


def records(number: int, start: int = 0) -> list[dict]:
    numbers = range(start, start + number)
    return [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in numbers]


def write(path: Path, made: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(made)
    if path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    else:
        path.write_text("\n".join(map(json.dumps, made)))
    return str(path)


SHORT = {
    "Q": '"question": "Q"',
    "S": '{"role": "system", "content": "S"}',
    "T": '{"role": "user", "content": "3 + 4?"}',
    "A": r'{"role": "assistant", "content": "It is 7, so \\boxed{7}."}',
    "G": '{"from": "gpt", "value": "The answer is 7."}',
}


def load(argument: str, train: int | None = None, validation: int | None = None):
    (source,) = load_data([argument], train, validation)
    return source


def read(argument: str, **asked: str) -> tuple[list[Problem], list[str]]:
    """All problems of a file, and what is said of them."""
    spec = parse_spec(argument, **asked)
    return read_problems(spec, records_of({Path(spec.place): "train"}), "train")[:2]


def texts(problems: list[Problem]) -> set[str]:
    """What is asked, without the instruction."""
    return {problem.text or problem.prompt for problem in problems}


@pytest.fixture
def squares(tmp_path, monkeypatch):
    """The task of the README."""
    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r'```python\n("""data/tasks/squares.py.*?)```', readme, re.DOTALL)
    (tmp_path / "squares.py").write_text(code)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])


# --- files of one's own ---------------------------------------------------------------------------


def test_every_format_gives_the_same_problems(tmp_path):
    odd = {"problem": 'A "quoted", two-\nline\u2028 prompt: π?', "answer": "\\frac{1}{2}"}
    made = [odd, {"problem": "?" * 200_000, "answer": "1"}, *records(98)]
    wanted = {row["problem"]: row["answer"] for row in made}
    for suffix in FORMATS:
        problems, _ = read(write(tmp_path / f"mine{suffix}", made))
        assert {problem.text: problem.answer for problem in problems} == wanted


def test_a_column_of_tests_makes_programming_problems(tmp_path, monkeypatch):
    tests = '[{"input": "1", "output": "2"}]'
    path = write(tmp_path / "a.parquet", [{"problem": "Print 2.", "answer": "", "tests": tests}])
    monkeypatch.setattr(sandbox, "missing", lambda: ["no Landlock: files"])
    (usual,), notes = read(path)
    (fast,), _ = read(path, instruction="Fast.")
    assert usual.task == "data.tasks.programming" and fast.prompt == f"{usual.prompt}\n\nFast."
    assert "no Landlock" in notes[-1] and task_of(path) == (usual.task, False)
    apps = {"question": "Print 2.", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'}
    assert read(write(tmp_path / "apps.jsonl", [apps]))[0] == [usual]


def test_the_task_of_a_data_set_is_told_without_reading_it(tmp_path):
    answers = write(tmp_path / "a.jsonl", [row | {"system": "S"} for row in records(20)])
    open(answers, "a").write("\nthis line is never read")
    assert task_of(answers) == ("data.tasks.mathematics", True)


def as_written(content: str) -> str:
    """The content of a file in the tables, with what is SHORT in it. ⇥ is a tab."""
    long = re.sub(r"(?<=[\[{ ])[A-Z](?=[\],])", lambda letter: SHORT[letter[0]], content)
    return long.replace("⇥", "\t")


# A file in a shape of public data sets, what is asked, and the answer.
SHAPES = r"""
a.jsonl,problem=a,passage=c,answer=e | {"a": "Q", "c": "P", "e": 7, "question": "R", "answer": "8"} | P⏎⏎Q | 7
a.jsonl,problem=d,answer=d.assistant | {"d": [S, T, A], "question": "R", "answer": "8"} | S: 3 + 4? | 7
a.jsonl | {Q, "choices": null, "context": "", "images": [], "answer": "7"} | Q | 7
a.jsonl | {Q, "A": 5, "answer": "7"} | Q | 7
a.jsonl | {"Body": "P", "Question": "Q", "Answer": 7.0} | P⏎⏎Q | 7
a.csv | context,question,answer⏎P,Q,False | P⏎⏎Q | False
a.jsonl | {"context": "P", Q, "answers": {"text": ["7", "7"]}} | P⏎⏎Q | 7
a.jsonl | {"Passage": "P", "Question": "Q", "answer": true} | P⏎⏎Q | true
a.jsonl | {Q, "answer": "We add 3 and 4. The answer is 7."} | Q | 7
a.jsonl | {Q, "answer": "**Answer:** 7.5 cm"} | Q | 7.5 cm
a.jsonl | {Q, "answer": "Evelyn."} | Q | Evelyn.
a.jsonl | {Q, "answer": "Paris, Rome, Oslo."} | Q | Paris, Rome, Oslo.
a.jsonl | {Q, "answer": "The final answer is Dr. Who. He came."} | Q | Dr. Who
a.jsonl | {Q, "answer": "The answer is J. K. Rowling. She"} | Q | J. K. Rowling
a.jsonl | {Q, "answer": "The answer is **7**, since 3 + 4 = 7."} | Q | 7
a.jsonl | {Q, "solution": "#### Step 1\nAdd.\n#### End\nSo \\boxed{7}"} | Q | 7
a.jsonl,answer=response | {"query": "Q", "response": "3 + 4 = 7\n#### 7\nThe answer is: 7"} | Q | 7
a.jsonl,answer=response | {"query": "Q", "response": "It is $\\boxed{7}$. The answer is: $7$. I hope."} | Q | 7
a.jsonl | {Q, "solution": "So \\boxed{7}", "target": 0} | Q | 7
a.jsonl | {Q, "solution": "She has 3 + 4 = <<3+4=7>>7. #### 7"} | Q | 7
a.jsonl | {Q, "solution": "We see $x = \\boxed{\\frac{1}{2}}$."} | Q | \frac{1}{2}
a.jsonl | {Q, "solution": "First \\boxed{1}, hence $\\boxed 7$"} | Q | 7
a.jsonl | {Q, "response": "\\boxed{8}", "gold": "7"} | Q | 7
a.jsonl | {Q, "answer": "It is 7.", "expected_answer": "7"} | Q | 7
a.jsonl | {"Problem": "Q", "Final Answer": 7} | Q | 7
a.csv | "";problem;answer⏎0;"1, é⏎1?";2 | 1, é⏎1? | 2
a.csv | ""⇥problem⇥answer⏎0⇥"1, é⏎1?"⇥2 | 1, é⏎1? | 2
a.jsonl | {Q, "solution": "This is to be shown."}⏎{Q, "solution": "so \\boxed{7}"} | Q | 7
a.csv | Problem Type,Question,Correct Answer⏎word,Q,7 | Q | 7
a.json | {Q, "answer": "7"}⏎{"problem": "R", "answer": "8"} | Q | 7
a.jsonl | {Q, "answer": 0} | Q | 0
a.jsonl | {Q, "answer": 0.30000000000000004} | Q | 0.3
a.csv | question,answer⏎Q,2.50 | Q | 2.50
a.jsonl | {Q, "answer": 9007199254740993.0} | Q | 9007199254740992
a.jsonl | {Q, "answer": "7", "answers": [{"text": "8"}]} | Q | 7
a.jsonl | {"prompt": [S, T], "reward_model": {"ground_truth": "7"}} | S: 3 + 4? | 7
a.parquet | {"prompt": [T], "reward_model": {"ground_truth": "[\"7\"]"}} | 3 + 4? | 7
a.jsonl,answer=completion.assistant | {"prompt": [T], "completion": [A]} | 3 + 4? | 7
a.jsonl,answer=messages.assistant | {"messages": [S, T, A]} | S: 3 + 4? | 7
a.jsonl | {Q, "messages": [T, A, T, A], "answer": "7"} | Q | 7
a.jsonl,answer=conversations.assistant | {"system": "S", "conversations": [{"from": "human", "value": "Q"}, G]} | S: Q | 7
a.jsonl | {"prompt": [{"role": "user", "content": [{"text": "Q"}]}], "answer": 7} | Q | 7
a.jsonl | {"prompt": "Q Let's think step by step and output the final answer after \"####\".", "answer": 7} | Q | 7
a.jsonl | {"prompt": "Q\nPlease reason step by step, and put your final answer within \\boxed{}.", "answer": 7} | Q | 7
a.jsonl | {"prompt": "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nQ\n\nRemember to put your answer on its own line after \"Answer:\".", "answer": 7} | Q | 7
a.jsonl | {Q, "solution": "<think>\\boxed{3}?</think> It is \\boxed{7}"} | Q | 7
a.jsonl | {Q, "solution": "<think>3?</think><answer>7</answer>"} | Q | 7
a.jsonl,answer=response | {Q, "response": "3 + 4 = 7\n答案：7。"} | Q | 7
a.jsonl,answer=response | {Q, "response": "3 + 4 = 7\n#### 7\n---"} | Q | 7
a.jsonl,answer=response | {Q, "response": "3 + 4 = 7\n####\n7"} | Q | 7
a.jsonl | {"prompt": "Q\nRemember to put your answer on its own line after \"Answer:\", and you do not need to use a \\boxed command.", "answer": 7} | Q | 7
"""  # noqa: E501


def test_every_shape_of_public_data_sets_is_read(tmp_path):
    for name, content, text, answer in rows(SHAPES):
        path, content = tmp_path / name.partition(",")[0], as_written(content)
        path.write_text(content, encoding="utf-8-sig")
        if path.suffix == ".parquet":
            write(path, [json.loads(content)])
        (problem, *_), _ = read(str(tmp_path / name), instruction="")
        asked = f"{problem.system}: " * (problem.system is not None) + problem.text
        assert (asked, problem.answer) == (as_written(text), answer), content


def test_what_is_guessed_is_told_and_a_solution_gets_the_box_that_is_asked_for(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": "Q", "answer": "3 + 4 = 7\n#### 7"}])
    for instruction, behind in ((None, mathematics.INSTRUCTION), ("Be brief.", "Be brief.")):
        ((problem,), (note,)) = read(path, instruction=instruction)
        assert problem.prompt == f"Q\n\n{behind}" and "problem=question, answer=answer" in note
    ((problem,), _) = read(f"{path},problem=question,solution=answer", wanted="solution")
    assert mathematics.score(problem, problem.metadata["solution"])


# A file, its content, and words of the sentence beside its name.
BAD_FILES = r"""
a.jsonl | ⏎ | holds no record
a.csv | problem,answer⏎ | holds no record
a.jsonl | {"problem": "x", "answer": "1"}⏎{"problem": "y"} | line 2: column 'answer' is empty
a.jsonl | {"problem": " ", "answer": "1"} | line 1: column 'problem' is empty
a.jsonl | ⏎{"problem": "x", "answer": {"a": 1}} | line 2: an answer is a text or a number
a.jsonl | {"problem": "x", "answer": NaN} | line 1.* holds nan
a.jsonl | ⏎{"problem": "x\ud800", "answer": "1"} | line 2: .*surrogates not allowed
a.jsonl | ⏎{"problem": "x", "answer": "1", "system": "\ud800"} | line 2: .*surrogates not allowed
a.jsonl | {"problem": ["x"], "answer": "1"} | line 1: column 'problem' holds
a.jsonl | {"problem": "x", "answer": "1"}⏎{"problem": "y", "an | after line 1: .*Unterminated
a.jsonl | {"problem": "x", "answer": "1"}⏎[1] | after line 1: .* line 2 holds .1., no object
a.jsonl | {"problem": "ÿ", "answer": "1"} | 'utf-8' codec can't decode
a.jsonl | {"task": "x", "result": "1"} | line 1: no column .* are task, result: add
a.jsonl,answer=key | {"problem": "x", "answer": "1"} | line 1: no column key holds the answer
a.jsonl | {"problem": "x", "tests": "{}"} | line 1: .* tests
a.jsonl | [T, A] | line 1 holds .*, no object with named columns
a.jsonl | {"problem": "3?", "answer": "a \\boxed{3 b"} | line 1: .* that closes
a.json | [{"problem": "x",⏎"answer": "ÿ"}] | 'utf-8' codec can't decode
a.json | [{"problem": "x",⏎"answer" "y"}] | line 2 column
a.jsonl | {"problem": "x"} | line 1: no column .* are problem: add ,answer=COLUMN
a.json | {"train": [{"problem": "x", "answer": "1"}]} | record 1 holds 'train', no object
a.jsonl | {"problem": "x", "answer": "1", "Split": "held-out"} | this is for evaluation
a.jsonl | {"prompt": "x", "response": "It is \boxed{1}.", "y": "2"} | are prompt, response, y: add
a.jsonl | {"problem": "x", "choices": ["3", "4"], "answer": 1} | 'choices' holds .* such as A
a.jsonl | {"problem": "x", "Option 1": 3, "Option 2": 4, "answer": "A"} | 'Option 2' holds 4
a.jsonl,task=programming | {"problem": "x", "answer": "1"} | no column .* holds the tests
a.json | {"problem": "x", "answer": "1"}⏎{"problem": "y"} | record 2: column 'answer' is empty
a.jsonl | {"problem": "x", "answer": "#### Step\nAdd.\n#### End\nIt is 7 then."} | cannot be used
a.jsonl | {"problem": "x", "answer": "#### Answer\n7"} | 1 records cannot be used
a.jsonl | {"problem": "x", "answer": "<think>It is"} | 1 records cannot be used
a.jsonl | {"problem": "User: x\nAssistant: y", "answer": "1"} | line 1: .* is no part
a.jsonl | {"problem": "x", "answer": "Therefore, x = 7."} | 1 records cannot be used
a.jsonl | {"prompt": "x\n### Response:", "answer": "1"} | line 1: '### Response:' is no part
a.jsonl | {"prompt": "x\n<think>", "answer": "1"} | line 1: '<think>' is no part
a.csv | problem,A,B,C,answer⏎x,3,4,,B | line 2: column 'B' holds '4'
a.jsonl | {Q, "solution": "def double(x):\n    return 2 * x"} | line 1: .* long text or a sentence
a.jsonl | {Q, "answer": "The answer is first 3, then it is 4."} | line 1: .* a sentence
a.jsonl | {"problem": "x", "context": {"title": ["a"]}, "answer": "1"} | 'context' holds
a.jsonl | {"prompt": "<|user|>x<|assistant|>", "answer": "1"} | line 1: '<.user.>' is no part
a.jsonl | {Q, "decoded_image": "a.png", "answer": "1"} | line 1: column 'decoded_image' holds
a.jsonl | {Q, "image": "a.png", "answer": "1"} | line 1: column 'image' holds 'a.png'
a.jsonl | {Q, "images": [{"path": null}], "answer": "1"} | line 1: column 'images' holds
a.jsonl | {"problem": "<image>x", "images": [], "answer": "1"} | '<image>' is no part of a problem
a.csv | prompt,answer⏎"[INST] x [/INST]",1 | line 2: '.INST.' is no part of a problem
a.csv | prompt,answer⏎"[{'role': 'user', 'content': 'x'}]",1 | .role.* is no part of a problem
a.jsonl | {"prompt": [T, T], "answer": "1"} | line 1: column 'prompt' holds .* several turns
a.jsonl,answer=messages.assistant | {"messages": [T, A, T, A]} | line 1: .* several turns
a.jsonl | {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"} | images
a.jsonl | {"problem": "x", "answer": "It is even."} | 1 records cannot be used, .* line 1: .*text
a.jsonl | {"problem": "x", "answer": "proof"} | 1 records cannot be used
a.jsonl | {"problem": "x", "answer": "#### "} | line 1: the answer is empty
a.jsonl | {"problem": "x", "answer": "\\boxed{}"} | line 1: the answer is empty
a.jsonl | {"problem": "x", "answer": "LONG"} | 1 records cannot be used
a.jsonl | {"problem": "x", "answer": ["a", "b"]} | line 1: an answer is a text or a number, not
a.json | [{"problem": "x", "answer": "1"}, {"problem": "y"}] | record 2: column 'answer' is empty
a.csv | problem,answer,answer⏎x,1,2⏎ | line 1 has two columns
a.csv | problem,answer⏎x,1⏎y⏎ | line 3: column 'answer' is empty .*: fill it in
a.csv | problem,answer⏎x,1⏎y,1,2⏎ | after line 2: .* more cells than columns.* holds ','
a.csv | problem,answer⏎x,"1⏎ | after its start: .* unexpected end of data
a.csv | problem,answer⏎x,#N/A⏎ | line 2: .*holds '#N/A'
a.csv | problem,answer⏎x, null ⏎ | line 2: .*holds ' null '
a.parquet | not parquet | Parquet magic bytes not found
a.txt | x | is not a file of records; the endings known are \.jsonl
a.jsonl | {"problem": "x", "answer": "1"} | no problem for validation.* by ,validation=FILE
"""


def test_a_file_that_cannot_be_used_is_refused_with_its_place(tmp_path):
    for name, content, words in rows(BAD_FILES):
        path = tmp_path / name.partition(",")[0]
        content = as_written(content).replace("LONG", "word " * 300)
        path.write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=words) as error:
            load(str(tmp_path / name))
        assert path.name in str(error.value), content
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(ValueError, match="recursion"):
        load(str(path))


# --- held out -------------------------------------------------------------------------------------


def test_no_command_evaluates_on_what_another_one_trains_on(tmp_path, squares):
    """Commands that train, imitate or evaluate on the same data, with other numbers, instructions,
    weights and neighbours: no problem, which is the prompt without its instruction, is on both
    sides."""
    pytest.importorskip("reasoning_gym")
    made = [row | {"solution": row["answer"]} for row in records(300)]
    write(tmp_path / "parts" / "train.jsonl", made[:200])
    unanswered = [{"Question": row["problem"]} for row in made[150:]]
    write(tmp_path / "parts" / "test.jsonl", made[150:])
    write(tmp_path / "parts" / "valid.jsonl", unanswered)
    apart, file = write(tmp_path / "apart.csv", made[:40]), write(tmp_path / "all.csv", made)
    names = [file, str(tmp_path / "parts"), f"{file},validation={apart}", "squares", "arithmetic"]
    names += ["gym:prime_factorization,max_value=300", "gym:products"]
    runs = [("answer", None, 400, 40), ("solution", "Think.", 64, 300), ("answer", "", 1, 300)]
    for name in names:
        head, comma, options = name.partition(",")
        trained, held_out = set(), set()
        for wanted, instruction, number, train in runs:
            arguments = [f"{head}:3{comma}{options}", file]
            first, other = load_data(arguments, train, number, instruction, wanted)
            trained |= texts(first.train + other.train)
            evaluated = load_evaluation(name, number, "Be brief.")
            held_out |= texts(first.validation + evaluated.validation)
        assert trained and held_out and not trained & held_out, name


def test_what_is_held_out_depends_on_the_text_alone_in_any_spelling(tmp_path):
    made = records(500)
    path = write(tmp_path / "a.jsonl", made)
    other = [row | {"problem": row["problem"].upper()} for row in reversed(made)]
    source, turned = load(path, 400, 20), load(write(tmp_path / "b.jsonl", other), 40, 5)
    keys = lambda problems: [problem.key for problem in problems]
    assert keys(turned.validation) == keys(source.validation[:5])
    assert keys(turned.train) == keys(source.train[:40])
    assert {problem.answer for problem in turned.train} != {str(i + 1) for i in range(40)}
    assert load_evaluation(path, 20).validation == source.validation
    # A sum has a checksum of its own, whatever task asks.
    ours = [arithmetic.problems(split, 300) for split in ("validation", "train")]
    sums = [{"problem": each.prompt.replace("+", " + "), "answer": "1"} for each in sum(ours, [])]
    source = load(write(tmp_path / "sums.jsonl", sums))
    assert {*keys(source.validation)} == {*keys(ours[0])}


SAME = """
A café: is 12 + 1 it?;A CAFÉ: IS 12 + 1 IT?;A cafe\u0301: is 12 + 1 it?;A café: is $12$ + $1$ it?;
A \u200bcafé: is 12 + 1 it?;A café: is \uff11\uff12 + \uff11 it?;A café: is \\(12\\) + 1 it?;
A café: is 12  +\n1 it  ?
"""  # one problem


APART = r"""
find x;find X;10^2;102;10²;10, 200;10,200;\Delta;\delta;2ˣ;2x;11/2;1 1/2;52 + 1;5² + 1;aB;Ab;x$1;x1
"""


def test_texts_that_differ_in_their_spelling_alone_are_one_problem(tmp_path):
    for texts, number in ((APART, 19), (SAME, 1)):
        assert len({*map(one_spelling, texts.split(";"))}) == number
    made = [{"problem": text, "answer": str(i)} for i, text in enumerate(["3", "4", " 3\n"])]
    made += [{"problem": "3", "answer": "0", "system": "S"}]  # with another prompt it is another
    problems, notes = read(write(tmp_path / "a.jsonl", made))
    assert sorted(problem.answer for problem in problems) == ["0", "0", "1"]
    assert re.search(r"1 repeated .* the first: .*a\.jsonl, line 3", notes[1])
    assert re.search(r"! 1 of these .*a\.jsonl, line 3 has '2', and not '0'", notes[2])


# --- names and mixtures ---------------------------------------------------------------------------


REFUSED = r"""
a:0 | above 0
a,b | no option
a,problem= | no option
a,weight=2 | options are problem,
a.jsonl,task=mine | task= is one of arithmetic,
algebra | no such file or folder, and no data set .*; known are polaris, .*, arithmetic
mathematics | without problems of its own
arithmetic,x=1 | unexpected .* 'x'
arithmetic,max_digits=0 | max_digits=0
arithmetic,max_digits=six | max_digits=six
gym | gym:FAMILY: .* ''; there are ab,
gym:nosuch | 'nosuch'; there are ab,
gym:products,digits=1 | products .* {'digits': 1}:
gym:products,graded=true | products .* {'graded'
gym:products,seed=1 | .seed
gym:products,max_digits=many | products .* 'many'
gym:arc_agi | arc_agi
gym:n_queens | n_queens
gym:coin_flip | coin_flip
"""


def test_an_argument_that_cannot_be_used_is_refused():
    for argument, words in rows(REFUSED):
        argument.startswith("gym") and pytest.importorskip("reasoning_gym")
        with pytest.raises(ValueError, match=words):
            load(argument)


def test_mixed_sources_keep_their_names_apart(tmp_path):
    one, two = (write(tmp_path / name / "d.jsonl", records(50)) for name in "ab")
    sources = load_data([f"{one}:3", two, "arithmetic:.5"], 20, 2)
    weights = {source.name: source.weight for source in sources}
    assert weights == {"d.jsonl": 3, "d.jsonl-2": 1, "arithmetic": 0.5}


def test_a_task_of_ones_own_with_too_few_problems_is_told_or_refused(monkeypatch):
    """One that does not look at the split either, and of which only the tenth is held out."""
    made = [Problem(f"{i}+1=", "2", arithmetic.__name__) for i in range(200)]
    monkeypatch.setattr(arithmetic, "problems", lambda *_: made)
    source = load("arithmetic", 300, 5)
    train = [problem for problem in made if not problem.held_out]
    assert source.train == train and len(source.validation) == 5
    assert source.notes == [f"300 problems for train were asked for, and there are {len(train)}"]
    made.clear()
    with pytest.raises(ValueError, match="arithmetic: there is no problem for train"):
        load("arithmetic", 50)


def test_records_are_judged_by_the_task_of_the_readme(tmp_path, squares):
    made = [row | {"system": "<answer>", "rubric": {"a": [1]}} for row in records(40)]
    path = write(tmp_path / "a.jsonl", made)
    problem = load(f"{path},task=squares").train[0]
    task = importlib.import_module(problem.task)
    assert problem.prompt == problem.text and task.score(problem, f"It is {problem.answer}")
    assert not task.score(problem, f"{problem.answer}</think>")
    assert task_of(f"{path},task=squares") == ("data.tasks.squares", True)
    assert json.loads(load(f"{path},task=squares,answer=rubric").train[0].answer) == {"a": [1]}
    # Mathematics judges a box.
    assert "! 40 prompts ask for <answer>" in load(path).notes[-1]


# --- data sets of the hub -------------------------------------------------------------------------


# The files of each data set, the letter of its problems (P to train on, T of a test), and what the
# record of the problem with the number N has besides.
AS_ON_THE_HUB = r"""
polaris | polaris-data-53K.parquet | P | {"answer": "N"}
deepscaler | deepscaler.json | P | {"answer": "N"}
gsm8k | main/train-00000-of-00001.parquet | P | {"answer": "2+2 #### N"}
gsm8k | main/test-00000-of-00001.parquet | T | {"answer": "2+2 #### N"}
gsm8k | socratic/train-00000-of-00001.parquet | S | {"answer": "2+2 #### N"}
math | algebra/train-00000-of-00001.parquet | P | {}
math | algebra/test-00000-of-00001.parquet | T | {}
math500 | test.jsonl | T | {"answer": "N"}
aime24 | data/test-00000-of-00001.parquet | T | {}
aime25 | test.jsonl | T | {}
deepcoder | taco/train-00000-of-00001.parquet | P | {"tests": [{"input": "1", "output": "2"}]}
deepcoder | lcbv5/test-00000-of-00001.parquet | T | {"tests": [{"input": "1", "output": "2"}]}
deepcoder | other/train-00000-of-00001.parquet | S | {"tests": [{"input": "1", "output": "2"}]}
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Folders with small data sets that lie as those of the hub do, which can be downloaded."""
    for name, path, letter, more in rows(AS_ON_THE_HUB):
        made = [
            {"problem": f"{letter} {i}", "solution": rf"so \boxed{{{i}}}."}
            | json.loads(more.replace("N", str(i)))
            for i in range(50)
        ]
        write(tmp_path / KNOWN[name].partition(",")[0] / path, made)
    download = lambda name, repo_type, allow_patterns: str(tmp_path / name)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


@pytest.mark.parametrize("name", KNOWN)
def test_known_data_sets_are_trained_and_evaluated_on_by_name(hub, name):
    letters = re.findall(rf"(?m)^{name} .* (P|T) ", AS_ON_THE_HUB)
    evaluated = load_evaluation(name, 50).validation
    made = {(problem.task, problem.text[0]) for problem in evaluated}
    assert made == {(task_of(name)[0], letters[-1])}
    if "P" not in letters:
        with pytest.raises(ValueError, match="for evaluation"):
            load(name)
        return
    source = load(name)
    problems = source.train + source.validation
    assert (source.name, texts(problems)) == (name, {f"P {i}" for i in range(50)})
    assert name == "deepcoder" or all(each.text == f"P {each.answer}" for each in problems)


def test_any_data_set_of_the_hub_and_any_folder_can_be_named(hub, tmp_path):
    assert load("openai/gsm8k").name == "gsm8k"
    folder = tmp_path / "folder"
    answers = lambda name: {each.answer for each in load_evaluation(name, 9).validation}
    write(folder / "algebra.jsonl", records(40))
    write(folder / "a" / "dataset_info.json", [{"features": "x"}])  # as save_to_disk does
    write(folder / "a" / "train.arrow", records(40, start=50))
    source = load(str(folder))
    assert len(source.train + source.validation) == 80
    write(folder / "valid" / "a.json", records(2, start=100))
    apart = f"{folder}/algebra.jsonl,validation={folder}"
    assert answers(str(folder)) == answers(apart) == {"101", "102"}
    assert {each.answer for each in load(apart).validation} == {"101", "102"}
    write(folder / "test" / "train.csv", records(2, start=200))
    assert answers(str(folder)) == {"201", "202"}, "test before val"
    write(folder / "held_out" / "a.jsonl", [{"instruction": "Add."}] * 3)
    assert "! 3 records are not held apart" in load(str(folder)).notes[-2]
    with pytest.raises(ValueError, match="no file of records below other/"):
        load(f"{folder},subset=other")


HELD_OUT = """holdout hold-out held_out heldout tests testset myTest TEST evals evalset validate
devset gsm8k_test test-00000-of-00001 validation_data train-val testing
testmini development heldoutset"""
TRAIN = "all trainset latest contest values device None"


def test_what_a_path_or_a_split_calls_held_out_is_never_trained_on(tmp_path):
    made, apart = records(40), records(3, start=40)
    wanted = {row["problem"] for row in apart}
    for name in [*HELD_OUT.split(), *TRAIN.split()]:
        folder, is_apart = tmp_path / name, name in HELD_OUT.split()
        write(folder / "train.jsonl", made + apart * is_apart)
        write(folder / f"{name}/train.jsonl", apart)
        split = [row | {"Split": name} for row in apart]  # the others have no such column
        for argument in (str(folder), write(tmp_path / "split.jsonl", made + split)):
            trained = texts(load(argument).train)
            evaluated = texts(load_evaluation(argument, 9).validation)
            assert trained.isdisjoint(wanted) is (evaluated == wanted) is is_apart, name
    for name in ("a/my_test.jsonl", "test/a.jsonl"):  # a file that is named itself
        assert "! its name says" in load(write(tmp_path / name, made)).notes[0]


def test_a_bad_record_of_a_known_data_set_is_left_out_and_told(hub, tmp_path):
    path = tmp_path / KNOWN["deepscaler"] / "deepscaler.json"
    path.write_text(path.read_text().replace('"answer": "7"', '"answer": null'))
    message = r"1 records cannot be used .*deepscaler\.json, record 8: column 'answer' is empty"
    assert re.search(message, *load("deepscaler").notes)


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    said = "Polaris-Dataset-53K could not be downloaded .* no route.* give its folder .*HF_HOME"
    with pytest.raises(ValueError, match=said):
        load("polaris")
