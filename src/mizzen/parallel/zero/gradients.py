"""How gradients gather on a rank and leave for their owners: whole and in place, or bucket by bucket.

Nothing is sent outside `begin_backward` ... `end_backward` and `reduce`, which every rank calls alike; and buckets
always leave in the same order. So ranks whose gradients arrive in another order, or not at all, still take part in the
same collectives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakMethod

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mizzen.errors import UsageError
from mizzen.kernels.norm import are_finite, is_all_finite
from mizzen.log import warn_once
from mizzen.parallel.zero.live import LiveBucket, show
from mizzen.parallel.zero.reduce import Finish, Reducer
from mizzen.parallel.zero.twins import GradientHook


class HookSwitch:
    """What all hooks of a store's parameters look at first: whether somebody wants to hear of a gradient."""

    def __init__(self) -> None:
        self.is_off = False


class Gradients:
    """Counts what has arrived and lets buckets leave in their fixed order. What leaving means is the subclass's.

    The store calls, in this order:

    begin_forward()       a forward starts
    begin_backward(last)  a backward starts whose gradients may leave as they arrive; `last` is true before an optimizer
                          step, and None when they are to stay, whatever the stage
    end_backward()        that backward is over; all that were to leave have left, and arrived at their owners
    reduce()              before the optimizer: whatever came in other ways is sent too
    clear()               after it: start again from zero
    release()             at the end of life: give the parameters back
    """

    waits_for_last: bool
    """Whether gradients stay here until the last backward before a step."""
    in_flight: int | None = 2
    """Buckets on their way at most, which bounds the memory of those that are copies; two keep the wire busy.

    To wait for one in the middle of a backward is to wait for the slowest rank there.
    """

    def __init__(
        self,
        buckets: Sequence[LiveBucket],
        reducer: Reducer,
        *,
        overlap: bool,
        hooks: Mapping[str, GradientHook] | None = None,
        is_staged: bool = False,
    ) -> None:
        self.buckets = tuple(buckets)
        self.is_staged = is_staged
        """Whether a backward waits for another rank after `begin_backward`, which leaves time to prepare it."""
        self.hooks = hooks or {}
        """What the gradients of some parameters become before they are kept."""
        self.reducer = reducer
        self.factor = reducer.reduction.before if reducer.reduction.is_early else 1.0
        """What gradients are multiplied with as they are copied into a bucket that leaves."""
        self.overlaps = overlap
        if any(bucket.rest.place != "device" for bucket in buckets):
            self.in_flight = 2  # a sum that has come goes on to where its lot rests, while backward computes
        self.may_send = self.in_backward = False
        self.switch = HookSwitch()
        self.has_arrived = False
        """Whether autograd has put a gradient on any parameter since the last step."""
        self._had_unannounced = False
        self._unannounced: set[tuple[LiveBucket, int]] = set()
        """Where gradients have come since that nobody announced: `module.zero_grad()` may take them back."""
        self._is_complete = False
        """Whether the owners have all gradients. False before the first: ranks that got none must not stay away."""
        self._next = 0
        self._is_last = False
        """Whether a step follows the backward that is under way."""
        self._pending: list[tuple[LiveBucket, Finish]] = []
        self._handles: dict[int, list[RemovableHandle]] = {}
        for number, bucket in enumerate(buckets):
            for position, parameter in enumerate(bucket.parameters):
                self._expect(number, position, parameter)

    def _expect(self, number: int, position: int, parameter: Tensor) -> None:
        """Hear of the gradients of a parameter.

        torch's collector does not see through these hooks: a strong one would keep all of this for ever.
        """
        parameter.grad = None
        parameter.grad_dtype = None  # as it comes: adding it up in another dtype is ours to do
        hook = partial(_tell, self.switch, WeakMethod(self._arrived), number, position)
        handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._handles[id(parameter)] = [handle]
        if (change := self.hooks.get(self.buckets[number].plan.slots[position].name)) is not None:
            self._handles[id(parameter)].append(parameter.register_hook(change))  # type: ignore[no-untyped-call]

    def exchange(self, bucket: LiveBucket, position: int, new: nn.Parameter) -> None:
        """Another parameter takes a place in a bucket, with the gradient that was there and any that it has itself."""
        old, came = bucket.parameters[position], new.grad
        for handle in self._handles.pop(id(old)):
            handle.remove()
        self._expect(self.buckets.index(bucket), position, new)
        new.grad, old.grad = old.grad, None
        bucket.parameters = (*bucket.parameters[:position], new, *bucket.parameters[position + 1 :])
        if came is not None:
            new.grad = came if new.grad is None else new.grad + came
            self.has_arrived, self._is_complete, bucket.is_complete = True, False, False
            self.keep(bucket, position)

    @property
    def has_unannounced(self) -> bool:
        """Whether gradients came without a `begin_backward`, and nobody took them back since."""
        left = (bucket.parameters[position].grad is not None for bucket, position in self._unannounced)
        return self._had_unannounced or any(left)

    def begin_forward(self) -> None:
        """Let parameters be without a gradient during a forward."""

    def begin_backward(self, last: bool | None) -> None:
        """Let full buckets leave during the backward that follows."""
        self.may_send = bool(last) if self.waits_for_last else last is not None
        self.in_backward, self._is_complete, self._is_last, self._next = True, False, bool(last), 0
        self._had_unannounced = self.has_unannounced
        self._unannounced.clear()
        for bucket in self.buckets:
            bucket.is_complete = False
        for bucket in self.buckets if self.overlaps else ():
            bucket.missing, bucket.has_left = set(range(len(bucket.parameters))), False

    def end_backward(self) -> None:
        """Send the rest, and wait."""
        self.in_backward = False
        if self.may_send:
            self._send(self.buckets[self._next :])
            self._wait()
            self.may_send, self._is_complete = False, True

    def reduce(self) -> None:
        """Make every owned gradient complete."""
        if self._is_complete:
            self.see_edits()
        else:
            self.begin_backward(True)
            self.end_backward()
        for bucket in self.buckets:
            if not bucket.is_complete:
                bucket.complete()

    def see_edits(self) -> None:
        """Take over what somebody has done to `grad` since gradients were complete, or say that it has no effect."""
        raise NotImplementedError

    def update_copies(self, name: str, value: Callable[[], Tensor]) -> None:
        """A complete gradient was given a whole value, which is asked of the ranks only where it is summed anew."""

    def clear(self) -> None:
        """Forget all gradients, also those of a backward that has failed half-way."""
        self._wait()
        self.may_send = self.in_backward = self._is_complete = self.switch.is_off = False
        self.has_arrived = self._had_unannounced = False
        self._unannounced.clear()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
            bucket.forget()

    def release(self) -> None:
        """Remove the hooks and let go of all tensors."""
        for handle in chain(*self._handles.values()):
            handle.remove()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype
        self.buckets = ()

    def _arrived(self, number: int, position: int) -> None:
        """Autograd has put a gradient on a parameter, which has this position in the bucket of this number."""
        bucket, self.has_arrived = self.buckets[number], True
        if not self.may_send:
            self._is_complete = bucket.is_complete = False
            if not self.in_backward:
                self._unannounced.add((bucket, position))
            self.keep(bucket, position)
        elif self.overlaps:
            self._count(bucket, position)

    def _count(self, bucket: LiveBucket, position: int) -> None:
        """Send what is full now, and stands next in the order."""
        if bucket.has_left:
            raise UsageError(
                f"a second gradient of '{bucket.plan.slots[position].name}' arrived in one backward, after the first "
                "had been sent; a reentrant activation checkpoint does this: use use_reentrant=False, or set "
                "zero_optimization.overlap_comm to false"
            )
        bucket.missing.discard(position)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send(self.buckets[self._next : self._next + 1])
            self._next += 1

    def _send(self, buckets: Sequence[LiveBucket]) -> None:
        for bucket in buckets:
            bucket.has_left = True
            if len(self._pending) == self.in_flight:
                self._finish(*self._pending.pop(0))
            self._pending.append((bucket, self.leave(bucket)))
            if self.reducer.reduction.ranks == 1:  # nothing is on its way
                self._wait()

    def _finish(self, bucket: LiveBucket, finish: Finish) -> None:
        finish()
        if self._is_last:
            bucket.complete()

    def _wait(self) -> None:
        for bucket, finish in self._pending:
            self._finish(bucket, finish)
        self._pending.clear()

    def keep(self, bucket: LiveBucket, position: int) -> None:
        """A gradient came that is to stay on this rank for now."""
        raise NotImplementedError

    def leave(self, bucket: LiveBucket) -> Finish:
        """Start the sum of one bucket."""
        raise NotImplementedError


class WholeGradients(Gradients):
    """Stages 0 and 1: a full gradient buffer, summed at the boundary. Each parameter's `grad` is a view of it.

    Stage 0 sums in place. A second backward before the step then adds to a mean, and the mean of (mean + new) over the
    ranks is what it should be; so any number of backwards may precede a step.
    """

    waits_for_last = True
    in_flight = None

    def begin_forward(self) -> None:
        """Take gradients off parameters of another dtype: with one, a compiled block falls into many graphs."""
        self.switch.is_off = False  # where a backward has failed half-way
        unannounced = {id(bucket) for bucket, _ in self._unannounced}
        for bucket in self.buckets:
            if bucket.shown and bucket.values.dtype != bucket.accumulation and id(bucket) not in unannounced:
                bucket.put(self._new(bucket, bucket.shown))
                for position in bucket.shown:
                    bucket.parameters[position].grad = None
                bucket.shown.clear()

    def begin_backward(self, last: bool | None) -> None:
        """Let full buckets leave; where gradients stay, let autograd add them to their places.

        On a CPU the first are copied there as they come, out of its cache: zeros to add them to would cost more, where
        nobody waits meanwhile.
        """
        super().begin_backward(last)
        for bucket in self.buckets if not self.may_send else ():
            is_untouched = not bucket.shown and all(parameter.grad is None for parameter in bucket.parameters)
            if is_untouched and bucket.adds_in_place and (self.is_staged or not bucket.stock.is_kept):
                bucket.filled()
                show(bucket, range(len(bucket.parameters)))
        # What arrives is noted once; then nobody has to hear of gradients that autograd adds to their places, nor of
        # those that leave together at the end.
        is_added = all(len(bucket.shown) == len(bucket.parameters) for bucket in self.buckets)
        self.switch.is_off = self.has_arrived and (not self.overlaps if self.may_send else is_added)

    def end_backward(self) -> None:
        """Send the rest, and wait."""
        super().end_backward()
        self.switch.is_off = False
        for bucket in self.buckets:
            bucket.seen = bucket.whole._version if bucket.whole is not None else 0

    def see_edits(self) -> None:
        """Stage 0 has the mean in `grad`, and takes another that is put there. Stage 1 has summed what was there."""
        for bucket in self.buckets:
            new = {at for at in bucket.shown if bucket.parameters[at].grad is not bucket.views[at]}
            if bucket.is_shared:
                is_edited = new or (bucket.whole is not None and bucket.whole._version != bucket.seen)
                tell_edit(1, bucket.plan.slots[min(new, default=0)].name if is_edited else None)
            elif new:
                bucket.put(self._new(bucket, new))
                bucket.filled()
                show(bucket, new)

    def update_copies(self, name: str, value: Callable[[], Tensor]) -> None:
        """Stage 1 sums what lies here anew after a further backward: the mean of what all ranks have is the value."""
        for bucket in self.buckets:
            for slot, view in zip(bucket.plan.slots, bucket.views, strict=False):
                if bucket.is_shared and slot.name == name:
                    view.copy_(value())
                    bucket.seen = view._version

    def keep(self, bucket: LiveBucket, position: int) -> None:
        """Add it to its place, and show that; where its place was shown, autograd has added to it already."""
        if position in bucket.shown and bucket.parameters[position].grad is bucket.views[position]:
            return
        bucket.put(self._new(bucket, (position,)))
        show(bucket, (position,))

    def leave(self, bucket: LiveBucket) -> Finish:
        """Sum the bucket where it lies, or into the owner's chunk."""
        positions = range(len(bucket.parameters))
        bucket.put(self._new(bucket, positions), self.factor)
        whole = bucket.filled()
        show(bucket, positions)
        if self.reducer.reduction.ranks == 1:
            return self.reducer.to_all(whole)
        note_finite(bucket, whole)
        if bucket.plan.is_sparse:
            return partial(self._finish_by_rows, bucket, whole)
        if not bucket.is_shared:
            return self.reducer.to_all(whole)
        return self.reducer.to_owner(whole, bucket.sums.place(), add=False, owner=owner_of(bucket))

    def _new(self, bucket: LiveBucket, positions: Iterable[int]) -> dict[int, Tensor]:
        """What autograd or the user has put on parameters; to one that is shown already it was added in place."""
        parameters = bucket.parameters
        if not bucket.shown:
            return {at: gradient for at in positions if (gradient := parameters[at].grad) is not None}
        found = {}
        for position in positions:
            gradient = parameters[position].grad
            if position in bucket.shown:
                if gradient is bucket.views[position]:
                    continue
                bucket.empty.add(position)  # the user has taken it away, or put another one there
            if gradient is not None:
                found[position] = gradient
        return found

    def _finish_by_rows(self, bucket: LiveBucket, whole: Tensor) -> None:
        if not bucket.is_shared:
            self.reducer.rows_to_all(*bucket.views)
            return
        flat = whole.clone()  # the local sum stays as it is, for a further backward
        self.reducer.rows_to_all(*bucket.places(flat))
        bucket.gradient.copy_(bucket.mine(flat))


class PassingGradients(Gradients):
    """Stage 2: when all gradients of a bucket are there, they are copied into it and freed, and it goes to the owner's.

    Outside `begin_backward` ... `end_backward` gradients stay on their parameters until `reduce`.
    """

    waits_for_last = False

    def __init__(
        self,
        buckets: Sequence[LiveBucket],
        reducer: Reducer,
        *,
        overlap: bool,
        hooks: Mapping[str, GradientHook] | None = None,
        is_staged: bool = False,
    ) -> None:
        super().__init__(buckets, reducer, overlap=overlap, hooks=hooks, is_staged=is_staged)
        self._has_sum = False
        """Whether the owners' chunks hold gradients of earlier backwards."""

    def end_backward(self) -> None:
        """Send the rest, and wait."""
        super().end_backward()
        self._has_sum |= self._is_complete

    def see_edits(self) -> None:
        """Whatever is in `grad` was put there by somebody: those of backward were freed as they left."""
        for bucket in self.buckets:
            for slot, parameter in zip(bucket.plan.slots, bucket.parameters, strict=True):
                tell_edit(2, slot.name if parameter.grad is not None else None)

    def keep(self, bucket: LiveBucket, position: int) -> None:
        """Leave it where it is, in the dtype in which the next one is to be added to it."""
        parameter = bucket.parameters[position]
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(bucket.accumulation)

    def leave(self, bucket: LiveBucket) -> Finish:
        """Copy what is on the parameters, free it, and sum the bucket into the owner's chunk."""
        gradients = ((position, parameter.grad) for position, parameter in enumerate(bucket.parameters))
        bucket.put({position: gradient for position, gradient in gradients if gradient is not None}, self.factor)
        for parameter in bucket.parameters:
            parameter.grad = None
        note_finite(bucket, bucket.filled())
        flat = bucket.hand_over()
        if bucket.plan.is_sparse:
            return partial(self._finish_by_rows, bucket, flat)
        finish = self.reducer.to_owner(flat, bucket.sums.place(), add=self._has_sum, owner=owner_of(bucket))

        def finish_and_return() -> None:
            finish()
            bucket.stock.give(flat)

        return finish_and_return

    def _finish_by_rows(self, bucket: LiveBucket, flat: Tensor) -> None:
        self.reducer.rows_to_all(*bucket.places(flat))
        bucket.gradient.add_(bucket.mine(flat))
        bucket.stock.give(flat)

    def clear(self) -> None:
        """Nothing is left on any rank."""
        super().clear()
        self._has_sum = False


def tell_edit(stage: int, name: str | None) -> None:
    """Say once that an edit of `grad` has no effect, if there was one."""
    if name is not None:
        warn_once(
            f"somebody has changed the grad of parameters after backward, such as '{name}'. At ZeRO stage {stage} this "
            "has no effect, and neither has torch.nn.utils.clip_grad_norm_: gradients were summed over the ranks "
            "before. Set gradient_clipping in the configuration; mizzen.zero.safe_set_full_grad changes a gradient",
            key="grad was changed after backward",
        )


def _tell(switch: HookSwitch, arrived: "WeakMethod[Any]", number: int, position: int, _: Tensor) -> None:
    """Tell of a gradient, if there is still somebody who wants to hear of it."""
    if not switch.is_off and (tell := arrived()) is not None:
        tell(number, position)


def note_finite(bucket: LiveBucket, whole: Tensor) -> None:
    """Remember which of this rank's own gradients are finite, before they are summed."""
    if is_all_finite(whole):
        return
    found = are_finite(bucket.views)
    bucket.finite = found if bucket.finite is None else bucket.finite & found


def owner_of(bucket: LiveBucket) -> int | None:
    """The rank that owns all of a bucket; None where each rank owns a chunk."""
    return bucket.plan.owner if bucket.plan.is_whole else None
