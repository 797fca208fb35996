"""A few numbers by which values are recognised that nobody has written to."""

from subprocess import SubprocessError
from typing import Final

import torch
from torch import Tensor

from mizzen.kernels.gpu import gpu_code
from mizzen.log import info_once

WIDTH: Final = 1024
"""Columns of the table of which a mark has the sums."""
ROWS: Final = 4096
"""Rows of it that are mixed at a time: 32 MiB."""


def mark_of(values: Tensor) -> Tensor:
    """Numbers that are others, but for a strange accident, when any element is another or in another place.

    They compare with those of the same device alone. A GPU reads everything once, and takes no memory for it.
    """
    bits, rest = _as_integers(values.detach().reshape(-1))
    return torch.cat([_sums(bits), rest.to(torch.int64)])


def _sums(bits: Tensor) -> Tensor:
    try:
        if (code := gpu_code(bits)) is not None:
            return code.mark(bits)  # type: ignore[no-any-return]
    except (RuntimeError, OSError, SubprocessError) as error:  # no Triton, or no compiler for what it makes
        info_once(f"values are recognised by plain torch, which takes longer: {error}")
    return plain_mark(bits)


def plain_mark(bits: Tensor) -> Tensor:
    """Sums of the columns of a table of eight bytes each, a sum of its rows, each with a weight, and what is left over.

    Sums wrap around: of a sign that is the highest bit of eight bytes, an even number of changes would be no change. So
    high bits are mixed into lower ones first, some rows at a time, since what is mixed takes memory.
    """
    table = bits[: bits.numel() // WIDTH * WIDTH].view(-1, WIDTH)
    columns, rows = bits.new_zeros(WIDTH), bits.new_empty(len(table))
    for part, sums in zip(torch.split(table, ROWS), torch.split(rows, ROWS), strict=True):
        mixed = (part >> 29).bitwise_and_((1 << 35) - 1).bitwise_xor_(part)
        columns += mixed.sum(0)
        torch.sum(mixed, 1, out=sums)
    weighted = (rows * _row_weights(len(rows), bits.device)).sum()
    return torch.cat([columns, weighted[None], bits[table.numel() :]])


def _row_weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers without an order among them: rows that change places, or change alike, do not add up to nothing."""
    scattered = torch.arange(1, count + 1, device=device) * -7046029254386353131
    scattered = (scattered ^ (scattered >> 31)) * -4658895280553007687
    return (scattered ^ (scattered >> 27)) | 1


def _as_integers(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of a flat tensor eight bytes at a time, and of the few elements that are left; each alone if need be."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    together = 8 // flat.element_size()
    if flat.data_ptr() % 8 or flat.storage_offset() % together:
        together = flat.numel() + 1
    cut = flat.numel() // together * together
    small = flat[cut:].view(kinds[flat.element_size()])
    if cut == 0 and flat.numel():
        return small.to(torch.int64), small[:0]
    return flat[:cut].view(torch.int64), small
