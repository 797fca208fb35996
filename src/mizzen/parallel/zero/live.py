"""A bucket with its tensors on this rank. What is done with them is the business of `gradients.py` and `store.py`."""

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from mizzen.parallel.zero.slots import Bucket


@dataclass(slots=True, eq=False)
class LiveBucket:
    """Parameters that travel together, and this rank's share of what belongs to them."""

    plan: Bucket
    group: int
    """The optimizer group that trains them."""
    parameters: tuple[nn.Parameter, ...]
    """In the order of the slots."""
    values: Tensor
    """The values of all of them, padding included."""
    start: int
    """Where the owned chunk begins."""
    master: Tensor
    """The owned chunk as the optimizer left it: a part of `values` where these are as wide."""
    stepped: Tensor
    """What the optimizer steps: the master itself, or a wider copy of it that is empty between steps."""
    gradient: Tensor
    """The gradient of the owned chunk, complete after `collect`."""
    whole: Tensor
    """The gradient of all of the bucket as it gathers on this rank; empty where it only passes through."""
    finite: Tensor
    """For each slot, whether this rank's own gradient was finite before it was summed."""
    missing: set[int] = field(default_factory=set)
    """The slots whose gradient has not come yet in this backward."""
    has_left: bool = False

    @property
    def owns_all(self) -> bool:
        """Whether nobody else has a share."""
        return self.gradient is self.whole

    def views(self, flat: Tensor) -> list[Tensor]:
        """The place of each parameter in a tensor that holds the whole bucket."""
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.plan.slots]

    def mine(self, flat: Tensor) -> Tensor:
        """The owned chunk of a tensor that holds the whole bucket."""
        return flat[self.start : self.start + self.master.numel()]


def alone(view: Tensor) -> Tensor:
    """The same memory under a storage that ends where the view ends: saving a tensor writes all of its storage."""
    if type(view) is not Tensor or view.device.type not in ("cpu", "cuda", "xpu"):
        return view  # without memory of its own, as in a simulation, or without addresses to share
    return from_dlpack(view)
