"""What every command shares: a parser that fails with one clean line, types of arguments, and printing."""

import argparse
import json
import sys
from collections.abc import Callable, Container, Sequence
from typing import Any, NoReturn

from mizzen.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Keeps the layout of its help text, and raises instead of printing usage and leaving."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    split: Callable[[Sequence[str]], tuple[Sequence[str], Sequence[str]]] | None = None
    """Cuts off the words that are not this command's own, for commands that pass them on; they arrive as `rest`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command's own words."""
        if self.split is None:
            return super().parse_args(args, namespace)
        own, rest = self.split(args)
        found = super().parse_args(own, namespace)
        found.rest = tuple(rest)
        return found

    def error(self, message: str) -> NoReturn:
        """One line that says what is wrong and where the help is."""
        raise UsageError(f"{message} (see {self.prog} --help)")


def add_help(parser: Parser) -> None:
    """Let a command that has subcommands print its help when none is given."""

    def print_help(_: argparse.Namespace) -> int:
        write(parser.format_help())
        return 0

    parser.set_defaults(run=print_help)


def split_off(words: Sequence[str], valued: Container[str]) -> tuple[Sequence[str], Sequence[str]]:
    """A command's own options, and everything after them. A value joins its option: it may look like one itself."""
    own, place = [], 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        after = place + (2 if words[place] in valued else 1)
        own.append("=".join(words[place:after]))
        place = after
    rest = words[place:]
    return own, rest[1:] if rest[:1] == ["--"] else rest


def examples(*lines: str) -> str:
    """The end of a help text."""
    return "\n  ".join(("examples:", *lines))


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """A whole number from 0 on."""
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")


def write(text: str) -> None:
    """Print a text; what the terminal cannot show, such as half of a surrogate pair in a key, is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    legible = text.encode(encoding, "backslashreplace").decode(encoding)
    sys.stdout.write(legible if legible.endswith("\n") else f"{legible}\n")


def write_json(value: Any) -> None:
    """Print a value for programs."""
    write(json.dumps(value, indent=2, ensure_ascii=False))


def write_table(renderable: Any) -> None:
    """Print something of rich; plain where no person is looking."""
    from rich.console import Console  # 60 ms that plain output does not pay

    Console().print(renderable)


def is_terminal() -> bool:
    """Whether a person is looking, so that colour and tables pay."""
    return sys.stdout.isatty()
