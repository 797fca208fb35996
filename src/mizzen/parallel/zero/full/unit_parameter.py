"""One parameter of a unit: the record of its shard, and what becomes of whatever is done to it meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mizzen.errors import UsageError
from mizzen.model.box import Box
from mizzen.model.inputs import change_tensors, tensors_in
from mizzen.offload.away import check_here
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
