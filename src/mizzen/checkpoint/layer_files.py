"""A pipeline in DeepSpeed's folder layout: a torch file for each layer, one with the facts of the run, and states.

A `PipelineModule` there loads the files of its own layers, at any number of stages. Optimizer states and masters are in
the form that has no layout either, which `checkpoint.load_universal` reads there: a folder for each parameter.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from mizzen.checkpoint.convert import LazyTensor, OnBytes, Precision, lazy_weights, save_torch, write_torch
from mizzen.checkpoint.source import Entry, Source
from mizzen.checkpoint.tagged_json import decode
from mizzen.errors import CheckpointError
from mizzen.files import commit_text, fsync_folder, list_folder, make_folder, read_head, remove, remove_folder
from mizzen.wording import and_more

LAYER_FILE: Final = re.compile(r"layer_\d+-model_states\.pt")
HEAD: Final = "mp_rank_00_model_states.pt"
STATES: Final = "zero"
"""The folder of optimizer states inside of that of a tag."""
UNIVERSAL: Final = "latest_universal"
"""The file that names the newest tag with such a folder."""
LAYOUT: Final = "0.19.8"
"""The version of DeepSpeed whose layout this is; its readers look at it."""


def export_layers(
    source: Source,
    folder: Path,
    *,
    precision: Precision = "bf16",
    has_states: bool = True,
    on_bytes: OnBytes | None = None,
) -> list[Path]:
    """Write `global_stepN` with a file for each layer, and `latest` with its name; returns the files of the tag.

    A module that several layers share is written for each of them. Optimizer states go along where there are any, with
    weights in fp32 beside them, unless `has_states` is false. Their folders and files have the names of parameters and
    of states; a name that leads elsewhere is refused.
    """
    tensors = lazy_weights(source, precision)
    paths = _layer_paths(source, tensors)
    counters = _counters(source)
    groups = _groups(source, tensors)
    states = states_of(source) if has_states else []
    if states:
        _refuse_paths(name for group in groups for name in group.shapes)
        _refuse_paths(entry.kind for entry in states)
    place = folder / f"global_step{counters['global_steps']}"
    make_folder(place)
    written = [place / HEAD]
    save_torch(_head(source, tensors, counters, groups), written[0])
    for number, path in paths.items():
        inside = {name.removeprefix(f"{path}."): tensors[name] for name in tensors if name.startswith(f"{path}.")}
        written.append(place / f"layer_{number:02d}-model_states.pt")
        write_torch(written[-1], inside, on_bytes)
    for stale in list_folder(place):
        if LAYER_FILE.fullmatch(stale.name) and stale not in written:
            remove(stale, missing_ok=True)
    _remove_states(place)
    latest = ["latest"]
    if states:
        written += _write_states(source, states, groups, place / STATES, on_bytes)
        latest.append(UNIVERSAL)
    fsync_folder(place)
    for name in latest:
        commit_text(folder / name, place.name)
    return written


def states_of(source: Source) -> list[Entry]:
    """The optimizer states of a checkpoint."""
    return [entry for entry in source.names() if entry.kind not in ("model", "master")]


def _remove_states(place: Path) -> None:
    """Remove the states of an earlier export, which a reader would take for those of this one, and what names them."""
    latest = place.parent / UNIVERSAL
    if latest.is_file() and read_head(latest, len(place.name) + 2).strip() == place.name.encode():
        remove(latest, missing_ok=True)
    if (place / STATES).is_dir():
        remove_folder(place / STATES)


def _refuse_paths(names: Iterable[str]) -> None:
    """Refuse names that are not those of a file or a folder right inside of another folder."""
    for name in names:
        if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
            raise CheckpointError(
                f"{name[:120]!r}: the checkpoint has a parameter or a state of this name, and files of states are "
                "written under it: it would lead elsewhere, or nowhere. Export without states, with --no-states"
            )


@dataclass(frozen=True, slots=True)
class _ParameterGroup:
    """A parameter group of an optimizer: its parameters with their shapes, and its settings."""

    shapes: Mapping[str, torch.Size]
    settings: Mapping[str, Any]


def _write_states(
    source: Source, states: Sequence[Entry], groups: Sequence[_ParameterGroup], place: Path, on_bytes: OnBytes | None
) -> list[Path]:
    """Write a folder for each parameter, with its weight in fp32 and its states, and what holds for all of them."""
    masters = lazy_weights(source, "fp32")
    by_name: dict[str, list[Entry]] = {}
    for entry in states:
        by_name.setdefault(entry.name, []).append(entry)
    written = []
    for name in (name for group in groups for name in group.shapes):
        inside = place / name
        make_folder(inside)
        written.append(inside / "fp32.pt")
        write_torch(written[-1], {"param": masters[name]}, on_bytes)
        for entry in by_name.get(name, []):
            written.append(inside / f"{entry.kind}.pt")
            if entry.shape:
                lazy = LazyTensor(entry.shape, entry.dtype, partial(source.read, entry))
                write_torch(written[-1], {"param": lazy}, on_bytes)
            else:
                save_torch(source.read(entry), written[-1])
        fsync_folder(inside)
    written.append(place / "optimizer_state.pt")
    save_torch(_optimizer(groups), written[-1])
    fsync_folder(place)
    return written


def _optimizer(groups: Sequence[_ParameterGroup]) -> dict[str, Any]:
    """What DeepSpeed's optimizers look for beside the states of parameters; each group is one flat tensor there."""
    return {
        "dynamic_loss_scale": False,
        "overflow": False,
        "zero_stage": 1,
        "group_paddings": [0] * len(groups),
        "partition_count": [1] * len(groups),
        "ds_version": LAYOUT,
        "param_groups": [{**group.settings, "params": [number]} for number, group in enumerate(groups)],
    }


def _groups(source: Source, tensors: Mapping[str, LazyTensor]) -> list[_ParameterGroup]:
    """The groups of the optimizer as the checkpoint names them; one of everything trained where it does not."""
    facts = source.facts()
    untrained = _names(facts.get("frozen")) | _names(facts.get("buffers"))
    shapes = {name: torch.Size(tensor.shape) for name, tensor in tensors.items() if name not in untrained}
    optimizer = facts.get("optimizer")
    saved = optimizer.get("groups") if isinstance(optimizer, Mapping) else None
    if not isinstance(saved, list):
        return [_ParameterGroup(shapes, {})]
    known = decode(saved, lambda name: source.read(Entry("client", name, (), torch.uint8)))
    found = [
        _ParameterGroup({name: shapes[name] for name in group["names"] if name in shapes}, group["settings"])
        for group in known
    ]
    rest = shapes.keys() - {name for group in found for name in group.shapes}
    if not found or rest:
        first = found[0] if found else _ParameterGroup({}, {})
        found[:1] = [
            _ParameterGroup(
                {name: shapes[name] for name in shapes if name in rest or name in first.shapes}, first.settings
            )
        ]
    return found


def _layer_paths(source: Source, tensors: Mapping[str, LazyTensor]) -> dict[int, str]:
    """The module of each layer that has one, by the layer's number: as the checkpoint says, or as its names do."""
    said = source.facts().get("layers")
    if isinstance(said, list | tuple):
        found = {number: str(path) for number, path in enumerate(said) if path}
    else:
        numbers = {name.partition(".")[0] for name in tensors}
        found = {int(number): number for number in sorted(numbers) if number.isdecimal()}
    prefixes = tuple(f"{path}." for path in found.values())
    if others := [name for name in tensors if not name.startswith(prefixes)]:
        raise CheckpointError(
            f"{and_more(others, 3)}: of no layer of a pipeline, as far as this checkpoint says: files of layers are "
            "written of a mizzen.pipe.PipelineModule; export others without --layers"
        )
    return found


def _counters(source: Source) -> dict[str, int]:
    """Steps, samples and skipped steps; theirs counts skipped steps as steps, too."""
    facts = source.facts()
    counters = facts.get("counters")
    said: Mapping[str, Any] = counters if isinstance(counters, Mapping) else facts
    keys = ("global_steps", "global_samples", "skipped_steps")
    found = {key: value if isinstance(value := said.get(key), int) else 0 for key in keys}
    return found | {"global_steps": found["global_steps"] + found["skipped_steps"]}


def _head(
    source: Source, tensors: Mapping[str, LazyTensor], counters: Mapping[str, int], groups: Sequence[_ParameterGroup]
) -> dict[str, Any]:
    """What DeepSpeed's engines look for beside the layers. A client's state travels as far as it is plain."""
    facts = source.facts()
    frozen, buffers = _names(facts.get("frozen")), _names(facts.get("buffers"))
    shapes = {name: torch.Size(tensor.shape) for name, tensor in tensors.items()}
    client = facts.get("client_state")
    return {
        **(client if isinstance(client, Mapping) else {}),
        "module": None,
        "buffer_names": [name for name in shapes if name in buffers],
        "optimizer": None,
        "param_shapes": [dict(group.shapes) for group in groups],
        "frozen_param_shapes": {name: shape for name, shape in shapes.items() if name in frozen} or None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        **counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": LAYOUT,
    }


def _names(value: object) -> frozenset[str]:
    return frozenset(map(str, value)) if isinstance(value, list | tuple) else frozenset()
