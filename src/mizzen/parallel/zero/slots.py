"""Where every trained parameter lies: one contiguous buffer per (group, dtype), cut into buckets. Pure arithmetic.

A bucket is what one collective moves. A sharded bucket is padded to a multiple of the ranks, and rank r owns its r-th
chunk, so that reduce-scatter and all-gather of any bucket are single collectives without copies. Where an update rule
needs whole parameters, a bucket has one owner instead, and the owners have about as much each.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

ALIGNMENT: Final = 32
"""Elements; parameters start at multiples of it, so that vectorized kernels find aligned data (128 bytes in fp32)."""


CHUNK: Final = 256
"""Elements; large chunks are multiples of it, so that low-bit states, whose scales belong to 256 neighbours, fit."""
LARGE: Final = 4096
"""Elements of a chunk from which on states are kept in few bits."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A parameter that wants a place."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int
    is_sparse: bool = False
    is_whole: bool = False
    """Whether its update rule cannot work on a part of it."""

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
    is_whole: bool = False
    owner: int = 0
    """The rank that owns all of a whole bucket; of another one each rank owns a chunk."""
    place: str = "device"
    """Where its masters and states rest."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start

    def owned(self, rank: int, chunks: int) -> tuple[int, int]:
        """Where the share of a rank begins and ends, among `chunks` ranks that share the bucket."""
        if not self.is_whole or chunks == 1:
            size = self.numel // chunks
            return rank % chunks * size, (rank % chunks + 1) * size
        return (0, self.numel) if rank == self.owner else (0, 0)


@dataclass(frozen=True, slots=True)
class Buffer:
    """All parameters of one optimizer group that have one dtype."""

    group: int
    dtype: str
    buckets: tuple[Bucket, ...] = field(repr=False)

    def share(self, rank: int, chunks: int) -> int:
        """The elements that a rank owns, padding included."""
        return sum(high - low for low, high in (bucket.owned(rank, chunks) for bucket in self.buckets))

    @property
    def is_whole(self) -> bool:
        """Whether its update rule needs whole parameters."""
        return any(bucket.is_whole for bucket in self.buckets)

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
    loads = [0] * chunks
    return tuple(
        Buffer(group, dtype, _with_owners(_fill(_of_kind(tenants, group, dtype), chunks, bucket_elements), loads))
        for group, dtype in kinds
    )


def _of_kind(tenants: Sequence[Tenant], group: int, dtype: str) -> list[Tenant]:
    return [tenant for tenant in reversed(tenants) if (tenant.group, tenant.dtype) == (group, dtype)]


def _fill(tenants: Sequence[Tenant], chunks: int, bucket_elements: int) -> Iterator[Bucket]:
    start = 0
    is_whole = any(tenant.is_whole for tenant in tenants)
    if is_whole:  # several buckets for each rank, so that their owners have about as much
        bucket_elements = min(bucket_elements, max(1, sum(tenant.numel for tenant in tenants) // (4 * chunks)))
    for together in _runs(tenants, bucket_elements):
        slots: list[Slot] = []
        place = 0
        for tenant in together:
            slots.append(Slot(tenant.name, tenant.shape, place, place + tenant.numel))
            place = _up(place + tenant.numel, ALIGNMENT)
        multiple = CHUNK if place >= LARGE * chunks else ALIGNMENT
        stop = start + _up(max(place, 1), multiple if is_whole else multiple * chunks)
        yield Bucket(start, stop, tuple(slots), together[0].is_sparse, is_whole)
        start = stop


def _with_owners(filled: Iterable[Bucket], loads: list[int]) -> tuple[Bucket, ...]:
    """Give every whole bucket to the rank that has least, the largest first."""
    buckets = list(filled)
    for place in sorted(range(len(buckets)), key=lambda place: -buckets[place].numel):
        if buckets[place].is_whole:
            owner = loads.index(min(loads))
            loads[owner] += buckets[place].numel
            buckets[place] = replace(buckets[place], owner=owner)
    return tuple(buckets)


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


def bucket_limit(total: int, asked: int) -> int:
    """Elements per bucket: what was asked for, or less where that would leave nothing to overlap.

    Eight buckets let communication run under the rest of backward. Below four million elements, 16 MB in fp32, the
    latency of a collective costs more than the overlap saves; above 64 million a bucket in flight costs memory and
    gains no speed. One rank has nothing to overlap; small buckets keep what is held twice small there.
    """
    return max(1, min(asked, max(min(total // 8, 1 << 26), 1 << 22)))
