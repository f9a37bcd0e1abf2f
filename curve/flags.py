"""Command-line flags from a dataclass: a field is a flag, and `option` gives it its help."""

import argparse
import contextlib
import dataclasses
import difflib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args, get_origin

HELP = {"-h", "--help"}
# As the help and the errors show them.
TYPE_NAMES = {str: "TEXT", int: "WHOLE_NUMBER", float: "NUMBER", Path: "PATH"}


def option(default=dataclasses.MISSING, help: str = "", **others):
    """A field of a dataclass whose fields are flags. help: what --help says of it. others: `names`,
    a function that returns the table of its values; and `least`, its least value."""
    return dataclasses.field(default=default, metadata={"help": help, **others})


def read_flags(
    kind: type,
    arguments: list[str],
    starting_values: Callable | None = None,
    description: str | None = None,
    others: bool = False,
):
    """An instance of the dataclass `kind` with the values that the flags give. If a field is a
    dataclass itself, its fields are flags too. A field without a default takes the arguments that
    are no flags, wherever they stand.

    starting_values: a function that returns values of other fields, by name, for the instance with
    the values of the flags and the defaults of the fields. With `others`, returns a pair: the
    instance, and the arguments that `kind` has no flag for. ValueError, in one sentence with the
    valid values or the nearest flag, if there is no such flag or value. `--help` prints the help,
    with the defaults that follow from the other flags, and exits.
    """
    parser = _parser(kind, description)
    texts = [text for text in arguments if text not in HELP]
    namespace, unknown = parser.parse_known_intermixed_args(texts)
    if unknown and not others:
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, parser._option_string_actions, 1)
        hint = f"did you mean {near[0]}?" if near else "--help lists all"
        _raise(f"there is no flag for {unknown[0]}; {hint}")
    given = vars(namespace)
    values = starting_values(fill(kind, given)) if starting_values else {}
    if len(texts) < len(arguments):
        _parser(kind, description, values).print_help()
        sys.exit(0)
    options = fill(kind, values | given)
    return (options, unknown) if others else options


def fill(kind: type, values: dict):
    """An instance with these values, by the names of the fields; the other fields have their
    defaults."""
    filled = {}
    for field in dataclasses.fields(kind):
        value = values.get(field.name, field.default)
        if dataclasses.is_dataclass(field.type):
            value = fill(field.type, values)
        if value is dataclasses.MISSING:
            raise ValueError(f"{field.name.upper()} is missing; --help lists all")
        filled[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**filled)


def flag(field: str) -> str:
    """The flag of a field: --learning-rate for learning_rate."""
    return f"--{field.replace('_', '-')}"


# --- How it is done -------------------------------------------------------------------------------


def _parser(
    kind: type, description: str | None, values: dict | None = None
) -> argparse.ArgumentParser:
    """values: the defaults that the help shows; of the other fields it shows those of the field."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [FLAG ...]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,  # so the namespace holds only the flags that were given
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = _raise
    _add_fields(parser, kind, values or {})
    return parser


def _raise(message: str):
    raise ValueError(message.removeprefix("argument "))


def _add_fields(parser: argparse.ArgumentParser, kind: type, values: dict) -> None:
    """Add the fields of a dataclass, under its name."""
    group = parser.add_argument_group(kind.__name__)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            _add_fields(parser, field.type, values)
            continue
        metadata, value = field.metadata, values.get(field.name, field.default)
        members = [*metadata["names"]()] if "names" in metadata else _members(field.type)
        several = get_origin(field.type) is tuple
        help = metadata.get("help", "").replace("%", "%%")
        if value is dataclasses.MISSING:  # the field takes the arguments that are no flags
            parser.add_argument(
                field.name,
                metavar=field.name.upper().rstrip("S"),
                help=help,
                type=members[0],
                nargs="*" if several else "?",
                default=value,
            )
            continue

        if value not in (None, ()):
            words = " ".join(map(str, value)) if isinstance(value, tuple) else value
            help += f" (default: {words})"
        if field.type is bool:
            group.add_argument(flag(field.name), action=argparse.BooleanOptionalAction, help=help)
            continue

        # How many values the flag takes, and what each can be.
        number = None
        if several:
            number = "+" if ... in members else len(get_args(field.type))
        elif bool in members:  # --fp32-logits, --no-fp32-logits or --fp32-logits split
            number = "?"
        words = [member for member in members if isinstance(member, str)]
        if type(None) in members:
            words.append("None")
        types = [member for member in members if member in TYPE_NAMES]
        valid = "|".join([*words, *map(TYPE_NAMES.get, types)])
        group.add_argument(
            flag(field.name),
            metavar=valid,
            help=help,
            type=partial(_read, words=words, types=types, valid=valid),
            nargs=number,
            const=number == "?" or None,
        )
        if bool in members:
            off = flag(f"no_{field.name}")
            group.add_argument(off, dest=field.name, action="store_false", help="off")


def _members(kind) -> list:
    """The words of a Literal and the types that a field can hold, each once. `...` stands for any
    number of them."""
    parts = get_args(kind)
    members = [member for part in parts for member in _members(part)] if parts else [kind]
    return [*dict.fromkeys(members)]


def _read(text: str, words: list[str], types: list[type], valid: str):
    """The value of a text that is one of these words, or else of one of these types. valid: what an
    error says of them."""
    if text in words:
        return None if text == "None" else text
    for convert in types:
        with contextlib.suppress(ValueError):
            return convert(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not {valid}")


# --- Commands -------------------------------------------------------------------------------------


@contextlib.contextmanager
def errors_as_sentences() -> Iterator[None]:
    """ValueError, OSError and MemoryError are printed as one sentence; the exit status is then 2.
    It is 141, without a word, if what reads the output has ended."""
    try:
        yield
    except BrokenPipeError:  # as in `python fit_curve.py LOG | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # gets what is left to flush
        sys.exit(141)  # as after SIGPIPE
    except (ValueError, OSError, MemoryError) as error:
        print("error:", *(str(error) or "out of memory").splitlines(), file=sys.stderr)
        sys.exit(2)


def run_command(main, arguments: list[str] | None = None) -> None:
    """Run main(arguments), a script's command, and exit with the status that it returns. The status
    is 2 if it raises what `errors_as_sentences` prints, and 130 after Ctrl-C."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with errors_as_sentences():
            status = main(sys.argv[1:] if arguments is None else arguments)
            sys.stdout.flush()
            sys.exit(status)
    except KeyboardInterrupt:
        print("\nstopped by Ctrl-C", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
