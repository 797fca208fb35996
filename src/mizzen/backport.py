"""All that differs between the torch versions that we support (2.11 to 2.15), each behind the newest name.

A function goes when the oldest version that needs it does. torch is imported on use.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from mizzen.errors import NotBuilt


def all_gather_single() -> Callable[..., Any]:
    """`torch.distributed.all_gather_single`; before 2.13, whose warnings it avoids, `all_gather_into_tensor`."""
    import torch.distributed as dist

    found: Callable[..., Any] = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor
    return found


def reduce_scatter_single() -> Callable[..., Any]:
    """`torch.distributed.reduce_scatter_single`; before 2.13, whose warnings it avoids, `reduce_scatter_tensor`."""
    import torch.distributed as dist

    found: Callable[..., Any] = vars(dist).get("reduce_scatter_single") or dist.reduce_scatter_tensor
    return found


def set_timeout() -> Callable[..., Any]:
    """`torch.distributed.set_timeout`; before 2.15, whose warnings it avoids, the private function it grew out of."""
    import torch.distributed as dist

    if "set_timeout" in vars(dist):
        newest: Callable[..., Any] = vars(dist)["set_timeout"]
        return newest
    from torch.distributed.distributed_c10d import _set_pg_timeout

    return _set_pg_timeout


def check_options(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse what a function of this torch has not yet.

    2.13 brought `sort_ranks` of `new_group` and `timeout` of `barrier`, 2.15 `weights_only` of objects.
    """
    if missing := options.keys() - signature(function).parameters.keys():
        import torch

        raise NotBuilt(f"torch {torch.__version__} has no {min(missing)}= of {function.__name__}: leave it out")


def gloo_exchanges_lists() -> bool:
    """Whether gloo can do `all_to_all` of lists of tensors; 2.11 refuses it and has only `all_to_all_single`."""
    import torch.distributed as dist

    return "all_gather_single" in vars(dist)
