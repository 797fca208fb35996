"""What goes from stage to stage, as bytes: a structure of tensors and plain values, and the description of it.

A description says the structure, the shapes and dtypes of its tensors, and which of them need a gradient. Nothing here
talks to another rank; `link.py` does.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from mizzen.errors import UsageError

ALIGNED: Final = 64
"""Tensors begin at multiples of so many bytes, as torch lets them: arithmetic on others is slower."""
ALONE: Final = '{"tensor": 0}'
"""The structure of a tensor that is not in anything."""


@dataclass(frozen=True)
class TensorFacts:
    """One tensor of a structure."""

    shape: tuple[int, ...]
    dtype: str
    needs_gradient: bool

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @cached_property
    def nbytes(self) -> int:
        """Its size on the way."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Description:
    """A structure without its tensors; equal ones are packed alike."""

    tree: str
    """The structure as JSON, tensors by their number."""
    tensors: tuple[TensorFacts, ...]

    @cached_property
    def gradients(self) -> tuple[TensorFacts, ...]:
        """The tensors whose gradient comes back."""
        return tuple(facts for facts in self.tensors if facts.needs_gradient)

    @cached_property
    def size(self) -> int:
        """Bytes of all of its tensors."""
        return size_of(self.tensors)

    @cached_property
    def structure(self) -> Any:
        """The tree itself."""
        return json.loads(self.tree)

    def encode(self) -> bytes:
        """This as bytes."""
        rows = [[list(facts.shape), facts.dtype, facts.needs_gradient] for facts in self.tensors]
        return json.dumps([self.tree, rows]).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Description":
        """From what `encode` has made."""
        tree, rows = json.loads(data)
        return cls(tree, tuple(TensorFacts(tuple(shape), dtype, needs) for shape, dtype, needs in rows))

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The structure with these tensors in it."""
        return _built(self.structure, tensors)


def describe(structure: Any) -> tuple[Description, list[Tensor]]:
    """What a structure is, and its tensors in order."""
    tensors: list[Tensor] = []
    tree = _tree(structure, tensors)
    text = ALONE if tensors and structure is tensors[0] else json.dumps(tree)
    return _description(text, tuple([(each.shape, each.dtype, each.requires_grad) for each in tensors])), tensors


@lru_cache(maxsize=256)
def _description(tree: str, rows: Sequence[tuple[torch.Size, torch.dtype, bool]]) -> Description:
    """One for each structure: what follows from it is found out once."""
    facts = (TensorFacts(tuple(shape), str(dtype).removeprefix("torch."), needs) for shape, dtype, needs in rows)
    return Description(tree, tuple(facts))


def _tree(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise UsageError(f"a tensor of layout {value.layout} cannot go to the next stage: make it dense before")
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise UsageError("a dict that goes to the next stage has names as keys; this one has others")
        return {"dict": {key: _tree(each, tensors) for key, each in value.items()}}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_tree(each, tensors) for each in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"a {type(value).__name__} cannot go to the next stage: tensors, numbers, texts and None can, also in tuples, "
        "lists and dicts"
    )


def _built(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, inside),) = tree.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: _built(each, tensors) for key, each in inside.items()}
    found = [_built(each, tensors) for each in inside]
    return tuple(found) if kind == "tuple" else found


def up(count: int) -> int:
    """The next multiple of the alignment."""
    return -(-count // ALIGNED) * ALIGNED


def size_of(facts: Sequence[TensorFacts]) -> int:
    """Bytes of some tensors, one after the other."""
    return sum(up(each.nbytes) for each in facts)


def pack(tensors: Sequence[Tensor], into: Tensor) -> None:
    """Copy tensors into bytes, one after the other."""
    place = 0
    for tensor in tensors:
        count = tensor.numel() * tensor.dtype.itemsize
        if count:
            part = into if count == into.numel() else into[place : place + count]
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        place += up(count)


def unpack(facts: Sequence[TensorFacts], data: Tensor) -> list[Tensor]:
    """The tensors that lie in bytes, where they lie."""
    found, place = [], 0
    for each in facts:
        part = data if each.nbytes == data.numel() else data[place : place + each.nbytes]
        found.append(part.view(each.torch_dtype).view(each.shape))
        place += up(each.nbytes)
    return found
