"""A tier is a resting place outside the device for the bytes of named tensors: host memory here, NVMe in `nvme.py`.

What rests where is decided elsewhere (`places.py`), and so is when it moves.
"""

import mmap
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock, current_thread, get_ident
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from mizzen.accelerator.protocol import Accelerator, Stream
from mizzen.accelerator.streams import hold
from mizzen.errors import UsageError
from mizzen.offload.paced import Pacer

HUGE_PAGE: Final = 1 << 21
"""Memory of at least this size is mapped in huge pages, where the system has them: locking it is then much faster."""

RESERVE: Final = 8
"""One part of so many of the device's memory is left to others when something is brought there ahead of its use."""

TENSORS_PER_GRADIENT: Final = 2
"""How many start on their way to the device with each complete gradient, where parameters come the same way."""
LOCKING: Final = 8
"""Threads that lock pages ahead."""
LOCKING_THREAD: Final = "mizzen-lock"

Locked = tuple[Tensor, Callable[[], None]]
"""Memory, and what unlocks it."""


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


@dataclass(slots=True)
class StepNeeds:
    """Bytes of the device that the next step takes, and that are free until then."""

    passing: int = 0
    """For the largest lot that passes through the device, with its gradient."""
    new_states: int = 0
    """For states of lots that rest on the device, before the first step has made them."""


class StepBeside:
    """A step of a lot that the host may still be at beside the next forward: who needs what it changes waits for it."""

    def __init__(self) -> None:
        self.is_begun = False
        """Whether there is one that nobody has waited for."""
        self._job: Future[None] | None = None
        self._stepper: int | None = None
        """The thread that steps: for it nothing is to wait for."""
        self._seconds = 0.0

    @property
    def is_going_on(self) -> bool:
        """Whether somebody would have to wait now."""
        return self._job is not None and not self._job.done()

    def begin(self, host: Executor, step: Callable[[], None]) -> None:
        """Let the thread of the host step."""

        def run() -> None:
            self._stepper = get_ident()
            step()

        self.is_begun = True
        self._job = host.submit(run)

    def wait(self) -> None:
        """Wait until it is over; raises, once, what went wrong."""
        if not self.is_begun or self._stepper == get_ident():
            return
        start = time.perf_counter()
        try:
            if self._job is not None:
                self._job.result()
        finally:
            self._seconds += time.perf_counter() - start
            if not self.is_going_on:  # who interrupts the wait does not end the step
                self.forget()

    def forget(self) -> None:
        """It is over, however it has ended."""
        self._job, self.is_begun = None, False

    def waited(self) -> float:
        """The seconds that somebody has waited since this was last asked."""
        found, self._seconds = self._seconds, 0.0
        return found


class DeviceCopy:
    """A copy that was started on a stream of the device: a `Transfer`."""

    def __init__(self, accelerator: Accelerator, *kept: Tensor) -> None:
        self._kept = kept
        self._event = accelerator.event()
        self._event.record()

    @property
    def is_over(self) -> bool:
        """Whether the bytes have arrived."""
        return self._event.query()

    def wait(self) -> None:
        """Let the host wait."""
        self._event.synchronize()

    def wait_on_stream(self, stream: Stream | None = None) -> None:
        """Let later work of a stream wait, the current one unless another is given; the host does not."""
        if stream is None:
            self._event.wait()
        else:
            stream.wait_event(self._event)

    def forget(self) -> None:
        """Let go of the tensors, once the streams that they belong to wait for the copy; it can be waited for still."""
        self._kept = ()


def host_memory(size: int) -> Tensor:
    """So many bytes of host memory in whole pages of their own, zeros: never rounded up to a power of two.

    Most systems give huge pages to private memory alone. A process that is forked, such as a worker of a data loader,
    does not get this memory: it would be copied for it, or the device would go on with the pages of before.
    """
    length = max(size, 1)
    mapping = mmap.mmap(-1, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if length >= HUGE_PAGE and "MADV_HUGEPAGE" in vars(mmap):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if "MADV_DONTFORK" in vars(mmap):
        mapping.madvise(mmap.MADV_DONTFORK)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    return whole[:size]


def device_free(accelerator: Accelerator) -> int:
    """Bytes of the device that nobody uses, those included that the allocator keeps for later."""
    used = accelerator.memory()
    return accelerator.capacity().available + max(0, used.reserved - used.allocated)


def device_room(accelerator: Accelerator) -> int:
    """Bytes of the device that nobody uses, without a part that is left to others."""
    return device_free(accelerator) - accelerator.capacity().total // RESERVE


class LockedAhead:
    """Page-locked memory, made by a few threads before it is needed: the driver locks one page after the other."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._threads: ThreadPoolExecutor | None = None
        self._coming: dict[int, deque[Future[Locked]]] = {}
        """By the bytes of each."""
        self._taking = Lock()

    def start(self, sizes: Iterable[int]) -> None:
        """Begin to make memory of these sizes, in this order."""
        for size in sizes:
            if self._threads is None:
                index = self._accelerator.current_device()
                self._threads = ThreadPoolExecutor(LOCKING, LOCKING_THREAD, self._accelerator.set_device, (index,))
            self._coming.setdefault(size, deque()).append(self._threads.submit(self._make, size))

    def take(self, size: int) -> Locked:
        """Memory of a size, with what unlocks it: what was made ahead, once it is there, or more."""
        with self._taking:
            found = self._coming.get(size)
            future = found.popleft() if found else None
        try:
            return self._make(size) if future is None else future.result()
        except CancelledError:  # another thread has closed this meanwhile
            return self._make(size)

    def _make(self, size: int) -> Locked:
        if self._accelerator.lock_pages is None:
            raise AssertionError(f"{self._accelerator.name} locks no memory")
        memory = host_memory(size)
        memory.zero_()  # every page is there before they are locked
        return memory, self._accelerator.lock_pages(memory)

    def close(self) -> None:
        """Let go of what nobody has taken, and of the threads."""
        threads, self._threads = self._threads, None
        if threads is None:
            return
        # The collector of garbage may come here in one of the threads: what that one makes is unlocked when it is made.
        threads.shutdown(wait=not current_thread().name.startswith(LOCKING_THREAD), cancel_futures=True)
        with self._taking:
            left = [future for futures in self._coming.values() for future in futures]
            self._coming.clear()
        for future in left:
            future.add_done_callback(_unlock_unused)


def _unlock_unused(future: Future[Locked]) -> None:
    """Unlock memory that was made ahead and that nobody has taken."""
    if not future.cancelled() and future.exception() is None:
        future.result()[1]()


class HostTier:
    """Tensors in host memory, page-locked where the device copies faster from there. The step may run in place."""

    name: str = "host"

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        pin: bool = True,
        shares_way: bool = False,
        step_needs: StepNeeds | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.pin = pin
        self.step_needs = step_needs or StepNeeds()
        self.shares_way = shares_way
        """Whether others bring something to the device during a backward, which would have to wait."""
        self.inward, self.outward = accelerator.stream(), accelerator.stream()
        """Streams for copies to the device and from it: both ways at once."""
        self.room: int | None = None
        """Bytes of the device that are left for what comes ahead of a step; None before that is looked at."""
        self._entering = Lock()
        self.paced = Pacer(accelerator, self.outward, partial(_start_copy, accelerator, self._entering, self.outward))
        """For copies from the device that have time, and leave the way to others."""
        self._later: deque[Callable[[], object]] = deque()
        self._held: dict[str, Tensor] = {}
        self._unlock: dict[str, Callable[[], None]] = {}
        self._ahead = LockedAhead(accelerator)
        # Memory that is gone and still locked would be in the way of whatever comes to its address.
        self._give_back = partial(
            _give_back,
            self._held,
            self._unlock,
            self._ahead,
            self.paced,
            (self.inward, self.outward),
        )
        weakref.finalize(self, self._give_back).atexit = False

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
        size = like.numel() * dtype.itemsize
        if self._locks and size:
            memory, self._unlock[name] = self._ahead.take(size)
        else:
            memory = host_memory(size)
        self._held[name] = memory.view(dtype).view(like.shape)
        return self._held[name]

    @property
    def _locks(self) -> bool:
        return self.pin and self.accelerator.lock_pages is not None

    def prepare(self, sizes: Iterable[int]) -> None:
        """Start to make memory for tensors of so many bytes that will come: to lock it takes long."""
        if self._locks:
            self._ahead.start(size for size in sizes if size)

    def drop_unused(self) -> None:
        """Let go of memory that was made ahead and that nothing has come to."""
        self._ahead.close()

    def takes_room(self, size: int) -> bool:
        """Take so many bytes of the room that the device had when it was first asked in this step, if it has them."""
        if self.room is None:
            self.room = device_room(self.accelerator) - 2 * self.step_needs.passing - self.step_needs.new_states
        if size > self.room:
            return False
        self.room -= size
        return True

    def bring_later(self, first: Callable[[], object], others: Iterable[Callable[[], object]]) -> None:
        """Let copies to the device start a few at a time, with each `bring_next`: the first before all that wait."""
        self._later.appendleft(first)
        self._later.extend(others)

    def bring_next(self) -> None:
        """Let the next copies that wait start, each after the work that the current stream has now."""
        for _ in range(min(TENSORS_PER_GRADIENT, len(self._later))):
            self._later.popleft()()

    def bring_no_more(self) -> None:
        """Forget the copies that wait."""
        self._later.clear()

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
        return _start_copy(self.accelerator, self._entering, stream, into, source)

    def exchange(self, name: str, other: str) -> None:
        """Let two names, of tensors alike, have each other's memory. Who has the tensor of a name sees the other."""
        one, two = self.held(name), self.held(other)
        one.data, two.data = two.data, one.data
        unlock = {name: self._unlock.pop(other, None), other: self._unlock.pop(name, None)}
        self._unlock |= {each: call for each, call in unlock.items() if call is not None}

    def drop(self, name: str) -> None:
        """Forget what rests under a name."""
        if (unlock := self._unlock.pop(name, None)) is not None:
            unlock()
        self._held.pop(name, None)

    def close(self) -> None:
        """Unlock and forget everything, once the device has done its copies."""
        self._give_back()


def _start_copy(accelerator: Accelerator, entering: Lock, stream: Any, into: Tensor, source: Tensor) -> DeviceCopy:
    """Start a copy on a stream. The stream remembers in itself what to return to: one thread may be inside of it."""
    with entering, stream, torch.no_grad():
        into.copy_(source, non_blocking=True)
        copy = DeviceCopy(accelerator, *(each for each in (into, source) if each.device.type == "cpu"))
    for each in (into, source):  # memory of the device may be let go at once, and is used again after the copy
        if each.device.type != "cpu":
            hold(each, stream)
    return copy


def _give_back(
    held: dict[str, Tensor],
    unlock: dict[str, Callable[[], None]],
    ahead: "LockedAhead",
    pacer: Pacer,
    streams: Iterable[Stream],
) -> None:
    """Unlock and forget memory, once the device has done the copies of these streams."""
    pacer.close()
    for stream in streams:
        stream.synchronize()
    ahead.close()
    while unlock:
        unlock.popitem()[1]()
    held.clear()
