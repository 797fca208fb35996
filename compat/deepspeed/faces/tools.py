"""Small functions that scripts import: memory on a line, timers, seeds, moving things to a device."""

import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deepspeed.faces.accelerator import get_accelerator, range_of
from mizzen.accelerator import Timer
from mizzen.accelerator import get_accelerator as own_accelerator
from mizzen.comm import groups
from mizzen.environment import World, environ
from mizzen.parallel.pipeline import partition

Value = TypeVar("Value")


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """A structure with tensors of its own; tensors that were one stay one, so that they are saved once."""
    clones: dict[Any, Tensor] = {}

    def clone(tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in clones:
            clones[key] = tensor.detach().clone().to(device)
        return clones[key]

    return tree_map_only(Tensor, clone, item)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Tensor], bool] | None = None) -> Any:
    """A structure with its tensors on a device."""
    return tree_map_only(Tensor, lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t, item)


copy_to_device = move_to_device


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print, if forced, what this process uses of the device, on rank 0."""
    if force:
        memory = own_accelerator().memory()
        peak = f", at most {memory.peak / 1e9:.2f} GB" if memory.peak is not None else ""
        _print(f"{message}: {memory.allocated / 1e9:.2f} GB allocated{peak}, {memory.reserved / 1e9:.2f} GB reserved")


def _print(message: str, ranks: Iterable[int] = (0,)) -> None:
    """Print on some ranks, whatever the threshold of the log; -1 stands for all."""
    if World.detect(environ()).rank in (wanted := {*ranks}) or -1 in wanted:
        print(message, flush=True)  # noqa: T201


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """torch's own; an engine clips by itself, as `gradient_clipping` says."""
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """The norm of norms."""
    return float(sum(norm**2 for norm in norm_list) ** 0.5)


def get_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """The norm of the gradients that this rank has; an engine's own is `get_global_grad_norm()`."""
    wanted = [parameters] if isinstance(parameters, Tensor) else parameters
    return float(nn.utils.get_total_norm([p.grad for p in wanted if p.grad is not None], norm_type))


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def noop_decorator(func: Value) -> Value:
    """The function."""
    return func


def empty_cache() -> None:
    """Give unused memory back to the device."""
    own_accelerator().empty_cache()


def recursive_getattr(model: Any, module_name: str) -> Any:
    """What a path with dots leads to."""
    for part in module_name.split("."):
        model = getattr(model, part)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Put something where a path with dots leads to."""
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, module)


def instrument_w_nvtx(function: Callable[..., Value]) -> Callable[..., Value]:
    """The function, as a range of its name in a profile."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Value:
        with range_of(function.__qualname__):
            return function(*args, **kwargs)

    return wrapped


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether torch is within a range."""
    major, minor, *_ = torch.__version__.split(".")
    have = (int(major), int(minor))
    return all(
        compare(have, tuple(int(part) for part in str(wanted).split(".")[:2]))
        for wanted, compare in ((min_version, tuple.__ge__), (max_version, tuple.__le__))
        if wanted is not None
    )


def set_backend(name: str | None = None) -> None:
    """Use another backend; without a name torch's own, once it is initialized."""
    if name is not None or torch.distributed.is_initialized():
        groups.set_backend(name or "torch")


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Print something on rank 0, if forced."""
    if debug or force:
        _print(message)


class SynchronizedWallClockTimer:
    """Timers by name."""

    class Timer:
        """One of them; in milliseconds."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self._timer = Timer(own_accelerator())
            self._seconds = 0.0

        def start(self) -> None:
            """Start it."""
            self._timer.start()

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """Stop it."""
            self._timer.stop()

        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds between starts and stops since the last reset."""
            found = self._seconds + self._timer.read()
            self._seconds = 0.0 if reset else found
            return 1e3 * found

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> "SynchronizedWallClockTimer.Timer":
        """The timer of that name."""
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, "SynchronizedWallClockTimer.Timer"]:
        """All of them."""
        return self.timers

    def has_timer(self, name: str) -> bool:
        """Whether there is one of that name."""
        return name in self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Any = None,
    ) -> None:
        """Print what they have measured, and, if asked, what this process uses of the device."""
        times = {name: self.timers[name].elapsed(reset) / normalizer for name in names if self.has_timer(name)}
        memory = self.memory_usage() if memory_breakdown else ""
        shown = " | ".join(f"{name}: {value:.2f}" for name, value in times.items())
        _print(f"time (ms) | {shown}{memory}", ranks or [0])

    @staticmethod
    def memory_usage() -> str:
        """What this process uses of the device."""
        memory = own_accelerator().memory()
        return f" | mem_allocated: {memory.allocated / 1e9:.4f} GB"


class ThroughputTimer:
    """Samples per second between `start` and `stop`."""

    def __init__(self, config: Any = None, batch_size: int = 1, start_step: int = 2, **_: Any) -> None:
        self.batch_size, self.start_step = max(1, batch_size), start_step
        self.steps, self.seconds, self._since = 0, 0.0, 0.0

    def start(self) -> None:
        """A step starts."""
        get_accelerator().synchronize()
        self._since = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A step ends."""
        get_accelerator().synchronize()
        self.steps += 1
        if self.steps > self.start_step:
            self.seconds += time.perf_counter() - self._since

    def avg_samples_per_sec(self) -> float:
        """The mean so far, without the first steps."""
        counted = self.steps - self.start_step
        return self.batch_size * counted / self.seconds if counted > 0 and self.seconds else float("-inf")


def get_caller_func(frame: int = 3) -> str:
    """The name of a function on the way here."""
    return sys._getframe(frame).f_code.co_name


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Where each of so many parts begins, and the end; the last ones are empty where there are too few items."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return list(partition.uniform(num_items, num_parts))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Where each of so many parts begins, and the end, the heaviest as light as can be."""
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return list(partition.balanced(weights, num_parts))
