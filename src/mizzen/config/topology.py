"""Ranks by coordinates along named axes, the last axis fastest. Arithmetic only: process groups are in `comm/grid.py`.

`Layout` is what mizzen itself decides with. A topology is how users of hand-written pipelines say the same thing.
"""

import math
from collections import namedtuple
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Final

from mizzen.config.layout import Layout
from mizzen.errors import LayoutError, UsageError

ORDER: Final = ("pipe", "data", "model")
"""The axes that a layout knows, slowest first."""
MAKE_COORDINATES: Final[Any] = namedtuple  # noqa: PYI024
"""Makes the class of places; its fields are the axes, whose names are the user's."""


class ProcessTopology:
    """A grid of ranks: `ProcessTopology(axes=["pipe", "data"], dims=[2, 4])` has rank 5 at pipe 1, data 1."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or len(set(axes)) != len(axes):
            raise UsageError(
                f"a topology has one size for each axis, and every axis once: {list(axes)} and {list(dims)}"
            )
        for axis, dim in zip(axes, dims, strict=True):
            if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
                raise LayoutError(f"the axis {axis} has {dim!r} ranks; it takes at least 1")
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = MAKE_COORDINATES("ProcessCoord", self.axes)
        places = product(*(range(dim) for dim in self.dims))
        self.mapping: dict[Any, int] = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def get_rank(self, **coordinates: int) -> int:
        """The rank at a place, which is given along every axis."""
        if sorted(coordinates) != sorted(self.axes):
            raise UsageError(
                f"get_rank() takes one place along each of {', '.join(self.axes)}; filter_match() takes fewer of them"
            )
        place = self.ProcessCoord(**coordinates)
        if place not in self.mapping:
            raise LayoutError(f"{place} is outside of {self._sizes()}")
        return self.mapping[place]

    def get_axis_names(self) -> list[str]:
        """The axes, slowest first."""
        return self.axes

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Sequence[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The place of a rank as text, such as `model_01`; empty where every axis is left out."""
        place = self.get_coord(rank)._asdict()
        return outer_sep.join(f"{axis}{inner_sep}{place[axis]:02d}" for axis in self.axes if axis not in omit_axes)

    def get_dim(self, axis: str) -> int:
        """How many ranks are along an axis; 0 for one that is not there."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The place of a rank, a tuple with the axes as names."""
        if not 0 <= rank < self.world_size():
            raise LayoutError(f"there is no rank {rank} among {self._sizes()}")
        return list(self.mapping)[rank]

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ along one axis alone; none for an axis that is not there."""
        if axis not in self.axes:
            return []
        groups: dict[tuple[int, ...], list[int]] = {}
        which = self.axes.index(axis)
        for place, rank in self.mapping.items():
            groups.setdefault((*place[:which], *place[which + 1 :]), []).append(rank)
        return list(groups.values())

    def filter_match(self, **coordinates: int) -> list[int]:
        """The ranks that are at these places, wherever they are along other axes."""
        if unknown := [axis for axis in coordinates if axis not in self.axes]:
            raise UsageError(f"there is no axis {unknown[0]!r}; this topology has {', '.join(self.axes)}")
        return [rank for place, rank in self.mapping.items() if _is_at(place, coordinates)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at one place of an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        """How many ranks there are."""
        return math.prod(self.dims)

    def layout(self) -> Layout:
        """What a configuration of mizzen calls this; refused where ranks are numbered in another order."""
        known = [axis for axis in ORDER if axis in self.axes]
        if self.axes != known:
            raise LayoutError(
                f"a topology with the axes {', '.join(self.axes)} numbers ranks in another way than mizzen does: use "
                f"{', '.join(ORDER)} in this order, each if it is wanted"
            )
        pipe, data, model = (max(1, self.get_dim(axis)) for axis in ORDER)
        return Layout(pp=pipe, dp_shard=data, tp=model)

    def __str__(self) -> str:
        return str(self.mapping)

    def _sizes(self) -> str:
        return " * ".join(f"{axis}={dim}" for axis, dim in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines side by side: the ranks of one stage are neighbours, and share its gradients."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipelines side by side, whose stages are split over neighbours."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


def _is_at(place: Any, coordinates: Mapping[str, int]) -> bool:
    found: dict[str, int] = place._asdict()
    return all(found[axis] == where for axis, where in coordinates.items())
