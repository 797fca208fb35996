"""An accelerator made of a torch device module (`torch.cuda`, `torch.xpu`, `torch.npu`, ...): most need no more.

What one vendor does differently is in that vendor's file; Intel GPUs need only facts. Whether a device computes in a
type is found out by doing so; what a recipe needs beyond that is the business of `precision/`. `torch.accelerator` says
the same of one device, the current one of the process; here a device is asked for by its name.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from mizzen.accelerator.protocol import Capacity, DeviceInfo, Event, LockPages, Memory, Stream
from mizzen.environment import environ
from mizzen.errors import DeviceError


@torch.no_grad()
def computes(device: torch.device, dtype: torch.dtype) -> bool:
    """Multiply a few ones and look at the result."""
    if is_float8(dtype):
        # Torch stores these anywhere and, in some versions, multiplies them one by one. They are of use only where
        # matrix units take them, and that is a fact about hardware: cuda.py has it.
        return False
    # Not a matrix product: with deterministic algorithms on, cuBLAS refuses those for a reason that is not the type.
    try:
        ones = torch.ones(8, dtype=dtype, device=device)
        return torch.equal(ones * ones, ones)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # says something about this moment, nothing about the type
    except (RuntimeError, TypeError):
        return False


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a type is a float of eight bits or fewer."""
    return dtype.is_floating_point and dtype.itemsize == 1


def backend_for(name: str) -> str:
    """The collective backend that torch pairs with a device type; gloo where nothing was registered for it."""
    if not torch.distributed.is_available():
        return "gloo"
    try:
        return torch.distributed.get_default_backend_for_device(name)
    except ValueError:
        return "gloo"


def module_of(name: str) -> Any:
    """The module that torch keeps under the name of a device type."""
    return torch.get_device_module(name)


def selection(variable: str | None) -> str:
    """How the environment narrows the devices, in words for a message; empty where it does not."""
    value = environ().get(variable) if variable else None
    return "" if value is None else f" with {variable}={value!r}"


@dataclass(eq=False)
class TorchDevice:
    """Every call goes to torch's module of that name, so that a device is a row of facts."""

    name: str
    comm_backend: str
    visible_devices: str | None = None
    export_prefixes: tuple[str, ...] = ()
    shares_host_memory: bool = False
    is_asynchronous: bool = True
    has_streams: bool = True
    lock_pages: LockPages | None = None
    _supported: dict[torch.dtype, bool] = field(default_factory=dict, init=False, repr=False)

    def unavailable(self) -> str | None:
        """Why there is no such device; counting them touches none."""
        try:
            module_of(self.name)
        except RuntimeError:
            return f"torch {torch.__version__} knows no such device type: install the vendor's extension of torch"
        if self.device_count() > 0:
            return None
        return (
            f"torch {torch.__version__} sees no {self.name} device{selection(self.visible_devices)}: "
            "it takes a torch built for it, the driver, and a visible device"
        )

    def device(self, index: int | None = None) -> torch.device:
        """The device with that index, or the current one."""
        return torch.device(self.name, self.current_device() if index is None else index)

    def device_count(self) -> int:
        """How many of them this process sees."""
        return int(module_of(self.name).device_count())

    def set_device(self, index: int) -> None:
        """Make one of them the current device of this thread."""
        count = self.device_count()
        if not 0 <= index < count:
            raise DeviceError(
                f"device {index} of {self.name} was asked for, but this process sees "
                f"{count}{selection(self.visible_devices)}: start at most {count} ranks on this host, or show it more"
            )
        module_of(self.name).set_device(index)

    def current_device(self) -> int:
        """The index of the current device."""
        return int(module_of(self.name).current_device())

    def synchronize(self, index: int | None = None) -> None:
        """Wait until a device is idle."""
        module_of(self.name).synchronize(index)

    def memory(self, index: int | None = None) -> Memory:
        """The counters of torch's caching allocator; zero before its first use."""
        counters = module_of(self.name).memory_stats(index)
        return Memory(
            allocated=counters.get("allocated_bytes.all.current", 0),
            reserved=counters.get("reserved_bytes.all.current", 0),
            peak=counters.get("allocated_bytes.all.peak", 0),
        )

    def capacity(self, index: int | None = None) -> Capacity:
        """What the driver says, other processes included; or this process's share, where somebody has set one."""
        module = module_of(self.name)
        available, total = module.mem_get_info(index)
        share = vars(module).get("get_per_process_memory_fraction")
        if share is not None and (part := share(index)) < 1:
            total = int(total * part)
            available = min(available, max(0, total - self.memory(index).reserved))
        return Capacity(total=total, available=available)

    def reset_peak(self, index: int | None = None) -> None:
        """Let the peak start again from what is allocated now."""
        module_of(self.name).reset_peak_memory_stats(index)

    def empty_cache(self) -> None:
        """Give unused blocks of the caching allocator back."""
        module_of(self.name).empty_cache()

    def supports(self, dtype: torch.dtype) -> bool:
        """Try the type once on the current device."""
        if dtype not in self._supported:
            self._supported[dtype] = computes(self.device(), dtype)
        return self._supported[dtype]

    def seed(self, value: int) -> None:
        """Seed the generator of the current device."""
        module_of(self.name).manual_seed(value)

    def rng_state(self, index: int | None = None) -> torch.Tensor:
        """The state of a device's generator, as bytes on the host."""
        state: torch.Tensor = module_of(self.name).get_rng_state(self.device(index))
        return state

    def set_rng_state(self, state: torch.Tensor, index: int | None = None) -> None:
        """Set what `rng_state` gave."""
        module_of(self.name).set_rng_state(state, self.device(index))

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """A page-locked copy, unless the tensor is page-locked or rests in shared memory already."""
        return tensor if self.shares_host_memory else tensor.pin_memory()

    def stream(self, *, priority: int = 0) -> Stream:
        """A new stream of the current device."""
        stream: Stream = module_of(self.name).Stream(priority=priority)
        return stream

    def current_stream(self) -> Stream:
        """The stream that operations of this thread go to."""
        stream: Stream = module_of(self.name).current_stream()
        return stream

    def event(self, *, timing: bool = False) -> Event:
        """A new event."""
        event: Event = module_of(self.name).Event(enable_timing=timing)
        return event

    def describe(self, index: int | None = None) -> DeviceInfo:
        """The name that the driver gives."""
        return DeviceInfo(name=module_of(self.name).get_device_name(index), architecture="")


def by_torch(name: str) -> TorchDevice:
    """A device that torch knows and we do not."""
    return TorchDevice(name, backend_for(name))


def xpu() -> TorchDevice:
    """Torch's `xpu`."""
    return TorchDevice(
        name="xpu",
        comm_backend=backend_for("xpu"),
        visible_devices="ZE_AFFINITY_MASK",
        export_prefixes=("CCL_", "FI_", "I_MPI_"),
    )
