"""The host as the device: training without a GPU, and the tests of everything else."""

import torch

from mizzen.accelerator import host
from mizzen.accelerator.device import computes
from mizzen.accelerator.protocol import Capacity, DeviceInfo, LockPages, Memory
from mizzen.accelerator.streams import HostEvent, InOrderStream
from mizzen.environment import Switches, World, environ


class Cpu:
    """One device for every rank that fits the host: `LOCAL_SIZE` of them, or one for each physical core."""

    name: str = "cpu"
    comm_backend: str = "gloo"
    visible_devices: str | None = None
    export_prefixes: tuple[str, ...] = ("GLOO_", "OMP_", "KMP_", "GOMP_")
    shares_host_memory: bool = True
    is_asynchronous: bool = False
    has_streams: bool = False
    lock_pages: LockPages | None = None

    def __init__(self) -> None:
        self._index = World.detect(environ()).local_rank
        self._supported: dict[torch.dtype, bool] = {}
        self._stream = InOrderStream(self)

    def unavailable(self) -> str | None:
        """A host is always there."""
        return None

    def device(self, index: int | None = None) -> torch.device:
        """One device for every index: torch has one CPU."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """`LOCAL_SIZE`, or the physical cores that this process may use."""
        return Switches.read(environ()).local_size or host.cores()

    def set_device(self, index: int) -> None:
        """Remember the index; it changes nothing else, and more ranks than cores are allowed."""
        self._index = index

    def current_device(self) -> int:
        """The index last set; at first the local rank."""
        return self._index

    def synchronize(self, index: int | None = None) -> None:
        """Nothing to wait for."""

    def memory(self, index: int | None = None) -> Memory:
        """The resident size of this process."""
        return host.resident()

    def capacity(self, index: int | None = None) -> Capacity:
        """The memory of the host, or of its container."""
        return host.capacity()

    def reset_peak(self, index: int | None = None) -> None:
        """Let the kernel forget the peak."""
        host.reset_peak()

    def empty_cache(self) -> None:
        """Nothing to give back: torch keeps no cache of host memory."""

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether arithmetic works; low precision does everywhere, though without hardware for it very slowly."""
        if dtype not in self._supported:
            self._supported[dtype] = computes(self.device(), dtype)
        return self._supported[dtype]

    def seed(self, value: int) -> None:
        """Seed the default generator."""
        torch.default_generator.manual_seed(value)

    def rng_state(self, index: int | None = None) -> torch.Tensor:
        """The state of the default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        """Set the default generator."""
        torch.set_rng_state(state)

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: there is no transfer to speed up."""
        return tensor

    def stream(self, *, priority: int = 0) -> InOrderStream:
        """The one queue: calls run in order."""
        return self._stream

    def current_stream(self) -> InOrderStream:
        """The one queue."""
        return self._stream

    def event(self, *, timing: bool = False) -> HostEvent:
        """A point in time."""
        return HostEvent()

    def describe(self, index: int | None = None) -> DeviceInfo:
        """The processor, and the instructions that torch uses on it."""
        return DeviceInfo(host.processor(), torch.backends.cpu.get_cpu_capability())
