"""A unit with its tensors on this rank: the shards, and the gradients of the trained ones."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from mizzen.parallel.zero.full.units import Unit


@dataclass(slots=True, eq=False)
class Trained:
    """One trained parameter of a unit: its shard, and the place of its gradient among those of the unit."""

    name: str
    group: int
    parameter: DTensor
    start: int
    length: int
    """Elements of a shard, padding included, which this rank's own may be without."""
    stepped: Tensor
    """What the optimizer steps: the shard itself, or a wider copy that is empty between steps."""

    @property
    def master(self) -> Tensor:
        """This rank's shard as a plain tensor."""
        return local(self.parameter)

    def of(self, flat: Tensor) -> Tensor:
        """Its part of a tensor that is laid out as the gradients of the unit."""
        master = self.master
        return flat[self.start : self.start + master.numel()].view(master.shape)


@dataclass(slots=True, eq=False)
class LiveUnit:
    """Parameters that travel together."""

    plan: Unit
    module: Any
    parameters: dict[str, DTensor]
    """All of them by name, in the order in which they travel."""
    trained: tuple[Trained, ...]
    gradient: Tensor
    """The sums of this rank's shards, one after the other."""
    finite: Tensor
    """For each trained parameter, whether this rank's own gradient was finite before it was summed."""
    handles: list[RemovableHandle] = field(default_factory=list)
    open: int = 0
    """How many contexts hold it gathered."""

    def rows(self, sent: Tensor, ranks: int) -> Iterator[Tensor]:
        """The gradient of each trained parameter in what the unit sends, as one row per rank."""
        table = sent.view(ranks, -1)
        for each in self.trained:
            yield table[:, each.start : each.start + each.length]


def local(parameter: DTensor) -> Tensor:
    """The memory of this rank's shard."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        found: Tensor = parameter.to_local()
    return found
