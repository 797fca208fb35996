"""Writing named tensors as others read them: safetensors or torch files, with an index when there are several.

One tensor at a time is in memory. A file appears whole, in place of an older one, or not at all.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from mizzen.checkpoint.tensors import bytes_of, header_of
from mizzen.errors import FileError, UsageError
from mizzen.files import (
    commit_chunks,
    commit_text,
    committing,
    fsync_folder,
    list_folder,
    make_folder,
    remove,
    temporary,
    write_chunks,
)

UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
Told = Callable[[int], None]
"""Is told how many bytes have been written since the last call."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A tensor that is read when it is asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """How much memory it will take."""
        return math.prod(self.shape) * self.dtype.itemsize

    def contiguous(self) -> Tensor:
        """The tensor itself, read now."""
        return self.read()


def write_weights(
    folder: str | Path,
    tensors: Mapping[str, Waiting],
    *,
    shard: float | str | None,
    safe: bool,
    told: Told | None = None,
    read: Collection[Path] = (),
) -> list[Path]:
    """Write all tensors into a folder, in shards of at most so many bytes; returns the files.

    Weights of an earlier export go, since a reader might take them for the new ones. `read` are the files that the
    tensors come from: where they are in the folder too, all of it stays.
    """
    folder = Path(folder)
    groups = split(tensors, size_of(shard))
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    names = [
        f"{stem}.{suffix}" if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}"
        for number in range(1, len(groups) + 1)
    ]
    if len(names) > 1 and (own := {path.resolve() for path in read} & {(folder / name).resolve() for name in names}):
        raise UsageError(f"{min(own)} would be replaced while weights are still read from it: name another folder")
    make_folder(folder)
    for name, group in zip(names, groups, strict=True):
        (write_safetensors if safe else write_torch)(folder / name, {key: tensors[key] for key in group}, told)
    fsync_folder(folder)
    written = [folder / name for name in names]
    if len(groups) > 1:
        owners = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        total = sum(tensor.nbytes for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": owners}, indent=2, sort_keys=True)
        written.append(folder / f"{stem}.{suffix}.index.json")
        commit_text(written[-1], text + "\n")
    stale = _stale(folder, f"{stem}.{suffix}", written)
    if not {path.resolve() for path in read} & {path.resolve() for path in stale}:
        for path in stale:
            remove(path, missing_ok=True)
    return written


def _stale(folder: Path, name: str, written: list[Path]) -> list[Path]:
    """Files that an export with other shards has left: one for all, its shards, or their index."""
    stem, suffix = name.split(".")
    pattern = re.compile(rf"{stem}(-\d+-of-\d+)?\.{suffix}(\.index\.json)?")
    return [path for path in list_folder(folder) if pattern.fullmatch(path.name) and path not in written]


def split(tensors: Mapping[str, Waiting], limit: float) -> list[list[str]]:
    """Names in their order, in groups of at most `limit` bytes; a larger tensor is a group of its own."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, tensor in tensors.items():
        if groups[-1] and held + tensor.nbytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += tensor.nbytes
    return groups


def size_of(size: float | str | None) -> float:
    """A number of bytes: 5000, "5GB", "5GiB"; None is no limit."""
    if size is None:
        return math.inf
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(size).upper())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise UsageError(f"max_shard_size: {size!r} is no size; write it as 5GB, 500MB or 5GiB")
    return float(match[1]) * UNITS[match[2]]


def write_safetensors(path: Path, tensors: Mapping[str, Waiting], told: Told | None = None) -> None:
    """Write one safetensors file."""
    commit_chunks(path, _chunks(_header(tensors), tensors, told))


def _header(tensors: Mapping[str, Waiting]) -> bytes:
    return header_of((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def _chunks(header: bytes, tensors: Mapping[str, Waiting], told: Told | None) -> Iterator[Any]:
    yield header
    for tensor in tensors.values():
        yield from bytes_of(tensor.read())
        if told is not None:
            told(tensor.nbytes)


def write_torch(path: Path, tensors: Mapping[str, Waiting], told: Told | None = None) -> None:
    """Write one file that torch.load reads. The tensors go to a file beside it first, from which they are mapped."""
    stage = temporary(path)
    names = {id(tensor): name for name, tensor in tensors.items()}
    once = {name: tensors[name] for name in names.values()}  # a tensor with two names is one tensor there too
    try:
        header = _header(once)
        write_chunks(stage, _chunks(header, once, told), fsync=False)
        place, mapped = len(header), {}
        # One map for all: the system limits how many a process may have.
        data = numpy.memmap(stage, dtype=numpy.uint8, mode="c")
        for tensor in once.values():
            part = torch.from_numpy(data[place : place + tensor.nbytes]) if tensor.nbytes else torch.empty(0)
            mapped[id(tensor)] = part.view(tensor.dtype).view(tensor.shape)
            place += tensor.nbytes
        save_torch({name: mapped[id(tensor)] for name, tensor in tensors.items()}, path)
    finally:
        with suppress(FileError):
            remove(stage, missing_ok=True)


def save_torch(state: Mapping[str, Any], path: Path) -> None:
    """`torch.save` to a file that appears whole, or not at all."""
    try:
        with committing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch has its own words for a full disk
        raise error if isinstance(error, FileError) else FileError(f"write {path}: {error}") from error
