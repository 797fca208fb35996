"""Folders that torch.distributed.checkpoint wrote on several ranks: every box in its place."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mizzen.checkpoint import foreign


def full(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def save_tensors(folder, mesh_shape, placements):
    mesh = init_device_mesh("cpu", mesh_shape)
    state = {
        "even": distribute_tensor(full((4, 6)), mesh, placements),
        "uneven": distribute_tensor(full((5, 3)), mesh, placements),
        "short": distribute_tensor(full((1, 7)), mesh, placements),
        "whole": full((3,)),
    }
    dcp.save({"model": state}, checkpoint_id=folder)


def save_trained(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    dcp.save(dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    whole = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return whole if dist.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("ranks", "mesh", "placements"),
    [
        (2, (2,), [Shard(0)]),
        (2, (2,), [Shard(1)]),
        (3, (3,), [Shard(0)]),
        (4, (2, 2), [Shard(0), Shard(1)]),
        (4, (2, 2), [Replicate(), Shard(0)]),
    ],
    ids=str,
)
def test_sharded_tensors(world, tmp_path, ranks, mesh, placements):
    world(ranks).run(save_tensors, tmp_path / "saved", mesh, placements)
    source = foreign.open(tmp_path / "saved")
    found = {entry.name: source.read(entry) for entry in source.names()}
    assert found.keys() == {"even", "uneven", "short", "whole"}
    for name, shape in (("even", (4, 6)), ("uneven", (5, 3)), ("short", (1, 7)), ("whole", (3,))):
        assert torch.equal(found[name], full(shape)), name


def test_a_model_under_fsdp(world, tmp_path):
    weights, states = world(2).run(save_trained, tmp_path / "saved")[0]
    source = foreign.open(tmp_path / "saved")
    found = {(entry.kind, entry.name): source.read(entry) for entry in source.names()}
    for name, value in weights.items():
        assert torch.equal(found.pop(("model", name)), value)
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found.pop((kind, name)), states["state"][name][kind])
    assert found == {}
