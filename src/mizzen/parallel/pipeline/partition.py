"""Which layers go to which part of a pipeline: neighbours stay together, and the heaviest part is as light as can be.

Bounds are where parts begin, and the end: `(0, 3, 5)` are the layers 0 to 2 and 3 to 4. Pure, no torch; measuring
layers or counting their parameters is for the caller.
"""

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from mizzen.errors import PlanError
from mizzen.wording import and_more

Bounds: TypeAlias = tuple[int, ...]
METHODS = "uniform, parameters, type:REGEX and profile"


def partition(layers: Sequence[float | str], method: str, parts: int) -> Bounds:
    """The bounds of so many parts of some layers, given by their weights, or by the names of their classes.

    `uniform` counts layers. `parameters` balances the weights, which are numbers of trained parameters. `profile` does
    so with measured seconds. `type:REGEX` counts the layers whose class is matched, in upper or lower case.
    """
    if parts < 1 or parts > len(layers):
        most = f"use at most {len(layers)}" if layers else "the model has none"
        raise PlanError(f"{len(layers)} layers cannot be dealt out to {parts} parts of a pipeline, one each: {most}")
    kind = method.lower()
    if kind == "uniform":
        return uniform(len(layers), parts)
    if kind.startswith("type:"):
        return balanced(_matches([str(layer) for layer in layers], method[len("type:") :]), parts)
    if kind in ("parameters", "profile"):
        return balanced([_weight(layer, kind, number) for number, layer in enumerate(layers)], parts)
    raise PlanError(f"partition_method {method!r} is unknown; there are {METHODS}")


def uniform(layers: int, parts: int) -> Bounds:
    """Bounds of parts that differ by one layer at most; the first ones have more."""
    each, more = divmod(layers, parts)
    return tuple(part * each + min(part, more) for part in range(parts + 1))


def balanced(weights: Sequence[float], parts: int) -> Bounds:
    """Bounds whose heaviest part is as light as can be, none empty; among those, the sum of squares is least.

    Where that leaves a choice, layers without weight stay with the one before them.
    """
    if not any(weights):
        return uniform(len(weights), parts)
    sums = [0, *accumulate(weights)]
    limit = lightest(sums, parts)
    return _evenest(sums, parts, limit)


def heaviest(weights: Sequence[float], bounds: Bounds) -> float:
    """The weight of the heaviest part."""
    sums = [0, *accumulate(weights)]
    return max(sums[end] - sums[start] for start, end in pairwise(bounds))


def lightest(sums: Sequence[float], parts: int) -> float:
    """The least weight that the heaviest of so many parts can have; `sums` are those of all weights before each layer.

    Each try either fits, and the next one is lower than its heaviest part, or it does not, and the next one is at
    least what the first part that was too full would have needed. Both are sums of weights, so the search ends exactly.
    """
    low = max(sums[-1] / parts, max(later - sooner for sooner, later in pairwise(sums)))
    high = sums[-1]
    while low < high:
        middle = low + (high - low) / 2
        fits, full, next_full = _try(sums, parts, middle)
        if fits:
            high = full
        else:
            low = next_full
    return high


def _try(sums: Sequence[float], parts: int, limit: float) -> tuple[bool, float, float]:
    """Whether parts of at most this weight take everything, the heaviest of them, and the least higher limit of use."""
    start, full, next_full = 0, 0.0, math.inf
    for _ in range(parts):
        end = _last_end(sums, start, limit)
        full = max(full, sums[end] - sums[start])
        if end == len(sums) - 1:
            return True, full, limit
        next_full = min(next_full, sums[end + 1] - sums[start])
        start = end
    return False, full, next_full


def _last_end(sums: Sequence[float], start: int, limit: float) -> int:
    """The last end of a part that begins here and weighs at most so much, by the differences that weights are."""
    end = bisect_right(sums, sums[start] + limit) - 1
    while end + 1 < len(sums) and sums[end + 1] - sums[start] <= limit:
        end += 1
    while end > start and sums[end] - sums[start] > limit:
        end -= 1
    return end


def _evenest(sums: Sequence[float], parts: int, limit: float) -> Bounds:
    """Of all bounds within the limit those with the least sum of squares; the latest ones where several have it."""
    layers = len(sums) - 1
    ends = [_last_end(sums, start, limit) for start in range(layers + 1)]
    firsts = _first_bounds(ends, parts)
    costs: dict[int, float] = {0: 0.0}
    chosen: list[dict[int, int]] = []  # for each part where it begins, by where it ends
    for part in range(1, parts + 1):
        reached: dict[int, float] = {}
        begins: dict[int, int] = {}
        for start, cost in costs.items():
            for end in range(max(start + 1, firsts[part]), min(ends[start], layers - (parts - part)) + 1):
                total = cost + (sums[end] - sums[start]) ** 2
                if end not in reached or total <= reached[end]:
                    reached[end], begins[end] = total, start
        costs = dict(sorted(reached.items()))
        chosen.append(begins)
    bounds = [layers]
    for begins in reversed(chosen):
        bounds.append(begins[bounds[-1]])
    return tuple(reversed(bounds))


def _first_bounds(ends: Sequence[int], parts: int) -> list[int]:
    """The earliest place of each bound from which the parts after it still take everything."""
    firsts = [len(ends) - 1]
    for _ in range(parts):
        firsts.append(bisect_left(ends, firsts[-1]))
    return firsts[::-1]


def _matches(names: Sequence[str], pattern: str) -> list[float]:
    try:
        wanted = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PlanError(f"partition_method 'type:{pattern}' is no regular expression: {error}") from None
    found = [float(bool(wanted.search(name))) for name in names]
    if not any(found):
        classes = and_more(sorted(set(names)))
        raise PlanError(f"partition_method 'type:{pattern}' matches no layer; their classes are {classes}")
    return found


def _weight(layer: float | str, kind: str, number: int) -> float:
    if isinstance(layer, str) or not math.isfinite(layer) or layer < 0:
        what = "seconds" if kind == "profile" else "numbers of parameters"
        raise PlanError(f"partition_method '{kind}' takes {what} of layers, at least 0; layer {number} has {layer!r}")
    return layer
