"""A unit with its tensors on this rank: its shards, the memory that they are gathered into, and its gradients.

A unit is gathered by one collective for each dtype, and freed again. The objects that the model computes with stay the
same: their storage is filled and emptied, so that whatever autograd has saved of them is good again after a gather.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mizzen.comm import groups
from mizzen.comm.backend import Tag
from mizzen.errors import UsageError
from mizzen.model.box import Box
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.parallel.zero.full.division import Unit
from mizzen.parallel.zero.full.sharded_parameter import (
    PROPERTIES,
    RECORD,
    SHARD_WISE,
    ShardedParameter,
    as_dtensor,
    check_gradient,
    chunk,
    joined,
    record_of,
    shard_dim,
    whole_view,
    with_dtensors,
    write_refusal,
)
from mizzen.parallel.zero.reduce import Finish
from mizzen.parallel.zero.stock import Stock, Sums
from mizzen.plan.parts import Rest


class Gather(Protocol):
    """How the shards of all ranks come together."""

    def __call__(self, rows: Tensor, mine: Tensor, group: ProcessGroup, tag: Tag | None) -> Finish:
        """Start to fill `rows`, one for each rank; the call that is returned finishes it."""


@dataclass(slots=True, eq=False)
class UnitParameter:
    """One parameter of a unit: the record of its shard, and the places of its gradient and its master."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    mesh: DeviceMesh
    is_trained: bool
    shard: Tensor
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
        return flat[start : start + self.shard.numel()].view(self.shard.shape)

    def write(self, value: Tensor) -> None:
        """Give the shard its part of a whole value."""
        if value.shape != self.shape:
            raise UsageError(f"'{self.name}' has shape {list(self.shape)}; the value given has {list(value.shape)}")
        first, last = chunk(self.shape[self.dim], self.mesh)
        with torch.no_grad():
            self.shard.copy_(value.narrow(self.dim, first, last - first))

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
            as_dtensor(record).copy_(with_dtensors(source), non_blocking)
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
    is_whole: bool = False
    """Whether its rule needs whole parameters, so that it steps these on their owners instead (`owned.py`)."""

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


@dataclass(slots=True, eq=False)
class Message:
    """Shards that travel in one collective, as values of one dtype or as the bytes of packed ones."""

    parameters: tuple[UnitParameter, ...]
    flats: tuple[Tensor, ...]
    """What this rank sends of them, one after the other."""
    dtype: torch.dtype
    is_packed: bool = False
    length: int = field(init=False)
    """Elements that a rank sends."""
    second: Tensor | None = None
    """Some ranks' rows of the last gather, kept until backward where a second copy was asked for."""

    def __post_init__(self) -> None:
        self.length = sum(flat.numel() for flat in self.flats)

    def sent(self) -> Tensor:
        """What this rank sends: its memory itself, where that is one piece of the right dtype."""
        if len(self.flats) == 1 and self.flats[0].dtype == self.dtype:
            return self.flats[0]
        found = self.flats[0].new_empty(self.length, dtype=self.dtype)
        at = 0
        for flat in self.flats:
            found[at : at + flat.numel()].copy_(flat)
            at += flat.numel()
        return found

    def received(self, rows: Tensor) -> None:
        """Put the rows of all ranks together in the memory of the parameters."""
        for each in self.parameters:
            storage = each.memory.untyped_storage()
            storage.resize_(each.memory.numel() * each.memory.element_size())
        table = rows.view(-1, self.length)
        if self.is_packed:
            at = 0
            for each in self.parameters:
                packed: Any = each.shard
                messages = table[:, at : at + packed.held.numel()]
                each.memory.copy_(packed.unpacked(messages))
                at += packed.held.numel()
            return
        lengths = [each.length for each in self.parameters]
        parts = [each.memory.view(len(table), -1) for each in self.parameters]
        aside = {at for at, each in enumerate(self.parameters) if each.dim}
        for at in aside:
            parts[at] = torch.empty_like(parts[at])
        torch.split_with_sizes_copy(table, lengths, 1, out=parts)
        for at in aside:
            each = self.parameters[at]
            each.memory.view(each.shape).copy_(joined(parts[at], each.shape, each.dim))


@dataclass(frozen=True, slots=True)
class UnitRanks:
    """Who shares the shards of a unit."""

    mesh: DeviceMesh
    sharers: ProcessGroup
    """The ranks of the mesh as a group."""
    copies: ProcessGroup | None
    """The ranks that hold the same shards; None where nobody else does."""
    everyone: ProcessGroup
    """All over which gradients are averaged."""
    second: ProcessGroup | None = None
    """The ranks that share a second copy for backward; None where there is none."""
    others: Mapping[str, ProcessGroup] = field(default_factory=dict)
    """For each axis that cuts some parameters, the ranks that have the rest of them."""


@dataclass(slots=True, eq=False)
class LiveUnit:
    """Parameters that travel together."""

    plan: Unit
    module: Any
    parameters: dict[str, UnitParameter]
    """All of them by name, in the order in which they travel."""
    shares: tuple[Share, ...]
    messages: tuple[Message, ...]
    sums: Sums
    """Of the gradients of this rank's shards, one after the other."""
    ranks: UnitRanks
    stock: Stock
    gather_rows: Gather
    finite: Tensor | None = None
    """For each trained parameter, whether this rank's own gradient was finite before it was summed. None: all are."""
    has_unannounced: bool = False
    """Whether gradients are among the sums that came from a backward which nobody announced."""
    open: int = 0
    """How many contexts hold it gathered."""
    is_complete: bool = False
    """Whether its gradients are summed and nothing more comes before the step."""
    is_gathered: bool = False
    in_backward: bool = False
    """Whether a backward has reached it and not left it yet."""
    reduce: Callable[[], None] = lambda: None
    """Sends the gradients that lie on its parameters to their owners; set once there is a store."""
    fetch: Callable[[], None] | None = None
    """Brings the shards to where they are read from, before each gather; None where they are there always."""
    trained: list[UnitParameter] = field(init=False)
    """The trained parameters in the order in which they travel."""
    _coming: list[Callable[[], Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trained = [each for each in self.parameters.values() if each.is_trained]

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.stock.device

    @property
    def is_root(self) -> bool:
        """Whether this is what the model itself has: it stays gathered from forward to backward."""
        return not self.plan.path

    @property
    def count(self) -> int:
        """Elements of its gradients on this rank."""
        return self.sums.count

    @property
    def gradient(self) -> Tensor:
        """The sums without the padding; zeros where none has come."""
        return self.sums.read()[: self.count]

    def complete(self) -> None:
        """The gradients are summed, and nothing more comes before the step."""
        self.is_complete = True
        for share in self.shares:
            if not share.is_whole:
                share.rest.leave(partial(share.gradient, self.sums))

    def forget(self) -> None:
        """Let go of the gradients."""
        self.sums.forget()
        for share in self.shares:
            share.rest.forget()
        self.finite, self.has_unannounced, self.is_complete = None, False, False

    def note_finite(self, flags: Tensor) -> None:
        """Remember which of this rank's own gradients are finite."""
        self.finite = flags if self.finite is None else self.finite & flags

    def start_gather(self, tag: Tag) -> None:
        """Let the shards of all ranks begin to come together, unless they have."""
        if self.is_gathered or self._coming:
            return
        if self.fetch is not None:
            self.fetch()
        for message in self.messages:
            ranks, mine, group = self.ranks.mesh.size(), message.second, self.ranks.second
            if mine is None or group is None:
                mine, group = message.sent(), self.ranks.sharers
            rows = self.stock.take(ranks * message.length, message.dtype)
            finish = self.gather_rows(rows, mine, group, tag)
            self._coming.append(_arrival(message, rows, finish))

    def gather(self, tag: Tag, *, keep_second: bool = False) -> None:
        """Let the parameters be whole."""
        if self.is_gathered:
            return
        self.start_gather(tag)
        coming, self._coming = self._coming, []
        with torch.no_grad():
            for finish, message in zip(coming, self.messages, strict=True):
                rows = finish()
                if keep_second and self.ranks.second is not None:
                    message.second = _second_of(rows, self.ranks.second)
                self.stock.give(rows)
        for each in self.parameters.values():
            each.show_whole()
        self.is_gathered = True

    def free(self) -> None:
        """Keep the shards alone, unless a context holds the unit gathered."""
        if self.open:
            return
        coming, self._coming = self._coming, []
        for finish in coming:  # gathered ahead of a use that did not come
            self.stock.give(finish())
        if self.is_gathered or coming:
            self.is_gathered = False
            for each in self.parameters.values():
                each.show_shard()

    def drop_second(self) -> None:
        """Forget the second copy: its values are old."""
        for message in self.messages:
            message.second = None


def _arrival(message: Message, rows: Tensor, finish: Finish) -> Callable[[], Tensor]:
    def arrive() -> Tensor:
        finish()
        message.received(rows)
        return rows

    return arrive


def _second_of(rows: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of the rows, which the ranks of a smaller group share."""
    return rows.chunk(groups.get_world_size(group))[groups.get_rank(group)].clone()


@dataclass(frozen=True, slots=True, eq=False)
class ShareLot:
    """A share of a unit as it is stepped: a `plan.parts.Lot`."""

    unit: LiveUnit
    share: Share

    @property
    def rest(self) -> Rest:
        """Where its masters and states rest."""
        return self.share.rest

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the optimizer steps."""
        return (self.share.stepped,)

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of its unit are summed and nothing more comes before the step."""
        return self.unit.is_complete

    def keep_writes(self) -> None:
        """Let a master that lies apart have what somebody has written to the shards."""
        self.rest.keep_writes(self.share.values, self.share.master)

    def load(self, factor: float = 1.0) -> None:
        """Give what the optimizer steps its value, and its gradient times a factor, in its own dtype."""
        self.keep_writes()
        share, dtype = self.share, self.share.stepped.dtype
        gradient = self.rest.gradient(share.gradient(self.unit.sums)).to(dtype)
        share.stepped.data = self.rest.values(share.master).to(dtype)
        share.stepped.grad = gradient if factor == 1 else gradient.mul_(factor)

    def write_back(self) -> None:
        """Bring what was stepped to the master, unless it is the master itself, or at rest."""
        share = self.share
        if share.stepped.numel() and share.stepped.data_ptr() != share.master.data_ptr():
            self.rest.put([(share.master, share.stepped)])

    def send(self) -> None:
        """Start to bring what was stepped to the shards, where these are not the masters."""
        self.rest.send(self.share.values, self.share.master, [(self.share.values, self.share.stepped)])

    def unload(self) -> None:
        """Let go of what only a step needs."""
        share = self.share
        share.stepped.grad = None
        is_apart = share.master.is_meta or share.stepped.dtype != share.master.dtype
        share.stepped.data = share.stepped.new_empty(0) if is_apart else share.master
