"""The trained parameters of one part in flat buffers: values, master weights and gradients, whole or this rank's share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mizzen.comm import collectives
from mizzen.kernels.norm import sum_of_squares
from mizzen.model.piece import Piece, piece_of_range
from mizzen.parallel.zero.gradients import Gradients, LiveBucket, PassingGradients, WholeGradients
from mizzen.parallel.zero.reduce import Reducer, Reduction, torch_dtype
from mizzen.parallel.zero.slots import Bucket, Buffer, Slot


@dataclass(frozen=True, slots=True)
class Holding:
    """How buffers are held, as plain values of the plan."""

    stage: Literal[0, 1, 2]
    reduction: Reduction
    accumulation: str
    """The dtype in which gradients add up."""
    overlap: bool = True

    @property
    def chunks(self) -> int:
        """The number of ranks that share one bucket's master weights."""
        return self.reduction.ranks if self.stage else 1


class FlatStore:
    """Flat buffers of one part. What the engine asks of it is `plan.parts.Store`."""

    def __init__(
        self, buffers: Sequence[Buffer], parameters: Mapping[str, nn.Parameter], holding: Holding, group: ProcessGroup | None
    ) -> None:
        self.holding = holding
        self.group = group
        self.rank = collectives.get_rank(group) if holding.reduction.ranks > 1 else 0
        held = {slot.name for slot in _slots(buffers)}
        self.parameters = {name: parameter for name, parameter in parameters.items() if name in held}
        self.device = next(iter(self.parameters.values())).device
        self.buffers = tuple(buffers)
        self._values: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._groups: list[int] = []
        self._buckets: list[Bucket] = []
        for buffer in buffers:
            self._take_in(buffer)
        self.live, self.gradients = self._start_gradients()

    def _take_in(self, buffer: Buffer) -> None:
        """Move the parameters of a buffer into it; masters start from the values as they were, before any cast."""
        dtype = torch_dtype(buffer.dtype)
        flat = torch.zeros(buffer.numel, dtype=dtype, device=self.device)
        for bucket in buffer.buckets:
            values = flat[bucket.start : bucket.stop]
            exact = values
            if dtype in (torch.bfloat16, torch.float16):
                exact = torch.zeros(bucket.numel, dtype=torch.float32, device=self.device)
            for slot in bucket.slots:
                exact[slot.start : slot.stop].copy_(self.parameters[slot.name].detach().reshape(-1))
            self._send_from_first(exact)
            if exact is not values:
                values.copy_(exact)
            for slot in bucket.slots:
                self.parameters[slot.name].data = values[slot.start : slot.stop].view(slot.shape)
            start, stop = self._owned(bucket)
            mine = exact[start:stop]
            self._masters.append(mine.clone() if exact is not values and self.holding.chunks > 1 else mine)
            self._values.append(values)
            self._groups.append(buffer.group)
            self._buckets.append(bucket)

    def _send_from_first(self, values: Tensor) -> None:
        if self.holding.reduction.ranks > 1:
            collectives.broadcast(values, collectives.get_global_rank(self.group, 0), group=self.group)

    def _owned(self, bucket: Bucket) -> tuple[int, int]:
        size = bucket.numel // self.holding.chunks
        rank = self.rank if self.holding.chunks > 1 else 0
        return rank * size, (rank + 1) * size

    def _start_gradients(self) -> tuple[list[LiveBucket], Gradients]:
        holding, reducer = self.holding, Reducer(self.holding.reduction, self.group)
        wholes: list[Tensor] = []
        live: list[LiveBucket] = []
        for bucket, values in zip(self._buckets, self._values, strict=True):
            dtype = _wider(torch_dtype(holding.accumulation), values.dtype)
            start, stop = self._owned(bucket)
            whole = torch.zeros(bucket.numel if holding.stage < 2 else 0, dtype=dtype, device=self.device)
            own = whole if not holding.stage else torch.zeros(stop - start, dtype=dtype, device=self.device)
            wholes.append(whole)
            live.append(LiveBucket(bucket, [self.parameters[slot.name] for slot in bucket.slots], own))
        ordered = self._by_arrival(live)
        if holding.stage == 2:
            return live, PassingGradients(ordered, reducer, overlap=holding.overlap)
        flats = [wholes[live.index(bucket)] for bucket in ordered]
        return live, WholeGradients(ordered, flats, reducer, overlap=holding.overlap, shards=holding.chunks > 1)

    def _by_arrival(self, live: list[LiveBucket]) -> list[LiveBucket]:
        """The buckets of all buffers in the order in which backward is likely to fill them: last parameters first."""
        place = {id(parameter): index for index, parameter in enumerate(self.parameters.values())}
        return sorted(live, key=lambda bucket: -min(place[id(parameter)] for parameter in bucket.parameters))

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a share of masters and states."""
        return self.holding.chunks > 1

    # What the optimizer works on

    def masters(self) -> list[tuple[int, Tensor]]:
        """(optimizer group, owned values to optimize) for every bucket, each with its gradient attached."""
        for master, bucket in zip(self._masters, self.live, strict=True):
            master.grad = bucket.gradient.to(master.dtype)
        return list(zip(self._groups, self._masters, strict=True))

    def squares(self) -> Tensor:
        """The fp64 sum of squares of the gradients that this rank counts; ranks that share them count them once."""
        counts = self.holding.chunks > 1 or self.rank == 0
        return sum_of_squares((bucket.gradient for bucket in self.live if counts), device=self.device)

    def rescale(self, factor: float | Tensor) -> None:
        """Multiply every owned gradient."""
        for bucket in self.live:
            bucket.gradient.mul_(factor)

    def publish(self) -> None:
        """Bring the new master values to the parameters of every rank."""
        works = []
        for bucket, master, values in zip(self._buckets, self._masters, self._values, strict=True):
            start, stop = self._owned(bucket)
            mine = values[start:stop]
            if mine.data_ptr() != master.data_ptr():
                mine.copy_(master)
            if self.holding.chunks > 1:
                works.append(collectives.all_gather_into_tensor(values, mine, group=self.group, async_op=True))
        for work in works:
            work.wait()

    def not_finite(self) -> list[str]:
        """The parameters whose gradient on this rank was not finite before it was summed."""
        if self.holding.reduction.ranks == 1:
            finite = {p.name: bool(p.data.isfinite().all()) for p in self.pieces("gradient")}
            return [name for name, is_finite in finite.items() if not is_finite]
        return [
            slot.name
            for bucket in self.live
            for slot, is_finite in zip(bucket.plan.slots, bucket.finite.tolist(), strict=True)
            if not is_finite
        ]

    # The same by name

    def pieces(self, of: Literal["master", "gradient"]) -> list[Piece]:
        """What this rank holds, by parameter name."""
        if of == "master":
            return list(self._pieces(self._masters))
        return list(self._pieces([bucket.gradient for bucket in self.live]))

    def state_pieces(self, states: Mapping[Tensor, Mapping[str, object]], key: str) -> list[Piece]:
        """An optimizer state by parameter name; states that are not as large as what they belong to are left out."""
        tensors = [states.get(master, {}).get(key) for master in self._masters]
        return list(self._pieces([t if isinstance(t, Tensor) and t.dim() == 1 else None for t in tensors]))

    def _pieces(self, owned: Sequence[Tensor | None]) -> Iterator[Piece]:
        for bucket, tensor in zip(self._buckets, owned, strict=True):
            if tensor is None:
                continue
            start, stop = self._owned(bucket)
            for slot in bucket.slots:
                low, high = max(slot.start, start), min(slot.stop, stop)
                if low < high:
                    data = tensor[low - start : high - start]
                    yield piece_of_range(slot.name, slot.shape, data, low - slot.start, high - slot.start)

    def detach(self) -> None:
        """Let the parameters go: they keep their values, each in memory of its own."""
        self.gradients.detach()
        for parameter in self.parameters.values():
            parameter.data = parameter.data.clone()
        for tensors in (self._values, self._masters, self.live):
            tensors.clear()


def _slots(buffers: Sequence[Buffer]) -> Iterator[Slot]:
    for buffer in buffers:
        for bucket in buffer.buckets:
            yield from bucket.slots


def _wider(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return torch.promote_types(one, other)
