"""Pieces of real DTensors: the local tensor is the full tensor at the boxes, on every rank, for every placement."""

import math
import random
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from mizzen.errors import UsageError
from mizzen.model.box import Box
from mizzen.model.piece import assemble, copy_overlap, covers
from mizzen.model.placement import boxes_of_dtensor, piece_of_tensor

MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2)]}


def numbers(shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def check(piece, full):
    for box, part in piece.parts():
        assert torch.equal(part, full[box.slices(Box.whole(full.shape))]), f"{piece} holds {part}"


def random_cases(mesh_shape, seed, count=24):
    """The same shapes and placements on every rank."""
    chance = random.Random(f"{mesh_shape} {seed}")
    for _ in range(count):
        shape = tuple(chance.randint(1, 7) for _ in range(chance.randint(1, 3)))
        choices = [Replicate(), *map(Shard, range(len(shape)))]
        yield shape, [chance.choice(choices) for _ in mesh_shape]


def pieces_of_random_dtensors(mesh_shape, seed):
    mesh = init_device_mesh("cpu", mesh_shape)
    pieces = []
    for shape, placements in random_cases(mesh_shape, seed):
        full = numbers(shape)
        tensor = distribute_tensor(full, mesh, placements)
        piece = piece_of_tensor("w", tensor)
        assert piece.numel == tensor.to_local().numel()
        assert torch.equal(tensor.full_tensor(), full)
        check(piece, full)
        pieces.append(piece)
    return pieces


def pieces_after_redistribution(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    full = numbers((6, 5))
    choices = [Replicate(), Shard(0), Shard(1)]
    for before, after in product(product(choices, repeat=len(mesh_shape)), repeat=2):
        tensor = distribute_tensor(full, mesh, before).redistribute(placements=after)
        check(piece_of_tensor("w", tensor), full)
    return True


class Two(nn.Module):
    """Sizes that nothing divides."""

    def __init__(self, wide):
        super().__init__()
        self.up = nn.Linear(5, wide)
        self.down = nn.Linear(wide, 3)


def pieces_of_sharded_model(mesh_shape, wide, tp):
    torch.manual_seed(0)
    model = Two(wide)
    full = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)])
    if tp:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    pieces = {name: piece_of_tensor(name, parameter) for name, parameter in model.named_parameters()}
    for name, piece in pieces.items():
        check(piece, full[name])
    return pieces


def placements_of_sharded_model():
    model = Two(8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return isinstance(model.up.weight.placements[0], _StridedShard)


def fused_query_key_value():
    mesh = init_device_mesh("cpu", (2,))
    full = numbers((12, 3))
    tensor = distribute_tensor(full, mesh, [_StridedShard(0, split_factor=3)])
    piece = piece_of_tensor("qkv", tensor)
    check(piece, full)
    inner = distribute_tensor(full.T.contiguous(), mesh, [_StridedShard(1, split_factor=3)])
    with pytest.raises(UsageError, match="interleaves an inner dimension"):
        piece_of_tensor("qkv", inner)
    return piece


def write_through():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]))
    copied = copy_overlap(piece_of_tensor("w", numbers((5, 3))), piece_of_tensor("w", parameter))
    return copied, parameter.full_tensor().detach()


def partial_sums():
    mesh = init_device_mesh("cpu", (2,))
    torch.distributed.barrier()  # both have it, whoever is refused first
    piece_of_tensor("w", DTensor.from_local(torch.ones(3), mesh, [Partial()]))


def outside_of_the_mesh():
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0])
    tensor = distribute_tensor(numbers((4,)), mesh, [Shard(0)])
    return boxes_of_dtensor(tensor)


@pytest.mark.parametrize("mesh_shape", [shape for shapes in MESHES.values() for shape in shapes], ids=str)
def test_the_local_tensor_is_the_full_tensor_at_the_boxes(world, mesh_shape):
    every = world(math.prod(mesh_shape)).run(pieces_of_random_dtensors, mesh_shape, 0)
    for (shape, placements), pieces in zip(random_cases(mesh_shape, 0), zip(*every, strict=True), strict=True):
        copies = math.prod(
            ways for ways, placement in zip(mesh_shape, placements, strict=True) if placement == Replicate()
        )
        assert torch.equal(assemble(pieces), numbers(shape))
        assert covers(pieces).overlapping == (copies - 1) * math.prod(shape)


def test_redistribution_keeps_boxes_and_elements_together(world):
    assert all(world(4).run(pieces_after_redistribution, (2, 2)))


@pytest.mark.parametrize("wide", [1, 2, 7, 8])
def test_fsdp_shards_of_odd_sizes(world, wide):
    every = world(3).run(pieces_of_sharded_model, (3,), wide, False)
    for name in every[0]:
        assert covers([pieces[name] for pieces in every]).is_exact


@pytest.mark.parametrize("wide", [4, 5, 6, 7, 9])
def test_fsdp_shards_of_tensor_parallel_shards_of_odd_sizes(world, wide):
    every = world(4).run(pieces_of_sharded_model, (2, 2), wide, True)
    assert covers([pieces["up.weight"] for pieces in every]).is_exact
    assert covers([pieces["down.weight"] for pieces in every]).is_exact


def test_fsdp_over_tensor_parallel_is_a_strided_shard(world):
    assert all(world(4).run(placements_of_sharded_model))


def test_three_way_fsdp_of_two_way_tensor_parallel(world):
    """Seven rows: the second reading of a strided shard would give rank (2, 0) a row that rank (2, 1) has."""
    every = world(6).run(pieces_of_sharded_model, (3, 2), 7, True)
    assert covers([pieces["up.weight"] for pieces in every]).is_exact
    assert [pieces["up.weight"].numel for pieces in every] == [10, 5, 10, 5, 0, 5]


def test_a_fused_matrix_is_held_in_several_boxes(world):
    pieces = world(2).run(fused_query_key_value)
    assert [len(piece.boxes) for piece in pieces] == [3, 3]
    assert torch.equal(assemble(pieces), numbers((12, 3)))


def test_writing_to_a_piece_writes_to_the_dtensor(world):
    results = world(2).run(write_through)
    assert [copied for copied, _ in results] == [9, 6]
    assert all(torch.equal(full, numbers((5, 3))) for _, full in results)


def test_partial_sums_are_refused(world):
    outcomes = world(2).run(partial_sums, expect_failure=True)
    assert {outcome.error_type for outcome in outcomes} == {"UsageError"}
    assert "redistribute it first" in outcomes[0].traceback


def test_a_rank_outside_of_the_mesh_holds_nothing(world):
    assert world(2).run(outside_of_the_mesh) == [(Box((0,), (4,)),), ()]
