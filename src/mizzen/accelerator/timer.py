"""Time on the device, without making the host wait for it. Named sets of timers belong to the profiler."""

from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from mizzen.accelerator.protocol import Accelerator, Event
from mizzen.errors import UsageError


@dataclass(frozen=True, slots=True)
class Split:
    """Laps that have ended, on the host's side at least."""

    done: float
    laps: tuple[tuple[Event, Event], ...]

    def seconds(self) -> float | None:
        """How long they took; None while the device is not through with them."""
        if not all(event.query() for lap in self.laps for event in lap):
            return None
        return self.done + sum(begin.elapsed_time(end) for begin, end in self.laps) / 1e3


class Timer:
    """Measures what the current stream does between start() and stop(), any number of times, until read().

    with timer: ...      start, stop     no synchronisation
    timer.ready()        may be asked    no synchronisation
    timer.read()         seconds         waits for the last stop
    timer.split()        a Split         no synchronisation: what read() would give, to be asked for later
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._begin: Event | None = None
        self._laps: deque[tuple[Event, Event]] = deque()
        self._seconds = 0.0

    def start(self) -> None:
        """Begin a lap."""
        if self._begin is not None:
            raise UsageError("Timer.start was called twice without stop() between: use one Timer per nested region")
        self._begin = self._mark()

    def stop(self) -> None:
        """End the lap."""
        if self._begin is None:
            raise UsageError("Timer.stop was called without start()")
        self._laps.append((self._begin, self._mark()))
        self._begin = None
        self.ready()

    def ready(self) -> bool:
        """Whether `read` would return at once."""
        # Adding up what is already done keeps a timer that is seldom read from collecting events without end.
        while self._laps and all(event.query() for event in self._laps[0]):
            self._add_first_lap()
        return not self._laps

    def read(self) -> float:
        """Seconds in all laps since the last read; a lap that is still open counts towards the next one."""
        while self._laps:
            for event in self._laps[0]:  # both: a lap may begin on one stream and end on another
                event.synchronize()
            self._add_first_lap()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def split(self) -> "Split":
        """What was measured since the last read or split, for whoever does not want to wait for it."""
        split = Split(self._seconds, tuple(self._laps))
        self._seconds = 0.0
        self._laps.clear()
        return split

    def _mark(self) -> Event:
        event = self._accelerator.event(timing=True)
        event.record()
        return event

    def _add_first_lap(self) -> None:
        begin, end = self._laps.popleft()
        self._seconds += begin.elapsed_time(end) / 1e3

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.stop()
