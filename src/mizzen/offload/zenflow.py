"""Masters and states of a lot in host memory, with the important columns of its matrices on the device: ZenFlow.

What is important is stepped on the device in every step. The gradients of everything else add up in host memory, and a
step on the host takes their mean every few steps. While columns are important, the device has the only true values of
them. Whoever reads what rests here, or writes to it, finds all of it in host memory: the columns come home first, and
go to the device again with the next step. Who decides when is `engine/zenflow.py`.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakMethod

import torch
from torch import Tensor

from mizzen.model.piece import Piece, Readers
from mizzen.offload.rest_host import OnHost, Pairs, large_states
from mizzen.offload.tier import DeviceCopy, HostTier

GRADIENT: Final = "late_gradient"
"""The sum of the gradients that no step has taken yet."""
IMPORTANT: Final = "is_important"
"""Which elements the device steps."""
CHANGE: Final = "late_change"
"""What an update beside training has made of the masters, which do not have it yet."""
WAITED: Final = "late_steps"
"""The steps whose gradients wait."""
CHOSEN: Final = "chosen_steps"
"""Steps since the important columns were chosen, that one included; 0 before the first time."""
LATE_STATES: Final = (GRADIENT, IMPORTANT, CHANGE, WAITED, CHOSEN)
"""What is kept among the states of an optimizer beside its own; all of it begins with zeros."""


@dataclass(frozen=True, slots=True)
class Important:
    """The important elements of a lot as they are on the device, in the order of their places."""

    places: Tensor
    """Where they are in the lot, for the host."""
    index: Tensor
    """Where they are in the lot, for the device."""
    held: dict[str, Tensor]
    """Of the masters and of each large state, by the name that it has at home."""
    step: Tensor
    """The optimizer's count of steps."""

    @property
    def master(self) -> Tensor:
        """What is stepped."""
        return self.held["master"]


class LateUpdates:
    """What the host does for a lot: it adds up gradients, and steps with them, in a thread or before somebody looks."""

    def __init__(self, homes: Mapping[str, Tensor], rounded: Callable[[Tensor], Tensor]) -> None:
        self.homes = homes
        """Masters and states as they rest."""
        self._rounded = WeakMethod(rounded)
        """A method of the resting place, which has this object: neither is to keep the other in memory."""
        self.shown: Tensor | None = None
        """New values that the model is to have now."""
        self.has_change = False
        """Whether there may be a change that the masters do not have yet."""
        self._ready: Tensor | None = None
        """New values that the model is to have in the next step."""
        self._job: Future[None] | None = None

    def begin(self, job: Future[None]) -> None:
        """The host works on the last step: whoever needs what rests here waits for that."""
        self._job = job

    def settle(self) -> None:
        """Wait for what the host still does; raises, once, what went wrong there. The step knows of it by itself."""
        job, self._job = self._job, None
        try:
            if job is not None:
                job.result()
        finally:
            del job  # it has the error, whose traceback has this call, and so the lot

    def rounded(self, masters: Tensor) -> Tensor:
        """Values of masters, in host memory, for the model."""
        found = self._rounded()
        if found is None:
            raise AssertionError("an update on the host outlives the resting place of its lot")
        return found(masters)

    def target(self, *, is_beside: bool) -> Tensor:
        """What an update steps: the masters or, beside training, a copy of them."""
        return self.homes[_name(CHANGE) if is_beside else "master"].detach()

    def add(self, gradient: Tensor, factor: float) -> None:
        """Add a gradient to those that wait."""
        self.take_change()
        self.homes[_name(GRADIENT)].add_(gradient, alpha=factor)

    def update(self, step: Callable[[Tensor], None], count: int, *, is_beside: bool) -> None:
        """Let a step of `target` have the mean of `count` gradients that have waited."""
        master, waiting = self.homes["master"], self.homes[_name(GRADIENT)]
        target = self.target(is_beside=is_beside)
        if is_beside:
            target.copy_(master)
        step(waiting.div_(count) if count > 1 else waiting)
        waiting.zero_()
        if is_beside:
            self.has_change, self._ready = True, self.rounded(target.sub_(master) + master)
        else:
            self.shown = self.rounded(master)

    def take_change(self) -> None:
        """Let masters have what an update beside training has made of them."""
        if self.has_change:
            self.homes["master"].add_(self.homes[_name(CHANGE)])
            self.homes[_name(CHANGE)].zero_()
        self.has_change = False

    def finish(self, readers: Readers) -> None:
        """Let the model be ready to have what an update beside training has made."""
        self.settle()
        self.shown, self._ready = self._ready, None
        if self.has_change and self.shown is None:  # somebody has read or written the masters since
            readers.wait()
            self.take_change()
            self.shown = self.rounded(self.homes["master"])

    def distrust(self) -> None:
        """Somebody looks at what rests here, and may write to it: values for the model are made anew."""
        self.shown = self._ready = None
        self.has_change |= _name(CHANGE) in self.homes


class OnHostLate(OnHost):
    """Masters and states in host memory, of which the device has the important elements between steps."""

    def __init__(self, title: str, tier: HostTier, *, states: int = 0, overlaps: bool = False) -> None:
        super().__init__(title, tier, states=states + 1 + overlaps)  # what waits is as large
        self.resting_gradient = None  # the device needs its own of the important columns
        self.overlaps = overlaps
        """Whether an update of the late elements may go on beside training."""
        self.late = LateUpdates(self._homes, self._rounded)
        self.here: Important | None = None
        """What the device has."""
        self.taken: Tensor | None = None
        """The gradient of this step on the device."""
        self._is_apart = False
        """Whether what the device should have is in host memory until the next step."""
        self._like: Tensor | None = None
        """The shape and dtype of the values that the model computes with."""
        self._showing: DeviceCopy | None = None
        """New values on their way to the device."""

    def keep(self, master: Tensor, values: Tensor | None) -> Tensor:
        """Copy masters to host memory."""
        self._like = None if values is None else torch.empty_like(values, device="meta")
        return super().keep(master, values)

    def _rounded(self, masters: Tensor) -> Tensor:
        """Masters in the dtype of the model, in host memory where no gradient comes before the model has them."""
        if self._showing is not None:
            self._showing.wait()
        if self._like is None or (self._like.dtype == masters.dtype and not self.overlaps):
            return masters
        place = self.tier.place(f"{self.title} values", self._like) if self.overlaps else self._staging(self._like)
        return place.copy_(masters)

    # What the device has

    def bring_important(self, tensor: Tensor, states: MutableMapping[Tensor, Any]) -> Important:
        """The important elements on the device."""
        device = self.tier.accelerator.device()
        if self.here is not None and self._is_apart:
            self.here.held.update({name: value.to(device, copy=True) for name, value in self.here.held.items()})
        elif self.here is None:
            self.late.take_change()
            places = self._homes[_name(IMPORTANT)].nonzero().view(-1)
            late = {_name(key) for key in LATE_STATES}
            held = {
                name: home.index_select(0, places).to(device, copy=True)
                for name, home in self._homes.items()
                if name not in late
            }
            step = states[tensor]["step"].to(device, copy=True)
            self.here = Important(places, places.to(device), held, step)
        self._is_apart = False
        return self.here

    def bring_home(self) -> None:
        """Let all of the masters and states be in host memory."""
        self.late.settle()
        self.late.distrust()
        found, self.here = self.here, None
        if found is None:
            return
        self.readers.wait()
        for name, value in found.held.items():
            self._homes[name].index_copy_(0, found.places, value.cpu())
        for key in (GRADIENT, CHANGE):  # what the host has made of them is of no use
            if _name(key) in self._homes:
                self._homes[_name(key)].index_fill_(0, found.places, 0.0)

    def rest_important(self) -> None:
        """Let the important elements be in host memory until the next step, each apart from its lot."""
        if self.here is not None:
            for name, value in self.here.held.items():
                place = self.tier.place(f"{self.title} important {name}", value)
                self.tier.copy_out(place, value).wait()
                self.here.held[name] = place
            self._is_apart = True

    # What a lot and its store ask for

    def write_gradient(self, gradient: Tensor) -> DeviceCopy:
        """Start to copy a gradient to host memory, once the last one is added up."""
        self.late.settle()
        return super().write_gradient(gradient)

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient in host memory; the device keeps its own for the important columns."""
        self.taken = gradient
        return super().gradient(gradient)

    def take_writes(self, values: Tensor, master: Tensor) -> None:
        """Compare them in host memory, with all that is there."""
        self.bring_home()
        super().take_writes(values, master)

    def send(self, values: Tensor, master: Tensor, stepped: Pairs) -> None:
        """Let the model have new values of the late elements, if there are any, and of the important ones."""
        if self.late.shown is not None:
            self._showing = self.tier.copy_in(values, self.late.shown.view(values.shape))
            self._showing.wait_on_stream()
            self.late.shown = None
        if self.here is not None:
            new = self.here.master.to(device=values.device, dtype=values.dtype)
            values.index_copy_(0, self.here.index, new)
        self._sent = DeviceCopy(self.tier.accelerator, values)

    def arrived(self, values: Tensor, master: Tensor) -> Pairs:
        """Later work of the current stream waits for values that were sent; others are sent now."""
        if self._sent is None:
            self.bring_home()
        return super().arrived(values, master)

    def forget(self) -> None:
        """What has left is of no use any more; what waits stays."""
        super().forget()
        self.taken = None

    def pass_through(self, *, is_streamed: bool) -> None:
        """Nothing passes through the device, and nothing stays there."""
        super().pass_through(is_streamed=False)
        self.bring_home()

    def rest_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """Each state in host memory of its own, and beside them what has to wait; it is an optimizer's state, too."""
        own = tuple(tensors)
        if any(state[key] is not self._homes.get(name) for name, state, key in large_states(own, states)):
            self.bring_home()
        super().rest_states(own, states)
        for tensor in own:
            if state := states.get(tensor):
                self._add_late_states(tensor, state)

    def _add_late_states(self, tensor: Tensor, state: MutableMapping[str, Any]) -> None:
        kinds = {GRADIENT: tensor.dtype, IMPORTANT: torch.bool} | ({CHANGE: tensor.dtype} if self.overlaps else {})
        for key, dtype in kinds.items():
            if key not in state:
                home = self.tier.place(f"{self.title} {_name(key)}", tensor, dtype=dtype)
                state[key] = self._homes[_name(key)] = home.zero_()
        for key in (WAITED, CHOSEN):
            state.setdefault(key, torch.zeros((), dtype=torch.int64))

    def readable(self, home: Tensor, piece: Piece) -> Piece:
        """A piece of what rests here, once all of it does."""
        if any(home is each for each in self._homes.values()):
            self.bring_home()
        return super().readable(home, piece)


def _name(key: str) -> str:
    """What a state is called at home: a lot has one tensor."""
    return f"0 {key}"
