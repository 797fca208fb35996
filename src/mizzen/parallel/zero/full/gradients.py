"""How the gradients of units come to their owners: at once, in every backward, however it was started."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm.communicator import meet
from mizzen.comm.tags import Tag
from mizzen.errors import CommError, UsageError
from mizzen.kernels.norm import are_finite, is_all_finite
from mizzen.parallel.zero.full.backward import Backward
from mizzen.parallel.zero.full.live import LiveUnit, Trained
from mizzen.parallel.zero.full.wires import Place, explained
from mizzen.parallel.zero.reduce import Finish, Reducer

IN_FLIGHT = 2
"""Units on their way that keep the wire busy and bound the memory, where the host waits for them."""


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
        place: Place,
        backward: Backward,
    ) -> None:
        self.units = tuple(units)
        self.reducer = reducer
        self.replicas = replicas
        self.group = group
        """All ranks that train together."""
        self.place = place
        self.has_arrived = False
        """Whether autograd has put a gradient on any parameter since the last step."""
        self.backward = backward
        self._is_open = False
        self._is_complete = False
        self._is_last = False
        """Whether a step follows the backward that is under way."""
        self._pending: list[Finish] = []

    @property
    def has_unannounced(self) -> bool:
        """Whether gradients came from a backward that nobody announced with `begin_backward`."""
        return any(unit.has_strangers for unit in self.units)

    def see(self, unit: LiveUnit, gradients: Sequence[Tensor | None]) -> None:
        """Remember which of this rank's own gradients are finite, before they are laid out for sending and summed."""
        found = [gradient for gradient in gradients if gradient is not None]
        self.has_arrived |= bool(found)
        if not all(is_all_finite(gradient.reshape(-1)) for gradient in found):
            fine = found[0].new_zeros(1)
            unit.note_finite(are_finite([fine if gradient is None else gradient for gradient in gradients]))

    def take(self, unit: LiveUnit, sent: Tensor) -> None:
        """Sum the gradients of a unit, laid out as one row of shards for each rank, into this rank's shard."""
        expected = unit.count * self.reducer.reduction.ranks
        if sent.numel() != expected:
            raise UsageError(
                f"unit '{unit.plan.title}' got gradients for {sent.numel()} elements where {expected} are trained: "
                "requires_grad of a parameter was changed after initialize; make a new engine"
            )
        is_first = unit.sums.is_empty
        self._send(unit, sent, unit.sums.place()[: unit.count], unit.plan.title, add=not is_first)

    def take_one(self, unit: LiveUnit, one: Trained, sent: Tensor) -> None:
        """The same for one parameter."""
        self.has_arrived = True
        self._send(unit, sent, unit.gradient[one.start : one.start + one.length], one.name, add=True)

    def _send(self, unit: LiveUnit, sent: Tensor, chunk: Tensor, title: str, *, add: bool) -> None:
        """Sum something of all ranks, and put this rank's share of it into its place or add it there."""
        unit.has_strangers |= not self._is_open
        self._is_complete = unit.is_complete = False
        finish = self.reducer.to_owner(sent, chunk, add=add, title=title)
        if sent.device.type != "cpu":
            finish()  # in the order of the stream; the host does not wait
            return
        self._pending.append(finish)
        if len(self._pending) > IN_FLIGHT:
            self._pending.pop(0)()

    def begin_backward(self, last: bool | None) -> None:
        """A backward starts. Gradients leave at once whatever comes next: there is no room for whole ones."""
        self._is_open = self.place.is_backward = True
        self._is_complete, self._is_last = False, bool(last)
        self._mark(False)

    def end_backward(self) -> None:
        """That backward is over, on every rank: one that is elsewhere is found before anything else is exchanged."""
        self.backward.finish()
        self._is_open = self.place.is_backward = False
        self._wait()
        self._meet("the end of backward")
        self._is_complete = self.replicas.reduction.ranks == 1  # so that a rank reads and writes its own part alone
        self._mark(self._is_complete and self._is_last)

    def reduce(self) -> None:
        """Make every owned gradient complete."""
        self.backward.finish()
        if not self._is_complete:
            self._wait()
            self._meet("the end of a step's gradients")
            for finish in [self.replicas.to_all(unit.sums.read()) for unit in self.units if unit.shares]:
                finish()
            self._is_complete = True
        self._mark(True)

    def _mark(self, is_complete: bool) -> None:
        """Say of all units whether their gradients are complete: a unit may be run several times in a backward."""
        for unit in self.units:
            unit.is_complete = is_complete

    def clear(self, *, taken: bool = False) -> None:
        """Forget all gradients, and what was lost on their way where nobody steps with them."""
        self._wait()
        self.place.step += taken
        if not taken and any(not unit.sums.is_empty for unit in self.units):
            self.reducer.forget()
        self.has_arrived = False
        self._is_open = self._is_complete = self.place.is_backward = False
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

    def _wait(self) -> None:
        pending, self._pending = self._pending, []
        for finish in pending:
            finish()

    def _meet(self, phase: str) -> None:
        if self.group is not None and self.units and self.units[0].device.type == "cpu":
            try:
                meet(Tag(self.place.step, "", phase), self.group, torch.empty(0))
            except CommError as error:
                raise explained(error) from None
