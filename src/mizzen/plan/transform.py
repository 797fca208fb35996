"""The seam of every change to a model: decide (`wants`), price, and only then touch tensors (`apply`)."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.model.sketch import Sketch
from mizzen.plan.cost import Cost

if TYPE_CHECKING:
    from mizzen.comm.mesh import Mesh
    from mizzen.plan.parts import Parts


MakeRunner = Callable[[Any], Any]
"""Makes a `Runner` out of a `Running`, both of engine/runner.py: how micro-batches go through parts of a model."""


class Choice(Protocol):
    """What a transform decided: a frozen value that holds everything `apply` needs and prints itself in one line."""

    def __str__(self) -> str: ...


class Transform(Protocol):
    """One change to the model. `wants` and `price` are pure; only `apply` touches tensors or ranks.

    plan.build, anywhere:    wants(config, layout, sketch) -> Choice, None when not asked for, or PlanError
                             price(choice, sketch)         -> what the change adds to the bytes of one rank
    plan.apply, every rank:  apply(parts, choice, mesh)    -> the parts, changed; it never sees the config
    """

    name: str

    def wants(self, config: Config, layout: Layout, sketch: Sketch) -> Any | None:
        """Decide, or refuse with a `PlanError` that says why and what to do."""

    def price(self, choice: Any, sketch: Sketch) -> Cost:
        """What the change adds to, or takes from, the cost of one rank."""

    def runner(self, choice: Any) -> MakeRunner | None:
        """What makes the runner of the parts that this change leaves, where they need one of their own."""
        return None

    def late(self, choice: Any) -> Iterable[str]:
        """The parameters that `apply` itself brings to the device; the others are there before."""
        return ()

    def apply(self, parts: "Parts", choice: Any, mesh: "Mesh") -> "Parts":
        """Do what was decided."""
