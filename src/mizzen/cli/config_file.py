"""The configuration that a command is about: how it is named, read as the drop-in reads it, and completed."""

import argparse
from pathlib import Path
from typing import Any

from mizzen.cli.parser import count
from mizzen.config.load import load, read_source
from mizzen.config.migrate import drop_ignored
from mizzen.config.resolve import OPEN_BATCH, Resolved, is_batch_open, with_batch
from mizzen.config.schema import Config


def add_source(parser: argparse.ArgumentParser, name: str, **world: Any) -> None:
    """Declare the file, the number of ranks, and what a client would add."""
    parser.add_argument(name, metavar=name.upper(), help="JSON or HJSON file")
    parser.add_argument("--world", type=count, metavar="N", **world)
    parser.add_argument(
        "--batch",
        type=count,
        metavar="N",
        help="samples per forward pass of a rank, where the file leaves them to a client",
    )
    parser.add_argument(
        "--drop-in",
        action="store_true",
        help="read the file as the drop-in does: pass over keys that DeepSpeed does not read",
    )


def read(path: str, arguments: argparse.Namespace) -> Config:
    """The configuration of a file, completed as the arguments say."""
    raw = read_source(Path(path))
    if arguments.drop_in:
        drop_ignored(raw, Config)
    return with_batch(load(raw), arguments.batch)


def batch_words(found: Resolved) -> str:
    """The batch, or who knows it."""
    return OPEN_BATCH if is_batch_open(found.config) else str(found.batch)
