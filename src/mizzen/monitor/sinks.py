"""The seam between the numbers of a run and the places where they are written, and the monitor that serves them all."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, Protocol

from mizzen.errors import UsageError
from mizzen.monitor.events import events_of
from mizzen.monitor.guard import Guard
from mizzen.monitor.report import Event, Observer, StepReport


class Sink(Protocol):
    """A place where numbers are written. The monitor calls, on rank 0 only and on the engine's thread:

    write(events, report)   once per optimizer step, with the report that the events were made of
    write(events)           whenever the user writes events of their own
    flush()                 when what was written so far must be safe
    close()                 once; nothing after it

    It may raise whatever its library raises: it is then given up, with a warning, and training goes on.
    """

    def write(self, events: Sequence[Event], report: StepReport | None = None) -> None:
        """Write some events."""
        ...

    def flush(self) -> None:
        """Let go of everything that is still buffered."""
        ...

    def close(self) -> None:
        """Flush, and give the place back."""
        ...


class Monitor(Observer):
    """An observer that writes each step to every sink, and what users reach as `engine.monitor`."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        *,
        enabled: bool,
        has_loss_scale: bool = False,
        has_rate: bool = True,
    ) -> None:
        self.enabled = enabled
        """Whether the configuration names a sink: the same on every rank, so that collectives may depend on it."""
        self._sinks = [(Guard(name), sink) for name, sink in sinks.items()]
        self._has_loss_scale = has_loss_scale
        self._has_rate = has_rate
        self._is_first = True

    def write_events(self, events: Iterable[Event]) -> None:
        """Write `(name, value, global samples)` of the user's own. Every rank may call it; rank 0 writes."""
        if self._sinks:
            checked = [_checked(event) for event in events]
            self._each(lambda sink: sink.write(checked))

    def on_step(self, report: StepReport) -> None:
        """Write one step."""
        if self._sinks:
            has_rate = self._has_rate and not self._is_first  # the first step's time includes the start of the run
            events = events_of(report, has_loss_scale=self._has_loss_scale, has_rate=has_rate)
            self._is_first = False
            self._each(lambda sink: sink.write(events, report))

    def flush(self) -> None:
        """Make what was written so far safe, as far as each sink can."""
        self._each(lambda sink: sink.flush())

    def close(self) -> None:
        """Close every sink."""
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, use: Callable[[Sink], None]) -> None:
        for guard, sink in self._sinks:
            with guard:
                use(sink)
        self._sinks = [(guard, sink) for guard, sink in self._sinks if guard.is_open]


def monitor_of(observers: Iterable[Observer]) -> Monitor:
    """The monitor among some observers; one that writes nothing where there is none."""
    return next((each for each in observers if isinstance(each, Monitor)), Monitor({}, enabled=False))


def _checked(event: Any) -> Event:
    """Numbers of any kind (tensors, numpy scalars) become Python's, so that no sink has to know them."""
    try:
        name, value, samples = event
        return str(name), value if isinstance(value, int | float) else float(value), index(samples)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"an event is (name, number, global samples), not {event!r}: {error}") from error
