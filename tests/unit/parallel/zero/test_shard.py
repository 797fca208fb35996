"""What ZeRO decides from a configuration, a layout and a sketch, without a rank."""

from dataclasses import replace

import pytest

from mizzen.config.layout import Layout
from mizzen.config.load import load
from mizzen.errors import PlanError
from mizzen.model.home import Home, evenly
from mizzen.model.sketch import ParameterSketch, Sketch
from mizzen.parallel.zero.reduce import Reduction
from mizzen.parallel.zero.shard import ZeroShard
from mizzen.parallel.zero.store import Holding
from mizzen.plan.cost import Cost

SKETCH = Sketch(
    (
        ParameterSketch("embed.weight", (1000, 64), is_embedding=True),
        ParameterSketch("up.weight", (64, 64)),
        ParameterSketch("norm.weight", (64,), group=1),
        ParameterSketch("frozen.weight", (64, 64), requires_grad=False),
        ParameterSketch("left.out", (64,), group=None),
    )
)


def drafts(sketch, layout):
    return (sketch.with_home(Home.data_parallel(layout)),)


def choose(keys=None, layout=None, sketch=SKETCH, **zero):
    layout = layout or Layout(dp_shard=4)
    return ZeroShard().wants(load({**(keys or {}), "zero_optimization": zero}), layout, drafts(sketch, layout))


def held(*args, **kwargs):
    """The one family of a rank where all parameters are alike."""
    (piece,) = choose(*args, **kwargs).families(0)
    (family,) = piece
    return family


def names(choice):
    families = [family for piece in choice.families(0) for family in piece]
    buffers = [buffer for family in families for buffer in family.buffers]
    return [[slot.name for slot in bucket.slots] for buffer in buffers for bucket in buffer.buckets]


def test_trained_parameters_by_group_and_nothing_else():
    choice = choose(stage=2)
    assert names(choice) == [["up.weight", "embed.weight"], ["norm.weight"]]
    assert [(buffer.group, buffer.dtype) for buffer in held(stage=2).buffers] == [(0, "float32"), (1, "float32")]


def test_parameters_are_laid_out_in_the_dtype_in_which_they_are_held():
    assert {buffer.dtype for buffer in held({"bf16": {"enabled": True}}, stage=1).buffers} == {"bfloat16"}


def test_embeddings_travel_alone_where_rows_are_asked_for():
    assert names(choose({"sparse_gradients": True})) == [["up.weight"], ["embed.weight"], ["norm.weight"]]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_both_bucket_sizes_are_upper_bounds_where_both_collectives_are_used(stage):
    assert len(held(stage=stage, reduce_bucket_size=4096).buffers[0].buckets) == 2
    gathered = held(stage=stage, allgather_bucket_size=4096).buffers[0]
    assert len(gathered.buckets) == (2 if stage else 1)  # stage 0 gathers nothing


def test_one_rank_has_nothing_to_shard():
    choice = choose(stage=2, layout=Layout())
    holding = held(stage=2, layout=Layout()).holding
    assert (choice.asked, holding.stage, holding.chunks) == (2, 0, 1)
    assert str(choice) == "ZeRO stage 2 on one data-parallel rank: nothing to shard"


def test_sequence_parallel_ranks_share_too():
    holding = held(stage=1, layout=Layout(dp_shard=2, sp=2)).holding
    assert (holding.reduction.ranks, holding.chunks) == (4, 4)


def test_a_choice_prints_itself():
    assert str(choose(stage=1)) == "ZeRO stage 1 over dp=4 in 2 buckets, sums in float32"
    assert str(choose(stage=1, sketch=Sketch(SKETCH.parameters[:1]))) == (
        "ZeRO stage 1 over dp=4 in 1 bucket, sums in float32"
    )
    assert str(choose(stage=1, sketch=Sketch(()))) == "ZeRO stage 1 over dp=4, sums in float32"


def test_nothing_trained_wants_nothing():
    assert choose(sketch=Sketch(SKETCH.parameters[3:])) is None


def test_stage_3_is_left_to_its_refusal():
    assert choose(stage=3) is None


def test_what_is_neither_real_nor_floating_is_refused_by_name():
    waves = Sketch((*SKETCH.parameters, ParameterSketch("waves", (4,), dtype="complex64")))
    with pytest.raises(PlanError, match=r"'waves' is trained in complex64: .* freeze it"):
        choose(sketch=waves)
    frozen = ParameterSketch("waves", (4,), dtype="complex64", requires_grad=False)
    assert choose(sketch=Sketch((*SKETCH.parameters, frozen))) is not None


@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        ({"fp16": {"enabled": True}}, 1, 1 / 4),
        ({"communication_data_type": "fp16"}, 1, 1 / 4),
        ({"gradient_predivide_factor": 2}, 1 / 2, 1 / 2),
        ({"prescale_gradients": True}, 1 / 4, 1),
        ({"prescale_gradients": True, "gradient_predivide_factor": 2}, 1 / 4, 1),
    ],
)
def test_the_mean_is_taken_in_the_factors_that_were_asked_for(keys, before, after):
    reduction = held(keys).holding.reduction
    assert (reduction.before, reduction.after) == (before, after)


def test_a_mean_that_loses_no_bit_is_taken_as_gradients_are_copied():
    factors = {}
    for stage in (0, 1, 2):
        reduction = held(stage=stage).holding.reduction
        factors[stage] = (reduction.before, reduction.after, reduction.is_early)
    # The local sum of stage 1 stays as it is, for a further backward.
    assert factors == {0: (1 / 4, 1, True), 1: (1, 1 / 4, False), 2: (1 / 4, 1, True)}
    three = held(layout=Layout(dp_shard=3)).holding.reduction
    assert (three.before, three.after, three.is_early) == (1, 1 / 3, False)


def test_a_sum_is_a_mean_with_a_gain():
    holding = held({"gradient_allreduce_op": "sum"}).holding
    assert (holding.gain, holding.reduction.before * holding.reduction.after) == (4.0, 1 / 4)
    assert held().holding.gain == 1.0


def test_what_else_is_read():
    asked = (
        {
            "communication_data_type": "bf16",
            "data_types": {"grad_accum_dtype": "fp16"},
            "deterministic": True,
            "optimizer": {"type": "SGD", "params": {"momentum": 0.9}},
        },
    )
    assert choose(*asked, overlap_comm=False, stage=1).states == (1, 1)
    holding = held(*asked, overlap_comm=False, stage=1).holding
    assert holding.reduction.dtype == "bfloat16"
    assert holding.reduction.in_rank_order
    assert holding.policy.accumulation == "float16"
    assert not holding.overlap


def test_a_stage_on_one_rank_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="stage 1 on one rank"):
        Holding(1, Reduction(1))


PADDED, PLAIN = 68608 + 128, 64000 + 4096 + 64
"""Elements of both buffers on 4 ranks: a large one is a multiple of 4 x 256, and the other takes 128 for its 64."""


@pytest.mark.parametrize(
    ("stage", "gradients"),
    [
        (0, PADDED * 4),
        (1, PADDED * 4 + PADDED),
        (2, PADDED + (68608 + 128) * 4 + (68608 + 128)),  # both buckets on their way, with a quarter each received
    ],
)
def test_the_price_of_each_stage(stage, gradients):
    share = PADDED if stage else PADDED * 4
    bf16 = ZeroShard().price(choose({"bf16": {"enabled": True}}, stage=stage), 0)
    assert bf16 == Cost(
        parameters=2 * (PADDED - PLAIN),
        gradients=gradients - 4 * PLAIN,
        masters=share - 4 * PLAIN,
        states=2 * (share - 4 * PLAIN),
    )
    assert ZeroShard().price(choose(stage=stage), 0).masters == 0  # fp32 parameters are their own masters


def test_what_stage_2_sends_in_another_dtype_or_scaled_is_a_copy():
    def in_flight(**keys):
        return ZeroShard().price(choose(keys, stage=2), 0).gradients

    buckets = 68608 + 128
    assert in_flight(communication_data_type="bf16") == in_flight() - buckets + 2 * buckets + buckets // 2
    assert in_flight(gradient_predivide_factor=2) == in_flight() + 4 * buckets
    assert in_flight(deterministic=True) == in_flight() + 3 * buckets


def cut(sketch, layout):
    """The matrices cut by rows along tp, on the second of two stages; the embedding tied between both."""
    home = Home.data_parallel(layout)
    homes = {
        "embed.weight": home.at("pp", 0, 1),
        "up.weight": home.at("pp", 1).cut("tp", 0, evenly(64, layout.tp)),
    }
    parameters = tuple(replace(p, home=homes.get(p.name, home.at("pp", 1))) for p in sketch.parameters)
    return Sketch(parameters[:1]), Sketch(parameters)


def test_a_family_for_each_home():
    layout = Layout(pp=2, tp=2, dp_shard=2)
    choice = ZeroShard().wants(load({"zero_optimization": {"stage": 2}}), layout, cut(SKETCH, layout))
    (first,), (last,) = choice.families(0), choice.families(7)
    assert [(family.ranks, family.counts, list(family.sites)) for family in first] == [
        ((0, 2, 4, 6), True, ["embed.weight"])
    ]
    assert [(family.ranks, family.counts, list(family.sites)) for family in last] == [
        ((5, 7), True, ["up.weight"]),
        ((5, 7), False, ["norm.weight"]),
        ((1, 3, 5, 7), False, ["embed.weight"]),
    ]
    assert last[0].buffers[0].buckets[0].slots[0].shape == (32, 64)
    assert [family.holding.gain for family in last] == [1.0, 1.0, 2.0]
    assert first[0].buffers == last[2].buffers
    groups = list(ZeroShard().groups(choice))
    assert ((0, 2, 4, 6), (1, 3, 5, 7)) in groups
    assert ((4, 6), (5, 7)) in groups
