"""A committed checkpoint of ours out of any Source, one tensor at a time in memory."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from mizzen.checkpoint import save as protocol
from mizzen.checkpoint.folder import data_name
from mizzen.checkpoint.manifest import Manifest, TensorEntry
from mizzen.checkpoint.open import weights_of
from mizzen.checkpoint.rank_group import RankGroup, attempt
from mizzen.checkpoint.save import SaveOptions
from mizzen.checkpoint.source import Entry, Source
from mizzen.checkpoint.tagged_json import Encoder
from mizzen.checkpoint.tensors import name_of
from mizzen.checkpoint.write import BoxData, check_dtype, write_boxes
from mizzen.errors import CheckpointError
from mizzen.files import fsync_folder
from mizzen.model.box import Box

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
