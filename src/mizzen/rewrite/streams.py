"""Named streams of random numbers on the device, for layers whose ranks must not draw the same ones.

Megatron-style models call this their tracker. Seeding by role and saving streams with a checkpoint are not here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch import Tensor

from mizzen.accelerator import get_accelerator
from mizzen.errors import UsageError

TENSOR_PARALLEL: Final = "model-parallel-rng"
"""The stream that differs between tensor-parallel ranks, under the name that models know."""


class RandomStreams:
    """States of the device's generator by name. `fork` draws from one of them; the default stream is not here."""

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}
        self._seeds: set[int] = set()

    @property
    def are_used(self) -> bool:
        """Whether there are any."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget all streams."""
        self._states, self._seeds = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """Where every stream is."""
        return dict(self._states)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Set what `get_states` gave."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start a stream. Two streams with one seed would draw the same numbers, so that is refused."""
        if name in self._states:
            raise UsageError(f"a random stream '{name}' exists already: reset() forgets all of them")
        if seed in self._seeds:
            raise UsageError(f"seed {seed} belongs to another random stream: give '{name}' one of its own")
        self._seeds.add(seed)
        self._states[name] = _state_of(seed)

    def reseed(self, name: str, seed: int) -> None:
        """Let a stream start again from a seed."""
        self._require(name)
        self._states[name] = _state_of(seed)

    @contextmanager
    def fork(self, name: str = TENSOR_PARALLEL) -> Iterator[None]:
        """Inside, the device draws from a stream; afterwards from its default one, as if nothing had been drawn."""
        state, accelerator = self._require(name), get_accelerator()
        default = accelerator.rng_state()
        accelerator.set_rng_state(state)
        try:
            yield
        finally:
            self._states[name] = accelerator.rng_state()
            accelerator.set_rng_state(default)

    @contextmanager
    def rewound(self, states: dict[str, Tensor]) -> Iterator[None]:
        """Inside, all streams are where they were then; afterwards where they are now."""
        now = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(now)

    def _require(self, name: str) -> Tensor:
        if name not in self._states:
            known = ", ".join(self._states) or "none"
            raise UsageError(f"no random stream '{name}' was added; there are: {known}")
        return self._states[name]


def _state_of(seed: int) -> Tensor:
    """The state of the device's generator after seeding; the generator itself is left as it was."""
    accelerator = get_accelerator()
    default = accelerator.rng_state()
    accelerator.seed(seed)
    state = accelerator.rng_state()
    accelerator.set_rng_state(default)
    return state
