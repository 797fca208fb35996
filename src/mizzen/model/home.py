"""Where a parameter lives: which axes cut it, which ranks hold the same of it, and how its gradient becomes a mean.

Pure values and arithmetic: a home and a layout say for every rank which boxes of the whole tensor it holds and who else
holds them. Stores, norms, access, checkpoints and costs read homes; a strategy is a function that draws other ones.

[Note: copies and sums]
`copies` are the axes along which ranks hold equal values. `sums`, some of these, are the axes along which they bring
different gradients, which have to be added up; masters and states are shared out along them. Along the other copies
gradients are equal already: the scale of a norm in a model whose matrices are cut is such a copy. The divisor is a
number of its own, because an expert's gradient is summed over fewer ranks than have sent it tokens.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, product
from typing import TYPE_CHECKING

from mizzen.config.layout import AXES, DATA_AXES, EXPERT_AXES, SHARD_AXES, Layout
from mizzen.errors import PlanError
from mizzen.model.box import Box, Interval, Shape, boxes_of_range, chunk, window

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension that is laid out along an axis. It is made of runs, end to end: Q, K and V of a fused matrix, say."""

    axis: str
    dim: int
    runs: tuple[tuple[int, ...], ...]
    """For each run the sizes of its parts. With fewer parts than ranks neighbours hold the same; one part is a copy.

    Ranks that hold the same part use it beside different neighbours: their gradients of it are added up.
    """

    def held(self, place: int, ranks: int) -> list[Interval]:
        """The intervals that the rank at a place of the axis holds."""
        found: list[Interval] = []
        start = 0
        for sizes in self.runs:
            part = place * len(sizes) // ranks
            edges = list(accumulate(sizes, initial=start))
            low, high = edges[part], edges[part + 1]
            start = edges[-1]
            if low < high:
                found.append((low, high))
        return found

    def is_shared(self, ranks: int) -> bool:
        """Whether some run has fewer parts than the axis has ranks, so that not every rank's boxes are its own."""
        return any(len(sizes) < ranks for sizes in self.runs)


def evenly(size: int, parts: int) -> tuple[int, ...]:
    """The sizes of parts by torch.chunk's rule: the last ones may be short, or empty."""
    return tuple(stop - start for start, stop in (chunk(size, parts, part) for part in range(parts)))


@dataclass(frozen=True, slots=True)
class ParameterSplit:
    """How a layer says that it holds a part of a parameter, in Megatron's attributes."""

    dim: int | None
    """Along which dimension; None where it does not say."""
    stride: int = 1
    """In how many runs, each of which is cut: Q, K and V of one matrix, say."""
    is_summed: bool = False
    """Whether it is a copy whose gradients differ, because its inputs are cut along the sequence."""
    size: int | None = None
    """How much the dimension has altogether, where that is said: parts are then by torch.chunk's rule, and may differ.

    Without it all ranks have as much as this one."""
    runs: tuple[int, ...] = ()
    """The sizes of the runs where they differ, instead of the stride: Q, and fewer K and V."""

    def parts(self, size: int, ranks: int) -> tuple[tuple[int, ...], ...]:
        """For each run of a dimension that has so many altogether, the sizes of its parts."""
        return tuple(evenly(run, ranks) for run in self.runs or (size // self.stride,) * self.stride)


def split_of(tensor: "Tensor") -> ParameterSplit | None:
    """What Megatron's layers write on a parameter that they have cut."""
    said = vars(tensor)
    if not (said.get("tensor_model_parallel") or said.get("model_parallel")):
        return ParameterSplit(None, is_summed=True) if said.get("sequence_parallel") else None
    dim, stride = said.get("partition_dim"), said.get("partition_stride", 1)
    is_said = type(dim) is int and dim >= 0
    return ParameterSplit(
        dim if is_said else None,
        stride if type(stride) is int else 1,
        size=said.get("partition_size"),
        runs=tuple(said.get("partition_runs", ())),
    )


@dataclass(frozen=True, slots=True)
class Shared:
    """A part of a cut parameter that several ranks of the axis hold."""

    box: Box
    """Of the whole tensor."""
    place: Box
    """Of the tensor that the rank holds."""
    ranks: tuple[int, ...]
    """Those that hold it, beside ranks that hold the same of everything."""


@dataclass(frozen=True, slots=True)
class ElementRange:
    """A run of elements of what a rank holds that it counts for all, or that another one counts."""

    boxes: tuple[Box, ...]
    """Of the whole tensor."""
    start: int
    stop: int
    """Where it begins and ends among the elements that were asked for."""
    is_counted: bool


@dataclass(frozen=True, slots=True)
class Home:
    """Where one parameter lives."""

    cuts: tuple[Cut, ...] = ()
    copies: tuple[str, ...] = ()
    """The axes along which ranks hold the same."""
    sums: tuple[str, ...] = ()
    """Those of them along which gradients differ and are added up."""
    divisor: int = 1
    """What that sum is divided by."""
    only: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Axes of which only some places hold it at all."""

    @classmethod
    def data_parallel(cls, layout: Layout) -> "Home":
        """Every rank holds all of it, and gradients are averaged over the data ranks."""
        return cls(copies=AXES, sums=DATA_AXES, divisor=layout.size(*DATA_AXES))

    # How strategies draw other homes

    def cut(self, axis: str, dim: int, *runs: Sequence[int]) -> "Home":
        """Laid out along an axis. Gradients are no longer summed along it."""
        new = Cut(axis, dim, tuple(tuple(sizes) for sizes in runs))
        copies, sums = _without(axis, self.copies), _without(axis, self.sums)
        return replace(self, cuts=(*self.cuts, new), copies=copies, sums=sums)

    def summed(self, axis: str) -> "Home":
        """A copy along an axis whose ranks bring different gradients of it, which are added up."""
        return replace(self, sums=(*_without(axis, self.sums), axis))

    def at(self, axis: str, *places: int) -> "Home":
        """On some places of an axis only. Where they are several, as of a tied weight, their gradients are added up."""
        copies, sums = _without(axis, self.copies), _without(axis, self.sums)
        if len(places) > 1:
            copies, sums = (*copies, axis), (*sums, axis)
        return replace(self, copies=copies, sums=sums, only=(*self.only, (axis, places)))

    # What follows from it

    @property
    def is_whole(self) -> bool:
        """Whether a rank that holds it holds all of it."""
        return not self.cuts

    def is_at(self, layout: Layout, rank: int) -> bool:
        """Whether a rank holds anything of it."""
        places = layout.coordinates(rank) if self.only else {}
        return all(places[axis] in there for axis, there in self.only)

    def intervals(self, shape: Sequence[int], layout: Layout, rank: int) -> list[list[Interval]]:
        """For each dimension what a rank holds of it, in rising order."""
        sides = [[(0, size)] if size else [] for size in shape]
        places = layout.coordinates(rank) if self.cuts else {}
        for cut in self.cuts:
            held = cut.held(places[cut.axis], layout.size(cut.axis))
            sides[cut.dim] = [
                (max(a, c), min(b, d)) for a, b in sides[cut.dim] for c, d in held if max(a, c) < min(b, d)
            ]
        return sides

    def local_shape(self, shape: Sequence[int], layout: Layout, rank: int) -> Shape:
        """The shape of the tensor that a rank holds: its intervals laid end to end in each dimension."""
        if not self.cuts:
            return tuple(shape)
        return tuple(sum(b - a for a, b in side) for side in self.intervals(shape, layout, rank))

    def boxes(self, shape: Sequence[int], layout: Layout, rank: int) -> tuple[Box, ...]:
        """What a rank holds; nothing where it is not at home."""
        if not self.is_at(layout, rank) or not math.prod(shape):
            return ()
        return tuple(_box(corner) for corner in product(*self.intervals(shape, layout, rank)))

    def boxes_of_range(self, shape: Sequence[int], layout: Layout, rank: int, start: int, stop: int) -> tuple[Box, ...]:
        """A flat range of the tensor that a rank holds, as boxes of the whole one, in the order of their elements."""
        if not self.cuts:
            return boxes_of_range(shape, start, stop)
        sides = self.intervals(shape, layout, rank)
        local = tuple(sum(b - a for a, b in side) for side in sides)
        return tuple(found for box in boxes_of_range(local, start, stop) for found in _in_whole(box, sides))

    def holders(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """The ranks that hold the very same as this one, itself among them, in rising order."""
        return self._along(self.copies, layout, rank)

    def adders(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """The ranks whose gradients are added to this one's, itself among them, in rising order."""
        return self._along(self.sums, layout, rank)

    def holders_of(self, box: Box, shape: Sequence[int], layout: Layout, rank: int) -> tuple[int, ...]:
        """The ranks that hold one of this rank's boxes, which are more than its copies where a run has fewer parts."""
        if not self.is_shared(layout):
            return self.holders(layout, rank)
        others = self._along((*(cut.axis for cut in self.cuts), *self.copies), layout, rank)
        return tuple(other for other in others if any(held.contains(box) for held in self.boxes(shape, layout, other)))

    def is_shared(self, layout: Layout) -> bool:
        """Whether some parts are held by several ranks of an axis that cuts it."""
        return any(cut.is_shared(layout.size(cut.axis)) for cut in self.cuts)

    def is_first(self, layout: Layout, rank: int) -> bool:
        """Whether the ranks that add up with this one count what they hold, and save it; else others, with the same."""
        return min(self.holders(layout, rank)) in self.adders(layout, rank)

    def counts(self, shape: Sequence[int], layout: Layout, rank: int) -> tuple[Box, ...]:
        """The boxes that this rank counts for all, so that each element is counted by one of its adders alone.

        Those whose gradients are summed share the counting of what they share; of other copies the first one counts.
        """
        family = set(self.adders(layout, rank))
        return tuple(
            box for box in self.boxes(shape, layout, rank) if min(self.holders_of(box, shape, layout, rank)) in family
        )

    def _along(self, axes: Iterable[str], layout: Layout, rank: int) -> tuple[int, ...]:
        """The ranks that differ from one at most along these axes, where it is at home."""
        return _ranks_along(layout, tuple(dict.fromkeys(axes)), self.only, rank)

    def key(self, layout: Layout) -> tuple[object, ...]:
        """What two parameters must have in common to be summed together: axes of some size, places and divisor."""
        copies, sums = (tuple(name for name in axes if layout.size(name) > 1) for axes in (self.copies, self.sums))
        return copies, sums, self.divisor, self.only

    def check(self, name: str, shape: Sequence[int], layout: Layout) -> None:
        """Refuse a home that does not fit the shape or the layout."""
        for cut in self.cuts:
            ranks = layout.size(cut.axis)
            if not 0 <= cut.dim < len(shape):
                raise PlanError(
                    f"'{name}' of shape {list(shape)} has no dimension {cut.dim} to be cut along {cut.axis}"
                )
            if sum(sum(sizes) for sizes in cut.runs) != shape[cut.dim]:
                raise PlanError(
                    f"'{name}' has {shape[cut.dim]} in dimension {cut.dim}; its parts along {cut.axis} have "
                    f"{sum(sum(sizes) for sizes in cut.runs)} together"
                )
            for sizes in cut.runs:
                if not sizes or ranks % len(sizes):
                    raise PlanError(
                        f"'{name}' in {len(sizes)} parts along {cut.axis}={ranks}: a number of parts that divides "
                        f"{ranks} is needed, so that each is held by as many ranks"
                    )
        if not set(self.sums) <= set(self.copies):
            raise PlanError(f"'{name}': gradients are summed along {self.sums}, but it is the same along {self.copies}")


@dataclass(frozen=True, slots=True)
class Site:
    """What one rank has of a parameter."""

    shape: Shape
    """The shape of the whole parameter."""
    home: Home
    layout: Layout
    rank: int

    @property
    def local_shape(self) -> Shape:
        """The shape of the tensor that it holds."""
        return self.home.local_shape(self.shape, self.layout, self.rank)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes along which others hold the rest."""
        return tuple(dict.fromkeys(cut.axis for cut in self.home.cuts if self.layout.size(cut.axis) > 1))

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """The axes along which others hold the same, and bring the same gradients."""
        axes = (axis for axis in self.home.copies if axis not in self.home.sums)
        return tuple(axis for axis in axes if self.layout.size(axis) > 1)

    @property
    def other_axes(self) -> tuple[str, ...]:
        """All axes along which others have the rest, or the same, beside those that add up gradients with it."""
        return (*self.cut_axes, *self.copy_axes)

    @property
    def is_far(self) -> bool:
        """Whether gradients are summed with those of ranks that run another piece of the model."""
        return any(axis in self.home.sums for axis, _ in self.home.only)

    def boxes_of_range(self, start: int, stop: int) -> tuple[Box, ...]:
        """A flat range of that tensor, as boxes of the whole one."""
        return self.home.boxes_of_range(self.shape, self.layout, self.rank, start, stop)

    @property
    def is_shared(self) -> bool:
        """Whether some of it is held by several ranks of an axis that cuts it."""
        return self.home.is_shared(self.layout)

    @property
    def parts(self) -> tuple[tuple[Box, Box], ...]:
        """What the rank holds: each box of the whole tensor with its place in the rank's own."""
        if not self.home.is_at(self.layout, self.rank) or not math.prod(self.shape):
            return ()
        sides = self.home.intervals(self.shape, self.layout, self.rank)
        boxes, places = product(*sides), product(*map(_laid_out, sides))
        return tuple((_box(box), _box(place)) for box, place in zip(boxes, places, strict=True))

    @property
    def shared(self) -> tuple[Shared, ...]:
        """What of it the rank holds together with others of an axis that cuts it."""
        if not self.is_shared:
            return ()
        others = self.layout.ranks_along(self.cut_axes, self.rank)
        held = {other: self.home.boxes(self.shape, self.layout, other) for other in others}
        every = (
            Shared(box, place, tuple(other for other, boxes in held.items() if any(one.contains(box) for one in boxes)))
            for box, place in self.parts
        )
        return tuple(each for each in every if len(each.ranks) > 1)

    @property
    def given(self) -> tuple[Box, ...]:
        """The boxes that this rank gives where all of the tensor is put together, each element from one rank."""
        if self.rank != min(self.home.holders(self.layout, self.rank)):
            return ()
        left = {each.box for each in self.shared if self.rank != min(each.ranks)}
        return tuple(box for box, _ in self.parts if box not in left)

    def ranges(self, boxes: Sequence[Box]) -> list[ElementRange]:
        """Boxes of what the rank holds, one after the other: which of their elements it counts, and saves.

        What several ranks of an axis hold is counted by the first of them.
        """
        left = [each.box for each in self.shared if self.rank != min(each.ranks)]
        found: list[ElementRange] = []
        place = 0
        flags = ((box, not any(each.contains(box) for each in left)) for box in boxes)
        for is_counted, together in groupby(flags, key=lambda each: each[1]):
            those = tuple(box for box, _ in together)
            size = sum(box.numel for box in those)
            found.append(ElementRange(those, place, place + size, is_counted))
            place += size
        return found

    def boxes_of(self, box: Box) -> tuple[Box, ...]:
        """A box of that tensor, as boxes of the whole one, in the order of their elements."""
        if not self.home.cuts or box.is_empty:
            return () if box.is_empty else (box,)
        return tuple(_in_whole(box, self.home.intervals(self.shape, self.layout, self.rank)))

    def part_of(self, whole: "Tensor") -> "Tensor":
        """What the rank holds of a whole tensor: that itself where nothing is cut."""
        part = whole
        for dim, side in enumerate(self.home.intervals(self.shape, self.layout, self.rank)) if self.home.cuts else ():
            index = [at for a, b in side for at in range(a, b)]
            if len(index) != self.shape[dim]:
                part = part[(slice(None),) * dim + (index,)]
        return part


def pieces_at(rank: int, layout: Layout, count: int) -> range:
    """Which pieces of a model in so many pieces a rank runs."""
    return range(layout.coordinates(rank)["pp"], count, layout.pp) if count > 1 else range(1)


def classes(homes: Iterable[Home], layout: Layout) -> dict[str, tuple[int, ...]]:
    """The ranks that hold as much of everything, under the places that they have in common."""
    homes = set(homes)
    named = {axis for home in homes for axis in (*(cut.axis for cut in home.cuts), *(axis for axis, _ in home.only))}
    axes = [axis for axis in (*AXES, *EXPERT_AXES) if axis in named and layout.size(axis) > 1]
    found: dict[str, list[int]] = {}
    for rank in range(layout.world):
        places = layout.coordinates(rank) if axes else {}
        found.setdefault(" ".join(f"{axis}={places[axis]}" for axis in axes), []).append(rank)
    return {title: tuple(ranks) for title, ranks in found.items()}


def _without(axis: str, names: Sequence[str]) -> tuple[str, ...]:
    """The other axes, in the view that this one belongs to: beside an expert axis dp_shard and sp are ep and edp."""
    if axis not in EXPERT_AXES:
        return tuple(name for name in names if name != axis)
    kept = tuple(name for name in names if name not in (*SHARD_AXES, axis))
    (other,) = (name for name in EXPERT_AXES if name != axis)
    return (*kept, other) if {*SHARD_AXES} <= {*names} else kept


@lru_cache(maxsize=4096)
def _ranks_along(
    layout: Layout, axes: tuple[str, ...], only: tuple[tuple[str, tuple[int, ...]], ...], rank: int
) -> tuple[int, ...]:
    found: Iterable[int] = layout.ranks_along(axes, rank) if axes else (rank,)
    for axis, places in only:
        if axis in axes:
            found = [each for each in found if layout.coordinates(each)[axis] in places]
    return tuple(found)


def _laid_out(side: Sequence[Interval]) -> list[Interval]:
    """Where intervals are that lie end to end."""
    edges = list(accumulate((b - a for a, b in side), initial=0))
    return list(pairwise(edges))


def _box(corner: Sequence[Interval]) -> Box:
    return Box(tuple(a for a, _ in corner), tuple(b for _, b in corner))


def _in_whole(box: Box, sides: Sequence[Sequence[Interval]]) -> Iterator[Box]:
    """A box of a rank's own tensor as boxes of the whole one, such that their elements follow each other.

    A dimension inside of which the tensor was put together from several intervals interrupts the order in every row.
    """
    windows = [window(side, a, b) for side, a, b in zip(sides, box.start, box.stop, strict=True)]
    broken = max((dim for dim, found in enumerate(windows) if len(found) > 1), default=0)
    rows = [[(at, at + 1) for a, b in found for at in range(a, b)] for found in windows[:broken]]
    for corner in product(*rows, *windows[broken:]):
        yield _box(corner)
