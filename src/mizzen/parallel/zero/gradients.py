"""How gradients gather on a rank and leave for their owners: whole and in place, or bucket by bucket.

Nothing is sent outside `arm` ... `settle` and `collect`, which every rank calls alike; and buckets always leave in the
same order. So ranks whose gradients arrive in another order, or not at all, still take part in the same collectives.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mizzen.errors import UsageError
from mizzen.kernels.norm import are_finite
from mizzen.parallel.zero.reduce import Finish, Reducer
from mizzen.parallel.zero.slots import Bucket


class LiveBucket:
    """A bucket with its tensors on this rank."""

    def __init__(self, plan: Bucket, parameters: Sequence[nn.Parameter], gradient: Tensor) -> None:
        self.plan = plan
        self.parameters = tuple(parameters)
        self.gradient = gradient
        """The gradient of the owned chunk, in the accumulation dtype; complete after `collect`."""
        self.finite = torch.ones(len(plan.slots), dtype=torch.bool, device=gradient.device)
        """For each slot, whether this rank's own gradient was finite before it was summed."""
        self.missing = 0
        self.has_left = False

    def views(self, flat: Tensor) -> list[Tensor]:
        """The place of each parameter in a tensor that holds the whole bucket."""
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.plan.slots]


class Gradients(Protocol):
    """Where gradients go. The engine calls, in this order:

    arm(last)  a backward starts whose gradients may leave as they arrive; `last` is true before an optimizer step,
               and None when they are to stay, whatever the stage
    settle()   that backward is over; all that were to leave have left, and arrived at their owners
    collect()  before the optimizer: whatever came in other ways is sent too
    clear()    after it: start again from zero
    detach()   at the end of life: give the parameters back
    """

    def arm(self, last: bool | None) -> None:
        """Let full buckets leave during the backward that follows."""

    def settle(self) -> None:
        """Send the rest, and wait."""

    def collect(self) -> None:
        """Make every owned gradient complete."""

    def clear(self) -> None:
        """Forget all gradients."""

    def detach(self) -> None:
        """Remove the hooks."""


class _Arrivals:
    """Counts what has arrived and lets buckets leave in their fixed order. What leaving means is the subclass's."""

    waits_for_last: bool
    """Whether gradients stay here until the last backward before a step."""

    def __init__(self, buckets: Sequence[LiveBucket], reducer: Reducer, *, overlap: bool) -> None:
        self.buckets = tuple(buckets)
        self.reducer = reducer
        self.overlaps = overlap
        self.is_armed = self.is_open = False
        self.has_local = False
        """Whether gradients have come in that no owner has seen yet."""
        self.has_strangers = False
        """Whether some of them came from a backward that nobody announced with `arm`."""
        self._next = 0
        self._pending: list[Finish] = []
        self._handles: list[RemovableHandle] = []

    def arm(self, last: bool | None) -> None:
        self.is_armed = bool(last) if self.waits_for_last else last is not None
        self.is_open, self._next = True, 0
        for bucket in self.buckets:
            bucket.missing, bucket.has_left = len(bucket.plan.slots), False

    def settle(self) -> None:
        self.is_open = False
        if self.is_armed:
            self.is_armed = False
            self._send(self.buckets[self._next :])
            self._wait()
            self.has_local = False

    def collect(self) -> None:
        if self.has_local:
            self.arm(True)
            self.settle()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def keep(self) -> None:
        """Note that a gradient stays here for now."""
        self.has_local = True
        self.has_strangers |= not self.is_open

    def arrive(self, bucket: LiveBucket, position: int) -> None:
        """Count one gradient; a full bucket leaves when all before it have left."""
        if bucket.has_left:
            raise UsageError(
                f"a second gradient of '{bucket.plan.slots[position].name}' arrived in one backward, after the first had "
                "been sent; a reentrant activation checkpoint does this: use use_reentrant=False, or set "
                "zero_optimization.overlap_comm to false"
            )
        bucket.missing -= 1
        while self.overlaps and self._next < len(self.buckets) and self.buckets[self._next].missing <= 0:
            self._send(self.buckets[self._next : self._next + 1])
            self._next += 1

    def _send(self, buckets: Sequence[LiveBucket]) -> None:
        for bucket in buckets:
            bucket.has_left = True
            self._pending.append(self.leave(bucket))

    def _wait(self) -> None:
        for finish in self._pending:
            finish()
        self._pending.clear()

    def leave(self, bucket: LiveBucket) -> Finish:
        """Start the sum of one bucket."""
        raise NotImplementedError


class WholeGradients(_Arrivals):
    """Stages 0 and 1: a full gradient buffer, summed at the boundary. Each parameter's `grad` is a view of it.

    Stage 0 sums in place. A second backward before the step then adds to a mean, and the mean of (mean + new) over the
    ranks is what it should be; so any number of backwards may precede a step.
    """

    waits_for_last = True

    def __init__(
        self, buckets: Sequence[LiveBucket], flats: Sequence[Tensor], reducer: Reducer, *, overlap: bool, shards: bool
    ) -> None:
        super().__init__(buckets, reducer, overlap=overlap)
        self.flats = tuple(flats)
        self.shards = shards
        self._views = {id(bucket): bucket.views(flat) for bucket, flat in zip(buckets, flats, strict=True)}
        self._whole = {id(bucket): flat for bucket, flat in zip(buckets, flats, strict=True)}
        for bucket in buckets:
            for position, (parameter, view) in enumerate(zip(bucket.parameters, self._views[id(bucket)], strict=True)):
                parameter.grad_dtype = view.dtype
                parameter.grad = view
                hook = partial(self._arrived, bucket, position)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _arrived(self, bucket: LiveBucket, position: int, parameter: Tensor) -> None:
        view = self._views[id(bucket)][position]
        if parameter.grad is not view:  # a zero_grad of the user's took the view away
            view.copy_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = view
        if self.is_armed:
            self.arrive(bucket, position)
        else:
            self.keep()

    def leave(self, bucket: LiveBucket) -> Finish:
        flat = self._whole[id(bucket)]
        if self.reducer.reduction.ranks == 1:
            return self.reducer.to_all(flat)
        bucket.finite &= are_finite(self._views[id(bucket)])
        if bucket.plan.is_sparse:
            return partial(self._leave_by_rows, bucket)
        if self.shards:
            return self.reducer.to_owner(flat, bucket.gradient, add=False)
        return self.reducer.to_all(flat)

    def _leave_by_rows(self, bucket: LiveBucket) -> None:
        (view,) = self._views[id(bucket)]
        if not self.shards:
            self.reducer.rows_to_all(view)
            return
        flat = self._whole[id(bucket)].clone()  # the local sum stays as it is, for a further backward
        self.reducer.rows_to_all(flat[: view.numel()].view(view.shape))
        size = bucket.gradient.numel()
        bucket.gradient.copy_(flat[self.reducer.rank * size : (self.reducer.rank + 1) * size])

    def clear(self) -> None:
        self.has_local = self.has_strangers = False
        for bucket in self.buckets:
            bucket.finite.fill_(True)
            for parameter, view in zip(bucket.parameters, self._views[id(bucket)], strict=True):
                parameter.grad = view
        for flat in self.flats:
            flat.zero_()

    def detach(self) -> None:
        super().detach()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None


class PassingGradients(_Arrivals):
    """Stage 2: a gradient is copied into its bucket and freed; a full bucket is summed into the owner's chunk and freed.

    Outside `arm` ... `settle` gradients stay on their parameters until `collect`.
    """

    waits_for_last = False

    def __init__(self, buckets: Sequence[LiveBucket], reducer: Reducer, *, overlap: bool) -> None:
        super().__init__(buckets, reducer, overlap=overlap)
        self._filling: dict[int, Tensor] = {}
        self._idle: list[Tensor] = []
        self._has_sum = False
        for bucket in buckets:
            for position, parameter in enumerate(bucket.parameters):
                parameter.grad_dtype = bucket.gradient.dtype
                hook = partial(self._arrived, bucket, position)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _arrived(self, bucket: LiveBucket, position: int, parameter: Tensor) -> None:
        if not self.is_armed:
            self.keep()
            return
        if not bucket.has_left:
            self._take(bucket, position, parameter)
        self.arrive(bucket, position)

    def _take(self, bucket: LiveBucket, position: int, parameter: Tensor) -> None:
        slot = bucket.plan.slots[position]
        flat = self._filling.get(id(bucket))
        if flat is None:
            flat = self._filling[id(bucket)] = self._empty(bucket)
        flat[slot.start : slot.stop].view(slot.shape).add_(parameter.grad)  # type: ignore[arg-type]
        parameter.grad = None

    def _empty(self, bucket: LiveBucket) -> Tensor:
        size = bucket.plan.numel
        for place, flat in enumerate(self._idle):
            if flat.numel() == size:
                return self._idle.pop(place).zero_()
        return bucket.gradient.new_zeros(size)

    def leave(self, bucket: LiveBucket) -> Finish:
        for position, parameter in enumerate(bucket.parameters):
            if parameter.grad is not None:  # from a backward that was not armed
                self._take(bucket, position, parameter)
        flat = self._filling.pop(id(bucket), None)
        if flat is None:
            flat = self._empty(bucket)
        bucket.finite &= are_finite(bucket.views(flat))
        if bucket.plan.is_sparse:
            return partial(self._finish_by_rows, bucket, flat)
        if len(self._pending) > 1:  # two buckets in flight keep the wire busy and bound the memory
            self._pending.pop(0)()
        return partial(self._finish, flat, self.reducer.to_owner(flat, bucket.gradient, add=self._has_sum))

    def _finish(self, flat: Tensor, finish: Finish) -> None:
        finish()
        if len(self._idle) < 2:
            self._idle.append(flat)

    def _finish_by_rows(self, bucket: LiveBucket, flat: Tensor) -> None:
        (slot,) = bucket.plan.slots
        self.reducer.rows_to_all(flat[: slot.stop].view(slot.shape))
        size = bucket.gradient.numel()
        mine = flat[self.reducer.rank * size : (self.reducer.rank + 1) * size]
        if self._has_sum:
            bucket.gradient.add_(mine)
        else:
            bucket.gradient.copy_(mine)

    def settle(self) -> None:
        super().settle()
        self._has_sum = True

    def clear(self) -> None:
        self.has_local = self.has_strangers = self._has_sum = False
        for bucket in self.buckets:
            bucket.finite.fill_(True)
            bucket.gradient.zero_()
            for parameter in bucket.parameters:
                parameter.grad = None
