"""What is cut of a model, and where: the values that rules give and that the split obeys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mizzen.wording import and_more

Style = Literal["column", "row", "rows of a table", "columns of a table", "whole", "partly summed"]
Runs = tuple[tuple[int, ...], ...]
"""For each run of a dimension, such as Q, K and V, the sizes of the parts that ranks hold, as in `Cut.runs`."""


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How one layer is cut, and what it exchanges."""

    path: str
    style: Style
    runs: Runs = ()
    """The parts of its outputs (column), of its inputs (row), or of the rows or columns of a table."""
    is_transposed: bool = False
    """Whether its weight has inputs first."""
    region: str = ""
    """The name of the region that it opens or closes: between these activations are cut too."""
    gathers: bool = False
    """Whether its outputs, which are cut, are put together for whoever comes next."""
    splits: bool = False
    """Whether its inputs come whole."""
    summed_tail: int = 0
    """Of a layer that stays whole, how many of its last outputs go where activations are cut."""

    @property
    def dim(self) -> int:
        """The dimension of its weight that is cut."""
        across = self.style in ("row", "columns of a table")
        return int(across != self.is_transposed)

    def __str__(self) -> str:
        sizes = " + ".join(_sizes(run) for run in self.runs)
        also = " gathered" if self.gathers else " of whole inputs" if self.splits else ""
        return f"{self.path}: {self.style}{also}" + (f", {sizes}" if sizes else "")


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """A parameter beside the layers that meets activations which are cut."""

    name: str
    dim: int | None
    """The dimension that is cut with them; None where it stays whole, and the ranks' gradients of it are added up."""
    runs: Runs = ()


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A number that a module computes with, and what each rank has in its place."""

    path: str
    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """Everything that is cut over tensor-parallel ranks."""

    ranks: int
    layers: tuple[LayerCut, ...]
    parameters: tuple[ParameterCut, ...] = ()
    sizes: tuple[SizeChange, ...] = ()
    random: frozenset[str] = frozenset()
    """The regions inside of which random numbers are drawn, which have to differ among the ranks."""
    left: tuple[str, ...] = ()
    """Layers that no rule cuts: every rank has them whole."""
    overlaps: bool = False
    """Whether sums over ranks go on while the layer still computes."""

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for layer in self.layers:
            counts[layer.style] = counts.get(layer.style, 0) + 1
        words = ", ".join(f"{count} x {style}" for style, count in counts.items())
        whole = f"; whole on every rank: {and_more(self.left, 3)}" if self.left else ""
        return f"over tp={self.ranks}: {words}{whole}"


def balanced(size: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by one at most, the larger ones first."""
    each, more = divmod(size, parts)
    return tuple(each + (part < more) for part in range(parts))


def scaled(sizes: Sequence[int], unit: int) -> tuple[int, ...]:
    """Parts in units as parts in elements."""
    return tuple(size * unit for size in sizes)


def _sizes(run: Sequence[int]) -> str:
    return str(run[0]) if len(set(run)) == 1 else "/".join(map(str, run))
