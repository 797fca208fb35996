"""`mizzen elastic`: the batch size that fits most numbers of GPUs, and those numbers."""

import argparse
from pathlib import Path

from mizzen.cli.parser import Parser, examples, whole, write, write_json
from mizzen.config.elasticity import compute_elastic
from mizzen.config.load import load
from mizzen.errors import ConfigError


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    parser.description = "Compute the elastic batch of the section `elasticity`."
    parser.epilog = examples("mizzen elastic -c config.json", "mizzen elastic -c config.json -w 64")
    parser.add_argument("-c", "--config", required=True, metavar="CONFIG", help="JSON or HJSON file")
    parser.add_argument(
        "-w", "--world", "--world-size", type=whole, default=0, metavar="N", help="number of GPUs (0: any)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print batch, GPUs and, for a known world, micro-batch and accumulation."""
    section = load(Path(arguments.config)).elasticity
    if not section.enabled:
        raise ConfigError("elasticity.enabled", "elasticity is off in this file: set it to true")
    found = compute_elastic(section, arguments.world)
    rows = {"batch": found.batch, "valid_gpus": list(found.valid_gpus)}
    if found.micro is not None:
        ranks = arguments.world // section.model_parallel_size
        rows |= {"micro_batch": found.micro, "accumulation": found.batch // (found.micro * ranks)}
    if arguments.json:
        write_json(rows)
    else:
        write("\n".join(f"{name:12}  {str(value).strip('[]')}" for name, value in rows.items()))
    return 0
