"""What is cut of a model, and where: the values that rules give and that the split obeys."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from mizzen.model.flow import Argument
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
    is_last: bool = True
    """Whether it is called after all others of its region that are cut as it is, by outputs or by inputs."""

    @property
    def dim(self) -> int:
        """The dimension of its weight that is cut."""
        across = self.style in ("row", "columns of a table")
        return int(across != self.is_transposed)

    def __str__(self) -> str:
        if self.style == "partly summed":
            return f"whole, its last {self.summed_tail} outputs go where activations are cut"
        what = {"column": "outputs", "row": "inputs", "rows of a table": "rows", "columns of a table": "columns"}
        also = ", gathered afterwards" if self.gathers else ", of whole inputs" if self.splits else ""
        return f"{self.style}, {_share(self.runs)} {what[self.style]}{also}"


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """A parameter beside the layers that meets activations which are cut."""

    name: str
    dim: int | None
    """The dimension that is cut with them; None where it stays whole, and the ranks' gradients of it are added up."""
    runs: Runs = ()

    def __str__(self) -> str:
        if self.dim is None:
            return "whole, gradients summed over the ranks"
        return f"cut along dimension {self.dim}, {_share(self.runs)}"


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A number that a module computes with, and what each rank has in its place."""

    path: str
    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleInput:
    """A module, and the argument that is the activation which it is given."""

    path: str
    argument: Argument


@dataclass(frozen=True, slots=True)
class SequenceCut:
    """Where each rank has a part of the sequence: between the layers that are cut, in all blocks of a model."""

    stacks: tuple[tuple[ModuleInput, ...], ...]
    """Blocks that follow each other, in the order of their calls: the first is given whole sequences and the last gives
    them."""
    readers: tuple[ModuleInput, ...]
    """The modules inside of blocks that work with whole sequences: attention, and what stands beside it."""
    rows: frozenset[str]
    """The layers whose outputs are summed into parts."""
    is_random: bool = False
    """Whether dropout is applied to what is cut."""

    def __str__(self) -> str:
        return f"; sequences are cut between the layers of {sum(map(len, self.stacks))} blocks"


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
    whole: tuple[str, ...] = ()
    """Modules that have parameters of which nothing is cut, `left` among them."""
    sequence: SequenceCut | None = None
    """Where sequences are cut too."""
    share: float = 1.0
    """How much of all parameters is cut, by their numbers of elements."""

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for layer in self.layers:
            counts[layer.style] = counts.get(layer.style, 0) + 1
        words = ", ".join(f"{count} x {style}" for style, count in counts.items())
        whole = f"; whole on every rank: {and_more(self.left, 3)}" if self.left else ""
        return f"over tp={self.ranks}: {words}; {self.share:.0%} of the parameters{whole}{self.sequence or ''}"

    def regions_in_blocks(self) -> frozenset[str]:
        """The regions that sum up into parts of sequences."""
        rows = self.sequence.rows if self.sequence is not None else frozenset[str]()
        return frozenset(cut.region for cut in self.layers if cut.path in rows)

    def details(self) -> list[str]:
        """One line for each module, or for all that differ by their numbers alone: how it is cut."""
        found = [(cut.path, str(cut)) for cut in self.layers]
        found += [(cut.name, str(cut)) for cut in self.parameters]
        found += [(path or "the model itself", "whole") for path in self.whole]
        alike: dict[tuple[str, str], list[str]] = {}
        for path, words in found:
            alike.setdefault((_NUMBER.sub("*", path), words), []).append(path)
        lines = [(name, words) for (_, words), paths in alike.items() for name in _names_of(paths)]
        width = max((len(name) for name, _ in lines), default=0)
        return [f"{name:<{width}}  {words}" for name, words in lines]


def runs_in(shape: Any, size: int, others: int, place: int | None, *, by_inputs: bool = False) -> tuple[int, ...]:
    """The runs of a fused layer's outputs, or inputs, out of the shape in which its weight is seen; () is one.

    The shape is (outputs, inputs), and outputs may be several numbers. At a place of it, the first for outputs and the
    last for inputs, stand the sizes of the runs, or how many of one size there are; -1 is one.
    """
    if not isinstance(shape, list | tuple) or len(shape) < 2:
        raise ValueError("it is a list such as [3, -1], three of the same size, or [[64, 16, 16], -1], these three")
    last = len(shape) - 1
    place = (last if by_inputs else 0) if place is None else place
    if not 0 <= place <= last or (place == last) != by_inputs:
        raise ValueError(f"at place {place} of it (partition_dim) are no {'inputs' if by_inputs else 'outputs'}")
    if not by_inputs and shape[-1] not in (-1, others):
        raise ValueError(f"its last number is not that of the inputs, {others}")
    around = () if by_inputs else (*shape[:place], *shape[place + 1 : last])
    if not all(type(each) is int and each > 0 for each in around):
        raise ValueError("what stands beside the runs is a number above 0")
    block, rest = divmod(size, prod(around))
    given = shape[place]
    if type(given) is int and (given > 0 or given == -1):
        count = max(given, 1)
        given = [block // count] * count
    if rest or not isinstance(given, list | tuple) or not all(type(each) is int and each > 0 for each in given):
        raise ValueError("runs are numbers above 0")
    if sum(given) != block:
        raise ValueError(f"its runs are {sum(given)} together, not {block}")
    before, after = (1, 1) if by_inputs else (prod(shape[:place]), prod(shape[place + 1 : last]))
    runs = tuple(each * after for each in given) * before
    return runs if len(runs) > 1 else ()


def balanced(size: int, parts: int) -> tuple[int, ...]:
    """Sizes that differ by one at most, the larger ones first."""
    each, more = divmod(size, parts)
    return tuple(each + (part < more) for part in range(parts))


def scaled(sizes: Sequence[int], unit: int) -> tuple[int, ...]:
    """Parts in units as parts in elements."""
    return tuple(size * unit for size in sizes)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _names_of(paths: Sequence[str]) -> list[str]:
    """Paths that differ by numbers alone as one, such as `blocks.0-31.up`; each by itself where some are missing."""
    numbers = list(zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True))
    if prod(len(set(column)) for column in numbers) != len(paths):
        return list(paths)
    ranges = iter(_ranges(set(column)) for column in numbers)
    return [_NUMBER.sub(lambda _: next(ranges), paths[0])]


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers in order as people write them: `0-3,5`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


def _share(runs: Runs) -> str:
    """What a rank has of all runs: `8 of 16`; `19/18 of 37` where ranks differ; `8 + 4 of 16 + 8` for two runs."""
    each = " + ".join(str(run[0]) if len(set(run)) == 1 else "/".join(map(str, run)) for run in runs)
    return f"{each} of {' + '.join(str(sum(run)) for run in runs)}"
