"""Which parameter an optimizer's number means, when a checkpoint has only numbers: decided by shapes, or not at all.

Groups keep the order of the model inside themselves. If there is exactly one way to lay them over the model's
parameters, that is it; with two ways nothing is guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
