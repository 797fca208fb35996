"""The random numbers of a forward pass: a stream of their own per data-parallel rank, apart from the user's.

Ranks that see different samples should drop different units. Seeding torch itself differently on every rank would do
that, and would also break every choice that a script makes alike on all ranks after `initialize`: a split of a data
set, the order of a sampler. So the stream is swapped in for the forward pass and swapped out again.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mizzen.accelerator import get_accelerator

State = tuple[Tensor, Tensor | None]


class RandomStream:
    """One stream of random numbers, on the host and on the device. Without a seed it is the process's own."""

    def __init__(self, seed: int | None, place: Sequence[int] = ()) -> None:
        self._state: State | None = None
        if seed is not None:
            kept = _capture()
            torch.manual_seed(_mixed(seed, place))
            self._state = _capture()
            _restore(kept)

    @contextmanager
    def drawn(self) -> Iterator[None]:
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
