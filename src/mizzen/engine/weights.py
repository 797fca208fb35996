"""The weights of an engine by name, as Pieces: what this rank holds of them, and who else holds the same.

Everything here asks stores, and none of it asks for a stage. Optimizer states are in `states.py`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mizzen.checkpoint.write import WEIGHT, Item
from mizzen.comm import groups
from mizzen.model.home import Site
from mizzen.model.piece import Piece, counted, piece_of_boxes, piece_of_whole
from mizzen.model.sketch import Sketch
from mizzen.plan.parts import Store


@dataclass(frozen=True, slots=True)
class HeldItem:
    """Something to save, and the ranks that hold the very same."""

    item: Item
    holders: tuple[int, ...]
    is_joint: bool = False
    """Whether one rank writes all of what these hold together: buffers of two ranks need not fit each other."""
    is_spare: bool = False
    """Whether another rank writes it anyway, but perhaps on another node."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights and buffers of a model."""

    pieces: tuple[Piece, ...]
    """What this rank holds, with the most bits that there are: masters where there are any."""
    shapes: Mapping[str, tuple[int, ...]]
    """All of them, also those of which this rank holds nothing."""
    aliases: Mapping[str, str]
    """Further names of a tied parameter, with the one under which it is saved."""
    frozen: frozenset[str]
    """Parameters that nobody trains."""
    buffers: frozenset[str]
    stored: Mapping[str, Store]
    """The parameters that a store holds."""
    sites: Mapping[str, Site]
    """Where parameters live of which not all ranks of a piece of the model hold the same."""

    @classmethod
    def of(cls, module: nn.Module, stores: Sequence[Store]) -> "Weights":
        """Look at a model in training."""
        sketch = Sketch.of(module)
        stored = {name: store for store in stores for name in store.contents.held}
        sites = {name: site for store in stores for name, site in store.contents.sites.items()}
        called = {id(each): name for store in stores for name, each in store.contents.held.items()}
        own: dict[str, Tensor] = dict(module.named_parameters())
        persistent = {buffer.name for buffer in sketch.buffers if buffer.persistent}
        own |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
        plain = {name: tensor for name, tensor in own.items() if id(tensor) not in called}
        pieces = [piece for store in stores for piece in store.pieces("master")]
        # A piece of a model may know a parameter by one of its other names alone.
        names = {name: called.get(id(tensor), name) for name, tensor in own.items()}
        aliases = {alias: names[p.name] for p in sketch.parameters for alias in (p.name, *p.aliases)}
        aliases |= {alias: b.name for b in sketch.buffers for alias in b.aliases}
        return cls(
            pieces=(*pieces, *(_piece(name, tensor, sites.get(name)) for name, tensor in plain.items())),
            shapes={
                names[name]: sites[names[name]].shape if names[name] in sites else tuple(tensor.shape)
                for name, tensor in own.items()
            },
            aliases={alias: name for alias, name in aliases.items() if alias != name},
            frozen=frozenset(names[each.name] for each in sketch.parameters if not each.requires_grad),
            buffers=frozenset(persistent),
            stored=stored,
            sites=sites,
        )

    def facts(self, skip: frozenset[str]) -> dict[str, Any]:
        """What a checkpoint says of the names that this rank knows. Other ranks may know others."""
        return {
            "names": [name for name in self.shapes if name not in skip],
            "aliases": dict(self.aliases),
            "frozen": sorted(self.frozen),
            "buffers": sorted(self.buffers),
            "excluded": sorted(skip),
        }

    def held(self, rank: int, same_piece: Sequence[int], skip: frozenset[str]) -> Iterator[HeldItem]:
        """What to save of them. `same_piece` are the ranks that hold what no store has."""
        for piece in self.pieces:
            if piece.name in skip:
                continue
            if (store := self.stored.get(piece.name)) is not None:
                holders = holders_of(store, rank)
                parts = saved(store, piece)
            else:
                site = self.sites.get(piece.name)
                holders = tuple(same_piece) if site is None else site.home.holders(site.layout, rank)
                parts = ((part, not is_counted) for part, is_counted in counted(piece, site))
            for part, is_spare in parts:
                yield HeldItem(Item(WEIGHT, part), holders, is_joint=piece.name in self.buffers, is_spare=is_spare)


def _piece(name: str, tensor: Tensor, site: Site | None) -> Piece:
    """What no store holds, whole or in part."""
    if site is None:
        return piece_of_whole(name, tensor)
    return piece_of_boxes(name, site.shape, tensor, site.boxes_of_range(0, tensor.numel()))


def saved(store: Store, piece: Piece) -> Iterator[tuple[Piece, bool]]:
    """What to save of a piece, in parts, with whether it is spare: others save it, who hold the same."""
    for part, is_counted in counted(piece, store.contents.sites.get(piece.name)):
        yield part, not is_counted or piece.name in store.contents.saved_elsewhere


def holders_of(store: Store, rank: int) -> tuple[int, ...]:
    """The ranks that hold the same of a store as this one."""
    same = store.ranks.replica_group
    return tuple(groups.get_all_ranks_from_group(same)) if same is not None else (rank,)


def items_to_write(held: Iterable[HeldItem], rank: int, nodes: Sequence[str]) -> list[Item]:
    """What this rank writes, so that all is written once, or once on each node, by ranks that have about as much each.

    Ranks that hold the same come to the same answer without asking each other.
    """
    together: dict[tuple[int, ...], list[HeldItem]] = defaultdict(list)
    for each in held:
        if each.is_spare and not nodes:
            continue
        here = tuple(holder for holder in each.holders if not nodes or nodes[holder] == nodes[rank])
        together[here].append(each)
    mine: list[Item] = []
    for holders, those in together.items():
        loads = dict.fromkeys(holders, 0)
        for each in sorted(those, key=lambda each: -each.item.nbytes):
            writer = holders[0]
            if not each.is_joint:
                writer = min(loads, key=lambda holder: (loads[holder], holder))
                loads[writer] += each.item.nbytes
            if writer == rank:
                mine.append(each.item)
    return mine


def extra_states(modules: Iterable[nn.Module]) -> dict[str, Any]:
    """What modules, and those in them, want to have saved beside tensors."""
    return {name: found.get_extra_state() for name, found in _with_extras(modules)}


def set_extra_states(modules: Iterable[nn.Module], states: Mapping[str, Any]) -> None:
    """Give modules back what `extra_states` has taken from them."""
    for name, found in _with_extras(modules):
        if name in states:
            found.set_extra_state(states[name])


def _with_extras(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for module in modules:
        for name, found in module.named_modules():
            if type(found).get_extra_state is not nn.Module.get_extra_state:
                yield name, found
