"""What a checkpoint is to those who only read it: names, whole tensors and plain facts, whoever wrote it and how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint."""

    kind: str
    """`model`, or an optimizer state: `exp_avg`, `exp_avg_sq`, `step`, `master`, ..."""
    name: str
    """The name of the parameter or buffer."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """A checkpoint of any format. `read` may be called for any entry, in any order."""

    def names(self) -> Sequence[Entry]:
        """Every tensor."""

    def read(self, entry: Entry) -> torch.Tensor:
        """A whole tensor, on the CPU."""

    def facts(self) -> Mapping[str, object]:
        """Plain data: step counters, the state of a learning-rate schedule, client state, what it was."""
