"""Files that `torch.save` wrote, read without running anything: a tree of plain data whose tensors are still on disk.

Both of torch's formats are read: the zip file, and the older row of pickles with the storages behind them. Of a
zip file only stored members are read, so that its contents are never larger than the file. Names are compared, never
opened.
"""

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from mizzen.checkpoint.foreign import pickles
from mizzen.checkpoint.foreign.extent import Extent, Storage, check_crc
from mizzen.checkpoint.foreign.pickle_calls import TypedStorage, Unreadable, storage_dtype
from mizzen.checkpoint.foreign.values import DTYPES, Name, expect
from mizzen.errors import CheckpointError

TABLE: Final = 64 * 2**20
"""How many bytes the table of contents of a zip file may have: about 600,000 members."""
LOCAL: Final = struct.Struct("<4s5H3I2H")
"""What stands before each member of a zip file; the last two are lengths of what else comes before the data."""
PICKLE: Final = 256 * 2**20
"""How many bytes the pickle in a file may have; the tensors are not in it."""
KEY: Final = 200
"""How many characters the key of a storage may have; torch counts them."""
MAGIC: Final = 0x1950A86A20F9469CFC6C


def load(file: Extent, *, inert: tuple[str, ...] = ()) -> object:
    """The tree in a file of torch's."""
    head = file.part(0, min(file.length, 4), "its beginning").bytes(4, "its beginning")
    if head == b"PK\x03\x04":
        return _load_zip(file, inert)
    if head[:1] == b"\x80":
        return _load_legacy(file, inert)
    raise CheckpointError(
        f"{file.path}: not a file that torch.save wrote: it begins with {head!r} ({file.length} bytes)"
    )


@dataclass(frozen=True, slots=True)
class ZipMember:
    """One file inside a zip file: where its bytes are, and its checksum unless the writer left it out."""

    extent: Extent
    crc: int | None


class _ExtentFile(io.RawIOBase):
    """An Extent as a file for `zipfile`, which reads the table of contents in one piece."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._extent.length}[whence]
        if at < 0:
            raise OSError(f"byte {at} was asked for")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._extent.length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = self._extent.part(min(self._at, self._extent.length), count, "the end").bytes(
            TABLE, "its table of contents"
        )
        self._at += count
        return data


def zip_members(file: Extent) -> dict[str, ZipMember]:
    """Name -> member. Members are checked against the file and each other before any is used."""
    try:
        with zipfile.ZipFile(_ExtentFile(file), metadata_encoding="utf-8") as archive:
            rows = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, OverflowError, struct.error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{file.path}: begins like a zip file and does not end like one: it is truncated or damaged: {error}"
        ) from error
    found: dict[str, ZipMember] = {}
    for row in rows:
        name = row.orig_filename
        if name in found:
            raise CheckpointError(f"{file.path}: has two members named {name!r}")
        if name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
            raise CheckpointError(f"{file.path}: refused: it has a member named {name!r}, which leads out of it")
        if row.compress_type or row.compress_size != row.file_size or row.flag_bits & 1:
            raise CheckpointError(f"{file.path}: {name!r} is compressed or encrypted, which torch never does")
        local = file.part(row.header_offset, LOCAL.size, repr(name)).bytes(LOCAL.size, repr(name))
        signature, *_, name_length, extra_length = LOCAL.unpack(local)
        if signature != b"PK\x03\x04":
            raise CheckpointError(f"{file.path}: {name!r} is not where the table of contents says")
        start = row.header_offset + LOCAL.size + name_length + extra_length
        found[name] = ZipMember(file.part(start, row.file_size, repr(name)), row.CRC or None)
    return found


def _load_zip(file: Extent, inert: tuple[str, ...]) -> object:
    contents = zip_members(file)
    prefixes = [
        name.removesuffix("data.pkl") for name in contents if name.count("/") == 1 and name.endswith("/data.pkl")
    ]
    if len(prefixes) != 1:
        raise CheckpointError(f"{file.path}: a zip file with {len(prefixes)} members named data.pkl; torch's have one")
    prefix = prefixes[0]
    if f"{prefix}constants.pkl" in contents:
        raise CheckpointError(f"{file.path}: a TorchScript program, not a checkpoint; save a state dict instead")
    order = contents.get(f"{prefix}byteorder")
    if order is not None and order.extent.bytes(16, "byteorder") != b"little":
        raise CheckpointError(f"{file.path}: was written on a big-endian computer, which is not supported")
    stream = contents[f"{prefix}data.pkl"]
    data = stream.extent.bytes(PICKLE, "its pickle")
    if stream.crc is not None:
        check_crc(stream.extent, stream.crc)
    storages = _Storages(contents, f"{prefix}data/")
    tree, _ = pickles.load(data, str(file.path), packages=inert, persistent=storages.find)
    return tree


class _Storages:
    """The storages of a zip file by the key that its pickle has for them."""

    def __init__(self, contents: Mapping[str, ZipMember], prefix: str) -> None:
        self.contents = contents
        self.prefix = prefix
        self.known: dict[str, Storage] = {}

    def find(self, reference: object) -> TypedStorage:
        key, dtype, numel = _reference(reference)
        member = self.contents.get(self.prefix + key)
        if member is None:
            raise Unreadable(f"there is no storage {key[:80]!r}")
        if numel * dtype.itemsize > member.extent.length:
            raise Unreadable(f"storage {key!r} should have {numel} of {dtype}; it has {member.extent.length} bytes")
        return TypedStorage(self.known.setdefault(key, Storage(member.extent, member.crc)), dtype)


def _reference(reference: object) -> tuple[str, torch.dtype, int]:
    """Key, dtype and number of elements from ("storage", class, key, device, number of elements)."""
    match reference:
        case ("storage", kind, str() as key, str(), int() as numel, *_) if isinstance(kind, Name | torch.dtype):
            if isinstance(kind, Name):
                kind = DTYPES[f"torch.{storage_dtype(kind) or 'uint8'}"]
            if numel >= 0 and len(key) <= KEY:
                return key, kind, numel
    raise Unreadable("a reference to something that is no storage")


def _load_legacy(file: Extent, inert: tuple[str, ...]) -> object:
    """Pickles of a magic number, a version, facts of the writer's computer, the tree, and the keys of the storages.

    Then come the storages in the order of the keys, each after the number of its elements.
    """
    data = file.part(0, min(file.length, PICKLE), "its pickles").bytes(PICKLE, "its pickles")
    where, at = str(file.path), 0
    magic, at = pickles.load(data, where, at=at)
    if magic != MAGIC:
        raise CheckpointError(f"{file.path}: a pickle, but not one of a file that torch.save wrote")
    _, at = pickles.load(data, where, at=at)
    facts, at = pickles.load(data, where, at=at)
    if not isinstance(facts, dict) or facts.get("little_endian") is not True:
        raise CheckpointError(f"{file.path}: was written on a big-endian computer, which is not supported")
    known: dict[str, tuple[Storage, torch.dtype]] = {}

    def find(reference: object) -> TypedStorage:
        key, dtype, numel = _reference(reference)
        if isinstance(reference, tuple) and len(reference) > 5 and reference[5] is not None:
            raise Unreadable("a storage that is part of another one, as torch 0.1 wrote them")
        # Where it is becomes known after the pickle; until then its length is what the pickle says.
        if numel * dtype.itemsize > file.length:
            raise Unreadable(f"storage {key!r} should have {numel} of {dtype}; the file has {file.length} bytes")
        storage = Storage(Extent(file.path, 0, numel * dtype.itemsize))
        return TypedStorage(known.setdefault(key, (storage, dtype))[0], dtype)

    tree, at = pickles.load(data, where, packages=inert, persistent=find, at=at)
    keys, at = pickles.load(data, where, at=at)
    for key in expect(keys, list, f"{file.path}: the keys of its storages"):
        storage, dtype = known.get(expect(key, str, f"{file.path}: the key of a storage")) or _unknown(file, key)
        (numel,) = struct.unpack("<q", file.part(at, 8, f"storage {key!r}").bytes(8, "a number"))
        if numel * dtype.itemsize != storage.length:
            raise CheckpointError(
                f"{file.path}: storage {key!r} has {numel} elements of {dtype}, not {storage.length} bytes"
            )
        storage.extent = file.part(at + 8, storage.length, f"storage {key!r}")
        at += 8 + storage.length
        known.pop(key)
    if known:
        raise CheckpointError(f"{file.path}: {len(known)} storages are missing")
    return tree


def _unknown(file: Extent, key: str) -> tuple[Storage, torch.dtype]:
    raise CheckpointError(f"{file.path}: has a storage {key[:80]!r} that no tensor uses")
