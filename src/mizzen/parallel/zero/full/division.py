"""Which parameters are gathered together, where they rest, and the bytes of them on a rank: arithmetic over a Sketch.

A unit is a module whose parameters are gathered by one collective before it runs and freed after it. The model itself
is a unit too: it has what lies in no other, or in several of them, and stays gathered from forward to backward. Some
parameters stay whole on every rank.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from mizzen.config.zero import LeafModuleConfig, ZeroConfig
from mizzen.errors import PlanError
from mizzen.model.blocks import Blocks
from mizzen.model.sketch import ParameterSketch, Sketch, ancestors_of, bytes_per_element, count_of, parent_of
from mizzen.offload.places import DEVICE, OffloadSettings, ParameterSettings, parameter_places, places_for
from mizzen.parallel.zero.full.quantized import Quantizing, is_packed, packed_bytes
from mizzen.parallel.zero.full.sharded_parameter import shard_dim, up
from mizzen.parallel.zero.reduce import Reduction
from mizzen.parallel.zero.shard import FlatSettings, late_cost, passing_cost
from mizzen.plan.cost import Cost, trained
from mizzen.precision.policy import FLOATING, Policy, wider

UNCALLED: Final = ("ModuleList", "ModuleDict")
"""Containers that are never called, so that nothing happens before or after them."""
TILED: Final = ("TiledLinear", "TiledLinearReturnBias")
"""Layers whose tiles are units of their own, wherever they are but inside of a pinned module."""
ROOT: Final = ""
"""The path of the model itself."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered and reduced together."""

    path: str
    kind: str
    """The class of the module."""
    parameters: tuple[ParameterSketch, ...]
    held: str | None
    """The dtype in which trained parameters are computed with; None where nothing is trained."""
    master: str | None
    """The dtype of their shards, on which the optimizer works."""
    place: str = "device"
    """Where the masters and states of those rest that are stepped in shards."""
    shard_place: str = "device"
    """Where the shards rest that are gathered."""

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.path or "(the rest)"

    @property
    def gathers_as(self) -> str | None:
        """The dtype to which shards are cast when they are gathered; None where they are not."""
        return self.held if self.held != self.master else None


@dataclass(frozen=True, slots=True)
class Division:
    """The units, and what is in none."""

    units: tuple[Unit, ...]
    """The model itself comes first, although it may have no parameters of its own."""
    whole: tuple[ParameterSketch, ...]
    """What stays whole on every rank."""

    def __str__(self) -> str:
        blocks = [unit for unit in self.units if unit.path and unit.parameters]
        words = []
        for (kind, numel), group in groupby(blocks, lambda unit: (unit.kind, unit.numel)):
            alike = list(group)
            paths = alike[0].path if len(alike) == 1 else f"{alike[0].path} ... {alike[-1].path}"
            words.append(f"{len(alike)} x {kind} of {count_of(numel)} ({paths})")
        words += [f"the rest of {count_of(unit.numel)}" for unit in self.units if not unit.path and unit.parameters]
        whole = f"; {len(self.whole)} parameters of {count_of(sum(p.numel for p in self.whole))} stay whole"
        return ", ".join(words) + (whole if self.whole else "")


def divide(sketch: Sketch, zero: ZeroConfig, policy: Policy, ranks: int) -> Division:
    """Decide the units of a model: its blocks, or what the user has pinned; and what persists.

    Whole stay parameters below the threshold, 0-d and empty ones, and those whose dtype differs from their unit's. So
    do, beside a second copy, those of blocks that are not cut by rows: torch cuts such a copy by rows alone.
    """
    paths = _paths(sketch, zero.leaf_module)
    kinds = {module.path: module.kind for module in sketch.modules}
    found: dict[str, list[ParameterSketch]] = {ROOT: [], **{path: [] for path in paths}}
    home = _homes(sketch, paths)
    # Where nothing is trained, small parameters are sharded with the rest: there is no flat buffer to keep them in.
    is_trained = any(parameter.is_trained for parameter in sketch.parameters)
    whole = _persistent(sketch.parameters, zero.stage3_param_persistence_threshold if is_trained else 0, zero)
    for parameter in sketch.parameters:
        if parameter.name not in whole:
            found[home[parameter.name]].append(parameter)
    units = []
    for path, inside in found.items():
        held = _majority(inside, policy)
        master = wider(policy.masters, held) if held else None
        by_rows = path != ROOT and zero.zero_hpz_partition_size > 1
        fitting = tuple(
            p for p in inside if _fits(p, held, master, policy) and not (by_rows and shard_dim(p.shape, ranks))
        )
        whole |= {parameter.name for parameter in inside if parameter not in fitting}
        if fitting or path == ROOT:
            units.append(Unit(path, kinds.get(path, "Module"), fitting, held, master))
    return Division(tuple(units), tuple(p for p in sketch.parameters if p.name in whole))


def _paths(sketch: Sketch, leaves: LeafModuleConfig) -> list[str]:
    """Blocks and pinned modules, outermost first come first served; lists that are never called give their items."""
    pinned = [name.rpartition(".")[2] for name in leaves.classes] + [*leaves.names, *leaves.name_suffixes]
    try:
        chosen = [block.path for block in Blocks.of(sketch, pinned).units] if pinned else []
    except PlanError as error:
        raise PlanError(f"zero_optimization.leaf_module: {error}") from None
    chosen += [module.path for module in sketch.modules if module.is_leaf and module.path]
    candidates = {*chosen, *(block.path for block in Blocks.of(sketch).units)}
    outermost = [module.path for module in sketch.modules if module.path in candidates]
    outermost = [path for path in outermost if candidates.isdisjoint(ancestors_of(path))]
    found = {called for path in outermost for called in _called(sketch, path)}
    found |= set(_tiles(sketch, set(chosen)))
    return [module.path for module in sketch.modules if module.path in found]


def _tiles(sketch: Sketch, pinned: Collection[str]) -> Iterator[str]:
    for module in sketch.modules:
        if module.kind in TILED and set(pinned).isdisjoint((module.path, *ancestors_of(module.path))):
            yield from _called(sketch, f"{module.path}.linears".lstrip("."))


def _called(sketch: Sketch, path: str) -> list[str]:
    kinds = {module.path: module.kind for module in sketch.modules}
    if kinds[path] not in UNCALLED:
        return [path]
    children = [child for child in kinds if child and parent_of(child) == path]
    return [called for child in children for called in _called(sketch, child)]


def _homes(sketch: Sketch, paths: Iterable[str]) -> Mapping[str, str]:
    """For every parameter the unit that all of its names lie in; the model itself otherwise."""
    units = set(paths)
    first = {module.path: module.same_as or module.path for module in sketch.modules}

    def around(name: str) -> str:
        return next((first[path] for path in ancestors_of(name) if first.get(path) in units), ROOT)

    homes = {}
    for parameter in sketch.parameters:
        places = {around(name) for name in parameter.names}
        homes[parameter.name] = places.pop() if len(places) == 1 and not parameter.is_external else ROOT
    return homes


def _persistent(parameters: Sequence[ParameterSketch], threshold: int, zero: ZeroConfig) -> set[str]:
    kept = {parameter.name for parameter in parameters if not parameter.shape or not parameter.numel}
    room = zero.stage3_model_persistence_threshold
    for parameter in parameters:
        if parameter.name not in kept and parameter.numel < threshold:
            if parameter.numel > room:
                continue
            room -= parameter.numel
            kept.add(parameter.name)
    return kept


def _majority(parameters: Sequence[ParameterSketch], policy: Policy) -> str | None:
    sizes: dict[str, int] = {}
    for parameter in parameters:
        if parameter.is_trained:
            dtype = policy.held(parameter.dtype)
            sizes[dtype] = sizes.get(dtype, 0) + parameter.numel
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def _fits(parameter: ParameterSketch, held: str | None, master: str | None, policy: Policy) -> bool:
    """Whether it can be gathered with a unit that is cast from `master` to `held`: what is frozen must not be cast."""
    dtype = policy.held(parameter.dtype)
    if parameter.is_trained:
        return dtype == held
    if parameter.requires_grad:  # wants a gradient that nobody takes
        return False
    return held == master or dtype == held or dtype not in FLOATING


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


@dataclass(frozen=True, slots=True)
class FullHolding:
    """How units are held, as plain values of the plan."""

    reduction: Reduction
    """Over the ranks that share one copy."""
    between: Reduction
    """Over the copies, where there are several."""
    policy: Policy
    ahead: int = 1
    """Elements that are gathered before they are needed, in whole units; 0 is none."""
    weight: float = 1.0
    """What makes of the mean over these ranks the mean that is asked for, which may be over more or fewer."""
    gain: float = 1.0
    quantizing: Quantizing = Quantizing()
    owners: Owners = ()
    """Who steps the parameters that their rule needs whole."""
    offload: OffloadSettings = OffloadSettings()
    nvme_bytes: int = 0
    """Bytes of masters and states that are to rest on NVMe."""
    stays: bool = False
    """Whether units stay gathered while a batch goes through a pipeline."""
    parameters: ParameterSettings = ParameterSettings()
    shard_bytes: tuple[int, int] = (0, 0)
    """Bytes of shards that are to rest on NVMe: of all of them, and of the largest that are brought together."""


@dataclass(frozen=True, slots=True)
class UnitSet:
    """Units that the same ranks share."""

    ranks: tuple[int, ...] | None
    """These ranks, where they are some of the data-parallel ones, as those that hold the same experts are."""
    division: Division
    holding: FullHolding


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
