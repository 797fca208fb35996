"""What a rank adds up for the one reduction of a step."""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from mizzen.errors import UsageError

MANY_KINDS: Final = "some losses of this step came as (sum, count) and others as one number: return one kind"


@dataclass(frozen=True, slots=True)
class Tally:
    """What one rank adds up over the micro-batches of a step."""

    loss: Tensor | None = None
    """The sum of its losses, or of the numerators of `(sum, count)`."""
    count: Tensor | float = 0.0
    """The number of losses, or the sum of the counts."""
    is_counted: bool = False
    """Whether the losses came as `(sum, count)`, by whose count the gradient then still has to be divided."""

    def plus(self, loss: Tensor, count: Tensor | float, *, is_counted: bool = False) -> "Tally":
        """With one more micro-batch. Nothing here waits for the device."""
        loss = loss.detach().float()
        if self.loss is None:
            return Tally(loss, count, is_counted)
        if is_counted != self.is_counted:
            raise UsageError(MANY_KINDS)
        return Tally(self.loss + loss, self.count + count, is_counted)
