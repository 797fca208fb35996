"""The seam of every change to a model: decide (`wants`), price, and only then touch tensors (`apply`)."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from mizzen.config.layout import Layout, Partition
from mizzen.config.schema import Config
from mizzen.model.sketch import Drafts
from mizzen.plan.cost import Cost

if TYPE_CHECKING:
    from torch import nn

    from mizzen.comm.mesh import Mesh
    from mizzen.plan.parts import Parts


MakeRunner = Callable[[Any], Any]
"""Makes a `Runner` of a `RunnerContext`, both of engine/runner.py: how micro-batches go through parts of a model."""


class Choice(Protocol):
    """What a transform decided: a frozen value that holds everything `apply` needs and prints itself in one line."""

    def __str__(self) -> str: ...


class Transform(Protocol):
    """One change to the model. Everything but `apply` is pure; only that touches tensors or ranks.

    plan.build, anywhere:    wants(config, layout, drafts) -> Choice, None when not asked for, or PlanError
                             redraw(choice, drafts)        -> the drafts that the next transform decides on
                             details(choice)               -> the choice at length, for who reads the plan
                             groups(choice)                -> ranks that need a group which no product of axes gives
                             price(choice, rank)           -> what the change adds to the bytes of a rank
    plan.take, every rank:   take(model, choice, mesh)     -> nothing; what other ranks run of the model is gone
    plan.apply, every rank:  apply(parts, choice, mesh)    -> the parts, changed; it never sees the config
    """

    name: str

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> Any | None:
        """Decide on what the transforms before leave, or refuse with a `PlanError` that says why and what to do."""

    def redraw(self, choice: Any, drafts: Drafts) -> Drafts:
        """What this leaves of the drafts: other homes, or more pieces."""
        return drafts

    def details(self, choice: Any) -> Iterable[str]:
        """What was decided, line by line, where one line does not say all of it."""
        return ()

    def groups(self, choice: Any) -> Iterable[Partition]:
        """The ranks that talk to each other, each time as all such groups of the job."""
        return ()

    def price(self, choice: Any, rank: int) -> Cost:
        """What the change adds to, or takes from, the bytes of a rank that holds its part of the drafts whole."""
        return Cost()

    def runner(self, choice: Any) -> MakeRunner | None:
        """What makes the runner of the parts that this change leaves, where they need one of their own."""
        return None

    def moved_by_apply(self, choice: Any) -> Iterable[str]:
        """The parameters that `apply` itself brings to the device; the others are there before."""
        return ()

    def take(self, model: "nn.Module", choice: Any, mesh: "Mesh") -> None:
        """Leave of a model what this rank runs, before anything is brought to the device; all of it by default."""
        return

    def apply(self, parts: "Parts", choice: Any, mesh: "Mesh") -> "Parts":
        """Do what was decided."""
