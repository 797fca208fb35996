"""Homes: what each rank holds, who holds the same, and that it is what DTensor placements say."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from mizzen.config.layout import Layout
from mizzen.errors import PlanError
from mizzen.model.box import Box, coverage
from mizzen.model.home import Cut, Home, Site, evenly
from mizzen.model.placement import boxes_of_placements

QUIET = settings(max_examples=150, derandomize=True)


def base(**degrees: int) -> tuple[Layout, Home]:
    layout = Layout(**degrees)
    return layout, Home.data_parallel(layout)


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@QUIET
@given(shapes, st.integers(1, 4), st.integers(1, 3), st.data())
def test_even_cuts_are_those_of_dtensor(shape, tp, pp, data):
    layout, home = base(tp=tp, pp=pp, dp_shard=2)
    dims = data.draw(st.permutations(range(len(shape))))
    home = home.cut("tp", dims[0], evenly(shape[dims[0]], tp))
    placements = [Replicate(), Shard(dims[0])]
    if len(dims) > 1:
        home = home.cut("pp", dims[1], evenly(shape[dims[1]], pp))
        placements[0] = Shard(dims[1])
    home.check("weight", shape, layout)
    for rank in range(layout.world):
        places = layout.coordinates(rank)
        expected = boxes_of_placements(shape, (pp, tp), (places["pp"], places["tp"]), placements)
        assert home.boxes(shape, layout, rank) == expected
        assert home.local_shape(shape, layout, rank) == (
            expected[0].shape if expected else home.local_shape(shape, layout, rank)
        )


@st.composite
def fused(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Home]:
    """Runs of uneven parts, some copied, some of fewer parts than ranks, in any dimension."""
    layout, home = base(tp=4, dp_shard=2)
    dim, rank = draw(st.integers(0, 2)), 3
    parts = st.sampled_from([1, 2, 4]).flatmap(
        lambda count: st.lists(st.integers(0, 3), min_size=count, max_size=count)
    )
    runs = draw(st.lists(parts, min_size=1, max_size=3))
    shape = [draw(st.integers(1, 4)) for _ in range(rank)]
    shape[dim] = sum(map(sum, runs))
    return tuple(shape), layout, home.cut("tp", dim, *runs)


@QUIET
@given(fused(), st.data())
def test_a_flat_range_inside_a_home_is_what_a_slice_of_its_tensor_is(made, data):
    shape, layout, home = made
    whole = torch.arange(math.prod(shape)).view(shape)
    rank = data.draw(st.integers(0, layout.world - 1))
    local = whole
    for dim, side in enumerate(home.intervals(shape, layout, rank)):
        local = torch.cat([local.narrow(dim, a, b - a) for a, b in side] or [local.narrow(dim, 0, 0)], dim)
    assert tuple(local.shape) == home.local_shape(shape, layout, rank)
    start = data.draw(st.integers(0, local.numel()))
    stop = data.draw(st.integers(start, local.numel()))
    boxes = home.boxes_of_range(shape, layout, rank, start, stop)
    found = [whole[box.slices(Box.whole(shape))].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat(found) if found else local.reshape(-1)[:0], local.reshape(-1)[start:stop])


@QUIET
@given(fused())
def test_every_element_is_held_and_counted_once(made):
    shape, layout, home = made
    families = {home.adders(layout, rank) for rank in range(layout.world)}
    counted = [box for family in families for box in home.counts(shape, layout, family[0])]
    assert coverage(counted, shape).is_exact
    for rank in range(layout.world):
        for box in home.boxes(shape, layout, rank):
            holders = home.holders_of(box, shape, layout, rank)
            assert rank in holders
            for other in range(layout.world):
                has_it = any(held.contains(box) for held in home.boxes(shape, layout, other))
                assert (other in holders) == has_it


def test_a_norm_beside_cut_matrices_is_a_copy_that_is_not_summed():
    layout, home = base(tp=2, dp_shard=2)
    assert home.holders(layout, 0) == (0, 1, 2, 3)
    assert home.adders(layout, 1) == (1, 3)
    assert home.divisor == 2
    assert home.counts((4,), layout, 0) == (Box.whole((4,)),) == home.counts((4,), layout, 2)
    assert home.counts((4,), layout, 1) == ()


def test_an_expert_is_summed_over_fewer_ranks_than_it_is_divided_by():
    layout, home = base(dp_shard=4, ep=2)
    expert = home.at("ep", 1)
    assert [expert.is_at(layout, rank) for rank in range(4)] == [False, True, False, True]
    assert expert.adders(layout, 1) == expert.holders(layout, 1) == (1, 3)
    assert expert.divisor == 4
    stacked = home.cut("ep", 0, evenly(8, 2))
    assert stacked.boxes((8, 3), layout, 3) == (Box((4, 0), (8, 3)),)
    assert stacked.adders(layout, 3) == (1, 3)


def test_a_tied_weight_on_two_stages_is_summed_over_both_and_divided_by_the_data_ranks():
    layout, home = base(pp=4, dp_shard=2)
    tied = home.at("pp", 0, 3)
    assert tied.adders(layout, 0) == tied.holders(layout, 7) == (0, 1, 6, 7)
    assert not tied.is_at(layout, 2)
    assert tied.divisor == 2
    alone = home.at("pp", 2)
    assert alone.adders(layout, 4) == (4, 5)
    assert alone.key(layout) != tied.key(layout)


def test_grouped_heads_with_fewer_keys_than_ranks():
    """Q of 8 heads and one K and one V of 2 heads each, of size 2, in a fused matrix over 4 ranks."""
    layout, home = base(tp=4)
    fused = home.cut("tp", 0, evenly(16, 4), evenly(4, 2), evenly(4, 2))
    assert fused.local_shape((24, 5), layout, 0) == (8, 5)
    assert [box.start[0] for box in fused.boxes((24, 5), layout, 3)] == [12, 18, 22]
    k = Box((18, 0), (20, 5))
    assert fused.holders_of(k, (24, 5), layout, 3) == (2, 3)
    assert k in fused.counts((24, 5), layout, 2)
    assert k not in fused.counts((24, 5), layout, 3)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (Cut("tp", 2, ((4, 4),)), "no dimension 2"),
        (Cut("tp", 0, ((4, 3),)), "have 7 together"),
        (Cut("tp", 0, ((3, 3, 2),)), "3 parts along tp=4"),
    ],
)
def test_a_home_that_does_not_fit_is_refused(cut, words):
    layout, _ = base(tp=4)
    with pytest.raises(PlanError, match=words):
        Home((cut,)).check("weight", (8, 8), layout)


def test_sums_are_copies():
    layout, _ = base(dp_shard=2)
    with pytest.raises(PlanError, match="summed along"):
        Home(sums=("dp_shard",)).check("weight", (8,), layout)


@QUIET
@given(fused())
def test_what_several_ranks_of_a_cut_axis_hold_is_found_in_their_tensors_and_counted_by_one(made):
    shape, layout, home = made
    whole = torch.arange(math.prod(shape)).view(shape)
    counted = []
    for rank in layout.ranks_along(("tp",), 1):
        site = Site(shape, home, layout, rank)
        local = site.part_of(whole)
        for each in site.shared:
            assert torch.equal(
                local[each.place.slices(Box.whole(local.shape))], whole[each.box.slices(Box.whole(shape))]
            )
            assert len(each.ranks) > 1
            assert rank in each.ranks
            for other in each.ranks:
                assert each.box in home.boxes(shape, layout, other)
        ranges = site.ranges(site.boxes_of_range(0, local.numel()))
        assert [each.stop for each in ranges[:-1]] == [each.start for each in ranges[1:]]
        assert sum(each.stop - each.start for each in ranges) == local.numel()
        counted += [box for each in ranges if each.is_counted for box in each.boxes]
    assert coverage(counted, shape).is_exact
