"""`zero_optimization`: how training state is sharded over the data-parallel ranks, and where it rests."""

from typing import Any, Literal

from mizzen.config.section import Count, Flag, Section, Text, deprecated, no_effect


def to_offload(value: Any) -> Any:
    """`cpu_offload: true` in today's words."""
    return {"device": "cpu"} if value else None


class OffloadConfig(Section):
    """A resting place for tensors outside the device."""

    device: Literal["none", "cpu", "nvme"] = "none"
    """Where the tensors rest; none is the same as leaving the section out."""
    nvme_path: Text | None = None
    """Folder on the NVMe drive, for `device: nvme`."""


class ZeroConfig(Section):
    """How training state is sharded over the data-parallel ranks."""

    stage: Literal[0, 1, 2, 3] = 0
    """0 replicates all, 1 shards optimizer states, 2 also gradients, 3 also parameters."""
    reduce_bucket_size: Count = 500_000_000
    """Largest number of elements reduced at once; small models get smaller buckets, so that reduction overlaps."""
    offload_optimizer: OffloadConfig | None = None
    """Resting place of the optimizer states; absent keeps them on the device."""
    allgather_partitions: Flag = no_effect(True, "updated parameters are always gathered by all-gather")
    """Chooses all-gather over broadcasts."""
    cpu_offload: Flag | None = deprecated("zero_optimization.offload_optimizer", to_offload)
    """Old name of `offload_optimizer`."""
