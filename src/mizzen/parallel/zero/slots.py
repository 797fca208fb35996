"""Where every trained parameter lies: one contiguous buffer per (group, dtype), cut into buckets. Pure arithmetic.

A bucket is what one collective moves. A sharded bucket is padded to a multiple of the ranks, and rank r owns its r-th
chunk, so that reduce-scatter and all-gather of any bucket are single collectives without copies.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

ALIGNMENT: Final = 32
"""Elements; parameters start at multiples of it, so that vectorized kernels find aligned data (128 bytes in fp32)."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A parameter that wants a place."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    is_sparse: bool = False

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter inside its bucket."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A run of slots that travel together; `start` and `stop` are places in the buffer."""

    start: int
    stop: int
    slots: tuple[Slot, ...]
    is_sparse: bool = False

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Buffer:
    """All parameters of one optimizer group that have one dtype."""

    group: int
    dtype: str
    buckets: tuple[Bucket, ...] = field(repr=False)

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def occupied(self) -> int:
        """Elements of the parameters themselves."""
        return sum(slot.stop - slot.start for bucket in self.buckets for slot in bucket.slots)


def lay_out(tenants: Sequence[Tenant], *, chunks: int, bucket_elements: int) -> tuple[Buffer, ...]:
    """Give every parameter its place. Gradients arrive last parameter first, and so do the buckets.

    `chunks` is the number of ranks that share a bucket, 1 where nothing is sharded.
    """
    kinds = dict.fromkeys((tenant.group, tenant.dtype) for tenant in tenants)
    return tuple(
        Buffer(group, dtype, tuple(_fill(_of_kind(tenants, group, dtype), chunks, bucket_elements)))
        for group, dtype in kinds
    )


def _of_kind(tenants: Sequence[Tenant], group: int, dtype: str) -> list[Tenant]:
    return [tenant for tenant in reversed(tenants) if (tenant.group, tenant.dtype) == (group, dtype)]


def _fill(tenants: Iterable[Tenant], chunks: int, bucket_elements: int) -> Iterator[Bucket]:
    start = 0
    for together in _runs(tenants, bucket_elements):
        slots: list[Slot] = []
        place = 0
        for tenant in together:
            slots.append(Slot(tenant.name, tenant.shape, place, place + tenant.numel))
            place = _up(place + tenant.numel, ALIGNMENT)
        stop = start + _up(max(place, 1), ALIGNMENT * chunks)
        yield Bucket(start, stop, tuple(slots), together[0].is_sparse)
        start = stop


def _runs(tenants: Iterable[Tenant], limit: int) -> Iterator[list[Tenant]]:
    """Neighbours up to `limit` elements; a larger parameter, or one whose gradient is sparse, travels alone."""
    run: list[Tenant] = []
    size = 0
    for tenant in tenants:
        if run and (size + tenant.numel > limit or tenant.is_sparse or run[-1].is_sparse):
            yield run
            run, size = [], 0
        run.append(tenant)
        size += tenant.numel
    if run:
        yield run


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def bucket_limit(total: int, asked: int, *, chunks: int) -> int:
    """Elements per bucket: what was asked for, or less where that would leave nothing to overlap.

    Eight buckets let communication run under the rest of backward. Below a quarter of a million elements the latency
    of a collective costs more than the overlap saves; above 64 million a bucket in flight costs memory and gains no
    speed. One rank has nothing to overlap.
    """
    if chunks == 1:
        return max(total, 1)
    return max(1, min(asked, max(min(total // 8, 1 << 26), 1 << 18)))
