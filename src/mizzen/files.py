"""Every file operation that must not lose data: durable new files, one-rename commits, folders that survive a crash.

Nothing here overwrites: a new file is refused where one exists, and only `replace` and `commit_*` take the place of an
old file, by a rename after the new bytes are on disk. Each operation passes through `perform`, so that a test can fail
it or kill the process right before it (`watched`). What the files mean is the business of those who call.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Final, Literal, TypeVar, TypeVarTuple

from mizzen.ambient import AMBIENT
from mizzen.errors import FileError

Operation = Literal[
    "open",
    "write",
    "fsync",
    "close",
    "rename",
    "unlink",
    "rmdir",
    "mkdir",
    "listdir",
    "read",
    "stat",
    "statfs",
    "allocate",
    "lock",
]
Hook = Callable[[Operation, Path], None]
Chunk = bytes | bytearray | memoryview
Result = TypeVar("Result")
Given = TypeVarTuple("Given")

BESIDE: Final = ".new"
"""The suffix of a file that is not committed yet; one that a crash has left may be removed."""
ABANDONED: Final = 3600.0
"""Seconds after the last write to a file beside another, when whoever wrote it counts as dead."""


@contextmanager
def watched(hook: Hook) -> Iterator[None]:
    """Call `hook(operation, path)` before each operation, in every thread. An OSError it raises is the operation's."""
    before, AMBIENT.file_hook = AMBIENT.file_hook, hook
    try:
        yield
    finally:
        AMBIENT.file_hook = before


def perform(
    operation: Operation,
    path: Path,
    call: Callable[[*Given], Result],
    *given: *Given,
    needed: int = 0,
    offset: int | None = None,
) -> Result:
    """Make one call to the system. Where it fails, the error names operation, file, cause and, if given, the place.

    `needed` is how many bytes were still to be written, for the words about a disk that is full.
    """
    try:
        if AMBIENT.file_hook is not None:
            AMBIENT.file_hook(operation, path)
        return call(*given)
    except OSError as error:
        raise _failure(operation, path, error, needed, offset) from error


def _failure(operation: Operation, path: Path, error: OSError, needed: int, offset: int | None) -> FileError:
    place = "" if offset is None else f" at byte {offset:,}"
    text = f"{operation} {path}{place}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        text += f"; {needed:,} bytes were still to be written and the filesystem has {_room(path):,} free"
    failure = FileError(text)
    failure.errno = error.errno
    return failure


def write_chunks(path: str | Path, chunks: Iterable[Chunk], *, fsync: bool = True) -> int:
    """Write a new file and return its size; on an error no file is left.

    The file's name is durable only after `fsync_folder` of its folder: once for all the files that were written there.
    """
    path = Path(path)
    file = perform("open", path, _create, path)
    try:
        with file:
            size = 0
            for chunk in chunks:
                size += _write(file, path, memoryview(chunk))
                del chunk  # what it belongs to may go before the next is read
            if fsync:
                perform("fsync", path, os.fsync, file.fileno())
            # Network filesystems report at the close what they could not write.
            perform("close", path, file.close)
    except BaseException:
        with suppress(FileError):
            remove(path)
        raise
    return size


def _create(path: Path) -> FileIO:
    return path.open("xb", buffering=0)


def _write(file: FileIO, path: Path, chunk: memoryview) -> int:
    """Write all of a chunk: the system may take less than it is given, and never takes more than 2 GiB at once."""
    if not chunk.nbytes:
        return 0
    rest = chunk.cast("B")
    while rest.nbytes:
        rest = rest[perform("write", path, file.write, rest, needed=rest.nbytes) :]
    return chunk.nbytes


def write_bytes(path: str | Path, data: Chunk, *, fsync: bool = True) -> int:
    """Write a new file in one piece; see `write_chunks`."""
    return write_chunks(path, (data,), fsync=fsync)


def replace(source: str | Path, target: str | Path) -> None:
    """Give `source` the name `target`, in place of what is there, durably. `source` itself must be on disk already.

    When the last fsync fails, the new name is visible but may not survive a crash.
    """
    source, target = Path(source), Path(target)
    perform("rename", target, os.replace, source, target)
    fsync_folder(target.parent)
    if source.parent != target.parent:
        fsync_folder(source.parent)


def temporary(path: str | Path) -> Path:
    """A name beside a file for what is not committed yet: each call gives another, in every process and thread."""
    path = Path(path)
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}{BESIDE}")


def commit_bytes(path: str | Path, data: Chunk) -> None:
    """Write or replace a file at once: whoever looks, after a crash too, sees all of the old content or of the new."""
    path = Path(path)
    beside = temporary(path)
    write_bytes(beside, data)
    _move_into_place(beside, path)


def _move_into_place(beside: Path, path: Path) -> None:
    try:
        replace(beside, path)
    except BaseException:
        with suppress(FileError):
            remove(beside, missing_ok=True)
        raise


def commit_chunks(path: str | Path, chunks: Iterable[Chunk]) -> None:
    """Write or replace a large file at once, chunk by chunk; what dead writers have left beside it is removed."""
    path = Path(path)
    _clear(path)
    beside = temporary(path)
    write_chunks(beside, chunks)
    _move_into_place(beside, path)


@contextmanager
def committing(path: str | Path) -> Iterator[BufferedWriter]:
    """A file to write to, which takes its place at the end, or never if that fails; see `commit_chunks`."""
    path = Path(path)
    _clear(path)
    beside = temporary(path)
    file = perform("open", beside, beside.open, "xb")
    try:
        with file:
            yield file
            perform("write", beside, file.flush)
            perform("fsync", beside, os.fsync, file.fileno())
        replace(beside, path)
    except BaseException:
        with suppress(FileError):
            remove(beside, missing_ok=True)
        raise


def _clear(path: Path) -> None:
    """Remove what processes that died have left beside a file; what somebody may still be writing stays."""
    left = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{16}}{re.escape(BESIDE)}")
    for found in list_folder(path.parent):
        with suppress(OSError):  # it may be gone, or not ours to remove
            if left.fullmatch(found.name) and time.time() - found.lstat().st_mtime > ABANDONED:
                remove(found)


def commit_text(path: str | Path, text: str) -> None:
    """Write or replace a text file at once; see `commit_bytes`."""
    commit_bytes(path, text.encode())


def remove(path: str | Path, *, missing_ok: bool = False) -> None:
    """Remove a file. After a crash it may be there again, unless its folder was flushed."""
    path = Path(path)
    perform("unlink", path, path.unlink, missing_ok)


def remove_folder(path: str | Path) -> None:
    """Remove a folder and all that is in it; links are removed, not followed."""
    folder = Path(path)
    for entry in list_folder(folder):
        if entry.is_dir() and not entry.is_symlink():
            remove_folder(entry)
        else:
            remove(entry)
    perform("rmdir", folder, folder.rmdir)


def make_folder(path: str | Path) -> None:
    """Make a folder and those above it, durably; one that is there already is fine."""
    folder = Path(path)
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        perform("mkdir", folder, folder.mkdir)
    except FileError as error:
        # Another rank may have made it in the meantime.
        if error.errno != errno.EEXIST or not folder.is_dir():
            raise
    fsync_folder(folder.parent)


def list_folder(path: str | Path) -> list[Path]:
    """What is in a folder, in the order of the names."""
    folder = Path(path)
    return sorted(folder / name for name in perform("listdir", folder, os.listdir, folder))


def fsync_folder(path: str | Path) -> None:
    """Make the names in a folder durable."""
    folder = Path(path)
    perform("fsync", folder, _flush_names, folder)


def _flush_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network filesystems know no flush of a folder: there a name is as durable as they make it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def read_head(path: str | Path, most: int) -> bytes:
    """The first bytes of a regular file, at most so many."""
    with Reading(path) as file:
        data = bytearray(min(file.size, most))
        file.read_into(memoryview(data), 0)
    return bytes(data)


class Reading:
    """A regular file that is open for reading at any place; a link, a pipe or a device in its stead is refused."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptor = -1
        self._descriptor = perform("open", self.path, _open_regular, self.path)
        status = os.fstat(self._descriptor)
        self.size, self.on_disk = status.st_size, status.st_blocks * 512

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill a memory with the bytes from a place on; that there are fewer is an error."""
        while target.nbytes:
            count = perform("read", self.path, os.preadv, self._descriptor, [target], offset)
            if not count:
                raise FileError(f"read {self.path}: it ends at byte {offset:,}, before {target.nbytes:,} more bytes")
            target, offset = target[count:], offset + count

    def held(self) -> int:
        """The bytes that are there and not in holes, as far as the filesystem knows holes."""
        found = place = 0
        try:
            while place < self.size:
                start = os.lseek(self._descriptor, place, os.SEEK_DATA)
                place = os.lseek(self._descriptor, start, os.SEEK_HOLE)
                found += place - start
        except OSError as error:
            return found if error.errno == errno.ENXIO else self.size  # all that is left is a hole
        return found

    def close(self) -> None:
        """Let it go; a second time does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _open_regular(path: Path) -> int:
    # Without O_NONBLOCK the open of a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return descriptor


def free_bytes(path: str | Path) -> int:
    """How much may still be written where `path` is or would be."""
    path = Path(path)
    return perform("statfs", path, _room, path)


def _room(path: Path) -> int:
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
