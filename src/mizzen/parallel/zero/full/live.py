"""A unit with its tensors on this rank: the shards, and the gradients of the trained ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from mizzen.comm import collectives, groups
from mizzen.comm.tags import Tag
from mizzen.parallel.zero.full.units import Unit, shard_dim
from mizzen.parallel.zero.stock import Sums

MULTIPLE: Final = 32
"""Elements; what the optimizer steps has a multiple of it, so that no element is computed by another kind of kernel
than at the other stages, whose last bit may differ."""


@dataclass(slots=True, eq=False)
class Trained:
    """One trained parameter of a unit: its shard, and the places of its gradient and its master."""

    name: str
    parameter: DTensor
    start: int
    """Where its gradient begins among those of the unit."""
    length: int
    """Elements of a shard, padding included, which this rank's own may be without."""
    offset: int
    """Where its master begins in its share."""

    def gradient(self, flat: Tensor) -> Tensor:
        """Its part of a tensor that is laid out as the gradients of the unit."""
        return self._part(flat, self.start)

    def master(self, flat: Tensor) -> Tensor:
        """Its part of a tensor that is laid out as its share."""
        return self._part(flat, self.offset)

    def _part(self, flat: Tensor, start: int) -> Tensor:
        shape = local(self.parameter).shape
        return flat[start : start + shape.numel()].view(shape)


@dataclass(slots=True, eq=False)
class Share:
    """The shards of a unit that one optimizer group trains, in one flat tensor: the parameters' own memory."""

    group: int
    trained: tuple[Trained, ...]
    master: Tensor
    stepped: Tensor
    """What the optimizer steps: the master itself, or a wider copy of it that is empty between steps."""
    is_whole: bool = False
    """Whether its rule needs whole parameters, so that it steps these on their owners instead (`whole.py`)."""

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
class LiveUnit:
    """Parameters that travel together."""

    plan: Unit
    module: Any
    parameters: dict[str, DTensor]
    """All of them by name, in the order in which they travel."""
    shares: tuple[Share, ...]
    sums: Sums
    """Of the gradients of this rank's shards, one after the other."""
    device: torch.device
    finite: Tensor | None = None
    """For each trained parameter, whether this rank's own gradient was finite before it was summed. None: all are."""
    has_strangers: bool = False
    """Whether gradients are among the sums that came from a backward which nobody announced."""
    handles: list[RemovableHandle] = field(default_factory=list)
    open: int = 0
    """How many contexts hold it gathered."""
    is_complete: bool = False
    """Whether its gradients are summed and nothing more comes before the step."""

    @property
    def count(self) -> int:
        """Elements of its gradients on this rank."""
        return self.sums.count

    @property
    def gradient(self) -> Tensor:
        """The sums without the padding; zeros where none has come."""
        return self.sums.read()[: self.count]

    def forget(self) -> None:
        """Let go of the gradients."""
        self.sums.forget()
        self.finite, self.has_strangers, self.is_complete = None, False, False

    def note_finite(self, flags: Tensor) -> None:
        """Remember which of this rank's own gradients are finite."""
        self.finite = flags if self.finite is None else self.finite & flags

    @property
    def trained(self) -> list[Trained]:
        """The trained parameters in the order in which they travel."""
        return sorted((each for share in self.shares for each in share.trained), key=lambda each: each.start)


@dataclass(frozen=True, slots=True, eq=False)
class ShareLot:
    """A share of a unit as it is stepped: a `plan.parts.Lot`."""

    unit: LiveUnit
    share: Share

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the optimizer steps."""
        return (self.share.stepped,)

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of its unit are summed and nothing more comes before the step."""
        return self.unit.is_complete

    def load(self, factor: float = 1.0) -> None:
        """Give what the optimizer steps its value, and its gradient times a factor, in its own dtype."""
        share = self.share
        if share.stepped is not share.master:
            share.stepped.data = share.master.to(share.stepped.dtype)
        gradient = share.gradient(self.unit.sums).to(share.stepped.dtype)
        share.stepped.grad = gradient if factor == 1 else gradient.mul_(factor)

    def write_back(self) -> None:
        """Bring what was stepped to the master, which it is itself unless it is wider."""
        share = self.share
        if share.stepped is not share.master and share.stepped.numel():  # nothing is new of what is at rest
            share.master.copy_(share.stepped)

    def rest(self) -> None:
        """Let go of what only a step needs."""
        self.share.stepped.grad = None
        if self.share.stepped is not self.share.master:
            self.share.stepped.data = self.share.stepped.new_empty(0)


def local(parameter: DTensor) -> Tensor:
    """The memory of this rank's shard."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        found: Tensor = parameter.to_local()
    return found


def up(count: int) -> int:
    """The next multiple."""
    return -(-count // MULTIPLE) * MULTIPLE


def gather_shards(
    shard: Tensor,
    shape: Sequence[int],
    dim: int,
    group: ProcessGroup,
    *,
    dtype: torch.dtype | None = None,
    tag: Tag | None = None,
) -> Tensor:
    """The tensor of this shape that the ranks of a group have cut along `dim`, by torch.chunk's rule."""
    ranks, sizes = groups.get_world_size(group), list(shape)
    sizes[dim] = -(-shape[dim] // ranks)
    mine = shard.new_zeros(sizes, dtype=dtype or shard.dtype)
    mine.narrow(dim, 0, shard.shape[dim]).copy_(shard)
    every = mine.new_empty([ranks, *sizes])
    collectives.all_gather_into_tensor(every.view(-1), mine.view(-1), group=group, tag=tag)
    return joined(every, shape, dim)


def joined(rows: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """The tensor of this shape whose parts along `dim`, padded to one size, are these rows, one for each rank."""
    sizes = list(shape)
    sizes[dim] = -(-shape[dim] // len(rows))
    every = rows.reshape(len(rows), *sizes)
    # Along the first dimension this is no copy.
    whole = every.flatten(0, 1) if dim == 0 else torch.cat(every.unbind(0), dim)
    return whole.narrow(dim, 0, shape[dim]).contiguous()


def rows_of(whole: Tensor, ranks: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """A whole tensor as one row of `length` elements for each rank: its part, and zeros where that is shorter."""
    dim = shard_dim(whole.shape, ranks)
    rows = whole.new_zeros([ranks, length], dtype=dtype or whole.dtype)
    parts = torch.split(whole, -(-whole.shape[dim] // ranks), dim)
    for row, part in zip(rows, parts, strict=False):
        row[: part.numel()] = part.reshape(-1)
    return rows
