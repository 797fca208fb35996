"""The trained parameters of one part in flat buffers: values, masters and gradients, whole or this rank's share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mizzen.comm import collectives, groups
from mizzen.comm.communicator import Work
from mizzen.kernels.norm import sum_of_squares
from mizzen.model.home import Site
from mizzen.model.piece import Piece, piece_of_boxes, piece_of_range
from mizzen.offload.away import away_refusal, check_here
from mizzen.offload.places import OffloadSettings
from mizzen.offload.rest import RestingPlaces
from mizzen.optim.own_rules import Portion
from mizzen.parallel.zero.addresses import ParameterAddresses
from mizzen.parallel.zero.gradients import Gradients, PassingGradients, WholeGradients
from mizzen.parallel.zero.live import LiveBucket, Target, alone, copy_all, stepped_of
from mizzen.parallel.zero.reduce import Reducer, Reduction, torch_dtype, wait_for
from mizzen.parallel.zero.slots import Bucket, Buffer
from mizzen.parallel.zero.stock import Stock, new_block
from mizzen.parallel.zero.twins import GradientHook
from mizzen.plan.parts import ReducedGradients, StoreContents, StoreMemory, StoreRanks, StoreStatus
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
    offload: OffloadSettings = OffloadSettings()
    nvme_bytes: int = 0
    """Bytes of masters and states that are to rest on NVMe."""
    is_staged: bool = False
    """Whether a backward waits for other stages of a pipeline before it starts."""

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
        twins: Mapping[str, GradientHook] | None = None,
    ) -> None:
        self.holding = holding
        self.is_away = False
        """Whether the parameters are in host memory for a while."""
        self.is_sharded = holding.chunks > 1
        """Whether this rank holds only a share of masters and states."""
        self.group = group
        self.rank = groups.get_rank(group) if holding.reduction.ranks > 1 else 0
        self.sites = sites or {}
        held = {slot.name for buffer in buffers for bucket in buffer.buckets for slot in bucket.slots}
        self.parameters = {name: parameter for name, parameter in parameters.items() if name in held}
        self.device = next(iter(self.parameters.values())).device
        self.stock = Stock(self.device)
        self.places = RestingPlaces(holding.offload, holding.nvme_bytes)
        self.buckets = _by_arrival([bucket for buffer in buffers for bucket in self._take_in(buffer)], self.parameters)
        kind = PassingGradients if holding.stage == 2 else WholeGradients
        reducer = Reducer(holding.reduction, group, self.stock)
        self.gradients: Gradients = kind(
            self.buckets, reducer, overlap=holding.overlap, hooks=twins or {}, is_staged=holding.is_staged
        )
        self.addresses = ParameterAddresses(self.buckets, self.parameters, self.gradients)
        self._ranges = {bucket: _counted(bucket, self.sites, self.rank, holding) for bucket in self.buckets}
        """Of each gradient what this rank counts in a norm."""
        self.ranks = StoreRanks(
            reduce_group=group,
            shard_group=group if self.is_sharded else None,
            replica_group=None if self.is_sharded else group,
            cut_groups=others or {},
            mean_factor=holding.weight,
            step_factor=holding.gain,
        )
        self.contents = StoreContents(
            trained=self.parameters,
            held=self.parameters,
            units=(tuple(self.parameters),),
            sites=self.sites,
            saved_elsewhere=frozenset() if counts else frozenset(self.parameters),
            lots=self.buckets,
            masters=[(bucket.group, target.tensor) for bucket in self.buckets for target in bucket.targets],
            portions={
                target.tensor: _portions(self.sites, bucket, target)
                for bucket in self.buckets
                for target in bucket.targets
            },
        )

    def _take_in(self, buffer: Buffer) -> Iterator[LiveBucket]:
        flat = new_block(buffer.numel, torch_dtype(buffer.dtype), self.device).zero_()
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
            rest = self.places.rest(bucket.place, f"{buffer.group} {buffer.dtype} {bucket.start}")
            master = rest.keep(master, values[start:stop])
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
                rest=rest,
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
    def status(self) -> StoreStatus:
        """What somebody has done with the parameters, which are always whole."""
        return StoreStatus(self._memory, has_new_values=self.addresses.has_new_values)

    # Gradients

    def begin_forward(self) -> None:
        """Let parameters be without a gradient during a forward."""
        self.gradients.begin_forward()

    def begin_backward(self, last: bool | None) -> None:
        """Let full buckets leave during the backward that follows."""
        self.gradients.begin_backward(last)

    def end_backward(self) -> None:
        """Send the rest, and wait."""
        self.gradients.end_backward()

    def reduce(self) -> ReducedGradients:
        """Make every owned gradient complete."""
        self.gradients.reduce()
        return ReducedGradients(
            has_arrived=self.gradients.has_arrived,
            has_unannounced=self.gradients.has_unannounced,
            squares=self._squares,
            nonfinite=self._nonfinite,
        )

    def _squares(self) -> Tensor:
        """The fp64 sum of squares of the gradients that this rank counts; ranks that have the same share the work."""
        if self.contents.saved_elsewhere:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        gradients = (bucket.gradient[start:stop] for bucket in self.buckets for start, stop in self._ranges[bucket])
        return sum_of_squares(gradients, device=self.device)

    def _nonfinite(self) -> list[str]:
        if self.holding.reduction.ranks == 1:
            return [piece.name for piece in self.pieces("gradient") if not bool(piece.data.isfinite().all())]
        return [
            slot.name
            for bucket in self.buckets
            if bucket.finite is not None
            for slot, is_finite in zip(bucket.plan.slots, bucket.finite.tolist(), strict=True)
            if not is_finite
        ]

    def clear_gradients(self, *, taken: bool = False) -> None:
        """Forget all gradients, also those of a backward that has failed half-way."""
        self.gradients.clear()
        if taken:
            self.addresses.has_new_values = False

    # Values

    def write_back(self) -> None:
        """Bring the new master values to the parameters of every rank."""
        for bucket in self.buckets:
            bucket.write_back()
        with torch.no_grad():
            works = self._send_all()
        for bucket in self.buckets:
            bucket.unload()
        wait_for(*works)

    def _send_all(self) -> list[Work | None]:
        mine = [bucket.mine(bucket.values) for bucket in self.buckets]
        pairs = zip(self.buckets, mine, strict=True)
        apart = [pair for bucket, values in pairs for pair in bucket.rest.arrived(values, bucket.master)]
        if apart:
            copy_all([values for values, _ in apart], [master for _, master in apart])
        if not self.is_sharded:
            return []
        return [_sent(bucket, values, self.group) for bucket, values in zip(self.buckets, mine, strict=True)]

    def update_copies(self, of: str, name: str, value: Callable[[], Tensor]) -> None:
        """Let a parameter have the value of its master, or a local gradient that is summed again that of the sum."""
        if of == "gradient":
            self.gradients.update_copies(name, value)
            return
        with torch.no_grad():
            self.parameters[name].copy_(part_for(self.parameters[name], value(), self.sites.get(name)).to(self.device))

    def restore_parameters(self, replaced: Mapping[str, Tensor] | None = None) -> None:
        """Let parameters lie in their buckets again; a master whose parameter is as it was keeps its low bits."""
        if self.is_away:
            raise away_refusal("the model")
        for name, parameter in (replaced or {}).items():
            self.addresses.replace(name, parameter)
        self.addresses.restore()
        for bucket in self.buckets if replaced is not None else ():
            bucket.keep_writes()

    @contextmanager
    def gather(self, names: Iterable[str]) -> Iterator[Mapping[str, Tensor]]:
        """Parameters are always whole."""
        yield {name: self.parameters[name] for name in names}

    # Pieces by name

    def pieces(
        self, of: str, states: Mapping[Tensor, Mapping[str, object]] | None = None, only: str | None = None
    ) -> list[Piece]:
        """What this rank holds, by parameter name; states that are not as large as what they belong to are left out."""
        if of == "master" and states is None:
            self.restore_parameters({})
        buckets = [each for each in self.buckets if only is None or any(slot.name == only for slot in each.plan.slots)]
        if states is None:
            owned = ((bucket, bucket.master if of == "master" else bucket.gradient) for bucket in buckets)
            return [
                bucket.rest.readable(tensor, piece)
                for bucket, tensor in owned
                for piece in self._pieces(bucket, 0, tensor, only)
            ]
        found = (
            (bucket, target, states.get(target.tensor, {}).get(of)) for bucket in buckets for target in bucket.targets
        )
        return [
            bucket.rest.readable(state, piece)
            for bucket, target, state in found
            if isinstance(state, Tensor) and state.shape == target.shape
            for piece in self._pieces(bucket, target.start, state.view(-1), only)
        ]

    def _pieces(self, bucket: LiveBucket, start: int, tensor: Tensor, only: str | None) -> Iterator[Piece]:
        """The parameters in a flat tensor that begins at a place of the owned chunk."""
        check_here(tensor, "what is asked for")
        for number, low, high in bucket.owned_slots(start, start + tensor.numel()):
            slot, at = bucket.plan.slots[number], bucket.start
            if only is not None and slot.name != only:
                continue
            data, first, last = tensor[low - start : high - start], low + at - slot.start, high + at - slot.start
            if (site := self.sites.get(slot.name)) is None:
                yield piece_of_range(slot.name, slot.shape, data, first, last)
            else:
                yield piece_of_boxes(slot.name, site.shape, data, site.boxes_of_range(first, last))

    # Memory that leaves the device for a while

    def _memory(self) -> StoreMemory:
        """The buckets, their masters and what there is of gradients."""
        self.stock.drop_free()
        gradients = [parameter.grad for parameter in self.parameters.values()]
        gradients += [each for bucket in self.buckets for each in (bucket.whole, bucket.sums.tensor)]
        return StoreMemory(
            values=[bucket.values for bucket in self.buckets],
            masters=[bucket.master for bucket in self.buckets],
            gradients=[each for each in gradients if each is not None],
            replace_values=partial(_replace_values, self),
            returned=self.stock.note_addresses,
        )

    def release(self) -> None:
        """Let the parameters go: they keep their values, each in memory of its own."""
        self.gradients.release()
        for parameter in self.parameters.values():
            parameter.data = parameter.data.clone()
        self.buckets, self.parameters, self.contents = (), {}, StoreContents()
        self.addresses = ParameterAddresses((), {}, self.gradients)
        self._ranges.clear()
        self.stock.clear()
        self.places.close()


def _replace_values(store: FlatStore, values: Sequence[Tensor], is_away: bool) -> None:
    """Let parameters, and masters that are a part of them, lie in other memory with the same content."""
    for bucket, flat in zip(store.buckets, values, strict=True):
        is_master = bucket.master.untyped_storage().data_ptr() == bucket.values.untyped_storage().data_ptr()
        bucket.values = flat
        if is_master:
            bucket.master = bucket.mine(flat)
            bucket.unload()
        for parameter, place in zip(bucket.parameters, bucket.places(flat), strict=True):
            parameter.data = alone(place)
    store.is_away = is_away
    store.addresses.note()


def part_for(parameter: Tensor, value: Tensor, site: Site | None) -> Tensor:
    """What belongs to a parameter of a value that is whole, or that is its part already."""
    return value if site is None or value.shape == parameter.shape else site.part_of(value)


def _counted(bucket: LiveBucket, sites: Mapping[str, Site], rank: int, holding: Holding) -> Sequence[tuple[int, int]]:
    """The ranges of a bucket's gradient that a rank counts; ranks that have the same share the work."""
    start, stop = (0, bucket.master.numel()) if bucket.is_shared else bucket.plan.owned(rank, holding.reduction.ranks)
    if not any(sites[slot.name].is_shared for slot in bucket.plan.slots if slot.name in sites):
        return [(start, stop)]
    ranges: list[tuple[int, int]] = []
    for number, low, high in bucket.owned_slots(start, stop):
        found = _own_ranges(sites, bucket, number, low, high)
        ranges += ((low, high),) if found is None else found
    return ranges


def _portions(sites: Mapping[str, Site], bucket: LiveBucket, target: Target) -> list[Portion]:
    """Which ranges of what is stepped belong to which parameter."""
    return [
        Portion(
            bucket.plan.slots[number].name,
            low - target.start,
            high - target.start,
            _own_ranges(sites, bucket, number, low, high, target.start),
        )
        for number, low, high in bucket.owned_slots(target.start, target.stop)
    ]


def _own_ranges(
    sites: Mapping[str, Site], bucket: LiveBucket, number: int, low: int, high: int, start: int = 0
) -> tuple[tuple[int, int], ...] | None:
    """What a rank counts of a slot between two places of the owned chunk, from `start` on; None is all of it."""
    slot = bucket.plan.slots[number]
    site, first = sites.get(slot.name), bucket.start - slot.start
    if site is None or not site.is_shared:
        return None
    found = site.ranges(site.boxes_of_range(low + first, high + first))
    return tuple((low - start + each.start, low - start + each.stop) for each in found if each.is_counted)


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
        yield Target(stepped_of(master, dtype), 0, master.numel(), tuple(master.shape))
        return
    for slot in bucket.slots:
        view = master[slot.start : slot.stop].view(slot.shape)
        yield Target(stepped_of(view, dtype), slot.start, slot.stop, slot.shape)
