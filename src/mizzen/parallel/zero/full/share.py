"""What one optimizer group trains of a unit, and the sums of the unit's gradients, each where it rests.

[Note: where sums rest]
The sums of a unit whose masters rest on the device stay there. Others go to host memory when the last backward before
a step has completed them, and the device lets go of them; their squares are counted before. Sums that more is to be
added to, and sums that the device is to step with, stay there where it has room. Otherwise they leave as well: they
come back while the backward of their unit runs, are added to, and leave again. Sums of a unit with parameters that
their rule needs whole stay.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mizzen.offload.places import DEVICE
from mizzen.offload.shards import Shards
from mizzen.parallel.zero.full.unit_parameter import UnitParameter
from mizzen.parallel.zero.stock import Stock, Sums
from mizzen.plan.parts import GradientPlace, Rest, StartedCopy


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
        self.is_sent = True

    def finish(self) -> None:
        """Let the shards have the values of the masters, however these became what they are."""
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
