"""The trained parameters of one part in flat buffers: values, masters and gradients, whole or this rank's share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mizzen.comm import collectives, groups
from mizzen.kernels.norm import sum_of_squares
from mizzen.model.piece import Piece, piece_of_range
from mizzen.parallel.zero.gradients import Gradients, PassingGradients, WholeGradients
from mizzen.parallel.zero.live import LiveBucket, alone
from mizzen.parallel.zero.reduce import Reducer, Reduction, torch_dtype, wait_for
from mizzen.parallel.zero.slots import Bucket, Buffer
from mizzen.precision.policy import Policy, wider


@dataclass(frozen=True, slots=True)
class Holding:
    """How buffers are held, as plain values of the plan."""

    stage: Literal[0, 1, 2]
    reduction: Reduction
    policy: Policy = Policy(None, "float32", None)
    """The dtypes of gradients, masters and states; those of wider parameters have the parameters' own."""
    overlap: bool = True
    gain: float = 1.0
    """What the mean gradient is multiplied with before a step: 1, or the ranks where a sum was asked for."""

    def __post_init__(self) -> None:
        if self.stage and self.reduction.ranks == 1:
            raise AssertionError(f"stage {self.stage} on one rank: there is nobody to share with")

    @property
    def chunks(self) -> int:
        """The number of ranks that share one bucket's master weights."""
        return self.reduction.ranks if self.stage else 1


class FlatStore:
    """Flat buffers of one part. What the engine asks of it is `plan.parts.Store`."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        parameters: Mapping[str, nn.Parameter],
        holding: Holding,
        group: ProcessGroup | None,
    ) -> None:
        self.holding = holding
        self.group = group
        self.rank = groups.get_rank(group) if holding.reduction.ranks > 1 else 0
        held = {slot.name for buffer in buffers for bucket in buffer.buckets for slot in bucket.slots}
        self.parameters = {name: parameter for name, parameter in parameters.items() if name in held}
        self.everything: Mapping[str, Tensor] = self.parameters
        self.bundles: Sequence[Sequence[str]] = (tuple(self.parameters),)
        self.replaced: Sequence[tuple[Tensor, str]] = ()
        self.sharers = group
        self.scope: AbstractContextManager[None] = nullcontext()
        self.device = next(iter(self.parameters.values())).device
        self.buckets = self._by_arrival([bucket for buffer in buffers for bucket in self._take_in(buffer)])
        kind = PassingGradients if holding.stage == 2 else WholeGradients
        self.gradients: Gradients = kind(self.buckets, Reducer(holding.reduction, group), overlap=holding.overlap)

    def _take_in(self, buffer: Buffer) -> Iterator[LiveBucket]:
        flat = torch.zeros(buffer.numel, dtype=torch_dtype(buffer.dtype), device=self.device)
        policy = self.holding.policy
        accumulation = torch_dtype(wider(policy.accumulation, buffer.dtype))
        kept = wider(policy.masters, buffer.dtype)
        stepped = torch_dtype(wider(policy.states, kept))
        for bucket in buffer.buckets:
            values = flat[bucket.start : bucket.stop]
            parameters = tuple(self.parameters[slot.name] for slot in bucket.slots)
            start, stop = self._owned(bucket)
            master = self._move(parameters, bucket, values, torch_dtype(kept))[start:stop]
            # The rest of a wider copy is not kept; a part of the values themselves stays one.
            if self.holding.stage and master.dtype != values.dtype:
                master = master.clone()
            whole = torch.zeros(bucket.numel if self.holding.stage < 2 else 0, dtype=accumulation, device=self.device)
            yield LiveBucket(
                plan=bucket,
                group=buffer.group,
                parameters=parameters,
                values=values,
                start=start,
                master=master,
                stepped=master.to(stepped),
                gradient=torch.zeros_like(master, dtype=accumulation) if self.holding.stage else whole,
                whole=whole,
                finite=torch.ones(len(bucket.slots), dtype=torch.bool, device=self.device),
            )

    def _owned(self, bucket: Bucket) -> tuple[int, int]:
        size = bucket.numel // self.holding.chunks
        start = self.rank * size if self.is_sharded else 0
        return start, start + size

    def _move(self, parameters: Sequence[nn.Parameter], bucket: Bucket, values: Tensor, kept: torch.dtype) -> Tensor:
        """Move parameters into their bucket, with the first rank's values; returns these as masters keep them."""
        exact = values if values.dtype == kept else torch.zeros_like(values, dtype=kept)
        for slot, parameter in zip(bucket.slots, parameters, strict=True):
            exact[slot.start : slot.stop].copy_(parameter.detach().reshape(-1))
        if self.holding.reduction.ranks > 1:
            collectives.broadcast(exact, group=self.group, group_src=0)
        if exact is not values:
            values.copy_(exact)
        for slot, parameter in zip(bucket.slots, parameters, strict=True):
            parameter.data = alone(values[slot.start : slot.stop].view(slot.shape))
        return exact

    def _by_arrival(self, buckets: list[LiveBucket]) -> tuple[LiveBucket, ...]:
        """The buckets of all buffers in the order in which backward is likely to fill them: last parameters first."""
        place = {id(parameter): index for index, parameter in enumerate(self.parameters.values())}
        return tuple(sorted(buckets, key=lambda bucket: -min(place[id(parameter)] for parameter in bucket.parameters)))

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a share of masters and states."""
        return self.holding.chunks > 1

    @property
    def gain(self) -> float:
        """What the mean gradient is to be multiplied with before a step."""
        return self.holding.gain

    def follow(self, name: str, value: Tensor) -> None:
        """Let a parameter have the value that was given to its master."""
        with torch.no_grad():
            self.parameters[name].copy_(value.to(self.device))

    @contextmanager
    def whole(self, names: Iterable[str]) -> Iterator[Mapping[str, Tensor]]:
        """Parameters are always whole."""
        yield {name: self.parameters[name] for name in names}

    # What the optimizer works on

    def masters(self) -> list[tuple[int, Tensor]]:
        """(optimizer group, what the optimizer steps) for every bucket."""
        return [(bucket.group, bucket.stepped) for bucket in self.buckets]

    def attach(self, factor: float = 1.0) -> None:
        """Give what the optimizer steps its value, and its gradient times a factor, in its own dtype."""
        for bucket in self.buckets:
            if bucket.stepped is not bucket.master:
                bucket.stepped.data = bucket.master.to(bucket.stepped.dtype)
            gradient = bucket.gradient.to(bucket.stepped.dtype)
            bucket.stepped.grad = gradient if factor == 1 else gradient.mul_(factor)

    def rest(self) -> None:
        """Let go of what only a step needs."""
        for bucket in self.buckets:
            bucket.stepped.grad = None
            if bucket.stepped is not bucket.master:
                bucket.stepped.data = bucket.stepped.new_empty(0)

    def squares(self) -> Tensor:
        """The fp64 sum of squares of the gradients that this rank counts; ranks that share them count them once."""
        counts = self.is_sharded or self.rank == 0
        return sum_of_squares((bucket.gradient for bucket in self.buckets if counts), device=self.device)

    def publish(self) -> None:
        """Bring the new master values to the parameters of every rank."""
        works = []
        for bucket in self.buckets:
            mine = bucket.mine(bucket.values)
            if bucket.stepped is not bucket.master:
                bucket.master.copy_(bucket.stepped)
            if mine.data_ptr() != bucket.master.data_ptr():
                mine.copy_(bucket.master)
            if self.is_sharded:
                works.append(collectives.all_gather_into_tensor(bucket.values, mine, group=self.group, async_op=True))
        self.rest()
        wait_for(*works)

    def refresh(self) -> None:
        """Take new values of parameters over as masters; a master whose parameter is as it was keeps its low bits."""
        for bucket in self.buckets:
            mine, master = bucket.mine(bucket.values), bucket.master
            if mine.data_ptr() != master.data_ptr():
                is_new = mine != master.to(mine.dtype)
                master.copy_(torch.where(is_new, mine.to(master.dtype), master))

    def not_finite(self) -> list[str]:
        """The parameters whose gradient on this rank was not finite before it was summed."""
        if self.holding.reduction.ranks == 1:
            return [piece.name for piece in self.pieces("gradient") if not bool(piece.data.isfinite().all())]
        return [
            slot.name
            for bucket in self.buckets
            for slot, is_finite in zip(bucket.plan.slots, bucket.finite.tolist(), strict=True)
            if not is_finite
        ]

    # The same by name

    def pieces(self, of: Literal["master", "gradient"]) -> list[Piece]:
        """What this rank holds, by parameter name."""
        return list(self._pieces(lambda bucket: bucket.master if of == "master" else bucket.gradient))

    def state_pieces(self, states: Mapping[Tensor, Mapping[str, object]], key: str) -> list[Piece]:
        """An optimizer state by parameter name; states that are not as large as what they belong to are left out."""

        def state(bucket: LiveBucket) -> Tensor | None:
            found = states.get(bucket.stepped, {}).get(key)
            return found if isinstance(found, Tensor) and found.shape == bucket.master.shape else None

        return list(self._pieces(state))

    def _pieces(self, owned: Callable[[LiveBucket], Tensor | None]) -> Iterator[Piece]:
        for bucket in self.buckets:
            tensor = owned(bucket)
            if tensor is None:
                continue
            start, stop = bucket.start, bucket.start + tensor.numel()
            for slot in bucket.plan.slots:
                low, high = max(slot.start, start), min(slot.stop, stop)
                is_here = low < high or start <= slot.start == slot.stop <= stop  # without elements, but with a name
                if is_here:
                    data = tensor[low - start : high - start]
                    yield piece_of_range(slot.name, slot.shape, data, low - slot.start, high - slot.start)

    def detach(self) -> None:
        """Let the parameters go: they keep their values, each in memory of its own."""
        self.gradients.detach()
        for parameter in self.parameters.values():
            parameter.data = parameter.data.clone()
        self.buckets, self.parameters, self.everything = (), {}, {}
