"""Masters and states of a lot that rest in host memory: stepped there by a thread, or on the device on their way."""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mizzen.kernels.masters import keep_writes
from mizzen.model.piece import Piece
from mizzen.offload.tier import DeviceCopy, HostTier

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(place, value): what is to be copied where."""


class InMemory:
    """What rests where it can be read and written in place."""

    def fetch(self) -> None:
        """It is near enough."""

    def readable(self, home: Tensor, piece: Piece) -> Piece:
        """It can be read as it is."""
        return piece


class OnHost(InMemory):
    """Masters and states rest in host memory, under the title of their lot."""

    place: str = "host"

    def __init__(self, title: str, tier: HostTier, *, is_streamed: bool = False) -> None:
        self.title = title
        self.tier = tier
        self.is_streamed = is_streamed
        """Whether masters and states pass through the device for a step; otherwise it runs on the host."""
        self._left: tuple[Tensor, int, DeviceCopy] | None = None
        """The gradient that has left for the host, as it was then, and its copy."""
        self._sent: DeviceCopy | None = None
        """New values on their way to the device."""
        self._mark: Tensor | None = None
        """By which values are recognised that nobody has written to since they came from the masters."""
        self._is_compared = False
        self._homes: dict[str, Tensor] = {}
        """The masters and states as they rest."""
        self._ahead: dict[int, tuple[Tensor, int, DeviceCopy]] = {}
        """Copies on the device that were started ahead of the step, with the version of what was copied."""
        self._outgoing: list[DeviceCopy] = []

    @property
    def is_stepped_on_host(self) -> bool:
        """Whether a thread of the host steps it in place."""
        return not self.is_streamed

    def keep(self, master: Tensor, values: Tensor) -> Tensor:
        """Copy masters to host memory."""
        self._mark = mark_of(values)
        self.tier.write(f"{self.title} master", master).wait()
        self._homes["master"] = self.tier.held(f"{self.title} master")
        return self._homes["master"]

    def leave(self, gradient: Callable[[], Tensor]) -> None:
        """Bring the gradient to the host, or what rests there to the device, while backward goes on."""
        if not self.is_streamed:
            found = gradient()
            self._left = found, found._version, self._write_gradient(found)
        elif self._has_room():
            for home in self._homes.values():
                here = torch.empty_like(home, device=self.tier.accelerator.device())
                self._ahead[id(home)] = here, home._version, self.tier.copy_in(here, home)

    def _has_room(self) -> bool:
        """Whether the device has memory to spare for what rests here, a quarter of it kept for others."""
        accelerator = self.tier.accelerator
        used, there = accelerator.memory(), accelerator.capacity()
        free = there.available + max(0, used.reserved - used.allocated)
        return free - there.total // 8 > sum(home.numel() * home.element_size() for home in self._homes.values())

    def _write_gradient(self, gradient: Tensor) -> DeviceCopy:
        if self._sent is not None:  # the last values came through the same memory
            self._sent.wait_on_stream()
        return self.tier.write(f"{self.title} gradient", gradient)

    def trust_values(self) -> None:
        """From here to the end of the step the values are known, so that no thread waits for the device."""
        self._is_compared = True

    def keep_writes(self, values: Tensor, master: Tensor) -> None:
        """Only where the values are others than came from the masters, they go to the host and are compared there."""
        if self._is_compared:
            return
        mark = mark_of(values)
        if self._mark is None or not torch.equal(mark, self._mark):
            self.wait()
            keep_writes(torch.empty_like(values, device=master.device).copy_(values), master)
        self._mark = mark

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient as it left in backward; another copy of it if somebody has changed it since."""
        if self.is_streamed:
            return gradient
        left = self._left
        if left is None or left[0].data_ptr() != gradient.data_ptr() or left[1] != gradient._version:
            left = gradient, gradient._version, self._write_gradient(gradient)
        self._left = None
        left[2].wait()
        return self.tier.held(f"{self.title} gradient").view(gradient.shape)

    def values(self, master: Tensor) -> Tensor:
        """The masters in place, or a copy on the device."""
        return self._copy_here(master) if self.is_streamed else master

    def _copy_here(self, home: Tensor) -> Tensor:
        """A copy on the device, which later work of the current stream waits for."""
        here, version, copy = self._ahead.pop(id(home), (None, 0, None))
        if here is None or copy is None or version != home._version:
            here = torch.empty_like(home, device=self.tier.accelerator.device())
            copy = self.tier.copy_in(here, home)
        copy.wait_on_stream()
        return here

    def put(self, pairs: Pairs) -> None:
        """Bring what was stepped on the device to the masters."""
        for place, value in pairs:
            if self.is_streamed:
                self._outgoing.append(self.tier.copy_out(place, value))
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

    def _staging(self, values: Tensor) -> Tensor:
        spare = self.tier.held(f"{self.title} gradient").view(torch.uint8).view(-1)
        size = values.numel() * values.element_size()
        if spare.numel() >= size:
            return spare[:size].view(values.dtype)
        return self.tier.place(f"{self.title} values", values)

    def arrived(self, values: Tensor, master: Tensor) -> Pairs:
        """Later work of the current stream waits for values that were sent; others are sent now."""
        if self._sent is None:
            self._sent = self.tier.copy_in(values, master)
        self._sent.wait_on_stream()
        self._sent, self._mark, self._is_compared = None, mark_of(values), False
        return []

    def forget(self) -> None:
        """What has left or was brought ahead of a step is of no use any more."""
        self._left, self._is_compared = None, False
        self._ahead.clear()

    def pass_through(self, *, is_streamed: bool) -> None:
        """Choose where the step runs."""
        self.forget()
        self.is_streamed = is_streamed

    def bring_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """Copies on the device, of those that rest here."""
        homes = {id(home) for home in self._homes.values()}
        for tensor in tensors if self.is_streamed else ():
            state = states.get(tensor, {})
            for key, value in state.items():
                if id(value) in homes:
                    state[key] = self._copy_here(value)

    def rest_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """Each state in host memory of its own, under the number of what it belongs to and its key."""
        for name, state, key in list(large_states(tensors, states)):
            value = state[key]
            home = self._homes[name] = self.tier.place(f"{self.title} {name}", value)
            if value is not home:
                self._outgoing.append(self.tier.copy_out(home, value))
                state[key] = home

    def wait(self) -> None:
        """Wait for copies to the host."""
        for copy in self._outgoing:
            copy.wait()
        self._outgoing.clear()


def large_states(
    tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]
) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
    """States as large as what they belong to: a name in their lot, where each stands, and under which key there."""
    for number, tensor in enumerate(tensors):
        state = states.get(tensor, {})
        for key, value in state.items():
            if type(value) is Tensor and value.shape == tensor.shape:
                yield f"{number} {key}", state, key


def mark_of(values: Tensor) -> Tensor:
    """A few numbers that are others, but for a strange accident, when any element is another or in another place."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().reshape(-1).view(kinds[values.element_size()])
    width = 32
    table = bits[: bits.numel() // width * width].view(-1, width)
    rows = table.sum(1, dtype=torch.int64)
    weights = 2 * torch.arange(len(rows), device=bits.device) + 1
    rest = bits[table.numel() :].sum(dtype=torch.int64)
    return torch.cat([table.sum(0, dtype=torch.int64), (rows * weights).sum()[None], rest[None]])
