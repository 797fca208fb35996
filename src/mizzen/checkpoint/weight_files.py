"""Weights in files, read parameter by parameter, and of each only what a rank keeps of it.

Safetensors, files of torch and folders of either, with an index or without: whatever `foreign` opens. A tensor is read
in bands of rows, so that a rank has the part that it keeps in memory, and little beside it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mizzen.checkpoint import foreign
from mizzen.checkpoint.foreign.source import ForeignSource
from mizzen.checkpoint.foreign.values import Readable, TensorRef
from mizzen.errors import CheckpointError
from mizzen.model.box import Interval
from mizzen.model.home import Site

BAND: Final = 16 * 2**20
"""Bytes that are read at once of a tensor of whose rows parts are kept."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights of a folder, or of a file."""

    source: ForeignSource

    @classmethod
    def open(cls, path: str | Path) -> "WeightFiles":
        """Look at a folder; no tensor is read."""
        return cls(foreign.open(path))

    def find(self, names: Iterable[str]) -> str | None:
        """The first of several names for a tensor under which there is one."""
        return next((name for name in names if ("model", name) in self.source.table), None)

    def read_site(self, name: str, site: Site) -> Tensor:
        """What a rank keeps of a tensor, by where that lives."""
        return self.read(name, site.shape, site.home.intervals(site.shape, site.layout, site.rank))

    def read(self, name: str, shape: Sequence[int], sides: Sequence[Sequence[Interval]] | None = None) -> Tensor:
        """What lies in these intervals of each dimension, end to end; all of it where none are given."""
        recipe = self.source.table["model", name]
        if tuple(recipe.shape) != tuple(shape):
            raise CheckpointError(
                f"{self.source.path}: '{name}' has shape {list(recipe.shape)}; the model's has {list(shape)}"
            )
        whole = [[(0, size)] for size in shape]
        if sides is None or [list(side) for side in sides] == whole or not shape:
            return recipe.read()
        return _part(recipe, shape, sides)


def _part(recipe: Readable, shape: Sequence[int], sides: Sequence[Sequence[Interval]]) -> Tensor:
    """Rows of a tensor, band by band, with what is kept of each."""
    rows, *others = sides
    kept = [torch.tensor([at for a, b in side for at in range(a, b)]) for side in others]
    found = torch.empty([sum(b - a for a, b in side) for side in sides], dtype=recipe.dtype)
    place = 0
    for first, last in _bands(rows, recipe, shape):
        band = _rows(recipe, shape, first, last)
        for dim, (index, size) in enumerate(zip(kept, shape[1:], strict=True), start=1):
            band = band if len(index) == size else band.index_select(dim, index)
        found[place : place + last - first] = band
        place += last - first
    return found


def _bands(rows: Sequence[Interval], recipe: Readable, shape: Sequence[int]) -> Iterable[Interval]:
    width = torch.Size(shape[1:]).numel() * recipe.dtype.itemsize
    step = max(1, BAND // max(width, 1))
    for first, last in rows:
        yield from ((at, min(at + step, last)) for at in range(first, last, step))


def _rows(recipe: Readable, shape: Sequence[int], first: int, last: int) -> Tensor:
    width = torch.Size(shape[1:]).numel()
    if isinstance(recipe, TensorRef):
        return recipe.elements(first * width, (last - first) * width).view(last - first, *shape[1:])
    return recipe.read()[first:last]
