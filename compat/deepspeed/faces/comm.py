"""`deepspeed.comm` beyond torch.distributed: arguments of other names (both work), names and questions of its own.

The rest of it is `mizzen.comm`.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mizzen import comm
from mizzen.accelerator import get_accelerator
from mizzen.comm.report import comm_log
from mizzen.environment import World, environ


def _by_both_names(function: Callable[..., Any], **ours: str) -> Callable[..., Any]:
    """A collective whose arguments have further names, each with the name that it has at home."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("debug", sys._getframe(1).f_code.co_name)
        renamed = {name: kwargs.pop(theirs) for theirs, name in ours.items() if theirs in kwargs}
        return function(*args, **kwargs, **renamed)

    call.__module__ = __name__  # where pickling finds it; `wraps` has said that it is the one at home
    return call


all_gather_coalesced = _by_both_names(
    comm.all_gather_coalesced, output_tensors="output_tensor_lists", input_tensors="input_tensor_list"
)
all_gather_into_tensor = _by_both_names(comm.all_gather_into_tensor, tensor="input_tensor")
all_to_all_single = _by_both_names(comm.all_to_all_single, tensor="input")
reduce_scatter_tensor = _by_both_names(comm.reduce_scatter_tensor, output_tensor="output", tensor="input")


def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **extras: Any,
) -> Any:
    """`all_reduce`; tensor-parallel inference calls it by this name."""
    return comm.all_reduce(tensor, op, group, async_op, **extras)


def allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False, debug: str = ""
) -> Any:
    """`all_gather_into_tensor`, under an older name."""
    return comm.all_gather_into_tensor(output_tensor, input_tensor, group, async_op, debug=debug)


def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **extras: Any,
) -> Any:
    """`reduce_scatter_tensor`, under an older name."""
    return comm.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, **extras)


def configure(deepspeed_config: Any = None, *args: Any, config: Any = None, **kwargs: Any) -> None:
    """Set what is logged: from a configuration, then what is given by name."""
    comm.configure(deepspeed_config if config is None else config, *args, **kwargs)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of a place in a group, of the first unless another is named."""
    return comm.get_global_rank(group, group_rank)


class ReduceOp(torch.distributed.ReduceOp):
    """torch's, and a name that stands for none of them."""

    UNUSED: Any = "unused"


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """A DeviceMesh over the accelerator of this process."""
    return init_device_mesh(get_accelerator().name, mesh_shape, mesh_dim_names=mesh_dim_names)


def enable_symm_mem_for_group(group_name: str) -> None:
    """Nothing to do: torch makes symmetric memory usable in every group by itself."""


def get_local_rank_from_launcher() -> int:
    """The rank on this host: as it has joined, or from the environment."""
    return comm.get_local_rank()


def get_world_rank_from_launcher() -> int:
    """The rank, from the environment."""
    return World.detect(environ()).rank


def get_world_size_from_launcher() -> int:
    """The number of ranks, from the environment."""
    return World.detect(environ()).size


def has_all_gather_into_tensor() -> bool:
    """True with every torch that mizzen supports."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """True with every torch that mizzen supports."""
    return True


def has_all_reduce_coalesced() -> bool:
    """True: it is mizzen's own."""
    return True


def has_coalescing_manager() -> bool:
    """False: several operations are under way at the same time without it."""
    return False


def has_comm_data() -> bool:
    """Whether anything has been measured."""
    return get_comm_operation_count() > 0


def get_comm_operation_count() -> int:
    """How many operations have been measured."""
    return sum(len(measured.latencies) for sizes in comm_log().records.values() for measured in sizes.values())


def get_logged_comm_ops() -> list[str]:
    """The names of the operations that have been measured."""
    return list(comm_log().records)
