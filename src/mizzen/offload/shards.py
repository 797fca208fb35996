"""Shards of parameters that rest outside the device between their uses: in host memory, or on NVMe.

A tensor stands for the shards where the device would have them: host memory itself, or for files one without memory.
They are fetched ahead of a use, on a stream of their own, used once, and given back by letting go of the copy.

[Note: who may overwrite what]
A copy on the device is allocated on the stream that computes, and filled on another one, which waits for the first:
whoever had that memory before is done with it. The stream that computes waits for the copy before it uses it, or lets
go of it. The host writes to host memory only after it has waited for the last copy that was made of it; the stream that
brings values from the device waits for that copy, too, and the one that fetches waits for these values.

A save beside training reads shards that nobody trains where they rest, in its own thread, as one of their readers.
Whoever has other values for them waits until no reader is left.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from mizzen.accelerator import get_accelerator
from mizzen.model.piece import Piece, Readers, Unread
from mizzen.offload.nvme import NvmeTier, ReadFiles
from mizzen.offload.places import ParameterSettings
from mizzen.offload.tier import DeviceCopy, HostTier, StepBeside, Transfer


class Shards(Protocol):
    """Shards of one dtype in one flat tensor. The engine's thread calls everything; that of the host's step `change`.

    fetch()         ahead of a use: start to bring them to the device
    here()          at the use: a copy on the device, which is the caller's
    let_go()        what was fetched is not used, or is old
    change(write)   after a step, or when somebody has written to them: `write(host memory)` sets new values
    look()          outside of a step: their values in host memory, until others are looked at
    readable(piece) outside of a step: a piece of them, for whoever reads or writes it, and for a save beside training
    """

    place: str
    """host or nvme."""
    stand: Tensor
    """What stands for them."""
    readers: Readers
    """Saves beside training that read them."""

    @property
    def beside(self) -> StepBeside | None:
        """The step whose values they are to have, which may go on until these are used; None where none may."""

    def fetch(self) -> None:
        """Start to bring them to the device, where there is room on the way."""

    def here(self) -> Tensor:
        """A copy on the device, for which later work of the current stream waits."""

    def let_go(self) -> None:
        """Forget what was fetched."""

    def change(self, write: Callable[[Tensor], object]) -> None:
        """Let somebody write to host memory that has their size, and keep what is there then."""

    def take(self, values: Tensor) -> None:
        """Keep new values, which are on the device."""

    def look(self) -> Tensor:
        """Their values in host memory, once no save reads them.

        What is written there is kept if the caller says so with `changed`.
        """

    def changed(self) -> None:
        """Something was written to what `look` has returned last."""

    def readable(self, piece: Piece) -> Piece:
        """A piece of them that is read from where they rest, beside training too."""


class ShardsOnHost:
    """Shards in host memory, where they are for life."""

    place: str = "host"

    def __init__(self, title: str, tier: HostTier, values: Tensor) -> None:
        self.tier = tier
        self.stand = tier.place(title, values)
        self._fetched: tuple[Tensor, DeviceCopy] | None = None
        self._read: DeviceCopy | None = None
        """The last copy that was made of them."""
        self._coming: DeviceCopy | None = None
        """New values on their way from the device."""
        self.readers = Readers()
        self.beside: StepBeside = StepBeside()
        self.masters_near: Callable[[], tuple[Tensor, DeviceCopy] | None] = _nowhere
        """The masters of these values, with their way to the device, where they were brought there ahead of a step."""
        self._is_written = False
        """Whether somebody has written other values than those of the masters, since these last came."""
        self.take(values)

    def fetch(self) -> None:
        """Start to copy them to the device, after the work that the current stream has now, if they are there."""
        if not self.beside.is_going_on:
            self._fetch()

    def _fetch(self) -> None:
        if self._fetched is not None:
            return
        near = None if self._is_written else self.masters_near()
        if near is not None and near[0].dtype != self.stand.dtype:  # who uses a copy may keep its memory
            self._fetched = near
            return
        if self._coming is not None:
            self._coming.wait_on_stream(self.tier.inward)
        into = torch.empty_like(self.stand, device=self.tier.accelerator.device())
        self._read = self.tier.copy_in(into, self.stand)
        self._fetched = into, self._read

    def here(self) -> Tensor:
        """What was fetched, or is now."""
        self.beside.wait()
        self._fetch()
        if (found := self._taken()) is None:
            raise AssertionError("nothing was fetched")
        return found

    def _taken(self) -> Tensor | None:
        fetched, self._fetched = self._fetched, None  # at once: the host may be about to say that it is old
        if fetched is None:
            return None
        into, copy = fetched
        copy.wait_on_stream()
        copy.forget()
        return into.to(self.stand.dtype)

    def let_go(self) -> None:
        """Its memory may be used for something else when the copy has come."""
        self._taken()

    def change(self, write: Callable[[Tensor], object]) -> None:
        """In place, when nobody reads it any more."""
        write(self.look())
        self.changed()
        self._is_written = False

    def take(self, values: Tensor) -> None:
        """Copy values from the device, after the work that the current stream has now.

        That stream may go on with rounded ones, which are the copy's own; others it might change before they have left.
        """
        self.beside.wait()
        self.readers.wait()
        self.let_go()
        if self._read is not None:
            self._read.wait_on_stream(self.tier.outward)
        self._is_written = False
        self._coming = self.tier.copy_out(self.stand, values.to(self.stand.dtype))
        if values.dtype == self.stand.dtype:
            self._coming.wait_on_stream()
        self._coming.forget()

    def look(self) -> Tensor:
        """The memory itself, once no save reads it and nothing is on its way from there or to it."""
        self.readers.wait()
        return self._at_rest()

    def _at_rest(self) -> Tensor:
        """The memory itself, once nothing is on its way from there or to it."""
        self.beside.wait()
        for copy in (self._read, self._coming):
            if copy is not None:
                copy.wait()
        self._read = self._coming = None
        return self.stand

    def changed(self) -> None:
        """What was fetched is old. Who looked at the memory has waited for its copy."""
        self._fetched, self._is_written = None, True

    def readable(self, piece: Piece) -> Piece:
        """In place, once nothing is on its way. What is of other memory, as shards in blocks are, stays as it is."""
        source, memory = piece.source, self._at_rest().untyped_storage()
        if type(source) is not Tensor or source.untyped_storage().data_ptr() != memory.data_ptr():
            return piece

        def load() -> Tensor:
            self._at_rest()
            return source

        def load_beside() -> Tensor:
            return source  # nothing is on its way to it while somebody reads

        shape, keep = tuple(source.shape), self.changed
        unread = Unread(shape, source.dtype, load, keep, load_beside=load_beside, readers=self.readers)
        return replace(piece, source=unread)


def _nowhere() -> None: ...


class Buffers:
    """Pieces of host memory of one size, through which shards pass on their way from NVMe and back."""

    def __init__(self, tier: HostTier, count: int, size: int) -> None:
        self.tier = tier
        self.count = count
        self.size = size
        """Bytes of each."""
        self._made = 0
        self._free: list[Tensor] = []
        self._leaving: deque[tuple[Tensor, Transfer]] = deque()
        """Those that something is read from, from the oldest on."""
        self._lock = Lock()

    def take(self, *, must: bool) -> Tensor | None:
        """One that nobody uses; None where all are in use, unless it `must` be: then there is one more."""
        with self._lock:
            if not self._free and self._made >= self.count and self._leaving:
                memory, transfer = self._leaving.popleft()
                transfer.wait()
                self._free.append(memory)
            if not self._free and (must or self._made < self.count):
                self._made += 1
                like = torch.empty(self.size, dtype=torch.uint8, device="meta")
                self._free.append(self.tier.place(f"buffer {self._made}", like))
            return self._free.pop() if self._free else None

    def give_back(self, memory: Tensor, after: Transfer | None = None) -> None:
        """It may be used again, perhaps after a transfer that reads it."""
        with self._lock:
            if after is None:
                self._free.append(memory)
            else:
                self._leaving.append((memory, after))


class ShardFiles(ReadFiles):
    """Files on NVMe, and the buffers on the way there."""

    def __init__(self, files: NvmeTier, buffers: Buffers) -> None:
        super().__init__(files)
        self.buffers = buffers

    def take_memory(self, size: int) -> Tensor:
        """A buffer, which there is always."""
        memory = self.buffers.take(must=True)
        if memory is None:
            raise AssertionError("a buffer must be there")
        return memory

    def give_back(self, memory: Tensor, after: Transfer | None = None) -> None:
        """It may be used again, perhaps after a transfer that reads it."""
        self.buffers.give_back(memory, after)


class ShardsOnNvme:
    """Shards in files. What is fetched is in a buffer of host memory, and is copied to the device when it is used."""

    place: str = "nvme"
    beside: StepBeside | None = None

    def __init__(self, title: str, files: ShardFiles, values: Tensor) -> None:
        self.title = title
        self.files = files
        self.stand = torch.empty_like(values, device="meta")
        self.size = values.numel() * values.element_size()
        self._fetched: tuple[Tensor, Transfer] | None = None
        self.readers = Readers(before=files.keep_changes, after=files.forget_beside)
        self.take(values)

    def fetch(self) -> None:
        """Start to read them, if there is a buffer."""
        self.files.keep_changes()
        if self._fetched is None:
            memory = self.files.buffers.take(must=False)
            if memory is not None:
                self._fetched = memory, self.files.files.read(self.title, memory[: self.size])

    def here(self) -> Tensor:
        """Wait for what is read, and copy it."""
        self.fetch()
        if self._fetched is None:
            memory = self.files.take_memory(self.size)
            self._fetched = memory, self.files.files.read(self.title, memory[: self.size])
        (memory, read), self._fetched = self._fetched, None
        read.wait()
        tier = self.files.buffers.tier
        into = torch.empty_like(self.stand, device=tier.accelerator.device())
        copy = tier.copy_in(into, self._values(memory))
        copy.wait_on_stream()
        copy.forget()
        self.files.give_back(memory, copy)
        return into

    def _values(self, memory: Tensor) -> Tensor:
        return memory[: self.size].view(self.stand.dtype).view(self.stand.shape)

    def let_go(self) -> None:
        """The buffer is free when the read is over."""
        if self._fetched is not None:
            (memory, read), self._fetched = self._fetched, None
            self.files.give_back(memory, read)

    def change(self, write: Callable[[Tensor], object]) -> None:
        """Write to a buffer, then from there to the files."""
        self.readers.wait()
        with self.files.lock:
            self.let_go()
            self.files.keep_changes()
            memory = self.files.take_memory(self.size)
            write(self._values(memory))
            self.files.give_back(memory, self.files.files.write(self.title, memory[: self.size]))

    def take(self, values: Tensor) -> None:
        """The host waits for the copy from the device: what is written to files has to be there."""
        self.change(lambda memory: memory.copy_(values))

    def look(self) -> Tensor:
        """In a buffer, until something else is looked at; once no save reads the files."""
        self.readers.wait()
        return self._values(self.files.look(self.title, self.size))

    def changed(self) -> None:
        """The buffer goes to the files before anything else is read."""
        self.let_go()
        self.files.change()

    def readable(self, piece: Piece) -> Piece:
        """Read when it is asked for."""
        source = piece.source
        if not isinstance(source, Tensor) or not source.is_meta:
            return piece

        def load() -> Tensor:
            return self._part(self.files.look(self.title, self.size), source)

        def load_beside() -> Tensor:
            return self._part(self.files.look_beside(self.title, self.size), source)

        shape, keep = tuple(source.shape), self.changed
        unread = Unread(shape, source.dtype, load, keep, load_beside=load_beside, readers=self.readers)
        return replace(piece, source=unread)

    def _part(self, memory: Tensor, stand: Tensor) -> Tensor:
        return self._values(memory).as_strided(stand.shape, stand.stride(), stand.storage_offset())


class ShardPlaces:
    """The tiers in which the shards of one store rest. A tier is made when the first shards come to it."""

    def __init__(self, settings: ParameterSettings, nvme_bytes: int = 0, largest: int = 0) -> None:
        self.settings = settings
        self.nvme_bytes = nvme_bytes
        """What is to rest on NVMe."""
        self.largest = largest
        """Bytes of the largest shards that do, which a buffer has to hold."""
        self._host: HostTier | None = None
        self._files: ShardFiles | None = None
        self._resting: list[Shards] = []

    def shards(self, place: str, title: str, values: Tensor) -> Shards:
        """Bring shards to their resting place."""
        if self._host is None:
            self._host = HostTier(get_accelerator(), pin=self.settings.pin)
        if place == "host":
            self._resting.append(ShardsOnHost(title, self._host, values))
            return self._resting[-1]
        if self._files is None:
            files = NvmeTier(self.settings.paths, self.settings.aio)
            files.reserve([self.nvme_bytes])
            self._files = ShardFiles(files, Buffers(self._host, self.settings.buffers, self.largest))
        self._resting.append(ShardsOnNvme(title, self._files, values))
        return self._resting[-1]

    def close(self) -> None:
        """Give all memory and files back, once nobody reads them for a save."""
        for each in self._resting:
            each.readers.wait()
        self._resting.clear()
        if self._files is not None:  # first, since threads use the buffers
            self._files.files.close()
        if self._host is not None:
            self._host.close()
        self._host = self._files = None
