"""Weights for others: safetensors shards with an index, as Hugging Face models have them, or one torch file."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from mizzen.checkpoint.foreign.source import ForeignSource
from mizzen.checkpoint.open import aliases_of, weights_of
from mizzen.checkpoint.source import Entry, Source
from mizzen.checkpoint.tensors import by_number
from mizzen.checkpoint.weights_out import Told, Waiting, write_torch, write_weights
from mizzen.files import make_folder

Precision = Literal["fp32", "bf16", "fp16", "saved"]
TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def waiting_for(source: Source, precision: Precision) -> dict[str, Waiting]:
    """Each weight and buffer once; those that have a fraction in the precision."""
    return {name: _waiting(source, entry, precision) for name, entry in weights_of(source).items()}


def as_counted(tensors: Mapping[str, Waiting]) -> dict[str, Waiting]:
    """Layer 2 before layer 10."""
    names = sorted(tensors, key=lambda name: [str(part).zfill(12) for part in by_number(name)])
    return {name: tensors[name] for name in names}


def _waiting(source: Source, entry: Entry, precision: Precision) -> Waiting:
    dtype = TYPES.get(precision, entry.dtype) if entry.dtype.is_floating_point else entry.dtype
    read: Callable[[], Tensor] = partial(_read, source, entry, dtype)
    return Waiting(entry.shape, dtype, read)


def _read(source: Source, entry: Entry, dtype: torch.dtype) -> Tensor:
    return source.read(entry).to(dtype)


def export_safetensors(
    source: Source,
    folder: Path,
    *,
    precision: Precision = "bf16",
    shard: float | str = "5GB",
    told: Told | None = None,
) -> list[Path]:
    """Write shards of at most so many bytes, and their index; one larger tensor is a shard by itself."""
    tensors = as_counted(waiting_for(source, precision))
    return write_weights(folder, tensors, shard=shard, safe=True, told=told, read=files_of(source))


def files_of(source: Source) -> list[Path]:
    """The files of plain weights from which a Source reads; none for a checkpoint."""
    if not isinstance(source, ForeignSource):
        return []
    parts = source.notes.get("files")
    return [source.path / str(part) for part in parts] if isinstance(parts, list) else [source.path]


def export_torch(source: Source, path: Path, *, precision: Precision = "fp32", told: Told | None = None) -> Path:
    """Write one file that torch.load reads, with every name of a weight that has several."""
    make_folder(path.parent)
    write_torch(path, with_aliases(source, as_counted(waiting_for(source, precision))), told)
    return path


def with_aliases(source: Source, tensors: dict[str, Waiting]) -> dict[str, Waiting]:
    """The same under every name."""
    return tensors | {alias: tensors[name] for alias, name in aliases_of(source).items() if name in tensors}
