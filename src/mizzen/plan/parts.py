"""What a plan makes of a model: always a tuple of parts, one when the model is not pipelined."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mizzen.model.home import Site
from mizzen.model.piece import Piece
from mizzen.monitor.report import Observer
from mizzen.optim.lamb import Portion


class Collector(Protocol):
    """Takes gradients from a backward to their owners; see `Store` for who calls when."""

    waits_for_last: bool
    """Whether gradients stay on their rank until the last backward before a step."""

    has_arrived: bool
    """Whether a gradient of any parameter came since the last step."""

    @property
    def has_strangers(self) -> bool:
        """Whether gradients came in from a backward that was not announced with `arm`."""

    def hide(self) -> None:
        """A forward starts: gradients may leave their parameters until the next backward is over."""

    def arm(self, last: bool | None) -> None:
        """A backward starts; `last` says whether a step follows it, None that gradients are to stay here for now."""

    def settle(self) -> None:
        """That backward is over."""

    def collect(self) -> None:
        """Complete every owned gradient, however it came in."""

    def follow(self, name: str, value: Callable[[], Tensor]) -> None:
        """Somebody has given a complete gradient this whole value: what comes later is added to it."""

    def clear(self, *, taken: bool = False) -> None:
        """Start again from zero; `taken` says that a step was taken with what was there."""


class Lot(Protocol):
    """What is stepped together: a bucket, a unit's share, some parameters that have one owner. It is there for life.

    load(f)       what the optimizer steps has its values, and as `.grad` the owned gradients times a factor
    write_back()  the masters have what was stepped; nothing is done where nothing was loaded
    rest()        what only a step needs is let go
    """

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What the optimizer steps of it; none on a rank that only takes part in moving it."""

    @property
    def is_complete(self) -> bool:
        """Whether its gradient is summed and nothing more comes before the step: its last backward is through.

        On a device this is so in the order of the stream.
        """

    def load(self, factor: float = 1.0) -> None:
        """Make it ready for a step. Where parts of it lie on several ranks, all of them come here in one order."""

    def write_back(self) -> None:
        """Bring what was stepped to the masters."""

    def rest(self) -> None:
        """Let go of what only a step needs."""


class Places(Protocol):
    """Where trained parameters lie. Somebody may move one, or put another one in its place in the model."""

    has_new: bool
    """Whether one of them has brought new values since this was last set to false."""

    def check_step(self) -> None:
        """A step comes: refuse it where what the model computes with could not follow."""

    def check(self) -> None:
        """The model has changed: refuse what can be put right where it stands, before anything is replaced."""

    def restore(self) -> None:
        """Let parameters that were moved be where they are trained, or refuse."""

    def replace(self, name: str, parameter: Tensor) -> nn.Parameter:
        """Train another parameter in the place of one, from the next `restore()` on, or refuse."""


class Store(Protocol):
    """The trained state of a part, of which this rank holds some or all. The engine's thread calls everything.

    each forward      gradients.hide()
    each backward     gradients.arm(last) ... gradients.settle(); or neither, and the gradients stay local
    once              masters() for the optimizer, then rest() of all lots
    at the boundary   gradients.collect(), squares(); load(f) of all lots and a step; or, for one lot after the other,
                      load(f), a step of its tensors, write_back(), rest()
    after the step    publish(), once or twice, then gradients.clear(taken=True)
    any time          pieces(), state_pieces(), not_finite(); spread() after pieces("master") were written to
                      places.restore() and places.replace() where somebody has moved or replaced parameters
    """

    group: ProcessGroup | None
    """The ranks over which gradients are summed; None when there is one."""
    sharers: ProcessGroup | None
    """Those of them among which masters and states are shared out, each element to one."""
    copies: ProcessGroup | None
    """The ranks that hold the very same as this one; None when no other does."""
    everything: Mapping[str, Tensor]
    """The trained parameters by name, and what is sharded beside them: frozen ones."""
    scope: AbstractContextManager[None]
    """Inside, methods of the model other than forward may use its parameters."""
    bundles: Sequence[Sequence[str]]
    """Their names, by what is gathered together."""
    replaced: Sequence[tuple[Tensor, str]]
    """Other objects by which somebody may know a parameter, with its name."""
    lots: Sequence[Lot]
    """All of `masters()`, each in one of them."""

    sites: Mapping[str, Site]
    """Where parameters live of which this rank has but a part, or not all of whose copies are here."""
    others: Mapping[str, ProcessGroup]
    """For each axis that cuts some of them, the ranks that have the rest."""
    weight: float
    """What makes of the mean over `group` the mean that is asked for, which may be over more or fewer ranks."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The trained parameters by name."""

    @property
    def places(self) -> Places:
        """Where they lie."""

    @property
    def gradients(self) -> Collector:
        """Where their gradients go."""

    @property
    def is_sharded(self) -> bool:
        """Whether each of those ranks holds only its share of masters and states."""

    @property
    def gain(self) -> float:
        """What the mean gradient is to be multiplied with before a step, where the sum over ranks was asked for."""

    def masters(self) -> Sequence[tuple[int, Tensor]]:
        """(optimizer group, tensor to optimize), the same tensors for life; they may be empty between steps."""

    def portions(self) -> Mapping[Tensor, Sequence[Portion]]:
        """For each of these tensors, which ranges of it, counted flat, belong to which parameter."""

    def saves(self, name: str) -> bool:
        """Whether the ranks of this store count a parameter and save it, or others do, that hold the same."""

    def squares(self) -> Tensor:
        """The fp64 sum of squares of the gradients that this rank counts."""

    def publish(self) -> None:
        """Write back what was stepped, and bring new master values to the parameters of every rank."""

    def spread(self) -> None:
        """Masters were written to, on every rank alike: let what the model computes with follow."""

    def refresh(self) -> None:
        """Take the parameters' values over as masters, after somebody has written to the parameters."""

    def follow(self, name: str, value: Tensor) -> None:
        """The master of a parameter was given this whole value: let what the model computes with follow."""

    def whole(self, names: Iterable[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Inside, these parameters are whole in their modules; the tensors that stand there, by name."""

    def not_finite(self) -> list[str]:
        """The parameters whose gradient on this rank was not finite before it was summed."""

    def pieces(self, of: Literal["master", "gradient"]) -> list[Piece]:
        """What this rank holds, by parameter name."""

    def state_pieces(self, states: Mapping[Tensor, Mapping[str, object]], key: str) -> list[Piece]:
        """What this rank holds of one optimizer state, by parameter name."""

    def detach(self) -> None:
        """Give the parameters back to their module."""


@dataclass(frozen=True, slots=True)
class Part:
    """One module that runs on this rank, with the stores that hold its trained parameters and whoever follows it."""

    module: nn.Module
    stores: tuple[Store, ...] = ()
    observers: tuple[Observer, ...] = ()
    """What follows the steps of the run."""


Parts = tuple[Part, ...]
