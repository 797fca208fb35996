"""What the ranks that share a matrix exchange, forward and backward.

Six functions in three pairs. In each pair the backward of the one is the forward of the other:

    copy_in          as it is                     sum_out           the sum over the ranks
    split_along      this rank's part             gather_along      the parts of all ranks
    gather_sequence  the parts of all ranks       scatter_sequence  this rank's part of the sum over the ranks

A tensor that all ranks have alike enters layers that are cut through `copy_in`, or `split_along`, and leaves them by
`sum_out`, or `gather_along`. Where activations between the layers are cut along the sequence, they enter through
`gather_sequence` and leave by `scatter_sequence`. With one rank, or without a group, each is the identity.

[Note: under a compiler]
What communicates is an operation of torch's for a compiler, which it puts into its graph as it is, and for whoever
looks at every operation: selective recomputation has to meet the same ones again, and ranks compare a call only the
first time. Otherwise it is a plain call: the way through torch's dispatcher takes longer than the call itself. An
operation takes no group, only its name.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mizzen.comm import collectives
from mizzen.comm.backend import Tag
from mizzen.errors import UsageError
from mizzen.model.home import evenly

Sizes = Sequence[int]
UNIT: Final = "tensor parallel"
"""What the tags of these exchanges call the unit that they are of."""


def copy_in(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """`x`, which all ranks have alike, on its way into layers that are cut: its gradient is the sum of the ranks'."""
    return x if _is_alone(group) else _apply(CopyIn, x, group)


def sum_out(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of what the ranks bring, on its way out of layers that are cut; its gradient goes to each of them."""
    return x if _is_alone(group) else _apply(SumOut, x, group)


def gather_along(x: Tensor, dim: int, group: ProcessGroup | None, sizes: Sizes | None = None) -> Tensor:
    """The parts of all ranks end to end. What follows is done alike on all of them: a rank keeps its part's gradient.

    `sizes` are those of the parts, where they differ.
    """
    if _is_alone(group):
        return x
    dim = dim % x.dim()
    return _apply(GatherAlong, x, dim, group, _sizes_of_parts(x, dim, group, sizes))


def split_along(x: Tensor, dim: int, group: ProcessGroup | None, sizes: Sizes | None = None) -> Tensor:
    """This rank's part of `x`, which all ranks have alike; their gradients are laid end to end.

    `sizes` are those of the parts; without them they are by torch.chunk's rule.
    """
    if _is_alone(group):
        return x
    dim = dim % x.dim()
    return _apply(SplitAlong, x, dim, group, _sizes_of_whole(x, dim, group, sizes))


def gather_sequence(x: Tensor, dim: int, group: ProcessGroup | None, sizes: Sizes | None = None) -> Tensor:
    """The parts of all ranks end to end, for layers that are cut: a part's gradient is the sum of the ranks'."""
    if _is_alone(group):
        return x
    dim = dim % x.dim()
    return _apply(GatherSequence, x, dim, group, _sizes_of_parts(x, dim, group, sizes))


def scatter_sequence(x: Tensor, dim: int, group: ProcessGroup | None, sizes: Sizes | None = None) -> Tensor:
    """This rank's part of the sum of what the ranks bring; the gradients of the parts are laid end to end.

    `sizes` are those of the parts; without them they are by torch.chunk's rule.
    """
    if _is_alone(group):
        return x
    dim = dim % x.dim()
    return _apply(ScatterSequence, x, dim, group, _sizes_of_whole(x, dim, group, sizes))


def _apply(exchange: Any, *arguments: Any) -> Tensor:
    result: Tensor = exchange.apply(*arguments)
    return result


def _is_alone(group: ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


def _sizes_of_parts(x: Tensor, dim: int, group: Any, sizes: Sizes | None) -> tuple[int, ...]:
    """The sizes of the parts, of which `x` is this rank's."""
    ranks: int = group.size()
    rank: int = group.rank()
    if sizes is None:
        return (x.shape[dim],) * ranks
    if len(sizes) != ranks or sizes[rank] != x.shape[dim]:
        raise UsageError(
            f"rank {rank} of {ranks} brings {x.shape[dim]} in dimension {dim}, where the sizes of the parts are said "
            f"to be {list(sizes)}: there is one for each rank"
        )
    return tuple(sizes)


def _sizes_of_whole(x: Tensor, dim: int, group: Any, sizes: Sizes | None) -> tuple[int, ...]:
    """The sizes of the parts that `x` is made of."""
    ranks: int = group.size()
    size = x.shape[dim]
    if sizes is None:
        return (size // ranks,) * ranks if size % ranks == 0 else evenly(size, ranks)
    if len(sizes) != ranks or sum(sizes) != size:
        raise UsageError(
            f"{size} in dimension {dim} cannot be shared out as {list(sizes)} among {ranks} ranks: there is one size "
            "for each rank, and they add up to the whole"
        )
    return tuple(sizes)


def largest(x: Tensor, group: ProcessGroup | None, unit: str = UNIT) -> Tensor:
    """The largest of what the ranks bring, element by element, without a gradient. `unit` is compared with the tag."""
    x = x.detach()
    if _is_alone(group):
        return x
    if _is_looked_at():
        found: Tensor = _largest_for_compiler(x, cast(Any, group).group_name, unit)
        return found
    return _all_reduce(x, group, ReduceOp.MAX, unit)


# The three pairs


class CopyIn(Function):
    """Identity; the adjoint of `SumOut`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Give it back as a view."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum."""
        return _apply(SumOut, grads[0], ctx.group), None


class SumOut(Function):
    """Sum over the ranks; the adjoint of `CopyIn`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Sum."""
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Give each rank all of it."""
        return _apply(CopyIn, grads[0], ctx.group), None


class SplitAlong(Function):
    """This rank's part; the adjoint of `GatherAlong`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any, sizes: tuple[int, ...]) -> Tensor:
        """Keep one part."""
        ctx.where = (dim, group, sizes)
        rank = group.rank()
        return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Lay the ranks' end to end."""
        return _apply(GatherAlong, grads[0], *ctx.where), None, None, None


class GatherAlong(Function):
    """The parts of all ranks; the adjoint of `SplitAlong`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any, sizes: tuple[int, ...]) -> Tensor:
        """Lay them end to end."""
        ctx.where = (dim, group, sizes)
        return _gather(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Keep one part."""
        return _apply(SplitAlong, grads[0], *ctx.where), None, None, None


class GatherSequence(Function):
    """The parts of all ranks; the adjoint of `ScatterSequence`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any, sizes: tuple[int, ...]) -> Tensor:
        """Lay them end to end."""
        ctx.where = (dim, group, sizes)
        return _gather(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Sum, and keep one part."""
        return _apply(ScatterSequence, grads[0], *ctx.where), None, None, None


class ScatterSequence(Function):
    """This rank's part of the sum; the adjoint of `GatherSequence`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any, sizes: tuple[int, ...]) -> Tensor:
        """Sum, and keep one part."""
        ctx.where = (dim, group, sizes)
        return _reduce_scatter(x, dim, group, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Lay the ranks' end to end."""
        return _apply(GatherSequence, grads[0], *ctx.where), None, None, None


# What communicates: see the note


def _is_looked_at() -> bool:
    return torch.compiler.is_compiling() or bool(is_in_torch_dispatch_mode())


def _group_of(name: Any) -> Any:
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined]


def _sum(x: Tensor, group: Any) -> Tensor:
    return _sum_for_compiler(x, group.group_name) if _is_looked_at() else _all_reduce(x, group)


def _gather(x: Tensor, dim: int, group: Any, sizes: tuple[int, ...]) -> Tensor:
    if _is_looked_at():
        gathered: Tensor = _gather_for_compiler(x, dim, group.group_name, list(sizes))
        return gathered
    return _all_gather(x, dim, group, sizes)


def _reduce_scatter(x: Tensor, dim: int, group: Any, sizes: tuple[int, ...]) -> Tensor:
    if _is_looked_at():
        part: Tensor = _reduce_scatter_for_compiler(x, dim, group.group_name, list(sizes), group.rank())
        return part
    return _sum_of_parts(x, dim, group, sizes)


@torch.library.custom_op("mizzen::tensor_sum", mutates_args=())
def _sum_for_compiler(x: Tensor, group: str) -> Tensor:
    return _all_reduce(x, _group_of(group))


@_sum_for_compiler.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mizzen::tensor_largest", mutates_args=())
def _largest_for_compiler(x: Tensor, group: str, unit: str) -> Tensor:
    return _all_reduce(x, _group_of(group), ReduceOp.MAX, unit)


@_largest_for_compiler.register_fake
def _(x: Tensor, group: str, unit: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mizzen::tensor_gather", mutates_args=())
def _gather_for_compiler(x: Tensor, dim: int, group: str, sizes: Sequence[int]) -> Tensor:
    return _all_gather(x, dim, _group_of(group), sizes)


@_gather_for_compiler.register_fake
def _(x: Tensor, dim: int, group: str, sizes: Sequence[int]) -> Tensor:
    return x.new_empty([*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]])


@torch.library.custom_op("mizzen::tensor_reduce_scatter", mutates_args=())
def _reduce_scatter_for_compiler(x: Tensor, dim: int, group: str, sizes: Sequence[int], rank: int) -> Tensor:
    return _sum_of_parts(x, dim, _group_of(group), sizes)


@_reduce_scatter_for_compiler.register_fake
def _(x: Tensor, dim: int, group: str, sizes: Sequence[int], rank: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], sizes[rank], *x.shape[dim + 1 :]])


def _all_reduce(x: Tensor, group: Any, op: Any = ReduceOp.SUM, unit: str = UNIT) -> Tensor:
    # Never in place: what comes here is the caller's, or a gradient that another node of the graph has as well.
    result = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(result, op, group=group, tag=Tag(0, unit, "sum" if op is ReduceOp.SUM else "largest"))
    return result


def _all_gather(x: Tensor, dim: int, group: Any, sizes: Sizes) -> Tensor:
    most = max(sizes)
    own = _padded(x, dim, most).contiguous()
    stacked = own.new_empty((len(sizes), *own.shape))
    collectives.all_gather_into_tensor(stacked.flatten(0, 1), own, group=group, tag=_tag("gather"))
    if dim == 0 and min(sizes) == most:
        return stacked.flatten(0, 1)
    parts = [part.narrow(dim, 0, size) for part, size in zip(stacked, sizes, strict=True)]
    return torch.cat(parts, dim)


def _sum_of_parts(x: Tensor, dim: int, group: Any, sizes: Sizes) -> Tensor:
    """Sum the ranks' tensors, and keep this rank's part, which is as large for all while it is exchanged."""
    most, size = max(sizes), sizes[group.rank()]
    sent = torch.stack([_padded(part, dim, most) for part in torch.split(x, list(sizes), dim)])
    if x.device.type == "cpu":
        # gloo's reduce-scatter takes longer than an exchange of parts and a local sum.
        received = torch.empty_like(sent)
        collectives.all_to_all_single(received.flatten(0, 1), sent.flatten(0, 1), group=group, tag=_tag("sum of parts"))
        total = received[0]
        for other in received[1:]:
            total = total + other
    else:
        total = torch.empty_like(sent[0])
        collectives.reduce_scatter_tensor(total, sent.flatten(0, 1), group=group, tag=_tag("sum of parts"))
    return total if size == most else total.narrow(dim, 0, size).contiguous()


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    short = size - x.shape[dim]
    return torch.cat([x, x.new_zeros([*x.shape[:dim], short, *x.shape[dim + 1 :]])], dim) if short else x


def _tag(phase: str) -> Tag:
    """What the ranks compare. These exchanges do not know the step, which others of the step compare."""
    return Tag(0, UNIT, phase)
