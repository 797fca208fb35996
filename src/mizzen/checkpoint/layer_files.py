"""A pipeline's weights in DeepSpeed's folder layout: one torch file for each layer, and one with the facts of the run.

A `PipelineModule` there loads the files of its own layers, at any number of stages. Optimizer states are not written:
load with `load_module_only=True`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from mizzen.checkpoint.convert import LazyTensor, OnBytes, Precision, lazy_weights, save_torch, write_torch
from mizzen.checkpoint.source import Source
from mizzen.errors import CheckpointError
from mizzen.files import commit_text, fsync_folder, list_folder, make_folder, remove
from mizzen.wording import and_more

LAYER_FILE: Final = re.compile(r"layer_\d+-model_states\.pt")
HEAD: Final = "mp_rank_00_model_states.pt"
LAYOUT: Final = "0.19.8"
"""The version of DeepSpeed whose layout this is; its readers look at it."""


def export_layers(
    source: Source, folder: Path, *, precision: Precision = "bf16", on_bytes: OnBytes | None = None
) -> list[Path]:
    """Write `global_stepN` with a file for each layer, and `latest` with its name; returns the files of the tag.

    A module that several layers share is written for each of them.
    """
    tensors = lazy_weights(source, precision)
    paths = _layer_paths(source, tensors)
    counters = _counters(source)
    place = folder / f"global_step{counters['global_steps']}"
    make_folder(place)
    written = [place / HEAD]
    save_torch(_head(source, tensors, counters), written[0])
    for number, path in paths.items():
        inside = {name.removeprefix(f"{path}."): tensors[name] for name in tensors if name.startswith(f"{path}.")}
        written.append(place / f"layer_{number:02d}-model_states.pt")
        write_torch(written[-1], inside, on_bytes)
    for stale in list_folder(place):
        if LAYER_FILE.fullmatch(stale.name) and stale not in written:
            remove(stale, missing_ok=True)
    fsync_folder(place)
    commit_text(folder / "latest", place.name)
    return written


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


def _head(source: Source, tensors: Mapping[str, LazyTensor], counters: Mapping[str, int]) -> dict[str, Any]:
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
        "param_shapes": [{name: shape for name, shape in shapes.items() if name not in frozen | buffers}],
        "frozen_param_shapes": {name: shape for name, shape in shapes.items() if name in frozen} or None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        **counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": LAYOUT,
    }


def _names(value: object) -> frozenset[str]:
    return frozenset(map(str, value)) if isinstance(value, list | tuple) else frozenset()
