"""Megatron-style objects: what ours answers, and what is made of a foreign one."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mizzen.comm import mesh as module
from mizzen.comm.mesh import Mesh, Mpu, layout_from_mpu, mesh_from_mpu
from mizzen.config.layout import Layout
from mizzen.errors import LayoutError, UsageError


class StandIn(Mesh):
    """A mesh without ranks: a group is the tuple of its ranks."""

    __slots__ = ()

    def group(self, *names):
        return self.ranks(*names)


def mpu_of(rank, layout):
    return Mpu(StandIn(layout, None, None, rank, None, {}))


def foreign(**degrees):
    """An object that has all three methods of each role."""
    methods = {}
    for role, size in degrees.items():
        for question, answer in (("rank", 0), ("group", None), ("world_size", size)):
            methods[f"get_{role}_parallel_{question}"] = lambda answer=answer: answer
    return SimpleNamespace(**methods)


def test_answers_from_the_mesh():
    mpu = mpu_of(13, Layout.fit(16, tp=2, pp=2, sp=2, dp_replicate=2, ep=2))
    assert (mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()) == (1, 2)
    assert mpu.get_tensor_model_parallel_group() == mpu.get_slice_parallel_group() == (12, 13)
    assert mpu.get_tensor_model_parallel_src_rank() == 12
    assert (mpu.get_pipeline_model_parallel_rank(), mpu.get_pipe_parallel_world_size()) == (1, 2)
    assert mpu.get_data_parallel_group() == (9, 13) and mpu.get_data_parallel_rank() == 1
    assert mpu.get_model_parallel_group() == (4, 5, 12, 13) and mpu.get_model_parallel_world_size() == 4
    assert mpu.get_sequence_parallel_group() == (13, 15) and mpu.get_sequence_parallel_rank() == 0
    assert mpu.get_sequence_data_parallel_world_size() == 4
    assert mpu.get_expert_model_parallel_world_size() == 2


def test_unknown_questions_are_attribute_errors():
    mpu = mpu_of(0, Layout())
    assert not hasattr(mpu, "get_embedding_group") and not hasattr(mpu, "get_tensor_model_parallel_colour")
    with pytest.raises(AttributeError, match="get_cats_parallel_rank.*ROLE one of data, tensor_model"):
        mpu.get_cats_parallel_rank()
    assert all(callable(getattr(mpu, name)) for name in dir(mpu)) and len(dir(mpu)) > 40


@pytest.mark.parametrize(
    "layout",
    [
        Layout.fit(16, tp=2, pp=2, sp=2),
        Layout.fit(8, tp=4),
        Layout.fit(8, pp=4),
        Layout.fit(8, sp=8),
        Layout.fit(8, ep=4),
    ],
    ids=str,
)
def test_there_and_back(layout):
    assert layout_from_mpu(mpu_of(3, layout), layout.world) == layout


@pytest.mark.parametrize(
    ("mpu", "layout"),
    [
        (foreign(data=4, model=2), Layout.fit(8, tp=2)),
        (foreign(data=2, model=4, pipe=2), Layout.fit(8, tp=2, pp=2)),
        (foreign(data=2, slice=2, pipe=2, model=4), Layout.fit(8, tp=2, pp=2)),
        (foreign(sequence=2), Layout.fit(8, sp=2)),
        (foreign(data=2, tensor_model=2, pipeline_model=1, context=2), Layout.fit(8, tp=2, sp=2)),
    ],
)
def test_dialects(mpu, layout):
    assert layout_from_mpu(mpu, 8) == layout


def without(mpu, name):
    delattr(mpu, name)
    return mpu


@pytest.mark.parametrize(
    ("mpu", "error", "message"),
    [
        (object(), UsageError, "none of get_tensor_model_parallel_world_size, get_model_parallel_world_size"),
        (foreign(model=2), UsageError, "the mpu object has no get_data_parallel_world_size"),
        (
            without(foreign(data=4, model=2), "get_model_parallel_group"),
            UsageError,
            "has get_model_parallel_world_size, but not get_model_parallel_group",
        ),
        (foreign(data=4, model="2"), UsageError, "get_model_parallel_world_size() of the mpu object gave '2'"),
        (foreign(data=4, model=True), UsageError, "gave True, not a number of ranks"),
        (foreign(data=3, model=2), LayoutError, "says 3 data-parallel ranks, but pp=1 sp=1 tp=2 leave 4 of 8"),
        (foreign(data=1, model=3), LayoutError, "world size 8 is not a multiple of pp*sp*tp = 1*1*3 = 3"),
    ],
)
def test_what_is_missing_or_wrong_is_named(mpu, error, message):
    with pytest.raises(error) as raised:
        layout_from_mpu(mpu, 8)
    assert message in str(raised.value)


@pytest.fixture
def ranks(monkeypatch):
    """Rank 1 of 4, without ranks."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", list)
    monkeypatch.setattr(module.Mesh, "build", classmethod(lambda cls, layout, *, device_type: (layout, device_type)))


def test_a_mesh_over_the_same_ranks(ranks):
    mpu = mpu_of(1, Layout.fit(4, tp=2))
    assert mesh_from_mpu(mpu, device_type="cpu") == (Layout.fit(4, tp=2), "cpu")


def test_ranks_in_another_order_are_refused(ranks):
    mpu = foreign(data=2, tensor_model=2)
    mpu.get_data_parallel_group = lambda: (0, 1)
    mpu.get_tensor_model_parallel_group = lambda: (1, 3)
    with pytest.raises(LayoutError) as error:
        mesh_from_mpu(mpu, device_type="cpu")
    assert "get_data_parallel_group() of the mpu object has ranks (0, 1) on rank 1, where we would have (1, 3)" in str(
        error.value
    )
