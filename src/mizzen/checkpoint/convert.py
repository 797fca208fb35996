"""From any Source to something else: a committed checkpoint of ours, weight files for others, or a state dict in fp32.

One tensor at a time is in memory. Weights go to safetensors or torch files, with an index when there are several; a
file appears whole, in place of an older one, or not at all. The functions for fp32 have the names and arguments that
DeepSpeed's users know; there, masters come before the model's own 16-bit values.
"""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy
import torch
from torch import Tensor, nn

from mizzen.checkpoint import save as protocol
from mizzen.checkpoint.folder import data_name
from mizzen.checkpoint.foreign.source import ForeignSource
from mizzen.checkpoint.manifest import Manifest, TensorEntry
from mizzen.checkpoint.open import aliases_of, open_source, weights_of
from mizzen.checkpoint.rank_group import RankGroup, attempt
from mizzen.checkpoint.save import SaveOptions
from mizzen.checkpoint.source import Entry, Source
from mizzen.checkpoint.tagged_json import Encoder
from mizzen.checkpoint.tensors import by_number, bytes_of, header_of, name_of
from mizzen.checkpoint.write import BoxData, check_dtype, write_boxes
from mizzen.errors import CheckpointError, FileError, UsageError
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
from mizzen.log import get_logger
from mizzen.model.box import Box
from mizzen.wording import and_more

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
OnBytes = Callable[[int], None]
"""Called with how many bytes have been written since the last call."""
Precision = Literal["fp32", "bf16", "fp16", "saved"]
TYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class LazyTensor:
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
    tensors: Mapping[str, LazyTensor],
    *,
    shard: float | str | None,
    safe: bool,
    on_bytes: OnBytes | None = None,
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
        (write_safetensors if safe else write_torch)(folder / name, {key: tensors[key] for key in group}, on_bytes)
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


def split(tensors: Mapping[str, LazyTensor], limit: float) -> list[list[str]]:
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


def write_safetensors(path: Path, tensors: Mapping[str, LazyTensor], on_bytes: OnBytes | None = None) -> None:
    """Write one safetensors file."""
    commit_chunks(path, _chunks(_header(tensors), tensors, on_bytes))


def _header(tensors: Mapping[str, LazyTensor]) -> bytes:
    return header_of((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def _chunks(header: bytes, tensors: Mapping[str, LazyTensor], on_bytes: OnBytes | None) -> Iterator[Any]:
    yield header
    for tensor in tensors.values():
        yield from bytes_of(tensor.read())
        if on_bytes is not None:
            on_bytes(tensor.nbytes)


def write_torch(path: Path, tensors: Mapping[str, LazyTensor], on_bytes: OnBytes | None = None) -> None:
    """Write one file that torch.load reads. The tensors go to a file beside it first, from which they are mapped."""
    stage = temporary(path)
    names = {id(tensor): name for name, tensor in tensors.items()}
    once = {name: tensors[name] for name in names.values()}  # a tensor with two names is one tensor there too
    try:
        header = _header(once)
        write_chunks(stage, _chunks(header, once, on_bytes), fsync=False)
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


def save_torch(state: object, path: Path) -> None:
    """`torch.save` to a file that appears whole, or not at all."""
    try:
        with committing(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:  # torch has its own words for a full disk
        raise error if isinstance(error, FileError) else FileError(f"write {path}: {error}") from error


def lazy_weights(source: Source, precision: Precision) -> dict[str, LazyTensor]:
    """Each weight and buffer once; those that have a fraction in the precision."""

    def lazy(entry: Entry) -> LazyTensor:
        dtype = TYPES.get(precision, entry.dtype) if entry.dtype.is_floating_point else entry.dtype
        return LazyTensor(entry.shape, dtype, lambda: source.read(entry).to(dtype))

    return {name: lazy(entry) for name, entry in weights_of(source).items()}


def in_counting_order(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Layer 2 before layer 10."""
    names = sorted(tensors, key=lambda name: [str(part).zfill(12) for part in by_number(name)])
    return {name: tensors[name] for name in names}


def export_safetensors(
    source: Source,
    folder: Path,
    *,
    precision: Precision = "bf16",
    shard: float | str = "5GB",
    on_bytes: OnBytes | None = None,
) -> list[Path]:
    """Write shards of at most so many bytes, and their index; one larger tensor is a shard by itself."""
    tensors = in_counting_order(lazy_weights(source, precision))
    return write_weights(folder, tensors, shard=shard, safe=True, on_bytes=on_bytes, read=files_of(source))


def files_of(source: Source) -> list[Path]:
    """The files of plain weights from which a Source reads; none for a checkpoint."""
    if not isinstance(source, ForeignSource):
        return []
    parts = source.notes.get("files")
    return [source.path / str(part) for part in parts] if isinstance(parts, list) else [source.path]


def export_torch(source: Source, path: Path, *, precision: Precision = "fp32", on_bytes: OnBytes | None = None) -> Path:
    """Write one file that torch.load reads, with every name of a weight that has several."""
    make_folder(path.parent)
    write_torch(path, with_aliases(source, in_counting_order(lazy_weights(source, precision))), on_bytes)
    return path


def with_aliases(source: Source, tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The tensors under every name of each."""
    return tensors | {alias: tensors[name] for alias, name in aliases_of(source).items() if name in tensors}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor] | dict[str, LazyTensor]:
    """All weights in fp32, and integer buffers as they are. Lazily: values whose `contiguous()` reads the tensor."""
    found = fp32_weights(open_source(checkpoint_dir, tag), frozen=not exclude_frozen_parameters)
    if lazy_mode:
        return found
    # A weight with two names is one LazyTensor, and becomes one tensor.
    read = {id(lazy): lazy for lazy in found.values()}
    tensors = {number: lazy.read() for number, lazy in read.items()}
    return {name: tensors[id(lazy)] for name, lazy in found.items()}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write all weights in fp32 into a folder, in shards, with an index if there are several."""
    source = open_source(checkpoint_dir, tag)
    found = fp32_weights(source, frozen=not exclude_frozen_parameters)
    written = write_weights(output_dir, found, shard=max_shard_size, safe=safe_serialization, read=files_of(source))
    get_logger().info(f"{output_dir}: wrote {len(found)} tensors in {', '.join(path.name for path in written)}")


def load_state_dict_from_zero_checkpoint(model: Model, checkpoint_dir: str | Path, tag: str | None = None) -> Model:
    """Move a model to the CPU and give it the checkpoint's weights; names that only one side has are told."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    own = model.state_dict()
    wrong = [
        f"{name}: {list(own[name].shape)} here, {list(value.shape)} there"
        for name, value in state.items()
        if name in own and own[name].shape != value.shape
    ]
    if wrong or not own.keys() & state.keys():
        reason = and_more(wrong, separator="; ") or f"no name is in both; it has {and_more(state, 4)}"
        raise CheckpointError(f"{checkpoint_dir}: made for another model: {reason}")
    result = model.load_state_dict(state, strict=False)
    told = {
        "of the model are not in the checkpoint": result.missing_keys,
        "of the checkpoint are not in the model": result.unexpected_keys,
    }
    for what, names in told.items():
        if names:
            get_logger().warning(f"{checkpoint_dir}: {len(names)} names {what}: {and_more(names)}")
    return model


def fp32_weights(source: Source, *, frozen: bool = True) -> dict[str, LazyTensor]:
    """Each weight and buffer once per name; fp32 if it has a fraction. Names of one weight share a LazyTensor."""
    left_out = source.facts().get("frozen")
    if isinstance(left_out, list | tuple) and not all(isinstance(name, str) for name in left_out):
        raise CheckpointError("the facts of the checkpoint cannot be used: 'frozen' is no list of names")
    skipped = set(left_out) if isinstance(left_out, list | tuple) and not frozen else set()
    found = lazy_weights(source, "fp32")
    return with_aliases(source, {name: lazy for name, lazy in found.items() if name not in skipped})


COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def convert(source: Source, root: Path, tag: str, *, on_bytes: Any = None) -> Manifest:
    """Write what a Source has as a checkpoint that `load_checkpoint` takes; `on_bytes` hears of progress."""
    weights = weights_of(source)
    entries = [replace(entry, kind="model") for entry in weights.values()]
    readers: dict[Entry, Entry] = dict(zip(entries, weights.values(), strict=True))
    states = [entry for entry in source.names() if entry.kind not in ("model", "master")]
    for entry in (*entries, *states):
        check_dtype(entry.kind, entry.name, entry.dtype)
    tensors = [TensorEntry(e.kind, e.name, e.shape, name_of(e.dtype)) for e in (*entries, *states)]
    boxes = [
        BoxData(tensor, Box.whole(tensor.shape), partial(_read, source, readers.get(entry, entry), on_bytes))
        for tensor, entry in zip(tensors, (*entries, *states), strict=True)
    ]
    encoder = Encoder("facts")
    facts = facts_of(source.facts(), encoder)
    boxes += [_client(name, value) for name, value in encoder.tensors.items()]
    tensors += [each.entry for each in boxes[len(boxes) - len(encoder.tensors) :]]
    group, options = RankGroup(), SaveOptions(run=os.urandom(8).hex())
    pending = protocol.begin(root, tag, group, options)
    path = pending.folder / data_name(pending.id, 0)
    written, failure = attempt(lambda: write_boxes(path, tensors, boxes, metadata={"save": pending.id, "tag": tag}))
    fsync_folder(pending.folder)
    manifest = protocol.commit(pending, written, failure, facts, group, options)
    if manifest is None:
        raise AssertionError("a commit without a manifest")
    return manifest


def _read(source: Source, entry: Entry, on_bytes: Any) -> Tensor:
    tensor = source.read(entry)
    if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
        raise CheckpointError(
            f"{entry.kind} '{entry.name}' was announced as {list(entry.shape)} {entry.dtype} and is "
            f"{list(tensor.shape)} {tensor.dtype}"
        )
    if on_bytes is not None:
        on_bytes(tensor.numel() * tensor.element_size())
    return tensor


def _client(name: str, value: Tensor) -> BoxData:
    entry = TensorEntry("client", name, tuple(value.shape), name_of(value.dtype))
    return BoxData(entry, Box.whole(entry.shape), lambda: value)


def facts_of(found: Mapping[str, object], encoder: Encoder) -> dict[str, Any]:
    """What a Source says of its run, under our names; all of it also as it was said, for whoever looks."""
    facts: dict[str, Any] = {
        "counters": _counters(found),
        "client": encoder.encode(dict(_mapping(found.get("client_state"))), "client_state"),
        "aliases": dict(_mapping(found.get("aliases"))),
        "frozen": [str(name) for name in frozen] if isinstance(frozen := found.get("frozen"), list | tuple) else [],
        "imported": encoder.encode({key: found[key] for key in found if key != "client_state"}, "imported"),
    }
    facts |= {key: [*map(str, said)] for key in ("layers", "buffers") if isinstance(said := found.get(key), list)}
    if isinstance(found.get("lr_scheduler"), Mapping):
        state = encoder.encode(dict(_mapping(found["lr_scheduler"])), "lr_scheduler")
        facts["scheduler"] = {"type": "", "state": state}
    return facts


def _counters(found: Mapping[str, object]) -> dict[str, Any]:
    counters = {key: found[key] for key in COUNTERS if isinstance(found.get(key), int)}
    counters = counters or dict(_mapping(found.get("counters")))
    for key, value in counters.items():
        if not isinstance(value, int):
            raise CheckpointError(
                f"the facts of the checkpoint cannot be used: counters.{key} is a {type(value).__name__}"
            )
    return counters


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
