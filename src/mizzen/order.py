"""The order in which a model is changed: the only place where strategies meet."""

from typing import Final

from mizzen.parallel.zero.shard import ZeroShard
from mizzen.plan.transform import Transform
from mizzen.rewrite.compile import Compile
from mizzen.rewrite.fused import Fused
from mizzen.rewrite.recompute import Recompute

ORDER: Final[tuple[Transform, ...]] = (Fused(), Recompute(), Compile(), ZeroShard())
"""Each row may assume that every row above it has run.

Fused operations come first: they look at what the model itself computes, and what is computed again is a block with
them inside."""
