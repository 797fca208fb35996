"""From DTensor placements to boxes and Pieces. Nothing here communicates: a rank asks only for its own part.

This is the only file that names torch's private `_StridedShard` (docs/borrowed.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from mizzen.errors import UsageError
from mizzen.model.box import Box, Interval, chunk, window
from mizzen.model.piece import Piece


@dataclass(frozen=True, slots=True)
class _Cut:
    """One mesh axis along which a dimension is cut, and this rank's place on it."""

    ways: int
    index: int
    stride: int
    """The split factor: how many pieces there already are when this cut is made; 1 for a plain Shard."""


def boxes_of_placements(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Box, ...]:
    """What the rank at `coordinate` of a mesh holds of a tensor; no box at all when its share is empty."""
    cuts: list[list[_Cut]] = [[] for _ in shape]
    for ways, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            cuts[_dim(placement.dim, shape)].append(_Cut(ways, index, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts[_dim(placement.dim, shape)].append(_Cut(ways, index, 1))
        elif isinstance(placement, Partial):
            raise UsageError(
                f"a tensor placed {tuple(placements)} holds partial sums, not elements: redistribute it first"
            )
        elif not isinstance(placement, Replicate):
            raise UsageError(f"the placement {placement} is not known here: redistribute to Shard or Replicate first")
    sides = [_intervals(extent, along) for extent, along in zip(shape, cuts, strict=True)]
    return tuple(Box(tuple(a for a, _ in corner), tuple(b for _, b in corner)) for corner in product(*sides))


def boxes_of_dtensor(tensor: DTensor) -> tuple[Box, ...]:
    """What this rank holds of a DTensor; no box when its share is empty or when it is outside the mesh."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    return boxes_of_placements(tensor.shape, tensor.device_mesh.shape, coordinate, tensor.placements)


def piece_of_tensor(name: str, tensor: Tensor) -> Piece:
    """The Piece of a tensor: all of a plain one, this rank's part of a DTensor. It shares the tensor's memory."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Piece(name, shape, (Box.whole(shape),) if tensor.numel() else (), tensor.detach())
    boxes, local = boxes_of_dtensor(tensor), tensor.to_local().detach()
    if len(boxes) < 2:
        return Piece(name, shape, boxes, local)
    # Flat data must list one box after the other, which a local tensor does when only its outermost dimension is in
    # several intervals: then each box is a contiguous run of it.
    outer = next(dim for dim, extent in enumerate(local.shape) if extent > 1)
    if not local.is_contiguous() or len({(box.start[outer + 1 :], box.stop[outer + 1 :]) for box in boxes}) > 1:
        raise UsageError(
            f"{name}: {tensor.placements} interleaves an inner dimension of {shape}: redistribute it first"
        )
    return Piece(name, shape, boxes, local.view(-1))


def _dim(dim: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= dim < len(shape):
        raise UsageError(f"a tensor of shape {tuple(shape)} cannot be sharded along dimension {dim}")
    return dim % len(shape)


def _intervals(extent: int, cuts: Sequence[_Cut]) -> list[Interval]:
    """What every cut leaves of one dimension, as intervals in the order in which the local tensor has them."""
    order = _order(cuts)
    if order is None:
        held = [(0, extent)]
        for cut in cuts:
            held = _strided(held, cut)
        return held
    start, stop = 0, extent
    for cut in order:
        low, high = chunk(stop - start, cut.ways, cut.index)
        start, stop = start + low, start + high
    return [(start, stop)] if start < stop else []


def _order(cuts: Sequence[_Cut]) -> list[_Cut] | None:
    """The order in which plain cuts were made, read from the split factors; None when these mean something else.

    [Note: strided shards]
    FSDP2 cuts what tensor parallelism has cut before it, though its axis stands to the left. torch writes that as
    _StridedShard on the left axis, with the number of pieces made before as its split factor. Read as an order of
    cuts it gives FSDP2's shards for every size; torch's other reading (pick a chunk out of each of `split_factor`
    pieces) agrees only where the sizes divide. Where no order explains the factor, such as 3 on one axis for a fused
    query-key-value matrix, the other reading is what is meant, and one dimension is held in several intervals.
    """
    order: list[_Cut] = []
    for cut in reversed(cuts):
        for place in range(len(order) + 1):
            if math.prod(earlier.ways for earlier in order[:place]) == cut.stride:
                order.insert(place, cut)
                break
        else:
            return None
    return order


def _strided(held: list[Interval], cut: _Cut) -> list[Interval]:
    """A chunk out of each of the `stride` pieces of what is held."""
    size = sum(b - a for a, b in held)
    taken: list[Interval] = []
    for piece in range(cut.stride):
        first, last = chunk(size, cut.stride, piece)
        low, high = chunk(last - first, cut.ways, cut.index)
        taken += window(held, first + low, first + high)
    return _joined(taken)


def _joined(intervals: list[Interval]) -> list[Interval]:
    """Intervals of which neighbours that touch are made one."""
    joined: list[Interval] = []
    for a, b in intervals:
        if joined and joined[-1][1] == a:
            a = joined.pop()[0]
        joined.append((a, b))
    return joined
