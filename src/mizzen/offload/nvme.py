"""Tensors in files on one disk or several, read and written past the page cache by a pool of threads.

[Note: one space, cut into blocks]
The files are one space of bytes. Block i of it lies in file i mod n, so that what is larger than a block is read and
written on all disks at once. A name has one range of that space as long as its size stays. Ranges begin at multiples of
the alignment and are rounded up to it, so that every call can go past the page cache. Memory that is not aligned, and
the last bytes of a tensor whose length is not, pass through a buffer that each thread has.

[Note: never wrong data]
The length of every call is checked, and every file is looked at before each call: one that was removed or cut off is an
error. A hash of each block is kept in memory and compared when the block is read. After a write has failed, a read of
that name fails, too.
"""

import mmap
import threading
import weakref
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from mizzen.config.execution import AioConfig
from mizzen.errors import FileError, UsageError
from mizzen.files import free_bytes
from mizzen.offload.direct_files import ALIGNMENT, DirectFile, address, aligned
from mizzen.offload.swap_folder import SwapFolder
from mizzen.offload.tier import host_memory
from mizzen.offload.transfers import BlockTransfer, Transfers

FILE: Final = "states"
"""The name of the file in each swap folder."""


class Space:
    """Ranges of a space of bytes that grows at its end: the first gap that is large enough is taken."""

    def __init__(self) -> None:
        self.end = 0
        self._gaps: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """The start of a range of that size."""
        for place, (start, stop) in enumerate(self._gaps):
            if stop - start >= size:
                self._gaps[place : place + 1] = [(start + size, stop)] if stop - start > size else []
                return start
        start = self.end
        if self._gaps and self._gaps[-1][1] == start:
            start, _ = self._gaps.pop()
        self.end = start + size
        return start

    def give_back(self, start: int, size: int) -> None:
        """A range that nobody needs any more."""
        insort(self._gaps, (start, start + size))
        joined: list[tuple[int, int]] = []
        for first, last in self._gaps:
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        self._gaps = joined


@dataclass(slots=True)
class Resting:
    """What rests under a name: where, how long it is, and what its blocks were when they were written."""

    start: int
    size: int
    last: BlockTransfer | None = None
    """The transfer that was started last."""
    hashes: dict[int, int] = field(default_factory=dict)
    """Number of a block -> hash."""


class NvmeTransfer:
    """A tensor on its way to the files or from them. A failure says whose it was."""

    def __init__(self, blocks: BlockTransfer, text: str) -> None:
        self._blocks, self._text = blocks, text

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._blocks.is_over

    def wait(self) -> None:
        """Let the host wait until all bytes have arrived, and raise what went wrong."""
        with _said(self._text):
            self._blocks.wait()


@contextmanager
def _said(text: str) -> Iterator[None]:
    """Let an error of a file say what was done with it."""
    try:
        yield
    except FileError as error:
        failure = FileError(f"{error} ({text})")
        failure.errno = error.errno
        raise failure from error


class NvmeTier:
    """Tensors of the host in files: a `Tier`. The folders are new, and are removed with the tier or at exit."""

    name: str = "nvme"

    def __init__(self, paths: str | Path | Sequence[str | Path], aio: AioConfig | None = None) -> None:
        below = (paths,) if isinstance(paths, str | Path) else tuple(paths)
        if not below:
            raise UsageError("NVMe offload needs a path for its files: set nvme_path")
        aio = aio or AioConfig()
        self.block = aligned(aio.block_size)
        self._verify = aio.verify
        self._folders = [SwapFolder(path) for path in below]
        self._files: list[DirectFile] = []
        self._transfers = Transfers(aio.queue_depth * aio.intra_op_parallelism)
        self.close = weakref.finalize(self, _close, self._transfers, self._files, self._folders)
        """End what is under way, then give threads, files and folders back; again does nothing."""
        try:
            self._files += [DirectFile(folder.path / FILE, direct=aio.direct) for folder in self._folders]
        except BaseException:
            self.close()
            raise
        self._space = Space()
        self._resting: dict[str, Resting] = {}
        self._lock = threading.RLock()
        self._of_thread = threading.local()

    @property
    def is_direct(self) -> bool:
        """Whether all files are read and written past the page cache."""
        return all(file.is_direct for file in self._files)

    @property
    def used(self) -> int:
        """Bytes that rest here, in whole units of the alignment."""
        with self._lock:
            return sum(aligned(resting.size) for resting in self._resting.values())

    def reserve(self, sizes: Iterable[int]) -> None:
        """Let the files have room for tensors of these sizes before anything is written; too little is an error."""
        with self._lock:
            wanted = self._sizes(self._space.end + sum(map(aligned, sizes)))
            needed: dict[int, int] = {}
            for file, size in zip(self._files, wanted, strict=True):
                disk = file.path.stat().st_dev
                needed[disk] = needed.get(disk, 0) + max(size - file.size, 0)
                if needed[disk] > (free := free_bytes(file.path)):
                    raise FileError(
                        f"offload to NVMe needs {needed[disk]:,} bytes on the disk of {file.path.parents[1]}, and "
                        f"{free:,} are free there: make room, add a path to nvme_path, or offload less"
                    )
            self._grow(wanted)

    def _sizes(self, end: int) -> list[int]:
        """How long each file is when the space ends there."""
        blocks, count = -(-end // self.block), len(self._files)
        return [-(-(blocks - place) // count) * self.block for place in range(count)]

    def _grow(self, sizes: Iterable[int]) -> None:
        for file, size in zip(self._files, sizes, strict=True):
            file.allocate(size)

    def write(self, name: str, tensor: Tensor) -> NvmeTransfer:
        """Start to write a tensor of the host, which must not change until that is over."""
        memory = _memory(tensor, name)
        text = f"while '{name}' was written to NVMe"
        with self._lock, _said(text):
            resting = self._place(name, memory.nbytes)
            blocks = self._blocks(resting)

            def write(number: int) -> None:
                self._write_block(resting, blocks[number], memory)

            resting.last = self._transfers.start(len(blocks), write, after=resting.last)
            return NvmeTransfer(resting.last, text)

    def read(self, name: str, into: Tensor) -> NvmeTransfer:
        """Start to read what rests under a name into a tensor of the host."""
        memory = _memory(into, name)
        with self._lock:
            resting = self._found(name)
            if memory.nbytes != resting.size:
                raise UsageError(f"'{name}' has {resting.size:,} bytes on NVMe, and the tensor {memory.nbytes:,}")
            blocks = self._blocks(resting)

            def read(number: int) -> None:
                self._read_block(resting, blocks[number], memory)

            resting.last = self._transfers.start(len(blocks), read, after=resting.last)
            return NvmeTransfer(resting.last, f"while '{name}' was read from NVMe")

    def drop(self, name: str) -> None:
        """Forget what rests under a name, once nothing of it is on its way."""
        with self._lock:
            resting = self._resting.pop(name, None)
            if resting is not None:
                _let_end(resting.last)
                self._space.give_back(resting.start, aligned(resting.size))

    def _found(self, name: str) -> Resting:
        if name not in self._resting:
            raise UsageError(f"nothing rests on NVMe under '{name}'")
        return self._resting[name]

    def _place(self, name: str, size: int) -> Resting:
        found = self._resting.get(name)
        if found is not None and found.size == size:
            return found
        self.drop(name)
        start = self._space.take(aligned(size))
        try:
            self._grow(self._sizes(self._space.end))
        except FileError:
            self._space.give_back(start, aligned(size))
            raise
        self._resting[name] = Resting(start, size)
        return self._resting[name]

    def _blocks(self, resting: Resting) -> range:
        """The blocks of the space that a tensor touches."""
        return range(resting.start // self.block, -(-(resting.start + resting.size) // self.block))

    def _where(self, resting: Resting, number: int) -> tuple[DirectFile, int, int, int]:
        """File and place of a block, and which bytes of the tensor lie there."""
        begin = max(number * self.block, resting.start)
        end = min((number + 1) * self.block, resting.start + resting.size)
        row, column = divmod(number, len(self._files))
        offset = row * self.block + begin - number * self.block
        return self._files[column], offset, begin - resting.start, end - resting.start

    def _write_block(self, resting: Resting, number: int, memory: memoryview) -> None:
        file, offset, first, last = self._where(resting, number)
        part = memory[first:last]
        file.check()
        if self._verify:
            resting.hashes[number] = xxhash.xxh3_64_intdigest(part)
        if not _fits(part):
            whole = self._buffer(aligned(part.nbytes))
            whole[: part.nbytes] = part
            part = whole
        file.write_from(part, offset)

    def _read_block(self, resting: Resting, number: int, memory: memoryview) -> None:
        file, offset, first, last = self._where(resting, number)
        part = memory[first:last]
        file.check()
        if _fits(part):
            file.read_into(part, offset)
        else:
            whole = self._buffer(aligned(part.nbytes))
            file.read_into(whole, offset)
            part[:] = whole[: part.nbytes]
        if self._verify and xxhash.xxh3_64_intdigest(part) != resting.hashes[number]:
            raise FileError(
                f"read {file.path} at byte {offset:,}: these {part.nbytes:,} bytes are not what was written there"
            )

    def _buffer(self, size: int) -> memoryview:
        """Aligned memory of the thread that asks."""
        held = vars(self._of_thread)
        if "memory" not in held:
            held["memory"] = memoryview(mmap.mmap(-1, self.block))
        found: memoryview = held["memory"]
        return found[:size]


class ReadFiles:
    """What is read of files outside of a step: one tensor at a time, in host memory of a subclass.

    look(name, size)         the bytes that rest under a name, until something else is looked at
    change()                 somebody has written to them
    keep_changes()           let go of them; what was written goes to the files
    look_beside(name, size)  for the thread of a save alone, in memory of its own, until it looks at something else
    forget_beside()          that save has read all that it wants
    """

    def __init__(self, files: NvmeTier) -> None:
        self.files = files
        self.lock = threading.RLock()
        """The engine's thread and that of the host's step take turns."""
        self._seen: tuple[str, Tensor, int] | None = None
        """What is looked at: its name, the memory that it is in, and its bytes."""
        self._is_changed = False
        self._seen_beside: tuple[str, Tensor] | None = None

    def take_memory(self, size: int) -> Tensor:
        """Memory of so many bytes, or more."""
        raise NotImplementedError

    def give_back(self, memory: Tensor, after: NvmeTransfer | None = None) -> None:
        """Nobody uses that memory any more, but for a transfer that reads it."""
        raise NotImplementedError

    def look(self, name: str, size: int) -> Tensor:
        """The bytes that rest under a name, until something else is looked at."""
        if self._seen is None or self._seen[0] != name:
            self.keep_changes()
            memory = self.take_memory(size)
            self.files.read(name, memory[:size]).wait()
            self._seen = name, memory, size
        return self._seen[1][:size]

    def change(self) -> None:
        """Somebody has written to what is looked at."""
        self._is_changed = True

    def keep_changes(self) -> None:
        """Let go of what is looked at; what was written to it goes to the files."""
        with self.lock:
            if self._seen is None:
                return
            (name, memory, size), self._seen = self._seen, None
            write = self.files.write(name, memory[:size]) if self._is_changed else None
            self._is_changed = False
            self.give_back(memory, write)

    def look_beside(self, name: str, size: int) -> Tensor:
        """The bytes that rest under a name, for the thread of a save, until it looks at something else."""
        if self._seen_beside is None or self._seen_beside[0] != name:
            before, self._seen_beside = self._seen_beside, None  # what is read over an older content is neither
            memory = before[1] if before is not None and before[1].numel() == size else host_memory(size)
            self.files.read(name, memory).wait()
            self._seen_beside = name, memory
        return self._seen_beside[1]

    def forget_beside(self) -> None:
        """A save beside training has read all that it wants."""
        self._seen_beside = None


def _close(transfers: Transfers, files: list[DirectFile], folders: list[SwapFolder]) -> None:
    """Threads first: they use the files."""
    transfers.close()
    for file in files:
        file.close()
    for folder in folders:
        folder.close()


def _let_end(transfer: BlockTransfer | None) -> None:
    if transfer is not None:
        transfer.wait_for_end()


def _fits(part: memoryview) -> bool:
    """Whether a memory can be read and written past the page cache as it is."""
    return not (address(part) | part.nbytes) % ALIGNMENT


def _memory(tensor: Tensor, name: str) -> memoryview:
    """The bytes of a tensor of the host."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise UsageError(
            f"'{name}' lies on {tensor.device}{'' if tensor.is_contiguous() else ', and not in one piece'}: NVMe takes "
            "contiguous tensors of the host"
        )
    if not tensor.numel():
        return memoryview(bytearray())
    whole: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(whole)
