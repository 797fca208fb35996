"""Questions about mixtures of experts: there are none, until they are built, so what is split has one part."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from mizzen.errors import NotBuilt, UsageError


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether a model has them, how many experts)."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to an expert: it says so by `allreduce`."""
    return not vars(param).get("allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of parameters belongs to experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters that all ranks share, those of experts)."""
    return _shared(params), []


def split_params_grads_into_shared_and_expert_params(group: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(gradients of parameters that all ranks share, those of experts), where there are any."""
    return [parameter.grad.to(parameter.dtype) for parameter in _shared(group) if parameter.grad is not None], []


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Parameter groups, those of experts apart: all of them, as they are."""
    if not isinstance(param_groups, dict | list | tuple):
        raise UsageError(f"parameter groups are a dict or a list of dicts; this is a {type(param_groups).__name__}")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    return [group | {"params": _shared(group["params"])} for group in groups]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Parameters as groups, those of experts apart."""
    if not isinstance(model_parameters, list) or not model_parameters:
        raise UsageError("model_parameters is a list of parameters, or of groups, and is not empty")
    if isinstance(model_parameters[0], nn.Parameter):
        return [{"params": _shared(model_parameters), "name": "dense-params"}]
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def _shared(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters, none of which may belong to an expert."""
    found = list(parameters)
    if any(map(is_moe_param, found)):
        raise NotBuilt("parameters of experts wait for a capability that is not built yet: mixture of experts")
    return found
