"""The states of optimizers by the names of the parameters they belong to: kept under numbers, or cut by ZeRO.

torch keeps states under numbers. Where a checkpoint has only these, shapes decide which parameter each means, or
nothing does. Groups keep the order of the model inside themselves. If there is exactly one way to lay them over the
model's parameters, that is it; with two ways nothing is guessed.

ZeRO cuts states into flat shards, one file per rank. At stages 1 and 2 (and for bf16 without ZeRO) each rank says which
range of its flat shard belongs to which parameter. At stage 3 every parameter is cut into equal pieces, in the order of
the saved shapes, and the pieces of one rank lie in a row that may be spread over several flat tensors.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mizzen.checkpoint.foreign.source import FlatRange, ForeignSource, JoinedTensor, as_recipe
from mizzen.checkpoint.foreign.values import (
    Inert,
    Readable,
    TensorRef,
    count_of,
    entries,
    expect,
    name_in,
    shape_of,
    tensors,
)
from mizzen.errors import CheckpointError


def add_numbered(
    source: ForeignSource, model: object, optimizer: Mapping[str, object], *, skip: set[str], where: str
) -> None:
    """The states of a plain torch optimizer, if shapes leave no doubt about which parameter each number means."""
    states = expect(optimizer.get("state"), dict, f"{where}: the optimizer's state")
    groups = expect(optimizer.get("param_groups"), list, f"{where}: param_groups")
    numbers = [expect(entries(group, where).get("params"), list, f"{where}: params") for group in groups]
    if not states:
        return
    shapes: list[list[tuple[int, ...]]] = []
    for group in numbers:
        found = [_shape_of_state(states.get(number)) for number in group]
        if any(shape is None for shape in found):
            source.left_out.append("optimizer states: some parameters have none, so their numbers mean nothing here")
            return
        shapes.append([shape for shape in found if shape is not None])
    names = _named_groups(groups) or align(_parameters(model, skip, where), shapes)
    if names is None or [*map(len, names)] != [*map(len, numbers)]:
        source.left_out.append(
            "optimizer states: they are numbered, and the shapes do not say which parameter each number means"
        )
        return
    for group_names, group in zip(names, numbers, strict=True):
        for name, number in zip(group_names, group, strict=True):
            for kind, value in entries(states[number], where).items():
                if (recipe := as_recipe(value)) is not None:
                    source.add(kind, name, recipe, where=where)


def with_masters(state: Mapping[str, object], where: str) -> Mapping[str, object]:
    """The optimizer inside one that keeps fp32 masters in lists, group by group, with each master among its states."""
    inner = entries(state.get("optimizer_state_dict"), f"{where}: optimizer_state_dict")
    states = dict(expect(inner.get("state"), dict, f"{where}: state"))
    groups = expect(inner.get("param_groups"), list, f"{where}: param_groups")
    masters = expect(state.get("fp32_groups"), list, f"{where}: fp32_groups")
    if len(groups) != len(masters):
        raise CheckpointError(f"{where}: {len(masters)} groups of masters and {len(groups)} of parameters")
    for group, values in zip(groups, masters, strict=True):
        numbers = expect(entries(group, where).get("params"), list, f"{where}: params")
        if len(numbers) != len(expect(values, list, f"{where}: fp32_groups")):
            raise CheckpointError(f"{where}: {len(values)} masters for {len(numbers)} parameters of a group")
        for number, value in zip(numbers, values, strict=True):
            own = entries(states.get(count_of(number, f"{where}: params")), f"{where}: state")
            states[number] = {"master": value, **own}
    return {**inner, "state": states}


def _named_groups(groups: list[object]) -> list[list[str]] | None:
    """The names that torch keeps when an optimizer was made from `named_parameters()`."""
    found = [group.get("param_names") for group in groups if isinstance(group, dict)]
    if not found or not all(isinstance(names, list) for names in found):
        return None
    return [[name_in(name, "param_names") for name in names] for names in found if isinstance(names, list)]


def _shape_of_state(state: object) -> tuple[int, ...] | None:
    """The shape of a parameter, by its states."""
    values = state.values() if isinstance(state, dict) else ()
    return next((value.shape for value in values if isinstance(value, TensorRef) and value.shape), None)


def _parameters(model: object, skip: set[str], where: str) -> dict[str, tuple[int, ...]]:
    """A model's parameters, each once."""
    again = shared_names(model, where)
    return {name: ref.shape for name, ref in tensors(model, where)[0].items() if name not in skip and name not in again}


def shared_names(model: object, where: str) -> dict[str, str]:
    """Names that share their bytes with an earlier one, which is the same parameter: later -> earlier."""
    first: dict[object, str] = {}
    found = {}
    for name, ref in tensors(model, where)[0].items():
        place = (ref.storage.extent, ref.offset, ref.shape)
        if ref.numel and first.setdefault(place, name) != name:
            found[name] = first[place]
    return found


Shape = tuple[int, ...]
Place = tuple[int, ...]
WAYS: Final = 10_000
STEPS: Final = 5_000_000
"""How many ways, groups and parameters may be tried with each other."""


@dataclass(frozen=True, slots=True)
class _Way:
    """How a place was reached: the last parameter that was given to a group, and the way before it."""

    group: int
    name: str
    before: "_Way | None"


@dataclass(slots=True)
class _Ways:
    """One way to a place, and whether there is another."""

    way: _Way | None
    is_only: bool = True


def align(model: Mapping[str, Shape], groups: Sequence[Sequence[Shape]]) -> list[list[str]] | None:
    """The names of each group's parameters, or None when there is no way or more than one."""
    left = STEPS
    spare = len(model) - sum(map(len, groups))
    ways: dict[Place, _Ways] = {(0,) * len(groups): _Ways(None)}
    for seen, (name, shape) in enumerate(model.items(), start=1):
        after: dict[Place, _Ways] = {}
        for place, found in ways.items():
            if seen - sum(place) <= spare:  # a parameter that no group has: a frozen one
                _reach(after, place, found)
            for number, group in enumerate(groups):
                if place[number] < len(group) and group[place[number]] == shape:
                    moved = (*place[:number], place[number] + 1, *place[number + 1 :])
                    _reach(after, moved, _Ways(_Way(number, name, found.way), found.is_only))
        ways = after
        left -= len(ways) * len(groups) ** 2  # a way has as many places as there are groups, and tries each
        if len(ways) > WAYS or left < 0:
            return None
    end = ways.get(tuple(map(len, groups)))
    return _names(end.way, len(groups)) if end is not None and end.is_only else None


def _reach(places: dict[Place, _Ways], place: Place, found: _Ways) -> None:
    if place in places:
        places[place].is_only = False
    else:
        places[place] = _Ways(found.way, found.is_only)


def _names(way: _Way | None, groups: int) -> list[list[str]]:
    names: list[list[str]] = [[] for _ in range(groups)]
    while way is not None:
        names[way.group].append(way.name)
        way = way.before
    return [found[::-1] for found in names]


EXPERT: Final = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,6})(\..*)")
Shapes = Sequence[Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's optimizer file."""

    path: str
    state: Mapping[str, object]
    """What is under `optimizer_state_dict`."""

    @property
    def groups(self) -> list[Mapping[str, object]]:
        """The states of each flat tensor, by their keys, with the masters among them."""
        base = self.state.get("base_optimizer_state", self.state.get("optimizer_state_dict"))
        masters = self.state.get("single_partition_of_fp32_groups", self.state.get("fp32_flat_groups"))
        found: list[Mapping[str, object]] = []
        for number, master in enumerate(expect(masters, list, f"{self.path}: the flat groups")):
            if isinstance(base, list):
                state = base[number] if number < len(base) else None
            else:
                known = entries(base, f"{self.path}: the optimizer's state").get("state")
                state = expect(known, dict, f"{self.path}: state").get(number) if known is not None else None
            found.append({"master": master, **entries(state, f"{self.path}: state {number}")})
        return found


def shapes_of(head: Mapping[str, object], where: str) -> list[dict[str, tuple[int, ...]]]:
    """`param_shapes`: group by group, the trained parameters in the order in which they were flattened."""
    groups = head.get("param_shapes") or []
    return [
        {name: shape_of(shape, f"{where}: param_shapes of {name}") for name, shape in entries(group, where).items()}
        for group in expect(groups, list, f"{where}: param_shapes")
    ]


def add_flat(source: ForeignSource, shards: Sequence[Shard], shapes: Shapes) -> None:
    """Stages 1 and 2, and bf16: ranges by name."""
    known = {name: shape for group in shapes for name, shape in group.items()}
    locals_of = _local_experts(known)
    pieces: dict[str, dict[str, list[FlatRange]]] = {}
    whole: dict[str, dict[str, Readable]] = {}
    for rank, shard in enumerate(shards):
        counts = _partition_counts(shard, len(shards))
        for number, states in enumerate(shard.groups):
            experts_apart = len(shards) // counts[number] if number < len(counts) else 1
            for name, start, count in _mapping(shard, number):
                renamed = _global_expert(name, rank % experts_apart, locals_of)
                if name in known:
                    known.setdefault(renamed, known[name])
                _take(states, renamed, start, count, pieces, whole)
    for name in pieces:
        if name not in known:
            raise CheckpointError(f"{shards[0].path}: has states of {name!r}, whose shape is not in the model file")
    _add(source, shards, known, pieces, whole)


def _mapping(shard: Shard, number: int) -> Iterator[tuple[str, int, int]]:
    """Name, start and count of each parameter in one flat tensor of a rank."""
    mappings = shard.state.get("param_slice_mappings")
    if mappings is None:
        raise CheckpointError(
            f"{shard.path}: does not say where each parameter is (param_slice_mappings): an old DeepSpeed wrote "
            "it; load it with a newer one and save it again"
        )
    groups = expect(mappings, list, f"{shard.path}: param_slice_mappings")
    if number >= len(groups):
        raise CheckpointError(f"{shard.path}: param_slice_mappings has {len(groups)} groups; group {number} is missing")
    for name, address in entries(groups[number], f"{shard.path}: param_slice_mappings").items():
        where = f"{shard.path}: the range of {name}"
        found = expect(address, Inert, where)
        yield name, count_of(found.get("start"), where), count_of(found.get("numel"), where)


def _take(
    states: Mapping[str, object],
    name: str,
    start: int,
    count: int,
    pieces: dict[str, dict[str, list[FlatRange]]],
    whole: dict[str, dict[str, Readable]],
) -> None:
    """Note what one rank has of a parameter: ranges of the flat states, and numbers that hold for all of it."""
    for kind, value in states.items():
        if isinstance(value, TensorRef) and value.shape:
            pieces.setdefault(name, {}).setdefault(kind, []).append(FlatRange(value, start, count))
        elif (recipe := as_recipe(value)) is not None:
            whole.setdefault(name, {}).setdefault(kind, recipe)


def _add(
    source: ForeignSource,
    shards: Sequence[Shard],
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Mapping[str, Mapping[str, Sequence[FlatRange]]],
    whole: Mapping[str, Mapping[str, Readable]],
) -> None:
    for name, kinds in pieces.items():
        for kind, parts in kinds.items():
            if (kind, name) in source.table:
                continue  # a weight that pipeline stages share: both have it
            source.add(
                kind,
                name,
                JoinedTensor(tuple(parts), shapes[name], f"{source.path}: {kind} of {name}"),
                where=shards[0].path,
            )
        for kind, recipe in whole.get(name, {}).items():
            if (kind, name) not in source.table:
                source.add(kind, name, recipe, where=shards[0].path)


def _partition_counts(shard: Shard, ranks: int) -> list[int]:
    """Over how many ranks each group is cut: all, or for experts those that have the same ones."""
    value = shard.state.get("partition_count")
    counts = value if isinstance(value, list) else [value]
    found = [count_of(count, f"{shard.path}: partition_count") for count in counts]
    if not found or max(found) != ranks or any(not count or ranks % count for count in found):
        raise CheckpointError(
            f"{shard.path}: was saved by {found} ranks and there are optimizer files of {ranks}: some are missing, "
            "or are left over from another save"
        )
    return found


def _local_experts(names: Mapping[str, object]) -> dict[str, int]:
    """How many experts of each layer a rank has, by the layer's prefix."""
    found: dict[str, int] = {}
    for name in names:
        if match := EXPERT.fullmatch(name):
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return found


def _global_expert(name: str, place: int, local: Mapping[str, int]) -> str:
    """Ranks number their experts from 0; the checkpoint's files number them through."""
    match = EXPERT.fullmatch(name)
    if match is None or not place:
        return name
    return f"{match[1]}{place * local.get(match[1], 0) + int(match[2])}{match[3]}"


def add_pieces(source: ForeignSource, shards: Sequence[Shard], shapes: Shapes) -> None:
    """Stage 3: equal pieces in the order of the shapes."""
    ranks = len(shards)
    for shard in shards:
        if _partition_counts(shard, ranks) != [ranks]:
            raise CheckpointError(f"{shard.path}: parameters that are cut over parts of the ranks are not read")
        if shard.state.get("ds_zero_partition_groups"):
            raise CheckpointError(f"{shard.path}: experts cut by AutoEP are not read; convert with ds_to_universal")
    rows = [_Row(shard) for shard in shards]
    order = {name: shape for group in shapes for name, shape in group.items()}
    at = 0
    for name, shape in order.items():
        numel = math.prod(shape)
        piece = -(-numel // ranks)
        pieces: dict[str, list[FlatRange]] = {}
        for rank, row in enumerate(rows):
            for kind in row.kinds:
                pieces.setdefault(kind, []).extend(row.cut(kind, at, max(0, min(piece, numel - rank * piece)), name))
        for kind, parts in pieces.items():
            source.add(
                kind, name, JoinedTensor(tuple(parts), shape, f"{source.path}: {kind} of {name}"), where=shards[0].path
            )
        for kind, recipe in rows[0].numbers(at).items():
            source.add(kind, name, recipe, where=shards[0].path)
        at += piece


class _Row:
    """The flat tensors of one rank, one after another."""

    def __init__(self, shard: Shard) -> None:
        self.path = shard.path
        self.groups = shard.groups
        self.starts = [0]
        for number, group in enumerate(self.groups):
            master = expect(group["master"], TensorRef, f"{shard.path}: flat group {number}")
            self.starts.append(self.starts[-1] + master.numel)
        self.kinds = [
            key for key, value in (self.groups or [{}])[0].items() if isinstance(value, TensorRef) and value.shape
        ]

    def cut(self, kind: str, start: int, count: int, name: str) -> Iterator[FlatRange]:
        """The ranges that hold some elements of the row."""
        end = start + count
        if end > self.starts[-1]:
            raise CheckpointError(f"{self.path}: {name} ends at element {end} of {self.starts[-1]}")
        number = bisect_right(self.starts, start) - 1
        while start < end:
            first, last = self.starts[number : number + 2]
            data = expect(self.groups[number].get(kind), TensorRef, f"{self.path}: {kind} of {name}")
            yield FlatRange(data, start - first, min(end, last) - start)
            start, number = last, number + 1

    def numbers(self, start: int) -> dict[str, Readable]:
        """What holds for the whole flat tensor in which an element lies, such as the step."""
        number = min(bisect_right(self.starts, start), len(self.groups)) - 1
        group = self.groups[number] if self.groups else {}
        found = {key: as_recipe(value) for key, value in group.items() if key not in self.kinds}
        return {key: recipe for key, recipe in found.items() if recipe is not None}
