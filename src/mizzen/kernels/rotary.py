"""Rotary position embedding of queries and keys in one pass each, forward and backward.

The halves of a head are turned against each other, as Llama and its relatives do; embeddings that turn neighbouring
elements, or a part of a head only, are others.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mizzen.kernels.gpu import gpu_code


def plain_rotary(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """The specification. `unsqueeze_dim` is the place of the heads in queries and keys, which cosine and sine lack."""
    cosine, sine = cosine.unsqueeze(unsqueeze_dim), sine.unsqueeze(unsqueeze_dim)
    return query * cosine + _turned(query) * sine, key * cosine + _turned(key) * sine


def _turned(inputs: Tensor) -> Tensor:
    first, second = inputs.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """By a kernel on a GPU, which rounds where plain torch does; by plain torch elsewhere."""
    tensors = (query, key, cosine, sine)
    is_trained = torch.is_grad_enabled() and (cosine.requires_grad or sine.requires_grad)
    if gpu_code(query) is None or is_trained or any(tensor.dtype.itemsize > 4 for tensor in tensors):
        return plain_rotary(query, key, cosine, sine, unsqueeze_dim)
    if unsqueeze_dim not in (1, 2) or not all(_fits(each, cosine, sine, unsqueeze_dim) for each in (query, key)):
        return plain_rotary(query, key, cosine, sine, unsqueeze_dim)
    turn: Any = _Rotary.apply
    return turn(query, cosine, sine, unsqueeze_dim), turn(key, cosine, sine, unsqueeze_dim)


def _fits(inputs: Tensor, cosine: Tensor, sine: Tensor, heads: int) -> bool:
    """Whether the kernel knows these shapes: batch, length and an even head, with heads before or after the length."""
    if inputs.dim() != 4 or inputs.shape[-1] % 2 or cosine.dtype is not sine.dtype:
        return False
    wanted = (inputs.shape[3 - heads], inputs.shape[3])
    return all(
        table.dim() == 3 and table.shape[0] in (1, inputs.shape[0]) and table.shape[1:] == wanted
        for table in (cosine, sine)
    )


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, cosine: Tensor, sine: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.heads, ctx.dtype = heads, inputs.dtype
        return _turn(inputs, cosine, sine, heads, dtype=torch.promote_types(inputs.dtype, cosine.dtype), back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.saved_tensors
        return _turn(incoming, cosine, sine, ctx.heads, dtype=ctx.dtype, back=True), None, None, None


def _turn(inputs: Tensor, cosine: Tensor, sine: Tensor, heads: int, *, dtype: torch.dtype, back: bool) -> Tensor:
    """The kernel wants heads before the length; a view brings them there, and the result back."""
    code: Any = gpu_code(inputs)
    placed = inputs if heads == 1 else inputs.transpose(1, 2)
    found: Tensor = code.rotate(placed, cosine, sine, dtype=dtype, back=back)
    return found if heads == 1 else found.transpose(1, 2)
