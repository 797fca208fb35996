"""A step of a lot in host memory that is taken before anybody knows whether it will be: into copies.

The copies lie beside masters and states. When all ranks have agreed on the step they take their places; otherwise
nobody has seen them. Who steps, and when a step is still the right one, is the business of
`engine/step_in_backward.py`.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mizzen.offload.tier import DeviceCopy, HostTier


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """What a step into copies was made of, and what it has made."""

    factors: tuple[float, float]
    """What gradients were multiplied with: in all lots, and in this one beside that."""
    settings: list[dict[str, Any]]
    """The optimizer's settings for this lot."""
    versions: tuple[int, ...]
    """Of the gradient, the masters and the states, before they were read."""
    states: list[dict[str, Any]] | None
    """What the states were before they were read, as `BackwardCopies.states_of` says it."""
    made: Mapping[Tensor, tuple[Tensor, Mapping[str, Any]]]
    """For each tensor of the lot its copy, and the states of that."""


class BackwardCopies:
    """The copies of one lot, which its resting place has. The engine's thread and that of the host's step call it.

    begin(arrival)           a gradient is on its way that a step may follow
    end()                    before it, or the memory that it comes to, is used for something else
    states_of(), versions()  whenever somebody has to know whether states are still those that were read
    fill()                   by the thread of the host, in what `start` gave it to do
    result(), take(), make   by that thread, once the step is voted on
    """

    def __init__(self, title: str, tier: HostTier, homes: Mapping[str, Tensor]) -> None:
        self.title = title
        self.tier = tier
        self.homes = homes
        """Masters and states as they rest."""
        self.start: Callable[[DeviceCopy], Future[BackwardResult] | None] | None = None
        """Starts a step into copies, with a gradient that comes by that copy; None where none is asked for."""
        self._job: Future[BackwardResult] | None = None

    def begin(self, arrival: DeviceCopy | None) -> None:
        """Start a step, where one is asked for."""
        if self.start is not None and arrival is not None:
            self.end()
            self._job = self.start(arrival)

    def end(self) -> None:
        """Forget a step that was started, once nobody reads what it needs."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def result(self) -> BackwardResult | None:
        """What was stepped, if a step was started."""
        return self._job.result() if self._job is not None else None

    def versions(self) -> tuple[int, ...]:
        """By which a write to the gradient in host memory, to masters or to states is seen."""
        return tuple(each._version for each in (self.gradient, *self.homes.values()))

    def states_of(
        self, tensors: Iterable[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """The states of each tensor: the names of those that rest here, and copies of small ones, such as a count.

        None where a state as large as its tensor does not rest here, because somebody has put it in place of another:
        a write to it would not be seen.
        """
        names = {id(home): name for name, home in self.homes.items()}
        found = []
        for tensor in tensors:
            own = dict(states.get(tensor, {}))
            large = [value for value in own.values() if isinstance(value, Tensor) and value.shape == tensor.shape]
            if any(id(value) not in names for value in large):
                return None
            found.append({key: names.get(id(value)) or copy_of(value) for key, value in own.items()})
        return found

    @property
    def gradient(self) -> Tensor:
        """The gradient in host memory."""
        return self.tier.held(f"{self.title} gradient").view(self.homes["master"].shape)

    def make(self) -> None:
        """Take memory for the copies."""
        for name, home in self.homes.items():
            self.tier.place(f"{self.title} early {name}", home)

    def drop(self) -> None:
        """Let go of the memory of the copies."""
        self.end()
        for name in self.homes:
            self.tier.drop(f"{self.title} early {name}")

    def fill(
        self, tensors: Iterable[Tensor], states: Mapping[Tensor, Mapping[str, Any]]
    ) -> dict[Tensor, tuple[Tensor, dict[str, Any]]]:
        """For each tensor a copy and copies of its states: large ones in memory where they may stay."""
        names = {id(home): name for name, home in self.homes.items()}

        def copied(value: Any) -> Any:
            name = names.get(id(value))
            return copy_of(value) if name is None else self.tier.place(f"{self.title} early {name}", value).copy_(value)

        master, made = copied(self.homes["master"]), {}
        for tensor in tensors:
            state = {key: copied(value) for key, value in dict(states.get(tensor, {})).items()}
            made[tensor] = part_for(master, tensor), state
        return made

    def take(self, found: BackwardResult, states: MutableMapping[Tensor, Any]) -> None:
        """Let what was stepped be the masters and states."""
        names = {id(home): name for name, home in self.homes.items()}
        for tensor, (_, made) in found.made.items():
            for key, value in made.items():
                name = names.get(id(states[tensor].get(key)))
                if name is None:
                    states[tensor][key] = value
                else:
                    self._exchange(name, value)
        self._exchange("master", self.tier.held(f"{self.title} early master"))
        self._job = None

    def _exchange(self, name: str, made: Tensor) -> None:
        """Let what rests under a name have other memory, or a copy of what a rule has made elsewhere."""
        early = f"{self.title} early {name}"
        if made is self.tier.held(early):
            self.tier.exchange(f"{self.title} {name}", early)
        else:
            self.homes[name].copy_(made)


def copy_of(value: Any) -> Any:
    """A tensor copied to host memory; anything else as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def part_for(memory: Tensor, tensor: Tensor) -> Tensor:
    """The part of a memory that a tensor is of the masters, which lie in a memory of the same layout."""
    return torch.as_strided(memory, tensor.shape, tensor.stride(), tensor.storage_offset())
