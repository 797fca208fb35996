"""`mizzen.pipe`: models written as a list of layers, and schedules. A face: the work is elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mizzen.comm.grid import PipelineParallelGrid
from mizzen.config.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from mizzen.engine.engine import Engine
from mizzen.engine.layer_files import (
    layer_path,
    layer_paths,
    load_layers,
    save_layers,
    sum_tied_gradients,
    tied_weights,
)
from mizzen.parallel.pipeline.module import LayeredModule, LayerSpec, PipelineOptions, TiedLayerSpec, current_world
from mizzen.parallel.pipeline.schedule import Instruction, InstructionKind, Schedule
from mizzen.parallel.pipeline.tables import make_schedule
from mizzen.rewrite.recompute import Checkpointing, Keeping, replayed

PipelineEngine = Engine
"""An engine of a pipelined model is the same engine, with another runner."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns; backward calls it again, as the section `activation_checkpointing` says."""
    return replayed(function, args, {}, Checkpointing.current().keeping or Keeping())


class PipelineModule(LayeredModule):
    """A model as a list of layers: `LayerSpec`, `TiedLayerSpec`, modules, functions, or an nn.Sequential of modules.

    Each takes one input, which may be a tuple, and gives its output to the next. A stage builds its own layers only. A
    batch is `(inputs, labels)`: `loss_fn(output, labels)` is the loss, or the output of the last layer without it.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        example_inputs: Any = None,
    ) -> None:
        """`dynamic_shape` changes nothing: shapes may differ from batch to batch anyhow.

        `example_inputs` are what the first layer takes, for a `partition_method` of 'profile' to measure layers with.
        """
        super().__init__(
            layers,
            PipelineOptions(
                num_stages=num_stages,
                topology=topology,
                loss_fn=loss_fn,
                seed_layers=seed_layers,
                seed_fn=seed_fn,
                base_seed=base_seed,
                partition_method=partition_method,
                activation_checkpoint_interval=activation_checkpoint_interval,
                activation_checkpoint_func=activation_checkpoint_func,
                checkpointable_layers=checkpointable_layers,
                example_inputs=example_inputs,
            ),
        )

    def num_pipeline_stages(self) -> int:
        """How many stages there are."""
        return self.num_stages

    @property
    def num_stages(self) -> int:
        """How many stages there are; with several chunks on each, as many as were asked for."""
        return len(self.bounds) - 1 if self.bounds else self.options.stages or 1

    @property
    def global_rank(self) -> int:
        """The number of this rank among all."""
        return current_world().rank

    @property
    def stage_id(self) -> int:
        """The stage of this rank."""
        return self.global_rank // self._ranks_of_stage

    def partitions(self) -> list[int]:
        """Where the layers of each stage begin, and the end of the last."""
        return list(self.bounds)

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer."""
        return sum(layer_idx >= bound for bound in self.bounds[1:])

    def topology(self) -> ProcessTopology:
        """The topology that the model was given, or that of its stages, with data ranks for all other ranks."""
        given: ProcessTopology | None = self.options.topology
        return given or PipeDataParallelTopology(self.num_stages, self._ranks_of_stage)

    @property
    def _ranks_of_stage(self) -> int:
        """How many ranks have a stage; 1 where a process looks at a model for more ranks than it has."""
        return max(1, current_world().size // self.num_stages)

    def mpu(self) -> PipelineParallelGrid:
        """The ranks of the topology with their groups, which all ranks form together at the first call."""
        self._grid: PipelineParallelGrid = vars(self).get("_grid") or PipelineParallelGrid(self.topology())
        return self._grid

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        """Where the files of this rank's part of a model begin, by the place of the rank."""
        return str(Path(checkpoints_path) / tag / self.topology().get_rank_repr(self.global_rank, omit_axes=["data"]))

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file of a layer of this rank's stage, counted from the first of it."""
        return layer_path(ckpt_dir, self.own_numbers()[local_layer_idx], self.topology(), self.global_rank)

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """The files of such a layer that are there: several where it is cut over ranks."""
        return layer_paths(ckpt_dir, self.own_numbers()[local_layer_idx])

    def save_state_dict(
        self, save_dir: str, checkpoint_engine: Any = None, exclude_frozen_params: bool = False
    ) -> None:
        """Write a file for each layer of this rank's stage; the first of its data ranks writes. No optimizer states.

        `checkpoint_engine.save(state, path)` writes them where one is given.
        """
        kept = not exclude_frozen_params
        save_layers(self, save_dir, self.topology(), self.global_rank, checkpoint_engine, has_frozen=kept)

    def load_state_dir(self, load_dir: str, checkpoint_engine: Any = None, strict: bool = True) -> None:
        """Read the files of the layers of this rank's stage; every rank does so.

        `checkpoint_engine.load(path, map_location=...)` reads them where one is given.
        """
        load_layers(self, load_dir, self.topology(), self.global_rank, checkpoint_engine, strict=strict)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """The weights here that layers of other stages share, each with the group of the ranks that have it.

        All ranks make the first call together: it forms the groups.
        """
        if (found := vars(self).get("_tied_groups")) is None:
            found = self._tied_groups = tied_weights(self, self.topology(), self.global_rank)
        return list(found)

    def allreduce_tied_weight_gradients(self) -> None:
        """Add up the gradients of such weights over their groups: for a loop of one's own, since engines do that."""
        sum_tied_gradients(self.get_tied_weights_and_groups())

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer that is here, with the arguments of `torch.compile`; the loop over them stays as it is."""
        for path in dict.fromkeys(self.layer_list.layers[number].path for number in self.own_numbers()):
            if path:
                self.get_submodule(path).compile(*args, **kwargs)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Compute so many layers at a time again in backward; 0 keeps everything."""
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Losses to report beside the one that is trained; none, unless a subclass has some."""
        return None


__all__ = [
    "Instruction",
    "InstructionKind",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineEngine",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "Schedule",
    "TiedLayerSpec",
    "make_schedule",
]
