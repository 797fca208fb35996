"""How many ranks each kind of parallelism gets, and which rank sits where. Arithmetic only: no torch, no ranks.

Laying a `Layout` over live ranks is `comm/mesh.py`'s business; which degrees a config asks for is `load.py`'s.

[Note: the order of ranks]
Neighbours talk most. Ranks are numbered with `tp` fastest, then `sp`, `dp_shard`, `dp_replicate`, and `pp` slowest, so
that a tensor-parallel group sits inside one host and only pipeline stages and replicas cross the slow network.

[Note: the expert view]
Experts are spread over ranks that hold different data, so their axes are not further factors of the world: within one
replica, the `dp_shard * sp` data ranks are cut a second time, into `edp` copies of `ep` ranks that share the experts.
Neighbours form an expert group, because its all-to-all is the heavier traffic; `data_before_expert` swaps the two.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from mizzen.errors import LayoutError

AXES: Final = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
"""Slowest first."""
EXPERT_AXES: Final = ("ep", "edp")
SAMPLE_AXES: Final = ("dp_replicate", "dp_shard")
"""Along these, ranks see different samples."""
DATA_AXES: Final = (*SAMPLE_AXES, "sp")
"""Along these, ranks compute with the same part of the model: on different samples, or on different tokens of one."""
SHARD_AXES: Final = ("dp_shard", "sp")
"""Along these, ranks share one copy of what is sharded; the expert view numbers the same ranks by its two axes."""
Partition = tuple[tuple[int, ...], ...]
"""Groups of ranks that have no rank in common."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The degree of each axis; their product, `ep` apart, is the number of ranks."""

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Copies of the sharded training state."""
    dp_shard: int = 1
    """Data ranks that one copy of the training state is sharded over."""
    sp: int = 1
    """Ranks that share each sequence."""
    tp: int = 1
    """Ranks that share each matrix."""
    ep: int = 1
    """Ranks that share each set of experts: a second cut of `dp_shard * sp`."""
    data_before_expert: bool = False
    """Neighbours are copies of one expert instead of members of one expert group."""

    def __post_init__(self) -> None:
        for name in (*AXES, "ep"):
            _check_degree(name, self._degree(name))
        inside = self.dp_shard * self.sp
        if inside % self.ep:
            raise LayoutError(
                f"ep={self.ep} does not divide dp_shard*sp = {self.dp_shard}*{self.sp} = {inside}: experts are spread "
                f"over the data ranks of one replica; use ep={_listed(_divisors(inside))}"
            )

    @classmethod
    def fit(
        cls,
        world: int,
        *,
        tp: int = 1,
        pp: int = 1,
        sp: int = 1,
        ep: int = 1,
        dp_replicate: int = 1,
        data_before_expert: bool = False,
    ) -> "Layout":
        """The layout whose `dp_shard` takes all ranks that the other degrees leave."""
        _check_degree("world size", world)
        asked = {"pp": pp, "dp_replicate": dp_replicate, "sp": sp, "tp": tp}
        for name, degree in (*asked.items(), ("ep", ep)):
            _check_degree(name, degree)
        shape = {name: degree for name, degree in asked.items() if name != "dp_replicate" or degree > 1}
        taken = math.prod(shape.values())
        if world % taken:
            formula = f"{'*'.join(shape)} = {'*'.join(map(str, shape.values()))} = {taken}"
            raise LayoutError(f"world size {world} is not a multiple of {formula}: {_advice(world, taken, asked)}")
        return cls(**asked, dp_shard=world // taken, ep=ep, data_before_expert=data_before_expert)

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def same_model(self) -> int:
        """Ranks that compute with the same part of the model, each on samples or tokens of its own."""
        return self.dp * self.sp

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def edp(self) -> int:
        """Copies of each expert within one replica."""
        return self.dp_shard * self.sp // self.ep

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees of `AXES`."""
        return tuple(self._degree(name) for name in AXES)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the second view, slowest first."""
        inner = ("ep", "edp") if self.data_before_expert else ("edp", "ep")
        return ("pp", "dp_replicate", *inner, "tp")

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """The degrees of `expert_axes`."""
        return tuple(self.size(name) for name in self.expert_axes)

    def size(self, *axes: str) -> int:
        """How many ranks a group along these axes has."""
        self._view(axes)
        return math.prod(self._degree(name) for name in axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank along every axis, the expert axes included."""
        self._check_rank(rank)
        strides = self._strides(AXES) | {name: self._strides(EXPERT_AXES)[name] for name in EXPERT_AXES}
        return {name: rank // stride % self._degree(name) for name, stride in strides.items()}

    def rank(self, **coordinates: int) -> int:
        """The rank at a place; an axis that is left out counts as 0. Expert axes replace `dp_shard` and `sp`."""
        strides = self._strides(coordinates)
        for name, place in coordinates.items():
            if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < self._degree(name):
                last = self._degree(name) - 1
                raise LayoutError(f"{name}={place!r} is not a place on the axis {name}, which has 0 to {last}")
        return sum(place * strides[name] for name, place in coordinates.items())

    def ranks_along(self, axes: str | Iterable[str], rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` at most in these axes, itself among them, in rising order."""
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        strides, places = self._strides(wanted), self.coordinates(rank)
        first = rank - sum(places[name] * strides[name] for name in wanted)
        return tuple(first + offset for offset in self._offsets(strides, wanted))

    def groups(self, axes: str | Iterable[str]) -> list[tuple[int, ...]]:
        """Every group along these axes, in the order of its first rank: together they hold each rank once."""
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        strides = self._strides(wanted)
        offsets = self._offsets(strides, wanted)
        firsts = self._offsets(strides, [name for name in strides if name not in wanted])
        return [tuple(first + offset for offset in offsets) for first in firsts]

    def __str__(self) -> str:
        degrees = [f"{name}={self._degree(name)}" for name in (*AXES, "ep") if self._degree(name) > 1]
        return f"{self.world} ranks: {' '.join(degrees)}" if degrees else "1 rank"

    def _degree(self, axis: str) -> int:
        degree: int = getattr(self, axis)
        return degree

    def _strides(self, names: Iterable[str]) -> dict[str, int]:
        """How far apart neighbours along each axis are, slowest axis first, in the view that these axes belong to."""
        strides, stride = {}, 1
        for name in reversed(self._view(tuple(names))):
            strides[name], stride = stride, stride * self._degree(name)
        return dict(reversed(strides.items()))

    def _offsets(self, strides: Mapping[str, int], names: Iterable[str]) -> list[int]:
        """The distances from the first rank of a group along these axes to each of its ranks."""
        wanted = set(names)
        ways = (range(0, self._degree(name) * step, step) for name, step in strides.items() if name in wanted)
        return [sum(steps) for steps in product(*ways)]

    def _view(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """The axes of the view that these belong to."""
        for name in names:
            if name not in AXES and name not in EXPERT_AXES:
                raise LayoutError(f"there is no axis {name!r}: use {_listed((*AXES, *EXPERT_AXES))}")
            if names.count(name) > 1:
                raise LayoutError(f"the axis {name!r} is named twice in {', '.join(names)}")
        if not any(name in EXPERT_AXES for name in names):
            return AXES
        for name in ("dp_shard", "sp"):
            if name in names:
                raise LayoutError(f"{name} and the expert axes cut the same ranks: use ep and edp, or dp_shard and sp")
        return self.expert_axes

    def _check_rank(self, rank: int) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world:
            raise LayoutError(f"{rank!r} is not one of the {self.world} ranks 0 to {self.world - 1}")


def role_in_words(layout: Layout, rank: int) -> str:
    """Who a rank is where ranks have different parts of a model: `stage 1 of 2, tensor rank 0`; else nothing."""
    places = layout.coordinates(rank)
    words = [f"stage {places['pp']} of {layout.pp}"] if layout.pp > 1 else []
    words += [f"tensor rank {places['tp']}"] if layout.tp > 1 else []
    if words and layout.dp > 1:
        words.append(f"data rank {places['dp_replicate'] * layout.dp_shard + places['dp_shard']}")
    return ", ".join(words)


def _check_degree(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LayoutError(f"{name}={value!r}: use a whole number of at least 1")


def _advice(world: int, taken: int, asked: Mapping[str, int]) -> str:
    """The nearest numbers of ranks that fit, then for each degree that could change alone the values that fit."""
    below = world // taken * taken
    counts = [below, below + taken] if below else [taken]
    ways = [f"use {_listed(counts)} ranks"]
    for name, degree in reversed(list(asked.items())):
        rest = taken // degree
        if degree > 1 and world % rest == 0:
            ways.append(f"{name}={_listed(_divisors(world // rest))}")
    return ", or ".join(ways)


def _divisors(number: int) -> list[int]:
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def _listed(values: Iterable[object]) -> str:
    """`1`, `1 or 2`, `1, 2 or 4`; a long list keeps its ends."""
    words = [str(value) for value in values]
    if len(words) > 12:
        words = [*words[:8], "...", *words[-3:]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
