"""How a parameter is cut into shards, one for each rank, and put together again."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mizzen.comm import collectives, groups
from mizzen.comm.backend import Tag

MULTIPLE: Final = 32
"""Elements; what the optimizer steps has a multiple of it, so that no element is computed by another kind of kernel
than at the other stages, whose last bit may differ."""


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """The dimension that is cut: the first, unless it is shorter than the ranks are many and another one divides."""
    if shape[0] >= ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % ranks == 0), 0)


def chunk(size: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Where this rank's part of a dimension begins and ends, by torch.chunk's rule."""
    each = -(-size // mesh.size())
    first = min(mesh.get_local_rank() * each, size)
    return first, min(first + each, size)


def padded_length(shape: torch.Size, ranks: int) -> int:
    """Elements of a shard, padding included."""
    dim = shard_dim(shape, ranks)
    return shape.numel() // shape[dim] * -(-shape[dim] // ranks)


def whole_view(memory: Tensor, shape: torch.Size) -> Tensor:
    """The whole parameter in memory that may be padded at its end; writes to it are not writes to the memory's."""
    return memory[: shape.numel()].view(shape).data


def up(count: int) -> int:
    """The next multiple."""
    return -(-count // MULTIPLE) * MULTIPLE


def gather_shards(
    shard: Tensor,
    shape: Sequence[int],
    dim: int,
    group: ProcessGroup,
    *,
    dtype: torch.dtype | None = None,
    tag: Tag | None = None,
) -> Tensor:
    """The tensor of this shape that the ranks of a group have cut along `dim`, by torch.chunk's rule."""
    ranks, sizes = groups.get_world_size(group), list(shape)
    sizes[dim] = -(-shape[dim] // ranks)
    mine = shard.new_zeros(sizes, dtype=dtype or shard.dtype)
    mine.narrow(dim, 0, shard.shape[dim]).copy_(shard)
    every = mine.new_empty([ranks, *sizes])
    collectives.all_gather_into_tensor(every.view(-1), mine.view(-1), group=group, tag=tag)
    return joined(every, shape, dim)


def joined(rows: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """The tensor of this shape whose parts along `dim`, padded to one size, are these rows, one for each rank."""
    sizes = list(shape)
    sizes[dim] = -(-shape[dim] // len(rows))
    every = rows.reshape(len(rows), *sizes)
    # Along the first dimension this is no copy.
    whole = every.flatten(0, 1) if dim == 0 else torch.cat(every.unbind(0), dim)
    return whole.narrow(dim, 0, shape[dim]).contiguous()


def rows_of(whole: Tensor, ranks: int, length: int, dtype: torch.dtype | None = None) -> Tensor:
    """A whole tensor as one row of `length` elements for each rank: its part, and zeros where that is shorter."""
    dim = shard_dim(whole.shape, ranks)
    if dim == 0 and whole.numel() == ranks * length:
        return whole.reshape(ranks, length).to(dtype or whole.dtype)
    rows = whole.new_zeros([ranks, length], dtype=dtype or whole.dtype)
    parts = torch.split(whole, -(-whole.shape[dim] // ranks), dim)
    for row, part in zip(rows, parts, strict=False):
        row[: part.numel()] = part.reshape(-1)
    return rows
