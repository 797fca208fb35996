"""What can be read of a checkpoint, whoever wrote it: named tensors, one at a time, and plain facts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint, as it is stored; nothing has been read yet."""

    kind: str
    """`model`, or the key of an optimizer state: `exp_avg`, `exp_avg_sq`, `step`, `master`."""
    name: str
    """The name of the parameter or buffer."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """A checkpoint to read from: `names` once, then `read` for any of them, in any order."""

    def names(self) -> Sequence[Entry]:
        """All that is there, without reading it."""
        ...

    def read(self, entry: Entry) -> Tensor:
        """The whole tensor, on the CPU."""
        ...

    def facts(self) -> Mapping[str, object]:
        """Plain data: step counters, schedules, client state, and what the checkpoint was."""
        ...
