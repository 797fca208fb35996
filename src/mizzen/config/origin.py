"""Where a resolved value comes from: given by the user, derived from other values, or the default."""

from dataclasses import dataclass
from typing import Final, Literal

AS_AUTO: Final = 'asked for as "auto"'
"""The note of a value that the file leaves open."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of one value, with a note such as `from train_batch_size` or `as zero_optimization.cpu_offload`."""

    kind: Literal["given", "derived", "default"] = "default"
    note: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.note}".strip()
