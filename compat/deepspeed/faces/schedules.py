"""mizzen's schedules, which take the step to start from as their last argument without a name, too."""

from dataclasses import fields
from typing import Any, Final

from mizzen.optim import schedules
from mizzen.optim.schedules import LRSchedule


class _Placed(LRSchedule):
    """A schedule whose `last_batch_iteration` may be given by its place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        count = sum(not one.kw_only for one in fields(self))
        if len(args) == count + 1 and "last_batch_iteration" not in kwargs:
            *args, kwargs["last_batch_iteration"] = args  # type: ignore[assignment]
        super().__init__(*args, **kwargs)


class LRRangeTest(_Placed, schedules.LRRangeTest):
    """mizzen's."""


class OneCycle(_Placed, schedules.OneCycle):
    """mizzen's."""

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of every group by the cycle, before the first step as well; None when they are not cycled."""
        if not self.cycle_momentum:
            return None
        return [(momentum, 0.99) for momentum in self.cycled_momentum(self.last_batch_iteration)]


class WarmupLR(_Placed, schedules.WarmupLR):
    """mizzen's."""


class WarmupDecayLR(_Placed, schedules.WarmupDecayLR):
    """mizzen's."""


class WarmupCosineLR(_Placed, schedules.WarmupCosineLR):
    """mizzen's."""

    def get_lr_ratio(self) -> float:
        """The part of each group's own rate now."""
        return self._ratio(self.last_batch_iteration)


KINDS: Final[dict[type[LRSchedule], type[LRSchedule]]] = {
    schedules.LRRangeTest: LRRangeTest,
    schedules.OneCycle: OneCycle,
    schedules.WarmupLR: WarmupLR,
    schedules.WarmupDecayLR: WarmupDecayLR,
    schedules.WarmupCosineLR: WarmupCosineLR,
}
"""mizzen's -> the one of this file, for the schedule of an engine: scripts ask `isinstance`."""
