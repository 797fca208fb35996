"""Work on the device that the host does not wait for: streams and events, numbers on their way to the host, and time.

Real streams are torch's own; those of this file are for a device with one queue only, or none. Named sets of timers
belong to the profiler.
"""

import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mizzen.accelerator.protocol import Accelerator, Event, Stream
from mizzen.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class HostEvent:
    """A point in time on the host, where work is done when the call returns."""

    def __init__(self) -> None:
        self._nanoseconds: int | None = None

    def record(self) -> None:
        """Take the time."""
        self._nanoseconds = time.perf_counter_ns()

    def wait(self) -> None:
        """Nothing to wait for: what was recorded is done."""

    def query(self) -> bool:
        """Work on the host is always done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for: what was recorded is done."""

    def elapsed_time(self, end_event: "HostEvent", /) -> float:
        """Milliseconds between the two records."""
        if self._nanoseconds is None or end_event._nanoseconds is None:
            raise UsageError("elapsed_time was asked of an event that was never recorded: call record() on both first")
        return (end_event._nanoseconds - self._nanoseconds) / 1e6


class InOrderStream:
    """The only queue of a device: everything runs in the order of the calls, so one stream never waits for another."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def wait_stream(self, stream: Stream, /) -> None:
        """Already so: there is no other queue."""

    def wait_event(self, event: Event, /) -> None:
        """Later work starts after the event."""
        event.wait()

    def record_event(self, event: Event | None = None, /) -> Event:
        """Mark the end of the queue."""
        event = event or self._accelerator.event()
        event.record()
        return event

    def query(self) -> bool:
        """Whether the queue is empty."""
        return self.record_event().query()

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        self._accelerator.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        pass


def hold(tensor: "torch.Tensor", stream: Any) -> None:
    """Keep the memory of a tensor from reuse until `stream` has done its present work, even if the tensor dies now."""
    if not isinstance(stream, InOrderStream):
        tensor.record_stream(stream)


class Fetch:
    """A copy that was started. What is launched behind it does not delay it, so there can be work while one waits."""

    def __init__(self, values: "Tensor", accelerator: Accelerator) -> None:
        self._values = values
        if values.device.type != "cpu":
            self._values = accelerator.pin_memory(values.new_empty(values.shape, device="cpu"))
            self._values.copy_(values, non_blocking=True)
        self._event = accelerator.event()
        self._event.record()

    def read(self) -> "Tensor":
        """The values on the host, as soon as they are there."""
        self._event.synchronize()
        return self._values


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
