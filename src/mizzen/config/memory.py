"""What is not kept on the device: `activation_checkpointing`, and `aio`, the reads and writes of an NVMe drive."""

from mizzen.config.section import Section, deprecated, no_effect
from mizzen.config.values import Count, Flag


class ActivationCheckpointingConfig(Section):
    """How activations inside `checkpointing.checkpoint` are kept until the backward pass."""

    partition_activations: Flag = False
    """Keep each activation once per tensor-parallel group, in parts."""
    cpu_checkpointing: Flag = False
    """Keep activations in host memory."""
    profile: Flag = False
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
