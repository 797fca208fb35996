"""What scripts ask of `torch_autocast`: an engine does the casting by itself, as its configuration says."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

PARAM_COMM_DTYPE_ATTR_NAME: Final = "comm_dtype"
LOWER_PRECISION_SAFE_MODULES: Final = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]


def get_default_autocast_lower_precision_modules() -> list[str]:
    """The full names of classes whose parameters may be reduced in few bits."""
    return [f"{kind.__module__}.{kind.__name__}" for kind in LOWER_PRECISION_SAFE_MODULES]


def has_comm_dtype(param: Tensor) -> bool:
    """Whether a parameter says in what its gradient is reduced."""
    return PARAM_COMM_DTYPE_ATTR_NAME in vars(param)


def get_comm_dtype(param: Tensor) -> torch.dtype:
    """In what the gradient of a parameter is reduced."""
    found: torch.dtype = vars(param).get(PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
    return found


def get_all_comm_dtypes(params: Iterable[Tensor]) -> set[torch.dtype]:
    """In what the gradients of some parameters are reduced."""
    return {get_comm_dtype(param) for param in params}


def sort_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Dtypes in the order of their names."""
    return sorted(dtypes, key=str)


@contextmanager
def autocast_if_enabled(engine: Any) -> Iterator[None]:
    """torch's autocast, if the configuration of an engine asks for it."""
    with torch.autocast(
        engine.device.type, dtype=engine.torch_autocast_dtype(), enabled=engine.torch_autocast_enabled()
    ):
        yield
