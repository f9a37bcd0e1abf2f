"""How large the code is and how densely it is written, and how long the pages are: the rule of
CONTRIBUTING.md. The sizes are read, and forbid nothing.

    python benchmarks/size.py    # in the project's root

What counts is tokens of Python: names, operators, numbers and texts. Comments and the ends of lines
are free. A docstring is one token, however long it is, and so is an f-string. Words are those of
all pages, without code blocks and without the tables of studies.
"""

import io
import re
import subprocess
import tokenize

from common import ROOT

AIMS = {
    "what a user runs": 69_000,  # tokens
    "tests": 58_000,
    "benchmarks": 8_000,
    "docs": 8_500,
    "words of pages": 33_000,
    "words of README.md": 1_500,
}
NOT_RUN = ("tests", "benchmarks", "docs")
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


def words_of(page: str) -> int:
    """How many words this page has."""
    return len(re.sub(r"(?ms)^```.*?^```", "", page).split())


def measure(files: dict[str, str]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The tokens and lines of each room, and the sizes that AIMS names. files: Python and Markdown
    by path. A script at the top is a room of its own."""
    rooms, sizes = {}, dict.fromkeys(AIMS, 0)
    for path, text in files.items():
        name = path.split("/")[0]
        if path.endswith(".md"):
            sizes["words of pages"] += words_of(text)
            continue
        tokens, lines = rooms.get(name, (0, 0))
        rooms[name] = [tokens + tokens_of(text), lines + text.count("\n")]
        sizes[name if name in NOT_RUN else "what a user runs"] += tokens_of(text)
    sizes["words of README.md"] = words_of(files.get("README.md", ""))
    return rooms, sizes


def main() -> None:
    command = ["git", "ls-files", "*.py", "*.md", ":!docs/study/*tables.md"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split()
    rooms, sizes = measure({name: (ROOT / name).read_text() for name in names})
    print(f"{'room':18} {'tokens':>8} {'lines':>8}   tokens a line")
    for name, (tokens, lines) in sorted(rooms.items()):
        print(f"{name:18} {tokens:8,} {lines:8,} {tokens / lines:9.1f}")
    print(f"\n{'in all':18} {'there is':>8} {'aim':>8}")
    for name, aim in AIMS.items():
        print(f"{name:18} {sizes[name]:8,} {aim:8,}")


if __name__ == "__main__":
    main()
