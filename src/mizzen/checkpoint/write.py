"""What ranks write: each its data file, Pieces as safetensors hashed chunk by chunk, and one list of all tensors.

[Note: boxes that do not make up a tensor]
Two ranks that both think that the other writes a box leave a hole; two that both write it may write different values,
and whoever loads takes one of them. Neither is seen before somebody needs the checkpoint. So the ranks also say what
they know of and leave to others, and a save in which a single element is missing, or twice, is not committed.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy
import torch
import xxhash
from torch import Tensor

from mizzen.checkpoint.manifest import CHUNK, BoxTable, FileEntry, StoredBox, Table, TensorEntry, corners, tiles
from mizzen.checkpoint.read import Stored, by_tensor
from mizzen.checkpoint.tensors import CODES, DTYPES, bytes_of, header_of, name_of
from mizzen.errors import CheckpointError
from mizzen.files import write_chunks
from mizzen.model.box import Box, coverage
from mizzen.model.piece import Piece
from mizzen.wording import and_more, rank_list

WEIGHT: Final = "model"
"""The kind under which weights and buffers are saved."""
SHOWN: Final = 3
RANKS: Final = 8
OUTSIDE: Final = "a box does not lie in the tensor"
DEFECT: Final = "The ranks disagree on who holds what: a defect of mizzen, or of what has cut the model"


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """Something to be saved."""

    kind: str
    piece: Piece

    @property
    def entry(self) -> TensorEntry:
        """The tensor that it is a part of."""
        return TensorEntry(self.kind, self.piece.name, self.piece.shape, name_of(self.piece.dtype))

    @property
    def nbytes(self) -> int:
        """What it takes in a file."""
        return self.piece.nbytes


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has written: its tensors, and its file; no file where it had nothing to write."""

    table: bytes
    """The tensors that the rank knows of, packed: thousands of ranks may have thousands. The parts of the file are
    counted in them; those without a part are other ranks' to write."""
    file: FileEntry | None

    @classmethod
    def of(cls, tensors: Sequence[TensorEntry], file: FileEntry | None) -> "Written":
        """Tensors and a file."""
        rows = [[each.kind, each.name, each.shape, each.dtype] for each in tensors]
        return cls(zlib.compress(json.dumps(rows).encode(), 1), file)

    def tensors(self) -> list[TensorEntry]:
        """What was packed."""
        rows = json.loads(zlib.decompress(self.table))
        return [TensorEntry(kind, name, tuple(shape), dtype) for kind, name, shape, dtype in rows]


class ChunkHasher:
    """The hashes of bytes that pass by, one for each chunk."""

    def __init__(self, chunk: int = CHUNK) -> None:
        self._chunk = chunk
        self._room = chunk
        self._open = xxhash.xxh3_128()
        self._done: list[str] = []

    def update(self, data: memoryview) -> None:
        """Some more bytes."""
        while data.nbytes:
            part = data[: self._room]
            self._open.update(part)
            self._room -= part.nbytes
            data = data[part.nbytes :]
            if not self._room:
                self._close()

    def _close(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open, self._room = xxhash.xxh3_128(), self._chunk

    def finish(self) -> tuple[str, ...]:
        """All hashes, of the last and shorter chunk too."""
        if self._room < self._chunk:
            self._close()
        return tuple(self._done)


def check(items: Sequence[Item]) -> None:
    """Refuse what the format cannot hold, before anything is written."""
    for item in items:
        check_dtype(item.kind, item.piece.name, item.piece.dtype)


def check_dtype(kind: str, name: str, dtype: torch.dtype) -> None:
    """Refuse a tensor that the format cannot hold."""
    if dtype not in CODES:
        raise CheckpointError(
            f"{kind} '{name}' is {dtype}, which a checkpoint cannot hold; it can hold {', '.join(map(name_of, CODES))}"
        )


def write_items(
    path: Path, items: Sequence[Item], known: Sequence[TensorEntry] = (), *, metadata: dict[str, str] | None = None
) -> Written:
    """Write a new file with every box of some Pieces, durable but for its name.

    `known` are tensors that have to be in the checkpoint, whoever writes them.
    """
    check(items)
    tensors = {entry.key: entry for entry in (*known, *(item.entry for item in items))}
    reader = _PieceReader()
    boxes = [
        BoxData(item.entry, box, partial(reader.part, item.piece, number))
        for item in items
        for number, box in enumerate(item.piece.boxes)
    ]
    return write_boxes(path, tuple(tensors.values()), boxes, metadata=metadata)


@dataclass(frozen=True, slots=True)
class BoxData:
    """A box of a tensor, and how to get its elements when they are written."""

    entry: TensorEntry
    box: Box
    load: Callable[[], Tensor]


def write_boxes(
    path: Path, tensors: Sequence[TensorEntry], boxes: Sequence[BoxData], *, metadata: dict[str, str] | None = None
) -> Written:
    """Write a new file with some boxes, of which one at a time is in memory."""
    boxes = [each for each in boxes if not each.box.is_empty]
    if not boxes:
        return Written.of(tensors, None)
    places = {entry.key: number for number, entry in enumerate(tensors)}
    named = [(title(each.entry, each.box), DTYPES[each.entry.dtype], each.box.shape) for each in boxes]
    header = header_of(named, metadata)
    hasher, parts, place = ChunkHasher(), [], len(header)
    for each in boxes:
        parts.append(StoredBox(places[each.entry.key], place, each.box))
        place += each.box.numel * DTYPES[each.entry.dtype].itemsize

    def passing() -> Iterator[memoryview]:
        for chunk in _all(header, boxes):
            hasher.update(chunk)
            yield chunk
            del chunk  # what it belongs to goes before the next is read

    size = write_chunks(path, passing())
    return Written.of(tensors, FileEntry(path.name, size, hasher.finish(), BoxTable.of(parts)))


class _PieceReader:
    """The data of Pieces, of which one at a time is in memory if it was not there before."""

    def __init__(self) -> None:
        self._piece: Piece | None = None
        self._parts: list[Tensor] = []

    def part(self, piece: Piece, number: int) -> Tensor:
        """The elements of one box of a Piece."""
        if piece is not self._piece:
            self._parts = []  # the last one goes before the next one comes
            if self._piece is not None:
                self._piece.done()
            self._piece, self._parts = piece, [data for _, data in piece.parts()]
        return self._parts[number]


def title(entry: TensorEntry, box: Box) -> str:
    """The name of a box among the tensors of a safetensors file."""
    whole = "" if box == Box.whole(entry.shape) else str(box)
    return f"{entry.kind}/{entry.name}{whole}"


def _all(header: bytes, boxes: Sequence[BoxData]) -> Iterator[memoryview]:
    yield memoryview(header)
    for each in boxes:
        yield from bytes_of(each.load())


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
            whose = f"written by {rank_list(writers, RANKS)}" if writers else "no rank wrote it"
            found.append(f"{stored.entry}: {words} ({whose})")
    if not found:
        return ""
    return (
        f"what the ranks have written does not make up {len(found)} of {len(tensors)} tensors: "
        f"{and_more(found, SHOWN, separator='; ')}. {DEFECT}"
    )


def unwritten(names: Iterable[str], tensors: Iterable[TensorEntry]) -> str:
    """Which of these weights are not among the tensors, in words; empty when all are."""
    there = {entry.name for entry in tensors if entry.kind == WEIGHT}
    lost = [name for name in names if name not in there]
    return f"no rank wrote {len(lost)} weights of the model: {and_more(lost, SHOWN)}. {DEFECT}" if lost else ""


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
