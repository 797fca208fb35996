"""A checkpoint as a plain fp32 state dict, by the names that scripts know. It may be ours or any that has a reader."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mizzen.checkpoint.export import export_safetensors, export_torch, size_of
from mizzen.checkpoint.source import Entry, Source
from mizzen.checkpoint.sources import open_source, weights_of


class Late:
    """A tensor that is read when it is asked for."""

    def __init__(self, source: Source, entry: Entry) -> None:
        self._source = source
        self._entry = entry
        self.shape = torch.Size(entry.shape)
        self.dtype = torch.float32 if entry.dtype.is_floating_point else entry.dtype

    def contiguous(self) -> Tensor:
        """The tensor itself."""
        return self._source.read(self._entry).to(self.dtype)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Any]:
    """All weights and buffers on the CPU, floating ones in fp32; tied ones under each of their names.

    With `lazy_mode` each is read when its `.contiguous()` is called.
    """
    source = open_source(Path(checkpoint_dir), tag)
    skip = set(_frozen(source)) if exclude_frozen_parameters else set()
    found: dict[str, Any] = {
        name: Late(source, entry) for name, entry in weights_of(source).items() if name not in skip
    }
    if not lazy_mode:
        found = {name: late.contiguous() for name, late in found.items()}
    aliases = source.facts().get("aliases")
    for alias, name in aliases.items() if isinstance(aliases, Mapping) else ():
        if name in found:
            found.setdefault(alias, found[name])
    return found


def _frozen(source: Source) -> Iterator[str]:
    found = source.facts().get("frozen")
    if isinstance(found, list | tuple):
        yield from map(str, found)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the same to a folder: safetensors shards, or one `pytorch_model.bin`."""
    source = open_source(Path(checkpoint_dir), tag)
    skip = list(_frozen(source)) if exclude_frozen_parameters else []
    if safe_serialization:
        export_safetensors(source, Path(output_dir), precision="fp32", shard=size_of(max_shard_size), skip=skip)
    else:
        export_torch(source, Path(output_dir) / "pytorch_model.bin", precision="fp32", skip=skip)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """The model on the CPU, with the weights of a checkpoint."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
