"""A topology over live ranks: groups, and the grid as an mpu of an engine."""

import pytest
import torch
import torch.distributed as dist

import mizzen.comm as comm
from mizzen.comm.grid import PipelineParallelGrid, default_topology
from mizzen.comm.mesh import check_groups, layout_from_mpu
from mizzen.config.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from mizzen.errors import LayoutError, UsageError


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MIZZEN_ACCELERATOR", "cpu")


def answers():
    comm.init_distributed("gloo", verbose=False)
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    rank = dist.get_rank()
    for group, ranks in (
        (grid.get_pipe_parallel_group(), grid.pp_group),
        (grid.get_data_parallel_group(), grid.dp_group),
        (grid.get_slice_parallel_group(), grid.slice_group),
        (grid.get_model_parallel_group(), [0, 1, 2, 3]),
    ):
        value = torch.tensor([float(rank)])
        comm.all_reduce(value, group=group)
        assert value.item() == sum(ranks) and dist.get_process_group_ranks(group) == ranks
    layout = layout_from_mpu(grid, 4)
    check_groups(grid, layout, rank)
    with pytest.raises(LayoutError, match="the topology has 6 ranks .* but there are 4"):
        PipelineParallelGrid(PipeDataParallelTopology(2, 3))
    return {
        "layout": (layout.pp, layout.dp, layout.tp),
        "stage": (grid.get_stage_id(), grid.is_first_stage, grid.is_last_stage, grid.get_pipe_parallel_world_size()),
        "data": (grid.get_data_parallel_rank(), grid.get_data_parallel_world_size(), grid.get_data_parallel_id()),
        "slice": (grid.get_slice_parallel_rank(), grid.get_slice_parallel_world_size()),
        "model": (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()),
        "other": [grid.stage_to_global(stage) for stage in (0, 1)],
        "pairs": grid.p2p_groups,
        "rank": grid.get_global_rank(),
    }


def test_a_grid_of_stages_and_slices(world):
    for rank, found in enumerate(world(4).run(answers)):
        stage, part = divmod(rank, 2)
        assert found == {
            "layout": (2, 1, 2),
            "stage": (stage, stage == 0, stage == 1, 2),
            "data": (0, 1, 0),
            "slice": (part, 2),
            "model": (rank, 4),
            "other": [part, part + 2],
            "pairs": [[0, 2], [2, 0], [1, 3], [3, 1]],
            "rank": rank,
        }


def test_a_grid_needs_ranks():
    with pytest.raises(UsageError, match=r"call init_distributed\(\) before it"):
        PipelineParallelGrid(PipeDataParallelTopology(1, 1))


def test_stages_and_copies_of_ranks_that_nobody_has_dealt_out():
    dims = {world: default_topology(world).dims for world in (1, 2, 4, 6, 8, 7)}
    assert dims == {1: [1, 1], 2: [2, 1], 4: [2, 2], 6: [2, 3], 8: [4, 2], 7: [7, 1]}
