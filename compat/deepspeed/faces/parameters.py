"""Facts that clients read from parameters under ZeRO-3: `ds_shape`, `ds_numel`, `ds_status` and their kin.

[Note: properties of every tensor]
mizzen hangs nothing on tensors, and objects that stand for a parameter come and go with gathering. So the facts are
properties that ask mizzen when they are read. They are put on `torch.Tensor` once stage 3 is in use in this process,
and only parameters at stage 3 answer: `hasattr(tensor, "ds_id")` is false for all else, as clients expect. Small frozen
parameters stay as they are, and mizzen knows nothing of them: these are marked, since clients ask all of a model.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from mizzen.engine.access import owner_of
from mizzen.engine.states_away import kinds_of
from mizzen.errors import UsageError
from mizzen.parallel.zero.full.sharded_parameter import WAYS, ShardedParameter, facts_of, find_record, is_sharded
from mizzen.zero import GatheredParameters as gather

MARK: Final = "_is_at_stage_3"
BUILT: Final = "_is_built_for_stage_3"
"""Of parameters that one rank has built in `zero.Init`, until an engine has them."""
HELD: Final = "_is_held"
"""How many contexts hold such a parameter."""


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
    is_away = facts_of(parameter).status == "sharded"
    if not is_sharded(parameter) and vars(parameter).get(BUILT, False):
        is_away = not vars(parameter).get(HELD, 0)
    return ZeroParamStatus.NOT_AVAILABLE if is_away else ZeroParamStatus.AVAILABLE


def _shard(parameter: Tensor) -> Tensor:
    record = find_record(parameter)
    return parameter.detach() if record is None else record.shard


def _number(parameter: Any) -> int:
    """One number for all objects that stand for a parameter; no other parameter has it as long as this one lives."""
    owner = owner_of(parameter)
    return id(parameter if owner is None else owner)


def _all_gather(parameter: Tensor) -> Callable[..., None]:
    def all_gather(*_: Any, **__: Any) -> None:
        if isinstance(parameter, ShardedParameter):
            raise UsageError(
                f"all_gather() of a parameter of shape {list(parameter.shape)}: {WAYS.replace('mizzen.', 'deepspeed.')}"
            )

    return all_gather


def _summary(parameter: Any) -> Callable[..., dict[str, Any]]:
    facts = facts_of(parameter)
    found = {
        "id": _number(parameter),
        "status": _status(parameter).name,
        **dict.fromkeys(("numel", "ds_numel"), facts.numel),
        **dict.fromkeys(("shape", "ds_shape"), facts.shape),
        "requires_grad": parameter.requires_grad,
        "grad_shape": None if parameter.grad is None else tuple(parameter.grad.shape),
        "persist": parameter.ds_persist,
        "active_sub_modules": parameter.ds_active_sub_modules,
        "ds_tensor.shape": parameter.ds_tensor.shape,
    }
    return lambda *_, **__: found


FACTS: Final[dict[str, Callable[[Tensor], Any]]] = {
    "ds_id": _number,
    "ds_shape": lambda parameter: torch.Size(facts_of(parameter).shape),
    "ds_numel": lambda parameter: facts_of(parameter).numel,
    "ds_status": _status,
    "ds_tensor": _shard,
    "ds_secondary_tensor": lambda parameter: None,  # second copies have no object of their own
    "ds_persist": lambda parameter: facts_of(parameter).status == "whole",
    "ds_active_sub_modules": lambda parameter: set(),
    "ds_process_group": lambda parameter: None,
    "partition_numel": lambda parameter: lambda: facts_of(parameter).local_numel,
    "all_gather": _all_gather,
    "partition": lambda parameter: lambda *_, **__: None,  # it is sharded wherever nobody holds it whole
    "ds_summary": _summary,
}
"""Attribute -> what it says of a parameter."""


def is_zero_param(parameter: Any) -> bool:
    """Whether a parameter is sharded or belongs to an engine at stage 3; one that a script has made does not."""
    if not isinstance(parameter, nn.Parameter):
        return False
    owner = owner_of(parameter)
    is_known = is_sharded(parameter) or (owner is not None and owner.stage == 3)
    return is_known or MARK in vars(parameter) or BUILT in vars(parameter)


def install(module: nn.Module | None = None) -> None:
    """See [Note: properties of every tensor]. All parameters of this module are at stage 3."""
    for name, read in FACTS.items():
        setattr(Tensor, name, _Fact(name, read))
    for parameter in module.parameters() if module is not None else ():
        vars(parameter).pop(BUILT, None)
        if owner_of(parameter) is None:
            vars(parameter)[MARK] = True


def mark_parameter(parameter: Any, dtype: torch.dtype | None) -> None:
    """Note that `zero.Init` has built a parameter, and give it its dtype."""
    if isinstance(parameter, nn.Parameter) and not (
        isinstance(parameter, UninitializedParameter | DTensor) or is_sharded(parameter)
    ):
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
        vars(parameter)[BUILT] = True


def mark_built(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Mark all parameters of a module that are whole."""
    for parameter in module.parameters():
        mark_parameter(parameter, dtype)


class GatheredParameters(AbstractContextManager[None]):
    """Inside, the parameters are whole; what `modifier_rank` writes to them reaches every rank, masters included."""

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: Any = [params] if isinstance(params, Tensor) else params
        self.params = list(given) if enabled and isinstance(given, Iterable) else given
        self.modifier_rank, self.enabled = modifier_rank, enabled
        self._stack = ExitStack()

    def __enter__(self) -> None:
        """All ranks enter together."""
        self._stack.enter_context(gather(self.params, self.modifier_rank, enabled=self.enabled))
        self._hold(+1)

    def __exit__(self, *error: Any) -> bool | None:
        """And leave together."""
        self._hold(-1)
        return self._stack.__exit__(*error)

    def _hold(self, more: int) -> None:
        for parameter in self.params if self.enabled else ():
            if isinstance(parameter, nn.Parameter) and BUILT in vars(parameter):
                vars(parameter)[HELD] = vars(parameter).get(HELD, 0) + more


class _Fact(property):
    def __init__(self, name: str, read: Callable[[Tensor], Any]) -> None:
        def get(tensor: Tensor) -> Any:
            if not is_zero_param(tensor):
                raise AttributeError(f"{type(tensor).__name__!r} object has no attribute {name!r}")
            return read(tensor)

        super().__init__(get)


def get_state_devices(model: Any, state: str) -> set[torch.device]:
    """Where an engine has its parameters, masters, states or gradients: on its device, or away in host memory."""
    (kind,) = kinds_of([state])
    return {torch.device("cpu") if kind in model.run_state.away.kinds else model.device}
