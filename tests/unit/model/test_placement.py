"""Placements to boxes without ranks: every coordinate of a mesh is asked, and torch.chunk is the judge."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from mizzen.errors import UsageError
from mizzen.model.box import Box, coverage
from mizzen.model.placement import boxes_of_placements, piece_of_tensor


def coordinates(mesh_shape):
    return list(product(*map(range, mesh_shape)))


def local_by_chunks(full, cuts):
    """Cut a tensor as torch does, one (dim, ways, index) after the other."""
    for dim, ways, index in cuts:
        chunks = full.chunk(ways, dim)
        full = chunks[index] if index < len(chunks) else full.narrow(dim, 0, 0)
    return full


def at_boxes(full, boxes):
    return torch.cat([full[box.slices(Box.whole(full.shape))].reshape(-1) for box in boxes] or [full.new_empty(0)])


@st.composite
def meshes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = st.one_of(st.just(Replicate()), st.integers(-len(shape), len(shape) - 1).map(Shard))
    return shape, mesh_shape, [draw(kinds) for _ in mesh_shape]


@given(meshes())
def test_shards_are_chunks_of_chunks_from_left_to_right(case):
    shape, mesh_shape, placements = case
    full = torch.arange(math.prod(shape)).reshape(shape)
    copies = math.prod(
        ways for ways, placement in zip(mesh_shape, placements, strict=True) if isinstance(placement, Replicate)
    )
    every = []
    for coordinate in coordinates(mesh_shape):
        boxes = boxes_of_placements(shape, mesh_shape, coordinate, placements)
        cuts = [
            (placement.dim, ways, index)
            for placement, ways, index in zip(placements, mesh_shape, coordinate, strict=True)
            if isinstance(placement, Shard)
        ]
        assert torch.equal(at_boxes(full, boxes), local_by_chunks(full, cuts).reshape(-1))
        assert len(boxes) <= 1
        every += boxes
    assert coverage(every, shape) == coverage([Box.whole(shape)] * copies, shape)


@given(size=st.integers(1, 40), data=st.integers(1, 5), tensor=st.integers(2, 5))
def test_a_strided_shard_on_the_left_means_that_the_right_axis_cut_first(size, data, tensor):
    full = torch.arange(size * 2).reshape(size, 2)
    every = []
    for outer, inner in coordinates((data, tensor)):
        placements = (_StridedShard(0, split_factor=tensor), Shard(0))
        boxes = boxes_of_placements((size, 2), (data, tensor), (outer, inner), placements)
        expected = local_by_chunks(full, [(0, tensor, inner), (0, data, outer)])
        assert torch.equal(at_boxes(full, boxes), expected.reshape(-1))
        every += boxes
    assert coverage(every, (size, 2)).is_exact


def test_an_order_of_three_cuts_is_read_from_the_split_factors():
    full = torch.arange(29)
    placements = (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0))
    for a, b, c in coordinates((3, 2, 2)):
        boxes = boxes_of_placements((29,), (3, 2, 2), (a, b, c), placements)
        assert torch.equal(at_boxes(full, boxes), local_by_chunks(full, [(0, 2, c), (0, 3, a), (0, 2, b)]))


@given(size=st.integers(0, 40), ways=st.integers(1, 4), factor=st.integers(2, 4))
def test_a_lone_strided_shard_takes_a_chunk_of_every_part(size, ways, factor):
    full = torch.arange(size)
    placement = _StridedShard(0, split_factor=factor)
    every = []
    for index in range(ways):
        boxes = boxes_of_placements((size,), (ways,), (index,), (placement,))
        expected = [local_by_chunks(full, [(0, factor, part), (0, ways, index)]) for part in range(factor)]
        assert torch.equal(at_boxes(full, boxes), torch.cat(expected))
        assert all(left.stop < right.start for left, right in zip(boxes, boxes[1:], strict=False))
        every += boxes
    assert coverage(every, (size,)).is_exact


def test_a_strided_shard_is_cut_further_from_left_to_right():
    boxes = boxes_of_placements((24,), (2, 2), (1, 0), (_StridedShard(0, split_factor=3), Shard(0)))
    assert boxes == (Box((4,), (8,)), Box((12,), (14,)))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Partial(), "partial sums, not elements: redistribute it first"),
        (Placement(), "is not known here"),
        (Shard(2), r"shape \(4, 2\) cannot be sharded along dimension 2"),
        (Shard(-3), "dimension -3"),
    ],
)
def test_what_is_no_set_of_elements_is_refused(placement, message):
    with pytest.raises(UsageError, match=message):
        boxes_of_placements((4, 2), (2,), (0,), (placement,))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_a_plain_tensor_is_held_whole_and_in_place(shape):
    parameter = torch.nn.Parameter(torch.zeros(shape))
    piece = piece_of_tensor("w", parameter)
    assert piece.shape == shape and piece.numel == parameter.numel() and not piece.data.requires_grad
    assert piece.boxes == ((Box.whole(shape),) if parameter.numel() else ())
    piece.data.fill_(3)
    assert (parameter == 3).all()
