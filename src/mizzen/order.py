"""The order in which a model is changed: the only place where strategies meet."""

from typing import Final

from mizzen.parallel.zero.full.shard import ZeroFull
from mizzen.parallel.zero.shard import ZeroShard
from mizzen.plan.transform import Transform
from mizzen.rewrite.compile import Compile
from mizzen.rewrite.recompute import Recompute

ORDER: Final[tuple[Transform, ...]] = (Recompute(), Compile(), ZeroShard(), ZeroFull())
"""Each row may assume that every row above it has run."""
