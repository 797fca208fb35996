"""Weights for others: safetensors shards with an index, as Hugging Face models have them, or one torch file.

One tensor at a time is in memory. Nothing is left behind, and nothing replaced, when it fails half-way.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy
import torch
from torch import Tensor

from mizzen.checkpoint.source import Entry, Source
from mizzen.checkpoint.sources import weights_of
from mizzen.checkpoint.tensors import by_number, bytes_of, header_of
from mizzen.errors import FileError, UsageError
from mizzen.files import BESIDE, commit_text, make_folder, remove, write_chunks
from mizzen.files import replace as put_in_place

Precision = Literal["fp32", "bf16", "fp16", "saved"]
TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEM: Final = "model"
INDEX: Final = "model.safetensors.index.json"
Told = Callable[[int], None]


def size_of(text: str | int) -> int:
    """`5GB` as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(text).strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"{text!r} is not a size: give one like 5GB or 500MiB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


def chosen(source: Source, precision: Precision, skip: Sequence[str] = ()) -> list[tuple[Entry, Entry]]:
    """What to write, as it is there and as it is to be, by name as people count."""
    left_out = set(skip)
    found = []
    for name, entry in sorted(
        weights_of(source).items(), key=lambda pair: [str(p).zfill(12) for p in by_number(pair[0])]
    ):
        if name not in left_out:
            dtype = TYPES.get(precision, entry.dtype) if entry.dtype.is_floating_point else entry.dtype
            found.append((entry, replace(entry, dtype=dtype)))
    return found


def export_safetensors(
    source: Source,
    folder: Path,
    *,
    precision: Precision = "bf16",
    shard: int = 5_000_000_000,
    skip: Sequence[str] = (),
    told: Told | None = None,
) -> list[Path]:
    """Write shards of at most so many bytes, and their index; one larger tensor is a shard by itself."""
    rows = chosen(source, precision, skip)
    shards = list(_cut([wanted for _, wanted in rows], shard))
    make_folder(folder)
    homes, paths, given = dict[str, str](), list[Path](), dict(zip((w.name for _, w in rows), rows, strict=True))
    for number, names in enumerate(shards, 1):
        title = f"{STEM}.safetensors" if len(shards) == 1 else f"{STEM}-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(source, folder / title, [given[name] for name in names], told)
        paths.append(folder / title)
        homes |= dict.fromkeys(names, title)
    if len(shards) > 1:
        total = sum(_nbytes(wanted) for _, wanted in rows)
        index = {"metadata": {"total_size": total}, "weight_map": homes}
        commit_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
        paths.append(folder / INDEX)
    return paths


def _cut(entries: Sequence[Entry], limit: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for entry in entries:
        if names and size + _nbytes(entry) > limit:
            yield names
            names, size = [], 0
        names.append(entry.name)
        size += _nbytes(entry)
    yield names


def _nbytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _write(source: Source, path: Path, rows: Sequence[tuple[Entry, Entry]], told: Told | None) -> int:
    """One safetensors file in place of another; returns where its data begins."""
    header = header_of((wanted.name, wanted.dtype, wanted.shape) for _, wanted in rows)

    def chunks() -> Iterator[Any]:
        yield header
        for entry, wanted in rows:
            yield from bytes_of(source.read(entry).to(wanted.dtype))
            if told is not None:
                told(_nbytes(wanted))

    beside = path.with_name(path.name + BESIDE)
    remove(beside, missing_ok=True)
    write_chunks(beside, chunks())
    put_in_place(beside, path)
    return len(header)


def export_torch(
    source: Source,
    path: Path,
    *,
    precision: Precision = "fp32",
    skip: Sequence[str] = (),
    told: Told | None = None,
) -> Path:
    """Write one file that torch.load reads. The tensors go to a file beside it first, from which they are mapped."""
    rows = chosen(source, precision, skip)
    make_folder(path.parent)
    stage, beside = (path.with_name(path.name + suffix + BESIDE) for suffix in (".stage", ""))
    try:
        start = _write(source, stage, rows, told)
        found = {}
        for _, wanted in rows:
            found[wanted.name] = _mapped(stage, start, wanted)
            start += _nbytes(wanted)
        for alias, name in _aliases(source).items():
            if name in found:
                found[alias] = found[name]
        with beside.open("wb") as file:
            torch.save(found, file)
        put_in_place(beside, path)
    except OSError as error:
        raise FileError(f"write {path}: {error}") from error
    finally:
        for each in (stage, beside):
            with suppress(FileError):
                remove(each, missing_ok=True)
    return path


def _mapped(path: Path, offset: int, entry: Entry) -> Tensor:
    if not _nbytes(entry):
        return torch.empty(entry.shape, dtype=entry.dtype)
    data = numpy.memmap(path, dtype=numpy.uint8, mode="c", offset=offset, shape=(_nbytes(entry),))
    return torch.from_numpy(data).view(entry.dtype).view(entry.shape)


def _aliases(source: Source) -> Mapping[str, str]:
    found = source.facts().get("aliases")
    return {str(alias): str(name) for alias, name in found.items()} if isinstance(found, Mapping) else {}
