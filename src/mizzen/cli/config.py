"""`mizzen config`: check, resolve, explain and document a configuration, without a rank and without torch."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mizzen.cli.config_file import add_source, batch_words, read
from mizzen.cli.parser import Parser, add_help, examples, is_terminal, write, write_json, write_table
from mizzen.config.describe import examine, explain, json_schema, render_markdown, wrong_names
from mizzen.config.resolve import resolve, with_batch
from mizzen.config.schema import as_dict, as_lines, as_table, values
from mizzen.errors import ConfigError, LayoutError
from mizzen.log import LOGGER
from mizzen.plan.unbuilt import refusals
from mizzen.wording import counted


def configure(parser: Parser) -> None:
    """Declare the subcommands."""
    parser.description = "Check, resolve, explain and document configurations."
    parser.epilog = examples(
        "mizzen config check config.json --world 8",
        "mizzen config resolve config.json --world 8 --all",
        "mizzen config explain zero_optimization.stage",
        "mizzen config schema > config.schema.json",
    )
    add_help(parser)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    _add_check(commands)
    _add_resolve(commands)
    _add_explain(commands)
    schema = commands.add_parser("schema", help="print the JSON schema, for editors")
    schema.set_defaults(run=_print_schema)
    docs = commands.add_parser("docs", help="print the documentation of every key as Markdown")
    docs.set_defaults(run=_print_docs)


def _add_check(commands: Any) -> None:
    about = "find every problem of a file, what of it is not built yet, and every key in it that changes nothing"
    parser = commands.add_parser("check", help=about, description=f"{about[0].upper()}{about[1:]}.")
    add_source(parser, "file", help="check also that it fits N ranks")
    parser.set_defaults(run=check)


def _add_resolve(commands: Any) -> None:
    about = "print what was given and derived, each value with its origin"
    parser = commands.add_parser("resolve", help=about, description=f"{about[0].upper()}{about[1:]}.")
    add_source(parser, "file", required=True, help="number of ranks")
    parser.add_argument("--all", action="store_true", help="print the defaults too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=print_resolved)


def _add_explain(commands: Any) -> None:
    parser = commands.add_parser("explain", help="say what a key means", description="Say what a key means.")
    parser.add_argument("key", metavar="KEY", help="dotted path, such as zero_optimization.stage")
    parser.set_defaults(run=_print_explanation)


def check(arguments: argparse.Namespace) -> int:
    """Print every problem and return 2, or say that all is well and return 0."""
    with _without_warnings():
        findings = examine(Path(arguments.file), pass_over=arguments.drop_in)
    problems, summary = list(findings.problems), []
    if findings.config is not None:
        problems += map(str, [*wrong_names(findings.config), *refusals(findings.config)])
    if findings.config is not None and arguments.world:
        try:
            found = resolve(with_batch(findings.config, arguments.batch), arguments.world)
            summary = [f"layout  {found.layout}", f"batch   {batch_words(found)}"]
        except (ConfigError, LayoutError) as error:
            problems.append(str(error))
    given = [] if findings.config is None else list(values(findings.config, defaults=False))
    verdict = counted(len(problems), "problem") if problems else f"ok, {len(given)} values given"
    write("\n  ".join((f"{arguments.file}: {verdict}", *problems, *summary, *findings.notes)))
    return 2 if problems else 0


@contextmanager
def _without_warnings() -> Iterator[None]:
    """What `load` would warn of is among the notes."""
    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR)
    try:
        yield
    finally:
        LOGGER.setLevel(level)


def print_resolved(arguments: argparse.Namespace) -> int:
    """Print the values as a table for a person, as lines for a pipe, or as JSON."""
    found = resolve(read(arguments.file, arguments), arguments.world)
    chosen = list(values(found.config, defaults=arguments.all))
    if arguments.json:
        write_json(as_dict(chosen))
    elif is_terminal():
        write_table(as_table(chosen))
    else:
        write("\n".join(as_lines(chosen)))
    return 0


def _print_schema(_: argparse.Namespace) -> int:
    write_json(json_schema())
    return 0


def _print_docs(_: argparse.Namespace) -> int:
    write(render_markdown())
    return 0


def _print_explanation(arguments: argparse.Namespace) -> int:
    write(str(explain(arguments.key)))
    return 0
