"""How much of what rests in host memory is stepped there, and how much on the device, through which it passes.

Both are done at once, so the split is right when both take as long. Copies to the device are made during backward;
what is left to wait for are the step of the host, new values on their way in, and stepped states on their way out.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import torch

from mizzen.accelerator.protocol import Accelerator
from mizzen.offload.tier import HostTier

SAMPLE: Final = 1 << 24
"""Elements of a lot to measure with."""
RESTING: Final = 12
"""Bytes of an fp32 master and two fp32 states, of each element."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a machine was measured to do, in each second."""

    host_elements: float
    """Elements that the host steps by AdamW."""
    bytes_in: float
    bytes_out: float

    def streamed_ratio(self, value_bytes: int = 2) -> float:
        """The share that is to pass through the device."""
        on_host = 1 / self.host_elements + value_bytes / self.bytes_in
        through = RESTING / self.bytes_out
        return on_host / (on_host + through)

    def __str__(self) -> str:
        return (
            f"host step {self.host_elements / 1e9:.2f} G elements/s, "
            f"copies {self.bytes_in / 1e9:.0f} GB/s in and {self.bytes_out / 1e9:.0f} GB/s out"
        )


def measure(accelerator: Accelerator, thread: Executor) -> Speeds:
    """Try a step of the host in its thread, and copies both ways, a few times each; the best counts."""
    tier = HostTier(accelerator)
    here = torch.zeros(SAMPLE, device=accelerator.device())
    try:
        host = tier.place("sample", here)
        inward = min(_seconds(lambda: tier.copy_in(here, host).wait()) for _ in range(3))
        outward = min(_seconds(lambda: tier.copy_out(host, here).wait()) for _ in range(3))
        stepped = thread.submit(_host_seconds).result()
    finally:
        tier.close()
    size = SAMPLE * here.element_size()
    return Speeds(SAMPLE / stepped, size / inward, size / outward)


def _host_seconds() -> float:
    value = torch.zeros(SAMPLE)
    value.grad = torch.zeros(SAMPLE)
    optimizer = torch.optim.AdamW([value], fused=True)
    return min(_seconds(optimizer.step) for _ in range(4))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
