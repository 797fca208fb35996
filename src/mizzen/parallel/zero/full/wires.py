"""What FSDP2 calls to gather a unit and to reduce its gradients: our collectives, with a tag that the ranks compare.

One object of each per unit, so that a message can name the unit. Torch asks for an `allocate` and a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mizzen.comm import collectives
from mizzen.comm.communicator import Work, meet
from mizzen.comm.tags import Tag
from mizzen.errors import CommError


@dataclass(slots=True)
class Place:
    """Where this rank is, for the tags of one store's collectives."""

    step: int = 0
    is_backward: bool = False
    calls: int = field(default=0)
    """How many forward passes, and calls of other methods of the model, are on the stack."""
    phase: str = "forward"
    """What the outermost of them is: torch gathers units without gradients, so it cannot be seen later."""

    def __enter__(self) -> None:
        """Code of the model runs, inside of which a sharded parameter is gathered where it is touched."""
        if not self.calls:
            self.phase = "forward" if torch.is_grad_enabled() else "evaluation"
        self.calls += 1

    def __exit__(self, *_: object) -> None:
        """It is over, also after an error."""
        self.calls = max(0, self.calls - 1)

    def tag(self, unit: str) -> Tag:
        """The tag of a collective for a unit."""
        phase = self.phase if self.calls else "outside of forward"
        return Tag(self.step, unit, "backward" if self.is_backward else phase)


def explained(error: CommError) -> CommError:
    """The same with what helps, where ranks have parted ways."""
    if "parted ways" not in str(error):
        return error
    return CommError(
        f"{error}. At ZeRO stage 3 every rank has to run the same units in the same order: a branch that ranks may "
        "take differently belongs inside one unit; pin a module around it in zero_optimization.leaf_module"
    )


class Pending(dist.Work):
    """A gather under way, as torch wants to wait for it."""

    def __init__(self, work: Work, finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._ours = work
        self._finish = finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: B008  torch's own signature
        """Return when the result is there."""
        self._ours.wait()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._ours.is_completed()


class Gather:
    """The all-gather of one unit."""

    def __init__(self, unit: str, place: Place) -> None:
        self.unit = unit
        self.place = place

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """Gather shards into a whole unit."""
        try:
            work = self.start(output_tensor, input_tensor, group)
        except CommError as error:
            raise explained(error) from None
        if async_op and work is not None:
            return work
        if work is not None:
            work.wait()
        return None

    def start(self, whole: Tensor, shard: Tensor, group: ProcessGroup) -> Pending | None:
        """Let it begin."""
        tag = self.place.tag(self.unit)
        work = collectives.all_gather_into_tensor(whole, shard, group=group, async_op=True, tag=tag)
        return Pending(work) if work is not None else None


class Scatter:
    """The reduction of one unit's gradients. What becomes of them is the store's business, not torch's."""

    def __init__(self, unit: str, place: Place, take: Callable[[Tensor], None]) -> None:
        self.unit = unit
        self.place = place
        self.take = take

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is sent, and for what torch believes to be received."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Hand the gradients of a unit over, laid out as one row of shards for each rank."""
        was_backward, self.place.is_backward = self.place.is_backward, True
        try:
            meet(self.place.tag(self.unit), group, input_tensor)
            self.take(input_tensor)
        except CommError as error:
            raise explained(error) from None
        finally:
            self.place.is_backward = was_backward
