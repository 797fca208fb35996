"""The states of a torch optimizer, which are kept under numbers, by the names of the parameters they belong to.

Where a checkpoint has only numbers, shapes decide which parameter each means, or nothing does. Groups keep the order of
the model inside themselves. If there is exactly one way to lay them over the model's parameters, that is it; with two
ways nothing is guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mizzen.checkpoint.foreign.source import ForeignSource, as_recipe
from mizzen.checkpoint.foreign.values import TensorRef, count_of, entries, expect, name_in, tensors
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
