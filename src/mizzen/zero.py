"""`mizzen.zero`: access to parameters, gradients and states by the parameter alone. A face: the work is elsewhere."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from mizzen.engine.access import (
    full_gradient,
    full_state,
    full_value,
    gathered,
    set_full_gradient,
    set_full_state,
    set_full_value,
    update_gradients,
)
from mizzen.parallel.zero.full.marks import register_use

safe_get_full_fp32_param = full_value
safe_get_full_grad = full_gradient
safe_get_full_optimizer_state = full_state
safe_set_full_fp32_param = set_full_value
safe_set_full_grad = set_full_gradient
safe_set_full_optimizer_state = set_full_state
safe_update_full_grad_vectorized = update_gradients


@contextmanager
def GatheredParameters(  # noqa: N802  (a name that users have in their scripts)
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside, the parameters are whole; what `modifier_rank` writes to them reaches every rank, masters included."""
    with gathered(params if enabled else (), modifier_rank):
        yield


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say, before `initialize`, that a module uses a parameter it does not hold: it then belongs to the whole model."""
    register_use(module, parameter)


__all__ = [
    "GatheredParameters",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_update_full_grad_vectorized",
]
