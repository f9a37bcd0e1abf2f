"""How large the code is, and how densely it is written: the rule of CONTRIBUTING.md.

    python benchmarks/size.py    # in the project's root; the status is 1 if the rule is broken

What counts is tokens of Python: names, operators, numbers and texts. Comments and the ends of lines
are free. A docstring is one token, however long it is, and so is an f-string: in Python 3.11, which
CI has. (Later versions take f-strings apart.)
"""

import ast
import io
import subprocess
import tokenize

from common import ROOT

MOST_TOKENS = 84_000  # of what a user runs, which is all rooms but these:
NOT_RUN = ("tests", "benchmarks", "docs")
MOST_A_LINE, MOST_A_LINE_OF_TESTS = 7.0, 8.0  # tokens, in a room as a whole
MOST_LINES = 60  # of a body
LONGER = {"train.py train"}  # the loop
MOST_ARGUMENTS = 7
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def tokens_of(source: str) -> int:
    """How many tokens this source has."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type in COUNTED for token in tokens)


def functions_of(source: str) -> list[tuple[str, int, int]]:
    """The name of each function, the lines of its body without its docstring, and its arguments."""
    functions = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_more = ast.get_docstring(node) is not None and len(node.body) > 1
            first = node.body[1] if has_more else node.body[0]
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            functions.append((node.name, node.end_lineno - first.lineno + 1, len(arguments)))
    return functions


def measure(sources: dict[str, str]) -> tuple[dict[str, list[int]], list[str]]:
    """The tokens and lines of each room, and a sentence for each part of the rule that is broken.
    sources: of each file, by its path in the project. A script at the top is a room of its own."""
    rooms, broken = {}, []
    for path, source in sources.items():
        name = path.split("/")[0]
        room = rooms.setdefault(name, [0, 0])
        room[0] += tokens_of(source)
        room[1] += source.count("\n")
        if name in NOT_RUN:
            continue
        for function, lines, arguments in functions_of(source):
            if lines > MOST_LINES and f"{path} {function}" not in LONGER:
                broken.append(f"{path}: the body of {function} has {lines} lines")
            if arguments > MOST_ARGUMENTS:
                broken.append(f"{path}: {function} has {arguments} arguments")
    for name, (tokens, lines) in rooms.items():
        if tokens > lines * (MOST_A_LINE_OF_TESTS if name == "tests" else MOST_A_LINE):
            broken.append(f"{name} has {tokens / lines:.1f} tokens a line")
    run = sum(tokens for name, (tokens, _) in rooms.items() if name not in NOT_RUN)
    if run >= MOST_TOKENS:
        broken.append(f"what a user runs has {run:,} tokens; it must stay below {MOST_TOKENS:,}")
    return rooms, broken


def main() -> int:
    command = ["git", "ls-files", "*.py"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    rooms, broken = measure({name: (ROOT / name).read_text() for name in names})
    print("room             tokens   lines   tokens a line")
    total = [0, 0]
    for name, (tokens, lines) in sorted(rooms.items()):
        print(f"{name:14} {tokens:8,} {lines:7,} {tokens / lines:9.1f}")
        if name not in NOT_RUN:
            total = [total[0] + tokens, total[1] + lines]
    tokens, lines = total
    print(f"{'what is run':14} {tokens:8,} {lines:7,} {tokens / lines:9.1f}")
    for sentence in broken:
        print(f"! {sentence}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
