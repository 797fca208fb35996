"""ZeRO stage 3 as a transform: decides the units of a model, and shards them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch.distributed.device_mesh import DeviceMesh

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import DATA_AXES, SHARD_AXES, Layout, Partition
from mizzen.config.schema import Config
from mizzen.config.zero import ZeroConfig
from mizzen.errors import PlanError
from mizzen.model.home import Site, classes, pieces_at
from mizzen.model.sketch import Drafts, Sketch
from mizzen.offload.places import ParameterSettings, refuse_in_backward, refuse_zenflow
from mizzen.parallel.zero.full.division import (
    Division,
    FullHolding,
    UnitSet,
    choose_owners,
    divide,
    gathered_bytes,
    place_shards,
    place_states,
    price_of_units,
    shards_in_host,
    shards_on_nvme,
)
from mizzen.parallel.zero.full.quantized import Quantizing
from mizzen.parallel.zero.full.runtime import UnitRuntime
from mizzen.parallel.zero.full.store import FullStore
from mizzen.parallel.zero.full.unit import UnitRanks
from mizzen.parallel.zero.shard import (
    Family,
    FlatSettings,
    after_families,
    check,
    families,
    partitions,
    price_of,
    resting_words,
    shards_parameters,
    stepping_words,
    store_of,
)
from mizzen.parallel.zero.twins import twin_sums
from mizzen.plan.cost import Cost, states_per_parameter
from mizzen.plan.parts import Part, Parts, Store
from mizzen.plan.transform import Transform
from mizzen.precision.policy import Policy
from mizzen.wording import byte_size


@dataclass(frozen=True, slots=True)
class FullPart:
    """What one rank holds of one piece of a model."""

    sets: tuple["UnitSet", ...]
    """Units by the ranks that share them; the first set is shared by all data-parallel ranks."""
    families: tuple[Family, ...]
    """What stays whole, in flat buffers."""
    sites: Mapping[str, Site]
    uncounted: frozenset[str]
    """Parameters that other ranks count in a norm and save, because they hold the same."""


@dataclass(frozen=True, slots=True)
class _Sharers:
    """The ranks that share some units."""

    ranks: tuple[int, ...] | None
    """These, where they are some of the data-parallel ones."""
    sharing: int
    copies: int = 1
    weight: float = 1.0
    """What makes of the mean over these ranks the mean that is asked for."""


@dataclass(frozen=True, slots=True)
class FullChoice:
    """How the units of every piece are held, and the flat buffers of what stays whole."""

    flat: FlatSettings
    zero: ZeroConfig
    ahead: int
    """Elements that are gathered before they are needed, in whole units."""
    second: int
    """After forward a unit stays shared out over so many ranks; 0 means over all of them."""
    quantizing: Quantizing
    drafts: Drafts
    layout: Layout
    states: tuple[int, int] = (2, 2)
    """Full-size tensors that the optimizer keeps for each parameter, and for each that its rule needs whole."""
    stays: bool = False
    """Whether the stages of a pipeline stay gathered while a batch goes through them."""
    parameters: ParameterSettings = ParameterSettings()
    """Where parameters rest."""
    _parts: dict[int, list[FullPart]] = field(init=False, repr=False, compare=False, default_factory=dict)
    """By rank, of those that were asked for."""

    def parts(self, rank: int) -> list[FullPart]:
        """What a rank holds, for each of its pieces."""
        if rank not in self._parts:
            self._parts[rank] = list(self._make_parts(rank))
        return self._parts[rank]

    def _make_parts(self, rank: int) -> Iterator[FullPart]:
        pieces = [self.drafts[piece] for piece in pieces_at(rank, self.layout, len(self.drafts))]
        divided = [self._divide(draft, rank) for draft in pieces]
        sizes = (
            shards_in_host(division, self.flat.policy, self.parameters, kind.sharing)
            for divisions in divided
            for kind, division in divisions
        )
        flat = replace(self.flat, offload=self.flat.offload.beside(sum(sizes)))
        for draft, divisions in zip(pieces, divided, strict=True):
            part, flat = self._part(draft, rank, divisions, flat)
            yield part

    def _divide(self, draft: Sketch, rank: int) -> list[tuple["_Sharers", Division]]:
        """The units of a piece by the ranks that share them; the first are those of all data-parallel ranks."""
        layout = self.layout
        local = draft.local(layout, rank)
        data = layout.ranks_along(DATA_AXES, rank)
        homes: dict[tuple[int, ...], list[str]] = {data: []}
        for each in local.parameters:
            adders = each.home.adders(layout, rank)
            if adders == data or (each.is_trained and len(adders) > 1 and set(adders) < set(data)):
                homes.setdefault(adders, []).append(each.name)
        everyone = _Sharers(None, layout.size(*SHARD_AXES), layout.dp_replicate)
        found = [(everyone, local.having(set(homes.pop(data))))]
        for adders, names in homes.items():
            divisor = next(p.home.divisor for p in local.parameters if p.name == names[0])
            some = _Sharers(adders, len(adders), weight=len(adders) / divisor)
            found.append((some, local.having(set(names))))
        return [(kind, self._division(sketch, kind.sharing)) for kind, sketch in found]

    def _division(self, sketch: Sketch, sharing: int) -> Division:
        division = divide(sketch, self.zero, self.flat.policy, sharing)
        _refuse_mixed(division, self.zero, self.flat.policy)
        return place_shards(division, self.parameters, sharing)

    def _part(
        self, draft: Sketch, rank: int, divided: list[tuple["_Sharers", Division]], flat: FlatSettings
    ) -> tuple[FullPart, FlatSettings]:
        """What a rank holds of one piece, and the settings with what is left of the budgets."""
        layout = self.layout
        local = draft.local(layout, rank)
        sharded = {p.name for _, division in divided for unit in division.units for p in unit.parameters}
        whole = {p.name for p in local.parameters} - sharded
        # Every backward reduces, as units do, so that sums are taken in the same order. Not while it runs: buckets
        # would leave between the gathers of units, on each rank at another place.
        kept = families(draft.having(whole), flat, layout, rank)
        flat = after_families(kept, flat)
        sets = []
        for kind, division in divided:
            division, nvme, flat = place_states(division, flat, kind.sharing)
            sets.append(self._set(division, kind, nvme))
        part = FullPart(
            sets=tuple(sets),
            families=kept,
            sites=_sites(draft, layout, rank),
            uncounted=frozenset(p.name for p in local.parameters if not p.home.is_first(layout, rank)),
        )
        return part, flat

    def _set(self, division: Division, kind: "_Sharers", nvme: int) -> UnitSet:
        flat, sharing, copies = self.flat, kind.sharing, kind.copies
        holding = FullHolding(
            flat.mean(sharing),
            flat.mean(copies),
            flat.policy,
            self.ahead,
            kind.weight,
            float(sharing * copies) if flat.is_sum else kind.weight,
            self.quantizing,
            choose_owners((p for unit in division.units for p in unit.parameters), sharing),
            flat.offload,
            nvme,
            self.stays,
            self.parameters,
            shards_on_nvme(division, flat.policy, sharing),
        )
        return UnitSet(kind.ranks, division, holding)

    def __str__(self) -> str:
        sharing, copies = self.layout.size(*SHARD_AXES), self.layout.dp_replicate
        dtype = self.flat.policy.wire or "float32"
        over = f"over dp={sharing}" if copies == 1 else f"over {sharing} ranks in {copies} copies"
        over = over if sharing * copies > 1 else "on one data-parallel rank"
        first, *others = self.parts(0)[0].sets
        named = first.division.units[0].parameters or len(first.division.units) > 1
        units = f": {first.division}" if named else ""
        units += "".join(f"; over {len(each.ranks or ())} ranks {each.division}" for each in others)
        quantized = f", {self.quantizing}" if self.quantizing != Quantizing() else ""
        second = f", a second copy over {self.second} ranks for backward" if self.second else ""
        whole = sum(len(each.holding.owners) for each in (first, *others))
        owned = f"; {whole} are stepped whole, each by one rank" if whole else ""
        every = [unit for each in (first, *others) for unit in each.division.units if unit.parameters]
        resting = resting_words((unit.shard_place for unit in every), "parameters of units")
        places = [unit.place for unit in every if unit.held]
        resting += resting_words(places) + stepping_words(places, self.flat.offload)
        return f"ZeRO stage 3 {over}, sums in {dtype}{second}{quantized}{units}{owned}{resting}{self._between()}"

    def _between(self) -> str:
        """What becomes of units between the micro-batches of a pipeline, and what both ways cost."""
        if self.layout.pp == 1:
            return ""
        ranks = [self.layout.rank(pp=stage) for stage in range(self.layout.pp)]
        sets = [[each for part in self.parts(rank) for each in part.sets] for rank in ranks]
        costs = {
            stays: byte_size(max(sum(gathered_bytes(each, stays=stays) for each in held) for held in sets))
            for stays in (True, False)
        }
        limit = f"stage3_max_live_parameters {self.zero.stage3_max_live_parameters:,}"
        if self.stays:
            return f"; gathered once for a batch: {costs[True]} whole at most, {costs[False]} if freed ({limit})"
        return f"; gathered for each micro-batch: {costs[False]} whole at most, {costs[True]} if kept ({limit})"


class ZeroFull(Transform):
    """Stage 3 on more than one rank, or with parameters that rest outside the device; otherwise `ZeroShard` does it."""

    name = "shard"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> FullChoice | None:
        """Divide a model into units; None at the other stages."""
        zero, sharing = config.zero_optimization, layout.size(*SHARD_AXES)
        if not shards_parameters(config, layout):
            _refuse_at_other_stages(zero)
            _refuse_alone(zero)
            if layout.dp_replicate > 1:
                raise PlanError(
                    f"zero_optimization.stage {zero.stage} in {layout.dp_replicate} copies: sharding inside copies "
                    "(mics_shard_size, data_parallel_replicate_size) needs stage 3"
                )
            return None
        check(drafts, layout)
        refuse_zenflow(config, layout)
        refuse_in_backward(config)
        _refuse(config, layout)
        choice = FullChoice(
            FlatSettings.of(config, 2, overlap=False),
            zero,
            zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0,
            zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else 0,
            _quantizing(zero, sharing),
            drafts,
            layout,
            (states_per_parameter(config), states_per_parameter(config, is_whole=True)),
            _stays(zero, layout, drafts),
            ParameterSettings.of(config),
        )
        for ranks in classes((p.home for draft in drafts for p in draft.parameters), layout).values():
            choice.parts(ranks[0])  # what cannot be divided is refused here
        return choice

    def groups(self, choice: FullChoice) -> Iterable[Partition]:
        """Wherever gradients are summed, and the ranks that share a second copy."""
        yield from partitions(choice.drafts, choice.layout)
        if choice.second:
            sharing = {choice.layout.ranks_along(SHARD_AXES, rank) for rank in range(choice.layout.world)}
            yield tuple(sorted(part for ranks in sharing for part in _parts_of(ranks, choice.second)))

    def price(self, choice: FullChoice, rank: int) -> Cost:
        """What sharding saves on one rank at rest, and what is gathered and on its way at most.

        Of ranks that own whole parameters it is the one that owns most.
        """
        price = Cost()
        for part in choice.parts(rank):
            price += sum((price_of_units(each, choice.states) for each in part.sets), Cost())
            price += sum((price_of(family, choice.states, at_rest=True) for family in part.families), Cost())
        return price

    def moved_by_apply(self, choice: FullChoice) -> Iterable[str]:
        """Whatever is sharded."""
        parts = (part for stage in range(choice.layout.pp) for part in choice.parts(choice.layout.rank(pp=stage)))
        units = (unit for part in parts for each in part.sets for unit in each.division.units)
        return (parameter.name for unit in units for parameter in unit.parameters)

    def apply(self, parts: Parts, choice: FullChoice, mesh: Mesh) -> Parts:
        """Shard the units of every part, and move what stays whole into flat buffers."""
        copies = mesh.group("dp_replicate") if mesh.size("dp_replicate") > 1 else None
        everyone = mesh.group(*DATA_AXES)
        second = None
        if choice.second:
            sharing = choice.layout.ranks_along(SHARD_AXES, mesh.rank)
            second = mesh.group_of(next(each for each in _parts_of(sharing, choice.second) if mesh.rank in each))
        ranks = UnitRanks(mesh.axes(*SHARD_AXES), mesh.group(*SHARD_AXES), copies, everyone, second)
        return tuple(
            self._apply(part, held, ranks, mesh) for part, held in zip(parts, choice.parts(mesh.rank), strict=True)
        )

    def _apply(self, part: Part, held: FullPart, ranks: UnitRanks, mesh: Mesh) -> Part:
        stores: list[Store] = []
        runtime: UnitRuntime | None = None
        for each in held.sets:
            if any(unit.parameters for unit in each.division.units):
                store = self._store(part, held, each, ranks, mesh, runtime)
                runtime = store.runtime
                stores.append(store)
                part = replace(part, method_scope=store.position)
        stores += [store_of(family, part.module, mesh) for family in held.families]
        return replace(part, stores=(*part.stores, *stores))

    def _store(
        self, part: Part, held: FullPart, each: UnitSet, ranks: UnitRanks, mesh: Mesh, runtime: UnitRuntime | None
    ) -> FullStore:
        others = {axis: mesh.group(axis) for site in held.sites.values() for axis in site.other_axes}
        sharded = {p.name for unit in each.division.units for p in unit.parameters}
        # What is frozen and in no unit has its site in the first store.
        rest = set(held.sites) - {p.name for one in held.sets for unit in one.division.units for p in unit.parameters}
        known = sharded | rest if runtime is None else sharded
        sites = {name: site for name, site in held.sites.items() if name in known}
        trained = {p.name for unit in each.division.units for p in unit.parameters if p.is_trained}
        twins = twin_sums({name: site for name, site in sites.items() if name in trained}, mesh)
        if each.ranks is not None:
            group = mesh.group_of(each.ranks)
            ranks = UnitRanks(DeviceMesh.from_group(group, ranks.mesh.device_type), group, None, group)
        ranks = replace(ranks, others=others)
        uncounted = held.uncounted & sharded
        units = each.division.units
        return FullStore(part.module, units, each.holding, ranks, sites, uncounted, twins, runtime)


def _parts_of(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """Neighbours among some ranks, so many together."""
    return [ranks[at : at + size] for at in range(0, len(ranks), size)]


def _sites(draft: Sketch, layout: Layout, rank: int) -> dict[str, Site]:
    """Where those live of which a rank has but a part, or that others have too beside those that share it."""
    every = {p.name: Site(p.shape, p.home, layout, rank) for p in draft.parameters if p.home.is_at(layout, rank)}
    return {name: site for name, site in every.items() if site.other_axes or site.home.only}


def _stays(zero: ZeroConfig, layout: Layout, drafts: Drafts) -> bool:
    """Whether every stage of a pipeline is small enough to stay gathered while a batch goes through it."""
    for stage in range(layout.pp):
        rank = layout.rank(pp=stage)
        held = (drafts[piece].local(layout, rank) for piece in pieces_at(rank, layout, len(drafts)))
        if sum(p.numel for draft in held for p in draft.parameters) > zero.stage3_max_live_parameters:
            return False
    return layout.pp > 1


def _refuse(config: Config, layout: Layout) -> None:
    zero, sharing = config.zero_optimization, layout.size(*SHARD_AXES)
    if config.sparse_gradients:
        raise PlanError(
            "sparse_gradients with zero_optimization.stage 3: a sharded embedding has a dense gradient; leave the key "
            "out, or use stage 2"
        )
    if sharing == 1 and layout.dp_replicate > 1:
        raise PlanError(
            "zero_optimization.mics_shard_size is 1 at stage 3: every rank would hold everything; use stage 0, 1 or 2"
        )
    hpz = zero.zero_hpz_partition_size
    if hpz > 1 and sharing % hpz:
        raise PlanError(
            f"zero_optimization.zero_hpz_partition_size is {hpz}, which does not divide the {sharing} ranks that share "
            "the parameters: give a divisor"
        )
    others = {
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_hpz_partition_size": hpz > 1,
        "offload_param": zero.offload_param is not None,
    }
    for key, is_on in others.items() if zero.zero_quantized_nontrainable_weights else ():
        if is_on:
            raise PlanError(
                f"zero_optimization.zero_quantized_nontrainable_weights with {key}: frozen weights that rest in blocks "
                "travel as these blocks, from the device, with nothing else to quantize and no second copy; leave one "
                "of the two out"
            )


def _refuse_at_other_stages(zero: ZeroConfig) -> None:
    asked = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zeropp_loco_param": zero.zeropp_loco_param is not None,
        "offload_param": zero.offload_param is not None,
    }
    for key, is_on in asked.items():
        if zero.stage < 3 and is_on:
            raise PlanError(f"zero_optimization.{key} is part of stage 3; zero_optimization.stage is {zero.stage}")


def _refuse_alone(zero: ZeroConfig) -> None:
    if zero.zero_quantized_nontrainable_weights:
        raise PlanError(
            "zero_optimization.zero_quantized_nontrainable_weights on one data-parallel rank: frozen weights rest in "
            "blocks where they are sharded, and one rank has nobody to share with; leave the key out, or use more ranks"
        )


def _refuse_mixed(division: Division, zero: ZeroConfig, policy: Policy) -> None:
    """What is gathered in 8-bit blocks has one dtype."""
    for unit in division.units if zero.zero_quantized_weights else ():
        dtypes = {unit.held if p.is_trained else policy.held(p.dtype) for p in unit.parameters}
        if len(dtypes) > 1:
            raise PlanError(
                f"zero_optimization.zero_quantized_weights: unit '{unit.title}' has parameters of "
                f"{', '.join(sorted(map(str, dtypes)))}, which are gathered as bytes: hold them in one dtype"
            )


def _quantizing(zero: ZeroConfig, sharing: int) -> Quantizing:
    loco = zero.zeropp_loco_param
    if loco is not None and not zero.zero_quantized_gradients:
        raise PlanError(
            "zero_optimization.zeropp_loco_param is the error feedback of zero_quantized_gradients, which is false: "
            "set it to true, or leave the section out"
        )
    hpz = zero.zero_hpz_partition_size
    feedback = (loco.err_beta, loco.reset_T) if loco is not None else None
    return Quantizing(
        zero.zero_quantized_weights,
        zero.zero_quantized_gradients,
        feedback,
        frozen=zero.zero_quantized_nontrainable_weights,
        inside=hpz if zero.zero_quantized_gradients and 1 < hpz < sharing else 0,
    )
