"""Folders of torch.distributed.checkpoint: a pickled `.metadata` with the boxes of each tensor, and files of chunks.

The metadata is read by the restricted reader; every chunk is a small file of `torch.save`, read when it is asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mizzen.checkpoint.foreign import pickles, torch_file
from mizzen.checkpoint.foreign.extent import Extent, Folder
from mizzen.checkpoint.foreign.source import ForeignSource
from mizzen.checkpoint.foreign.values import Inert, TensorRef, count_of, expect, name_in, shape_of
from mizzen.checkpoint.manifest import LONGEST
from mizzen.errors import CheckpointError, UsageError
from mizzen.model.box import Box, coverage

WRAPPERS: Final = frozenset({"app", "model", "module", "state_dict", "model_state_dict"})
"""Keys under which programs put a model into what they save."""
VALUE: Final = 2**26
"""How many bytes the values that are no tensors may have together."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One box of a tensor, and the bytes of the file in which it was saved."""

    box: Box
    extent: Extent


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor in boxes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    inert: tuple[str, ...]
    where: str

    def __post_init__(self) -> None:
        for chunk in self.chunks:
            if not Box.whole(self.shape).contains(chunk.box):
                raise CheckpointError(f"{chunk.extent.path}: {self.name}: {chunk.box} is not in {list(self.shape)}")
            if chunk.box.numel * self.dtype.itemsize > chunk.extent.length:
                raise CheckpointError(
                    f"{chunk.extent.path}: {self.name}: {chunk.box} of {self.dtype} in {chunk.extent.length} bytes"
                )
        try:
            found = coverage([chunk.box for chunk in self.chunks], self.shape)
        except UsageError as error:
            raise CheckpointError(f"{self.where}: {self.name}: {error}") from None
        if found.missing or found.overlapping:
            raise CheckpointError(
                f"{self.where}: {self.name} {list(self.shape)}: its {len(self.chunks)} chunks leave out "
                f"{found.missing} elements and have {found.overlapping} twice"
            )

    def paths(self) -> set[Path]:
        """The files of all boxes."""
        return {chunk.extent.path for chunk in self.chunks}

    def read(self) -> Tensor:
        """Read the boxes one after another."""
        found = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            ref = torch_file.load(chunk.extent, inert=self.inert)
            if not isinstance(ref, TensorRef) or ref.shape != chunk.box.shape or ref.dtype != self.dtype:
                raise CheckpointError(
                    f"{chunk.extent.path}: at byte {chunk.extent.start} is not the chunk {chunk.box} of {self.name}"
                )
            found[tuple(map(slice, chunk.box.start, chunk.box.stop))] = ref.read()
        return found


def open_dcp(folder: Folder, inert: tuple[str, ...]) -> ForeignSource:
    """Collect what the metadata lists."""
    file = folder.file(".metadata")
    where = str(file.path)
    data = file.bytes(torch_file.PICKLE, "the metadata")
    metadata = expect(pickles.load(data, where, packages=inert)[0], Inert, where)
    tensors = expect(metadata.get("state_dict_metadata"), dict, f"{where}: state_dict_metadata")
    paths = metadata.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    wrapped = any(isinstance(path, tuple) and len(path) > 1 and path[0] in WRAPPERS for path in paths.values())
    places = _places(folder, metadata, where)
    source = ForeignSource(folder.path, "torch.distributed.checkpoint")
    values: dict[str, object] = {}
    read = _Values(inert, where)
    for key, about in tensors.items():
        name = name_in(key, f"{where}: a name")
        if not isinstance(about, Inert):
            raise CheckpointError(f"{where}: {name!r} is described by a {type(about).__name__}")
        if about.name.endswith(".BytesStorageMetadata"):
            values[name] = read.value(places, name)
        elif about.name.endswith(".TensorStorageMetadata"):
            recipe = _chunked_tensor(name, about, places, inert, where)
            if (found := _kind(name, paths, wrapped)) is None:
                values[name] = recipe
            else:
                source.add(*found, recipe, where=where)
        else:
            raise CheckpointError(f"{where}: {name!r} is a {about.name}, which is not known")
    source.notes["values"] = values
    return source


Places = Mapping[tuple[str, tuple[int, ...]], Extent]


def _places(folder: Folder, metadata: Inert, where: str) -> Places:
    """Name and first corner -> the bytes of a chunk; values that are no tensors have an empty corner."""
    files: dict[str, Extent] = {}
    found: dict[tuple[str, tuple[int, ...]], Extent] = {}
    for index, info in expect(metadata.get("storage_data"), dict, f"{where}: storage_data").items():
        if not isinstance(index, Inert) or not isinstance(info, Inert):
            raise CheckpointError(f"{where}: storage_data has something else than indices and places")
        name, offset = name_in(index.get("fqn"), f"{where}: a name"), index.get("offset")
        if info.get("transform_descriptors"):
            raise CheckpointError(f"{where}: {name!r} was written through a transform (compressed), which is not read")
        path = name_in(info.get("relative_path"), f"{where}: the file of {name!r}")
        if path not in files:
            files[path] = folder.file(path)
        start, length = (count_of(info.get(key), f"{where}: {key} of {name!r}") for key in ("offset", "length"))
        corner = () if offset is None else shape_of(offset, f"{where}: the corner of {name!r}")
        found[name, corner] = files[path].part(start, length, repr(name))
    return found


def _chunked_tensor(name: str, about: Inert, places: Places, inert: tuple[str, ...], where: str) -> ChunkedTensor:
    shape = shape_of(about.get("size"), f"{where}: the size of {name!r}")
    properties = expect(about.get("properties"), Inert, f"{where}: properties of {name!r}")
    dtype = properties.state[0] if isinstance(properties.state, tuple) and properties.state else properties.get("dtype")
    chunks = tuple(_chunks(name, about, places, where))
    return ChunkedTensor(
        name, shape, expect(dtype, torch.dtype, f"{where}: the dtype of {name!r}"), chunks, inert, where
    )


def _chunks(name: str, about: Inert, places: Places, where: str) -> Iterator[Chunk]:
    for chunk in expect(about.get("chunks"), list, f"{where}: chunks of {name!r}"):
        place = expect(chunk, Inert, f"{where}: a chunk of {name!r}")
        start, sizes = (shape_of(place.get(key), f"{where}: {key} of {name!r}") for key in ("offsets", "sizes"))
        if len(start) != len(sizes):
            raise CheckpointError(f"{where}: a chunk of {name!r} has {len(start)} offsets and {len(sizes)} sizes")
        if 0 in sizes:
            continue
        extent = places.get((name, start)) or places.get((name, ()))
        if extent is None:
            raise CheckpointError(f"{where}: nothing says where the chunk at {list(start)} of {name!r} is")
        yield Chunk(Box(start, tuple(a + b for a, b in zip(start, sizes, strict=True))), extent)


class _Values:
    """The values of a folder that are no tensors, each read once however often it is named."""

    def __init__(self, inert: tuple[str, ...], where: str) -> None:
        self._inert = inert
        self._where = where
        self._read: dict[Extent, object] = {}
        self._bytes = 0

    def value(self, places: Places, name: str) -> object:
        """One of them."""
        extent = places.get((name, ()))
        if extent is None:
            raise CheckpointError(f"{self._where}: nothing says where {name!r} is")
        if extent not in self._read:
            self._bytes += extent.length
            if self._bytes > VALUE:
                raise CheckpointError(
                    f"{extent.path}: {name!r} and others have {self._bytes:,} bytes; at most {VALUE:,}"
                )
            self._read[extent] = torch_file.load(extent, inert=self._inert)
        return self._read[extent]


def _kind(name: str, paths: Mapping[object, object], wrapped: bool) -> tuple[str, str] | None:
    """Kind and name of a tensor by its path: `model/<name>` or `optimizer/state/<name>/exp_avg`.

    Where the model has a key of its own, a tensor under another key is neither: None.
    """
    path = paths.get(name)
    keys = [str(key)[:LONGEST] for key in path if isinstance(key, str | int)] if isinstance(path, tuple) else None
    if keys is None:
        before, found, after = f".{name}".rpartition(".state.")
        own, dot, kind = after.rpartition(".")
        if found and dot and before.rpartition(".")[2].startswith("optim"):
            return kind, own
        return "model", name
    if "state" in keys[:-2]:
        at = keys.index("state")
        return keys[-1], ".".join(keys[at + 1 : -1])
    if wrapped and keys[0] not in WRAPPERS:
        return None
    while len(keys) > 1 and keys[0] in WRAPPERS:
        keys = keys[1:]
    return "model", ".".join(keys)
