"""Masters and states of a lot that rest on NVMe, and pass through host memory for a step.

Between steps a tensor without memory stands where the masters would be, and where each state would be: whoever forgets
that they are elsewhere meets an error, never old or empty values. While one lot is stepped, the next is read and the
last is written.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from mizzen.kernels.mark import mark_of
from mizzen.kernels.masters import keep_writes
from mizzen.model.piece import Piece, Readers, Unread
from mizzen.offload.nvme import NvmeTier, ReadFiles
from mizzen.offload.rest_host import OnHost, Pairs, large_states
from mizzen.offload.tier import HostTier, Transfer, host_memory

BEHIND: Final = 2
"""Writes that may be under way when a lot is read, those of the states and of the masters of one other lot."""


class Passage(ReadFiles):
    """Host memory that lots of one store pass through on their way from NVMe and back, used again for the next."""

    def __init__(self, files: NvmeTier) -> None:
        super().__init__(files)
        self._free: list[Tensor] = []
        self._used = self._most = 0
        self._leaving: deque[list[tuple[Transfer, Tensor]]] = deque()
        """Writes that were started together, with the memory that they are of."""

    def take(self, like: Tensor) -> Tensor:
        """Memory for a tensor of a shape and dtype."""
        size = like.numel() * like.element_size()
        return self.take_memory(size)[:size].view(like.dtype).view(like.shape)

    def take_memory(self, size: int) -> Tensor:
        """Memory of so many bytes, or up to twice as many."""
        fitting = [place for place, memory in enumerate(self._free) if size <= memory.numel() <= 2 * size]
        best = min(fitting, key=lambda place: self._free[place].numel(), default=None)
        memory = host_memory(size) if best is None else self._free.pop(best)
        self._used += memory.numel()
        self._most = max(self._most, self._used)
        return memory

    def give_back(self, memory: Tensor, after: Transfer | None = None) -> None:
        """Keep memory for the next lot, unless more is free than was ever needed at once; first wait for its reader."""
        if after is not None:
            after.wait()
        memory = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        self._used -= memory.numel()
        if memory.numel() + sum(each.numel() for each in self._free) <= self._most:
            self._free.append(memory)

    def write(self, names: dict[str, Tensor]) -> None:
        """Start to write tensors of a lot, whose memory is free again once that is done."""
        self._leaving.append([(self.files.write(name, memory), memory) for name, memory in names.items()])

    def wait(self, most: int = 0) -> float:
        """Wait until at most so many writes are under way, and raise what went wrong; returns the seconds."""
        start = time.perf_counter()
        while len(self._leaving) > most:
            writes = self._leaving.popleft()
            for transfer, memory in writes:
                self.give_back(memory, transfer)
        return time.perf_counter() - start


class OnNvme(OnHost):
    """Masters and states rest on NVMe; gradients come to host memory, where a thread steps."""

    place = "nvme"

    def __init__(self, title: str, tier: HostTier, passage: Passage) -> None:
        super().__init__(title, tier)
        self.passage = passage
        self._here: dict[str, Tensor] = {}
        """What was read for a step, or is being read."""
        self._reads: dict[str, Transfer] = {}
        self.readers = Readers(before=passage.keep_changes, after=passage.forget_beside)

    def keep(self, master: Tensor, values: Tensor | None) -> Tensor:
        """Write masters to NVMe."""
        self._mark = None if values is None else mark_of(values)
        self._write({"master": self.passage.take(master).copy_(master)})
        self.passage.wait()
        return self._homes["master"]

    def _write(self, found: dict[str, Tensor]) -> None:
        self.readers.wait()
        self.passage.keep_changes()
        for name, memory in found.items():
            if name not in self._homes:
                self._homes[name] = torch.empty_like(memory, device="meta")
        self.passage.write({f"{self.title} {name}": memory for name, memory in found.items()})

    def fetch(self) -> None:
        """Start to read everything that a step needs."""
        self.passage.keep_changes()
        self._waited["writes"] += self.passage.wait(BEHIND)
        for name, home in self._homes.items():
            self._fetch_one(name, home)

    def _fetch_one(self, name: str, home: Tensor) -> None:
        if name not in self._here:
            self._here[name] = self.passage.take(home)
            self._reads[name] = self.passage.files.read(f"{self.title} {name}", self._here[name])

    def _bring(self, name: str) -> Tensor:
        """What rests under a name, in host memory."""
        self.passage.keep_changes()
        self._fetch_one(name, self._homes[name])
        if (read := self._reads.pop(name, None)) is not None:
            self.wait_for("reads", read)
        return self._here[name]

    def take_writes(self, values: Tensor, master: Tensor) -> None:
        """Read the masters, compare them in host memory, and write them again."""
        keep_writes(values, self._bring("master"))
        self._write({"master": self._here.pop("master")})

    def values(self, master: Tensor) -> Tensor:
        """The masters in host memory."""
        return self._bring("master")

    def put(self, pairs: Pairs) -> None:
        """Copy what was stepped in other memory than that which the masters were read to."""
        for place, value in pairs:
            here = _at(self._here["master"], place)
            if here.data_ptr() != value.data_ptr():
                here.copy_(value)

    def send(self, values: Tensor, master: Tensor, stepped: Pairs) -> None:
        """Through the memory that the gradient had; the masters are on their way to the files meanwhile."""
        masters = self._here.pop("master")
        staging = self._staging(values)
        staging.view(masters.shape).copy_(masters)
        self._sent = self.tier.copy_in(values, staging.view(values.shape), after_current=False)
        self._write({"master": masters})

    def write_values(self, into: Tensor, master: Tensor, *, is_stepped: bool) -> None:
        """From host memory, through which the masters pass; those that were stepped go on to the files."""
        into.copy_(self._bring("master").view(into.shape))
        if is_stepped:
            self._write({"master": self._here.pop("master")})
        else:
            self._let_go()

    def arrived(self, values: Tensor, master: Tensor) -> Pairs:
        """Later work of the current stream waits for values that were sent; others are read and sent now."""
        if self._sent is None:
            values.copy_(self._bring("master"))
            self._let_go()
        else:
            self._sent.wait_on_stream()
        self._sent, self._mark, self._is_compared = None, mark_of(values), False
        return []

    def forget(self) -> None:
        """What has left or was read ahead of a step is of no use any more."""
        super().forget()
        self._let_go()

    def _let_go(self) -> None:
        """Give the memory back of what was read and not changed."""
        for name, memory in self._here.items():
            if (read := self._reads.pop(name, None)) is not None:
                read.wait()
            self.passage.give_back(memory)
        self._here.clear()

    def pass_through(self, *, is_streamed: bool) -> None:
        """The step runs on the host."""

    def bring_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """States in host memory, in place of what stands for them."""
        for number, tensor in enumerate(tensors):
            state = states.get(tensor, {})
            for key in state:
                if state[key] is self._homes.get(f"{number} {key}"):
                    state[key] = self._bring(f"{number} {key}")

    def rest_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """Start to write each state, under the number of what it belongs to and its key."""
        leaving: dict[str, Tensor] = {}
        found = list(large_states(tensors, states))
        for name, state, key in found:
            memory = self._here.pop(name, None)
            if state[key] is not memory:
                memory = (self.passage.take(state[key]) if memory is None else memory).copy_(state[key])
            leaving[name] = memory
        self._write(leaving)
        for name, state, key in found:
            state[key] = self._homes[name]

    def readable(self, home: Tensor, piece: Piece) -> Piece:
        """A piece of what rests here, that is read when it is asked for."""
        source = piece.source
        if not isinstance(source, Tensor) or not source.is_meta:
            return piece
        name = f"{self.title} {next(name for name, each in self._homes.items() if each is home)}"

        def load() -> Tensor:
            return _at(self.passage.look(name, home.nbytes).view(home.dtype), source)

        def load_beside() -> Tensor:
            return _at(self.passage.look_beside(name, home.nbytes).view(home.dtype), source)

        shape, keep = tuple(source.shape), self.passage.change
        unread = Unread(shape, source.dtype, load, keep, load_beside=load_beside, readers=self.readers)
        return replace(piece, source=unread)

    def wait(self) -> Mapping[str, float]:
        """Writes go on beside the next forward; what went wrong with earlier ones is raised."""
        self._waited["writes"] += self.passage.wait(BEHIND)
        self.tier.step_needs.new_states = 0
        return self._waits()


def _at(memory: Tensor, place: Tensor) -> Tensor:
    """The part of a memory for which a part of the tensor stands that has none."""
    return memory.as_strided(place.shape, place.stride(), place.storage_offset())
