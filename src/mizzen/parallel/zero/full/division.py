"""Which parameters are gathered together, and which stay whole on every rank. Pure arithmetic over a Sketch.

A unit is a module whose parameters are gathered by one collective before it runs and freed after it. The model itself
is a unit too: it has what lies in no other, or in several of them, and stays gathered from forward to backward.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from mizzen.config.zero import LeafModuleConfig, ZeroConfig
from mizzen.errors import PlanError
from mizzen.model.blocks import Blocks
from mizzen.model.sketch import ParameterSketch, Sketch, ancestors_of, count_of, parent_of
from mizzen.parallel.zero.full.sharded_parameter import shard_dim
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
