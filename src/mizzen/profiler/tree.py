"""What was counted, as a tree of modules: each with all that is inside of it. `render.py` prints it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch import nn

from mizzen.profiler.count import ModuleCost

BACKWARD: Final = 2
"""Operations of a backward for each of its forward, where no backward was seen."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One module with everything inside of it."""

    path: str
    kind: str
    """The name of its class, without what sharding makes of it."""
    label: str
    """What the class prints of itself, such as its sizes."""
    depth: int
    parameters: int
    """Whole ones, however they are shared out among ranks. One that several modules share is counted in each."""
    forward: int
    """Operations of its forward: two for each multiplication with its addition."""
    backward: int
    recomputed: int
    """The part of backward that is a forward once more."""
    seconds: float
    """Time of its forward, on the device."""
    calls: int
    inside: tuple["Branch", ...]

    @property
    def name(self) -> str:
        """Its name in the module around it."""
        return self.path.rpartition(".")[2]

    @property
    def macs(self) -> int:
        """Multiplications with their additions, in forward."""
        return self.forward // 2

    @property
    def model_flops(self) -> int:
        """Operations that the model needs, forward and backward, whatever was computed twice."""
        return self.forward + ((self.backward - self.recomputed) or BACKWARD * self.forward)

    def walk(self) -> Iterator["Branch"]:
        """This and every branch inside, from the top."""
        yield self
        for branch in self.inside:
            yield from branch.walk()


def grow(
    model: nn.Module,
    costs: Mapping[str, ModuleCost],
    *,
    left_out: Collection[type[nn.Module]] = (),
) -> Branch:
    """The tree of a model and its costs, without modules of some kinds."""
    return _grow(model, costs, tuple(left_out), "", set(), depth=0)


def _grow(
    module: nn.Module,
    costs: Mapping[str, ModuleCost],
    left_out: tuple[type[nn.Module], ...],
    path: str,
    seen: set[nn.Module],
    *,
    depth: int,
) -> Branch:
    seen.add(module)
    children = {name: child for name, child in module.named_children() if child not in seen}
    inside = tuple(
        _grow(child, costs, left_out, f"{path}.{name}".lstrip("."), seen, depth=depth + 1)
        for name, child in children.items()
        if not isinstance(child, left_out)
    )
    cost = costs.get(path, ModuleCost())
    return Branch(
        path=path,
        kind=_kind(module),
        label=module.extra_repr(),
        depth=depth,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        forward=cost.forward + sum(branch.forward for branch in inside),
        backward=cost.backward + sum(branch.backward for branch in inside),
        recomputed=cost.recomputed + sum(branch.recomputed for branch in inside),
        # A list of modules is never called itself.
        seconds=cost.seconds if cost.calls else sum(branch.seconds for branch in inside),
        calls=cost.calls,
        inside=inside,
    )


def _kind(module: nn.Module) -> str:
    return type(module).__name__
