"""Streams and events where the device has one queue only, or none. Real streams are torch's own."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mizzen.accelerator.protocol import Accelerator, Event, Stream
from mizzen.errors import UsageError

if TYPE_CHECKING:
    import torch


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
