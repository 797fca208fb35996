"""`deepspeed.utils.groups`: groups of ranks. All ranks are data-parallel until another parallelism is built."""

from typing import Any

from torch.distributed import ProcessGroup

from mizzen.comm import groups
from mizzen.errors import NotBuilt


def _world() -> ProcessGroup | None:
    found: ProcessGroup | None = groups.get_world_group()
    return found


def _size() -> int:
    return groups.get_world_size() if groups.is_initialized() else 1


def _rank() -> int:
    return groups.get_rank() if groups.is_initialized() else 0


def _get_data_parallel_group() -> ProcessGroup | None:
    return _world()


def _get_data_parallel_world_size() -> int:
    return _size()


def _get_data_parallel_rank() -> int:
    return _rank()


def _get_model_parallel_group() -> ProcessGroup | None:
    return None


def _get_model_parallel_world_size() -> int:
    return 1


def _get_model_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_group() -> ProcessGroup | None:
    return None


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_broadcast_src_rank() -> int:
    return 0


def _get_local_all_to_all_group() -> Any:
    return _absent("_get_local_all_to_all_group")


def _get_expert_parallel_group(group_name: str) -> Any:
    return _absent("_get_expert_parallel_group")


def _get_expert_parallel_world_size(group_name: str) -> Any:
    return _absent("_get_expert_parallel_world_size")


def _get_expert_parallel_rank(group_name: str) -> Any:
    return _absent("_get_expert_parallel_rank")


def _get_expert_data_parallel_group(group_name: str) -> Any:
    return _absent("_get_expert_data_parallel_group")


def _get_max_expert_size() -> int:
    return 1


def _get_max_expert_size_name() -> str:
    return "ep_size_1"


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Nothing, unless experts are to be spread over ranks."""
    if ep_size > 1:
        _absent(f"initialize(ep_size={ep_size})")


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_group = get_tensor_model_parallel_group = _get_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_model_parallel_rank
_get_sequence_data_parallel_group = _get_data_parallel_group
_get_sequence_data_parallel_world_size = _get_data_parallel_world_size
_get_sequence_data_parallel_rank = _get_data_parallel_rank
get_tensor_model_parallel_src_rank = _get_broadcast_src_rank
_get_tensor_model_parallel_group = _get_model_parallel_group
_get_tensor_model_parallel_world_size = _get_model_parallel_world_size


def _absent(name: str) -> Any:
    raise NotBuilt(f"deepspeed.utils.groups.{name} waits for a capability that is not built yet: mixture of experts")


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(_size()))


__all__ = [
    "_get_broadcast_src_rank",
    "_get_data_parallel_group",
    "_get_data_parallel_group_ranks",
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_expert_data_parallel_group",
    "_get_expert_parallel_group",
    "_get_expert_parallel_rank",
    "_get_expert_parallel_world_size",
    "_get_local_all_to_all_group",
    "_get_max_expert_size",
    "_get_max_expert_size_name",
    "_get_model_parallel_group",
    "_get_model_parallel_rank",
    "_get_model_parallel_world_size",
    "_get_sequence_data_parallel_group",
    "_get_sequence_data_parallel_rank",
    "_get_sequence_data_parallel_world_size",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
    "_get_tensor_model_parallel_group",
    "_get_tensor_model_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]
