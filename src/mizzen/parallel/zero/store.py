"""The trained parameters of one part in flat buffers: values, masters and gradients, whole or this rank's share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mizzen.comm import collectives, groups
from mizzen.comm.communicator import Work
from mizzen.kernels.norm import sum_of_squares
from mizzen.model.home import Site
from mizzen.model.piece import Piece, piece_of_boxes, piece_of_range
from mizzen.optim.lamb import Portion
from mizzen.parallel.zero.gradients import Gradients, PassingGradients, WholeGradients
from mizzen.parallel.zero.live import LiveBucket, Target, alone, copy_all
from mizzen.parallel.zero.reduce import Reducer, Reduction, torch_dtype, wait_for
from mizzen.parallel.zero.residence import Residence
from mizzen.parallel.zero.slots import Bucket, Buffer
from mizzen.parallel.zero.stock import Stock
from mizzen.plan.parts import Lot
from mizzen.precision.policy import Policy, wider


@dataclass(frozen=True, slots=True)
class Holding:
    """How buffers are held, as plain values of the plan."""

    stage: Literal[0, 1, 2]
    reduction: Reduction
    policy: Policy = Policy(None, "float32", None)
    """The dtypes of gradients, masters and states; those of wider parameters have the parameters' own."""
    overlap: bool = True
    weight: float = 1.0
    """What makes of the mean over these ranks the mean that is asked for, which may be over more or fewer."""
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
        *,
        sites: Mapping[str, Site] | None = None,
        counts: bool = True,
        others: Mapping[str, ProcessGroup] | None = None,
    ) -> None:
        self.holding = holding
        self.weight, self.gain = holding.weight, holding.gain
        self.group = group
        self.sites = sites or {}
        self.counts = counts
        self.others = others or {}
        self.rank = groups.get_rank(group) if holding.reduction.ranks > 1 else 0
        held = {slot.name for buffer in buffers for bucket in buffer.buckets for slot in bucket.slots}
        self.parameters = {name: parameter for name, parameter in parameters.items() if name in held}
        self.everything: Mapping[str, Tensor] = self.parameters
        self.bundles: Sequence[Sequence[str]] = (tuple(self.parameters),)
        self.replaced: Sequence[tuple[Tensor, str]] = ()
        self.sharers = group
        self.copies = None if self.is_sharded else group
        self.scope: AbstractContextManager[None] = nullcontext()
        self.device = next(iter(self.parameters.values())).device
        self.stock = Stock(self.device)
        self.buckets = _by_arrival([bucket for buffer in buffers for bucket in self._take_in(buffer)], self.parameters)
        self.lots: Sequence[Lot] = self.buckets
        kind = PassingGradients if holding.stage == 2 else WholeGradients
        reducer = Reducer(holding.reduction, group, self.stock)
        self.gradients: Gradients = kind(self.buckets, reducer, overlap=holding.overlap)
        self.places = Residence(self.buckets, self.parameters, self.gradients)

    def _take_in(self, buffer: Buffer) -> Iterator[LiveBucket]:
        flat = torch.zeros(buffer.numel, dtype=torch_dtype(buffer.dtype), device=self.device)
        policy = self.holding.policy
        accumulation = torch_dtype(wider(policy.accumulation, buffer.dtype))
        kept = wider(policy.masters, buffer.dtype)
        stepped = torch_dtype(wider(policy.states, kept))
        for bucket in buffer.buckets:
            values = flat[bucket.start : bucket.stop]
            parameters = tuple(self.parameters[slot.name] for slot in bucket.slots)
            start, stop = bucket.owned(self.rank, self.holding.chunks)
            master = self._move(parameters, bucket, values, torch_dtype(kept))[start:stop]
            # The rest of a wider copy is not kept; a part of the values themselves stays one.
            if self.holding.stage and master.dtype != values.dtype:
                master = master.clone()
            yield LiveBucket(
                plan=bucket,
                group=buffer.group,
                parameters=parameters,
                values=values,
                start=start,
                master=master,
                targets=tuple(_targets(bucket, master, stepped)),
                accumulation=accumulation,
                is_shared=self.is_sharded,
                stock=self.stock,
            )

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

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds only a share of masters and states."""
        return self.holding.chunks > 1

    def follow(self, name: str, value: Tensor) -> None:
        """Let a parameter have the value that was given to its master."""
        with torch.no_grad():
            self.parameters[name].copy_(part_for(self.parameters[name], value, self.sites.get(name)).to(self.device))

    @contextmanager
    def whole(self, names: Iterable[str]) -> Iterator[Mapping[str, Tensor]]:
        """Parameters are always whole."""
        yield {name: self.parameters[name] for name in names}

    # What the optimizer works on

    def masters(self) -> list[tuple[int, Tensor]]:
        """(optimizer group, what the optimizer steps) for every bucket."""
        return [(bucket.group, target.tensor) for bucket in self.buckets for target in bucket.targets]

    def portions(self) -> dict[Tensor, list[Portion]]:
        """For each of these tensors, which ranges of it, counted flat, belong to which parameter."""
        return {
            target.tensor: [
                Portion(bucket.plan.slots[number].name, low - target.start, high - target.start)
                for number, low, high in bucket.owned_slots(target.start, target.stop)
            ]
            for bucket in self.buckets
            for target in bucket.targets
        }

    def saves(self, name: str) -> bool:
        """Whether these ranks save a parameter, or others do, that hold the same."""
        return self.counts

    def squares(self) -> Tensor:
        """The fp64 sum of squares of the gradients that this rank counts; ranks that have the same share the work."""
        if not self.counts:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        gradients = [bucket.gradient for bucket in self.buckets]
        if not self.is_sharded:
            owned = (bucket.plan.owned(self.rank, self.holding.reduction.ranks) for bucket in self.buckets)
            gradients = [whole[start:stop] for whole, (start, stop) in zip(gradients, owned, strict=True)]
        return sum_of_squares(gradients, device=self.device)

    def publish(self) -> None:
        """Bring the new master values to the parameters of every rank."""
        for lot in self.lots:
            lot.write_back()
        works = self._send_all()
        for lot in self.lots:
            lot.rest()
        wait_for(*works)

    def spread(self) -> None:
        """Bring master values that were written to the parameters of every rank."""
        with torch.no_grad():
            wait_for(*self._send_all())

    def _send_all(self) -> list[Work | None]:
        mine = [bucket.mine(bucket.values) for bucket in self.buckets]
        apart = [
            (values, bucket.master)
            for values, bucket in zip(mine, self.buckets, strict=True)
            if values.data_ptr() != bucket.master.data_ptr()
        ]
        if apart:
            copy_all([values for values, _ in apart], [master for _, master in apart])
        if not self.is_sharded:
            return []
        return [_sent(bucket, values, self.group) for bucket, values in zip(self.buckets, mine, strict=True)]

    def refresh(self) -> None:
        """Take new values of parameters over as masters; a master whose parameter is as it was keeps its low bits."""
        self.places.restore()
        for bucket in self.buckets:
            bucket.keep_writes()

    def not_finite(self) -> list[str]:
        """The parameters whose gradient on this rank was not finite before it was summed."""
        if self.holding.reduction.ranks == 1:
            return [piece.name for piece in self.pieces("gradient") if not bool(piece.data.isfinite().all())]
        return [
            slot.name
            for bucket in self.buckets
            if bucket.finite is not None
            for slot, is_finite in zip(bucket.plan.slots, bucket.finite.tolist(), strict=True)
            if not is_finite
        ]

    # The same by name

    def pieces(self, of: Literal["master", "gradient"]) -> list[Piece]:
        """What this rank holds, by parameter name."""
        if of == "master":
            self.refresh()
        owned = ((bucket, bucket.master if of == "master" else bucket.gradient) for bucket in self.buckets)
        return [piece for bucket, tensor in owned for piece in self._pieces(bucket, 0, tensor)]

    def state_pieces(self, states: Mapping[Tensor, Mapping[str, object]], key: str) -> list[Piece]:
        """An optimizer state by parameter name; states that are not as large as what they belong to are left out."""
        found = (
            (bucket, target, states.get(target.tensor, {}).get(key))
            for bucket in self.buckets
            for target in bucket.targets
        )
        return [
            piece
            for bucket, target, state in found
            if isinstance(state, Tensor) and state.shape == target.shape
            for piece in self._pieces(bucket, target.start, state.view(-1))
        ]

    def _pieces(self, bucket: LiveBucket, start: int, tensor: Tensor) -> Iterator[Piece]:
        """The parameters in a flat tensor that begins at a place of the owned chunk."""
        for number, low, high in bucket.owned_slots(start, start + tensor.numel()):
            slot, at = bucket.plan.slots[number], bucket.start
            data, first, last = tensor[low - start : high - start], low + at - slot.start, high + at - slot.start
            if (site := self.sites.get(slot.name)) is None:
                yield piece_of_range(slot.name, slot.shape, data, first, last)
            else:
                yield piece_of_boxes(slot.name, site.shape, data, site.boxes_of_range(first, last))

    def detach(self) -> None:
        """Let the parameters go: they keep their values, each in memory of its own."""
        self.gradients.detach()
        for parameter in self.parameters.values():
            parameter.data = parameter.data.clone()
        self.buckets, self.lots, self.parameters, self.everything = (), (), {}, {}
        self.places = Residence((), {}, self.gradients)
        self.stock.clear()


def part_for(parameter: Tensor, value: Tensor, site: Site | None) -> Tensor:
    """What belongs to a parameter of a value that is whole, or that is its part already."""
    return value if site is None or value.shape == parameter.shape else site.part_of(value)


def _by_arrival(buckets: list[LiveBucket], parameters: Mapping[str, nn.Parameter]) -> tuple[LiveBucket, ...]:
    """The buckets of all buffers in the order in which backward is likely to fill them: last parameters first."""
    place = {id(parameter): index for index, parameter in enumerate(parameters.values())}
    return tuple(sorted(buckets, key=lambda bucket: -min(place[id(parameter)] for parameter in bucket.parameters)))


def _sent(bucket: LiveBucket, mine: Tensor, group: ProcessGroup | None) -> Work | None:
    """Start to bring the owners' values of a bucket to every rank."""
    if bucket.plan.is_whole:
        return collectives.broadcast(bucket.values, group=group, group_src=bucket.plan.owner, async_op=True)
    return collectives.all_gather_into_tensor(bucket.values, mine, group=group, async_op=True)


def _targets(bucket: Bucket, master: Tensor, dtype: torch.dtype) -> Iterator[Target]:
    """What an optimizer steps of an owned chunk: all of it as one, or each parameter in its own shape."""
    if not master.numel():
        return
    if not bucket.is_whole:
        yield Target(master.to(dtype), 0, master.numel(), tuple(master.shape))
        return
    for slot in bucket.slots:
        view = master[slot.start : slot.stop].view(slot.shape)
        yield Target(view.to(dtype), slot.start, slot.stop, slot.shape)
