"""`get_accelerator()` as DeepSpeed's users know it: a wide object, answered from mizzen's narrow one and from torch."""

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor

from deepspeed.faces import builders
from mizzen import accelerator as own
from mizzen.accelerator import Accelerator
from mizzen.accelerator.cpu import Cpu
from mizzen.accelerator.cuda import Cuda
from mizzen.environment import environ, integer
from mizzen.errors import MizzenError, NotBuilt

SUPPORTED_ACCELERATOR_LIST: Final = ["cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa"]


class DeepSpeedAccelerator:
    """One kind of device. Whatever is not here is looked for in torch's module of that device."""

    def __init__(self, inner: Accelerator) -> None:
        self.inner = inner
        self._name = inner.name
        self._communication_backend_name = inner.comm_backend

    def __getattr__(self, name: str) -> Any:
        """A name of `torch.cuda`, or of the module that the device has instead."""
        if name in ("inner", "_name"):
            raise AttributeError(name)
        return getattr(self._module(), name)

    def _module(self) -> Any:
        return torch.get_device_module(self._name)

    # What it is

    def is_synchronized_device(self) -> bool:
        """Whether operations are done when they return."""
        return not self.inner.is_asynchronous

    def use_host_timers(self) -> bool:
        """Whether the host's clock measures the device."""
        return not self.inner.is_asynchronous

    def resolves_data_dependency(self) -> bool:
        """Whether streams order themselves."""
        return not self.inner.has_streams

    def handles_memory_backpressure(self) -> bool:
        """Whether the device waits for memory."""
        return not self.inner.has_streams

    def is_available(self) -> bool:
        """Whether it can be used."""
        return self.inner.unavailable() is None

    def is_triton_supported(self) -> bool:
        """Whether Triton makes code for it."""
        return self._name == "cuda" and find_spec("triton") is not None

    def prefer_triton_grouped_mm(self) -> bool:
        """No."""
        return False

    def communication_backend_name(self) -> str:
        """nccl, gloo, ..."""
        return self.inner.comm_backend

    # Which of them

    def device_name(self, device_index: int | None = None) -> str:
        """`cuda`, or `cuda:1`."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A device; as a context it is the current one inside."""
        return self.inner.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Make it the current one."""
        self.inner.set_device(int(device_index))

    def current_device(self) -> int:
        """The index of the current one."""
        return self.inner.current_device()

    def current_device_name(self) -> str:
        """Its name."""
        return self.device_name(self.inner.current_device())

    def device_count(self) -> int:
        """How many there are; on a CPU how many ranks this machine runs, which Intel's launcher tells as LOCAL_SIZE."""
        if self._name != "cpu":
            return self.inner.device_count()
        return integer(environ(), "LOCAL_SIZE", 0) or integer(environ(), "LOCAL_WORLD_SIZE", 1)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until it is idle."""
        self.inner.synchronize(device_index)

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is there."""
        return tensor.device.type == self._name

    # Random numbers

    def random(self) -> Any:
        """The module that has torch's random functions."""
        return torch.random

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Set what `get_rng_state` gave."""
        self.inner.set_rng_state(new_state, device_index)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of its generator."""
        return self.inner.rng_state(device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed its generator."""
        self.inner.seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self, seed: int | None = None) -> int:
        """What it was seeded with."""
        return torch.initial_seed() if self._name == "cpu" else int(self._module().initial_seed())

    def default_generator(self, device_index: int) -> Any:
        """Its generator."""
        return torch.default_generator if self._name == "cpu" else self._module().default_generators[device_index]

    # Streams and graphs

    @property
    def Stream(self) -> Any:  # noqa: N802
        """The class of its streams."""
        return lambda *_, **kwargs: self.inner.stream(priority=kwargs.get("priority", 0))

    @property
    def Event(self) -> Any:  # noqa: N802
        """The class of its events."""
        return lambda enable_timing=False, **_: self.inner.event(timing=enable_timing)

    def stream(self, stream: Any) -> Any:
        """A context in which a stream is the current one."""
        return stream if stream is not None else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        """The current stream."""
        return self.inner.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        """The default stream."""
        return self._module().default_stream(device_index) if self.inner.has_streams else self.inner.current_stream()

    def create_graph(self) -> Any:
        """A graph of device work."""
        return self._module().CUDAGraph() if self._name == "cuda" else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """A context whose work goes into a graph."""
        return self._module().graph(graph, pool, stream) if graph is not None else contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Do the work of a graph."""
        if graph is not None:
            graph.replay()

    # Memory

    def empty_cache(self) -> None:
        """Give unused memory back."""
        self.inner.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of live tensors."""
        return self.inner.memory(device_index).allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most of them so far."""
        memory = self.inner.memory(device_index)
        return memory.allocated if memory.peak is None else memory.peak

    def reset_max_memory_allocated(self, device_index: int | None = None) -> None:
        """Let that start again."""
        self.inner.reset_peak(device_index)

    reset_peak_memory_stats = reset_max_memory_allocated
    reset_max_memory_cached = reset_max_memory_allocated

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes taken from the device."""
        return self.inner.memory(device_index).reserved

    memory_cached = memory_reserved

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most of them so far."""
        return int(self._module().max_memory_reserved(device_index)) if self._name == "cuda" else self.memory_reserved()

    max_memory_cached = max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Counters of the allocator."""
        if self._name == "cuda":
            return dict(self._module().memory_stats(device_index))
        memory = self.inner.memory(device_index)
        return {"allocated_bytes.all.current": memory.allocated, "allocated_bytes.all.peak": memory.peak}

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes it has."""
        return self.inner.capacity(device_index).total

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""
        return self.inner.capacity(device_index).available

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1, **_: Any) -> Tensor:
        """A copy from which transfers overlap."""
        return self.inner.pin_memory(tensor)

    def unpin_memory(self, tensor: Tensor) -> None:
        """Nothing: memory is given back with the tensor."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether transfers from it overlap."""
        return self.inner.shares_host_memory or tensor.is_pinned()

    # Dtypes

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return self.inner.supports(torch.bfloat16)

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return self.inner.supports(torch.float16)

    def supported_dtypes(self) -> list[torch.dtype]:
        """What it computes in."""
        return [dtype for dtype in (torch.float, torch.half, torch.bfloat16) if self.inner.supports(dtype)]

    def _maker(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        def make(*sizes: Any) -> Tensor:
            if all(isinstance(size, int) for size in sizes):
                return torch.empty(sizes, dtype=dtype, device=self.inner.device())
            return torch.tensor(sizes[0], dtype=dtype, device=self.inner.device())

        return make

    BFloat16Tensor = property(lambda self: self._maker(torch.bfloat16))
    ByteTensor = property(lambda self: self._maker(torch.uint8))
    DoubleTensor = property(lambda self: self._maker(torch.double))
    FloatTensor = property(lambda self: self._maker(torch.float))
    HalfTensor = property(lambda self: self._maker(torch.half))
    IntTensor = property(lambda self: self._maker(torch.int))
    LongTensor = property(lambda self: self._maker(torch.long))

    # The rest

    def amp(self) -> Any:
        """torch's module of mixed precision."""
        return torch.amp

    def range_push(self, msg: str) -> None:
        """Start a named range in a profile."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """End it."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call a function when the device is there."""
        return callback()

    def op_builder_dir(self) -> str:
        """Where builders are imported from."""
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """A builder by its name."""
        kind = self.get_op_builder(class_name)
        return None if kind is None else kind()

    def get_op_builder(self, class_name: str) -> Any:
        """The class of a builder by its name."""
        return vars(builders).get(class_name)

    def build_extension(self) -> Any:
        """Nothing is compiled."""
        raise NotBuilt("mizzen compiles nothing: torch.utils.cpp_extension.BuildExtension builds code of your own")

    def export_envs(self) -> list[str]:
        """Prefixes of variables that go to other hosts."""
        return list(self.inner.export_prefixes)

    def visible_devices_envs(self) -> list[str]:
        """The variables that select devices."""
        return [self.inner.visible_devices] if self.inner.visible_devices else []

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Select devices in an environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """What torch.compile uses."""
        return "inductor"

    def set_compile_backend(self, backend: str) -> None:
        """Nothing: `compile.backend` in the configuration says it."""


class CUDA_Accelerator(DeepSpeedAccelerator):  # noqa: N801
    """The GPUs of NVIDIA and AMD."""

    def __init__(self, inner: Accelerator | None = None) -> None:
        super().__init__(Cuda() if inner is None else inner)


class CPU_Accelerator(DeepSpeedAccelerator):  # noqa: N801
    """The host."""

    def __init__(self, inner: Accelerator | None = None) -> None:
        super().__init__(Cpu() if inner is None else inner)


KINDS: Final[dict[str, type[DeepSpeedAccelerator]]] = {"cuda": CUDA_Accelerator, "cpu": CPU_Accelerator}


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process."""
    inner = own.get_accelerator()
    return KINDS.get(inner.name, DeepSpeedAccelerator)(inner)


def set_accelerator(accel_obj: Any) -> None:
    """Use this one from now on."""
    own.set_accelerator(accel_obj.inner if isinstance(accel_obj, DeepSpeedAccelerator) else accel_obj)


def is_current_accelerator_supported() -> bool:
    """Whether this process has one that can be used."""
    try:
        return get_accelerator().is_available()
    except MizzenError:
        return False


@contextlib.contextmanager
def range_of(name: str) -> Iterator[None]:
    """A named range in a profile."""
    device = get_accelerator()
    device.range_push(name)
    try:
        yield
    finally:
        device.range_pop()
