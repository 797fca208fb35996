"""`mizzen bench`: measure this machine or this job. Every rank of a job runs `comm`, and rank 0 prints."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from mizzen.cli.parser import Parser, add_help, count, examples, is_terminal, write, write_json, write_table
from mizzen.comm.groups import destroy_process_group
from mizzen.comm.join import init_distributed
from mizzen.diagnose.bench import OPERATIONS, SIZES, bench, render
from mizzen.offload import io_bench


def configure(parser: Parser) -> None:
    """Declare the subcommands."""
    parser.description = "Measure communication between the ranks of a job, or disks for offload."
    of_comm = (
        "torchrun --nproc-per-node 8 -m mizzen.cli bench comm",
        "torchrun --nproc-per-node 8 -m mizzen.cli bench comm --operations all_reduce --sizes 1MiB 256MiB --json",
    )
    of_io = (
        "mizzen bench io /local_nvme --plot io.svg",
        "mizzen bench io /nvme0 /nvme1 --size 4GiB --block-sizes 1MiB 8MiB --depths 4 8 16 --direct yes",
    )
    parser.epilog = examples(*of_comm, *of_io)
    add_help(parser)
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    _configure_comm(commands, examples(*of_comm))
    _configure_io(commands, examples(*of_io))


def _configure_comm(commands: Any, epilog: str) -> None:
    comm = commands.add_parser(
        "comm",
        help="latency and bandwidth of the collectives",
        description="Time the collectives among all ranks. Bandwidths are those of nccl-tests.",
        epilog=epilog,
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


def _configure_io(commands: Any, epilog: str) -> None:
    io = commands.add_parser(
        "io",
        help="how fast disks take and give tensors, and the best settings of `aio`",
        description=(
            "Read and write files on one path or several, striped as offload does it, with every combination of block\n"
            "size and number of reads or writes at once (each is a thread), past the page cache and through it; then\n"
            "print the settings that are fastest for both together. A folder is made on each path, and removed."
        ),
        epilog=epilog,
    )
    sizes = ", ".join(str(block) for block in io_bench.BLOCKS)
    depths = ", ".join(map(str, io_bench.DEPTHS))
    io.add_argument("paths", nargs="+", metavar="PATH", help="folder on a disk; several are striped")
    io.add_argument("--size", type=size, default=io_bench.SIZE, metavar="BYTES", help="in each trial (default: 256MiB)")
    io.add_argument(
        "--block-sizes", nargs="+", type=size, default=io_bench.BLOCKS, metavar="BYTES", help=f"(default: {sizes})"
    )
    io.add_argument(
        "--depths", nargs="+", type=count, default=io_bench.DEPTHS, metavar="N", help=f"(default: {depths})"
    )
    io.add_argument("--direct", choices=("yes", "no", "both"), default="both", help="past the page cache or through it")
    io.add_argument("--operations", nargs="+", choices=io_bench.OPERATIONS, default=io_bench.OPERATIONS, metavar="NAME")
    io.add_argument("--trials", type=count, default=3, metavar="N", help="timed runs of each (default: 3)")
    io.add_argument("--no-dd", action="store_true", help="leave out the comparison with dd")
    io.add_argument("--check", action="store_true", help="compare what is read with what was written")
    io.add_argument("--plot", type=Path, metavar="FILE", help="write the rates as an SVG")
    io.add_argument("--json", action="store_true", help="print JSON")
    io.set_defaults(run=run_io)


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


def run_io(arguments: argparse.Namespace) -> int:
    """Measure, with a bar where somebody is looking, and print a table and the settings to use."""
    sweep = io_bench.IoSweep(
        paths=tuple(arguments.paths),
        size=arguments.size,
        blocks=tuple(arguments.block_sizes),
        depths=tuple(arguments.depths),
        direct={"yes": (True,), "no": (False,), "both": (True, False)}[arguments.direct],
        operations=tuple(dict.fromkeys(arguments.operations)),
        trials=arguments.trials,
        dd=not arguments.no_dd,
    )
    found = measure_io(sweep, check=arguments.check)
    if arguments.plot is not None:
        arguments.plot.write_text(io_bench.picture(found), encoding="utf8")
    if arguments.json:
        write_json(found.as_dict())
        return 0
    write_table(io_bench.render(found))
    for line in io_bench.summary(found):
        write(line)
    write(json.dumps({"aio": found.best().as_dict()}, indent=2))
    if arguments.plot is not None:
        write(f"plot: {arguments.plot}")
    return 0


def measure_io(sweep: io_bench.IoSweep, *, check: bool = False) -> io_bench.IoResult:
    """The timings of a sweep, with a bar that says what was measured last, where somebody is looking."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:>32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found = []
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_terminal()) as bar:
        task = bar.add_task("preparing", total=sweep.count)
        for timing in io_bench.measure(sweep, check=check):
            found.append(timing)
            bar.update(task, advance=1, description=f"{timing.operation} {timing.rate:.2f} GB/s")
    return io_bench.IoResult(sweep.paths, sweep.size, tuple(found))
