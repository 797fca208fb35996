"""`checkpoint`: how training state is saved, kept and loaded. Where and when is the caller's business."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from mizzen.config.section import (
    Count,
    Flag,
    Positive,
    Section,
    Text,
    capitalized,
    deprecated,
    lower,
    no_effect,
    refused,
    section,
)


class ParallelWriteConfig(Section):
    """Who writes what of a pipelined model."""

    pipeline_stage: Flag = no_effect(False, "every rank always writes its own share")
    """Spread the layers of a stage over its data-parallel ranks."""


class WriterConfig(Section):
    """The file writer of old checkpoints."""

    type: Annotated[Literal["mock", "python", "fast"], BeforeValidator(lower)] = no_effect(
        "fast", "there is one writer"
    )
    """Which writer is used."""
    io_buffer_size: Count = no_effect(67_108_864, "tensors are written from where they lie")
    """Bytes of a write buffer."""
    io_buffer_double: Flag = no_effect(True, "tensors are written from where they lie")
    """Fill one buffer while the other is written."""
    show_statistics: Flag = no_effect(False, "a save reports its own time and size")
    """Print the speed of each write."""
    data_parallel: Annotated[Literal["replica", "socket", "machine"] | None, BeforeValidator(lower)] = no_effect(
        None, "every rank always writes its own share"
    )
    """Which ranks share the writing of replicated state."""
    io_multiplier: Positive = no_effect(1.0, "every rank always writes its own share")
    """Writers per rank."""
    decoupled: Flag | None = deprecated("checkpoint.async_save")
    """Old name of `checkpoint.async_save`."""


class CheckpointConfig(Section):
    """How training state is saved, kept and loaded."""

    tag_validation: Annotated[Literal["Warn", "Ignore", "Fail"], BeforeValidator(capitalized)] = "Warn"
    """What happens when ranks are given different tags or folders: all take the first rank's, or none goes on."""
    use_node_local_storage: Flag = False
    """Save on the local drive of each node, for clusters without a shared filesystem."""
    dir: Text | None = None
    """Folder of saves and loads that name none; whether it has room is looked at when a run starts."""
    weights: Text | None = None
    """Folder or file that fills a model on the meta device; absent: where transformers has its configuration from."""
    async_save: Flag = False
    """Return from a save once the state is copied, and write it while training goes on."""
    async_policy: Literal["wait", "refuse"] = "wait"
    """What a save does while the one before is still being written."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """When a save fails, such as on a full disk: raise the error, or say so and train on with the older checkpoints."""
    keep_last: Count | None = None
    """Newest checkpoints to keep; older ones are deleted after a save. Absent keeps all."""
    keep_every: Count | None = None
    """Checkpoints at a multiple of so many steps are kept in spite of `keep_last`."""
    on_corrupt: Literal["fail", "previous"] = "fail"
    """When the latest checkpoint is damaged: name the damage, or load the newest undamaged one and say so."""
    pickled_client_state: Flag = False
    """Keep client state that JSON cannot hold as pickle, and read such: it runs what the folder's writer wants."""
    writer: WriterConfig | None = no_effect(None, "there is one writer, which is safe and fast")
    """The file writer of old checkpoints."""
    load_universal: Flag = no_effect(False, "every checkpoint loads at any layout, without conversion")
    """Load a checkpoint that was converted for any layout."""
    checkpoint_serialization: Flag = no_effect(True, "checkpoints hold no serialized objects")
    """Serialize objects into the checkpoint."""
    parallel_write: ParallelWriteConfig = section(ParallelWriteConfig)
    """Who writes what of a pipelined model."""


class NebulaConfig(Section):
    """Checkpoints by Azure's Nebula service."""

    enabled: Flag = refused(False, "the service is not supported; use checkpoint.async_save")
    """Save through the service."""
    persistent_storage_path: Text | None = None
    """Folder of the saved checkpoints."""
    persistent_time_interval: Count = 100
    """Seconds between saves to that folder."""
    num_of_version_in_retention: Count = 2
    """Checkpoints to keep."""
    enable_nebula_load: Flag = True
    """Load through the service."""
    nebula_load_path: Text | None = None
    """Folder to load from."""
