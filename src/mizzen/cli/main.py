"""The entry point: finds the command, imports only its module, and turns our errors into one line and an exit code."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final

from mizzen.cli.parser import Parser, examples, write
from mizzen.errors import ConfigError, LayoutError, MizzenError, PlanError, UsageError
from mizzen.launcher.output import open_standard_streams
from mizzen.launcher.signals import exit_on_signals


@dataclass(frozen=True, slots=True)
class Subcommand:
    """A command and the module that has its `configure(parser)`, imported when the command is used."""

    name: str
    summary: str
    module: str


GROUPS: Final = (
    (
        "before a GPU is rented",
        (
            Subcommand("config", "check, resolve and explain a configuration", "mizzen.cli.config"),
            Subcommand("plan", "show what would be done to a model, and what it costs", "mizzen.cli.plan"),
            Subcommand("elastic", "the batch that fits most numbers of GPUs", "mizzen.cli.elastic"),
        ),
    ),
    (
        "a job",
        (
            Subcommand("run", "start it on this machine or on many, and see it through", "mizzen.cli.run"),
            Subcommand(
                "watch", "see it while it runs, or afterwards: as a page, or in the terminal", "mizzen.cli.watch"
            ),
            Subcommand("ssh", "run a command on all hosts of a hostfile", "mizzen.cli.ssh"),
        ),
    ),
    (
        "on a machine",
        (
            Subcommand("report", "versions, devices and what works here", "mizzen.cli.report"),
            Subcommand("bench", "measure communication, or disks", "mizzen.cli.bench"),
            Subcommand("compat", "let `import deepspeed` find mizzen here, or no longer", "mizzen.cli.compat"),
        ),
    ),
    (
        "after training",
        (Subcommand("checkpoint", "list, check, compare, export and clean up checkpoints", "mizzen.cli.checkpoint"),),
    ),
)
WRONG_INPUT: Final = (ConfigError, LayoutError, PlanError, UsageError)
"""Errors that the user's own words caused; they exit with 2, as wrong options do, all others with 1."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone (`mizzen config docs | head`); what is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MizzenError, OSError) as error:
        if "--debug" in words:
            raise
        sys.stderr.write(f"mizzen: error: {error}\n")
        return 2 if isinstance(error, WRONG_INPUT) else 1
    except KeyboardInterrupt:
        return 130


def _run(words: list[str]) -> int:
    split = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    top = _top_parser()
    options = top.parse_args(words[:split])
    if options.version:
        write(f"mizzen {_version()}")
        return 0
    if split == len(words):
        write(top.format_help())
        return 0
    command = _find(words[split])
    with exit_on_signals() if command.name == "run" else nullcontext():
        parser = Parser(prog=f"mizzen {command.name}", description=command.summary)
        importlib.import_module(command.module).configure(parser)
        arguments = parser.parse_args(words[split + 1 :])
        return int(arguments.run(arguments))


def _top_parser() -> Parser:
    width = max(len(command.name) for _, commands in GROUPS for command in commands)
    lines = ["Trains PyTorch models too large or too slow for one device."]
    for title, commands in GROUPS:
        lines += ["", f"{title}:", *(f"  {command.name:{width}}  {command.summary}" for command in commands)]
    parser = Parser(
        prog="mizzen",
        usage="mizzen [--version] [--debug] COMMAND ...",
        description="\n".join(lines),
        epilog=examples(
            "mizzen config check config.json --world 8",
            "mizzen config explain zero_optimization.stage",
            "mizzen plan config.json --world 512",
            "mizzen COMMAND --help",
        ),
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    return parser


def _find(name: str) -> Subcommand:
    known = {command.name: command for _, commands in GROUPS for command in commands}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    way_out = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
    raise UsageError(f"unknown command '{name}'; {way_out}")


def _version() -> str:
    from importlib import metadata  # 30 ms that other commands do not pay

    try:
        return metadata.version("mizzen")
    except metadata.PackageNotFoundError:
        return "(not installed)"
