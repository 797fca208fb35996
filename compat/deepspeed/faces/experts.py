"""Questions about mixtures of experts: there are none, until they are built."""

from typing import Any

from torch import Tensor, nn


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(whether a model has them, how many experts)."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter belongs to an expert."""
    return False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of parameters belongs to experts."""
    return bool(param_group.get("moe", False))
