"""Reading a committed checkpoint: any box of any tensor, from whatever boxes were written, each byte verified first.

`verify` looks at every byte, and `compare` says in what two checkpoints differ.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from mizzen.checkpoint.manifest import (
    TENSOR,
    FileEntry,
    Manifest,
    StoredBox,
    Table,
    TensorEntry,
    corners,
    digest,
    is_plain,
    tiles,
)
from mizzen.checkpoint.tensors import DTYPES, SLAB, memory_of
from mizzen.errors import CheckpointError, FileError
from mizzen.files import Reading, list_folder
from mizzen.model.box import Box, flat_range_of
from mizzen.model.piece import Piece, piece_of_whole
from mizzen.wording import and_more

MANIFEST: Final = "manifest.json"
ROOM: Final = 1 << 23
"""Bytes that a manifest may have beside those of the data it describes."""
SPARSE: Final = 1 << 26
"""The data files of a checkpoint may have so many bytes together whatever they take on the disk,"""
SWELLING: Final = 16
"""or else each so many times what it takes there: some filesystems compress."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Where the boxes of one tensor are."""

    entry: TensorEntry
    files: Table
    """The file of each box, by its place in the manifest."""
    table: Table

    def over(self, box: Box) -> Iterator[tuple[int, StoredBox]]:
        """Those that have something of a box, each with its file."""
        start, stop = corners(self.table)
        is_over = (start < numpy.array(box.stop)) & (stop > numpy.array(box.start))
        for place in numpy.flatnonzero(is_over.all(axis=1)).tolist():
            row = self.table[place].tolist()
            dims = len(box.start)
            yield (
                int(self.files[place]),
                StoredBox(row[0], row[1], Box(tuple(row[2 : 2 + dims]), tuple(row[2 + dims :]))),
            )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, or a CheckpointError that says why there is none."""
    where = str(folder / MANIFEST)
    try:
        with Reading(folder / MANIFEST) as file:
            allowed = ROOM + sum(entry.stat().st_blocks * 512 for entry in _data_files(folder))
            if file.size > allowed:
                raise CheckpointError(f"{where}: {file.size:,} bytes, more than data of this size could need")
            data = bytearray(file.size)
            file.read_into(memoryview(data), 0)
    except FileError as error:
        raise CheckpointError(f"{folder}: no checkpoint is committed here: {error}") from error
    return Manifest.from_bytes(bytes(data), where, room=4 * allowed)


def _data_files(folder: Path) -> list[Path]:
    return [path for path in list_folder(folder) if is_plain(path.name) and path.is_file() and not path.is_symlink()]


@contextmanager
def _named(entry: TensorEntry) -> Iterator[None]:
    """Let an error say which tensor was to be read."""
    try:
        yield
    except (CheckpointError, FileError) as error:
        raise CheckpointError(f"{error} (it holds {entry})") from error


class Verified:
    """One data file, of which nothing is handed out before its chunk has the right hash."""

    def __init__(self, folder: Path, entry: FileEntry, chunk: int) -> None:
        self._entry = entry
        self._chunk = chunk
        self._file = Reading(folder / entry.name)
        self._path = folder / entry.name
        self._kept: tuple[int, memoryview] | None = None
        if self._file.size != entry.size:
            self._file.close()
            raise CheckpointError(
                f"{self._path}: damaged: it has {self._file.size:,} bytes, and was written with {entry.size:,}"
            )

    def check_holes(self, allowed: int) -> int:
        """Refuse a file that would take far more memory than it takes on the disk.

        What it takes in vain goes off what is `allowed`; returns what is left of that.
        """
        if self._file.size <= SWELLING * self._file.on_disk or self._file.size <= SWELLING * (
            held := self._file.held()
        ):
            return allowed
        if self._file.size > allowed:
            raise CheckpointError(
                f"{self._path}: {self._file.size:,} bytes, of which only {held:,} are on the disk: a file made of "
                "holes; if it is meant, copy it with `cp --sparse=never`"
            )
        return allowed - self._file.size

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill a memory with the bytes from a place on."""
        end = offset + target.nbytes
        while offset < end:
            number, begin = divmod(offset, self._chunk)
            length = self._length(number)
            count = min(length - begin, end - offset)
            into, target = target[:count], target[count:]
            if count == length:
                self._file.read_into(into, offset)
                self._verify(number, into)
            else:
                into[:] = self._cached(number)[begin : begin + count]
            offset += count

    def _length(self, number: int) -> int:
        return min(self._chunk, self._entry.size - number * self._chunk)

    def _cached(self, number: int) -> memoryview:
        """A chunk of which only a part is wanted: the next tensor is likely to want the rest."""
        if self._kept is None or self._kept[0] != number:
            data = memoryview(bytearray(self._length(number)))
            self._file.read_into(data, number * self._chunk)
            self._verify(number, data)
            self._kept = number, data
        return self._kept[1]

    def _verify(self, number: int, data: memoryview) -> None:
        if digest(data) != self._entry.hashes[number]:
            start = number * self._chunk
            raise CheckpointError(
                f"{self._path}: damaged: bytes {start:,} to {start + data.nbytes:,} are not those that were written"
            )

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


class Reader:
    """A committed checkpoint. A tensor is looked for by kind and name; files are opened when they are needed."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self.manifest = manifest or read_manifest(folder)
        self._open: dict[str, Verified] = {}
        self._stored = by_tensor(self.manifest.tensors, self.manifest.files)
        self._checked: set[tuple[str, str]] = set()
        self._solid: set[int] = set()
        self._holes = SPARSE

    @property
    def entries(self) -> Mapping[tuple[str, str], TensorEntry]:
        """Every tensor by kind and name."""
        return {key: stored.entry for key, stored in self._stored.items()}

    def find(self, kind: str, name: str) -> TensorEntry | None:
        """One tensor; None where there is none."""
        stored = self._stored.get((kind, name))
        return stored.entry if stored else None

    def torn(self) -> list[TensorEntry]:
        """Tensors whose boxes do not hold each element once; where nodes have a part each, that cannot be told."""
        if self.manifest.node:
            return []
        return [each.entry for each in self._stored.values() if not tiles(each.table, each.entry.shape)]

    def any_of(self, kind: str) -> str:
        """The name of some tensor of a kind that has something here; empty when there is none."""
        found = (name for (of, name), stored in self._stored.items() if of == kind and len(stored.table))
        return next(found, "")

    def fill(self, kind: str, target: Piece, name: str | None = None) -> None:
        """Write to a Piece what the checkpoint has for it, under this name, in the Piece's own dtype."""
        stored = self._require(kind, name or target.name)
        if stored.entry.shape != target.shape:
            raise CheckpointError(f"{self.folder}: {stored.entry} was asked for as {list(target.shape)}")
        with torch.no_grad():
            target.check_writable()
            for box, data in target.parts():
                found = 0
                for file, part in stored.over(box):
                    overlap = box.intersection(part.box)
                    with _named(stored.entry):
                        self._copy(stored.entry, self._file(file), part, overlap, data[overlap.slices(box)])
                    found += overlap.numel
                if found != box.numel:
                    raise self._incomplete(stored.entry, box.numel - found)
            target.changed()

    def whole(self, kind: str, name: str) -> Tensor:
        """A whole tensor on the CPU."""
        entry = self._require(kind, name).entry
        self._check_files(entry)
        found = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.fill(kind, piece_of_whole(name, found))
        return found

    def _require(self, kind: str, name: str) -> Stored:
        stored = self._stored.get((kind, name))
        if stored is None:
            raise CheckpointError(f"{self.folder}: there is no {kind} '{name}' in this checkpoint")
        if stored.entry.key not in self._checked:
            if not self.manifest.node and not tiles(stored.table, stored.entry.shape):
                start, stop = corners(stored.table)
                held = int(numpy.prod(stop - start, axis=1).sum())
                raise self._incomplete(stored.entry, math.prod(stored.entry.shape) - held)
            self._checked.add(stored.entry.key)
        return stored

    def _check_files(self, entry: TensorEntry) -> None:
        """Open what holds a tensor, so that its files are known to be as large as they should before there is room."""
        for file in set(self._stored[entry.key].files.tolist()) - self._solid:
            with _named(entry):
                self._holes = self._file(file).check_holes(self._holes)
            self._solid.add(file)

    def _incomplete(self, entry: TensorEntry, missing: int) -> CheckpointError:
        here = f" on node {self.manifest.node}: it is on another node of {', '.join(self.manifest.nodes)}, and so "
        here += "needs the layout that it was saved with, or a shared filesystem"
        what = f"{missing:,} elements are" if missing > 0 else "elements are twice, or more are"
        return CheckpointError(f"{self.folder}: {entry}: {what} not there{here if self.manifest.node else ''}")

    def _copy(self, entry: TensorEntry, source: Verified, part: StoredBox, wanted: Box, target: Tensor) -> None:
        """The elements of a box that lies within a part, slab by slab."""
        dtype, inside = DTYPES[entry.dtype], wanted.shift([-at for at in part.box.start])
        flat = flat_range_of(inside, part.box.shape)
        if flat is not None:
            self._copy_run(source, part.offset + flat[0] * dtype.itemsize, dtype, target)
            return
        rows = math.prod(part.box.shape[1:])
        step = max(1, SLAB // (rows * dtype.itemsize))
        for first in range(inside.start[0], inside.stop[0], step):
            count = min(step, inside.stop[0] - first)
            slab = torch.empty((count, *part.box.shape[1:]), dtype=dtype)
            source.read_into(memory_of(slab), part.offset + first * rows * dtype.itemsize)
            columns = tuple(slice(a, b) for a, b in zip(inside.start[1:], inside.stop[1:], strict=True))
            target[first - inside.start[0] : first - inside.start[0] + count].copy_(slab[(slice(None), *columns)])

    @staticmethod
    def _copy_run(source: Verified, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Elements that lie one after the other in the file; into their place at once where it looks the same."""
        if target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype:
            source.read_into(memory_of(target), offset)
            return
        if not target.is_contiguous():
            whole = torch.empty(target.shape, dtype=dtype)
            source.read_into(memory_of(whole), offset)
            target.copy_(whole)
            return
        flat, step = target.view(-1), max(1, SLAB // dtype.itemsize)
        for start in range(0, len(flat), step):
            place = flat[start : start + step]
            slab = torch.empty(place.shape, dtype=dtype)
            source.read_into(memory_of(slab), offset + start * dtype.itemsize)
            place.copy_(slab)

    def _file(self, number: int) -> Verified:
        entry = self.manifest.files[number]
        if entry.name not in self._open:
            self._open[entry.name] = Verified(self.folder, entry, self.manifest.chunk)
        return self._open[entry.name]

    def close(self) -> None:
        """Let all files go."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def by_tensor(tensors: Sequence[TensorEntry], files: Sequence[FileEntry]) -> dict[tuple[str, str], Stored]:
    """The boxes of each tensor, out of those of each file."""
    found: dict[int, tuple[Table, Table]] = {}
    for dims in {len(entry.shape) for entry in tensors}:
        tables = [(n, file.parts.tables[dims]) for n, file in enumerate(files) if dims in file.parts.tables]
        if not tables:
            continue
        homes = numpy.concatenate([numpy.full(len(table), number, dtype=numpy.int64) for number, table in tables])
        rows = numpy.concatenate([table for _, table in tables])
        order = rows[:, TENSOR].argsort(kind="stable")
        homes, rows = homes[order], rows[order]
        numbers, firsts = numpy.unique(rows[:, TENSOR], return_index=True)
        ends = [*firsts[1:].tolist(), len(rows)]
        for number, first, end in zip(numbers.tolist(), firsts.tolist(), ends, strict=True):
            found[number] = homes[first:end], rows[first:end]
    nothing = numpy.zeros(0, dtype=numpy.int64)
    stored = {}
    for number, entry in enumerate(tensors):
        none = nothing, numpy.zeros((0, 2 + 2 * len(entry.shape)), dtype=numpy.int64)
        stored[entry.key] = Stored(entry, *found.get(number, none))
    return stored


OnBytes = Callable[[int], None]


def verify(reader: Reader, on_bytes: OnBytes | None = None) -> list[str]:
    """Read every byte and compare its hash; what is wrong, by file and tensor. `on_bytes` hears of progress."""
    manifest = reader.manifest
    wrong = [f"{entry}: its parts do not hold each element once" for entry in reader.torn()]
    for file in manifest.files:
        wrong += _verify_file(reader, file, on_bytes)
    return wrong


def _verify_file(reader: Reader, file: FileEntry, on_bytes: OnBytes | None) -> Iterator[str]:
    manifest = reader.manifest
    try:
        opened = Verified(reader.folder, file, manifest.chunk)
    except (CheckpointError, FileError) as error:
        yield f"{error} (it holds {_held(manifest, file, 0, file.size)})"
        return
    buffer = memoryview(bytearray(min(manifest.chunk, max(file.size, 1))))
    try:
        for start in range(0, file.size, manifest.chunk):
            count = min(manifest.chunk, file.size - start)
            try:
                opened.read_into(buffer[:count], start)
            except (CheckpointError, FileError) as error:
                yield f"{error} (it holds {_held(manifest, file, start, start + count)})"
            if on_bytes is not None:
                on_bytes(count)
    finally:
        opened.close()


def _held(manifest: Manifest, file: FileEntry, start: int, stop: int) -> str:
    """The tensors that have bytes in a range of a file."""
    names = []
    for part in file.parts:
        entry = manifest.tensors[part.tensor]
        end = part.offset + part.box.numel * DTYPES[entry.dtype].itemsize
        if part.offset < stop and end > start:
            names.append(f"{entry.kind} '{entry.name}'")
    return and_more(names, 3) or "only the header of the file"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two checkpoints differ."""

    what: str
    one: str
    other: str


def compare(one: Reader, other: Reader, on_bytes: OnBytes | None = None) -> Iterator[Difference]:
    """Tensor by tensor, then fact by fact; one tensor of each is in memory at a time."""
    first, second = one.entries, other.entries
    for key in dict.fromkeys((*first, *second)):
        title = f"{key[0]} '{key[1]}'"
        a, b = first.get(key), second.get(key)
        if a is None or b is None:
            yield Difference(title, "there" if a else "absent", "there" if b else "absent")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            yield Difference(title, f"{list(a.shape)} {a.dtype}", f"{list(b.shape)} {b.dtype}")
        else:
            left, right = one.whole(*key), other.whole(*key)
            if not torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8)):
                yield Difference(title, *_values(left, right))
            if on_bytes is not None:
                on_bytes(a.nbytes)
    left_facts, right_facts = _flat(one.manifest.facts), _flat(other.manifest.facts)
    for path in dict.fromkeys((*left_facts, *right_facts)):
        if left_facts.get(path) != right_facts.get(path):
            yield Difference(path, str(left_facts.get(path, "absent")), str(right_facts.get(path, "absent")))


def _values(left: torch.Tensor, right: torch.Tensor) -> tuple[str, str]:
    if not left.is_floating_point():
        return f"{int((left != right).sum())} elements differ", ""
    a, b = left.double(), right.double()
    return (
        f"norm {float(a.norm()):.6g}",
        f"norm {float(b.norm()):.6g}, largest difference {float((a - b).abs().max()):.3g}",
    )


def _flat(facts: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in facts.items():
        here = f"{path}.{key}" if path else str(key)
        found |= _flat(value, here) if isinstance(value, Mapping) and value else {here: value}
    return found
