"""How large the code is and how densely it is written, and how long the pages are: the rule of
CONTRIBUTING.md.

    python benchmarks/size.py    # in the project's root; the status is 1 if the rule is broken

A size may be 4 % above its aim, so that a fork has room for its first changes.

What counts is tokens of Python: names, operators, numbers and texts. Comments and the ends of lines
are free. A docstring is one token, however long it is, and so is an f-string. Words are those of
all pages, without code blocks and without the tables of studies.
"""

import ast
import io
import re
import subprocess
import tokenize

from common import ROOT

AIMS = {
    "what a user runs": 72_500,  # tokens
    "tests": 68_000,
    "benchmarks": 8_000,
    "docs": 8_000,
    "words of pages": 45_000,
    "lines of README.md": 220,
}
ROOM = 1.04  # of an aim: a fork's
NOT_RUN = ("tests", "benchmarks", "docs")
MOST_A_LINE = 7.0  # tokens, in a room as a whole
MOST_A_LINE_NOT_RUN = 8.0
MOST_LINES = 60  # of a body
LONGER = {"train.py train"}  # the loop
MOST_ARGUMENTS = 7
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def tokens_of(source: str) -> int:
    """How many tokens this source has."""
    count = inside = 0  # f-strings that are open: Python 3.12 and later take them apart
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        inside -= kind == "FSTRING_END"
        count += not inside and (token.type in COUNTED or kind == "FSTRING_START")
        inside += kind == "FSTRING_START"
    return count


def long_functions(path: str, source: str) -> list[str]:
    """A sentence for each function with a long body (its docstring left out) or many arguments."""
    sentences = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            has_more = ast.get_docstring(node) is not None and len(node.body) > 1
            first = node.body[1] if has_more else node.body[0]
            lines = node.end_lineno - first.lineno + 1
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if lines > MOST_LINES and f"{path} {node.name}" not in LONGER:
                sentences.append(f"{path}: the body of {node.name} has {lines} lines")
            if len(arguments) > MOST_ARGUMENTS:
                sentences.append(f"{path}: {node.name} has {len(arguments)} arguments")
    return sentences


def measure(files: dict[str, str]) -> tuple[dict[str, list[int]], dict[str, int], list[str]]:
    """The tokens and lines of each room, the sizes that AIMS names, and a sentence for each part
    of the rule that is broken. files: Python and Markdown by path. A script at the top is a room of
    its own."""
    rooms, sizes, broken = {}, dict.fromkeys(AIMS, 0), []
    for path, text in files.items():
        name = path.split("/")[0]
        if path.endswith(".md"):
            prose = re.sub(r"(?ms)^```.*?^```", "", text)
            sizes["words of pages"] += len(prose.split())
            continue
        tokens, lines = rooms.get(name, (0, 0))
        rooms[name] = [tokens + tokens_of(text), lines + text.count("\n")]
        sizes[name if name in NOT_RUN else "what a user runs"] += tokens_of(text)
        if name not in NOT_RUN:
            broken += long_functions(path, text)
    sizes["lines of README.md"] = files.get("README.md", "").count("\n")
    for name, (tokens, lines) in rooms.items():
        if tokens > lines * (MOST_A_LINE_NOT_RUN if name in NOT_RUN else MOST_A_LINE):
            broken.append(f"{name} has {tokens / lines:.1f} tokens a line")
    for name, aim in AIMS.items():
        if sizes[name] > ROOM * aim:
            broken.append(f"{name}: {sizes[name]:,}, at most {ROOM * aim:,.0f}")
    return rooms, sizes, broken


def main() -> int:
    command = ["git", "ls-files", "*.py", "*.md", ":!docs/study/*tables.md"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    rooms, sizes, broken = measure({name: (ROOT / name).read_text() for name in names})
    print(f"{'room':18} {'tokens':>8} {'lines':>8}   tokens a line")
    for name, (tokens, lines) in sorted(rooms.items()):
        print(f"{name:18} {tokens:8,} {lines:8,} {tokens / lines:9.1f}")
    print(f"\n{'in all':18} {'there is':>8} {'aim':>8}")
    for name, aim in AIMS.items():
        print(f"{name:18} {sizes[name]:8,} {aim:8,}")
    for sentence in broken:
        print(f"! {sentence}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
