"""`mizzen.pipe`: models written as a list of layers, and schedules. A face: the work is elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mizzen.comm.grid import PipelineParallelGrid
from mizzen.config.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from mizzen.engine.engine import Engine
from mizzen.parallel.pipeline.module import LayeredModule, LayerSpec, PipelineOptions, TiedLayerSpec
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
        return len(self.bounds) - 1

    def partitions(self) -> list[int]:
        """Where the layers of each stage begin, and the end of the last."""
        return list(self.bounds)

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer."""
        return sum(layer_idx >= bound for bound in self.bounds[1:])

    def topology(self) -> Any:
        """The topology that the model was given."""
        return self.options.topology

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
