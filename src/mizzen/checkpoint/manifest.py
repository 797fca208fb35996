"""The manifest: what a committed checkpoint holds and where, as frozen values, and as JSON that carries its own hash.

Whoever wrote it, nothing in it is believed before it is checked: names stay inside the folder, boxes inside their
tensors, bytes inside their files. docs/checkpoint-format.md describes every byte. Where boxes lie in files is a table
of numbers: a large job has millions, too many for objects or JSON.
"""

import base64
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy
import xxhash
from numpy.typing import NDArray

from mizzen.checkpoint.tensors import DTYPES
from mizzen.errors import CheckpointError
from mizzen.model.box import Box, coverage

FORMAT: Final = "mizzen-checkpoint"
VERSION: Final = 1
CHUNK: Final = 1 << 22
"""Bytes of a file that share one hash."""
LARGEST: Final = 1 << 60
"""No file, tensor or place is larger than this."""
LONGEST: Final = 4096
"""No name has more characters than this."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_LAST: Final = re.compile(rb'\n"hash":"([0-9a-f]{32})"\}\n\Z')
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
Table = NDArray[numpy.int64]
DIMENSIONS: Final = 64
"""The most that a tensor may have."""
TENSOR: Final = 0
"""The column of the place of the tensor in the list of tensors."""
OFFSET: Final = 1
"""The column of the byte at which a box begins; then come its first corner and its last."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, as contiguous bytes of a file."""

    tensor: int
    offset: int
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class BoxTable:
    """The boxes in one file: for each number of dimensions a table of (tensor, offset, start..., stop...)."""

    tables: Mapping[int, Table]

    @classmethod
    def of(cls, parts: Iterable[StoredBox]) -> "BoxTable":
        """Boxes as tables."""
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
    def unpack(cls, packed: Mapping[str, str], room: int) -> "BoxTable":
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

    def __iter__(self) -> Iterator[StoredBox]:
        for row in self.rows():
            dims = len(row) // 2 - 1
            yield StoredBox(row[0], row[1], Box(tuple(row[2 : 2 + dims]), tuple(row[2 + dims :])))

    @property
    def nbytes(self) -> int:
        """The memory of all tables."""
        return sum(table.nbytes for table in self.tables.values())

    def __len__(self) -> int:
        return sum(map(len, self.tables.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoxTable) and sorted(self.rows()) == sorted(other.rows())

    def __hash__(self) -> int:
        return len(self)

    def counted_in(self, places: Sequence[int]) -> "BoxTable":
        """The boxes with their tensors counted in another list."""
        order = numpy.array(places, dtype=numpy.int64)
        tables = {}
        for dims, table in self.tables.items():
            moved = tables[dims] = table.copy()
            moved[:, TENSOR] = order[table[:, TENSOR]]
        return BoxTable(tables)

    def without(self, seen: set[tuple[int, ...]]) -> "BoxTable":
        """Only boxes that were not seen before; all are seen afterwards."""
        kept = []
        for part in self:
            key = (part.tensor, *part.box.start, *part.box.stop)
            if key not in seen:
                seen.add(key)
                kept.append(part)
        return BoxTable.of(kept)

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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the run, as a whole."""

    kind: str
    """`model`, a state of the optimizer, `rng` or `client`."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it."""

    @property
    def key(self) -> tuple[str, str]:
        """What it is found by."""
        return self.kind, self.name

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One data file."""

    name: str
    size: int
    hashes: tuple[str, ...]
    """xxh3-128 of each chunk of the file, header included; the last chunk may be short."""
    parts: BoxTable


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed checkpoint."""

    id: str
    """Of the save; data files begin with it."""
    run: str
    """Of the run, the same after it is resumed."""
    tag: str
    step: int
    created: str
    tensors: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Plain data: configuration, versions, counters, positions, client state."""
    node: str = ""
    """Where there is no shared filesystem, the node whose files these are."""
    nodes: tuple[str, ...] = ()
    """All nodes that have committed the same save."""
    chunk: int = CHUNK

    @property
    def nbytes(self) -> int:
        """The size of all data files."""
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        """As JSON; the last line has the hash of all bytes before it."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "id": self.id,
            "run": self.run,
            "tag": self.tag,
            "step": self.step,
            "created": self.created,
            "node": self.node,
            "nodes": list(self.nodes),
            "chunk": self.chunk,
            "facts": self.facts,
            "tensors": [[each.kind, each.name, list(each.shape), each.dtype] for each in self.tensors],
            "files": [
                {
                    "name": file.name,
                    "size": file.size,
                    "hashes": file.hashes,
                    "parts": file.parts.pack(),
                }
                for file in self.files
            ],
        }
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        text = text[:-1] + b","
        return text + f'\n"hash":"{digest(text)}"}}\n'.encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str, room: int = LARGEST) -> "Manifest":
        """Read and check one; `where` is what an error calls it, `room` the most bytes that its tables may take."""
        last = _LAST.search(data)
        if last is None:
            raise CheckpointError(f"{where}: no manifest, or a torn one: it does not end with its hash")
        if digest(memoryview(data)[: last.start()]) != last.group(1).decode():
            raise CheckpointError(f"{where}: damaged: its bytes do not have the hash that it ends with")
        try:
            body = json.loads(data, object_pairs_hook=_once)
            return _manifest(body, room)
        except RecursionError:
            raise CheckpointError(f"{where}: no manifest: it is nested too deeply") from None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, zlib.error) as error:
            reason = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else error
            raise CheckpointError(f"{where}: no manifest of this format: {reason}") from None


def digest(data: bytes | bytearray | memoryview) -> str:
    """The hash by which all bytes of a checkpoint are checked."""
    return str(xxhash.xxh3_128_hexdigest(data))


def is_plain(name: object) -> bool:
    """Whether a name can only mean a file in the folder itself."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _manifest(body: Any, room: int) -> Manifest:
    if body["format"] != FORMAT:
        raise ValueError("another format")
    if body["version"] != VERSION:
        raise ValueError(f"version {body['version']!r}, and this program reads version {VERSION}: use a newer one")
    chunk = _whole(body["chunk"], low=1 << 12, high=1 << 26)
    tensors = tuple(_tensor(row) for row in body["tensors"])
    if len({each.key for each in tensors}) != len(tensors):
        raise ValueError("a tensor is there twice")
    shapes, sizes = _tables(tensors)
    files = []
    for row in body["files"]:
        file = _file(row, chunk, BoxTable.unpack(row["parts"], room))
        file.parts.check(shapes, sizes, file.size)
        room -= file.parts.nbytes
        files.append(file)
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is there twice")
    if not isinstance(body["facts"], dict):
        raise ValueError("facts is not a dict")
    return Manifest(
        id=_text(body["id"]),
        run=_text(body["run"]),
        tag=_text(body["tag"]),
        step=_whole(body["step"], high=LARGEST),
        created=_text(body["created"]),
        tensors=tensors,
        files=tuple(files),
        facts=body["facts"],
        node=_text(body["node"]),
        nodes=tuple(_text(node) for node in body["nodes"]),
        chunk=chunk,
    )


def _tensor(row: Any) -> TensorEntry:
    kind, name, shape, dtype = row
    if dtype not in DTYPES:
        raise ValueError(f"{name!r} has the unknown dtype {dtype!r}")
    if len(shape) > DIMENSIONS:
        raise ValueError(f"{name!r} has {len(shape)} dimensions")
    entry = TensorEntry(_text(kind), _text(name), tuple(_whole(size, high=LARGEST) for size in shape), dtype)
    if entry.nbytes > LARGEST:
        raise ValueError(f"{entry} is larger than anything")
    return entry


def _tables(tensors: Sequence[TensorEntry]) -> tuple[dict[int, Table], Table]:
    """The shapes of all tensors, one table for each number of dimensions, and the bytes of their elements."""
    shapes: dict[int, Table] = {}
    for number, entry in enumerate(tensors):
        dims = len(entry.shape)
        if dims not in shapes:
            shapes[dims] = numpy.full((len(tensors), dims), -1, dtype=numpy.int64)
        shapes[dims][number] = entry.shape
    return shapes, numpy.array([DTYPES[entry.dtype].itemsize for entry in tensors], dtype=numpy.int64)


def _file(row: Any, chunk: int, parts: BoxTable) -> FileEntry:
    name, size, hashes = row["name"], _whole(row["size"], high=LARGEST), row["hashes"]
    if not is_plain(name):
        raise ValueError(f"{str(name)[:80]!r} is not a plain file name")
    if len(hashes) != -(-size // chunk) or not all(isinstance(h, str) and _DIGEST.fullmatch(h) for h in hashes):
        raise ValueError(f"{name}: {len(hashes)} hashes for {size} bytes in chunks of {chunk}")
    return FileEntry(name, size, tuple(hashes), parts)


def _whole(value: Any, *, low: int = 0, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{str(value)[:40]} is not a whole number from {low} to {high}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST:
        raise ValueError(f"{str(value)[:40]!r} is not a text of at most {LONGEST} characters")
    return value
