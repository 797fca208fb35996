"""`deepspeed.comm` where its arguments have other names than torch's: both names work. The rest is `mizzen.comm`."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed

from mizzen import comm


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


def configure(deepspeed_config: Any = None, *args: Any, config: Any = None, **kwargs: Any) -> None:
    """Set what is logged: from a configuration, then what is given by name."""
    comm.configure(deepspeed_config if config is None else config, *args, **kwargs)


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of a place in a group, of the first unless another is named."""
    return comm.get_global_rank(group, group_rank)


class ReduceOp(torch.distributed.ReduceOp):
    """torch's, and a name that stands for none of them."""

    UNUSED: Any = "unused"
