"""The order in which a model is changed: the only place where strategies meet."""

from typing import Final

from mizzen.parallel.given import GivenSplit
from mizzen.parallel.pipeline.cut import PipelineCut
from mizzen.parallel.tensor.split import TensorSplit
from mizzen.parallel.zero.full.shard import ZeroFull
from mizzen.parallel.zero.shard import ZeroShard
from mizzen.plan.transform import Transform
from mizzen.rewrite.compile import Compile
from mizzen.rewrite.fused import Fused
from mizzen.rewrite.layer_drop import LayerDrop
from mizzen.rewrite.recompute import Recompute

ORDER: Final[tuple[Transform, ...]] = (
    PipelineCut(),
    GivenSplit(),
    TensorSplit(),
    LayerDrop(),
    Fused(),
    Recompute(),
    Compile(),
    ZeroShard(),
    ZeroFull(),
)
"""Each row may assume that every row above it has run.

A pipeline cuts the model into the pieces that everything else is decided on. A split that the model comes with is there
before any change. Layer drop adds arguments to the model's own forward.
Fused operations come before recomputation: they look at what the model itself computes, and what is computed again is
a block with them inside."""
