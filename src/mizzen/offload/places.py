"""Which lots rest where: a pure function of byte budgets. No tensor and no machine is asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mizzen.config.execution import AioConfig
from mizzen.config.schema import Config
from mizzen.errors import PlanError
from mizzen.wording import byte_size

DEVICE: Final = "device"
PLACES: Final = (DEVICE, "host", "nvme")
"""From the nearest to the farthest."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of masters and states that may rest in each place, on one rank; None is without a limit."""

    device: int | None = None
    host: int | None = None
    nvme: int | None = 0

    def limits(self) -> tuple[int | None, ...]:
        """In the order of `PLACES`."""
        return self.device, self.host, self.nvme


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """What a configuration says of states that rest outside the device."""

    budget: Budget | None = None
    """Absent where the sections of `zero_optimization` say it."""
    place: str = DEVICE
    """Where those sections want masters and states."""
    ratio: float = 1.0
    """The share of them that rests there."""
    pin: bool = True
    paths: tuple[str, ...] = ()
    """Folders on NVMe drives, over which files are striped."""
    aio: AioConfig = AioConfig()

    @classmethod
    def of(cls, config: Config) -> "OffloadSettings":
        """Read a configuration."""
        asked, section = config.offload, config.zero_optimization.offload_optimizer
        budget = None
        if asked is not None:
            budget = Budget(asked.device_bytes, asked.host_bytes, asked.nvme_bytes)
        if section is None:
            return cls(budget)
        place = {"cpu": "host", "nvme": "nvme"}.get(section.device, DEVICE)
        given = section.nvme_path or ()
        paths = (given,) if isinstance(given, str) else tuple(given)
        return cls(budget, place, section.ratio, section.pin_memory, paths, config.aio or AioConfig())

    @property
    def is_on(self) -> bool:
        """Whether anything may rest outside the device."""
        return self.place != DEVICE or self.budget is not None

    def budget_for(self, total: int) -> Budget:
        """The bytes that each place may hold of so many."""
        if self.budget is not None:
            return self.budget
        if self.place == DEVICE:
            return Budget()
        kept = total - round(total * self.ratio)
        return Budget(kept, None if self.place == "host" else 0, None if self.place == "nvme" else 0)


def places_for(sizes: Sequence[int], settings: OffloadSettings) -> tuple[str, ...]:
    """A place for each lot of these bytes, in the order in which backward completes them.

    The last to be completed are the nearest: nothing of the step would be left to hide a copy behind.
    """
    budget = settings.budget_for(sum(sizes))
    left = list(budget.limits())
    found: list[str] = []
    nearest = 0
    for size in reversed(sizes):
        at = next((at for at in range(nearest, 3) if left[at] is None or size <= (left[at] or 0)), None)
        if at is None:
            limits = ", ".join(
                f"{place} {'no limit' if limit is None else byte_size(limit)}"
                for place, limit in zip(PLACES, budget.limits(), strict=True)
            )
            raise PlanError(
                f"masters and optimizer states of {byte_size(sum(sizes))} on a rank do not fit their places "
                f"({limits}): raise a limit of `offload`, add ranks, or keep fewer states"
            )
        nearest = at
        limit = left[at]
        left[at] = None if limit is None else limit - size
        found.append(PLACES[at])
    return tuple(reversed(found))
