"""The order in which a model is changed: the only place where strategies meet."""

from typing import Final

from mizzen.parallel.zero.shard import ZeroShard
from mizzen.plan.transform import Transform

ORDER: Final[tuple[Transform, ...]] = (ZeroShard(),)
"""Each row may assume that every row above it has run."""
