"""How fast the ranks of this job talk: the values behind `mizzen bench comm`.

Every rank runs `measure` and gets the same numbers, those of the slowest rank. What is timed is the call that users and
the engine make, with its account and its wait; printing is the command line's business.

[Note: what the bandwidths mean]
They follow nccl-tests, so that numbers can be held side by side. A message is the larger of an operation's two buffers.
`algorithm` is message / time. `bus` is what that asks of the slowest link if every rank sends no byte twice: an
all-reduce moves 2 (n-1) / n of the message through each link, a gather, scatter or exchange (n-1) / n, the rest all of
it. It can be held against what the hardware promises, whatever the number of ranks.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from rich.table import Table
from torch.distributed import ReduceOp

from mizzen.accelerator.registry import get_accelerator
from mizzen.comm.collectives import (
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    barrier,
    broadcast,
    irecv,
    isend,
    reduce_scatter_tensor,
)
from mizzen.comm.groups import exchange_device, get_all_ranks_from_group, get_backend, get_rank
from mizzen.errors import UsageError

SIZES: Final = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
"""Bytes per message."""
PERCENTILES: Final = (5, 50, 95)


class Participants(NamedTuple):
    """The ranks that take part, and this one's place among them."""

    group: Any
    ranks: tuple[int, ...]
    place: int


Run = Callable[[torch.Tensor, torch.Tensor, Participants], Any]


class Operation(NamedTuple):
    """One operation over a message and its n-th part, and the share of the message that crosses each link."""

    run: Run
    share: Callable[[int], float]


def _ring(whole: torch.Tensor, _: torch.Tensor, peers: Participants) -> None:
    """Send to the next rank while receiving from the one before."""
    received = torch.empty_like(whole)
    following, previous = (peers.ranks[(peers.place + step) % len(peers.ranks)] for step in (1, -1))
    works = [isend(whole, following, group=peers.group), irecv(received, previous, group=peers.group)]
    for work in works:
        if work is not None:
            work.wait()


OPERATIONS: Final[Mapping[str, Operation]] = {
    "all_reduce": Operation(lambda whole, part, f: all_reduce(whole, group=f.group), lambda n: 2 * (n - 1) / n),
    "all_gather": Operation(
        lambda whole, part, f: all_gather_into_tensor(whole, part, group=f.group), lambda n: (n - 1) / n
    ),
    "reduce_scatter": Operation(
        lambda whole, part, f: reduce_scatter_tensor(part, whole, group=f.group), lambda n: (n - 1) / n
    ),
    "all_to_all": Operation(
        lambda whole, part, f: all_to_all_single(torch.empty_like(whole), whole, group=f.group), lambda n: (n - 1) / n
    ),
    "broadcast": Operation(lambda whole, part, f: broadcast(whole, f.ranks[0], group=f.group), lambda n: 1.0),
    "send_recv": Operation(_ring, lambda n: 1.0),
}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One operation at one size: the seconds of every trial, each on the rank that was slowest in it."""

    operation: str
    size: int
    """Bytes of the message, rounded up so that every rank has an equal part."""
    ranks: int
    seconds: tuple[float, ...]

    def percentile(self, percent: float) -> float:
        """The least time that so many percent of the trials did not exceed."""
        return sorted(self.seconds)[max(math.ceil(percent / 100 * len(self.seconds)) - 1, 0)]

    @property
    def median(self) -> float:
        """The median time of a trial, in seconds."""
        return self.percentile(50)

    @property
    def algorithm(self) -> float:
        """GB/s as the caller sees it."""
        return self.size / self.median / 1e9

    @property
    def bus(self) -> float:
        """GB/s over the slowest link."""
        return self.algorithm * OPERATIONS[self.operation].share(self.ranks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        times = {f"p{percent}_us": 1e6 * self.percentile(percent) for percent in PERCENTILES}
        rates = {"algorithm_gb_per_s": self.algorithm, "bus_gb_per_s": self.bus}
        return {"operation": self.operation, "bytes": self.size, **times, **rates, "trials": len(self.seconds)}


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All measurements of a run, and what they were taken on."""

    backend: str
    device: str
    ranks: int
    measurements: tuple[Measurement, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [found.as_dict() for found in self.measurements]
        return {"backend": self.backend, "device": self.device, "ranks": self.ranks, "measurements": rows}


def bench(
    operations: Sequence[str] = tuple(OPERATIONS),
    sizes: Sequence[int] = SIZES,
    *,
    trials: int = 20,
    warmups: int = 5,
    dtype: torch.dtype = torch.float32,
    group: Any = None,
) -> BenchResult:
    """Measure operations among the ranks of a group. Every rank of it calls this, with the same arguments."""
    ranks = get_all_ranks_from_group(group)
    found = measure(operations, sizes, trials=trials, warmups=warmups, dtype=dtype, group=group)
    return BenchResult(get_backend(group), str(_device(group)), len(ranks), tuple(found))


def measure(
    operations: Sequence[str],
    sizes: Sequence[int],
    *,
    trials: int = 20,
    warmups: int = 5,
    dtype: torch.dtype = torch.float32,
    group: Any = None,
) -> Iterator[Measurement]:
    """The measurements one by one, as they are taken; a rank that stops early leaves the others waiting."""
    if unknown := [name for name in operations if name not in OPERATIONS]:
        raise UsageError(f"there is no operation {unknown[0]!r} to measure: use {', '.join(OPERATIONS)}")
    if trials < 1 or warmups < 0 or any(size < 1 for size in sizes):
        raise UsageError(f"trials={trials}, warmups={warmups}, sizes={list(sizes)}: use at least 1 trial and 1 byte")
    ranks = tuple(get_all_ranks_from_group(group))
    peers = Participants(group, ranks, get_rank(group))
    for name in operations:
        if name == "send_recv" and len(ranks) == 1:
            continue  # nobody to send to
        for size in sizes:
            each = math.ceil(size / dtype.itemsize / len(ranks))
            whole = torch.ones(each * len(ranks), dtype=dtype, device=_device(group))
            part = whole[:each].clone()
            seconds = [_timed(OPERATIONS[name].run, whole, part, peers) for _ in range(warmups + trials)][warmups:]
            yield Measurement(name, whole.nbytes, len(ranks), _slowest(seconds, group))


def _device(group: Any) -> torch.device:
    """Where the messages lie. gloo aborts the process when it sends from a GPU (torch 2.11)."""
    return torch.device("cpu") if get_backend(group) == "gloo" else get_accelerator().device()


def _timed(run: Run, whole: torch.Tensor, part: torch.Tensor, peers: Participants) -> float:
    accelerator = get_accelerator()
    whole.fill_(1)  # sums must not grow until they overflow
    barrier(peers.group)
    accelerator.synchronize()
    started = time.perf_counter()
    run(whole, part, peers)
    accelerator.synchronize()
    return time.perf_counter() - started


def _slowest(seconds: Sequence[float], group: Any) -> tuple[float, ...]:
    """Each trial took as long as it took the last rank."""
    times = torch.tensor(seconds, dtype=torch.float64, device=exchange_device(group))
    all_reduce(times, ReduceOp.MAX, group=group)
    return tuple(times.tolist())


def render(found: BenchResult) -> Table:
    """The measurements as a table."""
    table = Table(title=f"{found.ranks} ranks, {found.backend}, {found.device}", title_justify="left")
    for heading in ("operation", "bytes", *(f"p{percent} us" for percent in PERCENTILES), "algorithm GB/s", "bus GB/s"):
        table.add_column(heading, justify="left" if heading == "operation" else "right")
    for row in found.measurements:
        times = (f"{1e6 * row.percentile(percent):.0f}" for percent in PERCENTILES)
        table.add_row(row.operation, f"{row.size:,}", *times, f"{row.algorithm:.3f}", f"{row.bus:.3f}")
    return table
