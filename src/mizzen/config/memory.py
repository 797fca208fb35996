"""What is not kept on the device: `activation_checkpointing`, and `aio`, the reads and writes of an NVMe drive."""

from typing import Literal

from mizzen.config.section import Count, Flag, Name, Section, deprecated, no_effect


class ActivationCheckpointingConfig(Section):
    """What backward computes again instead of finding it kept, and where the inputs that it needs for that rest."""

    mode: Literal["off", "full", "selective"] = "off"
    """What backward computes again: nothing, whole blocks, or all of a block but matrix products and attention."""
    every: Count = 1
    """Compute only every n-th block again."""
    blocks: tuple[Name, ...] = ()
    """Classes or paths of the modules to compute again; absent takes the repeated blocks of the model."""

    partition_activations: Flag = False
    """Keep each input once per tensor-parallel group, in parts; one rank has nothing to split."""
    cpu_checkpointing: Flag = False
    """Keep the inputs of blocks that are computed again, and of `checkpointing.checkpoint`, in host memory."""
    profile: Flag = no_effect(False, "wall_clock_breakdown times a step, torch.profiler what is inside")
    """Time the forward and backward passes of checkpointed blocks."""
    number_checkpoints: Count | None = no_effect(None, "buffers need no count")
    """Number of checkpoints, for the contiguous buffer."""
    contiguous_memory_optimization: Flag = no_effect(False, "torch's allocator keeps memory in one piece")
    """Keep activations in one contiguous buffer."""
    synchronize_checkpoint_boundary: Flag = no_effect(False, "streams are ordered by events")
    """Synchronize the device around each checkpoint."""


class AioConfig(Section):
    """How tensors travel between host memory and NVMe."""

    block_size: Count = 1_048_576
    """Bytes of one read or write."""
    queue_depth: Count = 8
    """Reads and writes under way at once."""
    intra_op_parallelism: Count = 1
    """Threads that work on one tensor."""
    single_submit: Flag = no_effect(False, "threads read and write directly, without libaio")
    """Submit requests one by one."""
    overlap_events: Flag = no_effect(True, "threads read and write directly, without libaio")
    """Submit requests while others complete."""
    use_gds: Flag = no_effect(False, "tensors pass through pinned host memory")
    """Read into device memory by GPUDirect Storage."""
    thread_count: Count | None = deprecated("aio.intra_op_parallelism")
    """Old name of `intra_op_parallelism`."""
