"""What an accelerator is to the rest of the library: its facts, its methods, and the values they return.

No implementation and no torch at run time. Kernels, graphs, compilers and profiler ranges are not here: torch has
them under names that do not depend on the device, or their own rows of the library do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Memory:
    """What this process uses of a device, in bytes."""

    allocated: int
    """Held by live tensors; on the host, the resident size of the process."""
    reserved: int
    """Taken from the device, with the allocator's cache."""
    peak: int | None
    """The most that was ever allocated since the last `reset_peak`; None where the device keeps no such record."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a device has, in bytes, whoever uses it."""

    total: int
    available: int
    """Free at this moment. What this process's allocator keeps in its cache does not count as free."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is."""

    name: str
    architecture: str
    """`sm_90`, `gfx942`, `AVX512`: what code is generated for."""
    capability: tuple[int, ...] = ()
    """The compute capability, comparable with `>=`; empty where the vendor has no such number."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the driver, the runtime and the communication library."""


LockPages = Callable[["torch.Tensor"], Callable[[], None]]


class Event(Protocol):
    """A point in the device's work. record() marks it; the others refer to the last mark."""

    def record(self) -> None:
        """Mark the present end of the current stream."""
        ...

    def wait(self) -> None:
        """Later work on the current stream starts after the mark; the host does not wait."""
        ...

    def query(self) -> bool:
        """Whether the device has passed the mark."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until the device has passed the mark."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this mark to that of `end_event`; the device must have passed both."""
        ...


class Stream(Protocol):
    """A queue of device work, and a context in which it is the current one. Torch's own streams fit."""

    def wait_stream(self, stream: Any, /) -> None:
        """Later work here starts after the work that `stream` has now; the host does not wait."""
        ...

    def wait_event(self, event: Any, /) -> None:
        """Later work here starts after the mark of `event`; the host does not wait."""
        ...

    def record_event(self, event: Any = None, /) -> Any:
        """Mark the present end of this stream, in a new event unless one is given."""
        ...

    def query(self) -> bool:
        """Whether all work here is done."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for all work here."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> Any: ...


class Accelerator(Protocol):
    """A kind of device. One object serves a whole process; any thread may call it.

    unavailable()                 by the registry, once, before anything else; it must not touch the device
    set_device(i)                 by `comm`, once per rank, before the first tensor
    device(), supports(dtype)     by the plan and the engine, while they build
    seed, rng_state, ...          by the engine and the checkpoint
    stream(), event()             by whoever overlaps or measures
    memory(), capacity()          by observers; the first is cheap, the second asks the driver

    An index of None means the current device. The facts spare callers every question about the name.
    """

    name: str
    """The type that `torch.device` knows; on ROCm it is `cuda`."""
    comm_backend: str
    """The collective backend for tensors on this device: nccl, gloo, xccl, ..."""
    visible_devices: str | None
    """The variable that selects devices for a child process; None where there is nothing to select."""
    export_prefixes: tuple[str, ...]
    """Variables that start so belong to the device or its network and travel to other hosts."""
    shares_host_memory: bool
    """Tensors rest in host memory, so pinning them or offloading them to the host gains nothing."""
    is_asynchronous: bool
    """Operations return before they are done; a clock on the host needs `synchronize`."""
    has_streams: bool
    """Two streams can run at the same time; where they cannot, `stream()` gives one queue and waiting is free."""

    lock_pages: "LockPages | None"
    """Page-locks a host tensor where it lies, and returns what unlocks it; None where that gains nothing.

    The memory is the caller's, who unlocks it before giving it back."""

    def unavailable(self) -> str | None:
        """Why this device cannot be used here and what to do about it; None when it can."""
        ...

    def device(self, index: int | None = None) -> "torch.device":
        """The device to build tensors on."""
        ...

    def device_count(self) -> int:
        """How many of them this process sees."""
        ...

    def set_device(self, index: int) -> None:
        """Make one of them the current device of this thread."""
        ...

    def current_device(self) -> int:
        """The index of the current device."""
        ...

    def synchronize(self, index: int | None = None) -> None:
        """Wait until a device is idle."""
        ...

    def memory(self, index: int | None = None) -> Memory:
        """What this process uses."""
        ...

    def capacity(self, index: int | None = None) -> Capacity:
        """What the device has."""
        ...

    def reset_peak(self, index: int | None = None) -> None:
        """Let `memory().peak` start again from what is allocated now."""
        ...

    def empty_cache(self) -> None:
        """Give unused memory of the allocator back to the device."""
        ...

    def supports(self, dtype: "torch.dtype") -> bool:
        """Whether the device itself computes in this type; tried once, then remembered."""
        ...

    def seed(self, value: int) -> None:
        """Seed the generator of the current device."""
        ...

    def rng_state(self, index: int | None = None) -> "torch.Tensor":
        """The state of a device's generator, as bytes on the host."""
        ...

    def set_rng_state(self, state: "torch.Tensor", index: int | None = None) -> None:
        """Set what `rng_state` gave."""
        ...

    def pin_memory(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """A copy in page-locked memory, from which transfers overlap; the tensor itself where that gains nothing."""
        ...

    def stream(self, *, priority: int = 0) -> Stream:
        """A new stream of the current device; a lower number is more urgent."""
        ...

    def current_stream(self) -> Stream:
        """The stream that operations of this thread go to."""
        ...

    def event(self, *, timing: bool = False) -> Event:
        """A new event; only one made with `timing` can be read by `elapsed_time`."""
        ...

    def describe(self, index: int | None = None) -> DeviceInfo:
        """What a device is, for people and for choosing kernels."""
        ...
