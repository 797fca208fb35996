"""What a plan makes of a model: always a tuple of parts, one when the model is not pipelined."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mizzen.model.home import Site
from mizzen.model.piece import Piece
from mizzen.monitor.report import Observer
from mizzen.optim.own_rules import Portion

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(place, value): what is to be copied where."""


class StartedCopy(Protocol):
    """A copy to the device on a stream of its own."""

    def wait_on_stream(self) -> None:
        """Let later work of the current stream wait for it."""


class GradientPlace(Protocol):
    """Where the gradient of one lot rests, which the device does not keep until the step.

    keep(gradient)   as often as one has grown; its memory on the device may be let go at once
    bring(into)      before it grows further
    look()           any time: somebody reads it, or writes to it
    for_step()       once, instead of `Rest.gradient`
    """

    def keep(self, gradient: Tensor) -> None:
        """Start to bring it here."""

    def bring(self, into: Tensor) -> StartedCopy:
        """Start to copy the first elements of it to the device."""

    def look(self) -> Tensor:
        """The gradient in place."""

    def for_step(self) -> Tensor:
        """The gradient where the step runs."""

    def has_room(self, size: int) -> bool:
        """Whether the device has room to keep a gradient of so many bytes instead, which are then taken of it."""


class Rest(Protocol):
    """The resting place of the masters and states of one lot. The lot calls everything but the last three rows.

    keep(master, values)       once: the masters from now on, with these values
    expect_step()              when the last backward before a step begins
    leave(gradient)            in backward, as soon as the gradient is complete
    step_in_backward()               after it, or after the last `keep` of its gradient
    keep_writes(values, m)     before a step and whenever the model was changed
    gradient(g), values(m)     the gradient and the values to step, in the same memory
    put(pairs), send(...)      after the step: to the masters, and to the values that the model computes with
    take_writes, write_values  instead of keep_writes and send, where these values rest outside the device, too
    forget()                   gradients were cleared: whatever was brought here for a step is gone
    fetch()                    by the step, while the lot before it is stepped
    bring_states, rest_states  by the step, before and after it
    trust_values(), wait()     by the step, before and after all lots
    """

    place: str
    """device, host or nvme."""

    @property
    def resting_gradient(self) -> GradientPlace | None:
        """Where the gradient may rest; None: on the device, where it was summed."""

    @property
    def is_stepped_on_host(self) -> bool:
        """Whether the step runs on the host."""

    def keep(self, master: Tensor, values: Tensor | None) -> Tensor:
        """Take masters in, and see the values that the model has of them; returns them as they are from now on.

        There are no values to see where these rest outside the device, too, and nobody writes to them unnoticed.
        """

    def leave(self, gradient: Callable[[], Tensor]) -> None:
        """The gradient is complete, and no other comes before the step: what can be moved ahead of it, is."""

    def expect_step(self) -> None:
        """A backward has begun that a step follows: what the step needs may come to where it runs meanwhile."""

    def step_in_backward(self) -> None:
        """The gradient that a step may follow is on its way: the host may take that step, for nobody to see yet."""

    def keep_writes(self, values: Tensor, master: Tensor) -> None:
        """Let masters have what somebody has written to the values that the model computes with."""

    def take_writes(self, values: Tensor, master: Tensor) -> None:
        """Let masters have what was written to values that lie where masters rest, or on the host if that is NVMe."""

    def trust_values(self) -> None:
        """After `keep_writes`: nobody writes to the values before the next step is over, so it need not look again."""

    def gradient(self, gradient: Tensor) -> Tensor:
        """The gradient where the step runs."""

    def values(self, master: Tensor) -> Tensor:
        """The masters where the step runs."""

    def put(self, pairs: Pairs) -> None:
        """Bring what was stepped, in other memory than the masters', to these."""

    def send(self, values: Tensor, master: Tensor, stepped: Pairs) -> None:
        """Start to bring new masters to the values that the model computes with, ahead of `arrived`."""

    def write_values(self, into: Tensor, master: Tensor, *, is_stepped: bool) -> None:
        """Copy masters, of which `is_stepped` says that they are new, to values that rest in host memory."""

    def arrived(self, values: Tensor, master: Tensor) -> Pairs:
        """Let the values be those of the masters; returns copies on the device that the caller is to make."""

    def forget(self) -> None:
        """Gradients were cleared."""

    def pass_through(self, *, is_streamed: bool) -> None:
        """Say whether what rests outside the device passes through it for a step, between two steps."""

    def fetch(self) -> None:
        """Start to bring what a step needs to where it runs, if that is far."""

    def readable(self, home: Tensor, piece: Piece) -> Piece:
        """A piece of the masters, or of a state, that is read from where it rests."""

    def bring_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """Let the states of what is stepped be where the step runs."""

    def rest_states(self, tensors: Iterable[Tensor], states: MutableMapping[Tensor, Any]) -> None:
        """Let states as large as what is stepped rest here; small ones stay where they are."""

    def wait(self) -> Mapping[str, float]:
        """After a step: raise what went wrong. What was stepped may be on its way still, until somebody reads it.

        Returns the seconds in which the host has waited: for `copies_out` of gradients, `reads` and `writes` of files.
        """


class Lot(Protocol):
    """What is stepped together: a bucket, a unit's share, some parameters that have one owner. It is there for life.

    load(f)       what the optimizer steps has its values, and as `.grad` the owned gradients times a factor
    write_back()  the masters have what was stepped; nothing is done where nothing was loaded
    send()        the values that the model computes with are on their way from there, ahead of `Store.write_back`
    unload()      what only a step needs is let go
    """

    @property
    def rest(self) -> Rest:
        """Where its masters and states rest."""

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

    def keep_writes(self) -> None:
        """Let masters have what somebody has written to the model; `load` does so too."""

    def send(self) -> None:
        """Start to bring what was stepped to the values that the model computes with, where that takes time."""

    def unload(self) -> None:
        """Let go of what only a step needs."""


@dataclass(frozen=True, slots=True)
class StoreRanks:
    """The ranks that a store shares its parameters with, and what their number makes of a mean gradient."""

    reduce_group: ProcessGroup | None = None
    """The ranks over which gradients are summed; None when there is one."""
    shard_group: ProcessGroup | None = None
    """The ranks among which masters and states are sharded, each element on one; None where each rank holds all."""
    replica_group: ProcessGroup | None = None
    """The ranks that hold the very same as this one; None when no other does."""
    cut_groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    """For each axis that cuts some parameters, the ranks that have the rest; for others those that have the same."""
    mean_factor: float = 1.0
    """What makes of the mean over `reduce_group` the mean that is asked for, which may be over more or fewer ranks."""
    step_factor: float = 1.0
    """What the mean gradient is to be multiplied with before a step, where the sum over ranks was asked for."""


@dataclass(frozen=True, slots=True)
class StoreContents:
    """What a store holds, by name. All of it is empty once the store is released."""

    trained: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """The trained parameters."""
    held: Mapping[str, Tensor] = field(default_factory=dict)
    """The trained parameters, and what is sharded beside them: frozen ones."""
    units: Sequence[Sequence[str]] = ()
    """The names of all held parameters, by what is gathered together."""
    stays_gathered: bool = False
    """Whether a runner that comes to its units once for each micro-batch is to `gather` all of them for a batch."""
    sites: Mapping[str, Site] = field(default_factory=dict)
    """Where parameters live of which this rank has but a part, or not all of whose copies are here."""
    saved_elsewhere: frozenset[str] = frozenset()
    """Parameters that other ranks, which hold the same, count in a norm and save."""
    lots: Sequence[Lot] = ()
    """What is stepped together, as a backward completes it: each tensor of `masters` is in one of them."""
    masters: Sequence[tuple[int, Tensor]] = ()
    """(optimizer group, tensor to optimize): the same tensors for life, which may be empty between steps."""
    portions: Mapping[Tensor, Sequence[Portion]] = field(default_factory=dict)
    """For each of these tensors, which ranges of it, counted flat, belong to which parameter."""


ReplaceValues = Callable[[Sequence[Tensor], bool], None]
"""Takes tensors as the values of a store: copies on the host, with true, or on the device again."""


@dataclass(frozen=True, slots=True)
class StoreMemory:
    """The tensors of a store whose storages somebody may empty for a while, and has to fill again."""

    values: Sequence[Tensor]
    """What the model computes with."""
    masters: Sequence[Tensor]
    """Some may be in the storages of values."""
    gradients: Sequence[Tensor]
    replace_values: ReplaceValues | None = None
    """None: the storages of values are emptied, too, since nobody else knows them."""
    returned: Callable[[], None] = lambda: None
    """Says that every storage is filled again, perhaps at another address."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What somebody has done with the parameters of a store, and what memory it has now."""

    memory: Callable[[], StoreMemory]
    """What may leave the device between two steps; what nobody needs then is let go."""
    is_gathered: bool = False
    """Whether a `gather()` holds sharded parameters whole, which would keep their values in a step."""
    has_new_values: bool = False
    """Whether a parameter that was moved or replaced has brought other values, since the last step that was taken."""


@dataclass(frozen=True, slots=True)
class ReducedGradients:
    """The gradients of a store, complete on their owners; valid until the next backward."""

    has_arrived: bool
    """Whether a gradient of any parameter came since the last step."""
    has_unannounced: bool
    """Whether some came from a backward that was not announced with `begin_backward`."""
    squares: Callable[[], Tensor]
    """The fp64 sum of squares of the gradients that this rank counts."""
    nonfinite: Callable[[], list[str]]
    """The parameters whose gradient on this rank was not finite before it was summed. The host waits for the device."""


class Store(Protocol):
    """The trained state of a part, of which this rank holds some or all. The engine's thread calls everything.

    each forward      restore_parameters(), begin_forward()
    each backward     begin_backward(last) ... end_backward(); or neither, and the gradients stay local
    once              contents.masters for the optimizer, then unload() of all lots
    at the boundary   reduce(); load(f) of all lots and a step; or, for one lot after the other, load(f), a step of its
                      tensors, write_back(), unload()
    after the step    write_back(), once or twice, then clear_gradients(taken=True)
    any time          pieces(), gather(); write_back() after all pieces("master") were written to, update_copies() after
                      those of one parameter were
    for a while       memory(), whose storages somebody empties and fills again
    at the end        release()
    """

    @property
    def ranks(self) -> StoreRanks:
        """Who else holds these parameters, or parts of them."""

    @property
    def contents(self) -> StoreContents:
        """What is held."""

    @property
    def status(self) -> StoreStatus:
        """What somebody has done with the parameters."""

    def begin_forward(self) -> None:
        """A forward starts: gradients may leave their parameters until the next backward is over."""

    def begin_backward(self, last: bool | None) -> None:
        """A backward starts; `last` says whether a step follows it, None that gradients are to stay here for now."""

    def end_backward(self) -> None:
        """The backward that was begun is over."""

    def reduce(self) -> ReducedGradients:
        """Complete every owned gradient, however it came in."""

    def clear_gradients(self, *, taken: bool = False) -> None:
        """Start again from zero; `taken` says that a step was taken with what was there."""

    def write_back(self) -> None:
        """Bring what was stepped or written to the masters to the parameters of every rank, on all ranks together."""

    def update_copies(self, of: str, name: str, value: Callable[[], Tensor]) -> None:
        """`pieces(of)` of a parameter were written to: let its other copies on this rank have the whole value.

        The value is asked for only where there is such a copy, which is so on all ranks or on none.
        """

    def restore_parameters(self, replaced: Mapping[str, Tensor] | None = None) -> None:
        """Bring parameters that somebody has moved back to where they are trained, with the values that they have now.

        Given `replaced`, parameters were also written to, or the model was changed: masters take over what was written,
        and each named parameter is trained from now on in the place of the one that had its name. What the store cannot
        take over it puts right, and refuses.
        """

    def gather(self, names: Iterable[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Inside, these parameters are whole in their modules; the tensors that stand there, by name."""

    def pieces(
        self, of: str, states: Mapping[Tensor, Mapping[str, object]] | None = None, only: str | None = None
    ) -> list[Piece]:
        """What this rank holds of each "master" or "gradient" or, given the optimizer's states, of one of these.

        `only` of one parameter: to make the pieces of all takes as long as there are parameters.
        """

    def release(self) -> None:
        """Give the parameters back to their module."""


@dataclass(frozen=True, slots=True)
class Part:
    """One module that runs on this rank, with the stores that hold its trained parameters and whoever follows it."""

    module: nn.Module
    stores: tuple[Store, ...] = ()
    observers: tuple[Observer, ...] = ()
    """What follows the steps of the run."""
    method_scope: AbstractContextManager[None] = nullcontext()
    """Inside, methods of the module other than forward may use its parameters."""


Parts = tuple[Part, ...]
