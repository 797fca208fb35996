"""Degrees, places and groups: arithmetic that holds for every layout."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mizzen.config.layout import AXES, Layout
from mizzen.errors import LayoutError

small = st.integers(1, 3)


@st.composite
def layouts(draw):
    degrees = {name: draw(small) for name in AXES}
    inside = degrees["dp_shard"] * degrees["sp"]
    ep = draw(st.sampled_from([n for n in range(1, inside + 1) if inside % n == 0]))
    return Layout(**degrees, ep=ep, data_before_expert=draw(st.booleans()))


axis_sets = st.one_of(
    st.lists(st.sampled_from(AXES), unique=True, min_size=1),
    st.lists(st.sampled_from(("pp", "dp_replicate", "ep", "edp", "tp")), unique=True, min_size=1),
)


@given(small, small, small, small, small)
def test_fit_gives_the_rest_to_dp_shard(rest, tp, pp, sp, dp_replicate):
    world = rest * tp * pp * sp * dp_replicate
    layout = Layout.fit(world, tp=tp, pp=pp, sp=sp, dp_replicate=dp_replicate)
    assert layout == Layout(pp=pp, dp_replicate=dp_replicate, dp_shard=rest, sp=sp, tp=tp)
    assert (layout.world, layout.dp) == (world, rest * dp_replicate)


@given(layouts(), st.data())
def test_place_and_rank_are_inverse(layout, data):
    rank = data.draw(st.integers(0, layout.world - 1))
    places = layout.coordinates(rank)
    assert layout.rank(**{name: places[name] for name in AXES}) == rank
    assert layout.rank(**{name: places[name] for name in layout.expert_axes}) == rank
    assert all(0 <= place < layout.size(name) for name, place in places.items())


@settings(max_examples=60)
@given(layouts(), axis_sets)
def test_groups_hold_every_rank_once_and_agree_with_each_member(layout, axes):
    groups = layout.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert groups == sorted(groups)
    for group in groups:
        assert list(group) == sorted(group)
        assert len(group) == layout.size(*axes)
        assert all(layout.ranks_along(axes, rank) == group for rank in group)
    view = layout.expert_axes if {"ep", "edp"} & set(axes) else AXES
    fixed = [name for name in view if name not in axes]
    for group in groups:
        assert len({tuple(layout.coordinates(rank)[name] for name in fixed) for rank in group}) == 1


def test_tp_neighbours_and_pp_strangers():
    layout = Layout.fit(16, tp=2, pp=2, sp=2, dp_replicate=2)
    assert layout.groups("tp")[:2] == [(0, 1), (2, 3)]
    assert layout.groups("sp")[:2] == [(0, 2), (1, 3)]
    assert layout.groups("dp_replicate")[:2] == [(0, 4), (1, 5)]
    assert layout.groups("pp")[:2] == [(0, 8), (1, 9)]
    assert layout.ranks_along(("pp", "tp"), 10) == (2, 3, 10, 11)
    assert layout.coordinates(13) == {
        "pp": 1, "dp_replicate": 1, "dp_shard": 0, "sp": 0, "tp": 1, "ep": 0, "edp": 0
    }  # fmt: skip


def test_expert_groups_are_neighbours_unless_data_comes_first():
    assert Layout.fit(8, ep=2).groups("ep") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert Layout.fit(8, ep=2).groups("edp") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    swapped = Layout.fit(8, ep=2, data_before_expert=True)
    assert swapped.groups("ep") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert swapped.groups("edp") == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_experts_stay_inside_one_replica_and_one_tensor_rank():
    layout = Layout.fit(16, tp=2, dp_replicate=2, sp=2, ep=4)
    assert layout.groups("ep") == [(0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15)]
    assert layout.ranks_along(("dp_replicate", "edp"), 3) == (3, 11)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"world": 12, "tp": 8},
            "world size 12 is not a multiple of pp*sp*tp = 1*1*8 = 8: use 8 or 16 ranks, or tp=1, 2, 3, 4, 6 or 12",
        ),
        (
            {"world": 12, "tp": 8, "pp": 2},
            "world size 12 is not a multiple of pp*sp*tp = 2*1*8 = 16: use 16 ranks, or tp=1, 2, 3 or 6",
        ),
        ({"world": 7, "sp": 2, "tp": 2}, "= 1*2*2 = 4: use 4 or 8 ranks"),
        ({"world": 8, "dp_replicate": 3}, "= 1*3*1*1 = 3: use 6 or 9 ranks, or dp_replicate=1, 2, 4 or 8"),
        ({"world": 8, "ep": 3}, "ep=3 does not divide dp_shard*sp = 8*1 = 8"),
        ({"world": 8, "tp": 4, "ep": 4}, "experts are spread over the data ranks of one replica; use ep=1 or 2"),
        ({"world": 8, "tp": True}, "tp=True: use a whole number"),
        ({"world": 8, "tp": 2.0}, "tp=2.0: use a whole number"),
        ({"world": 8, "pp": 0}, "pp=0: use a whole number of at least 1"),
        ({"world": True}, "world size=True"),
        ({"world": -8}, "world size=-8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_what_would(asked, message):
    with pytest.raises(LayoutError) as error:
        Layout.fit(**asked)
    assert message in str(error.value)


@given(st.integers(1, 400), st.integers(1, 16), st.integers(1, 8), st.integers(1, 8))
def test_advice_is_sound(world, tp, pp, sp):
    try:
        Layout.fit(world, tp=tp, pp=pp, sp=sp)
    except LayoutError as error:
        advice = str(error).partition("use ")[2]
    else:
        return
    ranks, _, rest = advice.partition(" ranks")
    for count in ranks.split(" or "):
        Layout.fit(int(count), tp=tp, pp=pp, sp=sp)
    for part in filter(None, rest.split(", or ")):
        name, _, values = part.partition("=")
        for value in values.replace(" or ", ", ").split(", "):
            if value != "...":
                Layout.fit(world, **{"tp": tp, "pp": pp, "sp": sp, name: int(value)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layout: layout.size("dp"), "there is no axis 'dp': use pp, dp_replicate, dp_shard, sp, tp, ep or edp"),
        (lambda layout: layout.size("tp", "tp"), "'tp' is named twice"),
        (lambda layout: layout.groups(("ep", "sp")), "sp and the expert axes cut the same ranks"),
        (lambda layout: layout.coordinates(8), "8 is not one of the 8 ranks 0 to 7"),
        (lambda layout: layout.coordinates(True), "True is not one of"),
        (lambda layout: layout.rank(tp=2), "tp=2 is not a place on the axis tp, which has 0 to 1"),
        (lambda layout: layout.rank(tp=-1), "tp=-1 is not a place"),
    ],
)
def test_wrong_questions_are_refused(call, message):
    with pytest.raises(LayoutError, match=".") as error:
        call(Layout.fit(8, tp=2))
    assert message in str(error.value)


def test_left_out_axes_count_as_zero():
    layout = Layout.fit(8, tp=2, pp=2)
    assert [layout.rank(), layout.rank(tp=1), layout.rank(pp=1), layout.rank(edp=1)] == [0, 1, 4, 2]


def test_prints_what_is_not_one():
    assert str(Layout.fit(8, tp=2)) == "8 ranks: dp_shard=4 tp=2"
    assert str(Layout()) == "1 rank"


def test_needs_no_torch():
    code = "import sys, mizzen.config.layout; sys.exit('torch' in sys.modules)"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
