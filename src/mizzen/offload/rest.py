"""Where the masters and optimizer states of a lot rest, and the way from there to a step and back.

A lot asks its resting place for everything that a step needs: the gradient beside the masters, the values to step, and
the way of new values to the model. On the device all of that is there already. What rests in host memory is stepped
there, by a thread, or passes through the device for the time of its step. What rests on NVMe passes through the host.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from mizzen.accelerator import get_accelerator
from mizzen.kernels.masters import keep_writes
from mizzen.offload.away import is_away
from mizzen.offload.nvme import NvmeTier
from mizzen.offload.places import DEVICE, OffloadSettings
from mizzen.offload.rest_host import GradientInHost, InMemory, OnHost, Pairs
from mizzen.offload.rest_nvme import OnNvme, Passage
from mizzen.offload.tier import HostTier, StepNeeds
from mizzen.offload.zenflow import OnHostLate


class OnDevice(InMemory):
    """Masters and states rest where gradients and values are: nothing moves."""

    place: str = "device"
    is_stepped_on_host: bool = False
    resting_gradient: GradientInHost | None = None

    def __init__(self, step_needs: StepNeeds | None = None, states: int = 0) -> None:
        self._step_needs = step_needs or StepNeeds()
        self._states = states

    def keep(self, master: Tensor, values: Tensor | None) -> Tensor:
        """The masters themselves."""
        self._step_needs.new_states += self._states * master.nbytes
        return master

    def leave(self, gradient: Callable[[], Tensor]) -> None:
        """It is where it should be."""

    def expect_step(self) -> None:
        """It is here."""

    def step_in_backward(self) -> None:
        """The device steps after the vote."""

    def keep_writes(self, values: Tensor, master: Tensor) -> None:
        """Masters that lie apart take over what was written; those that are away do so when they are back."""
        if values.data_ptr() != master.data_ptr() and not is_away(master):
            keep_writes(values, master)

    def take_writes(self, values: Tensor, master: Tensor) -> None:
        """Compare them where both are."""
        keep_writes(values, master)

    def trust_values(self) -> None:
        """Looking again costs little."""

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient itself."""
        return gradient

    def values(self, master: Tensor) -> Tensor:
        """The masters themselves."""
        return master

    def put(self, pairs: Pairs) -> None:
        """A copy to the masters."""
        for place, value in pairs:
            place.copy_(value)

    def send(self, values: Tensor, master: Tensor, stepped: Pairs) -> None:
        """All lots are sent together."""

    def write_values(self, into: Tensor, master: Tensor, *, is_stepped: bool) -> None:
        """A copy."""
        into.copy_(master)

    def arrived(self, values: Tensor, master: Tensor) -> Pairs:
        """A copy, unless they are the same memory."""
        return [(values, master)] if values.data_ptr() != master.data_ptr() else []

    def forget(self) -> None:
        """Nothing was brought."""

    def pass_through(self, *, is_streamed: bool) -> None:
        """It is stepped here."""

    def bring_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """They are here."""

    def rest_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """They stay."""

    def wait(self) -> Mapping[str, float]:
        """Nothing is on its way."""
        return {}


class RestingPlaces:
    """The tiers of one store, and what rests in them. A tier is made when the first lot comes to it."""

    def __init__(self, settings: OffloadSettings, nvme_bytes: int = 0, *, shares_way: bool = False) -> None:
        self.settings = settings
        self.nvme_bytes = nvme_bytes
        """What is to rest on NVMe."""
        self.shares_way = shares_way
        """Whether parameters are fetched from host memory, too."""
        self._step_needs = StepNeeds()
        self._host: HostTier | None = None
        self._passage: Passage | None = None
        self._resting: list[OnHost] = []

    def rest(self, place: str, title: str) -> OnDevice | OnHost:
        """The resting place of a lot."""
        if place == DEVICE:
            return OnDevice(self._step_needs, self.settings.states)
        if self._host is None:
            self._host = HostTier(
                get_accelerator(),
                pin=self.settings.pin,
                shares_way=self.shares_way,
                step_needs=self._step_needs,
            )
        if place == "host":
            zenflow, states = self.settings.zenflow, self.settings.states
            if zenflow is None:
                self._resting.append(OnHost(title, self._host, states=states))
            else:
                self._resting.append(OnHostLate(title, self._host, states=states, overlaps=zenflow.overlap_step))
            return self._resting[-1]
        if self._passage is None:
            self._passage = Passage(NvmeTier(self.settings.paths, self.settings.aio))
            self._passage.files.reserve([self.nvme_bytes])
        self._resting.append(OnNvme(title, self._host, self._passage))
        return self._resting[-1]

    def bring_next(self) -> None:
        """A gradient is complete: more of what passes through the device may start on its way there."""
        if self._host is not None:
            self._host.bring_next()

    def close(self) -> None:
        """Give all memory back, once nobody reads it for a save."""
        for rest in self._resting:
            rest.readers.wait()
        self._resting.clear()
        if self._host is not None:
            self._host.close()
        if self._passage is not None:
            self._passage.files.close()
        self._host = self._passage = None
