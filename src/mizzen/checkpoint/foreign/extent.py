"""Ranges of bytes of a file, checked against the file before anything is allocated, and the folder they may lie in.

Nothing is mapped: a file that shrinks while it is read gives an error, not a signal. What the bytes mean is not known
here.
"""

import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

import torch
from torch import Tensor

from mizzen.checkpoint.read import SPARSE, SWELLING
from mizzen.errors import CheckpointError

CHUNK: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Extent:
    """`length` bytes of a file from `start`. An Extent never reaches beyond the end its file had when it was opened."""

    path: Path
    start: int
    length: int

    @classmethod
    def of_file(cls, path: Path) -> "Extent":
        """All of a regular file."""
        try:
            status = path.stat()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be opened: {error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file, so it is not read")
        return cls(path, 0, status.st_size)

    @property
    def solid(self) -> int:
        """The most bytes that may be read of it: those of a file with holes are more than it takes on the disk."""
        return min(self.length, SPARSE + SWELLING * self.path.stat().st_blocks * 512)

    def part(self, start: int, length: int, what: str) -> "Extent":
        """A range within this one; `what` is its name in the error."""
        if start < 0 or length < 0 or start + length > self.length:
            raise CheckpointError(
                f"{self.path}: {what} is said to be at bytes {start} to {start + length} of {self.length}: "
                "the file is truncated or damaged"
            )
        return Extent(self.path, self.start + start, length)

    def bytes(self, limit: int, what: str) -> bytes:
        """All of it, if there are at most `limit` bytes."""
        if self.length > limit:
            raise CheckpointError(f"{self.path}: {what} has {self.length:,} bytes; at most {limit:,} are read")
        return bytes(self.tensor(0, self.length).numpy())

    def tensor(self, start: int, length: int) -> Tensor:
        """Some bytes, as a tensor of uint8."""
        part = self.part(start, length, "a tensor")
        if length > SPARSE and length > part.solid:
            raise CheckpointError(
                f"{self.path}: {length:,} bytes of a file made of holes, which has far less on the disk; if it is "
                "meant, copy it with `cp --sparse=never`"
            )
        found = torch.empty(length, dtype=torch.uint8)
        view, done = found.numpy().data, 0
        try:
            with open(self.path, "rb", buffering=0, opener=_open_at_once) as file:
                file.seek(part.start)
                while done < length and (count := file.readinto(view[done : done + 2**30])):
                    done += count
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
        if done < length:
            raise CheckpointError(
                f"{self.path}: ends after {part.start + done} bytes; {part.start + length} are needed"
            )
        return found

    def chunks(self) -> Iterator[Tensor]:
        """All of it, a few megabytes at a time."""
        for start in range(0, self.length, CHUNK):
            yield self.tensor(start, min(CHUNK, self.length - start))


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: in the meantime somebody may have put a pipe in the place of a file."""
    return os.open(path, flags | os.O_NONBLOCK)


@dataclass(slots=True, eq=False)
class Storage:
    """The bytes behind one or more tensors. A checksum, where the file has one, is compared before the first use."""

    extent: Extent
    crc: int | None = None
    is_checked: bool = field(default=False, init=False)

    @property
    def length(self) -> int:
        """How many bytes there are."""
        return self.extent.length

    def tensor(self, start: int, length: int) -> Tensor:
        """Some bytes, as a tensor of uint8."""
        if self.crc is not None and not self.is_checked:
            check_crc(self.extent, self.crc)
        self.is_checked = True
        return self.extent.tensor(start, length)


def check_crc(extent: Extent, crc: int) -> None:
    """Compare a checksum with the bytes."""
    found = 0
    for chunk in extent.chunks():
        found = zlib.crc32(chunk.numpy().data, found)
    if found != crc:
        raise CheckpointError(
            f"{extent.path}: bytes {extent.start} to {extent.start + extent.length} are damaged: "
            f"their checksum is {found:08x}, not {crc:08x}"
        )


class Folder:
    """A checkpoint's folder. Nothing outside is opened: not by `..`, not by an absolute path, not through a link."""

    def __init__(self, path: Path, bound: Path | None = None) -> None:
        self.path = path
        self.bound = bound or _bound(path)

    def names(self) -> list[str]:
        """What is in it, in the order of the names."""
        try:
            return sorted(os.listdir(self.path))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be listed: {error}") from error

    def has(self, name: str) -> bool:
        """Whether there is a file of this name, wherever it may lead."""
        return (self.path / name).is_file()

    def file(self, name: str) -> Extent:
        """A file inside, by its relative path; `name` may come from the checkpoint itself."""
        return Extent.of_file(self.inside(name))

    def folder(self, name: str) -> "Folder":
        """A folder inside."""
        return Folder(self.inside(name), self.bound)

    def inside(self, name: str) -> Path:
        """The path of something inside, or an error."""
        pure = PurePosixPath(name)
        if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
            raise CheckpointError(
                f"{self.path}: refused to open {name!r}: a name must lead into the checkpoint's folder"
            )
        path = self.path / pure
        try:
            real = path.resolve()
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: cannot be opened: {error}") from error
        if not real.is_relative_to(self.bound):
            raise CheckpointError(
                f"{path}: a link to {real}, which is outside of {self.bound}; copy the checkpoint with its links "
                "followed (cp -rL) if that is meant"
            )
        return path


def _bound(path: Path) -> Path:
    """Where links may lead: the folder itself; in the cache of a model hub, the folder of that one model."""
    real = path.resolve()
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        return real.parent.parent
    return real
