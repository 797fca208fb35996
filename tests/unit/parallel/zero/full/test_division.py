"""Which parameters form a unit, which stay whole; and what the plan says and counts. No ranks."""

import pytest
import torch
from torch import nn

from mizzen import zero
from mizzen.config.layout import Layout
from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.home import Home
from mizzen.model.sketch import Sketch
from mizzen.order import ORDER
from mizzen.parallel.zero.full.division import divide
from mizzen.parallel.zero.full.init import pin
from mizzen.parallel.zero.full.shard import ZeroFull
from mizzen.parallel.zero.full.sharded_parameter import shard_dim
from mizzen.plan.build import build
from mizzen.plan.explain import explain
from mizzen.precision.policy import Policy


def settings(**keys):
    keys = {"stage3_param_persistence_threshold": 0} | keys
    return load({"train_batch_size": 8, "zero_optimization": {"stage": 3, **keys}})


def units(model, ranks=2, config=None, **keys):
    config = config or settings(**keys)
    return divide(Sketch.of(model), config.zero_optimization, Policy.of(config), ranks)


class Stack(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(blocks))
        self.tower = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4, bias=False)})


def by_path(division):
    return {unit.path: [parameter.name for parameter in unit.parameters] for unit in division.units}


def test_blocks_are_units_and_the_rest_is_the_model():
    found = by_path(units(Stack()))
    assert list(found) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert found["blocks.1"] == ["blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.1.weight", "blocks.1.1.bias"]
    assert found[""][0] == "embed.weight"


def test_what_two_blocks_share_belongs_to_the_model():
    model = Stack()
    model.blocks[2][0].weight = model.blocks[0][0].weight
    model.blocks[1][1].weight = model.blocks[1][1].weight
    found = by_path(units(model))
    assert "blocks.0.0.weight" in found[""]
    assert "blocks.0.0.weight" not in found["blocks.0"] + found["blocks.2"]


def test_a_registered_parameter_belongs_to_the_model():
    model = Stack()
    zero.register_external_parameter(model, model.blocks[1][0].weight)
    assert "blocks.1.0.weight" in by_path(units(model))[""]


class Naming(Stack):
    def forward(self, rows):
        return rows @ self.blocks[1][0].weight


def test_the_code_of_a_model_does_not_change_its_units():
    assert by_path(units(Naming())) == by_path(units(Stack()))


def test_pinned_modules_are_units_and_containers_give_their_items():
    assert "tower.one" in by_path(units(Stack(), leaf_module={"names": ["tower"]}))
    model = Stack()
    pin(model.blocks[0])
    outer = nn.ModuleDict({"inner": model, "more": nn.Linear(2, 2)})
    pin(model)
    assert list(by_path(units(outer))) == ["", "inner"]
    pin(model, False)
    assert "inner.blocks.0" in by_path(units(outer))
    with pytest.raises(PlanError, match=r"zero_optimization.leaf_module: 'Missing' is neither"):
        units(Stack(), leaf_module={"classes": ["some.package.Missing"]})


def test_small_0d_and_empty_parameters_stay_whole():
    model = Stack()
    model.scale, model.none = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(0, 3))
    names = [parameter.name for parameter in units(model, stage3_param_persistence_threshold=17).whole]
    assert {"scale", "none", "blocks.0.0.bias", "tower.one.bias"} <= set(names)
    assert "blocks.0.0.weight" not in names
    few = units(model, stage3_param_persistence_threshold=17, stage3_model_persistence_threshold=9).whole
    assert sum(parameter.numel for parameter in few) <= 10


def test_beside_a_second_copy_what_is_not_cut_by_rows_stays_whole():
    model = Stack()
    for block in model.blocks:
        block.append(nn.Linear(8, 2, bias=False))  # of fewer rows than there are ranks
    whole = ["blocks.0.2.weight", "blocks.1.2.weight", "blocks.2.2.weight"]
    assert [p.name for p in units(model, 4, zero_hpz_partition_size=2).whole] == whole
    assert units(model, 4).whole == ()


def test_what_has_another_dtype_than_its_unit_stays_whole():
    model = Stack()
    model.blocks[0][1].double()
    model.blocks[1].requires_grad_(False)
    model.blocks[1][1].bfloat16()
    model.blocks[2].bfloat16()
    model.blocks[2][0].weight.requires_grad_(False).data = torch.ones(8, 4)
    division = units(model)
    assert [parameter.name for parameter in division.whole] == [
        "blocks.0.1.weight", "blocks.0.1.bias", "blocks.2.0.weight",
    ]  # fmt: skip
    low = load({"train_batch_size": 8, "zero_optimization": settings().zero_optimization.model_dump(include={"stage"})})
    assert divide(Sketch.of(model), settings().zero_optimization, Policy.of(low), 2).whole == division.whole
    bf16 = load({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})
    held = divide(Sketch.of(model), settings().zero_optimization, Policy.of(bf16), 2)
    assert held.whole == ()
    assert (held.units[1].held, held.units[1].master, held.units[1].gathers_as) == ("bfloat16", "float32", "bfloat16")


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"), [((8, 3), 2, 0), ((7, 4), 4, 0), ((1, 6), 2, 1), ((1, 5), 2, 0), ((3, 1, 8), 4, 2)]
)
def test_which_dimension_is_cut(shape, ranks, dim):
    assert shard_dim(shape, ranks) == dim


def test_the_plan_prints_units_and_prices_them():
    config = settings()
    big = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(16))
    plan = build(config, 4, Sketch.of(big), ORDER)
    text = explain(plan)
    assert "ZeRO stage 3 over dp=4, sums in float32: 16 x Linear of 65.54k (0 ... 15)" in text
    n = 16 * 65536
    assert plan.cost.masters == 0
    assert plan.cost.states == 2 * 4 * n // 4
    assert plan.cost.parameters == 4 * n // 4 + 2 * 4 * 65536  # the shards, and two units gathered
    assert plan.cost.gradients == 4 * n // 4 + 2 * 2 * 4 * 65536
    alone = build(config, 1, Sketch.of(big), ORDER)
    assert "nothing to shard" in explain(alone)


def test_the_plan_says_where_parameters_rest_and_what_is_there():
    big = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(16))
    n, unit = 16 * 65536, 65536
    for ranks in (1, 4):
        config = settings(offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})
        plan = build(config, ranks, Sketch.of(big), ORDER)
        assert "; parameters of units rest in host: 16; masters and states rest in host: 16" in explain(plan)
        assert plan.cost.host == 5 * 4 * n // ranks  # shards, masters, two states, gradients on their way
        assert plan.cost.parameters == 2 * 4 * unit + 2 * 4 * unit // ranks  # two units gathered, and two fetched
        assert (plan.cost.masters, plan.cost.states, plan.cost.nvme) == (0, 0, 0)
    far = {"device": "nvme", "nvme_path": "/x", "max_in_cpu": 4 * unit, "buffer_count": 3}
    plan = build(settings(offload_param=far), 1, Sketch.of(big), ORDER)
    assert "stage 3 on one data-parallel rank" in explain(plan)
    assert "; parameters of units rest in host: 4, on nvme: 12" in explain(plan)
    assert (plan.cost.nvme, plan.cost.host) == (4 * 12 * unit, 4 * 4 * unit + 3 * 4 * unit)
    assert (plan.cost.masters, plan.cost.states) == (4 * n, 8 * n)
    assert plan.cost.gradients == 4 * n + 2 * 2 * 4 * unit


def test_sums_of_gradients_rest_where_masters_do():
    big, unit = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(16)), 65536
    for place in ({"device": "cpu"}, {"device": "nvme", "nvme_path": "/x"}):
        plan = build(settings(offload_optimizer=place), 4, Sketch.of(big), ORDER)
        assert plan.cost.gradients == 2 * 2 * 4 * unit + 3 * 4 * unit // 4  # on their way, and three that come and go
    half = build(settings(offload_optimizer={"device": "cpu", "ratio": 0.5}), 4, Sketch.of(big), ORDER)
    assert half.cost.gradients == 8 * 4 * unit // 4 + 2 * 2 * 4 * unit + 3 * 4 * unit // 4


def with_host_bytes(limit, **param):
    """A plan for 16 units on one rank, of which 4 bytes rest for each element of parameters, and 12 of states."""
    big = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(16))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": param}
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": "/x"}
    offload = {"device_bytes": 0, "host_bytes": limit, "nvme_bytes": 1 << 40}
    config = load({"train_batch_size": 8, "zero_optimization": zero, "offload": offload})
    return build(config, 1, Sketch.of(big), ORDER)


def test_parameters_count_in_the_budget_of_host_memory():
    unit = 65536 * 4
    plan = with_host_bytes(16 * unit + 5 * 3 * unit, device="cpu")
    assert "; parameters of units rest in host: 16; masters and states rest in host: 5, on nvme: 11" in explain(plan)
    # beside the budget gradients come there, and three lots at a time pass from NVMe
    assert plan.cost.host == 16 * unit + 5 * 3 * unit + 16 * unit + 3 * 3 * unit
    assert "masters and states rest on nvme: 16" in explain(with_host_bytes(16 * unit, device="cpu"))
    with pytest.raises(PlanError, match=r"parameters of 4.0 MiB on a rank rest in host memory .* is 3.0 MiB"):
        with_host_bytes(12 * unit, device="cpu")
    far = {"device": "nvme", "nvme_path": "/x", "max_in_cpu": 4 * 65536, "buffer_count": 3}
    plan = with_host_bytes(4 * unit + 3 * unit + 3 * unit, **far)  # four units, buffers for the others, states of one
    assert "rest in host: 4, on nvme: 12; masters and states rest in host: 1, on nvme: 15" in explain(plan)


@pytest.mark.parametrize("key", ["reduce_bucket_size", "allgather_bucket_size"])
def test_what_stays_whole_travels_in_buckets_of_the_size_that_is_asked_for(key):
    config = settings(stage3_param_persistence_threshold=1000, **{key: 40})
    names = dict.fromkeys((name for name, _ in Stack().named_parameters()), 0)
    layout = Layout.fit(world=2)
    draft = Sketch.of(Stack()).with_groups(names).with_home(Home.data_parallel(layout))
    (part,) = ZeroFull().wants(config, layout, (draft,)).parts(0)
    buckets = [bucket for family in part.families for buffer in family.buffers for bucket in buffer.buckets]
    assert len(buckets) > 1
    assert all(sum(slot.stop - slot.start for slot in bucket.slots) <= 40 for bucket in buckets)


def test_what_cannot_be_is_refused():
    config = load({"train_batch_size": 8, "sparse_gradients": True, "zero_optimization": {"stage": 3}})
    with pytest.raises(PlanError, match="sparse_gradients with zero_optimization.stage 3"):
        build(config, 2, Sketch.of(Stack()), ORDER)


@pytest.mark.parametrize(
    ("keys", "ranks", "why"),
    [
        ({}, 1, "on one data-parallel rank"),
        ({"stage": 2}, 2, "is part of stage 3; zero_optimization.stage is 2"),
        ({"zero_quantized_weights": True}, 2, "with zero_quantized_weights: frozen weights"),
        ({"zero_hpz_partition_size": 2}, 4, "with zero_hpz_partition_size: frozen weights"),
        ({"offload_param": {"device": "cpu"}}, 1, "with offload_param: frozen weights"),
    ],
)
def test_where_frozen_weights_cannot_rest_in_blocks(keys, ranks, why):
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True} | keys
    with pytest.raises(PlanError, match=f"zero_optimization.zero_quantized_nontrainable_weights {why}"):
        build(load({"train_batch_size": 8, "zero_optimization": zero}), ranks, Sketch.of(Stack()), ORDER)


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_hpz_partition_size": 2},
        {"zero_quantized_weights": True},
        {"zero_quantized_gradients": True},
        {"zeropp_loco_param": {}},
        {"offload_param": {"device": "cpu"}},
    ],
    ids=lambda keys: next(iter(keys)),
)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_part_of_stage_3(keys, stage):
    with pytest.raises(PlanError, match=f"zero_optimization.{next(iter(keys))} is part of stage 3"):
        build(
            load({"train_batch_size": 8, "zero_optimization": {"stage": stage, **keys}}), 2, Sketch.of(Stack()), ORDER
        )
