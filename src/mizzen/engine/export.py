"""The whole model in the dtype it computes with, gathered bundle by bundle: no rank holds more than one at a time.

All ranks walk together. Files for going on with training are checkpoints, and not made here.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from mizzen.checkpoint.export import save_torch
from mizzen.checkpoint.rank_group import RankGroup, Validation, attempt, in_words, place_of, refuse_unequal
from mizzen.checkpoint.tensors import bytes_of, header_of
from mizzen.engine.saving import Given, Saving, folder_of
from mizzen.errors import NotBuilt, UsageError
from mizzen.files import commit_chunks, make_folder
from mizzen.model.sketch import Sketch
from mizzen.parallel.zero.full.sharded_parameter import is_sharded
from mizzen.plan.parts import Store

SAFETENSORS: Final = ".safetensors"


@dataclass(frozen=True, slots=True)
class Contents:
    """What of a model is written, in this order: what is whole anyway, then bundles of what is gathered."""

    plain: Mapping[str, Tensor]
    bundles: Sequence[tuple[Store, Sequence[str]]]

    @classmethod
    def of(cls, module: nn.Module, stores: Sequence[Store], skip: frozenset[str]) -> "Contents":
        """Everything in the state dict that is not to be skipped, each tensor under its first name."""
        sharded = {name for store in stores for name, value in store.contents.held.items() if is_sharded(value)} - skip
        aliases = {alias for each in Sketch.of(module).parameters for alias in each.aliases}
        own = module.state_dict(keep_vars=True)
        plain = {name: own[name] for name in own if name not in sharded | aliases | skip}
        return cls(
            {name: value.detach() for name, value in plain.items() if isinstance(value, Tensor)},
            [
                (store, [name for name in bundle if name in sharded])
                for store in stores
                for bundle in store.contents.units
            ],
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of what is written, on the host. Every rank walks along."""
        for name, value in self.plain.items():
            yield name, value.cpu()
        for store, names in self.bundles:
            if names:
                with torch.no_grad(), store.gather(names) as whole:
                    yield from ((name, whole[name].detach().to("cpu", copy=True)) for name in names)

    def facts(self) -> Iterator[tuple[str, torch.dtype, list[int]]]:
        """(name, dtype, shape) of what is written, without gathering anything."""
        for name, value in self.plain.items():
            yield name, value.dtype, list(value.shape)
        for store, names in self.bundles:
            for name in names:
                yield name, store.contents.held[name].dtype, list(store.contents.held[name].shape)


def whole_state_dict(
    module: nn.Module, stores: Sequence[Store], *, skip: frozenset[str], team: RankGroup
) -> dict[str, Any] | None:
    """The whole model as a dict on the first rank, under every name; None on the others."""
    _Request("", skip, _names(module)).agreed(team, "Warn", "gathering the model")
    return _gathered(module, stores, skip, is_writer=team.is_first)


def _gathered(
    module: nn.Module, stores: Sequence[Store], skip: frozenset[str], *, is_writer: bool
) -> dict[str, Any] | None:
    found = {}
    for name, value in Contents.of(module, stores, skip):
        if is_writer:
            found[name] = value.clone()
    if not is_writer:
        return None
    for each in Sketch.of(module).parameters:
        found |= {alias: found[each.name] for alias in each.aliases if each.name in found}
    return {name: found[name] for name in module.state_dict() if name in found}


@dataclass(frozen=True, slots=True)
class _Request:
    """What a rank was asked to gather and write. Ranks that gather different things would wait for each other."""

    path: str
    skip: frozenset[str]
    names: str
    """A hash of the names that the rank has. Where the ranks have different parts of a model, nobody gathers it."""
    failure: str | None = None

    def agreed(self, team: RankGroup, validation: Validation, call: str) -> str:
        """The path of the first rank, who alone writes; an error on all ranks where one cannot take part."""
        said: list[_Request] = team.all_gather(self, call)
        if failures := {rank: each.failure for rank, each in enumerate(said) if each.failure}:
            raise UsageError(in_words(failures))
        if len({each.names for each in said}) > 1:
            raise NotBuilt(
                f"{call}: the ranks have different parts of the model, which are not gathered yet: save a checkpoint, "
                "and export that with `mizzen checkpoint export`"
            )
        refuse_unequal([{"which frozen parameters are left out": sorted(each.skip)} for each in said], call)
        is_quiet = validation == "Ignore"
        team.take_first("files", {rank: each.path for rank, each in enumerate(said)}, "Ignore" if is_quiet else "Warn")
        return said[0].path


def save(
    folder: Given, name: str, module: nn.Module, stores: Sequence[Store], *, skip: frozenset[str], saving: Saving
) -> None:
    """Write it to a file: as safetensors while it is gathered, or with torch.save, which needs it all on the host.

    The first rank writes. What keeps it from that is told to all of them, who would wait for it.
    """
    team, call = saving.team.on_job_group(), f"saving {name}"
    asked, unusable = attempt(lambda: Path(place_of(folder_of(saving.settings, folder))) / name)
    path = Path(_Request(str(asked), skip, _names(module), unusable).agreed(team, saving.settings.tag_validation, call))
    team.run_on_first(lambda: _make_place(path), call)
    failure = None
    if path.suffix != SAFETENSORS:
        found = _gathered(module, stores, skip, is_writer=team.is_first)
        if found is not None:
            _, failure = attempt(lambda: save_torch(found, path))
    else:
        contents = Contents.of(module, stores, skip)
        walk = iter(contents)
        if team.is_first:
            chunks = (chunk for _, value in walk for chunk in bytes_of(value))
            _, failure = attempt(lambda: commit_chunks(path, chain([header_of(contents.facts())], chunks)))
        for _ in walk:
            pass
    team.raise_failures(failure, call)


def _names(module: nn.Module) -> str:
    """A hash of the names of what a module has."""
    names = sorted({*dict(module.named_parameters()), *dict(module.named_buffers())})
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()


def _make_place(path: Path) -> None:
    make_folder(path.parent)
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name the file that the model is to be written to")
