"""`mizzen.checkpointing`: activation checkpointing for models that call it themselves. A face: the work is elsewhere.

For a model that does not, `activation_checkpointing.mode` in the configuration computes its blocks again.
"""

from collections.abc import Callable
from typing import Any

from mizzen.config.load import ConfigSource, load_section
from mizzen.config.schema import Config
from mizzen.rewrite.recompute import Checkpointing, Keeping, RandomStreams, replayed


def configure(
    mpu_: Any = None,
    deepspeed_config: ConfigSource | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how `checkpoint` keeps inputs: as the section `activation_checkpointing` says, and as arguments say."""
    if isinstance(deepspeed_config, Config):
        config = deepspeed_config
    else:
        config = load_section(deepspeed_config or {}, "activation_checkpointing")
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    Checkpointing.current().configure(config.activation_checkpointing, given, mpu_)


def is_configured() -> bool:
    """Whether `configure` was called, or an engine's configuration has said how inputs are kept."""
    return Checkpointing.current().keeping is not None


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """What the function returns; backward calls it again instead of keeping what it needs of it.

    `use_reentrant` changes nothing: gradients of a call that re-enters autograd would come twice, and never overlap.
    """
    return replayed(function, args, kwargs, Checkpointing.current().keeping or Keeping())


non_reentrant_checkpoint = checkpoint


def reset() -> None:
    """Nothing: there are no buffers that a forward without a backward would leave full."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Ask for inputs in parts, one per tensor-parallel rank."""
    Checkpointing.current().partition(partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Nothing: there are no buffers whose number depends on it."""


def get_cuda_rng_tracker() -> RandomStreams:
    """The named random streams of the device; `fork()` draws from the one of this tensor-parallel rank."""
    return Checkpointing.current().streams


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device alike on all tensor-parallel ranks, and the stream of `get_cuda_rng_tracker` differently."""
    Checkpointing.current().seed(seed)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed only the stream of `get_cuda_rng_tracker` anew."""
    Checkpointing.current().reseed(seed)


__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]
