"""`mizzen compat`: install the drop-in where Python finds it, or remove it. What that takes is in `drop_in.py`."""

import argparse
from collections.abc import Callable

from mizzen.cli.drop_in import Place, find, install, remove
from mizzen.cli.parser import Parser, add_help, examples, write


def configure(parser: Parser) -> None:
    """Declare the subcommands."""
    parser.description = (
        "The drop-in is a small package called deepspeed, which programs that look for that name find: they then run\n"
        "on mizzen. `mizzen run --drop-in` does the same for one job and installs nothing."
    )
    parser.epilog = examples("mizzen compat install", "mizzen compat status", "mizzen compat remove")
    add_help(parser)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], int]) -> Parser:
        one: Parser = commands.add_parser(name, help=summary, description=summary)
        one.set_defaults(run=run)
        return one

    add("install", "install it into this environment", run_install).add_argument(
        "--force", action="store_true", help="remove a DeepSpeed that is installed there"
    )
    add("remove", "remove it from this environment", run_remove)
    add("status", "say which package of that name this environment has", run_status)


def run_install(arguments: argparse.Namespace) -> int:
    """Install it and say where."""
    place = Place.here()
    scripts = install(place, force=arguments.force)
    write(f"installed {find(place)} in {place.packages}")
    write(f"with {', '.join(sorted(scripts))} in {place.scripts}")
    return 0


def run_remove(_: argparse.Namespace) -> int:
    """Remove it."""
    place = Place.here()
    count = remove(place)
    write(f"removed {count} files of the drop-in from {place.packages}")
    return 0


def run_status(_: argparse.Namespace) -> int:
    """Say what is there."""
    place = Place.here()
    write(f"{find(place) or 'no package deepspeed'} in {place.packages}")
    return 0
