"""Which tests a run takes: the short choice of `make test`, the rest that `make test-all` adds, or both.

Tests are written in full. Two things put a case into the rest: the marker `wide` on a test or on a value, for what
tells more of a promise that a shorter test keeps as well; and a cross of several `parametrize` in a ring where a case
is dear, or of a test that is marked so, of which the short choice has every value of every axis once, and only FULL=1
every combination; in `parity`, the rest has every value once more. BREADTH is `short` (as without it), `rest` or `all`.
FULL=1 also makes lists longer where a test has more values than any change should wait for, and implies `all` where
nothing else is asked for.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

import pytest

FULL: Final = bool(os.environ.get("FULL"))
BREADTH: Final = os.environ.get("BREADTH") or ("all" if FULL else "short")

TESTS: Final = Path(__file__).parent
DEAR: Final = {"ranks", "parity", "examples"}
"""Rings in which a case costs a second or so, and crosses are cut."""
TWICE: Final = {"parity"}
"""Those of them in which the rest has every value of a cross once more."""


def choice(values: Iterable[Any], short: Iterable[Any]) -> list[Any]:
    """All values of a `parametrize`, those that are not in `short` for `make test-all` alone."""
    kept = list(short)
    return [value if value in kept else _wide(value) for value in values]


def chosen(values: Iterable[Any], short: Iterable[Any]) -> list[Any]:
    """Of values that one test runs through, or that one fixture is made of, those that this run takes.

    Tests of such values bear the marker `in_parts`: the short run and the rest both take them, with other values.
    """
    kept = list(short)
    taken = {"short": lambda value: value in kept, "rest": lambda value: value not in kept}
    return list(filter(taken.get(BREADTH, lambda value: True), values))


def _wide(value: Any) -> Any:
    given = value if isinstance(value, tuple) else (value,)
    return pytest.param(*given, marks=pytest.mark.wide)


def together(cases: Sequence[Any], on: Callable[[Any], Any], short: Iterable[Any], most: int | dict = 4) -> list:
    """Values of a `parametrize`: cases that run on the same ranks, `most` of them, one after the other.

    `on` says what cases have to share for that, such as their number of ranks; `most` may differ by it. The first
    engine of a process costs three times a later one. Cases that are not in `short` are for `make test-all` alone.
    """
    kept, found = list(short), []
    for place in dict.fromkeys(map(on, cases)):
        step = most if isinstance(most, int) else most[place]
        fitting = [case for case in cases if on(case) == place]
        for kind, marks in (("short", ()), ("rest", pytest.mark.wide)):
            those = [case for case in fitting if (case in kept) == (kind == "short")]
            starts = range(0, len(those), step)
            found += [pytest.param(those[at : at + step], id=f"{place}-{kind}-{at}", marks=marks) for at in starts]
    return found


def every_pair(axes: Sequence[Iterable[Any]]) -> list[tuple]:
    """A few combinations in which every two values of different axes meet; all of them with FULL=1."""
    everything = list(product(*axes))
    return everything if FULL else covering(everything, 2)


def covering(rows: Sequence[tuple], strength: int) -> list[tuple]:
    """The fewest rows, or nearly, that have what every `strength` values have together in any row."""
    parts = {row: set(combinations(enumerate(row), strength)) for row in rows}
    wanted = set().union(*parts.values())
    chosen = []
    while wanted:
        best = max(parts, key=lambda row: len(wanted & parts[row]))
        wanted -= parts[best]
        chosen.append(best)
    return chosen


def choose(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Of collected tests those to run, and the others."""
    if BREADTH == "all":
        return items, []
    if BREADTH not in ("short", "rest"):
        raise pytest.UsageError(f"BREADTH={BREADTH}: it is short, rest or all")
    short, rest = (set(part) for part in _parted(items))
    if BREADTH == "rest":
        rest = rest if not FULL else set(items) - short
        short = rest | {item for item in items if item.get_closest_marker("in_parts")}
    return [item for item in items if item in short], [item for item in items if item not in short]


def _parted(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The short choice, and the rest without the combinations that only FULL=1 makes."""
    parts: dict[bool, list[pytest.Item]] = {False: [], True: []}
    crosses: dict[tuple[str, bool], dict[tuple, pytest.Item]] = {}
    for item in items:
        is_wide = item.get_closest_marker("wide") is not None
        axes = list(item.iter_markers("parametrize"))
        is_dear = _ring(item) in DEAR or item.get_closest_marker("dear")
        if len(axes) < 2 or not is_dear or item.get_closest_marker("crossed"):
            parts[is_wide].append(item)
            continue
        row = tuple(tuple(id(item.callspec.params[name]) for name in _names(mark)) for mark in axes)
        crosses.setdefault((item.nodeid.partition("[")[0], is_wide), {})[row] = item
    for (_, is_wide), rows in crosses.items():
        once = covering(list(rows), 1)
        parts[is_wide] += [rows[row] for row in once]
        if not is_wide and _ring(next(iter(rows.values()))) in TWICE:
            parts[True] += [rows[row] for row in covering([row for row in rows if row not in once], 1)]
    return parts[False], parts[True]


def _ring(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def _names(mark: pytest.Mark) -> list[str]:
    given = mark.args[0]
    return [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
