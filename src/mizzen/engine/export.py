"""The whole model in the dtype it computes with, gathered bundle by bundle: no rank holds more than one at a time.

What is cut, or lies on ranks that run another piece of the model, is sent to the first rank box by box.

All ranks walk together. Files for going on with training are checkpoints, and not made here.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from mizzen.accelerator import get_accelerator
from mizzen.checkpoint.convert import save_torch
from mizzen.checkpoint.rank_group import RankGroup, Validation, attempt, in_words, place_of, refuse_unequal
from mizzen.checkpoint.tensors import bytes_of, header_of
from mizzen.comm import collectives
from mizzen.engine.saving import Given, Saving, folder_of
from mizzen.errors import UsageError
from mizzen.files import commit_chunks, make_folder
from mizzen.model.box import Box
from mizzen.model.home import Site
from mizzen.model.sketch import Sketch
from mizzen.parallel.zero.full.sharded_parameter import is_sharded
from mizzen.plan.parts import Store

SAFETENSORS: Final = ".safetensors"


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A tensor that a rank holds something of, and what it gives of it to the rank that writes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole."""
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Own:
    """What of a model a rank has: what is whole here anyway, and bundles of what is gathered, in this order."""

    plain: Mapping[str, Tensor]
    bundles: Sequence[tuple[Store, Sequence[str]]]
    aliases: Mapping[str, str]
    """Further names of what is tied, with the one under which it is written."""
    sites: Mapping[str, Site]

    @classmethod
    def of(cls, module: nn.Module, stores: Sequence[Store], skip: frozenset[str]) -> "Own":
        """Everything in the state dict that is not to be skipped, each tensor under one name for all ranks."""
        called = {id(each): name for store in stores for name, each in store.contents.held.items()}
        first = {alias: each.name for each in Sketch.of(module).parameters for alias in each.names}
        own = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
        names = {name: called.get(id(value), first.get(name, name)) for name, value in own.items() if name not in skip}
        gathered = {name for store in stores for name, each in store.contents.held.items() if is_sharded(each)}
        wanted = gathered.intersection(names.values())
        return cls(
            {names[name]: own[name].detach() for name in names if names[name] not in gathered},
            [
                (store, [name for name in bundle if name in wanted])
                for store in stores
                for bundle in store.contents.units
            ],
            {name: others for name, others in names.items() if name != others},
            {name: site for store in stores for name, site in store.contents.sites.items()},
        )

    def offers(self, rank: int, same_piece: Sequence[int]) -> dict[str, HeldPart]:
        """What this rank gives. What lives nowhere else than on `same_piece`, the first of these ranks gives."""
        facts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, value in self.plain.items():
            facts[name] = value.dtype, tuple(value.shape)
        for store, names in self.bundles:
            held = store.contents.held
            facts |= {name: (held[name].dtype, tuple(held[name].shape)) for name in names}
        found = {}
        for name, (dtype, shape) in facts.items():
            if (site := self.sites.get(name)) is not None:
                offer = HeldPart(dtype, site.shape, site.given)
            else:
                is_given = rank == min(same_piece) and not Box.whole(shape).is_empty
                offer = HeldPart(dtype, shape, (Box.whole(shape),) if is_given else ())
            if offer.boxes or (rank == min(same_piece) and Box.whole(shape).is_empty):
                found[name] = offer
        return found

    @contextmanager
    def opened(self, bundle: int | None) -> Iterator[Mapping[str, Tensor]]:
        """What there is by name inside of a bundle, or beside all of them."""
        if bundle is None:
            yield self.plain
            return
        store, names = self.bundles[bundle]
        with torch.no_grad(), store.gather(names) as whole:
            yield {name: whole[name].detach() for name in names}


class Contents:
    """The whole model, tensor by tensor: each is put together on the first rank, of boxes that others send."""

    def __init__(self, own: Own, said: Sequence[Mapping[str, HeldPart]], rank: int) -> None:
        self.own = own
        self.rank = rank
        self.offers: dict[str, HeldPart] = {}
        """What each tensor is like, in the order in which they come."""
        self.givers: dict[str, list[tuple[int, Box]]] = {}
        for giver, offers in enumerate(said):
            for name, offer in offers.items():
                self.offers.setdefault(name, offer)
                self.givers.setdefault(name, []).extend((giver, box) for box in offer.boxes)
        self._bundle_of = {name: at for at, (_, names) in enumerate(own.bundles) for name in names}

    def facts(self) -> Iterator[tuple[str, torch.dtype, list[int]]]:
        """(name, dtype, shape) of what is written, without gathering anything."""
        return ((name, offer.dtype, list(offer.shape)) for name, offer in self.offers.items())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of what is written, on the host of the first rank, elsewhere nothing. All ranks walk along."""
        for bundle, names in groupby(self.offers, key=self._bundle_of.get):
            with self.own.opened(bundle) as here:
                for name in names:
                    if (value := self._together(name, here.get(name))) is not None:
                        yield name, value

    def _together(self, name: str, mine: Tensor | None) -> Tensor | None:
        """A whole tensor, of what each rank gives of it."""
        offer, givers, device = self.offers[name], self.givers[name], get_accelerator().device()
        whole = Box.whole(offer.shape)
        if self.rank:
            for giver, box in givers:
                if giver == self.rank and mine is not None:
                    collectives.send(self._part(name, box, mine).to(device), dst=0)
            return None
        if mine is not None and givers == [(0, whole)]:
            return mine.to("cpu", copy=name in self._bundle_of)
        found = torch.empty(offer.shape, dtype=offer.dtype)
        for giver, box in givers:
            if giver == 0 and mine is not None:
                part = self._part(name, box, mine)
            else:
                part = torch.empty(box.shape, dtype=offer.dtype, device=device)
                collectives.recv(part, src=giver)
            found[box.slices(whole)] = part.cpu()
        return found

    def _part(self, name: str, box: Box, mine: Tensor) -> Tensor:
        """A box of a whole tensor, of which this rank has a part."""
        site = self.own.sites.get(name)
        place = dict(site.parts)[box] if site is not None else box
        return mine[place.slices(Box.whole(mine.shape))].contiguous()


def whole_state_dict(
    module: nn.Module, stores: Sequence[Store], *, skip: frozenset[str], group: RankGroup, same_piece: Sequence[int]
) -> dict[str, Any] | None:
    """The whole model as a dict on the first rank, under every name; None on the others."""
    own = Own.of(module, stores, skip)
    _, said = _Request.of("", skip, own, group, same_piece).agreed(group, "Warn", "gathering the model")
    return _gathered(Contents(own, [each.offers for each in said], group.rank), said, module)


def _gathered(contents: Contents, said: Sequence["_Request"], module: nn.Module) -> dict[str, Any] | None:
    found = {name: value.clone() for name, value in contents}
    if contents.rank:
        return None
    for each in said:
        found |= {alias: found[name] for alias, name in each.aliases.items() if name in found}
    names = dict.fromkeys((*(name for name in module.state_dict() if name in found), *found))
    return {name: found[name] for name in names}


@dataclass(frozen=True, slots=True)
class _Request:
    """What a rank was asked to gather and write, and what it gives. Ranks that do something else would wait."""

    path: str
    skip: frozenset[str]
    names: str
    """A hash of the names that the rank has: those that have the same leave out the same."""
    offers: Mapping[str, HeldPart]
    aliases: Mapping[str, str]
    failure: str | None = None

    @classmethod
    def of(
        cls,
        path: str,
        skip: frozenset[str],
        own: Own,
        group: RankGroup,
        same_piece: Sequence[int],
        failure: str | None = None,
    ) -> "_Request":
        """What this rank has to say."""
        names = "\n".join(sorted({*own.plain, *(name for _, bundle in own.bundles for name in bundle), *skip}))
        digest = hashlib.blake2b(names.encode(), digest_size=16).hexdigest()
        offers = own.offers(group.rank, same_piece)
        return cls(path, skip, digest, offers, own.aliases if offers else {}, failure)

    def agreed(self, group: RankGroup, validation: Validation, call: str) -> tuple[str, list["_Request"]]:
        """The path of the first rank, who alone writes, and what all say; an error where one cannot take part."""
        said: list[_Request] = group.all_gather(self, call)
        if failures := {rank: each.failure for rank, each in enumerate(said) if each.failure}:
            raise UsageError(in_words(failures))
        for names in dict.fromkeys(each.names for each in said):
            alike = [each for each in said if each.names == names]
            refuse_unequal([{"which frozen parameters are left out": sorted(each.skip)} for each in alike], call)
        is_quiet = validation == "Ignore"
        group.take_first("files", {rank: each.path for rank, each in enumerate(said)}, "Ignore" if is_quiet else "Warn")
        return said[0].path, said


def save(
    folder: Given,
    name: str,
    module: nn.Module,
    stores: Sequence[Store],
    *,
    skip: frozenset[str],
    saving: Saving,
    same_piece: Sequence[int],
) -> None:
    """Write it to a file: as safetensors while it is gathered, or with torch.save, which needs it all on the host.

    The first rank writes. What keeps it from that is told to all of them, who would wait for it.
    """
    group, call = saving.group.on_job_group(), f"saving {name}"
    asked, unusable = attempt(lambda: Path(place_of(folder_of(saving.settings, folder))) / name)
    own = Own.of(module, stores, skip)
    request = _Request.of(str(asked), skip, own, group, same_piece, unusable)
    agreed, said = request.agreed(group, saving.settings.tag_validation, call)
    path = Path(agreed)
    group.run_on_first(lambda: _make_place(path), call)
    contents, failure = Contents(own, [each.offers for each in said], group.rank), None
    if path.suffix != SAFETENSORS:
        found = _gathered(contents, said, module)
        if found is not None:
            _, failure = attempt(lambda: save_torch(found, path))
    else:
        walk = iter(contents)
        if group.is_first:
            chunks = (chunk for _, value in walk for chunk in bytes_of(value))
            _, failure = attempt(lambda: commit_chunks(path, chain([header_of(contents.facts())], chunks)))
        for _ in walk:
            pass
    group.raise_failures(failure, call)


def _make_place(path: Path) -> None:
    make_folder(path.parent)
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name the file that the model is to be written to")
