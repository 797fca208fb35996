"""Which rank steps which whole parameter, where an update rule cannot work on a shard. Pure arithmetic."""

from collections.abc import Iterable

from mizzen.model.sketch import ParameterSketch

Owners = tuple[tuple[str, int], ...]
"""Names of parameters, each with the rank that steps it, counted among those that share it."""


def choose_owners(parameters: Iterable[ParameterSketch], ranks: int) -> Owners:
    """Give every parameter that is stepped whole to the rank that has least, the largest first."""
    wanted = [each for each in parameters if each.is_trained and each.is_whole]
    loads, found = [0] * ranks, {}
    for each in sorted(wanted, key=lambda each: -each.numel):
        owner = found[each.name] = loads.index(min(loads))
        loads[owner] += each.numel
    return tuple((each.name, found[each.name]) for each in wanted)
