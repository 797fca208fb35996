"""A topology laid over live ranks, with its process groups: what hand-written pipelines take as an mpu."""

from collections.abc import Sequence
from typing import Any

from mizzen.comm import groups
from mizzen.config.topology import PipeDataParallelTopology, ProcessTopology
from mizzen.errors import LayoutError, UsageError


class PipelineParallelGrid:
    """Where this rank is in a topology, and its groups: along the pipeline, over data, and of one model.

    It answers the questions of Megatron's `mpu`. All ranks make it together, since groups are formed. A rank's `slice`
    shares its stage of the model, its `model` is every rank that has a part of the same copy.
    """

    global_rank: int
    world_size: int
    stage_id: int
    data_parallel_id: int

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        if not groups.is_initialized():
            raise UsageError("a PipelineParallelGrid forms process groups: call init_distributed() before it")
        self.global_rank = groups.get_rank(process_group)
        self.world_size = groups.get_world_size(process_group)
        self._topology = topology if topology is not None else default_topology(self.world_size)
        if self._topology.world_size() != self.world_size:
            raise LayoutError(
                f"the topology has {self._topology.world_size()} ranks ({self._topology.dims} along "
                f"{', '.join(self._topology.axes)}), but there are {self.world_size}"
            )
        self._members = groups.get_all_ranks_from_group(process_group)
        sizes = {axis: max(1, self._topology.get_dim(axis)) for axis in ("pipe", "data", "model")}
        self.pipe_parallel_size, self.data_parallel_size = sizes["pipe"], sizes["data"]
        self.model_parallel_size = self.slice_parallel_size = sizes["model"]
        self._coordinates: dict[str, int] = self._topology.get_coord(self.global_rank)._asdict()
        self.stage_id, self.data_parallel_id = self._coordinates.get("pipe", 0), self._coordinates.get("data", 0)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self._form_groups()

    def _form_groups(self) -> None:
        """Every rank forms all groups in one order, its own and those of others."""
        topology = self._topology
        one_model = [topology.get_axis_list("data", place) for place in range(topology.get_dim("data"))]
        every_rank = [list(range(self.world_size))]
        self.ds_model_proc_group, self._model_ranks = self._form(one_model or every_rank)
        self.ds_model_rank = self._model_ranks.index(self.global_rank)
        self.ds_model_world_size = len(self._model_ranks)
        alone = [[rank] for rank in range(self.world_size)]
        self.dp_groups = topology.get_axis_comm_lists("data") or alone
        self.dp_proc_group, self.dp_group = self._form(self.dp_groups)
        self.pipe_groups = topology.get_axis_comm_lists("pipe") or alone
        self.pp_proc_group, self.pp_group = self._form(self.pipe_groups)
        self.p2p_groups = [
            [rank, ring[(number + 1) % len(ring)]] for ring in self.pipe_groups for number, rank in enumerate(ring)
        ]
        self.model_groups = topology.get_axis_comm_lists("model") or alone
        self.slice_proc_group, self.slice_group = self._form(self.model_groups)

    def _form(self, partition: Sequence[Sequence[int]]) -> tuple[Any, list[int]]:
        """The group of this rank and its members, of groups that hold every rank once."""
        mine: tuple[Any, list[int]] | None = None
        for ranks in partition:
            formed = groups.new_group([self._members[rank] for rank in ranks])
            if self.global_rank in ranks:
                mine = formed, list(ranks)
        if mine is None:
            raise AssertionError(f"rank {self.global_rank} is in none of {partition}")
        return mine

    def topology(self) -> ProcessTopology:
        """The topology that this was made of."""
        return self._topology

    def get_global_rank(self) -> int:
        """The number of this rank among all."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """The pipeline stage of this rank."""
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        """Which of the copies of the model this rank belongs to."""
        return self.data_parallel_id

    def stage_to_global(self, stage_id: int, **coordinates: int) -> int:
        """The rank of another stage, at the place of this one along the other axes unless they are given."""
        return self._topology.get_rank(**{**self._coordinates, **coordinates, "pipe": stage_id})

    def get_pipe_parallel_rank(self) -> int:
        """The pipeline stage of this rank."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """How many stages there are."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """The group of the ranks of one pipeline."""
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        """Which of the copies of the model this rank belongs to."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """How many copies of the model there are."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """The group of the ranks that have the same part of the model."""
        return self.dp_proc_group

    def get_model_parallel_rank(self) -> int:
        """The place of this rank among those of one copy of the model."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """How many ranks have one copy of the model together."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """The group of the ranks that have one copy of the model together."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """The place of this rank among those that share its stage of the model."""
        return self._coordinates.get("model", 0)

    def get_slice_parallel_world_size(self) -> int:
        """How many ranks share a stage of the model."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """The group of the ranks that share a stage of the model."""
        return self.slice_proc_group


def default_topology(world: int) -> ProcessTopology:
    """Stages and copies for a number of ranks of which nobody has said more: its prime factors go to both in turn."""
    sizes, turn, left, factor = [1, 1], 0, world, 2
    while left > 1:
        while left % factor:
            factor += 1
        sizes[turn % 2] *= factor
        left //= factor
        turn += 1
    return PipeDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1])
