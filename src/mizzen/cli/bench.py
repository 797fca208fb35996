"""`mizzen bench`: measure this machine or this job. Every rank of a job runs the command; rank 0 prints."""

import argparse
import re
import sys

from mizzen.cli.parser import Parser, add_help, count, examples, write_json, write_table
from mizzen.comm.groups import destroy_process_group
from mizzen.comm.join import init_distributed
from mizzen.diagnose.bench import OPERATIONS, SIZES, bench, render


def configure(parser: Parser) -> None:
    """Declare the subcommands."""
    parser.description = "Measure communication between the ranks of a job."
    parser.epilog = examples(
        "torchrun --nproc-per-node 8 -m mizzen.cli bench comm",
        "torchrun --nproc-per-node 8 -m mizzen.cli bench comm --operations all_reduce --sizes 1MiB 256MiB --json",
    )
    add_help(parser)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    comm = commands.add_parser(
        "comm",
        help="latency and bandwidth of the collectives",
        description="Time the collectives among all ranks. Bandwidths are those of nccl-tests.",
        epilog=parser.epilog,
    )
    comm.add_argument(
        "--operations",
        nargs="+",
        choices=tuple(OPERATIONS),
        default=tuple(OPERATIONS),
        metavar="NAME",
        help=", ".join(OPERATIONS),
    )
    comm.add_argument(
        "--sizes", nargs="+", type=size, default=SIZES, metavar="BYTES", help="message sizes, such as 64KiB 1MiB"
    )
    comm.add_argument("--trials", type=count, default=20, metavar="N", help="timed runs of each (default: 20)")
    comm.add_argument("--json", action="store_true", help="print JSON")
    comm.set_defaults(run=run_comm)


def size(text: str) -> int:
    """Bytes from `65536`, `64KiB` or `64K`: units are powers of 1024."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text, re.IGNORECASE | re.ASCII)
    if match is None or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 65536, 64KiB, 1MiB or 1GiB")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def run_comm(arguments: argparse.Namespace) -> int:
    """Join the other ranks, measure, print on rank 0."""
    world = init_distributed(verbose=False)
    try:
        found = bench(arguments.operations, arguments.sizes, trials=arguments.trials)
    finally:
        destroy_process_group()
    if world.rank == 0:
        if world.size == 1:
            way_out = "start N of them with torchrun --nproc-per-node N -m mizzen.cli bench comm"
            sys.stderr.write(f"mizzen: one rank talks to itself here; {way_out}\n")
        if arguments.json:
            write_json(found.as_dict())
        else:
            write_table(render(found))
    return 0
