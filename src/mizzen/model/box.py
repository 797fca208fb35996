"""Boxes of global coordinates, and the arithmetic that every layout shares. No tensors here, and no torch.

A DTensor shard is one box. A flat range of a row-major tensor is a few: for a matrix the rest of a row, whole rows, and
the beginning of a row. Whoever needs to know which elements two ranks have in common intersects boxes.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mizzen.errors import UsageError

Shape = tuple[int, ...]
Interval = tuple[int, int]
STEPS: Final = 2_000_000
"""How many times a box is looked at, at most, to count the elements of a tensor that some boxes hold."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Half-open intervals, one for each dimension. A 0-d tensor has the box without intervals, of one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(
            a < 0 or a > b for a, b in zip(self.start, self.stop, strict=False)
        ):
            raise UsageError(f"a box from {self.start} to {self.stop} is none: give 0 <= start <= stop per dimension")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """The box of a tensor that nobody has cut."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        """The extent along each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """How many elements lie inside."""
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether no element lies inside."""
        return self.numel == 0

    def intersection(self, other: "Box") -> "Box":
        """The elements of both; an empty box when there are none."""
        self._same_rank(other)
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, tuple(map(max, start, stop)))

    def contains(self, other: "Box") -> bool:
        """Whether every element of `other` lies inside."""
        return other.is_empty or self.intersection(other) == other

    def shift(self, offset: Sequence[int]) -> "Box":
        """This box, moved."""
        if len(offset) != len(self.start):
            raise UsageError(f"an offset of {len(offset)} dimensions does not move a box of {len(self.start)}")
        start = tuple(a + b for a, b in zip(self.start, offset, strict=True))
        return Box(start, tuple(a + b for a, b in zip(self.stop, offset, strict=True)))

    def slices(self, within: "Box") -> tuple[slice, ...]:
        """The index of this box in a tensor that holds the elements of `within`."""
        if not within.contains(self):
            raise UsageError(f"{self} does not lie within {within}")
        return tuple(slice(a - w, b - w) for a, b, w in zip(self.start, self.stop, within.start, strict=True))

    def _same_rank(self, other: "Box") -> None:
        if len(self.start) != len(other.start):
            raise UsageError(
                f"boxes of {len(self.start)} and {len(other.start)} dimensions belong to different tensors"
            )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far some boxes are from holding every element of a tensor exactly once."""

    missing: int
    """Elements in no box."""
    overlapping: int
    """Elements beyond the first copy: one that lies in three boxes counts twice."""

    @property
    def is_exact(self) -> bool:
        """Whether every element lies in exactly one box."""
        return self.missing == self.overlapping == 0


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where part `index` of `parts` begins and ends, by torch.chunk's rule: the last ones may be short or empty."""
    each = -(-size // parts)
    return min(index * each, size), min((index + 1) * each, size)


def window(held: Sequence[Interval], low: int, high: int) -> list[Interval]:
    """The positions [low, high) of intervals laid end to end, as intervals again."""
    found, offset = list[Interval](), 0
    for a, b in held:
        start, stop = max(low, offset), min(high, offset + b - a)
        if start < stop:
            found.append((a + start - offset, a + stop - offset))
        offset += b - a
    return found


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """The flat range [start, stop) of a row-major tensor as the fewest contiguous boxes, in order: 2n-1 at most."""
    if not 0 <= start <= stop <= math.prod(shape):
        raise UsageError(
            f"the range [{start}, {stop}) does not lie in a tensor {tuple(shape)} of {math.prod(shape)} elements"
        )
    strides = _strides(shape)
    boxes: list[Box] = []
    while start < stop:
        boxes.append(_largest_box(shape, strides, start, stop))
        start += boxes[-1].numel
    return tuple(boxes)


def flat_range_of(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """The flat range [start, stop) that a box covers in a row-major tensor; None when its elements have gaps there."""
    if not Box.whole(shape).contains(box):
        raise UsageError(f"{box} does not lie in a tensor {tuple(shape)}")
    if box.is_empty:
        return 0, 0
    strides = _strides(shape)
    first = sum(at * stride for at, stride in zip(box.start, strides, strict=True))
    last = sum((end - 1) * stride for end, stride in zip(box.stop, strides, strict=True))
    # Every element of the box lies between its first and its last, so the count decides whether there are gaps.
    return (first, last + 1) if last + 1 - first == box.numel else None


def coverage(boxes: Iterable[Box], shape: Sequence[int]) -> Coverage:
    """Whether boxes are disjoint and complete, counted in elements; cheap for thousands of boxes of any size."""
    whole = Box.whole(shape)
    held = [box for box in boxes if not box.is_empty]
    for box in held:
        if not whole.contains(box):
            raise UsageError(f"{box} does not lie in a tensor {tuple(shape)}")
    union = _union(list(set(held)), 0, [STEPS]) if held else 0
    return Coverage(missing=whole.numel - union, overlapping=sum(box.numel for box in held) - union)


def _strides(shape: Sequence[int]) -> Shape:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _largest_box(shape: Sequence[int], strides: Shape, start: int, stop: int) -> Box:
    """The longest contiguous box that begins at flat index `start` and ends by `stop`.

    It runs along the outermost dimension whose slices are aligned with `start` and fit: inside they are whole.
    """
    corner = tuple(start // stride % extent for stride, extent in zip(strides, shape, strict=True))
    for dim, stride in enumerate(strides):
        if start % stride == 0 and stride <= stop - start:
            end = corner[dim] + min(shape[dim] - corner[dim], (stop - start) // stride)
            return Box(corner, (*(at + 1 for at in corner[:dim]), end, *shape[dim + 1 :]))
    return Box((), ())


def _union(boxes: list[Box], dim: int, left: list[int]) -> int:
    """The number of elements in at least one of the boxes, counted from dimension `dim` inwards.

    Sweeps along the dimension: between two neighbouring edges the same boxes are open. `left` is how many boxes may
    still be looked at: those that cross in many dimensions could be counted for ever.
    """
    left[0] -= len(boxes)
    if left[0] < 0:
        raise UsageError(f"boxes that cross in so many ways that counting them takes more than {STEPS:,} steps")
    if len(boxes) == 1:
        return math.prod(boxes[0].shape[dim:])
    if dim == len(boxes[0].start):
        return 1
    opening: defaultdict[int, list[Box]] = defaultdict(list)
    for box in boxes:
        opening[box.start[dim]].append(box)
    edges = sorted(opening.keys() | {box.stop[dim] for box in boxes})
    total, active = 0, list[Box]()
    for low, high in zip(edges, edges[1:], strict=False):
        active = [box for box in active if box.stop[dim] > low] + opening[low]
        total += (high - low) * _union(active, dim + 1, left) if active else 0
    return total
