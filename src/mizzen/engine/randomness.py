"""The random numbers of a forward pass: a stream of their own per data-parallel rank, apart from the user's.

Ranks that see different samples should drop different units. Seeding torch itself differently on every rank would do
that, and would also break every choice that a script makes alike on all ranks after `initialize`: a split of a data
set, the order of a sampler. So the stream is swapped in for the forward pass and swapped out again.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

from mizzen.accelerator import get_accelerator

State = tuple[Tensor, Tensor | None]


class RandomStream:
    """One stream of random numbers, on the host and on the device. Without a seed it is the process's own."""

    def __init__(self, seed: int | None, place: Sequence[int] = ()) -> None:
        self._state: State | None = None
        self._place = tuple(place)
        if seed is not None:
            self.restart(seed)

    def restart(self, seed: int, *steps: int) -> None:
        """Begin where the seed, this rank's place and further numbers say."""
        mixed = _mixed(seed, [*self._place, *steps])
        if get_accelerator().shares_host_memory:  # torch would note the seed for every kind of device that may come
            self._state = torch.Generator().manual_seed(mixed).get_state(), None
            return
        kept = _capture()
        torch.manual_seed(mixed)
        self._state = _capture()
        _restore(kept)

    @property
    def is_own(self) -> bool:
        """Whether it is another stream than the process's."""
        return self._state is not None

    def state_dict(self) -> dict[str, Tensor | None]:
        """Where it is; empty for the process's own, which is not kept here."""
        return {} if self._state is None else {"host": self._state[0], "device": self._state[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        device = state["device"] if state["device"] is not None or self._state is None else self._state[1]
        self._state = (state["host"], device)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, random numbers come from this stream."""
        if self._state is None:
            yield
            return
        kept = _capture()
        _restore(self._state)
        try:
            yield
        finally:
            self._state = _capture()
            _restore(kept)


def process_state() -> dict[str, Any]:
    """Where the random numbers of the process itself are: torch's, the device's, Python's and numpy's."""
    host, device = _capture()
    return {"host": host, "device": device, "python": random.getstate(), "numpy": numpy.random.get_state(legacy=False)}


def restore_process(state: Mapping[str, Any]) -> None:
    """Go on from there; a device that the saved process did not have keeps its own."""
    _restore((state["host"], state["device"] if not get_accelerator().shares_host_memory else None))
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])


def _mixed(seed: int, place: Sequence[int]) -> int:
    digest = hashlib.sha256(f"{seed} {list(place)}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _capture() -> State:
    accelerator = get_accelerator()
    return torch.get_rng_state(), None if accelerator.shares_host_memory else accelerator.rng_state()


def _restore(state: State) -> None:
    host, device = state
    torch.set_rng_state(host)
    if device is not None:
        get_accelerator().set_rng_state(device)
