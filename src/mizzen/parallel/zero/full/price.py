"""Where the tensors of units rest, and the bytes that a rank holds of them: pure arithmetic over a division."""

from collections.abc import Iterator
from dataclasses import replace

from mizzen.model.sketch import bytes_per_element
from mizzen.offload.places import DEVICE, ParameterSettings, parameter_places, places_for
from mizzen.parallel.zero.full.assemble import FullHolding, UnitSet
from mizzen.parallel.zero.full.division import Division, Unit
from mizzen.parallel.zero.full.quantized import is_packed, packed_bytes
from mizzen.parallel.zero.full.sharded_parameter import shard_dim, up
from mizzen.parallel.zero.shard import FlatSettings, late_cost, passing_cost
from mizzen.plan.cost import Cost, trained
from mizzen.precision.policy import Policy, wider


def _padded(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a shard, padding included."""
    dim = shard_dim(shape, ranks)
    share = -(-shape[dim] // ranks)
    for other, size in enumerate(shape):
        share *= size if other != dim else 1
    return share


def place_states(division: Division, flat: FlatSettings, sharing: int) -> tuple[Division, int, FlatSettings]:
    """Give every unit the resting place of its masters and states.

    Also how many bytes rest on NVMe, and the settings with what is left of the budgets. Backward completes the last
    units first.
    """
    if not flat.offload.is_on:
        return division, 0, flat
    units = tuple(reversed(division.units))
    sizes = [
        sum(
            trained(_padded(p.shape, sharing), flat.policy.held(p.dtype), flat.policy, states=flat.states[0]).resting
            for p in unit.parameters
            if p.is_trained and not p.is_whole
        )
        for unit in units
    ]
    places = places_for(sizes, flat.offload)
    placed = [replace(unit, place=place) for unit, place in zip(units, places, strict=True)]
    nvme = sum(size for size, place in zip(sizes, places, strict=True) if place == "nvme")
    rest = replace(flat, offload=flat.offload.after(sizes, places))
    return replace(division, units=tuple(reversed(placed))), nvme, rest


def place_shards(division: Division, settings: ParameterSettings, sharing: int) -> Division:
    """Give every unit the resting place of its shards."""
    counts = [sum(_padded(p.shape, sharing) for p in unit.parameters) for unit in division.units]
    places = parameter_places(counts, settings)
    units = tuple(replace(unit, shard_place=place) for unit, place in zip(division.units, places, strict=True))
    return replace(division, units=units)


def shards_on_nvme(division: Division, policy: Policy, sharing: int) -> tuple[int, int]:
    """The bytes of all shards that rest on NVMe, and of the largest that are brought together."""
    far = [
        size for unit in division.units if unit.shard_place == "nvme" for size in _shard_sizes(unit, policy, sharing)
    ]
    return sum(far), max(far, default=0)


def shards_in_host(division: Division, policy: Policy, settings: ParameterSettings, sharing: int) -> int:
    """The bytes of host memory that shards take there, and the buffers of those that rest on NVMe."""
    near = (unit for unit in division.units if unit.shard_place == "host")
    largest = shards_on_nvme(division, policy, sharing)[1]
    return sum(sum(_shard_sizes(unit, policy, sharing)) for unit in near) + largest * settings.buffers


def _shard_sizes(unit: Unit, policy: Policy, sharing: int) -> Iterator[int]:
    """The bytes of what is brought together of a unit: the shards of each group, and of frozen ones by dtype."""
    counts: dict[tuple[int | None, str], int] = {}
    for each in unit.parameters:
        kind = (each.group or 0 if each.is_trained else None, policy.held(each.dtype))
        counts[kind] = counts.get(kind, 0) + _padded(each.shape, sharing)
    return (up(count) * bytes_per_element(dtype) for (_, dtype), count in counts.items())


def price_of_units(part: UnitSet, states: tuple[int, int]) -> Cost:
    """What sharing out the units of one set changes on a rank."""
    change = transient(part) + _owned(part, states)
    if part.holding.offload.in_backward:  # where a gradient is multiplied
        near = [_sums(unit, part.holding) for unit in part.division.units if unit.place == "host"]
        change += Cost(host=max(near, default=0))
    for unit in part.division.units:
        change += _at_rest(unit, part.holding, states) - _all_of(unit, part.holding.policy, states)
    far = [replace(unit, shard_place=DEVICE) for unit in part.division.units if unit.place == "nvme"]
    return change + passing_cost(_at_rest(unit, part.holding, states).nvme for unit in far)


def _at_rest(unit: Unit, holding: FullHolding, states: tuple[int, int]) -> Cost:
    """What a rank keeps of a unit: shards in one flat tensor for each group and dtype, and sums that do not leave."""
    policy, ranks = holding.policy, holding.reduction.ranks
    shares: dict[tuple[int | None, str, bool], int] = {}
    cost = Cost()
    for each in unit.parameters:
        share, dtype = _padded(each.shape, ranks), policy.held(each.dtype)
        if not each.is_trained and holding.quantizing.frozen and is_packed(each, ranks):
            cost += Cost(parameters=packed_bytes(share))
        else:
            kind = (each.group or 0 if each.is_trained else None, dtype, each.is_whole)
            shares[kind] = shares.get(kind, 0) + share
    for (group, dtype, is_whole), count in shares.items():
        kept = trained(up(count), dtype, policy, states=states[is_whole])
        is_near = unit.shard_place == DEVICE
        shards = {DEVICE: Cost(kept.parameters), "host": Cost(host=kept.parameters), "nvme": Cost(nvme=kept.parameters)}
        if group is None:
            cost += shards[unit.shard_place]
        elif unit.place == "host" and not is_whole:
            copies = kept.resting if holding.offload.in_backward else 0
            cost += shards[unit.shard_place] + Cost(host=kept.resting + kept.gradients + copies)
            cost += late_cost(up(count), kept, holding.offload.zenflow)
        elif unit.place == "nvme" and not is_whole:
            cost += shards[unit.shard_place] + Cost(host=kept.gradients, nvme=kept.resting)
        else:  # shards on the device are the masters
            cost += Cost() if is_near and kept.masters else shards[unit.shard_place]
            masters = kept.masters if is_near else kept.masters or kept.parameters
            cost += Cost(0, 0, masters, 0 if is_whole else kept.states)
    return cost if _sums_leave(unit, holding) else cost + Cost(gradients=_sums(unit, holding))


def _sums(unit: Unit, holding: FullHolding) -> int:
    """The bytes of the sums of gradients of a unit."""
    those = [p for p in unit.parameters if p.is_trained]
    if not those:
        return 0
    count = sum(_padded(p.shape, holding.reduction.ranks) for p in those)
    return trained(up(count), holding.policy.held(those[0].dtype), holding.policy, states=0).gradients


def _sums_leave(unit: Unit, holding: FullHolding) -> bool:
    """Whether these rest outside the device, as masters do; where the device has room to spare, they may stay.

    They stay where they are needed there, for important columns.
    """
    is_needed = holding.offload.zenflow is not None or any(p.is_trained and p.is_whole for p in unit.parameters)
    return unit.place != DEVICE and not is_needed


def _all_of(unit: Unit, policy: Policy, states: tuple[int, int]) -> Cost:
    """What a rank would keep that holds all of it."""
    cost = Cost()
    for each in unit.parameters:
        whole = trained(each.numel, policy.held(each.dtype), policy, states=states[each.is_whole])
        cost += whole if each.is_trained else Cost(parameters=whole.parameters)
    return cost


def _owned(part: UnitSet, states: tuple[int, int]) -> Cost:
    """The states of the whole parameters of the rank that owns most, and in a step their values and gradients."""
    policy, owners = part.holding.policy, dict(part.holding.owners)
    costs = [Cost()] * part.holding.reduction.ranks
    for unit in part.division.units:
        for parameter in unit.parameters:
            if parameter.name in owners and unit.master is not None:
                size = parameter.numel * bytes_per_element(wider(policy.states, unit.master))
                costs[owners[parameter.name]] += Cost(size, size, 0, size * states[True])
    return max(costs, key=lambda cost: cost.total)


def transient(part: UnitSet) -> Cost:
    """Bytes at most of what comes and goes: what is gathered, and two units on their way.

    A unit that is reduced is held as it is sent and as it is received. Shards that rest elsewhere are fetched two units
    ahead; buffers are what those on NVMe pass through. Of sums that rest elsewhere three units are on the device: one
    that comes, one that is added to and one that leaves.
    """
    policy = part.holding.policy
    sent = []
    for unit in part.division.units:
        count = sum(parameter.numel for parameter in unit.parameters if parameter.is_trained)
        dtype = wider(policy.accumulation, unit.held) if unit.held else policy.accumulation
        sent.append(2 * count * bytes_per_element(dtype))
    ranks, (_, largest) = part.holding.reduction.ranks, part.holding.shard_bytes
    resting = [unit for unit in part.division.units if unit.shard_place != DEVICE]
    fetched = sorted(sum(_shard_sizes(unit, policy, ranks)) for unit in resting)[-2:]
    gathered = gathered_bytes(part, stays=part.holding.stays)
    host = largest * part.holding.parameters.buffers
    summed = sorted(_sums(unit, part.holding) for unit in part.division.units if _sums_leave(unit, part.holding))[-3:]
    return Cost(gathered + sum(fetched), sum(sorted(sent)[-2:]) + sum(summed), host=host)


def gathered_bytes(part: UnitSet, *, stays: bool) -> int:
    """Bytes of whole parameters at most: of all units, or of the model's own and two others."""
    root, *others = (_bytes_of(unit) for unit in part.division.units)
    return root + sum(others if stays else sorted(others)[-2:])


def _bytes_of(unit: Unit) -> int:
    return sum(
        parameter.numel * bytes_per_element(unit.held if unit.held and parameter.is_trained else parameter.dtype)
        for parameter in unit.parameters
    )
