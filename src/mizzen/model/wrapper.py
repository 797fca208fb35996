"""A tensor that has shape, dtype and device but no memory of its own; its class says what it stands for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def without_memory(
    kind: type[Tensor], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, requires_grad: bool = False
) -> Any:
    """An instance of a subclass of Tensor, which answers all operations in `__torch_dispatch__`."""
    return torch.Tensor._make_wrapper_subclass(
        kind, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad
    )


class LateTensor(Tensor):
    """A tensor whose values are computed when somebody uses them."""

    def computed(self) -> Tensor:
        """The values."""
        raise NotImplementedError
