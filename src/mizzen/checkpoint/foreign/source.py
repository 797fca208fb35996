"""The one Source behind every foreign format: a table from entries to the bytes they are made of.

A format's reader fills the table; nothing is read until `read`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mizzen.checkpoint.foreign.extent import Extent
from mizzen.checkpoint.foreign.values import SHARED, Readable, TensorRef, TooDeep, plain
from mizzen.checkpoint.source import Entry
from mizzen.errors import CheckpointError

TIMES: Final = 4
"""How many times the bytes of the files the tensors may have that lie in them: some are there under two names."""


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Some elements of a flat tensor."""

    data: TensorRef
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor cut into ranges that lie in several files."""

    parts: tuple[FlatRange, ...]
    shape: tuple[int, ...]
    what: str
    """Its name in errors."""

    def __post_init__(self) -> None:
        found, needed = sum(part.count for part in self.parts), math.prod(self.shape)
        if found != needed:
            raise CheckpointError(
                f"{self.what}: {len(self.parts)} shards have {found} elements of it; {list(self.shape)} needs {needed}"
            )
        for part in self.parts:
            if part.start < 0 or part.count < 0 or part.start + part.count > part.data.numel:
                raise CheckpointError(
                    f"{part.data.storage.extent.path}: elements {part.start} to {part.start + part.count} of a shard "
                    f"with {part.data.numel} were to be part of {self.what}"
                )

    @property
    def dtype(self) -> torch.dtype:
        """That of the first range; all must agree."""
        return self.parts[0].data.dtype if self.parts else torch.float32

    def paths(self) -> Iterable[Path]:
        """The files of all ranges."""
        return {path for part in self.parts for path in part.data.paths()}

    def read(self) -> Tensor:
        """Read the ranges one after another."""
        found, at = torch.empty(self.shape, dtype=self.dtype), 0
        flat = found.view(-1)
        for part in self.parts:
            if part.data.dtype != self.dtype:
                raise CheckpointError(
                    f"{part.data.storage.extent.path}: a shard of {part.data.dtype} where others are {self.dtype}"
                )
            flat[at : at + part.count] = part.data.elements(part.start, part.count)
            at += part.count
        return found


@dataclass(frozen=True, slots=True)
class NumberTensor:
    """A plain number that stands for a tensor without dimensions, as some optimizers keep their step."""

    value: int | float

    @property
    def shape(self) -> tuple[int, ...]:
        """No dimensions."""
        return ()

    @property
    def dtype(self) -> torch.dtype:
        """Whole numbers stay whole."""
        return torch.int64 if isinstance(self.value, int) else torch.float64

    def paths(self) -> Iterable[Path]:
        """It is in memory already."""
        return ()

    def read(self) -> Tensor:
        """The number as a tensor."""
        return torch.tensor(self.value, dtype=self.dtype)


@dataclass(slots=True)
class ForeignSource:
    """Entries and facts, collected by a reader."""

    path: Path
    what: str
    """The format in words; it is in the facts too."""
    table: dict[tuple[str, str], Readable] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """What is in the checkpoint and cannot be told apart or read, each with the reason."""

    def add(self, kind: str, name: str, recipe: Readable, *, where: object) -> None:
        """One more tensor; a name that is there already is an error."""
        if (kind, name) in self.table:
            raise CheckpointError(f"{where}: {kind} of {name!r} is stored twice")
        self.table[kind, name] = recipe

    def names(self) -> Sequence[Entry]:
        """All that is there."""
        return [Entry(kind, name, recipe.shape, recipe.dtype) for (kind, name), recipe in self.table.items()]

    def read(self, entry: Entry) -> Tensor:
        """One tensor, on the CPU."""
        recipe = self.table.get((entry.kind, entry.name))
        if recipe is None:
            raise CheckpointError(f"{self.path}: this {self.what} has no {entry.kind} of {entry.name!r}")
        return recipe.read()

    def check_size(self) -> None:
        """Refuse tensors that are far larger together than the files they are read from: they share their bytes."""
        recipes = {id(recipe): recipe for recipe in self.table.values()}.values()
        total = sum(math.prod(recipe.shape) * recipe.dtype.itemsize for recipe in recipes)
        files = {path for recipe in recipes for path in recipe.paths()}
        held = sum(Extent.of_file(path).solid for path in files)
        if total > TIMES * held + SHARED:
            raise CheckpointError(
                f"{self.path}: {len(recipes):,} tensors of {total:,} bytes in files of {held:,}: they share their "
                f"bytes, and more than {TIMES} times the files is not read"
            )

    def facts(self) -> Mapping[str, object]:
        """What the checkpoint was and what it says of its run. Tensors of the client's state are read now."""
        try:
            notes = {key: plain(value) for key, value in self.notes.items()}
        except TooDeep as error:
            raise CheckpointError(f"{self.path}: {error}") from error
        return {"format": self.what, **notes, "left_out": [*self.left_out]}


def as_recipe(value: object) -> Readable | None:
    """A tensor or a number; None for anything else."""
    if isinstance(value, TensorRef):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return NumberTensor(value)
    return None


def shaped(ref: TensorRef, shape: tuple[int, ...], where: object) -> Readable:
    """A tensor that was stored flat, in its own shape."""
    if ref.shape == shape:
        return ref
    return JoinedTensor((FlatRange(ref, 0, ref.numel),), shape, str(where))
