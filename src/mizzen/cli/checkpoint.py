"""`mizzen checkpoint`: what is in a folder of checkpoints, whether it is whole, and ways out of it and into it."""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from mizzen.checkpoint.choose import candidates, latest_problem
from mizzen.checkpoint.convert import convert, export_safetensors, export_torch
from mizzen.checkpoint.folder import LATEST, Committed, committed, delete, read_latest, surplus, sweep_all
from mizzen.checkpoint.layer_files import export_layers
from mizzen.checkpoint.open import open_source, weights_of
from mizzen.checkpoint.read import MANIFEST, Reader, compare, verify
from mizzen.cli.parser import Parser, add_help, count, examples, is_terminal, write, write_json, write_table
from mizzen.errors import CheckpointError, UsageError
from mizzen.wording import byte_size

SHOWN: Final = 40
WRONG_LATEST: Final = 3
"""Exit code of `verify` where every checkpoint that was read is whole, and `latest` names none of them."""
OnBytes = Callable[[int], None]


def configure(parser: Parser) -> None:
    """Declare the subcommands."""
    add_help(parser)
    parser.epilog = examples(
        "mizzen checkpoint ls checkpoints",
        "mizzen checkpoint verify checkpoints",
        "mizzen checkpoint export checkpoints --to model-folder --dtype bf16",
        "mizzen checkpoint prune checkpoints --keep-last 3",
    )
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)

    def add(name: str, summary: str, run: Callable[[argparse.Namespace], int], *, tag: bool = True) -> Any:
        one = commands.add_parser(name, help=summary, description=summary)
        one.add_argument("folder", type=Path, help=f"folder of checkpoints{', or of one' if tag else ''}")
        if tag:
            one.add_argument("--tag", help="which of them; the latest when absent")
        one.set_defaults(run=run)
        return one

    add("ls", "list the committed checkpoints of a folder", run_ls, tag=False).add_argument(
        "--json", action="store_true"
    )
    add("show", "what one checkpoint holds", run_show).add_argument("--json", action="store_true")
    check = add("verify", "read every byte and compare its hash", run_verify)
    check.add_argument("--all", action="store_true", help="every checkpoint of the folder")
    differ = add("diff", "in what two checkpoints differ", run_diff)
    differ.add_argument("other", type=Path, help="the other one")
    differ.add_argument("--other-tag", metavar="TAG")
    _add_export(add("export", "write the weights for other programs, one tensor at a time", run_export))
    into = add("import", "make a checkpoint of ours out of another format", run_import)
    into.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder of checkpoints to write to")
    into.add_argument("--as", dest="name", metavar="TAG", default="imported", help="its tag there")
    prune = add("prune", "delete old checkpoints, and what dead saves have left", run_prune, tag=False)
    prune.add_argument("--keep-last", type=count, metavar="N", help="newest checkpoints to keep; all when absent")
    prune.add_argument("--keep-every", type=count, metavar="STEPS", help="keep those at a multiple of so many steps")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")


def _add_export(parser: Any) -> None:
    parser.add_argument(
        "--to", type=Path, required=True, metavar="PATH", help="a folder, or a file that ends in .bin or .pt"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16", "saved"), default="bf16")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="bytes of one safetensors file")
    parser.add_argument(
        "--layers",
        action="store_true",
        help="a file for each layer of a pipeline, in the folders of DeepSpeed, and the states of its optimizer",
    )
    parser.add_argument("--no-states", action="store_true", help="with --layers: leave the optimizer's states out")


def run_ls(arguments: argparse.Namespace) -> int:
    """Print one line for each."""
    found, named = committed(arguments.folder), read_latest(arguments.folder)
    if arguments.json:
        write_json([_summary(each) | {"latest": each.folder.name == named} for each in found])
        return 0
    if not found:
        raise CheckpointError(f"{arguments.folder}: no checkpoint is committed there")
    rows = [[f"{each.folder.name}{' *' if each.folder.name == named else ''}", *_row(each)] for each in found]
    _print_rows(("tag", "step", "saved", "size", "ranks", "tensors"), rows)
    return 0


def _row(each: Committed) -> list[str]:
    facts, manifest = _summary(each), each.manifest
    return [
        str(manifest.step),
        manifest.created[:19],
        byte_size(manifest.nbytes),
        str(facts["files"]),
        str(facts["tensors"]),
    ]


def _summary(each: Committed) -> dict[str, Any]:
    manifest = each.manifest
    return {
        "tag": each.folder.name,
        "step": manifest.step,
        "created": manifest.created,
        "bytes": manifest.nbytes,
        "files": len(manifest.files),
        "tensors": len(manifest.tensors),
        "id": manifest.id,
        "run": manifest.run,
    }


def run_show(arguments: argparse.Namespace) -> int:
    """Print facts, then tensors."""
    with _open(arguments.folder, arguments.tag) as reader:
        manifest = reader.manifest
        if arguments.json:
            tensors = [[each.kind, each.name, list(each.shape), each.dtype] for each in manifest.tensors]
            write_json(_summary(Committed(reader.folder, manifest)) | {"facts": manifest.facts, "entries": tensors})
            return 0
        write(f"{reader.folder}\n  save {manifest.id} of run {manifest.run}, {manifest.created}")
        write(f"  {len(manifest.files)} files, {byte_size(manifest.nbytes)}")
        for key in ("versions", "layout", "counters", "batch", "data"):
            found = manifest.facts.get(key) or {}
            if not isinstance(found, dict):
                raise CheckpointError(f"{reader.folder}: its facts cannot be used: '{key}' is no dict")
            if found:
                write(f"  {key}: {', '.join(f'{name} {value}' for name, value in found.items())}")
        rows = [[each.kind, each.name, str(list(each.shape)), each.dtype] for each in manifest.tensors[:SHOWN]]
        _print_rows(("kind", "name", "shape", "dtype"), rows)
        if len(manifest.tensors) > SHOWN:
            write(f"and {len(manifest.tensors) - SHOWN} more; --json has all")
    return 0


def run_verify(arguments: argparse.Namespace) -> int:
    """Say that all is well, or what is not: exit with 1 when a checkpoint is damaged, with 3 when only `latest` is."""
    root = arguments.folder
    every = [path.parent for path in sorted(root.glob(f"*/{MANIFEST}"))] if arguments.all else []
    if arguments.all and not every:
        raise CheckpointError(f"{root}: no checkpoint is committed there")
    folders = every or [_folder(root, arguments.tag)]
    damaged = 0
    for folder in folders:
        try:
            with Reader(folder) as reader, _progress(f"verify {folder.name}", reader.manifest.nbytes) as on_bytes:
                wrong, size = verify(reader, on_bytes), byte_size(reader.manifest.nbytes)
        except CheckpointError as error:
            wrong, size = [str(error)], ""
        damaged += bool(wrong)
        write(f"{folder}: " + (f"whole, {size}" if not wrong else "damaged"))
        for each in wrong:
            write(f"  - {each}")
    problem = latest_problem(root) if arguments.tag is None and folders != [root] else ""
    if problem:
        write(f"{root / LATEST}: {problem}")
    return 1 if damaged else WRONG_LATEST if problem else 0


def run_diff(arguments: argparse.Namespace) -> int:
    """Print what differs; exit with 1 when something does."""
    with (
        _open(arguments.folder, arguments.tag) as one,
        _open(arguments.other, arguments.other_tag) as other,
        _progress("compare", sum(each.nbytes for each in one.entries.values())) as on_bytes,
    ):
        found = list(compare(one, other, on_bytes))
    for each in found:
        write(f"{each.what}: {each.one[:120]} | {each.other[:120]}")
    write(f"{len(found)} differences" if found else "no difference")
    return 1 if found else 0


def run_export(arguments: argparse.Namespace) -> int:
    """Write the weights."""
    source = open_source(arguments.folder, arguments.tag)
    entries = weights_of(source).values()
    size = 2 if arguments.dtype in ("bf16", "fp16") else 4
    total = sum(size * math.prod(entry.shape) for entry in entries)
    options: dict[str, Any] = {"precision": arguments.dtype}
    if arguments.no_states and not arguments.layers:
        raise UsageError("--no-states says what --layers leaves out: give that, too")
    with _progress("export", total) as on_bytes:
        if arguments.layers:
            paths = export_layers(
                source, arguments.to, has_states=not arguments.no_states, on_bytes=on_bytes, **options
            )
        elif arguments.to.suffix in (".bin", ".pt", ".pth"):
            paths = [export_torch(source, arguments.to, on_bytes=on_bytes, **options)]
        else:
            paths = export_safetensors(
                source, arguments.to, shard=arguments.max_shard_size, on_bytes=on_bytes, **options
            )
    for path in paths:
        write(f"wrote {path}, {byte_size(path.stat().st_size)}")
    return 0


def run_import(arguments: argparse.Namespace) -> int:
    """Write a checkpoint that `load_checkpoint` takes."""
    source = open_source(arguments.folder, arguments.tag)
    total = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in source.names())
    with _progress("import", total) as on_bytes:
        manifest = convert(source, arguments.to, arguments.name, on_bytes=on_bytes)
    write(f"wrote {arguments.to / arguments.name}, {len(manifest.tensors)} tensors, {byte_size(manifest.nbytes)}")
    return 0


def run_prune(arguments: argparse.Namespace) -> int:
    """Delete, or say what would be deleted."""
    if arguments.keep_every and not arguments.keep_last:
        raise UsageError("--keep-every says what stays although it is old: give --keep-last too")
    if not arguments.folder.is_dir() or (arguments.folder / MANIFEST).exists():
        raise CheckpointError(f"{arguments.folder}: no folder of checkpoints")
    found = committed(arguments.folder)
    named = read_latest(arguments.folder)
    for each in surplus(found, last=arguments.keep_last, every=arguments.keep_every, spare={named} if named else ()):
        write(f"{'would delete' if arguments.dry_run else 'deleted'} {each.folder}, {byte_size(each.manifest.nbytes)}")
        if not arguments.dry_run:
            delete(each)
    if not arguments.dry_run:
        for path in sweep_all(arguments.folder):
            write(f"removed {path}, left by a save that did not end")
    return 0


def _folder(root: Path, tag: str | None) -> Path:
    if tag is None and (root / MANIFEST).exists():
        return root
    tags = candidates(root, tag, with_older=False)
    if not tags:
        raise CheckpointError(f"{root}: there is no checkpoint" + (f" '{tag}'" if tag else ""))
    return root / tags[0]


def _open(root: Path, tag: str | None) -> Reader:
    return Reader(_folder(root, tag))


def _print_rows(titles: tuple[str, ...], rows: list[list[str]]) -> None:
    if is_terminal():
        from rich.table import Table  # only where a person looks

        table = Table(*titles, box=None)
        for row in rows:
            table.add_row(*row)
        write_table(table)
        return
    widths = [max(len(row[column]) for row in (list(titles), *rows)) for column in range(len(titles))]
    for row in (list(titles), *rows):
        write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def _progress(title: str, total: int) -> Iterator[OnBytes]:
    """A bar on a terminal; nothing elsewhere."""
    if not is_terminal():
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
