"""`ds_io`, `ds_nvme_tune` and `deepspeed.nvme`: what `mizzen bench io` measures, in the words of these commands."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mizzen.cli.bench import measure_io, size
from mizzen.cli.main import main
from mizzen.errors import UsageError
from mizzen.offload.io_bench import IoResult, IoSweep
from mizzen.offload.transfers import MOST_THREADS

LOG_DIR: Final = "_aio_bench_logs"
RESULT: Final = "aio.json"
"""The file in the folder of logs that `sweep_main` writes and `generate_main` reads."""


def parse_sweep_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The words of `ds_nvme_tune`."""
    parser = argparse.ArgumentParser(prog="ds_nvme_tune")
    parser.add_argument("--nvme_dir", nargs="+", required=True, help="folders on NVMe drives; several are striped")
    parser.add_argument(
        "--sweep_config", help='JSON with lists, such as {"block_size": ["1M"], "queue_depth": [8, 16]}'
    )
    parser.add_argument("--io_size", type=size, default=size("400M"), help="bytes of each trial (default: 400M)")
    parser.add_argument("--log_dir", default=LOG_DIR, help=f"where the timings are written (default: {LOG_DIR})")
    parser.add_argument("--loops", type=int, default=1, help="trials of each (default: 1)")
    for flag in ("--no_read", "--no_write"):
        parser.add_argument(flag, action="store_true", help="leave it out")
    for flag in ("--gpu", "--gds", "--flush_page_cache", "--verbose"):
        parser.add_argument(flag, action="store_true", help="has no effect")
    return parser.parse_args(args)


def sweep_main(args: argparse.Namespace) -> None:
    """Measure every setting, and write the timings into the folder of logs."""
    if args.no_read and args.no_write:
        raise UsageError("--no_read and --no_write together leave nothing to measure")
    chosen = _chosen(args.sweep_config)
    parallel = chosen.get("intra_op_parallelism", [1])
    depths = {min(depth * each, MOST_THREADS) for depth in chosen.get("queue_depth", [4, 8, 16]) for each in parallel}
    sweep = IoSweep(
        paths=tuple(args.nvme_dir),
        size=args.io_size,
        blocks=tuple(size(str(block)) for block in chosen.get("block_size", ["1M", "8M"])),
        depths=tuple(sorted(depths)),
        direct=(True,),
        operations=tuple(name for name in ("read", "write") if not getattr(args, f"no_{name}")),
        trials=args.loops,
        dd=False,
    )
    sys.stdout.write(f"Running DeepNVMe performance tuning on {list(sweep.paths)}\n")
    found = measure_io(sweep)
    folder = Path(args.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).write_text(json.dumps(_as_dict(found), indent=2) + "\n", encoding="utf8")


def generate_main(log_dir: str = LOG_DIR) -> None:
    """Print the best rates of a sweep and the section `aio` to use, from its folder of logs."""
    path = Path(log_dir) / RESULT
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} has no timings: {error}; sweep_main writes them") from error
    rates = ", ".join(f"{name} = {rate:5.2f}" for name, rate in found["fastest"].items())
    sys.stdout.write(f"Best performance (GB/sec): {rates}\n{json.dumps({'aio': found['aio']}, indent=3)}\n")


def _as_dict(found: IoResult) -> dict[str, Any]:
    fastest = {name: each.rate for name in ("read", "write") if (each := found.fastest("mizzen", name)) is not None}
    settings = {"single_submit": False, "overlap_events": True, **found.best().as_dict()}
    return {**found.as_dict(), "fastest": fastest, "aio": settings}


def _chosen(path: str | None) -> dict[str, list[Any]]:
    """The lists of a file, each of which may be one value."""
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text(encoding="utf8"))
        return {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"--sweep_config {path} is no JSON object of lists: {error}") from error


def io_words(args: Sequence[str]) -> list[str]:
    """The words of `ds_io` as words of `mizzen bench io`."""
    parser = argparse.ArgumentParser(prog="ds_io")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--folder", help="folder on an NVMe drive")
    where.add_argument(
        "--folder_to_device_mapping", nargs="+", metavar="FOLDER:DEVICE", help="several folders, striped"
    )
    parser.add_argument("--io_size", type=size, required=True, help="bytes of each trial")
    parser.add_argument("--read", action="store_true", help="read; without it, write")
    parser.add_argument("--validate", action="store_true", help="compare what is read with what was written")
    parser.add_argument("--block_size", type=size, default=size("1M"), help="(default: 1M)")
    for option, default in (("queue_depth", 32), ("io_parallel", 1), ("multi_process", 1), ("loops", 3)):
        parser.add_argument(f"--{option}", type=int, default=default, help=f"(default: {default})")
    for option, value in (("fast_io_size", "64M"), ("engine", "aio_handle"), ("warmup_loops", "1")):
        parser.add_argument(f"--{option}", default=value, help="has no effect")
    for option in (
        *("single_submit", "sequential_requests", "gpu", "use_gds", "slow_bounce_buffer", "torch_legacy_save"),
        *("use_accelerator_pin_memory", "include_warmup_time", "different_file_each_iteration"),
    ):
        parser.add_argument(f"--{option}", action="store_true", help="has no effect")
    given = parser.parse_args(args)
    folders = [given.folder] if given.folder else [each.rpartition(":")[0] for each in given.folder_to_device_mapping]
    depth = min(given.queue_depth * given.io_parallel * given.multi_process, MOST_THREADS)
    numbers = {"size": given.io_size, "block-sizes": given.block_size, "depths": depth, "trials": given.loops}
    words = ["bench", "io", *folders, *(word for name, value in numbers.items() for word in (f"--{name}", str(value)))]
    words += ["--operations", *(("read", "write") if given.validate else ("read",) if given.read else ("write",))]
    return [*words, "--direct", "yes", "--no-dd", *(["--check"] if given.validate else [])]


def ds_io_main(args: Sequence[str] | None = None) -> int:
    """`mizzen bench io` with one setting."""
    return main(io_words(list(sys.argv[1:] if args is None else args)))
