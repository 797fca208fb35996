"""Frozen weights at rest in 8-bit blocks: `zero_quantized_nontrainable_weights`, for the base of an adapter.

A shard is kept as the bytes that travel, and comes to life after the gather. Whoever else reads such a shard gets its
values.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mizzen.kernels.quantize import BLOCK, message_size, pack, unpack
from mizzen.model.inputs import change_tensors
from mizzen.model.sketch import ParameterSketch
from mizzen.model.wrapper import without_memory
from mizzen.parallel.zero.full.units import shard_dim
from mizzen.precision.policy import FLOATING

BITS = 8


def is_packed(parameter: ParameterSketch, ranks: int) -> bool:
    """Whether a parameter rests in blocks: a frozen matrix that is cut by rows, of which a rank has a block or more.

    Vectors are left alone: they are small, and a norm's weight is what a block's scale would hurt most.
    """
    return (
        not parameter.requires_grad
        and parameter.dtype in FLOATING
        and len(parameter.shape) > 1
        and shard_dim(parameter.shape, ranks) == 0
        and parameter.numel >= BLOCK * ranks
    )


def packed_bytes(count: int) -> int:
    """The size of a shard of so many elements."""
    return message_size(count, BITS)


class Packed(Tensor):
    """A shard in blocks that reads as what it stands for, and is written to with `copy_`."""

    held: Tensor
    """The bytes: of all elements of a shard, padding included."""
    count: int
    """How many elements these are."""

    def __new__(cls, held: Tensor, count: int, shape: Sequence[int], dtype: torch.dtype) -> "Packed":
        """As large as this rank's own shard, which may be without padding."""
        made: Packed = without_memory(cls, shape, dtype=dtype, device=held.device)
        made.held, made.count = held, count
        return made

    def __init__(self, *_: Any) -> None:
        """Everything was done in `__new__`."""

    @classmethod
    def of(cls, padded: Tensor, shape: Sequence[int]) -> "Packed":
        """The first elements of a flat tensor, as many as this shape has."""
        return cls(pack(padded.view(1, -1), BITS).view(-1), padded.numel(), shape, padded.dtype)

    def values(self) -> Tensor:
        """What it stands for."""
        flat = unpack(self.held.view(1, -1), self.count, BITS).reshape(-1)
        return flat[: self.shape.numel()].to(self.dtype).view(self.shape)

    def write(self, values: Tensor) -> None:
        """Stand for other values."""
        padded = values.new_zeros(self.count)
        padded[: values.numel()] = values.reshape(-1)
        self.held.copy_(pack(padded.view(1, -1), BITS).view(-1))

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the bytes."""
        return self.held.untyped_storage()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Results are plain."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub leaves `func` out
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute with the values; what is written to them is packed again."""
        first = args[0] if args else None
        if isinstance(first, Packed) and _is_itself(func, first, args):
            return Packed(first.held, first.count, first.shape, first.dtype)
        plain, keywords = change_tensors((tuple(args), dict(kwargs or {})), _plain)
        found = func(*plain, **keywords)
        if isinstance(first, Packed) and func._schema.is_mutable:
            first.write(plain[0])
            return first
        return found

    def unpacked(self, messages: Tensor) -> Tensor:
        """The elements of the whole parameter out of everybody's bytes, one row for each rank, padding included."""
        return unpack(messages.contiguous(), self.count, BITS).reshape(-1)


def _is_itself(func: Any, packed: Packed, args: Sequence[Any]) -> bool:
    """Whether all that is asked for is another object with the same content."""
    aten = torch.ops.aten
    return func in (aten.detach.default, aten.alias.default) or (
        func is aten.view.default and list(args[1]) == list(packed.shape)
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.values() if isinstance(tensor, Packed) else tensor
