"""The GPU of an Apple computer: one device, one queue, and memory that it shares with the host."""

import torch

from mizzen.accelerator import host
from mizzen.accelerator.device import TorchDevice, backend_for
from mizzen.accelerator.protocol import Capacity, DeviceInfo, Memory, Stream
from mizzen.accelerator.streams import InOrderStream
from mizzen.errors import DeviceError


class Mps(TorchDevice):
    """Torch's `mps`, whose module has neither indices, nor streams, nor a record of the peak."""

    def __init__(self) -> None:
        super().__init__("mps", backend_for("mps"), shares_host_memory=True, has_streams=False)

    def set_device(self, index: int) -> None:
        """There is only device 0."""
        if index != 0:
            raise DeviceError(f"device {index} of mps was asked for, but there is one: start one rank on this host")

    def current_device(self) -> int:
        """Always 0."""
        return 0

    def synchronize(self, index: int | None = None) -> None:
        """Wait until the GPU is idle."""
        torch.mps.synchronize()

    def memory(self, index: int | None = None) -> Memory:
        """Bytes of live tensors, and of all that Metal gave; there is no record of a peak."""
        return Memory(torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory(), peak=None)

    def capacity(self, index: int | None = None) -> Capacity:
        """What Metal advises to use at most, and what is free of it and of the host."""
        total = torch.mps.recommended_max_memory()
        free = total - torch.mps.driver_allocated_memory()
        return Capacity(total=total, available=max(0, min(free, host.capacity().available)))

    def reset_peak(self, index: int | None = None) -> None:
        """Nothing is recorded."""

    def stream(self, *, priority: int = 0) -> Stream:
        """The one queue."""
        return InOrderStream(self)

    def current_stream(self) -> Stream:
        """The one queue."""
        return InOrderStream(self)

    def describe(self, index: int | None = None) -> DeviceInfo:
        """Apple gives the GPU no name of its own: the processor's stands for it."""
        return DeviceInfo(host.processor(), "metal")
