"""Where boxes of tensors lie in files, as tables of numbers: a large job has millions, too many for objects or JSON."""

import base64
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy
from numpy.typing import NDArray

from mizzen.model.box import Box, coverage

Table = NDArray[numpy.int64]
DIMENSIONS: Final = 64
"""The most that a tensor may have."""
TENSOR: Final = 0
"""The column of the place of the tensor in the list of tensors."""
OFFSET: Final = 1
"""The column of the byte at which a box begins; then come its first corner and its last."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, as contiguous bytes of a file."""

    tensor: int
    offset: int
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The boxes in one file: for each number of dimensions a table of (tensor, offset, start..., stop...)."""

    tables: Mapping[int, Table]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> "Parts":
        """The same as tables."""
        rows: dict[int, list[list[int]]] = {}
        for part in parts:
            row = [part.tensor, part.offset, *part.box.start, *part.box.stop]
            rows.setdefault(len(part.box.start), []).append(row)
        return cls({dims: numpy.array(those, dtype=numpy.int64) for dims, those in rows.items()})

    def pack(self) -> dict[str, str]:
        """As a manifest has them: base64 of the zlib stream of each table, row by row, 64-bit little-endian numbers."""
        return {
            str(dims): base64.b64encode(zlib.compress(table.astype("<i8").tobytes(), 1)).decode()
            for dims, table in self.tables.items()
        }

    @classmethod
    def unpack(cls, packed: Mapping[str, str], room: int) -> "Parts":
        """What was packed, of which only the form is checked. More than `room` bytes are never made."""
        tables = {}
        for dims, text in packed.items():
            if not dims.isascii() or not dims.isdigit() or int(dims) > DIMENSIONS:
                raise ValueError(f"{dims[:20]!r} is no number of dimensions")
            stream = zlib.decompressobj()
            data = stream.decompress(base64.b64decode(text, validate=True), room)
            width = 8 * (2 + 2 * int(dims))
            if not stream.eof or not data or len(data) % width:
                raise ValueError(f"parts of {dims} dimensions are no table, or one larger than the data could need")
            room -= len(data)
            tables[int(dims)] = (
                numpy.frombuffer(data, dtype="<i8").astype(numpy.int64, copy=False).reshape(-1, width // 8)
            )
        return cls(tables)

    def rows(self) -> Iterator[list[int]]:
        """As a manifest has them."""
        for table in self.tables.values():
            yield from table.tolist()

    def __iter__(self) -> Iterator[Part]:
        for row in self.rows():
            dims = len(row) // 2 - 1
            yield Part(row[0], row[1], Box(tuple(row[2 : 2 + dims]), tuple(row[2 + dims :])))

    @property
    def nbytes(self) -> int:
        """The memory of all tables."""
        return sum(table.nbytes for table in self.tables.values())

    def __len__(self) -> int:
        return sum(map(len, self.tables.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and sorted(self.rows()) == sorted(other.rows())

    def __hash__(self) -> int:
        return len(self)

    def counted_in(self, places: Sequence[int]) -> "Parts":
        """The same with the tensors counted in another list."""
        order = numpy.array(places, dtype=numpy.int64)
        tables = {}
        for dims, table in self.tables.items():
            moved = tables[dims] = table.copy()
            moved[:, TENSOR] = order[table[:, TENSOR]]
        return Parts(tables)

    def without(self, seen: set[tuple[int, ...]]) -> "Parts":
        """Only boxes that were not seen before; all are seen afterwards."""
        kept = []
        for part in self:
            key = (part.tensor, *part.box.start, *part.box.stop)
            if key not in seen:
                seen.add(key)
                kept.append(part)
        return Parts.of(kept)

    def check(self, shapes: Mapping[int, Table], sizes: Table, end: int) -> None:
        """Raise a ValueError unless every box lies in its tensor, and its bytes before the end of the file.

        `shapes` has, for each number of dimensions, the shape of every tensor, -1 for those with another number, and
        `sizes` the bytes of an element.
        """
        for dims, table in self.tables.items():
            if table[:, TENSOR].min() < 0 or table[:, TENSOR].max() >= len(sizes) or dims not in shapes:
                raise ValueError("a part belongs to no tensor")
            start, stop = corners(table)
            shape = shapes[dims][table[:, TENSOR]]
            inside = (start >= 0) & (start < stop) & (stop <= shape)
            bad = ~inside.all(axis=1) | (shape < 0).any(axis=1) | (table[:, OFFSET] < 0) | (table[:, OFFSET] > end)
            if not bad.any():
                bad = table[:, OFFSET] + numpy.prod(stop - start, axis=1) * sizes[table[:, TENSOR]] > end
            if bad.any():
                row = table[int(bad.argmax())].tolist()
                raise ValueError(f"the part {row} does not lie in its tensor, or ends behind the file's {end} bytes")
        self._check_apart(sizes)

    def _check_apart(self, sizes: Table) -> None:
        """Raise a ValueError where two boxes have the same bytes: a small file would be a large checkpoint."""
        first = [table[:, OFFSET] for table in self.tables.values()]
        length = [
            numpy.prod(numpy.subtract(*reversed(corners(table))), axis=1) * sizes[table[:, TENSOR]]
            for table in self.tables.values()
        ]
        if not first:
            return
        starts, lengths = numpy.concatenate(first), numpy.concatenate(length)
        order = starts.argsort(kind="stable")
        if (starts[order][:-1] + lengths[order][:-1] > starts[order][1:]).any():
            raise ValueError("two parts have the same bytes of the file")


def corners(table: Table) -> tuple[Table, Table]:
    """The first and the last corner of every box of a table."""
    dims = table.shape[1] // 2 - 1
    return table[:, 2 : 2 + dims], table[:, 2 + dims :]


def tiles(table: Table, shape: Sequence[int]) -> bool:
    """Whether the boxes of a table hold every element of a tensor exactly once."""
    start, stop = corners(table)
    if int(numpy.prod(stop - start, axis=1).sum()) != math.prod(shape):
        return False
    if len(table) < 2:
        return True  # the count was right
    differing = [dim for dim in range(len(shape)) if len(set(start[:, dim].tolist())) > 1]
    if len(differing) == 1:  # slabs along one dimension, as of shards: quick for thousands of them
        order = start[:, differing[0]].argsort()
        return bool((stop[order, differing[0]][:-1] <= start[order, differing[0]][1:]).all())
    boxes = (Box(tuple(a), tuple(b)) for a, b in zip(start.tolist(), stop.tolist(), strict=True))
    return coverage(boxes, shape).is_exact
