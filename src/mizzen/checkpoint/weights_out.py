"""Writing named tensors as others read them: safetensors or torch files, with an index when there are several.

Tensors come one at a time. A shard of safetensors needs the memory of one tensor, a torch file that of the shard.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from mizzen.checkpoint.foreign.safetensors import DTYPES
from mizzen.errors import UsageError
from mizzen.files import commit_text, fsync_folder, make_folder, write_chunks

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
WORDS: Final = {dtype: word for word, dtype in DTYPES.items()}


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
    folder: str | Path, tensors: Mapping[str, Waiting], *, shard: int | str | None, safe: bool
) -> list[Path]:
    """Write all tensors into a folder, in shards of at most so many bytes; returns the files."""
    folder = Path(folder)
    groups = split(tensors, size_of(shard))
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    names = [
        f"{stem}.{suffix}" if len(groups) == 1 else f"{stem}-{number:05d}-of-{len(groups):05d}.{suffix}"
        for number in range(1, len(groups) + 1)
    ]
    make_folder(folder)
    for name, group in zip(names, groups, strict=True):
        part = {key: tensors[key] for key in group}
        write_chunks(folder / name, _safetensors(part) if safe else _torch_file(part))
    fsync_folder(folder)
    written = [folder / name for name in names]
    if len(groups) > 1:
        owners = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        total = sum(tensor.nbytes for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": owners}, indent=2, sort_keys=True)
        written.append(folder / f"{stem}.{suffix}.index.json")
        commit_text(written[-1], text + "\n")
    return written


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


def size_of(size: int | str | None) -> float:
    """A number of bytes: 5000, "5GB", "5GiB"; None is no limit."""
    if size is None:
        return math.inf
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(size).upper())
    if match is None or match[2] not in UNITS or not float(match[1]):
        raise UsageError(f"max_shard_size: {size!r} is no size; write it as 5GB, 500MB or 5GiB")
    return float(match[1]) * UNITS[match[2]]


def _safetensors(tensors: Mapping[str, Waiting]) -> Iterator[bytes | memoryview]:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in WORDS:
            raise UsageError(f"{name}: safetensors knows no {tensor.dtype}")
        offsets = [at, at + tensor.nbytes]
        table[name] = {"dtype": WORDS[tensor.dtype], "shape": [*tensor.shape], "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in tensors.values():
        yield _bytes(tensor.read())


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _torch_file(tensors: Mapping[str, Waiting]) -> Sequence[memoryview]:
    buffer = io.BytesIO()
    torch.save({name: tensor.read() for name, tensor in tensors.items()}, buffer)
    return [buffer.getbuffer()]
