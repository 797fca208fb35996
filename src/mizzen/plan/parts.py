"""What a plan makes of a model: always a tuple of parts, one when the model is not pipelined."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Part:
    """One module that runs on this rank."""

    module: nn.Module


Parts = tuple[Part, ...]
