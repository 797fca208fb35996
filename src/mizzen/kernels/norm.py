"""Sums of squares that do not depend on how a tensor is cut: every square is taken and added in fp64."""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

_CACHED: Final = 1 << 16
"""Elements that a CPU widens at a time: their fp64 copy stays in its cache. A norm that widens by itself does not."""


def sum_of_squares(tensors: Iterable[Tensor], *, device: torch.device) -> Tensor:
    """The fp64 sum of the squares of all elements, as a 0-d tensor on `device`."""
    flats = [flat for tensor in tensors if (flat := tensor.detach().reshape(-1)).numel()]
    return squares_of(flats, device=device).sum()


def is_all_finite(flat: Tensor) -> bool:
    """Whether a flat tensor is finite and of a sane size, where asking is free: on a CPU, in one fast pass."""
    is_fast = flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64)
    return is_fast and bool(torch.dot(flat, flat).isfinite())


def are_finite(tensors: list[Tensor]) -> Tensor:
    """For each tensor of one dtype, whether all its elements are finite and of a sane size: no copy, one pass.

    The norms of halves are taken in fp32, since many small halves have a norm that is none.
    """
    if not tensors:
        return torch.ones(0, dtype=torch.bool)
    return _norms(tensors, torch.promote_types(tensors[0].dtype, torch.float32)).isfinite()


def squares_of(flats: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """The fp64 sum of squares of each flat tensor, none of which is empty: one tensor on `device`, where they are.

    On a GPU a norm of one tensor alone would first copy it to fp64.
    """
    if not flats:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if device.type != "cpu":
        return _norms(list(flats), torch.float64).square()
    return torch.stack([_widened_squares(flat) for flat in flats])


def _widened_squares(flat: Tensor) -> Tensor:
    """The sum of squares of a tensor on a CPU, widened a part at a time."""
    parts = torch.split(flat, _CACHED)
    buffer = torch.empty(parts[0].numel(), dtype=torch.float64)
    sums = torch.empty(len(parts), dtype=torch.float64)
    for part, place in zip(parts, sums.unbind(), strict=True):
        wide = buffer if part.numel() == buffer.numel() else buffer[: part.numel()]
        wide.copy_(part)
        torch.dot(wide, wide, out=place)
    return sums.sum()


def _norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors, dtype=dtype))
