"""`deepspeed.utils.groups`: groups of ranks, by the mesh of the engine that was made last."""

from typing import Any

from torch.distributed import ProcessGroup

from mizzen.comm import groups
from mizzen.comm.mesh import Mesh, Mpu
from mizzen.errors import NotBuilt


def _ask(question: str) -> Any:
    """What the mesh of the engine that was made last answers; before there is one, all ranks are data-parallel."""
    mesh = Mesh.current()
    if mesh is not None:
        return getattr(Mpu(mesh), question)()
    is_of_all = "data" in question
    if question.endswith("_group"):
        return groups.get_world_group() if is_of_all else None
    if question.endswith("_world_size"):
        return groups.get_world_size() if is_of_all and groups.is_initialized() else 1
    return groups.get_rank() if is_of_all and groups.is_initialized() else 0


def _get_data_parallel_group() -> ProcessGroup | None:
    found: ProcessGroup | None = _ask("get_data_parallel_group")
    return found


def _get_data_parallel_world_size() -> int:
    return int(_ask("get_data_parallel_world_size"))


def _get_data_parallel_rank() -> int:
    return int(_ask("get_data_parallel_rank"))


def _get_model_parallel_group() -> ProcessGroup | None:
    return _alone_is_none("tensor_model")


def _get_model_parallel_world_size() -> int:
    return int(_ask("get_tensor_model_parallel_world_size"))


def _get_model_parallel_rank() -> int:
    return int(_ask("get_tensor_model_parallel_rank"))


def _get_sequence_parallel_group() -> ProcessGroup | None:
    return _alone_is_none("sequence")


def _get_sequence_parallel_world_size() -> int:
    return int(_ask("get_sequence_parallel_world_size"))


def _get_sequence_parallel_rank() -> int:
    return int(_ask("get_sequence_parallel_rank"))


def _alone_is_none(role: str) -> ProcessGroup | None:
    """The group of a role, which callers take for absent where one rank has it alone."""
    found: ProcessGroup | None = _ask(f"get_{role}_parallel_group")
    return found if _ask(f"get_{role}_parallel_world_size") > 1 else None


def _get_broadcast_src_rank() -> int:
    mesh = Mesh.current()
    return int(Mpu(mesh).get_tensor_model_parallel_src_rank()) if mesh is not None and mesh.layout.tp > 1 else 0


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


def _get_sequence_data_parallel_group() -> ProcessGroup | None:
    found: ProcessGroup | None = _ask("get_sequence_data_parallel_group")
    return found


def _get_sequence_data_parallel_world_size() -> int:
    return int(_ask("get_sequence_data_parallel_world_size"))


def _get_sequence_data_parallel_rank() -> int:
    return int(_ask("get_sequence_data_parallel_rank"))


get_tensor_model_parallel_src_rank = _get_broadcast_src_rank
_get_tensor_model_parallel_group = _get_model_parallel_group
_get_tensor_model_parallel_world_size = _get_model_parallel_world_size


def _absent(name: str) -> Any:
    raise NotBuilt(f"deepspeed.utils.groups.{name} waits for a capability that is not built yet: mixture of experts")


def _get_data_parallel_group_ranks() -> list[int]:
    mesh = Mesh.current()
    if mesh is None:
        return list(range(_get_data_parallel_world_size()))
    return list(groups.get_all_ranks_from_group(_get_data_parallel_group()))


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
