"""Command-line flags out of a dataclass: a field is a flag, and the comment beside it is the help."""

import contextlib
import io
import re
import sys

import tyro


def read_flags(kind: type, arguments: list[str], default=None, description: str | None = None, others: bool = False):
    """An instance of the dataclass `kind` with what the flags say; what they leave out is as in `default`.

    With `others`, a pair of that and the arguments that `kind` has no flag for. ValueError, in one sentence with the
    valid values or the nearest flag, for a flag or a value that there is not. `--help` prints the help and exits.
    """
    if not others and {"-h", "--help"} & {*arguments}:
        tyro.cli(kind, args=arguments, default=default, description=description)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            return tyro.cli(kind, args=arguments, default=default, return_unknown_args=others)
        except SystemExit:
            pass
    raise ValueError(_sentence(said.getvalue()))


def _sentence(box: str) -> str:
    """What tyro says in a box of several lines and sections, as one sentence."""
    sections = [[]]
    for line in box.splitlines():
        text = line.strip(" │")
        if re.fullmatch("[─-]+", text):
            sections.append([])
        elif text and not re.match("[╭╰]", text):
            sections[-1].append(text)
    if "╭" not in box:  # the title is on a line of its own where stdout is not UTF-8
        del sections[0]
    sentence = " ".join(sections[0]).rstrip(".")
    for section in sections[1:]:
        near = re.search(r"--[\w-]+", " ".join(section)) if section[0].startswith("Perhaps you meant") else None
        sentence += f"; did you mean {near[0]}?" if near else ""
    return sentence


def flag(field: str) -> str:
    """The flag of a field: --learning-rate for learning_rate."""
    return f"--{field.replace('_', '-')}"


def run_command(main, arguments: list[str] | None = None) -> None:
    """Run main(arguments), a script's command, and exit with the status that it returns. What the user can mend, which
    `main` raises as ValueError or OSError, is printed as one sentence, and the status is 2."""
    try:
        sys.exit(main(sys.argv[1:] if arguments is None else arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
