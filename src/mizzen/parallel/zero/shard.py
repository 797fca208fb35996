"""ZeRO as a transform: decides the buffers, buckets and reduction of a run, and moves the parameters into them."""

from dataclasses import dataclass, replace

from mizzen.comm.mesh import Mesh
from mizzen.config.layout import Layout
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.model.sketch import Sketch, bytes_per_element
from mizzen.parallel.zero.reduce import Reduction
from mizzen.parallel.zero.slots import Buffer, Tenant, bucket_limit, lay_out
from mizzen.parallel.zero.store import FlatStore, Holding
from mizzen.plan.cost import Cost
from mizzen.plan.parts import Parts
from mizzen.precision.policy import Policy

DATA_AXES = ("dp_replicate", "dp_shard", "sp")
"""The axes over which parameters are the same and gradients are summed."""


@dataclass(frozen=True, slots=True)
class ZeroChoice:
    """The buffers of a run and how they are held."""

    asked: int
    holding: Holding
    buffers: tuple[Buffer, ...]
    gain: float = 1.0
    """What the mean gradient is multiplied with before the step: 1, or the ranks where a sum was asked for."""

    def __str__(self) -> str:
        ranks = self.holding.reduction.ranks
        buckets = sum(len(buffer.buckets) for buffer in self.buffers)
        if ranks == 1:
            return f"ZeRO stage {self.asked} on one data-parallel rank: nothing to shard"
        return f"ZeRO stage {self.asked} over dp={ranks} in {buckets} buckets, sums in {self.holding.reduction.dtype}"


class ZeroShard:
    """Stages 0 to 2."""

    name = "shard"

    def wants(self, config: Config, layout: Layout, sketch: Sketch) -> ZeroChoice | None:
        """Lay out the trained parameters; None when nothing is trained."""
        zero, policy = config.zero_optimization, Policy.of(config)
        ranks = layout.dp * layout.sp
        if zero.stage == 3:
            return None  # refused by name until it is built
        if config.gradient_predivide_factor <= 0:
            raise PlanError(f"gradient_predivide_factor: {config.gradient_predivide_factor} must be greater than 0")
        stage = zero.stage if ranks > 1 else 0
        tenants = [
            Tenant(p.name, p.shape, policy.held(p.dtype), p.group, config.sparse_gradients and p.is_embedding)
            for p in sketch.parameters
            if p.requires_grad and p.group is not None
        ]
        if not tenants and sketch.parameters:
            return None
        limit = bucket_limit(sum(t.numel for t in tenants), zero.reduce_bucket_size, chunks=ranks)
        return ZeroChoice(
            asked=zero.stage,
            holding=Holding(stage, _reduction(config, policy, ranks), policy.accumulation, overlap=zero.overlap_comm),
            buffers=lay_out(tenants, chunks=ranks, bucket_elements=limit),
            gain=float(layout.dp) if config.gradient_allreduce_op == "sum" else 1.0,
        )

    def price(self, choice: ZeroChoice, sketch: Sketch) -> Cost:
        """What sharding saves on one rank, and what its buckets in flight cost."""
        ranks, stage = choice.holding.chunks, choice.holding.stage
        trained = sum(buffer.numel for buffer in choice.buffers)
        low = sum(buffer.numel for buffer in choice.buffers if bytes_per_element(buffer.dtype) < 4)
        width = bytes_per_element(choice.holding.accumulation)
        away = 1 - 1 / ranks
        largest = max((bucket.numel for buffer in choice.buffers for bucket in buffer.buckets), default=0)
        gradients = -trained * width * away + 2 * largest * width if stage == 2 else trained * width / ranks if stage else 0
        return Cost(gradients=int(gradients), masters=-int(4 * low * away), states=-int(8 * trained * away))

    def apply(self, parts: Parts, choice: ZeroChoice, mesh: Mesh) -> Parts:
        """Move the parameters of every part into flat buffers."""
        group = mesh.group(*DATA_AXES) if choice.holding.reduction.ranks > 1 else None
        return tuple(
            replace(
                part,
                stores=(*part.stores, FlatStore(choice.buffers, dict(part.module.named_parameters()), choice.holding, group)),
            )
            for part in parts
        )


def _reduction(config: Config, policy: Policy, ranks: int) -> Reduction:
    """The mean over the ranks, in two factors as asked for: before the sum, and after it."""
    before = 1 / ranks if config.prescale_gradients else 1 / config.gradient_predivide_factor
    return Reduction(
        ranks=ranks,
        dtype=policy.wire,
        before=before,
        after=1 / (before * ranks),
        in_rank_order=config.deterministic,
    )
