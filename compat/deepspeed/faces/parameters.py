"""Facts that clients read from parameters under ZeRO-3: `ds_shape`, `ds_numel`, `ds_status` and their kin.

[Note: properties of every tensor]
mizzen hangs nothing on tensors, and objects that stand for a parameter come and go with gathering. So the facts are
properties that ask mizzen when they are read. They are put on `torch.Tensor` once stage 3 is in use in this process,
and only parameters answer: `hasattr(tensor, "ds_numel")` is false for all else, as clients expect.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mizzen.ambient import AMBIENT
from mizzen.parallel.zero.full.facts import facts_of
from mizzen.parallel.zero.full.live import local
from mizzen.parallel.zero.full.sharded import Moved


class ZeroParamStatus(Enum):
    """Where the values of a parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """How a parameter lies over the ranks."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class DeepSpeedTensorOverride(Enum):
    """What `zero.Init` changes of tensors that are made inside."""

    dtype = 1
    device = 2


def _status(parameter: Tensor) -> ZeroParamStatus:
    is_sharded = facts_of(parameter).status == "sharded"
    return ZeroParamStatus.NOT_AVAILABLE if is_sharded else ZeroParamStatus.AVAILABLE


def _shard(parameter: Tensor) -> Tensor:
    return local(parameter) if isinstance(parameter, DTensor) else parameter.detach()


def _number(parameter: Tensor) -> int:
    """The same for all objects that stand for a parameter, and no other one's as long as it lives."""
    owner = AMBIENT.owners.get(parameter)
    return id(parameter if owner is None else owner)


FACTS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "ds_id": _number,
    "ds_shape": lambda parameter: torch.Size(facts_of(parameter).shape),
    "ds_numel": lambda parameter: facts_of(parameter).numel,
    "ds_status": _status,
    "ds_tensor": _shard,
    "ds_persist": lambda parameter: facts_of(parameter).status == "whole",
    "ds_active_sub_modules": lambda parameter: set(),
    "ds_process_group": lambda parameter: None,
    "partition_numel": lambda parameter: lambda: facts_of(parameter).local_numel,
    "ds_summary": lambda parameter: lambda **_: {"shape": facts_of(parameter).shape, "status": _status(parameter).name},
}
"""Attribute -> what it says of a parameter."""


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter is sharded or, once stage 3 is in use, an engine's; one that a script has made is neither."""
    if not isinstance(parameter, Tensor) or not hasattr(parameter, "ds_id"):
        return False
    return isinstance(parameter, DTensor | Moved) or AMBIENT.owners.get(parameter) is not None


def install() -> None:
    """See [Note: properties of every tensor]."""
    for name, read in FACTS.items():
        setattr(Tensor, name, _Fact(name, read))


class _Fact(property):
    def __init__(self, name: str, read: Callable[[Tensor], Any]) -> None:
        def get(tensor: Tensor) -> Any:
            if not isinstance(tensor, nn.Parameter):
                raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")
            return read(tensor)

        super().__init__(get)
