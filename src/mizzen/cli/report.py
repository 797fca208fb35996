"""`mizzen report`: what this machine has for training, what it lacks, and how to get it."""

import argparse

from mizzen.cli.parser import Parser, examples, write_json, write_table
from mizzen.diagnose.report import collect, render


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Print versions, devices, memory and network of this machine, and what to do about what is missing."
    )
    parser.epilog = examples("mizzen report", "mizzen report --json > report.json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Problems of a machine are findings, not failures of the command."""
    report = collect()
    if arguments.json:
        write_json(report.as_dict())
    else:
        write_table(render(report))
    return 0
