"""Which share of what rests in host memory passes through the device for a step: measured, the same on all ranks.

The host and the device step at the same time. Copies take time too, of which a part is hidden behind the last backward
before the step; what the host does may be hidden behind the next forward (`offloaded_step.py`). The best share is that
at which both are through together. How fast the host and copies are is tried out at the start; then three of the first
steps show how long both sides really take. Where the host is to step during backward nothing is measured, and nothing
passes through the device unless a share is given (`step_in_backward.py`).
"""

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Final

import torch
from torch.distributed import ProcessGroup, ReduceOp

from mizzen.accelerator import get_accelerator
from mizzen.comm import collectives
from mizzen.offload.tier import device_room, host_memory
from mizzen.plan.parts import Lot

TRIAL: Final = 1 << 24
"""Elements that the host steps in a trial: enough that nothing of it stays in a cache."""
COPIED: Final = 1 << 22
"""Elements that are copied each way in a trial: few, since the device may be nearly full."""
BACKWARD_SHARE: Final = 2 / 3
"""Of forward and backward: it computes about twice as much. The next measured step corrects what is wrong with it."""
BESIDE_SHARE: Final = (1 - BACKWARD_SHARE) / 2
"""Of forward and backward: half of a forward, which hides what the host does beside it. The first of its lots is needed
before that is over, and beside copies the host takes longer."""
BYTES: Final = 12
"""Of a master and two moments."""


def best_share(host: float, copies: float, hidden: float) -> float:
    """The share to stream, from the seconds that the host takes for all of it, and that copies of all of it take.

    `hidden` are seconds of copies that nobody waits for, less those of the host.
    """
    return min(1.0, max(0.0, (host + hidden) / (host + copies))) if host + copies > 0 else 0.0


class StreamedShare:
    """Measures and agrees on the share of one engine."""

    def __init__(self, group: ProcessGroup | None, device: torch.device, micro_batches: int) -> None:
        self.group = group
        self.device = device
        self.micro_batches = micro_batches

    def is_for_any(self, is_for_this: bool) -> bool:
        """Whether any rank has something outside the device."""
        return self._largest([float(is_for_this)])[0] > 0

    def device_room(self) -> int:
        """Bytes that every rank has free on its device."""
        return -int(self._largest([-device_room(get_accelerator())])[0])

    def at_start(self, lots: Sequence[Lot], host: Executor) -> float:
        """The share while nothing is known of the time that a backward takes, from trials here and on the host.

        That half of all copies hide behind it is a guess, which the first steps correct.
        """
        count = sum(tensor.numel() for lot in lots for tensor in lot.tensors)
        seconds = [count / TRIAL * host.submit(_try_step).result(), BYTES * count / copy_rate()]
        step, copies = self._largest(seconds)
        return best_share(step, copies, copies / 2)

    def after_step(self, share: float, *, host: float, device: float, between: float, is_beside: bool = False) -> float:
        """The share after a step in which host and device took so many seconds for theirs, and so many came before it.

        Copies take that long without what a backward hides, for which the device has room or not. The host's part takes
        that long without what the next forward hides, if it goes on beside that.
        """
        if not 0 < share < 1:
            return share
        hidden = between * BACKWARD_SHARE / self.micro_batches
        if device_room(get_accelerator()) <= 0:
            hidden = 0.0
        beside = between * BESIDE_SHARE / self.micro_batches if is_beside else 0.0
        host, copies, shown = self._largest([host / (1 - share), (device + hidden) / share, beside - hidden])
        return best_share(host, copies, -shown)

    def _largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number on any rank."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.group is not None:
            collectives.all_reduce(found, ReduceOp.MAX, group=self.group)
        return [float(number) for number in found.tolist()]


def _try_step() -> float:
    """Seconds of a step of AdamW on the host, for so many elements as a trial has."""
    value, gradient = (host_memory(4 * TRIAL).view(torch.float32) for _ in range(2))
    value.grad = gradient
    optimizer = torch.optim.AdamW([value], fused=True)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def copy_rate() -> float:
    """Bytes per second that come to the device while as many leave it."""
    accelerator = get_accelerator()
    near = [torch.empty(COPIED, device=accelerator.device()) for _ in range(2)]
    far = [accelerator.pin_memory(torch.empty(COPIED)) for _ in range(2)]
    streams = accelerator.stream(), accelerator.stream()
    seconds = []
    for _ in range(3):
        accelerator.synchronize()
        start = time.perf_counter()
        with streams[0]:
            near[0].copy_(far[0], non_blocking=True)
        with streams[1]:
            far[1].copy_(near[1], non_blocking=True)
        accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return 4 * COPIED / min(seconds)
