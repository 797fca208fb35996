"""ZeRO as a transform: decides the buffers, buckets and reduction of a run, and moves the parameters into them."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch, bytes_per_element
from mizzen.parallel.zero.reduce import Reduction
from mizzen.parallel.zero.slots import Buffer, Tenant, bucket_limit, lay_out
from mizzen.parallel.zero.store import FlatStore, Holding
from mizzen.plan.cost import Cost, states_per_parameter, trained
from mizzen.plan.parts import Parts
from mizzen.plan.transform import Transform
from mizzen.precision.policy import FLOATING, Policy, wider

DATA_AXES: Final = ("dp_replicate", "dp_shard", "sp")
"""The axes over which parameters are the same and gradients are summed."""


@dataclass(frozen=True, slots=True)
class ZeroChoice:
    """The buffers of a run and how they are held."""

    asked: int
    holding: Holding
    buffers: tuple[Buffer, ...]
    states: tuple[int, ...] = (2, 2)
    """Full-size tensors that the optimizer keeps for each parameter, and for each that its rule needs whole."""

    def __str__(self) -> str:
        ranks, dtype = self.holding.reduction.ranks, self.holding.reduction.dtype or "float32"
        if ranks == 1:
            return f"ZeRO stage {self.asked} on one data-parallel rank: nothing to shard"
        count = sum(len(buffer.buckets) for buffer in self.buffers)
        owned = sum(len(buffer.buckets) for buffer in self.buffers if buffer.is_whole)
        buckets = f" in {count} bucket{'s' if count > 1 else ''}" if count else ""
        buckets += f", {owned} of them with one owner each" if owned and self.holding.stage else ""
        return f"ZeRO stage {self.asked} over dp={ranks}{buckets}, sums in {dtype}"


class ZeroShard(Transform):
    """Stages 0 to 2, and any stage on one rank, which has nobody to share with."""

    name = "shard"

    def wants(self, config: Config, layout: Layout, sketch: Sketch) -> ZeroChoice | None:
        """Lay out the trained parameters; None when nothing is trained."""
        zero, policy = config.zero_optimization, Policy.of(config)
        ranks = layout.dp * layout.sp
        if zero.stage == 3 and ranks > 1:
            return None  # `ZeroFull` shards parameters too
        refuse_what_does_not_float(sketch)
        stage: Literal[0, 1, 2] = 0 if ranks == 1 or zero.stage == 3 else zero.stage
        tenants = [
            Tenant(
                p.name,
                p.shape,
                policy.held(p.dtype),
                p.group,
                is_sparse=config.sparse_gradients and p.is_embedding,
                is_whole=p.is_whole,
            )
            for p in sketch.parameters
            if p.is_trained and p.group is not None
        ]
        if not tenants and sketch.parameters:
            return None
        asked = min(zero.reduce_bucket_size, zero.allgather_bucket_size) if stage else zero.reduce_bucket_size
        limit = bucket_limit(sum(tenant.numel for tenant in tenants), asked)
        return ZeroChoice(
            asked=zero.stage,
            holding=Holding(
                stage,
                mean_over(ranks, config, policy, early=stage != 1),
                policy,
                overlap=zero.overlap_comm and ranks > 1,
                gain=float(layout.dp) if config.gradient_allreduce_op == "sum" else 1.0,
            ),
            buffers=lay_out(tenants, chunks=ranks, bucket_elements=limit),
            states=tuple(states_per_parameter(config, is_whole=is_whole) for is_whole in (False, True)),
        )

    def price(self, choice: ZeroChoice, sketch: Sketch) -> Cost:
        """What sharding saves on the rank that holds most, and what padding and the buckets in flight cost."""
        ranks = range(choice.holding.chunks if any(buffer.is_whole for buffer in choice.buffers) else 1)
        return max((_change(choice, rank) for rank in ranks), key=lambda change: change.total)

    def apply(self, parts: Parts, choice: ZeroChoice, mesh: Mesh) -> Parts:
        """Move the parameters of every part into flat buffers."""
        group = mesh.group(*DATA_AXES) if choice.holding.reduction.ranks > 1 else None
        return tuple(
            replace(
                part,
                stores=(
                    *part.stores,
                    FlatStore(choice.buffers, dict(part.module.named_parameters()), choice.holding, group),
                ),
            )
            for part in parts
        )


def _change(choice: ZeroChoice, rank: int) -> Cost:
    """The same for one rank."""
    holding = choice.holding
    change = Cost(gradients=_in_flight(choice) if holding.stage == 2 else 0)
    for buffer in choice.buffers:
        price = partial(trained, dtype=buffer.dtype, policy=holding.policy, states=choice.states[buffer.is_whole])
        padded, share = price(buffer.numel), price(buffer.share(rank, holding.chunks))
        gradients = {0: padded.gradients, 1: padded.gradients + share.gradients, 2: share.gradients}[holding.stage]
        change += Cost(padded.parameters, gradients, share.masters, share.states) - price(buffer.occupied)
    return change


def refuse_what_does_not_float(sketch: Sketch) -> None:
    """Only floating-point parameters are trained."""
    for parameter in sketch.parameters:
        if parameter.is_trained and parameter.dtype not in FLOATING:
            raise PlanError(
                f"'{parameter.name}' is trained in {parameter.dtype}: gradients are summed in one of "
                f"{', '.join(FLOATING)}; freeze it, or hold it as one of these"
            )


def mean_over(ranks: int, config: Config, policy: Policy, *, early: bool = False) -> Reduction:
    """The mean over some ranks, in two factors as asked for: before the sum, and after it.

    Where gradients may be divided `early`, as they are copied, and that loses no bit, it costs nothing to do so.
    """
    asked = config.gradient_predivide_factor if ranks > 1 else 1.0
    is_exact = ranks.bit_count() == 1 and "float16" not in (policy.parameters, policy.accumulation, policy.wire)
    is_early = early and is_exact and asked == 1
    before = 1 / ranks if config.prescale_gradients or is_early else 1 / asked
    return Reduction(
        ranks=ranks,
        dtype=policy.wire,
        before=before,
        after=1 / (before * ranks),
        in_rank_order=config.deterministic,
        is_early=is_early,
    )


def _in_flight(choice: ZeroChoice) -> int:
    """Bytes of stage 2 on their way, at most: one bucket that fills, two that travel, and what is sent and received.

    That is while gradients arrive in the order of the buckets; one that waits for others is a further bucket.
    """
    reduction = choice.holding.reduction
    held, exchanged = [], []
    for buffer in choice.buffers:
        dtype = wider(choice.holding.policy.accumulation, buffer.dtype)
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
