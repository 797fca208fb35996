"""Masters and states of a lot that rest in host memory: stepped there by a thread, or on the device on their way."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from mizzen.kernels.mark import mark_of
from mizzen.kernels.masters import keep_writes
from mizzen.model.piece import Piece, Readers, Unread
from mizzen.offload.backward_copies import BackwardCopies
from mizzen.offload.paced import PacedCopy
from mizzen.offload.tier import DeviceCopy, HostTier, StepBeside, Transfer, device_room

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(place, value): what is to be copied where."""


class InMemory:
    """What rests where it can be read and written in place."""

    def fetch(self) -> None:
        """It is near enough."""

    def readable(self, home: Tensor, piece: Piece) -> Piece:
        """It can be read as it is."""
        return piece


class GradientInHost:
    """A gradient in host memory, beside the masters of its lot, while the device does not have it."""

    def __init__(self, rest: "OnHost") -> None:
        self._rest = ref(rest)
        self.arrival: DeviceCopy | None = None
        """Its way here; None where there is none."""

    @property
    def _home(self) -> "OnHost":
        found = self._rest()
        if found is None:
            raise AssertionError("a gradient outlives the resting place of its lot")
        return found

    @property
    def is_here(self) -> bool:
        """Whether there is one."""
        return self.arrival is not None

    def keep(self, gradient: Tensor) -> None:
        """Copy it to host memory."""
        self.arrival = self._home.write_gradient(gradient)
        self.arrival.forget()  # the tier holds where it comes to

    def bring(self, into: Tensor) -> DeviceCopy:
        """Start to copy the first elements of it to the device."""
        tier = self._home.tier
        if self.arrival is not None:
            self.arrival.wait_on_stream(tier.inward)
        return tier.copy_in(into, tier.held(f"{self._home.title} gradient")[: into.numel()])

    def look(self) -> Tensor:
        """The gradient in place, once it is all there."""
        if self.arrival is not None:
            self._home.wait_for("copies_out", self.arrival)
        return self._home.tier.held(f"{self._home.title} gradient")

    def for_step(self) -> Tensor:
        """The gradient in place, or a copy on the device."""
        home = self._home
        if home.is_streamed:
            here = torch.empty_like(home.tier.held(f"{home.title} gradient"), device=home.tier.accelerator.device())
            self.bring(here).wait_on_stream()
            return here
        found = self.look()
        self.arrival = None
        return found

    def has_room(self, size: int) -> bool:
        """Of what nobody else used on the device when the first gradient of a step came."""
        return self._home.tier.takes_room(size)

    def forget(self) -> None:
        """Nobody needs it any more."""
        self.arrival = None


class OnHost(InMemory):
    """Masters and states rest in host memory, under the title of their lot."""

    place: str = "host"

    def __init__(self, title: str, tier: HostTier, *, is_streamed: bool = False, states: int = 0) -> None:
        self.title = title
        self.tier = tier
        self.is_streamed = is_streamed
        """Whether masters and states pass through the device for a step; otherwise it runs on the host."""
        self.states = states
        """Tensors as large as the masters that the optimizer will keep, as far as that is known."""
        self._is_prepared = False
        self._left: tuple[Tensor, int, DeviceCopy] | None = None
        """The gradient that has left for the host, as it was then, and its copy."""
        self.resting_gradient: GradientInHost | None = GradientInHost(self)
        """A gradient that the device does not keep until the step."""
        self._sent: DeviceCopy | None = None
        """New values on their way to the device."""
        self._mark: Tensor | None = None
        """By which values are recognised that nobody has written to since they came from the masters."""
        self._is_compared = False
        self._homes: dict[str, Tensor] = {}
        """The masters and states as they rest."""
        self.copies = BackwardCopies(title, tier, self._homes)
        """A step that the host takes before it is voted on."""
        self._ahead: dict[int, tuple[Tensor, int, DeviceCopy]] = {}
        """Copies on the device that were started ahead of the step, with the version of what was copied."""
        self._is_coming = False
        """Whether the device has room for all of it until the end of the step."""
        self._outgoing: list[tuple[int, PacedCopy]] = []
        """What was stepped on the device, on its way to memory at these addresses."""
        self._waited: defaultdict[str, float] = defaultdict(float)
        """Seconds that the host has waited in this step, by what for."""
        self.readers = Readers()
        """Saves beside training that read what rests here: it does not change before they are done."""
        self.beside: StepBeside | None = None
        """A step that may go on beside the next forward, which can be made to wait for it; None where it cannot."""

    @property
    def is_stepped_on_host(self) -> bool:
        """Whether a thread of the host steps it in place."""
        return not self.is_streamed

    def keep(self, master: Tensor, values: Tensor | None) -> Tensor:
        """Copy masters to host memory."""
        self._mark = None if values is None else mark_of(values)
        self.tier.write(f"{self.title} master", master).wait()
        self._homes["master"] = self.tier.held(f"{self.title} master")
        return self._homes["master"]

    def leave(self, gradient: Callable[[], Tensor]) -> None:
        """Bring the gradient to the host, or what rests there to the device, while backward goes on."""
        if not self.is_streamed:
            found = gradient()
            self._left = found, found._version, self.write_gradient(found)
        elif not self.tier.shares_way:
            self.fetch()

    def expect_step(self) -> None:
        """Let what passes through the device come a few tensors at a time, where others come the same way.

        Masters come before all states, those of the last lot first, as backward needs their values.
        """
        if self.is_streamed and self.tier.shares_way and not self._is_coming and self._may_come():
            master, *states = [partial(self._bring_here, home) for home in self._homes.values()]
            self.tier.bring_later(master, states)

    def fetch(self) -> None:
        """Start to bring all of it to the device, where it passes through it and there is room."""
        if self.is_streamed and self._may_come():
            for home in self._homes.values():
                if id(home) not in self._ahead:
                    self._bring_here(home)

    def masters_near(self) -> tuple[Tensor, DeviceCopy] | None:
        """The masters on the device, with their way there, where they were brought ahead of a step."""
        home = self._homes["master"]
        here, version, copy = self._ahead.get(id(home), (home, -1, None))
        return (here, copy) if copy is not None and version == home._version else None

    def _may_come(self) -> bool:
        """Whether the device has room for it; what was taken of it is its own until the end of the step."""
        self._is_coming = self._is_coming or self.tier.takes_room(self.resting_bytes)
        return self._is_coming

    def _bring_here(self, home: Tensor) -> DeviceCopy:
        self._ahead[id(home)] = self._copied(home)
        return self._ahead[id(home)][2]

    def step_in_backward(self) -> None:
        """Step with the gradient that has left, into copies, where that is asked for."""
        if not self.is_streamed:
            resting = self.resting_gradient
            self.copies.begin(self._left[2] if self._left is not None else resting.arrival if resting else None)

    @property
    def is_gradient_changed(self) -> bool:
        """Whether somebody has written, on the device, to the gradient that has left."""
        return self._left is not None and self._left[0]._version != self._left[1]

    @property
    def resting_bytes(self) -> int:
        """What rests here, with the states that the optimizer will keep, as far as that is known."""
        return max(sum(home.nbytes for home in self._homes.values()), (1 + self.states) * self._homes["master"].nbytes)

    def write_gradient(self, gradient: Tensor) -> DeviceCopy:
        """Start to copy a gradient to host memory."""
        self.copies.end()
        self._wait_for_step()
        if self._sent is not None:  # the last values came through the same memory
            self._sent.wait_on_stream()
        return self.tier.write(f"{self.title} gradient", gradient)

    def trust_values(self) -> None:
        """From here to the end of the step the values are known, so that no thread waits for the device."""
        self._is_compared = True
        self.tier.bring_no_more()  # each lot comes as a whole from here on

    def keep_writes(self, values: Tensor, master: Tensor) -> None:
        """Only where the values are others than came from the masters, they go to the host and are compared there."""
        if self._is_compared:
            return
        mark = mark_of(values)
        if self._mark is None or not torch.equal(mark, self._mark):
            self.take_writes(torch.empty_like(values, device="cpu").copy_(values), master)
        self._mark = mark

    def take_writes(self, values: Tensor, master: Tensor) -> None:
        """Compare them in host memory."""
        self._wait_for_home()
        self.readers.wait()
        keep_writes(values, master)

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient as it left in backward; another copy of it if somebody has changed it since."""
        if self.is_streamed:
            return gradient
        left = self._left
        if left is None or left[0].data_ptr() != gradient.data_ptr() or left[1] != gradient._version:
            left = gradient, gradient._version, self.write_gradient(gradient)
        self._left = None
        self.wait_for("copies_out", left[2])
        return self.tier.held(f"{self.title} gradient").view(gradient.shape)

    def values(self, master: Tensor) -> Tensor:
        """The masters in place, or a copy on the device."""
        self.readers.wait()
        return self._copy_here(master) if self.is_streamed else master

    def _copy_here(self, home: Tensor) -> Tensor:
        """A copy on the device, which later work of the current stream waits for."""
        found = self._ahead.pop(id(home), None)
        if found is None or found[1] != home._version:
            if device_room(self.tier.accelerator) < self.resting_bytes:  # what earlier lots have left there goes first
                self.tier.paced.start()
                self.tier.outward.synchronize()
            found = self._copied(home)
        here, _, copy = found
        copy.wait_on_stream()
        return here

    def _copied(self, home: Tensor) -> tuple[Tensor, int, DeviceCopy]:
        """Start a copy to the device, after the last step's way here; what was copied has that version."""
        here = torch.empty_like(home, device=self.tier.accelerator.device())
        for address, copy in self._outgoing:  # all that changes it has started then
            if address == _address(home):
                copy.wait_on_stream(self.tier.inward)
        return here, home._version, self.tier.copy_in(here, home)

    def put(self, pairs: Pairs) -> None:
        """Bring what was stepped on the device to the masters."""
        for place, value in pairs:
            if self.is_streamed:
                self._send_home(place, value, is_master=True)
            else:
                place.copy_(value)

    def send(self, values: Tensor, master: Tensor, stepped: Pairs) -> None:
        """From the host in the dtype of the values, through the memory that the gradient had; or on the device."""
        if self.is_streamed:
            for place, value in stepped:
                place.copy_(value)
            self._sent = DeviceCopy(self.tier.accelerator, values)
            return
        source = master
        if master.dtype != values.dtype:
            source = self._staging(values)
            source.copy_(master)
        self._sent = self.tier.copy_in(values, source, after_current=False)

    def write_values(self, into: Tensor, master: Tensor, *, is_stepped: bool) -> None:
        """From host memory to host memory."""
        self._wait_for_home()
        into.copy_(master)

    def _staging(self, values: Tensor) -> Tensor:
        spare = self.tier.held(f"{self.title} gradient").view(torch.uint8).view(-1)
        size = values.numel() * values.element_size()
        if spare.numel() >= size:
            return spare[:size].view(values.dtype)
        return self.tier.place(f"{self.title} values", values)

    def arrived(self, values: Tensor, master: Tensor) -> Pairs:
        """Later work of the current stream waits for values that were sent; others are sent now."""
        if self._sent is None:
            self._wait_for_home()
            self._sent = self.tier.copy_in(values, master)
        self._sent.wait_on_stream()
        self._sent, self._mark, self._is_compared = None, mark_of(values), False
        return []

    def forget(self) -> None:
        """What has left or was brought ahead of a step is of no use any more."""
        self.tier.room = None
        if self.resting_gradient is not None:
            self.resting_gradient.forget()
        self._drop_copies()

    def _drop_copies(self) -> None:
        self.copies.end()
        self._left, self._is_compared, self._is_coming = None, False, False
        self.tier.bring_no_more()
        self._ahead.clear()

    def pass_through(self, *, is_streamed: bool) -> None:
        """Choose where the step runs."""
        self._drop_copies()
        self._wait_for_home()
        self.is_streamed = is_streamed
        if not self._is_prepared:  # states and the gradient are as large as masters
            count = self.states if is_streamed else self.states + 1
            if self.copies.start is not None and not is_streamed:
                count += 1 + self.states
            self.tier.prepare([home.nbytes for home in self._homes.values()] * count)
            self._is_prepared = True
        if is_streamed:
            needs = self.tier.step_needs
            needs.passing = max(needs.passing, self.resting_bytes + self._homes["master"].nbytes)
            self.copies.drop()
        is_empty = self.resting_gradient is None or not self.resting_gradient.is_here
        if is_streamed and is_empty:  # its gradient comes to the host only where the device has no room
            if self._sent is not None:
                self._sent.wait()
            self.tier.drop(f"{self.title} gradient")

    def bring_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """Copies on the device, of those that rest here; small states come to where the step runs."""
        device = self.tier.accelerator.device() if self.is_streamed else torch.device("cpu")
        homes = {id(home) for home in self._homes.values()}
        for tensor in tensors:
            state = states.get(tensor, {})
            for key, value in state.items():
                if id(value) in homes:
                    state[key] = self._copy_here(value) if self.is_streamed else value
                elif type(value) is Tensor and value.device != device and value.shape != tensor.shape:
                    state[key] = value.to(device)

    def rest_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """Each state in host memory of its own, under the number of what it belongs to and its key."""
        for name, state, key in list(large_states(tensors, states)):
            value = state[key]
            home = self._homes[name] = self.tier.place(f"{self.title} {name}", value)
            if value is not home:
                self._send_home(home, value)
                state[key] = home

    def _send_home(self, home: Tensor, value: Tensor, *, is_master: bool = False) -> None:
        """Masters leave in the order in which they come again (`expect_step`)."""
        if value.device.type == home.device.type:
            home.copy_(value)
            return
        paced = self.tier.paced
        copy = paced.hold_back(home, value, is_first=is_master) if self.tier.shares_way else paced.add(home, value)
        self._outgoing = [(address, each) for address, each in self._outgoing if not each.is_over]
        self._outgoing.append((_address(home), copy))

    def _wait_for_step(self) -> None:
        if self.beside is not None:
            self.beside.wait()

    def _wait_for_home(self) -> None:
        """Let the host wait until what was stepped rests here."""
        self._wait_for_step()
        for _, copy in self._outgoing:
            copy.wait()
        self._outgoing.clear()

    def readable(self, home: Tensor, piece: Piece) -> Piece:
        """A piece of what rests here, once the last step's copies are here; a save may read it beside training."""
        self._wait_for_home()
        source = piece.source
        if not isinstance(source, Tensor) or not any(home is each for each in self._homes.values()):
            return piece

        def load() -> Tensor:
            return source

        unread = Unread(tuple(source.shape), source.dtype, load, _nothing, load_beside=load, readers=self.readers)
        return replace(piece, source=unread)

    def wait(self) -> Mapping[str, float]:
        """What was stepped on the device comes here beside the next forward.

        Where parameters are fetched it leaves the device from now on, and not before: their new values leave first.
        """
        self._is_coming = False
        self.tier.paced.begin()
        self.tier.step_needs.new_states = 0
        self.tier.room = None
        self.tier.drop_unused()
        return self._waits()

    def wait_for(self, what: str, transfer: Transfer) -> None:
        """Let the host wait for something on its way, and remember how long that took."""
        start = time.perf_counter()
        transfer.wait()
        self._waited[what] += time.perf_counter() - start

    def _waits(self) -> Mapping[str, float]:
        """The seconds that the host has waited since this was last asked, by what it waited for."""
        found, self._waited = self._waited, defaultdict(float)
        return found


def _nothing() -> None: ...


def _address(tensor: Tensor) -> int:
    """Of the memory of which a tensor may be a part."""
    return tensor.untyped_storage().data_ptr()


def large_states(
    tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]
) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
    """States as large as what they belong to: a name in their lot, where each stands, and under which key there."""
    for number, tensor in enumerate(tensors):
        state = states.get(tensor, {})
        for key, value in state.items():
            if type(value) is Tensor and value.shape == tensor.shape:
                yield f"{number} {key}", state, key
