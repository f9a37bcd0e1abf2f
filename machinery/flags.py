"""Command-line flags out of a dataclass: a field is a flag, and the comment beside it is the help."""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import io
import re
import signal
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin


def read_flags(kind: type, arguments: list[str], default=None, description: str | None = None, others: bool = False):
    """An instance of the dataclass `kind` with what the flags say; what they leave out is as in `default`.

    With `others`, a pair of that and the arguments that `kind` has no flag for. ValueError, in one sentence with the
    valid values or the nearest flag, for a flag or a value that there is not. `--help` prints the help and exits.
    """
    import tyro  # here, since fit_curve.py does without

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


def read_plain_flags(kind: type, arguments: list[str], description: str):
    """As `read_flags`, but without tyro, for a flat dataclass of texts, numbers, paths and tuples of them. Its field
    without a default takes what is no flag, wherever that stands."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, usage="%(prog)s LOG ... [FLAG ...]")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.error = _raise
    comments = {}
    for one in kind.__mro__[:-1]:
        comments |= re.findall(r"(?m)^ {4}(\w+): [^#\n]*  # (.*)$", inspect.getsource(one))
    for its in dataclasses.fields(kind):
        words, types = _words_and_types(its.type)
        names = {str: "TEXT", float: "NUMBER", Path: "FILE"}
        how = {
            "type": _reader(words, types),
            "metavar": "|".join([*words, *(names[one] for one in types if one in names)]),
        }
        how |= {"nargs": "+"} if get_origin(its.type) is tuple else {}
        how = {"action": "store_true"} if its.type is bool else how
        if its.default is dataclasses.MISSING:
            parser.add_argument(its.name, nargs="*", metavar="LOG", help=comments[its.name])
        else:
            parser.add_argument(flag(its.name), default=its.default, help=comments[its.name].replace("%", "%%"), **how)
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        near = difflib.get_close_matches(unknown[0], parser._option_string_actions, 1)
        _raise(f"there is no flag {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))
    return kind(**{name: tuple(its) if isinstance(its, list) else its for name, its in vars(options).items()})


def _raise(message: str):
    raise ValueError(message)


def _words_and_types(kind) -> tuple[list[str], list[type]]:
    """What a field can hold, None aside: words of a Literal, and types."""
    kinds = [kind] if get_origin(kind) in (None, Literal) else get_args(kind)
    words = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
    return words, [one for one in kinds if get_origin(one) is None and one not in (type(None), Ellipsis)]


def _reader(words: list[str], types: list[type]):
    """The function that reads a text as one of these words, or else as one of these types."""

    def read(text: str):
        if text in words:
            return text
        for one in types:
            with contextlib.suppress(ValueError):
                return one(text)
        raise argparse.ArgumentTypeError(f"{text!r} is not {' or '.join([*words, *['a number'] * bool(types)])}")

    return read


def flag(field: str) -> str:
    """The flag of a field: --learning-rate for learning_rate."""
    return f"--{field.replace('_', '-')}"


def run_command(main, arguments: list[str] | None = None) -> None:
    """Run main(arguments), a script's command, and exit with the status that it returns. What the user can mend, which
    `main` raises as ValueError or OSError, is printed as one sentence, and the status is 2. After Ctrl-C it is 130."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError) as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        sys.exit(2)
