"""Meshes over live ranks: every group has the ranks that the layout says, once, and nothing else is formed."""

import os
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import mizzen.comm as comm
from mizzen.comm.join import init_distributed
from mizzen.comm.mesh import EXPERT_PRODUCTS, PRODUCTS, Mesh, groups_of_rank
from mizzen.config.layout import AXES, EXPERT_AXES, Layout
from mizzen.errors import LayoutError, UsageError

EVERY = [(name,) for name in (*AXES, *EXPERT_AXES)] + [*PRODUCTS, *EXPERT_PRODUCTS]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MIZZEN_ACCELERATOR", "cpu")


def limit(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def check(layout):
    """Add up ranks over every group; the number of groups that were formed beside the job's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = dist.distributed_c10d._world.group_count
        mesh = Mesh.build(layout, device_type="cpu", timeout=timedelta(seconds=77))
        formed = len({id(mesh.group(*names)) for names in EVERY} - {id(dist.group.WORLD)})
    for names in EVERY:
        group, ranks = mesh.group(*names), layout.ranks_along(names, dist.get_rank())
        assert mesh.ranks(*names) == tuple(dist.get_process_group_ranks(group)) == ranks
        assert mesh.size(*names) == mesh.axes(*names).size() == len(ranks)
        value = torch.tensor([float(dist.get_rank())])
        comm.all_reduce(value, group=group)
        assert value.item() == sum(ranks)
        assert group is dist.group.WORLD or limit(group) == timedelta(seconds=77)
    assert {name: mesh.coordinate(name) for name in (*AXES, *EXPERT_AXES)} == layout.coordinates(dist.get_rank())
    here = layout.coordinates(dist.get_rank())
    assert mesh.same_model == layout.ranks_along(("dp_replicate", "dp_shard", "sp"), dist.get_rank())
    assert len(mesh.same_model) == layout.same_model and mesh.same_model_group is mesh.group(
        "dp_replicate", "dp_shard", "sp"
    )
    data = here["dp_replicate"] * layout.dp_shard + here["dp_shard"]
    assert mesh.role == {"pp": here["pp"], "dp": data, "sp": here["sp"], "tp": here["tp"]}
    assert mesh.data_rank == data and mesh.tensor_rank == here["tp"] and mesh.sequence_group is mesh.group("sp")
    assert mesh.drawing == (here["pp"], here["dp_replicate"], here["dp_shard"], here["sp"])
    assert mesh.degrees == {name: layout.size(name) for name in AXES}
    assert mesh.devices.mesh_dim_names == AXES and tuple(mesh.devices.shape) == layout.shape
    assert mesh.expert.mesh_dim_names == layout.expert_axes and tuple(mesh.expert.shape) == layout.expert_shape
    if layout.world > 1:  # all ranks once more, and in no other group's way
        value = torch.ones(1)
        comm.all_reduce(value, group=mesh.aside.group)
        assert value.item() == layout.world and mesh.aside.group is not dist.group.WORLD
    after = dist.distributed_c10d._world.group_count
    assert mesh.axis("tp") is mesh.axes("tp")
    assert dist.distributed_c10d._world.group_count == after > 0
    return formed, after - before


FOUR = [
    ({}, 1),  # that of this rank alone
    ({"tp": 2}, 3),  # and tp, dp_shard
    ({"tp": 4}, 1),
    ({"pp": 2, "tp": 2}, 3),  # their product is the job's own
    ({"sp": 2}, 3),
    ({"ep": 2}, 3),  # and ep, edp
    ({"ep": 4}, 1),
    ({"sp": 2, "ep": 2}, 3),
    ({"ep": 2, "data_before_expert": True}, 3),
    ({"dp_replicate": 2}, 3),
    ({"dp_replicate": 2, "sp": 2, "ep": 2}, 3),
]
"""Degrees of four ranks, and the groups that a rank forms for them."""


def test_four_ranks(world):
    found = world(4).each(check, [(Layout.fit(4, **degrees),) for degrees, _ in FOUR])
    for (degrees, groups), results in zip(FOUR, found, strict=True):
        assert {formed for formed, _ in results} == {groups}, degrees
        assert len({count for _, count in results}) == 1, degrees


def test_eight_ranks_with_three_axes_and_experts(world):
    results = world(8).run(check, Layout.fit(8, tp=2, sp=2, ep=2), timeout=120)
    # alone, dp_shard, sp, tp, dp_shard * sp; ep is the same as sp, edp as dp_shard
    assert {formed for formed, _ in results} == {5}


def test_one_rank_forms_nothing(world):
    assert world(1).run(check, Layout()) == [(0, 0)]


def threads():
    init_distributed()
    before = len(os.listdir("/proc/self/task"))
    Mesh.build(Layout.fit(2), device_type="cpu")
    return len(os.listdir("/proc/self/task")) - before


def test_axes_of_one_rank_share_one_group(world):
    # One gloo group has three threads; five of the seven axes have one rank here, and all ranks meet aside once more.
    assert max(world(2, init=False).run(threads)) <= 6


def train():
    torch.manual_seed(0)
    mesh = Mesh.build(Layout.fit(4, sp=2, tp=2), device_type="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Identity())
    want = model[0].weight.detach().clone()
    parallelize_module(model[0], mesh.axis("tp"), ColwiseParallel())
    fully_shard(model, mesh=mesh.axes("dp_shard", "sp"))
    model(torch.ones(2, 4)).sum().backward()
    return model[0].weight.full_tensor().equal(want), model[0].weight.grad.full_tensor().sum().item()


def test_fsdp_takes_a_product_beside_tensor_parallelism(world):
    assert world(4).run(train) == [(True, 64.0)] * 4


def train_on_three_axes():
    torch.manual_seed(0)
    mesh = Mesh.build(Layout.fit(8, sp=2, tp=2), device_type="cpu")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Identity())
    parallelize_module(model[0], mesh.axis("tp"), ColwiseParallel())
    fully_shard(model, mesh=mesh.axes("dp_shard", "sp"))
    model(torch.ones(2, 4)).sum().backward()
    return model[0].weight.grad.full_tensor().sum().item(), mesh.axes("dp_shard", "sp").size()


def test_a_flattened_product_shares_the_root_of_the_mesh(world):
    # FSDP2 refuses a mesh of another root beside tensor parallelism.
    assert world(8).run(train_on_three_axes, timeout=120) == [(64.0, 4)] * 8


def questions():
    mesh = Mesh.build(Layout.fit(8, tp=2, pp=2), device_type="cpu")
    texts = []
    for ask in (
        lambda: mesh.group("dp_shard", "tp"),
        lambda: mesh.axes(),
        lambda: mesh.axes("cp"),
        lambda: mesh.coordinate("dp"),
        lambda: mesh.axes("ep", "sp"),
    ):
        try:
            ask()
        except (UsageError, LayoutError) as error:
            texts.append(str(error))
    if dist.get_rank() == 0:
        mesh.group("tp", "sp")  # one rank asks: nobody has to answer
    return texts


def test_other_products_are_refused_instead_of_formed(world):
    for texts in world(8).run(questions):
        assert len(texts) == 5
        assert texts[0].startswith("there is no group for dp_shard * tp: groups are formed when the mesh is built")
        assert "name at least one axis" in texts[1] and "there is no axis 'cp'" in texts[2]
        assert "there is no axis 'dp'" in texts[3] and "cut the same ranks" in texts[4]


def wrong_size():
    try:
        Mesh.build(Layout.fit(4), device_type="cpu")
    except LayoutError as error:
        return str(error)


def test_a_layout_for_another_job_is_refused(world):
    assert world(2).run(wrong_size) == ["the layout is for 4 ranks (4 ranks: dp_shard=4), but the job has 2"] * 2


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(UsageError, match="init_distributed"):
        Mesh.build(Layout(), device_type="cpu")


def simulate(size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=size, store=FakeStore())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = Mesh.build(Layout.fit(size, tp=8, pp=4, sp=2, ep=4), device_type="cpu")
    return mesh.ranks("tp"), mesh.axes("dp_shard", "sp").size(), mesh.size("edp")


def test_a_thousand_ranks_can_be_pretended(world):
    assert world(1, init=False).run(simulate, 1024) == [(tuple(range(8)), 32, 8)]


def distributed_tensor():
    from torch.distributed.tensor import distribute_tensor

    mesh = Mesh.build(Layout.fit(2, tp=2), device_type="cpu")
    return distribute_tensor(torch.arange(4.0), mesh.axis("tp"), [Shard(0)]).to_local().tolist()


def test_axes_carry_distributed_tensors(world):
    assert world(2).run(distributed_tensor) == [[0.0, 1.0], [2.0, 3.0]]


def split(size):
    """Build on a world whose communicator is bound to a device; how it was asked to split."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())
    everyone, calls = dist.group.WORLD, []
    everyone.bound_device_id = torch.device("cuda", 0)

    def split_group(*, split_ranks, timeout, group_desc):
        calls.append((split_ranks, timeout, group_desc))
        everyone.bound_device_id = None
        try:
            return next(dist.new_group(ranks) for ranks in split_ranks if dist.get_rank() in ranks)
        finally:
            everyone.bound_device_id = torch.device("cuda", 0)

    dist.split_group = split_group
    Mesh.build(Layout.fit(size, tp=2), device_type="cpu", timeout=timedelta(seconds=77))
    return calls


def test_a_bound_communicator_is_split_once_for_all_groups_of_an_axis(world):
    ((alone, data, tensor),) = world(1, init=False).run(split, 4)
    assert alone == ([[0], [1], [2], [3]], timedelta(seconds=77), "pp")
    assert data == ([[0, 2], [1, 3]], timedelta(seconds=77), "dp_shard")
    assert tensor == ([[0, 1], [2, 3]], timedelta(seconds=77), "tp")


def formed(size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=size, store=FakeStore())
    found = []
    for degrees in ({"tp": 8, "pp": 4}, {"tp": 2, "pp": 2, "dp_replicate": 4}, {"tp": 8, "sp": 2, "ep": 4}, {}):
        layout = Layout.fit(size, **degrees)
        mesh = Mesh.build(layout, device_type="cpu")
        several = {ranks for ranks in mesh._groups if len(ranks) > 1}
        found.append((several == groups_of_rank(layout, 5).keys(), sorted(groups_of_rank(layout, 5).values())))
    return found


def test_no_rank_belongs_to_more_groups_than_axes_and_products_need(world):
    """Those that a plan counts are those that are formed, each once, however many names it has."""
    ((cut, copies, experts, data),) = world(1, init=False).run(formed, 1024)
    assert cut == (True, ["all", "dp_shard", "pp", "pp * tp", "tp"])
    assert copies == (True, ["all", "dp_replicate", "dp_replicate * dp_shard", "dp_shard", "pp", "pp * tp", "tp"])
    assert experts[0] and len(experts[1]) == 7
    assert data == (True, ["dp_shard"])
