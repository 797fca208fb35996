"""How long ranks wait for each other, by axis of the mesh: what overlap hides, and what it does not.

An operation is in flight from the moment it is issued until its result was waited for; the wait itself is exposed, the
rest is hidden behind other work. Marks are set on the device's own queue and read when it has passed them, so that
nothing here waits. The log of collectives (`ledger.py`) knows sizes and bandwidths, and stops the device for them.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from mizzen.accelerator import Accelerator, Event
from mizzen.accelerator.streams import HostEvent
from mizzen.monitor.report import Meter, StepReport


class Lap:
    """One operation: three marks."""

    __slots__ = ("_add", "_mark", "axis", "begin", "end", "wait")

    def __init__(self, axis: str, mark: Callable[[], Event], add: Callable[["Lap"], Any]) -> None:
        self.axis = axis
        self._mark = mark
        self._add = add
        self.begin = self.wait = self.end = mark()

    def waits(self) -> None:
        """Its result is wanted from here on."""
        self.wait = self._mark()

    def stop(self) -> None:
        """Its result is there."""
        self.end = self._mark()
        self._add(self)

    def is_over(self) -> bool:
        """Whether the device has passed the marks."""
        return all(mark.query() for mark in (self.begin, self.wait, self.end))


class Exposure(Meter):
    """`comm_ms_<axis>` and `comm_exposed_ms_<axis>`: of all operations that have ended since the report before."""

    def __init__(self, axes: Mapping[str, str], accelerator: Accelerator) -> None:
        self._axes = axes
        """Names of groups, and of the axes that they are."""
        self._accelerator = accelerator
        self._laps: deque[Lap] = deque()

    def lap(self, group: str, *, on_device: bool) -> Lap:
        """An operation in a group is issued."""
        return Lap(self._axes.get(group, "other"), self._on_device if on_device else _on_host, self._laps.append)

    def read(self, report: StepReport) -> Mapping[str, float]:
        """In milliseconds. An operation that the device is not through with is in the next report."""
        found: dict[str, float] = {}
        while self._laps and self._laps[0].is_over():
            lap = self._laps.popleft()
            for name, begin in (("comm_ms", lap.begin), ("comm_exposed_ms", lap.wait)):
                key = f"{name}_{lap.axis}"
                found[key] = found.get(key, 0.0) + begin.elapsed_time(lap.end)
        return found

    def _on_device(self) -> Event:
        event = self._accelerator.event(timing=True)
        event.record()
        return event


def _on_host() -> Event:
    event = HostEvent()
    event.record()
    return event
