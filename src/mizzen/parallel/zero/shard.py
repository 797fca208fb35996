"""ZeRO as a transform: decides the buffers, buckets and reduction of a run, and moves the parameters into them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from torch import nn

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import DATA_AXES, Layout, Partition
from mizzen.config.schema import Config
from mizzen.config.zero import ZenFlowConfig
from mizzen.errors import PlanError
from mizzen.model.home import Site, pieces_at
from mizzen.model.sketch import Drafts, ParameterSketch, Sketch, bytes_per_element
from mizzen.offload.places import DEVICE, PLACES, OffloadSettings, places_for, refuse_in_backward, refuse_zenflow
from mizzen.parallel.zero.reduce import Reduction
from mizzen.parallel.zero.slots import Bucket, Buffer, Tenant, bucket_limit, lay_out
from mizzen.parallel.zero.store import FlatStore, Holding
from mizzen.parallel.zero.twins import twin_groups, twin_sums
from mizzen.plan.cost import Cost, states_per_parameter, trained
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform
from mizzen.precision.policy import FLOATING, Policy, wider
from mizzen.wording import and_more, counted

Stage = Literal[0, 1, 2]


@dataclass(frozen=True, slots=True)
class FlatSettings:
    """What a configuration says of flat buffers and of the sums in them."""

    stage: Stage
    policy: Policy
    overlap: bool
    reduce_elements: int
    """Elements that are summed together, at most."""
    gather_elements: int
    """Elements that are gathered together, at most."""
    is_sum: bool = False
    """Whether the sum of the gradients was asked for instead of their mean."""
    sparse: bool = False
    predivide: float = 1.0
    prescale: bool = False
    in_rank_order: bool = False
    early: bool = True
    """Whether gradients may be divided as they are copied."""
    offload: OffloadSettings = OffloadSettings()
    states: tuple[int, ...] = (2, 2)
    """Full-size tensors that the optimizer keeps for each parameter, and for each that its rule needs whole."""

    @classmethod
    def of(cls, config: Config, stage: Stage, *, overlap: bool) -> "FlatSettings":
        """Read a configuration."""
        zero = config.zero_optimization
        return cls(
            stage,
            Policy.of(config),
            overlap,
            zero.reduce_bucket_size,
            zero.allgather_bucket_size,
            is_sum=config.gradient_allreduce_op == "sum",
            sparse=config.sparse_gradients and zero.stage < 3,
            predivide=config.gradient_predivide_factor,
            prescale=config.prescale_gradients,
            in_rank_order=config.deterministic,
            early=stage != 1,
            offload=replace(OffloadSettings.of(config), states=states_per_parameter(config)),
            states=tuple(states_per_parameter(config, is_whole=is_whole) for is_whole in (False, True)),
        )

    def mean(self, ranks: int, *, early: bool = False) -> Reduction:
        """The mean over some ranks, in two factors as asked for: before the sum, and after it.

        Where gradients may be divided `early`, as they are copied, and that loses no bit, it costs nothing to do so.
        """
        policy, asked = self.policy, self.predivide if ranks > 1 else 1.0
        is_exact = ranks.bit_count() == 1 and "float16" not in (policy.parameters, policy.accumulation, policy.wire)
        is_early = early and is_exact and asked == 1
        before = 1 / ranks if self.prescale or is_early else 1 / asked
        return Reduction(
            ranks=ranks,
            dtype=policy.wire,
            before=before,
            after=1 / (before * ranks),
            in_rank_order=self.in_rank_order,
            is_early=is_early,
        )


@dataclass(frozen=True, slots=True)
class Family:
    """Parameters whose gradients are summed over the same ranks: the buffers of one store on one rank."""

    ranks: tuple[int, ...]
    """Those over which gradients are summed, and masters and states shared out."""
    counts: bool
    """Whether these count what they hold in a norm and save it, or other ranks that hold the same do."""
    holding: Holding
    buffers: tuple[Buffer, ...]
    sites: Mapping[str, Site]
    names: Mapping[str, tuple[str, ...]]
    """All names of each parameter, of which its piece may know but one."""
    frozen: Mapping[str, Site] = field(default_factory=dict)
    """Parameters beside these that nobody trains, and of which not all ranks of the piece hold the same."""


def families(draft: Sketch, flat: FlatSettings, layout: Layout, rank: int) -> tuple[Family, ...]:
    """The trained parameters that a rank holds of a draft, by home; those on several pipeline stages come last."""
    alike: dict[tuple[object, ...], list[ParameterSketch]] = {}
    for parameter in draft.parameters:
        if parameter.is_trained and parameter.home.is_at(layout, rank):
            alike.setdefault(parameter.home.key(layout), []).append(parameter)
    found = [_family(parameters, flat, layout, rank) for parameters in alike.values()]
    found.sort(key=lambda family: any(site.is_far for site in family.sites.values()))
    if flat.offload.is_on:
        found = _placed(found, flat)
    if found:
        found[0] = replace(found[0], frozen=_frozen(draft, layout, rank))
    return tuple(found)


def _placed(found: Sequence[Family], flat: FlatSettings) -> list[Family]:
    """Give every bucket its resting place, so that a rank keeps within its budget over all of them."""
    buffers = [(family, buffer) for family in found for buffer in family.buffers]
    sizes = [_resting(family, buffer, bucket, flat) for family, buffer in buffers for bucket in buffer.buckets]
    places = iter(zip(places_for(sizes, flat.offload), sizes, strict=True))

    def placed(family: Family) -> Family:
        buffers, nvme = [], 0
        for buffer in family.buffers:
            found = [(bucket, *next(places)) for bucket in buffer.buckets]
            nvme += sum(size for _, place, size in found if place == "nvme")
            buffers.append(replace(buffer, buckets=tuple(replace(bucket, place=place) for bucket, place, _ in found)))
        is_far = any(site.is_far for site in family.sites.values())
        overlap = flat.overlap and not is_far
        holding = replace(family.holding, overlap=overlap, offload=flat.offload, nvme_bytes=nvme)
        return replace(family, buffers=tuple(buffers), holding=holding)

    return [placed(family) for family in found]


def after_families(found: Iterable[Family], flat: FlatSettings) -> FlatSettings:
    """These settings for what comes beside some families, whose masters and states take a part of the budgets."""
    held = [(f, buffer, bucket) for f in found for buffer in f.buffers for bucket in buffer.buckets]
    sizes = [_resting(family, buffer, bucket, flat) for family, buffer, bucket in held]
    return replace(flat, offload=flat.offload.after(sizes, [bucket.place for _, _, bucket in held]))


def _resting(family: Family, buffer: Buffer, bucket: Bucket, flat: FlatSettings) -> int:
    """The bytes of a bucket that may rest elsewhere, on its largest owner."""
    share = bucket.numel if bucket.is_whole else bucket.numel // family.holding.chunks
    return trained(share, buffer.dtype, flat.policy, states=flat.states[bucket.is_whole]).resting


def _frozen(draft: Sketch, layout: Layout, rank: int) -> dict[str, Site]:
    """The frozen parameters that a rank holds, where they live elsewhere than on all ranks of the piece."""
    those = (p for p in draft.parameters if not p.is_trained and p.home.is_at(layout, rank))
    return {p.name: Site(p.shape, p.home, layout, rank) for p in those if p.home.cuts or p.home.only}


def _family(parameters: Sequence[ParameterSketch], flat: FlatSettings, layout: Layout, rank: int) -> Family:
    sites = {p.name: Site(p.shape, p.home, layout, rank) for p in parameters}
    home = parameters[0].home
    adders = home.adders(layout, rank)
    ranks = len(adders)
    tenants = [
        Tenant(
            p.name,
            sites[p.name].local_shape,
            flat.policy.held(p.dtype),
            p.group or 0,
            is_sparse=flat.sparse and p.is_embedding,
            is_whole=p.is_whole,
        )
        for p in parameters
    ]
    stage: Stage = flat.stage if ranks > 1 else 0
    asked = min(flat.reduce_elements, flat.gather_elements) if stage else flat.reduce_elements
    limit = bucket_limit(sum(tenant.numel for tenant in tenants), asked)
    holding = Holding(
        stage,
        flat.mean(ranks, early=flat.early),
        flat.policy,
        # Ranks on other pipeline stages run their backward at another time: nobody waits for them in the middle of one.
        overlap=flat.overlap and ranks > 1 and not next(iter(sites.values())).is_far,
        weight=ranks / home.divisor,
        gain=float(ranks) if flat.is_sum else ranks / home.divisor,
        is_staged=layout.pp > 1,
    )
    return Family(
        ranks=adders,
        counts=home.is_first(layout, rank),
        holding=holding,
        buffers=lay_out(tenants, chunks=ranks, bucket_elements=limit),
        sites=sites,
        names={p.name: p.names for p in parameters},
    )


def partitions(drafts: Drafts, layout: Layout) -> Iterator[Partition]:
    """The ranks over which gradients are summed, for every home; also those that hold the same part of a cut one."""
    for home in dict.fromkeys(p.home for draft in drafts for p in draft.parameters if p.is_trained):
        there = (rank for rank in range(layout.world) if home.is_at(layout, rank))
        found = tuple(dict.fromkeys(home.adders(layout, rank) for rank in there))
        if len(found[0]) > 1:
            yield found
    yield from twin_groups(drafts, layout)


@dataclass(frozen=True, slots=True)
class ZeroChoice:
    """How the trained parameters of every piece are held in flat buffers."""

    asked: int
    flat: FlatSettings
    drafts: Drafts
    layout: Layout
    _families: dict[int, list[tuple[Family, ...]]] = field(init=False, repr=False, compare=False, default_factory=dict)
    """By rank, of those that were asked for."""

    @property
    def states(self) -> tuple[int, ...]:
        """Full-size tensors that the optimizer keeps for each parameter, and for each that its rule needs whole."""
        return self.flat.states

    def families(self, rank: int) -> list[tuple[Family, ...]]:
        """What a rank holds, for each of its pieces."""
        if rank not in self._families:
            pieces = pieces_at(rank, self.layout, len(self.drafts))
            self._families[rank] = [families(self.drafts[piece], self.flat, self.layout, rank) for piece in pieces]
        return self._families[rank]

    def __str__(self) -> str:
        held = [family for piece in self.families(0) for family in piece]
        ranks = max((family.holding.reduction.ranks for family in held), default=self.layout.size(*DATA_AXES))
        buckets = [bucket for family in held for buffer in family.buffers for bucket in buffer.buckets]
        places = [bucket.place for bucket in buckets]
        resting = resting_words(places) + stepping_words(places, self.flat.offload)
        if ranks == 1:
            return f"ZeRO stage {self.asked} on one data-parallel rank: nothing to shard{resting}"
        owned = sum(bucket.is_whole for bucket in buckets)
        words = f" in {counted(len(buckets), 'bucket')}" if buckets else ""
        words += f", {owned} of them with one owner each" if owned and self.flat.stage else ""
        return f"ZeRO stage {self.asked} over dp={ranks}{words}, sums in {self.flat.policy.wire or 'float32'}{resting}"


def resting_words(places: Iterable[str], what: str = "masters and states") -> str:
    """How many lots or units rest where, if not all rest on the device."""
    counts = Counter(places)
    if not counts.keys() - {DEVICE}:
        return ""
    return f"; {what} rest " + ", ".join(
        f"{'on' if place != 'host' else 'in'} {place}: {counts[place]}" for place in PLACES if counts[place]
    )


def stepping_words(places: Sequence[str], settings: OffloadSettings) -> str:
    """How what rests in host memory is stepped, if not all of it after every backward."""
    found = "the host steps during backward, into copies" if settings.in_backward else ""
    found = f"zenflow: {settings.zenflow.words()}" if settings.zenflow is not None else found
    if found and places and "host" not in places:
        found = f"nothing rests in host memory, so this has no effect: {found}"
    return f"; {found}" if found else ""


def shards_parameters(config: Config, layout: Layout) -> bool:
    """Whether units are gathered and freed (`ZeroFull`): at stage 3 with others to share parameters with.

    On one rank that is so where parameters rest outside the device.
    """
    zero = config.zero_optimization
    return zero.stage == 3 and (layout.size(*DATA_AXES) > 1 or zero.offload_param is not None)


class ZeroShard(Transform):
    """Stages 0 to 2, and any stage on one rank, which has nobody to share with."""

    name = "shard"

    def wants(self, config: Config, layout: Layout, drafts: Drafts) -> ZeroChoice | None:
        """Lay out the trained parameters; None when nothing is trained."""
        zero = config.zero_optimization
        if shards_parameters(config, layout):
            return None
        check(drafts, layout)
        refuse_zenflow(config, layout)
        refuse_in_backward(config)
        parameters = [parameter for draft in drafts for parameter in draft.parameters]
        if parameters and not any(parameter.is_trained for parameter in parameters):
            return None
        return ZeroChoice(
            asked=zero.stage,
            flat=FlatSettings.of(config, 0 if zero.stage == 3 else zero.stage, overlap=zero.overlap_comm),
            drafts=drafts,
            layout=layout,
        )

    def groups(self, choice: ZeroChoice) -> Iterable[Partition]:
        """Wherever gradients are summed."""
        return partitions(choice.drafts, choice.layout)

    def price(self, choice: ZeroChoice, rank: int) -> Cost:
        """What sharding saves, and what padding and the buckets in flight cost; where ranks differ, of the largest."""
        return sum((price_of(family, choice.states) for piece in choice.families(rank) for family in piece), Cost())

    def apply(self, parts: Parts, choice: ZeroChoice, mesh: Mesh) -> Parts:
        """Move the parameters of every part into flat buffers."""
        found = []
        for part, piece in zip(parts, choice.families(mesh.rank), strict=True):
            stores = (store_of(family, part.module, mesh) for family in piece)
            found.append(replace(part, stores=(*part.stores, *stores)))
        return tuple(found)


def store_of(family: Family, module: nn.Module, mesh: Mesh) -> FlatStore:
    """The buffers of a family, made of the parameters of a module."""
    group = mesh.group_of(family.ranks) if len(family.ranks) > 1 else None
    own = dict(module.named_parameters(remove_duplicate=False))
    return FlatStore(
        family.buffers,
        {name: next(own[each] for each in names if each in own) for name, names in family.names.items()},
        family.holding,
        group,
        sites={**family.sites, **family.frozen},
        counts=family.counts,
        others={axis: mesh.group(axis) for site in family.sites.values() for axis in site.other_axes},
        twins=twin_sums(family.sites, mesh),
    )


def price_of(family: Family, states: Sequence[int], *, at_rest: bool = False) -> Cost:
    """What sharing out changes on the rank of a family that holds most; `at_rest` without what is on its way."""
    ranks = range(family.holding.chunks if any(buffer.is_whole for buffer in family.buffers) else 1)
    return max((_change(family, states, place, at_rest=at_rest) for place in ranks), key=lambda change: change.total)


def _change(family: Family, states: Sequence[int], place: int, *, at_rest: bool) -> Cost:
    """What sharing out changes on one rank of a family."""
    holding = family.holding
    change = Cost(gradients=_in_flight(family) if holding.stage == 2 and not at_rest else 0)
    for buffer in family.buffers:
        price = partial(trained, dtype=buffer.dtype, policy=holding.policy, states=states[buffer.is_whole])
        padded, share = price(buffer.numel), price(buffer.share(place, holding.chunks))
        gradients = {0: padded.gradients, 1: padded.gradients + share.gradients, 2: share.gradients}[holding.stage]
        change += Cost(padded.parameters, gradients, share.masters, share.states) - price(buffer.occupied)
        for bucket in buffer.buckets:
            change += _elsewhere(family, buffer, bucket, place, states)
    shares = [
        (bucket.place, _share(family, buffer, bucket, place, states))
        for buffer in family.buffers
        for bucket in buffer.buckets
    ]
    if holding.offload.in_backward:  # where a gradient is multiplied
        change += Cost(host=max((share.gradients for at, share in shares if at == "host"), default=0))
    return change if at_rest else change + passing_cost(share.resting for at, share in shares if at == "nvme")


def _share(family: Family, buffer: Buffer, bucket: Bucket, place: int, states: Sequence[int]) -> Cost:
    """What a rank owns of a bucket."""
    low, high = bucket.owned(place, family.holding.chunks)
    return trained(high - low, buffer.dtype, family.holding.policy, states=states[bucket.is_whole])


def _elsewhere(family: Family, buffer: Buffer, bucket: Bucket, place: int, states: Sequence[int]) -> Cost:
    """What a bucket whose masters and states rest elsewhere takes from the device, and brings there."""
    if bucket.place == DEVICE:
        return Cost()
    low, high = bucket.owned(place, family.holding.chunks)
    share, offload = _share(family, buffer, bucket, place, states), family.holding.offload
    saved = Cost(masters=-share.masters, states=-share.states)
    if bucket.place == "host":
        copies = share.resting if offload.in_backward else 0
        there = Cost(host=share.resting + share.gradients + copies)
        return saved + there + late_cost(high - low, share, offload.zenflow)
    return saved + Cost(host=share.gradients, nvme=share.resting)


def passing_cost(sizes: Iterable[int]) -> Cost:
    """Host memory that lots of these bytes on NVMe take in a step: one is read, one stepped, one written."""
    return Cost(host=sum(sorted(sizes)[-3:]))


def late_cost(count: int, share: Cost, zenflow: ZenFlowConfig | None) -> Cost:
    """What late updates of so many elements take beside masters and states in host memory.

    The host has the gradients that wait and which elements are important; with an update beside training also what it
    changes, and the new values. The device has important masters and states, and eight bytes for the place of each.
    """
    if zenflow is None:
        return Cost()
    masters = share.masters or share.parameters
    beside = masters + share.parameters if zenflow.overlap_step else 0
    important = Cost(masters=round(zenflow.topk_ratio * masters), states=round(zenflow.topk_ratio * share.states))
    apart = Cost(host=important.total) if zenflow.offload else important
    return Cost(states=round(zenflow.topk_ratio * 8 * count), host=masters + count + beside) + apart


def check(drafts: Drafts, layout: Layout) -> None:
    """Refuse parameters that cannot be trained, or that cannot live where they are to."""
    for draft in drafts:
        refuse_what_does_not_float(draft)
        for p in draft.parameters:
            p.home.check(p.name, p.shape, layout)
            if p.home.cuts and p.is_whole:
                _check_whole(p, layout)


def _check_whole(p: ParameterSketch, layout: Layout) -> None:
    """Refuse a cut parameter whose update rule needs it whole, unless the rule can put equal parts of it together."""
    axes = {cut.axis for cut in p.home.cuts}
    first = next(rank for rank in range(layout.world) if p.home.is_at(layout, rank))
    shapes = {p.home.local_shape(p.shape, layout, rank) for rank in layout.ranks_along(axes, first)}
    if not p.is_joined or axes != {"tp"}:
        raise PlanError(
            f"'{p.name}' is cut along {axes.pop()}, and its update rule needs it whole: use another optimizer"
        )
    if len(shapes) > 1:
        raise PlanError(
            f"'{p.name}' of shape {list(p.shape)} is cut along tp in parts of different shapes, "
            f"{and_more(map(list, sorted(shapes)), 3)}, which Muon does not put together: use a size that divides, or "
            "another optimizer"
        )


def refuse_what_does_not_float(sketch: Sketch) -> None:
    """Only floating-point parameters are trained."""
    for parameter in sketch.parameters:
        if parameter.is_trained and parameter.dtype not in FLOATING:
            raise PlanError(
                f"'{parameter.name}' is trained in {parameter.dtype}: gradients are summed in one of "
                f"{', '.join(FLOATING)}; freeze it, or hold it as one of these"
            )


def _in_flight(family: Family) -> int:
    """Bytes of stage 2 on their way, at most: one bucket that fills, two that travel, and what is sent and received.

    That is while gradients arrive in the order of the buckets; one that waits for others is a further bucket.
    """
    reduction = family.holding.reduction
    held, exchanged = [], []
    for buffer in family.buffers:
        dtype = wider(family.holding.policy.accumulation, buffer.dtype)
        wire = reduction.dtype or wider(dtype, "float32")
        is_copied = wire != dtype or (reduction.before != 1 and not reduction.is_early)
        for bucket in buffer.buckets:
            is_exchanged = reduction.in_rank_order and reduction.ranks > 2  # two ranks keep their own share
            received = bucket.numel if is_exchanged else bucket.numel // reduction.ranks
            if bucket.is_whole:  # its owner gets it from every rank
                received = bucket.numel * (reduction.ranks if reduction.in_rank_order else 1)
            held.append(bucket.numel * bytes_per_element(dtype))
            exchanged.append((is_copied * bucket.numel + received) * bytes_per_element(wire))
    return sum(sorted(held)[-3:]) + sum(sorted(exchanged)[-2:])
