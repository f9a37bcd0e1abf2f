"""Command-line flags out of a dataclass: a field is a flag, and the comment beside it is the help."""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin


def read_flags(kind: type, arguments: list[str], default=None, description: str | None = None, others: bool = False):
    """An instance of the dataclass `kind` with what the flags say; what they leave out is as in `default`. A field that
    is a dataclass itself has the flags of its fields; one without a default takes what is no flag, wherever it stands.

    With `others`, a pair of that and the arguments that `kind` has no flag for. ValueError, in one sentence with the
    valid values or the nearest flag, for a flag or a value that there is not. `--help` prints the help and exits.
    """
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=description or inspect.getdoc(kind), allow_abbrev=False, formatter_class=shape
    )
    parser.error = _raise
    _add_fields(parser, kind, default)
    parser.usage = f"{parser.prog} [FLAG ...]"
    found, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown and not others:
        near = difflib.get_close_matches(unknown[0].split("=")[0], parser._option_string_actions, 1)
        what = f"there is no flag {unknown[0]}" if unknown[0].startswith("-") else f"{unknown[0]!r} belongs to no flag"
        _raise(what + (f"; did you mean {near[0]}?" if near else "; --help lists all"))
    options = _made(kind, vars(found))
    return (options, unknown) if others else options


def _add_fields(parser: argparse.ArgumentParser, kind: type, default) -> None:
    group, comments = parser.add_argument_group(kind.__name__), _comments(kind)
    for field in dataclasses.fields(kind):
        value = field.default if default is None else getattr(default, field.name, field.default)
        if dataclasses.is_dataclass(field.type):
            _add_fields(parser, field.type, value)
            continue
        words, types, number = _words_types_number(field.type)
        if field.default not in (None, dataclasses.MISSING) and type(None) in get_args(field.type):
            words.append("None")
        help = comments[field.name].replace("%", "%%")
        if field.default is dataclasses.MISSING:
            metavar = field.name.upper().rstrip("S")
            parser.add_argument(field.name, nargs="*" if number else None, type=types[0], metavar=metavar, help=help)
            continue
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        help += f" (default: {shown})" if value not in (None, ()) else ""
        how = {"dest": field.name, "default": value, "help": help}
        if field.type is bool:
            group.add_argument(flag(field.name), flag(f"no_{field.name}"), action=_OnOff, nargs=0, **how)
        else:
            names = {str: "TEXT", int: "N", float: "X", Path: "PATH"}
            how["metavar"] = "|".join([*words, *(names[one] for one in types)])
            how |= {"const": True} if number == "?" else {}
            group.add_argument(flag(field.name), type=_reader(words, types), nargs=number, **how)


class _OnOff(argparse.Action):
    """--name sets True, --no-name False."""

    def __call__(self, parser, namespace, values, name=None) -> None:
        setattr(namespace, self.dest, name == self.option_strings[0])


def _made(kind: type, found: dict):
    """The instance that holds what was found, by field."""
    values = {}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            values[field.name] = _made(field.type, found)
        else:
            value = found[field.name]
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _comments(kind: type) -> dict[str, str]:
    """The comment of each field: beside it, or in the lines above."""
    comments, above = {}, ""
    for line in "".join(inspect.getsource(one) for one in kind.__mro__[:-1]).splitlines():
        if field := re.match(r" {4}(\w+): [^#]*(?:# (.*))?$", line):
            comments.setdefault(field[1], field[2] or above.strip())
        comment = re.match(r" {4}# (.*)", line)
        above = f"{above} {comment[1]}" if comment else ""
    return comments


def _raise(message: str):
    raise ValueError(message.removeprefix("argument "))


def _words_types_number(kind) -> tuple[list[str], list[type], str | int | None]:
    """What a field can hold, None aside: words of a Literal, types, and how many (argparse's nargs). One that can hold
    a bool beside another type is True where the flag stands without a value."""
    number = "?" if bool in get_args(kind) else None
    if get_origin(kind) is tuple:
        number = "+" if ... in get_args(kind) else len(get_args(kind))
    kinds = [kind] if get_origin(kind) in (None, Literal) else get_args(kind)
    words = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
    types = [one for one in kinds if get_origin(one) is None and one not in (type(None), bool, ...)]
    return words, list(dict.fromkeys(types)), number


def _reader(words: list[str], types: list[type]):
    """The function that reads a text as one of these words, or else as one of these types."""

    def read(text: str):
        if text in words:
            return None if text == "None" else text
        for one in types:
            with contextlib.suppress(ValueError):
                return one(text)
        kinds = [*words, *({int: "a whole number", float: "a number"}[one] for one in types)]
        what = f"one of {', '.join(kinds)}" if kinds[1:] else kinds[0]
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return read


def flag(field: str) -> str:
    """The flag of a field: --learning-rate for learning_rate."""
    return f"--{field.replace('_', '-')}"


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """What the user can mend, a ValueError or OSError, is printed as one sentence, and the exit status is 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        sys.exit(2)


def run_command(main, arguments: list[str] | None = None) -> None:
    """Run main(arguments), a script's command, and exit with the status that it returns; 2 where `main` raises
    ValueError or OSError, which is printed `in_words`; 130 after Ctrl-C."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with in_words():
            sys.exit(main(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
