"""A tier is a resting place outside the device for the bytes of named tensors: host memory here, NVMe in `nvme.py`.

What rests where is decided elsewhere (`places.py`), and so is when it moves.
"""

import mmap
from collections.abc import Callable
from threading import Lock
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from mizzen.accelerator.protocol import Accelerator
from mizzen.errors import UsageError

HUGE_PAGE: Final = 1 << 21
"""Memory of at least this size is mapped in huge pages, where the system has them: locking it is then much faster."""


class Transfer(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """Let the host wait until they have arrived; raises what went wrong on the way, with the name of the tensor."""


class Tier(Protocol):
    """A resting place. The engine's thread and the thread of the host's step call it, each for names of its own.

    write(name, tensor)   the bytes of a tensor come to rest under a name; it must not change until the transfer is over
    read(name, into)      the bytes that rest under a name come into a tensor of the same dtype and number of elements
    drop(name)            nobody needs them any more
    close()               give everything back; the tier is not used afterwards

    A tensor is contiguous. The host tier takes tensors of the host and of the device. The NVMe tier takes those of the
    host only, and reads and writes without a copy those that `host_memory` gave. Transfers of one name are in order.
    """

    name: str
    """What the tier is called in plans and messages: host or nvme."""

    @property
    def used(self) -> int:
        """Bytes that rest here, with what is lost to whole pages or blocks."""

    def write(self, name: str, tensor: Tensor) -> Transfer:
        """Start to bring the bytes of a tensor here, in place of what has rested under that name."""

    def read(self, name: str, into: Tensor) -> Transfer:
        """Start to bring what rests under a name into a tensor."""

    def drop(self, name: str) -> None:
        """Forget what rests under a name."""

    def close(self) -> None:
        """Wait for what is on its way, then give all memory, files and threads back."""


class DeviceCopy:
    """A copy that was started on a stream of the device: a `Transfer`."""

    def __init__(self, accelerator: Accelerator, *kept: Tensor) -> None:
        self._kept = kept
        self._event = accelerator.event()
        self._event.record()

    def wait(self) -> None:
        """Let the host wait."""
        self._event.synchronize()

    def wait_on_stream(self) -> None:
        """Let later work of the current stream wait; the host does not."""
        self._event.wait()


def host_memory(size: int) -> Tensor:
    """So many bytes of host memory in whole pages of their own, zeros: never rounded up to a power of two."""
    length = max(size, 1)
    mapping = mmap.mmap(-1, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE)
    if length >= HUGE_PAGE and "MADV_HUGEPAGE" in vars(mmap):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[:size]


class HostTier:
    """Tensors in host memory, page-locked where the device copies faster from there. The step may run in place."""

    name: str = "host"

    def __init__(self, accelerator: Accelerator, *, pin: bool = True) -> None:
        self.accelerator = accelerator
        self.pin = pin
        self.inward, self.outward = accelerator.stream(), accelerator.stream()
        """Streams for copies to the device and from it: both ways at once."""
        self._entering = Lock()
        self._held: dict[str, Tensor] = {}
        self._unlock: dict[str, Callable[[], None]] = {}

    @property
    def used(self) -> int:
        """Bytes in whole pages."""
        pages = (-(-max(held.numel() * held.element_size(), 1) // mmap.PAGESIZE) for held in self._held.values())
        return sum(pages) * mmap.PAGESIZE

    @property
    def locked(self) -> int:
        """Bytes of page-locked memory, which the system cannot swap."""
        return sum(self._held[name].numel() * self._held[name].element_size() for name in self._unlock)

    def place(self, name: str, like: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a tensor of a shape and dtype under a name, where it rests for life; zeros when it is new."""
        dtype = dtype or like.dtype
        found = self._held.get(name)
        if found is not None and found.shape == like.shape and found.dtype == dtype:
            return found
        self.drop(name)
        memory = host_memory(like.numel() * torch.empty((), dtype=dtype).element_size())
        if self.pin and self.accelerator.lock_pages is not None and memory.numel():
            memory.zero_()  # every page is there, by all threads, before they are locked one after the other
            self._unlock[name] = self.accelerator.lock_pages(memory)
        self._held[name] = memory.view(dtype).view(like.shape)
        return self._held[name]

    def held(self, name: str) -> Tensor:
        """What rests under a name, in place."""
        if name not in self._held:
            raise UsageError(f"nothing rests in host memory under '{name}'")
        return self._held[name]

    def write(self, name: str, tensor: Tensor) -> DeviceCopy:
        """Copy a tensor here, after the work that the current stream has now."""
        return self.copy_out(self.place(name, tensor), tensor)

    def read(self, name: str, into: Tensor) -> DeviceCopy:
        """Copy what rests here into a tensor, after the work that the current stream has now."""
        return self.copy_in(into, self.held(name).view(into.shape))

    def copy_out(self, place: Tensor, value: Tensor) -> DeviceCopy:
        """Copy a tensor to host memory, after the work that the current stream has now."""
        return self._copy(place, value, self.outward)

    def copy_in(self, into: Tensor, source: Tensor, *, after_current: bool = True) -> DeviceCopy:
        """Copy host memory to the device, after the work that the current stream has now, unless told not to."""
        return self._copy(into, source, self.inward, after_current=after_current)

    def _copy(self, into: Tensor, source: Tensor, stream: Any, *, after_current: bool = True) -> DeviceCopy:
        if after_current:
            stream.wait_stream(self.accelerator.current_stream())
        # A stream remembers in itself what to return to: two threads must not be inside of one at the same time.
        with self._entering, stream, torch.no_grad():
            into.copy_(source, non_blocking=True)
            return DeviceCopy(self.accelerator, into, source)

    def drop(self, name: str) -> None:
        """Forget what rests under a name."""
        if (unlock := self._unlock.pop(name, None)) is not None:
            unlock()
        self._held.pop(name, None)

    def close(self) -> None:
        """Unlock and forget everything, once the device has done its copies."""
        self.inward.synchronize()
        self.outward.synchronize()
        for name in list(self._held):
            self.drop(name)
