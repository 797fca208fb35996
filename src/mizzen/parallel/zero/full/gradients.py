"""How the gradients of units come to their owners: at once, in every backward, however it was started."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from mizzen.comm.backend import Tag
from mizzen.comm.communicator import compare_tags
from mizzen.errors import CommError, UsageError
from mizzen.kernels.norm import are_finite, is_all_finite
from mizzen.log import warn_once
from mizzen.parallel.zero.full.runtime import Position, UnitRuntime, explained, is_transformed, outside_transforms
from mizzen.parallel.zero.full.sharded_parameter import gather_shards, rows_of, use_refusal
from mizzen.parallel.zero.full.share import UnitParameter
from mizzen.parallel.zero.full.unit import LiveUnit
from mizzen.parallel.zero.reduce import Finish, Reducer, torch_dtype

IN_FLIGHT: Final = 2
"""Units on their way that keep the wire of CPU ranks busy and bound the memory. On a device one is enough: the host
waits for none, and the device for the one before."""


class UnitGradients:
    """A unit's gradients are summed over the ranks as backward leaves it, and added to this rank's shard of the sum.

    The store calls these methods where its own have the same names. Between replicas of the shards, where there are
    several, gradients are averaged once, by `reduce`: the mean of (a mean + what is new) is what it should be, so any
    number of backwards may follow.
    """

    def __init__(
        self,
        units: Sequence[LiveUnit],
        reducer: Reducer,
        replicas: Reducer,
        group: ProcessGroup | None,
        position: Position,
        *,
        is_first: bool = True,
    ) -> None:
        self.units = tuple(units)
        self.reducer = reducer
        self.replicas = replicas
        self.group = group
        """All ranks that train together."""
        self.position = position
        self.is_first = is_first
        """Whether this counts the steps, for all sets of units of a model."""
        self.has_arrived = False
        """Whether autograd has put a gradient on any parameter since the last step."""
        self.finish_backward: Callable[[], None] = lambda: None
        """Lets units send gradients that came without their notice."""
        self.unit_done: Callable[[], None] = lambda: None
        """Hears of each unit whose gradients are summed in the last backward before a step."""
        self._is_open = False
        self._is_complete = False
        self._is_last = False
        """Whether a step follows the backward that is under way."""
        self._pending: list[Finish] = []

    @property
    def has_unannounced(self) -> bool:
        """Whether gradients came from a backward that nobody announced with `begin_backward`."""
        return any(unit.has_unannounced for unit in self.units)

    def reduce_unit(self, unit: LiveUnit) -> None:
        """Sum the gradients that lie on the parameters of a unit over the ranks; zeros where there is none.

        Without zeros a rank that took another branch inside a unit would send fewer elements than the others.
        """
        trained = unit.trained
        if not trained:
            return
        gradients = [_dense(each.parameter.grad) for each in trained]
        self._check(unit, trained)
        self._note_finite(unit, gradients)
        in_flight = IN_FLIGHT if unit.device.type == "cpu" else 1
        while len(self._pending) >= in_flight:
            self._pending.pop(0)()
        ranks = unit.ranks.mesh.size()
        rows = unit.stock.take(ranks * unit.count, unit.sums.dtype)
        table = rows.view(ranks, -1)
        with torch.no_grad():
            for each, gradient in zip(trained, gradients, strict=True):
                part = table[:, each.start : each.start + each.length]
                if gradient is None:
                    part.zero_()
                else:
                    part.copy_(rows_of(gradient.detach(), ranks, each.length))
                    each.parameter.grad = None
            is_first = unit.sums.is_empty
            self._send(unit, rows, unit.sums.place()[: unit.count], unit.plan.title, add=not is_first)

    def _check(self, unit: LiveUnit, trained: Sequence[UnitParameter]) -> None:
        changed = [each.name for each in trained if not each.parameter.requires_grad]
        changed += [
            each.name for each in unit.parameters.values() if not each.is_trained and each.parameter.requires_grad
        ]
        if changed:
            raise UsageError(
                f"unit '{unit.plan.title}' has {len(trained)} trained parameters, and requires_grad of '{changed[0]}' "
                "was changed after initialize; change it back, or make a new engine"
            )

    def _note_finite(self, unit: LiveUnit, gradients: Sequence[Tensor | None]) -> None:
        """Remember which of this rank's own gradients are finite, before they are laid out for sending and summed."""
        found = [gradient.detach() for gradient in gradients if gradient is not None]
        self.has_arrived |= bool(found)
        if not all(is_all_finite(gradient.reshape(-1)) for gradient in found):
            fine = found[0].new_zeros(1)
            flags = [fine if gradient is None else gradient.detach() for gradient in gradients]
            unit.note_finite(are_finite(flags))

    def take_one(self, unit: LiveUnit, one: UnitParameter, rows: Tensor, tag: Tag) -> None:
        """Sum the gradient of one parameter, which was used outside of its unit."""
        self.has_arrived = True
        self._send(unit, rows, unit.gradient[one.start : one.start + one.length], one.name, add=True, tag=tag)

    def _send(
        self, unit: LiveUnit, rows: Tensor, chunk: Tensor, title: str, *, add: bool, tag: Tag | None = None
    ) -> None:
        """Sum something of all ranks, and put this rank's share of it into its place or add it there."""
        unit.has_unannounced |= not self._is_open
        unit.sums.on_the_way += 1
        self._is_complete = unit.is_complete = False
        was_backward, self.position.is_backward = self.position.is_backward, True
        try:
            tag = tag or self.position.tag(unit.plan.title)
            finish = self.reducer.to_owner(rows, chunk, add=add, title=title, tag=tag)
        except CommError as error:
            raise explained(error) from None
        finally:
            self.position.is_backward = was_backward

        def arrive() -> None:
            finish()
            unit.stock.give(rows)
            unit.sums.on_the_way -= 1
            unit.sums.settle(is_last=self._is_last and self._is_alone)
            if self._is_last:
                unit.bring_masters()
                self.unit_done()

        self._pending.append(arrive)

    def begin_backward(self, last: bool | None) -> None:
        """A backward starts. Gradients leave at once whatever comes next: there is no room for whole ones."""
        self._is_open = self.position.is_backward = True
        self._is_complete, self._is_last = False, bool(last)
        self._mark(False)
        for share in (share for unit in self.units for share in unit.shares) if last else ():
            share.rest.expect_step()

    def end_backward(self) -> None:
        """That backward is over, on every rank: one that is elsewhere is found before anything else is exchanged."""
        self.finish_backward()
        self._is_open = self.position.is_backward = False
        self._wait()
        self._compare_tags("the end of backward")
        for unit in self.units:  # also what was brought back and not added to
            unit.sums.settle(is_last=self._is_last and self._is_alone)
        self._is_complete = self._is_alone  # so that a rank reads and writes its own part alone
        self._mark(self._is_complete and self._is_last)

    def reduce(self) -> None:
        """Make every owned gradient complete."""
        self.finish_backward()
        if not self._is_complete:
            self._wait()
            self._compare_tags("the end of a step's gradients")
            if not self._is_alone:
                self._sum_replicas()
            self._is_complete = True
        self._mark(True)

    @property
    def _is_alone(self) -> bool:
        """Whether no other ranks hold the same shards."""
        return self.replicas.reduction.ranks == 1

    def _sum_replicas(self) -> None:
        """Average over the copies of the shards, so that few sums are on the device at once that rest elsewhere."""
        pending: list[tuple[LiveUnit, Finish]] = []
        for unit in (unit for unit in self.units if unit.shares):
            pending.append((unit, self.replicas.to_all(unit.sums.read())))
            if len(pending) > IN_FLIGHT:
                self._finish_replica(*pending.pop(0))
        for each, finish in pending:
            self._finish_replica(each, finish)

    @staticmethod
    def _finish_replica(unit: LiveUnit, finish: Finish) -> None:
        finish()
        unit.sums.settle(is_last=True)

    def _mark(self, is_complete: bool) -> None:
        """Say of all units whether their gradients are complete: a unit may be run several times in a backward."""
        for unit in self.units:
            if is_complete and not unit.is_complete:
                unit.complete()
            unit.is_complete = is_complete

    def clear(self, *, taken: bool = False) -> None:
        """Forget all gradients, and what was lost on their way where nobody steps with them."""
        self._wait()
        self.position.step += taken and self.is_first
        if not taken and any(not unit.sums.is_empty for unit in self.units):
            self.reducer.forget()
        self.has_arrived = False
        self._is_open = self._is_complete = self.position.is_backward = False
        for unit in self.units:
            unit.forget()

    def forget(self, names: Collection[str]) -> None:
        """Forget the gradients of some parameters."""
        self._wait()
        for unit in self.units:
            wanted = [each for each in unit.trained if each.name in names]
            if len(wanted) == len(unit.trained):
                unit.forget()
            for each in wanted if not unit.sums.is_empty else ():
                unit.gradient[each.start : each.start + each.length] = 0
            unit.sums.settle(is_last=False)

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        for finish in pending:
            finish()

    def _compare_tags(self, phase: str) -> None:
        if self.group is not None and self.units and self.units[0].device.type == "cpu":
            try:
                compare_tags(Tag(self.position.step, "", phase), self.group, torch.empty(0))
            except CommError as error:
                raise explained(error) from None


def _dense(gradient: Tensor | None) -> Tensor | None:
    """A gradient that has rows to send: an embedding may give a sparse one."""
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


@dataclass(frozen=True, slots=True)
class UseOutside:
    """Makes a sharded parameter whole where it is used outside of its unit, with a gradient that returns.

    This is how a forward pass may use a parameter of another module, call a block's method instead of the block, or run
    a part of a model on its own. It costs a gather for every use; a parameter that is registered with
    `register_external_parameter` belongs to the model itself and is gathered once.
    """

    unit: LiveUnit
    gradients: UnitGradients
    runtime: UnitRuntime

    def __call__(self, one: UnitParameter, operation: str) -> Tensor:
        """The whole parameter, as its unit would have it."""
        position = self.gradients.position
        if not position.calls and not position.is_backward:
            raise use_refusal(one.name, operation)
        if torch.is_grad_enabled() and not position.is_backward:
            warn_once(
                f"'{one.name}' is used outside of its unit '{self.unit.plan.title}', and others may be: "
                "it is gathered for every such use. To gather it once, call mizzen.zero.register_external_parameter("
                "module, parameter) before initialize, or pin a module around both in zero_optimization.leaf_module",
                key="used outside of its unit",
            )
        if is_transformed():
            return self._transformed(one)
        found: Tensor = _Whole.apply(one.parameter, one, self)  # type: ignore[no-untyped-call]
        return found

    def _transformed(self, one: UnitParameter) -> Tensor:
        """The whole parameter inside of a transform of torch.func, whose graph has no place for our node."""
        if not torch.is_grad_enabled():
            with outside_transforms():
                return self.gather(one)
        self.runtime.gather(self.unit)
        self.runtime.is_differentiated = True
        return one.parameter

    def gather(self, one: UnitParameter) -> Tensor:
        """All shards in one tensor."""
        dtype = self.unit.plan.gathers_as if one.is_trained else None
        try:
            return gather_shards(
                one.shard,
                one.shape,
                one.dim,
                self.unit.ranks.sharers,
                dtype=torch_dtype(dtype) if dtype else None,
                tag=self.gradients.position.tag(f"{one.name} outside of its unit"),
            )
        except CommError as error:
            raise explained(error) from None

    def give(self, one: UnitParameter, gradient: Tensor) -> None:
        """Send a whole gradient to the owners of its shards."""
        if not one.is_trained:
            return
        rows = rows_of(gradient, one.ranks, one.length, self.unit.sums.dtype).contiguous()
        others = torch.tensor([each.name != one.name for each in self.unit.trained], device=rows.device)
        self.unit.note_finite(others | rows.isfinite().all())
        tag = self.gradients.position.tag(f"{one.name} outside of its unit")
        self.gradients.take_one(self.unit, one, rows.view(-1), tag)


class _Whole(Function):
    """From a shard to a whole parameter; the gradient goes another way than autograd's."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, one: UnitParameter, use: UseOutside) -> Tensor:
        ctx.one, ctx.use = one, use
        return use.gather(one)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.use.give(ctx.one, gradient)
        return None, None, None
