"""How long collectives take: the log of single ones, and what overlap with other work hides of them.

The log has counts, sizes, latencies and bandwidths. What it times, and the synchronisation that a fair time needs, is
decided here; the collectives only ask. Nothing is timed, and no device is stopped, for operations that nobody wants to
see. `Exposure` stops no device: an operation is in flight from the moment it is issued until its result was waited for,
the wait itself is exposed, and the rest is hidden. Marks are set on the device's own queue, and read when it has passed
them.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from mizzen.accelerator import Accelerator, Event
from mizzen.accelerator.streams import HostEvent
from mizzen.config.observe import CommsLoggerConfig
from mizzen.log import say
from mizzen.monitor.report import Meter, StepReport

TRIMMED: Final = 0.1
"""The share of measurements that a mean leaves out at either end."""
GATHERING: Final = ("all_gather", "reduce_scatter", "allgather")
COLUMNS: Final = (
    "Comm. Op",
    "Message Size",
    "CallCount",
    "Total Latency(ms)",
    "Avg Latency(ms)",
    "tput_avg (Gbps)",
    "busbw_avg (Gbps)",
)
STRAGGLER_COLUMNS: Final = (
    "Comm. Op",
    "Message Size",
    "CallCount",
    "Total comm lat(ms)",
    "Total straggler(ms)",
    "Avg comm lat(ms)",
    "Avg straggler(ms)",
)


@dataclass(slots=True)
class Measured:
    """All measurements of one operation at one message size."""

    latencies: list[float] = field(default_factory=list)
    """Milliseconds."""
    algorithm: list[float] = field(default_factory=list)
    """Gbit/s as the caller sees it."""
    bus: list[float] = field(default_factory=list)
    """Gbit/s over the wires."""

    def summary(self, size: int) -> dict[str, Any]:
        """One row of the table."""
        return {
            "count": len(self.latencies),
            "total_latency_ms": sum(self.latencies),
            "avg_latency_ms": trimmed_mean(self.latencies),
            "tput_avg_gbps": trimmed_mean(self.algorithm),
            "busbw_avg_gbps": trimmed_mean(self.bus),
            "msg_size_bytes": size,
            "msg_size_str": in_words(size),
        }


class CommLog:
    """What has been measured since the log was last reset."""

    def __init__(self, settings: CommsLoggerConfig | None = None) -> None:
        self.settings = settings or CommsLoggerConfig.model_construct()
        self.records: dict[str, dict[int, Measured]] = {}

    def name_for(self, operation: str, *, prof: bool = False, log_name: str = "", debug: str = "") -> str:
        """The name under which an operation is to be logged; empty when it is not."""
        settings = self.settings
        if not settings.enabled:
            return ""
        name = log_name or operation
        if not (settings.prof_all or prof or name in settings.prof_ops or operation in settings.prof_ops):
            return ""
        return f"{name} | [Caller Func: {debug or caller()}]" if settings.debug else name

    def add(self, name: str, operation: str, *, milliseconds: float, size: int, ranks: int) -> None:
        """Record one operation; `size` is that of the message, `ranks` the size of the group."""
        size = message_size(operation, size, ranks)
        algorithm, bus = bandwidth(operation, milliseconds=milliseconds, size=size, ranks=ranks)
        measured = self.records.setdefault(name, {}).setdefault(size, Measured())
        measured.latencies.append(milliseconds)
        measured.algorithm.append(algorithm)
        measured.bus.append(bus)
        if self.settings.verbose:
            say(
                f"comm op: {name} | time (ms): {milliseconds:.2f} | msg size: {in_words(size)} | "
                f"algbw (Gbps): {algorithm:.2f} | busbw (Gbps): {bus:.2f}"
            )

    def reset(self) -> None:
        """Forget all measurements."""
        self.records.clear()

    def start_profiling_comms(self) -> None:
        """Log every operation from here on."""
        self.settings = self.settings.model_copy(update={"prof_all": True})

    def stop_profiling_comms(self) -> None:
        """Log only the operations that are listed by name."""
        self.settings = self.settings.model_copy(update={"prof_all": False})

    def start_profiling_op(self, names: Iterable[str]) -> None:
        """List further operations by name."""
        self._list(dict.fromkeys((*self.settings.prof_ops, *names)))

    def stop_profiling_op(self, names: Iterable[str]) -> None:
        """Take operations off the list."""
        unwanted = set(names)
        self._list(name for name in self.settings.prof_ops if name not in unwanted)

    def _list(self, names: Iterable[str]) -> None:
        self.settings = self.settings.model_copy(update={"prof_ops": tuple(names)})

    def get_raw_data(self) -> dict[str, dict[int, Measured]]:
        """All measurements, by operation and message size."""
        return {name: dict(sizes) for name, sizes in self.records.items()}

    def get_operation_summary(self, name: str) -> dict[int, dict[str, Any]]:
        """The rows of one operation, by message size."""
        return {size: measured.summary(size) for size, measured in sorted(self.records.get(name, {}).items())}

    def summary(self) -> dict[str, dict[int, dict[str, Any]]]:
        """All rows."""
        return {name: self.get_operation_summary(name) for name in self.records}

    def stragglers(
        self, gather: Callable[[Any], list[Any]], reduce_min: Callable[[torch.Tensor], None]
    ) -> dict[str, dict[int, dict[str, Any]]]:
        """How long this rank waited for the last one, per operation and size. Every rank has to call this.

        The fastest rank came last and waited for nobody, so the least latency is the time of the operation itself.
        Ranks may have logged different operations: only what all of them have is compared.
        """
        counts = {(name, size): len(m.latencies) for name, sizes in self.records.items() for size, m in sizes.items()}
        theirs: list[dict[tuple[str, int], int]] = gather(counts)
        common = {key: min(other.get(key, 0) for other in theirs) for key in sorted(counts)}
        own = [latency for (name, size), n in common.items() for latency in self.records[name][size].latencies[:n]]
        least = torch.tensor(own, dtype=torch.float64)
        if own:
            reduce_min(least)
        found: dict[str, dict[int, dict[str, Any]]] = {}
        start = 0
        for (name, size), n in common.items():
            if n:
                pure, mine = least[start : start + n].tolist(), own[start : start + n]
                found.setdefault(name, {})[size] = _straggler_row(size, pure, mine)
                start += n
        return found


def _straggler_row(size: int, pure: Sequence[float], mine: Sequence[float]) -> dict[str, Any]:
    waited = [own - least for own, least in zip(mine, pure, strict=True)]
    return {
        "count": len(pure),
        "total_comm_lat_ms": sum(pure),
        "total_straggler_ms": sum(waited),
        "avg_comm_lat_ms": trimmed_mean(pure),
        "avg_straggler_ms": trimmed_mean(waited),
        "msg_size_bytes": size,
        "msg_size_str": in_words(size),
    }


class Timing:
    """The time of one operation that is to be logged, from its issue to the moment its result is there."""

    __slots__ = ("_device", "_log", "_name", "_operation", "_ranks", "_size", "_started")

    def __init__(self, log: CommLog, name: str, operation: str, payload: Sequence[torch.Tensor], ranks: int) -> None:
        self._log, self._name, self._operation, self._ranks = log, name, operation, ranks
        self._size = sum(tensor.numel() * tensor.element_size() for tensor in payload)
        self._device = payload[0].device if payload else torch.device("cpu")
        _synchronize(self._device)
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Log it."""
        _synchronize(self._device)
        milliseconds = 1000 * (time.perf_counter() - self._started)
        self._log.add(self._name, self._operation, milliseconds=milliseconds, size=self._size, ranks=self._ranks)


def _synchronize(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)


def message_size(operation: str, size: int, ranks: int) -> int:
    """Bytes that count as the message: a gather or scatter of shards moves as many shards as there are ranks."""
    return size * ranks if operation.startswith(GATHERING) else size


def bandwidth(operation: str, *, milliseconds: float, size: int, ranks: int) -> tuple[float, float]:
    """Gbit/s as (algorithm, bus) of a message of `size` bytes among so many ranks."""
    rate = size * 8 / 1e6 / milliseconds if milliseconds > 0 else 0.0
    share = (ranks - 1) / ranks
    if "all_reduce" in operation:
        return 2 * rate, 2 * rate * share
    if operation.startswith((*GATHERING, "all_to_all")):
        return rate, rate * share
    return rate, rate


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the smallest and the largest tenth."""
    cut = int(TRIMMED * len(values))
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept) if kept else 0.0


def in_words(size: float) -> str:
    """`1536` as `1.5 KB`."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2):g} {unit}"
        size /= 1024
    return f"{round(size, 2):g} PB"


def caller() -> str:
    """The name of the function outside this library that is calling it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("mizzen."):
        frame = frame.f_back
    return frame.f_code.co_name


def table(rows: Mapping[str, Mapping[int, Mapping[str, Any]]], columns: Sequence[str]) -> str:
    """A summary, or an analysis of stragglers, as aligned text: the operation once, then a line per message size."""
    lines = [list(columns)]
    for name, sizes in rows.items():
        lines.append([name, *[""] * (len(columns) - 1)])
        for row in sizes.values():
            *numbers, _, words = row.values()
            cells = (f"{number:.2f}" if isinstance(number, float) else str(number) for number in numbers)
            lines.append(["", words, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (map(str.ljust, line, widths) for line in lines)
    return "\n".join("  ".join(line).rstrip() for line in padded)


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
