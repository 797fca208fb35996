"""What a rank has of a unit: the shards of its parameters, what one optimizer group trains of them, and their sums.

A parameter has the record of its shard, and what becomes of whatever is done to it meanwhile. A share is what one group
trains. The sums are those of the unit's gradients, each where it rests.

[Note: where sums rest]
The sums of a unit whose masters rest on the device stay there. Others go to host memory when the last backward before
a step has completed them, and the device lets go of them; their squares are counted before. Sums that more is to be
added to, and sums that the device is to step with, stay there where it has room. Otherwise they leave as well: they
come back while the backward of their unit runs, are added to, and leave again. Sums of a unit with parameters that
their rule needs whole stay.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mizzen.errors import UsageError
from mizzen.model.box import Box
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.offload.away import check_here
from mizzen.offload.places import DEVICE
from mizzen.offload.shards import Shards
from mizzen.parallel.zero.full.sharded_parameter import (
    PROPERTIES,
    RECORD,
    SHARD_WISE,
    ShardedParameter,
    as_dtensor,
    check_gradient,
    chunk,
    record_of,
    shard_dim,
    whole_view,
    with_dtensors,
    write_refusal,
)
from mizzen.parallel.zero.stock import Stock, Sums
from mizzen.plan.parts import GradientPlace, Rest, StartedCopy


@dataclass(slots=True, eq=False)
class UnitParameter:
    """One parameter of a unit: the record of its shard, and the places of its gradient and its master."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    mesh: DeviceMesh
    is_trained: bool
    stand: Tensor
    """Its shard or, where that rests outside the device, what stands for it: of its shape, in other memory or none."""
    places: tuple[tuple[nn.Module, str], ...]
    """Where it stands in the model: modules, with its name there."""
    memory: Tensor
    """For the whole parameter, padded to equal parts; its storage is empty while the parameter is sharded."""
    start: int = 0
    """Where its gradient begins among those of the unit."""
    offset: int = 0
    """Where its master begins in its share."""
    touch: Callable[["UnitParameter", str], Tensor] | None = None
    """Makes it whole for one use, where that is allowed; set once there is a store."""
    kind: type = nn.Parameter
    """Its class while it is whole."""
    is_gathered: bool = False
    shards: Shards | None = None
    """Where its shard rests, among others; None on the device."""
    is_written: bool = False
    """Whether somebody has written to a shard that rests elsewhere, and masters do not know of it."""
    ranks: int = field(init=False)
    """How many ranks share it."""
    dim: int = field(init=False)
    """The dimension that is cut."""
    length: int = field(init=False)
    """Elements of a shard, padding included, which this rank's own may be without."""

    def __post_init__(self) -> None:
        self.ranks = self.mesh.size()
        self.dim = shard_dim(self.shape, self.ranks)
        self.length = self.memory.numel() // self.ranks

    @property
    def shard(self) -> Tensor:
        """This rank's part of it on the device: the memory itself, or a copy of what rests elsewhere."""
        return self.stand if self.shards is None else self.master(self.shards.here())

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What this rank holds of the whole parameter."""
        first, last = chunk(self.shape[self.dim], self.mesh)
        if first == last or not self.shape.numel():
            return ()
        ends = [(first, last) if dim == self.dim else (0, size) for dim, size in enumerate(self.shape)]
        return (Box(tuple(low for low, _ in ends), tuple(high for _, high in ends)),)

    def gradient(self, flat: Tensor) -> Tensor:
        """Its part of a tensor that is laid out as the gradients of the unit."""
        return self._part(flat, self.start)

    def master(self, flat: Tensor) -> Tensor:
        """Its part of a tensor that is laid out as its share."""
        return self._part(flat, self.offset)

    def _part(self, flat: Tensor, start: int) -> Tensor:
        return flat[start : start + self.stand.numel()].view(self.stand.shape)

    def write(self, value: Tensor) -> None:
        """Give the shard its part of a whole value."""
        if value.shape != self.shape:
            raise UsageError(f"'{self.name}' has shape {list(self.shape)}; the value given has {list(value.shape)}")
        first, last = chunk(self.shape[self.dim], self.mesh)
        self.write_part(value.narrow(self.dim, first, last - first))

    def write_part(self, part: Tensor) -> None:
        """Give the shard another value, where it rests."""
        with torch.no_grad():
            if self.shards is None:
                check_here(self.stand, f"'{self.name}'")
                self.stand.copy_(part)
                return
            self.master(self.shards.look()).copy_(part)
            self.shards.changed()
            self.is_written = True

    def show_whole(self) -> None:
        """The memory has the values: let the parameter be a plain one."""
        self.is_gathered = True
        self.parameter.__class__ = self.kind

    def show_shard(self) -> None:
        """Let go of the memory, and guard the parameter."""
        storage = self.memory.untyped_storage()
        if storage.nbytes() and not storage.resizable():  # somebody else has it too, such as a numpy array
            self.memory = torch.empty_like(self.memory)
            self.parameter.data = whole_view(self.memory, self.shape)
            storage = self.memory.untyped_storage()
        storage.resize_(0)
        self.is_gathered = False
        self.parameter.__class__ = ShardedParameter

    def copy(self) -> Tensor:
        """A shard of one's own, as a DTensor."""
        return as_dtensor(self).clone()

    def use(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take in a value, give a shard, or gather for this one operation."""
        check_gradient(self.name, func, name, args)
        first, tensors = args[0] if args else None, tensors_in((args, kwargs))
        if isinstance(first, ShardedParameter):
            if name in PROPERTIES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if name in ("detach", "data"):
                return _another_object(func, args)
            if name == "copy_":
                return _copy(first, *args[1:])
        only_shards = all(isinstance(each, ShardedParameter | DTensor) for each in tensors)
        if only_shards and (name in SHARD_WISE or isinstance(first, DTensor)):  # an average that somebody keeps
            plain, keywords = with_dtensors((args, kwargs))
            return func(*plain, **keywords)
        if isinstance(kwargs.get("out"), ShardedParameter):
            raise write_refusal(record_of(kwargs["out"]).name, name)
        wholes: list[tuple[str, Tensor, int]] = []

        def gathered(each: Tensor) -> Tensor:
            if not isinstance(each, ShardedParameter):
                return each
            record: Any = record_of(each)
            whole: Tensor = record.touch(record, name)
            wholes.append((record.name, whole, whole._version))
            return whole

        args, kwargs = change_tensors((args, kwargs), gathered)
        found = func(*args, **kwargs)
        for label, whole, version in wholes:
            if whole._version != version:  # what was written to is a copy that nobody keeps
                raise write_refusal(label, name)
        return found


def _another_object(func: Any, args: tuple[Any, ...]) -> Any:
    """A shard as another object, guarded alike: a plain DTensor would give the number of one rank."""
    if len(args) == 2:
        raise write_refusal(record_of(args[0]).name, "data")
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args)
    found.__class__ = ShardedParameter
    vars(found)[RECORD] = record_of(args[0])
    return found


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What `load_state_dict` does: of a whole tensor every rank takes its own part."""
    record: Any = record_of(target)
    if isinstance(source, DTensor | ShardedParameter):
        with torch.no_grad():
            mine = as_dtensor(record)
            if record.shards is None:
                mine.copy_(with_dtensors(source), non_blocking)
            else:
                record.write_part(with_dtensors(source).redistribute(mine.device_mesh, mine.placements).to_local())
    else:
        record.write(source)
    return target


@dataclass(slots=True, eq=False)
class Share:
    """The shards of a unit that one optimizer group trains, in one flat tensor."""

    group: int
    trained: tuple[UnitParameter, ...]
    values: Tensor
    """The shards, which are gathered."""
    master: Tensor
    """The shards as the optimizer left them: their own memory, unless it rests outside the device."""
    stepped: Tensor
    """What the optimizer steps: the master, or a wider copy of it that is empty between steps."""
    rest: Rest
    """Where the master and the optimizer's states rest."""
    shards: Shards | None = None
    """Where the values rest; None on the device."""
    is_whole: bool = False
    """Whether its rule needs whole parameters, so that it steps these on their owners instead (`owned.py`)."""

    is_sent: bool = False
    """Whether values that rest elsewhere have come from the masters since these were stepped."""

    @property
    def is_beside(self) -> bool:
        """Whether the host has it for a step that may go on beside the next forward."""
        return self.shards is not None and self.shards.beside is not None and self.shards.beside.is_begun

    def gradient(self, sums: Sums) -> Tensor:
        """The gradients of this share out of those of the unit: in their own place, if nothing else is in there.

        A step may write to gradients. In the place of the padding may be those of the next share.
        """
        flat, last = sums.read(), self.trained[-1]
        end = last.offset + last.length
        if last.start == last.offset and end in (self.master.numel(), sums.count):
            return flat[: self.master.numel()]
        found = flat.new_zeros(self.master.numel())
        for each in self.trained:
            found[each.offset : each.offset + each.length] = flat[each.start : each.start + each.length]
        return found

    def keep_writes(self) -> None:
        """Let a master that lies apart have what somebody has written to the shards."""
        if self.shards is None:
            self.rest.keep_writes(self.values, self.master)
        elif any(each.is_written for each in self.trained):
            values = self.shards.here() if self.rest.place == DEVICE else self.shards.look()
            self.rest.take_writes(values, self.master)
            for each in self.trained:
                each.is_written = False

    def send(self) -> None:
        """Start to bring what was stepped to the shards, where these are not the masters."""
        if self.shards is None:
            self.rest.send(self.values, self.master, [(self.values, self.stepped)])
            return
        if self.rest.is_stepped_on_host:
            self.shards.change(partial(self.rest.write_values, master=self.master, is_stepped=True))
        else:
            self.shards.take(self.stepped)
        self.is_sent = not self.is_beside

    def finish(self) -> None:
        """Let the shards have the values of the masters, however these became what they are."""
        if self.is_beside:
            return
        if self.shards is None:
            for place, value in self.rest.arrived(self.values, self.master):
                place.copy_(value)
        elif self.rest.place == DEVICE:
            self.shards.take(self.master)
        elif not self.is_sent:
            self.shards.change(partial(self.rest.write_values, master=self.master, is_stepped=False))
        self.is_sent = False


class UnitSums(Sums):
    """The sums of a unit's gradients: of this rank's shards, one share after the other. They may leave the device."""

    def __init__(
        self, stock: Stock, count: int, dtype: torch.dtype, *, padding: int = 0, shares: Sequence[Share] = ()
    ) -> None:
        super().__init__(stock, count, dtype, padding=padding)
        self.shares = tuple(shares)
        self.is_away = False
        """Whether they rest with the masters, and not on the device."""
        self.on_the_way = 0
        """How many sums over the ranks are under way to here."""
        self.count_squares: Callable[[], Tensor] = lambda: torch.zeros(0)
        """The sums of squares of what this rank counts; set once there is a store."""
        self._squares: Tensor | None = None
        """Of what is away, where it was counted before and nobody has looked at it since."""
        self._coming: list[StartedCopy] = []
        self._has_room: bool | None = None
        """Whether the device has room for them until the step; None before that is looked at in this step."""

    @property
    def is_empty(self) -> bool:
        """Whether no gradient has come since the last step."""
        return self.tensor is None and not self.is_away

    def place(self) -> Tensor:
        """Where they are to be on the device, padding included; those that are away come back."""
        self.fetch()
        for copy in self._coming:
            copy.wait_on_stream()
        self._coming.clear()
        return super().place()

    def fetch(self) -> None:
        """Start to bring them back, ahead of a use."""
        if not self.is_away:
            return
        self.is_away, self._squares = False, None
        into = super().place()
        for share, place in self._places():
            first, last = share.trained[0], share.trained[-1]
            self._coming.append(place.bring(into[first.start : last.start + last.length]))

    def _places(self) -> Iterator[tuple[Share, GradientPlace]]:
        """The shares whose part of the sums can rest elsewhere: all of them, or the sums stay."""
        return ((share, place) for share in self.shares if (place := share.rest.resting_gradient) is not None)

    def settle(self, *, is_last: bool, must: bool = False) -> None:
        """Nothing is under way: let them leave the device, unless they belong there, or may stay and have room.

        What came last before a step is counted first. Where there is none yet, zeros leave if they `must`.
        """
        if (must or not (self.is_empty or self.on_the_way)) and self._leaves(is_last=is_last):
            self._leave(is_last=is_last)

    def _leaves(self, *, is_last: bool) -> bool:
        """Whether they are to rest with the masters. See [Note: where sums rest]."""
        places = [place for share, place in self._places() if not share.is_whole]
        if not places or len(places) < len(self.shares):
            return False
        if is_last and all(share.rest.is_stepped_on_host for share in self.shares):
            return True
        if self._has_room is None:
            self._has_room = places[0].has_room((self.count + self.padding) * self.dtype.itemsize)
        return not self._has_room

    def _leave(self, *, is_last: bool) -> None:
        if self.is_away:
            return
        flat = self.read()
        self._squares = self.count_squares() if is_last else None
        for share, place in self._places():
            place.keep(share.gradient(self))
            if is_last:
                share.rest.step_in_backward()
        self.stock.give(flat)
        self.tensor, self.is_away = None, True

    def squares(self) -> Tensor:
        """The sums of squares of what this rank counts; those that are away come back, if they were not counted."""
        if self._squares is not None:
            return self._squares
        was_away, found = self.is_away, self.count_squares()
        if was_away:
            self._leave(is_last=False)
            self._squares = found
        return found

    def gradients(self) -> Iterator[tuple[UnitParameter, Tensor]]:
        """Each parameter with its shard of the gradient, where that is; somebody may write to it."""
        self._squares = None
        if self.is_away:
            for share, place in self._places():
                there = place.look()
                yield from ((each, each.master(there)) for each in share.trained)
            return
        flat = self.read()
        yield from ((each, each.gradient(flat)) for share in self.shares for each in share.trained)

    def forget(self) -> None:
        """No gradient has ever come."""
        for copy in self._coming:
            copy.wait_on_stream()
        self._coming.clear()
        super().forget()
        self.is_away, self.on_the_way, self._squares, self._has_room = False, 0, None, None
