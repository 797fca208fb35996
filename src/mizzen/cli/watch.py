"""`mizzen watch`: a run as a page on this machine, as one file, or in the terminal."""

import argparse
import sys
from pathlib import Path

from mizzen.cli.parser import Parser, examples, whole, write
from mizzen.errors import UsageError
from mizzen.files import commit_text
from mizzen.watch.run import Watcher, find_runs


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    parser.description = (
        "Show runs while they go on, or afterwards: loss, learning rate, speed, memory, ranks, checkpoints, the plan.\n"
        "A run is the file that jsonl_monitor writes, with or without its ending, or a folder with several.\n"
        "The page is served to this machine alone, at an address that holds its key; it needs mizzen[watch]."
    )
    parser.epilog = examples(
        "mizzen watch logs/run.jsonl",
        "mizzen watch logs/first logs/second",
        "mizzen watch logs --export runs.html",
        "mizzen watch logs/run --tui",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="file of events, or folder of several")
    parser.add_argument(
        "--port", type=whole, default=0, metavar="N", help="port of the page; default: one that is free"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--export", metavar="FILE.html", help="write the page with its data into one file, and leave")
    form.add_argument("--tui", action="store_true", help="show the essentials in the terminal")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the runs until the user has seen enough."""
    if arguments.port > 65535:
        raise UsageError(f"--port {arguments.port}: ports go up to 65535")
    watcher = Watcher(find_runs(arguments.runs))
    if arguments.tui:
        from mizzen.watch.terminal import show  # rich: 60 ms that the page does not pay

        show(watcher)
    elif arguments.export is not None:
        _export(watcher, Path(arguments.export))
    else:
        _serve(watcher, arguments.port)
    return 0


def _export(watcher: Watcher, path: Path) -> None:
    from mizzen.watch.server import exported_page

    watcher.read_all()
    commit_text(path, exported_page(watcher.since(0)))
    write(f"wrote {path}")


def _serve(watcher: Watcher, port: int) -> None:
    from mizzen.watch.server import Server

    with Server(watcher, port) as server:
        watcher.start()
        write(f"{server.address}\nOpen it in a browser of this machine; Ctrl-C ends.")
        sys.stdout.flush()
        server.serve_forever()
