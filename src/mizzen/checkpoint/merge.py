"""What all ranks have written, put together: one list of tensors, and whether every element of each is there once.

[Note: boxes that do not make up a tensor]
Two ranks that both think that the other writes a box leave a hole; two that both write it may write different values,
and whoever loads takes one of them. Neither is seen before somebody needs the checkpoint. So the ranks also say what
they know of and leave to others, and a save in which a single element is missing, or twice, is not committed.
"""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy

from mizzen.checkpoint.manifest import FileEntry, Table, TensorEntry, corners, tiles
from mizzen.checkpoint.read import Stored, by_tensor
from mizzen.checkpoint.write import Written
from mizzen.errors import CheckpointError
from mizzen.model.box import Box, coverage

WEIGHT: Final = "model"
"""The kind under which weights and buffers are saved."""
SHOWN: Final = 3
RANKS: Final = 8
OUTSIDE: Final = "a box does not lie in the tensor"
DEFECT: Final = "The ranks disagree on who holds what: a defect of mizzen, or of what has cut the model"


def merge(written: Sequence[Written], *, once: bool = False) -> tuple[tuple[TensorEntry, ...], tuple[FileEntry, ...]]:
    """One list of tensors for all files, whose parts are counted in it; with `once` a box that is twice counts once."""
    tensors: dict[tuple[str, str], tuple[int, TensorEntry]] = {}
    files: list[FileEntry] = []
    seen: set[tuple[int, ...]] = set()
    places: dict[bytes, list[int]] = {}
    for each in written:
        if each.table not in places:
            places[each.table] = [_place(tensors, entry) for entry in each.tensors()]
        if each.file is not None:
            parts = each.file.parts.counted_in(places[each.table])
            files.append(replace(each.file, parts=parts.without(seen) if once else parts))
    return tuple(entry for _, entry in tensors.values()), tuple(files)


def _place(tensors: dict[tuple[str, str], tuple[int, TensorEntry]], entry: TensorEntry) -> int:
    """The place of a tensor in the list of all, to which it may be new."""
    number, known = tensors.setdefault(entry.key, (len(tensors), entry))
    if known != entry:
        raise CheckpointError(
            f"{entry.kind} '{entry.name}' is {list(entry.shape)} {entry.dtype} on one rank and "
            f"{list(known.shape)} {known.dtype} on another"
        )
    return number


def pack_facts(facts: Mapping[str, Any]) -> bytes:
    """Facts of one rank, for `merge_facts`; ranks that know the same have the same bytes."""
    return zlib.compress(json.dumps(facts, allow_nan=False).encode(), 1)


def merge_facts(packed: Iterable[bytes]) -> dict[str, Any]:
    """The facts of all ranks, which are dicts and lists of names; what several ranks say, the first has said."""
    merged: dict[str, Any] = {}
    for each in dict.fromkeys(packed):
        for key, value in json.loads(zlib.decompress(each)).items():
            known = merged.setdefault(key, type(value)())
            merged[key] = value | known if isinstance(value, dict) else list(dict.fromkeys((*known, *value)))
    return merged


def flaws(written: Mapping[int, Written], nodes: Sequence[str] = ()) -> str:
    """Why what the ranks have written does not hold every element of every tensor exactly once; empty when it does.

    See [Note: boxes that do not make up a tensor]. Where each node has a filesystem of its own, `nodes` has that of
    every rank: copies on several nodes are meant, and so is the same box of two ranks of a node, which is kept once.
    """
    tensors, files = merge(list(written.values()))
    ranks = numpy.array([rank for rank, each in written.items() if each.file is not None], dtype=numpy.int64)
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    places = numpy.array([numbers[nodes[rank]] if nodes else 0 for rank in ranks], dtype=numpy.int64)
    found = []
    for stored in by_tensor(tensors, files).values():
        if words := _flaw(stored, places[stored.files] if nodes else None):
            writers = sorted(set(ranks[stored.files].tolist()))
            more = ", ..." if len(writers) > RANKS else ""
            whose = f"written by rank {', '.join(map(str, writers[:RANKS]))}{more}" if writers else "no rank wrote it"
            found.append(f"{stored.entry}: {words} ({whose})")
    if not found:
        return ""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (
        f"what the ranks have written does not make up {len(found)} of {len(tensors)} tensors: "
        f"{'; '.join(found[:SHOWN])}{more}. {DEFECT}"
    )


def unwritten(names: Iterable[str], tensors: Iterable[TensorEntry]) -> str:
    """Which of these weights are not among the tensors, in words; empty when all are."""
    there = {entry.name for entry in tensors if entry.kind == WEIGHT}
    lost = [name for name in names if name not in there]
    more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
    return f"no rank wrote {len(lost)} weights of the model: {', '.join(lost[:SHOWN])}{more}. {DEFECT}" if lost else ""


def _flaw(stored: Stored, nodes: Table | None) -> str:
    """What is wrong with the boxes of a tensor, in words; `nodes` has the place of the node of each."""
    table, shape = stored.table, stored.entry.shape
    start, stop = corners(table)
    if ((start < 0) | (stop > numpy.array(shape, dtype=numpy.int64))).any():
        return OUTSIDE
    groups = [table] if nodes is None else [_once(table[nodes == node]) for node in numpy.unique(nodes)]
    every = table if nodes is None else _once(table)
    if tiles(every, shape) or (nodes is not None and groups and all(tiles(each, shape) for each in groups)):
        return ""
    overlapping = sum(coverage(_boxes(each), shape).overlapping for each in groups)
    missing = coverage(_boxes(every), shape).missing
    words = [f"{missing:,} elements are missing"] if missing else []
    return " and ".join([*words, *([f"{overlapping:,} are there twice"] if overlapping else [])])


def _once(table: Table) -> Table:
    """The rows of a table, of those with the same box one."""
    _, first = numpy.unique(table[:, 2:], axis=0, return_index=True)
    return table[numpy.sort(first)] if table.shape[1] > 2 else table[:1]


def _boxes(table: Table) -> Iterator[Box]:
    start, stop = corners(table)
    return (Box(tuple(a), tuple(b)) for a, b in zip(start.tolist(), stop.tolist(), strict=True))
