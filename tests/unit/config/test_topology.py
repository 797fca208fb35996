"""Topologies: where ranks are, and what is asked of them."""

import pytest

from mizzen.config.layout import Layout
from mizzen.config.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from mizzen.errors import LayoutError, UsageError


def test_the_last_axis_is_fastest():
    made = ProcessTopology(axes=["row", "col"], dims=[2, 3])
    assert made.world_size() == 6 and made.get_axis_names() == ["row", "col"]
    assert [made.get_rank(row=row, col=col) for row in range(2) for col in range(3)] == list(range(6))
    assert made.get_coord(4) == (1, 1) and made.get_coord(4).row == 1
    assert made.get_dim("col") == 3 and made.get_dim("other") == 0
    assert made.get_axis_list("row", 1) == [3, 4, 5] and made.get_axis_list("col", 0) == [0, 3]


def test_groups_along_an_axis():
    made = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert made.axes == ["pipe", "data", "model"]
    assert made.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert made.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert made.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert made.get_axis_comm_lists("nowhere") == []
    assert made.filter_match(pipe=0, data=1) == [2, 3] and made.filter_match() == list(range(8))


def test_a_rank_in_words():
    made = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert [made.get_rank_repr(rank) for rank in (0, 1, 7)] == ["model_00", "model_01", "model_01"]
    assert made.get_rank_repr(6, omit_axes=["data"]) == "pipe_01-model_00"
    assert made.get_rank_repr(6, omit_axes=[], inner_sep=":", outer_sep="/") == "pipe:01/data:01/model:00"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""


def test_groups_are_those_of_the_layout():
    made = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=2)
    layout = made.layout()
    assert layout == Layout(pp=2, dp_shard=2, tp=3)
    for theirs, ours in {"pipe": "pp", "data": "dp_shard", "model": "tp"}.items():
        assert sorted(map(tuple, made.get_axis_comm_lists(theirs))) == sorted(layout.groups(ours))
    assert PipeDataParallelTopology(2, 4).layout() == Layout(pp=2, dp_shard=4)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ProcessTopology(["a", "b"], [2]), UsageError, "one size for each axis"),
        (lambda: ProcessTopology(["a", "a"], [2, 2]), UsageError, "every axis once"),
        (lambda: PipeDataParallelTopology(2, 0), LayoutError, "the axis data has 0 ranks"),
        (lambda: PipeDataParallelTopology(2, 2).get_rank(pipe=1), UsageError, "one place along each of pipe, data"),
        (lambda: PipeDataParallelTopology(2, 2).get_rank(pipe=2, data=0), LayoutError, r"outside of pipe=2 \* data=2"),
        (lambda: PipeDataParallelTopology(2, 2).get_coord(4), LayoutError, "no rank 4 among pipe=2"),
        (lambda: PipeDataParallelTopology(2, 2).filter_match(model=0), UsageError, "no axis 'model'"),
        (
            lambda: ProcessTopology(["data", "pipe"], [2, 2]).layout(),
            LayoutError,
            "data, pipe numbers ranks in another",
        ),
    ],
)
def test_wrong_uses(call, error, words):
    with pytest.raises(error, match=words):
        call()
