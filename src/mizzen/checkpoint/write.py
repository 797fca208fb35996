"""One rank's data file: Pieces as a safetensors file, hashed chunk by chunk as it is written."""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from mizzen.checkpoint.manifest import CHUNK, BoxTable, FileEntry, StoredBox, TensorEntry
from mizzen.checkpoint.tensors import CODES, DTYPES, bytes_of, header_of, name_of
from mizzen.errors import CheckpointError
from mizzen.files import write_chunks
from mizzen.model.box import Box
from mizzen.model.piece import Piece


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
    reader = _Reader()
    boxes = [
        Boxed(item.entry, box, partial(reader.part, item.piece, number))
        for item in items
        for number, box in enumerate(item.piece.boxes)
    ]
    return write_boxes(path, tuple(tensors.values()), boxes, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Boxed:
    """A box of a tensor, and how to get its elements when they are written."""

    entry: TensorEntry
    box: Box
    load: Callable[[], Tensor]


def write_boxes(
    path: Path, tensors: Sequence[TensorEntry], boxes: Sequence[Boxed], *, metadata: dict[str, str] | None = None
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


class _Reader:
    """The data of Pieces, of which one at a time is in memory if it was not there before."""

    def __init__(self) -> None:
        self._piece: Piece | None = None
        self._parts: list[Tensor] = []

    def part(self, piece: Piece, number: int) -> Tensor:
        """The elements of one box of a Piece."""
        if piece is not self._piece:
            self._parts = []  # the last one goes before the next one comes
            self._piece, self._parts = piece, [data for _, data in piece.parts()]
        return self._parts[number]


def title(entry: TensorEntry, box: Box) -> str:
    """The name of a box among the tensors of a safetensors file."""
    whole = "" if box == Box.whole(entry.shape) else str(box)
    return f"{entry.kind}/{entry.name}{whole}"


def _all(header: bytes, boxes: Sequence[Boxed]) -> Iterator[memoryview]:
    yield memoryview(header)
    for each in boxes:
        yield from bytes_of(each.load())
