"""ZeRO stage 3 as a transform: decides the units of a model, and shards them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.config.zero import ZeroConfig
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch, bytes_per_element
from mizzen.parallel.zero.full.assemble import FullHolding, Ranks
from mizzen.parallel.zero.full.frozen import is_packed, packed_bytes
from mizzen.parallel.zero.full.owners import choose_owners
from mizzen.parallel.zero.full.quantized import Quantizing
from mizzen.parallel.zero.full.store import FullStore
from mizzen.parallel.zero.full.units import Division, Unit, divide, shard_dim
from mizzen.parallel.zero.full.wrap import Wrapping
from mizzen.parallel.zero.shard import DATA_AXES, mean_over, refuse_what_does_not_float
from mizzen.parallel.zero.slots import Buffer, Tenant, bucket_limit, lay_out
from mizzen.parallel.zero.store import FlatStore, Holding
from mizzen.plan.cost import Cost, states_per_parameter, trained
from mizzen.plan.parts import Part, Parts, Store
from mizzen.plan.transform import Transform
from mizzen.precision.policy import Policy, wider

SHARD_AXES = ("dp_shard", "sp")
"""The ranks that share one copy of the parameters."""


@dataclass(frozen=True, slots=True)
class FullChoice:
    """The units of a run, how they are held, and the flat buffers of what stays whole."""

    division: Division
    holding: FullHolding
    whole: Holding
    buffers: tuple[Buffer, ...]
    states: tuple[int, int] = (2, 2)
    """Full-size tensors that the optimizer keeps for each parameter, and for each that its rule needs whole."""

    def __str__(self) -> str:
        sharing, copies = self.holding.reduction.ranks, self.holding.between.ranks
        dtype = self.holding.reduction.dtype or "float32"
        over = f"dp={sharing}" if copies == 1 else f"{sharing} ranks in {copies} copies"
        units = f": {self.division}" if self.division.units[0].parameters or len(self.division.units) > 1 else ""
        quantized = f", {self.holding.quantizing}" if self.holding.quantizing != Quantizing() else ""
        keeps = self.holding.wrapping.keeps
        second = f", a second copy over {keeps} ranks for backward" if keeps else ""
        owned = f"; {len(self.holding.owners)} are stepped whole, each by one rank" if self.holding.owners else ""
        return f"ZeRO stage 3 over {over}, sums in {dtype}{second}{quantized}{units}{owned}"


class ZeroFull(Transform):
    """Stage 3 on more than one rank; on one there is nothing to shard, and `ZeroShard` holds everything."""

    name = "shard"

    def wants(self, config: Config, layout: Layout, sketch: Sketch) -> FullChoice | None:
        """Divide a model into units; None at the other stages."""
        zero, policy = config.zero_optimization, Policy.of(config)
        ranks, sharing = layout.dp * layout.sp, layout.dp_shard * layout.sp
        if zero.stage < 3 or ranks == 1:
            _refuse_at_other_stages(zero)
            _refuse_alone(zero)
            if layout.dp_replicate > 1:
                raise PlanError(
                    f"zero_optimization.stage {zero.stage} in {layout.dp_replicate} copies: sharding inside copies "
                    "(mics_shard_size, data_parallel_replicate_size) needs stage 3"
                )
            return None
        refuse_what_does_not_float(sketch)
        _refuse(config, sharing)
        division = divide(sketch, zero, policy, sharing)
        _refuse_mixed(division, zero, policy)
        tenants = [
            Tenant(p.name, p.shape, policy.held(p.dtype), p.group, is_whole=p.is_whole)
            for p in division.whole
            if p.is_trained and p.group is not None
        ]
        asked = min(zero.reduce_bucket_size, zero.allgather_bucket_size)
        limit = bucket_limit(sum(tenant.numel for tenant in tenants), asked)
        gain = float(layout.dp) if config.gradient_allreduce_op == "sum" else 1.0
        return FullChoice(
            division=division,
            holding=FullHolding(
                mean_over(sharing, config, policy),
                mean_over(ranks // sharing, config, policy),
                policy,
                Wrapping(
                    accumulation=policy.accumulation,
                    keeps=zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else 0,
                    ahead=zero.stage3_prefetch_bucket_size if zero.overlap_comm else 0,
                ),
                gain,
                _quantizing(zero, sharing),
                choose_owners((p for unit in division.units for p in unit.parameters), sharing),
            ),
            # Every backward reduces, as units do, so that sums are taken in the same order. Not while it runs: buckets
            # would leave between the gathers of units, on each rank at another place.
            whole=Holding(2, mean_over(ranks, config, policy, early=True), policy, overlap=False, gain=gain),
            buffers=lay_out(tenants, chunks=ranks, bucket_elements=limit),
            states=(states_per_parameter(config), states_per_parameter(config, is_whole=True)),
        )

    def price(self, choice: FullChoice, sketch: Sketch) -> Cost:
        """What sharding saves on one rank at rest, and what is gathered and on its way at most.

        Of ranks that own whole parameters it is the one that owns most.
        """
        policy, ranks = choice.holding.policy, choice.holding.reduction.ranks
        change = _transient(choice) + _owned(choice)
        for unit in choice.division.units:
            for parameter in unit.parameters:
                dtype = policy.held(parameter.dtype)
                share = _padded(parameter.shape, ranks)
                if parameter.is_trained:
                    price = partial(trained, dtype=dtype, policy=policy, states=choice.states[parameter.is_whole])
                    kept = price(share)
                    shards = kept.masters or kept.parameters
                    is_apart = bool(kept.masters)
                    states = 0 if parameter.is_whole else kept.states
                    change += Cost(
                        0 if is_apart else shards, kept.gradients, shards if is_apart else 0, states
                    ) - price(parameter.numel)
                else:
                    size = bytes_per_element(dtype)
                    is_small = choice.holding.quantizing.frozen and is_packed(parameter, ranks)
                    kept_bytes = packed_bytes(share) if is_small else share * size
                    change += Cost(parameters=kept_bytes - parameter.numel * size)
        return change + max((_flat(choice, rank) for rank in range(choice.whole.chunks)), key=lambda cost: cost.total)

    def late(self, choice: FullChoice) -> Iterable[str]:
        """Whatever is sharded."""
        return (parameter.name for unit in choice.division.units for parameter in unit.parameters)

    def apply(self, parts: Parts, choice: FullChoice, mesh: Mesh) -> Parts:
        """Shard the units of every part, and move what stays whole into flat buffers."""
        copies = mesh.group("dp_replicate") if mesh.size("dp_replicate") > 1 else None
        everyone = mesh.group(*DATA_AXES)
        ranks = Ranks(mesh.axes(*SHARD_AXES), mesh.group(*SHARD_AXES), copies, everyone)
        return tuple(self._apply(part, choice, ranks) for part in parts)

    def _apply(self, part: Part, choice: FullChoice, ranks: Ranks) -> Part:
        stores: list[Store] = []
        if any(unit.parameters for unit in choice.division.units):
            stores.append(FullStore(part.module, choice.division.units, choice.holding, ranks))
        if choice.buffers:
            own = dict(part.module.named_parameters())
            stores.append(FlatStore(choice.buffers, own, choice.whole, ranks.everyone))
        return replace(part, stores=(*part.stores, *stores))


def _refuse(config: Config, sharing: int) -> None:
    zero = config.zero_optimization
    if config.sparse_gradients:
        raise PlanError(
            "sparse_gradients with zero_optimization.stage 3: a sharded embedding has a dense gradient; leave the key "
            "out, or use stage 2"
        )
    if sharing == 1:
        raise PlanError(
            "zero_optimization.mics_shard_size is 1 at stage 3: every rank would hold everything; use stage 0, 1 or 2"
        )
    hpz = zero.zero_hpz_partition_size
    if hpz > 1 and sharing % hpz:
        raise PlanError(
            f"zero_optimization.zero_hpz_partition_size is {hpz}, which does not divide the {sharing} ranks that share "
            "the parameters: give a divisor"
        )
    others = {"zero_quantized_weights": zero.zero_quantized_weights, "zero_hpz_partition_size": hpz > 1}
    for key, is_on in others.items() if zero.zero_quantized_nontrainable_weights else ():
        if is_on:
            raise PlanError(
                f"zero_optimization.zero_quantized_nontrainable_weights with {key}: frozen weights that rest in blocks "
                "travel as these blocks, with nothing else to quantize and no second copy; leave one of the two out"
            )


def _refuse_at_other_stages(zero: ZeroConfig) -> None:
    asked = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zeropp_loco_param": zero.zeropp_loco_param is not None,
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


def _padded(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of a shard, padding included."""
    dim = shard_dim(shape, ranks)
    share = -(-shape[dim] // ranks)
    for other, size in enumerate(shape):
        share *= size if other != dim else 1
    return share


def _flat(choice: FullChoice, rank: int) -> Cost:
    """What the sharing of flat buffers changes on a rank."""
    change = Cost()
    for buffer in choice.buffers:
        price = partial(
            trained, dtype=buffer.dtype, policy=choice.holding.policy, states=choice.states[buffer.is_whole]
        )
        padded, share_of = price(buffer.numel), price(buffer.share(rank, choice.whole.chunks))
        change += Cost(padded.parameters, share_of.gradients, share_of.masters, share_of.states)
        change -= price(buffer.occupied)
    return change


def _owned(choice: FullChoice) -> Cost:
    """The states of the whole parameters of the rank that owns most, and in a step their values and gradients."""
    policy, owners = choice.holding.policy, dict(choice.holding.owners)
    costs = [Cost()] * choice.holding.reduction.ranks
    for unit in choice.division.units:
        for parameter in unit.parameters:
            if parameter.name in owners and unit.master is not None:
                size = parameter.numel * bytes_per_element(wider(policy.states, unit.master))
                costs[owners[parameter.name]] += Cost(size, size, 0, size * choice.states[True])
    return max(costs, key=lambda cost: cost.total)


def _transient(choice: FullChoice) -> Cost:
    """Bytes at most of what comes and goes: the model's own unit and two others gathered, and two on their way.

    A unit that is reduced is held as it is sent and as it is received.
    """
    root, *others = choice.division.units
    gathered = sorted(_gathered_bytes(unit) for unit in others)[-2:]
    policy = choice.holding.policy
    sent = []
    for unit in choice.division.units:
        count = sum(parameter.numel for parameter in unit.parameters if parameter.is_trained)
        dtype = wider(policy.accumulation, unit.held) if unit.held else policy.accumulation
        sent.append(2 * count * bytes_per_element(dtype))
    return Cost(parameters=_gathered_bytes(root) + sum(gathered), gradients=sum(sorted(sent)[-2:]))


def _gathered_bytes(unit: Unit) -> int:
    return sum(
        parameter.numel * bytes_per_element(unit.held if unit.held and parameter.is_trained else parameter.dtype)
        for parameter in unit.parameters
    )
