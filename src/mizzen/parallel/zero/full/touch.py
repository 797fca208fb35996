"""A sharded parameter that is used outside of its unit, made whole where it is touched, with a gradient that returns.

This is how a forward pass may use a parameter of another module, call a block's method instead of the block, or run a
part of a model on its own. It costs a gather for every use; a parameter that is registered with
`register_external_parameter`, or that code names (`model/uses.py`), belongs to the model itself and is gathered once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from mizzen.comm.communicator import meet
from mizzen.errors import CommError
from mizzen.log import warn_once
from mizzen.parallel.zero.full.gradients import UnitGradients
from mizzen.parallel.zero.full.live import LiveUnit, Trained, gather_shards, local, rows_of
from mizzen.parallel.zero.full.sharded import refusal
from mizzen.parallel.zero.full.units import shard_dim
from mizzen.parallel.zero.full.wires import explained
from mizzen.parallel.zero.reduce import torch_dtype


class Touch:
    """Makes one parameter whole, inside a forward pass or a backward."""

    def __init__(self, unit: LiveUnit, slot: Trained | None, gradients: UnitGradients, group: ProcessGroup) -> None:
        self.unit = unit
        self.slot = slot
        self.gradients = gradients
        self.group = group

    def __call__(self, parameter: Any, name: str) -> Tensor:
        """The whole parameter, as its unit would have it."""
        place = self.gradients.place
        if not place.calls and not place.is_backward:
            raise refusal(type(parameter).label, name)
        if torch.is_grad_enabled() and not place.is_backward:
            warn_once(
                f"'{type(parameter).label}' is used outside of its unit '{self.unit.plan.title}', and others may be: "
                "it is gathered for every such use. To gather it once, call mizzen.zero.register_external_parameter("
                "module, parameter) before initialize, or pin a module around both in zero_optimization.leaf_module",
                key="used outside of its unit",
            )
        found: Tensor = _Whole.apply(parameter, self)  # type: ignore[no-untyped-call]
        return found

    @property
    def ranks(self) -> int:
        """Who shares it."""
        return self.gradients.reducer.reduction.ranks

    def gather(self, parameter: Any) -> Tensor:
        """All shards in one tensor."""
        shape = list(parameter.shape)
        dtype = self.unit.plan.gathers_as if self.slot is not None else None
        try:
            return gather_shards(
                local(parameter),
                shape,
                shard_dim(shape, self.ranks),
                self.group,
                dtype=torch_dtype(dtype) if dtype else None,
                tag=self.gradients.place.tag(f"{type(parameter).label} outside of its unit"),
            )
        except CommError as error:
            raise explained(error) from None

    def give(self, gradient: Tensor) -> None:
        """Send a whole gradient to the owners of its shards."""
        slot = self.slot
        if slot is None:
            return
        rows = rows_of(gradient, self.ranks, slot.length, self.unit.sums.dtype)
        place = self.gradients.place
        meet(place.tag(f"{slot.name} outside of its unit"), self.group, rows)
        others = torch.tensor([one.name != slot.name for one in self.unit.trained], device=rows.device)
        self.unit.note_finite(others | rows.isfinite().all())
        self.gradients.take_one(self.unit, slot, rows.view(-1))


class _Whole(Function):
    """From a shard to a whole parameter; the gradient goes another way than autograd's."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, touch: Touch) -> Tensor:
        """Gather."""
        ctx.touch = touch
        return touch.gather(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        """Reduce."""
        ctx.touch.give(gradient)
        return None, None
