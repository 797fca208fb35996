"""The step over lots outside the device, of which the host takes its part during backward.

As soon as the gradient of a lot has come to host memory, it is stepped with there, into copies (`BackwardCopies`), with
the factor that gradients have in a step that is not clipped. The vote knows the rest: where it says the same factor,
and nobody has since written to what was read or put something else in its place, the copies take the place of masters
and states. Where gradients are clipped, such lots are stepped again from what they were; where the step is skipped,
they are as they were.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mizzen.engine.offloaded_step import HOST, LotFactors, OffloadedStep
from mizzen.offload.backward_copies import BackwardCopies, BackwardResult, copy_of, part_for
from mizzen.offload.rest_host import OnHost
from mizzen.offload.tier import DeviceCopy, host_memory
from mizzen.optim.rules import scaled, stand_ins, view_of
from mizzen.plan.parts import Lot


class StepInBackward(OffloadedStep):
    """Steps all lots of an engine, those of the host as soon as their gradients have come."""

    may_go_beside = False  # copies take their places at once

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        *,
        expected: Callable[[], float | None],
        threads: int,
        cores: Sequence[int] = (),
    ) -> None:
        super().__init__(optimizer, device, threads=threads, cores=cores)
        self.expected = expected
        """What gradients are multiplied with in the step that comes, unless they are clipped; None: nobody knows."""
        self._own_factors: dict[int, float] = {}
        """What gradients are multiplied with beside that, for lots that were stepped before and so have states."""
        self._followed: list[BackwardCopies] = []
        """The copies of the lots whose gradients start a step."""
        self._spare = host_memory(0)
        """Where a gradient is multiplied, as large as the largest."""
        self._counts = {"taken": 0, "repeated": 0}
        """Lots of the last step."""

    def begin(self, lots: Sequence[Lot], ratio: float | None) -> None:
        """Follow the gradients of all lots that rest in host memory; only a share that is given is streamed instead.

        None is nothing: a share that is measured might be all of it, and the host would step no lot during backward.
        """
        for lot in lots:
            if isinstance(lot.rest, OnHost):
                lot.rest.copies.start = partial(self._start, lot, lot.rest)
                self._followed.append(lot.rest.copies)
        super().begin(lots, ratio or 0.0)

    def close(self) -> None:
        """Follow no gradient any more, and end the thread. Whoever was asked here is forgotten, and so are the lots."""
        for copies in self._followed:
            copies.start = None
        self._followed.clear()
        self.expected = _unknown
        super().close()

    def _start(self, lot: Lot, rest: OnHost, arrival: DeviceCopy) -> Future[BackwardResult] | None:
        """Let the thread of the host step a lot, if it is known how."""
        factor, own = self.expected(), self._own_factors.get(id(lot))
        if factor is None or own is None or not rest.is_stepped_on_host:
            return None
        if rest.copies.states_of(lot.tensors, self.optimizer.state) is None:
            return None
        return self._thread.submit(self._step_into_copies, lot, rest, (factor, own), arrival)

    @torch.no_grad()
    def _step_into_copies(
        self, lot: Lot, rest: OnHost, factors: tuple[float, float], arrival: DeviceCopy
    ) -> BackwardResult:
        arrival.wait()
        rest.readers.wait()  # a save may still read what these copies were before
        settings, versions = self._settings(lot), rest.copies.versions()
        states = rest.copies.states_of(lot.tensors, self.optimizer.state)
        made = rest.copies.fill(lot.tensors, self.optimizer.state)
        view = stand_ins(self.optimizer, made)
        with scaled(view, factors[0], HOST) as left:
            gradient = self._gradient(rest.copies.gradient, lot.tensors[0].dtype, factors, left * factors[1])
            for tensor, (copy, _) in made.items():
                copy.grad = part_for(gradient, tensor)
            view.step()
        for copy, _ in made.values():
            copy.grad = None
        return BackwardResult(factors, settings, versions, states, made)

    def _gradient(self, gradient: Tensor, dtype: torch.dtype, factors: tuple[float, float], left: float) -> Tensor:
        """A gradient that a step may write to, times what is left to multiply it with."""
        if factors == (1.0, 1.0):
            return gradient.to(dtype)
        size = gradient.numel() * dtype.itemsize
        if self._spare.numel() < size:
            self._spare = host_memory(size)
        found = self._spare[:size].view(dtype).view(gradient.shape).copy_(gradient)
        return found if left == 1 else found.mul_(left)

    def _step_all(self, lots: LotFactors, factor: float) -> None:
        self._counts = dict.fromkeys(self._counts, 0)
        super()._step_all(lots, factor)
        self._measures |= {f"offload_lots_{name}": float(count) for name, count in self._counts.items()}

    def _step_lot(self, lot: Lot, rest: float, factor: float, device: torch.device) -> None:
        place = lot.rest
        if not isinstance(place, OnHost) or not place.is_stepped_on_host or not lot.tensors:
            super()._step_lot(lot, rest, factor, device)
            return
        found = place.copies.result()
        if found is not None and self._is_right(found, lot, place, (factor, rest)):
            place.readers.wait()
            place.copies.take(found, self.optimizer.state)
            place.rest_states(lot.tensors, self.optimizer.state)
            lot.send()
            lot.unload()
            self._counts["taken"] += 1
            return
        super()._step_lot(lot, rest, factor, device)
        self._counts["repeated"] += found is not None
        self._own_factors[id(lot)] = rest
        place.copies.make()

    def _is_right(self, found: BackwardResult, lot: Lot, rest: OnHost, factors: tuple[float, float]) -> bool:
        """Whether a step into copies has made what a step would make now."""
        is_same = found.factors == factors and found.versions == rest.copies.versions()
        if not is_same or rest.is_gradient_changed or not _are_same(found.settings, self._settings(lot)):
            return False
        states = rest.copies.states_of(lot.tensors, self.optimizer.state)
        return found.states is not None and states is not None and _are_same(found.states, states)

    def _settings(self, lot: Lot) -> list[dict[str, Any]]:
        """The optimizer's settings for a lot, as they are now."""
        groups = (group for group in view_of(self.optimizer, lot.tensors).param_groups if group["params"])
        return [
            {key: copy_of(value) for key, value in group.items()} | {"params": len(group["params"])} for group in groups
        ]


def _unknown() -> None:
    """Nobody knows what gradients are multiplied with."""


def _are_same(some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether settings, or states, have the same values, of which some may be tensors."""
    if [each.keys() for each in some] != [each.keys() for each in others]:
        return False
    return all(
        torch.equal(value, other[key])
        if isinstance(value, Tensor) and isinstance(other[key], Tensor)
        else type(value) is type(other[key]) and value == other[key]
        for one, other in zip(some, others, strict=True)
        for key, value in one.items()
    )
